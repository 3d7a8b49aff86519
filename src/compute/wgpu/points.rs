//! Rows on the adapter, and the operations that describe or change them.

use std::ops::Range;

use ndarray::{Array2, ArrayView2, ArrayView3, Axis, s};

use super::super::device::{Assignment, Clusters, Drawn, Points, SignSums, Statistic};
use super::super::draw::{Wheel, draw_rows};
use super::clusters::WgpuClusters;
use super::context::{Batch, WgpuContext};
use super::{BLOCK, THREADS, TILE, flat, kernels, rows_per_buffer};
use crate::error::Result;

/// Bits per digit of the radix select.
const DIGIT: u32 = 4;
/// Number of different digits.
const DIGITS: usize = 1 << DIGIT;
/// Channels whose digits one workgroup counts.
const COUNTED_CHANNELS: usize = 64;
/// Words per sign pattern in a partial result: four sums and a count.
const PATTERN_WORDS: usize = 5;

/// [`Points`] in buffers of an adapter.
pub(super) struct WgpuPoints<'a> {
    pub(super) context: &'a WgpuContext,
    dim: (usize, usize, usize),
    /// The slabs of head 0, then those of head 1, and so on.
    pub(super) slabs: Vec<Slab>,
    pub(super) heads: Vec<WgpuClusters>,
}

/// Consecutive rows of one head.
pub(super) struct Slab {
    pub head: usize,
    /// The range of the slab's rows within the head.
    pub rows: Range<usize>,
    /// `[rows,d]`.
    pub x: wgpu::Buffer,
    /// Centroid, score and distance of each row, `[rows,3]`; `None` before there are centroids.
    pub owners: Option<wgpu::Buffer>,
}

impl Slab {
    /// Returns the part of `rows` that lies in this slab, relative to the slab's first row.
    fn part(&self, rows: &Range<usize>) -> Range<usize> {
        let start = rows.start.max(self.rows.start);
        let end = rows.end.min(self.rows.end).max(start);
        start - self.rows.start..end - self.rows.start
    }
}

impl<'a> WgpuPoints<'a> {
    /// Copies the rows, `[b,n,d]`, to the adapter.
    pub fn new(context: &'a WgpuContext, x: ArrayView3<f32>) -> Result<Self> {
        let (b, n, d) = x.dim();
        let size = rows_per_buffer(context, 4 * d.max(3))?;
        let slabs = context.work("take in rows", |_| {
            let mut slabs = Vec::new();
            for head in 0..b {
                for start in (0..n).step_by(size) {
                    let rows = start..n.min(start + size);
                    let x = x.slice(s![head, rows.clone(), ..]);
                    slabs.push(Slab {
                        head,
                        rows,
                        x: context.upload(&flat(x))?,
                        owners: None,
                    });
                }
            }
            Ok(slabs)
        })?;
        Ok(Self {
            context,
            dim: (b, n, d),
            slabs,
            heads: (0..b).map(|_| WgpuClusters::default()).collect(),
        })
    }

    /// Returns the sum of each channel over a range of rows, `[b,d]`; with `squares`, the sum of the squares. Blocks of
    /// rows are summed in f32, and the blocks in f64.
    fn sums(&self, rows: Range<usize>, squares: bool) -> Result<Array2<f64>> {
        let (b, _, d) = self.dim;
        let mut sums = Array2::<f64>::zeros((b, d));
        let parts = self.slabs.iter().map(|slab| (slab, slab.part(&rows)));
        let parts: Vec<_> = parts.filter(|(_, part)| !part.is_empty()).collect();
        let partials: Vec<Vec<f32>> = self.context.work("sum channels", |batch| {
            let mut partials = Vec::new();
            for (slab, part) in &parts {
                let blocks = part.len().div_ceil(BLOCK);
                let partial = self.context.buffer((4 * blocks * d) as u64)?;
                kernels::ChannelStatisticSums {
                    first_row: part.start,
                    rows: part.len(),
                    d,
                    variant: usize::from(squares),
                    x: &slab.x,
                    partial: &partial,
                }
                .run(batch, (blocks * d).div_ceil(THREADS), THREADS * BLOCK);
                partials.push(partial);
            }
            batch.read(&partials)
        })?;
        for ((slab, _), partial) in parts.iter().zip(partials) {
            let mut sum = sums.row_mut(slab.head);
            for block in partial.chunks_exact(d) {
                sum.iter_mut().zip(block).for_each(|(s, v)| *s += f64::from(*v));
            }
        }
        Ok(sums)
    }

    /// Returns the value of the given rank in each channel over a range of rows, `[b,d]`.
    fn ranked(&self, rows: Range<usize>, rank: usize, magnitudes: bool) -> Result<Array2<f32>> {
        let (b, _, d) = self.dim;
        let found: Vec<Vec<[u32; 2]>> = self.context.work("rank channels", |batch| {
            let mut searches = Vec::new();
            for head in 0..b {
                let search = self.context.upload(&vec![[0, rank as u32]; d])?;
                let counts = self.context.buffer((4 * d * DIGITS) as u64)?;
                let slabs: Vec<&Slab> = self.slabs.iter().filter(|slab| slab.head == head).collect();
                for shift in (0..u32::BITS).step_by(DIGIT as usize).rev() {
                    count_digit(batch, &slabs, &rows, d, shift, magnitudes, [&search, &counts]);
                    kernels::ChannelStatisticPick {
                        d,
                        shift: shift as usize,
                        search: &search,
                        counts: &counts,
                    }
                    .run(batch, d.div_ceil(THREADS), DIGITS);
                }
                searches.push(search);
            }
            batch.read(&searches)
        })?;
        // The inverse of `sort_key` in the shader.
        let value = |key: u32| match (magnitudes, key >> 31) {
            (true, _) => f32::from_bits(key),
            (false, 0) => f32::from_bits(!key),
            (false, _) => f32::from_bits(key & 0x7fff_ffff),
        };
        let values = found.iter().flatten().map(|[key, _]| value(*key));
        Ok(Array2::from_shape_vec((b, d), values.collect())?)
    }
}

/// Counts the values of one digit, per channel, over a range of rows of one head.
fn count_digit(
    batch: &mut Batch,
    slabs: &[&Slab],
    rows: &Range<usize>,
    d: usize,
    shift: u32,
    magnitudes: bool,
    [search, counts]: [&wgpu::Buffer; 2],
) {
    let above = u32::MAX.checked_shl(shift + DIGIT).unwrap_or(0);
    for slab in slabs {
        let part = slab.part(rows);
        let groups = part.len().div_ceil(BLOCK) * d.div_ceil(COUNTED_CHANNELS);
        kernels::ChannelStatisticHistogram {
            first_row: part.start,
            rows: part.len(),
            d,
            variant: usize::from(magnitudes),
            shift: shift as usize,
            above: above as usize,
            x: &slab.x,
            search,
            counts,
        }
        .run(batch, groups, BLOCK * COUNTED_CHANNELS);
    }
}

impl Points for WgpuPoints<'_> {
    fn dim(&self) -> (usize, usize, usize) {
        self.dim
    }

    fn whiten(&mut self, chol: ArrayView3<f32>) -> Result<()> {
        let d = self.dim.2;
        let Self { context, slabs, .. } = self;
        context.work("whiten rows", |batch| {
            for (head, chol) in chol.axis_iter(Axis(0)).enumerate() {
                let chol = context.upload(&flat(chol))?;
                for slab in slabs.iter_mut().filter(|slab| slab.head == head) {
                    let whitened = context.buffer(slab.x.size())?;
                    let rows = slab.rows.len();
                    kernels::Whiten {
                        rows,
                        d,
                        x: &slab.x,
                        chol: &chol,
                        whitened: &whitened,
                    }
                    .run(batch, rows.div_ceil(TILE) * d.div_ceil(TILE), TILE * TILE * d);
                    slab.x = whitened;
                }
            }
            Ok(())
        })
    }

    fn channel_statistic(&mut self, rows: Range<usize>, what: Statistic) -> Result<Array2<f32>> {
        let (b, _, d) = self.dim;
        let count = rows.len();
        match what {
            Statistic::Mean => {
                let sums = self.sums(rows, false)?;
                Ok(sums.mapv(|sum| (sum / count.max(1) as f64) as f32))
            }
            Statistic::Ranked(rank) | Statistic::RankedMagnitude(rank) if rank >= count => {
                Ok(Array2::zeros((b, d)))
            }
            Statistic::Ranked(rank) => self.ranked(rows, rank, false),
            Statistic::RankedMagnitude(rank) => self.ranked(rows, rank, true),
        }
    }

    fn subtract(&mut self, rows: Range<usize>, centers: ArrayView2<f32>) -> Result<()> {
        let d = self.dim.2;
        self.context.work("center rows", |batch| {
            for (head, centers) in centers.rows().into_iter().enumerate() {
                let centers = self.context.upload(&centers.to_vec())?;
                for slab in self.slabs.iter().filter(|slab| slab.head == head) {
                    let part = slab.part(&rows);
                    kernels::Subtract {
                        first_row: part.start,
                        rows: part.len(),
                        d,
                        x: &slab.x,
                        centers: &centers,
                    }
                    .run(batch, (part.len() * d).div_ceil(THREADS), THREADS);
                }
            }
            Ok(())
        })
    }

    fn square_sum(&mut self) -> Result<Vec<f64>> {
        let sums = self.sums(0..self.dim.1, true)?;
        Ok(sums.rows().into_iter().map(|channels| channels.sum()).collect())
    }

    fn sign_sums(&mut self) -> Result<Vec<SignSums>> {
        let (b, _, d) = self.dim;
        let empty = SignSums {
            sums: vec![0.0; 16 * d],
            counts: vec![0; 4 * d],
        };
        let mut out = vec![empty; b];
        let partials: Vec<Vec<u32>> = self.context.work("count sign patterns", |batch| {
            let mut partials = Vec::new();
            for slab in &self.slabs {
                let threads = slab.rows.len().div_ceil(BLOCK) * d * 4;
                let partial = self.context.buffer((4 * PATTERN_WORDS * threads) as u64)?;
                kernels::SignSums {
                    rows: slab.rows.len(),
                    d,
                    x: &slab.x,
                    partial: &partial,
                }
                .run(batch, threads.div_ceil(THREADS), THREADS * BLOCK * 4);
                partials.push(partial);
            }
            batch.read(&partials)
        })?;
        for (slab, partial) in self.slabs.iter().zip(partials) {
            let SignSums { sums, counts } = &mut out[slab.head];
            for (i, cell) in partial.chunks_exact(PATTERN_WORDS).enumerate() {
                let pattern = i % counts.len();
                counts[pattern] += u64::from(cell[4]);
                for (sum, bits) in sums[pattern * 4..][..4].iter_mut().zip(cell) {
                    *sum += f64::from(f32::from_bits(*bits));
                }
            }
        }
        Ok(out)
    }

    fn seed(&mut self, size: usize, first: &[u32]) -> Result<()> {
        let first: Vec<Vec<u32>> = first.iter().map(|row| vec![*row]).collect();
        let values = self.gather(&first)?;
        self.allocate(size)?;
        for (head, values) in self.heads.iter_mut().zip(values) {
            head.centroids = values;
            head.changed = true;
        }
        let fresh = vec![0..1; self.heads.len()];
        self.challenge(&fresh, true)
    }

    /// Draws on the host, from its copy of the distances. The candidates depend on the uniform numbers and the
    /// distances alone, so all candidate rows are fetched at once.
    fn draw(&mut self, batch: &[usize], uniforms: &[Vec<f64>]) -> Result<Vec<Drawn>> {
        let d = self.dim.2;
        let wheels: Vec<Wheel> = self.heads.iter().map(|h| Wheel::new(&h.distances)).collect();
        let of_head = |(i, wheel): (usize, &Wheel)| {
            let mut rows: Vec<u32> = wheel.candidates(batch[i], &uniforms[i]).collect();
            rows.sort_unstable();
            rows.dedup();
            rows
        };
        let candidates: Vec<Vec<u32>> = wheels.iter().enumerate().map(of_head).collect();
        let values = self.gather(&candidates)?;
        let (mut drawn, mut fresh) = (Vec::new(), Vec::new());
        for (i, head) in self.heads.iter_mut().enumerate() {
            let row = |row: u32| {
                let at = candidates[i].partition_point(|c| *c < row);
                &values[i][at * d..][..d]
            };
            let (rows, used) = draw_rows(row, &wheels[i], &head.distances, batch[i], &uniforms[i]);
            let (first, centroids) = (head.centroids.len() / d, rows.len());
            rows.iter().for_each(|r| head.centroids.extend(row(*r)));
            fresh.push(first..first + centroids);
            drawn.push(Drawn { centroids, used });
        }
        self.challenge(&fresh, false)?;
        Ok(drawn)
    }

    fn assign(&mut self, centroids: ArrayView3<f32>) -> Result<()> {
        for (head, centroids) in self.heads.iter_mut().zip(centroids.axis_iter(Axis(0))) {
            head.centroids = flat(centroids);
            head.changed = true;
        }
        self.allocate(centroids.len_of(Axis(1)))?;
        let all = vec![true; self.heads.len()];
        self.assign_anew(&all)
    }

    /// Heads in which no row has changed its centroid are left out.
    fn update(&mut self) -> Result<()> {
        let which: Vec<bool> = self.heads.iter().map(|head| head.changed).collect();
        self.move_centroids(&which)?;
        self.heads.iter_mut().for_each(|head| head.changed = false);
        self.assign_anew(&which)
    }

    fn hand_over(&mut self, head: usize, rows: &[(u32, u32)]) -> Result<()> {
        let head = &mut self.heads[head];
        for (row, code) in rows {
            head.codes[*row as usize] = *code;
            head.changed = true;
        }
        Ok(())
    }

    fn assignment(&mut self) -> Result<Vec<Assignment>> {
        Ok(self.heads.iter().map(WgpuClusters::assignment).collect())
    }

    fn clusters(&mut self, head: usize) -> Result<Clusters> {
        self.heads[head].clusters(self.dim.2)
    }

    fn rows(&mut self, head: usize, rows: &[u32]) -> Result<Array2<f32>> {
        let mut wanted = vec![Vec::new(); self.heads.len()];
        wanted[head] = rows.to_vec();
        let values = self.gather(&wanted)?.swap_remove(head);
        Ok(Array2::from_shape_vec((rows.len(), self.dim.2), values)?)
    }
}

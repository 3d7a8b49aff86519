//! Clusters of the rows on the adapter: seeding, assignment and Lloyd passes.

use std::ops::Range;

use ndarray::Array2;

use super::super::cpu::{count_codes, group_by_code};
use super::super::device::{Assignment, Clusters, Points};
use super::context::Batch;
use super::points::{Slab, WgpuPoints};
use super::{BLOCK, THREADS, TILE, kernels};
use crate::error::{Error, Result};

/// So few centroids that a thread scores a row against all of them.
const FEW: usize = TILE / 4;

/// The clusters of one head, with the codes and distances of the adapter's last assignment.
#[derive(Default)]
pub(super) struct WgpuClusters {
    /// `[M,d]`; fewer rows while seeding.
    pub centroids: Vec<f32>,
    pub codes: Vec<u32>,
    pub distances: Vec<f32>,
    /// Whether a row's centroid has changed since the centroids were last moved.
    pub changed: bool,
    size: usize,
    panels: Vec<Panel>,
}

/// Consecutive centroids that share a buffer.
struct Panel {
    /// The numbers of the centroids.
    range: Range<usize>,
    /// `[range,d]`.
    centroids: wgpu::Buffer,
    /// `-||c||²/2`, `[range]`.
    biases: wgpu::Buffer,
}

/// The centroid of one row, as the shader writes it.
#[repr(C)]
#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]
struct Owner {
    /// The number of the centroid plus 1; 0 for no centroid.
    centroid: u32,
    score: f32,
    distance: f32,
}

/// The rows of a slab, sorted by centroid and cut into ranges of at most [`BLOCK`] rows of the same centroid.
struct Segments {
    /// The rows of the slab, sorted by centroid.
    members: Vec<u32>,
    /// Start and end of each segment in `members`.
    ranges: Vec<[u32; 2]>,
    /// The centroid of each segment.
    centroids: Vec<u32>,
}

impl Segments {
    /// Sorts the rows by code, ascending within a centroid, and cuts them into segments.
    fn new(codes: &[u32], size: usize) -> Self {
        let (starts, members) = group_by_code(codes.iter().copied(), size);
        let (mut ranges, mut centroids) = (Vec::new(), Vec::new());
        for (c, range) in (0..).zip(starts.windows(2)) {
            for start in (range[0]..range[1]).step_by(BLOCK) {
                ranges.push([start as u32, range[1].min(start + BLOCK) as u32]);
                centroids.push(c);
            }
        }
        Self {
            members,
            ranges,
            centroids,
        }
    }
}

impl WgpuClusters {
    pub fn assignment(&self) -> Assignment {
        Assignment {
            inertia: self.distances.iter().map(|v| f64::from(*v)).sum(),
            counts: count_codes(self.codes.iter().copied(), self.size),
            changed: self.changed,
        }
    }

    pub fn clusters(&self, d: usize) -> Result<Clusters> {
        Ok(Clusters {
            centroids: Array2::from_shape_vec((self.centroids.len() / d, d), self.centroids.clone())?,
            codes: self.codes.clone(),
            distances: self.distances.clone(),
        })
    }

    /// Stores the centroids and distances that the shader found for the given rows.
    fn take(&mut self, rows: Range<usize>, owners: &[Owner]) -> Result<()> {
        for (i, owner) in rows.zip(owners) {
            let code = owner.centroid.wrapping_sub(1);
            if code as usize >= self.size {
                // The shader never writes this value, so the dispatch did not run, or not to its end.
                return Err(Error::device("the adapter left rows without a centroid"));
            }
            self.changed |= self.codes[i] != code;
            (self.codes[i], self.distances[i]) = (code, owner.distance);
        }
        Ok(())
    }
}

impl WgpuPoints<'_> {
    /// Makes room on the adapter for `size` centroids per head.
    pub fn allocate(&mut self, size: usize) -> Result<()> {
        let (_, n, d) = self.dim();
        let context = self.context;
        let most = context.capacity(4 * d)?;
        context.work("make room for centroids", |_| {
            for slab in self.slabs.iter_mut().filter(|slab| slab.owners.is_none()) {
                let bytes = size_of::<Owner>() * slab.rows.len();
                slab.owners = Some(context.buffer(bytes as u64)?);
            }
            for head in &mut self.heads {
                head.codes.resize(n, 0);
                head.distances.resize(n, 0.0);
                if head.size == size {
                    continue;
                }
                head.size = size;
                head.panels.clear();
                for start in (0..size).step_by(most) {
                    let range = start..size.min(start + most);
                    head.panels.push(Panel {
                        centroids: context.buffer((4 * d * range.len()) as u64)?,
                        biases: context.buffer((4 * range.len()) as u64)?,
                        range,
                    });
                }
            }
            Ok(())
        })
    }

    /// Assigns the rows of the selected heads to the centroids that the host holds.
    pub fn assign_anew(&mut self, which: &[bool]) -> Result<()> {
        let d = self.dim().2;
        let all = self.heads.iter().zip(which);
        let all = all.map(|(head, which)| 0..if *which { head.centroids.len() / d } else { 0 });
        self.challenge(&all.collect::<Vec<_>>(), true)
    }

    /// Sends the centroids `fresh[head]` to the adapter, and assigns to them the rows that they are nearer to than the
    /// row's present centroid. With `anew`, the rows have no present centroid.
    pub fn challenge(&mut self, fresh: &[Range<usize>], anew: bool) -> Result<()> {
        let d = self.dim().2;
        let context = self.context;
        context.work("assign rows to centroids", |batch| {
            let mut asked: Vec<(&Slab, &wgpu::Buffer)> = Vec::new();
            for (i, (head, fresh)) in self.heads.iter().zip(fresh).enumerate() {
                if fresh.is_empty() {
                    continue;
                }
                for panel in &head.panels {
                    let part = overlap(&panel.range, fresh);
                    if part.is_empty() {
                        continue;
                    }
                    let values = &head.centroids[part.start * d..part.end * d];
                    let biases: Vec<f32> = values.chunks_exact(d).map(bias).collect();
                    let first = part.start - panel.range.start;
                    context.write(&panel.centroids, first * d, values);
                    context.write(&panel.biases, first, &biases);
                }
                for slab in self.slabs.iter().filter(|slab| slab.head == i) {
                    let owners = slab
                        .owners
                        .as_ref()
                        .expect("room for owners is made before rows are assigned");
                    if anew {
                        batch.clear(owners);
                    }
                    for panel in &head.panels {
                        meet(batch, slab, owners, panel, overlap(&panel.range, fresh), d);
                    }
                    asked.push((slab, owners));
                }
            }
            let found = batch.read::<Owner>(asked.iter().map(|(_, owners)| *owners))?;
            for ((slab, _), owners) in asked.iter().zip(found) {
                self.heads[slab.head].take(slab.rows.clone(), &owners)?;
            }
            Ok(())
        })
    }

    /// Moves the centroids of the selected heads to the means of their rows.
    pub fn move_centroids(&mut self, which: &[bool]) -> Result<()> {
        let d = self.dim().2;
        let slabs: Vec<&Slab> = self.slabs.iter().filter(|slab| which[slab.head]).collect();
        let sort = |slab: &&Slab| {
            let head = &self.heads[slab.head];
            Segments::new(&head.codes[slab.rows.clone()], head.size)
        };
        let segments: Vec<Segments> = slabs.iter().map(sort).collect();
        let sums = self.sum_segments(&slabs, &segments)?;
        let none = |head: &WgpuClusters| vec![0.0f64; head.centroids.len()];
        let mut totals: Vec<Vec<f64>> = self.heads.iter().map(none).collect();
        for ((slab, segments), sums) in slabs.iter().zip(&segments).zip(sums) {
            let total = &mut totals[slab.head];
            for (c, sum) in segments.centroids.iter().zip(sums.chunks_exact(d)) {
                let total = &mut total[*c as usize * d..][..d];
                total.iter_mut().zip(sum).for_each(|(t, v)| *t += f64::from(*v));
            }
        }
        let moving = self.heads.iter_mut().zip(totals).zip(which);
        for ((head, total), _) in moving.filter(|(_, which)| **which) {
            let counts = head.assignment().counts;
            let rows = head.centroids.chunks_exact_mut(d).zip(total.chunks_exact(d));
            for ((centroid, total), count) in rows.zip(counts).filter(|(_, count)| *count > 0) {
                let mean = total.iter().map(|sum| (sum / f64::from(count)) as f32);
                centroid.iter_mut().zip(mean).for_each(|(c, mean)| *c = mean);
            }
        }
        Ok(())
    }

    /// Returns the sums of the segments of each slab, `[segments,d]` each.
    fn sum_segments(&self, slabs: &[&Slab], segments: &[Segments]) -> Result<Vec<Vec<f32>>> {
        let (context, d) = (self.context, self.dim().2);
        let most = context.capacity(4 * d.max(2))?;
        context.work("sum rows", |batch| {
            let (mut parts, mut sums) = (Vec::new(), Vec::new());
            for (i, (slab, segments)) in slabs.iter().zip(segments).enumerate() {
                if segments.members.is_empty() {
                    continue;
                }
                let members = context.upload(&segments.members)?;
                for ranges in segments.ranges.chunks(most) {
                    let sum = context.buffer((4 * d * ranges.len()) as u64)?;
                    let count = ranges.len();
                    kernels::Means {
                        count,
                        d,
                        x: &slab.x,
                        members: &members,
                        segments: &context.upload(ranges)?,
                        sums: &sum,
                    }
                    .run(batch, (count * d).div_ceil(THREADS), THREADS * BLOCK);
                    parts.push(i);
                    sums.push(sum);
                }
            }
            let mut out = vec![Vec::new(); slabs.len()];
            let values = batch.read::<f32>(&sums)?;
            for (i, values) in parts.into_iter().zip(values) {
                out[i].extend(values);
            }
            Ok(out)
        })
    }

    /// Returns the wanted rows of each head, `[rows,d]` per head.
    pub fn gather(&self, wanted: &[Vec<u32>]) -> Result<Vec<Vec<f32>>> {
        let d = self.dim().2;
        let mut out: Vec<Vec<f32>> = wanted.iter().map(|rows| vec![0.0; rows.len() * d]).collect();
        let slabs: Vec<&Slab> = self.slabs.iter().collect();
        let (mut places, mut segments) = (Vec::<Vec<usize>>::new(), Vec::new());
        for slab in &slabs {
            let rows = wanted[slab.head].iter().enumerate();
            let here = rows.filter(|(_, row)| slab.rows.contains(&(**row as usize)));
            let (at, members): (_, Vec<u32>) =
                here.map(|(at, row)| (at, row - slab.rows.start as u32)).unzip();
            places.push(at);
            // Each segment is one row, so that its sum is the row itself.
            segments.push(Segments {
                ranges: (0..members.len() as u32).map(|i| [i, i + 1]).collect(),
                centroids: Vec::new(),
                members,
            });
        }
        let values = self.sum_segments(&slabs, &segments)?;
        for ((slab, places), values) in slabs.iter().zip(places).zip(values) {
            for (at, value) in places.into_iter().zip(values.chunks_exact(d)) {
                out[slab.head][at * d..][..d].copy_from_slice(value);
            }
        }
        Ok(out)
    }
}

/// Lets the centroids in `part` of a panel challenge the present owners of the rows of a slab.
fn meet(batch: &mut Batch, slab: &Slab, owners: &wgpu::Buffer, panel: &Panel, part: Range<usize>, d: usize) {
    if part.is_empty() {
        return;
    }
    let (rows, base) = (slab.rows.len(), panel.range.start);
    let (start, end) = (part.start - base, part.end - base);
    let (x, centroids, biases) = (&slab.x, &panel.centroids, &panel.biases);
    if part.len() <= FEW {
        let few = kernels::NearestFew {
            rows,
            d,
            base,
            start,
            end,
            x,
            centroids,
            biases,
            owners,
        };
        return few.run(batch, rows.div_ceil(THREADS), THREADS * d * part.len());
    }
    let tiled = kernels::Nearest {
        rows,
        d,
        base,
        start,
        end,
        x,
        centroids,
        biases,
        owners,
    };
    tiled.run(
        batch,
        rows.div_ceil(TILE),
        TILE * d * part.len().next_multiple_of(TILE),
    );
}

/// Returns the intersection of two ranges, which may be empty.
fn overlap(a: &Range<usize>, b: &Range<usize>) -> Range<usize> {
    let start = b.start.clamp(a.start, a.end);
    start..b.end.clamp(start, a.end)
}

/// Returns `-||c||²/2`, summed in f64.
fn bias(c: &[f32]) -> f32 {
    (c.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>() * -0.5) as f32
}

//! The CPU as a [`Device`].
//!
//! Clustering runs on one fused kernel, which scores a tile of rows against a panel of centroids and keeps only each
//! row's best and second-best centroid, so the `n x M` matrix never exists. Two shortcuts make it fast, and neither
//! changes what the plain algorithm computes:
//!
//! - **The last batch of seeds is the first assignment**, so k-means++ costs little more than a random start.
//! - **Only moved centroids are compared again.** A centroid whose rows stayed the same does not move. A row whose own
//!   centroid still scores above its runner-up is compared only with the centroids that moved (Kaukoranta, Fränti and
//!   Nevalainen 2000, "A fast exact GLA based on code vector activity detection"). The codes are those of a full
//!   search, bit for bit.
//!
//! Results are the same bytes for any number of threads, and on all machines that have a fused multiply-add: rows are
//! independent of each other, and every sum has a fixed order.

mod assign;
pub(crate) mod distances;
mod scan;

use std::ops::Range;

use ndarray::{Array1, Array2, Array3, ArrayView1, ArrayView2, ArrayView3, Axis, s};
use rayon::prelude::*;

use super::device::{Assignment, Clusters, Device, Drawn, Points, SignSums, Statistic};
use super::draw::{Wheel, draw_rows};
use super::gemm;
use super::layout::elements;
use crate::error::Result;
use assign::{Assigned, absorb, reassign};
pub(crate) use assign::{CHUNK, distances_to, search};
pub(crate) use scan::Panels;
use scan::{FEW, row};

/// Rows that are summed in f32 before the result is added to the f64 sums.
const MOMENT_ROWS: usize = 256;
/// Rows that one task whitens.
const WHITEN_ROWS: usize = 1024;
/// The most bytes of rows to cluster at once; a single larger head is clustered alone.
const AT_ONCE_BYTES: usize = 1 << 30;
/// Channels that share a sign pattern.
const GROUP: usize = 4;
/// Sign patterns of a group of channels.
const PATTERNS: usize = 1 << GROUP;

/// The processor of this machine, used through the threads of the current rayon pool.
#[derive(Clone, Copy, Debug)]
pub struct Cpu;

impl Device for Cpu {
    fn name(&self) -> &'static str {
        "cpu"
    }

    /// One head per thread, so that threads rarely wait for each other, within `AT_ONCE_BYTES` of rows.
    fn heads_at_once(&self, n: usize, d: usize, _size: usize) -> usize {
        let fitting = AT_ONCE_BYTES / (n * d * size_of::<f32>()).max(1);
        rayon::current_num_threads().min(fitting).max(1)
    }

    fn second_moment(&self, q_rope: ArrayView3<f32>) -> Result<Array3<f64>> {
        let (b, _, d) = q_rope.dim();
        let mut sums = Array3::zeros((b, d, d));
        let heads = sums.axis_iter_mut(Axis(0)).into_par_iter();
        heads.zip(q_rope.axis_iter(Axis(0))).for_each(|(mut sum, q)| {
            let mut partial = Array2::<f32>::zeros((d, d));
            for q in q.axis_chunks_iter(Axis(0), MOMENT_ROWS) {
                gemm(partial.view_mut(), false, q.t(), q);
                sum.zip_mut_with(&partial, |s: &mut f64, p| *s += f64::from(*p));
            }
        });
        Ok(sums)
    }

    fn points(&self, x: Array3<f32>) -> Result<Box<dyn Points + '_>> {
        let x = if x.is_standard_layout() {
            x
        } else {
            x.as_standard_layout().into_owned()
        };
        let heads = (0..x.len_of(Axis(0))).map(|_| CpuClusters::default()).collect();
        Ok(Box::new(CpuPoints { x, heads }))
    }
}

/// [`Points`] in the machine's memory.
struct CpuPoints {
    /// `[b,n,d]`, in standard layout.
    x: Array3<f32>,
    heads: Vec<CpuClusters>,
}

/// The clusters of one head.
#[derive(Default)]
struct CpuClusters {
    /// `[M,d]`; fewer rows while seeding.
    centroids: Vec<f32>,
    rows: Vec<Assigned>,
    /// Which centroids have gained or lost rows since they were last moved.
    dirty: Vec<bool>,
}

impl CpuPoints {
    /// Returns the rows and the clusters of each head.
    fn each(&mut self) -> impl IndexedParallelIterator<Item = (&[f32], &mut CpuClusters)> {
        let (_, n, d) = self.x.dim();
        let x = elements(&self.x);
        x.par_chunks_exact((n * d).max(1)).zip(&mut self.heads)
    }
}

impl Points for CpuPoints {
    fn dim(&self) -> (usize, usize, usize) {
        self.x.dim()
    }

    fn whiten(&mut self, chol: ArrayView3<f32>) -> Result<()> {
        for (mut x, chol) in self.x.axis_iter_mut(Axis(0)).zip(chol.axis_iter(Axis(0))) {
            let chunks = x.axis_chunks_iter_mut(Axis(0), WHITEN_ROWS).into_par_iter();
            chunks.for_each(|mut x| {
                let k = x.to_owned();
                gemm(x.view_mut(), false, k.view(), chol);
            });
        }
        Ok(())
    }

    fn channel_statistic(&mut self, rows: Range<usize>, what: Statistic) -> Result<Array2<f32>> {
        let (b, _, d) = self.x.dim();
        let x = self.x.slice(s![.., rows, ..]);
        let values = x.outer_iter().flat_map(|x| match what {
            Statistic::Mean => row_mean(x).to_vec(),
            Statistic::Ranked(rank) => ranked(x, rank, |v| v),
            Statistic::RankedMagnitude(rank) => ranked(x, rank, f32::abs),
        });
        Ok(Array2::from_shape_vec((b, d), values.collect())?)
    }

    fn subtract(&mut self, rows: Range<usize>, centers: ArrayView2<f32>) -> Result<()> {
        for (mut x, centers) in self.x.axis_iter_mut(Axis(0)).zip(centers.rows()) {
            let mut x = x.slice_mut(s![rows.clone(), ..]);
            let chunks = x.axis_chunks_iter_mut(Axis(0), WHITEN_ROWS).into_par_iter();
            chunks.for_each(|mut x| x -= &centers);
        }
        Ok(())
    }

    fn square_sum(&mut self) -> Result<Vec<f64>> {
        let sum = |x: ArrayView2<f32>| x.iter().map(|v| f64::from(*v) * f64::from(*v)).sum();
        Ok(self.x.axis_iter(Axis(0)).map(sum).collect())
    }

    fn sign_sums(&mut self) -> Result<Vec<SignSums>> {
        Ok(self.x.axis_iter(Axis(0)).map(sign_sums).collect())
    }

    fn seed(&mut self, size: usize, first: &[u32]) -> Result<()> {
        let d = self.x.len_of(Axis(2));
        self.each().zip(first).for_each(|((x, head), first)| {
            head.centroids.clear();
            head.centroids.extend(row(x, *first, d));
            head.rows = vec![Assigned::NOWHERE; x.len() / d];
            head.dirty = vec![true; size];
            absorb(x, d, &mut head.rows, &head.centroids, 0);
        });
        Ok(())
    }

    fn draw(&mut self, batch: &[usize], uniforms: &[Vec<f64>]) -> Result<Vec<Drawn>> {
        let d = self.x.len_of(Axis(2));
        let heads = self.each().zip(batch).zip(uniforms);
        let drawn = heads.map(|(((x, head), batch), uniforms)| {
            let first = (head.centroids.len() / d) as u32;
            let distances: Vec<f32> = head.rows.iter().map(|r| r.distance).collect();
            let wheel = Wheel::new(&distances);
            let (rows, used) = draw_rows(|i| row(x, i, d), &wheel, &distances, *batch, uniforms);
            let fresh: Vec<f32> = rows.iter().flat_map(|i| row(x, *i, d)).copied().collect();
            if !fresh.is_empty() {
                absorb(x, d, &mut head.rows, &fresh, first);
            }
            head.centroids.extend(fresh);
            let centroids = rows.len();
            Drawn { centroids, used }
        });
        Ok(drawn.collect())
    }

    fn assign(&mut self, centroids: ArrayView3<f32>) -> Result<()> {
        let d = self.x.len_of(Axis(2));
        let centroids = centroids.axis_iter(Axis(0)).into_par_iter();
        self.each().zip(centroids).for_each(|((x, head), centroids)| {
            head.centroids = centroids.iter().copied().collect();
            head.rows = vec![Assigned::NOWHERE; x.len() / d];
            head.dirty = vec![true; centroids.nrows()];
            absorb(x, d, &mut head.rows, &head.centroids, 0);
        });
        Ok(())
    }

    fn update(&mut self) -> Result<()> {
        let d = self.x.len_of(Axis(2));
        let moving = self.each().filter(|(_, head)| head.dirty.contains(&true));
        moving.for_each(|(x, head)| {
            let before: Vec<u32> = head.rows.iter().map(|r| r.code).collect();
            let moved = move_centroids(x, d, &head.rows, &head.dirty, &mut head.centroids);
            reassign(x, d, &mut head.rows, &head.centroids, &moved);
            head.dirty.fill(false);
            let changed = head.rows.iter().zip(before);
            for (r, before) in changed.filter(|(r, before)| r.code != *before) {
                head.dirty[r.code as usize] = true;
                head.dirty[before as usize] = true;
            }
        });
        Ok(())
    }

    fn stop(&mut self, head: usize) {
        self.heads[head].dirty.fill(false);
    }

    fn hand_over(&mut self, head: usize, rows: &[(u32, u32)]) -> Result<()> {
        let head = &mut self.heads[head];
        for (row, code) in rows {
            let r = &mut head.rows[*row as usize];
            head.dirty[r.code as usize] = true;
            head.dirty[*code as usize] = true;
            // The row's bounds no longer hold. An infinite rival makes the next pass compare the row with all
            // centroids.
            (r.code, r.rival) = (*code, f32::INFINITY);
        }
        Ok(())
    }

    fn assignment(&mut self) -> Result<Vec<Assignment>> {
        let of = |head: &CpuClusters| Assignment {
            inertia: head.rows.iter().map(|r| f64::from(r.distance)).sum(),
            counts: count_codes(head.rows.iter().map(|r| r.code), head.dirty.len()),
            changed: head.dirty.contains(&true),
        };
        Ok(self.heads.par_iter().map(of).collect())
    }

    fn clusters(&mut self, head: usize) -> Result<Clusters> {
        let d = self.x.len_of(Axis(2));
        let head = &self.heads[head];
        Ok(Clusters {
            centroids: Array2::from_shape_vec((head.centroids.len() / d, d), head.centroids.clone())?,
            codes: head.rows.iter().map(|r| r.code).collect(),
            distances: head.rows.iter().map(|r| r.distance).collect(),
        })
    }

    fn rows(&mut self, head: usize, rows: &[u32]) -> Result<Array2<f32>> {
        let rows: Vec<usize> = rows.iter().map(|i| *i as usize).collect();
        Ok(self.x.index_axis(Axis(0), head).select(Axis(0), &rows))
    }
}

/// Returns the mean of the rows, summed in f64.
pub fn row_mean(x: ArrayView2<f32>) -> Array1<f32> {
    let mut sum = Array1::<f64>::zeros(x.ncols());
    for row in x.rows() {
        sum.zip_mut_with(&row, |s, v| *s += f64::from(*v));
    }
    sum.mapv(|s| (s / x.nrows().max(1) as f64) as f32)
}

/// Returns the value of the given rank in each channel of `x`, `[n,d]`, after `of` is applied to every value; zeros if
/// there are too few rows.
fn ranked(x: ArrayView2<f32>, rank: usize, of: impl Fn(f32) -> f32 + Sync) -> Vec<f32> {
    if rank >= x.nrows() {
        return vec![0.0; x.ncols()];
    }
    let value = |channel: ArrayView1<f32>| {
        let mut values: Vec<f32> = channel.iter().map(|v| of(*v)).collect();
        *values.select_nth_unstable_by(rank, f32::total_cmp).1
    };
    x.axis_iter(Axis(1)).into_par_iter().map(value).collect()
}

/// Sums the rows of `x`, `[n,d]`, by sign pattern: [`super::reference::sign_sums`]. Sums are f64, in row order.
pub fn sign_sums(x: ArrayView2<f32>) -> SignSums {
    let groups: Vec<([f64; PATTERNS * GROUP], [u64; PATTERNS])> = (0..x.ncols() / GROUP)
        .into_par_iter()
        .map(|g| {
            let (mut sums, mut counts) = ([0.0; PATTERNS * GROUP], [0; PATTERNS]);
            for row in x.slice(s![.., g * GROUP..(g + 1) * GROUP]).rows() {
                let bits = row.iter().enumerate().map(|(e, v)| usize::from(*v > 0.0) << e);
                let pattern: usize = bits.sum();
                counts[pattern] += 1;
                for (sum, v) in sums[pattern * GROUP..][..GROUP].iter_mut().zip(row) {
                    *sum += f64::from(*v);
                }
            }
            (sums, counts)
        })
        .collect();
    SignSums {
        sums: groups.iter().flat_map(|(sums, _)| *sums).collect(),
        counts: groups.iter().flat_map(|(_, counts)| *counts).collect(),
    }
}

/// Moves the dirty centroids to the means of their rows, and returns which of them changed.
fn move_centroids(
    x: &[f32],
    dim: usize,
    rows: &[Assigned],
    dirty: &[bool],
    centroids: &mut [f32],
) -> Vec<bool> {
    if dirty.len() <= FEW {
        return move_few(x, dim, rows, dirty, centroids);
    }
    let (starts, members) = group_by_code(rows.iter().map(|r| r.code), dirty.len());
    let each = centroids
        .par_chunks_mut(dim)
        .zip(starts.par_windows(2))
        .zip(dirty);
    let moves = each.map_init(Vec::new, |sums, ((centroid, range), &dirty)| {
        let members = &members[range[0]..range[1]];
        if !dirty || members.is_empty() {
            return false;
        }
        sums.clear();
        sums.resize(dim, 0.0f64);
        for &i in members {
            for (sum, &v) in sums.iter_mut().zip(row(x, i, dim)) {
                *sum += f64::from(v);
            }
        }
        set_mean(centroid, sums, members.len())
    });
    moves.collect()
}

/// Sets a centroid to the mean of `n` rows with these sums, and returns whether that changed it.
fn set_mean(centroid: &mut [f32], sums: &[f64], n: usize) -> bool {
    let mut moved = false;
    for (c, sum) in centroid.iter_mut().zip(sums) {
        let mean = (*sum / n as f64) as f32;
        moved |= mean != *c;
        *c = mean;
    }
    moved
}

/// Computes [`move_centroids`] for few centroids: in one pass over the rows, without sorting them.
fn move_few(x: &[f32], dim: usize, rows: &[Assigned], dirty: &[bool], centroids: &mut [f32]) -> Vec<bool> {
    let (mut sums, mut counts) = (vec![0.0f64; dirty.len() * dim], vec![0; dirty.len()]);
    // Rows of few coordinates are the most, and their loops are unrolled.
    match dim {
        4 => add_rows::<4>(x, rows, sums.as_chunks_mut().0, &mut counts),
        8 => add_rows::<8>(x, rows, sums.as_chunks_mut().0, &mut counts),
        _ => {
            for (r, x) in rows.iter().zip(x.chunks_exact(dim)) {
                let code = r.code as usize;
                counts[code] += 1;
                let sums = sums[code * dim..][..dim].iter_mut();
                sums.zip(x).for_each(|(sum, v)| *sum += f64::from(*v));
            }
        }
    }
    let each = centroids.chunks_mut(dim).zip(sums.chunks(dim));
    let each = each.zip(counts.into_iter().zip(dirty));
    each.map(|((centroid, sums), (n, dirty))| *dirty && n > 0 && set_mean(centroid, sums, n))
        .collect()
}

/// Adds rows of D coordinates to the sums of their centroids, and counts them.
fn add_rows<const D: usize>(x: &[f32], rows: &[Assigned], sums: &mut [[f64; D]], counts: &mut [usize]) {
    for (r, x) in rows.iter().zip(x.as_chunks::<D>().0) {
        let code = r.code as usize;
        counts[code] += 1;
        for l in 0..D {
            sums[code][l] += f64::from(x[l]);
        }
    }
}

/// Counts the rows of each of `size` centroids.
pub(super) fn count_codes(codes: impl Iterator<Item = u32>, size: usize) -> Vec<u32> {
    let mut counts = vec![0; size];
    codes.for_each(|code| counts[code as usize] += 1);
    counts
}

/// Sorts rows by centroid: the rows of centroid c are `members[starts[c]..starts[c + 1]]`, ascending.
pub(super) fn group_by_code(codes: impl Iterator<Item = u32> + Clone, size: usize) -> (Vec<usize>, Vec<u32>) {
    let mut starts = vec![0];
    for count in count_codes(codes.clone(), size) {
        starts.push(starts[starts.len() - 1] + count as usize);
    }
    let mut next = starts.clone();
    let mut members = vec![0; starts[size]];
    for (i, code) in (0..).zip(codes) {
        members[next[code as usize]] = i;
        next[code as usize] += 1;
    }
    (starts, members)
}

//! The clusters of the rows on the GPU: seeding, assignment and Lloyd passes.

mod fast;

use ndarray::ArrayView3;

use super::buffer::Buffer;
use super::kernels;
use super::points::PointRows;
use crate::compute::device::{Assignment, Clusters, Drawn};
use crate::error::Result;
use fast::Fast;
pub(crate) use fast::shared_bytes as search_bytes;

/// Rows, and centroids, per tile of `nearest_listed` and `nearest_fast`.
const TILE: usize = 128;
/// Distances per partial sum: in `draw` this many, in `inertia` `INERTIA_RUN`.
const DRAW_RUN: usize = 1024;
const INERTIA_RUN: usize = 4096;
/// Rows per block of a kernel that has one warp per row.
const WARPS: usize = 8;

/// The clusters of all heads. The first axis of every buffer is the head, `[b,..]`; the comments give the shape per
/// head.
pub(super) struct Clustering<'d> {
    /// Centroids per head, M.
    pub size: usize,
    /// The bits of the largest magnitude of the rows.
    largest: Buffer<'d, u32>,
    /// `[M,w]`.
    centroids: Buffer<'d, f32>,
    /// `-||c||²/2`, `[M]`.
    biases: Buffer<'d, f32>,
    /// The first index and the number of the centroids that a search considers.
    ranges: Buffer<'d, u32>,
    /// The code of each row, `[n]`.
    codes: Buffer<'d, u32>,
    /// The code of each row after the running search, `[n]`.
    next: Buffer<'d, u32>,
    /// The squared distance of each row to its centroid, `[n]`.
    distances: Buffer<'d, f32>,
    /// While seeding, the score of each row's centroid, `[n]`.
    scores: Buffer<'d, f32>,
    /// Whether a code has changed.
    changed: Buffer<'d, u32>,
    fast: Option<Fast<'d>>,
    /// The number of centroids drawn so far, per head.
    drawn: Vec<usize>,
}

/// Returns the most device memory, in bytes, that one head with n rows of `w` floats and `size` centroids takes.
pub(super) fn head_bytes(n: usize, w: usize, size: usize) -> usize {
    // The rows, and beside them either their whitened copy or their f16 copy with the buffers that have entries per
    // row.
    let row = 4 * w + (4 * w).max(2 * w + 36);
    // Centroids in f32, in f16 and in fixed point, the biases and the counts.
    let centroid = (4 + 2 + 8) * w + 16;
    n * row + size.next_multiple_of(TILE) * centroid + 4096
}

impl<'d> Clustering<'d> {
    pub fn new(rows: &PointRows<'d>, size: usize) -> Result<Self> {
        let (driver, b, n, w) = (rows.driver, rows.b, rows.n, rows.w);
        let largest = rows.largest()?;
        Ok(Self {
            size,
            fast: Fast::new(rows, size, &largest)?,
            largest,
            centroids: Buffer::zeros(driver, "centroids", b * size * w)?,
            biases: Buffer::new(driver, "norms of centroids", b * size)?,
            ranges: Buffer::new(driver, "ranges", b * 2)?,
            codes: Buffer::zeros(driver, "codes", b * n)?,
            next: Buffer::zeros(driver, "codes", b * n)?,
            distances: Buffer::new(driver, "distances", b * n)?,
            scores: Buffer::new(driver, "scores", b * n)?,
            changed: Buffer::zeros(driver, "flags", b)?,
            drawn: vec![0; b],
        })
    }

    /// Makes the given row of each head its first centroid.
    pub fn seed(&mut self, rows: &PointRows, first: &[u32]) -> Result<()> {
        rows.check("first rows", first.len(), rows.b)?;
        self.drawn.fill(1);
        self.set_ranges(&vec![[0, 1]; rows.b])?;
        let fresh = Buffer::from_slice(rows.driver, "rows drawn", first)?;
        self.place(rows, &fresh, 1)?;
        self.find_biases(rows, 1)?;
        kernels::StartRows {
            x: rows.x.ptr(),
            centroids: self.centroids.ptr(),
            biases: self.biases.ptr(),
            codes: self.codes.ptr(),
            scores: self.scores.ptr(),
            n: rows.n,
            w: rows.w,
            size: self.size,
        }
        .launch(rows.driver, rows.grid([rows.n.div_ceil(256), 1]))?;
        self.next.zero()?;
        self.take_over(rows, true)?;
        self.changed.write(&vec![1; rows.b])
    }

    /// Draws rows as new centroids, and assigns to them the rows that they are nearest to; waits for the device once.
    pub fn draw(&mut self, rows: &PointRows, batch: &[usize], uniforms: &[Vec<f64>]) -> Result<Vec<Drawn>> {
        let (driver, n) = (rows.driver, rows.n);
        rows.check("batches", batch.len(), rows.b)?;
        rows.check("lists of random numbers", uniforms.len(), rows.b)?;
        let most = batch.iter().copied().max().unwrap_or(0).max(1);
        let n_uniforms = uniforms.iter().map(Vec::len).max().unwrap_or(0).max(1);
        let mut numbers = vec![0.0; rows.b * n_uniforms];
        for (to, from) in numbers.chunks_mut(n_uniforms).zip(uniforms) {
            to[..from.len()].copy_from_slice(from);
        }
        let ranges: Vec<[u32; 2]> = self.drawn.iter().map(|d| [*d as u32, 0]).collect();
        self.set_ranges(&ranges)?;
        let wanted: Vec<u32> = batch.iter().map(|n| *n as u32).collect();
        let n_runs = n.div_ceil(DRAW_RUN);
        let runs = Buffer::<f64>::new(driver, "sums of distances", rows.b * n_runs)?;
        kernels::DistanceSums {
            distances: self.distances.ptr(),
            out: runs.ptr(),
            n,
        }
        .launch(rows.driver, rows.grid([n_runs, 1]))?;
        let numbers = Buffer::from_slice(driver, "random numbers", &numbers)?;
        let wanted = Buffer::from_slice(driver, "batches", &wanted)?;
        let fresh = Buffer::<u32>::new(driver, "rows drawn", rows.b * most)?;
        let used = Buffer::<u32>::new(driver, "counts", rows.b)?;
        kernels::Draw {
            x: rows.x.ptr(),
            distances: self.distances.ptr(),
            runs: runs.ptr(),
            uniforms: numbers.ptr(),
            batch: wanted.ptr(),
            fresh: fresh.ptr(),
            ranges: self.ranges.ptr(),
            used: used.ptr(),
            n,
            w: rows.w,
            n_runs,
            n_uniforms,
            most,
        }
        .launch(rows.driver, rows.grid([1, 1]))?;
        self.place(rows, &fresh, most)?;
        self.search(rows, most, true)?;
        self.take_over(rows, false)?;
        let (ranges, used) = (self.ranges.read()?, used.read()?);
        let made = ranges.chunks(2).zip(used).map(|(range, used)| Drawn {
            centroids: range[1] as usize,
            used: used as usize,
        });
        let made: Vec<Drawn> = made.collect();
        for (drawn, made) in self.drawn.iter_mut().zip(&made) {
            *drawn += made.centroids;
        }
        Ok(made)
    }

    pub fn assign(&mut self, rows: &PointRows, centroids: ArrayView3<f32>) -> Result<()> {
        let all = centroids.as_standard_layout();
        let all = all.view().into_shape_with_order((rows.b * self.size, rows.d))?;
        self.centroids.write(&rows.padded(all))?;
        self.drawn.fill(self.size);
        self.search_all(rows)?;
        self.changed.write(&vec![1; rows.b])
    }

    pub fn update(&mut self, rows: &PointRows) -> Result<()> {
        let sums = Buffer::<u64>::zeros(rows.driver, "sums of rows", rows.b * self.size * rows.w)?;
        let counts = Buffer::<u32>::zeros(rows.driver, "counts", rows.b * self.size)?;
        let (codes, largest) = (self.codes.ptr(), self.largest.ptr());
        let (n, w, size) = (rows.n, rows.w, self.size);
        kernels::SumRows {
            x: rows.x.ptr(),
            codes,
            sums: sums.ptr(),
            counts: counts.ptr(),
            largest,
            n,
            w,
            size,
        }
        .launch(rows.driver, rows.grid([n.div_ceil(WARPS), 1]))?;
        kernels::MoveCentroids {
            centroids: self.centroids.ptr(),
            sums: sums.ptr(),
            counts: counts.ptr(),
            largest,
            n,
            w,
            size,
        }
        .launch(rows.driver, rows.grid([(size * w).div_ceil(256), 1]))?;
        self.changed.zero()?;
        self.search_all(rows)
    }

    pub fn hand_over(&mut self, rows: &PointRows, head: usize, given: &[(u32, u32)]) -> Result<()> {
        if given.is_empty() {
            return Ok(());
        }
        let pairs: Vec<u32> = given.iter().flat_map(|(row, code)| [*row, *code]).collect();
        let pairs = Buffer::from_slice(rows.driver, "rows handed over", &pairs)?;
        let blocks = [given.len().div_ceil(256), 1, 1];
        kernels::HandOver {
            pairs: pairs.ptr(),
            codes: self.codes.ptr(),
            changed: self.changed.ptr(),
            count: given.len(),
            head,
            n: rows.n,
        }
        .launch(rows.driver, blocks)
    }

    pub fn assignment(&self, rows: &PointRows) -> Result<Vec<Assignment>> {
        let runs = rows.n.div_ceil(INERTIA_RUN);
        let sums = Buffer::<f64>::new(rows.driver, "sums of distances", rows.b * runs)?;
        kernels::Inertia {
            distances: self.distances.ptr(),
            out: sums.ptr(),
            n: rows.n,
        }
        .launch(rows.driver, rows.grid([runs, 1]))?;
        let counts = Buffer::<u32>::zeros(rows.driver, "counts", rows.b * self.size)?;
        kernels::CountCodes {
            codes: self.codes.ptr(),
            counts: counts.ptr(),
            n: rows.n,
            size: self.size,
        }
        .launch(rows.driver, rows.grid([rows.n.div_ceil(256), 1]))?;
        let (sums, counts, changed) = (sums.read()?, counts.read()?, self.changed.read()?);
        let heads = sums.chunks(runs).zip(counts.chunks(self.size)).zip(changed);
        let head = |((sums, counts), changed): ((&[f64], &[u32]), u32)| Assignment {
            inertia: sums.iter().sum(),
            counts: counts.to_vec(),
            changed: changed != 0,
        };
        Ok(heads.map(head).collect())
    }

    pub fn read(&self, rows: &PointRows, head: usize) -> Result<Clusters> {
        let (n, w) = (rows.n, rows.w);
        let centroids = self
            .centroids
            .read_part(head * self.size * w, self.drawn[head] * w)?;
        Ok(Clusters {
            centroids: rows.unpadded(centroids)?,
            codes: self.codes.read_part(head * n, n)?,
            distances: self.distances.read_part(head * n, n)?,
        })
    }

    fn set_ranges(&self, ranges: &[[u32; 2]]) -> Result<()> {
        self.ranges.write(bytemuck::cast_slice(ranges))
    }

    /// Copies the rows whose numbers are in `fresh`, `[b,most]`, to the centroids in range.
    fn place(&self, rows: &PointRows, fresh: &Buffer<u32>, most: usize) -> Result<()> {
        let blocks = (most * rows.w).div_ceil(256);
        kernels::PlaceCentroids {
            x: rows.x.ptr(),
            fresh: fresh.ptr(),
            ranges: self.ranges.ptr(),
            centroids: self.centroids.ptr(),
            n: rows.n,
            w: rows.w,
            size: self.size,
            most,
        }
        .launch(rows.driver, rows.grid([blocks, 1]))
    }

    /// Assigns every row to the nearest of all centroids.
    fn search_all(&mut self, rows: &PointRows) -> Result<()> {
        self.set_ranges(&vec![[0, self.size as u32]; rows.b])?;
        self.search(rows, self.size, false)?;
        self.take_over(rows, true)
    }

    /// Computes the biases of the centroids in range, of which there are at most `most` per head.
    fn find_biases(&self, rows: &PointRows, most: usize) -> Result<()> {
        kernels::CentroidBiases {
            centroids: self.centroids.ptr(),
            ranges: self.ranges.ptr(),
            biases: self.biases.ptr(),
            w: rows.w,
            size: self.size,
        }
        .launch(rows.driver, rows.grid([most.div_ceil(WARPS), 1]))
    }

    /// Writes the nearest of the centroids in range (at most `most` per head) of each row to `next`. With `challenge`,
    /// only rows that are nearer to one of them than to their present centroid change.
    fn search(&self, rows: &PointRows, most: usize, challenge: bool) -> Result<()> {
        self.find_biases(rows, most)?;
        let scores = challenge.then(|| self.scores.ptr());
        let (x, centroids, biases) = (rows.x.ptr(), self.centroids.ptr(), self.biases.ptr());
        let (ranges, codes, next) = (self.ranges.ptr(), self.codes.ptr(), self.next.ptr());
        let (n, w, size) = (rows.n, rows.w, self.size);
        if let Some(fast) = &self.fast {
            self.find_candidates(rows, fast, most, scores)?;
            fast.listed.zero()?;
            kernels::Settle {
                x,
                centroids,
                biases,
                ranges,
                candidates: fast.candidates.ptr(),
                scores,
                codes,
                next,
                list: fast.list.ptr(),
                listed: fast.listed.ptr(),
                n,
                w,
                size,
            }
            .launch(rows.driver, rows.grid([n.div_ceil(256), 1]))?;
        }
        kernels::NearestListed {
            x,
            centroids,
            biases,
            ranges,
            list: self.fast.as_ref().map(|fast| fast.list.ptr()),
            listed: self.fast.as_ref().map(|fast| fast.listed.ptr()),
            scores,
            codes,
            next,
            n,
            w,
            size,
        }
        .launch(rows.driver, rows.grid([n.div_ceil(TILE), 1]))
    }

    /// Copies `next` to the codes, and updates the distances of the rows whose code changed, or of all rows with `all`.
    fn take_over(&self, rows: &PointRows, all: bool) -> Result<()> {
        kernels::TakeOver {
            x: rows.x.ptr(),
            centroids: self.centroids.ptr(),
            next: self.next.ptr(),
            codes: self.codes.ptr(),
            distances: self.distances.ptr(),
            changed: self.changed.ptr(),
            n: rows.n,
            w: rows.w,
            size: self.size,
            all: usize::from(all),
        }
        .launch(rows.driver, rows.grid([rows.n.div_ceil(WARPS), 1]))
    }
}

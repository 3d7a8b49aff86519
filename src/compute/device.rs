//! The devices of calibration: the operations that codebooks, second moments and sign patterns need.
//!
//! A [`Device`] is chosen once per command. It takes the rows of some heads as [`Points`], which stay on the device
//! through whitening, seeding and every Lloyd pass; only counts and sums per centroid come back from a pass. The
//! contract of each operation is the function of the same name in [`super::reference`]. The CPU, `shaders/<name>.wgsl`
//! and `kernels/<name>.cu` implement the operation, and `tests/backends` tests all of them against the contract.
//!
//! The same input on the same device gives the same bytes every time. Devices add in different orders: where two
//! distances agree to the last bits, the argmins of two devices may differ.

use std::ops::Range;

use ndarray::{Array2, Array3, ArrayView2, ArrayView3};

use super::cuda::driver::Driver;
use crate::error::Result;

/// A CPU or GPU that runs the operations of calibration.
pub trait Device: Send + Sync {
    /// Returns the name that `--device` and the manifests use: `cpu`, `wgpu` or `cuda`.
    fn name(&self) -> &'static str;

    /// Returns the hardware and the driver, for the log and the manifest; `None` on the CPU, where the results do not
    /// depend on them.
    fn adapter(&self) -> Option<String> {
        None
    }

    /// Returns the GPU's driver if the device can also run a whole model.
    fn cuda(&self) -> Option<&dyn Driver> {
        None
    }

    /// Returns how many heads of `[n,d]` rows and `size` centroids a call of [`Device::points`] should take, at least
    /// one.
    fn heads_at_once(&self, n: usize, d: usize, size: usize) -> usize;

    /// Sums q^T q over the rows of each head: [`super::reference::second_moment`].
    ///
    /// # Shapes
    /// q_rope `[b,m,d]`; result `[b,d,d]`.
    ///
    /// # Numerics
    /// Products and sums of up to 256 rows in f32; these partial sums are added in f64.
    fn second_moment(&self, q_rope: ArrayView3<f32>) -> Result<Array3<f64>>;

    /// Puts rows `[b,n,d]` on the device, with `d >= 1` and `n < 2^32`.
    fn points(&self, x: Array3<f32>) -> Result<Box<dyn Points + '_>>;
}

/// A statistic of the values of a channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Statistic {
    /// The mean, summed in f64 (wgpu: up to 256 values in f32 first).
    Mean,
    /// The value of this rank in the order of `f32::total_cmp`; the smallest value has rank 0.
    Ranked(usize),
    /// The magnitude of this rank, in the same order.
    RankedMagnitude(usize),
}

/// The rows of one head summed by sign pattern: [`super::reference::sign_sums`].
#[derive(Clone, Debug, PartialEq)]
pub struct SignSums {
    /// Per pattern, the sums of the group's four channels over the rows that have the pattern, `[d/4,16,4]`.
    pub sums: Vec<f64>,
    /// Number of rows that have each pattern, `[d/4,16]`.
    pub counts: Vec<u64>,
}

/// The outcome of one call of [`Points::draw`] for a head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drawn {
    /// Number of centroids drawn.
    pub centroids: usize,
    /// Number of uniform numbers used.
    pub used: usize,
}

/// A summary of the assignment of one head's rows.
#[derive(Clone, Debug, PartialEq)]
pub struct Assignment {
    /// The sum of the rows' squared distances to their centroids.
    pub inertia: f64,
    /// Number of rows per centroid, `[M]`.
    pub counts: Vec<u32>,
    /// Whether the last assignment changed any row's centroid; true after the first assignment.
    pub changed: bool,
}

/// The clusters of one head.
#[derive(Clone, Debug, PartialEq)]
pub struct Clusters {
    /// `[M,d]`.
    pub centroids: Array2<f32>,
    /// The centroid of each row, `[n]`.
    pub codes: Vec<u32>,
    /// Squared distance of each row to its centroid, `[n]`.
    pub distances: Vec<f32>,
}

/// The rows of b heads on a device, `[b,n,d]`, and their clusters.
///
/// The first group of methods changes or describes the rows; a change of the rows discards the clusters.
pub trait Points {
    /// Returns b, n and d.
    fn dim(&self) -> (usize, usize, usize);

    /// Replaces the rows x by `x L`, in f32: [`super::reference::whiten`].
    ///
    /// # Shapes
    /// chol `[b,d,d]`, lower triangular.
    ///
    /// # Source
    /// A2ATS, arXiv 2502.12665, Eq. 15.
    fn whiten(&mut self, chol: ArrayView3<f32>) -> Result<()>;

    /// Returns a statistic of each channel over a range of rows, `[b,d]`, rounded to f32:
    /// [`super::reference::channel_statistic`]. An empty range gives zeros.
    fn channel_statistic(&mut self, rows: Range<usize>, what: Statistic) -> Result<Array2<f32>>;

    /// Subtracts `center`, `[b,d]`, from a range of rows.
    fn subtract(&mut self, rows: Range<usize>, centers: ArrayView2<f32>) -> Result<()>;

    /// Returns the sum of the squares of all values of each head.
    fn square_sum(&mut self) -> Result<Vec<f64>>;

    /// Sums all rows of each head by sign pattern: [`super::reference::sign_sums`]. d must be a multiple of 4.
    ///
    /// # Source
    /// Self-Indexing KVCache, arXiv 2603.14224, Eq. 4.
    fn sign_sums(&mut self) -> Result<Vec<SignSums>>;

    // ----

    /// Starts seeding `size` centroids per head. The first centroid of each head is the row `first[head]`, and all rows
    /// are assigned to it.
    fn seed(&mut self, size: usize, first: &[u32]) -> Result<()>;

    /// Draws up to `batch[head]` (possibly 0) further centroids, and assigns to them the rows that they are nearest to:
    /// [`super::reference::draw`].
    ///
    /// # Shapes
    /// `uniforms[head]` holds at least `2 (2 batch[head] + 1)` numbers in [0,1).
    fn draw(&mut self, batch: &[usize], uniforms: &[Vec<f64>]) -> Result<Vec<Drawn>>;

    /// Sets the centroids, `[b,M,d]`, and assigns every row to the nearest one: [`super::reference::nearest`].
    ///
    /// # Numerics
    /// The code is the argmax of `x·c - ||c||²/2` in f32; the lowest index wins a tie. With
    /// `e = (d + 2) 2^-24 max_c (||x|| ||c|| + ||c||²/2)`, the squared distance to the chosen centroid is at most `4 e`
    /// above the smallest. Distances are `sum (x - c)²` to the chosen centroid, in f32.
    fn assign(&mut self, centroids: ArrayView3<f32>) -> Result<()>;

    /// Runs one Lloyd pass: every centroid moves to the mean of its rows ([`super::reference::means`]; a centroid
    /// without rows stays in place), and every row is assigned again. Sums are in f64 (wgpu: up to 256 rows in f32
    /// first; CUDA: in fixed point).
    fn update(&mut self) -> Result<()>;

    /// Stops updating a head whose clusters will not be read again.
    fn stop(&mut self, head: usize) {
        let _ = head;
    }

    /// Reassigns rows of one head; `rows` holds pairs (row, new code). The distances of these rows stay unchanged until
    /// the next [`Points::update`].
    fn hand_over(&mut self, head: usize, rows: &[(u32, u32)]) -> Result<()>;

    /// Returns a summary of each head's present assignment.
    fn assignment(&mut self) -> Result<Vec<Assignment>>;

    /// Returns the centroids, codes and distances of one head.
    fn clusters(&mut self, head: usize) -> Result<Clusters>;

    /// Returns the rows of one head with the given numbers, `[rows,d]`.
    fn rows(&mut self, head: usize, rows: &[u32]) -> Result<Array2<f32>>;
}

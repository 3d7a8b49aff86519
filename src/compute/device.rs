//! The device seam of calibration: what a codebook, a second moment and sign patterns need of a device.
//!
//! [`Device`] is chosen once per command. It takes in the rows of some heads as [`Points`], which stay
//! where they are through whitening, seeding and every Lloyd pass; what travels per pass is a count per
//! centroid and a sum. Each operation's contract is the function of the same name in
//! [`super::reference`]; the CPU, `shaders/<name>.wgsl` and `kernels/<name>.cu` implement it, and
//! `tests/backends.rs` holds all of them against it.
//!
//! One input on one device gives the same bytes every time. Across devices, sums are rounded in another
//! order: an argmin may fall the other way where two distances agree to the last bits.

use std::ops::Range;

use ndarray::{Array2, Array3, ArrayView2, ArrayView3};

use super::cuda::driver::Driver;
use crate::error::Result;

/// Where calibration is computed.
pub trait Device: Send + Sync {
    /// `cpu`, `wgpu` or `cuda`: what `--device` and the manifests call it.
    fn name(&self) -> &'static str;

    /// The hardware and the driver, for the log and the manifest; `None` on the CPU, whose results do
    /// not depend on them.
    fn adapter(&self) -> Option<String>;

    /// The GPU's driver, where the device can run a whole model too.
    fn cuda(&self) -> Option<&dyn Driver> {
        None
    }

    /// Most heads of `[n,d]` rows and `size` centroids that [`Device::points`] should be given at once;
    /// at least one.
    fn heads_at_once(&self, n: usize, d: usize, size: usize) -> usize;

    /// Sum of q^T q over the rows of each head: [`super::reference::second_moment`].
    ///
    /// # Shapes
    /// q_rope `[b,m,d]`; result `[b,d,d]`.
    ///
    /// # Numerics
    /// Products and sums of up to 256 rows in f32, their sums in f64.
    fn second_moment(&self, q_rope: ArrayView3<f32>) -> Result<Array3<f64>>;

    /// Takes in rows, `[b,n,d]` with `d >= 1` and `n < 2^32`.
    fn points(&self, x: Array3<f32>) -> Result<Box<dyn Points + '_>>;
}

/// What is asked of each channel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Statistic {
    /// The mean, summed in f64 (wgpu: up to 256 values in f32 first).
    Mean,
    /// The value of this rank, the smallest being 0, in the order of `f32::total_cmp`.
    Ranked(usize),
    /// The magnitude of this rank.
    RankedMagnitude(usize),
}

/// The sign patterns of one head: [`super::reference::sign_sums`].
#[derive(Clone, Debug, PartialEq)]
pub struct SignSums {
    /// Sum of the channels that have the pattern, `[d/4,16,4]`.
    pub sums: Vec<f64>,
    /// Rows that have it, `[d/4,16]`.
    pub counts: Vec<u64>,
}

/// How far one head's seeding got in a call of [`Points::draw`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Drawn {
    /// Centroids drawn.
    pub centroids: usize,
    /// Uniform numbers used up.
    pub used: usize,
}

/// The assignment of one head's rows.
#[derive(Clone, Debug, PartialEq)]
pub struct Assignment {
    /// Sum of squared distances.
    pub inertia: f64,
    /// Rows per centroid, `[M]`.
    pub counts: Vec<u32>,
    /// Whether a row changed its centroid in the last assignment; true after the first.
    pub changed: bool,
}

/// Everything about one head's clusters.
#[derive(Clone, Debug, PartialEq)]
pub struct Clusters {
    /// `[M,d]`.
    pub centroids: Array2<f32>,
    /// The centroid of each row, `[n]`.
    pub codes: Vec<u32>,
    /// Squared distance of each row to it, `[n]`.
    pub distances: Vec<f32>,
}

/// Rows of b heads on a device, `[b,n,d]`, and their clusters.
///
/// The operations above the line change or describe the rows; clusters must be made anew afterwards.
pub trait Points {
    /// b, n and d.
    fn dim(&self) -> (usize, usize, usize);

    /// Rows become `x L`, in f32: [`super::reference::whiten`].
    ///
    /// # Shapes
    /// chol `[b,d,d]`, lower triangular.
    ///
    /// # Source
    /// A2ATS, arXiv 2502.12665, Eq. 15.
    fn whiten(&mut self, chol: ArrayView3<f32>) -> Result<()>;

    /// A statistic of each channel over some rows, `[b,d]`, rounded to f32:
    /// [`super::reference::channel_statistic`]. Zeros for no rows.
    fn channel_statistic(&mut self, rows: Range<usize>, what: Statistic) -> Result<Array2<f32>>;

    /// Takes `centre`, `[b,d]`, off some rows.
    fn subtract(&mut self, rows: Range<usize>, centre: ArrayView2<f32>) -> Result<()>;

    /// The sum of the squares of all values, per head.
    fn square_sum(&mut self) -> Result<Vec<f64>>;

    /// Sign patterns of all rows, per head: [`super::reference::sign_sums`]. d is a multiple of 4.
    ///
    /// # Source
    /// Self-Indexing KVCache, arXiv 2603.14224, Eq. 4.
    fn sign_sums(&mut self) -> Result<Vec<SignSums>>;

    // ----

    /// Starts seeding `size` centroids: the first of each head is the row `first[head]`, and all rows
    /// belong to it.
    fn seed(&mut self, size: usize, first: &[u32]) -> Result<()>;

    /// Draws up to `batch[head]` further centroids and lets them take over the rows they are nearest
    /// to: [`super::reference::draw`]. `batch[head]` may be 0.
    ///
    /// # Shapes
    /// `uniforms[head]` holds at least `2 (2 batch[head] + 1)` numbers of [0,1).
    fn draw(&mut self, batch: &[usize], uniforms: &[Vec<f64>]) -> Result<Vec<Drawn>>;

    /// Takes these centroids, `[b,M,d]`, and assigns every row to the nearest:
    /// [`super::reference::nearest`].
    ///
    /// # Numerics
    /// The code is the argmax of `x·c - ||c||²/2` in f32, the lowest index winning ties. With
    /// `e = (d + 2) 2^-24 max_c (||x|| ||c|| + ||c||²/2)` the squared distance of the chosen centroid is
    /// at most `4 e` above the smallest. Distances are `sum (x - c)²` of the chosen centroid in f32.
    fn assign(&mut self, centroids: ArrayView3<f32>) -> Result<()>;

    /// One Lloyd pass: every centroid moves to the mean of its rows ([`super::reference::means`]; one
    /// without rows stays), and every row is assigned anew. Sums are in f64 (wgpu: up to 256 rows in
    /// f32 first; CUDA: in fixed point).
    fn update(&mut self) -> Result<()>;

    /// Says that a head's clusters have been asked for the last time, so that updates may leave it as it is.
    fn stop(&mut self, head: usize) {
        let _ = head;
    }

    /// Gives rows of one head, `(row, code)`, to other centroids. Their distances are not brought up to
    /// date before the next [`Points::update`].
    fn hand_over(&mut self, head: usize, rows: &[(u32, u32)]) -> Result<()>;

    /// The present assignment, per head.
    fn assignment(&mut self) -> Result<Vec<Assignment>>;

    /// Centroids, codes and distances of one head.
    fn clusters(&mut self, head: usize) -> Result<Clusters>;

    /// Some rows of one head, `[rows,d]`.
    fn rows(&mut self, head: usize, rows: &[u32]) -> Result<Array2<f32>>;
}

//! k-means for codebooks: thousands of centroids, tens of thousands of points, one head at a
//! time.
//!
//! [`fit`] is Lloyd's algorithm behind k-means++ seeding; [`Codebook::nearest`] is the encoder.
//! Both run on one fused kernel that scores a tile of rows against a panel of centroids and keeps
//! the best and the runner-up, so the `n x M` matrix never exists. linfa's [`Fit`] and
//! [`PredictInplace`] are implemented on top.
//!
//! Three shortcuts make it fast, and none of them changes what the plain algorithm computes:
//!
//! - **Seeding in batches.** k-means++ draws by the distance to the nearest centroid so far. We
//!   draw by the distances of the last refresh and accept with probability `now / stale`:
//!   rejection sampling, so the D² distribution is exact, and the refreshes together cost one
//!   Lloyd pass of matrix products instead of one sweep over the points per centroid.
//! - **The last refresh is the first assignment**, so k-means++ costs little more than a random
//!   start.
//! - **Only moved centroids are looked at again.** A centroid whose rows stayed the same stays
//!   where it is, and a row whose own score is still above its runner-up meets the moved
//!   centroids only (Kaukoranta, Fränti and Nevalainen 2000, "A fast exact GLA based on code
//!   vector activity detection"). The codes are those of a full search, bit for bit.
//!
//! # Numerics
//!
//! The argmin of the distance is found as the argmax of the score `x·c - ||c||²/2` in f32. Its
//! error grows with `||x|| ||c||`: **points are expected to be centred**. An offset much larger
//! than the spread makes the choice approximate ([`Codebook::nearest`] has the bound). Distances
//! never come from scores: they are recomputed as `sum (x - c)²` for the chosen centroid. Means
//! and inertia are summed in f64. Finite values whose squares overflow f32 give a useless
//! codebook, but no panic.
//!
//! Results are byte-identical for any number of threads, and on machines that have a fused
//! multiply-add alike: rows are independent, and every sum has a fixed order.

mod assign;
mod scan;
mod seed;

use std::ops::ControlFlow;

use linfa::DatasetBase;
use linfa::traits::{Fit, PredictInplace};
use ndarray::{Array1, Array2, ArrayBase, ArrayView2, Data, Ix2};
use rayon::prelude::*;

use assign::{Assigned, CHUNK, reassign};
use scan::{Panels, Scratch, row, scan, squared_distance};

/// Most centroids a codebook may have: codes are stored as u16, and one value stays free.
pub const MAX_SIZE: usize = 65_535;

/// Why a fit failed.
#[derive(Debug, thiserror::Error)]
pub enum KMeansError {
    /// The codebook size is zero or above [`MAX_SIZE`].
    #[error("codebook size: expected 1 to {MAX_SIZE}, found {0}")]
    Size(usize),
    /// There are fewer points than centroids.
    #[error("points: expected at least {size} (one per centroid), found {points}")]
    TooFewPoints {
        /// Rows given.
        points: usize,
        /// Centroids asked for.
        size: usize,
    },
    /// The points have no coordinates.
    #[error("points: expected at least one coordinate, found none")]
    NoCoordinates,
    /// A value is NaN or infinite.
    #[error("{what}: expected finite values, found {value} in row {row}")]
    NonFinite {
        /// `points` or `initial centroids`.
        what: &'static str,
        /// The first offending row.
        row: usize,
        /// The first offending value of that row.
        value: f32,
    },
    /// The given initial centroids do not have the shape of the codebook.
    #[error("initial centroids: expected shape {expected:?}, found {found:?}")]
    InitShape {
        /// `(size, d)`.
        expected: (usize, usize),
        /// What was given.
        found: (usize, usize),
    },
    /// The callback asked to stop.
    #[error("k-means interrupted after pass {0}")]
    Interrupted(usize),
    /// An error of linfa's data set handling.
    #[error(transparent)]
    Linfa(#[from] linfa::Error),
}

impl From<KMeansError> for crate::error::Error {
    fn from(e: KMeansError) -> Self {
        match e {
            KMeansError::Interrupted(_) => Self::interrupted(),
            other => Self::failed(other.to_string()),
        }
    }
}

/// Where the centroids start.
#[derive(Clone, Debug)]
pub enum Init {
    /// Plain D² sampling: each next centroid is a point drawn with probability proportional to
    /// its squared distance to the nearest centroid chosen so far, one candidate a step.
    KMeansPlusPlus,
    /// Distinct rows, uniformly.
    Random,
    /// These centroids, `[size, d]`.
    Precomputed(Array2<f32>),
}

/// What to fit.
#[derive(Clone, Debug)]
pub struct KMeansParams {
    /// Centroids, 1 to [`MAX_SIZE`].
    pub size: usize,
    /// Lloyd passes at most; the fit ends earlier once no assignment changes. 0 keeps the initial
    /// centroids.
    pub iterations: usize,
    /// Where the centroids start.
    pub init: Init,
    /// Seed of the random choices.
    pub seed: u64,
}

/// The outcome of one fit. Codes, counts and the last inertia belong to the codebook returned.
#[derive(Clone, Debug)]
pub struct KMeansFit {
    /// Centroids, `[M, d]`.
    pub codebook: Array2<f32>,
    /// The centroid of each row, `[n]`.
    pub codes: Vec<u32>,
    /// Rows per centroid, `[M]`. Zero for the duplicates left over where there are fewer distinct
    /// points than centroids, and for a centroid that lost its rows in the last assignment.
    pub counts: Vec<u32>,
    /// Sum of squared distances of each assignment: to the initial centroids, then after each pass.
    pub inertia: Vec<f64>,
    /// Empty centroids that were reseeded, over all passes.
    pub empty_repaired: usize,
}

/// Centroids made ready for [`Codebook::nearest`].
#[derive(Clone, Debug)]
pub struct Codebook {
    centroids: Array2<f32>,
    panels: Panels,
}

impl Codebook {
    /// Prepares `centroids`, `[M, d]`, for searching.
    pub fn new(centroids: Array2<f32>) -> Self {
        let centroids = centroids.as_standard_layout().into_owned();
        let (size, dim) = centroids.dim();
        let panels = Panels::pack(flat(&centroids), dim, 0, (0..size as u32).collect());
        Self { centroids, panels }
    }

    /// The centroids, `[M, d]`.
    pub fn centroids(&self) -> &Array2<f32> {
        &self.centroids
    }

    /// Finds the nearest centroid of every row, on the threads of the current rayon pool.
    ///
    /// # Shapes
    /// `points [n, d]`, `codes [n]`, `distances [n]`; what lies beyond the shortest of the three
    /// is left alone. Where `d` is not the codebook's, or the codebook is empty, every code is 0
    /// and every distance NaN.
    ///
    /// # Numerics
    /// The code is the argmax of `x·c - ||c||²/2` in f32, the lowest index winning ties. With
    /// `e = (d + 2) 2^-24 max_c (||x|| ||c|| + ||c||²/2)` the squared distance of the chosen
    /// centroid is at most `4 e` above the smallest. An offset common to all points enters `e`
    /// squared: take it off first. The distance is `sum (x - c)²` of the chosen centroid in f32,
    /// its relative error at most `(d / 16 + 20) 2^-24`. A row with NaN or infinities gets a
    /// valid code and a distance that is not finite. Never panics.
    pub fn nearest(&self, points: ArrayView2<f32>, codes: &mut [u32], distances: &mut [f32]) {
        let dim = self.centroids.ncols();
        if points.ncols() != dim || self.centroids.is_empty() {
            codes.fill(0);
            distances.fill(f32::NAN);
            return;
        }
        let points = points.as_standard_layout();
        let n = points.nrows().min(codes.len()).min(distances.len());
        let (x, centroids) = (&flat(&points)[..n * dim], flat(&self.centroids));
        let out = codes[..n]
            .par_chunks_mut(CHUNK)
            .zip(distances[..n].par_chunks_mut(CHUNK));
        let chunks = x.par_chunks(CHUNK * dim).zip(out);
        chunks.for_each_init(Scratch::default, |scratch, (x, (codes, distances))| {
            let rows: Vec<u32> = (0..codes.len() as u32).collect();
            scan(x, &rows, &self.panels, scratch);
            let out = codes.iter_mut().zip(distances);
            for ((x, best), (code, distance)) in x.chunks_exact(dim).zip(&scratch.out).zip(out) {
                *code = best.id;
                *distance = squared_distance(x, row(centroids, best.id, dim));
            }
        });
    }
}

/// Fits a codebook to `points`.
///
/// A pass moves every centroid to the mean of its rows and assigns the rows anew. A centroid that
/// has no rows takes the row that is fitted worst instead (distinct rows, largest distance first,
/// lowest index on ties), as long as there is one that does not sit on its centroid. `on_pass`
/// hears of every assignment: its number, 0 being the one to the initial centroids, and its
/// inertia.
///
/// # Shapes
/// `points [n, d]` with `size <= n < 2^32` and `d >= 1`.
///
/// # Numerics
/// See the [module](self). One input and seed give the same bytes every time.
///
/// # Errors
/// [`KMeansError`]: an impossible size, too few points, a value that is not finite, initial
/// centroids of another shape, or an `on_pass` that answered `Break`.
///
/// # Source
/// k-means++: Arthur and Vassilvitskii 2007. Its use on whitened keys: A2ATS, arXiv 2502.12665,
/// equations 15 to 17. The authors' code leaves an empty centroid on the zero vector; we reseed it.
pub fn fit(
    points: ArrayView2<f32>,
    params: &KMeansParams,
    on_pass: &mut dyn FnMut(usize, f64) -> ControlFlow<()>,
) -> Result<KMeansFit, KMeansError> {
    check(&points, params)?;
    let (size, dim) = (params.size, points.ncols());
    let points = points.as_standard_layout();
    let x = flat(&points);
    let (mut centroids, mut rows) = seed::start(x, dim, params);
    let mut inertia = Vec::new();
    let mut empty_repaired = 0;
    // Centroids whose rows changed since they were last moved.
    let mut dirty = vec![true; size];
    for pass in 0.. {
        let sum = rows.iter().map(|r| f64::from(r.distance)).sum();
        inertia.push(sum);
        if on_pass(pass, sum).is_break() {
            return Err(KMeansError::Interrupted(pass));
        }
        if pass == params.iterations {
            break;
        }
        empty_repaired += repair_empty(x, dim, &mut rows, &mut dirty);
        if !dirty.contains(&true) {
            break;
        }
        let before: Vec<u32> = rows.iter().map(|r| r.code).collect();
        let moved = move_centroids(x, dim, &rows, &dirty, &mut centroids);
        reassign(x, dim, &mut rows, &centroids, &moved);
        dirty.fill(false);
        for (r, before) in rows.iter().zip(before).filter(|(r, before)| r.code != *before) {
            dirty[r.code as usize] = true;
            dirty[before as usize] = true;
        }
    }
    Ok(KMeansFit {
        codebook: Array2::from_shape_vec((size, dim), centroids).map_err(linfa::Error::from)?,
        codes: rows.iter().map(|r| r.code).collect(),
        counts: count(&rows, size),
        inertia,
        empty_repaired,
    })
}

/// linfa's way in: no callback, the codebook alone.
impl<D: Data<Elem = f32>, T> Fit<ArrayBase<D, Ix2>, T, KMeansError> for KMeansParams {
    type Object = Codebook;

    fn fit(&self, dataset: &DatasetBase<ArrayBase<D, Ix2>, T>) -> Result<Codebook, KMeansError> {
        let fit = fit(
            dataset.records.view(),
            self,
            &mut |_, _| ControlFlow::Continue(()),
        )?;
        Ok(Codebook::new(fit.codebook))
    }
}

impl<D: Data<Elem = f32>> PredictInplace<ArrayBase<D, Ix2>, Array1<usize>> for Codebook {
    fn predict_inplace<'a>(&'a self, x: &'a ArrayBase<D, Ix2>, y: &mut Array1<usize>) {
        let mut codes = vec![0; x.nrows()];
        self.nearest(x.view(), &mut codes, &mut vec![0.0; x.nrows()]);
        y.iter_mut().zip(codes).for_each(|(y, code)| *y = code as usize);
    }

    fn default_target(&self, x: &ArrayBase<D, Ix2>) -> Array1<usize> {
        Array1::zeros(x.nrows())
    }
}

fn check(points: &ArrayView2<f32>, params: &KMeansParams) -> Result<(), KMeansError> {
    let (n, dim) = points.dim();
    let size = params.size;
    if size == 0 || size > MAX_SIZE {
        return Err(KMeansError::Size(size));
    }
    if dim == 0 {
        return Err(KMeansError::NoCoordinates);
    }
    if n < size {
        return Err(KMeansError::TooFewPoints { points: n, size });
    }
    check_finite("points", points)?;
    if let Init::Precomputed(centroids) = &params.init {
        if centroids.dim() != (size, dim) {
            return Err(KMeansError::InitShape {
                expected: (size, dim),
                found: centroids.dim(),
            });
        }
        check_finite("initial centroids", &centroids.view())?;
    }
    Ok(())
}

fn check_finite(what: &'static str, x: &ArrayView2<f32>) -> Result<(), KMeansError> {
    for (row, x) in x.rows().into_iter().enumerate() {
        if let Some(&value) = x.iter().find(|v| !v.is_finite()) {
            return Err(KMeansError::NonFinite { what, row, value });
        }
    }
    Ok(())
}

/// Gives each empty centroid the worst-fitted row left, and returns how many got one. Rows that sit
/// on their centroid, that are alone with it, or that equal a row already taken do not qualify.
fn repair_empty(x: &[f32], dim: usize, rows: &mut [Assigned], dirty: &mut [bool]) -> usize {
    let mut counts = count(rows, dirty.len());
    if !counts.contains(&0) {
        return 0;
    }
    let distance = |i: u32| rows[i as usize].distance;
    let mut worst: Vec<u32> = (0..rows.len() as u32).filter(|&i| distance(i) > 0.0).collect();
    worst.sort_by(|&a, &b| distance(b).total_cmp(&distance(a)));
    let mut worst = worst.into_iter();
    let mut taken: Vec<u32> = Vec::new();
    for c in 0..dirty.len() {
        if counts[c] > 0 {
            continue;
        }
        let free = worst.find(|&i| {
            counts[rows[i as usize].code as usize] > 1
                && taken.iter().all(|&t| row(x, t, dim) != row(x, i, dim))
        });
        let Some(i) = free else { break };
        let r = &mut rows[i as usize];
        let old = r.code as usize;
        (counts[old], counts[c]) = (counts[old] - 1, 1);
        (dirty[old], dirty[c]) = (true, true);
        // What was known of the row is void: an infinite rival sends it through a full search.
        (r.code, r.rival) = (c as u32, f32::INFINITY);
        taken.push(i);
    }
    taken.len()
}

/// Moves the centroids marked dirty to the mean of their rows, and tells which ones really moved.
fn move_centroids(
    x: &[f32],
    dim: usize,
    rows: &[Assigned],
    dirty: &[bool],
    centroids: &mut [f32],
) -> Vec<bool> {
    // A counting sort: the rows of centroid c are members[starts[c]..starts[c + 1]], ascending.
    let mut starts = vec![0usize];
    for count in count(rows, dirty.len()) {
        starts.push(starts[starts.len() - 1] + count as usize);
    }
    let mut next = starts.clone();
    let mut members = vec![0u32; rows.len()];
    for (i, r) in (0..).zip(rows) {
        members[next[r.code as usize]] = i;
        next[r.code as usize] += 1;
    }
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
            sums.iter_mut()
                .zip(row(x, i, dim))
                .for_each(|(sum, &v)| *sum += f64::from(v));
        }
        let mut moved = false;
        for (c, sum) in centroid.iter_mut().zip(sums) {
            let mean = (*sum / members.len() as f64) as f32;
            moved |= mean != *c;
            *c = mean;
        }
        moved
    });
    moves.collect()
}

fn count(rows: &[Assigned], size: usize) -> Vec<u32> {
    let mut counts = vec![0; size];
    rows.iter().for_each(|r| counts[r.code as usize] += 1);
    counts
}

/// The elements of an array in standard layout.
fn flat<D: Data<Elem = f32>>(x: &ArrayBase<D, Ix2>) -> &[f32] {
    x.as_slice().unwrap_or(&[])
}

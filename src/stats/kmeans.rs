//! k-means for codebooks: thousands of centroids, tens of thousands of points per head.
//!
//! [`cluster`] runs k-means++ seeding and Lloyd's algorithm for all heads that a device holds; [`fit`] does
//! so for one head on the CPU; [`Codebook::nearest`] encodes. The device does the arithmetic
//! ([`crate::compute::device::Points`]). Random choices, the repair of empty centroids and the decision to
//! stop are made here, once for all devices. linfa's [`Fit`] and [`PredictInplace`] are built on top.
//!
//! **Seeding in batches.** k-means++ draws each centroid by the rows' distances to the nearest centroid so
//! far. Here a row is drawn by its distance at the last refresh and accepted with probability
//! `now / stale`. This is rejection sampling, so the D² distribution is exact; and all refreshes together
//! cost one Lloyd pass of matrix products, instead of one sweep over the points per centroid. All devices
//! get the same random numbers and draw the same rows, except where rounding tips a comparison.
//!
//! # Numerics
//!
//! The nearest centroid is found as the argmax of the score `x·c - ||c||²/2` in f32, whose error grows with
//! `||x|| ||c||`: **points are expected to be centered**. With an offset much larger than the spread the
//! choice is approximate ([`Codebook::nearest`] has the bound). Distances never come from scores; they are
//! recomputed as `sum (x - c)²` for the chosen centroid. Means and inertia are summed in f64. Finite values
//! whose squares overflow f32 give a useless codebook, but no panic.

mod seed;

use std::ops::ControlFlow;

use linfa::DatasetBase;
use linfa::traits::{Fit, PredictInplace};
use ndarray::{Array1, Array2, ArrayBase, ArrayView2, Axis, Data, Ix2};
use rayon::prelude::*;

use crate::compute::cpu::{CHUNK, Cpu, Panels, distances_to, search};
use crate::compute::device::{Assignment, Clusters, Device, Points};
use crate::compute::layout::elements;
use crate::error::Error;

/// Most centroids of a codebook: codes are stored as u16, and one value stays free.
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
        /// Number of rows given.
        points: usize,
        /// Number of centroids asked for.
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
    /// The given initial centroids do not have the codebook's shape.
    #[error("initial centroids: expected shape {expected:?}, found {found:?}")]
    InitShape {
        /// The codebook's shape, `(size, d)`.
        expected: (usize, usize),
        /// The shape given.
        found: (usize, usize),
    },
    /// The callback returned `Break`.
    #[error("k-means interrupted after pass {0}")]
    Interrupted(usize),
    /// The device failed.
    #[error(transparent)]
    Device(#[from] Error),
    /// An error of linfa's data set handling.
    #[error(transparent)]
    Linfa(#[from] linfa::Error),
}

impl From<KMeansError> for Error {
    fn from(e: KMeansError) -> Self {
        match e {
            KMeansError::Interrupted(_) => Self::interrupted(),
            KMeansError::Device(e) => e,
            other => {
                Self::invalid(other.to_string()).hint("check the points for NaN or infinite values, and use a ⟨size⟩ of at most the number of points")
            }
        }
    }
}

/// How the initial centroids are chosen.
#[derive(Clone, Debug)]
pub enum Init {
    /// Plain D² sampling: each centroid is a point drawn with probability proportional to its squared
    /// distance to the nearest centroid so far, with one candidate per step.
    KMeansPlusPlus,
    /// Distinct rows, drawn uniformly.
    Random,
    /// The given centroids, `[size, d]`.
    Precomputed(Array2<f32>),
}

/// The parameters of a fit.
#[derive(Clone, Debug)]
pub struct KMeansParams {
    /// Number of centroids, 1 to [`MAX_SIZE`].
    pub size: usize,
    /// Most Lloyd passes; a fit ends earlier once no assignment changes. 0 keeps the initial centroids.
    pub iterations: usize,
    /// A fit ends with the pass that lowers the inertia by less than this share; 0 disables the rule.
    pub min_gain: f64,
    /// How the initial centroids are chosen.
    pub init: Init,
    /// Seed of [`fit`]'s random choices; [`cluster`] takes one seed per head.
    pub seed: u64,
}

/// The outcome of a fit. Codes, counts and the last inertia refer to the returned codebook.
#[derive(Clone, Debug)]
pub struct KMeansFit {
    /// Centroids, `[M, d]`.
    pub codebook: Array2<f32>,
    /// The nearest centroid of each row, `[n]`.
    pub codes: Vec<u32>,
    /// Number of rows per centroid, `[M]`. Zero for the duplicates if there are fewer distinct points than
    /// centroids, and for a centroid that lost its rows in the last assignment.
    pub counts: Vec<u32>,
    /// Sum of squared distances: to the initial centroids, then to the centroids after each pass.
    pub inertia: Vec<f64>,
    /// Number of empty centroids reseeded, over all passes.
    pub empty_repaired: usize,
}

/// A codebook prepared for searching.
#[derive(Clone, Debug)]
pub struct Codebook {
    centroids: Array2<f32>,
    panels: Panels,
}

impl Codebook {
    /// Prepares `centroids`, `[M, d]`.
    pub fn new(centroids: Array2<f32>) -> Self {
        let centroids = centroids.as_standard_layout().into_owned();
        let (size, dim) = centroids.dim();
        let panels = Panels::pack(elements(&centroids), dim, 0, (0..size as u32).collect());
        Self { centroids, panels }
    }

    /// Returns the centroids, `[M, d]`.
    pub fn centroids(&self) -> &Array2<f32> {
        &self.centroids
    }

    /// Finds the nearest centroid of every row, on the threads of the current rayon pool.
    ///
    /// # Shapes
    /// `points [n, d]`, `codes [n]`, `distances [n]`.
    ///
    /// # Numerics
    /// The code is the argmax of `x·c - ||c||²/2` in f32; the lowest index wins ties. With
    /// `e = (d + 2) 2^-24 max_c (||x|| ||c|| + ||c||²/2)` the squared distance of the chosen
    /// centroid is at most `4 e` above the smallest. An offset common to all points enters `e`
    /// squared, so subtract it first. The distance is `sum (x - c)²` of the chosen centroid in f32, with
    /// a relative error of at most `(d / 16 + 20) 2^-24`. A row with NaN or infinities gets a valid code
    /// and a distance that is not finite.
    ///
    /// # Panics
    /// If the lengths differ, if `d` differs from the codebook's, or if the codebook is empty.
    pub fn nearest(&self, points: ArrayView2<f32>, codes: &mut [u32], distances: &mut [f32]) {
        self.codes(points, codes);
        assert_eq!(distances.len(), codes.len(), "distances of the points");
        let dim = points.ncols();
        let points = points.as_standard_layout();
        let (x, centroids) = (elements(&points), elements(&self.centroids));
        let out = codes.par_chunks(CHUNK).zip(distances.par_chunks_mut(CHUNK));
        let chunks = x.par_chunks(CHUNK * dim).zip(out);
        chunks.for_each(|(x, (codes, distances))| distances_to(x, dim, centroids, codes, distances));
    }

    /// Finds the nearest centroid of every row as [`Self::nearest`] does, without its distance.
    ///
    /// # Panics
    /// If the lengths differ, if `d` differs from the codebook's, or if the codebook is empty.
    pub fn codes(&self, points: ArrayView2<f32>, codes: &mut [u32]) {
        let (n, dim) = points.dim();
        assert!(!self.centroids.is_empty(), "a codebook without centroids");
        assert_eq!(dim, self.centroids.ncols(), "coordinates of points and centroids");
        assert_eq!(codes.len(), n, "codes of the points");
        let points = points.as_standard_layout();
        let chunks = elements(&points).par_chunks(CHUNK * dim);
        let chunks = chunks.zip(codes.par_chunks_mut(CHUNK));
        chunks.for_each(|(x, codes)| search(x, &self.panels, codes));
    }
}

/// Fits a codebook to the rows of each head; `seeds` holds one seed per head.
///
/// A pass moves every centroid to the mean of its rows and then reassigns the rows. A centroid without
/// rows moves to the row with the largest distance instead (distinct rows, the lowest index on ties), if
/// any row is off its centroid. A head ends once no assignment changes or a pass gains too little
/// ([`KMeansParams::min_gain`]). `on_pass` is called after every assignment with its number (0 is the
/// assignment to the initial centroids) and the inertia summed over the heads.
///
/// # Numerics
/// See the [module](self). The same input, device and seed give the same bytes, whichever other heads are fitted at the
/// same time.
///
/// # Errors
/// [`KMeansError`]: an impossible size, too few points, initial centroids of another shape, `Break` from
/// `on_pass`, a failed device.
///
/// # Source
/// k-means++: Arthur and Vassilvitskii 2007. Its use on whitened keys: A2ATS, arXiv 2502.12665,
/// equations 15 to 17. The authors' code leaves an empty centroid at zero; kvsmith reseeds it.
pub fn cluster(
    points: &mut dyn Points,
    params: &KMeansParams,
    seeds: &[u64],
    on_pass: &mut dyn FnMut(usize, f64) -> ControlFlow<()>,
) -> Result<Vec<KMeansFit>, KMeansError> {
    let (heads, n, dim) = points.dim();
    check(n, dim, params)?;
    seed::start(points, params, seeds)?;
    let mut fits: Vec<Running> = (0..heads).map(|_| Running::default()).collect();
    for pass in 0.. {
        let now = points.assignment()?;
        for (head, (fit, now)) in fits.iter_mut().zip(&now).enumerate() {
            fit.record(points, head, now, params.min_gain)?;
        }
        if on_pass(pass, now.iter().map(|a| a.inertia).sum()).is_break() {
            return Err(KMeansError::Interrupted(pass));
        }
        if pass == params.iterations {
            break;
        }
        for (head, (fit, now)) in fits.iter_mut().zip(&now).enumerate() {
            if fit.is_running() {
                let repaired = repair_empty(points, head, now)?;
                fit.empty_repaired += repaired;
                fit.settled = !now.changed && repaired == 0;
            }
        }
        if !fits.iter().any(Running::is_running) {
            break;
        }
        points.update()?;
    }
    let counts = points.assignment()?;
    let result = |(head, (fit, now)): (usize, (Running, Assignment))| {
        let (clusters, counts) = match fit.stopped {
            Some(stopped) => stopped,
            None => (points.clusters(head)?, now.counts),
        };
        Ok(KMeansFit {
            codebook: clusters.centroids,
            codes: clusters.codes,
            counts,
            inertia: fit.inertia,
            empty_repaired: fit.empty_repaired,
        })
    };
    fits.into_iter().zip(counts).enumerate().map(result).collect()
}

/// A head's fit in progress.
#[derive(Default)]
struct Running {
    /// Inertia of each assignment so far.
    inertia: Vec<f64>,
    empty_repaired: usize,
    /// Whether no assignment changes any more.
    settled: bool,
    /// Clusters and counts after the pass that gained less than [`KMeansParams::min_gain`]; a copy, since
    /// the device may run more passes for other heads.
    stopped: Option<(Clusters, Vec<u32>)>,
}

impl Running {
    fn is_running(&self) -> bool {
        !self.settled && self.stopped.is_none()
    }

    /// Records an assignment, and stops the head if the pass gained too little.
    fn record(
        &mut self,
        points: &mut dyn Points,
        head: usize,
        now: &Assignment,
        min_gain: f64,
    ) -> Result<(), Error> {
        if !self.is_running() {
            return Ok(());
        }
        let before = self.inertia.last().copied();
        self.inertia.push(now.inertia);
        if before.is_some_and(|before| min_gain > 0.0 && before - now.inertia < min_gain * before) {
            self.stopped = Some((points.clusters(head)?, now.counts.clone()));
            points.stop(head);
        }
        Ok(())
    }
}

/// Fits a codebook to `points` on the CPU: [`cluster`] for a single head.
///
/// # Shapes
/// `points [n, d]` with `size <= n < 2^32` and `d >= 1`.
///
/// # Errors
/// Those of [`cluster`]; a value that is not finite.
pub fn fit(
    points: ArrayView2<f32>,
    params: &KMeansParams,
    on_pass: &mut dyn FnMut(usize, f64) -> ControlFlow<()>,
) -> Result<KMeansFit, KMeansError> {
    check(points.nrows(), points.ncols(), params)?;
    check_finite("points", &points)?;
    let mut points = Cpu.points(points.insert_axis(Axis(0)).to_owned())?;
    let mut fits = cluster(points.as_mut(), params, &[params.seed], on_pass)?;
    fits.pop()
        .ok_or_else(|| KMeansError::Device(Error::invalid("no points")))
}

/// The fit behind linfa's trait: without a callback, and returning only the codebook.
impl<D: Data<Elem = f32>, T> Fit<ArrayBase<D, Ix2>, T, KMeansError> for KMeansParams {
    type Object = Codebook;

    fn fit(&self, dataset: &DatasetBase<ArrayBase<D, Ix2>, T>) -> Result<Codebook, KMeansError> {
        let go_on = &mut |_, _| ControlFlow::Continue(());
        Ok(Codebook::new(fit(dataset.records.view(), self, go_on)?.codebook))
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

/// Checks the number of points and the parameters.
fn check(n: usize, dim: usize, params: &KMeansParams) -> Result<(), KMeansError> {
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
    if let Init::Precomputed(centroids) = &params.init {
        let (expected, found) = ((size, dim), centroids.dim());
        if found != expected {
            return Err(KMeansError::InitShape { expected, found });
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

/// Moves each empty centroid of a head to the row with the largest distance, and returns how many moved.
/// A row does not qualify if its distance is zero, if its centroid has no other row, or if it equals a
/// row already taken.
fn repair_empty(points: &mut dyn Points, head: usize, now: &Assignment) -> Result<usize, KMeansError> {
    let mut counts = now.counts.clone();
    if !counts.contains(&0) {
        return Ok(0);
    }
    let clusters = points.clusters(head)?;
    let distance = |i: u32| clusters.distances[i as usize];
    let rows = 0..clusters.codes.len() as u32;
    let mut worst: Vec<u32> = rows.filter(|&i| distance(i) > 0.0).collect();
    worst.sort_by(|&a, &b| distance(b).total_cmp(&distance(a)));
    let empty: Vec<usize> = (0..counts.len()).filter(|c| counts[*c] == 0).collect();
    let mut empty = empty.into_iter().peekable();
    let mut taken: Vec<(u32, u32)> = Vec::new();
    let mut values: Vec<Array2<f32>> = Vec::new();
    for i in worst {
        let Some(&c) = empty.peek() else { break };
        let old = clusters.codes[i as usize] as usize;
        if counts[old] <= 1 {
            continue;
        }
        let row = points.rows(head, &[i])?;
        if values.contains(&row) {
            continue;
        }
        counts[old] -= 1;
        taken.push((i, c as u32));
        values.push(row);
        empty.next();
    }
    points.hand_over(head, &taken)?;
    Ok(taken.len())
}

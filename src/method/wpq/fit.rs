//! The fit of product quantisers to calibration keys.

use half::f16;
use ndarray::{Array1, Array2, Array3, ArrayView2, Axis, s};
use serde_json::{Map, Value};

use super::codebook::{ROWS, channels, product, project, subtract};
use super::section::{
    CHOL, CODEBOOK, Center, MEAN, MEAN_PRE, PASSES, ROTATION, STAGES, WpqParams, WpqQuality, WpqSection,
};
use crate::artifact::{Fit, FitText, HeadDone, LayerPart, LayerStates, SectionKind, object};
use crate::compute::cpu::row_mean;
use crate::env;
use crate::error::{Error, Result};
use crate::stats::kmeans::{self, Init, KMeansFit, KMeansParams};
use crate::stats::linalg;
use crate::stats::seeds::head_seed;
use crate::stats::whiten::Metric;

/// The hint of errors about values that the section cannot hold.
const OUTLIERS: &str = "the keys or queries of this head have extreme outliers; check the model and the text";

/// The fit of the section `wpq`.
pub(super) struct WpqFit {
    pub params: WpqParams,
}

impl Fit for WpqFit {
    fn kind(&self) -> &'static dyn SectionKind {
        &WpqSection
    }

    fn params(&self) -> Result<Map<String, Value>> {
        self.params.manifest()
    }

    fn working_bytes(&self, text: &FitText) -> usize {
        let (d, float, m) = (text.sizes.head_dim, size_of::<f32>(), self.params.groups());
        let rows = text.n * d * float;
        // Besides the rows, the rows of every group. Each row has, per group, two assignments, its codes before and
        // after a pass, and its place in the order by code.
        let clusters = text.n_kept * m * 11 * float;
        // Earlier, the rows of the fit, their projection and the rows of every group.
        let projected = rows + 2 * text.n_kept * d * float;
        text.split_bytes(1).max(projected).max(2 * rows + clusters)
    }

    fn layer(&self, states: &LayerStates, done: HeadDone) -> Result<LayerPart> {
        let mut part = LayerPart::default();
        for head in 0..states.sizes.n_kv_heads {
            env::check()?;
            let fit = HeadFit::new(&self.params, states, head);
            let quality = fit.and_then(|fit| fit.run(&mut part));
            let quality =
                quality.map_err(|e| e.context(format!("layer {}, KV head {head}", states.layer)))?;
            let left = 100.0 * quality.unexplained().unwrap_or(0.0);
            part.quality.push(object(&quality)?);
            done(head, Some(format!("{left:.1}% of the variance remains as error")));
        }
        Ok(part)
    }
}

/// The fit of one KV head.
struct HeadFit<'a> {
    params: &'a WpqParams,
    states: &'a LayerStates<'a>,
    head: usize,
    metric: Metric,
    mean: Array1<f32>,
    /// The mean of the keys before rotation, if its path is subtracted.
    mean_pre: Option<Array1<f32>>,
    /// The principal directions as columns, `[d,d]`.
    rotation: Array2<f32>,
    /// The keys of the fit and the held-out keys, each in the channels of the groups, `[m,n,dim]`.
    rows: [Array3<f32>; 2],
    /// Sums over the same keys of the squared norm in the directions that codes leave out.
    left_out: [f64; 2],
}

impl<'a> HeadFit<'a> {
    /// Computes the metric, the mean and the directions, and projects the keys.
    fn new(params: &'a WpqParams, states: &'a LayerStates, head: usize) -> Result<Self> {
        let moments = states.moments()?;
        if moments.count[head] == 0 {
            return Err(Error::invalid("no queries of this head were observed")
                .hint("recreate the dump from more text or with a smaller ⟨holdout⟩, so that not everything is held out"));
        }
        let metric =
            Metric::new(moments.sum_qq.index_axis(Axis(0), head)).map_err(|e| e.or_hint(OUTLIERS))?;
        let one = |keys: [Array3<f32>; 2]| keys.map(|keys| keys.index_axis_move(Axis(0), 0));
        let (mean_pre, keys) = match params.center {
            Center::Mean => (None, states.split(head..head + 1, true)?),
            Center::Path => {
                let mean = row_mean(one(states.split(head..head + 1, false)?)[0].view());
                let keys = states.split_around(head..head + 1, mean.view())?;
                (Some(mean), keys)
            }
        };
        let [kept, held_out] = one(keys);
        let mean = row_mean(kept.view());
        let [kept, held_out] = [kept, held_out].map(|keys| keys - &mean);
        let rotation = directions(states, kept.view(), &metric)?;
        let (m, dim) = (params.groups(), params.group_dim(mean.len()));
        let projection = project(metric.chol.view(), rotation.view(), m, dim);
        let beyond = metric
            .chol
            .dot(&rotation.slice(s![.., (m * dim).min(mean.len())..]));
        let left_out = [&kept, &held_out].map(|keys| squares(keys, &beyond));
        let rows = [kept, held_out].map(|keys| grouped(&keys, &projection, m));
        Ok(Self {
            params,
            states,
            head,
            metric,
            mean,
            mean_pre,
            rotation,
            rows,
            left_out,
        })
    }

    /// Clusters the keys of every group and, in the second stage, what the first leaves of them, and adds the head to
    /// the layer's part.
    fn run(mut self, part: &mut LayerPart) -> Result<WpqQuality> {
        let (_, n, _) = self.rows[0].dim();
        let described: f64 = self.rows[0].iter().map(|x| f64::from(*x).powi(2)).sum();
        let variance = (described + self.left_out[0]) / n as f64;
        if !variance.is_finite() {
            return Err(Error::invalid("a whitened key is NaN or infinite").hint(OUTLIERS));
        }
        let (mut words, mut last) = (Vec::new(), StageDone::default());
        for stage in 0..STAGES {
            let done = self.stage(stage, &mut words)?;
            last = StageDone {
                iterations: done.iterations.max(last.iterations),
                unused_codewords: done.unused_codewords + last.unused_codewords,
                ..done
            };
        }
        part.put(CODEBOOK, &words);
        part.put(MEAN, &self.mean.to_vec());
        if let Some(mean) = &self.mean_pre {
            part.put(MEAN_PRE, &mean.to_vec());
        }
        part.put(CHOL, &self.metric.chol.into_iter().collect::<Vec<_>>());
        part.put(ROTATION, &self.rotation.into_iter().collect::<Vec<_>>());
        let held_out = self.rows[1].len_of(Axis(1));
        let [inertia, held_out_inertia] = [0, 1].map(|i| last.inertia[i] + self.left_out[i]);
        Ok(WpqQuality {
            inertia: inertia / n as f64,
            held_out_inertia: (held_out > 0).then(|| held_out_inertia / held_out as f64),
            variance,
            iterations: last.iterations,
            unused_codewords: last.unused_codewords,
            condition: self.metric.condition,
            eps: self.metric.eps,
            keys: n,
        })
    }

    /// Clusters what is left of the keys, appends the words as they are stored, and subtracts each key's words from it.
    fn stage(&mut self, stage: usize, words: &mut Vec<f16>) -> Result<StageDone> {
        let (m, n, dim) = self.rows[0].dim();
        let (params, states) = (self.params, self.states);
        let first = (self.head * STAGES + stage) * m;
        let seed = |group| head_seed(params.seed, states.layer, first + group);
        let seeds: Vec<u64> = (0..m).map(seed).collect();
        let kmeans = KMeansParams {
            size: params.words.min(n),
            iterations: PASSES,
            min_gain: 0.0,
            init: Init::KMeansPlusPlus,
            seed: params.seed,
        };
        let mut points = states.device.points(self.rows[0].clone())?;
        let fits = kmeans::cluster(points.as_mut(), &kmeans, &seeds, &mut |_, _| env::flow())?;
        let stored = stored(&fits, params.words, dim)?;
        words.extend(stored.iter().map(|v| f16::from_f32(*v)));
        let passes = fits.iter().map(|fit| fit.inertia.len().saturating_sub(1));
        let mut done = StageDone {
            iterations: passes.max().unwrap_or(0),
            ..StageDone::default()
        };
        drop(fits);
        for (i, rows) in self
            .rows
            .iter_mut()
            .enumerate()
            .filter(|(_, rows)| !rows.is_empty())
        {
            if i == 1 {
                points = states.device.points(rows.clone())?;
            }
            points.assign(stored.view())?;
            let groups = points.assignment()?;
            done.inertia[i] = groups.iter().map(|group| group.inertia).sum();
            if i == 0 {
                let counts = groups.iter().flat_map(|group| &group.counts);
                done.unused_codewords = counts.filter(|count| **count == 0).count();
            }
            for (j, rows) in rows.outer_iter_mut().enumerate() {
                subtract(rows, &points.clusters(j)?.codes, stored.index_axis(Axis(0), j));
            }
        }
        Ok(done)
    }
}

/// The figures that a stage reports.
#[derive(Default)]
struct StageDone {
    /// Sum of the squared errors of the keys of the fit, and of the held-out keys.
    inertia: [f64; 2],
    iterations: usize,
    /// Number of words that no key of the fit is nearest to.
    unused_codewords: usize,
}

/// Returns the principal directions, in the metric, of centred keys `[n,d]`: one per column, the largest variance
/// first, `[d,d]`. In each direction, the entry with the largest magnitude is positive, so that the answer is unique.
///
/// # Numerics
/// The second moment of the keys is whitened and decomposed in f64.
fn directions(states: &LayerStates, keys: ArrayView2<f32>, metric: &Metric) -> Result<Array2<f32>> {
    let moment = states.device.second_moment(keys.insert_axis(Axis(0)))?;
    let chol = metric.chol.mapv(f64::from);
    let whitened = chol.t().dot(&moment.index_axis(Axis(0), 0)).dot(&chol);
    let whitened = (&whitened + &whitened.t()) * 0.5;
    if !whitened.iter().all(|v| v.is_finite()) {
        return Err(Error::invalid("the second moment of the keys is not finite").hint(OUTLIERS));
    }
    let (_, vectors) = linalg::eigen(whitened.view())?
        .ok_or_else(|| Error::invalid("the eigenvectors of the whitened keys did not converge"))?;
    let d = vectors.nrows();
    let mut out = Array2::zeros((d, d));
    for (i, mut column) in out.columns_mut().into_iter().enumerate() {
        let vector = vectors.column(d - 1 - i);
        let largest = vector
            .iter()
            .fold(0.0f64, |a, v| if v.abs() > a.abs() { *v } else { a });
        column.assign(&vector.mapv(|v| (v * largest.signum()) as f32));
    }
    Ok(out)
}

/// Returns the sum of the squared entries of the product of rows and a map, in bounded memory.
fn squares(rows: &Array2<f32>, by: &Array2<f32>) -> f64 {
    let chunks = rows.axis_chunks_iter(Axis(0), ROWS);
    let of = |rows| {
        product(rows, by.view())
            .iter()
            .map(|x| f64::from(*x).powi(2))
            .sum::<f64>()
    };
    chunks.map(of).sum()
}

/// Projects centred keys `[n,d]` to the channels of every group, `[m,n,dim]`.
fn grouped(centred: &Array2<f32>, projection: &Array2<f32>, groups: usize) -> Array3<f32> {
    let z = product(centred.view(), projection.view());
    let dim = projection.ncols() / groups;
    let mut out = Array3::zeros((groups, centred.nrows(), dim));
    for (group, mut out) in out.outer_iter_mut().enumerate() {
        out.assign(&z.slice(s![.., channels(group, dim)]));
    }
    out
}

/// Returns the words as they are stored, rounded to f16, `[m,words,dim]`. The quality report is about these words. If a
/// fit has fewer words, copies of its first word fill the rest; no key gets their numbers, because the lowest number
/// wins a tie.
fn stored(fits: &[KMeansFit], words: usize, dim: usize) -> Result<Array3<f32>> {
    let mut stored = Array3::zeros((fits.len(), words, dim));
    for (mut stored, fit) in stored.outer_iter_mut().zip(fits) {
        for (word, mut to) in stored.outer_iter_mut().enumerate() {
            let from = if word < fit.codebook.nrows() { word } else { 0 };
            to.assign(&fit.codebook.row(from).mapv(|v| f16::from_f32(v).to_f32()));
        }
    }
    if stored.iter().any(|v: &f32| !v.is_finite()) {
        return Err(Error::invalid("a codeword is outside the range of f16").hint(OUTLIERS));
    }
    Ok(stored)
}

//! The fit of product quantisers to calibration keys.

use half::f16;
use ndarray::{Array1, Array2, Array3, ArrayView2, Axis, concatenate, s};
use serde_json::{Map, Value};

use super::codebook::{ROWS, channels, product, project, subtract};
use super::section::{
    CHOL, CODEBOOK, Center, MEAN, MEAN_PRE, PASSES, ROTATION, STAGES, WpqParams, WpqQuality, WpqSection,
};
use crate::artifact::{Fit, FitText, HeadDone, LayerPart, LayerStates, SectionKind, object};
use crate::compute::cpu::row_mean;
use crate::compute::device::Device;
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
        // Earlier, the rows of the fit, their projection and the rows of every group, besides those of earlier heads.
        let projected = rows + 2 * text.n_kept * d * float;
        let heads = self
            .at_once(text.device, text.n_kept, d)
            .min(text.sizes.n_kv_heads);
        let reading = (heads - 1) * rows + text.split_bytes(1).max(projected);
        reading.max(heads * (2 * rows + clusters))
    }

    fn layer(&self, states: &LayerStates, done: HeadDone) -> Result<LayerPart> {
        let mut part = LayerPart::default();
        let (g, d) = (states.sizes.n_kv_heads, states.sizes.head_dim);
        let at_once = self.at_once(states.device, states.n_kept(), d);
        for first in (0..g).step_by(at_once) {
            let of =
                |head: usize| move |e: Error| e.context(format!("layer {}, KV head {head}", states.layer));
            let open = |head| {
                env::check()?;
                HeadFit::new(&self.params, states, head).map_err(of(head))
            };
            let mut fits = (first..g.min(first + at_once))
                .map(open)
                .collect::<Result<Vec<_>>>()?;
            for stage in 0..STAGES {
                let done = HeadFit::stage(&mut fits, stage);
                // Which of several heads an error belongs to is not known.
                done.map_err(|e| match fits.len() {
                    1 => of(first)(e),
                    n => e.context(format!(
                        "layer {}, KV heads {first} to {}",
                        states.layer,
                        first + n - 1
                    )),
                })?;
            }
            for fit in fits {
                let head = fit.head;
                let quality = fit.finish(&mut part);
                let left = 100.0 * quality.unexplained().unwrap_or(0.0);
                part.quality.push(object(&quality)?);
                done(head, Some(format!("{left:.1}% of the variance remains as error")));
            }
        }
        Ok(part)
    }
}

impl WpqFit {
    /// Returns how many KV heads are clustered together: those whose groups the device takes at once.
    fn at_once(&self, device: &dyn Device, n: usize, d: usize) -> usize {
        let (m, words) = (self.params.groups(), self.params.words);
        (device.heads_at_once(n, self.params.group_dim(d), words) / m).max(1)
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
    /// The variance of the keys.
    variance: f64,
    /// The words of the stages so far, as they are stored.
    words: Vec<f16>,
    /// The figures of the stages so far.
    stages: StageDone,
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
        let described: f64 = rows[0].iter().map(|x| f64::from(*x).powi(2)).sum();
        let variance = (described + left_out[0]) / rows[0].len_of(Axis(1)) as f64;
        if !variance.is_finite() {
            return Err(Error::invalid("a whitened key is NaN or infinite").hint(OUTLIERS));
        }
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
            variance,
            words: Vec::new(),
            stages: StageDone::default(),
        })
    }

    /// Adds the head to the layer's part, after all stages.
    fn finish(self, part: &mut LayerPart) -> WpqQuality {
        part.put(CODEBOOK, &self.words);
        part.put(MEAN, &self.mean.to_vec());
        if let Some(mean) = &self.mean_pre {
            part.put(MEAN_PRE, &mean.to_vec());
        }
        part.put(CHOL, &self.metric.chol.into_iter().collect::<Vec<_>>());
        part.put(ROTATION, &self.rotation.into_iter().collect::<Vec<_>>());
        let [n, held_out] = self.rows.map(|rows| rows.len_of(Axis(1)));
        let [inertia, held_out_inertia] = [0, 1].map(|i| self.stages.inertia[i] + self.left_out[i]);
        WpqQuality {
            inertia: inertia / n as f64,
            held_out_inertia: (held_out > 0).then(|| held_out_inertia / held_out as f64),
            variance: self.variance,
            iterations: self.stages.iterations,
            unused_codewords: self.stages.unused_codewords,
            condition: self.metric.condition,
            eps: self.metric.eps,
            keys: n,
        }
    }

    /// Clusters what is left of the keys of several heads, every group by itself, appends the words as they are stored, and
    /// subtracts each key's words from it.
    fn stage(fits: &mut [Self], stage: usize) -> Result<()> {
        let [first, ..] = &*fits else { return Ok(()) };
        let (params, states) = (first.params, first.states);
        let (m, n, dim) = first.rows[0].dim();
        let seed_of =
            |fit: &Self, group| head_seed(params.seed, states.layer, (fit.head * STAGES + stage) * m + group);
        let seeds = fits
            .iter()
            .flat_map(|fit| (0..m).map(move |group| seed_of(fit, group)));
        let seeds: Vec<u64> = seeds.collect();
        let kmeans = KMeansParams {
            size: params.words.min(n),
            iterations: PASSES,
            min_gain: 0.0,
            init: Init::KMeansPlusPlus,
            seed: params.seed,
        };
        let all = |fits: &[Self], i: usize| {
            let views: Vec<_> = fits.iter().map(|fit| fit.rows[i].view()).collect();
            concatenate(Axis(0), &views)
        };
        let mut points = states.device.points(all(&*fits, 0)?)?;
        let found = kmeans::cluster(points.as_mut(), &kmeans, &seeds, &mut |_, _| env::flow())?;
        let stored = stored(&found, params.words, dim)?;
        for (h, fit) in fits.iter_mut().enumerate() {
            let of = s![h * m..(h + 1) * m, .., ..];
            fit.words
                .extend(stored.slice(of).iter().map(|v| f16::from_f32(*v)));
            let passes = found[h * m..(h + 1) * m]
                .iter()
                .map(|of| of.inertia.len().saturating_sub(1));
            fit.stages.iterations = passes.max().unwrap_or(0).max(fit.stages.iterations);
        }
        drop(found);
        for i in 0..2 {
            if fits[0].rows[i].is_empty() {
                continue;
            }
            if i == 1 {
                points = states.device.points(all(&*fits, 1)?)?;
            }
            points.assign(stored.view())?;
            let groups = points.assignment()?;
            for (h, (fit, groups)) in fits.iter_mut().zip(groups.chunks(m)).enumerate() {
                fit.stages.inertia[i] = groups.iter().map(|group| group.inertia).sum();
                if i == 0 {
                    let counts = groups.iter().flat_map(|group| &group.counts);
                    fit.stages.unused_codewords += counts.filter(|count| **count == 0).count();
                }
                for (j, rows) in fit.rows[i].outer_iter_mut().enumerate() {
                    let (at, codes) = (h * m + j, points.clusters(h * m + j)?.codes);
                    subtract(rows, &codes, stored.index_axis(Axis(0), at));
                }
            }
        }
        Ok(())
    }
}

/// The figures that the stages report.
#[derive(Default)]
struct StageDone {
    /// Sum of the squared errors of the keys of the fit, and of the held-out keys, after the last stage.
    inertia: [f64; 2],
    /// The most passes of a group.
    iterations: usize,
    /// Number of words, in all stages, that no key of the fit is nearest to.
    unused_codewords: usize,
}

/// Returns the principal directions, in the metric, of centered keys `[n,d]`: one per column, the largest variance
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
    let (_, directions) = linalg::principal(whitened.view())?
        .ok_or_else(|| Error::invalid("the eigenvectors of the whitened keys did not converge"))?;
    Ok(directions.mapv(|v| v as f32))
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

/// Projects centered keys `[n,d]` to the channels of every group, `[m,n,dim]`.
fn grouped(centered: &Array2<f32>, projection: &Array2<f32>, groups: usize) -> Array3<f32> {
    let z = product(centered.view(), projection.view());
    let dim = projection.ncols() / groups;
    let mut out = Array3::zeros((groups, centered.nrows(), dim));
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

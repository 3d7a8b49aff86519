//! The fit of codebooks to calibration keys.

use std::borrow::Cow;
use std::ops::Range;

use half::f16;
use ndarray::{Array3, ArrayView2, ArrayView3, Axis};
use serde_json::{Map, Value};

use super::section::{
    A2atsSection, CHOL, CODEBOOK, COUNT, CodebookQuality, FitMetric, FitParams, MEAN, Rotation,
};
use crate::artifact::{Fit, FitText, HeadDone, LayerPart, LayerStates, SectionKind, object};
use crate::compute::device::{Points, Statistic};
use crate::env;
use crate::error::{Error, Result};
use crate::stats::kmeans::{self, KMeansFit};
use crate::stats::moments::{LayerMoments, Position};
use crate::stats::seeds::head_seed;
use crate::stats::whiten::Metric;

impl Fit for FitParams {
    fn kind(&self) -> &'static dyn SectionKind {
        &A2atsSection
    }

    fn params(&self) -> Result<Map<String, Value>> {
        self.manifest()
    }

    fn command(&self) -> String {
        format!("{} ⟨size={}⟩", self.kind().facts().command, self.size)
    }

    fn working_bytes(&self, text: &FitText) -> usize {
        let (d, float) = (text.sizes.head_dim, size_of::<f32>());
        let device = self.kind().device(text.device);
        let heads = device.heads_at_once(text.n_kept, d, self.size);
        let heads = heads.clamp(1, text.sizes.n_kv_heads);
        // Each row has two assignments, its codes before and after a pass, and its place in the order by code. Each
        // codeword has a place in two codebooks, in the means and in two sets of panels.
        let clusters = text.n_kept * 11 * float + 5 * self.size * d * float;
        let clustering = heads * (text.n * d * float + clusters);
        text.split_bytes(heads).max(clustering)
    }

    fn reads_pre_sums(&self) -> bool {
        matches!(self.rotation, Rotation::Buckets(_))
    }

    fn layer(&self, states: &LayerStates, done: HeadDone) -> Result<LayerPart> {
        let mut part = LayerPart::default();
        let moments = match &self.rotation {
            Rotation::At(_) => Cow::Borrowed(states.moments()?),
            Rotation::Buckets(buckets) => {
                let rotations = buckets.edges.rotations(states.rope);
                Cow::Owned(states.sums()?.over(&rotations, &buckets.weights[states.layer]))
            }
        };
        for heads in states.head_runs(self.size) {
            env::check()?;
            HeadRun::new(states, heads, self, &moments)?.fit(&mut part, done)?;
        }
        Ok(part)
    }
}

/// The hint of errors about values that the section cannot hold.
const OUTLIERS: &str = "the keys or queries of this head have extreme outliers; check the model and the text";

/// Heads that are fitted together by Eq. 13 and 15-17: metric, whitening, clustering. The codebooks stay in whitened
/// coordinates.
struct HeadRun<'a> {
    states: &'a LayerStates<'a>,
    params: &'a FitParams,
    heads: Range<usize>,
    metrics: Vec<Metric>,
    /// The Cholesky factors of the metrics, `[b,d,d]`.
    chol: Array3<f32>,
}

impl<'a> HeadRun<'a> {
    /// Computes the metric of every head.
    fn new(
        states: &'a LayerStates,
        heads: Range<usize>,
        params: &'a FitParams,
        moments: &LayerMoments,
    ) -> Result<Self> {
        let metric = |head: usize| {
            match params.metric {
            FitMetric::QueryAware if moments.count[head] == 0 => {
                Err(Error::invalid("no queries of this head were observed")
                    .hint("recompute the moments from more text or with a smaller ⟨holdout⟩, so that not everything is held out"))
            }
            FitMetric::QueryAware => Metric::new(moments.sum_qq.index_axis(Axis(0), head)),
            FitMetric::Plain => Ok(Metric::euclidean(states.sizes.head_dim)),
        }
        };
        let in_place = |head| metric(head).map_err(|e| at(states, head, e).or_hint(OUTLIERS));
        let metrics = heads.clone().map(in_place).collect::<Result<Vec<_>>>()?;
        let factors: Vec<_> = metrics.iter().map(|m| m.chol.view()).collect();
        Ok(Self {
            chol: ndarray::stack(Axis(0), &factors)?,
            states,
            params,
            heads,
            metrics,
        })
    }

    /// Fits the codebooks and adds them to the layer's part.
    fn fit(self, part: &mut LayerPart, done: HeadDone) -> Result<()> {
        let rotated = self.params.rotation == Rotation::At(Position::Own);
        let [fitted, held_out] = self.states.split(self.heads.clone(), rotated)?;
        // Eq. 15: z = k L, which is then centered.
        let mut points = self.states.device.points(fitted)?;
        let (_, n, _) = points.dim();
        points.whiten(self.chol.view())?;
        let mean = points.channel_statistic(0..n, Statistic::Mean)?;
        points.subtract(0..n, mean.view())?;
        let squares = self.square_sums(points.as_mut())?;
        let fits = self.cluster(points.as_mut())?;
        let stored = self.stored(&fits)?;
        points.assign(stored.view())?;
        let assignments = points.assignment()?;
        drop(points);
        let held_out = self.held_out_inertia(held_out, mean.view(), stored.view())?;
        for (i, head) in self.heads.clone().enumerate() {
            let (metric, fit, assigned) = (&self.metrics[i], &fits[i], &assignments[i]);
            let codebook = stored.index_axis(Axis(0), i).mapv(f16::from_f32);
            part.put(CODEBOOK, &codebook.into_iter().collect::<Vec<_>>());
            part.put(MEAN, &mean.row(i).to_vec());
            part.put(CHOL, &metric.chol.iter().copied().collect::<Vec<_>>());
            part.put(COUNT, &assigned.counts);
            let quality = CodebookQuality {
                inertia: assigned.inertia / n as f64,
                held_out_inertia: held_out.as_ref().map(|inertia| inertia[i]),
                variance: squares[i] / n as f64,
                inertia_history: fit.inertia.iter().map(|sum| sum / n as f64).collect(),
                iterations: fit.inertia.len().saturating_sub(1),
                empty_repaired: fit.empty_repaired,
                unused_codewords: assigned.counts.iter().filter(|c| **c == 0).count(),
                usage_entropy_bits: entropy_bits(&assigned.counts),
                condition: metric.condition,
                eps: metric.eps,
                keys: n,
            };
            part.quality.push(object(&quality)?);
            done(head, Some(quality.summary()));
        }
        Ok(())
    }

    /// Returns the sum of the squares of each head's values, which is finite only if all values are.
    fn square_sums(&self, points: &mut dyn Points) -> Result<Vec<f64>> {
        let squares = points.square_sum()?;
        match squares.iter().position(|sum| !sum.is_finite()) {
            None => Ok(squares),
            Some(i) => Err(self.outliers(i, "a whitened key is NaN or infinite")),
        }
    }

    /// Makes the error that the section cannot hold the values of head `i` of the run.
    fn outliers(&self, i: usize, what: &str) -> Error {
        let error = Error::invalid(what).hint(OUTLIERS);
        at(self.states, self.heads.start + i, error)
    }

    /// Clusters the keys of every head.
    fn cluster(&self, points: &mut dyn Points) -> Result<Vec<KMeansFit>> {
        let seed = |head| head_seed(self.params.seed, self.states.layer, head);
        let seeds: Vec<u64> = self.heads.clone().map(seed).collect();
        let mut flow = |_: usize, _: f64| env::flow();
        Ok(kmeans::cluster(points, &self.params.kmeans(), &seeds, &mut flow)?)
    }

    /// Returns the codebooks as they are stored, rounded to f16, `[b,M,d]`. The quality report is about these
    /// codebooks.
    fn stored(&self, fits: &[KMeansFit]) -> Result<Array3<f32>> {
        let d = self.states.sizes.head_dim;
        let mut stored = Array3::zeros((fits.len(), self.params.size, d));
        for (i, (mut stored, fit)) in stored.outer_iter_mut().zip(fits).enumerate() {
            stored.assign(&fit.codebook.mapv(|v| f16::from_f32(v).to_f32()));
            if stored.iter().any(|v: &f32| !v.is_finite()) {
                return Err(self.outliers(i, "a codeword is outside the range of f16"));
            }
        }
        Ok(stored)
    }

    /// Returns the mean squared distance of each head's held-out keys, `[b,n,d]`, to the nearest stored codeword;
    /// `None` if there are no held-out keys.
    fn held_out_inertia(
        &self,
        keys: Array3<f32>,
        mean: ArrayView2<f32>,
        stored: ArrayView3<f32>,
    ) -> Result<Option<Vec<f64>>> {
        let n = keys.len_of(Axis(1));
        if n == 0 {
            return Ok(None);
        }
        let mut points = self.states.device.points(keys)?;
        points.whiten(self.chol.view())?;
        points.subtract(0..n, mean)?;
        points.assign(stored)?;
        let inertia = points.assignment()?.into_iter().map(|a| a.inertia / n as f64);
        Ok(Some(inertia.collect()))
    }
}

/// Adds the layer and the head to an error.
fn at(states: &LayerStates, head: usize, e: Error) -> Error {
    e.context(format!("layer {}, KV head {head}", states.layer))
}

/// Returns the entropy, in bits, of how often the codewords are used.
fn entropy_bits(count: &[u32]) -> f64 {
    let n: f64 = count.iter().map(|c| f64::from(*c)).sum();
    let used = count.iter().filter(|c| **c > 0);
    used.map(|c| f64::from(*c) / n).map(|p| -p * p.log2()).sum()
}

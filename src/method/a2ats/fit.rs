//! Codebooks from calibration keys.

use std::ops::Range;

use half::f16;
use ndarray::{Array1, Array2, Array3, ArrayView2, ArrayView3, Axis};
use serde_json::{Value, json};

use super::MAX_SIZE;
use crate::artifact::LayerPart;
use crate::compute::device::{Device, Statistic};
use crate::error::{Error, Result};
use crate::interrupt;
use crate::method::LayerKeys;
use crate::stats::kmeans::{self, Init, KMeansFit, KMeansParams};
use crate::stats::moments::{LayerMoments, Position};
use crate::stats::whiten::{EPS, Metric};
use crate::store::to_bytes;

/// How k-means starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum FitInit {
    /// Each next centroid is a key drawn by its squared distance to those chosen.
    #[value(name = "kmeans++")]
    KMeansPlusPlus,
}

/// The distance in which keys are clustered: the paper's ablation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum FitMetric {
    /// That of the queries' second moment, Eq. 13.
    QueryAware,
    /// Euclidean.
    Plain,
}

/// Hyper-parameters of a codebook fit.
#[derive(Clone, Debug)]
pub struct FitParams {
    /// Codewords per KV head, M.
    pub size: usize,
    /// Most Lloyd passes.
    pub iterations: usize,
    /// A pass that lowers the objective by less than this share is the last.
    pub min_gain: f64,
    /// How k-means starts.
    pub init: FitInit,
    /// Seeds k-means, per layer and head.
    pub seed: u64,
    /// Where the moments' queries were rotated to; keys are taken before rotation for a fixed relative
    /// position, and at their own positions otherwise.
    pub position: Position,
    /// The distance in which keys are clustered.
    pub metric: FitMetric,
}

impl FitParams {
    /// The section's parameters in the manifest.
    pub fn manifest(&self) -> Value {
        json!({
            "codebook_size": self.size,
            "iterations": self.iterations,
            "min_gain": self.min_gain,
            "init": match self.init {
                FitInit::KMeansPlusPlus => "kmeans++",
            },
            "seed": self.seed,
            "wrope_position": self.position.windowed(),
            "rope_space": match self.position {
                Position::Windowed(_) => "pre",
                Position::Own => "post",
            },
            "metric": match self.metric {
                FitMetric::QueryAware => "query-aware",
                FitMetric::Plain => "plain",
            },
            "eps": EPS,
            "h_pool": "kv-head-sum",
            "h_normalisation": "rms",
        })
    }

    /// What k-means is told; seeds are per head.
    fn kmeans(&self) -> KMeansParams {
        KMeansParams {
            size: self.size,
            iterations: self.iterations,
            min_gain: self.min_gain,
            init: match self.init {
                FitInit::KMeansPlusPlus => Init::KMeansPlusPlus,
            },
            seed: self.seed,
        }
    }

    /// Fails if the codebook cannot be fitted on `kept` keys.
    pub fn check(&self, kept: usize) -> Result<()> {
        if self.size == 0 || self.size > MAX_SIZE {
            return Err(Error::usage(format!(
                "--size {} must be between 1 and {MAX_SIZE}",
                self.size
            )));
        }
        if kept < self.size {
            return Err(Error::failed(format!(
                "{kept} calibration tokens are too few for a codebook of {}",
                self.size
            ))
            .hint(format!(
                "give more text, or a smaller --size ({} or less)",
                (kept / 20).max(1)
            )));
        }
        Ok(())
    }
}

/// Fits the codebooks of one layer; `done` is called for each head.
pub fn fit_layer(
    keys: &LayerKeys,
    moments: &LayerMoments,
    params: &FitParams,
    layer: usize,
    done: &mut dyn FnMut(usize, &Value),
) -> Result<LayerPart> {
    let mut tensors = vec![Vec::new(); 4];
    let mut quality = Vec::new();
    let d = moments.sum_qq.len_of(Axis(1));
    let kept = keys.kept.iter().filter(|kept| **kept).count();
    let at_once = keys.device.heads_at_once(kept, d, params.size).max(1);
    for first in (0..keys.n_kv_heads).step_by(at_once) {
        interrupt::check()?;
        let heads = first..keys.n_kv_heads.min(first + at_once);
        for (head, fit) in heads.clone().zip(fit_heads(keys, heads, moments, params, layer)?) {
            tensors[0].extend(to_bytes(&fit.codebook));
            tensors[1].extend(to_bytes(&fit.mean.to_vec()));
            tensors[2].extend(fit.chol.iter().flat_map(|v| v.to_le_bytes()));
            tensors[3].extend(to_bytes(&fit.count));
            done(head, &fit.quality);
            quality.push(fit.quality);
        }
    }
    Ok(LayerPart { tensors, quality })
}

/// Eq. 13 and 15-17 for one head: metric, whitening, clustering; the codebook stays whitened.
struct HeadFit {
    codebook: Vec<f16>,
    mean: Array1<f32>,
    chol: Array2<f32>,
    count: Vec<u32>,
    quality: Value,
}

fn fit_heads(
    keys: &LayerKeys,
    heads: Range<usize>,
    moments: &LayerMoments,
    params: &FitParams,
    layer: usize,
) -> Result<Vec<HeadFit>> {
    let at = |head: usize| move |e: Error| e.context(format!("layer {layer}, KV head {head}"));
    let metric = |head: usize| match params.metric {
        FitMetric::QueryAware if moments.count[head] == 0 => Err(Error::failed("the moments hold no query")),
        FitMetric::QueryAware => Metric::new(moments.sum_qq.index_axis(Axis(0), head)),
        FitMetric::Plain => Ok(Metric::euclidean(moments.sum_qq.len_of(Axis(1)))),
    };
    let metrics = heads.clone().map(|head| metric(head).map_err(at(head)));
    let metrics: Vec<Metric> = metrics.collect::<Result<_>>()?;
    let factors: Vec<_> = metrics.iter().map(|m| m.chol.view()).collect();
    let chol = ndarray::stack(Axis(0), &factors).map_err(|e| Error::failed(e.to_string()))?;
    let rotated = params.position == Position::Own;
    let [fitted, held_out] = keys.split(heads.clone(), rotated)?;
    // Eq. 15: z = k L; then centred.
    let mut points = keys.device.points(fitted)?;
    let (_, n, _) = points.dim();
    points.whiten(chol.view())?;
    let mean = points.channel_statistic(0..n, Statistic::Mean)?;
    points.subtract(0..n, mean.view())?;
    let squares = points.square_sum()?;
    if let Some(i) = squares.iter().position(|sum| !sum.is_finite()) {
        let error =
            Error::failed("a whitened key is not finite").hint("the keys of this head have extreme outliers");
        return Err(at(heads.start + i)(error));
    }
    let seeds = heads.clone().map(|head| head_seed(params.seed, layer, head));
    let fits = kmeans::cluster(
        points.as_mut(),
        &params.kmeans(),
        &seeds.collect::<Vec<u64>>(),
        &mut |_, _| interrupt::flow(),
    )?;
    // What counts is the codebook that is stored, so everything is reported by its f16 values.
    let mut stored = Array3::zeros((fits.len(), params.size, mean.ncols()));
    for ((mut stored, fit), head) in stored.outer_iter_mut().zip(&fits).zip(heads.clone()) {
        stored.assign(&fit.codebook.mapv(|v| f16::from_f32(v).to_f32()));
        if stored.iter().any(|v: &f32| !v.is_finite()) {
            let error = Error::failed("a codeword is outside the range of f16");
            return Err(at(head)(
                error.hint("the keys of this head have extreme outliers"),
            ));
        }
    }
    points.assign(stored.view())?;
    let assignments = points.assignment()?;
    drop(points);
    let held_out = held_out_inertia(keys.device, held_out, chol.view(), mean.view(), stored.view())?;
    let one = |(i, (metric, fit)): (usize, (Metric, KMeansFit))| HeadFit {
        codebook: stored
            .index_axis(Axis(0), i)
            .iter()
            .map(|v| f16::from_f32(*v))
            .collect(),
        mean: mean.row(i).to_owned(),
        quality: json!({
            "inertia": assignments[i].inertia / n as f64,
            "held_out_inertia": held_out.as_ref().map(|inertia| inertia[i]),
            "variance": squares[i] / n as f64,
            "inertia_history": fit.inertia.iter().map(|i| i / n as f64).collect::<Vec<f64>>(),
            "iterations": fit.inertia.len().saturating_sub(1),
            "empty_repaired": fit.empty_repaired,
            "unused_codewords": assignments[i].counts.iter().filter(|c| **c == 0).count(),
            "usage_entropy_bits": entropy_bits(&assignments[i].counts),
            "condition": metric.condition,
            "eps": metric.eps,
            "keys": n,
        }),
        chol: metric.chol,
        count: assignments[i].counts.clone(),
    };
    Ok(metrics.into_iter().zip(fits).enumerate().map(one).collect())
}

/// Mean squared distance of each head's held-out keys, `[b,n,d]`, to the stored codebooks; none without
/// keys.
fn held_out_inertia(
    device: &dyn Device,
    keys: Array3<f32>,
    chol: ArrayView3<f32>,
    mean: ArrayView2<f32>,
    stored: ArrayView3<f32>,
) -> Result<Option<Vec<f64>>> {
    let n = keys.len_of(Axis(1));
    if n == 0 {
        return Ok(None);
    }
    let mut points = device.points(keys)?;
    points.whiten(chol)?;
    points.subtract(0..n, mean)?;
    points.assign(stored)?;
    let inertia = points.assignment()?.into_iter().map(|a| a.inertia / n as f64);
    Ok(Some(inertia.collect()))
}

/// Entropy of the codewords' use.
fn entropy_bits(count: &[u32]) -> f64 {
    let n: f64 = count.iter().map(|c| f64::from(*c)).sum();
    let used = count.iter().filter(|c| **c > 0);
    used.map(|c| f64::from(*c) / n).map(|p| -p * p.log2()).sum()
}

/// An own seed for every head, so that the order of fitting does not matter (splitmix64).
fn head_seed(seed: u64, layer: usize, head: usize) -> u64 {
    let mut x = seed
        .wrapping_add((layer as u64) << 32)
        .wrapping_add(head as u64)
        .wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

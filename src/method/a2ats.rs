//! A2ATS: retrieval by codebook scores of windowed-RoPE queries, arXiv 2502.12665.
//!
//! Calibration: keys before rotation are whitened by the Cholesky factor of the queries' second
//! moment at one relative position b, and clustered; a codeword's distance is then the error that
//! queries would see. Decoding: a key is one codeword index, and the score of a far key is that of
//! its codeword under the query rotated to position b. Selected keys are attended exactly, with
//! ordinary rotation at their true positions.
//!
//! The paper's ablation is there too: standard RoPE instead of the windowed one (keys and queries at
//! their own positions), and a plain metric instead of the queries'.
//!
//! Where we differ from the authors' code: f32 and f64 throughout (there bf16), z is centred,
//! empty clusters are reseeded, and the budget bounds the union over the query group.

use std::ops::Range;
use std::sync::Arc;

use half::f16;
use ndarray::{Array1, Array2, Array3, ArrayView2, ArrayView3, Axis, s};
use rayon::prelude::*;
use serde_json::{Value, json};

use super::{Choice, LayerKeys, Prompt, Retriever, Step, everything};
use crate::artifact::{Artifact, LayerPart};
use crate::compute::cuda::decode::a2ats::HeadConstants;
use crate::compute::device::{Device, Statistic};
use crate::compute::gemm;
use crate::dump::Sizes;
use crate::error::{Error, Result};
use crate::interrupt;
use crate::model::rope::{Rope, RopeTable};
use crate::runner::kv::grow;
use crate::stats::kmeans::{self, Codebook, Init, KMeansFit, KMeansParams};
use crate::stats::linalg;
use crate::stats::moments::{LayerMoments, Position, position_of};
use crate::stats::whiten::{EPS, Metric, whiten};
use crate::store::{Spec, to_bytes};

/// Name of the section in an artifact.
pub const SECTION: &str = "a2ats";
/// Codewords must fit a u16 index.
pub const MAX_SIZE: usize = 65_535;

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
            min_gain: 0.0,
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

/// Tensors of the section.
pub fn specs(sizes: Sizes, m: usize) -> Vec<Spec> {
    let (l, g, d) = (sizes.n_layers, sizes.n_kv_heads, sizes.head_dim);
    vec![
        Spec::new::<f16>("a2ats.codebook", &[l, g, m, d]),
        Spec::new::<f32>("a2ats.mean", &[l, g, d]),
        Spec::new::<f32>("a2ats.chol", &[l, g, d, d]),
        Spec::new::<u32>("a2ats.count", &[l, g, m]),
    ]
}

/// M of a section's parameters.
pub fn codebook_size(params: &Value) -> Result<usize> {
    match params.get("codebook_size").and_then(Value::as_u64) {
        Some(m) if (1..=MAX_SIZE as u64).contains(&m) => Ok(m as usize),
        _ => Err(Error::failed("`sections.a2ats.codebook_size` is not valid")),
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

/// Checks the values of the section: finite, L lower triangular with a positive diagonal, counts
/// that add up to the kept keys.
pub fn check_values(artifact: &Artifact) -> Result<()> {
    let m = codebook_size(artifact.section(SECTION)?)?;
    let specs = specs(artifact.sizes, m);
    let wrong = |what: String| {
        Error::failed(format!("{}: {what}", artifact.store.path().display()))
            .hint("the file is damaged; make it again")
    };
    for (spec, values) in [
        (&specs[0], artifact.f16s(&specs[0])?),
        (&specs[1], artifact.f32s(&specs[1])?),
        (&specs[2], artifact.f32s(&specs[2])?),
    ] {
        if let Some(i) = values.iter().position(|v| !v.is_finite()) {
            return Err(wrong(format!(
                "`{}` has a value that is not finite (element {i})",
                spec.name
            )));
        }
    }
    let d = artifact.sizes.head_dim;
    let heads = artifact.sizes.n_layers * artifact.sizes.n_kv_heads;
    let chol = artifact.f32s(&specs[2])?;
    for (head, l) in chol.chunks_exact(d * d).enumerate() {
        let lower =
            (0..d).all(|i| l[i * d + i] > 0.0 && l[i * d + i + 1..(i + 1) * d].iter().all(|v| *v == 0.0));
        if !lower {
            return Err(wrong(format!(
                "`a2ats.chol` of head {head} is not a Cholesky factor"
            )));
        }
    }
    let kept = artifact.kept_keys();
    let counts: Vec<u32> = artifact.store.read(&specs[3].name, &specs[3].shape)?;
    for head in 0..heads {
        let sum: u64 = counts[head * m..(head + 1) * m]
            .iter()
            .map(|c| u64::from(*c))
            .sum();
        if sum != kept {
            return Err(wrong(format!(
                "`a2ats.count` of head {head} adds up to {sum} keys of {kept}"
            )));
        }
    }
    Ok(())
}

/// The codebooks of every head, ready to encode keys and to score queries.
pub struct Codebooks {
    n_kv_heads: usize,
    heads: Vec<Arc<HeadCodebook>>,
}

/// The codebook of one KV head.
pub struct HeadCodebook {
    codebook: Codebook,
    mean: Array1<f32>,
    chol: Array2<f32>,
    /// L^-1, so that a step multiplies instead of solving.
    chol_inverse: Array2<f64>,
    /// R_b; none for keys and queries rotated to their own positions.
    wrope: Option<RopeTable>,
}

impl Codebooks {
    /// Reads the section, checking its digests and values.
    pub fn load(artifact: &Artifact, rope: &Rope) -> Result<Self> {
        let params = artifact.section(SECTION)?;
        let m = codebook_size(params)?;
        let position = params
            .get("wrope_position")
            .and_then(position_of)
            .ok_or_else(|| Error::failed("`sections.a2ats.wrope_position` is not valid"))?;
        let table = position.windowed().map(|b| rope.table(b..b + 1));
        let specs = specs(artifact.sizes, m);
        for spec in &specs {
            artifact.check_digest(SECTION, &spec.name)?;
        }
        check_values(artifact)?;
        let d = artifact.sizes.head_dim;
        let n = artifact.sizes.n_layers * artifact.sizes.n_kv_heads;
        let shape = |e: ndarray::ShapeError| Error::failed(e.to_string());
        let codebook = Array3::from_shape_vec((n, m, d), artifact.f16s(&specs[0])?).map_err(shape)?;
        let mean = Array2::from_shape_vec((n, d), artifact.f32s(&specs[1])?).map_err(shape)?;
        let chol = Array3::from_shape_vec((n, d, d), artifact.f32s(&specs[2])?).map_err(shape)?;
        let head = |i: usize| {
            let own = |x: &Array3<f32>| x.index_axis(Axis(0), i).to_owned();
            let mean = mean.row(i).to_owned();
            let head = HeadCodebook::rotated(own(&codebook), mean, own(&chol), table.clone())?;
            Ok(Arc::new(head))
        };
        let heads = (0..n).into_par_iter().map(head).collect::<Result<_>>()?;
        Ok(Self {
            n_kv_heads: artifact.sizes.n_kv_heads,
            heads,
        })
    }

    /// The codebook of one head.
    pub fn head(&self, layer: usize, kv_head: usize) -> &Arc<HeadCodebook> {
        &self.heads[layer * self.n_kv_heads + kv_head]
    }
}

impl HeadCodebook {
    /// A codebook C^z `[M,d]` with its mean `[d]` and its Cholesky factor `[d,d]`.
    ///
    /// # Errors
    /// The factor is singular.
    pub fn new(
        codebook: Array2<f32>,
        mean: Array1<f32>,
        chol: Array2<f32>,
        rope: &Rope,
        wrope_position: usize,
    ) -> Result<Self> {
        let table = rope.table(wrope_position..wrope_position + 1);
        Self::rotated(codebook, mean, chol, Some(table))
    }

    /// The same for queries that `wrope` rotates, or that come rotated.
    fn rotated(
        codebook: Array2<f32>,
        mean: Array1<f32>,
        chol: Array2<f32>,
        wrope: Option<RopeTable>,
    ) -> Result<Self> {
        let chol_inverse = linalg::invert_lower(chol.mapv(f64::from).view())
            .ok_or_else(|| Error::failed("a Cholesky factor is singular"))?;
        Ok(Self {
            codebook: Codebook::new(codebook),
            mean,
            chol,
            chol_inverse,
            wrope,
        })
    }

    /// Whether keys and queries are taken before rotation: windowed RoPE.
    pub fn is_windowed(&self) -> bool {
        self.wrope.is_some()
    }

    /// Codes of keys `[n,d]`, before rotation with windowed RoPE, else after: argmin of (k - c) H (k - c)^T, lowest index on ties.
    ///
    /// # Source
    /// Eq. 20, in whitened coordinates.
    pub fn encode(&self, k_pre: ArrayView2<f32>) -> Vec<u16> {
        let z = whiten(k_pre, self.chol.view(), self.mean.view());
        let mut codes = vec![0; z.nrows()];
        self.codebook
            .nearest(z.view(), &mut codes, &mut vec![0.0; z.nrows()]);
        codes.into_iter().map(|c| c as u16).collect()
    }

    /// Score of every codeword for each query head: `[r,M]`, up to a constant per query.
    ///
    /// # Shapes
    /// q `[r,d]`, before rotation with windowed RoPE, else after.
    ///
    /// # Numerics
    /// y = qt L^-T in f64, then f32 products.
    ///
    /// # Source
    /// Eq. 12 (qt = q R_b) and Eq. 21, with C = C^z L^-1 folded into the query.
    pub fn scores(&self, q: ArrayView2<f32>) -> Array2<f32> {
        let mut y = Array2::<f32>::zeros(q.dim());
        for (query, mut y) in q.rows().into_iter().zip(y.rows_mut()) {
            let mut qt = query.to_vec();
            if let Some(table) = &self.wrope {
                table.rotate(&mut qt, 0);
            }
            let qt = Array1::from_iter(qt.into_iter().map(f64::from));
            y.assign(&self.chol_inverse.dot(&qt).mapv(|v| v as f32));
        }
        let mut scores = Array2::zeros((q.nrows(), self.codebook.centroids().nrows()));
        gemm(scores.view_mut(), false, y.view(), self.codebook.centroids().t());
        scores
    }

    /// What a GPU needs of this head: the rotation and L^-1 in one matrix for queries, L for keys.
    pub fn constants(&self) -> HeadConstants<'_> {
        let d = self.chol.nrows();
        // Column j is where the j-th unit vector is rotated to.
        let mut rotation = Array2::<f64>::zeros((d, d));
        for j in 0..d {
            let mut unit = vec![0.0; d];
            unit[j] = 1.0;
            if let Some(table) = &self.wrope {
                table.rotate(&mut unit, 0);
            }
            let unit = Array1::from_iter(unit.into_iter().map(f64::from));
            rotation.column_mut(j).assign(&unit);
        }
        HeadConstants {
            codebook: self.codebook.centroids().view(),
            query_map: self.chol_inverse.dot(&rotation).mapv(|v| v as f32),
            key_map: self.chol.t().to_owned(),
            mean: self.mean.to_vec(),
        }
    }

    /// Number of codewords.
    pub fn size(&self) -> usize {
        self.codebook.centroids().nrows()
    }
}

/// What a run may set.
#[derive(Clone, Debug, Default, clap::Args)]
#[group(skip)]
pub struct Params {
    /// a2ats: the paper's form, each query head's best F of the context, whatever --budget says
    #[arg(long, value_name = "F", value_parser = super::share)]
    pub topk_per_query_head: Option<f64>,
}

/// The codes of one KV head.
#[derive(Clone)]
pub struct A2ats {
    codebook: Arc<HeadCodebook>,
    /// Share of the visible context that each query head chooses, instead of a budget.
    per_query_head: Option<f64>,
    codes: Vec<u16>,
    /// Candidates per codeword, over `counted`.
    counts: Vec<u32>,
    counted: Range<usize>,
}

impl A2ats {
    /// An empty head.
    pub fn new(codebook: Arc<HeadCodebook>, per_query_head: Option<f64>) -> Self {
        Self {
            per_query_head,
            counts: vec![0; codebook.size()],
            codebook,
            codes: Vec::new(),
            counted: 0..0,
        }
    }

    /// A head with these codes.
    pub fn with_codes(codebook: Arc<HeadCodebook>, codes: Vec<u16>) -> Self {
        Self {
            codes,
            ..Self::new(codebook, None)
        }
    }

    /// Encodes keys, `[m,d]` before and after rotation.
    fn take_in(&mut self, k_pre: ArrayView2<f32>, k_rope: ArrayView2<f32>) {
        let codes = match self.codebook.is_windowed() {
            true => self.codebook.encode(k_pre),
            false => self.codebook.encode(k_rope),
        };
        grow(&mut self.codes, codes.len()).extend(codes);
    }

    /// Brings the counts to cover exactly `candidates`.
    fn count(&mut self, candidates: &Range<usize>) {
        let old = self.counted.clone();
        if candidates.start < old.start || candidates.end < old.end || candidates.start > old.end {
            self.counts.fill(0);
            self.counted = candidates.start..candidates.start;
        }
        for p in self.counted.end..candidates.end {
            self.counts[self.codes[p] as usize] += 1;
        }
        for p in self.counted.start..candidates.start {
            self.counts[self.codes[p] as usize] -= 1;
        }
        self.counted = candidates.clone();
    }
}

impl Retriever for A2ats {
    fn prefill(&mut self, prompt: &Prompt) {
        self.take_in(prompt.k_pre.view(), prompt.keys.slice(s![prompt.first.., ..]));
    }

    fn append(&mut self, k_pre: ArrayView2<f32>, k_rope: ArrayView2<f32>) {
        self.take_in(k_pre, k_rope);
    }

    fn select(&mut self, step: &Step) -> Choice {
        if step.is_exact() && self.per_query_head.is_none() {
            return everything(step).into();
        }
        self.count(&step.candidates);
        let scores = match self.codebook.is_windowed() {
            true => self.codebook.scores(step.q_pre),
            false => self.codebook.scores(step.q_rope),
        };
        let codes = &self.codes[step.candidates.clone()];
        let first = step.candidates.start as u32;
        let bound = match self.per_query_head {
            Some(share) => Bound::PerQueryHead((share * step.visible.len() as f64).floor() as u64),
            None => Bound::Union(step.budget),
        };
        choose(scores.view(), &self.counts, codes, first, bound).into()
    }

    fn state_bytes(&self) -> usize {
        self.codes.capacity() * 2
    }

    fn fork(&self) -> Box<dyn Retriever> {
        Box::new(self.clone())
    }
}

/// What bounds a choice.
#[derive(Clone, Copy, Debug)]
pub enum Bound {
    /// Most tokens of the union over the query heads.
    Union(usize),
    /// Tokens of each query head.
    PerQueryHead(u64),
}

/// The positions of the tokens with the best codewords, ascending; `codes[0]` stands at position `first`.
///
/// # Shapes
/// scores `[r,M]`, counts `[M]` of the codes.
pub fn choose(scores: ArrayView2<f32>, counts: &[u32], codes: &[u16], first: u32, bound: Bound) -> Vec<u32> {
    match bound {
        Bound::PerQueryHead(k) => Limits::of(&ranks(scores, counts), counts, k).positions(codes, first),
        Bound::Union(budget) => match Limits::within(scores, counts, budget) {
            Some(limits) => limits.positions(codes, first),
            None => best_of_union(scores, codes, first, budget),
        },
    }
}

/// How many tokens of each codeword the union of the query heads' top-k takes.
///
/// For query head a let R_a(c) be the number of tokens in codewords ranked above c (by score, the
/// lower codeword first on ties), rho(c) = min over a of R_a(c), and o(j) the rank of token j by
/// position within its codeword. The union of the top-k sets is { j : rho(code_j) + o(j) < k }, so
/// its size follows from the counts alone.
///
/// # Source
/// Ours; the paper and its code score every token and take the union of the lists.
pub struct Limits {
    take: Vec<u32>,
}

impl Limits {
    /// The limits of the largest k whose union has at most `budget` tokens; `None` if not even
    /// k = 1 fits.
    ///
    /// # Shapes
    /// scores `[r,M]`, counts `[M]`.
    pub fn within(scores: ArrayView2<f32>, counts: &[u32], budget: usize) -> Option<Self> {
        let rho = ranks(scores, counts);
        let total: u64 = counts.iter().map(|c| u64::from(*c)).sum();
        let size = |k: u64| -> u64 { (0..counts.len()).map(|c| taken(&rho, counts, k, c)).sum() };
        // size() grows with k: bisect for the last k that fits.
        let (mut fits, mut too_many) = (0, total + 1);
        while too_many - fits > 1 {
            let k = (fits + too_many) / 2;
            if size(k) <= budget as u64 {
                fits = k;
            } else {
                too_many = k;
            }
        }
        (fits > 0).then(|| Self::of(&rho, counts, fits))
    }

    /// The limits of each query head's top-k.
    fn of(rho: &[u64], counts: &[u32], k: u64) -> Self {
        let take = (0..counts.len()).map(|c| taken(rho, counts, k, c) as u32);
        Self { take: take.collect() }
    }

    /// The positions taken, ascending; `codes[0]` stands at position `first`.
    fn positions(mut self, codes: &[u16], first: u32) -> Vec<u32> {
        let mut out = Vec::with_capacity(self.take.iter().map(|t| *t as usize).sum());
        for (p, code) in (first..).zip(codes) {
            let left = &mut self.take[*code as usize];
            if *left > 0 {
                *left -= 1;
                out.push(p);
            }
        }
        out
    }
}

/// rho of [`Limits`], for scores `[r,M]` and counts `[M]`.
fn ranks(scores: ArrayView2<f32>, counts: &[u32]) -> Vec<u64> {
    let mut rho = vec![u64::MAX; counts.len()];
    let mut order: Vec<usize> = (0..counts.len()).filter(|c| counts[*c] > 0).collect();
    for row in scores.rows() {
        order.sort_unstable_by(|a, b| row[*b].total_cmp(&row[*a]).then(a.cmp(b)));
        let mut above = 0;
        for &c in &order {
            rho[c] = rho[c].min(above);
            above += u64::from(counts[c]);
        }
    }
    rho
}

/// How many tokens of codeword `c` the union of the top-k takes.
fn taken(rho: &[u64], counts: &[u32], k: u64, c: usize) -> u64 {
    k.saturating_sub(rho[c]).min(u64::from(counts[c]))
}

/// The best `budget` of the query heads' single best tokens, by their highest score.
fn best_of_union(scores: ArrayView2<f32>, codes: &[u16], first: u32, budget: usize) -> Vec<u32> {
    let mut best: Vec<(f32, u32)> = Vec::new();
    for row in scores.rows() {
        let top = codes.iter().zip(first..).min_by(|(a, p), (b, q)| {
            let (sa, sb) = (row[**a as usize], row[**b as usize]);
            sb.total_cmp(&sa).then(a.cmp(b)).then(p.cmp(q))
        });
        if let Some((code, p)) = top {
            let score = scores
                .column(*code as usize)
                .fold(f32::NEG_INFINITY, |m, s| m.max(*s));
            best.push((score, p));
        }
    }
    best.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    best.dedup_by_key(|(_, p)| *p);
    let mut out: Vec<u32> = best.into_iter().take(budget).map(|(_, p)| p).collect();
    out.sort_unstable();
    out
}

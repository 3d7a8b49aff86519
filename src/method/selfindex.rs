//! Self-Indexing KVCache: sign patterns as index and as storage, arXiv 2603.14224.
//!
//! Calibration: rotated keys are centred per block with that block's own centre, the signs of four
//! neighbouring channels form a pattern of 16, and a pattern's centroid is the mean of the channels
//! that have it: the average of what one pass over each block's prompt would build.
//!
//! Decoding: the mean query of the group gives every pattern of every group of channels a score, a
//! key's score is the sum over its patterns, and the best keys are attended. The centroids come from one
//! pass over the prompt, from calibration, or from both.
//!
//! Where we differ from the authors' code: one zero rule (a bit is set for x > 0); a pattern that no key
//! has gets plus or minus the channels' mean magnitude instead of 0/0; all rows stand in position
//! order, so generated tokens compete for the budget once they leave the window, and cannot push prompt
//! tokens out of a list of fixed length; scores are f32. A later prompt joins the sums of the
//! centroids; the centre stays, unless fewer than 128 positions were cached before.

use std::ops::Range;

use half::f16;
use ndarray::{Array2, ArrayView1, ArrayView2, Axis, s};
use serde_json::{Value, json};

use super::{Choice, LayerKeys, Place, Prompt, Retriever, Step, everything};
use crate::artifact::{Artifact, LayerPart};
use crate::compute::attention::visible;
use crate::compute::cpu::row_mean;
use crate::compute::device::{SignSums, Statistic};
use crate::dump::Sizes;
use crate::error::{Error, Result};
use crate::interrupt;
use crate::runner::kv::KvType;
pub use crate::runner::packed::Center;
use crate::runner::packed::{FULL, Layout, REFIT, best_scored, compressed, extend_signs, sign_bytes};
use crate::store::{Spec, to_bytes};

/// Name of the section in an artifact.
pub const SECTION: &str = "sign";
/// Channels of a pattern.
pub const GROUP: usize = 4;
/// Patterns of a group.
pub const PATTERNS: usize = 1 << GROUP;

/// Weight of a calibrated centroid among the prompt's, in keys.
pub const PSEUDO_COUNT: f64 = 32.0;

/// Where the centroids of a run come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Source {
    /// One pass over the prompt, as in the paper.
    OnePass,
    /// The artifact alone.
    Offline,
    /// The prompt's, with the artifact's as 32 keys more.
    Hybrid,
    /// None: a channel counts by its sign alone (ablation).
    Signs,
}

/// What a run may set.
#[derive(Clone, Debug, clap::Args)]
#[group(skip)]
pub struct Params {
    /// selfindex: where centroids come from (default: hybrid with an artifact, else one-pass)
    #[arg(long, value_enum)]
    pub sign_centroids: Option<Source>,
    /// selfindex and --kv 2bit: what signs are taken around (default: as in the artifact, else median)
    #[arg(long, value_enum)]
    pub center: Option<Center>,
    /// selfindex and --kv 2bit: most positions in full precision, which selfindex attends first
    #[arg(long, value_name = "N", default_value_t = FULL, value_parser = crate::cli::parse_count)]
    pub sign_full: usize,
    /// --kv 2bit: quantise keys as values are, without their signs (ablation)
    #[arg(long)]
    pub plain_keys: bool,
}

impl Default for Params {
    fn default() -> Self {
        Self {
            sign_centroids: None,
            center: None,
            sign_full: FULL,
            plain_keys: false,
        }
    }
}

impl Params {
    /// How the 2-bit cache holds its rows.
    pub fn layout(&self, artifact: Option<&Artifact>) -> Result<Layout> {
        Ok(Layout {
            center: self.center(artifact)?,
            full: self.sign_full,
            signed: !self.plain_keys,
        })
    }

    /// The centre: as asked for, else the artifact's, else the median.
    pub fn center(&self, artifact: Option<&Artifact>) -> Result<Center> {
        match (self.center, artifact.filter(|a| a.has(SECTION))) {
            (Some(center), _) => Ok(center),
            (None, Some(artifact)) => calibrated_center(artifact.section(SECTION)?),
            (None, None) => Ok(Center::Median),
        }
    }
}

/// The centre of a section's parameters.
fn calibrated_center(section: &Value) -> Result<Center> {
    match section.get("center").and_then(Value::as_str) {
        Some("median") => Ok(Center::Median),
        Some("mean") => Ok(Center::Mean),
        _ => Err(Error::failed("`sections.sign.center` is not valid")),
    }
}

/// The section's parameters in the manifest.
pub fn manifest(center: Center) -> Value {
    json!({
        "center": center.as_str(),
        "center_scope": "block",
        "group": GROUP,
        "sign_rule": "x>0",
        "bit_order": "lsb-first",
        "rope_space": "post",
        "alpha_percentile": 99.9,
    })
}

/// Tensors of the section.
pub fn specs(sizes: Sizes) -> Vec<Spec> {
    let (l, g, d) = (sizes.n_layers, sizes.n_kv_heads, sizes.head_dim);
    vec![
        Spec::new::<f16>("sign.centroid", &[l, g, d / GROUP, PATTERNS, GROUP]),
        Spec::new::<u64>("sign.count", &[l, g, d / GROUP, PATTERNS]),
        Spec::new::<f32>("sign.alpha", &[l, g, d]),
        Spec::new::<f32>("sign.mean_pre", &[l, g, d]),
    ]
}

/// The sign pattern of four channels: bit e is set where `x[e] > 0`.
///
/// # Source
/// Section 3.1; the paper's order of bits is not known, and any order gives the same results as long
/// as tables and codes share it.
pub fn pattern(x: &[f32]) -> usize {
    x.iter()
        .enumerate()
        .map(|(e, v)| usize::from(*v > 0.0) << e)
        .sum()
}

/// Builds the centroids of one layer; `done` is called for each head.
pub fn fit_layer(keys: &LayerKeys, center: Center, done: &mut dyn FnMut(usize, &Value)) -> Result<LayerPart> {
    let mut tensors = vec![Vec::new(); 4];
    let mut quality = Vec::new();
    let kept = keys.kept.iter().filter(|kept| **kept).count();
    let at_once = keys.device.heads_at_once(kept, keys.rope.head_dim(), 0).max(1);
    for first in (0..keys.n_kv_heads).step_by(at_once) {
        interrupt::check()?;
        let heads = first..keys.n_kv_heads.min(first + at_once);
        let fits = fit_heads(keys, heads.clone(), center)
            .map_err(|e| e.context(format!("signs of KV heads {} to {}", heads.start, heads.end - 1)))?;
        for (head, fit) in heads.zip(fits) {
            tensors[0].extend(to_bytes(&fit.centroids));
            tensors[1].extend(to_bytes(&fit.counts));
            tensors[2].extend(to_bytes(&fit.alpha));
            tensors[3].extend(to_bytes(&fit.mean_pre));
            done(head, &fit.quality);
            quality.push(fit.quality);
        }
    }
    Ok(LayerPart { tensors, quality })
}

struct HeadFit {
    centroids: Vec<f16>,
    counts: Vec<u64>,
    alpha: Vec<f32>,
    mean_pre: Vec<f32>,
    quality: Value,
}

fn fit_heads(keys: &LayerKeys, heads: Range<usize>, center: Center) -> Result<Vec<HeadFit>> {
    let [kept, _] = keys.split(heads.clone(), false)?;
    let n = kept.len_of(Axis(1));
    let mean_pre: Vec<Vec<f32>> = kept.outer_iter().map(|x| row_mean(x).to_vec()).collect();
    drop(kept);
    let [kept, _] = keys.split(heads, true)?;
    let mut points = keys.device.points(kept)?;
    for block in keys.kept_blocks().into_iter().filter(|block| !block.is_empty()) {
        let statistic = match center {
            Center::Median => Statistic::Ranked((block.len() - 1) / 2),
            Center::Mean => Statistic::Mean,
        };
        let centre = points.channel_statistic(block.clone(), statistic)?;
        points.subtract(block, centre.view())?;
    }
    // The smallest value that at least 99.9 % of the magnitudes do not exceed.
    let rank = (n * 999).div_ceil(1000).saturating_sub(1);
    let alpha = points.channel_statistic(0..n, Statistic::RankedMagnitude(rank))?;
    let sums = points.sign_sums()?.into_iter();
    let one = |((sums, alpha), mean_pre): ((SignSums, ArrayView1<f32>), Vec<f32>)| {
        let (centroids, counts) = centroids(sums);
        if centroids.iter().any(|v| !v.is_finite()) {
            return Err(Error::failed("a sign centroid is outside the range of f16")
                .hint("the keys of this head have extreme outliers"));
        }
        Ok(HeadFit {
            quality: json!({
                "sign_entropy_bits": sign_entropy_bits(&counts, n),
                "pattern_entropy_bits": pattern_entropy_bits(&counts),
                "empty_patterns": counts.iter().filter(|c| **c == 0).count(),
                "keys": n,
            }),
            centroids,
            counts,
            alpha: alpha.to_vec(),
            mean_pre,
        })
    };
    sums.zip(alpha.rows()).zip(mean_pre).map(one).collect()
}

/// Centroids `[d/4,16,4]` and counts `[d/4,16]` of centred keys. An empty pattern gets plus or minus the
/// mean magnitude of its channels.
///
/// # Source
/// Eq. 4.
pub fn centroids(sums: SignSums) -> (Vec<f16>, Vec<u64>) {
    let sums = Sums::from(sums);
    let values = sums.centroids(None).into_iter().map(f16::from_f64);
    (values.collect(), sums.counts)
}

/// Mean over channels of the entropy of the sign bit, from the counts of the patterns, `[d/4,16]`.
fn sign_entropy_bits(counts: &[u64], n: usize) -> f64 {
    let entropy = |p: f64| if p > 0.0 { -p * p.log2() } else { 0.0 };
    let groups = counts.chunks(PATTERNS);
    let channels = (groups.len() * GROUP).max(1) as f64;
    let channels_of = groups.flat_map(|group| {
        (0..GROUP).map(move |e| {
            let set = group
                .iter()
                .enumerate()
                .filter(|(pattern, _)| (pattern >> e) & 1 == 1);
            set.map(|(_, count)| *count).sum::<u64>() as f64 / n.max(1) as f64
        })
    });
    channels_of.map(|p| entropy(p) + entropy(1.0 - p)).sum::<f64>() / channels
}

/// Mean over groups of the entropy of the pattern.
fn pattern_entropy_bits(counts: &[u64]) -> f64 {
    let groups = counts.chunks(PATTERNS);
    let n = groups.len().max(1) as f64;
    let entropy = |group: &[u64]| -> f64 {
        let total: u64 = group.iter().sum();
        let shares = group.iter().filter(|c| **c > 0).map(|c| *c as f64 / total as f64);
        shares.map(|p| -p * p.log2()).sum()
    };
    groups.map(entropy).sum::<f64>() / n
}

/// Checks the values of the section: finite, scales not negative, counts that add up to the kept keys.
pub fn check_values(artifact: &Artifact) -> Result<()> {
    let specs = specs(artifact.sizes);
    let wrong = |what: String| {
        Error::failed(format!("{}: {what}", artifact.store.path().display()))
            .hint("the file is damaged; make it again")
    };
    for (spec, values) in [
        (&specs[0], artifact.f16s(&specs[0])?),
        (&specs[2], artifact.f32s(&specs[2])?),
        (&specs[3], artifact.f32s(&specs[3])?),
    ] {
        let negative = spec.name == "sign.alpha" && values.iter().any(|v| *v < 0.0);
        if negative || values.iter().any(|v| !v.is_finite()) {
            return Err(wrong(format!("`{}` has a value out of range", spec.name)));
        }
    }
    let kept = artifact.kept_keys();
    let counts: Vec<u64> = artifact.store.read(&specs[1].name, &specs[1].shape)?;
    if counts
        .chunks(PATTERNS)
        .any(|group| group.iter().sum::<u64>() != kept)
    {
        return Err(wrong(format!("`sign.count` does not add up to {kept} keys")));
    }
    Ok(())
}

/// The centroids of a layer's heads, `[g,d/4,16,4]`.
pub enum Centroids {
    /// Known before the prompt.
    Fixed(Vec<f32>),
    /// The prompt's, with these as [`PSEUDO_COUNT`] keys more.
    Prompt(Option<Vec<f32>>),
}

/// How every head of a run gets its centroids.
pub struct Setup {
    center: Center,
    source: Source,
    full: usize,
    n_kv_heads: usize,
    /// Per head `[d/4,16,4]`, where the artifact takes part.
    calibrated: Option<Array2<f32>>,
}

impl Setup {
    /// Resolves the parameters, reading the artifact's section where it takes part.
    ///
    /// # Errors
    /// Channels that do not come in fours; calibrated centroids asked for without a section, or with
    /// another centre than theirs.
    pub fn new(params: &Params, artifact: Option<&Artifact>, head_dim: usize) -> Result<Self> {
        if !head_dim.is_multiple_of(GROUP) {
            return Err(Error::failed(format!(
                "selfindex needs a head_dim that is a multiple of {GROUP}, not {head_dim}"
            )));
        }
        let section = artifact.filter(|a| a.has(SECTION));
        let source = params.sign_centroids.unwrap_or(match section {
            Some(_) => Source::Hybrid,
            None => Source::OnePass,
        });
        let center = params.center(artifact)?;
        if matches!(source, Source::OnePass | Source::Signs) {
            return Ok(Self {
                center,
                source,
                full: params.sign_full,
                n_kv_heads: 0,
                calibrated: None,
            });
        }
        let Some(artifact) = section else {
            return Err(Error::usage(
                "--sign-centroids offline and hybrid need an artifact with the `sign` section",
            )
            .hint("`kvsmith calibrate` makes one"));
        };
        let theirs = calibrated_center(artifact.section(SECTION)?)?;
        if center != theirs {
            return Err(Error::usage(format!(
                "--center {} does not go with centroids that were calibrated around the {}",
                center.as_str(),
                theirs.as_str()
            ))
            .hint("calibrate with this --center, or add --sign-centroids one-pass"));
        }
        let specs = specs(artifact.sizes);
        for spec in &specs {
            artifact.check_digest(SECTION, &spec.name)?;
        }
        check_values(artifact)?;
        let heads = artifact.sizes.n_layers * artifact.sizes.n_kv_heads;
        let centroids = Array2::from_shape_vec((heads, head_dim * PATTERNS), artifact.f16s(&specs[0])?)
            .map_err(|e| Error::failed(e.to_string()))?;
        Ok(Self {
            center,
            source,
            full: params.sign_full,
            n_kv_heads: artifact.sizes.n_kv_heads,
            calibrated: Some(centroids),
        })
    }

    /// The centroids of a layer's heads.
    pub fn centroids(&self, layer: usize, n_kv_heads: usize, head_dim: usize) -> Centroids {
        let heads = layer * n_kv_heads..(layer + 1) * n_kv_heads;
        let calibrated = self.calibrated.as_ref();
        let calibrated = calibrated.map(|c| c.slice(s![heads, ..]).iter().copied().collect::<Vec<f32>>());
        match self.source {
            Source::Signs => Centroids::Fixed(signs(head_dim).repeat(n_kv_heads)),
            Source::Offline => Centroids::Fixed(calibrated.unwrap_or_default()),
            Source::OnePass | Source::Hybrid => Centroids::Prompt(calibrated),
        }
    }

    /// What signs are taken around, and how many positions come first.
    pub fn layout(&self) -> Layout {
        Layout {
            full: self.full,
            ..Layout::from(self.center)
        }
    }

    /// The empty state of one head.
    pub fn head(&self, place: &Place) -> SelfIndex {
        let row = place.layer * self.n_kv_heads + place.kv_head;
        let calibrated = self.calibrated.as_ref().map(|c| c.row(row).to_vec());
        SelfIndex {
            most_full: self.full,
            ..SelfIndex::new(place, self.center, self.source, calibrated)
        }
    }
}

/// Centroids of plain signs, `[d/4,16,4]`: one for a set bit, minus one for another.
fn signs(d: usize) -> Vec<f32> {
    let of = |i: usize| {
        if (i / GROUP % PATTERNS) >> (i % GROUP) & 1 == 1 {
            1.0
        } else {
            -1.0
        }
    };
    (0..d * PATTERNS).map(of).collect()
}

/// Sums of a pass over keys, from which their centroids follow.
#[derive(Clone)]
struct Sums {
    /// `[d/4,16,4]`.
    sums: Vec<f64>,
    /// `[d/4,16]`.
    counts: Vec<u64>,
    /// Of the magnitudes, `[d]`.
    magnitude: Vec<f64>,
    keys: u64,
}

impl Sums {
    fn new(d: usize) -> Self {
        Self {
            sums: vec![0.0; d * PATTERNS],
            counts: vec![0; d / GROUP * PATTERNS],
            magnitude: vec![0.0; d],
            keys: 0,
        }
    }

    /// Adds a centred key.
    fn add(&mut self, centred: &[f32]) {
        for (g, x) in centred.chunks_exact(GROUP).enumerate() {
            let cell = g * PATTERNS + pattern(x);
            self.counts[cell] += 1;
            for (e, v) in x.iter().enumerate() {
                self.sums[cell * GROUP + e] += f64::from(*v);
                self.magnitude[g * GROUP + e] += f64::from(v.abs());
            }
        }
        self.keys += 1;
    }

    /// The centroids, `[d/4,16,4]`: with `prior`, each is shrunk to it by [`PSEUDO_COUNT`] keys;
    /// without, an empty pattern gets plus or minus the mean magnitude of its channels.
    fn centroids(&self, prior: Option<&[f32]>) -> Vec<f64> {
        let cell = |i: usize| {
            let (cell, e) = (i / GROUP, i % GROUP);
            let (group, p) = (cell / PATTERNS, cell % PATTERNS);
            let count = self.counts[cell] as f64;
            match prior {
                Some(prior) => (PSEUDO_COUNT * f64::from(prior[i]) + self.sums[i]) / (PSEUDO_COUNT + count),
                None if count > 0.0 => self.sums[i] / count,
                None => {
                    let sign = if (p >> e) & 1 == 1 { 1.0 } else { -1.0 };
                    sign * self.magnitude[group * GROUP + e] / self.keys.max(1) as f64
                }
            }
        };
        (0..self.sums.len()).map(cell).collect()
    }
}

impl From<SignSums> for Sums {
    fn from(of: SignSums) -> Self {
        let mut magnitude = vec![0.0; of.sums.len() / PATTERNS];
        for (i, sum) in of.sums.iter().enumerate() {
            let (group, pattern, e) = (i / GROUP / PATTERNS, i / GROUP % PATTERNS, i % GROUP);
            let sign = if (pattern >> e) & 1 == 1 { 1.0 } else { -1.0 };
            magnitude[group * GROUP + e] += sign * sum;
        }
        Self {
            magnitude,
            keys: of.counts.iter().take(PATTERNS).sum(),
            sums: of.sums,
            counts: of.counts,
        }
    }
}

/// The index of one KV head.
#[derive(Clone)]
pub struct SelfIndex {
    place: Place,
    center: Center,
    source: Source,
    calibrated: Option<Vec<f32>>,
    most_full: usize,
    centre: Vec<f32>,
    sums: Sums,
    /// `[d/4,16,4]`.
    centroids: Vec<f32>,
    /// Sign bytes per position; empty where the cache holds them.
    signs: Vec<u8>,
    /// Positions that come first, ascending: those that the last prompt query scored best.
    full: Vec<u32>,
}

impl SelfIndex {
    /// An empty head; `calibrated` has its centroids `[d/4,16,4]`, unless the source is one pass.
    pub fn new(place: &Place, center: Center, source: Source, calibrated: Option<Vec<f32>>) -> Self {
        let d = place.head_dim;
        Self {
            place: *place,
            center,
            source,
            centroids: calibrated.clone().unwrap_or_else(|| signs(d)),
            most_full: FULL,
            calibrated,
            centre: vec![0.0; d],
            sums: Sums::new(d),
            signs: Vec::new(),
            full: Vec::new(),
        }
    }

    /// The centroids, `[d/4,16,4]`.
    pub fn centroids(&self) -> &[f32] {
        &self.centroids
    }

    /// Scores of `candidates`: `[candidates]`.
    ///
    /// # Shapes
    /// q_rope `[r,d]`, the group's queries; `signs` has the sign bytes of every position.
    ///
    /// # Numerics
    /// f32.
    ///
    /// # Source
    /// Eq. 8, with two groups a byte: a table of 256 sums per byte.
    fn scores(&self, q_rope: ArrayView2<f32>, signs: &[u8], candidates: Range<usize>) -> Vec<f32> {
        let d = self.place.head_dim;
        let query: Vec<f32> = (0..d)
            .map(|j| q_rope.column(j).sum() / self.place.group as f32)
            .collect();
        let mut tables = vec![0.0f32; d.div_ceil(2 * GROUP) * PATTERNS * PATTERNS];
        for (b, (query, table)) in query
            .chunks(2 * GROUP)
            .zip(tables.chunks_exact_mut(PATTERNS * PATTERNS))
            .enumerate()
        {
            for (half, query) in query.chunks_exact(GROUP).enumerate() {
                let first = (2 * b + half) * PATTERNS;
                for p in 0..PATTERNS {
                    let centroid = &self.centroids[(first + p) * GROUP..(first + p + 1) * GROUP];
                    let score: f32 = query.iter().zip(centroid).map(|(q, c)| q * c).sum();
                    for other in 0..PATTERNS {
                        let byte = if half == 0 {
                            other << GROUP | p
                        } else {
                            p << GROUP | other
                        };
                        table[byte] += score;
                    }
                }
            }
        }
        let width = sign_bytes(d);
        signs[candidates.start * width..candidates.end * width]
            .chunks_exact(width)
            .map(|row| {
                let cells = row.iter().zip(tables.chunks_exact(PATTERNS * PATTERNS));
                cells.map(|(byte, table)| table[usize::from(*byte)]).sum()
            })
            .collect()
    }
}

impl Retriever for SelfIndex {
    fn prefill(&mut self, prompt: &Prompt) {
        let n = prompt.keys.nrows();
        // While few positions are cached, the statistics start anew from all of them.
        let refit = prompt.first < REFIT;
        let first = if refit { 0 } else { prompt.first };
        let rows = prompt.keys.slice(s![first.., ..]);
        if let Some(cached) = prompt.kv.signs() {
            self.centre = cached.centre().to_vec();
            self.full = cached.full_positions().to_vec();
        } else {
            if refit {
                self.centre = self.center.of_channels(rows);
                self.signs.clear();
            }
            let seen = visible(n - 1, self.place.model_window);
            let old = self.full.iter().map(|p| *p as usize);
            let candidates = old.chain(prompt.first..n).filter(|p| seen.contains(p));
            let last = prompt.q_rope.len_of(Axis(1)) - 1;
            let query = prompt.q_rope.index_axis(Axis(1), last).mean_axis(Axis(0));
            self.full = best_scored(
                &query.unwrap_or_default().to_vec(),
                candidates,
                prompt.keys,
                self.most_full,
            );
            extend_signs(&mut self.signs, rows, &self.centre);
        }
        if !matches!(self.source, Source::Offline | Source::Signs) {
            let mut summed = compressed(first..n, &self.full);
            if refit {
                self.sums = Sums::new(self.place.head_dim);
                if summed.len() < FULL {
                    summed = (0..n).collect();
                }
            }
            let mut centred = vec![0.0; self.place.head_dim];
            for p in summed {
                let row = prompt.keys.row(p);
                for ((x, k), c) in centred.iter_mut().zip(row).zip(&self.centre) {
                    *x = k - c;
                }
                self.sums.add(&centred);
            }
            let centroids = self.sums.centroids(self.calibrated.as_deref());
            self.centroids = centroids.into_iter().map(|c| c as f32).collect();
        }
    }

    fn append(&mut self, _: ArrayView2<f32>, k_rope: ArrayView2<f32>) {
        if self.place.kv != KvType::TwoBit {
            extend_signs(&mut self.signs, k_rope, &self.centre);
        }
    }

    fn select(&mut self, step: &Step) -> Choice {
        if step.is_exact() {
            return everything(step).into();
        }
        let signs = step.kv.signs().map_or(&self.signs[..], |rows| rows.signs());
        let c = step.candidates.clone();
        let scores = self.scores(step.q_rope, signs, c.clone());
        let score = |p: u32| scores[p as usize - c.start];
        let best = |a: &u32, b: &u32| score(*b).total_cmp(&score(*a)).then(a.cmp(b));
        // The best of the full-precision tokens first, on at most two fifths of the budget (64 of 160 in
        // the paper's LongBench runs), then all others by their scores.
        let visible = |p: &u32| c.contains(&(*p as usize));
        let mut fixed: Vec<u32> = self.full.iter().copied().filter(visible).collect();
        fixed.sort_unstable_by(best);
        fixed.truncate(step.budget.saturating_mul(2) / 5);
        let mut is_fixed = vec![false; c.len()];
        fixed.iter().for_each(|p| is_fixed[*p as usize - c.start] = true);
        let mut order: Vec<u32> = c.clone().map(|p| p as u32).collect();
        let rank = |a: &u32, b: &u32| {
            let (i, j) = (*a as usize - c.start, *b as usize - c.start);
            is_fixed[j].cmp(&is_fixed[i]).then(best(a, b))
        };
        order.select_nth_unstable_by(step.budget, rank);
        order.truncate(step.budget);
        order.sort_unstable();
        order.into()
    }

    fn state_bytes(&self) -> usize {
        self.signs.capacity() + self.full.capacity() * 4
    }

    fn fork(&self) -> Box<dyn Retriever> {
        Box::new(self.clone())
    }
}

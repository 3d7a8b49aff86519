//! The section `a2ats`: a whitened codebook per KV head.

use half::f16;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value, json};

use super::buckets::DistanceBuckets;
use super::size::KEYS_PER_CODEWORD;
use crate::artifact::{
    Column, Facts, Fit, FitInput, HeadReport, MomentsRead, SectionKind, SectionView, object, parse, share,
    table,
};
use crate::env::Reporter;
use crate::error::{Error, Result};
use crate::method::weak::worst_of;
use crate::model::Sizes;
use crate::parameters::{
    Choice, ParameterSet, Parameters, SHARE_OR_ZERO, Values, WHOLE, choices, parameters,
};
use crate::stats::kmeans::{Init, KMeansParams, MAX_SIZE};
use crate::stats::moments::Position;
use crate::stats::whiten::EPS;
use crate::store::Spec;
use crate::wording::counted;

/// Name of the section in an artifact.
pub const SECTION: &str = "a2ats";

/// Codewords, whitened and centered.
pub const CODEBOOK: &str = "a2ats.codebook";
/// Mean of the whitened keys.
pub const MEAN: &str = "a2ats.mean";
/// Cholesky factor of the queries' second moment.
pub const CHOL: &str = "a2ats.chol";
/// Number of keys per codeword; describes the head, no method reads it.
pub const COUNT: &str = "a2ats.count";

choices! {
    /// The distance in which keys are clustered: the paper's ablation.
    pub enum FitMetric {
        /// The metric of the queries' second moment (Eq. 13).
        QueryAware = "query-aware",
        /// The Euclidean distance.
        Plain = "plain",
    }
}

choices! {
    /// Where a query stands, relative to a key, when the key is scored.
    pub enum Positions {
        /// Rotate queries to the WRoPE position for every key, as in the paper.
        Window = "window",
        /// Rotate queries by the mean rotation over the bucket of distances that contains the key; there are eight
        /// buckets.
        Buckets = "buckets",
    }
}

/// How queries are rotated, in the metric and in scores.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "RotationManifest", into = "RotationManifest")]
pub enum Rotation {
    /// As those of the moments: keys are taken before rotation for a fixed relative position, and at their own
    /// positions otherwise.
    At(Position),
    /// By the mean rotation of the bucket of distances that a key is in; keys are taken before rotation.
    Buckets(DistanceBuckets),
}

/// A rotation as the manifest stores it: exactly one of the two fields is present. A reader that knows no buckets
/// refuses a section without `wrope_position`.
#[derive(Serialize, Deserialize)]
struct RotationManifest {
    #[serde(
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "present"
    )]
    wrope_position: Option<Position>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    distance_buckets: Option<DistanceBuckets>,
}

/// Reads a position from a field that is present; null is a valid position.
fn present<'de, D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Option<Position>, D::Error> {
    Position::deserialize(deserializer).map(Some)
}

impl From<Rotation> for RotationManifest {
    fn from(rotation: Rotation) -> Self {
        let (wrope_position, distance_buckets) = match rotation {
            Rotation::At(position) => (Some(position), None),
            Rotation::Buckets(buckets) => (None, Some(buckets)),
        };
        Self {
            wrope_position,
            distance_buckets,
        }
    }
}

impl TryFrom<RotationManifest> for Rotation {
    type Error = &'static str;

    fn try_from(manifest: RotationManifest) -> std::result::Result<Self, Self::Error> {
        match (manifest.wrope_position, manifest.distance_buckets) {
            (Some(position), None) => Ok(Self::At(position)),
            (None, Some(buckets)) => Ok(Self::Buckets(buckets)),
            (None, None) => Err("missing field `wrope_position`"),
            (Some(_), Some(_)) => Err("`wrope_position` and `distance_buckets` exclude each other"),
        }
    }
}

/// Name of the parameter that sets the number of codewords.
pub const SIZE: &str = "size";

parameters! {
    /// The parameters of the fit.
    pub struct CodebookParams, "Section a2ats" {
        /// Number of codewords per KV head [default: of `codebook` 4096; of `calibrate` the power of two from 256 to 4096
        /// whose codebook takes nearest to 1.5% of the bytes of a 16-bit cache at --context, but at most one per 15 tokens
        /// of the fit]
        size: Option<usize> = None, "M" in WHOLE;
        /// Maximum number of k-means passes
        iterations: usize = 25, "N" in WHOLE;
        /// Stop when a pass lowers the mean squared distance by less than this share (at least 0, below 1; 0 = continue
        /// until no key changes its codeword)
        min_gain: f64 = 0.0, "SHARE" in SHARE_OR_ZERO;
        /// Distance in which keys are clustered
        metric: FitMetric = FitMetric::QueryAware, "METRIC" in Values::OneOf(FitMetric::WORDS);
        /// Rotation of a query when it is scored against codewords
        positions: Positions = Positions::Window, "POSITIONS" in Values::OneOf(Positions::WORDS);
    }
}

/// Hyper-parameters of a codebook fit, as the manifest stores them.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct FitParams {
    /// Number of codewords per KV head.
    #[serde(rename = "codebook_size")]
    pub size: usize,
    /// Maximum number of k-means passes.
    pub iterations: usize,
    /// Share by which a pass must lower the mean squared distance, or be the last one.
    pub min_gain: f64,
    /// Distance in which keys are clustered.
    pub metric: FitMetric,
    /// Seeds k-means, per layer and head.
    pub seed: u64,
    /// How queries are rotated.
    #[serde(flatten)]
    pub rotation: Rotation,
}

impl FitParams {
    /// Returns the section's parameters for the manifest.
    pub fn manifest(&self) -> Result<Map<String, Value>> {
        let mut manifest = object(self)?;
        manifest.extend(object(&json!({
            "rope_space": match self.rotation {
                Rotation::At(Position::Own) => "post",
                Rotation::At(Position::Windowed(_)) | Rotation::Buckets(_) => "pre",
            },
            "init": "kmeans++",
            "eps": EPS,
            "h_pool": "kv-head-sum",
            "h_normalisation": "rms",
        }))?);
        Ok(manifest)
    }

    /// Returns the parameters of k-means; each head has a seed of its own.
    pub fn kmeans(&self) -> KMeansParams {
        KMeansParams {
            size: self.size,
            iterations: self.iterations,
            min_gain: self.min_gain,
            init: Init::KMeansPlusPlus,
            seed: self.seed,
        }
    }

    /// Fails if no codebook can be fitted to `kept` keys; warns if the keys are few.
    fn check(&self, kept: usize, reporter: &dyn Reporter) -> Result<()> {
        let size = self.size;
        if !(1..=MAX_SIZE).contains(&size) {
            let message = format!("⟨size={size}⟩ is out of range: expected 1 to {MAX_SIZE}");
            return Err(Error::usage(message));
        }
        if kept < size {
            let message = format!(
                "a codebook of {} cannot be fitted to {} of calibration text",
                counted(size, "codeword"),
                counted(kept, "token")
            );
            let hint = match kept / KEYS_PER_CODEWORD {
                0 => format!("give at least {} of text", counted(KEYS_PER_CODEWORD, "token")),
                most => format!("give more text, or use a ⟨size⟩ of at most {most}"),
            };
            return Err(Error::invalid(message).hint(hint));
        }
        if kept < KEYS_PER_CODEWORD * size {
            let per = kept as f64 / size as f64;
            reporter.warn(&format!(
                "only {per:.1} keys per codeword ({kept} keys, {size} codewords); with fewer than {KEYS_PER_CODEWORD}, a codebook fits its calibration text better than other text"
            ));
        }
        Ok(())
    }
}

/// The quality report of a KV head, as docs/reference/artifact.md defines it.
#[derive(Serialize, Deserialize)]
pub(super) struct CodebookQuality {
    pub inertia: f64,
    pub held_out_inertia: Option<f64>,
    pub variance: f64,
    pub inertia_history: Vec<f64>,
    pub iterations: usize,
    pub empty_repaired: usize,
    pub unused_codewords: usize,
    pub usage_entropy_bits: f64,
    pub condition: f64,
    pub eps: f64,
    pub keys: usize,
}

impl CodebookQuality {
    /// Describes the fit in a few words.
    pub fn summary(&self) -> String {
        format!(
            "inertia {} after {} passes, held out {}",
            json!(self.inertia),
            self.iterations,
            json!(self.held_out_inertia)
        )
    }

    /// Returns the share of the variance of held-out keys (of calibration keys if there are none) that remains as
    /// error.
    fn unexplained(&self) -> Option<f64> {
        let error = self.held_out_inertia.unwrap_or(self.inertia);
        (self.variance > 0.0).then(|| error / self.variance)
    }
}

const COLUMNS: [Column<CodebookQuality>; 7] = [
    Column::new("inertia", |v| format!("{v:.3}"), |q| Some(q.inertia)),
    Column::new("held out", |v| format!("{v:.3}"), |q| q.held_out_inertia),
    Column::new("of variance", share, CodebookQuality::unexplained),
    Column::new(
        "entropy/bits",
        |v| format!("{v:.2}"),
        |q| Some(q.usage_entropy_bits),
    ),
    Column::new(
        "unused",
        |v| format!("{v:.0}"),
        |q| Some(q.unused_codewords as f64),
    ),
    Column::new("condition", |v| format!("{v:.1e}"), |q| Some(q.condition)),
    Column::new("passes", |v| format!("{v:.0}"), |q| Some(q.iterations as f64)),
];
const LEGEND: &str = "(means over each layer's KV heads; inertia = squared error per key in the metric
of the queries; of variance = held-out inertia as a share of the keys' variance)
";

/// A head whose keys are spread over its codewords as over this share of them, or less, hardly uses the others.
const EVEN_SHARE: f64 = 0.5;
/// A head with at least this share of its codewords unused has too many of them.
const UNUSED_SHARE: f64 = 0.01;
/// How many heads are listed at most.
const LISTED: usize = 5;

/// The declaration of the section.
#[derive(Debug)]
pub struct A2atsSection;

impl SectionKind for A2atsSection {
    fn facts(&self) -> &'static Facts {
        &Facts {
            name: SECTION,
            command: "codebook",
            about: "Fit A2ATS codebooks to the keys of a dump",
            stage: "codebooks",
            moments: MomentsRead::Chosen,
            reads_queries: false,
            reads_values: false,
            cpu_only: false,
            position_bound: false,
            on_request: false,
        }
    }

    fn parameters(&self) -> ParameterSet {
        CodebookParams::set()
    }

    fn fit(&self, values: Map<String, Value>, input: &FitInput) -> Result<Box<dyn Fit>> {
        let asked = CodebookParams::from_values(values)?;
        let rotation = match (asked.positions, input.position) {
            (Positions::Window, position) => Rotation::At(position),
            (Positions::Buckets, Position::Windowed(_)) => {
                let (start, kept) = (input.block_start, input.kept);
                Rotation::Buckets(DistanceBuckets::new(input.seq_len, start, kept, input.windows))
            }
            (Positions::Buckets, Position::Own) => {
                return Err(Error::usage(
                    "⟨positions=buckets⟩ needs keys before rotation; it does not work with standard RoPE",
                )
                .hint("omit ⟨rope=standard⟩, and moments that were made with it"));
            }
        };
        let params = FitParams {
            size: asked.size.unwrap_or(input.codewords),
            iterations: asked.iterations,
            min_gain: asked.min_gain,
            metric: asked.metric,
            seed: input.seed,
            rotation,
        };
        let kept = input.kept.iter().filter(|kept| **kept).count();
        params.check(kept, input.reporter)?;
        Ok(Box::new(params))
    }

    fn specs(&self, params: &Map<String, Value>, sizes: Sizes) -> Result<Vec<Spec>> {
        let FitParams {
            size: m, rotation, ..
        } = parse("sections.a2ats", params)?;
        if let Rotation::Buckets(buckets) = rotation {
            buckets.check(sizes.n_layers)?;
        }
        if !(1..=MAX_SIZE).contains(&m) {
            return Err(Error::damaged("`sections.a2ats.codebook_size` is not valid"));
        }
        let (l, g, d) = (sizes.n_layers, sizes.n_kv_heads, sizes.head_dim);
        Ok(vec![
            Spec::new::<f16>(CODEBOOK, &[l, g, m, d]),
            Spec::new::<f32>(MEAN, &[l, g, d]),
            Spec::new::<f32>(CHOL, &[l, g, d, d]),
            Spec::new::<u32>(COUNT, &[l, g, m]),
        ])
    }

    /// Checks that L is lower triangular with a positive diagonal, and that the counts add up to the number of kept
    /// keys.
    fn check(&self, section: &SectionView) -> Result<()> {
        let chol = section.read::<f32>(CHOL)?;
        let d = section.artifact.sizes.head_dim;
        for (head, l) in chol.chunks_exact(d * d).enumerate() {
            let lower =
                (0..d).all(|i| l[i * d + i] > 0.0 && l[i * d + i + 1..(i + 1) * d].iter().all(|v| *v == 0.0));
            if !lower {
                return Err(section.damaged(format!(
                    "`{CHOL}` of {} is not a Cholesky factor",
                    section.kv_head(head)
                )));
            }
        }
        let m = section.params::<FitParams>()?.size;
        let kept = section.kept_keys();
        for (head, counts) in section.read::<u32>(COUNT)?.chunks_exact(m).enumerate() {
            let sum: u64 = counts.iter().map(|c| u64::from(*c)).sum();
            if sum != kept {
                let head = section.kv_head(head);
                return Err(section.damaged(format!("`{COUNT}` of {head} adds up to {sum} keys of {kept}")));
            }
        }
        Ok(())
    }

    fn describe(&self, section: &SectionView) -> Result<String> {
        let p: FitParams = section.params()?;
        let rotation = match &p.rotation {
            Rotation::At(position) => format!("WRoPE position {}", json!(position)),
            Rotation::Buckets(buckets) => format!("distances in buckets from {}", buckets.edges),
        };
        Ok(format!(
            "{} codewords per KV head, at most {} k-means passes, {rotation}, seed {}",
            p.size, p.iterations, p.seed
        ))
    }

    fn table(&self, reports: &[HeadReport]) -> Result<String> {
        Ok(table(&COLUMNS, reports)? + LEGEND)
    }

    /// Lists the heads whose keys are approximated worst, and those that leave many codewords without keys or with few:
    /// their entropy is that of an even spread over much fewer codewords.
    fn weak_heads(&self, section: &SectionView, reports: &[HeadReport]) -> Result<String> {
        let worst = "a2ats, worst heads (error on held-out keys as a share of the variance)";
        let mut out = worst_of(worst, reports, CodebookQuality::unexplained)?;
        let size = section.params::<FitParams>()?.size as f64;
        let mut few = Vec::new();
        for head in reports {
            let quality: CodebookQuality = parse("quality.a2ats", head.report)?;
            let (even, unused) = (quality.usage_entropy_bits.exp2(), quality.unused_codewords as f64);
            // Heads whose keys are all equal are attended in full.
            if quality.variance > 0.0 && (even <= EVEN_SHARE * size || unused >= UNUSED_SHARE * size) {
                let place = format!("layer {}  head {}", head.layer, head.head);
                let how = format!("spread as evenly over {even:.0}; {unused:.0} have no keys");
                few.push((even, format!("  {place}  {how}\n")));
            }
        }
        if !few.is_empty() {
            few.sort_by(|a, b| a.0.total_cmp(&b.0));
            out += &format!(
                "\na2ats, heads that use few of their {size:.0} codewords: {}\n",
                few.len()
            );
            out.extend(few.into_iter().take(LISTED).map(|(_, line)| line));
        }
        Ok(out)
    }
}

//! The section `wpq`: a product quantiser per KV head.

use half::f16;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::fit::WpqFit;
use crate::artifact::{
    Column, Facts, Fit, FitInput, HeadReport, MomentsRead, SectionKind, SectionView, object, parse, share,
    table,
};
use crate::error::{Error, Result};
use crate::method::weak::worst_of;
use crate::model::Sizes;
use crate::parameters::{Choice, ParameterSet, Parameters, Values, choices, parameters};
use crate::stats::whiten::EPS;
use crate::store::Spec;

/// Name of the section in an artifact.
pub const SECTION: &str = "wpq";

/// The words of each group, in the coordinates of the group's channels.
pub const CODEBOOK: &str = "wpq.codebook";
/// Mean of the rotated keys; of what remains of them if the path of the mean before rotation is subtracted.
pub const MEAN: &str = "wpq.mean";
/// Mean of the keys before rotation, if its path is subtracted.
pub const MEAN_PRE: &str = "wpq.mean_pre";
/// Cholesky factor of the rotated queries' second moment.
pub const CHOL: &str = "wpq.chol";
/// Principal directions of the whitened keys as columns, the largest variance first.
pub const ROTATION: &str = "wpq.rotation";

/// Number of stages of a code. The second encodes what the first leaves of a key.
pub(super) const STAGES: usize = 2;
/// Maximum number of k-means passes.
pub(super) const PASSES: usize = 25;

/// Channels from which on a head counts as wide.
const WIDE: usize = 64;

choices! {
    /// What is subtracted from rotated keys before they are encoded. Manifests name it unless it is the mean.
    pub enum Center {
        /// The mean of the rotated keys, which is the same at every position.
        Mean = "mean",
        /// The mean of the keys before rotation, rotated to the position of each key. Loses less.
        Path = "path",
    }
}

impl Center {
    /// The center of artifacts that do not name it.
    fn unnamed() -> Self {
        Self::Mean
    }

    fn is_mean(&self) -> bool {
        *self == Self::Mean
    }
}

/// The parameters of a fit, as the manifest stores them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct WpqParams {
    /// Bits of a key's code.
    pub bits: usize,
    /// Words of each group: 16 or 256.
    pub words: usize,
    /// Number of principal directions that codes describe, from the largest variance down; `None` (in artifacts of
    /// earlier versions): all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub directions: Option<usize>,
    /// What codes describe the keys around; absent for the mean.
    #[serde(default = "Center::unnamed", skip_serializing_if = "Center::is_mean")]
    pub center: Center,
    /// The seed of k-means, per layer, head, stage and group.
    pub seed: u64,
}

impl WpqParams {
    /// Returns the number of groups of a stage, m.
    pub fn groups(&self) -> usize {
        self.bits / STAGES / self.words.trailing_zeros().max(1) as usize
    }

    /// Returns the number of channels per group for keys of `d` channels. In some groups, the last channel may stay
    /// empty.
    pub fn group_dim(&self, d: usize) -> usize {
        self.directions.unwrap_or(d).div_ceil(self.groups())
    }

    /// Returns the section's parameters for the manifest.
    pub fn manifest(&self) -> Result<Map<String, Value>> {
        let mut manifest = object(self)?;
        manifest.extend(object(&json!({
            "stages": STAGES,
            "iterations": PASSES,
            "groups": self.groups(),
            "rope_space": "post",
            "eps": EPS,
            "h_pool": "kv-head-sum",
            "h_normalisation": "rms",
        }))?);
        Ok(manifest)
    }

    fn is_valid(&self, d: usize) -> bool {
        [16, 32, 64].contains(&self.bits)
            && [16, 256].contains(&self.words)
            && self
                .directions
                .is_none_or(|c| c == d || (1..d).contains(&c) && c.is_multiple_of(self.groups()))
    }
}

/// Returns how many of `d` principal directions codes describe by default. The second half has hardly any variance in
/// the metric of the queries, and in wide heads leaving it out makes the query's map, which every step reads, smaller.
pub(super) fn default_directions(d: usize) -> usize {
    if d >= WIDE { d / 2 } else { d }
}

parameters! {
    /// The parameters of the fit.
    pub struct WpqFitParams, "Section wpq" {
        /// Bits per key of the wpq codes; none = make no section wpq
        wpq_bits: Option<usize> = Some(64), "BITS" in Values::AmongOrNone(&[16, 32, 64]);
        /// Words per group of directions: 16 (4 bits of the code per group and stage; a code has two stages) or 256 (8 bits)
        wpq_words: usize = 16, "N" in Values::Among(&[16, 256]);
        /// Number of principal directions of the keys that a wpq code describes, rounded up to a multiple of the groups, or
        /// `all`; more directions describe each key more closely, but every decode step has more to read [default: half of the
        /// head's channels if it has 64 or more, otherwise all]
        wpq_directions: Option<usize> = None, "N" in Values::CountOrAll;
        /// What wpq subtracts from the rotated keys before it encodes them
        wpq_center: Center = Center::Path, "NAME" in Values::OneOf(Center::WORDS);
    }
}

impl WpqFitParams {
    /// Returns what the manifest says of a fit to keys of `d` channels; `None` if no section is wanted.
    fn stored(&self, d: usize, seed: u64) -> Option<WpqParams> {
        let mut params = WpqParams {
            bits: self.wpq_bits?,
            words: self.wpq_words,
            directions: None,
            center: self.wpq_center,
            seed,
        };
        let directions = self.wpq_directions.unwrap_or(default_directions(d)).min(d);
        params.directions = Some(directions.next_multiple_of(params.groups()).min(d));
        Some(params)
    }
}

/// The quality report of a KV head, as docs/reference/artifact.md defines it.
#[derive(Serialize, Deserialize)]
pub(super) struct WpqQuality {
    pub inertia: f64,
    pub held_out_inertia: Option<f64>,
    pub variance: f64,
    pub iterations: usize,
    pub unused_codewords: usize,
    pub condition: f64,
    pub eps: f64,
    pub keys: usize,
}

impl WpqQuality {
    /// Returns the share of the variance of held-out keys (of calibration keys if there are none) that remains as
    /// error.
    pub fn unexplained(&self) -> Option<f64> {
        let error = self.held_out_inertia.unwrap_or(self.inertia);
        (self.variance > 0.0).then(|| error / self.variance)
    }
}

const COLUMNS: [Column<WpqQuality>; 5] = [
    Column::new("inertia", |v| format!("{v:.3}"), |q| Some(q.inertia)),
    Column::new("held out", |v| format!("{v:.3}"), |q| q.held_out_inertia),
    Column::new("of variance", share, WpqQuality::unexplained),
    Column::new(
        "unused",
        |v| format!("{v:.0}"),
        |q| Some(q.unused_codewords as f64),
    ),
    Column::new("condition", |v| format!("{v:.1e}"), |q| Some(q.condition)),
];
const LEGEND: &str = "(product quantisers: means over each layer's KV heads; inertia = squared error
per key in the metric of the queries; of variance = held-out inertia as a share
of the keys' variance)
";

/// The declaration of the section.
#[derive(Debug)]
pub struct WpqSection;

impl SectionKind for WpqSection {
    fn facts(&self) -> &'static Facts {
        &Facts {
            name: SECTION,
            command: "wpq",
            about: "Fit product quantisers (section wpq) to the keys of a dump",
            stage: "product quantisers",
            moments: MomentsRead::Own,
            reads_queries: false,
            reads_values: false,
            cpu_only: false,
            position_bound: true,
            on_request: false,
        }
    }

    fn parameters(&self) -> ParameterSet {
        WpqFitParams::set()
    }

    fn left_out_by(&self) -> Option<&'static str> {
        Some("wpq_bits")
    }

    fn fit(&self, values: Map<String, Value>, input: &FitInput) -> Result<Box<dyn Fit>> {
        let params = WpqFitParams::from_values(values)?;
        if params.wpq_directions == Some(0) {
            return Err(Error::usage("⟨wpq_directions=0⟩ would describe nothing of a key")
                .hint("give at least 1, or leave it out"));
        }
        let params = params.stored(input.head_dim, input.seed).ok_or_else(|| {
            Error::usage("⟨wpq_bits=none⟩ would make no section")
                .hint("give the bits per key: ⟨wpq_bits=16⟩, 32 or 64")
        })?;
        Ok(Box::new(WpqFit { params }))
    }

    fn specs(&self, params: &Map<String, Value>, sizes: Sizes) -> Result<Vec<Spec>> {
        // Earlier versions could encode keys in one stage.
        if let Some(stages) = params.get("stages").filter(|of| **of != json!(STAGES)) {
            return Err(self.removed("stages", stages));
        }
        let p: WpqParams = parse("sections.wpq", params)?;
        let (l, g, d) = (sizes.n_layers, sizes.n_kv_heads, sizes.head_dim);
        if !p.is_valid(d) {
            return Err(Error::damaged(
                "`sections.wpq` has `bits`, `words` or `directions` that are not valid",
            ));
        }
        let path = (p.center == Center::Path).then(|| Spec::new::<f32>(MEAN_PRE, &[l, g, d]));
        let specs = [
            Spec::new::<f16>(CODEBOOK, &[l, g, STAGES, p.groups(), p.words, p.group_dim(d)]),
            Spec::new::<f32>(MEAN, &[l, g, d]),
            Spec::new::<f32>(CHOL, &[l, g, d, d]),
            Spec::new::<f32>(ROTATION, &[l, g, d, d]),
        ];
        Ok(specs.into_iter().chain(path).collect())
    }

    /// Checks that L is lower triangular with a positive diagonal, and that the directions have length 1.
    fn check(&self, section: &SectionView) -> Result<()> {
        let d = section.artifact.sizes.head_dim;
        let is_factor = |l: &[f32]| {
            let row = |i: usize| &l[i * d..(i + 1) * d];
            (0..d).all(|i| row(i)[i] > 0.0 && row(i)[i + 1..].iter().all(|v| *v == 0.0))
        };
        let is_rotation = |v: &[f32]| {
            let square = |i: usize| (0..d).map(|j| f64::from(v[j * d + i]).powi(2)).sum::<f64>();
            (0..d).all(|i| (square(i) - 1.0).abs() < 1e-4)
        };
        let heads = |tensor, is_right: &dyn Fn(&[f32]) -> bool, what: &str| -> Result<()> {
            let values = section.read::<f32>(tensor)?;
            match values.chunks_exact(d * d).position(|head| !is_right(head)) {
                None => Ok(()),
                Some(head) => {
                    let head = section.kv_head(head);
                    Err(section.damaged(format!("`{tensor}` of {head} {what}")))
                }
            }
        };
        heads(CHOL, &is_factor, "is not a Cholesky factor")?;
        heads(ROTATION, &is_rotation, "has a column whose length is not 1")
    }

    fn describe(&self, section: &SectionView) -> Result<String> {
        let p: WpqParams = section.params()?;
        let directions = p.directions.map_or("all".to_owned(), |n| n.to_string());
        Ok(format!(
            "{} bits per key{}: two stages of {} groups of {} words, {directions} directions, seed {}",
            p.bits,
            if p.center == Center::Path {
                ", around the path of the mean"
            } else {
                ""
            },
            p.groups(),
            p.words,
            p.seed
        ))
    }

    fn table(&self, reports: &[HeadReport]) -> Result<String> {
        Ok(table(&COLUMNS, reports)? + LEGEND)
    }

    /// Lists the heads whose keys are approximated worst.
    fn weak_heads(&self, _: &SectionView, reports: &[HeadReport]) -> Result<String> {
        let heading = "wpq, worst heads (error on held-out keys as a share of the variance)";
        worst_of(heading, reports, WpqQuality::unexplained)
    }
}

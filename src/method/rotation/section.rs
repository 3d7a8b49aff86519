//! The section `rotation`: a map of the keys of each KV head.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::fit::{KEY_RIDGE, QUERY_RIDGE, RotationFit};
use super::fitted;
use crate::artifact::{
    Column, Facts, Fit, FitInput, HeadReport, MomentsRead, SectionKind, SectionView, parse, share, table,
};
use crate::error::Result;
use crate::kv::static_set::SINKS;
use crate::method::weak::worst_of;
use crate::model::Sizes;
use crate::parameters::{Choice, ParameterSet, Parameters, Values, choices, parameters};
use crate::store::Spec;

/// Name of the section in an artifact.
pub const SECTION: &str = "rotation";

/// The map A of rotated keys, by rows.
pub const KEYS: &str = "rotation.keys";
/// What is subtracted from rotated keys before A.
pub const MEAN: &str = "rotation.mean";

choices! {
    /// The form of the map.
    pub enum Form {
        /// The linear map whose score error is least, around the mean of the keys. Loses least.
        Balanced = "balanced",
        /// The rotation of OSCAR (arXiv 2605.17757): along the eigenvectors of the queries' moment.
        Orthogonal = "orthogonal",
    }
}

/// The parameters of a fit, as the manifest stores them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct RotationParams {
    /// The form of the map.
    pub form: Form,
    /// First positions of every block that take no part.
    sinks: usize,
    query_ridge: f64,
    key_ridge: f64,
    rope_space: String,
    h_pool: String,
}

impl RotationParams {
    pub fn new(form: Form) -> Self {
        Self {
            form,
            sinks: SINKS,
            query_ridge: QUERY_RIDGE,
            key_ridge: KEY_RIDGE,
            rope_space: "post".to_owned(),
            h_pool: "kv-head-sum".to_owned(),
        }
    }
}

parameters! {
    /// The parameters of the fit.
    pub struct RotationFitParams, "Section rotation" {
        /// The form of the map of keys for --kv int4 and int2
        rotation_form: Form = Form::Balanced, "NAME" in Values::OneOf(Form::WORDS);
    }
}

/// The quality report of a KV head, as docs/reference/artifact.md defines it.
#[derive(Serialize, Deserialize)]
pub(super) struct RotationQuality {
    pub score_variance: f64,
    pub error_4: f64,
    pub error_2: f64,
    pub held_out_error_4: Option<f64>,
    pub held_out_error_2: Option<f64>,
    pub hadamard_error_4: f64,
    pub hadamard_error_2: f64,
    pub held_out_hadamard_error_4: Option<f64>,
    pub held_out_hadamard_error_2: Option<f64>,
    pub keys: usize,
}

impl RotationQuality {
    /// Returns the error in 4 bits and that after a Hadamard rotation, on held-out keys (calibration keys if there are none).
    fn in_4_bits(&self) -> [f64; 2] {
        let held_out = self.held_out_error_4.zip(self.held_out_hadamard_error_4);
        held_out.map_or([self.error_4, self.hadamard_error_4], Into::into)
    }

    /// Does what [`Self::in_4_bits`] does for 2 bits.
    fn in_2_bits(&self) -> [f64; 2] {
        let held_out = self.held_out_error_2.zip(self.held_out_hadamard_error_2);
        held_out.map_or([self.error_2, self.hadamard_error_2], Into::into)
    }

    /// Returns an error as a share of the variance of the scores.
    fn of_variance(&self, error: f64) -> Option<f64> {
        (self.score_variance > 0.0).then(|| error / self.score_variance)
    }

    /// Returns the error in 4 bits, divided by that after a Hadamard rotation.
    pub fn ratio_4(&self) -> Option<f64> {
        ratio(self.in_4_bits())
    }
}

/// Divides the error of a map by that of a Hadamard rotation.
fn ratio([own, hadamard]: [f64; 2]) -> Option<f64> {
    (hadamard > 0.0).then(|| own / hadamard)
}

const COLUMNS: [Column<RotationQuality>; 4] = [
    Column::new("4 bits", share, |q| q.of_variance(q.in_4_bits()[0])),
    Column::new("of Hadamard", share, RotationQuality::ratio_4),
    Column::new("2 bits", share, |q| q.of_variance(q.in_2_bits()[0])),
    Column::new("of Hadamard", share, |q| ratio(q.in_2_bits())),
];
const LEGEND: &str = "(maps of keys: means over each layer's KV heads; squared error of scores from
keys in 4 and 2 bits, as a share of the scores' variance and of the error after
a Hadamard rotation, on held-out keys if there are any)
";

/// The declaration of the section.
#[derive(Debug)]
pub struct RotationSection;

impl SectionKind for RotationSection {
    fn facts(&self) -> &'static Facts {
        &Facts {
            name: SECTION,
            command: SECTION,
            about: "Fit the maps of keys for ⟨kv=int4⟩ and ⟨kv=int2⟩ to a dump",
            stage: "maps of keys",
            moments: MomentsRead::Own,
            reads_queries: false,
            reads_values: false,
            cpu_only: true,
            position_bound: true,
            on_request: false,
        }
    }

    fn parameters(&self) -> ParameterSet {
        RotationFitParams::set()
    }

    fn marks_constant_heads(&self) -> bool {
        false
    }

    fn fit(&self, values: Map<String, Value>, input: &FitInput) -> Result<Box<dyn Fit>> {
        let params = RotationParams::new(RotationFitParams::from_values(values)?.rotation_form);
        Ok(Box::new(RotationFit::new(params, input.block_start, input.kept)))
    }

    fn specs(&self, params: &Map<String, Value>, sizes: Sizes) -> Result<Vec<Spec>> {
        parse::<RotationParams>("sections.rotation", params)?;
        let (l, g, d) = (sizes.n_layers, sizes.n_kv_heads, sizes.head_dim);
        Ok(vec![
            Spec::new::<f32>(KEYS, &[l, g, d, d]),
            Spec::new::<f32>(MEAN, &[l, g, d]),
        ])
    }

    /// Checks that every map has an inverse in f32.
    fn check(&self, section: &SectionView) -> Result<()> {
        let d = section.artifact.sizes.head_dim;
        let (keys, mean) = (section.read::<f32>(KEYS)?, section.read::<f32>(MEAN)?);
        let heads = keys.chunks_exact(d * d).zip(mean.chunks_exact(d));
        for (head, (map, mean)) in heads.enumerate() {
            if fitted(map, mean)?.is_none() {
                let head = section.kv_head(head);
                return Err(section.damaged(format!("`{KEYS}` of {head} has no inverse")));
            }
        }
        Ok(())
    }

    fn describe(&self, section: &SectionView) -> Result<String> {
        let params: RotationParams = section.params()?;
        let form = params.form.as_str();
        Ok(format!("{form} maps of keys for int4 and int2"))
    }

    fn table(&self, reports: &[HeadReport]) -> Result<String> {
        Ok(table(&COLUMNS, reports)? + LEGEND)
    }

    /// Lists the heads whose maps gain least over a Hadamard rotation.
    fn weak_heads(&self, _: &SectionView, reports: &[HeadReport]) -> Result<String> {
        let heading = "rotation, worst heads (score error in 4 bits, of that after a Hadamard rotation)";
        worst_of(heading, reports, RotationQuality::ratio_4)
    }
}

//! The section `rotation`: maps of the keys and values of each KV head.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::fit::{KEY_RIDGE, MAX_QUERIES, QUERY_RIDGE, RotationFit};
use super::section_maps;
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
/// The map of values, by rows.
pub const VALUES: &str = "rotation.values";

choices! {
    /// The form of the maps.
    pub enum Form {
        /// The linear map of keys whose score error is least, around their mean; values weighted by attention. Loses least.
        Balanced = "balanced",
        /// The rotations of OSCAR (arXiv 2605.17757): along the eigenvectors of the queries' moment, and of scored values.
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
    max_queries: usize,
    max_held_out_queries: usize,
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
            max_queries: MAX_QUERIES[0],
            max_held_out_queries: MAX_QUERIES[1],
            rope_space: "post".to_owned(),
            h_pool: "kv-head-sum".to_owned(),
        }
    }
}

parameters! {
    /// The parameters of the fit.
    pub struct RotationFitParams, "Section rotation" {
        /// The form of the maps for --kv int4 and int2
        rotation_form: Form = Form::Balanced, "NAME" in Values::OneOf(Form::WORDS);
    }
}

/// The quality report of a KV head, as docs/reference/artifact.md defines it.
#[derive(Serialize, Deserialize)]
pub(super) struct RotationQuality {
    pub keys: usize,
    pub queries: usize,
    pub key_errors: Option<Rounding>,
    pub held_out_key_errors: Option<Rounding>,
    pub value_errors: Option<Rounding>,
    pub held_out_value_errors: Option<Rounding>,
}

/// Errors of rows that are read back from 4 and 2 bits, with the fitted map and with a Hadamard rotation.
#[derive(Clone, Copy, Serialize, Deserialize)]
pub(super) struct Rounding {
    pub bits_4: f64,
    pub bits_2: f64,
    pub hadamard_4: f64,
    pub hadamard_2: f64,
}

impl RotationQuality {
    /// Returns the errors of held-out keys (calibration keys if there are none).
    fn of_keys(&self) -> Option<Rounding> {
        self.held_out_key_errors.or(self.key_errors)
    }

    /// Returns the errors of values that held-out queries attend (those of the fit if there are none).
    fn of_values(&self) -> Option<Rounding> {
        self.held_out_value_errors.or(self.value_errors)
    }

    /// Returns the error of keys in 4 bits, divided by that after a Hadamard rotation.
    fn ratio_of_keys(&self) -> Option<f64> {
        self.of_keys().map(Rounding::ratio_4)
    }

    /// Says in a line what the maps gain.
    pub fn line(&self) -> Option<String> {
        let part = |name: &str, errors: Option<Rounding>| Some(format!("{name} {:.2}", errors?.ratio_4()));
        let parts = [part("keys", self.of_keys()), part("values", self.of_values())];
        let parts: Vec<String> = parts.into_iter().flatten().collect();
        let line = || {
            format!(
                "error in 4 bits, of that of a Hadamard rotation: {}",
                parts.join(", ")
            )
        };
        (!parts.is_empty()).then(line)
    }
}

impl Rounding {
    /// Returns the error in 4 bits, divided by that after a Hadamard rotation.
    fn ratio_4(self) -> f64 {
        ratio(self.bits_4, self.hadamard_4)
    }

    /// Does what [`Self::ratio_4`] does for 2 bits.
    fn ratio_2(self) -> f64 {
        ratio(self.bits_2, self.hadamard_2)
    }
}

/// Divides an error by another; 1 if both are 0.
fn ratio(own: f64, other: f64) -> f64 {
    if own == other { 1.0 } else { own / other }
}

const COLUMNS: [Column<RotationQuality>; 6] = [
    Column::new("K4", share, |q| Some(q.of_keys()?.bits_4)),
    Column::new("of H", share, RotationQuality::ratio_of_keys),
    Column::new("K2", share, |q| Some(q.of_keys()?.bits_2)),
    Column::new("of H", share, |q| Some(q.of_keys()?.ratio_2())),
    Column::new("V2", share, |q| Some(q.of_values()?.bits_2)),
    Column::new("of H", share, |q| Some(q.of_values()?.ratio_2())),
];
const LEGEND: &str = "(maps: means over each layer's KV heads; K4, K2: squared error of scores with
keys that are read back from 4 and 2 bits, as a share of the scores' variance;
V2: of values in 2 bits, weighted by their squared attention, as a share of the
values' variance; of H: that error over the error after a Hadamard rotation; on
held-out keys and with held-out queries if there are any)
";

/// The declaration of the section.
#[derive(Debug)]
pub struct RotationSection;

impl SectionKind for RotationSection {
    fn facts(&self) -> &'static Facts {
        &Facts {
            name: SECTION,
            command: SECTION,
            about: "Fit the maps of keys and values for ⟨kv=int4⟩ and ⟨kv=int2⟩ to a dump",
            stage: "maps of rows",
            moments: MomentsRead::Own,
            reads_queries: true,
            reads_values: true,
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
            Spec::new::<f32>(VALUES, &[l, g, d, d]),
        ])
    }

    /// Checks that every map has an inverse in f32.
    fn check(&self, section: &SectionView) -> Result<()> {
        section_maps(section).map(drop)
    }

    fn describe(&self, section: &SectionView) -> Result<String> {
        let params: RotationParams = section.params()?;
        let form = params.form.as_str();
        Ok(format!("{form} maps of keys and values for int4 and int2"))
    }

    fn table(&self, reports: &[HeadReport]) -> Result<String> {
        Ok(table(&COLUMNS, reports)? + LEGEND)
    }

    /// Lists the heads whose maps gain least over a Hadamard rotation.
    fn weak_heads(&self, _: &SectionView, reports: &[HeadReport]) -> Result<String> {
        let heading = "rotation, worst heads (error of keys in 4 bits over that with a Hadamard map)";
        worst_of(heading, reports, RotationQuality::ratio_of_keys)
    }
}

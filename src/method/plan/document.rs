//! Head plans as JSON: runs of equal layers, of runs of equal KV heads.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::super::named::Named;
use super::{HeadPlan, Plan, at};
use crate::error::{Error, Result};
use crate::kv::static_set::{SINKS, WINDOW};
use crate::kv::{Budget, KvType, RowFormat};

/// What a plan looks like.
pub const FORM: &str = r#"a head plan looks like {"sinks": 4, "window": 64, "layers": [{"repeat": 30, "heads": [{"repeat": 3, "method": "wpq", "budget": 0.06, "keys": "bf16", "values": "bf16"}]}]}"#;

/// Most layers of a plan, and most KV heads of a layer: more than any model has.
const MOST_LAYERS: usize = 4096;
const MOST_HEADS: usize = 1024;

fn too_many(what: &str) -> Error {
    Error::invalid(format!("the head plan has more {what} than any model")).hint(FORM)
}

/// A plan as JSON: runs of equal layers, of runs of equal KV heads.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    #[serde(default = "sinks")]
    sinks: usize,
    #[serde(default = "window")]
    window: usize,
    layers: Vec<LayerRun>,
}

#[derive(PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct LayerRun {
    #[serde(default = "once", skip_serializing_if = "is_once")]
    repeat: usize,
    heads: Vec<HeadRun>,
}

#[derive(PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct HeadRun {
    #[serde(default = "once", skip_serializing_if = "is_once")]
    repeat: usize,
    method: Named,
    #[serde(default, skip_serializing_if = "Map::is_empty")]
    params: Map<String, Value>,
    #[serde(default = "usual_budget")]
    budget: Budget,
    #[serde(default = "usual_format")]
    keys: RowFormat,
    #[serde(default = "usual_format")]
    values: RowFormat,
}

fn sinks() -> usize {
    SINKS
}

fn window() -> usize {
    WINDOW
}

fn once() -> usize {
    1
}

fn is_once(repeat: &usize) -> bool {
    *repeat == 1
}

fn usual_budget() -> Budget {
    Budget::USUAL
}

fn usual_format() -> RowFormat {
    RowFormat::BF16
}

impl LayerRun {
    /// Reads the KV heads of one of the layers, of which the first has this index.
    fn read(&self, layer: usize) -> Result<Vec<HeadPlan>> {
        if self.repeat == 0 {
            return Err(
                Error::invalid(format!("layer {layer} of the head plan is repeated 0 times")).hint(FORM),
            );
        }
        let mut heads = Vec::new();
        for run in &self.heads {
            let place = at(layer, heads.len());
            if run.repeat == 0 {
                return Err(Error::invalid(format!("{place} is repeated 0 times")).hint(FORM));
            }
            if heads.len().saturating_add(run.repeat) > MOST_HEADS {
                return Err(too_many("KV heads"));
            }
            let head = HeadPlan::from_run(run);
            head.check().map_err(|e| e.context(place))?;
            heads.extend(std::iter::repeat_n(head, run.repeat));
        }
        Ok(heads)
    }
}

/// Joins equal neighbours: each comes with how often it stands there.
fn runs<T: PartialEq>(items: &[T]) -> impl Iterator<Item = (usize, &T)> {
    items.chunk_by(|a, b| a == b).map(|run| (run.len(), &run[0]))
}

impl Plan {
    /// Reads a plan from the value of `head_plan` in JSON.
    ///
    /// # Errors
    /// A value that is no plan; a method that does not take its parameters.
    pub fn read(value: Value) -> Result<Self> {
        let document: Document = serde_json::from_value(value)
            .map_err(|e| Error::invalid(format!("the head plan is invalid: {e}")).hint(FORM))?;
        if document.window == 0 {
            return Err(Error::invalid("the window of the head plan has no position")
                .hint("a step attends at least its own position: give a window of at least 1"));
        }
        let mut layers = Vec::new();
        for run in &document.layers {
            let heads = run.read(layers.len())?;
            if layers.len().saturating_add(run.repeat) > MOST_LAYERS {
                return Err(too_many("layers"));
            }
            layers.extend(std::iter::repeat_n(heads, run.repeat));
        }
        Ok(Self {
            sinks: document.sinks,
            window: document.window,
            layers,
        })
    }

    /// Returns the value of `head_plan` in JSON, which [`Plan::read`] reads.
    pub fn json(&self) -> Value {
        let heads = |heads: &Vec<HeadPlan>| -> Vec<HeadRun> {
            runs(heads).map(|(repeat, head)| head.run(repeat)).collect()
        };
        let layers = runs(&self.layers).map(|(repeat, layer)| LayerRun {
            repeat,
            heads: heads(layer),
        });
        let document = Document {
            sinks: self.sinks,
            window: self.window,
            layers: layers.collect(),
        };
        json!(document)
    }
}

impl HeadPlan {
    fn from_run(run: &HeadRun) -> Self {
        Self {
            method: run.method,
            params: run.params.clone(),
            budget: run.budget,
            kv: KvType {
                keys: run.keys,
                values: run.values,
            },
        }
    }

    fn run(&self, repeat: usize) -> HeadRun {
        HeadRun {
            repeat,
            method: self.method,
            params: self.params.clone(),
            budget: self.budget,
            keys: self.kv.keys,
            values: self.kv.values,
        }
    }
}

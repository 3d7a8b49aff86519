//! Head plans: by which method, with which budget and in which formats each KV head of a model is served.

use std::collections::BTreeSet;
use std::fmt;

use serde_json::{Map, Value};

use super::Method;
use super::declaration::Ask;
use super::named::Named;
use super::params::MethodParams;
use super::registry::MethodName;
use crate::artifact::Artifact;
use crate::error::{Error, Result};
use crate::kv::static_set::{SINKS, WINDOW};
use crate::kv::{Budget, KvType, Limits};
use crate::model::Sizes;
use crate::wording::counted;

mod document;
mod planned;
mod recommended;

pub use document::FORM;

/// How one KV head is served.
#[derive(Clone, Debug, PartialEq)]
pub struct HeadPlan {
    /// The method, with a tail or without.
    pub method: Named,
    /// Parameters of the method, by name; those of the run hold for the others.
    pub params: Map<String, Value>,
    /// How many positions beyond the static set a step may choose.
    pub budget: Budget,
    /// The formats of keys and values.
    pub kv: KvType,
}

/// How each KV head of a model is served, and what every step attends.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Number of first positions that are always attended.
    pub sinks: usize,
    /// Number of last positions that are always attended, the current one included.
    pub window: usize,
    /// The KV heads of each layer.
    pub layers: Vec<Vec<HeadPlan>>,
}

impl Plan {
    /// Serves all KV heads alike, with the usual static set.
    pub fn uniform(sizes: Sizes, head: &HeadPlan) -> Self {
        Self {
            sinks: SINKS,
            window: WINDOW,
            layers: vec![vec![head.clone(); sizes.n_kv_heads]; sizes.n_layers],
        }
    }

    /// Reads the plan of an artifact, if it has one.
    ///
    /// # Errors
    /// As [`Plan::read`]; a plan for a model of other sizes.
    pub fn of_artifact(artifact: &Artifact) -> Result<Option<Self>> {
        let Some(value) = &artifact.manifest.head_plan else {
            return Ok(None);
        };
        let plan = Self::read(value.clone()).and_then(|plan| {
            plan.check_sizes(artifact.sizes)?;
            Ok(plan)
        });
        plan.map(Some)
            .map_err(|e| e.context(artifact.store.path().display()))
    }

    /// Lists the KV heads, each with its layer and its index in the layer.
    pub fn heads(&self) -> impl Iterator<Item = (usize, usize, &HeadPlan)> {
        let layers = self.layers.iter().enumerate();
        layers.flat_map(|(layer, heads)| heads.iter().enumerate().map(move |(c, head)| (layer, c, head)))
    }

    /// Lists the formats of every KV head.
    pub fn formats(&self) -> impl Iterator<Item = KvType> {
        self.heads().map(|(_, _, head)| head.kv)
    }

    /// Lists the KV heads to change them.
    pub fn heads_mut(&mut self) -> impl Iterator<Item = &mut HeadPlan> {
        self.layers.iter_mut().flatten()
    }

    /// Returns how all KV heads are served, if they are served alike.
    pub fn same(&self) -> Option<HeadPlan> {
        self.shared(HeadPlan::clone)
    }

    /// Returns the budget of all KV heads, if it is the same.
    pub fn budget(&self) -> Option<Budget> {
        self.shared(|head| head.budget)
    }

    /// Returns the static set with the budget of all KV heads, or with `other` if they differ in it.
    pub fn limits(&self, other: Budget) -> Limits {
        Limits {
            sinks: self.sinks,
            window: self.window,
            ..Limits::new(self.budget().unwrap_or(other))
        }
    }

    /// Returns the formats of all KV heads, if they are the same.
    pub fn kv(&self) -> Option<KvType> {
        self.shared(|head| head.kv)
    }

    fn shared<T: PartialEq>(&self, of: impl Fn(&HeadPlan) -> T) -> Option<T> {
        let mut all = self.heads().map(|(_, _, head)| of(head));
        let first = all.next()?;
        all.all(|other| other == first).then_some(first)
    }

    /// Checks that the plan is for a model of these sizes.
    ///
    /// # Errors
    /// Another number of layers, or of KV heads in a layer.
    pub fn check_sizes(&self, sizes: Sizes) -> Result<()> {
        let wrong = |text: String| Err(Error::mismatch(text).hint("use the plan of this model"));
        let (own, layers) = (self.layers.len(), sizes.n_layers);
        if own != layers {
            return wrong(format!(
                "the head plan has {}, and the model has {layers}",
                counted(own, "layer")
            ));
        }
        for (layer, heads) in self.layers.iter().enumerate() {
            let (own, kv_heads) = (heads.len(), sizes.n_kv_heads);
            if own != kv_heads {
                return wrong(format!(
                    "layer {layer} of the head plan has {}, and that of the model has {kv_heads}",
                    counted(own, "KV head")
                ));
            }
        }
        Ok(())
    }

    /// Lists the methods of all KV heads, without tails.
    pub fn methods(&self) -> Vec<MethodName> {
        let mut all: Vec<MethodName> = Vec::new();
        for (_, _, head) in self.heads() {
            if !all.contains(&head.method.method) {
                all.push(head.method.method);
            }
        }
        all
    }

    /// Says how many KV heads are served in each way, in the order of the heads.
    pub fn text(&self) -> String {
        let mut ways: Vec<(String, usize)> = Vec::new();
        for (_, _, head) in self.heads() {
            let way = head.to_string();
            match ways.iter_mut().find(|(other, _)| *other == way) {
                Some((_, count)) => *count += 1,
                None => ways.push((way, 1)),
            }
        }
        let ways: Vec<String> = ways
            .iter()
            .map(|(way, n)| format!("{} {way}", counted(*n, "KV head")))
            .collect();
        ways.join("; ")
    }

    /// Lists the methods of a layer's KV heads, in the order of the heads.
    pub fn methods_of(&self, layer: usize) -> Vec<Named> {
        let mut seen = BTreeSet::new();
        let heads = self.layers[layer].iter().map(|head| head.method);
        heads.filter(|method| seen.insert(method.to_string())).collect()
    }
}

/// Says to which KV head an error belongs.
fn at(layer: usize, kv_head: usize) -> String {
    format!("layer {layer}, KV head {kv_head} of the head plan")
}

impl HeadPlan {
    /// Checks that the method has these parameters, and takes their values.
    fn check(&self) -> Result<()> {
        let name = self.method.method.as_str();
        if self.params.is_empty() {
            return Ok(());
        }
        let of_caches = |parameter: &&String| MethodParams::of_caches(parameter).is_some();
        if let Some(parameter) = self.params.keys().find(of_caches) {
            return Err(
                Error::invalid(format!("`{parameter}` describes the caches of all KV heads")).hint(format!(
                    "leave it out of the plan, and set ⟨{parameter}⟩ for the run"
                )),
            );
        }
        let set = MethodParams::sets().into_iter().find(|(of, _)| *of == name);
        let without = || {
            Error::invalid(format!("method `{name}` has no parameters"))
                .hint("remove its `params` from the plan")
        };
        set.ok_or_else(without)?.1.check(&self.params)
    }

    /// Prepares the method with the parameters of the run, and over these its own.
    fn prepare(&self, ask: &Ask) -> Result<Box<dyn Method>> {
        let params = ask.params.with(self.method.method.as_str(), &self.params)?;
        self.method.prepare(&Ask {
            params: &params,
            ..*ask
        })
    }
}

impl fmt::Display for HeadPlan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{}, budget {}, {} cache",
            self.method,
            self.budget.value(),
            self.kv
        )?;
        for (name, value) in &self.params {
            write!(f, ", {name} {value}")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(value: Value) -> Plan {
        Plan::read(value).unwrap()
    }

    #[test]
    fn equal_neighbours_are_written_once() {
        let text = json!({"sinks": 2, "window": 8, "layers": [
            {"repeat": 2, "heads": [
                {"repeat": 3, "method": "wpq", "budget": 0.05, "keys": "bf16", "values": "f16"},
                {"method": "lfps+tail", "params": {"lfps_rows": 32}, "budget": 64, "keys": "f32", "values": "f32"},
            ]},
            {"heads": [{"repeat": 4, "method": "full", "budget": 0.06, "keys": "2bit", "values": "2bit"}]},
        ]});
        let plan = read(text.clone());
        assert_eq!(plan.json(), text);
        let heads: Vec<_> = plan.heads().collect();
        assert_eq!(heads.len(), 12);
        let (layer, kv_head, head) = heads[7];
        assert_eq!(
            (layer, kv_head, head.method.to_string().as_str()),
            (1, 3, "lfps+tail")
        );
        assert_eq!((head.budget, head.kv), (Budget::Count(64), KvType::F32));
        assert_eq!(heads[0].2.kv.to_string(), "k=bf16,v=f16");
        assert_eq!((plan.same(), plan.budget(), plan.kv()), (None, None, None));
        assert_eq!(plan.methods().len(), 3);
        assert_eq!(
            plan.text(),
            "6 KV heads wpq, budget 0.05, k=bf16,v=f16 cache; 2 KV heads lfps+tail, budget 64, f32 cache, lfps_rows 32; \
             4 KV heads full, budget 0.06, 2bit cache"
        );
    }

    #[test]
    fn what_is_left_out_has_its_usual_value() {
        let plan = read(json!({"layers": [{"heads": [{"method": "topk"}]}]}));
        assert_eq!((plan.sinks, plan.window), (SINKS, WINDOW));
        let head = plan.same().unwrap();
        assert_eq!((head.budget, head.kv), (Budget::USUAL, KvType::BF16));
        let budget = |value: Value| {
            let plan = Plan::read(json!({"layers": [{"heads": [{"method": "topk", "budget": value}]}]}));
            plan.map(|plan| plan.budget().unwrap())
        };
        assert_eq!(budget(json!("5%")).unwrap(), Budget::Fraction(0.05));
        assert_eq!(budget(json!(1)).unwrap(), Budget::Fraction(1.0));
        assert_eq!(budget(json!(128)).unwrap(), Budget::Count(128));
        assert!(budget(json!(-1)).is_err() && budget(json!([0.1])).is_err());
    }

    #[test]
    fn errors_name_the_layer_and_the_head() {
        let layers = |layers: Value| Plan::read(json!({ "layers": layers })).unwrap_err().to_string();
        let wrong = layers(json!([
            {"heads": [{"repeat": 2, "method": "topk"}]},
            {"heads": [{"method": "topk"}, {"method": "quest", "params": {"page": 17}}]},
        ]));
        assert_eq!(wrong, "layer 1, KV head 1 of the head plan: `page` is 17");
        let wrong = layers(json!([{"heads": [{"method": "topk", "params": {"page": 16}}]}]));
        assert_eq!(
            wrong,
            "layer 0, KV head 0 of the head plan: method `topk` has no parameters"
        );
        for (value, says) in [
            (
                json!({"method": "nope"}),
                "unknown method `nope`; the methods are full, topk, random, ",
            ),
            (
                json!({"method": "topk", "keys": "int3"}),
                "unknown row format `int3`",
            ),
            (json!({"method": "topk", "budgets": 1}), "unknown field `budgets`"),
        ] {
            let said = layers(json!([{ "heads": [value] }]));
            assert!(said.contains(says), "{said}");
        }
        let heads = |repeat: usize| json!([{"repeat": repeat, "method": "topk"}]);
        for (value, says) in [
            (
                json!([{"repeat": 2, "heads": heads(usize::MAX)}]),
                "more KV heads than any model",
            ),
            (
                json!([{"repeat": usize::MAX, "heads": heads(2)}]),
                "more layers than any model",
            ),
            (
                json!([{"repeat": usize::MAX, "heads": []}]),
                "more layers than any model",
            ),
            (
                json!([{"repeat": 0, "heads": heads(usize::MAX)}]),
                "layer 0 of the head plan is repeated 0 times",
            ),
            (
                json!([{"heads": heads(0)}]),
                "layer 0, KV head 0 of the head plan is repeated 0 times",
            ),
            (
                json!([{"heads": [{"method": "selfindex", "params": {"center": "mean"}}]}]),
                "`center` describes the caches of all KV heads",
            ),
        ] {
            assert!(layers(value).contains(says), "{says}");
        }
        let advised = |value: Value| Plan::read(json!({ "layers": value })).unwrap_err();
        let error = advised(json!([{"heads": [{"method": "topk", "params": {"page": 16}}]}]));
        assert_eq!(error.advice(), Some("remove its `params` from the plan"));
    }

    #[test]
    fn a_plan_fits_models_of_its_sizes() {
        let plan = read(json!({"layers": [{"repeat": 2, "heads": [{"repeat": 3, "method": "topk"}]}]}));
        let sizes = |n_layers, n_kv_heads| Sizes {
            n_layers,
            n_heads: 6,
            n_kv_heads,
            head_dim: 16,
        };
        assert!(plan.check_sizes(sizes(2, 3)).is_ok());
        let wrong = |sizes| plan.check_sizes(sizes).unwrap_err().to_string();
        assert_eq!(
            wrong(sizes(4, 3)),
            "the head plan has 2 layers, and the model has 4"
        );
        assert_eq!(
            wrong(sizes(2, 2)),
            "layer 0 of the head plan has 3 KV heads, and that of the model has 2"
        );
        let uniform = Plan::uniform(sizes(2, 3), &plan.same().unwrap());
        assert_eq!(uniform, plan);
    }
}

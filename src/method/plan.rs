//! Head plans: by which method, with which budget and in which formats each KV head of a model is served.

use std::collections::BTreeSet;
use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use super::cuda::CudaMethod;
use super::declaration::Ask;
use super::named::Named;
use super::params::MethodParams;
use super::registry::MethodName;
use super::tail::Tail;
use super::{HeadLimits, Method, MethodPart, Place, Retriever};
use crate::artifact::Artifact;
use crate::error::{Error, Result};
use crate::kv::static_set::{SINKS, WINDOW};
use crate::kv::{Budget, KvType, RowFormat};
use crate::model::Sizes;
use crate::wording::counted;

/// Most layers of a plan, and most KV heads of a layer: more than any model has.
const MOST_LAYERS: usize = 4096;
const MOST_HEADS: usize = 1024;

fn too_many(what: &str) -> Error {
    Error::invalid(format!("the head plan has more {what} than any model")).hint(FORM)
}

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
            let head = HeadPlan::of(run);
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
    /// Serves all KV heads alike, with the usual static set.
    pub fn uniform(sizes: Sizes, head: &HeadPlan) -> Self {
        Self {
            sinks: SINKS,
            window: WINDOW,
            layers: vec![vec![head.clone(); sizes.n_kv_heads]; sizes.n_layers],
        }
    }

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

    /// Lists the KV heads, each with its layer and its index in the layer.
    pub fn heads(&self) -> impl Iterator<Item = (usize, usize, &HeadPlan)> {
        let layers = self.layers.iter().enumerate();
        layers.flat_map(|(layer, heads)| heads.iter().enumerate().map(move |(c, head)| (layer, c, head)))
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

    /// Prepares the methods of all KV heads; budgets and row formats are those of the plan, whatever those of the session.
    ///
    /// # Errors
    /// As [`Plan::check_sizes`] and [`Named::prepare`], with the first KV head of the method.
    pub fn prepare(self, ask: &Ask) -> Result<Box<dyn Method>> {
        self.check_sizes(ask.sizes)?;
        let mut distinct: Vec<(Named, Map<String, Value>)> = Vec::new();
        let mut methods: Vec<Box<dyn Method>> = Vec::new();
        let mut indices: Vec<Vec<usize>> = vec![Vec::new(); self.layers.len()];
        for (layer, kv_head, head) in self.heads() {
            let same = |(method, params): &(Named, Map<String, Value>)| {
                (*method, params) == (head.method, &head.params)
            };
            let index = match distinct.iter().position(same) {
                Some(index) => index,
                None => {
                    let method = head.prepare(ask).map_err(|e| e.context(at(layer, kv_head)))?;
                    methods.push(method);
                    distinct.push((head.method, head.params.clone()));
                    methods.len() - 1
                }
            };
            indices[layer].push(index);
        }
        let is_constant =
            |index: usize, layer, kv_head| methods[index].full_heads().contains(&(layer, kv_head));
        let constant = self
            .heads()
            .map(|(layer, kv_head, _)| (layer, kv_head))
            .filter(|&(layer, kv_head)| is_constant(indices[layer][kv_head], layer, kv_head))
            .collect();
        Ok(Box::new(Planned {
            plan: self,
            methods,
            indices,
            constant,
        }))
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

/// What a plan looks like.
pub const FORM: &str = r#"a head plan looks like {"sinks": 4, "window": 64, "layers": [{"repeat": 30, "heads": [{"repeat": 3, "method": "wpq", "budget": 0.06, "keys": "bf16", "values": "bf16"}]}]}"#;

/// Says to which KV head an error belongs.
fn at(layer: usize, kv_head: usize) -> String {
    format!("layer {layer}, KV head {kv_head} of the head plan")
}

impl HeadPlan {
    fn of(run: &HeadRun) -> Self {
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

    fn limits(&self) -> HeadLimits {
        HeadLimits {
            budget: self.budget,
            kv: self.kv,
        }
    }

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

/// The methods of a plan.
struct Planned {
    plan: Plan,
    methods: Vec<Box<dyn Method>>,
    /// The index among `methods` of that of each KV head of each layer.
    indices: Vec<Vec<usize>>,
    /// The layer and the index of the KV heads that full attention serves in place of their methods.
    constant: Vec<(usize, usize)>,
}

impl Planned {
    fn method(&self, place: &Place) -> &dyn Method {
        self.methods[self.indices[place.layer][place.kv_head]].as_ref()
    }
}

impl Method for Planned {
    fn head(&self, place: &Place) -> Box<dyn Retriever> {
        self.method(place).head(place)
    }

    fn full_heads(&self) -> &[(usize, usize)] {
        &self.constant
    }

    /// If all KV heads are served alike, those of a session have to be those of the plan.
    fn cuda(&self) -> Option<&dyn CudaMethod> {
        let same = self.plan.same().is_some();
        self.methods.first().filter(|_| same)?.cuda()
    }

    fn limits(&self, layer: usize, kv_head: usize) -> Option<HeadLimits> {
        Some(self.plan.layers[layer][kv_head].limits())
    }

    /// One part, if all KV heads are served alike.
    fn parts(&self) -> Vec<MethodPart<'_>> {
        let mut parts: Vec<MethodPart<'_>> = Vec::new();
        // KV heads of the same method, budget and formats; those that full attention serves instead are apart.
        let mut known: Vec<(usize, HeadLimits, usize)> = Vec::new();
        for (layer, kv_head, head) in self.plan.heads() {
            let index = self.indices[layer][kv_head];
            let limits = head.limits();
            let own = self.methods[index].parts();
            let within = own.iter().position(|part| part.heads[layer].contains(&kv_head));
            let key = (index, limits, within.unwrap_or(0));
            let place = known.iter().position(|other| *other == key).unwrap_or_else(|| {
                known.push(key);
                parts.push(MethodPart {
                    method: within.map_or(self.methods[index].as_ref(), |within| own[within].method),
                    limits: Some(limits),
                    heads: vec![Vec::new(); self.plan.layers.len()],
                });
                parts.len() - 1
            });
            parts[place].heads[layer].push(kv_head);
        }
        parts
    }

    fn tail(&self, place: &Place) -> Option<Tail> {
        self.method(place).tail(place)
    }
}

#[cfg(test)]
mod tests {
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
            (json!({"method": "nope"}), "unknown method `nope`"),
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

//! The methods of a head plan, as one method.

use serde_json::{Map, Value};

use super::super::cuda::CudaMethod;
use super::super::declaration::Ask;
use super::super::named::Named;
use super::super::tail::Tail;
use super::super::{Method, MethodPart, Place, Retriever};
use super::{Plan, at};
use crate::error::Result;
use crate::kv::{Budget, KvType};

impl Plan {
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

    fn own(&self, layer: usize, kv_head: usize) -> Option<(Budget, KvType)> {
        let head = &self.plan.layers[layer][kv_head];
        Some((head.budget, head.kv))
    }

    /// One part, if all KV heads are served alike.
    fn parts(&self) -> Vec<MethodPart<'_>> {
        let mut parts: Vec<MethodPart<'_>> = Vec::new();
        // KV heads of the same method, budget and formats; those that full attention serves instead are apart.
        let mut known: Vec<(usize, Budget, KvType, usize)> = Vec::new();
        for (layer, kv_head, head) in self.plan.heads() {
            let index = self.indices[layer][kv_head];
            let own = self.methods[index].parts();
            let within = own.iter().position(|part| part.heads[layer].contains(&kv_head));
            let key = (index, head.budget, head.kv, within.unwrap_or(0));
            let place = known.iter().position(|other| *other == key).unwrap_or_else(|| {
                known.push(key);
                parts.push(MethodPart {
                    method: within.map_or(self.methods[index].as_ref(), |within| own[within].method),
                    own: Some((head.budget, head.kv)),
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

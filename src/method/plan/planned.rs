//! The methods of a head plan, as one method.

use serde_json::{Map, Value};

use super::super::Method;
use super::super::declaration::Ask;
use super::super::named::Named;
use super::super::per_head::PerHead;
use super::{HeadPlan, Plan, at};
use crate::error::Result;

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
        let own = |heads: &Vec<HeadPlan>| heads.iter().map(|head| (head.budget, head.kv)).collect();
        Ok(Box::new(PerHead {
            own: Some(self.layers.iter().map(own).collect()),
            methods,
            indices,
            constant,
        }))
    }
}

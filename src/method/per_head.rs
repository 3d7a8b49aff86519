//! Methods that serve the KV heads of a model, each head by its own.

use super::cuda::CudaMethod;
use super::tail::Tail;
use super::{Method, MethodPart, Place, Retriever};
use crate::kv::{Budget, KvType};

/// Several methods as one.
pub(super) struct PerHead {
    pub methods: Vec<Box<dyn Method>>,
    /// The index among `methods` of that of each KV head of each layer.
    pub indices: Vec<Vec<usize>>,
    /// The budget and the formats of each KV head of each layer; `None` for those of the session.
    pub own: Option<Vec<Vec<(Budget, KvType)>>>,
    /// The layer and the index of the KV heads that full attention serves in place of their methods.
    pub constant: Vec<(usize, usize)>,
}

impl PerHead {
    fn method(&self, place: &Place) -> &dyn Method {
        self.methods[self.indices[place.layer][place.kv_head]].as_ref()
    }

    /// Lists the KV heads: the layer, the index in the layer, and the index of the method.
    fn heads(&self) -> impl Iterator<Item = (usize, usize, usize)> {
        let layers = self.indices.iter().enumerate();
        layers.flat_map(|(layer, heads)| heads.iter().enumerate().map(move |(c, index)| (layer, c, *index)))
    }
}

impl Method for PerHead {
    fn head(&self, place: &Place) -> Box<dyn Retriever> {
        self.method(place).head(place)
    }

    fn full_heads(&self) -> &[(usize, usize)] {
        &self.constant
    }

    /// If all KV heads are served alike, those of a session have to be as well.
    fn cuda(&self) -> Option<&dyn CudaMethod> {
        let mut heads = self.heads();
        let (_, _, first) = heads.next()?;
        let same = heads.all(|(layer, c, index)| index == first && self.own(layer, c) == self.own(0, 0));
        self.methods.get(first).filter(|_| same)?.cuda()
    }

    fn own(&self, layer: usize, kv_head: usize) -> Option<(Budget, KvType)> {
        self.own.as_ref().map(|own| own[layer][kv_head])
    }

    /// One part, if all KV heads are served alike.
    fn parts(&self) -> Vec<MethodPart<'_>> {
        let mut parts: Vec<MethodPart<'_>> = Vec::new();
        // The index of each part's method, and that of the part of this method.
        let mut known: Vec<(usize, usize)> = Vec::new();
        for (layer, kv_head, index) in self.heads() {
            let nested = self.methods[index].parts();
            let within = nested
                .iter()
                .position(|part| part.heads[layer].contains(&kv_head));
            let (key, own) = ((index, within.unwrap_or(0)), self.own(layer, kv_head));
            let mut all = known.iter().zip(&parts);
            let place = all.position(|(other, part)| *other == key && part.own == own);
            let place = place.unwrap_or_else(|| {
                known.push(key);
                parts.push(MethodPart {
                    method: within.map_or(self.methods[index].as_ref(), |within| nested[within].method),
                    own,
                    heads: vec![Vec::new(); self.indices.len()],
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

//! Which trajectories an evaluation has besides the full one, and how each serves the KV heads of a layer.

use std::ops::Range;

use super::Variant;
use crate::kv::{Budget, KvType};
use crate::method::registry::exact;

/// KV heads of one layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unit {
    /// Index of the layer.
    pub layer: usize,
    /// Indices of the heads.
    pub heads: Range<usize>,
}

/// The trajectories besides the full one, in the order in which they leave it.
pub(super) trait Lineup: Sync {
    /// Counts the trajectories that have left the full one in this layer or in an earlier one.
    fn left(&self, layer: usize) -> usize;

    /// Lists how each of these serves a KV head of the layer.
    fn serving(&self, layer: usize, kv_head: usize) -> Vec<Variant<'_>>;
}

/// Variants that serve all layers.
pub(super) struct All<'a>(pub &'a [Variant<'a>]);

impl Lineup for All<'_> {
    fn left(&self, _: usize) -> usize {
        self.0.len()
    }

    fn serving(&self, _: usize, _: usize) -> Vec<Variant<'_>> {
        self.0.to_vec()
    }
}

/// For each of some sets of KV heads, in the order of their layers, each of some ways of serving them; full attention over f32
/// serves all others.
pub(super) struct Changes<'a> {
    pub units: &'a [Unit],
    pub ways: &'a [Variant<'a>],
}

impl Changes<'_> {
    /// Lists the units that have left the full trajectory.
    fn units(&self, layer: usize) -> &[Unit] {
        &self.units[..self.units.partition_point(|unit| unit.layer <= layer)]
    }
}

impl Lineup for Changes<'_> {
    fn left(&self, layer: usize) -> usize {
        self.units(layer).len() * self.ways.len()
    }

    fn serving(&self, layer: usize, kv_head: usize) -> Vec<Variant<'_>> {
        let exact = Variant {
            method: exact(),
            number: usize::MAX,
            budget: Budget::Fraction(1.0),
            kv: Some(KvType::F32),
        };
        let of = |unit: &Unit| -> Vec<Variant<'_>> {
            if unit.layer == layer && unit.heads.contains(&kv_head) {
                self.ways.to_vec()
            } else {
                vec![exact; self.ways.len()]
            }
        };
        self.units(layer).iter().flat_map(of).collect()
    }
}

//! What bounds the reads of decode steps.

use crate::kv::map::ModelMaps;
use crate::kv::packed::{Center, Layout};
use crate::kv::{Budget, KvHead, KvType, Limits};
use crate::method::{CPU_GRANULE, Method, Place};
use crate::model::ModelConfig;

/// What bounds a decode step's reads.
#[derive(Clone, Debug)]
pub struct DecodeOptions {
    /// The static set of every step, and how many other positions the method may choose.
    pub limits: Limits,
    /// Element type of the cache.
    pub kv: KvType,
    /// How the 2-bit cache holds its rows; see [`DecodeOptions::layout`].
    pub packed: Layout,
    /// The maps of rows before formats of few bits round them.
    pub maps: ModelMaps,
    /// How many bytes the machine's memory moves at once, a power of two; see [`Reads`](crate::method::Reads).
    pub granule: usize,
}

impl DecodeOptions {
    /// Returns the options of a step with the static set of the command line, on the CPU.
    pub fn new(budget: Budget, kv: KvType) -> Self {
        Self {
            limits: Limits::new(budget),
            kv,
            packed: Center::Median.into(),
            maps: ModelMaps::HADAMARD,
            granule: CPU_GRANULE,
        }
    }

    /// Returns how caches of few bits hold their rows: what every step attends keeps more bits.
    pub fn layout(&self) -> Layout {
        Layout {
            sinks: self.limits.sinks,
            window: self.limits.window,
            ..self.packed
        }
    }

    /// Makes an empty cache of a KV head with d channels and space for `capacity` positions.
    pub(crate) fn cache(
        &self,
        kind: KvType,
        d: usize,
        capacity: usize,
        [layer, kv_head]: [usize; 2],
    ) -> KvHead {
        let maps = self.maps.head(layer, kv_head);
        KvHead::mapped(kind, d, capacity, self.layout(), maps)
    }

    /// Describes a KV head of a model to its method, whose limits come before those of these options.
    pub(super) fn place(
        &self,
        config: &ModelConfig,
        method: &dyn Method,
        layer: usize,
        kv_head: usize,
    ) -> Place {
        let limits = self.limits.in_layer(config.blocks[layer].window);
        let (budget, kv) = method.own(layer, kv_head).unwrap_or((limits.budget, self.kv));
        Place {
            layer,
            kv_head,
            group: config.group(),
            head_dim: config.head_dim,
            limits: limits.with_budget(budget),
            kv,
        }
    }
}

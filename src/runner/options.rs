//! What bounds the reads of decode steps.

use crate::kv::packed::{Center, Layout};
use crate::kv::static_set::{SINKS, WINDOW};
use crate::kv::{Budget, KvType};
use crate::method::{CPU_GRANULE, HeadLimits, Method, Place};
use crate::model::ModelConfig;

/// What bounds a decode step's reads.
#[derive(Clone, Copy, Debug)]
pub struct DecodeOptions {
    /// First positions that are always attended.
    pub sinks: usize,
    /// Last positions that are always attended, the current one included.
    pub window: usize,
    /// How many other positions the method may choose.
    pub budget: Budget,
    /// Element type of the cache.
    pub kv: KvType,
    /// How the 2-bit cache holds its rows.
    pub packed: Layout,
    /// How many bytes the machine's memory moves at once, a power of two; see [`Reads`](crate::method::Reads).
    pub granule: usize,
}

impl DecodeOptions {
    /// Returns the options of a step with the static set of the command line, on the CPU.
    pub fn new(budget: Budget, kv: KvType) -> Self {
        Self {
            sinks: SINKS,
            window: WINDOW,
            budget,
            kv,
            packed: Center::Median.into(),
            granule: CPU_GRANULE,
        }
    }

    /// Describes a KV head of a model to its method, whose limits come before those of these options.
    pub(super) fn place(
        &self,
        config: &ModelConfig,
        method: &dyn Method,
        layer: usize,
        kv_head: usize,
    ) -> Place {
        let HeadLimits { budget, kv } = method.limits(layer, kv_head).unwrap_or(HeadLimits {
            budget: self.budget,
            kv: self.kv,
        });
        Place {
            layer,
            kv_head,
            group: config.group(),
            head_dim: config.head_dim,
            model_window: config.blocks[layer].window,
            sinks: self.sinks,
            window: self.window,
            budget,
            kv,
        }
    }
}

//! What a benchmark asks of a method: where its steps can be timed, and indexes of random contents.

use rand_chacha::ChaCha8Rng;

use super::cuda::{Indexes, OnDevice};
use super::params::MethodParams;
use super::{Place, Ranking, Retriever};
use crate::error::{Error, Result};
use crate::kv::KvType;
use crate::kv::cuda::Limits;

/// What can be timed on an NVIDIA GPU; one layer on the CPU always can.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TimedOnCuda {
    /// Nothing.
    Nothing,
    /// A whole model.
    Model,
    /// One layer, and a whole model.
    LayerAndModel,
}

/// The layer whose steps are timed.
#[derive(Clone, Copy, Debug)]
pub struct TimedLayer {
    /// Sequences, b.
    pub sequences: usize,
    /// KV heads, g.
    pub kv_heads: usize,
    /// Channels, d.
    pub head_dim: usize,
    /// Positions in the cache, n.
    pub context: usize,
    /// Codewords per KV head, M.
    pub codewords: usize,
    /// How the best positions are looked for.
    pub ranking: Ranking,
    /// Seed of random contents.
    pub seed: u64,
}

/// What the index of a head takes in before its steps are timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fill {
    /// Nothing: it is full from the start, or there is none.
    Nothing,
    /// The keys, one chunk after the other.
    Keys,
    /// A prompt with this many last queries.
    Prompt(usize),
}

/// A KV head on the CPU.
pub struct RandomHead {
    /// Its state.
    pub retriever: Box<dyn Retriever>,
    /// What the state takes in.
    pub fill: Fill,
}

impl RandomHead {
    /// Makes a head that still has to take something in.
    pub fn new(retriever: impl Retriever + 'static, fill: Fill) -> Self {
        Self {
            retriever: Box::new(retriever),
            fill,
        }
    }
}

/// Makes a KV head; random contents come from the generator.
pub type NewHead = dyn Fn(&Place, &mut ChaCha8Rng) -> RandomHead + Send + Sync;

/// Random indexes on an NVIDIA GPU, one per layer.
pub struct Contents<'a> {
    /// Limits of each layer.
    pub limits: &'a [Limits],
    /// Seed of each layer.
    pub seeds: &'a [u32],
    /// Codewords per KV head.
    pub codewords: usize,
}

/// A method whose decode steps can be timed.
pub trait Bench: Sync {
    /// Returns what can be timed on an NVIDIA GPU.
    fn timed_on_cuda(&self) -> TimedOnCuda {
        TimedOnCuda::Nothing
    }

    /// Whether a step chooses what it attends.
    fn retrieves(&self) -> bool {
        true
    }

    /// Whether it knows [`Ranking::Plain`].
    fn has_plain_ranking(&self) -> bool {
        false
    }

    /// Whether a step reads cached rows of this type in order to choose.
    fn reads_rows(&self, kv: KvType) -> bool {
        let _ = kv;
        true
    }

    /// Returns the bytes that a step on a GPU reads of a layer's index.
    fn index_bytes(&self, layer: &TimedLayer) -> usize {
        let _ = layer;
        0
    }

    /// Returns what makes the heads of a layer on the CPU.
    ///
    /// # Errors
    /// Sizes or parameters that the method cannot have.
    fn heads(&self, layer: &TimedLayer, params: &MethodParams) -> Result<Box<NewHead>>;

    /// Indexes on an NVIDIA GPU.
    ///
    /// # Errors
    /// A method that has none; sizes that the kernels are not made for; no memory.
    fn indexes<'d>(&self, at: OnDevice<'d>, contents: &Contents<'_>) -> Result<Indexes<'d>> {
        let _ = (at, contents);
        Err(Error::failed("CUDA: a method without an index on the device"))
    }
}

//! Benchmarks of methods on random data: where their steps can be timed, and how their indexes are filled.

use rand_chacha::ChaCha8Rng;

use super::cuda::{Indexes, OnDevice};
use super::params::MethodParams;
use super::{Place, Ranking, Retriever};
use crate::error::{Error, Result};
use crate::kv::KvType;
use crate::kv::cuda::Limits;

/// What can be timed on an NVIDIA GPU. On the CPU, a single layer can always be timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TimedOnCuda {
    /// Neither a layer nor a model.
    Nothing,
    /// A whole model.
    Model,
    /// A single layer, and a whole model.
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
    /// The form of the codes of wpq.
    pub code: CodeForm,
    /// How the best positions are searched.
    pub ranking: Ranking,
    /// Seed of the random data.
    pub seed: u64,
}

/// The form of a code of 64 bits that wpq gives a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CodeForm {
    /// Number of words per group: 16 or 256.
    pub words: usize,
    /// Whether codes describe the keys around the path of their mean.
    pub has_path: bool,
}

impl Default for CodeForm {
    /// Returns the form that `calibrate` makes by default.
    fn default() -> Self {
        Self {
            words: 16,
            has_path: true,
        }
    }
}

impl CodeForm {
    /// Returns the number of groups of each of the two stages.
    pub fn groups(self) -> usize {
        32 / self.words.trailing_zeros() as usize
    }
}

/// What remains to be added to a head's index before its steps are timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fill {
    /// Nothing: the index is filled already, or there is none.
    Nothing,
    /// The keys, chunk by chunk.
    Keys,
    /// A prompt of which only this many last queries are known.
    Prompt(usize),
}

/// Makes a KV head with random data from the generator, and returns what remains to be added to it.
pub type NewHead = dyn Fn(&Place, &mut ChaCha8Rng) -> (Box<dyn Retriever>, Fill) + Send + Sync;

/// What random indexes on an NVIDIA GPU are made from; one index per layer.
pub struct Contents<'a> {
    /// The limits of each layer.
    pub limits: &'a [Limits],
    /// The seed of each layer.
    pub seeds: &'a [u32],
    /// Codewords per KV head.
    pub codewords: usize,
    /// The form of the codes of wpq.
    pub code: CodeForm,
}

/// A method whose decode steps can be timed.
pub trait Bench: Sync {
    /// Returns what can be timed on an NVIDIA GPU.
    fn timed_on_cuda(&self) -> TimedOnCuda {
        TimedOnCuda::Nothing
    }

    /// Returns whether a step of the method chooses what it attends.
    fn retrieves(&self) -> bool {
        true
    }

    /// Returns whether the index on a GPU chooses with the help of the cache's rows.
    fn chooses_by_rows(&self) -> bool {
        false
    }

    /// Returns whether the method implements [`Ranking::Plain`].
    fn has_plain_ranking(&self) -> bool {
        false
    }

    /// Returns whether a step reads cached rows of this type to choose.
    fn reads_rows(&self, _kv: KvType) -> bool {
        true
    }

    /// Returns the bytes of a layer's index that a step on a GPU reads.
    fn index_bytes(&self, _layer: &TimedLayer) -> usize {
        0
    }

    /// Returns a function that makes the heads of a layer on the CPU.
    ///
    /// # Errors
    /// Sizes or parameters that the method does not support.
    fn heads(&self, layer: &TimedLayer, params: &MethodParams) -> Result<Box<NewHead>>;

    /// Makes random indexes on an NVIDIA GPU.
    ///
    /// # Errors
    /// The method has no GPU index; sizes that the kernels do not support; out of memory.
    fn indexes<'d>(&self, _at: OnDevice<'d>, _contents: &Contents<'_>) -> Result<Indexes<'d>> {
        Err(Error::internal("CUDA: a method without an index on the device"))
    }
}

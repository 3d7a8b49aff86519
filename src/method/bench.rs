//! Benchmarks of methods on random data: where their steps can be timed, and how their indexes are filled.

use rand_chacha::ChaCha8Rng;
use serde_json::{Map, Value};

use super::cuda::{Indexes, OnDevice, ServedLayer};
use super::{Place, Ranking, Retriever};
use crate::artifact::Artifact;
use crate::error::{Error, Result};
use crate::kv::{KvType, Limits, Shape};
use crate::parameters::{ParameterSet, Parameters};

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
    /// Its sizes; each sequence fills the capacity.
    pub shape: Shape,
    /// How the best positions are searched.
    pub ranking: Ranking,
    /// Seed of the random data.
    pub seed: u64,
}

impl TimedLayer {
    /// Returns the number of positions in each sequence's cache, n.
    pub fn context(&self) -> usize {
        self.shape.capacity
    }
}

/// The parameters of random indexes, by their names: those that benchmarks declare ([`Bench::parameters`]). Absent ones have
/// their defaults.
#[derive(Clone, Debug, Default)]
pub struct BenchParams(Map<String, Value>);

impl BenchParams {
    /// Checks values against declarations, which have no name in common.
    ///
    /// # Errors
    /// A name or a value that no declaration has.
    pub fn among(declared: impl Iterator<Item = ParameterSet>, values: Map<String, Value>) -> Result<Self> {
        let mut rest = values.clone();
        for set in declared {
            let is_own = |name: &str| set.parameters.iter().any(|parameter| parameter.name == name);
            let (own, others) = rest.into_iter().partition(|(name, _)| is_own(name));
            set.check(&own)?;
            rest = others;
        }
        ParameterSet::NONE.check(&rest)?;
        Ok(Self(values))
    }

    /// Returns these parameters with those of `more` that a benchmark declares in their place; those of other names tell
    /// nothing of an index of random rows.
    ///
    /// # Errors
    /// A value that the declaration does not have.
    pub fn with(&self, more: &Map<String, Value>, declared: &ParameterSet) -> Result<Self> {
        let is_own = |name: &String| declared.parameters.iter().any(|own| own.name == name);
        let own = more.iter().filter(|(name, _)| is_own(name));
        let own: Map<String, Value> = own.map(|(name, value)| (name.clone(), value.clone())).collect();
        declared.check(&own)?;
        let mut all = self.0.clone();
        all.extend(own);
        Ok(Self(all))
    }

    /// Returns the parameters of one method.
    pub fn read<P: Parameters>(&self) -> P {
        let named = P::PARAMETERS.iter().map(|parameter| parameter.name);
        let values = named.filter_map(|name| Some((name.to_owned(), self.0.get(name)?.clone())));
        // The values were checked.
        P::from_values(values.collect()).unwrap_or_default()
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
    /// Their parameters.
    pub params: &'a BenchParams,
}

impl Contents<'_> {
    /// Lists all layers with all their KV heads.
    pub fn all(&self, at: OnDevice<'_>) -> Vec<ServedLayer> {
        ServedLayer::all(self.limits, at.shape.kv_heads)
    }
}

/// A method whose decode steps can be timed.
pub trait Bench: Sync {
    /// Returns what can be timed on an NVIDIA GPU.
    fn timed_on_cuda(&self) -> TimedOnCuda {
        TimedOnCuda::Nothing
    }

    /// Describes the parameters of random indexes.
    fn parameters(&self) -> ParameterSet {
        ParameterSet::NONE
    }

    /// Returns the parameters with which a random index has the sizes of an artifact's, by their names; none if the artifact
    /// lacks the method's section.
    fn parameters_of(&self, _artifact: &Artifact) -> Map<String, Value> {
        Map::new()
    }

    /// Returns whether `plan` times the method, to say from which context on it pays.
    fn is_estimated(&self) -> bool {
        false
    }

    /// Counts the last queries of a prompt that a head is filled from.
    fn prompt_queries(&self, _layer: &TimedLayer, _params: &BenchParams) -> usize {
        0
    }

    /// Returns whether a step of the method chooses what it attends.
    fn retrieves(&self) -> bool {
        true
    }

    /// Returns whether the index on a GPU chooses with the help of the cache's rows.
    fn chooses_by_rows(&self) -> bool {
        false
    }

    /// Returns whether the index on a GPU ranks cached rows, which have to be floats.
    fn ranks_floats_on_cuda(&self) -> bool {
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
    fn index_bytes(&self, _layer: &TimedLayer, _params: &BenchParams) -> usize {
        0
    }

    /// Returns a function that makes the heads of a layer on the CPU.
    ///
    /// # Errors
    /// Sizes or parameters that the method does not support.
    fn heads(&self, layer: &TimedLayer, params: &BenchParams) -> Result<Box<NewHead>>;

    /// Makes random indexes on an NVIDIA GPU.
    ///
    /// # Errors
    /// The method has no GPU index; sizes that the kernels do not support; out of memory.
    fn indexes<'d>(&self, _at: OnDevice<'d>, _contents: &Contents<'_>) -> Result<Indexes<'d>> {
        Err(Error::internal("CUDA: a method without an index on the device"))
    }
}

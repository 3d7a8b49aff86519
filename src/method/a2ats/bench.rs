//! Benchmarks of a2ats on random codebooks and codes.

use std::sync::Arc;

use half::f16;
use ndarray::{Array1, Array2};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;
use serde_json::{Map, Value};

use super::codebook::HeadCodebook;
use super::{A2ats, SECTION, cuda};
use crate::artifact::Artifact;
use crate::error::Result;
use crate::kv::KvType;
use crate::method::bench::{Bench, BenchParams, Contents, Fill, NewHead, TimedLayer, TimedOnCuda};
use crate::method::cuda::{Indexes, OnDevice};
use crate::model::rope::{Rope, RopeConfig, RopeScaling};
use crate::parameters::{ParameterSet, Parameters, Values, parameters};
use crate::stats::kmeans::MAX_SIZE;

parameters! {
    /// The parameters of a random index.
    pub(super) struct A2atsBenchParams, "Method a2ats" {
        /// Codewords per KV head
        size: usize = 4096, "M" in Values::Whole(1, MAX_SIZE as u64);
    }
}

/// Benchmarks on random codebooks and codes.
pub(super) struct A2atsBench;

impl Bench for A2atsBench {
    fn timed_on_cuda(&self) -> TimedOnCuda {
        TimedOnCuda::LayerAndModel
    }

    fn parameters(&self) -> ParameterSet {
        A2atsBenchParams::set()
    }

    fn parameters_of(&self, artifact: &Artifact) -> Map<String, Value> {
        let section = artifact.manifest.sections.get(SECTION);
        let size = section.and_then(|section| section.params.get("codebook_size"));
        size.map(|size| ("size".to_owned(), size.clone()))
            .into_iter()
            .collect()
    }

    fn is_estimated(&self) -> bool {
        true
    }

    fn has_plain_ranking(&self) -> bool {
        true
    }

    fn reads_rows(&self, _: KvType) -> bool {
        false
    }

    /// Counts the codes, and the codebooks once for all sequences.
    fn index_bytes(&self, layer: &TimedLayer, params: &BenchParams) -> usize {
        let A2atsBenchParams { size } = params.read();
        2 * layer.shape.kv_heads * (layer.shape.sequences * layer.context() + size * layer.shape.head_dim)
    }

    fn heads(&self, layer: &TimedLayer, params: &BenchParams) -> Result<Box<NewHead>> {
        let layer = *layer;
        let A2atsBenchParams { size } = params.read();
        let heads = (0..layer.shape.kv_heads).into_par_iter();
        let codebooks = heads.map(|head| codebook(&layer, size, head));
        let codebooks: Vec<Arc<HeadCodebook>> = codebooks.collect::<Result<_>>()?;
        Ok(Box::new(move |place, rng| {
            let codes = (0..layer.context()).map(|_| (rng.r#gen::<usize>() % size) as u16);
            let head = A2ats::with_codes(Arc::clone(&codebooks[place.kv_head]), codes.collect());
            (Box::new(head.ranking(layer.ranking)), Fill::Nothing)
        }))
    }

    fn indexes<'d>(&self, at: OnDevice<'d>, contents: &Contents<'_>) -> Result<Indexes<'d>> {
        let A2atsBenchParams { size } = contents.params.read();
        cuda::random(at, contents, size)
    }
}

/// Makes a random codebook without whitening.
fn codebook(layer: &TimedLayer, size: usize, head: usize) -> Result<Arc<HeadCodebook>> {
    let d = layer.shape.head_dim;
    let config = RopeConfig {
        theta: 1e4,
        scaling: RopeScaling::Default,
    };
    let rope = Rope::new(&config, d);
    let mut rng = ChaCha8Rng::seed_from_u64(layer.seed.wrapping_add(head as u64));
    let codebook = Array2::from_shape_simple_fn((size, d), || {
        f16::from_f32(rng.r#gen::<f32>() * 2.0 - 1.0).to_f32()
    });
    let head = HeadCodebook::new(codebook, Array1::zeros(d), Array2::eye(d), &rope, 2048)?;
    Ok(Arc::new(head))
}

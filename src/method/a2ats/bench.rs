//! Benchmarks of a2ats on random codebooks and codes.

use std::sync::Arc;

use half::f16;
use ndarray::{Array1, Array2};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rayon::prelude::*;

use super::codebook::HeadCodebook;
use super::{A2ats, cuda};
use crate::error::Result;
use crate::kv::KvType;
use crate::method::bench::{Bench, Contents, Fill, NewHead, TimedLayer, TimedOnCuda};
use crate::method::cuda::{Indexes, OnDevice};
use crate::method::params::MethodParams;
use crate::model::rope::{Rope, RopeConfig, RopeScaling};

/// Benchmarks on random codebooks and codes.
pub(super) struct A2atsBench;

impl Bench for A2atsBench {
    fn timed_on_cuda(&self) -> TimedOnCuda {
        TimedOnCuda::LayerAndModel
    }

    fn has_plain_ranking(&self) -> bool {
        true
    }

    fn reads_rows(&self, _: KvType) -> bool {
        false
    }

    /// Counts the codes, and the codebooks once for all sequences.
    fn index_bytes(&self, layer: &TimedLayer) -> usize {
        2 * layer.kv_heads * (layer.sequences * layer.context + layer.codewords * layer.head_dim)
    }

    fn heads(&self, layer: &TimedLayer, _: &MethodParams) -> Result<Box<NewHead>> {
        let layer = *layer;
        let heads = (0..layer.kv_heads).into_par_iter();
        let codebooks = heads.map(|head| codebook(&layer, head));
        let codebooks: Vec<Arc<HeadCodebook>> = codebooks.collect::<Result<_>>()?;
        Ok(Box::new(move |place, rng| {
            let codes = (0..layer.context).map(|_| (rng.r#gen::<usize>() % layer.codewords) as u16);
            let head = A2ats::with_codes(Arc::clone(&codebooks[place.kv_head]), codes.collect());
            (Box::new(head.ranking(layer.ranking)), Fill::Nothing)
        }))
    }

    fn indexes<'d>(&self, at: OnDevice<'d>, contents: &Contents<'_>) -> Result<Indexes<'d>> {
        cuda::random(at, contents)
    }
}

/// Makes a random codebook without whitening.
fn codebook(layer: &TimedLayer, head: usize) -> Result<Arc<HeadCodebook>> {
    let (size, d) = (layer.codewords, layer.head_dim);
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

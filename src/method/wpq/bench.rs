//! Benchmarks of wpq on random words.

use std::sync::Arc;

use ndarray::{Array1, Array2, Array4};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::section::{STAGES, default_directions};
use super::{HeadCodebook, MeanPath, Wpq, cuda};
use crate::error::Result;
use crate::method::bench::{Bench, CodeForm, Contents, Fill, NewHead, TimedLayer, TimedOnCuda};
use crate::method::cuda::{Indexes, OnDevice};
use crate::method::params::MethodParams;
use crate::model::rope::{Rope, RopeConfig, RopeScaling};

/// Bytes of a key's code, both stages together.
const BYTES: usize = 8;

/// The rotation of the path of a mean.
const ROPE: RopeConfig = RopeConfig {
    theta: 500_000.0,
    scaling: RopeScaling::Default,
};

/// Benchmarks on random words, without whitening.
pub(super) struct WpqBench;

impl Bench for WpqBench {
    fn timed_on_cuda(&self) -> TimedOnCuda {
        TimedOnCuda::LayerAndModel
    }

    fn chooses_by_rows(&self) -> bool {
        true
    }

    fn index_bytes(&self, layer: &TimedLayer) -> usize {
        layer.sequences * layer.kv_heads * layer.context * BYTES / STAGES
    }

    fn heads(&self, layer: &TimedLayer, _: &MethodParams) -> Result<Box<NewHead>> {
        let codebook = Arc::new(codebook(layer.head_dim, layer.code, layer.seed)?);
        Ok(Box::new(move |_, _| {
            (Box::new(Wpq::new(Arc::clone(&codebook))), Fill::Keys)
        }))
    }

    fn indexes<'d>(&self, at: OnDevice<'d>, contents: &Contents<'_>) -> Result<Indexes<'d>> {
        let seed = contents.seeds.first().map_or(0, |seed| u64::from(*seed));
        cuda::random(at, contents, &codebook(at.shape.head_dim, contents.code, seed)?)
    }
}

/// Makes a random quantiser.
fn codebook(d: usize, code: CodeForm, seed: u64) -> Result<HeadCodebook> {
    let groups = code.groups();
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let shape = (STAGES, groups, code.words, default_directions(d).div_ceil(groups));
    let words = Array4::from_shape_simple_fn(shape, || rng.r#gen::<f32>() * 2.0 - 1.0);
    let eye = Array2::eye(d);
    let head = HeadCodebook::new(words.view(), Array1::zeros(d).view(), eye.view(), eye.view())?;
    if !code.has_path {
        return Ok(head);
    }
    let mean = Array1::from_shape_simple_fn(d, || rng.r#gen::<f32>() * 2.0 - 1.0);
    Ok(head.around(MeanPath::new(mean, &Rope::new(&ROPE, d))))
}

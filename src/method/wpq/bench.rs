//! Benchmarks of wpq on random words.

use std::sync::Arc;

use ndarray::{Array1, Array2, Array4};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde_json::{Map, Value};

use super::section::{Center, SECTION, STAGES, WpqParams, default_directions};
use super::{HeadCodebook, MeanPath, Wpq, cuda};
use crate::artifact::{Artifact, SectionManifest};
use crate::error::Result;
use crate::method::bench::{Bench, BenchParams, Contents, Fill, NewHead, TimedLayer, TimedOnCuda};
use crate::method::cuda::{Indexes, OnDevice};
use crate::model::rope::{Rope, RopeConfig, RopeScaling};
use crate::parameters::{Choice, ParameterSet, Parameters, Values, parameters};

/// Bytes of a key's code, both stages together.
const BYTES: usize = 8;

/// The rotation of the path of a mean.
const ROPE: RopeConfig = RopeConfig {
    theta: 500_000.0,
    scaling: RopeScaling::Default,
};

parameters! {
    /// The parameters of a random index, whose codes take 64 bits.
    pub(super) struct WpqBenchParams, "Method wpq" {
        /// Words per group of a 64-bit code
        wpq_words: usize = 16, "N" in Values::Among(&[16, 256]);
        /// What is subtracted from the keys before they are encoded
        wpq_center: Center = Center::Path, "CENTER" in Values::OneOf(Center::WORDS);
    }
}

/// Benchmarks on random words, without whitening.
pub(super) struct WpqBench;

impl Bench for WpqBench {
    fn timed_on_cuda(&self) -> TimedOnCuda {
        TimedOnCuda::LayerAndModel
    }

    fn parameters(&self) -> ParameterSet {
        WpqBenchParams::set()
    }

    fn parameters_of(&self, artifact: &Artifact) -> Map<String, Value> {
        let section = artifact.manifest.sections.get(SECTION);
        let read =
            |section: &SectionManifest| serde_json::from_value(Value::Object(section.params.clone())).ok();
        let Some(WpqParams { words, center, .. }) = section.and_then(read) else {
            return Map::new();
        };
        let params = WpqBenchParams {
            wpq_words: words,
            wpq_center: center,
        };
        params.values()
    }

    fn is_estimated(&self) -> bool {
        true
    }

    fn chooses_by_rows(&self) -> bool {
        true
    }

    fn index_bytes(&self, layer: &TimedLayer, _: &BenchParams) -> usize {
        layer.shape.heads() * layer.context() * BYTES / STAGES
    }

    fn heads(&self, layer: &TimedLayer, params: &BenchParams) -> Result<Box<NewHead>> {
        let codebook = Arc::new(codebook(layer.shape.head_dim, &params.read(), layer.seed)?);
        Ok(Box::new(move |_, _| {
            (Box::new(Wpq::new(Arc::clone(&codebook))), Fill::Keys)
        }))
    }

    fn indexes<'d>(&self, at: OnDevice<'d>, contents: &Contents<'_>) -> Result<Indexes<'d>> {
        let seed = contents.seeds.first().map_or(0, |seed| u64::from(*seed));
        cuda::random(
            at,
            contents,
            &codebook(at.shape.head_dim, &contents.params.read(), seed)?,
        )
    }
}

/// Makes a random quantiser.
fn codebook(d: usize, params: &WpqBenchParams, seed: u64) -> Result<HeadCodebook> {
    let words = params.wpq_words;
    let groups = 8 * BYTES / STAGES / words.trailing_zeros() as usize;
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let shape = (STAGES, groups, words, default_directions(d).div_ceil(groups));
    let words = Array4::from_shape_simple_fn(shape, || rng.r#gen::<f32>() * 2.0 - 1.0);
    let eye = Array2::eye(d);
    let head = HeadCodebook::new(words.view(), Array1::zeros(d).view(), eye.view(), eye.view())?;
    if params.wpq_center == Center::Mean {
        return Ok(head);
    }
    let mean = Array1::from_shape_simple_fn(d, || rng.r#gen::<f32>() * 2.0 - 1.0);
    Ok(head.around(MeanPath::new(mean, &Rope::new(&ROPE, d))))
}

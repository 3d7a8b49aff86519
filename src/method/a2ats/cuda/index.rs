//! The index of a layer: its codebooks and its codes.

use std::ops::Range;

use ndarray::Array2;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::encode::Encoder;
use super::{A2ats, Codebooks, HeadConstants};
use crate::compute::cuda::buffer::Buffer;
use crate::error::Result;
use crate::kv::cuda::{CudaSelection, Positions};
use crate::kv::{Budget, Limits, Rotated, StaticSet};
use crate::method::Reads;
use crate::method::a2ats::A2atsMethod;
use crate::method::bench::Contents;
use crate::method::cuda::{
    Chunk, CudaIndex, CudaMethod, CudaStep, Indexes, OnDevice, ServedLayer, SharedPrompt, each_layer,
    each_served, in_prompt,
};

/// The index of a layer.
struct CodeIndex<'d> {
    codebooks: Codebooks<'d>,
    state: A2ats<'d>,
    /// Whether the codes encode keys before rotation.
    is_pre_rope: bool,
    encoder: SharedPrompt<Encoder<'d>>,
}

impl CudaMethod for A2atsMethod {
    fn indexes<'d>(&self, at: OnDevice<'d>, layers: &[ServedLayer]) -> Result<Indexes<'d>> {
        let encoder = SharedPrompt::default();
        let share = self.params.topk_per_query_head;
        each_served(layers, |of| {
            let heads = of.heads.iter().map(|head| self.codebooks.head(of.layer, *head));
            let is_pre_rope = heads.clone().all(|head| head.is_pre_rope());
            let constants: Vec<_> = heads.map(|head| head.constants()).collect();
            let codebooks = Codebooks::new(at.driver, &constants)?;
            let limits = Limits {
                budget: share.map_or(of.limits.budget, Budget::Fraction),
                ..of.limits
            };
            let state = A2ats::new(at.driver, at.shape, &limits, &codebooks, share.is_some())?;
            Ok(CodeIndex {
                codebooks,
                state,
                is_pre_rope,
                encoder: encoder.clone(),
            })
        })
    }
}

impl CodeIndex<'_> {
    /// Returns the rows to encode or score: before rotation with windowed RoPE, else after.
    fn rows<'a>(&self, rows: Rotated<&'a Buffer<'a, f32>>) -> &'a Buffer<'a, f32> {
        if self.is_pre_rope { rows.pre } else { rows.rope }
    }
}

impl CudaIndex for CodeIndex<'_> {
    fn begin_prompt(&self, _: Range<usize>, rows: usize) -> Result<()> {
        let encoder = Encoder::new(self.state.driver, self.state.shape, rows)?;
        self.encoder.replace(Some(encoder));
        Ok(())
    }

    fn end_prompt(&self) {
        self.encoder.take();
    }

    fn extend(&self, chunk: &Chunk<'_>) -> Result<()> {
        let (keys, positions) = (self.rows(chunk.own.k), chunk.positions);
        in_prompt(&self.encoder, |encoder| {
            self.state
                .extend(keys, chunk.m, &self.codebooks, positions, encoder)
        })
    }

    fn append(&self, keys: Rotated<&Buffer<'_, f32>>, positions: &Positions<'_>) -> Result<()> {
        self.state.append(self.rows(keys), &self.codebooks, positions)
    }

    fn select(&self, step: &CudaStep<'_>) -> Result<Option<&CudaSelection<'_>>> {
        let queries = self.rows(step.queries);
        self.state
            .select(queries, &self.codebooks, step.positions)
            .map(Some)
    }

    fn bytes(&self) -> usize {
        self.state.bytes()
    }

    /// Counts the codebook and the codes of the candidates.
    fn reads(&self, set: &StaticSet, reads: &mut Reads) {
        let A2ats { shape, size, .. } = &self.state;
        reads.array(2 * size * shape.head_dim);
        reads.range(2 * set.candidates.start..2 * set.candidates.end);
    }
}

/// Makes indexes of random codebooks and codes: [`Bench::indexes`](crate::method::bench::Bench::indexes).
pub(in crate::internal::method::a2ats) fn random<'d>(
    at: OnDevice<'d>,
    contents: &Contents<'_>,
    size: usize,
) -> Result<Indexes<'d>> {
    let encoder = SharedPrompt::default();
    let d = at.shape.head_dim;
    each_layer(contents.limits, |layer, limits| {
        let seed = contents.seeds[layer];
        let mut rng = ChaCha8Rng::seed_from_u64(u64::from(seed));
        let codebook = |_| {
            if at.driver.has_memory() {
                Array2::from_shape_simple_fn((size, d), || rng.r#gen::<f32>() * 2.0 - 1.0)
            } else {
                Array2::zeros((size, d))
            }
        };
        let books: Vec<Array2<f32>> = (0..at.shape.kv_heads).map(codebook).collect();
        let heads = books.iter().map(|codebook| HeadConstants {
            codebook: codebook.view(),
            query_map: Array2::eye(d),
            key_map: Array2::eye(d),
            mean: vec![0.0; d],
        });
        let codebooks = Codebooks::new(at.driver, &heads.collect::<Vec<_>>())?;
        let state = A2ats::new(at.driver, at.shape, limits, &codebooks, false)?;
        state.fill(seed)?;
        Ok(CodeIndex {
            codebooks,
            state,
            is_pre_rope: true,
            encoder: encoder.clone(),
        })
    })
}

//! The index of a layer: the signs of its keys, and their centroids.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::SelfIndex;
use crate::compute::cuda::buffer::Buffer;
use crate::error::{Error, Result};
use crate::kv::cuda::rows::{CudaRows, WholePrompt};
use crate::kv::cuda::signs::{FULL, Signs};
use crate::kv::cuda::{CudaSelection, Positions};
use crate::kv::packed::{Center, Layout, sign_bytes};
use crate::kv::{Rotated, StaticSet};
use crate::method::Reads;
use crate::method::bench::Contents;
use crate::method::cuda::{
    CudaIndex, CudaMethod, CudaNeeds, CudaStep, Indexes, OnDevice, ServedLayer, each_layer, each_served,
};
use crate::method::selfindex::{SelfIndexMethod, centroid_bytes};

/// The index of a layer.
struct SignIndex<'d> {
    /// The signs of every position; `None` if the cache holds them.
    signs: Option<Signs<'d>>,
    index: SelfIndex<'d>,
    /// The layout that applies if the index has signs of its own. It keeps no full-precision tokens, because such a
    /// cache rounds nothing.
    layout: Layout,
    /// Whether the centroids come from the prompt.
    is_fitted: bool,
}

impl CudaMethod for SelfIndexMethod {
    fn serves(&self, needs: &CudaNeeds) -> bool {
        !needs.later_prompts && (!needs.kv.keys.has_signs() || self.layout().full <= FULL)
    }

    fn indexes<'d>(&self, at: OnDevice<'d>, layers: &[ServedLayer]) -> Result<Indexes<'d>> {
        let (driver, shape) = (at.driver, at.shape);
        each_served(layers, |of| {
            let limits = &of.limits;
            let signs = if at.kv.keys.has_signs() {
                None
            } else {
                Some(Signs::new(driver, shape)?)
            };
            let centroids = self.centroids(of.layer, &of.heads, shape.head_dim);
            let index = match &centroids {
                Some(values) => SelfIndex::new(driver, shape, limits, values)?,
                None => SelfIndex::empty(driver, shape, limits)?,
            };
            Ok(SignIndex {
                signs,
                index,
                is_fitted: centroids.is_none(),
                layout: Layout {
                    full: 0,
                    ..self.layout()
                },
            })
        })
    }
}

impl SignIndex<'_> {
    /// Returns the signs that the index holds, or else those that the cache holds.
    fn signs<'s>(&'s self, cache: Option<&'s dyn CudaRows>) -> Result<&'s Signs<'s>> {
        let signs = self.signs.as_ref().or(cache.and_then(|cache| cache.signs()));
        signs.ok_or_else(|| Error::internal("CUDA: no signs of keys"))
    }
}

impl CudaIndex for SignIndex<'_> {
    fn wants_prompts(&self) -> bool {
        true
    }

    fn end_of_prompt(&self, prompt: &WholePrompt<'_>, cache: Option<&dyn CudaRows>) -> Result<()> {
        let prompts = prompt
            .prompts
            .ok_or_else(|| Error::internal("CUDA: no room for signs of a prompt"))?;
        let (rows, positions) = (prompt.rows, prompt.positions);
        if let Some(signs) = &self.signs {
            prompts.signs(rows, prompt.queries, self.layout, positions, signs)?;
        }
        if self.is_fitted {
            prompts.centroids(rows, self.signs(cache)?, positions, &self.index.centroids)?;
        }
        Ok(())
    }

    fn append(&self, keys: Rotated<&Buffer<'_, f32>>, positions: &Positions<'_>) -> Result<()> {
        // A cache that holds the signs appends them itself.
        match &self.signs {
            Some(signs) => signs.driver.beside(&mut || signs.append(keys.rope, 1, positions)),
            None => Ok(()),
        }
    }

    fn select(&self, step: &CudaStep<'_>) -> Result<Option<&CudaSelection<'_>>> {
        let signs = self.signs(step.cache)?;
        let queries = step.queries.rope;
        self.index.select(queries, signs, step.positions).map(Some)
    }

    fn bytes(&self) -> usize {
        self.signs.as_ref().map_or(0, Signs::bytes)
    }

    fn reads(&self, set: &StaticSet, reads: &mut Reads) {
        let d = self.index.best.shape.head_dim;
        let (seen, width) = (set.visible(), sign_bytes(d));
        reads.range(seen.start * width..seen.end * width);
        reads.array(centroid_bytes(d));
    }
}

/// Makes indexes of random signs and centroids: [`Bench::indexes`](crate::method::bench::Bench::indexes).
pub(in crate::internal::method::selfindex) fn random<'d>(
    at: OnDevice<'d>,
    contents: &Contents<'_>,
) -> Result<Indexes<'d>> {
    let (driver, shape) = (at.driver, at.shape);
    each_layer(contents.limits, |layer, limits| {
        let seed = contents.seeds[layer];
        let mut rng = ChaCha8Rng::seed_from_u64(u64::from(seed));
        let values = shape.heads() * shape.head_dim * 16;
        let centroids: Vec<f32> = (0..values).map(|_| rng.r#gen::<f32>() * 2.0 - 1.0).collect();
        let signs = Signs::new(driver, shape)?;
        signs.fill(seed)?;
        Ok(SignIndex {
            signs: Some(signs),
            index: SelfIndex::new(driver, shape, limits, &centroids)?,
            layout: Layout::from(Center::Median),
            is_fitted: false,
        })
    })
}

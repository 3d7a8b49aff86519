//! What a layer on the device chooses by.

use ndarray::Array2;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::Workspace;
use crate::compute::cuda::decode::a2ats::{A2ats, Codebooks, HeadConstants};
use crate::compute::cuda::decode::attend::LayerRows;
use crate::compute::cuda::decode::{Limits, Positions, Selection, Shape};
use crate::compute::cuda::driver::Driver;
use crate::error::{Error, Result};
use crate::method::{Method, MethodName};
use crate::runner::budget::Budget;

/// The index of one layer, for all its KV heads.
pub enum LayerIndex<'d> {
    /// None: everything is attended.
    Full,
    /// Codes of keys.
    A2ats {
        /// The calibrated part.
        codebooks: Codebooks<'d>,
        /// What grows with the context.
        state: Box<A2ats<'d>>,
        /// Whether codes are of keys before rotation.
        windowed: bool,
    },
}

impl<'d> LayerIndex<'d> {
    /// Whether there is one for a method.
    pub fn can(method: &Method) -> bool {
        matches!(method, Method::Full | Method::A2ats(..))
    }

    /// The empty index of a layer.
    ///
    /// # Errors
    /// A method without one; sizes that the kernels are not made for; no memory.
    pub fn new(
        driver: &'d dyn Driver,
        shape: Shape,
        limits: &Limits,
        method: &Method,
        layer: usize,
    ) -> Result<Self> {
        match method {
            Method::Full => Ok(Self::Full),
            Method::A2ats(codebooks, params) => {
                let heads = (0..shape.kv_heads).map(|head| codebooks.head(layer, head));
                let windowed = heads.clone().all(|head| head.is_windowed());
                let constants: Vec<_> = heads.map(|head| head.constants()).collect();
                let codebooks = Codebooks::new(driver, &constants)?;
                let share = params.topk_per_query_head;
                let limits = Limits {
                    budget: share.map_or(limits.budget, Budget::Fraction),
                    ..*limits
                };
                let state = A2ats::new(driver, shape, &limits, &codebooks, share.is_some())?;
                Ok(Self::A2ats {
                    codebooks,
                    state: Box::new(state),
                    windowed,
                })
            }
            _ => Err(Error::failed("CUDA: a method without an index on the device")),
        }
    }

    /// An index of random contents, for a benchmark; `size` codewords.
    ///
    /// # Errors
    /// As [`LayerIndex::new`].
    pub fn random(
        driver: &'d dyn Driver,
        shape: Shape,
        limits: &Limits,
        method: MethodName,
        size: usize,
        seed: u32,
    ) -> Result<Self> {
        let d = shape.head_dim;
        let mut rng = ChaCha8Rng::seed_from_u64(u64::from(seed));
        match method {
            MethodName::Full => Ok(Self::Full),
            MethodName::A2ats => {
                let codebook = |_| Array2::from_shape_simple_fn((size, d), || rng.r#gen::<f32>() * 2.0 - 1.0);
                let books: Vec<Array2<f32>> = (0..shape.kv_heads).map(codebook).collect();
                let heads = books.iter().map(|codebook| HeadConstants {
                    codebook: codebook.view(),
                    query_map: Array2::eye(d),
                    key_map: Array2::eye(d),
                    mean: vec![0.0; d],
                });
                let codebooks = Codebooks::new(driver, &heads.collect::<Vec<_>>())?;
                let state = A2ats::new(driver, shape, limits, &codebooks, false)?;
                state.fill(seed)?;
                Ok(Self::A2ats {
                    codebooks,
                    state: Box::new(state),
                    windowed: true,
                })
            }
            _ => Err(Error::failed("CUDA: a method without an index on the device")),
        }
    }

    /// Takes in the last `m` positions of a prompt.
    pub fn extend(&mut self, work: &Workspace<'_>, m: usize, positions: &Positions<'_>) -> Result<()> {
        match self {
            Self::Full => Ok(()),
            Self::A2ats {
                codebooks,
                state,
                windowed,
            } => {
                let keys = if *windowed { &work.k_pre } else { &work.k_rope };
                let _ = (state, codebooks, positions, m, keys);
                todo!()
            }
        }
    }

    /// After the last chunk of a prompt, with n positions in the cache; the workspace has the last chunk's queries.
    pub fn end_of_prompt(
        &mut self,
        rows: &LayerRows<'_>,
        work: &Workspace<'_>,
        n: usize,
        positions: &Positions<'_>,
    ) -> Result<()> {
        let _ = (rows, work, n, positions);
        Ok(())
    }

    /// Takes in the last position.
    pub fn append(&self, work: &Workspace<'_>, positions: &Positions<'_>) -> Result<()> {
        match self {
            Self::Full => Ok(()),
            Self::A2ats {
                codebooks,
                state,
                windowed,
            } => {
                let keys = if *windowed { &work.k_pre } else { &work.k_rope };
                state.append(keys, codebooks, positions)
            }
        }
    }

    /// Chooses for the last position's queries; `None` is everything.
    pub fn select(
        &self,
        work: &Workspace<'_>,
        rows: &LayerRows<'_>,
        positions: &Positions<'_>,
    ) -> Result<Option<&Selection<'d>>> {
        let _ = rows;
        match self {
            Self::Full => Ok(None),
            Self::A2ats {
                codebooks,
                state,
                windowed,
            } => {
                let queries = if *windowed { &work.q_pre } else { &work.q_rope };
                state.select(queries, codebooks, positions).map(Some)
            }
        }
    }

    /// Whether it takes every product of a query with a key in order to choose.
    pub fn is_oracle(&self) -> bool {
        false
    }

    /// Bytes that grow with the context.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Full => 0,
            Self::A2ats { .. } => todo!(),
        }
    }
}

//! What a layer on the device chooses by.

use std::rc::Rc;

use ndarray::Array2;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::Workspace;
use crate::compute::cuda::decode::a2ats::{A2ats, Codebooks, HeadConstants};
use crate::compute::cuda::decode::attend::LayerRows;
use crate::compute::cuda::decode::encode::Encoder;
use crate::compute::cuda::decode::simple::{Draws, Streaming};
use crate::compute::cuda::decode::topk::TopK;
use crate::compute::cuda::decode::{Limits, Positions, Selection, Shape};
use crate::compute::cuda::driver::Driver;
use crate::error::{Error, Result};
use crate::method::{Method, MethodName};
use crate::runner::budget::Budget;

/// The index of one layer, for all its KV heads.
pub enum LayerIndex<'d> {
    /// None: everything is attended.
    Full,
    /// True probabilities; one for all layers that see as far.
    TopK(Rc<TopK<'d>>),
    /// The most recent positions; one for all layers that see as far.
    Streaming(Rc<Streaming<'d>>),
    /// Draws of the host.
    Random(Draws<'d>),
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
        let simple = matches!(method, Method::Full | Method::Topk | Method::Streaming);
        simple || matches!(method, Method::Random(_) | Method::A2ats(..))
    }

    /// The empty index of a layer; `like` is that of an earlier one that sees as far.
    ///
    /// # Errors
    /// A method without one; sizes that the kernels are not made for; no memory.
    pub fn new(
        driver: &'d dyn Driver,
        shape: Shape,
        limits: &Limits,
        method: &Method,
        layer: usize,
        like: Option<&Self>,
    ) -> Result<Self> {
        match method {
            Method::Full => Ok(Self::Full),
            Method::Topk => Self::topk(driver, shape, limits, like),
            Method::Streaming => Ok(Self::Streaming(match like {
                Some(Self::Streaming(index)) => Rc::clone(index),
                _ => Rc::new(Streaming::new(driver, shape, limits)?),
            })),
            Method::Random(seed) => Ok(Self::Random(Draws::new(driver, shape, limits, *seed, layer)?)),
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

    fn topk(driver: &'d dyn Driver, shape: Shape, limits: &Limits, like: Option<&Self>) -> Result<Self> {
        Ok(Self::TopK(match like {
            Some(Self::TopK(index)) => Rc::clone(index),
            _ => Rc::new(TopK::new(driver, shape, limits)?),
        }))
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
        like: Option<&Self>,
    ) -> Result<Self> {
        let d = shape.head_dim;
        let mut rng = ChaCha8Rng::seed_from_u64(u64::from(seed));
        match method {
            MethodName::Full => Ok(Self::Full),
            MethodName::Topk => Self::topk(driver, shape, limits, like),
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

    /// Takes in the last `m` positions of a prompt, in one of several calls for all of it.
    pub fn extend(
        &self,
        work: &Workspace<'_>,
        m: usize,
        positions: &Positions<'_>,
        encoder: Option<&Encoder<'_>>,
    ) -> Result<()> {
        match (self, encoder) {
            (
                Self::A2ats {
                    codebooks,
                    state,
                    windowed,
                },
                Some(encoder),
            ) => {
                let keys = if *windowed { &work.k_pre } else { &work.k_rope };
                state.extend(keys, m, codebooks, positions, encoder)
            }
            _ => Ok(()),
        }
    }

    /// What [`LayerIndex::extend`] works in, for prompts of up to `rows` rows at once.
    ///
    /// # Errors
    /// No memory.
    pub fn encoder(&self, driver: &'d dyn Driver, shape: Shape, rows: usize) -> Result<Option<Encoder<'d>>> {
        match self {
            Self::A2ats { .. } => Encoder::new(driver, shape, rows).map(Some),
            _ => Ok(None),
        }
    }

    /// Whether a step's launches are the same every time.
    pub fn is_recordable(&self) -> bool {
        !matches!(self, Self::Random(_))
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
            Self::A2ats {
                codebooks,
                state,
                windowed,
            } => {
                let keys = if *windowed { &work.k_pre } else { &work.k_rope };
                state.append(keys, codebooks, positions)
            }
            _ => Ok(()),
        }
    }

    /// Chooses for the last position's queries in decode step number `step`; `None` is everything.
    pub fn select(
        &self,
        work: &Workspace<'_>,
        rows: &LayerRows<'_>,
        positions: &Positions<'_>,
        step: usize,
    ) -> Result<Option<&Selection<'d>>> {
        match self {
            Self::Full => Ok(None),
            Self::TopK(index) => index.select(&work.q_rope, rows, positions).map(Some),
            Self::Streaming(index) => index.select(positions).map(Some),
            Self::Random(index) => index.select(step, positions).map(Some),
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
        matches!(self, Self::TopK(_))
    }

    /// Bytes that grow with the context.
    pub fn bytes(&self) -> usize {
        match self {
            Self::A2ats { state, .. } => state.bytes(),
            _ => 0,
        }
    }
}

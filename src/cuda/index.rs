//! What a layer on the device chooses by.

use std::ops::Range;
use std::rc::Rc;

use ndarray::Array2;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::Workspace;
use crate::compute::cuda::buffer::Buffer;
use crate::compute::cuda::driver::Driver;
use crate::compute::cuda::kernels;
use crate::error::{Error, Result};
use crate::kv::Budget;
use crate::kv::KvType;
use crate::kv::cuda::attend::{Attention, LayerRows};
use crate::kv::cuda::cache::LayerCache;
use crate::kv::cuda::prompt::{Prompts, Queries, Rows};
use crate::kv::cuda::signs::{FULL, Signs};
use crate::kv::cuda::{Limits, Positions, Selection, Shape};
use crate::kv::packed::{Center, Layout};
use crate::method::a2ats::cuda::encode::Encoder;
use crate::method::a2ats::cuda::{A2ats, Codebooks, HeadConstants};
use crate::method::ctkvr::cuda::{Ctkvr, Lists};
use crate::method::lfps::cuda::Lfps;
use crate::method::lfps::cuda::tables::TableIndex;
use crate::method::random::cuda::Draws;
use crate::method::selfindex::cuda::SelfIndex;
use crate::method::selfindex::{Centroids, Setup};
use crate::method::streaming::cuda::Streaming;
use crate::method::topk::cuda::TopK;
use crate::method::{Method, MethodName};

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
    /// Signs of keys.
    Selfindex(Box<SignIndex<'d>>),
    /// Past queries and what they attended.
    Ctkvr(Box<Ctkvr<'d>>),
    /// Tables of past attention.
    Lfps(Box<TableIndex<'d>>),
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

/// What selfindex has of a layer.
pub struct SignIndex<'d> {
    /// `None` where the cache holds them.
    signs: Option<Signs<'d>>,
    index: SelfIndex<'d>,
    layout: Layout,
    /// Whether centroids come from the prompt, and what joins those, `[g,d/4,16,4]`.
    fit: Option<Option<Buffer<'d, f32>>>,
}

impl<'d> SignIndex<'d> {
    fn new(
        driver: &'d dyn Driver,
        shape: Shape,
        limits: &Limits,
        setup: &Setup,
        layer: usize,
        packed: bool,
    ) -> Result<Self> {
        let signs = (!packed).then(|| Signs::new(driver, shape)).transpose()?;
        let centroids = setup.centroids(layer, shape.kv_heads, shape.head_dim);
        let (index, fit) = match centroids {
            Centroids::Fixed(values) => (SelfIndex::new(driver, shape, limits, &values)?, None),
            Centroids::Prompt(prior) => {
                let prior = prior.map(|values| Buffer::of(driver, "centroids of signs", &values));
                (SelfIndex::empty(driver, shape, limits)?, Some(prior.transpose()?))
            }
        };
        Ok(Self {
            signs,
            index,
            layout: setup.layout(),
            fit,
        })
    }

    /// The signs, wherever they are.
    fn signs<'s>(&'s self, cache: Option<&'s LayerCache<'d>>) -> Result<&'s Signs<'d>> {
        match (&self.signs, cache) {
            (Some(signs), _) => Ok(signs),
            (None, Some(LayerCache::Packed(rows))) => Ok(&rows.signs),
            _ => Err(Error::failed("CUDA: no signs of keys")),
        }
    }
}

/// Where the prompts of all layers are taken in.
pub struct PromptSpace<'d> {
    encoder: Option<Encoder<'d>>,
    lists: Option<Lists<'d>>,
    /// Where signs or the 2-bit cache need it.
    pub prompts: Option<Prompts<'d>>,
}

impl<'d> PromptSpace<'d> {
    /// For a prompt at these positions that passes in chunks of up to `rows` rows.
    ///
    /// # Errors
    /// No memory.
    pub fn new(
        driver: &'d dyn Driver,
        shape: Shape,
        index: Option<&LayerIndex<'_>>,
        packed: bool,
        prompt: Range<usize>,
        rows: usize,
    ) -> Result<Self> {
        let lists = match index {
            Some(LayerIndex::Ctkvr(index)) => Some(Lists::new(driver, index, 0, prompt)?),
            _ => None,
        };
        let codes = matches!(index, Some(LayerIndex::A2ats { .. }));
        let signs = packed || matches!(index, Some(LayerIndex::Selfindex(_)));
        Ok(Self {
            encoder: codes.then(|| Encoder::new(driver, shape, rows)).transpose()?,
            lists,
            prompts: signs.then(|| Prompts::new(driver, shape)).transpose()?,
        })
    }
}

impl<'d> LayerIndex<'d> {
    /// Whether there is one for a method. `turns` says that more than one prompt comes; `packed` that the cache is in
    /// 2 bits.
    pub fn can(method: &Method, turns: bool, packed: bool) -> bool {
        match method {
            Method::Full | Method::Streaming | Method::Random(_) | Method::A2ats(..) => true,
            Method::Topk | Method::Ctkvr(_) => !packed,
            Method::Selfindex(setup) => !turns && setup.layout().full <= FULL,
            Method::Lfps(setup) => !turns && !packed && Lfps::can(setup.params().lfps_threshold),
            Method::Quest | Method::Snapkv => false,
        }
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
        kv: KvType,
        like: Option<&Self>,
    ) -> Result<Self> {
        match method {
            Method::Ctkvr(params) => {
                let like = match like {
                    Some(Self::Ctkvr(index)) => Some(&**index),
                    _ => None,
                };
                let index = Ctkvr::new(driver, shape, limits, params, kv, like)?;
                Ok(Self::Ctkvr(Box::new(index)))
            }
            Method::Selfindex(setup) => {
                let packed = kv == KvType::TwoBit;
                let index = SignIndex::new(driver, shape, limits, setup, layer, packed)?;
                Ok(Self::Selfindex(Box::new(index)))
            }
            Method::Lfps(setup) => {
                let like = like.and_then(|like| match like {
                    Self::Lfps(index) => Some(index.as_ref()),
                    _ => None,
                });
                let index = TableIndex::new(driver, shape, limits, setup, layer, like)?;
                Ok(Self::Lfps(Box::new(index)))
            }
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
            MethodName::Selfindex => {
                let values = shape.heads() * d * 16;
                let centroids: Vec<f32> = (0..values).map(|_| rng.r#gen::<f32>() * 2.0 - 1.0).collect();
                let signs = Signs::new(driver, shape)?;
                signs.fill(seed)?;
                Ok(Self::Selfindex(Box::new(SignIndex {
                    signs: Some(signs),
                    index: SelfIndex::new(driver, shape, limits, &centroids)?,
                    layout: Layout::from(Center::Median),
                    fit: None,
                })))
            }
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

    /// Takes in the last `m` positions of a prompt, in one of several calls for all of it; `rows` hold them.
    pub fn extend(
        &self,
        work: &Workspace<'_>,
        m: usize,
        rows: &LayerRows<'_>,
        positions: &Positions<'_>,
        space: &PromptSpace<'_>,
    ) -> Result<()> {
        if let (Self::Ctkvr(index), Some(lists)) = (self, &space.lists) {
            return index.extend(&work.q_rope, m, rows, positions, lists);
        }
        match (self, &space.encoder) {
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
            (Self::Lfps(own), _) => own.extend(&work.q_rope, m),
            _ => Ok(()),
        }
    }

    /// Whether a step's launches are the same every time.
    pub fn is_recordable(&self) -> bool {
        !matches!(self, Self::Random(_))
    }

    /// After the last chunk of a prompt, all of whose rows are in `rows`; `cache` is where they went.
    pub fn end_of_prompt(
        &self,
        rows: &LayerRows<'_>,
        cache: Option<&LayerCache<'d>>,
        queries: Queries<'_>,
        space: &PromptSpace<'_>,
        positions: &Positions<'_>,
    ) -> Result<()> {
        if let (Self::Ctkvr(index), Some(lists)) = (self, &space.lists) {
            return index.end_of_prompt(lists);
        }
        if let Self::Lfps(own) = self {
            return own.end_of_prompt(rows, positions);
        }
        let (Self::Selfindex(own), Some(prompts)) = (self, &space.prompts) else {
            return Ok(());
        };
        let keys = Rows::keys(rows);
        if let Some(signs) = &own.signs {
            prompts.signs(keys, queries, own.layout, positions, signs)?;
        }
        match &own.fit {
            Some(prior) => prompts.centroids(
                keys,
                own.signs(cache)?,
                prior.as_ref(),
                positions,
                own.index.buffer(),
            ),
            None => Ok(()),
        }
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
            // The cache takes in its own signs.
            Self::Selfindex(own) => match &own.signs {
                Some(signs) => signs.append(&work.k_rope, 1, positions),
                None => Ok(()),
            },
            _ => Ok(()),
        }
    }

    /// Chooses for the last position's queries in decode step number `step`; `None` is everything.
    pub fn select(
        &self,
        work: &Workspace<'_>,
        cache: Option<&LayerCache<'d>>,
        positions: &Positions<'_>,
        step: usize,
    ) -> Result<Option<&Selection<'d>>> {
        match self {
            Self::Full => Ok(None),
            Self::TopK(index) => index.select(&work.q_rope, plain(cache)?, positions).map(Some),
            Self::Lfps(own) => own.select(&work.q_rope, plain(cache)?, positions).map(Some),
            Self::Ctkvr(index) => index.select(&work.q_rope, plain(cache)?, positions).map(Some),
            Self::Selfindex(own) => {
                let signs = own.signs(cache)?;
                own.index.select(&work.q_rope, signs, positions).map(Some)
            }
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

    /// After the attention over what was chosen: learns from it, and has its own say in the result.
    pub fn observe(
        &self,
        work: &Workspace<'_>,
        cache: &LayerCache<'d>,
        positions: &Positions<'_>,
        attention: &Attention<'_>,
    ) -> Result<()> {
        match self {
            Self::Lfps(own) => own.observe(&work.q_rope, plain(Some(cache))?, positions, attention),
            _ => Ok(()),
        }
    }

    /// Adds to `sums` `[3]` what a layer did in this step, mean over its heads: the share of rows read; of products
    /// taken to rank and of query heads bypassed, where that is counted.
    pub fn tally(
        &self,
        driver: &dyn Driver,
        shape: &Shape,
        positions: &Positions<'_>,
        chosen: Option<&Selection<'_>>,
        sums: &Buffer<'_, f64>,
    ) -> Result<()> {
        if let Self::Lfps(own) = self {
            return own.tally(positions, sums);
        }
        kernels::TallyRows {
            spans: positions.span_ptr(),
            listed: chosen.map(Selection::listed_ptr),
            ranked: chosen.and_then(Selection::ranked_ptr),
            sum: sums.ptr(),
            b: shape.sequences,
            g: shape.kv_heads,
        }
        .launch(driver, [1, 1, 1])
    }

    /// Whether it takes every product of a query with a key in order to choose.
    pub fn is_oracle(&self) -> bool {
        matches!(self, Self::TopK(_))
    }

    /// Bytes that grow with the context.
    pub fn bytes(&self) -> usize {
        match self {
            Self::A2ats { state, .. } => state.bytes(),
            Self::Ctkvr(index) => index.bytes(),
            Self::Selfindex(own) => own.signs.as_ref().map_or(0, Signs::bytes),
            Self::Lfps(own) => own.bytes(),
            _ => 0,
        }
    }
}

/// The cache's rows, for what ranks by them.
fn plain<'s, 'd>(cache: Option<&'s LayerCache<'d>>) -> Result<&'s LayerRows<'d>> {
    let rows = cache.and_then(LayerCache::plain);
    rows.ok_or_else(|| Error::failed("CUDA: the method needs the cache's rows on the device"))
}

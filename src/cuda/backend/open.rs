//! Making the backend: its caches and indexes, empty or of random contents.

use std::sync::Arc;

use super::{CudaBackend, LayerPart, Space};
use crate::compute::cuda::buffer::Buffer;
use crate::compute::cuda::driver::{Purpose, allocating};
use crate::cuda::body::Body;
use crate::cuda::heads::{HeadList, HeadRoom};
use crate::cuda::model::DeviceModel;
use crate::cuda::served::Served;
use crate::cuda::windows::Windows;
use crate::error::{Error, Result};
use crate::kv::cuda::Shape;
use crate::kv::cuda::attend::Attention;
use crate::kv::cuda::format;
use crate::kv::{Budget, KvType, Limits};
use crate::method::Method;
use crate::method::bench::{Bench, BenchParams, Contents};
use crate::method::cuda::{Indexes, OnDevice, ServedLayer, TALLIES};
use crate::runner::{Counts, DecodeOptions};

/// Layers, or parts of layers, that share a [`Space`], and what makes their indexes.
struct NewSpace<'s, 'd> {
    budget: Budget,
    kv: KvType,
    /// The number of KV heads.
    count: usize,
    /// The layers, each with its KV heads; `None` if all layers have all KV heads.
    layers: Option<Vec<(usize, Vec<usize>)>>,
    make: Box<MakeIndexes<'s, 'd>>,
}

/// Makes the indexes of some layers.
type MakeIndexes<'s, 'd> = dyn Fn(OnDevice<'d>, &[ServedLayer]) -> Result<Indexes<'d>> + 's;

impl<'a> CudaBackend<'a> {
    /// Makes empty caches for `sequences` sequences of up to `capacity` positions each.
    ///
    /// # Errors
    /// Sizes that the kernels do not support; out of memory.
    pub fn new(
        body: impl Into<Arc<Body<'a>>>,
        method: &dyn Method,
        options: DecodeOptions,
        sequences: usize,
        capacity: usize,
    ) -> Result<Self> {
        let body = body.into();
        let mut spaces = Vec::new();
        for served in Served::all(method, &options) {
            let without = || Error::internal("CUDA: a method without an index on the device");
            let method = served.method.cuda().ok_or_else(without)?;
            let space = |count: usize, layers: Option<Vec<(usize, Vec<usize>)>>| NewSpace {
                budget: served.budget,
                kv: served.kv,
                count,
                layers,
                make: Box::new(move |at, layers| method.indexes(at, layers)),
            };
            let Some(heads) = &served.heads else {
                spaces.push(space(body.config.n_kv_heads, None));
                continue;
            };
            for count in 1..=body.config.n_kv_heads {
                let own = heads.iter().enumerate().filter(|(_, heads)| heads.len() == count);
                let own: Vec<_> = own.map(|(layer, heads)| (layer, heads.clone())).collect();
                if !own.is_empty() {
                    spaces.push(space(count, Some(own)));
                }
            }
        }
        Self::with(body, options, sequences, capacity, &spaces)
    }

    /// For a benchmark: makes caches of `context` random positions and indexes of random contents, with room for
    /// `steps` more positions.
    ///
    /// # Errors
    /// As [`CudaBackend::new`].
    pub fn random(
        body: impl Into<Arc<Body<'a>>>,
        method: &dyn Bench,
        params: &BenchParams,
        options: DecodeOptions,
        [sequences, context, steps]: [usize; 3],
        seed: u32,
    ) -> Result<Self> {
        let body = body.into();
        let make = |at: OnDevice<'a>, layers: &[ServedLayer]| {
            let limits: Vec<Limits> = layers.iter().map(|of| of.limits).collect();
            let seeds: Vec<u32> = (0..limits.len() as u32).map(|layer| seed + 8 * layer).collect();
            let contents = Contents {
                limits: &limits,
                seeds: &seeds,
                params,
            };
            method.indexes(at, &contents)
        };
        let space = NewSpace {
            budget: options.limits.budget,
            kv: options.kv,
            count: body.config.n_kv_heads,
            layers: None,
            make: Box::new(make),
        };
        let mut backend = Self::with(body, options, sequences, context + steps, &[space])?;
        for (i, part) in backend.layers.iter().flatten().enumerate() {
            part.cache.fill(seed + 8 * i as u32 + 4)?;
        }
        backend.model.windows.set(&vec![context as u32; sequences])?;
        Ok(backend)
    }

    fn with(
        body: Arc<Body<'a>>,
        options: DecodeOptions,
        sequences: usize,
        capacity: usize,
        new: &[NewSpace<'_, 'a>],
    ) -> Result<Self> {
        let driver = body.driver;
        let shape = body.config.sizes().shape(sequences, capacity).checked()?;
        let model = DeviceModel::new(body, shape, &options)?;
        let config = &model.body.config;
        let (mut spaces, mut windows, mut number) = (Vec::new(), Vec::new(), 0);
        let mut layers: Vec<Vec<LayerPart<'a>>> = (0..config.n_layers()).map(|_| Vec::new()).collect();
        for of in new {
            let is_part = of.count < shape.kv_heads;
            let shape = Shape {
                kv_heads: of.count,
                ..shape
            };
            let at = OnDevice {
                driver,
                shape,
                kv: of.kv,
            };
            let format = format::find(of.kv)?;
            let own = if is_part || of.budget != options.limits.budget {
                let limits = options.limits.with_budget(of.budget);
                Some(Windows::new(driver, shape, limits, &config.windows())?)
            } else {
                None
            };
            let limits = own.as_ref().unwrap_or(&model.windows).limits();
            let served: Vec<ServedLayer> = match &of.layers {
                None => ServedLayer::all(&limits, of.count),
                Some(layers) => layers
                    .iter()
                    .map(|(layer, heads)| ServedLayer {
                        layer: *layer,
                        heads: heads.clone(),
                        limits: limits[*layer],
                    })
                    .collect(),
            };
            let indexes = allocating(driver, Purpose::Indexes, || (of.make)(at, &served))?;
            for (index, served) in indexes.into_iter().zip(served) {
                let cache = allocating(driver, Purpose::Caches, || format.cache(driver, shape))?;
                layers[served.layer].push(LayerPart {
                    space: spaces.len(),
                    number,
                    heads: is_part.then(|| HeadList::new(driver, served.heads)).transpose()?,
                    cache,
                    index,
                    counts: Counts::NONE,
                });
                number += 1;
            }
            spaces.push(Space {
                at,
                format,
                attention: Attention::new(driver, shape)?,
                room: is_part
                    .then(|| HeadRoom::new(driver, shape, sequences))
                    .transpose()?,
            });
            windows.push(own);
        }
        Ok(Self {
            tallies: Buffer::zeros(driver, "sums of what is read", number * TALLIES)?,
            layers,
            spaces,
            windows,
            recording: None,
            model,
            options,
            shape,
        })
    }
}

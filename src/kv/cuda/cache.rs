//! The cached rows of a layer on the GPU, in any of the cache's types.

use super::attend::{Attention, LayerRows};
use super::packed::PackedLayer;
use super::signs::FULL;
use super::{CudaSelection, Positions, Shape};
use crate::compute::cuda::buffer::Buffer;
use crate::compute::cuda::driver::Driver;
use crate::error::{Error, Result};
use crate::kv::KvType;
use crate::kv::packed::row_bytes;

/// The cached keys and values of one layer.
pub enum LayerCache<'d> {
    /// In a float type.
    Plain(LayerRows<'d>),
    /// In 2 bits, from the first prompt on.
    Packed(Box<PackedLayer<'d>>),
}

impl<'d> LayerCache<'d> {
    /// Allocates an empty cache.
    ///
    /// # Errors
    /// Sizes or [formats](holds) that the kernels do not support; out of memory.
    pub fn new(driver: &'d dyn Driver, shape: Shape, kv: KvType) -> Result<Self> {
        if !holds(kv) {
            return Err(Error::internal(format!("CUDA: there is no cache of type {kv}")));
        }
        match kv.float() {
            Some(kind) => LayerRows::new(driver, shape, kind).map(Self::Plain),
            None => Ok(Self::Packed(Box::new(PackedLayer::new(driver, shape)?))),
        }
    }

    /// Stores the rotated keys and the values of the last `m` positions, `[b,g,m,d]`.
    pub fn append(
        &self,
        keys: &Buffer<'_, f32>,
        values: &Buffer<'_, f32>,
        m: usize,
        positions: &Positions<'_>,
    ) -> Result<()> {
        match self {
            Self::Plain(rows) => rows.append(keys, values, m, positions),
            Self::Packed(rows) => rows.append(keys, values, m, positions),
        }
    }

    /// Attends rotated queries `[b,h,d]`, as [`Attention::attend`].
    pub fn attend(
        &self,
        attention: &Attention<'_>,
        queries: &Buffer<'_, f32>,
        positions: &Positions<'_>,
        chosen: Option<&CudaSelection<'_>>,
    ) -> Result<()> {
        match self {
            Self::Plain(rows) => attention.attend(queries, rows, positions, chosen),
            Self::Packed(rows) => attention.attend_packed(queries, rows, positions, chosen),
        }
    }

    /// Returns the rows of a cache in a float type.
    pub fn plain(&self) -> Option<&LayerRows<'d>> {
        match self {
            Self::Plain(rows) => Some(rows),
            Self::Packed(_) => None,
        }
    }
}

/// Returns whether a [`LayerCache`] can hold keys and values in these formats.
pub fn holds(kv: KvType) -> bool {
    kv.float().is_some() || kv == KvType::TWO_BIT
}

/// Returns the bytes per KV head that do not depend on the length: full-precision rows, scales and centers.
pub fn fixed_bytes(shape: &Shape, kv: KvType) -> usize {
    match kv.float() {
        Some(_) => 0,
        None => FULL * (4 * shape.head_dim + 4) + 8 * shape.head_dim,
    }
}

/// Returns the bytes of a key and a value of one KV head on the device.
pub fn bytes_per_position(shape: &Shape, kv: KvType) -> usize {
    match kv.float() {
        Some(_) => kv.bytes_per_position(shape.width()),
        None => row_bytes(shape.head_dim),
    }
}

//! The parts of a layer other than attention (norms, projections, rotation and the MLP), with their buffers.

use super::blocks_for;
use super::sizes::LayerSizes;
use super::weights::LayerWeights;
use crate::compute::Precision;
use crate::compute::cuda::buffer::Buffer;
use crate::compute::cuda::driver::Driver;
use crate::compute::cuda::kernels;
use crate::compute::cuda::linear::{Linear, Products};
use crate::error::Result;
use crate::kv::cuda::Positions;
use crate::kv::{Rotated, RotatedQkv};
use crate::model::rope::{Rope, RopeTable};

/// The positions of rows within their sequences.
#[derive(Clone, Copy)]
pub enum RowPositions<'s, 'd> {
    /// Row i of each sequence has position `first + i * apart`.
    At {
        /// Position of the first row.
        first: usize,
        /// Distance between the positions of neighbouring rows.
        apart: usize,
    },
    /// The last positions of the caches, which already count the rows.
    Last(&'s Positions<'d>),
}

/// The cosines and sines of the rotary embedding for a range of positions.
pub struct Rotation<'d> {
    pub(crate) cosines: Buffer<'d, f32>,
    pub(crate) sines: Buffer<'d, f32>,
    /// The position of the first row of the table.
    pub(crate) first: usize,
}

impl<'d> Rotation<'d> {
    /// Computes the table for `n` positions from `first` on.
    ///
    /// # Errors
    /// Out of memory.
    pub fn new(driver: &'d dyn Driver, rope: &Rope, first: usize, n: usize) -> Result<Self> {
        Self::filled(driver, rope, first..first + n, first)
    }

    /// Computes the table for these positions; row i, which counts as position i, is that of the i-th.
    ///
    /// # Errors
    /// Out of memory.
    pub fn at_positions(driver: &'d dyn Driver, rope: &Rope, positions: &[usize]) -> Result<Self> {
        Self::filled(driver, rope, positions.iter().copied(), 0)
    }

    fn filled(
        driver: &'d dyn Driver,
        rope: &Rope,
        positions: impl ExactSizeIterator<Item = usize>,
        first: usize,
    ) -> Result<Self> {
        let buffer = || Buffer::new(driver, "rotation", positions.len() * rope.frequencies().len());
        let rotation = Self {
            cosines: buffer()?,
            sines: buffer()?,
            first,
        };
        if driver.has_memory() {
            let table: RopeTable = rope.table(positions);
            let [cosines, sines] = table.parts();
            rotation.cosines.write(cosines)?;
            rotation.sines.write(sines)?;
        }
        Ok(rotation)
    }
}

/// Queries `[b,n r,m,d]`, keys and values `[b,n,m,d]` of n KV heads with r query heads each, for b sequences of m rows.
pub type HeadRows<'d> = RotatedQkv<Buffer<'d, f32>>;

impl<'d> HeadRows<'d> {
    /// Allocates the buffers for `rows` rows, b m, of n r d values of queries and n d values of keys each.
    ///
    /// # Errors
    /// Out of memory.
    pub fn new(driver: &'d dyn Driver, what: &'static str, rows: usize, widths: [usize; 2]) -> Result<Self> {
        let [queries, keys] = widths.map(|width| move || Buffer::new(driver, what, rows * width));
        Ok(Self {
            q: Rotated {
                pre: queries()?,
                rope: queries()?,
            },
            k: Rotated {
                pre: keys()?,
                rope: keys()?,
            },
            v: keys()?,
        })
    }
}

/// The buffers for processing up to `rows` rows, which all layers use one after the other.
pub struct Workspace<'d> {
    pub(crate) driver: &'d dyn Driver,
    pub(crate) sizes: LayerSizes,
    /// The most rows.
    pub(crate) rows: usize,
    /// The hidden states after the RMS norm, `[rows, hidden]`.
    pub(crate) normed: Buffer<'d, f32>,
    /// The joined queries, keys and values, `[rows, (h + 2 g) d]`.
    pub(crate) qkv: Buffer<'d, f32>,
    /// The queries, keys and values of all heads.
    pub heads: HeadRows<'d>,
    /// The attention output of all heads, `[rows, h d]`.
    pub attended: Buffer<'d, f32>,
    /// The joined gate and up projections, `[rows, 2 intermediate]`.
    pub(crate) gate_up: Buffer<'d, f32>,
    /// The input of the down projection, `[rows, intermediate]`.
    pub(crate) activated: Buffer<'d, f32>,
    pub(crate) products: Products<'d>,
}

impl<'d> Workspace<'d> {
    /// Allocates the buffers for up to `rows` rows.
    ///
    /// # Errors
    /// Out of memory.
    pub fn new(driver: &'d dyn Driver, sizes: LayerSizes, precision: Precision, rows: usize) -> Result<Self> {
        let (kv, ffn) = (sizes.kv(), sizes.intermediate);
        let buffer = |width: usize| Buffer::new(driver, "activations", rows * width);
        Ok(Self {
            driver,
            sizes,
            rows,
            normed: buffer(sizes.hidden)?,
            qkv: buffer(sizes.qkv())?,
            heads: HeadRows::new(driver, "activations", rows, [sizes.attended(), kv])?,
            attended: buffer(sizes.attended())?,
            gate_up: buffer(2 * ffn)?,
            activated: buffer(ffn)?,
            products: Products::new(driver, precision == Precision::F32, rows * sizes.widest())?,
        })
    }

    /// Computes queries, keys and values of `rows` rows of hidden states, `[b m, hidden]`, where each sequence has m
    /// rows.
    pub fn project(
        &self,
        weights: &LayerWeights<'_>,
        hidden: &Buffer<'_, f32>,
        rows: usize,
        m: usize,
        rotation: &Rotation<'_>,
        at: RowPositions<'_, '_>,
    ) -> Result<()> {
        let s = &self.sizes;
        self.norm(hidden, &weights.input_norm, &self.normed, rows)?;
        self.multiply(&weights.qkv, &self.normed, rows, &self.qkv, false)?;
        let (h, g) = (s.heads.n_heads, s.heads.n_kv_heads);
        let (lens, first, apart) = match at {
            RowPositions::At { first, apart } => (None, first - rotation.first, apart),
            RowPositions::Last(positions) => (Some(positions.lens.ptr()), 0, 0),
        };
        let blocks = (rows * (h + 2 * g)).div_ceil(8);
        kernels::SplitHeads {
            flat: self.qkv.ptr(),
            q_norm: weights.q_norm.as_ref().map(Buffer::ptr),
            k_norm: weights.k_norm.as_ref().map(Buffer::ptr),
            cosines: rotation.cosines.ptr(),
            sines: rotation.sines.ptr(),
            lens,
            q_pre: self.heads.q.pre.ptr(),
            q_rope: self.heads.q.rope.ptr(),
            k_pre: self.heads.k.pre.ptr(),
            k_rope: self.heads.k.rope.ptr(),
            v: self.heads.v.ptr(),
            rows,
            m,
            h,
            g,
            d: s.heads.head_dim,
            first,
            apart,
            eps: s.eps,
        }
        .launch(self.driver, [blocks, 1, 1])
    }

    /// Adds the projected attention output (from `attended`) and then the MLP's output to `rows` rows of hidden states.
    pub fn finish(&self, weights: &LayerWeights<'_>, hidden: &Buffer<'_, f32>, rows: usize) -> Result<()> {
        self.multiply(&weights.o, &self.attended, rows, hidden, true)?;
        self.norm(hidden, &weights.mlp_norm, &self.normed, rows)?;
        self.multiply(&weights.gate_up, &self.normed, rows, &self.gate_up, false)?;
        let ffn = self.sizes.intermediate;
        let blocks = blocks_for(self.driver, rows * ffn);
        kernels::SiluRows {
            gate_up: self.gate_up.ptr(),
            out: self.activated.ptr(),
            n: rows * ffn,
            width: ffn,
        }
        .launch(self.driver, [blocks, 1, 1])?;
        self.multiply(&weights.down, &self.activated, rows, hidden, true)
    }

    pub(crate) fn multiply(
        &self,
        linear: &Linear<'_>,
        x: &Buffer<'_, f32>,
        rows: usize,
        out: &Buffer<'_, f32>,
        accumulate: bool,
    ) -> Result<()> {
        self.products.forward(x, rows, &[(linear, out)], accumulate)
    }

    /// Computes the RMS norm of rows `[rows, hidden]`.
    pub(crate) fn norm(
        &self,
        x: &Buffer<'_, f32>,
        weight: &Buffer<'_, f32>,
        out: &Buffer<'_, f32>,
        rows: usize,
    ) -> Result<()> {
        kernels::RmsRows {
            x: x.ptr(),
            weight: weight.ptr(),
            out: out.ptr(),
            width: self.sizes.hidden,
            eps: self.sizes.eps,
        }
        .launch(self.driver, [rows, 1, 1])
    }
}

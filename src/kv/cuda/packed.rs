//! The 2-bit cache on the GPU: the rows of [`crate::kv::packed`], dequantised when they are attended.

use half::f16;

use super::attend::Attention;
use super::rows::{CudaFormat, CudaRows, StaticScores, WholePrompt};
use super::signs::{FULL, Signs};
use super::{CudaSelection, Positions, Shape};
use crate::compute::cuda::buffer::{Buffer, Ptr};
use crate::compute::cuda::driver::Driver;
use crate::compute::cuda::kernels::{self, Kernel};
use crate::error::{Error, Result};
use crate::kv::KvType;
use crate::kv::packed::{Layout, QUANT_GROUP, row_bytes};

/// The format of 2 bits.
pub(super) struct TwoBits;

impl CudaFormat for TwoBits {
    fn kv(&self) -> KvType {
        KvType::TWO_BIT
    }

    fn kernel(&self, shape: &Shape) -> Result<(&'static Kernel, usize)> {
        let kernel = kernels::AttendPacked::kernel(shape.width())?;
        Ok((kernel, kernel.shared_bytes))
    }

    fn cache<'d>(&self, driver: &'d dyn Driver, shape: Shape) -> Result<Box<dyn CudaRows + 'd>> {
        Ok(Box::new(PackedLayer::new(driver, shape)?))
    }

    fn bytes_per_position(&self, shape: &Shape) -> usize {
        row_bytes(shape.head_dim)
    }

    /// Returns the bytes of full-precision rows, scales and centers.
    fn fixed_bytes(&self, shape: &Shape) -> usize {
        FULL * (4 * shape.head_dim + 4) + 8 * shape.head_dim
    }

    fn needs_room(&self) -> bool {
        true
    }

    /// Centers and scales are those of a prompt.
    fn has_random_rows(&self) -> bool {
        false
    }

    fn holds(&self, layout: &Layout) -> bool {
        layout.full <= FULL
    }
}

/// The cached keys and values of one layer in 2 bits. In arrays of two, keys come first, then values.
pub struct PackedLayer<'d> {
    /// Signs, center and full-precision tokens; the index of selfindex uses them too.
    pub signs: Signs<'d>,
    /// Quantised values, `[b,g,capacity,d/4]` bytes each.
    pub bits: [Buffer<'d, u8>; 2],
    /// Scales and zero points, `[b,g,capacity,groups,2]` each.
    pub params: [Buffer<'d, f16>; 2],
    /// Largest centered magnitude per channel, `[b,g,d]`.
    pub alpha: Buffer<'d, f32>,
    /// Full-precision rows, `[b,g,FULL,d]` each.
    pub full: [Buffer<'d, f16>; 2],
    /// Whether keys are stored as signs and magnitudes.
    pub is_signed: bool,
}

impl<'d> PackedLayer<'d> {
    /// Allocates an empty cache.
    ///
    /// # Errors
    /// Channels that are no multiple of 8; out of memory.
    pub fn new(driver: &'d dyn Driver, shape: Shape) -> Result<Self> {
        let shape = shape.checked()?;
        let (d, heads) = (shape.head_dim, shape.heads());
        if !d.is_multiple_of(8) {
            return Err(Error::unsupported(format!(
                "CUDA: a 2-bit cache needs a head dimension that is a multiple of 8, not {d}"
            ))
            .hint("use ⟨device=cpu⟩"));
        }
        let rows = heads * shape.capacity;
        let bits = || Buffer::zeros(driver, "2-bit rows", rows * d / 4);
        let params = || {
            let groups = d.div_ceil(QUANT_GROUP);
            Buffer::zeros(driver, "scales of 2-bit rows", rows * groups * 2)
        };
        let full = || Buffer::zeros(driver, "rows in half precision", heads * FULL * d);
        Ok(Self {
            signs: Signs::new(driver, shape)?,
            bits: [bits()?, bits()?],
            params: [params()?, params()?],
            alpha: Buffer::from_slice(driver, "scales of channels", &vec![1.0; heads * d])?,
            full: [full()?, full()?],
            is_signed: true,
        })
    }

    /// Quantises keys (`i` = 0) or values (1) of the last `m` positions, `[sequences,heads,m,w]`, of the KV heads
    /// from `first` on.
    pub(crate) fn pack(
        &self,
        i: usize,
        rows: Ptr<'_, f32>,
        [first, heads, sequences]: [usize; 3],
        [m, w]: [usize; 2],
        lens: Ptr<'_, u32>,
    ) -> Result<()> {
        let shape = &self.signs.shape;
        let (d, groups) = (shape.head_dim, shape.head_dim.div_ceil(QUANT_GROUP));
        let channel = |buffer| (i == 0).then(|| Buffer::ptr_at(buffer, first * d));
        let blocks = (m * groups).div_ceil(8);
        kernels::PackRows {
            rows,
            centers: channel(&self.signs.centers),
            alpha: channel(&self.alpha),
            lens,
            bits: self.bits[i].ptr_at(first * shape.capacity * (d / 4)),
            params: self.params[i].ptr_at(first * shape.capacity * groups * 2).cast(),
            is_signed: usize::from(self.is_signed),
            m,
            d,
            w,
            capacity: shape.capacity,
        }
        .launch(self.signs.driver, [blocks, heads, sequences])
    }
}

impl CudaRows for PackedLayer<'_> {
    /// Stores the rows with the center and the scale of the prompt.
    ///
    /// # Numerics
    /// Finite values give the same bits as [`Packed::extend`](crate::kv::packed::Packed::extend).
    fn append(
        &self,
        keys: &Buffer<'_, f32>,
        values: &Buffer<'_, f32>,
        m: usize,
        positions: &Positions<'_>,
    ) -> Result<()> {
        self.signs.append(keys, m, positions)?;
        let shape = &self.signs.shape;
        for (i, rows) in [keys, values].into_iter().enumerate() {
            let heads = [0, shape.kv_heads, shape.sequences];
            self.pack(i, rows.ptr(), heads, [m, shape.head_dim], positions.lens.ptr())?;
        }
        Ok(())
    }

    /// Stores nothing: the center and the scales are those of the whole prompt.
    fn extend(&self, _: &Buffer<'_, f32>, _: &Buffer<'_, f32>, _: usize, _: &Positions<'_>) -> Result<()> {
        Ok(())
    }

    fn prompt(&mut self, prompt: &WholePrompt<'_>, layout: Layout) -> Result<()> {
        let without = || Error::internal("CUDA: no room to pack a prompt");
        let prompts = prompt.prompts.ok_or_else(without)?;
        prompts.pack(prompt.rows, prompt.queries, layout, prompt.positions, self)
    }

    /// # Numerics
    /// Keys are dequantised to f16 around the center and relative to their channel's largest magnitude. Queries are
    /// multiplied by that magnitude and scaled to at most 1 before they are rounded to f16. Weights are f16, sums f32.
    fn attend(
        &self,
        attention: &Attention<'_>,
        queries: &Buffer<'_, f32>,
        positions: &Positions<'_>,
        chosen: Option<&CudaSelection<'_>>,
    ) -> Result<()> {
        let (signs, shape) = (&self.signs, &self.signs.shape);
        let kernel = kernels::AttendPacked::kernel(shape.width())?;
        attention.step(kernel, queries, positions, chosen, |at| {
            kernels::AttendPacked {
                queries: at.queries,
                signs: signs.signs.ptr(),
                key_bits: self.bits[0].ptr().cast(),
                value_bits: self.bits[1].ptr().cast(),
                key_params: self.params[0].ptr().cast(),
                value_params: self.params[1].ptr().cast(),
                centers: signs.centers.ptr(),
                alpha: self.alpha.ptr(),
                full: signs.full.ptr(),
                full_count: signs.full_count.ptr(),
                full_keys: self.full[0].ptr().cast(),
                full_values: self.full[1].ptr().cast(),
                spans: at.spans,
                lists: at.lists,
                listed: at.listed,
                outs: at.outs,
                sums: at.sums,
                scale: at.scale,
                r: at.r,
                d: shape.head_dim,
                pitch: signs.pitch(),
                capacity: at.capacity,
                most: at.most,
                is_signed: usize::from(self.is_signed),
            }
            .launch(signs.driver, shape.width(), at.grid)
        })
    }

    fn score_static(&self, scores: &StaticScores<'_>) -> Result<()> {
        let (signs, shape) = (&self.signs, &self.signs.shape);
        kernels::StaticScoresPacked {
            queries: scores.queries.ptr(),
            signs: signs.signs.ptr(),
            key_bits: self.bits[0].ptr().cast(),
            key_params: self.params[0].ptr().cast(),
            centers: signs.centers.ptr(),
            alpha: self.alpha.ptr(),
            full: signs.full.ptr(),
            full_count: signs.full_count.ptr(),
            full_keys: self.full[0].ptr().cast(),
            spans: scores.positions.spans.ptr(),
            parts: scores.parts.ptr(),
            scale: shape.exponent(),
            r: shape.group,
            d: shape.head_dim,
            pitch: signs.pitch(),
            capacity: shape.capacity,
            n_parts: scores.n_parts,
            is_signed: usize::from(self.is_signed),
        }
        .launch(signs.driver, shape.grid(1))
    }

    fn signs(&self) -> Option<&Signs<'_>> {
        Some(&self.signs)
    }
}

//! Encodes a prompt's keys on the GPU: whitening, a search for candidate codewords on the tensor cores, and the final
//! choice in f32.

use half::f16;

use super::{A2ats, Codebooks};
use crate::compute::cuda::buffer::Buffer;
use crate::compute::cuda::clusters::search_bytes;
use crate::compute::cuda::driver::Driver;
use crate::compute::cuda::kernels;
use crate::compute::cuda::rows::HeadRows;
use crate::compute::cuda::width;
use crate::error::{Error, Result};
use crate::kv::cuda::{Positions, Shape};

/// Rows per tile of the search; `LISTED` rows share one read of all codewords.
const TILE: usize = 128;
const LISTED: usize = 8;

/// The buffers for encoding the keys of a prompt; all layers of the same shape share them.
pub struct Encoder<'d> {
    driver: &'d dyn Driver,
    shape: Shape,
    /// The most rows per KV head that are encoded at once.
    rows: usize,
    /// The whitened rows z, `[b,g,rows,w]`.
    z: Buffer<'d, f32>,
    /// The whitened rows in f16, `[b,g,rows,w]`.
    halves: Buffer<'d, u16>,
    /// The norms of each scaled row and of its rounding error, `[b,g,rows,2]`.
    norms: Buffer<'d, f32>,
    /// The bits of the largest magnitude, `[b,g]`.
    largest: Buffer<'d, u32>,
    /// Four candidate codewords per row, `[b,g,rows]`.
    candidates: Buffer<'d, u64>,
    /// The rows of the last part that needed the scores of all codewords, `[b,g,rows]`.
    list: Buffer<'d, u32>,
    /// The number of rows in `list`, `[b,g]`.
    pub listed: Buffer<'d, u32>,
}

impl<'d> Encoder<'d> {
    /// Allocates space for `rows` keys of every KV head; longer prompts are encoded in parts.
    ///
    /// # Errors
    /// Sizes that the kernels do not support; out of memory.
    pub fn new(driver: &'d dyn Driver, shape: Shape, rows: usize) -> Result<Self> {
        let shape = shape.checked()?;
        let rows = rows.clamp(1, shape.capacity);
        let all = shape.heads() * rows;
        let w = width(shape.head_dim);
        Ok(Self {
            driver,
            shape,
            rows,
            z: Buffer::new(driver, "whitened keys", all * w)?,
            halves: Buffer::new(driver, "whitened keys in f16", all * w)?,
            norms: Buffer::new(driver, "norms of keys", all * 2)?,
            largest: Buffer::new(driver, "magnitudes of keys", shape.heads())?,
            candidates: Buffer::new(driver, "candidates of keys", all)?,
            list: Buffer::new(driver, "lists of keys", all)?,
            listed: Buffer::new(driver, "numbers of keys", shape.heads())?,
        })
    }

    /// Computes z for the rows `first..first + n` of keys `[b,g,m,d]`, in f32 and in f16.
    fn whiten(&self, keys: &Buffer<'_, f32>, of: &Codebooks<'_>, [first, n, m]: [usize; 3]) -> Result<()> {
        let (shape, d, w) = (&self.shape, self.shape.head_dim, width(self.shape.head_dim));
        let across = shape.sequences * w.div_ceil(64);
        let grid = [n.div_ceil(64), shape.kv_heads, across];
        kernels::WhitenKeys {
            keys: keys.ptr(),
            factors: of.factors.ptr(),
            means: of.means.ptr(),
            out: self.z.ptr(),
            first,
            n,
            m,
            d,
            w,
        }
        .launch(self.driver, grid)?;
        let rows = HeadRows {
            driver: self.driver,
            x: self.z.ptr(),
            heads: shape.heads(),
            n,
            w,
        };
        rows.largest(&self.largest)?;
        rows.halve(&self.largest, &self.halves, &self.norms)
    }

    /// Finds the candidate codewords of the first `n` whitened rows.
    fn search(&self, of: &Codebooks<'_>, n: usize) -> Result<()> {
        let w = width(self.shape.head_dim);
        kernels::NearestCodewords {
            rows: self.halves.ptr(),
            norms: self.norms.ptr(),
            largest: self.largest.ptr(),
            codebook: of.codebook.ptr().cast(),
            biases: of.biases.ptr(),
            bounds: of.bounds.ptr(),
            candidates: self.candidates.ptr(),
            n,
            w,
            size: of.size,
            padded: of.size.next_multiple_of(TILE),
        }
        .launch(self.driver, self.shape.grid(n.div_ceil(TILE)), search_bytes(w))
    }
}

impl A2ats<'_> {
    /// Encodes the keys of the last `m` positions, `[b,g,m,d]`, given before rotation with windowed RoPE, else after.
    /// `positions` already counts these positions.
    ///
    /// # Numerics
    /// The codes are those of [`A2ats::append`], bit for bit: f32, the lower codeword wins a tie.
    ///
    /// # Errors
    /// The encoder has another shape.
    pub fn extend(
        &self,
        keys: &Buffer<'_, f32>,
        m: usize,
        codebooks: &Codebooks<'_>,
        positions: &Positions<'_>,
        encoder: &Encoder<'_>,
    ) -> Result<()> {
        let (shape, own) = (&self.shape, &encoder.shape);
        if (own.sequences, own.kv_heads, own.head_dim) != (shape.sequences, shape.kv_heads, shape.head_dim) {
            return Err(Error::internal(format!(
                "CUDA: an encoder for {own:?}, but keys are {shape:?}"
            )));
        }
        for first in (0..m).step_by(encoder.rows) {
            let part = [first, encoder.rows.min(m - first), m];
            encoder.whiten(keys, codebooks, part)?;
            encoder.search(codebooks, part[1])?;
            self.settle(codebooks, positions, encoder, part)?;
        }
        Ok(())
    }

    /// Writes the codes of `n` of the last `m` positions, from the `first` of them on. A code is the best of the row's
    /// candidates, or the best of all codewords where the candidates do not decide.
    fn settle(
        &self,
        codebooks: &Codebooks<'_>,
        positions: &Positions<'_>,
        encoder: &Encoder<'_>,
        [first, n, m]: [usize; 3],
    ) -> Result<()> {
        let (d, w) = (self.shape.head_dim, width(self.shape.head_dim));
        let (z, norms) = (encoder.z.ptr(), codebooks.norms.ptr());
        let codebook = codebooks.codebook.ptr().cast();
        let (lens, codes) = (positions.lens.ptr(), self.codes.ptr());
        let (list, listed) = (encoder.list.ptr(), encoder.listed.ptr());
        let (size, capacity) = (self.size, self.shape.capacity);
        encoder.listed.zero()?;
        // The arguments that both kernels take, and those that only one of them takes.
        macro_rules! arguments {
            ($kernel:ident $(, $more:ident)?) => {
                kernels::$kernel {
                    z,
                    codebook,
                    norms,
                    lens,
                    codes,
                    list,
                    listed,
                    first,
                    n,
                    m,
                    size,
                    d,
                    w,
                    capacity,
                    $($more)?
                }
            };
        }
        let candidates = encoder.candidates.ptr();
        arguments!(SettleCodes, candidates).launch(encoder.driver, encoder.shape.grid(n.div_ceil(256)))?;
        arguments!(EncodeListed).launch(encoder.driver, encoder.shape.grid(n.div_ceil(LISTED)))
    }
}

/// ||c||²/2 of each codeword, and the bounds that the search needs, for codewords `[g,size,w]`.
pub(crate) struct Norms {
    /// ||c||²/2, `[g,size]`.
    pub halves: Vec<f32>,
    /// -||c||²/2, and minus infinity in the padding after the last codeword, `[g,padded]`.
    pub biases: Vec<f32>,
    /// The largest norm ||c||, and the largest of `halves`, `[g,2]`.
    pub bounds: Vec<f32>,
}

impl Norms {
    pub fn new(codebook: &[f16], size: usize, w: usize) -> Self {
        let (mut halves, mut biases, mut bounds) = (Vec::new(), Vec::new(), Vec::new());
        for head in codebook.chunks(size * w) {
            let squares = |c: &[f16]| c.iter().map(|v| v.to_f64() * v.to_f64()).sum::<f64>();
            let own: Vec<f32> = head.chunks(w).map(|c| (squares(c) / 2.0) as f32).collect();
            let largest = own.iter().copied().fold(0.0, f32::max);
            // The norm is rounded up, because `halves` are rounded to nearest.
            bounds.extend([(2.0 * largest).sqrt() * 1.000_001, largest]);
            biases.extend(own.iter().map(|v| -v));
            biases.resize(biases.len().next_multiple_of(TILE), f32::NEG_INFINITY);
            halves.extend(own);
        }
        Self {
            halves,
            biases,
            bounds,
        }
    }
}

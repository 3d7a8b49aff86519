//! The choice of the next token from logits on the device: see [`Sampler::next`].

use crate::compute::cuda::buffer::Buffer;
use crate::compute::cuda::driver::Driver;
use crate::compute::cuda::kernels;
use crate::error::Result;
use crate::kv::sample::Sampler;

/// Logits per block of the kernels that read each logit once; `MOST_BLOCKS` is the most blocks per row.
const PER_BLOCK: usize = 4096;
const MOST_BLOCKS: usize = 64;
/// Bins of a histogram of probabilities.
const BINS: usize = 2048;

/// Chooses or draws tokens from the first rows of logits `[rows,vocab]`.
pub struct TokenChoice<'d> {
    driver: &'d dyn Driver,
    vocab: usize,
    /// The largest logit of each block, `[rows,blocks]`.
    tops: Buffer<'d, f32>,
    /// The id of each of these logits, `[rows,blocks]`.
    places: Buffer<'d, u32>,
    /// Histograms of the probabilities, `[rows,blocks,2048]`, in units of 2^-44 of the largest probability.
    masses: Buffer<'d, u64>,
}

impl<'d> TokenChoice<'d> {
    /// Allocates the buffers for up to `rows` rows.
    ///
    /// # Errors
    /// Out of memory.
    pub fn new(driver: &'d dyn Driver, rows: usize, vocab: usize) -> Result<Self> {
        let blocks = rows * blocks(vocab);
        Ok(Self {
            driver,
            vocab,
            tops: Buffer::new(driver, "largest logits", blocks)?,
            places: Buffer::new(driver, "ids of the largest logits", blocks)?,
            masses: Buffer::new(driver, "histograms of probabilities", blocks * BINS)?,
        })
    }

    /// Finds the greedy choice of each row.
    ///
    /// # Shapes
    /// logits `[rows,vocab]`, ids `[rows]`.
    pub fn largest(&self, logits: &Buffer<'_, f32>, rows: usize, ids: &Buffer<'_, u32>) -> Result<()> {
        let parts = blocks(self.vocab);
        kernels::LargestOfParts {
            x: logits.ptr(),
            tops: self.tops.ptr(),
            places: self.places.ptr(),
            width: self.vocab,
        }
        .launch(self.driver, [parts, rows, 1])?;
        kernels::LargestOfRows {
            tops: self.tops.ptr(),
            places: self.places.ptr(),
            out: ids.ptr(),
            parts,
        }
        .launch(self.driver, [rows, 1, 1])
    }

    /// Draws a token from each row by temperature and nucleus, using one uniform number from 0 to 1 per row.
    ///
    /// # Shapes
    /// logits `[rows,vocab]`, uniforms `[rows]`, ids `[rows]`; before the call, ids holds the greedy choices.
    ///
    /// # Numerics
    /// Probabilities are rounded to multiples of 2^-44 of the largest one, so that their sums are exact.
    /// [`Sampler::next`], on the host, sums them in f64 instead.
    pub fn draw(
        &self,
        logits: &Buffer<'_, f32>,
        rows: usize,
        uniforms: &Buffer<'_, f64>,
        ids: &Buffer<'_, u32>,
        sampler: &Sampler,
    ) -> Result<()> {
        let (parts, temperature) = (blocks(self.vocab), sampler.temperature());
        kernels::DrawMasses {
            x: logits.ptr(),
            ids: ids.ptr(),
            parts: self.masses.ptr(),
            width: self.vocab,
            temperature,
        }
        .launch(self.driver, [parts, rows, 1])?;
        kernels::DrawOfRows {
            x: logits.ptr(),
            uniforms: uniforms.ptr(),
            masses: self.masses.ptr(),
            ids: ids.ptr(),
            width: self.vocab,
            parts,
            temperature,
            top_p: sampler.top_p(),
        }
        .launch(self.driver, [rows, 1, 1])
    }
}

/// Returns how many blocks share a row of logits.
fn blocks(vocab: usize) -> usize {
    vocab.div_ceil(PER_BLOCK).clamp(1, MOST_BLOCKS)
}

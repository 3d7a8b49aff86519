//! The next token from logits on the device: [`Sampler::next`].

use crate::compute::cuda::buffer::Buffer;
use crate::compute::cuda::driver::Driver;
use crate::compute::cuda::kernels;
use crate::error::Result;
use crate::kv::sample::Sampler;

/// Logits per block, and most blocks per row, of the kernels that read each logit once.
const PER_BLOCK: usize = 4096;
const MOST_BLOCKS: usize = 64;
/// Bins of a histogram of masses.
const BINS: usize = 2048;

/// Chooses and draws tokens from the first rows of logits `[rows,vocab]`.
pub struct TokenChoice<'d> {
    driver: &'d dyn Driver,
    vocab: usize,
    /// The largest logit of each block and its id, `[rows,blocks]`.
    tops: Buffer<'d, f32>,
    places: Buffer<'d, u32>,
    /// Histograms of probabilities, `[rows,blocks,2048]`, in multiples of 2^-44 of the largest.
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

    /// Draws from each row by temperature and nucleus, with a number from 0 to 1 for each.
    ///
    /// # Shapes
    /// logits `[rows,vocab]`, uniforms `[rows]`, ids `[rows]`; before the call ids are the greedy choices.
    ///
    /// # Numerics
    /// Probabilities are multiples of 2^-44 of the largest one, and their sums exact; the host sums them in f64.
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

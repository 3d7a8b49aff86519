//! The next token from logits on the device: [`Sampler::next`].

use crate::compute::cuda::buffer::Buffer;
use crate::compute::cuda::driver::Driver;
use crate::compute::cuda::kernels;
use crate::error::Result;
use crate::kv::sample::Sampler;

/// The greedy choice of each row of logits.
///
/// # Shapes
/// logits `[rows,vocab]`, ids `[rows]`.
pub fn choose(
    driver: &dyn Driver,
    logits: &Buffer<'_, f32>,
    [rows, vocab]: [usize; 2],
    ids: &Buffer<'_, u32>,
) -> Result<()> {
    kernels::LargestOfRows {
        x: logits.ptr(),
        out: ids.ptr(),
        width: vocab,
    }
    .launch(driver, [rows, 1, 1])
}

/// Draws from each row of logits by temperature and nucleus, with a number from 0 to 1 for each.
///
/// # Shapes
/// logits `[rows,vocab]`, uniforms `[rows]`, ids `[rows]`; before the call ids are the greedy choices.
///
/// # Numerics
/// Probabilities are multiples of 2^-44 of the largest one, and their sums exact; the host sums them in f64.
pub fn draw(
    driver: &dyn Driver,
    logits: &Buffer<'_, f32>,
    [rows, vocab]: [usize; 2],
    uniforms: &Buffer<'_, f64>,
    ids: &Buffer<'_, u32>,
    sampler: &Sampler,
) -> Result<()> {
    kernels::DrawOfRows {
        x: logits.ptr(),
        uniforms: uniforms.ptr(),
        ids: ids.ptr(),
        width: vocab,
        temperature: sampler.temperature(),
        top_p: sampler.top_p(),
    }
    .launch(driver, [rows, 1, 1])
}

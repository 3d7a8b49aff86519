//! A case, and what the cases of all areas are built from.

use ndarray::ArrayView2;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::compute::comparison::Comparison;
use crate::compute::cuda::buffer::Buffer;
use crate::compute::cuda::driver::Driver;
use crate::compute::cuda::watched::Watched;
use crate::error::Result;
use crate::float::Float;

/// Runs a case on a GPU and compares the result with the CPU's.
type Check = dyn Fn(&Watched) -> Result<Comparison>;

/// One case.
pub struct Case {
    /// The name of its area.
    pub area: &'static str,
    /// What is checked, and on which shape.
    pub name: String,
    /// Runs the case.
    pub check: Box<Check>,
}

impl Case {
    /// Makes a case.
    pub fn new(
        area: &'static str,
        name: impl Into<String>,
        check: impl Fn(&Watched) -> Result<Comparison> + 'static,
    ) -> Self {
        Self {
            area,
            name: name.into(),
            check: Box::new(check),
        }
    }
}

/// Makes a generator of random numbers.
pub fn rng(seed: u64) -> ChaCha8Rng {
    ChaCha8Rng::seed_from_u64(seed)
}

/// Draws a roughly normal number: the sum of twelve uniform numbers.
pub fn normal(rng: &mut ChaCha8Rng) -> f32 {
    (0..12).map(|_| rng.r#gen::<f32>()).sum::<f32>() - 6.0
}

pub fn normals(rng: &mut ChaCha8Rng, count: usize) -> Vec<f32> {
    (0..count).map(|_| normal(rng)).collect()
}

pub fn upload<'d>(driver: &'d dyn Driver, values: &[f32]) -> Result<Buffer<'d, f32>> {
    Buffer::from_slice(driver, "rows", values)
}

/// Returns matrix `at` of `[..,rows,columns]`.
pub fn matrix(values: &[f32], at: usize, [rows, columns]: [usize; 2]) -> Result<ArrayView2<'_, f32>> {
    let size = rows * columns;
    Ok(ArrayView2::from_shape(
        (rows, columns),
        &values[at * size..(at + 1) * size],
    )?)
}

/// Rounds numbers to a type.
pub fn rounded(kind: Float, values: &[f32]) -> Vec<f32> {
    let (mut bytes, mut out) = (Vec::new(), vec![0.0; values.len()]);
    kind.write(values, &mut bytes);
    kind.read(&bytes, &mut out);
    out
}

/// Puts `place` in front of what a comparison's failure says.
pub fn within(mut of: Comparison, place: &str) -> Comparison {
    if let Some(failure) = &mut of.failure {
        failure.what = format!("{place}, {}", failure.what);
    }
    of
}

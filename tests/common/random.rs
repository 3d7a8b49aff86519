//! Random numbers and matrices.

use ndarray::Array2;
use rand::Rng;
use rand_chacha::ChaCha8Rng;

/// Draws a roughly normal number: the sum of twelve uniform numbers.
pub fn normal(rng: &mut ChaCha8Rng) -> f32 {
    (0..12).map(|_| rng.r#gen::<f32>()).sum::<f32>() - 6.0
}

pub fn normals(rng: &mut ChaCha8Rng, count: usize) -> Vec<f32> {
    (0..count).map(|_| normal(rng)).collect()
}

/// Draws a roughly normal number: the sum of four uniform numbers, scaled to unit variance.
pub fn noise(rng: &mut ChaCha8Rng) -> f32 {
    (0..4).map(|_| rng.gen_range(-1.0..1.0f32)).sum::<f32>() * 0.75f32.sqrt()
}

/// Draws a matrix of [`noise`].
pub fn matrix(rng: &mut ChaCha8Rng, rows: usize, columns: usize) -> Array2<f32> {
    Array2::from_shape_simple_fn((rows, columns), || noise(rng))
}

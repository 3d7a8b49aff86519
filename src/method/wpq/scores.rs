//! The choice of a step from estimated attention.

use ndarray::Array2;

use super::codebook::{BYTES, WordScores};
use crate::compute::layout::elements_mut;
use crate::compute::products::all_products;
use crate::compute::simd;
use crate::method::Step;
use crate::method::best::largest;

/// Returns the exact scores of a step's queries with the static set, which is attended in any case: `[r,positions]`.
pub(super) fn static_scores(step: &Step) -> Array2<f32> {
    let outside = |p: &usize| !step.candidates.contains(p);
    let positions: Vec<u32> = step.visible.clone().filter(outside).map(|p| p as u32).collect();
    let scale = 1.0 / (step.q_rope.ncols() as f32).sqrt();
    all_products(step.q_rope, scale, step.kv.keys(), &positions)
}

/// Estimates the scores of the keys with these codes, `[n,width]`: `[r,n]`.
///
/// # Numerics
/// f32, the bytes in order.
pub(super) fn estimate(words: &WordScores, codes: &[u8]) -> Array2<f32> {
    let r = words.mean.len();
    let width = words.bytes.len() / (BYTES * r);
    let mut scores = Array2::zeros((r, codes.len() / width));
    for (a, mut scores) in scores.rows_mut().into_iter().enumerate() {
        let table: Vec<f32> = words.bytes.iter().skip(a).step_by(r).copied().collect();
        for (score, code) in scores.iter_mut().zip(codes.chunks_exact(width)) {
            let cells = code.iter().zip(table.chunks_exact(BYTES));
            let sum = |sum, (byte, table): (&u8, &[f32])| sum + table[usize::from(*byte)];
            *score = cells.fold(words.mean[a], sum);
        }
    }
    scores
}

/// Chooses the `budget` candidates with the largest estimated probability, summed over the query heads; the lower place on
/// ties.
///
/// # Shapes
/// scores `[r,n]`, estimated; fixed `[r,positions]`, exact, of the static set.
///
/// # Numerics
/// Probabilities in f32, their sum over query heads in f64.
pub(super) fn choose(mut scores: Array2<f32>, mut fixed: Array2<f32>, budget: usize) -> Vec<u32> {
    let mut mass = vec![0.0f64; scores.ncols()];
    for (mut row, mut fixed) in scores.rows_mut().into_iter().zip(fixed.rows_mut()) {
        let (row, fixed) = (elements_mut(&mut row), elements_mut(&mut fixed));
        let max = simd::max(row).max(simd::max(fixed));
        simd::exp_shifted(row, max);
        simd::exp_shifted(fixed, max);
        let sum = simd::sum(row) + simd::sum(fixed);
        for (mass, x) in mass.iter_mut().zip(&*row) {
            *mass += f64::from(*x) / sum;
        }
    }
    largest(&mass, budget)
}

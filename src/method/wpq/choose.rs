//! The choice of a step from estimated attention.

use std::cell::Cell;

use ndarray::{Array2, ArrayView1};

use super::scores::WordScores;
use crate::compute::products::all_products;
use crate::compute::simd;
use crate::method::Step;
use crate::method::best::largest;

/// Scores whose exponentials are summed while they are in the cache.
const CHUNK: usize = 4096;
/// Keys that the second stage scores, per key of the budget.
pub(super) const REFINED: usize = 4;

/// Returns the exact scores of a step's queries with the static set, which is attended in any case: `[r,positions]`.
pub(super) fn static_scores(step: &Step) -> Array2<f32> {
    let outside = |p: &usize| !step.candidates.contains(p);
    let positions: Vec<u32> = step.visible.clone().filter(outside).map(|p| p as u32).collect();
    let scale = 1.0 / (step.q_rope.ncols() as f32).sqrt();
    all_products(step.q_rope, scale, step.kv.keys(), &positions)
}

/// Returns the number of keys that the second stage scores.
pub(super) fn refined(budget: usize, n: usize) -> usize {
    n.min(budget.saturating_mul(REFINED))
}

/// Chooses the `budget` candidates with the largest estimated probability, summed over the query heads; the lower place on
/// ties. With two stages, the best [`refined`] by the first are scored again with both, and chosen from.
///
/// # Shapes
/// codes `[n,width]` per stage; fixed `[r,positions]`, the exact scores of the static set.
///
/// # Numerics
/// Probabilities in f32, their denominators in f64.
pub(super) fn choose(
    words: &WordScores,
    codes: &[&[u8]],
    width: usize,
    fixed: &Array2<f32>,
    budget: usize,
) -> Vec<u32> {
    let n = codes[0].len() / width;
    let mut scratch = SCRATCH.take();
    let Scratch { scores, mass } = &mut scratch;
    let mut all: Vec<Softmax> = fixed.outer_iter().map(Softmax::new).collect();
    words.estimate(n, width, &codes[..1], scores);
    masses(&mut all, scores, mass);
    let mut places;
    if codes.len() == 1 {
        places = largest(mass, budget);
    } else {
        places = largest(mass, refined(budget, n));
        for (all, first) in all.iter_mut().zip(&*scores) {
            all.remove(first, &places);
        }
        let gathered: Vec<Vec<u8>> = codes.iter().map(|codes| gather(codes, width, &places)).collect();
        let gathered: Vec<&[u8]> = gathered.iter().map(Vec::as_slice).collect();
        words.estimate(places.len(), width, &gathered, scores);
        masses(&mut all, scores, mass);
        let best = largest(mass, budget).into_iter();
        places = best.map(|i| places[i as usize]).collect();
    }
    SCRATCH.set(scratch);
    places
}

/// What a step needs for a short time; kept, since fresh memory of this size costs more than what is computed there.
#[derive(Default)]
struct Scratch {
    /// Estimated scores, then their exponentials, `[r,n]`.
    scores: Vec<Vec<f32>>,
    /// Estimated probabilities, `[n]`.
    mass: Vec<f32>,
}

thread_local! {
    static SCRATCH: Cell<Scratch> = Cell::default();
}

/// Returns the codes, `[n,width]`, at some places.
fn gather(codes: &[u8], width: usize, places: &[u32]) -> Vec<u8> {
    fn rows<const W: usize>(codes: &[u8], places: &[u32]) -> Vec<u8> {
        let codes: &[[u8; W]] = codes.as_chunks().0;
        let rows: Vec<[u8; W]> = places.iter().map(|p| codes[*p as usize]).collect();
        rows.into_flattened()
    }
    match width {
        1 => rows::<1>(codes, places),
        2 => rows::<2>(codes, places),
        4 => rows::<4>(codes, places),
        _ => {
            let row = |p: &u32| &codes[*p as usize * width..][..width];
            places.iter().flat_map(row).copied().collect()
        }
    }
}

/// Adds the scores `[r,n]` to the softmax of each query head and turns them into its exponentials; writes their
/// probabilities, summed over the heads, to `mass`.
fn masses(all: &mut [Softmax], scores: &mut [Vec<f32>], mass: &mut Vec<f32>) {
    mass.clear();
    mass.resize(scores.first().map_or(0, Vec::len), 0.0);
    for (all, scores) in all.iter_mut().zip(scores) {
        all.add(scores);
        simd::axpy((1.0 / all.sum) as f32, scores, mass);
    }
}

/// The denominator of a softmax: the sum of `exp(score - shift)`.
struct Softmax {
    shift: f32,
    sum: f64,
}

impl Softmax {
    fn new(scores: ArrayView1<f32>) -> Self {
        let mut empty = Self {
            shift: f32::NEG_INFINITY,
            sum: 0.0,
        };
        empty.add(&mut scores.to_vec());
        empty
    }

    /// Adds scores, and turns each into `exp(score - shift)` with the new shift, the largest score so far.
    fn add(&mut self, scores: &mut [f32]) {
        let shift = simd::max(scores).max(self.shift);
        if shift > f32::NEG_INFINITY {
            self.sum *= f64::from(self.shift - shift).exp();
            self.shift = shift;
            for scores in scores.chunks_mut(CHUNK) {
                simd::exp_shifted(scores, shift);
                self.sum += simd::sum(scores);
            }
        }
    }

    /// Removes some of the exponentials of the scores that were added last.
    fn remove(&mut self, exponentials: &[f32], places: &[u32]) {
        let of = |p: &u32| f64::from(exponentials[*p as usize]);
        self.sum = (self.sum - places.iter().map(of).sum::<f64>()).max(0.0);
    }
}

//! The choice of a step from estimated attention.

use std::cell::Cell;

use ndarray::{Array2, ArrayView1};

use super::scores::{Levels, Places, WordScores};
use crate::compute::products::all_products;
use crate::compute::simd;
use crate::method::Step;
use crate::method::best::largest;

/// Scores per step of a sum of exponentials, so that they are still in the cache when they are summed.
const CHUNK: usize = 4096;
/// How many keys the second stage scores per key of the budget.
pub(super) const REFINED: usize = 4;

/// Returns the exact scores of a step's queries with the static set, which the step attends anyway: `[r,positions]`.
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

/// Chooses the `budget` candidates with the largest estimated probability, summed over the query heads. The lower place
/// wins a tie. With two stages, the best [`refined`] candidates by the first stage are scored again by both, and the
/// choice is made among them.
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
    let mut all: Vec<Softmax> = fixed.outer_iter().map(Softmax::new).collect();
    scratch.first_stage(words, n, codes[0], &mut all);
    let places = match codes {
        [_] => largest(&scratch.mass, budget),
        _ => {
            let places = largest(&scratch.mass, refined(budget, n));
            scratch.all_stages(words, codes, width, &places, &mut all);
            let best = largest(&scratch.mass, budget).into_iter();
            best.map(|i| places[i as usize]).collect()
        }
    };
    SCRATCH.set(scratch);
    places
}

/// Buffers that a step needs briefly. They are kept, because allocating this much memory anew costs more than the
/// computation on it.
#[derive(Default)]
struct Scratch {
    /// The estimated scores of one query head, as levels.
    levels: Levels,
    /// The estimated scores, and later their exponentials, `[r,n]`.
    scores: Vec<Vec<f32>>,
    /// The estimated probabilities, summed over the query heads, `[n]`.
    mass: Vec<f32>,
    /// The codes of the refined keys, `[refined,width]` per stage.
    gathered: Vec<Vec<u8>>,
}

impl Scratch {
    /// Scores all n keys by the first stage.
    fn first_stage(&mut self, words: &WordScores, n: usize, codes: &[u8], all: &mut [Softmax]) {
        self.scores.resize_with(all.len(), Vec::new);
        for (a, (all, scores)) in all.iter_mut().zip(&mut self.scores).enumerate() {
            if words.levels(a, n, codes, &mut self.levels) {
                all.add_levels(&mut self.levels, scores);
            } else {
                words.estimate(a, Places::All(n), &[codes], scores);
                all.add(scores);
            }
        }
        masses(all, &self.scores, &mut self.mass);
    }

    /// Scores the keys at some places by all stages, and replaces their scores by the first stage.
    fn all_stages(
        &mut self,
        words: &WordScores,
        codes: &[&[u8]],
        width: usize,
        places: &[u32],
        all: &mut [Softmax],
    ) {
        self.gathered.resize_with(codes.len(), Vec::new);
        let stages = codes.iter().zip(&mut self.gathered);
        stages.for_each(|(codes, gathered)| gather(codes, width, places, gathered));
        let gathered: Vec<&[u8]> = self.gathered.iter().map(Vec::as_slice).collect();
        for (a, (all, scores)) in all.iter_mut().zip(&mut self.scores).enumerate() {
            all.remove(scores, places);
            words.estimate(a, Places::These(places), &gathered, scores);
            all.add(scores);
        }
        masses(all, &self.scores, &mut self.mass);
    }
}

thread_local! {
    static SCRATCH: Cell<Scratch> = Cell::default();
}

/// Writes the codes, `[n,width]`, of the keys at some places to `out`.
fn gather(codes: &[u8], width: usize, places: &[u32], out: &mut Vec<u8>) {
    fn rows<const W: usize>(codes: &[u8], places: &[u32], out: &mut [u8]) {
        let codes: &[[u8; W]] = codes.as_chunks().0;
        let rows: &mut [[u8; W]] = out.as_chunks_mut().0;
        rows.iter_mut()
            .zip(places)
            .for_each(|(row, p)| *row = codes[*p as usize]);
    }
    out.resize(places.len() * width, 0);
    match width {
        1 => rows::<1>(codes, places, out),
        2 => rows::<2>(codes, places, out),
        4 => rows::<4>(codes, places, out),
        _ => {
            let rows = out.chunks_exact_mut(width).zip(places);
            rows.for_each(|(row, p)| row.copy_from_slice(&codes[*p as usize * width..][..width]));
        }
    }
}

/// Writes the probabilities, summed over the query heads, to `mass`; they come from the exponentials that were added
/// last, `[r,n]`.
fn masses(all: &[Softmax], exponentials: &[Vec<f32>], mass: &mut Vec<f32>) {
    mass.clear();
    mass.resize(exponentials.first().map_or(0, Vec::len), 0.0);
    for (all, exponentials) in all.iter().zip(exponentials) {
        simd::axpy((1.0 / all.sum) as f32, exponentials, mass);
    }
}

/// A softmax's denominator: the sum of `exp(score - shift)`.
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

    /// Adds scores, and replaces each by `exp(score - shift)`. The new shift is the largest score so far.
    fn add(&mut self, scores: &mut [f32]) {
        if self.shift_to(simd::max(scores)) {
            for scores in scores.chunks_mut(CHUNK) {
                simd::exp_shifted(scores, self.shift);
                self.sum += simd::sum(scores);
            }
        }
    }

    /// Adds scores that are given as levels, and writes to `out` what [`Self::add`] would leave in their place.
    fn add_levels(&mut self, levels: &mut Levels, out: &mut Vec<f32>) {
        let scores = &mut levels.scores[..=usize::from(levels.highest)];
        let is_shifted = self.shift_to(scores[scores.len() - 1]);
        if is_shifted {
            simd::exp_shifted(scores, self.shift);
        }
        out.clear();
        levels.write(out);
        if is_shifted {
            let chunks = out.chunks(CHUNK);
            chunks.for_each(|exponentials| self.sum += simd::sum(exponentials));
        }
    }

    /// Makes `highest` the shift if it is larger than all scores so far. Returns whether there is a shift.
    fn shift_to(&mut self, highest: f32) -> bool {
        let shift = highest.max(self.shift);
        let is_shifted = shift > f32::NEG_INFINITY;
        if is_shifted {
            self.sum *= f64::from(self.shift - shift).exp();
            self.shift = shift;
        }
        is_shifted
    }

    /// Removes the exponentials at some places from the sum; the exponentials are those that were added last.
    fn remove(&mut self, exponentials: &[f32], places: &[u32]) {
        // Several partial sums, so that no addition waits for the one before it.
        let mut sums = [0.0; 8];
        let (blocks, rest) = places.as_chunks::<8>();
        for places in blocks.iter().map(<[u32; 8]>::as_slice).chain([rest]) {
            for (sum, place) in sums.iter_mut().zip(places) {
                *sum += f64::from(exponentials[*place as usize]);
            }
        }
        self.sum = (self.sum - sums.iter().sum::<f64>()).max(0.0);
    }
}

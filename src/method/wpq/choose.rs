//! The choice of a step from estimated attention.

use std::cell::Cell;

use ndarray::{Array2, ArrayView1};

use super::codebook::in_bits;
use super::scores::{CHUNK, WordScores};
use super::waves::{self, LINES_AT_ONCE};
use crate::compute::blocks::Row;
use crate::compute::masks;
use crate::compute::products::all_products;
use crate::compute::simd;
use crate::method::Step;
use crate::method::best::{largest, largest_mask};

/// Powers whose sum is in f32, before it is added to others in f64.
const SUMMED: usize = 1024;
/// How many keys the second stage scores per key of the budget.
pub(super) const REFINED: usize = 4;

/// Returns the exact scores, in bits, of a step's queries with the static set, which the step attends anyway:
/// `[r,positions]`.
pub(super) fn static_scores(step: &Step) -> Array2<f32> {
    let (visible, candidates) = (&step.visible, &step.candidates);
    let outside = (visible.start..candidates.start).chain(candidates.end..visible.end);
    let positions: Vec<u32> = outside.map(|p| p as u32).collect();
    all_products(
        step.q_rope,
        in_bits(step.q_rope.ncols()),
        step.kv.keys(),
        &positions,
    )
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
    mut words: WordScores,
    codes: &[&[u8]],
    width: usize,
    fixed: &Array2<f32>,
    budget: usize,
) -> Vec<u32> {
    let n = codes[0].len() / width;
    let mut scratch = SCRATCH.take();
    let mut all: Vec<Softmax> = fixed.outer_iter().map(Softmax::new).collect();
    scratch.first_stage(&mut words, n, codes[0], width, &mut all);
    let places = match codes {
        [_, second] => {
            let mask = largest_mask(&scratch.mass, refined(budget, n));
            let places = masks::places(&mask, 0);
            scratch.second_stage(&mut words, second, width, (&mask, &places), &mut all);
            let best = largest(&scratch.mass, budget).into_iter();
            best.map(|i| places[i as usize]).collect()
        }
        _ => largest(&scratch.mass, budget),
    };
    SCRATCH.set(scratch);
    places
}

/// Buffers that a step needs briefly. They are kept, because allocating this much memory anew costs more than the
/// computation on it.
#[derive(Default)]
struct Scratch {
    /// The powers of two of all keys' scores by the first stage, `[r,n]`, with room for whole rows.
    first: Vec<Vec<Row>>,
    /// Those of the refined keys' scores by both stages, `[r,refined]`.
    both: Vec<Vec<f32>>,
    /// The powers of one query head by the first stage, of the refined keys.
    own: Vec<f32>,
    /// The estimated probabilities, summed over the query heads, of the keys that were scored last.
    mass: Vec<f32>,
    /// The codes of the refined keys, `[refined,width]`.
    codes: Vec<u8>,
}

impl Scratch {
    /// Scores all n keys by the first stage.
    fn first_stage(
        &mut self,
        words: &mut WordScores,
        n: usize,
        codes: &[u8],
        width: usize,
        all: &mut [Softmax],
    ) {
        self.first.resize_with(all.len(), Vec::new);
        let rows = waves::rows(n);
        self.first
            .iter_mut()
            .for_each(|powers| powers.resize(rows, Row::ZERO));
        for (start, row) in (0..n).step_by(CHUNK).zip((0..rows).step_by(LINES_AT_ONCE)) {
            let keys = CHUNK.min(n - start);
            let codes = &codes[start * width..][..keys * width];
            for (a, (all, powers)) in all.iter_mut().zip(&mut self.first).enumerate() {
                let (before, now) = powers.split_at_mut(row);
                let now = &mut now[..waves::rows(keys)];
                let highest = words.first_stage(a, keys, codes, now);
                all.add(
                    Row::values_mut(before),
                    &mut Row::values_mut(now)[..keys],
                    highest,
                );
            }
        }
        let powers = self.first.iter().map(|powers| &Row::values(powers)[..n]);
        masses(all, n, powers, &mut self.mass);
    }

    /// Adds the second stage to the scores of the keys in a set, given as a mask and as a list.
    fn second_stage(
        &mut self,
        words: &mut WordScores,
        codes: &[u8],
        width: usize,
        (mask, places): (&[u64], &[u32]),
        all: &mut [Softmax],
    ) {
        let n = places.len();
        gather(codes, width, (mask, places), &mut self.codes);
        self.own.resize(n + masks::ROOM, 0.0);
        self.both.resize_with(all.len(), Vec::new);
        let powers = self.first.iter().zip(&mut self.both);
        for (a, (all, (first, both))) in all.iter_mut().zip(powers).enumerate() {
            masks::pick(
                bytemuck::cast_slice(first),
                mask,
                bytemuck::cast_slice_mut(&mut self.own),
            );
            both.resize(n, 0.0);
            let highest = words.second_stage(a, &self.codes[..n * width], both);
            all.raise(&self.own[..n], both, highest);
        }
        masses(all, n, self.both.iter().map(Vec::as_slice), &mut self.mass);
    }
}

thread_local! {
    static SCRATCH: Cell<Scratch> = Cell::default();
}

/// Writes the codes, `[n,width]`, of the keys in a set, given as a mask and as a list, to `out`, with room for more.
fn gather(codes: &[u8], width: usize, (mask, places): (&[u64], &[u32]), out: &mut Vec<u8>) {
    out.resize((places.len() + masks::ROOM) * width, 0);
    if width == 4 {
        return masks::pick(codes.as_chunks().0, mask, out.as_chunks_mut().0);
    }
    let rows = out.chunks_exact_mut(width).zip(places);
    rows.for_each(|(row, p)| row.copy_from_slice(&codes[*p as usize * width..][..width]));
}

/// Writes the probabilities of n keys, summed over the query heads, to `mass`; they come from powers, `[n]` for each
/// query head.
fn masses<'a>(
    all: &[Softmax],
    n: usize,
    powers: impl Iterator<Item = &'a [f32]> + Clone,
    mass: &mut Vec<f32>,
) {
    mass.resize(n, 0.0);
    for (i, mass) in mass.chunks_mut(CHUNK).enumerate() {
        mass.fill(0.0);
        for (all, powers) in all.iter().zip(powers.clone()) {
            simd::axpy(all.share(), &powers[i * CHUNK..][..mass.len()], mass);
        }
    }
}

/// A softmax's denominator: the sum of `2^(score - shift)`.
struct Softmax {
    /// At least as large as every score.
    shift: i32,
    sum: f64,
}

impl Softmax {
    fn new(scores: ArrayView1<f32>) -> Self {
        let mut empty = Self {
            shift: i32::MIN / 2,
            sum: 0.0,
        };
        let mut scores = scores.to_vec();
        let highest = simd::max(&scores);
        empty.add(&mut [], &mut scores, highest);
        empty
    }

    /// Adds scores, of which `highest` is the largest, and replaces each by `2^(score - shift)`. If one exceeds the
    /// shift, the shift rises, and the powers `before`, which it applies to as well, are scaled.
    fn add(&mut self, before: &mut [f32], scores: &mut [f32], highest: f32) {
        let shift = self.shift.max(highest.ceil() as i32);
        if shift > self.shift {
            let factor = (f64::from(self.shift) - f64::from(shift)).exp2();
            simd::scale(before, factor as f32);
            (self.sum, self.shift) = (self.sum * factor, shift);
        }
        for scores in scores.chunks_mut(SUMMED) {
            self.sum += f64::from(simd::exp2_shifted(scores, self.shift));
        }
    }

    /// Adds `raises`, of which `highest` is the largest, to scores whose powers are `own`, and replaces each by its new
    /// score's power.
    fn raise(&mut self, own: &[f32], raises: &mut [f32], highest: f32) {
        let others = (self.sum - simd::sum(own)).max(0.0);
        let shift = highest.ceil() as i32;
        simd::exp2_shifted(raises, shift);
        raises.iter_mut().zip(own).for_each(|(power, own)| *power *= own);
        self.sum = others * (-f64::from(shift)).exp2() + simd::sum(raises);
    }

    /// Returns what turns a power into a probability.
    fn share(&self) -> f32 {
        (1.0 / self.sum).min(f64::from(f32::MAX)) as f32
    }
}

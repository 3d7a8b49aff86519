//! The choice of a step from estimated attention.

use std::cell::Cell;

use ndarray::{Array2, ArrayView1};

use super::codebook::in_bits;
use super::scores::{CHUNK, WordScores};
use super::section::STAGES;
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
/// wins a tie. The best [`refined`] candidates by the first stage are scored again by both, and the choice is made among
/// them. Returns the choice and the refined candidates.
///
/// # Shapes
/// codes `[n,width]` per stage; fixed `[r,positions]`, the exact scores of the static set.
///
/// # Numerics
/// Probabilities in f32, their denominators in f64, from sums of [`SUMMED`] powers in f32.
pub(super) fn choose(
    mut words: WordScores,
    [first, second]: [&[u8]; STAGES],
    width: usize,
    fixed: &Array2<f32>,
    budget: usize,
) -> (Vec<u32>, Vec<u32>) {
    let n = first.len() / width;
    let mut scratch = SCRATCH.take();
    let mut all: Vec<Softmax> = fixed.outer_iter().map(Softmax::new).collect();
    scratch.first_stage(&mut words, n, first, width, &mut all);
    let mask = largest_mask(&scratch.mass, refined(budget, n));
    let places = masks::places(&mask, 0);
    scratch.second_stage(&mut words, second, width, (&mask, &places), &mut all);
    let best = largest(&scratch.mass, budget).into_iter();
    let chosen = best.map(|i| places[i as usize]).collect();
    SCRATCH.set(scratch);
    (chosen, places)
}

/// Returns the bytes of a step's buffers: for each of `n` candidates a power per query head and a probability; for each
/// refined one its place and its code besides, its powers by both stages, and one head's by the first.
pub(super) fn scratch_bytes(query_heads: usize, n: usize, refined: usize, width: usize) -> usize {
    4 * n * (query_heads + 1) + refined * (4 * (query_heads + 3) + width)
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

#[cfg(test)]
mod tests {
    use ndarray::{Array1, Array2, Array4, ArrayView2};

    use super::*;
    use crate::compute::blocks::TILE;
    use crate::method::wpq::{HeadCodebook, MeanPath};
    use crate::model::rope::{Rope, RopeConfig, RopeScaling};
    use crate::testing::values;

    const D: usize = 16;
    /// The first candidate.
    const FIRST: usize = 4;

    fn matrix(rows: usize, seed: u32, scale: f32) -> Array2<f32> {
        let values = values(rows * D, seed).into_iter().map(|x| x * scale);
        Array2::from_shape_vec((rows, D), values.collect()).unwrap()
    }

    /// A quantiser in the metric of the plain dot product.
    fn codebook(words: usize, has_path: bool) -> HeadCodebook {
        let shape = (STAGES, 8, words, D / 8);
        let words = Array4::from_shape_vec(shape, values(STAGES * words * D, 1)).unwrap();
        let eye = Array2::eye(D);
        let mean = Array1::from(values(D, 2));
        let head = HeadCodebook::new(words.view(), mean.view(), eye.view(), eye.view()).unwrap();
        let config = RopeConfig {
            theta: 1e4,
            scaling: RopeScaling::Default,
        };
        match has_path {
            true => head.around(MeanPath::new(values(D, 3).into(), &Rope::new(&config, D))),
            false => head,
        }
    }

    /// The scores of all keys by the first stage and by both stages, `[r][n]` each.
    fn scores(
        head: &HeadCodebook,
        queries: ArrayView2<f32>,
        codes: &[Vec<u8>; STAGES],
        n: usize,
    ) -> [Vec<Vec<f64>>; 2] {
        let mut words = head.scores(queries, FIRST);
        let of = |a: usize| {
            let mut path = vec![Row::ZERO; waves::rows(n)];
            if let Some(walks) = &mut words.path {
                path.chunks_mut(TILE).for_each(|path| walks.advance(a, path));
            }
            let start = Row::values(&path).iter().take(n);
            let mut sums: Vec<f64> = start.map(|x| f64::from(words.mean[a]) + f64::from(*x)).collect();
            let mut by_stage = words.stages.iter().zip(codes).map(|(tables, codes)| {
                for (sum, code) in sums.iter_mut().zip(codes.chunks_exact(head.width())) {
                    let mut score = [0.0];
                    tables[a].add(code, 0.0, &mut words.sums, &mut score);
                    *sum += f64::from(score[0]);
                }
                sums.clone()
            });
            [by_stage.next().unwrap(), by_stage.next().unwrap()]
        };
        let each: Vec<[Vec<f64>; 2]> = (0..queries.nrows()).map(of).collect();
        [0, 1].map(|stage| each.iter().map(|of| of[stage].clone()).collect())
    }

    /// The places of the largest probabilities among some places, summed over the query heads.
    fn best(scores: &[Vec<f64>], fixed: &Array2<f32>, among: &[u32], count: usize) -> Vec<u32> {
        let mut mass = vec![0.0; scores[0].len()];
        for (scores, fixed) in scores.iter().zip(fixed.rows()) {
            let fixed = fixed.iter().map(|x| f64::from(*x).exp2());
            let sum: f64 = scores.iter().map(|x| x.exp2()).chain(fixed).sum();
            mass.iter_mut()
                .zip(scores)
                .for_each(|(mass, x)| *mass += x.exp2() / sum);
        }
        let mut order = among.to_vec();
        order.sort_by(|a, b| mass[*b as usize].total_cmp(&mass[*a as usize]).then(a.cmp(b)));
        let gap = mass[order[count - 1] as usize] / mass[order[count] as usize] - 1.0;
        assert!(
            gap == 0.0 || gap > 1e-5,
            "the choice hangs on the rounding: {gap}"
        );
        order.truncate(count);
        order.sort_unstable();
        order
    }

    /// The scores grow along the positions, so that every chunk raises the shift.
    #[test]
    fn a_choice_over_several_chunks_is_that_of_a_plain_softmax() {
        let (n, r, budget) = (2 * CHUNK + 700, 3, 300);
        let queries = matrix(r, 4, 4.0);
        let mut keys = matrix(n, 5, 1.0);
        for (i, mut key) in keys.rows_mut().into_iter().enumerate() {
            key *= 1.0 + i as f32 / CHUNK as f32;
        }
        let fixed = Array2::from_shape_vec((r, 5), values(r * 5, 6)).unwrap();
        for (words, has_path) in [(16, false), (16, true), (256, false), (256, true)] {
            let head = codebook(words, has_path);
            let codes = head.encode(keys.view(), FIRST);
            let (chosen, both) = choose(
                head.scores(queries.view(), FIRST),
                codes.each_ref().map(Vec::as_slice),
                head.width(),
                &fixed,
                budget,
            );
            let [first, last] = scores(&head, queries.view(), &codes, n);
            let highest = |scores: &[f64]| scores.iter().copied().fold(f64::MIN, f64::max).ceil();
            let rises = first.iter().any(|scores| {
                let chunks: Vec<f64> = scores.chunks(CHUNK).map(highest).collect();
                chunks[0] < chunks[1]
            });
            assert!(rises, "{words} {has_path}");
            let all: Vec<u32> = (0..n as u32).collect();
            let refined = best(&first, &fixed, &all, REFINED * budget);
            assert_eq!(both, refined, "{words} {has_path}");
            // The keys that are not refined keep their scores by the first stage.
            let mut mixed = first.clone();
            for (mixed, last) in mixed.iter_mut().zip(&last) {
                refined
                    .iter()
                    .for_each(|p| mixed[*p as usize] = last[*p as usize]);
            }
            let expected = best(&mixed, &fixed, &refined, budget);
            assert_eq!(chosen, expected, "{words} {has_path}");
        }
    }
}

//! The choice of a step from estimated attention.

use std::cell::RefCell;

use ndarray::Array2;

use super::codebook::in_bits;
use super::scores::{CHUNK, WordScores};
use super::section::STAGES;
use super::waves::{self, LINES_AT_ONCE};
use crate::compute::blocks::Row;
use crate::compute::masks;
use crate::compute::products::all_products;
use crate::compute::{simd, team};
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
/// them. Returns the choice, the best `best` of it, and the refined candidates.
///
/// Threads share the candidates in chunks of [`CHUNK`]; their number does not change a bit of the result.
///
/// # Shapes
/// codes `[n,width]` per stage; fixed `[r,positions]`, the exact scores of the static set.
///
/// # Numerics
/// Probabilities in f32, their denominators in f64, from sums of [`SUMMED`] powers in f32.
pub(super) fn choose(
    words: &WordScores,
    [first, second]: [&[u8]; STAGES],
    width: usize,
    fixed: &Array2<f32>,
    budget: usize,
    best: usize,
) -> [Vec<u32>; 3] {
    let n = first.len() / width;
    let mut scratch = Scratch::take();
    let Scratch { chunks, mass } = &mut scratch;
    let count = n.div_ceil(CHUNK);
    if chunks.len() < count {
        chunks.resize_with(count, Chunk::default);
    }
    let chunks = &mut chunks[..count];
    let each = chunks.iter_mut().zip(first.chunks(CHUNK * width)).enumerate();
    team::for_each(each.collect(), |(i, (chunk, codes))| {
        chunk.first_stage(words, i, codes, width);
    });
    let of_fixed = fixed
        .outer_iter()
        .map(|scores| Powers::from_scores(&mut scores.to_vec()));
    let mut all: Vec<Powers> = of_fixed.collect();
    chunks.iter().for_each(|chunk| add_each(&mut all, &chunk.first));
    mass.resize(n, 0.0);
    let each = chunks.iter_mut().zip(mass.chunks_mut(CHUNK));
    team::for_each(each.collect(), |(chunk, mass)| chunk.masses(&all, mass));

    let mask = largest_mask(mass, refined(budget, n));
    let parts = mask.chunks(CHUNK / masks::WORD).zip(second.chunks(CHUNK * width));
    let each = chunks.iter_mut().zip(parts);
    team::for_each(each.collect(), |(chunk, (mask, codes))| {
        chunk.second_stage(words, mask, codes, width);
    });
    // The refined candidates have new scores; all others keep theirs.
    for chunk in &*chunks {
        all.iter_mut()
            .zip(&chunk.own)
            .for_each(|(all, own)| all.subtract(own));
    }
    chunks.iter().for_each(|chunk| add_each(&mut all, &chunk.both));
    mass.clear();
    chunks
        .iter_mut()
        .for_each(|chunk| chunk.refined_masses(&all, mass));

    let places = masks::places(&mask, 0);
    let [chosen, best] = [budget, best].map(|count| {
        let best = largest(mass, count).into_iter();
        best.map(|i| places[i as usize]).collect()
    });
    scratch.keep();
    [chosen, best, places]
}

/// Returns the bytes of a step's buffers: for each of `n` candidates a power per query head and a probability; for each
/// refined one its code, a power per query head by each stage, and its place and probability.
pub(super) fn scratch_bytes(query_heads: usize, n: usize, refined: usize, width: usize) -> usize {
    4 * n * (query_heads + 1) + refined * (4 * (2 * query_heads + 2) + width)
}

/// Buffers that a step needs briefly. They are kept, because allocating this much memory anew costs more than the
/// computation on it.
#[derive(Default)]
struct Scratch {
    chunks: Vec<Chunk>,
    /// The estimated probabilities, summed over the query heads, of the keys that were scored last.
    mass: Vec<f32>,
}

thread_local! {
    /// A thread that waits for others may begin another choice, so that it needs several.
    static SCRATCH: RefCell<Vec<Scratch>> = const { RefCell::new(Vec::new()) };
}

impl Scratch {
    fn take() -> Self {
        SCRATCH.with_borrow_mut(Vec::pop).unwrap_or_default()
    }

    fn keep(self) {
        SCRATCH.with_borrow_mut(|kept| kept.push(self));
    }
}

/// At most [`CHUNK`] consecutive candidates.
#[derive(Default)]
struct Chunk {
    /// The powers of two of the scores by the first stage, `[r,LINES_AT_ONCE]` rows.
    powers: Vec<Row>,
    /// The sums of these powers, by query head.
    first: Vec<Powers>,
    /// Number of refined candidates.
    refined: usize,
    /// Their codes of the second stage, `[refined,width]`.
    codes: Vec<u8>,
    /// Their powers by the first stage, `[r]` times `[refined]` with room for more.
    picked: Vec<f32>,
    /// The sums of these powers.
    own: Vec<Powers>,
    /// Their powers by both stages, `[r,refined]`.
    raised: Vec<f32>,
    /// The sums of these powers.
    both: Vec<Powers>,
}

impl Chunk {
    /// Scores the candidates, with the codes `[n,width]`, by the first stage.
    fn first_stage(&mut self, words: &WordScores, number: usize, codes: &[u8], width: usize) {
        let (r, n) = (words.mean.len(), codes.len() / width);
        self.powers.resize(r * LINES_AT_ONCE, Row::ZERO);
        self.first.clear();
        for (a, rows) in self.powers.chunks_exact_mut(LINES_AT_ONCE).enumerate() {
            let rows = &mut rows[..waves::rows(n)];
            let highest = words.first_stage(a, number, codes, n, rows);
            self.first
                .push(Powers::below(&mut Row::values_mut(rows)[..n], highest));
        }
    }

    /// Writes the probabilities of the candidates, summed over the query heads, to `mass` `[n]`.
    fn masses(&self, all: &[Powers], mass: &mut [f32]) {
        let n = mass.len();
        let powers = self.powers.chunks_exact(LINES_AT_ONCE);
        let powers = powers.map(|rows| &Row::values(rows)[..n]);
        sum_shares(all, &self.first, powers, mass);
    }

    /// Scores the candidates of a set, given as a mask, by both stages.
    fn second_stage(&mut self, words: &WordScores, mask: &[u64], codes: &[u8], width: usize) {
        let r = words.mean.len();
        let n = mask.iter().map(|word| word.count_ones() as usize).sum();
        self.refined = n;
        gather(codes, width, mask, n, &mut self.codes);
        let room = n + masks::ROOM;
        self.picked.resize(r * room, 0.0);
        self.raised.resize(r * n, 0.0);
        self.own.clear();
        self.both.clear();
        if n == 0 {
            return;
        }
        let keys = codes.len() / width;
        let each = self
            .powers
            .chunks_exact(LINES_AT_ONCE)
            .zip(self.picked.chunks_exact_mut(room));
        for (a, ((powers, picked), raised)) in each.zip(self.raised.chunks_exact_mut(n)).enumerate() {
            let powers = &Row::values(powers)[..keys];
            masks::pick(
                bytemuck::cast_slice(powers),
                mask,
                bytemuck::cast_slice_mut(picked),
            );
            let picked = &picked[..n];
            let shift = self.first[a].shift;
            self.own.push(Powers {
                shift,
                sum: simd::sum(picked),
            });
            let highest = words.second_stage(a, &self.codes[..n * width], raised);
            let raise = Powers::below(raised, highest).shift;
            simd::multiply(picked, raised);
            let shift = shift.saturating_add(raise);
            self.both.push(Powers {
                shift,
                sum: simd::sum(raised),
            });
        }
    }

    /// Appends the probabilities of the refined candidates, summed over the query heads, to `mass`.
    fn refined_masses(&self, all: &[Powers], mass: &mut Vec<f32>) {
        let first = mass.len();
        mass.resize(first + self.refined, 0.0);
        if self.refined > 0 {
            sum_shares(
                all,
                &self.both,
                self.raised.chunks_exact(self.refined),
                &mut mass[first..],
            );
        }
    }
}

/// Writes the codes, `[n,width]`, of the keys in a set, given as a mask, to `out`, with room for more.
fn gather(codes: &[u8], width: usize, mask: &[u64], n: usize, out: &mut Vec<u8>) {
    out.resize((n + masks::ROOM) * width, 0);
    if width == 4 {
        return masks::pick(codes.as_chunks().0, mask, out.as_chunks_mut().0);
    }
    let rows = out.chunks_exact_mut(width).zip(masks::places(mask, 0));
    rows.for_each(|(row, p)| row.copy_from_slice(&codes[p as usize * width..][..width]));
}

/// Writes to `mass` the powers of each query head, divided by the sum of `all` of its powers, and summed over the heads. The
/// powers have the shifts of `own`.
fn sum_shares<'a>(all: &[Powers], own: &[Powers], powers: impl Iterator<Item = &'a [f32]>, mass: &mut [f32]) {
    mass.fill(0.0);
    for ((all, own), powers) in all.iter().zip(own).zip(powers) {
        simd::axpy(all.share(own.shift), powers, mass);
    }
}

fn add_each(all: &mut [Powers], more: &[Powers]) {
    all.iter_mut().zip(more).for_each(|(all, more)| all.add(more));
}

/// The sum of many powers of two: `sum 2^shift`.
#[derive(Clone, Copy)]
struct Powers {
    /// About the largest exponent.
    shift: i32,
    sum: f64,
}

impl Powers {
    /// Sums the powers of scores, and replaces each by `2^(score - shift)`.
    fn from_scores(scores: &mut [f32]) -> Self {
        let highest = simd::max(scores);
        Self::below(scores, highest)
    }

    /// Sums the powers of scores, of which `highest` is the largest, and replaces each by `2^(score - shift)`.
    fn below(scores: &mut [f32], highest: f32) -> Self {
        // Of no scores, the highest is negative infinity.
        let shift = (highest.ceil() as i32).max(i32::MIN / 4);
        let parts = scores.chunks_mut(SUMMED);
        let sum = parts
            .map(|scores| f64::from(simd::exp2_shifted(scores, shift)))
            .sum();
        Self { shift, sum }
    }

    /// Adds the powers of another sum.
    fn add(&mut self, other: &Self) {
        let shift = self.shift.max(other.shift);
        self.sum = self.at(shift) + other.at(shift);
        self.shift = shift;
    }

    /// Takes powers out of the sum. Rounding may leave less than nothing, which counts as nothing.
    fn subtract(&mut self, other: &Self) {
        self.sum = (self.sum - other.at(self.shift)).max(0.0);
    }

    /// Returns the sum divided by `2^shift`.
    fn at(&self, shift: i32) -> f64 {
        self.sum * (f64::from(self.shift) - f64::from(shift)).exp2()
    }

    /// Returns what turns a power, divided by `2^shift`, into a share of the sum.
    fn share(&self, shift: i32) -> f32 {
        (1.0 / self.at(shift)).min(f64::from(f32::MAX)) as f32
    }
}

#[cfg(test)]
mod tests {
    use ndarray::{Array1, Array4, ArrayView2};

    use super::*;
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
        if has_path {
            head.around(MeanPath::new(values(D, 3).into(), &Rope::new(&config, D)))
        } else {
            head
        }
    }

    /// The scores of all keys by the first stage and by both stages, `[r][n]` each.
    fn scores(
        head: &HeadCodebook,
        queries: ArrayView2<f32>,
        codes: &[Vec<u8>; STAGES],
        n: usize,
    ) -> [Vec<Vec<f64>>; 2] {
        let words = head.scores(queries, FIRST..FIRST + n);
        let of = |a: usize| {
            let mut path = vec![Row::ZERO; waves::rows(n)];
            if let Some(walks) = &words.path {
                let parts = path.chunks_mut(LINES_AT_ONCE).enumerate();
                parts.for_each(|(part, path)| walks.scores(a, part, path));
            }
            let start = Row::values(&path).iter().take(n);
            let mut sums: Vec<f64> = start.map(|x| f64::from(words.mean[a]) + f64::from(*x)).collect();
            let mut by_stage = words.stages.iter().zip(codes).map(|(tables, codes)| {
                for (sum, code) in sums.iter_mut().zip(codes.chunks_exact(head.width())) {
                    let mut score = [0.0];
                    tables[a].scores(code, 0.0, false, &mut score);
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

    /// A decode step encodes one key in a loop of its own.
    #[test]
    fn a_key_alone_has_the_code_that_it_has_among_others() {
        let keys = matrix(300, 7, 1.0);
        for (words, has_path) in [(16, false), (16, true), (256, false), (256, true)] {
            let head = codebook(words, has_path);
            let all = head.encode(keys.view(), FIRST);
            for (i, key) in keys.rows().into_iter().enumerate() {
                let alone = head.encode(key.insert_axis(ndarray::Axis(0)), FIRST + i);
                for (alone, all) in alone.iter().zip(&all) {
                    let row = &all[i * head.width()..][..head.width()];
                    assert_eq!(alone, row, "{words} {has_path} {i}");
                }
            }
        }
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
            let [chosen, of_chosen, both] = choose(
                &head.scores(queries.view(), FIRST..FIRST + n),
                codes.each_ref().map(Vec::as_slice),
                head.width(),
                &fixed,
                budget,
                budget / 4,
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
            let expected = best(&mixed, &fixed, &refined, budget / 4);
            assert_eq!(of_chosen, expected, "{words} {has_path}");
        }
    }
}

//! Signs of randomly rotated keys, without any data: the first stage of ParisKV, arXiv 2602.07721.
//!
//! A random rotation, the same for all heads, spreads every key over all channels: each channel gets a random sign,
//! and a Hadamard transform follows. Eight neighbouring channels of a rotated key form a block, and the signs in a
//! block are one of 256 patterns, the block's fixed words. A key's code is its pattern in each block: one bit per
//! channel. There is nothing to fit, and the length of a key plays no role.
//!
//! Decoding: in each block, the patterns are ordered by their products with the rotated mean query of the group. The
//! best patterns, as many as it takes to hold 5, 15, 30, 50, 75 and 100% of a share of the candidates ([`share`]),
//! form six tiers, each a part of the next. A key has one vote per block and tier that contains its pattern. The
//! candidates with the most votes are chosen.
//!
//! Where we differ from the paper and its code: there, the votes only preselect a tenth to a half of the positions,
//! and a second stage ranks these by codes of 4 bits per channel with a weight per block, 48 bytes per preselected key
//! of 64 channels; here, the votes choose. They count the keys of a pattern when positions enter the index, in batches
//! of hundreds; here, the counts are those of a step's candidates. Of patterns with equal products the lower number
//! comes first, and of equal votes the lower position wins; their sorts do not say. Their code is for 128 channels. If
//! the number of channels is no power of two, the transform here acts on runs of channels whose length is the largest
//! power of two that divides it, and a last block of fewer than eight channels has fewer patterns.

use std::ops::Range;
use std::sync::Arc;

use ndarray::{ArrayView2, s};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::bench::{Bench, BenchParams, Fill, NewHead, TimedLayer};
use super::best::by_score;
use super::declaration::{Declaration, InVerdict};
use super::{Place, Prompt, Reads, Retriever, Selection, Step, everything};
use crate::error::Result;
use crate::kv::KvType;
use crate::kv::lines::grow;

/// The declaration of `randsign`.
pub static METHOD: Declaration = Declaration {
    name: "randsign",
    help: "Positions ranked by votes over the signs of randomly rotated keys (first stage of ParisKV, arXiv 2602.07721)",
    section: None,
    verdict: InVerdict::IfCalibrated,
    prepare: |ask| {
        let rotation = Arc::new(RandomRotation::new(ask.sizes.head_dim, ask.seed));
        Ok(Box::new(move |_: &Place| RandSign::new(Arc::clone(&rotation))))
    },
    bench: Some(&RandSignBench),
};

/// Benchmarks on the signs of random keys.
struct RandSignBench;

impl Bench for RandSignBench {
    fn reads_rows(&self, _: KvType) -> bool {
        false
    }

    fn heads(&self, layer: &TimedLayer, _: &BenchParams) -> Result<Box<NewHead>> {
        let rotation = Arc::new(RandomRotation::new(layer.shape.head_dim, layer.seed));
        Ok(Box::new(move |_, _| {
            (Box::new(RandSign::new(Arc::clone(&rotation))), Fill::Keys)
        }))
    }
}

/// Channels of a block.
pub const BLOCK: usize = 8;
/// Sign patterns of a block.
pub const PATTERNS: usize = 1 << BLOCK;
/// What part of the share each tier holds, in percent.
pub const TIERS: [usize; 6] = [5, 15, 30, 50, 75, 100];

/// Returns the share of `n` candidates that the last tier holds, in percent.
///
/// # Source
/// The authors' code, where it depends on the number of indexed positions.
pub fn share(n: usize) -> usize {
    match n {
        0..5_000 => 50,
        5_000..10_000 => 30,
        10_000..30_000 => 25,
        _ => 20,
    }
}

/// A random orthogonal map of d channels.
pub struct RandomRotation {
    /// Plus or minus one over the square root of `run`, `[d]`.
    signs: Vec<f32>,
    /// Channels that a transform mixes: the largest power of two that divides d.
    run: usize,
}

impl RandomRotation {
    /// Draws the rotation of `d` channels.
    pub fn new(d: usize, seed: u64) -> Self {
        let run = 1 << d.trailing_zeros();
        let size = 1.0 / (run as f32).sqrt();
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        Self {
            signs: (0..d).map(|_| if rng.r#gen() { size } else { -size }).collect(),
            run,
        }
    }

    /// Rotates a row, `[d]`.
    ///
    /// # Numerics
    /// f32: one product, and log2(run) sums per channel.
    pub fn apply(&self, row: &mut [f32]) {
        row.iter_mut().zip(&self.signs).for_each(|(x, sign)| *x *= sign);
        for run in row.chunks_exact_mut(self.run) {
            let mut half = 1;
            while half < self.run {
                for pair in run.chunks_exact_mut(2 * half) {
                    let (low, high) = pair.split_at_mut(half);
                    for (x, y) in low.iter_mut().zip(high) {
                        (*x, *y) = (*x + *y, *x - *y);
                    }
                }
                half *= 2;
            }
        }
    }
}

/// The index of one KV head: the code of every key.
#[derive(Clone)]
pub struct RandSign {
    rotation: Arc<RandomRotation>,
    /// The patterns of each key, `[n,blocks]`. Bit i is set if channel i of the block is not negative.
    codes: Vec<u8>,
    /// How many of the positions `counted` have each pattern, `[blocks,256]`.
    counts: Vec<u32>,
    counted: Range<usize>,
}

impl RandSign {
    /// Makes an empty head.
    pub fn new(rotation: Arc<RandomRotation>) -> Self {
        let blocks = rotation.signs.len().div_ceil(BLOCK);
        Self {
            rotation,
            codes: Vec::new(),
            counts: vec![0; blocks * PATTERNS],
            counted: 0..0,
        }
    }

    /// Returns the number of blocks, which is the number of bytes of a code.
    fn blocks(&self) -> usize {
        self.counts.len() / PATTERNS
    }

    /// Appends the codes of rotated keys, `[n,d]`.
    fn take_in(&mut self, k_rope: ArrayView2<f32>) {
        let more = k_rope.nrows() * self.blocks();
        grow(&mut self.codes, more);
        for key in k_rope.outer_iter() {
            let mut key = key.to_vec();
            self.rotation.apply(&mut key);
            self.codes.extend(key.chunks(BLOCK).map(pattern));
        }
    }

    /// Makes the counts those of some positions, from those of the positions counted before.
    fn count(&mut self, positions: &Range<usize>) {
        let before = std::mem::replace(&mut self.counted, positions.clone());
        for left in outside(&before, positions) {
            self.change(left, |count| *count -= 1);
        }
        for new in outside(positions, &before) {
            self.change(new, |count| *count += 1);
        }
    }

    /// Changes the counts of the patterns of each of these positions.
    fn change(&mut self, positions: Range<usize>, by: fn(&mut u32)) {
        let blocks = self.blocks();
        let counts = self.counts.as_chunks_mut::<PATTERNS>().0;
        for code in self
            .codes
            .chunks_exact(blocks)
            .take(positions.end)
            .skip(positions.start)
        {
            code.iter()
                .zip(&mut *counts)
                .for_each(|(byte, counts)| by(&mut counts[usize::from(*byte)]));
        }
    }

    /// Returns how many tiers contain each pattern of each block, for the queries of a step, q_rope `[r,d]`.
    ///
    /// # Numerics
    /// f32: the mean query, its rotation, and the products. The number of keys in a tier is rounded up.
    fn votes(&self, q_rope: ArrayView2<f32>) -> Vec<[f32; PATTERNS]> {
        let r = q_rope.nrows() as f32;
        let mut query: Vec<f32> = q_rope.columns().into_iter().map(|q| q.sum() / r).collect();
        self.rotation.apply(&mut query);
        let n = self.counted.len();
        let tiers = TIERS.map(|part| (n * share(n) * part).div_ceil(100 * 100));
        let blocks = query.chunks(BLOCK).zip(self.counts.as_chunks::<PATTERNS>().0);
        let of = |(query, counts): (&[f32], &[u32; PATTERNS])| {
            let product = |number: u32| {
                let signed = query
                    .iter()
                    .enumerate()
                    .map(|(i, q)| if number >> i & 1 == 1 { *q } else { -q });
                (signed.sum(), number)
            };
            let mut ranked: Vec<(f32, u32)> = (0..1 << query.len()).map(product).collect();
            ranked.sort_unstable_by(by_score);
            let mut votes = [0.0; PATTERNS];
            let mut better = 0;
            for (_, number) in ranked {
                votes[number as usize] = tiers.iter().filter(|tier| better < **tier).count() as f32;
                better += counts[number as usize] as usize;
            }
            votes
        };
        blocks.map(of).collect()
    }
}

/// Returns the parts of a range before and after another one.
fn outside(range: &Range<usize>, other: &Range<usize>) -> [Range<usize>; 2] {
    [
        range.start..range.end.min(other.start),
        range.start.max(other.end)..range.end,
    ]
}

/// Returns the number of a block's pattern.
fn pattern(block: &[f32]) -> u8 {
    let bits = block.iter().enumerate();
    bits.fold(0, |bits, (i, x)| bits | u8::from(*x >= 0.0) << i)
}

impl Retriever for RandSign {
    fn prefill(&mut self, prompt: &Prompt) {
        self.take_in(prompt.keys.slice(s![prompt.first.., ..]));
    }

    fn append(&mut self, _: ArrayView2<f32>, k_rope: ArrayView2<f32>) {
        self.take_in(k_rope);
    }

    fn select(&mut self, step: &Step) -> Selection {
        if step.is_exact() {
            return everything(step).into();
        }
        let c = step.candidates.clone();
        self.count(&c);
        let (votes, blocks) = (self.votes(step.q_rope), self.blocks());
        let sum = |code: &[u8]| -> f32 {
            code.iter()
                .zip(&votes)
                .map(|(byte, votes)| votes[usize::from(*byte)])
                .sum()
        };
        let codes = self.codes[c.start * blocks..c.end * blocks].chunks_exact(blocks);
        let sums: Vec<f32> = codes.map(sum).collect();
        Selection::of_mass(step, &sums)
    }

    fn reads(&self, step: &Step, _: &Selection, reads: &mut Reads) {
        let (c, width) = (&step.candidates, self.blocks());
        reads.array(self.counts.len() * size_of::<u32>());
        reads.range(c.start * width..c.end * width);
        reads.scratch(c.len() * size_of::<f32>());
    }

    fn bytes_for(&self, _: &Place, positions: usize) -> usize {
        self.blocks() * positions + self.counts.len() * size_of::<u32>()
    }

    fn state_bytes(&self) -> usize {
        self.codes.capacity() + self.counts.len() * size_of::<u32>()
    }
}

#[cfg(test)]
mod tests {
    use ndarray::Array2;

    use super::*;
    use crate::kv::KvHead;
    use crate::kv::packed::Center;
    use crate::testing::numbers;

    /// A matrix of numbers from -1 to 1.
    fn random(rows: usize, d: usize, next: &mut impl FnMut() -> u32) -> Array2<f32> {
        Array2::from_shape_simple_fn((rows, d), || next() as f32 / (1u32 << 31) as f32 - 1.0)
    }

    #[test]
    fn rotations_are_orthogonal_and_differ() {
        for d in [2, 8, 20, 64, 80, 96, 128] {
            let images = |seed| -> Vec<Vec<f32>> {
                let rotation = RandomRotation::new(d, seed);
                let image = |i| {
                    let mut row = vec![0.0; d];
                    row[i] = 1.0;
                    rotation.apply(&mut row);
                    row
                };
                (0..d).map(image).collect()
            };
            let rows = images(1);
            for (i, a) in rows.iter().enumerate() {
                for (j, b) in rows.iter().enumerate() {
                    let product: f32 = a.iter().zip(b).map(|(x, y)| x * y).sum();
                    assert!(
                        (product - f32::from(u8::from(i == j))).abs() < 1e-5,
                        "{d} {i} {j}"
                    );
                }
            }
            let alike = (2..22).filter(|seed| images(*seed) == rows).count();
            // Two rotations are the same if all their signs are, which has a chance of 2^-d.
            assert!(alike <= if d == 2 { 15 } else { 1 }, "{d}: {alike}");
        }
    }

    #[test]
    fn tiers_hold_the_best_patterns_with_their_share_of_the_keys() {
        let (d, r) = (20, 3);
        let mut next = numbers(5);
        // From candidates that are few to those that are many; then again fewer, whose counts are subtracted.
        for (n, shares) in [(4_999, 50), (5_000, 30), (9_999, 30), (10_000, 25), (30_000, 20)] {
            assert_eq!(share(n), shares);
            let mut head = RandSign::new(Arc::new(RandomRotation::new(d, 9)));
            head.take_in(random(n + 100, d, &mut next).view());
            head.count(&(0..n / 2));
            head.count(&(40..n + 40));
            let queries = random(r, d, &mut next);
            let votes = head.votes(queries.view());
            assert_eq!(votes.len(), 3);
            let mut query: Vec<f32> = (0..d).map(|j| queries.column(j).sum() / r as f32).collect();
            head.rotation.apply(&mut query);
            for (block, votes) in votes.iter().enumerate() {
                let channels = &query[8 * block..d.min(8 * block + 8)];
                let patterns = 1 << channels.len();
                let product = |p: usize| -> f32 {
                    let sign = |i: usize| if p >> i & 1 == 1 { 1.0 } else { -1.0 };
                    channels.iter().enumerate().map(|(i, q)| sign(i) * q).sum()
                };
                let mut counts = [0; PATTERNS];
                (40..n + 40).for_each(|p| counts[usize::from(head.codes[3 * p + block])] += 1);
                for (tier, part) in TIERS.iter().enumerate() {
                    // A pattern of this tier is in every larger one.
                    let inside = |p: &usize| votes[*p] >= (TIERS.len() - tier) as f32;
                    let (inside, outside): (Vec<usize>, Vec<usize>) = (0..patterns).partition(inside);
                    let worst = inside
                        .iter()
                        .copied()
                        .min_by(|a, b| product(*a).total_cmp(&product(*b)))
                        .unwrap();
                    assert!(outside.iter().all(|p| product(*p) < product(worst) + 1e-5));
                    let held: usize = inside.iter().map(|p| counts[*p]).sum();
                    let wanted = n as f64 * shares as f64 / 100.0 * *part as f64 / 100.0;
                    assert!(held as f64 >= wanted - 1e-6, "{n} {tier}: {held} {wanted}");
                    assert!(
                        ((held - counts[worst]) as f64) < wanted,
                        "{n} {tier}: {held} {wanted}"
                    );
                }
            }
        }
    }

    #[test]
    fn counts_follow_the_candidates() {
        let (n, d) = (300, 16);
        let mut next = numbers(6);
        let keys = random(n, d, &mut next);
        let kv = KvHead::new(KvType::F32, d, 0, Center::Median);
        let rotation = Arc::new(RandomRotation::new(d, 0));
        let filled = || {
            let mut head = RandSign::new(Arc::clone(&rotation));
            head.take_in(keys.view());
            head
        };
        let mut moved = filled();
        for candidates in [4..90, 5..91, 80..200, 210..290, 10..20, 0..300, 100..200] {
            let queries = random(2, d, &mut next);
            let step = Step {
                step: 0,
                visible: 0..n,
                candidates,
                budget: 7,
                q_pre: queries.view(),
                q_rope: queries.view(),
                kv: &kv,
            };
            assert_eq!(
                moved.select(&step),
                filled().select(&step),
                "{:?}",
                step.candidates
            );
        }
    }
}

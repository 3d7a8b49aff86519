//! Estimated scores of keys: sums of table entries over the numbers of a code. Scores are in bits, the logarithms of
//! probabilities to the base 2.

use multiversion::multiversion;

use super::section::STAGES;
use super::waves::{LINE, LINES_AT_ONCE, Walks};
use crate::compute::blocks::Row;
use crate::compute::signs::{self, PATTERNS};
use crate::compute::simd;

/// Number of values of a byte.
const BYTES: usize = 256;
/// Rounded entries that are summed before they become scores.
const AT_ONCE: usize = 512;
/// The most keys that are scored together, so that their scores stay in the cache.
pub(super) const CHUNK: usize = LINES_AT_ONCE * LINE;

/// The scores of all words for the queries of one step.
pub(super) struct WordScores<'a> {
    /// The score of the mean key, `[r]`.
    pub mean: Vec<f32>,
    /// The scores of the mean's path at the candidates, if codes describe the keys around it.
    pub path: Option<Walks<'a>>,
    /// The scores of the words, by stage and query head.
    pub stages: [Vec<WordTable>; STAGES],
}

/// The scores of the words of one stage for one query.
pub(super) enum WordTable {
    /// For groups of 16 words: entries rounded to u8 at a common step, which a scan sums.
    Rounded(Rounded),
    /// For groups of 256 words: the scores, `[m,256]`.
    Exact(Vec<f32>),
}

/// Entries `least + step q` with q from 0 to 255. The field `least` is the sum of all groups' least entries.
pub(super) struct Rounded {
    tables: signs::Tables,
    least: f32,
    step: f32,
}

impl WordTable {
    /// Makes a table from the scores of m groups, `[m,words]`.
    pub fn new(scores: Vec<f32>, words: usize) -> Self {
        match words {
            PATTERNS => Self::Rounded(Rounded::from_groups(scores.as_chunks().0)),
            _ => Self::Exact(scores),
        }
    }

    /// Writes `base` and the sum of the entries of each code, `[n,width]`, to `out` `[n]`; with `add`, adds them. Returns the
    /// largest value.
    pub fn scores(&self, codes: &[u8], base: f32, add: bool, out: &mut [f32]) -> f32 {
        match self {
            Self::Rounded(rounded) => {
                let mut sums = [0; AT_ONCE];
                let mut largest = f32::NEG_INFINITY;
                let width = codes.len().checked_div(out.len()).unwrap_or(1);
                for (codes, out) in codes.chunks(AT_ONCE * width).zip(out.chunks_mut(AT_ONCE)) {
                    let sums = &mut sums[..out.len()];
                    rounded.tables.sums(codes, sums);
                    largest = largest.max(simd::line(sums, rounded.step, base + rounded.least, add, out));
                }
                largest
            }
            Self::Exact(table) => {
                let width = table.len() / BYTES;
                for (out, code) in out.iter_mut().zip(codes.chunks_exact(width)) {
                    let cells = code.iter().zip(table.as_chunks::<BYTES>().0);
                    let sum = base + cells.map(|(byte, table)| table[usize::from(*byte)]).sum::<f32>();
                    *out = if add { *out + sum } else { sum };
                }
                simd::max(out)
            }
        }
    }
}

impl Rounded {
    /// Rounds scores, `[m,16]`. The common step divides the range of the widest group into 255 steps.
    ///
    /// # Numerics
    /// An entry is off by at most half a step. If a score is not finite, the estimated scores are meaningless.
    fn from_groups(groups: &[[f32; PATTERNS]]) -> Self {
        let mut tables = vec![[0; PATTERNS]; groups.len()];
        let (least, step) = round(groups, &mut tables);
        let tables = signs::Tables::new(&tables);
        Self { tables, least, step }
    }
}

/// Rounds the scores of groups to u8, as [`Rounded`] has them. Returns the sum of the groups' least scores, and the step.
#[multiversion(targets("x86_64+avx512f+avx512vl", "x86_64+avx2", "aarch64+neon"))]
fn round(groups: &[[f32; PATTERNS]], tables: &mut [[u8; PATTERNS]]) -> (f32, f32) {
    let (mut range, mut sum) = (0.0f32, 0.0);
    for group in groups {
        let least = fold(*group, |a, b| if b < a { b } else { a });
        range = range.max(fold(*group, |a, b| if b > a { b } else { a }) - least);
        sum += least;
    }
    let step = range / 255.0;
    let inverse = if step > 0.0 { 1.0 / step } else { 0.0 };
    for (group, table) in groups.iter().zip(tables) {
        let least = fold(*group, |a, b| if b < a { b } else { a });
        for l in 0..PATTERNS {
            // No value is negative, so that the half makes the conversion, which rounds down, round to the nearest.
            table[l] = ((group[l] - least) * inverse + 0.5) as u8;
        }
    }
    (sum, step)
}

/// Reduces values by halves.
#[inline(always)]
fn fold(mut values: [f32; PATTERNS], of: impl Fn(f32, f32) -> f32) -> f32 {
    for width in [8, 4, 2, 1] {
        for l in 0..width {
            values[l] = of(values[l], values[l + width]);
        }
    }
    values[0]
}

impl WordScores<'_> {
    /// Writes the estimated scores of the keys of chunk number `chunk` for query head `a` to the first values of `scores`,
    /// from their codes of the first stage, `[n,width]`, and returns the largest.
    ///
    /// # Numerics
    /// f32: the path of the mean, plus the mean and the first stage.
    pub fn first_stage(&self, a: usize, chunk: usize, codes: &[u8], n: usize, scores: &mut [Row]) -> f32 {
        if let Some(path) = &self.path {
            path.scores(a, chunk, scores);
        }
        let scores = &mut Row::values_mut(scores)[..n];
        self.stages[0][a].scores(codes, self.mean[a], self.path.is_some(), scores)
    }

    /// Writes to `out` `[n]` what the second stage adds to the scores of keys for query head `a`, from their codes
    /// of this stage, `[n,width]`. Returns the largest.
    pub fn second_stage(&self, a: usize, codes: &[u8], out: &mut [f32]) -> f32 {
        self.stages[1][a].scores(codes, 0.0, false, out)
    }
}

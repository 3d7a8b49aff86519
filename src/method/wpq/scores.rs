//! Estimated scores of keys: sums of table entries over the numbers of a code. Scores are in bits, the logarithms of
//! probabilities to the base 2.

use super::section::STAGES;
use super::waves::{LINE, LINES_AT_ONCE, Walks};
use crate::compute::blocks::Row;
use crate::compute::signs::{self, PATTERNS};
use crate::compute::simd;

/// Number of values of a byte.
const BYTES: usize = 256;
/// The most keys that are scored together, so that their scores stay in the cache.
pub(super) const CHUNK: usize = LINES_AT_ONCE * LINE;

/// The scores of all words for the queries of one step.
pub(super) struct WordScores<'a> {
    /// The score of the mean key, `[r]`.
    pub mean: Vec<f32>,
    /// The scores of the mean's path from the first candidate on, if codes describe the keys around it.
    pub path: Option<Walks<'a>>,
    /// The scores of the words, by stage and query head.
    pub stages: [Vec<WordTable>; STAGES],
    /// Room for the sums of rounded entries.
    pub sums: Vec<u16>,
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
            PATTERNS => Self::Rounded(Rounded::of(scores.as_chunks().0)),
            _ => Self::Exact(scores),
        }
    }

    /// Adds `base` and the sum of the entries of each code, `[n,width]`, to `out` `[n]`, where n is at most [`CHUNK`].
    /// Returns the largest value. What `sums` holds is lost.
    pub fn add(&self, codes: &[u8], base: f32, sums: &mut Vec<u16>, out: &mut [f32]) -> f32 {
        match self {
            Self::Rounded(rounded) => {
                sums.resize(out.len(), 0);
                rounded.tables.sums(codes, sums);
                simd::add_line(sums, rounded.step, base + rounded.least, out)
            }
            Self::Exact(table) => {
                let width = table.len() / BYTES;
                for (out, code) in out.iter_mut().zip(codes.chunks_exact(width)) {
                    let cells = code.iter().zip(table.as_chunks::<BYTES>().0);
                    *out += base + cells.map(|(byte, table)| table[usize::from(*byte)]).sum::<f32>();
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
    fn of(groups: &[[f32; PATTERNS]]) -> Self {
        let least = |table: &[f32; PATTERNS]| table.iter().copied().fold(f32::INFINITY, f32::min);
        let largest = |table: &[f32; PATTERNS]| table.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let ranges = groups.iter().map(|table| largest(table) - least(table));
        let step = ranges.fold(0.0, f32::max) / 255.0;
        let inverse = if step > 0.0 { 1.0 / step } else { 0.0 };
        let tables: Vec<[u8; PATTERNS]> = groups
            .iter()
            .map(|table| table.map(|x| ((x - least(table)) * inverse).round() as u8))
            .collect();
        Self {
            tables: signs::Tables::new(&tables),
            least: groups.iter().map(least).sum(),
            step,
        }
    }
}

impl WordScores<'_> {
    /// Writes the estimated scores of the next n keys for query head `a` to the first values of `scores`, from their codes
    /// of the first stage, `[n,width]`, and returns the largest. Calls score the keys in order, all but the last
    /// [`CHUNK`] of them.
    ///
    /// # Numerics
    /// f32: the path of the mean, plus the mean and the first stage.
    pub fn first_stage(&mut self, a: usize, n: usize, codes: &[u8], scores: &mut [Row]) -> f32 {
        if let Some(walks) = &mut self.path {
            walks.advance(a, scores);
        }
        let scores = &mut Row::values_mut(scores)[..n];
        if self.path.is_none() {
            scores.fill(0.0);
        }
        self.stages[0][a].add(codes, self.mean[a], &mut self.sums, scores)
    }

    /// Writes to `out` `[n]` what the second stage adds to the scores of keys for query head `a`, from their codes
    /// of this stage, `[n,width]`. Returns the largest.
    pub fn second_stage(&mut self, a: usize, codes: &[u8], out: &mut [f32]) -> f32 {
        let (table, sums) = (&self.stages[1][a], &mut self.sums);
        let width = codes.len().checked_div(out.len()).unwrap_or(1);
        let chunks = codes.chunks(CHUNK * width).zip(out.chunks_mut(CHUNK));
        let largest = chunks.map(|(codes, out)| {
            out.fill(0.0);
            table.add(codes, 0.0, sums, out)
        });
        largest.fold(f32::NEG_INFINITY, f32::max)
    }
}

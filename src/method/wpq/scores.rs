//! Estimated scores of keys: sums of table entries over the numbers of a code.

use crate::compute::signs::{self, PATTERNS};
use crate::compute::simd;

/// Number of values of a byte.
const BYTES: usize = 256;
/// Keys that are scored together; their sums stay in the cache.
const CHUNK: usize = 4096;

/// The scores of one step's queries with all words.
pub(super) struct WordScores {
    /// The score of the mean key, `[r]`.
    pub mean: Vec<f32>,
    /// The scores of the words, per stage and query head.
    pub stages: Vec<Vec<WordTable>>,
}

/// The scores of the words of one stage for one query.
pub(super) enum WordTable {
    /// Groups of 16 words: entries rounded to u8 at a common step, of which a scan forms sums.
    Rounded(Rounded),
    /// Groups of 256 words: `[m,256]`.
    Exact(Vec<f32>),
}

/// Entries `least + step q` with q from 0 to 255; `least` is summed over the groups.
pub(super) struct Rounded {
    tables: signs::Tables,
    least: f32,
    step: f32,
}

impl WordTable {
    /// Makes a table of the scores of m groups, `[m,words]`.
    pub fn new(scores: Vec<f32>, words: usize) -> Self {
        match words {
            PATTERNS => Self::Rounded(Rounded::of(scores.as_chunks().0)),
            _ => Self::Exact(scores),
        }
    }

    /// Adds the sum of the entries of each code, `[n,width]`, to `out` `[n]` with n at most [`CHUNK`].
    fn add(&self, codes: &[u8], out: &mut [f32]) {
        match self {
            Self::Rounded(rounded) => rounded.add(codes, out),
            Self::Exact(table) => {
                let width = table.len() / BYTES;
                for (out, code) in out.iter_mut().zip(codes.chunks_exact(width)) {
                    let cells = code.iter().zip(table.as_chunks::<BYTES>().0);
                    *out += cells.map(|(byte, table)| table[usize::from(*byte)]).sum::<f32>();
                }
            }
        }
    }
}

impl Rounded {
    /// Rounds scores, `[m,16]`, to the nearest of 256 values of the widest group.
    ///
    /// # Numerics
    /// An entry is off by at most half a step. Scores that are not finite give scores that mean nothing.
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

    fn add(&self, codes: &[u8], out: &mut [f32]) {
        let mut sums = [0; CHUNK];
        let sums = &mut sums[..out.len()];
        self.tables.sums(codes, sums);
        simd::add_line(sums, self.step, self.least, out);
    }
}

impl WordScores {
    /// Writes the estimated scores of n keys to `out` `[r,n]`, from the codes of their first stages, `[n,width]` each.
    ///
    /// # Numerics
    /// f32, the stages in order.
    pub fn estimate(&self, n: usize, width: usize, codes: &[&[u8]], out: &mut Vec<Vec<f32>>) {
        out.resize_with(self.mean.len(), Vec::new);
        for ((a, mean), out) in self.mean.iter().enumerate().zip(out) {
            out.clear();
            out.resize(n, *mean);
            for (i, out) in out.chunks_mut(CHUNK).enumerate() {
                let rows = i * CHUNK * width..(i * CHUNK + out.len()) * width;
                for (stage, codes) in self.stages.iter().zip(codes) {
                    stage[a].add(&codes[rows.clone()], out);
                }
            }
        }
    }
}

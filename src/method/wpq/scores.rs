//! Estimated scores of keys: sums of table entries over the numbers of a code.

use crate::compute::signs::{self, PATTERNS};
use crate::compute::simd;

/// Number of values of a byte.
const BYTES: usize = 256;
/// Number of values that a sum of rounded entries may have.
const LEVELS: usize = 1 << 16;
/// Keys that are scored together, so that their sums stay in the cache.
const CHUNK: usize = 4096;

/// The scores of all words for the queries of one step.
pub(super) struct WordScores {
    /// The score of the mean key, `[r]`.
    pub mean: Vec<f32>,
    /// The score of the mean's path at each candidate, `[n]` for each query head, if codes describe the keys around it.
    pub path: Option<Vec<Vec<f32>>>,
    /// The scores of the words, by stage and query head.
    pub stages: Vec<Vec<WordTable>>,
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

    /// Adds the sum of the entries of each code, `[n,width]`, to `out` `[n]`, where n is at most [`CHUNK`].
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

    fn add(&self, codes: &[u8], out: &mut [f32]) {
        let mut sums = [0; CHUNK];
        let sums = &mut sums[..out.len()];
        self.tables.sums(codes, sums);
        simd::add_line(sums, self.step, self.least, out);
    }
}

/// Places of candidates.
#[derive(Clone, Copy)]
pub(super) enum Places<'a> {
    /// The first n, which are all.
    All(usize),
    /// Some of them.
    These(&'a [u32]),
}

impl Places<'_> {
    fn len(self) -> usize {
        match self {
            Self::All(n) => n,
            Self::These(places) => places.len(),
        }
    }
}

/// The scores of many keys that take only few different values, the levels.
#[derive(Default)]
pub(super) struct Levels {
    /// The level of each key.
    pub of: Vec<u16>,
    /// The highest level of any key.
    pub highest: u16,
    /// The score of each level up to the highest, ascending, with room for all other levels.
    pub scores: Vec<f32>,
}

impl Levels {
    /// Appends the score of every key to `out`.
    pub fn write(&self, out: &mut Vec<f32>) {
        // There is one score for every possible level, so that no index has to be checked.
        if let Some(scores) = self.scores.first_chunk::<LEVELS>() {
            out.extend(self.of.iter().map(|level| scores[usize::from(*level)]));
        }
    }
}

impl WordScores {
    /// Writes the estimated scores of n keys for query head `a` as levels, from the codes of the first stage,
    /// `[n,width]`. Returns false if it cannot: if groups do not have 16 words, or the mean has a path. The scores are
    /// those of [`Self::estimate`].
    pub fn levels(&self, a: usize, n: usize, codes: &[u8], out: &mut Levels) -> bool {
        let WordTable::Rounded(rounded) = &self.stages[0][a] else {
            return false;
        };
        if self.path.is_some() {
            return false;
        }
        out.of.resize(n, 0);
        rounded.tables.sums(codes, &mut out.of);
        out.highest = simd::max_u16(&out.of);
        out.scores.resize(LEVELS, 0.0);
        for (score, level) in out.scores.iter_mut().zip(0..=out.highest) {
            *score = self.mean[a] + (rounded.least + rounded.step * f32::from(level));
        }
        true
    }

    /// Writes the estimated scores of keys for query head `a` to `out`, from the codes of the first `codes.len()`
    /// stages, `[n,width]` each: of the candidates at some places, or of all.
    ///
    /// # Numerics
    /// f32: the mean, its path, then the stages in order.
    pub fn estimate(&self, a: usize, places: Places, codes: &[&[u8]], out: &mut Vec<f32>) {
        let (n, mean) = (places.len(), self.mean[a]);
        let path = self.path.as_ref().map(|path| &path[a]);
        out.clear();
        for start in (0..n).step_by(CHUNK) {
            let chunk = start..n.min(start + CHUNK);
            match (path, places) {
                (None, _) => out.resize(chunk.end, mean),
                (Some(path), Places::All(_)) => out.extend(path[chunk.clone()].iter().map(|x| mean + x)),
                (Some(path), Places::These(places)) => {
                    let own = places[chunk.clone()].iter().map(|place| path[*place as usize]);
                    out.extend(own.map(|x| mean + x));
                }
            }
            for (stage, codes) in self.stages.iter().zip(codes) {
                let width = codes.len() / n;
                stage[a].add(
                    &codes[chunk.start * width..chunk.end * width],
                    &mut out[chunk.clone()],
                );
            }
        }
    }
}

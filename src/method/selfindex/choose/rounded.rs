//! Scores rounded to u8, and the scan that sums them.

use super::super::groups::PATTERNS;
use crate::compute::signs::{self, MOST_GROUPS};

/// Rows of a scan that are summed and compared together, so that their sums stay in the cache.
pub(super) const CHUNK: usize = 4096;
/// The sample takes the first [`SAMPLED`] rows of every [`SAMPLE`] times [`SAMPLED`] rows.
pub(super) const SAMPLE: usize = 16;
/// Consecutive rows per part of the sample.
pub(super) const SAMPLED: usize = 256;
/// The largest relative error of one rounding in f32.
const UNIT: f64 = 1.0 / (1u64 << 24) as f64;

/// The rounded scores of the sign patterns.
pub(super) struct Rounded {
    tables: signs::Tables,
    /// If the sums of two keys differ by more than this, they are in the order of the keys' scores.
    pub gap: u32,
    /// The largest possible sum.
    most: usize,
}

impl Rounded {
    /// Rounds scores `[groups,16]`; `None` if some are not finite, if no group has scores that differ, or if sums could
    /// exceed 16 bits.
    ///
    /// # Numerics
    /// An entry x of a group whose least entry is m equals `m + step q + e`, with one step for all groups. A sum of
    /// entries is thus `sum m + step sum q + sum e`, where `sum e` lies between the sum over groups of the least e and
    /// the sum over groups of the largest e. A score in f32 takes at most one addition per byte for each of its
    /// entries, so it differs from the exact sum by at most `w u / (1 - w u)` times the sum of the largest magnitudes
    /// (u = 2^-24). If two sums of q differ by more than these two ranges, measured in steps, they therefore tell the
    /// order of the scores.
    pub fn from_groups(groups: &[[f32; PATTERNS]]) -> Option<Self> {
        let wide = |table: &[f32; PATTERNS]| table.map(f64::from);
        let least = |table: &[f64; PATTERNS]| table.iter().copied().fold(f64::INFINITY, f64::min);
        let largest = |table: &[f64; PATTERNS]| table.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let finite = groups.iter().flatten().all(|x| x.is_finite());
        let wide: Vec<[f64; PATTERNS]> = groups.iter().map(wide).collect();
        let ranges = wide.iter().map(|table| largest(table) - least(table));
        let step = ranges.fold(0.0, f64::max) / 255.0;
        let magnitude: f64 = wide.iter().map(|table| largest(table).max(-least(table))).sum();
        if !finite || step <= 0.0 || magnitude > f64::from(f32::MAX) / 4.0 || groups.len() > MOST_GROUPS {
            return None;
        }
        let mut errors = 0.0;
        let tables: Vec<[u8; PATTERNS]> = wide
            .iter()
            .map(|table| {
                let from = least(table);
                let rounded = table.map(|x| ((x - from) / step).round().clamp(0.0, 255.0));
                let error: [f64; PATTERNS] = std::array::from_fn(|p| table[p] - from - step * rounded[p]);
                errors += largest(&error) - least(&error);
                rounded.map(|q| q as u8)
            })
            .collect();
        let w = groups.len().div_ceil(2) as f64 + 1.0;
        // The last term covers the few f64 roundings per entry in this function.
        let roundings = 2.0 * (w * UNIT / (1.0 - w * UNIT)) + 1e-12;
        let most_of = |table: &[u8; PATTERNS]| usize::from(table.iter().copied().max().unwrap_or(0));
        Some(Self {
            gap: ((errors + roundings * magnitude) / step).ceil().min(65_535.0) as u32,
            most: tables.iter().map(most_of).sum(),
            tables: signs::Tables::new(&tables),
        })
    }

    /// Estimates, from a sample, a limit that most likely keeps all rows that could be among the best `need`, and a few
    /// more: four standard deviations below the limit of the sample itself.
    pub fn likely_limit(&self, rows: &[u8], width: usize, need: usize) -> u16 {
        let mut counts = vec![0usize; self.most + 1];
        let mut sums = [0; SAMPLED];
        let mut seen = 0;
        for rows in rows.chunks(SAMPLE * SAMPLED * width) {
            let rows = &rows[..rows.len().min(SAMPLED * width)];
            let sums = &mut sums[..rows.len() / width];
            self.tables.sums(rows, sums);
            sums.iter().for_each(|sum| counts[usize::from(*sum)] += 1);
            seen += sums.len();
        }
        let expected = need as f64 * seen as f64 / (rows.len() / width) as f64;
        let wanted = (expected + 4.0 * expected.sqrt()) as usize + 4;
        let last = from_the_top(&counts, wanted).unwrap_or(0);
        let last = u16::try_from(last).unwrap_or(0);
        last.saturating_sub(self.gap.min(65_535) as u16)
    }

    /// Returns the place and the sum of each row whose sum is at least `limit` and that is not in `fixed` (ascending),
    /// by ascending place.
    pub fn at_least(&self, rows: &[u8], width: usize, limit: u16, fixed: &[u32]) -> Vec<(u32, u32)> {
        let mut sums = [0; CHUNK];
        let (mut found, mut out) = (vec![0; CHUNK + signs::ROOM], Vec::new());
        let mut fixed = fixed.iter().copied().peekable();
        for (chunk, rows) in rows.chunks(CHUNK * width).enumerate() {
            let first = (chunk * CHUNK) as u32;
            let sums = &mut sums[..rows.len() / width];
            self.tables.sums(rows, sums);
            let len = signs::at_least(sums, limit, &mut found);
            let of_key = |key: &u32| (first + (key & 0xffff), key >> 16);
            let found = found[..len].iter().map(of_key);
            match fixed.peek() {
                Some(p) if *p < first + CHUNK as u32 => out.extend(found.filter(|(place, _)| {
                    while fixed.next_if(|p| p < place).is_some() {}
                    fixed.peek() != Some(place)
                })),
                _ => out.extend(found),
            }
        }
        out
    }
}

/// Returns the largest index such that the counts from it on add up to at least `need`.
pub(super) fn from_the_top(counts: &[usize], need: usize) -> Option<usize> {
    let mut seen = 0;
    counts.iter().rposition(|count| {
        seen += count;
        seen >= need
    })
}

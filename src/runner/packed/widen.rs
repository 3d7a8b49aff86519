//! Rows in 2 bits as f32, whole groups at a time.

#![expect(clippy::needless_range_loop, reason = "iterators keep it from vectorising")]

use multiversion::multiversion;

use super::{FullRows, QUANT_GROUP, SignRows, TwoBit, ValueRows, sign_bytes};
use crate::compute::attention::{LANES, Run, prefetch, widen_f16};

/// Chunks of lanes in a group of channels with one scale.
const CHUNKS: usize = QUANT_GROUP / LANES;

/// One group of a row: its values are `Q step + zero`.
#[derive(Clone, Copy)]
struct Group {
    codes: [u32; CHUNKS],
    step: f32,
    zero: f32,
}

impl Group {
    #[inline(always)]
    fn value(&self, chunk: usize, lane: usize) -> f32 {
        (self.codes[chunk] >> (2 * lane) & 3) as i32 as f32 * self.step + self.zero
    }
}

impl SignRows {
    #[inline(always)]
    fn signs_of(&self, position: u32) -> &[u8] {
        let bytes = sign_bytes(self.d);
        &self.signs[position as usize * bytes..][..bytes]
    }
}

impl TwoBit {
    /// Asks for a row that is read soon.
    #[inline(always)]
    fn prefetch(&self, row: u32) {
        let (row, n) = (row as usize, self.d / QUANT_GROUP);
        prefetch(&self.bits[row * self.d / 4..][..self.d / 4]);
        prefetch(&self.params[row * n..][..n]);
    }

    /// The groups of a row that has no shorter one.
    #[inline(always)]
    fn groups(&self, row: usize) -> impl Iterator<Item = Group> {
        let n = self.d / QUANT_GROUP;
        let (bits, _) = self.bits[row * self.d / 4..][..self.d / 4].as_chunks::<4>();
        let (bits, _) = bits.as_chunks::<CHUNKS>();
        let params = &self.params[row * n..(row + 1) * n];
        bits.iter().zip(params).map(|(bits, [step, zero])| Group {
            codes: [u32::from_le_bytes(bits[0]), u32::from_le_bytes(bits[1])],
            step: widen_f16(*step),
            zero: widen_f16(*zero),
        })
    }
}

/// Positions that come in ascending order, met with those of the full rows.
struct Walk<'a> {
    full: &'a FullRows,
    at: usize,
}

impl<'a> Walk<'a> {
    fn new(full: &'a FullRows, positions: &[u32]) -> Self {
        let first = positions.first().copied().unwrap_or(0);
        let at = full.positions.partition_point(|p| *p < first);
        Self { full, at }
    }

    /// Whether `position` has full precision.
    #[inline(always)]
    fn is_full(&mut self, position: u32) -> bool {
        while self.full.positions.get(self.at).is_some_and(|p| *p < position) {
            self.at += 1;
        }
        self.full.positions.get(self.at) == Some(&position)
    }
}

/// Whether rows have groups of full length alone.
pub(super) fn in_groups(d: usize) -> bool {
    d.is_multiple_of(QUANT_GROUP)
}

/// [`crate::compute::attention::Rows::widen`] of keys; where [`in_groups`].
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2", "aarch64+neon"))]
pub(super) fn keys(rows: &SignRows, run: &Run, out: &mut [[f32; LANES]]) {
    let (mut walk, mut coming) = (Walk::new(&rows.full, run.now), run.coming());
    let (alpha, centre) = (
        rows.alpha.as_chunks::<LANES>().0,
        rows.centre.as_chunks::<LANES>().0,
    );
    let all = if rows.layout.signed { 0 } else { u16::MAX };
    for (to, &p) in out.chunks_mut(rows.d / LANES).zip(run.now) {
        if let Some(&p) = coming.next() {
            prefetch(rows.signs_of(p));
            rows.magnitudes.prefetch(p);
        }
        if walk.is_full(p) {
            rows.read(p as usize, to.as_flattened_mut());
            continue;
        }
        let signs = rows.signs_of(p);
        let (to, _) = to.as_chunks_mut::<CHUNKS>();
        let (signs, _) = signs.as_chunks::<2>();
        let scales = alpha
            .as_chunks::<CHUNKS>()
            .0
            .iter()
            .zip(centre.as_chunks::<CHUNKS>().0);
        let groups = rows
            .magnitudes
            .groups(p as usize)
            .zip(signs.as_chunks::<CHUNKS>().0);
        for (to, ((group, signs), (alpha, centre))) in to.iter_mut().zip(groups.zip(scales)) {
            for c in 0..CHUNKS {
                let positive = u32::from(u16::from_le_bytes(signs[c]) | all);
                let mut wide = [0.0; LANES];
                for l in 0..LANES {
                    let magnitude = group.value(c, l) * alpha[c][l];
                    let flip = !(positive >> l) << 31;
                    wide[l] = centre[c][l] + f32::from_bits(magnitude.to_bits() ^ flip);
                }
                to[c] = wide;
            }
        }
    }
}

/// [`crate::compute::attention::Rows::widen`] of values; where [`in_groups`].
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl", "x86_64+avx2", "aarch64+neon"))]
pub(super) fn values(rows: &ValueRows, run: &Run, out: &mut [[f32; LANES]]) {
    let (mut walk, mut coming) = (Walk::new(&rows.full, run.now), run.coming());
    for (to, &p) in out.chunks_mut(rows.d / LANES).zip(run.now) {
        if let Some(&p) = coming.next() {
            rows.values.prefetch(p);
        }
        if walk.is_full(p) {
            rows.read(p as usize, to.as_flattened_mut());
            continue;
        }
        let (to, _) = to.as_chunks_mut::<CHUNKS>();
        for (to, group) in to.iter_mut().zip(rows.values.groups(p as usize)) {
            for c in 0..CHUNKS {
                let mut wide = [0.0; LANES];
                for l in 0..LANES {
                    wide[l] = group.value(c, l);
                }
                to[c] = wide;
            }
        }
    }
}

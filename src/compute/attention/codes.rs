//! The loops of a decode step over rows of codes of 8, 4 or 2 bits. Products are formed in integers; scales and offsets are
//! applied to sums of products.
//!
//! Integer sums are exact, and the order of every other sum is fixed, so the results have the same bits on every
//! instruction set.

use half::f16;
use multiversion::multiversion;
use multiversion::target::match_target;

use super::kernels::StepRows;
use super::lanes::{LANES, fused, widen_f16};
use super::rows::{Coming, GroupQueries, OutputSums, Run, Segment};
use crate::prefetch::prefetch_row;

#[cfg(test)]
mod tests;
#[cfg(target_arch = "x86_64")]
mod x86;

/// Channels that share a scale and an offset.
pub const GROUP: usize = 64;
/// The largest magnitude of a query or a weight in integers.
const MOST: f32 = 32767.0;
/// Rows whose scores are computed together.
const ROWS: usize = 8;
/// Rows whose weights share a scale. Their weighted codes of 4 bits add up to at most 32 * 15 * 32767, which f32 holds exactly;
/// those of 8 bits to less than 2^31.
const BLOCK: usize = 32;
/// Lanes of the sums of offsets.
const OFFSET_LANES: usize = 8;

/// Rows of d channels, one after the other, d a multiple of [`LANES`]: a row has codes of `BITS` bits, then a little-endian
/// scale and offset in f16 per [`GROUP`] channels; the last group may be shorter. Sixteen channels take 2 `BITS` bytes: in 4
/// bits, channel i is in the lower half of byte i for i < 8, else in the upper half of byte i - 8; in 2 bits, channel i is in
/// the bits 2 i and 2 i + 1.
///
/// Rows may also have codes alone ([`CodeRows::plane`]), which are then read as integers. Codes of 8 bits are in two planes of 4
/// ([`CodeRows::joined`]), and are joined in registers.
#[derive(Clone, Copy)]
pub struct CodeRows<'a, const BITS: usize> {
    segments: &'a [Segment<'a, u8>],
    /// The lower 4 of 8 bits, in segments of the same positions; otherwise empty.
    lower: &'a [Segment<'a, u8>],
    d: usize,
    /// The bytes from one row to the next.
    stride: usize,
    /// Where a row begins within these bytes.
    at: usize,
    /// The bytes of a row.
    width: usize,
    /// The bytes of the codes of a row.
    codes: usize,
}

/// The bytes of a row, all of them, and those of the lower plane, if there are two.
#[derive(Clone, Copy)]
struct Row<'a>(&'a [u8], &'a [u8]);

/// Returns the bytes of a row of d channels.
pub const fn width(bits: usize, d: usize) -> usize {
    code_bytes(bits, d) + 4 * d.div_ceil(GROUP)
}

/// Returns the bytes of the codes of d channels, those of one plane if there are two.
pub const fn code_bytes(bits: usize, d: usize) -> usize {
    2 * plane_bits(bits) * d.div_ceil(LANES)
}

/// Returns the bits of a code that lie together.
const fn plane_bits(bits: usize) -> usize {
    if bits == 8 { 4 } else { bits }
}

/// Returns the place of a channel's code in a row: its byte, and the number of its lowest bit.
pub fn place(bits: usize, channel: usize) -> (usize, usize) {
    let (chunk, i) = (channel / LANES, channel % LANES);
    let (byte, bit) = if plane_bits(bits) == 4 {
        (i % 8, 4 * (i / 8))
    } else {
        (i / 4, 2 * (i % 4))
    };
    (chunk * 2 * plane_bits(bits) + byte, bit)
}

impl<'a, const BITS: usize> CodeRows<'a, BITS> {
    /// Takes rows of d channels, in segments, of which the first begins at position 0.
    pub fn new(segments: &'a [Segment<'a, u8>], d: usize) -> Self {
        let width = width(BITS, d);
        Self {
            segments,
            lower: &[],
            d,
            stride: width,
            at: 0,
            width,
            codes: code_bytes(BITS, d),
        }
    }

    /// Takes rows of d channels that are codes alone, `stride` bytes apart; a row begins `at` bytes after the place of its position.
    pub fn plane(segments: &'a [Segment<'a, u8>], d: usize, stride: usize, at: usize) -> Self {
        let codes = code_bytes(BITS, d);
        Self {
            segments,
            lower: &[],
            d,
            stride,
            at,
            width: codes,
            codes,
        }
    }

    /// Writes the codes of a row to `out`, `[d]`.
    pub fn read(self, position: u32, out: &mut [f32]) {
        let row = self.row(position);
        for (channel, to) in out.iter_mut().enumerate() {
            *to = f32::from(code::<BITS>(row, channel / GROUP, channel % GROUP));
        }
    }

    #[inline(always)]
    fn row(self, position: u32) -> Row<'a> {
        let (segment, at) = self.place(position);
        let own = |segments: &'a [Segment<'a, u8>]| &segments[segment].rows[at + self.at..][..self.width];
        Row(own(self.segments), if BITS == 8 { own(self.lower) } else { &[] })
    }

    /// Returns the index of the segment that has a position, and where the bytes of the position begin in it.
    #[inline(always)]
    fn place(self, position: u32) -> (usize, usize) {
        let own = self
            .segments
            .iter()
            .rposition(|segment| position as usize >= segment.first);
        let own = own.unwrap_or(0);
        (own, (position as usize - self.segments[own].first) * self.stride)
    }

    #[inline(always)]
    fn groups(self) -> usize {
        self.d.div_ceil(GROUP)
    }

    /// Returns scale and offset of a group of a row.
    #[inline(always)]
    fn pair(self, row: Row<'a>, group: usize) -> [f16; 2] {
        debug_assert!(group < self.groups());
        if self.codes == self.width {
            return [f16::ONE, f16::ZERO];
        }
        // SAFETY: a row has [`CodeRows::width`] bytes, of which the last are the pairs of its groups.
        let pair = unsafe {
            let at = row.0.as_ptr().add(self.codes + 4 * group);
            at.cast::<[u8; 4]>().read()
        };
        bytemuck::cast(pair)
    }

    #[inline(always)]
    fn prefetch_next(self, coming: &mut Coming) {
        if let Some(&position) = coming.next() {
            self.prefetch_at(position);
        }
    }
}

impl<'a> CodeRows<'a, 8> {
    /// Takes rows of d channels whose codes have their upper and their lower 4 bits in two planes, as [`CodeRows::plane`] has them.
    ///
    /// # Panics
    /// The planes have segments of other positions.
    pub fn joined(planes: [&'a [Segment<'a, u8>]; 2], d: usize, stride: usize, at: usize) -> Self {
        let [segments, lower] = planes;
        let firsts = |of: &'a [Segment<'a, u8>]| of.iter().map(|segment| segment.first);
        assert!(
            firsts(segments).eq(firsts(lower)),
            "both planes have the same segments"
        );
        Self {
            lower,
            ..Self::plane(segments, d, stride, at)
        }
    }
}

impl<const BITS: usize> StepRows for CodeRows<'_, BITS> {
    fn prefetch_at(self, position: u32) {
        let (segment, at) = self.place(position);
        let own = |segments: &[Segment<'_, u8>]| {
            let rows = segments[segment].rows;
            prefetch_row(&rows[at.min(rows.len())..], 0, self.stride);
        };
        own(self.segments);
        if BITS == 8 {
            own(self.lower);
        }
    }

    /// # Numerics
    /// The channels of a query that share a scale in the rows are rounded to multiples of the largest over 32,767. For each
    /// such group: the exact sum of products of codes, times the two scales, and the sum of the query's channels times the
    /// offset; groups are added in f32, with fused multiply-adds.
    fn scores(self, queries: &GroupQueries, run: &Run, out: &mut [f32], stride: usize) {
        assert_eq!(
            queries.chunks(),
            self.d / LANES,
            "queries have the channels of the keys"
        );
        scores(self, &RoundedQueries::new(queries, BITS), run, out, stride);
    }

    /// # Numerics
    /// The weights of 32 rows, times their scales, are rounded to multiples of the largest over 32,767. For each group of
    /// channels: the exact sum of products with the codes, times that scale, and the sum of weights times offsets; groups of
    /// rows are added in f32, with fused multiply-adds.
    fn add(self, weights: &[f32], stride: usize, run: &Run, sums: &mut OutputSums) {
        let chunks = sums.values.len() / sums.r;
        assert_eq!(chunks, self.d / LANES, "sums have the channels of the values");
        add(self, weights, stride, run, sums);
    }
}

/// The channels of a query that share a scale in the rows, in integers.
#[derive(Clone, Copy)]
#[repr(align(32))]
struct RoundedGroup {
    /// In the order in which the kernels unpack codes ([`score_channel`]); zeros beyond the last channel.
    codes: [i16; GROUP],
    scale: f32,
    /// The sum of the channels, before they were rounded.
    sum: f32,
}

/// The queries of one query group, in integers.
struct RoundedQueries {
    heads: usize,
    /// `[groups, heads]`.
    groups: Vec<RoundedGroup>,
}

impl RoundedQueries {
    fn new(queries: &GroupQueries, bits: usize) -> Self {
        let (heads, d) = (queries.heads(), queries.chunks() * LANES);
        let order: [usize; GROUP] = std::array::from_fn(|at| score_channel(bits, at));
        let rows: Vec<Vec<f32>> = (0..heads).map(|head| queries.row(head)).collect();
        let mut groups = Vec::with_capacity(heads * d.div_ceil(GROUP));
        for first in (0..d).step_by(GROUP) {
            for row in &rows {
                let mut group = [0.0; GROUP];
                let own = &row[first..d.min(first + GROUP)];
                group[..own.len()].copy_from_slice(own);
                let most = group.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
                let factor = factor(most);
                groups.push(RoundedGroup {
                    codes: order.map(|channel| round(group[channel], factor)),
                    scale: most / MOST,
                    sum: own.iter().map(|x| f64::from(*x)).sum::<f64>() as f32,
                });
            }
        }
        Self { heads, groups }
    }
}

/// Returns the factor with which numbers up to `most` become integers.
#[inline(always)]
fn factor(most: f32) -> f32 {
    let factor = MOST / most;
    if factor.is_finite() { factor } else { 0.0 }
}

/// Rounds a number to an integer; NaN becomes zero.
#[inline(always)]
fn round(x: f32, factor: f32) -> i16 {
    (x * factor).round_ties_even() as i16
}

/// Returns the channel of a group that has place `at` where scores are computed: four vectors of sixteen channels.
const fn score_channel(bits: usize, at: usize) -> usize {
    let (k, lane) = (at / 16, at % 16);
    if plane_bits(bits) == 4 {
        // The two halves of a vector unpack apart.
        let byte = lane / 8 * 16 + k % 2 * 8 + lane % 8;
        byte / 8 * LANES + byte % 8 + 8 * (k / 2)
    } else {
        4 * lane + k
    }
}

/// Returns the channel of a group that has place `at` where values are summed: two halves, each of four vectors of eight
/// channels.
const fn sum_channel(bits: usize, at: usize) -> usize {
    let (half, k, lane) = (at / 32, at / 8 % 4, at % 8);
    32 * half
        + if plane_bits(bits) == 4 {
            lane / 4 * LANES + lane % 4 + 4 * (k % 2) + 8 * (k / 2)
        } else {
            4 * lane + k
        }
}

/// Returns the code of a channel of a group, in a row.
#[inline(always)]
fn code<const BITS: usize>(row: Row<'_>, group: usize, channel: usize) -> u8 {
    let (byte, bit) = place(BITS, group * GROUP + channel);
    let of = |plane: &[u8]| plane[byte] >> bit & ((1 << plane_bits(BITS)) - 1);
    if BITS == 8 {
        of(row.0) << 4 | of(row.1)
    } else {
        of(row.0)
    }
}

#[multiversion(targets("x86_64+avx2+fma+f16c", "aarch64+neon"))]
fn scores<const BITS: usize>(
    rows: CodeRows<BITS>,
    queries: &RoundedQueries,
    run: &Run,
    out: &mut [f32],
    stride: usize,
) {
    match_target! {
        // SAFETY: compiled for, and chosen on, machines with these instructions.
        "x86_64+avx2+fma+f16c" => unsafe { x86::scores(rows, queries, run, out, stride) },
        "aarch64+neon" => plain_scores::<BITS, true>(rows, queries, run, out, stride),
        _ => plain_scores::<BITS, false>(rows, queries, run, out, stride),
    }
}

/// Computes `a b + c`, rounded once. With `FUSED`, the machine has an instruction for it.
#[inline(always)]
fn mul_add<const FUSED: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FUSED { a.mul_add(b, c) } else { fused(a, b, c) }
}

#[inline(always)]
fn plain_scores<const BITS: usize, const FUSED: bool>(
    rows: CodeRows<BITS>,
    queries: &RoundedQueries,
    run: &Run,
    out: &mut [f32],
    stride: usize,
) {
    let mut coming = run.coming();
    for (i, p) in run.now.iter().enumerate() {
        rows.prefetch_next(&mut coming);
        let row = rows.row(*p);
        for a in 0..queries.heads {
            out[a * stride + i] = 0.0;
        }
        for (g, of_group) in queries.groups.chunks(queries.heads).enumerate() {
            let channels = GROUP.min(rows.d - g * GROUP);
            let mut codes = [0i32; GROUP];
            for (at, to) in codes.iter_mut().enumerate() {
                let channel = score_channel(BITS, at);
                if channel < channels {
                    *to = i32::from(code::<BITS>(row, g, channel));
                }
            }
            let [scale, offset] = rows.pair(row, g).map(widen_f16);
            for (a, query) in of_group.iter().enumerate() {
                let products = codes.iter().zip(&query.codes).map(|(c, q)| c * i32::from(*q));
                let product = products.sum::<i32>() as f32 * query.scale;
                let score = &mut out[a * stride + i];
                *score = mul_add::<FUSED>(product, scale, *score);
                *score = mul_add::<FUSED>(query.sum, offset, *score);
            }
        }
    }
}

#[multiversion(targets("x86_64+avx2+fma+f16c", "aarch64+neon"))]
fn add<const BITS: usize>(
    rows: CodeRows<BITS>,
    weights: &[f32],
    stride: usize,
    run: &Run,
    sums: &mut OutputSums,
) {
    match_target! {
        // SAFETY: compiled for, and chosen on, machines with these instructions.
        "x86_64+avx2+fma+f16c" => unsafe { x86::add(rows, weights, stride, run, sums) },
        "aarch64+neon" => plain_add::<BITS, true>(rows, weights, stride, run, sums),
        _ => plain_add::<BITS, false>(rows, weights, stride, run, sums),
    }
}

/// The weights of a block of rows for one head and one group of channels, times the rows' scales, in integers.
#[derive(Clone, Copy)]
struct RoundedWeights {
    /// Zeros beyond the last row.
    codes: [i16; BLOCK],
    scale: f32,
    /// The sum of weights times offsets.
    offset: f32,
}

impl RoundedWeights {
    const NONE: Self = Self {
        codes: [0; BLOCK],
        scale: 0.0,
        offset: 0.0,
    };

    /// Rounds the weights of up to [`BLOCK`] rows with these scales and offsets.
    #[inline(always)]
    fn new<const FUSED: bool>(weights: &[f32], scales: &[f32; BLOCK], offsets: &[f32; BLOCK]) -> Self {
        let (mut all, mut scaled) = ([0.0; BLOCK], [0.0; BLOCK]);
        all[..weights.len()].copy_from_slice(weights);
        let mut lanes = [0.0f32; OFFSET_LANES];
        let mut most = [0.0f32; OFFSET_LANES];
        for i in 0..BLOCK {
            scaled[i] = all[i] * scales[i];
            let lane = i % OFFSET_LANES;
            most[lane] = most[lane].max(scaled[i].abs());
            lanes[lane] = mul_add::<FUSED>(all[i], offsets[i], lanes[lane]);
        }
        for half in [4, 2, 1] {
            for lane in 0..half {
                lanes[lane] += lanes[lane + half];
                most[lane] = most[lane].max(most[lane + half]);
            }
        }
        let factor = factor(most[0]);
        let mut codes = [0; BLOCK];
        for i in 0..BLOCK {
            codes[i] = round(scaled[i], factor);
        }
        Self {
            codes,
            scale: most[0] / MOST,
            offset: lanes[0],
        }
    }
}

/// Returns scales and offsets of a group of some rows; zeros beyond the last row.
#[inline(always)]
fn pairs<const BITS: usize>(
    rows: CodeRows<BITS>,
    positions: &[u32],
    group: usize,
) -> ([f32; BLOCK], [f32; BLOCK]) {
    let (mut scales, mut offsets) = ([0.0; BLOCK], [0.0; BLOCK]);
    for (i, p) in positions.iter().enumerate() {
        [scales[i], offsets[i]] = rows.pair(rows.row(*p), group).map(widen_f16);
    }
    (scales, offsets)
}

#[inline(always)]
fn plain_add<const BITS: usize, const FUSED: bool>(
    rows: CodeRows<BITS>,
    weights: &[f32],
    stride: usize,
    run: &Run,
    sums: &mut OutputSums,
) {
    let chunks = rows.d / LANES;
    let mut coming = run.coming();
    let mut own = vec![0.0; sums.r * rows.d];
    for (b, positions) in run.now.chunks(BLOCK).enumerate() {
        positions.iter().for_each(|_| rows.prefetch_next(&mut coming));
        for g in 0..rows.groups() {
            let (scales, offsets) = pairs(rows, positions, g);
            for (a, own) in own.chunks_mut(rows.d).enumerate() {
                let weights = &weights[a * stride + b * BLOCK..][..positions.len()];
                let rounded = RoundedWeights::new::<FUSED>(weights, &scales, &offsets);
                for (channel, to) in own.iter_mut().skip(g * GROUP).take(GROUP).enumerate() {
                    let product = |(p, w): (&u32, &i16)| {
                        i32::from(code::<BITS>(rows.row(*p), g, channel)) * i32::from(*w)
                    };
                    let sum: i32 = positions.iter().zip(&rounded.codes).map(product).sum();
                    *to = mul_add::<FUSED>(sum as f32, rounded.scale, *to) + rounded.offset;
                }
            }
        }
    }
    for (to, own) in sums.values.chunks_mut(chunks).zip(own.chunks(rows.d)) {
        let to = to.as_flattened_mut().iter_mut();
        to.zip(own).for_each(|(to, x)| *to += x);
    }
}

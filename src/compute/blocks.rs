//! Matrix products in blocks of at most [`SIDE`] by [`SIDE`] values, which fit into the caches.
//!
//! The left factor and the result are stored as rows of [`SIDE`] values, the right factor as panels of [`PANEL`]
//! columns.

use multiversion::multiversion;
use multiversion::target::match_target;

use super::attention::lanes::fused;
use super::pairs;

/// Rows of the right factor, and columns of the result, in one block.
pub const SIDE: usize = 128;
/// Columns per panel of the right factor.
pub const PANEL: usize = 32;
/// Panels per block.
pub const PANELS: usize = SIDE / PANEL;
/// The number of rows of the left factor is a multiple of this.
pub const TILE: usize = 12;
/// Rows and columns that are transposed in one step.
const LANES: usize = 16;

/// A row of the left factor, or of the result.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub struct Row(pub [f32; SIDE]);

impl Row {
    /// A row of zeros.
    pub const ZERO: Self = Self([0.0; SIDE]);

    /// Returns the values of rows, one row after the other.
    pub fn values(rows: &[Self]) -> &[f32] {
        bytemuck::cast_slice(rows)
    }

    /// Returns the values of rows, one row after the other.
    pub fn values_mut(rows: &mut [Self]) -> &mut [f32] {
        bytemuck::cast_slice_mut(rows)
    }
}

// SAFETY: a row of zero bits is a row of zeros.
unsafe impl bytemuck::Zeroable for Row {}

// SAFETY: a row consists of its values; their 512 bytes are a multiple of its alignment, so that there is no padding.
unsafe impl bytemuck::Pod for Row {}

/// A row of a panel, on a cache line boundary.
#[derive(Clone, Copy, Debug)]
#[repr(align(64))]
pub struct PanelLine<T = f32>(pub [T; PANEL]);

impl PanelLine {
    /// A line of zeros.
    pub const ZERO: Self = Self([0.0; PANEL]);
}

/// Computes `c = a b`, or `c += a b` with `add`.
///
/// # Shapes
/// a `[n, depth]`, n a multiple of [`TILE`] and depth at most [`SIDE`]; b `[panels, SIDE, PANEL]`, of which only the
/// first `depth` lines of each panel are read; c `[n, panels PANEL]`. Values of c beyond these columns stay unchanged.
///
/// # Numerics
/// f32. Each sum starts at zero and takes fused multiply-adds in order along the depth; with `add`, the sum is then
/// added to c. The bits are the same on every instruction set.
#[multiversion(targets("x86_64+avx512f+avx512vl", "x86_64+avx2+fma", "aarch64+neon"))]
pub fn multiply(a: &[Row], depth: usize, b: &[PanelLine], panels: usize, c: &mut [Row], add: bool) {
    // Rows and columns per tile: its sums, a line of its columns and a value of the left factor fit into the vector
    // registers. If they do not, sums go through memory, which takes more than twice as long on AVX2.
    match_target! {
        "x86_64+avx512f+avx512vl" => multiply_panels::<12, 32, true>(a, depth, b, panels, c, add),
        "x86_64+avx2+fma" => multiply_panels::<6, 16, true>(a, depth, b, panels, c, add),
        "aarch64+neon" => multiply_panels::<4, 16, true>(a, depth, b, panels, c, add),
        _ => multiply_panels::<1, 32, false>(a, depth, b, panels, c, add),
    }
}

/// As [`multiply`], but each f32 of `a` and `b` holds a pair of bf16 values ([`super::pairs`]), of which a sum takes both
/// products; `depth` counts pairs.
///
/// # Numerics
/// Those of the instruction VDPBF16PS, on every instruction set: each sum starts at zero and takes, pair by pair, the product of
/// the second values and then that of the first ones, rounded to f32 after each; numbers below 2^-126 count as zero. With `add`,
/// the sum is then added to c in f32.
#[multiversion(targets("x86_64+avx512f+avx512vl+avx512bf16"))]
pub fn multiply_pairs(a: &[Row], depth: usize, b: &[PanelLine], panels: usize, c: &mut [Row], add: bool) {
    let (depth, panels) = (depth.min(SIDE), panels.min(PANELS));
    assert!(
        b.len() >= panels.saturating_sub(1) * SIDE + depth,
        "lines of the panels"
    );
    let (a, c) = (a.as_chunks::<TILE>().0, c.as_chunks_mut::<TILE>().0);
    for p in 0..panels {
        let lines = &b[p * SIDE..][..depth];
        for (a, c) in a.iter().zip(&mut *c) {
            match_target! {
                // SAFETY: this arm is chosen only on machines with AVX512-BF16.
                "x86_64+avx512f+avx512vl+avx512bf16" => unsafe { x86::multiply_pairs(a, lines, p, c, add) },
                _ => multiply_pairs_plain(a, lines, p, c, add),
            }
        }
    }
}

/// Computes one panel of [`multiply_pairs`] for a tile of rows.
fn multiply_pairs_plain(a: &[Row; TILE], lines: &[PanelLine], panel: usize, c: &mut [Row; TILE], add: bool) {
    for (a, c) in a.iter().zip(c) {
        let c = &mut c.0.as_chunks_mut::<PANEL>().0[panel];
        for (l, c) in c.iter_mut().enumerate() {
            let terms = a.0.iter().zip(lines);
            let sum = terms.fold(0.0, |sum, (a, line)| pairs::add_products(sum, *a, line.0[l]));
            *c = if add { *c + sum } else { sum };
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;
    use std::mem::transmute;

    use super::{PANEL, PanelLine, Row, TILE};

    /// Vectors of a line of a panel.
    const VECTORS: usize = PANEL / 16;

    /// Implements [`super::multiply_pairs_plain`].
    #[target_feature(enable = "avx512f,avx512vl,avx512bf16")]
    pub fn multiply_pairs(
        a: &[Row; TILE],
        lines: &[PanelLine],
        panel: usize,
        c: &mut [Row; TILE],
        add: bool,
    ) {
        let mut sums = [[_mm512_setzero_ps(); VECTORS]; TILE];
        for (k, line) in lines.iter().enumerate() {
            let mut right = [_mm512_setzero_ps(); VECTORS];
            for (v, right) in right.iter_mut().enumerate() {
                // SAFETY: a line has VECTORS vectors.
                *right = unsafe { _mm512_load_ps(line.0.as_ptr().add(16 * v)) };
            }
            for r in 0..TILE {
                // SAFETY: there are at most as many lines as a row has values; both types have 64 bytes.
                unsafe {
                    let left: __m512bh = transmute(_mm512_set1_ps(*a[r].0.get_unchecked(k)));
                    for v in 0..VECTORS {
                        let right: __m512bh = transmute(right[v]);
                        sums[r][v] = _mm512_dpbf16_ps(sums[r][v], left, right);
                    }
                }
            }
        }
        for r in 0..TILE {
            let to = &mut c[r].0.as_chunks_mut::<PANEL>().0[panel];
            for (v, sum) in sums[r].iter().enumerate() {
                // SAFETY: a panel has VECTORS vectors of columns, on the line of a cache.
                unsafe {
                    let to = to.as_mut_ptr().add(16 * v);
                    let sum = if add {
                        _mm512_add_ps(_mm512_load_ps(to), *sum)
                    } else {
                        *sum
                    };
                    _mm512_store_ps(to, sum);
                }
            }
        }
    }
}

/// The most rows of the left factor of [`multiply_chosen`].
pub const ROWS: usize = 2 * TILE;

/// Computes `c = a b`, where b has some of the lines of a table.
///
/// # Shapes
/// a `[depth, ROWS]`, by column, of which the first n rows are used, n a multiple of [`TILE`]; chosen `[depth]`, the numbers of the
/// lines; table `[PANELS, lines, PANEL]`; c `[n, SIDE]`.
///
/// # Numerics
/// As [`multiply`].
#[multiversion(targets("x86_64+avx512f+avx512vl", "x86_64+avx2+fma", "aarch64+neon"))]
pub fn multiply_chosen(a: &[[f32; ROWS]], chosen: &[u16], table: &[PanelLine], c: &mut [Row]) {
    match_target! {
        "x86_64+avx512f+avx512vl" => multiply_chosen_tiles::<12, 32, true>(a, chosen, table, c),
        "x86_64+avx2+fma" => multiply_chosen_tiles::<6, 16, true>(a, chosen, table, c),
        "aarch64+neon" => multiply_chosen_tiles::<4, 16, true>(a, chosen, table, c),
        _ => multiply_chosen_tiles::<1, 32, false>(a, chosen, table, c),
    }
}

#[inline(always)]
fn multiply_chosen_tiles<const R: usize, const W: usize, const FMA: bool>(
    a: &[[f32; ROWS]],
    chosen: &[u16],
    table: &[PanelLine],
    c: &mut [Row],
) {
    let (each, depth) = (table.len() / PANELS, a.len().min(chosen.len()));
    let (a, chosen) = (&a[..depth], &chosen[..depth]);
    let left = |tile: usize| move |r: usize, k: usize| a[k].as_chunks::<R>().0[tile][r];
    let right = |panel: usize| {
        let lines = &table[panel * each..][..each];
        move |k: usize| &lines[usize::from(chosen[k])]
    };
    multiply_tiles::<R, W, FMA, _, _>(left, depth, right, PANELS, c, false);
}

/// Multiplies rows by the first lines of panels `[panels, SIDE, PANEL]`.
#[inline(always)]
fn multiply_panels<const R: usize, const W: usize, const FMA: bool>(
    a: &[Row],
    depth: usize,
    b: &[PanelLine],
    panels: usize,
    c: &mut [Row],
    add: bool,
) {
    let (a, _) = a.as_chunks::<R>();
    let n = a.len();
    let left = |tile: usize| {
        let rows = &a[tile];
        move |r: usize, k: usize| rows[r].0[k]
    };
    let depth = depth.min(SIDE);
    let right = |panel: usize| {
        let lines = &b[panel * SIDE..][..depth];
        move |k: usize| &lines[k]
    };
    multiply_tiles::<R, W, FMA, _, _>(left, depth, right, panels, &mut c[..n * R], add);
}

/// Multiplies rows by panels. `left` gives, for a tile of R rows, a value by row and column, and `right`, for a panel, a line.
#[inline(always)]
fn multiply_tiles<'b, const R: usize, const W: usize, const FMA: bool, A, B>(
    left: impl Fn(usize) -> A,
    depth: usize,
    right: impl Fn(usize) -> B,
    panels: usize,
    c: &mut [Row],
    add: bool,
) where
    A: Fn(usize, usize) -> f32,
    B: Fn(usize) -> &'b PanelLine,
{
    let (c, _) = c.as_chunks_mut::<R>();
    for p in 0..panels.min(PANELS) {
        let line = right(p);
        for part in 0..PANEL / W {
            for (tile, c) in c.iter_mut().enumerate() {
                let sums = multiply_tile::<R, W, FMA>(left(tile), depth, &line, part);
                for r in 0..R {
                    let c = &mut c[r].0.as_chunks_mut::<W>().0[p * (PANEL / W) + part];
                    for l in 0..W {
                        c[l] = if add { c[l] + sums[r][l] } else { sums[r][l] };
                    }
                }
            }
        }
    }
}

/// Multiplies rows by W columns of a panel, whose place among all such columns is `part`.
#[expect(clippy::needless_range_loop, reason = "iterators keep it from vectorising")]
#[inline(always)]
fn multiply_tile<'b, const R: usize, const W: usize, const FMA: bool>(
    a: impl Fn(usize, usize) -> f32,
    depth: usize,
    b: &impl Fn(usize) -> &'b PanelLine,
    part: usize,
) -> [[f32; W]; R] {
    let mut sums = [[0.0f32; W]; R];
    for k in 0..depth {
        let line = &b(k).0.as_chunks::<W>().0[part];
        for r in 0..R {
            let x = a(r, k);
            for l in 0..W {
                sums[r][l] = multiply_add::<FMA>(x, line[l], sums[r][l]);
            }
        }
    }
    sums
}

/// Returns `x y + sum`, rounded once.
#[inline(always)]
pub(crate) fn multiply_add<const FMA: bool>(x: f32, y: f32, sum: f32) -> f32 {
    // Without the instruction, `mul_add` would be a function call.
    if FMA { x.mul_add(y, sum) } else { fused(x, y, sum) }
}

/// Transposes rows into the columns of a panel: `lines[i][j] = rows[j][i]`.
///
/// # Shapes
/// rows `[PANEL, SIDE]`, lines `[n, PANEL]`, n at most [`SIDE`].
#[multiversion(targets("x86_64+avx512f+avx512vl", "x86_64+avx2", "aarch64+neon"))]
pub fn transpose(rows: &[Row; PANEL], lines: &mut [PanelLine]) {
    let (mut x, mut y) = ([[0.0f32; LANES]; LANES], [[0.0f32; LANES]; LANES]);
    let (halves, _) = rows.as_chunks::<LANES>();
    for (half, rows) in halves.iter().enumerate() {
        for (block, lines) in lines.chunks_mut(LANES).enumerate().take(SIDE / LANES) {
            for (x, row) in x.iter_mut().zip(rows) {
                *x = row.0.as_chunks::<LANES>().0[block];
            }
            // Each riffle exchanges one bit of the row index with one bit of the column index; four riffles exchange
            // all bits.
            riffle(&x, &mut y);
            riffle(&y, &mut x);
            riffle(&x, &mut y);
            riffle(&y, &mut x);
            for (line, x) in lines.iter_mut().zip(&x) {
                line.0.as_chunks_mut::<LANES>().0[half] = *x;
            }
        }
    }
}

/// Interleaves the values of rows i and i + 8 into rows 2i and 2i + 1.
#[inline(always)]
fn riffle(from: &[[f32; LANES]; LANES], to: &mut [[f32; LANES]; LANES]) {
    const HALF: usize = LANES / 2;
    let (pairs, _) = to.as_chunks_mut::<2>();
    for i in 0..HALF {
        let [low, high] = &mut pairs[i];
        let (a, b) = (&from[i], &from[i + HALF]);
        for l in 0..HALF {
            low[2 * l] = a[l];
            low[2 * l + 1] = b[l];
            high[2 * l] = a[l + HALF];
            high[2 * l + 1] = b[l + HALF];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::values;

    fn rows(n: usize, seed: u32) -> Vec<Row> {
        let values = values(n * SIDE, seed);
        values.as_chunks::<SIDE>().0.iter().map(|x| Row(*x)).collect()
    }

    #[test]
    fn columns_become_rows() {
        let rows = rows(PANEL, 1);
        for n in [1, 15, 16, 80, 127, 128] {
            let mut lines = vec![PanelLine([7.0; PANEL]); n];
            transpose(rows.first_chunk().expect("rows"), &mut lines);
            for (i, line) in lines.iter().enumerate() {
                for (j, row) in rows.iter().enumerate() {
                    assert_eq!(line.0[j], row.0[i], "{n}: {i}, {j}");
                }
            }
        }
    }

    /// Computes the sums one by one, with the bits that [`multiply`] promises.
    fn expected(a: &[Row], depth: usize, b: &[PanelLine], panels: usize, c: &mut [Row], add: bool) {
        for (a, c) in a.iter().zip(c) {
            for j in 0..panels * PANEL {
                let column = b[j / PANEL * SIDE..].iter().map(|line| line.0[j % PANEL]);
                let terms = a.0.iter().zip(column).take(depth);
                let sum = terms.fold(0.0, |sum: f32, (x, y)| x.mul_add(y, sum));
                c.0[j] = if add { c.0[j] + sum } else { sum };
            }
        }
    }

    #[test]
    fn every_tile_gives_the_same_bits() {
        let (mut a, start) = (rows(24, 2), rows(24, 3));
        let b = values(PANELS * SIDE * PANEL, 4);
        let b: Vec<PanelLine> = b.as_chunks().0.iter().map(|x| PanelLine(*x)).collect();
        (a[3].0[5], a[17].0[2]) = (1e30, 1e-30);
        type Multiply = fn(&[Row], usize, &[PanelLine], usize, &mut [Row], bool);
        let ways: [Multiply; 6] = [
            multiply,
            multiply_panels::<12, 32, true>,
            multiply_panels::<6, 16, true>,
            multiply_panels::<4, 16, true>,
            multiply_panels::<1, 32, true>,
            multiply_panels::<1, 32, false>,
        ];
        for (n, depth, panels) in [
            (12, 1, 1),
            (24, 64, 2),
            (12, 127, 3),
            (24, 128, 4),
            (0, 8, 4),
            (24, 0, 1),
        ] {
            for add in [false, true] {
                let mut exact = start.clone();
                expected(&a[..n], depth, &b, panels, &mut exact[..n], add);
                for (i, way) in ways.iter().enumerate() {
                    let mut c = start.clone();
                    way(&a[..n], depth, &b, panels, &mut c[..n], add);
                    for (c, exact) in c.iter().zip(&exact) {
                        assert_eq!(
                            c.0.map(f32::to_bits),
                            exact.0.map(f32::to_bits),
                            "{i}: {n} {depth} {panels}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn products_of_pairs_have_the_bits_of_the_plain_form() {
        let mut next = crate::testing::numbers(5);
        // Values of every size, some of them below the least ordinary number, whose sums stay finite.
        let mut half = || {
            let bits = next() >> 16;
            let exponent = [0, 1, 100, 120, 127, 130, 140, 60][(bits >> 8 & 7) as usize];
            bits & 0x807f | exponent << 7
        };
        let mut pair = || f32::from_bits(half() | half() << 16);
        for (n, depth, panels) in [(12, 1, 1), (24, 64, 4), (36, 127, 3), (12, 128, 2)] {
            let row = |_| Row(std::array::from_fn(|_| pair()));
            let a: Vec<Row> = (0..n).map(row).collect();
            let line = |_| PanelLine(std::array::from_fn(|_| pair()));
            let b: Vec<PanelLine> = (0..panels * SIDE).map(line).collect();
            for add in [false, true] {
                let mut found = rows(n, 7);
                let mut expected = found.clone();
                multiply_pairs(&a, depth, &b, panels, &mut found, add);
                let tiles = expected.as_chunks_mut::<TILE>().0.iter_mut();
                for (c, a) in tiles.zip(a.as_chunks::<TILE>().0) {
                    for p in 0..panels {
                        multiply_pairs_plain(a, &b[p * SIDE..][..depth], p, c, add);
                    }
                }
                let bits = |rows: &[Row]| {
                    Row::values(rows)
                        .iter()
                        .map(|x| x.to_bits())
                        .collect::<Vec<u32>>()
                };
                assert!(bits(&found) == bits(&expected), "{n} {depth} {panels} {add}");
                assert!(Row::values(&found).iter().all(|x| x.is_finite()));
            }
        }
    }

    #[test]
    fn chosen_lines_give_the_bits_of_a_table_that_has_only_them() {
        for (each, n, chosen) in [
            (7, 12, vec![6, 0, 3]),
            (128, 24, (0..128).rev().collect()),
            (5, 24, vec![]),
        ] {
            let a = rows(n, 5);
            let column = |k: usize| std::array::from_fn(|i| a.get(i).map_or(f32::NAN, |row| row.0[k]));
            let by_column: Vec<[f32; ROWS]> = (0..chosen.len()).map(column).collect();
            let table = values(PANELS * each * PANEL, 7);
            let table: Vec<PanelLine> = table.as_chunks().0.iter().map(|x| PanelLine(*x)).collect();
            let mut panels = vec![PanelLine::ZERO; PANELS * SIDE];
            for (panel, table) in panels.chunks_exact_mut(SIDE).zip(table.chunks_exact(each)) {
                let lines = panel.iter_mut().zip(&chosen);
                lines.for_each(|(to, k)| *to = table[usize::from(*k)]);
            }
            let mut exact = rows(n, 6);
            expected(&a, chosen.len(), &panels, PANELS, &mut exact, false);
            type Multiply = fn(&[[f32; ROWS]], &[u16], &[PanelLine], &mut [Row]);
            let ways: [Multiply; 5] = [
                multiply_chosen,
                multiply_chosen_tiles::<12, 32, true>,
                multiply_chosen_tiles::<6, 16, true>,
                multiply_chosen_tiles::<4, 16, true>,
                multiply_chosen_tiles::<1, 32, false>,
            ];
            for way in ways {
                let mut c = rows(n, 6);
                way(&by_column, &chosen, &table, &mut c);
                let bits = |rows: &[Row]| Row::values(rows).iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&c), bits(&exact), "{each}");
            }
        }
    }
}

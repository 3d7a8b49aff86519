//! The scores of a query with one vector that is rotated to many consecutive positions.
//!
//! Such a score is a sum of waves, one per pair of channels: with a frequency w, it is
//! `q . R_p m = sum (a cos(p w) + b sin(p w))`, where a and b are products of the pair's channels of q and m. A matrix
//! product sums the waves of a line of consecutive positions. Over one line, the slow waves are together a polynomial of
//! the position, so that a few terms serve for all of them.

use ndarray::{Array2, ArrayView1, s};

use crate::compute::blocks::{PANEL, PANELS, PanelLine, Row, SIDE, TILE, multiply};
use crate::compute::layout::{elements, elements_mut};
use crate::compute::{gemm, simd};
use crate::model::rope::Rope;

/// Consecutive positions whose scores are one row of a product.
const LINE: usize = SIDE;
/// Lines that are scored together, so that the factors stay in the processor's cache.
const LINES_AT_ONCE: usize = 4 * TILE;
/// Terms of the polynomial.
const TERMS: usize = 8;
/// The largest angle, in half a line, of a slow wave: `SLOW^TERMS / TERMS!` is below the rounding of f32.
const SLOW: f64 = 0.45;

/// The waves of a rotation.
pub(super) struct Waves {
    /// The frequency of each pair of channels.
    frequencies: Vec<f64>,
    /// The pairs, the fast ones first.
    order: Vec<usize>,
    /// Number of fast pairs.
    n_fast: usize,
    /// Cosines and sines of the angles of a whole line, in this order.
    turn: [Vec<f32>; 2],
    /// Per pair: the wave at each position of a line, the cosines of the fast pairs, then their sines, then the powers of
    /// the position, from -1 to 1: `[depth / SIDE, PANELS, SIDE]`.
    table: Vec<PanelLine>,
    /// Number of lines of the table that are used, in all its blocks.
    depth: usize,
    /// The polynomial of each slow pair, `[2 slow, TERMS]`: of the cosines, then of the sines.
    series: Array2<f32>,
}

impl Waves {
    /// Computes the waves of the frequencies and of the factor of a rotation.
    pub fn new(rope: &Rope) -> Self {
        let frequencies: Vec<f64> = rope.frequencies().iter().map(|w| f64::from(*w)).collect();
        let factor = f64::from(rope.attention_factor());
        let half_angle = |pair: usize| frequencies[pair] * (LINE / 2) as f64;
        let (fast, slow): (Vec<usize>, Vec<usize>) =
            (0..frequencies.len()).partition(|pair| half_angle(*pair).abs() > SLOW);
        let n_fast = fast.len();
        let depth = 2 * n_fast + if slow.is_empty() { 0 } else { TERMS };
        let mut table = vec![PanelLine::ZERO; depth.div_ceil(SIDE) * PANELS * SIDE];
        for at in 0..depth {
            for position in 0..LINE {
                let angle = |pair: usize| position as f64 * frequencies[pair];
                let value = if at < n_fast {
                    factor * angle(fast[at]).cos()
                } else if at < 2 * n_fast {
                    factor * angle(fast[at - n_fast]).sin()
                } else {
                    (position as f64 / (LINE / 2) as f64 - 1.0).powi((at - 2 * n_fast) as i32)
                };
                let line = (at / SIDE * PANELS + position / PANEL) * SIDE + at % SIDE;
                table[line].0[position % PANEL] = value as f32;
            }
        }
        let mut series = Array2::zeros((2 * slow.len(), TERMS));
        for (i, pair) in slow.iter().enumerate() {
            // The next term of a cosine or sine, for the angle at the end of a line.
            let mut term = factor;
            for power in 0..TERMS {
                let sign = if power % 4 < 2 { 1.0 } else { -1.0 };
                series[[i + power % 2 * slow.len(), power]] = (sign * term) as f32;
                term *= half_angle(*pair) / (power + 1) as f64;
            }
        }
        let order = [fast, slow].concat();
        let angles = order.iter().map(|pair| frequencies[*pair] * LINE as f64);
        let turn = [f64::cos as fn(f64) -> f64, f64::sin]
            .map(|of| angles.clone().map(|angle| of(angle) as f32).collect());
        Self {
            frequencies,
            order,
            n_fast,
            turn,
            table,
            depth,
            series,
        }
    }

    /// Returns the scores of a query with a vector, both `[d]`, that is rotated to `n` positions from `first` on.
    ///
    /// # Numerics
    /// f32. The waves are turned by one line after the other.
    pub fn scores(&self, query: &[f32], vector: ArrayView1<f32>, first: usize, n: usize) -> Vec<f32> {
        let mut waves = self.at(query, vector, first);
        let mut turned = Array2::zeros((LINES_AT_ONCE, self.depth + self.series.nrows()));
        let blocks = self.depth.div_ceil(SIDE);
        let mut rows = vec![Row::ZERO; blocks * LINES_AT_ONCE];
        let mut sums = vec![Row::ZERO; LINES_AT_ONCE];
        let mut scores = Vec::with_capacity(n.next_multiple_of(LINE));
        for start in (0..n.div_ceil(LINE)).step_by(LINES_AT_ONCE) {
            let lines = LINES_AT_ONCE.min(n.div_ceil(LINE) - start);
            for mut row in turned.rows_mut().into_iter().take(lines) {
                let (fast, slow) = elements_mut(&mut row).split_at_mut(self.depth);
                waves.write(self.n_fast, fast, slow);
                simd::turn(&self.turn[0], &self.turn[1], &mut waves.cos, &mut waves.sin);
            }
            let (mut left, slow) =
                turned.multi_slice_mut((s![..lines, ..self.depth], s![..lines, self.depth..]));
            if !slow.is_empty() {
                let terms = left.slice_mut(s![.., 2 * self.n_fast..]);
                gemm(terms, false, slow.view(), self.series.view());
            }
            for (i, row) in left.rows().into_iter().enumerate() {
                for (block, part) in elements(&row).chunks(SIDE).enumerate() {
                    rows[block * LINES_AT_ONCE + i].0[..part.len()].copy_from_slice(part);
                }
            }
            let used = lines.next_multiple_of(TILE);
            let each = rows
                .chunks_exact(LINES_AT_ONCE)
                .zip(self.table.chunks_exact(PANELS * SIDE));
            for (block, (rows, table)) in each.enumerate() {
                let depth = SIDE.min(self.depth - block * SIDE);
                multiply(&rows[..used], depth, table, PANELS, &mut sums[..used], block > 0);
            }
            sums[..lines]
                .iter()
                .for_each(|row| scores.extend_from_slice(&row.0));
        }
        scores.truncate(n);
        scores
    }

    /// Returns the waves of a query with a vector: of the fast pairs at the start of the line that begins at position
    /// `first`, of the slow pairs in its middle.
    fn at(&self, query: &[f32], vector: ArrayView1<f32>, first: usize) -> Factors {
        let half = self.frequencies.len();
        let (mut cos, mut sin) = (Vec::with_capacity(half), Vec::with_capacity(half));
        for (i, &pair) in self.order.iter().enumerate() {
            let (q, m) = (
                [query[pair], query[pair + half]],
                [vector[pair], vector[pair + half]],
            );
            let (a, b) = (q[0] * m[0] + q[1] * m[1], q[1] * m[0] - q[0] * m[1]);
            let position = if i < self.n_fast { first } else { first + LINE / 2 };
            let (y, x) = (position as f64 * self.frequencies[pair]).sin_cos();
            let (x, y) = (x as f32, y as f32);
            cos.push(a * x + b * y);
            sin.push(b * x - a * y);
        }
        Factors { cos, sin }
    }
}

/// The factors of the cosines and of the sines of all pairs, the fast ones first.
struct Factors {
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl Factors {
    /// Writes the factors of the fast pairs to the beginning of `fast`, and those of the others to `slow`.
    fn write(&self, n_fast: usize, fast: &mut [f32], slow: &mut [f32]) {
        for (i, factors) in [&self.cos, &self.sin].into_iter().enumerate() {
            let (of_fast, of_slow) = factors.split_at(n_fast);
            fast[i * n_fast..][..n_fast].copy_from_slice(of_fast);
            slow[i * of_slow.len()..][..of_slow.len()].copy_from_slice(of_slow);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::rope::{RopeConfig, RopeScaling};
    use crate::testing::values;

    const UNIT: f64 = 1.0 / (1 << 24) as f64;

    fn rope(theta: f64, d: usize) -> Rope {
        let scaling = RopeScaling::Default;
        Rope::new(&RopeConfig { theta, scaling }, d).with_factor(1.25)
    }

    /// Both channels of a pair.
    fn pair_of(x: &[f32], pair: usize) -> [f64; 2] {
        [pair, pair + x.len() / 2].map(|c| f64::from(x[c]))
    }

    /// With all pairs fast, with some, and in two blocks of the table.
    #[test]
    fn scores_are_those_of_the_rotated_vector() {
        for (theta, d) in [(2.0, 8), (1e4, 64), (5e5, 128), (10.0, 256)] {
            let rope = rope(theta, d);
            let waves = Waves::new(&rope);
            let is_split = waves.n_fast < d / 2;
            let expected = ([1e4, 5e5].contains(&theta), d == 256);
            assert_eq!((is_split, waves.depth > SIDE), expected, "{theta}");
            let (query, vector) = (values(d, 1), values(d, 2));
            let frequencies = rope.frequencies().iter().enumerate();
            let pairs: Vec<_> = frequencies
                .map(|(i, w)| (pair_of(&query, i), pair_of(&vector, i), f64::from(*w)))
                .collect();
            let amplitudes = pairs
                .iter()
                .map(|(q, m, _)| 1.25 * q[0].hypot(q[1]) * m[0].hypot(m[1]));
            let size: f64 = amplitudes.sum();
            // Of the product with the table, and of the one that makes its polynomial.
            let terms = waves.depth + waves.series.nrows();
            for (first, n) in [(0, 1), (4, 128), (5, 300), (100_000, 7000)] {
                let scores = waves.scores(&query, ArrayView1::from(&vector), first, n);
                assert_eq!(scores.len(), n);
                for (i, score) in scores.iter().enumerate() {
                    let wave = |([q, r], [m, o], w): &([f64; 2], [f64; 2], f64)| {
                        let (sin, cos) = ((first + i) as f64 * w).sin_cos();
                        1.25 * (q * (m * cos - o * sin) + r * (o * cos + m * sin))
                    };
                    let exact: f64 = pairs.iter().map(wave).sum();
                    // A turn to the next line is off by at most 4.4 units, the factors of the first line and the table by
                    // 16; every term of a sum, the cosine's and the sine's together sqrt(2) times a wave, by one.
                    let units = 4.4 * (i / LINE) as f64 + 16.0 + terms as f64 * std::f64::consts::SQRT_2;
                    let off = (f64::from(*score) - exact).abs();
                    assert!(off <= size * units * UNIT, "{theta} {first} {i}: {score} {exact}");
                }
            }
        }
    }

    /// At both ends of a line, where it is farthest off.
    #[test]
    fn the_polynomial_of_slow_waves_is_exact_to_the_rounding() {
        let mut largest = 0.0f64;
        for (theta, d) in [(1e4, 64), (5e5, 128), (1e6, 256)] {
            let rope = rope(theta, d);
            let waves = Waves::new(&rope);
            let slow = &waves.order[waves.n_fast..];
            for (i, pair) in slow.iter().enumerate() {
                let angle = f64::from(rope.frequencies()[*pair]) * (LINE / 2) as f64;
                largest = largest.max(angle);
                for end in [-1.0f64, 1.0] {
                    let value = |row: usize| -> f64 {
                        let terms = waves.series.row(row).into_iter().enumerate();
                        terms
                            .map(|(power, x)| f64::from(*x) * end.powi(power as i32))
                            .sum()
                    };
                    for (row, exact) in [(i, angle.cos()), (slow.len() + i, (end * angle).sin())] {
                        let off = (value(row) - 1.25 * exact).abs();
                        // The first term that is left out, and the coefficients' roundings.
                        let bound = 1.25 * (SLOW.powi(TERMS as i32) / 40_320.0 + 1.5 * UNIT);
                        assert!(off <= bound, "{theta} {pair}: {off} over {bound}");
                    }
                }
            }
        }
        assert!(largest > 0.9 * SLOW, "{largest}");
    }
}

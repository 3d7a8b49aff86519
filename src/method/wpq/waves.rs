//! The scores of queries with one vector that is rotated to many consecutive positions.
//!
//! Such a score is a sum of waves, one per pair of channels: with a frequency w, it is
//! `q . R_p m = sum (a cos(p w) + b sin(p w))`, where a and b are products of the pair's channels of q and m. A matrix
//! product sums the waves of a line of consecutive positions. Over one line, the slow waves are together a polynomial of
//! the position, so that a few terms serve for all of them.

use std::f64::consts::PI;

use multiversion::multiversion;
use ndarray::{ArrayView1, ArrayView2};

use crate::compute::blocks::{PANEL, PANELS, PanelLine, Row, SIDE, TILE, multiply};
use crate::model::rope::Rope;

/// Consecutive positions whose scores are one row of a product.
pub(super) const LINE: usize = SIDE;
/// The most lines that are scored together, so that factors and scores stay in the processor's cache.
pub(super) const LINES_AT_ONCE: usize = 2 * TILE;
/// Chebyshev polynomials of an even degree, from 0 on, whose sum is the cosine of a slow wave; as many of an odd degree
/// are its sine.
const TERMS: usize = 8;
/// The largest angle, in half a line, of a slow wave. The next polynomial's factor, `2 J_16(4.5)`, is below the rounding
/// of f32.
const SLOW: f64 = 4.5;

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
    /// Per pair: the wave at each position of a line, the cosines of the fast pairs, then their sines, then the
    /// polynomials of even degree, then those of odd degree: `[depth / SIDE, PANELS, SIDE]`.
    table: Vec<PanelLine>,
    /// Number of lines of the table that are used, in all its blocks.
    depth: usize,
    /// For each slow pair, the factors of the polynomials of its cosine, then of its sine.
    series: Vec<[[f32; TERMS]; 2]>,
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
        let depth = 2 * n_fast + if slow.is_empty() { 0 } else { 2 * TERMS };
        let mut table = vec![PanelLine::ZERO; depth.div_ceil(SIDE) * PANELS * SIDE];
        for at in 0..depth {
            for position in 0..LINE {
                let angle = |pair: usize| position as f64 * frequencies[pair];
                let value = if at < n_fast {
                    factor * angle(fast[at]).cos()
                } else if at < 2 * n_fast {
                    factor * angle(fast[at - n_fast]).sin()
                } else {
                    let (parity, term) = ((at - 2 * n_fast) / TERMS, (at - 2 * n_fast) % TERMS);
                    chebyshev(2 * term + parity, position as f64 / (LINE / 2) as f64 - 1.0)
                };
                let line = (at / SIDE * PANELS + position / PANEL) * SIDE + at % SIDE;
                table[line].0[position % PANEL] = value as f32;
            }
        }
        let series = slow.iter().map(|pair| {
            let of = |function: fn(f64) -> f64, parity: usize| {
                let wave = |x: f64| factor * function(half_angle(*pair) * x);
                std::array::from_fn(|term| chebyshev_factor(wave, 2 * term + parity) as f32)
            };
            [of(f64::cos, 0), of(f64::sin, 1)]
        });
        let series = series.collect();
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

/// Returns the value of a Chebyshev polynomial at x, from -1 to 1.
fn chebyshev(degree: usize, x: f64) -> f64 {
    (degree as f64 * x.acos()).cos()
}

/// Returns the factor of a Chebyshev polynomial in the series of a function, for degrees far below 64.
fn chebyshev_factor(function: impl Fn(f64) -> f64, degree: usize) -> f64 {
    const NODES: usize = 64;
    let node = |j: usize| ((j as f64 + 0.5) * PI / NODES as f64).cos();
    let products = (0..NODES).map(|j| function(node(j)) * chebyshev(degree, node(j)));
    products.sum::<f64>() * if degree == 0 { 1.0 } else { 2.0 } / NODES as f64
}

/// The factors of the cosines and of the sines of all pairs, the fast ones first.
struct Factors {
    cos: Vec<f32>,
    sin: Vec<f32>,
}

/// Returns the factors of the polynomials of even and of odd degree whose sum is the slow waves with these factors.
#[inline(always)]
fn polynomials(series: &[[[f32; TERMS]; 2]], cos: &[f32], sin: &[f32]) -> [[f32; TERMS]; 2] {
    // Two partial sums each, so that no addition waits for the one before it.
    let (mut even, mut odd) = ([[0.0f32; TERMS]; 2], [[0.0f32; TERMS]; 2]);
    let (pairs, rest) = series.as_chunks::<2>();
    let (cos, sin) = (cos.as_chunks::<2>(), sin.as_chunks::<2>());
    for ([a, b], (cos, sin)) in pairs.iter().zip(cos.0.iter().zip(sin.0)) {
        for term in 0..TERMS {
            even[0][term] += a[0][term] * cos[0];
            odd[0][term] += a[1][term] * sin[0];
            even[1][term] += b[0][term] * cos[1];
            odd[1][term] += b[1][term] * sin[1];
        }
    }
    for (a, (cos, sin)) in rest.iter().zip(cos.1.iter().zip(sin.1)) {
        for term in 0..TERMS {
            even[0][term] += a[0][term] * cos;
            odd[0][term] += a[1][term] * sin;
        }
    }
    for term in 0..TERMS {
        even[0][term] += even[1][term];
        odd[0][term] += odd[1][term];
    }
    [even[0], odd[0]]
}

/// Writes the left factor of a product, `[blocks, LINES_AT_ONCE, SIDE]`, for some consecutive lines, and turns the
/// factors past them.
///
/// # Numerics
/// f32. The factors are turned by one line after the other.
#[multiversion(targets("x86_64+avx512f+avx512vl", "x86_64+avx2", "aarch64+neon"))]
fn write_lines(waves: &Waves, factors: &mut Factors, lines: usize, rows: &mut [Row]) {
    let (n, n_fast) = (waves.order.len(), waves.n_fast);
    let [turn_cos, turn_sin] = &waves.turn;
    let (turn_cos, turn_sin) = (&turn_cos[..n], &turn_sin[..n]);
    let (cos, sin) = (&mut factors.cos[..n], &mut factors.sin[..n]);
    let mut wide = vec![0.0; waves.depth];
    for i in 0..lines {
        let line = match waves.depth <= SIDE {
            true => &mut rows[i].0[..waves.depth],
            false => wide.as_mut_slice(),
        };
        let [even, odd] = polynomials(&waves.series, &cos[n_fast..], &sin[n_fast..]);
        let (fast, of_slow) = line.split_at_mut(2 * n_fast);
        if let Some((of_cos, of_sin)) = of_slow.split_at_mut_checked(TERMS) {
            of_cos.copy_from_slice(&even);
            of_sin.copy_from_slice(&odd);
        }
        let (of_cos, of_sin) = fast.split_at_mut(n_fast);
        // Each pair (a, b) is turned to (a cos + b sin, b cos - a sin).
        let turn = |pair: usize, a: &mut f32, b: &mut f32| {
            let (x, y) = (*a, *b);
            *a = x * turn_cos[pair] + y * turn_sin[pair];
            *b = y * turn_cos[pair] - x * turn_sin[pair];
        };
        for pair in 0..n_fast {
            (of_cos[pair], of_sin[pair]) = (cos[pair], sin[pair]);
            turn(pair, &mut cos[pair], &mut sin[pair]);
        }
        for pair in n_fast..n {
            turn(pair, &mut cos[pair], &mut sin[pair]);
        }
        if waves.depth > SIDE {
            for (part, rows) in wide.chunks(SIDE).zip(rows.chunks_exact_mut(LINES_AT_ONCE)) {
                rows[i].0[..part.len()].copy_from_slice(part);
            }
        }
    }
}

/// The scores of several queries with one rotated vector, at ascending positions.
pub(super) struct Walks<'a> {
    waves: &'a Waves,
    /// The factors of each query at its next line.
    factors: Vec<Factors>,
    /// The left factor of a product, `[blocks, LINES_AT_ONCE, SIDE]`.
    rows: Vec<Row>,
}

impl<'a> Walks<'a> {
    /// Starts at position `first`, with queries `[r,d]` times `scale` and the vector `[d]`.
    pub fn new(
        waves: &'a Waves,
        queries: ArrayView2<f32>,
        scale: f32,
        vector: ArrayView1<f32>,
        first: usize,
    ) -> Self {
        let of = |query: ArrayView1<f32>| waves.at(&(&query * scale).to_vec(), vector, first);
        Self {
            waves,
            factors: queries.rows().into_iter().map(of).collect(),
            rows: vec![Row::ZERO; waves.depth.div_ceil(SIDE) * LINES_AT_ONCE],
        }
    }

    /// Writes the scores of query `a` at its next positions, a line to a row of `scores`. Their number is a multiple of
    /// [`TILE`], at most [`LINES_AT_ONCE`].
    ///
    /// # Numerics
    /// f32.
    pub fn advance(&mut self, a: usize, scores: &mut [Row]) {
        let (waves, lines) = (self.waves, scores.len());
        write_lines(waves, &mut self.factors[a], lines, &mut self.rows);
        let rows = self.rows.chunks_exact(LINES_AT_ONCE);
        let tables = waves.table.chunks_exact(PANELS * SIDE);
        for (block, (rows, table)) in rows.zip(tables).enumerate() {
            let depth = SIDE.min(waves.depth - block * SIDE);
            multiply(&rows[..lines], depth, table, PANELS, scores, block > 0);
        }
    }
}

/// Returns the number of rows that [`Walks::advance`] needs for the scores at `n` positions.
pub(super) fn rows(n: usize) -> usize {
    n.div_ceil(LINE).next_multiple_of(TILE)
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
            // Of the product with the table, and of the sums that make its polynomials.
            let terms = waves.depth + 2 * waves.series.len();
            // How much larger than a slow wave the sum of the magnitudes of its polynomials may be.
            let series = waves.series.iter().flatten();
            let spread = series.map(|factors| factors.iter().map(|x| x.abs() / 1.25).sum::<f32>());
            let spread = f64::from(spread.fold(1.0, f32::max));
            assert!(spread < 3.0, "{spread}");
            for (first, n) in [(0, 1), (4, 128), (5, 300), (100_000, 7000)] {
                let queries = ArrayView2::from_shape((1, d), &query).unwrap();
                let mut walks = Walks::new(&waves, queries, 1.0, ArrayView1::from(&vector), first);
                let mut scores = vec![Row::ZERO; rows(n)];
                let blocks = scores.chunks_mut(LINES_AT_ONCE);
                blocks.for_each(|scores| walks.advance(0, scores));
                for (i, score) in Row::values(&scores).iter().enumerate().take(n) {
                    let wave = |([q, r], [m, o], w): &([f64; 2], [f64; 2], f64)| {
                        let (sin, cos) = ((first + i) as f64 * w).sin_cos();
                        1.25 * (q * (m * cos - o * sin) + r * (o * cos + m * sin))
                    };
                    let exact: f64 = pairs.iter().map(wave).sum();
                    // A turn to the next line is off by at most 4.4 units, the factors of the first line and the table by
                    // 16; every term of a sum, the cosine's and the sine's together sqrt(2) times a wave, by one.
                    let turned = 4.4 * (i / LINE) as f64 + 16.0;
                    let units = spread * (turned + terms as f64 * std::f64::consts::SQRT_2);
                    let off = (f64::from(*score) - exact).abs();
                    assert!(off <= size * units * UNIT, "{theta} {first} {i}: {score} {exact}");
                }
            }
        }
    }

    #[test]
    fn the_polynomial_of_slow_waves_is_exact_to_the_rounding() {
        let mut largest = 0.0f64;
        for (theta, d) in [(1e4, 64), (5e5, 128), (1e6, 256)] {
            let rope = rope(theta, d);
            let waves = Waves::new(&rope);
            let slow = &waves.order[waves.n_fast..];
            assert_eq!(slow.len(), waves.series.len());
            for (pair, [of_cos, of_sin]) in slow.iter().zip(&waves.series) {
                let angle = f64::from(rope.frequencies()[*pair]) * (LINE / 2) as f64;
                largest = largest.max(angle);
                for x in (-50..=50).map(|i| f64::from(i) / 50.0) {
                    let value = |factors: &[f32; TERMS], parity: usize| -> f64 {
                        let terms = factors.iter().enumerate();
                        let term = |(i, f): (usize, &f32)| f64::from(*f) * chebyshev(2 * i + parity, x);
                        terms.map(term).sum()
                    };
                    let (sin, cos) = (angle * x).sin_cos();
                    for (value, exact) in [(value(of_cos, 0), cos), (value(of_sin, 1), sin)] {
                        let off = (value - 1.25 * exact).abs();
                        // Twice the first factor that is left out, 2 (a/2)^16 / 16!, and half a unit of each other.
                        let left_out = 4.0 * (SLOW / 2.0).powi(16) / 20_922_789_888_000.0;
                        let bound = 1.25 * (left_out + 0.5 * TERMS as f64 * UNIT);
                        assert!(off <= bound, "{theta} {pair} {x}: {off} over {bound}");
                    }
                }
            }
        }
        assert!(largest > 0.8 * SLOW, "{largest}");
    }
}

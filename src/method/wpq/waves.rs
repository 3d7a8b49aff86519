//! The scores of queries with one vector that is rotated to many consecutive positions.
//!
//! Such a score is a sum of waves, one per pair of channels: with a frequency w, it is
//! `q . R_p m = sum (a cos(p w) + b sin(p w))`, where a and b are products of the pair's channels of q and m. A matrix
//! product sums the waves of a line of consecutive positions. Over one line, the slow waves are together a polynomial of
//! the position, so that a few terms serve for all of them. A query leaves out the terms that together cannot change a
//! score by more than [`LEFT_OUT`].

use std::cell::Cell;
use std::f64::consts::PI;
use std::ops::Range;

use multiversion::multiversion;
use ndarray::{ArrayView1, ArrayView2};

use crate::compute::blocks::{PANEL, PANELS, PanelLine, ROWS, Row, SIDE, TILE, multiply_chosen};
use crate::model::rope::Rope;

/// Consecutive positions whose scores are one row of a product.
pub(super) const LINE: usize = SIDE;
/// The most lines that are scored together, so that factors and scores stay in the processor's cache.
pub(super) const LINES_AT_ONCE: usize = ROWS;
/// Chebyshev polynomials of an even degree, from 0 on, whose sum is the cosine of a slow wave; as many of an odd degree
/// are its sine.
const TERMS: usize = 8;
/// The polynomials that very slow waves need.
const FEW_TERMS: usize = 4;
/// The largest angle, in half a line, of a slow wave. The next polynomial's factor, `2 J_16(4.5)`, is below the rounding
/// of f32.
const SLOW: f64 = 4.5;
/// Factors of polynomials that are not computed: half a unit of f32 in a wave, and less.
const NEGLIGIBLE: f32 = 1.0 / (1 << 25) as f32;
/// The most that what a query leaves out may add to a score, in bits: less than a thousandth of a probability.
pub(super) const LEFT_OUT: f32 = 1.0 / 1024.0;

/// The waves of a rotation.
pub(super) struct Waves {
    /// The frequency of each pair of channels.
    frequencies: Vec<f64>,
    /// The length of a rotated vector over that of the vector.
    factor: f32,
    /// The pairs, the fast ones first.
    order: Vec<usize>,
    /// Number of fast pairs.
    n_fast: usize,
    /// Per pair, the cosines and sines of the turns to [`LINES_AT_ONCE`] lines, of which the first begins where the turn does.
    turns: Vec<[[f32; LINES_AT_ONCE]; 2]>,
    /// The turn past these lines.
    past: Turn,
    /// Per pair, the wave at each position of a line: cosine and sine of each fast pair, then the polynomials of even
    /// degree, then those of odd degree: `[PANELS, columns, PANEL]`.
    table: Vec<PanelLine>,
    /// Number of columns of the table.
    columns: usize,
    /// For each slow pair, the factors of the polynomials of its cosine, then of its sine.
    series: Vec<[[f32; TERMS]; 2]>,
    /// Number of slow pairs that need more than [`FEW_TERMS`] polynomials; they come first.
    n_full: usize,
}

/// A rotation of all pairs, in their order.
struct Turn {
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl Turn {
    /// Turns by the angles.
    fn by(angles: impl Iterator<Item = f64>) -> Self {
        let (cos, sin) = angles
            .map(|angle| (angle.cos() as f32, angle.sin() as f32))
            .unzip();
        Self { cos, sin }
    }
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
        let columns = 2 * n_fast + if slow.is_empty() { 0 } else { 2 * TERMS };
        let mut table = vec![PanelLine::ZERO; PANELS * columns];
        for column in 0..columns {
            for position in 0..LINE {
                let angle = |pair: usize| position as f64 * frequencies[pair];
                let value = match column.checked_sub(2 * n_fast) {
                    None if column % 2 == 0 => factor * angle(fast[column / 2]).cos(),
                    None => factor * angle(fast[column / 2]).sin(),
                    Some(at) => {
                        let (parity, term) = (at / TERMS, at % TERMS);
                        chebyshev(2 * term + parity, position as f64 / (LINE / 2) as f64 - 1.0)
                    }
                };
                table[position / PANEL * columns + column].0[position % PANEL] = value as f32;
            }
        }
        let series = slow.iter().map(|pair| {
            let of = |function: fn(f64) -> f64, parity: usize| {
                let wave = |x: f64| factor * function(half_angle(*pair) * x);
                std::array::from_fn(|term| chebyshev_factor(wave, 2 * term + parity) as f32)
            };
            [of(f64::cos, 0), of(f64::sin, 1)]
        });
        let series: Vec<[[f32; TERMS]; 2]> = series.collect();
        let is_full = |of: &[[f32; TERMS]; 2]| {
            of.iter()
                .any(|of| of[FEW_TERMS..].iter().any(|x| x.abs() > NEGLIGIBLE))
        };
        let n_full = series.iter().rposition(is_full).map_or(0, |last| last + 1);
        let order = [fast, slow].concat();
        let angle = |pair: usize, lines: usize| frequencies[pair] * (lines * LINE) as f64;
        let turns = |pair: &usize| {
            let of = |function: fn(f64) -> f64| std::array::from_fn(|i| function(angle(*pair, i)) as f32);
            [of(f64::cos), of(f64::sin)]
        };
        Self {
            turns: order.iter().map(turns).collect(),
            past: Turn::by(order.iter().map(|pair| angle(*pair, LINES_AT_ONCE))),
            n_full,
            factor: factor as f32,
            frequencies,
            order,
            n_fast,
            table,
            columns,
            series,
        }
    }

    /// Returns the turn from position 0 to the line that begins at position `first`: to its start for the fast pairs, and to
    /// its middle for the slow ones.
    fn turn_to(&self, first: usize) -> Turn {
        let angle = |(i, pair): (usize, &usize)| {
            let position = if i < self.n_fast { first } else { first + LINE / 2 };
            position as f64 * self.frequencies[*pair]
        };
        Turn::by(self.order.iter().enumerate().map(angle))
    }

    /// Returns the waves of a query with a vector, at the line to which `turn` leads.
    fn at(&self, query: &[f32], vector: ArrayView1<f32>, turn: &Turn) -> Factors {
        let half = self.frequencies.len();
        let (mut cos, mut sin) = (Vec::with_capacity(half), Vec::with_capacity(half));
        for (&pair, (x, y)) in self.order.iter().zip(turn.cos.iter().zip(&turn.sin)) {
            let (q, m) = (
                [query[pair], query[pair + half]],
                [vector[pair], vector[pair + half]],
            );
            let (a, b) = (q[0] * m[0] + q[1] * m[1], q[1] * m[0] - q[0] * m[1]);
            cos.push(a * x + b * y);
            sin.push(b * x - a * y);
        }
        Factors { cos, sin }
    }

    /// Returns the columns of the table that a query needs, ascending: without those that together change no score by more
    /// than `left_out`.
    fn needed(&self, factors: &Factors, mut left_out: f32) -> Vec<u16> {
        let amplitudes = factors.cos.iter().zip(&factors.sin);
        let amplitudes: Vec<f32> = amplitudes.map(|(a, b)| (a * a + b * b).sqrt()).collect();
        let (fast, slow) = amplitudes.split_at(self.n_fast);
        let mut of_terms = [[0.0f32; TERMS]; 2];
        for (amplitude, series) in slow.iter().zip(&self.series) {
            for (sums, factors) in of_terms.iter_mut().zip(series) {
                for term in 0..TERMS {
                    sums[term] += amplitude * factors[term].abs();
                }
            }
        }
        // The most that a pair or a term adds, and its columns.
        let fast = fast
            .iter()
            .map(|amplitude| amplitude * self.factor)
            .zip((0..).step_by(2));
        let fast = fast.map(|(most, column)| (most, column..column + 2));
        let terms = of_terms
            .into_iter()
            .flatten()
            .zip(2 * self.n_fast as u16..self.columns as u16);
        let terms = terms.map(|(most, column)| (most, column..column + 1));
        let mut parts: Vec<(f32, Range<u16>)> = fast.chain(terms).collect();
        parts.sort_unstable_by(|a, b| a.0.total_cmp(&b.0));
        let needed = parts.into_iter().skip_while(|(most, _)| {
            left_out -= most;
            left_out >= 0.0
        });
        let mut kept: Vec<u16> = needed.flat_map(|(_, columns)| columns).collect();
        kept.sort_unstable();
        kept
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
#[derive(Clone)]
struct Factors {
    cos: Vec<f32>,
    sin: Vec<f32>,
}

/// Turns each pair (a, b) to (a cos + b sin, b cos - a sin).
fn turn(by: &Turn, factors: &mut Factors) {
    let pairs = factors.cos.iter_mut().zip(&mut factors.sin);
    for ((a, b), (cos, sin)) in pairs.zip(by.cos.iter().zip(&by.sin)) {
        (*a, *b) = (*a * cos + *b * sin, *b * cos - *a * sin);
    }
}

/// The values of one column of the left factor, by line.
type Column = [f32; LINES_AT_ONCE];

/// Writes the columns of the left factor, all those of the table, for the lines from the one of `factors` on.
///
/// # Numerics
/// f32. Each line's factors are turned once.
#[multiversion(targets("x86_64+avx512f+avx512vl", "x86_64+avx2", "aarch64+neon"))]
fn write_lines(waves: &Waves, factors: &Factors, columns: &mut Vec<Column>) {
    columns.clear();
    let pairs = factors.cos.iter().zip(&factors.sin).zip(&waves.turns);
    for ((cos, sin), turns) in pairs.clone().take(waves.n_fast) {
        columns.extend(turned(*cos, *sin, turns));
    }
    let mut sums = [[[0.0f32; LINES_AT_ONCE]; TERMS]; 2];
    let slow = pairs.skip(waves.n_fast).zip(&waves.series).enumerate();
    for (i, (((cos, sin), turns), series)) in slow {
        let turned = turned(*cos, *sin, turns);
        for (sums, (turned, series)) in sums.iter_mut().zip(turned.iter().zip(series)) {
            let terms = if i < waves.n_full { TERMS } else { FEW_TERMS };
            for (sums, factor) in sums.iter_mut().zip(series).take(terms) {
                for l in 0..LINES_AT_ONCE {
                    sums[l] += factor * turned[l];
                }
            }
        }
    }
    if !waves.series.is_empty() {
        columns.extend(sums.into_iter().flatten());
    }
}

/// Returns the factors of the cosine and of the sine of one pair at every line.
#[inline(always)]
fn turned(a: f32, b: f32, [cos, sin]: &[Column; 2]) -> [Column; 2] {
    let mut out = [[0.0; LINES_AT_ONCE]; 2];
    for l in 0..LINES_AT_ONCE {
        out[0][l] = a * cos[l] + b * sin[l];
        out[1][l] = b * cos[l] - a * sin[l];
    }
    out
}

/// The scores of several queries with one rotated vector, at ascending positions.
pub(super) struct Walks<'a> {
    waves: &'a Waves,
    queries: Vec<Walk>,
}

/// The scores of one query.
struct Walk {
    /// The columns of the table that are added up.
    columns: Vec<u16>,
    /// The factors at every [`LINES_AT_ONCE`]th line.
    factors: Vec<Factors>,
}

impl<'a> Walks<'a> {
    /// Prepares the scores of consecutive positions, with queries `[r,d]` times `scale` and the vector `[d]`. Terms that
    /// together change no score by more than `left_out` are left out.
    pub fn new(
        waves: &'a Waves,
        queries: ArrayView2<f32>,
        scale: f32,
        vector: ArrayView1<f32>,
        Range { start: first, end }: Range<usize>,
        left_out: f32,
    ) -> Self {
        let to_first = waves.turn_to(first);
        let of = |query: ArrayView1<f32>| {
            let mut at = waves.at(&(&query * scale).to_vec(), vector, &to_first);
            let columns = waves.needed(&at, left_out);
            let parts = (end - first).div_ceil(LINES_AT_ONCE * LINE);
            let next = |_| {
                let here = at.clone();
                turn(&waves.past, &mut at);
                here
            };
            let factors = (0..parts).map(next).collect();
            Walk { columns, factors }
        };
        Self {
            waves,
            queries: queries.rows().into_iter().map(of).collect(),
        }
    }

    /// Writes the scores of query `a` from position `part LINES_AT_ONCE LINE` on, counted from the first, a line to a row of
    /// `scores`. Their number is a multiple of [`TILE`], at most [`LINES_AT_ONCE`].
    ///
    /// # Numerics
    /// f32.
    pub fn scores(&self, a: usize, part: usize, scores: &mut [Row]) {
        let (waves, walk) = (self.waves, &self.queries[a]);
        let mut left = LEFT.take();
        write_lines(waves, &walk.factors[part], &mut left);
        for (to, &column) in walk.columns.iter().enumerate() {
            // The columns ascend, so that none is overwritten before it is read.
            left[to] = left[usize::from(column)];
        }
        multiply_chosen(&left, &walk.columns, &waves.table, scores);
        LEFT.set(left);
    }
}

thread_local! {
    /// The left factor of a product, by column.
    static LEFT: Cell<Vec<Column>> = Cell::default();
}

/// Returns the number of rows that [`Walks::scores`] needs for the scores at `n` positions.
pub(super) fn rows(n: usize) -> usize {
    n.div_ceil(LINE).next_multiple_of(TILE)
}

#[cfg(test)]
mod tests;

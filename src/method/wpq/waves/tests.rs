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
        assert_eq!((is_split, waves.columns > SIDE), expected, "{theta}");
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
        let terms = waves.columns + 2 * waves.series.len();
        // How much larger than a slow wave the sum of the magnitudes of its polynomials may be.
        let series = waves.series.iter().flatten();
        let spread = series.map(|factors| factors.iter().map(|x| x.abs() / 1.25).sum::<f32>());
        let spread = f64::from(spread.fold(1.0, f32::max));
        assert!(spread < 3.0, "{spread}");
        for (first, n) in [(0, 1), (4, 128), (5, 300), (100_000, 7000)] {
            let queries = ArrayView2::from_shape((1, d), &query).unwrap();
            let walks = Walks::new(
                &waves,
                queries,
                1.0,
                ArrayView1::from(&vector),
                first..first + n,
                0.0,
            );
            let mut scores = vec![Row::ZERO; rows(n)];
            let parts = scores.chunks_mut(LINES_AT_ONCE).enumerate();
            parts.for_each(|(part, scores)| walks.scores(0, part, scores));
            for (i, score) in Row::values(&scores).iter().enumerate().take(n) {
                let wave = |([q, r], [m, o], w): &([f64; 2], [f64; 2], f64)| {
                    let (sin, cos) = ((first + i) as f64 * w).sin_cos();
                    1.25 * (q * (m * cos - o * sin) + r * (o * cos + m * sin))
                };
                let exact: f64 = pairs.iter().map(wave).sum();
                // A turn is off by at most 4.4 units, the factors of the first line and the table by 16, what very slow
                // waves leave out is at most half a unit for each of four terms; every term of a sum, the cosine's and
                // the sine's together sqrt(2) times a wave, is off by one.
                let turns = i / (LINES_AT_ONCE * LINE) + 1;
                let turned = 4.4 * turns as f64 + 18.0;
                let units = spread * (turned + terms as f64 * std::f64::consts::SQRT_2);
                let off = (f64::from(*score) - exact).abs();
                assert!(off <= size * units * UNIT, "{theta} {first} {i}: {score} {exact}");
            }
        }
    }
}

#[test]
fn what_is_left_out_changes_no_score_by_more_than_asked() {
    let (rope, d, n) = (rope(1e4, 64), 64, 4000);
    let waves = Waves::new(&rope);
    let query = values(d, 1);
    let vector: Vec<f32> = values(d, 2)
        .iter()
        .enumerate()
        .map(|(i, x)| x / (1 + i % 32) as f32)
        .collect();
    let queries = ArrayView2::from_shape((1, d), &query).unwrap();
    let of = |left_out: f32| {
        let walks = Walks::new(
            &waves,
            queries,
            1.0,
            ArrayView1::from(&vector),
            7..7 + n,
            left_out,
        );
        let mut scores = vec![Row::ZERO; rows(n)];
        let parts = scores.chunks_mut(LINES_AT_ONCE).enumerate();
        parts.for_each(|(part, scores)| walks.scores(0, part, scores));
        (walks.queries[0].columns.len(), Row::values(&scores)[..n].to_vec())
    };
    let (all, exact) = of(0.0);
    let mut before = all;
    for left_out in [0.01, 0.1, 1.0] {
        let (columns, scores) = of(left_out);
        assert!(columns < before, "{left_out}: {columns} of {before}");
        before = columns;
        let off = scores
            .iter()
            .zip(&exact)
            .map(|(a, b)| (a - b).abs())
            .fold(0.0, f32::max);
        assert!(
            (0.02 * left_out..=left_out + 1e-5).contains(&off),
            "{left_out}: {off}"
        );
    }
    let (none, scores) = of(1e9);
    assert!(none == 0 && scores.iter().all(|score| *score == 0.0), "{none}");
    assert_eq!(all, waves.columns);
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

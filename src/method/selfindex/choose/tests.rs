use ndarray::Array2;

use super::rounded::{CHUNK, SAMPLE, SAMPLED};
use super::*;
use crate::testing::values;

fn bytes(n: usize, seed: u32) -> Vec<u8> {
    values(n, seed)
        .into_iter()
        .map(|x| (x * 128.0) as i8 as u8)
        .collect()
}

fn scores(d: usize, r: usize, seed: u32, edit: impl Fn(&mut Vec<f32>, &mut Vec<f32>)) -> PatternScores {
    let (mut queries, mut centroids) = (values(r * d, seed), values(d * PATTERNS, seed + 1));
    edit(&mut queries, &mut centroids);
    let queries = Array2::from_shape_vec((r, d), queries).unwrap();
    PatternScores::new(queries.view(), &centroids)
}

/// Returns every row, ranked by its score, with the best rows of `full` first.
fn ranked(scores: &PatternScores, rows: &[u8], full: &[u32], budget: usize) -> Vec<u32> {
    let n = (rows.len() / scores.width()) as u32;
    let order = |a: &(f32, u32), b: &(f32, u32)| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1));
    let scored = |p: u32| (scores.score(scores.row(rows, p)), p);
    let mut first: Vec<(f32, u32)> = full.iter().map(|p| scored(*p)).collect();
    first.sort_by(order);
    first.truncate(budget / 38);
    let mut out: Vec<u32> = first.iter().map(|(_, p)| *p).collect();
    let mut others: Vec<(f32, u32)> = (0..n).filter(|p| !out.contains(p)).map(scored).collect();
    others.sort_by(order);
    out.extend(others.iter().map(|(_, p)| *p));
    out.truncate(budget);
    out.sort();
    out
}

fn check(scores: &PatternScores, rows: &[u8], scans: bool) {
    let n = rows.len() / scores.width();
    let some: Vec<u32> = (0..n as u32).filter(|p| p % 97 == 3).collect();
    let few: Vec<u32> = some.iter().copied().take(5).collect();
    for budget in [0, 1, 2, 7, 63, n / 16, n / 3, n - 1] {
        for full in [&[], &few[..], &some[..]] {
            let expected = ranked(scores, rows, full, budget);
            for how in [Ranking::Fast, Ranking::Plain] {
                let chosen = scores.choose(rows, full.to_vec(), budget, how);
                assert_eq!(chosen, expected, "{n} {budget} {how:?}");
            }
        }
    }
    assert_eq!(scores.scan(rows, &[], n / 16).is_some(), scans, "{n}");
}

#[test]
fn choices_are_those_of_a_full_ranking() {
    for (d, r) in [(128, 4), (64, 1), (20, 3), (80, 2), (256, 5), (1028, 1)] {
        for n in [LEAST - 1, LEAST, LEAST + 1, CHUNK, 2 * CHUNK + 77] {
            let scores = scores(d, r, n as u32, |_, _| ());
            check(&scores, &bytes(n * scores.width(), 5), n >= LEAST);
        }
    }
}

#[test]
fn equal_and_nearly_equal_scores() {
    let n = CHUNK + 5;
    // Whole numbers, so that many scores are equal; then zeros, so that all are.
    let whole = scores(32, 2, 1, |queries, centroids| {
        queries.iter_mut().for_each(|q| *q = (4.0 * *q).round());
        centroids.iter_mut().for_each(|c| *c = c.signum());
    });
    check(&whole, &bytes(n * whole.width(), 2), true);
    let zero = scores(32, 2, 1, |queries, _| queries.fill(0.0));
    check(&zero, &bytes(n * zero.width(), 2), false);
    // One group is far larger than all others, which rounding then makes equal.
    let uneven = scores(128, 1, 3, |queries, _| {
        queries[..4].iter_mut().for_each(|q| *q *= 1e4)
    });
    check(&uneven, &bytes(n * uneven.width(), 2), true);
    // Sums of both signs, which cancel to less than their rounding errors.
    let flat = scores(128, 1, 3, |_, centroids| {
        centroids.iter_mut().for_each(|c| *c = 1e3 + *c * 1e-3);
    });
    check(&flat, &bytes(n * flat.width(), 2), true);
}

#[test]
fn what_is_not_finite_is_ranked_as_it_is() {
    let n = CHUNK;
    for (value, scans) in [
        (f32::NAN, false),
        (f32::INFINITY, false),
        (3e38, false),
        (1e-44, true),
    ] {
        let odd = scores(32, 1, 7, |_, centroids| centroids[3] = value);
        check(&odd, &bytes(n * odd.width(), 2), scans);
    }
    let tiny = scores(32, 1, 7, |queries, _| {
        queries.iter_mut().for_each(|q| *q *= 1e-41)
    });
    check(&tiny, &bytes(n * tiny.width(), 2), true);
}

#[test]
fn a_sample_that_misleads_costs_time_only() {
    // The sampled rows are the worst of all rows, then the best.
    let n = 2 * SAMPLE * SAMPLED;
    let scores = scores(128, 4, 11, |_, _| ());
    let rows = bytes(n * scores.width(), 12);
    let mut order: Vec<&[u8]> = rows.chunks(scores.width()).collect();
    order.sort_by(|a, b| scores.score(a).total_cmp(&scores.score(b)));
    check(&scores, &order.concat(), true);
    order.reverse();
    let rounded = Rounded::from_groups(&scores.groups).unwrap();
    let rows = order.concat();
    let limit = rounded.likely_limit(&rows, scores.width(), n / 16);
    let kept = rounded.at_least(&rows, scores.width(), limit, &[]);
    assert!(kept.len() < n / 16);
    check(&scores, &rows, true);
}

#[test]
fn sums_that_differ_by_more_than_the_gap_tell_the_order() {
    for seed in 0..20 {
        let scores = scores(128, 2, 100 + seed, |queries, _| {
            queries
                .iter_mut()
                .enumerate()
                .for_each(|(i, q)| *q *= 1.0 + (i % 7) as f32);
        });
        let rows = bytes(3000 * scores.width(), 200 + seed);
        let rounded = Rounded::from_groups(&scores.groups).unwrap();
        let sums = rounded.at_least(&rows, scores.width(), 0, &[]);
        let mut by_sum: Vec<(u32, f32)> = sums
            .iter()
            .map(|(p, sum)| (*sum, scores.score(scores.row(&rows, *p))))
            .collect();
        by_sum.sort_by_key(|(sum, _)| *sum);
        // The largest score so far among sums that are lower by more than the gap.
        let (mut behind, mut largest) = (0, f32::NEG_INFINITY);
        for (sum, score) in &by_sum {
            while by_sum[behind].0 + rounded.gap < *sum {
                largest = largest.max(by_sum[behind].1);
                behind += 1;
            }
            assert!(*score > largest, "{seed}");
        }
        assert!(behind > 1000 && rounded.gap < 40, "{behind} {}", rounded.gap);
    }
}

/// Rounds every entry as badly as possible: the better row has the lower sum, by nearly the gap.
#[test]
fn the_worst_of_roundings_is_within_the_gap() {
    let d = 128;
    let query = Array2::from_shape_fn((1, d), |(_, j)| if j % GROUP == 0 { 1.0 } else { 0.0 });
    let entry = |pattern: usize| {
        [0.0, 255.0, 10.51, 10.49, 11.49]
            .get(pattern)
            .copied()
            .unwrap_or(0.0)
    };
    let centroids: Vec<f32> = (0..d * PATTERNS).map(|i| entry(i / GROUP % PATTERNS)).collect();
    let scores = PatternScores::new(query.view(), &centroids);
    let mut rows = vec![[0u8; 16]; 3000];
    rows[100] = [0x22; 16];
    rows[200] = [0x33; 16];
    rows[200][0] = 0x34;
    let rows = rows.as_flattened();
    let rounded = Rounded::from_groups(&scores.groups).unwrap();
    let sums = rounded.at_least(rows, scores.width(), 1, &[]);
    assert_eq!(sums, [(100, 32 * 11), (200, 31 * 10 + 11)]);
    assert!(rounded.gap < 34, "{}", rounded.gap);
    assert_eq!(scores.choose(rows, Vec::new(), 1, Ranking::Fast), [200]);
}

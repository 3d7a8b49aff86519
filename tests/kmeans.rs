//! k-means: properties, the exact search by distance, and linfa-clustering as an independent check.

use std::ops::ControlFlow;
use std::panic::catch_unwind;

use kvsmith::internal::stats::kmeans::{Codebook, Init, KMeansError, KMeansFit, KMeansParams, fit};
use linfa::DatasetBase;
use linfa::traits::{Fit, Predict};
use linfa_clustering::{KMeans, KMeansInit};
use ndarray::{Array2, ArrayView1, ArrayView2, Axis, array, s};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

/// A matrix of normal values.
fn normal(n: usize, d: usize, seed: u64) -> Array2<f32> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    Array2::from_shape_simple_fn((n, d), || crate::common::random::normal(&mut rng))
}

/// `per` rows around each of `k` far-apart centers, in turn; row i belongs to center i % k.
fn planted(k: usize, per: usize, d: usize, seed: u64) -> (Array2<f32>, Array2<f32>) {
    let centers = normal(k, d, seed) * 10.0;
    let mut points = normal(k * per, d, seed + 1) * 0.1;
    for (i, mut row) in points.rows_mut().into_iter().enumerate() {
        row += &centers.row(i % k);
    }
    (centers, points)
}

fn params(size: usize, iterations: usize, init: Init, seed: u64) -> KMeansParams {
    KMeansParams {
        size,
        iterations,
        min_gain: 0.0,
        init,
        seed,
    }
}

fn run(points: &Array2<f32>, params: &KMeansParams) -> KMeansFit {
    fit(points.view(), params, &mut |_, _| ControlFlow::Continue(())).expect("a valid fit")
}

fn nearest(points: &Array2<f32>, centroids: &Array2<f32>) -> (Vec<u32>, Vec<f32>) {
    let (mut codes, mut distances) = (vec![9; points.nrows()], vec![-1.0; points.nrows()]);
    Codebook::new(centroids.clone()).nearest(points.view(), &mut codes, &mut distances);
    (codes, distances)
}

fn distance_f64(x: ArrayView1<f32>, c: ArrayView1<f32>) -> f64 {
    x.iter()
        .zip(c)
        .map(|(&x, &c)| (f64::from(x) - f64::from(c)).powi(2))
        .sum()
}

fn norm_f64(x: ArrayView1<f32>) -> f64 {
    x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>().sqrt()
}

/// Every bit of a fit, for comparisons.
fn bytes(fit: &KMeansFit) -> (Vec<u32>, Vec<u32>, Vec<u32>, Vec<u64>, usize) {
    (
        fit.codebook.iter().map(|v| v.to_bits()).collect(),
        fit.codes.clone(),
        fit.counts.clone(),
        fit.inertia.iter().map(|v| v.to_bits()).collect(),
        fit.empty_repaired,
    )
}

/// The documented bounds of `nearest`, in f64.
fn check_nearest(points: &Array2<f32>, centroids: &Array2<f32>) {
    let (codes, distances) = nearest(points, centroids);
    let d = points.ncols() as f64;
    let unit = 2f64.powi(-24);
    for ((x, code), distance) in points.rows().into_iter().zip(codes).zip(distances) {
        let all = centroids.rows().into_iter().map(|c| distance_f64(x, c));
        let best = all.fold(f64::INFINITY, f64::min);
        let chosen = distance_f64(x, centroids.row(code as usize));
        let norms = centroids.rows().into_iter().map(norm_f64);
        let size = norms.map(|c| norm_f64(x) * c + c * c / 2.0).fold(0.0, f64::max);
        let slack = 4.0 * (d + 2.0) * unit * size;
        assert!(
            chosen <= best + slack,
            "chosen {chosen}, best {best}, slack {slack}"
        );
        let error = (f64::from(distance) - chosen).abs();
        assert!(
            error <= (d / 16.0 + 20.0) * unit * chosen,
            "distance {distance} for {chosen}"
        );
    }
}

#[test]
fn nearest_is_the_argmin_by_distance() {
    for d in [1, 4, 16, 63, 64, 80, 128] {
        for (n, k) in [
            (1, 1),
            (7, 1),
            (13, 31),
            (100, 32),
            (65, 33),
            (513, 97),
            (1030, 5),
        ] {
            check_nearest(&normal(n, d, 1), &normal(k, d, 2));
        }
    }
    check_nearest(&normal(200, 128, 3), &normal(4096, 128, 4));
}

#[test]
fn nearest_with_an_outlier_row_and_an_offset_stays_within_its_bound() {
    let mut points = normal(300, 64, 5);
    points.row_mut(17).fill(3e4);
    let mut centroids = normal(40, 64, 6);
    check_nearest(&points, &centroids);
    points += 1800.0;
    centroids += 1800.0;
    check_nearest(&points, &centroids);
}

#[test]
fn an_offset_makes_the_choice_approximate_and_centring_repairs_it() {
    let (points, centroids) = (normal(2000, 16, 7), normal(256, 16, 8));
    let exact = |points: &Array2<f32>, centroids: &Array2<f32>| {
        let (codes, _) = nearest(points, centroids);
        let rows = points.rows().into_iter().zip(codes);
        let right = rows.filter(|(x, code)| {
            let chosen = distance_f64(x.view(), centroids.row(*code as usize));
            centroids
                .rows()
                .into_iter()
                .all(|c| chosen <= distance_f64(x.view(), c))
        });
        right.count()
    };
    assert!(exact(&points, &centroids) >= 1999);
    assert!(exact(&(&points + 4096.0), &(&centroids + 4096.0)) < 1900);
}

#[test]
fn the_lowest_index_wins_exact_ties() {
    // 100 equal centroids over several panels, one better one for some rows, ties left and right.
    let mut centroids = Array2::from_elem((100, 16), 1.0);
    centroids.row_mut(71).fill(-1.0);
    centroids.row_mut(97).fill(-1.0);
    let mut points = Array2::from_elem((50, 16), 2.0);
    points.slice_mut(s![20.., ..]).fill(-2.0);
    points.row_mut(49).fill(0.0); // as far from 1 as from -1
    let (codes, _) = nearest(&points, &centroids);
    assert_eq!(&codes[..20], &[0; 20]);
    assert_eq!(&codes[20..49], &[71; 29]);
    assert_eq!(codes[49], 0);
    let flipped = centroids.slice(s![50..;-1, ..]).to_owned();
    assert_eq!(nearest(&points, &flipped).0[20], 2);
}

#[test]
fn a_moved_centroid_loses_a_tie_to_a_lower_one_that_stayed() {
    // Centroid 1 moves from 3 to 4, which leaves the row at 2 as far from 4 as from 0.
    let points = array![[0.0f32], [2.0], [6.0]];
    let fit = run(&points, &params(2, 1, Init::Precomputed(array![[0.0], [3.0]]), 0));
    assert_eq!(fit.codebook.column(0).to_vec(), vec![0.0, 4.0]);
    assert_eq!(fit.codes, vec![0, 0, 1]);
}

#[test]
fn nearest_takes_any_layout_and_values_that_are_not_finite() {
    let (points, centroids) = (normal(40, 8, 9), normal(10, 8, 10));
    let codebook = Codebook::new(centroids.t().as_standard_layout().t().to_owned());
    let (codes, distances) = nearest(&points, &centroids);
    let columns = points.t().as_standard_layout().into_owned();
    let (mut other, mut other_distances) = (vec![9; 40], vec![-1.0; 40]);
    codebook.nearest(columns.t(), &mut other, &mut other_distances);
    assert_eq!((codes, distances), (other, other_distances));

    let mut bad = points.clone();
    bad[[3, 2]] = f32::NAN;
    bad[[4, 2]] = f32::INFINITY;
    bad[[5, 2]] = f32::MAX;
    let (bad_codes, bad_distances) = nearest(&bad, &centroids);
    assert!(bad_codes.iter().all(|&c| c < 10));
    assert!((3..6).all(|i| !bad_distances[i].is_finite()));
    assert_eq!(bad_codes[6..], nearest(&points, &centroids).0[6..]);

    assert!(nearest(&Array2::zeros((0, 8)), &centroids).0.is_empty());
}

#[test]
fn nearest_refuses_what_does_not_fit() {
    let refuses = |points: usize, dims: [usize; 2], size: usize, lens: [usize; 2]| {
        let codebook = Codebook::new(Array2::zeros((size, dims[1])));
        let (mut codes, mut distances) = (vec![9; lens[0]], vec![-1.0; lens[1]]);
        let points = Array2::zeros((points, dims[0]));
        catch_unwind(move || codebook.nearest(points.view(), &mut codes, &mut distances)).is_err()
    };
    assert!(!refuses(4, [8, 8], 3, [4, 4]));
    assert!(refuses(4, [8, 7], 3, [4, 4]), "another width");
    assert!(refuses(4, [8, 8], 0, [4, 4]), "no centroids");
    assert!(refuses(4, [0, 0], 3, [4, 4]), "no coordinates");
    assert!(refuses(4, [8, 8], 3, [3, 4]), "too few codes");
    assert!(refuses(4, [8, 8], 3, [4, 5]), "too many distances");
}

#[test]
fn a_fit_equals_single_passes_chained() {
    // A link of the chain searches all centroids for all rows; the long fit takes the shortcuts.
    let (_, clumped) = planted(40, 50, 24, 20);
    let coarse = normal(3000, 8, 21).mapv(|v| (v * 2.0).round());
    for (points, size) in [(normal(3000, 16, 22), 200), (clumped, 64), (coarse, 300)] {
        for init in [Init::KMeansPlusPlus, Init::Random] {
            let long = run(&points, &params(size, 12, init.clone(), 5));
            let mut link = run(&points, &params(size, 0, init, 5));
            let mut inertia = link.inertia.clone();
            let mut repaired = 0;
            for _ in 1..long.inertia.len() {
                let start = Init::Precomputed(link.codebook);
                link = run(&points, &params(size, 1, start, 0));
                inertia.push(link.inertia[1]);
                repaired += link.empty_repaired;
            }
            (link.inertia, link.empty_repaired) = (inertia, repaired);
            assert!(bytes(&link) == bytes(&long));
            assert_eq!(long.codes, nearest(&points, &long.codebook).0);
        }
    }
}

#[test]
fn results_belong_together() {
    for (n, d, size) in [(1000, 80, 50), (700, 128, 700), (513, 4, 1), (2000, 16, 333)] {
        let points = normal(n, d, 30);
        let fit = run(&points, &params(size, 8, Init::KMeansPlusPlus, 1));
        let (codes, distances) = nearest(&points, &fit.codebook);
        assert_eq!(codes, fit.codes);
        let inertia: f64 = distances.iter().map(|&v| f64::from(v)).sum();
        assert_eq!(inertia, *fit.inertia.last().unwrap());
        let mut counts = vec![0; size];
        codes.iter().for_each(|&c| counts[c as usize] += 1);
        assert_eq!(counts, fit.counts);
        for pair in fit
            .inertia
            .windows(2)
            .take(if fit.empty_repaired == 0 { 99 } else { 0 })
        {
            assert!(pair[1] <= pair[0] * (1.0 + 1e-6), "{:?}", fit.inertia);
        }
        assert!(fit.inertia.len() <= 9);
    }
}

#[test]
fn a_centroid_per_point_leaves_no_distance() {
    let points = normal(300, 16, 31);
    let fit = run(&points, &params(300, 5, Init::KMeansPlusPlus, 3));
    assert_eq!(fit.inertia[0], 0.0);
    assert_eq!(fit.counts, vec![1; 300]);
    let one = run(&points, &params(1, 5, Init::Random, 3));
    let mean = points.mapv(f64::from).mean_axis(Axis(0)).unwrap();
    assert!(
        one.codebook
            .iter()
            .zip(&mean)
            .all(|(&c, m)| (f64::from(c) - m).abs() < 1e-7)
    );
}

#[test]
fn a_converged_fit_stops_early_at_the_means() {
    let points = normal(2000, 8, 32);
    let fit = run(&points, &params(20, 10_000, Init::Random, 4));
    assert!(fit.inertia.len() < 1000);
    for c in 0..20 {
        let mut sum = [0.0f64; 8];
        for (x, _) in points
            .rows()
            .into_iter()
            .zip(&fit.codes)
            .filter(|(_, code)| **code == c)
        {
            sum.iter_mut().zip(x).for_each(|(s, &v)| *s += f64::from(v));
        }
        let count = f64::from(fit.counts[c as usize]);
        let mean: Vec<f32> = sum.iter().map(|s| (s / count) as f32).collect();
        assert_eq!(fit.codebook.row(c as usize).to_vec(), mean);
    }
}

/// What a pass that gains too little leaves is what so many passes leave.
#[test]
fn a_small_gain_ends_the_fit() {
    let points = normal(700, 9, 3);
    let all = run(&points, &params(40, 50, Init::KMeansPlusPlus, 5));
    let gain = |i: usize| 1.0 - all.inertia[i] / all.inertia[i - 1];
    let stop = 3;
    assert!(
        gain(stop) < gain(stop - 1) && all.inertia.len() > stop + 2,
        "{:?}",
        all.inertia
    );
    let stopping = KMeansParams {
        min_gain: f64::midpoint(gain(stop), (1..stop).map(gain).fold(f64::INFINITY, f64::min)),
        ..params(40, 50, Init::KMeansPlusPlus, 5)
    };
    let stopped = run(&points, &stopping);
    assert_eq!(stopped.inertia.len(), stop + 1);
    let passes = run(&points, &params(40, stop, Init::KMeansPlusPlus, 5));
    assert_eq!(bytes(&stopped), bytes(&passes));
}

#[test]
fn more_centroids_fit_better() {
    let points = normal(4000, 16, 33);
    let last = |size| {
        *run(&points, &params(size, 10, Init::KMeansPlusPlus, 1))
            .inertia
            .last()
            .unwrap()
    };
    let inertia: Vec<f64> = [1, 2, 8, 32, 128, 512, 4000].map(last).to_vec();
    assert!(inertia.windows(2).all(|pair| pair[1] < pair[0]), "{inertia:?}");
}

#[test]
fn planted_clusters_are_recovered() {
    let (centers, points) = planted(50, 40, 32, 34);
    let fit = run(&points, &params(50, 20, Init::KMeansPlusPlus, 2));
    assert_eq!(fit.counts, vec![40; 50]);
    let (owner, distance) = nearest(&centers, &fit.codebook);
    assert!((0..2000).all(|i| fit.codes[i] == owner[i % 50]));
    assert!(distance.iter().all(|&d| d < 32.0 * 0.01), "{distance:?}");
}

#[test]
fn bytes_do_not_depend_on_the_number_of_threads_but_on_the_seed() {
    let points = normal(5000, 20, 35);
    for init in [Init::KMeansPlusPlus, Init::Random] {
        let with = |threads: usize, seed| {
            let pool = rayon::ThreadPoolBuilder::new()
                .num_threads(threads)
                .build()
                .unwrap();
            bytes(&pool.install(|| run(&points, &params(300, 6, init.clone(), seed))))
        };
        let one = with(1, 7);
        assert!(one == with(2, 7));
        assert!(one == with(3, 7));
        assert!(one == with(1, 7));
        assert!(one.0 != with(1, 8).0);
    }
}

#[test]
fn an_empty_centroid_moves_onto_the_worst_row() {
    // Two rows at 10 tie for the worst: the lower index goes, its equal does not go as well.
    let points = array![[0.0f32], [1.0], [10.0], [10.0], [-6.0]];
    let far = array![[0.5f32], [100.0], [200.0]];
    let fit = run(&points, &params(3, 1, Init::Precomputed(far.clone()), 0));
    assert_eq!(fit.empty_repaired, 2);
    assert_eq!(
        fit.codebook.column(0).to_vec(),
        vec![(0.0 + 1.0 + 10.0) / 3.0, 10.0, -6.0]
    );
    assert_eq!(fit.codes, vec![0, 0, 1, 1, 2]);
    let fit = run(&points, &params(3, 9, Init::Precomputed(far), 0));
    assert_eq!(fit.codebook.column(0).to_vec(), vec![0.5, 10.0, -6.0]);
    assert_eq!(fit.counts, vec![2, 2, 1]);
    assert_eq!(*fit.inertia.last().unwrap(), 0.5);
}

#[test]
fn a_row_alone_with_its_centroid_is_not_taken_for_an_empty_one() {
    // The row at 10 is the worst, but its centroid at 12 is about to move onto it anyway.
    let points = array![[0.0f32], [1.0], [10.0]];
    let start = array![[0.2f32], [12.0], [100.0]];
    let fit = run(&points, &params(3, 1, Init::Precomputed(start), 0));
    assert_eq!(fit.codebook.column(0).to_vec(), vec![0.0, 10.0, 1.0]);
    assert_eq!(fit.empty_repaired, 1);
}

#[test]
fn fewer_distinct_points_than_centroids_terminates() {
    for init in [Init::KMeansPlusPlus, Init::Random] {
        let same = Array2::from_elem((100, 6), 0.7);
        let fit = run(&same, &params(10, 50, init.clone(), 1));
        assert_eq!(*fit.inertia.last().unwrap(), 0.0);
        assert_eq!(fit.counts[0], 100);
        assert!(fit.codebook.iter().all(|&v| v == 0.7));

        let four = Array2::from_shape_fn((1000, 6), |(i, j)| ((i * 7 + j) % 4) as f32);
        let fit = run(&four, &params(64, 50, init, 1));
        assert_eq!(*fit.inertia.last().unwrap(), 0.0);
        assert_eq!(fit.counts.iter().filter(|&&c| c > 0).count(), 4);
    }
}

#[test]
fn what_cannot_be_fitted_is_refused() {
    let points = normal(20, 3, 36);
    let error = |points: &Array2<f32>, size, init| {
        let mut quiet = |_, _| ControlFlow::Continue(());
        fit(points.view(), &params(size, 3, init, 0), &mut quiet).expect_err("refused")
    };
    let mut bad = points.clone();
    bad[[11, 2]] = f32::NAN;
    bad[[12, 0]] = f32::INFINITY;
    assert!(matches!(
        error(&bad, 2, Init::Random),
        KMeansError::NonFinite {
            what: "points",
            row: 11,
            ..
        }
    ));
    assert!(matches!(error(&points, 0, Init::Random), KMeansError::Size(0)));
    assert!(matches!(
        error(&points, 65_536, Init::Random),
        KMeansError::Size(65_536)
    ));
    assert!(matches!(
        error(&points, 21, Init::Random),
        KMeansError::TooFewPoints { points: 20, size: 21 }
    ));
    assert!(matches!(
        error(&Array2::zeros((20, 0)), 2, Init::Random),
        KMeansError::NoCoordinates
    ));
    let wrong = Init::Precomputed(Array2::zeros((2, 4)));
    assert!(matches!(
        error(&points, 2, wrong),
        KMeansError::InitShape {
            expected: (2, 3),
            found: (2, 4)
        }
    ));
    let nan = Init::Precomputed(array![[0.0, 0.0, 0.0], [0.0, f32::NAN, 0.0]]);
    assert!(matches!(
        error(&points, 2, nan),
        KMeansError::NonFinite { row: 1, .. }
    ));
    let mut calls = Vec::new();
    let stopped = fit(
        points.view(),
        &params(4, 9, Init::Random, 0),
        &mut |pass, inertia| {
            calls.push((pass, inertia));
            if pass == 1 {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        },
    );
    assert!(matches!(stopped, Err(KMeansError::Interrupted(1))));
    assert!(calls.len() == 2 && calls[1].1 < calls[0].1);
}

#[test]
fn huge_values_do_not_panic() {
    let points = normal(100, 4, 37) * 1e30;
    let fit = run(&points, &params(5, 3, Init::KMeansPlusPlus, 0));
    assert_eq!(fit.counts.iter().sum::<u32>(), 100);
}

/// The probability of each set of `size` centroids under D² sampling, enumerated. Sets are bits.
fn d2_sets(points: &Array2<f32>, size: usize) -> Vec<f64> {
    fn grow(points: ArrayView2<f32>, size: usize, set: usize, p: f64, sets: &mut [f64]) {
        let n = points.nrows();
        if set.count_ones() as usize == size {
            sets[set] += p;
            return;
        }
        let to_set = |i: usize| {
            let chosen = (0..n).filter(|c| set >> c & 1 == 1);
            chosen
                .map(|c| distance_f64(points.row(i), points.row(c)))
                .fold(f64::INFINITY, f64::min)
        };
        let weights: Vec<f64> = if set == 0 {
            vec![1.0; n]
        } else {
            (0..n).map(to_set).collect()
        };
        let total: f64 = weights.iter().sum();
        for (i, w) in weights.iter().enumerate().filter(|(_, w)| **w > 0.0) {
            grow(points, size, set | 1 << i, p * w / total, sets);
        }
    }
    let mut sets = vec![0.0; 1 << points.nrows()];
    grow(points.view(), size, 0, 1.0, &mut sets);
    sets
}

#[test]
fn seeding_draws_by_squared_distance_exactly() {
    // Five centroids: the fourth is drawn by stale distances, and so would the sixth be.
    let points = array![
        [0.0f32, 0.0],
        [0.3, 0.1],
        [2.0, 0.0],
        [2.2, 0.5],
        [-1.0, 3.0],
        [-1.3, 2.8],
        [0.2, -2.0],
        [1.1, 1.0]
    ];
    for size in [2, 4, 6] {
        let expected = d2_sets(&points, size);
        let draws = 20_000;
        let mut seen = vec![0.0; expected.len()];
        for seed in 0..draws {
            let fit = run(&points, &params(size, 0, Init::KMeansPlusPlus, seed));
            let place = |c: ArrayView1<f32>| points.rows().into_iter().position(|x| x == c).unwrap();
            let set = fit
                .codebook
                .rows()
                .into_iter()
                .fold(0, |set, c| set | 1 << place(c));
            seen[set] += 1.0;
        }
        // Chi-square; sets expected fewer than five times are pooled.
        let (mut chi2, mut cells, mut rare) = (0.0, 0.0f64, (0.0, 0.0));
        for (p, seen) in expected.iter().zip(seen) {
            let mean = p * draws as f64;
            if mean < 5.0 {
                rare = (rare.0 + mean, rare.1 + seen);
            } else {
                chi2 += (seen - mean) * (seen - mean) / mean;
                cells += 1.0;
            }
        }
        chi2 += (rare.1 - rare.0) * (rare.1 - rare.0) / rare.0.max(1.0);
        // Five standard deviations above the mean of the chi-square distribution.
        let limit = cells + 5.0 * (2.0 * cells).sqrt();
        assert!(
            chi2 < limit,
            "size {size}: chi-square {chi2:.1} over {cells} sets, limit {limit:.1}"
        );
    }
}

#[test]
fn one_pass_agrees_with_linfa() {
    let points = normal(1500, 12, 40);
    let start = points.slice(s![..10, ..]).to_owned();
    let ours = run(&points, &params(10, 1, Init::Precomputed(start.clone()), 0));
    let first = run(&points, &params(10, 0, Init::Precomputed(start.clone()), 0));
    let theirs = KMeans::params_with_rng(10, ChaCha8Rng::seed_from_u64(0))
        .init_method(KMeansInit::Precomputed(start.mapv(f64::from)))
        .n_runs(1)
        .max_n_iterations(1)
        .tolerance(1e-12)
        .fit(&DatasetBase::from(points.mapv(f64::from)))
        .unwrap();
    for c in 0..10 {
        let count = theirs.cluster_count()[c];
        assert_eq!(f64::from(first.counts[c]), count);
        // linfa counts the old centroid as one more member; take it out again.
        for j in 0..12 {
            let mean = (theirs.centroids()[[c, j]] * (count + 1.0) - f64::from(start[[c, j]])) / count;
            assert!((mean - f64::from(ours.codebook[[c, j]])).abs() < 1e-6);
        }
    }
    assert!((first.inertia[0] / 1500.0 - theirs.inertia()).abs() < 1e-5 * theirs.inertia());
}

#[test]
fn the_fixed_point_and_its_codes_agree_with_linfa() {
    let (centers, points) = planted(8, 60, 16, 41);
    let start = &centers + 0.5;
    let ours = run(&points, &params(8, 100, Init::Precomputed(start.clone()), 0));
    let theirs = KMeans::params_with_rng(8, ChaCha8Rng::seed_from_u64(0))
        .init_method(KMeansInit::Precomputed(start))
        .n_runs(1)
        .max_n_iterations(100)
        .tolerance(1e-9)
        .fit(&DatasetBase::from(points.clone()))
        .unwrap();
    for (a, b) in ours.codebook.iter().zip(theirs.centroids()) {
        assert!((a - b).abs() < 1e-4, "{a} {b}");
    }
    let codes: Vec<u32> = theirs.predict(&points).iter().map(|&c| c as u32).collect();
    assert_eq!(codes, ours.codes);
}

#[test]
fn linfa_traits_are_the_same_engine() {
    let points = normal(600, 10, 42);
    let params = params(25, 5, Init::KMeansPlusPlus, 3);
    let fit = run(&points, &params);
    let dataset = DatasetBase::from(points.clone());
    let codebook = params.fit(&dataset).unwrap();
    assert_eq!(codebook.centroids(), fit.codebook);
    let codes: Vec<u32> = codebook.predict(&dataset).iter().map(|&c| c as u32).collect();
    assert_eq!(codes, fit.codes);
    assert!(params.fit(&DatasetBase::from(normal(3, 10, 1))).is_err());
}

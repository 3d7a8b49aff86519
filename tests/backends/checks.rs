//! One check per operation. Bounds are derived, with u = 2^-24: a sum of m products or values in f32 is
//! off by at most (m + 1) u times the sum of their magnitudes; devices sum at most 256 in f32.

use std::ops::ControlFlow;

use kvsmith::compute::cpu::Cpu;
use kvsmith::compute::device::{Clusters, Device, Points, SignSums, Statistic};
use kvsmith::compute::reference;
use kvsmith::stats::kmeans::{self, Init, KMeansFit, KMeansParams};
use ndarray::{Array2, Array3, ArrayView1, ArrayView2, Axis, s};

use super::Check;
use super::cases::{Case, Data};

/// Every operation, by the name of its reference.
pub const ALL: [(&str, Check); 9] = [
    ("second_moment", second_moment),
    ("whiten", whiten),
    ("channel_statistic", channel_statistic),
    ("sign_sums", sign_sums),
    ("nearest", nearest),
    ("means", means),
    ("draw", draw),
    ("heads", heads),
    ("cluster", cluster),
];

/// Half the distance of two f32 numbers near 1.
const U: f64 = 1.0 / (1u64 << 24) as f64;
/// Most values that a device sums in f32, one product and one rounding more.
const F32_SUM: f64 = 258.0 * U;

fn points<'a>(device: &'a dyn Device, x: &Array3<f32>) -> Box<dyn Points + 'a> {
    let points = device.points(x.clone()).expect("room for the points");
    assert_eq!(points.dim(), x.dim());
    points
}

/// All rows, as the device holds them.
fn rows(points: &mut dyn Points) -> Array3<f32> {
    let (heads, n, d) = points.dim();
    let all: Vec<u32> = (0..n as u32).collect();
    let mut out = Array3::zeros((heads, n, d));
    for (head, mut out) in out.outer_iter_mut().enumerate() {
        out.assign(&points.rows(head, &all).expect("rows"));
    }
    out
}

fn close(found: f64, expected: f64, bound: f64, what: &str) {
    let error = (found - expected).abs();
    // A NaN must fail.
    assert!(
        error <= bound,
        "{what}: found {found}, expected {expected}, bound {bound}"
    );
}

fn second_moment(device: &dyn Device, case: &Case) {
    let q = case.points();
    let found = device.second_moment(q.view()).expect("second moment");
    let (expected, size) = (
        reference::second_moment(q.view()),
        reference::second_moment(q.mapv(f32::abs).view()),
    );
    assert_eq!(found.dim(), expected.dim());
    for ((at, found), expected) in found.indexed_iter().zip(&expected) {
        close(*found, *expected, F32_SUM * size[at], "moment");
    }
}

fn whiten(device: &dyn Device, case: &Case) {
    let (x, chol) = (case.points(), case.factors());
    let mut points = points(device, &x);
    points.whiten(chol.view()).expect("whitened");
    let found = rows(points.as_mut());
    for head in 0..case.heads {
        let (x, chol) = (x.index_axis(Axis(0), head), chol.index_axis(Axis(0), head));
        let expected = reference::whiten(x, chol);
        let size = reference::whiten(x.mapv(f32::abs).view(), chol.mapv(f32::abs).view());
        for ((at, expected), size) in expected.indexed_iter().zip(&size) {
            let bound = (case.d as f64 + 1.0) * U * size;
            close(f64::from(found[[head, at.0, at.1]]), *expected, bound, "whitened");
        }
    }
}

fn channel_statistic(device: &dyn Device, case: &Case) {
    let x = case.points();
    let mut points = points(device, &x);
    let n = case.n;
    for range in [0..n, 0..n / 2, n / 3..n, n - 1..n] {
        let last = range.len().saturating_sub(1);
        let kinds = [
            Statistic::Mean,
            Statistic::Ranked(0),
            Statistic::Ranked(last / 2),
            Statistic::Ranked(last),
            Statistic::RankedMagnitude(last * 999 / 1000),
        ];
        for kind in kinds {
            let found = points
                .channel_statistic(range.clone(), kind)
                .expect("a statistic");
            for head in 0..case.heads {
                let part = x.slice(s![head, range.clone(), ..]);
                let expected = reference::channel_statistic(part, kind);
                let size = reference::channel_statistic(part.mapv(f32::abs).view(), Statistic::Mean);
                for j in 0..case.d {
                    let bound = match kind {
                        Statistic::Mean => (F32_SUM + U) * size[j],
                        _ => 0.0,
                    };
                    close(
                        f64::from(found[[head, j]]),
                        expected[j],
                        bound,
                        &format!("{kind:?} {range:?}"),
                    );
                }
            }
        }
    }
    // Taken off a part of the rows, exactly as f32 subtracts.
    let centre = points
        .channel_statistic(0..n, Statistic::Ranked(n / 2))
        .expect("a statistic");
    let part = n / 3..n;
    points.subtract(part.clone(), centre.view()).expect("subtracted");
    let found = rows(points.as_mut());
    for ((head, i, j), found) in found.indexed_iter() {
        let x = x[[head, i, j]];
        let expected = if part.contains(&i) {
            x - centre[[head, j]]
        } else {
            x
        };
        assert_eq!(found.to_bits(), expected.to_bits(), "row {i}, channel {j}");
    }
    let squares = points.square_sum().expect("squares");
    for (head, square) in squares.into_iter().enumerate() {
        let all = found.index_axis(Axis(0), head);
        let expected: f64 = all.iter().map(|v| f64::from(*v).powi(2)).sum();
        close(square, expected, F32_SUM * expected, "sum of squares");
    }
}

fn sign_sums(device: &dyn Device, case: &Case) {
    let mut x = case.points();
    // Zeros of both signs are not positive.
    x[[0, 0, 0]] = 0.0;
    x[[case.heads - 1, case.n - 1, 3]] = -0.0;
    let found = points(device, &x).sign_sums().expect("sign sums");
    assert_eq!(found.len(), case.heads);
    for (SignSums { sums, counts }, x) in found.iter().zip(x.outer_iter()) {
        let expected = reference::sign_sums(x);
        assert_eq!(*counts, expected.counts);
        // All values of a pattern's channel have one sign, so the sum is the sum of magnitudes.
        for (found, expected) in sums.iter().zip(&expected.sums) {
            close(*found, *expected, F32_SUM * expected.abs(), "sign sum");
        }
    }
}

/// The contract of [`Points::assign`] for the clusters of one head.
fn check_nearest(case: &Case, x: ArrayView2<f32>, found: &Clusters) {
    assert_eq!((found.codes.len(), found.distances.len()), (case.n, case.n));
    let centroids = found.centroids.view();
    let norms: Vec<f64> = centroids.rows().into_iter().map(norm).collect();
    // The reference is naive: of large cases it looks at a part of the rows, other ones for other sizes.
    let stride = 1 + case.n * centroids.len() / (1 << 25);
    for (i, x) in x
        .rows()
        .into_iter()
        .enumerate()
        .skip(centroids.nrows() % stride)
        .step_by(stride)
    {
        let (expected, least) = reference::nearest(x, centroids);
        let code = found.codes[i] as usize;
        let chosen = squared_distance(x, centroids.row(code));
        let size = norms
            .iter()
            .map(|c| norm(x) * c + c * c / 2.0)
            .fold(0.0, f64::max);
        let e = (case.d as f64 + 2.0) * U * size;
        assert!(
            chosen <= least + 4.0 * e,
            "row {i}: chosen {chosen}, least {least}, bound {}",
            4.0 * e
        );
        let bound = (case.d as f64 / 16.0 + 20.0) * U * chosen;
        close(
            f64::from(found.distances[i]),
            chosen,
            bound,
            &format!("distance of row {i}"),
        );
        if case.data == Data::Ties && centroids.iter().all(|c| c.fract() == 0.0) {
            assert_eq!(code, expected, "row {i}: the lowest index wins a tie");
        }
    }
}

fn check_assignment(case: &Case, x: &Array3<f32>, points: &mut dyn Points) -> Vec<Clusters> {
    let summary = points.assignment().expect("an assignment");
    let all: Vec<Clusters> = (0..case.heads)
        .map(|h| points.clusters(h).expect("clusters"))
        .collect();
    for (head, (found, summary)) in all.iter().zip(&summary).enumerate() {
        check_nearest(case, x.index_axis(Axis(0), head), found);
        let mut counts = vec![0; found.centroids.nrows()];
        found.codes.iter().for_each(|code| counts[*code as usize] += 1);
        let drawn = &summary.counts[..counts.len()];
        assert_eq!(drawn, counts, "counts of head {head}");
        let sum: f64 = found.distances.iter().map(|d| f64::from(*d)).sum();
        close(summary.inertia, sum, 1e-12 * sum, "inertia");
    }
    all
}

fn nearest(device: &dyn Device, case: &Case) {
    let (x, centroids) = (case.points(), case.centroids());
    let mut points = points(device, &x);
    points.assign(centroids.view()).expect("assigned");
    let found = check_assignment(case, &x, points.as_mut());
    for (found, centroids) in found.iter().zip(centroids.outer_iter()) {
        assert_eq!(found.centroids, centroids, "the centroids are those given");
    }
    assert!(
        points
            .assignment()
            .expect("an assignment")
            .iter()
            .all(|a| a.changed)
    );
    // The same again, to the bit, and fewer centroids after more.
    points.assign(centroids.view()).expect("assigned");
    assert_eq!(check_assignment(case, &x, points.as_mut()), found);
    points.assign(centroids.slice(s![.., ..1, ..])).expect("assigned");
    let one = check_assignment(case, &x, points.as_mut());
    assert!(one.iter().flat_map(|c| &c.codes).all(|code| *code == 0));
}

fn means(device: &dyn Device, case: &Case) {
    let (x, centroids) = (case.points(), case.centroids());
    let mut points = points(device, &x);
    points.assign(centroids.view()).expect("assigned");
    let mut before = check_assignment(case, &x, points.as_mut());
    // The second time with a row handed over from a centroid to another.
    for pass in 0..2 {
        if pass == 1 {
            for (head, before) in before.iter_mut().enumerate() {
                let to = (before.codes[0] + 1) % case.size as u32;
                points.hand_over(head, &[(0, to)]).expect("handed over");
                before.codes[0] = to;
            }
            assert!(
                points
                    .assignment()
                    .expect("an assignment")
                    .iter()
                    .all(|a| a.changed || case.size == 1)
            );
        }
        points.update().expect("updated");
        let after = check_assignment(case, &x, points.as_mut());
        let summary = points.assignment().expect("an assignment");
        for head in 0..case.heads {
            let (before, after) = (&before[head], &after[head]);
            check_means(x.index_axis(Axis(0), head), before, after);
            assert_eq!(summary[head].changed, before.codes != after.codes, "head {head}");
        }
        before = after;
    }
}

/// The centroids of `after` are the means of the rows as `before` had them.
fn check_means(x: ArrayView2<f32>, before: &Clusters, after: &Clusters) {
    let expected = reference::means(x, &before.codes, before.centroids.view());
    let size = reference::means(
        x.mapv(f32::abs).view(),
        &before.codes,
        Array2::zeros(expected.dim()).view(),
    );
    // CUDA sums in fixed point, in steps of 2^-40 of the largest value or less.
    let step = x.iter().fold(0.0f32, |m, v| m.max(v.abs()));
    let step = f64::from(step) / (1u64 << 40) as f64;
    for (m, (found, expected)) in after
        .centroids
        .rows()
        .into_iter()
        .zip(expected.rows())
        .enumerate()
    {
        let used = before.codes.contains(&(m as u32));
        for (j, (found, expected)) in found.iter().zip(expected).enumerate() {
            let bound = if used {
                (F32_SUM + U) * size[[m, j]] + step
            } else {
                0.0
            };
            close(
                f64::from(*found),
                *expected,
                bound,
                &format!("mean {m}, channel {j}"),
            );
        }
    }
}

fn draw(device: &dyn Device, case: &Case) {
    let x = case.points();
    let mut points = points(device, &x);
    let first: Vec<u32> = (0..case.heads)
        .map(|head| ((head * 7 + 3) % case.n) as u32)
        .collect();
    points.seed(case.size, &first).expect("seeded");
    let mut drawn: Vec<Vec<u32>> = first.iter().map(|row| vec![*row]).collect();
    for round in 0.. {
        let before = check_assignment(case, &x, points.as_mut());
        for (head, (drawn, before)) in drawn.iter().zip(&before).enumerate() {
            assert_eq!(before.centroids.nrows(), drawn.len());
            for (c, row) in before.centroids.rows().into_iter().zip(drawn) {
                assert_eq!(c, x.slice(s![head, *row as usize, ..]));
            }
        }
        // Heads go forward at their own pace.
        let batch: Vec<usize> = drawn
            .iter()
            .enumerate()
            .map(|(head, drawn)| (drawn.len() + head).min(37).min(case.size - drawn.len()))
            .collect();
        if batch.iter().all(|b| *b == 0) || round == 12 {
            break;
        }
        let uniforms = case.uniforms(batch.iter().copied().max().unwrap_or(0));
        let made = points.draw(&batch, &uniforms).expect("drawn");
        for head in 0..case.heads {
            let x = x.index_axis(Axis(0), head);
            let (rows, used) = reference::draw(x, &before[head].distances, batch[head], &uniforms[head]);
            assert_eq!(
                (made[head].centroids, made[head].used),
                (rows.len(), used),
                "head {head}"
            );
            drawn[head].extend(rows);
        }
    }
}

/// A head alone gives what it gives among others.
fn heads(device: &dyn Device, case: &Case) {
    let (x, centroids) = (case.points(), case.centroids());
    let one = |head: usize| s![head..head + 1, .., ..];
    let run = |x: Array3<f32>, centroids: Array3<f32>| {
        let mut points = points(device, &x);
        points.assign(centroids.view()).expect("assigned");
        points.update().expect("updated");
        (0..x.len_of(Axis(0)))
            .map(|h| points.clusters(h).expect("clusters"))
            .collect::<Vec<_>>()
    };
    let together = run(x.clone(), centroids.clone());
    for (head, together) in together.iter().enumerate() {
        let alone = run(
            x.slice(one(head)).to_owned(),
            centroids.slice(one(head)).to_owned(),
        );
        assert_eq!(&alone[0], together, "head {head}");
    }
}

fn fit(device: &dyn Device, x: &Array3<f32>, size: usize, min_gain: f64) -> Vec<KMeansFit> {
    let params = KMeansParams {
        size,
        iterations: 6,
        min_gain,
        init: Init::KMeansPlusPlus,
        seed: 0,
    };
    let seeds: Vec<u64> = (0..x.len_of(Axis(0)) as u64).collect();
    let mut points = points(device, x);
    kmeans::cluster(points.as_mut(), &params, &seeds, &mut |_, _| {
        ControlFlow::Continue(())
    })
    .expect("a fit")
}

/// The whole fit: within 1e-4 of the CPU's objective, and never rising.
fn cluster(device: &dyn Device, case: &Case) {
    let x = case.points();
    let found = fit(device, &x, case.size, 0.0);
    let cpu = fit(&Cpu, &x, case.size, 0.0);
    for (head, (found, cpu)) in found.iter().zip(&cpu).enumerate() {
        let last = |fit: &KMeansFit| fit.inertia.last().copied().expect("an inertia");
        let size: f64 = x
            .index_axis(Axis(0), head)
            .iter()
            .map(|v| f64::from(*v).powi(2))
            .sum();
        // Where every row sits on its centroid, what is left is rounding.
        close(
            last(found),
            last(cpu),
            1e-4 * last(cpu) + 1e-10 * size,
            "objective",
        );
        for pair in found.inertia.windows(2) {
            assert!(
                pair[1] <= pair[0] * (1.0 + 1e-6) + 1e-10 * size,
                "{:?}",
                found.inertia
            );
        }
        assert_eq!(found.counts.iter().sum::<u32>() as usize, case.n);
    }
    // A head that gains too little keeps what it had then, whatever the others go on to do.
    let (min_gain, stopped) = (0.02, fit(device, &x, case.size, 0.02));
    for (head, (stopped, all)) in stopped.iter().zip(&found).enumerate() {
        let small = all.inertia.windows(2).position(|w| w[0] - w[1] < min_gain * w[0]);
        let passes = small.map_or(all.inertia.len(), |i| i + 2);
        assert_eq!(stopped.inertia, all.inertia[..passes], "head {head}");
        let rows = x.index_axis(Axis(0), head);
        let distances = rows.rows().into_iter().zip(&stopped.codes);
        let sum: f64 = distances
            .map(|(x, c)| squared_distance(x, stopped.codebook.row(*c as usize)))
            .sum();
        let size: f64 = rows.iter().map(|v| f64::from(*v).powi(2)).sum();
        close(
            stopped.inertia[passes - 1],
            sum,
            1e-5 * sum + 1e-10 * size,
            "objective where it stopped",
        );
    }
}

fn squared_distance(a: ArrayView1<f32>, b: ArrayView1<f32>) -> f64 {
    a.iter()
        .zip(b)
        .map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2))
        .sum()
}

fn norm(x: ArrayView1<f32>) -> f64 {
    x.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt()
}

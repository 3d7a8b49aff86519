//! One check per operation: those of `src/compute/checks.rs`, and what a whole fit must be.

use std::ops::ControlFlow;

use kvsmith::internal::compute::checks::{self, squared_distance};
use kvsmith::internal::compute::comparison::Comparison;
use kvsmith::internal::compute::cpu::Cpu;
use kvsmith::internal::compute::device::{Device, Points};
use kvsmith::internal::error::Result;
use kvsmith::internal::stats::kmeans::{self, Init, KMeansFit, KMeansParams};
use ndarray::{Array3, Axis, s};

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

fn points<'a>(device: &'a dyn Device, x: &Array3<f32>) -> Box<dyn Points + 'a> {
    let points = device.points(x.clone()).expect("room for the points");
    assert_eq!(points.dim(), x.dim());
    points
}

fn close(found: f64, expected: f64, bound: f64, what: &str) {
    let error = (found - expected).abs();
    // A NaN must fail.
    assert!(
        error <= bound,
        "{what}: found {found}, expected {expected}, bound {bound}"
    );
}

#[track_caller]
fn passed(result: Result<Comparison>) {
    let comparison = result.expect("the device works");
    comparison.assert();
    assert!(comparison.count > 0);
}

fn second_moment(device: &dyn Device, case: &Case) {
    passed(checks::second_moment(device, case.points().view()));
}

fn whiten(device: &dyn Device, case: &Case) {
    passed(checks::whiten(device, &case.points(), &case.factors()));
}

fn channel_statistic(device: &dyn Device, case: &Case) {
    passed(checks::channel_statistic(device, &case.points()));
}

fn sign_sums(device: &dyn Device, case: &Case) {
    passed(checks::sign_sums(device, &case.points()));
}

fn nearest(device: &dyn Device, case: &Case) {
    let ties = case.data == Data::Ties;
    passed(checks::nearest(device, &case.points(), &case.centroids(), ties));
}

fn means(device: &dyn Device, case: &Case) {
    let ties = case.data == Data::Ties;
    passed(checks::means(device, &case.points(), &case.centroids(), ties));
}

fn draw(device: &dyn Device, case: &Case) {
    let ties = case.data == Data::Ties;
    let uniforms = |batch| case.uniforms(batch);
    passed(checks::draw(device, &case.points(), case.size, ties, &uniforms));
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

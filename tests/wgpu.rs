//! The wgpu device when an adapter fails or is asked for too much: it returns errors, never panics and never returns
//! numbers. Without an adapter, the tests show as ignored.

mod common;

use std::process::ExitCode;

use common::trials;
use kvsmith::internal::compute::device::{Device, Statistic};
use kvsmith::internal::compute::wgpu::{Wgpu, WgpuLimits};
use kvsmith::internal::error::{Error, ErrorKind};
use libtest_mimic::Arguments;
use ndarray::{Array2, Array3, Axis};

fn main() -> ExitCode {
    let missing = Wgpu::open(WgpuLimits::NONE).err();
    if let Some(reason) = &missing {
        eprintln!("ignored: {reason}");
    }
    let trials = trials![
        the_adapter_has_a_name,
        a_lost_device_is_an_error,
        too_small_a_buffer_is_an_error,
        no_rows_are_no_trouble,
        values_that_are_not_finite,
    ];
    let trials = trials.into_iter().map(|t| t.with_ignored_flag(missing.is_some()));
    let trials = trials.collect();
    libtest_mimic::run(&Arguments::from_args(), trials).exit_code()
}

fn values(b: usize, n: usize, d: usize) -> Array3<f32> {
    Array3::from_shape_fn((b, n, d), |(h, i, j)| {
        ((h * 31 + i * 17 + j * 7) % 23) as f32 - 11.0
    })
}

fn is_device_error<T>(result: Result<T, Error>, culprit: &str) {
    let error = result.err().expect("an error");
    assert_eq!(error.kind(), ErrorKind::Device, "{error}");
    assert!(error.to_string().contains(culprit), "{error}");
    assert!(error.advice().is_some(), "{error}");
}

fn the_adapter_has_a_name() {
    let adapter = Wgpu::open(WgpuLimits::NONE).unwrap().adapter().unwrap();
    // Name, backend, driver.
    assert!(adapter.split(", ").all(|part| !part.is_empty()), "{adapter}");
    assert!(adapter.split(", ").count() >= 3, "{adapter}");
}

fn a_lost_device_is_an_error() {
    let device = Wgpu::open(WgpuLimits::NONE).unwrap();
    let x = values(2, 300, 8);
    let mut points = device.points(x.clone()).unwrap();
    points.assign(x.slice(ndarray::s![.., ..5, ..])).unwrap();
    let before = points.clusters(1).unwrap();
    device.destroy();
    let lost = "lost";
    is_device_error(device.second_moment(x.view()), lost);
    is_device_error(device.points(x.clone()).map(|_| ()), lost);
    is_device_error(points.channel_statistic(0..300, Statistic::Mean), lost);
    is_device_error(points.channel_statistic(0..300, Statistic::Ranked(3)), lost);
    is_device_error(points.square_sum(), lost);
    is_device_error(points.sign_sums(), lost);
    is_device_error(points.rows(0, &[7]), lost);
    is_device_error(points.update(), lost);
    is_device_error(points.seed(3, &[0, 1]), lost);
    is_device_error(points.assign(x.slice(ndarray::s![.., ..9, ..])), lost);
    is_device_error(points.whiten(values(2, 8, 8).view()), lost);
    is_device_error(points.subtract(0..9, Array2::zeros((2, 8)).view()), lost);
    // What the host has is what there was.
    assert_eq!(points.clusters(1).unwrap().codes, before.codes);
}

fn too_small_a_buffer_is_an_error() {
    let device = Wgpu::open(WgpuLimits {
        buffer_bytes: 4096,
        groups: 2,
    })
    .unwrap();
    let culprit = "the adapter supports at most 4096";
    // A row, the moments of one block, a factor.
    is_device_error(device.points(values(1, 3, 1025)).map(|_| ()), culprit);
    is_device_error(device.second_moment(values(1, 3, 33).view()), culprit);
    let mut points = device.points(values(1, 3, 33)).unwrap();
    is_device_error(points.whiten(values(1, 33, 33).view()), culprit);
    // 33 channels by themselves are fine, in pieces.
    let sums = points.channel_statistic(0..3, Statistic::Mean).unwrap();
    assert_eq!(sums.dim(), (1, 33));
}

fn no_rows_are_no_trouble() {
    let device = Wgpu::open(WgpuLimits::NONE).unwrap();
    let mut points = device.points(Array3::zeros((2, 0, 4))).unwrap();
    for what in [
        Statistic::Mean,
        Statistic::Ranked(0),
        Statistic::RankedMagnitude(0),
    ] {
        assert_eq!(
            points.channel_statistic(0..0, what).unwrap(),
            Array2::<f32>::zeros((2, 4))
        );
    }
    points.whiten(values(2, 4, 4).view()).unwrap();
    points.subtract(0..0, Array2::zeros((2, 4)).view()).unwrap();
    assert_eq!(points.square_sum().unwrap(), [0.0; 2]);
    points.assign(values(2, 3, 4).view()).unwrap();
    points.update().unwrap();
    for found in points.assignment().unwrap() {
        assert_eq!((found.inertia, found.counts), (0.0, vec![0; 3]));
    }
    let nothing = device.second_moment(Array3::zeros((2, 0, 4)).view()).unwrap();
    assert_eq!(nothing, Array3::<f64>::zeros((2, 4, 4)));
}

fn values_that_are_not_finite() {
    let device = Wgpu::open(WgpuLimits::NONE).unwrap();
    let clean = values(2, 600, 8);
    for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        let mut x = clean.clone();
        x[[1, 500, 5]] = value;
        let mut points = device.points(x.clone()).unwrap();
        let squares = points.square_sum().unwrap();
        assert!(squares[0].is_finite() && !squares[1].is_finite(), "{squares:?}");
        // Every row has a centroid, and the other rows have theirs.
        points.assign(x.slice(ndarray::s![.., ..20, ..])).unwrap();
        let found = points.clusters(1).unwrap().codes;
        assert!(found.iter().all(|code| *code < 20));
        let mut points = device.points(clean.clone()).unwrap();
        points.assign(clean.slice(ndarray::s![.., ..20, ..])).unwrap();
        let expected = points.clusters(1).unwrap().codes;
        let others = (0..600).filter(|i| *i != 500);
        assert!(others.clone().all(|i| found[i] == expected[i]));
        assert_eq!(
            points.rows(1, &[0]).unwrap().index_axis(Axis(0), 0),
            clean.slice(ndarray::s![1, 0, ..])
        );
    }
}

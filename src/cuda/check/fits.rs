//! The operations of calibration: second moments, statistics of rows, and clusters.

use ndarray::{Array3, s};
use rand::Rng;

use super::case::{Case, normal, rng};
use crate::compute::checks;
use crate::compute::cuda::Cuda;
use crate::compute::cuda::watched::Watched;

const AREA: &str = "fits";

/// Rows of points and the number of centroids.
#[derive(Clone, Copy)]
struct Size {
    heads: usize,
    n: usize,
    d: usize,
    size: usize,
}

/// Which rows there are.
#[derive(Clone, Copy, PartialEq)]
enum Data {
    /// Normal, channels of unequal scale.
    Normal,
    /// Small whole numbers: sums are exact, and many distances are equal.
    Ties,
}

impl Size {
    fn points(self, data: Data) -> Array3<f32> {
        let mut rng = rng((self.n * 31 + self.d) as u64);
        let mut x = Array3::from_shape_fn((self.heads, self.n, self.d), |(_, _, j)| match data {
            Data::Normal => normal(&mut rng) / (1.0 + j as f32 / 16.0),
            Data::Ties => normal(&mut rng).round().clamp(-2.0, 2.0),
        });
        // The scale of a head depends on its last row.
        x.slice_mut(s![.., self.n - 1, ..]).mapv_inplace(|v| v * 20.0);
        x
    }

    /// Rows of the points and halves of them. A quarter of the centroids repeats the first ones, several times each, so
    /// that rows have many nearest ones.
    fn centroids(self, data: Data) -> Array3<f32> {
        let x = self.points(data);
        let repeated = self.size / 4..self.size / 2;
        Array3::from_shape_fn((self.heads, self.size, self.d), |(head, m, j)| {
            let original = if repeated.contains(&m) {
                m % (self.size / 20).max(1)
            } else {
                m
            };
            let value = x[[head, original * 7 % self.n, j]];
            if data == Data::Normal && original % 3 == 1 {
                value / 2.0
            } else {
                value
            }
        })
    }

    fn factors(self) -> Array3<f32> {
        let mut rng = rng(4);
        Array3::from_shape_fn((self.heads, self.d, self.d), |(_, i, j)| {
            if j <= i { normal(&mut rng) } else { 0.0 }
        })
    }
}

fn uniforms(heads: usize, batch: usize) -> Vec<Vec<f64>> {
    let mut rng = rng(5 + batch as u64);
    let mut numbers = || (0..2 * (2 * batch + 1)).map(|_| rng.r#gen()).collect();
    (0..heads).map(|_| numbers()).collect()
}

fn device(watched: &Watched) -> Cuda {
    Cuda::new(Box::new(watched.clone()))
}

pub fn cases() -> Vec<Case> {
    let size = |heads, n, d, size| Size { heads, n, d, size };
    let named = |what: &str, Size { heads, n, d, size }: Size| match size {
        0 => format!("{what} of {heads} heads of {n} x {d}"),
        size => format!("{what} of {heads} heads of {n} x {d}, {size} centroids"),
    };
    let mut cases = Vec::new();
    let rows = size(2, 2100, 40, 0);
    cases.push(Case::new(AREA, named("second moments", rows), move |watched| {
        checks::second_moment(&device(watched), rows.points(Data::Normal).view())
    }));
    let rows = size(2, 130, 80, 0);
    cases.push(Case::new(AREA, named("whitening", rows), move |watched| {
        checks::whiten(&device(watched), &rows.points(Data::Normal), &rows.factors())
    }));
    let rows = size(2, 300, 64, 0);
    cases.push(Case::new(AREA, named("statistics", rows), move |watched| {
        checks::channel_statistic(&device(watched), &rows.points(Data::Normal))
    }));
    cases.push(Case::new(AREA, named("sign sums", rows), move |watched| {
        checks::sign_sums(&device(watched), &rows.points(Data::Normal))
    }));
    for (data, rows) in [
        // Whole tiles of centroids, and a part of one.
        (Data::Normal, size(2, 257, 64, 128)),
        (Data::Normal, size(1, 150, 128, 140)),
        (Data::Ties, size(1, 300, 32, 60)),
    ] {
        let ties = data == Data::Ties;
        cases.push(Case::new(
            AREA,
            named("nearest centroids", rows),
            move |watched| {
                let (x, centroids) = (rows.points(data), rows.centroids(data));
                checks::nearest(&device(watched), &x, &centroids, ties)
            },
        ));
        cases.push(Case::new(AREA, named("Lloyd passes", rows), move |watched| {
            let (x, centroids) = (rows.points(data), rows.centroids(data));
            let mut all = checks::means(&device(watched), &x, &centroids, ties)?;
            // Every score in f32.
            let plain = device(&watched.without_tensor_cores());
            all.add(checks::means(&plain, &x, &centroids, ties)?);
            Ok(all)
        }));
        cases.push(Case::new(AREA, named("seeding", rows), move |watched| {
            let numbers = |batch| uniforms(rows.heads, batch);
            checks::draw(&device(watched), &rows.points(data), rows.size, ties, &numbers)
        }));
    }
    cases
}

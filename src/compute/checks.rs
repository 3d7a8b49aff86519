//! Checks the operations of a [`Device`] against [`super::reference`].
//!
//! Bounds are derived, with u = 2^-24: a sum of m products or values in f32 is off by at most (m + 1) u times the sum of
//! their magnitudes; devices sum at most 256 in f32.

mod clusters;

use ndarray::{Array3, ArrayView1, ArrayView3, Axis, s};

use super::comparison::{Comparison, UNIT};
use super::device::{Device, Points, SignSums, Statistic};
use super::reference;
use crate::error::Result;
pub use clusters::{assignment, draw, means, nearest};

/// Most values that a device sums in f32, one product and one rounding more.
const F32_SUM: f64 = 258.0 * UNIT;

/// Returns all rows, as the device holds them.
fn rows(points: &mut dyn Points) -> Result<Array3<f32>> {
    let (heads, n, d) = points.dim();
    let all: Vec<u32> = (0..n as u32).collect();
    let mut out = Array3::zeros((heads, n, d));
    for (head, mut out) in out.outer_iter_mut().enumerate() {
        out.assign(&points.rows(head, &all)?);
    }
    Ok(out)
}

/// Checks [`Device::second_moment`] on rows `[b,m,d]`.
///
/// # Errors
/// The device fails.
pub fn second_moment(device: &dyn Device, q: ArrayView3<f32>) -> Result<Comparison> {
    let found = device.second_moment(q)?;
    let (expected, size) = (
        reference::second_moment(q),
        reference::second_moment(q.mapv(f32::abs).view()),
    );
    let mut all = Comparison::default();
    all.equal(&found.dim(), &expected.dim(), || "sizes of moments".to_owned());
    for ((at, found), expected) in found.indexed_iter().zip(&expected) {
        all.close(*found, *expected, F32_SUM * size[at], || format!("moment {at:?}"));
    }
    Ok(all)
}

/// Checks [`Points::whiten`] on rows `[b,n,d]` with factors `[b,d,d]`.
///
/// # Errors
/// The device fails.
pub fn whiten(device: &dyn Device, x: &Array3<f32>, chol: &Array3<f32>) -> Result<Comparison> {
    let mut points = device.points(x.clone())?;
    points.whiten(chol.view())?;
    let found = rows(points.as_mut())?;
    let mut all = Comparison::default();
    for (head, (x, chol)) in x.outer_iter().zip(chol.outer_iter()).enumerate() {
        let expected = reference::whiten(x, chol);
        let size = reference::whiten(x.mapv(f32::abs).view(), chol.mapv(f32::abs).view());
        for (((i, j), expected), size) in expected.indexed_iter().zip(&size) {
            let bound = (x.ncols() as f64 + 1.0) * UNIT * size;
            all.close(f64::from(found[[head, i, j]]), *expected, bound, || {
                format!("row {i}, channel {j} of head {head}, whitened")
            });
        }
    }
    Ok(all)
}

/// Checks [`Points::channel_statistic`], [`Points::subtract`] and [`Points::square_sum`] on rows `[b,n,d]`.
///
/// # Errors
/// The device fails.
pub fn channel_statistic(device: &dyn Device, x: &Array3<f32>) -> Result<Comparison> {
    let mut points = device.points(x.clone())?;
    let n = x.dim().1;
    let mut all = Comparison::default();
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
            let found = points.channel_statistic(range.clone(), kind)?;
            for (head, x) in x.outer_iter().enumerate() {
                let part = x.slice(s![range.clone(), ..]);
                let expected = reference::channel_statistic(part, kind);
                let size = reference::channel_statistic(part.mapv(f32::abs).view(), Statistic::Mean);
                for (j, (expected, size)) in expected.iter().zip(&size).enumerate() {
                    let bound = match kind {
                        Statistic::Mean => (F32_SUM + UNIT) * size,
                        _ => 0.0,
                    };
                    all.close(f64::from(found[[head, j]]), *expected, bound, || {
                        format!("{kind:?} of rows {range:?}, channel {j} of head {head}")
                    });
                }
            }
        }
    }
    all.add(subtract(points.as_mut(), x)?);
    Ok(all)
}

/// Checks that a center is taken off a part of the rows exactly as f32 subtracts, and the sum of the squares.
fn subtract(points: &mut dyn Points, x: &Array3<f32>) -> Result<Comparison> {
    let n = x.dim().1;
    let centers = points.channel_statistic(0..n, Statistic::Ranked(n / 2))?;
    let part = n / 3..n;
    points.subtract(part.clone(), centers.view())?;
    let found = rows(points)?;
    let mut all = Comparison::default();
    for ((head, i, j), found) in found.indexed_iter() {
        let x = x[[head, i, j]];
        let expected = if part.contains(&i) {
            x - centers[[head, j]]
        } else {
            x
        };
        all.equal(&found.to_bits(), &expected.to_bits(), || {
            format!("bits of row {i}, channel {j} of head {head}, centered")
        });
    }
    for (head, square) in points.square_sum()?.into_iter().enumerate() {
        let rows = found.index_axis(Axis(0), head);
        let expected: f64 = rows.iter().map(|v| f64::from(*v).powi(2)).sum();
        all.close(square, expected, F32_SUM * expected, || {
            format!("sum of squares of head {head}")
        });
    }
    Ok(all)
}

/// Checks [`Points::sign_sums`] on rows `[b,n,d]`; two of their values are replaced by zeros of both signs.
///
/// # Errors
/// The device fails.
pub fn sign_sums(device: &dyn Device, x: &Array3<f32>) -> Result<Comparison> {
    let (mut x, (heads, n, _)) = (x.clone(), x.dim());
    // Zeros of both signs are not positive.
    x[[0, 0, 0]] = 0.0;
    x[[heads - 1, n - 1, 3]] = -0.0;
    let found = device.points(x.clone())?.sign_sums()?;
    let mut all = Comparison::default();
    all.equal(&found.len(), &heads, || "number of heads".to_owned());
    for (head, (SignSums { sums, counts }, x)) in found.iter().zip(x.outer_iter()).enumerate() {
        let expected = reference::sign_sums(x);
        all.equal(counts, &expected.counts, || {
            format!("counts of sign patterns of head {head}")
        });
        // All values of a pattern's channel have one sign, so the sum is the sum of magnitudes.
        for (i, (found, expected)) in sums.iter().zip(&expected.sums).enumerate() {
            all.close(*found, *expected, F32_SUM * expected.abs(), || {
                format!("sign sum {i} of head {head}")
            });
        }
    }
    Ok(all)
}

/// Returns the squared distance of two vectors, in f64.
pub fn squared_distance(a: ArrayView1<f32>, b: ArrayView1<f32>) -> f64 {
    a.iter()
        .zip(b)
        .map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2))
        .sum()
}

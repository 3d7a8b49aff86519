//! Checks of assignments, Lloyd passes and seeding.

use ndarray::{Array2, Array3, ArrayView1, ArrayView2, Axis, s};

use super::{F32_SUM, squared_distance};
use crate::compute::comparison::{Comparison, UNIT};
use crate::compute::device::{Clusters, Device, Points};
use crate::compute::reference;
use crate::error::Result;

/// Checks the contract of [`Points::assign`] for the clusters of one head. With `ties`, distances are exact and the lowest
/// of equal centroids must be taken.
fn check_nearest(all: &mut Comparison, x: ArrayView2<f32>, found: &Clusters, ties: bool) {
    let (n, d) = x.dim();
    all.equal(&(found.codes.len(), found.distances.len()), &(n, n), || {
        "numbers of codes and distances".to_owned()
    });
    let centroids = found.centroids.view();
    let norms: Vec<f64> = centroids.rows().into_iter().map(norm).collect();
    // The reference is naive: of large cases it looks at a part of the rows, other ones for other sizes.
    let stride = 1 + n * centroids.len() / (1 << 25);
    let looked = (centroids.nrows() % stride..n).step_by(stride);
    for (i, x) in looked.map(|i| (i, x.row(i))) {
        let (expected, least) = reference::nearest(x, centroids);
        let code = found.codes[i] as usize;
        let in_range = code < centroids.nrows();
        all.holds(in_range, &code, "the number of a centroid", || {
            format!("code of row {i}")
        });
        if !in_range {
            return;
        }
        let chosen = squared_distance(x, centroids.row(code));
        let size = norms
            .iter()
            .map(|c| norm(x) * c + c * c / 2.0)
            .fold(0.0, f64::max);
        let e = (d as f64 + 2.0) * UNIT * size;
        all.close(chosen, least, 4.0 * e, || {
            format!("squared distance of row {i} to its centroid {code}, the nearest being {expected}")
        });
        let bound = (d as f64 / 16.0 + 20.0) * UNIT * chosen;
        all.close(f64::from(found.distances[i]), chosen, bound, || {
            format!("distance of row {i}")
        });
        if ties && centroids.iter().all(|c| c.fract() == 0.0) {
            all.equal(&code, &expected, || {
                format!("code of row {i}: the lowest index wins a tie")
            });
        }
    }
}

/// Checks the present assignment of rows `[b,n,d]`, and returns the clusters of every head.
///
/// # Errors
/// The device fails.
pub fn assignment(
    all: &mut Comparison,
    x: &Array3<f32>,
    points: &mut dyn Points,
    ties: bool,
) -> Result<Vec<Clusters>> {
    let summary = points.assignment()?;
    let clusters: Vec<Clusters> = (0..x.dim().0)
        .map(|head| points.clusters(head))
        .collect::<Result<_>>()?;
    for (head, (found, summary)) in clusters.iter().zip(&summary).enumerate() {
        check_nearest(all, x.index_axis(Axis(0), head), found, ties);
        let mut counts = vec![0; found.centroids.nrows()];
        for code in &found.codes {
            if let Some(count) = counts.get_mut(*code as usize) {
                *count += 1;
            }
        }
        let drawn = &summary.counts[..counts.len()];
        all.equal(&drawn, &&counts[..], || {
            format!("rows per centroid of head {head}")
        });
        let sum: f64 = found.distances.iter().map(|d| f64::from(*d)).sum();
        all.close(summary.inertia, sum, 1e-12 * sum, || {
            format!("inertia of head {head}")
        });
    }
    Ok(clusters)
}

/// Checks [`Points::assign`] on rows `[b,n,d]` with centroids `[b,M,d]`.
///
/// # Errors
/// The device fails.
pub fn nearest(
    device: &dyn Device,
    x: &Array3<f32>,
    centroids: &Array3<f32>,
    ties: bool,
) -> Result<Comparison> {
    let mut all = Comparison::default();
    let mut points = device.points(x.clone())?;
    points.assign(centroids.view())?;
    let found = assignment(&mut all, x, points.as_mut(), ties)?;
    for (head, (found, centroids)) in found.iter().zip(centroids.outer_iter()).enumerate() {
        all.equal(&found.centroids.view(), &centroids, || {
            format!("centroids of head {head}")
        });
    }
    let changed: Vec<bool> = points.assignment()?.iter().map(|a| a.changed).collect();
    all.holds(changed.iter().all(|c| *c), &changed, "true", || {
        "whether the first assignment changes rows".to_owned()
    });
    // The same again, to the bit, and fewer centroids after more.
    points.assign(centroids.view())?;
    let again = assignment(&mut all, x, points.as_mut(), ties)?;
    all.equal(&(again == found), &true, || {
        "whether a second assignment is the same".to_owned()
    });
    points.assign(centroids.slice(s![.., ..1, ..]))?;
    let one = assignment(&mut all, x, points.as_mut(), ties)?;
    let codes = one.iter().flat_map(|c| &c.codes);
    let last = codes.copied().max();
    all.equal(&last, &Some(0), || "codes with one centroid".to_owned());
    Ok(all)
}

/// Checks [`Points::update`] and [`Points::hand_over`] on rows `[b,n,d]` with centroids `[b,M,d]`.
///
/// # Errors
/// The device fails.
pub fn means(
    device: &dyn Device,
    x: &Array3<f32>,
    centroids: &Array3<f32>,
    ties: bool,
) -> Result<Comparison> {
    let mut all = Comparison::default();
    let (heads, size) = (x.dim().0, centroids.dim().1);
    let mut points = device.points(x.clone())?;
    points.assign(centroids.view())?;
    let mut before = assignment(&mut all, x, points.as_mut(), ties)?;
    // The second time with a row handed over from a centroid to another.
    for pass in 0..2 {
        if all.failure.is_some() {
            break;
        }
        if pass == 1 {
            for (head, before) in before.iter_mut().enumerate() {
                let to = (before.codes[0] + 1) % size as u32;
                points.hand_over(head, &[(0, to)])?;
                before.codes[0] = to;
            }
            let changed: Vec<bool> = points.assignment()?.iter().map(|a| a.changed).collect();
            all.holds(size == 1 || changed.iter().all(|c| *c), &changed, "true", || {
                "whether handing a row over changes it".to_owned()
            });
        }
        points.update()?;
        let after = assignment(&mut all, x, points.as_mut(), ties)?;
        let summary = points.assignment()?;
        for head in 0..heads {
            // A wrong code may not be the number of a centroid.
            if all.failure.is_some() {
                break;
            }
            let (before, after) = (&before[head], &after[head]);
            check_means(&mut all, x.index_axis(Axis(0), head), before, after);
            let is_other = before.codes != after.codes;
            all.equal(&summary[head].changed, &is_other, || {
                format!("whether rows of head {head} changed")
            });
        }
        before = after;
    }
    Ok(all)
}

/// Checks that the centroids of `after` are the means of the rows as `before` had them.
fn check_means(all: &mut Comparison, x: ArrayView2<f32>, before: &Clusters, after: &Clusters) {
    let expected = reference::means(x, &before.codes, before.centroids.view());
    let size = reference::means(
        x.mapv(f32::abs).view(),
        &before.codes,
        Array2::zeros(expected.dim()).view(),
    );
    // CUDA sums in fixed point, in steps of 2^-40 of the largest value or less.
    let step = x.iter().fold(0.0f32, |m, v| m.max(v.abs()));
    let step = f64::from(step) / (1u64 << 40) as f64;
    let mut is_used = vec![false; expected.nrows()];
    before
        .codes
        .iter()
        .for_each(|code| is_used[*code as usize] = true);
    for ((m, j), found) in after.centroids.indexed_iter() {
        let bound = if is_used[m] {
            (F32_SUM + UNIT) * size[[m, j]] + step
        } else {
            0.0
        };
        all.close(f64::from(*found), expected[[m, j]], bound, || {
            format!("channel {j} of the mean of centroid {m}")
        });
    }
}

/// Checks [`Points::seed`] and [`Points::draw`] on rows `[b,n,d]`; `uniforms` gives the random numbers of a batch.
///
/// # Errors
/// The device fails.
pub fn draw(
    device: &dyn Device,
    x: &Array3<f32>,
    size: usize,
    ties: bool,
    uniforms: &dyn Fn(usize) -> Vec<Vec<f64>>,
) -> Result<Comparison> {
    let mut all = Comparison::default();
    let (heads, n, _) = x.dim();
    let mut points = device.points(x.clone())?;
    let first: Vec<u32> = (0..heads).map(|head| ((head * 7 + 3) % n) as u32).collect();
    points.seed(size, &first)?;
    let mut drawn: Vec<Vec<u32>> = first.iter().map(|row| vec![*row]).collect();
    for round in 0.. {
        let before = assignment(&mut all, x, points.as_mut(), ties)?;
        for (head, (drawn, before)) in drawn.iter().zip(&before).enumerate() {
            let rows: Vec<usize> = drawn.iter().map(|row| *row as usize).collect();
            let expected = x.index_axis(Axis(0), head).select(Axis(0), &rows);
            all.equal(&before.centroids, &expected, || {
                format!("centroids drawn for head {head}")
            });
        }
        // Heads go forward at their own pace.
        let batch = drawn.iter().enumerate().map(|(head, drawn)| {
            let wanted = (drawn.len() + head).min(37);
            wanted.min(size.saturating_sub(drawn.len()))
        });
        let batch: Vec<usize> = batch.collect();
        if batch.iter().all(|b| *b == 0) || round == 12 || all.failure.is_some() {
            break;
        }
        let numbers = uniforms(batch.iter().copied().max().unwrap_or(0));
        let made = points.draw(&batch, &numbers)?;
        for head in 0..heads {
            let x = x.index_axis(Axis(0), head);
            let (rows, used) = reference::draw(x, &before[head].distances, batch[head], &numbers[head]);
            let found = (made[head].centroids, made[head].used);
            all.equal(&found, &(rows.len(), used), || {
                format!("centroids and random numbers of a draw of head {head}")
            });
            drawn[head].extend(rows);
        }
    }
    Ok(all)
}

fn norm(x: ArrayView1<f32>) -> f64 {
    x.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt()
}

//! The fit of the maps of a layer's keys and values.

use ndarray::{Array1, Array2, Axis};
use rayon::prelude::*;
use serde_json::{Map, Value};

use super::attended::{Attended, rows_at_once};
use super::fitted;
use super::section::{Form, KEYS, MEAN, RotationParams, RotationQuality, RotationSection, Rounding, VALUES};
use crate::artifact::{Fit, FitText, HeadDone, LayerPart, LayerStates, SectionKind, object};
use crate::env;
use crate::error::{Error, Result};
use crate::kv::low_bit;
use crate::kv::map::{self, RowMap};
use crate::kv::static_set::SINKS;
use crate::method::late_rows::LateRows;
use crate::stats::linalg;
use crate::stats::sampling::evenly;

/// The part of the mean eigenvalue that is added to every eigenvalue of S. No query is then without a place in the metric.
pub(super) const QUERY_RIDGE: f64 = 1e-4;
/// The same for C: keys of other texts have some spread in directions in which those of the calibration have none.
pub(super) const KEY_RIDGE: f64 = 0.1;
/// The most queries of the fit, and the most held-out ones, whose attention weighs values.
pub(super) const MAX_QUERIES: [usize; 2] = [128, 64];
/// The most rows that are compared with what is read back.
const MAX_ROWS: usize = 512;
/// Rows whose products are added at once.
const ROWS_AT_ONCE: usize = 16_384;
/// The hint of errors about values that the section cannot hold.
const OUTLIERS: &str = "the keys or queries of this head have extreme outliers; check the model and the text";

/// The fit of the section `rotation`.
pub(super) struct RotationFit {
    pub params: RotationParams,
    /// Queries whose attention says which values matter.
    sample: LateRows,
    /// Kept rows after the first positions of their blocks (all kept rows if no block has others), and held-out rows for the
    /// report, likewise.
    rows: [Vec<usize>; 2],
}

impl RotationFit {
    pub fn new(params: RotationParams, block_start: &[u32], kept: &[bool]) -> Self {
        let sample = LateRows::new(block_start, kept, MAX_QUERIES);
        let later: Vec<usize> = sample.blocks.iter().flat_map(|block| block.skip(SINKS)).collect();
        let rows = [true, false].map(|wanted| {
            let own: Vec<usize> = later.iter().copied().filter(|row| kept[*row] == wanted).collect();
            if own.is_empty() {
                (0..kept.len()).filter(|row| kept[*row] == wanted).collect()
            } else {
                own
            }
        });
        Self { params, sample, rows }
    }
}

impl Fit for RotationFit {
    fn kind(&self) -> &'static dyn SectionKind {
        &RotationSection
    }

    fn params(&self) -> Result<Map<String, Value>> {
        object(&self.params)
    }

    fn query_rows(&self) -> &[usize] {
        &self.sample.rows
    }

    fn working_bytes(&self, text: &FitText) -> usize {
        let (r, row) = (text.sizes.group(), text.sizes.head_dim * size_of::<f32>());
        // All keys and values of a head, and the queries.
        let rows = (2 * text.n + r * self.sample.rows.len()) * row;
        // Then the rotations; or the sums of squared attention and the weights of some rows; or the sums as they are and by row,
        // and some rows, once more while they are multiplied.
        let rotations = text.longest_block * row;
        let sums = 2 * text.n * size_of::<f64>();
        let attends = sums + rows_at_once(text.threads) * 2 * text.longest_block * size_of::<f32>();
        let weighted =
            sums + 2 * text.n * size_of::<(usize, f64)>() + 2 * self.rows[0].len().min(ROWS_AT_ONCE) * row;
        rows + text
            .read_bytes
            .max(text.query_read_bytes)
            .max(rotations)
            .max(attends)
            .max(weighted)
    }

    fn layer(&self, states: &LayerStates, done: HeadDone) -> Result<LayerPart> {
        let mut part = LayerPart::default();
        for head in 0..states.sizes.n_kv_heads {
            env::check()?;
            let quality = self
                .head(states, head, &mut part)
                .map_err(|e| e.context(format!("layer {}, KV head {head}", states.layer)))?;
            part.quality.push(object(&quality)?);
            done(head, quality.line());
        }
        Ok(part)
    }
}

impl RotationFit {
    /// Fits one head, adds it to the layer's part, and describes its quality.
    fn head(&self, states: &LayerStates, head: usize, part: &mut LayerPart) -> Result<RotationQuality> {
        let moments = states.moments()?;
        let count = moments.count[head].max(1) as f64;
        let queries = &moments.sum_qq.index_axis(Axis(0), head) / count;
        let mut keys = (states.read.k)(head)?;
        states.rope.rotate_blocks(&mut keys, states.block_start)?;
        let values = (states.read.v)(head)?;
        let attended = self.attended(states, &keys, head)?;
        let [fit_rows, held_out] = &self.rows;

        let zero = Array1::zeros(states.sizes.head_dim);
        let (key_map, mean, value_weights) = match self.params.form {
            Form::Balanced => {
                let mean = mean_of(&keys, fit_rows);
                let spread = moment(states, &keys, &mean, &evenly_weighted(fit_rows))?;
                (
                    balanced(&queries, &spread)?,
                    mean,
                    of_rows(&attended.fit, fit_rows),
                )
            }
            Form::Orthogonal => {
                let score = |row: &usize| {
                    let key = keys.row(*row).mapv(f64::from);
                    // Rounding may make a value of zero negative.
                    (*row, key.dot(&queries.dot(&key)).max(0.0))
                };
                (
                    orthogonal(&queries)?,
                    zero.clone(),
                    fit_rows.iter().map(score).collect(),
                )
            }
        };
        let value_map = orthogonal(&moment(states, &values, &zero, &value_weights)?)?;
        let own_keys = stored(part, KEYS, &key_map, &mean)?;
        let own_values = stored(part, VALUES, &value_map, &zero)?;
        part.put(MEAN, &mean.to_vec());

        let eye = Array2::eye(states.sizes.head_dim);
        let of_keys = |rows: &[usize]| {
            let rows = evenly_weighted(&evenly(rows, MAX_ROWS));
            rounding(&keys, &queries, &own_keys, &rows)
        };
        let of_values = |weights: &[f64], rows: &[usize]| {
            let rows = heaviest(of_rows(weights, rows), MAX_ROWS);
            rounding(&values, &eye, &own_values, &rows)
        };
        let everything: Vec<usize> = (0..keys.nrows()).collect();
        Ok(RotationQuality {
            keys: fit_rows.len(),
            queries: self.sample.n_kept(),
            key_errors: of_keys(fit_rows),
            held_out_key_errors: of_keys(held_out),
            value_errors: of_values(&attended.fit, fit_rows),
            held_out_value_errors: of_values(&attended.held_out, &everything),
        })
    }

    /// Returns how much the sampled queries of a KV head attend to each row, given its rotated keys.
    fn attended(&self, states: &LayerStates, keys: &Array2<f32>, head: usize) -> Result<Attended> {
        let table = states.rope.table(0..self.sample.blocks.longest());
        let queries = self.sample.queries(states, &table, head)?;
        Ok(Attended::new(&self.sample, states.window, keys, &queries))
    }
}

/// Rows of a text, each with a weight.
type Weighted = Vec<(usize, f64)>;

fn evenly_weighted(rows: &[usize]) -> Weighted {
    rows.iter().map(|row| (*row, 1.0)).collect()
}

/// Returns the mean of some rows.
fn mean_of(x: &Array2<f32>, rows: &[usize]) -> Array1<f32> {
    let mut sum = Array1::<f64>::zeros(x.ncols());
    for row in rows {
        sum.zip_mut_with(&x.row(*row), |sum, x| *sum += f64::from(*x));
    }
    sum.mapv(|sum| (sum / rows.len().max(1) as f64) as f32)
}

/// Returns rows with their weights, `weights[row]`.
fn of_rows(weights: &[f64], rows: &[usize]) -> Weighted {
    rows.iter().map(|row| (*row, weights[*row])).collect()
}

/// Returns the rows with the largest weights above zero, the largest first.
fn heaviest(mut rows: Weighted, most: usize) -> Weighted {
    rows.retain(|(_, weight)| *weight > 0.0);
    rows.sort_by(|(_, a), (_, b)| b.total_cmp(a));
    rows.truncate(most);
    rows
}

/// Returns the weighted mean of (x - mean)^T (x - mean) over rows x; zero without weights.
fn moment(states: &LayerStates, x: &Array2<f32>, mean: &Array1<f32>, rows: &Weighted) -> Result<Array2<f64>> {
    let d = mean.len();
    let mut sum = Array2::<f64>::zeros((d, d));
    for some in rows.chunks(ROWS_AT_ONCE) {
        let numbers: Vec<usize> = some.iter().map(|(row, _)| *row).collect();
        let mut scaled = x.select(Axis(0), &numbers) - mean;
        for (mut row, (_, weight)) in scaled.rows_mut().into_iter().zip(some) {
            row *= weight.sqrt() as f32;
        }
        let own = states.device.second_moment(scaled.view().insert_axis(Axis(0)))?;
        sum += &own.index_axis(Axis(0), 0);
    }
    let total: f64 = rows.iter().map(|(_, weight)| weight).sum();
    if total > 0.0 {
        sum /= total;
    }
    if sum.iter().all(|x| x.is_finite()) {
        Ok(sum)
    } else {
        Err(Error::invalid("a moment of the queries, keys or values is not finite").hint(OUTLIERS))
    }
}

/// Adds a matrix to the layer's part, and returns it as a map.
fn stored(part: &mut LayerPart, tensor: &str, map: &Array2<f64>, mean: &Array1<f32>) -> Result<RowMap> {
    let map: Vec<f32> = map.iter().map(|x| *x as f32).collect();
    part.put(tensor, &map);
    let none = || Error::invalid(format!("`{tensor}` of this head has no inverse in f32")).hint(OUTLIERS);
    fitted(&map, &mean.to_vec())?.ok_or_else(none)
}

/// Measures what rounding takes from rows: the weighted sum of e M e^T, as a share of that of (x - mean) M (x - mean)^T, for
/// rows x with errors e and a metric M; `None` if there are no rows, or all are equal.
fn rounding(x: &Array2<f32>, metric: &Array2<f64>, map: &RowMap, rows: &Weighted) -> Option<Rounding> {
    let (numbers, weights): (Vec<usize>, Vec<f64>) = rows.iter().copied().unzip();
    let (x, weights) = (x.select(Axis(0), &numbers), Array1::from(weights));
    let sum = |e: &Array2<f64>| -> f64 { (&(e.dot(metric) * e).sum_axis(Axis(1)) * &weights).sum() };
    let wide = x.mapv(f64::from);
    let mean = weights.dot(&wide) / weights.sum();
    let variance = sum(&(&wide - &mean));
    let error = |map: &RowMap, bits: usize| {
        let mut read = x.clone();
        read.axis_iter_mut(Axis(0)).into_par_iter().for_each(|mut row| {
            let mut values = row.to_vec();
            low_bit::round(&mut values, map, bits);
            row.assign(&Array1::from(values));
        });
        sum(&(&wide - &read.mapv(f64::from))) / variance
    };
    (variance > 0.0).then(|| Rounding {
        bits_4: error(map, 4),
        bits_2: error(map, 2),
        hadamard_4: error(&RowMap::Hadamard, 4),
        hadamard_2: error(&RowMap::Hadamard, 2),
    })
}

/// Returns a symmetric matrix with a mean eigenvalue of 1, plus a ridge; the identity if it is zero.
fn ridged(moment: &Array2<f64>, ridge: f64) -> Array2<f64> {
    let d = moment.nrows();
    let mean = moment.diag().sum() / d as f64;
    let eye = Array2::<f64>::eye(d);
    if mean > 0.0 {
        (moment + &moment.t()) * (0.5 / mean) + eye * ridge
    } else {
        eye
    }
}

/// Computes `A = L U D^-1/4 H`, `[d,d]`, for the moments S of queries and C of centered keys, `[d,d]` each. The mean variance of
/// the channels after A is that of the channels before.
fn balanced(queries: &Array2<f64>, spread: &Array2<f64>) -> Result<Array2<f64>> {
    let (s, c) = (ridged(queries, QUERY_RIDGE), ridged(spread, KEY_RIDGE));
    let failed =
        || Error::invalid("the moments of the queries and keys have no balanced form").hint(OUTLIERS);
    let l = linalg::cholesky(s.view())?.ok_or_else(failed)?;
    let inner = l.t().dot(&c).dot(&l);
    let (values, directions) = linalg::principal(((&inner + &inner.t()) * 0.5).view())?.ok_or_else(failed)?;
    if values.iter().any(|value| *value <= 0.0) {
        return Err(failed());
    }
    let mut map = l.dot(&directions);
    for (mut column, value) in map.columns_mut().into_iter().zip(&values) {
        column *= value.powf(-0.25);
    }
    // tr(A^T C A) is the sum of the roots of D.
    let after: f64 = values.iter().map(|value| value.sqrt()).sum();
    map *= (c.diag().sum() / after).sqrt();
    Ok(with_hadamard(map))
}

/// Computes `A = U H P`, `[d,d]`, with the eigenvectors U of a moment.
fn orthogonal(moment: &Array2<f64>) -> Result<Array2<f64>> {
    let failed = || Error::invalid("the eigenvectors of a moment did not converge").hint(OUTLIERS);
    let (_, directions) = linalg::principal(ridged(moment, QUERY_RIDGE).view())?.ok_or_else(failed)?;
    let map = with_hadamard(directions);
    let mut reversed = map.clone();
    let mut first = 0;
    while first < map.ncols() {
        let bits = (map.ncols() - first).ilog2();
        for i in 0..1usize << bits {
            // Of a block of one channel there is nothing to reverse.
            let from = i.reverse_bits().checked_shr(usize::BITS - bits).unwrap_or(0);
            reversed.column_mut(first + i).assign(&map.column(first + from));
        }
        first += 1 << bits;
    }
    Ok(reversed)
}

/// Multiplies every row by the Hadamard matrix.
fn with_hadamard(mut map: Array2<f64>) -> Array2<f64> {
    for mut row in map.rows_mut() {
        let mut values = row.to_vec();
        map::hadamard(&mut values);
        row.assign(&Array1::from(values));
    }
    map
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::values;

    fn moment(n: usize, d: usize, seed: u32, weights: impl Fn(usize) -> f64) -> Array2<f64> {
        let x = Array2::from_shape_vec((n, d), values(n * d, seed)).unwrap();
        let x = Array2::from_shape_fn((n, d), |(i, j)| f64::from(x[[i, j]]) * weights(j));
        x.t().dot(&x) / n as f64
    }

    fn trace_of(a: &Array2<f64>) -> f64 {
        a.diag().sum()
    }

    /// Both moments become equal up to a factor, and the product of their traces is that of the least error.
    #[test]
    fn the_balanced_map_has_the_least_error_of_all() {
        for d in [8, 20, 64] {
            let s = moment(400, d, 3, |j| 1.0 + 6.0 * (j % 3) as f64);
            let c = moment(400, d, 4, |j| 0.3 + (j % 5) as f64);
            let (s, c) = (ridged(&s, QUERY_RIDGE), ridged(&c, KEY_RIDGE));
            let a = balanced(&s, &c).unwrap();
            let back = linalg::inverse(a.view()).unwrap().unwrap();
            // `balanced` adds the ridges once more.
            let (s, c) = (ridged(&s, QUERY_RIDGE), ridged(&c, KEY_RIDGE));
            let (queries, keys) = (back.dot(&s).dot(&back.t()), a.t().dot(&c).dot(&a));
            let factor = trace_of(&keys) / trace_of(&queries);
            let off = (&queries * factor - &keys).mapv(f64::abs);
            assert!(off.iter().all(|x| *x < 1e-6 * trace_of(&keys)), "{d}");
            assert!((trace_of(&keys) / trace_of(&c) - 1.0).abs() < 1e-6, "{d}");
            let error = trace_of(&queries) * trace_of(&keys);
            let l = linalg::cholesky(s.view()).unwrap().unwrap();
            let values = linalg::eigenvalues(l.t().dot(&c).dot(&l).view())
                .unwrap()
                .unwrap();
            let least = values.iter().map(|x| x.sqrt()).sum::<f64>().powi(2);
            assert!((error / least - 1.0).abs() < 1e-6, "{d}: {error} {least}");
            // A Hadamard rotation has more, and so has this map with any column stretched.
            assert!(least < 0.9 * trace_of(&s) * trace_of(&c), "{d}");
            for i in 0..d {
                let mut other = a.clone();
                other.column_mut(i).mapv_inplace(|x| 1.2 * x);
                let back = linalg::inverse(other.view()).unwrap().unwrap();
                let error = trace_of(&back.dot(&s).dot(&back.t())) * trace_of(&other.t().dot(&c).dot(&other));
                assert!(error > least, "{d} {i}");
            }
        }
    }

    /// With keys that are spread along other directions than queries look, the fitted map loses less than a rotation.
    #[test]
    fn rounded_keys_lose_less_after_the_balanced_map() {
        let (n, d) = (600, 64);
        let rows = |seed, spread: fn(usize) -> f32| {
            let x = Array2::from_shape_vec((n, d), values(n * d, seed)).unwrap();
            Array2::from_shape_fn((n, d), |(i, j)| x[[i, j]] * spread(j))
        };
        let keys = rows(3, |j| 8.0 / (1 + j % 16) as f32) + 5.0;
        let queries = rows(4, |j| (1 + j / 4) as f32).mapv(f64::from);
        let s = queries.t().dot(&queries) / n as f64;
        let every: Vec<usize> = (0..n).collect();
        let mean = mean_of(&keys, &every);
        let centered = (&keys - &mean).mapv(f64::from);
        let c = centered.t().dot(&centered) / n as f64;
        let map: Vec<f32> = balanced(&s, &c).unwrap().iter().map(|x| *x as f32).collect();
        let own = fitted(&map, &mean.to_vec()).unwrap().unwrap();
        let found = rounding(&keys, &s, &own, &evenly_weighted(&every)).unwrap();
        assert!(found.bits_4 < 0.5 * found.hadamard_4);
        assert!(found.bits_2 < 0.5 * found.hadamard_2);
    }

    /// Few rows get all attention, and lie along directions of their own: they lose less after a map that is fitted to them.
    #[test]
    fn attended_values_lose_less_after_their_map() {
        let (n, d) = (600, 64);
        let direction = values(d, 6);
        let x = Array2::from_shape_vec((n, d), values(n * d, 5)).unwrap();
        let x = Array2::from_shape_fn((n, d), |(i, j)| {
            let length = if i % 9 == 0 { 4.0 + (i % 5) as f32 } else { 0.0 };
            x[[i, j]] + length * direction[j]
        });
        let weights: Vec<f64> = (0..n)
            .map(|i| if i % 9 == 0 { 1.0 + (i % 2) as f64 } else { 0.0 })
            .collect();
        let every: Vec<usize> = (0..n).collect();
        let rows = heaviest(of_rows(&weights, &every), 50);
        // 34 rows of weight 2 come first.
        assert!(
            rows.iter()
                .map(|(row, _)| row % 2)
                .eq((0..50).map(|i| usize::from(i < 33)))
        );
        let wide = x.mapv(f64::from);
        let scaled = Array2::from_shape_fn((n, d), |(i, j)| wide[[i, j]] * weights[i]);
        let map = orthogonal(&wide.t().dot(&scaled)).unwrap().mapv(|x| x as f32);
        let own = fitted(&map.into_iter().collect::<Vec<_>>(), &vec![0.0; d])
            .unwrap()
            .unwrap();
        let found = rounding(&x, &Array2::eye(d), &own, &rows).unwrap();
        assert!(
            found.bits_4 < 0.8 * found.hadamard_4,
            "{} {}",
            found.bits_4,
            found.hadamard_4
        );
        assert!(
            found.bits_2 < 0.8 * found.hadamard_2,
            "{} {}",
            found.bits_2,
            found.hadamard_2
        );
        // The error of a row does not depend on the others, and counts by its weight.
        let of = |rows: Weighted| rounding(&x, &Array2::eye(d), &own, &rows).unwrap().bits_4;
        let pair = |weight: f64| of(vec![(0, weight), (9, 1.0)]);
        assert!(pair(1.0) != pair(3.0));
        assert_eq!(of(vec![(0, 2.0), (9, 2.0)]), pair(1.0));
        assert!(rounding(&x, &Array2::eye(d), &own, &Vec::new()).is_none());
        assert!(rounding(&x, &Array2::eye(d), &own, &vec![(9, 1.0)]).is_none());
    }

    #[test]
    fn the_orthogonal_map_is_orthogonal_and_ordered() {
        for d in [8, 20, 64] {
            let s = moment(400, d, 5, |j| 1.0 + j as f64);
            let a = orthogonal(&s).unwrap();
            let product = a.t().dot(&a) - Array2::<f64>::eye(d);
            assert!(product.iter().all(|x| x.abs() < 1e-6), "{d}");
        }
        // The eigenvectors of a diagonal moment are the channels; columns 1 and 2 of H change places.
        let s = Array2::from_diag(&Array1::from(vec![4.0, 3.0, 2.0, 1.0]));
        let expected = ndarray::array![
            [0.5, 0.5, 0.5, 0.5],
            [0.5, 0.5, -0.5, -0.5],
            [0.5, -0.5, 0.5, -0.5],
            [0.5, -0.5, -0.5, 0.5]
        ];
        let found = orthogonal(&s).unwrap();
        assert!((found - expected).iter().all(|x| x.abs() < 1e-7));
    }

    #[test]
    fn heads_without_queries_or_keys_get_a_rotation() {
        let zero = Array2::zeros((8, 8));
        let a = balanced(&zero, &zero).unwrap();
        let product = a.t().dot(&a) - Array2::<f64>::eye(8);
        assert!(product.iter().all(|x| x.abs() < 1e-6));
    }

    #[test]
    fn the_first_positions_of_blocks_take_no_part() {
        let params = RotationParams::new(Form::Balanced);
        let mut kept = vec![true; 20];
        kept[15] = false;
        kept[11] = false;
        let fit = RotationFit::new(params.clone(), &[0, 10, 20], &kept);
        assert_eq!(fit.rows, [vec![4, 5, 6, 7, 8, 9, 14, 16, 17, 18, 19], vec![15]]);
        let short = RotationFit::new(params, &[0, 3], &[true, false, true]);
        assert_eq!(short.rows, [vec![0, 2], vec![1]]);
    }
}

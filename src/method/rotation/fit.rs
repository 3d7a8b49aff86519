//! The fit of the map of a layer's keys.

use ndarray::{Array1, Array2, ArrayView2, Axis};
use rayon::prelude::*;
use serde_json::{Map, Value};

use super::fitted;
use super::section::{Form, KEYS, MEAN, RotationParams, RotationQuality, RotationSection};
use crate::artifact::{Fit, FitText, HeadDone, LayerPart, LayerStates, SectionKind, object};
use crate::compute::cpu::row_mean;
use crate::env;
use crate::error::{Error, Result};
use crate::kv::low_bit;
use crate::kv::map::{self, RowMap};
use crate::kv::static_set::SINKS;
use crate::stats::linalg;
use crate::stats::sampling::{TextBlocks, evenly};

/// The part of the mean eigenvalue that is added to every eigenvalue of S. No query is then without a place in the metric.
pub(super) const QUERY_RIDGE: f64 = 1e-4;
/// The same for C: keys of other texts have some spread in directions in which those of the calibration have none.
pub(super) const KEY_RIDGE: f64 = 0.1;
/// The most rows whose rounded keys are compared with the exact ones, per kind.
const MAX_ROWS: usize = 512;
/// The hint of errors about values that the section cannot hold.
const OUTLIERS: &str = "the keys or queries of this head have extreme outliers; check the model and the text";

/// The fit of the section `rotation`.
pub(super) struct RotationFit {
    pub params: RotationParams,
    /// Kept rows after the first positions of their blocks (all kept rows if no block has others), and held-out rows for the
    /// report, likewise.
    pub rows: [Vec<usize>; 2],
}

impl RotationFit {
    pub fn new(params: RotationParams, block_start: &[u32], kept: &[bool]) -> Self {
        let blocks = TextBlocks::new(block_start);
        let later: Vec<usize> = blocks.iter().flat_map(|block| block.skip(SINKS)).collect();
        let rows = [true, false].map(|wanted| {
            let own: Vec<usize> = later.iter().copied().filter(|row| kept[*row] == wanted).collect();
            if own.is_empty() {
                (0..kept.len()).filter(|row| kept[*row] == wanted).collect()
            } else {
                own
            }
        });
        Self { params, rows }
    }
}

impl Fit for RotationFit {
    fn kind(&self) -> &'static dyn SectionKind {
        &RotationSection
    }

    fn params(&self) -> Result<Map<String, Value>> {
        object(&self.params)
    }

    fn working_bytes(&self, text: &FitText) -> usize {
        let row = text.sizes.head_dim * size_of::<f32>();
        // All keys of a head, those of the fit, and the rotations.
        (text.n + self.rows[0].len() + 2 * MAX_ROWS + text.longest_block) * row + text.read_bytes
    }

    fn layer(&self, states: &LayerStates, done: HeadDone) -> Result<LayerPart> {
        let mut part = LayerPart::default();
        for head in 0..states.sizes.n_kv_heads {
            env::check()?;
            let quality = self
                .head(states, head, &mut part)
                .map_err(|e| e.context(format!("layer {}, KV head {head}", states.layer)))?;
            let of_hadamard = quality.ratio_4().unwrap_or(1.0);
            part.quality.push(object(&quality)?);
            let line = format!("score error in 4 bits {of_hadamard:.2} times that of a Hadamard rotation");
            done(head, Some(line));
        }
        Ok(part)
    }
}

impl RotationFit {
    /// Fits one head, adds it to the layer's part, and describes its quality.
    fn head(&self, states: &LayerStates, head: usize, part: &mut LayerPart) -> Result<RotationQuality> {
        let d = states.sizes.head_dim;
        let moments = states.moments()?;
        let count = moments.count[head].max(1) as f64;
        let queries = &moments.sum_qq.index_axis(Axis(0), head) / count;
        let mut keys = (states.read.k)(head)?;
        states.rope.rotate_blocks(&mut keys, states.block_start)?;
        let [fit_rows, held_out] = &self.rows;
        let kept = keys.select(Axis(0), fit_rows);
        let mean = match self.params.form {
            Form::Balanced => row_mean(kept.view()),
            Form::Orthogonal => Array1::zeros(d),
        };
        let n = kept.nrows();
        let centered = kept - &mean;
        let moment = states
            .device
            .second_moment(centered.view().insert_axis(Axis(0)))?;
        let spread = &moment.index_axis(Axis(0), 0) / n.max(1) as f64;
        if !queries.iter().chain(&spread).all(|x| x.is_finite()) {
            return Err(Error::invalid("a moment of the queries or the keys is not finite").hint(OUTLIERS));
        }
        let wide = match self.params.form {
            Form::Balanced => balanced(&queries, &spread)?,
            Form::Orthogonal => orthogonal(&queries)?,
        };
        let map: Vec<f32> = wide.iter().map(|x| *x as f32).collect();
        let mean = mean.to_vec();
        let own = fitted(&map, &mean)?
            .ok_or_else(|| Error::invalid("the map of the keys has no inverse in f32").hint(OUTLIERS))?;
        part.put(KEYS, &map);
        part.put(MEAN, &mean);
        let errors = |rows: &[usize], map: &RowMap, bits: usize| -> Option<f64> {
            let rows = keys.select(Axis(0), &evenly(rows, MAX_ROWS));
            score_error(rows.view(), &queries, map, bits)
        };
        Ok(RotationQuality {
            score_variance: (&queries * &spread.t()).sum(),
            error_4: errors(fit_rows, &own, 4).unwrap_or(0.0),
            error_2: errors(fit_rows, &own, 2).unwrap_or(0.0),
            held_out_error_4: errors(held_out, &own, 4),
            held_out_error_2: errors(held_out, &own, 2),
            hadamard_error_4: errors(fit_rows, &RowMap::Hadamard, 4).unwrap_or(0.0),
            hadamard_error_2: errors(fit_rows, &RowMap::Hadamard, 2).unwrap_or(0.0),
            held_out_hadamard_error_4: errors(held_out, &RowMap::Hadamard, 4),
            held_out_hadamard_error_2: errors(held_out, &RowMap::Hadamard, 2),
            keys: n,
        })
    }
}

/// Returns the mean of (q e)^2 over rows and queries, where e is what rounding takes from a row; `None` without rows.
fn score_error(rows: ArrayView2<f32>, queries: &Array2<f64>, map: &RowMap, bits: usize) -> Option<f64> {
    let error = |row: usize| -> f64 {
        let row = rows.row(row);
        let mut read = row.to_vec();
        low_bit::round(&mut read, map, bits);
        let e: Array1<f64> = row.iter().zip(&read).map(|(x, y)| f64::from(x - y)).collect();
        e.dot(&queries.dot(&e))
    };
    let errors: Vec<f64> = (0..rows.nrows()).into_par_iter().map(error).collect();
    (!errors.is_empty()).then(|| errors.iter().sum::<f64>() / errors.len() as f64)
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

/// Computes `A = U H P`, `[d,d]`, for the moment S of the queries.
fn orthogonal(queries: &Array2<f64>) -> Result<Array2<f64>> {
    let failed = || Error::invalid("the eigenvectors of the queries' moment did not converge").hint(OUTLIERS);
    let (_, directions) = linalg::principal(ridged(queries, QUERY_RIDGE).view())?.ok_or_else(failed)?;
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
        let mean = row_mean(keys.view());
        let centered = (&keys - &mean).mapv(f64::from);
        let c = centered.t().dot(&centered) / n as f64;
        let map: Vec<f32> = balanced(&s, &c).unwrap().iter().map(|x| *x as f32).collect();
        let own = fitted(&map, &mean.to_vec()).unwrap().unwrap();
        for bits in [4, 2] {
            let [found, hadamard] =
                [&own, &RowMap::Hadamard].map(|map| score_error(keys.view(), &s, map, bits).unwrap());
            assert!(found < 0.5 * hadamard, "{bits}: {found} {hadamard}");
        }
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

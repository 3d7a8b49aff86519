//! Whitened product quantisation: scores of words, and estimated probabilities.

use std::sync::Arc;

use half::f16;
use kvsmith::internal::kv::packed::Center;
use kvsmith::internal::method::wpq::{HeadCodebook, MeanPath, Wpq};
use ndarray::{Array1, Array2, Array4};

use super::head::{cases, wide};
use super::*;
use crate::common::random::noise;
use crate::common::{plain_rope, rotated_to};

/// A quantiser: one word per group and stage.
pub struct NaiveWpq {
    /// `[stages][m][words][dim]`.
    stages: Vec<Vec<Matrix>>,
    mean: Vec<f64>,
    /// The mean before rotation, if its path is subtracted.
    mean_pre: Option<Vec<f64>>,
    /// L, lower.
    chol: Matrix,
    /// V.
    rotation: Matrix,
    /// L^-T V, rounded to half precision.
    query_map: Matrix,
    /// The program's, for the codes of keys that lie between two words.
    head: Arc<HeadCodebook>,
    /// The positions that the last step scored with both stages; `None` where rounding may decide.
    refined: Option<BTreeSet<usize>>,
}

/// The scores of the words of one stage for a query, as far as they are known.
struct Table {
    /// `[m][words]`.
    entries: Matrix,
    /// How far each may be off.
    bounds: Matrix,
}

/// How much of a score of the path the program may leave out: a thousandth of a bit.
const LEFT_OUT: f64 = std::f64::consts::LN_2 / 1024.0;

/// An estimated score, and how far it may be off.
pub type Estimate = (f64, f64);

impl NaiveWpq {
    /// The channels of a group: principal directions j, j + m, j + 2 m and so on.
    fn group(&self, all: &[f64], j: usize) -> Vec<f64> {
        let (m, dim) = (self.stages[0].len(), self.stages[0][0][0].len());
        let at = |i: usize| all.get(j + i * m).copied().unwrap_or(0.0);
        (0..dim).map(at).collect()
    }

    /// The mean before rotation, rotated to a position, and how far each channel may be off in f32; zero if its path is not
    /// subtracted.
    fn path(&self, position: usize) -> (Vec<f64>, Vec<f64>) {
        let zero = vec![0.0; self.mean.len()];
        let mean = self.mean_pre.as_ref();
        mean.map_or((zero.clone(), zero), |mean| rotated_to(mean, position))
    }

    /// (k - R_i mean_pre - mean) L V of a key at position i, and how far it may be off in f32.
    fn projected(&self, k: &[f64], position: usize) -> (Vec<f64>, f64) {
        let d = k.len();
        let (mut out, mut size) = (vec![0.0; d], vec![0.0; d]);
        let (path, bounds) = self.path(position);
        let mut off_path = vec![0.0; d];
        for (c, ((k, mean), path)) in k.iter().zip(&self.mean).zip(path).enumerate() {
            let x = k - mean - path;
            for i in 0..d {
                let entry: f64 = (0..d).map(|e| self.chol[c][e] * self.rotation[e][i]).sum();
                out[i] += x * entry;
                size[i] += (k.abs() + mean.abs() + path.abs()) * entry.abs();
                off_path[i] += bounds[c] * entry.abs();
            }
        }
        let off = size.iter().zip(&off_path);
        let off: f64 = off
            .map(|(s, path)| ((d + 8) as f64 * UNIT * s + path).powi(2))
            .sum();
        (out, off.sqrt())
    }

    /// The number of each group's word, per stage; of those of the program where two words are equally near.
    fn code(&self, k: &[f64], position: usize) -> Result<Vec<Vec<usize>>, String> {
        let (z, off) = self.projected(k, position);
        let m = self.stages[0].len();
        let mut left: Matrix = (0..m).map(|j| self.group(&z, j)).collect();
        let row = Array2::from_shape_vec((1, k.len()), k.iter().map(|x| *x as f32).collect()).unwrap();
        let mut codes = Vec::new();
        for (words, bytes) in self.stages.iter().zip(self.head.encode(row.view(), position)) {
            let per_byte = m / bytes.len();
            let number = |j: usize| {
                usize::from(bytes[j / per_byte]) >> (j % per_byte * 8 / per_byte) & (words[j].len() - 1)
            };
            let mut code = Vec::new();
            for (j, (left, words)) in left.iter_mut().zip(words).enumerate() {
                let own = nearest(left, words, number(j), off)?;
                left.iter_mut().zip(&words[own]).for_each(|(x, y)| *x -= y);
                code.push(own);
            }
            codes.push(code);
        }
        Ok(codes)
    }

    /// q L^-T V.
    fn query(&self, q: &[f64]) -> Vec<f64> {
        let mut y = vec![0.0; q.len()];
        for (q, row) in q.iter().zip(&self.query_map) {
            y.iter_mut().zip(row).for_each(|(y, v)| *y += q * v);
        }
        y
    }

    /// Per position and stage.
    fn codes(&self, history: &History) -> Result<Vec<Vec<Vec<usize>>>, String> {
        let mut codes = Vec::new();
        for event in &history.events {
            match event {
                Event::Turn(turn) => {
                    for (i, k) in turn.keys.iter().enumerate().skip(turn.first) {
                        codes.push(self.code(k, i)?);
                    }
                }
                Event::Decode(step) => codes.push(self.code(&step.key, codes.len())?),
            }
        }
        Ok(codes)
    }

    /// The table of each stage for a query.
    fn tables(&self, q: &[f64]) -> Vec<Table> {
        let (y, root) = (self.query(q), (q.len() as f64).sqrt());
        let of = |words: &Vec<Matrix>| {
            let group = |(j, words): (usize, &Matrix)| {
                let y = self.group(&y, j);
                // The map of the query is a product of two matrices.
                let of = |w: &Vec<f64>| (dot(&y, w) / root, 4.0 * dot_bound(&y, w) / root);
                words.iter().map(of).unzip()
            };
            let (entries, bounds) = words.iter().enumerate().map(group).unzip();
            let table = Table { entries, bounds };
            if words[0].len() == 16 {
                table.rounded()
            } else {
                table
            }
        };
        self.stages.iter().map(of).collect()
    }

    /// The estimated score of the key at a position from its codes in some stages.
    fn estimate(&self, q: &[f64], tables: &[Table], codes: &[Vec<usize>], position: usize) -> Estimate {
        let (path, bounds) = self.path(position);
        let turned: f64 = q.iter().zip(&bounds).map(|(q, bound)| q.abs() * bound).sum();
        let turned = turned / (q.len() as f64).sqrt() + score_bound(q, &path) + LEFT_OUT;
        let mut sum = (
            score(q, &self.mean) + score(q, &path),
            score_bound(q, &self.mean) + turned,
        );
        for (table, codes) in tables.iter().zip(codes) {
            for (j, code) in codes.iter().enumerate() {
                sum.0 += table.entries[j][*code];
                sum.1 += table.bounds[j][*code];
            }
        }
        sum
    }
}

impl Table {
    /// The entries rounded to 256 values of the widest group; one between two of them may be either.
    fn rounded(self) -> Self {
        let least = |row: &Vec<f64>| row.iter().copied().fold(f64::INFINITY, f64::min);
        let range = |row: &Vec<f64>| row.iter().copied().fold(f64::NEG_INFINITY, f64::max) - least(row);
        let step = self.entries.iter().map(range).fold(0.0, f64::max) / 255.0;
        let (mut entries, mut bounds) = (self.entries.clone(), self.bounds);
        for (row, bounds) in entries.iter_mut().zip(&mut bounds) {
            let (from, most) = (least(row), bounds.iter().copied().fold(0.0, f64::max));
            for (x, bound) in row.iter_mut().zip(bounds) {
                let steps = (*x - from) / step;
                let margin = 0.5 - (steps - steps.round()).abs();
                // Step and least entry are rounded, too.
                let off = (*bound + most) / step + 1e-4;
                *x = from + step * steps.round();
                *bound = most + 256.0 * UNIT * step + if margin <= off { step } else { 0.0 };
            }
        }
        Self { entries, bounds }
    }
}

/// The nearest of some words, or the program's if it may be: the residual z is off by no more than `off`.
fn nearest(z: &[f64], words: &Matrix, own: usize, off: f64) -> Result<usize, String> {
    let distance = |c: &Vec<f64>| z.iter().zip(c).map(|(x, y)| (x - y).powi(2)).sum::<f64>();
    let distances: Vec<f64> = words.iter().map(distance).collect();
    let least = distances.iter().copied().fold(f64::INFINITY, f64::min);
    let first = distances.iter().position(|x| *x == least).unwrap();
    let size = dot(z, z) + words.iter().map(|c| dot(c, c)).fold(0.0, f64::max);
    let slack = 4.0 * off * (least.sqrt() + off) + 8.0 * (z.len() + 4) as f64 * UNIT * size;
    match own {
        own if own == first => Ok(own),
        own if words[own] == words[first] => Err(format!("word {own} instead of its equal {first}")),
        own if distances[own] <= least + slack => Ok(own),
        own => Err(format!("word {own} instead of {first}")),
    }
}

/// Probabilities summed over the query heads, of positions whose estimated scores are known per query head.
pub fn items(seen: &[usize], estimates: &[Vec<Estimate>], classes: &[usize]) -> Vec<Item> {
    let item = |&position: &usize| Item {
        position,
        score: 0.0,
        bound: 1e-36,
        class: classes[position],
    };
    let mut items: Vec<Item> = seen.iter().map(item).collect();
    for estimates in estimates {
        let scores: Vec<f64> = estimates.iter().map(|(score, _)| *score).collect();
        let sum = log_sum_exp(&scores);
        let largest = scores.iter().map(|s| s.abs()).fold(0.0, f64::max);
        let weights: Vec<f64> = scores.iter().map(|score| (score - sum).exp()).collect();
        let off = weights.iter().zip(estimates).map(|(w, (_, bound))| w * bound);
        let off = off.sum::<f64>() + 64.0 * UNIT * largest + 1e-6;
        for ((item, weight), (_, bound)) in items.iter_mut().zip(weights).zip(estimates) {
            item.score += weight;
            item.bound += weight * 4.0 * (bound + off);
        }
    }
    items
}

impl Model for NaiveWpq {
    type Program = Wpq;

    fn chose(&mut self, history: &History) -> Verdict {
        let step = history.step();
        let codes = self.codes(history)?;
        let seen: Vec<usize> = step.visible.clone().collect();
        let tables: Vec<Vec<Table>> = step.q_rope.iter().map(|q| self.tables(q)).collect();
        // The estimates from as many stages as each position has.
        let estimates = |stages: &dyn Fn(usize) -> usize| -> Vec<Vec<Estimate>> {
            let of = |(q, tables): (&Vec<f64>, &Vec<Table>)| {
                let of = |p: &usize| {
                    if step.candidates.contains(p) {
                        self.estimate(q, tables, &codes[*p][..stages(*p)], *p)
                    } else {
                        (score(q, &step.keys[*p]), score_bound(q, &step.keys[*p]))
                    }
                };
                seen.iter().map(of).collect()
            };
            step.q_rope.iter().zip(&tables).map(of).collect()
        };
        // Equal codes mean equal estimates, unless the mean has another score at every position.
        let distinct: Vec<usize> = (0..codes.len()).collect();
        let first = match self.mean_pre {
            None => classes(codes.iter().map(|codes| &codes[..1])),
            Some(_) => distinct.clone(),
        };
        let mut ranked = items(&seen, &estimates(&|_| 1), &first);
        ranked.retain(|item| step.candidates.contains(&item.position));
        ranked.sort_by(|a, b| b.score.total_cmp(&a.score).then(a.position.cmp(&b.position)));
        let (refined, left) = ranked.split_at(ranked.len().min(4 * step.budget));
        let is_close = |a: &Item, b: &Item| a.class != b.class && a.score - b.score <= a.bound + b.bound;
        let unsure = refined.iter().any(|a| left.iter().any(|b| is_close(a, b)));
        let refined: BTreeSet<usize> = refined.iter().map(|item| item.position).collect();
        let stages = |p: usize| if refined.contains(&p) { 2 } else { 1 };
        let both = if self.mean_pre.is_none() {
            classes(codes.iter())
        } else {
            distinct
        };
        let mut ranked = items(&seen, &estimates(&stages), &both);
        ranked.retain(|item| refined.contains(&item.position));
        self.refined = (!unsure).then_some(refined);
        match (check_best(&ranked, &step.chosen(), step.budget), unsure) {
            (Ok(()), _) => Ok(Agreement::Same),
            (Err(_), true) => Ok(Agreement::NearTie),
            (Err(e), false) => Err(e),
        }
    }

    fn read(&self, history: &History) -> Option<Vec<Array>> {
        let (d, stage) = (history.place.head_dim, &self.stages[0]);
        let (m, words, dim) = (stage.len(), stage[0].len(), stage[0][0].len());
        // Words and the query's map count in half precision, and are held in single precision as the means are.
        let rounded = self.stages.len() * m * words * dim + d * m * dim;
        let means = if self.mean_pre.is_some() { 2 * d } else { d };
        let tables = Array::held(2 * rounded + 4 * means, 4 * (rounded + means));
        let width = m * words.ilog2() as usize / 8;
        let all = Array::items(width, history.step().candidates.clone());
        let refined = self.refined.as_ref()?;
        Some(vec![tables, all, Array::items(width, refined.iter().copied())])
    }
}

/// Checks random histories with random quantisers.
pub fn check() {
    let make = |rng: &mut ChaCha8Rng, place: &Place, _: Center| {
        let of = &[(1, 256), (2, 256), (4, 256), (2, 16), (4, 16), (8, 16), (8, 16)];
        let (sizes, d) = (pick(rng, of), place.head_dim);
        let directions = pick(rng, &[d, d, d.div_ceil(2)]);
        let has_path = pick(rng, &[false, true]);
        let model = random_quantiser(d, directions, sizes, has_path, || noise(rng));
        (Wpq::new(model.head.clone()), model)
    };
    cases::<NaiveWpq>(100, make, |_| ());
}

/// A random quantiser of two stages of `[m, words]` with the program's form of it; some words of a group are equal.
fn random_quantiser(
    d: usize,
    directions: usize,
    (m, size): (usize, usize),
    has_path: bool,
    mut normal: impl FnMut() -> f32,
) -> NaiveWpq {
    let dim = directions.div_ceil(m);
    let mut words = Array4::zeros((2, m, size, dim));
    for (stage, mut words) in words.outer_iter_mut().enumerate() {
        words.mapv_inplace(|_: f32| 2.0 / (1 + 2 * stage) as f32 * normal());
        for mut group in words.outer_iter_mut() {
            let row = group.row(1).to_owned();
            group.row_mut(size - 1).assign(&row);
        }
    }
    let mean = Array1::from_shape_simple_fn(d, &mut normal);
    let spread = 0.3 / (d as f32).sqrt();
    let chol = Array2::from_shape_fn((d, d), |(i, j)| match i.cmp(&j) {
        std::cmp::Ordering::Less => 0.0,
        std::cmp::Ordering::Equal => 1.0 + 0.2 * normal().abs(),
        std::cmp::Ordering::Greater => spread * normal(),
    });
    // A reflection: orthogonal, and none of its entries is zero.
    let axis = Array1::from_shape_simple_fn(d, &mut normal);
    let square = axis.dot(&axis);
    let rotation = Array2::from_shape_fn((d, d), |(i, j)| {
        f32::from(u8::from(i == j)) - 2.0 * axis[i] * axis[j] / square
    });
    let mean_pre = has_path.then(|| Array1::from_shape_simple_fn(d, &mut normal));
    let mut head = HeadCodebook::new(words.view(), mean.view(), chol.view(), rotation.view()).unwrap();
    if let Some(mean) = &mean_pre {
        head = head.around(MeanPath::new(mean.clone(), &plain_rope(d)));
    }
    NaiveWpq {
        mean_pre: mean_pre.map(|mean| mean.iter().map(|v| f64::from(*v)).collect()),
        stages: words
            .outer_iter()
            .map(|words| words.outer_iter().map(wide).collect())
            .collect(),
        mean: mean.iter().map(|v| f64::from(*v)).collect(),
        chol: wide(chol.view()),
        rotation: wide(rotation.view()),
        refined: None,
        query_map: query_map(&wide(chol.view()), wide(rotation.view())),
        head: Arc::new(head),
    }
}

/// L^-T V, rounded to half precision.
fn query_map(chol: &Matrix, mut v: Matrix) -> Matrix {
    for i in (0..chol.len()).rev() {
        let (row, solved) = v[i..].split_first_mut().unwrap();
        for (factors, other) in chol[i + 1..].iter().zip(solved) {
            row.iter_mut().zip(other).for_each(|(x, y)| *x -= factors[i] * *y);
        }
        row.iter_mut().for_each(|x| *x /= chol[i][i]);
    }
    let rounded = |row: Vec<f64>| row.into_iter().map(|v| f16::from_f64(v).to_f64()).collect();
    v.into_iter().map(rounded).collect()
}

//! Whitened product quantisation: scores of words, and estimated probabilities.

use std::sync::Arc;

use kvsmith::kv::packed::Center;
use kvsmith::method::wpq::{HeadCodebook, Wpq};
use ndarray::{Array1, Array2, Array3};

use super::head::{cases, wide};
use super::*;
use crate::common::random::noise;

/// A quantiser, one word per group.
pub struct NaiveWpq {
    /// `[m][words][dim]`.
    words: Vec<Matrix>,
    mean: Vec<f64>,
    /// L, lower.
    chol: Matrix,
    /// V.
    rotation: Matrix,
    /// The program's, for the codes of keys that lie between two words.
    head: Arc<HeadCodebook>,
}

impl NaiveWpq {
    /// The channels of a group: principal directions j, j + m, j + 2 m and so on.
    fn group(&self, all: &[f64], j: usize) -> Vec<f64> {
        let (m, dim) = (self.words.len(), self.words[0][0].len());
        let at = |i: usize| all.get(j + i * m).copied().unwrap_or(0.0);
        (0..dim).map(at).collect()
    }

    /// (k - mean) L V, and how far it may be off in f32.
    fn projected(&self, k: &[f64]) -> (Vec<f64>, f64) {
        let d = k.len();
        let (mut out, mut size) = (vec![0.0; d], vec![0.0; d]);
        for (c, (k, mean)) in k.iter().zip(&self.mean).enumerate() {
            let x = k - mean;
            for i in 0..d {
                let entry: f64 = (0..d).map(|e| self.chol[c][e] * self.rotation[e][i]).sum();
                out[i] += x * entry;
                size[i] += (k.abs() + mean.abs()) * entry.abs();
            }
        }
        let off: f64 = size.iter().map(|s| ((d + 8) as f64 * UNIT * s).powi(2)).sum();
        (out, off.sqrt())
    }

    /// The number of each group's word, of those of the program where two words are equally near.
    fn code(&self, k: &[f64]) -> Result<Vec<usize>, String> {
        let (z, off) = self.projected(k);
        let row = Array2::from_shape_vec((1, k.len()), k.iter().map(|x| *x as f32).collect()).unwrap();
        let bytes = self.head.encode(row.view());
        let per_byte = self.words.len() / bytes.len();
        let number = |j: usize| {
            usize::from(bytes[j / per_byte]) >> (j % per_byte * 8 / per_byte) & (self.words[j].len() - 1)
        };
        let of = |j: usize| {
            let (z, words) = (self.group(&z, j), &self.words[j]);
            let distance = |c: &Vec<f64>| z.iter().zip(c).map(|(x, y)| (x - y).powi(2)).sum::<f64>();
            let distances: Vec<f64> = words.iter().map(distance).collect();
            let least = distances.iter().copied().fold(f64::INFINITY, f64::min);
            let first = distances.iter().position(|x| *x == least).unwrap();
            let size = dot(&z, &z) + words.iter().map(|c| dot(c, c)).fold(0.0, f64::max);
            let slack = 4.0 * off * (least.sqrt() + off) + 8.0 * (k.len() + 4) as f64 * UNIT * size;
            match number(j) {
                own if own == first => Ok(own),
                own if words[own] == words[first] => Err(format!("word {own} instead of its equal {first}")),
                own if distances[own] <= least + slack => Ok(own),
                own => Err(format!("word {own} instead of {first}")),
            }
        };
        (0..self.words.len()).map(of).collect()
    }

    /// V^T L^-1 q^T.
    fn query(&self, q: &[f64]) -> Vec<f64> {
        let d = q.len();
        let mut y = vec![0.0; d];
        for i in 0..d {
            let known: f64 = (0..i).map(|j| self.chol[i][j] * y[j]).sum();
            y[i] = (q[i] - known) / self.chol[i][i];
        }
        (0..d)
            .map(|i| (0..d).map(|c| self.rotation[c][i] * y[c]).sum())
            .collect()
    }

    fn codes(&self, history: &History) -> Result<Vec<Vec<usize>>, String> {
        let mut codes = Vec::new();
        for event in &history.events {
            match event {
                Event::Turn(turn) => {
                    for k in &turn.keys[turn.first..] {
                        codes.push(self.code(k)?);
                    }
                }
                Event::Decode(step) => codes.push(self.code(&step.key)?),
            }
        }
        Ok(codes)
    }
}

impl Model for NaiveWpq {
    type Program = Wpq;

    fn chose(&mut self, history: &History) -> Verdict {
        let step = history.step();
        let codes = self.codes(history)?;
        let classes = classes(codes.iter());
        let seen: Vec<usize> = step.visible.clone().collect();
        let item = |&position: &usize| Item {
            position,
            score: 0.0,
            bound: 1e-36,
            class: classes[position],
        };
        let mut items: Vec<Item> = seen.iter().map(item).collect();
        for q in &step.q_rope {
            let (y, root) = (self.query(q), (q.len() as f64).sqrt());
            let mut bound = score_bound(q, &self.mean);
            let mut scores = Vec::new();
            for &p in &seen {
                if !step.candidates.contains(&p) {
                    bound = bound.max(score_bound(q, &step.keys[p]));
                    scores.push(score(q, &step.keys[p]));
                    continue;
                }
                let groups = codes[p].iter().enumerate();
                let words = groups.map(|(j, code)| (self.group(&y, j), &self.words[j][*code]));
                let (sums, bounds): (Vec<f64>, Vec<f64>) =
                    words.map(|(y, w)| (dot(&y, w), dot_bound(&y, w))).unzip();
                // The map of the query is a product of two matrices.
                bound = bound.max(4.0 * bounds.iter().sum::<f64>() / root);
                scores.push(score(q, &self.mean) + sums.iter().sum::<f64>() / root);
            }
            let sum = log_sum_exp(&scores);
            let share =
                4.0 * (bound + 64.0 * UNIT * scores.iter().map(|s| s.abs()).fold(0.0, f64::max)) + 1e-6;
            for (item, score) in items.iter_mut().zip(scores) {
                let weight = (score - sum).exp();
                item.score += weight;
                item.bound += share * weight;
            }
        }
        items.retain(|item| step.candidates.contains(&item.position));
        check_best(&items, &step.chosen(), step.budget)?;
        Ok(Agreement::Same)
    }
}

/// Checks random histories with random quantisers.
pub fn check() {
    let make = |rng: &mut ChaCha8Rng, place: &Place, _: Center| {
        let (m, size) = pick(rng, &[(2, 256), (8, 256), (4, 16), (16, 16)]);
        let model = random_quantiser(place.head_dim, m, size, || noise(rng));
        (Wpq::new(model.head.clone()), model)
    };
    cases::<NaiveWpq>(100, make, |_| ());
}

/// A random quantiser with the program's form of it; some words of a group are equal.
fn random_quantiser(d: usize, m: usize, size: usize, mut normal: impl FnMut() -> f32) -> NaiveWpq {
    let dim = d.div_ceil(m);
    let mut words = Array3::from_shape_simple_fn((m, size, dim), || 2.0 * normal());
    for mut group in words.outer_iter_mut() {
        let row = group.row(1).to_owned();
        group.row_mut(size - 1).assign(&row);
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
    NaiveWpq {
        words: words.outer_iter().map(|group| wide(group.view())).collect(),
        mean: mean.iter().map(|v| f64::from(*v)).collect(),
        chol: wide(chol.view()),
        rotation: wide(rotation.view()),
        head: Arc::new(HeadCodebook::new(words, mean.view(), &chol, &rotation).unwrap()),
    }
}

//! A2ATS: scores of codewords.

use std::sync::Arc;

use kvsmith::kv::packed::Center;
use kvsmith::method::Ranking;
use kvsmith::method::a2ats::{A2ats, HeadCodebook};
use ndarray::{Array1, Array2};

use super::head::{cases, wide};
use super::*;
use crate::common::plain_rope;
use crate::common::random::noise;

/// Codewords, their metric and the position that queries are rotated to.
pub struct NaiveA2ats {
    codebook: Matrix,
    mean: Vec<f64>,
    /// L, lower.
    chol: Matrix,
    rotated_to: usize,
    /// The program's, for the codes of keys that lie between two codewords.
    head: Arc<HeadCodebook>,
}

impl NaiveA2ats {
    /// (k L - mean), and how far it may be off in f32.
    fn whitened(&self, k: &[f64]) -> (Vec<f64>, f64) {
        let d = k.len();
        let entry = |j: usize| (0..d).map(|i| k[i] * self.chol[i][j]).sum::<f64>() - self.mean[j];
        let size =
            |j: usize| (0..d).map(|i| (k[i] * self.chol[i][j]).abs()).sum::<f64>() + self.mean[j].abs();
        let off: f64 = (0..d)
            .map(|j| ((d + 4) as f64 * UNIT * size(j)).powi(2))
            .sum::<f64>();
        ((0..d).map(entry).collect(), off.sqrt())
    }

    fn code(&self, k: &[f64]) -> Result<usize, String> {
        let (z, off) = self.whitened(k);
        let distance = |c: &Vec<f64>| z.iter().zip(c).map(|(x, y)| (x - y).powi(2)).sum::<f64>();
        let distances: Vec<f64> = self.codebook.iter().map(distance).collect();
        let least = distances.iter().copied().fold(f64::INFINITY, f64::min);
        let first = distances.iter().position(|x| *x == least).unwrap();
        let size = dot(&z, &z) + self.codebook.iter().map(|c| dot(c, c)).fold(0.0, f64::max);
        let slack = 4.0 * off * (least.sqrt() + off) + 8.0 * (k.len() + 4) as f64 * UNIT * size;
        let close = distances
            .iter()
            .enumerate()
            .filter(|(m, x)| *m != first && self.codebook[*m] != self.codebook[first] && **x <= least + slack)
            .count();
        if close == 0 {
            return Ok(first);
        }
        let row = Array2::from_shape_vec((1, k.len()), k.iter().map(|x| *x as f32).collect()).unwrap();
        let code = usize::from(self.head.encode(row.view())[0]);
        if distances[code] > least + slack {
            return Err(format!("codeword {code} instead of {first}"));
        }
        Ok(code)
    }

    /// y with L y^T = (q R_b)^T, so that a codeword's score is y C^z.
    fn rotated_and_solved(&self, q: &[f64]) -> Vec<f64> {
        let d = q.len();
        let mut qt = q.to_vec();
        for i in 0..d / 2 {
            let angle = self.rotated_to as f64 * 1e4f64.powf(-2.0 * i as f64 / d as f64);
            let (x, y) = (q[i], q[i + d / 2]);
            qt[i] = x * angle.cos() - y * angle.sin();
            qt[i + d / 2] = y * angle.cos() + x * angle.sin();
        }
        let mut y = vec![0.0; d];
        for i in 0..d {
            let known: f64 = (0..i).map(|j| self.chol[i][j] * y[j]).sum();
            y[i] = (qt[i] - known) / self.chol[i][i];
        }
        y
    }

    fn codes(&self, history: &History) -> Result<Vec<usize>, String> {
        let mut codes = Vec::new();
        for event in &history.events {
            match event {
                Event::Turn(turn) => turn.k_pre.iter().try_for_each(|k| {
                    codes.push(self.code(k)?);
                    Ok::<(), String>(())
                })?,
                Event::Decode(step) => codes.push(self.code(&step.k_pre)?),
            }
        }
        Ok(codes)
    }
}

impl Model for NaiveA2ats {
    type Program = A2ats;

    fn chose(&mut self, history: &History) -> Verdict {
        let step = history.step();
        let codes = self.codes(history)?;
        let mut near_tie = false;
        let mut lists = Vec::new();
        for q in &step.q_pre {
            let y = self.rotated_and_solved(q);
            let scores: Vec<f64> = self.codebook.iter().map(|c| dot(&y, c)).collect();
            // The rotation and the solution lose a few units more.
            let bound = self.codebook.iter().map(|c| dot_bound(&y, c)).fold(0.0, f64::max) * 4.0;
            near_tie |= has_near_tie(&scores, bound);
            let of = |position: usize| Ranked {
                score: scores[codes[position]],
                tie: codes[position],
                position,
            };
            lists.push(step.candidates.clone().map(of).collect());
        }
        let expected = union_within(&lists, step.budget);
        match (step.chosen() == expected, near_tie) {
            (true, _) => Ok(Agreement::Same),
            (false, true) => Ok(Agreement::NearTie),
            (false, false) => Err(format!("{:?} instead of {expected:?}", step.chosen())),
        }
    }
}

/// Checks random histories with random codebooks.
pub fn check() {
    let make = |rng: &mut ChaCha8Rng, place: &Place, _: Center| {
        let m = rng.gen_range(1..40);
        let rotated_to = pick(rng, &[0, 100, 2048]);
        let model = random_codebook(place.head_dim, rotated_to, || noise(rng), m);
        let ranking = pick(rng, &[Ranking::Fast, Ranking::Plain]);
        (A2ats::new(model.head.clone(), None).ranking(ranking), model)
    };
    cases::<NaiveA2ats>(500, make, |_| ());
}

/// A random codebook with the program's form of it.
fn random_codebook(d: usize, rotated_to: usize, mut normal: impl FnMut() -> f32, m: usize) -> NaiveA2ats {
    let mut codebook = Array2::from_shape_simple_fn((m, d), || 2.0 * normal());
    if m > 2 {
        let row = codebook.row(0).to_owned();
        codebook.row_mut(m - 1).assign(&row);
    }
    let mean = Array1::from_shape_simple_fn(d, &mut normal);
    let spread = 0.3 / (d as f32).sqrt();
    let chol = Array2::from_shape_fn((d, d), |(i, j)| match i.cmp(&j) {
        std::cmp::Ordering::Less => 0.0,
        std::cmp::Ordering::Equal => 1.0 + 0.2 * normal().abs(),
        std::cmp::Ordering::Greater => spread * normal(),
    });
    let rope = plain_rope(d);
    NaiveA2ats {
        codebook: wide(codebook.view()),
        mean: mean.iter().map(|v| f64::from(*v)).collect(),
        chol: wide(chol.view()),
        rotated_to,
        head: Arc::new(HeadCodebook::new(codebook, mean, chol, &rope, rotated_to).unwrap()),
    }
}

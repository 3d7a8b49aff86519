//! A2ATS: scores of codewords, at one position or by buckets of distances.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use kvsmith::internal::kv::packed::Center;
use kvsmith::internal::method::Ranking;
use kvsmith::internal::method::a2ats::{A2ats, BUCKETS, Edges, HeadCodebook};
use ndarray::{Array1, Array2};

use super::head::{cases, wide};
use super::*;
use crate::common::plain_rope;
use crate::common::random::noise;

/// The distances to which queries are rotated.
enum Distances {
    /// One for every key.
    At(usize),
    /// Those of the bucket that a key is in.
    Buckets(Edges),
}

impl Distances {
    /// The bucket of a distance, and the distances over which its query is the mean.
    fn bucket(&self, distance: usize) -> (usize, Range<usize>) {
        match self {
            Self::At(b) => (0, *b..*b + 1),
            Self::Buckets(Edges(edges)) => {
                let edge = |i: usize| edges[i] as usize;
                let found = (0..BUCKETS).find(|i| distance < edge(i + 1));
                let bucket = found.unwrap_or(BUCKETS - 1);
                (bucket, edge(bucket)..edge(bucket + 1))
            }
        }
    }
}

/// Codewords, their metric and the distances that queries are rotated to.
pub struct NaiveA2ats {
    codebook: Matrix,
    mean: Vec<f64>,
    /// L, lower.
    chol: Matrix,
    distances: Distances,
    /// The program's, for the codes of keys that lie between two codewords.
    head: Arc<HeadCodebook>,
    ranking: Ranking,
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

    /// y with L y^T = qt^T, so that a codeword's score is y (C^z + mean); qt is the mean of q R_b over the distances b.
    fn rotated_and_solved(&self, q: &[f64], distances: Range<usize>) -> Vec<f64> {
        let d = q.len();
        let mut qt = vec![0.0; d];
        let share = 1.0 / distances.len() as f64;
        for b in distances {
            for i in 0..d / 2 {
                let angle = b as f64 * 1e4f64.powf(-2.0 * i as f64 / d as f64);
                let (x, y) = (q[i], q[i + d / 2]);
                qt[i] += share * (x * angle.cos() - y * angle.sin());
                qt[i + d / 2] += share * (y * angle.cos() + x * angle.sin());
            }
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
            let mut bound = 0.0f64;
            // The mean adds this to the scores of the farthest candidates, and the program takes it off all scores.
            let farthest = self.distances.bucket(step.t - step.candidates.start).1;
            let constant = dot(&self.rotated_and_solved(q, farthest), &self.mean);
            // By bucket: the scores of all codewords.
            let mut scores: BTreeMap<usize, Vec<f64>> = BTreeMap::new();
            for position in step.candidates.clone() {
                let (bucket, distances) = self.distances.bucket(step.t - position);
                scores.entry(bucket).or_insert_with(|| {
                    let y = self.rotated_and_solved(q, distances);
                    let mean = dot(&y, &self.mean) - constant;
                    // The rotation and the solution lose a few units more.
                    let bounds = self.codebook.iter().map(|c| dot_bound(&y, c));
                    bound = bounds.fold(bound, f64::max).max(2.0 * mean.abs() * UNIT);
                    self.codebook.iter().map(|c| dot(&y, c) + mean).collect()
                });
            }
            let all: Vec<f64> = scores.values().flatten().copied().collect();
            near_tie |= has_near_tie(&all, bound * 4.0);
            let of = |position: usize| {
                let (bucket, code) = (self.distances.bucket(step.t - position).0, codes[position]);
                Ranked {
                    score: scores[&bucket][code],
                    tie: (BUCKETS - bucket) * self.codebook.len() + code,
                    position,
                }
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

    fn read(&self, history: &History) -> Option<Vec<Array>> {
        let (step, d, m) = (history.step(), history.place.head_dim, self.codebook.len());
        let mut arrays = vec![Array::held(2 * m * d, 4 * m.next_multiple_of(32) * d + 8 * d * d)];
        let mut buckets: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for position in step.candidates.clone() {
            let (bucket, _) = self.distances.bucket(step.t - position);
            buckets.entry(bucket).or_default().push(position);
        }
        let chosen = step.chosen();
        let is_listed = |positions: &Vec<usize>| {
            let chosen = positions.iter().filter(|p| chosen.contains(p)).count();
            self.ranking == Ranking::Fast && positions.len() >= 4 * m && 3 * chosen <= positions.len()
        };
        // Where the chunks of lists are is for the program to say.
        if buckets.values().any(is_listed) {
            return None;
        }
        if self.ranking == Ranking::Fast {
            arrays.extend(buckets.values().map(|_| Array::held(0, 4 * m)));
        }
        arrays.push(Array::items(2, step.candidates.clone()));
        Some(arrays)
    }
}

/// Checks random histories with random codebooks.
pub fn check() {
    let make = |rng: &mut ChaCha8Rng, place: &Place, _: Center| {
        let m = rng.gen_range(1..40);
        let distances = if rng.gen_bool(0.4) {
            Distances::Buckets(random_edges(rng))
        } else {
            Distances::At(pick(rng, &[0, 100, 2048]))
        };
        let mut model = random_codebook(place.head_dim, distances, || noise(rng), m);
        let ranking = pick(rng, &[Ranking::Fast, Ranking::Plain]);
        model.ranking = ranking;
        (A2ats::new(model.head.clone(), None).ranking(ranking), model)
    };
    cases::<NaiveA2ats>(500, make, |_| ());
}

/// Edges of which some are among the distances of a case.
fn random_edges(rng: &mut ChaCha8Rng) -> Edges {
    let widest = pick(rng, &[1, 5, 30]);
    let mut edges = [0; BUCKETS + 1];
    for i in 0..BUCKETS {
        edges[i + 1] = edges[i] + rng.gen_range(1..=widest);
    }
    Edges(edges)
}

/// A random codebook with the program's form of it.
fn random_codebook(d: usize, distances: Distances, mut normal: impl FnMut() -> f32, m: usize) -> NaiveA2ats {
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
    let naive = (wide(codebook.view()), wide(chol.view()));
    let means = mean.iter().map(|v| f64::from(*v)).collect();
    let head = match &distances {
        Distances::At(b) => HeadCodebook::new(codebook, mean, chol, &rope, *b),
        Distances::Buckets(edges) => HeadCodebook::with_buckets(codebook, mean, chol, &rope, *edges),
    };
    NaiveA2ats {
        codebook: naive.0,
        mean: means,
        chol: naive.1,
        distances,
        head: Arc::new(head.unwrap()),
        ranking: Ranking::Fast,
    }
}

//! The most recent positions, Quest, SnapKV and A2ATS.

use std::collections::BTreeSet;
use std::sync::Arc;

use kvsmith::method::a2ats::{A2ats, HeadCodebook};
use kvsmith::method::quest::Quest;
use kvsmith::method::snapkv::SnapKv;
use kvsmith::method::streaming::Streaming;
use ndarray::{Array1, Array2};

use super::*;

pub struct NaiveStreaming;

impl Model for NaiveStreaming {
    type Program = Streaming;

    fn chose(&mut self, history: &History) -> Verdict {
        let step = history.step();
        let recent: BTreeSet<usize> = step.candidates.clone().rev().take(step.budget).collect();
        if step.chosen() == recent {
            Ok(Agreement::Same)
        } else {
            Err(format!("{:?} instead of {recent:?}", step.chosen()))
        }
    }
}

pub struct NaiveQuest;

const PAGE: usize = 16;

impl Model for NaiveQuest {
    type Program = Quest;

    fn chose(&mut self, history: &History) -> Verdict {
        let step = history.step();
        let mut pages: Vec<usize> = step.candidates.clone().map(|p| p / PAGE).collect();
        pages.dedup();
        let rows = |page: usize| &step.keys[page * PAGE..step.keys.len().min((page + 1) * PAGE)];
        let bound_of = |page: usize, q: &[f64]| -> f64 {
            let channel = |i: usize| {
                let products = rows(page).iter().map(|k| q[i] * k[i]);
                products.fold(f64::NEG_INFINITY, f64::max)
            };
            (0..q.len()).map(channel).sum()
        };
        // Pages of equal bounds in every channel are equal for the program.
        let extremes = |page: &usize| -> Vec<[u64; 2]> {
            let of = |i: usize, f: fn(f64, f64) -> f64| rows(*page).iter().map(|k| k[i]).reduce(f).unwrap();
            (0..step.key.len())
                .map(|i| [of(i, f64::min).to_bits(), of(i, f64::max).to_bits()])
                .collect()
        };
        let classes = classes(pages.iter().map(extremes));
        let items: Vec<Item> = (pages.iter().zip(classes))
            .map(|(&page, class)| Item {
                position: page,
                score: step.q_rope.iter().map(|q| bound_of(page, q)).sum(),
                bound: step
                    .q_rope
                    .iter()
                    .map(|q| rows(page).iter().map(|k| dot_bound(q, k)).sum::<f64>())
                    .sum(),
                class,
            })
            .collect();
        let chosen = step.chosen();
        let taken: BTreeSet<usize> = chosen.iter().map(|p| p / PAGE).collect();
        let whole: BTreeSet<usize> = (step.candidates.clone())
            .filter(|p| taken.contains(&(p / PAGE)))
            .collect();
        if whole != chosen {
            return Err(format!("{chosen:?} are not whole pages"));
        }
        check_best(&items, &taken, step.budget / PAGE)?;
        Ok(Agreement::Same)
    }
}

pub struct NaiveSnapKv;

impl NaiveSnapKv {
    /// Attention that each position of the last prompt got from its last queries.
    fn votes(history: &History) -> Vec<f64> {
        let turn = history.turn();
        let mut votes = vec![0.0; turn.end()];
        for position in turn.last(32) {
            let seen: Vec<usize> = visible(position, history.place.model_window).collect();
            for a in 0..history.place.group {
                let weights = weights(turn.query(a, position), &turn.keys, &seen);
                seen.iter().zip(weights).for_each(|(p, w)| votes[*p] += w);
            }
        }
        votes
    }
}

impl Model for NaiveSnapKv {
    type Program = SnapKv;

    fn chose(&mut self, history: &History) -> Verdict {
        let step = history.step();
        let chosen = step.chosen();
        let steps = history.steps_since();
        let first = steps.iter().find(|s| !s.is_exact()).unwrap();
        if first.step != step.step {
            let kept: BTreeSet<usize> = (first.chosen().into_iter())
                .filter(|p| step.candidates.contains(p))
                .collect();
            return if chosen == kept {
                Ok(Agreement::Same)
            } else {
                Err(format!("{chosen:?} instead of {kept:?} as at first"))
            };
        }
        let votes = Self::votes(history);
        // What was generated since has none.
        let around = |p: usize| -> Vec<f64> {
            let at = |i: usize| (i >= 3 && p < votes.len()).then(|| votes.get(i - 3).copied());
            (p..p + 7).map(|i| at(i).flatten().unwrap_or(0.0)).collect()
        };
        let positions: Vec<usize> = step.candidates.clone().collect();
        let bits = |p: &usize| around(*p).iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        let classes = classes(positions.iter().map(bits));
        let items: Vec<Item> = (positions.iter().zip(classes))
            .map(|(&position, class)| {
                let score = around(position).iter().sum::<f64>() / 7.0;
                Item {
                    position,
                    score,
                    // The scores behind a weight are good to 1e-5 or so.
                    bound: 1e-4 * score + 1e-30,
                    class,
                }
            })
            .collect();
        check_best(&items, &chosen, step.budget)?;
        Ok(Agreement::Same)
    }
}

/// Codewords, their metric and the position that queries are rotated to.
pub struct NaiveA2ats {
    pub codebook: Matrix,
    pub mean: Vec<f64>,
    /// L, lower.
    pub chol: Matrix,
    pub rotated_to: usize,
    /// The program's, for the codes of keys that lie between two codewords.
    pub head: Arc<HeadCodebook>,
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

/// A random codebook with the program's form of it.
pub fn random_codebook(d: usize, rotated_to: usize, mut normal: impl FnMut() -> f32, m: usize) -> NaiveA2ats {
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
    let config = kvsmith::model::rope::RopeConfig {
        theta: 1e4,
        scaling: kvsmith::model::rope::RopeScaling::Default,
    };
    let rope = kvsmith::model::rope::Rope::new(&config, d);
    let wide = |x: &Array2<f32>| -> Matrix {
        x.rows()
            .into_iter()
            .map(|r| r.iter().map(|v| f64::from(*v)).collect())
            .collect()
    };
    NaiveA2ats {
        codebook: wide(&codebook),
        mean: mean.iter().map(|v| f64::from(*v)).collect(),
        chol: wide(&chol),
        rotated_to,
        head: Arc::new(HeadCodebook::new(codebook, mean, chol, &rope, rotated_to).unwrap()),
    }
}

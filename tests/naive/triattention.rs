//! TriAttention as a ranking: the series of the mean query, offset by offset.

use std::collections::BTreeMap;
use std::sync::Arc;

use kvsmith::internal::method::triattention::{MeanQueries, TriAttention};

use super::head::cases;
use super::*;
use crate::common::plain_rope;
use crate::common::random::noise;

/// Checks random histories with random mean queries.
pub fn check() {
    let make = |rng: &mut ChaCha8Rng, place: &Place, _| make(rng, place);
    cases::<NaiveTriAttention>(200, make, |_| ());
}

/// Makes a head with random mean queries, and its model.
pub fn make(rng: &mut ChaCha8Rng, place: &Place) -> (TriAttention, NaiveTriAttention) {
    let (r, half) = (place.group, place.head_dim / 2);
    // Without a mean and without a spread, all keys are equal.
    let scale = pick(rng, &[0.0, 1.0, 1.0, 1.0, 1.0]);
    let spread = pick(rng, &[0.0, 0.3, 2.0]) * scale;
    let mean: Vec<f32> = (0..2 * r * half).map(|_| scale * noise(rng)).collect();
    let pairs = mean.as_chunks::<2>().0.iter();
    let abs: Vec<f32> = pairs
        .map(|[x, y]| x.hypot(*y) + spread * noise(rng).abs())
        .collect();
    let rope = plain_rope(place.head_dim);
    let program = TriAttention::new(place, Arc::new(MeanQueries::new(&mean, &abs, &rope)));
    let wide = |x: &[f32]| x.iter().map(|x| f64::from(*x)).collect::<Vec<f64>>();
    let model = NaiveTriAttention {
        means: wide(&mean).chunks_exact(2 * half).map(<[f64]>::to_vec).collect(),
        abs: wide(&abs).chunks_exact(half).map(<[f64]>::to_vec).collect(),
        frequencies: wide(rope.frequencies()),
        rounds: 0,
        order: Vec::new(),
    };
    (program, model)
}

pub struct NaiveTriAttention {
    /// E q of each query head, `[d/2,2]`.
    means: Matrix,
    /// E |q| of each query head, `[d/2]`.
    abs: Matrix,
    frequencies: Vec<f64>,
    /// Steps in which scores were computed again.
    pub rounds: usize,
    /// The positions that were scored last, by falling score.
    order: Vec<usize>,
}

impl NaiveTriAttention {
    /// The paper's score of a rotated key at `position` for queries after `t`, of query head `a`.
    fn score(&self, a: usize, key: &[f64], position: usize, t: usize) -> f64 {
        let half = self.frequencies.len();
        let of_pair = |(f, w): (usize, &f64)| {
            let (x, y) = (key[f], key[f + half]);
            // Before rotation, the key has its own angle less that of its position.
            let (angle, length) = (y.atan2(x) - position as f64 * w, x.hypot(y));
            let (re, im) = (self.means[a][2 * f], self.means[a][2 * f + 1]);
            let (mean, phi) = (re.hypot(im), im.atan2(re) - angle);
            let offsets = (0..17).map(|i| f64::from(1u32 << i));
            let waves = offsets.map(|offset| (w * ((t - position) as f64 + offset) + phi).cos());
            mean * length * waves.sum::<f64>() / 17.0 + (self.abs[a][f] - mean) * length
        };
        self.frequencies.iter().enumerate().map(of_pair).sum()
    }

    /// How many positions were cached when scores were computed last, and the keys as they were known then.
    fn last_scored<'h>(&self, history: &'h History) -> (usize, &'h Matrix) {
        let mut last = None;
        for event in &history.events {
            match event {
                Event::Turn(turn) => last = Some((turn.end(), &turn.keys)),
                Event::Decode(step) if step.t + 1 - last.map_or(0, |(n, _)| n) >= 128 => {
                    last = Some((step.t + 1, &step.keys));
                }
                Event::Decode(_) => (),
            }
        }
        last.unwrap()
    }
}

impl Model for NaiveTriAttention {
    type Program = TriAttention;

    fn chose(&mut self, history: &History) -> Verdict {
        let step = history.step();
        let (n, keys) = self.last_scored(history);
        self.rounds += usize::from(n == step.t + 1);
        let place = &history.place;
        let scored: Vec<usize> = visible(n - 1, place.limits.model_window)
            .filter(|p| *p >= place.limits.sinks)
            .collect();
        let mut items: Vec<Item> = scored
            .iter()
            .map(|&position| Item {
                position,
                score: f64::NEG_INFINITY,
                bound: 0.0,
                class: position,
            })
            .collect();
        for a in 0..place.group {
            let scores: Vec<f64> = scored
                .iter()
                .map(|p| self.score(a, &keys[*p], *p, n - 1))
                .collect();
            let count = scores.len() as f64;
            let mean = scores.iter().sum::<f64>() / count;
            let deviation = (scores.iter().map(|s| (s - mean).powi(2)).sum::<f64>() / count).sqrt();
            let size = scores.iter().fold(0.0f64, |m, s| m.max(s.abs()));
            let is_flat = self.means[a].iter().chain(&self.abs[a]).all(|x| *x == 0.0);
            for (item, score) in items.iter_mut().zip(scores) {
                let is_flat = is_flat || scored.len() == 1;
                let normal = if is_flat { 0.0 } else { (score - mean) / deviation };
                item.score = item.score.max(normal);
                // Angles of up to 65,536 + 800 radians in f64.
                item.bound = item.bound.max(if is_flat {
                    0.0
                } else {
                    1e-9 * (1.0 + size / deviation)
                });
                if is_flat {
                    item.class = usize::MAX;
                }
            }
        }
        // Equal keys have equal scores, of which the program finds the same bits.
        let mut known = BTreeMap::new();
        let mut order = Vec::new();
        for item in &items {
            let bits: Vec<u64> = keys[item.position].iter().map(|x| x.to_bits()).collect();
            order.push((*known.entry(bits).or_insert(item.score), item.position));
        }
        order.sort_by(|a: &(f64, usize), b| b.0.total_cmp(&a.0));
        self.order = order.into_iter().map(|(_, position)| position).collect();
        items.retain(|item| step.candidates.contains(&item.position));
        // What was added since comes first, the last positions first.
        let new: Vec<usize> = step.candidates.clone().filter(|p| *p >= n).collect();
        let new: BTreeSet<usize> = new.into_iter().rev().take(step.budget).collect();
        let chosen = step.chosen();
        if !new.is_subset(&chosen) {
            return Err(format!("{new:?} are new, {chosen:?} chosen"));
        }
        let rest = chosen.difference(&new).copied().collect();
        check_best(&items, &rest, step.budget - new.len())?;
        Ok(Agreement::Same)
    }

    fn read(&self, history: &History) -> Option<Vec<Array>> {
        let (step, (n, _)) = (history.step(), self.last_scored(history));
        let new = step.candidates.clone().filter(|p| *p >= n).count();
        let mut missing = step.budget - new.min(step.budget);
        let numbers = self.order.iter().take_while(|position| {
            let reads_on = missing > 0;
            missing -= usize::from(reads_on && step.candidates.contains(position));
            reads_on
        });
        let mut arrays = vec![Array::items(4, 0..numbers.count())];
        if n == step.t + 1 {
            // E q and E |q| of the pairs of every query head, in f64 where f32 counts.
            let numbers = 3 * self.abs.len() * self.frequencies.len();
            arrays.push(Array::held(4 * numbers, 8 * numbers));
        }
        Some(arrays)
    }
}

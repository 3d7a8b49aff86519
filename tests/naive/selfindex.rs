//! Self-Indexing KVCache: centroids of sign patterns.

use kvsmith::internal::kv::KvType;
use kvsmith::internal::kv::packed::Center;
use kvsmith::internal::method::Ranking;
use kvsmith::internal::method::selfindex::{CentroidSource, SelfIndex};

use super::head::cases;
use super::*;
use crate::common::random::noise;

/// Checks random histories with centroids of every source.
pub fn check() {
    let make = |rng: &mut ChaCha8Rng, place: &Place, center: Center| {
        let source = pick(
            rng,
            &[
                CentroidSource::OnePass,
                CentroidSource::Offline,
                CentroidSource::Signs,
            ],
        );
        let calibrated = (source == CentroidSource::Offline)
            .then(|| (0..place.head_dim * 16).map(|_| noise(rng)).collect::<Vec<f32>>());
        let ranking = pick(rng, &[Ranking::Fast, Ranking::Plain]);
        let program = SelfIndex::new(place, center, source, calibrated.clone()).ranking(ranking);
        (program, NaiveSelfIndex::new(center, source, calibrated))
    };
    let mut shared = 0;
    cases(650, make, |model: &NaiveSelfIndex| shared += model.shared);
    println!("{shared} steps that take full-precision tokens first");
    assert!(shared > 20, "{shared}");
}

/// Positions in full precision.
const FULL: usize = 64;

struct NaiveSelfIndex {
    center: Center,
    source: CentroidSource,
    /// `[d/4,16,4]`.
    calibrated: Option<Vec<f32>>,
    /// Positions in full precision after the last prompt.
    full: BTreeSet<usize>,
    /// Whether the 64th and the 65th position were ever too close to tell.
    close: bool,
    /// Steps in which some of them are chosen first.
    shared: usize,
}

/// The center of one channel.
pub fn center_of(center: Center, values: &[f64]) -> f64 {
    match center {
        Center::Mean => values.iter().sum::<f64>() / values.len() as f64,
        Center::Median => {
            let mut sorted = values.to_vec();
            sorted.sort_by(f64::total_cmp);
            sorted[(sorted.len() - 1) / 2]
        }
    }
}

/// Center of every channel, in f32.
pub fn centers(history: &History, center: Center) -> Vec<f32> {
    let keys = &history.base().keys;
    (0..history.place.head_dim)
        .map(|i| center_of(center, &keys.iter().map(|k| k[i]).collect::<Vec<_>>()) as f32)
        .collect()
}

/// k - center, in f32 as the sign rule says.
pub fn centered(key: &[f64], centers: &[f32]) -> Vec<f64> {
    key.iter()
        .zip(centers)
        .map(|(k, c)| f64::from(*k as f32 - c))
        .collect()
}

fn pattern(x: &[f64]) -> usize {
    (0..4).map(|e| usize::from(x[e] > 0.0) << e).sum()
}

/// The full-precision positions after a prompt, from those before; and whether the last of them is
/// closer to the next than rounding.
pub fn full_after(history: &History, turn: &Turn, before: &BTreeSet<usize>) -> (BTreeSet<usize>, bool) {
    let seen = visible(turn.end() - 1, history.place.limits.model_window);
    let q = turn.mean_query();
    let eligible = (before.iter().copied())
        .chain(turn.first..turn.end())
        .filter(|p| seen.contains(p));
    let mut scored: Vec<(f64, usize)> = eligible.map(|p| (dot(&q, &turn.keys[p]), p)).collect();
    scored.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    let close = scored.len() > FULL && {
        let gap = scored[FULL - 1].0 - scored[FULL].0;
        let bound = 3.0 * dot_bound(&q, &turn.keys[scored[FULL].1]);
        gap > 0.0 && gap < 2.0 * bound
    };
    (scored.into_iter().take(FULL).map(|(_, p)| p).collect(), close)
}

/// The same for the cache at hand: one that rounds nothing keeps none of them.
fn kept_after(history: &History, turn: &Turn, before: &BTreeSet<usize>) -> (BTreeSet<usize>, bool) {
    if history.place.kv == KvType::TWO_BIT {
        full_after(history, turn, before)
    } else {
        (BTreeSet::new(), false)
    }
}

impl NaiveSelfIndex {
    fn new(center: Center, source: CentroidSource, calibrated: Option<Vec<f32>>) -> Self {
        Self {
            center,
            source,
            calibrated,
            full: BTreeSet::new(),
            close: false,
            shared: 0,
        }
    }

    /// The centered rows whose patterns are averaged: all at the last fit and those of prompts since, but
    /// for the full ones.
    fn summed(&self, history: &History, centers: &[f32]) -> Matrix {
        let mut rows = Vec::new();
        let mut full = BTreeSet::new();
        for turn in history.turns() {
            full = kept_after(history, turn, &full).0;
            let fit = turn.first < 128;
            let first = if fit { 0 } else { turn.first };
            let others: Vec<usize> = (first..turn.end()).filter(|p| !full.contains(p)).collect();
            let used = if fit && others.len() < FULL {
                (0..turn.end()).collect()
            } else {
                others
            };
            if fit {
                rows.clear();
            }
            rows.extend(used.iter().map(|p| centered(&turn.keys[*p], centers)));
        }
        rows
    }

    /// Centroid of a group's pattern: `[4]`.
    fn centroid(&self, rows: &Matrix, group: usize, code: usize) -> Vec<f64> {
        let part = |row: &'_ [f64]| row[4 * group..4 * group + 4].to_vec();
        let members: Matrix = (rows.iter())
            .map(|r| part(r))
            .filter(|x| pattern(x) == code)
            .collect();
        let sum = |e: usize| members.iter().map(|x| x[e]).sum::<f64>();
        let own = |e: usize| match members.len() {
            0 => {
                let mean = rows.iter().map(|r| r[4 * group + e].abs()).sum::<f64>() / rows.len() as f64;
                if code >> e & 1 == 1 { mean } else { -mean }
            }
            count => sum(e) / count as f64,
        };
        let offline = |e: usize| f64::from(self.calibrated.as_ref().unwrap()[(group * 16 + code) * 4 + e]);
        let of = |e| match self.source {
            CentroidSource::OnePass => own(e),
            CentroidSource::Offline => offline(e),
            CentroidSource::Signs if code >> e & 1 == 1 => 1.0,
            CentroidSource::Signs => -1.0,
        };
        (0..4).map(of).collect()
    }

    /// The key that each position's signs stand for.
    fn reconstructed(&self, history: &History) -> Matrix {
        let centers = centers(history, self.center);
        let rows = self.summed(history, &centers);
        let groups = history.place.head_dim / 4;
        let centroids: Vec<Matrix> = (0..groups)
            .map(|g| (0..16).map(|code| self.centroid(&rows, g, code)).collect())
            .collect();
        let of = |key: &[f64]| -> Vec<f64> {
            let x = centered(key, &centers);
            (0..groups)
                .flat_map(|g| centroids[g][pattern(&x[4 * g..4 * g + 4])].clone())
                .collect()
        };
        let base = history.base();
        let mut all: Matrix = base.keys.iter().map(|k| of(k)).collect();
        for event in &history.events {
            match event {
                Event::Turn(turn) if turn.first >= base.end() => {
                    all.extend(turn.keys[turn.first..].iter().map(|k| of(k)));
                }
                Event::Decode(step) if step.t >= base.end() => all.push(of(&step.key)),
                _ => (),
            }
        }
        all
    }
}

impl Model for NaiveSelfIndex {
    type Program = SelfIndex;

    fn prompted(&mut self, history: &History, _: &SelfIndex) -> Result<(), String> {
        let (full, close) = kept_after(history, history.turn(), &self.full);
        self.full = full;
        self.close |= close;
        Ok(())
    }

    fn chose(&mut self, history: &History) -> Verdict {
        let step = history.step();
        let q = step.mean_query();
        let keys = self.reconstructed(history);
        let bits = |k: &Vec<f64>| k.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        let classes = classes(keys.iter().map(bits));
        let item = |position: usize| Item {
            position,
            // The explicit product with the reconstructed key is what the table has to give.
            score: dot(&q, &keys[position]),
            bound: 3.0 * dot_bound(&q, &keys[position]),
            class: classes[position],
        };
        let all: Vec<Item> = step.candidates.clone().map(item).collect();
        let (full, _): (Vec<Item>, Vec<Item>) =
            all.iter().copied().partition(|i| self.full.contains(&i.position));
        // One position of 38 is for the best of the full ones, the rest for the best of all others.
        let share = (step.budget / 38).min(full.len());
        self.shared += usize::from(share > 0);
        let chosen = step.chosen();
        let mut ranked: Vec<Item> = full
            .iter()
            .copied()
            .filter(|i| chosen.contains(&i.position))
            .collect();
        ranked.sort_by(|a, b| b.score.total_cmp(&a.score).then(a.position.cmp(&b.position)));
        let first: BTreeSet<usize> = ranked.iter().take(share).map(|i| i.position).collect();
        let others: Vec<Item> = all
            .iter()
            .copied()
            .filter(|i| !first.contains(&i.position))
            .collect();
        let rest = chosen.difference(&first).copied().collect();
        let checked = check_best(&full, &first, share)
            .map_err(|e| format!("full: {e}"))
            .and(check_best(&others, &rest, step.budget - share).map_err(|e| format!("others: {e}")));
        match (checked, self.close) {
            (Ok(()), _) => Ok(Agreement::Same),
            (Err(_), true) => Ok(Agreement::NearTie),
            (Err(e), false) => Err(e),
        }
    }

    fn read(&self, history: &History) -> Option<Vec<Array>> {
        let d = history.place.head_dim;
        let signs = Array::items(d.div_ceil(8), history.step().visible.clone());
        Some(vec![signs, Array::whole(4 * 16 * d)])
    }
}

//! PQCache: words of the prompt's own keys, and estimated probabilities.

use kvsmith::internal::method::pqcache::{PqCache, PqCacheParams};

use super::head::{cases, wide};
use super::wpq::items;
use super::*;

/// Checks random histories with quantisers of every form.
pub fn check() {
    let make = |rng: &mut ChaCha8Rng, place: &Place, _| {
        let params = PqCacheParams {
            pq_groups: pick(rng, &[1, 2, 4]),
            pq_bits: pick(rng, &[4, 5, 6, 8]),
        };
        let model = NaivePqCache {
            params: params.clone(),
            words: Vec::new(),
            codes: Vec::new(),
        };
        (PqCache::new(place, &params, rng.r#gen()), model)
    };
    cases(300, make, |_| ());
}

struct NaivePqCache {
    params: PqCacheParams,
    /// The program's words after the prompt that they were fitted to: `[m][words][d/m]`.
    words: Vec<Matrix>,
    /// Per position, the numbers of the nearest words, and whether another word may be as near in f32.
    codes: Vec<(Vec<usize>, bool)>,
}

impl NaivePqCache {
    fn group<'a>(&self, x: &'a [f64], j: usize) -> &'a [f64] {
        let dim = x.len() / self.params.pq_groups;
        &x[j * dim..(j + 1) * dim]
    }

    /// The number of the nearest word of each group, and whether another word may be as near in f32.
    fn code(&self, key: &[f64]) -> (Vec<usize>, bool) {
        let mut unsure = false;
        let of = |(j, words): (usize, &Matrix)| {
            let x = self.group(key, j);
            let (own, close) = nearest(x, words);
            unsure |= close.iter().any(|other| words[*other] != words[own]);
            own
        };
        let code = self.words.iter().enumerate().map(of).collect();
        (code, unsure)
    }

    /// The keys as the index gets them: those of the prompt that the words were fitted to, then every later one.
    fn keys(history: &History) -> Matrix {
        let base = history.base();
        let mut keys = base.keys.clone();
        for event in &history.events {
            match event {
                Event::Turn(turn) if turn.first >= base.end() => {
                    keys.extend_from_slice(&turn.keys[turn.first..]);
                }
                Event::Decode(step) if step.t >= base.end() => keys.push(step.key.clone()),
                _ => (),
            }
        }
        keys
    }

    /// Fails unless the words are those of k-means over the keys: as many as asked for, each the mean of its keys up to
    /// rounding, hardly any without keys.
    fn check_words(&self, history: &History) -> Result<(), String> {
        let (keys, sinks) = (&history.base().keys, history.place.limits.sinks);
        let keys = if keys.len() > sinks {
            &keys[sinks..]
        } else {
            &keys[..]
        };
        let size = keys.len().min(1 << self.params.pq_bits);
        for (j, words) in self.words.iter().enumerate() {
            if words.len() != size {
                return Err(format!("{} words instead of {size}", words.len()));
            }
            let rows: Vec<&[f64]> = keys.iter().map(|key| self.group(key, j)).collect();
            let mut members = vec![Vec::new(); size];
            rows.iter().for_each(|x| members[nearest(x, words).0].push(*x));
            let off = |x: &[f64], word: &[f64]| x.iter().zip(word).map(|(x, y)| (x - y).powi(2)).sum::<f64>();
            let own = |words: &dyn Fn(usize) -> Vec<f64>| -> f64 {
                let of = |(i, members): (usize, &Vec<&[f64]>)| {
                    members.iter().map(|x| off(x, &words(i))).sum::<f64>()
                };
                let used = members
                    .iter()
                    .enumerate()
                    .filter(|(_, members)| !members.is_empty());
                used.map(of).sum()
            };
            let error = own(&|i| words[i].clone());
            let least = own(&|i| mean_row(&members[i]));
            let largest = words.iter().flatten().fold(0.0f64, |m, x| m.max(x.abs()));
            let rounding = (rows.len() * rows[0].len()) as f64 * (largest / 2048.0).powi(2);
            if error - least > 0.01 * error + rounding {
                return Err(format!(
                    "group {j}: the words leave {error}, the means of their keys {least}"
                ));
            }
            let distinct: BTreeSet<Vec<u64>> = rows
                .iter()
                .map(|x| x.iter().map(|v| v.to_bits()).collect())
                .collect();
            let used = members.iter().filter(|members| !members.is_empty()).count();
            // Words drawn from keys that are mostly copies of one another are copies, too.
            if distinct.len() == rows.len() && used + size / 10 < size.min(rows.len()) {
                return Err(format!("group {j}: {used} of {size} words have keys"));
            }
        }
        Ok(())
    }
}

/// The nearest word, the lowest number of equals, and all words that may be as near in f32.
fn nearest(x: &[f64], words: &Matrix) -> (usize, Vec<usize>) {
    let distance = |c: &Vec<f64>| x.iter().zip(c).map(|(x, y)| (x - y).powi(2)).sum::<f64>();
    let distances: Vec<f64> = words.iter().map(distance).collect();
    let least = distances.iter().copied().fold(f64::INFINITY, f64::min);
    let size = dot(x, x) + words.iter().map(|c| dot(c, c)).fold(0.0, f64::max);
    // Four times the bound of a product x c - c c / 2.
    let slack = 4.0 * (x.len() + 2) as f64 * UNIT * size;
    let own = distances.iter().position(|x| *x == least).unwrap();
    let close = (0..words.len()).filter(|i| distances[*i] <= least + slack);
    (own, close.collect())
}

impl Model for NaivePqCache {
    type Program = PqCache;

    fn prompted(&mut self, history: &History, program: &PqCache) -> Result<(), String> {
        if history.turn().first < 128 {
            self.words = program.words().map(wide).collect();
            self.codes.clear();
            self.check_words(history)?;
        }
        Ok(())
    }

    fn chose(&mut self, history: &History) -> Verdict {
        let step = history.step();
        for key in &Self::keys(history)[self.codes.len()..] {
            self.codes.push(self.code(key));
        }
        let of_candidates = &self.codes[step.candidates.clone()];
        let root = (history.place.head_dim as f64).sqrt();
        let estimate = |q: &[f64], code: &[usize]| {
            let parts = code.iter().enumerate().map(|(j, number)| {
                let (q, word) = (self.group(q, j), &self.words[j][*number]);
                (dot(q, word) / root, 4.0 * dot_bound(q, word) / root)
            });
            parts.fold((0.0, 0.0), |sum, part| (sum.0 + part.0, sum.1 + part.1))
        };
        let of = |q: &Vec<f64>| of_candidates.iter().map(|(code, _)| estimate(q, code)).collect();
        let estimates: Vec<Vec<(f64, f64)>> = step.q_rope.iter().map(of).collect();
        // Equal codes mean equal estimates.
        let classes = classes(self.codes.iter().map(|(code, _)| code));
        let candidates: Vec<usize> = step.candidates.clone().collect();
        let items = items(&candidates, &estimates, &classes);
        let unsure = of_candidates.iter().any(|(_, unsure)| *unsure);
        match (check_best(&items, &step.chosen(), step.budget), unsure) {
            (Ok(()), _) => Ok(Agreement::Same),
            (Err(_), true) => Ok(Agreement::NearTie),
            (Err(e), false) => Err(e),
        }
    }

    fn read(&self, history: &History) -> Option<Vec<Array>> {
        let (step, PqCacheParams { pq_groups, pq_bits }) = (history.step(), &self.params);
        let numbers: usize = self.words.iter().flatten().map(Vec::len).sum();
        // The codes follow each other without gaps.
        let bits = pq_groups * usize::from(*pq_bits);
        let codes = step.candidates.start * bits / 8..(step.candidates.end * bits).div_ceil(8);
        // Words count in half precision, and are held in single precision.
        Some(vec![
            Array::held(2 * numbers, 4 * numbers),
            Array::items(1, codes),
        ])
    }
}

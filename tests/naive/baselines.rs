//! Full attention, the oracle, random and the most recent positions, Quest, SnapKV and H2O.

use kvsmith::internal::kv::KvType;
use kvsmith::internal::method::full::Full;
use kvsmith::internal::method::h2o::H2o;
use kvsmith::internal::method::quest::Quest;
use kvsmith::internal::method::random::RandomDraws;
use kvsmith::internal::method::snapkv::SnapKv;
use kvsmith::internal::method::streaming::Streaming;
use kvsmith::internal::method::topk::TopK;

use super::head::cases;
use super::*;

pub fn check_full() {
    cases(200, |_, _, _| (Full, NaiveFull), |_| ());
}

pub fn check_topk() {
    cases(500, |_, _, _| (TopK, NaiveTopK), |_| ());
}

pub fn check_streaming() {
    cases(200, |_, _, _| (Streaming, NaiveStreaming), |_| ());
}

pub fn check_quest() {
    let (mut chosen, mut make) = ([0; 3], |rng: &mut ChaCha8Rng, _: &Place, _| {
        let page = pick(rng, &[16, 16, 32, 64]);
        (Quest::new(page), NaiveQuest { page, chosen: 0 })
    });
    cases(1000, &mut make, |model: &NaiveQuest| {
        chosen[model.page.ilog2() as usize - 4] += model.chosen;
    });
    assert!(chosen.iter().all(|pages| *pages > 0), "{chosen:?}");
}

pub fn check_snapkv() {
    cases(
        500,
        |_, place, _| (SnapKv::new(place.limits.model_window), NaiveSnapKv),
        |_| (),
    );
}

pub fn check_h2o() {
    cases(
        500,
        |_, place, _| (H2o::new(place.limits.model_window), NaiveH2o),
        |_| (),
    );
}

/// Checks random choices, and that all of them together prefer neither early nor late candidates.
pub fn check_random() {
    let (mut shares, mut alike) = (Vec::new(), Vec::new());
    let make = |_: &mut ChaCha8Rng, place: &Place, _| {
        let at = |seed, kv_head| RandomDraws::new(seed, place.layer, kv_head);
        let model = NaiveRandom {
            twin: at(7, place.kv_head),
            others: [at(8, place.kv_head), at(7, place.kv_head + 1)],
            shares: Vec::new(),
            alike: Vec::new(),
        };
        (at(7, place.kv_head), model)
    };
    cases(200, make, |model: &NaiveRandom| {
        shares.extend_from_slice(&model.shares);
        alike.extend_from_slice(&model.alike);
    });
    // Shares that are uniform have a variance of 1/12, and their mean five deviations at most.
    let mean = shares.iter().sum::<f64>() / shares.len() as f64;
    let bound = 5.0 / (12.0 * shares.len() as f64).sqrt();
    assert!((mean - 0.5).abs() < bound, "{mean}, {} positions", shares.len());
    let equal = alike.iter().filter(|alike| **alike).count();
    assert!(
        alike.len() > 100 && equal * 10 < alike.len(),
        "{equal} of {}",
        alike.len()
    );
}

/// Everything, whatever the budget.
struct NaiveFull;

impl Model for NaiveFull {
    type Program = Full;
    const BOUNDED: bool = false;

    fn chose(&mut self, history: &History) -> Verdict {
        let step = history.step();
        if step.chosen() == step.candidates.clone().collect() {
            Ok(Agreement::Same)
        } else {
            Err(format!("{:?} is not everything", step.chosen()))
        }
    }

    fn read(&self, _: &History) -> Option<Vec<Array>> {
        Some(Vec::new())
    }
}

/// The largest weights over everything visible, summed over the group.
struct NaiveTopK;

impl Model for NaiveTopK {
    type Program = TopK;

    fn chose(&mut self, history: &History) -> Verdict {
        let step = history.step();
        let seen: Vec<usize> = step.visible.clone().collect();
        let classes = step.key_classes();
        let item = |&position: &usize| Item {
            position,
            score: 0.0,
            bound: 1e-36,
            class: classes[position],
        };
        let mut items: Vec<Item> = seen.iter().map(item).collect();
        for q in &step.q_rope {
            let bounds = seen.iter().map(|p| score_bound(q, &step.keys[*p]));
            let share = 4.0 * bounds.fold(0.0, f64::max) + 1e-6;
            for (item, weight) in items.iter_mut().zip(weights(q, &step.keys, &seen)) {
                item.score += weight;
                item.bound += share * weight;
            }
        }
        items.retain(|item| step.candidates.contains(&item.position));
        check_best(&items, &step.chosen(), step.budget)?;
        if step.selection.products == step.q_rope.len() * seen.len() {
            Ok(Agreement::Same)
        } else {
            Err(format!("{} products", step.selection.products))
        }
    }

    fn read(&self, _: &History) -> Option<Vec<Array>> {
        Some(Vec::new())
    }
}

/// As many candidates as the budget has, which seed, head and step determine.
struct NaiveRandom {
    twin: RandomDraws,
    /// With another seed, and of another head.
    others: [RandomDraws; 2],
    /// Where between the first and the last candidate the chosen ones lie.
    shares: Vec<f64>,
    /// Whether another chose the same, where that is unlikely.
    alike: Vec<bool>,
}

impl Model for NaiveRandom {
    type Program = RandomDraws;

    fn chose(&mut self, history: &History) -> Verdict {
        let step = history.step();
        let (candidates, positions) = (step.candidates.clone(), &step.selection.positions);
        if positions.len() != step.budget {
            return Err(format!("{} chosen instead of {}", positions.len(), step.budget));
        }
        let draw = |of: &RandomDraws, index| of.draw(index, candidates.clone(), step.budget);
        if draw(&self.twin, step.step) != *positions {
            return Err("another choice of the same seed".to_string());
        }
        let n = candidates.len();
        let share = |p: &u32| (*p as usize - candidates.start) as f64 + 0.5;
        self.shares.extend(positions.iter().map(|p| share(p) / n as f64));
        // At least 66 sets.
        if n >= 12 && (2..=n - 2).contains(&step.budget) {
            let others = self.others.iter().map(|of| draw(of, step.step));
            let later = draw(&self.twin, step.step + 1);
            self.alike
                .extend(others.chain([later]).map(|other| other == *positions));
        }
        Ok(Agreement::Same)
    }

    fn read(&self, _: &History) -> Option<Vec<Array>> {
        Some(Vec::new())
    }
}

struct NaiveStreaming;

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

    fn read(&self, _: &History) -> Option<Vec<Array>> {
        Some(Vec::new())
    }
}

struct NaiveQuest {
    page: usize,
    /// Pages chosen so far.
    chosen: usize,
}

impl Model for NaiveQuest {
    type Program = Quest;

    fn chose(&mut self, history: &History) -> Verdict {
        let step = history.step();
        let size = self.page;
        let mut pages: Vec<usize> = step.candidates.clone().map(|p| p / size).collect();
        pages.dedup();
        let rows = |page: usize| &step.keys[page * size..step.keys.len().min((page + 1) * size)];
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
        let taken: BTreeSet<usize> = chosen.iter().map(|p| p / size).collect();
        let whole: BTreeSet<usize> = (step.candidates.clone())
            .filter(|p| taken.contains(&(p / size)))
            .collect();
        if whole != chosen {
            return Err(format!("{chosen:?} are not whole pages"));
        }
        check_best(&items, &taken, step.budget / size)?;
        self.chosen += taken.len();
        Ok(Agreement::Same)
    }

    fn read(&self, history: &History) -> Option<Vec<Array>> {
        let (step, place) = (history.step(), &history.place);
        let value = if [KvType::F16, KvType::BF16].contains(&place.kv) {
            2
        } else {
            4
        };
        let pages = step.candidates.clone().map(|p| p / self.page);
        Some(vec![Array::items(2 * value * place.head_dim, pages)])
    }
}

struct NaiveSnapKv;

impl NaiveSnapKv {
    /// Attention that each position of the last prompt got from its last queries.
    fn votes(history: &History) -> Vec<f64> {
        let turn = history.turn();
        let mut votes = vec![0.0; turn.end()];
        for position in turn.last(32) {
            let seen: Vec<usize> = visible(position, history.place.limits.model_window).collect();
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

    fn read(&self, history: &History) -> Option<Vec<Array>> {
        Some(vec![Array::whole(4 * history.step().chosen().len())])
    }
}

struct NaiveH2o;

impl NaiveH2o {
    /// The attention that each position received from all queries before the last step.
    fn received(history: &History) -> Vec<f64> {
        let mut received = vec![0.0; history.step().keys.len()];
        let mut add = |query: &[f64], keys: &Matrix, positions: &[usize]| {
            let weights = weights(query, keys, positions);
            positions.iter().zip(weights).for_each(|(p, w)| received[*p] += w);
        };
        for event in &history.events[..history.events.len() - 1] {
            match event {
                Event::Turn(turn) => {
                    for position in turn.first..turn.end() {
                        let seen: Vec<usize> = visible(position, history.place.limits.model_window).collect();
                        (0..history.place.group)
                            .for_each(|a| add(turn.query(a, position), &turn.keys, &seen));
                    }
                }
                Event::Decode(step) => {
                    let queries = step.q_rope.iter();
                    queries.for_each(|query| add(query, &step.keys, &step.attended));
                }
            }
        }
        received
    }
}

impl Model for NaiveH2o {
    type Program = H2o;

    fn chose(&mut self, history: &History) -> Verdict {
        let (step, received) = (history.step(), Self::received(history));
        let item = |position: usize| Item {
            position,
            score: received[position],
            // Weights in f32 are good to 1e-5 or so.
            bound: 1e-4 * received[position] + 1e-30,
            // Only positions that no query saw are equal for sure.
            class: if received[position] == 0.0 {
                usize::MAX
            } else {
                position
            },
        };
        let items: Vec<Item> = step.candidates.clone().map(item).collect();
        check_best(&items, &step.chosen(), step.budget)?;
        Ok(Agreement::Same)
    }

    fn read(&self, history: &History) -> Option<Vec<Array>> {
        Some(vec![Array::items(8, history.step().candidates.clone())])
    }
}

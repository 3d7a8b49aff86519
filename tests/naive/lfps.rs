//! LFPS.

use kvsmith::internal::kv::packed::Center;
use kvsmith::internal::method::lfps::{Lfps, LfpsMethod, LfpsParams};

use super::head::cases;
use super::*;

/// Checks random histories, in which heads are bypassed and others are not.
pub fn check() {
    let (mut bypassed, mut attending) = (0, 0);
    let make = |rng: &mut ChaCha8Rng, place: &Place, _: Center| {
        let params = LfpsParams {
            lfps_rows: pick(rng, &[1, 5, 32]),
            lfps_alpha: pick(rng, &[None, Some(0.0), Some(0.5)]),
            lfps_theta: pick(rng, &[0.85, 0.85, 0.6, 1.0]),
            ..LfpsParams::default()
        };
        let program = LfpsMethod::new(&params, None).unwrap().head(place);
        (program, NaiveLfps::new(params))
    };
    cases(500, make, |model: &NaiveLfps| {
        bypassed += model.bypassed;
        attending += model.attending;
    });
    println!("{bypassed} heads bypassed, {attending} attending");
    assert!(bypassed > 200 && attending > 1000, "{bypassed} {attending}");
}

/// How far a table's entry, mean or threshold may be off, as a share of it: weights have the rounding
/// of their scores.
const SHARE: f64 = 5e-5;

struct NaiveLfps {
    params: LfpsParams,
    /// Bits of the program's tables before the step.
    before: Vec<Vec<u64>>,
    bypassed: usize,
    attending: usize,
}

/// What a query head remembers.
#[derive(Clone, Debug)]
struct Tables {
    /// By position.
    vertical: Vec<f64>,
    /// By distance from the query.
    slash: Vec<f64>,
}

impl Tables {
    fn add(&mut self, t: usize, positions: &[usize], weights: &[f64], factor: f64) {
        for (&p, w) in positions.iter().zip(weights) {
            for (table, i) in [(&mut self.vertical, p), (&mut self.slash, t - p)] {
                table.resize(table.len().max(i + 1), 0.0);
                table[i] += factor * w;
            }
        }
    }

    /// Eq. 10.
    fn update(&mut self, t: usize, positions: &[usize], weights: &[f64]) {
        let entries = self.vertical.iter_mut().chain(&mut self.slash);
        entries.for_each(|x| *x *= 0.95);
        self.add(t, positions, weights, 0.5);
    }
}

/// Mean, deviation and kurtosis.
fn moments(x: &[f64]) -> [f64; 3] {
    let n = x.len() as f64;
    let mean = x.iter().sum::<f64>() / n;
    let central = |k: i32| x.iter().map(|v| (v - mean).powi(k)).sum::<f64>() / n;
    let kurtosis = if central(2) == 0.0 {
        3.0
    } else {
        central(4) / central(2).powi(2)
    };
    [mean, central(2).sqrt(), kurtosis]
}

/// What a bypass test estimates, and the positions it reads.
struct Estimate {
    sink: f64,
    rest: f64,
    bound: f64,
    sinks: usize,
    local: usize,
    mean_value: Vec<f64>,
}

/// Marks of one query head: as computed, those that hold whatever the rounding, and those that may.
struct Marks {
    plain: BTreeSet<usize>,
    certain: BTreeSet<usize>,
    possible: BTreeSet<usize>,
}

impl NaiveLfps {
    fn new(params: LfpsParams) -> Self {
        Self {
            params,
            before: Vec::new(),
            bypassed: 0,
            attending: 0,
        }
    }

    /// The tables of query head `a` after the first `events` of the history.
    fn tables(&self, history: &History, a: usize, events: usize) -> Tables {
        let mut tables = Tables {
            vertical: Vec::new(),
            slash: Vec::new(),
        };
        for event in &history.events[..events] {
            match event {
                Event::Turn(turn) => self.learn_prompt(&mut tables, history, turn, a),
                Event::Decode(step) => {
                    let rest: Vec<usize> = (step.attended.iter().copied())
                        .filter(|p| *p >= history.place.limits.sinks)
                        .collect();
                    if !step.is_bypassed(a) && !rest.is_empty() {
                        tables.update(step.t, &rest, &weights(&step.q_rope[a], &step.keys, &rest));
                    }
                }
            }
        }
        tables
    }

    fn learn_prompt(&self, tables: &mut Tables, history: &History, turn: &Turn, a: usize) {
        let rows: Vec<(usize, Vec<usize>)> = turn
            .last(self.params.lfps_rows)
            .map(|t| (t, history.non_sinks(t)))
            .filter(|(_, rest)| !rest.is_empty())
            .collect();
        let factor = 10.0 / rows.len() as f64;
        for (t, rest) in &rows {
            let weights = weights(turn.query(a, *t), &turn.keys, rest);
            if turn.first == 0 {
                tables.add(*t, rest, &weights, factor);
            } else {
                tables.update(*t, rest, &weights);
            }
        }
    }

    /// Variance of the scores over the squared length of the query, of the last prompt that shows it.
    fn rho(&self, history: &History, a: usize) -> f64 {
        let mut rho = 0.0;
        for turn in history.turns() {
            let q = turn.query(a, turn.end() - 1);
            let scores: Vec<f64> = (history.non_sinks(turn.end() - 1).iter())
                .map(|p| score(q, &turn.keys[*p]))
                .collect();
            if !scores.is_empty() && dot(q, q) > 0.0 {
                rho = moments(&scores)[1].powi(2) / dot(q, q);
            }
        }
        rho
    }

    fn estimate(&self, history: &History, a: usize) -> Option<Estimate> {
        let step = history.step();
        let sinks: Vec<usize> = (step.visible.clone())
            .filter(|p| *p < history.place.limits.sinks)
            .collect();
        if sinks.is_empty() || self.params.lfps_theta >= 1.0 {
            return None;
        }
        let rest = history.non_sinks(step.t);
        let q = &step.q_rope[a];
        let of = |p: &usize| score(q, &step.keys[*p]);
        let scores = |positions: &[usize]| positions.iter().map(of).collect::<Vec<f64>>();
        let local = &rest[rest.len().saturating_sub(5)..];
        let rows = |m: &Matrix| mean_row(&rest.iter().map(|p| &m[*p][..]).collect::<Vec<_>>());
        let global =
            (rest.len() as f64).ln() + score(q, &rows(&step.keys)) + self.rho(history, a) * dot(q, q) / 2.0;
        let bounds = step.keys.iter().map(|k| score_bound(q, k));
        Some(Estimate {
            sink: log_sum_exp(&scores(&sinks)),
            rest: global.max(log_sum_exp(&scores(local))),
            bound: 4.0 * bounds.fold(1e-5, f64::max),
            sinks: sinks.len(),
            local: local.len(),
            mean_value: rows(&step.values),
        })
    }

    /// Checks the bypass of every query head.
    fn check_bypass(&self, history: &History) -> Result<Vec<Option<Estimate>>, String> {
        let step = history.step();
        let mut estimates = Vec::new();
        for a in 0..history.place.group {
            let estimate = self.estimate(history, a);
            let own = step.selection.bypassed.get(a).and_then(Option::as_ref);
            // spars > theta, as log odds.
            let odds = (self.params.lfps_theta / (1.0 - self.params.lfps_theta)).ln();
            let margin = estimate.as_ref().map_or(-1.0, |e| e.sink - e.rest - odds);
            let bound = estimate.as_ref().map_or(0.0, |e| e.bound);
            if own.is_some() != (margin > 0.0) && margin.abs() > 2.0 * bound {
                return Err(format!("head {a}: bypass {}, margin {margin}", own.is_some()));
            }
            if let (Some(own), Some(estimate)) = (own, &estimate) {
                near("lse of the rest", own.lse.into(), estimate.rest, bound + 1e-5)?;
                for (x, mean) in own.output.iter().zip(&estimate.mean_value) {
                    near("mean value", f64::from(*x), *mean, 1e-5 * (1.0 + mean.abs()))?;
                }
            }
            estimates.push(estimate);
        }
        Ok(estimates)
    }

    /// Eq. 7-9 with every limit moved by a share: `tables` at the candidates, and `population`, of which mean, deviation
    /// and kurtosis are taken.
    fn marked(&self, tables: [&[f64]; 2], population: [&[f64]; 2], moved: f64) -> BTreeSet<usize> {
        let means = population.map(|table| moments(table)[0]);
        let limits = self.limits(population);
        let over = |i: usize, limits: [f64; 2]| {
            tables
                .iter()
                .zip(limits)
                .any(|(t, limit)| t[i] > limit * (1.0 + moved))
        };
        let mut marked = BTreeSet::new();
        for i in (0..tables[0].len()).filter(|i| over(*i, limits)) {
            for offset in [-1, 0, 1, 2] {
                match i.checked_add_signed(offset) {
                    Some(j) if j < tables[0].len() && over(j, means) => marked.insert(j),
                    _ => false,
                };
            }
        }
        marked
    }

    /// Mean plus deviations of both tables, Eq. 8.
    fn limits(&self, population: [&[f64]; 2]) -> [f64; 2] {
        let [[mean_v, sd_v, kurt_v], [mean_s, sd_s, kurt_s]] = population.map(moments);
        let alpha = self.params.lfps_alpha.unwrap_or(0.2);
        let (share_v, share_s) = (2.0 * kurt_s / (kurt_v + kurt_s), 2.0 * kurt_v / (kurt_v + kurt_s));
        [mean_v + alpha * sd_v * share_v, mean_s + alpha * sd_s * share_s]
    }

    /// What query head `a` read of its two tables; `None` where rounding may decide.
    fn touched(&self, history: &History, a: usize) -> Option<Vec<Array>> {
        let step = history.step();
        let tables = self.tables(history, a, history.events.len() - 1);
        let tables = [&tables.vertical, &tables.slash];
        let place = |table: usize, p: usize| if table == 0 { p } else { step.t - p };
        let entry = |table: usize, p: usize| tables[table].get(place(table, p)).copied().unwrap_or(0.0);
        let candidates: Vec<usize> = step.candidates.clone().collect();
        let population = history.non_sinks(step.t);
        let [vertical, slash] =
            [0, 1].map(|table| population.iter().map(|p| entry(table, *p)).collect::<Vec<_>>());
        let means = [&vertical, &slash].map(|of| moments(of)[0]);
        let limits = self.limits([&vertical, &slash]);
        let unsure = std::cell::Cell::new(false);
        let is_over = |x: f64, limit: f64| {
            unsure.set(unsure.get() || (x - limit).abs() <= 4.0 * SHARE * limit);
            x > limit
        };
        let over = |p: usize, limits: [f64; 2]| [0, 1].map(|table| is_over(entry(table, p), limits[table]));
        let marked: BTreeSet<usize> = (candidates.iter().copied())
            .filter(|p| over(*p, limits).contains(&true))
            .collect();
        let around = |p: &usize| [p.wrapping_sub(1), p + 1, p + 2];
        let neighbours: BTreeSet<usize> = (marked.iter().flat_map(around))
            .filter(|p| step.candidates.contains(p) && !marked.contains(p))
            .collect();
        let are_few = neighbours.len() < candidates.len() / 16;
        let mut arrays = Vec::new();
        for table in [0, 1] {
            let places = candidates.iter().map(|p| place(table, *p));
            let (first, end) = (places.clone().min()? / 64 * 64, places.max()? + 1);
            let entries = tables[table];
            // The maximum of every 16 entries, from a multiple of 64 on.
            let blocks = (first / 16..end.min(entries.len()).div_ceil(16)).filter(|b| 16 * b < entries.len());
            arrays.push(Array::items(4, blocks.clone()));
            let limit = if are_few { limits[table] } else { means[table] };
            let block = |b: usize| 16 * b..(16 * b + 16).min(entries.len());
            let is_read = |b: &usize| is_over(entries[block(*b)].iter().copied().fold(0.0, f64::max), limit);
            let mut read: BTreeSet<usize> =
                blocks.filter(is_read).flat_map(|b| 16 * b..16 * b + 16).collect();
            if are_few {
                let single = neighbours.iter().filter(|p| table == 0 || !over(**p, means)[0]);
                read.extend(single.map(|p| place(table, *p)).filter(|i| *i < entries.len()));
            }
            arrays.push(Array::items(4, read));
        }
        (!unsure.get()).then_some(arrays)
    }

    /// E of query head `a`.
    fn marks(&self, history: &History, a: usize) -> Marks {
        let step = history.step();
        let tables = self.tables(history, a, history.events.len() - 1);
        let get = |table: &[f64], i: usize| table.get(i).copied().unwrap_or(0.0);
        let both = |positions: &[usize]| -> [Vec<f64>; 2] {
            let vertical = positions.iter().map(|p| get(&tables.vertical, *p));
            let slash = positions.iter().map(|p| get(&tables.slash, step.t - p));
            [vertical.collect(), slash.collect()]
        };
        let candidates: Vec<usize> = step.candidates.clone().collect();
        let population = both(&history.non_sinks(step.t));
        let [vertical, slash] = both(&candidates);
        let with = |moved| -> BTreeSet<usize> {
            let marked = self.marked([&vertical, &slash], population.each_ref().map(|t| &t[..]), moved);
            let recent = (step.t + 1).saturating_sub(5)..step.t + 1;
            (marked.iter().map(|i| step.candidates.start + i))
                .chain(recent.filter(|p| step.candidates.contains(p)))
                .collect()
        };
        let mut marks = Marks {
            plain: with(0.0),
            certain: with(SHARE),
            possible: with(-SHARE),
        };
        // Where all entries are alike, deviation and kurtosis are those of the rounding.
        let flat = |x: &[f64]| {
            let [mean, sd, _] = moments(x);
            mean > 0.0 && sd < 1e-5 * mean
        };
        if population.iter().any(|table| flat(table)) {
            marks.certain.clear();
            marks.possible = step.candidates.clone().collect();
        }
        marks
    }

    /// The final set, the rows read and the products.
    fn check_set(&self, history: &History, estimates: &[Option<Estimate>]) -> Verdict {
        let step = history.step();
        let chosen = step.chosen();
        let attending: Vec<usize> = (0..history.place.group)
            .filter(|a| !step.is_bypassed(*a))
            .collect();
        let marks: Vec<Marks> = attending.iter().map(|a| self.marks(history, *a)).collect();
        let possible: BTreeSet<usize> = marks.iter().flat_map(|m| m.possible.clone()).collect();
        if !chosen.is_subset(&possible) {
            return Err(format!("{chosen:?} has others than {possible:?}"));
        }
        let known = marks.iter().all(|m| m.certain == m.possible);
        let mut all_scores = Vec::new();
        let mut bound: f64 = 0.0;
        let mut near_tie = false;
        let mut lists = Vec::new();
        for (a, marks) in attending.iter().zip(&marks) {
            let q = &step.q_rope[*a];
            let of = |&position: &usize| Ranked {
                score: score(q, &step.keys[position]),
                tie: 0,
                position,
            };
            let list: Vec<Ranked> = marks.plain.iter().map(of).collect();
            let scores: Vec<f64> = list.iter().map(|e| e.score).collect();
            let own = (marks.plain.iter()).map(|p| score_bound(q, &step.keys[*p]));
            bound = own.fold(bound, f64::max);
            near_tie |= has_near_tie(&scores, 2.0 * bound);
            all_scores.push(scores.into_iter().fold(f64::NEG_INFINITY, f64::max));
            lists.push(list);
        }
        near_tie |= all_scores.len() > step.budget && has_near_tie(&all_scores, 2.0 * bound);
        let expected = union_within(&lists, step.budget);
        if chosen != expected {
            return if known && !near_tie {
                Err(format!("{chosen:?} instead of {expected:?}"))
            } else {
                Ok(Agreement::NearTie)
            };
        }
        if known {
            self.check_reads(history, estimates, &marks)?;
        }
        Ok(Agreement::Same)
    }

    fn check_reads(
        &self,
        history: &History,
        estimates: &[Option<Estimate>],
        marks: &[Marks],
    ) -> Result<(), String> {
        let step = history.step();
        let union: BTreeSet<usize> = marks.iter().flat_map(|m| m.plain.clone()).collect();
        let rows = if marks.is_empty() {
            estimates.iter().flatten().map(|e| e.local).max().unwrap_or(0)
        } else {
            union.len() - step.chosen().len()
        };
        // The test of an attending head takes products too, of rows that it attends anyway.
        let tests: usize = estimates.iter().flatten().map(|e| e.sinks + e.local).sum();
        let products = tests + marks.iter().map(|m| m.plain.len()).sum::<usize>();
        let actual = (step.selection.ranked.len(), step.selection.products);
        if actual != (rows, products) {
            return Err(format!(
                "rows and products {actual:?} instead of {:?}",
                (rows, products)
            ));
        }
        Ok(())
    }

    /// The program's tables, and their sums.
    fn check_tables(&self, history: &History, program: &Lfps) -> Result<(), String> {
        let n = match history.events.last().unwrap() {
            Event::Turn(turn) => turn.end(),
            Event::Decode(step) => step.t + 1,
        };
        for (a, head) in program.heads().iter().enumerate() {
            let tables = self.tables(history, a, history.events.len());
            for (name, table, own) in [
                ("vertical", &tables.vertical, &head.vertical),
                ("slash", &tables.slash, &head.slash),
            ] {
                for i in 0..n {
                    let expected = table.get(i).copied().unwrap_or(0.0);
                    near(
                        &format!("{name} of head {a} at {i}"),
                        own.get(i),
                        expected,
                        SHARE * expected + 1e-12,
                    )?;
                }
            }
            let filled = (history.turns().next()).is_some_and(|t| t.end() > history.place.limits.sinks);
            if filled {
                near("sum", head.vertical.sum() + head.slash.sum(), 20.0, 1e-4)?;
            }
        }
        Ok(())
    }

    fn bits(program: &Lfps, n: usize) -> Vec<Vec<u64>> {
        let entries = |table: &kvsmith::internal::method::lfps::Table| {
            (0..n).map(|i| table.get(i).to_bits()).collect::<Vec<_>>()
        };
        let heads = program.heads().iter();
        heads
            .map(|h| [entries(&h.vertical), entries(&h.slash)].concat())
            .collect()
    }
}

impl Model for NaiveLfps {
    type Program = Lfps;

    fn prompted(&mut self, history: &History, program: &Lfps) -> Result<(), String> {
        self.before = Self::bits(program, 600);
        self.check_tables(history, program)
    }

    fn chose(&mut self, history: &History) -> Verdict {
        let estimates = self.check_bypass(history)?;
        let bypassed = (0..history.place.group)
            .filter(|a| history.step().is_bypassed(*a))
            .count();
        self.bypassed += bypassed;
        self.attending += history.place.group - bypassed;
        self.check_set(history, &estimates)
    }

    fn observed(&mut self, history: &History, program: &Lfps) -> Result<(), String> {
        let after = Self::bits(program, 600);
        for a in (0..history.place.group).filter(|a| history.step().is_bypassed(*a)) {
            if self.before[a] != after[a] {
                return Err(format!("bypassed head {a} learned"));
            }
        }
        self.before = after;
        self.check_tables(history, program)
    }

    fn read(&self, history: &History) -> Option<Vec<Array>> {
        let (step, d) = (history.step(), history.place.head_dim);
        let mut arrays = Vec::new();
        if self.params.lfps_theta < 1.0 {
            // The means of keys and values, in f64.
            arrays.extend([Array::whole(8 * d), Array::whole(8 * d)]);
        }
        for a in (0..history.place.group).filter(|a| !step.is_bypassed(*a)) {
            arrays.extend(self.touched(history, a)?);
        }
        Some(arrays)
    }
}

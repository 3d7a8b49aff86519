//! CTkvr.

use half::f16;
use kvsmith::internal::kv::packed::Center;
use kvsmith::internal::method::ctkvr::{Ctkvr, CtkvrParams};

use super::head::cases;
use super::*;

/// Checks random histories with random parameters.
pub fn check() {
    let make = |rng: &mut ChaCha8Rng, place: &Place, _: Center| {
        let params = CtkvrParams {
            ct_centroids: pick(rng, &[None, None, Some(1), Some(7), Some(40)]),
            ct_probes: pick(rng, &[1, 2, 4]),
            ct_update: pick(rng, &[1, 1, 3, 0]),
            ct_list: pick(rng, &[2.5, 2.5, 1.0, 6.5]),
            ct_keep: pick(rng, &[false, false, true]),
            ..CtkvrParams::default()
        };
        (Ctkvr::new(place, &params), NaiveCtkvr::new(params))
    };
    cases(500, make, |_: &NaiveCtkvr| ());
}

/// How far a cosine may be off: one channel of a centroid may round to the other f16.
const COSINE: f64 = 5e-4;

struct Centroid {
    /// Unit queries of the group, as stored.
    queries: Matrix,
    list: BTreeSet<usize>,
}

pub struct NaiveCtkvr {
    pub params: CtkvrParams,
    /// Oldest first. Their lists are the program's, once they were checked.
    centroids: Vec<Centroid>,
    /// Positions from here on are fresh once they leave the window.
    indexed: usize,
}

fn unit(q: &[f64]) -> Vec<f64> {
    let length = dot(q, q).sqrt();
    q.iter().map(|x| x / length).collect()
}

/// Largest probability of any query head, with how far it may be off as a share.
fn probabilities(queries: &[&[f64]], keys: &Matrix, positions: &[usize]) -> (Vec<f64>, f64) {
    let mut largest = vec![0.0f64; positions.len()];
    let mut bound: f64 = 0.0;
    for q in queries {
        let weights = weights(q, keys, positions);
        largest.iter_mut().zip(weights).for_each(|(l, w)| *l = l.max(w));
        bound = (positions.iter()).fold(bound, |b, p| b.max(score_bound(q, &keys[*p])));
    }
    (largest, 4.0 * bound + 1e-6)
}

impl NaiveCtkvr {
    pub fn new(params: CtkvrParams) -> Self {
        Self {
            params,
            centroids: Vec::new(),
            indexed: 0,
        }
    }

    /// rho for a query that sees `seen`.
    fn list_len(&self, history: &History, seen: usize) -> usize {
        let budget = history.place.limits.budget.positions(seen).min(seen);
        let halves = (2.0 * self.params.ct_list) as usize;
        (halves * budget).div_ceil(2)
    }

    fn capacity(&self, history: &History, n: usize) -> usize {
        let place = &history.place;
        let probes = self.params.ct_probes;
        let (wanted, share) = match self.params.ct_centroids {
            Some(count) => (count, 1.0),
            None => ((n / 16).max(probes).min(2048), 0.1),
        };
        let rho = self.list_len(history, visible(n - 1, place.limits.model_window).len());
        let one = 4 * rho + 2 * place.group * place.head_dim;
        let cap = share * (n * place.kv.bytes_per_position(place.head_dim)) as f64;
        let fits = (1..=wanted).rev().find(|c| (c * one) as f64 <= cap);
        fits.unwrap_or(1)
    }

    fn stored(queries: &[&[f64]]) -> Matrix {
        let round = |x: f64| f16::from_f32(x as f32).to_f64();
        queries
            .iter()
            .map(|q| unit(q).into_iter().map(round).collect())
            .collect()
    }

    /// Checks the list of a query over `seen`, of which `allowed` may be in it.
    fn check_list(
        list: &BTreeSet<usize>,
        queries: &[&[f64]],
        keys: &Matrix,
        seen: &[usize],
        allowed: impl Fn(usize) -> bool,
        rho: usize,
    ) -> Result<(), String> {
        let (weights, share) = probabilities(queries, keys, seen);
        let bits = |p: &usize| keys[*p].iter().map(|v| v.to_bits()).collect::<Vec<_>>();
        let classes = classes(seen.iter().map(bits));
        let items: Vec<Item> = (seen.iter().zip(weights).zip(classes))
            .filter(|((p, _), _)| allowed(**p))
            .map(|((&position, score), class)| Item {
                position,
                score,
                bound: share * score + 1e-36,
                class,
            })
            .collect();
        check_best(&items, list, rho).map_err(|e| format!("list: {e}"))
    }

    /// The program's lists, which must be ascending.
    fn lists(program: &Ctkvr) -> Result<Vec<BTreeSet<usize>>, String> {
        let set = |list: &[u32]| {
            if list.windows(2).all(|w| w[0] < w[1]) {
                Ok(list.iter().map(|p| *p as usize).collect())
            } else {
                Err(format!("{list:?} is not ascending"))
            }
        };
        program.lists().map(set).collect()
    }

    /// Adopts `queries` with the program's newest lists, having dropped the oldest down to `capacity`.
    fn push(
        &mut self,
        queries: Vec<Matrix>,
        capacity: usize,
        program: &Ctkvr,
    ) -> Result<Vec<BTreeSet<usize>>, String> {
        let lists = Self::lists(program)?;
        let count = queries.len();
        for queries in queries {
            self.centroids.push(Centroid {
                queries,
                list: BTreeSet::new(),
            });
        }
        let excess = self.centroids.len().saturating_sub(capacity);
        self.centroids.drain(..excess);
        if lists.len() != self.centroids.len() {
            return Err(format!(
                "{} centroids instead of {}",
                lists.len(),
                self.centroids.len()
            ));
        }
        let old = lists.len() - count;
        for (i, (centroid, list)) in self.centroids.iter_mut().zip(&lists).enumerate() {
            if i < old && centroid.list != *list {
                return Err(format!("list {i} changed"));
            }
            centroid.list = list.clone();
        }
        Ok(lists[old..].to_vec())
    }

    fn check_unchanged(&self, program: &Ctkvr) -> Result<(), String> {
        let lists = Self::lists(program)?;
        if lists.iter().eq(self.centroids.iter().map(|c| &c.list)) {
            Ok(())
        } else {
            Err("lists changed without an update".to_string())
        }
    }

    /// The centroids most like the queries, and whether another was as close.
    fn recall(&self, step: &Decode) -> (Vec<usize>, bool) {
        let cosine = |c: &Centroid| {
            let heads = c.queries.iter().zip(&step.q_rope);
            heads
                .map(|(c, q)| dot(c, &unit(q)))
                .fold(f64::NEG_INFINITY, f64::max)
        };
        let cosines: Vec<f64> = self.centroids.iter().map(cosine).collect();
        let mut order: Vec<usize> = (0..cosines.len()).collect();
        order.sort_by(|i, j| cosines[*j].total_cmp(&cosines[*i]).then(i.cmp(j)));
        let probes = self.params.ct_probes.min(order.len());
        let close = order.get(probes).is_some_and(|next| {
            let gap = cosines[order[probes - 1]] - cosines[*next];
            gap > 0.0 && gap < COSINE
        });
        (order[..probes].to_vec(), close)
    }

    fn union(&self, history: &History) -> (Vec<usize>, bool) {
        let step = history.step();
        let candidates = step.candidates.clone();
        if step.is_exact() {
            return (candidates.collect(), false);
        }
        let (recalled, close) = self.recall(step);
        let fresh = (self.indexed)
            .max(candidates.end.saturating_sub(256))
            .max(candidates.start)..candidates.end;
        let in_union =
            |p: &usize| fresh.contains(p) || recalled.iter().any(|c| self.centroids[*c].list.contains(p));
        (candidates.clone().filter(in_union).collect(), close)
    }

    fn check_choice(&self, history: &History, union: &[usize]) -> Result<(), String> {
        let step = history.step();
        let queries: Vec<&[f64]> = step.q_rope.iter().map(Vec::as_slice).collect();
        Self::check_list(&step.chosen(), &queries, &step.keys, union, |_| true, step.budget)?;
        let reads = (step.selection.ranked.len(), step.selection.products);
        let expected = (union.len() - step.chosen().len(), queries.len() * union.len());
        if reads != expected {
            return Err(format!("rows and products {reads:?} instead of {expected:?}"));
        }
        Ok(())
    }
}

impl Model for NaiveCtkvr {
    type Program = Ctkvr;

    fn prompted(&mut self, history: &History, program: &Ctkvr) -> Result<(), String> {
        let turn = history.turn();
        if self.params.ct_keep && turn.first > 0 {
            return self.check_unchanged(program);
        }
        let place = &history.place;
        let capacity = self.capacity(history, turn.end());
        if program.capacity(turn.end()) != capacity {
            return Err(format!(
                "C {} instead of {capacity}",
                program.capacity(turn.end())
            ));
        }
        let positions = turn.last(capacity);
        let group = |t: usize| -> Vec<&[f64]> { (0..turn.queries.len()).map(|a| turn.query(a, t)).collect() };
        let queries = positions.clone().map(|t| Self::stored(&group(t))).collect();
        let new = self.push(queries, capacity, program)?;
        if turn.first == 0 || turn.end() - turn.first >= capacity {
            self.indexed = turn.end().saturating_sub(place.limits.window);
        }
        let end = turn.end().saturating_sub(place.limits.window);
        for (t, list) in positions.zip(&new) {
            let seen: Vec<usize> = visible(t, place.limits.model_window).collect();
            let rho = self.list_len(history, seen.len());
            let allowed = |p: usize| p >= place.limits.sinks && p < end && seen.contains(&p);
            Self::check_list(list, &group(t), &turn.keys, &seen, allowed, rho)?;
        }
        Ok(())
    }

    fn chose(&mut self, history: &History) -> Verdict {
        let (union, close) = self.union(history);
        match (self.check_choice(history, &union), close) {
            (Ok(()), _) => Ok(Agreement::Same),
            (Err(_), true) => Ok(Agreement::NearTie),
            (Err(e), false) => Err(e),
        }
    }

    fn observed(&mut self, history: &History, program: &Ctkvr) -> Result<(), String> {
        let step = history.step();
        let every = self.params.ct_update;
        if every == 0 || !step.step.is_multiple_of(every) {
            return self.check_unchanged(program);
        }
        let (union, close) = self.union(history);
        let queries: Vec<&[f64]> = step.q_rope.iter().map(Vec::as_slice).collect();
        let held = self.centroids.len().max(self.capacity(history, step.t + 1));
        let new = self.push(vec![Self::stored(&queries)], held, program)?;
        let rho = self.list_len(history, step.visible.len());
        let allowed = |p: usize| step.candidates.contains(&p);
        let checked = Self::check_list(&new[0], &queries, &step.keys, &union, allowed, rho);
        if new[0].iter().any(|p| !step.candidates.contains(p)) {
            return Err("a list has what is always attended".to_string());
        }
        if close { Ok(()) } else { checked }
    }

    fn read(&self, history: &History) -> Option<Vec<Array>> {
        let (step, place) = (history.step(), &history.place);
        let (recalled, close) = self.recall(step);
        let queries = self
            .centroids
            .iter()
            .map(|_| Array::whole(2 * place.group * place.head_dim));
        let lists = recalled
            .iter()
            .map(|c| Array::whole(4 * self.centroids[*c].list.len()));
        (!close).then(|| queries.chain(lists).collect())
    }
}

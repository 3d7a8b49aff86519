//! Naive models of the retrieval methods, in f64: the whole history is kept, and everything is
//! computed from it with loops and full sorts.
#![allow(dead_code, missing_docs, reason = "test code")]

pub mod a2ats;
pub mod baselines;
pub mod ctkvr;
pub mod doublesparsity;
pub mod head;
pub mod inputs;
pub mod lfps;
pub mod pqcache;
pub mod quantiser;
pub mod randsign;
pub mod selfindex;
pub mod tail;
pub mod triattention;
pub mod wpq;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use kvsmith::internal::method::{Place, Reads, Retriever, Selection};
use rand::Rng;
use rand_chacha::ChaCha8Rng;

/// The check of each method against its naive model; that of a new method belongs here.
const CHECKS: [(&str, fn()); 16] = [
    ("full", baselines::check_full),
    ("topk", baselines::check_topk),
    ("random", baselines::check_random),
    ("streaming", baselines::check_streaming),
    ("quest", baselines::check_quest),
    ("pqcache", pqcache::check),
    ("randsign", randsign::check),
    ("snapkv", baselines::check_snapkv),
    ("h2o", baselines::check_h2o),
    ("a2ats", a2ats::check),
    ("selfindex", selfindex::check),
    ("lfps", lfps::check),
    ("ctkvr", ctkvr::check),
    ("wpq", wpq::check),
    ("doublesparsity", doublesparsity::check),
    ("triattention", triattention::check),
];

/// Checks a method against its naive model on random histories.
pub fn check(method: &str) {
    let found = CHECKS.iter().find(|(name, _)| *name == method);
    let (_, check) = found.unwrap_or_else(|| {
        panic!("{method} has no naive model: write one below tests/naive, and add its check to CHECKS in tests/naive/mod.rs")
    });
    check();
}

/// One of these.
pub fn pick<T: Copy>(rng: &mut ChaCha8Rng, from: &[T]) -> T {
    from[rng.gen_range(0..from.len())]
}

pub type Matrix = Vec<Vec<f64>>;

/// Rounding of one f32 operation.
pub const UNIT: f64 = 1.0 / (1u32 << 24) as f64;

pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(x, y)| x * y).sum()
}

/// How far a product in f32 may be from the exact one, whatever the order of its sums.
pub fn dot_bound(a: &[f64], b: &[f64]) -> f64 {
    let size: f64 = a.iter().zip(b).map(|(x, y)| (x * y).abs()).sum();
    (a.len() + 4) as f64 * UNIT * size
}

/// Scaled score of a query with a key.
pub fn score(q: &[f64], k: &[f64]) -> f64 {
    dot(q, k) / (q.len() as f64).sqrt()
}

pub fn score_bound(q: &[f64], k: &[f64]) -> f64 {
    dot_bound(q, k) / (q.len() as f64).sqrt()
}

pub fn log_sum_exp(x: &[f64]) -> f64 {
    let max = x.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    max + x.iter().map(|v| (v - max).exp()).sum::<f64>().ln()
}

/// Softmax weights of a query over the rows `positions` of `keys`.
pub fn weights(q: &[f64], keys: &Matrix, positions: &[usize]) -> Vec<f64> {
    let scores: Vec<f64> = positions.iter().map(|p| score(q, &keys[*p])).collect();
    let lse = log_sum_exp(&scores);
    scores.iter().map(|s| (s - lse).exp()).collect()
}

/// The positions that the token at `t` sees.
pub fn visible(t: usize, window: Option<usize>) -> Range<usize> {
    match window {
        Some(w) if t + 1 > w => t + 1 - w..t + 1,
        _ => 0..t + 1,
    }
}

/// Mean over the rows.
pub fn mean_row(rows: &[&[f64]]) -> Vec<f64> {
    let d = rows[0].len();
    let of = |i: usize| rows.iter().map(|row| row[i]).sum::<f64>() / rows.len() as f64;
    (0..d).map(of).collect()
}

/// A prompt, the first or that of a later turn.
pub struct Turn {
    pub first: usize,
    /// Per query head: `[m,d]`.
    pub queries: Vec<Matrix>,
    /// Of every position: earlier ones as the cache gave them before the prompt.
    pub keys: Matrix,
    pub k_pre: Matrix,
}

impl Turn {
    /// Positions at its end.
    pub fn end(&self) -> usize {
        self.keys.len()
    }

    /// Its last `count` positions, or all.
    pub fn last(&self, count: usize) -> Range<usize> {
        self.end().saturating_sub(count).max(self.first)..self.end()
    }

    /// Query of head `a` at `position`.
    pub fn query(&self, a: usize, position: usize) -> &[f64] {
        &self.queries[a][position - self.first]
    }

    /// The group's mean query at its end.
    pub fn mean_query(&self) -> Vec<f64> {
        let last: Vec<&[f64]> = (0..self.queries.len())
            .map(|a| self.query(a, self.end() - 1))
            .collect();
        mean_row(&last)
    }
}

/// A decode step.
pub struct Decode {
    pub step: usize,
    /// Position of the current token.
    pub t: usize,
    pub visible: Range<usize>,
    pub candidates: Range<usize>,
    pub budget: usize,
    /// `[r,d]`.
    pub q_pre: Matrix,
    pub q_rope: Matrix,
    pub k_pre: Vec<f64>,
    /// The rotated key of the current token, before it was stored.
    pub key: Vec<f64>,
    /// What the cache gives for every position.
    pub keys: Matrix,
    pub values: Matrix,
    /// What the program chose, and with the static set.
    pub selection: Selection,
    pub attended: Vec<usize>,
}

impl Decode {
    pub fn is_exact(&self) -> bool {
        self.budget >= self.candidates.len()
    }

    pub fn chosen(&self) -> BTreeSet<usize> {
        self.selection.positions.iter().map(|p| *p as usize).collect()
    }

    pub fn is_bypassed(&self, a: usize) -> bool {
        self.selection.bypassed.get(a).is_some_and(Option::is_some)
    }

    /// Positions with bit for bit equal keys have the same number.
    pub fn key_classes(&self) -> Vec<usize> {
        classes(
            self.keys
                .iter()
                .map(|row| row.iter().map(|v| v.to_bits()).collect::<Vec<_>>()),
        )
    }

    pub fn mean_query(&self) -> Vec<f64> {
        let rows: Vec<&[f64]> = self.q_rope.iter().map(Vec::as_slice).collect();
        mean_row(&rows)
    }
}

/// The same number for equal items.
pub fn classes<T: Ord>(items: impl Iterator<Item = T>) -> Vec<usize> {
    let mut known = BTreeMap::new();
    items
        .map(|item| {
            let next = known.len();
            *known.entry(item).or_insert(next)
        })
        .collect()
}

pub enum Event {
    Turn(Turn),
    Decode(Box<Decode>),
}

/// Everything that one KV head went through.
pub struct History {
    pub place: Place,
    pub events: Vec<Event>,
}

impl History {
    pub fn turns(&self) -> impl Iterator<Item = &Turn> {
        self.events.iter().filter_map(|e| match e {
            Event::Turn(turn) => Some(turn),
            Event::Decode(_) => None,
        })
    }

    /// The last prompt that found fewer than 128 positions: what is fitted to keys starts anew there, from
    /// all of them as the cache gave them.
    pub fn base(&self) -> &Turn {
        self.turns().filter(|t| t.first < 128).last().unwrap()
    }

    /// The last prompt.
    pub fn turn(&self) -> &Turn {
        self.turns().last().unwrap()
    }

    /// The steps since the last prompt, the latest last.
    pub fn steps_since(&self) -> Vec<&Decode> {
        let mut steps: Vec<&Decode> = Vec::new();
        for event in &self.events {
            match event {
                Event::Turn(_) => steps.clear(),
                Event::Decode(step) => steps.push(step),
            }
        }
        steps
    }

    /// The step that was done last.
    pub fn step(&self) -> &Decode {
        self.steps_since().last().unwrap()
    }

    /// Query positions of the last prompt and what is no sink for each.
    pub fn non_sinks(&self, position: usize) -> Vec<usize> {
        let seen = visible(position, self.place.limits.model_window);
        seen.filter(|p| *p >= self.place.limits.sinks).collect()
    }
}

/// How well the program and a model agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Agreement {
    /// As far as rounding lets one tell.
    Same,
    /// They differ, at a discrete decision whose margin is within rounding.
    NearTie,
}

pub type Verdict = Result<Agreement, String>;

/// An array of which a step read something.
pub struct Array {
    /// The bytes that count as read.
    counted: usize,
    /// The bytes that were read, from the start of the array.
    bytes: BTreeSet<usize>,
}

impl Array {
    /// Items of some bytes each.
    pub fn items(width: usize, places: impl IntoIterator<Item = usize>) -> Self {
        let item = |place: usize| place * width..(place + 1) * width;
        let bytes: BTreeSet<usize> = places.into_iter().flat_map(item).collect();
        Self {
            counted: bytes.len(),
            bytes,
        }
    }

    /// A whole array.
    pub fn whole(len: usize) -> Self {
        Self::items(len, [0])
    }

    /// A whole array that counts as `counted` bytes.
    pub fn held(counted: usize, len: usize) -> Self {
        Self {
            counted,
            ..Self::whole(len)
        }
    }

    /// How many bytes a memory moves that moves `granule` at once.
    fn moved(&self, granule: usize) -> usize {
        let granules: BTreeSet<usize> = self.bytes.iter().map(|byte| byte / granule).collect();
        granules.len() * granule
    }
}

/// Fails unless a program counts the bytes of these arrays, for several granules.
pub fn check_reads(arrays: &[Array], read: impl Fn(&mut Reads)) -> Result<(), String> {
    for granule in [1, 16, 32, 64, 256] {
        let mut reads = Reads::new(granule);
        read(&mut reads);
        check_counted(arrays, &reads, granule)?;
    }
    Ok(())
}

/// Fails unless the reads are those of the arrays.
pub fn check_counted(arrays: &[Array], reads: &Reads, granule: usize) -> Result<(), String> {
    let counted: usize = arrays.iter().map(|array| array.counted).sum();
    let moved: usize = arrays.iter().map(|array| array.moved(granule)).sum();
    if (reads.index_bytes, reads.moved_bytes) == (Some(counted), Some(moved)) {
        Ok(())
    } else {
        Err(format!("{reads:?} instead of {counted} bytes and {moved} moved"))
    }
}

/// A model beside the program that it checks.
pub trait Model {
    type Program: Retriever;

    /// Whether the program chooses no more than its budget.
    const BOUNDED: bool = true;

    /// After a prompt, which is the history's last event.
    fn prompted(&mut self, history: &History, program: &Self::Program) -> Result<(), String> {
        let _ = (history, program);
        Ok(())
    }

    /// The selection of the history's last step.
    fn chose(&mut self, history: &History) -> Verdict;

    /// The arrays that the history's last step read to choose; `None` where rounding may decide what it read.
    fn read(&self, history: &History) -> Option<Vec<Array>>;

    /// After the step, once its weights were observed.
    fn observed(&mut self, history: &History, program: &Self::Program) -> Result<(), String> {
        let _ = (history, program);
        Ok(())
    }
}

/// Something that may be chosen.
#[derive(Clone, Copy, Debug)]
pub struct Item {
    pub position: usize,
    pub score: f64,
    /// How far the program's score may be from that.
    pub bound: f64,
    /// Items of one class have the same score in the program, too.
    pub class: usize,
}

/// Fails unless `chosen` are the `count` best of `items` as far as the bounds tell, lower positions of
/// a class first.
pub fn check_best(items: &[Item], chosen: &BTreeSet<usize>, count: usize) -> Result<(), String> {
    let count = count.min(items.len());
    if chosen.len() != count {
        return Err(format!("{} chosen instead of {count}: {chosen:?}", chosen.len()));
    }
    let (taken, left): (Vec<&Item>, Vec<&Item>) = items.iter().partition(|i| chosen.contains(&i.position));
    if taken.len() != count {
        return Err(format!("{chosen:?} has others than the items"));
    }
    let worst = taken
        .iter()
        .min_by(|a, b| (a.score + a.bound).total_cmp(&(b.score + b.bound)));
    let best = left
        .iter()
        .max_by(|a, b| (a.score - a.bound).total_cmp(&(b.score - b.bound)));
    if let (Some(worst), Some(best)) = (worst, best)
        && worst.score + worst.bound < best.score - best.bound
    {
        return Err(format!("{worst:?} chosen, {best:?} left out"));
    }
    for (taken, left) in taken.iter().flat_map(|t| left.iter().map(move |l| (t, l))) {
        if taken.class == left.class && taken.position > left.position {
            return Err(format!("{taken:?} chosen, its equal {left:?} left out"));
        }
    }
    Ok(())
}

/// An entry of a query head's ranking: higher scores first, then lower ranks of a tie, then positions.
#[derive(Clone, Copy, Debug)]
pub struct Ranked {
    pub score: f64,
    pub tie: usize,
    pub position: usize,
}

fn in_order(mut list: Vec<Ranked>) -> Vec<Ranked> {
    list.sort_by(|a, b| {
        (b.score.total_cmp(&a.score))
            .then(a.tie.cmp(&b.tie))
            .then(a.position.cmp(&b.position))
    });
    list
}

/// The union of each list's best k for the largest k that has at most `budget`; if there is none, the
/// best of the union for k = 1, by highest score in any list.
pub fn union_within(lists: &[Vec<Ranked>], budget: usize) -> BTreeSet<usize> {
    let lists: Vec<Vec<Ranked>> = lists.iter().cloned().map(in_order).collect();
    let union = |k: usize| -> BTreeSet<usize> {
        let of = |list: &Vec<Ranked>| list.iter().take(k).map(|e| e.position).collect::<Vec<_>>();
        lists.iter().flat_map(of).collect()
    };
    let longest = lists.iter().map(Vec::len).max().unwrap_or(0);
    if let Some(k) = (1..=longest).rev().find(|k| union(*k).len() <= budget) {
        return union(k);
    }
    let best = |position: usize| Ranked {
        score: lists
            .iter()
            .flatten()
            .filter(|e| e.position == position)
            .map(|e| e.score)
            .fold(f64::NEG_INFINITY, f64::max),
        tie: 0,
        position,
    };
    let ranked = in_order(union(1).into_iter().map(best).collect());
    ranked.into_iter().take(budget).map(|e| e.position).collect()
}

/// Whether two different scores of a list are within `bound` of each other.
pub fn has_near_tie(scores: &[f64], bound: f64) -> bool {
    let mut sorted = scores.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.windows(2).any(|w| w[0] != w[1] && w[1] - w[0] <= bound)
}

/// Fails where `actual` is not `expected` to within `bound`.
pub fn near(what: &str, actual: f64, expected: f64, bound: f64) -> Result<(), String> {
    if (actual - expected).abs() <= bound {
        Ok(())
    } else {
        Err(format!(
            "{what}: {actual} instead of {expected} (bound {bound:e})"
        ))
    }
}

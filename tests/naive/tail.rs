//! The tail in f64: means over every position that is left out, recomputed in each step.

use std::ops::Range;

use kvsmith::internal::compute::attention::{self, Partial};
use kvsmith::internal::kv::packed::Center;
use kvsmith::internal::kv::{KvHead, KvType};
use kvsmith::internal::method::tail::Tail;
use kvsmith::internal::method::{Reads, Step};
use ndarray::Array2;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::head::{cached, wide};
use super::{Array, Matrix, UNIT, check_counted, dot, log_sum_exp, near, pick, score, visible};
use crate::common::random::matrix;

/// One KV head with a tail, driven through prompts and steps.
struct Case {
    rng: ChaCha8Rng,
    kind: KvType,
    kv: KvHead,
    tail: Tail,
    shifts: Vec<Option<f32>>,
    d: usize,
    window: Option<usize>,
    /// The first position of the tail's sums.
    start: usize,
}

/// A step's queries and what the cache gives back.
struct Decoded {
    q: Array2<f32>,
    keys: Matrix,
    values: Matrix,
    seen: Range<usize>,
}

impl Case {
    fn new(seed: u64) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let (r, d) = (pick(&mut rng, &[1, 2, 3, 5]), pick(&mut rng, &[8, 20, 64]));
        let kind = pick(
            &mut rng,
            &[KvType::F32, KvType::F16, KvType::BF16, KvType::TWO_BIT],
        );
        let shift = |rng: &mut ChaCha8Rng| rng.gen_bool(0.7).then(|| rng.gen_range(-2.0..4.0));
        let shifts: Vec<Option<f32>> = (0..r).map(|_| shift(&mut rng)).collect();
        Self {
            kind,
            kv: KvHead::new(kind, d, 0, Center::Median),
            tail: Tail::new(shifts.clone(), d, kind),
            window: rng.gen_bool(0.4).then(|| rng.gen_range(4..40)),
            rng,
            shifts,
            d,
            start: 0,
        }
    }

    fn rows(&mut self, n: usize) -> Array2<f32> {
        matrix(&mut self.rng, n, self.d)
    }

    fn prompt(&mut self, m: usize) {
        let (first, d) = (self.kv.len(), self.d);
        let (new_keys, new_values) = (self.rows(m), self.rows(m));
        let joined = |old: Array2<f32>, new: &Array2<f32>| {
            ndarray::concatenate(ndarray::Axis(0), &[old.view(), new.view()]).unwrap()
        };
        let keys = joined(cached(self.kv.keys(), first, d), &new_keys);
        let values = joined(cached(self.kv.values(), first, d), &new_values);
        let query = self.rows(1).row(0).to_vec();
        let seen = visible(first + m - 1, self.window);
        self.kv.prompt(keys.view(), values.view(), &query, seen.clone());
        self.start = seen.start;
        self.tail.restart(&self.kv, seen);
    }

    /// Feeds a token; returns what a step sees.
    fn feed(&mut self) -> Decoded {
        let (key, value) = (self.rows(1), self.rows(1));
        self.kv.extend(key.view(), value.view());
        let (n, d, r) = (self.kv.len(), self.d, self.shifts.len());
        Decoded {
            q: self.rows(r) * 3.0,
            keys: wide(cached(self.kv.keys(), n, d).view()),
            values: wide(cached(self.kv.values(), n, d).view()),
            seen: visible(n - 1, self.window),
        }
    }

    fn estimate(
        &mut self,
        at: &Decoded,
        attended: &[u32],
        reads: &mut Reads,
    ) -> Option<Vec<Option<Partial>>> {
        let step = Step {
            step: 0,
            visible: at.seen.clone(),
            candidates: at.seen.clone(),
            budget: attended.len(),
            q_pre: at.q.view(),
            q_rope: at.q.view(),
            kv: &self.kv,
        };
        self.tail.estimate(&step, attended, reads)
    }

    /// Checks one step that attends some of what it sees.
    fn step(&mut self) -> Result<(), String> {
        let at = self.feed();
        let mut attended: Vec<u32> = at.seen.clone().map(|p| p as u32).collect();
        attended.shuffle(&mut self.rng);
        attended.truncate(self.rng.gen_range(1..=attended.len()));
        attended.sort_unstable();
        let is_read = |p: &usize| attended.binary_search(&(*p as u32)).is_ok();
        let left: Vec<usize> = at.seen.clone().filter(|p| !is_read(p)).collect();
        let mut reads = Reads::new(64);
        let Some(partials) = self.estimate(&at, &attended, &mut reads) else {
            return if left.is_empty() {
                Ok(())
            } else {
                Err("no tail".to_owned())
            };
        };
        // Two sums in f64, and the rows that the sliding window has left behind.
        let dropped = std::mem::replace(&mut self.start, at.seen.start)..at.seen.start;
        let d = self.d;
        let widths = match &self.kind.to_string()[..] {
            "f32" => [4 * d, 4 * d, 0],
            "f16" | "bf16" => [2 * d, 2 * d, 0],
            "2bit" => {
                let row = d.div_ceil(4) + 4 * d.div_ceil(32);
                [row, row, d.div_ceil(8)]
            }
            other => panic!("rows in {other}"),
        };
        let sums = [(); 2].map(|()| Array::whole(8 * d));
        let rows = widths.map(|width| Array::items(width, dropped.clone()));
        let arrays: Vec<Array> = sums.into_iter().chain(rows).collect();
        check_counted(&arrays, &reads, 64)?;
        if left.is_empty() {
            return Err("a tail of nothing".to_owned());
        }
        let queries = wide(at.q.view());
        for (a, (partial, shift)) in partials.iter().zip(self.shifts.clone()).enumerate() {
            match (partial, shift) {
                (Some(partial), Some(shift)) => check(partial, &at, &queries[a], &left, f64::from(shift))?,
                (None, None) => {}
                _ => return Err(format!("query head {a}: {partial:?}, shift {shift:?}")),
            }
        }
        Ok(())
    }
}

/// The mean of some rows.
fn mean(rows: &Matrix, of: &[usize]) -> Vec<f64> {
    let sum = |c: usize| of.iter().map(|p| rows[*p][c]).sum::<f64>();
    (0..rows[0].len()).map(|c| sum(c) / of.len() as f64).collect()
}

fn check(partial: &Partial, at: &Decoded, q: &[f64], left: &[usize], shift: f64) -> Result<(), String> {
    let (key, value) = (mean(&at.keys, left), mean(&at.values, left));
    let n = left.len() as f64;
    let expected = n.ln() + score(q, &key) + shift;
    // Sums of all rows, in f64, of which the means are what is left.
    let size = |x: &Matrix| x.iter().flatten().fold(0.0f64, |m, v| m.max(v.abs()));
    let slack = |x: &Matrix| 1e-13 * size(x) * x.len() as f64;
    let bound = 2.0 * UNIT * expected.abs() + slack(&at.keys) * dot(q, q).sqrt();
    near("log mass", f64::from(partial.lse), expected, bound)?;
    for (own, expected) in partial.output.iter().zip(&value) {
        let bound = UNIT * expected.abs() + slack(&at.values);
        near("mean value", f64::from(*own), *expected, bound)?;
    }
    // Jensen: without its shift a tail never has more mass than the positions that it stands for.
    let scores: Vec<f64> = left.iter().map(|p| score(q, &at.keys[*p])).collect();
    if expected - shift <= log_sum_exp(&scores) + 1e-9 {
        Ok(())
    } else {
        Err("more mass than there is".to_owned())
    }
}

/// The tail against the definition, on random histories.
pub fn check_tail() {
    for seed in 0..300 {
        let mut case = Case::new(seed);
        let length = case.rng.gen_range(1..150);
        case.prompt(length);
        for i in 0..20 {
            if case.rng.gen_bool(0.1) {
                let length = case.rng.gen_range(1..30);
                case.prompt(length);
            }
            if case.rng.gen_bool(0.1) {
                // A trajectory goes on with a copy.
                case.tail = case.tail.clone();
            }
            case.step()
                .unwrap_or_else(|e| panic!("seed {seed}, step {i}: {e}"));
        }
    }
}

/// A tail of a single position without a shift is that position: nothing is lost. One of equal keys neither.
pub fn check_exact_tails() {
    let mut matters = 0;
    for (seed, alike) in (0..60).flat_map(|seed| [(seed, false), (seed, true)]) {
        let mut case = Case::new(seed);
        case.shifts.fill(Some(0.0));
        let kind = KvType::F32;
        case.kv = KvHead::new(kind, case.d, 0, Center::Median);
        case.tail = Tail::new(case.shifts.clone(), case.d, kind);
        case.window = None;
        case.prompt(30);
        if alike {
            let (key, value) = (case.rows(1), case.rows(9));
            let keys = Array2::from_shape_fn((9, case.d), |(_, c)| key[[0, c]]);
            case.kv.extend(keys.view(), value.view());
        }
        let at = case.feed();
        let n = at.seen.end as u32;
        // The last row is the current token; before it are those with equal keys.
        let left: Vec<u32> = if alike { (n - 10..n - 1).collect() } else { vec![7] };
        let attended: Vec<u32> = (0..n).filter(|p| !left.contains(p)).collect();
        let decode = |positions: &[u32]| {
            let mut out = Array2::zeros((case.shifts.len(), case.d));
            let (keys, values) = (case.kv.keys(), case.kv.values());
            let lse = attention::decode(at.q.view(), keys, values, positions, out.view_mut());
            (out, lse)
        };
        let (full, _) = decode(&at.seen.clone().map(|p| p as u32).collect::<Vec<_>>());
        let (own, lse) = decode(&attended);
        let partials = case.estimate(&at, &attended, &mut Reads::new(1)).unwrap();
        let mut lost = 0.0f32;
        for (a, partial) in partials.iter().enumerate() {
            let mut joined = own.row(a).to_vec();
            attention::merge(&mut joined, lse[a], partial.as_ref().unwrap());
            for ((joined, full), own) in joined.iter().zip(full.row(a)).zip(own.row(a)) {
                assert!((joined - full).abs() < 1e-5, "seed {seed}: {joined} {full}");
                lost = lost.max((own - full).abs());
            }
        }
        matters += usize::from(lost > 1e-2);
    }
    // Else joining nothing would do as well.
    assert!(matters > 60, "what was left out matters in {matters} cases");
}

//! What a method chooses and attends on the device, along a prompt and a few steps, against the CPU's method.
//!
//! Scores of the two differ in their last bits, so that near ties may fall either way. The CPU's method therefore runs
//! several times, with rows that differ by far more than rounding: what it always chooses must be chosen, and nothing
//! that it never chooses.

mod device;

use std::collections::BTreeSet;

use ndarray::{Array2, Array3, ArrayView2, Axis, s};
use rand::Rng;
use rand_chacha::ChaCha8Rng;

use self::device::{Chosen, Layer};
use super::case::{normals, rng, rounded, within};
use crate::compute::attention::visible;
use crate::compute::comparison::{Comparison, UNIT};
use crate::compute::cuda::driver::Driver;
use crate::error::Result;
use crate::kv::cuda::Shape;
use crate::kv::cuda::bounds::{self, Pair, Precision};
use crate::kv::packed::{Center, last_query};
use crate::kv::{Budget, KvHead, KvType, Limits, Qkv, StaticSet};
use crate::method::cuda::TALLIES;
use crate::method::{Method, Place, Prompt, Retriever, Selection, Step};
use crate::runner::attend;

/// Runs of the CPU's method: one on the given rows, the others on rows that differ by this share.
const RUNS: usize = 4;
const DIFFERENCE: f32 = 1.0 / (1 << 14) as f32;

/// Positions at the end of a prompt whose keys are such as the heads look for.
const LIKED: usize = 20;

/// A layer and what is asked of it.
#[derive(Clone, Copy, Debug)]
pub struct Setting {
    /// KV heads, query heads per KV head, and channels.
    pub sizes: [usize; 3],
    /// Element type of the cache.
    pub kv: KvType,
    /// Positions of the prompt.
    pub n: usize,
    /// Decode steps.
    pub steps: usize,
    /// How many positions may be chosen.
    pub budget: f64,
    /// How far the scores of the sinks are above the others', for a query head of each group and in odd steps for all.
    pub sinks_lead: f32,
}

impl Setting {
    fn total(&self) -> usize {
        self.n + self.steps
    }

    fn limits(&self) -> Limits {
        Limits {
            sinks: 4,
            // So short that steps choose among the keys of earlier steps.
            window: 2,
            model_window: None,
            budget: Budget::Fraction(self.budget),
        }
    }

    fn shape(&self) -> Result<Shape> {
        let [kv_heads, group, head_dim] = self.sizes;
        let shape = Shape {
            sequences: 1,
            kv_heads,
            group,
            head_dim,
            capacity: self.total(),
        };
        shape.checked()
    }

    /// Returns the static set of the token at position t.
    fn set(&self, t: usize) -> StaticSet {
        self.limits().static_set(t)
    }

    fn place(&self, kv_head: usize) -> Place {
        let [_, group, head_dim] = self.sizes;
        Place {
            layer: 0,
            kv_head,
            group,
            head_dim,
            limits: self.limits(),
            kv: self.kv,
        }
    }
}

/// Queries `[h,total,d]`, keys and values `[g,total,d]`, as the cache rounds them.
type Rows = Qkv<Array3<f32>>;

fn random_rows(setting: &Setting) -> Result<Rows> {
    let ([g, r, d], total) = (setting.sizes, setting.total());
    let mut rng = rng((setting.n * d) as u64);
    // A head likes the same keys in every step.
    let tastes = normals(&mut rng, g * r * d);
    let mut keys = normals(&mut rng, g * total * d);
    for (head, keys) in keys.chunks_mut(total * d).enumerate() {
        let group = &tastes[head * r * d..(head + 1) * r * d];
        // The last keys of the prompt and those of the steps are such, so that each of them decides.
        for (c, key) in keys.iter_mut().enumerate().skip((setting.n - LIKED) * d) {
            let taste: f32 = group.iter().skip(c % d).step_by(d).sum();
            *key = 0.3 * *key + 1.5 * taste / r as f32;
        }
    }
    let values = normals(&mut rng, g * total * d);
    let mut queries = normals(&mut rng, g * r * total * d);
    // The first channel is that of the sinks.
    let lead = (setting.sinks_lead * (d as f32).sqrt()).sqrt();
    for (head, queries) in queries.chunks_mut(total * d).enumerate() {
        let taste = &tastes[head * d..(head + 1) * d];
        for (t, query) in queries.chunks_mut(d).enumerate() {
            query.iter_mut().zip(taste).for_each(|(q, x)| *q = 0.3 * *q + *x);
            if lead > 0.0 {
                let looks = head % r == 0 || t % 2 == 1;
                query[0] = if looks { lead } else { 0.0 };
            }
        }
    }
    let sinks = setting.limits().sinks;
    if lead > 0.0 {
        let heads = keys.chunks_mut(total * d);
        let first = heads.flat_map(|head| head.chunks_mut(d).take(sinks));
        first.for_each(|key| key[0] = lead);
    }
    // The device rounds queries to the type of the rows that they attend.
    let cached = |values: Vec<f32>| match setting.kv.float() {
        Some(float) => rounded(float, &values),
        None => values,
    };
    let array = |heads, values| Array3::from_shape_vec((heads, total, d), values);
    Ok(Rows {
        q: array(g * r, cached(queries))?,
        k: array(g, cached(keys))?,
        v: array(g, cached(values))?,
    })
}

/// Returns the queries of a KV head, `[r,total,d]`.
fn queries_of(rows: &Rows, kv_head: usize, r: usize) -> Array3<f32> {
    rows.q
        .slice(s![kv_head * r..(kv_head + 1) * r, .., ..])
        .to_owned()
}

/// The CPU's method on one KV head. Its rows may differ a little from those in the cache.
struct Replica {
    kv: KvHead,
    retriever: Box<dyn Retriever>,
    /// `[total,d]`.
    keys: Array2<f32>,
    /// `[r,total,d]`.
    queries: Array3<f32>,
}

impl Replica {
    /// Feeds the prompt.
    fn prompted(
        method: &dyn Method,
        setting: &Setting,
        rows: &Rows,
        kv_head: usize,
        differ: Option<&mut ChaCha8Rng>,
    ) -> Self {
        let ([_, r, d], n) = (setting.sizes, setting.n);
        let (mut keys, mut queries) = (
            rows.k.index_axis(Axis(0), kv_head).to_owned(),
            queries_of(rows, kv_head, r),
        );
        let mut kv = KvHead::new(setting.kv, d, setting.total(), Center::Median);
        let own = |rows: &Array3<f32>| rows.slice(s![kv_head, ..n, ..]).to_owned();
        let seen = visible(n - 1, None);
        let query = last_query(queries.slice(s![.., ..n, ..]));
        kv.prompt(own(&rows.k).view(), own(&rows.v).view(), &query, seen);
        if let Some(rng) = differ {
            let mut change = |x: &mut f32| *x *= 1.0 + DIFFERENCE * rng.gen_range(-1.0..1.0f32);
            keys.iter_mut().for_each(&mut change);
            queries.iter_mut().for_each(&mut change);
        }
        let mut retriever = method.head(&setting.place(kv_head));
        retriever.prefill(&Prompt {
            first: 0,
            k_pre: keys.slice(s![..n, ..]),
            q_rope: queries.slice(s![.., ..n, ..]),
            keys: keys.slice(s![..n, ..]),
            values: own(&rows.v).view(),
            kv: &kv,
        });
        Self {
            kv,
            retriever,
            keys,
            queries,
        }
    }

    /// Feeds the token at position t; returns the selection and the attention output, `[r,d]`.
    fn step(
        &mut self,
        setting: &Setting,
        t: usize,
        [key, value]: [ArrayView2<f32>; 2],
    ) -> (Selection, Array2<f32>) {
        let set = setting.set(t);
        let own = self.keys.slice(s![t..t + 1, ..]);
        self.kv.extend(key, value);
        self.retriever.append(own, own);
        let queries = self.queries.index_axis(Axis(1), t).to_owned();
        let step = Step {
            step: t - setting.n,
            visible: set.visible(),
            candidates: set.candidates.clone(),
            budget: setting.limits().budget.positions(set.visible().len()),
            q_pre: queries.view(),
            q_rope: queries.view(),
            kv: &self.kv,
        };
        let mut out = Array2::zeros(queries.dim());
        let selection = self.retriever.select(&step);
        attend(&step, &set, &selection, self.retriever.as_mut(), out.view_mut());
        (selection, out)
    }
}

/// Runs a method on the device and on the CPU, and compares what they choose and attend.
pub fn check(driver: &dyn Driver, method: &dyn Method, setting: &Setting) -> Result<Comparison> {
    let rows = random_rows(setting)?;
    let layer = Layer {
        driver,
        setting,
        rows: &rows,
    };
    let found = layer.run(method)?;
    let mut all = Comparison::default();
    let mut tallies = Some([0.0; TALLIES]);
    for kv_head in 0..setting.sizes[0] {
        let mut rng = rng(kv_head as u64);
        let replica = |run| Replica::prompted(method, setting, &rows, kv_head, (run > 0).then_some(&mut rng));
        let mut replicas: Vec<Replica> = (0..RUNS).map(replica).collect();
        for (number, chosen) in found.steps.iter().enumerate() {
            let t = setting.n + number;
            let own = |rows: &Array3<f32>| rows.slice(s![kv_head, t..t + 1, ..]).to_owned();
            let (key, value) = (own(&rows.k), own(&rows.v));
            let runs: Vec<_> = replicas
                .iter_mut()
                .map(|replica| replica.step(setting, t, [key.view(), value.view()]))
                .collect();
            let mut step = Comparison::default();
            if positions(&mut step, setting, t, &chosen.lists[kv_head], &runs) {
                outputs(&mut step, setting, t, kv_head, chosen, &replicas[0], &runs)?;
            }
            let is_same = chosen.lists[kv_head] == runs[0].0.positions;
            tallies = tallies.filter(|_| is_same);
            if let Some(sums) = &mut tallies {
                add_figures(sums, setting, t, &runs[0].0);
            }
            all.add(within(step, &format!("step {number}, KV head {kv_head}")));
        }
    }
    // Where a near tie fell the other way, the figures may differ.
    if let Some(expected) = tallies {
        for (i, expected) in expected
            .into_iter()
            .enumerate()
            .filter(|(i, _)| *i != 1 || !found.is_oracle)
        {
            all.close(found.tallies[i], expected, 1e-9 * expected.abs(), || {
                format!("figure {i} of what the steps read")
            });
        }
    }
    Ok(all)
}

/// Compares the chosen positions with those of the CPU's runs; tells whether they are candidates.
fn positions(
    all: &mut Comparison,
    setting: &Setting,
    t: usize,
    chosen: &[u32],
    runs: &[(Selection, Array2<f32>)],
) -> bool {
    let set = setting.set(t);
    let most = setting.limits().budget.positions(set.visible().len());
    let ascending = chosen.windows(2).all(|pair| pair[0] < pair[1]);
    let inside = chosen.iter().all(|p| set.candidates.contains(&(*p as usize)));
    let is_valid = ascending && inside && chosen.len() <= most;
    let expected = format!("at most {most} of the positions {:?}, ascending", set.candidates);
    all.holds(is_valid, &chosen, &expected, || "the choice".to_owned());
    if !is_valid {
        return false;
    }
    let sets = || {
        runs.iter()
            .map(|(selection, _)| selection.positions.iter().copied())
    };
    let ever: BTreeSet<u32> = sets().flatten().collect();
    let is_in_all = |p: &u32| sets().all(|mut set| set.any(|other| other == *p));
    let always: BTreeSet<u32> = ever.iter().copied().filter(is_in_all).collect();
    // Otherwise the comparison would say little.
    let undecided = ever.len() - always.len();
    all.holds(
        4 * undecided <= most,
        &undecided,
        "at most a quarter of the budget",
        || "positions that the CPU's method chooses on some of the inputs only".to_owned(),
    );
    let chosen: BTreeSet<u32> = chosen.iter().copied().collect();
    let (missing, wrong) = (&always - &chosen, &chosen - &ever);
    all.equal(&missing, &BTreeSet::new(), || {
        "positions that are missing from the choice".to_owned()
    });
    all.equal(&wrong, &BTreeSet::new(), || {
        "positions that should not be chosen".to_owned()
    });
    true
}

/// Compares the outputs of a KV head with f64 over what the device chose, and those of bypassed heads with the CPU's.
fn outputs(
    all: &mut Comparison,
    setting: &Setting,
    t: usize,
    kv_head: usize,
    chosen: &Chosen,
    replica: &Replica,
    runs: &[(Selection, Array2<f32>)],
) -> Result<()> {
    let [_, r, d] = setting.sizes;
    let (mut key, mut value) = (vec![0.0; d], vec![0.0; d]);
    let mut pair = |p: u32| -> Pair {
        let kv = &replica.kv;
        (
            kv.keys().row(p as usize, &mut key).to_vec(),
            kv.values().row(p as usize, &mut value).to_vec(),
        )
    };
    let attended = setting.set(t).merge(&chosen.lists[kv_head]);
    let pairs: Vec<Pair> = attended.into_iter().map(&mut pair).collect();
    let precision = match replica.kv.signs() {
        Some(signs) => Precision::packed(signs.centers, &pairs),
        None => Precision::plain(setting.kv.float().unwrap_or(crate::float::Float::F32)),
    };
    let queries = replica.queries.index_axis(Axis(1), t);
    for (a, query) in queries.outer_iter().enumerate() {
        let at = (kv_head * r + a) * d;
        let out = &chosen.out[at..at + d];
        let bypasses = runs
            .iter()
            .filter(|(selection, _)| is_bypassed(selection, a))
            .count();
        let mut head = Comparison::default();
        if bypasses == 0 {
            bounds::attended(&mut head, &precision, &query.to_vec(), &pairs, out, None);
        } else if bypasses == runs.len() {
            let expected = runs[0].1.row(a);
            let bound = bypass_bound(setting, t, &query.to_vec(), &mut pair);
            for (j, (found, expected)) in out.iter().zip(&expected).enumerate() {
                head.close(f64::from(*found), f64::from(*expected), bound, || {
                    format!("channel {j}, bypassed")
                });
            }
        }
        all.add(within(head, &format!("query head {a} of the group")));
    }
    Ok(())
}

/// Returns how much the outputs of two bypassed heads may differ, one of the device and one of the CPU, both in f32.
///
/// A score is a sum of d products, off by at most `delta`, and so is the largest one; sums have n terms. Both log-sum-exps,
/// which are at most the largest score plus log n, are rounded to f32.
fn bypass_bound(setting: &Setting, t: usize, query: &[f32], pair: &mut dyn FnMut(u32) -> Pair) -> f64 {
    let (d, n) = (query.len() as f64, (t + 1) as f64);
    let (mut size, mut largest) = (0.0f64, 0.0f32);
    for p in setting.set(t).visible() {
        let (key, value) = pair(p as u32);
        let products = query.iter().zip(&key).map(|(q, k)| f64::from(q * k).abs());
        size = size.max(products.sum::<f64>() / d.sqrt());
        largest = value.iter().fold(largest, |m, v| m.max(v.abs()));
    }
    let delta = 2.0 * (d + 8.0) * UNIT * size;
    let relative = (2.0 * delta).exp_m1() + (n + 64.0) * 2.0 * UNIT;
    let exponents = 4.0 * UNIT * (size + n.ln());
    4.0 * (relative + exponents.exp_m1()) * f64::from(largest)
}

fn is_bypassed(selection: &Selection, a: usize) -> bool {
    selection.bypassed.get(a).is_some_and(Option::is_some)
}

/// Adds what [`CudaIndex::tally`](crate::method::cuda::CudaIndex::tally) adds for this selection of one KV head.
fn add_figures(sums: &mut [f64; TALLIES], setting: &Setting, t: usize, selection: &Selection) {
    let ([g, r, _], set) = (setting.sizes, setting.set(t));
    let (n, heads) = (set.visible().len() as f64, g as f64);
    let bypassed = selection.bypassed.iter().flatten().count();
    let attended = if bypassed == r {
        set.sinks.len()
    } else {
        set.len() + selection.positions.len()
    };
    let is_full = bypassed == 0 && attended == set.visible().len();
    let (rows, ranked) = (attended as f64, selection.ranked.len() as f64);
    let figures = [
        (rows + ranked / 2.0) / n / heads,
        selection.products as f64 / (n * r as f64) / heads,
        bypassed as f64 / r as f64 / heads,
        rows,
        ranked,
        f64::from(u8::from(is_full)),
        bypassed as f64,
    ];
    sums.iter_mut()
        .zip(figures)
        .for_each(|(sum, figure)| *sum += figure);
}

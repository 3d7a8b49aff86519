//! Attention of one token over cached rows against f64, with a derived bound.

use half::{bf16, f16};
use kvsmith::compute::cuda::buffer::Buffer;
use kvsmith::compute::cuda::driver::Driver;
use kvsmith::float::Float;
use kvsmith::kv::Budget;
use kvsmith::kv::StaticSet;
use kvsmith::kv::cuda::attend::{Attention, LayerRows};
use kvsmith::kv::cuda::{Limits, Positions, Selection, Shape};
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::normals;

/// A cache, and what is attended of it.
#[derive(Clone)]
pub struct Case {
    pub name: String,
    pub float: Float,
    pub shape: Shape,
    /// Positions per sequence; later sequences have a few fewer.
    pub n: usize,
    pub model_window: Option<usize>,
    pub sinks: usize,
    pub window: usize,
    /// Most positions chosen per KV head; none for everything visible.
    pub most: Option<usize>,
    /// What keys are scaled by; large ones make a few positions count alone.
    pub scale: f32,
}

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let mut add = |float, [b, g, r, d]: [usize; 4], n: usize, most: Option<usize>, change: fn(&mut Case)| {
        let mut case = Case {
            name: String::new(),
            float,
            shape: Shape {
                sequences: b,
                kv_heads: g,
                group: r,
                head_dim: d,
                capacity: n + 3,
            },
            n,
            model_window: None,
            sinks: 4,
            window: 64,
            most,
            scale: 1.0,
        };
        change(&mut case);
        let mode = case.most.map_or("dense".to_owned(), |most| format!("most{most}"));
        case.name = format!("{float:?}::b{b}_g{g}_r{r}_d{d}_n{n}_{mode}").to_lowercase();
        if case.model_window.is_some() {
            case.name += "_sliding";
        }
        if case.scale != 1.0 {
            case.name += &format!("_scale{}", case.scale);
        }
        cases.push(case);
    };
    for float in [Float::F32, Float::F16, Float::Bf16] {
        for d in [64, 80, 96, 128] {
            add(float, [1, 2, 4, d], 300, Some(100), |_| ());
        }
        // Channels that no kernel has by itself; one query head; a whole tile of them.
        add(float, [1, 1, 1, 40], 130, Some(20), |_| ());
        add(float, [2, 1, 16, 64], 200, None, |_| ());
        add(float, [2, 2, 5, 128], 333, Some(57), |case| {
            case.model_window = Some(200)
        });
        add(float, [1, 1, 4, 128], 1, None, |_| ());
        add(float, [1, 2, 4, 64], 30, Some(9), |case| case.window = 7);
        // So many heads that one block meets tile after tile.
        add(float, [2, 8, 2, 64], 400, Some(250), |_| ());
        add(float, [1, 12, 1, 128], 290, None, |_| ());
        // No static set, and heads that chose nothing.
        add(float, [2, 2, 3, 64], 100, Some(3), |case| {
            (case.sinks, case.window) = (0, 0)
        });
        add(float, [1, 1, 4, 64], 500, None, |case| case.scale = 30.0);
        add(float, [1, 1, 4, 64], 500, None, |case| case.scale = 0.01);
    }
    // Accumulation over a long context.
    add(Float::Bf16, [1, 1, 4, 128], 8192, None, |_| ());
    add(Float::F16, [1, 1, 4, 128], 8192, Some(2000), |_| ());
    add(Float::Bf16, [1, 1, 1, 64], 131_072, None, |_| ());
    add(Float::F32, [1, 1, 1, 64], 131_072, None, |_| ());
    cases
}

/// What rounding does besides f32 sums.
pub struct Precision {
    /// Relative errors of softmax weights, and of values.
    weights: f64,
    values: f64,
    /// Absolute error of a small weight.
    tiny: f64,
    /// Relative error of the product of a query's and a centred key's channel.
    products: f64,
    /// Absolute error of a query's channel, relative to the largest one as scaled, times the largest key's.
    queries: f64,
    /// What keys are centred around, and their largest distance from it; empty for keys that are not.
    centre: Vec<f32>,
    alpha: Vec<f32>,
}

impl Precision {
    /// Rows of a type.
    pub fn plain(float: Float) -> Self {
        Self {
            weights: match float {
                Float::F32 => 0.0,
                Float::F16 => 0.5f64.powi(11),
                Float::Bf16 => 0.5f64.powi(8),
            },
            values: 0.0,
            tiny: if float == Float::F16 { 0.5f64.powi(25) } else { 0.0 },
            products: 0.0,
            queries: 0.0,
            centre: Vec::new(),
            alpha: Vec::new(),
        }
    }

    /// The 2-bit cache: everything is rounded to f16, keys and queries relative to the scale of the channel.
    pub fn packed(centre: &[f32], attended: &[(Vec<f32>, Vec<f32>)]) -> Self {
        let distance = |c: usize| {
            let keys = attended.iter().map(|(key, _)| (key[c] - centre[c]).abs());
            keys.fold(0.0, f32::max)
        };
        Self {
            weights: 0.5f64.powi(11),
            values: 0.5f64.powi(11),
            tiny: 0.5f64.powi(25),
            products: 2.1 * 0.5f64.powi(11),
            queries: 0.5f64.powi(25),
            alpha: (0..centre.len()).map(distance).collect(),
            centre: centre.to_vec(),
        }
    }

    /// How far rounding moves a score, before the factor 1 / sqrt(d).
    fn score_error(&self, query: &[f32], key: &[f32]) -> f64 {
        let mut error = 0.0;
        let (mut largest, mut channels) = (0.0f64, 0.0);
        for (c, centre) in self.centre.iter().enumerate() {
            let centred = f64::from(key[c]) - f64::from(*centre);
            error += self.products * (f64::from(query[c]) * centred).abs();
            largest = largest.max(f64::from(query[c] * self.alpha[c]).abs());
            channels += 1.0;
        }
        error + self.queries * largest * channels
    }
}

pub fn round(float: Float, x: f32) -> f32 {
    match float {
        Float::F32 => x,
        Float::F16 => f16::from_f32(x).to_f32(),
        Float::Bf16 => bf16::from_f32(x).to_f32(),
    }
}

/// The lists of every KV head: some of the candidates, ascending.
fn draw_lists(case: &Case, lens: &[usize], most: usize, rng: &mut ChaCha8Rng) -> Vec<Vec<u32>> {
    let mut lists = Vec::new();
    for len in lens {
        let set = StaticSet::at(len - 1, case.model_window, case.sinks, case.window);
        for head in 0..case.shape.kv_heads {
            let mut all: Vec<u32> = set.candidates.clone().map(|p| p as u32).collect();
            all.shuffle(rng);
            all.truncate(most.saturating_sub(head * (1 + rng.r#gen::<usize>() % most)));
            all.sort_unstable();
            lists.push(all);
        }
    }
    lists
}

pub fn check(driver: &dyn Driver, case: &Case) {
    let mut rng = ChaCha8Rng::seed_from_u64(case.n as u64);
    let Shape {
        sequences: b,
        kv_heads: g,
        group: r,
        head_dim: d,
        ..
    } = case.shape;
    let n = case.n;
    let lens: Vec<usize> = (0..b).map(|s| n - s.min(n - 1) * 3).collect();
    let rounded =
        |values: Vec<f32>| -> Vec<f32> { values.into_iter().map(|v| round(case.float, v)).collect() };
    let queries = rounded(normals(&mut rng, b * g * r * d));
    let mut keys = normals(&mut rng, b * g * n * d);
    keys.iter_mut().for_each(|k| *k *= case.scale);
    let (keys, values) = (rounded(keys), rounded(normals(&mut rng, b * g * n * d)));

    let limits = Limits {
        sinks: case.sinks,
        window: case.window,
        model_window: case.model_window,
        budget: Budget::Count(case.most.unwrap_or(2)),
    };
    // All sequences get n rows; the shorter ones then take their last ones back.
    let mut positions = Positions::new(driver, case.shape, limits).unwrap();
    let rows = LayerRows::new(driver, case.shape, case.float).unwrap();
    let upload = |values: &[f32]| Buffer::of(driver, "rows", values).unwrap();
    positions.advance(n).unwrap();
    rows.append(&upload(&keys), &upload(&values), n, &positions)
        .unwrap();
    let lens32: Vec<u32> = lens.iter().map(|n| *n as u32).collect();
    positions.set(&lens32).unwrap();
    positions.advance(0).unwrap();
    let lists = case.most.map(|most| draw_lists(case, &lens, most, &mut rng));
    let chosen = lists
        .as_ref()
        .map(|lists| Selection::of(driver, case.shape, case.most.unwrap(), lists).unwrap());
    let attention = Attention::new(driver, case.shape).unwrap();
    let run = || {
        attention
            .attend(&upload(&queries), &rows, &positions, chosen.as_ref())
            .unwrap();
        (attention.output().unwrap(), attention.lse().unwrap())
    };
    let (out, lse) = run();
    assert_eq!((&out, &lse), (&run().0, &run().1), "the same twice");
    for (at, query) in queries.chunks(d).enumerate() {
        let (head, s) = (at / r, at / r / g);
        let set = StaticSet::at(lens[s] - 1, case.model_window, case.sinks, case.window);
        let visible = set.visible();
        let attended: Vec<usize> = match &lists {
            None => visible.collect(),
            Some(lists) => {
                let list = lists[head].iter().map(|p| *p as usize);
                let sinks = visible.start..set.candidates.start;
                sinks.chain(list).chain(set.candidates.end..visible.end).collect()
            }
        };
        let row = |of: &[f32], p: usize| of[(head * n + p) * d..(head * n + p + 1) * d].to_vec();
        let attended: Vec<_> = attended
            .iter()
            .map(|p| (row(&keys, *p), row(&values, *p)))
            .collect();
        compare(
            &Precision::plain(case.float),
            query,
            &attended,
            &out[at * d..(at + 1) * d],
            Some(lse[at]),
        );
    }
}

/// Checks one query head over the keys and values that it attends.
///
/// Scores are sums of d products in f32, of numbers that were rounded before, so they are off by at most `delta`, and
/// weights by exp(2 delta) - 1. A weight is then rounded (in f16 with an absolute error of 2^-25 where it is small),
/// and the sum over n of them is one in f32.
pub fn compare(
    precision: &Precision,
    query: &[f32],
    attended: &[(Vec<f32>, Vec<f32>)],
    out: &[f32],
    lse: Option<f32>,
) {
    let (d, n) = (query.len() as f64, attended.len() as f64);
    if attended.is_empty() {
        assert!(out.iter().all(|x| *x == 0.0) && lse.is_none_or(|lse| lse == f32::NEG_INFINITY));
        return;
    }
    let epsilon = 0.5f64.powi(24);
    let mut scores = Vec::new();
    let (mut size, mut rounding) = (0.0f64, 0.0f64);
    for (key, _) in attended {
        rounding = rounding.max(precision.score_error(query, key) / d.sqrt());
        let products = query.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(*k));
        scores.push(products.clone().sum::<f64>() / d.sqrt());
        size = size.max(products.map(f64::abs).sum::<f64>() / d.sqrt());
    }
    let delta = 2.0 * (d + 8.0) * epsilon * size + rounding;
    let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = scores.iter().map(|s| (s - top).exp()).sum();
    if let Some(lse) = lse {
        let exact = top + sum.ln();
        let off = (f64::from(lse) - exact).abs();
        let bound = delta + (n + 16.0) * 2.0 * epsilon + 4.0 * epsilon * exact.abs();
        assert!(off <= bound, "lse {lse}, exact {exact}, bound {bound}");
    }
    for (j, out) in out.iter().enumerate() {
        let (mut exact, mut magnitude, mut largest) = (0.0, 0.0, 0.0f64);
        for (score, (_, value)) in scores.iter().zip(attended) {
            let weight = (score - top).exp() / sum;
            let value = f64::from(value[j]);
            exact += weight * value;
            magnitude += weight * value.abs();
            largest = largest.max(value.abs());
        }
        let tiny = precision.tiny * n / sum * largest;
        let rounding = precision.weights + precision.values;
        let bound = magnitude * (rounding + 4.0 * delta + 2.0 * (n + 32.0) * epsilon) + tiny;
        assert!(
            bound <= 0.05 * largest + 1e-6,
            "a bound that says nothing: {bound} of {largest}"
        );
        let off = (f64::from(*out) - exact).abs();
        assert!(off <= bound, "channel {j}: {out}, exact {exact}, bound {bound}");
    }
}

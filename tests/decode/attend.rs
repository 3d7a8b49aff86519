//! Attention of one token over cached rows against f64, with a derived bound.

use kvsmith::compute::cuda::driver::Driver;
use kvsmith::float::Float;
use kvsmith::kv::Budget;
use kvsmith::kv::cuda::attend::{Attention, LayerRows};
use rand::Rng;

use super::cases::{self, Batch, UNIT, normals, sizes_name, some_of, twice, upload};
use super::held::{output, selection};

/// With the most positions chosen per KV head; none for everything visible. Its scale is that of the keys.
pub type Case = cases::Case<Option<usize>>;

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let mut add = |float, sizes, n: usize, most: Option<usize>, change: fn(Case) -> Case| {
        let mode = most.map_or("dense".to_owned(), |most| format!("most{most}"));
        let name = format!("{}_n{n}_{mode}", sizes_name(float, sizes));
        let case = Case::new(name, sizes, n, 3, most).float(float).static_set(4, 64);
        let mut case = change(case.budget(Budget::Count(most.unwrap_or(2))));
        if case.limits.model_window.is_some() {
            case.name += "_sliding";
        }
        if case.scale != 1.0 {
            case.name += &format!("_scale{}", case.scale);
        }
        cases.push(case);
    };
    let plain = |case| case;
    for float in [Float::F32, Float::F16, Float::Bf16] {
        for d in [64, 80, 96, 128] {
            add(float, [1, 2, 4, d], 300, Some(100), plain);
        }
        // Channels that no kernel has by itself; one query head; a whole tile of them.
        add(float, [1, 1, 1, 40], 130, Some(20), plain);
        add(float, [2, 1, 16, 64], 200, None, plain);
        add(float, [2, 2, 5, 128], 333, Some(57), |case| {
            case.model_window(200)
        });
        add(float, [1, 1, 4, 128], 1, None, plain);
        add(float, [1, 2, 4, 64], 30, Some(9), |case| case.static_set(4, 7));
        // Enough heads that one block takes tile after tile.
        add(float, [2, 8, 2, 64], 400, Some(250), plain);
        add(float, [1, 12, 1, 128], 290, None, plain);
        // No static set, and heads that chose nothing.
        add(float, [2, 2, 3, 64], 100, Some(3), |case| case.static_set(0, 0));
        add(float, [1, 1, 4, 64], 500, None, |case| case.scale(30.0));
        add(float, [1, 1, 4, 64], 500, None, |case| case.scale(0.01));
    }
    // Accumulation over a long context.
    add(Float::Bf16, [1, 1, 4, 128], 8192, None, plain);
    add(Float::F16, [1, 1, 4, 128], 8192, Some(2000), plain);
    add(Float::Bf16, [1, 1, 1, 64], 131_072, None, plain);
    add(Float::F32, [1, 1, 1, 64], 131_072, None, plain);
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

pub fn check(driver: &dyn Driver, case: &Case) {
    let mut rng = case.rng();
    let ([b, g, r, d], n) = (case.sizes(), case.n);
    let queries = case.rounded(normals(&mut rng, b * g * r * d));
    let mut keys = normals(&mut rng, b * g * n * d);
    keys.iter_mut().for_each(|k| *k *= case.scale);
    let (keys, values) = (case.rounded(keys), case.rounded(normals(&mut rng, b * g * n * d)));

    // All sequences get n rows; the shorter ones then take their last ones back.
    let mut batch = Batch::new(driver, case);
    let rows = LayerRows::new(driver, case.shape, case.float).unwrap();
    batch.append(&rows, &keys, &values);
    batch.set(&(0..b).map(|s| n - s.min(n - 1) * 3).collect::<Vec<_>>());
    batch.advance(0);
    let lists = case.special.map(|most| {
        // The first head of a sequence chooses that many, others fewer.
        let list = |at: usize| {
            let fewer = at % g * (1 + rng.r#gen::<usize>() % most);
            some_of(
                &mut rng,
                batch.set_of(at).0.candidates,
                most.saturating_sub(fewer),
            )
        };
        (0..b * g).map(list).collect::<Vec<_>>()
    });
    let chosen = lists
        .as_ref()
        .map(|lists| selection(driver, case.shape, case.special.unwrap(), lists));
    let attention = Attention::new(driver, case.shape).unwrap();
    let (out, lse) = twice(|| {
        let queries = upload(driver, &queries);
        attention
            .attend(&queries, &rows, &batch.positions, chosen.as_ref())
            .unwrap();
        (output(&attention), attention.lse.read().unwrap())
    });
    for (at, query) in queries.chunks(d).enumerate() {
        let head = at / r;
        let row = |of: &[f32], p: usize| of[(head * n + p) * d..(head * n + p + 1) * d].to_vec();
        let attended = batch.attended(head, lists.as_ref().map(|lists| &lists[head][..]));
        let attended: Vec<_> = attended
            .into_iter()
            .map(|p| (row(&keys, p), row(&values, p)))
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
    let mut scores = Vec::new();
    let (mut size, mut rounding) = (0.0f64, 0.0f64);
    for (key, _) in attended {
        rounding = rounding.max(precision.score_error(query, key) / d.sqrt());
        let products = query.iter().zip(key).map(|(q, k)| f64::from(*q) * f64::from(*k));
        scores.push(products.clone().sum::<f64>() / d.sqrt());
        size = size.max(products.map(f64::abs).sum::<f64>() / d.sqrt());
    }
    let delta = 2.0 * (d + 8.0) * UNIT * size + rounding;
    let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = scores.iter().map(|s| (s - top).exp()).sum();
    if let Some(lse) = lse {
        let exact = top + sum.ln();
        let off = (f64::from(lse) - exact).abs();
        let bound = delta + (n + 16.0) * 2.0 * UNIT + 4.0 * UNIT * exact.abs();
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
        let bound = magnitude * (rounding + 4.0 * delta + 2.0 * (n + 32.0) * UNIT) + tiny;
        assert!(
            bound <= 0.05 * largest + 1e-6,
            "a bound that says nothing: {bound} of {largest}"
        );
        let off = (f64::from(*out) - exact).abs();
        assert!(off <= bound, "channel {j}: {out}, exact {exact}, bound {bound}");
    }
}

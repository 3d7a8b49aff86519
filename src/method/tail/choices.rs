//! Rules that stand for the choices of the methods, and the distance of a step under each rule from full attention, for
//! any shift of the tail.

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::compute::simd;
use crate::kv::{Budget, StaticSet};
use crate::method::best::largest;

/// A rule by which a group of query heads chooses positions besides the static set.
#[derive(Clone, Copy, Debug)]
pub struct Rule {
    /// The name in the manifest and in quality reports.
    pub name: &'static str,
    /// The share of the visible context that the rule chooses; `None` chooses nothing.
    budget: Option<f64>,
    /// Standard deviation of the normal noise that is added to scores: how imprecisely an index knows them.
    noise: f64,
}

/// The rules that every fit uses.
pub const RULES: [Rule; 5] = [
    Rule::new("static", None, 0.0),
    Rule::new("top_05", Some(0.05), 0.0),
    Rule::new("top_20", Some(0.20), 0.0),
    Rule::new("noisy_1_05", Some(0.05), 1.0),
    Rule::new("noisy_2_05", Some(0.05), 2.0),
];

impl Rule {
    const fn new(name: &'static str, budget: Option<f64>, noise: f64) -> Self {
        Self { name, budget, noise }
    }
}

/// The error of one query's output under one choice, as a function of the tail's shift.
///
/// With a = o_S - o, c = v_T - o_S and the tail's weight w, the error of the output with the tail is a + w c.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Errors {
    /// |a|^2 / |o|^2: the error without a tail.
    off: f64,
    /// a . c / |o|^2.
    cross: f64,
    /// |c|^2 / |o|^2.
    square: f64,
    /// l_T - l_S, for a shift of 0.
    gap: f64,
}

impl Errors {
    /// Returns the squared error of the output, divided by the squared norm of the exact output; `None` means no tail.
    pub fn at(&self, shift: Option<f64>) -> f64 {
        let weight = shift.map_or(0.0, |shift| 1.0 / (1.0 + (-(self.gap + shift)).exp()));
        // Rounding may make a value of zero negative.
        (self.off + weight * (2.0 * self.cross + weight * self.square)).max(0.0)
    }
}

/// One row of the text as the query heads of one KV head see it.
pub struct Row<'a> {
    /// The static set and the candidates, as positions within the block.
    pub set: StaticSet,
    /// Rotated keys of the block up to and including the row, `[n,d]`.
    pub keys: &'a [f32],
    /// Values of the same positions, `[n,d]`.
    pub values: &'a [f32],
    /// Rotated queries divided by sqrt(d): r slices of length d.
    pub queries: Vec<&'a [f32]>,
    /// The seed of the noise.
    pub seed: u64,
}

/// The positions that a choice leaves out.
struct Rest {
    /// The sum of their values, `[d]`.
    sum: Vec<f64>,
    count: usize,
}

/// The full attention of one query.
struct Exact {
    /// e^(score - largest score) for every visible position.
    weights: Vec<f64>,
    /// score - largest score, for every visible position.
    scores: Vec<f64>,
    /// The output, `[d]`.
    output: Vec<f64>,
}

impl Row<'_> {
    /// Returns the errors of every rule and query head, `[rules][r]`. A choice that leaves nothing out has errors of
    /// zero.
    ///
    /// # Numerics
    /// Products in f32, everything else in f64.
    pub fn errors(&self) -> Vec<Vec<Errors>> {
        let exact: Vec<Exact> = self.queries.iter().map(|q| self.exact(q)).collect();
        let all: Vec<usize> = self.set.visible().collect();
        let total = self.sum(&all, |_| 1.0);
        let noise = self.noise();
        let errors = RULES.iter().map(|rule| {
            let attended = self.attended(rule, &exact, &noise);
            let read = self.sum(&attended, |_| 1.0);
            let rest = Rest {
                sum: total.iter().zip(read).map(|(all, read)| all - read).collect(),
                count: all.len() - attended.len(),
            };
            let of = |exact| self.errors_of(exact, &attended, &rest);
            exact.iter().map(of).collect()
        });
        errors.collect()
    }

    fn row<'s>(&self, rows: &'s [f32], position: usize) -> &'s [f32] {
        let d = self.queries[0].len();
        &rows[position * d..(position + 1) * d]
    }

    /// Returns the weighted sum of the values at some positions, `[d]`.
    fn sum(&self, positions: &[usize], weight: impl Fn(usize) -> f64) -> Vec<f64> {
        let mut sum = vec![0.0; self.queries[0].len()];
        for p in positions {
            simd::axpy_f64(weight(*p), self.row(self.values, *p), &mut sum);
        }
        sum
    }

    fn exact(&self, query: &[f32]) -> Exact {
        let visible = self.set.visible();
        let products = visible.clone().map(|p| simd::dot(query, self.row(self.keys, p)));
        let products: Vec<f64> = products.map(f64::from).collect();
        let max = products.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let scores: Vec<f64> = products.iter().map(|s| s - max).collect();
        let weights: Vec<f64> = scores.iter().map(|s| s.exp()).collect();
        let mass: f64 = weights.iter().sum();
        let all: Vec<usize> = visible.clone().collect();
        let output = self.sum(&all, |p| weights[p - visible.start] / mass);
        Exact {
            weights,
            scores,
            output,
        }
    }

    /// Draws a standard normal number per candidate. It is the same for all query heads, since an index errs about
    /// keys.
    fn noise(&self) -> Vec<f64> {
        let mut rng = ChaCha8Rng::seed_from_u64(self.seed);
        let n = self.set.candidates.len();
        let mut noise = Vec::with_capacity(n + 1);
        // The Box-Muller method draws two numbers at a time.
        while noise.len() < n {
            let radius = (-2.0 * (1.0 - rng.r#gen::<f64>()).ln()).sqrt();
            let (sin, cos) = (std::f64::consts::TAU * rng.r#gen::<f64>()).sin_cos();
            noise.extend([radius * cos, radius * sin]);
        }
        noise
    }

    /// Returns the static set and the candidates with the largest probability by noisy scores, summed over the query
    /// group.
    fn attended(&self, rule: &Rule, exact: &[Exact], noise: &[f64]) -> Vec<usize> {
        let (visible, candidates) = (self.set.visible(), self.set.candidates.clone());
        let positions = |budget| Budget::Fraction(budget).positions(visible.len());
        let budget = rule.budget.map_or(0, positions).min(candidates.len());
        let sinks = self.set.sinks.clone();
        if budget == 0 {
            return sinks.chain(self.set.window.clone()).collect();
        }
        let first = candidates.start - visible.start;
        let factors: Vec<f64> = match rule.noise {
            0.0 => vec![1.0; candidates.len()],
            deviation => noise.iter().map(|z| (deviation * z).exp()).collect(),
        };
        let mut mass = vec![0.0; candidates.len()];
        for exact in exact {
            let own = &exact.weights[first..first + candidates.len()];
            let noisy: Vec<f64> = own.iter().zip(&factors).map(|(w, f)| w * f).collect();
            let all: f64 =
                exact.weights.iter().sum::<f64>() - own.iter().sum::<f64>() + noisy.iter().sum::<f64>();
            let pairs = mass.iter_mut().zip(noisy);
            pairs.for_each(|(m, w)| *m += w / all.max(f64::MIN_POSITIVE));
        }
        let chosen = largest(&mass, budget).into_iter();
        let chosen = chosen.map(|place| candidates.start + place as usize);
        sinks.chain(chosen).chain(self.set.window.clone()).collect()
    }

    /// Returns the errors of one query that attends the given positions and leaves out the rest.
    fn errors_of(&self, exact: &Exact, attended: &[usize], rest: &Rest) -> Errors {
        let start = self.set.visible().start;
        let mass: f64 = attended.iter().map(|p| exact.weights[p - start]).sum();
        let norm: f64 = exact.output.iter().map(|x| x * x).sum();
        // If nothing is left out, or if the output or the attended mass rounds to zero, no shift changes anything.
        if rest.count == 0 || norm <= 0.0 || mass <= 0.0 {
            return Errors::default();
        }
        let own = self.sum(attended, |p| exact.weights[p - start] / mass);
        let n = rest.count as f64;
        let attended_scores: f64 = attended.iter().map(|p| exact.scores[p - start]).sum();
        let mean = (exact.scores.iter().sum::<f64>() - attended_scores) / n;
        let mut errors = Errors {
            gap: n.ln() + mean - mass.ln(),
            ..Errors::default()
        };
        for ((own, exact), sum) in own.iter().zip(&exact.output).zip(&rest.sum) {
            let (a, c) = (own - exact, sum / n - own);
            errors.off += a * a / norm;
            errors.cross += a * c / norm;
            errors.square += c * c / norm;
        }
        errors
    }
}

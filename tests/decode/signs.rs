//! selfindex on the GPU: its scores against f64, and its choice against a sort of the same scores, along a few steps.

use kvsmith::compute::cuda::buffer::Buffer;
use kvsmith::compute::cuda::driver::Driver;
use kvsmith::kv::Budget;
use kvsmith::kv::StaticSet;
use kvsmith::kv::cuda::signs::{FULL, HeadSigns, Signs};
use kvsmith::kv::cuda::{Limits, Positions, Shape};
use kvsmith::kv::lines::Lines;
use kvsmith::kv::packed::extend_signs;
use kvsmith::method::selfindex::cuda::SelfIndex;
use ndarray::ArrayView2;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::normals;

#[derive(Clone)]
pub struct Case {
    pub name: &'static str,
    pub shape: Shape,
    /// Positions before the first step.
    pub n: usize,
    pub limits: Limits,
    /// Positions that come first, per KV head.
    pub full: usize,
    /// Every key from a few: equal scores.
    pub ties: bool,
}

pub fn cases() -> Vec<Case> {
    let case = |name, [b, g, r, d]: [usize; 4], n: usize, budget| Case {
        name,
        shape: Shape {
            sequences: b,
            kv_heads: g,
            group: r,
            head_dim: d,
            capacity: n + 9,
        },
        n,
        limits: Limits {
            sinks: 4,
            window: 64,
            model_window: None,
            budget,
        },
        full: FULL,
        ties: false,
    };
    let share = Budget::Fraction;
    vec![
        case("llama", [1, 2, 4, 128], 5000, share(0.06)),
        case("batch", [3, 1, 5, 64], 700, share(0.1)),
        case("d80", [1, 2, 1, 80], 500, share(0.2)),
        case("d96", [1, 1, 16, 96], 2500, share(0.05)),
        // The last byte of a row has one group.
        case("d20", [1, 1, 2, 20], 300, share(0.1)),
        case("budget_1", [1, 2, 4, 64], 400, share(1.0)),
        case("one_position", [1, 2, 8, 64], 600, share(1e-6)),
        case("few", [1, 1, 4, 64], 600, Budget::Count(7)),
        case("no_candidates", [1, 1, 4, 64], 20, share(0.5)),
        Case {
            ties: true,
            ..case("ties", [1, 2, 4, 64], 4500, share(0.1))
        },
        Case {
            full: 0,
            ..case("none_first", [2, 2, 4, 64], 800, share(0.03))
        },
        {
            let mut sliding = case("sliding", [2, 1, 4, 64], 500, share(0.1));
            sliding.limits.model_window = Some(300);
            sliding
        },
    ]
}

pub fn check(driver: &dyn Driver, case: &Case) {
    let mut rng = ChaCha8Rng::seed_from_u64(case.n as u64);
    let shape = case.shape.checked().unwrap();
    let (b, g, r, d) = (shape.sequences, shape.kv_heads, shape.group, shape.head_dim);
    let mut lens: Vec<usize> = (0..b).map(|s| case.n - 5 * s).collect();
    let centres = normals(&mut rng, b * g * d);
    let few = normals(&mut rng, 3 * d);
    let mut signs: Vec<Lines<u8>> = vec![Lines::with_capacity(0); b * g];
    let mut full: Vec<Vec<u32>> = Vec::new();
    for (at, signs) in signs.iter_mut().enumerate() {
        let n = lens[at / g];
        let keys: Vec<f32> = match case.ties {
            true => (0..n)
                .flat_map(|_| few[rng.r#gen::<usize>() % 3 * d..][..d].to_vec())
                .collect(),
            false => normals(&mut rng, n * d),
        };
        let keys = ArrayView2::from_shape((n, d), &keys).unwrap();
        extend_signs(signs, keys, &centres[at * d..(at + 1) * d]);
        let mut all: Vec<u32> = (0..n as u32).collect();
        all.shuffle(&mut rng);
        all.truncate(case.full);
        all.sort_unstable();
        full.push(all);
    }
    let heads: Vec<HeadSigns> = (0..b * g)
        .map(|at| HeadSigns {
            signs: &signs[at],
            centre: &centres[at * d..(at + 1) * d],
            full: &full[at],
        })
        .collect();
    let cached = Signs::of(driver, shape, &heads).unwrap();
    let centroids = normals(&mut rng, b * g * d * 16);
    let index = SelfIndex::new(driver, shape, &case.limits, &centroids).unwrap();
    let mut positions = Positions::new(driver, shape, case.limits).unwrap();
    positions
        .set(&lens.iter().map(|n| *n as u32).collect::<Vec<_>>())
        .unwrap();
    for step in 0..3 {
        positions.advance(1).unwrap();
        lens.iter_mut().for_each(|n| *n += 1);
        let upload = |values: &[f32]| Buffer::of(driver, "rows", values).unwrap();
        let keys = normals(&mut rng, b * g * d);
        cached.append(&upload(&keys), 1, &positions).unwrap();
        for (at, signs) in signs.iter_mut().enumerate() {
            let key = ArrayView2::from_shape((1, d), &keys[at * d..(at + 1) * d]).unwrap();
            extend_signs(signs, key, &centres[at * d..(at + 1) * d]);
        }
        let queries = upload(&normals(&mut rng, b * g * r * d));
        let select = || {
            index
                .select(&queries, &cached, &positions)
                .unwrap()
                .read()
                .unwrap()
        };
        let chosen = select();
        assert_eq!(chosen, select(), "the same twice");
        let (keys, queries) = (index.keys().unwrap(), queries.read().unwrap());
        for at in 0..b * g {
            let limits = &case.limits;
            let set = StaticSet::at(lens[at / g] - 1, limits.model_window, limits.sinks, limits.window);
            let budget = limits.budget.positions(set.visible().len());
            let exact = Exact {
                queries: &queries[at * r * d..(at + 1) * r * d],
                centroids: &centroids[at * d * 16..(at + 1) * d * 16],
                signs: &signs[at],
                d,
            };
            let keys = &keys[at * shape.capacity..(at + 1) * shape.capacity];
            let candidates = || set.candidates.clone();
            check_keys(&exact, keys, candidates(), &full[at], budget * 2 / 5);
            let mut order: Vec<usize> = candidates().collect();
            order.sort_by(|a, b| keys[*b].cmp(&keys[*a]).then(a.cmp(b)));
            order.truncate(budget);
            order.sort_unstable();
            let order: Vec<u32> = order.into_iter().map(|p| p as u32).collect();
            assert_eq!(chosen[at], order, "step {step}, head {at}");
        }
    }
}

/// One KV head, from the definition.
struct Exact<'a> {
    queries: &'a [f32],
    centroids: &'a [f32],
    signs: &'a [u8],
    d: usize,
}

impl Exact<'_> {
    /// The score of a position, and the sum of the magnitudes in it.
    fn score(&self, p: usize) -> (f64, f64) {
        let (d, r) = (self.d, self.queries.len() / self.d);
        let row = &self.signs[p * d.div_ceil(8)..];
        let (mut sum, mut size) = (0.0, 0.0);
        for c in 0..d {
            let heads = (0..r).map(|a| f64::from(self.queries[a * d + c]));
            let (mean, magnitude) = (heads.clone().sum::<f64>(), heads.map(f64::abs).sum::<f64>());
            let group = c / 4;
            let bit = |c: usize| usize::from(row[c / 8] >> (c % 8) & 1);
            let pattern: usize = (0..4).map(|e| bit(group * 4 + e) << e).sum();
            let centroid = f64::from(self.centroids[(group * 16 + pattern) * 4 + c % 4]);
            sum += mean / r as f64 * centroid;
            size += magnitude / r as f64 * centroid.abs();
        }
        (sum, size)
    }

    fn bound(&self, size: f64) -> f64 {
        let terms = self.d + self.queries.len() / self.d + 8;
        terms as f64 * 0.5f64.powi(23) * size
    }
}

/// What comes first has the largest key, all others have their scores.
fn check_keys(exact: &Exact, keys: &[u32], candidates: std::ops::Range<usize>, full: &[u32], most: usize) {
    let of_first = |p: &usize| full.binary_search(&(*p as u32)).is_ok();
    let all: Vec<usize> = candidates.clone().filter(of_first).collect();
    let (first, others): (Vec<usize>, Vec<usize>) = all.iter().partition(|p| keys[**p] == u32::MAX);
    assert_eq!(first.len(), most.min(all.len()), "how many come first");
    for (a, b) in first.iter().flat_map(|a| others.iter().map(move |b| (*a, *b))) {
        let ((better, x), (worse, y)) = (exact.score(a), exact.score(b));
        let bound = exact.bound(x) + exact.bound(y);
        assert!(better >= worse - bound, "{a} comes before {b}: {better}, {worse}");
    }
    for p in candidates {
        if first.contains(&p) {
            continue;
        }
        let bits = match keys[p] >> 31 {
            1 => keys[p] & 0x7fff_ffff,
            _ => !keys[p],
        };
        let (score, size) = exact.score(p);
        let off = (f64::from(f32::from_bits(bits)) - score).abs();
        assert!(off <= exact.bound(size), "position {p}: off by {off} of {score}");
    }
}

//! selfindex on the GPU: its scores against f64, and its choice against a sort of the same scores, along a few steps.

use kvsmith::internal::compute::cuda::driver::Driver;
use kvsmith::internal::kv::Budget;
use kvsmith::internal::kv::cuda::signs::FULL;
use kvsmith::internal::kv::lines::AlignedVec;
use kvsmith::internal::kv::packed::extend_signs;
use kvsmith::internal::method::selfindex::cuda::SelfIndex;

use super::cases::{self, Batch, Rows, best, matrix, normals, some_of, twice, upload};
use super::held::{HeadSigns, signs_of};

/// With the positions of every KV head that come first.
pub type Case = cases::Case<usize>;

pub fn cases() -> Vec<Case> {
    let case = |name: &str, sizes, n, budget| {
        let case = Case::new(name, sizes, n, 9, FULL);
        case.static_set(4, 64).budget(budget)
    };
    let share = Budget::Fraction;
    vec![
        case("llama", [1, 2, 4, 128], 5000, share(0.06)),
        case("batch", [3, 1, 5, 64], 700, share(0.1)),
        // All of the full-precision tokens come first.
        case("large_budget", [1, 1, 4, 64], 3000, share(0.9)),
        case("d80", [1, 2, 1, 80], 500, share(0.2)),
        case("d96", [1, 1, 16, 96], 2500, share(0.05)),
        // The last byte of a row has one group.
        case("d20", [1, 1, 2, 20], 300, share(0.1)),
        case("budget_1", [1, 2, 4, 64], 400, share(1.0)),
        case("one_position", [1, 2, 8, 64], 600, share(1e-6)),
        case("few", [1, 1, 4, 64], 600, Budget::Count(7)),
        case("no_candidates", [1, 1, 4, 64], 20, share(0.5)),
        case("ties", [1, 2, 4, 64], 4500, share(0.1)).ties(),
        case("none_first", [2, 2, 4, 64], 800, share(0.03)).with(|full| *full = 0),
        case("sliding", [2, 1, 4, 64], 500, share(0.1)).model_window(300),
    ]
}

pub fn check(driver: &dyn Driver, case: &Case) {
    let mut rng = case.rng();
    let ([b, g, r, d], shape) = (case.sizes(), case.shape);
    let lens = case.lens(5);
    let centers = normals(&mut rng, b * g * d);
    let rows = Rows::new(&mut rng, case.ties, 3, d);
    let mut signs: Vec<AlignedVec<u8>> = vec![AlignedVec::with_capacity(0); b * g];
    let mut full: Vec<Vec<u32>> = Vec::new();
    for (at, signs) in signs.iter_mut().enumerate() {
        let n = lens[at / g];
        let keys = rows.draw(&mut rng, n);
        extend_signs(signs, matrix(&keys, 0, [n, d]), &centers[at * d..(at + 1) * d]);
        full.push(some_of(&mut rng, 0..n, case.special));
    }
    let heads: Vec<HeadSigns> = (0..b * g)
        .map(|at| HeadSigns {
            signs: &signs[at],
            centers: &centers[at * d..(at + 1) * d],
            full: &full[at],
        })
        .collect();
    let cached = signs_of(driver, shape, &heads);
    let centroids = normals(&mut rng, b * g * d * 16);
    let index = SelfIndex::new(driver, shape, &case.limits, &centroids).unwrap();
    let mut batch = Batch::new(driver, case);
    batch.set(&lens);
    for step in 0..3 {
        batch.advance(1);
        let keys = normals(&mut rng, b * g * d);
        cached
            .append(&upload(driver, &keys), 1, &batch.positions)
            .unwrap();
        for (at, signs) in signs.iter_mut().enumerate() {
            extend_signs(signs, matrix(&keys, at, [1, d]), &centers[at * d..(at + 1) * d]);
        }
        let queries = normals(&mut rng, b * g * r * d);
        let uploaded = upload(driver, &queries);
        let chosen = twice(|| {
            let chosen = index.select(&uploaded, &cached, &batch.positions).unwrap();
            chosen.read().unwrap()
        });
        let keys = index.keys().unwrap();
        for at in 0..b * g {
            let (set, budget) = batch.set_of(at);
            let exact = Exact {
                queries: &queries[at * r * d..(at + 1) * r * d],
                centroids: &centroids[at * d * 16..(at + 1) * d * 16],
                signs: &signs[at],
                d,
            };
            let keys = &keys[at * shape.capacity..(at + 1) * shape.capacity];
            check_keys(&exact, keys, set.candidates.clone(), &full[at], budget / 38);
            assert_eq!(
                chosen[at],
                best(keys, set.candidates, budget),
                "step {step}, head {at}"
            );
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

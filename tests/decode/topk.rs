//! topk on the GPU: its weights against f64, its choice against a sort of them and against the CPU's.

use kvsmith::internal::compute::cuda::driver::Driver;
use kvsmith::internal::float::Float;
use kvsmith::internal::kv::Budget;
use kvsmith::internal::kv::cuda::float::LayerRows;
use kvsmith::internal::method::topk::cuda::TopK;
use kvsmith::internal::method::{Retriever, topk};

use super::cases::{self, Batch, Rows, UNIT, best, matrix, normals, twice, upload};

/// Its scale is that of the queries.
pub type Case = cases::Case;

pub fn cases() -> Vec<Case> {
    let case = |name: &str, float, sizes, n, budget| {
        let case = Case::new(name, sizes, n, 9, ()).float(float);
        case.static_set(4, 64).budget(budget)
    };
    let share = Budget::Fraction;
    vec![
        case("llama", Float::Bf16, [1, 2, 4, 128], 3000, share(0.06)),
        case("batch", Float::F16, [3, 1, 5, 64], 700, share(0.1)),
        case("d80", Float::F32, [1, 2, 1, 80], 500, share(0.2)),
        case("d40", Float::Bf16, [1, 1, 16, 40], 300, share(0.05)),
        case("budget_1", Float::F32, [1, 2, 4, 64], 400, share(1.0)),
        case("one_position", Float::F16, [1, 2, 8, 64], 600, share(1e-6)),
        case("no_candidates", Float::F16, [1, 1, 4, 64], 20, share(0.5)),
        case("ties", Float::F16, [1, 2, 4, 64], 2500, share(0.1)).ties(),
        // All weight is left to a few positions, and none to most.
        case("peaked", Float::F32, [1, 2, 4, 64], 600, share(0.1)).scale(40.0),
        case("sliding", Float::Bf16, [2, 1, 4, 64], 500, share(0.1)).model_window(300),
    ]
}

/// The weights of one KV head's visible positions, and how far rounding may move each.
fn weights(queries: &[f32], keys: &[Vec<f32>]) -> (Vec<f64>, Vec<f64>) {
    let (d, n) = (keys[0].len(), keys.len());
    let (mut sums, mut bounds) = (vec![0.0; n], vec![0.0; n]);
    for query in queries.chunks(d) {
        let products = |key: &Vec<f32>| -> Vec<f64> {
            let pairs = query.iter().zip(key);
            pairs.map(|(q, k)| f64::from(*q) * f64::from(*k)).collect()
        };
        let scores: Vec<f64> = keys
            .iter()
            .map(|key| products(key).iter().sum::<f64>() / (d as f64).sqrt())
            .collect();
        let sizes = keys
            .iter()
            .map(|key| products(key).iter().map(|x| x.abs()).sum::<f64>());
        let size = sizes.fold(0.0, f64::max) / (d as f64).sqrt();
        // A score is a sum of d products in f32, and so is the largest; a sum has n terms.
        let delta = 2.0 * (d as f64 + 8.0) * UNIT * size;
        let relative = (2.0 * delta).exp_m1() + (n as f64 + 64.0) * 2.0 * UNIT;
        assert!(relative < 0.1, "a bound that says nothing: {relative}");
        let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let total: f64 = scores.iter().map(|s| (s - top).exp()).sum();
        for (i, score) in scores.iter().enumerate() {
            let weight = (score - top).exp() / total;
            sums[i] += weight;
            // Small numbers of f32 have a step of 2^-149.
            bounds[i] += relative * weight + 0.5f64.powi(147);
        }
    }
    (sums, bounds)
}

pub fn check(driver: &dyn Driver, case: &Case) {
    let mut rng = case.rng();
    let ([b, g, r, d], n, capacity) = (case.sizes(), case.n, case.shape.capacity);
    let keys = Rows::new(&mut rng, case.ties, 3, d).draw(&mut rng, b * g * n);
    let keys = case.rounded(keys);
    let mut batch = Batch::new(driver, case);
    let rows = LayerRows::new(driver, case.shape, case.float).unwrap();
    batch.append(&rows, &keys, &keys);
    batch.set(&case.lens(5).iter().map(|n| n - 1).collect::<Vec<_>>());
    batch.advance(1);
    let oracle = TopK::new(driver, case.shape, &case.limits).unwrap();
    let mut queries = normals(&mut rng, b * g * r * d);
    queries.iter_mut().for_each(|q| *q *= case.scale);
    let uploaded = upload(driver, &queries);
    let (chosen, all_keys) = twice(|| {
        let chosen = oracle.select(&uploaded, &rows, &batch.positions).unwrap();
        (chosen.read().unwrap(), oracle.keys().unwrap())
    });
    for at in 0..b * g {
        let (set, budget) = batch.set_of(at);
        let (seen, candidates) = (set.visible(), set.candidates);
        let all = matrix(&keys, at, [n, d]);
        let own: Vec<Vec<f32>> = seen.clone().map(|p| all.row(p).to_vec()).collect();
        let (exact, bounds) = weights(&queries[at * r * d..(at + 1) * r * d], &own);
        let own_keys = &all_keys[at * capacity..];
        for p in candidates.clone() {
            let weight = f64::from(f32::from_bits(own_keys[p] & 0x7fff_ffff));
            let (exact, bound) = (exact[p - seen.start], bounds[p - seen.start]);
            let off = (weight - exact).abs();
            assert!(
                off <= bound,
                "position {p}: {weight}, exact {exact}, bound {bound}"
            );
        }
        assert_eq!(chosen[at], best(own_keys, candidates, budget), "head {at}");

        let mut kv = case.kv_head();
        kv.extend(all, all);
        let step = batch.step(at, 0, matrix(&queries, at, [r, d]), &kv);
        let theirs = topk::TopK.select(&step).positions;
        assert_eq!(theirs.len(), chosen[at].len());
        let only = |a: &[u32], b: &[u32]| -> Vec<usize> {
            let other = a.iter().filter(|p| b.binary_search(p).is_err());
            other.map(|p| *p as usize - seen.start).collect()
        };
        let (ours, theirs) = (only(&chosen[at], &theirs), only(&theirs, &chosen[at]));
        assert!(
            !case.ties || ours.is_empty(),
            "ties are exact: {ours:?} {theirs:?}"
        );
        for (a, b) in ours.iter().flat_map(|a| theirs.iter().map(move |b| (*a, *b))) {
            // Both are off by at most the bound.
            let bound = 2.0 * (bounds[a] + bounds[b]);
            assert!((exact[a] - exact[b]).abs() <= bound, "{a} for {b}");
        }
    }
}

//! topk on the GPU: its weights against f64, its choice against a sort of them and against the CPU's.

use half::{bf16, f16};
use kvsmith::compute::cuda::buffer::Buffer;
use kvsmith::compute::cuda::driver::Driver;
use kvsmith::float::Float;
use kvsmith::kv::Budget;
use kvsmith::kv::StaticSet;
use kvsmith::kv::cuda::attend::LayerRows;
use kvsmith::kv::cuda::{Limits, Positions, Shape};
use kvsmith::kv::packed::Center;
use kvsmith::kv::{KvHead, KvType};
use kvsmith::method::topk::cuda::TopK;
use kvsmith::method::{Retriever, Step, topk};
use ndarray::ArrayView2;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::normals;

#[derive(Clone)]
pub struct Case {
    pub name: &'static str,
    pub float: Float,
    pub shape: Shape,
    /// Positions of the first sequence.
    pub n: usize,
    pub limits: Limits,
    /// Every key from a few: equal weights.
    pub ties: bool,
    /// What queries are scaled by: large ones leave all weight to a few positions, and none to most.
    pub scale: f32,
}

pub fn cases() -> Vec<Case> {
    let case = |name, float, [b, g, r, d]: [usize; 4], n: usize, budget| Case {
        name,
        float,
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
        ties: false,
        scale: 1.0,
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
        Case {
            ties: true,
            ..case("ties", Float::F16, [1, 2, 4, 64], 2500, share(0.1))
        },
        Case {
            scale: 40.0,
            ..case("peaked", Float::F32, [1, 2, 4, 64], 600, share(0.1))
        },
        {
            let mut sliding = case("sliding", Float::Bf16, [2, 1, 4, 64], 500, share(0.1));
            sliding.limits.model_window = Some(300);
            sliding
        },
    ]
}

/// The weights of one KV head's visible positions, and how far rounding may move each.
fn weights(queries: &[f32], keys: &[Vec<f32>]) -> (Vec<f64>, Vec<f64>) {
    let (d, n, epsilon) = (keys[0].len(), keys.len(), 0.5f64.powi(24));
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
        let delta = 2.0 * (d as f64 + 8.0) * epsilon * size;
        let relative = (2.0 * delta).exp_m1() + (n as f64 + 64.0) * 2.0 * epsilon;
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

fn stored(float: Float, x: f32) -> f32 {
    match float {
        Float::F32 => x,
        Float::F16 => f16::from_f32(x).to_f32(),
        Float::Bf16 => bf16::from_f32(x).to_f32(),
    }
}

pub fn check(driver: &dyn Driver, case: &Case) {
    let mut rng = ChaCha8Rng::seed_from_u64(case.n as u64);
    let shape = case.shape.checked().unwrap();
    let (b, g, r, d, n) = (
        shape.sequences,
        shape.kv_heads,
        shape.group,
        shape.head_dim,
        case.n,
    );
    let lens: Vec<usize> = (0..b).map(|s| n - 5 * s).collect();
    let few = normals(&mut rng, 3 * d);
    let keys: Vec<f32> = match case.ties {
        true => (0..b * g * n)
            .flat_map(|_| few[rng.r#gen::<usize>() % 3 * d..][..d].to_vec())
            .collect(),
        false => normals(&mut rng, b * g * n * d),
    };
    let keys: Vec<f32> = keys.into_iter().map(|k| stored(case.float, k)).collect();
    let upload = |values: &[f32]| Buffer::of(driver, "rows", values).unwrap();
    let mut positions = Positions::new(driver, shape, case.limits).unwrap();
    let rows = LayerRows::new(driver, shape, case.float).unwrap();
    positions.advance(n).unwrap();
    rows.append(&upload(&keys), &upload(&keys), n, &positions)
        .unwrap();
    positions
        .set(&lens.iter().map(|n| *n as u32 - 1).collect::<Vec<_>>())
        .unwrap();
    positions.advance(1).unwrap();
    let oracle = TopK::new(driver, shape, &case.limits).unwrap();
    let mut queries = normals(&mut rng, b * g * r * d);
    queries.iter_mut().for_each(|q| *q *= case.scale);
    let uploaded = upload(&queries);
    let select = || {
        let chosen = oracle.select(&uploaded, &rows, &positions).unwrap();
        (chosen.read().unwrap(), oracle.keys().unwrap())
    };
    let (chosen, all_keys) = select();
    assert_eq!(chosen, select().0, "the same twice");
    for at in 0..b * g {
        let limits = &case.limits;
        let set = StaticSet::at(lens[at / g] - 1, limits.model_window, limits.sinks, limits.window);
        let (seen, candidates) = (set.visible(), set.candidates.clone());
        let budget = limits.budget.positions(seen.len());
        let own: Vec<Vec<f32>> = seen
            .clone()
            .map(|p| keys[(at * n + p) * d..][..d].to_vec())
            .collect();
        let group = &queries[at * r * d..(at + 1) * r * d];
        let (exact, bounds) = weights(group, &own);
        let own_keys = &all_keys[at * shape.capacity..];
        for p in candidates.clone() {
            let weight = f64::from(f32::from_bits(own_keys[p] & 0x7fff_ffff));
            let (exact, bound) = (exact[p - seen.start], bounds[p - seen.start]);
            let off = (weight - exact).abs();
            assert!(
                off <= bound,
                "position {p}: {weight}, exact {exact}, bound {bound}"
            );
        }
        let mut order: Vec<usize> = candidates.clone().collect();
        order.sort_by(|a, b| own_keys[*b].cmp(&own_keys[*a]).then(a.cmp(b)));
        order.truncate(budget);
        order.sort_unstable();
        let order: Vec<u32> = order.into_iter().map(|p| p as u32).collect();
        assert_eq!(chosen[at], order, "head {at}");

        let kind = match case.float {
            Float::F32 => KvType::F32,
            Float::F16 => KvType::F16,
            Float::Bf16 => KvType::Bf16,
        };
        let mut kv = KvHead::new(kind, d, n, Center::Median);
        let all = ArrayView2::from_shape((n, d), &keys[at * n * d..(at + 1) * n * d]).unwrap();
        kv.extend(all, all);
        let group = ArrayView2::from_shape((r, d), group).unwrap();
        let step = Step {
            step: 0,
            visible: seen.clone(),
            candidates,
            budget,
            q_pre: group,
            q_rope: group,
            kv: &kv,
        };
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

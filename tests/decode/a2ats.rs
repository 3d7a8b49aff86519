//! a2ats on the GPU: its scores against f64, and its choice against the CPU's on the same scores, along a few steps.

use kvsmith::internal::compute::cuda::driver::Driver;
use kvsmith::internal::kv::Budget;
use kvsmith::internal::method::a2ats::cuda::{A2ats, Codebooks, HeadConstants};
use kvsmith::internal::method::a2ats::{Bound, HeadCodebook, choose};
use kvsmith::internal::model::rope::Rope;
use ndarray::{Array1, Array2, ArrayView2};
use rand::Rng;
use rand_chacha::ChaCha8Rng;

use super::cases::{self, Batch, UNIT, matrix, normal, normals, span, twice, upload};
use super::common::model::plain_rope;

#[derive(Clone)]
pub struct Special {
    /// Codewords; where there are to be ties, multiples of a half with few values each.
    size: usize,
    per_query_head: bool,
}

pub type Case = cases::Case<Special>;

pub fn cases() -> Vec<Case> {
    let case = |name: &str, sizes, size, n, budget| {
        let special = Special {
            size,
            per_query_head: false,
        };
        let case = Case::new(name, sizes, n, 9, special);
        case.static_set(4, 64).budget(budget)
    };
    let share = Budget::Fraction;
    vec![
        case("llama", [1, 2, 4, 128], 500, 3000, share(0.06)),
        case("batch", [3, 1, 5, 64], 100, 700, share(0.1)),
        case("one_query_head", [1, 2, 1, 80], 64, 500, share(0.2)),
        case("full_group", [1, 1, 16, 64], 300, 2500, share(0.05)),
        case("budget_1", [1, 2, 4, 64], 60, 400, share(1.0)),
        case("count", [1, 2, 4, 64], 1000, 2100, Budget::Count(33)),
        // Fewer than the query heads' best tokens alone.
        case("best_of_union", [2, 2, 8, 64], 200, 600, Budget::Count(2)),
        case("one_position", [1, 2, 8, 64], 200, 600, share(1e-6)),
        case("one_codeword", [1, 1, 4, 64], 1, 300, share(0.1)),
        case("no_candidates", [1, 1, 4, 64], 10, 20, share(0.5)),
        case("ties", [1, 2, 4, 64], 40, 900, share(0.1)).ties(),
        case("ties_of_union", [1, 2, 8, 64], 40, 900, Budget::Count(3)).ties(),
        case("per_query_head", [2, 2, 4, 64], 200, 800, share(0.03)).with(|s| s.per_query_head = true),
        case("sliding", [2, 1, 4, 64], 50, 500, share(0.1)).model_window(300),
    ]
}

fn head(case: &Case, rope: &Rope, rng: &mut ChaCha8Rng) -> HeadCodebook {
    let (size, d) = (case.special.size, case.shape.head_dim);
    let value = |rng: &mut ChaCha8Rng| {
        if case.ties {
            f32::from(rng.r#gen::<u8>() % 3) * 0.5 - 0.5
        } else {
            half::f16::from_f32(normal(rng)).to_f32()
        }
    };
    let mut codebook = Array2::from_shape_simple_fn((size, d), || value(rng));
    if case.ties {
        // Every codeword twice.
        for c in size / 2..size {
            let twin = codebook.row(c - size / 2).to_owned();
            codebook.row_mut(c).assign(&twin);
        }
    }
    random_head(codebook, rope, rng)
}

/// A codebook with a random metric and mean.
pub fn random_head(codebook: Array2<f32>, rope: &Rope, rng: &mut ChaCha8Rng) -> HeadCodebook {
    let d = codebook.ncols();
    let chol = Array2::from_shape_fn((d, d), |(i, j)| match i.cmp(&j) {
        std::cmp::Ordering::Equal => 1.0 + rng.r#gen::<f32>(),
        std::cmp::Ordering::Greater => normal(rng) * 0.05,
        std::cmp::Ordering::Less => 0.0,
    });
    let mean = Array1::from(normals(rng, d)) * 0.1;
    HeadCodebook::new(codebook, mean, chol, rope, 2048).unwrap()
}

pub fn check(driver: &dyn Driver, case: &Case) {
    let mut rng = case.rng();
    let ([b, g, r, d], shape) = (case.sizes(), case.shape);
    let Special { size, per_query_head } = case.special;
    let rope = plain_rope(d);
    let heads: Vec<HeadCodebook> = (0..g).map(|_| head(case, &rope, &mut rng)).collect();
    let constants: Vec<_> = heads.iter().map(HeadCodebook::constants).collect();
    let codebooks = Codebooks::new(driver, &constants).unwrap();
    let index = A2ats::new(driver, shape, &case.limits, &codebooks, per_query_head).unwrap();
    // Some codewords have no token, one has many.
    let used = size.div_ceil(2) + rng.r#gen::<usize>() % size.div_ceil(2);
    let code = |rng: &mut ChaCha8Rng| match rng.r#gen::<u8>() % 5 {
        0 => 0,
        _ => (rng.r#gen::<usize>() % used) as u16,
    };
    let mut codes: Vec<u16> = (0..b * g * shape.capacity).map(|_| code(&mut rng)).collect();
    index.clear().unwrap();
    index.codes.write(&codes).unwrap();
    let mut batch = Batch::new(driver, case);
    batch.set(&case.lens(5));
    for step in 0..3 {
        batch.advance(1);
        let keys = normals(&mut rng, b * g * d);
        index
            .append(&upload(driver, &keys), &codebooks, &batch.positions)
            .unwrap();
        let now = index.codes.read().unwrap();
        for (at, key) in keys.chunks(d).enumerate() {
            let p = at * shape.capacity + batch.lens[at / g] - 1;
            check_code(&constants[at % g], key, now[p] as usize);
            codes[p] = now[p];
        }
        assert_eq!(now, codes, "step {step}: other codes stay");

        let queries = normals(&mut rng, b * g * r * d);
        let chosen = twice(|| {
            let queries = upload(driver, &queries);
            let chosen = index.select(&queries, &codebooks, &batch.positions).unwrap();
            chosen.read().unwrap()
        });
        let (scores, all_counts) = (index.scores.read().unwrap(), index.counts.read().unwrap());
        let spans = batch.positions.spans().unwrap();
        let budgets = batch.positions.budgets.read().unwrap();
        for at in 0..b * g {
            let (set, budget) = batch.set_of(at);
            assert_eq!(spans[at / g], span(&set), "step {step}");
            assert_eq!(budgets[at / g] as usize, budget.min(shape.capacity));

            let own = matrix(&scores, at, [r, size]);
            let group = matrix(&queries, at, [r, d]);
            check_scores(&heads[at % g], &constants[at % g], group, own);
            let candidates = set.candidates;
            let row = &codes[at * shape.capacity..][candidates.clone()];
            let mut counts = vec![0; size];
            row.iter().for_each(|c| counts[*c as usize] += 1);
            assert_eq!(all_counts[at * size..(at + 1) * size], counts, "step {step}");
            let bound = if per_query_head {
                Bound::PerQueryHead(budget as u64)
            } else {
                Bound::Union(budget)
            };
            let expected = choose(own, &counts, row, candidates.start as u32, bound);
            assert_eq!(chosen[at], expected, "step {step}, head {at}");
            if !per_query_head {
                assert!(chosen[at].len() <= budget);
            }
            if budget >= candidates.len() && !per_query_head {
                assert_eq!(chosen[at].len(), candidates.len(), "a budget for all takes all");
            }
        }
    }
}

/// The code is that of the nearest codeword, up to the rounding of f32.
pub fn check_code(head: &HeadConstants, key: &[f32], code: usize) {
    let d = key.len();
    let z: Vec<f64> = (0..d)
        .map(|i| {
            let products = (0..d).map(|j| f64::from(head.key_map[[i, j]]) * f64::from(key[j]));
            products.sum::<f64>() - f64::from(head.mean[i])
        })
        .collect();
    let distance = |c: usize| -> f64 {
        let row = head.codebook.row(c);
        row.iter().zip(&z).map(|(c, z)| (f64::from(*c) - z).powi(2)).sum()
    };
    let distances: Vec<f64> = (0..head.codebook.nrows()).map(distance).collect();
    let best = distances.iter().copied().fold(f64::INFINITY, f64::min);
    // Scores are half of a distance, off by the rounding of 2 d products each in z and in z c.
    let size = z.iter().map(|z| z * z).sum::<f64>() + distances[code];
    let bound = 8.0 * (d as f64 + 8.0) * UNIT * size;
    assert!(
        distances[code] <= best + bound,
        "{} of {best}, bound {bound}",
        distances[code]
    );
}

/// Scores against f64, and those of the CPU.
fn check_scores(
    head: &HeadCodebook,
    constants: &HeadConstants,
    queries: ArrayView2<f32>,
    scores: ArrayView2<f32>,
) {
    let (d, wide) = (queries.ncols() as f64, |x: &Array2<f32>| x.mapv(f64::from));
    let y = queries.mapv(f64::from).dot(&wide(&constants.query_map).t());
    let sizes = queries
        .mapv(|q| f64::from(q.abs()))
        .dot(&wide(&constants.query_map).mapv(f64::abs).t());
    let codebook = constants.codebook.mapv(f64::from);
    let exact = y.dot(&codebook.t());
    let sizes = sizes.dot(&codebook.mapv(f64::abs).t());
    let cpu = head.scores(queries);
    for (((score, exact), size), cpu) in scores.iter().zip(&exact).zip(&sizes).zip(&cpu) {
        let bound = 4.0 * (d + 8.0) * UNIT * size;
        assert!(
            (f64::from(*score) - exact).abs() <= bound,
            "{score}, exact {exact}, bound {bound}"
        );
        // The map is rounded to f32 once more on the way to the GPU.
        assert!(
            (f64::from(*score) - f64::from(*cpu)).abs() <= 2.0 * bound,
            "{score}, CPU {cpu}"
        );
    }
}

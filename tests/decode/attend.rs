//! Attention of one token over cached rows against f64, with a derived bound.

use kvsmith::internal::compute::comparison::Comparison;
use kvsmith::internal::compute::cuda::driver::Driver;
use kvsmith::internal::float::Float;
use kvsmith::internal::kv::Budget;
use kvsmith::internal::kv::cuda::attend::Attention;
use kvsmith::internal::kv::cuda::bounds;
pub use kvsmith::internal::kv::cuda::bounds::Precision;
use kvsmith::internal::kv::cuda::float::LayerRows;
use kvsmith::internal::kv::cuda::rows::CudaRows;
use rand::Rng;

use super::cases::{self, Batch, normals, sizes_name, some_of, twice, upload};
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
        rows.attend(&attention, &queries, &batch.positions, chosen.as_ref())
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
#[track_caller]
pub fn compare(
    precision: &Precision,
    query: &[f32],
    attended: &[(Vec<f32>, Vec<f32>)],
    out: &[f32],
    lse: Option<f32>,
) {
    let mut all = Comparison::default();
    bounds::attended(&mut all, precision, query, attended, out, lse);
    all.assert();
}

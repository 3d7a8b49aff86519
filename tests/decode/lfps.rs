//! lfps on the GPU: along a few steps the choices, the bypass, the tables and the shares of the CPU's.

use kvsmith::internal::compute::attention;
use kvsmith::internal::compute::cuda::buffer::Buffer;
use kvsmith::internal::compute::cuda::driver::Driver;
use kvsmith::internal::float::Float;
use kvsmith::internal::kv::cuda::attend::Attention;
use kvsmith::internal::kv::cuda::float::LayerRows;
use kvsmith::internal::kv::cuda::rows::CudaRows;
use kvsmith::internal::kv::{Budget, KvHead, StaticSet};
use kvsmith::internal::method::cuda::TALLIES;
use kvsmith::internal::method::lfps::cuda::{Lfps, LfpsWorkspace};
use kvsmith::internal::method::lfps::{self as cpu, LfpsMethod};
use kvsmith::internal::method::{Prompt, Retriever, Selection};
use ndarray::{Array2, ArrayView2, ArrayView3, s};
use std::rc::Rc;

use super::cases::{self, Batch, Rows, UNIT, matrix, normals, upload};
use super::held::{held_bypassed, held_tables, output};

#[derive(Clone)]
pub struct Special {
    /// Positions of a second prompt.
    turn: usize,
    params: cpu::LfpsParams,
    /// How far the sinks' scores are above the others', for the query heads that look at them.
    sinks_lead: f32,
    /// How many heads, at the start of a group, always look at the sinks; others do in odd steps.
    looking: usize,
    /// Whether the first sink has scores of minus infinity, for heads that look at the sinks.
    hidden_sink: bool,
}

pub type Case = cases::Case<Special>;

/// Decode steps of every case.
const STEPS: usize = 4;

/// A case whose second prompt has `turn` positions.
fn with_turn(name: &str, float: Float, sizes: [usize; 4], n: usize, turn: usize, budget: Budget) -> Case {
    let special = Special {
        turn,
        params: cpu::LfpsParams {
            lfps_theta: 0.85,
            ..cpu::LfpsParams::default()
        },
        sinks_lead: 0.0,
        looking: 0,
        hidden_sink: false,
    };
    let case = Case::new(name, sizes, n, turn + STEPS + 2, special);
    case.float(float).budget(budget)
}

pub fn cases() -> Vec<Case> {
    let case = |name, float, sizes, n, budget| with_turn(name, float, sizes, n, 0, budget);
    let (share, f32) = (Budget::Fraction, Float::F32);
    let lead = |case: Case, looking| case.with(|s| (s.sinks_lead, s.looking) = (12.0, looking));
    vec![
        case("llama", f32, [1, 2, 4, 128], 700, share(0.06)),
        case("long", Float::Bf16, [1, 1, 2, 64], 4200, share(0.03)),
        case("batch", Float::F16, [3, 1, 5, 80], 400, share(0.1)),
        // All of the most recent positions are candidates.
        case("d40", f32, [1, 1, 16, 40], 300, share(0.05)).static_set(4, 0),
        case("budget_1", f32, [1, 2, 4, 64], 200, share(1.0)),
        // Even the best of each head are too many.
        case("one_position", f32, [1, 2, 8, 64], 400, share(1e-6)),
        // Some of the most recent positions are candidates.
        case("few", f32, [1, 2, 8, 64], 400, Budget::Count(3)).static_set(4, 2),
        case("no_candidates", f32, [1, 1, 4, 64], 10, share(0.5)),
        case("ties", f32, [1, 2, 4, 64], 500, share(0.05)).ties(),
        lead(case("bypass", f32, [2, 2, 4, 64], 300, share(0.1)), 1),
        lead(
            case("all_bypassed", Float::Bf16, [1, 2, 2, 128], 300, share(0.1)),
            2,
        ),
        lead(case("hidden_sink", f32, [1, 2, 2, 64], 300, share(0.1)), 2).with(|s| s.hidden_sink = true),
        lead(case("no_bypass", f32, [1, 2, 4, 64], 300, share(0.1)), 1).with(|s| s.params.lfps_theta = 1.0),
        lead(case("sliding", f32, [2, 1, 4, 64], 500, share(0.1)), 0).model_window(300),
        // The factors of the tables pass the least that they may be.
        with_turn("decayed", f32, [1, 1, 2, 32], 100, 852, share(0.05)).with(|s| s.params.lfps_rows = 2000),
        case("alpha", f32, [1, 1, 4, 64], 400, share(0.1)).with(|s| s.params.lfps_alpha = Some(0.4)),
    ]
}

/// Keys, values and queries of a whole trajectory.
struct Trajectory {
    /// `[b g,total,d]` each.
    keys: Vec<f32>,
    values: Vec<f32>,
    /// `[b h,total,d]`.
    queries: Vec<f32>,
    total: usize,
}

impl Trajectory {
    fn new(case: &Case) -> Self {
        let mut rng = case.rng();
        let (shape, special) = (&case.shape, &case.special);
        let (d, r, total) = (shape.head_dim, shape.group, case.n + special.turn + STEPS);
        let mut keys = Rows::new(&mut rng, case.ties, 3, d).draw(&mut rng, shape.heads() * total);
        let mut queries = normals(&mut rng, shape.query_heads() * total * d);
        // The first channel is that of the sinks.
        let lead = (special.sinks_lead * (d as f32).sqrt()).sqrt();
        for key in keys
            .chunks_mut(total * d)
            .flat_map(|head| head.chunks_mut(d).take(case.limits.sinks))
        {
            key[0] = lead;
        }
        if special.hidden_sink {
            keys.chunks_mut(total * d)
                .for_each(|head| head[0] = f32::NEG_INFINITY);
        }
        for (head, queries) in queries.chunks_mut(total * d).enumerate() {
            let taste = normals(&mut rng, d);
            for (t, query) in queries.chunks_mut(d).enumerate() {
                // A head likes the same keys in every step.
                query.iter_mut().zip(&taste).for_each(|(q, x)| *q = 0.3 * *q + *x);
                let looks = head % r < special.looking || t % 2 == 1;
                query[0] = if looks { lead } else { 0.0 };
            }
        }
        Self {
            keys,
            values: normals(&mut rng, shape.heads() * total * d),
            queries,
            total,
        }
    }
}

/// The CPU's method and cache of one KV head, at the end of its prompts.
fn prompted(case: &Case, rows: &Trajectory, at: usize, n: usize) -> (cpu::Lfps, KvHead) {
    let [_, _, r, d] = case.sizes();
    let (total, params) = (rows.total, &case.special.params);
    let mut head = LfpsMethod::new(params, None).unwrap().head(&case.place(at));
    let empty = head.clone();
    let [keys, values] = [&rows.keys, &rows.values].map(|rows| matrix(rows, at, [total, d]));
    let group = &rows.queries[at * r * total * d..(at + 1) * r * total * d];
    let group = ArrayView3::from_shape((r, total, d), group).unwrap();
    let mut kv = case.kv_head();
    for (first, end) in [(0, n), (n, n + case.special.turn)] {
        if first == end {
            continue;
        }
        kv.extend(keys.slice(s![first..end, ..]), values.slice(s![first..end, ..]));
        let prompt = |from: usize, queries| Prompt {
            first: from,
            k_pre: keys.slice(s![from..end, ..]),
            q_rope: queries,
            keys: keys.slice(s![..end, ..]),
            values: values.slice(s![..end, ..]),
            kv: &kv,
        };
        head.prefill(&prompt(first, group.slice(s![.., first..end, ..])));
        if first == 0 {
            // Its last queries are enough.
            let from = end.saturating_sub(params.lfps_rows);
            let mut other = empty.clone();
            other.fill(&prompt(from, group.slice(s![.., from..end, ..])));
            assert_eq!(other.sums(), head.sums());
            for (a, b) in other.heads().iter().zip(head.heads()) {
                assert_eq!(a.constants, b.constants);
                assert_eq!(a.vertical.parts(), b.vertical.parts());
                assert_eq!(a.slash.parts(), b.slash.parts());
            }
        }
    }
    (head, kv)
}

/// The largest sum of magnitudes in a scaled product of a query with a key; infinite channels, which leave a key no
/// weight, do not count.
fn largest_product(queries: ArrayView2<f32>, keys: ArrayView2<f32>) -> f64 {
    let magnitude = |x: f32| if x.is_finite() { f64::from(x).abs() } else { 0.0 };
    let magnitudes = |rows: ArrayView2<f32>| rows.mapv(magnitude);
    let products = magnitudes(queries).dot(&magnitudes(keys).t());
    products.iter().copied().fold(0.0, f64::max) / (queries.ncols() as f64).sqrt()
}

/// What the CPU's step of one KV head did.
struct Stepped {
    selection: Selection,
    /// Of bypassed heads, and how far rounding may move each number.
    joined: Vec<Option<(Vec<f64>, f64)>>,
    /// Relative rounding of a weight.
    relative: f64,
}

/// The step of KV head `at`, with the keys of its trajectory.
fn step_cpu<'a>(
    batch: &Batch,
    at: usize,
    head: &mut cpu::Lfps,
    kv: &'a KvHead,
    keys: ArrayView2<f32>,
    queries: ArrayView2<'a, f32>,
) -> Stepped {
    let (set, _) = batch.set_of(at);
    let step = batch.step(at, 0, queries, kv);
    let selection = head.select(&step);
    let positions = set.merge(&selection.positions);
    let sinks: Vec<u32> = (set.visible().start as u32..set.candidates.start as u32).collect();
    let (r, d) = queries.dim();
    // A score is a sum of d products in f32, and so is the largest; of a sum that is halved again and again
    // a term is rounded at most so often as there are positions.
    let size = largest_product(queries, keys.slice(s![..set.visible().end, ..]));
    let delta = 2.0 * (d as f64 + 8.0) * UNIT * size;
    let relative = (2.0 * delta).exp_m1() + (positions.len() as f64 + 64.0) * 2.0 * UNIT;
    assert!(relative < 0.1, "a bound that says nothing: {relative}");
    let mut weights = Array2::zeros((r, positions.len()));
    let mut joined = vec![None; r];
    for (a, joined) in joined.iter_mut().enumerate() {
        let query = queries.slice(s![a..a + 1, ..]);
        let mut out = Array2::zeros((1, d));
        match selection.bypassed.get(a).and_then(Option::as_ref) {
            None => {
                let (keys, values) = (kv.keys(), kv.values());
                let (seen, _) =
                    attention::decode_with_weights(query, keys, values, &positions, out.view_mut());
                weights.row_mut(a).assign(&seen.row(0));
            }
            Some(rest) => {
                let lse = attention::decode(query, kv.keys(), kv.values(), &sinks, out.view_mut())[0];
                let mut row = out.row(0).to_vec();
                attention::merge(&mut row, lse, rest);
                let largest = row.iter().chain(&rest.output).chain(out.iter());
                let largest = largest.fold(0.0f64, |m, x| m.max(f64::from(x.abs())));
                // Both log-sum-exps are rounded to f32.
                let exponents = f64::from(lse.abs().max(rest.lse.abs())) * 4.0 * UNIT;
                let bound = 4.0 * (relative + exponents.exp_m1()) * largest;
                *joined = Some((row.into_iter().map(f64::from).collect(), bound));
            }
        }
    }
    head.observe(&step, &positions, weights.view());
    Stepped {
        selection,
        joined,
        relative,
    }
}

/// The shares that [`Stepped`] adds for its head, as the runner counts them.
fn shares(selection: &Selection, set: &StaticSet, r: usize) -> [f64; TALLIES] {
    let n = set.visible().len() as f64;
    let bypassed = selection.bypassed.iter().flatten().count();
    let sinks = set.candidates.start - set.visible().start;
    let attended = if bypassed == r {
        sinks
    } else {
        set.len() + selection.positions.len()
    };
    [
        (attended as f64 + selection.ranked.len() as f64 / 2.0) / n,
        selection.products as f64 / (n * r as f64),
        bypassed as f64 / r as f64,
        attended as f64,
        selection.ranked.len() as f64,
        f64::from(u8::from(bypassed == 0 && attended == set.visible().len())),
        bypassed as f64,
    ]
}

/// What the query heads of one KV head attended before the bypass and after it; how many of them were bypassed.
fn check_outputs(stepped: &Stepped, marks: &[bool], [before, after]: [&[f32]; 2]) -> usize {
    let d = before.len() / marks.len();
    let outputs = before.chunks(d).zip(after.chunks(d));
    for (a, (joined, (before, after))) in stepped.joined.iter().zip(outputs).enumerate() {
        assert_eq!(marks[a], joined.is_some(), "query head {a} of the group");
        let Some((joined, bound)) = joined else {
            assert_eq!(after, before, "a head that was not bypassed");
            continue;
        };
        assert!(after != before, "a bypassed head attends what others do");
        for (x, expected) in after.iter().zip(joined) {
            let off = (f64::from(*x) - expected).abs();
            assert!(off <= *bound, "query head {a}: {x}, {expected}, bound {bound}");
        }
    }
    stepped.joined.iter().flatten().count()
}

/// What a case is for has happened.
fn check_purpose(case: &Case, bypassed: usize, chosen: usize) {
    let heads = case.shape.query_heads() * STEPS;
    match &case.name[..] {
        "bypass" => assert!(bypassed > heads / 4 && bypassed < heads, "{bypassed} of {heads}"),
        "all_bypassed" | "hidden_sink" => assert_eq!(bypassed, heads),
        "no_bypass" => assert_eq!(bypassed, 0),
        _ => {}
    }
    let any = !matches!(&case.name[..], "no_candidates" | "all_bypassed" | "hidden_sink");
    assert_eq!(chosen > 0, any, "{chosen} positions");
}

/// The tables of a KV head's query heads against the CPU's, each `[r,2,capacity]`.
fn compare_tables(tables: &[f64], head: &cpu::Lfps, capacity: usize, relative: f64) {
    let theirs = head.heads().iter().flat_map(|head| [&head.vertical, &head.slash]);
    for (number, (table, theirs)) in tables.chunks(capacity).zip(theirs).enumerate() {
        for (i, x) in table.iter().enumerate() {
            let expected = theirs.get(i);
            let bound = relative * expected + 1e-30;
            assert!(
                (x - expected).abs() <= bound,
                "table {number} entry {i}: {x}, expected {expected}, bound {bound}"
            );
        }
    }
}

pub fn check(driver: &dyn Driver, case: &Case) {
    let ([b, g, r, d], shape) = (case.sizes(), case.shape);
    let rows = Trajectory::new(case);
    let lens = case.lens(5);
    let (mut heads, mut caches): (Vec<_>, Vec<_>) = (0..b * g)
        .map(|at| prompted(case, &rows, at, lens[at / g]))
        .unzip();
    let mut batch = Batch::new(driver, case);
    let cached = LayerRows::new(driver, shape, case.float).unwrap();
    batch.append(&cached, &rows.keys, &rows.values);
    let held = cached.read_head(0, 7).unwrap();
    for (held, of) in held.iter().zip([caches[0].keys(), caches[0].values()]) {
        let mut scratch = vec![0.0; d];
        (0..7).for_each(|p| assert_eq!(held[p * d..(p + 1) * d], *of.row(p, &mut scratch)));
    }
    batch.set(&lens.iter().map(|n| n + case.special.turn).collect::<Vec<_>>());
    let space = Rc::new(LfpsWorkspace::new(driver, shape, &case.limits).unwrap());
    let lfps = Lfps::new(
        driver,
        shape,
        &case.limits,
        &case.special.params,
        Rc::clone(&space),
    )
    .unwrap();
    lfps.write(&heads).unwrap();
    let attention = Attention::new(driver, shape).unwrap();
    let sums = Buffer::<f64>::zeros(driver, "sums", TALLIES).unwrap();
    let (mut expected, mut relative, mut bypassed, mut chosen_count) = ([0.0; TALLIES], 0.0, 0, 0);
    let total = rows.total;
    for step in 0..STEPS {
        batch.advance(1);
        let positions = &batch.positions;
        let at_step = |head: usize| {
            let t = batch.lens[head / (g * r)] - 1;
            matrix(&rows.queries, head, [total, d]).row(t).to_vec()
        };
        let queries: Vec<f32> = (0..b * g * r).flat_map(at_step).collect();
        let uploaded = upload(driver, &queries);
        let selection = lfps.select(&uploaded, &cached, positions).unwrap();
        let chosen = selection.read().unwrap();
        cached
            .attend(&attention, &uploaded, positions, Some(selection))
            .unwrap();
        let before = output(&attention);
        lfps.observe(&uploaded, &cached, positions, &attention).unwrap();
        lfps.tally(positions, &sums).unwrap();
        let (after, marks, tables) = (
            output(&attention),
            held_bypassed(&space),
            held_tables(&lfps, shape),
        );
        let mut of_step = 0.0f64;
        for at in 0..b * g {
            let t = batch.lens[at / g] - 1;
            let [keys, values] = [&rows.keys, &rows.values].map(|rows| matrix(rows, at, [total, d]));
            let own = s![t..t + 1, ..];
            caches[at].extend(keys.slice(own), values.slice(own));
            let group = matrix(&queries, at, [r, d]);
            let stepped = step_cpu(&batch, at, &mut heads[at], &caches[at], keys, group);
            assert_eq!(chosen[at], stepped.selection.positions, "step {step} head {at}");
            of_step = of_step.max(stepped.relative);
            chosen_count += chosen[at].len();
            let rows = at * r * d..(at + 1) * r * d;
            let outputs = [&before, &after].map(|output| &output[rows.clone()]);
            bypassed += check_outputs(&stepped, &marks[at * r..(at + 1) * r], outputs);
            let (set, _) = batch.set_of(at);
            for (i, share) in shares(&stepped.selection, &set, r).into_iter().enumerate() {
                // The first three are means over the heads, the others sums.
                expected[i] += if i < 3 { share / (b * g) as f64 } else { share };
            }
        }
        // Both round, and an entry once more in every step.
        relative += 2.0 * of_step + 4.0 * UNIT;
        let each = r * 2 * shape.capacity;
        for (at, tables) in tables.chunks(each).enumerate() {
            compare_tables(tables, &heads[at], shape.capacity, relative);
        }
    }
    for (sum, expected) in sums.read().unwrap().iter().zip(expected) {
        assert!(
            (sum - expected).abs() <= 1e-12 * expected,
            "{sum}, expected {expected}"
        );
    }
    check_purpose(case, bypassed, chosen_count);
}

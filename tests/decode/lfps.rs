//! lfps on the GPU: along a few steps the choices, the bypass, the tables and the shares of the CPU's.

use kvsmith::compute::attention;
use kvsmith::compute::cuda::buffer::Buffer;
use kvsmith::compute::cuda::driver::Driver;
use kvsmith::float::Float;
use kvsmith::kv::Budget;
use kvsmith::kv::StaticSet;
use kvsmith::kv::cuda::attend::{Attention, LayerRows};
use kvsmith::kv::cuda::{Limits, Positions, Shape};
use kvsmith::kv::packed::Center;
use kvsmith::kv::{KvHead, KvType};
use kvsmith::method::lfps::cuda::{Lfps, Space};
use kvsmith::method::lfps::{self as cpu, Setup, Threshold};
use kvsmith::method::{Choice, Place, Prompt, Retriever, Step};
use ndarray::{Array2, ArrayView2, ArrayView3, s};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::rc::Rc;

use super::normals;

/// Half the distance between 1 and the next f32.
const UNIT: f64 = 1.0 / (1u64 << 24) as f64;

#[derive(Clone)]
pub struct Case {
    pub name: &'static str,
    pub float: Float,
    pub shape: Shape,
    /// Positions of the first sequence's prompt, and of a second one.
    pub n: usize,
    pub turn: usize,
    pub steps: usize,
    pub limits: Limits,
    pub params: cpu::Params,
    /// Every key from a few: equal scores.
    pub ties: bool,
    /// How far the sinks' scores are above the others', for the query heads that look at them.
    pub sinks_lead: f32,
    /// How many heads, at the start of a group, always look at the sinks; others do in odd steps.
    pub looking: usize,
}

fn case(name: &'static str, float: Float, [b, g, r, d]: [usize; 4], n: usize, budget: Budget) -> Case {
    let steps = 4;
    Case {
        name,
        float,
        shape: Shape {
            sequences: b,
            kv_heads: g,
            group: r,
            head_dim: d,
            capacity: n + steps + 2,
        },
        n,
        turn: 0,
        steps,
        limits: Limits {
            sinks: 4,
            window: 16,
            model_window: None,
            budget,
        },
        params: cpu::Params::default(),
        ties: false,
        sinks_lead: 0.0,
        looking: 0,
    }
}

pub fn cases() -> Vec<Case> {
    let share = Budget::Fraction;
    let mut all = vec![
        case("llama", Float::F32, [1, 2, 4, 128], 700, share(0.06)),
        case("long", Float::Bf16, [1, 1, 2, 64], 4200, share(0.03)),
        case("batch", Float::F16, [3, 1, 5, 80], 400, share(0.1)),
        case("d40", Float::F32, [1, 1, 16, 40], 300, share(0.05)),
        case("budget_1", Float::F32, [1, 2, 4, 64], 200, share(1.0)),
        // Even the best of each head are too many.
        case("one_position", Float::F32, [1, 2, 8, 64], 400, share(1e-6)),
        case("few", Float::F32, [1, 2, 8, 64], 400, Budget::Count(3)),
        case("no_candidates", Float::F32, [1, 1, 4, 64], 10, share(0.5)),
        Case {
            ties: true,
            ..case("ties", Float::F32, [1, 2, 4, 64], 500, share(0.05))
        },
        Case {
            sinks_lead: 12.0,
            looking: 1,
            ..case("bypass", Float::F32, [2, 2, 4, 64], 300, share(0.1))
        },
        Case {
            sinks_lead: 12.0,
            looking: 2,
            ..case("all_bypassed", Float::Bf16, [1, 2, 2, 128], 300, share(0.1))
        },
        Case {
            sinks_lead: 12.0,
            looking: 1,
            ..case("no_bypass", Float::F32, [1, 2, 4, 64], 300, share(0.1))
        },
        Case {
            sinks_lead: 12.0,
            ..case("sliding", Float::F32, [2, 1, 4, 64], 500, share(0.1))
        },
        // The factors of the tables pass the least that they may be.
        Case {
            turn: 852,
            ..case("decayed", Float::F32, [1, 1, 2, 32], 100, share(0.05))
        },
        case("mean_std", Float::F32, [1, 1, 4, 64], 400, share(0.1)),
    ];
    for case in &mut all {
        match case.name {
            "no_bypass" => case.params.lfps_theta = 1.0,
            "sliding" => case.limits.model_window = Some(300),
            "decayed" => {
                case.params.lfps_rows = 2000;
                case.shape.capacity += case.turn;
            }
            // Some of the most recent positions are candidates, or all of them.
            "few" => case.limits.window = 2,
            "d40" => case.limits.window = 0,
            "mean_std" => {
                case.params.lfps_threshold = Threshold::MeanStd;
                case.params.lfps_alpha = Some(0.4);
            }
            _ => {}
        }
    }
    all
}

/// Keys, values and queries of a whole trajectory.
struct Rows {
    /// `[b g,total,d]` each.
    keys: Vec<f32>,
    values: Vec<f32>,
    /// `[b h,total,d]`.
    queries: Vec<f32>,
    total: usize,
}

impl Rows {
    fn new(case: &Case, shape: &Shape) -> Self {
        let mut rng = ChaCha8Rng::seed_from_u64(case.n as u64);
        let (d, r, total) = (shape.head_dim, shape.group, case.n + case.turn + case.steps);
        let few = normals(&mut rng, 3 * d);
        let mut keys = match case.ties {
            true => (0..shape.heads() * total)
                .flat_map(|_| few[rng.r#gen::<usize>() % 3 * d..][..d].to_vec())
                .collect(),
            false => normals(&mut rng, shape.heads() * total * d),
        };
        let mut queries = normals(&mut rng, shape.query_heads() * total * d);
        // The first channel is that of the sinks.
        let lead = (case.sinks_lead * (d as f32).sqrt()).sqrt();
        for key in keys
            .chunks_mut(total * d)
            .flat_map(|head| head.chunks_mut(d).take(case.limits.sinks))
        {
            key[0] = lead;
        }
        for (head, queries) in queries.chunks_mut(total * d).enumerate() {
            let taste = normals(&mut rng, d);
            for (t, query) in queries.chunks_mut(d).enumerate() {
                // A head likes the same keys in every step.
                query.iter_mut().zip(&taste).for_each(|(q, x)| *q = 0.3 * *q + *x);
                let looks = head % r < case.looking || t % 2 == 1;
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

    fn head<'a>(&self, rows: &'a [f32], at: usize, d: usize) -> ArrayView2<'a, f32> {
        let len = self.total * d;
        ArrayView2::from_shape((self.total, d), &rows[at * len..(at + 1) * len]).unwrap()
    }
}

/// The CPU's method and cache of one KV head, at the end of its prompts.
fn prompted(case: &Case, shape: &Shape, rows: &Rows, at: usize, n: usize) -> (cpu::Lfps, KvHead) {
    let (d, r) = (shape.head_dim, shape.group);
    let kind = match case.float {
        Float::F32 => KvType::F32,
        Float::F16 => KvType::F16,
        Float::Bf16 => KvType::Bf16,
    };
    let place = Place {
        layer: 0,
        kv_head: at % shape.kv_heads,
        group: r,
        head_dim: d,
        model_window: case.limits.model_window,
        sinks: case.limits.sinks,
        window: case.limits.window,
        budget: case.limits.budget,
        kv: kind,
    };
    let mut head = Setup::new(&case.params, None).unwrap().head(&place);
    let empty = head.clone();
    let (keys, values) = (rows.head(&rows.keys, at, d), rows.head(&rows.values, at, d));
    let group = ArrayView3::from_shape(
        (r, rows.total, d),
        &rows.queries[at * r * rows.total * d..(at + 1) * r * rows.total * d],
    )
    .unwrap();
    let mut kv = KvHead::new(kind, d, rows.total, Center::Median);
    for (first, end) in [(0, n), (n, n + case.turn)] {
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
            let from = end.saturating_sub(case.params.lfps_rows);
            let mut other = empty.clone();
            other.fill(&prompt(from, group.slice(s![.., from..end, ..])));
            assert_eq!(other.sums(), head.sums());
            for (a, b) in other.heads().iter().zip(head.heads()) {
                assert_eq!(a.constants(), b.constants());
                assert_eq!(a.vertical.parts(), b.vertical.parts());
                assert_eq!(a.slash.parts(), b.slash.parts());
            }
        }
    }
    (head, kv)
}

/// The largest sum of magnitudes in a scaled product of a query with a key.
fn largest_product(queries: ArrayView2<f32>, keys: ArrayView2<f32>) -> f64 {
    let magnitudes = |rows: ArrayView2<f32>| rows.mapv(|x| f64::from(x).abs());
    let products = magnitudes(queries).dot(&magnitudes(keys).t());
    products.iter().copied().fold(0.0, f64::max) / (queries.ncols() as f64).sqrt()
}

/// What the CPU's step of one KV head did.
struct Stepped {
    choice: Choice,
    /// Of bypassed heads, and how far rounding may move each number.
    joined: Vec<Option<(Vec<f64>, f64)>>,
    /// Relative rounding of a weight.
    relative: f64,
}

fn step_cpu<'a>(
    case: &Case,
    head: &mut cpu::Lfps,
    kv: &'a KvHead,
    keys: ArrayView2<f32>,
    queries: ArrayView2<'a, f32>,
    t: usize,
) -> Stepped {
    let limits = &case.limits;
    let set = StaticSet::at(t, limits.model_window, limits.sinks, limits.window);
    let step = Step {
        step: 0,
        visible: set.visible(),
        candidates: set.candidates.clone(),
        budget: limits.budget.positions(set.visible().len()),
        q_pre: queries,
        q_rope: queries,
        kv,
    };
    let choice = head.select(&step);
    let positions = set.merge(&choice.positions);
    let sinks: Vec<u32> = (set.visible().start as u32..set.candidates.start as u32).collect();
    let (r, d) = queries.dim();
    // A score is a sum of d products in f32, and so is the largest; of a sum that is halved again and again
    // a term is rounded at most so often as there are positions.
    let size = largest_product(queries, keys.slice(s![..=t, ..]));
    let delta = 2.0 * (d as f64 + 8.0) * UNIT * size;
    let relative = (2.0 * delta).exp_m1() + (positions.len() as f64 + 64.0) * 2.0 * UNIT;
    assert!(relative < 0.1, "a bound that says nothing: {relative}");
    let mut weights = Array2::zeros((r, positions.len()));
    let mut joined = vec![None; r];
    for (a, joined) in joined.iter_mut().enumerate() {
        let query = queries.slice(s![a..a + 1, ..]);
        let mut out = Array2::zeros((1, d));
        match choice.bypassed.get(a).and_then(Option::as_ref) {
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
        choice,
        joined,
        relative,
    }
}

/// The shares that [`Stepped`] adds for its head, as the runner counts them.
fn shares(choice: &Choice, set: &StaticSet, r: usize) -> [f64; 3] {
    let n = set.visible().len() as f64;
    let bypassed = choice.bypassed.iter().flatten().count();
    let sinks = set.candidates.start - set.visible().start;
    let attended = match bypassed == r {
        true => sinks,
        false => set.len() + choice.positions.len(),
    };
    [
        (attended as f64 + choice.ranked_rows as f64 / 2.0) / n,
        choice.products as f64 / (n * r as f64),
        bypassed as f64 / r as f64,
    ]
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
    let shape = case.shape.checked().unwrap();
    let (b, g, r, d) = (shape.sequences, shape.kv_heads, shape.group, shape.head_dim);
    let rows = Rows::new(case, &shape);
    let lens: Vec<usize> = (0..b).map(|s| case.n - 5 * s).collect();
    let (mut heads, mut caches): (Vec<_>, Vec<_>) = (0..b * g)
        .map(|at| prompted(case, &shape, &rows, at, lens[at / g]))
        .unzip();
    let lens: Vec<usize> = lens.iter().map(|n| n + case.turn).collect();
    let upload = |values: &[f32]| Buffer::of(driver, "rows", values).unwrap();
    let mut positions = Positions::new(driver, shape, case.limits).unwrap();
    let cached = LayerRows::new(driver, shape, case.float).unwrap();
    positions.advance(rows.total).unwrap();
    let (keys, values) = (upload(&rows.keys), upload(&rows.values));
    cached.append(&keys, &values, rows.total, &positions).unwrap();
    let held = cached.read_head(0, 7).unwrap();
    for (held, of) in held.iter().zip([caches[0].keys(), caches[0].values()]) {
        let mut scratch = vec![0.0; d];
        (0..7).for_each(|p| assert_eq!(held[p * d..(p + 1) * d], *of.row(p, &mut scratch)));
    }
    positions
        .set(&lens.iter().map(|n| *n as u32).collect::<Vec<_>>())
        .unwrap();
    let space = Rc::new(Space::new(driver, shape, &case.limits).unwrap());
    let lfps = Lfps::new(driver, shape, &case.limits, &case.params, space).unwrap();
    lfps.write(&heads).unwrap();
    let attention = Attention::new(driver, shape).unwrap();
    let sums = Buffer::<f64>::zeros(driver, "sums", 3).unwrap();
    let (mut expected, mut relative, mut bypassed, mut chosen_count) = ([0.0; 3], 0.0, 0, 0);
    for step in 0..case.steps {
        positions.advance(1).unwrap();
        let at_step = |head: usize| {
            let t = lens[head / (g * r)] + step;
            rows.queries[(head * rows.total + t) * d..][..d].to_vec()
        };
        let queries: Vec<f32> = (0..b * g * r).flat_map(at_step).collect();
        let uploaded = upload(&queries);
        let selection = lfps.select(&uploaded, &cached, &positions).unwrap();
        let chosen = selection.read().unwrap();
        attention
            .attend(&uploaded, &cached, &positions, Some(selection))
            .unwrap();
        let before = attention.output().unwrap();
        lfps.observe(&uploaded, &cached, &positions, &attention).unwrap();
        lfps.tally(&positions, &sums).unwrap();
        let (after, marks, tables) = (
            attention.output().unwrap(),
            lfps.bypassed().unwrap(),
            lfps.tables().unwrap(),
        );
        let mut of_step = 0.0f64;
        for at in 0..b * g {
            let t = lens[at / g] + step;
            let own_keys = rows.head(&rows.keys, at, d);
            let own = s![t..t + 1, ..];
            caches[at].extend(own_keys.slice(own), rows.head(&rows.values, at, d).slice(own));
            let group = ArrayView2::from_shape((r, d), &queries[at * r * d..(at + 1) * r * d]).unwrap();
            let stepped = step_cpu(case, &mut heads[at], &caches[at], own_keys, group, t);
            assert_eq!(chosen[at], stepped.choice.positions, "step {step} head {at}");
            of_step = of_step.max(stepped.relative);
            chosen_count += chosen[at].len();
            for (a, joined) in stepped.joined.iter().enumerate() {
                let head = at * r + a;
                assert_eq!(marks[head], joined.is_some(), "step {step} query head {head}");
                let (after, before) = (&after[head * d..][..d], &before[head * d..][..d]);
                let Some((joined, bound)) = joined else {
                    assert_eq!(after, before, "a head that was not bypassed");
                    continue;
                };
                bypassed += 1;
                assert!(after != before, "a bypassed head attends what others do");
                for (x, expected) in after.iter().zip(joined) {
                    let off = (f64::from(*x) - expected).abs();
                    assert!(off <= *bound, "query head {head}: {x}, {expected}, bound {bound}");
                }
            }
            let limits = &case.limits;
            let set = StaticSet::at(t, limits.model_window, limits.sinks, limits.window);
            for (sum, share) in expected.iter_mut().zip(shares(&stepped.choice, &set, r)) {
                *sum += share / (b * g) as f64;
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
    // What the case is for has happened.
    let heads = b * g * r * case.steps;
    match case.name {
        "bypass" => assert!(bypassed > heads / 4 && bypassed < heads, "{bypassed} of {heads}"),
        "all_bypassed" => assert_eq!(bypassed, heads),
        "no_bypass" => assert_eq!(bypassed, 0),
        _ => {}
    }
    let any = !matches!(case.name, "no_candidates" | "all_bypassed");
    assert_eq!(chosen_count > 0, any, "{chosen_count} positions");
}

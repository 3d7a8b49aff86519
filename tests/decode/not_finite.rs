//! Attention over rows that hold NaN or infinities: what the CPU gives for them.
//!
//! A score of NaN or infinity makes a query head's output NaN, and so do scores that are all minus infinity. Among
//! others, a score of minus infinity has no weight. A value that is not finite makes its channel so. Nothing else that
//! is attended, and nothing that is not, changes by a bit.

use kvsmith::internal::compute::attention;
use kvsmith::internal::compute::cuda::buffer::Buffer;
use kvsmith::internal::compute::cuda::driver::Driver;
use kvsmith::internal::float::Float;
use kvsmith::internal::kv::Budget;
use kvsmith::internal::kv::cuda::attend::Attention;
use kvsmith::internal::kv::cuda::float::LayerRows;
use kvsmith::internal::kv::cuda::rows::CudaRows;
use kvsmith::internal::kv::packed::{Center, Layout, Packed};
use ndarray::{Array2, s};

use super::attend::{Precision, compare};
use super::cases::{self, Batch, UNIT, bits, matrix, normal, normals, round, sizes_name, some_of, upload};
use super::held::{output, packed_layer, selection};

/// With the most positions chosen per KV head; none for everything visible.
pub type Case = cases::Case<Option<usize>>;

/// Positions of which the last is alone in its tile, so that most of this tile repeats it.
const POSITIONS: usize = 193;
/// The channel that alone decides the score of a key that is not zero there.
const MARKED: usize = 3;

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for float in [Float::F32, Float::F16, Float::Bf16] {
        // Every tile has its block; one block takes tile after tile.
        for (sizes, most) in [
            ([1, 2, 3, 64], None),
            ([1, 2, 3, 64], Some(100)),
            ([2, 8, 2, 80], None),
        ] {
            let mode = most.map_or("dense".to_owned(), |most| format!("most{most}"));
            let name = format!("{}_{mode}", sizes_name(float, sizes));
            let case = Case::new(name, sizes, POSITIONS, 3, most).float(float);
            cases.push(case.static_set(4, 20).budget(Budget::Count(most.unwrap_or(2))));
        }
    }
    cases
}

/// A change of one channel of a key or a value.
#[derive(Clone, Copy, Debug)]
enum Spoilt {
    Key(f32),
    Value(f32),
}

/// Outputs `[b,h,d]` and log-sum-exps `[b,h]`.
type Attended = (Vec<f32>, Vec<f32>);

/// Compares the query heads `heads` of both, bit by bit.
#[track_caller]
fn assert_same(a: &Attended, b: &Attended, heads: std::ops::Range<usize>, what: &str) {
    let d = a.0.len() / a.1.len();
    let rows = heads.start * d..heads.end * d;
    assert_eq!(bits(&a.0[rows.clone()]), bits(&b.0[rows]), "{what}");
    assert_eq!(bits(&a.1[heads.clone()]), bits(&b.1[heads]), "{what}");
}

/// Compares the outputs `[r,d]` and log-sum-exps `[r]` of a KV head with the CPU's, as to which are finite.
#[track_caller]
fn assert_finite_alike(found: [&[f32]; 2], cpu: [&[f32]; 2], what: &str) {
    for (found, cpu) in found.into_iter().zip(cpu) {
        assert_eq!(found.len(), cpu.len());
        for (i, (x, y)) in found.iter().zip(cpu).enumerate() {
            assert_eq!(x.is_finite(), y.is_finite(), "{what}: number {i} is {x}, CPU {y}");
        }
    }
}

pub fn check(driver: &dyn Driver, case: &Case) {
    let mut rng = case.rng();
    let ([b, g, r, d], n) = (case.sizes(), case.n);
    // Products of these overflow; where a query is rounded to f16 only a key can, when it is stored.
    let (of_query, large) = match case.float {
        Float::F16 => (2.0, 1e6),
        Float::F32 | Float::Bf16 => (1e30, 1e30),
    };
    let large = round(case.float, large);
    let of_query = round(case.float, of_query);
    let mut queries = case.rounded(normals(&mut rng, b * g * r * d));
    queries.chunks_mut(d).for_each(|query| query[MARKED] = of_query);
    // The last row of each head is not visible.
    let rows = n + 1;
    let mut keys = case.rounded(normals(&mut rng, b * g * rows * d));
    let mut values = case.rounded(normals(&mut rng, b * g * rows * d));
    keys.chunks_mut(d).for_each(|key| key[MARKED] = 0.0);
    for all in [&mut keys, &mut values] {
        all.chunks_mut(rows * d)
            .for_each(|head| head[n * d..].fill(f32::NAN));
    }

    let mut batch = Batch::new(driver, case);
    batch.set(&vec![n; b]);
    let lists = case.special.map(|most| {
        let list = |at| some_of(&mut rng, batch.set_of(at).0.candidates, most);
        (0..b * g).map(list).collect::<Vec<_>>()
    });
    let chosen = lists
        .as_ref()
        .map(|lists| selection(driver, case.shape, case.special.unwrap(), lists));
    let attention = Attention::new(driver, case.shape).unwrap();
    let run = |queries: &[f32], keys: &[f32], values: &[f32]| -> Attended {
        let cache = LayerRows::new(driver, case.shape, case.float).unwrap();
        let mut batch = Batch::new(driver, case);
        batch.append(&cache, keys, values);
        batch.set(&vec![n; b]);
        batch.advance(0);
        let queries = upload(driver, queries);
        cache
            .attend(&attention, &queries, &batch.positions, chosen.as_ref())
            .unwrap();
        (output(&attention), attention.lse.read().unwrap())
    };
    // Only the first KV head is spoilt.
    let attended = batch.attended(0, lists.as_ref().map(|lists| &lists[0][..]));
    let positions: Vec<u32> = attended.iter().map(|p| *p as u32).collect();
    let on_cpu = |queries: &[f32], keys: &[f32], values: &[f32]| -> Attended {
        let mut kv = case.kv_head();
        kv.extend(matrix(keys, 0, [rows, d]), matrix(values, 0, [rows, d]));
        let mut out = Array2::zeros((r, d));
        let queries = matrix(queries, 0, [r, d]);
        let lse = attention::decode(queries, kv.keys(), kv.values(), &positions, out.view_mut());
        (out.iter().copied().collect(), lse)
    };
    let own = |found: &Attended| (found.0[..r * d].to_vec(), found.1[..r].to_vec());

    let clean = run(&queries, &keys, &values);
    assert!(clean.0.iter().chain(&clean.1).all(|x| x.is_finite()));
    let (all, last) = (attended.clone(), attended.len() - 1);
    let places = [
        ("first", vec![attended[0]]),
        ("middle", vec![attended[last / 2]]),
        ("last", vec![attended[last]]),
        ("some", attended.iter().copied().step_by(3).collect()),
        ("all", all),
        ("none", (0..n).filter(|p| !attended.contains(p)).collect()),
    ];
    let spoilt = [
        Spoilt::Key(f32::NAN),
        Spoilt::Key(f32::INFINITY),
        Spoilt::Key(f32::NEG_INFINITY),
        Spoilt::Key(large),
        Spoilt::Key(-large),
        Spoilt::Value(f32::NAN),
        Spoilt::Value(f32::INFINITY),
    ];
    for (place, at) in &places {
        for spoilt in spoilt {
            let what = format!("{spoilt:?} at {place}");
            let (mut keys, mut values) = (keys.clone(), values.clone());
            for p in at {
                match spoilt {
                    Spoilt::Key(x) => keys[p * d + MARKED] = x,
                    Spoilt::Value(x) => values[p * d + MARKED] = x,
                }
            }
            let found = run(&queries, &keys, &values);
            assert_same(&found, &clean, r..b * g * r, &what);
            let (out, lse) = own(&found);
            let cpu = on_cpu(&queries, &keys, &values);
            assert_finite_alike([&out, &lse], [&cpu.0, &cpu.1], &what);
            let is_finite = |j: usize| match spoilt {
                Spoilt::Key(x) => *place == "none" || x < 0.0 && *place != "all",
                Spoilt::Value(_) => *place == "none" || j != MARKED,
            };
            for (i, x) in out.iter().enumerate() {
                assert_eq!(
                    x.is_finite(),
                    is_finite(i % d),
                    "{what}: channel {} is {x}",
                    i % d
                );
            }
            if *place == "none" {
                assert_same(&found, &clean, 0..r, &what);
            } else if out.iter().all(|x| x.is_finite()) {
                // Keys that are spoilt have no weight.
                let row = |of: &[f32], p: usize| of[p * d..(p + 1) * d].to_vec();
                let rest = attended.iter().filter(|p| !at.contains(p));
                let rest: Vec<_> = rest.map(|p| (row(&keys, *p), row(&values, *p))).collect();
                for (a, query) in queries[..r * d].chunks(d).enumerate() {
                    let out = &out[a * d..(a + 1) * d];
                    compare(&Precision::plain(case.float), query, &rest, out, Some(lse[a]));
                }
            }
        }
    }

    // A query spoils its own output alone.
    for x in [f32::NAN, f32::INFINITY] {
        let mut spoilt = queries.clone();
        spoilt[d + MARKED] = x;
        let found = run(&spoilt, &keys, &values);
        let what = format!("query {x}");
        assert_same(&found, &clean, 0..1, &what);
        assert_same(&found, &clean, 2..b * g * r, &what);
        let (out, lse) = own(&found);
        let cpu = on_cpu(&spoilt, &keys, &values);
        assert_finite_alike([&out, &lse], [&cpu.0, &cpu.1], &what);
        assert!(out[d..2 * d].iter().all(|x| x.is_nan()), "{what}");
    }
}

pub fn packed_cases() -> Vec<cases::Case<Packing>> {
    let case = |name: &str, sizes, most: Option<usize>| {
        let layout = Layout::from(Center::Median);
        let case = cases::Case::new(name, sizes, POSITIONS, 2, Packing { most, layout });
        case.static_set(4, 20).budget(Budget::Count(most.unwrap_or(2)))
    };
    vec![
        case("dense", [1, 2, 3, 64], None),
        case("most100", [1, 2, 3, 128], Some(100)),
        case("many_heads", [2, 8, 2, 80], None),
        case("unsigned", [1, 2, 3, 96], None).with(|packing| packing.layout.signed = false),
    ]
}

#[derive(Clone)]
pub struct Packing {
    /// Most positions chosen per KV head; none for everything visible.
    most: Option<usize>,
    layout: Layout,
}

/// What is done to a KV head's rows before they are packed, or to its queries.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Packable {
    /// A NaN in a key in half precision.
    FullKey,
    /// The same in a value.
    FullValue,
    /// A group of infinite channels in the last key, which has 2 bits.
    KeyGroup,
    /// The same in the last value.
    ValueGroup,
    /// A single NaN in the last key: quantisation leaves nothing of it.
    KeyChannel,
    /// A query whose scores overflow.
    Query,
}

/// Attention over the CPU's 2-bit rows: not finite where the CPU's is not.
pub fn check_packed(driver: &dyn Driver, case: &cases::Case<Packing>) {
    let mut rng = case.rng();
    let ([b, g, r, d], n, shape) = (case.sizes(), case.n, case.shape);
    let Packing { most, layout } = case.special;
    let keys: Vec<Array2<f32>> = (0..b * g)
        .map(|_| Array2::from_shape_simple_fn((n, d), || normal(&mut rng)))
        .collect();
    let values: Vec<Array2<f32>> = (0..b * g)
        .map(|_| Array2::from_shape_simple_fn((n, d), || normal(&mut rng)))
        .collect();
    let last_query = normals(&mut rng, d);
    let queries = normals(&mut rng, b * g * r * d);
    let mut batch = Batch::new(driver, case);
    batch.advance(n);
    // The position in the middle of the prompt is chosen, and kept in half precision.
    let middle = n / 2;
    let lists = most.map(|most| {
        let mut list = |at| {
            let mut list = some_of(&mut rng, batch.set_of(at).0.candidates, most - 1);
            list.push(middle as u32);
            list.sort_unstable();
            list.dedup();
            list
        };
        (0..b * g).map(&mut list).collect::<Vec<_>>()
    });
    let chosen = lists
        .as_ref()
        .map(|lists| selection(driver, shape, most.unwrap(), lists));
    let attention = Attention::new(driver, shape).unwrap();
    let pack = |keys: &Array2<f32>, values: &Array2<f32>| {
        let mut packed = Packed::new(d, layout, n);
        let prompt = s![..n - 1, ..];
        packed.prompt(keys.slice(prompt), values.slice(prompt), &last_query, 0..n - 1);
        packed.extend(keys.slice(s![n - 1.., ..]), values.slice(s![n - 1.., ..]));
        packed
    };
    // A key that has the largest product with the query of the prompt has half precision.
    let keys: Vec<Array2<f32>> = keys
        .into_iter()
        .map(|mut keys| {
            let query = ndarray::ArrayView1::from(&last_query);
            keys.row_mut(middle).assign(&query);
            keys
        })
        .collect();
    let run = |queries: &[f32], first: &Packed, others: &[Packed]| -> Attended {
        let all: Vec<&Packed> = std::iter::once(first).chain(others).collect();
        let layer = packed_layer(driver, shape, &all);
        let queries = upload(driver, queries);
        layer
            .attend(&attention, &queries, &batch.positions, chosen.as_ref())
            .unwrap();
        (output(&attention), attention.lse.read().unwrap())
    };
    let caches: Vec<Packed> = keys.iter().zip(&values).map(|(k, v)| pack(k, v)).collect();
    let clean = run(&queries, &caches[0], &caches[1..]);
    assert!(clean.0.iter().chain(&clean.1).all(|x| x.is_finite()));
    let attended = batch.attended(0, lists.as_ref().map(|lists| &lists[0][..]));
    let positions: Vec<u32> = attended.iter().map(|p| *p as u32).collect();
    for spoilt in [
        Packable::FullKey,
        Packable::FullValue,
        Packable::KeyGroup,
        Packable::ValueGroup,
        Packable::KeyChannel,
        Packable::Query,
    ] {
        let (mut key, mut value, mut queries) = (keys[0].clone(), values[0].clone(), queries.clone());
        match spoilt {
            Packable::FullKey => key[[middle, MARKED]] = f32::NAN,
            Packable::FullValue => value[[middle, MARKED]] = f32::NAN,
            Packable::KeyGroup => key.slice_mut(s![n - 1, ..32]).fill(f32::INFINITY),
            Packable::ValueGroup => value.slice_mut(s![n - 1, ..32]).fill(f32::INFINITY),
            Packable::KeyChannel => key[[n - 1, MARKED]] = f32::NAN,
            Packable::Query => queries[..r * d].fill(3e38),
        }
        let packed = pack(&key, &value);
        assert!(packed.keys.full_positions().contains(&(middle as u32)));
        let found = run(&queries, &packed, &caches[1..]);
        assert_same(&found, &clean, r..b * g * r, &format!("{spoilt:?}"));
        let mut cpu = Array2::zeros((r, d));
        let group = matrix(&queries, 0, [r, d]);
        let cpu_lse = attention::decode(group, &packed.keys, &packed.values, &positions, cpu.view_mut());
        let cpu: Vec<f32> = cpu.iter().copied().collect();
        let (out, lse) = (&found.0[..r * d], &found.1[..r]);
        assert_finite_alike([out, lse], [&cpu, &cpu_lse], &format!("{spoilt:?}"));
        for (i, x) in out.iter().enumerate() {
            let expected = match spoilt {
                Packable::FullKey | Packable::KeyGroup | Packable::Query => false,
                Packable::FullValue => i % d != MARKED,
                Packable::ValueGroup => i % d >= 32,
                Packable::KeyChannel => true,
            };
            assert_eq!(x.is_finite(), expected, "{spoilt:?}: channel {} is {x}", i % d);
        }
    }
}

/// A head that attends nothing has zeros and a log-sum-exp of minus infinity, and one with fewer positions than its blocks
/// could take is not disturbed by those that get none.
pub fn check_nothing(driver: &dyn Driver) {
    let (most, d, n) = (100, 64, POSITIONS);
    for float in [Float::F32, Float::F16, Float::Bf16] {
        let case = Case::new("nothing", [1, 2, 3, d], n, 3, Some(most)).float(float);
        let case = case.static_set(0, 0).budget(Budget::Count(most));
        let (mut rng, r) = (case.rng(), case.shape.group);
        let queries = case.rounded(normals(&mut rng, 2 * r * d));
        let mut rows = case.rounded(normals(&mut rng, 2 * n * d));
        rows[..n * d].fill(f32::NAN);
        let cache = LayerRows::new(driver, case.shape, float).unwrap();
        let mut batch = Batch::new(driver, &case);
        batch.append(&cache, &rows, &rows);
        let lists = [Vec::new(), vec![3, 50, 64, 100, 192]];
        let chosen = selection(driver, case.shape, most, &lists);
        let attention = Attention::new(driver, case.shape).unwrap();
        let uploaded = upload(driver, &queries);
        cache
            .attend(&attention, &uploaded, &batch.positions, Some(&chosen))
            .unwrap();
        let (out, lse) = (output(&attention), attention.lse.read().unwrap());
        assert!(out[..r * d].iter().all(|x| *x == 0.0), "{float:?}");
        assert!(lse[..r].iter().all(|x| *x == f32::NEG_INFINITY), "{float:?}");
        let row = |p: &u32| rows[(n + *p as usize) * d..][..d].to_vec();
        let attended: Vec<_> = lists[1].iter().map(|p| (row(p), row(p))).collect();
        for a in r..2 * r {
            let (query, out) = (&queries[a * d..(a + 1) * d], &out[a * d..(a + 1) * d]);
            compare(&Precision::plain(float), query, &attended, out, Some(lse[a]));
        }
    }
}

/// Two sets of positions and the number that all channels of their outputs have, each with its log-sum-exp, and what
/// there is to be after they are joined; none for a number that is not finite.
type Joined = ([f32; 2], [f32; 2], Option<f64>);

/// The attention over two sets of positions, joined.
pub fn check_join(driver: &dyn Driver) {
    const NAN: f32 = f32::NAN;
    const NOTHING: [f32; 2] = [0.0, f32::NEG_INFINITY];
    let (one, other) = ([1.0, 0.5], [3.0, -0.25]);
    // e^0.75 : 1.
    let share = 0.75f64.exp() / (0.75f64.exp() + 1.0);
    let cases: [Joined; 12] = [
        (one, other, Some(share + 3.0 * (1.0 - share))),
        (one, NOTHING, Some(1.0)),
        (NOTHING, other, Some(3.0)),
        (NOTHING, NOTHING, Some(0.0)),
        ([1.0, 200.0], [3.0, -200.0], Some(1.0)),
        ([NAN, NAN], other, None),
        (one, [NAN, NAN], None),
        ([NAN, NAN], NOTHING, None),
        (NOTHING, [NAN, NAN], None),
        // All scores are minus infinity.
        ([NAN, f32::NEG_INFINITY], other, None),
        ([NAN, f32::NEG_INFINITY], NOTHING, None),
        ([f32::INFINITY, 0.5], other, None),
    ];
    let shape = cases::Case::new("join", [1, 3, 4, 40], 16, 0, ()).shape;
    assert_eq!(shape.query_heads(), cases.len());
    let (w, d) = (shape.width(), shape.head_dim);
    let attention = Attention::new(driver, shape).unwrap();
    let ours: Vec<f32> = cases.iter().flat_map(|case| vec![case.0[0]; w]).collect();
    attention.out.write(&ours).unwrap();
    attention.lse.write(&cases.map(|case| case.0[1])).unwrap();
    let others = cases.iter().flat_map(|case| {
        let mut row = vec![case.1[0]; d];
        row.push(case.1[1]);
        row
    });
    let others = upload(driver, &others.collect::<Vec<_>>());
    let rows = Buffer::<f32>::zeros(driver, "rows", cases.len() * d).unwrap();
    attention.join_rows(&others, &rows).unwrap();
    for ((ours, theirs, expected), row) in cases.iter().zip(rows.read().unwrap().chunks(d)) {
        for x in row {
            let is_right = match expected {
                // Exponentials, with the rounding of their arguments, two products, two sums and a quotient.
                Some(expected) => (f64::from(*x) - expected).abs() <= 16.0 * UNIT * 3.0,
                None => !x.is_finite(),
            };
            assert!(is_right, "{ours:?} and {theirs:?}: {x}, expected {expected:?}");
        }
    }
}

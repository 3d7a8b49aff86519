//! What a prompt leaves on the GPU against the CPU's state on the same keys: signs, centroids and the 2-bit cache,
//! and the rows that decode steps add to it.

use half::{bf16, f16};
use kvsmith::compute::cuda::buffer::Buffer;
use kvsmith::compute::cuda::driver::Driver;
use kvsmith::float::Float;
use kvsmith::kv::Budget;
use kvsmith::kv::StaticSet;
use kvsmith::kv::cuda::attend::LayerRows;
use kvsmith::kv::cuda::packed::PackedLayer;
use kvsmith::kv::cuda::prompt::{Prompts, Queries, Rows};
use kvsmith::kv::cuda::signs::Signs;
use kvsmith::kv::cuda::{Limits, Positions, Shape};
use kvsmith::kv::packed::{Center, Layout, Packed};
use kvsmith::kv::{KvHead, KvType};
use kvsmith::method::selfindex::cuda::SelfIndex;
use kvsmith::method::{Place, Prompt, Retriever, selfindex};
use ndarray::{Array2, Array3};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::{normal, normals};

#[derive(Clone)]
pub struct Case {
    pub name: &'static str,
    pub shape: Shape,
    /// Positions of the first sequence; later ones have fewer, where rows come from a cache.
    pub n: usize,
    /// The cache that rows come from; none for rows as they are.
    pub float: Option<Float>,
    pub layout: Layout,
    pub model_window: Option<usize>,
    /// Whether calibrated centroids join those of the prompt.
    pub prior: bool,
    /// KV heads that are worked on at once.
    pub at_once: usize,
}

pub fn cases() -> Vec<Case> {
    let case = |name, [b, g, r, d]: [usize; 4], n: usize, float| Case {
        name,
        shape: Shape {
            sequences: b,
            kv_heads: g,
            group: r,
            head_dim: d,
            capacity: n + 3,
        },
        n,
        float,
        layout: Layout::from(Center::Median),
        model_window: None,
        prior: false,
        at_once: 100,
    };
    let f32 = Some(Float::F32);
    vec![
        case("llama", [1, 2, 4, 128], 2500, Some(Float::Bf16)),
        case("rows", [2, 2, 4, 64], 300, None),
        Case {
            at_once: 2,
            prior: true,
            ..case("batch", [2, 3, 5, 64], 400, Some(Float::F16))
        },
        case("d80", [1, 2, 1, 80], 333, f32),
        case("d96", [2, 1, 3, 96], 260, Some(Float::Bf16)),
        // A short last group of channels.
        case("d40", [1, 1, 2, 40], 300, f32),
        // So few that all rows count, that all have half precision, and one.
        case("short", [1, 2, 4, 64], 100, f32),
        case("shorter", [1, 2, 4, 64], 40, None),
        case("one", [1, 1, 2, 64], 1, f32),
        Case {
            model_window: Some(120),
            ..case("sliding", [2, 1, 4, 64], 300, Some(Float::F16))
        },
        Case {
            layout: Layout {
                center: Center::Mean,
                full: 20,
                signed: false,
            },
            ..case("unsigned", [1, 2, 2, 64], 300, f32)
        },
        Case {
            layout: Layout {
                center: Center::Mean,
                full: 0,
                signed: true,
            },
            ..case("none_full", [1, 1, 2, 64], 300, f32)
        },
    ]
}

fn stored(float: Option<Float>, x: f32) -> f32 {
    match float {
        None | Some(Float::F32) => x,
        Some(Float::F16) => f16::from_f32(x).to_f32(),
        Some(Float::Bf16) => bf16::from_f32(x).to_f32(),
    }
}

/// Keys whose channels have very different centres and sizes, one of them constant.
fn keys(rng: &mut ChaCha8Rng, rows: usize, d: usize) -> Vec<f32> {
    let channels: Vec<(f32, f32)> = (0..d)
        .map(|_| (normal(rng) * 5.0, 10f32.powf(rng.r#gen::<f32>() * 2.0 - 1.0)))
        .collect();
    let value = |rng: &mut ChaCha8Rng, c: usize| match c {
        5 => 1.5,
        c => channels[c].0 + channels[c].1 * normal(rng),
    };
    (0..rows * d).map(|i| value(rng, i % d)).collect()
}

/// Values, with equal ones in a group of channels.
fn values(rng: &mut ChaCha8Rng, rows: usize, d: usize) -> Vec<f32> {
    let mut values = normals(rng, rows * d);
    for row in values.chunks_mut(d).step_by(3) {
        row[..32].fill(0.75);
    }
    values
}

/// The CPU's cache and index of one KV head.
struct Reference {
    packed: Packed,
    index: selfindex::SelfIndex,
}

impl Reference {
    /// Keys and values `[n,d]`, queries `[r,m,d]`.
    fn of(case: &Case, rows: [&Array2<f32>; 2], queries: &Array3<f32>, prior: Option<&[f32]>) -> Self {
        let (n, d) = rows[0].dim();
        let mut packed = Packed::new(d, case.layout, n);
        let last = queries.index_axis(ndarray::Axis(1), queries.dim().1 - 1);
        let query = last.mean_axis(ndarray::Axis(0)).unwrap().to_vec();
        let seen = StaticSet::at(n - 1, case.model_window, 0, 0).visible();
        packed.prompt(rows[0].view(), rows[1].view(), &query, seen);
        let place = Place {
            layer: 0,
            kv_head: 0,
            group: case.shape.group,
            head_dim: d,
            model_window: case.model_window,
            sinks: 4,
            window: 16,
            budget: Budget::Count(5),
            kv: KvType::F32,
        };
        let params = selfindex::Params {
            center: Some(case.layout.center),
            sign_full: case.layout.full,
            ..selfindex::Params::default()
        };
        let mut index = match prior {
            Some(prior) => {
                let source = selfindex::CentroidSource::Hybrid;
                selfindex::SelfIndex::new(&place, case.layout.center, source, Some(prior.to_vec()))
            }
            None => selfindex::Setup::new(&params, None, d).unwrap().head(&place),
        };
        let mut kv = KvHead::new(KvType::F32, d, n, Center::Median);
        kv.extend(rows[0].view(), rows[1].view());
        index.prefill(&Prompt {
            first: 0,
            k_pre: rows[0].view(),
            q_rope: queries.view(),
            keys: rows[0].view(),
            values: rows[1].view(),
            kv: &kv,
        });
        Self { packed, index }
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
    let lens: Vec<usize> = match case.float {
        None => vec![n; b],
        Some(_) => (0..b).map(|s| n - 7 * s).collect(),
    };
    let limits = Limits {
        sinks: 4,
        window: 16,
        model_window: case.model_window,
        budget: Budget::Count(5),
    };
    let round = |x: Vec<f32>| -> Vec<f32> { x.into_iter().map(|x| stored(case.float, x)).collect() };
    let (keys, values) = (
        round(keys(&mut rng, b * g * n, d)),
        round(values(&mut rng, b * g * n, d)),
    );
    let upload = |values: &[f32]| Buffer::of(driver, "rows", values).unwrap();
    let (key_rows, value_rows) = (upload(&keys), upload(&values));
    let mut positions = Positions::new(driver, shape, limits).unwrap();
    let cache = LayerRows::new(driver, shape, case.float.unwrap_or(Float::F32)).unwrap();
    positions.advance(n).unwrap();
    cache.append(&key_rows, &value_rows, n, &positions).unwrap();
    let set: Vec<u32> = lens.iter().map(|n| *n as u32).collect();
    positions.set(&set).unwrap();
    positions.advance(0).unwrap();
    let rows = match case.float {
        None => [Rows::of(&key_rows, n, d), Rows::of(&value_rows, n, d)],
        Some(_) => [Rows::keys(&cache), Rows::values(&cache)],
    };
    let m = n.min(3);
    let queries = normals(&mut rng, b * g * r * m * d);
    let uploaded = upload(&queries);
    let last = Queries { rows: &uploaded, m };
    let prior = normals(&mut rng, g * d * 16);
    let prior = case.prior.then_some(prior);

    let mut references = Vec::new();
    for at in 0..b * g {
        let own = |of: &'_ [f32]| {
            let rows = &of[at * n * d..][..lens[at / g] * d];
            Array2::from_shape_vec((lens[at / g], d), rows.to_vec()).unwrap()
        };
        let queries = queries[at * r * m * d..(at + 1) * r * m * d].to_vec();
        let queries = Array3::from_shape_vec((r, m, d), queries).unwrap();
        let prior = prior.as_ref().map(|p| &p[at % g * d * 16..][..d * 16]);
        let (keys, values) = (own(&keys), own(&values));
        references.push(Reference::of(case, [&keys, &values], &queries, prior));
    }

    let prompts = Prompts::with_heads(driver, shape, case.at_once).unwrap();
    let mut layer = PackedLayer::new(driver, shape).unwrap();
    prompts
        .pack(rows, last, case.layout, &positions, &mut layer)
        .unwrap();
    compare(driver, shape, &references, &layer, "the prompt");
    // Signs alone are the same, and so is all of it once more.
    let signs = Signs::new(driver, shape).unwrap();
    prompts
        .signs(rows[0], last, case.layout, &positions, &signs)
        .unwrap();
    assert_eq!(signs.read().unwrap(), layer.signs.read().unwrap());

    let index = SelfIndex::empty(driver, shape, &limits).unwrap();
    let calibrated = prior.as_deref().map(upload);
    prompts
        .centroids(rows[0], &signs, calibrated.as_ref(), &positions, index.buffer())
        .unwrap();
    let centroids = index.centroids().unwrap();
    for (own, reference) in centroids.chunks(d * 16).zip(&references) {
        let theirs = reference.index.centroids();
        let largest = theirs.iter().fold(0.0f32, |m, c| m.max(c.abs()));
        for (i, (own, theirs)) in own.iter().zip(theirs).enumerate() {
            // Both are f64 sums of at most n numbers, rounded to f32.
            let bound = f64::from(theirs.abs()) * 0.5f64.powi(23) + f64::from(largest) * 0.5f64.powi(40);
            let off = (f64::from(*own) - f64::from(*theirs)).abs();
            assert!(off <= bound, "centroid {i}: {own}, CPU {theirs}");
        }
    }

    for step in 0..2 {
        positions.advance(1).unwrap();
        let (key, value) = (normals(&mut rng, b * g * d), normals(&mut rng, b * g * d));
        layer
            .append(&upload(&key), &upload(&value), 1, &positions)
            .unwrap();
        for (at, reference) in references.iter_mut().enumerate() {
            let row = |of: &'_ [f32]| Array2::from_shape_vec((1, d), of[at * d..][..d].to_vec()).unwrap();
            reference.packed.extend(row(&key).view(), row(&value).view());
        }
        compare(driver, shape, &references, &layer, &format!("step {step}"));
    }
}

/// Every byte of the cache against the CPU's.
fn compare(driver: &dyn Driver, shape: Shape, references: &[Reference], layer: &PackedLayer, when: &str) {
    let caches: Vec<&Packed> = references.iter().map(|reference| &reference.packed).collect();
    let theirs = PackedLayer::of(driver, shape, &caches).unwrap();
    let (own, cpu) = (layer.signs.read().unwrap(), theirs.signs.read().unwrap());
    assert_eq!(own.full, cpu.full, "{when}: positions that come first");
    assert_eq!(own.centre, cpu.centre, "{when}: centres");
    assert_eq!(own.signs, cpu.signs, "{when}: signs");
    assert_eq!(
        layer.alpha().unwrap(),
        theirs.alpha().unwrap(),
        "{when}: magnitudes"
    );
    for i in 0..2 {
        let (own, cpu) = (layer.read(i).unwrap(), theirs.read(i).unwrap());
        assert_eq!(own.0, cpu.0, "{when}: bits of {i}");
        assert_eq!(own.1, cpu.1, "{when}: scales of {i}");
        assert_eq!(own.2, cpu.2, "{when}: half precision of {i}");
    }
}

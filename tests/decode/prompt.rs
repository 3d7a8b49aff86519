//! What a prompt leaves on the GPU against the CPU's state on the same keys: signs, centroids and the 2-bit cache,
//! and the rows that decode steps add to it.

use half::f16;
use kvsmith::internal::compute::cuda::driver::Driver;
use kvsmith::internal::float::Float;
use kvsmith::internal::kv::cuda::Shape;
use kvsmith::internal::kv::cuda::float::LayerRows;
use kvsmith::internal::kv::cuda::packed::PackedLayer;
use kvsmith::internal::kv::cuda::prompt::{Prompts, Queries};
use kvsmith::internal::kv::cuda::rows::CudaRows;
use kvsmith::internal::kv::cuda::signs::Signs;
use kvsmith::internal::kv::packed::{Center, Layout, Packed};
use kvsmith::internal::kv::{KvHead, KvType, StaticSet};
use kvsmith::internal::method::selfindex::cuda::SelfIndex;
use kvsmith::internal::method::{Place, Prompt, Retriever, selfindex};
use ndarray::{Array3, ArrayView2, Axis, s};
use rand::Rng;
use rand_chacha::ChaCha8Rng;

use super::cases::{self, Batch, matrix, normal, normals, upload};
use super::held::{held_rows, held_signs, packed_layer};

#[derive(Clone)]
pub struct Special {
    /// Whether later sequences have fewer rows.
    varied: bool,
    layout: Layout,
    /// KV heads that are worked on at once.
    at_once: usize,
}

pub type Case = cases::Case<Special>;

pub fn cases() -> Vec<Case> {
    let case = |name: &str, sizes, n, float: Option<Float>| {
        let special = Special {
            varied: float.is_some(),
            layout: Layout::from(Center::Median),
            at_once: 100,
        };
        let case = Case::new(name, sizes, n, 3, special);
        case.float(float.unwrap_or(Float::F32))
    };
    let f32 = Some(Float::F32);
    let mean = |full, signed| Layout {
        full,
        signed,
        ..Layout::from(Center::Mean)
    };
    vec![
        case("llama", [1, 2, 4, 128], 2500, Some(Float::Bf16)),
        case("rows", [2, 2, 4, 64], 300, None),
        case("batch", [2, 3, 5, 64], 400, Some(Float::F16)).with(|s| s.at_once = 2),
        case("d80", [1, 2, 1, 80], 333, f32),
        case("d96", [2, 1, 3, 96], 260, Some(Float::Bf16)),
        // A short last group of channels.
        case("d40", [1, 1, 2, 40], 300, f32),
        // So few that all rows count, that all have half precision, and one.
        case("short", [1, 2, 4, 64], 100, f32),
        case("shorter", [1, 2, 4, 64], 40, None),
        case("one", [1, 1, 2, 64], 1, f32),
        case("sliding", [2, 1, 4, 64], 300, Some(Float::F16)).model_window(120),
        case("unsigned", [1, 2, 2, 64], 300, f32).with(|s| s.layout = mean(20, false)),
        case("none_full", [1, 1, 2, 64], 300, f32).with(|s| s.layout = mean(0, true)),
    ]
}

/// Keys whose channels have very different centers and sizes, one of them constant.
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
    fn new(case: &Case, rows: [ArrayView2<f32>; 2], queries: &Array3<f32>) -> Self {
        let (layout, [keys, values]) = (case.special.layout, rows);
        let (n, d) = keys.dim();
        let mut packed = Packed::new(d, layout, n);
        let last = queries.index_axis(Axis(1), queries.dim().1 - 1);
        let query = last.mean_axis(Axis(0)).unwrap().to_vec();
        let seen = StaticSet::at(n - 1, case.limits.model_window, 0, 0).visible();
        packed.prompt(keys, values, &query, seen.clone());
        // The cache has the full-precision tokens.
        let place = Place {
            kv: KvType::TWO_BIT,
            ..case.place(0)
        };
        let params = selfindex::SelfIndexParams {
            center: Some(layout.center),
            sign_full: layout.full,
            ..selfindex::SelfIndexParams::default()
        };
        let method = selfindex::SelfIndexMethod::new(&params, None, d).unwrap();
        let mut index = method.head(&place);
        let mut kv = KvHead::new(KvType::TWO_BIT, d, n, layout);
        kv.prompt(keys, values, &query, seen);
        index.prefill(&Prompt {
            first: 0,
            k_pre: keys.reborrow(),
            q_rope: queries.view(),
            keys: keys.reborrow(),
            values: values.reborrow(),
            kv: &kv,
        });
        Self { packed, index }
    }
}

pub fn check(driver: &dyn Driver, case: &Case) {
    let mut rng = case.rng();
    let ([b, g, r, d], n, shape) = (case.sizes(), case.n, case.shape);
    let Special {
        varied,
        layout,
        at_once,
    } = case.special;
    let lens = case.lens(if varied { 7 } else { 0 });
    let keys = case.rounded(keys(&mut rng, b * g * n, d));
    let values = case.rounded(values(&mut rng, b * g * n, d));
    let mut batch = Batch::new(driver, case);
    let cache = LayerRows::new(driver, shape, case.float).unwrap();
    batch.append(&cache, &keys, &values);
    batch.set(&lens);
    batch.advance(0);
    let m = n.min(3);
    let queries = normals(&mut rng, b * g * r * m * d);
    let uploaded = upload(driver, &queries);
    let last = Queries { rows: &uploaded, m };

    let mut references = Vec::new();
    for at in 0..b * g {
        let own = [&keys, &values].map(|all| matrix(all, at, [n, d]).slice_move(s![..lens[at / g], ..]));
        let queries = queries[at * r * m * d..(at + 1) * r * m * d].to_vec();
        let queries = Array3::from_shape_vec((r, m, d), queries).unwrap();
        references.push(Reference::new(case, own, &queries));
    }

    let prompts = Prompts::with_heads(driver, shape, at_once).unwrap();
    let mut layer = PackedLayer::new(driver, shape).unwrap();
    prompts
        .pack(&cache, last, layout, &batch.positions, &mut layer)
        .unwrap();
    compare(driver, shape, &references, &layer, "the prompt");
    // Signs alone are the same, and so is all of it once more.
    let signs = Signs::new(driver, shape).unwrap();
    prompts
        .signs(&cache, last, layout, &batch.positions, &signs)
        .unwrap();
    assert_eq!(held_signs(&signs), held_signs(&layer.signs));

    let index = SelfIndex::empty(driver, shape, &case.limits).unwrap();
    prompts
        .centroids(&cache, &signs, &batch.positions, &index.centroids)
        .unwrap();
    let centroids = index.centroids.read().unwrap();
    for (own, reference) in centroids.chunks(d * 16).zip(&references) {
        compare_centroids(own, reference.index.centroids());
    }

    for step in 0..2 {
        batch.advance(1);
        let (mut key, mut value) = (normals(&mut rng, b * g * d), normals(&mut rng, b * g * d));
        if step == 1 {
            // What is left of a group of infinite numbers is NaN; of a single one, nothing.
            key[..32].fill(f32::INFINITY);
            value[..32].fill(f32::INFINITY);
            key[33] = f32::INFINITY;
            value[33] = f32::NAN;
        }
        layer
            .append(
                &upload(driver, &key),
                &upload(driver, &value),
                1,
                &batch.positions,
            )
            .unwrap();
        for (at, reference) in references.iter_mut().enumerate() {
            let [key, value] = [&key, &value].map(|all| matrix(all, at, [1, d]));
            reference.packed.extend(key, value);
        }
        compare(driver, shape, &references, &layer, &format!("step {step}"));
    }
}

/// The device's centroids against the CPU's: both are f64 sums of at most n numbers, rounded to f32.
fn compare_centroids(own: &[f32], theirs: &[f32]) {
    let largest = theirs.iter().fold(0.0f32, |m, c| m.max(c.abs()));
    for (i, (own, theirs)) in own.iter().zip(theirs).enumerate() {
        let bound = f64::from(theirs.abs()) * 0.5f64.powi(23) + f64::from(largest) * 0.5f64.powi(40);
        let off = (f64::from(*own) - f64::from(*theirs)).abs();
        assert!(off <= bound, "centroid {i}: {own}, CPU {theirs}");
    }
}

/// Every byte of the cache against the CPU's.
fn compare(driver: &dyn Driver, shape: Shape, references: &[Reference], layer: &PackedLayer, when: &str) {
    let caches: Vec<&Packed> = references.iter().map(|reference| &reference.packed).collect();
    let theirs = packed_layer(driver, shape, &caches);
    let (own, cpu) = (held_signs(&layer.signs), held_signs(&theirs.signs));
    assert_eq!(own.full, cpu.full, "{when}: positions that come first");
    assert_eq!(own.centers, cpu.centers, "{when}: centers");
    assert_eq!(own.signs, cpu.signs, "{when}: signs");
    assert_eq!(
        layer.alpha.read().unwrap(),
        theirs.alpha.read().unwrap(),
        "{when}: magnitudes"
    );
    for i in 0..2 {
        let (own, cpu) = (held_rows(layer, i), held_rows(&theirs, i));
        assert_eq!(own.0, cpu.0, "{when}: bits of {i}");
        assert_eq!(own.1.len(), cpu.1.len());
        let same = |(a, b): (&f16, &f16)| a == b || a.is_nan() && b.is_nan();
        assert!(own.1.iter().zip(&cpu.1).all(same), "{when}: scales of {i}");
        assert_eq!(own.2, cpu.2, "{when}: half precision of {i}");
    }
}

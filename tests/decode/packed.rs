//! Attention over the 2-bit cache against f64 over the rows that the CPU's cache gives.

use kvsmith::compute::attention::CachedRows;
use kvsmith::compute::cuda::buffer::Buffer;
use kvsmith::compute::cuda::driver::Driver;
use kvsmith::kv::Budget;
use kvsmith::kv::StaticSet;
use kvsmith::kv::cuda::attend::Attention;
use kvsmith::kv::cuda::packed::PackedLayer;
use kvsmith::kv::cuda::{Limits, Positions, Selection, Shape};
use kvsmith::kv::packed::{Center, Layout, Packed};
use ndarray::Array2;
use rand::seq::SliceRandom;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::attend::{Precision, compare};
use super::{normal, normals};

#[derive(Clone)]
pub struct Case {
    pub name: &'static str,
    pub shape: Shape,
    pub n: usize,
    /// Most positions chosen per KV head; none for everything visible.
    pub most: Option<usize>,
    pub layout: Layout,
}

pub fn cases() -> Vec<Case> {
    let case = |name, [b, g, r, d]: [usize; 4], n: usize, most| Case {
        name,
        shape: Shape {
            sequences: b,
            kv_heads: g,
            group: r,
            head_dim: d,
            capacity: n + 2,
        },
        n,
        most,
        layout: Layout::from(Center::Median),
    };
    vec![
        case("llama", [1, 2, 4, 128], 700, Some(150)),
        case("dense", [2, 1, 5, 64], 300, None),
        case("d80", [1, 2, 4, 80], 260, Some(70)),
        case("d96", [1, 1, 16, 96], 260, Some(70)),
        case("d40", [1, 1, 1, 40], 200, None),
        // So many heads that one block meets tile after tile.
        case("many_heads", [2, 8, 2, 64], 300, Some(200)),
        case("short", [1, 2, 4, 64], 40, None),
        Case {
            layout: Layout {
                full: 0,
                signed: false,
                center: Center::Mean,
            },
            ..case("unsigned", [1, 1, 4, 64], 300, Some(100))
        },
    ]
}

pub fn check(driver: &dyn Driver, case: &Case) {
    let mut rng = ChaCha8Rng::seed_from_u64(case.n as u64);
    let (shape, n) = (case.shape, case.n);
    let (r, d) = (shape.group, shape.head_dim);
    // Channels of very different centres and sizes.
    let sizes: Vec<(f32, f32)> = (0..d)
        .map(|_| {
            (
                normal(&mut rng) * 20.0,
                10f32.powf(rng.r#gen::<f32>() * 3.0 - 2.0),
            )
        })
        .collect();
    let mut caches = Vec::new();
    for _ in 0..shape.heads() {
        let keys = Array2::from_shape_fn((n, d), |(_, c)| sizes[c].0 + sizes[c].1 * normal(&mut rng));
        let values = Array2::from_shape_simple_fn((n, d), || normal(&mut rng));
        let mut packed = Packed::new(d, case.layout, n);
        packed.prompt(keys.view(), values.view(), &normals(&mut rng, d), 0..n);
        caches.push(packed);
    }
    let layer = PackedLayer::of(driver, shape, &caches.iter().collect::<Vec<_>>()).unwrap();
    let (sinks, window) = (4, 20);
    let limits = Limits {
        sinks,
        window,
        model_window: None,
        budget: Budget::Count(case.most.unwrap_or(2)),
    };
    let mut positions = Positions::new(driver, shape, limits).unwrap();
    positions.advance(n).unwrap();
    let set = StaticSet::at(n - 1, None, sinks, window);
    let list = |most: usize, rng: &mut ChaCha8Rng| {
        let mut all: Vec<u32> = set.candidates.clone().map(|p| p as u32).collect();
        all.shuffle(rng);
        all.truncate(most);
        all.sort_unstable();
        all
    };
    let lists = case
        .most
        .map(|most| caches.iter().map(|_| list(most, &mut rng)).collect::<Vec<_>>());
    let chosen = lists
        .as_ref()
        .map(|lists| Selection::of(driver, shape, case.most.unwrap(), lists).unwrap());
    // Scores of a few at most: the channels' sizes are in the keys.
    let queries: Vec<f32> = (0..shape.query_heads() * d)
        .map(|i| normal(&mut rng) / sizes[i % d].1.max(1.0))
        .collect();
    let attention = Attention::new(driver, shape).unwrap();
    let uploaded = Buffer::of(driver, "queries", &queries).unwrap();
    attention
        .attend_packed(&uploaded, &layer, &positions, chosen.as_ref())
        .unwrap();
    let (out, lse) = (attention.output().unwrap(), attention.lse().unwrap());
    for (at, query) in queries.chunks(d).enumerate() {
        let cache = &caches[at / r];
        let list: Vec<usize> = match &lists {
            None => set.candidates.clone().collect(),
            Some(lists) => lists[at / r].iter().map(|p| *p as usize).collect(),
        };
        let attended = (0..set.candidates.start).chain(list).chain(set.candidates.end..n);
        let row = |rows: &dyn CachedRows, p: usize| rows.row(p, &mut vec![0.0; d]).to_vec();
        let attended: Vec<_> = attended
            .map(|p| (row(&cache.keys, p), row(&cache.values, p)))
            .collect();
        let precision = Precision::packed(cache.keys.centre(), &attended);
        compare(
            &precision,
            query,
            &attended,
            &out[at * d..(at + 1) * d],
            Some(lse[at]),
        );
    }
}

//! Attention over the 2-bit cache against f64 over the rows that the CPU's cache gives.

use kvsmith::internal::compute::attention::CachedRows;
use kvsmith::internal::compute::cuda::driver::Driver;
use kvsmith::internal::kv::Budget;
use kvsmith::internal::kv::cuda::attend::Attention;
use kvsmith::internal::kv::cuda::rows::CudaRows;
use kvsmith::internal::kv::packed::{Center, Layout, Packed};
use ndarray::Array2;
use rand::Rng;

use super::attend::{Precision, compare};
use super::cases::{self, Batch, normal, normals, some_of, upload};
use super::held::{output, packed_layer, selection};

#[derive(Clone)]
pub struct Special {
    /// Most positions chosen per KV head; none for everything visible.
    most: Option<usize>,
    layout: Layout,
}

pub type Case = cases::Case<Special>;

pub fn cases() -> Vec<Case> {
    let case = |name: &str, sizes, n, most: Option<usize>| {
        let layout = Layout::from(Center::Median);
        let case = Case::new(name, sizes, n, 2, Special { most, layout });
        case.static_set(4, 20).budget(Budget::Count(most.unwrap_or(2)))
    };
    vec![
        case("llama", [1, 2, 4, 128], 700, Some(150)),
        case("dense", [2, 1, 5, 64], 300, None),
        case("d80", [1, 2, 4, 80], 260, Some(70)),
        case("d96", [1, 1, 16, 96], 260, Some(70)),
        case("d40", [1, 1, 1, 40], 200, None),
        // Enough heads that one block takes tile after tile.
        case("many_heads", [2, 8, 2, 64], 300, Some(200)),
        case("short", [1, 2, 4, 64], 40, None),
        case("unsigned", [1, 1, 4, 64], 300, Some(100)).with(|special| {
            special.layout = Layout {
                full: 0,
                signed: false,
                ..Layout::from(Center::Mean)
            }
        }),
    ]
}

pub fn check(driver: &dyn Driver, case: &Case) {
    let mut rng = case.rng();
    let (shape, n) = (case.shape, case.n);
    let (r, d) = (shape.group, shape.head_dim);
    let Special { most, layout } = case.special;
    // Channels of very different centers and sizes.
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
        let mut packed = Packed::new(d, layout, n);
        packed.prompt(keys.view(), values.view(), &normals(&mut rng, d), 0..n);
        caches.push(packed);
    }
    let layer = packed_layer(driver, shape, &caches.iter().collect::<Vec<_>>());
    let mut batch = Batch::new(driver, case);
    batch.advance(n);
    let lists = most.map(|most| {
        let list = |at| some_of(&mut rng, batch.set_of(at).0.candidates, most);
        (0..shape.heads()).map(list).collect::<Vec<_>>()
    });
    let chosen = lists
        .as_ref()
        .map(|lists| selection(driver, shape, most.unwrap(), lists));
    // Scores of a few at most: the channels' sizes are in the keys.
    let queries: Vec<f32> = (0..shape.query_heads() * d)
        .map(|i| normal(&mut rng) / sizes[i % d].1.max(1.0))
        .collect();
    let attention = Attention::new(driver, shape).unwrap();
    let uploaded = upload(driver, &queries);
    layer
        .attend(&attention, &uploaded, &batch.positions, chosen.as_ref())
        .unwrap();
    let (out, lse) = (output(&attention), attention.lse.read().unwrap());
    for (at, query) in queries.chunks(d).enumerate() {
        let cache = &caches[at / r];
        let row = |rows: &dyn CachedRows, p: usize| rows.row(p, &mut vec![0.0; d]).to_vec();
        let attended = batch.attended(at / r, lists.as_ref().map(|lists| &lists[at / r][..]));
        let attended: Vec<_> = attended
            .into_iter()
            .map(|p| (row(&cache.keys, p), row(&cache.values, p)))
            .collect();
        compare(
            &Precision::packed(cache.keys.centers(), &attended),
            query,
            &attended,
            &out[at * d..(at + 1) * d],
            Some(lse[at]),
        );
    }
}

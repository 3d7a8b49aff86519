//! Keys and values in two formats: rows in 8 bits that are those of the CPU, to the bit, and attention against f64.

use half::f16;
use kvsmith::internal::compute::cuda::buffer::Buffer;
use kvsmith::internal::compute::cuda::driver::Driver;
use kvsmith::internal::float::Float;
use kvsmith::internal::kv::cuda::attend::Attention;
use kvsmith::internal::kv::cuda::format;
use kvsmith::internal::kv::cuda::int8::Int8Rows;
use kvsmith::internal::kv::cuda::pair::PartRows;
use kvsmith::internal::kv::cuda::rows::StaticScores;
use kvsmith::internal::kv::packed::{Center, Layout};
use kvsmith::internal::kv::{Budget, KvHead, KvType, RowFormat};
use ndarray::ArrayView2;
use rand::Rng;
use rand_chacha::ChaCha8Rng;

use super::attend::{Precision, compare};
use super::cases::{self, Batch, UNIT, bits, normal, some_of, twice, upload};
use super::held::{output, selection};

/// With the formats, and the most positions chosen per KV head; none for everything visible.
pub type Case = cases::Case<(KvType, Option<usize>)>;

pub fn cases() -> Vec<Case> {
    let case = |name: &str, kv: &str, sizes, n, most: Option<usize>| {
        let special = (KvType::named(kv).unwrap(), most);
        let case = Case::new(format!("{name}_{kv}"), sizes, n, 3, special).static_set(4, 20);
        case.budget(Budget::Count(most.unwrap_or(2)))
    };
    vec![
        case("llama", "int8", [1, 2, 4, 128], 300, Some(100)),
        case("llama", "k=bf16,v=int8", [1, 2, 4, 128], 300, Some(100)),
        case("dense", "int8", [2, 1, 5, 64], 300, None),
        case("dense", "k=int8,v=f16", [2, 1, 5, 64], 300, None),
        case("d80", "int8", [1, 2, 4, 80], 260, Some(70)),
        case("d80", "k=f16,v=bf16", [1, 2, 4, 80], 260, Some(70)),
        case("d96", "int8", [1, 1, 16, 96], 260, Some(70)),
        case("d20", "int8", [1, 2, 1, 20], 130, Some(20)),
        case("d20", "k=f32,v=int8", [1, 2, 1, 20], 130, Some(20)),
        case("d33", "int8", [2, 2, 3, 33], 130, None),
        case("d33", "k=int8,v=f32", [2, 2, 3, 33], 130, None),
        // Enough heads that one block takes tile after tile.
        case("many_heads", "int8", [2, 8, 2, 64], 400, Some(250)),
        case("one", "int8", [1, 1, 4, 128], 1, None),
    ]
}

/// A number; some are zeros, tiny or beyond what a scale in f16 can express.
fn number(rng: &mut ChaCha8Rng, is_wide: bool) -> f32 {
    let x = normal(rng);
    match rng.r#gen::<u32>() % 50 {
        0 => 0.0,
        1 => x * 1e-7,
        2 if is_wide => x * 1e7,
        _ => x,
    }
}

/// The rows that the device holds of KV head `at`, `[n,d]`.
fn held(rows: &Int8Rows<'_>, case: &Case, at: usize, n: usize) -> Vec<f32> {
    let (d, capacity) = (case.shape.head_dim, case.shape.capacity);
    let groups = d.div_ceil(64);
    let codes = rows.codes.read().unwrap();
    let scales: Vec<f16> = rows.scales.read().unwrap();
    let rows = at * capacity..at * capacity + n;
    rows.flat_map(|row| {
        let (codes, scales) = (&codes[row * d..][..d], &scales[row * groups..][..groups]);
        let channel = |(c, code): (usize, &u8)| f32::from(*code as i8) * scales[c / 64].to_f32();
        codes.iter().enumerate().map(channel).collect::<Vec<_>>()
    })
    .collect()
}

pub fn check(driver: &dyn Driver, case: &Case) {
    let mut rng = case.rng();
    let ([b, g, r, d], n, (kv, most)) = (case.sizes(), case.n, case.special);
    let queries: Vec<f32> = (0..b * g * r * d).map(|_| normal(&mut rng)).collect();
    let [keys, values] = [true, false].map(|is_key| {
        // Scores of such keys would be too large, and f16 holds no such values.
        let is_wide = !is_key && kv.values != RowFormat::F16;
        let mut rows: Vec<f32> = (0..b * g * n * d).map(|_| number(&mut rng, is_wide)).collect();
        // A row of zeros.
        rows[..d].fill(0.0);
        rows
    });
    let layout = Layout::from(Center::Median);
    let heads: Vec<KvHead> = (0..b * g)
        .map(|at| {
            let rows =
                |of| ArrayView2::from_shape((n, d), &<[f32]>::as_ref(of)[at * n * d..][..n * d]).unwrap();
            let mut head = KvHead::new(kv, d, n, layout);
            head.extend(rows(&keys), rows(&values));
            head
        })
        .collect();

    // First all rows but one, then that one.
    let mut batch = Batch::new(driver, case);
    let layer = format::cache(driver, case.shape, kv).unwrap();
    let parts = [kv.keys, kv.values].map(|format| {
        let is_int8 = format == RowFormat::INT8;
        is_int8.then(|| Int8Rows::new(driver, case.shape.checked().unwrap()).unwrap())
    });
    for (first, m) in [(0, n - 1), (n - 1, 1)] {
        let part = |of: &[f32]| {
            let rows = of
                .chunks(n * d)
                .flat_map(|head| &head[first * d..(first + m) * d]);
            rows.copied().collect::<Vec<_>>()
        };
        if m > 0 {
            batch.append(layer.as_ref(), &part(&keys), &part(&values));
            for (rows, of) in parts.iter().zip([&keys, &values]) {
                let new = upload(driver, &part(of));
                let append = |rows: &Int8Rows<'_>| rows.append(&new, m, &batch.positions);
                rows.as_ref().map_or(Ok(()), append).unwrap();
            }
        }
    }
    let mut scratch = vec![0.0; d];
    for (at, head) in heads.iter().enumerate() {
        for (rows, cached) in parts.iter().zip([head.keys(), head.values()]) {
            let Some(rows) = rows else { continue };
            let expected: Vec<f32> = (0..n)
                .flat_map(|p| cached.row(p, &mut scratch).to_vec())
                .collect();
            assert_eq!(bits(&held(rows, case, at, n)), bits(&expected), "head {at}");
        }
    }

    // The shorter sequences take their last rows back.
    batch.set(&(0..b).map(|s| n - s.min(n - 1) * 3).collect::<Vec<_>>());
    batch.advance(0);
    let lists = most.map(|most| {
        let list = |at: usize| some_of(&mut rng, batch.set_of(at).0.candidates, most);
        (0..b * g).map(list).collect::<Vec<_>>()
    });
    let chosen = lists
        .as_ref()
        .map(|lists| selection(driver, case.shape, most.unwrap(), lists));
    let attention = Attention::new(driver, case.shape).unwrap();
    let uploaded = upload(driver, &queries);
    let (out, lse) = twice(|| {
        layer
            .attend(&attention, &uploaded, &batch.positions, chosen.as_ref())
            .unwrap();
        (output(&attention), attention.lse.read().unwrap())
    });
    let mut row = |at: usize, p: usize| {
        let keys = heads[at].keys().row(p, &mut scratch).to_vec();
        (keys, heads[at].values().row(p, &mut scratch).to_vec())
    };
    for (at, query) in queries.chunks(d).enumerate() {
        let attended = batch.attended(at / r, lists.as_ref().map(|lists| &lists[at / r][..]));
        let attended: Vec<_> = attended.into_iter().map(|p| row(at / r, p)).collect();
        let out = &out[at * d..(at + 1) * d];
        compare(
            &Precision::plain(Float::F32),
            query,
            &attended,
            out,
            Some(lse[at]),
        );
    }

    // The softmax over the static set: its log-sum-exp.
    let n_parts = 2;
    let parts = Buffer::<f32>::zeros(driver, "parts", b * g * r * n_parts * 2).unwrap();
    layer
        .score_static(&StaticScores {
            queries: &uploaded,
            positions: &batch.positions,
            parts: &parts,
            n_parts,
        })
        .unwrap();
    let parts = parts.read().unwrap();
    for (at, query) in queries.chunks(d).enumerate() {
        let attended = batch.attended(at / r, Some(&[]));
        let mut size = 0.0f64;
        let mut score = |p| {
            let key = row(at / r, p).0;
            let products = key.iter().zip(query).map(|(k, q)| f64::from(*k) * f64::from(*q));
            let scale = (d as f64).sqrt();
            size = size.max(products.clone().map(f64::abs).sum::<f64>() / scale);
            products.sum::<f64>() / scale
        };
        let n = attended.len() as f64;
        let expected = attended.into_iter().map(|p| score(p).exp()).sum::<f64>().ln();
        let [top, sum] = [parts[at * n_parts * 2], parts[at * n_parts * 2 + 1]].map(f64::from);
        let found = (top + sum.log2()) * std::f64::consts::LN_2;
        // Scores are sums of d products, exponentials are off by some units, and there are n of them.
        let bound = 2.0 * UNIT * ((d as f64 + 8.0) * size + n + 64.0);
        assert!(
            (found - expected).abs() <= bound,
            "{found}, not {expected}, by {bound}"
        );
    }
}

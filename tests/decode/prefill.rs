//! Attention of a prompt's piece against f64, with the bound of the decode steps, and to the bit where a position is
//! not seen.

use kvsmith::compute::attention::visible;
use kvsmith::compute::cuda::buffer::Buffer;
use kvsmith::compute::cuda::driver::Driver;
use kvsmith::float::Float;
use kvsmith::kv::Budget;
use kvsmith::kv::cuda::attend::LayerRows;
use kvsmith::kv::cuda::prefill::{Piece, attend};
use kvsmith::kv::cuda::{Limits, Positions, Shape};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use super::attend::{Precision, compare, round};
use super::normals;

/// A cache, and the piece at its end.
pub struct Case {
    pub name: String,
    float: Float,
    shape: Shape,
    piece: Piece,
    /// What keys are scaled by.
    scale: f32,
}

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let mut add = |float, [b, g, r, d]: [usize; 4], first, rows, window, scale| {
        let piece = Piece {
            sequence: b - 1,
            first,
            rows,
            window,
        };
        let mut name = format!("{float:?}::b{b}_g{g}_r{r}_d{d}_first{first}_m{rows}").to_lowercase();
        if let Some(window) = window {
            name += &format!("_window{window}");
        }
        if scale != 1.0 {
            name += &format!("_scale{scale}");
        }
        cases.push(Case {
            name,
            float,
            shape: Shape {
                sequences: b,
                kv_heads: g,
                group: r,
                head_dim: d,
                // Room for another tile, and a part of one.
                capacity: first + rows + 70,
            },
            piece,
            scale,
        });
    };
    for float in [Float::F32, Float::F16, Float::Bf16] {
        add(float, [1, 1, 4, 64], 0, 65, None, 1.0);
        add(float, [1, 1, 3, 80], 0, 64, None, 1.0);
        add(float, [2, 2, 1, 96], 3, 63, None, 1.0);
        add(float, [1, 1, 8, 128], 0, 65, None, 1.0);
        // Channels that no kernel has by itself, in even and in odd numbers.
        add(float, [1, 1, 3, 40], 100, 64, None, 1.0);
        add(float, [2, 1, 2, 75], 10, 33, Some(20), 1.0);
        add(float, [1, 1, 2, 64], 0, 1, None, 1.0);
        add(float, [1, 2, 1, 128], 200, 1, Some(130), 1.0);
        add(float, [1, 2, 1, 64], 0, 200, None, 1.0);
        add(float, [2, 1, 1, 128], 130, 200, None, 1.0);
        // Windows that end within tiles and between them, and one of a single position.
        add(float, [1, 1, 1, 64], 130, 200, Some(33), 1.0);
        add(float, [1, 1, 1, 80], 128, 64, Some(64), 1.0);
        add(float, [1, 1, 1, 64], 500, 130, Some(1), 1.0);
        add(float, [1, 1, 1, 96], 40, 63, Some(1000), 1.0);
        // A warp's first row that sees all of a tile but its last position, and its last row that sees the first one
        // alone; the same at the other end of a window.
        add(float, [1, 1, 1, 64], 62, 40, None, 1.0);
        add(float, [1, 1, 1, 64], 33, 64, None, 1.0);
        add(float, [1, 1, 1, 64], 192, 64, Some(95), 1.0);
        add(float, [1, 1, 1, 64], 126, 40, Some(64), 1.0);
        add(float, [1, 1, 1, 64], 60, 150, None, 30.0);
        add(float, [1, 1, 1, 64], 60, 150, None, 0.01);
    }
    // Accumulation over a long context.
    add(Float::Bf16, [1, 1, 1, 128], 8000, 20, None, 1.0);
    add(Float::F16, [1, 1, 1, 64], 8000, 20, Some(5000), 1.0);
    add(Float::Bf16, [1, 1, 1, 64], 131_052, 20, None, 1.0);
    cases
}

/// A cache full of NaN but for its first rows, `[b,g,n,d]`.
fn cache<'d>(driver: &'d dyn Driver, case: &Case, keys: &[f32], values: &[f32]) -> LayerRows<'d> {
    let shape = case.shape.checked().unwrap();
    let limits = Limits {
        sinks: 0,
        window: 1,
        model_window: None,
        budget: Budget::Count(1),
    };
    let mut positions = Positions::new(driver, shape, limits).unwrap();
    let rows = LayerRows::new(driver, shape, case.float).unwrap();
    let nan = vec![f32::NAN; shape.heads() * shape.capacity * shape.head_dim];
    let n = case.piece.first + case.piece.rows;
    for (len, keys, values) in [(shape.capacity, &nan[..], &nan[..]), (n, keys, values)] {
        let upload = |values: &[f32]| Buffer::of(driver, "rows", values).unwrap();
        positions.set(&vec![0; shape.sequences]).unwrap();
        positions.advance(len).unwrap();
        rows.append(&upload(keys), &upload(values), len, &positions)
            .unwrap();
    }
    rows
}

/// `[m,h d]`.
fn run(driver: &dyn Driver, case: &Case, queries: &[f32], keys: &[f32], values: &[f32]) -> Vec<f32> {
    let rows = cache(driver, case, keys, values);
    let queries = Buffer::of(driver, "queries", queries).unwrap();
    let behind = [-77.0; 16];
    let start = [&vec![f32::NAN; queries.len()][..], &behind].concat();
    let out = Buffer::of(driver, "outputs", &start).unwrap();
    attend(driver, &queries, &rows, case.piece, &out).unwrap();
    let mut out = out.read().unwrap();
    assert_eq!(
        out.split_off(queries.len()),
        behind,
        "what lies behind the output"
    );
    out
}

pub fn check(driver: &dyn Driver, case: &Case) {
    let Shape {
        sequences: b,
        kv_heads: g,
        group: r,
        head_dim: d,
        ..
    } = case.shape;
    let Piece { first, rows: m, .. } = case.piece;
    let (n, h) = (first + m, g * r);
    let mut rng = ChaCha8Rng::seed_from_u64((n * d + r) as u64);
    let queries = normals(&mut rng, h * m * d);
    let mut keys = normals(&mut rng, b * g * n * d);
    keys.iter_mut().for_each(|k| *k *= case.scale);
    let values = normals(&mut rng, b * g * n * d);
    let out = run(driver, case, &queries, &keys, &values);
    let again = run(driver, case, &queries, &keys, &values);
    assert_eq!(bits(&out), bits(&again), "the same twice");

    let rounded = |x: &[f32]| -> Vec<f32> { x.iter().map(|x| round(case.float, *x)).collect() };
    let precision = Precision::plain(case.float);
    for head in 0..h {
        let at = (case.piece.sequence * g + head / r) * n * d;
        let rows = |x: &[f32]| -> Vec<Vec<f32>> { x[at..at + n * d].chunks(d).map(rounded).collect() };
        let pairs: Vec<_> = rows(&keys).into_iter().zip(rows(&values)).collect();
        for i in 0..m {
            let query = rounded(&queries[(head * m + i) * d..][..d]);
            let seen = &pairs[visible(first + i, case.piece.window)];
            let out = &out[(i * h + head) * d..][..d];
            compare(&precision, &query, seen, out, None);
        }
    }

    // Another key and value at a position change the rows that see it, and nothing else.
    let middle = first + m / 2;
    for position in [middle, visible(middle, case.piece.window).start] {
        let (mut keys, mut values) = (keys.clone(), values.clone());
        for head in 0..b * g {
            let at = (head * n + position) * d;
            keys[at..at + d].fill(0.0);
            values[at..at + d].fill(100.0);
        }
        let other = run(driver, case, &queries, &keys, &values);
        for i in 0..m {
            let sees = visible(first + i, case.piece.window).contains(&position);
            let row = i * h * d..(i + 1) * h * d;
            for (before, after) in out[row.clone()].chunks(d).zip(other[row].chunks(d)) {
                if case.scale > 1.0 && sees {
                    continue; // Its weight may be nothing.
                }
                assert_eq!(bits(before) != bits(after), sees, "row {i}, position {position}");
            }
        }
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|v| v.to_bits()).collect()
}

/// Pieces that do not fit are refused before anything runs.
pub fn check_refused(driver: &dyn Driver) {
    let shape = Shape {
        sequences: 2,
        kv_heads: 1,
        group: 2,
        head_dim: 64,
        capacity: 16,
    };
    let rows = LayerRows::new(driver, shape, Float::F16).unwrap();
    let buffer = |m: usize| Buffer::<f32>::zeros(driver, "rows", 2 * m * 64).unwrap();
    let try_with = |sequence, first, rows_of: usize, window, room| {
        let piece = Piece {
            sequence,
            first,
            rows: rows_of,
            window,
        };
        attend(driver, &buffer(rows_of), &rows, piece, &buffer(room))
    };
    assert!(try_with(1, 12, 4, None, 4).is_ok());
    assert!(try_with(2, 12, 4, None, 4).is_err());
    assert!(try_with(1, 13, 4, None, 4).is_err());
    assert!(try_with(1, 12, 4, Some(0), 4).is_err());
    assert!(try_with(1, 12, 4, None, 3).is_err());
    assert!(try_with(0, 16, 0, None, 0).is_ok());
}

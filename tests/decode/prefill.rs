//! Attention of a prompt's piece against f64, with the bound of the decode steps, and to the bit where a position is
//! not seen.

use kvsmith::internal::compute::attention::visible;
use kvsmith::internal::compute::cuda::buffer::Buffer;
use kvsmith::internal::compute::cuda::driver::{Address, Arg, Driver, Launch};
use kvsmith::internal::compute::cuda::kernels::Kernel;
use kvsmith::internal::error::Result;
use kvsmith::internal::float::Float;
use kvsmith::internal::kv::cuda::float::LayerRows;
use kvsmith::internal::kv::cuda::prefill::{Piece, attend};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use super::attend::{Precision, compare};
use super::cases::{self, Batch, bits, normals, round, sizes_name, upload};

/// With the piece at the end of the cache. Its scale is that of the keys.
pub type Case = cases::Case<Piece>;

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    let mut add = |float, sizes: [usize; 4], first, rows, window, scale| {
        let piece = Piece {
            sequence: sizes[0] - 1,
            first,
            rows,
            window,
        };
        let mut name = format!("{}_first{first}_m{rows}", sizes_name(float, sizes));
        if let Some(window) = window {
            name += &format!("_window{window}");
        }
        if scale != 1.0 {
            name += &format!("_scale{scale}");
        }
        // Room for another tile, and a part of one.
        let case = Case::new(name, sizes, first + rows, 70, piece);
        cases.push(case.float(float).scale(scale));
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
    let shape = case.shape;
    let rows = LayerRows::new(driver, shape, case.float).unwrap();
    let nan = vec![f32::NAN; shape.heads() * shape.capacity * shape.head_dim];
    Batch::new(driver, case).append(&rows, &nan, &nan);
    Batch::new(driver, case).append(&rows, keys, values);
    rows
}

/// `[m,h d]`.
fn run(driver: &dyn Driver, case: &Case, queries: &[f32], keys: &[f32], values: &[f32]) -> Vec<f32> {
    let rows = cache(driver, case, keys, values);
    let behind = [-77.0; 16];
    let start = [&vec![f32::NAN; queries.len()][..], &behind].concat();
    let out = upload(driver, &start);
    attend(driver, &upload(driver, queries), &rows, case.special, &out).unwrap();
    let mut out = out.read().unwrap();
    assert_eq!(
        out.split_off(queries.len()),
        behind,
        "what lies behind the output"
    );
    out
}

/// Cases that need more shared memory than the 99 KiB of compute capability 8.6, 8.9 and 12.0.
pub fn narrow_cases() -> Vec<Case> {
    let mut cases = cases();
    cases.retain(|case| case.shape.width() == 128 && case.n < 1000);
    cases
}

/// [`check`] on a chip whose blocks have 99 KiB.
pub fn check_narrow(driver: &dyn Driver, case: &Case) {
    check(&Narrow(driver), case);
}

/// A device whose blocks have 99 KiB of shared memory.
struct Narrow<'d>(&'d dyn Driver);

impl Driver for Narrow<'_> {
    fn shared_bytes(&self) -> usize {
        99 << 10
    }
    fn adapter(&self) -> String {
        self.0.adapter()
    }
    fn free_bytes(&self) -> Result<u64> {
        self.0.free_bytes()
    }
    fn allocate(&self, bytes: usize) -> Result<Option<Address>> {
        self.0.allocate(bytes)
    }
    fn free(&self, address: Address) {
        self.0.free(address);
    }
    fn write(&self, to: Address, bytes: &[u8]) -> Result<()> {
        self.0.write(to, bytes)
    }
    fn read(&self, from: Address, bytes: &mut [u8]) -> Result<()> {
        self.0.read(from, bytes)
    }
    fn zero(&self, at: Address, bytes: usize) -> Result<()> {
        self.0.zero(at, bytes)
    }
    fn multiprocessors(&self) -> usize {
        self.0.multiprocessors()
    }
    fn blocks_at_once(&self, kernel: &'static Kernel, shared_bytes: usize) -> Result<usize> {
        self.0.blocks_at_once(kernel, shared_bytes)
    }
    unsafe fn launch(&self, kernel: &'static str, shape: Launch, args: &[Arg]) -> Result<()> {
        assert!(shape.shared_bytes <= self.shared_bytes(), "{kernel}: {shape:?}");
        // SAFETY: the caller's promise.
        unsafe { self.0.launch(kernel, shape, args) }
    }
}

pub fn check(driver: &dyn Driver, case: &Case) {
    let [b, g, r, d] = case.sizes();
    let piece = case.special;
    let (n, m, h) = (case.n, piece.rows, g * r);
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
        let at = (piece.sequence * g + head / r) * n * d;
        let rows = |x: &[f32]| -> Vec<Vec<f32>> { x[at..at + n * d].chunks(d).map(rounded).collect() };
        let pairs: Vec<_> = rows(&keys).into_iter().zip(rows(&values)).collect();
        for i in 0..m {
            let query = rounded(&queries[(head * m + i) * d..][..d]);
            let seen = &pairs[visible(piece.first + i, piece.window)];
            let out = &out[(i * h + head) * d..][..d];
            compare(&precision, &query, seen, out, None);
        }
    }

    // An infinite value reaches the rows that see it, and nothing else; nor does another key or value.
    let middle = piece.first + m / 2;
    for (position, value) in [
        (middle, f32::INFINITY),
        (middle, 100.0),
        (visible(middle, piece.window).start, 100.0),
    ] {
        let (mut keys, mut values) = (keys.clone(), values.clone());
        for head in 0..b * g {
            let at = (head * n + position) * d;
            keys[at..at + d].fill(0.0);
            values[at..at + d].fill(value);
        }
        let other = run(driver, case, &queries, &keys, &values);
        for i in 0..m {
            let sees = visible(piece.first + i, piece.window).contains(&position);
            let row = i * h * d..(i + 1) * h * d;
            for (before, after) in out[row.clone()].chunks(d).zip(other[row].chunks(d)) {
                if case.scale > 1.0 && sees {
                    continue; // Its weight may be nothing.
                }
                assert_eq!(bits(before) != bits(after), sees, "row {i}, position {position}");
                let is_finite = after.iter().all(|v| v.is_finite());
                assert_eq!(
                    is_finite,
                    !sees || value.is_finite(),
                    "row {i}, position {position}"
                );
            }
        }
    }
}

/// Pieces that do not fit are refused before anything runs.
pub fn check_refused(driver: &dyn Driver) {
    let shape = cases::Case::new("refused", [2, 1, 2, 64], 16, 0, ()).shape;
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

//! Codes of a prompt's keys on the GPU: those of one key at a time, and the nearest in f64 up to rounding.

use kvsmith::internal::compute::cuda::driver::Driver;
use kvsmith::internal::method::a2ats::cuda::encode::Encoder;
use kvsmith::internal::method::a2ats::cuda::{A2ats, Codebooks, HeadConstants};
use ndarray::Array2;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use super::a2ats::{check_code, random_head};
use super::cases::{self, Batch, normal, normals, upload};
use super::common::model::plain_rope;

#[derive(Clone)]
pub struct Special {
    /// Codewords, and how often each of them is there.
    size: usize,
    copies: usize,
    /// The i-th copy differs by i times this in one channel.
    tilt: f32,
    /// The prompts of the first sequence, one after the other.
    prompts: Vec<usize>,
    /// Rows that are encoded at once.
    rows: usize,
    /// A key that is all zeros, one that is huge, one that is not finite.
    extremes: bool,
}

pub type Case = cases::Case<Special>;

pub fn cases() -> Vec<Case> {
    let case = |name: &str, [b, g, d]: [usize; 3], size, copies, prompts: &[usize], rows| {
        let special = Special {
            size,
            copies,
            tilt: 0.0,
            prompts: prompts.to_vec(),
            rows,
            extremes: false,
        };
        Case::new(name, [b, g, 2, d], prompts.iter().sum(), 7, special)
    };
    vec![
        case("llama", [1, 2, 128], 500, 1, &[200], 256),
        case("batch", [2, 2, 64], 300, 1, &[130, 70], 256),
        // Sizes of no tile: channels that are no multiple of 16, parts of a prompt, one row.
        case("d40", [1, 1, 40], 129, 1, &[61, 1], 37),
        case("d96", [2, 1, 96], 77, 1, &[150], 64),
        case("one_codeword", [1, 1, 64], 1, 1, &[20], 256),
        // Every second codeword again; so many times that only all scores decide.
        case("twins", [1, 2, 64], 300, 2, &[100], 256),
        case("copies", [1, 2, 64], 320, 10, &[100], 30),
        // Scores that differ by little more than the rounding of f32.
        case("near_ties", [1, 2, 128], 300, 3, &[120], 256).with(|c| c.tilt = 2f32.powi(-20)),
        // So many codewords in so few channels that f16 does not tell which is nearest.
        case("close", [1, 2, 8], 3000, 1, &[150], 256),
        case("extremes", [1, 1, 80], 200, 1, &[90], 256).with(|c| c.extremes = true),
    ]
}

/// Codewords of which each is there `copies` times, the first ones first.
fn codebook(special: &Special, d: usize, rng: &mut ChaCha8Rng) -> Array2<f32> {
    let Special {
        size, copies, tilt, ..
    } = *special;
    let base = size / copies;
    let values: Vec<f32> = (0..base * d)
        .map(|_| half::f16::from_f32(normal(rng)).to_f32())
        .collect();
    Array2::from_shape_fn((size, d), |(c, j)| {
        if tilt > 0.0 && j == c % base % d {
            (c / base) as f32 * tilt
        } else {
            values[c % base * d + j]
        }
    })
}

/// A prompt's keys `[b,g,m,d]`, of heads of different sizes.
fn keys(case: &Case, m: usize, rng: &mut ChaCha8Rng) -> Vec<f32> {
    let [b, g, _, d] = case.sizes();
    let mut keys = normals(rng, b * g * m * d);
    for (at, keys) in keys.chunks_mut(m * d).enumerate() {
        keys.iter_mut().for_each(|k| *k *= (1 + 2 * at) as f32);
    }
    if case.special.extremes {
        keys[5 * d..6 * d].fill(0.0);
        keys[6 * d..7 * d].iter_mut().for_each(|k| *k *= 1e5);
        keys[7 * d + 3] = f32::INFINITY;
    }
    keys
}

/// How many rows had too many near codewords for the tensor cores to settle is as the case wants it.
fn check_listed(case: &Case, m: usize, listed: &[u32]) {
    let special = &case.special;
    let expected = match (special.copies, special.extremes) {
        (10, _) => m % special.rows..m % special.rows + 1,
        (_, true) => 1..20,
        (1, _) if case.shape.head_dim > 8 => 0..m / 8 + 1,
        _ => return,
    };
    assert!(
        listed.iter().all(|n| expected.contains(&(*n as usize))),
        "{listed:?}"
    );
}

pub fn check(driver: &dyn Driver, case: &Case) {
    let special = &case.special;
    let mut rng = ChaCha8Rng::seed_from_u64(special.size as u64);
    let ([b, g, _, d], shape) = (case.sizes(), case.shape);
    let rope = plain_rope(d);
    let books: Vec<Array2<f32>> = (0..g).map(|_| codebook(special, d, &mut rng)).collect();
    let heads: Vec<_> = books
        .into_iter()
        .map(|book| random_head(book, &rope, &mut rng))
        .collect();
    let constants: Vec<HeadConstants> = heads.iter().map(|head| head.constants()).collect();
    let codebooks = Codebooks::new(driver, &constants).unwrap();
    let index = || A2ats::new(driver, shape, &case.limits, &codebooks, false).unwrap();
    let (prompts, steps) = (index(), index());
    let encoder = Encoder::new(driver, shape, special.rows).unwrap();
    let mut batch = Batch::new(driver, case);
    // Sequences of different lengths.
    let mut lens: Vec<usize> = (0..b).map(|s| 3 * s).collect();
    for &m in &special.prompts {
        let keys = keys(case, m, &mut rng);
        batch.set(&lens);
        batch.advance(m);
        prompts
            .extend(&upload(driver, &keys), m, &codebooks, &batch.positions, &encoder)
            .unwrap();
        check_listed(case, m, &encoder.listed.read().unwrap());
        batch.set(&lens);
        for i in 0..m {
            batch.advance(1);
            let row: Vec<f32> = (0..b * g)
                .flat_map(|at| keys[(at * m + i) * d..][..d].to_vec())
                .collect();
            steps
                .append(&upload(driver, &row), &codebooks, &batch.positions)
                .unwrap();
        }
        let codes = prompts.codes.read().unwrap();
        assert_eq!(codes, steps.codes.read().unwrap(), "prompts as steps");
        for (i, key) in keys.chunks(d).enumerate() {
            let (at, row) = (i / m, i % m);
            let code = codes[at * shape.capacity + lens[at / g] + row];
            if special.extremes && row == 7 {
                continue;
            }
            check_code(&constants[at % g], key, code as usize);
            let lowest = (code as usize) < special.size / special.copies;
            assert!(lowest || special.tilt > 0.0, "the lowest of equals");
        }
        lens.clone_from(&batch.lens);
    }
}

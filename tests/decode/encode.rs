//! Codes of a prompt's keys on the GPU: those of one key at a time, and the nearest in f64 up to rounding.

use kvsmith::compute::cuda::buffer::Buffer;
use kvsmith::compute::cuda::driver::Driver;
use kvsmith::kv::Budget;
use kvsmith::kv::cuda::{Limits, Positions, Shape};
use kvsmith::method::a2ats::cuda::encode::Encoder;
use kvsmith::method::a2ats::cuda::{A2ats, Codebooks, HeadConstants};
use ndarray::Array2;
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use super::a2ats::{check_code, random_head, rope};
use super::{normal, normals};

#[derive(Clone)]
pub struct Case {
    pub name: &'static str,
    pub shape: Shape,
    /// Codewords, of which each is there so many times.
    pub size: usize,
    pub copies: usize,
    /// The i-th copy differs by i times this in one channel.
    pub tilt: f32,
    /// The prompts of the first sequence, one after the other.
    pub prompts: Vec<usize>,
    /// Rows that are encoded at once.
    pub rows: usize,
    /// A key that is all zeros, one that is huge, one that is not finite.
    pub extremes: bool,
}

pub fn cases() -> Vec<Case> {
    let case = |name, [b, g, d]: [usize; 3], size, copies, prompts: &[usize], rows| Case {
        name,
        shape: Shape {
            sequences: b,
            kv_heads: g,
            group: 2,
            head_dim: d,
            capacity: prompts.iter().sum::<usize>() + 7,
        },
        size,
        copies,
        tilt: 0.0,
        prompts: prompts.to_vec(),
        rows,
        extremes: false,
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
        Case {
            tilt: 2f32.powi(-20),
            ..case("near_ties", [1, 2, 128], 300, 3, &[120], 256)
        },
        // So many codewords in so few channels that f16 does not tell which is nearest.
        case("close", [1, 2, 8], 3000, 1, &[150], 256),
        Case {
            extremes: true,
            ..case("extremes", [1, 1, 80], 200, 1, &[90], 256)
        },
    ]
}

/// Codewords of which each is there `copies` times, the first ones first.
fn codebook(case: &Case, rng: &mut ChaCha8Rng) -> Array2<f32> {
    let (d, base) = (case.shape.head_dim, case.size / case.copies);
    let values: Vec<f32> = (0..base * d)
        .map(|_| half::f16::from_f32(normal(rng)).to_f32())
        .collect();
    Array2::from_shape_fn((case.size, d), |(c, j)| {
        match case.tilt > 0.0 && j == c % base % d {
            true => (c / base) as f32 * case.tilt,
            false => values[c % base * d + j],
        }
    })
}

pub fn check(driver: &dyn Driver, case: &Case) {
    let mut rng = ChaCha8Rng::seed_from_u64(case.size as u64);
    let shape = case.shape.checked().unwrap();
    let (b, g, d) = (shape.sequences, shape.kv_heads, shape.head_dim);
    let rope = rope(d);
    let books: Vec<Array2<f32>> = (0..g).map(|_| codebook(case, &mut rng)).collect();
    let heads: Vec<_> = books
        .into_iter()
        .map(|book| random_head(book, &rope, &mut rng))
        .collect();
    let constants: Vec<HeadConstants> = heads.iter().map(|head| head.constants()).collect();
    let codebooks = Codebooks::new(driver, &constants).unwrap();
    let limits = Limits {
        sinks: 4,
        window: 16,
        model_window: None,
        budget: Budget::Count(5),
    };
    let index = || A2ats::new(driver, shape, &limits, &codebooks, false).unwrap();
    let (prompts, steps) = (index(), index());
    let encoder = Encoder::new(driver, shape, case.rows).unwrap();
    let mut positions = Positions::new(driver, shape, limits).unwrap();
    let upload = |values: &[f32]| Buffer::of(driver, "keys", values).unwrap();
    // Sequences of different lengths.
    let mut lens: Vec<usize> = (0..b).map(|s| 3 * s).collect();
    for &m in &case.prompts {
        // Heads of different sizes.
        let mut keys = normals(&mut rng, b * g * m * d);
        for (at, keys) in keys.chunks_mut(m * d).enumerate() {
            keys.iter_mut().for_each(|k| *k *= (1 + 2 * at) as f32);
        }
        if case.extremes {
            keys[5 * d..6 * d].fill(0.0);
            keys[6 * d..7 * d].iter_mut().for_each(|k| *k *= 1e5);
            keys[7 * d + 3] = f32::INFINITY;
        }
        let set = |positions: &mut Positions, add: usize| {
            let lens: Vec<u32> = lens.iter().map(|n| (n + add) as u32).collect();
            positions.set(&lens).unwrap();
        };
        set(&mut positions, 0);
        positions.advance(m).unwrap();
        prompts
            .extend(&upload(&keys), m, &codebooks, &positions, &encoder)
            .unwrap();
        let listed = encoder.listed().unwrap();
        match (case.copies, case.extremes) {
            (10, _) => assert!(listed.iter().all(|n| *n as usize == m % case.rows), "{listed:?}"),
            (_, true) => assert!(listed.iter().all(|n| *n > 0 && *n < 20), "{listed:?}"),
            (1, _) if d > 8 => assert!(listed.iter().all(|n| *n < m as u32 / 8 + 1), "{listed:?}"),
            _ => {}
        }
        for i in 0..m {
            set(&mut positions, i);
            positions.advance(1).unwrap();
            let row: Vec<f32> = (0..b * g)
                .flat_map(|at| keys[(at * m + i) * d..][..d].to_vec())
                .collect();
            steps.append(&upload(&row), &codebooks, &positions).unwrap();
        }
        let codes = prompts.codes().unwrap();
        assert_eq!(codes, steps.codes().unwrap(), "prompts as steps");
        for (i, key) in keys.chunks(d).enumerate() {
            let (at, row) = (i / m, i % m);
            let code = codes[at * shape.capacity + lens[at / g] + row];
            if case.extremes && row == 7 {
                continue;
            }
            check_code(&constants[at % g], key, code as usize);
            let lowest = (code as usize) < case.size / case.copies;
            assert!(lowest || case.tilt > 0.0, "the lowest of equals");
        }
        lens.iter_mut().for_each(|n| *n += m);
    }
}

//! The next token: the device's choices are the host's.

use kvsmith::internal::compute::cuda::buffer::Buffer;
use kvsmith::internal::compute::cuda::driver::Driver;
use kvsmith::internal::cuda::sample::TokenChoice;
use kvsmith::internal::kv::sample::{Sampler, Sampling};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::cases::{Named, normals, upload};

/// Rows of logits, and how they are drawn from.
pub struct Case {
    name: String,
    vocab: usize,
    /// Logits are multiples of this, and many equal; 0 leaves them as they are.
    step: f32,
    spread: f32,
    temperature: f64,
    top_p: f64,
}

impl Named for Case {
    fn name(&self) -> &str {
        &self.name
    }
}

pub fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for (i, vocab) in [1, 2, 7, 255, 256, 257, 2049, 5003].into_iter().enumerate() {
        for (j, (temperature, top_p)) in [(0.2, 1.0), (1.0, 0.1), (1.0, 0.9), (7.0, 0.5)]
            .into_iter()
            .enumerate()
        {
            let step = [0.0, 0.5, 4.0][(i + j) % 3];
            cases.push(Case {
                name: format!("v{vocab}_t{temperature}_p{top_p}_s{step}"),
                vocab,
                step,
                spread: 4.0,
                temperature,
                top_p,
            });
        }
    }
    let case = |name: &str, vocab, step, spread, temperature, top_p| Case {
        name: name.to_owned(),
        vocab,
        step,
        spread,
        temperature,
        top_p,
    };
    // Everything equal; everything but the first without weight; the whole vocabulary of a model.
    cases.push(case("equal", 700, 1000.0, 4.0, 1.0, 0.95));
    cases.push(case("cold", 3000, 0.0, 4.0, 1e-4, 0.95));
    cases.push(case("hot", 3000, 0.0, 4.0, 1e4, 1.0));
    cases.push(case("large", 128_256, 0.0, 3.0, 0.7, 0.95));
    cases
}

pub fn check(driver: &dyn Driver, case: &Case) {
    let mut rng = ChaCha8Rng::seed_from_u64(case.vocab as u64);
    let rows = 3;
    let rounds = if case.vocab > 100_000 { 2 } else { 8 };
    for round in 0..rounds {
        let mut logits: Vec<f32> = normals(&mut rng, rows * case.vocab)
            .into_iter()
            .map(|v| v * case.spread)
            .collect();
        if case.step > 0.0 {
            // Both zeros come up, and the order of logits tells them apart.
            logits
                .iter_mut()
                .for_each(|v| *v = (*v / case.step).round() * case.step);
        }
        if round == 1 && case.vocab > 4 {
            logits[3] = f32::NEG_INFINITY;
        }
        let seed = rng.r#gen();
        let sampler = || {
            Sampler::new(
                Sampling {
                    temperature: case.temperature,
                    top_p: case.top_p,
                    ..Sampling::default()
                },
                seed,
            )
        };
        let (mut on_host, mut on_device) = (sampler(), sampler());
        let expected: Vec<u32> = logits
            .chunks(case.vocab)
            .map(|row| on_host.next(row.into()).unwrap())
            .collect();
        let uniforms: Vec<f64> = (0..rows).map(|_| on_device.uniform()).collect();

        let device = upload(driver, &logits);
        let uniforms = Buffer::from_slice(driver, "random numbers", &uniforms).unwrap();
        let ids = Buffer::from_slice(driver, "ids", &vec![7u32; rows + 1]).unwrap();
        let choice = TokenChoice::new(driver, rows, case.vocab).unwrap();
        choice.largest(&device, rows, &ids).unwrap();
        let mut greedy = Sampler::new(Sampling::default(), 0);
        let largest: Vec<u32> = logits
            .chunks(case.vocab)
            .map(|row| greedy.next(row.into()).unwrap())
            .collect();
        assert_eq!(ids.read_part(0, rows).unwrap(), largest);
        choice.draw(&device, rows, &uniforms, &ids, &sampler()).unwrap();
        assert_eq!(ids.read_part(0, rows).unwrap(), expected);
        assert_eq!(ids.read().unwrap()[rows], 7);
        assert_eq!(device.read().unwrap(), logits, "the logits stay");
    }
}

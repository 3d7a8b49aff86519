//! The next token: the device's choices are the host's.

use rand::Rng;

use super::case::{Case, normals, rng, upload};
use crate::compute::comparison::Comparison;
use crate::compute::cuda::buffer::Buffer;
use crate::compute::cuda::driver::Driver;
use crate::cuda::sample::TokenChoice;
use crate::error::Result;
use crate::kv::sample::{Sampler, Sampling};

const AREA: &str = "tokens";

/// Rows of logits per case.
const ROWS: usize = 3;

pub fn cases() -> Vec<Case> {
    let of = [(257, 0.7, 0.9), (5003, 1.0, 1.0), (70_000, 0.3, 0.95)];
    let case = |(vocab, temperature, top_p): (usize, f64, f64)| {
        let name = format!("{ROWS} rows of {vocab} logits, temperature {temperature}, top-p {top_p}");
        Case::new(AREA, name, move |watched| {
            check(watched, vocab, temperature, top_p)
        })
    };
    of.into_iter().map(case).collect()
}

fn check(driver: &dyn Driver, vocab: usize, temperature: f64, top_p: f64) -> Result<Comparison> {
    let mut rng = rng(vocab as u64);
    let mut logits: Vec<f32> = normals(&mut rng, ROWS * vocab);
    logits.iter_mut().for_each(|v| *v *= 4.0);
    // Two of the largest ones are equal: the lower id wins.
    (logits[5], logits[vocab - 1]) = (40.0, 40.0);
    let seed = rng.r#gen();
    let sampling = Sampling {
        temperature,
        top_p,
        ..Sampling::default()
    };
    let (mut on_host, mut on_device) = (Sampler::new(sampling, seed), Sampler::new(sampling, seed));
    let mut greedy = Sampler::new(Sampling::default(), 0);
    let rows = || logits.chunks(vocab);
    let largest: Vec<u32> = rows().map(|row| greedy.next(row.into())).collect::<Result<_>>()?;
    let drawn: Vec<u32> = rows()
        .map(|row| on_host.next(row.into()))
        .collect::<Result<_>>()?;
    let uniforms: Vec<f64> = (0..ROWS).map(|_| on_device.uniform()).collect();

    let device = upload(driver, &logits)?;
    let uniforms = Buffer::from_slice(driver, "random numbers", &uniforms)?;
    let ids = Buffer::from_slice(driver, "ids", &[7u32; ROWS])?;
    let choice = TokenChoice::new(driver, ROWS, vocab)?;
    let mut all = Comparison::default();
    choice.largest(&device, ROWS, &ids)?;
    all.equal(&ids.read()?, &largest, || "ids of the largest logits".to_owned());
    choice.draw(&device, ROWS, &uniforms, &ids, &Sampler::new(sampling, seed))?;
    all.equal(&ids.read()?, &drawn, || "ids drawn".to_owned());
    Ok(all)
}

//! A decode step of one layer on an NVIDIA GPU, with random data.

use std::time::Instant;

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use super::cpu_head::uniform;
use super::decode::{ROTATED_BYTES, SINKS, Setting, WINDOW, Work, float};
use super::report::median;
use crate::compute::cuda::buffer::Buffer;
use crate::compute::cuda::driver::Driver;
use crate::compute::cuda::fill::ReadLoop;
use crate::error::Result;
use crate::kv::cuda::attend::{Attention, LayerRows};
use crate::kv::cuda::cache::LayerCache;
use crate::kv::cuda::{Limits, Positions, Rotated, Shape};
use crate::method::bench::Contents;
use crate::method::cuda::{CudaIndex, CudaStep, OnDevice};

/// Steps that are launched before the host waits for them.
const STEPS: usize = 20;

/// Measures a loop that only reads, in GB/s.
pub fn bandwidth(driver: &dyn Driver, runs: usize) -> Result<f64> {
    let bytes = ROTATED_BYTES;
    let reading = ReadLoop::new(driver, bytes)?;
    let mut times = Vec::new();
    for _ in 0..=runs.max(3) {
        reading.wait()?;
        let start = Instant::now();
        reading.run()?;
        reading.wait()?;
        times.push(start.elapsed().as_secs_f64());
    }
    // The first one warmed up.
    Ok(bytes as f64 / median(times.split_off(1)) * 1e-9)
}

/// One copy of a layer's data.
struct Layer<'d> {
    index: Box<dyn CudaIndex + 'd>,
    cache: Option<LayerCache<'d>>,
}

/// Copies of a layer, whose steps are launched in turn.
struct Copies<'d> {
    copies: Vec<Layer<'d>>,
    steps: usize,
    positions: Positions<'d>,
    queries: Buffer<'d, f32>,
    attention: Attention<'d>,
}

/// Prepares the steps of a setting.
///
/// # Errors
/// It does not fit.
pub fn work<'d>(driver: &'d dyn Driver, setting: Setting) -> Result<Box<dyn Work + 'd>> {
    let float = float(setting.caches().kv)?;
    let shape = Shape {
        sequences: setting.batch,
        kv_heads: setting.heads.n_kv_heads,
        group: setting.group(),
        head_dim: setting.heads.head_dim,
        capacity: setting.context,
    };
    let limits = Limits {
        sinks: SINKS,
        window: WINDOW,
        model_window: None,
        budget: setting.caches().budget,
    };
    let mut positions = Positions::new(driver, shape, limits)?;
    positions.set(&vec![setting.context as u32; setting.batch])?;
    let mut rng = ChaCha8Rng::seed_from_u64(setting.seed);
    let queries = uniform(&mut rng, shape.query_heads(), shape.head_dim);
    let queries: Vec<f32> = queries.into_iter().collect();
    let copies = setting.copies();
    let seeds: Vec<u32> = (0..copies as u32)
        .map(|copy| setting.seed as u32 + 4 * copy)
        .collect();
    let at = OnDevice {
        driver,
        shape,
        kv: setting.caches().kv,
    };
    let contents = Contents {
        limits: &vec![limits; copies],
        seeds: &seeds,
        codewords: setting.caches().size,
    };
    let indexes = setting.bench.indexes(at, &contents)?;
    let copies = indexes.into_iter().zip(seeds).map(|(index, seed)| {
        let rows = match setting.attends {
            true => Some(LayerRows::new(driver, shape, float)?),
            false => None,
        };
        rows.iter().try_for_each(|rows| rows.fill(seed))?;
        let cache = rows.map(LayerCache::Plain);
        Ok(Layer { index, cache })
    });
    Ok(Box::new(Copies {
        copies: copies.collect::<Result<_>>()?,
        steps: 0,
        positions,
        queries: Buffer::of(driver, "queries", &queries)?,
        attention: Attention::new(driver, shape)?,
    }))
}

impl Copies<'_> {
    fn step(&mut self) -> Result<()> {
        let layer = &self.copies[self.steps % self.copies.len()];
        self.positions.advance(0)?;
        let step = CudaStep {
            number: self.steps,
            queries: Rotated {
                pre: &self.queries,
                rope: &self.queries,
            },
            cache: layer.cache.as_ref(),
            positions: &self.positions,
        };
        let chosen = layer.index.select(&step)?;
        self.steps += 1;
        match step.cache {
            Some(cache) => cache.attend(&self.attention, &self.queries, step.positions, chosen),
            None => Ok(()),
        }
    }
}

impl Work for Copies<'_> {
    fn run(&mut self) -> Result<f64> {
        self.positions.spans()?;
        let start = Instant::now();
        for _ in 0..STEPS {
            self.step()?;
        }
        // Waits for all of them.
        self.positions.spans()?;
        Ok(start.elapsed().as_secs_f64() / STEPS as f64)
    }
}

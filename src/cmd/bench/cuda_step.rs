//! A decode step of one layer on an NVIDIA GPU, with random data.

use std::time::Instant;

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use super::cpu_head::uniform;
use super::layer_step::{LayerSetting, ROTATED_BYTES, SINKS, WINDOW, float};
use super::report::{measure, median};
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
    let reading = ReadLoop::new(driver, ROTATED_BYTES)?;
    let times = measure(runs.max(3), || {
        reading.wait()?;
        let start = Instant::now();
        reading.run()?;
        reading.wait()?;
        Ok(start.elapsed().as_secs_f64())
    })?;
    Ok(ROTATED_BYTES as f64 / median(times) * 1e-9)
}

/// One copy of a layer's data.
struct LayerCopy<'d> {
    index: Box<dyn CudaIndex + 'd>,
    cache: Option<LayerCache<'d>>,
}

/// Decode steps of one layer, launched on its copies in turn.
pub struct CudaSteps<'d> {
    copies: Vec<LayerCopy<'d>>,
    steps: usize,
    positions: Positions<'d>,
    queries: Buffer<'d, f32>,
    attention: Attention<'d>,
}

impl<'d> CudaSteps<'d> {
    /// Prepares the steps of a setting.
    ///
    /// # Errors
    /// There is too little GPU memory, or the kernels do not support these sizes.
    pub fn new(driver: &'d dyn Driver, setting: &LayerSetting) -> Result<Self> {
        let (layer, caches) = (setting.layer, setting.caches);
        let float = float(caches.kv)?;
        let shape = Shape {
            sequences: layer.sequences,
            kv_heads: layer.kv_heads,
            group: setting.group,
            head_dim: layer.head_dim,
            capacity: layer.context,
        };
        let limits = Limits {
            sinks: SINKS,
            window: WINDOW,
            model_window: None,
            budget: caches.budget,
        };
        let mut positions = Positions::new(driver, shape, limits)?;
        positions.set(&vec![layer.context as u32; layer.sequences])?;
        let mut rng = ChaCha8Rng::seed_from_u64(layer.seed);
        let queries = uniform(&mut rng, shape.query_heads(), shape.head_dim);
        let queries: Vec<f32> = queries.into_iter().collect();
        let copies = setting.copies();
        let seed = |copy| layer.seed as u32 + 4 * copy;
        let seeds: Vec<u32> = (0..copies as u32).map(seed).collect();
        let at = OnDevice {
            driver,
            shape,
            kv: caches.kv,
        };
        let contents = Contents {
            limits: &vec![limits; copies],
            seeds: &seeds,
            codewords: caches.size,
        };
        let indexes = setting.bench.indexes(at, &contents)?;
        let copies = indexes.into_iter().zip(seeds).map(|(index, seed)| {
            let rows = match setting.attends {
                true => Some(LayerRows::new(driver, shape, float)?),
                false => None,
            };
            rows.iter().try_for_each(|rows| rows.fill(seed))?;
            let cache = rows.map(LayerCache::Plain);
            Ok(LayerCopy { index, cache })
        });
        Ok(Self {
            copies: copies.collect::<Result<_>>()?,
            steps: 0,
            positions,
            queries: Buffer::of(driver, "queries", &queries)?,
            attention: Attention::new(driver, shape)?,
        })
    }

    /// Runs some steps; returns the seconds of one.
    pub fn run(&mut self) -> Result<f64> {
        self.positions.spans()?;
        let start = Instant::now();
        for _ in 0..STEPS {
            self.step()?;
        }
        // Waits for all of them.
        self.positions.spans()?;
        Ok(start.elapsed().as_secs_f64() / STEPS as f64)
    }

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

//! A decode step of one layer on an NVIDIA GPU, with random data.

use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use super::report::{measure, median};
use crate::compute::cuda::buffer::Buffer;
use crate::compute::cuda::driver::{Driver, Recording};
use crate::compute::cuda::fill::ReadLoop;
use crate::error::Result;
use crate::kv::Rotated;
use crate::kv::cuda::Positions;
use crate::kv::cuda::attend::Attention;
use crate::kv::cuda::format;
use crate::kv::cuda::rows::CudaRows;
use crate::method::bench::Contents;
use crate::method::cuda::{CudaIndex, CudaStep, OnDevice};
use crate::timing::{LayerSetting, uniform};

/// Least number of steps that are timed together.
const STEPS: usize = 20;
/// Bytes that the plain loop reads, many times the second-level cache of any GPU; and how often it reads them before
/// the host waits for the device.
const READ_BYTES: usize = 2 << 30;
const READS: usize = 4;

/// Measures a loop that only reads, in GB/s by the device's clock; it reads half of the free memory if that is less
/// than 2 GiB.
pub fn bandwidth(driver: &dyn Driver, runs: usize) -> Result<f64> {
    let bytes = READ_BYTES.min(driver.free_bytes()? as usize / 2);
    let reading = ReadLoop::new(driver, bytes)?;
    let times = measure(runs.max(3), || {
        driver.timed(&mut || (0..READS).try_for_each(|_| reading.run()))
    })?;
    Ok((READS * bytes) as f64 / median(times) * 1e-9)
}

/// One copy of a layer's data.
struct LayerCopy<'d> {
    index: Box<dyn CudaIndex + 'd>,
    rows: Option<Box<dyn CudaRows + 'd>>,
}

/// Decode steps of one layer, launched on its copies in turn and recorded, as the steps of a session are.
pub struct CudaSteps<'d> {
    driver: &'d dyn Driver,
    /// The launches of `steps` steps; `None` before the first run.
    recording: Option<Recording<'d>>,
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
        let layer = setting.layer;
        let format = format::find(setting.kv)?;
        let (shape, limits) = (layer.shape, setting.limits);
        let mut positions = Positions::new(driver, shape, limits)?;
        positions.set(&vec![layer.context() as u32; shape.sequences])?;
        let mut rng = ChaCha8Rng::seed_from_u64(layer.seed);
        let queries = uniform(&mut rng, shape.query_heads(), shape.head_dim);
        let queries: Vec<f32> = queries.into_iter().collect();
        let copies = setting.copies();
        let seed = |copy| (layer.seed as u32 & (u32::MAX >> 1)) + 4 * copy;
        let seeds: Vec<u32> = (0..copies as u32).map(seed).collect();
        let at = OnDevice {
            driver,
            shape,
            kv: setting.kv,
        };
        let contents = Contents {
            limits: &vec![limits; copies],
            seeds: &seeds,
            params: &setting.params,
        };
        let indexes = setting.bench.indexes(at, &contents)?;
        let copies = indexes.into_iter().zip(seeds).map(|(index, seed)| {
            let rows = if setting.attends {
                Some(format.cache(driver, shape)?)
            } else {
                None
            };
            rows.iter().try_for_each(|rows| rows.fill(seed))?;
            Ok(LayerCopy { index, rows })
        });
        let copies = copies.collect::<Result<Vec<_>>>()?;
        Ok(Self {
            driver,
            recording: None,
            steps: STEPS.next_multiple_of(copies.len()),
            copies,
            positions,
            queries: Buffer::from_slice(driver, "queries", &queries)?,
            attention: Attention::new(driver, shape)?,
        })
    }

    /// Runs some steps; returns the seconds per step.
    pub fn run(&mut self) -> Result<f64> {
        if self.recording.is_none() {
            let record = || (0..self.steps).try_for_each(|step| self.step(step));
            self.recording = Recording::record(self.driver, record)?;
        }
        let all = self.driver.timed(&mut || match &self.recording {
            Some(recording) => recording.replay(),
            None => (0..self.steps).try_for_each(|step| self.step(step)),
        })?;
        Ok(all / self.steps as f64)
    }

    fn step(&self, number: usize) -> Result<()> {
        let layer = &self.copies[number % self.copies.len()];
        self.positions.begin(0)?;
        let step = CudaStep {
            number,
            queries: Rotated {
                pre: &self.queries,
                rope: &self.queries,
            },
            cache: layer.rows.as_deref(),
            positions: &self.positions,
        };
        let chosen = layer.index.select(&step)?;
        match step.cache {
            Some(cache) => cache.attend(&self.attention, &self.queries, step.positions, chosen),
            None => Ok(()),
        }
    }
}

//! A decode step of one layer on an NVIDIA GPU, with random data.

use std::time::Instant;

use half::f16;
use ndarray::Array2;
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use super::decode::{ROTATED_BYTES, SINKS, Setting, WINDOW, Work, float};
use super::median;
use crate::compute::cuda::buffer::Buffer;
use crate::compute::cuda::driver::Driver;
use crate::compute::cuda::fill::ReadLoop;
use crate::error::Result;
use crate::kv::cuda::attend::{Attention, LayerRows};
use crate::kv::cuda::signs::{HeadSigns, Signs};
use crate::kv::cuda::{Limits, Positions, Shape};
use crate::method::MethodName;
use crate::method::a2ats::cuda::{A2ats, Codebooks, HeadConstants};
use crate::method::selfindex::cuda::SelfIndex;

/// Steps that are launched before the host waits for them.
const STEPS: usize = 20;

/// GB/s of a loop that only reads.
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

enum Index<'d> {
    None,
    A2ats(Codebooks<'d>, A2ats<'d>),
    Signs(Signs<'d>, SelfIndex<'d>),
}

/// One copy of a layer's data.
struct Layer<'d> {
    index: Index<'d>,
    rows: Option<LayerRows<'d>>,
}

struct CudaStep<'d> {
    copies: Vec<Layer<'d>>,
    next: usize,
    positions: Positions<'d>,
    queries: Buffer<'d, f32>,
    attention: Attention<'d>,
}

/// The work of a setting.
///
/// # Errors
/// It does not fit.
pub fn work<'d>(driver: &'d dyn Driver, setting: Setting) -> Result<Box<dyn Work + 'd>> {
    let float = float(setting.kv)?;
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
        budget: setting.budget,
    };
    let mut positions = Positions::new(driver, shape, limits)?;
    positions.set(&vec![setting.context as u32; setting.batch])?;
    let mut rng = ChaCha8Rng::seed_from_u64(setting.seed);
    let queries = uniform(&mut rng, shape.query_heads() * shape.head_dim);
    let copies = (0..setting.copies()).map(|copy| {
        let seed = setting.seed as u32 + 4 * copy as u32;
        let rows = match setting.attends {
            true => Some(LayerRows::new(driver, shape, float)?),
            false => None,
        };
        rows.iter().try_for_each(|rows| rows.fill(seed))?;
        let index = index(driver, &setting, shape, &limits, seed)?;
        Ok(Layer { index, rows })
    });
    Ok(Box::new(CudaStep {
        copies: copies.collect::<Result<_>>()?,
        next: 0,
        positions,
        queries: Buffer::of(driver, "queries", &queries)?,
        attention: Attention::new(driver, shape)?,
    }))
}

fn index<'d>(
    driver: &'d dyn Driver,
    setting: &Setting,
    shape: Shape,
    limits: &Limits,
    seed: u32,
) -> Result<Index<'d>> {
    let (g, d) = (shape.kv_heads, shape.head_dim);
    let mut rng = ChaCha8Rng::seed_from_u64(u64::from(seed));
    match setting.method {
        MethodName::A2ats => {
            let codebook = |rng: &mut ChaCha8Rng| {
                let values = uniform(rng, setting.size * d).into_iter();
                Array2::from_shape_vec(
                    (setting.size, d),
                    values.map(|v| f16::from_f32(v).to_f32()).collect(),
                )
            };
            let books = (0..g).map(|_| codebook(&mut rng));
            let books = books.collect::<std::result::Result<Vec<_>, _>>();
            let books = books.map_err(|e| crate::error::Error::failed(e.to_string()))?;
            let heads = books.iter().map(|codebook| HeadConstants {
                codebook: codebook.view(),
                query_map: Array2::eye(d),
                key_map: Array2::eye(d),
                mean: vec![0.0; d],
            });
            let codebooks = Codebooks::new(driver, &heads.collect::<Vec<_>>())?;
            let a2ats = A2ats::new(driver, shape, limits, &codebooks, false)?;
            a2ats.fill(seed)?;
            Ok(Index::A2ats(codebooks, a2ats))
        }
        MethodName::Selfindex => {
            let centre = vec![0.0; d];
            let head = || HeadSigns {
                signs: &[],
                centre: &centre,
                full: &[],
            };
            let heads: Vec<_> = (0..shape.heads()).map(|_| head()).collect();
            let signs = Signs::of(driver, shape, &heads)?;
            signs.fill(seed)?;
            let centroids = uniform(&mut rng, shape.heads() * d * 16);
            let index = SelfIndex::new(driver, shape, limits, &centroids)?;
            Ok(Index::Signs(signs, index))
        }
        _ => Ok(Index::None),
    }
}

/// From -1 to 1.
fn uniform(rng: &mut ChaCha8Rng, count: usize) -> Vec<f32> {
    (0..count).map(|_| rng.r#gen::<f32>() * 2.0 - 1.0).collect()
}

impl CudaStep<'_> {
    fn step(&mut self) -> Result<()> {
        let layer = &self.copies[self.next];
        self.next = (self.next + 1) % self.copies.len();
        self.positions.advance(0)?;
        let (queries, positions) = (&self.queries, &self.positions);
        let chosen = match &layer.index {
            Index::None => None,
            Index::A2ats(codebooks, a2ats) => Some(a2ats.select(queries, codebooks, positions)?),
            Index::Signs(signs, index) => Some(index.select(queries, signs, positions)?),
        };
        match &layer.rows {
            Some(rows) => self.attention.attend(queries, rows, positions, chosen),
            None => Ok(()),
        }
    }
}

impl Work for CudaStep<'_> {
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

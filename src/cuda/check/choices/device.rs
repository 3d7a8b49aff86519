//! A layer on the device, fed as a session feeds it.

use ndarray::{Array3, s};

use super::{Rows, Setting};
use crate::compute::cuda::buffer::Buffer;
use crate::compute::cuda::driver::Driver;
use crate::cuda::check::case::upload;
use crate::error::{Error, Result};
use crate::float::Float;
use crate::kv::cuda::Positions;
use crate::kv::cuda::attend::Attention;
use crate::kv::cuda::float::LayerRows;
use crate::kv::cuda::format;
use crate::kv::cuda::prompt::{Prompts, Queries};
use crate::kv::cuda::rows::{CudaRows, WholePrompt};
use crate::kv::packed::{Center, Layout};
use crate::kv::{Limits, Qkv, Rotated};
use crate::method::Method;
use crate::method::cuda::{Chunk, CudaIndex, CudaStep, OnDevice, ServedLayer, TALLIES};

/// A layer whose rows are fed to the device.
pub struct Layer<'a> {
    pub driver: &'a dyn Driver,
    pub setting: &'a Setting,
    pub rows: &'a Rows,
}

/// What the device did in all steps.
pub struct Found {
    pub steps: Vec<Chosen>,
    /// The sums of [`CudaIndex::tally`].
    pub tallies: Vec<f64>,
    /// Whether the index ranks by true probabilities.
    pub is_oracle: bool,
}

/// What the device did in a step.
pub struct Chosen {
    /// The chosen positions of each KV head.
    pub lists: Vec<Vec<u32>>,
    /// The attention output, `[h,d]`.
    pub out: Vec<f32>,
}

/// The queries, keys and values of some positions, `[heads,m,d]` on the device.
type Part<'d> = Qkv<Buffer<'d, f32>>;

/// Rows that are the same before and after rotation.
fn both<'b>(rows: &'b Buffer<'_, f32>) -> Rotated<&'b Buffer<'b, f32>> {
    Rotated {
        pre: rows,
        rope: rows,
    }
}

impl<'a> Layer<'a> {
    fn part(&self, first: usize, m: usize) -> Result<Part<'a>> {
        let rows = |of: &Array3<f32>| -> Result<Buffer<'a, f32>> {
            let part = of.slice(s![.., first..first + m, ..]);
            upload(self.driver, &part.iter().copied().collect::<Vec<_>>())
        };
        Ok(Part {
            q: rows(&self.rows.q)?,
            k: rows(&self.rows.k)?,
            v: rows(&self.rows.v)?,
        })
    }

    /// Feeds the prompt and the steps.
    pub fn run(&self, method: &dyn Method) -> Result<Found> {
        let (driver, setting) = (self.driver, self.setting);
        let (shape, limits) = (setting.shape()?, setting.limits());
        let at = OnDevice {
            driver,
            shape,
            kv: setting.kv,
        };
        let without = || Error::internal("CUDA: a method without an index on the device");
        let index = method
            .cuda()
            .ok_or_else(without)?
            .indexes(at, &ServedLayer::all(&[limits], shape.kv_heads))?;
        let index = index.into_iter().next().ok_or_else(without)?;
        let mut cache = format::cache(driver, shape, setting.kv)?;
        let mut positions = Positions::new(driver, shape, limits)?;
        self.prompt(index.as_ref(), cache.as_mut(), &mut positions)?;
        let attention = Attention::new(driver, shape)?;
        let sums = Buffer::<f64>::zeros(driver, "sums of what is read", TALLIES)?;
        let mut steps = Vec::new();
        for number in 0..setting.steps {
            let part = self.part(setting.n + number, 1)?;
            positions.advance(1)?;
            cache.append(&part.k, &part.v, 1, &positions)?;
            index.append(both(&part.k), &positions)?;
            let step = CudaStep {
                number,
                queries: both(&part.q),
                cache: Some(cache.as_ref()),
                positions: &positions,
            };
            let chosen = index.select(&step)?;
            cache.attend(&attention, &part.q, &positions, chosen)?;
            index.observe(&step, &attention)?;
            index.tally(at, &positions, chosen, &sums)?;
            steps.push(Chosen {
                lists: chosen.map_or(Ok(positions.between()), |chosen| chosen.read())?,
                out: attention.output()?,
            });
        }
        Ok(Found {
            steps,
            tallies: sums.read()?,
            is_oracle: index.is_oracle(),
        })
    }

    /// Feeds the prompt in two parts.
    fn prompt(
        &self,
        index: &dyn CudaIndex,
        cache: &mut (dyn CudaRows + 'a),
        positions: &mut Positions<'a>,
    ) -> Result<()> {
        let (driver, n) = (self.driver, self.setting.n);
        let shape = self.setting.shape()?;
        let first = n * 2 / 3;
        index.begin_prompt(0..n, first)?;
        let format = format::find(self.setting.kv)?;
        // A prompt attends rows beside a cache whose rows are no floats.
        let mut context = if format.is_plain() {
            None
        } else {
            Some((
                LayerRows::new(driver, shape, Float::F32)?,
                Positions::new(driver, shape, Limits::last(1))?,
            ))
        };
        let mut last = None;
        for (at, m) in [(0, first), (first, n - first)] {
            let part = self.part(at, m)?;
            positions.advance(m)?;
            if let Some((rows, own)) = &mut context {
                own.advance(m)?;
                rows.append(&part.k, &part.v, m, own)?;
            }
            cache.extend(&part.k, &part.v, m, positions)?;
            index.extend(&Chunk {
                own: Qkv {
                    q: both(&part.q),
                    k: both(&part.k),
                    v: &part.v,
                },
                m,
                rows: rows_of(cache, context.as_ref())?,
                positions,
            })?;
            last = Some((part, m));
        }
        let (last, m) = last.ok_or_else(|| Error::internal("a prompt without parts"))?;
        let queries = Queries { rows: &last.q, m };
        let prompts = if format.needs_room() || index.wants_prompts() {
            Some(Prompts::new(driver, shape)?)
        } else {
            None
        };
        let (prompts, positions) = (prompts.as_ref(), &*positions);
        if let Some((rows, _)) = &context {
            let prompt = WholePrompt {
                rows,
                queries,
                prompts,
                positions,
            };
            cache.prompt(&prompt, Layout::from(Center::Median))?;
        }
        let prompt = WholePrompt {
            rows: rows_of(cache, context.as_ref())?,
            queries,
            prompts,
            positions,
        };
        index.end_of_prompt(&prompt, Some(cache))?;
        index.end_prompt();
        Ok(())
    }
}

/// Returns the rows that a prompt attends.
fn rows_of<'s, 'd>(
    cache: &'s (dyn CudaRows + 'd),
    context: Option<&'s (LayerRows<'d>, Positions<'d>)>,
) -> Result<&'s LayerRows<'s>> {
    let rows = context.map(|(rows, _)| rows).or(cache.plain());
    rows.ok_or_else(|| Error::internal("a prompt without rows"))
}

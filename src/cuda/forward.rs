//! The forward pass of prompts and single tokens, with all weights on the device and the caches on the host.

use std::ops::Range;
use std::sync::Mutex;

use ndarray::{Array1, Array3, s};

use super::ROWS;
use super::body::Body;
use super::context::LayerContext;
use super::finite::FiniteCheck;
use super::layers::fetch;
use super::step::StepSpace;
use super::weights::LayerWeights;
use super::work::{Rotation, RowPositions, Workspace};
use crate::compute::Precision;
use crate::compute::cuda::buffer::Buffer;
use crate::compute::cuda::driver::Driver;
use crate::compute::layout::elements;
use crate::compute::simd;
use crate::env;
use crate::error::{Error, Result};
use crate::float::Float;
use crate::kv::Rotated;
use crate::model::Decoder;
use crate::model::forward::{Attend, Cache, Done, Forward, PromptRows, Rows, check_prompt};

/// The most rows for which a workspace is kept from step to step.
const KEPT_ROWS: usize = 16;

/// A model on the device.
pub struct CudaForward<'a> {
    body: Body<'a>,
    decoder: &'a Decoder,
    /// Element type of the keys and values that a prompt attends.
    float: Float,
    /// The buffers of a decode step.
    step: Mutex<StepSpace<'a>>,
}

impl<'a> CudaForward<'a> {
    /// Copies all weights to the device. [`Source`](super::room::Source) first checks that they fit.
    ///
    /// # Errors
    /// Out of memory; a model whose attention the kernels do not support.
    pub fn new(driver: &'a dyn Driver, decoder: &'a Decoder, precision: Precision) -> Result<Self> {
        let body = Body::load(driver, decoder, precision)?;
        Ok(Self {
            float: body.row_type(),
            step: Mutex::new(StepSpace::new(&body, KEPT_ROWS)?),
            body,
            decoder,
        })
    }

    /// Embeds a prompt, and allocates its buffers.
    fn begin_prompt(&self, ids: &[u32], first: usize) -> Result<Pass<'_>> {
        let (body, m) = (&self.body, ids.len());
        let (driver, s) = (body.driver, body.sizes());
        let pass = Pass {
            first,
            m,
            work: body.workspace(ROWS.min(first + m))?,
            hidden: Buffer::new(driver, "hidden states", m * s.hidden)?,
            rotation: Rotation::new(driver, &body.rope, first, m)?,
            context: LayerContext::new(driver, s.heads.shape(1, first + m), self.float)?,
            finite: FiniteCheck::new(driver)?,
            logits: Buffer::new(driver, "logits", body.config.vocab_size)?,
        };
        body.embed(&Buffer::from_slice(driver, "ids", ids)?, m, &pass.hidden)?;
        Ok(pass)
    }

    /// Allocates what a prompt at these positions takes, and frees it: see [`room`](super::room).
    pub(super) fn rehearse(&self, prompt: Range<usize>) -> Result<()> {
        self.begin_prompt(&vec![0; prompt.len().max(1)], prompt.start)
            .map(drop)
    }

    /// Computes the queries, keys and values of a prompt chunk by chunk, and returns them for the caches.
    fn prompt_rows(&self, weights: &LayerWeights<'_>, pass: &Pass<'_>) -> Result<PromptRows> {
        let (s, m) = (self.body.sizes(), pass.m);
        let heads = |heads| Array3::zeros((heads, m, s.heads.head_dim));
        let mut rows = PromptRows {
            q: heads(s.heads.n_heads),
            k: Rotated {
                pre: heads(s.heads.n_kv_heads),
                rope: heads(s.heads.n_kv_heads),
            },
            v: heads(s.heads.n_kv_heads),
        };
        for (start, n) in pass.chunks() {
            env::check()?;
            let hidden = pass.hidden.part(start * s.hidden, n * s.hidden);
            let at = RowPositions::At {
                first: pass.first + start,
                apart: 1,
            };
            pass.work.project(weights, &hidden, n, n, &pass.rotation, at)?;
            fetch(&pass.work.heads.q.rope, &mut rows.q, start, n)?;
            fetch(&pass.work.heads.k.pre, &mut rows.k.pre, start, n)?;
            fetch(&pass.work.heads.k.rope, &mut rows.k.rope, start, n)?;
            fetch(&pass.work.heads.v, &mut rows.v, start, n)?;
        }
        Ok(rows)
    }

    /// Attends the joined rows that the caches returned, and runs the rest of the layer for the rows from `skipped`
    /// on.
    fn attend_prompt(
        &self,
        weights: &LayerWeights<'_>,
        pass: &mut Pass<'_>,
        rows: &PromptRows,
        skipped: usize,
    ) -> Result<()> {
        let (s, total) = (self.body.sizes(), pass.first + pass.m);
        pass.context.clear()?;
        for start in (0..total).step_by(ROWS) {
            let n = ROWS.min(total - start);
            put(&rows.k.rope, &pass.work.heads.k.rope, start, n)?;
            put(&rows.v, &pass.work.heads.v, start, n)?;
            pass.context
                .append(&pass.work.heads.k.rope, &pass.work.heads.v, n)?;
        }
        for (start, n) in pass.chunks() {
            let (start, n) = match (start + n).checked_sub(skipped) {
                None | Some(0) => continue,
                Some(left) if left < n => (skipped, left),
                Some(_) => (start, n),
            };
            env::check()?;
            put(&rows.q, &pass.work.heads.q.rope, start, n)?;
            let (first, out) = (pass.first + start, &pass.work.attended);
            pass.context
                .rows
                .attend_prompt(&pass.work.heads.q.rope, first, n, weights.window, out)?;
            let hidden = pass.hidden.part(start * s.hidden, n * s.hidden);
            pass.work.finish(weights, &hidden, n)?;
        }
        Ok(())
    }
}

/// A prompt and its buffers.
struct Pass<'d> {
    first: usize,
    m: usize,
    work: Workspace<'d>,
    /// The hidden states, `[m, hidden]`.
    hidden: Buffer<'d, f32>,
    rotation: Rotation<'d>,
    context: LayerContext<'d>,
    finite: FiniteCheck<'d>,
    /// The logits of the last position, `[vocab]`.
    logits: Buffer<'d, f32>,
}

impl Pass<'_> {
    /// Returns the first row and the number of rows of each chunk.
    fn chunks(&self) -> impl Iterator<Item = (usize, usize)> + use<> {
        let m = self.m;
        (0..m)
            .step_by(ROWS)
            .map(move |start| (start, ROWS.min(m - start)))
    }
}

impl Forward for CudaForward<'_> {
    fn decoder(&self) -> &Decoder {
        self.decoder
    }

    fn prompt(&self, ids: &[u32], first: usize, cache: &mut Cache, done: &mut Done) -> Result<Array1<f32>> {
        check_prompt(ids)?;
        self.decoder.check_ids(ids)?;
        let (body, m, s) = (&self.body, ids.len(), self.body.sizes());
        let mut pass = self.begin_prompt(ids, first)?;
        for (index, weights) in body.layers.iter().enumerate() {
            let rows = self.prompt_rows(weights, &pass)?;
            let finite = |x: &Array3<f32>| simd::all_finite(elements(x));
            if ![&rows.q, &rows.k.rope, &rows.v].into_iter().all(finite) {
                let layer = self.decoder.layer(index)?;
                let place = format!("the states of layer {index}");
                return Err(self.decoder.diagnose(&layer.weights(), &place));
            }
            let rows = cache(index, rows);
            // Only the last position of the last layer's output is needed.
            let skipped = if index + 1 == body.layers.len() { m - 1 } else { 0 };
            self.attend_prompt(weights, &mut pass, &rows, skipped)?;
            let left = (m - skipped) * s.hidden;
            pass.finite
                .look(&pass.hidden.part(skipped * s.hidden, left), left, index)?;
            done(m);
        }
        let last = pass.hidden.part((m - 1) * s.hidden, s.hidden);
        body.logits(&pass.work, &last, 1, &pass.logits, &pass.finite)?;
        pass.finite.check(body)?;
        Ok(Array1::from(pass.logits.read()?))
    }

    fn step(&self, ids: &[u32], positions: &[usize], attend: &mut Attend) -> Result<Vec<Array1<f32>>> {
        self.decoder.check_ids(ids)?;
        let (body, n) = (&self.body, ids.len());
        let (driver, s) = (body.driver, body.sizes());
        let vocab = self.decoder.config.vocab_size;
        let mut space = self
            .step
            .lock()
            .map_err(|_| Error::internal("an earlier step ended badly"))?;
        if n > space.rows {
            *space = StepSpace::new(body, n)?;
        }
        let (work, hidden) = (&space.work, &space.hidden);
        let rotation = Rotation::at_positions(driver, &body.rope, positions)?;
        space.ids.write(ids)?;
        body.embed(&space.ids, n, hidden)?;
        for (index, weights) in body.layers.iter().enumerate() {
            // Row i of the table is for token i.
            let at = RowPositions::At { first: 0, apart: 1 };
            work.project(weights, hidden, n, n, &rotation, at)?;
            let read = |from: &Buffer<'_, f32>, heads| -> Result<Array3<f32>> {
                let mut out = Array3::zeros((heads, n, s.heads.head_dim));
                fetch(from, &mut out, 0, n)?;
                Ok(out)
            };
            let both = |from: &Rotated<Buffer<'_, f32>>, heads| -> Result<Rotated<Array3<f32>>> {
                Ok(Rotated {
                    pre: read(&from.pre, heads)?,
                    rope: read(&from.rope, heads)?,
                })
            };
            let rows = Rows {
                q: both(&work.heads.q, s.heads.n_heads)?,
                k: both(&work.heads.k, s.heads.n_kv_heads)?,
                v: read(&work.heads.v, s.heads.n_kv_heads)?,
            };
            let mut attended = Array3::<f32>::zeros((n, s.heads.n_heads, s.heads.head_dim));
            attend(index, &rows, attended.view_mut())?;
            work.attended.write(elements(&attended))?;
            work.finish(weights, hidden, n)?;
            space.finite.look(hidden, n * s.hidden, index)?;
        }
        body.logits(work, hidden, n, &space.logits, &space.finite)?;
        space.finite.check(body)?;
        let logits = space.logits.read_part(0, n * vocab)?;
        Ok(logits
            .chunks(vocab)
            .map(|row| Array1::from(row.to_vec()))
            .collect())
    }
}

/// Copies rows `first..first + n` of every head of `x`, `[heads,m,d]`, to the device as `[heads,n,d]`.
fn put(x: &Array3<f32>, to: &Buffer<'_, f32>, first: usize, n: usize) -> Result<()> {
    let rows = x.slice(s![.., first..first + n, ..]);
    to.write(elements(&rows.as_standard_layout()))
}

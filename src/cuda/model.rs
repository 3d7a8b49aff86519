//! A model on the device with the buffers of its sessions, whose caches may be on the device or in host memory.

use std::sync::Arc;

use ndarray::Array1;

use super::body::Body;
use super::prompt::PromptPass;
use super::step::StepSpace;
use super::windows::Windows;
use super::work::{Rotation, RowPositions};
use crate::error::Result;
use crate::kv::cuda::Shape;
use crate::kv::sample::Sampler;
use crate::method::cuda::CudaIndex;
use crate::runner::{DecodeOptions, Trace};

/// A model on the device, the positions of its sequences and the buffers of a decode step.
pub(super) struct DeviceModel<'a> {
    pub body: Arc<Body<'a>>,
    pub rotation: Rotation<'a>,
    pub space: StepSpace<'a>,
    pub windows: Windows<'a>,
}

impl<'a> DeviceModel<'a> {
    /// Makes the buffers for a model whose layers have caches of this shape.
    ///
    /// # Errors
    /// Out of memory.
    pub fn new(body: Arc<Body<'a>>, shape: Shape, options: &DecodeOptions) -> Result<Self> {
        Ok(Self {
            rotation: Rotation::new(body.driver, &body.rope, 0, shape.capacity)?,
            space: StepSpace::new(&body, shape.sequences)?,
            windows: Windows::new(body.driver, shape, options.limits, &body.config.windows())?,
            body,
        })
    }

    /// Ends a prompt that has passed all layers: sets the positions, and returns the logits of the prompt's last
    /// position, `[vocab]`. `first` are the indexes that free the prompt buffers of the others.
    pub fn end_prompt<'i>(
        &mut self,
        pass: &PromptPass<'_>,
        first: impl IntoIterator<Item = &'i (dyn CudaIndex + 'i)>,
    ) -> Result<Array1<f32>> {
        first.into_iter().for_each(|index| index.end_prompt());
        self.windows.set(&[(pass.first + pass.m) as u32])?;
        let last = pass.rows(pass.m - 1, 1);
        self.space.finish(&self.body, &pass.work, &last, 1)?;
        self.logits()
    }

    /// Copies the logits of the first sequence to the host, `[vocab]`; waits for the device.
    pub fn logits(&self) -> Result<Array1<f32>> {
        self.space.finite.check(&self.body)?;
        let logits = self.space.logits.read_part(0, self.body.config.vocab_size)?;
        Ok(Array1::from(logits))
    }

    /// Chooses the next token of a session's only sequence; waits for the device.
    pub fn next(&self, sampler: &mut Sampler) -> Result<u32> {
        let Self { body, space, .. } = self;
        if !sampler.is_greedy() {
            space.uniforms.send(&[sampler.uniform()])?;
            space
                .choice
                .draw(&space.logits, 1, &space.uniforms, &space.ids, sampler)?;
        }
        space.finite.check(body)?;
        Ok(space.ids.read_part(0, 1)?[0])
    }

    /// Sends the ids of the next step, one per sequence, to the device.
    pub fn send(&self, ids: &[u32]) -> Result<()> {
        self.body.check_ids(ids)?;
        self.space.ids.write(ids)
    }

    /// Launches decode step number `step`, from the ids on the device to the logits and the greedy choices. `attend`
    /// fills the attention output of a layer and returns the positions that each KV head chose, which only a trace
    /// needs.
    pub fn step(
        &self,
        step: usize,
        mut trace: Option<&mut Trace<'_>>,
        attend: &mut dyn FnMut(usize) -> Result<Vec<Vec<u32>>>,
    ) -> Result<()> {
        let (body, space, n) = (&self.body, &self.space, self.space.rows);
        let (work, hidden, values) = (&space.work, &space.hidden, n * body.config.hidden_size);
        body.embed(&space.ids, n, hidden)?;
        for (index, weights) in body.layers.iter().enumerate() {
            let at = RowPositions::Last(self.windows.layer(index));
            work.project(weights, hidden, n, 1, &self.rotation, at)?;
            let chosen = attend(index)?;
            work.finish(weights, hidden, n)?;
            space.finite.look(hidden, values, index)?;
            if let Some(trace) = &mut trace {
                trace.layer(step, index, chosen.iter())?;
            }
        }
        space.finish(body, work, hidden, n)
    }
}

//! The buffers of a decode step, from ids to logits and the next ids.

use super::body::Body;
use super::finite::FiniteCheck;
use super::sample::TokenChoice;
use super::work::Workspace;
use crate::compute::cuda::buffer::Buffer;
use crate::error::Result;

/// The buffers of a decode step: one row per sequence.
pub(crate) struct StepSpace<'d> {
    pub rows: usize,
    pub work: Workspace<'d>,
    /// The hidden states, `[rows, hidden]`.
    pub hidden: Buffer<'d, f32>,
    /// The logits, `[rows, vocab]`.
    pub logits: Buffer<'d, f32>,
    /// The ids of the next tokens, `[rows]`.
    pub ids: Buffer<'d, u32>,
    /// The uniform number from 0 to 1 with which the next id is drawn, `[1]`.
    pub uniforms: Buffer<'d, f64>,
    pub choice: TokenChoice<'d>,
    pub finite: FiniteCheck<'d>,
}

impl<'d> StepSpace<'d> {
    /// Allocates the buffers for `rows` sequences.
    pub fn new(body: &Body<'d>, rows: usize) -> Result<Self> {
        let driver = body.driver;
        Ok(Self {
            rows,
            work: body.workspace(rows)?,
            hidden: Buffer::new(driver, "hidden states", rows * body.config.hidden_size)?,
            logits: Buffer::new(driver, "logits", rows * body.config.vocab_size)?,
            ids: Buffer::zeros(driver, "ids", rows)?,
            uniforms: Buffer::zeros(driver, "random numbers", 1)?,
            choice: TokenChoice::new(driver, rows, body.config.vocab_size)?,
            finite: FiniteCheck::new(driver)?,
        })
    }

    /// Computes the logits and the greedy choice for the first rows of hidden states.
    pub fn finish(
        &self,
        body: &Body<'d>,
        work: &Workspace<'_>,
        hidden: &Buffer<'_, f32>,
        rows: usize,
    ) -> Result<()> {
        body.logits(work, hidden, rows, &self.logits, &self.finite)?;
        self.choice.largest(&self.logits, rows, &self.ids)
    }
}

//! The most recent positions: a window longer by the budget.
//!
//! # Source
//! Attention sinks with a window, StreamingLLM (arXiv 2309.17453).

pub mod cuda;

use super::{Choice, Retriever, Step};

/// Sinks and recent positions alone.
#[derive(Clone)]
pub struct Streaming;

impl Retriever for Streaming {
    fn select(&mut self, step: &Step) -> Choice {
        let c = &step.candidates;
        let first = c.end.saturating_sub(step.budget).max(c.start);
        let positions: Vec<u32> = (first..c.end).map(|p| p as u32).collect();
        positions.into()
    }

    fn fork(&self) -> Box<dyn Retriever> {
        Box::new(self.clone())
    }
}

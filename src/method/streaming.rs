//! The most recent positions: a window longer by the budget.
//!
//! # Source
//! Attention sinks with a window, StreamingLLM (arXiv 2309.17453).

use super::{Retriever, Step};

/// Sinks and recent positions alone.
pub struct Streaming;

impl Retriever for Streaming {
    fn select(&mut self, step: &Step) -> Vec<u32> {
        let c = &step.candidates;
        (c.end.saturating_sub(step.budget).max(c.start)..c.end)
            .map(|p| p as u32)
            .collect()
    }
}

//! The most recent positions: a window that the budget makes longer.
//!
//! # Source
//! Attention sinks with a window, StreamingLLM (arXiv 2309.17453).

pub mod cuda;

use super::cuda::CudaMethod;
use super::declaration::Declaration;
use super::{Choice, Method, Place, Reads, Retriever, Step};

/// The method of this file.
pub static METHOD: Declaration = Declaration {
    name: "streaming",
    help: "The most recent positions",
    paper: None,
    section: None,
    prepare: |_| Ok(Box::new(Streaming)),
    bench: None,
};

/// Sinks and recent positions alone.
#[derive(Clone)]
pub struct Streaming;

impl Method for Streaming {
    fn head(&self, _: &Place) -> Box<dyn Retriever> {
        Box::new(Self)
    }

    fn cuda(&self) -> Option<&dyn CudaMethod> {
        Some(self)
    }
}

impl Retriever for Streaming {
    fn select(&mut self, step: &Step) -> Choice {
        let c = &step.candidates;
        let first = c.end.saturating_sub(step.budget).max(c.start);
        let positions: Vec<u32> = (first..c.end).map(|p| p as u32).collect();
        positions.into()
    }

    fn reads(&self, _: &Step, _: &Choice) -> Reads {
        Reads::default()
    }

    fn fork(&self) -> Box<dyn Retriever> {
        Box::new(self.clone())
    }
}

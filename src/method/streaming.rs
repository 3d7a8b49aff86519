//! The most recent positions: in effect the window, made longer by the budget.
//!
//! # Source
//! Attention sinks with a window, StreamingLLM (arXiv 2309.17453).

pub mod cuda;

use super::bench::{Bench, BenchParams, Fill, NewHead, TimedLayer};
use super::declaration::{Declaration, InVerdict};
use super::{Alike, Retriever, Selection, Step};
use crate::error::Result;
use crate::kv::KvType;

/// The declaration of `streaming`.
pub static METHOD: Declaration = Declaration {
    name: "streaming",
    help: "The most recent positions",
    section: None,
    verdict: InVerdict::Plain,
    prepare: |_| Ok(Box::new(Alike(Streaming))),
    bench: Some(&Streaming),
};

/// The most recent candidates.
#[derive(Clone)]
pub struct Streaming;

impl Retriever for Streaming {
    fn select(&mut self, step: &Step) -> Selection {
        let c = &step.candidates;
        let first = c.end.saturating_sub(step.budget).max(c.start);
        let positions: Vec<u32> = (first..c.end).map(|p| p as u32).collect();
        positions.into()
    }
}

impl Bench for Streaming {
    fn reads_rows(&self, _: KvType) -> bool {
        false
    }

    fn heads(&self, _: &TimedLayer, _: &BenchParams) -> Result<Box<NewHead>> {
        Ok(Box::new(|_, _| (Box::new(Streaming), Fill::Nothing)))
    }
}

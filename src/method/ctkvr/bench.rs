//! Benchmarks of ctkvr, whose index is filled by a random prompt.

use super::{Ctkvr, CtkvrParams, by_length};
use crate::error::Result;
use crate::method::bench::{Bench, BenchParams, Fill, NewHead, TimedLayer};

/// Benchmarks whose index is filled by a random prompt.
pub(super) struct CtkvrBench;

impl Bench for CtkvrBench {
    fn is_estimated(&self) -> bool {
        true
    }

    fn prompt_queries(&self, layer: &TimedLayer, _: &BenchParams) -> usize {
        by_length(&CtkvrParams::default(), layer.context())
    }

    fn heads(&self, layer: &TimedLayer, _: &BenchParams) -> Result<Box<NewHead>> {
        let n = layer.context();
        Ok(Box::new(move |place, _| {
            let head = Ctkvr::new(place, &CtkvrParams::default());
            let fill = Fill::Prompt(head.capacity(n));
            (Box::new(head), fill)
        }))
    }
}

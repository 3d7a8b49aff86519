//! Benchmarks of ctkvr, whose index is filled by a random prompt.

use super::{Ctkvr, CtkvrParams};
use crate::error::Result;
use crate::method::bench::{Bench, Fill, NewHead, TimedLayer};
use crate::method::params::MethodParams;

/// Benchmarks whose index is filled by a random prompt.
pub(super) struct CtkvrBench;

impl Bench for CtkvrBench {
    fn heads(&self, layer: &TimedLayer, _: &MethodParams) -> Result<Box<NewHead>> {
        let n = layer.context;
        Ok(Box::new(move |place, _| {
            let head = Ctkvr::new(place, &CtkvrParams::default());
            let fill = Fill::Prompt(head.capacity(n));
            (Box::new(head), fill)
        }))
    }
}

//! lfps after a random prompt, for benchmarks.

use super::Setup;
use crate::error::Result;
use crate::method::bench::{Bench, Fill, Layer, NewHead, RandomHead, Timed};
use crate::method::params::Params;

/// See [`Bench`].
pub(super) struct Random;

impl Bench for Random {
    fn timed(&self) -> Timed {
        Timed::ON_CPU
    }

    /// Not on a GPU.
    fn index_bytes(&self, _: &Layer) -> usize {
        0
    }

    fn heads(&self, _: &Layer, params: &Params) -> Result<Box<NewHead>> {
        let (setup, rows) = (Setup::new(&params.lfps, None)?, params.lfps.lfps_rows);
        Ok(Box::new(move |place, _| RandomHead {
            retriever: Box::new(setup.head(place)),
            fill: Fill::Prompt(rows),
        }))
    }
}

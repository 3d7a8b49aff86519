//! ctkvr after a random prompt, for benchmarks.

use super::{Ctkvr, Params};
use crate::error::Result;
use crate::method::bench::{Bench, Fill, Layer, NewHead, RandomHead, Timed};
use crate::method::params::Params as AllParams;

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

    fn heads(&self, layer: &Layer, _: &AllParams) -> Result<Box<NewHead>> {
        let n = layer.context;
        Ok(Box::new(move |place, _| {
            let head = Ctkvr::new(place, &Params::default());
            let fill = Fill::Prompt(head.capacity(n));
            RandomHead {
                retriever: Box::new(head),
                fill,
            }
        }))
    }
}

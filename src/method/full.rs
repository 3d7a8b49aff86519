//! Exact attention: every visible position, whatever the budget.

use super::bench::{Bench, Contents, Layer, NewHead, RandomHead, Timed};
use super::cuda::{CudaIndex, CudaMethod, CudaNeeds, CudaStep, Indexes, OnDevice};
use super::declaration::Declaration;
use super::params::Params;
use super::{Choice, Method, Place, Reads, Retriever, Step, everything};
use crate::error::Result;
use crate::kv::KvType;
use crate::kv::cuda::{Limits, Selection};

/// The method of this file.
pub static METHOD: Declaration = Declaration {
    name: "full",
    help: "Exact attention over everything visible",
    paper: None,
    section: None,
    prepare: |_| Ok(Box::new(Full)),
    bench: Some(&Full),
};

/// Exact attention.
#[derive(Clone)]
pub struct Full;

impl Method for Full {
    fn head(&self, _: &Place) -> Box<dyn Retriever> {
        Box::new(Self)
    }

    fn cuda(&self) -> Option<&dyn CudaMethod> {
        Some(self)
    }
}

impl Retriever for Full {
    fn select(&mut self, step: &Step) -> Choice {
        everything(step).into()
    }

    fn reads(&self, _: &Step, _: &Choice) -> Reads {
        Reads::default()
    }

    fn fork(&self) -> Box<dyn Retriever> {
        Box::new(self.clone())
    }
}

impl CudaMethod for Full {
    fn serves(&self, _: &CudaNeeds) -> bool {
        true
    }

    fn indexes<'d>(&self, _: OnDevice<'d>, limits: &[Limits]) -> Result<Indexes<'d>> {
        let index = |_| -> Box<dyn CudaIndex> { Box::new(Self) };
        Ok(limits.iter().map(index).collect())
    }
}

impl CudaIndex for Full {
    fn select(&self, _: &CudaStep<'_>) -> Result<Option<&Selection<'_>>> {
        Ok(None)
    }
}

impl Bench for Full {
    fn timed(&self) -> Timed {
        Timed::EVERYWHERE
    }

    fn retrieves(&self) -> bool {
        false
    }

    fn reads_rows(&self, _: KvType) -> bool {
        false
    }

    fn index_bytes(&self, _: &Layer) -> usize {
        0
    }

    fn heads(&self, _: &Layer, _: &Params) -> Result<Box<NewHead>> {
        Ok(Box::new(|_, _| RandomHead::full(Full)))
    }

    fn indexes<'d>(&self, at: OnDevice<'d>, contents: &Contents<'_>) -> Result<Indexes<'d>> {
        CudaMethod::indexes(self, at, contents.limits)
    }
}

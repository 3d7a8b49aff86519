//! Exact attention: attends every visible position, whatever the budget.

use super::bench::{Bench, BenchParams, Contents, Fill, NewHead, TimedLayer, TimedOnCuda};
use super::cuda::{CudaIndex, CudaMethod, CudaStep, Indexes, OnDevice, ServedLayer, each_served};
use super::declaration::{Declaration, InVerdict};
use super::{Alike, Retriever, Selection, Step, everything};
use crate::error::Result;
use crate::kv::KvType;
use crate::kv::cuda::CudaSelection;

/// The declaration of `full`.
pub static METHOD: Declaration = Declaration {
    name: "full",
    help: "Full attention: exact attention to all visible positions",
    section: None,
    verdict: InVerdict::IfCalibrated,
    prepare: |_| Ok(Box::new(Alike(Full))),
    bench: Some(&Full),
};

/// Exact attention.
#[derive(Clone)]
pub struct Full;

impl Retriever for Full {
    fn select(&mut self, step: &Step) -> Selection {
        everything(step).into()
    }
}

impl CudaMethod for Full {
    fn indexes<'d>(&self, _: OnDevice<'d>, layers: &[ServedLayer]) -> Result<Indexes<'d>> {
        each_served(layers, |_| Ok(Self))
    }
}

impl CudaIndex for Full {
    fn select(&self, _: &CudaStep<'_>) -> Result<Option<&CudaSelection<'_>>> {
        Ok(None)
    }
}

impl Bench for Full {
    fn timed_on_cuda(&self) -> TimedOnCuda {
        TimedOnCuda::LayerAndModel
    }

    fn retrieves(&self) -> bool {
        false
    }

    fn reads_rows(&self, _: KvType) -> bool {
        false
    }

    fn heads(&self, _: &TimedLayer, _: &BenchParams) -> Result<Box<NewHead>> {
        Ok(Box::new(|_, _| (Box::new(Full), Fill::Nothing)))
    }

    fn indexes<'d>(&self, at: OnDevice<'d>, contents: &Contents<'_>) -> Result<Indexes<'d>> {
        CudaMethod::indexes(self, at, &contents.all(at))
    }
}

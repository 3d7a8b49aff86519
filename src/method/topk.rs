//! The oracle: the positions with the largest true softmax probability, summed over the query heads of the group. It
//! reads every key, but these reads are not counted, because it is a reference.
//!
//! No other choice within the budget covers more mass. This bounds neither the output error nor KL nor answers, which
//! also depend on the values: a choice with less mass may come closer to full attention.

pub mod cuda;

use super::bench::{Bench, BenchParams, Contents, Fill, NewHead, TimedLayer, TimedOnCuda};
use super::cuda::{CudaMethod, Indexes, OnDevice};
use super::declaration::{Declaration, InVerdict};
use super::{Alike, Reads, Retriever, Selection, Step, add_probabilities, everything};
use crate::compute::layout::elements_mut;
use crate::compute::products::all_products;
use crate::error::Result;

/// The declaration of `topk`.
pub static METHOD: Declaration = Declaration {
    name: "topk",
    help: "Oracle: the positions with the largest true attention probability; covers the most attention mass for a budget, but does not always give the best quality",
    section: None,
    verdict: InVerdict::Oracle,
    prepare: |_| Ok(Box::new(Alike(TopK))),
    bench: Some(&TopK),
};

/// Exact top-k.
#[derive(Clone)]
pub struct TopK;

impl Retriever for TopK {
    fn select(&mut self, step: &Step) -> Selection {
        if step.is_exact() {
            return everything(step).into();
        }
        let (r, d) = step.q_rope.dim();
        let scale = 1.0 / (d as f32).sqrt();
        let (first, n) = (step.visible.start, step.visible.len());
        let all: Vec<u32> = step.visible.clone().map(|p| p as u32).collect();
        let mut scores = all_products(step.q_rope, scale, step.kv.keys(), &all);
        let mut mass = vec![0.0f64; n];
        for mut row in scores.rows_mut() {
            add_probabilities(elements_mut(&mut row), &mut mass);
        }
        let c = step.candidates.start - first..step.candidates.end - first;
        Selection {
            products: r * n,
            ..Selection::of_mass(step, &mass[c])
        }
    }

    fn reads(&self, step: &Step, selection: &Selection, reads: &mut Reads) {
        reads.keys += step.visible.len();
        reads.unattended_keys += step.candidates.len() - selection.positions.len();
    }
}

impl Bench for TopK {
    fn timed_on_cuda(&self) -> TimedOnCuda {
        TimedOnCuda::Model
    }

    fn ranks_floats_on_cuda(&self) -> bool {
        true
    }

    fn heads(&self, _: &TimedLayer, _: &BenchParams) -> Result<Box<NewHead>> {
        Ok(Box::new(|_, _| (Box::new(TopK), Fill::Nothing)))
    }

    fn indexes<'d>(&self, at: OnDevice<'d>, contents: &Contents<'_>) -> Result<Indexes<'d>> {
        CudaMethod::indexes(self, at, &contents.all(at))
    }
}

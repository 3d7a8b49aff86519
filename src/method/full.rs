//! Exact attention: every visible position, whatever the budget.

use super::{Choice, Retriever, Step, everything};

/// Exact attention.
#[derive(Clone)]
pub struct Full;

impl Retriever for Full {
    fn select(&mut self, step: &Step) -> Choice {
        everything(step).into()
    }

    fn fork(&self) -> Box<dyn Retriever> {
        Box::new(self.clone())
    }
}

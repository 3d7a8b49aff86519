//! Exact attention: every visible position, whatever the budget.

use super::{Retriever, Step, everything};

/// Exact attention.
pub struct Full;

impl Retriever for Full {
    fn select(&mut self, step: &Step) -> Vec<u32> {
        everything(step)
    }
}

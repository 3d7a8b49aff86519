//! The parameters of quest.

use crate::parameters::{Values, parameters};

/// Positions per page by default, as in the paper.
pub const PAGE: usize = 16;

parameters! {
    /// The parameters of quest.
    pub struct QuestParams, "Method quest" {
        /// Positions per page, of which there is a smallest and a largest value per channel
        page: usize = PAGE, "N" in Values::Among(&[16, 32, 64]);
    }
}

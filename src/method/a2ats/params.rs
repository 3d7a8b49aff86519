//! The parameters of a2ats.

use crate::parameters::{SHARE, parameters};

parameters! {
    /// The parameters of a2ats.
    pub struct A2atsParams, "Method a2ats" {
        /// Choose as the paper does: each query head takes the best F of the context (above 0, at most 1), and --budget
        /// is ignored (default: off)
        topk_per_query_head: Option<f64> = None, "F" in SHARE;
    }
}

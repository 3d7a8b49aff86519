//! The parameters of doublesparsity.

use crate::parameters::{AT_LEAST_ONE, parameters};

parameters! {
    /// The parameters of doublesparsity.
    pub struct DoubleSparsityParams, "Method doublesparsity" {
        /// Number of channels per key in the label cache, at 4 bits each [default: one eighth of the head's channels]
        ds_channels: Option<usize> = None, "N" in AT_LEAST_ONE;
    }
}

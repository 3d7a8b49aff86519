//! The forward pass on an NVIDIA GPU; it computes the same as [`crate::model::decoder`].
//!
//! [`LayerWeights`] are one layer's weights on the device, in the type that the checkpoint stores; [`Workspace`] holds
//! the buffers that the rows of a layer need. Sessions run on [`backend::CudaBackend`], with the caches on the device,
//! or on [`host::HostBackend`], with the caches in host memory. [`forward::CudaForward`] runs prompts and tokens for
//! caches on the CPU, and [`layers::CudaLayers`] runs calibration text with one layer's weights on the device at a
//! time. [`room::Source`] opens them if they fit into the device's memory; [`sequences::Sequences`] opens several over the
//! same weights.

pub mod backend;
mod body;
pub mod check;
mod context;
mod finite;
pub mod forward;
mod heads;
pub mod host;
pub mod layers;
mod model;
mod prompt;
pub mod room;
pub mod sample;
pub mod sequences;
mod served;
mod sizes;
mod step;
mod weights;
mod windows;
mod work;

use crate::compute::cuda::driver::Driver;
pub use body::Body;
pub use context::LayerContext;
pub use finite::FiniteCheck;
pub use sizes::{LayerSizes, check_model};
pub use weights::LayerWeights;
pub use work::{Rotation, RowPositions, Workspace};

/// Most rows per chunk of a prompt.
pub const ROWS: usize = 4096;

/// Returns the number of blocks for a kernel whose threads loop over n numbers in strides of the whole grid.
fn blocks_for(driver: &dyn Driver, n: usize) -> usize {
    n.div_ceil(256).min(32 * driver.multiprocessors())
}

//! What the fuzz targets share: inputs that change valid files, and valid files made by kvsmith itself.

mod base;
mod edit;
mod file;
mod shared;

pub use base::{Folder, config, decoder, kvsmith, made, model, one_thread, small_model};
pub use edit::{Input, edit, json};
pub use file::{Tensor, TensorFile, digest, seal};
pub use shared::share_counters;

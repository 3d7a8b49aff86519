//! Qwen2 and Qwen2.5: biases of q, k and v, and windows in the layers from `max_window_layers` on.

use crate::error::Result;
use crate::model::config::ModelConfig;
use crate::model::family::{Family, HeadRows, typed_windows};
use crate::model::fields::Fields;

pub(super) const FAMILY: Family = Family {
    name: "qwen2",
    gguf: Some(HeadRows::AsTrained),
    rope_theta: 10_000.0,
    head_dim: None,
    read,
};

fn read(c: &Fields, model: &mut ModelConfig) -> Result<()> {
    model.qkv_bias = true;
    windows(c, model)
}

/// Reads the windows of a Qwen model.
pub(super) fn windows(c: &Fields, model: &mut ModelConfig) -> Result<()> {
    let window = if c.bool_or("use_sliding_window", false)? {
        c.window()?
    } else {
        None
    };
    let n = model.n_layers();
    let windows = match typed_windows(c, n, window)? {
        Some(windows) => windows,
        None => {
            let first = c.index_opt("max_window_layers")?.unwrap_or(28);
            (0..n).map(|i| window.filter(|_| i >= first)).collect()
        }
    };
    model.set_windows(&windows);
    Ok(())
}

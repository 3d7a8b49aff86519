//! Mistral: Llama with one sliding window for all layers. In GGUF files its models call themselves `llama`.

use crate::error::Result;
use crate::model::config::ModelConfig;
use crate::model::family::{Family, typed_windows};
use crate::model::fields::Fields;

pub(super) const FAMILY: Family = Family {
    name: "mistral",
    gguf: None,
    rope_theta: 10_000.0,
    head_dim: None,
    read,
};

fn read(c: &Fields, model: &mut ModelConfig) -> Result<()> {
    let window = c.window()?;
    // `layer_types` must be valid, but does not count: every layer has the window.
    typed_windows(c, model.n_layers(), window)?;
    model.set_windows(&vec![window; model.n_layers()]);
    Ok(())
}

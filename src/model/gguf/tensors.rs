//! The tensors of a GGUF file under the names of a Hugging Face checkpoint.

use std::sync::Arc;

use super::{Gguf, TensorPlace};
use crate::error::{Error, Result};
use crate::model::families::family;
use crate::model::family::HeadRows;
use crate::weight::{Shard, Stored, Weight};

/// Names of the tensors outside layers, in both formats.
const OUTER: [(&str, &str); 3] = [
    ("model.embed_tokens.weight", "token_embd.weight"),
    ("model.norm.weight", "output_norm.weight"),
    ("lm_head.weight", "output.weight"),
];
/// Names of the modules of a layer, in both formats.
const MODULES: [(&str, &str); 11] = [
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
];

/// A tensor of a GGUF file under its name in a Hugging Face checkpoint.
pub struct NamedTensor {
    /// Name in a Hugging Face checkpoint.
    pub name: String,
    /// How its values are stored.
    pub stored: Stored,
    /// The axes, the last of which is contiguous.
    pub shape: Vec<usize>,
    /// First byte in the file.
    pub start: usize,
    /// The rows of a head, if the file alternates between the rows of a head's first and second half.
    pub alternating: Option<usize>,
}

impl Gguf {
    /// Returns the mapped file.
    pub(crate) fn shard(&self) -> Arc<Shard> {
        Arc::clone(&self.file)
    }

    /// Lists the tensors that the decoder knows.
    ///
    /// The family says in which order the rows of each head of q and k are.
    pub fn named(&self) -> Result<Vec<NamedTensor>> {
        let config = self.config()?;
        let alternates = family(&config.model_type)?.gguf == Some(HeadRows::Alternating);
        let named = |(name, place): (&String, &TensorPlace)| {
            let found = checkpoint_name(name)?;
            let is_turned = alternates && (name.contains(".attn_q.") || name.contains(".attn_k."));
            Some(NamedTensor {
                name: found,
                stored: place.stored,
                shape: place.shape.clone(),
                start: place.start,
                alternating: is_turned.then_some(config.head_dim),
            })
        };
        Ok(self.tensors.iter().filter_map(named).collect())
    }

    /// Returns a vector or matrix by its name in the file.
    pub(super) fn weight_of(&self, name: &str) -> Result<Weight> {
        let place = self.tensors.get(name);
        let place = place.ok_or_else(|| Error::damaged(format!("there is no tensor `{name}`")))?;
        let (cols, rows) = match &place.shape[..] {
            [n] => (*n, 1),
            [rows, cols] => (*cols, *rows),
            shape => {
                return Err(Error::damaged(format!(
                    "tensor `{name}` has {} axes",
                    shape.len()
                )));
            }
        };
        Ok(Weight {
            file: self.shard(),
            start: place.start,
            stored: place.stored,
            rows,
            cols,
            alternating: None,
            name: name.into(),
        })
    }
}

/// Returns the name that a Hugging Face checkpoint has for a tensor.
fn checkpoint_name(name: &str) -> Option<String> {
    if let Some((found, _)) = OUTER.iter().find(|(_, own)| *own == name) {
        return Some((*found).to_owned());
    }
    let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
    let (module, kind) = rest.rsplit_once('.')?;
    let (found, _) = MODULES.iter().find(|(_, own)| *own == module)?;
    Some(format!("model.layers.{layer}.{found}.{kind}"))
}

//! The moments file: the query moments of all layers, computed while dumping or again later.

use std::path::Path;

use ndarray::Array3;
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::corpus::Origin;
use crate::error::{Error, Result};
use crate::model::Sizes;
use crate::stats::moments::{LayerMoments, Position};
use crate::store::{self, Output, Store, Tensor};

/// The query moments of all layers and their origin.
pub struct Moments {
    /// One entry per layer.
    pub layers: Vec<LayerMoments>,
    /// The position that the queries were rotated to.
    pub position: Position,
    /// The model and the text.
    pub origin: Origin,
}

const KIND: &str = "moments";

#[derive(Serialize, Deserialize)]
struct MomentsManifest {
    kind: String,
    /// Null means standard RoPE; a missing field is an error.
    #[serde(deserialize_with = "Position::deserialize")]
    wrope_position: Position,
    #[serde(flatten)]
    origin: Origin,
}

impl Moments {
    /// Writes `sum_qq` f64 `[layers,g,d,d]` and `count` u64 `[layers,g]`.
    pub fn write(&self, output: Output) -> Result<()> {
        let sizes = self.origin.model.sizes;
        let (l, g, d) = (sizes.n_layers, sizes.n_kv_heads, sizes.head_dim);
        let sums = self.layers.iter().flat_map(|l| l.sum_qq.iter().copied());
        let counts = self.layers.iter().flat_map(|l| l.count.iter().copied());
        let tensors = [
            Tensor::new("sum_qq", &[l, g, d, d], &sums.collect::<Vec<f64>>()),
            Tensor::new("count", &[l, g], &counts.collect::<Vec<u64>>()),
        ];
        let manifest = MomentsManifest {
            kind: KIND.to_string(),
            wrope_position: self.position,
            origin: self.origin.clone(),
        };
        store::write(output, &tensors, Some(&json!(manifest).to_string()))
    }

    /// Reads a moments file for a model with these sizes.
    ///
    /// # Errors
    /// Another kind of file, other sizes, sums that are not finite.
    pub fn read(path: &Path, sizes: Sizes) -> Result<Self> {
        let (l, g, d) = (sizes.n_layers, sizes.n_kv_heads, sizes.head_dim);
        let store = Store::open(path)?;
        let manifest = serde_json::from_value::<MomentsManifest>(store.manifest()?).ok();
        let Some(manifest) = manifest.filter(|m| m.kind == KIND) else {
            return Err(Error::failed(format!("{} is not a moments file", path.display()))
                .hint("`kvsmith dump` and `kvsmith moments` make one"));
        };
        let sums: Vec<f64> = store.read("sum_qq", &[l, g, d, d])?;
        let counts: Vec<u64> = store.read("count", &[l, g])?;
        if let Some(i) = sums.iter().position(|v| !v.is_finite()) {
            return Err(Error::failed(format!(
                "{}: `sum_qq` has a value that is not finite (element {i})",
                path.display()
            ))
            .hint("make the dump again; if this happens again, the model overflows"));
        }
        let layer = |(sums, counts): (&[f64], &[u64])| -> Result<LayerMoments> {
            Ok(LayerMoments {
                sum_qq: Array3::from_shape_vec((g, d, d), sums.to_vec())?,
                count: counts.to_vec(),
            })
        };
        let layers = sums.chunks_exact(g * d * d).zip(counts.chunks_exact(g));
        Ok(Self {
            layers: layers.map(layer).collect::<Result<_>>()?,
            position: manifest.wrope_position,
            origin: manifest.origin,
        })
    }
}

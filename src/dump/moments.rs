//! The moments file: the query moments of all layers, computed during the dump or later.

use std::collections::BTreeMap;
use std::path::Path;

use ndarray::Array3;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::Shard;
use crate::corpus::Origin;
use crate::disk::Output;
use crate::error::{Error, Result};
use crate::model::Sizes;
use crate::stats::moments::{LayerMoments, Position, QuerySums};
use crate::store::{self, Spec, Store, Tensor};

/// The query moments of all layers and their origin.
pub struct Moments {
    /// The moments at `position`, one entry per layer.
    pub layers: Vec<LayerMoments>,
    /// The sums from which the moments at other positions follow, one entry per layer; files of earlier builds
    /// lack them.
    sums: Option<Vec<QuerySums>>,
    /// The position that the queries were rotated to.
    pub position: Position,
    /// The model and the whole text.
    pub origin: Origin,
    /// The part of the text whose queries were summed; `None` for all of it.
    pub shard: Option<Shard>,
}

const KIND: &str = "moments";
/// Sums over queries rotated to the position of the file.
const SUM: &str = "sum_qq";
/// Sums over queries before rotation.
const PRE: &str = "sum_qq_pre";
/// Sums over queries rotated to their own positions.
const ROPE: &str = "sum_qq_rope";

#[derive(Serialize, Deserialize)]
struct MomentsManifest {
    kind: String,
    /// Digest of each tensor's data.
    sha256: BTreeMap<String, String>,
    /// Null means standard RoPE; a missing field is an error.
    #[serde(deserialize_with = "Position::deserialize")]
    wrope_position: Position,
    #[serde(flatten)]
    origin: Origin,
    /// The part of the text, if it is not all of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    shard: Option<Shard>,
}

impl Moments {
    /// Computes the moments at a position from the sums of every layer.
    pub fn new(sums: Vec<QuerySums>, position: Position, origin: Origin) -> Self {
        let ropes = origin.model.ropes();
        let layers = sums.iter().enumerate();
        Self {
            layers: layers
                .map(|(i, sums)| sums.at(position, ropes.layer(i)))
                .collect(),
            sums: Some(sums),
            position,
            origin,
            shard: None,
        }
    }

    /// Returns the moments at another position.
    ///
    /// # Errors
    /// The file holds only the moments at its own position.
    pub fn at(self, position: Position) -> Result<Self> {
        if position == self.position {
            return Ok(self);
        }
        match self.sums {
            Some(sums) => Ok(Self {
                shard: self.shard,
                ..Self::new(sums, position, self.origin)
            }),
            None => Err(self.only_at_its_position(&position.to_string())),
        }
    }

    /// Returns the sums of every layer, from which the moments under any rotation follow.
    ///
    /// # Errors
    /// The file holds only the moments at its own position.
    pub fn sums(&self) -> Result<&[QuerySums]> {
        let missing = || self.only_at_its_position("buckets of distances");
        self.sums.as_deref().ok_or_else(missing)
    }

    fn only_at_its_position(&self, wanted: &str) -> Error {
        Error::mismatch(format!("the moments are for {} only, not for {wanted}", self.position)).hint(
            "an earlier version of kvsmith made them; recompute them with `kvsmith moments ⟨wrope_position⟩`, or recreate the dump",
        )
    }

    /// Writes `sum_qq`, `sum_qq_pre` and `sum_qq_rope`, f64 `[layers,g,d,d]`, and `count`, u64 `[layers,g]`.
    pub fn write(&self, output: Output) -> Result<()> {
        let sizes = self.origin.model.sizes;
        let (l, g, d) = (sizes.n_layers, sizes.n_kv_heads, sizes.head_dim);
        let counts = self.layers.iter().flat_map(|l| l.count.iter().copied());
        let mut tensors = vec![Tensor::new("count", &[l, g], &counts.collect::<Vec<u64>>())];
        let mut put = |name: &str, sums: &mut dyn Iterator<Item = &Array3<f64>>| {
            let values: Vec<f64> = sums.flat_map(|sum| sum.iter().copied()).collect();
            tensors.push(Tensor::new(name, &[l, g, d, d], &values));
        };
        put(SUM, &mut self.layers.iter().map(|layer| &layer.sum_qq));
        if let Some(sums) = &self.sums {
            put(PRE, &mut sums.iter().map(|sums| &sums.pre));
            put(ROPE, &mut sums.iter().map(|sums| &sums.rope));
        }
        let manifest = MomentsManifest {
            kind: KIND.to_string(),
            sha256: tensors
                .iter()
                .map(|t| (t.spec.name.clone(), t.digest()))
                .collect(),
            wrope_position: self.position,
            origin: self.origin.clone(),
            shard: self.shard.clone(),
        };
        let mut manifest = json!(manifest);
        store::seal(&mut manifest);
        store::write(output, &tensors, Some(&manifest.to_string()))
    }

    /// Reads a moments file for a model with these sizes.
    ///
    /// # Errors
    /// Another kind of file, other sizes, sums that are not finite.
    pub fn read(path: &Path, sizes: Sizes) -> Result<Self> {
        let (l, g, d) = (sizes.n_layers, sizes.n_kv_heads, sizes.head_dim);
        let store = Store::open(path)?;
        let manifest = store.manifest()?;
        let sealed = store
            .metadata()
            .is_some_and(|text| store::seal_holds(text, &manifest));
        let Ok(manifest) = MomentsManifest::deserialize(manifest) else {
            let error = Error::invalid(format!("{} is not a moments file", path.display()));
            return Err(error.hint("give a file made by this version of `kvsmith dump` or `kvsmith moments`"));
        };
        let intact = |spec: &Spec| store.digest(&spec.name).as_ref() == manifest.sha256.get(&spec.name);
        if manifest.kind != KIND || !sealed || !store.specs().all(intact) {
            let error = Error::damaged(format!("{} does not match its digests", path.display()));
            return Err(error.hint("the file is damaged; recreate it"));
        }
        let read = |name: &str| -> Result<Vec<Array3<f64>>> {
            let sums: Vec<f64> = store.read(name, &[l, g, d, d])?;
            if let Some(i) = sums.iter().position(|v| !v.is_finite()) {
                return Err(Error::damaged(format!(
                    "{}: `{name}` contains a NaN or infinite value (element {i})",
                    path.display()
                ))
                .hint("recreate the dump; if the error persists, the model overflows"));
            }
            let layers = sums.chunks_exact(g * d * d);
            layers
                .map(|sums| Ok(Array3::from_shape_vec((g, d, d), sums.to_vec())?))
                .collect()
        };
        let counts: Vec<u64> = store.read("count", &[l, g])?;
        let counts = || counts.chunks_exact(g).map(<[u64]>::to_vec);
        let layers = read(SUM)?.into_iter().zip(counts());
        let layers = layers.map(|(sum_qq, count)| LayerMoments { sum_qq, count });
        // Versions that write one of these tensors write both.
        let sums = if !store
            .specs()
            .any(|spec| [PRE, ROPE].contains(&spec.name.as_str()))
        {
            None
        } else {
            let sums = read(PRE)?.into_iter().zip(read(ROPE)?).zip(counts());
            let sums = sums.map(|((pre, rope), count)| QuerySums { pre, rope, count });
            Some(sums.collect())
        };
        Ok(Self {
            layers: layers.collect(),
            sums,
            position: manifest.wrope_position,
            origin: manifest.origin,
            shard: manifest.shard,
        })
    }
}

//! Maps of cached keys and values for formats of 4 and 2 bits: calibrated, so that attention loses little.
//!
//! Keys k are stored as codes of `(k - m) A`, and queries are multiplied by the inverse transpose of A, so that no score
//! changes before codes are rounded. Rounding gives every channel the same error, in proportion to the spread of the channels:
//! with the moment of the queries S = E q^T q and the covariance of the keys C, the error of a score is on average
//!
//! ```text
//! E (q e)^2  ~  tr(A^-1 S A^-T) tr(A^T C A) / d
//! ```
//!
//! For a Hadamard rotation, and for every other orthogonal A that spreads channels evenly, this is `tr(S) tr(C) / d`. Two forms
//! are fitted:
//!
//! - `balanced` (ours): the A for which the error is least, `(tr (S^1/2 C S^1/2)^1/2)^2 / d`. It makes both moments equal and
//!   diagonal: with `S = L L^T` and `L^T C L = U D U^T`, it is `A = L U D^-1/4`, then a Hadamard rotation, which spreads the
//!   channels evenly and changes neither factor. This map is that of a balanced realisation (Moore 1981, Principal component
//!   analysis in linear systems). The mean m of the keys is subtracted: it changes all scores of a query alike, and would take a
//!   part of the codes' range.
//! - `orthogonal`: `A = U H P` with the eigenvectors U of S, the Hadamard matrix H and the bit reversal P, without a mean: the
//!   keys' rotation of OSCAR (arXiv 2605.17757).
//!
//! Values v are stored as codes of `v B`. The error of the output of attention is the sum of the values' errors, each times an
//! attention weight a, so values count by a^2: `B = U H P` with the eigenvectors U of E a^2 v^T v, where a is the attention
//! that sampled queries, late in their blocks, pay to the value (`balanced`), or with the weight k S k^T in place of a^2
//! (`orthogonal`, as OSCAR). A few attended values have large components along a few directions; H spreads these evenly.
//!
//! Moments are those of rotated queries and keys; the first positions of every block, which caches keep in 16 bits, take no
//! part. Weighing keys by attention as well made scores of attended keys better, and predictions not (docs/dev/caches.md).

mod attended;
mod fit;
mod section;

use std::sync::Arc;

use ndarray::ArrayView2;

use crate::artifact::{Artifact, SectionView};
use crate::error::Result;
use crate::kv::KvType;
use crate::kv::map::{FittedMap, HeadMaps, ModelMaps, RowMap};
use crate::stats::linalg;
pub use section::{Form, KEYS, MEAN, RotationFitParams, RotationSection, SECTION, VALUES};

/// Reads the maps of an artifact's section `rotation`, for caches in these formats; checks its digests and values. Without the
/// section, or if no format maps rows, rows are rotated by a Hadamard matrix.
///
/// # Errors
/// A damaged section.
pub fn maps(artifact: Option<&Artifact>, mut formats: impl Iterator<Item = KvType>) -> Result<ModelMaps> {
    let with = artifact.filter(|artifact| artifact.has(SECTION));
    let Some(artifact) = with.filter(|_| formats.any(KvType::maps_rows)) else {
        return Ok(ModelMaps::HADAMARD);
    };
    Ok(ModelMaps::Heads {
        n_kv_heads: artifact.sizes.n_kv_heads,
        maps: section_maps(&artifact.checked_section(SECTION)?)?,
    })
}

/// Reads the maps of all heads.
///
/// # Errors
/// A map without an inverse.
fn section_maps(section: &SectionView) -> Result<Arc<[HeadMaps]>> {
    let d = section.artifact.sizes.head_dim;
    let [keys, means, values] = [KEYS, MEAN, VALUES].map(|name| section.read::<f32>(name));
    let (keys, means, values) = (keys?, means?, values?);
    let heads = keys.chunks_exact(d * d).zip(means.chunks_exact(d));
    let heads = heads.zip(values.chunks_exact(d * d)).enumerate();
    let maps = heads.map(|(head, ((keys, mean), values))| {
        let read = |name: &str, map: &[f32], mean: &[f32]| {
            let singular =
                || section.damaged(format!("`{name}` of {} has no inverse", section.kv_head(head)));
            fitted(map, mean)?.ok_or_else(singular)
        };
        Ok(HeadMaps {
            keys: read(KEYS, keys, mean)?,
            values: read(VALUES, values, &vec![0.0; d])?,
        })
    });
    maps.collect()
}

/// Makes the map `x -> (x - mean) A` from A, `[d,d]`, and the mean, `[d]`; `None` if A has no inverse.
fn fitted(map: &[f32], mean: &[f32]) -> Result<Option<RowMap>> {
    let d = mean.len();
    let wide = ArrayView2::from_shape((d, d), map)?.mapv(f64::from);
    let Some(back) = linalg::inverse(wide.view())? else {
        return Ok(None);
    };
    let back: Vec<f32> = back.iter().map(|x| *x as f32).collect();
    let is_usable = back.iter().all(|x| x.is_finite());
    let map = || FittedMap::new(map.to_vec(), back, mean.to_vec());
    Ok(is_usable.then(|| RowMap::Fitted(Arc::new(map()))))
}

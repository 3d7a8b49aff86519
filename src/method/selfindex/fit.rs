//! Centroids of sign patterns from calibration keys, and what an artifact's section holds.

use std::ops::Range;

use half::f16;
use ndarray::{ArrayView1, Axis};
use serde_json::{Value, json};

use super::sums::Sums;
use super::{Center, GROUP, LayerKeys, PATTERNS};
use crate::artifact::{Artifact, LayerPart};
use crate::compute::cpu::row_mean;
use crate::compute::device::{SignSums, Statistic};
use crate::dump::Sizes;
use crate::error::{Error, Result};
use crate::interrupt;
use crate::store::{Spec, to_bytes};

/// Tensors of the section.
pub fn specs(sizes: Sizes) -> Vec<Spec> {
    let (l, g, d) = (sizes.n_layers, sizes.n_kv_heads, sizes.head_dim);
    vec![
        Spec::new::<f16>("sign.centroid", &[l, g, d / GROUP, PATTERNS, GROUP]),
        Spec::new::<u64>("sign.count", &[l, g, d / GROUP, PATTERNS]),
        Spec::new::<f32>("sign.alpha", &[l, g, d]),
        Spec::new::<f32>("sign.mean_pre", &[l, g, d]),
    ]
}

/// The sign pattern of four channels: bit e is set where `x[e] > 0`.
///
/// # Source
/// Section 3.1; the paper's order of bits is not known, and any order gives the same results as long
/// as tables and codes share it.
pub fn pattern(x: &[f32]) -> usize {
    x.iter()
        .enumerate()
        .map(|(e, v)| usize::from(*v > 0.0) << e)
        .sum()
}

/// Builds the centroids of one layer; `done` is called for each head.
pub fn fit_layer(keys: &LayerKeys, center: Center, done: &mut dyn FnMut(usize, &Value)) -> Result<LayerPart> {
    let mut tensors = vec![Vec::new(); 4];
    let mut quality = Vec::new();
    let kept = keys.kept.iter().filter(|kept| **kept).count();
    let at_once = keys.device.heads_at_once(kept, keys.rope.head_dim(), 0).max(1);
    for first in (0..keys.n_kv_heads).step_by(at_once) {
        interrupt::check()?;
        let heads = first..keys.n_kv_heads.min(first + at_once);
        let fits = fit_heads(keys, heads.clone(), center)
            .map_err(|e| e.context(format!("signs of KV heads {} to {}", heads.start, heads.end - 1)))?;
        for (head, fit) in heads.zip(fits) {
            tensors[0].extend(to_bytes(&fit.centroids));
            tensors[1].extend(to_bytes(&fit.counts));
            tensors[2].extend(to_bytes(&fit.alpha));
            tensors[3].extend(to_bytes(&fit.mean_pre));
            done(head, &fit.quality);
            quality.push(fit.quality);
        }
    }
    Ok(LayerPart { tensors, quality })
}

struct HeadFit {
    centroids: Vec<f16>,
    counts: Vec<u64>,
    alpha: Vec<f32>,
    mean_pre: Vec<f32>,
    quality: Value,
}

fn fit_heads(keys: &LayerKeys, heads: Range<usize>, center: Center) -> Result<Vec<HeadFit>> {
    let [kept, _] = keys.split(heads.clone(), false)?;
    let n = kept.len_of(Axis(1));
    let mean_pre: Vec<Vec<f32>> = kept.outer_iter().map(|x| row_mean(x).to_vec()).collect();
    drop(kept);
    let [kept, _] = keys.split(heads, true)?;
    let mut points = keys.device.points(kept)?;
    for block in keys.kept_blocks().into_iter().filter(|block| !block.is_empty()) {
        let statistic = match center {
            Center::Median => Statistic::Ranked((block.len() - 1) / 2),
            Center::Mean => Statistic::Mean,
        };
        let centre = points.channel_statistic(block.clone(), statistic)?;
        points.subtract(block, centre.view())?;
    }
    // The smallest value that at least 99.9 % of the magnitudes do not exceed.
    let rank = (n * 999).div_ceil(1000).saturating_sub(1);
    let alpha = points.channel_statistic(0..n, Statistic::RankedMagnitude(rank))?;
    let sums = points.sign_sums()?.into_iter();
    let one = |((sums, alpha), mean_pre): ((SignSums, ArrayView1<f32>), Vec<f32>)| {
        let (centroids, counts) = centroids(sums);
        if centroids.iter().any(|v| !v.is_finite()) {
            return Err(Error::failed("a sign centroid is outside the range of f16")
                .hint("the keys of this head have extreme outliers"));
        }
        Ok(HeadFit {
            quality: json!({
                "sign_entropy_bits": sign_entropy_bits(&counts, n),
                "pattern_entropy_bits": pattern_entropy_bits(&counts),
                "empty_patterns": counts.iter().filter(|c| **c == 0).count(),
                "keys": n,
            }),
            centroids,
            counts,
            alpha: alpha.to_vec(),
            mean_pre,
        })
    };
    sums.zip(alpha.rows()).zip(mean_pre).map(one).collect()
}

/// Centroids `[d/4,16,4]` and counts `[d/4,16]` of centred keys. An empty pattern gets plus or minus the
/// mean magnitude of its channels.
///
/// # Source
/// Eq. 4.
pub fn centroids(sums: SignSums) -> (Vec<f16>, Vec<u64>) {
    let sums = Sums::from(sums);
    let values = sums.centroids(None).into_iter().map(f16::from_f64);
    (values.collect(), sums.counts)
}

/// Mean over channels of the entropy of the sign bit, from the counts of the patterns, `[d/4,16]`.
fn sign_entropy_bits(counts: &[u64], n: usize) -> f64 {
    let entropy = |p: f64| if p > 0.0 { -p * p.log2() } else { 0.0 };
    let groups = counts.chunks(PATTERNS);
    let channels = (groups.len() * GROUP).max(1) as f64;
    let channels_of = groups.flat_map(|group| {
        (0..GROUP).map(move |e| {
            let set = group
                .iter()
                .enumerate()
                .filter(|(pattern, _)| (pattern >> e) & 1 == 1);
            set.map(|(_, count)| *count).sum::<u64>() as f64 / n.max(1) as f64
        })
    });
    channels_of.map(|p| entropy(p) + entropy(1.0 - p)).sum::<f64>() / channels
}

/// Mean over groups of the entropy of the pattern.
fn pattern_entropy_bits(counts: &[u64]) -> f64 {
    let groups = counts.chunks(PATTERNS);
    let n = groups.len().max(1) as f64;
    let entropy = |group: &[u64]| -> f64 {
        let total: u64 = group.iter().sum();
        let shares = group.iter().filter(|c| **c > 0).map(|c| *c as f64 / total as f64);
        shares.map(|p| -p * p.log2()).sum()
    };
    groups.map(entropy).sum::<f64>() / n
}

/// Checks the values of the section: finite, scales not negative, counts that add up to the kept keys.
pub fn check_values(artifact: &Artifact) -> Result<()> {
    let specs = specs(artifact.sizes);
    let wrong = |what: String| {
        Error::failed(format!("{}: {what}", artifact.store.path().display()))
            .hint("the file is damaged; make it again")
    };
    for (spec, values) in [
        (&specs[0], artifact.f16s(&specs[0])?),
        (&specs[2], artifact.f32s(&specs[2])?),
        (&specs[3], artifact.f32s(&specs[3])?),
    ] {
        let negative = spec.name == "sign.alpha" && values.iter().any(|v| *v < 0.0);
        if negative || values.iter().any(|v| !v.is_finite()) {
            return Err(wrong(format!("`{}` has a value out of range", spec.name)));
        }
    }
    let kept = artifact.kept_keys();
    let counts: Vec<u64> = artifact.store.read(&specs[1].name, &specs[1].shape)?;
    if counts
        .chunks(PATTERNS)
        .any(|group| group.iter().sum::<u64>() != kept)
    {
        return Err(wrong(format!("`sign.count` does not add up to {kept} keys")));
    }
    Ok(())
}

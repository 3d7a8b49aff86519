//! Self-Indexing KVCache: sign patterns as index and as storage, arXiv 2603.14224.
//!
//! Calibration: rotated keys are centred per block with that block's own centre, the signs of four
//! neighbouring channels form a pattern of 16, and a pattern's centroid is the mean of the channels
//! that have it: the average of what one pass over each block's prompt would build.
//!
//! Where we differ from the authors' code: one zero rule (a bit is set for x > 0), and a pattern that
//! no key has gets plus or minus the channels' mean magnitude instead of 0/0.

use half::f16;
use ndarray::{Array2, ArrayView2, Axis, s};
use rayon::prelude::*;
use serde_json::{Value, json};

use crate::artifact::{Artifact, LayerPart};
use crate::dump::Sizes;
use crate::error::{Error, Result};
use crate::interrupt;
use crate::model::rope::Rope;
pub use crate::runner::packed::Center;
use crate::stats::whiten::row_mean;
use crate::store::{Spec, to_bytes};

/// Name of the section in an artifact.
pub const SECTION: &str = "sign";
/// Channels of a pattern.
pub const GROUP: usize = 4;
/// Patterns of a group.
pub const PATTERNS: usize = 1 << GROUP;

/// The section's parameters in the manifest.
pub fn manifest(center: Center) -> Value {
    json!({
        "center": center.as_str(),
        "center_scope": "block",
        "group": GROUP,
        "sign_rule": "x>0",
        "bit_order": "lsb-first",
        "rope_space": "post",
        "alpha_percentile": 99.9,
    })
}

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

/// Builds the centroids of one layer.
///
/// `keys` reads all rows of one KV head, `[n,d]` before rotation; `block_start` has the first row of
/// each block and then n; `kept` says which rows take part; `done` is called after each head.
pub fn fit_layer(
    keys: &dyn Fn(usize) -> Result<Array2<f32>>,
    n_kv_heads: usize,
    block_start: &[u32],
    kept: &[bool],
    rope: &Rope,
    center: Center,
    done: &mut dyn FnMut(usize, &Value),
) -> Result<LayerPart> {
    let mut tensors = vec![Vec::new(); 4];
    let mut quality = Vec::new();
    for head in 0..n_kv_heads {
        interrupt::check()?;
        let fit = fit_head(keys(head)?, block_start, kept, rope, center)
            .map_err(|e| e.context(format!("signs of KV head {head}")))?;
        tensors[0].extend(to_bytes(&fit.centroids));
        tensors[1].extend(to_bytes(&fit.counts));
        tensors[2].extend(to_bytes(&fit.alpha));
        tensors[3].extend(to_bytes(&fit.mean_pre));
        done(head, &fit.quality);
        quality.push(fit.quality);
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

fn fit_head(
    keys: Array2<f32>,
    block_start: &[u32],
    kept: &[bool],
    rope: &Rope,
    center: Center,
) -> Result<HeadFit> {
    let kept_rows = |start: usize, end: usize| (start..end).filter(|i| kept[*i]).collect::<Vec<_>>();
    let all = kept_rows(0, kept.len());
    let mean_pre = row_mean(keys.select(Axis(0), &all).view()).to_vec();
    let mut centred = Array2::zeros((all.len(), keys.ncols()));
    let mut at = 0;
    for block in block_start.windows(2) {
        let (start, end) = (block[0] as usize, block[1] as usize);
        let rows = kept_rows(start, end);
        let mut part = keys.select(Axis(0), &rows);
        let table = rope.table(0..end - start);
        for (mut key, row) in part.rows_mut().into_iter().zip(&rows) {
            if let Some(key) = key.as_slice_mut() {
                table.rotate(key, row - start);
            }
        }
        part.axis_iter_mut(Axis(1))
            .into_par_iter()
            .for_each(|mut channel| {
                let centre = center.of(&mut channel.to_vec());
                channel -= centre;
            });
        centred.slice_mut(s![at..at + rows.len(), ..]).assign(&part);
        at += rows.len();
    }
    let (centroids, counts) = centroids(centred.view());
    if centroids.iter().any(|v| !v.is_finite()) {
        return Err(Error::failed("a sign centroid is outside the range of f16")
            .hint("the keys of this head have extreme outliers"));
    }
    let alpha: Vec<f32> = centred
        .axis_iter(Axis(1))
        .into_par_iter()
        .map(|channel| percentile_999(channel.iter().map(|v| v.abs()).collect()))
        .collect();
    let quality = json!({
        "sign_entropy_bits": sign_entropy_bits(centred.view()),
        "pattern_entropy_bits": pattern_entropy_bits(&counts),
        "empty_patterns": counts.iter().filter(|c| **c == 0).count(),
        "keys": all.len(),
    });
    Ok(HeadFit {
        centroids,
        counts,
        alpha,
        mean_pre,
        quality,
    })
}

/// Centroids `[d/4,16,4]` and counts `[d/4,16]` of centred keys `[n,d]`.
///
/// # Numerics
/// Sums in f64, in row order. An empty pattern gets plus or minus the mean magnitude of its channels.
///
/// # Source
/// Eq. 4.
pub fn centroids(centred: ArrayView2<f32>) -> (Vec<f16>, Vec<u64>) {
    let (n, d) = centred.dim();
    let groups: Vec<(Vec<f16>, Vec<u64>)> = (0..d / GROUP)
        .into_par_iter()
        .map(|g| {
            let mut sums = [[0.0f64; GROUP]; PATTERNS];
            let mut magnitude = [0.0f64; GROUP];
            let mut counts = vec![0u64; PATTERNS];
            for row in centred.slice(s![.., g * GROUP..(g + 1) * GROUP]).rows() {
                let x = [row[0], row[1], row[2], row[3]];
                let p = pattern(&x);
                counts[p] += 1;
                for (e, v) in x.iter().enumerate() {
                    sums[p][e] += f64::from(*v);
                    magnitude[e] += f64::from(v.abs());
                }
            }
            let mut out = Vec::with_capacity(PATTERNS * GROUP);
            for p in 0..PATTERNS {
                for e in 0..GROUP {
                    let value = if counts[p] > 0 {
                        sums[p][e] / counts[p] as f64
                    } else {
                        let sign = if (p >> e) & 1 == 1 { 1.0 } else { -1.0 };
                        sign * magnitude[e] / n.max(1) as f64
                    };
                    out.push(f16::from_f64(value));
                }
            }
            (out, counts)
        })
        .collect();
    let (values, counts): (Vec<_>, Vec<_>) = groups.into_iter().unzip();
    (values.concat(), counts.concat())
}

/// The smallest value that at least 99.9 % of the values do not exceed; zero if there are none.
fn percentile_999(mut values: Vec<f32>) -> f32 {
    if values.is_empty() {
        return 0.0;
    }
    let rank = (values.len() * 999).div_ceil(1000) - 1;
    *values.select_nth_unstable_by(rank, f32::total_cmp).1
}

/// Mean over channels of the entropy of the sign bit.
fn sign_entropy_bits(centred: ArrayView2<f32>) -> f64 {
    let n = centred.nrows().max(1) as f64;
    let entropy = |p: f64| if p > 0.0 { -p * p.log2() } else { 0.0 };
    let channels = centred.axis_iter(Axis(1)).map(|channel| {
        let p = channel.iter().filter(|v| **v > 0.0).count() as f64 / n;
        entropy(p) + entropy(1.0 - p)
    });
    channels.sum::<f64>() / centred.ncols() as f64
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

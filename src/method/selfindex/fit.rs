//! Centroids of sign patterns from calibration keys.

use std::ops::Range;

use half::f16;
use ndarray::Axis;
use serde_json::{Map, Value, json};

use super::groups::{GROUP, PATTERNS};
use super::section::{ALPHA, CENTROID, COUNT, MEAN_PRE, SignQuality, SignSection};
use super::sums::PatternSums;
use crate::artifact::{Fit, FitText, HeadDone, LayerPart, LayerStates, SectionKind, object};
use crate::compute::cpu::row_mean;
use crate::compute::device::{SignSums, Statistic};
use crate::env;
use crate::error::{Error, Result};
use crate::kv::packed::Center;
use crate::parameters::{Choice, Values, parameters};

/// Returns the sign pattern of four channels: bit e is set where `x[e] > 0`.
///
/// # Source
/// Section 3.1. The paper's order of bits is not known; every order gives the same results as long as tables and codes
/// share it.
pub fn pattern(x: &[f32]) -> usize {
    let bits = x.iter().enumerate();
    bits.map(|(e, v)| usize::from(*v > 0.0) << e).sum()
}

parameters! {
    /// The parameters of the fit.
    pub struct SignFitParams, "Section sign" {
        /// Value that is subtracted from each channel of the keys before their signs are taken
        center: Center = Center::Median, "CENTER" in Values::OneOf(Center::WORDS);
    }
}

/// The fit of the section.
pub(super) struct SignFit {
    /// What is subtracted from each channel.
    pub center: Center,
}

impl Fit for SignFit {
    fn kind(&self) -> &'static dyn SectionKind {
        &SignSection
    }

    fn params(&self) -> Result<Map<String, Value>> {
        object(&json!({
            "center": self.center.as_str(),
            "center_scope": "block",
            "group": GROUP,
            "sign_rule": "x>0",
            "bit_order": "lsb-first",
            "rope_space": "post",
            "alpha_percentile": 99.9,
        }))
    }

    fn working_bytes(&self, text: &FitText) -> usize {
        let device = self.kind().device(text.device);
        let heads = device.heads_at_once(text.n_kept, text.sizes.head_dim, 0);
        text.split_bytes(heads.clamp(1, text.sizes.n_kv_heads))
    }

    /// For the mean before rotation, and for the patterns after it.
    fn key_reads(&self) -> usize {
        2
    }

    fn layer(&self, states: &LayerStates, done: HeadDone) -> Result<LayerPart> {
        let mut part = LayerPart::default();
        for heads in states.head_runs(0) {
            env::check()?;
            self.fit(states, heads.clone(), &mut part, done)
                .map_err(|e| e.context(format!("signs of KV heads {} to {}", heads.start, heads.end - 1)))?;
        }
        Ok(part)
    }
}

impl SignFit {
    /// Fits the centroids of some heads and adds them to the layer's part.
    fn fit(
        &self,
        states: &LayerStates,
        heads: Range<usize>,
        part: &mut LayerPart,
        done: HeadDone,
    ) -> Result<()> {
        let [kept, _] = states.split(heads.clone(), false)?;
        let n = kept.len_of(Axis(1));
        let mean_pre: Vec<Vec<f32>> = kept.outer_iter().map(|x| row_mean(x).to_vec()).collect();
        drop(kept);
        let [kept, _] = states.split(heads.clone(), true)?;
        let mut points = states.device.points(kept)?;
        for block in states.kept_blocks().into_iter().filter(|block| !block.is_empty()) {
            let statistic = match self.center {
                Center::Median => Statistic::Ranked((block.len() - 1) / 2),
                Center::Mean => Statistic::Mean,
            };
            let centers = points.channel_statistic(block.clone(), statistic)?;
            points.subtract(block, centers.view())?;
        }
        // The rank of the smallest value that at least 99.9% of the magnitudes do not exceed.
        let rank = (n * 999).div_ceil(1000).saturating_sub(1);
        let alpha = points.channel_statistic(0..n, Statistic::RankedMagnitude(rank))?;
        let sums = points.sign_sums()?;
        for (((head, sums), alpha), mean_pre) in heads.zip(sums).zip(alpha.rows()).zip(mean_pre) {
            let (centroids, counts) = centroids(sums);
            if centroids.iter().any(|v| !v.is_finite()) {
                return Err(Error::invalid("a sign centroid is outside the range of f16")
                    .hint("the keys of this head have extreme outliers; check the model and the text"));
            }
            part.put(CENTROID, &centroids);
            part.put(COUNT, &counts);
            part.put(ALPHA, &alpha.to_vec());
            part.put(MEAN_PRE, &mean_pre);
            part.quality.push(object(&SignQuality {
                sign_entropy_bits: sign_entropy_bits(&counts, n),
                pattern_entropy_bits: pattern_entropy_bits(&counts),
                empty_patterns: counts.iter().filter(|c| **c == 0).count(),
                keys: n,
            })?);
            done(head, None);
        }
        Ok(())
    }
}

/// Returns the centroids `[d/4,16,4]` and the counts `[d/4,16]` of centered keys. A pattern that no key has gets plus or
/// minus the mean magnitude of its channels.
///
/// # Source
/// Eq. 4.
pub fn centroids(sums: SignSums) -> (Vec<f16>, Vec<u64>) {
    let sums = PatternSums::from(sums);
    let values = sums.centroids().into_iter().map(f16::from_f64);
    (values.collect(), sums.counts)
}

/// Returns the entropy of the sign bit in bits, as a mean over channels, from the counts of the patterns, `[d/4,16]`.
fn sign_entropy_bits(counts: &[u64], n: usize) -> f64 {
    let entropy = |p: f64| if p > 0.0 { -p * p.log2() } else { 0.0 };
    let groups = counts.chunks(PATTERNS);
    let channels = (groups.len() * GROUP).max(1) as f64;
    let channels_of = groups.flat_map(|group| {
        (0..GROUP).map(move |e| {
            let all = group.iter().enumerate();
            let set = all.filter(|(pattern, _)| (pattern >> e) & 1 == 1);
            set.map(|(_, count)| *count).sum::<u64>() as f64 / n.max(1) as f64
        })
    });
    channels_of.map(|p| entropy(p) + entropy(1.0 - p)).sum::<f64>() / channels
}

/// Returns the entropy of the pattern in bits, as a mean over groups of channels.
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

//! The verdict of an artifact: what each method lost on text that nothing was fitted to, at several shares of the bytes.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::kv::KvType;
use crate::model::Sizes;

/// The loss that is recommended unless the verdict has a limit of its own: mean KL divergence, in nats.
pub const USUAL_KL: f64 = 0.03;

/// What methods lost on text that nothing was fitted to: `quality.methods`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    /// Blocks of text.
    pub blocks: usize,
    /// Decode steps, over all blocks of text.
    pub steps: usize,
    /// First positions that every step read.
    pub sinks: usize,
    /// Last positions that every step read.
    pub window: usize,
    /// Type of the cache, as a value of `--kv`.
    pub kv: String,
    /// All texts, the blocks of text first; empty in files of earlier versions.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub texts: Vec<MeasuredTexts>,
    /// The limits of the recommendation; `None` in files of earlier versions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limits: Option<LossLimits>,
    /// The retrieval probe; `None` if the methods were not probed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub probe: Option<MeasuredProbe>,
    /// Why they were not probed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub not_probed: Option<String>,
    /// The losses per method and share of the bytes.
    pub rows: Vec<MethodLoss>,
    /// What full attention loses over caches of other formats; empty in files of earlier versions.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub formats: Vec<FormatLoss>,
}

/// Texts of one kind and length on which methods were measured.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MeasuredTexts {
    /// `text` or `uuid`.
    pub kind: String,
    /// Tokens of the longest.
    pub length: usize,
    /// How many.
    pub blocks: usize,
    /// How many of them lie beyond the calibration text; the others were held out from it.
    pub beyond: usize,
    /// Decode steps, over all of them.
    pub steps: usize,
}

/// What a recommended method may lose: the upper ends of the intervals are compared with these limits.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LossLimits {
    /// Mean KL divergence on the blocks of text, in nats.
    pub kl: f64,
    /// Points of the probe below full attention.
    pub points: f64,
}

/// The questions that methods were asked.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MeasuredProbe {
    /// `facts` that were hidden in the text, or `copies` of its passages.
    pub kind: String,
    /// Tokens of the longest text with its questions.
    pub length: usize,
    /// Number of texts.
    pub texts: usize,
    /// Number of questions.
    pub questions: usize,
    /// The share of the questions that full attention answers.
    pub full_accuracy: f64,
}

/// What one method lost at one share of the bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MethodLoss {
    /// Name of the method, `NAME+tail` with a tail.
    pub method: String,
    /// Whether the method ranks by exact scores without paying for them, which no real method can: a bound for the
    /// others.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub oracle: bool,
    /// The requested share of the bytes of all visible keys and values.
    pub reads_target: f64,
    /// The share of the bytes that was read, everything counted; if nothing was measured, the least that the method can
    /// read.
    pub bytes_read_fraction: f64,
    /// The measurements; `None` if the method cannot read so few bytes.
    #[serde(flatten)]
    pub measured: Option<Measured>,
}

/// What full attention lost over a cache of another format.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FormatLoss {
    /// Type of the cache, as a value of `--kv`.
    pub kv: String,
    /// The bytes of the cache, over those of a cache in bf16.
    pub size_fraction: f64,
    /// The measurements, with a budget of 1.
    #[serde(flatten)]
    pub measured: Measured,
}

/// Measurements of one method, most of them means over all steps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// The budget, a fraction of the context.
    pub budget: f64,
    /// KL(full || method) of the next token, in nats.
    pub kl: f64,
    /// Median of the KL over the steps.
    pub kl_median: f64,
    /// 99th percentile of the KL over the steps.
    pub kl_p99: f64,
    /// Share of steps with the same most likely token.
    pub top1_equal: f64,
    /// Perplexity of the text over that with full attention.
    pub perplexity_ratio: f64,
    /// Share of the oracle's choice of the same size that the method chose too.
    pub recall: f64,
    /// True probability of everything that was attended.
    pub mass: f64,
    /// Relative error of attention's output.
    pub output_error: f64,
    /// Bits of the index per position and KV head.
    pub index_bits_per_token: f64,
    /// Recall, mass and output error of each KV head.
    pub heads: HeadLosses,
    /// The blocks of text after which the row was dropped, because it had lost more than three times the limit;
    /// everything else is of these blocks. `None` if it was not dropped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dropped_after: Option<usize>,
    /// Intervals over the blocks of text; `None` with fewer than 20 blocks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub intervals: Option<Intervals>,
    /// Means on the other texts, in their order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub others: Vec<OtherLosses>,
    /// The answers to the probe; `None` if it was not asked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub probe: Option<Answered>,
}

/// The 95% intervals of losses, by the bootstrap over blocks of text; all rows use the same resamples.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Intervals {
    /// See [`Measured::kl`].
    pub kl: [f64; 2],
    /// See [`Measured::kl_p99`].
    pub kl_p99: [f64; 2],
    /// See [`Measured::top1_equal`].
    pub top1_equal: [f64; 2],
}

/// Means over the steps of other texts than the blocks of text, with the budget found on the latter.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct OtherLosses {
    /// `text` or `uuid`.
    pub kind: String,
    /// Tokens of the longest text.
    pub length: usize,
    /// The share of the bytes that was read.
    pub bytes_read_fraction: f64,
    /// See [`Measured::kl`].
    pub kl: f64,
    /// See [`Measured::kl_p99`].
    pub kl_p99: f64,
    /// See [`Measured::top1_equal`].
    pub top1_equal: f64,
}

/// What a method answered of the probe.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Answered {
    /// Share of the questions that were answered.
    pub accuracy: f64,
    /// Points below full attention: per cent of the questions.
    pub points_below: f64,
    /// The 95% interval of these points, by the bootstrap over texts.
    pub interval: [f64; 2],
}

impl Measured {
    /// Returns the loss that a limit is compared with: the upper end of the interval of the mean KL divergence, or the
    /// mean if there is no interval.
    pub fn most_kl(&self) -> f64 {
        self.intervals.map_or(self.kl, |of| of.kl[1])
    }
}

/// Means over all steps per layer and KV head.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct HeadLosses {
    /// See [`Measured::recall`].
    pub recall: Vec<Vec<f64>>,
    /// See [`Measured::mass`].
    pub mass: Vec<Vec<f64>>,
    /// See [`Measured::output_error`].
    pub output_error: Vec<Vec<f64>>,
}

impl Verdict {
    /// Fails if the verdict has values that no measurement can give, or belongs to a model of other sizes.
    pub(super) fn check(&self, sizes: Sizes) -> Result<()> {
        let share = |x: f64| (0.0..=1.0 + 1e-6).contains(&x);
        let loss = |x: f64| x.is_finite() && x >= 0.0;
        let ordered = |of: &[f64; 2]| of[0] <= of[1];
        let heads = |of: &[Vec<f64>], is_right: &dyn Fn(f64) -> bool| {
            of.len() == sizes.n_layers
                && of.iter().all(|layer| layer.len() == sizes.n_kv_heads)
                && of.iter().flatten().all(|x| is_right(*x))
        };
        let measured = |m: &Measured| {
            [m.top1_equal, m.recall, m.mass].into_iter().all(share)
                && [m.kl, m.kl_median, m.kl_p99, m.perplexity_ratio, m.output_error]
                    .into_iter()
                    .all(loss)
                && loss(m.index_bits_per_token)
                && m.budget > 0.0
                && m.budget <= 1.0
                && heads(&m.heads.recall, &share)
                && heads(&m.heads.mass, &share)
                && heads(&m.heads.output_error, &loss)
                && m.dropped_after.is_none_or(|blocks| blocks <= self.blocks)
                && m.intervals.is_none_or(|of| {
                    let all = [of.kl, of.kl_p99, of.top1_equal];
                    all.iter().flatten().all(|x| loss(*x)) && all.iter().all(ordered)
                })
                && m.others.iter().all(|of| {
                    let losses = [of.kl, of.kl_p99, of.bytes_read_fraction];
                    losses.into_iter().all(loss) && share(of.top1_equal)
                })
                && m.probe.as_ref().is_none_or(|of| {
                    let points = [of.points_below, of.interval[0], of.interval[1]];
                    share(of.accuracy) && points.iter().all(|x| x.abs() <= 100.0) && ordered(&of.interval)
                })
        };
        let row = |row: &MethodLoss| {
            share(row.reads_target)
                && loss(row.bytes_read_fraction)
                && row.measured.as_ref().is_none_or(measured)
        };
        let format = |of: &FormatLoss| loss(of.size_fraction) && measured(&of.measured);
        let is_right = self.rows.iter().all(row)
            && self.formats.iter().all(format)
            && self.limits.is_none_or(|of| loss(of.kl) && loss(of.points))
            && self.probe.as_ref().is_none_or(|of| share(of.full_accuracy));
        if is_right {
            Ok(())
        } else {
            Err(Error::damaged("`quality.methods` contains an invalid value"))
        }
    }

    /// Lists the rows that can be recommended: those with measurements that were not dropped, without oracles.
    fn choices(&self) -> impl Iterator<Item = (&MethodLoss, &Measured)> {
        let rows = self.rows.iter().filter(|row| !row.oracle);
        let measured = rows.filter_map(|row| Some((row, row.measured.as_ref()?)));
        measured.filter(|(_, of)| of.dropped_after.is_none())
    }

    /// Returns the limit of the loss for which a row is recommended, in nats.
    pub fn limit(&self) -> f64 {
        self.limits.map_or(USUAL_KL, |of| of.kl)
    }

    /// Tells whether a row loses at most `kl` nats, and of the probe at most what the limits allow; in both cases, the
    /// upper end of the interval counts.
    fn is_within(&self, of: &Measured, kl: f64) -> bool {
        let most = self.limits.map_or(f64::INFINITY, |of| of.points);
        let probed = of.probe.as_ref().map_or(f64::INFINITY, |of| of.interval[1]);
        of.most_kl() <= kl && (self.probe.is_none() || probed <= most)
    }

    /// Returns, of the rows that lose at most this (in nats; see [`Measured::most_kl`]) and pass the probe, the row with
    /// the smallest mean divergence at the smallest target of bytes read.
    ///
    /// Rows of one target count as equally expensive: a method that reads a little less of the bytes than another is not
    /// worth a multiple of the loss.
    pub fn within(&self, kl: f64) -> Option<(&MethodLoss, &Measured)> {
        self.all_within(kl).min_by(|(a, x), (b, y)| {
            let target = a.reads_target.total_cmp(&b.reads_target);
            target.then(x.kl.total_cmp(&y.kl))
        })
    }

    /// Lists the rows of [`Verdict::within`] of which one is recommended.
    fn all_within(&self, kl: f64) -> impl Iterator<Item = (&MethodLoss, &Measured)> {
        self.choices().filter(move |(_, of)| self.is_within(of, kl))
    }

    /// Lists, for each method with rows that lose at most this and pass the probe, the one that reads the fewest bytes.
    pub fn smallest_within(&self, kl: f64) -> impl Iterator<Item = (&MethodLoss, &Measured)> {
        let is_smaller =
            |of: &MethodLoss, row: &MethodLoss| of.method == row.method && of.reads_target < row.reads_target;
        self.all_within(kl)
            .filter(move |(row, _)| !self.all_within(kl).any(|(of, _)| is_smaller(of, row)))
    }

    /// Returns the row that a run without `--method` and `--budget` follows: the one within the limits, otherwise the
    /// row with the smallest divergence.
    pub fn usual(&self) -> Option<(&MethodLoss, &Measured)> {
        let least = || self.choices().min_by(|(_, x), (_, y)| x.kl.total_cmp(&y.kl));
        self.within(self.limit()).or_else(least)
    }

    /// Returns the format of the cache that takes the fewest bytes, fewer than bf16, of those with which a row, measured over bf16,
    /// should stay within the limits. The two were measured apart, so the upper ends of their divergences are added, and those of the
    /// points that they lose.
    ///
    /// A divergence grows with the square of a small error, and the errors of choosing and of rounding are taken to be
    /// independent of each other (`make results-row-sums`).
    pub fn format_with(&self, row: &Measured) -> Option<&FormatLoss> {
        if KvType::named(&self.kv) != Some(KvType::BF16) {
            return None;
        }
        let points = |of: &Measured| of.probe.as_ref().map_or(0.0, |of| of.interval[1].max(0.0));
        let most = self.limits.map_or(f64::INFINITY, |of| of.points);
        let is_within = |of: &&FormatLoss| {
            let measured = &of.measured;
            of.size_fraction < 1.0
                && measured.dropped_after.is_none()
                && row.most_kl() + measured.most_kl() <= self.limit()
                && points(row) + points(measured) <= most
        };
        let smaller = |a: &&FormatLoss, b: &&FormatLoss| a.size_fraction.total_cmp(&b.size_fraction);
        self.formats.iter().filter(is_within).min_by(smaller)
    }

    /// Tells whether no row is left to recommend because all that were measured lost too much on the first blocks.
    pub fn dropped_all(&self) -> bool {
        self.usual().is_none() && self.rows.iter().any(|row| row.measured.is_some())
    }

    /// Tells whether the text was too short for intervals, so that a recommendation is a guess.
    pub fn is_guess(&self) -> bool {
        self.choices().all(|(_, of)| of.intervals.is_none())
    }

    /// Lists the lengths of the texts, ascending; none in files of earlier versions.
    pub fn lengths(&self) -> Vec<usize> {
        let mut lengths: Vec<usize> = self.texts.iter().map(|of| of.length).collect();
        lengths.sort_unstable();
        lengths.dedup();
        lengths
    }
}

#[cfg(test)]
mod tests;

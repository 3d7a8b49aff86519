//! The verdict of an artifact: what each method lost on the held-out text, at several shares of the bytes.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::model::Sizes;

/// A run without `--method` and `--budget` uses the smallest share of the bytes at which a method's mean KL divergence is
/// at most this, in nats, and there the method with the smallest divergence; if none is within it, the smallest of all.
pub const USUAL_KL: f64 = 0.03;

/// What methods lost on held-out text: `quality.methods`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    /// Held-out blocks.
    pub blocks: usize,
    /// Decode steps, over all blocks.
    pub steps: usize,
    /// First positions that every step read.
    pub sinks: usize,
    /// Last positions that every step read.
    pub window: usize,
    /// Type of the cache, as a value of `--kv`.
    pub kv: String,
    /// The losses per method and share of the bytes.
    pub rows: Vec<MethodLoss>,
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
        };
        let row = |row: &MethodLoss| {
            share(row.reads_target)
                && loss(row.bytes_read_fraction)
                && row.measured.as_ref().is_none_or(measured)
        };
        match self.rows.iter().all(row) {
            true => Ok(()),
            false => Err(Error::failed("`quality.methods` contains an invalid value")),
        }
    }

    /// Lists the rows with measurements, without oracles.
    fn choices(&self) -> impl Iterator<Item = (&MethodLoss, &Measured)> {
        let rows = self.rows.iter().filter(|row| !row.oracle);
        rows.filter_map(|row| Some((row, row.measured.as_ref()?)))
    }

    /// Returns, of the rows with at most this mean divergence (in nats), the row with the smallest divergence at the
    /// smallest target of bytes read.
    ///
    /// Rows of one target count as equally expensive: a method that reads a little less of the bytes than another is not
    /// worth a multiple of the loss.
    pub fn within(&self, kl: f64) -> Option<(&MethodLoss, &Measured)> {
        let enough = self.choices().filter(|(_, of)| of.kl <= kl);
        enough.min_by(|(a, x), (b, y)| {
            let target = a.reads_target.total_cmp(&b.reads_target);
            target.then(x.kl.total_cmp(&y.kl))
        })
    }

    /// Returns the row that a run without `--method` and `--budget` follows: the one within [`USUAL_KL`], otherwise the
    /// row with the smallest divergence.
    pub fn usual(&self) -> Option<(&MethodLoss, &Measured)> {
        let least = || self.choices().min_by(|(_, x), (_, y)| x.kl.total_cmp(&y.kl));
        self.within(USUAL_KL).or_else(least)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(method: &str, read: f64, kl: f64) -> MethodLoss {
        let heads = || vec![vec![0.5; 2]; 3];
        MethodLoss {
            method: method.to_owned(),
            oracle: method == "topk",
            reads_target: read,
            bytes_read_fraction: read,
            measured: Some(Measured {
                budget: 0.05,
                kl,
                kl_median: 0.0,
                kl_p99: 0.1,
                top1_equal: 1.0,
                perplexity_ratio: 1.01,
                recall: 0.5,
                mass: 0.9,
                output_error: 0.1,
                index_bits_per_token: 64.0,
                heads: HeadLosses {
                    recall: heads(),
                    mass: heads(),
                    output_error: heads(),
                },
            }),
        }
    }

    fn verdict(rows: Vec<MethodLoss>) -> Verdict {
        Verdict {
            blocks: 1,
            steps: 8,
            sinks: 4,
            window: 64,
            kv: "bf16".to_owned(),
            rows,
        }
    }

    const SIZES: Sizes = Sizes {
        n_layers: 3,
        n_heads: 4,
        n_kv_heads: 2,
        head_dim: 8,
    };

    #[test]
    fn the_smallest_loss_at_the_smallest_reads_is_recommended() {
        let none = MethodLoss {
            measured: None,
            ..row("a2ats", 0.01, 0.0)
        };
        let all = verdict(vec![
            none.clone(),
            row("topk", 0.02, 0.001),
            row("lfps", 0.05, 0.2),
            row("wpq", 0.1, 0.02),
            row("selfindex", 0.2, 0.004),
        ]);
        let name = |found: Option<(&MethodLoss, &Measured)>| found.map(|(row, _)| row.method.clone());
        assert_eq!(name(all.within(0.3)).as_deref(), Some("lfps"));
        assert_eq!(name(all.within(0.03)).as_deref(), Some("wpq"));
        assert_eq!(name(all.within(0.01)).as_deref(), Some("selfindex"));
        assert_eq!(name(all.within(0.001)), None);
        assert_eq!(name(all.usual()).as_deref(), Some("wpq"));
        let poor = verdict(vec![
            row("lfps", 0.05, 0.2),
            row("ctkvr", 0.3, 0.1),
            row("topk", 0.1, 0.01),
        ]);
        assert_eq!(name(poor.usual()).as_deref(), Some("ctkvr"));
        assert_eq!(name(verdict(vec![none]).usual()), None);
        // At one target, the smaller loss counts, not the last bytes.
        let less = MethodLoss {
            bytes_read_fraction: 0.087,
            ..row("lfps", 0.1, 0.0195)
        };
        let close = verdict(vec![less, row("wpq", 0.1, 0.0088)]);
        assert_eq!(name(close.within(0.03)).as_deref(), Some("wpq"));
    }

    #[test]
    fn values_that_no_measurement_gives_are_refused() {
        assert!(verdict(vec![row("wpq", 0.1, 0.02)]).check(SIZES).is_ok());
        let bad = |change: fn(&mut Measured)| {
            let mut row = row("wpq", 0.1, 0.02);
            change(row.measured.as_mut().expect("measured"));
            verdict(vec![row]).check(SIZES).is_err()
        };
        assert!(bad(|m| m.kl = -1.0));
        assert!(bad(|m| m.mass = 2.0));
        assert!(bad(|m| m.budget = 0.0));
        assert!(bad(|m| m.heads.recall[0].truncate(1)));
        assert!(bad(|m| m.heads.output_error.truncate(1)));
    }

    #[test]
    fn rows_keep_their_form_as_json() {
        let all = verdict(vec![
            row("topk", 0.1, 0.001),
            MethodLoss {
                measured: None,
                ..row("a2ats", 0.3, 0.0)
            },
        ]);
        let json = serde_json::to_value(&all).unwrap();
        assert_eq!(json["rows"][0]["oracle"], true);
        assert_eq!(json["rows"][1].get("kl"), None);
        assert_eq!(serde_json::from_value::<Verdict>(json).unwrap(), all);
    }
}

//! The verdict of an artifact: what each method lost on the held-out text, at several shares of the bytes.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::model::Sizes;

/// The divergence, in nats, that the method of a run without `--method` and `--budget` stays below, if one does.
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
    /// Per method and share of the bytes.
    pub rows: Vec<MethodLoss>,
}

/// What one method lost at one share of the bytes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MethodLoss {
    /// Name of the method, `NAME+tail` with a tail.
    pub method: String,
    /// Whether it ranks by exact scores, which no method can: a bound for the others.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub oracle: bool,
    /// The share of the bytes of all visible keys and values that was asked for.
    pub reads_target: f64,
    /// The share that was read, everything counted; where nothing was measured, the least that the method can read.
    pub bytes_read_fraction: f64,
    /// What was measured; nothing if the method cannot read so little.
    #[serde(flatten)]
    pub measured: Option<Measured>,
}

/// The means over all steps.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// The budget, a fraction of the context.
    pub budget: f64,
    /// KL(full || method) of the next token, in nats.
    pub kl: f64,
    /// Its median over the steps.
    pub kl_median: f64,
    /// Its 99th percentile.
    pub kl_p99: f64,
    /// Share of steps with the same most likely token.
    pub top1_equal: f64,
    /// Perplexity of the text over that with full attention.
    pub perplexity_ratio: f64,
    /// Share of the exact choice of the same size that was chosen.
    pub recall: f64,
    /// Probability of what was attended.
    pub mass: f64,
    /// Relative error of attention's output.
    pub output_error: f64,
    /// Bits of the index per position and KV head.
    pub index_bits_per_token: f64,
    /// The same of each head.
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
    /// Fails if the verdict has values that no measurement gives, or is of another model.
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

    /// Lists what was measured, oracles left out.
    fn choices(&self) -> impl Iterator<Item = (&MethodLoss, &Measured)> {
        let rows = self.rows.iter().filter(|row| !row.oracle);
        rows.filter_map(|row| Some((row, row.measured.as_ref()?)))
    }

    /// Returns the row that read the fewest bytes of those with at most this mean divergence, in nats.
    pub fn within(&self, kl: f64) -> Option<(&MethodLoss, &Measured)> {
        let enough = self.choices().filter(|(_, of)| of.kl <= kl);
        enough.min_by(|(a, x), (b, y)| {
            let bytes = a.bytes_read_fraction.total_cmp(&b.bytes_read_fraction);
            bytes.then(x.kl.total_cmp(&y.kl))
        })
    }

    /// Returns the row that a run without `--method` and `--budget` takes: the cheapest within [`USUAL_KL`], else the one
    /// that lost least.
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
            reads_target: 0.1,
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
    fn the_cheapest_row_within_a_loss_is_recommended() {
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

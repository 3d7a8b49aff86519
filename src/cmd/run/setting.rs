//! What a run reads: the method and the budget of the flags, or a setting of the artifact's verdict.

use super::args::Args;
use super::prefer::{Prefer, fastest};

use crate::artifact::{Artifact, Measured, MethodLoss, Verdict};
use crate::cmd::args::Global;
use crate::cmd::named::Named;
use crate::cmd::reading::PLANNED;
use crate::cmd::terminal::Log;
use crate::compute::device::Device;
use crate::error::{Error, Result};
use crate::kv::{Budget, KvType};
use crate::method::plan::Plan;
use crate::method::registry::{FULL, MethodName, default_method};
use crate::model::Decoder;
use serde_json::{Value, json};

/// How a run serves the KV heads: by which method, with which budget.
#[derive(Clone, Copy)]
pub struct RunSetting<'a> {
    /// The head plan, if there is one; the other fields are then those of its first KV head.
    pub plan: Option<&'a Plan>,
    /// The method.
    pub method: MethodName,
    /// Whether it has a tail.
    pub tail: bool,
    /// The budget.
    pub budget: Budget,
    /// The type of the cache that the recommendation was measured with, if it was followed.
    pub kv: Option<KvType>,
    /// The length of the longest text that the recommendation was measured on, if it was followed and says so.
    pub measured: Option<usize>,
}

impl<'a> RunSetting<'a> {
    /// Returns the head plan, if it serves KV heads differently.
    pub fn differing(self) -> Option<&'a Plan> {
        self.plan.filter(|plan| plan.same().is_none())
    }

    /// Names the method, with its tail if it has one.
    pub fn name(self) -> String {
        let Self { method, tail, .. } = self;
        let differing = self.differing().map(|_| PLANNED.to_owned());
        differing.unwrap_or_else(|| Named { method, tail }.to_string())
    }

    /// Names the method without its tail.
    pub fn method_name(self) -> &'static str {
        self.differing().map_or(self.method.as_str(), |_| PLANNED)
    }

    /// Names the methods of a layer's KV heads.
    pub fn methods_of(self, layer: usize) -> String {
        let Some(plan) = self.differing() else {
            return self.method.as_str().to_owned();
        };
        let names: Vec<String> = plan.methods_of(layer).iter().map(Named::to_string).collect();
        names.join(", ")
    }

    /// Lists the methods, without tails.
    pub fn methods(self) -> Vec<MethodName> {
        match self.plan {
            Some(plan) => plan.methods(),
            None => vec![self.method],
        }
    }

    /// Returns the budget as results have it; null if KV heads have budgets of their own.
    pub fn budget_json(self) -> Value {
        let budget = self.plan.map_or(Some(self.budget), Plan::budget);
        json!(budget.map(Budget::value))
    }

    /// Returns the formats of the cache as results have them; null if KV heads have formats of their own. Without a plan, they
    /// are those of the session.
    pub fn kv_json(self, of_session: KvType) -> Value {
        json!(self.plan.map_or(Some(of_session), Plan::kv))
    }

    /// Follows a head plan. What holds for all KV heads is that of the first one, if they differ.
    fn planned(plan: &'a Plan) -> Self {
        let first = plan.heads().next().map(|(_, _, head)| head);
        Self {
            plan: Some(plan),
            method: first.map_or(FULL, |head| head.method.method),
            tail: plan.heads().any(|(_, _, head)| head.method.tail),
            budget: first.map_or(Budget::USUAL, |head| head.budget),
            kv: first.map(|head| head.kv),
            measured: None,
        }
    }

    /// Returns what the flags ask for, or what the artifact's verdict recommends if they name neither method nor
    /// budget. `length` is how long the context is expected to become.
    pub fn choose(args: &Args, ask: &Ask<'a>, length: usize, global: &Global) -> Result<Self> {
        let (artifact, log) = (ask.artifact, global.log());
        if let Some(plan) = ask.plan {
            return Ok(Self::planned(plan));
        }
        let tail = args.reading.tail() || args.method.is_some_and(|named| named.tail);
        let verdict = artifact.and_then(|artifact| artifact.manifest.quality.methods.as_ref());
        if args.prefer == Prefer::Time {
            let found = verdict.and_then(|verdict| Some((artifact?, verdict)));
            let (artifact, verdict) = found.ok_or_else(|| {
                Error::usage("--prefer time chooses among the settings of a verdict, and there is none").hint(
                    "give an --artifact that `calibrate` made, or add a verdict to it with `kvsmith verdict`",
                )
            })?;
            if ask.device.cuda().is_some() {
                return Err(
                    Error::usage("--prefer time measures the CPU, and the model runs on a GPU")
                        .hint("add --device cpu, or give --method and --budget"),
                );
            }
            if tail {
                return Err(Error::usage("--prefer time cannot time a tail").hint("omit --tail or --prefer"));
            }
            let length = if args.chat {
                // How long a conversation becomes is not known.
                length.max(verdict.lengths().last().copied().unwrap_or_default())
            } else {
                length
            };
            let kv = args.reading.kv_type(KvType::named(&verdict.kv), ask.device);
            let found = fastest(verdict, artifact, &ask.decoder.config, length, kv, global)?;
            let said = found.text();
            return match found.row {
                Some(row) => Self::following(verdict, row, tail, &said, log),
                None => {
                    log.note(&format!("method: full; {said}"));
                    Ok(Self {
                        plan: None,
                        method: FULL,
                        tail: false,
                        budget: Budget::USUAL,
                        // What full attention loses over another type is no part of the limits.
                        kv: Some(KvType::BF16),
                        measured: None,
                    })
                }
            };
        }
        if let (None, None, Some(verdict)) = (args.method, args.budget, verdict)
            && let Some(found) = verdict.usual()
        {
            return Self::following(verdict, found, tail, "as recommended by the artifact", log);
        }
        Ok(Self {
            plan: None,
            method: args
                .method
                .map_or_else(|| default_method(artifact), |named| named.method),
            tail,
            budget: args.budget.unwrap_or(Budget::USUAL),
            kv: None,
            measured: None,
        })
    }

    /// Follows a row of a verdict, and says so, and why.
    fn following(
        verdict: &Verdict,
        (row, of): (&MethodLoss, &Measured),
        tail: bool,
        why: &str,
        log: Log,
    ) -> Result<Self> {
        let named = Named::of_row(row)?;
        let loss = match &of.intervals {
            Some(interval) => format!("KL {:.4}, at most {:.4}", of.kl, interval.kl[1]),
            None => format!("KL {:.4}, a guess", of.kl),
        };
        log.note(&format!(
            "method: {} with budget {}, {why} (reads {:.1}% of the bytes in bf16, {loss}); use --method and --budget to choose others",
            row.method,
            of.budget,
            100.0 * row.bytes_read_fraction,
        ));
        Ok(Self {
            plan: None,
            method: named.method,
            tail: tail || named.tail,
            budget: Budget::Fraction(of.budget),
            kv: KvType::named(&verdict.kv),
            measured: verdict.lengths().last().copied(),
        })
    }
}

/// What a setting depends on besides the flags.
pub struct Ask<'a> {
    /// The head plan, with what the flags say for all KV heads.
    pub plan: Option<&'a Plan>,
    pub artifact: Option<&'a Artifact>,
    pub decoder: &'a Decoder,
    pub device: &'a dyn Device,
}

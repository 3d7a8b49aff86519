//! What a run reads: the method and the budget of the flags, or a setting of the artifact's verdict.

use super::args::Args;
use super::prefer::{Prefer, fastest};
use crate::artifact::{Artifact, Measured, MethodLoss, Verdict};
use crate::cmd::args::Global;
use crate::cmd::named::Named;
use crate::cmd::terminal::Log;
use crate::compute::device::Device;
use crate::error::{Error, Result};
use crate::kv::{Budget, KvType};
use crate::method::registry::{FULL, MethodName, default_method};
use crate::model::Decoder;

/// The budget of a run without `--budget`.
pub const BUDGET: Budget = Budget::Fraction(0.06);

/// How a run chooses what it reads.
#[derive(Clone, Copy)]
pub struct Choice {
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

impl Choice {
    /// Names the method, with its tail if it has one.
    pub fn name(self) -> String {
        let Self { method, tail, .. } = self;
        Named { method, tail }.to_string()
    }

    /// Returns what the flags ask for, or what the artifact's verdict recommends if they name neither method nor
    /// budget. `length` is how long the context is expected to become.
    pub fn of(args: &Args, ask: &Ask, length: usize, global: &Global) -> Result<Self> {
        let (artifact, log) = (ask.artifact, global.log());
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
            let length = match args.chat {
                // How long a conversation becomes is not known.
                true => length.max(verdict.lengths().last().copied().unwrap_or_default()),
                false => length,
            };
            let kv = args.reading.kv_type(KvType::named(&verdict.kv), ask.device);
            let found = fastest(verdict, artifact, &ask.decoder.config, length, kv, global)?;
            let said = found.text();
            return match found.row {
                Some(row) => Self::following(verdict, row, tail, &said, log),
                None => {
                    log.note(&format!("method: full; {said}"));
                    Ok(Self {
                        method: FULL,
                        tail: false,
                        budget: BUDGET,
                        kv: KvType::named(&verdict.kv),
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
            method: args
                .method
                .map_or_else(|| default_method(artifact), |named| named.method),
            tail,
            budget: args.budget.unwrap_or(BUDGET),
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
            method: named.method,
            tail: tail || named.tail,
            budget: Budget::Fraction(of.budget),
            kv: KvType::named(&verdict.kv),
            measured: verdict.lengths().last().copied(),
        })
    }
}

/// What a choice depends on besides the flags.
pub struct Ask<'a> {
    pub artifact: Option<&'a Artifact>,
    pub decoder: &'a Decoder,
    pub device: &'a dyn Device,
}

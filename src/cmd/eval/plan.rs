//! What `eval` measures: methods, the artifacts that they read, and budgets.

use super::super::named::Named;
use super::super::reading::{PLANNED, parse_budget};
use super::args::Args;
use super::reads;
use crate::artifact::Artifact;
use crate::cmd::terminal::Log;
use crate::error::{Error, Result};
use crate::kv::{Budget, KvType};
use crate::method::plan::Plan;
use crate::method::registry::FULL;
use crate::method::tail;

/// A method with an artifact and flags.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Entry {
    /// The method as `--methods` names it.
    asked: Named,
    /// The method, with a tail if `--tail` gives every method a tail.
    pub named: Named,
    /// Index of the artifact among those given.
    pub artifact: usize,
    /// Index of the flags among those of `--also`; `None` for those of the command.
    pub also: Option<usize>,
    /// The formats of `--also-kv` in which rows are cached; `None` for those of the command.
    pub kv: Option<KvType>,
    /// Whether this is the head plan instead, whose KV heads have methods of their own.
    pub is_plan: bool,
}

impl Entry {
    /// The head plan. What it names as its method is not used.
    fn of_plan() -> Self {
        let named = Named {
            method: FULL,
            tail: false,
        };
        Self {
            asked: named,
            named,
            artifact: 0,
            also: None,
            kv: None,
            is_plan: true,
        }
    }

    /// Returns what results name as the method.
    pub fn name(&self) -> String {
        if self.is_plan {
            PLANNED.to_owned()
        } else {
            self.named.to_string()
        }
    }
}

/// Lists each method with the first artifact (or none), then with each further artifact that it reads; first those of
/// `--methods`, then those of `--also`; then all of these in each format of `--also-kv`; last the head plan, if there is one,
/// with the first artifact.
pub fn entries(args: &Args, artifacts: &[Artifact], has_plan: bool) -> Vec<Entry> {
    let mut entries = Vec::new();
    let plain = args.methods.iter().map(|asked| (asked, None));
    let others = args.also.iter().enumerate();
    let others = others.map(|(index, also)| (&also.named, Some(index)));
    for (asked, also) in plain.chain(others) {
        let named = Named {
            tail: asked.tail || args.reading.tail(),
            ..*asked
        };
        let is_calibrated = |artifact: &Artifact| named.method.is_calibrated(artifact);
        // A method without a section of its own reads an artifact for its tail only.
        let needs_section = artifacts.first().is_some_and(is_calibrated);
        let reads = |artifact: &Artifact| {
            (needs_section || named.tail)
                && (!needs_section || is_calibrated(artifact))
                && (!named.tail || artifact.has(tail::SECTION))
        };
        let others = artifacts.iter().enumerate().skip(1);
        let read = others
            .filter(|(_, artifact)| reads(artifact))
            .map(|(index, _)| index);
        entries.extend(std::iter::once(0).chain(read).map(|artifact| Entry {
            asked: *asked,
            named,
            artifact,
            also,
            kv: None,
            is_plan: false,
        }));
    }
    let in_format = |kv: &KvType| -> Vec<Entry> {
        let with = |entry: &Entry| Entry {
            kv: Some(*kv),
            ..*entry
        };
        entries.iter().map(with).collect()
    };
    let others: Vec<Entry> = args.also_kv.iter().flat_map(in_format).collect();
    entries.extend(others);
    entries.extend(has_plan.then(Entry::of_plan));
    entries
}

/// Returns the index of the first entry that has the method, the artifact and the flags of entry `index`: entries with the
/// same number share a retrieval index.
pub fn number(entries: &[Entry], index: usize) -> usize {
    let of = |entry: &Entry| (entry.named.method, entry.artifact, entry.also, entry.is_plan);
    let own = of(&entries[index]);
    entries.iter().position(|entry| of(entry) == own).unwrap_or(index)
}

/// A budget of `--budgets`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BudgetOf {
    /// The method to which the budget applies; `None` for all methods.
    method: Option<Named>,
    budget: Budget,
}

impl BudgetOf {
    /// Parses a budget, or `NAME=` and a budget.
    pub fn parse(text: &str) -> std::result::Result<Self, String> {
        let (method, budget) = match text.trim().split_once('=') {
            None => (None, text),
            Some((name, budget)) => {
                let named = Named::read(name)?;
                (Some(named), budget)
            }
        };
        let budget = parse_budget(budget)?;
        Ok(Self { method, budget })
    }

    /// Returns whether the budget applies to one method only.
    pub fn is_named(&self) -> bool {
        self.method.is_some()
    }

    fn is_for(self, method: Named) -> bool {
        self.method.is_none_or(|own| own == method)
    }
}

/// A row that is to be measured.
#[derive(Clone, Copy, Debug)]
pub struct Planned {
    /// Index of the method and artifact among the entries.
    pub entry: usize,
    /// The budget; `None` if no budget meets `reads`.
    pub budget: Option<Budget>,
    /// Index of the budget among those of the entry.
    pub place: usize,
    /// The share of the bytes to be read, and the share read on the sample.
    pub reads: Option<[f64; 2]>,
}

/// Plans each entry with each of its budgets, or with the budgets that read the requested shares.
///
/// # Errors
/// A method without a budget; a budget without a method; an error of `read`.
pub fn rows(
    args: &Args,
    entries: &[Entry],
    head_plan: Option<&Plan>,
    log: Log,
    read: &mut reads::ReadShares,
) -> Result<Vec<Planned>> {
    if !args.reads.is_empty() {
        log.note("searching the budgets that read the shares of --reads, on some of the blocks or lines");
        let found = reads::find(entries.len(), &args.reads, read)?;
        let row = |found: &reads::Found| Planned {
            entry: found.method,
            budget: found.budget,
            place: 0,
            reads: Some([found.target, found.share]),
        };
        return Ok(found.iter().map(row).collect());
    }
    let unused = |budget: &&BudgetOf| !args.named().any(|method| budget.is_for(method));
    if let Some(method) = args.budgets.iter().find(unused).and_then(|budget| budget.method) {
        return Err(Error::usage(format!(
            "--budgets has a budget for `{method}`, which is not in --methods or --also"
        ))
        .hint("add the method to --methods, or remove its budget"));
    }
    let mut plan = Vec::new();
    for (index, entry) in entries.iter().enumerate() {
        if let Some(head_plan) = head_plan.filter(|_| entry.is_plan) {
            plan.push(Planned {
                entry: index,
                // If KV heads have budgets of their own, this one is not used.
                budget: head_plan.budget().or(Some(Budget::USUAL)),
                place: 0,
                reads: None,
            });
            continue;
        }
        let own = args.budgets.iter().filter(|budget| budget.is_for(entry.asked));
        let before = plan.len();
        plan.extend(own.enumerate().map(|(place, of)| Planned {
            entry: index,
            budget: Some(of.budget),
            place,
            reads: None,
        }));
        if plan.len() == before {
            return Err(
                Error::usage(format!("--budgets has no budget for method `{}`", entry.asked)).hint(
                    "add NAME=X for this method, or a budget without NAME=, which applies to every method",
                ),
            );
        }
    }
    Ok(plan)
}

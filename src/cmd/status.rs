//! `kvsmith status`: which parts of a sharded calibration are there, which are missing, running or failed, and how long
//! the rest will take.

mod found;

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::PathBuf;

use serde_json::{Value, json};

use self::found::{Found, FoundDump, FoundWork, TaskNote};
use super::args::Global;
use super::task::State;
use super::{print, print_json};
use crate::error::Result;
use crate::wording::{counted, duration, harmless, size};

/// Arguments of `status`.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Shared work folder of a sharded calibration; shards and section files are found in its subfolders
    #[arg(value_name = "DIR")]
    dir: PathBuf,
}

/// Runs `status`.
pub fn run(args: &Args, global: &Global) -> Result<()> {
    let status = Status::new(Found::below(&args.dir)?);
    if global.json {
        print_json(global, &status.json())
    } else {
        print(&harmless(&status.text()))
    }
}

/// What is known of one phase: the shards of the text, or the layers of one section.
#[derive(Debug, Default)]
struct Phase {
    /// Number of parts, if one of them tells.
    count: Option<usize>,
    /// The parts that are complete.
    done: Vec<usize>,
    /// Tasks that are at work.
    running: Vec<TaskNote>,
    /// Tasks that ended with an error, or have not been heard of for a minute, and whose output is not there.
    failed: Vec<TaskNote>,
    /// Seconds that finished tasks took, and the parts that each made.
    took: Vec<(f64, usize)>,
    bytes: u64,
}

impl Phase {
    fn missing(&self) -> Vec<usize> {
        let all = 0..self.count.unwrap_or(0);
        all.filter(|part| !self.done.contains(part)).collect()
    }

    fn is_complete(&self) -> bool {
        self.count.is_some_and(|count| count == self.done.len())
    }

    /// Estimates the seconds until the phase is complete, if as many tasks keep running as now, from how long finished
    /// tasks took.
    fn left_s(&self) -> Option<f64> {
        if self.is_complete() {
            return Some(0.0);
        }
        let (seconds, parts) = self
            .took
            .iter()
            .fold((0.0, 0), |sum, took| (sum.0 + took.0, sum.1 + took.1));
        let per_part = (parts > 0).then(|| seconds / parts as f64);
        let at_work: f64 = self.running.iter().filter_map(TaskNote::left_s).sum();
        let in_work: usize = self.running.iter().map(|task| task.parts.len()).sum();
        let waiting = self.missing().len().saturating_sub(in_work);
        let rest = match (waiting, per_part) {
            (0, _) => 0.0,
            (n, Some(seconds)) => n as f64 * seconds,
            (_, None) => return None,
        };
        (!self.running.is_empty()).then(|| (at_work + rest) / self.running.len() as f64)
    }

    fn json(&self) -> Value {
        let notes = |of: &[TaskNote]| of.iter().map(TaskNote::json).collect::<Vec<_>>();
        json!({
            "count": self.count, "done": self.done, "missing": self.missing(), "running": notes(&self.running),
            "failed": notes(&self.failed), "bytes": self.bytes, "left_s": self.left_s(),
        })
    }

    /// Describes the phase; `unit` is what its parts are.
    fn text(&self, name: &str, unit: &str) -> String {
        let count = self
            .count
            .map_or_else(|| "?".to_owned(), |count| count.to_string());
        let mut out = format!(
            "{name:<14} {} of {count} {unit} done, {}\n",
            self.done.len(),
            size(self.bytes as usize)
        );
        let missing = self.missing();
        if !missing.is_empty() {
            out += &format!("  missing      {}\n", ranges(&missing));
        }
        for task in &self.running {
            out += &format!("  running      {}\n", task.text());
        }
        for task in &self.failed {
            out += &format!("  failed       {}\n", task.text());
        }
        match self.left_s() {
            Some(0.0) | None => {}
            Some(left) => out += &format!("  left         about {}\n", duration(left)),
        }
        out
    }
}

/// Writes ascending numbers as ranges: `0-3, 6, 8-9`; at most ten of them.
fn ranges(numbers: &[usize]) -> String {
    let mut ranges: Vec<Range<usize>> = Vec::new();
    for n in numbers {
        match ranges.last_mut() {
            Some(last) if last.end == *n => last.end += 1,
            _ => ranges.push(*n..*n + 1),
        }
    }
    let shown = ranges.iter().take(10).map(|range| match range.len() {
        1 => range.start.to_string(),
        _ => format!("{}-{}", range.start, range.end - 1),
    });
    let more = if ranges.len() > 10 { ", ..." } else { "" };
    shown.collect::<Vec<_>>().join(", ") + more
}

/// The state of a sharded calibration.
struct Status {
    shards: Phase,
    /// The layers of each section, by the section's command.
    sections: BTreeMap<String, Phase>,
    dumps: Vec<FoundDump>,
    works: Vec<FoundWork>,
    problems: Vec<String>,
}

impl Status {
    fn new(found: Found) -> Self {
        let mut status = Self {
            dumps: found.dumps,
            works: found.works,
            shards: Phase::default(),
            sections: BTreeMap::new(),
            problems: found.problems,
        };
        for shard in &found.shards {
            status.shards.count = Some(shard.count);
            status.shards.done.push(shard.index);
            status.shards.bytes += shard.bytes;
        }
        for layers in &found.layers {
            let phase = status.sections.entry(layers.command.clone()).or_default();
            phase.count = Some(layers.n_layers);
            phase.done.extend(layers.layers.clone());
            phase.bytes += layers.bytes;
        }
        for task in found.tasks {
            let phase = match task.note.command.as_str() {
                "dump" => &mut status.shards,
                command => status.sections.entry(command.to_owned()).or_default(),
            };
            phase.count = phase.count.or(task.count);
            let there = !task.parts.is_empty() && task.parts.clone().all(|part| phase.done.contains(&part));
            match task.note.state {
                State::Done if there => phase.took.push((task.note.seconds, task.parts.len())),
                // What a finished task made was removed, or a duplicate of it failed.
                State::Done => {}
                _ if there => {}
                State::Running if !task.is_lost() => phase.running.push(task),
                _ => phase.failed.push(task),
            }
        }
        let phases = std::iter::once(&mut status.shards).chain(status.sections.values_mut());
        for phase in phases {
            phase.done.sort_unstable();
            phase.done.dedup();
        }
        status
    }

    fn json(&self) -> Value {
        let sections = self
            .sections
            .iter()
            .map(|(name, phase)| (name.clone(), phase.json()));
        json!({
            "shards": self.shards.json(), "sections": sections.collect::<BTreeMap<_, _>>(), "problems": self.problems,
            "dumps": self.dumps.iter().map(|dump| json!({
                "folder": dump.name, "layers": dump.n_layers, "tokens": dump.tokens, "bytes": dump.bytes,
            })).collect::<Vec<_>>(),
            "work_folders": self.works.iter().map(|work| json!({
                "folder": work.name, "layers_done": work.layers[0], "layers": work.layers[1],
            })).collect::<Vec<_>>(),
            "device": "cpu",
        })
    }

    fn text(&self) -> String {
        let mut out = String::new();
        for dump in &self.dumps {
            out += &format!(
                "dump           {} is complete: {}, {}, {}\n",
                dump.name,
                counted(dump.n_layers, "layer"),
                counted(dump.tokens, "token"),
                size(dump.bytes as usize)
            );
        }
        for work in &self.works {
            let [done, all] = work.layers;
            out += &format!(
                "work folder    {}: a calibration that has not ended, {done} of {all} layers done;\n  the same command with --resume continues it\n",
                work.name
            );
        }
        let is_sharded =
            self.shards.count.is_some() || !self.shards.running.is_empty() || !self.shards.failed.is_empty();
        if is_sharded || self.dumps.is_empty() && self.works.is_empty() {
            out += &self.shards.text("token shards", "shards");
        }
        for (name, phase) in &self.sections {
            out += &phase.text(name, "layers");
        }
        if self.sections.is_empty() && self.shards.is_complete() {
            out += "all shards are there: the layers can be fitted\n";
        }
        if !self.sections.is_empty() && self.sections.values().all(Phase::is_complete) {
            out += "all layers of these sections are there: `kvsmith pack` can join them\n";
        }
        for problem in &self.problems {
            out += &format!("problem: {problem}\n");
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_parts_are_shown_as_ranges() {
        assert_eq!(ranges(&[0, 1, 2, 5, 7, 8]), "0-2, 5, 7-8");
        assert_eq!(ranges(&[]), "");
        let many: Vec<usize> = (0..40).step_by(2).collect();
        assert!(ranges(&many).ends_with("18, ..."));
    }
}

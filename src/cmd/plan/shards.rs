//! What a calibration in shards takes: two job arrays on a cluster, of which the first runs the model on parts of the
//! text and the second fits ranges of layers, and the join.

mod cost;
mod flags;

use std::ops::Range;

use serde_json::{Value, json};

pub use self::cost::Job;
use self::cost::Phase;
pub use self::flags::ShardFlags;
use self::flags::Wanted;
use crate::cmd::bench::free_bytes;
use crate::cmd::share::{fewest_ranges, layer_ranges};
use crate::cmd::terminal::with_flags;
use crate::error::Result;
use crate::float::Float;
use crate::wording::{duration, grouped, size};

/// The most token shards that are proposed.
const MOST: usize = 1024;
/// A plan is almost as fast as another one if it takes at most this many times as long.
const ALMOST: f64 = 1.1;

/// The machines on which the tasks run.
struct Cluster {
    /// Seconds in which everything should be done.
    deadline: f64,
    /// The most tasks at the same time; `None` = all of them.
    at_once: Option<usize>,
    /// Bytes of memory of each task.
    memory: usize,
    /// Bytes per second of the shared disk, for all tasks together.
    rate: f64,
}

/// The seconds of a phase.
#[derive(Clone, Copy)]
struct Seconds {
    /// Computation of a task.
    compute: f64,
    /// Reading and writing of a task, while others do the same.
    disk: f64,
    /// The tasks that run one after another.
    turns: f64,
}

impl Seconds {
    fn task(self) -> f64 {
        self.compute + self.disk
    }

    fn all(self) -> f64 {
        self.turns * self.task()
    }
}

impl Cluster {
    fn new(flags: &ShardFlags) -> Self {
        Self {
            deadline: flags.deadline,
            at_once: flags.tasks_at_once,
            memory: flags.task_memory.unwrap_or_else(free_bytes),
            rate: flags.shared_bandwidth,
        }
    }

    /// Returns the seconds of a phase, if its computation was measured.
    fn seconds(&self, phase: &Phase) -> Option<Seconds> {
        let at_once = self.at_once.unwrap_or(phase.tasks).min(phase.tasks);
        let bytes = (phase.task.read + phase.task.written) as f64;
        phase.task.compute.map(|compute| Seconds {
            compute,
            disk: bytes * at_once as f64 / self.rate,
            turns: phase.tasks.div_ceil(at_once.max(1)) as f64,
        })
    }

    fn holds(&self, phase: &Phase) -> bool {
        phase.task.memory + phase.task.mapped <= self.memory
    }
}

/// The names of the phases.
const PHASES: [&str; 3] = ["token shards", "layer parts", "join"];

/// A calibration in shards.
pub struct ShardPlan {
    cluster: Cluster,
    /// Whether the number of shards was to be found.
    is_auto: bool,
    /// The blocks of every token shard.
    tokens: Vec<Range<usize>>,
    /// Tokens of the largest token shard.
    longest: usize,
    layers: Vec<Range<usize>>,
    phases: [Phase; 3],
    states: [usize; 2],
    /// Bytes of one sum of a block, and of everything that is kept of a block.
    block: [usize; 2],
    /// Bytes of the sums of all blocks.
    sums: usize,
    /// The commands of the layer parts.
    commands: Vec<String>,
}

impl ShardPlan {
    /// Plans a calibration in shards if the flags ask for it.
    ///
    /// # Errors
    /// More shards than the text has blocks.
    pub fn from_flags(flags: &ShardFlags, job: &Job) -> Result<Option<Self>> {
        let plan = |count: usize| Self::with(flags, job, count);
        match flags.shards {
            None => Ok(None),
            Some(Wanted::Count(count)) => plan(count).map(Some),
            Some(Wanted::Auto) => {
                let most = job.corpus.n_blocks().min(MOST);
                let plans: Result<Vec<Self>> = (1..=most).map(plan).collect();
                Ok(proposed(plans?))
            }
        }
    }

    /// Plans `count` token shards, and as many layer parts if the model has as many layers.
    fn with(flags: &ShardFlags, job: &Job, count: usize) -> Result<Self> {
        let n_layers = job.config.n_layers();
        let tokens = job.corpus.shards(count)?;
        let longest = job.longest(&tokens);
        let layers = layer_ranges(n_layers, fewest_ranges(n_layers, count));
        Ok(Self {
            cluster: Cluster::new(flags),
            is_auto: flags.shards == Some(Wanted::Auto),
            phases: [job.tokens(&tokens), job.layers(&layers, longest), job.join()],
            tokens,
            longest,
            layers,
            states: [Float::F32, Float::Bf16].map(|dtype| job.states(dtype)),
            block: [job.sum_bytes(), job.config.n_layers() * job.block_sums(1)],
            sums: job.config.n_layers() * job.block_sums(job.corpus.n_blocks()),
            commands: job
                .fits
                .iter()
                .map(|fit| with_flags(&fit.command()).into_owned())
                .collect(),
        })
    }

    /// Returns the seconds of all phases, one after another.
    fn seconds(&self) -> Option<f64> {
        let phases = self.phases.iter().map(|phase| self.cluster.seconds(phase));
        phases.map(|seconds| Some(seconds?.all())).sum()
    }

    fn meets_deadline(&self) -> Option<bool> {
        Some(self.seconds()? <= self.cluster.deadline)
    }

    /// Returns the bytes on the shared disk at the end.
    fn disk(&self) -> usize {
        self.phases.iter().map(|phase| phase.written).sum()
    }

    /// Returns the object for `--json`.
    pub fn json(&self) -> Value {
        let phase = |(name, phase): (&&str, &Phase)| {
            let (task, seconds) = (&phase.task, self.cluster.seconds(phase));
            json!({
                "name": name, "tasks": phase.tasks,
                "memory_bytes": task.memory, "mapped_bytes": task.mapped,
                "task_read_bytes": task.read, "task_written_bytes": task.written,
                "read_bytes": phase.read, "written_bytes": phase.written,
                "compute_seconds": task.compute, "disk_seconds": seconds.map(|of| of.disk),
                "task_seconds": seconds.map(Seconds::task), "seconds": seconds.map(Seconds::all),
            })
        };
        let range = |range: &Range<usize>| json!([range.start, range.end]);
        json!({
            "token_shards": self.tokens.len(), "shard_tokens": self.longest,
            "layer_ranges": self.layers.iter().map(range).collect::<Value>(),
            "deadline_seconds": self.cluster.deadline, "tasks_at_once": self.cluster.at_once,
            "task_memory_bytes": self.cluster.memory, "shared_bytes_per_second": self.cluster.rate,
            "fits_memory": self.phases.iter().all(|phase| self.cluster.holds(phase)),
            "meets_deadline": self.meets_deadline(), "seconds": self.seconds(),
            "states_bytes": self.states[0], "states_bf16_bytes": self.states[1],
            "block_bytes": self.block[1], "block_sums_bytes": self.sums, "disk_bytes": self.disk(),
            "phases": PHASES.iter().zip(&self.phases).map(phase).collect::<Value>(),
        })
    }

    /// Describes the plan in lines of at most 80 columns.
    pub fn text(&self) -> String {
        let most = |ranges: &[Range<usize>]| ranges.iter().map(Range::len).max().unwrap_or(0);
        let (shards, layers) = (self.tokens.len(), self.layers.len());
        let mut out = format!(
            "\nshards\n  tokens   {}, each of at most {} tokens in {}\n           (dump --shard auto/{shards} --queries --values --dtype f32)\n",
            super::counted(shards, "shard"),
            grouped(self.longest),
            super::counted(most(&self.tokens), "block"),
        );
        out += &format!(
            "  layers   {}, each of at most {}: {}\n           ({},\n           each with --layers auto/{layers})\n",
            super::counted(layers, "part"),
            super::counted(most(&self.layers), "layer"),
            listed(&self.layers),
            self.commands.join(", "),
        );
        let at_once = match self.cluster.at_once {
            None => "all tasks at once".to_owned(),
            Some(n) => format!("{} at once", super::counted(n, "task")),
        };
        out += &format!(
            "  cluster  {} of memory per task, {at_once}, shared disk {} GB/s\n\n",
            size(self.cluster.memory),
            self.cluster.rate / 1e9
        );
        out + &self.table() + &self.disk_text() + &self.memory_text() + &self.deadline_text()
    }

    /// Describes the phases side by side.
    fn table(&self) -> String {
        let line = |name: &str, cells: [String; 3]| {
            let [a, b, c] = cells;
            format!("  {name:<22}{a:>16}{b:>16}{c:>16}\n")
        };
        let shown = |bytes: usize| if bytes == 0 { "-".to_owned() } else { size(bytes) };
        let bytes = |of: fn(&Phase) -> usize| self.phases.each_ref().map(|phase| shown(of(phase)));
        let times = self.phases.each_ref().map(|phase| self.cluster.seconds(phase));
        let is_timed = self.seconds().is_some();
        let time = |of: fn(Seconds) -> f64| times.map(|all| all.map(|s| duration(of(s))).unwrap_or_default());
        let mut out = line("", PHASES.map(str::to_owned));
        out += &line(
            "tasks",
            self.phases.each_ref().map(|phase| phase.tasks.to_string()),
        );
        out += &line("a task: memory", bytes(|phase| phase.task.memory));
        out += &line("  + weights of a layer", bytes(|phase| phase.task.mapped));
        out += &line("  reads", bytes(|phase| phase.task.read));
        out += &line("  writes", bytes(|phase| phase.task.written));
        if is_timed {
            out += &line("  computes", time(|seconds| seconds.compute));
            out += &line("  waits for the disk", time(|seconds| seconds.disk));
        }
        out += &line("all tasks: read", bytes(|phase| phase.read));
        out += &line("  write", bytes(|phase| phase.written));
        if is_timed {
            out += &line("  take", time(Seconds::all));
        }
        out
    }

    fn disk_text(&self) -> String {
        let [f32, bf16] = self.states.map(size);
        let [one, both] = self.block.map(size);
        let mut out = format!(
            "\n  disk     {} on the shared disk at the end:\n",
            size(self.disk())
        );
        out += &format!("           {f32} of states in f32 (in bf16, for another artifact, {bf16})\n");
        out += &format!(
            "           {} of query moments: {both} a block, two sums of {one}\n",
            size(self.sums)
        );
        let others = self.disk().saturating_sub(self.states[0] + self.sums);
        out + &format!(
            "           {} of sections, artifacts and other files\n",
            size(others)
        )
    }

    /// Says which tasks need more memory than they have.
    fn memory_text(&self) -> String {
        let mut out = String::new();
        for (i, phase) in self.phases.iter().enumerate() {
            if self.cluster.holds(phase) {
                continue;
            }
            let advice = [
                "use more shards",
                "use less text or a larger machine",
                "use a larger machine",
            ][i];
            out += &format!(
                "  memory   not enough for the {}: a task needs {}\n           ({advice})\n",
                PHASES[i],
                size(phase.task.memory + phase.task.mapped)
            );
        }
        out
    }

    fn deadline_text(&self) -> String {
        let deadline = duration(self.cluster.deadline);
        let Some(seconds) = self.seconds() else {
            return format!("  deadline {deadline}: not checked, because nothing was timed (--no-probe)\n");
        };
        let is_met = if seconds <= self.cluster.deadline {
            "met"
        } else {
            "missed"
        };
        let mut out = format!(
            "  deadline {deadline}: {is_met}; everything takes {}\n",
            duration(seconds)
        );
        let join = self.cluster.seconds(&self.phases[2]).map_or(0.0, Seconds::all);
        if seconds > self.cluster.deadline && self.is_auto {
            out += "           (no other number of shards saves more than a tenth)\n";
        }
        if join > self.cluster.deadline {
            out += "           (the join alone takes longer: add --no-verdict, or lower --holdout)\n";
        }
        out
    }
}

/// Chooses the first plan whose token shards fit the memory and that meets the deadline; else the first of those that fit
/// that is almost as fast as the fastest; else the one with the least memory, the last. Plans with more shards come
/// later.
fn proposed(plans: Vec<ShardPlan>) -> Option<ShardPlan> {
    let fits = |plan: &ShardPlan| plan.cluster.holds(&plan.phases[0]);
    let meets = |plan: &ShardPlan| fits(plan) && plan.meets_deadline() != Some(false);
    let seconds = plans
        .iter()
        .filter(|plan| fits(plan))
        .filter_map(ShardPlan::seconds);
    let fastest = seconds.fold(f64::INFINITY, f64::min);
    let is_fast = |plan: &ShardPlan| fits(plan) && plan.seconds().is_some_and(|s| s <= ALMOST * fastest);
    let chosen = plans
        .iter()
        .position(meets)
        .or_else(|| plans.iter().position(is_fast));
    let last = plans.len().checked_sub(1)?;
    plans.into_iter().nth(chosen.unwrap_or(last))
}

/// Lists ranges of layers: all of a few, else the first ones and the last one.
fn listed(ranges: &[Range<usize>]) -> String {
    let text = |range: &Range<usize>| format!("{}..{}", range.start, range.end);
    match ranges {
        [first, second, .., last] if ranges.len() > 4 => {
            format!("{} {} ... {}", text(first), text(second), text(last))
        }
        _ => ranges.iter().map(text).collect::<Vec<_>>().join(" "),
    }
}

#[cfg(test)]
mod tests {
    use clap::{Args, Command, FromArgMatches};

    use super::cost::Task;
    use super::*;

    /// A plan whose token shards take this memory and these seconds of computation, and whose other phases take nothing.
    fn plan(shards: usize, memory: usize, seconds: Option<f64>) -> ShardPlan {
        let flags = "plan --shards --task-memory 1GB --deadline 100s".split(' ');
        let matches = ShardFlags::augment_args(Command::new("plan")).get_matches_from(flags);
        let phase = |tasks, memory, compute| Phase {
            tasks,
            task: Task {
                memory,
                compute,
                ..Task::default()
            },
            read: 0,
            written: 0,
        };
        let nothing = phase(1, 0, seconds.map(|_| 0.0));
        ShardPlan {
            cluster: Cluster::new(&ShardFlags::from_arg_matches(&matches).unwrap()),
            is_auto: true,
            tokens: (0..shards).map(|i| i..i + 1).collect(),
            longest: 1,
            layers: std::iter::once(0..1).collect(),
            phases: [phase(shards, memory, seconds), nothing.clone(), nothing],
            states: [0; 2],
            block: [0; 2],
            sums: 0,
            commands: Vec::new(),
        }
    }

    fn shards(plans: &[(usize, Option<f64>)]) -> usize {
        let plans = plans.iter().enumerate();
        let plans = plans.map(|(i, (memory, seconds))| plan(i + 1, memory * 1_000_000, *seconds));
        proposed(plans.collect()).unwrap().tokens.len()
    }

    #[test]
    fn the_fewest_shards_that_fit_and_meet_the_deadline_are_proposed() {
        let meets = [
            (2000, Some(50.0)),
            (900, Some(120.0)),
            (500, Some(90.0)),
            (400, Some(80.0)),
        ];
        assert_eq!(shards(&meets), 3);
        // None is fast enough: the first that is almost as fast as the fastest.
        let misses = [
            (2000, Some(150.0)),
            (900, Some(300.0)),
            (500, Some(218.0)),
            (400, Some(200.0)),
        ];
        assert_eq!(shards(&misses), 3);
        // Without times, the first that fits; the last if none does.
        assert_eq!(shards(&[(2000, None), (1000, None), (500, None)]), 2);
        assert_eq!(shards(&[(4000, None), (3000, None)]), 2);
    }

    #[test]
    fn tasks_that_wait_take_turns_and_share_the_disk() {
        let mut plan = plan(5, 0, Some(7.0));
        plan.cluster.at_once = Some(2);
        plan.cluster.rate = 100.0;
        plan.phases[0].task.read = 300;
        let seconds = plan.cluster.seconds(&plan.phases[0]).unwrap();
        // Two at once read 300 bytes each at 50 bytes per second; five take three turns.
        assert_eq!((seconds.disk, seconds.task(), seconds.all()), (6.0, 13.0, 39.0));
    }
}

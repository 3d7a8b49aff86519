//! What the tasks of a calibration in shards take: memory, bytes and time.

use std::ops::Range;

use crate::artifact::{Fit, FitText, MomentsRead, Section};
use crate::calibration::memory::JudgedRows;
use crate::calibration::memory::MemoryPlan;
use crate::calibration::stages::{BUDGETS, CAPTURE, PROBE, VERDICT};
use crate::compute::device::Device;
use crate::corpus::Corpus;
use crate::dump::{self, DumpOptions};
use crate::estimate::{Times, Weights};
use crate::float::Float;
use crate::model::ModelConfig;
use crate::model::layer::block_bytes;
use crate::store;

/// Bytes that a shard's folder has per token, besides the states: id, position, and whether it is held out.
const TOKEN_BYTES: usize = 9;
/// Bytes of memory per token of an opened dump: its ids and marks twice, in its folder's part and in the whole.
const OPEN_BYTES: usize = 10;

/// A calibration that is to be done in shards.
pub struct Job<'a> {
    pub config: &'a ModelConfig,
    pub corpus: &'a Corpus,
    pub device: &'a dyn Device,
    pub fits: &'a [Box<dyn Fit>],
    pub sections: &'a [Section],
    /// The memory on one machine.
    pub memory: &'a MemoryPlan,
    pub weights: &'a Weights,
    /// Bytes of the artifact without its verdict, and of that with one if a verdict is wanted.
    pub artifacts: [Option<usize>; 2],
    /// What the verdict decodes.
    pub judged: &'a JudgedRows,
    /// The times on one machine, if they were measured.
    pub times: Option<&'a Times>,
}

/// What a task takes; the most of several tasks.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Task {
    /// Bytes of memory of its own.
    pub memory: usize,
    /// Bytes of weights that are mapped on top.
    pub mapped: usize,
    /// Bytes that it reads from the shared disk.
    pub read: usize,
    /// Bytes that it writes to the shared disk.
    pub written: usize,
    /// Seconds of computation; `None` if nothing was measured.
    pub compute: Option<f64>,
}

impl Task {
    /// Returns the larger of each of two tasks' costs.
    fn max(self, other: Self) -> Self {
        Self {
            memory: self.memory.max(other.memory),
            mapped: self.mapped.max(other.mapped),
            read: self.read.max(other.read),
            written: self.written.max(other.written),
            compute: self.compute.zip(other.compute).map(|(a, b)| a.max(b)),
        }
    }
}

/// Equal work for several tasks, none of which waits for another one.
#[derive(Clone, Debug, PartialEq)]
pub struct Phase {
    /// Number of tasks.
    pub tasks: usize,
    /// The most that a task takes.
    pub task: Task,
    /// Bytes that all tasks read from the shared disk.
    pub read: usize,
    /// Bytes that all tasks write to the shared disk.
    pub written: usize,
}

impl Phase {
    fn from_tasks(tasks: &[Task]) -> Self {
        let [first, others @ ..] = tasks else {
            return Self::from_tasks(&[Task::default()]);
        };
        Self {
            tasks: tasks.len(),
            task: others.iter().fold(*first, |most, task| most.max(*task)),
            read: tasks.iter().map(|task| task.read).sum(),
            written: tasks.iter().map(|task| task.written).sum(),
        }
    }
}

impl Job<'_> {
    /// Returns the bytes of the states of all layers in a type: keys, queries and values of every token.
    pub fn states(&self, dtype: Float) -> usize {
        let options = DumpOptions {
            queries: true,
            values: true,
            dtype,
            wrope_position: 0,
        };
        let specs = dump::layer_specs(self.config.sizes(), self.corpus.n_tokens(), &options);
        self.config.n_layers() * store::total_bytes(&specs)
    }

    /// Returns the bytes of one sum over the queries of all layers, f64 `[layers,g,d,d]`.
    pub fn sum_bytes(&self) -> usize {
        self.config.n_layers() * self.layer_sum()
    }

    /// Returns the bytes of one sum over the queries of a layer, f64 `[g,d,d]`.
    fn layer_sum(&self) -> usize {
        self.config.n_kv_heads * self.config.head_dim.pow(2) * size_of::<f64>()
    }

    /// Returns the bytes that a layer's files have for the sums of some blocks: two sums, and the numbers of queries.
    pub fn block_sums(&self, blocks: usize) -> usize {
        blocks * (2 * self.layer_sum() + self.config.n_kv_heads * size_of::<u64>())
    }

    /// Returns the bytes of the states of one layer that some heads have for `rows` tokens.
    fn heads_bytes(&self, heads: usize, rows: usize) -> usize {
        heads * rows * self.config.head_dim * Float::F32.bytes()
    }

    /// Returns the costs of the token shards.
    pub fn tokens(&self, shards: &[Range<usize>]) -> Phase {
        let tasks: Vec<Task> = shards.iter().map(|blocks| self.token_shard(blocks)).collect();
        Phase::from_tasks(&tasks)
    }

    fn rows(&self, blocks: &Range<usize>) -> usize {
        let start = &self.corpus.block_start;
        (start[blocks.end] - start[blocks.start]) as usize
    }

    fn token_shard(&self, blocks: &Range<usize>) -> Task {
        let (c, n) = (self.config, self.rows(blocks));
        let layer = self.heads_bytes(c.n_heads + 2 * c.n_kv_heads, n) + self.block_sums(blocks.len());
        let moments = 3 * self.sum_bytes() + c.n_layers() * c.n_kv_heads * size_of::<u64>();
        let written = c.n_layers() * layer + moments + TOKEN_BYTES * n;
        let compute = self.times.map(|times| {
            let seconds: f64 = times.blocks[blocks.clone()].iter().sum();
            seconds + times.digest_seconds(written)
        });
        Task {
            memory: self.token_memory(blocks, n),
            mapped: self.weights.layer,
            // What was written is read again for its digests.
            read: self.weights.pass + written,
            written,
            compute,
        }
    }

    fn token_memory(&self, blocks: &Range<usize>, n: usize) -> usize {
        let c = self.config;
        let longest = blocks
            .clone()
            .map(|block| self.corpus.block(block).len())
            .max()
            .unwrap_or(0);
        // A head of the block on its way to the file, as it is and as bytes.
        let put = longest * c.head_dim * (size_of::<f32>() + Float::F32.bytes());
        let block = block_bytes(c, longest, c.n_layers() > 1) + put + 2 * self.layer_sum();
        // The two sums of every layer; when they are written, also the rotated one, and all three as bytes and as a list.
        let sums = (2 * self.sum_bytes() + block).max(7 * self.sum_bytes());
        let ids = n * (size_of::<u32>() + 1);
        self.memory.program + self.memory.kept + n * c.hidden_size * size_of::<f32>() + ids + sums
    }

    /// Returns the costs of the layer parts, whose tasks read the dumps of token shards of at most `shard_rows` tokens;
    /// each task makes all sections of its layers, one after another.
    pub fn layers(&self, ranges: &[Range<usize>], shard_rows: usize) -> Phase {
        let memory = self.layer_memory(shard_rows);
        let tasks: Vec<Task> = ranges
            .iter()
            .map(|range| self.layer_range(range.len(), memory))
            .collect();
        Phase::from_tasks(&tasks)
    }

    fn layer_range(&self, layers: usize, memory: usize) -> Task {
        let whole = self.artifacts[0].unwrap_or(0);
        let results = self
            .sections
            .iter()
            .map(|section| store::total_bytes(&section.specs));
        let digested = self.fits.len() * (layers * self.layer_file() + TOKEN_BYTES * self.corpus.n_tokens());
        let picked: usize = self.fits.iter().map(|fit| self.picked(fit.as_ref())).sum();
        let compute = self.times.map(|times| {
            let stages = &times.stages;
            let others: f64 = [CAPTURE, BUDGETS, VERDICT, PROBE]
                .iter()
                .map(|stage| stages.get(stage))
                .sum();
            let fits = (stages.total() - others) / self.config.n_layers() as f64;
            layers as f64 * fits + times.digest_seconds(digested)
        });
        let written = whole * layers / self.config.n_layers();
        Task {
            memory: memory + results.max().unwrap_or(0) * layers / self.config.n_layers(),
            mapped: 0,
            // What was written is read again, to check it.
            read: digested + layers * picked + written,
            written,
            compute,
        }
    }

    /// Returns the bytes of the files of a layer of all shards.
    fn layer_file(&self) -> usize {
        let heads = self.config.n_heads + 2 * self.config.n_kv_heads;
        self.heads_bytes(heads, self.corpus.n_tokens()) + self.block_sums(self.corpus.n_blocks())
    }

    /// Returns the bytes that the fit of a layer reads after the digests of the layer's files: whole heads, even of the
    /// queries, of which a fit keeps few rows; and the sums of all blocks if it reads moments.
    fn picked(&self, fit: &dyn Fit) -> usize {
        let (c, n, facts) = (self.config, self.corpus.n_tokens(), fit.kind().facts());
        let keys = fit.key_reads() + usize::from(fit.kind().marks_constant_heads());
        let values = usize::from(facts.reads_values);
        let queries = if facts.reads_queries { c.n_heads } else { 0 };
        let sums = match facts.moments {
            MomentsRead::Nothing => 0,
            MomentsRead::Chosen | MomentsRead::Own => self.block_sums(self.corpus.n_blocks()),
        };
        self.heads_bytes((keys + values) * c.n_kv_heads + queries, n) + sums
    }

    /// Returns the memory of the section that needs the most, besides its results.
    fn layer_memory(&self, shard_rows: usize) -> usize {
        let (c, n) = (self.config, self.corpus.n_tokens());
        // A head's rows in one shard, as they are in its file.
        let read_bytes = self.heads_bytes(1, shard_rows);
        let text = FitText {
            n,
            n_kept: n - self.corpus.n_held_out(),
            longest_block: self.corpus.longest_block(),
            sizes: c.sizes(),
            device: self.device,
            threads: rayon::current_num_threads(),
            read_bytes,
            // All rows of a head are read before a few are chosen.
            query_read_bytes: read_bytes + n * c.head_dim * size_of::<f32>(),
        };
        let fits = self
            .fits
            .iter()
            .map(|fit| fit.working_bytes(&text))
            .max()
            .unwrap_or(0);
        self.memory.program + OPEN_BYTES * n + 3 * self.layer_sum() + fits
    }

    /// Returns the cost of the join: `pack`, and the verdict if one is wanted.
    pub fn join(&self) -> Phase {
        let [packed, judged] = self.artifacts.map(Option::unwrap_or_default);
        // Every file is checked by reading it again.
        let mut task = Task {
            memory: self.memory.program + self.memory.results,
            mapped: 0,
            read: 2 * packed,
            written: packed,
            compute: self.times.map(|times| times.digest_seconds(2 * packed)),
        };
        if self.artifacts[1].is_some() {
            task.memory = task
                .memory
                .max(self.memory.program + self.memory.kept + self.memory.verdict);
            task.mapped = self.weights.layer;
            // The model runs once to find the budgets, and then for all texts that pass it together.
            let passes = 1 + self.judged.passes.len();
            task.read += packed + passes * self.weights.pass + TOKEN_BYTES * self.corpus.n_tokens() + judged;
            task.written += judged;
            let verdict = |times: &Times| {
                let stages = [BUDGETS, VERDICT, PROBE].map(|stage| times.stages.get(stage));
                stages.iter().sum::<f64>()
            };
            task.compute = self
                .times
                .zip(task.compute)
                .map(|(times, packing)| packing + verdict(times) + times.digest_seconds(packed + judged));
        }
        Phase::from_tasks(&[task])
    }

    /// Returns the tokens of the largest of some shards.
    pub fn longest(&self, shards: &[Range<usize>]) -> usize {
        shards.iter().map(|blocks| self.rows(blocks)).max().unwrap_or(0)
    }
}

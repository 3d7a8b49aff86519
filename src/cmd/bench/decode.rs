//! `kvsmith bench retrieve` and `bench attend`: one decode step of one layer on shapes of real models, with random
//! data. No checkpoint and no artifact is needed.

use std::collections::BTreeMap;
use std::str::FromStr;

use serde_json::{Value, json};

use super::report::{add_bandwidth, number, print_row};
use super::timed::{check, methods_help, ranking_help};
use super::{cpu_step, cuda_step};
use crate::cmd::args::Global;
use crate::cmd::print_json;
use crate::error::{Error, Result};
use crate::flags::{self, at_least_one};
use crate::float::Float;
use crate::kv::Budget;
use crate::kv::KvType;
use crate::kv::StaticSet;
use crate::method::bench::{Bench, Layer};
use crate::method::params::Params;
use crate::method::registry::MethodName;
use crate::method::{Choice, Ranking, Reads, lfps};
use crate::{compute, interrupt};

/// Bytes that are read before any of them is read again: more than the processor's caches hold.
pub const ROTATED_BYTES: usize = 256 << 20;

#[derive(clap::Args, Debug)]
pub struct DecodeArgs {
    /// Attention shapes: llama-3.1-8b, qwen2.5-14b, mistral-7b, or query heads/KV heads x channels (32/8x128)
    #[arg(
        long,
        value_name = "S,..",
        value_delimiter = ',',
        default_value = "llama-3.1-8b"
    )]
    shapes: Vec<Heads>,
    /// Positions in the cache, in numbers or as 8K to 1M
    #[arg(long, value_name = "N,..", value_delimiter = ',', default_value = "8K,32K,128K", value_parser = parse_context)]
    context: Vec<usize>,
    #[arg(
        long,
        value_name = "M,..",
        value_delimiter = ',',
        default_value = "full,a2ats,selfindex",
        help = methods_help()
    )]
    methods: Vec<MethodName>,
    #[command(flatten)]
    caches: Caches,
    #[command(flatten)]
    lfps: lfps::Params,
    #[arg(long, value_enum, default_value_t, help = ranking_help())]
    ranking: Ranking,
    /// Timed runs
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = at_least_one)]
    runs: usize,
}

/// The caches that steps read, and what they choose of them.
#[derive(clap::Args, Debug)]
pub struct Caches {
    /// Sequences
    #[arg(long, value_name = "B,..", value_delimiter = ',', default_value = "1", value_parser = parse_batch)]
    pub batch: Vec<usize>,
    /// What a method may choose, as in `run`
    #[arg(long, value_name = "X", default_value = "0.06")]
    pub budget: Budget,
    /// Element type of the cache; 2bit on the CPU alone
    #[arg(long, value_enum, value_name = "TYPE", default_value_t = KvType::Bf16)]
    pub kv: KvType,
    /// Codewords of a2ats
    #[arg(long, value_name = "M", default_value_t = 4096, value_parser = at_least_one)]
    pub size: usize,
}

/// Returns the element type of rows on a GPU; fails for 2-bit rows.
pub fn float(kv: KvType) -> Result<Float> {
    let refused =
        || Error::usage("`--kv 2bit`: `bench` has such rows on the CPU alone").hint("use --device cpu");
    kv.float().ok_or_else(refused)
}

/// The heads of one layer.
#[derive(Clone, Copy, Debug)]
pub struct Heads {
    /// Query heads, h.
    pub n_heads: usize,
    /// KV heads, g.
    pub n_kv_heads: usize,
    /// Channels, d.
    pub head_dim: usize,
}

impl FromStr for Heads {
    type Err = String;

    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let of = |n_heads, n_kv_heads, head_dim| Self {
            n_heads,
            n_kv_heads,
            head_dim,
        };
        let numbers = || {
            let (n_heads, rest) = text.split_once('/')?;
            let (n_kv_heads, head_dim) = rest.split_once('x')?;
            Some(of(
                n_heads.parse().ok()?,
                n_kv_heads.parse().ok()?,
                head_dim.parse().ok()?,
            ))
        };
        let heads = match text {
            "llama-3.1-8b" | "mistral-7b" => of(32, 8, 128),
            "qwen2.5-14b" => of(40, 8, 128),
            _ => numbers().ok_or("expected a model, or query heads/KV heads x channels as in 32/8x128")?,
        };
        let groups = heads.n_kv_heads > 0 && heads.n_heads > 0 && heads.n_heads % heads.n_kv_heads == 0;
        if !groups
            || heads.head_dim == 0
            || heads.head_dim % 32 != 0
            || heads.n_heads.max(heads.head_dim) > 1024
        {
            return Err("query heads must come in groups, channels in 32s, at most 1024 of each".to_owned());
        }
        Ok(heads)
    }
}

/// Parses a number of positions, as in 8192, 8K or 1M.
pub(super) fn parse_context(text: &str) -> std::result::Result<usize, String> {
    let (digits, unit) = match text.as_bytes().last() {
        Some(b'K' | b'k') => (&text[..text.len() - 1], 1 << 10),
        Some(b'M' | b'm') => (&text[..text.len() - 1], 1 << 20),
        _ => (text, 1),
    };
    let n = digits.parse::<usize>().ok().and_then(|n| n.checked_mul(unit));
    n.filter(|n| (1..=16 << 20).contains(n))
        .ok_or_else(|| "expected a number of positions from 1 to 16M".to_owned())
}

/// Parses a number of sequences.
fn parse_batch(text: &str) -> std::result::Result<usize, String> {
    match text.parse() {
        Ok(n @ 1..=65_535) => Ok(n),
        _ => Err("expected a whole number from 1 to 65535".to_owned()),
    }
}

/// What is timed.
#[derive(Clone, Copy)]
pub struct Setting<'a> {
    /// What is the same for all settings.
    pub args: &'a DecodeArgs,
    /// One layer's heads.
    pub heads: Heads,
    /// Positions in the cache, n.
    pub context: usize,
    /// Sequences, b.
    pub batch: usize,
    pub method: MethodName,
    pub bench: &'static dyn Bench,
    /// Whether what was chosen is attended too.
    pub attends: bool,
    pub seed: u64,
}

/// First and last positions that are always attended; the default of `run`.
pub const SINKS: usize = 4;
/// See [`SINKS`].
pub const WINDOW: usize = 64;

impl Setting<'_> {
    /// Returns the caches that steps read.
    pub fn caches(&self) -> &Caches {
        &self.args.caches
    }

    /// Counts the query heads per KV head.
    pub fn group(&self) -> usize {
        self.heads.n_heads / self.heads.n_kv_heads
    }

    /// Returns what is always attended, for the last position.
    pub fn static_set(&self) -> StaticSet {
        StaticSet::at(self.context - 1, None, SINKS, WINDOW)
    }

    /// Describes the layer to a method.
    pub fn layer(&self) -> Layer {
        Layer {
            sequences: self.batch,
            kv_heads: self.heads.n_kv_heads,
            head_dim: self.heads.head_dim,
            context: self.context,
            codewords: self.caches().size,
            ranking: self.args.ranking,
            seed: self.seed,
        }
    }

    /// Returns the parameters of all methods.
    pub fn params(&self) -> Params {
        Params {
            lfps: self.args.lfps,
            ..Params::default()
        }
    }

    /// Tells whether a step reads cached rows.
    pub fn holds_rows(&self) -> bool {
        self.attends || self.bench.reads_rows(self.caches().kv)
    }

    /// Counts the bytes of a cached key.
    pub fn key(&self) -> usize {
        self.caches().kv.bytes_per_key(self.heads.head_dim)
    }

    /// Counts the bytes of a cached key and value.
    pub fn rows(&self) -> usize {
        self.caches().kv.bytes_per_position(self.heads.head_dim)
    }

    /// Counts the bytes of the cached rows of one layer; 0 where none is read.
    pub fn row_bytes(&self) -> usize {
        let heads = self.batch * self.heads.n_kv_heads;
        if self.holds_rows() {
            self.rows() * heads * self.context
        } else {
            0
        }
    }

    /// Counts the bytes of one layer's index that a step on a GPU reads.
    pub fn index_bytes(&self) -> usize {
        self.bench.index_bytes(&self.layer())
    }

    /// Counts the bytes that a step of one KV head reads on the CPU: the index, the keys that are ranked, and
    /// each row that is attended once.
    pub fn read_bytes(&self, reads: &Reads, choice: &Choice) -> usize {
        let (ranked, attended) = match self.attends {
            true => (
                reads.unattended_keys,
                self.static_set().len() + choice.positions.len(),
            ),
            false => (reads.keys, 0),
        };
        reads.index_bytes + self.key() * ranked + self.rows() * attended
    }

    /// Counts the copies of a layer's data that together exceed the processor's caches.
    pub fn copies(&self) -> usize {
        let bytes = (self.row_bytes() + self.index_bytes()).max(1);
        ROTATED_BYTES.div_ceil(bytes).clamp(2, 64)
    }

    /// Counts the bytes that a step on a GPU has to move: the index, and each row that is attended once.
    fn moved_bytes(&self) -> usize {
        let set = self.static_set();
        let chosen = self
            .caches()
            .budget
            .positions(self.context)
            .min(set.candidates.len());
        let attended = match self.bench.retrieves() {
            true => set.len() + chosen,
            false => self.context,
        };
        self.index_bytes() + self.row_bytes() / self.context * attended
    }

    pub fn shape(&self) -> String {
        let Heads {
            n_heads,
            n_kv_heads,
            head_dim,
        } = self.heads;
        let (b, n, kv) = (self.batch, self.context, self.caches().kv.as_str());
        let budget = self.caches().budget.value();
        format!("batch {b}, {n_heads}/{n_kv_heads} heads x {head_dim}, {n} positions, {kv}, budget {budget}")
    }
}

/// Decode steps to time.
pub trait Work {
    /// Runs some steps, on one copy of the data after the other; returns the seconds of one step.
    fn run(&mut self) -> Result<f64>;

    /// Returns the bytes that the last step read and, where it is known, the share of all scores that retrieval
    /// computed exactly.
    fn read(&self) -> (usize, Option<f64>) {
        (0, None)
    }
}

/// Times every setting. `attends` is `bench attend`.
pub fn run(args: &DecodeArgs, attends: bool, global: &Global) -> Result<()> {
    check(&args.methods, args.ranking, global.device)?;
    let device = match global.device {
        flags::DeviceFlag::Wgpu => {
            return Err(
                Error::device("`bench` of decode steps cannot run on device `wgpu`")
                    .hint("use --device cpu or --device cuda"),
            );
        }
        flags::DeviceFlag::Cuda => {
            float(args.caches.kv)?;
            Some(compute::cuda::Cuda::open()?)
        }
        _ => None,
    };
    let driver = device.as_ref().map(compute::cuda::Cuda::driver);
    let bandwidth = match driver {
        Some(driver) => cuda_step::bandwidth(driver, args.runs)?,
        None => cpu_step::bandwidth(args.runs),
    };
    global
        .log()
        .note(&format!("a plain read loop: {bandwidth:.1} GB/s"));
    let mut rows = Vec::new();
    // GB/s of scattered reads, by the bytes of a row.
    let mut scattered = BTreeMap::new();
    for setting in settings(args, attends, global.seed) {
        interrupt::check()?;
        let of_rows = driver.is_none().then(|| {
            let known = scattered.entry(setting.key());
            *known.or_insert_with_key(|row| cpu_step::scattered(*row, args.runs))
        });
        let mut work: Box<dyn Work + '_> = match driver {
            Some(driver) => cuda_step::work(driver, setting)?,
            None => cpu_step::work(setting)?,
        };
        // Once to warm up.
        work.run()?;
        let mut times = Vec::new();
        for _ in 0..args.runs {
            interrupt::check()?;
            times.push(work.run()?);
        }
        let (name, (bytes, scored)) = match driver {
            Some(_) => ("cuda", (setting.moved_bytes(), None)),
            None => ("cpu", work.read()),
        };
        let mut row = row(&setting, name, times, bytes, bandwidth);
        if let Some(rate) = of_rows {
            row["scattered_loop_gbytes_per_s"] = json!(rate);
        }
        if let Some(share) = scored {
            row["scored_share"] = json!(share);
        }
        if !global.json {
            print_times(&row)?;
        }
        rows.push(row);
    }
    if global.json {
        print_json(&json!({ "rows": rows }))
    } else {
        Ok(())
    }
}

/// Lists every combination; full attention has nothing to retrieve.
fn settings(args: &DecodeArgs, attends: bool, seed: u64) -> Vec<Setting<'_>> {
    let mut out = Vec::new();
    for &heads in &args.shapes {
        for &context in &args.context {
            for &batch in &args.caches.batch {
                let timed = args.methods.iter().filter_map(|m| Some((*m, m.bench()?)));
                for (method, bench) in timed.filter(|(_, bench)| attends || bench.retrieves()) {
                    out.push(Setting {
                        args,
                        heads,
                        context,
                        batch,
                        method,
                        bench,
                        attends,
                        seed,
                    });
                }
            }
        }
    }
    out
}

fn row(setting: &Setting, device: &str, times: Vec<f64>, bytes: usize, bandwidth: f64) -> Value {
    let what = if setting.attends { "attend" } else { "retrieve" };
    let how = match setting.args.ranking {
        Ranking::Fast => "",
        Ranking::Plain => ", plain ranking",
    };
    let name = format!("{what} {}{how}", setting.method.as_str());
    let mut row = super::report::row(&name, &setting.shape(), device, times);
    row["bytes"] = json!(bytes);
    add_bandwidth(&mut row, bytes as f64, bandwidth);
    row
}

fn print_times(row: &Value) -> Result<()> {
    let number = |name: &str| number(row, name);
    print_row(
        row,
        &format!(
            "median {:.1} us (min {:.1}, max {:.1}), {:.1} GB/s, {:.0} % of a plain read loop",
            1e6 * number("median_s"),
            1e6 * number("min_s"),
            1e6 * number("max_s"),
            number("gbytes_per_s"),
            100.0 * number("bandwidth_share"),
        ),
    )
}

//! The arguments of `run`.

use std::path::{Path, PathBuf};

use super::prefer::Prefer;
use crate::cmd::args::model_folder;
use crate::cmd::flags::{at_least_1, at_least_one, not_negative, parse_count, share, share_or_zero};
use crate::cmd::named::{Named, NamedParser};
use crate::cmd::reading::{Reading, parse_budget};
use crate::kv::Budget;
use crate::kv::sample::Sampling;

/// Sequences at a time without `--sequences`: as many as share a read of the weights on a CPU.
const SEQUENCES: usize = 4;

/// Arguments of `run`.
#[derive(clap::Args, Debug)]
#[command(group(clap::ArgGroup::new("input")))]
#[command(group(
    clap::ArgGroup::new("source").args(["prompt", "prompt_file", "tokens", "chat", "batch"]).required(true).multiple(true)
))]
pub struct Args {
    /// Folder of a Hugging Face checkpoint, a GGUF file, or the id of a model in the Hugging Face cache, such as
    /// Qwen/Qwen3-0.6B
    #[arg(long, value_name = "DIR", value_parser = model_folder())]
    pub(super) model: PathBuf,
    /// Text of the prompt; - reads stdin
    #[arg(help_heading = "Input", long, value_name = "T", group = "input")]
    pub(super) prompt: Option<String>,
    /// File with the text of the prompt; - reads stdin
    #[arg(help_heading = "Input", long, value_name = "F", group = "input")]
    pub(super) prompt_file: Option<PathBuf>,
    /// File with the token ids of the prompt: a JSON array that contains one array (with --chat, one array per turn)
    #[arg(help_heading = "Input", long, value_name = "F", group = "input")]
    pub(super) tokens: Option<PathBuf>,
    /// Answer every line of this file, several at a time. Each line is a JSON object with `prompt`, or `messages` for the
    /// model's chat template, and perhaps `id` and `max_new`. The same command continues a stopped run; with --overwrite, it
    /// begins anew
    #[arg(help_heading = "Input", long, value_name = "FILE.jsonl", group = "input", requires = "output", conflicts_with_all = ["chat", "trace", "compare"])]
    pub(super) batch: Option<PathBuf>,
    /// With --batch: file for the replies, a JSON object per line; a reply is written as soon as it is complete
    #[arg(short, long, value_name = "FILE.jsonl", requires = "batch")]
    pub(super) output: Option<PathBuf>,
    /// With --batch: most prompts at a time. On the CPU, a reply is exactly that of a run of its own
    #[arg(help_heading = "Input", long, value_name = "N", default_value_t = SEQUENCES, value_parser = at_least_one, requires = "batch")]
    pub(super) sequences: usize,
    /// Hold a conversation on one KV cache: each line of stdin is a user message, and the prompt, if given, is the
    /// first message
    #[arg(help_heading = "Input", long)]
    pub(super) chat: bool,
    /// With --chat: system message for the model's chat template
    #[arg(
        help_heading = "Input",
        long,
        value_name = "T",
        requires = "chat",
        conflicts_with = "tokens"
    )]
    pub(super) system: Option<String>,
    /// Method that chooses the positions each decode step reads; NAME+tail is the same as --method NAME --tail. Without
    /// --method and --budget, both come from the artifact's recommendation, if it has one. Without a recommendation, or
    /// if only --budget is given: the first of wpq, a2ats, selfindex and lfps with a section in the artifact, else full
    #[arg(help_heading = "Method", long, value_parser = NamedParser)]
    pub(super) method: Option<Named>,
    /// Run the prompt with each of these methods, and say where their texts part from the first one's
    #[arg(help_heading = "Method", long, value_name = "A,B", value_delimiter = ',', value_parser = NamedParser, conflicts_with_all = ["chat", "method", "trace", "head_plan"])]
    pub(super) compare: Vec<Named>,
    /// Number of positions that the method may choose per KV head and step: a fraction of the context (0.06 or 6%; 1
    /// or `all` reads everything) or, above 1, a number of positions. Sinks, window, index and keys that are read
    /// only to rank do not count. Without --method and --budget, both come from the artifact's recommendation, if it
    /// has one. Without a recommendation, or if only --method is given: 0.06
    #[arg(help_heading = "Method", long, value_name = "X", value_parser = parse_budget)]
    pub(super) budget: Option<Budget>,
    /// Which of the settings within the limits of the artifact's verdict to use; only without --method and --budget
    #[arg(help_heading = "Method", long, value_enum, value_name = "WHAT", default_value_t, conflicts_with_all = ["method", "budget", "compare", "head_plan"])]
    pub(super) prefer: Prefer,
    /// Maximum number of tokens to generate (with --chat, per reply)
    #[arg(help_heading = "Generation", long, value_name = "N", default_value_t = 128, value_parser = parse_count)]
    pub(super) max_new: usize,
    /// Continue beyond the model's context (max_position_embeddings), where its answers get worse
    #[arg(help_heading = "Generation", long)]
    pub(super) beyond_context: bool,
    /// Do not stop at the model's stop tokens
    #[arg(help_heading = "Generation", long)]
    pub(super) ignore_eos: bool,
    /// Write the positions that the method chose to this file: one JSON line per step, layer and KV head
    #[arg(help_heading = "Output", long, value_name = "FILE")]
    pub(super) trace: Option<PathBuf>,
    /// Sampling temperature; 0 always takes the most probable token
    #[arg(help_heading = "Generation", long, value_name = "T", default_value_t = 0.0, value_parser = not_negative)]
    pub(super) temperature: f64,
    /// Sample from the K most probable tokens (default: no limit)
    #[arg(help_heading = "Generation", long, value_name = "K", value_parser = at_least_one)]
    pub(super) top_k: Option<usize>,
    /// Sample from the smallest set of tokens whose total probability reaches P (above 0, at most 1; 1 = all tokens)
    #[arg(help_heading = "Generation", long, value_name = "P", default_value_t = 1.0, value_parser = share)]
    pub(super) top_p: f64,
    /// Sample only from tokens with at least P times the probability of the most probable token (at least 0, below 1;
    /// 0 = all tokens)
    #[arg(help_heading = "Generation", long, value_name = "P", default_value_t = 0.0, value_parser = share_or_zero)]
    pub(super) min_p: f64,
    /// Penalise tokens that already occurred: divide their positive logits by X and multiply their negative logits by
    /// X (at least 1; 1 = no penalty)
    #[arg(help_heading = "Generation", long, value_name = "X", default_value_t = 1.0, value_parser = at_least_1)]
    pub(super) repetition_penalty: f64,
    /// End a reply before this text; can be given more than once
    #[arg(help_heading = "Generation", long, value_name = "TEXT", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub(super) stop: Vec<String>,
    #[command(flatten)]
    pub(super) reading: Reading,
}

impl Args {
    /// Returns how tokens are chosen.
    pub(super) fn sampling(&self) -> Sampling {
        Sampling {
            temperature: self.temperature,
            top_k: self.top_k,
            top_p: self.top_p,
            min_p: self.min_p,
            repetition_penalty: self.repetition_penalty,
        }
    }

    /// Lists the files and folders that the command reads.
    pub(super) fn inputs(&self) -> Vec<&Path> {
        let files = [&self.prompt_file, &self.tokens, &self.batch]
            .into_iter()
            .flatten();
        let files = files.chain(self.reading.files()).chain([&self.model]);
        files.map(PathBuf::as_path).collect()
    }
}

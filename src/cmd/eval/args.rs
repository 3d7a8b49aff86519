//! Arguments of `eval`.

use std::path::{Path, PathBuf};

use super::also::Also;
use super::needles::Feeding;
use super::plan::BudgetOf;
use crate::cmd::args::{Global, Text, model_folder};
use crate::cmd::flags::{parse_count, parse_count_or_all, parse_positive_count, parse_share};
use crate::cmd::named::{Named, NamedParser};
use crate::cmd::parameters::kv_type;
use crate::cmd::reading::Reading;
use crate::error::{Error, Result};
use crate::kv::KvType;
use crate::method::CPU_GRANULE;
use crate::method::registry::FULL;

/// The largest number of bytes that `--granule` takes.
const MOST_GRANULE: usize = 4096;

/// Arguments of `eval`.
#[derive(clap::Args, Clone, Debug)]
#[command(group(clap::ArgGroup::new("source").args(["text", "tokens", "needles"]).required(true).multiple(true)))]
pub struct Args {
    /// Folder of a Hugging Face checkpoint, or the id of a model in the Hugging Face cache, such as Qwen/Qwen3-0.6B
    #[arg(long, value_name = "DIR", value_parser = model_folder())]
    pub(super) model: PathBuf,
    /// Read token ids instead of text: a JSON array of arrays, one per document
    #[arg(help_heading = "Input", long, value_name = "FILE.json")]
    pub(super) tokens: Option<PathBuf>,
    /// Ask questions instead of comparing texts: JSON lines {prompt, answer}, {prompt_tokens, answer_tokens}, or
    /// conversations {turns: [..]} of such turns. A `question` is fed token by token after the prompt; with several
    /// `answers`, the score is the share of the answers found. `auto` hides facts in --text and asks for them
    #[arg(help_heading = "Input", long, value_name = "F.jsonl")]
    pub(super) needles: Option<PathBuf>,
    /// With --needles auto: tokens of the texts in which facts are hidden; there are 20 texts of each length, with eight
    /// questions each
    #[arg(help_heading = "Input", long, value_name = "N,M", value_delimiter = ',', default_value = "2048", value_parser = parse_positive_count)]
    pub(super) lengths: Vec<usize>,
    /// Number of tokens at the end of a needle's prompt that are fed one by one if its line has no `question`. With
    /// 0, the first token of the answer comes from exact attention
    #[arg(help_heading = "Input", long, value_name = "N", default_value_t = 16, value_parser = parse_count)]
    pub(super) decode_prompt: usize,
    /// How questions are fed: `decode` feeds them token by token after the prompt, so that the method's own reads must
    /// answer them; `prefill` feeds them with the prompt, by exact attention, as most papers do, and only the answer is
    /// decoded
    #[arg(help_heading = "Input", long, value_enum, default_value_t = Feeding::Decode)]
    pub(super) question: Feeding,
    /// Methods to compare with full attention. NAME+tail also estimates the attention to positions that are not read;
    /// it needs the section `tail` of --artifact (default, without --also: every method with a section in --artifact, and
    /// topk and full)
    #[arg(help_heading = "Measurement", long, value_name = "A,B", value_delimiter = ',', value_parser = NamedParser)]
    pub(super) methods: Vec<Named>,
    /// Measure a further row, on the same steps: a method with these flags, such as --also "lfps --lfps-theta 0.85".
    /// Flags of the method that are not in the quotes have their defaults, even if they are given outside. NAME need not
    /// be in --methods. May be given several times
    #[arg(help_heading = "Measurement", long, value_name = "NAME --FLAG X", value_parser = Also::parse)]
    pub(super) also: Vec<Also>,
    /// Measure every row again, on the same steps, with a cache of this type in place of that of --kv, such as int4 or
    /// k=int8,v=int4. May be given several times
    #[arg(help_heading = "Measurement", long, value_name = "TYPE", value_parser = kv_type(), conflicts_with = "head_plan")]
    pub(super) also_kv: Vec<KvType>,
    /// Budgets to measure each method with; NAME=X applies to the method NAME only. A budget is a fraction of the
    /// context (0.06 or 6%) or, above 1, a number of positions. The static set, the index and keys that are read only
    /// to rank do not count
    #[arg(help_heading = "Measurement", long, value_name = "X,Y", value_delimiter = ',', default_value = "0.06", value_parser = BudgetOf::parse)]
    pub(super) budgets: Vec<BudgetOf>,
    /// Instead of --budgets: shares of the bytes of all visible keys and values that a step may read, index included,
    /// such as 0.05,0.1; for a cache in 8 bits or fewer, of their bytes in bf16. kvsmith searches for the budget of each method on some of the blocks or lines
    #[arg(help_heading = "Measurement", long, value_name = "F,G", value_delimiter = ',', value_parser = parse_share, conflicts_with_all = ["budgets", "head_plan"])]
    pub(super) reads: Vec<f64>,
    /// Number of bytes that memory moves at once, a power of two up to 4096. --reads counts bytes as such a memory moves
    /// them: whatever is read, whole granules. With 1, each byte that is read counts once
    #[arg(help_heading = "Measurement", long, value_name = "N", default_value_t = 1, value_parser = parse_granule)]
    pub(super) granule: usize,
    /// Number of tokens at the end of each turn that are decoded one by one
    #[arg(help_heading = "Measurement", long, value_name = "N", default_value_t = 64, value_parser = parse_positive_count)]
    pub(super) decode: usize,
    /// Cut each block of text into this number of equal turns
    #[arg(help_heading = "Measurement", long, value_name = "N", default_value_t = 1, value_parser = parse_positive_count, conflicts_with = "needles")]
    pub(super) turns: usize,
    /// Leave out recall, mass and output error. They need every method to choose along the trajectory of full attention
    /// too, which doubles the time of a step
    #[arg(help_heading = "Measurement", long, conflicts_with_all = ["per_head", "needles"])]
    pub(super) losses_only: bool,
    /// Also report each layer and KV head
    #[arg(help_heading = "Measurement", long)]
    pub(super) per_head: bool,
    /// Maximum block length in tokens; longer documents are cut into blocks (default: 16384, or the model's context
    /// if it is shorter)
    #[arg(help_heading = "Text", long, value_name = "N", value_parser = parse_count)]
    pub(super) seq_len: Option<usize>,
    /// Maximum number of text tokens to read; `all` for no limit
    #[arg(help_heading = "Text", long, value_name = "N", default_value_t = 65_536, value_parser = parse_count_or_all)]
    pub(super) max_tokens: usize,
    /// Number of tokens of random UUIDs to add to the text
    #[arg(help_heading = "Text", long, value_name = "N", default_value_t = 0, value_parser = parse_count)]
    pub(super) uuid_tokens: usize,
    /// More artifacts to compare with --artifact: each method is also measured with every artifact that has its
    /// section, on the same steps
    #[arg(
        help_heading = "Measurement",
        long,
        value_name = "ART2,ART3",
        value_delimiter = ',',
        requires = "artifact"
    )]
    pub(super) against: Vec<PathBuf>,
    #[command(flatten)]
    pub(super) text: Text,
    #[command(flatten)]
    pub(super) reading: Reading,
}

impl Args {
    /// Returns the files of the artifacts, beginning with that of `--artifact`.
    pub(super) fn artifacts(&self) -> impl Iterator<Item = &PathBuf> {
        self.reading.artifact().into_iter().chain(&self.against)
    }

    /// Returns the granule in which moved bytes count: that of `--granule`, or a cache line of the CPU.
    pub(super) fn granule(&self) -> usize {
        match self.granule {
            1 => CPU_GRANULE,
            granule => granule,
        }
    }

    /// Returns the methods of `--methods` and of `--also`.
    pub(super) fn named(&self) -> impl Iterator<Item = Named> {
        let others = self.also.iter().map(|also| also.named);
        self.methods.iter().copied().chain(others)
    }

    /// Tells whether questions are made from the text.
    pub(super) fn makes_questions(&self) -> bool {
        self.needles
            .as_ref()
            .is_some_and(|path| path == Path::new("auto"))
    }

    /// Fails unless there is one source of text or questions.
    pub(super) fn check_source(&self) -> Result<()> {
        let (has_text, has_tokens) = (self.text.is_given(), self.tokens.is_some());
        let wrong = |what: &str, hint: &str| Err(Error::usage(what).hint(hint));
        match (self.needles.is_some(), self.makes_questions()) {
            _ if has_text && has_tokens => {
                wrong("--text and --tokens exclude each other", "give one of them")
            }
            (true, true) if !has_text => wrong(
                "--needles auto needs --text",
                "give text in which facts are hidden",
            ),
            (true, false) if has_text || has_tokens => wrong(
                "a file of --needles has its own text",
                "omit --text and --tokens, or give --needles auto",
            ),
            _ => Ok(()),
        }
    }

    /// Fails if the command asks both to decode the end of prompts and to prefill questions.
    pub(super) fn check_question(&self, global: &Global) -> Result<()> {
        let is_given = global.given.iter().any(|given| given == "decode-prompt");
        if self.question == Feeding::Prefill && is_given && self.decode_prompt > 0 {
            Err(Error::usage(
                "--decode-prompt decodes the end of a prompt, which --question prefill prefills",
            )
            .hint("omit one of the two flags"))
        } else {
            Ok(())
        }
    }

    /// Warns of flags of `eval` that have no effect.
    pub(super) fn warn_of_unused(&self, has_plan: bool, global: &Global) {
        let (log, given) = (global.log(), |flag: &str| {
            global.given.iter().any(|given| given == flag)
        });
        if has_plan && self.named().next().is_none() && given("budgets") {
            log.warn("--budgets has no effect here: a head plan has budgets of its own");
        } else if self.named().all(|named| named.method == FULL) {
            for flag in ["budgets", "reads"].into_iter().filter(|flag| given(flag)) {
                log.warn(&format!(
                    "--{flag} has no effect here: full attention reads everything"
                ));
            }
        }
        if has_plan && self.named().next().is_none() && !self.also_kv.is_empty() {
            log.warn("--also-kv has no effect here: a head plan has formats of its own");
        }
        if self.needles.is_none() {
            for flag in ["decode-prompt", "question", "lengths"]
                .into_iter()
                .filter(|flag| given(flag))
            {
                log.warn(&format!("--{flag} has no effect without --needles"));
            }
        } else if !self.makes_questions() && given("lengths") {
            log.warn("--lengths has no effect without --needles auto");
        }
        self.text.warn_of_field(log);
    }
}

/// Parses a number of bytes that memory moves at once.
fn parse_granule(text: &str) -> std::result::Result<usize, String> {
    let granule = parse_positive_count(text)?;
    if granule.is_power_of_two() && granule <= MOST_GRANULE {
        Ok(granule)
    } else {
        Err(format!("not a power of two up to {MOST_GRANULE}"))
    }
}

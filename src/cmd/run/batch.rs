//! `run --batch`: the replies to the prompts of a file, several at a time, which a stopped run continues.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::args::Args;
use super::ready::Ready;
use super::stop::Stop;
use super::written::Written;
use crate::cmd::args::Global;
use crate::cmd::reading::Reading;
use crate::cmd::{output, print_json};
use crate::disk::{Growing, Output};
use crate::env;
use crate::error::{Error, Kind, Result};
use crate::kv::sample::Sampler;
use crate::model::Decoder;
use crate::model::chat::{ChatTemplate, Message};
use crate::model::tokenizer::Tokenizer;
use crate::runner::{Counts, Engine, SequenceId};
use crate::store::hex;
use crate::wording::{counted, duration};

/// Lines that cannot be answered that are named one by one.
const NAMED: usize = 5;

/// A line of the input.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Line {
    id: Option<Value>,
    prompt: Option<String>,
    messages: Option<Vec<Turn>>,
    max_new: Option<usize>,
}

/// A message of a conversation.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Turn {
    role: String,
    content: String,
}

/// A prompt to answer.
struct Prompt {
    id: Value,
    ids: Vec<u32>,
    max_new: usize,
}

impl Prompt {
    /// Returns how many positions prompt and reply may have.
    fn positions(&self) -> usize {
        self.ids.len().saturating_add(self.max_new)
    }

    /// Returns the digest by which a later run knows the prompt again.
    fn digest(&self) -> String {
        let mut hash = Sha256::new();
        self.ids.iter().for_each(|id| hash.update(id.to_le_bytes()));
        hash.update(self.max_new.to_le_bytes());
        hex(&hash.finalize())[..16].to_owned()
    }
}

/// A line of the output.
#[derive(Serialize, Deserialize)]
struct Replied {
    id: Value,
    text: String,
    ids: Vec<u32>,
    prompt_tokens: usize,
    stop_reason: String,
    /// From the beginning of the prompt to the end of the reply.
    seconds: f64,
    /// `null` before the first decode step.
    bytes_read_fraction: Option<f64>,
    /// The first digits of the digest of the prompt's tokens and the most tokens of the reply.
    prompt: String,
}

/// The prompts of a file.
pub(super) struct Prompts {
    all: VecDeque<Prompt>,
    /// Lines that cannot be answered, with the reason.
    skipped: Vec<String>,
}

impl Prompts {
    /// Reads a file. A line that cannot be answered is skipped.
    ///
    /// # Errors
    /// The file cannot be read, no line can be answered, an interrupt.
    pub fn read(path: &Path, args: &Args, decoder: &Decoder) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(|e| Error::io(path, "read", &e))?;
        let tokenizer = Tokenizer::open(&args.model, &decoder.config)?;
        let mut reader = Reader {
            args,
            decoder,
            tokenizer: &tokenizer,
            template: None,
            seen: BTreeSet::new(),
        };
        let mut out = Self {
            all: VecDeque::new(),
            skipped: Vec::new(),
        };
        for (i, line) in text
            .lines()
            .enumerate()
            .filter(|(_, line)| !line.trim().is_empty())
        {
            env::check()?;
            match reader.prompt(i + 1, line) {
                Ok(prompt) => out.all.push_back(prompt),
                Err(e) if e.kind() == Kind::Interrupted => return Err(e),
                Err(e) => out.skipped.push(format!("line {}: {e}", i + 1)),
            }
        }
        if out.all.is_empty() {
            let why = out
                .skipped
                .first()
                .map_or(String::new(), |why| format!(": {why}"));
            return Err(Error::failed(format!(
                "{} has no line that can be answered{why}",
                path.display()
            ))
            .hint(r#"give lines such as {"id": "a", "prompt": "...", "max_new": 64}"#));
        }
        Ok(out)
    }

    /// Returns how many positions the longest context will have.
    pub fn longest(&self) -> usize {
        let all = self.all.iter();
        all.map(Prompt::positions).max().unwrap_or(0)
    }

    /// Names the first lines that are skipped, and counts them.
    pub fn warn(&self, global: &Global) {
        let (first, others) = self.skipped.split_at(self.skipped.len().min(NAMED));
        first
            .iter()
            .for_each(|line| global.log().warn(&format!("skipped {line}")));
        if !others.is_empty() {
            let n = counted(others.len(), "more line");
            global
                .log()
                .warn(&format!("skipped {n}, which cannot be answered either"));
        }
    }
}

/// Reads lines of the input.
struct Reader<'a> {
    args: &'a Args,
    decoder: &'a Decoder,
    tokenizer: &'a Tokenizer,
    /// The model's chat template, once a line needs it.
    template: Option<ChatTemplate>,
    /// The ids so far, as JSON.
    seen: BTreeSet<String>,
}

impl Reader<'_> {
    fn prompt(&mut self, number: usize, line: &str) -> Result<Prompt> {
        let line: Line = serde_json::from_str(line).map_err(|e| Error::failed(e.to_string()))?;
        let id = line.id.unwrap_or_else(|| number.into());
        if !id.is_string() && !id.is_number() {
            return Err(Error::failed("`id` is neither a string nor a number"));
        }
        let ids = match (line.prompt, line.messages) {
            (Some(text), None) => self.tokenizer.encode(&text)?,
            (None, Some(messages)) => {
                let message = |of: Turn| Message {
                    role: of.role.into(),
                    content: of.content,
                };
                let messages: Vec<Message> = messages.into_iter().map(message).collect();
                let text = self.template()?.render(&messages, true)?;
                self.tokenizer.encode_raw(&text)?
            }
            _ => return Err(Error::failed("give either `prompt` or `messages`")),
        };
        if ids.is_empty() {
            return Err(Error::failed("the prompt has no tokens"));
        }
        self.decoder.check_ids(&ids)?;
        let context = self.decoder.config.max_position_embeddings;
        if ids.len() > context && !self.args.beyond_context {
            let n = ids.len();
            return Err(Error::failed(format!(
                "the prompt has {n} tokens, more than the model's context of {context} tokens"
            )));
        }
        if !self.seen.insert(id.to_string()) {
            return Err(Error::failed(format!("another line has the id {id}")));
        }
        Ok(Prompt {
            id,
            ids,
            max_new: line.max_new.unwrap_or(self.args.max_new),
        })
    }

    fn template(&mut self) -> Result<&ChatTemplate> {
        if self.template.is_none() {
            self.template = ChatTemplate::open(&self.args.model)?;
        }
        let none = || Error::failed("`messages` need a chat template, and the model has none");
        self.template.as_ref().ok_or_else(none)
    }
}

/// The output: the replies so far, and those to come.
struct Replies {
    file: Growing,
    /// The digests of the prompts that have a reply, by id.
    done: BTreeMap<String, String>,
}

impl Replies {
    /// Opens the output, which may have replies of an earlier run with the same settings.
    fn open(path: &Path, inputs: &[&Path], settings: &Value, global: &Global) -> Result<Self> {
        let beside = settings_of(path);
        output::check_inputs(path, inputs)?;
        output::check_inputs(&beside, inputs)?;
        let shown = path.display();
        let is_empty = path.metadata().map_or(true, |found| found.len() == 0);
        let earlier = std::fs::read(&beside).ok();
        let earlier: Option<Value> = earlier.and_then(|bytes| serde_json::from_slice(&bytes).ok());
        match &earlier {
            _ if is_empty => {}
            None => {
                return Err(Error::usage(format!(
                    "{shown} already exists, and {} does not say that `run --batch` wrote it",
                    beside.display()
                ))
                .hint("choose another name, or remove the file yourself"));
            }
            Some(_) if global.overwrite => {
                crate::disk::remove_file(path).map_err(|e| Error::io(path, "remove", &e))?
            }
            Some(earlier) if earlier != settings => {
                let name = differing(earlier, settings);
                return Err(Error::usage(format!(
                    "{shown} has replies that were made with another `{name}`"
                ))
                .hint("choose another name to keep them, or add --overwrite to replace them"));
            }
            Some(_) => {}
        }
        let mut done = BTreeMap::new();
        let mut n = 0;
        let file = Growing::open(path, &mut |line| {
            n += 1;
            let reply: Replied = serde_json::from_str(line).map_err(|e| {
                Error::failed(format!("{shown}, line {n}: {e}"))
                    .hint("the file was changed; choose another name, or add --overwrite to replace it")
            })?;
            done.insert(reply.id.to_string(), reply.prompt);
            Ok(())
        })?;
        if earlier.as_ref() != Some(settings) {
            let text = serde_json::to_string_pretty(settings).map_err(|e| Error::failed(e.to_string()))?;
            Output::create(&beside)?.finish((text + "\n").as_bytes())?;
        }
        Ok(Self { file, done })
    }

    /// Leaves out the prompts that have a reply; returns their number.
    ///
    /// # Errors
    /// A reply is to another prompt of this id.
    fn leave_out(&self, prompts: &mut VecDeque<Prompt>) -> Result<usize> {
        for prompt in prompts.iter() {
            let earlier = self.done.get(&prompt.id.to_string());
            if earlier.is_some_and(|digest| *digest != prompt.digest()) {
                return Err(Error::failed(format!(
                    "the output has a reply to another prompt with the id {}",
                    prompt.id
                ))
                .hint("give the changed prompt another id, choose another output, or add --overwrite"));
            }
        }
        let before = prompts.len();
        prompts.retain(|prompt| !self.done.contains_key(&prompt.id.to_string()));
        Ok(before - prompts.len())
    }
}

/// Returns the file beside the output that says with which settings it is made.
fn settings_of(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".settings.json");
    name.into()
}

/// Names the first setting that differs.
fn differing(a: &Value, b: &Value) -> String {
    let empty = serde_json::Map::new();
    let [a, b] = [a, b].map(|of| of.as_object().unwrap_or(&empty));
    let mut names = a.keys().chain(b.keys());
    names
        .find(|name| a.get(*name) != b.get(*name))
        .cloned()
        .unwrap_or_default()
}

/// A reply under way.
struct Running<'a> {
    prompt: Prompt,
    sequence: SequenceId,
    written: Written<'a>,
    sampler: Sampler,
    next: u32,
    start: Instant,
}

/// A batch, and what it is run with.
pub(super) struct Batch<'a>(pub &'a Ready<'a>);

impl Batch<'_> {
    /// Answers the prompts.
    ///
    /// # Errors
    /// The output cannot be written, activations that are not finite, an interrupt: the output has the replies so far.
    pub fn run(&self, mut prompts: Prompts) -> Result<()> {
        let Ready {
            args,
            global,
            decoder,
            ..
        } = *self.0;
        let log = global.log();
        let path = args.output.as_deref().unwrap_or(Path::new(""));
        let inputs = args.inputs();
        let mut replies = Replies::open(path, &inputs, &self.settings()?, global)?;
        let resumed = replies.leave_out(&mut prompts.all)?;
        if resumed > 0 {
            log.note(&format!(
                "{} already answered in {}",
                counted(resumed, "prompt"),
                path.display()
            ));
        }
        self.warn_of_lengths(&prompts);
        let tokenizer = Tokenizer::open(&args.model, &decoder.config)?;
        let forward = global
            .machine(self.0.device, &log)
            .forward(decoder, prompts.longest())?;
        if self.0.device.cuda().is_some() {
            log.note("the KV caches and the selection are on the CPU");
        }
        let mut engine = Engine::new(forward, self.0.method, self.0.options);
        let start = Instant::now();
        let made = self.answer(prompts.all, &tokenizer, &mut engine, &mut replies)?;
        let seconds = start.elapsed().as_secs_f64();
        let skipped = prompts.skipped.len();
        let mut note = format!(
            "{} of {} in {} to {}",
            if made.replies == 1 {
                "1 reply".to_owned()
            } else {
                format!("{} replies", made.replies)
            },
            counted(made.tokens, "token"),
            duration(seconds),
            path.display(),
        );
        if skipped > 0 {
            note += &format!("; {} skipped", counted(skipped, "line"));
        }
        log.note(&note);
        if !global.json {
            return Ok(());
        }
        let batch = json!({
            "method": self.0.choice.name(), "budget": self.0.choice.budget.value(), "kv": self.0.options.kv.as_str(),
            "sequences": args.sequences, "replies": made.replies, "already_answered": resumed, "skipped": skipped,
            "prompt_tokens": made.prompt_tokens, "tokens": made.tokens, "seconds": seconds,
            "bytes_read_fraction": self.fraction(&made.counts),
        });
        let document = json!({
            "output": path.display().to_string(), "device": self.0.device.name(), "batch": batch,
        });
        print_json(global, &document)
    }

    /// Answers prompts, some of them at a time.
    fn answer(
        &self,
        mut prompts: VecDeque<Prompt>,
        tokenizer: &Tokenizer,
        engine: &mut Engine,
        replies: &mut Replies,
    ) -> Result<Made> {
        let (log, mut made) = (self.0.global.log(), Made::default());
        let progress = log.progress(prompts.len() as u64, "replies");
        let mut running: Vec<Running> = Vec::new();
        loop {
            while running.len() < self.0.args.sequences
                && let Some(prompt) = prompts.pop_front()
            {
                // It waits for memory that other replies hold.
                if !running.is_empty() && engine.check_room(prompt.positions()).is_err() {
                    prompts.push_front(prompt);
                    break;
                }
                let begun = self.begin(prompt, engine, tokenizer)?;
                running.extend(self.push(begun, engine, replies, &mut made)?);
                progress.advance(made.take_ended());
            }
            if running.is_empty() {
                return Ok(made);
            }
            let fed: Vec<(SequenceId, u32)> = running.iter().map(|of| (of.sequence, of.next)).collect();
            let logits = engine.step(&fed)?;
            for (mut of, logits) in std::mem::take(&mut running).into_iter().zip(logits) {
                of.next = of.sampler.next(logits.view())?;
                running.extend(self.push(of, engine, replies, &mut made)?);
            }
            progress.advance(made.take_ended());
        }
    }

    /// Returns what the replies depend on.
    fn settings(&self) -> Result<Value> {
        let Ready {
            args,
            decoder,
            options,
            choice,
            ..
        } = *self.0;
        let artifact = self.0.artifact.map(|artifact| {
            let text = serde_json::to_vec(&artifact.manifest);
            text.map(|text| hex(&Sha256::digest(text)))
        });
        let artifact = artifact.transpose().map_err(|e| Error::failed(e.to_string()))?;
        let sampling = args.sampling();
        Ok(json!({
            "version": env!("CARGO_PKG_VERSION"),
            "model": decoder.checkpoint.fingerprint(&decoder.config)?,
            "weights": args.reading.weights_name(),
            "artifact": artifact,
            "method": choice.name(),
            "parameters": args.reading.params(),
            "budget": choice.budget.value(),
            "kv": options.kv.as_str(),
            "sinks": options.sinks,
            "window": options.window,
            "seed": self.0.global.seed,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "stop": args.stop,
            "ignore_eos": args.ignore_eos,
            "beyond_context": args.beyond_context,
        }))
    }

    /// Returns the bytes that steps read over those of all visible keys and values.
    fn fraction(&self, counts: &Counts) -> Option<f64> {
        counts.bytes_fraction(self.0.options.kv, self.0.decoder.config.head_dim)
    }

    /// Warns once of replies beyond what the artifact was calibrated or measured on.
    fn warn_of_lengths(&self, prompts: &Prompts) {
        let Ready {
            args,
            global,
            decoder,
            artifact,
            choice,
            ..
        } = *self.0;
        let context = decoder.config.max_position_embeddings;
        let longest = match args.beyond_context {
            true => prompts.longest(),
            false => prompts.longest().min(context),
        };
        if let Some(artifact) = artifact {
            Reading::warn_beyond_calibration(&[choice.method], artifact, longest, context, global.log());
        }
        if let Some(most) = choice.measured.filter(|most| longest > *most) {
            global.log().warn(&format!(
                "prompts and replies reach {longest} positions, but the recommended setting was measured only up to {most}; its loss beyond that is unknown"
            ));
        }
    }

    /// Runs a prompt.
    fn begin<'t>(
        &'t self,
        prompt: Prompt,
        engine: &mut Engine,
        tokenizer: &'t Tokenizer,
    ) -> Result<Running<'t>> {
        let (args, start) = (self.0.args, Instant::now());
        let sequence = engine.open(prompt.positions())?;
        let logits = engine.prefill(sequence, &prompt.ids)?;
        let mut sampler = Sampler::new(args.sampling(), self.0.global.seed);
        sampler.observe(&prompt.ids);
        Ok(Running {
            next: sampler.next(logits.view())?,
            written: Written::new(args, Some(tokenizer)),
            prompt,
            sequence,
            sampler,
            start,
        })
    }

    /// Takes the next token of a reply, and returns the reply if it goes on. One that ends is written, and its sequence
    /// closed.
    fn push<'t>(
        &self,
        mut of: Running<'t>,
        engine: &mut Engine,
        replies: &mut Replies,
        made: &mut Made,
    ) -> Result<Option<Running<'t>>> {
        let Ready { args, decoder, .. } = *self.0;
        let stop = match of.prompt.max_new {
            0 => Some(Stop::Length),
            most => {
                of.sampler.observe(&[of.next]);
                let positions = engine.positions(of.sequence)?;
                of.written
                    .push(of.next, args, &decoder.config, positions, most)?
                    .1
            }
        };
        let stop = match stop {
            None => return Ok(Some(of)),
            // A reply that was cut short is made anew by the run that continues.
            Some(Stop::Interrupted) => return Err(Error::interrupted()),
            Some(stop) => stop,
        };
        let counts: Counts = engine.counts(of.sequence)?.iter().copied().sum();
        engine.close(of.sequence)?;
        let (_, ids, text) = of.written.finish()?;
        let reply = Replied {
            prompt: of.prompt.digest(),
            prompt_tokens: of.prompt.ids.len(),
            stop_reason: json!(stop).as_str().unwrap_or_default().to_owned(),
            seconds: of.start.elapsed().as_secs_f64(),
            bytes_read_fraction: self.fraction(&counts),
            id: of.prompt.id,
            text,
            ids,
        };
        made.add(&reply, counts);
        let line = serde_json::to_string(&reply).map_err(|e| Error::failed(e.to_string()))?;
        replies.file.add(&line)?;
        Ok(None)
    }
}

/// What a batch has made.
#[derive(Default)]
struct Made {
    replies: usize,
    prompt_tokens: usize,
    tokens: usize,
    counts: Counts,
    /// Replies since progress was told.
    ended: u64,
}

impl Made {
    fn add(&mut self, reply: &Replied, counts: Counts) {
        self.replies += 1;
        self.ended += 1;
        self.prompt_tokens += reply.prompt_tokens;
        self.tokens += reply.ids.len();
        self.counts += counts;
    }

    fn take_ended(&mut self) -> u64 {
        std::mem::take(&mut self.ended)
    }
}

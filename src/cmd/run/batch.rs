//! `run --batch`: the replies to the prompts of a file, several at a time, which a stopped run continues.

mod prompts;
mod replies;

use std::path::Path;
use std::time::Instant;

use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::ready::{Opened, Ready};
use super::stop::Stop;
use super::written::Written;
use crate::cmd::print_json;
use crate::cmd::reading::Reading;
use crate::error::{Error, ErrorKind, Result};
use crate::kv::sample::Sampler;
use crate::machine::{Extent, RowsIn};
use crate::model::tokenizer::Tokenizer;
use crate::runner::{Counts, Engine, SequenceId};
use crate::store::hex;
use crate::wording::{counted, duration};
use prompts::Prompt;
pub(super) use prompts::Prompts;
use replies::{MARK, Replies, Reply};

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
    /// The output cannot be written, no prompt can be answered, an interrupt: the output has the replies so far.
    pub fn run(&self, mut prompts: Prompts) -> Result<()> {
        let Opened {
            args,
            global,
            decoder,
            ..
        } = *self.0.opened;
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
        let bad_lines = prompts.skipped.len();
        let (start, mut made) = (Instant::now(), Made::default());
        if !prompts.all.is_empty() {
            let machine = args.reading.machine(global, self.0.opened.device, &log);
            let (method, options) = (self.0.method, self.0.options.clone());
            let extent = Extent {
                capacity: prompts.longest(),
                prompt: 0..prompts.longest_prompt(),
                later_prompts: false,
            };
            let mut engine = machine.engine(decoder, method, options, &extent)?;
            self.answer(prompts, &mut engine, &mut replies, &mut made)?;
        }
        let seconds = start.elapsed().as_secs_f64();
        let skipped = bad_lines + made.failed;
        if let Some(e) = made.failure.take_if(|_| made.replies == 0) {
            return Err(e);
        }
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
            "method": self.0.setting.name(), "budget": self.0.setting.budget_json(), "kv": self.0.setting.kv_json(self.0.options.kv),
            "sequences": args.sequences, "replies": made.replies, "already_answered": resumed, "skipped": skipped,
            "prompt_tokens": made.prompt_tokens, "tokens": made.tokens, "seconds": seconds,
            "bytes_read_fraction": self.fraction(&made.counts),
        });
        let document = json!({
            "output": path.display().to_string(), "device": self.0.opened.device.name(), "batch": batch,
        });
        print_json(global, &document)
    }

    /// Answers prompts, some of them at a time. One that fails by itself is skipped.
    fn answer(
        &self,
        prompts: Prompts,
        engine: &mut Engine,
        replies: &mut Replies,
        made: &mut Made,
    ) -> Result<()> {
        let log = self.0.opened.global.log();
        let Prompts {
            all: mut prompts,
            tokenizer,
            most,
            ..
        } = prompts;
        let progress = log.progress(prompts.len() as u64, "replies");
        let mut running: Vec<Running> = Vec::new();
        loop {
            while running.len() < self.0.opened.args.sequences
                && let Some(prompt) = prompts.pop_front()
            {
                let (id, opened) = (
                    prompt.id.clone(),
                    engine.open(prompt.reserved(most, engine.grows())),
                );
                if opened.is_err() && !running.is_empty() {
                    // It waits for the memory that other replies hold.
                    prompts.push_front(prompt);
                    break;
                }
                let begun = opened.and_then(|sequence| self.begin(prompt, sequence, engine, &tokenizer));
                match begun {
                    Ok(begun) => running.extend(self.push(begun, engine, replies, made)?),
                    Err(e) if e.kind() == ErrorKind::Interrupted => return Err(e),
                    Err(e) => {
                        log.warn(&format!("skipped the prompt with the id {id}: {e}"));
                        made.fail(e);
                    }
                }
                progress.advance(made.take_ended());
            }
            if running.is_empty() {
                return Ok(());
            }
            let fed: Vec<(SequenceId, u32)> = running.iter().map(|of| (of.sequence, of.next)).collect();
            let logits = engine.step(&fed)?;
            for (mut of, logits) in std::mem::take(&mut running).into_iter().zip(logits) {
                of.next = of.sampler.next(logits.view())?;
                running.extend(self.push(of, engine, replies, made)?);
            }
            progress.advance(made.take_ended());
        }
    }

    /// Returns what the replies depend on.
    fn settings(&self) -> Result<Value> {
        let (Opened { args, decoder, .. }, options, setting) =
            (*self.0.opened, &self.0.options, self.0.setting);
        let artifact = self.0.opened.artifact.map(|artifact| {
            let text = serde_json::to_vec(&artifact.manifest);
            text.map(|text| hex(&Sha256::digest(text)))
        });
        let artifact = artifact.transpose().map_err(|e| Error::invalid(e.to_string()))?;
        let sampling = args.sampling();
        // Of a model on a GPU, sums depend on where the caches are.
        let rows = args.reading.rows();
        let caches = self.0.opened.device.cuda().map(|_| match rows {
            _ if !rows.can(self.0.method, options, false) => "cpu",
            RowsIn::Device => "device",
            RowsIn::Host => "host",
        });
        let mut settings = json!({
            MARK[0]: MARK[1],
            "version": env!("CARGO_PKG_VERSION"),
            "device": self.0.opened.device.name(),
            "precision": self.0.opened.global.precision,
            "model": decoder.checkpoint.fingerprint(&decoder.config)?,
            "weights": args.reading.weights_name(),
            "artifact": artifact,
            "method": setting.name(),
            "parameters": args.reading.params(),
            "budget": setting.budget_json(),
            "kv": setting.kv_json(options.kv),
            "sinks": options.limits.sinks,
            "window": options.limits.window,
            "seed": self.0.opened.global.seed,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "stop": args.stop,
            "ignore_eos": args.ignore_eos,
            "beyond_context": args.beyond_context,
        });
        if let Some(plan) = setting.plan {
            settings["head_plan"] = plan.json();
        }
        if let Some(caches) = caches {
            settings["caches"] = json!(caches);
        }
        Ok(settings)
    }

    /// Returns the bytes that steps read over those of all visible keys and values.
    fn fraction(&self, counts: &Counts) -> Option<f64> {
        counts.bytes_fraction()
    }

    /// Warns once of replies beyond what the artifact was calibrated or measured on.
    fn warn_of_lengths(&self, prompts: &Prompts) {
        let (
            Opened {
                global,
                decoder,
                artifact,
                ..
            },
            setting,
        ) = (*self.0.opened, self.0.setting);
        let (context, longest) = (decoder.config.max_position_embeddings, prompts.longest());
        if let Some(artifact) = artifact {
            Reading::warn_beyond_calibration(&setting.methods(), artifact, longest, context, global.log());
        }
        if let Some(most) = setting.measured.filter(|most| longest > *most) {
            global.log().warn(&format!(
                "prompts and replies reach {longest} positions, but the recommended setting was measured only up to {most}; its loss beyond that is unknown"
            ));
        }
    }

    /// Runs a prompt.
    fn begin<'t>(
        &'t self,
        prompt: Prompt,
        sequence: SequenceId,
        engine: &mut Engine,
        tokenizer: &'t Tokenizer,
    ) -> Result<Running<'t>> {
        let (args, start) = (self.0.opened.args, Instant::now());
        let logits = engine.prefill(sequence, &prompt.ids)?;
        let mut sampler = Sampler::new(args.sampling(), self.0.opened.global.seed);
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
        let Opened { args, decoder, .. } = *self.0.opened;
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
        let counts: Counts = engine.counts(of.sequence)?.into_iter().sum();
        engine.close(of.sequence)?;
        let (_, ids, text) = of.written.finish()?;
        let reply = Reply {
            prompt_digest: of.prompt.digest(),
            prompt_tokens: of.prompt.ids.len(),
            stop_reason: json!(stop).as_str().unwrap_or_default().to_owned(),
            seconds: of.start.elapsed().as_secs_f64(),
            bytes_read_fraction: self.fraction(&counts),
            id: of.prompt.id,
            text,
            ids,
        };
        made.add(&reply, counts);
        replies.add(&reply)?;
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
    /// Prompts that could not be answered, and why the first could not.
    failed: usize,
    failure: Option<Error>,
    /// Prompts since progress was told.
    ended: u64,
}

impl Made {
    fn add(&mut self, reply: &Reply, counts: Counts) {
        self.replies += 1;
        self.ended += 1;
        self.prompt_tokens += reply.prompt_tokens;
        self.tokens += reply.ids.len();
        self.counts += counts;
    }

    fn fail(&mut self, e: Error) {
        self.failed += 1;
        self.ended += 1;
        self.failure.get_or_insert(e);
    }

    fn take_ended(&mut self) -> u64 {
        std::mem::take(&mut self.ended)
    }
}

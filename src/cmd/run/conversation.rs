//! The turns of a run: each feeds a prompt and decodes a reply.

use std::time::Instant;

use super::args::Args;
use super::setting::RunSetting;
use super::stop::Stop;
use super::turns::{Turn, Turns};
use super::written::Written;
use crate::artifact::Artifact;
use crate::cmd::args::Global;
use crate::cmd::print;
use crate::cmd::reading::Reading;
use crate::cmd::signals;
use crate::error::{Error, ErrorKind, Result};
use crate::kv::KvType;
use crate::kv::sample::Sampler;
use crate::method::registry::FULL;
use crate::runner::Session;
use crate::wording::{counted, size};

/// Why a conversation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    /// There are no more turns.
    Input,
    /// The user begins a new conversation.
    Reset,
}

/// The model's reply in one turn.
#[derive(serde::Serialize)]
pub(super) struct Reply {
    pub ids: Vec<u32>,
    pub text: String,
    /// Tokens of the turn's prompt.
    pub prompt_tokens: usize,
    pub prefill_s: f64,
    pub decode_s: f64,
    #[serde(rename = "stop_reason")]
    pub stop: Stop,
}

impl Reply {
    /// Tells whether a stop token ended the reply.
    pub fn ended(&self) -> bool {
        self.stop == Stop::Token
    }

    /// Returns the tokens without the stop token that ended the reply.
    pub fn without_stop_token(&self) -> &[u32] {
        &self.ids[..self.ids.len() - usize::from(self.ended())]
    }
}

/// Counts tokens in words: `1 token`, `12 tokens`.
pub(super) fn tokens(n: usize) -> String {
    counted(n, "token")
}

/// Prompts and replies in turns on one cache; a run without --chat has one turn.
pub(super) struct Conversation<'a, 'd> {
    pub args: &'a Args,
    pub global: &'a Global,
    /// Type of the cache.
    pub kv: KvType,
    /// Returns the bytes of the keys and values of some positions.
    pub row_bytes: Box<dyn Fn(usize) -> usize + 'a>,
    /// What could not run as requested, and what ran instead.
    pub fallbacks: Vec<String>,
    pub setting: RunSetting<'a>,
    /// The artifact, until a warning was given that the conversation is longer than its calibration.
    pub artifact: Option<&'a Artifact>,
    /// Layer and KV head of the heads that the method does not serve.
    pub full_heads: &'a [(usize, usize)],
    pub session: Session<'a>,
    pub turns: &'a mut Turns<'d>,
    pub sampler: Sampler,
    /// The replies of the turns so far, one per turn.
    pub replies: Vec<Reply>,
    /// What each decode step took, in seconds.
    pub steps_s: Vec<f64>,
    /// What a step with full attention takes at the end, if that was measured.
    pub full_step_s: Option<f64>,
}

/// Decode steps of a reply of which the time is compared with that of full attention, at the least and at the most.
const COMPARED_STEPS: [usize; 2] = [8, 64];

/// Steps with full attention that are timed; the fastest counts.
const FULL_STEPS: usize = 2;

impl Conversation<'_, '_> {
    /// Runs turn after turn until there are no more, or a new conversation begins.
    ///
    /// # Errors
    /// A turn that cannot be run: `replies` then holds the replies of the turns before it. An interrupt: the last reply
    /// may then be incomplete.
    pub fn run(&mut self) -> Result<End> {
        loop {
            let ids = match self.turns.next(self.replies.last())? {
                Turn::Feed(ids) => ids,
                Turn::Stats => {
                    self.note()?;
                    continue;
                }
                Turn::Reset => return Ok(End::Reset),
                Turn::End => return Ok(End::Input),
            };
            let replying = self.turns.are_typed().then(signals::Reply::begin);
            let reply = self.turn(ids);
            let is_ended = replying.as_ref().is_some_and(signals::Reply::is_ended);
            drop(replying);
            let reply = match reply {
                Err(e) if is_ended && e.kind() == ErrorKind::Interrupted => {
                    self.global.log().note(
                        "interrupted while your message was being read: the conversation so far is lost",
                    );
                    self.turns.reset();
                    return Ok(End::Reset);
                }
                reply => reply?,
            };
            let stop = reply.stop;
            self.replies.push(reply);
            if stop == Stop::Interrupted && !is_ended {
                return Err(Error::interrupted());
            }
        }
    }

    /// Returns what a decode step took at the end: the median of the last ones. `None` after few steps.
    pub fn step_s(&self) -> Option<f64> {
        let [least, most] = COMPARED_STEPS;
        let mut last = self.steps_s[self.steps_s.len().saturating_sub(most)..].to_vec();
        last.sort_by(f64::total_cmp);
        (last.len() >= least).then(|| last[last.len() / 2])
    }

    /// Measures what a step with full attention takes, if that is shown: it tells what the method gains. The session stays
    /// as it is.
    ///
    /// # Errors
    /// As [`Session::step`].
    pub fn time_in_full(&mut self) -> Result<()> {
        let Some(id) = self.replies.last().and_then(|reply| reply.ids.last().copied()) else {
            return Ok(());
        };
        let is_shown = self.global.json || !self.global.quiet;
        if self.setting.methods() == [FULL] || self.args.chat || !is_shown || self.step_s().is_none() {
            return Ok(());
        }
        for _ in 0..FULL_STEPS {
            let start = Instant::now();
            if self.session.peek_in_full(id)?.is_none() {
                break;
            }
            let took = start.elapsed().as_secs_f64();
            self.full_step_s = Some(self.full_step_s.map_or(took, |least| least.min(took)));
        }
        Ok(())
    }

    /// Feeds a turn and lets the model reply.
    fn turn(&mut self, mut ids: Vec<u32>) -> Result<Reply> {
        let log = self.global.log();
        let last = self.replies.last();
        let mut prompt_tokens = ids.len();
        // The last token of a reply is fed with the next prompt, unless it is a stop token and the prompt already
        // begins with it.
        if let Some(reply) = last
            && let Some(id) = reply.ids.last()
        {
            if reply.ended() && ids.first() == Some(id) {
                prompt_tokens -= 1;
            } else {
                ids.insert(0, *id);
            }
        }
        let config = self.turns.config();
        let context = config.max_position_embeddings;
        let fed = self.session.positions() + ids.len();
        let longest = fed.saturating_add(self.args.max_new);
        let total = if self.args.beyond_context {
            longest
        } else {
            longest.min(context.max(fed))
        };
        if fed > context && !self.args.beyond_context {
            let what = if self.replies.is_empty() {
                format!("the prompt has {fed} tokens, more than the model's context of {context} tokens")
            } else {
                format!(
                    "the conversation has {fed} tokens, more than the model's context of {context} tokens"
                )
            };
            let hint = if self.replies.is_empty() {
                "shorten it, or add --beyond-context (answers may then be worthless)"
            } else {
                "use /reset before the context is full, or add --beyond-context (answers may then be worthless)"
            };
            return Err(Error::invalid(what).hint(hint));
        }
        let methods = self.setting.methods();
        self.artifact
            .take_if(|artifact| Reading::warn_beyond_calibration(&methods, artifact, total, context, log));
        if let Some(most) = self.setting.measured.take_if(|most| total > *most) {
            log.warn(&format!(
                "the tokens so far and --max-new add up to {total} positions, but the recommended setting was measured only up to {most}; its loss beyond that is unknown"
            ));
        }
        if total > context && self.args.beyond_context {
            log.warn(&format!(
                "the tokens so far and --max-new add up to {total} positions, more than the model's context of {context} tokens"
            ));
        }
        let chat = self.args.chat;
        if !chat {
            let bytes = (self.row_bytes)(ids.len());
            log.note(&format!(
                "prefill: {}, {} of KV cache",
                tokens(ids.len()),
                size(bytes)
            ));
        }
        let mut reply = self.generate(&ids)?;
        reply.prompt_tokens = prompt_tokens;
        if chat {
            let cut = match reply.stop {
                Stop::Token | Stop::Text => "",
                Stop::Length => ", cut at --max-new",
                Stop::Context => ", cut at the model's context",
                Stop::Interrupted => ", ended by Ctrl-C",
            };
            log.note(&format!(
                "turn {}: prompt of {} in {:.2} s, reply of {} in {:.2} s{cut}",
                self.replies.len() + 1,
                tokens(prompt_tokens),
                reply.prefill_s,
                tokens(reply.ids.len()),
                reply.decode_s
            ));
        }
        Ok(reply)
    }

    /// Runs the prompt and decodes until a stop token, the limit or an interrupt, showing the text.
    fn generate(&mut self, prompt: &[u32]) -> Result<Reply> {
        let show = |text: &str| match text {
            "" => Ok(()),
            _ if self.global.json => Ok(()),
            text => print(text),
        };
        let mut written = Written::new(self.args, self.turns.tokenizer.as_ref());
        let start = Instant::now();
        let log = self.global.log();
        let progress = log.prefill_progress(prompt.len(), self.turns.config().n_layers());
        progress.stage(format!("prefill, {}", tokens(prompt.len())));
        let mut done = |tokens: usize| progress.advance(tokens as u64);
        let logits = self.session.prefill_watched(prompt, &mut done)?;
        drop(progress);
        self.sampler.observe(prompt);
        let mut next = self.sampler.next(logits.view())?;
        let prefill_s = start.elapsed().as_secs_f64();
        if !self.args.chat {
            self.global.log().note(&format!(
                "prefill took {prefill_s:.2} s ({:.0} tokens/s)",
                prompt.len() as f64 / prefill_s
            ));
        }
        let start = Instant::now();
        let mut stop = Stop::Length;
        while written.ids.len() < self.args.max_new {
            self.sampler.observe(&[next]);
            let (config, positions) = (self.turns.config(), self.session.positions());
            let (text, end) = written.push(next, self.args, config, positions, self.args.max_new)?;
            show(&text)?;
            if let Some(end) = end {
                stop = end;
                break;
            }
            let step = Instant::now();
            next = self.session.next(next, &mut self.sampler)?;
            self.steps_s.push(step.elapsed().as_secs_f64());
        }
        let (rest, ids, text) = written.finish()?;
        show(&rest)?;
        show("\n")?;
        Ok(Reply {
            ids,
            text,
            prompt_tokens: prompt.len(),
            prefill_s,
            decode_s: start.elapsed().as_secs_f64(),
            stop,
        })
    }
}

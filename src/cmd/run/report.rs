//! The summary of a run.

use serde_json::{Value, json};

use super::conversation::{Conversation, Reply, tokens};
use crate::cmd::terminal::columns;
use crate::cmd::{merge, print_json};
use crate::error::Result;
use crate::method::plan::Plan;
use crate::method::registry::FULL;
use crate::runner::Counts;
use crate::wording::{size, wrapped};

/// A step with full attention that takes at least this many times as long says that the method gains time.
const GAIN: f64 = 1.05;

/// What a run's decode steps read, by layer.
struct Ran<'r, 'a, 'd> {
    conversation: &'r Conversation<'a, 'd>,
    layers: Vec<Counts>,
}

impl Ran<'_, '_, '_> {
    /// Lists the KV heads of a layer that full attention served: in the method's place, or as planned.
    fn full_heads(&self, layer: usize) -> Vec<usize> {
        let heads = self.conversation.full_heads.iter();
        let constant = heads.filter(|(of, _)| *of == layer).map(|(_, head)| *head);
        let planned = self
            .conversation
            .setting
            .differing()
            .into_iter()
            .flat_map(Plan::heads);
        let planned = planned.filter(|(of, _, head)| *of == layer && head.method.method == FULL);
        let mut all: Vec<usize> = constant.chain(planned.map(|(_, kv_head, _)| kv_head)).collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// Counts how often the method itself chose everything in a layer.
    fn bypasses(&self, layer: usize) -> u64 {
        let Counts { choices, full, .. } = self.layers[layer];
        let heads = self.conversation.turns.config().n_kv_heads as u64;
        full - self.full_heads(layer).len() as u64 * choices / heads
    }

    /// Adds up the layers.
    fn total(&self) -> Counts {
        self.layers.iter().copied().sum()
    }

    /// Returns the bytes of the rows and keys read.
    fn kv_bytes(&self) -> u64 {
        self.total().kv_bytes
    }

    /// Returns the bytes read, index included; `None` if the device does not report the bytes of the index.
    fn bytes(&self) -> Option<u64> {
        self.total().bytes()
    }

    /// Returns the bytes read over those of all visible keys and values.
    fn bytes_fraction(&self) -> Option<f64> {
        self.total().bytes_fraction()
    }

    /// Names the method that chose in a layer; `full` if every choice was of everything.
    fn name(&self, index: usize) -> String {
        let layer = self.layers[index];
        if layer.full == layer.choices {
            FULL.as_str().to_owned()
        } else {
            self.conversation.setting.methods_of(index)
        }
    }

    /// Says what was read, where the method did not choose, and what took its place, one fact per line.
    fn text(&self) -> Vec<String> {
        let total = self.total();
        let read = match self.bytes() {
            Some(bytes) => format!("{} including the index", size(bytes as usize)),
            None => format!("{} not counting the index", size(self.kv_bytes() as usize)),
        };
        let share = self.bytes_fraction().map_or(String::new(), |share| {
            format!(
                " ({:.1}% of the bytes of all visible keys and values)",
                100.0 * share
            )
        });
        let others =
            (0..self.layers.len()).filter(|i| self.name(*i) != self.conversation.setting.methods_of(*i));
        let others: Vec<String> = others.map(|i| i.to_string()).collect();
        let full: u64 = (0..self.layers.len()).map(|layer| self.bypasses(layer)).sum();
        let (rows, choices) = (total.rows, total.choices);
        let mut text = vec![
            format!("{rows} rows and {read} read{share}"),
            format!("{full} of {choices} choices read everything (a choice: of one step, layer and KV head)"),
        ];
        if !others.is_empty() {
            text.push(format!("full attention in layers {}", others.join(", ")));
        }
        text.extend(self.conversation.fallbacks.iter().cloned());
        text
    }

    /// Returns the members of the document of `--json`.
    fn json(&self) -> Value {
        let total = self.total();
        let blocks = &self.conversation.turns.config().blocks;
        let layer = |(i, layer): (usize, &Counts)| {
            json!({
                "method": self.name(i),
                "model_window": blocks[i].window,
                "rows_read": layer.rows,
                "bypasses": self.bypasses(i),
                "full_heads": self.full_heads(i),
            })
        };
        let layers: Vec<Value> = self.layers.iter().enumerate().map(layer).collect();
        json!({
            "choices": total.choices,
            "rows_read": total.rows,
            "keys_ranked": total.ranked_keys,
            "kv_bytes_read": self.kv_bytes(),
            "index_bytes_read": total.index_bytes,
            "bytes_read": self.bytes(),
            "bytes_read_fraction": self.bytes_fraction(),
            "granule": self.conversation.session.granule(),
            "bytes_moved_fraction": total.moved_fraction(),
            "uncompressed_read_fraction": total.uncompressed_fraction(),
            "uncompressed_moved_fraction": total.uncompressed_moved_fraction(),
            "scratch_bytes_fraction": total.scratch_fraction(),
            "bypasses": (0..self.layers.len()).map(|layer| self.bypasses(layer)).sum::<u64>(),
            "bypassed_heads": total.bypassed_heads,
            "fallbacks": self.conversation.fallbacks,
            "layers": layers,
        })
    }
}

/// How long the turns of a conversation took.
struct Times {
    prefill_s: f64,
    decode_s: f64,
    tokens: usize,
    tokens_per_s: f64,
}

impl Times {
    fn from_replies(replies: &[Reply]) -> Self {
        let decode_s: f64 = replies.iter().fold(0.0, |sum, r| sum + r.decode_s);
        // The first token of a reply comes from the prefill, and each further token from a decode step.
        let steps: usize = replies.iter().map(|r| r.ids.len().saturating_sub(1)).sum();
        Self {
            prefill_s: replies.iter().fold(0.0, |sum, r| sum + r.prefill_s),
            decode_s,
            tokens: replies.iter().map(|r| r.ids.len()).sum(),
            tokens_per_s: if steps > 0 { steps as f64 / decode_s } else { 0.0 },
        }
    }
}

impl<'a, 'd> Conversation<'a, 'd> {
    /// Counts what the conversation has read.
    fn ran(&self) -> Result<Ran<'_, 'a, 'd>> {
        Ok(Ran {
            conversation: self,
            layers: self.session.counts()?,
        })
    }

    /// Notes the times of all turns and how much they read, one fact per line.
    pub fn note(&self) -> Result<()> {
        let (session, times, log) = (
            &self.session,
            Times::from_replies(&self.replies),
            self.global.log(),
        );
        let method = self.setting.name();
        if self.replies.is_empty() {
            log.note(&format!("{method}: no reply yet"));
            return Ok(());
        }
        let mut facts = vec![
            format!("{method}: {}", tokens(times.tokens)),
            format!(
                "prefill {:.2} s, decode {:.2} s ({:.1} tokens/s)",
                times.prefill_s, times.decode_s, times.tokens_per_s
            ),
            format!(
                "index {}, KV cache {}",
                size(session.index_bytes()),
                size(session.kv_bytes())
            ),
            format!("{:.1}% of the KV rows read", 100.0 * session.shares()?.read),
        ];
        facts.extend(self.gain());
        facts.extend(self.ran()?.text());
        log.note(&wrapped(&facts.join("\n  "), columns()));
        Ok(())
    }

    /// Says what a step takes, and what it takes with full attention.
    fn gain(&self) -> Option<String> {
        let (own, full) = (self.step_s()?, self.full_step_s?);
        let verdict = match full / own {
            ratio if ratio >= GAIN => format!(": it is {ratio:.2} times as fast"),
            ratio if ratio > 1.0 / GAIN => ": about the same, so nothing is gained here".to_owned(),
            _ => ": it is slower here".to_owned(),
        };
        Some(format!(
            "at {} positions, a step takes {:.1} ms, with full attention {:.1} ms{verdict}",
            self.session.positions(),
            1e3 * own,
            1e3 * full
        ))
    }

    /// Describes the run for a comparison with others.
    pub fn compared(&self) -> Result<Value> {
        let times = Times::from_replies(&self.replies);
        let reply = self.replies.last();
        Ok(json!({
            "method": self.setting.name(),
            "budget": self.setting.budget_json(),
            "kv": self.kv,
            "ids": reply.map(|reply| &reply.ids),
            "text": reply.map(|reply| &reply.text),
            "stop_reason": reply.map(|reply| reply.stop),
            "prefill_s": times.prefill_s,
            "decode_s": times.decode_s,
            "tokens_per_s": times.tokens_per_s,
            "bytes_read_fraction": self.ran()?.bytes_fraction(),
        }))
    }

    /// Notes what [`Conversation::note`] does, and prints the document of `--json`.
    pub fn report(&self, device: &str) -> Result<()> {
        self.note()?;
        if !self.global.json {
            return Ok(());
        }
        let Self {
            session,
            replies,
            setting,
            ..
        } = self;
        let (shares, times) = (session.shares()?, Times::from_replies(replies));
        let ids: Vec<u32> = replies.iter().flat_map(|r| r.ids.iter().copied()).collect();
        let texts: Vec<&str> = replies.iter().map(|r| r.text.as_str()).collect();
        let mut result = json!({
            "ids": ids,
            "text": self.turns.tokenizer.as_ref().map_or(String::new(), |_| texts.join("\n")),
            "method": setting.method_name(),
            "tail": setting.tail,
            "budget": setting.budget_json(),
            "prompt_tokens": replies.iter().map(|r| r.prompt_tokens).sum::<usize>(),
            "stop_reason": replies.last().map(|reply| reply.stop),
            "prefill_s": times.prefill_s,
            "decode_s": times.decode_s,
            "tokens_per_s": times.tokens_per_s,
            "step_s": self.step_s(),
            "full_step_s": self.full_step_s,
            "kv_read_fraction": shares.read,
            "exact_dot_fraction": shares.products,
            "bypass_fraction": shares.bypassed,
            "index_bytes": session.index_bytes(),
            "kv_bytes": session.kv_bytes(),
            "device": device,
        });
        merge(&mut result, &self.ran()?.json());
        if let Some(plan) = setting.plan {
            result["head_plan"] = plan.json();
        }
        if self.args.chat {
            result["turns"] = json!(replies);
        }
        print_json(self.global, &result)
    }
}

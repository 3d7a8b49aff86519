//! The summary of a run.

use serde_json::json;

use super::Conversation;
use crate::cmd::print_json;
use crate::error::Result;
use crate::method::registry::MethodName;
use crate::progress::size;

impl Conversation<'_> {
    /// Notes the times of all turns and how much they read, and prints the document of `--json`.
    pub fn report(&self, name: MethodName, device: &str) -> Result<()> {
        let Self { session, replies, .. } = self;
        let shares = session.shares()?;
        let ids: Vec<u32> = replies.iter().flat_map(|r| r.ids.iter().copied()).collect();
        let prefill_s: f64 = replies.iter().fold(0.0, |sum, r| sum + r.prefill_s);
        let decode_s: f64 = replies.iter().fold(0.0, |sum, r| sum + r.decode_s);
        // The first token of a reply comes from the prefill, each other one from a decode step.
        let steps: usize = replies.iter().map(|r| r.ids.len().saturating_sub(1)).sum();
        let tokens_per_s = if steps > 0 { steps as f64 / decode_s } else { 0.0 };
        self.global.log().note(&format!(
            "{}: {} tokens, prefill {prefill_s:.2} s, decode {decode_s:.2} s ({tokens_per_s:.1} tokens/s), {:.1} % of the KV rows read, index {} beside {} of KV",
            name.as_str(),
            ids.len(),
            100.0 * shares.read,
            size(session.index_bytes()),
            size(session.kv_bytes()),
        ));
        if !self.global.json {
            return Ok(());
        }
        let texts: Vec<&str> = replies.iter().map(|r| r.text.as_str()).collect();
        let mut result = json!({
            "ids": ids,
            "text": self.turns.tokenizer.as_ref().map_or(String::new(), |_| texts.join("\n")),
            "method": name.as_str(),
            "budget": self.args.budget.value(),
            "prompt_tokens": replies.iter().map(|r| r.prompt_tokens).sum::<usize>(),
            "prefill_s": prefill_s,
            "decode_s": decode_s,
            "tokens_per_s": tokens_per_s,
            "kv_read_fraction": shares.read,
            "exact_dot_fraction": shares.products,
            "bypass_fraction": shares.bypassed,
            "index_bytes": session.index_bytes(),
            "kv_bytes": session.kv_bytes(),
            "device": device,
        });
        if self.args.chat {
            result["turns"] = json!(replies);
        }
        print_json(&result)
    }
}

//! `run --compare`: the same prompt with several methods, and where their texts part.

use serde_json::{Value, json};

use super::args::Args;
use super::ready::{Opened, Ready};
use super::setting::RunSetting;
use super::turns::{Turn, Turns};
use crate::artifact::{Artifact, Verdict};
use crate::cmd::named::Named;
use crate::cmd::{print, print_json};
use crate::error::{Error, Result};
use crate::kv::{Budget, KvType};

/// Tokens that are shown where two texts part.
const SHOWN: usize = 12;

/// The methods of `--compare`, with what they have in common.
pub(super) struct Comparison<'a>(pub &'a Opened<'a>);

/// What a method said.
struct Told {
    name: String,
    ids: Vec<u32>,
    json: Value,
}

impl RunSetting<'_> {
    /// Returns how `--compare` runs a method: with the budget of `--budget`, else with the recommended one if the artifact
    /// recommends this method, else with the usual one.
    fn compared(named: Named, args: &Args, artifact: Option<&Artifact>) -> Self {
        let verdict = artifact.and_then(|artifact| artifact.manifest.quality.methods.as_ref());
        let recommended = verdict.and_then(Verdict::usual);
        let own = recommended.filter(|(row, _)| row.method == named.to_string());
        let usual = own.map_or(Budget::USUAL, |(_, of)| Budget::Fraction(of.budget));
        Self {
            plan: None,
            method: named.method,
            tail: named.tail || args.reading.tail(),
            budget: args.budget.unwrap_or(usual),
            kv: verdict.and_then(|verdict| match own {
                Some(_) => KvType::named(&verdict.kv),
                None => Some(KvType::BF16),
            }),
            measured: None,
        }
    }
}

impl Comparison<'_> {
    /// Runs the prompt with each method, and compares the texts with that of the first.
    pub fn run(&self, mut turns: Turns) -> Result<()> {
        let Turn::Feed(ids) = turns.next(None)? else {
            return Err(Error::invalid("the prompt has no tokens").hint("give at least one token"));
        };
        let mut told: Vec<Told> = Vec::new();
        for named in &self.0.args.compare {
            turns.again(ids.clone());
            told.push(self.one(*named, &mut turns)?);
        }
        let Some((first, others)) = told.split_first() else {
            return Ok(());
        };
        let same = |other: &Told| {
            first
                .ids
                .iter()
                .zip(&other.ids)
                .take_while(|(a, b)| a == b)
                .count()
        };
        let mut text = String::new();
        for other in others {
            let n = same(other);
            let [a, b] = [&first.ids, &other.ids].map(|ids| &ids[n..ids.len().min(n + SHOWN)]);
            if a.is_empty() && b.is_empty() {
                text += &format!("{} says what {} says: {n} tokens\n", other.name, first.name);
                continue;
            }
            let shown = |ids: &[u32]| match &turns.tokenizer {
                Some(tokenizer) => tokenizer.decode(ids).map(|text| format!("{text:?}")),
                None => Ok(format!("{ids:?}")),
            };
            text += &format!(
                "{} parts from {} after {n} tokens:\n  {}: {}\n  {}: {}\n",
                other.name,
                first.name,
                first.name,
                shown(a)?,
                other.name,
                shown(b)?
            );
        }
        if !self.0.global.json {
            return print(&text);
        }
        let rows: Vec<Value> = told
            .iter()
            .map(|told| {
                let mut row = told.json.clone();
                row["same_tokens"] = json!(same(told));
                row
            })
            .collect();
        print_json(
            self.0.global,
            &json!({ "prompt_tokens": ids.len(), "compared": rows, "device": self.0.device.name() }),
        )
    }

    /// Runs the prompt with one method.
    fn one(&self, named: Named, turns: &mut Turns) -> Result<Told> {
        let opened = self.0;
        let setting = RunSetting::compared(named, opened.args, opened.artifact);
        let (method, options) = opened.prepare(setting)?;
        let ready = Ready {
            opened,
            method: method.as_ref(),
            options,
            setting,
        };
        let mut conversation = ready.conversation(turns)?;
        if !opened.global.json {
            print(&format!("[{}]\n", setting.name()))?;
        }
        conversation.run()?;
        conversation.note()?;
        let json = conversation.compared()?;
        Ok(Told {
            name: setting.name(),
            ids: conversation.replies.pop().map_or(Vec::new(), |reply| reply.ids),
            json,
        })
    }
}

//! The output of `--batch`: a line per reply, and the file beside it with the settings of the replies.

use std::collections::{BTreeMap, VecDeque};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::prompts::Prompt;
use crate::cmd::args::Global;
use crate::cmd::output;
use crate::disk::{Growing, Output};
use crate::error::{Error, Result};

/// The key of the settings by which kvsmith knows a file that it wrote, and its value.
pub const MARK: [&str; 2] = ["written_by", "kvsmith run --batch"];

/// A line of the output.
#[derive(Serialize, Deserialize)]
pub struct Reply {
    pub id: Value,
    pub text: String,
    pub ids: Vec<u32>,
    pub prompt_tokens: usize,
    pub stop_reason: String,
    /// From the beginning of the prompt to the end of the reply.
    pub seconds: f64,
    /// `null` before the first decode step.
    pub bytes_read_fraction: Option<f64>,
    /// See [`Prompt::digest`].
    pub prompt_digest: String,
}

/// The output: the replies so far, and those to come.
pub struct Replies {
    file: Growing,
    /// The digests of the prompts that have a reply, by id.
    done: BTreeMap<String, String>,
}

impl Replies {
    /// Opens the output, which may have replies of an earlier run with the same settings; --overwrite removes them.
    ///
    /// # Errors
    /// The file is an input, was not written by `run --batch`, or has replies with other settings: exit code 2. It cannot be
    /// written, another process has it open, a line is no reply: exit code 1.
    pub fn open(path: &Path, inputs: &[&Path], settings: &Value, global: &Global) -> Result<Self> {
        let beside = settings_of(path);
        output::check_inputs(path, inputs)?;
        output::check_inputs(&beside, inputs)?;
        let shown = path.display();
        let is_empty = path.metadata().map_or(true, |found| found.len() == 0);
        let earlier = std::fs::read(&beside).ok();
        let has_settings = earlier.as_ref().is_some_and(|bytes| !bytes.is_empty());
        let earlier: Option<Value> = earlier.and_then(|bytes| serde_json::from_slice(&bytes).ok());
        let earlier = earlier.filter(|settings| settings[MARK[0]] == MARK[1]);
        if earlier.is_none() && (has_settings || !is_empty) {
            let what = format!(
                "{shown} or {} already exists, and was not written by `run --batch`",
                beside.display()
            );
            return Err(Error::usage(what).hint("choose another name, or remove the file yourself"));
        }
        let other = earlier.as_ref().filter(|earlier| *earlier != settings);
        if let Some(other) = other.filter(|_| !is_empty && !global.overwrite) {
            let name = differing(other, settings);
            let what = format!("{shown} has replies that were made with another `{name}`");
            return Err(Error::usage(what)
                .hint("choose another name to keep them, or add --overwrite to replace them"));
        }
        let mut replies = Self {
            file: Growing::open(path, !global.overwrite)?,
            done: BTreeMap::new(),
        };
        let (done, mut n) = (&mut replies.done, 0);
        replies.file.read(&mut |line| {
            n += 1;
            let reply: Reply = serde_json::from_str(line).map_err(|e| {
                Error::invalid(format!("{shown}, line {n}: {e}"))
                    .hint("the file was changed; choose another name, or add --overwrite to replace it")
            })?;
            done.insert(reply.id.to_string(), reply.prompt_digest);
            Ok(())
        })?;
        if earlier.as_ref() != Some(settings) {
            let text = serde_json::to_string_pretty(settings).map_err(|e| Error::invalid(e.to_string()))?;
            Output::create(&beside)?.finish((text + "\n").as_bytes())?;
        }
        Ok(replies)
    }

    /// Leaves out the prompts that have a reply; returns their number.
    ///
    /// # Errors
    /// A reply is to another prompt of this id.
    pub fn leave_out(&self, prompts: &mut VecDeque<Prompt>) -> Result<usize> {
        for prompt in prompts.iter() {
            let earlier = self.done.get(&prompt.id.to_string());
            if earlier.is_some_and(|digest| *digest != prompt.digest()) {
                let what = format!(
                    "the output has a reply to another prompt, or with another `max_new`, of the id {}",
                    prompt.id
                );
                return Err(Error::mismatch(what)
                    .hint("give the changed prompt another id, choose another output, or add --overwrite"));
            }
        }
        let before = prompts.len();
        prompts.retain(|prompt| !self.done.contains_key(&prompt.id.to_string()));
        Ok(before - prompts.len())
    }

    /// Writes a reply.
    ///
    /// # Errors
    /// The disk is full, or fails.
    pub fn add(&mut self, reply: &Reply) -> Result<()> {
        let line = serde_json::to_string(reply).map_err(|e| Error::invalid(e.to_string()))?;
        self.file.add(&line)
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
    let name = names.find(|name| a.get(*name) != b.get(*name));
    name.cloned().unwrap_or_default()
}

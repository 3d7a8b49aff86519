//! The needles of `eval`: single questions, and conversations of several.

use std::path::Path;

use serde::Deserialize;
use serde_json::{Value, json};

use super::is_stopped;
use crate::error::{Error, Result};
use crate::model::Decoder;
use crate::model::tokenizer::Tokenizer;
use crate::progress::Log;
use crate::runner::eval::{Evaluation, Question};

/// Tokens that a reply may have beyond the length of the answer, since some tokens have no text.
const SLACK: usize = 8;

/// A line of a needle file.
pub enum NeedleLine {
    /// A single question.
    Needle(Needle),
    /// The questions of a conversation, one per turn.
    Conversation(Vec<Question>),
}

/// A single question, whose answer each method decodes by itself.
pub struct Needle {
    prompt: Vec<u32>,
    answer: Answer,
}

enum Answer {
    Text(String),
    Ids(Vec<u32>),
}

/// A prompt with its answer, as they are written in a line or in a turn.
#[derive(Deserialize)]
#[serde(untagged)]
enum Pair {
    Text {
        prompt: String,
        answer: String,
    },
    Ids {
        #[serde(rename = "prompt_tokens")]
        prompt: Vec<u32>,
        #[serde(rename = "answer_tokens")]
        answer: Vec<u32>,
    },
}

impl Pair {
    /// Reads a pair from a JSON object.
    ///
    /// # Errors
    /// It has neither form, or no prompt or no answer.
    fn parse(value: &Value) -> Result<Self> {
        let pair = Self::deserialize(value).ok().filter(|_| value.is_object());
        let pair = pair.ok_or_else(|| Error::failed("there is no prompt with its answer").hint(FORMS))?;
        let empty = match &pair {
            Self::Text { prompt, answer } => prompt.is_empty() || answer.trim().is_empty(),
            Self::Ids { prompt, answer } => prompt.is_empty() || answer.is_empty(),
        };
        match empty {
            true => Err(Error::failed("the prompt or the answer is empty").hint(FILLED)),
            false => Ok(pair),
        }
    }

    /// Encodes a turn; the `first` begins a document.
    fn question(self, first: bool, tokenizer: Option<&Tokenizer>) -> Result<Question> {
        let question = match self {
            Self::Ids { prompt, answer } => Question { prompt, answer },
            Self::Text { prompt, answer } => {
                let tokenizer = needed(tokenizer)?;
                let prompt = match first {
                    true => tokenizer.encode(&prompt)?,
                    false => tokenizer.encode_raw(&prompt)?,
                };
                let answer = tokenizer.encode_raw(&answer)?;
                Question { prompt, answer }
            }
        };
        match question.prompt.is_empty() || question.answer.is_empty() {
            true => Err(Error::failed("the prompt or the answer has no tokens").hint(FILLED)),
            false => Ok(question),
        }
    }
}

/// What every turn must have.
const FILLED: &str = "every prompt and every answer must have at least one token";

/// The forms that a line may have.
const FORMS: &str = "{\"prompt\": .., \"answer\": ..}, {\"prompt_tokens\": [..], \"answer_tokens\": [..]} or {\"turns\": [..]} with such turns";

fn needed(tokenizer: Option<&Tokenizer>) -> Result<&Tokenizer> {
    tokenizer.ok_or_else(|| {
        Error::failed("the model has no tokenizer.json for a prompt of text")
            .hint("give prompt_tokens and answer_tokens")
    })
}

impl NeedleLine {
    /// Reads a line.
    ///
    /// # Errors
    /// It has another form, an empty part, or an id outside the vocabulary.
    fn parse(line: &str, decoder: &Decoder, tokenizer: Option<&Tokenizer>) -> Result<Self> {
        let value: Value = serde_json::from_str(line)
            .map_err(|e| Error::failed(format!("not a JSON object: {e}")).hint(FORMS))?;
        if let Some(turns) = value.get("turns") {
            let pair = ["prompt", "answer", "prompt_tokens", "answer_tokens"];
            if let Some(key) = pair.iter().find(|key| value.get(**key).is_some()) {
                return Err(Error::failed(format!("the line has `turns` and `{key}`")).hint(FORMS));
            }
            let turns = turns.as_array().filter(|turns| !turns.is_empty());
            let turns = turns.ok_or_else(|| Error::failed("`turns` has no turn").hint(FORMS))?;
            return Ok(Self::Conversation(conversation(turns, decoder, tokenizer)?));
        }
        let needle = match Pair::parse(&value)? {
            Pair::Ids { prompt, answer } => Needle {
                prompt,
                answer: Answer::Ids(answer),
            },
            Pair::Text { prompt, answer } => Needle {
                prompt: needed(tokenizer)?.encode(&prompt)?,
                answer: Answer::Text(answer.trim().to_string()),
            },
        };
        if needle.prompt.is_empty() {
            return Err(Error::failed("the prompt or the answer is empty").hint(FILLED));
        }
        decoder.check_ids(&needle.prompt)?;
        Ok(Self::Needle(needle))
    }

    /// Counts the questions.
    fn questions(&self) -> usize {
        match self {
            Self::Needle(_) => 1,
            Self::Conversation(turns) => turns.len(),
        }
    }

    /// Counts the tokens of prompts and given answers.
    fn len(&self) -> usize {
        match self {
            Self::Needle(needle) => needle.prompt.len(),
            Self::Conversation(turns) => turns.iter().map(|q| q.prompt.len() + q.answer.len()).sum(),
        }
    }
}

/// Reads the turns of a conversation, all of text or all of ids.
fn conversation(turns: &[Value], decoder: &Decoder, tokenizer: Option<&Tokenizer>) -> Result<Vec<Question>> {
    let mut of_text = None;
    let mut turn = |i: usize, value: &Value| -> Result<Question> {
        let pair = Pair::parse(value)?;
        let is_text = matches!(pair, Pair::Text { .. });
        if *of_text.get_or_insert(is_text) != is_text {
            return Err(
                Error::failed("turns of text and of token ids in one conversation")
                    .hint("give all turns of a line as text, or all as token ids"),
            );
        }
        let question = pair.question(i == 0, tokenizer)?;
        decoder.check_ids(&question.prompt)?;
        decoder.check_ids(&question.answer)?;
        Ok(question)
    };
    turns
        .iter()
        .enumerate()
        .map(|(i, value)| turn(i, value).map_err(|e| e.context(format!("turn {}", i + 1))))
        .collect()
}

impl Needle {
    /// Tells whether the reply starts with the answer; `None` while it is too short to tell.
    fn found(&self, said: &[u32], tokenizer: Option<&Tokenizer>) -> Result<Option<bool>> {
        match (&self.answer, tokenizer) {
            (Answer::Text(answer), Some(tokenizer)) => {
                let text = tokenizer.decode(said)?;
                let text = text.trim_start().trim_end_matches('\u{fffd}');
                Ok(match text.starts_with(answer) {
                    true => Some(true),
                    false if answer.starts_with(text.trim_end()) => None,
                    false => Some(false),
                })
            }
            (Answer::Ids(answer), _) => {
                let n = said.len().min(answer.len());
                Ok(match said[..n] == answer[..n] {
                    false => Some(false),
                    true if n == answer.len() => Some(true),
                    true => None,
                })
            }
            (Answer::Text(_), None) => Ok(Some(false)),
        }
    }

    /// Asks the question along every trajectory.
    fn ask(&self, evaluation: &mut Evaluation, tokenizer: Option<&Tokenizer>) -> Result<()> {
        let own = match &self.answer {
            Answer::Text(text) => text.len(),
            Answer::Ids(ids) => ids.len(),
        };
        let found = |said: &[u32]| self.found(said, tokenizer);
        evaluation.needle(&self.prompt, own + SLACK, &found)
    }
}

/// Reads every line of a needle file.
///
/// # Errors
/// A file that cannot be read or has no line; a line that is no needle of this model.
pub fn read(path: &Path, decoder: &Decoder, tokenizer: Option<&Tokenizer>) -> Result<Vec<NeedleLine>> {
    let text = std::fs::read_to_string(path).map_err(|e| Error::io(path, "read", &e))?;
    let lines = text.lines().enumerate().filter(|(_, l)| !l.trim().is_empty());
    let lines = lines.map(|(i, line)| {
        NeedleLine::parse(line, decoder, tokenizer)
            .map_err(|e| e.context(format!("{}, line {}", path.display(), i + 1)))
    });
    let lines: Vec<NeedleLine> = lines.collect::<Result<_>>()?;
    match lines.is_empty() {
        true => Err(Error::failed(format!("{} has no line", path.display())).hint(FORMS)),
        false => Ok(lines),
    }
}

/// Asks every line of a needle file; returns how many were asked and answered, and whether the user stopped it.
pub(super) fn run(
    path: &Path,
    model: &Path,
    decoder: &Decoder,
    evaluation: &mut Evaluation,
    log: Log,
) -> Result<(Value, bool)> {
    let exists = model.join("tokenizer.json").exists();
    let tokenizer = exists.then(|| Tokenizer::open(model, &decoder.config));
    let tokenizer = tokenizer.transpose()?;
    let tokenizer = tokenizer.as_ref();
    let lines = read(path, decoder, tokenizer)?;
    let longest = lines.iter().map(NeedleLine::len).max().unwrap_or(0);
    if longest > decoder.config.max_position_embeddings {
        log.warn(&format!(
            "prompts of up to {longest} tokens are longer than the model's context of {}",
            decoder.config.max_position_embeddings
        ));
    }
    let questions: usize = lines.iter().map(NeedleLine::questions).sum();
    let progress = log.progress(questions as u64, "needles");
    let mut stopped = false;
    for line in &lines {
        let result = match line {
            NeedleLine::Needle(needle) => needle.ask(evaluation, tokenizer),
            NeedleLine::Conversation(turns) => evaluation.conversation(turns),
        };
        stopped = is_stopped(result, evaluation.full.asked())?;
        if stopped {
            break;
        }
        progress.advance(line.questions() as u64);
    }
    drop(progress);
    let found = json!({
        "needles": evaluation.full.asked(),
        "full_needle_accuracy": evaluation.full.accuracy(),
        "full_needle_accuracy_by_turn": evaluation.full,
    });
    Ok((found, stopped))
}

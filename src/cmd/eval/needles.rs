//! The needles of `eval`: single questions, and conversations of several.

mod expected;
mod written;

use std::path::Path;

use serde_json::{Value, json};

use super::args::Args;
use crate::cmd::args::Global;
use crate::cmd::signals::is_stopped;
use crate::cmd::terminal::Log;
use crate::error::{Error, Result};
use crate::model::Decoder;
use crate::model::tokenizer::Tokenizer;
use crate::runner::eval::{Asking, Evaluation, Group, Needle, Passage, Question};
use crate::runner::verdict::{QuestionTokens, questions};
use expected::Expected;

/// A line of a needle file.
pub struct NeedleLine {
    group: Group,
    questions: Questions,
}

enum Questions {
    /// A single question, which each method answers by itself.
    Single { asking: Asking, answers: Expected },
    /// The questions of a conversation, one per turn.
    Conversation(Vec<Question>),
}

/// How the tokens of a question are fed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Feeding {
    /// One by one after the prompt, in decode steps, so that the method reads the prompt for the question.
    Decode,
    /// With the prompt, by exact attention, as most papers do: only the answer is decoded.
    Prefill,
}

impl Feeding {
    /// Returns the name, as a value of `--question`.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Decode => "decode",
            Self::Prefill => "prefill",
        }
    }
}

/// A model for which lines are read.
#[derive(Clone, Copy)]
pub struct Reader<'a> {
    /// The model.
    pub decoder: &'a Decoder,
    /// Its tokenizer, which lines with text need.
    pub tokenizer: Option<&'a Tokenizer>,
    /// How many tokens at the end of a prompt are its question if it has no question of its own.
    pub decode_prompt: usize,
    /// How questions are fed; if they are prefilled, nothing of a prompt is decoded.
    pub feeding: Feeding,
}

/// The hint for a part without tokens.
const FILLED: &str = "give at least one token for every prompt, question and answer";

impl Reader<'_> {
    /// Returns the text of a reply; empty without a tokenizer.
    fn text(&self, said: &[u32]) -> Result<String> {
        let decode = |tokenizer: &Tokenizer| tokenizer.decode(said);
        self.tokenizer.map_or_else(|| Ok(String::new()), decode)
    }

    /// Tells whether a reply ends with a stop token.
    fn ends(&self, said: &[u32]) -> bool {
        let last = said.last();
        last.is_some_and(|id| self.decoder.config.is_stop_token(*id))
    }

    fn needed(&self) -> Result<&Tokenizer> {
        self.tokenizer.ok_or_else(|| {
            Error::invalid("the prompt is text, but the model has no tokenizer.json")
                .hint("give prompt_tokens and answer_tokens instead of text")
        })
    }

    /// Divides the fed tokens into prompt and question. Without a question of its own, the prompt's last tokens become
    /// the question, but never its first token. If questions are prefilled, they are a part of the prompt.
    fn asking(&self, mut prompt: Vec<u32>, question: Option<Vec<u32>>) -> Result<Asking> {
        if prompt.is_empty() || question.as_ref().is_some_and(Vec::is_empty) {
            return Err(Error::invalid("the prompt or the question has no tokens").hint(FILLED));
        }
        let question = match (self.feeding, question) {
            (Feeding::Prefill, question) => {
                prompt.extend(question.into_iter().flatten());
                Vec::new()
            }
            (Feeding::Decode, Some(question)) => question,
            (Feeding::Decode, None) => {
                let first = prompt.len() - self.decode_prompt.min(prompt.len() - 1);
                prompt.split_off(first)
            }
        };
        self.decoder.check_ids(&prompt)?;
        self.decoder.check_ids(&question)?;
        Ok(Asking { prompt, question })
    }

    /// Tokenises what is fed; the `first` turn begins a document.
    fn encoded(&self, prompt: &str, question: Option<&str>, first: bool) -> Result<Asking> {
        let tokenizer = self.needed()?;
        let prompt = if first {
            tokenizer.encode(prompt)?
        } else {
            tokenizer.encode_raw(prompt)?
        };
        let question = question.map(|text| tokenizer.encode_raw(text)).transpose()?;
        self.asking(prompt, question)
    }
}

impl NeedleLine {
    /// Counts the questions.
    fn questions(&self) -> usize {
        match &self.questions {
            Questions::Single { .. } => 1,
            Questions::Conversation(turns) => turns.len(),
        }
    }

    /// Counts the tokens of prompts and given answers.
    fn len(&self) -> usize {
        let fed = |asking: &Asking| asking.prompt.len() + asking.question.len();
        match &self.questions {
            Questions::Single { asking, .. } => fed(asking),
            Questions::Conversation(turns) => turns.iter().map(|q| fed(&q.asking) + q.answer.len()).sum(),
        }
    }

    /// Asks the questions along every trajectory.
    pub(super) fn ask(&self, evaluation: &mut Evaluation, reader: Reader) -> Result<()> {
        self.sample(evaluation, reader, usize::MAX)
    }

    /// Asks the first questions of a conversation, as many as take `steps` decode steps and half of its tokens; a single
    /// question whole.
    pub(super) fn sample(&self, evaluation: &mut Evaluation, reader: Reader, steps: usize) -> Result<()> {
        match &self.questions {
            Questions::Conversation(turns) => {
                let (mut stepped, mut fed, half) = (0, 0, self.len() / 2);
                let first = turns.iter().take_while(|turn| {
                    let is_first = stepped < steps || fed < half;
                    let decoded = turn.asking.question.len() + turn.answer.len();
                    stepped += decoded.saturating_sub(1);
                    fed += turn.asking.prompt.len() + decoded;
                    is_first
                });
                evaluation.conversation(&turns[..first.count()], &self.group)
            }
            Questions::Single { asking, answers } => evaluation.needle(&Needle {
                asking,
                group: &self.group,
                most: answers.most(),
                judge: &|said| answers.judge(said, || reader.text(said), reader.ends(said)),
            }),
        }
    }
}

/// Counts the tokens of the longest line.
pub(super) fn longest(lines: &[NeedleLine]) -> usize {
    lines.iter().map(NeedleLine::len).max().unwrap_or(0)
}

/// Reads the needles of a file for a model.
pub(super) fn open(path: &Path, reader: Reader, log: Log) -> Result<Vec<NeedleLine>> {
    let lines = reader.read(path)?;
    let longest = longest(&lines);
    let context = reader.decoder.config.max_position_embeddings;
    if longest > context {
        log.warn(&format!(
            "some prompts are longer than the model's context of {context} tokens (longest: {longest} tokens)"
        ));
    }
    Ok(lines)
}

/// Texts of each length in which facts are hidden.
const MADE: usize = 20;

/// Hides facts in the text of `--text`, and makes a conversation about each of [`MADE`] pieces of every length.
///
/// # Errors
/// Text that cannot be read, or has too few tokens for a single piece; pieces that are too short for the facts.
pub(super) fn made(args: &Args, reader: Reader, global: &Global) -> Result<Vec<NeedleLine>> {
    let tokenizer = reader.needed()?;
    let wanted = args.lengths.iter().map(|length| MADE * length).sum();
    let read = args.text.files().tokenise(&args.model, tokenizer, wanted, 0)?;
    let ids: Vec<u32> = read.documents.into_iter().flatten().collect();
    let (mut lines, mut rest) = (Vec::new(), &ids[..]);
    for &length in &args.lengths {
        let count = MADE.min(rest.len() / length);
        let (own, others) = rest.split_at(count * length);
        rest = others;
        let texts: Vec<Passage> = own
            .chunks_exact(length)
            .filter_map(|ids| Passage::new(ids, 1))
            .collect();
        let asked = questions(&texts, tokenizer, global.seed)?;
        if asked.len() < MADE {
            global.log().note(&format!(
                "questions about {} texts of {length} tokens only: the text is too short for {MADE}",
                asked.len()
            ));
        }
        for of_text in asked {
            let question = |[before, question, answer]: QuestionTokens| {
                let asking = reader.asking(before, Some(question))?;
                Ok(Question { asking, answer })
            };
            lines.push(NeedleLine {
                group: Group {
                    task: Some("facts".to_owned()),
                    length: Some(length as u64),
                },
                questions: Questions::Conversation(of_text.into_iter().map(question).collect::<Result<_>>()?),
            });
        }
    }
    if lines.is_empty() {
        Err(Error::invalid("the text is too short for questions")
            .hint("give more text, or other --lengths, of at least some 1,000 tokens each"))
    } else {
        Ok(lines)
    }
}

/// Asks every line; returns how many were asked and answered, and whether the user stopped it.
pub(super) fn run(
    lines: &[NeedleLine],
    reader: Reader,
    evaluation: &mut Evaluation,
    log: Log,
) -> Result<(Value, bool)> {
    let questions: usize = lines.iter().map(NeedleLine::questions).sum();
    let progress = log.progress(questions as u64, "needles");
    let mut stopped = false;
    for line in lines {
        let result = line.ask(evaluation, reader);
        stopped = is_stopped(result, evaluation.full.asked())?;
        if stopped {
            break;
        }
        progress.advance(line.questions() as u64);
    }
    drop(progress);
    let full = &evaluation.full;
    let found = json!({
        "needles": full.asked(),
        "question": reader.feeding.as_str(),
        "full_needle_accuracy": full.accuracy(),
        "full_needle_accuracy_by_turn": full.by_turn(),
        "full_scores_by_line": full.by_line(),
        "full_by_task": full.by_task(),
    });
    Ok((found, stopped))
}

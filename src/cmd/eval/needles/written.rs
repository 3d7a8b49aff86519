//! The lines of a needle file: their forms, and how they become questions.

use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use super::expected::{BETWEEN, Expected};
use super::{FILLED, NeedleLine, Questions, Reader};
use crate::error::{Error, Result};
use crate::runner::eval::{Group, Question};

/// A prompt with its answer, as written in a line or in a turn.
#[derive(Deserialize)]
#[serde(untagged)]
enum WrittenQuestion {
    Text {
        prompt: String,
        question: Option<String>,
        answer: Option<String>,
        answers: Option<Vec<String>>,
    },
    Ids {
        #[serde(rename = "prompt_tokens")]
        prompt: Vec<u32>,
        #[serde(rename = "question_tokens")]
        question: Option<Vec<u32>>,
        #[serde(rename = "answer_tokens")]
        answer: Option<Vec<u32>>,
        #[serde(rename = "answers_tokens")]
        answers: Option<Vec<Vec<u32>>>,
    },
}

/// The forms that a line may have.
const FORMS: &str = "expected {\"prompt\": .., \"answer\": ..}, {\"prompt_tokens\": [..], \"answer_tokens\": [..]} or {\"turns\": [..]} with a list of such objects; \"question\" or \"question_tokens\" is optional, and \"answers\" or \"answers_tokens\" lists several answers";

impl WrittenQuestion {
    /// Parses a question from a JSON object.
    ///
    /// # Errors
    /// The value has neither form, or no prompt or no answer.
    fn parse(value: &Value) -> Result<Self> {
        let pair = Self::deserialize(value).ok().filter(|_| value.is_object());
        let none = || Error::invalid("the object does not have a prompt and an answer").hint(FORMS);
        let pair = pair.ok_or_else(none)?;
        let (given, empty) = match &pair {
            Self::Text {
                prompt,
                question,
                answer,
                answers,
            } => {
                let texts = answer.iter().chain(answers.iter().flatten());
                let blank = |text: &String| text.trim().is_empty();
                let empty = prompt.is_empty() || question.as_ref().is_some_and(String::is_empty);
                let no_answer = answers.as_ref().is_some_and(Vec::is_empty);
                (
                    [answer.is_some(), answers.is_some()],
                    empty || no_answer || texts.into_iter().any(blank),
                )
            }
            Self::Ids {
                prompt,
                question,
                answer,
                answers,
            } => {
                let lists = answer.iter().chain(answers.iter().flatten());
                let empty = prompt.is_empty() || question.as_ref().is_some_and(Vec::is_empty);
                let no_answer = answers.as_ref().is_some_and(Vec::is_empty);
                (
                    [answer.is_some(), answers.is_some()],
                    empty || no_answer || lists.into_iter().any(Vec::is_empty),
                )
            }
        };
        match given {
            [false, false] => Err(none()),
            [true, true] => Err(Error::invalid("the object has both `answer` and `answers`").hint(FORMS)),
            _ if empty => Err(Error::invalid("the prompt, the question or an answer is empty").hint(FILLED)),
            _ => Ok(pair),
        }
    }
}

impl Reader<'_> {
    /// Reads a single question.
    fn single(&self, pair: WrittenQuestion) -> Result<Questions> {
        let (asking, answers) = match pair {
            WrittenQuestion::Text {
                prompt,
                question,
                answer,
                answers,
            } => {
                let asking = self.encoded(&prompt, question.as_deref(), true)?;
                let trimmed = |text: String| text.trim().to_string();
                let answers = match answers {
                    Some(texts) => {
                        let texts: Vec<String> = texts.into_iter().map(trimmed).collect();
                        let encode = |text: &String| self.needed()?.encode_raw(text);
                        let ids: Vec<Vec<u32>> = texts.iter().map(encode).collect::<Result<_>>()?;
                        Expected::Texts(texts, ids.iter().map(|ids| ids.len() + BETWEEN).sum())
                    }
                    None => Expected::Text(trimmed(answer.unwrap_or_default())),
                };
                (asking, answers)
            }
            WrittenQuestion::Ids {
                prompt,
                question,
                answer,
                answers,
            } => {
                let asking = self.asking(prompt, question)?;
                let answers = match answers {
                    Some(lists) => Expected::IdLists(lists),
                    None => Expected::Ids(answer.unwrap_or_default()),
                };
                (asking, answers)
            }
        };
        Ok(Questions::Single { asking, answers })
    }

    /// Reads the turns of a conversation, all of text or all of ids.
    fn conversation(&self, turns: &[Value]) -> Result<Questions> {
        let mut of_text = None;
        let mut turn = |i: usize, value: &Value| -> Result<Question> {
            let pair = WrittenQuestion::parse(value)?;
            let is_text = matches!(pair, WrittenQuestion::Text { .. });
            if *of_text.get_or_insert(is_text) != is_text {
                return Err(
                    Error::invalid("the conversation mixes turns of text and turns of token ids")
                        .hint("give all turns of a line as text, or all as token ids"),
                );
            }
            let (asking, answer) = match pair {
                WrittenQuestion::Text {
                    prompt,
                    question,
                    answer: Some(answer),
                    ..
                } => (
                    self.encoded(&prompt, question.as_deref(), i == 0)?,
                    self.needed()?.encode_raw(&answer)?,
                ),
                WrittenQuestion::Ids {
                    prompt,
                    question,
                    answer: Some(answer),
                    ..
                } => (self.asking(prompt, question)?, answer),
                _ => {
                    return Err(Error::invalid("the turn has several answers")
                        .hint("give each turn one `answer`; only lines without turns may have `answers`"));
                }
            };
            if answer.is_empty() {
                return Err(Error::invalid("the answer has no tokens").hint(FILLED));
            }
            self.decoder.check_ids(&answer)?;
            Ok(Question { asking, answer })
        };
        let turns = turns.iter().enumerate();
        turns
            .map(|(i, value)| turn(i, value).map_err(|e| e.context(format!("turn {}", i + 1))))
            .collect::<Result<_>>()
            .map(Questions::Conversation)
    }

    /// Reads a line.
    ///
    /// # Errors
    /// The line has another form, an empty part, or an id outside the vocabulary.
    fn line(&self, line: &str) -> Result<NeedleLine> {
        let value: Value = serde_json::from_str(line)
            .map_err(|e| Error::invalid(format!("not a JSON object: {e}")).hint(FORMS))?;
        let group = Group {
            task: value["task"].as_str().map(str::to_owned),
            length: value["length"].as_u64(),
        };
        let questions = match value.get("turns") {
            Some(turns) => {
                let others = [
                    "prompt",
                    "answer",
                    "answers",
                    "prompt_tokens",
                    "answer_tokens",
                    "answers_tokens",
                ];
                if let Some(key) = others.iter().find(|key| value.get(**key).is_some()) {
                    return Err(Error::invalid(format!("the line has both `turns` and `{key}`")).hint(FORMS));
                }
                let turns = turns.as_array().filter(|turns| !turns.is_empty());
                let turns = turns.ok_or_else(|| {
                    Error::invalid("`turns` is not a list of at least one turn").hint(FORMS)
                })?;
                self.conversation(turns)?
            }
            None => self.single(WrittenQuestion::parse(&value)?)?,
        };
        Ok(NeedleLine { group, questions })
    }

    /// Reads every line of a needle file.
    ///
    /// # Errors
    /// A file that cannot be read or has no lines; a line that is not a needle for this model.
    pub fn read(&self, path: &Path) -> Result<Vec<NeedleLine>> {
        let text = std::fs::read_to_string(path).map_err(|e| Error::io(path, "read", &e))?;
        let lines = text.lines().enumerate().filter(|(_, l)| !l.trim().is_empty());
        let lines = lines.map(|(i, line)| {
            let place = || format!("{}, line {}", path.display(), i + 1);
            self.line(line).map_err(|e| e.context(place()))
        });
        let lines: Vec<NeedleLine> = lines.collect::<Result<_>>()?;
        if lines.is_empty() {
            Err(Error::invalid(format!("{} contains no questions", path.display())).hint(FORMS))
        } else {
            Ok(lines)
        }
    }
}

//! What the reply to a question must contain, and how the reply is judged.

use crate::error::Result;
use crate::runner::eval::Judgement;

/// Tokens that a reply may have beyond the length of the answer, since some tokens have no text.
const SLACK: usize = 8;

/// Tokens that may stand between two answers of a reply.
pub(super) const BETWEEN: usize = 8;

/// What the reply to a single question must contain.
pub(super) enum Expected {
    /// The reply must begin with this text.
    Text(String),
    /// The reply must begin with these tokens.
    Ids(Vec<u32>),
    /// The reply should have each of these texts, as separate words, within this number of tokens.
    Texts(Vec<String>, usize),
    /// The reply should have each of these sequences of tokens.
    IdLists(Vec<Vec<u32>>),
}

impl Expected {
    /// Returns the most tokens that a reply may have.
    pub(super) fn most(&self) -> usize {
        SLACK
            + match self {
                Self::Text(text) => text.len(),
                Self::Ids(ids) => ids.len(),
                Self::Texts(_, tokens) => *tokens,
                Self::IdLists(lists) => lists.iter().map(|ids| ids.len() + BETWEEN).sum(),
            }
    }

    /// Judges the tokens of a reply so far. `text` turns the tokens into text; `ended` says that the last token ends
    /// the reply.
    pub(super) fn judge(
        &self,
        said: &[u32],
        text: impl Fn() -> Result<String>,
        ended: bool,
    ) -> Result<Judgement> {
        Ok(match self {
            Self::Text(answer) => {
                let text = text()?;
                let text = text.trim_start().trim_end_matches('\u{fffd}');
                let found = text.starts_with(answer);
                Judgement::from_start(found, answer.starts_with(text.trim_end()))
            }
            Self::Ids(answer) => {
                let n = said.len().min(answer.len());
                let agrees = said[..n] == answer[..n];
                Judgement::from_start(agrees && n == answer.len(), agrees)
            }
            Self::Texts(answers, _) => {
                let text = text()?;
                let found = answers.iter().filter_map(|answer| word_end(&text, answer));
                // Text that follows could still make the last word found a part of a longer word.
                let complete = found.clone().all(|end| end < text.len());
                Judgement::from_share(found.count(), answers.len(), complete, ended)
            }
            Self::IdLists(answers) => {
                let holds = |ids: &&Vec<u32>| said.windows(ids.len()).any(|part| part == &ids[..]);
                Judgement::from_share(answers.iter().filter(holds).count(), answers.len(), true, ended)
            }
        })
    }
}

/// Returns the end, in bytes, of the first occurrence of `word` in a text that has no letter or digit beside it.
fn word_end(text: &str, word: &str) -> Option<usize> {
    let joins = |c: Option<char>| c.is_some_and(char::is_alphanumeric);
    let ends = text
        .match_indices(word)
        .map(|(start, _)| (start, start + word.len()));
    ends.filter(|(start, end)| {
        !joins(text[..*start].chars().next_back()) && !joins(text[*end..].chars().next())
    })
    .map(|(_, end)| end)
    .next()
}

impl Judgement {
    /// Judges a reply that must begin with its answer: `found` if it has the whole answer, `agrees` if nothing in it is
    /// wrong so far.
    fn from_start(found: bool, agrees: bool) -> Self {
        Self {
            score: f64::from(u8::from(found)),
            is_final: found || !agrees,
        }
    }

    /// Judges a reply with `found` of `n` answers.
    fn from_share(found: usize, n: usize, complete: bool, ended: bool) -> Self {
        Self {
            score: found as f64 / n as f64,
            is_final: ended || (found == n && complete),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_words_of_their_own() {
        for (text, word, end) in [
            (" 12345, 678", "678", Some(11)),
            (" 12345, 678", "2345", None),
            (" 12345, 678", "12345", Some(6)),
            ("xylophone phone", "phone", Some(15)),
            ("phones", "phone", None),
            ("caf\u{e9}", "caf", None),
            ("", "a", None),
        ] {
            assert_eq!(word_end(text, word), end, "{text} {word}");
        }
    }
}

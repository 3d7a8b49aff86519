//! Facts that are hidden in texts, and the questions about them.

use std::collections::BTreeMap;
use std::ops::Range;

use rand::Rng;
use rand_chacha::ChaCha8Rng;

use super::{Asked, NEAREST, QUESTIONS, asked, rng};
use crate::error::Result;
use crate::model::tokenizer::Tokenizer;
use crate::runner::eval::Passage;

/// Names whose codes are hidden, more than there are questions about a text.
const NAMES: [&str; 24] = [
    "Adelheid",
    "Bertram",
    "Cosima",
    "Dietmar",
    "Eleonora",
    "Florian",
    "Gudrun",
    "Hartmut",
    "Ingrid",
    "Joachim",
    "Klara",
    "Leopold",
    "Margarete",
    "Norbert",
    "Ottilie",
    "Paulina",
    "Rudolf",
    "Sieglinde",
    "Theodor",
    "Ursula",
    "Viktor",
    "Waltraud",
    "Xaver",
    "Yvonne",
];

/// How far a place for a fact is moved to the end of a sentence, in tokens.
const NEAR: usize = 48;

/// The parts of a question: what is fed before it, the question, and its answer.
pub type QuestionTokens = [Vec<u32>; 3];

/// Hides facts in texts, as [`Probe::facts`](super::Probe::facts) does, and asks for them: lists the questions about each text, of which the
/// first is fed after the whole text. Texts that are too short are left out.
///
/// # Errors
/// A tokenizer that fails.
pub fn questions(texts: &[Passage], tokenizer: &Tokenizer, seed: u64) -> Result<Vec<Vec<QuestionTokens>>> {
    let of_text = |asked: &Asked| {
        let (prompt, decoded) = asked.parts();
        let mut at = 0;
        let question = |(i, predicting): (usize, &Range<usize>)| {
            let (fed, answer) = (
                &decoded[at..=predicting.start],
                predicting.start + 1..=predicting.end,
            );
            at = predicting.end + 1;
            // After an answer, its full stop comes before the next question.
            let (before, question) = match i {
                0 => (prompt, fed),
                _ => fed.split_at(1),
            };
            [before, question, &decoded[answer]].map(<[u32]>::to_vec)
        };
        asked.answers.iter().enumerate().map(question).collect()
    };
    Ok(hide(texts, tokenizer, seed)?.iter().map(of_text).collect())
}

/// Hides facts in texts and asks for them; leaves out texts that are too short.
pub(super) fn hide(texts: &[Passage], tokenizer: &Tokenizer, seed: u64) -> Result<Vec<Asked>> {
    let mut rng = rng(seed);
    let mut ends = Ends {
        tokenizer,
        known: BTreeMap::new(),
    };
    let mut told = Vec::new();
    for _ in texts {
        let mut names = NAMES.to_vec();
        for _ in 0..QUESTIONS {
            let name = names.swap_remove(rng.gen_range(0..names.len()));
            let (question, code) = (
                format!("The secret code of {name} is"),
                rng.gen_range(1000..10_000),
            );
            told.push(format!(" {question} {code}."));
            told.push(format!("\n\n{question} {code}"));
            told.push(format!("\n\n{question}"));
        }
    }
    told.push(".".to_owned());
    let mut told = tokenizer.encode_raw_each(&told)?;
    let full_stop = told.pop().unwrap_or_default();
    let mut asked = Vec::new();
    for (text, told) in texts.iter().zip(told.chunks(3 * QUESTIONS)) {
        let facts: Vec<Fact> = told.chunks_exact(3).map(Fact::new).collect();
        asked.extend(hidden(&text.ids, &facts, &full_stop, &mut ends, &mut rng)?);
    }
    Ok(asked)
}

/// Says which tokens end a sentence.
struct Ends<'a> {
    tokenizer: &'a Tokenizer,
    known: BTreeMap<u32, bool>,
}

impl Ends<'_> {
    fn is_end(&mut self, id: u32) -> Result<bool> {
        if let Some(known) = self.known.get(&id) {
            return Ok(*known);
        }
        let text = self.tokenizer.decode(&[id])?;
        let is_end = text.ends_with('\n') || text.trim_end().ends_with(['.', '?', '!']);
        self.known.insert(id, is_end);
        Ok(is_end)
    }
}

/// A fact in tokens.
struct Fact {
    sentence: Vec<u32>,
    question: Vec<u32>,
    answer: Vec<u32>,
}

impl Fact {
    /// Makes a fact of its sentence, its question with the answer, and its question alone: a tokenizer may write the answer
    /// otherwise where it stands alone.
    fn new(told: &[Vec<u32>]) -> Self {
        let [sentence, whole, question] = [0, 1, 2].map(|i| &told[i][..]);
        let same = whole.iter().zip(question).take_while(|(a, b)| a == b).count();
        Self {
            sentence: sentence.to_vec(),
            question: whole[..same].to_vec(),
            answer: whole[same..].to_vec(),
        }
    }

    fn len(&self) -> usize {
        self.sentence.len() + self.question.len() + self.answer.len()
    }
}

/// Hides facts between the tokens of a text, one in each of equal parts, at the end of a sentence where one is near, and
/// asks for them in random order. Returns nothing if the text is too short.
fn hidden(
    ids: &[u32],
    facts: &[Fact],
    full_stop: &[u32],
    ends: &mut Ends,
    rng: &mut ChaCha8Rng,
) -> Result<Option<Asked>> {
    let fed: usize = facts.iter().map(|fact| fact.len() + full_stop.len()).sum();
    let Some(room) = ids.len().checked_sub(fed + NEAREST) else {
        return Ok(None);
    };
    if facts
        .iter()
        .any(|fact| fact.question.is_empty() || fact.answer.is_empty())
    {
        return Ok(None);
    }
    let most = room / facts.len();
    if most < NEAR {
        return Ok(None);
    }
    let mut text = Vec::new();
    let mut from = 0;
    for (i, fact) in facts.iter().enumerate() {
        let first = i * most + rng.gen_range(0..most);
        let mut place = first.max(from + 1);
        for near in place..(place + NEAR).min((i + 1) * most) {
            if ends.is_end(ids[near - 1])? {
                place = near;
                break;
            }
        }
        text.extend_from_slice(&ids[from..place]);
        text.extend_from_slice(&fact.sentence);
        from = place;
    }
    text.extend_from_slice(&ids[from..room + NEAREST]);
    let prompt = text.len();
    let mut order: Vec<usize> = (0..facts.len()).collect();
    let mut answers = Vec::new();
    while !order.is_empty() {
        let fact = &facts[order.swap_remove(rng.gen_range(0..order.len()))];
        text.extend_from_slice(&fact.question);
        let first = text.len() - prompt;
        text.extend_from_slice(&fact.answer);
        answers.push(first..text.len() - prompt);
        text.extend_from_slice(full_stop);
    }
    Ok(asked(text, prompt, answers))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::{PLANNED_STEPS, Probe};
    use super::*;
    use crate::model::ModelConfig;

    fn tokenizer() -> Tokenizer {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("calib-data/model");
        let config = ModelConfig::load(&folder).expect("a model");
        Tokenizer::open(&folder, &config).expect("a tokenizer")
    }

    /// Twenty texts of so many tokens from the bundled text.
    fn texts(length: usize) -> Vec<Passage> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("calib-data/text.txt");
        let text = std::fs::read_to_string(path).expect("a text");
        let ids = tokenizer().encode_prefix(&text, 20 * length).expect("tokens");
        ids.chunks_exact(length)
            .filter_map(|ids| Passage::new(ids, 16))
            .collect()
    }

    #[test]
    fn facts_are_hidden_in_the_prompt_and_asked_after_it() {
        let (tokenizer, texts) = (tokenizer(), texts(1024));
        let made = || {
            Probe::facts(&texts, &tokenizer, 3)
                .expect("tokens")
                .expect("a probe")
        };
        let probe = made();
        assert_eq!((probe.texts(), probe.length <= 1024), (20, true));
        let mut steps = 0;
        for (of, again) in probe.asked.iter().zip(&made().asked) {
            assert_eq!(of.passage.ids, again.passage.ids);
            let (prompt, decoded) = of.parts();
            let shown = tokenizer.decode(prompt).expect("text");
            assert_eq!(of.answers.len(), QUESTIONS);
            for answer in &of.answers {
                // The step before a token predicts it.
                let fed = tokenizer.decode(&decoded[..=answer.start]).expect("text");
                let code = tokenizer
                    .decode(&decoded[answer.start + 1..=answer.end])
                    .expect("text");
                let question = fed.rsplit('\n').next().expect("a line");
                assert!(
                    code.trim().len() == 4 && code.trim().parse::<u32>().is_ok(),
                    "{code}"
                );
                let fact = format!("{question} {}.", code.trim());
                assert!(
                    fact.starts_with("The secret code of ") && shown.contains(&fact),
                    "{fact}"
                );
            }
            // What is hidden is outside the window of the first step.
            let last = tokenizer.decode(&prompt[prompt.len() - NEAREST..]).expect("text");
            assert!(!last.contains("secret code"), "{last}");
            steps += decoded.len();
        }
        assert!(
            (steps / 20).abs_diff(PLANNED_STEPS) < PLANNED_STEPS / 2,
            "{steps}"
        );
        let other = Probe::facts(&texts, &tokenizer, 4)
            .expect("tokens")
            .expect("a probe");
        assert_ne!(other.asked[0].passage.ids, probe.asked[0].passage.ids);
        // Too few texts, or too short ones.
        assert!(
            Probe::facts(&texts[1..], &tokenizer, 3)
                .expect("tokens")
                .is_none()
        );
        let short: Vec<Passage> = texts
            .iter()
            .filter_map(|of| Passage::new(&of.ids[..300], 16))
            .collect();
        assert!(Probe::facts(&short, &tokenizer, 3).expect("tokens").is_none());
    }

    /// What is fed and what should come next make up the text of the probe.
    #[test]
    fn questions_are_the_decoded_tokens() {
        let (tokenizer, texts) = (tokenizer(), texts(1024));
        let hidden = hide(&texts, &tokenizer, 3).expect("tokens");
        let all = questions(&texts, &tokenizer, 3).expect("tokens");
        assert_eq!((hidden.len(), all.len()), (20, 20));
        for (asked, questions) in hidden.iter().zip(all) {
            assert_eq!(questions.len(), QUESTIONS);
            let fed: Vec<u32> = questions.iter().flatten().flatten().copied().collect();
            // The last full stop is not needed.
            assert!(asked.passage.ids.starts_with(&fed) && asked.passage.ids.len() <= fed.len() + 2);
            assert!(questions.iter().flatten().all(|part| !part.is_empty()));
            assert_eq!(questions[0][0], asked.parts().0);
        }
    }
}

//! The retrieval probe of a verdict: facts are hidden in the user's own text, or passages of it are to be copied, and
//! every method answers in decode steps.
//!
//! The answers are given, as in a conversation whose replies are known: a question counts as answered if every token of
//! its answer is the most likely one. All questions about a text share its prompt.

pub mod facts;

use std::ops::Range;

use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::error::Result;
use crate::model::tokenizer::Tokenizer;
use crate::runner::eval::{Bootstrap, Passage};

/// The probe counts if full attention answers at least this share of the questions,
pub const LEAST_ACCURACY: f64 = 0.4;
/// and if there are at least this many.
pub const LEAST_QUESTIONS: usize = 160;

/// Questions about each text.
pub const QUESTIONS: usize = 8;

/// About how many decode steps the questions about a text take.
pub const PLANNED_STEPS: usize = 18 * QUESTIONS;

/// Tokens of a copied passage that are repeated, and tokens after them that are the answer.
const COPIED: [usize; 2] = [8, 4];

/// Positions at the end of a text in which nothing is hidden: the window that every step reads.
const NEAREST: usize = 128;

/// Number of the random stream of the probe.
const STREAM: u64 = 5;

/// What a probe asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ProbeKind {
    /// Facts that are hidden in the text.
    Facts,
    /// Passages of the text whose first tokens are repeated.
    Copies,
}

impl ProbeKind {
    /// Returns the name in a manifest.
    pub fn key(self) -> &'static str {
        match self {
            Self::Facts => "facts",
            Self::Copies => "copies",
        }
    }

    /// Says what full attention does with the questions.
    pub fn name(self) -> &'static str {
        match self {
            Self::Facts => "recalls of the hidden facts",
            Self::Copies => "copies of the passages",
        }
    }
}

/// A text with its questions.
#[derive(Clone, Debug)]
struct Asked {
    passage: Passage,
    /// Per question: the decode steps that predict the tokens of its answer.
    answers: Vec<Range<usize>>,
}

impl Asked {
    /// Returns the tokens of the prompt and those that are decoded.
    fn parts(&self) -> (&[u32], &[u32]) {
        let Passage { ids, steps } = &self.passage;
        ids.split_at(ids.len() - steps)
    }
}

/// Texts with questions about them.
#[derive(Clone, Debug)]
pub struct Probe {
    /// What is asked for.
    pub kind: ProbeKind,
    /// Most tokens of a text with its questions.
    pub length: usize,
    asked: Vec<Asked>,
}

/// How many questions about each text were answered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Score {
    /// Per text: answered questions, and questions.
    texts: Vec<[usize; 2]>,
}

impl Probe {
    /// Hides facts in each text and asks for them, in as many tokens as the text has; `None` if the texts are too short.
    ///
    /// # Errors
    /// A tokenizer that fails.
    pub fn facts(texts: &[Passage], tokenizer: &Tokenizer, seed: u64) -> Result<Option<Self>> {
        let asked = facts::hide(texts, tokenizer, seed)?;
        Ok(Self::new(ProbeKind::Facts, asked, texts.len()))
    }

    /// Repeats the first tokens of passages of each text and asks for those that follow; `None` if the texts are too
    /// short.
    pub fn copies(texts: &[Passage], seed: u64) -> Option<Self> {
        let mut rng = rng(seed);
        let [repeated, answer] = COPIED;
        let fed = QUESTIONS * (repeated + answer);
        let asked = texts.iter().filter_map(|text| {
            let prompt = text.ids.get(..text.ids.len().checked_sub(fed)?)?;
            let most = prompt.len().checked_sub(NEAREST)? / QUESTIONS;
            let room = most.checked_sub(repeated + answer)?;
            // One passage in each of equal parts of the text, in random order.
            let mut parts: Vec<usize> = (0..QUESTIONS)
                .map(|i| i * most + rng.gen_range(0..=room))
                .collect();
            let mut ids = prompt.to_vec();
            let mut answers = Vec::new();
            while !parts.is_empty() {
                let first = parts.swap_remove(rng.gen_range(0..parts.len()));
                ids.extend_from_slice(&prompt[first..first + repeated + answer]);
                answers.push(ids.len() - prompt.len() - answer..ids.len() - prompt.len());
            }
            asked(ids, prompt.len(), answers)
        });
        Self::new(ProbeKind::Copies, asked.collect(), texts.len())
    }

    /// Makes a probe if every text has its questions.
    fn new(kind: ProbeKind, asked: Vec<Asked>, texts: usize) -> Option<Self> {
        let length = asked.iter().map(|of| of.passage.ids.len()).max()?;
        (asked.len() == texts && Self::is_possible(texts)).then_some(Self { kind, length, asked })
    }

    /// Tells whether so many texts have enough questions.
    pub fn is_possible(texts: usize) -> bool {
        texts * QUESTIONS >= LEAST_QUESTIONS
    }

    /// Counts the texts.
    pub fn texts(&self) -> usize {
        self.asked.len()
    }

    /// Returns the texts.
    pub fn passages(&self) -> Vec<Passage> {
        self.asked.iter().map(|of| of.passage.clone()).collect()
    }

    /// Lists, for each text, the steps that predict a token of an answer.
    pub fn steps(&self) -> Vec<Vec<usize>> {
        let of = |asked: &Asked| asked.answers.iter().cloned().flatten().collect();
        self.asked.iter().map(of).collect()
    }

    /// Counts the answers that a variant gave to the questions about some texts, and those of full attention; `hits` says
    /// for each of these texts and each step of [`Probe::steps`] whether the prediction was right.
    pub fn score(&self, texts: Range<usize>, hits: &[&[[bool; 2]]]) -> [Score; 2] {
        let of = |which: usize| {
            let text = |(asked, hits): (&Asked, &&[[bool; 2]])| {
                let mut hits = hits.iter();
                let mut is_right = |answer: &Range<usize>| {
                    hits.by_ref()
                        .take(answer.len())
                        .fold(true, |all, hit| all & hit[which])
                };
                let right = asked.answers.iter().filter(|answer| is_right(answer)).count();
                [right, asked.answers.len()]
            };
            Score {
                texts: self.asked[texts.clone()].iter().zip(hits).map(text).collect(),
            }
        };
        [of(0), of(1)]
    }
}

impl Score {
    /// Counts the questions.
    pub fn questions(&self) -> usize {
        self.texts.iter().map(|[_, asked]| asked).sum()
    }

    /// Returns the share of questions that were answered.
    pub fn accuracy(&self) -> f64 {
        let all: Vec<usize> = (0..self.texts.len()).collect();
        self.accuracy_of(&all)
    }

    fn accuracy_of(&self, texts: &[usize]) -> f64 {
        let [right, asked] = texts
            .iter()
            .fold([0, 0], |sum, i| [0, 1].map(|of| sum[of] + self.texts[*i][of]));
        right as f64 / asked.max(1) as f64
    }

    /// Adds the answers to further texts.
    pub fn append(&mut self, other: Self) {
        self.texts.extend(other.texts);
    }

    /// Returns how many points (per cent of the questions) less than `full` answered, and the 95% interval.
    pub fn points_below(&self, full: &Self, bootstrap: Option<&Bootstrap>) -> (f64, Option<[f64; 2]>) {
        let below = |texts: &[usize]| 100.0 * (full.accuracy_of(texts) - self.accuracy_of(texts));
        let all: Vec<usize> = (0..self.texts.len()).collect();
        (below(&all), bootstrap.map(|of| of.interval(below)))
    }
}

fn rng(seed: u64) -> ChaCha8Rng {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    rng.set_stream(STREAM);
    rng
}

/// Makes a text whose tokens from `first` on are decoded; `None` if there is no prompt.
fn asked(ids: Vec<u32>, first: usize, answers: Vec<Range<usize>>) -> Option<Asked> {
    let steps = ids.len() - first;
    // The step that predicts a token is that of the token before it.
    let predicting = |range: Range<usize>| range.start - 1..range.end - 1;
    Some(Asked {
        passage: Passage::new(&ids, steps)?,
        answers: answers.into_iter().map(predicting).collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_repeat_passages_of_the_prompt() {
        let ids = |i: u32| (0..700).map(|j| 1000 * i + j).collect::<Vec<u32>>();
        let texts: Vec<Passage> = (0..20).filter_map(|i| Passage::new(&ids(i), 16)).collect();
        let probe = Probe::copies(&texts, 1).expect("a probe");
        assert_eq!(probe.length, 700);
        for of in &probe.asked {
            let (prompt, decoded) = of.parts();
            assert_eq!(decoded.len(), QUESTIONS * 12);
            for (i, answer) in of.answers.iter().enumerate() {
                assert_eq!(*answer, 12 * i + 7..12 * i + 11);
                let copied = &decoded[12 * i..12 * (i + 1)];
                assert!(
                    prompt[..prompt.len() - NEAREST]
                        .windows(12)
                        .any(|of| of == copied)
                );
            }
        }
        assert!(Probe::copies(&texts[1..], 1).is_none());
        let short: Vec<Passage> = texts
            .iter()
            .filter_map(|of| Passage::new(&of.ids[..200], 16))
            .collect();
        assert!(Probe::copies(&short, 1).is_none());
    }

    /// An answer is right if each of its tokens is.
    #[test]
    fn a_wrong_token_makes_a_wrong_answer() {
        let texts: Vec<Passage> = (0..20)
            .filter_map(|i| Passage::new(&(0..700).map(|j| 1000 * i + j).collect::<Vec<u32>>(), 16))
            .collect();
        let probe = Probe::copies(&texts, 1).expect("a probe");
        let steps = &probe.steps()[4..6];
        let mut hits = [[[true; 2]; 4 * QUESTIONS]; 2];
        assert!(steps.iter().all(|of| of.len() == hits[0].len()));
        // Two tokens of one answer and one of another; full attention is right.
        (hits[1][4][0], hits[1][7][0], hits[1][8][0]) = (false, false, false);
        let [own, full] = probe.score(4..6, &hits.each_ref().map(|of| &of[..]));
        assert_eq!(own.texts, [[QUESTIONS; 2], [QUESTIONS - 2, QUESTIONS]]);
        assert_eq!(full.texts, [[QUESTIONS; 2]; 2]);
    }

    #[test]
    fn points_are_per_cent_of_the_questions() {
        let score = |right: usize| Score {
            texts: (0..20)
                .map(|text| [if text % 2 == 0 { right } else { 8 }, 8])
                .collect(),
        };
        let (full, own) = (score(8), score(4));
        assert_eq!(
            (full.accuracy(), own.accuracy(), own.questions()),
            (1.0, 0.75, 160)
        );
        let (points, interval) = own.points_below(&full, Bootstrap::new(20, 0).as_ref());
        let [low, high] = interval.expect("an interval");
        assert_eq!(points, 25.0);
        assert!(
            10.0 < low && low < points && points < high && high < 40.0,
            "{low} {high}"
        );
        // Paired: a method that answers the same questions loses nothing, whatever texts are drawn.
        assert_eq!(
            full.points_below(&full, Bootstrap::new(20, 0).as_ref()).1,
            Some([0.0; 2])
        );
    }
}

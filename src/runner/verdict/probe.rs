//! The retrieval probe of a verdict: facts are hidden in the user's own text, or passages of it are to be copied, and
//! every method answers in decode steps.
//!
//! The answers are given, as in a conversation whose replies are known: a question counts as answered if every token of
//! its answer is the most likely one. All questions about a text share its prompt.

use std::collections::BTreeMap;
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

/// Tokens of a copied passage that are repeated, and tokens after them that are the answer.
const COPIED: [usize; 2] = [8, 4];

/// How far a place for a fact is moved to the end of a sentence, in tokens.
const NEAR: usize = 48;

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
        let asked = hide(texts, tokenizer, seed)?;
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

    /// Returns how many points (per cent of the questions) less than `full` answered, and the 95 % interval.
    pub fn points_below(&self, full: &Self, bootstrap: Option<&Bootstrap>) -> (f64, Option<[f64; 2]>) {
        let below = |texts: &[usize]| 100.0 * (full.accuracy_of(texts) - self.accuracy_of(texts));
        let all: Vec<usize> = (0..self.texts.len()).collect();
        (below(&all), bootstrap.map(|of| of.interval(below)))
    }
}

/// The parts of a question: what is fed before it, the question, and its answer.
pub type QuestionTokens = [Vec<u32>; 3];

/// Hides facts in texts, as [`Probe::facts`] does, and asks for them: lists the questions about each text, of which the
/// first is fed after the whole text. Texts that are too short are left out.
///
/// # Errors
/// A tokenizer that fails.
pub fn questions(texts: &[Passage], tokenizer: &Tokenizer, seed: u64) -> Result<Vec<Vec<QuestionTokens>>> {
    let of_text = |asked: &Asked| {
        let Passage { ids, steps } = &asked.passage;
        let (prompt, decoded) = ids.split_at(ids.len() - steps);
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
fn hide(texts: &[Passage], tokenizer: &Tokenizer, seed: u64) -> Result<Vec<Asked>> {
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

    /// The tokens of the prompt and those that are decoded.
    fn parts(asked: &Asked) -> (&[u32], &[u32]) {
        let Passage { ids, steps } = &asked.passage;
        ids.split_at(ids.len() - steps)
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
            let (prompt, decoded) = parts(of);
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

    #[test]
    fn copies_repeat_passages_of_the_prompt() {
        let ids = |i: u32| (0..700).map(|j| 1000 * i + j).collect::<Vec<u32>>();
        let texts: Vec<Passage> = (0..20).filter_map(|i| Passage::new(&ids(i), 16)).collect();
        let probe = Probe::copies(&texts, 1).expect("a probe");
        assert_eq!(probe.length, 700);
        for of in &probe.asked {
            let (prompt, decoded) = parts(of);
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

//! The tables of the page: what is measured for each, and the papers' figures that it is compared with.

use serde_json::Value;

/// Methods of the overview.
pub const METHODS: &str = "topk,wpq,a2ats,selfindex,lfps,ctkvr,quest,snapkv,streaming,random";
const BUDGETS: &str = "0.02,0.06,0.2";
/// Tables that are not made from a [`Group`].
pub const BY_LENGTH: &str = "needles_by_length";
pub const SIMILARITY: &str = "codebook_similarity";
/// Options of the calibration that most cases use.
pub const BASE: &str = "--size 1024 --max-tokens 65536";

/// Cases of one table.
pub struct Group {
    pub name: &'static str,
    pub title: &'static str,
    /// What the table measures, and what the paper reports.
    pub about: &'static str,
    /// What it is measured on, text first.
    pub on: &'static [On],
    pub methods: &'static str,
    pub budgets: &'static str,
    pub cases: Vec<Case>,
    /// Columns of the table.
    pub columns: &'static [&'static str],
    /// Says whether the paper's ordering holds for the measured values.
    pub verdict: fn(&[Measured]) -> String,
    /// Why a result of the paper may not be reproduced here.
    pub why: &'static str,
}

/// What a group is measured on.
#[derive(Clone, Copy, PartialEq)]
pub enum On {
    /// Held-out text.
    Text,
    /// Held-out text in blocks of eight turns.
    TextInTurns,
    /// All needles.
    Needles,
    /// Conversations of eight questions.
    Conversations,
}

pub struct Case {
    pub label: &'static str,
    /// Options of `calibrate`; empty for no artifact.
    pub calibrate: &'static str,
    /// Options of `eval`.
    pub eval: &'static str,
    /// Methods to measure in place of the group's.
    pub methods: Option<&'static str>,
}

/// One row of a table.
pub struct Measured<'a> {
    pub case: &'a str,
    pub row: &'a Value,
}

impl Measured<'_> {
    /// Returns the number at `key`; NaN if there is none.
    pub fn get(&self, key: &str) -> f64 {
        self.row[key].as_f64().unwrap_or(f64::NAN)
    }
}

fn case(label: &'static str, calibrate: &'static str, eval: &'static str) -> Case {
    Case {
        label,
        calibrate,
        eval,
        methods: None,
    }
}

impl Case {
    /// Returns the case with its own methods in place of the group's.
    fn with(self, methods: &'static str) -> Self {
        Self {
            methods: Some(methods),
            ..self
        }
    }
}

/// Returns the value at `key` in the first row of the case `label`.
fn value(rows: &[Measured], label: &str, key: &str) -> f64 {
    rows.iter()
        .find(|m| m.case == label)
        .map_or(f64::NAN, |m| m.get(key))
}

/// Returns a sentence that says whether the result `what` was reproduced.
pub fn told(holds: bool, what: &str) -> String {
    if holds {
        format!("Reproduced: {what}.")
    } else {
        format!("Not reproduced: {what}.")
    }
}

/// Breaks a paragraph into lines of at most 120 characters.
pub fn wrapped(text: &str) -> String {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.chars().count() + word.chars().count() < 120 => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines.join("\n")
}

/// Says whether the query centroids that decode steps replace lose less, as the paper reports.
fn following(rows: &[Measured]) -> String {
    let accuracy = |case: &str| value(rows, case, "needle_accuracy");
    let fall = |case: &str| {
        let row = rows.iter().find(|m| m.case == case);
        let turn = |i: usize| row.and_then(|m| m.row["needle_accuracy_by_turn"][i].as_f64());
        turn(0).unwrap_or(f64::NAN) - turn(7).unwrap_or(f64::NAN)
    };
    let more = |one: &str, other: &str| accuracy(one) > accuracy(other);
    let change = |case: &str| format!("{:+.1} points", -100.0 * fall(case));
    let told = |holds: bool, what: &str| format!("- {}", told(holds, what));
    [
        told(
            more("update alone", "neither")
                && value(rows, "update alone", "kl") < value(rows, "neither", "kl"),
            "with the update alone, the method answers more needles and has a lower KL than with neither",
        ),
        told(
            fall("update alone") < fall("neither"),
            &format!(
                "from turn 1 to turn 8, accuracy falls less with the update ({}) than without it ({})",
                change("update alone"),
                change("neither")
            ),
        ),
        told(
            more("both", "later prompts alone"),
            "with the update, the method answers more needles if later prompts bring centroids too",
        ),
    ]
    .join("\n")
}

/// Why the group of all methods has no verdict.
const EQUAL_BUDGETS: &str = "These rows have equal budgets, not equal bytes: every step also reads the static set, the index, \
     and the keys that the method reads only to rank them, which differ between methods. Each paper reports that its method is \
     closer to full attention than Quest at a similar share of reads. [results.md](../results.md) compares the methods at equal \
     bytes.";

/// Returns every group, in the order of the page.
pub fn groups() -> Vec<Group> {
    let both: &[On] = &[On::Text, On::Needles];
    vec![
        Group {
            name: "methods",
            title: "Methods and budgets",
            about: "`topk` covers the most mass that any choice with its budget can cover. It is not an upper bound on quality.",
            on: both,
            methods: METHODS,
            budgets: BUDGETS,
            cases: vec![case("", BASE, "")],
            columns: &[
                "recall",
                "mass",
                "output_error",
                "kl",
                "needle_accuracy",
                "kv_read_fraction",
                "exact_dot_fraction",
                "index_bits_per_token",
            ],
            why: "",
            verdict: |_| wrapped(EQUAL_BUDGETS),
        },
        Group {
            name: "ctkvr_turns",
            title: "ctkvr: centroids that follow the conversation",
            about: "The cases have eight turns on one cache: 32 conversations with one question per turn, and the held-out text \
                    in turns of 32 steps. Query centroids come from the first prompt. Decode steps (the paper's update) and \
                    later prompts (ours) may replace them. The paper reports, for rounds 1, 2, 4, 6 and 8, 100, 95.8, 94.4, \
                    94.2 and 94.0% with the update, and 100, 90.0, 88.5, 86.3 and 85.7% without it.",
            on: &[On::TextInTurns, On::Conversations],
            methods: "ctkvr",
            budgets: "0.06",
            cases: vec![
                case("topk", "", "").with("topk"),
                case("neither", "", "--ct-keep --ct-update 0"),
                case("update alone", "", "--ct-keep"),
                case("later prompts alone", "", "--ct-update 0"),
                case("both", "", ""),
            ],
            columns: &[
                "recall",
                "mass",
                "kl",
                "needle_accuracy",
                "kv_read_fraction",
                "index_bits_per_token",
            ],
            why: "A decode step makes its list only from the positions that it recalled, a prompt query from all keys. The latest \
                  steps are also the centroids most similar to the next query. Their lists overlap, so fewer rows are ranked, and \
                  a position that was not recalled never comes back. Each later prompt has more queries (about 200) than there are \
                  centroids (at most 128), and replaces all of them.",
            verdict: following,
        },
    ]
}

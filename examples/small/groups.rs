//! What is measured: the tables of the page, with the papers' figures and what is held against them.

use serde_json::Value;

/// Methods of the overview.
pub const METHODS: &str = "topk,a2ats,selfindex,lfps,ctkvr,quest,snapkv,streaming,random";
const BUDGETS: &str = "0.02,0.06,0.2";
/// Options of the calibration that most cases use.
pub const BASE: &str = "--size 1024 --max-tokens 65536";

/// Cases of one table.
pub struct Group {
    pub name: &'static str,
    pub title: &'static str,
    /// What the paper says, and what is held against it.
    pub about: &'static str,
    /// What it is measured on, text first.
    pub on: &'static [On],
    pub methods: &'static str,
    pub budgets: &'static str,
    pub cases: Vec<Case>,
    /// Columns of the table.
    pub columns: &'static [&'static str],
    /// Says of the measured values whether the paper's ordering holds.
    pub verdict: fn(&[Measured]) -> String,
    /// Why something may not be reproduced here.
    pub why: &'static str,
}

/// What a group is measured on.
#[derive(Clone, Copy, PartialEq)]
pub enum On {
    /// Held-out text.
    Text,
    /// The same in blocks of eight turns.
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
    /// Instead of the group's.
    pub methods: Option<&'static str>,
}

/// One row of a table.
pub struct Measured<'a> {
    pub case: &'a str,
    pub row: &'a Value,
}

impl Measured<'_> {
    /// The number at `key`; NaN where there is none.
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
    /// The same with another method than the group's.
    fn with(self, methods: &'static str) -> Self {
        Self {
            methods: Some(methods),
            ..self
        }
    }
}

/// The value of `key` of the first row whose case is `label`.
fn of(rows: &[Measured], label: &str, key: &str) -> f64 {
    rows.iter()
        .find(|m| m.case == label)
        .map_or(f64::NAN, |m| m.get(key))
}

/// A sentence on whether something holds.
pub fn told(holds: bool, what: &str) -> String {
    match holds {
        true => format!("Reproduced here: {what}."),
        false => format!("Not reproduced here: {what}."),
    }
}

/// Whether the centroids that follow a conversation are worth it.
fn following(rows: &[Measured]) -> String {
    let accuracy = |case: &str| of(rows, case, "needle_accuracy");
    let fall = |case: &str| {
        let row = rows.iter().find(|m| m.case == case);
        let turn = |i: usize| row.and_then(|m| m.row["needle_accuracy_by_turn"][i].as_f64());
        turn(0).unwrap_or(f64::NAN) - turn(7).unwrap_or(f64::NAN)
    };
    let more = |one: &str, other: &str| accuracy(one) > accuracy(other);
    let points = |x: f64| format!("{:.1}", 100.0 * x);
    [
        told(
            more("update alone", "neither") && of(rows, "update alone", "kl") < of(rows, "neither", "kl"),
            "the update alone answers more needles than neither, and lowers the KL",
        ),
        told(
            fall("update alone") < fall("neither"),
            &format!(
                "with the update the eighth turn loses less against the first ({} points, {} without)",
                points(fall("update alone")),
                points(fall("neither"))
            ),
        ),
        told(
            more("both", "later prompts alone"),
            "the update answers more needles where later prompts bring centroids too",
        ),
    ]
    .join(" ")
}

/// Why the group of all methods has no verdict.
const EQUAL_BUDGETS: &str = "These rows have equal budgets, not equal reads: the static set, the index and keys that are read to \
     rank come on top, and differ. The papers each report their method closer to full attention than Quest at a like share of \
     reads; [results.md](results.md) compares at equal bytes, on a model that people use.";

/// Every group, in the order of the page.
pub fn groups() -> Vec<Group> {
    let both: &[On] = &[On::Text, On::Needles];
    vec![
        Group {
            name: "methods",
            title: "Methods and budgets",
            about: "`topk` is the ceiling of the mass that a choice of its budget can cover, not of quality.",
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
            verdict: |_| EQUAL_BUDGETS.to_owned(),
        },
        Group {
            name: "ctkvr_turns",
            title: "ctkvr: centroids that follow the conversation",
            about: "Eight turns on one cache: 32 conversations with a question a turn, and the held-out text in turns of 32 \
                    steps. Centroids come from the first prompt; decode steps (the paper's update) and later prompts (ours) \
                    may replace them. Paper (rounds 1, 2, 4, 6, 8): with the update 100, 95.8, 94.4, 94.2, 94.0 %, without 100, \
                    90.0, 88.5, 86.3, 85.7 %.",
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
            why: "A step's list is made of what that step recalled, a prompt query's of all keys; and the latest steps are \
                  the centroids most like the next one. Their lists overlap, so fewer rows are ranked, and nothing that was \
                  not recalled comes back. Each later prompt has more queries (about 200) than there are centroids (at most \
                  128) and replaces all of them.",
            verdict: following,
        },
    ]
}

//! What is measured: the tables of the page, with the papers' figures and what is held against them.

use std::fmt::Write as _;

use serde_json::Value;

/// Methods of the overview.
pub const METHODS: &str = "topk,a2ats,selfindex,lfps,ctkvr,quest,snapkv,streaming,random";
const BUDGETS: &str = "0.02,0.04,0.06,0.1,0.2";
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
    /// The needles in the longest prompts.
    LongNeedles,
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
    /// Instead of the group's.
    pub budgets: Option<&'static str>,
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
        budgets: None,
    }
}

impl Case {
    /// The same at another budget than the group's.
    fn at(self, budgets: &'static str) -> Self {
        Self {
            budgets: Some(budgets),
            ..self
        }
    }

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

/// Whether the values of `key` in this order of cases do not fall.
fn rises(rows: &[Measured], labels: &[&str], key: &str) -> bool {
    labels
        .windows(2)
        .all(|w| of(rows, w[0], key) <= of(rows, w[1], key))
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

/// The limits, and what the case that gains shows where it does.
fn limits_with(rows: &[Measured], case: &str, shows: &str) -> String {
    let gains = of(rows, case, "needle_accuracy") > of(rows, AS_IT_IS, "needle_accuracy");
    limits(rows) + if gains { shows } else { "" }
}

/// The case that lifts no restriction.
const AS_IT_IS: &str = "as it is";

const LIMITS: &[&str] = &[
    "budget",
    "needle_accuracy",
    "kv_read_fraction",
    "index_bits_per_token",
];

/// Which lifted restriction brings a method within 3 points of full attention.
fn limits(rows: &[Measured]) -> String {
    let accuracy = |m: &Measured| 100.0 * m.get("needle_accuracy");
    let (Some(own), Some(ceiling)) = (
        rows.iter().find(|m| m.case == AS_IT_IS),
        rows.iter().find(|m| m.case == "topk"),
    ) else {
        return String::new();
    };
    let full = 100.0 * own.get("full_needle_accuracy");
    let near = |m: &Measured| full - accuracy(m) <= 3.0;
    let within = |m: &Measured| if near(m) { "within" } else { "not within" };
    let mut out = format!(
        "Full attention answers {full:.1} %, `topk` at the same budget {:.1} %, the method {:.1} %: {} 3 points of full attention.",
        accuracy(ceiling),
        accuracy(own),
        within(own)
    );
    let lifted = || rows.iter().filter(|m| m.case != AS_IT_IS && m.case != "topk");
    let named = |which: &dyn Fn(&&Measured) -> bool| -> Vec<String> {
        let which = lifted().filter(|m| which(m));
        which
            .map(|m| format!("{} ({:.1} %)", m.case, accuracy(m)))
            .collect()
    };
    let (enough, short) = (named(&|m| near(m)), named(&|m| !near(m)));
    for (names, verb) in [(enough, "is within 3 points"), (short, "is not")] {
        if !names.is_empty() {
            let _ = write!(out, " It {verb} with {}.", names.join(", "));
        }
    }
    let same = lifted().filter(|m| m.get("budget") == own.get("budget"));
    // Of equals, the one that reads less.
    let better = |a: &&Measured, b: &&Measured| {
        let reads = |m: &Measured| m.get("kv_read_fraction");
        let accuracy = accuracy(a).total_cmp(&accuracy(b));
        accuracy.then(reads(b).total_cmp(&reads(a)))
    };
    if let Some(best) = same.max_by(better) {
        let gain = accuracy(best) - accuracy(own);
        let reads = |m: &Measured| format!("{:.1} %", 100.0 * m.get("kv_read_fraction"));
        let _ = match gain > 0.0 {
            true => write!(
                out,
                " At the same budget the most is gained by {} ({gain:+.1} points), which reads {} of the rows instead of {}.",
                best.case,
                reads(best),
                reads(own)
            ),
            false => write!(out, " At the same budget none of them gains anything."),
        };
    }
    out
}

const QUALITY: &[&str] = &["recall", "mass", "output_error", "kl"];

/// Why the group of all methods has no verdict.
const EQUAL_BUDGETS: &str = "These rows have equal budgets, not equal reads: the static set, the index and keys that are read to \
     rank come on top, and differ. The papers each report their method closer to full attention than Quest at a like share of \
     reads; [real.md](real.md) compares at equal bytes, on a model that people use.";

/// Every group, in the order of the page.
pub fn groups() -> Vec<Group> {
    let both: &[On] = &[On::Text, On::Needles];
    let text: &[On] = &[On::Text];
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
            name: "a2ats_ablation",
            title: "a2ats: windowed RoPE and the query-aware metric",
            about: "Paper (RULER average, Llama-3.1-8B): neither 81.4, windowed RoPE alone 85.9, query-aware metric \
                    alone 81.1, both 86.6.",
            on: both,
            methods: "a2ats",
            budgets: "0.06",
            cases: vec![
                case(
                    "neither",
                    "--size 1024 --max-tokens 65536 --rope standard --metric plain",
                    "",
                ),
                case(
                    "windowed RoPE",
                    "--size 1024 --max-tokens 65536 --metric plain",
                    "",
                ),
                case(
                    "query-aware metric",
                    "--size 1024 --max-tokens 65536 --rope standard",
                    "",
                ),
                case("both", BASE, ""),
            ],
            columns: &["recall", "mass", "output_error", "kl", "needle_accuracy"],
            why: "The model is small and its context short: much of its attention follows the distance, which windowed RoPE leaves out on purpose, so standard RoPE finds more of it.",
            verdict: |rows| {
                let others = ["neither", "windowed RoPE", "query-aware metric"];
                let best = others.iter().all(|c| of(rows, c, "kl") >= of(rows, "both", "kl"));
                let needles = |c: &str| of(rows, c, "needle_accuracy");
                let rope = needles("windowed RoPE") > needles("neither");
                let most = others.iter().all(|c| needles(c) <= needles("both"));
                [
                    told(best, "both together have the lowest KL"),
                    told(rope, "windowed RoPE alone answers more needles than neither"),
                    told(most, "both together answer the most needles"),
                ]
                .join(" ")
            },
        },
        Group {
            name: "selfindex_ablation",
            title: "selfindex: signs, centroids and full-precision tokens",
            about: "With `--kv 2bit`. Paper (LongBench, four tasks): full method 54.6/55.7/33.1/54.4, without signs in the \
                    quantiser 52.5/54.9/32.2/50.9, retrieval by signs alone 52.8/53.2/31.9/52.1, no full-precision tokens \
                    52.6/55.2/32.5/54.2.",
            on: both,
            methods: "selfindex",
            budgets: "0.1",
            cases: vec![
                case("full method", BASE, "--kv 2bit"),
                case("no signs in the quantiser", BASE, "--kv 2bit --plain-keys"),
                case(
                    "retrieval by signs alone",
                    BASE,
                    "--kv 2bit --sign-centroids signs",
                ),
                case("no full-precision tokens", BASE, "--kv 2bit --sign-full 0"),
                case("16 bits", BASE, "--kv f16"),
            ],
            columns: &["recall", "mass", "output_error", "kl", "needle_accuracy"],
            why: "",
            verdict: |rows| {
                let parts = [
                    "no signs in the quantiser",
                    "retrieval by signs alone",
                    "no full-precision tokens",
                ];
                let verdicts = parts.map(|part| {
                    let holds = of(rows, part, "kl") > of(rows, "full method", "kl");
                    told(holds, &format!("the KL is higher with {part}"))
                });
                verdicts.join(" ")
            },
        },
        Group {
            name: "sign_centroids",
            title: "selfindex: where the centroids come from",
            about: "Ours: one pass over the prompt is the paper's way; an artifact's centroids need no pass, and the hybrid \
                    takes both.",
            on: text,
            methods: "selfindex",
            budgets: "0.06",
            cases: vec![
                case("one pass", BASE, "--sign-centroids one-pass"),
                case("offline", BASE, "--sign-centroids offline"),
                case("hybrid", BASE, "--sign-centroids hybrid"),
            ],
            columns: QUALITY,
            why: "",
            verdict: |rows| {
                let holds = of(rows, "offline", "recall") >= of(rows, "one pass", "recall") - 0.03;
                told(
                    holds,
                    "the offline centroids' recall is within 3 points of one pass",
                )
            },
        },
        Group {
            name: "lfps_alpha",
            title: "lfps: threshold",
            about: "Paper (Table 4): the share of exact products falls as alpha grows: at 4K 8.0, 6.0, 4.8 and 4.2 % for 0.1 to \
                    0.4.",
            on: text,
            methods: "lfps",
            budgets: "0.06",
            cases: vec![
                case("alpha 0.1", BASE, "--lfps-alpha 0.1"),
                case("alpha 0.2", BASE, "--lfps-alpha 0.2"),
                case("alpha 0.3", BASE, "--lfps-alpha 0.3"),
                case("alpha 0.4", BASE, "--lfps-alpha 0.4"),
                case("calibrated", BASE, ""),
                case(
                    "mean-std, 0.2",
                    BASE,
                    "--lfps-alpha 0.2 --lfps-threshold mean-std",
                ),
                case("budget, 0.2", BASE, "--lfps-alpha 0.2 --lfps-threshold budget"),
            ],
            columns: &["exact_dot_fraction", "recall", "mass", "kl", "bypass_fraction"],
            why: "",
            verdict: |rows| {
                let order = ["alpha 0.4", "alpha 0.3", "alpha 0.2", "alpha 0.1"];
                told(
                    rises(rows, &order, "exact_dot_fraction"),
                    "the share falls as alpha grows",
                )
            },
        },
        Group {
            name: "lfps_theta",
            title: "lfps: bypass",
            about: "Paper: theta 1, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7 saves 0, 2.5, 6.1, 12, 16, 23 and 32 % of the heads' cost; \
                    quality falls below 0.85.",
            on: text,
            methods: "lfps",
            budgets: "0.06",
            cases: vec![
                case("theta 1", BASE, "--lfps-theta 1"),
                case("theta 0.95", BASE, "--lfps-theta 0.95"),
                case("theta 0.9", BASE, "--lfps-theta 0.9"),
                case("theta 0.85", BASE, "--lfps-theta 0.85"),
                case("theta 0.8", BASE, "--lfps-theta 0.8"),
                case("theta 0.75", BASE, "--lfps-theta 0.75"),
                case("theta 0.7", BASE, "--lfps-theta 0.7"),
            ],
            columns: &[
                "bypass_fraction",
                "exact_dot_fraction",
                "mass",
                "output_error",
                "kl",
            ],
            why: "A head is bypassed only where its sinks outweigh everything else together, and the heads of this model, which was trained without padding or instructions, hardly look at their first tokens.",
            verdict: |rows| {
                let order = [
                    "theta 1",
                    "theta 0.95",
                    "theta 0.9",
                    "theta 0.85",
                    "theta 0.8",
                    "theta 0.75",
                    "theta 0.7",
                ];
                let more = of(rows, "theta 0.7", "bypass_fraction") > of(rows, "theta 1", "bypass_fraction");
                told(
                    more && rises(rows, &order, "bypass_fraction"),
                    "more heads are bypassed as theta falls",
                )
            },
        },
        Group {
            name: "lfps_start",
            title: "lfps: what fills the tables",
            about: "Ours: the prompt's last rows (the paper), calibrated priors alone (a cold start), or both.",
            on: text,
            methods: "lfps",
            budgets: "0.06",
            cases: vec![
                case("observed", BASE, "--lfps-prior 0"),
                case("cold", BASE, "--lfps-rows 0"),
                case("mixed", BASE, ""),
            ],
            columns: &["recall", "mass", "output_error", "kl", "exact_dot_fraction"],
            why: "Priors know distances and the first positions, not what a prompt says.",
            verdict: |rows| {
                let holds = of(rows, "cold", "recall") >= of(rows, "observed", "recall") - 0.1;
                told(
                    holds,
                    "the cold start's recall is within 10 points of the observed one",
                )
            },
        },
        Group {
            name: "ctkvr_choice",
            title: "ctkvr: which prompt queries become centroids",
            about: "Paper (64K): last 83.35, evenly spaced 81.98, random 79.93, first 75.60.",
            on: both,
            methods: "ctkvr",
            budgets: "0.06",
            cases: vec![
                case("last", "", ""),
                case("even", "", "--ct-choose even"),
                case("random", "", "--ct-choose random"),
                case("first", "", "--ct-choose first"),
                case("last, 640, no cap", "", "--ct-cap 1 --ct-centroids 640"),
            ],
            columns: &["recall", "mass", "output_error", "kl", "needle_accuracy"],
            why: "",
            verdict: |rows| {
                let order = ["first", "random", "even", "last"];
                told(
                    rises(rows, &order, "needle_accuracy"),
                    "needle accuracy in the paper's order: first, random, even, last",
                )
            },
        },
        Group {
            name: "ctkvr_sweep",
            title: "ctkvr: C, C' and the update",
            about: "Without a cap on the index. Paper (96K): accuracy rises with C up to 640 and is flat after; C' 2, 4, 6, 8 gives \
                    88.5, 89.6, 89.9, 89.9 %; without the update it falls from 100 to 85.7 over eight turns.",
            on: text,
            methods: "ctkvr",
            budgets: "0.06",
            cases: vec![
                case("C 20", "", "--ct-cap 1 --ct-centroids 20"),
                case("C 40", "", "--ct-cap 1 --ct-centroids 40"),
                case("C 80", "", "--ct-cap 1 --ct-centroids 80"),
                case("C 160", "", "--ct-cap 1 --ct-centroids 160"),
                case("C 320", "", "--ct-cap 1 --ct-centroids 320"),
                case("C 640", "", "--ct-cap 1 --ct-centroids 640"),
                case("C' 2", "", "--ct-probes 2"),
                case("C' 4", "", "--ct-probes 4"),
                case("C' 6", "", "--ct-probes 6"),
                case("C' 8", "", "--ct-probes 8"),
                case("no update", "", "--ct-update 0"),
            ],
            columns: &["recall", "mass", "kl", "kv_read_fraction", "index_bits_per_token"],
            why: "A block is one turn of 64 steps, for which the prompt's own queries are still good centroids; the next section has eight turns.",
            verdict: |rows| {
                let c = rises(
                    rows,
                    &["C 20", "C 40", "C 80", "C 160", "C 320", "C 640"],
                    "recall",
                );
                let probes = rises(rows, &["C' 2", "C' 4", "C' 6", "C' 8"], "recall");
                let update = of(rows, "C' 4", "recall") > of(rows, "no update", "recall");
                [
                    told(c, "recall rises with C"),
                    told(probes, "recall rises with C'"),
                    told(update, "recall is higher with the update"),
                ]
                .join(" ")
            },
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
        Group {
            name: "limits_a2ats",
            title: "What limits a2ats at 2,000 tokens",
            about: "The 72 needles in about 2,000 tokens; each row lifts one restriction.",
            on: &[On::LongNeedles],
            methods: "a2ats",
            budgets: "0.06",
            cases: vec![
                case(AS_IT_IS, BASE, ""),
                case("topk", "", "").with("topk"),
                case("4096 codewords", "--size 4096 --max-tokens 65536", ""),
                case(
                    "plain metric",
                    "--size 1024 --max-tokens 65536 --metric plain",
                    "",
                ),
                case(
                    "standard RoPE",
                    "--size 1024 --max-tokens 65536 --rope standard",
                    "",
                ),
                case(
                    "6 % of each query head, not of the group",
                    BASE,
                    "--topk-per-query-head 0.06",
                ),
                case("a budget of 10 %", BASE, "").at("0.1"),
                case("a budget of 20 %", BASE, "").at("0.2"),
            ],
            columns: LIMITS,
            why: "",
            verdict: limits,
        },
        Group {
            name: "limits_selfindex",
            title: "What limits selfindex at 2,000 tokens",
            about: "The same needles; each row lifts one restriction.",
            on: &[On::LongNeedles],
            methods: "selfindex",
            budgets: "0.06",
            cases: vec![
                case(AS_IT_IS, BASE, ""),
                case("topk", "", "").with("topk"),
                case("no full-precision tokens", BASE, "--sign-full 0"),
                case("centroids of one pass", BASE, "--sign-centroids one-pass"),
                case("centroids of the artifact", BASE, "--sign-centroids offline"),
                case("no centroids, signs alone", BASE, "--sign-centroids signs"),
                case("centred by the mean", "", "--center mean"),
                case("a budget of 10 %", BASE, "").at("0.1"),
                case("a budget of 20 %", BASE, "").at("0.2"),
            ],
            columns: LIMITS,
            why: "",
            verdict: |rows| {
                limits_with(
                    rows,
                    "no full-precision tokens",
                    " Those tokens are what the last prompt query scores best, and take up to two fifths of the budget from \
                     what the tokens of the answer look for; in a cache that rounds nothing they have no use.",
                )
            },
        },
        Group {
            name: "limits_ctkvr",
            title: "What limits ctkvr at 2,000 tokens",
            about: "The same needles; each row lifts one restriction.",
            on: &[On::LongNeedles],
            methods: "ctkvr",
            budgets: "0.06",
            cases: vec![
                case(AS_IT_IS, "", ""),
                case("topk", "", "").with("topk"),
                case("no cap on the index", "", "--ct-cap 1"),
                case(
                    "no cap, every prompt query a centroid",
                    "",
                    "--ct-cap 1 --ct-centroids 2048",
                ),
                case("C' 8", "", "--ct-probes 8"),
                case("C' 16", "", "--ct-probes 16"),
                case("lists of 4 budgets", "", "--ct-list 4"),
                case("lists of 8 budgets", "", "--ct-list 8"),
                case("a budget of 10 %", "", "").at("0.1"),
                case("a budget of 20 %", "", "").at("0.2"),
            ],
            columns: LIMITS,
            why: "",
            verdict: |rows| {
                limits_with(
                    rows,
                    "lists of 8 budgets",
                    " What the recalled lists hold is ranked exactly, so a needle that longer lists find was missing from the \
                     lists: 2.5 budgets of 6 % are 15 % of a context in which prompt queries ask for other things than the \
                     answer's tokens do.",
                )
            },
        },
        Group {
            name: "codebook",
            title: "a2ats: codebook size and calibration length",
            about: "The paper has 4,096 codewords and 80K tokens; no sweep is reported.",
            on: text,
            methods: "a2ats",
            budgets: "0.06",
            cases: vec![
                case("256 codewords", "--size 256 --max-tokens 65536", ""),
                case("1024 codewords", BASE, ""),
                case("4096 codewords", "--size 4096 --max-tokens 65536", ""),
                case("1024, 8K tokens", "--size 1024 --max-tokens 8192", ""),
                case("1024, 262K tokens", "--size 1024 --max-tokens 262144", ""),
            ],
            columns: &["recall", "mass", "output_error", "kl", "constant_bytes"],
            why: "",
            verdict: |rows| {
                let size = rises(
                    rows,
                    &["256 codewords", "1024 codewords", "4096 codewords"],
                    "recall",
                );
                told(size, "recall rises with the codebook")
            },
        },
    ]
}

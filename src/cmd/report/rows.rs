//! A row of what `eval --json` printed, as far as the page shows it: the check that its values are what a measurement gives.

use serde::Deserialize;
use serde_json::Value;

use crate::model::Sizes;

/// What a row must have to be shown.
#[derive(Deserialize)]
pub struct Row {
    /// Name of the method, `NAME+tail` with a tail.
    pub method: String,
    /// File of the artifact, where there were several.
    pub artifact: Option<String>,
    /// Flags of `--also` or `--also-kv`.
    flags: Option<String>,
    budget: Option<f64>,
    reads_target: Option<f64>,
    bytes_read_fraction: Option<f64>,
    index_bits_per_token: Option<f64>,
    kl: Option<f64>,
    needle_accuracy: Option<f64>,
    intervals: Option<Intervals>,
    #[serde(default)]
    kl_by_block: Vec<f64>,
    #[serde(default)]
    by_turn: Vec<Turn>,
    #[serde(default)]
    by_position: Vec<Span>,
    #[serde(default)]
    needle_accuracy_by_turn: Vec<f64>,
    /// The head plan that the row is of.
    head_plan: Option<Value>,
    #[serde(default)]
    pub(super) by_task: Vec<Task>,
    #[serde(default)]
    output_error_by_layer: Vec<f64>,
    #[serde(default)]
    per_head: Vec<Head>,
}

#[derive(Deserialize)]
struct Intervals {
    kl: Option<[f64; 2]>,
    needle_accuracy: Option<[f64; 2]>,
}

#[derive(Deserialize)]
struct Turn {
    kl: f64,
}

#[derive(Deserialize)]
struct Span {
    first: u64,
    last: u64,
    kl: f64,
}

/// The score of the questions of one task and length.
#[derive(Deserialize)]
pub struct Task {
    accuracy: f64,
}

#[derive(Deserialize)]
struct Head {
    layer: usize,
    kv_head: usize,
    recall: f64,
    mass: f64,
    output_error: f64,
}

/// Tells whether a number is a loss or a size.
fn loss(x: f64) -> bool {
    x.is_finite() && x >= 0.0
}

/// Tells whether a number is a share; sums of rounded numbers may be a little above 1.
pub fn share(x: f64) -> bool {
    (0.0..=1.0 + 1e-6).contains(&x)
}

impl Task {
    /// Tells whether the score is one.
    pub fn is_valid(&self) -> bool {
        share(self.accuracy)
    }
}

impl Row {
    /// Tells whether the page may show the row: a row of `--also` or `--also-kv` would stand beside another one of its method,
    /// and a head plan is no method.
    pub fn is_of_page(&self) -> bool {
        self.flags.is_none() && self.head_plan.is_none()
    }

    /// Tells whether nothing was measured, because no budget reads so little.
    fn is_empty(&self) -> bool {
        self.budget.is_none()
    }

    /// Names the first value that no measurement gives; `None` if there is none.
    pub fn fault(&self, sizes: Sizes, questions: bool) -> Option<&'static str> {
        if self.head_plan.is_some() {
            return None;
        }
        if self.is_empty() {
            return self.reads_target.is_none().then_some("budget");
        }
        let within = |x: Option<f64>, is_right: fn(f64) -> bool| x.is_none_or(is_right);
        let ordered = |x: Option<[f64; 2]>| x.is_none_or(|[low, high]| low.is_finite() && low <= high);
        let kl = self.intervals.as_ref().and_then(|of| of.kl);
        let accuracy = self.intervals.as_ref().and_then(|of| of.needle_accuracy);
        let layers = self.output_error_by_layer.len();
        let head = |of: &Head| {
            of.layer < sizes.n_layers
                && of.kv_head < sizes.n_kv_heads
                && share(of.recall)
                && share(of.mass)
                && loss(of.output_error)
        };
        let n_heads = sizes.n_layers * sizes.n_kv_heads;
        [
            ("budget", within(self.budget, |x| x.is_finite() && x > 0.0)),
            ("bytes_read_fraction", within(self.bytes_read_fraction, loss)),
            ("index_bits_per_token", within(self.index_bits_per_token, loss)),
            ("kl", questions || self.kl.is_some_and(loss)),
            (
                "needle_accuracy",
                !questions || self.needle_accuracy.is_some_and(share),
            ),
            ("intervals", ordered(kl) && ordered(accuracy)),
            ("kl_by_block", self.kl_by_block.iter().copied().all(loss)),
            ("by_turn", self.by_turn.iter().all(|turn| loss(turn.kl))),
            (
                "by_position",
                self.by_position
                    .iter()
                    .all(|span| loss(span.kl) && span.first <= span.last),
            ),
            (
                "needle_accuracy_by_turn",
                self.needle_accuracy_by_turn.iter().copied().all(share),
            ),
            ("by_task", self.by_task.iter().all(Task::is_valid)),
            ("output_error_by_layer", layers == 0 || layers == sizes.n_layers),
            (
                "per_head",
                self.per_head.is_empty() || self.per_head.len() == n_heads && self.per_head.iter().all(head),
            ),
        ]
        .into_iter()
        .find_map(|(key, is_right)| (!is_right).then_some(key))
    }
}

//! How long the stages of a calibration take.

use std::time::Instant;

use serde_json::{Value, json};

/// The stage in which the model runs over the text.
pub const CAPTURE: &str = "capture";
/// The stage that finds the budgets with which methods read given shares of the bytes.
pub const BUDGETS: &str = "budgets";
/// The stage that measures methods on text that nothing was fitted to.
pub const VERDICT: &str = "verdict";
/// The stage that asks methods about facts hidden in this text.
pub const PROBE: &str = "probe";

/// Stages with the seconds that each took or will take, in the order in which they begin.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stages(Vec<(&'static str, f64)>);

impl Stages {
    /// Adds seconds to a stage.
    pub fn add(&mut self, name: &'static str, seconds: f64) {
        match self.0.iter_mut().find(|stage| stage.0 == name) {
            Some(stage) => stage.1 += seconds,
            None => self.0.push((name, seconds)),
        }
    }

    /// Does `work`, and adds the time it takes to a stage.
    pub fn time<T>(&mut self, name: &'static str, work: impl FnOnce() -> T) -> T {
        let start = Instant::now();
        let out = work();
        self.add(name, start.elapsed().as_secs_f64());
        out
    }

    /// Lists the stages.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, f64)> {
        self.0.iter().copied()
    }

    /// Returns the seconds of a stage; 0 for a stage that is not in the list.
    pub fn get(&self, name: &str) -> f64 {
        self.iter()
            .find(|stage| stage.0 == name)
            .map_or(0.0, |stage| stage.1)
    }

    /// Adds up the seconds of all stages.
    pub fn total(&self) -> f64 {
        self.iter().fold(0.0, |sum, (_, seconds)| sum + seconds)
    }

    /// Describes all stages: `capture 3.1 s, codebooks 8.4 s`.
    pub fn text(&self) -> String {
        let said = self
            .iter()
            .map(|(name, seconds)| format!("{name} {seconds:.1} s"));
        said.collect::<Vec<_>>().join(", ")
    }

    /// Returns the stages for `--json`.
    pub fn json(&self) -> Value {
        let stage = |(name, seconds)| json!({ "name": name, "seconds": seconds });
        self.iter().map(stage).collect()
    }
}

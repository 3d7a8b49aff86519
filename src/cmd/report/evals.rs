//! The documents of `eval --json`: read, checked against the artifact, and reduced to what the page shows.

use std::path::Path;

use serde::Deserialize;
use serde_json::{Value, json};

use super::rows::{Row, Task, share};
use crate::artifact::{Artifact, short};
use crate::cmd::named::Named;
use crate::cmd::terminal::Log;
use crate::error::{Error, Result};

/// The hint for a file that is not what `eval` prints.
const HINT: &str = "give a file that `kvsmith eval .. --json > EVAL.json` has made";
/// The hint for what was measured with something else.
const AGAIN: &str = "measure again: kvsmith eval --model DIR --artifact ART --json .. > EVAL.json";

/// Members of a row that the page does not show.
const UNSHOWN: [&str; 4] = [
    "output_error_by_layer",
    "output_error_layers",
    "output_error_median",
    "exact_dot_fraction",
];

/// A document of `eval --json` about this artifact.
pub struct Measured {
    /// Name of the file.
    pub file: String,
    /// What the page shows of it. Rows keep their places; those of other artifacts and of `--also` are null.
    pub document: Value,
}

/// What a document says of itself.
#[derive(Deserialize)]
struct Heading {
    /// Older versions do not tell it.
    command: Option<String>,
    error: Option<Failure>,
    fingerprint: Option<String>,
    artifacts: Option<Vec<Source>>,
    needles: Option<u64>,
    full_needle_accuracy: Option<f64>,
    #[serde(default)]
    full_needle_accuracy_by_turn: Vec<f64>,
    #[serde(default)]
    full_by_task: Vec<Task>,
    #[serde(default)]
    rows: Vec<Row>,
}

#[derive(Deserialize)]
struct Failure {
    message: String,
}

/// An artifact with which something was measured.
#[derive(Deserialize)]
struct Source {
    file: String,
    sections_sha256: String,
}

impl Measured {
    /// Reads a document.
    ///
    /// # Errors
    /// It is no document of `eval --json`, has values that no measurement gives, or is of another model or artifact.
    pub fn read(path: &Path, own: &Path, artifact: &Artifact, log: Log) -> Result<Self> {
        let context = |e: Error| e.context(path.display());
        let bytes = std::fs::read(path).map_err(|e| Error::io(path, "read", &e))?;
        let document = parse(&bytes).map_err(context)?;
        let heading = Heading::deserialize(&document).map_err(|e| {
            context(Error::invalid(format!("not a document of `eval --json`: {e}")).hint(HINT))
        })?;
        heading.check(artifact).map_err(context)?;
        let kept = heading.rows_of(own, artifact).map_err(context)?;
        if heading.fingerprint.is_none() {
            log.warn(&format!(
                "{} does not say from which model it is: made by an older version; not checked",
                path.display()
            ));
        }
        let file = path.file_name().map(|name| name.to_string_lossy().into_owned());
        Ok(Self {
            file: file.unwrap_or_default(),
            document: shown(document, &kept),
        })
    }

    /// Lists the rows of this artifact.
    pub fn rows(&self) -> impl Iterator<Item = &Value> {
        let rows = self.document["rows"].as_array();
        rows.into_iter().flatten().filter(|row| !row.is_null())
    }
}

/// Reads JSON.
fn parse(bytes: &[u8]) -> Result<Value> {
    serde_json::from_slice(bytes).map_err(|e| {
        let what = if e.is_eof() {
            format!("the file ends too early: {e}")
        } else {
            format!("not JSON: {e}")
        };
        Error::invalid(what).hint(HINT)
    })
}

impl Heading {
    /// Fails if this is not about the artifact's model, or has a value that no measurement gives.
    fn check(&self, artifact: &Artifact) -> Result<()> {
        if let Some(command) = self.command.as_ref().filter(|command| *command != "eval") {
            let what = format!("a document of `{command}`, not of `eval`");
            return Err(Error::invalid(what).hint(HINT));
        }
        if let Some(failure) = &self.error {
            let what = format!("the evaluation failed: {}", failure.message);
            return Err(Error::invalid(what).hint(AGAIN));
        }
        let own = &artifact.manifest.origin.model.fingerprint;
        if let Some(other) = self.fingerprint.as_ref().filter(|other| *other != own) {
            let what = format!(
                "measured with another model (fingerprint {}, the artifact has {})",
                short(other),
                short(own)
            );
            return Err(Error::invalid(what).hint(AGAIN));
        }
        if self.rows.is_empty() {
            return Err(Error::invalid("there are no rows").hint(HINT));
        }
        let questions = self.needles.is_some();
        let full = [
            (
                "full_needle_accuracy",
                self.full_needle_accuracy.is_none_or(share),
            ),
            (
                "full_needle_accuracy_by_turn",
                self.full_needle_accuracy_by_turn.iter().copied().all(share),
            ),
            ("full_by_task", self.full_by_task.iter().all(Task::is_valid)),
        ];
        let full = full.into_iter().find(|(_, is_right)| !is_right);
        let row =
            |(i, row): (usize, &Row)| Some(format!("rows[{i}].{}", row.fault(artifact.sizes, questions)?));
        let fault = full.map(|(key, _)| key.to_owned());
        match fault.or_else(|| self.rows.iter().enumerate().find_map(row)) {
            Some(key) => {
                let what = format!("`{key}` is missing or not what a measurement with this model gives");
                Err(Error::invalid(what).hint(AGAIN))
            }
            None => Ok(()),
        }
    }

    /// Tells for each row whether the page shows it: whether it was measured with the artifact, or without one.
    fn rows_of(&self, own: &Path, artifact: &Artifact) -> Result<Vec<bool>> {
        let digest = artifact.manifest.sections_sha256();
        let file = match &self.artifacts {
            Some(sources) => sources
                .iter()
                .find(|of| of.sections_sha256 == digest)
                .map(|of| of.file.as_str()),
            // Older versions tell the file alone, and that only where there are several.
            None => own.to_str(),
        };
        if self.artifacts.as_ref().is_some_and(Vec::is_empty) {
            return Ok(self.rows.iter().map(Row::is_of_page).collect());
        }
        let single = self.artifacts.as_ref().is_none_or(|sources| sources.len() == 1);
        let of_own = |row: &Row| match (&row.artifact, file) {
            (Some(named), Some(file)) => Path::new(named).file_name() == Path::new(file).file_name(),
            (None, found) => found.is_some() && single,
            (Some(_), None) => false,
        };
        let kept = self
            .rows
            .iter()
            .map(|row| row.is_of_page() && (!reads_artifact(&row.method) || of_own(row)));
        let kept: Vec<bool> = kept.collect();
        if kept.contains(&true) {
            Ok(kept)
        } else {
            Err(Error::mismatch("measured with another artifact").hint(AGAIN))
        }
    }
}

/// Tells whether what a method does depends on an artifact.
fn reads_artifact(method: &str) -> bool {
    Named::parse(method).is_none_or(|named| named.tail || named.method.reads_section())
}

/// Reduces a document to what the page shows.
fn shown(mut document: Value, kept: &[bool]) -> Value {
    if let Some(members) = document.as_object_mut() {
        members.remove("differences");
        members.remove("artifacts");
    }
    let rows = document["rows"].as_array_mut();
    for (row, kept) in rows.into_iter().flatten().zip(kept) {
        match row.as_object_mut().filter(|_| *kept) {
            Some(members) => UNSHOWN.iter().for_each(|key| drop(members.remove(*key))),
            None => *row = json!(null),
        }
    }
    document
}

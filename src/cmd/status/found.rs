//! Finds the parts of a sharded calibration below a folder.

use std::ops::Range;
use std::path::Path;

use serde_json::{Value, json};

use crate::artifact::Artifact;
use crate::cmd::task::{self, LOST_S, Note, State};
use crate::cmd::terminal::with_flags;
use crate::dump::{self, MANIFEST, MAX_SHARDS};
use crate::error::{Error, Result};
use crate::method::sections::SECTIONS;
use crate::wording::{duration, harmless};
use crate::work;

/// How many folders deep parts are looked for.
const DEPTH: usize = 4;

/// A complete shard.
pub struct FoundShard {
    pub index: usize,
    pub count: usize,
    pub bytes: u64,
}

/// A file with layers of a section.
pub struct FoundLayers {
    /// The command that made it.
    pub command: String,
    pub layers: Range<usize>,
    pub n_layers: usize,
    pub bytes: u64,
}

/// A dump of a whole text.
pub struct FoundDump {
    pub name: String,
    pub n_layers: usize,
    pub tokens: usize,
    pub bytes: u64,
}

/// The folder of --work of a calibration that has not ended.
pub struct FoundWork {
    pub name: String,
    /// Layers that are finished, and all layers.
    pub layers: [usize; 2],
}

/// The note of a task.
#[derive(Debug)]
pub struct TaskNote {
    pub note: Note,
    /// Name of its output.
    pub output: String,
    /// Numbers of the shards or layers that it makes.
    pub parts: Range<usize>,
    /// Number of shards, if it is about one.
    pub count: Option<usize>,
}

impl TaskNote {
    fn new(note: Note, output: &str) -> Option<Self> {
        let numbers = |separator: &str| {
            let (a, b) = note.part.split_once(separator)?;
            Some((a.parse::<usize>().ok()?, b.parse::<usize>().ok()?))
        };
        let (parts, count) = match (numbers("/"), numbers("..")) {
            (Some((index, count)), _) if note.command == "dump" && index < count && count <= MAX_SHARDS => {
                (index..index + 1, Some(count))
            }
            // It failed before it knew how many layers there are.
            (Some(_), _) => (0..0, None),
            (_, Some((first, end))) => (first..end, None),
            _ => return None,
        };
        Some(Self {
            note,
            output: output.to_owned(),
            parts,
            count,
        })
    }

    /// Returns the seconds since the note was written.
    fn age_s(&self) -> u64 {
        task::now_unix_s().saturating_sub(self.note.updated_unix_s)
    }

    /// Tells whether a task that should be at work has not been heard of for too long.
    pub fn is_lost(&self) -> bool {
        self.age_s() > LOST_S
    }

    /// Estimates the seconds that a running task still takes.
    pub fn left_s(&self) -> Option<f64> {
        let Note {
            seconds, done, total, ..
        } = &self.note;
        (*done > 0).then(|| seconds * total.saturating_sub(*done) as f64 / *done as f64)
    }

    pub fn json(&self) -> Value {
        json!({
            "part": self.note.part, "output": self.output, "host": self.note.host, "process": self.note.process,
            "seconds": self.note.seconds, "silent_s": self.age_s(), "done": self.note.done, "total": self.note.total,
            "error": self.note.error,
        })
    }

    /// Describes the task in a line of at most 64 columns.
    pub fn text(&self) -> String {
        let Note { part, host, .. } = &self.note;
        let text = match (self.note.state, &self.note.error) {
            (State::Running, _) if self.is_lost() => {
                format!(
                    "{part}: silent for {}, was on {host}",
                    duration(self.age_s() as f64)
                )
            }
            (_, Some(error)) => format!("{part} on {host}: {error}"),
            _ => {
                let share = 100.0 * self.note.done as f64 / self.note.total.max(1) as f64;
                let left = self
                    .left_s()
                    .map_or_else(String::new, |left| format!(", {} left", duration(left)));
                format!("{part} on {host}: {share:.0} %{left}")
            }
        };
        let text = harmless(&text).replace('\n', " ");
        if text.chars().count() > 64 {
            text.chars().take(61).chain("...".chars()).collect()
        } else {
            text
        }
    }
}

/// Everything that was found.
#[derive(Default)]
pub struct Found {
    pub shards: Vec<FoundShard>,
    pub layers: Vec<FoundLayers>,
    pub tasks: Vec<TaskNote>,
    pub dumps: Vec<FoundDump>,
    pub works: Vec<FoundWork>,
    /// What is damaged, or does not belong together.
    pub problems: Vec<String>,
    /// The first shard or file, to which the others are compared: its name, model and text.
    first: Option<(String, Value)>,
    /// The first shard: its name, options and number of shards.
    first_shard: Option<(String, Value)>,
}

impl Found {
    /// Looks through a folder and the folders in it.
    ///
    /// # Errors
    /// The folder cannot be read.
    pub fn below(dir: &Path) -> Result<Self> {
        let mut found = Self::default();
        std::fs::read_dir(dir).map_err(|e| Error::io(dir, "read", &e))?;
        if !found.take(dir) {
            found.look(dir, DEPTH).map_err(|e| Error::io(dir, "read", &e))?;
        }
        Ok(found)
    }

    /// Takes a folder that is a dump, a shard of one, or the work folder of a calibration; tells whether it is.
    fn take(&mut self, dir: &Path) -> bool {
        if dir.join(MANIFEST).is_file() {
            self.add_dump(dir);
            return true;
        }
        let Some(layers) = work::progress(dir) else {
            return false;
        };
        let name = dir.display().to_string();
        self.works.push(FoundWork { name, layers });
        true
    }

    fn look(&mut self, dir: &Path, depth: usize) -> std::io::Result<()> {
        let entries: std::io::Result<Vec<_>> = std::fs::read_dir(dir)?.collect();
        let mut entries = entries?;
        entries.sort_by_key(std::fs::DirEntry::file_name);
        for entry in entries {
            let (path, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
            if let Some(output) = task::output_of(&name) {
                let note = task::read(&path).and_then(|note| TaskNote::new(note, output));
                self.tasks.extend(note);
            } else if name.starts_with('.') {
                continue;
            } else if path.is_dir() {
                if !self.take(&path) && depth > 0 {
                    // A folder that cannot be read has nothing to show.
                    let _ = self.look(&path, depth - 1);
                }
            } else if path.extension().is_some_and(|of| of == "safetensors") {
                self.add_layers(&path);
            }
        }
        Ok(())
    }

    fn add_dump(&mut self, path: &Path) {
        let summary = match dump::summary(path) {
            Ok(summary) => summary,
            Err(e) => return self.problems.push(with_flags(&e.to_string()).into_owned()),
        };
        let Some(shard) = summary.shard else {
            return self.dumps.push(FoundDump {
                name: path.display().to_string(),
                n_layers: summary.origin.model.sizes.n_layers,
                tokens: summary.origin.calibration.tokens,
                bytes: summary.bytes,
            });
        };
        self.compare(path, &json!(summary.origin));
        let (name, options) = (path.display().to_string(), json!([summary.options, shard.count]));
        let (first, other) = self.first_shard.get_or_insert((name.clone(), options.clone()));
        if *other != options {
            let what = format!("{name} and {first} have different options or numbers of shards");
            self.problems.push(what);
        }
        self.shards.push(FoundShard {
            index: shard.index,
            count: shard.count,
            bytes: summary.bytes,
        });
    }

    fn add_layers(&mut self, path: &Path) {
        let artifact = match Artifact::open_part(path, SECTIONS) {
            Ok(artifact) => artifact,
            // Files of other kinds may lie here too.
            Err(_) if !path.metadata().is_ok_and(|found| found.len() > 0) => return,
            Err(e) => return self.problems.push(with_flags(&e.to_string()).into_owned()),
        };
        // The packed artifact is no part.
        if artifact.manifest.sections.len() != 1 {
            return;
        }
        self.compare(path, &json!(artifact.manifest.origin));
        for section in artifact.sections() {
            self.layers.push(FoundLayers {
                command: section.kind.facts().command.to_owned(),
                layers: artifact.layers.clone(),
                n_layers: artifact.sizes.n_layers,
                bytes: artifact.store.file_bytes() as u64,
            });
        }
    }

    /// Notes a problem if a part was made from another model or text than the first.
    fn compare(&mut self, path: &Path, origin: &Value) {
        let name = path.display().to_string();
        match &self.first {
            None => self.first = Some((name, origin.clone())),
            Some((first, other)) if other != origin => {
                self.problems
                    .push(format!("{name} is of another model or text than {first}"));
            }
            Some(_) => {}
        }
    }
}

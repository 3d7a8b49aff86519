//! Notes about sharded tasks: a small file beside the output of a task says on which machine it runs, how far it is, or
//! why it failed. `kvsmith status` reads these notes; nothing else depends on them.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::cmd::terminal;
use crate::disk::{self, Output};
use crate::error::Result;

/// How often the note of a running task is written.
const EVERY: Duration = Duration::from_secs(5);
/// Age of the note from which a running task counts as lost.
pub const LOST_S: u64 = 60;
/// What every note has as its `kind`.
const KIND: &str = "kvsmith task";

/// The state of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// At work, or killed without a chance to say so.
    Running,
    /// Ended with an error.
    Failed,
    /// Its output is complete.
    Done,
}

/// The content of a note.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Note {
    kind: String,
    /// The subcommand, such as `dump`.
    pub command: String,
    /// Which part of the work this is: `3/8` for a shard, `0..8` for layers.
    pub part: String,
    pub state: State,
    /// Name of the machine.
    pub host: String,
    /// Id of the process on that machine.
    pub process: u32,
    /// When the note was written, in seconds since 1970.
    pub updated_unix_s: u64,
    /// Seconds since the task began.
    pub seconds: f64,
    /// Finished and total units of the step that the task is at.
    pub done: u64,
    pub total: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// A task, whose note is kept up to date while it is at work.
pub struct Task {
    path: PathBuf,
    note: Note,
    start: Instant,
    writer: Option<(Sender<()>, JoinHandle<()>)>,
}

impl Task {
    /// Makes a task with this output; there is no note before it is at work or fails.
    pub fn new(output: &Path, command: &str, part: String) -> Self {
        let note = Note {
            kind: KIND.to_owned(),
            command: command.to_owned(),
            part,
            state: State::Running,
            host: host(),
            process: std::process::id(),
            updated_unix_s: 0,
            seconds: 0.0,
            done: 0,
            total: 0,
            error: None,
        };
        Self {
            path: path_of(output),
            note,
            start: Instant::now(),
            writer: None,
        }
    }

    /// Changes which part of the work this is.
    pub fn set_part(&mut self, part: String) {
        self.note.part = part;
    }

    /// Notes from now on that the task is at work.
    pub fn begin(&mut self) {
        let (stop, stopped) = mpsc::channel();
        let (path, mut note, start) = (self.path.clone(), self.note.clone(), self.start);
        let writer = std::thread::Builder::new().spawn(move || {
            loop {
                (note.done, note.total) = terminal::current().unwrap_or_default();
                write(&path, &mut note, start);
                if stopped.recv_timeout(EVERY) != Err(RecvTimeoutError::Timeout) {
                    return;
                }
            }
        });
        self.writer = writer.ok().map(|writer| (stop, writer));
    }

    /// Notes how the task ended, unless there was nothing to do, and passes this on.
    pub fn end(mut self, outcome: Result<()>) -> Result<()> {
        let began = self.writer.is_some();
        if let Some((stop, writer)) = self.writer.take() {
            let _ = stop.send(());
            let _ = writer.join();
        }
        self.note.state = if outcome.is_ok() {
            State::Done
        } else {
            State::Failed
        };
        self.note.error = outcome.as_ref().err().map(ToString::to_string);
        if began || outcome.is_err() {
            write(&self.path, &mut self.note, self.start)
        } else {
            // A task that was killed after it had finished may have left its note half written.
            disk::remove_abandoned(disk::folder_of(&self.path))
        }
        outcome
    }
}

/// Writes a note. Best effort: a task does not fail for its note, and no other file is replaced.
fn write(path: &Path, note: &mut Note, start: Instant) {
    if path.exists() && read(path).is_none() {
        return;
    }
    note.seconds = start.elapsed().as_secs_f64();
    note.updated_unix_s = now_unix_s();
    if let (Ok(output), Ok(text)) = (Output::create(path), serde_json::to_vec(note)) {
        let _ = output.finish(&text);
    }
}

/// No task runs as many seconds as this.
const MOST_SECONDS: f64 = 1e9;

/// Most bytes of a note.
const MOST_OF_NOTE: u64 = 1 << 16;

/// Reads a note; `None` if the file is none.
pub fn read(path: &Path) -> Option<Note> {
    let mut text = Vec::new();
    // A file that is longer is none of ours.
    let file = std::fs::File::open(path).ok()?;
    file.take(MOST_OF_NOTE).read_to_end(&mut text).ok()?;
    let note: Note = serde_json::from_slice(&text).ok()?;
    let is_possible = (0.0..MOST_SECONDS).contains(&note.seconds) && note.done <= note.total;
    (note.kind == KIND && is_possible).then_some(note)
}

/// Returns the time in seconds since 1970.
pub fn now_unix_s() -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |now| now.as_secs())
}

/// Names the note of an output. The name begins with a dot, so that `WORK/tokens/*` does not match it.
fn path_of(output: &Path) -> PathBuf {
    let name = output.file_name().unwrap_or_default().to_string_lossy();
    output.with_file_name(format!(".{name}{SUFFIX}"))
}

/// Returns the name of the output that a note is about; `None` if no note has this name.
pub fn output_of(note: &str) -> Option<&str> {
    note.strip_prefix('.')?.strip_suffix(SUFFIX)
}

const SUFFIX: &str = ".task.json";

/// Returns the machine's name.
fn host() -> String {
    let name = std::fs::read_to_string("/proc/sys/kernel/hostname");
    name.map_or_else(|_| "?".to_owned(), |name| name.trim().to_owned())
}

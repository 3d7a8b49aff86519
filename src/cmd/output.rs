//! The files that commands write: none of them replaces an input of the command or a file that is not kvsmith's.

use std::fs::{File, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use serde_json::Value;

use super::args::Global;
use crate::disk::Output;
use crate::error::{Error, Result};
use crate::store::Store;

/// Longest line of a file that is read to recognise a trace or a plan.
const MAX_LINE: u64 = 1 << 26;

/// Starts the file `path`, which appears under this name when it is complete.
///
/// # Errors
/// Exit code 2: `path` is one of the command's `inputs`, or a file directly in an input folder; it is a file, not empty,
/// that kvsmith did not write; it is a result of kvsmith and `--overwrite` is missing. Exit code 1: it cannot be written.
pub fn create(path: &Path, inputs: &[&Path], global: &Global) -> Result<Output> {
    check(path, inputs, global)?;
    let output = Output::create(path)?;
    let is_free = path.metadata().is_err();
    Ok(if is_free && !global.overwrite {
        output.only_new()
    } else {
        output
    })
}

/// Checks that the folder `path` of flag `flag` is not itself one of the `inputs`.
///
/// # Errors
/// The folder is an input: exit code 2.
pub fn check_folder(flag: &str, path: &Path, inputs: &[&Path]) -> Result<()> {
    match inputs.iter().find(|input| is_same(input, path)) {
        None => Ok(()),
        Some(_) => {
            let error = Error::usage(format!("{flag} {} is an input of this command", path.display()));
            Err(error.hint("choose a new or an empty folder"))
        }
    }
}

/// Checks that the output `path` does not lie directly in the folder `work` of flag --work.
///
/// # Errors
/// The output lies in the folder: exit code 2.
pub fn check_outside(path: &Path, work: &Path) -> Result<()> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = folder.unwrap_or(Path::new("."));
    if !(folder == work || is_same(folder, work)) {
        Ok(())
    } else {
        let error = Error::usage(format!("{} is inside the --work folder", path.display()));
        Err(error
            .hint("write the output elsewhere: --work is for temporary files, which a finished run removes"))
    }
}

/// Tells whether two paths lead to the same existing file or folder.
fn is_same(a: &Path, b: &Path) -> bool {
    let id = |path: &Path| path.metadata().map(|found| (found.dev(), found.ino())).ok();
    id(a).is_some_and(|a| Some(a) == id(b))
}

/// Checks that `path` is not one of the `inputs`, nor a file directly in an input folder.
///
/// # Errors
/// It is: exit code 2.
pub fn check_inputs(path: &Path, inputs: &[&Path]) -> Result<()> {
    let shown = path.display();
    for input in inputs.iter().filter(|_| path.exists()) {
        let refused = |what: String| Err(Error::usage(what).hint("choose another name for the output"));
        if is_same(input, path) {
            return refused(format!("{shown} is an input of this command"));
        }
        let folder = |path: &Path| path.canonicalize().ok()?.parent().map(Path::to_path_buf);
        if input.is_dir()
            && folder(path).is_some_and(|folder| input.canonicalize().is_ok_and(|dir| dir == folder))
        {
            return refused(format!(
                "{shown} is a file of {}, which this command reads",
                input.display()
            ));
        }
    }
    Ok(())
}

/// Checks that `path` may be written; see [`create`].
fn check(path: &Path, inputs: &[&Path], global: &Global) -> Result<()> {
    let Ok(found) = path.metadata() else {
        return Ok(());
    };
    check_inputs(path, inputs)?;
    let shown = path.display();
    if !found.is_file() || found.len() == 0 {
        return Ok(());
    }
    if !is_result(path) {
        let error = Error::usage(format!("{shown} already exists and was not written by kvsmith"));
        return Err(error.hint("choose another name, or remove the file yourself"));
    }
    if global.overwrite {
        Ok(())
    } else {
        Err(Error::usage(format!("{shown} already exists")).hint("add --overwrite to replace it"))
    }
}

/// What the pages of `report` begin with.
pub const PAGE: &str = "<!doctype html><!-- made by kvsmith report -->";

/// Tells whether kvsmith wrote a file: an artifact, a section, moments, a codebook, a page, a trace or a plan of `tune`.
fn is_result(path: &Path) -> bool {
    if let Ok(store) = Store::open(path) {
        let mut names = store.specs().map(|spec| spec.name.as_str());
        return store.metadata().is_some() || names.next() == Some("codebook") && names.next().is_none();
    }
    let mut line = String::new();
    let Ok(file) = File::open(path) else {
        return false;
    };
    let read = BufReader::new(std::io::Read::take(file, MAX_LINE)).read_line(&mut line);
    if line.trim_end() == PAGE {
        return true;
    }
    let row: Option<Value> = read.ok().and_then(|_| serde_json::from_str(&line).ok());
    let is_trace = |row: Value| {
        ["step", "layer", "kv_head", "positions"]
            .iter()
            .all(|key| row.get(key).is_some())
    };
    row.is_some_and(|row| row["command"] == "tune" || is_trace(row))
}

/// Where the lines of a trace go.
pub enum Lines {
    /// A file that appears when it is complete.
    File(Output),
    /// A pipe, a terminal or another device.
    Stream(File),
}

impl Lines {
    /// Starts a trace in a file, or on a pipe or device.
    ///
    /// # Errors
    /// Those of [`create`].
    pub fn create(path: &Path, inputs: &[&Path], global: &Global) -> Result<Self> {
        match path.metadata() {
            Ok(found) if !found.is_file() && !found.is_dir() => {
                let stream = OpenOptions::new().write(true).open(path);
                stream.map(Self::Stream).map_err(|e| Error::io(path, "write", &e))
            }
            _ => create(path, inputs, global).map(Self::File),
        }
    }

    /// Gives a complete file its final name.
    pub fn finish(self) -> Result<()> {
        match self {
            Self::File(output) => output.finish(&[]),
            Self::Stream(_) => Ok(()),
        }
    }
}

impl Write for Lines {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        match self {
            Self::File(output) => output.write(bytes),
            Self::Stream(file) => file.write(bytes),
        }
    }

    fn flush(&mut self) -> std::io::Result<()> {
        match self {
            Self::File(output) => output.flush(),
            Self::Stream(file) => file.flush(),
        }
    }
}

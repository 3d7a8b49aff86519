//! The crate's one error type: a message, an optional hint, and a kind that decides the exit code.
//!
//! Nearly every failure ends as `error: ...` and `hint: ...` on stderr, so callers seldom need to tell
//! failures apart, and the kind suffices where they do. One type therefore serves the whole crate instead
//! of an enum per area.

use std::fmt;
use std::io::{self, ErrorKind};
use std::path::Path;

/// The kind of a failure: it decides the exit code, and callers may branch on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Bad input or a failed check: exit code 1.
    Failed,
    /// Wrong use of the command line: exit code 2.
    Usage,
    /// A GPU has too little free memory: exit code 1.
    GpuMemory,
    /// The requested device cannot do this: exit code 3.
    Device,
    /// Stopped by the user: exit code 130.
    Interrupted,
    /// The reader of stdout has closed it (`| head`): a silent end, exit code 0.
    Closed,
}

/// A failure: its message, an optional hint and its kind.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    kind: Kind,
    message: String,
    hint: Option<String>,
}

/// The hint for a failure that no input should be able to cause.
pub const DEFECT: &str = "this may be a bug in kvsmith; please report it with the command and its output";

/// The crate's result type.
pub type Result<T> = std::result::Result<T, Error>;

impl From<ndarray::ShapeError> for Error {
    fn from(e: ndarray::ShapeError) -> Self {
        Self::failed(e.to_string())
    }
}

impl Error {
    fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
            hint: None,
        }
    }

    /// Makes the error for bad input or a failed check.
    pub fn failed(message: impl Into<String>) -> Self {
        Self::new(Kind::Failed, message)
    }

    /// Makes the error for wrong use of the command line.
    pub fn usage(message: impl Into<String>) -> Self {
        Self::new(Kind::Usage, message)
    }

    /// Makes the error for a GPU with too little free memory for `need`.
    pub fn gpu_memory(need: impl fmt::Display) -> Self {
        Self::new(Kind::GpuMemory, format!("out of GPU memory: {need}"))
    }

    /// Makes the error for a device that is not available or cannot do the work.
    pub fn device(message: impl Into<String>) -> Self {
        Self::new(Kind::Device, message)
    }

    /// Makes the error for work that the user stopped.
    pub fn interrupted() -> Self {
        Self::new(Kind::Interrupted, "interrupted")
    }

    /// Makes the error for a failed write to stdout; a closed pipe ends the program silently.
    pub fn stdout(source: &io::Error) -> Self {
        match source.kind() {
            ErrorKind::BrokenPipe => Self::new(Kind::Closed, "stdout was closed"),
            _ => Self::failed(format!("cannot write to stdout: {source}"))
                .hint("free some disk space, or redirect the output elsewhere"),
        }
    }

    /// Makes the error for a failed input or output operation on `path`; `doing` is its verb, such as `read`.
    pub fn io(path: &Path, doing: &str, source: &io::Error) -> Self {
        let error = Self::failed(format!("cannot {doing} {}: {source}", path.display()));
        let hint = match source.kind() {
            ErrorKind::StorageFull => "free some disk space, or write the output elsewhere",
            ErrorKind::PermissionDenied => "check the permissions of the file and its folder",
            ErrorKind::NotFound => "check that the path exists",
            ErrorKind::FileTooLarge => {
                "raise the file size limit (`ulimit -f`), or write to another file system"
            }
            ErrorKind::UnexpectedEof => {
                "the file was truncated; make sure that no other program writes it, and start again"
            }
            _ if source.raw_os_error() == Some(libc::EFAULT) => {
                "an input file was truncated while it was read; make sure that no other program writes it, and start again"
            }
            _ => "check that the path is correct and that its disk works",
        };
        error.hint(hint)
    }

    /// Adds the advice that is printed as `hint: ...`.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Adds the advice unless there is some already.
    #[must_use]
    pub fn or_hint(mut self, hint: impl Into<String>) -> Self {
        self.hint.get_or_insert_with(|| hint.into());
        self
    }

    /// Puts `context: ` in front of the message, unless the user stopped the work.
    #[must_use]
    pub fn context(mut self, context: impl fmt::Display) -> Self {
        if self.kind == Kind::Interrupted {
            return self;
        }
        self.message = format!("{context}: {}", self.message);
        self
    }

    /// Returns the text of the hint. Every failure with exit code 1 has one.
    pub fn advice(&self) -> Option<&str> {
        let default = (self.exit_code() == 1).then_some(DEFECT);
        self.hint.as_deref().or(default)
    }

    /// Returns the kind of failure.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Returns the process's exit code.
    pub fn exit_code(&self) -> u8 {
        match self.kind {
            Kind::Failed | Kind::GpuMemory => 1,
            Kind::Usage => 2,
            Kind::Device => 3,
            Kind::Interrupted => 130,
            Kind::Closed => 0,
        }
    }
}

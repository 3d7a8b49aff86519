//! The one error type: what went wrong, what to do about it, and the exit code it ends the program with.
//!
//! Nearly every failure ends as `error: ...` and `hint: ...` on stderr. So an error is a kind (the
//! exit code, and what a caller may branch on), a message and an optional hint, rather than an enum
//! per area.

use std::fmt;
use std::path::Path;

/// What a caller can tell failures apart by, the exit code included.
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
    /// The reader of stdout has seen enough (`| head`): a quiet end, exit code 0.
    Closed,
}

/// A failure with its message, its hint and its exit code.
#[derive(Debug, thiserror::Error)]
pub struct Error {
    kind: Kind,
    message: String,
    hint: Option<String>,
}

/// The crate's result type.
pub type Result<T> = std::result::Result<T, Error>;

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
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

    /// Bad input or a failed check.
    pub fn failed(message: impl Into<String>) -> Self {
        Self::new(Kind::Failed, message)
    }

    /// Wrong use of the command line.
    pub fn usage(message: impl Into<String>) -> Self {
        Self::new(Kind::Usage, message)
    }

    /// A GPU has too little free memory for what `need` names.
    pub fn gpu_memory(need: impl fmt::Display) -> Self {
        Self::new(Kind::GpuMemory, format!("out of GPU memory: {need}"))
    }

    /// The requested device is not available.
    pub fn device(message: impl Into<String>) -> Self {
        Self::new(Kind::Device, message)
    }

    /// The user asked the program to stop.
    pub fn interrupted() -> Self {
        Self::new(Kind::Interrupted, "interrupted")
    }

    /// Results cannot be written to stdout.
    pub fn stdout(source: &std::io::Error) -> Self {
        match source.kind() {
            std::io::ErrorKind::BrokenPipe => Self::new(Kind::Closed, "stdout was closed"),
            _ => Self::failed(format!("cannot write to stdout: {source}")),
        }
    }

    /// An input/output failure on `path`.
    pub fn io(path: &Path, doing: &str, source: &std::io::Error) -> Self {
        let error = Self::failed(format!("cannot {doing} {}: {source}", path.display()));
        match source.kind() {
            std::io::ErrorKind::StorageFull => {
                error.hint("free some space, or choose another place for the output")
            }
            std::io::ErrorKind::PermissionDenied => {
                error.hint("check the permissions of the file and of its folder")
            }
            std::io::ErrorKind::NotFound => error.hint("check the path"),
            _ => error,
        }
    }

    /// Adds the advice printed as `hint: ...`.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Puts `context: ` in front of the message.
    #[must_use]
    pub fn context(mut self, context: impl fmt::Display) -> Self {
        self.message = format!("{context}: {}", self.message);
        self
    }

    /// The advice, if there is any.
    pub fn advice(&self) -> Option<&str> {
        self.hint.as_deref()
    }

    /// What kind of failure this is.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The process exit code.
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

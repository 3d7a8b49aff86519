//! The crate's one error type: a kind that callers may match, a message, an optional hint and an optional source.
//!
//! One type serves the whole crate instead of an enum per area: nearly every failure is shown to a person, and where a
//! caller branches, the kind suffices.
//!
//! A setting that a message or hint names stands in angle brackets, as in ⟨device=cpu⟩, so that each user of the library can
//! write it its own way: [`wording::settings`](crate::wording::settings) replaces them. The command line writes flags.

use std::fmt;
use std::io;
use std::path::Path;

/// What kind of failure it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// A file, folder, tensor or section that is needed does not exist.
    NotFound,
    /// The contents of an input, such as a text or a `config.json`, cannot be used.
    Invalid,
    /// A setting or an argument is wrong.
    Usage,
    /// A file is truncated, was changed, or has contents that no version of its program writes.
    Damaged,
    /// Inputs that are valid do not belong together, such as a model and the artifact of another.
    Mismatch,
    /// The input is valid, but kvsmith cannot do this with it.
    Unsupported,
    /// There is too little free memory, on the machine or on its GPU.
    Memory,
    /// A device is not available, has failed, or cannot do the work.
    Device,
    /// The operating system refused: a full disk, missing permissions, a file that another process holds.
    System,
    /// The work was cancelled.
    Interrupted,
    /// The reader of an output has closed it (`| head`); there is nobody to tell.
    Closed,
    /// A failure that no input should be able to cause.
    Internal,
}

impl ErrorKind {
    /// Returns its name, as in the documents of `--json`.
    pub fn name(self) -> &'static str {
        match self {
            Self::NotFound => "not found",
            Self::Invalid => "invalid input",
            Self::Usage => "usage",
            Self::Damaged => "damaged",
            Self::Mismatch => "mismatch",
            Self::Unsupported => "unsupported",
            Self::Memory => "out of memory",
            Self::Device => "device",
            Self::System => "system",
            Self::Interrupted => "interrupted",
            Self::Closed => "closed",
            Self::Internal => "internal",
        }
    }
}

/// A failure: its kind, its message, an optional hint, and the failure of the operating system that caused it, if one did.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    kind: ErrorKind,
    message: String,
    hint: Option<String>,
    source: Option<io::Error>,
}

/// The hint for a failure that no input should be able to cause.
pub const DEFECT: &str = "this may be a bug in kvsmith; please report it with the command and its output";

/// The crate's result type.
pub type Result<T> = std::result::Result<T, Error>;

impl From<ndarray::ShapeError> for Error {
    fn from(e: ndarray::ShapeError) -> Self {
        Self::internal(e.to_string())
    }
}

impl Error {
    fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
            hint: None,
            source: None,
        }
    }

    /// Makes the error for something that does not exist.
    pub fn not_found(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::NotFound, message)
    }

    /// Makes the error for an input whose contents cannot be used.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Invalid, message)
    }

    /// Makes the error for a wrong setting or argument.
    pub fn usage(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Usage, message)
    }

    /// Makes the error for a file that is not as its program wrote it.
    pub fn damaged(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Damaged, message)
    }

    /// Makes the error for inputs that do not belong together.
    pub fn mismatch(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Mismatch, message)
    }

    /// Makes the error for a valid input that kvsmith cannot handle.
    pub fn unsupported(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Unsupported, message)
    }

    /// Makes the error for too little free memory.
    pub fn memory(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Memory, message)
    }

    /// Makes the error for a GPU with too little free memory for `need`.
    pub fn gpu_memory(need: impl fmt::Display) -> Self {
        Self::memory(format!("out of GPU memory: {need}"))
    }

    /// Makes the error for what the operating system refused.
    pub fn system(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::System, message)
    }

    /// Makes the error for what no input should be able to cause.
    pub fn internal(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Internal, message)
    }

    /// Makes the error for a device that is not available or cannot do the work.
    pub fn device(message: impl Into<String>) -> Self {
        Self::new(ErrorKind::Device, message)
    }

    /// Makes the error for cancelled work.
    pub fn interrupted() -> Self {
        Self::new(ErrorKind::Interrupted, "interrupted")
    }

    /// Makes the error for a failed write to stdout; a closed pipe ends the program silently.
    pub fn stdout(source: &io::Error) -> Self {
        match source.kind() {
            io::ErrorKind::BrokenPipe => Self::new(ErrorKind::Closed, "stdout was closed"),
            _ => Self::system(format!("cannot write to stdout: {source}"))
                .hint("free some disk space, or redirect the output elsewhere"),
        }
    }

    /// Makes the error for a failed input or output operation on `path`; `doing` is its verb, such as `read`.
    pub fn io(path: &Path, doing: &str, source: &io::Error) -> Self {
        let kind = match source.kind() {
            io::ErrorKind::NotFound => ErrorKind::NotFound,
            io::ErrorKind::UnexpectedEof => ErrorKind::Damaged,
            io::ErrorKind::InvalidData => ErrorKind::Invalid,
            io::ErrorKind::OutOfMemory => ErrorKind::Memory,
            _ => ErrorKind::System,
        };
        let error = Self {
            source: Some(again(source)),
            ..Self::new(kind, format!("cannot {doing} {}: {source}", path.display()))
        };
        let hint = match source.kind() {
            io::ErrorKind::StorageFull => "free some disk space, or write the output elsewhere",
            io::ErrorKind::PermissionDenied => "check the permissions of the file and its folder",
            io::ErrorKind::NotFound => "check that the path exists",
            io::ErrorKind::FileTooLarge => {
                "raise the file size limit (`ulimit -f`), or write to another file system"
            }
            io::ErrorKind::UnexpectedEof => {
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
        if self.kind == ErrorKind::Interrupted {
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
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// Returns the exit code of a process that ends with this failure.
    pub fn exit_code(&self) -> u8 {
        match self.kind {
            ErrorKind::Usage => 2,
            ErrorKind::Device => 3,
            ErrorKind::Interrupted => 130,
            ErrorKind::Closed => 0,
            _ => 1,
        }
    }
}

/// Returns an error of the operating system again, as a value.
fn again(e: &io::Error) -> io::Error {
    match e.raw_os_error() {
        Some(code) => io::Error::from_raw_os_error(code),
        None => io::Error::new(e.kind(), e.to_string()),
    }
}

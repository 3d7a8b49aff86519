//! Ctrl-C: the first signal asks the running work to stop at its next safe point, and ends the program if that takes too
//! long; the second ends it at once. While a chat replies to a person, the first Ctrl-C ends the reply alone.

use std::sync::LazyLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use signal_hook::iterator::Signals;

use super::terminal::say;
use crate::env::{Cancel, Env};
use crate::error::{Error, ErrorKind, Result};
use crate::unfinished;

/// Whether a signal asked the command to stop.
static STOP: AtomicBool = AtomicBool::new(false);

/// Stops the work of the command, or the reply that is being made.
static CANCEL: LazyLock<Cancel> = LazyLock::new(Cancel::default);

/// Whether the first Ctrl-C ends a reply, and whether it has.
static REPLIES: AtomicBool = AtomicBool::new(false);
static REPLY_ENDS: AtomicBool = AtomicBool::new(false);

/// Whether a result is being saved, which is not cut short.
static SAVING: AtomicBool = AtomicBool::new(false);

/// How long the running work may take to reach its next safe point before the program ends.
const GRACE: Duration = Duration::from_secs(3);

/// Returns the surroundings of the command's work, which signals stop.
pub fn env() -> Env {
    Env {
        cancel: CANCEL.clone(),
        ..Env::default()
    }
}

/// Installs the handler of SIGINT, SIGTERM and SIGHUP, and ignores SIGXFSZ, so that a write beyond the file size limit
/// is reported like any other error; called once by `main`.
///
/// A signal that the parent process told this one to ignore stays ignored, as `nohup` expects.
pub fn install() {
    let signals = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP];
    let installed = Signals::new(signals.into_iter().filter(|signal| !is_ignored(*signal)));
    let installed = installed.and_then(|mut signals| {
        let wait = move || signals.forever().for_each(received);
        std::thread::Builder::new().name("ctrl-c".to_owned()).spawn(wait)
    });
    if let Err(e) = installed {
        say(&format!(
            "warning: Ctrl-C will end the program without removing temporary files: {e}"
        ));
    }
    // SAFETY: SIG_IGN is a valid disposition of this signal.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

/// Does what a signal asks for, on a thread of its own.
fn received(signal: libc::c_int) {
    let ends_reply = signal == libc::SIGINT && REPLIES.load(Ordering::SeqCst);
    if ends_reply && !REPLY_ENDS.swap(true, Ordering::SeqCst) {
        CANCEL.cancel();
        return;
    }
    if STOP.swap(true, Ordering::SeqCst) {
        end();
    }
    CANCEL.cancel();
    let late = || {
        std::thread::sleep(GRACE);
        while SAVING.load(Ordering::SeqCst) {
            std::thread::sleep(GRACE / 10);
        }
        end()
    };
    // If no thread can be started, this thread waits instead, and a second signal has no effect.
    if std::thread::Builder::new().spawn(late).is_err() {
        late();
    }
}

/// The saving of a result. While it lives, the program does not end because its work takes long to stop; a second signal
/// still ends it.
pub struct Saving(());

impl Saving {
    /// Begins to save a result.
    pub fn begin() -> Self {
        SAVING.store(true, Ordering::SeqCst);
        Self(())
    }
}

impl Drop for Saving {
    fn drop(&mut self) {
        SAVING.store(false, Ordering::SeqCst);
    }
}

/// A reply to a person. While it lives, the first Ctrl-C ends this reply and not the program.
pub struct Reply(());

impl Reply {
    /// Begins a reply.
    pub fn begin() -> Self {
        REPLY_ENDS.store(false, Ordering::SeqCst);
        REPLIES.store(true, Ordering::SeqCst);
        Self(())
    }

    /// Tells whether the person asked to end the reply, and not the program.
    pub fn is_ended(&self) -> bool {
        REPLY_ENDS.load(Ordering::SeqCst) && !STOP.load(Ordering::SeqCst)
    }
}

impl Drop for Reply {
    fn drop(&mut self) {
        REPLIES.store(false, Ordering::SeqCst);
        REPLY_ENDS.store(false, Ordering::SeqCst);
        CANCEL.clear();
        // What stops the whole command may have come meanwhile.
        if STOP.load(Ordering::SeqCst) {
            CANCEL.cancel();
        }
    }
}

/// Ends the program without waiting for its threads; no unfinished file stays.
fn end() -> ! {
    unfinished::remove_all();
    say(&format!("error: {}", Error::interrupted()));
    // SAFETY: the call ends the process. `exit` would run the exit handlers of C libraries while threads still use them.
    unsafe { libc::_exit(Error::interrupted().exit_code().into()) }
}

/// Says whether the process ignores `signal`.
fn is_ignored(signal: libc::c_int) -> bool {
    // SAFETY: with a null new action the call only fills `old`, a plain struct.
    unsafe {
        let mut old: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, std::ptr::null(), &mut old) == 0 && old.sa_sigaction == libc::SIG_IGN
    }
}

/// Tells whether the user stopped the work after `done` steps; a stop before the first step stays an error.
pub fn is_stopped(result: Result<()>, done: usize) -> Result<bool> {
    match result {
        // What was measured so far is still reported.
        Err(e) if e.kind() == ErrorKind::Interrupted && done > 0 => Ok(true),
        other => other.map(|()| false),
    }
}

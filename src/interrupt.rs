//! Ctrl-C: the first signal asks the running work to stop at its next safe point, and ends the program if that takes too
//! long; the second ends it at once.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::error::{Error, Result};
use crate::progress::say;
use crate::unfinished;

static STOP: AtomicBool = AtomicBool::new(false);

/// How long the running work may take to reach its next safe point before the program ends.
const GRACE: Duration = Duration::from_secs(3);

/// Installs the handler of SIGINT, SIGTERM and SIGHUP, and ignores SIGXFSZ, so that a write beyond the file size limit
/// is reported like any other error; called once by `main`.
///
/// A signal that the parent process told this one to ignore stays ignored, as `nohup` expects.
pub fn install() {
    let handler = || {
        if STOP.swap(true, Ordering::SeqCst) {
            end();
        }
        let late = || {
            std::thread::sleep(GRACE);
            end()
        };
        // If no thread can be started, this thread waits instead, and a second signal has no effect.
        if std::thread::Builder::new().spawn(late).is_err() {
            late();
        }
    };
    let ignored: Vec<libc::c_int> = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP]
        .into_iter()
        .filter(|s| is_ignored(*s))
        .collect();
    if let Err(e) = ctrlc::set_handler(handler) {
        say(&format!(
            "warning: Ctrl-C will end the program without removing temporary files: {e}"
        ));
    }
    for signal in ignored.into_iter().chain([libc::SIGXFSZ]) {
        // SAFETY: SIG_IGN is a valid disposition of these signals.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
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

/// Says whether the user asked to stop.
pub fn requested() -> bool {
    STOP.load(Ordering::SeqCst)
}

/// Fails if the user asked to stop.
pub fn check() -> Result<()> {
    if requested() {
        Err(Error::interrupted())
    } else {
        Ok(())
    }
}

/// Returns `Break` if the user asked to stop: the form of [`check`] for callbacks.
pub fn flow() -> ControlFlow<()> {
    if requested() {
        ControlFlow::Break(())
    } else {
        ControlFlow::Continue(())
    }
}

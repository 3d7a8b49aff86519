//! Ctrl-C: the first signal asks the running work to stop at its next safe point, the second ends the
//! process at once.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{Error, Result};

static STOP: AtomicBool = AtomicBool::new(false);

/// Installs the handler of SIGINT, SIGTERM and SIGHUP; called once by `main`.
///
/// A signal that the parent process told this one to ignore stays ignored, as `nohup` expects.
pub fn install() {
    let handler = || {
        if STOP.swap(true, Ordering::SeqCst) {
            std::process::exit(130);
        }
    };
    let ignored: Vec<libc::c_int> = [libc::SIGINT, libc::SIGTERM, libc::SIGHUP]
        .into_iter()
        .filter(|s| is_ignored(*s))
        .collect();
    if let Err(e) = ctrlc::set_handler(handler) {
        crate::progress::say(&format!(
            "warning: Ctrl-C will end the program without cleaning up: {e}"
        ));
    }
    for signal in ignored {
        // SAFETY: SIG_IGN is a valid disposition of these signals.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
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

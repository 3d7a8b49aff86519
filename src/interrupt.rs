//! Ctrl-C: the first one asks the work to stop at the next safe point, the second one ends the
//! process at once.

use std::ops::ControlFlow;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{Error, Result};

static STOP: AtomicBool = AtomicBool::new(false);

/// Installs the handler of SIGINT, SIGTERM and SIGHUP; called once by `main`.
///
/// A signal that the parent had us ignore stays ignored, so that `nohup` keeps its meaning.
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

/// Whether the process ignores `signal`.
fn is_ignored(signal: libc::c_int) -> bool {
    // SAFETY: a null action only asks; `old` is a plain struct that the call fills.
    unsafe {
        let mut old: libc::sigaction = std::mem::zeroed();
        libc::sigaction(signal, std::ptr::null(), &mut old) == 0 && old.sa_sigaction == libc::SIG_IGN
    }
}

/// Whether the user asked to stop.
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

/// The same for callbacks: `Break` if the user asked to stop.
pub fn flow() -> ControlFlow<()> {
    if requested() {
        ControlFlow::Break(())
    } else {
        ControlFlow::Continue(())
    }
}

//! Ctrl-C: the first one asks the work to stop at the next safe point, the second one ends the
//! process at once.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{Error, Result};

static STOP: AtomicBool = AtomicBool::new(false);

/// Installs the signal handler; called once by `main`.
pub fn install() {
    let handler = || {
        if STOP.swap(true, Ordering::SeqCst) {
            std::process::exit(130);
        }
    };
    if let Err(e) = ctrlc::set_handler(handler) {
        eprintln!("warning: Ctrl-C will end the program without cleaning up: {e}");
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

//! What the library asks of its host: whom to tell how work goes, when to stop it, and what it may start.
//!
//! Nothing here is state of the process. A host that does several things at a time gives each an [`Env`] of its own.

use std::any::Any;
use std::cell::RefCell;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{Error, Result};

/// Whom work tells how it goes. What a reporter does not implement is not told.
pub trait Reporter: Sync {
    /// Something is probably not as the user wants it.
    fn warn(&self, text: &str) {
        let _ = text;
    }

    /// Something that the user should know.
    fn note(&self, text: &str) {
        let _ = text;
    }

    /// A detail of a step.
    fn detail(&self, text: &str) {
        let _ = text;
    }

    /// Work begins that has `total` parts of a kind, such as `heads`.
    fn progress(&self, total: u64, unit: &str) -> Box<dyn Progress> {
        let _ = (total, unit);
        Box::new(Silent)
    }

    /// A result is being saved: until the returned value is dropped, the host should not end the process for work that takes
    /// long to stop.
    fn saving(&self) -> Box<dyn Any> {
        Box::new(())
    }
}

/// The progress of one piece of work; it ends when this is dropped.
pub trait Progress {
    /// Tells what is being done.
    fn stage(&self, text: String) {
        let _ = text;
    }

    /// Tells which layer (counted from 0) is being processed, and what is done to it.
    fn layer(&self, layer: usize, n_layers: usize, what: &str) {
        let last = n_layers.saturating_sub(1);
        self.stage(format!("layer {layer} (0-{last}): {what}"));
    }

    /// Tells that so many more parts are done.
    fn advance(&self, units: u64) {
        let _ = units;
    }

    /// Tells something in a line of its own.
    fn line(&self, text: &str) {
        let _ = text;
    }

    /// Tells a detail in a line of its own.
    fn detail(&self, text: &str) {
        let _ = text;
    }
}

/// Tells nobody.
#[derive(Clone, Copy, Debug, Default)]
pub struct Silent;

impl Reporter for Silent {}

impl Progress for Silent {}

/// A wish to stop work, which other threads may have. The work ends with an error at its next safe point.
#[derive(Clone, Debug, Default)]
pub struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// Asks the work to stop.
    pub fn cancel(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    /// Tells whether the work was asked to stop.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }

    /// Takes the wish back, so that later work runs.
    pub fn clear(&self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

/// How work on hostile input, such as the chat template of a checkpoint, is kept from harming the process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Isolation {
    /// In a fork of the process, with limits on memory and time.
    #[default]
    Fork,
    /// On a thread of the process: for hosts that may not fork. Only a template's steps are limited: input that asks for more
    /// memory than there is can end the process, and work that does not end cannot be cancelled.
    Thread,
}

/// The surroundings of a piece of work.
///
/// ```
/// use kvsmith::{Corpus, CorpusOptions, CorpusSource, Env, ErrorKind, Model};
///
/// let model = Model::open("calib-data/model".as_ref())?;
/// let text = CorpusSource::text(["calib-data/text.txt".into()]);
/// let mut cut = CorpusOptions::default();
/// (cut.seq_len, cut.max_tokens) = (Some(64), 256);
/// let read = || Corpus::load(&model.path, model.config(), &text, &cut);
///
/// let env = Env::default();
/// let cancel = env.cancel.clone(); // for another thread
/// cancel.cancel();
/// assert_eq!(env.during(read).unwrap_err().kind(), ErrorKind::Interrupted);
/// assert!(read().is_ok()); // other work goes on
/// # Ok::<(), kvsmith::Error>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct Env {
    /// Stops the work.
    pub cancel: Cancel,
    /// How hostile input is kept in bounds.
    pub isolation: Isolation,
}

thread_local! {
    static CURRENT: RefCell<Option<Env>> = const { RefCell::new(None) };
}

impl Env {
    /// Does `work` in these surroundings: all calls of the library on this thread are stopped by its [`Cancel`]. Work
    /// outside of any has the default ones, which nobody stops.
    pub fn during<T>(&self, work: impl FnOnce() -> T) -> T {
        /// Restores the surroundings, also if the work panics.
        struct Restored(Option<Env>);
        impl Drop for Restored {
            fn drop(&mut self) {
                CURRENT.replace(self.0.take());
            }
        }
        let _restored = Restored(CURRENT.replace(Some(self.clone())));
        work()
    }

    /// Returns the surroundings of the calling thread, such as for another thread that does a part of its work.
    pub fn current() -> Self {
        CURRENT.with_borrow(Option::clone).unwrap_or_default()
    }
}

/// Tells whether the calling thread's work was asked to stop.
pub fn is_cancelled() -> bool {
    CURRENT.with_borrow(|env| env.as_ref().is_some_and(|env| env.cancel.is_cancelled()))
}

/// Fails if the calling thread's work was asked to stop.
pub fn check() -> Result<()> {
    if is_cancelled() {
        Err(Error::interrupted())
    } else {
        Ok(())
    }
}

/// Returns `Break` if the calling thread's work was asked to stop: the form of [`check`] for callbacks.
pub fn flow() -> ControlFlow<()> {
    if is_cancelled() {
        ControlFlow::Break(())
    } else {
        ControlFlow::Continue(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_thread_has_surroundings_of_its_own() {
        let (outer, inner) = (Env::default(), Env::default());
        outer.during(|| {
            inner.cancel.cancel();
            assert!(check().is_ok());
            assert!(inner.during(check).is_err());
            std::thread::scope(|scope| {
                // Another thread is outside of any, unless it is told.
                assert!(scope.spawn(check).join().unwrap().is_ok());
                let here = Env::current();
                outer.cancel.cancel();
                assert!(scope.spawn(move || here.during(check)).join().unwrap().is_err());
            });
            assert_eq!(flow(), ControlFlow::Break(()));
            outer.cancel.clear();
            assert!(check().is_ok());
        });
    }
}

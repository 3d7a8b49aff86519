//! Work on hostile input in a process of its own, with limits on memory and time.
//!
//! The process is a fork that runs no other program, so it serves every user of the library alike: the `kvsmith`
//! binary, tests, bindings. A fork has only the thread that made it; the work may allocate, which C libraries allow
//! in forks of multithreaded processes, and should it wait for a lock that another thread held, the time limit
//! ends it.

use std::fs;
use std::io::{self, PipeReader, PipeWriter, Read, Write, pipe};
use std::os::fd::AsRawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::interrupt;

/// Bytes of stack for the work. Only the part in use takes memory.
const STACK: usize = 1 << 28;

/// Seconds of processor time for the work.
const SECONDS: u64 = 2;

/// Most time that passes until the work is given up, on a busy machine too.
const PATIENCE: Duration = Duration::from_secs(8);

/// Last byte of what the process sends when the work has succeeded or failed. UTF-8 has neither; without one of
/// them, the process has been ended.
const DONE: u8 = 0xff;
const FAILED: u8 = 0xfe;

/// Does `work` in another process, which may take `memory` bytes on top of a large stack and a few seconds; returns
/// its text.
///
/// Memory is limited where `/proc` tells how much is mapped already: on Linux. Elsewhere only time is.
///
/// # Errors
/// The text of the work's own error; work that panics, exceeds a limit or crashes; an interrupt, which ends it
/// at once; no process or memory for it.
pub fn run(
    memory: usize,
    work: impl FnOnce() -> std::result::Result<String, String> + Send,
) -> Result<String> {
    thread::scope(|scope| {
        let thread = thread::Builder::new().stack_size(STACK);
        let handle = thread
            .spawn_scoped(scope, || in_fork(memory, work))
            .map_err(none)?;
        handle.join().unwrap_or_else(|_| Err(crashed()))
    })
}

fn none(e: io::Error) -> Error {
    Error::failed(format!("no process for it: {e}"))
}

fn crashed() -> Error {
    Error::failed("its engine failed")
}

fn endless() -> Error {
    Error::failed("it does not come to an end")
}

/// Forks this thread, which becomes the whole of the new process, and waits for it.
fn in_fork(memory: usize, work: impl FnOnce() -> std::result::Result<String, String>) -> Result<String> {
    /// Held until the writing end is closed here, so that no other fork inherits it and keeps the pipe open.
    static FORKING: Mutex<()> = Mutex::new(());
    let lock = FORKING.lock().unwrap_or_else(PoisonError::into_inner);
    let (reader, writer) = pipe().map_err(none)?;
    // SAFETY: the masks are plain data that the calls fill. The new process stays on this thread's stack, blocks all
    // signals, so that no handler of the program runs in it, and ends with `_exit`.
    let child = unsafe {
        let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
        let child = libc::fork();
        if child == 0 {
            work_and_exit(writer, memory, work);
        }
        let failed = io::Error::last_os_error();
        libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut());
        if child < 0 {
            return Err(none(failed));
        }
        child
    };
    drop(writer);
    drop(lock);
    let sent = receive(reader);
    // SAFETY: the process is a child that has not been waited for, so that its id is its own.
    let status = unsafe {
        if sent.is_err() {
            libc::kill(child, libc::SIGKILL);
        }
        let mut status = 0;
        while libc::waitpid(child, &mut status, 0) < 0
            && io::Error::last_os_error().kind() == io::ErrorKind::Interrupted
        {}
        status
    };
    let mut bytes = sent?;
    let last = bytes.pop();
    let text = String::from_utf8(bytes).map_err(|_| crashed());
    match last {
        Some(DONE) => text,
        Some(FAILED) => Err(Error::failed(text?)),
        // The system kills what has used up its processor time.
        _ if libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGKILL => Err(endless()),
        _ => Err(Error::failed(format!(
            "it takes more than {} MB of memory or nests too deeply",
            memory >> 20
        ))),
    }
}

/// Returns all that the process sends until it ends.
fn receive(mut pipe: PipeReader) -> Result<Vec<u8>> {
    let (start, mut bytes, mut buffer) = (Instant::now(), Vec::new(), vec![0; 1 << 16]);
    loop {
        interrupt::check()?;
        let mut poll = libc::pollfd {
            fd: pipe.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: the one element is valid; the call blocks for 20 ms at most.
        if unsafe { libc::poll(&mut poll, 1, 20) } > 0 {
            match pipe.read(&mut buffer).map_err(none)? {
                0 => return Ok(bytes),
                n => bytes.extend_from_slice(&buffer[..n]),
            }
        } else if start.elapsed() > PATIENCE {
            return Err(endless());
        }
    }
}

/// The life of the new process.
fn work_and_exit(
    mut pipe: PipeWriter,
    memory: usize,
    work: impl FnOnce() -> std::result::Result<String, String>,
) -> ! {
    // What the runtime says about a crash is nobody's concern.
    // SAFETY: stderr is not used as an owned descriptor.
    unsafe { libc::close(libc::STDERR_FILENO) };
    let limited = catch_unwind(AssertUnwindSafe(|| {
        set_limits(memory).map_err(|e| format!("its limits cannot be set: {e}"))?;
        work()
    }));
    let (text, last) = match limited {
        Ok(Ok(text)) => (text, DONE),
        Ok(Err(text)) => (text, FAILED),
        Err(_) => (crashed().to_string(), FAILED),
    };
    let _ = pipe
        .write_all(text.as_bytes())
        .and_then(|()| pipe.write_all(&[last]));
    // SAFETY: ends the process without running anything that belongs to its parent.
    unsafe { libc::_exit(0) }
}

/// Limits this process: memory, processor time, no core dump, and no life beyond its parent's.
fn set_limits(memory: usize) -> io::Result<()> {
    let mapped = fs::read_to_string("/proc/self/statm").ok();
    let pages: Option<u64> = mapped.and_then(|text| text.split(' ').next()?.parse().ok());
    // SAFETY: `limit` is a plain struct that `getrlimit` fills; the other calls take numbers.
    unsafe {
        #[cfg(target_os = "linux")]
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        let page = libc::sysconf(libc::_SC_PAGESIZE) as u64;
        let space = pages.map(|pages| (pages * page).saturating_add(memory as u64));
        for (resource, value) in [
            (libc::RLIMIT_AS, space),
            (libc::RLIMIT_CPU, Some(SECONDS)),
            (libc::RLIMIT_CORE, Some(0)),
        ] {
            let mut limit: libc::rlimit = std::mem::zeroed();
            let known = libc::getrlimit(resource, &mut limit) == 0;
            let value = value.unwrap_or(limit.rlim_max).min(limit.rlim_max);
            (limit.rlim_cur, limit.rlim_max) = (value, value);
            if !known || libc::setrlimit(resource, &limit) != 0 {
                return Err(io::Error::last_os_error());
            }
        }
    }
    Ok(())
}

//! Work on untrusted input in a separate process, with limits on memory and time.
//!
//! The process is a fork that executes no other program, so every user of the library can have it: the `kvsmith`
//! binary, tests, bindings. A fork contains only the thread that made it. The work may allocate memory, which C
//! libraries allow in a fork of a multithreaded process. If the work waits for a lock that another thread held at the
//! time of the fork, it uses no processor time; the parent then ends it once three times the limit have passed on the
//! clock.

use std::fs;
use std::io::{self, PipeReader, PipeWriter, Read, Write, pipe};
use std::os::fd::AsRawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::env::{self, Env, Isolation};
use crate::error::{Error, Result};

/// Bytes of stack for the work. Only the part in use takes memory.
const STACK: usize = 1 << 28;

/// Factor between the limit of processor time and the time on the clock that the work may take.
const PATIENCE: u32 = 3;

/// First byte that the process sends when the work has succeeded; the length of the result follows in eight bytes, then
/// the result.
const DONE: u8 = 1;

/// First byte that the process sends when the work has failed; the length of the message and the message follow.
const FAILED: u8 = 2;

/// The limits on the work.
#[derive(Clone, Copy, Debug)]
pub struct Allowance {
    /// Bytes of memory beyond what the process has when the work starts, and beyond its stack.
    pub memory_bytes: usize,
    /// Seconds of processor time.
    pub seconds: u32,
}

/// What the work returns: bytes, or what went wrong.
pub type Outcome = std::result::Result<Vec<u8>, String>;

/// Does `work` in another process within `limits`; returns the bytes that the work returns.
///
/// Memory is limited only where `/proc` tells how much is already mapped, that is on Linux; elsewhere, only time is
/// limited.
///
/// # Errors
/// The text of the work's own error; work that panics, exceeds a limit or crashes; an interrupt, which ends the work at
/// once; a process or thread that cannot be started.
pub fn run(limits: Allowance, work: impl FnOnce() -> Outcome + Send) -> Result<Vec<u8>> {
    let env = Env::current();
    let work = || match env.isolation {
        Isolation::Fork => env.during(|| in_fork(limits, work)),
        Isolation::Thread => catch_unwind(AssertUnwindSafe(work))
            .map_err(|_| crashed())?
            .map_err(Error::invalid),
    };
    thread::scope(|scope| {
        let thread = thread::Builder::new().stack_size(STACK);
        let handle = thread.spawn_scoped(scope, work).map_err(none)?;
        handle.join().unwrap_or_else(|_| Err(crashed()))
    })
}

fn none(e: io::Error) -> Error {
    Error::system(format!("cannot start its process: {e}"))
}

fn crashed() -> Error {
    Error::invalid("its library crashed")
}

fn endless() -> Error {
    Error::invalid("it does not finish")
}

/// Forks and waits for the new process, which consists of a copy of this thread alone.
fn in_fork(limits: Allowance, work: impl FnOnce() -> Outcome) -> Result<Vec<u8>> {
    let (child, reader) = fork(limits, work)?;
    let sent = receive(reader, Duration::from_secs(limits.seconds.into()) * PATIENCE);
    let status = reap(child, sent.is_err());
    let sent = sent?;
    if let Some((head, bytes)) = sent.split_first_chunk::<9>()
        && head[1..] == (bytes.len() as u64).to_le_bytes()
    {
        return match head[0] {
            DONE => Ok(bytes.to_vec()),
            _ => Err(Error::invalid(String::from_utf8_lossy(bytes))),
        };
    }
    // The system kills a process that has used up its processor time.
    if libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGKILL {
        return Err(endless());
    }
    let mb = limits.memory_bytes >> 20;
    let what = format!(
        "it crashed, most likely because it needs more than {mb} MB of memory or is nested too deeply"
    );
    Err(Error::invalid(what))
}

/// Starts the process; returns its id and the pipe through which it sends its result.
fn fork(limits: Allowance, work: impl FnOnce() -> Outcome) -> Result<(libc::pid_t, PipeReader)> {
    /// Held until the writing end is closed here, so that no other fork inherits it and keeps the pipe open.
    static FORKING: Mutex<()> = Mutex::new(());
    let _lock = FORKING.lock().unwrap_or_else(PoisonError::into_inner);
    let (reader, writer) = pipe().map_err(none)?;
    // SAFETY: the masks are plain data that the calls fill. The new process stays on this thread's stack, blocks all
    // signals, so that no handler of the program runs in it, and ends with `_exit`.
    unsafe {
        let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut before);
        let child = libc::fork();
        if child == 0 {
            work_and_exit(writer, limits, work);
        }
        let failed = io::Error::last_os_error();
        libc::pthread_sigmask(libc::SIG_SETMASK, &before, std::ptr::null_mut());
        if child < 0 {
            return Err(none(failed));
        }
        Ok((child, reader))
    }
}

/// Returns everything that the process sends until it ends.
fn receive(mut pipe: PipeReader, patience: Duration) -> Result<Vec<u8>> {
    let (start, mut bytes, mut buffer) = (Instant::now(), Vec::new(), vec![0; 1 << 16]);
    loop {
        env::check()?;
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
        } else if start.elapsed() > patience {
            return Err(endless());
        }
    }
}

/// Waits until a child has ended, after killing it if `killed` is set; returns its status.
fn reap(child: libc::pid_t, killed: bool) -> libc::c_int {
    // SAFETY: the child has not been waited for, so that its id is its own.
    unsafe {
        if killed {
            libc::kill(child, libc::SIGKILL);
        }
        let mut status = 0;
        while libc::waitpid(child, &mut status, 0) < 0
            && io::Error::last_os_error().kind() == io::ErrorKind::Interrupted
        {}
        status
    }
}

/// Runs in the new process: sets the limits, does the work, sends the outcome and exits.
fn work_and_exit(mut pipe: PipeWriter, limits: Allowance, work: impl FnOnce() -> Outcome) -> ! {
    // The Rust runtime's messages about a crash are of no use to the user.
    // SAFETY: stderr is not used as an owned descriptor.
    unsafe { libc::close(libc::STDERR_FILENO) };
    let outcome = catch_unwind(AssertUnwindSafe(|| {
        set_limits(limits).map_err(|e| format!("its limits cannot be set: {e}"))?;
        work()
    }));
    let (kind, bytes) = match outcome {
        Ok(Ok(bytes)) => (DONE, bytes),
        Ok(Err(text)) => (FAILED, text.into_bytes()),
        Err(_) => (FAILED, crashed().to_string().into_bytes()),
    };
    let len = (bytes.len() as u64).to_le_bytes();
    for part in [&[kind][..], &len, &bytes] {
        // If a write fails, the parent sees an incomplete message and reports that the work broke off.
        let _ = pipe.write_all(part);
    }
    // SAFETY: ends the process without running anything that belongs to its parent.
    unsafe { libc::_exit(0) }
}

/// Limits this process's memory and processor time, disables core dumps, and makes the process end with its parent.
fn set_limits(limits: Allowance) -> io::Result<()> {
    let mapped = fs::read_to_string("/proc/self/statm").ok();
    let pages: Option<u64> = mapped.and_then(|text| text.split(' ').next()?.parse().ok());
    // SAFETY: `limit` is a plain struct that `getrlimit` fills; the other calls take numbers.
    unsafe {
        #[cfg(target_os = "linux")]
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
        let page = libc::sysconf(libc::_SC_PAGESIZE) as u64;
        let space = pages.map(|pages| (pages * page).saturating_add(limits.memory_bytes as u64));
        for (resource, value) in [
            (libc::RLIMIT_AS, space),
            (libc::RLIMIT_CPU, Some(limits.seconds.into())),
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

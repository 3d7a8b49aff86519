//! A team of threads that stays through a decode step.
//!
//! A step has some hundred short loops, one after the other. So that no thread has to be woken for each of them, the threads
//! of a team look for new work in a loop of their own, and sleep only between steps.
//!
//! Work is posted as a job: a number of tasks, which every thread takes one by one. A task may post a job itself; a thread
//! that waits for the end of a job takes tasks of others meanwhile. Who takes a task changes nothing in its result.

use std::any::Any;
use std::cell::Cell;
use std::hint::spin_loop;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, LazyLock, Mutex, MutexGuard, Once, PoisonError, TryLockError};
use std::thread;

use rayon::prelude::*;

/// How often a thread looks for work before it lets other programs run in between.
const PATIENCE: usize = 4096;

/// Runs `body` with a team of as many threads as the current rayon pool has, of which the calling thread is one.
///
/// There is none if that is one thread, if another thread leads the team, or if the calling thread is at work for rayon. Loops
/// of `body` that use rayon still run on the threads of its pool.
pub fn through<R>(body: impl FnOnce() -> R) -> R {
    static TEAM: LazyLock<Team> = LazyLock::new(Team::default);
    static START: Once = Once::new();
    let threads = rayon::current_num_threads();
    // The program's first thread is in the pool, and has number 0.
    if threads < 2 || rayon::current_thread_index().is_some_and(|i| i > 0) {
        return body();
    }
    START.call_once(|| {
        for i in 1..threads {
            // If a thread cannot be started, the others have more to do.
            let _ = thread::Builder::new()
                .name(format!("team-{i}"))
                .spawn(|| TEAM.serve());
        }
    });
    TEAM.lead(body)
}

/// Calls `work` for every item, on the threads of the team if the calling thread has one, else on those of the rayon pool.
///
/// # Panics
/// If `work` does.
pub fn for_each<T: Send>(items: Vec<T>, work: impl Fn(T) + Sync) {
    if items.len() < 2 {
        return items.into_iter().for_each(work);
    }
    // SAFETY: the pointer is set only while its team lives, see `Membership`.
    let Some(team) = (unsafe { OWN.get().as_ref() }) else {
        return items.into_par_iter().with_max_len(1).for_each(&work);
    };
    let items: Vec<Mutex<Option<T>>> = items.into_iter().map(|item| Mutex::new(Some(item))).collect();
    team.run(items.len(), &|i| {
        if let Some(item) = lock(&items[i]).take() {
            work(item);
        }
    });
}

/// Returns what `work` returns for every item, in their order; see [`for_each`].
///
/// # Panics
/// If `work` does.
pub fn map<T: Send, R: Send>(items: Vec<T>, work: impl Fn(T) -> R + Sync) -> Vec<R> {
    let mut out: Vec<Option<R>> = items.iter().map(|_| None).collect();
    for_each(items.into_iter().zip(&mut out).collect(), |(item, out)| {
        *out = Some(work(item))
    });
    out.into_iter().flatten().collect()
}

thread_local! {
    /// The team of this thread.
    static OWN: Cell<*const Team> = const { Cell::new(ptr::null()) };
}

/// While it lives, the thread belongs to a team.
struct Membership;

impl Membership {
    fn enter(team: &Team) -> Self {
        OWN.set(team);
        Self
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        OWN.set(ptr::null());
    }
}

#[derive(Default)]
struct Team {
    /// The jobs that threads may join.
    jobs: Mutex<Vec<Posted>>,
    /// Their number, to look at without the lock.
    posted: AtomicUsize,
    /// Whether the team is at work. Written under the lock of `sleep`.
    is_awake: AtomicBool,
    /// Whether threads return from [`Team::serve`]. Written under the same lock.
    is_closed: AtomicBool,
    sleep: Mutex<()>,
    wake: Condvar,
    /// Held by the thread that gives the team its work.
    leader: Mutex<()>,
}

/// Lets the threads of a team sleep when it is dropped, even if the body panics.
struct Awake<'a>(&'a Team);

impl Drop for Awake<'_> {
    fn drop(&mut self) {
        let _sleep = lock(&self.0.sleep);
        self.0.is_awake.store(false, Ordering::Release);
    }
}

/// A job in the list.
struct Posted(*const Job<'static>);

// SAFETY: a job may be shared by threads, and `Team::run` does not return while it is in the list or has helpers.
unsafe impl Send for Posted {}

struct Job<'a> {
    work: &'a (dyn Fn(usize) + Sync),
    tasks: usize,
    /// The first task that nobody has taken.
    next: AtomicUsize,
    /// Number of threads that work on it, besides the one that posted it.
    helpers: AtomicUsize,
    /// What the first panic of a task carried.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

impl Job<'_> {
    /// Runs tasks until all are taken.
    fn work(&self) {
        loop {
            let task = self.next.fetch_add(1, Ordering::Relaxed);
            if task >= self.tasks {
                return;
            }
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| (self.work)(task))) {
                lock(&self.panic).get_or_insert(panic);
            }
        }
    }

    fn is_taken(&self) -> bool {
        self.next.load(Ordering::Relaxed) >= self.tasks
    }
}

impl Team {
    /// Runs the tasks of a job on the calling thread and on all that join.
    fn run(&self, tasks: usize, work: &(dyn Fn(usize) + Sync)) {
        let job = Job {
            work,
            tasks,
            next: AtomicUsize::new(0),
            helpers: AtomicUsize::new(0),
            panic: Mutex::new(None),
        };
        let own: *const Job<'static> = ptr::from_ref(&job).cast();
        lock(&self.jobs).push(Posted(own));
        self.posted.fetch_add(1, Ordering::Release);
        job.work();
        self.posted.fetch_sub(1, Ordering::Relaxed);
        // From here on, nobody joins.
        lock(&self.jobs).retain(|posted| !ptr::eq(posted.0, own));
        self.wait(|| job.helpers.load(Ordering::Acquire) == 0);
        if let Some(panic) = lock(&job.panic).take() {
            resume_unwind(panic);
        }
    }

    /// Runs `body` on the calling thread, which gives the team its work; without the team if another thread leads it.
    fn lead<R>(&self, body: impl FnOnce() -> R) -> R {
        let _leader = match self.leader.try_lock() {
            Ok(leader) => leader,
            Err(TryLockError::Poisoned(leader)) => leader.into_inner(),
            Err(TryLockError::WouldBlock) => return body(),
        };
        {
            let _sleep = lock(&self.sleep);
            self.is_awake.store(true, Ordering::Release);
            self.wake.notify_all();
        }
        let _awake = Awake(self);
        let _membership = Membership::enter(self);
        body()
    }

    /// Works for the team whenever it is awake, until it is closed.
    fn serve(&self) {
        let _membership = Membership::enter(self);
        loop {
            let sleep = lock(&self.sleep);
            let is_asleep = |_: &mut ()| {
                !self.is_awake.load(Ordering::Relaxed) && !self.is_closed.load(Ordering::Relaxed)
            };
            drop(self.wake.wait_while(sleep, is_asleep));
            if self.is_closed.load(Ordering::Relaxed) {
                return;
            }
            self.wait(|| !self.is_awake.load(Ordering::Acquire));
        }
    }

    /// Helps with jobs until the condition holds.
    fn wait(&self, until: impl Fn() -> bool) {
        let mut looks = 0;
        while !until() {
            if self.posted.load(Ordering::Acquire) > 0 && self.help() {
                looks = 0;
            } else if looks < PATIENCE {
                looks += 1;
                spin_loop();
            } else {
                thread::yield_now();
            }
        }
    }

    /// Joins a job, if there is one with tasks that nobody has taken: the last that was posted, because others wait for it.
    fn help(&self) -> bool {
        let job = {
            let jobs = lock(&self.jobs);
            // SAFETY: a job in the list lives, and stays alive as long as it has helpers.
            let all = jobs.iter().rev().map(|posted| unsafe { &*posted.0 });
            let Some(job) = all.into_iter().find(|job| !job.is_taken()) else {
                return false;
            };
            job.helpers.fetch_add(1, Ordering::Relaxed);
            job
        };
        job.work();
        job.helpers.fetch_sub(1, Ordering::Release);
        true
    }
}

/// Locks; a panic elsewhere leaves nothing half done that a lock here guards.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a body with a team of some threads.
    fn on<R>(threads: usize, body: impl FnOnce() -> R) -> R {
        let team = Team::default();
        thread::scope(|scope| {
            (1..threads).for_each(|_| drop(scope.spawn(|| team.serve())));
            let body = catch_unwind(AssertUnwindSafe(|| team.lead(body)));
            let _sleep = lock(&team.sleep);
            team.is_closed.store(true, Ordering::Relaxed);
            team.wake.notify_all();
            body.unwrap_or_else(|panic| resume_unwind(panic))
        })
    }

    /// Squares of numbers, each task with a job of its own.
    fn nested(n: usize) -> Vec<usize> {
        map((0..n).collect(), |i| {
            map((0..i).collect(), |_| i).into_iter().sum()
        })
    }

    #[test]
    fn every_item_is_worked_on_once_with_any_number_of_threads() {
        let expected: Vec<usize> = (0..40).map(|i| i * i).collect();
        for threads in [1, 2, 5] {
            for n in [0, 1, 2, 40] {
                let found = on(threads, || (0..20).map(|_| nested(n)).collect::<Vec<_>>());
                assert!(found.iter().all(|of| *of == expected[..n]), "{threads} {n}");
            }
        }
        assert_eq!(nested(40), expected, "on the threads of the pool");
        assert_eq!(through(|| nested(40)), expected, "on a team of them");
        assert_eq!(through(|| through(|| nested(40))), expected);
    }

    #[test]
    fn threads_share_the_tasks() {
        let working = AtomicUsize::new(0);
        // Every task waits until all are being worked on.
        let meet = |_| {
            working.fetch_add(1, Ordering::SeqCst);
            while working.load(Ordering::SeqCst) < 3 {
                thread::yield_now();
            }
        };
        on(3, || for_each(vec![(); 3], meet));
        // So do tasks of a task, whose other threads would wait for it.
        working.store(0, Ordering::SeqCst);
        let outer = |has_tasks| {
            if has_tasks {
                for_each(vec![(); 3], meet)
            }
        };
        on(3, || for_each(vec![true, false], outer));
    }

    #[test]
    fn a_panic_ends_the_team_and_reaches_the_caller() {
        let done = AtomicUsize::new(0);
        let task = |i: usize| {
            done.fetch_add(1, Ordering::SeqCst);
            assert!(i != 3, "task 3");
        };
        for _ in 0..20 {
            done.store(0, Ordering::SeqCst);
            let run = || on(3, || for_each((0..10).collect(), task));
            let panic = catch_unwind(AssertUnwindSafe(run)).expect_err("a panic");
            assert_eq!(panic.downcast_ref::<&str>(), Some(&"task 3"));
            assert_eq!(done.load(Ordering::SeqCst), 10);
        }
        assert!(OWN.get().is_null());
    }
}

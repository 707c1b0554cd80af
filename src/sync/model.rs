//! What the models put in the place of threads' real means: every use of a lock, a condition variable
//! or an atomic is a point where shuttle may let another thread go on, and time passes only when a
//! model says so. Never part of a build that anybody uses.

use std::cell::{Cell, RefCell};
use std::ops::{Deref, DerefMut};
use std::panic::{AssertUnwindSafe, UnwindSafe, catch_unwind, resume_unwind};
use std::sync::PoisonError;
use std::time::Duration;

use shuttle::rand::{Rng, thread_rng};
use shuttle::scheduler::{PctScheduler, RandomScheduler};
use shuttle::thread::{self, Thread, ThreadId};
use shuttle::{Config, Runner};

// All threads of a model share one of the system's, and each run of a model starts anew.
thread_local! {
    static NOW: Cell<Duration> = const { Cell::new(Duration::ZERO) };
    static SLEEPERS: RefCell<Vec<(Duration, Thread)>> = const { RefCell::new(Vec::new()) };
    static PANICKING: Cell<Option<ThreadId>> = const { Cell::new(None) };
}

/// Runs `model` under as many schedules as `runs` says: half of them random, half with few switches at
/// random places. A failure prints what is needed to replay it.
pub(crate) fn check(runs: usize, model: impl Fn() + Copy + Send + Sync + 'static) {
    let anew = move || {
        NOW.set(START);
        SLEEPERS.take();
        PANICKING.set(None);
        model();
    };
    let mut config = Config::new();
    config.silence_warnings = true;
    config.stack_size = 0x4_0000;
    Runner::new(RandomScheduler::new(runs / 2), config.clone()).run(anew);
    Runner::new(PctScheduler::new(3, runs / 2), config).run(anew);
}

/// So that a moment before the beginning is one, too.
const START: Duration = Duration::from_secs(1000);

/// The model's clock.
pub(crate) fn now() -> Duration {
    NOW.get()
}

/// Lets time pass for all threads: those whose time is over wake, when their turn comes.
pub(crate) fn pass(duration: Duration) {
    thread::yield_now();
    NOW.set(now() + duration);
    let due = SLEEPERS.with_borrow(|sleepers| {
        let due = sleepers.iter().filter(|(until, _)| *until <= now());
        due.map(|(_, thread)| thread.clone()).collect::<Vec<_>>()
    });
    due.iter().for_each(Thread::unpark);
}

/// Whether this thread of the model is panicking: the standard library would say so of all of them.
pub(crate) fn panicking() -> bool {
    PANICKING.get() == Some(thread::current().id())
}

/// Panics without shuttle taking it for a failure of the model. One thread at a time may.
pub(crate) fn panic() -> ! {
    PANICKING.set(Some(thread::current().id()));
    resume_unwind(Box::new("a model asked for this panic"));
}

/// True if `work` came to its end, false if it panicked by [`panic`].
pub(crate) fn survives(work: impl FnOnce() + UnwindSafe) -> bool {
    match catch_unwind(work) {
        Ok(()) => true,
        Err(_) if panicking() => {
            PANICKING.set(None);
            false
        }
        Err(payload) => resume_unwind(payload),
    }
}

/// As parking_lot's: without poison.
#[derive(Default)]
pub(crate) struct Mutex<T>(shuttle::sync::Mutex<T>);

pub(crate) struct MutexGuard<'a, T> {
    mutex: &'a Mutex<T>,
    /// None only while its owner waits on a condition variable.
    held: Option<shuttle::sync::MutexGuard<'a, T>>,
}

impl<T> Mutex<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(shuttle::sync::Mutex::new(value))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, T> {
        let held = Some(self.take());
        MutexGuard { mutex: self, held }
    }

    fn take(&self) -> shuttle::sync::MutexGuard<'_, T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T: std::fmt::Debug> std::fmt::Debug for Mutex<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl<T> Deref for MutexGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.held.as_ref().expect("it is held but in a wait")
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.held.as_mut().expect("it is held but in a wait")
    }
}

/// As parking_lot's. A timed wait ends by a notification, or once [`pass`] has brought the clock to
/// its end: never by itself. So a model in which no time passes finds every lost wake-up as a
/// deadlock, however short the waits are that would have hidden it.
#[derive(Default)]
pub(crate) struct Condvar {
    waiting: shuttle::sync::Mutex<Vec<Thread>>,
}

pub(crate) struct WaitTimeoutResult {
    timed_out: bool,
}

impl WaitTimeoutResult {
    pub(crate) fn timed_out(&self) -> bool {
        self.timed_out
    }
}

impl Condvar {
    pub(crate) fn new() -> Self {
        Self::default()
    }

    pub(crate) fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        self.wait_for(guard, Duration::MAX);
    }

    pub(crate) fn wait_for<T>(
        &self,
        guard: &mut MutexGuard<'_, T>,
        timeout: Duration,
    ) -> WaitTimeoutResult {
        let me = thread::current();
        let until = now().saturating_add(timeout);
        self.waiting().push(me.clone());
        SLEEPERS.with_borrow_mut(|sleepers| sleepers.push((until, me.clone())));
        guard.held = None;
        // A wake-up between here and the sleep is kept by the thread's token.
        while self.is_waiting(&me) && now() < until {
            thread::park();
        }
        let timed_out = self.is_waiting(&me);
        self.waiting().retain(|thread| thread.id() != me.id());
        SLEEPERS.with_borrow_mut(|sleepers| sleepers.retain(|(_, thread)| thread.id() != me.id()));
        guard.held = Some(guard.mutex.take());
        WaitTimeoutResult { timed_out }
    }

    /// Wakes any one of those who wait: which is not promised.
    pub(crate) fn notify_one(&self) {
        let mut waiting = self.waiting();
        if waiting.is_empty() {
            return;
        }
        let any = thread_rng().gen_range(0..waiting.len());
        let woken = waiting.swap_remove(any);
        drop(waiting);
        woken.unpark();
    }

    pub(crate) fn notify_all(&self) {
        let woken = std::mem::take(&mut *self.waiting());
        woken.iter().for_each(Thread::unpark);
    }

    fn waiting(&self) -> shuttle::sync::MutexGuard<'_, Vec<Thread>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_waiting(&self, thread: &Thread) -> bool {
        self.waiting().iter().any(|other| other.id() == thread.id())
    }
}

//! Locks, condition variables, sleeps and a clock for models, which are tests that shuttle runs under many schedules of
//! their threads. Each use of these parts is a scheduling point, where shuttle may run another thread. Time passes only
//! in [`pass`], so a wait that only a time-out would end is found as a deadlock.
//!
//! The parts with synchronization of their own (the local queue, pipelines, leases, the watchdog) take their locks from
//! `util::sync`. With `--cfg shuttle`, `model.rs` beside each part runs it under some thousand schedules. Two doubles
//! replace Redis: `wire/pipeline/connection/model.rs` for a connection, which can fail, and `store/model.rs` for the
//! whole store. The limits in models are small, so that the models reach them. A failure prints its schedule;
//! `LEASEHOLD_MODEL_SCHEDULE` replays it, and `LEASEHOLD_MODEL_FACTOR` multiplies the runs.
//!
//! The models leave out the notification connection and its thread, crossbeam's channels themselves, and weak memory
//! orderings.

use std::cell::{Cell, RefCell};
use std::env;
use std::ops::{Deref, DerefMut};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::PoisonError;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, TryRecvError};
use shuttle::rand::{Rng, thread_rng};
use shuttle::scheduler::{PctScheduler, RandomScheduler, ReplayScheduler};
use shuttle::sync::atomic::AtomicBool;
use shuttle::thread::{self, Thread, ThreadId};
use shuttle::{Config, Runner};

use crate::util::sync::Either;

// All threads of a model run on one thread of the system, so these variables are the state of one model. Each run
// resets them.
thread_local! {
    static NOW: Cell<Duration> = const { Cell::new(Duration::ZERO) };
    static SLEEPERS: RefCell<Vec<(Duration, Thread)>> = const { RefCell::new(Vec::new()) };
    /// The threads that sleep in [`either`].
    static SELECTING: RefCell<Vec<Thread>> = const { RefCell::new(Vec::new()) };
    static PANICKING: Cell<Option<ThreadId>> = const { Cell::new(None) };
}

/// Runs `model` under `runs` schedules: half of them random, half with few switches at random points. A failure prints
/// its schedule, and `LEASEHOLD_MODEL_SCHEDULE` replays it. `LEASEHOLD_MODEL_FACTOR` multiplies the runs.
pub fn check(runs: usize, model: impl Fn() + Copy + Send + Sync + 'static) {
    let anew = move || {
        NOW.set(START);
        SLEEPERS.take();
        SELECTING.take();
        PANICKING.set(None);
        model();
    };
    let mut config = Config::new();
    config.silence_warnings = true;
    config.stack_size = 0x4_0000;
    if let Ok(schedule) = env::var("LEASEHOLD_MODEL_SCHEDULE") {
        let scheduler = ReplayScheduler::new_from_encoded(&schedule);
        Runner::new(scheduler, config).run(anew);
        return;
    }
    let factor = env::var("LEASEHOLD_MODEL_FACTOR");
    let factor = factor.map_or(1, |factor| {
        factor.parse().expect("LEASEHOLD_MODEL_FACTOR is a number")
    });
    let runs = runs * factor / 2;
    Runner::new(RandomScheduler::new(runs), config.clone()).run(anew);
    Runner::new(PctScheduler::new(3, runs), config).run(anew);
}

/// The time at the start of a model. Not zero, so earlier times exist, too.
const START: Duration = Duration::from_secs(1000);

pub fn now() -> Duration {
    NOW.get()
}

/// Moves the clock by `duration`, and wakes the threads whose sleep ends by then.
pub fn pass(duration: Duration) {
    thread::yield_now();
    NOW.set(now() + duration);
    let due = SLEEPERS.with_borrow(|sleepers| {
        let due = sleepers.iter().filter(|(until, _)| *until <= now());
        due.map(|(_, thread)| thread.clone()).collect::<Vec<_>>()
    });
    due.iter().for_each(Thread::unpark);
}

/// Waits until `threads()` threads sleep, and none of these sleeps is over. `threads` must not be a scheduling point,
/// so it may read only atomics of the standard library.
pub fn quiet(threads: impl Fn() -> usize) {
    let is_quiet = || {
        let threads = threads();
        SLEEPERS.with_borrow(|sleepers| {
            sleepers.len() >= threads && sleepers.iter().all(|(until, _)| *until > now())
        })
    };
    while !is_quiet() {
        thread::yield_now();
    }
}

/// Sleeps until the clock has moved by `duration`.
pub fn sleep(duration: Duration) {
    Condvar::new().wait_for(&mut Mutex::new(()).lock(), duration);
}

/// A handle that wakes a thread.
pub struct Sleeper(Thread);

impl Sleeper {
    pub fn unpark(&self) {
        wake(&self.0);
    }
}

pub fn this_thread() -> Sleeper {
    Sleeper(thread::current())
}

/// Parks as the standard library's function does, but the sleep times out only in [`pass`]: see [`Condvar`].
pub fn park_timeout(timeout: Duration) {
    let me = thread::current();
    let until = now().saturating_add(timeout);
    sleep_until(until, &me);
    thread::park();
    forget(&me);
}

/// Waits as crossbeam's `select!` over two channels does. Models send to the channels by [`try_send`] only. The read of
/// the channels and the sleep are one step, the same as in crossbeam.
pub fn either(first: &Receiver<()>, second: &Receiver<()>, timeout: Duration) -> Option<Either> {
    let me = thread::current();
    let until = now().saturating_add(timeout);
    loop {
        step();
        let mut channels = [(first, Either::First), (second, Either::Second)];
        channels.rotate_left(choice(2));
        let is_ready = |channel: &Receiver<()>| channel.try_recv() != Err(TryRecvError::Empty);
        if let Some((_, ready)) = channels.into_iter().find(|(channel, _)| is_ready(channel)) {
            return Some(ready);
        }
        if now() >= until {
            return None;
        }
        SELECTING.with_borrow_mut(|selecting| selecting.push(me.clone()));
        sleep_until(until, &me);
        thread::park();
        forget(&me);
        SELECTING.with_borrow_mut(|selecting| selecting.retain(|thread| thread.id() != me.id()));
    }
}

/// Sends a message, unless the channel is full, and wakes all threads in [`either`].
pub fn try_send(to: &Sender<()>) {
    step();
    let _ = to.try_send(());
    SELECTING.take().iter().for_each(wake);
}

/// A scheduling point.
pub fn step() {
    AtomicBool::new(false).load(Ordering::SeqCst);
}

/// A random choice that a replay repeats: true once in `of` times.
pub fn chance(of: u32) -> bool {
    thread_rng().gen_ratio(1, of)
}

/// A random number that a replay repeats.
pub fn random() -> u128 {
    thread_rng().gen_range(0..=u128::MAX)
}

/// A random number in `0..n` that a replay repeats.
pub fn choice(n: usize) -> usize {
    thread_rng().gen_range(0..n)
}

/// Whether this thread of the model is panicking. The standard library's function does not distinguish the threads of a
/// model.
pub fn panicking() -> bool {
    std::thread::panicking() && PANICKING.get() == Some(thread::current().id())
}

/// Panics in a way that shuttle does not report as a failure of the model. One thread at a time may call it.
pub fn panic() -> ! {
    PANICKING.set(Some(thread::current().id()));
    resume_unwind(Box::new("a model asked for this panic"));
}

/// True if `work` returned, false if it panicked by [`panic`].
pub fn survives(work: impl FnOnce()) -> bool {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(()) => true,
        Err(_) if PANICKING.take() == Some(thread::current().id()) => false,
        Err(payload) => resume_unwind(payload),
    }
}

/// A mutex like parking_lot's: a panic does not poison it.
#[derive(Default)]
pub struct Mutex<T>(shuttle::sync::Mutex<T>);

pub struct MutexGuard<'a, T> {
    mutex: &'a Mutex<T>,
    /// `None` only while the owner waits on a condition variable.
    held: Option<shuttle::sync::MutexGuard<'a, T>>,
}

impl<T> Mutex<T> {
    pub fn new(value: T) -> Self {
        Self(shuttle::sync::Mutex::new(value))
    }

    pub fn lock(&self) -> MutexGuard<'_, T> {
        let held = Some(self.take());
        MutexGuard { mutex: self, held }
    }

    pub fn get_mut(&mut self) -> &mut T {
        self.0.get_mut().unwrap_or_else(PoisonError::into_inner)
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
        self.held.as_ref().expect("held, except during a wait")
    }
}

impl<T> DerefMut for MutexGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.held.as_mut().expect("held, except during a wait")
    }
}

/// A condition variable like parking_lot's. A timed wait ends by a notification, or when [`pass`] has moved the clock
/// to the wait's end. So in a model in which no time passes, a lost wake-up is always a deadlock, which shuttle finds.
#[derive(Default)]
pub struct Condvar {
    waiting: shuttle::sync::Mutex<Vec<Thread>>,
}

pub struct WaitTimeoutResult {
    timed_out: bool,
}

impl WaitTimeoutResult {
    pub fn timed_out(&self) -> bool {
        self.timed_out
    }
}

fn wake(thread: &Thread) {
    forget(thread);
    thread.unpark();
}

fn sleep_until(until: Duration, thread: &Thread) {
    forget(thread);
    SLEEPERS.with_borrow_mut(|sleepers| sleepers.push((until, thread.clone())));
}

/// Records that `thread` no longer sleeps.
fn forget(thread: &Thread) {
    SLEEPERS.with_borrow_mut(|sleepers| sleepers.retain(|(_, one)| one.id() != thread.id()));
}

impl Condvar {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn wait<T>(&self, guard: &mut MutexGuard<'_, T>) {
        self.wait_for(guard, Duration::MAX);
    }

    pub fn wait_for<T>(
        &self,
        guard: &mut MutexGuard<'_, T>,
        timeout: Duration,
    ) -> WaitTimeoutResult {
        let me = thread::current();
        let until = now().saturating_add(timeout);
        self.waiting().push(me.clone());
        sleep_until(until, &me);
        guard.held = None;
        // A wake-up that comes before `park` stays in the thread's token.
        while self.is_waiting(&me) && now() < until {
            // A wake-up for an earlier sleep may have removed this thread from the sleepers.
            sleep_until(until, &me);
            thread::park();
        }
        let timed_out = self.leave(&me);
        forget(&me);
        guard.held = Some(guard.mutex.take());
        WaitTimeoutResult { timed_out }
    }

    /// Wakes a random one of the waiting threads.
    pub fn notify_one(&self) {
        let mut waiting = self.waiting();
        if waiting.is_empty() {
            return;
        }
        let any = choice(waiting.len());
        let woken = waiting.swap_remove(any);
        drop(waiting);
        wake(&woken);
    }

    pub fn notify_all(&self) {
        let woken = std::mem::take(&mut *self.waiting());
        woken.iter().for_each(wake);
    }

    fn waiting(&self) -> shuttle::sync::MutexGuard<'_, Vec<Thread>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_waiting(&self, thread: &Thread) -> bool {
        self.waiting().iter().any(|other| other.id() == thread.id())
    }

    /// Removes `thread` from the waiting threads; false if a notification has done so.
    fn leave(&self, thread: &Thread) -> bool {
        let mut waiting = self.waiting();
        let before = waiting.len();
        waiting.retain(|other| other.id() != thread.id());
        waiting.len() < before
    }
}

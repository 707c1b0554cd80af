//! What the models put in the place of threads' real means: every use of a lock, a condition variable
//! or an atomic is a point where shuttle may let another thread go on, and time passes only when a
//! model says so. Never part of a build that anybody uses.

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

// All threads of a model share one of the system's, and each run of a model starts anew.
thread_local! {
    static NOW: Cell<Duration> = const { Cell::new(Duration::ZERO) };
    static SLEEPERS: RefCell<Vec<(Duration, Thread)>> = const { RefCell::new(Vec::new()) };
    /// Those asleep in [`either`].
    static SELECTING: RefCell<Vec<Thread>> = const { RefCell::new(Vec::new()) };
    static PANICKING: Cell<Option<ThreadId>> = const { Cell::new(None) };
}

/// Runs `model` under as many schedules as `runs` says: half of them random, half with few switches at
/// random places. A failure prints its schedule: `LEASEHOLD_MODEL_SCHEDULE` replays that.
/// `LEASEHOLD_MODEL_FACTOR` multiplies the runs.
pub(crate) fn check(runs: usize, model: impl Fn() + Copy + Send + Sync + 'static) {
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
    let factor = factor.map_or(1, |factor| factor.parse().expect("it is a number"));
    let runs = runs * factor / 2;
    Runner::new(RandomScheduler::new(runs), config.clone()).run(anew);
    Runner::new(PctScheduler::new(3, runs), config).run(anew);
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

/// Waits until as many threads are asleep as there should be, and none of them is to wake. To say
/// how many must be no point where another thread may go on: so count by the standard library's atomics.
pub(crate) fn quiet(threads: impl Fn() -> usize) {
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

/// Sleeps until that much time has passed.
pub(crate) fn sleep(duration: Duration) {
    Condvar::new().wait_for(&mut Mutex::new(()).lock(), duration);
}

/// A thread as who wakes it knows it.
pub(crate) struct Sleeper(Thread);

impl Sleeper {
    pub(crate) fn unpark(&self) {
        wake(&self.0);
    }
}

pub(crate) fn this_thread() -> Sleeper {
    Sleeper(thread::current())
}

/// As the standard library's, but that it does not end by itself: see [`Condvar`].
pub(crate) fn park_timeout(timeout: Duration) {
    let me = thread::current();
    let until = now().saturating_add(timeout);
    sleep_until(until, &me);
    thread::park();
    forget(&me);
}

/// As crossbeam's `select!` over two channels, which models send to by [`try_send`] only. Looking at the
/// channels and falling asleep is one step, as it is there for the sender.
pub(crate) fn either(
    first: &Receiver<()>,
    second: &Receiver<()>,
    timeout: Duration,
) -> Option<Either> {
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
        SELECTING.with_borrow_mut(|selecting| selecting.retain(|one| one.id() != me.id()));
    }
}

/// Sends if there is room, and wakes all threads in [`either`].
pub(crate) fn try_send(to: &Sender<()>) {
    step();
    let _ = to.try_send(());
    SELECTING.take().iter().for_each(wake);
}

/// A point where another thread may go on.
pub(crate) fn step() {
    AtomicBool::new(false).load(Ordering::SeqCst);
}

/// A choice that the schedule makes, and a replay makes again: true once in `of` times.
pub(crate) fn chance(of: u32) -> bool {
    thread_rng().gen_ratio(1, of)
}

/// A number that a replay draws again.
pub(crate) fn random() -> u128 {
    thread_rng().gen_range(0..=u128::MAX)
}

/// One of `0..n`.
pub(crate) fn choice(n: usize) -> usize {
    thread_rng().gen_range(0..n)
}

/// Whether this thread of the model is panicking: the standard library would say so of all of them.
pub(crate) fn panicking() -> bool {
    std::thread::panicking() && PANICKING.get() == Some(thread::current().id())
}

/// Panics without shuttle taking it for a failure of the model. One thread at a time may.
pub(crate) fn panic() -> ! {
    PANICKING.set(Some(thread::current().id()));
    resume_unwind(Box::new("a model asked for this panic"));
}

/// True if `work` came to its end, false if it panicked by [`panic`].
pub(crate) fn survives(work: impl FnOnce()) -> bool {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(()) => true,
        Err(_) if PANICKING.take() == Some(thread::current().id()) => false,
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

    pub(crate) fn get_mut(&mut self) -> &mut T {
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

fn wake(thread: &Thread) {
    forget(thread);
    thread.unpark();
}

/// It sleeps, and is to be woken then at the latest.
fn sleep_until(until: Duration, thread: &Thread) {
    forget(thread);
    SLEEPERS.with_borrow_mut(|sleepers| sleepers.push((until, thread.clone())));
}

/// It sleeps no more.
fn forget(thread: &Thread) {
    SLEEPERS.with_borrow_mut(|sleepers| sleepers.retain(|(_, one)| one.id() != thread.id()));
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
        sleep_until(until, &me);
        guard.held = None;
        // A wake-up between here and the sleep is kept by the thread's token.
        while self.is_waiting(&me) && now() < until {
            // One that was meant for an earlier sleep of this thread has made it be forgotten.
            sleep_until(until, &me);
            thread::park();
        }
        let timed_out = self.leave(&me);
        forget(&me);
        guard.held = Some(guard.mutex.take());
        WaitTimeoutResult { timed_out }
    }

    /// Wakes any one of those who wait: which is not promised.
    pub(crate) fn notify_one(&self) {
        let mut waiting = self.waiting();
        if waiting.is_empty() {
            return;
        }
        let any = choice(waiting.len());
        let woken = waiting.swap_remove(any);
        drop(waiting);
        wake(&woken);
    }

    pub(crate) fn notify_all(&self) {
        let woken = std::mem::take(&mut *self.waiting());
        woken.iter().for_each(wake);
    }

    fn waiting(&self) -> shuttle::sync::MutexGuard<'_, Vec<Thread>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_waiting(&self, thread: &Thread) -> bool {
        self.waiting().iter().any(|other| other.id() == thread.id())
    }

    /// True if nobody has woken `thread`.
    fn leave(&self, thread: &Thread) -> bool {
        let mut waiting = self.waiting();
        let before = waiting.len();
        waiting.retain(|other| other.id() != thread.id());
        waiting.len() < before
    }
}

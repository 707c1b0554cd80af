//! Starts the threads of a client, and waits until they have ended.

use std::cell::Cell;
use std::io;
use std::sync::Arc;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};
use parking_lot::Mutex;

use crate::process::fork::ForkGuard;
use crate::report::error::{Error, ErrorKind};
use crate::util::clock::MonotonicTime;

/// Calls `call` for each item, each on its own thread, and passes each result with the index of its item to `collect`.
/// A call that panics has no result. Returns after all calls have ended.
pub fn call_each<I: Sync, T: Send>(
    items: &[I],
    call: impl Fn(&I) -> T + Sync,
    collect: impl FnOnce(&Receiver<(usize, T)>),
) {
    let call_one = |index: usize, results: &Sender<(usize, T)>| {
        let _ = results.send((index, call(&items[index])));
    };
    let call_one = &call_one;
    std::thread::scope(|scope| {
        let (sender, results) = bounded(items.len());
        let mut threads = Vec::new();
        for index in 0..items.len() {
            let thread = std::thread::Builder::new().name("leasehold-call".to_owned());
            let of_thread = sender.clone();
            match thread.spawn_scoped(scope, move || call_one(index, &of_thread)) {
                Ok(thread) => threads.push(thread),
                // The system cannot start another thread, so this thread makes the call.
                Err(_) => call_one(index, &sender),
            }
        }
        drop(sender);
        collect(&results);
        // A panic of a call must not reach the caller.
        threads.into_iter().for_each(|thread| drop(thread.join()));
    });
}

thread_local! {
    /// Whether a thread group started this thread.
    static IN_GROUP: Cell<bool> = const { Cell::new(false) };
}

/// The threads of one client. The wait for their end has a deadline, unlike a join. A clone starts threads of the same
/// group.
#[derive(Clone)]
pub struct ThreadGroup {
    /// Never sends a message. Each thread has a clone, so the channel is disconnected when the last thread has ended.
    alive: Arc<Mutex<Option<Sender<()>>>>,
    ended: Receiver<()>,
    /// Each thread has a clone, so the client is counted until its last thread has ended.
    fork_guard: Arc<ForkGuard>,
    /// The number of threads that a test still allows to start. Shared with the clones of this group.
    #[cfg(test)]
    pub may_start: Arc<std::sync::atomic::AtomicUsize>,
}

impl ThreadGroup {
    #[cfg(test)]
    pub fn new() -> Self {
        Self::with_fork_guard(ForkGuard::enter().expect("no test forks"))
    }

    pub fn with_fork_guard(fork_guard: Arc<ForkGuard>) -> Self {
        let (alive, ended) = bounded(0);
        Self {
            alive: Arc::new(Mutex::new(Some(alive))),
            ended,
            fork_guard,
            #[cfg(test)]
            may_start: Arc::new(usize::MAX.into()),
        }
    }

    pub fn spawn(&self, name: &str, run: impl FnOnce() + Send + 'static) -> Result<(), Error> {
        let alive = self.alive.lock().clone();
        let fork_guard = Arc::clone(&self.fork_guard);
        #[cfg(test)]
        if !self.take_start() {
            return Err(no_thread(name, io::ErrorKind::WouldBlock.into()));
        }
        let spawned = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || {
                IN_GROUP.set(true);
                run();
                drop(fork_guard);
                drop(alive);
            });
        spawned.map(drop).map_err(|error| no_thread(name, error))
    }

    /// Counts the start of a thread. Returns false if the test does not allow the start.
    #[cfg(test)]
    fn take_start(&self) -> bool {
        use std::sync::atomic::Ordering::SeqCst;
        let take = |left: usize| left.checked_sub(1);
        self.may_start.fetch_update(SeqCst, SeqCst, take).is_ok()
    }

    /// Waits until all threads have ended. Returns false if some are still running at `deadline`. Returns true at once
    /// on a thread of any thread group, which could otherwise wait for itself.
    pub fn wait_until_ended(&self, deadline: MonotonicTime) -> bool {
        self.alive.lock().take();
        if IN_GROUP.get() {
            return true;
        }
        let left = deadline.since(MonotonicTime::now());
        self.ended.recv_timeout(left) == Err(RecvTimeoutError::Disconnected)
    }
}

/// The error of a thread that the system could not start.
fn no_thread(name: &str, error: io::Error) -> Error {
    let message =
        format!("cannot start the thread {name}; check the limits on threads of this process");
    Error::new(ErrorKind::Unavailable, message).with_source(error)
}

//! The threads of a client: how they are started, and how their end is waited for.

use std::cell::Cell;
use std::sync::Arc;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};

use crate::error::{Error, ErrorKind};
use crate::util::clock::MonotonicTime;
use crate::util::fork::ForkGuard;

thread_local! {
    static IS_OURS: Cell<bool> = const { Cell::new(false) };
}

/// The threads of one client. Waiting for their end is bounded, which joining is not.
pub(crate) struct ThreadGroup {
    /// Never sent on: each thread has a clone, and the receiver is cut off when the last has ended.
    alive: parking_lot::Mutex<Option<Sender<()>>>,
    ended: Receiver<()>,
    /// Each thread has it, too: the client is there until the last has ended, whoever waits for that.
    fork_guard: Arc<ForkGuard>,
}

impl ThreadGroup {
    #[cfg(test)]
    pub(crate) fn new() -> Self {
        Self::of(ForkGuard::enter().expect("no test forks"))
    }

    pub(crate) fn of(fork_guard: Arc<ForkGuard>) -> Self {
        let (alive, ended) = bounded(0);
        Self {
            alive: parking_lot::Mutex::new(Some(alive)),
            ended,
            fork_guard,
        }
    }

    pub(crate) fn spawn(
        &self,
        name: &str,
        run: impl FnOnce() + Send + 'static,
    ) -> Result<(), Error> {
        let alive = self.alive.lock().clone();
        let fork_guard = Arc::clone(&self.fork_guard);
        let spawned = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || {
                IS_OURS.set(true);
                run();
                drop(fork_guard);
                drop(alive);
            });
        spawned.map(drop).map_err(|error| {
            let message = format!("cannot start the thread {name}");
            Error::new(ErrorKind::Unavailable, message).with_source(error)
        })
    }

    /// Waits until all threads have ended; false if they have not at `deadline`. On one of them it
    /// does not wait: a thread cannot outlive itself.
    pub(crate) fn has_ended_by(&self, deadline: MonotonicTime) -> bool {
        self.alive.lock().take();
        if IS_OURS.get() {
            return true;
        }
        let left = deadline.since(MonotonicTime::now());
        self.ended.recv_timeout(left) == Err(RecvTimeoutError::Disconnected)
    }
}

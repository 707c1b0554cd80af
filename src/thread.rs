//! The threads of a client: how they are started, and how their end is waited for.

use std::cell::Cell;
use std::sync::Arc;

use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, bounded};

use crate::clock::Moment;
use crate::error::{Error, ErrorKind};
use crate::process::Presence;

thread_local! {
    static IS_OURS: Cell<bool> = const { Cell::new(false) };
}

/// The threads of one client. Waiting for their end is bounded, which joining is not.
pub(crate) struct Crew {
    /// Never sent on: each thread has a clone, and the receiver is cut off when the last has ended.
    alive: parking_lot::Mutex<Option<Sender<()>>>,
    ended: Receiver<()>,
    /// Each thread has it, too: the client is there until the last has ended, whoever waits for that.
    presence: Arc<Presence>,
}

impl Crew {
    #[cfg(test)]
    pub(crate) fn new() -> Self {
        Self::of(Presence::enter().expect("no test forks"))
    }

    pub(crate) fn of(presence: Arc<Presence>) -> Self {
        let (alive, ended) = bounded(0);
        Self {
            alive: parking_lot::Mutex::new(Some(alive)),
            ended,
            presence,
        }
    }

    pub(crate) fn spawn(
        &self,
        name: &str,
        run: impl FnOnce() + Send + 'static,
    ) -> Result<(), Error> {
        let alive = self.alive.lock().clone();
        let presence = Arc::clone(&self.presence);
        let spawned = std::thread::Builder::new()
            .name(name.to_owned())
            .spawn(move || {
                IS_OURS.set(true);
                run();
                drop(presence);
                drop(alive);
            });
        spawned.map(drop).map_err(|error| {
            let message = format!("cannot start the thread {name}");
            Error::new(ErrorKind::Unavailable, message).with_source(error)
        })
    }

    /// Waits until all threads have ended; false if they have not at `deadline`. On one of them it
    /// does not wait: a thread cannot outlive itself.
    pub(crate) fn has_ended_by(&self, deadline: Moment) -> bool {
        self.alive.lock().take();
        if IS_OURS.get() {
            return true;
        }
        let left = deadline.since(Moment::now());
        self.ended.recv_timeout(left) == Err(RecvTimeoutError::Disconnected)
    }
}

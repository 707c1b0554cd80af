//! One thread in queue: how it sleeps, and what wakes it. Knows no queue.

use std::sync::Arc;

use crossbeam_channel::{Receiver, Sender};

use crate::lease::{Lease, Options};
use crate::util::clock::{Clock, MonotonicTime};
use crate::util::sync::{Condvar, Either, Mutex, either, try_send};

pub(super) struct Waiter {
    pub(super) options: Options,
    state: Mutex<State>,
    changed: Condvar,
    /// Rung as well, for one that waits for something else besides.
    bell: Option<Sender<()>>,
}

#[derive(Default)]
struct State {
    /// Latched: a wake-up that comes before the sleep is not lost.
    woken: bool,
    /// It is to find out anew how long to sleep.
    nudged: bool,
    handed: Option<Arc<Lease>>,
}

/// Why a sleep ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WakeReason {
    Woken,
    Cancelled,
    /// It is to sleep for a shorter time.
    Nudged,
    /// The time is up.
    TimedOut,
}

impl Waiter {
    pub(super) fn new(options: Options, bell: Option<Sender<()>>) -> Self {
        Self {
            options,
            state: Mutex::new(State::default()),
            changed: Condvar::new(),
            bell,
        }
    }

    pub(super) fn wake(&self) {
        self.state.lock().woken = true;
        self.ring();
    }

    pub(super) fn nudge(&self) {
        self.state.lock().nudged = true;
        self.ring();
    }

    /// Leaves a lease with it; it is to be rung then.
    pub(super) fn hand(&self, lease: Arc<Lease>) {
        self.state.lock().handed = Some(lease);
    }

    /// The lease that was left with it, if one was.
    pub(super) fn handed(&self) -> Option<Arc<Lease>> {
        self.state.lock().handed.take()
    }

    pub(super) fn ring(&self) {
        self.changed.notify_one();
        if let Some(bell) = &self.bell {
            // Full: it has been rung already, and will look.
            try_send(bell);
        }
    }

    /// Sleeps until woken or cancelled, but not past `until`. With what cancels it comes the other end
    /// of its bell.
    pub(super) fn sleep(
        &self,
        until: MonotonicTime,
        clock: &Clock,
        cancel: Option<(&Receiver<()>, &Receiver<()>)>,
    ) -> WakeReason {
        loop {
            let mut state = self.state.lock();
            loop {
                if std::mem::take(&mut state.woken) || state.handed.is_some() {
                    return WakeReason::Woken;
                }
                if std::mem::take(&mut state.nudged) {
                    return WakeReason::Nudged;
                }
                let left = until.since(clock.now());
                if left.is_zero() {
                    return WakeReason::TimedOut;
                }
                if cancel.is_some() {
                    break;
                }
                self.changed.wait_for(&mut state, left);
            }
            drop(state);
            let Some((cancel, bell)) = cancel else {
                continue;
            };
            let woken = either(bell, cancel, until.since(clock.now()));
            if woken == Some(Either::Second) {
                return WakeReason::Cancelled;
            }
        }
    }
}

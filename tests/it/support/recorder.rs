//! Counts the events of a client, so that tests can wait for them.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use leasehold::{Error, EventHandler, EventLock, LossReason, NodeHealth, NodeState};

use super::SOON;

/// The events of [`EventHandler`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum What {
    Acquired,
    Contended,
    LimitsDiffer,
    ForeignHolder,
    Released,
    Renewed,
    RenewalFailed,
    Lost,
    Unavailable,
    /// This event has no key, and is counted under the empty key.
    NotificationsRefused,
    /// This event has no key, and is counted under the empty key.
    SentinelsUnavailable,
    PlainAcquiresRefused,
    /// This event has no key, and is counted under the node's address.
    NodeFailing,
    /// As `NodeFailing`.
    NodeQuarantined,
    /// As `NodeFailing`.
    NodeUp,
}

#[derive(Default)]
pub struct Recorder {
    counts: Mutex<HashMap<(What, String), usize>>,
    changed: Condvar,
}

impl Recorder {
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// The number of these events for the lock of this key.
    pub fn count(&self, what: What, key: &str) -> usize {
        let counts = self.counts();
        counts.get(&(what, key.to_owned())).copied().unwrap_or(0)
    }

    /// Waits for `more` further events.
    #[track_caller]
    pub fn wait_for_more(&self, more: usize, what: What, key: &str) {
        self.wait_for(self.count(what, key) + more, what, key);
    }

    /// Waits until there have been `count` events in all.
    #[track_caller]
    pub fn wait_for(&self, count: usize, what: What, key: &str) {
        let deadline = Instant::now() + SOON;
        let mut counts = self.counts();
        loop {
            let counted = counts.get(&(what, key.to_owned())).copied().unwrap_or(0);
            if counted >= count {
                return;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            assert!(
                !left.is_zero(),
                "{what:?} of {key:?}: {counted} events, not {count}"
            );
            let waited = self.changed.wait_timeout(counts, left);
            counts = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Ignores poisoning: a test that failed while it waited must not disturb the client's threads.
    fn counts(&self) -> MutexGuard<'_, HashMap<(What, String), usize>> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note(&self, what: What, lock: EventLock<'_>) {
        self.note_of(what, lock.key);
    }

    fn note_of(&self, what: What, key: &str) {
        let mut counts = self.counts();
        *counts.entry((what, key.to_owned())).or_default() += 1;
        self.changed.notify_all();
    }
}

impl EventHandler for Recorder {
    fn acquired(&self, lock: EventLock<'_>, _: Duration) {
        self.note(What::Acquired, lock);
    }

    fn contended(&self, lock: EventLock<'_>, _: Duration) {
        self.note(What::Contended, lock);
    }

    fn limits_differ(&self, lock: EventLock<'_>, _: u32, _: u32) {
        self.note(What::LimitsDiffer, lock);
    }

    fn foreign_holder(&self, lock: EventLock<'_>, _: &str, _: Option<Duration>) {
        self.note(What::ForeignHolder, lock);
    }

    fn released(&self, lock: EventLock<'_>, _: Duration, _: bool) {
        self.note(What::Released, lock);
    }

    fn renewed(&self, lock: EventLock<'_>) {
        self.note(What::Renewed, lock);
    }

    fn renewal_failed(&self, lock: EventLock<'_>, _: &Error) {
        self.note(What::RenewalFailed, lock);
    }

    fn lost(&self, lock: EventLock<'_>, _: &LossReason) {
        self.note(What::Lost, lock);
    }

    fn unavailable(&self, lock: EventLock<'_>, _: &Error) {
        self.note(What::Unavailable, lock);
    }

    fn notifications_refused(&self, _: &Error) {
        self.note_of(What::NotificationsRefused, "");
    }

    fn plain_acquires_refused(&self, _: &Error) {
        self.note_of(What::PlainAcquiresRefused, "");
    }

    fn sentinels_unavailable(&self, _: &Error) {
        self.note_of(What::SentinelsUnavailable, "");
    }

    fn node_changed(&self, node: &NodeState) {
        let what = match node.health() {
            NodeHealth::Up => What::NodeUp,
            NodeHealth::Failing { .. } => What::NodeFailing,
            NodeHealth::Quarantined { .. } => What::NodeQuarantined,
            other => panic!("{other:?} is no change"),
        };
        self.note_of(what, node.address());
    }
}

//! What a client makes of what Redis tells it: whose position has come, who should look again, which lock
//! is lost. Never waits, unless a test has moved the clock of its store: then for what is due by that.

use std::sync::Arc;
use std::time::Duration;

use crate::acquire::queue::{GrantOf, LocalQueues};
use crate::error::Error;
use crate::lease::CallbackExecutor;
use crate::store::{Command, GrantMessage, Listener, Store, TrackedKey, has_queue, holds, loss_of};
use crate::util::id::{HolderId, LeaseId, LeaseStart};
use crate::util::key::Key;
use crate::watchdog::Watchdog;

pub(crate) struct NotificationHandler {
    store: Arc<dyn Store>,
    watchdog: Arc<Watchdog>,
    callbacks: Arc<CallbackExecutor>,
    queues: Arc<LocalQueues>,
    /// The longest that a grant can last which nobody here knows of.
    max_ttl: Duration,
}

impl NotificationHandler {
    /// From here on a lease that is lost is tracked no more, and the first in queue for it is woken.
    pub(crate) fn new(
        store: Arc<dyn Store>,
        watchdog: Arc<Watchdog>,
        callbacks: Arc<CallbackExecutor>,
        queues: Arc<LocalQueues>,
        max_ttl: Duration,
    ) -> Self {
        // Weak: the watchdog, and what is held in the queues, keep the callbacks.
        let (dog, local) = (Arc::downgrade(&watchdog), Arc::downgrade(&queues));
        callbacks.set_loss_hook(move |lease| {
            if let Some(watchdog) = dog.upgrade() {
                watchdog.forget(lease);
            }
            if let Some(queues) = local.upgrade() {
                queues.wake(&lease.grant().key);
            }
        });
        Self {
            store,
            watchdog,
            callbacks,
            queues,
            max_ttl,
        }
    }

    /// The key was read without its lease. The read may have come from an old primary or a replica that is
    /// behind, so a pipeline confirms the loss.
    fn lost(&self, key: &Key, lease: LeaseId, value: Option<&[u8]>) {
        let held = self.watchdog.tracked(key);
        let Some(held) = held.filter(|held| held.grant().id == lease) else {
            return;
        };
        if self.store.may_hear_others() {
            self.watchdog.confirm_later(held);
        } else {
            held.lose(self.watchdog.now(), loss_of(value));
        }
    }
}

impl Listener for NotificationHandler {
    fn granted(&self, key: &Key, lease: LeaseId, grant: GrantMessage) {
        if self.queues.granted(key, lease, grant) == GrantOf::AbandonedLease {
            // The release that gave the lease up may have come before the grant.
            self.store.post(Command::Release {
                key: key.clone(),
                lease,
                until: self.watchdog.now().after(self.max_ttl),
                held: None,
                queued: None,
            });
        }
    }

    fn near(&self, key: &Key, lease: LeaseStart) {
        self.queues.near(key, lease);
    }

    fn forced(&self, key: &Key, lease: LeaseStart, by: HolderId) {
        if let Some(held) = self.queues.forced(key, lease, &by) {
            self.watchdog.confirm_force(held, by);
        }
    }

    fn changed(&self, key: &Key) -> Option<TrackedKey> {
        let now = self.watchdog.now();
        let held = self.watchdog.tracked(key);
        let held = held.filter(|lease| lease.valid_for(now).is_some());
        let lease = held.map(|lease| lease.grant().id);
        let matters = lease.is_some() || self.queues.tracked_entry_of(key).is_some();
        matters.then(|| TrackedKey {
            key: key.clone(),
            lease,
        })
    }

    fn all_changed(&self) {
        self.queues.wake_first();
        // Also what has not been held for long enough to be tracked.
        self.watchdog.track_keys(&self.queues.holders());
    }

    fn seen(&self, tracked: &TrackedKey, value: Option<&[u8]>) {
        let TrackedKey { key, lease } = tracked;
        match lease {
            Some(lease) if value.is_some_and(|value| holds(value, *lease)) => {}
            Some(lease) => self.lost(key, *lease, value),
            None => {
                // If another client has the lock, and its release will serve the queue, there is nothing to do.
                let entry = self.queues.tracked_entry_of(key);
                let waits_on = entry
                    .zip(value)
                    .is_some_and(|(entry, value)| has_queue(value) && !holds(value, entry));
                if !waits_on {
                    self.queues.wake(key);
                }
            }
        }
    }

    fn clock_moved(&self) {
        self.watchdog.catch_up(&self.queues.holders());
        self.queues.wake_all();
    }

    fn refused(&self, error: &Error) {
        let error = error.clone();
        self.callbacks
            .queue_event(move |events| events.notifications_refused(&error));
    }
}

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests {
    use super::*;
    use crate::lease::{Grant, Lease};
    use crate::loss::LossReason;
    use crate::store::{MemoryNode, MemoryServer};
    use crate::util::clock::{Clock, MonotonicTime};
    use crate::util::threads::ThreadGroup;
    use crate::watchdog::Scheduler;

    #[test]
    fn a_lease_that_is_lost_is_watched_no_more_whoever_keeps_its_guard() {
        let (scheduler, _inboxes) = Scheduler::new(Clock::default());
        let store = Arc::new(MemoryNode::new(
            MemoryServer::new(),
            HolderId::of_this_process(),
        ));
        let callbacks = CallbackExecutor::start(&ThreadGroup::new(), None).unwrap();
        let second = Duration::from_secs(1);
        let watchdog = Watchdog::new(scheduler, store.clone(), Arc::clone(&callbacks), second);
        let queues = Arc::new(LocalQueues::new(Clock::default()));
        let dog = Arc::clone(&watchdog);
        let _hearing = NotificationHandler::new(store, dog, Arc::clone(&callbacks), queues, second);
        let (key, now) = (Key::new("", "k", 16).unwrap(), MonotonicTime::now());
        let grant = Grant::usual(key.clone(), now);
        let lease = Arc::new(Lease::new(grant, Arc::clone(&callbacks), None));
        watchdog.track_keys(&[Arc::clone(&lease)]);
        assert!(watchdog.tracked(&key).is_some());
        lease.lose(MonotonicTime::now(), LossReason::Deleted);
        assert!(watchdog.tracked(&key).is_none());
        callbacks.stop();
    }
}

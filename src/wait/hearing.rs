//! What a client makes of what Redis tells it: whose turn has come, who should look again, which lock
//! is lost. Never waits, unless a test has moved the clock of its store: then for what is due by that.

use std::sync::Arc;
use std::time::Duration;

use crate::error::Error;
use crate::id::{HolderId, LeaseId, LeaseStart};
use crate::key::Key;
use crate::lease::Courier;
use crate::store::{Command, Grant, Listener, Store, Watched, has_queue, holds, loss_of};
use crate::wait::local::{GrantOf, LocalQueues};
use crate::watchdog::Watchdog;

pub(crate) struct Hearing {
    store: Arc<dyn Store>,
    watchdog: Arc<Watchdog>,
    courier: Arc<Courier>,
    queues: Arc<LocalQueues>,
    /// The longest that a grant can last which nobody here knows of.
    max_ttl: Duration,
}

impl Hearing {
    /// From here on a lease that is lost is watched no more, and the first in line for it is woken.
    pub(crate) fn new(
        store: Arc<dyn Store>,
        watchdog: Arc<Watchdog>,
        courier: Arc<Courier>,
        queues: Arc<LocalQueues>,
        max_ttl: Duration,
    ) -> Self {
        // Weak: the watchdog, and what is held in the lines, keep the courier.
        let (dog, lines) = (Arc::downgrade(&watchdog), Arc::downgrade(&queues));
        courier.when_lost(move |lease| {
            if let Some(watchdog) = dog.upgrade() {
                watchdog.forget(lease);
            }
            if let Some(queues) = lines.upgrade() {
                queues.wake(&lease.terms().key);
            }
        });
        Self {
            store,
            watchdog,
            courier,
            queues,
            max_ttl,
        }
    }

    /// The key was read without its lease. The read may have come from an old primary or a replica that is
    /// behind, so a lane confirms the loss.
    fn lost(&self, key: &Key, lease: LeaseId, value: Option<&[u8]>) {
        let held = self.watchdog.watched(key);
        let Some(held) = held.filter(|held| held.terms().id == lease) else {
            return;
        };
        if self.store.may_hear_others() {
            self.watchdog.confirm_later(held);
        } else {
            held.lose(self.watchdog.now(), loss_of(value));
        }
    }
}

impl Listener for Hearing {
    fn granted(&self, key: &Key, lease: LeaseId, grant: Grant) {
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
            self.watchdog.hear_force(held, by);
        }
    }

    fn changed(&self, key: &Key) -> Option<Watched> {
        let now = self.watchdog.now();
        let held = self.watchdog.watched(key);
        let held = held.filter(|lease| lease.live_for(now).is_some());
        let lease = held.map(|lease| lease.terms().id);
        let matters = lease.is_some() || self.queues.watched_claim_of(key).is_some();
        matters.then(|| Watched {
            key: key.clone(),
            lease,
        })
    }

    fn all_changed(&self) {
        self.queues.wake_first();
        // Also what has not been held for long enough to be watched.
        self.watchdog.watch_keys(&self.queues.holders());
    }

    fn seen(&self, watched: &Watched, value: Option<&[u8]>) {
        let Watched { key, lease } = watched;
        match lease {
            Some(lease) if value.is_some_and(|value| holds(value, *lease)) => {}
            Some(lease) => self.lost(key, *lease, value),
            None => {
                // If another client has the lock, and its release will serve the queue, there is nothing to do.
                let claim = self.queues.watched_claim_of(key);
                let waits_on = claim
                    .zip(value)
                    .is_some_and(|(claim, value)| has_queue(value) && !holds(value, claim));
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
        self.courier
            .tell_later(move |events| events.wake_ups_refused(&error));
    }
}

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests {
    use super::*;
    use crate::clock::{Clock, Moment};
    use crate::lease::{Lease, Terms};
    use crate::loss::LossReason;
    use crate::store::{Memory, MemoryServer};
    use crate::thread::Crew;
    use crate::watchdog::Agenda;

    #[test]
    fn a_lease_that_is_lost_is_watched_no_more_whoever_keeps_its_guard() {
        let (agenda, _inboxes) = Agenda::new(Clock::default());
        let store = Arc::new(Memory::new(
            MemoryServer::new(),
            HolderId::of_this_process(),
        ));
        let courier = Courier::start(&Crew::new(), None).unwrap();
        let second = Duration::from_secs(1);
        let watchdog = Watchdog::new(agenda, store.clone(), Arc::clone(&courier), second);
        let queues = Arc::new(LocalQueues::new(Clock::default()));
        let dog = Arc::clone(&watchdog);
        let _hearing = Hearing::new(store, dog, Arc::clone(&courier), queues, second);
        let (key, now) = (Key::new("", "k", 16).unwrap(), Moment::now());
        let terms = Terms::usual(key.clone(), now);
        let lease = Arc::new(Lease::new(terms, Arc::clone(&courier), None));
        watchdog.watch_keys(&[Arc::clone(&lease)]);
        assert!(watchdog.watched(&key).is_some());
        lease.lose(Moment::now(), LossReason::Deleted);
        assert!(watchdog.watched(&key).is_none());
        courier.stop();
    }
}

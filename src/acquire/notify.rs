//! Handles notifications: wakes waiters that Redis has granted a lock, and ends or confirms leases whose keys changed.
//! Only `clock_moved` blocks: a test has moved the clock of a `MemoryStore`, and `clock_moved` waits for the renewals
//! that are due.
//!
//! Any user with the right to publish may forge a message (docs/security.md), so the client checks each one:
//!
//! - *A grant* needs no request if a thread waits for the lease, no earlier message has contained the lease id, and the
//!   token is plausible: not before the waiter joined, and at most a minute after now, by the clock of Redis. The
//!   waiter confirms any other grant with an acquire, whose reply has the token from Redis.
//! - *A late grant* of a lease that this client has abandoned is released once. The client ignores grants of other
//!   leases.
//! - *A forced release* of a held lease is confirmed by a renewal worker. If the caller has not accepted the grant yet,
//!   its next acquire confirms it. Each lease has one such request at a time. If Redis replies that the lease is held,
//!   the client only counts further messages for a second, so a flood of forged messages costs few requests. A forged
//!   message makes no connection suspect.

use std::sync::Arc;
use std::time::Duration;

use crate::acquire::queue::{GrantOf, LocalQueues};
use crate::command::{GrantMessage, Release};
use crate::config::key::Key;
use crate::lease::CallbackExecutor;
use crate::store::{Backend, KeyState, Listener, ServerId, TrackedKey};
use crate::util::id::{HolderId, LeaseId, LeaseStart};
use crate::watchdog::Watchdog;

pub struct NotificationHandler {
    /// This client's holder id.
    holder: HolderId,
    backend: Backend,
    watchdog: Arc<Watchdog>,
    queues: Arc<LocalQueues>,
    /// The longest ttl that an abandoned lease may have. Its release is repeated for this time.
    max_ttl: Duration,
}

impl NotificationHandler {
    /// Also sets a callback that handles each loss: it stops the tracking of the lost lease's key, and wakes the key's
    /// first waiter.
    pub fn new(
        holder: HolderId,
        backend: Backend,
        watchdog: Arc<Watchdog>,
        callbacks: &CallbackExecutor,
        queues: Arc<LocalQueues>,
        max_ttl: Duration,
    ) -> Self {
        // Weak references avoid a cycle: the watchdog and the held leases own the callback executor, which owns this
        // callback.
        let (dog, local) = (Arc::downgrade(&watchdog), Arc::downgrade(&queues));
        callbacks.set_loss_hook(move |lease| {
            if let Some(watchdog) = dog.upgrade() {
                watchdog.untrack(lease);
            }
            if let Some(queues) = local.upgrade() {
                queues.wake(&lease.grant().key);
            }
        });
        Self {
            holder,
            backend,
            watchdog,
            queues,
            max_ttl,
        }
    }

    /// Whether waiters queue on the server. Without queues, all messages about queues are forged.
    fn has_queues(&self) -> bool {
        self.backend.notifications.free_servers().is_none()
    }

    /// Handles a report that `key` does not contain `lease`. Queues a request that confirms the loss if the report may
    /// come from a server that is no longer the primary. Otherwise ends the lease.
    fn lost(&self, key: &Key, lease: LeaseId, state: KeyState<'_>) {
        let held = self.watchdog.tracked(key);
        let Some(held) = held.filter(|held| held.grant().id == lease) else {
            return;
        };
        if self.backend.notifications.must_confirm_losses() {
            self.watchdog.queue_confirmation(held);
        } else {
            held.lose(self.watchdog.now(), state.loss_reason());
        }
    }
}

impl Listener for NotificationHandler {
    fn granted(&self, _: ServerId, key: &Key, lease: LeaseId, grant: GrantMessage) {
        if self.has_queues()
            && let GrantOf::AbandonedLease(mode) = self.queues.granted(key, lease, grant)
        {
            // The client has sent a release for this lease, but Redis may have read that release before it granted the
            // lease.
            self.backend.store.send_release(Release {
                mode,
                ..Release::unheld(key.clone(), lease, self.watchdog.now().after(self.max_ttl))
            });
        }
    }

    fn near(&self, _: ServerId, key: &Key, lease: LeaseStart) {
        if self.has_queues() {
            self.queues.near(key, lease);
        }
    }

    fn called(&self, _: ServerId, key: &Key, lease: LeaseStart) {
        if self.has_queues() {
            self.queues.called(key, lease);
        }
    }

    fn forced(&self, _: ServerId, key: &Key, lease: LeaseStart, by: HolderId) {
        if let Some(held) = self.queues.forced(key, lease, &by) {
            self.watchdog.handle_force_message(held, by);
        }
    }

    fn changed(&self, server: ServerId, key: &Key) -> Option<TrackedKey> {
        let now = self.watchdog.now();
        let held = self.watchdog.tracked(key);
        let held = held.filter(|lease| lease.valid_for(now).is_some());
        let lease = held.map(|lease| lease.grant().id);
        let matters_to_waiter = match self.backend.notifications.free_servers() {
            Some(majority) => self.queues.record_change(key, server, majority),
            None => self.queues.tracked_entry_of(key).is_some(),
        };
        // This call must not depend on the others: each watcher has to learn of the change.
        let is_watched = self.queues.watches.changed(key);
        let matters = lease.is_some() || matters_to_waiter || is_watched;
        matters.then(|| TrackedKey {
            key: key.clone(),
            lease,
        })
    }

    fn all_changed(&self, server: ServerId) {
        self.moved(&|key| self.backend.notifications.is_at(server, key));
    }

    fn moved(&self, keys: &dyn Fn(&Key) -> bool) {
        self.queues.wake_first(keys);
        let watched = self.queues.watches.missed(keys);
        if !watched.is_empty() {
            self.backend.notifications.track(watched);
        }
        // Includes leases that were granted a moment ago, and whose keys are not tracked yet.
        let mut holders = self.queues.holders();
        holders.retain(|lease| keys(&lease.grant().key));
        self.watchdog.track_again(&holders, keys);
        self.watchdog.confirm_shares(holders);
    }

    fn seen(&self, server: ServerId, tracked: &TrackedKey, state: KeyState<'_>) {
        let TrackedKey { key, lease } = tracked;
        self.queues.watches.seen(key, state);
        match lease {
            Some(lease) if state.is_held_by(*lease) => {}
            Some(lease) => self.lost(key, *lease, state),
            None if let Some(majority) = self.backend.notifications.free_servers() => {
                // This client's own turn is a grant on a minority of the servers, which the client releases next.
                let turn = state.turn().filter(|turn| turn.holder != self.holder);
                if let Some(turn) = turn {
                    self.queues.record_turn(key, turn);
                }
                self.queues
                    .record_read(key, server, state.is_present(), majority);
            }
            None => {
                // If another client holds the lock and its release will grant the lock to the first waiter, the waiter
                // sleeps on.
                let entry = self.queues.tracked_entry_of(key);
                let waits_on =
                    entry.is_some_and(|entry| state.has_queue() && !state.is_held_by(entry));
                if !waits_on {
                    self.queues.wake(key);
                }
            }
        }
    }

    fn clock_moved(&self) {
        self.watchdog.catch_up(&self.queues.holders());
        self.queues.wake_all();
        self.queues.watches.wake_all();
    }
}

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;
    use crate::acquire::queue::QueuePosition;
    use crate::lease::{Grant, Lease, Options};
    use crate::process::threads::ThreadGroup;
    use crate::report::loss::LossReason;
    use crate::store::Scripted;
    use crate::util::clock::{Clock, MonotonicTime};
    use crate::watchdog::Scheduler;

    struct Fixture {
        store: Arc<Scripted>,
        watchdog: Arc<Watchdog>,
        callbacks: Arc<CallbackExecutor>,
        handler: NotificationHandler,
        /// A lease that the holders do not contain yet.
        lease: Arc<Lease>,
    }

    fn fixture() -> Fixture {
        fixture_on(Scripted::default())
    }

    fn holder() -> HolderId {
        HolderId::of_text("host/1/a")
    }

    fn fixture_on(store: Scripted) -> Fixture {
        let scheduler = Scheduler::new(Clock::default());
        let store = Arc::new(store);
        let backend = Backend::new(Arc::clone(&store));
        let callbacks = CallbackExecutor::start(&ThreadGroup::new(), None).unwrap();
        let second = Duration::from_secs(1);
        let watchdog = Watchdog::new(scheduler, &backend, Arc::clone(&callbacks), second);
        let queues = Arc::new(LocalQueues::new(Clock::default()));
        let handler = NotificationHandler::new(
            holder(),
            backend,
            Arc::clone(&watchdog),
            &callbacks,
            queues,
            second,
        );
        let (key, now) = (Key::new("", "k", 16).unwrap(), MonotonicTime::now());
        let lease = Lease::new(Grant::usual(key, now), Arc::clone(&callbacks), None);
        Fixture {
            store,
            watchdog,
            callbacks,
            handler,
            lease: Arc::new(lease),
        }
    }

    impl Drop for Fixture {
        fn drop(&mut self) {
            self.callbacks.stop();
        }
    }

    #[test]
    fn lost_lease_is_not_tracked_any_more() {
        let f = fixture();
        let key = &f.lease.grant().key;
        f.watchdog.track_keys(&[Arc::clone(&f.lease)]);
        assert!(f.watchdog.tracked(key).is_some());
        f.lease.lose(MonotonicTime::now(), LossReason::Deleted);
        assert!(f.watchdog.tracked(key).is_none());
    }

    /// The timer of a lease may fire before its caller adds the lease to the holders. If there is no notification
    /// connection at that moment, the next connection tracks the key.
    #[test]
    fn a_new_connection_tracks_leases_whose_timer_has_fired() {
        let mut store = Scripted::default();
        store.stored_by = Some(ServerId::ONLY);
        let f = fixture_on(store);
        let asked = || f.store.tracked.load(Ordering::SeqCst);
        f.handler.all_changed(ServerId::ONLY);
        assert_eq!(asked(), 0, "nothing is held");
        f.watchdog.track_keys(&[Arc::clone(&f.lease)]);
        assert_eq!(asked(), 1);
        f.handler.moved(&|_| false);
        f.handler.all_changed(ServerId(1));
        assert_eq!(asked(), 1, "the key is on another server");
        f.handler.all_changed(ServerId::ONLY);
        assert_eq!(asked(), 2);
    }

    /// A quorum has no queues, so another user has sent the message.
    #[test]
    fn a_grant_message_is_ignored_without_queues() {
        let now = MonotonicTime::now();
        for free_servers in [None, Some(2)] {
            let mut store = Scripted::default();
            store.free_servers = free_servers;
            let f = fixture_on(store);
            let key = &f.lease.grant().key;
            let waiter = f.handler.queues.join(key, Options::USUAL, None);
            let (lease, ..) = waiter.entry(LeaseId::random(), now);
            let grant = GrantMessage::USUAL;
            f.handler.granted(ServerId::ONLY, key, lease, grant);
            let is_granted = matches!(waiter.position(now), QueuePosition::Granted(..));
            assert_eq!(is_granted, free_servers.is_none());
        }
    }

    #[test]
    fn the_clients_own_grant_counts_as_no_turn() {
        let mut store = Scripted::default();
        store.free_servers = Some(2);
        let f = fixture_on(store);
        let key = &f.lease.grant().key;
        let waiter = f.handler.queues.join(key, Options::USUAL, None);
        waiter.watch(true);
        let tracked = TrackedKey {
            key: key.clone(),
            lease: None,
        };
        for by in [holder(), HolderId::of_text("host/2/b")] {
            let value = format!("lh1 {} 1500000000000000 {by}", LeaseId::random());
            let state = KeyState::Text(value.as_bytes());
            f.handler.seen(ServerId(0), &tracked, state);
            let turn = waiter.take_turn().map(|turn| turn.holder);
            assert_eq!(turn, (by != holder()).then_some(by));
        }
    }
}

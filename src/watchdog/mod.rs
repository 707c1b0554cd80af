//! Keeps the leases of a client alive. All leases share the threads: the client has one timer thread, one renewal
//! worker for each server (a second one once renewals have come due while the first was busy), and one thread that
//! tracks keys and runs the store's maintenance. One more thread runs the checks of `Mutex::renew_while`, from the
//! first such lease on.
//!
//! 1. A lease has one timer in the [`wheel`]: for its next action (a renewal, a warning, tracking), or for the end of
//!    its validity if that is earlier.
//! 2. When renewals are due, the timer thread queues the leases for the workers, and sets the leases' timers to the end
//!    of the validity. So a renewal that hangs cannot delay the report of a loss.
//! 3. A worker confirms reported losses first. Then it renews the lease that ends first: see [`renewals`].
//! 4. A lease with a check goes to the thread of the checks before the workers. If the check refuses, the lease is not
//!    renewed any more, and is lost at the end of its validity. A check that hangs delays only leases with a check.
//!
//! If many leases are renewed together, each of them is renewed a little earlier the next time, by an amount that
//! differs from lease to lease. So renewals that an outage or a burst has brought together are spread within a few
//! minutes.
//!
//! To confirm a reported loss, a worker sends a renewal with a ttl of 1 ms, which does not change the key's ttl. If the
//! notification connection has read the key without finding the lease, but Redis replies to the renewal that the lease
//! is held, the two connections lead to different servers. Then all connections to the key's server become suspect. If
//! Redis does not reply, the client reads the key again after a second.
//!
//! The timer thread sends no request and runs no user code.

pub mod renewals;
pub mod scheduler;
pub mod tracked;
pub mod wheel;

#[cfg(test)]
#[cfg(shuttle)]
mod model;
#[cfg(test)]
#[cfg(not(shuttle))]
mod tests;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use crate::command::{Command, Held, Mode, Release, Renew, Reply, Request};
use crate::config::Replicas;
use crate::config::key::Key;
use crate::lease::{CallbackExecutor, DueActions, Grant, Lease, LeaseRemains, TimerHandle};
use crate::process::threads::ThreadGroup;
use crate::report::error::{Error, ErrorKind};
use crate::report::event::{EventHandler, EventLock};
use crate::report::loss::LossReason;
use crate::report::observe;
use crate::store::{Backend, Notifications, ServerId, Store, TrackedKey, Urgency};
use crate::util::clock::MonotonicTime;
use crate::util::id::HolderId;
use crate::util::mailbox::Step;
use crate::util::sync::Mutex;
use crate::watchdog::renewals::{LossReport, MIN_BATCH, RenewalBatch, RenewalQueue};
use crate::watchdog::tracked::{TrackedLeases, tracked_key};

pub use scheduler::Scheduler;
pub use tracked::MAX_TRACKED;
#[cfg(leasehold_internals)]
pub use wheel::Wheel;

/// The longest pause before a failed renewal is tried again.
const LONGEST_RETRY: Duration = Duration::from_secs(1);
/// The ttl of a renewal that only asks whether the lease holds the key: a renewal never shortens a ttl, and the scripts
/// give no ttl of 1 ms to a key without a ttl. A replica refuses this request like any other write.
const CONFIRMING_TTL: Duration = Duration::from_millis(1);

/// Renews the leases of a client, ends them when their validity ends, and tracks their keys.
pub struct Watchdog {
    scheduler: Arc<Scheduler>,
    store: Arc<dyn Store>,
    notifications: Arc<dyn Notifications>,
    callbacks: Arc<CallbackExecutor>,
    tracked: TrackedLeases,
    /// Whether the thread that runs checks was started.
    has_check_thread: Mutex<bool>,
    /// Starts the workers of further servers, and second workers. `None` before `start` and after `stop`.
    threads: Mutex<Option<ThreadGroup>>,
    command_timeout: Duration,
}

impl Watchdog {
    pub fn new(
        scheduler: Arc<Scheduler>,
        backend: &Backend,
        callbacks: Arc<CallbackExecutor>,
        command_timeout: Duration,
    ) -> Arc<Self> {
        Arc::new(Self {
            scheduler,
            store: Arc::clone(&backend.store),
            notifications: Arc::clone(&backend.notifications),
            callbacks,
            tracked: TrackedLeases::default(),
            has_check_thread: Mutex::new(false),
            threads: Mutex::new(None),
            command_timeout,
        })
    }

    /// Starts the timer thread and the workers. The renewal workers only renew, so a release that waits for a dead
    /// server does not delay renewals.
    pub fn start(self: &Arc<Self>, threads: &ThreadGroup) -> Result<(), Error> {
        let watchdog = Arc::clone(self);
        threads.spawn("leasehold-timer", move || watchdog.run_timer())?;
        *self.threads.lock() = Some(threads.clone());
        self.start_renewals(&self.renewals_of(ServerId::ONLY), threads)
            .inspect_err(|_| self.stop())?;
        let watchdog = Arc::clone(self);
        threads
            .spawn("leasehold-releases", move || watchdog.run_background())
            .inspect_err(|_| self.stop())
    }

    /// Starts the first worker of one server.
    fn start_renewals(
        self: &Arc<Self>,
        queue: &Arc<RenewalQueue>,
        threads: &ThreadGroup,
    ) -> Result<(), Error> {
        if self.store.renewal_limits().by_slot {
            queue.group_by_slot();
        }
        queue.add_worker();
        self.start_worker(queue, threads)
    }

    fn start_worker(
        self: &Arc<Self>,
        queue: &Arc<RenewalQueue>,
        threads: &ThreadGroup,
    ) -> Result<(), Error> {
        let (watchdog, queue) = (Arc::clone(self), Arc::clone(queue));
        let run = move || watchdog.run_renewals(&queue);
        threads.spawn("leasehold-renewals", run)
    }

    /// Starts another worker if leases wait and all workers are busy, up to the store's limit. If no thread can be
    /// started, the leases wait for the other workers.
    fn start_missing_worker(self: &Arc<Self>, queue: &Arc<RenewalQueue>) {
        if !queue.add_worker_if_missing(self.store.renewal_limits().threads) {
            return;
        }
        let threads = self.threads.lock();
        let start = |threads| self.start_worker(queue, threads);
        if threads.as_ref().is_none_or(|group| start(group).is_err()) {
            queue.remove_worker();
        }
    }

    /// The queue of the renewals on `server`. Starts the first worker of a new server.
    fn renewals_of(self: &Arc<Self>, server: ServerId) -> Arc<RenewalQueue> {
        self.scheduler.renewals.of(server, |queue| {
            let threads = self.threads.lock();
            let start = |threads| self.start_renewals(queue, threads);
            threads.as_ref().is_some_and(|group| start(group).is_ok())
        })
    }

    /// Queues leases for the workers of their servers.
    fn queue_renewals(self: &Arc<Self>, leases: Vec<Arc<Lease>>) {
        let mut by_server: BTreeMap<ServerId, Vec<Arc<Lease>>> = BTreeMap::new();
        for lease in leases {
            let server = self.store.server_of(&lease.grant().key);
            by_server.entry(server).or_default().push(lease);
        }
        for (server, leases) in by_server {
            let queue = self.renewals_of(server);
            queue.add(leases);
            self.start_missing_worker(&queue);
        }
    }

    /// Queues a report that `lease` is lost. A worker then asks Redis whether the lease is held.
    fn queue_report(self: &Arc<Self>, lease: Arc<Lease>, report: LossReport) {
        let server = self.store.server_of(&lease.grant().key);
        let queue = self.renewals_of(server);
        queue.queue_confirmation(lease, report);
        self.start_missing_worker(&queue);
    }

    /// Starts the thread that runs checks, unless it runs already. Checks have a thread of their own, since they may
    /// hang.
    pub fn start_checks(self: &Arc<Self>, threads: &ThreadGroup) -> Result<(), Error> {
        let mut is_started = self.has_check_thread.lock();
        if !*is_started {
            let watchdog = Arc::clone(self);
            threads.spawn("leasehold-checks", move || watchdog.run_checks())?;
            *is_started = true;
        }
        Ok(())
    }

    pub fn now(&self) -> MonotonicTime {
        self.scheduler.now()
    }

    /// Sets the timer of `lease` to its next action, so that the lease stays alive. Returns false once the watchdog has
    /// stopped.
    pub fn schedule(&self, lease: &Arc<Lease>) -> bool {
        lease.reschedule(|old, next| self.replace_timer(lease, old, next))
    }

    fn replace_timer(
        &self,
        lease: &Arc<Lease>,
        old: Option<TimerHandle>,
        next: MonotonicTime,
    ) -> Option<TimerHandle> {
        if let Some(old) = old {
            self.scheduler.cancel_timer(old);
        }
        self.scheduler.set_timer(next, Arc::clone(lease))
    }

    /// Ends a lease for its holder, without a request to Redis: removes the lease's timer, and stops tracking its key.
    /// Returns the detached parts, whose listeners are notified if the release finds a loss. If the lease was lost
    /// before, returns the reason as an error.
    pub fn end_lease(&self, lease: &Lease, now: MonotonicTime) -> Result<LeaseRemains, LossReason> {
        self.detach(lease, lease.mark_released(now))
    }

    /// Does the same as [`end_lease`](Self::end_lease) for a lease that passes to the holder of a ticket.
    pub fn end_transferred(&self, lease: &Lease, now: MonotonicTime) -> Result<(), LossReason> {
        self.detach(lease, lease.mark_transferred(now)).map(drop)
    }

    fn detach(
        &self,
        lease: &Lease,
        (detached, outcome): (LeaseRemains, Result<(), LossReason>),
    ) -> Result<LeaseRemains, LossReason> {
        if let Some(timer) = detached.timer {
            self.scheduler.cancel_timer(timer);
        }
        if detached.tracked {
            self.tracked.remove(lease);
        }
        outcome.map(|()| detached)
    }

    /// Schedules `next`, which replaces `before` after a hand-off. If `before` was tracked, tracks `next`.
    pub fn replace_lease(&self, before: &Lease, detached: &LeaseRemains, next: &Arc<Lease>) {
        if let Some(timer) = detached.timer {
            self.scheduler.cancel_timer(timer);
        }
        if detached.tracked {
            self.tracked.remove(before);
            // A notification that comes between the removal and this call finds no lease for the key. Tracking the key
            // also reads the key again.
            self.track_keys(std::slice::from_ref(next));
        }
        self.schedule_or_lose(next);
    }

    /// Stops tracking the key of a lost lease, whose guard may live on.
    pub fn untrack(&self, lost: &Lease) {
        self.tracked.remove(lost);
    }

    /// This client's lease of `key`, if the key is tracked.
    pub fn tracked(&self, key: &Key) -> Option<Arc<Lease>> {
        self.tracked.get(key)
    }

    /// Ends the threads, and marks every lease as lost with [`LossReason::Shutdown`].
    pub fn stop(&self) {
        let now = self.now();
        // Afterwards, workers cannot be started.
        self.threads.lock().take();
        for lease in self.scheduler.stop() {
            lease.lose(now, LossReason::Shutdown);
        }
    }

    /// Asks Redis to set the ttl of the key to `ttl`, or to the rest of the validity if that is longer, and waits for
    /// the reply. Never shortens the key's ttl. The wait for a renewal that is under way counts towards the time-out.
    pub fn extend(&self, lease: &Arc<Lease>, ttl: Duration) -> Result<(), Error> {
        let deadline = self.now().after(self.command_timeout);
        if !lease.begin_ttl_change(deadline, || self.now()) {
            return Err(match lease.loss(self.now()) {
                Some(reason) => Error::lost(reason),
                None => Error::new(ErrorKind::Timeout, "a renewal is under way"),
            });
        }
        let asked_at = self.now();
        let ttl = lease.at_least_validity(ttl, asked_at);
        let outcome = self.store.execute_one(renewal(lease, ttl), deadline);
        let result = self.end_ttl_change(lease, asked_at, self.now(), ttl, outcome);
        self.schedule_or_lose(lease);
        match (result, lease.loss(self.now())) {
            (_, Some(reason)) => Err(Error::lost(reason)),
            (result, None) => result,
        }
    }

    /// Extends several leases with one request to the store, as [`extend`](Self::extend) does for one lease.
    pub fn extend_all(&self, leases: &[Arc<Lease>], ttl: Duration) -> Vec<Result<(), Error>> {
        let deadline = self.now().after(self.command_timeout);
        let begun = leases
            .iter()
            .map(|lease| lease.begin_ttl_change(deadline, || self.now()));
        let begun: Vec<bool> = begun.collect();
        let asked_at = self.now();
        let ttls = leases
            .iter()
            .map(|lease| lease.at_least_validity(ttl, asked_at));
        let asked: Vec<_> = leases.iter().zip(ttls).zip(begun).collect();
        let begun = asked.iter().filter(|(_, begun)| *begun);
        let mut requests: Vec<Request> = begun
            .map(|((lease, ttl), _)| Request::new(renewal(lease, *ttl), deadline))
            .collect();
        self.store.execute(&mut requests);
        let mut outcomes = requests.into_iter().map(Request::into_outcome);
        let results = asked.into_iter().map(|((lease, ttl), begun)| {
            let outcome = begun.then(|| outcomes.next()).flatten();
            let result = match outcome {
                None => Err(Error::new(ErrorKind::Timeout, "a renewal is under way")),
                Some(outcome) => {
                    let ended = self.end_ttl_change(lease, asked_at, self.now(), ttl, outcome);
                    self.schedule_or_lose(lease);
                    ended
                }
            };
            match lease.loss(self.now()) {
                Some(reason) => Err(Error::lost(reason)),
                None => result,
            }
        });
        results.collect()
    }

    fn run_timer(self: &Arc<Self>) {
        while let Some(due) = self.scheduler.wait_for_due_timers() {
            let (to_renew, to_track) = self.process_due(due);
            self.queue_renewals(to_renew);
            if !to_track.is_empty() {
                let room = self.tracked.room();
                self.scheduler.queue_tracking(to_track, room);
            }
        }
    }

    /// Runs, on this thread, the actions that became due because a test moved the clock. Waits for renewals of `held`
    /// that other threads have begun.
    pub fn catch_up(&self, held: &[Arc<Lease>]) {
        let now = self.now();
        let (to_renew, to_track) = self.process_due(self.scheduler.take_due_timers());
        self.renew_all(&to_renew);
        self.track_keys(&to_track);
        let deadline = self.now().after(self.command_timeout);
        for lease in held {
            lease.wait_for_renewal(now, deadline.since(self.now()));
        }
    }

    /// Sets the next timers of leases whose timers have fired, marks leases as lost whose validity has ended, and
    /// queues checks and warnings. Returns the leases to renew, and the leases to track.
    fn process_due(&self, due: Vec<Arc<Lease>>) -> (Vec<Arc<Lease>>, Vec<Arc<Lease>>) {
        let now = self.now();
        let (mut to_renew, mut to_check, mut to_track) = (Vec::new(), Vec::new(), Vec::new());
        let room = self.tracked.room();
        for lease in due {
            let mut stopped = false;
            let due = lease.take_due(now, |old, next| {
                let timer = self.replace_timer(&lease, old, next);
                stopped = timer.is_none();
                timer
            });
            match due {
                _ if stopped => lease.lose(now, LossReason::Shutdown),
                DueActions::Ended => {}
                DueActions::Held {
                    renew, track, warn, ..
                } => {
                    if warn {
                        self.queue_hold_warning(Arc::clone(&lease));
                    }
                    if track && to_track.len() < room {
                        to_track.push(Arc::clone(&lease));
                    }
                    match (renew, lease.grant().options.checked) {
                        (true, true) => to_check.push(lease),
                        (true, false) => to_renew.push(lease),
                        (false, _) => {}
                    }
                }
            }
        }
        if !to_check.is_empty() {
            self.scheduler.checks.post(|queued| {
                queued.append(&mut to_check);
                true
            });
        }
        (to_renew, to_track)
    }

    /// Queues the event that `max_hold` ends soon. The event calls no handler if the lease has ended by then.
    fn queue_hold_warning(&self, lease: Arc<Lease>) {
        let scheduler = Arc::clone(&self.scheduler);
        self.callbacks.queue_event(move |events| {
            if let Some(left) = lease.hold_left(scheduler.now()) {
                events.max_hold_ending(lease.event_lock(), left);
            }
        });
    }

    fn run_background(&self) {
        let retries = Arc::new(observe::Retries::default());
        while let Some((to_track, is_maintenance_due)) = self.scheduler.wait_for_background_work() {
            self.track_keys(&to_track);
            if is_maintenance_due {
                if self.store.run_maintenance() {
                    self.scheduler.request_maintenance(Urgency::Soon);
                }
                if observe::IS_ON {
                    let (retries, count) = (Arc::clone(&retries), self.store.failed_releases());
                    self.callbacks
                        .queue_observation(move || retries.record(count));
                }
            }
        }
    }

    /// Tells the store to read the keys and to track their changes, as long as there is room among the tracked leases.
    /// If there is no notification connection, the keys are tracked once there is such a connection.
    pub fn track_keys(&self, leases: &[Arc<Lease>]) {
        let tracked = leases.iter().filter(|lease| self.add_tracked(lease));
        self.ask_to_track(tracked.map(|lease| tracked_key(lease)).collect());
    }

    /// Tracks the leases of `holders`, and the leases that are tracked already, if `is_wanted` returns true for their
    /// keys. A lease may be tracked before it is among the holders: its timer may fire before its caller adds it.
    pub fn track_again(&self, holders: &[Arc<Lease>], is_wanted: &dyn Fn(&Key) -> bool) {
        for lease in holders {
            self.add_tracked(lease);
        }
        self.ask_to_track(self.tracked.keys(is_wanted));
    }

    fn ask_to_track(&self, keys: Vec<TrackedKey>) {
        if !keys.is_empty() {
            self.notifications.track(keys);
        }
    }

    /// Adds the lease to the tracked leases, if it is held and there is room. Returns true if the lease is tracked
    /// afterwards.
    fn add_tracked(&self, lease: &Arc<Lease>) -> bool {
        let Grant { key, options, .. } = lease.grant();
        if options.mode != Mode::Exclusive {
            // Each reader that comes or goes changes the key, so reports of changes would cost too many requests. The
            // client only needs a connection, for the message of a `force_unlock`.
            self.notifications.request(key);
            return false;
        }
        lease.track_if(|| self.tracked.insert(lease))
    }

    /// Runs the checks that are due, and queues each renewal at once, since the next check may be slow.
    fn run_checks(self: &Arc<Self>) {
        let next = |queued: &mut Vec<Arc<Lease>>| match queued.is_empty() {
            true => Step::Sleep(None),
            false => Step::Return(std::mem::take(queued)),
        };
        while let Some(leases) = self.scheduler.checks.wait(next) {
            for lease in leases {
                if let Some(lease) = lease.run_check() {
                    self.queue_renewals(vec![lease]);
                }
            }
        }
    }

    fn run_renewals(self: &Arc<Self>, queue: &Arc<RenewalQueue>) {
        let at_a_time = self.store.renewal_limits().at_a_time;
        while let Some(batch) = queue.wait_for_batch(at_a_time) {
            self.start_missing_worker(queue);
            match batch {
                RenewalBatch::Renew(leases) => self.renew_all(&leases),
                RenewalBatch::Confirm(report, leases) => {
                    self.confirm_all(leases.values().collect(), report);
                }
            }
        }
    }

    /// Handles a read of the key that did not find the lease. Queues a request on a pipeline, whose reply decides
    /// whether the lease is lost.
    pub fn queue_confirmation(self: &Arc<Self>, lease: Arc<Lease>) {
        self.queue_report(lease, LossReport::KeyRead);
    }

    /// Queues a request on a pipeline for each share, after messages may have been missed.
    pub fn confirm_shares(self: &Arc<Self>, leases: Vec<Arc<Lease>>) {
        for lease in leases {
            if lease.grant().options.mode != Mode::Exclusive {
                self.confirm_share(lease);
            }
        }
    }

    /// Queues a request on a pipeline that asks whether the lease is held.
    pub fn confirm_share(self: &Arc<Self>, lease: Arc<Lease>) {
        self.queue_report(lease, LossReport::Missed);
    }

    /// Handles a message that `by` unlocked the lease by force. If no other user can publish messages, marks the lease
    /// as lost at once. Otherwise queues a request that confirms the loss, one at a time for each lease.
    pub fn handle_force_message(self: &Arc<Self>, lease: Arc<Lease>, by: HolderId) {
        let now = self.now();
        if !self.notifications.must_confirm_losses() {
            lease.lose(now, LossReason::ForceUnlocked { by });
        } else if lease.record_force_message(by, now) {
            self.queue_report(lease, LossReport::ForceMessage);
        }
    }

    /// Asks a pipeline whether the lease holds its key, and waits for the reply. Returns an error if there is no reply,
    /// or if the lease is lost. Ends a lost lease.
    pub fn confirm(&self, lease: &Lease) -> Result<(), Error> {
        let deadline = self.now().after(self.command_timeout);
        let outcome = self.store.execute_one(confirmation(lease), deadline);
        self.handle_confirmation(lease, outcome, LossReport::KeyRead)
    }

    /// Asks a pipeline whether the leases hold their keys, and ends those that do not.
    fn confirm_all(&self, mut leases: Vec<&Arc<Lease>>, report: LossReport) {
        let now = self.now();
        leases.retain(|lease| lease.valid_for(now).is_some());
        let deadline = now.after(self.command_timeout);
        let command = |lease: &&Arc<Lease>| confirmation(lease);
        let mut requests: Vec<Request> = leases
            .iter()
            .map(|lease| Request::new(command(lease), deadline))
            .collect();
        self.store.execute(&mut requests);
        for (lease, request) in leases.into_iter().zip(requests) {
            let confirmed = self.handle_confirmation(lease, request.into_outcome(), report);
            if report == LossReport::ForceMessage {
                lease.record_force_answer(confirmed.is_ok().then(|| self.now()));
            }
            let is_settled = match &confirmed {
                // Another message may have come since the request was sent, so the key is read again.
                Ok(()) => report != LossReport::ForceMessage,
                Err(error) => error.is_lease_lost(),
            };
            if !is_settled {
                // Tracking the key again reads it.
                lease.track_again_at(self.now().after(LONGEST_RETRY));
                self.schedule_or_lose(lease);
            }
        }
    }

    /// Handles the reply to a request for [`confirmation`]: marks the lease as lost, or the connections as suspect.
    fn handle_confirmation(
        &self,
        lease: &Lease,
        outcome: Result<Reply, Error>,
        report: LossReport,
    ) -> Result<(), Error> {
        let reason = match outcome? {
            Reply::Done => {
                if report == LossReport::KeyRead {
                    // The reply contradicts the report, so one of the two connections does not lead to the primary.
                    self.store.suspect_connections(&lease.grant().key);
                }
                return Ok(());
            }
            Reply::Missing => LossReason::Deleted,
            Reply::Taken { by } => LossReason::TakenOver { by },
            _ => unreachable!("the reply of another command"),
        };
        let now = self.now();
        lease.lose(now, reason.clone());
        Err(Error::lost(lease.loss(now).unwrap_or(reason)))
    }

    /// Renews the leases that are still due, with one request to the store, and sets their next timers.
    fn renew_all(&self, leases: &[Arc<Lease>]) {
        let asked_at = self.now();
        let deadline = asked_at.after(self.command_timeout);
        // Leases that are being extended are left out. The end of the extension sets the time of their next renewal.
        let (begun, late): (Vec<&Arc<Lease>>, Vec<Duration>) = leases
            .iter()
            .filter_map(|lease| lease.begin_renewal(asked_at).map(|late| (lease, late)))
            .unzip();
        let are_many = leases.len() >= MIN_BATCH;
        let ttls: Vec<Duration> = begun
            .iter()
            .map(|lease| lease.renewal_ttl(asked_at))
            .collect();
        let mut requests: Vec<Request> = begun
            .iter()
            .zip(&ttls)
            .map(|(lease, ttl)| Request::new(renewal(lease, *ttl), deadline))
            .collect();
        self.store.execute(&mut requests);
        let answered_at = self.now();
        let took = answered_at.since(asked_at);
        let jitters = renewals::jitters(begun.clone(), self.store.renewal_limits().by_slot);
        let asked = begun.iter().zip(ttls).zip(late).zip(jitters);
        let mut observed = observe::RenewalMetrics::default();
        for ((((lease, ttl), late), jitter), request) in asked.zip(requests) {
            let outcome = request.into_outcome();
            let outcome = self.end_ttl_change(lease, asked_at, answered_at, ttl, outcome);
            observed.add(&outcome, late, took);
            if are_many && outcome.is_ok() {
                lease.spread_renewal(jitter);
            }
            self.queue_renewal_event(lease, outcome);
            self.schedule_or_lose(lease);
        }
        self.callbacks.queue_observation(move || observed.record());
    }

    /// Schedules a lease again; marks it as lost if the watchdog has stopped.
    pub fn schedule_or_lose(&self, lease: &Arc<Lease>) {
        if !self.schedule(lease) {
            lease.lose(self.now(), LossReason::Shutdown);
        }
    }

    /// Ends a change of the ttl with its reply, which came at `now`. Marks the lease as lost if the reply reports that
    /// the key is gone or has another value.
    fn end_ttl_change(
        &self,
        lease: &Lease,
        asked_at: MonotonicTime,
        now: MonotonicTime,
        ttl: Duration,
        outcome: Result<Reply, Error>,
    ) -> Result<(), Error> {
        let lost = |reason: LossReason| {
            lease.fail_ttl_change(now, Duration::ZERO, None);
            lease.lose(now, reason.clone());
            Err(Error::lost(lease.loss(now).unwrap_or(reason)))
        };
        // If the lease ended during this renewal, the renewal may have set the key again after the release. And the key
        // of a lease with a `min_hold` stays after the release, so the renewal may have prolonged it. So the lease is
        // released once more, after this renewal. This ends no other grant: a lease is not handed off while its ttl is
        // being changed, so its id is unused.
        let has_ended = match lease.grant().options.min_hold.is_zero() {
            true => self.store.renewals_set_keys() && lease.valid_for(now).is_none(),
            false => lease.is_released(),
        };
        if has_ended {
            self.store
                .send_release(release_after_renewal(lease, ttl, now));
        }
        match outcome {
            Ok(Reply::Done) => {
                lease.finish_ttl_change(now, asked_at, ttl);
                Ok(())
            }
            Ok(Reply::Missing) => lost(LossReason::Deleted),
            Ok(Reply::Taken { by }) => lost(LossReason::TakenOver { by }),
            Ok(_) => unreachable!("the reply of another command"),
            Err(error) => {
                let every = lease.grant().options.renew_every.unwrap_or(LONGEST_RETRY);
                let retry_at = now.after((every / 4).min(LONGEST_RETRY));
                lease.fail_ttl_change(now, ttl, Some(retry_at));
                Err(error)
            }
        }
    }

    /// Queues the event of a renewal. A loss has an event of its own.
    fn queue_renewal_event(&self, lease: &Arc<Lease>, outcome: Result<(), Error>) {
        match outcome {
            Err(error) if error.is_lease_lost() => {}
            Ok(()) => {
                let lease = Arc::clone(lease);
                self.callbacks
                    .queue_event(move |events| events.renewed(lease.event_lock()));
            }
            Err(error) => {
                let grant = lease.grant();
                let report = move |events: &dyn EventHandler, lock: EventLock<'_>| {
                    events.renewal_failed(lock, &error);
                };
                self.callbacks
                    .queue_lock_event(&grant.key, grant.token, report);
            }
        }
    }
}

/// The command that renews `lease`.
fn renewal(lease: &Lease, ttl: Duration) -> Command {
    renew(lease, ttl, lease.grant().options.replicas)
}

/// The command that asks whether `lease` holds its key.
fn confirmation(lease: &Lease) -> Command {
    renew(lease, CONFIRMING_TTL, None)
}

fn renew(lease: &Lease, ttl: Duration, replicas: Option<Replicas>) -> Command {
    let grant = lease.grant();
    Command::Renew(Renew {
        key: grant.key.clone(),
        lease: grant.id,
        mode: grant.options.mode,
        token: grant.token,
        ttl,
        replicas,
    })
}

/// The release of a lease that ended while the client renewed it. The reply to this release reports no loss. The time
/// at which a `min_hold` ends follows from the token.
fn release_after_renewal(lease: &Lease, ttl: Duration, now: MonotonicTime) -> Release {
    let grant = lease.grant();
    let min_hold = grant.options.min_hold;
    Release {
        min_hold,
        mode: grant.options.mode,
        held: (!min_hold.is_zero()).then(|| Held {
            token: grant.token,
            is_token_in_value: grant.is_token_in_value,
            others_queued: lease.has_others_queued(),
            valid_until: now,
        }),
        ..Release::unheld(grant.key.clone(), grant.id, lease.key_until().after(ttl))
    }
}

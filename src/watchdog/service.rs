//! The threads of the watchdog: the timer, which finds what is due and tells of lost leases, and the
//! workers, which renew. The timer thread does no I/O; user code runs on a worker of its own only.

#[cfg(test)]
#[cfg(shuttle)]
mod model;
#[cfg(test)]
#[cfg(not(shuttle))]
mod tests;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crossbeam_channel::Receiver;

use crate::error::{Error, ErrorKind};
use crate::event::{EventHandler, EventLock};
use crate::lease::{CallbackExecutor, Detached, Due, Lease, TimerNote};
use crate::loss::LossReason;
use crate::observe;
use crate::store::{Command, RENEWAL_PIPELINES, Reply, Request, Store, Urgency};
use crate::util::clock::MonotonicTime;
use crate::util::id::HolderId;
use crate::util::key::Key;
use crate::util::sync::Mutex;
use crate::util::threads::ThreadGroup;
use crate::watchdog::renewals::{AT_A_TIME, Work};
use crate::watchdog::scheduler::{Inboxes, Job, Scheduler, Timer};
use crate::watchdog::tracked::{TrackedLeases, tracked};

/// Longest pause before a renewal that failed is tried again.
const LONGEST_RETRY: Duration = Duration::from_secs(1);
/// A renewal by this changes no ttl: it only asks whether the lease is held. A replica refuses it.
const CONFIRMING_TTL: Duration = Duration::from_millis(1);

/// Why a lease seems to be lost.
#[derive(Clone, Copy, PartialEq)]
enum Doubt {
    /// A read of its key did not find it.
    Seen,
    /// A message says that it was taken away. Anybody may publish one.
    Force,
}

pub(crate) struct Watchdog {
    scheduler: Arc<Scheduler>,
    store: Arc<dyn Store>,
    callbacks: Arc<CallbackExecutor>,
    tracked: TrackedLeases,
    /// Leases that wait for the worker to have them tracked: no more than there is room for.
    to_track: AtomicUsize,
    /// Until the thread is needed that works it off.
    checks: Mutex<Option<Receiver<Job>>>,
    command_timeout: Duration,
}

impl Watchdog {
    pub(crate) fn new(
        scheduler: Arc<Scheduler>,
        store: Arc<dyn Store>,
        callbacks: Arc<CallbackExecutor>,
        command_timeout: Duration,
    ) -> Arc<Self> {
        Arc::new(Self {
            scheduler,
            store,
            callbacks,
            tracked: TrackedLeases::default(),
            to_track: AtomicUsize::new(0),
            checks: Mutex::new(None),
            command_timeout,
        })
    }

    /// Starts the timer and the workers. Those that renew do nothing else, so that releases stuck
    /// behind a dead server never hold up renewals.
    pub(crate) fn start(
        self: &Arc<Self>,
        threads: &ThreadGroup,
        inboxes: Inboxes,
    ) -> Result<(), Error> {
        *self.checks.lock() = Some(inboxes.checks);
        let dog = Arc::clone(self);
        threads.spawn("leasehold-timer", move || dog.run_timer())?;
        for _ in 0..RENEWAL_PIPELINES {
            let dog = Arc::clone(self);
            threads
                .spawn("leasehold-renewals", move || dog.run_renewals())
                .inspect_err(|_| self.stop())?;
        }
        let (dog, inbox) = (Arc::clone(self), inboxes.releases);
        threads
            .spawn("leasehold-releases", move || dog.work(&inbox))
            .inspect_err(|_| self.stop())
    }

    /// Starts the thread that asks checks, unless it runs. User code has one of its own: it may hang.
    pub(crate) fn start_checks(self: &Arc<Self>, threads: &ThreadGroup) -> Result<(), Error> {
        let mut not_started = self.checks.lock();
        if let Some(inbox) = not_started.clone() {
            let dog = Arc::clone(self);
            threads.spawn("leasehold-checks", move || dog.work(&inbox))?;
            *not_started = None;
        }
        Ok(())
    }

    /// What time it is for this client.
    pub(crate) fn now(&self) -> MonotonicTime {
        self.scheduler.now()
    }

    /// Keeps `lease` alive from now on. False, and nothing done, once stopped.
    pub(crate) fn watch(&self, lease: &Arc<Lease>) -> bool {
        lease.reschedule(|old, next| self.reset(lease, old, next))
    }

    fn reset(
        &self,
        lease: &Arc<Lease>,
        old: Option<TimerNote>,
        next: MonotonicTime,
    ) -> Option<TimerNote> {
        if let Some(old) = old {
            self.scheduler.cancel(old);
        }
        self.scheduler.set(next, Timer::Lease(Arc::clone(lease)))
    }

    /// Lets go of a lease that was released or lost before; says which.
    pub(crate) fn release(&self, lease: &Lease, now: MonotonicTime) -> Result<(), LossReason> {
        let (ended, outcome) = lease.release(now);
        if let Some(timer) = ended.timer {
            self.scheduler.cancel(timer);
        }
        if ended.tracked {
            self.tracked.remove(lease);
        }
        outcome
    }

    /// Keeps `next` alive from now on, in the place of `before`, which ended in its favour.
    pub(crate) fn replace_lease(&self, before: &Lease, ended: &Detached, next: &Arc<Lease>) {
        if let Some(timer) = ended.timer {
            self.scheduler.cancel(timer);
        }
        if ended.tracked {
            self.tracked.remove(before);
            // What changed in between was nobody's.
            self.track_keys(std::slice::from_ref(next));
        }
        self.reschedule(next);
    }

    /// A lost lease is not tracked any more, even if its guard is kept or forgotten.
    pub(crate) fn forget(&self, lost: &Lease) {
        self.tracked.remove(lost);
    }

    /// The lease of this client whose key Redis was asked to tell about.
    pub(crate) fn tracked(&self, key: &Key) -> Option<Arc<Lease>> {
        self.tracked.get(key)
    }

    /// Ends the threads, and every lease with [`LossReason::Shutdown`].
    pub(crate) fn stop(&self) {
        let now = self.now();
        for lease in self.scheduler.stop() {
            lease.lose(now, LossReason::Shutdown);
        }
    }

    /// Makes `lease` last for `ttl` from now at least.
    pub(crate) fn extend(&self, lease: &Arc<Lease>, ttl: Duration) -> Result<(), Error> {
        let asked_at = self.now();
        let deadline = asked_at.after(self.command_timeout);
        if !lease.begin_ttl_change(deadline, || self.now()) {
            return Err(match lease.loss(self.now()) {
                Some(reason) => Error::lost(reason),
                None => Error::new(ErrorKind::Timeout, "a renewal is under way"),
            });
        }
        let asked_at = self.now();
        let deadline = asked_at.after(self.command_timeout);
        let outcome = self.store.execute_one(renewal(lease, ttl), deadline);
        let result = self.ttl_answered(lease, asked_at, self.now(), ttl, outcome);
        self.reschedule(lease);
        match (result, lease.loss(self.now())) {
            (_, Some(reason)) => Err(Error::lost(reason)),
            (result, None) => result,
        }
    }

    fn run_timer(&self) {
        while let Some(due) = self.scheduler.next() {
            let (renewals, is_tracked) = self.process_due(due);
            self.scheduler.renew(renewals);
            self.track_later(is_tracked);
        }
    }

    fn track_later(&self, leases: Vec<Arc<Lease>>) {
        if !leases.is_empty() {
            self.to_track.fetch_add(leases.len(), Ordering::AcqRel);
            self.scheduler.give(Job::Track(leases));
        }
    }

    /// Does at once, on this thread, what has become due because the clock was moved. Acquirer for what
    /// another thread has in hand of it.
    pub(crate) fn catch_up(&self, held: &[Arc<Lease>]) {
        let now = self.now();
        let (renewals, is_tracked) = self.process_due(self.scheduler.due());
        self.renew(&renewals);
        self.track_keys(&is_tracked);
        let deadline = self.now().after(self.command_timeout);
        for lease in held {
            lease.wait_for_renewal(now, deadline.since(self.now()));
        }
    }

    /// Sets the next timers of the leases that are due. Returns which of them are to be renewed, and
    /// which to be tracked.
    fn process_due(&self, due: Vec<Timer>) -> (Vec<Arc<Lease>>, Vec<Arc<Lease>>) {
        let now = self.now();
        let (mut renewals, mut checks, mut is_tracked) = (Vec::new(), Vec::new(), Vec::new());
        let to_track = self.to_track.load(Ordering::Acquire);
        let room = self.tracked.room().saturating_sub(to_track);
        for timer in due {
            let Timer::Lease(lease) = timer else {
                self.scheduler.give(Job::Maintenance);
                continue;
            };
            let mut stopped = false;
            let due = lease.due(now, |old, next| {
                let note = self.reset(&lease, old, next);
                stopped = note.is_none();
                note
            });
            match due {
                _ if stopped => lease.lose(now, LossReason::Shutdown),
                Due::Over => {}
                Due::Held {
                    renew, watch, warn, ..
                } => {
                    if warn {
                        self.warn(Arc::clone(&lease));
                    }
                    if watch && is_tracked.len() < room {
                        is_tracked.push(Arc::clone(&lease));
                    }
                    match (renew, lease.grant().options.checked) {
                        (true, true) => checks.push(lease),
                        (true, false) => renewals.push(lease),
                        (false, _) => {}
                    }
                }
            }
        }
        if !checks.is_empty() {
            self.scheduler.give(Job::Check(checks));
        }
        (renewals, is_tracked)
    }

    /// Tells that `max_hold` is about to strike, unless that is of no use any more.
    fn warn(&self, lease: Arc<Lease>) {
        let scheduler = Arc::clone(&self.scheduler);
        self.callbacks.queue_event(move |events| {
            if let Some(left) = lease.hold_left(scheduler.now()) {
                events.max_hold_near(lease.event(), left);
            }
        });
    }

    fn work(&self, inbox: &Receiver<Job>) {
        while let Ok(job) = inbox.recv() {
            match job {
                Job::Check(leases) => self.check(leases),
                Job::Track(leases) => {
                    self.track_keys(&leases);
                    self.to_track.fetch_sub(leases.len(), Ordering::AcqRel);
                }
                Job::Maintenance => {
                    self.scheduler.maintenance_begins();
                    if self.store.run_maintenance() {
                        self.scheduler.request_maintenance(Urgency::Soon);
                    }
                    if observe::IS_ON {
                        let retries = self.store.failed_releases();
                        self.callbacks
                            .queue_observation(move || observe::retries(&retries));
                    }
                }
                Job::Stop => return,
            }
        }
    }

    /// Has Redis tell what happens to the keys, as far as there is room for that. If it cannot now, it is
    /// asked once it can.
    pub(crate) fn track_keys(&self, leases: &[Arc<Lease>]) {
        let mut keys = Vec::new();
        for lease in leases {
            lease.watch(|| {
                let has_room = self.tracked.insert(lease);
                if has_room {
                    keys.push(tracked(lease));
                }
                has_room
            });
        }
        if !keys.is_empty() {
            self.store.track(keys);
        }
    }

    /// Passes on those that may be renewed, each at once: the next check may be slow.
    fn check(&self, leases: Vec<Arc<Lease>>) {
        for lease in leases {
            if lease.may_be_renewed() {
                self.scheduler.renew(vec![lease]);
            }
        }
    }

    fn run_renewals(&self) {
        while let Some(work) = self.scheduler.next_renewals() {
            match work {
                Work::Renew(leases) => self.renew(&leases),
                Work::Confirm(leases) => self.confirm_all(leases.iter().collect(), Doubt::Seen),
                Work::ConfirmForce(leases) => {
                    self.confirm_all(leases.iter().collect(), Doubt::Force);
                }
            }
        }
    }

    /// For a lease that seems to be lost: queues a request on a pipeline, which ends the lease if it is lost there too.
    pub(crate) fn confirm_later(&self, lease: Arc<Lease>) {
        self.scheduler.queue_confirmation(lease);
    }

    /// Handles a message that says that `by` took the lock away: as [`confirm_later`](Self::confirm_later), with one
    /// request at a time. Ends the lease at once if no other user can send messages.
    pub(crate) fn confirm_force(&self, lease: Arc<Lease>, by: HolderId) {
        let now = self.now();
        if !self.store.must_confirm_losses() {
            lease.lose(now, LossReason::ForceUnlocked { by });
        } else if lease.note_force(by, now) {
            self.scheduler.queue_force_confirmation(lease);
        }
    }

    /// As [`confirm_later`](Self::confirm_later), and acquirer for the answer. An error if it is lost, or if
    /// that could not be found out.
    pub(crate) fn confirm(&self, lease: &Lease) -> Result<(), Error> {
        let deadline = self.now().after(self.command_timeout);
        let outcome = self
            .store
            .execute_one(renewal(lease, CONFIRMING_TTL), deadline);
        self.confirmed(lease, outcome, Doubt::Seen)
    }

    fn confirm_all(&self, mut leases: Vec<&Arc<Lease>>, doubt: Doubt) {
        let now = self.now();
        leases.retain(|lease| lease.valid_for(now).is_some());
        let deadline = now.after(self.command_timeout);
        let command = |lease: &&Arc<Lease>| renewal(lease, CONFIRMING_TTL);
        let mut requests: Vec<Request> = leases
            .iter()
            .map(|lease| Request::new(command(lease), deadline))
            .collect();
        self.store.execute(&mut requests);
        for (lease, request) in leases.into_iter().zip(requests) {
            let confirmed = self.confirmed(lease, request.into_outcome(), doubt);
            if doubt == Doubt::Force {
                lease.note_force_answer(confirmed.is_ok().then(|| self.now()));
            }
            let is_answered = match &confirmed {
                // Another message may have come meanwhile.
                Ok(()) => doubt == Doubt::Seen,
                Err(error) => error.is_lease_lost(),
            };
            if !is_answered {
                // Its key is looked at again.
                lease.track_again(self.now().after(LONGEST_RETRY));
                self.reschedule(lease);
            }
        }
    }

    /// Handles a pipeline's answer about a lease that seems to be lost.
    fn confirmed(
        &self,
        lease: &Lease,
        outcome: Result<Reply, Error>,
        doubt: Doubt,
    ) -> Result<(), Error> {
        let reason = match outcome? {
            Reply::Done => {
                if doubt == Doubt::Seen {
                    // The pipeline denies the loss: one of the two connections does not lead to the primary.
                    self.store.suspect_connections();
                }
                return Ok(());
            }
            Reply::Missing => LossReason::Deleted,
            Reply::Taken { by } => LossReason::TakenOver { by },
            _ => unreachable!("another command's answer to a renewal"),
        };
        let now = self.now();
        lease.lose(now, reason.clone());
        Err(Error::lost(lease.loss(now).unwrap_or(reason)))
    }

    fn renew(&self, leases: &[Arc<Lease>]) {
        let asked_at = self.now();
        let deadline = asked_at.after(self.command_timeout);
        // One that is being extended is left to that: its end sets the next renewal.
        let (begun, late): (Vec<&Arc<Lease>>, Vec<Duration>) = leases
            .iter()
            .filter_map(|lease| lease.begin_renewal(asked_at).map(|late| (lease, late)))
            .unzip();
        let is_crowd = leases.len() >= AT_A_TIME;
        let ttls: Vec<Duration> = begun
            .iter()
            .map(|lease| lease.ttl_to_ask(asked_at))
            .collect();
        let mut requests: Vec<Request> = begun
            .iter()
            .zip(&ttls)
            .map(|(lease, ttl)| Request::new(renewal(lease, *ttl), deadline))
            .collect();
        self.store.execute(&mut requests);
        let answered_at = self.now();
        let took = answered_at.since(asked_at);
        let asked = begun.into_iter().zip(ttls).zip(late);
        let mut observed = observe::Renewals::default();
        for (((lease, ttl), late), request) in asked.zip(requests) {
            let outcome = request.into_outcome();
            let outcome = self.ttl_answered(lease, asked_at, answered_at, ttl, outcome);
            observed.add(&outcome, late, took);
            if is_crowd && outcome.is_ok() {
                lease.spread_renewal();
            }
            self.tell_renewed(lease, outcome);
            self.reschedule(lease);
        }
        self.callbacks.queue_observation(move || observed.tell());
    }

    fn reschedule(&self, lease: &Arc<Lease>) {
        if !self.watch(lease) {
            lease.lose(self.now(), LossReason::Shutdown);
        }
    }

    /// Ends a change of the ttl as its answer says, which came in at `now`.
    fn ttl_answered(
        &self,
        lease: &Lease,
        asked_at: MonotonicTime,
        now: MonotonicTime,
        ttl: Duration,
        outcome: Result<Reply, Error>,
    ) -> Result<(), Error> {
        let lost = |reason: LossReason| {
            lease.ttl_unchanged(now, Duration::ZERO, None);
            lease.lose(now, reason.clone());
            Err(Error::lost(lease.loss(now).unwrap_or(reason)))
        };
        match outcome {
            Ok(Reply::Done) => {
                lease.ttl_changed(now, asked_at, ttl);
                Ok(())
            }
            Ok(Reply::Missing) => lost(LossReason::Deleted),
            Ok(Reply::Taken { by }) => lost(LossReason::TakenOver { by }),
            Ok(_) => unreachable!("another command's answer to a renewal"),
            Err(error) => {
                let every = lease.grant().options.renew_every.unwrap_or(LONGEST_RETRY);
                let retry_at = now.after((every / 4).min(LONGEST_RETRY));
                lease.ttl_unchanged(now, ttl, Some(retry_at));
                Err(error)
            }
        }
    }

    fn tell_renewed(&self, lease: &Arc<Lease>, outcome: Result<(), Error>) {
        match outcome {
            Err(error) if error.is_lease_lost() => {}
            Ok(()) => {
                let lease = Arc::clone(lease);
                self.callbacks
                    .queue_event(move |events| events.renewed(lease.event()));
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

fn renewal(lease: &Lease, ttl: Duration) -> Command {
    let grant = lease.grant();
    Command::Renew {
        key: grant.key.clone(),
        lease: grant.id,
        ttl,
    }
}

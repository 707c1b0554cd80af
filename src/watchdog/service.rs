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

use crate::clock::Moment;
use crate::error::{Error, ErrorKind};
use crate::event::{EventLock, Events};
use crate::id::HolderId;
use crate::key::Key;
use crate::lease::{Courier, Due, Ended, Lease, TimerNote};
use crate::loss::LossReason;
use crate::observe;
use crate::store::{Chore, Command, RENEWAL_LANES, Reply, Request, Store};
use crate::sync::Mutex;
use crate::thread::Crew;
use crate::watchdog::agenda::{Agenda, Inboxes, Job, Timer};
use crate::watchdog::renewals::{AT_A_TIME, Work};
use crate::watchdog::watched::{WatchedLeases, watched};

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
    agenda: Arc<Agenda>,
    store: Arc<dyn Store>,
    courier: Arc<Courier>,
    watched: WatchedLeases,
    /// Leases that wait for the worker to have them watched: no more than there is room for.
    to_watch: AtomicUsize,
    /// Until the thread is needed that works it off.
    checks: Mutex<Option<Receiver<Job>>>,
    command_timeout: Duration,
}

impl Watchdog {
    pub(crate) fn new(
        agenda: Arc<Agenda>,
        store: Arc<dyn Store>,
        courier: Arc<Courier>,
        command_timeout: Duration,
    ) -> Arc<Self> {
        Arc::new(Self {
            agenda,
            store,
            courier,
            watched: WatchedLeases::default(),
            to_watch: AtomicUsize::new(0),
            checks: Mutex::new(None),
            command_timeout,
        })
    }

    /// Starts the timer and the workers. Those that renew do nothing else, so that releases stuck
    /// behind a dead server never hold up renewals.
    pub(crate) fn start(self: &Arc<Self>, crew: &Crew, inboxes: Inboxes) -> Result<(), Error> {
        *self.checks.lock() = Some(inboxes.checks);
        let dog = Arc::clone(self);
        crew.spawn("leasehold-timer", move || dog.keep_time())?;
        for _ in 0..RENEWAL_LANES {
            let dog = Arc::clone(self);
            crew.spawn("leasehold-renewals", move || dog.renew_all())
                .inspect_err(|_| self.stop())?;
        }
        let (dog, inbox) = (Arc::clone(self), inboxes.releases);
        crew.spawn("leasehold-releases", move || dog.work(&inbox))
            .inspect_err(|_| self.stop())
    }

    /// Starts the thread that asks checks, unless it runs. User code has one of its own: it may hang.
    pub(crate) fn start_checks(self: &Arc<Self>, crew: &Crew) -> Result<(), Error> {
        let mut not_started = self.checks.lock();
        if let Some(inbox) = not_started.clone() {
            let dog = Arc::clone(self);
            crew.spawn("leasehold-checks", move || dog.work(&inbox))?;
            *not_started = None;
        }
        Ok(())
    }

    /// What time it is for this client.
    pub(crate) fn now(&self) -> Moment {
        self.agenda.now()
    }

    /// Keeps `lease` alive from now on. False, and nothing done, once stopped.
    pub(crate) fn watch(&self, lease: &Arc<Lease>) -> bool {
        lease.rearm(|old, next| self.reset(lease, old, next))
    }

    fn reset(&self, lease: &Arc<Lease>, old: Option<TimerNote>, next: Moment) -> Option<TimerNote> {
        if let Some(old) = old {
            self.agenda.cancel(old);
        }
        self.agenda.set(next, Timer::Lease(Arc::clone(lease)))
    }

    /// Lets go of a lease that was released or lost before; says which.
    pub(crate) fn release(&self, lease: &Lease, now: Moment) -> Result<(), LossReason> {
        let (ended, outcome) = lease.release(now);
        if let Some(timer) = ended.timer {
            self.agenda.cancel(timer);
        }
        if ended.watched {
            self.watched.remove(lease);
        }
        outcome
    }

    /// Keeps `next` alive from now on, in the place of `before`, which ended in its favour.
    pub(crate) fn succeed(&self, before: &Lease, ended: &Ended, next: &Arc<Lease>) {
        if let Some(timer) = ended.timer {
            self.agenda.cancel(timer);
        }
        if ended.watched {
            self.watched.remove(before);
            // What changed in between was nobody's.
            self.watch_keys(std::slice::from_ref(next));
        }
        self.rearm(next);
    }

    /// A lost lease is not watched any more, even if its guard is kept or forgotten.
    pub(crate) fn forget(&self, lost: &Lease) {
        self.watched.remove(lost);
    }

    /// The lease of this client whose key Redis was asked to tell about.
    pub(crate) fn watched(&self, key: &Key) -> Option<Arc<Lease>> {
        self.watched.get(key)
    }

    /// Ends the threads, and every lease with [`LossReason::Shutdown`].
    pub(crate) fn stop(&self) {
        let now = self.now();
        for lease in self.agenda.stop() {
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
        let outcome = self.store.ask(renewal(lease, ttl), deadline);
        let result = self.ttl_answered(lease, asked_at, self.now(), ttl, outcome);
        self.rearm(lease);
        match (result, lease.loss(self.now())) {
            (_, Some(reason)) => Err(Error::lost(reason)),
            (result, None) => result,
        }
    }

    fn keep_time(&self) {
        while let Some(due) = self.agenda.next() {
            let (renewals, watches) = self.attend(due);
            self.agenda.renew(renewals);
            self.watch_later(watches);
        }
    }

    fn watch_later(&self, leases: Vec<Arc<Lease>>) {
        if !leases.is_empty() {
            self.to_watch.fetch_add(leases.len(), Ordering::AcqRel);
            self.agenda.give(Job::Watch(leases));
        }
    }

    /// Does at once, on this thread, what has become due because the clock was moved. Waits for what
    /// another thread has in hand of it.
    pub(crate) fn catch_up(&self, held: &[Arc<Lease>]) {
        let now = self.now();
        let (renewals, watches) = self.attend(self.agenda.due());
        self.renew(&renewals);
        self.watch_keys(&watches);
        let deadline = self.now().after(self.command_timeout);
        for lease in held {
            lease.settled(now, deadline.since(self.now()));
        }
    }

    /// Sets the next timers of the leases that are due. Returns which of them are to be renewed, and
    /// which to be watched.
    fn attend(&self, due: Vec<Timer>) -> (Vec<Arc<Lease>>, Vec<Arc<Lease>>) {
        let now = self.now();
        let (mut renewals, mut checks, mut watches) = (Vec::new(), Vec::new(), Vec::new());
        let to_watch = self.to_watch.load(Ordering::Acquire);
        let room = self.watched.room().saturating_sub(to_watch);
        for timer in due {
            let Timer::Lease(lease) = timer else {
                self.agenda.give(Job::Settle);
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
                    if watch && watches.len() < room {
                        watches.push(Arc::clone(&lease));
                    }
                    match (renew, lease.terms().options.checked) {
                        (true, true) => checks.push(lease),
                        (true, false) => renewals.push(lease),
                        (false, _) => {}
                    }
                }
            }
        }
        if !checks.is_empty() {
            self.agenda.give(Job::Check(checks));
        }
        (renewals, watches)
    }

    /// Tells that `max_hold` is about to strike, unless that is of no use any more.
    fn warn(&self, lease: Arc<Lease>) {
        let agenda = Arc::clone(&self.agenda);
        self.courier.tell_later(move |events| {
            if let Some(left) = lease.hold_left(agenda.now()) {
                events.max_hold_near(lease.event(), left);
            }
        });
    }

    fn work(&self, inbox: &Receiver<Job>) {
        while let Ok(job) = inbox.recv() {
            match job {
                Job::Check(leases) => self.check(leases),
                Job::Watch(leases) => {
                    self.watch_keys(&leases);
                    self.to_watch.fetch_sub(leases.len(), Ordering::AcqRel);
                }
                Job::Settle => {
                    self.agenda.answer();
                    if self.store.settle() {
                        self.agenda.ring(Chore::Soon);
                    }
                    if observe::IS_ON {
                        let debts = self.store.debts();
                        self.courier.observe_later(move || observe::debts(&debts));
                    }
                }
                Job::Stop => return,
            }
        }
    }

    /// Has Redis tell what happens to the keys, as far as there is room for that. If it cannot now, it is
    /// asked once it can.
    pub(crate) fn watch_keys(&self, leases: &[Arc<Lease>]) {
        let mut keys = Vec::new();
        for lease in leases {
            lease.watch(|| {
                let has_room = self.watched.insert(lease);
                if has_room {
                    keys.push(watched(lease));
                }
                has_room
            });
        }
        if !keys.is_empty() {
            self.store.watch(keys);
        }
    }

    /// Passes on those that may be renewed, each at once: the next check may be slow.
    fn check(&self, leases: Vec<Arc<Lease>>) {
        for lease in leases {
            if lease.may_be_renewed() {
                self.agenda.renew(vec![lease]);
            }
        }
    }

    fn renew_all(&self) {
        while let Some(work) = self.agenda.next_renewals() {
            match work {
                Work::Renew(leases) => self.renew(&leases),
                Work::Confirm(leases) => self.confirm_all(leases.iter().collect(), Doubt::Seen),
                Work::ConfirmForce(leases) => {
                    self.confirm_all(leases.iter().collect(), Doubt::Force);
                }
            }
        }
    }

    /// For a lease that seems to be lost: queues a request on a lane, which ends the lease if it is lost there too.
    pub(crate) fn confirm_later(&self, lease: Arc<Lease>) {
        self.agenda.queue_confirmation(lease);
    }

    /// Handles a message that says that `by` took the lock away: as [`confirm_later`](Self::confirm_later), with one
    /// request at a time. Ends the lease at once if no other user can send messages.
    pub(crate) fn hear_force(&self, lease: Arc<Lease>, by: HolderId) {
        let now = self.now();
        if !self.store.may_hear_others() {
            lease.lose(now, LossReason::ForceUnlocked { by });
        } else if lease.hear_force(by, now) {
            self.agenda.queue_force_confirmation(lease);
        }
    }

    /// As [`confirm_later`](Self::confirm_later), and waits for the answer. An error if it is lost, or if
    /// that could not be found out.
    pub(crate) fn confirm(&self, lease: &Lease) -> Result<(), Error> {
        let deadline = self.now().after(self.command_timeout);
        let outcome = self.store.ask(renewal(lease, CONFIRMING_TTL), deadline);
        self.confirmed(lease, outcome, Doubt::Seen)
    }

    fn confirm_all(&self, mut leases: Vec<&Arc<Lease>>, doubt: Doubt) {
        let now = self.now();
        leases.retain(|lease| lease.live_for(now).is_some());
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
                lease.force_answered(confirmed.is_ok().then(|| self.now()));
            }
            let is_answered = match &confirmed {
                // Another message may have come meanwhile.
                Ok(()) => doubt == Doubt::Seen,
                Err(error) => error.is_lease_lost(),
            };
            if !is_answered {
                // Its key is looked at again.
                lease.watch_again(self.now().after(LONGEST_RETRY));
                self.rearm(lease);
            }
        }
    }

    /// Handles a lane's answer about a lease that seems to be lost.
    fn confirmed(
        &self,
        lease: &Lease,
        outcome: Result<Reply, Error>,
        doubt: Doubt,
    ) -> Result<(), Error> {
        let reason = match outcome? {
            Reply::Done => {
                if doubt == Doubt::Seen {
                    // The lane denies the loss: one of the two connections does not lead to the primary.
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
                lease.leave_the_crowd();
            }
            self.tell_renewed(lease, outcome);
            self.rearm(lease);
        }
        self.courier.observe_later(move || observed.tell());
    }

    fn rearm(&self, lease: &Arc<Lease>) {
        if !self.watch(lease) {
            lease.lose(self.now(), LossReason::Shutdown);
        }
    }

    /// Ends a change of the ttl as its answer says, which came in at `now`.
    fn ttl_answered(
        &self,
        lease: &Lease,
        asked_at: Moment,
        now: Moment,
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
                let every = lease.terms().options.renew_every.unwrap_or(LONGEST_RETRY);
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
                self.courier
                    .tell_later(move |events| events.renewed(lease.event()));
            }
            Err(error) => {
                let terms = lease.terms();
                let report = move |events: &dyn Events, lock: EventLock<'_>| {
                    events.renewal_failed(lock, &error);
                };
                self.courier.report_later(&terms.key, terms.token, report);
            }
        }
    }
}

fn renewal(lease: &Lease, ttl: Duration) -> Command {
    let terms = lease.terms();
    Command::Renew {
        key: terms.key.clone(),
        lease: terms.id,
        ttl,
    }
}

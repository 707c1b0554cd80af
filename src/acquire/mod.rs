//! How a caller waits for a lock: one loop, one deadline, for every form of asking; and how a lock is
//! given up again, for others who wait. Asks the store, and never touches a connection.

mod abandoned;
mod attempt;
mod backoff;
mod late_releases;
#[cfg(test)]
#[cfg(shuttle)]
mod model;
mod notify;
mod outage;
mod patience;
mod queue;
mod release;
mod shutdown;
#[cfg(test)]
#[cfg(not(shuttle))]
mod tests;
mod transfer;

use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, TryRecvError};

use crate::config::HandOffs;
use crate::error::{Error, ErrorKind};
use crate::event::EventLock;
use crate::lease::{CallbackExecutor, Check, Lease, Options, SharedOptions};
use crate::observe;
use crate::store::{QueueMode, Queued, Store, TrackedKey};
use crate::util::clock::MonotonicTime;
use crate::util::id::LeaseIds;
use crate::util::key::Key;
use crate::watchdog::Watchdog;

use attempt::{Attempt, QueuePlace};
use backoff::Backoff;
pub(crate) use late_releases::DelayedReleases;
pub(crate) use notify::NotificationHandler;
use outage::{CurrentOutage, Outage};
pub(crate) use patience::Until;
pub(crate) use queue::LocalQueues;
use queue::{QueuePosition, WaiterGuard, WakeReason};
use shutdown::Shutdown;

/// What is asked for.
#[derive(Clone, Debug)]
pub(crate) struct LockRequest {
    pub(crate) key: Key,
    pub(crate) options: Options,
    /// Asked before each renewal.
    pub(crate) check: Option<Check>,
    /// Gives the wait up once it is ready.
    pub(crate) cancel: Option<Receiver<()>>,
}

/// How long a waiter is queued before its key is tracked.
const TURN_COMES_SOON: Duration = Duration::from_millis(20);
/// How many of the first waiters of a key have it tracked: each change of the key costs a request for each.
const WATCHING: u64 = 2;
/// How long one of the first waiters relies on notifications before it asks again: bounds the cost of a lost one.
const LONGEST_TRUST: Duration = Duration::from_secs(1);
/// How many of the first waiters ask that often. Behind them, a waiter at twice the place asks half as often, so
/// that the number of requests grows with the logarithm of the number of waiters.
const NEAR: u64 = 8;
/// How far apart the waiters of an expired lock ask, one after another: usually the first request serves the queue
/// for all of them.
const ASK_APART: Duration = Duration::from_millis(20);
/// The last waiter asks at most this long after the expiry. The queue lives on for ten seconds at least.
const ASK_LATEST: Duration = Duration::from_secs(5);

/// In how many places there are ids and options for leases.
const LEASE_POOLS: usize = 16;

/// What each lease is made of.
#[derive(Default)]
#[repr(align(64))]
struct LeasePool {
    ids: LeaseIds,
    options: SharedOptions,
}

/// The waiting room of a client.
pub(crate) struct Acquirer {
    store: Arc<dyn Store>,
    watchdog: Arc<Watchdog>,
    callbacks: Arc<CallbackExecutor>,
    queues: Arc<LocalQueues>,
    /// By key: were it one for all keys, callers would wait for it more than for anything else they share.
    lease_pools: [LeasePool; LEASE_POOLS],
    outage: Outage,
    shutdown: Shutdown,
    command_timeout: Duration,
    outage_timeout: Duration,
    hand_offs: HandOffs,
}

/// How long the first waiter in queue rests before it asks Redis again.
enum RetryState {
    /// It has not asked yet, or was woken.
    None,
    /// It is queued in Redis, and will be notified of its grant. It asks again at `ask_at`, and has its key
    /// tracked from `track_at` on.
    Queued {
        track_at: Option<MonotonicTime>,
        ask_at: MonotonicTime,
    },
    /// It will not be notified.
    Polling,
}

impl RetryState {
    /// The retry of a waiter at this place in the queue of a lock that expires at `expires_at`.
    fn queued(queued: Queued, expires_at: MonotonicTime, now: MonotonicTime) -> Self {
        let place = u32::try_from(queued.ahead).unwrap_or(u32::MAX);
        let share = queued.ahead.max(NEAR) as f64 / NEAR as f64;
        let trust = backoff::jittered(LONGEST_TRUST.mul_f64(share));
        let apart = ASK_APART.saturating_mul(place).min(ASK_LATEST);
        Self::Queued {
            track_at: (queued.ahead < WATCHING).then(|| now.after(TURN_COMES_SOON)),
            ask_at: now.after(trust).min(expires_at.after(apart)),
        }
    }
}

/// One caller's wait, from one attempt to the next.
struct Wait<'a> {
    request: &'a LockRequest,
    place: &'a WaiterGuard<'a>,
    started: MonotonicTime,
    until: Until,
    pause: Backoff,
    retry: RetryState,
    /// What our own last attempt met with, once there was one: an answer, or an outage.
    met: Option<Option<CurrentOutage>>,
    told: bool,
}

/// How the lock came to a caller.
enum Acquired {
    Granted(Arc<Lease>),
    Handed(Arc<Lease>),
}

impl Wait<'_> {
    /// Who only tries does not wait, so there is nothing to give up.
    fn is_cancelled(&self) -> bool {
        let cancel = self.request.cancel.as_ref();
        let is_ready = |cancel: &Receiver<()>| cancel.try_recv() != Err(TryRecvError::Empty);
        !matches!(self.until, Until::Now) && cancel.is_some_and(is_ready)
    }

    fn retry_at(&mut self, now: MonotonicTime) -> MonotonicTime {
        match self.retry {
            RetryState::None => now,
            RetryState::Polling => now.after(self.pause.next()),
            RetryState::Queued { track_at, ask_at } => track_at.unwrap_or(ask_at).min(ask_at),
        }
    }
}

impl Acquirer {
    pub(crate) fn new(
        store: Arc<dyn Store>,
        watchdog: Arc<Watchdog>,
        callbacks: Arc<CallbackExecutor>,
        queues: Arc<LocalQueues>,
        command_timeout: Duration,
        outage_timeout: Duration,
        hand_offs: HandOffs,
    ) -> Self {
        Self {
            store,
            watchdog,
            callbacks,
            queues,
            lease_pools: Default::default(),
            outage: Outage::new(2 * command_timeout + Duration::from_secs(1)),
            shutdown: Shutdown::default(),
            command_timeout,
            outage_timeout,
            hand_offs,
        }
    }

    /// The lock, or nothing if somebody else had it for as long as `until` allows.
    pub(crate) fn acquire(
        &self,
        request: &LockRequest,
        until: Until,
    ) -> Result<Option<Arc<Lease>>, Error> {
        let take = |started| self.take(request, until, started);
        self.observed(&request.key, take, Option::as_deref)
    }

    /// Tells how a call went that request a lock. `take` is told when it began, and `lease` says what it
    /// got.
    fn observed<T>(
        &self,
        key: &Key,
        take: impl FnOnce(MonotonicTime) -> Result<T, Error>,
        lease: impl FnOnce(&T) -> Option<&Lease>,
    ) -> Result<T, Error> {
        let observed = observe::Wait::begin(key.name());
        let started = self.watchdog.now();
        let taken = take(started).map_err(|error| error.with_key(key.name()));
        // Only now: it runs user code, and the next in queue can be told before.
        if self.callbacks.has_listeners() {
            let waited = self.watchdog.now().since(started);
            let granted = taken.as_ref().map(|taken| lease(taken).map(Lease::event));
            observed.ended(granted, waited);
            if let Ok(Some(lock)) = granted {
                self.callbacks.tell(|events| events.acquired(lock, waited));
            }
        }
        taken
    }

    fn take(
        &self,
        request: &LockRequest,
        until: Until,
        started: MonotonicTime,
    ) -> Result<Option<Arc<Lease>>, Error> {
        let mut come_at = started;
        loop {
            let place = match until {
                // Threads that wait here already come first.
                Until::Now => match self.queues.join_if_empty(&request.key, request.options) {
                    Some(place) => place,
                    None => return self.refuse_behind_others(),
                },
                _ => {
                    let cancel = request.cancel.as_ref();
                    self.queues.join(&request.key, request.options, cancel)
                }
            };
            let mut wait = Wait {
                request,
                place: &place,
                started,
                until,
                pause: Backoff::new(),
                retry: RetryState::None,
                met: None,
                told: false,
            };
            let (lease, had_at) = match self.wait(&mut wait, come_at) {
                Ok(Some(Acquired::Granted(lease))) => {
                    let (other, forced) = place.leave_with(&lease);
                    if let Some(other) = other {
                        self.release(&other);
                    }
                    if let Some(by) = forced {
                        self.watchdog.confirm_force(Arc::clone(&lease), by);
                    }
                    let since = lease.grant().since;
                    (lease, since)
                }
                Ok(Some(Acquired::Handed(lease))) => {
                    self.leave(request, place);
                    (lease, self.watchdog.now())
                }
                other => {
                    self.leave(request, place);
                    return other.map(|_| None);
                }
            };
            if lease.valid_for(had_at).is_some() {
                return Ok(Some(lease));
            }
            // It was let go by force just now, or it slept through what was left of its validity.
            self.release(&lease);
            come_at = self.watchdog.now();
        }
    }

    /// What to tell somebody who does not wait, while others do.
    fn refuse_behind_others(&self) -> Result<Option<Arc<Lease>>, Error> {
        self.check_open()?;
        match self.outage.current(self.watchdog.now()) {
            Some(outage) => Err(outage.error),
            None => Ok(None),
        }
    }

    /// Acquirer from `come_at` on, when it came into queue.
    fn wait(&self, wait: &mut Wait<'_>, come_at: MonotonicTime) -> Result<Option<Acquired>, Error> {
        let mut first = true;
        loop {
            if let Some(lease) = wait.place.handed() {
                return Ok(Some(Acquired::Handed(lease)));
            }
            self.check_open()?;
            if wait.is_cancelled() {
                return Err(Error::new(ErrorKind::Cancelled, ""));
            }
            let now = if first { come_at } else { self.watchdog.now() };
            let position = wait.place.position(now);
            if let QueuePosition::Granted(entry, grant) = &position {
                if let Some(lease) = self.enter(wait, entry, *grant, now)? {
                    return Ok(Some(Acquired::Granted(lease)));
                }
                wait.retry = RetryState::None;
            }
            let may_ask = match position {
                QueuePosition::Behind => false,
                // Who only tries asks Redis all the same: it may know of a loss that is no news here yet.
                QueuePosition::Held(_) => matches!(wait.until, Until::Now),
                QueuePosition::First | QueuePosition::Granted(..) => true,
            };
            let current = match &wait.met {
                Some(own) if may_ask => own.clone(),
                _ => self.outage.current(now),
            };
            // A caller that finds an empty queue has one attempt in any case.
            let owed = std::mem::take(&mut first) && may_ask;
            if !owed {
                if let Some(verdict) = self.verdict(wait, now, current.as_ref()) {
                    return verdict.map(|()| None);
                }
                if !(may_ask && matches!(wait.retry, RetryState::None)) {
                    if !self.sleep(wait, now, &position, current.as_ref()) {
                        return Err(Error::new(ErrorKind::Cancelled, ""));
                    }
                    continue;
                }
            }
            if let Some(lease) = self.ask(wait, now)? {
                return Ok(Some(Acquired::Granted(lease)));
            }
        }
    }

    /// Sleeps until there is something to do; false if cancelled.
    fn sleep(
        &self,
        wait: &mut Wait<'_>,
        now: MonotonicTime,
        position: &QueuePosition,
        current: Option<&CurrentOutage>,
    ) -> bool {
        let mut until = self.longest_wait(now, wait.until, current);
        match position {
            QueuePosition::Behind => {}
            QueuePosition::Held(remaining) => {
                self.report_contended(wait, *remaining);
                until = until.min(now.after(*remaining));
            }
            QueuePosition::First | QueuePosition::Granted(..) => {
                until = until.min(wait.retry_at(now))
            }
        }
        match wait.place.wait(until) {
            WakeReason::Cancelled => return false,
            WakeReason::Woken => {
                if current.is_none() {
                    wait.pause = Backoff::new();
                }
                wait.retry = RetryState::None;
            }
            WakeReason::Nudged => {
                if let RetryState::Queued { ask_at, .. } = &mut wait.retry {
                    let soon = self.watchdog.now().after(backoff::jittered(LONGEST_TRUST));
                    *ask_at = soon.min(*ask_at);
                }
            }
            WakeReason::TimedOut => {
                let now = self.watchdog.now();
                wait.retry = match wait.retry {
                    RetryState::Queued { track_at, ask_at } if now < ask_at => {
                        let is_due = track_at.is_some_and(|at| at <= now);
                        if is_due && !self.watch(wait) {
                            RetryState::None
                        } else {
                            RetryState::Queued {
                                track_at: track_at.filter(|_| !is_due),
                                ask_at,
                            }
                        }
                    }
                    _ => RetryState::None,
                };
            }
        }
        true
    }

    /// Has the key tracked for the first of its waiters.
    fn watch(&self, wait: &Wait<'_>) -> bool {
        wait.place.note_tracked();
        let key = wait.request.key.clone();
        self.store.track(vec![TrackedKey { key, lease: None }])
    }

    /// Asks Redis once, and notes what it says.
    fn ask(&self, wait: &mut Wait<'_>, now: MonotonicTime) -> Result<Option<Arc<Lease>>, Error> {
        match self.attempt(wait, now)? {
            Attempt::Granted(lease) => {
                self.outage.end();
                return Ok(Some(lease));
            }
            Attempt::Contended { expires_in, place } => {
                self.outage.end();
                self.report_contended(wait, expires_in);
                let now = self.watchdog.now();
                let expires_at = now.after(expires_in + Duration::from_millis(1));
                wait.pause.no_longer_than(expires_in);
                if !matches!(wait.until, Until::Now) {
                    self.store.want_notifications();
                }
                let is_told = self.store.queue_mode() == QueueMode::Notified;
                wait.retry = match place {
                    // An entry that joined to poll is not notified, even if that is possible by now.
                    QueuePlace::Joined {
                        queued,
                        notified: true,
                    } if is_told => RetryState::queued(queued, expires_at, now),
                    QueuePlace::Full => RetryState::Queued {
                        track_at: None,
                        ask_at: now.after(backoff::jittered(LONGEST_TRUST)).min(expires_at),
                    },
                    QueuePlace::Joined { .. } | QueuePlace::None => RetryState::Polling,
                };
                wait.met = Some(None);
            }
            Attempt::NotQueued => {
                self.outage.end();
                wait.retry = RetryState::None;
                wait.met = Some(None);
            }
            Attempt::OutOfTime => wait.retry = RetryState::Polling,
            Attempt::Failed { since, error } => {
                let current = self.failed(since, wait.met.take().flatten(), error);
                // Told once it is known to all: who hears of it finds it so.
                self.report_unavailable(&wait.request.key, &current.error);
                wait.met = Some(Some(current));
                wait.pause.for_an_outage();
                wait.retry = RetryState::Polling;
            }
        }
        Ok(None)
    }

    fn report_contended(&self, wait: &mut Wait<'_>, expires_in: Duration) {
        if !std::mem::replace(&mut wait.told, true) {
            let lock = not_granted(&wait.request.key);
            self.callbacks
                .tell(|events| events.contended(lock, expires_in));
        }
    }

    /// An attempt failed from `since` on, as the one before it did if that met with `before`.
    fn failed(
        &self,
        since: MonotonicTime,
        before: Option<CurrentOutage>,
        error: Error,
    ) -> CurrentOutage {
        let (mut current, is_news) = self.outage.begin(since, self.watchdog.now(), error);
        if is_news {
            // Those behind us now have an end to their outage_timeout.
            self.queues.wake_all();
        }
        if let Some(before) = before {
            current.since = current.since.min(before.since);
        }
        current
    }

    fn report_unavailable(&self, key: &Key, error: &Error) {
        let lock = not_granted(key);
        self.callbacks
            .tell(|events| events.unavailable(lock, error));
    }

    fn lease_pools(&self, key: &Key) -> &LeasePool {
        &self.lease_pools[key.shard(LEASE_POOLS)]
    }

    /// An error once the client is shut down.
    pub(crate) fn check_open(&self) -> Result<(), Error> {
        self.shutdown.check()
    }

    /// The leases of this client that have not been let go.
    pub(crate) fn holders(&self) -> Vec<Arc<Lease>> {
        self.queues.holders()
    }

    /// Sends everybody away, now and from now on.
    pub(crate) fn end(&self) {
        self.shutdown.close();
        for (key, entry) in self.queues.abandon_all() {
            self.release_unheld(key, entry.lease, entry.options.first_ttl());
        }
        self.queues.wake_all();
    }
}

fn not_granted(key: &Key) -> EventLock<'_> {
    EventLock {
        key: key.name(),
        fencing_token: 0,
    }
}

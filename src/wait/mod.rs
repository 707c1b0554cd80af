//! How a caller waits for a lock: one loop, one deadline, for every form of asking; and how a lock is
//! given up again, for others who wait. Asks the store, and never touches a connection.

mod abandoned;
mod adopting;
mod asking;
mod closing;
mod delayed;
mod hearing;
mod letting_go;
mod local;
#[cfg(test)]
#[cfg(shuttle)]
mod model;
mod outage;
mod patience;
mod pause;
#[cfg(test)]
#[cfg(not(shuttle))]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, TryRecvError};

use crate::clock::Moment;
use crate::config::HandOffs;
use crate::error::{Error, ErrorKind};
use crate::event::EventLock;
use crate::id::LeaseIds;
use crate::key::Key;
use crate::lease::{Check, Courier, Lease, Options, SharedOptions};
use crate::observe;
use crate::store::{Queued, Standing, Store, Watched};
use crate::watchdog::Watchdog;

use asking::{Attempt, QueuePlace};
use closing::Closing;
pub(crate) use delayed::DelayedReleases;
pub(crate) use hearing::Hearing;
pub(crate) use local::LocalQueues;
use local::{Place, Turn, Woken};
use outage::{Ongoing, Outage};
pub(crate) use patience::Until;
use pause::Pause;

/// What is asked for.
#[derive(Clone, Debug)]
pub(crate) struct Wanted {
    pub(crate) key: Key,
    pub(crate) options: Options,
    /// Asked before each renewal.
    pub(crate) check: Option<Check>,
    /// Gives the wait up once it is ready.
    pub(crate) cancel: Option<Receiver<()>>,
}

/// How long a waiter is queued before its key is watched.
const TURN_COMES_SOON: Duration = Duration::from_millis(20);
/// How many of the first waiters of a key have it watched: each change of the key costs a request for each.
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
const SUPPLIES: usize = 16;

/// What each lease is made of.
#[derive(Default)]
#[repr(align(64))]
struct Supplies {
    ids: LeaseIds,
    options: SharedOptions,
}

/// The waiting room of a client.
pub(crate) struct Waits {
    store: Arc<dyn Store>,
    watchdog: Arc<Watchdog>,
    courier: Arc<Courier>,
    queues: Arc<LocalQueues>,
    /// By key: were it one for all keys, callers would wait for it more than for anything else they share.
    supplies: [Supplies; SUPPLIES],
    outage: Outage,
    closing: Closing,
    command_timeout: Duration,
    patience: Duration,
    hand_offs: HandOffs,
}

/// How long the first waiter in line rests before it asks Redis again.
enum Rest {
    /// It has not asked yet, or was woken.
    None,
    /// It is queued in Redis, and will be notified of its grant. It asks again at `ask_at`, and has its key
    /// watched from `watch_at` on.
    Queued {
        watch_at: Option<Moment>,
        ask_at: Moment,
    },
    /// It will not be notified.
    Polling,
}

impl Rest {
    /// The rest of a waiter at this place in the queue of a lock that expires at `expires_at`.
    fn queued(queued: Queued, expires_at: Moment, now: Moment) -> Self {
        let place = u32::try_from(queued.ahead).unwrap_or(u32::MAX);
        let share = queued.ahead.max(NEAR) as f64 / NEAR as f64;
        let trust = pause::jittered(LONGEST_TRUST.mul_f64(share));
        let apart = ASK_APART.saturating_mul(place).min(ASK_LATEST);
        Self::Queued {
            watch_at: (queued.ahead < WATCHING).then(|| now.after(TURN_COMES_SOON)),
            ask_at: now.after(trust).min(expires_at.after(apart)),
        }
    }
}

/// One caller's wait, from one attempt to the next.
struct Wait<'a> {
    wanted: &'a Wanted,
    place: &'a Place<'a>,
    started: Moment,
    until: Until,
    pause: Pause,
    rest: Rest,
    /// What our own last attempt met with, once there was one: an answer, or an outage.
    met: Option<Option<Ongoing>>,
    told: bool,
}

/// How the lock came to a caller.
enum Got {
    Granted(Arc<Lease>),
    Handed(Arc<Lease>),
}

impl Wait<'_> {
    /// Who only tries does not wait, so there is nothing to give up.
    fn is_cancelled(&self) -> bool {
        let cancel = self.wanted.cancel.as_ref();
        let is_ready = |cancel: &Receiver<()>| cancel.try_recv() != Err(TryRecvError::Empty);
        !matches!(self.until, Until::Now) && cancel.is_some_and(is_ready)
    }

    fn rest_until(&mut self, now: Moment) -> Moment {
        match self.rest {
            Rest::None => now,
            Rest::Polling => now.after(self.pause.next()),
            Rest::Queued { watch_at, ask_at } => watch_at.unwrap_or(ask_at).min(ask_at),
        }
    }
}

impl Waits {
    pub(crate) fn new(
        store: Arc<dyn Store>,
        watchdog: Arc<Watchdog>,
        courier: Arc<Courier>,
        queues: Arc<LocalQueues>,
        command_timeout: Duration,
        patience: Duration,
        hand_offs: HandOffs,
    ) -> Self {
        Self {
            store,
            watchdog,
            courier,
            queues,
            supplies: Default::default(),
            outage: Outage::new(2 * command_timeout + Duration::from_secs(1)),
            closing: Closing::default(),
            command_timeout,
            patience,
            hand_offs,
        }
    }

    /// The lock, or nothing if somebody else had it for as long as `until` allows.
    pub(crate) fn acquire(
        &self,
        wanted: &Wanted,
        until: Until,
    ) -> Result<Option<Arc<Lease>>, Error> {
        let take = |started| self.take(wanted, until, started);
        self.observed(&wanted.key, take, Option::as_deref)
    }

    /// Tells how a call went that wanted a lock. `take` is told when it began, and `lease` says what it
    /// got.
    fn observed<T>(
        &self,
        key: &Key,
        take: impl FnOnce(Moment) -> Result<T, Error>,
        lease: impl FnOnce(&T) -> Option<&Lease>,
    ) -> Result<T, Error> {
        let observed = observe::Wait::begin(key.name());
        let started = self.watchdog.now();
        let taken = take(started).map_err(|error| error.with_key(key.name()));
        // Only now: it runs user code, and the next in line can be told before.
        if self.courier.is_heard() {
            let waited = self.watchdog.now().since(started);
            let granted = taken.as_ref().map(|taken| lease(taken).map(Lease::event));
            observed.ended(granted, waited);
            if let Ok(Some(lock)) = granted {
                self.courier.tell(|events| events.acquired(lock, waited));
            }
        }
        taken
    }

    fn take(
        &self,
        wanted: &Wanted,
        until: Until,
        started: Moment,
    ) -> Result<Option<Arc<Lease>>, Error> {
        let mut come_at = started;
        loop {
            let place = match until {
                // Threads that wait here already come first.
                Until::Now => match self.queues.join_if_empty(&wanted.key, wanted.options) {
                    Some(place) => place,
                    None => return self.behind_others(),
                },
                _ => {
                    let cancel = wanted.cancel.as_ref();
                    self.queues.join(&wanted.key, wanted.options, cancel)
                }
            };
            let mut wait = Wait {
                wanted,
                place: &place,
                started,
                until,
                pause: Pause::new(),
                rest: Rest::None,
                met: None,
                told: false,
            };
            let (lease, had_at) = match self.wait(&mut wait, come_at) {
                Ok(Some(Got::Granted(lease))) => {
                    let (other, forced) = place.leave_with(&lease);
                    if let Some(other) = other {
                        self.let_go(&other);
                    }
                    if let Some(by) = forced {
                        self.watchdog.hear_force(Arc::clone(&lease), by);
                    }
                    let since = lease.terms().since;
                    (lease, since)
                }
                Ok(Some(Got::Handed(lease))) => {
                    self.leave(wanted, place);
                    (lease, self.watchdog.now())
                }
                other => {
                    self.leave(wanted, place);
                    return other.map(|_| None);
                }
            };
            if lease.live_for(had_at).is_some() {
                return Ok(Some(lease));
            }
            // It was let go by force just now, or it slept through what was left of its validity.
            self.let_go(&lease);
            come_at = self.watchdog.now();
        }
    }

    /// What to tell somebody who does not wait, while others do.
    fn behind_others(&self) -> Result<Option<Arc<Lease>>, Error> {
        self.check_open()?;
        match self.outage.ongoing(self.watchdog.now()) {
            Some(outage) => Err(outage.error),
            None => Ok(None),
        }
    }

    /// Waits from `come_at` on, when it came into line.
    fn wait(&self, wait: &mut Wait<'_>, come_at: Moment) -> Result<Option<Got>, Error> {
        let mut first = true;
        loop {
            if let Some(lease) = wait.place.handed() {
                return Ok(Some(Got::Handed(lease)));
            }
            self.check_open()?;
            if wait.is_cancelled() {
                return Err(Error::new(ErrorKind::Cancelled, ""));
            }
            let now = if first { come_at } else { self.watchdog.now() };
            let turn = wait.place.turn(now);
            if let Turn::Granted(claim, grant) = &turn {
                if let Some(lease) = self.enter(wait, claim, *grant, now)? {
                    return Ok(Some(Got::Granted(lease)));
                }
                wait.rest = Rest::None;
            }
            let may_ask = match turn {
                Turn::Behind => false,
                // Who only tries asks Redis all the same: it may know of a loss that is no news here yet.
                Turn::Held(_) => matches!(wait.until, Until::Now),
                Turn::First | Turn::Granted(..) => true,
            };
            let ongoing = match &wait.met {
                Some(own) if may_ask => own.clone(),
                _ => self.outage.ongoing(now),
            };
            // A caller that finds an empty line has one attempt in any case.
            let owed = std::mem::take(&mut first) && may_ask;
            if !owed {
                if let Some(verdict) = self.verdict(wait, now, ongoing.as_ref()) {
                    return verdict.map(|()| None);
                }
                if !(may_ask && matches!(wait.rest, Rest::None)) {
                    if !self.sleep(wait, now, &turn, ongoing.as_ref()) {
                        return Err(Error::new(ErrorKind::Cancelled, ""));
                    }
                    continue;
                }
            }
            if let Some(lease) = self.ask(wait, now)? {
                return Ok(Some(Got::Granted(lease)));
            }
        }
    }

    /// Sleeps until there is something to do; false if cancelled.
    fn sleep(
        &self,
        wait: &mut Wait<'_>,
        now: Moment,
        turn: &Turn,
        ongoing: Option<&Ongoing>,
    ) -> bool {
        let mut until = self.longest_wait(now, wait.until, ongoing);
        match turn {
            Turn::Behind => {}
            Turn::Held(remaining) => {
                self.tell_contended(wait, *remaining);
                until = until.min(now.after(*remaining));
            }
            Turn::First | Turn::Granted(..) => until = until.min(wait.rest_until(now)),
        }
        match wait.place.wait(until) {
            Woken::Cancelled => return false,
            Woken::Called => {
                if ongoing.is_none() {
                    wait.pause = Pause::new();
                }
                wait.rest = Rest::None;
            }
            Woken::Nudged => {
                if let Rest::Queued { ask_at, .. } = &mut wait.rest {
                    let soon = self.watchdog.now().after(pause::jittered(LONGEST_TRUST));
                    *ask_at = soon.min(*ask_at);
                }
            }
            Woken::Late => {
                let now = self.watchdog.now();
                wait.rest = match wait.rest {
                    Rest::Queued { watch_at, ask_at } if now < ask_at => {
                        let is_due = watch_at.is_some_and(|at| at <= now);
                        if is_due && !self.watch(wait) {
                            Rest::None
                        } else {
                            Rest::Queued {
                                watch_at: watch_at.filter(|_| !is_due),
                                ask_at,
                            }
                        }
                    }
                    _ => Rest::None,
                };
            }
        }
        true
    }

    /// Has the key watched for the first of its waiters.
    fn watch(&self, wait: &Wait<'_>) -> bool {
        wait.place.note_watched();
        let key = wait.wanted.key.clone();
        self.store.watch(vec![Watched { key, lease: None }])
    }

    /// Asks Redis once, and notes what it says.
    fn ask(&self, wait: &mut Wait<'_>, now: Moment) -> Result<Option<Arc<Lease>>, Error> {
        match self.attempt(wait, now)? {
            Attempt::Granted(lease) => {
                self.outage.end();
                return Ok(Some(lease));
            }
            Attempt::Contended { expires_in, place } => {
                self.outage.end();
                self.tell_contended(wait, expires_in);
                let now = self.watchdog.now();
                let expires_at = now.after(expires_in + Duration::from_millis(1));
                wait.pause.no_longer_than(expires_in);
                if !matches!(wait.until, Until::Now) {
                    self.store.want_wakeups();
                }
                let is_told = self.store.standing() == Standing::Told;
                wait.rest = match place {
                    // An entry that joined to poll is not notified, even if that is possible by now.
                    QueuePlace::Joined {
                        queued,
                        notified: true,
                    } if is_told => Rest::queued(queued, expires_at, now),
                    QueuePlace::Full => Rest::Queued {
                        watch_at: None,
                        ask_at: now.after(pause::jittered(LONGEST_TRUST)).min(expires_at),
                    },
                    QueuePlace::Joined { .. } | QueuePlace::None => Rest::Polling,
                };
                wait.met = Some(None);
            }
            Attempt::FellOut => {
                self.outage.end();
                wait.rest = Rest::None;
                wait.met = Some(None);
            }
            Attempt::OutOfTime => wait.rest = Rest::Polling,
            Attempt::Failed { since, error } => {
                let ongoing = self.failed(since, wait.met.take().flatten(), error);
                // Told once it is known to all: who hears of it finds it so.
                self.tell_unavailable(&wait.wanted.key, &ongoing.error);
                wait.met = Some(Some(ongoing));
                wait.pause.for_an_outage();
                wait.rest = Rest::Polling;
            }
        }
        Ok(None)
    }

    fn tell_contended(&self, wait: &mut Wait<'_>, expires_in: Duration) {
        if !std::mem::replace(&mut wait.told, true) {
            let lock = not_granted(&wait.wanted.key);
            self.courier
                .tell(|events| events.contended(lock, expires_in));
        }
    }

    /// An attempt failed from `since` on, as the one before it did if that met with `before`.
    fn failed(&self, since: Moment, before: Option<Ongoing>, error: Error) -> Ongoing {
        let (mut ongoing, is_news) = self.outage.begin(since, self.watchdog.now(), error);
        if is_news {
            // Those behind us now have an end to their patience.
            self.queues.wake_all();
        }
        if let Some(before) = before {
            ongoing.since = ongoing.since.min(before.since);
        }
        ongoing
    }

    fn tell_unavailable(&self, key: &Key, error: &Error) {
        let lock = not_granted(key);
        self.courier.tell(|events| events.unavailable(lock, error));
    }

    fn supplies(&self, key: &Key) -> &Supplies {
        &self.supplies[key.part(SUPPLIES)]
    }

    /// An error once the client is shut down.
    pub(crate) fn check_open(&self) -> Result<(), Error> {
        self.closing.check()
    }

    /// The leases of this client that have not been let go.
    pub(crate) fn holders(&self) -> Vec<Arc<Lease>> {
        self.queues.holders()
    }

    /// Sends everybody away, now and from now on.
    pub(crate) fn end(&self) {
        self.closing.close();
        for (key, claim) in self.queues.abandon_all() {
            self.give_back(key, claim.lease, claim.options.first_ttl());
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

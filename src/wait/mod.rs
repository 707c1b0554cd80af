//! How a caller waits for a lock: one loop, one deadline, for every form of asking.

mod local;
mod outage;
mod pause;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::clock::Moment;
use crate::error::{Error, ErrorKind};
use crate::event::{EventLock, Events};
use crate::id::LeaseId;
use crate::key::Key;
use crate::lease::{Courier, Lease, Terms};
use crate::store::{Command, Reply, Request, Store};
use crate::watchdog::Watchdog;

use local::{LocalQueues, Place};
use outage::{Ongoing, Outage};
use pause::Pause;

/// What is asked for.
#[derive(Clone, Debug)]
pub(crate) struct Wanted {
    pub(crate) key: Key,
    pub(crate) ttl: Duration,
    pub(crate) renew_every: Option<Duration>,
    pub(crate) max_hold: Option<Duration>,
}

/// For how long to wait while somebody else has it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Until {
    /// Not at all.
    Now,
    At(Moment),
    Forever,
}

/// The waiting room of a client.
pub(crate) struct Waits {
    store: Arc<dyn Store>,
    watchdog: Arc<Watchdog>,
    courier: Arc<Courier>,
    queues: LocalQueues,
    outage: Outage,
    ended: AtomicBool,
    command_timeout: Duration,
    patience: Duration,
}

enum Attempt {
    Granted(Arc<Lease>),
    Contended(Duration),
    /// The caller's own deadline came before an answer: nothing was learnt.
    OutOfTime,
    /// Worth another try: Redis could not be asked, or gave no answer.
    Failed(Error),
}

impl Waits {
    pub(crate) fn new(
        store: Arc<dyn Store>,
        watchdog: Arc<Watchdog>,
        courier: Arc<Courier>,
        command_timeout: Duration,
        patience: Duration,
    ) -> Self {
        Self {
            store,
            watchdog,
            courier,
            queues: LocalQueues::new(),
            outage: Outage::new(2 * command_timeout + Duration::from_secs(1)),
            ended: AtomicBool::new(false),
            command_timeout,
            patience,
        }
    }

    /// The lock, or nothing if somebody else had it for as long as `until` allows.
    pub(crate) fn acquire(
        &self,
        wanted: &Wanted,
        until: Until,
    ) -> Result<Option<Arc<Lease>>, Error> {
        let started = Moment::now();
        let name = wanted.key.name();
        let place = match until {
            // Whoever waits here already is before us.
            Until::Now => match self.queues.join_if_empty(&wanted.key) {
                Some(place) => place,
                None => return self.behind_others().map_err(|error| error.with_key(name)),
            },
            _ => self.queues.join(&wanted.key),
        };
        let found = self.wait(wanted, &place, started, until);
        let lease = match found {
            Ok(Some(lease)) => lease,
            Ok(None) => return Ok(None),
            Err(error) => return Err(error.with_key(name)),
        };
        place.leave_with_the_lock();
        // Only now: it runs user code, and the next in line can be told before.
        let waited = Moment::now().since(started);
        self.courier
            .tell(|events| events.acquired(lease.event(), waited));
        Ok(Some(lease))
    }

    /// What to tell somebody who does not wait, while others do.
    fn behind_others(&self) -> Result<Option<Arc<Lease>>, Error> {
        if self.ended.load(Ordering::Acquire) {
            return Err(Error::new(ErrorKind::Shutdown, ""));
        }
        match self.outage.ongoing(Moment::now()) {
            Some(outage) => Err(outage.error),
            None => Ok(None),
        }
    }

    fn wait(
        &self,
        wanted: &Wanted,
        place: &Place<'_>,
        started: Moment,
        until: Until,
    ) -> Result<Option<Arc<Lease>>, Error> {
        let mut pause = Pause::new();
        // What our own last attempt met with, once there was one: an answer, or an outage.
        let mut met: Option<Option<Ongoing>> = None;
        let (mut first, mut rested, mut told) = (true, true, false);
        loop {
            if self.ended.load(Ordering::Acquire) {
                return Err(Error::new(ErrorKind::Shutdown, ""));
            }
            let now = Moment::now();
            let in_front = place.is_in_front();
            let ongoing = match &met {
                Some(own) if in_front => own.clone(),
                _ => self.outage.ongoing(now),
            };
            // Whoever comes to an empty line has one attempt in any case.
            let owed = std::mem::take(&mut first) && in_front;
            if !owed && let Some(verdict) = self.verdict(started, now, until, ongoing.as_ref()) {
                return verdict;
            }
            if !(in_front && rested) {
                let longest = self.longest_wait(now, until, ongoing.as_ref());
                if place.wait(longest, pause.next()) && ongoing.is_none() {
                    pause = Pause::new();
                }
                rested = true;
                continue;
            }
            rested = false;
            match self.attempt(wanted, now, until, matches!(met, Some(None)))? {
                Attempt::Granted(lease) => {
                    self.outage.end();
                    return Ok(Some(lease));
                }
                Attempt::Contended(expires_in) => {
                    self.outage.end();
                    if !std::mem::replace(&mut told, true) {
                        self.tell(wanted, |events, lock| events.contended(lock, expires_in));
                    }
                    pause.no_longer_than(expires_in);
                    met = Some(None);
                }
                Attempt::OutOfTime => {}
                Attempt::Failed(error) => {
                    let ongoing = self.failed(now, met.flatten(), error);
                    // Told once it is known to all: who hears of it finds it so.
                    self.tell(wanted, |events, lock| {
                        events.unavailable(lock, &ongoing.error);
                    });
                    met = Some(Some(ongoing));
                    pause.for_an_outage();
                }
            }
        }
    }

    /// An attempt made at `now` failed, as the one before it did if that met with `before`.
    fn failed(&self, now: Moment, before: Option<Ongoing>, error: Error) -> Ongoing {
        let (mut ongoing, is_news) = self.outage.begin(now, Moment::now(), error);
        if is_news {
            // Those behind us now have an end to their patience.
            self.queues.wake_all();
        }
        if let Some(before) = before {
            ongoing.since = ongoing.since.min(before.since);
        }
        ongoing
    }

    fn tell(&self, wanted: &Wanted, event: impl FnOnce(&dyn Events, EventLock<'_>)) {
        let lock = EventLock {
            key: wanted.key.name(),
            fencing_token: 0,
        };
        self.courier.tell(|events| event(events, lock));
    }

    /// What to tell a caller that has waited long enough; nothing if it has not.
    fn verdict(
        &self,
        started: Moment,
        now: Moment,
        until: Until,
        outage: Option<&Ongoing>,
    ) -> Option<Result<Option<Arc<Lease>>, Error>> {
        let give_up_at = match (until, outage) {
            (Until::Now, None) => return Some(Ok(None)),
            (Until::Forever, None) => return None,
            (Until::Now, Some(_)) => started.after(self.command_timeout),
            (Until::At(deadline), _) => deadline,
            (Until::Forever, Some(outage)) => outage.since.max(started).after(self.patience),
        };
        if now < give_up_at {
            return None;
        }
        let Some(outage) = outage else {
            return Some(Ok(None));
        };
        if let Until::Now = until {
            return Some(Err(outage.error.clone()));
        }
        let lasted = now.since(outage.since.max(started));
        let message = format!("for {:.1} s: {}", lasted.as_secs_f64(), outage.error);
        let error = Error::new(ErrorKind::Unavailable, message);
        Some(Err(error.with_source(outage.error.clone())))
    }

    /// Until when to sleep at most, before asking for a verdict again.
    fn longest_wait(&self, now: Moment, until: Until, outage: Option<&Ongoing>) -> Moment {
        let patience = self.patience.max(Duration::from_millis(10));
        let look_again = match outage {
            Some(outage) => outage.since.after(patience).max(now.after(patience / 10)),
            None => now.after(patience),
        };
        match until {
            Until::Now => now.after(self.command_timeout),
            Until::At(deadline) => deadline.min(look_again),
            Until::Forever => look_again,
        }
    }

    /// Asks Redis once, under a new lease id.
    fn attempt(
        &self,
        wanted: &Wanted,
        asked_at: Moment,
        until: Until,
        answered_before: bool,
    ) -> Result<Attempt, Error> {
        let lease = LeaseId::random();
        let ttl = wanted
            .max_hold
            .map_or(wanted.ttl, |hold| hold.min(wanted.ttl));
        let command = Command::Acquire {
            key: wanted.key.clone(),
            lease,
            ttl,
        };
        // An attempt has its full time, unless the caller knows already that somebody has the lock:
        // then it does not outlast the caller.
        let mut deadline = asked_at.after(self.command_timeout);
        if let (Until::At(at), true) = (until, answered_before) {
            deadline = deadline.min(at);
        }
        let mut request = [Request::new(command, deadline)];
        self.store.execute(&mut request);
        let [request] = request;
        match request.into_outcome() {
            Ok(Reply::Granted { token }) => {
                let terms = Terms {
                    key: wanted.key.clone(),
                    id: lease,
                    token,
                    ttl,
                    asked_at,
                    hold_until: wanted.max_hold.map(|hold| asked_at.after(hold)),
                    renew_every: wanted.renew_every,
                };
                self.granted(terms)
            }
            Ok(Reply::Contended { expires_in }) => Ok(Attempt::Contended(expires_in)),
            Ok(_) => unreachable!("a release's answer to an acquire"),
            Err(error) => match error.kind() {
                // The caller's own deadline was shorter than an answer takes.
                ErrorKind::Timeout if deadline < asked_at.after(self.command_timeout) => {
                    Ok(Attempt::OutOfTime)
                }
                ErrorKind::Timeout | ErrorKind::Unavailable => Ok(Attempt::Failed(error)),
                _ => Err(error),
            },
        }
    }

    fn granted(&self, terms: Terms) -> Result<Attempt, Error> {
        let (key, id, ttl) = (terms.key.clone(), terms.id, terms.ttl);
        let lease = Arc::new(Lease::new(terms, Arc::clone(&self.courier)));
        let give_back = |until| {
            self.store.post(Command::Release {
                key,
                lease: id,
                until,
            });
        };
        let now = Moment::now();
        if lease.remaining(now).is_zero() {
            give_back(now.after(ttl));
            let message = format!("the grant came later than its ttl of {ttl:?} allows");
            return Ok(Attempt::Failed(Error::new(ErrorKind::Timeout, message)));
        }
        if !self.watchdog.watch(&lease) {
            give_back(now.after(ttl));
            return Err(Error::new(ErrorKind::Shutdown, ""));
        }
        Ok(Attempt::Granted(lease))
    }

    /// A lock of this client was let go: whoever of it waits first may try at once.
    pub(crate) fn released(&self, key: &Key) {
        self.queues.wake(key);
    }

    /// Sends everybody away, now and from now on.
    pub(crate) fn end(&self) {
        self.ended.store(true, Ordering::Release);
        self.queues.wake_all();
    }
}

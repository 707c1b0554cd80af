//! One caller's wait for a lock: a loop (`Wait::run`) with one attempt at a time and one deadline.

use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, TryRecvError};

use crate::acquire::backoff::{Backoff, jittered};
use crate::acquire::contention::{Contention, Pause, WaitSoFar};
use crate::acquire::outage::CurrentOutage;
use crate::acquire::queue::{EntryKind, QueueEntry, QueuePosition, WaiterGuard, WakeReason};
use crate::acquire::{Acquirer, LockRequest};
use crate::command::{Acquire, Command, GrantMessage, QueueMode, Queued, Reply};
use crate::lease::{Check, Grant, Lease, Options};
use crate::report::error::{Error, ErrorKind};
use crate::store::{ServerId, TrackedKey};
use crate::util::clock::MonotonicTime;
use crate::util::id::LeaseId;
use crate::util::key::Key;

/// How long a waiter is queued in Redis before its key is tracked.
const TRACK_AFTER: Duration = Duration::from_millis(20);
/// How many waiters at the front of a key's queue have the key tracked. Each of these waiters costs a request at each
/// change of the key.
const TRACKING_WAITERS: u64 = 2;
/// The longest time for which one of the first waiters relies on notifications before it asks Redis again. This bounds
/// the delay after a lost notification.
const LONGEST_TRUST: Duration = Duration::from_secs(1);
/// The pause of a waiter that starves before it asks again, if the current turn began a short time ago. During long
/// turns it has half of their age so far. The attempts come at random times, so some of them find the key free before
/// the clients that are notified sooner.
const STARVING_POLL: Duration = Duration::from_millis(10);
/// How many waiters at the front of a queue ask at least once in `LONGEST_TRUST`. Each waiter behind them asks less
/// often: with twice as many waiters before it, half as often, but see `FAR`.
const NEAR: u64 = 8;
/// How many waiters ask at least once in `FAR_TRUST`. If all waiters before them are stopped, one of them has to notice
/// soon that the first one does not confirm its grant. Behind them, a waiter with twice as many waiters before it asks
/// half as often. So the number of requests grows with the logarithm of the number of waiters.
const FAR: u64 = 128;
const FAR_TRUST: Duration = Duration::from_millis(2500);
/// The waiters of an expired lock ask one after another, this far apart. Usually the first request already serves the
/// queue.
const ASK_APART: Duration = Duration::from_millis(20);
/// The last waiter asks at most this long after the lock has expired. The queue outlives the lock by ten seconds or
/// more.
const ASK_LATEST: Duration = Duration::from_secs(5);

/// An attempt has at least this time if its caller has time to wait, so that a short wait does not end before a healthy
/// server replies.
const SHORTEST_ATTEMPT: Duration = Duration::from_millis(100);

/// A caller that does not wait gives up after so many split votes.
const MAX_SPLIT_VOTES: u32 = 4;

/// How long to wait while another holder has the lock.
#[derive(Clone, Copy, Debug)]
pub enum Until {
    /// Not at all.
    Now,
    At(MonotonicTime),
    Forever,
}

impl Until {
    /// The end of a call that began at `started`. A caller without time to wait has one command time-out for all of its
    /// attempts: another caller may end the first attempt early, and then a second one must not begin a new time-out.
    fn end(self, started: MonotonicTime, command_timeout: Duration) -> Option<MonotonicTime> {
        match self {
            Self::Forever => None,
            Self::At(deadline) if deadline > started => Some(deadline),
            Self::At(_) | Self::Now => Some(started.after(command_timeout)),
        }
    }
}

/// When the first waiter of a queue asks Redis again.
#[derive(Clone, Copy)]
pub enum RetryState {
    /// At once: the waiter has not asked yet, or was woken.
    AskNow,
    /// At `ask_at`: the waiter is queued in Redis and will be notified of its grant. It has its key tracked from
    /// `track_at` on.
    Queued {
        track_at: Option<MonotonicTime>,
        ask_at: MonotonicTime,
    },
    /// After a pause: the waiter will not be notified.
    Polling,
    /// At `ask_at`, or after a pause once a majority of the servers has reported a release. Redis has no queue for the
    /// waiter.
    Watching { ask_at: MonotonicTime },
    /// At `until`; a wake-up does not shorten the pause. `reads_first`: see [`Pause`].
    Pausing {
        until: MonotonicTime,
        reads_first: bool,
    },
}

impl RetryState {
    /// Returns the state of a waiter at this place in the queue of a lock that expires at `expires_at`.
    pub fn queued(queued: Queued, expires_at: MonotonicTime, now: MonotonicTime) -> Self {
        let place = u32::try_from(queued.ahead).unwrap_or(u32::MAX);
        let share = |of: u64| queued.ahead.max(of) as f64 / of as f64;
        let near = LONGEST_TRUST.mul_f64(share(NEAR));
        let far = FAR_TRUST.mul_f64(share(FAR));
        let trust = jittered(near.min(far));
        let apart = ASK_APART.saturating_mul(place).min(ASK_LATEST);
        Self::Queued {
            track_at: (queued.ahead < TRACKING_WAITERS).then(|| now.after(TRACK_AFTER)),
            ask_at: now.after(trust).min(expires_at.after(apart)),
        }
    }
}

/// The result of this caller's own last attempt. It counts more than the outage that other callers have found.
enum LastAttempt {
    None,
    Answered,
    Failed(CurrentOutage),
}

/// How a caller got its lease.
enum Acquired {
    Granted(Arc<Lease>),
    HandedOff(Arc<Lease>),
}

/// One caller's wait in the queue of its client.
struct Wait<'a> {
    acquirer: &'a Acquirer,
    request: &'a LockRequest,
    waiter: &'a WaiterGuard<'a>,
    started: MonotonicTime,
    until: Until,
    /// The end of the call: see [`Until::end`].
    end: Option<MonotonicTime>,
    backoff: Backoff,
    retry: RetryState,
    last_attempt: LastAttempt,
    contention_reported: bool,
    /// `run` does not give up before the next attempt, even if the time is up.
    is_attempt_owed: bool,
    /// The part of the wait that decides about the next pause, on a quorum.
    so_far: WaitSoFar,
    /// `so_far` counts the current turn of another client as missed. The turn ends once the key is free.
    is_turn_counted: bool,
    /// How many new turns of others were read in this wait.
    turns_read: usize,
    /// When the last of them was read for the first time.
    turn_since: MonotonicTime,
}

impl Acquirer {
    /// Waits for the lock. Returns `None` if other holders had the lock for as long as `until` allows.
    pub fn wait(
        &self,
        request: &LockRequest,
        until: Until,
        started: MonotonicTime,
    ) -> Result<Option<Arc<Lease>>, Error> {
        let LockRequest { key, options, .. } = request;
        let mut joined_at = started;
        let end = until.end(started, self.command_timeout);
        loop {
            let waiter = match until {
                Until::Now => match self.queues.join_if_empty(key, *options) {
                    Some(waiter) => waiter,
                    None => return self.refuse_behind_others(key, options),
                },
                _ => self.queues.join(key, *options, request.cancel.as_ref()),
            };
            let mut wait = Wait {
                acquirer: self,
                request,
                waiter: &waiter,
                started,
                until,
                end,
                backoff: Backoff::new(),
                retry: RetryState::AskNow,
                last_attempt: LastAttempt::None,
                contention_reported: false,
                // The first waiter of a queue has one attempt, even if it has no time to wait.
                is_attempt_owed: end.is_none_or(|end| joined_at < end),
                so_far: WaitSoFar::default(),
                is_turn_counted: false,
                turns_read: 0,
                turn_since: started,
            };
            let (lease, valid_at) = match wait.run(joined_at) {
                Ok(Some(Acquired::Granted(lease))) => {
                    self.leave_queue_with(waiter, &lease);
                    let since = lease.grant().since;
                    (lease, since)
                }
                Ok(Some(Acquired::HandedOff(lease))) => {
                    self.leave_queue(request, waiter);
                    (lease, self.watchdog.now())
                }
                given_up => {
                    self.leave_queue(request, waiter);
                    return given_up.map(|_| None);
                }
            };
            if lease.valid_for(valid_at).is_some() {
                return Ok(Some(lease));
            }
            // A `force_unlock` has just ended the lease, or this thread slept until its validity ended. Wait again.
            self.release(&lease);
            joined_at = self.watchdog.now();
        }
    }

    /// The result for a caller that does not wait, if other threads of this client wait for the lock.
    fn refuse_behind_others(
        &self,
        key: &Key,
        options: &Options,
    ) -> Result<Option<Arc<Lease>>, Error> {
        self.check_open()?;
        let outage = self.outage_of(options);
        match outage.current(|| self.store.server_of(key), self.watchdog.now()) {
            Some(outage) => Err(outage.error),
            None => Ok(None),
        }
    }

    /// Makes the lease of a grant, and tells the watchdog to keep it alive. `others_queued` says whether other clients
    /// may be queued in Redis for the key. Releases the grant and fails if it came too late (`Timeout`) or after
    /// shutdown (`Shutdown`).
    pub fn lease_of(
        &self,
        grant: Grant,
        check: Option<Check>,
        others_queued: bool,
    ) -> Result<Arc<Lease>, Error> {
        let (key, id, ttl) = (grant.key.clone(), grant.id, grant.ttl());
        let since = grant.since;
        let lease = Lease::new(grant, Arc::clone(&self.callbacks), check);
        let lease = Arc::new(lease.with_others_queued(others_queued));
        // Checked before the watchdog gets the lease: the watchdog would report the loss of a lock that no caller held.
        if lease.valid_for(since).is_none() {
            self.release_unheld(key, id, ttl);
            let message = format!(
                "the grant came after the validity of its ttl of {ttl:?} had ended; use a longer ttl, or check the \
                 load of the server and of this machine"
            );
            return Err(Error::new(ErrorKind::Timeout, message));
        }
        if !self.watchdog.schedule(&lease) {
            self.release_unheld(key, id, ttl);
            return Err(Error::new(ErrorKind::Shutdown, ""));
        }
        Ok(lease)
    }

    /// The latest time at which a waiter checks the `end` of its call and the outage again.
    pub fn longest_sleep(
        &self,
        now: MonotonicTime,
        end: Option<MonotonicTime>,
        outage: Option<&CurrentOutage>,
    ) -> MonotonicTime {
        let timeout = self.outage_timeout.max(Duration::from_millis(10));
        let look_again = match outage {
            Some(outage) => outage.since.after(timeout).max(now.after(timeout / 10)),
            None => now.after(timeout.max(LONGEST_TRUST)),
        };
        end.map_or(look_again, |end| end.min(look_again))
    }
}

impl Wait<'_> {
    /// Waits until this caller has the lock or its time is up. The wait began at `joined_at`. When the time is up,
    /// returns an error if there is an outage, otherwise `None`.
    fn run(&mut self, joined_at: MonotonicTime) -> Result<Option<Acquired>, Error> {
        let mut now = joined_at;
        loop {
            if let Some(lease) = self.waiter.handed_off() {
                return Ok(Some(Acquired::HandedOff(lease)));
            }
            self.acquirer.check_open()?;
            if self.is_cancelled() {
                return Err(Error::new(ErrorKind::Cancelled, ""));
            }
            let position = self.waiter.position(now);
            if let QueuePosition::Granted(entry, message) = &position {
                if let Some(lease) = self.accept(entry, *message, now)? {
                    return Ok(Some(Acquired::Granted(lease)));
                }
                self.retry = RetryState::AskNow;
            }
            let may_ask = match position {
                QueuePosition::Behind => false,
                // A caller that does not wait still asks Redis, which may know of a loss that this client does not know
                // of yet.
                QueuePosition::Held(_) => matches!(self.until, Until::Now),
                QueuePosition::First | QueuePosition::Granted(..) => true,
            };
            // A waiter behind others is owed none.
            self.is_attempt_owed &= may_ask;
            let outage = self.outage(now, may_ask);
            if !self.is_attempt_owed
                && let Some(given_up) = self.give_up(now, outage.as_ref())
            {
                return given_up.map(|()| None);
            }
            if may_ask && matches!(self.retry, RetryState::AskNow) {
                if let Some(until) = self.leave_turn(now) {
                    self.retry = RetryState::Pausing {
                        until,
                        reads_first: false,
                    };
                } else if let Some(lease) = self.ask_redis(now)? {
                    return Ok(Some(Acquired::Granted(lease)));
                }
            } else {
                self.sleep(now, &position, outage.as_ref())?;
            }
            now = self.acquirer.watchdog.now();
        }
    }

    /// Whether the caller has cancelled its wait. False for `Until::Now`: such a caller has no wait to cancel.
    fn is_cancelled(&self) -> bool {
        let cancel = self.request.cancel.as_ref();
        let is_ready = |cancel: &Receiver<()>| cancel.try_recv() != Err(TryRecvError::Empty);
        !matches!(self.until, Until::Now) && cancel.is_some_and(is_ready)
    }

    /// The outage that counts for this caller. If it may ask Redis, its own last attempt decides; otherwise the
    /// attempts of other callers do.
    fn outage(&self, now: MonotonicTime, may_ask: bool) -> Option<CurrentOutage> {
        match &self.last_attempt {
            LastAttempt::Answered if may_ask => None,
            LastAttempt::Failed(outage) if may_ask => Some(outage.clone()),
            _ => {
                let outage = self.acquirer.outage_of(&self.request.options);
                outage.current(|| self.server(), now)
            }
        }
    }

    /// The server that stores the key.
    fn server(&self) -> ServerId {
        self.acquirer.store.server_of(&self.request.key)
    }

    /// Returns the result for a caller that has waited long enough, or `None` if the caller has to wait on.
    fn give_up(
        &self,
        now: MonotonicTime,
        outage: Option<&CurrentOutage>,
    ) -> Option<Result<(), Error>> {
        let (started, acquirer) = (self.started, self.acquirer);
        let give_up_at = match (self.until, outage) {
            (Until::Now, None) => return Some(Ok(())),
            (Until::Forever, None) => return None,
            (Until::Now, Some(outage)) if outage.error.is_lasting() => started,
            (Until::Now, Some(_)) => started.after(acquirer.command_timeout),
            (Until::At(deadline), _) => deadline,
            (Until::Forever, Some(outage)) => {
                let since = outage.since.max(started);
                since.after(acquirer.outage_timeout)
            }
        };
        if now < give_up_at {
            return None;
        }
        let Some(outage) = outage else {
            return Some(Ok(()));
        };
        if let Until::Now = self.until {
            return Some(Err(outage.error.clone()));
        }
        let lasted = now.since(outage.since.max(started));
        let (kind, reason) = match outage.error.kind() {
            // The new error has this kind, so its text would say it twice.
            kind @ (ErrorKind::Unavailable | ErrorKind::NoQuorum) => {
                (kind, outage.error.message().to_owned())
            }
            _ => (ErrorKind::Unavailable, outage.error.to_string()),
        };
        let message = format!("for {:.1} s: {reason}", lasted.as_secs_f64());
        let error = Error::new(kind, message);
        Some(Err(error.with_source_of(&outage.error)))
    }

    /// Sleeps until this waiter is woken or has to do something. Fails with `Cancelled` if the caller cancels the wait.
    fn sleep(
        &mut self,
        now: MonotonicTime,
        position: &QueuePosition,
        outage: Option<&CurrentOutage>,
    ) -> Result<(), Error> {
        let acquirer = self.acquirer;
        let mut until = acquirer.longest_sleep(now, self.end, outage);
        match position {
            QueuePosition::Behind => {}
            QueuePosition::Held(remaining) => {
                self.report_contention(*remaining);
                until = until.min(now.after(*remaining));
            }
            QueuePosition::First | QueuePosition::Granted(..) => {
                until = until.min(match self.retry {
                    RetryState::AskNow => now,
                    RetryState::Polling => now.after(self.backoff.next()),
                    RetryState::Queued { track_at, ask_at } => {
                        track_at.unwrap_or(ask_at).min(ask_at)
                    }
                    RetryState::Watching { ask_at: at } | RetryState::Pausing { until: at, .. } => {
                        at
                    }
                });
            }
        }
        match self.waiter.sleep(until) {
            WakeReason::Cancelled => return Err(Error::new(ErrorKind::Cancelled, "")),
            WakeReason::Woken => {
                if outage.is_none() {
                    self.backoff = Backoff::new();
                }
                self.retry = match self.retry {
                    pausing @ RetryState::Pausing { .. } => pausing,
                    RetryState::Watching { .. } if self.waiter.was_released() => {
                        self.end_turn();
                        self.start_pause()
                    }
                    _ => RetryState::AskNow,
                };
            }
            WakeReason::Nudged => {
                if let RetryState::Queued { ask_at, .. } = &mut self.retry {
                    let soon = acquirer.watchdog.now().after(jittered(LONGEST_TRUST));
                    *ask_at = soon.min(*ask_at);
                }
            }
            WakeReason::TimedOut => {
                let now = acquirer.watchdog.now();
                self.retry = match self.retry {
                    RetryState::Queued { track_at, ask_at } if now < ask_at => {
                        let is_due = track_at.is_some_and(|at| at <= now);
                        if is_due && !self.track_key() {
                            RetryState::AskNow
                        } else {
                            RetryState::Queued {
                                track_at: track_at.filter(|_| !is_due),
                                ask_at,
                            }
                        }
                    }
                    watching @ RetryState::Watching { ask_at } if now < ask_at => watching,
                    pausing @ RetryState::Pausing { until, .. } if now < until => pausing,
                    RetryState::Pausing {
                        reads_first: true, ..
                    } => self.start_watching(None),
                    _ => RetryState::AskNow,
                };
            }
        }
        Ok(())
    }

    /// Counts the current turn of another client as missed, unless it is counted already.
    fn count_turn(&mut self) {
        if !std::mem::replace(&mut self.is_turn_counted, true) {
            self.so_far.missed_turns += 1;
        }
    }

    /// The client's records of contention, on a quorum.
    fn contention(&self) -> &Contention {
        let contention = self.acquirer.contention.as_ref();
        contention.expect("only waiters of a quorum watch keys and split votes")
    }

    #[cfg(test)]
    fn note_wait(&self) {
        if let Some(contention) = &self.acquirer.contention {
            contention.lock_record(&self.request.key).last_wait = self.so_far;
        }
    }

    /// The current turn of another client has ended. The next one counts again.
    fn end_turn(&mut self) {
        self.count_turn();
        self.is_turn_counted = false;
    }

    /// Notes the turn that the reads of this watch have found. Comes before the next watch, which forgets it.
    fn note_turn(&mut self, now: MonotonicTime) {
        let Some(turn) = self.waiter.take_turn() else {
            return;
        };
        if self.contention().note_turn(&self.request.key, turn, now) {
            self.turns_read += 1;
            self.turn_since = now;
        }
    }

    /// On a quorum: the latest time for an attempt that ends before the deadline. `None` without a deadline.
    fn latest_attempt(&self) -> Option<MonotonicTime> {
        let Until::At(deadline) = self.until else {
            return None;
        };
        let round_trip = self.contention().round_trip(&self.request.key);
        Some(deadline.before(round_trip))
    }

    /// Begins the pause before the next attempt. If it would end too late for an attempt before the deadline, it ends
    /// one round trip before the deadline, and `run` owes the caller this last attempt. If less than a round trip is left,
    /// the caller asks at once.
    fn start_pause(&mut self) -> RetryState {
        let now = self.acquirer.watchdog.now();
        self.note_turn(now);
        let (contention, key) = (self.contention(), &self.request.key);
        let Pause { time, reads_first } = contention.choose_pause(key, self.so_far, now);
        let until = now.after(time);
        let Some(latest) = self.latest_attempt() else {
            return RetryState::Pausing { until, reads_first };
        };
        // A read takes a round trip, too.
        let reads_first = reads_first && until.after(contention.round_trip(key)) <= latest;
        if until > latest {
            self.is_attempt_owed = now < latest;
        }
        RetryState::Pausing {
            until: until.min(latest),
            reads_first,
        }
    }

    /// Has the key read and watched on all servers of a quorum, or polls if too few of them can notify. `expires_at`:
    /// when the lock of another client expires, or `None` if the key may be free. If the key is free, the read wakes this
    /// waiter.
    fn start_watching(&mut self, expires_at: Option<MonotonicTime>) -> RetryState {
        let acquirer = self.acquirer;
        let now = acquirer.watchdog.now();
        self.note_turn(now);
        let (contention, key) = (self.contention(), &self.request.key);
        // The waiters of an expired lock ask one after another, but before their deadlines.
        let expired_at = expires_at.map(|expiry| {
            let pause = contention.choose_pause(key, self.so_far, now);
            let ask_at = expiry.after(pause.time);
            let latest = self.latest_attempt();
            latest.map_or(ask_at, |latest| ask_at.min(latest.max(expiry)))
        });
        let starves = contention.starves(key, self.turns_read, now);
        self.waiter.watch(expires_at.is_some());
        let tracked = vec![TrackedKey {
            key: key.clone(),
            lease: None,
        }];
        if !acquirer.notifications.track(tracked) {
            return RetryState::Polling;
        }
        let ask_at = now.after(match starves {
            true => jittered(
                STARVING_POLL
                    .max(now.since(self.turn_since) / 2)
                    .min(LONGEST_TRUST),
            ),
            false => jittered(LONGEST_TRUST),
        });
        RetryState::Watching {
            ask_at: expired_at.map_or(ask_at, |at| ask_at.min(at)),
        }
    }

    /// On a quorum: until when this waiter leaves the turn to other clients. `None` if its client has not just released
    /// the key, or if the caller does not wait.
    fn leave_turn(&self, now: MonotonicTime) -> Option<MonotonicTime> {
        let contention = self.acquirer.contention.as_ref()?;
        if let Until::Now = self.until {
            return None;
        }
        let until = contention.leave_turn(&self.request.key, now)?;
        let latest = self.latest_attempt();
        Some(latest.map_or(until, |latest| until.min(latest)))
    }

    /// Handles a split vote. A caller that does not wait asks again, [`MAX_SPLIT_VOTES`] times in all, unless a majority
    /// of the servers says that the lock is taken.
    fn note_split_vote(&mut self, expires_in: Duration, may_be_taken: bool) {
        let (acquirer, key) = (self.acquirer, &self.request.key);
        let now = acquirer.watchdog.now();
        self.so_far.split_votes += 1;
        // The turn of the client that gets the key now does not count again.
        self.so_far.missed_turns += 1;
        self.is_turn_counted = true;
        self.contention().note_other_client(key, now);
        self.report_contention(expires_in);
        self.last_attempt = LastAttempt::Answered;
        if let Until::Now = self.until {
            let in_time = self.end.is_some_and(|end| now < end);
            self.is_attempt_owed =
                in_time && !may_be_taken && self.so_far.split_votes < MAX_SPLIT_VOTES;
            let votes = self.so_far.split_votes;
            self.retry = RetryState::Pausing {
                until: now.after(self.contention().choose_random_pause(key, votes, now)),
                reads_first: false,
            };
            return;
        }
        acquirer.notifications.request(key);
        self.retry = if may_be_taken {
            self.backoff.no_longer_than(expires_in);
            self.start_watching(Some(now.after(expires_in + Duration::from_millis(1))))
        } else {
            self.start_pause()
        };
    }

    /// Tells Redis to report changes of the key. Returns false if this is not possible now.
    fn track_key(&self) -> bool {
        self.waiter.note_tracked();
        let key = self.request.key.clone();
        let tracked = vec![TrackedKey { key, lease: None }];
        self.acquirer.notifications.track(tracked)
    }

    /// Makes the lease of a grant that came as a message. Returns `None` if an acquire has to confirm the grant first.
    /// That is so in these cases:
    ///
    /// - The message says so, its token is not plausible, or other users may know the lease id.
    /// - The entry has other options, the caller was promised the whole ttl, or replicas have to acknowledge the grant.
    /// - Too little validity is left. It counts from the first request, since the time of the grant is not known.
    fn accept(
        &self,
        entry: &QueueEntry,
        message: GrantMessage,
        now: MonotonicTime,
    ) -> Result<Option<Arc<Lease>>, Error> {
        let options = self.request.options;
        let whole_ttl_promised = options.renew_every.is_none() || options.max_hold.is_some();
        let has_to_be_acknowledged = options.replicas.is_some();
        let is_short = message.to_confirm || now.since(entry.asked_at) > options.ttl / 3;
        let is_believed = entry.options == options && entry.is_plausible(message, now);
        if whole_ttl_promised || has_to_be_acknowledged || is_short || !is_believed {
            return Ok(None);
        }
        let grant = self.grant(entry.lease, message.token, true, entry.asked_at);
        let check = self.request.check.clone();
        match self.acquirer.lease_of(grant, check, true) {
            Ok(lease) => Ok(Some(lease)),
            Err(late) if late.is_unavailable() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Sends one acquire and waits for its reply. Returns the lease if Redis granted it; otherwise notes when to ask
    /// again.
    fn ask_redis(&mut self, asked_at: MonotonicTime) -> Result<Option<Arc<Lease>>, Error> {
        let acquirer = self.acquirer;
        let LockRequest { key, options, .. } = self.request;
        let (lease, queue_mode) = self.choose_lease(asked_at);
        let was_queued = matches!(queue_mode, QueueMode::Existing { .. });
        let ttl = options.first_ttl();
        let full_time = asked_at.after(acquirer.command_timeout);
        let deadline = match (self.until, self.end) {
            (_, None) => full_time,
            (Until::At(at), Some(end)) if at > self.started => {
                full_time.min(end.max(asked_at.after(SHORTEST_ATTEMPT)))
            }
            (_, Some(end)) => full_time.min(end),
        };
        let notification_epoch = acquirer.notifications.epoch(key);
        let command = Command::Acquire(Acquire {
            key: key.clone(),
            lease,
            ttl,
            queue_mode,
            replicas: options.replicas,
        });
        self.is_attempt_owed = false;
        let outcome = acquirer.store.execute_one(command, deadline);
        if let Some(contention) = &acquirer.contention
            && outcome.is_ok()
        {
            contention.note_attempt(key, acquirer.watchdog.now().since(asked_at));
        }
        let keeps_entry = match &outcome {
            Ok(Reply::Granted { .. }) => true,
            Ok(Reply::Contended { queued, .. }) => queued.is_some() || was_queued,
            _ => false,
        };
        if !keeps_entry && !matches!(self.until, Until::Now) {
            // The lease is not queued in Redis, or the outcome is unknown and the store releases the lease.
            acquirer.queues.forget_entry(key, lease);
        }
        match outcome {
            Ok(Reply::Granted {
                token,
                is_token_in_value,
            }) => {
                let grant = self.grant(lease, token, is_token_in_value, asked_at);
                match acquirer.lease_of(grant, self.request.check.clone(), was_queued) {
                    Ok(lease) => {
                        acquirer.outage_of(options).end(|| self.server());
                        #[cfg(test)]
                        self.note_wait();
                        return Ok(Some(lease));
                    }
                    // The grant is too late to be valid. Until this reply Redis was not away, so the outage begins now.
                    Err(late) if late.is_unavailable() => {
                        self.note_failure(acquirer.watchdog.now(), late);
                    }
                    Err(error) => return Err(error),
                }
            }
            Ok(Reply::Contended {
                queued: None,
                expires_in: _,
            }) if was_queued => {
                acquirer.outage_of(options).end(|| self.server());
                self.note_missing_entry(lease);
            }
            Ok(Reply::Contended { queued, expires_in }) => {
                acquirer.outage_of(options).end(|| self.server());
                self.note_contention(lease, queue_mode, queued, expires_in, notification_epoch);
            }
            Ok(Reply::SplitVote {
                expires_in,
                may_be_taken,
            }) => {
                acquirer.outage_of(options).end(|| self.server());
                self.note_split_vote(expires_in, may_be_taken);
            }
            Ok(other) => unreachable!("{other:?} in reply to an acquire"),
            Err(error) => {
                if was_queued {
                    // Redis has refused the request, so an earlier entry of the lease may still be in the queue in
                    // Redis.
                    acquirer.release_unheld(key.clone(), lease, ttl);
                }
                match error.kind() {
                    ErrorKind::Timeout if deadline < full_time => self.note_cut(asked_at, error),
                    ErrorKind::NoQuorum
                        if deadline < full_time && acquirer.watchdog.now() >= deadline =>
                    {
                        self.note_cut(asked_at, error);
                    }
                    _ if error.is_unavailable() => self.note_failure(asked_at, error),
                    _ => return Err(error),
                }
            }
        }
        Ok(None)
    }

    /// Chooses the lease id to ask with, and how it joins the queue in Redis.
    fn choose_lease(&self, asked_at: MonotonicTime) -> (LeaseId, QueueMode) {
        let acquirer = self.acquirer;
        let key = &self.request.key;
        let fresh = acquirer.lease_pool(key).ids.next();
        if let Until::Now = self.until {
            return (fresh, QueueMode::None);
        }
        let (lease, entry_kind, replaced) = self.waiter.entry(fresh, asked_at);
        if let Some(replaced) = replaced {
            let ttl = replaced.options.first_ttl();
            acquirer.release_unheld(key.clone(), replaced.lease, ttl);
        }
        let queue_mode = match (entry_kind, acquirer.notifications.queue_mode(key)) {
            (EntryKind::Existing, mode) => QueueMode::Existing {
                notified: mode == QueueMode::Notified,
            },
            (EntryKind::Rejoin { since }, mode @ (QueueMode::Notified | QueueMode::Polling)) => {
                let polls = mode.polls();
                QueueMode::Rejoin { since, polls }
            }
            (_, mode) => mode,
        };
        (lease, queue_mode)
    }

    /// Makes the grant of `lease`, which was asked for at `asked_at` or later.
    fn grant(
        &self,
        lease: LeaseId,
        token: u64,
        is_token_in_value: bool,
        asked_at: MonotonicTime,
    ) -> Grant {
        let (key, now) = (self.request.key.clone(), self.acquirer.watchdog.now());
        let pool = self.acquirer.lease_pool(&key);
        let options = pool.options.share(self.request.options);
        Grant {
            key,
            id: lease,
            token,
            is_token_in_value,
            options,
            asked_at,
            since: now,
        }
    }

    /// Handles the reply that another holder has the lock.
    fn note_contention(
        &mut self,
        lease: LeaseId,
        queue_mode: QueueMode,
        queued: Option<Queued>,
        expires_in: Duration,
        notification_epoch: u64,
    ) {
        let acquirer = self.acquirer;
        let LockRequest { key, options, .. } = self.request;
        let is_notified = queued.is_some_and(|queued| {
            let noted =
                self.waiter
                    .note_queued(lease, queued.since, queue_mode, notification_epoch);
            if noted.is_none() {
                // The lease is no longer the queue's entry, for example because the client was shut down.
                acquirer.release_unheld(key.clone(), lease, options.first_ttl());
            }
            noted.unwrap_or(false)
        });
        self.report_contention(expires_in);
        let now = acquirer.watchdog.now();
        let expires_at = now.after(expires_in + Duration::from_millis(1));
        self.backoff.no_longer_than(expires_in);
        if !matches!(self.until, Until::Now) {
            acquirer.notifications.request(key);
        }
        self.retry = match queued {
            // An entry that joined to poll is never notified, even if notifications have become possible since.
            Some(queued)
                if is_notified && acquirer.notifications.queue_mode(key) == QueueMode::Notified =>
            {
                RetryState::queued(queued, expires_at, now)
            }
            Some(_) => RetryState::Polling,
            None if let Some(contention) = &acquirer.contention => {
                contention.note_other_client(key, now);
                self.so_far.split_votes = 0;
                self.count_turn();
                match self.until {
                    Until::Now => RetryState::Polling,
                    _ => self.start_watching(Some(expires_at)),
                }
            }
            None if queue_mode == QueueMode::None => RetryState::Polling,
            // The queue in Redis is full.
            None => RetryState::Queued {
                track_at: None,
                ask_at: now.after(jittered(LONGEST_TRUST)).min(expires_at),
            },
        };
        self.last_attempt = LastAttempt::Answered;
    }

    /// Handles the reply that `lease`, which was queued in Redis, is missing there. The caller asks again at once.
    fn note_missing_entry(&mut self, lease: LeaseId) {
        let Acquirer {
            store,
            notifications,
            ..
        } = self.acquirer;
        let expected_notification = self.waiter.remove_missing_entry(lease);
        // Redis has lost the entry, although this client's subscription was not interrupted and no flush was reported:
        // both would have changed the epoch. So the subscription may be on an old primary, and a grant may have skipped
        // the entry.
        let key = &self.request.key;
        let is_notified = notifications.queue_mode(key) == QueueMode::Notified;
        if is_notified && expected_notification == Some(notifications.epoch(key)) {
            store.suspect_connections(key);
        }
        self.retry = RetryState::AskNow;
        self.last_attempt = LastAttempt::Answered;
    }

    /// Handles an attempt that failed because Redis was unavailable. The failure counts from `since`.
    fn note_failure(&mut self, since: MonotonicTime, error: Error) {
        let acquirer = self.acquirer;
        let now = acquirer.watchdog.now();
        let known = acquirer.outage_of(&self.request.options);
        let (mut outage, is_news) = known.begin(self.server(), since, now, error);
        if is_news {
            // The other waiters have to know of the outage, since they end after `outage_timeout`, too.
            acquirer.queues.wake_all();
        }
        if let LastAttempt::Failed(before) = &self.last_attempt {
            outage.since = outage.since.min(before.since);
        }
        // Comes last: while the event handler runs, the client must know of the outage.
        acquirer.report_unavailable(&self.request.key, &outage.error);
        self.last_attempt = LastAttempt::Failed(outage);
        self.backoff.for_an_outage();
        self.retry = RetryState::Polling;
    }

    /// Handles an attempt that the caller's own deadline has ended. A reply may take longer, so this says nothing about
    /// Redis to other callers. To this caller, the lock is taken if an earlier attempt has found that.
    fn note_cut(&mut self, since: MonotonicTime, error: Error) {
        if let LastAttempt::None = self.last_attempt {
            let now = self.acquirer.watchdog.now();
            self.last_attempt = LastAttempt::Failed(CurrentOutage::new(since, now, error));
        }
        self.retry = RetryState::Polling;
    }

    /// Calls `EventHandler::contended`, once for each wait.
    fn report_contention(&mut self, expires_in: Duration) {
        if !std::mem::replace(&mut self.contention_reported, true) {
            let acquirer = self.acquirer;
            acquirer.report_contended(&self.request.key, expires_in);
        }
    }
}

//! Claims a lock for a caller that needs the lock only while the fenced value of the same name is missing. If there is
//! a value, the reply contains the value instead, and the value may settle the call.
//!
//! A caller that waits does not join the lock's queue in Redis, where it would need three requests to get the lock in
//! its turn, read the value, and release the lock. It watches the fenced value, and claims the lock again when the
//! value changes. A holder that fails changes the value, too: it deletes the value, and the token stays. Then one of
//! the waiters gets the lock. After a crash, the waiters claim the lock again when it has expired.
//!
//! A candidate of an election ([`Acquirer::campaign`]) claims the lock once, and writes its value with the grant. If
//! the lock is taken, or other threads of this client wait for it, the candidate waits in the lock's queue, and its
//! caller writes the value after the grant.

use std::sync::Arc;
use std::time::Duration;

use crate::acquire::outage::CurrentOutage;
use crate::acquire::wait::{Call, FIRST_POLL, LONGEST_OUTAGE_POLL, LONGEST_TRUST};
use crate::acquire::watch::{Bell, Watcher, Woken};
use crate::acquire::{Acquirer, LockRequest, Until};
use crate::command::{Claim, Command, LockAndValue, QueueMode, Reply};
use crate::config::key::Key;
use crate::lease::Lease;
use crate::report::error::{Error, ErrorKind};
use crate::store::TrackedKey;
use crate::util::backoff::{Backoff, jittered};
use crate::util::clock::MonotonicTime;

/// The result of a claim.
pub enum ClaimResult {
    Granted(Arc<Lease>),
    NotGranted(Box<LockAndValue>),
}

/// The lease of a candidate that was elected.
pub struct Campaign {
    pub lease: Arc<Lease>,
    pub is_value_written: bool,
}

/// The first pause of a waiter while the lock is about to become free: its holder has deleted the fenced value, or the
/// lock is free and the first waiter of its queue acquires it.
const FIRST_SOON: Duration = Duration::from_millis(5);
/// A waiter claims an expired lock at most this long after the expiry.
const AFTER_EXPIRY: Duration = Duration::from_millis(20);
/// The maximum pause of a waiter until the server has confirmed that it tracks the value. (A server may refuse that.)
const NOT_TRACKED: Duration = Duration::from_secs(3);

impl Acquirer {
    /// Claims the lock, unless `is_settled` accepts what the claim has found. Returns `None` if another holder had the
    /// lock until the time in `until`.
    pub fn claim(
        &self,
        request: &LockRequest,
        value: &Key,
        until: Until,
        is_settled: impl Fn(&LockAndValue) -> Result<bool, Error>,
    ) -> Result<Option<ClaimResult>, Error> {
        let observed = self.observe(&request.key, until);
        let call = observed.call;
        let bell = Arc::new(Bell::new());
        let watcher: Arc<dyn Watcher> = Arc::<Bell>::clone(&bell);
        if call.waits() {
            self.queues.watches.add(value, Arc::clone(&watcher));
        }
        let result = self.claim_under(request, value, &call, &bell, is_settled);
        if call.waits() {
            self.queues.watches.remove(value, &watcher);
        }
        if let Ok(Some(ClaimResult::NotGranted(_))) = result {
            return result;
        }
        self.report(observed, &request.key, result, |claimed| match claimed {
            Some(ClaimResult::Granted(lease)) => Some(lease),
            _ => None,
        })
    }

    fn claim_under(
        &self,
        request: &LockRequest,
        value: &Key,
        call: &Call,
        bell: &Bell,
        is_settled: impl Fn(&LockAndValue) -> Result<bool, Error>,
    ) -> Result<Option<ClaimResult>, Error> {
        let cancel = request.cancel.as_ref().filter(|_| call.waits());
        let mut soon = Backoff::new(FIRST_SOON, LONGEST_TRUST);
        let mut polls = Backoff::new(FIRST_POLL, LONGEST_TRUST);
        let mut outage: Option<CurrentOutage> = None;
        loop {
            self.check_open()?;
            if call.waits() && request.is_cancelled() {
                return Err(Error::new(ErrorKind::Cancelled, ""));
            }
            let asked_at = self.watchdog.now();
            let (tracked, untracked) = match self.try_claim(request, value, None, call, asked_at) {
                Ok(ClaimResult::NotGranted(found)) => {
                    outage = None;
                    if is_settled(&found)? {
                        return Ok(Some(ClaimResult::NotGranted(found)));
                    }
                    if !call.waits() {
                        return Ok(None);
                    }
                    self.pause_after(request, value, bell, &found, &mut soon, &mut polls)
                }
                Err(error) if error.is_unavailable() && call.waits() => {
                    self.report_unavailable(&request.key, &error);
                    let since = outage.map_or(asked_at, |outage| outage.since);
                    outage = Some(CurrentOutage::new(since, self.watchdog.now(), error));
                    let pause = jittered(polls.next_within(LONGEST_OUTAGE_POLL));
                    (pause, pause)
                }
                ended => return ended.map(Some),
            };
            let now = self.watchdog.now();
            if let Some(given_up) = call.give_up(now, outage.as_ref()) {
                return given_up.map(|()| None);
            }
            let left = |pause: Duration| call.end.map_or(pause, |end| pause.min(end.since(now)));
            let (tracked, untracked) = (left(tracked), left(untracked));
            let mut woken = bell.wait(untracked, cancel);
            if woken == Woken::TimedOut && bell.is_tracked() {
                woken = bell.wait(tracked.saturating_sub(untracked), cancel);
            }
            if woken == Woken::Cancelled {
                return Err(Error::new(ErrorKind::Cancelled, ""));
            }
        }
    }

    /// Asks the server to track the value, unless it does already. The waiter claims the lock again when its bell
    /// rings, or after a pause. Returns two pauses: the first for a value that the server tracks at the end of the
    /// second, and the second for a value that it does not track.
    pub fn pause_after(
        &self,
        request: &LockRequest,
        value: &Key,
        bell: &Bell,
        found: &LockAndValue,
        soon: &mut Backoff,
        polls: &mut Backoff,
    ) -> (Duration, Duration) {
        if bell.begin_tracking() {
            let (key, lease) = (value.clone(), None);
            self.notifications.track(vec![TrackedKey { key, lease }]);
        }
        let is_ending = match &found.lock {
            None => true,
            // The holder has deleted the value, and releases the lock next.
            Some((lock, _)) => {
                found.value.is_none() && lock.token.is_some() && found.token >= lock.token
            }
        };
        if is_ending {
            let pause = jittered(soon.next());
            return (pause, pause);
        }
        soon.reset();
        let expires_in = found.lock.as_ref().and_then(|(_, expires_in)| *expires_in);
        let tracked = expires_in.unwrap_or(request.options.ttl) + jittered(AFTER_EXPIRY);
        let untracked = match self.notifications.queue_mode(&request.key) {
            QueueMode::Polling => jittered(polls.next()),
            QueueMode::Notified => NOT_TRACKED,
            // The connection is being opened.
            _ => LONGEST_TRUST,
        };
        (tracked, untracked.min(tracked))
    }

    /// Acquires the lock of an election for a candidate. If the lock is free, writes the candidate's value, `term`,
    /// with the grant. Otherwise the caller has to write it: see [`Campaign::is_value_written`]. Returns `None` if
    /// another holder had the lock until the time in `until`.
    pub fn campaign(
        &self,
        request: &LockRequest,
        value: &Key,
        term: Arc<[u8]>,
        until: Until,
    ) -> Result<Option<Campaign>, Error> {
        let named = |error: Error| error.with_key(request.key.name());
        self.check_open().map_err(named)?;
        let observed = self.observe(&request.key, until);
        let (call, started) = (observed.call, observed.call.started);
        // A claim would go past other threads of this client that wait.
        let has_others = self.queues.has_waiters(&request.key);
        let claim = || self.try_claim(request, value, Some(term), &call, started);
        match (!has_others).then(claim) {
            Some(Ok(ClaimResult::Granted(lease))) => {
                let lease =
                    self.report(observed, &request.key, Ok(lease), |lease| Some(&**lease))?;
                return Ok(Some(Campaign {
                    lease,
                    is_value_written: true,
                }));
            }
            // If the lock is free, the waiters in its queue may be gone, and an acquire may get it.
            Some(Ok(ClaimResult::NotGranted(found))) if found.lock.is_some() && !call.waits() => {
                return Ok(None);
            }
            None | Some(Ok(ClaimResult::NotGranted(_))) => {}
            Some(Err(error)) if error.is_unavailable() && call.waits() => {
                self.report_unavailable(&request.key, &error);
            }
            Some(Err(error)) => return Err(named(error)),
        }
        let Some(mut lease) = self.acquire(request, until)? else {
            return Ok(None);
        };
        if !lease.grant().is_token_in_value {
            // The lock became free after the claim, and plain commands granted it. Observers need the token in the
            // lock's value, and an adoption writes it. The lock stays held in between.
            let mut ticket = self.transfer_out(&lease).map_err(named)?;
            ticket.options.renew_every = request.options.renew_every;
            let started = self.watchdog.now();
            let adopted = self.adopt_through_outage(&ticket, request.check.as_ref(), started);
            lease = adopted.map_err(|error| {
                // The adoption may not have reached Redis. Then the key still has the lease of the ticket.
                self.release_unheld(request.key.clone(), ticket.lease, &ticket.options);
                named(error)
            })?;
        }
        Ok(Some(Campaign {
            lease,
            is_value_written: false,
        }))
    }

    /// Sends one claim and waits for its reply.
    fn try_claim(
        &self,
        request: &LockRequest,
        value: &Key,
        term: Option<Arc<[u8]>>,
        call: &Call,
        asked_at: MonotonicTime,
    ) -> Result<ClaimResult, Error> {
        let LockRequest { key, options, .. } = request;
        let id = self.lease_pool(key).ids.next();
        let command = Command::Claim(Claim {
            key: key.clone(),
            value: value.clone(),
            lease: id,
            ttl: options.first_ttl(),
            term,
            replicas: options.replicas,
        });
        let deadline = call.attempt_deadline(asked_at);
        let token = match self.store.execute_one(command, deadline)? {
            Reply::Granted { token, .. } => token,
            Reply::LockAndValue(found) => return Ok(ClaimResult::NotGranted(found)),
            other => unreachable!("{other:?} in reply to a claim"),
        };
        let grant = self.new_grant(key, id, token, *options, asked_at);
        let lease = self.lease_of(grant, request.check.clone(), false)?;
        self.queues.hold(&lease);
        Ok(ClaimResult::Granted(lease))
    }
}

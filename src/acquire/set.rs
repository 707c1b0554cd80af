//! Acquires a *set*: several keys for one caller. All clients acquire keys in the same order, so sets do not deadlock.
//!
//! 1. The caller waits for its first missing key as for a single lock. Its request also asks for the next keys, up to
//!    the first one that has another slot, or that another thread of this client holds or waits for. The script grants
//!    these keys up to the first taken one. It adds the caller to the queue of the taken key, and skips the keys behind
//!    it ([`Link`]).
//! 2. The caller waits for the taken key, and holds the keys before it. Then it continues with step 1.
//!
//! While a request is under way, the caller has a place in the local queue of each key that it asks for. Afterwards it
//! keeps only its place in the queue of the taken key. Otherwise a thread that already holds one of the other keys
//! could wait behind this caller, while this caller waits for that thread.
//!
//! So a set that waits holds only keys before the one that it waits for. Sets wait longest at the keys that come first
//! in the order. If each set has 3 of 10 keys at random, three tenths of the sets need the first key, and wait for it
//! 3.3 times (1 / 0.3) as long as the fair time.
//!
//! Sets do not join the queues of all their keys in one request, although this would be fairer: in a simulation, the
//! longest wait is 1.1 to 1.3 times the fair one. It is safe only if *every* set joins all its queues at the same
//! moment. If one set joins a queue later, at the place of its first wait (because it polls, has lost its place, or has
//! released a key during a long wait), two sets can wait for each other. The time limit that ends such a circle causes
//! further circles: in an experiment, 100 clients got 14 grants per second instead of thousands.
//!
//! A caller that does not wait sends one request for all keys of a slot. The request grants all of them or none.
//!
//! - *A key behind a wait*: the caller joins the queue of a later key at the place of its first wait, which is the time
//!   at which it joined that queue ([`Caller::place`]). So callers that began to wait later do not go first. Otherwise
//!   a caller would wait for such callers at each of its keys, and the callers behind its earlier keys would wait for
//!   them, too. On a Cluster, the place counts for the keys of one slot, because the clocks of servers differ.
//! - *Until the last grant*, the client renews the leases without special settings: a `fixed_ttl`, a `max_hold` and a
//!   check (`renew_while`) begin with the last grant. If the caller sent more than one request for the keys, it then
//!   sets the whole ttl of all keys once more. It replaces the leases by leases with these settings.
//! - *If a lease is lost* before the last grant, the caller releases the keys from the lost one on, and acquires them
//!   again.
//! - *If the call ends without the set*, the caller releases all keys and its place in a queue, with one request for
//!   each slot, and waits for the replies. In an outage, the background sends these releases. If the keys need
//!   acknowledgements of replicas, the caller also waits for the releases of keys that too few replicas have
//!   acknowledged.
//! - *Without queues*, on a quorum and beside another library, the caller asks for one key after another.

use std::sync::Arc;

use crate::acquire::attempt::{Attempt, SentAcquire};
use crate::acquire::outage::CurrentOutage;
use crate::acquire::queue::WaiterGuard;
use crate::acquire::wait::{Call, FIRST_POLL, LONGEST_OUTAGE_POLL, Refusal};
use crate::acquire::{Acquirer, Caller, LockRequest, NewLease, Until};
use crate::command::{Command, Link, Outcome, Release, Reply, Request};
use crate::config::key::Key;
use crate::lease::{Grant, Lease, Options};
use crate::report::error::{Error, ErrorKind};
use crate::util::backoff::{Backoff, jittered};
use crate::util::clock::MonotonicTime;

/// The keys of a set that its caller holds. A drop (in a panic, for example) releases them.
pub struct HeldKeys<'r> {
    acquirer: &'r Acquirer,
    leases: Vec<Arc<Lease>>,
    /// Removes the caller from the queue of the next key.
    place: Option<Release>,
}

/// The result of one request for the keys behind the first one.
pub struct Gains<'r> {
    held: HeldKeys<'r>,
    /// The next key, if it was taken. The caller is still in its queues.
    refused: Option<RefusedKey<'r>>,
    /// The error of the next key, if it has one.
    error: Option<Error>,
}

struct RefusedKey<'r> {
    waiter: WaiterGuard<'r>,
    refusal: Refusal,
}

/// A key behind the first key of a request.
struct NextKey<'r> {
    request: &'r LockRequest,
    waiter: WaiterGuard<'r>,
    sent: SentAcquire,
}

impl Acquirer {
    /// Acquires all `keys`, which are in the order of sets. `first` is the request for the first key, and each key has
    /// its settings. Returns `None` if another holder had one of the keys until the time in `until`.
    pub fn acquire_set(
        &self,
        first: &LockRequest,
        keys: &[Key],
        until: Until,
    ) -> Result<Option<Vec<Arc<Lease>>>, Error> {
        if let [_] = keys {
            let result = self.acquire(first, until);
            self.wait_for_undos(&first.options, result.as_ref().err());
            return Ok(result?.map(|lease| vec![lease]));
        }
        let observed = self.observe(&first.key, until);
        let (call, started) = (observed.call, observed.call.started);
        let waiting = keys.iter().map(|key| first.without_limits(key));
        let waiting: Vec<LockRequest> = waiting.collect();
        let mut held = HeldKeys::new(self);
        let waited = self.wait_for_all(&waiting, call, &mut held);
        let limited = waited.and_then(|is_complete| match is_complete {
            true => self.set_limits(first, call, &mut held).map(Some),
            false => Ok(None),
        });
        let result = limited.map(|set| set.map(|()| std::mem::take(&mut held.leases)));
        let is_outage = result.as_ref().is_err_and(Error::is_unavailable);
        held.release(is_outage && first.options.replicas.is_none());
        self.wait_for_undos(&first.options, result.as_ref().err());
        let leases = self.report(observed, &first.key, result, |leases| {
            leases.as_ref()?.first().map(|lease| &**lease)
        })?;
        if self.callbacks.has_listeners() {
            let waited = self.watchdog.now().since(started);
            for lease in leases.iter().flatten().skip(1) {
                self.callbacks
                    .call_handler(|events| events.acquired(lease.event_lock(), waited));
            }
        }
        Ok(leases)
    }

    /// If too few replicas have acknowledged the keys, waits until the store has released them, for at most one command
    /// time-out.
    fn wait_for_undos(&self, options: &Options, error: Option<&Error>) {
        if options.replicas.is_none() || !error.is_some_and(Error::is_unavailable) {
            return;
        }
        let deadline = self.watchdog.now().after(self.command_timeout);
        // The caller may have left while its last request waited for the replicas. Then the first flush waits for the
        // reply, after which the store releases the keys, and the second one waits for these releases.
        for _ in 0..2 {
            if self.store.flush(deadline).is_err() {
                return;
            }
        }
    }

    /// Waits for the keys of `requests`. Returns whether all of them are held.
    fn wait_for_all<'r>(
        &'r self,
        requests: &'r [LockRequest],
        call: Call,
        held: &mut HeldKeys<'r>,
    ) -> Result<bool, Error> {
        let mut refused = None;
        let mut joined_at = call.started;
        // The place of the first wait, and the key that the caller waited for.
        let mut place: Option<(&Key, u64)> = None;
        loop {
            let Some((request, rest)) = requests[held.leases.len()..].split_first() else {
                if held.release_lost() {
                    joined_at = self.watchdog.now();
                    continue;
                }
                return Ok(true);
            };
            let named = |error: Error| error.or_with_key(request.key.name());
            let (waiter, refusal) = match refused.take() {
                Some(RefusedKey { waiter, refusal }) => (waiter, Some(refusal)),
                None => match self.join(request, call) {
                    Some(waiter) => (waiter, None),
                    None => {
                        let refused = self.refuse_behind_others(&request.key, &request.options);
                        return refused.map(|_| false).map_err(named);
                    }
                },
            };
            if refusal.is_some() && !call.waits() {
                self.leave_queue(request, waiter);
                return Ok(false);
            }
            let mut caller = Caller::new(self, request, call, &waiter);
            caller.rest = self.same_request(request, rest);
            let is_of_same_server = |(key, _): &(&Key, u64)| self.share_requests(key, &request.key);
            caller.place = place.filter(is_of_same_server).map(|(_, since)| since);
            caller.is_contention_reported = matches!(refusal, Some(Refusal::Taken { .. }));
            let waited = caller.wait(joined_at, refusal);
            place = caller.place.map(|since| (&request.key, since));
            let gains = caller.gains;
            let lease = match waited {
                Ok(Some(NewLease::Granted(lease))) => {
                    self.leave_queue_with(waiter, &lease);
                    lease
                }
                Ok(Some(NewLease::HandedOff(lease))) => {
                    self.leave_queue(request, waiter);
                    lease
                }
                given_up => {
                    held.place = self.leave(request, waiter);
                    return given_up.map(|_| false).map_err(named);
                }
            };
            held.leases.push(lease);
            let Gains {
                held: mut gained,
                refused: next,
                error,
            } = gains;
            held.leases.append(&mut gained.leases);
            if let Some(error) = error {
                return Err(error);
            }
            refused = next;
            joined_at = self.watchdog.now();
        }
    }

    /// The keys at the start of `rest` that one request can ask for together with the key of `request`.
    fn same_request<'r>(
        &self,
        request: &LockRequest,
        rest: &'r [LockRequest],
    ) -> &'r [LockRequest] {
        let is_other = |next: &LockRequest| !self.share_requests(&request.key, &next.key);
        let end = rest.iter().position(is_other).unwrap_or(rest.len());
        &rest[..end]
    }

    /// Whether one request can ask for both keys. The same server then stores both.
    fn share_requests(&self, one: &Key, other: &Key) -> bool {
        let is_same_slot = || !self.store.renewal_limits().by_slot || one.slot() == other.slot();
        self.contention.is_none() && is_same_slot()
    }

    /// Replaces the leases by leases with the settings of `first`. Their limits count from the last request.
    fn set_limits(
        &self,
        first: &LockRequest,
        call: Call,
        held: &mut HeldKeys<'_>,
    ) -> Result<(), Error> {
        let options = &first.options;
        if !options.has_limits() {
            return Ok(());
        }
        let mut asked_at = held.leases[0].grant().asked_at;
        let is_one_request = |lease: &Arc<Lease>| lease.grant().asked_at == asked_at;
        if !held.leases.iter().all(is_one_request) {
            let extended = self.extend_through_outage(options, call, &held.leases);
            asked_at = extended?;
        }
        for lease in &mut held.leases {
            let limited = self.with_limits(lease, first, asked_at);
            *lease = limited.map_err(|error| error.or_with_key(lease.grant().key.name()))?;
        }
        Ok(())
    }

    /// Sets the whole ttl of all leases again. In an outage, repeats this for as long as the call may wait. Returns a
    /// time just before the last request.
    fn extend_through_outage(
        &self,
        options: &Options,
        call: Call,
        leases: &[Arc<Lease>],
    ) -> Result<MonotonicTime, Error> {
        let mut backoff = Backoff::new(FIRST_POLL, LONGEST_OUTAGE_POLL);
        let started = self.watchdog.now();
        loop {
            self.check_open()?;
            let asked_at = self.watchdog.now();
            let results = self.watchdog.extend_all(leases, options.first_ttl());
            // The guard reports leases that are lost.
            let errors = results.into_iter().filter_map(Result::err);
            let Some(error) = errors.into_iter().find(|error| !error.is_lease_lost()) else {
                return Ok(asked_at);
            };
            if !error.is_unavailable() || !call.waits() {
                return Err(error);
            }
            let now = self.watchdog.now();
            let outage = CurrentOutage::new(started, now, error);
            if let Some(Err(error)) = call.give_up(now, Some(&outage)) {
                return Err(error);
            }
            self.shutdown.rest(jittered(backoff.next()))?;
        }
    }

    /// Replaces a lease by one with the settings of `first`, whose validity counts from `asked_at`. A lost lease stays
    /// as it is.
    ///
    /// If a renewal is under way, first waits for its end. The new lease has the same id, and on a quorum, a renewal
    /// whose lease has ended releases this id.
    pub fn with_limits(
        &self,
        lease: &Arc<Lease>,
        first: &LockRequest,
        asked_at: MonotonicTime,
    ) -> Result<Arc<Lease>, Error> {
        let deadline = self.watchdog.now().after(self.command_timeout);
        let has_begun = lease.begin_ttl_change(deadline, || self.watchdog.now());
        let now = self.watchdog.now();
        if !has_begun && lease.valid_for(now).is_some() {
            return Err(Error::new(ErrorKind::Timeout, "a renewal is under way"));
        }
        if self.watchdog.end_lease(lease, now).is_err() {
            return Ok(Arc::clone(lease));
        }
        let grant = Grant {
            options: self
                .lease_pool(&lease.grant().key)
                .options
                .share(first.options),
            asked_at,
            since: now,
            ..lease.grant().clone()
        };
        let others_queued = lease.has_others_queued();
        let limited = self.lease_of(grant, first.check.clone(), others_queued)?;
        self.queues.hold(&limited);
        Ok(limited)
    }
}

impl<'r> Caller<'_, 'r> {
    /// Sends one request for the caller's key and the keys of its set behind it, and waits for the reply. Returns the
    /// result for the caller's key. Stores the results for the other keys in `gains`.
    pub fn attempt_set(&mut self, first: SentAcquire) -> Result<Attempt, Error> {
        let acquirer = self.acquirer;
        let Some(next) = self.join_next(first) else {
            return Ok(Attempt::Refused(Refusal::NOT_ASKED));
        };
        let (first_link, link) = match (next.is_empty(), self.call.waits()) {
            (true, _) => (Link::Alone, Link::Next),
            (_, true) => (Link::First, Link::Next),
            (_, false) => (Link::First, Link::NextOrNone),
        };
        let ask = || -> Vec<Outcome> {
            let command = self.command(first, first_link);
            let mut requests = vec![Request::new(command, first.deadline)];
            for key in &next {
                let command = key.caller(self).command(key.sent, link);
                requests.push(Request::new(command, first.deadline));
            }
            acquirer.store.execute(&mut requests);
            requests.into_iter().map(Request::into_outcome).collect()
        };
        let mut outcomes = ask();
        if outcomes.iter().all(is_skipped) {
            // The server has skipped all keys: it carried the request out before a release of one of them, which this
            // client had to send again.
            outcomes = ask();
        }
        let mut outcomes = outcomes.into_iter();
        let outcome = outcomes.next().expect("the first request has an outcome");
        // The script gives the first keys back if a later one is taken and the caller does not wait.
        let is_given_back = is_skipped(&outcome);
        let mut result = self.finish(first, outcome);
        for (key, outcome) in next.into_iter().zip(outcomes) {
            match &result {
                Ok(Attempt::Granted(_)) if self.gains.is_open() => key.gained(self, outcome),
                Ok(Attempt::Refused(_)) if is_given_back && !is_skipped(&outcome) => {
                    result = key.refused_all(self, outcome);
                }
                _ => key.leave_with_outcome(acquirer, outcome),
            }
        }
        result
    }

    /// Joins the local queues of the keys behind the caller's key, and chooses their leases. Stops at the first key
    /// with other waiters if the caller waits; otherwise returns `None` in this case.
    fn join_next(&self, first: SentAcquire) -> Option<Vec<NextKey<'r>>> {
        let queues = &self.acquirer.queues;
        let mut next = Vec::with_capacity(self.rest.len());
        for request in self.rest {
            let LockRequest {
                key,
                options,
                cancel,
                ..
            } = request;
            let waiter = match self.call.waits() {
                true => match queues.join_if_free(key, *options, cancel.as_ref()) {
                    Some(waiter) => waiter,
                    None => break,
                },
                false => queues.join_if_empty(key, *options)?,
            };
            let mut caller = Caller::new(self.acquirer, request, self.call, &waiter);
            caller.place = self.place;
            let sent = caller.choose(first.asked_at, first.deadline);
            next.push(NextKey {
                request,
                waiter,
                sent,
            });
        }
        Some(next)
    }
}

fn is_skipped(outcome: &Outcome) -> bool {
    matches!(outcome, Ok(Reply::Skipped))
}

impl<'r> NextKey<'r> {
    /// A caller for this key, with the call of `of`.
    fn caller<'a>(&'a self, of: &Caller<'_, 'r>) -> Caller<'a, 'r> {
        Caller::new(of.acquirer, self.request, of.call, &self.waiter)
    }

    /// Handles the outcome for a key after all keys before it were granted.
    fn gained(self, of: &mut Caller<'_, 'r>, outcome: Outcome) {
        if is_skipped(&outcome) {
            return self.leave_with_outcome(of.acquirer, outcome);
        }
        let mut caller = self.caller(of);
        let result = caller.finish(self.sent, outcome);
        of.place = of.place.or(caller.place);
        drop(caller);
        let gains = &mut of.gains;
        match result {
            Ok(Attempt::Granted(lease)) => {
                of.acquirer.leave_queue_with(self.waiter, &lease);
                gains.held.leases.push(lease);
            }
            Ok(Attempt::Refused(refusal)) => {
                let waiter = self.waiter;
                gains.refused = Some(RefusedKey { waiter, refusal });
            }
            Err(error) => {
                gains.error = Some(error.or_with_key(self.request.key.name()));
                of.acquirer.leave_queue(self.request, self.waiter);
            }
        }
    }

    /// Handles the outcome for the key that was refused, so that the script gave back the keys before it. Returns the
    /// result of the whole request.
    fn refused_all(self, of: &Caller<'_, 'r>, outcome: Outcome) -> Result<Attempt, Error> {
        let mut caller = self.caller(of);
        let result = caller.finish(self.sent, outcome);
        drop(caller);
        of.acquirer.leave_queue(self.request, self.waiter);
        match result {
            Ok(Attempt::Granted(lease)) => {
                let key = self.request.key.clone();
                let options = &self.request.options;
                of.acquirer.release_unheld(key, lease.grant().id, options);
                Ok(Attempt::Refused(Refusal::NOT_ASKED))
            }
            other => other.map_err(|error| error.or_with_key(self.request.key.name())),
        }
    }

    /// Leaves the local queue. If Redis has granted the key or queued the lease, releases it.
    fn leave_with_outcome(self, acquirer: &Acquirer, outcome: Outcome) {
        let Self {
            request,
            waiter,
            sent,
        } = self;
        let LockRequest { key, options, .. } = request;
        match outcome {
            Ok(Reply::Skipped) => waiter.remove_unasked_entry(sent.lease),
            Ok(_) => acquirer.release_unheld(key.clone(), sent.lease, options),
            // The store undoes an acquire whose outcome is unknown.
            Err(_) => acquirer.queues.forget_entry(key, sent.lease, options.mode),
        }
        acquirer.leave_queue(request, waiter);
    }
}

impl<'r> Gains<'r> {
    pub fn new(acquirer: &'r Acquirer) -> Self {
        Self {
            held: HeldKeys::new(acquirer),
            refused: None,
            error: None,
        }
    }

    /// Whether all keys so far were granted.
    fn is_open(&self) -> bool {
        self.refused.is_none() && self.error.is_none()
    }
}

impl<'r> HeldKeys<'r> {
    fn new(acquirer: &'r Acquirer) -> Self {
        Self {
            acquirer,
            leases: Vec::new(),
            place: None,
        }
    }

    /// If a lease was lost, releases it and the leases behind it. Returns whether one was lost.
    fn release_lost(&mut self) -> bool {
        let now = self.acquirer.watchdog.now();
        let mut leases = self.leases.iter();
        let Some(lost) = leases.position(|lease| lease.valid_for(now).is_none()) else {
            return false;
        };
        let behind = self.leases.split_off(lost);
        self.acquirer.release_all(&behind);
        true
    }

    /// Releases all keys and the place in a queue. Waits for the replies, or with `in_background` leaves the releases
    /// to the background.
    fn release(&mut self, in_background: bool) {
        let acquirer = self.acquirer;
        let leases = std::mem::take(&mut self.leases);
        let (mut releases, ended) = acquirer.end_all(&leases);
        releases.extend(self.place.take());
        if releases.is_empty() {
            return;
        }
        if in_background {
            acquirer.store.send_releases(releases);
        } else {
            let deadline = acquirer.watchdog.now().after(acquirer.command_timeout);
            let commands = releases.into_iter().map(Command::Release);
            let requests = commands.map(|command| Request::new(command, deadline));
            acquirer.store.execute(&mut requests.collect::<Vec<_>>());
        }
        acquirer.remove_holders(&leases, &ended);
    }
}

impl Drop for HeldKeys<'_> {
    fn drop(&mut self) {
        self.release(true);
    }
}

impl LockRequest {
    /// The request for `key` of a set before the last grant: with the same ttl, renewed, and without limits of the
    /// hold.
    fn without_limits(&self, key: &Key) -> Self {
        Self {
            key: key.clone(),
            options: self.options.without_limits(),
            check: None,
            cancel: self.cancel.clone(),
        }
    }
}

//! Acquires locks for callers, and releases them or hands them off. Sends requests to the store; never touches a
//! connection.
//!
//! # The wait
//!
//! 1. A caller joins the local queue of its key. While a thread of this client holds the lock alone, all waiters of the
//!    queue sleep. Otherwise only the first waiter sends requests. A reader may join the lease of a reader of this
//!    client instead ([`shares`]).
//! 2. The first waiter sends an acquire under a new lease id. If another client holds the lock, the script adds the
//!    lease to the key's queue in Redis (lua/README.md), and the waiter sleeps until it is notified.
//! 3. A waiter also asks again without a notification, because a notification may be lost. The first eight waiters ask
//!    after a second, waiters behind them later, and all of them soon after the lock expires. Without a notification
//!    connection, a waiter polls.
//! 4. While Redis is unavailable, the waiter tries again until `outage_timeout` or its deadline ends. All waiters of a
//!    client share the start of an outage, so the `outage_timeout` of a hundred waiters ends at the same time.
//!
//! The state machine [`wait`] decides what a caller does next, without I/O. `Caller::run` carries out its steps. An
//! [`attempt`] is one request with its reply. Two policies decide when a refused caller asks again: [`places`] on a
//! server with queues, and [`turns`] without queues: on a quorum, and beside [another library](foreign).
//!
//! A caller may ask for several keys, a *set*: see [`set`].
//!
//! # Rules
//!
//! - A lease id joins the queue in Redis once, by its first request. Before a client releases a lease id, it removes
//!   the id from the local queue, so that no later request uses the id. Otherwise Redis could carry out such a request
//!   before the release, and the release would end that grant. While a request under the id has no reply, only the
//!   caller of that request releases the id.
//! - The waiter confirms a grant by an acquire in three cases: the message asks for a confirmation; the caller was
//!   promised the whole ttl (the lock is not renewed, or has a `max_hold`); or more than a third of the ttl has passed
//!   since its first request, because the validity counts from that request.
//! - If Redis has lost a waiter's place in the queue, the waiter joins again at that place. If the client had a
//!   notification connection all the time, that connection may lead to an old primary, so it becomes suspect.
//! - A client that drops a lock and acquires it again at once reads the reply to the release first, if other clients
//!   may wait for the lock. Otherwise Redis would read both requests before it notifies the next holder.

pub mod attempt;
pub mod claim;
pub mod convert;
pub mod foreign;
pub mod leaders;
#[cfg(test)]
#[cfg(shuttle)]
mod model;
pub mod notify;
pub mod outage;
pub mod places;
pub mod queue;
pub mod release;
pub mod set;
pub mod shares;
pub mod shutdown;
#[cfg(test)]
#[cfg(not(shuttle))]
mod tests;
pub mod transfer;
pub mod turns;
pub mod wait;
pub mod watch;

use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, TryRecvError};

use crate::command::{Foreign, Mode};
use crate::config::HandOffs;
use crate::config::key::Key;
use crate::lease::{CallbackExecutor, Check, Lease, ONLY_GUARD, Options, SharedOptions};
use crate::report::error::{Error, ErrorKind};
use crate::report::event::EventLock;
use crate::report::observe;
use crate::store::{Backend, Notifications, ServerId, Store, TrackedKey};
use crate::util::clock::MonotonicTime;
use crate::util::id::LeaseIds;
use crate::watchdog::Watchdog;

use attempt::Attempt;
pub use claim::{Campaign, ClaimResult};
use foreign::ForeignHolders;
pub use leaders::{LeaderInfo, LeaderState, Leaders, ObserverId};
pub use notify::NotificationHandler;
use outage::{CurrentOutage, Outage};
use places::Places;
pub use queue::LocalQueues;
use queue::{QueuePosition, WaiterGuard, WakeReason};
use set::Gains;
use shutdown::Shutdown;
use turns::Turns;
use turns::contention::Contention;
pub use wait::Until;
use wait::{Call, Pace, Refusal, Step, Wait};

/// The lock that a caller wants.
#[derive(Clone, Debug)]
pub struct LockRequest {
    pub key: Key,
    pub options: Options,
    /// The user's check before each renewal (`renew_while`). It can refuse the renewal.
    pub check: Option<Check>,
    /// Cancels the wait when it receives a message or its sender is dropped.
    pub cancel: Option<Receiver<()>>,
}

impl LockRequest {
    /// Whether the caller has cancelled its wait. Takes the message, which cancels one wait.
    fn is_cancelled(&self) -> bool {
        let is_ready = |cancel: &Receiver<()>| cancel.try_recv() != Err(TryRecvError::Empty);
        self.cancel.as_ref().is_some_and(is_ready)
    }
}

/// The number of lease pools. The key chooses the pool, so callers of different keys rarely contend for one.
const LEASE_POOLS: usize = 16;

/// Lease ids made in advance, and the options of the last lease. A next lease with equal options shares them.
#[derive(Default)]
#[repr(align(64))]
struct LeasePool {
    ids: LeaseIds,
    options: SharedOptions,
}

/// A call that acquires a key: its tracing span and its time limits.
struct CallSpan {
    span: observe::WaitSpan,
    call: Call,
}

/// How a caller got its lease.
enum NewLease {
    Granted(Arc<Lease>),
    HandedOff(Arc<Lease>),
}

/// Acquires and releases the locks of one client.
pub struct Acquirer {
    store: Arc<dyn Store>,
    notifications: Arc<dyn Notifications>,
    watchdog: Arc<Watchdog>,
    callbacks: Arc<CallbackExecutor>,
    queues: Arc<LocalQueues>,
    /// A key uses the pool that `lease_pool` chooses.
    lease_pools: [LeasePool; LEASE_POOLS],
    outage: Outage,
    /// The outages of requests that replicas have to acknowledge. Requests without replicas may succeed during these.
    outage_of_replicas: Outage,
    /// The elections that this client observes.
    pub leaders: Arc<Leaders>,
    /// How busy the keys are, on a quorum or beside another library. `None` if waiters queue in Redis.
    contention: Option<Contention>,
    foreign_holders: ForeignHolders,
    shutdown: Shutdown,
    command_timeout: Duration,
    outage_timeout: Duration,
    hand_offs: HandOffs,
}

impl Acquirer {
    pub fn new(
        backend: &Backend,
        watchdog: Arc<Watchdog>,
        callbacks: Arc<CallbackExecutor>,
        queues: Arc<LocalQueues>,
        command_timeout: Duration,
        outage_timeout: Duration,
        hand_offs: HandOffs,
    ) -> Self {
        let outage_lasts = 2 * command_timeout + Duration::from_secs(1);
        Self {
            store: Arc::clone(&backend.store),
            notifications: Arc::clone(&backend.notifications),
            leaders: Leaders::new(
                backend,
                Arc::clone(&watchdog),
                Arc::clone(&queues),
                command_timeout,
            ),
            watchdog,
            callbacks,
            queues,
            lease_pools: Default::default(),
            outage: Outage::new(outage_lasts),
            outage_of_replicas: Outage::new(outage_lasts),
            contention: backend
                .notifications
                .free_servers()
                .map(|_| Contention::default()),
            foreign_holders: ForeignHolders::default(),
            shutdown: Shutdown::default(),
            command_timeout,
            outage_timeout,
            hand_offs,
        }
    }

    /// Acquires the lock. Returns `None` if another holder had the lock until the time in `until`.
    pub fn acquire(
        &self,
        request: &LockRequest,
        until: Until,
    ) -> Result<Option<Arc<Lease>>, Error> {
        let observed = self.observe(&request.key, until);
        let result = self.wait(request, observed.call);
        self.report(observed, &request.key, result, Option::as_deref)
    }

    /// Waits for the lock in the local queue. If the lease has ended by the time the caller gets it, waits again.
    fn wait(&self, request: &LockRequest, call: Call) -> Result<Option<Arc<Lease>>, Error> {
        let LockRequest { key, options, .. } = request;
        let mut joined_at = call.started;
        loop {
            if let Some(lease) = self.join_reader(request, joined_at)? {
                return Ok(Some(lease));
            }
            let Some(waiter) = self.join(request, call) else {
                return self.refuse_behind_others(key, options);
            };
            let waited = Caller::new(self, request, call, &waiter).wait(joined_at, None);
            let (lease, valid_at) = match waited {
                Ok(Some(NewLease::Granted(lease))) => {
                    self.leave_queue_with(waiter, &lease);
                    let since = lease.grant().since;
                    (lease, since)
                }
                Ok(Some(NewLease::HandedOff(lease))) => {
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
            // The lease has ended: another client unlocked it by force, or this thread slept until its validity had
            // ended.
            self.release(&lease, ONLY_GUARD);
            joined_at = self.watchdog.now();
        }
    }

    /// Joins the local queue of the key. Returns `None` if the call does not wait and other threads wait for the lock.
    fn join<'a>(&'a self, request: &'a LockRequest, call: Call) -> Option<WaiterGuard<'a>> {
        let LockRequest { key, options, .. } = request;
        match call.waits() {
            false => self.queues.join_if_empty(key, *options),
            true => Some(self.queues.join(key, *options, request.cancel.as_ref())),
        }
    }

    /// Joins the lease of a reader of this client, if this caller is a reader and the lease admits it.
    fn join_reader(
        &self,
        request: &LockRequest,
        now: MonotonicTime,
    ) -> Result<Option<Arc<Lease>>, Error> {
        let LockRequest { key, options, .. } = request;
        if options.mode != Mode::Read {
            return Ok(None);
        }
        self.check_open()?;
        Ok(self.queues.join_reader(key, options, self.hand_offs, now))
    }

    /// The result for a caller that does not wait, if other threads of this client wait for the lock.
    fn refuse_behind_others(
        &self,
        key: &Key,
        options: &Options,
    ) -> Result<Option<Arc<Lease>>, Error> {
        self.check_open()?;
        match self.current_outage(key, options, self.watchdog.now()) {
            Some(outage) => Err(outage.error),
            None => Ok(None),
        }
    }

    /// Begins a call that acquires `key`, and its tracing span.
    fn observe(&self, key: &Key, until: Until) -> CallSpan {
        let span = observe::WaitSpan::begin(key.name());
        let started = self.watchdog.now();
        CallSpan {
            span,
            call: Call::new(until, started, self.command_timeout, self.outage_timeout),
        }
    }

    /// Ends the span of a call, and reports the call's result to the metrics and the event handler. `lease` returns the
    /// lease in the result.
    fn report<T>(
        &self,
        observed: CallSpan,
        key: &Key,
        result: Result<T, Error>,
        lease: impl FnOnce(&T) -> Option<&Lease>,
    ) -> Result<T, Error> {
        let result = result.map_err(|error| error.or_with_key(key.name()));
        // The event handler runs user code, so the caller has left its queue before.
        if self.callbacks.has_listeners() {
            let waited = self.watchdog.now().since(observed.call.started);
            let granted = result
                .as_ref()
                .map(|acquired| lease(acquired).map(Lease::event_lock));
            observed.span.ended(granted, waited);
            if let Ok(Some(lock)) = granted {
                self.callbacks
                    .call_handler(|events| events.acquired(lock, waited));
            }
        }
        result
    }

    /// Calls `EventHandler::unavailable` on this thread.
    fn report_unavailable(&self, key: &Key, error: &Error) {
        let lock = not_granted(key);
        self.callbacks
            .call_handler(|events| events.unavailable(lock, error));
    }

    fn lease_pool(&self, key: &Key) -> &LeasePool {
        &self.lease_pools[key.shard(LEASE_POOLS)]
    }

    /// The outages that concern requests with these options.
    fn outage_of(&self, options: &Options) -> &Outage {
        match options.replicas {
            None => &self.outage,
            Some(_) => &self.outage_of_replicas,
        }
    }

    /// The current outage of the key's server, if a caller of this client has found one.
    fn current_outage(
        &self,
        key: &Key,
        options: &Options,
        now: MonotonicTime,
    ) -> Option<CurrentOutage> {
        let outage = self.outage_of(options);
        outage.current(|| self.store.server_of(key), now)
    }

    /// Returns an error once the client is shut down.
    pub fn check_open(&self) -> Result<(), Error> {
        self.shutdown.check()
    }

    /// The leases that threads of this client hold.
    pub fn holders(&self) -> Vec<Arc<Lease>> {
        self.queues.holders()
    }

    /// Ends all waits with the error `Shutdown`, and removes their leases from the queues in Redis. Later waits end at
    /// once.
    pub fn end(&self) {
        self.shutdown.close();
        for (key, entry) in self.queues.abandon_all() {
            self.release_unheld(key, entry.lease, &entry.options);
        }
        self.queues.wake_all();
        self.queues.watches.wake_all();
        self.leaders.stop();
    }
}

/// A thread that waits for a lock in its local queue.
struct Caller<'a, 'r> {
    acquirer: &'r Acquirer,
    request: &'r LockRequest,
    call: Call,
    waiter: &'a WaiterGuard<'a>,
    /// The keys of the caller's set behind this one. The caller's first request and the request that confirms a grant
    /// also ask for these keys.
    rest: &'r [LockRequest],
    /// The result of the request for these keys.
    gains: Gains<'r>,
    /// The place in a queue in Redis at which the caller, or its set, began to wait.
    place: Option<u64>,
    /// Whether a message has reported a grant that the caller has to confirm.
    is_confirming: bool,
    is_contention_reported: bool,
    is_other_limit_reported: bool,
}

impl<'a, 'r> Caller<'a, 'r> {
    fn new(
        acquirer: &'r Acquirer,
        request: &'r LockRequest,
        call: Call,
        waiter: &'a WaiterGuard<'a>,
    ) -> Self {
        Self {
            acquirer,
            request,
            call,
            waiter,
            rest: &[],
            gains: Gains::new(acquirer),
            place: None,
            is_confirming: false,
            is_contention_reported: false,
            is_other_limit_reported: false,
        }
    }

    /// Waits for the lock. `refused` is the result of the first request, if the caller has sent it before this wait.
    fn wait(
        &mut self,
        joined_at: MonotonicTime,
        refused: Option<Refusal>,
    ) -> Result<Option<NewLease>, Error> {
        let (acquirer, call, waiter) = (self.acquirer, self.call, self.waiter);
        match &acquirer.contention {
            None => {
                let mut wait = Wait::new(call, Places::new(waiter, joined_at), joined_at);
                if let Some(refusal) = refused {
                    wait.refused_before(refusal, joined_at);
                }
                self.run(wait, joined_at)
            }
            Some(contention) => {
                let turns = Turns::new(call, &self.request.key, waiter, contention);
                self.run(Wait::new(call, turns, joined_at), joined_at)
            }
        }
    }

    /// Carries out the steps of `wait` until this caller has the lock or stops waiting. The wait began at `joined_at`.
    fn run<P: Pace>(
        &mut self,
        mut wait: Wait<P>,
        joined_at: MonotonicTime,
    ) -> Result<Option<NewLease>, Error> {
        let acquirer = self.acquirer;
        let LockRequest { key, options, .. } = self.request;
        let mut now = joined_at;
        loop {
            if let Some(lease) = self.waiter.take_handed_off() {
                return Ok(Some(NewLease::HandedOff(lease)));
            }
            acquirer.check_open()?;
            if self.call.waits() && self.request.is_cancelled() {
                return Err(Error::new(ErrorKind::Cancelled, ""));
            }
            let position = self.waiter.position(now);
            if let QueuePosition::Granted(entry, message) = &position {
                if let Some(lease) = self.accept(entry, *message, now)? {
                    return Ok(Some(NewLease::Granted(lease)));
                }
                self.is_confirming = true;
                wait.ask_now();
            }
            let outage = acquirer.current_outage(key, options, now);
            match wait.next(now, &position, outage) {
                Step::Ask { deadline } => match self.attempt(now, deadline)? {
                    Attempt::Granted(lease) => return Ok(Some(NewLease::Granted(lease))),
                    Attempt::Refused(refusal) => {
                        now = acquirer.watchdog.now();
                        wait.refused(refusal, now);
                    }
                },
                Step::Track => {
                    let key = key.clone();
                    let tracked = vec![TrackedKey { key, lease: None }];
                    wait.tracked(acquirer.notifications.track(tracked));
                    now = acquirer.watchdog.now();
                }
                Step::Sleep(until) => {
                    if let QueuePosition::Held(remaining) = position {
                        self.report_contended(remaining);
                    }
                    let reason = self.waiter.sleep(until);
                    if reason == WakeReason::Cancelled {
                        return Err(Error::new(ErrorKind::Cancelled, ""));
                    }
                    now = acquirer.watchdog.now();
                    wait.woken(reason, now);
                }
                Step::GiveUp(given_up) => return given_up.map(|()| None),
            }
        }
    }

    /// The server that stores the key.
    fn server(&self) -> ServerId {
        self.acquirer.store.server_of(&self.request.key)
    }

    /// Calls `EventHandler::contended` on this thread, once for each wait.
    fn report_contended(&mut self, expires_in: Duration) {
        if !std::mem::replace(&mut self.is_contention_reported, true) {
            let lock = not_granted(&self.request.key);
            let callbacks = &self.acquirer.callbacks;
            callbacks.call_handler(|events| events.contended(lock, expires_in));
        }
    }

    /// Reports that another library holds the key, once for each holder.
    fn report_foreign(&self, found: Foreign) {
        let (key, acquirer) = (&self.request.key, self.acquirer);
        if acquirer.callbacks.has_listeners() && acquirer.foreign_holders.record(key, found) {
            let lock = not_granted(key);
            acquirer.callbacks.call_all(|events| {
                events.foreign_holder(lock, found.redis_type, found.expires_in);
            });
        }
    }

    /// Calls `EventHandler::limits_differ` on this thread, once for each wait.
    fn report_other_limit(&mut self, limit: u32, other: u32) {
        if !std::mem::replace(&mut self.is_other_limit_reported, true) {
            let lock = not_granted(&self.request.key);
            let callbacks = &self.acquirer.callbacks;
            callbacks.call_handler(|events| events.limits_differ(lock, limit, other));
        }
    }
}

fn not_granted(key: &Key) -> EventLock<'_> {
    EventLock {
        key: key.name(),
        fencing_token: 0,
    }
}

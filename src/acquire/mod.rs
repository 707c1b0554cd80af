//! How a caller gets a lock, and how a lock is released to other waiters. Sends requests to the store; never touches a
//! connection.
//!
//! # The wait
//!
//! 1. A caller joins the local queue of its key. While a thread of this client holds the lock, all waiters of the queue
//!    sleep. Otherwise only the first waiter sends requests.
//! 2. The first waiter sends an acquire under a new lease id. If another client holds the lock, the script queues the
//!    lease in Redis (lua/README.md), and the waiter sleeps until it is notified.
//! 3. A waiter asks again without a notification, because a notification may be lost: after a second if it is one of
//!    the first eight, later if more waiters are before it, and soon after the lock expires. Without a notification
//!    connection, it polls.
//! 4. If Redis is away, the waiter tries again until `outage_timeout` or its deadline ends. All waiters of a client
//!    share the start of an outage, so the `outage_timeout` of a hundred waiters ends at the same time.
//!
//! The state machine [`wait`] decides what a caller does next. It does no I/O: `Caller::run` does what it says, and an
//! [`attempt`] is one request with its reply. Two policies decide when a refused caller asks again: [`places`] on a server
//! with queues, and [`turns`] on a quorum, whose nodes have no queues.
//!
//! # Rules
//!
//! - A lease id joins the queue in Redis once, by its first request. Before it is released, its entry leaves the local
//!   queue, so no later request uses the id: a late request could be granted the lock, and the release would end that
//!   grant. While a request under the id has no reply, only its caller releases the id.
//! - The waiter confirms a grant by an acquire if the message asks for it, if the caller was promised the whole ttl (no
//!   renewals, or `max_hold`), or if more than a third of the ttl has passed since its first request: the validity
//!   counts from that request.
//! - A waiter whose entry is missing joins again at its old place. If the client had a notification connection all the
//!   time, this connection may lead to an old primary, so it becomes suspect.
//! - A client that drops a lock that others may wait for, and acquires it again at once, first reads the reply to the
//!   release. Otherwise Redis would run both before it notifies the next holder.

pub mod attempt;
#[cfg(test)]
#[cfg(shuttle)]
mod model;
pub mod notify;
pub mod outage;
pub mod places;
pub mod queue;
pub mod release;
pub mod shutdown;
#[cfg(test)]
#[cfg(not(shuttle))]
mod tests;
pub mod transfer;
pub mod turns;
pub mod wait;

use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, TryRecvError};

use crate::config::HandOffs;
use crate::config::key::Key;
use crate::lease::{CallbackExecutor, Check, Lease, Options, SharedOptions};
use crate::report::error::{Error, ErrorKind};
use crate::report::event::EventLock;
use crate::report::observe;
use crate::store::{Backend, Notifications, ServerId, Store, TrackedKey};
use crate::util::clock::MonotonicTime;
use crate::util::id::LeaseIds;
use crate::watchdog::Watchdog;

use attempt::Attempt;
pub use notify::NotificationHandler;
use outage::{CurrentOutage, Outage};
use places::Places;
pub use queue::LocalQueues;
use queue::{QueuePosition, WaiterGuard, WakeReason};
pub use release::Dropped;
use shutdown::Shutdown;
use turns::Turns;
use turns::contention::Contention;
pub use wait::Until;
use wait::{Call, Pace, Step, Wait};

/// The lock that a caller wants.
#[derive(Clone, Debug)]
pub struct LockRequest {
    pub key: Key,
    pub options: Options,
    /// Called before each renewal, which it can refuse.
    pub check: Option<Check>,
    /// Cancels the wait once it is ready.
    pub cancel: Option<Receiver<()>>,
}

/// The number of lease pools. Each key uses one pool, so callers of different keys rarely share a pool. A single pool
/// would be the most contended memory of a client.
const LEASE_POOLS: usize = 16;

/// Prepared lease ids, and the options of the last lease, which the next leases share if theirs are equal.
#[derive(Default)]
#[repr(align(64))]
struct LeasePool {
    ids: LeaseIds,
    options: SharedOptions,
}

/// The span of a call, and when the call began.
struct Observed {
    span: observe::WaitSpan,
    started: MonotonicTime,
}

/// How a caller got its lease.
enum Acquired {
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
    /// Each key uses one pool: see `lease_pool`.
    lease_pools: [LeasePool; LEASE_POOLS],
    outage: Outage,
    /// The outage of requests that replicas have to acknowledge. Requests without replicas may succeed meanwhile.
    outage_of_replicas: Outage,
    /// The contention for keys of a quorum; `None` on servers with queues.
    contention: Option<Contention>,
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
            shutdown: Shutdown::default(),
            command_timeout,
            outage_timeout,
            hand_offs,
        }
    }

    /// Acquires the lock. Returns `None` if other holders had the lock for as long as `until` allows.
    pub fn acquire(
        &self,
        request: &LockRequest,
        until: Until,
    ) -> Result<Option<Arc<Lease>>, Error> {
        let observed = self.observe(&request.key);
        let (started, end) = (observed.started, self.outage_timeout);
        let call = Call::new(until, started, self.command_timeout, end);
        let result = self.wait(request, call);
        self.report(observed, &request.key, result, Option::as_deref)
    }

    /// Waits for the lock in the local queue. Waits again if the lease has ended by the time the caller gets it.
    fn wait(&self, request: &LockRequest, call: Call) -> Result<Option<Arc<Lease>>, Error> {
        let LockRequest { key, options, .. } = request;
        let mut joined_at = call.started;
        loop {
            let waiter = match call.waits() {
                false => match self.queues.join_if_empty(key, *options) {
                    Some(waiter) => waiter,
                    None => return self.refuse_behind_others(key, options),
                },
                true => self.queues.join(key, *options, request.cancel.as_ref()),
            };
            let mut caller = Caller {
                acquirer: self,
                request,
                call,
                waiter: &waiter,
                is_contention_reported: false,
            };
            let waited = match &self.contention {
                None => {
                    let places = Places::new(&waiter, joined_at);
                    caller.run(Wait::new(call, places, joined_at), joined_at)
                }
                Some(contention) => {
                    let turns = Turns::new(call, key, &waiter, contention);
                    caller.run(Wait::new(call, turns, joined_at), joined_at)
                }
            };
            let (lease, valid_at) = match waited {
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
        match self.current_outage(key, options, self.watchdog.now()) {
            Some(outage) => Err(outage.error),
            None => Ok(None),
        }
    }

    /// Begins the span and the time of a call that acquires `key`.
    fn observe(&self, key: &Key) -> Observed {
        Observed {
            span: observe::WaitSpan::begin(key.name()),
            started: self.watchdog.now(),
        }
    }

    /// Reports the result of a call as a span, in metrics and to the event handler. `lease` finds the lease in the
    /// result.
    fn report<T>(
        &self,
        observed: Observed,
        key: &Key,
        result: Result<T, Error>,
        lease: impl FnOnce(&T) -> Option<&Lease>,
    ) -> Result<T, Error> {
        let result = result.map_err(|error| error.with_key(key.name()));
        // The event handler runs user code, so the waiter has left its queue before the report.
        if self.callbacks.has_listeners() {
            let waited = self.watchdog.now().since(observed.started);
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

    /// The record of the outage that matters to requests with these options.
    fn outage_of(&self, options: &Options) -> &Outage {
        match options.replicas {
            None => &self.outage,
            Some(_) => &self.outage_of_replicas,
        }
    }

    /// The outage of the key's server that callers of this client have found.
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

    /// The leases of this client that have not been released.
    pub fn holders(&self) -> Vec<Arc<Lease>> {
        self.queues.holders()
    }

    /// Ends all waits with `Shutdown`, and releases their entries in Redis. Later waits end at once.
    pub fn end(&self) {
        self.shutdown.close();
        for (key, entry) in self.queues.abandon_all() {
            self.release_unheld(key, entry.lease, entry.options.first_ttl());
        }
        self.queues.wake_all();
    }
}

/// A thread that waits in a local queue.
struct Caller<'a> {
    acquirer: &'a Acquirer,
    request: &'a LockRequest,
    call: Call,
    waiter: &'a WaiterGuard<'a>,
    is_contention_reported: bool,
}

impl Caller<'_> {
    /// Does what `wait` says, until this caller has the lock or gives up. The wait began at `joined_at`.
    fn run<P: Pace>(
        &mut self,
        mut wait: Wait<P>,
        joined_at: MonotonicTime,
    ) -> Result<Option<Acquired>, Error> {
        let acquirer = self.acquirer;
        let LockRequest { key, options, .. } = self.request;
        let mut now = joined_at;
        loop {
            if let Some(lease) = self.waiter.handed_off() {
                return Ok(Some(Acquired::HandedOff(lease)));
            }
            acquirer.check_open()?;
            if self.is_cancelled() {
                return Err(Error::new(ErrorKind::Cancelled, ""));
            }
            let position = self.waiter.position(now);
            if let QueuePosition::Granted(entry, message) = &position {
                if let Some(lease) = self.accept(entry, *message, now)? {
                    return Ok(Some(Acquired::Granted(lease)));
                }
                wait.ask_now();
            }
            let outage = acquirer.current_outage(key, options, now);
            match wait.next(now, &position, outage) {
                Step::Ask { deadline } => match self.attempt(now, deadline)? {
                    Attempt::Granted(lease) => return Ok(Some(Acquired::Granted(lease))),
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

    /// Whether the caller has cancelled its wait. A caller that does not wait has none to cancel.
    fn is_cancelled(&self) -> bool {
        let cancel = self.request.cancel.as_ref();
        let is_ready = |cancel: &Receiver<()>| cancel.try_recv() != Err(TryRecvError::Empty);
        self.call.waits() && cancel.is_some_and(is_ready)
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
}

fn not_granted(key: &Key) -> EventLock<'_> {
    EventLock {
        key: key.name(),
        fencing_token: 0,
    }
}

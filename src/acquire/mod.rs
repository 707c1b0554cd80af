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
//! On a quorum, nodes have no queues: [`contention`] decides when the first waiter asks.
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

pub mod backoff;
pub mod contention;
pub mod late_releases;
#[cfg(test)]
#[cfg(shuttle)]
mod model;
pub mod notify;
pub mod outage;
pub mod queue;
pub mod release;
pub mod shutdown;
#[cfg(test)]
#[cfg(not(shuttle))]
mod tests;
pub mod transfer;
pub mod wait;

use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::Receiver;

use crate::config::HandOffs;
use crate::lease::{CallbackExecutor, Check, Lease, Options, SharedOptions};
use crate::report::error::Error;
use crate::report::event::EventLock;
use crate::report::observe;
use crate::store::{Backend, Notifications, Store};
use crate::util::clock::MonotonicTime;
use crate::util::id::LeaseIds;
use crate::util::key::Key;
use crate::watchdog::Watchdog;

use contention::Contention;
pub use late_releases::LateReleases;
pub use notify::NotificationHandler;
use outage::Outage;
pub use queue::LocalQueues;
pub use release::Dropped;
use shutdown::Shutdown;
pub use wait::Until;

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
        let wait = |started| self.wait(request, until, started);
        self.observed(&request.key, wait, Option::as_deref)
    }

    /// Runs `acquire` with the current time, and reports the result as a span, in metrics and to the event handler.
    /// `lease` finds the lease in the result.
    fn observed<T>(
        &self,
        key: &Key,
        acquire: impl FnOnce(MonotonicTime) -> Result<T, Error>,
        lease: impl FnOnce(&T) -> Option<&Lease>,
    ) -> Result<T, Error> {
        let observed = observe::WaitSpan::begin(key.name());
        let started = self.watchdog.now();
        let result = acquire(started).map_err(|error| error.with_key(key.name()));
        // The event handler runs user code, so the waiter has left its queue before the report.
        if self.callbacks.has_listeners() {
            let waited = self.watchdog.now().since(started);
            let granted = result
                .as_ref()
                .map(|acquired| lease(acquired).map(Lease::event_lock));
            observed.ended(granted, waited);
            if let Ok(Some(lock)) = granted {
                self.callbacks
                    .call_handler(|events| events.acquired(lock, waited));
            }
        }
        result
    }

    /// Calls `EventHandler::contended` on this thread.
    fn report_contended(&self, key: &Key, expires_in: Duration) {
        let lock = not_granted(key);
        self.callbacks
            .call_handler(|events| events.contended(lock, expires_in));
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

fn not_granted(key: &Key) -> EventLock<'_> {
    EventLock {
        key: key.name(),
        fencing_token: 0,
    }
}

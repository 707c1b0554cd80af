//! Tells which connections of a client have to be replaced before their next use. Makes and closes no connection.
//!
//! | the connection is | if it was made before | it is replaced |
//! |---|---|---|
//! | stale | another connection broke. This one may be broken, too | at once. A pipeline first reads missing replies |
//! | suspect | a sign that the server is no longer the primary | once it is [`SHORTEST_LIFE`] old |
//! | outdated | the sentinels named another primary | at once, at most once in [`SHORTEST_LIFE`]. A reply on it counts as missing |
//!
//! A fail-over may leave connections open that lead to the old primary, which still answers reads. These are the signs:
//!
//! - `READONLY`, `LOADING`, `MASTERDOWN` or `CLUSTERDOWN` in a reply to a pipeline or a transaction;
//! - a reply of an unexpected shape;
//! - a waiter that lost its place in the queue in Redis, although its client was subscribed all the time: a grant may
//!   have skipped the client, because the subscription is on another server;
//! - a read on the notification connection that shows a lock as lost, if a renewal through a pipeline finds it held.
//!
//! However many requests a server refuses, a client makes at most one connection per second for each pipeline, for
//! notifications and for each running transaction. A further switch within a second makes connections suspect only, so
//! sentinels that contradict each other do not cause connections without end.
//!
//! The notification connection is replaced without waiting for a request: the new connection is opened before the old
//! one is closed. A broken notification connection makes no other connection stale.
//!
//! A script that finds a lock gone first tries a write without effect (lua/primary.lua), which a replica refuses. So
//! the old data of a replica cannot end a lease.

use std::fmt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use crate::util::clock::MonotonicTime;

/// A suspicion replaces only connections that are at least this old. So a server that often replies `READONLY` costs
/// each pipeline at most one new connection per second.
pub const SHORTEST_LIFE: Duration = Duration::from_secs(1);

/// Counts the broken connections, the suspicions and the switches of a client.
#[derive(Default)]
pub struct Epoch {
    breaks: AtomicU64,
    suspicions: AtomicU64,
    switches: AtomicU64,
    /// When `switches` was last increased.
    switched_at: Mutex<Option<MonotonicTime>>,
    on_suspicion: OnceLock<Box<dyn Fn() + Send + Sync>>,
    on_failure: OnceLock<Box<dyn Fn() + Send + Sync>>,
    on_stale: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

/// The counts at the time when a connection was made. The client reads them before it connects, so that it misses
/// neither a suspicion nor a switch.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionEpoch {
    breaks: u64,
    suspicions: u64,
    switches: u64,
    at: MonotonicTime,
}

impl ConnectionEpoch {
    /// Makes this connection ignore earlier breaks. Suspicions still count: another server may have become the primary
    /// since the connection was begun.
    pub fn forget_breaks(&mut self, epoch: &Epoch) {
        self.breaks = epoch.breaks.load(Ordering::SeqCst);
    }
}

impl fmt::Debug for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.now().fmt(f)
    }
}

impl Epoch {
    pub fn now(&self) -> ConnectionEpoch {
        ConnectionEpoch {
            breaks: self.breaks.load(Ordering::SeqCst),
            suspicions: self.suspicions.load(Ordering::SeqCst),
            switches: self.switches.load(Ordering::SeqCst),
            at: MonotonicTime::now(),
        }
    }

    /// Counts a broken connection. Earlier connections may be dead, too.
    pub fn count_break(&self) {
        self.breaks.fetch_add(1, Ordering::SeqCst);
        self.call_failure_hook();
        self.call_stale_hook();
    }

    /// Calls the hook for failures, because the server may be away. Changes no count.
    pub fn call_failure_hook(&self) {
        if let Some(on_failure) = self.on_failure.get() {
            on_failure();
        }
    }

    /// Sets the hook for failed attempts to connect, broken connections and suspicions. It is called on the thread that
    /// notices them. Only the first hook counts.
    pub fn on_failure(&self, hook: impl Fn() + Send + Sync + 'static) {
        let _ = self.on_failure.set(Box::new(hook));
    }

    /// Counts a sign that a server is not the primary, and calls the hook. Earlier connections may lead to that server.
    pub fn suspect(&self) {
        self.suspicions.fetch_add(1, Ordering::SeqCst);
        if let Some(on_suspicion) = self.on_suspicion.get() {
            on_suspicion();
        }
        self.call_failure_hook();
        self.call_stale_hook();
    }

    fn call_stale_hook(&self) {
        if let Some(on_stale) = self.on_stale.get() {
            on_stale();
        }
    }

    /// Sets the hook for stale and suspect connections. It is called on the thread that notices them. Only the first
    /// hook counts.
    pub fn on_stale(&self, hook: impl Fn() + Send + Sync + 'static) {
        let _ = self.on_stale.set(Box::new(hook));
    }

    /// Counts a switch: the sentinels name another primary. Earlier connections lead to the old one, and are replaced
    /// at once, however young they are. A further switch within [`SHORTEST_LIFE`] counts as a suspicion only, so that
    /// sentinels that contradict each other do not cause connections without end.
    pub fn count_switch(&self) {
        let now = MonotonicTime::now();
        let mut switched_at = self.switched_at.lock();
        if switched_at.is_none_or(|at| at.after(SHORTEST_LIFE) <= now) {
            *switched_at = Some(now);
            self.switches.fetch_add(1, Ordering::SeqCst);
        }
        drop(switched_at);
        self.suspect();
    }

    /// Whether a connection leads to an old primary, because there was a switch after it was made.
    pub fn is_outdated(&self, made: &ConnectionEpoch) -> bool {
        made.switches < self.switches.load(Ordering::SeqCst)
    }

    /// Sets the hook for suspicions. It is called on the thread that raises them. Only the first hook counts.
    pub fn on_suspicion(&self, hook: impl Fn() + Send + Sync + 'static) {
        let _ = self.on_suspicion.set(Box::new(hook));
    }

    /// Whether a connection has to be replaced before the next write, because of a break, a switch or a suspicion.
    pub fn is_stale(&self, made: &ConnectionEpoch) -> bool {
        made.breaks < self.breaks.load(Ordering::SeqCst) || self.is_due(made)
    }

    /// Whether a connection has to be replaced now, because of a switch or a suspicion.
    pub fn is_due(&self, made: &ConnectionEpoch) -> bool {
        self.replace_at(made)
            .is_some_and(|at| at <= MonotonicTime::now())
    }

    /// When a connection has to be replaced. `None` without a switch or a suspicion since it was made.
    pub fn replace_at(&self, made: &ConnectionEpoch) -> Option<MonotonicTime> {
        if self.is_outdated(made) {
            return Some(made.at);
        }
        let is_suspect = made.suspicions < self.suspicions.load(Ordering::SeqCst);
        is_suspect.then(|| made.at.after(SHORTEST_LIFE))
    }
}

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::AtomicUsize;

    use super::*;

    /// A connection that was made `before` ago.
    fn made_before(epoch: &Epoch, before: Duration) -> ConnectionEpoch {
        ConnectionEpoch {
            at: MonotonicTime::now().before(before),
            ..epoch.now()
        }
    }

    #[test]
    fn only_connections_made_before_a_suspicion_are_replaced() {
        let epoch = Epoch::default();
        let before = made_before(&epoch, 2 * SHORTEST_LIFE);
        assert!(!epoch.is_stale(&before));
        epoch.suspect();
        assert!(epoch.is_stale(&before) && epoch.is_due(&before));
        let after = made_before(&epoch, 2 * SHORTEST_LIFE);
        assert!(!epoch.is_stale(&after));
        assert_eq!(epoch.replace_at(&after), None);
    }

    #[test]
    fn a_young_connection_outlives_a_suspicion_for_a_while() {
        let epoch = Epoch::default();
        let young = made_before(&epoch, SHORTEST_LIFE / 2);
        epoch.suspect();
        assert!(!epoch.is_stale(&young));
        let left = epoch
            .replace_at(&young)
            .unwrap()
            .since(MonotonicTime::now());
        assert!(left <= SHORTEST_LIFE / 2, "{left:?}");
    }

    #[test]
    fn a_switch_replaces_young_connections_at_once() {
        let epoch = Epoch::default();
        let young = epoch.now();
        epoch.count_switch();
        assert!(epoch.is_stale(&young) && epoch.is_due(&young) && epoch.is_outdated(&young));
        let next = epoch.now();
        assert!(!epoch.is_stale(&next));
        // Two switches in a row: sentinels contradict each other.
        epoch.count_switch();
        assert!(!epoch.is_stale(&next) && epoch.replace_at(&next).is_some());
        *epoch.switched_at.lock() = Some(MonotonicTime::now().before(SHORTEST_LIFE));
        epoch.count_switch();
        assert!(epoch.is_outdated(&next));
    }

    #[test]
    fn a_break_makes_older_connections_stale_at_once() {
        let epoch = Epoch::default();
        let young = epoch.now();
        epoch.count_break();
        assert!(epoch.is_stale(&young));
        assert_eq!(epoch.replace_at(&young), None);
    }

    #[test]
    fn a_connection_forgets_breaks_and_no_suspicion() {
        let epoch = Epoch::default();
        let mut made = made_before(&epoch, 2 * SHORTEST_LIFE);
        epoch.count_break();
        made.forget_breaks(&epoch);
        assert!(!epoch.is_stale(&made));
        epoch.suspect();
        made.forget_breaks(&epoch);
        assert!(epoch.is_due(&made));
        epoch.count_break();
        assert!(epoch.is_stale(&made));
    }

    #[test]
    fn each_suspicion_calls_the_hook() {
        let (epoch, called) = (Epoch::default(), Arc::new(AtomicUsize::new(0)));
        let count = Arc::clone(&called);
        epoch.on_suspicion(move || {
            count.fetch_add(1, Ordering::SeqCst);
        });
        let (failed, count) = (Arc::new(AtomicUsize::new(0)), Arc::clone(&called));
        let failures = Arc::clone(&failed);
        epoch.on_failure(move || {
            failures.fetch_add(1, Ordering::SeqCst);
        });
        epoch.suspect();
        epoch.count_break();
        epoch.count_switch();
        assert_eq!(count.load(Ordering::SeqCst), 2);
        assert_eq!(failed.load(Ordering::SeqCst), 3);
    }
}

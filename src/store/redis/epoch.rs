//! Says which connections of a client are suspect: those made before another one broke, and those made before
//! a sign that their server is no longer the primary. Makes and closes no connection.

use std::fmt;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::util::clock::MonotonicTime;

/// A connection younger than this is not replaced for a suspicion. So each pipeline, each connection of a
/// transaction and the notification connection is replaced once per second at most, however often the
/// server answers `READONLY`.
pub(crate) const SHORTEST_LIFE: Duration = Duration::from_secs(1);

/// Counts the reasons to distrust connections. One for all connections of a client.
#[derive(Default)]
pub(crate) struct Epoch {
    breaks: AtomicU64,
    suspicions: AtomicU64,
    on_suspicion: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

/// The epoch in which a connection was made. Noted before connecting, so that no suspicion is missed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MadeIn {
    breaks: u64,
    suspicions: u64,
    at: MonotonicTime,
}

impl fmt::Debug for Epoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.now().fmt(f)
    }
}

impl Epoch {
    pub(crate) fn now(&self) -> MadeIn {
        MadeIn {
            breaks: self.breaks.load(Ordering::SeqCst),
            suspicions: self.suspicions.load(Ordering::SeqCst),
            at: MonotonicTime::now(),
        }
    }

    /// A connection broke: those made before it may be dead, too.
    pub(crate) fn broke(&self) {
        self.breaks.fetch_add(1, Ordering::SeqCst);
    }

    /// There is a sign that a server is not the primary: connections made before it may lead to that
    /// server.
    pub(crate) fn suspect(&self) {
        self.suspicions.fetch_add(1, Ordering::SeqCst);
        if let Some(on_suspicion) = self.on_suspicion.get() {
            on_suspicion();
        }
    }

    /// Has `hook` called at each suspicion, on the thread that raises it. A second hook is ignored.
    pub(crate) fn on_suspicion(&self, hook: impl Fn() + Send + Sync + 'static) {
        let _ = self.on_suspicion.set(Box::new(hook));
    }

    /// Whether a connection is to be replaced before anything is written on it.
    pub(crate) fn is_stale(&self, made: &MadeIn) -> bool {
        made.breaks < self.breaks.load(Ordering::SeqCst) || self.is_due(made)
    }

    /// Whether a connection is to be replaced for a suspicion.
    pub(crate) fn is_due(&self, made: &MadeIn) -> bool {
        self.replace_at(made)
            .is_some_and(|at| at <= MonotonicTime::now())
    }

    /// When a connection is to be replaced for a suspicion, if there was one since it was made.
    pub(crate) fn replace_at(&self, made: &MadeIn) -> Option<MonotonicTime> {
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
    fn made(epoch: &Epoch, before: Duration) -> MadeIn {
        MadeIn {
            at: MonotonicTime::now().before(before),
            ..epoch.now()
        }
    }

    #[test]
    fn only_connections_made_before_a_suspicion_are_replaced() {
        let epoch = Epoch::default();
        let before = made(&epoch, 2 * SHORTEST_LIFE);
        assert!(!epoch.is_stale(&before));
        epoch.suspect();
        assert!(epoch.is_stale(&before) && epoch.is_due(&before));
        let after = made(&epoch, 2 * SHORTEST_LIFE);
        assert!(!epoch.is_stale(&after));
        assert_eq!(epoch.replace_at(&after), None);
    }

    #[test]
    fn a_young_connection_outlives_a_suspicion_for_a_while() {
        let epoch = Epoch::default();
        let young = made(&epoch, SHORTEST_LIFE / 2);
        epoch.suspect();
        assert!(!epoch.is_stale(&young));
        let left = epoch
            .replace_at(&young)
            .unwrap()
            .since(MonotonicTime::now());
        assert!(left <= SHORTEST_LIFE / 2, "{left:?}");
    }

    #[test]
    fn a_break_counts_at_once_and_is_no_suspicion() {
        let epoch = Epoch::default();
        let young = epoch.now();
        epoch.broke();
        assert!(epoch.is_stale(&young));
        assert_eq!(epoch.replace_at(&young), None);
    }

    #[test]
    fn each_suspicion_calls_the_hook() {
        let (epoch, called) = (Epoch::default(), Arc::new(AtomicUsize::new(0)));
        let count = Arc::clone(&called);
        epoch.on_suspicion(move || {
            count.fetch_add(1, Ordering::SeqCst);
        });
        epoch.suspect();
        epoch.broke();
        epoch.suspect();
        assert_eq!(called.load(Ordering::SeqCst), 2);
    }
}

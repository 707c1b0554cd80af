//! The current outages of the servers that the callers of one client have found.

use std::time::Duration;

use crate::report::error::Error;
use crate::store::ServerId;
use crate::util::clock::MonotonicTime;
use crate::util::sync::{AtomicBool, Mutex, Ordering};

/// The current outages of a client's servers. All waiters share the start of an outage, so a queue of a hundred waiters
/// ends after one `outage_timeout`, not after a hundred.
pub struct Outage {
    is_known: AtomicBool,
    /// At most one outage for each server.
    known: Mutex<Vec<(ServerId, CurrentOutage)>>,
    /// How long after its last failure an outage counts as current.
    fresh_for: Duration,
}

#[derive(Clone, Debug)]
pub struct CurrentOutage {
    pub since: MonotonicTime,
    last: MonotonicTime,
    /// The error of the last attempt.
    pub error: Error,
}

impl CurrentOutage {
    /// An outage since `since`, whose last failure was at `last`.
    pub fn new(since: MonotonicTime, last: MonotonicTime, error: Error) -> Self {
        Self { since, last, error }
    }
}

impl Outage {
    pub fn new(fresh_for: Duration) -> Self {
        Self {
            is_known: AtomicBool::new(false),
            known: Mutex::new(Vec::new()),
            fresh_for,
        }
    }

    /// Records a failed attempt on `server` that began at `since`. Returns the outage, and whether the outage is new.
    pub fn begin(
        &self,
        server: ServerId,
        since: MonotonicTime,
        now: MonotonicTime,
        error: Error,
    ) -> (CurrentOutage, bool) {
        let mut known = self.known.lock();
        let replaced = known.extract_if(.., |(of, _)| *of == server).next();
        let before = replaced.as_ref().map(|(_, current)| current);
        let before = before.filter(|current| self.is_fresh(current, now));
        let is_news = before.is_none();
        let current = CurrentOutage {
            since: before.map_or(since, |current| current.since),
            last: now,
            error,
        };
        known.push((server, current.clone()));
        self.is_known.store(true, Ordering::Release);
        // The error may own a value of the user, so it is dropped while the mutex is unlocked.
        drop(known);
        drop(replaced);
        (current, is_news)
    }

    /// Ends the outage of a server that has replied.
    pub fn end(&self, server: impl FnOnce() -> ServerId) {
        if self.is_known.load(Ordering::Acquire) {
            let server = server();
            let mut known = self.known.lock();
            let ended: Vec<_> = known.extract_if(.., |(of, _)| *of == server).collect();
            self.is_known.store(!known.is_empty(), Ordering::Release);
            drop(known);
            drop(ended);
        }
    }

    /// The outage of a server, if it is current at `now`.
    pub fn current(
        &self,
        server: impl FnOnce() -> ServerId,
        now: MonotonicTime,
    ) -> Option<CurrentOutage> {
        if !self.is_known.load(Ordering::Acquire) {
            return None;
        }
        let server = server();
        let known = self.known.lock();
        let of_server = known.iter().find(|(of, _)| *of == server);
        let current = of_server.map(|(_, current)| current.clone());
        current.filter(|current| self.is_fresh(current, now))
    }

    fn is_fresh(&self, current: &CurrentOutage, now: MonotonicTime) -> bool {
        now.since(current.last) <= self.fresh_for
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::report::error::ErrorKind;

    const ONE: ServerId = ServerId::ONLY;

    fn error() -> Error {
        Error::new(ErrorKind::Unavailable, "")
    }

    #[test]
    fn servers_have_separate_outages() {
        let outage = Outage::new(Duration::from_secs(3));
        let now = MonotonicTime::now();
        let (one, other) = (ServerId(1), ServerId(2));
        assert!(outage.begin(one, now, now, error()).1);
        assert!(outage.begin(other, now, now, error()).1);
        outage.end(|| one);
        assert!(outage.current(|| one, now).is_none());
        assert!(outage.current(|| other, now).is_some());
        assert!(outage.current(|| ServerId::ONLY, now).is_none());
    }

    #[test]
    fn outage_lasts_from_failure_to_next_answer() {
        let outage = Outage::new(Duration::from_secs(3));
        let first = MonotonicTime::now();
        let second = first.after(Duration::from_secs(2));
        assert!(outage.begin(ONE, first, first, error()).1);
        let (current, is_news) = outage.begin(ONE, second, second, error());
        assert_eq!((current.since, is_news), (first, false));
        outage.end(|| ONE);
        assert!(outage.current(|| ONE, second).is_none());
    }

    #[test]
    fn old_failure_is_no_outage() {
        let outage = Outage::new(Duration::from_secs(3));
        let first = MonotonicTime::now();
        let later = first.after(Duration::from_secs(4));
        outage.begin(ONE, first, first, error());
        assert!(outage.current(|| ONE, later).is_none());
        let (current, is_news) = outage.begin(ONE, later, later, error());
        assert_eq!((current.since, is_news), (later, true));
    }
}

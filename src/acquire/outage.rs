//! The current outage of Redis, if there is one, as the callers of one client see it.

use std::time::Duration;

use crate::error::Error;
use crate::util::clock::MonotonicTime;
use crate::util::sync::{AtomicBool, Mutex, Ordering};

/// The outage that a client knows of. All waiters of the client share it: a queue of a hundred waiters ends after one
/// `outage_timeout`, not after a hundred.
pub(crate) struct Outage {
    is_known: AtomicBool,
    known: Mutex<Option<CurrentOutage>>,
    /// How long an outage counts as current after its last failure.
    fresh_for: Duration,
}

#[derive(Clone)]
pub(crate) struct CurrentOutage {
    pub(crate) since: MonotonicTime,
    last: MonotonicTime,
    /// The error of the last attempt.
    pub(crate) error: Error,
}

impl Outage {
    pub(crate) fn new(fresh_for: Duration) -> Self {
        Self {
            is_known: AtomicBool::new(false),
            known: Mutex::new(None),
            fresh_for,
        }
    }

    /// Records that an attempt failed that began at `since`. Returns the outage, and whether it is new.
    pub(crate) fn begin(
        &self,
        since: MonotonicTime,
        now: MonotonicTime,
        error: Error,
    ) -> (CurrentOutage, bool) {
        let mut known = self.known.lock();
        let before = known.as_ref();
        let before = before.filter(|current| self.is_fresh(current, now));
        let is_news = before.is_none();
        let current = CurrentOutage {
            since: before.map_or(since, |current| current.since),
            last: now,
            error,
        };
        let replaced = known.replace(current.clone());
        self.is_known.store(true, Ordering::Release);
        // The error may own a value of the user, so it is dropped after the unlock.
        drop(known);
        drop(replaced);
        (current, is_news)
    }

    /// Records that Redis answered.
    pub(crate) fn end(&self) {
        if self.is_known.load(Ordering::Acquire) {
            let mut known = self.known.lock();
            let ended = known.take();
            self.is_known.store(false, Ordering::Release);
            drop(known);
            drop(ended);
        }
    }

    pub(crate) fn current(&self, now: MonotonicTime) -> Option<CurrentOutage> {
        if !self.is_known.load(Ordering::Acquire) {
            return None;
        }
        let known = self.known.lock().clone();
        known.filter(|current| self.is_fresh(current, now))
    }

    fn is_fresh(&self, current: &CurrentOutage, now: MonotonicTime) -> bool {
        now.since(current.last) <= self.fresh_for
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;

    fn error() -> Error {
        Error::new(ErrorKind::Unavailable, "")
    }

    #[test]
    fn outage_lasts_from_failure_to_next_answer() {
        let outage = Outage::new(Duration::from_secs(3));
        let first = MonotonicTime::now();
        let second = first.after(Duration::from_secs(2));
        assert!(outage.begin(first, first, error()).1);
        let (current, is_news) = outage.begin(second, second, error());
        assert_eq!((current.since, is_news), (first, false));
        outage.end();
        assert!(outage.current(second).is_none());
    }

    #[test]
    fn old_failure_is_no_outage() {
        let outage = Outage::new(Duration::from_secs(3));
        let first = MonotonicTime::now();
        let later = first.after(Duration::from_secs(4));
        outage.begin(first, first, error());
        assert!(outage.current(later).is_none());
        let (current, is_news) = outage.begin(later, later, error());
        assert_eq!((current.since, is_news), (later, true));
    }
}

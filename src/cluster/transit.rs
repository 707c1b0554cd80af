//! Counts releases that are moving from one node to another. During a move, neither queue contains the release, so a
//! flush of all nodes could miss it.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use crate::report::error::{Error, ErrorKind};
use crate::util::clock::MonotonicTime;
use crate::util::sync::park_timeout;

/// The pause of a flush before it begins again.
const PAUSE: Duration = Duration::from_millis(1);

/// Counts the moves of releases between nodes.
#[derive(Default)]
pub struct Transits {
    under_way: AtomicUsize,
    /// How many times a node has queued a release of another node.
    arrivals: AtomicU64,
}

/// A move of releases, from before they leave the queue of one node until they are in the queue of another.
pub struct Transit<'a>(&'a Transits);

impl Transits {
    pub fn begin(&self) -> Transit<'_> {
        self.under_way.fetch_add(1, Ordering::SeqCst);
        Transit(self)
    }

    /// Calls `flush`, which flushes all nodes, and repeats it if a release was moving during the call. Returns an error
    /// if a release is still moving at `deadline`.
    pub fn flush_with(
        &self,
        deadline: MonotonicTime,
        mut flush: impl FnMut() -> Result<(), Error>,
    ) -> Result<(), Error> {
        loop {
            let before = self.arrivals.load(Ordering::SeqCst);
            flush()?;
            // A move that ended before this check has counted its arrivals.
            let was_undisturbed = self.under_way.load(Ordering::SeqCst) == 0
                && self.arrivals.load(Ordering::SeqCst) == before;
            if was_undisturbed {
                return Ok(());
            }
            if MonotonicTime::now() >= deadline {
                let message = "a release is on its way to another node of the Cluster";
                return Err(Error::new(ErrorKind::Timeout, message));
            }
            park_timeout(PAUSE);
        }
    }
}

impl Transit<'_> {
    /// Counts a release that another node has queued.
    pub fn count_arrival(&self) {
        self.0.arrivals.fetch_add(1, Ordering::SeqCst);
    }
}

impl Drop for Transit<'_> {
    fn drop(&mut self) {
        self.0.under_way.fetch_sub(1, Ordering::SeqCst);
    }
}

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests {
    use super::*;

    fn soon() -> MonotonicTime {
        MonotonicTime::now().after(Duration::from_millis(50))
    }

    #[test]
    fn a_flush_waits_for_a_release_under_way() {
        let transits = Transits::default();
        let transit = transits.begin();
        let error = transits.flush_with(soon(), || Ok(())).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Timeout);
        drop(transit);
        transits.flush_with(soon(), || Ok(())).unwrap();
    }

    #[test]
    fn a_release_that_arrives_repeats_the_flush() {
        let transits = Transits::default();
        let mut transit = Some(transits.begin());
        let far = MonotonicTime::now().after(Duration::from_secs(60));
        let mut flushes = 0;
        let flushed = transits.flush_with(far, || {
            flushes += 1;
            if let Some(transit) = transit.take() {
                transit.count_arrival();
            }
            Ok(())
        });
        flushed.unwrap();
        assert_eq!(flushes, 2);
        // The release left one node but did not arrive at another, so one flush is enough.
        let mut flushes = 0;
        let flushed = transits.flush_with(far, || {
            drop(transits.begin());
            flushes += 1;
            Ok(())
        });
        flushed.unwrap();
        assert_eq!(flushes, 1);
    }

    #[test]
    fn a_failed_flush_is_not_repeated() {
        let transits = Transits::default();
        let _transit = transits.begin();
        let far = MonotonicTime::now().after(Duration::from_secs(60));
        let refused = || Err(Error::new(ErrorKind::Unavailable, "away"));
        let error = transits.flush_with(far, refused).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
    }
}

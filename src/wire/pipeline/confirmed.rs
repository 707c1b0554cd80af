//! A record of the newest releases that the server of a pipeline has confirmed. The pipeline repeats them on its next
//! connection, which may lead to a server that lacks them: a replica that was promoted, or the same server after a
//! restart with older data. A reply does not tell whether the server is another one, and a repeat changes nothing on
//! the same server.
//!
//! - The record keeps every lease, and not only the last lease of each key: the next server may still have any of the
//!   grants that were released shortly before. It also keeps leases that left a queue.
//! - The pipeline repeats the releases in batches, as it does with refused ones, newest first. The repeats for a key go
//!   before a request of the key.
//! - When connections become stale (`Epoch::on_stale`), the background connects, so pipelines without requests repeat
//!   their releases, too.
//! - On a Cluster, a new slot map brings the releases of moved slots to the new masters.
//! - Releases by force and adoptions are not repeated. A repeated force would notify the holder again, and the lease of
//!   an adopted ticket must stay while its adopter relies on the key.

use std::collections::VecDeque;
use std::mem;
use std::time::Duration;

use crate::command::{Mode, Release};
use crate::config::key::Key;
use crate::util::clock::MonotonicTime;
use crate::util::id::LeaseId;
use crate::wire::pipeline::releases::{QueuedRelease, Route};

/// The most releases in the record. With 100,000 releases per second on two pipelines, these are the releases of the
/// last 160 ms; with 8,000 per second, those of the last 2 s.
pub const MOST_CONFIRMED: usize = if cfg!(all(test, shuttle)) { 2 } else { 8192 };

/// A confirmed release: on the server that replied, the lease holds nothing and is not queued.
pub struct ConfirmedRelease {
    key: Key,
    lease: LeaseId,
    /// When the key's ttl ends. Later, a repeat finds nothing.
    until: MonotonicTime,
    /// One more than the ttl of the lease's queue entry in ms. Zero if the lease has no entry.
    queued: u32,
}

impl ConfirmedRelease {
    pub fn new(release: Release) -> Self {
        let ttl = release.queued.map(|ttl| u32::try_from(ttl.as_millis()));
        let ms = ttl.and_then(Result::ok);
        Self {
            key: release.key,
            lease: release.lease,
            until: release.until,
            queued: ms.map_or(0, |ms| ms.saturating_add(1)),
        }
    }

    fn into_release(self, due: MonotonicTime) -> QueuedRelease {
        let ms = self.queued.checked_sub(1);
        let release = Release {
            min_hold: Duration::ZERO,
            mode: Mode::Exclusive,
            key: self.key,
            lease: self.lease,
            until: self.until,
            held: None,
            queued: ms.map(|ms| Duration::from_millis(u64::from(ms))),
        };
        QueuedRelease {
            release,
            due,
            attempts: 0,
            is_undo: false,
            reported_late: false,
            route: Route::default(),
        }
    }
}

/// The record, oldest release first.
#[derive(Default)]
pub struct ConfirmedReleases {
    releases: VecDeque<ConfirmedRelease>,
    /// A time at which the ttls of all these releases have ended.
    until: Option<MonotonicTime>,
}

impl ConfirmedReleases {
    /// Adds a release. Beyond [`MOST_CONFIRMED`], forgets the oldest one.
    pub fn push(&mut self, release: ConfirmedRelease) {
        if self.releases.len() == self.releases.capacity() {
            // This function runs for each release, so it reads the clock only when the deque has no spare room.
            self.drop_ended(MonotonicTime::now());
        }
        if self.releases.len() == MOST_CONFIRMED {
            self.releases.pop_front();
        }
        self.until = self.until.max(Some(release.until));
        self.releases.push_back(release);
    }

    /// Drops the oldest releases, up to the first one whose ttl has not ended.
    fn drop_ended(&mut self, now: MonotonicTime) {
        while self
            .releases
            .pop_front_if(|oldest| oldest.until <= now)
            .is_some()
        {}
    }

    /// Whether the ttl of one of these releases may still be running.
    pub fn has_live(&self, now: MonotonicTime) -> bool {
        self.until.is_some_and(|until| now < until)
    }

    /// Takes out the releases of these keys whose ttls have not ended, newest first, since a replica lacks the newest
    /// writes. They are unpacked one by one: an unpacked release takes more than twice as much memory.
    pub fn take<F: Fn(&Key) -> bool>(
        &mut self,
        now: MonotonicTime,
        keys: F,
    ) -> impl Iterator<Item = QueuedRelease> + use<F> {
        let all = mem::take(&mut self.releases).into_iter();
        let live = all.filter(|release| now < release.until);
        let (taken, kept): (VecDeque<_>, _) = live.partition(|release| keys(&release.key));
        self.releases = kept;
        if self.releases.is_empty() {
            self.until = None;
        }
        taken
            .into_iter()
            .rev()
            .map(move |release: ConfirmedRelease| release.into_release(now))
    }
}

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests {
    use super::*;

    fn confirmed(name: &str, until: MonotonicTime) -> ConfirmedRelease {
        let key = Key::new("p:", name, 16).unwrap();
        ConfirmedRelease::new(Release::unheld(key, LeaseId::random(), until))
    }

    fn names(releases: impl Iterator<Item = QueuedRelease>) -> Vec<String> {
        let names = releases.map(|release| release.release.key.name().to_owned());
        names.collect()
    }

    #[test]
    fn releases_are_kept_up_to_a_bound_and_until_their_ttl() {
        assert_eq!(size_of::<ConfirmedRelease>(), 56);
        let now = MonotonicTime::now();
        let far = now.after(Duration::from_secs(60));
        let mut record = ConfirmedReleases::default();
        assert!(!record.has_live(now));
        for n in 0..MOST_CONFIRMED + 3 {
            record.push(confirmed(&n.to_string(), far));
        }
        assert!(record.has_live(now) && !record.has_live(far));
        assert_eq!(record.releases.len(), MOST_CONFIRMED);
        assert!(record.releases.capacity() <= MOST_CONFIRMED);
        let taken: Vec<_> = record.take(now, |_| true).collect();
        let newest = (MOST_CONFIRMED + 2).to_string();
        assert_eq!(taken.len(), MOST_CONFIRMED);
        assert_eq!(
            (
                taken[0].release.key.name(),
                taken.last().unwrap().release.key.name()
            ),
            (&*newest, "3")
        );
        assert!(!record.has_live(now));
        // Ended releases are dropped, so the record does not grow.
        for n in 0..10 * MOST_CONFIRMED {
            record.push(confirmed(&n.to_string(), now));
        }
        assert!(record.releases.capacity() < 64);
        assert_eq!(record.take(now, |_| true).count(), 0);
    }

    #[test]
    fn the_releases_of_some_keys_are_taken() {
        let now = MonotonicTime::now();
        let far = now.after(Duration::from_secs(60));
        let mut record = ConfirmedReleases::default();
        for name in ["a", "b", "a2", "b"] {
            record.push(confirmed(name, far));
        }
        let taken = record.take(now, |key| key.name().starts_with('a'));
        assert_eq!(names(taken), ["a2", "a"]);
        assert!(record.has_live(now));
        assert_eq!(names(record.take(now, |_| true)), ["b", "b"]);
    }

    #[test]
    fn a_release_of_a_queued_lease_leaves_the_queue_again() {
        let now = MonotonicTime::now();
        let far = now.after(Duration::from_secs(60));
        let mut record = ConfirmedReleases::default();
        for queued in [
            None,
            Some(Duration::ZERO),
            Some(Duration::from_secs(86_400)),
        ] {
            let key = Key::new("p:", "k", 16).unwrap();
            let release = Release::unheld(key, LeaseId::random(), far);
            record.push(ConfirmedRelease::new(Release { queued, ..release }));
            let taken = record.take(now, |_| true).next().unwrap();
            assert_eq!(taken.release.queued, queued);
        }
    }
}

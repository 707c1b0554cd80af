//! How long a request waits for nodes that are slower than the majority.

use std::time::Duration;

use parking_lot::Mutex;

use crate::config::MIN_TTL;
use crate::store::quorum::Member;
use crate::store::quorum::health::PROBE_LIMIT;
use crate::util::clock::MonotonicTime;

/// After a majority has replied, how long a caller waits for nodes that are a little slower. With their replies, a
/// grant needs fewer write-backs, and the lock has its key on all nodes.
pub(super) const GRACE: Duration = Duration::from_millis(5);
/// The longest time that a request waits for slow nodes after a majority has replied.
pub(super) const LONGEST_GRACE: Duration = PROBE_LIMIT;
/// After a majority has replied, the watchdog's renewals wait this part of the shortest ttl for slow nodes, and
/// [`LONGEST_GRACE`] at most. If they did not wait, a node that is farther away than the others would never get the
/// keys that it lacks, and its keys would expire.
const RENEWAL_GRACE_PART: u32 = 8;
/// As [`RENEWAL_GRACE_PART`], if the votes for a lease of a batch are split. A third of the ttl is the usual time from
/// one renewal to the next, which asks again.
const SPLIT_BATCH_PART: u32 = 3;
/// As [`SPLIT_BATCH_PART`], for a renewal that is sent alone, so it delays no other.
const SPLIT_RENEWAL_PART: u32 = 2;
/// How long a renewal waits at least for nodes that have just said that the key is missing, and now set it.
const SETS_WITHIN: Duration = Duration::from_millis(100);

/// How long a request waits for nodes that are slower than the majority.
#[derive(Clone, Copy)]
pub(super) enum SlowNodes {
    /// It waits for [`GRACE`], and not for silent nodes. After a split vote, a few callers wait for silent nodes: see
    /// [`WAIT_FOR_SILENT_EVERY`](super::WAIT_FOR_SILENT_EVERY).
    Leave,
    /// As `Leave`, but after a split vote, it waits for silent nodes for this time. An inspection keeps no key, so it
    /// blocks no other client meanwhile.
    AwaitIfSplit(Duration),
    /// It waits for `grace`, or for `if_split` after a split vote, and not for failing nodes.
    Await { grace: Duration, if_split: Duration },
}

impl SlowNodes {
    /// For so many renewals of the watchdog that are sent together. All workers of the watchdog may wait at the same time.
    /// So the wait follows the shortest ttl of all locks of the client, also of those that are in no batch now.
    pub(super) fn of_renewals(renewals: usize, shortest_ttl: Duration) -> Self {
        let part = |part: u32| (shortest_ttl / part).clamp(GRACE, LONGEST_GRACE);
        let split_part = match renewals {
            1 => SPLIT_RENEWAL_PART,
            _ => SPLIT_BATCH_PART,
        };
        Self::Await {
            grace: part(RENEWAL_GRACE_PART),
            if_split: part(split_part),
        }
    }

    pub(super) fn awaits(self, member: &Member) -> bool {
        match self {
            Self::Leave | Self::AwaitIfSplit(_) => !member.is_silent(),
            Self::Await { .. } => !member.health.is_failing(),
        }
    }

    pub(super) fn grace(self) -> Duration {
        match self {
            Self::Leave | Self::AwaitIfSplit(_) => GRACE,
            Self::Await { grace, .. } => grace,
        }
    }

    /// How long nodes get that set a missing key.
    pub(super) fn sets_within(self) -> Duration {
        self.grace().max(SETS_WITHIN)
    }
}

/// The shortest ttl that a client has lately asked for, or renewed.
#[derive(Default)]
pub(super) struct ShortestTtl(Mutex<Option<(Duration, MonotonicTime)>>);

impl ShortestTtl {
    /// Notes a ttl at `now`. It counts until it has ended: a lock that is still held is renewed before that. A ttl below
    /// [`MIN_TTL`] does not count: such a renewal only asks whether the lease is held.
    pub(super) fn note(&self, ttl: Duration, now: MonotonicTime) {
        if ttl < MIN_TTL {
            return;
        }
        let mut known = self.0.lock();
        let is_longer =
            known.is_some_and(|(shortest, at)| shortest < ttl && now < at.after(shortest));
        if !is_longer {
            *known = Some((ttl, now));
        }
    }

    /// The shortest ttl, or the longest possible one if none is known.
    pub(super) fn get(&self) -> Duration {
        self.0.lock().map_or(Duration::MAX, |(ttl, _)| ttl)
    }
}

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_ttl_counts_until_it_has_ended() {
        let (shortest, start) = (ShortestTtl::default(), MonotonicTime::now());
        assert_eq!(shortest.get(), Duration::MAX);
        let note = |ttl, after| {
            shortest.note(ttl, start.after(after));
            shortest.get()
        };
        assert_eq!(note(9 * SECOND, Duration::ZERO), 9 * SECOND);
        assert_eq!(note(3 * SECOND, SECOND), 3 * SECOND);
        assert_eq!(note(9 * SECOND, 2 * SECOND), 3 * SECOND);
        // It is renewed.
        assert_eq!(note(3 * SECOND, 3 * SECOND), 3 * SECOND);
        assert_eq!(note(9 * SECOND, 5 * SECOND), 3 * SECOND);
        // It has ended. A question with the shortest ttl is no renewal.
        assert_eq!(note(Duration::from_millis(1), 6 * SECOND), 3 * SECOND);
        assert_eq!(note(9 * SECOND, 6 * SECOND), 9 * SECOND);
    }

    #[test]
    fn waits_of_renewals_follow_the_ttl() {
        for (renewals, ttl, wanted) in [
            (1, 800, (100, 400)),
            (2, 900, (112, 300)),
            (2, 12, (5, 5)),
            (1, 60_000, (500, 500)),
        ] {
            let SlowNodes::Await { grace, if_split } =
                SlowNodes::of_renewals(renewals, Duration::from_millis(ttl))
            else {
                panic!("renewals wait for silent nodes");
            };
            assert_eq!((grace.as_millis(), if_split.as_millis()), wanted);
        }
    }
}

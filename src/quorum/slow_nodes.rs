//! How long a request waits for nodes that are slower than the majority.
//!
//! A proposal to a silent node is dropped once the majority has decided. So a node that is always slower does not get
//! the key with the grant: late holds bring the key there (`late_holds`).
//!
//! After a split vote, the votes that are missing may decide. But a caller that waits for a stopped node keeps the keys
//! that it has got, and blocks the other clients. So only one caller in
//! [`WAIT_FOR_SILENT_EVERY`](super::WAIT_FOR_SILENT_EVERY) waits for silent nodes. A renewal always waits, because it
//! blocks no other client; its wait blocks a worker of the watchdog, so the shortest ttl of the client limits it. If no
//! vote comes, the next renewal of the lease asks again.

use std::time::Duration;

use parking_lot::Mutex;

use crate::config::MIN_TTL;
use crate::quorum::health::PROBE_LIMIT;
use crate::util::clock::MonotonicTime;

/// After a majority has voted, how long a caller waits for nodes that are a little slower. With their replies, a
/// grant needs fewer write-backs, and the lock has its key on all nodes.
pub const GRACE: Duration = Duration::from_millis(5);
/// The longest time that a request waits for slow nodes after a majority has voted.
pub const LONGEST_GRACE: Duration = PROBE_LIMIT;
/// If the votes for a lease of a batch are split, the watchdog's renewals wait for slow nodes for this part of the
/// shortest ttl, and for [`LONGEST_GRACE`] at most. A third of the ttl is the usual time from one renewal to the next,
/// which asks again.
const SPLIT_BATCH_PART: u32 = 3;
/// As [`SPLIT_BATCH_PART`], for a renewal that is sent alone, so it delays no other.
const SPLIT_RENEWAL_PART: u32 = 2;
/// How long a renewal waits at least for nodes that have just said that the key is missing, and now set it.
const SETS_WITHIN: Duration = Duration::from_millis(100);
/// How many ttls are noted. With more, the longest ones are left out.
const MOST_TTLS: usize = 16;

/// How long a request waits for nodes that are slower than the majority: for [`GRACE`], and not for silent nodes. After
/// a split vote, it may wait for longer, also for silent nodes, but not for failing ones.
#[derive(Clone, Copy)]
pub enum SlowNodes {
    /// After a split vote, a few callers wait for silent nodes: see
    /// [`WAIT_FOR_SILENT_EVERY`](super::WAIT_FOR_SILENT_EVERY).
    Leave,
    /// After a split vote, the request waits for this time. Renewals and inspections get no key, so they block no other
    /// client meanwhile.
    AwaitIfSplit(Duration),
}

impl SlowNodes {
    /// `renewals`: how many renewals the watchdog sends together. No caller waits for them, but all workers of the
    /// watchdog may wait at the same time. So the wait follows the shortest ttl that the client uses, also if no lock
    /// of this batch has it.
    pub fn of_renewals(renewals: usize, shortest_ttl: Duration) -> Self {
        let part = match renewals {
            1 => SPLIT_RENEWAL_PART,
            _ => SPLIT_BATCH_PART,
        };
        Self::AwaitIfSplit((shortest_ttl / part).clamp(GRACE, LONGEST_GRACE))
    }

    /// How long a renewal waits for nodes that set a missing key, if the lease has no majority without them.
    pub fn sets_within(self) -> Duration {
        match self {
            Self::Leave => SETS_WITHIN,
            Self::AwaitIfSplit(grace) => grace.max(SETS_WITHIN),
        }
    }
}

/// The ttls that a client has lately asked for, or renewed. Each counts until it has ended: a lock that is still held
/// is renewed before that.
#[derive(Default)]
pub struct RecentTtls(Mutex<Vec<RecentTtl>>);

struct RecentTtl {
    ttl: Duration,
    until: MonotonicTime,
}

impl RecentTtls {
    /// Notes a ttl at `now`. A ttl below [`MIN_TTL`] does not count: such a renewal only asks whether the lease is
    /// held.
    pub fn note(&self, ttl: Duration, now: MonotonicTime) {
        if ttl < MIN_TTL {
            return;
        }
        let until = now.after(ttl);
        let mut known = self.0.lock();
        known.retain(|one| now < one.until);
        match known.binary_search_by_key(&ttl, |one| one.ttl) {
            Ok(at) => known[at].until = until,
            Err(at) => {
                known.insert(at, RecentTtl { ttl, until });
                known.truncate(MOST_TTLS);
            }
        }
    }

    /// The shortest ttl, or the longest possible one if none is known.
    pub fn shortest(&self, now: MonotonicTime) -> Duration {
        let known = self.0.lock();
        let mut counting = known.iter().filter(|one| now < one.until);
        counting.next().map_or(Duration::MAX, |one| one.ttl)
    }
}

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn a_ttl_counts_until_it_has_ended() {
        let (ttls, start) = (RecentTtls::default(), MonotonicTime::now());
        let at = |seconds: u32| start.after(seconds * SECOND);
        assert_eq!(ttls.shortest(start), Duration::MAX);
        ttls.note(9 * SECOND, start);
        ttls.note(3 * SECOND, start);
        ttls.note(SECOND, start);
        // The ttl of a question is none.
        ttls.note(Duration::from_millis(1), start);
        assert_eq!(ttls.shortest(start), SECOND);
        assert_eq!(ttls.shortest(at(1)), 3 * SECOND);
        // It is renewed.
        ttls.note(3 * SECOND, at(2));
        assert_eq!(ttls.shortest(at(4)), 3 * SECOND);
        assert_eq!(ttls.shortest(at(5)), 9 * SECOND);
        assert_eq!(ttls.shortest(at(9)), Duration::MAX);
    }

    #[test]
    fn the_shortest_ttls_are_kept() {
        let (ttls, now) = (RecentTtls::default(), MonotonicTime::now());
        for seconds in (1..=2 * MOST_TTLS as u32).rev() {
            ttls.note(seconds * SECOND, now);
        }
        assert_eq!(ttls.0.lock().len(), MOST_TTLS);
        assert_eq!(ttls.shortest(now), SECOND);
    }

    #[test]
    fn waits_of_renewals_follow_the_ttl() {
        for (renewals, ttl, wanted) in [(1, 800, 400), (2, 900, 300), (2, 12, 5), (1, 60_000, 500)]
        {
            let ttl = Duration::from_millis(ttl);
            let SlowNodes::AwaitIfSplit(grace) = SlowNodes::of_renewals(renewals, ttl) else {
                panic!("renewals wait for silent nodes");
            };
            assert_eq!(grace.as_millis(), wanted);
        }
    }
}

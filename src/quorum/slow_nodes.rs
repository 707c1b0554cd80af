//! How long a request waits for nodes that are slower than the majority.
//!
//! Once a majority has decided, the client drops the proposals that it has not written to silent nodes yet. So a node
//! that is always slower gets the key of a new lock by a late hold (`late_holds`).
//!
//! After a split vote, the missing votes may decide. But a caller that waits for a stopped node keeps the keys that it
//! has got, and blocks other clients. So only one caller in [`WAIT_FOR_SILENT_EVERY`](super::WAIT_FOR_SILENT_EVERY)
//! waits for silent nodes. A renewal always waits, because it blocks no other client. The wait of a renewal blocks a
//! worker of the watchdog, so the shortest ttl of the client limits the wait. If no vote comes, the next renewal of the
//! lease asks again.

use std::time::Duration;

use parking_lot::Mutex;

use crate::config::MIN_TTL;
use crate::quorum::health::PROBE_LIMIT;
use crate::util::clock::MonotonicTime;

/// After a majority has voted, a caller waits for this time for nodes that are a little slower. Their replies save
/// write-backs, and the lock has its key on all nodes.
pub const GRACE: Duration = Duration::from_millis(5);
/// The longest time that a request waits for slow nodes after a majority has voted.
pub const LONGEST_GRACE: Duration = PROBE_LIMIT;
/// If the votes for a lease are split, renewals of the watchdog wait for slow nodes for this part of the shortest ttl,
/// and at most [`LONGEST_GRACE`]. After a third of a ttl, the next renewal usually asks again.
const SPLIT_BATCH_PART: u32 = 3;
/// The part for a renewal that is sent alone: it may be larger, since this wait delays no other renewal.
const SPLIT_RENEWAL_PART: u32 = 2;
/// The least time for which a renewal waits for nodes that have reported a missing key and are now asked to set it.
const SETS_WITHIN: Duration = Duration::from_millis(100);
/// The number of ttls that [`RecentTtls`] keeps: the shortest ones.
const MOST_TTLS: usize = 16;

/// How long a request waits for nodes that are slower than the majority. Usually it waits for [`GRACE`], and not for
/// silent nodes. After a split vote, it may wait longer and for silent nodes, but not for failing ones.
#[derive(Clone, Copy)]
pub enum SlowNodes {
    /// After a split vote, one caller in [`WAIT_FOR_SILENT_EVERY`](super::WAIT_FOR_SILENT_EVERY) waits for silent
    /// nodes.
    Leave,
    /// After a split vote, the request waits for silent nodes for this time. Only renewals and inspections wait so:
    /// they get no key, and do not block other clients.
    AwaitIfSplit(Duration),
}

impl SlowNodes {
    /// The wait of renewals that the watchdog sends, `renewals` of them together. All workers of the watchdog may wait
    /// at the same time, so the wait depends on the shortest ttl of the client, even if no lock of this batch has that
    /// ttl.
    pub fn of_renewals(renewals: usize, shortest_ttl: Duration) -> Self {
        let part = match renewals {
            1 => SPLIT_RENEWAL_PART,
            _ => SPLIT_BATCH_PART,
        };
        Self::AwaitIfSplit((shortest_ttl / part).clamp(GRACE, LONGEST_GRACE))
    }

    /// How long a renewal waits for nodes to set a missing key, if the lease has no majority without them.
    pub fn sets_within(self) -> Duration {
        match self {
            Self::Leave => SETS_WITHIN,
            Self::AwaitIfSplit(grace) => grace.max(SETS_WITHIN),
        }
    }
}

/// The ttls that a client has requested or renewed lately. Each ttl counts until it has ended: a lock that is still
/// held has recorded it again by then.
#[derive(Default)]
pub struct RecentTtls(Mutex<Vec<RecentTtl>>);

struct RecentTtl {
    ttl: Duration,
    until: MonotonicTime,
}

impl RecentTtls {
    /// Records a ttl at `now`. Ignores a ttl below [`MIN_TTL`]: such a renewal only asks whether the lease is held.
    pub fn record(&self, ttl: Duration, now: MonotonicTime) {
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

    /// The shortest of the ttls. If none is known, the greatest possible ttl.
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
        ttls.record(9 * SECOND, start);
        ttls.record(3 * SECOND, start);
        ttls.record(SECOND, start);
        // A renewal that only asks.
        ttls.record(Duration::from_millis(1), start);
        assert_eq!(ttls.shortest(start), SECOND);
        assert_eq!(ttls.shortest(at(1)), 3 * SECOND);
        // The client renews this ttl.
        ttls.record(3 * SECOND, at(2));
        assert_eq!(ttls.shortest(at(4)), 3 * SECOND);
        assert_eq!(ttls.shortest(at(5)), 9 * SECOND);
        assert_eq!(ttls.shortest(at(9)), Duration::MAX);
    }

    #[test]
    fn the_shortest_ttls_are_kept() {
        let (ttls, now) = (RecentTtls::default(), MonotonicTime::now());
        for seconds in (1..=2 * MOST_TTLS as u32).rev() {
            ttls.record(seconds * SECOND, now);
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

//! Late holds: requests that set the key of a held lock on nodes that are slower than the majority. After a majority
//! has renewed a lease, each node that lacked the key or had not replied gets a late hold. Renewals do not wait for
//! late holds.
//!
//! A lease has at most one late hold on each node. The next renewal replaces a hold that has an outcome, or is older
//! than half of its ttl. A release withdraws a late hold that is not written yet, because the hold could arrive after
//! the release.

use std::collections::HashMap;
use std::time::Duration;

use parking_lot::Mutex;

use crate::store::completion::{Completion, Submitted};
use crate::util::clock::MonotonicTime;
use crate::util::id::LeaseId;

/// Finished holds are searched for only if there are at least this many holds.
const FEWEST_TO_CHECK: usize = 256;

/// The last late hold of each lease on each node.
#[derive(Default)]
pub struct LateHolds(Mutex<State>);

#[derive(Default)]
struct State {
    holds: HashMap<(LeaseId, usize), LateHold>,
    /// At this number of holds, finished ones are dropped: those with an outcome, and those older than half of their
    /// ttl.
    longest: usize,
}

struct LateHold {
    submitted: Submitted,
    ttl: Duration,
    replaced_from: MonotonicTime,
}

impl LateHold {
    fn is_pending(&self, now: MonotonicTime) -> bool {
        !self.submitted.is_complete() && now < self.replaced_from
    }
}

impl LateHolds {
    /// Begins a hold. Returns `None` if an earlier hold with this ttl or a longer one is under way, and is not older
    /// than half of its ttl: the earlier hold keeps its place in the node's queue.
    pub fn begin(
        &self,
        lease: LeaseId,
        node: usize,
        ttl: Duration,
        now: MonotonicTime,
    ) -> Option<Completion> {
        let mut state = self.0.lock();
        let earlier = state.holds.get(&(lease, node));
        if earlier.is_some_and(|hold| hold.ttl >= ttl && hold.is_pending(now)) {
            return None;
        }
        if state.holds.len() >= state.longest.max(FEWEST_TO_CHECK) {
            state.holds.retain(|_, hold| hold.is_pending(now));
            state.longest = 2 * state.holds.len();
        }
        let (submitted, mut completions) = Submitted::new(1);
        let hold = LateHold {
            submitted,
            ttl,
            replaced_from: now.after(ttl / 2),
        };
        // This drops an earlier hold, if there is one, and so withdraws it unless it was written.
        state.holds.insert((lease, node), hold);
        completions.pop()
    }

    /// Withdraws the holds of a lease that is about to be released. A hold that was written arrives before the release,
    /// which is written to the same connection. (If that connection was lost, the hold may arrive after the release.
    /// The node refuses it if it comes too late.)
    pub fn end(&self, lease: LeaseId, nodes: usize) {
        let mut state = self.0.lock();
        if !state.holds.is_empty() {
            for node in 0..nodes {
                state.holds.remove(&(lease, node));
            }
        }
    }

    /// Withdraws all holds.
    pub fn end_all(&self) {
        self.0.lock().holds.clear();
    }

    #[cfg(test)]
    pub fn count(&self) -> usize {
        self.0.lock().holds.len()
    }
}

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests {
    use super::*;
    use crate::command::Reply;

    const TTL: Duration = Duration::from_secs(10);

    #[test]
    fn a_hold_is_replaced_after_its_outcome_or_half_of_its_ttl() {
        let (holds, lease, start) = (
            LateHolds::default(),
            LeaseId::random(),
            MonotonicTime::now(),
        );
        let begin = |node, after| holds.begin(lease, node, TTL, start.after(after));
        let first = begin(1, Duration::ZERO).unwrap();
        assert!(begin(1, TTL / 2 - Duration::from_millis(1)).is_none());
        let other = begin(2, Duration::ZERO).unwrap();
        assert!(first.is_waited_for());
        let longer = holds.begin(lease, 1, 2 * TTL, start).unwrap();
        assert!(!first.is_waited_for() && longer.is_waited_for());
        let second = begin(1, TTL).unwrap();
        assert!(!longer.is_waited_for() && second.is_waited_for());
        second.complete(Ok(Reply::Missing)).unwrap();
        let third = begin(1, TTL).unwrap();
        holds.end(LeaseId::random(), 3);
        assert!(third.is_waited_for() && other.is_waited_for());
        holds.end(lease, 3);
        assert!(!third.is_waited_for() && !other.is_waited_for());
        let fourth = begin(1, TTL).unwrap();
        holds.end_all();
        assert!(!fourth.is_waited_for());
    }

    /// A lease that has expired is not released, so its hold has to end in another way.
    #[test]
    fn holds_with_outcomes_do_not_collect() {
        let (holds, now) = (LateHolds::default(), MonotonicTime::now());
        let mut pending = Vec::new();
        for n in 0..10 * FEWEST_TO_CHECK {
            let hold = holds.begin(LeaseId::random(), 0, TTL, now).unwrap();
            match n % 100 {
                0 => pending.push(hold),
                _ => hold.complete(Ok(Reply::Missing)).unwrap(),
            }
        }
        assert!(holds.count() <= FEWEST_TO_CHECK);
        assert!(pending.iter().all(Completion::is_waited_for));
    }
}

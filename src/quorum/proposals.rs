//! The tokens that a client proposes to the nodes of a quorum.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::command::value::micros_of;

/// The greatest lead of a proposal over the nodes' clocks.
const LONGEST_LEAD: Duration = Duration::from_secs(1);
/// The greatest proposal in µs. The scripts grant nothing beyond it.
pub const LONGEST_MICROS: u64 = 9_007_199_254_000_000;

/// Chooses proposals for tokens, as µs. If a proposal is later than the times and the counters of a majority, it is the
/// token, and the grant needs no second round trip.
pub struct Proposals {
    /// How far a proposal is ahead of the nodes' time, in µs. Tokens rise even after a loss of data if this lead plus
    /// the difference of the nodes' clocks is less than a quarantine.
    lead: u64,
    /// The length of a quarantine in µs. A node refuses a proposal that is later than its clock by more than this.
    quarantine: u64,
    /// The last proposal, or the token of a later grant if that is greater.
    last: AtomicU64,
}

impl Proposals {
    /// `max_ttl` is the same for all clients, and is the length of a quarantine.
    pub fn new(max_ttl: Duration) -> Self {
        let lead = (max_ttl / 10).min(LONGEST_LEAD);
        Self {
            lead: lead.as_micros() as u64,
            quarantine: max_ttl.as_micros() as u64,
            last: AtomicU64::new(0),
        }
    }

    pub fn lead(&self) -> Duration {
        Duration::from_micros(self.lead)
    }

    /// The next proposal. `times` are the known times of nodes, in µs. The proposal is later than the times of a
    /// majority, even if the clocks of the other nodes are far ahead. Two calls return different proposals, unless the
    /// first one was too far ahead of the clocks.
    pub fn next(&self, mut times: Vec<u64>, majority: usize) -> u64 {
        times.sort_unstable();
        let time = times.get(majority - 1).or(times.last());
        let ahead = time.map_or(1, |time| time.saturating_add(self.lead));
        let next = |last: u64| {
            // The last proposal followed a clock that was far ahead, or clocks were set back since. The nodes would
            // refuse the next one, so proposals begin at the nodes' clocks again.
            let is_too_far_ahead =
                time.is_some_and(|time| last >= time.saturating_add(self.quarantine));
            let next = if is_too_far_ahead {
                ahead
            } else {
                ahead.max(last + 1)
            };
            next.min(LONGEST_MICROS)
        };
        let last = self
            .last
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |last| {
                Some(next(last))
            });
        next(last.unwrap_or_else(|last| last))
    }

    /// Records the token of a grant: a majority of the nodes now grants only greater ones.
    pub fn record(&self, token: u64) {
        self.last.fetch_max(micros_of(token), Ordering::Relaxed);
    }
}

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests {
    use super::*;

    const NOW: u64 = 1_795_263_780_943_818;

    #[test]
    fn a_proposal_is_ahead_of_a_majority() {
        let proposals = || Proposals::new(Duration::from_secs(3600));
        let second = 1_000_000;
        for (times, wanted) in [
            (vec![], 1),
            (vec![NOW], NOW + second),
            (vec![NOW + 5, NOW], NOW + 5 + second),
            (vec![NOW + 5, NOW, NOW + 7], NOW + 5 + second),
            // One node is a year ahead.
            (
                vec![31_536_000_000_000 + NOW, NOW, NOW + 7],
                NOW + 7 + second,
            ),
        ] {
            assert_eq!(proposals().next(times.clone(), 2), wanted, "{times:?}");
        }
    }

    #[test]
    fn the_lead_is_a_tenth_of_a_quarantine() {
        let proposals = Proposals::new(Duration::from_secs(2));
        assert_eq!(proposals.next(vec![NOW], 1), NOW + 200_000);
    }

    #[test]
    fn proposals_do_not_follow_a_clock_that_was_far_ahead() {
        let quarantine = Duration::from_secs(30);
        let proposals = Proposals::new(quarantine);
        let (second, far) = (1_000_000, NOW + 3_600_000_000);
        assert_eq!(proposals.next(vec![far, NOW], 2), far + second);
        // A third node is back, and a majority of the clocks is right.
        let next = || proposals.next(vec![far, NOW, NOW], 2);
        assert_eq!(next(), NOW + second);
        assert_eq!(next(), NOW + second + 1);
        let limit = NOW + 30 * second;
        for (token, wanted) in [(limit - 1, limit), (limit, NOW + second)] {
            proposals.record(token << 10);
            assert_eq!(next(), wanted);
        }
    }

    #[test]
    fn proposals_rise() {
        let proposals = Proposals::new(Duration::from_secs(3600));
        let first = proposals.next(vec![NOW], 1);
        assert_eq!(proposals.next(vec![NOW - 5], 1), first + 1);
        proposals.record((first + 9) << 10);
        proposals.record(first << 10);
        assert_eq!(proposals.next(vec![NOW], 1), first + 10);
        assert_eq!(proposals.next(vec![u64::MAX], 1), LONGEST_MICROS);
    }
}

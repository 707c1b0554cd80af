//! The clocks of a quorum's nodes, as probes have read them. A reading is inexact by at most half a round trip, because
//! the node reads its clock somewhere between the request and the reply. This module compares each clock with the
//! median of a majority, only to report nodes that may break the bound on the difference (docs/protocol.md): no lock
//! depends on it. It does no I/O.

use std::time::Duration;

use crate::report::node_state::NodeClock;
use crate::util::clock::MonotonicTime;

/// One probe's reading of a node's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reading {
    /// How far the node's clock is ahead of the client's clock, in µs. Assumes that request and reply took the same
    /// time.
    ahead: i64,
    /// The greatest error of `ahead`: half the round trip.
    error: Duration,
}

impl Reading {
    /// The node's clock showed `micros` at some time between `sent` and `seen`.
    pub fn new(micros: u64, sent: MonotonicTime, seen: MonotonicTime) -> Self {
        let error = seen.since(sent) / 2;
        let middle = sent.after(error).since(MonotonicTime::at_tick(0));
        let signed = |micros| i64::try_from(micros).unwrap_or(i64::MAX);
        let middle = i64::try_from(middle.as_micros()).unwrap_or(i64::MAX);
        Self {
            ahead: signed(micros) - middle,
            error,
        }
    }

    /// The time from the request to the reply.
    pub fn round_trip(&self) -> Duration {
        2 * self.error
    }
}

/// How far a clock may differ from the median. Two clocks within this bound keep the bound on their difference.
pub fn allowed_from_median(quarantine: Duration, lead: Duration) -> Duration {
    quarantine.saturating_sub(lead) / 2
}

/// Compares each clock with the median. `None` for a node without a reading, and for all nodes if fewer than a majority
/// have readings.
pub fn compare(readings: &[Option<Reading>], allowed: Duration) -> Vec<Option<NodeClock>> {
    let mut known: Vec<Reading> = readings.iter().flatten().copied().collect();
    if known.len() <= readings.len() / 2 {
        return vec![None; readings.len()];
    }
    known.sort_unstable_by_key(|reading| reading.ahead);
    let [lower, upper] = [(known.len() - 1) / 2, known.len() / 2].map(|at| known[at].ahead);
    let median = lower + (upper - lower) / 2;
    let errors = known.iter().map(|reading| reading.error);
    let of_median = errors.max().unwrap_or_default();
    let compared = |reading: Reading| {
        let offset = reading.ahead.saturating_sub(median);
        let error = reading.error + of_median;
        let least = Duration::from_micros(offset.unsigned_abs()).saturating_sub(error);
        NodeClock {
            offset,
            error,
            is_within_bound: least <= allowed,
        }
    };
    readings.iter().map(|one| one.map(compared)).collect()
}

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests {
    use super::*;

    const NOW: u64 = 1_795_263_780_943_818;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn at(micros: u64) -> MonotonicTime {
        MonotonicTime::at_tick(0).after(Duration::from_micros(micros))
    }

    /// A reading whose round trip took 2 ms.
    fn ahead(micros: i64) -> Option<Reading> {
        let shown = NOW.checked_add_signed(micros).expect("a time");
        Some(Reading::new(shown, at(5_000), at(7_000)))
    }

    fn offsets(readings: &[Option<Reading>]) -> Vec<Option<i64>> {
        let compared = compare(readings, ms(5)).into_iter();
        compared
            .map(|clock| clock.map(|clock| clock.offset))
            .collect()
    }

    #[test]
    fn a_reading_is_off_by_half_the_round_trip_at_most() {
        // The node's clock is 100 µs ahead of the client's, read at the beginning or at the end of the round trip.
        for shown in [5_100, 7_100] {
            let reading = Reading::new(shown, at(5_000), at(7_000));
            assert_eq!(reading.error, ms(1));
            assert_eq!(reading.ahead.abs_diff(100), 1_000, "{shown}");
        }
    }

    #[test]
    fn clocks_are_compared_with_their_median() {
        let [a, b, c] = [ahead(0), ahead(300), ahead(-90_000)];
        assert_eq!(offsets(&[a, b, c]), [Some(0), Some(300), Some(-90_000)]);
        assert_eq!(offsets(&[a, b, None]), [Some(-150), Some(150), None]);
        assert_eq!(offsets(&[a, None, None]), [None; 3], "no majority");
        assert_eq!(offsets(&[a, b, None, None]), [None; 4], "no majority");
        assert_eq!(offsets(&[a]), [Some(0)]);
    }

    #[test]
    fn a_clock_is_reported_beyond_the_bound_and_the_error() {
        // The errors of two readings are 2 ms together.
        for (offset, is_within) in [
            (7_000, true),
            (7_001, false),
            (-7_000, true),
            (-7_001, false),
        ] {
            let clocks = compare(&[ahead(0), ahead(offset), ahead(0)], ms(5));
            let clock = clocks[1].expect("it is known");
            assert_eq!((clock.error, clock.is_within_bound), (ms(2), is_within));
        }
    }

    #[test]
    fn two_clocks_within_the_bound_differ_by_less_than_a_quarantine() {
        let (quarantine, lead) = (ms(30_000), ms(1_000));
        assert_eq!(allowed_from_median(quarantine, lead), ms(14_500));
    }
}

//! Pauses between attempts: they double up to a bound, with jitter.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use crate::util::id::LeaseId;
use crate::util::key::Key;

const FIRST: Duration = Duration::from_millis(1);
const LONGEST: Duration = Duration::from_millis(50);
const LONGEST_IN_OUTAGE: Duration = Duration::from_millis(250);

pub(crate) struct Backoff {
    next: Duration,
    longest: Duration,
    /// No pause is longer than this: the time until the lock expires, according to the last reply, plus one
    /// millisecond.
    bound: Duration,
}

impl Backoff {
    pub(crate) fn new() -> Self {
        Self {
            next: FIRST,
            longest: LONGEST,
            bound: Duration::MAX,
        }
    }

    /// Limits the pauses to the time until the lock expires, plus one millisecond.
    pub(crate) fn no_longer_than(&mut self, expires_in: Duration) {
        self.longest = LONGEST;
        self.bound = expires_in + Duration::from_millis(1);
    }

    pub(crate) fn for_an_outage(&mut self) {
        self.longest = LONGEST_IN_OUTAGE;
        self.bound = Duration::MAX;
    }

    /// Returns the next pause, and doubles the pause after it.
    pub(crate) fn next(&mut self) -> Duration {
        let pause = self.next.min(self.longest);
        self.next = pause * 2;
        jittered(pause).min(self.bound)
    }
}

/// Returns a random time up to `longest`.
fn random_up_to(longest: Duration) -> Duration {
    longest.mul_f64(LeaseId::random().jitter())
}

/// The shards of [`Contenders`].
const SHARDS: usize = 64;
/// The greatest number of contenders that pauses are made for.
const MOST_CONTENDERS: u32 = 64;
/// The bounds of a round trip, for the pauses of a quorum's clients.
pub(super) const ROUND_TRIPS: [Duration; 2] =
    [Duration::from_micros(500), Duration::from_millis(10)];
/// The longest pause of a contender.
const LONGEST_OF_CONTENDERS: Duration = Duration::from_millis(250);

/// How many clients contend for the keys of a quorum, as split votes show: each split vote doubles the number for its
/// key, and each grant takes a quarter off. Keys share the numbers of 64 shards.
pub(crate) struct Contenders([AtomicU32; SHARDS]);

impl Default for Contenders {
    fn default() -> Self {
        Self(std::array::from_fn(|_| AtomicU32::new(0)))
    }
}

impl Contenders {
    fn update(&self, key: &Key, next: impl Fn(u32) -> u32) {
        let shard = &self.0[key.shard(SHARDS)];
        let before = shard.load(Ordering::Relaxed);
        // Two updates at a time may become one. The number is an estimate.
        if next(before) != before {
            shard.store(next(before), Ordering::Relaxed);
        }
    }

    pub(crate) fn note_split_vote(&self, key: &Key) {
        self.update(key, |known| (2 * known).clamp(2, MOST_CONTENDERS));
    }

    pub(crate) fn note_grant(&self, key: &Key) {
        self.update(key, |known| known - known.div_ceil(4));
    }

    /// A random pause before the next attempt: with each known contender, one round trip longer at most. So one of them
    /// probably asks a round trip before the others.
    pub(crate) fn pause(&self, key: &Key, round_trip: Duration) -> Duration {
        let known = self.0[key.shard(SHARDS)].load(Ordering::Relaxed);
        let [shortest, longest] = ROUND_TRIPS;
        let longest = known * round_trip.clamp(shortest, longest);
        random_up_to(longest.min(LONGEST_OF_CONTENDERS))
    }
}

/// Returns a random time between half of `pause` and `pause`, so that waiters do not ask at the same time.
pub(crate) fn jittered(pause: Duration) -> Duration {
    pause.mul_f64(0.5 + 0.5 * LeaseId::random().jitter())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_their_bound_with_jitter() {
        let mut pause = Backoff::new();
        let mut nominal = FIRST;
        for _ in 0..12 {
            let next = pause.next();
            assert!(next >= nominal / 2 && next <= nominal, "{next:?}");
            nominal = (nominal * 2).min(LONGEST);
        }
    }

    #[test]
    fn pauses_of_contenders_follow_the_split_votes() {
        let contenders = Contenders::default();
        let key = Key::new("", "k", 16).unwrap();
        let round_trip = Duration::from_millis(1);
        let longest = || {
            let pause = |_| contenders.pause(&key, round_trip);
            (0..200).map(pause).max().unwrap_or_default()
        };
        assert_eq!(longest(), Duration::ZERO);
        let mut before = Duration::ZERO;
        for known in [2, 4, 8, 16, 32] {
            contenders.note_split_vote(&key);
            let now = longest();
            assert!(
                now <= known * round_trip && now > known * round_trip / 2,
                "{now:?}"
            );
            assert!(now > before);
            before = now;
        }
        (0..9).for_each(|_| contenders.note_split_vote(&key));
        assert!(longest() <= MOST_CONTENDERS * round_trip);
        assert!((0..200).all(|_| contenders.pause(&key, 9 * LONGEST) <= LONGEST_OF_CONTENDERS));
        (0..30).for_each(|_| contenders.note_grant(&key));
        assert_eq!(longest(), Duration::ZERO);
    }

    #[test]
    fn pause_ends_when_the_lock_expires() {
        let mut pause = Backoff::new();
        for _ in 0..10 {
            pause.next();
        }
        pause.no_longer_than(Duration::from_millis(3));
        assert_eq!(pause.next(), Duration::from_millis(4));
        pause.for_an_outage();
        assert!(pause.next() > Duration::from_millis(4));
    }
}

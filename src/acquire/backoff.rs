//! Pauses between attempts: they double up to a bound, with jitter.

use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

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

/// The share of a wait in the mean wait of its client.
const SHARE_OF_MEAN: f64 = 1.0 / 16.0;
/// The longest pause, as a share of the mean wait.
const SHARE_OF_PAUSE: f64 = 1.0 / 4.0;
/// A waiter that has waited for longer than this share of the mean wait is late.
const LATE: f64 = 0.9;
/// Being later than this does not shorten pauses further.
const MOST_LATE: f64 = 4.0;
/// A late waiter asks again after this share of its wait, without a notification.
const SHARE_OF_TRUST: u32 = 16;

/// What a client knows of the contention for the keys of a quorum, which has no queues. It decides when a waiter asks
/// again: after a random pause, which is shorter for a waiter that is late. Keys share the records of 64 shards.
pub(crate) struct Contenders([Mutex<Contention>; SHARDS]);

#[derive(Clone, Copy, Default)]
struct Contention {
    /// How many clients contend, as split votes show: each of them doubles this number, and each grant takes a quarter
    /// off, also a grant to another client.
    clients: u32,
    /// The mean of this client's waits in which it met another client. `None` before the first one.
    mean_wait: Option<Duration>,
}

/// A caller's wait so far.
#[derive(Clone, Copy)]
pub(crate) struct WaitSoFar {
    pub(crate) waited: Duration,
    /// How many of its last attempts in a row have split the votes.
    pub(crate) split_votes: u32,
    /// How long its last attempt took.
    pub(crate) round_trip: Duration,
}

impl Default for Contenders {
    fn default() -> Self {
        Self(std::array::from_fn(|_| Mutex::default()))
    }
}

impl Contenders {
    fn of(&self, key: &Key) -> MutexGuard<'_, Contention> {
        self.0[key.shard(SHARDS)].lock()
    }

    pub(crate) fn note_split_vote(&self, key: &Key) {
        let clients = &mut self.of(key).clients;
        *clients = (2 * *clients).clamp(2, MOST_CONTENDERS);
    }

    /// Notes that another client has the key.
    pub(crate) fn note_refusal(&self, key: &Key) {
        self.of(key).note_grant();
    }

    /// Notes a grant to this client. `waited`: how long its caller has waited, if it has met another client.
    pub(crate) fn note_grant(&self, key: &Key, waited: Option<Duration>) {
        let mut contention = self.of(key);
        contention.note_grant();
        if let Some(waited) = waited {
            let mean = contention.mean_wait.unwrap_or(waited);
            let rest = mean.mul_f64(1.0 - SHARE_OF_MEAN);
            contention.mean_wait = Some(rest + waited.mul_f64(SHARE_OF_MEAN));
        }
    }

    /// A random pause before the next attempt.
    pub(crate) fn pause(&self, key: &Key, wait: WaitSoFar) -> Duration {
        let contention = *self.of(key);
        random_up_to(contention.longest_pause(wait))
    }

    /// How long a caller relies on notifications. A notification that the key is free can come too late: another client
    /// has the key again. So a late caller also asks from time to time. `None` before the first mean.
    pub(crate) fn trust(&self, key: &Key, waited: Duration) -> Option<Duration> {
        let until_late = self.of(key).mean_wait?.saturating_sub(waited);
        let [shortest, _] = ROUND_TRIPS;
        Some(until_late.max(waited / SHARE_OF_TRUST).max(shortest))
    }
}

impl Contention {
    fn note_grant(&mut self) {
        self.clients -= self.clients.div_ceil(4);
    }

    /// With each contender, a pause is one round trip longer at most, so one of them probably asks a round trip before
    /// the others. By chance alone, some callers would wait for many times the mean. So a pause is a part of the mean
    /// wait only, and the cube of the lateness shortens it. Each split vote in a row doubles it, since all callers may
    /// be late.
    fn longest_pause(&self, wait: WaitSoFar) -> Duration {
        let [shortest, longest] = ROUND_TRIPS;
        let bound = self.clients * wait.round_trip.clamp(shortest, longest);
        let bound = bound.min(LONGEST_OF_CONTENDERS);
        let Some(mean) = self.mean_wait.filter(|mean| !mean.is_zero()) else {
            return bound;
        };
        let lateness = wait.waited.div_duration_f64(mean.mul_f64(LATE));
        let lateness = lateness.clamp(1.0, MOST_LATE);
        let pause = mean
            .mul_f64(SHARE_OF_PAUSE)
            .min(bound)
            .div_f64(lateness.powi(3));
        pause
            .saturating_mul(1 << wait.split_votes.min(10))
            .min(bound)
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

    const ROUND_TRIP: Duration = Duration::from_millis(1);

    fn contended_key() -> Key {
        Key::new("", "k", 16).unwrap()
    }

    fn waited(ms: u64) -> WaitSoFar {
        WaitSoFar {
            waited: Duration::from_millis(ms),
            split_votes: 0,
            round_trip: ROUND_TRIP,
        }
    }

    #[test]
    fn pauses_of_contenders_follow_the_split_votes() {
        let contenders = Contenders::default();
        let key = contended_key();
        let longest = |wait| contenders.of(&key).longest_pause(wait);
        assert_eq!(longest(waited(0)), Duration::ZERO);
        for known in [2, 4, 8, 16, 32, 64, 64] {
            contenders.note_split_vote(&key);
            assert_eq!(longest(waited(0)), known * ROUND_TRIP);
        }
        let slow = WaitSoFar {
            round_trip: 9 * LONGEST,
            ..waited(0)
        };
        assert_eq!(longest(slow), LONGEST_OF_CONTENDERS);
        let pauses: Vec<_> = (0..200)
            .map(|_| contenders.pause(&key, waited(0)))
            .collect();
        let [shortest, longest_of_all] = [pauses.iter().min(), pauses.iter().max()];
        assert!(*shortest.unwrap() < 16 * ROUND_TRIP);
        assert!((48 * ROUND_TRIP..=64 * ROUND_TRIP).contains(longest_of_all.unwrap()));
        // Grants to other clients count, too.
        for left in [48, 36, 27] {
            contenders.note_refusal(&key);
            assert_eq!(longest(waited(0)), left * ROUND_TRIP);
        }
        (0..30).for_each(|_| contenders.note_grant(&key, None));
        assert_eq!(longest(waited(0)), Duration::ZERO);
    }

    /// The contenders of a client whose mean wait is 100 ms.
    fn with_mean() -> (Contenders, Key) {
        let (contenders, key) = (Contenders::default(), contended_key());
        (0..6).for_each(|_| contenders.note_split_vote(&key));
        contenders.of(&key).mean_wait = Some(Duration::from_millis(100));
        (contenders, key)
    }

    #[test]
    fn a_late_caller_pauses_for_less() {
        let (contenders, key) = with_mean();
        let longest = |ms, split_votes| {
            let wait = WaitSoFar {
                split_votes,
                ..waited(ms)
            };
            contenders.of(&key).longest_pause(wait).as_micros()
        };
        assert_eq!([0, 90].map(|ms| longest(ms, 0)), [25_000; 2]);
        assert_eq!([180, 270].map(|ms| longest(ms, 0)), [3125, 925]);
        assert_eq!([360, 90_000].map(|ms| longest(ms, 0)), [390; 2]);
        // All callers may be late.
        assert_eq!(
            [1, 2, 3].map(|votes| longest(360, votes)),
            [781, 1562, 3125]
        );
        assert_eq!([10, 99].map(|votes| longest(360, votes)), [64_000; 2]);
        contenders.of(&key).mean_wait = Some(Duration::ZERO);
        assert_eq!([0, 1].map(|ms| longest(ms, 0)), [64_000; 2]);
    }

    #[test]
    fn a_late_caller_relies_less_on_notifications() {
        let (contenders, key) = with_mean();
        let trust = |ms| contenders.trust(&key, Duration::from_millis(ms)).unwrap();
        let expected = [
            (0, 100.0),
            (60, 40.0),
            (99, 6.1875),
            (160, 10.0),
            (1600, 100.0),
        ];
        for (waited, ms) in expected {
            assert_eq!(trust(waited).as_secs_f64() * 1000.0, ms, "{waited}");
        }
        contenders.of(&key).mean_wait = Some(Duration::ZERO);
        assert_eq!(trust(0), ROUND_TRIPS[0]);
        assert_eq!(Contenders::default().trust(&key, ROUND_TRIP), None);
    }

    #[test]
    fn the_mean_follows_waits_that_met_others() {
        let (contenders, key) = (Contenders::default(), contended_key());
        let mean = || contenders.of(&key).mean_wait.map(|mean| mean.as_millis());
        contenders.note_grant(&key, None);
        assert_eq!(mean(), None);
        contenders.note_grant(&key, Some(Duration::from_millis(160)));
        assert_eq!(mean(), Some(160));
        contenders.note_grant(&key, None);
        assert_eq!(mean(), Some(160));
        contenders.note_grant(&key, Some(Duration::from_millis(320)));
        assert_eq!(mean(), Some(170));
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

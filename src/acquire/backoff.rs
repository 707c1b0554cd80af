//! Pauses between attempts: they double up to a bound, with jitter.

use std::time::Duration;

use crate::util::id::LeaseId;

const FIRST: Duration = Duration::from_millis(1);
const LONGEST: Duration = Duration::from_millis(50);
const LONGEST_IN_OUTAGE: Duration = Duration::from_millis(250);

pub struct Backoff {
    next: Duration,
    longest: Duration,
    /// No pause is longer than this: the time until the lock expires, according to the last reply, plus one
    /// millisecond.
    bound: Duration,
}

impl Backoff {
    pub fn new() -> Self {
        Self {
            next: FIRST,
            longest: LONGEST,
            bound: Duration::MAX,
        }
    }

    /// Limits the pauses to the time until the lock expires, plus one millisecond.
    pub fn no_longer_than(&mut self, expires_in: Duration) {
        self.longest = LONGEST;
        self.bound = expires_in + Duration::from_millis(1);
    }

    pub fn for_an_outage(&mut self) {
        self.longest = LONGEST_IN_OUTAGE;
        self.bound = Duration::MAX;
    }

    /// Returns the next pause, and doubles the pause after it.
    pub fn next(&mut self) -> Duration {
        let pause = self.next.min(self.longest);
        self.next = pause * 2;
        jittered(pause).min(self.bound)
    }
}

/// Returns a random time between half of `pause` and `pause`, so that waiters do not ask at the same time.
pub fn jittered(pause: Duration) -> Duration {
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

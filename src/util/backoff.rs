//! The pauses between repeated attempts.

use std::time::Duration;

use crate::util::id::LeaseId;

/// A pause that doubles with each failed attempt, from the first to the longest.
#[derive(Clone, Copy, Debug)]
pub struct Backoff {
    first: Duration,
    longest: Duration,
    next: Duration,
}

impl Backoff {
    pub const fn new(first: Duration, longest: Duration) -> Self {
        Self {
            first,
            longest,
            next: first,
        }
    }

    /// Returns the pause before the next attempt, and doubles the pause after it.
    pub fn next(&mut self) -> Duration {
        self.next_within(self.longest)
    }

    /// The same as [`next`](Self::next), with `longest` in place of the usual longest pause.
    pub fn next_within(&mut self, longest: Duration) -> Duration {
        let pause = self.next.min(longest);
        self.next = 2 * pause;
        pause
    }

    /// Begins with the first pause again.
    pub fn reset(&mut self) {
        self.next = self.first;
    }
}

/// Returns a random time between half of `pause` and `pause`, so that callers do not ask at the same time.
pub fn jittered(pause: Duration) -> Duration {
    pause.mul_f64(0.5 + 0.5 * LeaseId::random().jitter())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_longest() {
        let millis = Duration::from_millis;
        let mut backoff = Backoff::new(millis(50), millis(500));
        for expected in [50, 100, 200, 400, 500, 500] {
            assert_eq!(backoff.next(), millis(expected));
        }
        assert_eq!(backoff.next_within(millis(2_000)), millis(1_000));
        assert_eq!(backoff.next(), millis(500));
        backoff.reset();
        assert_eq!(backoff.next(), millis(50));
    }
}

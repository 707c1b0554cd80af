//! The clock of a client. It advances while the machine is suspended, like a ttl in Redis.

use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The longest step by which a clock can be moved: a year. A [`MonotonicTime`] has room for hundreds of such steps.
const LONGEST_STEP: Duration = Duration::from_secs(366 * 24 * 3600);

/// The clock of one client. It shows the machine's time, unless a test moves it ahead.
#[derive(Clone, Debug, Default)]
pub struct Clock {
    /// The lead of a movable clock over the machine's clock, in nanoseconds. `None` for a clock that cannot be moved.
    ahead: Option<Arc<AtomicU64>>,
}

impl Clock {
    /// A clock that can be moved. Its clones move with it.
    pub fn movable() -> Self {
        Self {
            ahead: Some(Arc::default()),
        }
    }

    pub fn now(&self) -> MonotonicTime {
        match &self.ahead {
            None => MonotonicTime::now(),
            Some(ahead) => {
                MonotonicTime::now().after(Duration::from_nanos(ahead.load(Ordering::Acquire)))
            }
        }
    }

    /// Moves a movable clock ahead, by at most [`LONGEST_STEP`].
    pub fn advance(&self, by: Duration) {
        if let Some(ahead) = &self.ahead {
            let nanos = by.min(LONGEST_STEP).as_nanos();
            let nanos = u64::try_from(nanos).unwrap_or(u64::MAX);
            let _ = ahead.fetch_update(Ordering::AcqRel, Ordering::Acquire, |now| {
                Some(now.saturating_add(nanos))
            });
        }
    }
}

/// How long a holder may rely on a ttl of Redis: the ttl less an allowance for the drift of two clocks and the rounding
/// of Redis. The allowance is one percent plus 2 ms, the same as in Redlock.
pub fn validity(ttl: Duration) -> Duration {
    let drift = ttl / 100 + Duration::from_millis(2);
    ttl.saturating_sub(drift)
}

/// A point in time on this machine's clock, in nanoseconds since a fixed start. Arithmetic saturates. The number is
/// never zero, so an `Option<MonotonicTime>` takes only 8 bytes, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct MonotonicTime(NonZeroU64);

impl MonotonicTime {
    const fn at_nanos(nanos: u64) -> Self {
        Self(match NonZeroU64::new(nanos) {
            Some(nanos) => nanos,
            None => NonZeroU64::MIN,
        })
    }

    #[cfg(all(unix, not(all(test, shuttle))))]
    pub fn now() -> Self {
        use rustix::time::{ClockId, clock_gettime};
        // The standard library's `Instant` may stand still while the machine is suspended.
        #[cfg(any(target_os = "linux", target_os = "android"))]
        const CLOCK: ClockId = ClockId::Boottime;
        #[cfg(not(any(target_os = "linux", target_os = "android")))]
        const CLOCK: ClockId = ClockId::Monotonic;
        let now = clock_gettime(CLOCK);
        Self::at_nanos(now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64)
    }

    #[cfg(all(test, shuttle))]
    pub fn now() -> Self {
        // Models start at tick 1.
        Self::at_tick(1).after(crate::util::sync::model::now())
    }

    #[cfg(not(any(unix, all(test, shuttle))))]
    pub fn now() -> Self {
        static START: std::sync::LazyLock<std::time::Instant> =
            std::sync::LazyLock::new(std::time::Instant::now);
        Self::at_nanos(START.elapsed().as_nanos() as u64)
    }

    /// The nanoseconds since the fixed start.
    pub fn as_nanos(self) -> u64 {
        self.0.get()
    }

    /// The time `duration` after this time.
    pub fn after(self, duration: Duration) -> Self {
        let nanos = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        Self(self.0.saturating_add(nanos))
    }

    /// The time `duration` before this time.
    pub fn before(self, duration: Duration) -> Self {
        let nanos = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        Self::at_nanos(self.0.get().saturating_sub(nanos))
    }

    /// The duration from `earlier` to this time; zero if `earlier` is after this time.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.get().saturating_sub(earlier.0.get()))
    }

    /// The last multiple of `step` that is not after this time.
    pub fn rounded_down(self, step: Duration) -> Self {
        let step = u64::try_from(step.as_nanos()).unwrap_or(u64::MAX).max(1);
        Self::at_nanos(self.0.get() - self.0.get() % step)
    }

    /// The time `tick` milliseconds after the fixed start.
    pub const fn at_tick(tick: u64) -> Self {
        Self::at_nanos(tick.saturating_mul(1_000_000))
    }

    /// The first tick, a whole millisecond, that is not before this time.
    pub fn tick_rounded_up(self) -> u64 {
        self.0.get().div_ceil(1_000_000)
    }

    /// The last tick that is not after this time.
    pub fn tick_rounded_down(self) -> u64 {
        self.0.get() / 1_000_000
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticks_are_rounded_as_named() {
        let time = MonotonicTime::at_nanos(5_000_001);
        assert_eq!((time.tick_rounded_up(), time.tick_rounded_down()), (6, 5));
        assert_eq!(MonotonicTime::at_nanos(5_000_000).tick_rounded_up(), 5);
    }

    #[test]
    fn times_are_rounded_down_to_a_step() {
        assert_eq!(
            MonotonicTime::at_nanos(29).rounded_down(Duration::from_nanos(10)),
            MonotonicTime::at_nanos(20)
        );
        assert_eq!(
            MonotonicTime::at_nanos(29).rounded_down(Duration::ZERO),
            MonotonicTime::at_nanos(29)
        );
    }

    #[test]
    fn arithmetic_saturates() {
        assert_eq!(
            MonotonicTime::at_nanos(7).after(Duration::MAX),
            MonotonicTime::at_nanos(u64::MAX)
        );
        assert_eq!(
            MonotonicTime::at_nanos(7).since(MonotonicTime::at_nanos(9)),
            Duration::ZERO
        );
    }

    #[cfg(not(shuttle))]
    #[test]
    fn a_moved_clock_is_ahead_and_continues() {
        let clock = Clock::movable();
        let hour = Duration::from_secs(3600);
        let before = MonotonicTime::now();
        clock.clone().advance(hour);
        let after = clock.now();
        assert!(after >= before.after(hour) && after <= MonotonicTime::now().after(hour));
        assert!(Clock::default().now() <= MonotonicTime::now());
    }

    #[cfg(not(shuttle))]
    #[test]
    fn time_does_not_go_back() {
        let before = MonotonicTime::now();
        assert!(MonotonicTime::now() >= before);
    }
}

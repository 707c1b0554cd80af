//! The holder's clock: one that goes on while the machine sleeps, as the ttl in Redis does.

use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// A year: more than any test needs, and a hundred of them fit into all numbers made of time.
const LONGEST_STEP: Duration = Duration::from_secs(366 * 24 * 3600);

/// What time it is for one client: the machine's, unless a test moves it ahead.
#[derive(Clone, Debug, Default)]
pub(crate) struct Clock {
    /// By how many ns it is ahead.
    ahead: Option<Arc<AtomicU64>>,
}

impl Clock {
    /// One that can be moved; its clones move along.
    pub(crate) fn movable() -> Self {
        Self {
            ahead: Some(Arc::default()),
        }
    }

    pub(crate) fn now(&self) -> MonotonicTime {
        match &self.ahead {
            None => MonotonicTime::now(),
            Some(ahead) => {
                MonotonicTime::now().after(Duration::from_nanos(ahead.load(Ordering::Acquire)))
            }
        }
    }

    /// Moves a movable one ahead, by [`LONGEST_STEP`] at most; time goes on from there.
    pub(crate) fn advance(&self, by: Duration) {
        if let Some(ahead) = &self.ahead {
            let nanos = by.min(LONGEST_STEP).as_nanos();
            let nanos = u64::try_from(nanos).unwrap_or(u64::MAX);
            let _ = ahead.fetch_update(Ordering::AcqRel, Ordering::Acquire, |now| {
                Some(now.saturating_add(nanos))
            });
        }
    }
}

/// A point in time of this machine, in ns since some fixed moment. Saturates instead of overflowing. Never
/// zero, so that one which need not be there takes no more room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct MonotonicTime(NonZeroU64);

impl MonotonicTime {
    const fn at_nanos(nanos: u64) -> Self {
        Self(match NonZeroU64::new(nanos) {
            Some(nanos) => nanos,
            None => NonZeroU64::MIN,
        })
    }

    #[cfg(all(unix, not(all(test, shuttle))))]
    pub(crate) fn now() -> Self {
        use rustix::time::{ClockId, clock_gettime};
        // The standard library's Instant stands still while a laptop or a virtual machine sleeps.
        #[cfg(any(target_os = "linux", target_os = "android"))]
        const CLOCK: ClockId = ClockId::Boottime;
        #[cfg(not(any(target_os = "linux", target_os = "android")))]
        const CLOCK: ClockId = ClockId::Monotonic;
        let now = clock_gettime(CLOCK);
        Self::at_nanos(now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64)
    }

    #[cfg(all(test, shuttle))]
    pub(crate) fn now() -> Self {
        // Models begin at a whole tick that there is.
        Self::at_tick(1).after(crate::util::sync::model::now())
    }

    #[cfg(not(any(unix, all(test, shuttle))))]
    pub(crate) fn now() -> Self {
        static START: std::sync::LazyLock<std::time::Instant> =
            std::sync::LazyLock::new(std::time::Instant::now);
        Self::at_nanos(START.elapsed().as_nanos() as u64)
    }

    pub(crate) fn after(self, duration: Duration) -> Self {
        let nanos = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        Self(self.0.saturating_add(nanos))
    }

    pub(crate) fn before(self, duration: Duration) -> Self {
        let nanos = u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
        Self::at_nanos(self.0.get().saturating_sub(nanos))
    }

    /// How long from `earlier` to this moment; zero when that lies ahead.
    pub(crate) fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.get().saturating_sub(earlier.0.get()))
    }

    /// The last whole multiple of `grain` that is not after this moment.
    pub(crate) fn rounded_down(self, grain: Duration) -> Self {
        let grain = u64::try_from(grain.as_nanos()).unwrap_or(u64::MAX).max(1);
        Self::at_nanos(self.0.get() - self.0.get() % grain)
    }

    pub(crate) fn at_tick(tick: u64) -> Self {
        Self::at_nanos(tick.saturating_mul(1_000_000))
    }

    /// The first whole millisecond that is not before this moment.
    pub(crate) fn tick(self) -> u64 {
        self.0.get().div_ceil(1_000_000)
    }

    /// The last whole millisecond that has begun.
    pub(crate) fn past_tick(self) -> u64 {
        self.0.get() / 1_000_000
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_never_fires_before_its_moment() {
        let moment = MonotonicTime::at_nanos(5_000_001);
        assert_eq!((moment.tick(), moment.past_tick()), (6, 5));
        assert_eq!(MonotonicTime::at_nanos(5_000_000).tick(), 5);
    }

    #[test]
    fn moments_are_rounded_down_to_a_grain() {
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
    fn a_movable_clock_is_ahead_by_what_it_was_moved_and_goes_on() {
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
    fn time_goes_on() {
        let before = MonotonicTime::now();
        assert!(MonotonicTime::now() >= before);
    }
}

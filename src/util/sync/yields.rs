//! Decides whether a thread that waits for another thread of the client yields before it parks.
//!
//! The other thread usually runs already and takes a few µs. To park and to be woken takes longer, above all if the
//! core has become idle in between. But a yield gives the rest of the time slice away: if other threads of the machine
//! are busy, the yield returns only after each of them has used its slice of 3 to 4 ms. So the threads of this process
//! stop yielding while yields are slow. After a pause, one thread tries whether yields are fast again.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::util::clock::MonotonicTime;

/// How often a thread yields in one wait. Models try each order of threads, so one yield is enough there.
const MOST: u32 = if cfg!(all(test, shuttle)) { 1 } else { 10 };
/// A yield that takes longer is slow, because it has waited for the time slice of a busy thread. At most one of 10,000
/// yields was slow on two cores that only locks kept busy; at least one of five was slow beside one busy loop per core.
const SLOW: Duration = Duration::from_millis(1);
/// A slow yield adds this number to the score. Each other yield takes one off.
const SLOW_SCORE: u64 = 64;
/// The threads stop yielding when the score reaches this number.
const LIMIT: u64 = 3 * SLOW_SCORE;
/// The pause after which one thread yields again. Each time it finds that yields are still slow, the pause doubles.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
const LONGEST_PAUSE: Duration = Duration::from_secs(16);

/// One `Speed` for the process, since all of its clients share the cores.
static SPEED: Speed = Speed::new();

/// The yields of one wait.
pub struct Yields {
    left: u32,
    /// When the last yield of this wait began.
    yielded_at: Option<MonotonicTime>,
}

impl Yields {
    pub fn new() -> Self {
        Self {
            left: MOST,
            yielded_at: None,
        }
    }

    /// Returns true if the thread has to yield now and to call this again afterwards. Otherwise the thread parks.
    pub fn should_yield(&mut self, now: MonotonicTime) -> bool {
        self.should_yield_at(&SPEED, now)
    }

    fn should_yield_at(&mut self, speed: &Speed, now: MonotonicTime) -> bool {
        if let Some(began) = self.yielded_at.take() {
            speed.record(now.since(began), now);
        }
        if self.left == 0 {
            return false;
        }
        // Time in models moves only when a model moves it.
        if !cfg!(all(test, shuttle)) && !speed.admits_yields(now) {
            self.left = 0;
            return false;
        }
        self.left -= 1;
        self.yielded_at = Some(now);
        true
    }
}

impl Drop for Yields {
    /// Records the yield after which the wait ended.
    fn drop(&mut self) {
        if let Some(began) = self.yielded_at {
            let now = MonotonicTime::now();
            SPEED.record(now.since(began), now);
        }
    }
}

/// Measures how fast the yields of this process are. Threads race to change these numbers, and some changes are lost,
/// which only delays the next change.
struct Speed {
    score: AtomicU64,
    /// The end of the last slow yield that counted, in ns of the clock.
    slow_until: AtomicU64,
    /// Until this time, in ns of the clock, threads park without yielding first. Zero: threads yield first.
    parks_until: AtomicU64,
    /// The length of the next pause, in ns.
    pause: AtomicU64,
}

impl Speed {
    const fn new() -> Self {
        Self {
            score: AtomicU64::new(0),
            slow_until: AtomicU64::new(0),
            parks_until: AtomicU64::new(0),
            pause: AtomicU64::new(nanos(FIRST_PAUSE)),
        }
    }

    /// Whether a thread may yield at `now`. After a pause, only the first thread that asks may yield, until it has
    /// recorded its yield or [`FIRST_PAUSE`] has passed.
    fn admits_yields(&self, now: MonotonicTime) -> bool {
        let until = self.parks_until.load(Ordering::Relaxed);
        if until == 0 {
            return true;
        }
        let next = now.after(FIRST_PAUSE).as_nanos();
        now.as_nanos() >= until
            && self
                .parks_until
                .compare_exchange(until, next, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok()
    }

    /// Records a yield that has ended at `now`.
    fn record(&self, took: Duration, now: MonotonicTime) {
        let score = self.score.load(Ordering::Relaxed);
        if took <= SLOW {
            self.record_fast(score);
            return;
        }
        // If one pause of the machine makes the yields of many threads slow, it counts once.
        let began = now.before(took).as_nanos();
        if began < self.slow_until.load(Ordering::Relaxed) {
            return;
        }
        self.slow_until.store(now.as_nanos(), Ordering::Relaxed);
        let raised = score + SLOW_SCORE;
        if raised < LIMIT {
            self.score.store(raised, Ordering::Relaxed);
            return;
        }
        let pause = self.pause.load(Ordering::Relaxed);
        let until = now.after(Duration::from_nanos(pause)).as_nanos();
        self.parks_until.store(until, Ordering::Relaxed);
        let longer = (2 * pause).min(nanos(LONGEST_PAUSE));
        self.pause.store(longer, Ordering::Relaxed);
        // After the pause, one more slow yield is enough to stop again.
        self.score.store(LIMIT - SLOW_SCORE, Ordering::Relaxed);
    }

    fn record_fast(&self, score: u64) {
        // Usually the score is zero. Then the threads do not write, so each core keeps its copy of the cache line.
        if score > 0 {
            self.score.store(score - 1, Ordering::Relaxed);
        }
        if score == 1 {
            self.pause.store(nanos(FIRST_PAUSE), Ordering::Relaxed);
        }
        if self.parks_until.load(Ordering::Relaxed) != 0 {
            self.parks_until.store(0, Ordering::Relaxed);
        }
    }
}

const fn nanos(duration: Duration) -> u64 {
    duration.as_nanos() as u64
}

#[cfg(all(test, not(shuttle)))]
mod tests {
    use super::*;

    const FAST: Duration = Duration::from_micros(5);
    const SLICE: Duration = Duration::from_millis(4);

    /// Records `count` yields that take `took` each, one after another, and returns the time after them.
    fn record(speed: &Speed, count: u32, took: Duration, from: MonotonicTime) -> MonotonicTime {
        (0..count).fold(from, |now, _| {
            let now = now.after(took);
            speed.record(took, now);
            now
        })
    }

    /// Waits once, and returns the number of yields, which take `took` each, and the time after them.
    fn wait(speed: &Speed, took: Duration) -> (u32, MonotonicTime) {
        let mut now = MonotonicTime::at_tick(1);
        let mut count = 0;
        let mut yields = Yields::new();
        while yields.should_yield_at(speed, now) {
            count += 1;
            now = now.after(took);
        }
        (count, now)
    }

    #[test]
    fn a_wait_yields_ten_times() {
        let speed = Speed::new();
        let (count, end) = wait(&speed, FAST);
        assert_eq!(count, 10);
        assert!(speed.admits_yields(end));
    }

    #[test]
    fn a_wait_beside_busy_threads_parks_after_three_slices() {
        let speed = Speed::new();
        let (count, end) = wait(&speed, SLICE);
        assert_eq!(count, 3);
        assert!(!Yields::new().should_yield_at(&speed, end));
    }

    #[test]
    fn rare_slow_yields_change_nothing() {
        let speed = Speed::new();
        let mut now = MonotonicTime::at_tick(1);
        for _ in 0..100 {
            now = record(&speed, 1, SLICE, now);
            now = record(&speed, SLOW_SCORE as u32, FAST, now);
            assert!(speed.admits_yields(now));
        }
    }

    #[test]
    fn slow_yields_at_the_same_time_count_once() {
        let speed = Speed::new();
        let end = MonotonicTime::at_tick(10);
        for _ in 0..64 {
            speed.record(SLICE, end);
        }
        assert!(speed.admits_yields(end));
        record(&speed, 2, SLICE, end);
        assert!(!speed.admits_yields(end.after(2 * SLICE)));
    }

    #[test]
    fn one_thread_yields_after_a_pause() {
        let speed = Speed::new();
        let stopped = record(&speed, 3, SLICE, MonotonicTime::at_tick(1));
        let end = stopped.after(FIRST_PAUSE);
        assert!(!speed.admits_yields(end.before(FAST)));
        assert!(speed.admits_yields(end));
        assert!(!speed.admits_yields(end), "another thread yields just now");
        speed.record(FAST, end);
        assert!(speed.admits_yields(end) && speed.admits_yields(end));
    }

    #[test]
    fn the_pause_doubles_while_yields_stay_slow() {
        let speed = Speed::new();
        let mut now = record(&speed, 3, SLICE, MonotonicTime::at_tick(1));
        for seconds in [1, 2, 4, 8, 16, 16] {
            let end = now.after(Duration::from_secs(seconds));
            assert!(!speed.admits_yields(end.before(FAST)), "{seconds} s");
            assert!(speed.admits_yields(end), "{seconds} s");
            now = record(&speed, 1, SLICE, end);
        }
        let end = now.after(LONGEST_PAUSE);
        assert!(speed.admits_yields(end));
        // Many fast yields make the next pause short again.
        let now = record(&speed, LIMIT as u32, FAST, end);
        let stopped = record(&speed, 3, SLICE, now);
        assert!(speed.admits_yields(stopped.after(FIRST_PAUSE)));
    }

    #[test]
    fn a_thread_that_never_records_its_yield_is_replaced() {
        let speed = Speed::new();
        let stopped = record(&speed, 3, SLICE, MonotonicTime::at_tick(1));
        let end = stopped.after(FIRST_PAUSE);
        assert!(speed.admits_yields(end));
        assert!(!speed.admits_yields(end.after(FAST)));
        assert!(speed.admits_yields(end.after(FIRST_PAUSE)));
    }
}

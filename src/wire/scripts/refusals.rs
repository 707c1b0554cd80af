//! Records that a server has refused commands of one kind, so that the client does not use them for a while.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use crate::util::clock::MonotonicTime;

/// Refused commands are not used for this time. An ACL or a proxy may change.
const REFUSED_FOR: Duration = Duration::from_secs(600);
/// A proxy may close the connection instead of refusing a command. This many lost trials in a row count as a refusal.
const MOST_LOST_TRIALS: u32 = 3;

/// The time until which refused commands are not used. All connections of a client to the server share this value.
#[derive(Debug, Default)]
pub struct Refusals {
    /// The tick until which the commands are not used; zero before the first refusal.
    until: AtomicU64,
    /// How many connections have ended before the reply to a trial, since the last reply to a trial.
    lost_trials: AtomicU32,
}

impl Refusals {
    /// Whether the commands may be used.
    pub fn allow(&self, now: MonotonicTime) -> bool {
        self.until.load(Ordering::Relaxed) <= now.tick_rounded_down()
    }

    /// The same as [`allow`](Self::allow), but reads the clock only after a refusal.
    pub fn allow_now(&self) -> bool {
        self.until.load(Ordering::Relaxed) == 0 || self.allow(MonotonicTime::now())
    }

    /// Stops the use of the commands for ten minutes.
    pub fn refuse(&self, now: MonotonicTime) {
        let until = now.after(REFUSED_FOR).tick_rounded_up();
        self.until.store(until, Ordering::Relaxed);
    }

    /// Records that the server has replied to a trial.
    pub fn record_reply(&self) {
        self.lost_trials.store(0, Ordering::Relaxed);
    }

    /// Records that a connection has ended before the reply to a trial. If this counts as a refusal, stops the use of
    /// the commands, and returns the number of such connections.
    pub fn record_lost_trial(&self, now: MonotonicTime) -> Option<u32> {
        let lost = self.lost_trials.fetch_add(1, Ordering::Relaxed) + 1;
        let is_refusal = lost >= MOST_LOST_TRIALS;
        if is_refusal {
            self.refuse(now);
        }
        is_refusal.then_some(lost)
    }
}

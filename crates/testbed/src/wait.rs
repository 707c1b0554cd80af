//! Waits for changes that send no event, such as the state of another process. Never waits for longer than
//! `limit`.

use std::thread;
use std::time::{Duration, Instant};

/// Checks `condition` every millisecond until it is true or `limit` has passed; returns false at the limit.
#[must_use = "false means that the condition never came true"]
pub fn eventually(limit: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let start = Instant::now();
    loop {
        // The condition is checked before the clock, so a late wake-up of this thread is no failure.
        if condition() {
            return true;
        }
        if start.elapsed() >= limit {
            return false;
        }
        thread::sleep(Duration::from_millis(1));
    }
}

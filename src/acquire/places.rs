//! The policy for a server with queues: when a waiter asks again, from its place in the queue in Redis.

use std::time::Duration;

use crate::acquire::queue::WaiterGuard;
use crate::acquire::wait::{LONGEST_TRUST, Pace, Place, Retry};
use crate::command::QueuePlace;
use crate::util::backoff::jittered;
use crate::util::clock::MonotonicTime;

/// A waiter asks Redis to track the key when it has been queued in Redis for this time.
const TRACK_AFTER: Duration = Duration::from_millis(20);
/// Only this many waiters at the front of a queue ask Redis to track the key: each of them sends a request at each
/// change of the key.
const TRACKING_WAITERS: u64 = 2;
/// This many waiters at the front of a queue ask at least once in [`LONGEST_TRUST`]. Behind them, the pause grows in
/// proportion to the number of waiters in front, up to [`FAR_TRUST`].
const NEAR: u64 = 8;
/// This many waiters ask at least once in `FAR_TRUST`: if all waiters in front of them are stopped, one of them has to
/// find out soon. Behind them, the pause grows in proportion to the number of waiters in front, so the number of
/// requests grows with the logarithm of the number of waiters.
const FAR: u64 = 128;
const FAR_TRUST: Duration = Duration::from_millis(2500);
/// When the lock has expired, the waiters ask in their order, this far apart. The first request usually serves the
/// queue.
const ASK_APART: Duration = Duration::from_millis(20);
/// Each waiter asks within this time after the lock has expired. The queue's ttl exceeds the lock's by at least ten
/// seconds.
const ASK_LATEST: Duration = Duration::from_secs(5);

/// The policy for a server with queues.
pub struct Places<'a> {
    waiter: &'a WaiterGuard<'a>,
    /// When the key is tracked for the waiter. `None` if the key is tracked already, or the waiter is too far behind.
    track_at: Option<MonotonicTime>,
    ask_at: MonotonicTime,
}

impl<'a> Places<'a> {
    pub fn new(waiter: &'a WaiterGuard<'a>, now: MonotonicTime) -> Self {
        Self {
            waiter,
            track_at: None,
            ask_at: now,
        }
    }
}

/// When a waiter at this place asks again without a notification, if the lock expires at `expires_at`.
pub fn ask_at(queued: QueuePlace, expires_at: MonotonicTime, now: MonotonicTime) -> MonotonicTime {
    let place = u32::try_from(queued.ahead).unwrap_or(u32::MAX);
    let factor = |first: u64| queued.ahead.max(first) as f64 / first as f64;
    let near = LONGEST_TRUST.mul_f64(factor(NEAR));
    let far = FAR_TRUST.mul_f64(factor(FAR));
    let trust = jittered(near.min(far));
    let apart = ASK_APART.saturating_mul(place).min(ASK_LATEST);
    now.after(trust).min(expires_at.after(apart))
}

impl Pace for Places<'_> {
    fn taken(&mut self, place: Place, expires_at: MonotonicTime, now: MonotonicTime) -> Retry {
        (self.track_at, self.ask_at) = match place {
            Place::Notified(queued) => {
                let is_near = queued.ahead < TRACKING_WAITERS;
                let track_at = is_near.then(|| now.after(TRACK_AFTER));
                (track_at, ask_at(queued, expires_at, now))
            }
            Place::Shared(queued) => (None, ask_at(queued, expires_at, now)),
            Place::Full => (None, now.after(jittered(LONGEST_TRUST)).min(expires_at)),
            Place::Silent | Place::None => return Retry::Poll,
        };
        Retry::PAUSE
    }

    fn split_vote(&mut self, _: bool, _: MonotonicTime, _: MonotonicTime) -> Retry {
        Retry::Poll
    }

    fn untracked(&self) -> Retry {
        Retry::Now
    }

    fn wake_at(&self) -> MonotonicTime {
        self.track_at.unwrap_or(self.ask_at).min(self.ask_at)
    }

    fn woken(&mut self, _: MonotonicTime) -> Retry {
        Retry::Now
    }

    fn nudged(&mut self, now: MonotonicTime) {
        let soon = now.after(jittered(LONGEST_TRUST));
        self.ask_at = soon.min(self.ask_at);
    }

    fn slept(&mut self, now: MonotonicTime) -> Retry {
        if now >= self.ask_at {
            return Retry::Now;
        }
        if self.track_at.take_if(|at| *at <= now).is_none() {
            return Retry::PAUSE;
        }
        self.waiter.set_tracked();
        Retry::Track
    }
}

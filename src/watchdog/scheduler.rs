//! The timers of a client, and the queues of the watchdog's workers. The scheduler sends no request, and ends no lease.

#[cfg(test)]
#[cfg(shuttle)]
mod model;
#[cfg(test)]
#[cfg(not(shuttle))]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use crate::lease::{Lease, TimerHandle};
use crate::store::Urgency;
use crate::store::maintenance::MaintenanceDue;
use crate::util::clock::{Clock, MonotonicTime};
use crate::util::mailbox::{Mailbox, Step};
use crate::watchdog::renewals::RenewalQueues;
use crate::watchdog::wheel::{TimerId, Wheel};

/// Roughly the number of due timers that are returned at a time. After the machine was suspended, all timers may be
/// due, and the first leases should not wait until all of them are collected.
const MAX_DUE_TIMERS: usize = 4096;
/// The longest sleep while there are timers. Some systems do not count the time of a suspended machine as sleep, but
/// leases expire during that time.
const LONGEST_SLEEP: Duration = Duration::from_secs(1);

/// Timers, and the queues of the workers.
pub struct Scheduler {
    clock: Clock,
    timers: Mailbox<Timers>,
    pub renewals: RenewalQueues,
    /// The leases whose checks are due. Each has at most one queued or running check, so this queue needs no bound.
    pub checks: Mailbox<Vec<Arc<Lease>>>,
    background: Mailbox<BackgroundWork>,
}

struct Timers {
    /// The leases, each due at its next action or at the end of its validity.
    wheel: Wheel<Option<Arc<Lease>>>,
    /// The tick until which the timer thread sleeps; an earlier timer wakes it.
    asleep_until: u64,
}

/// The work of the thread `leasehold-releases`.
#[derive(Default)]
struct BackgroundWork {
    maintenance: MaintenanceDue,
    /// Leases whose keys have to be tracked.
    to_track: Vec<Arc<Lease>>,
}

impl Scheduler {
    pub fn new(clock: Clock) -> Arc<Self> {
        let timers = Timers {
            wheel: Wheel::new(clock.now().tick_rounded_down()),
            asleep_until: 0,
        };
        Arc::new(Self {
            timers: Mailbox::new(timers),
            clock,
            renewals: RenewalQueues::default(),
            checks: Mailbox::default(),
            background: Mailbox::default(),
        })
    }

    pub fn now(&self) -> MonotonicTime {
        self.clock.now()
    }

    /// Sets the timer of `lease`; `None` once the scheduler has stopped.
    pub fn set_timer(&self, at: MonotonicTime, lease: Arc<Lease>) -> Option<TimerHandle> {
        let tick = at.tick_rounded_up();
        let mut timer = None;
        self.timers.post(|timers| {
            timer = Some(timers.wheel.insert(tick, Some(lease)).into());
            // A cancelled timer does not change the sleep. A lock that is acquired and released again and again must
            // not wake the timer thread each time.
            let is_sooner = tick < timers.asleep_until;
            timers.asleep_until = timers.asleep_until.min(tick);
            is_sooner
        });
        timer
    }

    pub fn cancel_timer(&self, timer: TimerHandle) {
        let cancelled = self
            .timers
            .change(|timers| timers.wheel.cancel(timer.into()));
        drop(cancelled);
    }

    /// Sleeps until timers are due, and returns their leases, about [`MAX_DUE_TIMERS`] at most. Returns `None` once the
    /// scheduler has stopped.
    pub fn wait_for_due_timers(&self) -> Option<Vec<Arc<Lease>>> {
        let mut due = Vec::new();
        let slept = self.timers.wait(|timers| {
            let now = self.now();
            while due.len() < MAX_DUE_TIMERS {
                let next = timers.wheel.next_wake().unwrap_or(u64::MAX);
                timers
                    .wheel
                    .advance(next.min(now.tick_rounded_down()), &mut due);
                if next > now.tick_rounded_down() {
                    break;
                }
            }
            let next = timers.wheel.next_wake();
            timers.asleep_until = match due.is_empty() {
                true => next.unwrap_or(u64::MAX),
                false => 0,
            };
            // In a test, the wheel's clock may be ahead of the clock by which threads sleep.
            let sleep = |tick| {
                let left = MonotonicTime::at_tick(tick).since(now);
                MonotonicTime::now().after(left.min(LONGEST_SLEEP))
            };
            match due.is_empty() {
                true => Step::Sleep(next.map(sleep)),
                false => Step::Return(()),
            }
        });
        slept.map(|()| due.into_iter().flatten().collect())
    }

    /// Returns the leases whose timers are due because a test moved the clock. Also wakes the timer thread, whose
    /// sleep is now too long.
    pub fn take_due_timers(&self) -> Vec<Arc<Lease>> {
        let mut due = Vec::new();
        self.timers.post(|timers| {
            let tick = self.now().tick_rounded_down();
            timers.wheel.advance(tick, &mut due);
            true
        });
        due.into_iter().flatten().collect()
    }

    /// Requests a run of the store's maintenance.
    pub fn request_maintenance(&self, urgency: Urgency) {
        self.background
            .post(|work| work.maintenance.request(urgency));
    }

    /// Queues leases whose keys have to be tracked, until the queue has `room` leases.
    pub fn queue_tracking(&self, mut leases: Vec<Arc<Lease>>, room: usize) {
        self.background.post(|work| {
            let room = room.saturating_sub(work.to_track.len());
            work.to_track.extend(leases.drain(..room.min(leases.len())));
            !work.to_track.is_empty()
        });
    }

    /// Waits for work of the background thread. Returns the leases to track, and whether maintenance is due, or `None`
    /// once the scheduler has stopped.
    pub fn wait_for_background_work(&self) -> Option<(Vec<Arc<Lease>>, bool)> {
        self.background.wait(|work| {
            let is_due = work.maintenance.take();
            match is_due || !work.to_track.is_empty() {
                true => Step::Return((std::mem::take(&mut work.to_track), is_due)),
                false => Step::Sleep(work.maintenance.at()),
            }
        })
    }

    /// Stops the timer thread, and the workers after their current task. Returns the leases that had a timer.
    pub fn stop(&self) -> Vec<Arc<Lease>> {
        let mut leases = Vec::new();
        self.timers
            .stop(|timers| timers.wheel.advance(u64::MAX, &mut leases));
        self.renewals.end();
        // Queued leases are dropped after the unlock: they may own values of users.
        drop(self.checks.stop(std::mem::take));
        drop(self.background.stop(std::mem::take));
        leases.into_iter().flatten().collect()
    }
}

impl From<TimerId> for TimerHandle {
    fn from(id: TimerId) -> Self {
        Self(id.index, id.generation)
    }
}

impl From<TimerHandle> for TimerId {
    fn from(TimerHandle(index, generation): TimerHandle) -> Self {
        Self { index, generation }
    }
}

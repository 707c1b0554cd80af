//! The timers of a client, and the queues of tasks for the watchdog's workers. Sends no request, and ends no lease.

#[cfg(test)]
#[cfg(shuttle)]
mod model;
#[cfg(test)]
#[cfg(not(shuttle))]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, unbounded};

use crate::lease::{Lease, TimerHandle};
use crate::store::{MAINTENANCE_DELAY, Urgency};
use crate::util::clock::{Clock, MonotonicTime};
use crate::util::sync::{AtomicBool, Condvar, Mutex, Ordering};
use crate::watchdog::renewals::RenewalQueues;
use crate::watchdog::wheel::{TimerId, Wheel};

/// Roughly the number of due timers that are returned at a time. After the machine was suspended, all timers may be
/// due, and the first leases should not wait until all of them are collected.
const MAX_DUE_TIMERS: usize = 4096;
/// The longest sleep while there are timers. Some systems do not count the time of a suspended machine as sleep, but
/// leases expire during it.
const LONGEST_SLEEP: Duration = Duration::from_secs(1);

/// The lease whose actions a timer runs, or the store's maintenance.
#[derive(Default)]
pub enum TimerTarget {
    Lease(Arc<Lease>),
    #[default]
    Maintenance,
}

/// A task for the worker that runs checks, or for the worker that tracks keys and runs the store's maintenance.
pub enum Task {
    /// Run the checks, and renew the leases whose checks return true.
    Check(Vec<Arc<Lease>>),
    /// Track the keys of these leases.
    Track(Vec<Arc<Lease>>),
    /// Run the store's maintenance.
    Maintenance,
    Stop,
}

/// The receivers of the workers' tasks.
pub struct Inboxes {
    pub checks: Receiver<Task>,
    pub releases: Receiver<Task>,
}

/// Timers, the queues of renewals, and the queues of tasks.
pub struct Scheduler {
    clock: Clock,
    timers: Mutex<Timers>,
    changed: Condvar,
    pub renewals: RenewalQueues,
    checks: Sender<Task>,
    /// The queue of the thread `leasehold-releases`, which tracks keys and runs the store's maintenance.
    releases: Sender<Task>,
    maintenance_soon: AtomicBool,
    maintenance_now: AtomicBool,
}

struct Timers {
    wheel: Wheel<TimerTarget>,
    /// The tick until which the timer thread sleeps; an earlier timer wakes it.
    asleep_until: u64,
    stopped: bool,
}

impl Scheduler {
    pub fn new(clock: Clock) -> (Arc<Self>, Inboxes) {
        // Other limits bound both queues: each lease has at most one check in the queue, leases to track are counted,
        // and a flag prevents a second request for maintenance.
        let (checks, for_checks) = unbounded();
        let (releases, for_releases) = unbounded();
        let inboxes = Inboxes {
            checks: for_checks,
            releases: for_releases,
        };
        let scheduler = Arc::new(Self {
            timers: Mutex::new(Timers {
                wheel: Wheel::new(clock.now().tick_rounded_down()),
                asleep_until: 0,
                stopped: false,
            }),
            clock,
            changed: Condvar::new(),
            renewals: RenewalQueues::default(),
            checks,
            releases,
            maintenance_soon: AtomicBool::new(false),
            maintenance_now: AtomicBool::new(false),
        });
        (scheduler, inboxes)
    }

    pub fn now(&self) -> MonotonicTime {
        self.clock.now()
    }

    /// Sets a timer; `None` once the scheduler has stopped.
    pub fn set_timer(&self, at: MonotonicTime, target: TimerTarget) -> Option<TimerHandle> {
        let tick = at.tick_rounded_up();
        let mut timers = self.timers.lock();
        if timers.stopped {
            return None;
        }
        let id = timers.wheel.insert(tick, target);
        // A cancelled timer does not change the sleep. A lock that is acquired and released again and again must not
        // wake the timer thread each time.
        if tick < timers.asleep_until {
            timers.asleep_until = tick;
            self.changed.notify_one();
        }
        Some(id.into())
    }

    pub fn cancel_timer(&self, timer: TimerHandle) {
        let cancelled = self.timers.lock().wheel.cancel(timer.into());
        drop(cancelled);
    }

    pub fn queue_task(&self, task: Task) {
        let worker = match task {
            Task::Check(_) => &self.checks,
            Task::Track(_) | Task::Maintenance | Task::Stop => &self.releases,
        };
        // Fails only once the worker has ended.
        let _ = worker.send(task);
    }

    /// Sleeps until timers are due, and returns them, about [`MAX_DUE_TIMERS`] at most. Returns `None` once the
    /// scheduler has stopped.
    pub fn wait_for_due_timers(&self) -> Option<Vec<TimerTarget>> {
        let mut due = Vec::new();
        let mut timers = self.timers.lock();
        loop {
            if timers.stopped {
                return None;
            }
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
            if !due.is_empty() {
                timers.asleep_until = 0;
                return Some(due);
            }
            match timers.wheel.next_wake() {
                None => {
                    timers.asleep_until = u64::MAX;
                    self.changed.wait(&mut timers);
                }
                Some(tick) => {
                    timers.asleep_until = tick;
                    let sleep = MonotonicTime::at_tick(tick).since(now).min(LONGEST_SLEEP);
                    self.changed.wait_for(&mut timers, sleep);
                }
            }
        }
    }

    /// Returns the timers that are due because a test moved the clock. Also wakes the timer thread, whose sleep is now
    /// too long.
    pub fn take_due_timers(&self) -> Vec<TimerTarget> {
        let mut due = Vec::new();
        let mut timers = self.timers.lock();
        timers
            .wheel
            .advance(self.now().tick_rounded_down(), &mut due);
        self.changed.notify_one();
        due
    }

    /// Requests a run of the store's maintenance, now or soon, unless a request of this urgency is pending.
    pub fn request_maintenance(&self, urgency: Urgency) {
        match urgency {
            Urgency::Soon => {
                if !self.maintenance_soon.swap(true, Ordering::AcqRel) {
                    self.set_timer(
                        self.now().after(MAINTENANCE_DELAY),
                        TimerTarget::Maintenance,
                    );
                }
            }
            Urgency::Now => {
                if !self.maintenance_now.swap(true, Ordering::AcqRel) {
                    self.queue_task(Task::Maintenance);
                }
            }
        }
    }

    /// Queues the maintenance for which the timer of [`Urgency::Soon`] was set, and clears the request for it. A run
    /// with
    /// [`Urgency::Now`] does not clear that request, because the timer is still set: the next request would set a second one.
    pub fn start_due_maintenance(&self) {
        self.maintenance_soon.store(false, Ordering::Release);
        self.request_maintenance(Urgency::Now);
    }

    /// Clears the request for urgent maintenance, so that the next request queues a run.
    pub fn clear_urgent_maintenance(&self) {
        self.maintenance_now.store(false, Ordering::Release);
    }

    /// Stops the timer thread, and the workers after their current task. Returns the leases that had a timer.
    pub fn stop(&self) -> Vec<Arc<Lease>> {
        let mut targets = Vec::new();
        {
            let mut timers = self.timers.lock();
            timers.stopped = true;
            timers.wheel.advance(u64::MAX, &mut targets);
            self.changed.notify_all();
        }
        self.renewals.end();
        for worker in [&self.checks, &self.releases] {
            let _ = worker.send(Task::Stop);
        }
        let leases = targets.into_iter().filter_map(|target| match target {
            TimerTarget::Lease(lease) => Some(lease),
            TimerTarget::Maintenance => None,
        });
        leases.collect()
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

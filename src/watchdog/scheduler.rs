//! What is to be done, and when: the wheel with its sleeping timer thread, and the queues of jobs for
//! the workers. Does none of it itself, and no I/O.

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
use crate::store::Urgency;
use crate::util::clock::{Clock, MonotonicTime};
use crate::util::sync::{AtomicBool, Condvar, Mutex, Ordering};
use crate::watchdog::renewals::{Renewals, Work};
use crate::watchdog::wheel::{TimerId, Wheel};

/// How soon what a store owes is seen to.
const MAINTENANCE_AFTER: Duration = Duration::from_millis(100);
/// So many timers are enough for one look: after a sleep of the machine all of them are due, and the first
/// leases should not wait for the last to be gathered.
const AT_ONCE: usize = 4096;
/// Longest sleep while there are timers. The thread sleeps by a clock that may stand still while
/// the machine is suspended; leases end by one that does not.
const LONGEST_SLEEP: Duration = Duration::from_secs(1);

#[derive(Default)]
pub(crate) enum Timer {
    Lease(Arc<Lease>),
    #[default]
    Maintenance,
}

pub(crate) enum Job {
    /// Renew those whose check says so.
    Check(Vec<Arc<Lease>>),
    Track(Vec<Arc<Lease>>),
    Maintenance,
    Stop,
}

/// Where the workers find their jobs.
pub(crate) struct Inboxes {
    pub(crate) checks: Receiver<Job>,
    pub(crate) releases: Receiver<Job>,
}

pub(crate) struct Scheduler {
    clock: Clock,
    timers: Mutex<Timers>,
    changed: Condvar,
    renewals: Renewals,
    checks: Sender<Job>,
    releases: Sender<Job>,
    maintenance_soon: AtomicBool,
    maintenance_now: AtomicBool,
}

struct Timers {
    wheel: Wheel<Timer>,
    /// The tick until which the timer thread sleeps; an earlier timer wakes it.
    asleep_until: u64,
    stopped: bool,
}

impl Scheduler {
    pub(crate) fn new(clock: Clock) -> (Arc<Self>, Inboxes) {
        // Checks are bounded by the leases, as renewals are. Of the other kind there are a few at most: flags
        // keep each from being given twice.
        let (checks, for_checks) = unbounded();
        let (releases, for_releases) = unbounded();
        let inboxes = Inboxes {
            checks: for_checks,
            releases: for_releases,
        };
        let scheduler = Arc::new(Self {
            timers: Mutex::new(Timers {
                wheel: Wheel::new(clock.now().past_tick()),
                asleep_until: 0,
                stopped: false,
            }),
            clock,
            changed: Condvar::new(),
            renewals: Renewals::default(),
            checks,
            releases,
            maintenance_soon: AtomicBool::new(false),
            maintenance_now: AtomicBool::new(false),
        });
        (scheduler, inboxes)
    }

    /// What time it is for all that is on the scheduler.
    pub(crate) fn now(&self) -> MonotonicTime {
        self.clock.now()
    }

    /// Nothing once stopped.
    pub(crate) fn set(&self, at: MonotonicTime, timer: Timer) -> Option<TimerHandle> {
        let tick = at.tick();
        let mut timers = self.timers.lock();
        if timers.stopped {
            return None;
        }
        let id = timers.wheel.insert(tick, timer);
        // Cancelled timers leave the sleep as it is, so a lock taken and let go again and again
        // does not wake the thread each time.
        if tick < timers.asleep_until {
            timers.asleep_until = tick;
            self.changed.notify_one();
        }
        Some(id.into())
    }

    pub(crate) fn cancel(&self, note: TimerHandle) {
        let cancelled = self.timers.lock().wheel.cancel(note.into());
        drop(cancelled);
    }

    pub(crate) fn give(&self, job: Job) {
        let worker = match job {
            Job::Check(_) => &self.checks,
            Job::Track(_) | Job::Maintenance | Job::Stop => &self.releases,
        };
        // Fails only once the worker has ended.
        let _ = worker.send(job);
    }

    /// Has the workers renew `leases`.
    pub(crate) fn renew(&self, leases: Vec<Arc<Lease>>) {
        self.renewals.add(leases);
    }

    /// Queues `lease` for a worker that asks whether it is held.
    pub(crate) fn queue_confirmation(&self, lease: Arc<Lease>) {
        self.renewals.queue_confirmation(lease);
    }

    /// As [`queue_confirmation`](Self::queue_confirmation), for one that a message says was taken away.
    pub(crate) fn queue_force_confirmation(&self, lease: Arc<Lease>) {
        self.renewals.queue_force_confirmation(lease);
    }

    /// Acquirer for leases that are to be renewed or confirmed together; nothing once stopped.
    pub(crate) fn next_renewals(&self) -> Option<Work> {
        self.renewals.next()
    }

    /// Sleeps until something is due, and returns that, or the first part of it; nothing once stopped.
    pub(crate) fn next(&self) -> Option<Vec<Timer>> {
        let mut due = Vec::new();
        let mut timers = self.timers.lock();
        loop {
            if timers.stopped {
                return None;
            }
            let now = self.now();
            while due.len() < AT_ONCE {
                let next = timers.wheel.next_wake().unwrap_or(u64::MAX);
                timers.wheel.advance(next.min(now.past_tick()), &mut due);
                if next > now.past_tick() {
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

    /// What is due now, if the clock was moved. The timer thread sleeps by it anew.
    pub(crate) fn due(&self) -> Vec<Timer> {
        let mut due = Vec::new();
        let mut timers = self.timers.lock();
        timers.wheel.advance(self.now().past_tick(), &mut due);
        self.changed.notify_one();
        due
    }

    /// A store wants to be seen to.
    pub(crate) fn request_maintenance(&self, urgency: Urgency) {
        match urgency {
            Urgency::Soon => {
                if !self.maintenance_soon.swap(true, Ordering::AcqRel) {
                    self.set(self.now().after(MAINTENANCE_AFTER), Timer::Maintenance);
                }
            }
            Urgency::Now => {
                if !self.maintenance_now.swap(true, Ordering::AcqRel) {
                    self.give(Job::Maintenance);
                }
            }
        }
    }

    /// From here on a store that wants to be seen to has to say so again.
    pub(crate) fn maintenance_begins(&self) {
        self.maintenance_soon.store(false, Ordering::Release);
        self.maintenance_now.store(false, Ordering::Release);
    }

    /// Ends the timer thread, and the workers after the job in hand. Returns all leases that were
    /// being tracked.
    pub(crate) fn stop(&self) -> Vec<Arc<Lease>> {
        let mut tracked = Vec::new();
        {
            let mut timers = self.timers.lock();
            timers.stopped = true;
            timers.wheel.advance(u64::MAX, &mut tracked);
            self.changed.notify_all();
        }
        self.renewals.end();
        for worker in [&self.checks, &self.releases] {
            let _ = worker.send(Job::Stop);
        }
        let leases = tracked.into_iter().filter_map(|timer| match timer {
            Timer::Lease(lease) => Some(lease),
            Timer::Maintenance => None,
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

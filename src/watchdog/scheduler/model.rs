//! Models of the scheduler: timers that are set and cancelled while the timer thread sleeps, and requests for
//! maintenance.

use std::sync::atomic::AtomicUsize;

use shuttle::sync::atomic::AtomicU32;
use shuttle::thread;

use super::*;
use crate::util::sync::model::{chance, check, choice, pass, quiet, sleep};

const RUNS: usize = 600;
const STEP: Duration = Duration::from_millis(100);
const STEPS: u32 = 8;
const SETTERS: usize = 3;

/// Sets timers at several times, and cancels some at once. Adds the times of the timers that stay to `left`.
fn set_timers(scheduler: &Scheduler, left: &parking_lot::Mutex<Vec<MonotonicTime>>) {
    for _ in 0..2 {
        sleep(choice(3) as u32 * STEP);
        let at = MonotonicTime::now().after(choice(4) as u32 * STEP);
        let timer = scheduler
            .set_timer(at, TimerTarget::Maintenance)
            .expect("the scheduler runs");
        // A timer that is due may have fired before the cancel.
        if at > MonotonicTime::now() && chance(2) {
            scheduler.cancel_timer(timer);
        } else {
            left.lock().push(at);
        }
    }
}

#[test]
fn model_timers_fire_on_time_unless_cancelled() {
    check(RUNS, || {
        let (scheduler, _inboxes) = Scheduler::new(Clock::default());
        let left = parking_lot::Mutex::new(Vec::new());
        let found = AtomicUsize::new(0);
        let setting = AtomicUsize::new(SETTERS);
        thread::scope(|scope| {
            scope.spawn(|| {
                while let Some(due) = scheduler.wait_for_due_timers() {
                    found.fetch_add(due.len(), Ordering::SeqCst);
                }
            });
            for _ in 0..SETTERS {
                scope.spawn(|| {
                    set_timers(&scheduler, &left);
                    setting.fetch_sub(1, Ordering::SeqCst);
                });
            }
            for _ in 0..STEPS {
                quiet(|| 1 + setting.load(Ordering::SeqCst));
                let due = |at: &&MonotonicTime| **at <= MonotonicTime::now();
                assert_eq!(
                    found.load(Ordering::SeqCst),
                    left.lock().iter().filter(due).count()
                );
                pass(STEP);
            }
            assert!(scheduler.stop().is_empty());
        });
        assert!(
            scheduler
                .set_timer(MonotonicTime::now(), TimerTarget::Maintenance)
                .is_none()
        );
    });
}

#[test]
fn model_a_request_during_maintenance_runs_it_again() {
    check(RUNS, || {
        let (scheduler, inboxes) = Scheduler::new(Clock::default());
        let requests = AtomicU32::new(0);
        let requesting = AtomicUsize::new(3);
        // All requests have the same urgency, since a run for one urgency could hide that a run for the other is
        // missing.
        let soon = chance(2);
        let run_maintenance = || {
            scheduler.clear_urgent_maintenance();
            requests.swap(0, Ordering::SeqCst);
        };
        thread::scope(|scope| {
            scope.spawn(|| {
                while let Some(due) = scheduler.wait_for_due_timers() {
                    due.iter().for_each(|_| scheduler.start_due_maintenance());
                }
            });
            let worker = scope.spawn(|| {
                loop {
                    match inboxes.releases.try_recv() {
                        Ok(Task::Stop) => return,
                        Ok(_) => run_maintenance(),
                        Err(_) => sleep(STEP),
                    }
                }
            });
            for _ in 0..3 {
                scope.spawn(|| {
                    sleep(choice(3) as u32 * MAINTENANCE_DELAY);
                    requests.fetch_add(1, Ordering::SeqCst);
                    scheduler.request_maintenance(if soon { Urgency::Soon } else { Urgency::Now });
                    requesting.fetch_sub(1, Ordering::SeqCst);
                });
            }
            let all_sleep = || quiet(|| 2 + requesting.load(Ordering::SeqCst));
            for _ in 0..5 {
                all_sleep();
                pass(MAINTENANCE_DELAY);
            }
            all_sleep();
            assert_eq!(requests.load(Ordering::SeqCst), 0, "a request was lost");
            scheduler.stop();
            pass(STEP);
            worker.join().unwrap();
        });
    });
}

//! Models of the scheduler: timers that are set and cancelled while the timer thread sleeps, and requests for
//! maintenance.

use std::sync::atomic::{AtomicUsize, Ordering};

use shuttle::sync::atomic::AtomicU32;
use shuttle::thread;

use super::*;
use crate::config::key::Key;
use crate::lease::{CallbackExecutor, Grant};
use crate::store::MAINTENANCE_DELAY;
use crate::util::sync::model::{chance, check, choice, pass, quiet, sleep};

const RUNS: usize = 600;
const STEP: Duration = Duration::from_millis(100);
const STEPS: u32 = 8;
const SETTERS: usize = 3;

fn lease() -> Arc<Lease> {
    let (callbacks, _deliver) = CallbackExecutor::for_model();
    let grant = Grant::usual(Key::new("", "k", 16).unwrap(), MonotonicTime::now());
    Arc::new(Lease::new(grant, callbacks, None))
}

/// Sets timers at several times, and cancels some at once. Adds the times of the timers that stay to `left`.
fn set_timers(
    scheduler: &Scheduler,
    lease: &Arc<Lease>,
    left: &parking_lot::Mutex<Vec<MonotonicTime>>,
) {
    for _ in 0..2 {
        sleep(choice(3) as u32 * STEP);
        let at = MonotonicTime::now().after(choice(4) as u32 * STEP);
        let timer = scheduler
            .set_timer(at, Arc::clone(lease))
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
        let (scheduler, lease) = (Scheduler::new(Clock::default()), lease());
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
                    set_timers(&scheduler, &lease, &left);
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
        assert!(scheduler.set_timer(MonotonicTime::now(), lease).is_none());
    });
}

#[test]
fn model_a_request_during_maintenance_runs_it_again() {
    check(RUNS, || {
        let scheduler = Scheduler::new(Clock::default());
        let requests = AtomicU32::new(0);
        let requesting = AtomicUsize::new(3);
        // All requests have the same urgency, since a run for one urgency could hide that a run for the other is
        // missing.
        let soon = chance(2);
        thread::scope(|scope| {
            scope.spawn(|| {
                while scheduler.wait_for_background_work().is_some() {
                    requests.swap(0, Ordering::SeqCst);
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
            let all_sleep = || quiet(|| 1 + requesting.load(Ordering::SeqCst));
            for _ in 0..5 {
                all_sleep();
                pass(MAINTENANCE_DELAY);
            }
            all_sleep();
            assert_eq!(requests.load(Ordering::SeqCst), 0, "a request was lost");
            scheduler.stop();
        });
    });
}

//! A model of the scheduler alone: timers set and cancelled while the timer thread sleeps, and what it
//! wakes for.

use std::sync::atomic::AtomicUsize;

use shuttle::sync::atomic::AtomicU32;
use shuttle::thread;

use super::*;
use crate::util::sync::model::{chance, check, choice, pass, quiet, sleep};

const RUNS: usize = 600;
const STEP: Duration = Duration::from_millis(100);
const STEPS: u32 = 8;
const SETTERS: usize = 3;

/// Sets timers at several times, for several times; some are cancelled at once. Notes the others.
fn set_timers(scheduler: &Scheduler, noted: &parking_lot::Mutex<Vec<MonotonicTime>>) {
    for _ in 0..2 {
        sleep(choice(3) as u32 * STEP);
        let at = MonotonicTime::now().after(choice(4) as u32 * STEP);
        let note = scheduler.set(at, Timer::Maintenance).expect("it goes on");
        // One that is due already may have been found before.
        if at > MonotonicTime::now() && chance(2) {
            scheduler.cancel(note);
        } else {
            noted.lock().push(at);
        }
    }
}

#[test]
fn model_each_timer_is_found_when_its_time_comes_and_a_cancelled_one_never() {
    check(RUNS, || {
        let (scheduler, _inboxes) = Scheduler::new(Clock::default());
        let noted = parking_lot::Mutex::new(Vec::new());
        let found = AtomicUsize::new(0);
        let setting = AtomicUsize::new(SETTERS);
        thread::scope(|scope| {
            scope.spawn(|| {
                while let Some(due) = scheduler.next() {
                    found.fetch_add(due.len(), Ordering::SeqCst);
                }
            });
            for _ in 0..SETTERS {
                scope.spawn(|| {
                    set_timers(&scheduler, &noted);
                    setting.fetch_sub(1, Ordering::SeqCst);
                });
            }
            for _ in 0..STEPS {
                quiet(|| 1 + setting.load(Ordering::SeqCst));
                let due = |at: &&MonotonicTime| **at <= MonotonicTime::now();
                assert_eq!(
                    found.load(Ordering::SeqCst),
                    noted.lock().iter().filter(due).count()
                );
                pass(STEP);
            }
            assert!(scheduler.stop().is_empty());
        });
        assert!(
            scheduler
                .set(MonotonicTime::now(), Timer::Maintenance)
                .is_none()
        );
    });
}

#[test]
fn model_a_store_that_rings_while_it_is_seen_to_is_seen_to_again() {
    check(RUNS, || {
        let (scheduler, inboxes) = Scheduler::new(Clock::default());
        let owed = AtomicU32::new(0);
        let ringing = AtomicUsize::new(3);
        // One kind only, so that neither makes up for the other.
        let soon = chance(2);
        let run_maintenance = || {
            scheduler.maintenance_begins();
            owed.swap(0, Ordering::SeqCst);
        };
        thread::scope(|scope| {
            scope.spawn(|| {
                while let Some(due) = scheduler.next() {
                    due.iter().for_each(|_| scheduler.give(Job::Maintenance));
                }
            });
            let worker = scope.spawn(|| {
                loop {
                    match inboxes.releases.try_recv() {
                        Ok(Job::Stop) => return,
                        Ok(_) => run_maintenance(),
                        Err(_) => sleep(STEP),
                    }
                }
            });
            for _ in 0..3 {
                scope.spawn(|| {
                    sleep(choice(3) as u32 * MAINTENANCE_AFTER);
                    owed.fetch_add(1, Ordering::SeqCst);
                    scheduler.request_maintenance(if soon { Urgency::Soon } else { Urgency::Now });
                    ringing.fetch_sub(1, Ordering::SeqCst);
                });
            }
            let all_sleep = || quiet(|| 2 + ringing.load(Ordering::SeqCst));
            for _ in 0..5 {
                all_sleep();
                pass(MAINTENANCE_AFTER);
            }
            all_sleep();
            assert_eq!(owed.load(Ordering::SeqCst), 0, "it rang in vain");
            scheduler.stop();
            pass(STEP);
            worker.join().unwrap();
        });
    });
}

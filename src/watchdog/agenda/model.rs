//! A model of the agenda alone: timers set and cancelled while the timer thread sleeps, and what it
//! wakes for.

use std::sync::atomic::AtomicUsize;

use shuttle::sync::atomic::AtomicU32;
use shuttle::thread;

use super::*;
use crate::sync::model::{chance, check, choice, pass, quiet, sleep};

const RUNS: usize = 600;
const STEP: Duration = Duration::from_millis(100);
const STEPS: u32 = 8;
const SETTERS: usize = 3;

/// Sets timers at several times, for several times; some are cancelled at once. Notes the others.
fn set_timers(agenda: &Agenda, noted: &parking_lot::Mutex<Vec<Moment>>) {
    for _ in 0..2 {
        sleep(choice(3) as u32 * STEP);
        let at = Moment::now().after(choice(4) as u32 * STEP);
        let note = agenda.set(at, Timer::Settle).expect("it goes on");
        // One that is due already may have been found before.
        if at > Moment::now() && chance(2) {
            agenda.cancel(note);
        } else {
            noted.lock().push(at);
        }
    }
}

#[test]
fn model_each_timer_is_found_when_its_time_comes_and_a_cancelled_one_never() {
    check(RUNS, || {
        let (agenda, _inboxes) = Agenda::new(Clock::default());
        let noted = parking_lot::Mutex::new(Vec::new());
        let found = AtomicUsize::new(0);
        let setting = AtomicUsize::new(SETTERS);
        thread::scope(|scope| {
            scope.spawn(|| {
                while let Some(due) = agenda.next() {
                    found.fetch_add(due.len(), Ordering::SeqCst);
                }
            });
            for _ in 0..SETTERS {
                scope.spawn(|| {
                    set_timers(&agenda, &noted);
                    setting.fetch_sub(1, Ordering::SeqCst);
                });
            }
            for _ in 0..STEPS {
                quiet(|| 1 + setting.load(Ordering::SeqCst));
                let due = |at: &&Moment| **at <= Moment::now();
                assert_eq!(
                    found.load(Ordering::SeqCst),
                    noted.lock().iter().filter(due).count()
                );
                pass(STEP);
            }
            assert!(agenda.stop().is_empty());
        });
        assert!(agenda.set(Moment::now(), Timer::Settle).is_none());
    });
}

#[test]
fn model_a_store_that_rings_while_it_is_seen_to_is_seen_to_again() {
    check(RUNS, || {
        let (agenda, inboxes) = Agenda::new(Clock::default());
        let owed = AtomicU32::new(0);
        let ringing = AtomicUsize::new(3);
        // One kind only, so that neither makes up for the other.
        let soon = chance(2);
        let settle = || {
            agenda.answer();
            owed.swap(0, Ordering::SeqCst);
        };
        thread::scope(|scope| {
            scope.spawn(|| {
                while let Some(due) = agenda.next() {
                    due.iter().for_each(|_| agenda.give(Job::Settle));
                }
            });
            let worker = scope.spawn(|| {
                loop {
                    match inboxes.releases.try_recv() {
                        Ok(Job::Stop) => return,
                        Ok(_) => settle(),
                        Err(_) => sleep(STEP),
                    }
                }
            });
            for _ in 0..3 {
                scope.spawn(|| {
                    sleep(choice(3) as u32 * SETTLE_AFTER);
                    owed.fetch_add(1, Ordering::SeqCst);
                    agenda.ring(if soon { Chore::Soon } else { Chore::Now });
                    ringing.fetch_sub(1, Ordering::SeqCst);
                });
            }
            let all_sleep = || quiet(|| 2 + ringing.load(Ordering::SeqCst));
            for _ in 0..5 {
                all_sleep();
                pass(SETTLE_AFTER);
            }
            all_sleep();
            assert_eq!(owed.load(Ordering::SeqCst), 0, "it rang in vain");
            agenda.stop();
            pass(STEP);
            worker.join().unwrap();
        });
    });
}

//! Tests of the steps of a wait, without a store or a clock: a test sets each time, refusal and wake-up.

use super::*;
use crate::acquire::places::Places;
use crate::acquire::queue::{LocalQueues, WaiterGuard};
use crate::config::key::Key;
use crate::lease::Options;
use crate::util::clock::Clock;

pub const COMMAND_TIMEOUT: Duration = Duration::from_secs(60);
pub const OUTAGE_TIMEOUT: Duration = Duration::from_secs(600);
const SECOND: Duration = Duration::from_secs(1);

pub fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

pub fn call(until: Until, started: MonotonicTime) -> Call {
    Call::new(until, started, COMMAND_TIMEOUT, OUTAGE_TIMEOUT)
}

/// A wait, with the time of its next step.
pub struct Machine<P> {
    pub wait: Wait<P>,
    pub now: MonotonicTime,
    /// The step that ended the last sleep.
    chosen: Option<Step>,
}

impl<P: Pace> Machine<P> {
    pub fn new(call: Call, pace: P) -> Self {
        Self {
            wait: Wait::new(call, pace, call.started),
            now: call.started,
            chosen: None,
        }
    }

    pub fn step_at(&mut self, position: &QueuePosition) -> Step {
        self.wait.next(self.now, position, None)
    }

    /// The next step of the first waiter.
    pub fn step(&mut self) -> Step {
        let chosen = self.chosen.take();
        chosen.unwrap_or_else(|| self.step_at(&QueuePosition::First))
    }

    /// Refuses an acquire. Panics if the waiter does not ask now.
    #[track_caller]
    pub fn refuse(&mut self, refusal: Refusal) {
        let step = self.step();
        assert!(matches!(step, Step::Ask { .. }), "{step:?}");
        self.wait.refused(refusal, self.now);
    }

    /// Returns how long the waiter sleeps. Panics if it does not sleep.
    #[track_caller]
    pub fn sleeps_for(&mut self) -> Duration {
        match self.step() {
            Step::Sleep(until) => until.since(self.now),
            step => panic!("{step:?}"),
        }
    }

    /// Carries out [`Step::Track`]. Panics if this is not the waiter's step.
    #[track_caller]
    pub fn track(&mut self, is_tracked: bool) {
        let step = self.step();
        assert!(matches!(step, Step::Track), "{step:?}");
        self.wait.tracked(is_tracked);
    }

    pub fn wake(&mut self, reason: WakeReason) {
        self.wait.woken(reason, self.now);
    }

    /// Sleeps until the waiter has something to do. Returns for how long.
    pub fn sleep(&mut self) -> Duration {
        let from = self.now;
        loop {
            match self.step() {
                Step::Sleep(until) => self.now = until,
                step => {
                    self.chosen = Some(step);
                    return self.now.since(from);
                }
            }
            self.wake(WakeReason::TimedOut);
        }
    }

    /// Whether the waiter stops now without an error.
    pub fn gives_up(&mut self) -> bool {
        matches!(self.step(), Step::GiveUp(Ok(())))
    }
}

pub fn taken(expires_in: Duration, place: Place) -> Refusal {
    Refusal::Taken { expires_in, place }
}

fn behind(ahead: u64) -> Place {
    Place::Notified(QueuePlace { ahead, since: 0 })
}

fn unavailable(since: MonotonicTime) -> CurrentOutage {
    let error = Error::new(ErrorKind::Unavailable, "");
    CurrentOutage::new(since, since, error)
}

/// Runs `test` with the wait of the first waiter of a server with queues.
fn places(until: impl FnOnce(MonotonicTime) -> Until, test: impl FnOnce(Machine<Places<'_>>)) {
    let queues = LocalQueues::new(Clock::default());
    let key = Key::new("", "k", 16).unwrap();
    let waiter: WaiterGuard<'_> = queues.join(&key, Options::USUAL, None);
    let start = MonotonicTime::now();
    test(Machine::new(
        call(until(start), start),
        Places::new(&waiter, start),
    ));
}

#[test]
fn first_two_queued_waiters_track_the_key() {
    for ahead in 0..4 {
        places(
            |_| Until::Forever,
            |mut it| {
                it.refuse(taken(30 * SECOND, behind(ahead)));
                let slept = it.sleep();
                if ahead >= 2 {
                    assert!((ms(500)..=SECOND).contains(&slept), "{slept:?}");
                    return it.refuse(taken(SECOND, behind(0)));
                }
                assert_eq!(slept, ms(20));
                it.track(true);
                assert!((ms(480)..=ms(980)).contains(&it.sleep()), "once only");
                it.refuse(taken(SECOND, behind(0)));
                it.sleep();
                it.track(false);
                it.refuse(taken(SECOND, behind(0)));
            },
        );
    }
}

#[test]
fn queued_waiter_asks_sooner_after_a_nudge_or_wakeup() {
    places(
        |_| Until::Forever,
        |mut it| {
            it.refuse(taken(30 * SECOND, behind(1000)));
            assert!(it.sleeps_for() > 2 * SECOND);
            it.wake(WakeReason::Nudged);
            assert!((ms(500)..=SECOND).contains(&it.sleeps_for()));
            it.now = it.now.after(ms(1));
            it.wake(WakeReason::Woken);
            it.refuse(taken(30 * SECOND, Place::Full));
            assert!((ms(500)..=SECOND).contains(&it.sleep()));
            it.refuse(taken(ms(7), Place::Full));
            assert_eq!(it.sleep(), ms(8), "the lock expires");
        },
    );
}

#[test]
fn polls_double_until_a_wakeup() {
    places(
        |_| Until::Forever,
        |mut it| {
            for nominal in [1, 2, 4, 8, 16, 32, 50, 50] {
                it.refuse(taken(30 * SECOND, Place::Silent));
                assert!(it.sleep() <= ms(nominal));
            }
            it.refuse(taken(ms(3), Place::Silent));
            assert_eq!(it.sleep(), ms(4), "the lock expires");
            for nominal in [100, 200, 250, 250] {
                it.refuse(Refusal::Unavailable(unavailable(it.now)));
                let slept = it.sleep();
                assert!(slept >= ms(nominal / 2) && slept <= ms(nominal));
            }
            it.refuse(taken(30 * SECOND, Place::None));
            assert!((ms(25)..=ms(50)).contains(&it.sleeps_for()));
            it.wake(WakeReason::Woken);
            it.refuse(taken(30 * SECOND, Place::Silent));
            assert!(it.sleep() <= ms(1));
            it.refuse(Refusal::MissingEntry);
            it.refuse(taken(30 * SECOND, Place::Silent));
        },
    );
}

#[test]
fn waiter_behind_others_ends_without_an_attempt() {
    places(
        |now| Until::At(now.after(SECOND)),
        |mut it| {
            let Step::Sleep(until) = it.step_at(&QueuePosition::Behind) else {
                panic!("it must not ask")
            };
            assert_eq!(until.since(it.now), SECOND);
            it.now = until;
            it.wake(WakeReason::TimedOut);
            assert!(it.gives_up());
        },
    );
}

#[test]
fn only_try_lock_asks_beside_a_holder_of_its_client() {
    let held = QueuePosition::Held(ms(5));
    places(
        |_| Until::Now,
        |mut it| assert!(matches!(it.step_at(&held), Step::Ask { .. })),
    );
    places(Until::At, |mut it| {
        assert!(matches!(it.step(), Step::Ask { .. }), "one attempt")
    });
    places(
        |_| Until::Forever,
        |mut it| match it.step_at(&held) {
            Step::Sleep(until) => assert_eq!(until.since(it.now), ms(5)),
            step => panic!("{step:?}"),
        },
    );
}

/// The waiter has failed once. Then another thread of its client got the lock, for example by an adoption.
#[test]
fn waiter_behind_a_holder_ignores_old_outages() {
    places(
        |now| Until::At(now.after(900 * SECOND)),
        |mut it| {
            it.refuse(Refusal::Unavailable(unavailable(it.now)));
            it.now = it.now.after(900 * SECOND);
            let held = QueuePosition::Held(SECOND);
            assert!(matches!(it.step_at(&held), Step::GiveUp(Ok(()))));
            assert!(matches!(it.step(), Step::GiveUp(Err(_))), "as the first");
        },
    );
}

#[test]
fn waiter_gives_up_after_the_outage_timeout() {
    places(
        |_| Until::Forever,
        |mut it| {
            it.refuse(taken(30 * SECOND, Place::Silent));
            it.sleep();
            let began = it.now;
            it.refuse(Refusal::Unavailable(unavailable(began)));
            it.now = began.after(OUTAGE_TIMEOUT - SECOND);
            it.sleep();
            it.refuse(Refusal::Unavailable(unavailable(it.now)));
            it.now = began.after(OUTAGE_TIMEOUT);
            match it.step() {
                Step::GiveUp(Err(error)) => assert_eq!(error.kind(), ErrorKind::Unavailable),
                step => panic!("{step:?}"),
            }
        },
    );
}

#[test]
fn attempt_that_the_deadline_ends_is_no_outage_after_a_reply() {
    for was_refused in [true, false] {
        places(
            |now| Until::At(now.after(30 * SECOND)),
            |mut it| {
                let start = it.now;
                if was_refused {
                    it.refuse(taken(30 * SECOND, Place::Silent));
                    it.sleep();
                }
                it.refuse(Refusal::Cut(unavailable(start)));
                it.now = start.after(30 * SECOND);
                let is_outage = matches!(it.step(), Step::GiveUp(Err(_)));
                assert_eq!(is_outage, !was_refused);
            },
        );
    }
}

#[test]
fn longest_sleep_ends_with_the_call_or_the_outage() {
    let since = MonotonicTime::now();
    let outage = unavailable(since);
    let look = |now| call(Until::Forever, since).longest_sleep(now, Some(&outage));
    let end = since.after(OUTAGE_TIMEOUT);
    assert_eq!(look(since), end);
    assert_eq!(look(end), end.after(OUTAGE_TIMEOUT / 10));
    let soon = since.after(ms(1));
    let call = call(Until::At(soon), since);
    assert_eq!(call.longest_sleep(since, None), soon);
}

//! Models of the watchdog: its timer thread and workers while holders acquire, extend and release, and its stop.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use shuttle::thread;

use super::*;
use crate::command::QueueMode;
use crate::lease::{Check, Grant, Options};
use crate::store::RenewalLimits;
use crate::store::model::{Direct, Server};
use crate::util::clock::Clock;
use crate::util::sync::model::{chance, check, choice, pass, quiet, sleep};
use crate::util::sync::{AtomicBool, Ordering};

const RUNS: usize = 600;
const SECOND: Duration = Duration::from_secs(1);
const STEP: Duration = Duration::from_millis(250);
const OPTIONS: Options = Options {
    ttl: Duration::from_secs(3),
    renew_every: Some(SECOND),
    ..Options::USUAL
};
/// The timer thread, the renewal workers, the background thread, and the thread of the checks.
const THREADS: usize = 3 + RenewalLimits::USUAL.threads;

struct World {
    watchdog: Arc<Watchdog>,
    server: Server,
    callbacks: Arc<CallbackExecutor>,
    over: AtomicBool,
}

impl World {
    fn new() -> Self {
        let scheduler = Scheduler::new(Clock::default());
        let server = Server::new();
        let store = Arc::new(Direct::new(&server, QueueMode::None));
        let (callbacks, _deliver) = CallbackExecutor::for_model();
        Self {
            watchdog: Watchdog::new(
                scheduler,
                &Backend::new(store),
                Arc::clone(&callbacks),
                SECOND,
            ),
            server,
            callbacks,
            over: AtomicBool::new(false),
        }
    }

    fn grant(&self, name: &str) -> Arc<Lease> {
        self.grant_with(name, None)
    }

    fn grant_with(&self, name: &str, check: Option<Check>) -> Arc<Lease> {
        let now = MonotonicTime::now();
        let key = Key::new("", name, 16).unwrap();
        let options = Options {
            checked: check.is_some(),
            ..OPTIONS
        };
        let grant = Grant {
            options: Arc::new(options),
            ..Grant::usual(key, now)
        };
        self.server
            .give(&grant.key, grant.id, now.after(OPTIONS.ttl));
        Arc::new(Lease::new(grant, Arc::clone(&self.callbacks), check))
    }

    /// Runs `holders` and `clock` beside the threads of the watchdog, then `finish`.
    fn run(&self, holders: &[&(dyn Fn() + Sync)], clock: impl Fn(), finish: impl FnOnce()) {
        let renewals = self.watchdog.renewals_of(ServerId::ONLY);
        thread::scope(|scope| {
            let mut threads = vec![scope.spawn(|| self.watchdog.run_timer())];
            for _ in 0..RenewalLimits::USUAL.threads {
                threads.push(scope.spawn(|| self.watchdog.run_renewals(&renewals)));
            }
            threads.push(scope.spawn(|| self.watchdog.run_checks()));
            threads.push(scope.spawn(|| self.watchdog.run_background()));
            let holders: Vec<_> = holders.iter().map(|run| scope.spawn(run)).collect();
            clock();
            holders
                .into_iter()
                .for_each(|holder| holder.join().unwrap());
            finish();
            scope.spawn(|| {
                threads
                    .into_iter()
                    .for_each(|thread| thread.join().unwrap());
                self.over.store(true, Ordering::SeqCst);
            });
            while !self.over.load(Ordering::SeqCst) {
                pass(STEP / 10);
            }
        });
    }
}

#[test]
fn model_held_leases_are_renewed_until_released() {
    check(RUNS, || {
        let world = World::new();
        let leases = ["a", "b", "checked"].map(|name| {
            let check = (name == "checked").then(|| Check::new(|| true));
            (world.grant_with(name, check), AtomicBool::new(false))
        });
        // The standard library's atomic, since reading it must not be a scheduling point.
        let asleep = AtomicUsize::new(THREADS + leases.len());
        let hold_lease = |i: usize| {
            let (world, asleep, (lease, released)) = (&world, &asleep, &leases[i]);
            move || {
                assert!(world.watchdog.schedule(lease));
                let hold = choice(6) as u32;
                if hold > 0 {
                    sleep(hold * STEP);
                    assert!(
                        world
                            .watchdog
                            .end_lease(lease, MonotonicTime::now())
                            .is_ok()
                    );
                    released.store(true, Ordering::SeqCst);
                }
                asleep.fetch_sub(1, Ordering::SeqCst);
            }
        };
        // The model lasts either a little longer than the longest hold, or longer than the hold and a ttl.
        let steps = [6, 20][choice(2)];
        let all_threads_sleep = || quiet(|| asleep.load(Ordering::SeqCst));
        let clock = || {
            for _ in 0..steps {
                all_threads_sleep();
                for (lease, released) in &leases {
                    let left = lease.valid_for(MonotonicTime::now()).unwrap_or_default();
                    assert!(
                        released.load(Ordering::SeqCst) || left > SECOND,
                        "renewed late"
                    );
                }
                pass(STEP);
            }
        };
        let finish = || {
            all_threads_sleep();
            let scheduled = world.watchdog.scheduler.stop();
            for (lease, released) in &leases {
                let key = &lease.grant().key;
                let timers = scheduled.iter().filter(|target| Arc::ptr_eq(target, lease));
                let is_held = !released.load(Ordering::SeqCst);
                assert_eq!(timers.count(), usize::from(is_held), "timers of {key:?}");
                let alive = world.server.holder(key).is_some();
                assert!(alive || !is_held, "{key:?} is not renewed");
                assert!(is_held || !alive || steps == 6, "{key:?} is still renewed");
                assert_eq!(world.watchdog.tracked(key).is_some(), is_held);
                assert_eq!(lease.loss(MonotonicTime::now()), None);
            }
        };
        let (a, b, c) = (hold_lease(0), hold_lease(1), hold_lease(2));
        world.run(&[&a, &b, &c], clock, finish);
    });
}

#[test]
fn model_stop_loses_every_lease_and_ends_threads() {
    check(RUNS, || {
        let world = World::new();
        let start = MonotonicTime::now();
        let leases = ["a", "b"].map(|name| world.grant(name));
        let released = AtomicBool::new(false);
        let hold_lease = |lease: &Arc<Lease>, releases: bool| {
            if !world.watchdog.schedule(lease) {
                // `Acquirer` ends a lease in the same way if the watchdog has stopped.
                lease.lose(MonotonicTime::now(), LossReason::Shutdown);
            }
            if chance(2) {
                let _ = world.watchdog.extend(lease, 4 * SECOND);
            }
            if releases
                && world
                    .watchdog
                    .end_lease(lease, MonotonicTime::now())
                    .is_ok()
            {
                released.store(true, Ordering::SeqCst);
            }
        };
        let one = || hold_lease(&leases[0], false);
        let other = || hold_lease(&leases[1], true);
        let stop = || world.watchdog.stop();
        let clock = || (0..6).for_each(|_| pass(STEP));
        world.run(&[&one, &other, &stop], clock, || {});
        for lease in &leases {
            assert_eq!(
                lease.valid_for(start),
                None,
                "valid after the watchdog has stopped"
            );
        }
        if released.load(Ordering::SeqCst) {
            assert_eq!(leases[1].loss(MonotonicTime::now()), None);
        }
    });
}

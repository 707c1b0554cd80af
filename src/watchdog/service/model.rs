//! Models of the watchdog: its timer and its workers against owners who take, extend and let go, and
//! against its end.

use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

use shuttle::thread;

use super::*;
use crate::lease::{Check, Grant, Options};
use crate::store::QueueMode;
use crate::store::model::{Direct, Server};
use crate::util::clock::Clock;
use crate::util::sync::model::{chance, check, choice, pass, quiet, sleep};
use crate::util::sync::{AtomicBool, Condvar, Mutex, Ordering};

const RUNS: usize = 600;
const SECOND: Duration = Duration::from_secs(1);
const STEP: Duration = Duration::from_millis(250);
const OPTIONS: Options = Options {
    ttl: Duration::from_secs(3),
    renew_every: Some(SECOND),
    max_hold: None,
    checked: false,
};
/// The timer, those that renew, the one for releases, and the one that asks checks.
const THREADS: usize = 3 + RENEWAL_PIPELINES;

struct World {
    dog: Arc<Watchdog>,
    server: Server,
    callbacks: Arc<CallbackExecutor>,
    inboxes: Inboxes,
    over: AtomicBool,
}

impl World {
    fn new() -> Self {
        let (scheduler, inboxes) = Scheduler::new(Clock::default());
        let server = Server::new();
        let store = Arc::new(Direct::new(&server, QueueMode::None));
        let (callbacks, _deliver) = CallbackExecutor::for_model();
        Self {
            dog: Watchdog::new(scheduler, store, Arc::clone(&callbacks), SECOND),
            server,
            callbacks,
            inboxes,
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

    /// What a worker does, on a channel that cannot make a thread of a model wait.
    fn work(&self, inbox: &Receiver<Job>) {
        let (nap, never) = (Mutex::new(()), Condvar::new());
        loop {
            match inbox.try_recv() {
                Ok(Job::Track(leases)) => self.dog.track_keys(&leases),
                Ok(Job::Check(leases)) => self.dog.check(leases),
                Ok(Job::Maintenance) => {}
                Ok(Job::Stop) => return,
                Err(_) => drop(never.wait_for(&mut nap.lock(), STEP / 10)),
            }
        }
    }

    /// Runs `owners` beside the threads of the watchdog, and `clock` beside all; then `finish`.
    fn run(&self, owners: &[&(dyn Fn() + Sync)], clock: impl Fn(), finish: impl FnOnce()) {
        thread::scope(|scope| {
            let mut threads = vec![scope.spawn(|| self.dog.run_timer())];
            for _ in 0..RENEWAL_PIPELINES {
                threads.push(scope.spawn(|| self.dog.run_renewals()));
            }
            for inbox in [&self.inboxes.checks, &self.inboxes.releases] {
                threads.push(scope.spawn(|| self.work(inbox)));
            }
            let owners: Vec<_> = owners.iter().map(|run| scope.spawn(run)).collect();
            clock();
            owners.into_iter().for_each(|owner| owner.join().unwrap());
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
fn model_what_is_held_is_renewed_and_what_is_let_go_is_forgotten() {
    check(RUNS, || {
        let world = World::new();
        let leases = ["a", "b", "checked"].map(|name| {
            let check = (name == "checked").then(|| Check::new(|| true));
            (world.grant_with(name, check), AtomicBool::new(false))
        });
        // The standard library's: to look at it is no point where another thread may go on.
        let asleep = AtomicUsize::new(THREADS + leases.len());
        let own = |i: usize| {
            let (world, asleep, (lease, released)) = (&world, &asleep, &leases[i]);
            move || {
                assert!(world.dog.watch(lease));
                let hold = choice(6) as u32;
                if hold > 0 {
                    sleep(hold * STEP);
                    assert!(world.dog.release(lease, MonotonicTime::now()).is_ok());
                    released.store(true, Ordering::SeqCst);
                }
                asleep.fetch_sub(1, Ordering::SeqCst);
            }
        };
        // Little longer than the longest hold, or longer by more than a ttl.
        let steps = [6, 20][choice(2)];
        let everybody_sleeps = || quiet(|| asleep.load(Ordering::SeqCst));
        let clock = || {
            for _ in 0..steps {
                everybody_sleeps();
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
            everybody_sleeps();
            let tracked = world.dog.scheduler.stop();
            for (lease, released) in &leases {
                let key = &lease.grant().key;
                let timers = tracked.iter().filter(|one| Arc::ptr_eq(one, lease));
                let is_held = !released.load(Ordering::SeqCst);
                assert_eq!(timers.count(), usize::from(is_held), "timers of {key:?}");
                let alive = world.server.holder(key).is_some();
                assert!(alive || !is_held, "{key:?} is not renewed");
                assert!(is_held || !alive || steps == 6, "{key:?} is renewed still");
                assert_eq!(world.dog.tracked(key).is_some(), is_held);
                assert_eq!(lease.loss(MonotonicTime::now()), None);
            }
        };
        let (a, b, c) = (own(0), own(1), own(2));
        world.run(&[&a, &b, &c], clock, finish);
    });
}

#[test]
fn model_its_end_loses_every_lease_and_ends_every_thread() {
    check(RUNS, || {
        let world = World::new();
        let start = MonotonicTime::now();
        let leases = ["a", "b"].map(|name| world.grant(name));
        let released = AtomicBool::new(false);
        let own = |lease: &Arc<Lease>, lets_go: bool| {
            if !world.dog.watch(lease) {
                // As whoever asked for it does then.
                lease.lose(MonotonicTime::now(), LossReason::Shutdown);
            }
            if chance(2) {
                let _ = world.dog.extend(lease, 4 * SECOND);
            }
            if lets_go && world.dog.release(lease, MonotonicTime::now()).is_ok() {
                released.store(true, Ordering::SeqCst);
            }
        };
        let one = || own(&leases[0], false);
        let other = || own(&leases[1], true);
        let stop = || world.dog.stop();
        let clock = || (0..6).for_each(|_| pass(STEP));
        world.run(&[&one, &other, &stop], clock, || {});
        for lease in &leases {
            assert_eq!(lease.valid_for(start), None, "it outlives the watchdog");
        }
        if released.load(Ordering::SeqCst) {
            assert_eq!(leases[1].loss(MonotonicTime::now()), None);
        }
    });
}

//! Models of the pipeline: callers, the background and the faults of the network in every order that
//! shuttle comes upon.

use std::sync::Arc;
use std::time::Duration;

use shuttle::thread;

use super::*;
use crate::store::command::{Held, QueueMode};
use crate::store::redis::pipeline::connection::{Faults, Server};
use crate::util::id::{HolderId, LeaseId};
use crate::util::key::Key;
use crate::util::sync::model::{chance, check, pass, survives};
use crate::util::sync::{AtomicBool, Condvar, Ordering};

const RUNS: usize = 600;
const SECOND: Duration = Duration::from_secs(1);
/// Longer than anything that a model waits for.
const TTL: Duration = Duration::from_secs(3600);

/// A pipeline with its server, and what rings there.
struct World {
    pipeline: Pipeline,
    server: Arc<Server>,
    faults: Faults,
    board: Arc<Board>,
}

/// Where the pipeline's request_maintenance rings, and the background waits.
#[derive(Default)]
struct Board {
    state: Mutex<Rings>,
    changed: Condvar,
}

#[derive(Default)]
struct Rings {
    rung: bool,
    over: bool,
}

impl World {
    fn new(faults: Faults) -> Self {
        let server = Server::new(faults);
        let board = Arc::<Board>::default();
        let request_maintenance = Arc::clone(&board);
        let endpoint = Endpoint::new("redis://model", SECOND).unwrap();
        let pipeline = Pipeline::for_callers(Arc::new(Shared {
            pool: Arc::clone(&server),
            endpoint: Arc::new(endpoint),
            names: ScriptContext {
                holder: HolderId::of_this_process(),
                fence_counter: String::new(),
                max_value: 1 << 20,
            },
            // So a caller with a short limit cannot wait for a connection.
            connect_timeout: 10 * SECOND,
            command_timeout: SECOND,
            request_maintenance: Box::new(move |_| {
                request_maintenance.state.lock().rung = true;
                request_maintenance.changed.notify_one();
            }),
            delays: None,
        }));
        Self {
            pipeline,
            server,
            faults,
            board,
        }
    }

    fn acquire(&self, key: &Key, limit: Duration) -> (LeaseId, Result<Reply, Error>) {
        let lease = LeaseId::random();
        let command = Command::Acquire {
            key: key.clone(),
            lease,
            ttl: TTL,
            queue_mode: QueueMode::Notified,
        };
        let deadline = MonotonicTime::now().after(limit);
        let mut request = Request::new(command, deadline);
        self.pipeline.execute(&mut [&mut request]);
        let outcome = request.into_outcome();
        match &outcome {
            Ok(Reply::Granted { .. }) => assert_eq!(self.server.holder(key), Some(lease)),
            Err(error) if error.kind() == ErrorKind::Timeout => {
                let answers_come = self.faults.broken + self.faults.panics == 0;
                assert!(!answers_come || MonotonicTime::now() >= deadline, "{error}");
            }
            _ => {}
        }
        (lease, outcome)
    }

    fn release(&self, key: &Key, lease: LeaseId) -> Command {
        Command::Release {
            key: key.clone(),
            lease,
            until: MonotonicTime::now().after(TTL),
            held: Some(Held {
                token: 7,
                others_queued: chance(2),
            }),
            queued: None,
        }
    }

    /// Sees to the pipeline whenever it rings.
    fn stand_by(&self) {
        loop {
            let mut state = self.board.state.lock();
            while !state.rung && !state.over {
                self.board.changed.wait(&mut state);
            }
            if state.over {
                return;
            }
            state.rung = false;
            drop(state);
            let mut left = false;
            let survived = survives(|| left = self.pipeline.run_maintenance());
            if left || !survived {
                // Later, in a client; here when all else is over.
                let mut state = self.board.state.lock();
                while !state.over {
                    self.board.changed.wait(&mut state);
                }
                state.rung = true;
                return;
            }
        }
    }

    /// Runs `callers` and the background to their end, then what was left for later.
    fn run(&self, callers: &[&(dyn Fn() + Sync)]) {
        thread::scope(|scope| {
            let background = scope.spawn(|| self.stand_by());
            let callers: Vec<_> = callers.iter().map(|run| scope.spawn(run)).collect();
            for caller in callers {
                caller.join().unwrap();
            }
            self.board.state.lock().over = true;
            self.board.changed.notify_all();
            background.join().unwrap();
        });
        self.server.calm_down();
        self.server.deliver_late();
        let mut left = false;
        for _ in 0..20 {
            left |= std::mem::take(&mut self.board.state.lock().rung);
            if left {
                pass(5 * SECOND);
                left = self.pipeline.run_maintenance();
            }
        }
    }

    fn assert_idle(&self) {
        let state = self.pipeline.state.lock();
        assert!(!state.led, "nobody leads, and the pipeline is led");
        assert!(!state.is_ready(), "something waits for nobody");
        assert_eq!(
            state
                .connection
                .as_ref()
                .map_or(0, PipelinedConnection::unanswered),
            0
        );
    }
}

fn key(name: &str) -> Key {
    Key::new("", name, 16).unwrap()
}

/// A caller that takes its own key twice and lets go of it without waiting.
fn take_twice<'a>(world: &'a World, name: &'a str) -> impl Fn() + Sync + 'a {
    move || {
        let key = key(name);
        for _ in 0..2 {
            let (lease, outcome) = world.acquire(&key, TTL);
            assert!(matches!(outcome, Ok(Reply::Granted { .. })), "{outcome:?}");
            world.pipeline.post(world.release(&key, lease));
        }
    }
}

/// A caller for whom things go wrong. It lets go of what it was granted first and keeps the
/// second, if it asks for one,
/// and nothing else may be held in the end. It may panic where the pipeline does.
struct Unlucky {
    key: Key,
    limit: Duration,
    keeps: Mutex<Option<LeaseId>>,
    died: AtomicBool,
}

impl Unlucky {
    fn new(name: &str, limit: Duration) -> Self {
        Self {
            key: key(name),
            limit,
            keeps: Mutex::default(),
            died: AtomicBool::new(false),
        }
    }

    fn call(&self, world: &World) {
        let survived = survives(|| {
            let (first, outcome) = world.acquire(&self.key, self.limit);
            if !matches!(outcome, Ok(Reply::Granted { .. })) {
                return;
            }
            world.pipeline.post(world.release(&self.key, first));
            if chance(2) {
                return;
            }
            let (second, outcome) = world.acquire(&self.key, self.limit);
            match outcome {
                Ok(Reply::Granted { .. }) => *self.keeps.lock() = Some(second),
                Ok(_) => assert_ne!(world.server.holder(&self.key), Some(first), "overtaken"),
                Err(_) => {}
            }
        });
        self.died.store(!survived, Ordering::SeqCst);
    }

    fn assert_holds_what_it_was_told(&self, world: &World) {
        let holds = world.server.holder(&self.key);
        let keeps = *self.keeps.lock();
        // Granted, and then its thread was swept away: nobody is left to be told.
        let nobody_knows = self.died.load(Ordering::SeqCst) && keeps.is_none();
        assert!(holds == keeps || nobody_knows, "{holds:?}, not {keeps:?}");
    }
}

/// Runs one of them for each limit, and a clock that goes past the shorter limits at any time.
fn run_unlucky(faults: Faults, limits: &[Duration]) {
    let world = World::new(faults);
    let names = ["a", "b", "c", "d", "e"];
    let unlucky: Vec<Unlucky> = (names.into_iter().zip(limits))
        .map(|(name, limit)| Unlucky::new(name, *limit))
        .collect();
    let calls: Vec<_> = unlucky.iter().map(|one| || one.call(&world)).collect();
    let clock = || {
        if limits.iter().any(|limit| *limit < TTL) {
            pass(SECOND);
            pass(SECOND);
        }
    };
    let mut threads: Vec<&(dyn Fn() + Sync)> = vec![&clock];
    threads.extend(calls.iter().map(|call| call as &(dyn Fn() + Sync)));
    world.run(&threads);
    for one in &unlucky {
        one.assert_holds_what_it_was_told(&world);
    }
    world.assert_idle();
    // What is repeated in case is given up in the end.
    pass(2 * TTL);
    world.pipeline.run_maintenance();
    world.assert_idle();
    assert!(!world.pipeline.state.lock().has_work());
}

#[test]
fn model_every_caller_gets_its_outcome_and_releases_come_before_what_follows() {
    check(RUNS, || {
        let world = World::new(Faults::default());
        let [a, b, c] = ["a", "b", "c"].map(|name| take_twice(&world, name));
        world.run(&[&a, &b, &c]);
        world.assert_idle();
        for name in ["a", "b", "c"] {
            assert_eq!(
                world.server.holder(&key(name)),
                None,
                "a release was not written"
            );
        }
        assert!(!world.pipeline.state.lock().has_work());
    });
}

#[test]
fn model_what_is_posted_is_written_though_nobody_waits() {
    check(RUNS, || {
        let world = World::new(Faults::default());
        let keys = ["a", "b", "c", "d"].map(key);
        let post = |key: &Key| {
            let lease = LeaseId::random();
            world
                .server
                .give(key, lease, MonotonicTime::now().after(TTL));
            world.pipeline.post(world.release(key, lease));
        };
        let one = || keys[..2].iter().for_each(post);
        let other = || keys[2..].iter().for_each(post);
        world.run(&[&one, &other]);
        world.assert_idle();
        assert!(keys.iter().all(|key| world.server.holder(key).is_none()));
    });
}

#[test]
fn model_an_acquire_overtakes_releases_of_other_keys_only() {
    check(RUNS, || {
        let world = World::new(Faults::default());
        let post = |name: &str| {
            let (key, lease) = (key(name), LeaseId::random());
            world
                .server
                .give(&key, lease, MonotonicTime::now().after(TTL));
            world.pipeline.post(world.release(&key, lease));
            key
        };
        let many = || {
            ["a", "b", "c", "d", "e"]
                .into_iter()
                .for_each(|name| drop(post(name)))
        };
        let one = || {
            let (_, outcome) = world.acquire(&post("f"), TTL);
            assert!(matches!(outcome, Ok(Reply::Granted { .. })), "{outcome:?}");
        };
        world.run(&[&many, &one]);
        world.assert_idle();
        let is_held = |name| world.server.holder(&key(name)).is_some();
        assert!(!["a", "b", "c", "d", "e"].into_iter().any(is_held));
    });
}

#[test]
fn model_posted_releases_survive_broken_connections() {
    let faults = Faults {
        connecting: 2,
        broken: 2,
        ..Faults::default()
    };
    check(RUNS, move || {
        let world = World::new(faults);
        let keys = ["a", "b", "c", "d", "e", "f"].map(key);
        let post = |key: &Key| {
            let lease = LeaseId::random();
            world
                .server
                .give(key, lease, MonotonicTime::now().after(TTL));
            world.pipeline.post(world.release(key, lease));
        };
        let one = || keys[..3].iter().for_each(post);
        let other = || keys[3..].iter().for_each(post);
        world.run(&[&one, &other]);
        world.assert_idle();
        assert!(keys.iter().all(|key| world.server.holder(key).is_none()));
        assert!(!world.pipeline.state.lock().has_work());
    });
}

#[test]
fn model_callers_leave_at_their_deadline_and_leave_nothing_behind() {
    check(RUNS, || {
        run_unlucky(Faults::default(), &[SECOND, SECOND, TTL])
    });
}

#[test]
fn model_a_caller_in_a_hurry_costs_the_others_nothing() {
    let faults = Faults {
        connecting: 1,
        ..Faults::default()
    };
    check(RUNS, move || run_unlucky(faults, &[SECOND, SECOND, TTL]));
}

#[test]
fn model_broken_connections_cost_no_caller_its_outcome_and_leave_no_grant_to_nobody() {
    let faults = Faults {
        connecting: 1,
        broken: 2,
        ..Faults::default()
    };
    check(RUNS, move || run_unlucky(faults, &[TTL; 3]));
}

#[test]
fn model_who_leaves_stands_in_no_line() {
    let faults = Faults {
        broken: 1,
        ..Faults::default()
    };
    check(RUNS, move || {
        let world = World::new(faults);
        let (key, other) = (key("a"), LeaseId::random());
        world
            .server
            .give(&key, other, MonotonicTime::now().after(TTL));
        let stand = |limit| {
            let (world, key) = (&world, &key);
            move || {
                let (lease, outcome) = world.acquire(key, limit);
                if outcome.is_ok() {
                    world.pipeline.post(Command::Release {
                        key: key.clone(),
                        lease,
                        until: MonotonicTime::now().after(TTL),
                        held: None,
                        queued: Some(TTL),
                    });
                }
            }
        };
        let (one, two, three) = (stand(SECOND), stand(SECOND), stand(TTL));
        world.run(&[&one, &two, &three, &|| pass(SECOND)]);
        world.server.take_back(&key, other);
        assert_eq!(world.server.holder(&key), None, "granted to nobody");
    });
}

#[test]
fn model_a_leader_that_leaves_before_the_answers_costs_the_others_nothing() {
    let faults = Faults {
        slow: 2,
        ..Faults::default()
    };
    let half = SECOND / 2;
    check(RUNS, move || run_unlucky(faults, &[half, half, TTL, TTL]));
}

#[test]
fn model_connections_break_behind_leaders_that_have_left() {
    let faults = Faults {
        slow: 2,
        broken: 1,
        ..Faults::default()
    };
    let half = SECOND / 2;
    check(RUNS, move || run_unlucky(faults, &[half, half, TTL]));
}

#[test]
fn model_connections_break_while_callers_leave() {
    let faults = Faults {
        broken: 1,
        ..Faults::default()
    };
    check(RUNS, move || run_unlucky(faults, &[SECOND, TTL, SECOND]));
}

#[test]
fn model_a_leader_that_panics_passes_on_what_it_led() {
    let faults = Faults {
        panics: 1,
        ..Faults::default()
    };
    check(RUNS, move || run_unlucky(faults, &[TTL; 5]));
}

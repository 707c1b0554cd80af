//! Models of the pipeline: callers, the background, and faults of the network, in many orders.

use std::sync::Arc;
use std::time::Duration;

use shuttle::thread;

use super::*;
use crate::command::{Acquire, Held, Mode, QueueMode, Release};
use crate::config::key::{Key, KeyLayout};
use crate::config::{DEFAULT_MAX_REPLY, Replicas};
use crate::store::completion::Submitted;
use crate::store::{Report, ReportedReleases};
use crate::util::id::{HolderId, LeaseId};
use crate::util::sync::model::{chance, check, pass, survives};
use crate::util::sync::{AtomicBool, Condvar, Ordering};
use crate::wire::pipeline::connection::{Faults, Server};

const RUNS: usize = 600;
const SECOND: Duration = Duration::from_secs(1);
/// Longer than anything that a model waits for.
const TTL: Duration = Duration::from_secs(3600);

/// A pipeline, its server, and the background that maintains it.
struct World {
    pipeline: Pipeline,
    server: Arc<Server>,
    faults: Faults,
    board: Arc<Board>,
    /// Whether time passes: the background then waits for a pause, and runs maintenance that was requested for later,
    /// even while callers wait.
    clock_runs: bool,
    /// The replicas that have to acknowledge each acquire.
    replicas: Option<Replicas>,
}

/// The requests for maintenance, for which the background waits.
#[derive(Default)]
struct Board {
    state: Mutex<BoardState>,
    changed: Condvar,
}

#[derive(Default)]
struct BoardState {
    /// Whether maintenance was requested at once.
    is_requested: bool,
    /// Whether maintenance was requested for later, or has left work. It runs after all callers are done.
    later: bool,
    over: bool,
}

impl World {
    fn new(faults: Faults) -> Self {
        let server = Server::new(faults);
        let board = Arc::<Board>::default();
        let requests = Arc::clone(&board);
        let endpoint = Endpoint::new("redis://model", SECOND, DEFAULT_MAX_REPLY).unwrap();
        let pipeline = Pipeline::for_callers(Arc::new(Shared {
            connector: Arc::clone(&server),
            endpoint: Arc::new(endpoint),
            context: ScriptContext::new(
                HolderId::of_this_process(),
                "",
                KeyLayout::Single,
                1 << 20,
            ),
            // Longer than the short limit of a caller, so that this caller cannot wait for a connection.
            connect_timeout: 10 * SECOND,
            command_timeout: SECOND,
            reports: Reports::new(ReportedReleases::None, move |report| {
                let mut state = requests.state.lock();
                match report {
                    Report::NeedsMaintenance(Urgency::Now) => state.is_requested = true,
                    Report::NeedsMaintenance(Urgency::Soon) => state.later = true,
                    _ => return,
                }
                drop(state);
                requests.changed.notify_one();
            }),
            server: ServerId::ONLY,
            router: None,
        }));
        Self {
            pipeline,
            server,
            faults,
            board,
            clock_runs: false,
            replicas: None,
        }
    }

    fn acquire(&self, key: &Key, limit: Duration) -> (LeaseId, Result<Reply, Error>) {
        let lease = LeaseId::random();
        let command = Command::Acquire(Acquire {
            mode: Mode::Exclusive,
            key: key.clone(),
            lease,
            ttl: TTL,
            queue_mode: QueueMode::Notified,
            link: crate::command::Link::Alone,
            replicas: self.replicas,
        });
        let deadline = MonotonicTime::now().after(limit);
        let mut request = Request::new(command, deadline);
        self.pipeline.execute(&mut [&mut request], Route::default());
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

    /// Submits or sends an acquire of `key`. A sender receives once, and then stops. If `clock_runs`, a sender may not
    /// even receive, like a thread that the system does not run.
    fn submit(&self, key: &Key) -> (LeaseId, Submitted) {
        let lease = LeaseId::random();
        let (submitted, mut completions) = Submitted::new(1);
        let command = Command::Acquire(Acquire {
            mode: Mode::Exclusive,
            key: key.clone(),
            lease,
            ttl: TTL,
            queue_mode: QueueMode::None,
            link: crate::command::Link::Alone,
            replicas: self.replicas,
        });
        let completion = completions.pop().unwrap();
        if chance(2) {
            self.pipeline.submit(vec![(command, completion)]);
        } else if let Some(mut sent) = self.pipeline.send(command, completion) {
            if self.clock_runs && chance(2) {
                std::mem::forget(sent);
            } else {
                sent.receive();
            }
        }
        (lease, submitted)
    }

    fn release(&self, key: &Key, lease: LeaseId) -> Release {
        Release {
            min_hold: Duration::ZERO,
            mode: Mode::Exclusive,
            key: key.clone(),
            lease,
            until: MonotonicTime::now().after(TTL),
            held: Some(Held {
                token: 7,
                is_token_in_value: true,
                others_queued: chance(2),
                valid_until: MonotonicTime::at_tick(0),
            }),
            queued: None,
        }
    }

    /// Runs the maintenance whenever the pipeline requests it.
    fn run_background(&self) {
        loop {
            let mut state = self.board.state.lock();
            let is_due = |state: &BoardState| {
                state.is_requested || state.over || (self.clock_runs && state.later)
            };
            while !is_due(&state) {
                self.board.changed.wait(&mut state);
            }
            if state.over {
                return;
            }
            let is_later = !std::mem::take(&mut state.is_requested);
            state.later &= !is_later;
            drop(state);
            if is_later {
                pass(SECOND / 10);
            }
            let mut left = false;
            let survived = survives(|| left = self.pipeline.run_maintenance());
            self.board.state.lock().later |= left || !survived;
        }
    }

    /// Runs `callers` and the background to their end, then the maintenance that is left.
    fn run(&self, callers: &[&(dyn Fn() + Sync)]) {
        thread::scope(|scope| {
            let background = scope.spawn(|| self.run_background());
            let callers: Vec<_> = callers.iter().map(|run| scope.spawn(run)).collect();
            for caller in callers {
                caller.join().unwrap();
            }
            self.board.state.lock().over = true;
            self.board.changed.notify_all();
            background.join().unwrap();
        });
        self.server.end_faults();
        self.server.deliver_late();
        let mut left = false;
        for _ in 0..20 {
            let mut state = self.board.state.lock();
            left |= std::mem::take(&mut state.is_requested) | std::mem::take(&mut state.later);
            drop(state);
            if left {
                pass(5 * SECOND);
                left = self.pipeline.run_maintenance();
            }
        }
    }

    fn assert_idle(&self) {
        let state = self.pipeline.state.lock();
        assert!(
            !state.is_led,
            "no thread leads, but the pipeline is marked as led"
        );
        assert!(
            !state.is_ready(),
            "a request is queued, and no thread handles it"
        );
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

/// A caller that acquires its own key twice, and releases it without waiting.
fn acquire_twice<'a>(world: &'a World, name: &'a str) -> impl Fn() + Sync + 'a {
    move || {
        let key = key(name);
        for _ in 0..2 {
            let (lease, outcome) = world.acquire(&key, TTL);
            assert!(matches!(outcome, Ok(Reply::Granted { .. })), "{outcome:?}");
            world.pipeline.send_release(world.release(&key, lease));
        }
    }
}

/// A caller under faults. It releases its first grant, and may then get a second one, which it keeps. In the end, other
/// leases must not hold the key. If the pipeline panics on the caller's thread, the call ends.
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
            world.pipeline.send_release(world.release(&self.key, first));
            if chance(2) {
                return;
            }
            let (second, outcome) = world.acquire(&self.key, self.limit);
            match outcome {
                Ok(Reply::Granted { .. }) => *self.keeps.lock() = Some(second),
                Ok(_) => assert_ne!(
                    world.server.holder(&self.key),
                    Some(first),
                    "the release was overtaken"
                ),
                Err(_) => {}
            }
        });
        self.died.store(!survived, Ordering::SeqCst);
    }

    fn assert_holds_its_grant_only(&self, world: &World) {
        let holds = world.server.holder(&self.key);
        let keeps = *self.keeps.lock();
        // The thread may have panicked after the grant, before it recorded the lease.
        let is_unnoted = self.died.load(Ordering::SeqCst) && keeps.is_none();
        assert!(holds == keeps || is_unnoted, "{holds:?}, not {keeps:?}");
    }
}

/// Runs an [`Unlucky`] caller for each limit. The clock may pass the shorter limits at any time.
fn run_unlucky(faults: Faults, limits: &[Duration]) {
    run_unlucky_in(&World::new(faults), limits);
}

/// The same as [`run_unlucky`], with acquires that replicas have to acknowledge.
fn run_unlucky_with_replicas(faults: Faults, limits: &[Duration]) {
    let world = World {
        replicas: Replicas::new(1, SECOND / 4),
        ..World::new(faults)
    };
    run_unlucky_in(&world, limits);
}

fn run_unlucky_in(world: &World, limits: &[Duration]) {
    let names = ["a", "b", "c", "d", "e"];
    let unlucky: Vec<Unlucky> = (names.into_iter().zip(limits))
        .map(|(name, limit)| Unlucky::new(name, *limit))
        .collect();
    let calls: Vec<_> = unlucky.iter().map(|one| || one.call(world)).collect();
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
        one.assert_holds_its_grant_only(world);
    }
    world.assert_idle();
    // Undos are no longer repeated after their ttl has ended.
    pass(2 * TTL);
    world.pipeline.run_maintenance();
    world.assert_idle();
    assert!(!world.pipeline.state.lock().has_work());
}

#[test]
fn model_every_caller_gets_its_outcome() {
    check(RUNS, || {
        let world = World::new(Faults::default());
        let [a, b, c] = ["a", "b", "c"].map(|name| acquire_twice(&world, name));
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
fn model_unawaited_releases_are_written() {
    check(RUNS, || {
        let world = World::new(Faults::default());
        let keys = ["a", "b", "c", "d"].map(key);
        let post = |key: &Key| {
            let lease = LeaseId::random();
            world
                .server
                .give(key, lease, MonotonicTime::now().after(TTL));
            world.pipeline.send_release(world.release(key, lease));
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
            world.pipeline.send_release(world.release(&key, lease));
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
fn model_unawaited_releases_survive_broken_connections() {
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
            world.pipeline.send_release(world.release(key, lease));
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
fn model_callers_that_time_out_leave_nothing_behind() {
    check(RUNS, || {
        run_unlucky(Faults::default(), &[SECOND, SECOND, TTL])
    });
}

#[test]
fn model_a_short_deadline_does_not_fail_other_callers() {
    let faults = Faults {
        connecting: 1,
        ..Faults::default()
    };
    check(RUNS, move || run_unlucky(faults, &[SECOND, SECOND, TTL]));
}

#[test]
fn model_broken_connections_leave_no_unknown_grant() {
    let faults = Faults {
        connecting: 1,
        broken: 2,
        ..Faults::default()
    };
    check(RUNS, move || run_unlucky(faults, &[TTL; 3]));
}

#[test]
fn model_a_caller_that_left_is_not_queued() {
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
        let acquire_and_release = |limit| {
            let (world, key) = (&world, &key);
            move || {
                let (lease, outcome) = world.acquire(key, limit);
                if outcome.is_ok() {
                    world.pipeline.send_release(Release {
                        min_hold: Duration::ZERO,
                        mode: Mode::Exclusive,
                        key: key.clone(),
                        lease,
                        until: MonotonicTime::now().after(TTL),
                        held: None,
                        queued: Some(TTL),
                    });
                }
            }
        };
        let (one, two, three) = (
            acquire_and_release(SECOND),
            acquire_and_release(SECOND),
            acquire_and_release(TTL),
        );
        world.run(&[&one, &two, &three, &|| pass(SECOND)]);
        world.server.take_back(&key, other);
        assert_eq!(
            world.server.holder(&key),
            None,
            "a lease without a caller was granted"
        );
    });
}

#[test]
fn model_a_leader_that_leaves_costs_the_other_callers_nothing() {
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
fn model_grants_without_acknowledgements_are_undone() {
    let faults = Faults {
        unacknowledged: 3,
        ..Faults::default()
    };
    check(RUNS, move || run_unlucky_with_replicas(faults, &[TTL; 3]));
}

#[test]
fn model_leaders_leave_before_the_acknowledgements() {
    let faults = Faults {
        unacknowledged: 1,
        slow: 2,
        ..Faults::default()
    };
    let half = SECOND / 2;
    check(RUNS, move || {
        run_unlucky_with_replicas(faults, &[half, half, TTL, TTL])
    });
}

#[test]
fn model_connections_break_before_the_acknowledgements() {
    let faults = Faults {
        unacknowledged: 1,
        slow: 1,
        broken: 2,
        ..Faults::default()
    };
    let half = SECOND / 2;
    check(RUNS, move || {
        run_unlucky_with_replicas(faults, &[half, TTL, TTL])
    });
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
fn model_a_panicking_leader_appoints_another() {
    let faults = Faults {
        panics: 1,
        ..Faults::default()
    };
    check(RUNS, move || run_unlucky(faults, &[TTL; 5]));
}

fn is_granted(outcomes: &[Option<Outcome>]) -> bool {
    matches!(outcomes, [Some(Ok(Reply::Granted { .. }))])
}

/// A caller that submits two acquires of its own key, one after another, and releases their grants.
fn submit_twice<'a>(world: &'a World, name: &'a str) -> impl Fn() + Sync + 'a {
    move || {
        let key = key(name);
        for _ in 0..2 {
            let (lease, submitted) = world.submit(&key);
            // This thread never leads, so it never returns if no other thread leads the pipeline.
            let deadline = MonotonicTime::now().after(TTL);
            assert!(submitted.wait(deadline, is_granted));
            world.pipeline.send_release(world.release(&key, lease));
        }
    }
}

#[test]
fn model_submitted_requests_need_no_leader() {
    check(RUNS, || {
        let world = World::new(Faults::default());
        let [a, b] = ["a", "b"].map(|name| submit_twice(&world, name));
        world.run(&[&a, &b]);
        world.assert_idle();
        for name in ["a", "b"] {
            assert_eq!(world.server.holder(&key(name)), None);
        }
        assert!(!world.pipeline.state.lock().has_work());
    });
}

#[test]
fn model_submitted_requests_are_carried_out_beside_leaders() {
    check(RUNS, || {
        let world = World::new(Faults::default());
        let [a, b] = ["a", "b"].map(|name| acquire_twice(&world, name));
        let c = submit_twice(&world, "c");
        world.run(&[&a, &b, &c]);
        world.assert_idle();
        for name in ["a", "b", "c"] {
            assert_eq!(world.server.holder(&key(name)), None);
        }
        assert!(!world.pipeline.state.lock().has_work());
    });
}

/// A leader whose deadline passes leaves the replies to submitted requests to the background.
#[test]
fn model_submitted_requests_outlive_their_leader() {
    let faults = Faults {
        slow: 2,
        ..Faults::default()
    };
    check(RUNS, move || {
        let world = World::new(faults);
        let leader = Unlucky::new("a", SECOND / 2);
        let leads = || leader.call(&world);
        let submits = submit_twice(&world, "b");
        world.run(&[&leads, &submits]);
        leader.assert_holds_its_grant_only(&world);
        assert_eq!(world.server.holder(&key("b")), None);
        world.assert_idle();
    });
}

/// A caller that submits an acquire of its own key, and leaves before or after the outcome. It releases a grant that
/// came before it left.
fn submit_and_leave<'a>(world: &'a World, name: &'a str) -> impl Fn() + Sync + 'a {
    move || {
        let key = key(name);
        let (lease, submitted) = world.submit(&key);
        let deadline = MonotonicTime::now().after(SECOND);
        submitted.wait(deadline, is_granted);
        if is_granted(&submitted.leave()) {
            world.pipeline.send_release(world.release(&key, lease));
        }
    }
}

#[test]
fn model_late_grants_are_undone() {
    for faults in [
        Faults {
            slow: 2,
            ..Faults::default()
        },
        Faults {
            connecting: 1,
            broken: 1,
            ..Faults::default()
        },
    ] {
        check(RUNS, move || {
            let mut world = World::new(faults);
            // After a failed attempt to connect, the background waits before the next one.
            world.clock_runs = true;
            let leader = Unlucky::new("a", SECOND / 2);
            let leads = || leader.call(&world);
            let [b, c] = ["b", "c"].map(|name| submit_and_leave(&world, name));
            world.run(&[&leads, &b, &c, &|| pass(SECOND), &|| pass(SECOND)]);
            for name in ["b", "c"] {
                let holder = world.server.holder(&key(name));
                assert_eq!(holder, None, "a late grant of {name} was not undone");
            }
            world.assert_idle();
            pass(2 * TTL);
            world.pipeline.run_maintenance();
            assert!(!world.pipeline.state.lock().has_work());
        });
    }
}

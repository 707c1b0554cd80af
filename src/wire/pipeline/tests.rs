//! Tests of a pipeline on a real Redis, with faults that only unit tests can make or see.

pub mod acknowledged;
pub mod leaving;
pub mod plain;
pub mod sent;
pub mod stale;
pub mod unanswered;

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;
use std::time::Instant;

use leasehold_testbed::{Server, eventually};

use super::*;
use crate::command::{Acquire, Held, Inspect, Link, Mode, Release, Reply};
use crate::config::DEFAULT_MAX_REPLY;
use crate::config::key::{Key, KeyLayout};
use crate::report::loss::LossReason;
use crate::store::completion::Submitted;
use crate::store::{LateRelease, Report, ReportedReleases};
use crate::util::id::{HolderId, LeaseId};
use crate::wire::endpoint::connector::Connector;
use crate::wire::pipeline::releases::Releases;

const LONG: Duration = Duration::from_secs(20);

struct Fixture {
    server: Server,
    pipeline: Pipeline,
    /// How often the pipeline has requested maintenance.
    hook_calls: Arc<AtomicUsize>,
    /// How often it has requested maintenance at once.
    urgent_calls: Arc<AtomicUsize>,
    /// How often it has reported that the server refuses plain commands.
    refusals: Arc<AtomicUsize>,
    is_retired: Arc<AtomicBool>,
}

fn fixture() -> Fixture {
    // Longer than any pause of a busy machine, so that each reply comes before the time-out.
    with_timeout(Duration::from_secs(10))
}

fn with_timeout(timeout: Duration) -> Fixture {
    let server = Server::start().unwrap();
    let url = server.url();
    at(server, &url, timeout)
}

/// A pipeline to `server`, which has the address `url`.
fn at(server: Server, url: &str, timeout: Duration) -> Fixture {
    with_layout(KeyLayout::Single, server, url, timeout)
}

fn with_layout(layout: KeyLayout, server: Server, url: &str, timeout: Duration) -> Fixture {
    let mut endpoint = Endpoint::new(url, timeout, DEFAULT_MAX_REPLY).unwrap();
    let is_retired = Arc::new(AtomicBool::new(false));
    endpoint.is_retired = Arc::clone(&is_retired);
    let endpoint = Arc::new(endpoint);
    let hook_calls = Arc::new(AtomicUsize::new(0));
    let urgent_calls = Arc::new(AtomicUsize::new(0));
    let (counter, urgent) = (Arc::clone(&hook_calls), Arc::clone(&urgent_calls));
    let refusals = Arc::new(AtomicUsize::new(0));
    let refused = Arc::clone(&refusals);
    let reports = Reports::new(ReportedReleases::None, move |report| match report {
        Report::NeedsMaintenance(urgency) => {
            counter.fetch_add(1, Ordering::SeqCst);
            urgent.fetch_add(usize::from(urgency == Urgency::Now), Ordering::SeqCst);
        }
        Report::PlainAcquiresRefused(_) => {
            refused.fetch_add(1, Ordering::SeqCst);
        }
        _ => {}
    });
    let mut context = ScriptContext::new(HolderId::of_this_process(), "p:", layout, 1 << 20);
    context.reports = reports.clone();
    let pipeline = Pipeline::for_callers(Arc::new(Shared {
        connector: Connector::new(&endpoint),
        endpoint,
        context,
        connect_timeout: timeout,
        command_timeout: timeout,
        reports,
        server: ServerId::ONLY,
        router: None,
    }));
    Fixture {
        server,
        pipeline,
        hook_calls,
        urgent_calls,
        refusals,
        is_retired,
    }
}

fn key(name: &str) -> Key {
    Key::new("p:", name, 100).unwrap()
}

fn acquire_of(name: &str) -> Command {
    acquire_under(LeaseId::random(), name)
}

fn acquire_under(lease: LeaseId, name: &str) -> Command {
    Command::Acquire(Acquire {
        mode: Mode::Exclusive,
        key: key(name),
        lease,
        ttl: LONG,
        queue_mode: crate::command::QueueMode::None,
        link: crate::command::Link::Alone,
        replicas: None,
    })
}

impl Fixture {
    /// Connects once. A closed port then means that the server restarts.
    fn reach(&self) {
        drop(self.pipeline.shared.endpoint.open().unwrap());
    }

    /// The error of an attempt to connect.
    fn connect_error(&self, timeout: Duration) -> Error {
        let connected = self.pipeline.shared.connector.exclusive_connection(timeout);
        connected.err().expect("no connection can be made")
    }

    /// Sends these commands together, and returns their outcomes.
    fn execute(&self, commands: impl IntoIterator<Item = Command>) -> Vec<Result<Reply, Error>> {
        let deadline = MonotonicTime::now().after(LONG);
        let commands = commands.into_iter();
        let mut requests: Vec<Request> = commands.map(|it| Request::new(it, deadline)).collect();
        self.pipeline.execute(
            &mut requests.iter_mut().collect::<Vec<_>>(),
            Route::default(),
        );
        requests.into_iter().map(Request::into_outcome).collect()
    }

    /// Makes Redis close the pipeline's connection.
    fn cut(&self) {
        let kill = ["CLIENT", "KILL", "TYPE", "normal"];
        self.server.command(&kill).unwrap();
    }

    fn acquire_within(&self, name: &str, limit: Duration) -> (LeaseId, Result<Reply, Error>) {
        let lease = LeaseId::random();
        (lease, self.ask(acquire_under(lease, name), limit))
    }

    fn acquire(&self, name: &str) -> LeaseId {
        let (lease, outcome) = self.acquire_within(name, LONG);
        assert!(matches!(outcome, Ok(Reply::Granted { .. })), "{outcome:?}");
        lease
    }

    /// Acquires another key and then this one. The first acquire tells a new connection the time of Redis, so the second
    /// one uses plain commands.
    fn warm_up(&self, name: &str) -> LeaseId {
        self.acquire(&format!("before {name}"));
        self.acquire(name)
    }

    /// While the server is stopped, one caller leads, and the acquire of `other` times out. Then the server resumes,
    /// and the leader acquires `leader`.
    #[track_caller]
    fn time_out_behind_a_leader(&self) {
        self.server.stop();
        std::thread::scope(|scope| {
            let leader = scope.spawn(|| self.acquire_within("leader", LONG));
            assert!(eventually(LONG, || self.pipeline.state.lock().is_led));
            let (_, outcome) = self.acquire_within("other", Duration::from_millis(20));
            let error = outcome.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Timeout);
            assert!(error.message().contains("shorter limit"), "{error}");
            self.server.resume();
            leader.join().unwrap().1.unwrap();
        });
    }

    fn ask(&self, command: Command, limit: Duration) -> Result<Reply, Error> {
        self.pipeline
            .run_one(command, MonotonicTime::now().after(limit), Route::default())
    }

    fn release(&self, name: &str, lease: LeaseId) -> Release {
        Release::unheld(key(name), lease, MonotonicTime::now().after(LONG))
    }

    /// The number of calls of scripts by hash, and by text.
    fn calls(&self) -> [u64; 2] {
        ["evalsha", "eval"].map(|name| self.server.calls(name).unwrap())
    }

    /// Waits until `len` requests are in the pipeline's queue.
    #[track_caller]
    fn wait_for_queue(&self, len: usize) {
        let is_long = || self.pipeline.state.lock().awaited.iter().count() == len;
        assert!(eventually(LONG, is_long));
    }

    fn exists(&self, name: &str) -> bool {
        let reply = self.server.command(&["EXISTS", &format!("p:{name}")]);
        reply.unwrap().as_int() == Some(1)
    }

    fn unanswered(&self) -> usize {
        let state = self.pipeline.state.lock();
        state
            .connection
            .as_ref()
            .map_or(0, PipelinedConnection::unanswered)
    }

    /// The number that the server gave to the pipeline's newest connection. An older, closed connection may still be
    /// listed.
    fn connection(&self) -> Option<String> {
        let list = self.server.command(&["CLIENT", "LIST"]).unwrap();
        let mut lines = list.as_text().unwrap().lines();
        let own = |line: &&str| {
            ["eval", "exec", "wait"]
                .iter()
                .any(|name| line.contains(&format!(" cmd={name}")))
        };
        let newest = lines.rfind(own)?;
        newest.split(' ').next().map(str::to_owned)
    }

    /// Makes all acquires use the script.
    fn use_scripts_only(&self) {
        let refused = Error::new(ErrorKind::Denied, "a test refuses them");
        self.pipeline.shared.context.refuse_plain_acquires(refused);
    }

    fn is_idle(&self) -> bool {
        let state = self.pipeline.state.lock();
        !state.is_led && !state.has_work()
    }
}

#[test]
fn the_next_request_reads_a_releases_reply() {
    let f = fixture();
    let lease = f.acquire("a");
    f.pipeline.send_release(f.release("a", lease));
    assert_eq!(f.unanswered(), 1);
    assert_eq!(
        f.hook_calls.load(Ordering::SeqCst),
        1,
        "the background has to read the reply"
    );
    f.acquire("a");
    assert_eq!(f.unanswered(), 0);
}

/// Redis refuses the call of two releases because of one key. Each release is sent again, behind the acquire.
#[test]
fn an_acquire_waits_for_releases_that_are_split() {
    let f = fixture();
    f.use_scripts_only();
    let [a, b] = ["a", "b"].map(|name| f.acquire(name));
    let forbids = ["ACL", "SETUSER", "default", "resetkeys", "~p:~*", "~p:a*"];
    f.server.command(&forbids).unwrap();
    let batch = [
        Command::Release(f.release("b", b)),
        Command::Release(f.release("a", a)),
        acquire_under(LeaseId::random(), "a"),
    ];
    let outcomes = f.execute(batch);
    let [Err(denied), Ok(Reply::Done), Ok(Reply::Granted { .. })] = outcomes.as_slice() else {
        panic!("{outcomes:?}");
    };
    assert_eq!(denied.kind(), ErrorKind::Denied);
}

/// The releases are split, so they are sent again behind the acquires. The acquire of another caller comes before those
/// of a set: if the script took its key for one of the set, the set would be refused although its keys are free.
#[test]
fn a_set_is_not_sent_again_behind_another_callers_key() {
    let f = fixture();
    f.use_scripts_only();
    let [a, other, forbidden] = ["a", "a-other", "b"].map(|name| f.acquire(name));
    let forbids = ["ACL", "SETUSER", "default", "resetkeys", "~p:~*", "~p:a*"];
    f.server.command(&forbids).unwrap();
    let set = || {
        let linked = |link, name| match acquire_of(name) {
            Command::Acquire(acquire) => Command::Acquire(Acquire { link, ..acquire }),
            _ => unreachable!("it is an acquire"),
        };
        [
            linked(Link::First, "a-first"),
            linked(Link::NextOrNone, "a"),
        ]
    };
    let mut batch = vec![
        Command::Release(f.release("b", forbidden)),
        Command::Release(f.release("a-other", other)),
        Command::Release(f.release("a", a)),
        acquire_of("a-other"),
    ];
    batch.extend(set());
    let outcomes = f.execute(batch);
    let [
        Err(_),
        Ok(Reply::Done),
        Ok(Reply::Done),
        Ok(Reply::Granted { .. }),
        Ok(Reply::Skipped),
        Ok(Reply::Skipped),
    ] = outcomes.as_slice()
    else {
        panic!("{outcomes:?}");
    };
    // After such a reply, the caller of the set sends it once more.
    let outcomes = f.execute(set());
    let is_granted = |outcome| matches!(outcome, Ok(Reply::Granted { .. }));
    assert!(outcomes.into_iter().all(is_granted));
    assert!(f.exists("a-other"));
}

#[test]
fn foreign_values_cost_no_connection() {
    let f = fixture();
    f.acquire("b");
    let before = f.connection();
    let lease = LeaseId::random();
    for micros in ["garbage", "-795263780943818", "\u{fffd}", ""] {
        let value = format!("lh1 {lease} {micros}");
        let set = ["SET", "p:a", &value];
        f.server.command(&set).unwrap();
        let command = Command::Acquire(Acquire {
            mode: Mode::Exclusive,
            key: key("a"),
            lease,
            ttl: LONG,
            queue_mode: crate::command::QueueMode::Existing { notified: false },
            link: crate::command::Link::Alone,
            replicas: None,
        });
        let outcome = f.ask(command, LONG);
        let error = outcome.expect_err(micros);
        assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
        let outcome = f.ask(Command::Inspect(Inspect { key: key("a") }), LONG);
        assert_eq!(outcome.expect_err(micros).kind(), ErrorKind::Protocol);
    }
    let value = format!("lh1 {lease} 1795263780943818 host/1/a");
    let set = ["SET", "p:a", &value, "PX", "900000000000000000"];
    f.server.command(&set).unwrap();
    let found = f.ask(Command::Inspect(Inspect { key: key("a") }), LONG);
    assert!(matches!(found, Ok(Reply::Found { .. })), "{found:?}");
    assert_eq!(f.connection(), before);
}

#[test]
fn a_caller_that_led_is_not_unparked() {
    let f = fixture();
    f.acquire("a");
    let (before, sleep) = (Instant::now(), Duration::from_millis(20));
    std::thread::park_timeout(sleep);
    assert!(before.elapsed() >= sleep);
}

#[test]
fn an_acquire_waits_for_the_release_of_a_contended_key() {
    let f = fixture();
    let mut release = f.release("a", f.acquire("a"));
    release.held = Some(Held {
        token: 7,
        is_token_in_value: true,
        others_queued: true,
        valid_until: MonotonicTime::at_tick(0),
    });
    for (asked, is_written) in [("a", false), ("b", true)] {
        f.server.stop();
        f.pipeline.send_release(release.clone());
        let deadline = MonotonicTime::now().after(LONG);
        let caller = Caller::new(1);
        let acquire = acquire_under(LeaseId::random(), asked);
        let acquire = PendingRequest::new(acquire, Some(Completion::new(&caller, 0)));
        let mut leadership = {
            let mut state = f.pipeline.state.lock();
            state.enqueue([acquire]);
            f.pipeline.try_lead(&mut state).unwrap()
        };
        let batch = leadership.next_batch();
        f.server.resume();
        assert_eq!(batch.len(), usize::from(is_written), "{asked}");
        assert!(leadership.write_and_read(batch, deadline, Some(deadline)));
        leadership.lead(&caller, deadline);
        drop(leadership);
        let outcome = caller.take_outcomes().next().unwrap();
        assert!(matches!(outcome, Ok(Reply::Granted { .. })), "{outcome:?}");
        assert_eq!(f.unanswered(), 0);
    }
}

#[test]
fn an_unread_release_is_repeated_after_a_cut() {
    let f = fixture();
    let lease = f.acquire("a");
    f.cut();
    f.pipeline.send_release(f.release("a", lease));
    while f.pipeline.run_maintenance() {}
    assert!(!f.exists("a"));
    assert!(f.is_idle());
}

#[test]
fn the_background_writes_many_releases() {
    let f = fixture();
    let names: Vec<String> = (0..1000).map(|n| n.to_string()).collect();
    let leases: Vec<LeaseId> = names.iter().map(|name| f.acquire(name)).collect();
    for (name, lease) in names.iter().zip(&leases) {
        f.pipeline.send_release(f.release(name, *lease));
    }
    assert!(f.unanswered() <= MAX_UNANSWERED);
    while f.pipeline.run_maintenance() {}
    assert!(names.iter().all(|name| !f.exists(name)));
    assert!(f.is_idle() && f.unanswered() == 0);
}

#[test]
fn releases_that_might_block_are_left_to_the_background() {
    let f = fixture();
    let long = |n: usize, len: usize| {
        let name = format!("{n}{}", "x".repeat(len));
        Release {
            min_hold: Duration::ZERO,
            mode: Mode::Exclusive,
            key: Key::new("p:", &name, 1 << 16).unwrap(),
            lease: LeaseId::random(),
            until: MonotonicTime::now().after(LONG),
            held: None,
            queued: Some(LONG),
        }
    };
    let bytes = || {
        let state = f.pipeline.state.lock();
        let connection = state.connection.as_ref();
        connection.map_or(0, PipelinedConnection::unanswered_bytes)
    };
    f.acquire("a");
    f.pipeline.send_release(long(0, 60_000));
    assert_eq!(bytes(), 0, "longer than all that may be written");
    assert_eq!(f.hook_calls.load(Ordering::SeqCst), 1);
    while f.pipeline.run_maintenance() {}
    f.server.stop();
    for n in 0..60 {
        f.pipeline.send_release(long(n, 1000));
    }
    let written = bytes();
    f.server.resume();
    assert!(written <= MAX_UNANSWERED_BYTES, "{written}");
    assert!(written > MAX_UNANSWERED_BYTES / 2, "{written}");
    // A leader that ends has the same limit.
    while f.pipeline.run_maintenance() {}
    let leadership = f.pipeline.try_lead(&mut f.pipeline.state.lock()).unwrap();
    for n in 0..60 {
        f.pipeline.send_release(long(n, 1000));
    }
    drop(leadership);
    let written = bytes();
    assert!(written <= MAX_UNANSWERED_BYTES, "{written}");
    assert!(written > MAX_UNANSWERED_BYTES / 2, "{written}");
    while f.pipeline.run_maintenance() {}
    assert!(f.is_idle() && f.unanswered() == 0);
}

#[test]
fn a_batch_of_several_calls_has_all_outcomes() {
    let f = fixture();
    let mut requests: Vec<Request> = (0..1000)
        .map(|n| {
            let command = acquire_of(&n.to_string());
            Request::new(command, MonotonicTime::now().after(LONG))
        })
        .collect();
    f.pipeline.execute(
        &mut requests.iter_mut().collect::<Vec<_>>(),
        Route::default(),
    );
    let mut tokens = std::collections::HashSet::new();
    for request in requests {
        match request.into_outcome() {
            Ok(Reply::Granted { token, .. }) => assert!(tokens.insert(token), "given twice"),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn each_call_on_a_cluster_has_the_keys_of_one_slot() {
    let server = Server::start().unwrap();
    let url = server.url();
    let f = with_layout(KeyLayout::Slots, server, &url, LONG);
    f.acquire("warm-up");
    f.use_scripts_only();
    // The keys have five slots. Each key comes twice, and keys of one slot do not follow each other.
    let names = (0..40).map(|n| format!("{{{}}}{}", n % 5, n / 10));
    for by_text in [false, true] {
        if by_text {
            f.server.command(&["SCRIPT", "FLUSH"]).unwrap();
        }
        let before = f.calls();
        let acquires = names.clone().map(|name| {
            let acquire = acquire_of(&format!("{name}{by_text}"));
            Request::new(acquire, MonotonicTime::now().after(LONG))
        });
        let mut requests: Vec<Request> = acquires.collect();
        f.pipeline.execute(
            &mut requests.iter_mut().collect::<Vec<_>>(),
            Route::default(),
        );
        for (n, request) in requests.into_iter().enumerate() {
            let outcome = request.into_outcome();
            // The earlier request for a key is served first.
            let is_right = match outcome {
                Ok(Reply::Granted { .. }) => n % 10 < 5,
                Ok(Reply::Contended { .. }) => n % 10 >= 5,
                _ => false,
            };
            assert!(is_right, "{n}: {outcome:?}");
        }
        let after = f.calls();
        let wanted = if by_text { [5, 5] } else { [5, 0] };
        assert_eq!([after[0] - before[0], after[1] - before[1]], wanted);
    }
    let counters = f.server.command(&["KEYS", "p:~fence{*}"]).unwrap();
    let leasehold_testbed::Reply::Array(counters) = counters else {
        panic!("{counters}");
    };
    assert_eq!(counters.len(), 6, "one for each slot: {counters:?}");
}

/// Before the pipeline closes the connection, it writes undos.
#[test]
fn undos_on_a_cluster_are_written_slot_by_slot() {
    let server = Server::start().unwrap();
    let url = server.url();
    let f = with_layout(KeyLayout::Slots, server, &url, Duration::from_secs(2));
    f.warm_up("warm-up");
    let before = f.calls();
    f.server.stop();
    let names = (0..10).map(|n| format!("{{{}}}{n}", n % 5));
    let acquires = names.clone().map(|name| {
        // The time-out of the connection ends the requests.
        Request::new(acquire_of(&name), MonotonicTime::now().after(LONG))
    });
    let mut requests: Vec<Request> = acquires.collect();
    f.pipeline.execute(
        &mut requests.iter_mut().collect::<Vec<_>>(),
        Route::default(),
    );
    f.server.resume();
    // Five calls for the undos of the acquires. The first one has the script's text.
    let wanted = [before[0] + 4, before[1] + 1];
    assert!(eventually(LONG, || f.calls() == wanted), "{:?}", f.calls());
    assert!(names.clone().all(|name| !f.exists(&name)));
}

#[test]
fn the_late_grant_of_a_timed_out_caller_is_released() {
    let f = fixture();
    f.acquire("warm-up");
    f.time_out_behind_a_leader();
    while f.pipeline.run_maintenance() {}
    assert!(f.exists("leader"));
    assert!(!f.exists("other"));
}

#[test]
fn a_server_that_was_never_reached_refuses_at_once() {
    let mut f = with_timeout(3 * LONG);
    f.server.kill();
    let failures = || f.pipeline.shared.endpoint.failures();
    let begun_at = MonotonicTime::now();
    let (_, outcome) = f.acquire_within("k", 3 * LONG);
    let error = outcome.unwrap_err();
    assert!(error.is_lasting() && error.is_unavailable(), "{error}");
    let refused = f.connect_error(3 * LONG);
    assert!(refused.is_lasting(), "{refused}");
    assert!(failures() >= 2, "one attempt for each call at least");
    assert!(MonotonicTime::now() < begun_at.after(LONG));
}

#[test]
fn a_server_that_was_reached_may_restart_while_a_caller_connects() {
    let mut f = with_timeout(3 * LONG);
    f.reach();
    f.server.kill();
    let (server, pipeline) = (&mut f.server, &f.pipeline);
    std::thread::scope(|scope| {
        let until = MonotonicTime::now().after(3 * LONG);
        let caller =
            scope.spawn(move || pipeline.run_one(acquire_of("k"), until, Route::default()));
        let failures = || pipeline.shared.endpoint.failures();
        assert!(eventually(LONG, || failures() >= 2));
        server.restart().unwrap();
        let outcome = caller.join().unwrap();
        assert!(matches!(outcome, Ok(Reply::Granted { .. })), "{outcome:?}");
    });
}

#[test]
fn a_refused_login_is_not_repeated() {
    let f = with_timeout(3 * LONG);
    f.acquire("warm-up");
    let set_password = ["CONFIG", "SET", "requirepass", "secret"];
    f.server.command(&set_password).unwrap();
    let begun_at = MonotonicTime::now();
    let refused = f.connect_error(3 * LONG);
    assert_eq!(refused.kind(), ErrorKind::Denied, "{refused}");
    assert!(refused.is_lasting());
    assert!(MonotonicTime::now() < begun_at.after(LONG));
}

#[test]
fn a_caller_withdraws_while_the_leader_connects() {
    let mut f = fixture();
    f.reach();
    f.server.kill();
    let caller = Caller::new(1);
    let other = acquire_of("other");
    let request = PendingRequest::new(other, Some(Completion::new(&caller, 0)));
    f.pipeline.state.lock().enqueue([request]);
    let Fixture {
        server, pipeline, ..
    } = &mut f;
    std::thread::scope(|scope| {
        let command = acquire_of("leader");
        let leader = scope.spawn(|| {
            pipeline.run_one(command, MonotonicTime::now().after(LONG), Route::default())
        });
        // The leader has both requests, and waits for a connection that cannot be made.
        let is_refused = || pipeline.shared.endpoint.last_error().is_some();
        assert!(eventually(LONG, || {
            pipeline.state.lock().awaited.is_empty() && is_refused()
        }));
        // The caller leaves, as when its deadline has passed.
        caller.leave();
        pipeline.withdraw_unsent(&caller);
        let outcome = caller.take_outcomes().next().unwrap();
        assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Unavailable);
        server.restart().unwrap();
        let outcome = leader.join().unwrap();
        assert!(matches!(outcome, Ok(Reply::Granted { .. })), "{outcome:?}");
    });
    let set = f.server.calls("set").unwrap();
    assert_eq!(set, 1, "the leader's key only");
}

#[test]
fn callers_may_leave_while_the_leader_connects() {
    let mut f = with_timeout(3 * LONG);
    f.reach();
    f.server.kill();
    let release = f.release("left", LeaseId::random());
    f.pipeline.adopt_release(QueuedRelease::new(release));
    let pipeline = &f.pipeline;
    std::thread::scope(|scope| {
        let until = MonotonicTime::now().after(3 * LONG);
        let leader =
            scope.spawn(move || pipeline.run_one(acquire_of("leader"), until, Route::default()));
        let is_unsent = || pipeline.state.lock().unsent.iter().count() == 2;
        assert!(eventually(LONG, is_unsent));
        let taken = pipeline.take_releases(|key| key.name() == "left");
        assert_eq!(taken.len(), 1);
        assert_eq!(pipeline.state.lock().unsent.iter().count(), 1);
        f.is_retired.store(true, Ordering::SeqCst);
        assert!(eventually(LONG, || leader.is_finished()));
        let error = leader.join().unwrap().unwrap_err();
        assert_eq!(error.redirect(), Some(&Redirect::Retired), "{error}");
    });
}

#[test]
fn callers_of_a_retired_server_send_their_requests_elsewhere() {
    let mut f = with_timeout(3 * LONG);
    f.reach();
    f.server.kill();
    f.is_retired.store(true, Ordering::SeqCst);
    let release = f.release("k", LeaseId::random());
    for command in [acquire_of("k"), Command::Release(release)] {
        let until = MonotonicTime::now().after(3 * LONG);
        let error = f
            .pipeline
            .run_one(command, until, Route::default())
            .unwrap_err();
        assert_eq!(error.redirect(), Some(&Redirect::Retired), "{error}");
        assert!(MonotonicTime::now() < until);
    }
    assert!(f.pipeline.is_idle(), "the caller has the release");
    let refused = f.connect_error(3 * LONG);
    assert_eq!(refused.redirect(), Some(&Redirect::Retired), "{refused}");
    // No caller waits for this release, so it stays until the store takes it.
    f.pipeline.send_release(f.release("k", LeaseId::random()));
    f.pipeline.run_maintenance();
    assert_eq!(f.pipeline.take_releases(|_| true).len(), 1);
}

#[test]
fn a_pings_failure_is_no_reason_of_other_requests() {
    let f = fixture();
    f.acquire("warm-up");
    let set_password = ["CONFIG", "SET", "requirepass", "secret"];
    f.server.command(&set_password).unwrap();
    let refused = f.connect_error(LONG);
    assert_eq!(refused.kind(), ErrorKind::Denied, "{refused}");
    f.time_out_behind_a_leader();
}

#[test]
fn submitted_requests_end_with_the_client() {
    let f = fixture();
    f.acquire("warm-up");
    let submit = || {
        let (submitted, mut completions) = Submitted::new(1);
        let inspect = Command::Inspect(Inspect { key: key("a") });
        f.pipeline.submit(vec![(inspect, completions.remove(0))]);
        submitted
    };
    let is_refused = |outcomes: &[Option<Outcome>]| {
        let kind = |outcome: &Outcome| outcome.as_ref().err().map(Error::kind);
        let [outcome] = outcomes else { return false };
        outcome.as_ref().and_then(kind) == Some(ErrorKind::Shutdown)
    };
    let [queued, behind_a_leader] = [submit(), submit()];
    let leadership = f.pipeline.try_lead(&mut f.pipeline.state.lock()).unwrap();
    f.pipeline.end();
    assert!(!is_refused(&queued.outcomes()), "the leader may write it");
    drop(leadership);
    for submitted in [queued, behind_a_leader, submit()] {
        assert!(is_refused(&submitted.outcomes()));
    }
    let f = fixture();
    let (submitted, mut completions) = Submitted::new(1);
    let inspect = Command::Inspect(Inspect { key: key("a") });
    f.pipeline.submit(vec![(inspect, completions.remove(0))]);
    f.pipeline.end();
    assert!(is_refused(&submitted.outcomes()), "no thread leads");
}

#[test]
fn a_panicking_leader_appoints_another_and_undoes_its_acquires() {
    let f = fixture();
    f.acquire("warm-up");
    f.server.stop();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| f.acquire_within("first", LONG));
        assert!(eventually(LONG, || f.pipeline.state.lock().is_led));
        // The leader must not take the other two requests: the caller that is appointed next writes them.
        f.wait_for_queue(0);
        *f.pipeline.panic_at.lock() = Some(key("second"));
        let two = ["second", "third"].map(|name| {
            let f = &f;
            scope.spawn(move || f.acquire_within(name, LONG))
        });
        f.wait_for_queue(2);
        f.server.resume();
        first.join().unwrap().1.unwrap();
        let outcomes = two.map(|thread| thread.join());
        let panicked = outcomes.iter().filter(|outcome| outcome.is_err()).count();
        assert_eq!(panicked, 1, "the panic goes on in the thread that led");
        for outcome in outcomes.into_iter().flatten() {
            let error = outcome.1.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Timeout, "the outcome is unknown");
        }
    });
    while f.pipeline.run_maintenance() && (f.exists("second") || f.exists("third")) {}
    assert!(!f.exists("second") && !f.exists("third"));
    f.acquire("second");
}

#[test]
fn a_flush_follows_all_earlier_releases() {
    let f = fixture();
    let lease = f.acquire("a");
    f.pipeline.send_release(f.release("a", lease));
    let flushed = f.ask(Command::Flush, LONG);
    assert_eq!(flushed.unwrap(), Reply::Done);
    assert_eq!(f.unanswered(), 0);
    assert!(!f.exists("a"));
}

#[test]
fn a_flush_without_a_server_fails_and_keeps_releases() {
    let mut f = with_timeout(Duration::from_secs(3));
    let lease = f.acquire("a");
    f.server.kill();
    f.pipeline.send_release(f.release("a", lease));
    let error = f.ask(Command::Flush, LONG).unwrap_err();
    assert!(error.is_unavailable(), "{error}");
    assert!(!f.is_idle(), "the release is queued");
}

#[test]
fn a_refused_release_is_retried_after_a_pause() {
    let f = fixture();
    let lease = f.acquire("a");
    f.server
        .command(&["ACL", "SETUSER", "default", "-del"])
        .unwrap();
    f.pipeline.send_release(f.release("a", lease));
    assert!(f.pipeline.run_maintenance(), "the release has failed");
    f.server.command(&["CONFIG", "RESETSTAT"]).unwrap();
    assert!(f.pipeline.run_maintenance(), "the retry is not due");
    let stats = f.server.command(&["INFO", "commandstats"]).unwrap();
    let stats = stats.as_text().unwrap().to_owned();
    assert!(!stats.contains("cmdstat_eval"), "{stats}");
    f.server
        .command(&["ACL", "SETUSER", "default", "+del"])
        .unwrap();
    // The retry is not due yet, but it is sent together with the next request for its key.
    f.acquire("a");
    assert!(f.is_idle());
}

#[test]
fn an_unanswered_acquire_is_undone_before_the_next_one() {
    let f = fixture();
    let lease = f.acquire("a");
    let acquire = acquire_under(lease, "a");
    let cut = Error::new(ErrorKind::Unavailable, "");
    let undo = PendingRequest::new(acquire, None).on_connection_lost(&cut, false);
    f.pipeline.state.lock().apply(undo);
    f.acquire("a");
}

/// A receiver that records the reports about releases.
fn recorded_reports() -> (Reports, Arc<Mutex<Vec<String>>>) {
    let texts = Arc::<Mutex<Vec<String>>>::default();
    let recorded = Arc::clone(&texts);
    let reports = Reports::new(ReportedReleases::Late, move |report| {
        let Report::Release(key, token, report) = report else {
            return;
        };
        let report = match report {
            LateRelease::Delayed(error) => format!("{:?}", error.kind()),
            LateRelease::Lost(reason) => format!("{reason:?}"),
            ended @ LateRelease::Ended { .. } => panic!("{ended:?}"),
        };
        let text = format!("{} {token} {report}", key.name());
        recorded.lock().push(text);
    });
    (reports, texts)
}

fn held(name: &str) -> PendingRequest {
    let command = Command::Release(Release {
        min_hold: Duration::ZERO,
        mode: Mode::Exclusive,
        key: key(name),
        lease: LeaseId::random(),
        until: MonotonicTime::now().after(LONG),
        held: Some(Held {
            token: 7,
            is_token_in_value: true,
            others_queued: false,
            valid_until: MonotonicTime::at_tick(0),
        }),
        queued: None,
    });
    PendingRequest::new(command, None)
}

#[test]
fn a_release_dropped_by_a_panic_is_reported() {
    let (reports, texts) = recorded_reports();
    let release = held("a").with_tracker(&reports);
    let panicked = catch_unwind(AssertUnwindSafe(move || {
        let _batch = release;
        panic!("this panic is part of the test");
    }));
    assert!(panicked.is_err());
    assert_eq!(*texts.lock(), ["a 7 Timeout"]);
}

#[test]
fn repeated_failures_of_a_release_are_reported_once() {
    let (reports, texts) = recorded_reports();
    let cut = Error::new(ErrorKind::Unavailable, "");
    let mut release = held("a").with_tracker(&reports);
    for attempt in 0..3 {
        let Next::RetryNow(again) = release.on_connection_lost(&cut, attempt == 0) else {
            panic!("it is retried until its ttl has ended");
        };
        release = again;
    }
    assert_eq!(*texts.lock(), ["a 7 Unavailable"]);
    release.on_reply(Ok(Reply::Missing));
    assert_eq!(*texts.lock(), ["a 7 Unavailable"]);
}

#[test]
fn a_release_done_within_two_attempts_is_not_reported() {
    let (reports, texts) = recorded_reports();
    held("a").with_tracker(&reports).on_reply(Ok(Reply::Done));
    let cut = Error::new(ErrorKind::Unavailable, "");
    let next = held("b")
        .with_tracker(&reports)
        .on_connection_lost(&cut, true);
    let Next::RetryNow(again) = next else {
        panic!("it is retried at once on another connection");
    };
    again.on_reply(Ok(Reply::Done));
    assert!(texts.lock().is_empty());
}

#[test]
fn a_retry_is_due_before_the_ttl_ends() {
    let now = MonotonicTime::now();
    let mut request = held("a");
    let Command::Release(Release { until, .. }) = &mut request.command else {
        unreachable!("it is a release");
    };
    *until = now.after(Duration::from_millis(5));
    let until = *until;
    let release = request.into_release(Some(now.after(LONG))).unwrap();
    assert_eq!(release.due, until);
    let release = held("b").into_release(Some(now)).unwrap();
    assert_eq!(release.due, now);
}

#[test]
fn an_unlock_is_late_if_its_caller_has_left() {
    let (reports, texts) = recorded_reports();
    let caller = Caller::new(1);
    caller.leave();
    let mut release = held("a").with_tracker(&reports);
    release.completion = Some(Completion::new(&caller, 0));
    release.on_reply(Ok(Reply::Done));
    assert_eq!(*texts.lock(), ["a 7 Timeout"]);
}

/// A release of a lease whose validity ends after `left`.
fn held_for(left: Duration) -> PendingRequest {
    let mut request = held("a");
    let Command::Release(Release {
        held: Some(held), ..
    }) = &mut request.command
    else {
        unreachable!("it is a guard's release");
    };
    held.valid_until = MonotonicTime::now().after(left);
    request
}

/// Whether a loss is reported after `reply`. `waits`: whether the caller still waits. `None` stands for a dropped
/// guard, whose release goes through the queue of the pipeline.
fn is_loss_reported(request: PendingRequest, waits: Option<bool>, reply: Reply) -> bool {
    let (reports, texts) = recorded_reports();
    let mut request = request.with_tracker(&reports);
    let caller = Caller::new(1);
    if waits.is_some() {
        request.completion = Some(Completion::new(&caller, 0));
    } else {
        let mut releases = Releases::default();
        releases.push(request.into_release(None).unwrap());
        request = PendingRequest::from_release(releases.pop().unwrap(), &reports);
    }
    if waits == Some(false) {
        caller.leave();
    }
    request.on_reply(Ok(reply));
    let texts = texts.lock();
    texts.contains(&format!("a 7 {:?}", LossReason::Deleted))
}

#[test]
fn a_loss_is_reported_if_no_caller_gets_the_reply() {
    let cut = Error::new(ErrorKind::Unavailable, "");
    let Next::RetryNow(repeated) = held_for(LONG).on_connection_lost(&cut, true) else {
        panic!("it is retried at once on another connection");
    };
    for (what, request, waits, reply, is_reported) in [
        ("dropped", held_for(LONG), None, Reply::Missing, true),
        (
            "caller left",
            held_for(LONG),
            Some(false),
            Reply::Missing,
            true,
        ),
        (
            "caller waits",
            held_for(LONG),
            Some(true),
            Reply::Missing,
            false,
        ),
        ("released", held_for(LONG), None, Reply::Done, false),
        (
            "past validity",
            held_for(Duration::ZERO),
            None,
            Reply::Missing,
            false,
        ),
        ("repeated", repeated, None, Reply::Missing, false),
    ] {
        assert_eq!(
            is_loss_reported(request, waits, reply),
            is_reported,
            "{what}"
        );
    }
}

#[test]
fn refused_releases_do_not_delay_other_requests() {
    let f = fixture();
    let names: Vec<String> = (0..3 * MAX_BATCH).map(|n| n.to_string()).collect();
    let leases: Vec<LeaseId> = names.iter().map(|name| f.acquire(name)).collect();
    f.server
        .command(&["ACL", "SETUSER", "default", "-del"])
        .unwrap();
    for (name, lease) in names.iter().zip(&leases) {
        f.pipeline.send_release(Release::unheld(
            key(name),
            *lease,
            MonotonicTime::now().after(2 * LONG),
        ));
    }
    let started = MonotonicTime::now();
    assert!(f.pipeline.run_maintenance(), "the releases have failed");
    f.acquire("another");
    let until = started.after(LONG / 2);
    assert!(
        MonotonicTime::now() < until,
        "the acquire waited until the keys had expired"
    );
    f.server
        .command(&["ACL", "SETUSER", "default", "+del"])
        .unwrap();
    while f.pipeline.run_maintenance() {}
    assert!(names.iter().all(|name| !f.exists(name)));
}

#[test]
fn a_broken_connection_makes_idle_ones_stale() {
    let f = fixture();
    f.acquire("a");
    let own = || {
        f.pipeline
            .shared
            .connector
            .exclusive_connection(LONG)
            .unwrap()
    };
    own().ping(LONG).unwrap();
    f.cut();
    let (_, cut) = f.acquire_within("b", LONG);
    assert_eq!(cut.unwrap_err().kind(), ErrorKind::Unavailable);
    own().ping(LONG).unwrap();
    f.acquire("c");
}

//! A pipeline on a real Redis, with faults that only the inside can see or make.

mod leaving;
mod stale;
mod unanswered;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use leasehold_testbed::{Server, eventually};

use super::*;
use crate::store::command::{Held, Reply};
use crate::store::late_release::Delay;
use crate::store::redis::pipeline::connection;
use crate::util::id::{HolderId, LeaseId};
use crate::util::key::{self, Key};

const LONG: Duration = Duration::from_secs(20);

struct Fixture {
    server: Server,
    pipeline: Pipeline,
    rings: Arc<AtomicUsize>,
}

fn fixture() -> Fixture {
    // Longer than any pause of a busy machine: no answer that comes is taken for a time-out.
    with_timeout(Duration::from_secs(10))
}

fn with_timeout(timeout: Duration) -> Fixture {
    let server = Server::start().unwrap();
    let url = server.url();
    at(server, &url, timeout)
}

/// A pipeline to `server`, which is found at `url`.
fn at(server: Server, url: &str, timeout: Duration) -> Fixture {
    let endpoint = Arc::new(Endpoint::new(url, timeout).unwrap());
    let rings = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&rings);
    let pipeline = Pipeline::for_callers(Arc::new(Shared {
        pool: connection::pool(&endpoint, 2),
        endpoint,
        names: ScriptContext {
            holder: HolderId::of_this_process(),
            fence_counter: key::fence_counter("p:"),
            max_value: 1 << 20,
        },
        connect_timeout: timeout,
        command_timeout: timeout,
        request_maintenance: Box::new(move |_| {
            counter.fetch_add(1, Ordering::SeqCst);
        }),
        delays: None,
    }));
    Fixture {
        server,
        pipeline,
        rings,
    }
}

fn key(name: &str) -> Key {
    Key::new("p:", name, 100).unwrap()
}

fn acquire_of(name: &str) -> Command {
    acquire_under(LeaseId::random(), name)
}

fn acquire_under(lease: LeaseId, name: &str) -> Command {
    Command::Acquire {
        key: key(name),
        lease,
        ttl: LONG,
        queue_mode: crate::store::QueueMode::None,
    }
}

impl Fixture {
    /// Redis ends the pipeline's connection.
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

    fn ask(&self, command: Command, limit: Duration) -> Result<Reply, Error> {
        self.pipeline
            .ask(command, MonotonicTime::now().after(limit))
    }

    fn release(&self, name: &str, lease: LeaseId) -> Command {
        Command::Release {
            key: key(name),
            lease,
            until: MonotonicTime::now().after(LONG),
            held: None,
            queued: None,
        }
    }

    /// Waits until so many requests are in the pipeline's queue.
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

    /// The number that the server gave to the pipeline's connection.
    fn connection(&self) -> Option<String> {
        let list = self.server.command(&["CLIENT", "LIST"]).unwrap();
        let mut lines = list.as_text().unwrap().lines();
        let own = lines.find(|line| line.contains(" cmd=eval"))?;
        own.split(' ').next().map(str::to_owned)
    }

    fn is_idle(&self) -> bool {
        let state = self.pipeline.state.lock();
        !state.led && !state.has_work()
    }
}

#[test]
fn a_posted_release_is_written_at_once_and_read_by_the_next_request() {
    let f = fixture();
    let lease = f.acquire("a");
    f.pipeline.post(f.release("a", lease));
    assert_eq!(f.unanswered(), 1);
    assert_eq!(f.rings.load(Ordering::SeqCst), 1, "somebody has to read it");
    f.acquire("a");
    assert_eq!(f.unanswered(), 0);
}

#[test]
fn what_others_write_under_a_key_costs_no_connection() {
    let f = fixture();
    f.acquire("b");
    let before = f.connection();
    let lease = LeaseId::random();
    for micros in ["garbage", "-795263780943818", "\u{fffd}", ""] {
        let value = format!("lh1 {lease} {micros}");
        let set = ["SET", "p:a", &value];
        f.server.command(&set).unwrap();
        let command = Command::Acquire {
            key: key("a"),
            lease,
            ttl: LONG,
            queue_mode: crate::store::QueueMode::Existing { notified: false },
        };
        let outcome = f.ask(command, LONG);
        let error = outcome.expect_err(micros);
        assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
        let outcome = f.ask(Command::Inspect { key: key("a") }, LONG);
        assert_eq!(outcome.expect_err(micros).kind(), ErrorKind::Protocol);
    }
    let value = format!("lh1 {lease} 1795263780943818 host/1/a");
    let set = ["SET", "p:a", &value, "PX", "900000000000000000"];
    f.server.command(&set).unwrap();
    let found = f.ask(Command::Inspect { key: key("a") }, LONG);
    assert!(matches!(found, Ok(Reply::Found { .. })), "{found:?}");
    assert_eq!(f.connection(), before);
}

#[test]
fn a_caller_that_did_not_sleep_finds_no_wake_up_left_for_its_own_sleep() {
    let f = fixture();
    f.acquire("a");
    let (before, sleep) = (Instant::now(), Duration::from_millis(20));
    std::thread::park_timeout(sleep);
    assert!(before.elapsed() >= sleep);
}

#[test]
fn what_others_wait_for_is_asked_for_again_only_once_its_release_is_answered() {
    let f = fixture();
    let mut release = f.release("a", f.acquire("a"));
    if let Command::Release { held, .. } = &mut release {
        *held = Some(Held {
            token: 7,
            others_queued: true,
        });
    }
    for (asked, waits) in [("a", true), ("b", false)] {
        f.server.stop();
        f.pipeline.post(release.clone());
        std::thread::scope(|scope| {
            scope.spawn(|| f.acquire(asked));
            let is_led = || {
                let state = f.pipeline.state.lock();
                // Its leader has the connection.
                (state.led && state.connection.is_none()).then(|| state.awaited.iter().count())
            };
            let is_in_queue = || is_led().is_some_and(|queued| queued == 1);
            let is_written = || is_led().is_some_and(|queued| queued == 0);
            let seen = if waits {
                eventually(Duration::from_secs(5), is_in_queue)
            } else {
                eventually(Duration::from_secs(5), is_written)
            };
            f.server.resume();
            assert!(seen, "{asked}");
        });
        assert_eq!(f.unanswered(), 0);
    }
}

#[test]
fn an_unread_release_of_a_cut_connection_is_written_again() {
    let f = fixture();
    let lease = f.acquire("a");
    f.cut();
    f.pipeline.post(f.release("a", lease));
    while f.pipeline.run_maintenance() {}
    assert!(!f.exists("a"));
    assert!(f.is_idle());
}

#[test]
fn many_posted_releases_are_left_to_the_background_and_none_is_lost() {
    let f = fixture();
    let names: Vec<String> = (0..1000).map(|n| n.to_string()).collect();
    let leases: Vec<LeaseId> = names.iter().map(|name| f.acquire(name)).collect();
    for (name, lease) in names.iter().zip(&leases) {
        f.pipeline.post(f.release(name, *lease));
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
        Command::Release {
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
    f.pipeline.post(long(0, 60_000));
    assert_eq!(bytes(), 0, "longer than all that may be written");
    assert_eq!(f.rings.load(Ordering::SeqCst), 1);
    while f.pipeline.run_maintenance() {}
    f.server.stop();
    for n in 0..60 {
        f.pipeline.post(long(n, 1000));
    }
    let written = bytes();
    f.server.resume();
    assert!(written <= MAX_UNANSWERED_BYTES, "{written}");
    assert!(written > MAX_UNANSWERED_BYTES / 2, "{written}");
    // As many as a leader leaves behind.
    while f.pipeline.run_maintenance() {}
    let leadership = f.pipeline.take_lead(&mut f.pipeline.state.lock()).unwrap();
    for n in 0..60 {
        f.pipeline.post(long(n, 1000));
    }
    drop(leadership);
    let written = bytes();
    assert!(written <= MAX_UNANSWERED_BYTES, "{written}");
    assert!(written > MAX_UNANSWERED_BYTES / 2, "{written}");
    while f.pipeline.run_maintenance() {}
    assert!(f.is_idle() && f.unanswered() == 0);
}

#[test]
fn a_batch_larger_than_one_script_call_is_answered_in_full() {
    let f = fixture();
    let mut requests: Vec<Request> = (0..1000)
        .map(|n| {
            let command = acquire_of(&n.to_string());
            Request::new(command, MonotonicTime::now().after(LONG))
        })
        .collect();
    f.pipeline
        .execute(&mut requests.iter_mut().collect::<Vec<_>>());
    let mut tokens = std::collections::HashSet::new();
    for request in requests {
        match request.into_outcome() {
            Ok(Reply::Granted { token }) => assert!(tokens.insert(token), "given twice"),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn a_follower_that_leaves_has_its_late_grant_released() {
    let f = fixture();
    f.acquire("warm-up");
    f.server.stop();
    std::thread::scope(|scope| {
        let leader = scope.spawn(|| f.acquire_within("leader", LONG));
        assert!(eventually(LONG, || f.pipeline.state.lock().led));
        let (_, outcome) = f.acquire_within("tracker", Duration::from_millis(20));
        assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Timeout);
        f.server.resume();
        leader.join().unwrap().1.unwrap();
    });
    while f.pipeline.run_maintenance() {}
    assert!(f.exists("leader"));
    assert!(!f.exists("tracker"));
}

#[test]
fn a_follower_withdraws_from_a_batch_without_connection() {
    let mut f = fixture();
    f.server.kill();
    let call = Call::new(1);
    let follower = acquire_of("follower");
    let request = f
        .pipeline
        .request(follower, Some(Completion::new(&call, 0)));
    f.pipeline.state.lock().ask([request]);
    let Fixture {
        server, pipeline, ..
    } = &mut f;
    std::thread::scope(|scope| {
        let command = acquire_of("leader");
        let leader = scope.spawn(|| pipeline.ask(command, MonotonicTime::now().after(LONG)));
        // The leader has both requests, and waits for a connection that cannot be made.
        let is_refused = || pipeline.shared.endpoint.last_error().is_some();
        assert!(eventually(LONG, || {
            pipeline.state.lock().awaited.is_empty() && is_refused()
        }));
        // As when its deadline has passed.
        call.leave();
        pipeline.withdraw_unsent(&call);
        let outcome = call.take_outcomes().next().unwrap();
        assert_eq!(outcome.unwrap_err().kind(), ErrorKind::Unavailable);
        server.restart().unwrap();
        let outcome = leader.join().unwrap();
        assert!(matches!(outcome, Ok(Reply::Granted { .. })), "{outcome:?}");
    });
    let set = f.server.calls("set").unwrap();
    assert_eq!(set, 2, "the leader's key and the fence counter");
}

#[test]
fn a_leader_that_panics_passes_on_and_leaves_no_ghost() {
    let f = fixture();
    f.acquire("warm-up");
    f.server.stop();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| f.acquire_within("first", LONG));
        assert!(eventually(LONG, || f.pipeline.state.lock().led));
        // Both wait in the queue; whichever is appointed next panics after it has written.
        f.pipeline.panic_next.store(true, Ordering::SeqCst);
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
            assert_eq!(error.kind(), ErrorKind::Timeout, "its outcome is unknown");
        }
    });
    while f.pipeline.run_maintenance() && (f.exists("second") || f.exists("third")) {}
    assert!(!f.exists("second") && !f.exists("third"));
    f.acquire("second");
}

#[test]
fn a_flush_is_answered_after_all_that_was_posted() {
    let f = fixture();
    let lease = f.acquire("a");
    f.pipeline.post(f.release("a", lease));
    let flushed = f.ask(Command::Flush { pipeline: 0 }, LONG);
    assert_eq!(flushed.unwrap(), Reply::Done);
    assert_eq!(f.unanswered(), 0);
    assert!(!f.exists("a"));
}

#[test]
fn a_flush_without_a_server_says_so_and_keeps_what_is_owed() {
    let mut f = with_timeout(Duration::from_millis(500));
    let lease = f.acquire("a");
    f.server.kill();
    f.pipeline.post(f.release("a", lease));
    let error = f.ask(Command::Flush { pipeline: 0 }, LONG).unwrap_err();
    assert!(error.is_unavailable(), "{error}");
    assert!(!f.is_idle(), "the release is still unanswered");
}

#[test]
fn a_release_that_is_refused_is_tried_again_later_and_not_at_once() {
    let f = fixture();
    let lease = f.acquire("a");
    f.server
        .command(&["ACL", "SETUSER", "default", "-del"])
        .unwrap();
    f.pipeline.post(f.release("a", lease));
    assert!(f.pipeline.run_maintenance(), "it is still unanswered");
    f.server.command(&["CONFIG", "RESETSTAT"]).unwrap();
    assert!(f.pipeline.run_maintenance(), "and not due yet");
    let stats = f.server.command(&["INFO", "commandstats"]).unwrap();
    let stats = stats.as_text().unwrap().to_owned();
    assert!(!stats.contains("cmdstat_eval"), "{stats}");
    f.server
        .command(&["ACL", "SETUSER", "default", "+del"])
        .unwrap();
    // Due or not, it goes along with the next request for its key, so that this does not overtake it.
    f.acquire("a");
    assert!(f.is_idle());
}

#[test]
fn what_an_unanswered_acquire_took_is_given_back_before_the_next_one() {
    let f = fixture();
    let lease = f.acquire("a");
    let acquire = acquire_under(lease, "a");
    let cut = Error::new(ErrorKind::Unavailable, "");
    let unanswered = PendingRequest::new(acquire, None).unanswered(&cut, false);
    f.pipeline.state.lock().apply(unanswered);
    f.acquire("a");
}

/// What is told of the releases of a pipeline that is given this hook.
fn listening() -> (DelayHook, Arc<Mutex<Vec<String>>>) {
    let told = Arc::<Mutex<Vec<String>>>::default();
    let hook = {
        let told = Arc::clone(&told);
        Arc::new(move |key: &Key, token, delay| {
            let news = match delay {
                Delay::Began(error) => format!("{:?}", error.kind()),
                Delay::Ended { confirmed } => format!("{confirmed}"),
                Delay::Queued | Delay::Taken => return,
            };
            told.lock().push(format!("{} {token} {news}", key.name()));
        })
    };
    (hook, told)
}

fn held(name: &str) -> PendingRequest {
    let command = Command::Release {
        key: key(name),
        lease: LeaseId::random(),
        until: MonotonicTime::now().after(LONG),
        held: Some(Held {
            token: 7,
            others_queued: false,
        }),
        queued: None,
    };
    PendingRequest::new(command, None)
}

#[test]
fn a_release_swept_away_by_a_panic_is_told_of_as_late_and_given_up() {
    let (hook, told) = listening();
    let release = held("a").tracked(Some(&hook));
    let swept = catch_unwind(AssertUnwindSafe(move || {
        let _in_a_batch = release;
        panic!("a test asks for this panic");
    }));
    assert!(swept.is_err());
    assert_eq!(*told.lock(), ["a 7 Timeout", "a 7 false"]);
}

#[test]
fn a_release_that_fails_again_and_again_is_told_of_once_and_confirmed_once() {
    let (hook, told) = listening();
    let cut = Error::new(ErrorKind::Unavailable, "");
    let mut release = held("a").tracked(Some(&hook));
    for attempt in 0..3 {
        let Next::Again(again) = release.unanswered(&cut, attempt == 0) else {
            panic!("it is unanswered until its ttl has ended");
        };
        release = again;
    }
    assert_eq!(*told.lock(), ["a 7 Unavailable"]);
    release.answered(Ok(Reply::Missing));
    assert_eq!(*told.lock(), ["a 7 Unavailable", "a 7 true"]);
}

#[test]
fn a_release_done_at_the_first_or_second_attempt_is_not_told_of() {
    let (hook, told) = listening();
    held("a").tracked(Some(&hook)).answered(Ok(Reply::Done));
    let cut = Error::new(ErrorKind::Unavailable, "");
    let next = held("b").tracked(Some(&hook)).unanswered(&cut, true);
    let Next::Again(again) = next else {
        panic!("another connection may do it at once");
    };
    again.answered(Ok(Reply::Done));
    assert!(told.lock().is_empty());
}

#[test]
fn a_repetition_is_due_when_the_ttl_ends_at_the_latest() {
    let now = MonotonicTime::now();
    let mut request = held("a");
    let Command::Release { until, .. } = &mut request.command else {
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
fn an_unlock_answered_after_its_caller_has_left_is_told_of_as_late() {
    let (hook, told) = listening();
    let call = Call::new(1);
    call.leave();
    let mut release = held("a").tracked(Some(&hook));
    release.completion = Some(Completion::new(&call, 0));
    release.answered(Ok(Reply::Done));
    assert_eq!(*told.lock(), ["a 7 Timeout", "a 7 true"]);
}

#[test]
fn many_refused_releases_keep_nobody_from_being_served() {
    let f = fixture();
    let names: Vec<String> = (0..3 * MAX_BATCH).map(|n| n.to_string()).collect();
    let leases: Vec<LeaseId> = names.iter().map(|name| f.acquire(name)).collect();
    f.server
        .command(&["ACL", "SETUSER", "default", "-del"])
        .unwrap();
    for (name, lease) in names.iter().zip(&leases) {
        f.pipeline.post(Command::Release {
            key: key(name),
            lease: *lease,
            until: MonotonicTime::now().after(2 * LONG),
            held: None,
            queued: None,
        });
    }
    let started = MonotonicTime::now();
    assert!(f.pipeline.run_maintenance(), "they are still unanswered");
    f.acquire("another");
    let until = started.after(LONG / 2);
    assert!(
        MonotonicTime::now() < until,
        "only once their keys had expired"
    );
    f.server
        .command(&["ACL", "SETUSER", "default", "+del"])
        .unwrap();
    while f.pipeline.run_maintenance() {}
    assert!(names.iter().all(|name| !f.exists(name)));
}

#[test]
fn when_one_connection_has_broken_those_that_were_idle_then_are_not_trusted() {
    let f = fixture();
    f.acquire("a");
    let idle = f.pipeline.shared.pool.get().unwrap();
    drop(idle);
    f.cut();
    let (_, cut) = f.acquire_within("b", LONG);
    assert_eq!(cut.unwrap_err().kind(), ErrorKind::Unavailable);
    f.acquire("c");
}

//! Work that runs once for its name: requests, faults, and records that are not ours. `conformance::once` has the
//! behaviour on every kind of store.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use leasehold::crossbeam_channel::{Receiver, Sender, bounded};
use leasehold::{Client, Error, ErrorKind, EventHandler, EventLock, Run};
use leasehold_testbed::{OwnClock, Proxy, Reply, Server, eventually};

use crate::child::{Child, Parent};
use crate::steady::steady;
use crate::support::{
    LONG_TTL, SOON, Task, ask, assert_all_become_free, held_keys, in_redis, is_held, lock_requests,
    millis, notified_clients, reads, script_calls, secs, server,
};

fn client(server: &Server) -> Client {
    steady(&server.url()).ttl(LONG_TTL).build().unwrap()
}

fn succeed(client: &Client, name: &str) -> Run<&'static str> {
    client.once(name).run(|_| Ok::<_, Error>("ok")).unwrap()
}

fn is_tracked(server: &Server, clients: u64) -> bool {
    crate::support::tracked(server) >= clients
}

/// The clients ask while the work runs. Each asks once more when the record is written.
#[test]
fn many_callers_of_one_name_send_two_requests_each() {
    const CLIENTS: u64 = 60;
    let server = server();
    let clients: Vec<_> = (0..CLIENTS).map(|_| client(&server)).collect();
    // Each connection for notifications is open.
    let warm = clients
        .iter()
        .zip(0..)
        .map(|(client, n)| client.mutex(format!("warm:{n}")).lock().unwrap());
    let warm = warm.collect::<Vec<_>>();
    assert!(eventually(6 * SOON, || notified_clients(&server) == clients.len()));
    drop(warm);
    assert_all_become_free(&server);
    let (requests, tracking) = (lock_requests(&server), reads(&server));
    let runs = Arc::new(AtomicUsize::new(0));
    let (end, ended) = bounded::<()>(0);
    let tasks: Vec<_> = clients
        .iter()
        .map(|client| {
            let (once, runs, ended) = (client.once("k"), Arc::clone(&runs), ended.clone());
            Task::start(move || {
                once.run(|_| {
                    runs.fetch_add(1, Ordering::SeqCst);
                    let _ = ended.recv();
                    Ok::<_, Error>("ok")
                })
                .unwrap()
            })
        })
        .collect();
    let all_ask =
        || lock_requests(&server) >= requests + CLIENTS && is_tracked(&server, CLIENTS - 1);
    assert!(eventually(6 * SOON, all_ask));
    drop(end);
    let outcomes: Vec<Run<_>> = tasks
        .into_iter()
        .map(|task| task.within(6 * SOON, "the run"))
        .collect();
    assert_eq!(runs.load(Ordering::SeqCst), 1);
    let done = |run: &&Run<_>| matches!(run, Run::Done(record) if record.result() == b"ok");
    assert_eq!(outcomes.iter().filter(done).count() as u64, CLIENTS - 1);
    let requests = lock_requests(&server) - requests;
    assert!(requests <= 2 * CLIENTS + 2, "{requests} requests");
    let tracking = reads(&server) - tracking;
    println!("{requests} requests, {tracking} reads of a key");
    assert_eq!(succeed_again(&clients[0], &server), 1);
}

/// The number of requests of a call for a name whose work is done.
fn succeed_again(client: &Client, server: &Server) -> u64 {
    let before = lock_requests(server);
    assert!(matches!(succeed(client, "k"), Run::Done(_)));
    lock_requests(server) - before
}

#[test]
fn work_that_fails_leaves_no_record_and_admits_a_waiter() {
    let server = server();
    let (one, two) = (client(&server), client(&server));
    for panics in [false, true] {
        let once = one.once("k");
        let mut waiter = None;
        let first = catch_unwind(AssertUnwindSafe(|| {
            once.run(|_| {
                let two = two.clone();
                waiter = Some(Task::start_blocked(move || succeed(&two, "k")));
                assert!(eventually(SOON, || is_tracked(&server, 2)));
                assert!(!panics, "no luck");
                Err::<(), Box<dyn std::error::Error>>("no luck".into())
            })
        }));
        assert_eq!(first.is_err(), panics);
        // Long before the ttl ends.
        let second = waiter.unwrap().within(2 * SOON, "the waiter's run");
        assert_eq!(second, Run::Ran("ok"));
        assert!(once.forget().unwrap());
    }
    assert!(held_keys(&server).is_empty());
}

#[test]
fn at_most_once_an_error_may_run_again_and_a_panic_may_not() {
    let server = server();
    let client = client(&server);
    let once = client.once("k").at_most_once();
    once.run(|_| {
        let record = client.once("k").get().unwrap().unwrap();
        assert!(!record.is_done() && record.result().is_empty() && record.ended_at().is_none());
        Err::<(), Box<dyn std::error::Error>>("no luck".into())
    })
    .unwrap_err();
    assert_eq!(once.get().unwrap(), None);
    let mut waiter = None;
    let panics = || {
        once.run(|_| -> Result<(), Error> {
            let client = client.clone();
            waiter = Some(Task::start_blocked(move || succeed(&client, "k")));
            // The lock of the run, and the value.
            assert!(eventually(SOON, || is_tracked(&server, 2)));
            panic!("no luck")
        })
    };
    catch_unwind(AssertUnwindSafe(panics)).unwrap_err();
    assert!(!is_held(&server, "k"));
    // Long before the ttl ends. Also for callers that would run it at least once.
    let second = waiter.unwrap().within(2 * SOON, "the interruption");
    assert!(matches!(second, Run::Interrupted(_)));
    assert!(matches!(succeed(&client, "k"), Run::Interrupted(_)));
    assert!(once.forget().unwrap());
    assert!(matches!(succeed(&client, "k"), Run::Ran(_)));
}

pub fn run_until_killed(parent: &Parent) {
    let client = steady(&parent.url).ttl(secs(2)).build().unwrap();
    let run = client.once("k").run(|_| {
        parent.tell("running");
        parent.wait_for_end();
        Ok::<_, Error>(())
    });
    let _ = run.unwrap();
}

#[test]
fn a_killed_run_is_run_again_within_its_ttl() {
    let server = server();
    let mut child = Child::start(run_until_killed, &server.url());
    child.receive::<String>(6 * SOON);
    let next = client(&server);
    let waiter = Task::start_blocked(move || succeed(&next, "k"));
    let killed = Instant::now();
    child.kill();
    assert_eq!(waiter.within(6 * SOON, "the next run"), Run::Ran("ok"));
    // The ttl, and the stalls of a busy machine.
    let took = killed.elapsed();
    assert!(took < secs(2) + SOON / 2, "{took:?}");
}

#[test]
fn a_run_that_knows_of_its_loss_writes_nothing() {
    let server = server();
    let once = client(&server).once("k");
    for fails in [false, true] {
        let late = once.run(|guard| {
            ask(&server, &["DEL", &in_redis("k")]);
            assert!(eventually(SOON, || guard.is_lost()));
            match fails {
                false => Ok("late"),
                true => guard.check().map(|()| "late"),
            }
        });
        assert!(late.unwrap_err().is_lease_lost());
        assert_eq!(ask(&server, &["KEYS", "*value*"]), Reply::Array(Vec::new()));
    }
}

/// The lock was deleted by hand, so another run begins, and ends first.
#[test]
fn a_run_that_lost_its_lock_replaces_no_later_record() {
    let server = server();
    let (one, two) = (client(&server), client(&server));
    // The value alone shows a later holder.
    let late = one.once("value").run(|guard| {
        let later = guard.fencing_token() + 1024;
        two.fenced_value("value").write(later, "later")?;
        Ok::<_, Error>("late")
    });
    assert!(late.unwrap_err().is_lease_lost());
    let value = two.fenced_value("value").read().unwrap();
    assert_eq!(value.as_deref(), Some(&b"later"[..]));
    let late = one.once("k").run(|guard| {
        ask(&server, &["DEL", &in_redis("k")]);
        assert!(matches!(succeed(&two, "k"), Run::Ran(_)));
        // The client of this run may not have been notified yet.
        let _ = guard.is_lost();
        Ok::<_, Error>("late")
    });
    let error = late.unwrap_err();
    assert!(error.is_lease_lost(), "{error}");
    assert_eq!(error.key(), Some("k"));
    let record = one.once("k").get().unwrap().unwrap();
    assert_eq!(
        (record.result(), record.holder()),
        (&b"ok"[..], two.holder_id())
    );
    assert!(held_keys(&server).is_empty());
}

#[test]
fn a_record_whose_reply_is_lost_is_written_again() {
    let server = server();
    let proxy = Proxy::start(server.port()).unwrap();
    let builder = steady(&proxy.url()).ttl(LONG_TTL).pipelines(1);
    let client = builder.build().unwrap();
    let calls = AtomicUsize::new(0);
    let run = std::thread::scope(|scope| {
        client.once("k").run(|_| {
            calls.fetch_add(1, Ordering::SeqCst);
            let before = script_calls(&server);
            proxy.hold_replies(true);
            let (server, proxy) = (&server, &proxy);
            scope.spawn(move || {
                assert!(eventually(SOON, || script_calls(server) > before));
                proxy.cut_all();
                proxy.hold_replies(false);
            });
            Ok::<_, Error>("ok")
        })
    });
    assert_eq!(run.unwrap(), Run::Ran("ok"));
    assert_eq!(calls.load(Ordering::SeqCst), 1);
    assert!(matches!(succeed(&client, "k"), Run::Done(record) if record.result() == b"ok"));
}

/// The claim may have been granted, so its lock is released.
#[test]
fn a_claim_without_a_reply_leaves_no_lock() {
    let server = server();
    let proxy = Proxy::start(server.port()).unwrap();
    let builder = steady(&proxy.url()).ttl(LONG_TTL).pipelines(1);
    let client = builder.command_timeout(millis(500)).build().unwrap();
    client.mutex("k").lock().unwrap().unlock().unwrap();
    proxy.hold_replies(true);
    let run = client
        .once("k")
        .try_run(|_| -> Result<(), Error> { panic!("it must not run") });
    assert!(run.unwrap_err().is_unavailable());
    proxy.cut_all();
    proxy.hold_replies(false);
    assert_all_become_free(&server);
}

/// Lets a test change the network between the grant of a lock and the next request of its caller.
struct AfterGrant {
    granted: Sender<()>,
    proceed: Receiver<()>,
}

impl EventHandler for AfterGrant {
    fn acquired(&self, _: EventLock<'_>, _: Duration) {
        let _ = self.granted.send(());
        let _ = self.proceed.recv();
    }
}

/// The server stores the record of the start, but its reply is lost. The work has not begun, so the record must not
/// interrupt the next caller.
#[test]
fn a_start_without_a_reply_interrupts_no_other_caller() {
    let server = server();
    let proxy = Proxy::start(server.port()).unwrap();
    let ((granted, is_granted), (go, proceed)) = (bounded(0), bounded(0));
    let builder = steady(&proxy.url()).ttl(LONG_TTL).pipelines(1);
    let builder = builder.event_handler(Arc::new(AfterGrant { granted, proceed }));
    // Without a time for outages, the write is not repeated.
    let client = builder.outage_timeout(Duration::ZERO).build().unwrap();
    let run = std::thread::scope(|scope| {
        scope.spawn(|| {
            is_granted.recv_timeout(SOON).unwrap();
            proxy.hold_replies(true);
            go.send(()).unwrap();
            let value = in_redis("~value:k");
            let is_stored = || ask(&server, &["HEXISTS", &value, "value"]).as_int() == Some(1);
            assert!(eventually(SOON, is_stored));
            proxy.cut_all();
            proxy.hold_replies(false);
        });
        let once = client.once("k").at_most_once();
        once.run(|_| -> Result<(), Error> { panic!("it must not run") })
    });
    assert!(run.unwrap_err().is_unavailable());
    assert_eq!(succeed(&self::client(&server), "k"), Run::Ran("ok"));
}

/// The work has failed, so the record of its start must not interrupt the next caller.
#[test]
fn a_lost_request_to_delete_a_start_is_sent_again() {
    let server = server();
    let proxy = Proxy::start(server.port()).unwrap();
    let builder = steady(&proxy.url()).ttl(LONG_TTL).pipelines(1);
    let client = builder.build().unwrap();
    let run = std::thread::scope(|scope| {
        client.once("k").at_most_once().run(|_| {
            proxy.hold_requests(true);
            scope.spawn(|| {
                assert!(eventually(SOON, || proxy.held_bytes() > 0));
                proxy.cut_all();
                proxy.hold_requests(false);
            });
            Err::<(), Box<dyn std::error::Error>>("no luck".into())
        })
    });
    assert_eq!(run.unwrap_err().to_string(), "no luck");
    assert_eq!(succeed(&client, "k"), Run::Ran("ok"));
}

#[test]
fn a_value_that_is_no_record_stays_as_it_is() {
    let server = server();
    let client = client(&server);
    let once = client.once("k");
    let value = client.fenced_value("k");
    value.write(1, "theirs").unwrap();
    let run = once.run(|_| -> Result<(), Error> { panic!("it must not run") });
    for error in [
        run.unwrap_err(),
        once.try_run(|_| Ok::<_, Error>(())).unwrap_err(),
        once.get().unwrap_err(),
        once.forget().unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
        assert_eq!(error.key(), Some("k"));
    }
    assert_eq!(value.read().unwrap().as_deref(), Some(&b"theirs"[..]));
    for command in [
        &["SET", &in_redis("~value:other"), "theirs"][..],
        &["SET", &in_redis("taken"), "theirs"],
    ] {
        ask(&server, command);
        let name = command[1].rsplit(['~', ':']).next().unwrap();
        let error = client.once(name).run(|_| Ok::<_, Error>(())).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
        assert_eq!(ask(&server, &["GET", command[1]]).as_text(), Some("theirs"));
    }
}

#[test]
fn settings_out_of_their_bounds_run_nothing() {
    let server = server();
    let client = client(&server);
    let runs =
        |once: leasehold::Once| once.run(|_| -> Result<(), Error> { panic!("it must not run") });
    for keep in [millis(9), secs(400 * 24 * 60 * 60 * 10)] {
        let error = runs(client.once("k").keep(keep)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidConfig, "{error}");
        assert!(error.to_string().contains("keep"), "{error}");
    }
    let error = runs(client.once("~k")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidKey);
    let (stop, stopped) = bounded(0);
    drop(stop);
    let held = client.mutex("k").lock().unwrap();
    let cancelled = client.once("k").cancelled_by(stopped);
    let error = runs(cancelled.clone()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Cancelled);
    let once = client.once("k");
    let refused = once.try_run_for(millis(50), |_| -> Result<(), Error> { panic!("not now") });
    assert!(refused.unwrap().is_none());
    // A deadline in the past is one try.
    let before = lock_requests(&server);
    let refused = once.try_run_for(Duration::ZERO, |_| -> Result<(), Error> {
        panic!("not now")
    });
    assert!(refused.unwrap().is_none());
    assert_eq!(lock_requests(&server) - before, 1);
    held.unlock().unwrap();
    // A wait that was cancelled before ends without a request.
    let error = runs(cancelled).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Cancelled);
    assert_eq!(ask(&server, &["KEYS", "*queue*"]), Reply::Array(Vec::new()));
    client.shutdown(SOON).unwrap();
    assert_eq!(runs(once).unwrap_err().kind(), ErrorKind::Shutdown);
}

#[test]
fn a_result_that_is_too_long_is_an_error() {
    const LIMIT: usize = 256 * 1024;
    let server = server();
    let builder = steady(&server.url()).max_reply_bytes(LIMIT);
    let once = builder.build().unwrap().once("k");
    // An assertion must not print the bytes.
    let run = |bytes| {
        let run = once.run(move |_| Ok::<_, Error>(vec![7; bytes]));
        run.map(|run| matches!(run, Run::Ran(_)))
    };
    let error = run(LIMIT - 1023).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TooLarge, "{error}");
    assert!(run(LIMIT - 1024).unwrap());
    assert!(!run(1).unwrap());
    let record = once.get().unwrap().unwrap();
    assert_eq!(record.result().len(), LIMIT - 1024);
}

/// A waiter without notifications polls.
#[test]
fn a_waiter_without_notifications_gets_the_record() {
    let server = server();
    let (one, two) = (client(&server), client(&server));
    ask(
        &server,
        &[
            "ACL",
            "SETUSER",
            "default",
            "-client|tracking",
            "-subscribe",
        ],
    );
    let first = one.once("k").run(|_| {
        let two = two.clone();
        Ok::<_, Error>(Waits(Task::start_blocked(move || succeed(&two, "k"))))
    });
    let Run::Ran(Waits(waiter)) = first.unwrap() else {
        panic!("it ran before");
    };
    let second = waiter.within(2 * SOON, "the record");
    assert!(matches!(second, Run::Done(_)));
    ask(&server, &["ACL", "SETUSER", "default", "allcommands"]);
}

struct Waits(Task<Run<&'static str>>);

impl leasehold::Recordable for Waits {
    fn to_bytes(&self) -> std::borrow::Cow<'_, [u8]> {
        b"ok".into()
    }
}

/// The user loses the right to write while the work runs. The lock is released all the same.
#[test]
fn a_record_that_redis_refuses_ends_the_call() {
    let server = server();
    let builder = steady(&server.url()).outage_timeout(millis(50));
    let client = builder.ttl(LONG_TTL).build().unwrap();
    let deny = |denied: &str| ask(&server, &["ACL", "SETUSER", "default", denied]);
    for (refusal, kind) in [
        ("-hset", ErrorKind::Denied),
        ("-eval -evalsha", ErrorKind::Denied),
    ] {
        let run = client.once("k").run(|_| {
            refusal.split(' ').for_each(|denied| _ = deny(denied));
            Ok::<_, Error>("ok")
        });
        deny("allcommands");
        assert_eq!(run.unwrap_err().kind(), kind);
        assert_all_become_free(&server);
        assert_eq!(client.once("k").get().unwrap(), None);
    }
    // Redis is full: that may pass, so the client repeats the record until the time is over.
    let run = client.once("k").run(|_| {
        ask(&server, &["CONFIG", "SET", "maxmemory", "1"]);
        Ok::<_, Error>("ok")
    });
    ask(&server, &["CONFIG", "SET", "maxmemory", "0"]);
    assert_eq!(run.unwrap_err().kind(), ErrorKind::Unavailable);
    assert_all_become_free(&server);
    assert!(matches!(succeed(&client, "k"), Run::Ran(_)));
}

/// The time of a start is the time of Redis, whatever the clock of the client shows.
pub fn run_with_another_clock(parent: &Parent) {
    let client = steady(&parent.url).build().unwrap();
    for name in ["running", "fired"] {
        let run = client.once(name).run(|_| Ok::<_, Error>("child")).unwrap();
        parent.tell((matches!(run, Run::Ran(_)), seconds(SystemTime::now())));
        parent.wait_to_proceed();
    }
}

fn seconds(time: SystemTime) -> i64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap();
    i64::try_from(since.as_secs()).unwrap()
}

/// Each process has its own wall clock, which is set while the process waits.
#[test]
fn processes_with_other_clocks_run_the_work_once() {
    const DAY: i64 = 24 * 60 * 60;
    let Some(clock) = OwnClock::find() else {
        return;
    };
    let server = server();
    let client = client(&server);
    let program = std::env::current_exe().unwrap();
    let folders = [-DAY, -30, 30, DAY].map(|ahead| {
        let folder = tempfile::tempdir().unwrap();
        OwnClock::set(folder.path(), 1_000_000 * ahead).unwrap();
        (folder, ahead)
    });
    let mut children = Vec::new();
    let run = client.once("running").run(|_| {
        children.extend(folders.iter().map(|(folder, _)| {
            let command = clock.command(&program, folder.path());
            Child::start_by(command, run_with_another_clock, &server.url())
        }));
        // The lock of the run, and the value for each process that waits.
        let waiting = 1 + folders.len() as u64;
        assert!(eventually(6 * SOON, || is_tracked(&server, waiting)));
        for (folder, ahead) in &folders {
            OwnClock::set(folder.path(), -1_000_000 * ahead).unwrap();
        }
        Ok::<_, Error>("parent")
    });
    assert_eq!(run.unwrap(), Run::Ran("parent"));
    let mut reports = || -> Vec<bool> {
        let reports = folders.iter().zip(&mut children);
        let reports = reports.map(|((_, ahead), child)| {
            let (has_run, now): (bool, i64) = child.receive(6 * SOON);
            let set_by = now - seconds(SystemTime::now());
            assert!(
                (set_by + ahead).abs() <= 10,
                "the clock is ahead by {set_by} s"
            );
            child.proceed();
            has_run
        });
        reports.collect()
    };
    assert_eq!(reports(), [false; 4], "the parent has run it");
    // The job is short, and the processes come one after another or at the same time.
    let fired = reports();
    assert_eq!(fired.iter().filter(|has_run| **has_run).count(), 1);
    for name in ["running", "fired"] {
        let record = client.once(name).get().unwrap().unwrap();
        for time in [record.started_at(), record.ended_at().unwrap()] {
            let off = seconds(time) - seconds(SystemTime::now());
            assert!(off.abs() <= 60, "the time of the record is off by {off} s");
        }
    }
    for child in children {
        child.finish(SOON);
    }
}

#[test]
fn a_record_has_the_times_of_redis() {
    let server = server();
    let client = client(&server);
    let redis_now = || {
        let micros = crate::support::micros_now(&server);
        UNIX_EPOCH + Duration::from_micros(micros)
    };
    let before = redis_now();
    assert!(matches!(succeed(&client, "k"), Run::Ran(_)));
    let record = client.once("k").get().unwrap().unwrap();
    assert!(before <= record.started_at() && record.started_at() <= redis_now());
    assert!(record.started_at() <= record.ended_at().unwrap());
    let kept = ask(&server, &["PTTL", &in_redis("~value:k")])
        .as_int()
        .unwrap();
    let week = 7 * 24 * 60 * 60 * 1000;
    assert!((week - 60_000..=week).contains(&kept), "{kept}");
}

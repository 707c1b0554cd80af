//! The heap memory that a hostile server can make a client use. Each case has a process of its own, since the allocator
//! counts for all threads of a process.

use std::alloc::System;
use std::env;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use leasehold::redis::{self, Commands};
use leasehold::{Builder, Client, Error, ErrorKind, Mutex};
use leasehold_testbed::Server;
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};

#[cfg(test)]
#[path = "it/hostile/server.rs"]
#[allow(dead_code, reason = "tests/it uses the rest")]
mod server;

use server::{Attack, Hostile, Since, TIMEOUT};

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// Bytes that a client may use beyond what the caller asked for.
const MOST: usize = 16 << 20;
/// The limit for a case that would otherwise hang.
const BOUND: Duration = Duration::from_secs(10);
/// The environment variable with the name of a case. It makes a process run only this case.
const CASE: &str = "LEASEHOLD_HOSTILE_CASE";
/// The processes at a time. They mostly wait for time-outs, but some attacks keep a core busy.
const PROCESSES: usize = 3;
/// The longest error, in bytes: it names a key, the type of its value, and more.
const LONGEST_MESSAGE: usize = 1000;

fn allocated() -> usize {
    let stats = ALLOCATOR.stats();
    stats.bytes_allocated - stats.bytes_deallocated
}

/// Fails as soon as the heap has grown by more than [`MOST`] bytes during `work`: an attack may fill the
/// machine's memory.
fn assert_bounded(what: &str, work: impl FnOnce() + Send + 'static) {
    let (before, started) = (allocated(), Instant::now());
    let (mut most, working) = (0, thread::spawn(work));
    while !working.is_finished() {
        most = most.max(allocated().saturating_sub(before));
        assert!(most < MOST, "{what}: {most} bytes, and more");
        assert!(started.elapsed() < BOUND, "{what}: not done in {BOUND:?}");
        thread::sleep(Duration::from_micros(200));
    }
    println!("{what}: {most} bytes");
    working.join().expect("the work ends as its case expects");
}

/// A name, the word in a request at which the server turns hostile, and the work of the client.
type Case = (&'static str, &'static str, fn(Builder));

/// Waits for a lock that another client holds.
fn wait(builder: Builder) {
    let client = builder.build().expect("the first request succeeds");
    let waited = client.mutex("held").try_lock_for(TIMEOUT);
    assert!(waited.expect("other clients have it").is_none());
}

fn cases() -> [Case; 9] {
    [
        ("handshake", "SETINFO", |builder| {
            assert!(builder.build().is_err());
        }),
        ("scripts", "EXISTS", |builder| {
            assert!(builder.build().is_err());
        }),
        ("acquire", "EVALSHA", |builder| {
            let client = builder.build().expect("the first request succeeds");
            assert!(client.mutex("k").try_lock_for(TIMEOUT).is_err());
        }),
        ("transaction", "data", |builder| {
            let client = builder.build().expect("the first request succeeds");
            let guard = client.mutex("k").lock().expect("the lock is free");
            // This call may succeed, if the string was sent completely.
            let _ = guard.transaction(|conn, _| conn.get::<_, Option<String>>("data"));
        }),
        ("pipeline", "data", |builder| {
            let client = builder.build().expect("the first request succeeds");
            let guard = client.mutex("k").lock().expect("the lock is free");
            let read = guard.transaction(|conn, _| {
                let mut reads = redis::pipe();
                (0..100).for_each(|_| {
                    reads.get("data");
                });
                reads.query::<Vec<Option<String>>>(conn)
            });
            assert!(read.is_err());
        }),
        ("exec", "marker", |builder| {
            let client = builder.build().expect("the first request succeeds");
            let guard = client.mutex("k").lock().expect("the lock is free");
            let written = guard.transaction(|_, pipe| {
                pipe.set("marker", 1);
                Ok(())
            });
            assert!(written.is_err());
        }),
        ("fenced value", "leasehold:~value:k", |builder| {
            let client = builder.build().expect("the first request succeeds");
            let _ = client.fenced_value("k").read();
        }),
        ("notifications", "GETRANGE\r\n$14\r\nleasehold:held", wait),
        ("login of notifications", "leasehold-notifications:", wait),
    ]
}

type OnMutex = (&'static str, fn(Mutex) -> Option<Error>);

fn on_a_large_value() -> [OnMutex; 3] {
    [
        ("try_lock of a large value", |mutex| mutex.try_lock().err()),
        ("inspect of a large value", |mutex| mutex.inspect().err()),
        ("force_unlock of a large value", |mutex| {
            mutex.force_unlock().err()
        }),
    ]
}

fn run_case((what, argument, work): Case) {
    let server = Server::start().expect("there is a Redis");
    let holder = Client::open(server.url()).expect("it is there");
    let held = holder.mutex("held").lock().expect("the lock is free");
    for attack in Attack::ALL {
        let hostile = Hostile::start(server.port(), attack, Since::argument(argument));
        let builder = hostile.builder();
        assert_bounded(&format!("{what}, {attack:?}"), move || work(builder));
    }
    held.check().expect("no connection was closed for it");
}

fn run_in_process(what: &str) {
    let mut child = Command::new(env::current_exe().expect("this program has a path"));
    child.args([
        "--exact",
        "a_hostile_server_cannot_fill_the_memory",
        "--nocapture",
    ]);
    let output = child.env(CASE, what).output().expect("it starts");
    let said = String::from_utf8_lossy(&output.stdout);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{what}: {said}{errors}");
    let attacks = said.matches(" bytes\n").count();
    assert_eq!(attacks, Attack::ALL.len(), "{what}: {said}");
}

/// Each case has a process of its own, so only its memory is counted.
#[test]
fn a_hostile_server_cannot_fill_the_memory() {
    if let Ok(name) = env::var(CASE) {
        let case = cases().into_iter().find(|(what, ..)| *what == name);
        return run_case(case.expect("the parent knows the cases"));
    }
    let (sender, names) = crossbeam_channel::unbounded();
    for (what, ..) in cases() {
        sender.send(what).expect("the receiver is there");
    }
    drop(sender);
    thread::scope(|scope| {
        for _ in 0..PROCESSES {
            scope.spawn(|| {
                for what in &names {
                    run_in_process(what);
                }
            });
        }
    });
    // Not a test of its own, since the memory and the time of this one would be counted, too.
    large_values_do_not_fill_the_memory();
}

fn large_values_do_not_fill_the_memory() {
    let server = Server::start().expect("there is a Redis");
    let holder = Client::open(server.url()).expect("it is there");
    let held = holder.mutex("held").lock().expect("the lock is free");
    let set = ["SETRANGE", "leasehold:large", "60000000", "x"];
    server.command(&set).expect("Redis is there");
    for (what, work) in on_a_large_value() {
        let mutex = holder.mutex("large");
        assert_bounded(what, move || {
            let error = work(mutex).expect("the value is no lock");
            assert_eq!(error.kind(), ErrorKind::Protocol, "{what}: {error}");
            let text = format!("{error} {error:?}");
            assert!(text.len() < LONGEST_MESSAGE, "{what}: {} bytes", text.len());
        });
    }
    server
        .command(&["SETRANGE", "leasehold:large", "0", "lh1 "])
        .expect("Redis is there");
    let mutex = holder.mutex("large");
    assert_bounded("inspect of a large lock", move || {
        let error = mutex.inspect().expect_err("the value is no lock");
        assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
        assert!(format!("{error} {error:?}").len() < LONGEST_MESSAGE);
    });
    held.check().expect("no connection was closed for it");
}

//! A hostile server delays no call for longer than its deadline plus one time-out.

use std::sync::Arc;
use std::time::{Duration, Instant};

use leasehold::redis::Commands;
use leasehold::{Client, Error};
use leasehold_testbed::{Server, eventually};

use super::server::{Attack, Hostile, Since, TIMEOUT};
use crate::support::{Recorder, SOON, Task, secs, server};

/// How much longer than allowed a call may take on a busy machine.
const MARGIN: Duration = Duration::from_secs(2);
/// The time limit of `try_lock_for` and `shutdown`.
const WANTED: Duration = Duration::from_millis(300);
/// The limit for a call that would otherwise hang.
const BOUND: Duration = Duration::from_secs(10);

/// The steps of making a connection, at which a relay turns hostile.
fn while_connecting() -> Vec<Since> {
    let requests = ["SETINFO", "EXISTS", "LOAD"].map(Since::argument);
    [Since::Connected].into_iter().chain(requests).collect()
}

/// Runs `work` with a client, then shuts the client down. Fails unless both end in time.
#[track_caller]
fn assert_bounded(
    what: &str,
    client: impl FnOnce() -> Client + Send + 'static,
    bound: Duration,
    work: impl FnOnce(&Client) + Send + 'static,
) {
    let task = Task::start(move || {
        let client = client();
        let started = Instant::now();
        work(&client);
        let took = started.elapsed();
        let _ = client.shutdown(WANTED);
        (took, started.elapsed() - took)
    });
    let (took, shutdown) = task.within(BOUND, what);
    println!("{what}: {took:?}, shutdown {shutdown:?}");
    assert!(took < bound + MARGIN, "{what}: {took:?}");
    assert!(shutdown < WANTED + MARGIN, "{what}: {shutdown:?}");
}

/// Runs `test` for all attacks at once.
fn for_each_attack(test: impl Fn(&Server, Attack) + Sync) {
    let server = server();
    std::thread::scope(|scope| {
        for attack in Attack::ALL {
            let (server, test) = (&server, &test);
            scope.spawn(move || test(server, attack));
        }
    });
}

/// Fails unless `outcome` is an error with a short text.
fn assert_fails(outcome: Result<bool, Error>, what: &str) {
    let error = outcome.expect_err(what);
    assert!(!error.to_string().is_empty() && error.to_string().len() < 1000);
}

#[test]
fn a_hostile_server_cannot_delay_build() {
    for since in while_connecting() {
        for_each_attack(|server, attack| {
            let hostile = Hostile::start(server.port(), attack, since.clone());
            let what = format!("build, {attack:?}, {since:?}");
            let builder = hostile.builder();
            let started = Instant::now();
            let task = Task::start(move || builder.build().map(|_| true));
            assert_fails(task.within(BOUND, &what), &what);
            let took = started.elapsed();
            println!("{what}: {took:?}");
            assert!(took < TIMEOUT + MARGIN, "{what}: {took:?}");
        });
    }
}

#[test]
fn a_hostile_server_cannot_delay_try_lock_for() {
    for since in [while_connecting(), vec![Since::argument("EVALSHA")]].concat() {
        for_each_attack(|server, attack| {
            let hostile = Hostile::start(server.port(), attack, since.clone());
            let what = format!("try_lock_for, {attack:?}, {since:?}");
            let (builder, name) = (hostile.builder(), what.clone());
            assert_bounded(
                &what,
                move || builder.build_lazy().unwrap(),
                WANTED + TIMEOUT,
                move |client| {
                    let locked = client.mutex("k").try_lock_for(WANTED);
                    assert_fails(locked.map(|_| true), &name);
                },
            );
        });
    }
}

#[test]
fn a_stopped_server_cannot_delay_try_lock_for() {
    let server = server();
    let builder = Client::builder(server.url()).command_timeout(TIMEOUT);
    let client = builder.build().unwrap();
    // After these calls, all pipelines are connected.
    let keys: Vec<String> = (0..8).map(|n| format!("k{n}")).collect();
    for key in &keys {
        client.mutex(key).lock().unwrap().unlock().unwrap();
    }
    server.stop();
    let tasks: Vec<Task<()>> = keys
        .into_iter()
        .map(|key| {
            let client = client.clone();
            Task::start(move || {
                // The value is longer than the buffers of the sockets.
                let value = client.fenced_value(&key);
                let writer = std::thread::spawn(move || value.write(1, vec![0; 32 << 20]));
                let started = Instant::now();
                let locked = client.mutex(&key).try_lock_for(WANTED);
                let took = started.elapsed();
                let what = format!("try_lock_for beside a long write, no reader, {key}");
                assert_fails(locked.map(|_| true), &what);
                println!("{what}: {took:?}");
                assert!(took < WANTED + TIMEOUT + MARGIN, "{what}: {took:?}");
                writer.join().unwrap().unwrap_err();
            })
        })
        .collect();
    for task in tasks {
        task.within(BOUND, "locking and writing");
    }
    server.resume();
}

#[test]
fn a_hostile_server_cannot_delay_a_transaction() {
    // The relay turns hostile when the lock is watched, when the closure reads, and when the writes are sent.
    for since in ["WATCH", "data", "marker"].map(Since::argument) {
        for_each_attack(|server, attack| {
            let hostile = Hostile::start(server.port(), attack, since.clone());
            let what = format!("transaction, {attack:?}, {since:?}");
            let (builder, name) = (hostile.builder(), what.clone());
            let key = format!("k{attack:?}");
            assert_bounded(
                &what,
                move || builder.build().unwrap(),
                2 * TIMEOUT,
                move |client| {
                    let guard = client.mutex(&key).lock().unwrap();
                    let written = guard.transaction(|conn, pipe| {
                        let _: Option<String> = conn.get("data")?;
                        pipe.set("marker", 1);
                        Ok(true)
                    });
                    assert_fails(written.map(|done| done.value), &name);
                },
            );
        });
    }
}

#[test]
fn hostile_notifications_cannot_delay_wait_or_shutdown() {
    for is_tracking in [false, true] {
        for_each_attack(|server, attack| {
            let holder = Client::open(server.url()).unwrap();
            let held = holder.mutex(format!("{attack:?}")).lock().unwrap();
            let key = format!("leasehold:{attack:?}");
            let since = Since::argument(match is_tracking {
                false => "leasehold-notifications:".to_owned(),
                true => format!("GETRANGE\r\n${}\r\n{key}", key.len()),
            });
            let hostile = Hostile::start(server.port(), attack, since.clone());
            let what = format!("notifications, {attack:?}, {since:?}");
            let name = what.clone();
            let recorder = Recorder::new();
            let builder = hostile.builder().event_handler(Arc::clone(&recorder));
            assert_bounded(
                &what,
                move || builder.build().unwrap(),
                WANTED + TIMEOUT,
                move |client| {
                    let locked = client.mutex(format!("{attack:?}")).try_lock_for(WANTED);
                    // A busy machine may send no reply in this time.
                    let refused =
                        locked.map_or_else(|error| error.is_unavailable(), |l| l.is_none());
                    assert!(refused, "{name}");
                },
            );
            let ended = eventually(SOON, || Arc::strong_count(&recorder) == 1);
            assert!(ended, "{what}: a thread of the client still runs");
            drop(held);
        });
    }
}

#[test]
fn shutdown_ends_in_time_without_replies() {
    for_each_attack(|server, attack| {
        let hostile = Hostile::start(server.port(), attack, Since::AttackCall);
        let builder = Client::builder(hostile.url()).command_timeout(secs(30));
        let client = builder.connect_timeout(secs(30)).build().unwrap();
        let guard = client.mutex(format!("{attack:?}")).lock().unwrap();
        hostile.attack();
        drop(guard);
        // Keeps a clone alive: the drop of the last clone would wait for the release's reply.
        std::mem::forget(client.clone());
        let started = Instant::now();
        let task = Task::start(move || client.shutdown(WANTED).map(|()| true));
        let what = format!("shutdown, {attack:?}");
        assert_fails(task.within(BOUND, &what), &what);
        let took = started.elapsed();
        println!("{what}: {took:?}");
        assert!(took < WANTED + MARGIN, "{what}: {took:?}");
    });
}

#[test]
fn shutdown_ends_a_silent_login_of_notifications() {
    let server = server();
    let holder = Client::open(server.url()).unwrap();
    let held = holder.mutex("k").lock().unwrap();
    let hostile = Hostile::start(
        server.port(),
        Attack::Announced,
        Since::argument("leasehold-notifications:"),
    );
    let recorder = Recorder::new();
    let builder = Client::builder(hostile.url())
        .connect_timeout(secs(60))
        .command_timeout(secs(60))
        .event_handler(Arc::clone(&recorder));
    let client = builder.build().unwrap();
    let locked = client.mutex("k").try_lock_for(secs(3));
    assert!(locked.unwrap().is_none());
    // The task also drops the last clone of the client, which waits, too.
    let task = Task::start(move || drop((client.shutdown(WANTED), client)));
    task.within(SOON, "the end of the client");
    let ended = eventually(SOON, || Arc::strong_count(&recorder) == 1);
    assert!(ended, "the notification thread still runs");
    drop(held);
}

//! A hostile server delays no call beyond its deadline and one time-out.

use std::sync::Arc;
use std::time::{Duration, Instant};

use leasehold::redis::Commands;
use leasehold::{Client, Error};
use leasehold_testbed::{Server, eventually};

use super::server::{Attack, Hostile, Since, TIMEOUT};
use crate::support::{Recorder, SOON, Task, secs, server};

/// By how much a call may exceed its time on a machine with busy loops.
const MARGIN: Duration = Duration::from_secs(2);
const WANTED: Duration = Duration::from_millis(300);
/// For a test that would otherwise hang.
const BOUND: Duration = Duration::from_secs(10);

/// When it turns hostile: at one of the steps in which a connection is made.
fn while_connecting() -> Vec<Since> {
    let words = ["SETINFO", "EXISTS", "LOAD"].map(Since::word);
    [Since::Connected].into_iter().chain(words).collect()
}

/// Does `work` on a client, then shuts it down; fails unless both end in time and so do the client's threads.
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
        let worked = started.elapsed();
        let _ = client.shutdown(WANTED);
        (worked, started.elapsed() - worked)
    });
    let (worked, shut_down) = task.within(BOUND, what);
    println!("{what}: {worked:?}, shutdown {shut_down:?}");
    assert!(worked < bound + MARGIN, "{what}: {worked:?}");
    assert!(shut_down < WANTED + MARGIN, "{what}: {shut_down:?}");
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
fn fail(outcome: Result<bool, Error>, what: &str) {
    let error = outcome.expect_err(what);
    assert!(!error.to_string().is_empty() && error.to_string().len() < 1000);
}

#[test]
fn a_hostile_server_cannot_hold_up_build() {
    for since in while_connecting() {
        for_each_attack(|server, attack| {
            let hostile = Hostile::start(server.port(), attack, since.clone());
            let what = format!("build, {attack:?}, {since:?}");
            let builder = hostile.builder();
            let started = Instant::now();
            let task = Task::start(move || builder.build().map(|_| true));
            fail(task.within(BOUND, &what), &what);
            let took = started.elapsed();
            println!("{what}: {took:?}");
            assert!(took < TIMEOUT + MARGIN, "{what}: {took:?}");
        });
    }
}

#[test]
fn a_hostile_server_cannot_hold_up_try_lock_for() {
    for since in [while_connecting(), vec![Since::word("EVALSHA")]].concat() {
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
                    fail(locked.map(|_| true), &name);
                },
            );
        });
    }
}

#[test]
fn a_server_that_reads_nothing_cannot_hold_up_try_lock_for() {
    let server = server();
    let builder = Client::builder(server.url()).command_timeout(TIMEOUT);
    let client = builder.build().unwrap();
    // All pipelines are connected then.
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
                // More than sockets hold.
                let value = client.fenced_value(&key);
                let writer = std::thread::spawn(move || value.write(1, vec![0; 32 << 20]));
                let started = Instant::now();
                let locked = client.mutex(&key).try_lock_for(WANTED);
                let took = started.elapsed();
                let what = format!("try_lock_for beside a long write, no reader, {key}");
                fail(locked.map(|_| true), &what);
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
fn a_hostile_server_cannot_hold_up_a_transaction() {
    // The look at the lock, the read of the closure, the writes.
    for since in ["WATCH", "data", "marker"].map(Since::word) {
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
                    fail(written.map(|done| done.value), &name);
                },
            );
        });
    }
}

#[test]
fn hostile_notifications_hold_up_neither_a_wait_nor_the_shutdown() {
    for is_open in [false, true] {
        for_each_attack(|server, attack| {
            let holder = Client::open(server.url()).unwrap();
            let held = holder.mutex(format!("{attack:?}")).lock().unwrap();
            let key = format!("leasehold:{attack:?}");
            let since = Since::word(match is_open {
                false => "leasehold-notifications:".to_owned(),
                true => format!("GETRANGE\r\n${}\r\n{key}", key.len()),
            });
            let hostile = Hostile::start(server.port(), attack, since.clone());
            let what = format!("notifications, {attack:?}, {since:?}");
            let recorder = Recorder::new();
            let builder = hostile.builder().event_handler(Arc::clone(&recorder));
            assert_bounded(
                &what,
                move || builder.build().unwrap(),
                WANTED + TIMEOUT,
                move |client| {
                    let locked = client.mutex(format!("{attack:?}")).try_lock_for(WANTED);
                    assert!(locked.unwrap().is_none());
                },
            );
            let ended = eventually(SOON, || Arc::strong_count(&recorder) == 1);
            assert!(ended, "{what}: some thread of the client lives on");
            drop(held);
        });
    }
}

#[test]
fn shutdown_waits_for_no_reply_beyond_its_time() {
    for_each_attack(|server, attack| {
        let hostile = Hostile::start(server.port(), attack, Since::Told);
        let patient = Client::builder(hostile.url()).command_timeout(secs(30));
        let client = patient.connect_timeout(secs(30)).build().unwrap();
        let guard = client.mutex(format!("{attack:?}")).lock().unwrap();
        hostile.attack();
        drop(guard);
        // The drop of the last client waits as long as for an answer.
        std::mem::forget(client.clone());
        let started = Instant::now();
        let task = Task::start(move || client.shutdown(WANTED).map(|()| true));
        let what = format!("shutdown, {attack:?}");
        fail(task.within(BOUND, &what), &what);
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
        Since::word("leasehold-notifications:"),
    );
    let recorder = Recorder::new();
    let patient = Client::builder(hostile.url())
        .connect_timeout(secs(60))
        .command_timeout(secs(60))
        .event_handler(Arc::clone(&recorder));
    let client = patient.build().unwrap();
    let locked = client.mutex("k").try_lock_for(WANTED);
    assert!(locked.unwrap().is_none());
    // The drop of the last client waits, too.
    let task = Task::start(move || drop((client.shutdown(WANTED), client)));
    task.within(SOON, "the end of the client");
    let ended = eventually(SOON, || Arc::strong_count(&recorder) == 1);
    assert!(ended, "the thread of the notifications lives on");
    drop(held);
}

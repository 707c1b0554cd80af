//! Connections are killed while clients wait: notification connections, pipelines, or all.

use std::thread;
use std::time::Duration;

use leasehold::Client;
use leasehold_testbed::{Proxy, Server, eventually};

use crate::contention_faults::{
    KEY, Turns, assert_kept, client, connections, kill, kill_notifications,
};
use crate::support::{
    LONG_TTL, SOON, Task, ask, assert_all_become_free, in_redis, millis, notification_connections,
    secs, server, wait_for_queue,
};

/// A grant without a notification takes about a second, and a ttl takes sixty.
const WITHOUT_NOTIFICATION: Duration = Duration::from_secs(6);

/// Four clients with two threads each take turns while the test calls `fault` repeatedly.
fn take_turns_under(fault: impl Fn(&Server)) {
    let server = server();
    let clients: Vec<Client> = (0..4).map(|_| client(&server.url())).collect();
    let turns = Turns::of(&clients, 2, 50);
    let faults = turns.go_on_under(|| fault(&server));
    assert!(faults >= 10, "only {faults} faults");
    assert_all_become_free(&server);
}

#[test]
fn grants_continue_while_notification_connections_are_killed() {
    take_turns_under(|server| {
        kill_notifications(server);
    });
}

#[test]
fn grants_continue_while_pipeline_connections_are_killed() {
    take_turns_under(|server| {
        let all = connections(server);
        for pipeline in all.iter().filter(|one| !one.hears_notifications()) {
            kill(server, pipeline);
        }
    });
}

#[test]
fn grants_continue_while_all_connections_are_killed() {
    take_turns_under(|server| {
        for connection in &connections(server) {
            kill(server, connection);
        }
    });
}

#[test]
fn grants_continue_while_single_connections_are_killed() {
    let (server, mut victim) = (server(), 0);
    let clients: Vec<Client> = (0..4).map(|_| client(&server.url())).collect();
    let turns = Turns::of(&clients, 2, 50);
    turns.go_on_under(|| {
        let all = connections(&server);
        victim += 5;
        kill(&server, &all[victim % all.len()]);
    });
    assert_all_become_free(&server);
}

#[test]
fn a_release_without_notification_connections_is_found_soon() {
    let server = server();
    let proxy = Proxy::start(server.port()).unwrap();
    let (holder, waiting) = (client(&server.url()), client(&proxy.url()));
    for round in 0..6 {
        let held = holder.mutex(KEY).lock().unwrap();
        let mutex = waiting.mutex(KEY);
        let waiter = Task::start(move || mutex.lock().unwrap());
        wait_for_queue(&server, KEY, 1);
        // The pause grows from round to round, so the connection closes before or after the client has tracked the key.
        thread::sleep(millis(10 * round));
        proxy.refuse(true);
        kill_notifications(&server);
        assert_kept(held.unlock());
        let entered = waiter.within(WITHOUT_NOTIFICATION, "the grant without a notification");
        proxy.refuse(false);
        assert_kept(entered.unlock());
    }
    assert_all_become_free(&server);
}

#[test]
fn releases_during_notification_disconnects_are_found_soon() {
    let server = server();
    let (holder, waiting) = (client(&server.url()), client(&server.url()));
    for round in 0..40 {
        let held = holder.mutex(KEY).lock().unwrap();
        let mutex = waiting.mutex(KEY);
        let waiter = Task::start(move || mutex.lock().unwrap());
        wait_for_queue(&server, KEY, 1);
        let killer = || {
            kill_notifications(&server);
        };
        match round % 4 {
            0 => {
                killer();
                drop(held);
            }
            1 => {
                assert_kept(held.unlock());
                killer();
            }
            _ => thread::scope(|scope| {
                scope.spawn(killer);
                thread::sleep(Duration::from_micros(30 * round));
                drop(held);
            }),
        }
        let entered = waiter.within(WITHOUT_NOTIFICATION, "the grant after the release");
        assert_kept(entered.unlock());
    }
    assert_all_become_free(&server);
}

#[test]
fn an_unreachable_waiter_delays_no_other() {
    let server = server();
    let proxy = Proxy::start(server.port()).unwrap();
    let (holder, away) = (client(&server.url()), client(&proxy.url()));
    let there = client(&server.url());
    let held = holder.mutex(KEY).lock().unwrap();
    let mutex = away.mutex(KEY);
    let first = Task::start(move || mutex.lock().unwrap());
    wait_for_queue(&server, KEY, 1);
    let mutex = there.mutex(KEY);
    let second = Task::start(move || mutex.lock().unwrap());
    wait_for_queue(&server, KEY, 2);
    proxy.refuse(true);
    proxy.cut_all();
    // The notification connections of this holder and of the second waiter are left.
    let noticed = || notification_connections(&server) <= 2;
    assert!(
        eventually(SOON, noticed),
        "Redis sees that the client has gone"
    );
    assert_kept(held.unlock());
    let entered = second.within(
        WITHOUT_NOTIFICATION,
        "the grant in the place of the killed client",
    );
    assert!(!first.is_done(), "the client cannot ask");
    proxy.refuse(false);
    wait_for_queue(&server, KEY, 1);
    assert_kept(entered.unlock());
    drop(first.within(WITHOUT_NOTIFICATION, "the grant after the return"));
    assert_all_become_free(&server);
}

#[test]
fn many_waits_survive_broken_notifications() {
    const LOCKS: usize = 40;
    let server = server();
    let (holder, waiting) = (client(&server.url()), client(&server.url()));
    let keys: Vec<String> = (0..LOCKS).map(|n| format!("lock-{n}")).collect();
    let held: Vec<_> = keys
        .iter()
        .map(|key| holder.mutex(key).lock().unwrap())
        .collect();
    let waiters: Vec<Task<_>> = keys
        .iter()
        .map(|key| {
            let mutex = waiting.mutex(key);
            Task::start(move || mutex.lock().unwrap())
        })
        .collect();
    for key in &keys {
        wait_for_queue(&server, key, 1);
    }
    for (n, guard) in held.into_iter().enumerate() {
        if n % 8 == 0 {
            kill_notifications(&server);
        }
        assert_kept(guard.unlock());
    }
    for waiter in waiters {
        drop(waiter.within(WITHOUT_NOTIFICATION, "the grant after the release"));
    }
    assert_all_become_free(&server);
}

#[test]
fn a_loss_is_reported_after_a_notification_disconnect() {
    let server = server();
    // The next renewal is far away, so the client has to find the loss by reading the key.
    let guard = client(&server.url()).mutex(KEY).lock().unwrap();
    let lost = guard.lost_signal();
    for _ in 0..5 {
        let is_listening = || kill_notifications(&server) > 0;
        assert!(eventually(SOON, is_listening), "the client listens");
    }
    ask(&server, &["DEL", &in_redis(KEY)]);
    let loss = lost.recv_timeout(secs(6));
    assert!(loss.is_ok(), "the next renewal is in {:?}", LONG_TTL / 3);
}

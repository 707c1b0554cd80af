//! Redis loses its data, stops or restarts while clients wait for a lock.

use std::sync::Arc;
use std::thread;

use leasehold::{Client, MutexGuard};
use leasehold_testbed::{Proxy, Server, eventually};

use crate::contention_faults::{KEY, Turns, assert_kept, client};
use crate::support::{
    LONG_TTL, Recorder, SOON, TIMEOUT, Task, What, ask, assert_all_become_free, builder,
    expires_in, lost_within, millis, queued, secs, server, wait_for_queue, within,
};

/// Clients that wait through any outage of a test.
fn waiting_clients(server: &Server, count: usize) -> Vec<Client> {
    let builder = || {
        builder(&server.url())
            .ttl(LONG_TTL)
            .outage_timeout(6 * SOON)
    };
    (0..count).map(|_| builder().build().unwrap()).collect()
}

fn held_by(client: &Client) -> MutexGuard {
    let mutex = client.mutex(KEY);
    within(SOON, "locking", move || mutex.lock().unwrap())
}

#[test]
fn fifty_waiters_are_served_after_an_empty_restart() {
    let mut server = server();
    let clients = waiting_clients(&server, 5);
    let held = held_by(&client(&server.url()));
    let turns = Turns::of(&clients, 10, 2);
    wait_for_queue(&server, KEY, 5);
    let lost = held.lost_signal();
    assert_eq!(turns.witness.entries(), 0, "the lock is held");
    server.restart().unwrap();
    lost_within(SOON, &lost);
    drop(held);
    turns.end();
    assert_all_become_free(&server);
}

#[test]
fn waiters_are_served_after_an_outage() {
    let mut server = server();
    let clients = waiting_clients(&server, 3);
    let held = held_by(&client(&server.url()));
    let turns = Turns::of(&clients, 4, 2);
    wait_for_queue(&server, KEY, 3);
    server.kill();
    thread::sleep(2 * TIMEOUT);
    drop(held);
    server.restart().unwrap();
    turns.end();
    assert_all_become_free(&server);
}

#[test]
fn waiters_are_served_after_a_flush() {
    let server = server();
    let clients = waiting_clients(&server, 4);
    for _ in 0..3 {
        let held = held_by(&client(&server.url()));
        let turns = Turns::of(&clients, 3, 2);
        wait_for_queue(&server, KEY, 4);
        ask(&server, &["FLUSHALL"]);
        let someone = eventually(secs(5), || turns.witness.entries() > 0);
        assert!(someone, "the flush sends no notification");
        drop(held);
        turns.end();
        assert_all_become_free(&server);
    }
}

#[test]
fn grants_continue_while_scripts_are_flushed() {
    let server = server();
    let clients = waiting_clients(&server, 4);
    let turns = Turns::of(&clients, 2, 50);
    let faults = turns.go_on_under(|| drop(ask(&server, &["SCRIPT", "FLUSH"])));
    assert!(faults >= 10, "only {faults} faults");
    assert_all_become_free(&server);
}

#[test]
fn grants_continue_while_the_server_stops_repeatedly() {
    let server = server();
    let clients = waiting_clients(&server, 4);
    let turns = Turns::of(&clients, 2, 12);
    let mut fault = 0;
    turns.go_on_under(|| {
        server.stop();
        // In every fourth round, the pause is longer than the time-outs; in the others, it is shorter.
        let pause = if fault % 4 == 3 {
            TIMEOUT + millis(300)
        } else {
            millis(60)
        };
        thread::sleep(pause);
        server.resume();
        fault += 1;
    });
    assert_all_become_free(&server);
}

#[test]
fn grants_continue_after_short_silences_of_the_server() {
    let server = server();
    let clients = waiting_clients(&server, 4);
    let turns = Turns::of(&clients, 2, 20);
    let mut fault = 0;
    turns.go_on_under(|| {
        let kind = ["ALL", "WRITE"][fault % 2];
        ask(&server, &["CLIENT", "PAUSE", "40", kind]);
        thread::sleep(millis(60));
        fault += 1;
    });
    assert_all_become_free(&server);
}

/// A renewal is in flight while another client joins the queue. It must not remove the new entry.
#[test]
fn a_renewal_in_flight_keeps_a_joining_waiter() {
    let server = server();
    let proxy = Proxy::start(server.port()).unwrap();
    let recorder = Recorder::new();
    let holder = builder(&proxy.url())
        .ttl(secs(10))
        .renew_ratio(0.05)
        .event_handler(Arc::clone(&recorder))
        .build()
        .unwrap();
    let held = held_by(&holder);
    recorder.wait_for_more(1, What::Renewed, KEY);
    for n in 1..=3 {
        proxy.hold_requests(true);
        assert!(
            eventually(SOON, || proxy.held_bytes() > 0),
            "the client renews"
        );
        let mutex = client(&server.url()).mutex(KEY);
        let waiter = Task::start(move || mutex.lock().unwrap());
        wait_for_queue(&server, KEY, n);
        proxy.hold_requests(false);
        recorder.wait_for_more(1, What::Renewed, KEY);
        assert_eq!(queued(&server, KEY), n);
        assert!(expires_in(&server, KEY) > Some(secs(5)));
        // The waiter waits on. Once it has had the lock, it ends with its client.
        thread::spawn(move || drop(waiter.within(6 * SOON, "the grant")));
    }
    held.check().unwrap();
    assert_eq!(recorder.count(What::Lost, KEY), 0);
    assert_kept(held.unlock());
    assert_all_become_free(&server);
}

/// A renewal that arrives after the lock has passed on must not lengthen the next holder's ttl, and is no
/// loss for it.
#[test]
fn a_renewal_after_the_next_grant_changes_nothing() {
    let server = server();
    let proxy = Proxy::start(server.port()).unwrap();
    let recorder = Recorder::new();
    let holder = builder(&proxy.url())
        .ttl(LONG_TTL)
        .renew_ratio(0.05)
        .command_timeout(6 * SOON)
        .event_handler(Arc::clone(&recorder))
        .build()
        .unwrap();
    let held = held_by(&holder);
    let waiting = builder(&server.url()).build().unwrap();
    let mutex = waiting.mutex(KEY).fixed_ttl(secs(8));
    let waiter = Task::start(move || mutex.lock().unwrap());
    wait_for_queue(&server, KEY, 1);
    recorder.wait_for_more(1, What::Renewed, KEY);
    proxy.hold_requests(true);
    assert!(
        eventually(SOON, || proxy.held_bytes() > 0),
        "the client renews"
    );
    let unlocked = Task::start(move || held.unlock());
    proxy.hold_requests(false);
    unlocked.within(SOON, "the release").unwrap();
    let guard = waiter.within(SOON, "the grant");
    thread::sleep(millis(200));
    guard.check().unwrap();
    assert!(expires_in(&server, KEY) <= Some(secs(8)));
    assert_eq!(recorder.count(What::Lost, KEY), 0);
    assert_kept(guard.unlock());
    assert_all_become_free(&server);
}

/// Waiters that time out while the server is stopped: Redis grants their queue entries to nobody, or only for
/// a moment.
fn give_up_while_stopped(let_go_before: bool, clients_go: bool) {
    let server = server();
    let holder = client(&server.url());
    let keys = ["a", "b", "c"];
    let held = keys.map(|key| holder.mutex(key).lock().unwrap());
    let leaving = client(&server.url());
    let leavers = keys.map(|key| {
        let mutex = leaving.mutex(key);
        Task::start(move || mutex.try_lock_for(secs(6)).map(|guard| guard.is_some()))
    });
    keys.iter().for_each(|key| wait_for_queue(&server, key, 1));
    let staying = waiting_clients(&server, 1);
    let waiters = keys.map(|key| {
        let mutex = staying[0].mutex(key);
        Task::start(move || mutex.lock().unwrap())
    });
    keys.iter().for_each(|key| wait_for_queue(&server, key, 2));

    server.stop();
    let mut held = Some(held);
    if let_go_before {
        held.take();
    }
    for leaver in leavers {
        let outcome = leaver.within(2 * SOON, "the end of the wait");
        assert!(!outcome.is_ok_and(|entered| entered), "no holder released");
    }
    let leaving = (!clients_go).then_some(leaving);
    server.resume();
    drop(held);
    for waiter in waiters {
        drop(waiter.within(SOON, "the grant of the remaining waiter"));
    }
    assert_all_become_free(&server);
    drop(leaving);
}

#[test]
fn waits_ending_on_a_stopped_server_leave_nothing() {
    give_up_while_stopped(false, false);
}

#[test]
fn waits_ending_before_a_queued_release_leave_nothing() {
    give_up_while_stopped(true, false);
}

#[test]
fn clients_dropped_on_a_stopped_server_leave_nothing() {
    give_up_while_stopped(false, true);
}

//! Redis forgets, stands still or starts again while clients wait for a lock.

use std::sync::Arc;
use std::thread;

use leasehold::{Client, MutexGuard};
use leasehold_testbed::{Proxy, Server, eventually};

use crate::contention_faults::{KEY, Turns, assert_kept, client};
use crate::support::{
    LONG_TTL, Recorder, SOON, TIMEOUT, Task, What, ask, assert_all_become_free, builder,
    expires_in, in_line, millis, secs, server, told_within, wait_for_line, within,
};

/// Clients that ride out any outage of a test.
fn patient(server: &Server, count: usize) -> Vec<Client> {
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
fn fifty_waiters_get_the_lock_of_a_server_that_comes_back_empty() {
    let mut server = server();
    let clients = patient(&server, 5);
    let held = held_by(&client(&server.url()));
    let turns = Turns::of(&clients, 10, 2);
    wait_for_line(&server, KEY, 5);
    let lost = held.lost_signal();
    assert_eq!(turns.witness.entries(), 0, "it is held");
    server.restart().unwrap();
    told_within(SOON, &lost);
    drop(held);
    turns.end();
    assert_all_become_free(&server);
}

#[test]
fn waiters_get_the_lock_of_a_server_that_was_away_for_a_while() {
    let mut server = server();
    let clients = patient(&server, 3);
    let held = held_by(&client(&server.url()));
    let turns = Turns::of(&clients, 4, 2);
    wait_for_line(&server, KEY, 3);
    server.kill();
    thread::sleep(2 * TIMEOUT);
    drop(held);
    server.restart().unwrap();
    turns.end();
    assert_all_become_free(&server);
}

#[test]
fn waiters_get_a_lock_that_was_flushed() {
    let server = server();
    let clients = patient(&server, 4);
    for _ in 0..3 {
        let held = held_by(&client(&server.url()));
        let turns = Turns::of(&clients, 3, 2);
        wait_for_line(&server, KEY, 4);
        ask(&server, &["FLUSHALL"]);
        let someone = eventually(secs(5), || turns.witness.entries() > 0);
        assert!(someone, "nobody is told of the flush");
        drop(held);
        turns.end();
        assert_all_become_free(&server);
    }
}

#[test]
fn turns_go_on_while_scripts_are_flushed() {
    let server = server();
    let clients = patient(&server, 4);
    let turns = Turns::of(&clients, 2, 50);
    let faults = turns.go_on_under(|| drop(ask(&server, &["SCRIPT", "FLUSH"])));
    assert!(faults >= 10, "only {faults} faults");
    assert_all_become_free(&server);
}

#[test]
fn turns_go_on_while_the_server_stands_still_now_and_then() {
    let server = server();
    let clients = patient(&server, 4);
    let turns = Turns::of(&clients, 2, 12);
    let mut fault = 0;
    turns.go_on_under(|| {
        server.stop();
        // Below the time-outs, and now and then beyond.
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
fn turns_go_on_while_the_server_answers_nobody_for_a_moment() {
    let server = server();
    let clients = patient(&server, 4);
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

/// A renewal is under way while somebody comes into line, whose place it must not cost.
#[test]
fn a_renewal_under_way_keeps_who_comes_into_line() {
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
        assert!(eventually(SOON, || proxy.held_bytes() > 0), "it renews");
        let mutex = client(&server.url()).mutex(KEY);
        let waiter = Task::start(move || mutex.lock().unwrap());
        wait_for_line(&server, KEY, n);
        proxy.hold_requests(false);
        recorder.wait_for_more(1, What::Renewed, KEY);
        assert_eq!(in_line(&server, KEY), n);
        assert!(expires_in(&server, KEY) > Some(secs(5)));
        // It waits on, and leaves with the client once it has had the lock.
        thread::spawn(move || drop(waiter.within(6 * SOON, "its turn")));
    }
    held.check().unwrap();
    assert_eq!(recorder.count(What::Lost, KEY), 0);
    assert_kept(held.unlock());
    assert_all_become_free(&server);
}

/// A renewal that comes when its lock was passed on must not lengthen the next one's ttl, nor be
/// taken for a loss of it.
#[test]
fn a_renewal_that_comes_after_the_lock_was_passed_on_changes_nothing() {
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
    wait_for_line(&server, KEY, 1);
    recorder.wait_for_more(1, What::Renewed, KEY);
    proxy.hold_requests(true);
    assert!(eventually(SOON, || proxy.held_bytes() > 0), "it renews");
    let unlocked = Task::start(move || held.unlock());
    proxy.hold_requests(false);
    unlocked.within(SOON, "letting go").unwrap();
    let guard = waiter.within(SOON, "its turn");
    thread::sleep(millis(200));
    guard.check().unwrap();
    assert!(expires_in(&server, KEY) <= Some(secs(8)));
    assert_eq!(recorder.count(What::Lost, KEY), 0);
    assert_kept(guard.unlock());
    assert_all_become_free(&server);
}

/// Those who give up while the server stands still: their places in line are served, if at all, to
/// nobody, and never for long.
fn give_up_while_it_stands_still(let_go_before: bool, clients_go: bool) {
    let server = server();
    let holder = client(&server.url());
    let keys = ["a", "b", "c"];
    let held = keys.map(|key| holder.mutex(key).lock().unwrap());
    let leaving = client(&server.url());
    let leavers = keys.map(|key| {
        let mutex = leaving.mutex(key);
        Task::start(move || mutex.try_lock_for(3 * TIMEOUT).map(|guard| guard.is_some()))
    });
    keys.iter().for_each(|key| wait_for_line(&server, key, 1));
    let staying = patient(&server, 1);
    let waiters = keys.map(|key| {
        let mutex = staying[0].mutex(key);
        Task::start(move || mutex.lock().unwrap())
    });
    keys.iter().for_each(|key| wait_for_line(&server, key, 2));

    server.stop();
    let mut held = Some(held);
    if let_go_before {
        held.take();
    }
    for leaver in leavers {
        let outcome = leaver.within(SOON, "giving up");
        assert!(!outcome.is_ok_and(|entered| entered), "nobody let go");
    }
    let leaving = (!clients_go).then_some(leaving);
    server.resume();
    drop(held);
    for waiter in waiters {
        drop(waiter.within(SOON, "the turn of who waited on"));
    }
    assert_all_become_free(&server);
    drop(leaving);
}

#[test]
fn who_gives_up_while_the_server_stands_still_leaves_no_place_behind() {
    give_up_while_it_stands_still(false, false);
}

#[test]
fn who_gives_up_after_a_release_that_the_server_has_not_seen_yet_leaves_no_grant_behind() {
    give_up_while_it_stands_still(true, false);
}

#[test]
fn a_client_that_goes_away_while_the_server_stands_still_leaves_no_place_behind() {
    give_up_while_it_stands_still(false, true);
}

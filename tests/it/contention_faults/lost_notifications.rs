//! Notifications are lost or come late, and nothing else fails: no connection breaks, so a client cannot notice.

use std::thread;
use std::time::Duration;

use leasehold::Client;
use leasehold::crossbeam_channel::bounded;
use leasehold_testbed::{Proxy, Server, eventually};

use crate::contention_faults::relay::{Delivery, Relay};
use crate::contention_faults::{KEY, Turns, assert_kept, client, kill_notifications, unhurried};
use crate::support::{
    SOON, Task, ask, assert_all_become_free, in_redis, lease_of, millis, secs, server, value_of,
    wait_for_queue,
};

/// A waiter without notifications asks again within a second, and a ttl takes sixty.
const WITHOUT_NOTIFICATION: Duration = Duration::from_secs(6);

fn relayed() -> (Server, Relay) {
    let server = server();
    let relay = Relay::start(server.port());
    (server, relay)
}

#[test]
fn a_lost_grant_notification_costs_a_moment() {
    let (server, relay) = relayed();
    let holder = client(&server.url());
    // The holder releases the lock before or after the waiters have read the key.
    let waits = [0, 5, 15, 30, 60, 200, 600, 900].map(millis);
    let clients: Vec<Client> = waits.iter().map(|_| unhurried(&relay.url())).collect();
    let (mut held, mut waiters) = (Vec::new(), Vec::new());
    for (n, waiting) in clients.iter().enumerate() {
        let key = format!("lock-{n}");
        held.push(holder.mutex(&key).lock().unwrap());
        let mutex = waiting.mutex(&key);
        waiters.push(Task::start(move || mutex.lock().unwrap()));
        wait_for_queue(&server, &key, 1);
    }
    relay.set_delivery(Delivery::Lost);
    let rounds: Vec<Task<()>> = waits
        .into_iter()
        .zip(held.into_iter().zip(waiters))
        .map(|(wait, (held, waiter))| {
            Task::start(move || {
                thread::sleep(wait);
                assert_kept(held.unlock());
                drop(waiter.within(WITHOUT_NOTIFICATION, "the grant without a notification"));
            })
        })
        .collect();
    for round in rounds {
        round.within(SOON, "a lock changing hands");
    }
    assert_all_become_free(&server);
}

#[test]
fn a_grant_lost_with_all_connections_is_found() {
    let server = server();
    let proxy = Proxy::start(server.port()).unwrap();
    let (holder, waiting) = (client(&server.url()), unhurried(&proxy.url()));
    for _ in 0..5 {
        let held = holder.mutex(KEY).lock().unwrap();
        let lease = lease_of(&server, KEY);
        let mutex = waiting.mutex(KEY);
        let waiter = Task::start(move || mutex.lock().unwrap());
        wait_for_queue(&server, KEY, 1);
        proxy.hold_replies(true);
        assert_kept(held.unlock());
        assert_ne!(lease_of(&server, KEY), lease);
        // This also drops the notifications that were held back.
        proxy.cut_all();
        proxy.hold_replies(false);
        drop(waiter.within(
            WITHOUT_NOTIFICATION,
            "the grant after all connections broke",
        ));
    }
    assert_all_become_free(&server);
}

/// The key becomes free without a message, as when a client of another version releases it, or when Redis fails
/// halfway.
#[test]
fn a_grant_without_any_notification_is_found() {
    let server = server();
    let (holder, waiting) = (client(&server.url()), client(&server.url()));
    for round in 0..5 {
        let held = holder.mutex(KEY).lock().unwrap();
        let mutex = waiting.mutex(KEY);
        let waiter = Task::start(move || mutex.lock().unwrap());
        wait_for_queue(&server, KEY, 1);
        thread::sleep(millis(12 * round));
        kill_notifications(&server);
        let script = "local first = redis.call('ZPOPMIN', KEYS[3])[1] \
             local lease, holder = string.match(first, '(%x+),%d+,(%S+)$') \
             local micros = string.format('%.0f', redis.call('ZINCRBY', KEYS[2], 1, 't')) \
             local value = 'lh1 ' .. lease .. ' ' .. micros .. ' ' .. holder \
             return redis.call('SET', KEYS[1], value, 'PX', 60000)";
        let keys = [KEY, "~fence", "~queue:k"].map(in_redis);
        let eval = ["EVAL", script, "3", &keys[0], &keys[1], &keys[2]];
        ask(&server, &eval);
        let entered = waiter.within(WITHOUT_NOTIFICATION, "the grant without a notification");
        assert!(entered.fencing_token() > held.fencing_token());
        drop((held, entered));
        assert!(eventually(SOON, || value_of(&server, KEY).is_none()));
    }
}

#[test]
fn grants_continue_while_notifications_are_lost_or_late() {
    let (server, relay) = relayed();
    let mut clients = vec![client(&server.url())];
    clients.extend((0..3).map(|_| client(&relay.url())));
    let turns = Turns::of(&clients, 2, 30);
    let mut fault = 0;
    turns.go_on_under(|| {
        // Each lost notification costs a second, until the client sees that it receives none.
        let lost = fault == 1;
        relay.set_delivery(if lost {
            Delivery::Lost
        } else {
            Delivery::HeldBack
        });
        thread::sleep(millis(10 + 7 * (fault % 5)));
        relay.set_delivery(Delivery::Pass);
        fault += 1;
    });
    assert_all_become_free(&server);
}

/// The client finds its grant by asking, releases the lock, and requests it again. Only then does the notification of
/// the first grant arrive.
#[test]
fn a_late_grant_notification_takes_no_lock() {
    let (server, relay) = relayed();
    let (holder, waiting) = (client(&server.url()), unhurried(&relay.url()));
    let held = holder.mutex(KEY).lock().unwrap();
    let mutex = waiting.mutex(KEY);
    let waiter = Task::start(move || mutex.lock().unwrap());
    wait_for_queue(&server, KEY, 1);
    relay.set_delivery(Delivery::HeldBack);
    assert_kept(held.unlock());
    let first = waiter.within(WITHOUT_NOTIFICATION, "the grant without a notification");
    assert_kept(first.unlock());

    // The client is queued again when the notification of its first grant comes.
    let held = holder.mutex(KEY).lock().unwrap();
    let mutex = waiting.mutex(KEY);
    let waiter = Task::start(move || mutex.lock().unwrap());
    wait_for_queue(&server, KEY, 1);
    relay.set_delivery(Delivery::Pass);
    thread::sleep(millis(300));
    assert!(!waiter.is_done(), "another client has it");
    held.check().unwrap();
    assert_eq!(crate::support::queued(&server, KEY), 1, "the wait goes on");
    assert_kept(held.unlock());
    let second = waiter.within(WITHOUT_NOTIFICATION, "its second grant");
    // The late notification does not make the client release its new grant either.
    thread::sleep(millis(300));
    assert!(value_of(&server, KEY).is_some());
    second.check().unwrap();
    assert_kept(second.unlock());
    assert_all_become_free(&server);
}

#[test]
fn waiters_gone_before_their_notification_return_the_grant() {
    let (server, relay) = relayed();
    let (holder, waiting) = (client(&server.url()), unhurried(&relay.url()));
    let next = client(&server.url());
    let held = holder.mutex(KEY).lock().unwrap();
    let (give_up, given_up) = bounded(0);
    let mutex = waiting.mutex(KEY).cancelled_by(given_up);
    let leaver = Task::start(move || mutex.lock().map(drop));
    wait_for_queue(&server, KEY, 1);
    let mutex = next.mutex(KEY);
    let waiter = Task::start(move || mutex.lock().unwrap());
    wait_for_queue(&server, KEY, 2);
    relay.set_delivery(Delivery::HeldBack);
    assert_kept(held.unlock());
    drop(give_up);
    // The wait was cancelled, unless the machine was so slow that the client got the lock before.
    let _ = leaver.within(SOON, "the end of the wait");
    drop(waiter.within(secs(5), "the grant of the remaining waiter"));
    relay.set_delivery(Delivery::Pass);
    assert_all_become_free(&server);
}

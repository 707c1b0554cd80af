//! Locks held across a switch-over are neither lost by mistake nor left behind.

use leasehold::{LossReason, MutexGuard};
use leasehold_testbed::eventually;

use super::{Servers, assert_listens_on_the_new, listen_on_the_old};
use crate::steady::steady;
use crate::support::{
    LONG_TTL, Recorder, SOON, What, ask, assert_all_become_free, expires_in, in_redis, is_held,
    lock, lost_within, millis, server, tracked, value_of,
};

#[test]
fn locks_of_the_new_primary_are_not_lost() {
    let (servers, recorder) = (Servers::start(), Recorder::new());
    let builder = steady(&servers.proxy.url()).ttl(LONG_TTL);
    let client = builder.event_handler(recorder.clone()).build().unwrap();
    listen_on_the_old(&servers, &client).unlock().unwrap();
    servers.switch_over_apart();
    servers.close_pipelines();
    let looked = tracked(&servers.old);
    let guards: Vec<MutexGuard> = (0..5).map(|n| lock(&client, &format!("k{n}"))).collect();
    // The notification connection reads the keys on the old primary, which has none of them.
    assert!(eventually(SOON, || tracked(&servers.old) > looked));
    assert_listens_on_the_new(&servers, &client);
    for guard in guards {
        guard.check().unwrap();
        let lost = guard.lost_signal().recv_timeout(millis(20));
        assert!(lost.is_err(), "{lost:?}");
        assert_eq!(recorder.count(What::Lost, guard.key()), 0);
        drop(guard);
    }
    assert_all_become_free(&servers.new);
}

#[test]
fn locks_held_across_the_switch_are_released_when_dropped() {
    let servers = Servers::start();
    let client = servers.client();
    let guards: Vec<MutexGuard> = (0..5).map(|n| lock(&client, &format!("k{n}"))).collect();
    servers.switch_over();
    for guard in &guards {
        guard.check().unwrap();
    }
    drop(guards);
    assert_all_become_free(&servers.new);
}

/// All connections of the client lead to the old primary, where the lock is deleted.
#[test]
fn keys_deleted_on_the_old_primary_are_kept() {
    let (servers, recorder) = (Servers::start(), Recorder::new());
    let builder = steady(&servers.proxy.url()).ttl(LONG_TTL);
    let client = builder.event_handler(recorder.clone()).build().unwrap();
    let guard = lock(&client, "k");
    assert!(eventually(SOON, || tracked(&servers.old) > 0));
    guard.extend(LONG_TTL).unwrap();
    servers.switch_over();
    servers.drop_from_the_old("k");
    assert_listens_on_the_new(&servers, &client);
    // The connections for renewals may be replaced a second later.
    assert!(eventually(SOON, || guard.extend(LONG_TTL).is_ok()));
    assert_eq!(recorder.count(What::Lost, "k"), 0);
    drop(guard);
    assert_all_become_free(&servers.new);
}

#[test]
fn a_lock_reported_lost_is_still_released() {
    type Leave = fn(MutexGuard);
    let leave: [Leave; 2] = [drop, |guard| drop(guard.unlock().unwrap_err())];
    for leave in leave {
        let server = server();
        let client = steady(&server.url()).ttl(LONG_TTL).build().unwrap();
        let guard = lock(&client, "k");
        let value = value_of(&server, "k").unwrap();
        let lost = guard.lost_signal();
        ask(&server, &["DEL", &in_redis("k")]);
        assert_eq!(lost_within(SOON, &lost), LossReason::Deleted);
        // It looks as if the read had come from another server: the primary still has the lock.
        ask(&server, &["SET", &in_redis("k"), &value, "PX", "60000"]);
        leave(guard);
        let gone = eventually(SOON, || !is_held(&server, "k"));
        assert!(gone, "{:?}", expires_in(&server, "k"));
    }
}

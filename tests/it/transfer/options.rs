//! The options that a transfer keeps: how long the lock may be held, and which client renews it.

use std::sync::Arc;
use std::time::Instant;

use leasehold::{LossReason, MemoryStore};
use leasehold_testbed::eventually;

use super::{adopt, client, lock};
use crate::steady::steady;
use crate::support::{
    LONG_TTL, Recorder, SOON, Task, What, ask, expires_in, in_redis, is_held, lease_of,
    lost_within, millis, queued, secs, server, value_of, wait_for_queue,
};

#[test]
fn only_the_adopter_renews_an_adopted_lock() {
    let server = server();
    let [before, after] = [(); 2].map(|()| Recorder::new());
    let [old, new] = [&before, &after].map(|recorder| {
        let builder = steady(&server.url())
            .ttl(LONG_TTL)
            .event_handler(Arc::clone(recorder));
        builder.build().unwrap()
    });
    // The lock keeps its own ttl. The ttl of the client that adopts it does not matter.
    let guard = old.mutex("k").ttl(secs(9)).lock().unwrap();
    ask(&server, &["PEXPIRE", &in_redis("k"), "5000"]);
    let ticket = guard.into_ticket().unwrap();
    let left = expires_in(&server, "k").unwrap();
    assert!(left > secs(5), "reset at the transfer: {left:?}");
    ask(&server, &["PEXPIRE", &in_redis("k"), "5000"]);
    let guard = adopt(&new, &ticket);
    let left = expires_in(&server, "k").unwrap();
    assert!(left > secs(5) && left <= secs(9), "{left:?}");
    assert!(guard.remaining() <= secs(9), "{guard:?}");
    let renewed = before.count(What::Renewed, "k");
    after.wait_for(2, What::Renewed, "k");
    assert_eq!(before.count(What::Renewed, "k"), renewed);
    guard.unlock().unwrap();
}

#[test]
fn a_fixed_ttl_is_never_prolonged() {
    let server = server();
    let [old, new] = [(); 2].map(|()| client(&server));
    let started = Instant::now();
    let mut guard = old.mutex("k").fixed_ttl(secs(4)).lock().unwrap();
    let ends_at = Instant::now() + secs(4);
    for n in 0..6 {
        let before = expires_in(&server, "k").unwrap();
        let ticket = guard.into_ticket().unwrap();
        guard = adopt(if n % 2 == 0 { &new } else { &old }, &ticket);
        assert!(expires_in(&server, "k").unwrap() <= before);
        assert!(guard.remaining() <= ends_at - Instant::now(), "{guard:?}");
    }
    assert_eq!(lost_within(SOON, &guard.lost_signal()), LossReason::Expired);
    assert!(started.elapsed() > secs(3));
    assert!(eventually(SOON, || !is_held(&server, "k")));
    drop(guard);
    // The lock was extended, and the ticket has the longer ttl.
    let guard = old.mutex("k").fixed_ttl(secs(4)).lock().unwrap();
    guard.extend(LONG_TTL).unwrap();
    let guard = adopt(&new, &guard.into_ticket().unwrap());
    assert!(guard.remaining() > LONG_TTL / 2, "{guard:?}");
    guard.unlock().unwrap();
}

#[test]
fn the_rest_of_max_hold_is_transferred() {
    let server = server();
    let [old, new] = [(); 2].map(|()| client(&server));
    let mutex = old.mutex("k").max_hold(secs(5));
    let guard = mutex.lock().unwrap();
    let started = Instant::now();
    std::thread::sleep(millis(1_500));
    let guard = adopt(&new, &guard.into_ticket().unwrap());
    assert!(guard.remaining() <= millis(3_500), "{guard:?}");
    assert!(guard.extend(secs(4)).is_err(), "beyond what is left");
    let left = expires_in(&server, "k").unwrap();
    assert!(
        left <= millis(3_600),
        "the key does not outlive it: {left:?}"
    );
    assert_eq!(lost_within(SOON, &guard.lost_signal()), LossReason::MaxHold);
    assert!(started.elapsed() >= millis(4_900));
    drop(guard);
    let free = lock(&old, "k");
    free.unlock().unwrap();
}

#[test]
fn adopters_of_one_client_see_rising_tokens() {
    let server = server();
    let [old, new] = [(); 2].map(|()| client(&server));
    let mut tokens = Vec::new();
    let mut guard = lock(&old, "k");
    for client in [&old, &new, &old, &new] {
        for _ in 0..3 {
            let mutex = client.mutex("k");
            tokens.push(guard.fencing_token());
            let (held, next) = (adopt(client, &guard.into_ticket().unwrap()), mutex);
            assert!(held.fencing_token() > *tokens.last().unwrap());
            tokens.push(held.fencing_token());
            let next = Task::start_blocked(move || next.lock().unwrap());
            drop(held);
            guard = next.within(SOON, "a hand-off");
        }
    }
    tokens.push(guard.fencing_token());
    // The last hand-off has no adoption behind it.
    assert!(tokens.is_sorted_by(|one, next| one < next), "{tokens:?}");
    guard.unlock().unwrap();
    let next = lock(&new, "k").fencing_token();
    assert!(next > *tokens.last().unwrap());
}

/// An adoption is a grant, so hand-offs are counted anew.
#[test]
fn an_adopter_counts_hand_offs_anew() {
    let server = server();
    let builder = || {
        steady(&server.url())
            .ttl(LONG_TTL)
            .max_hand_offs(2)
            .hand_off_time(10 * SOON)
    };
    let [old, new] = [(); 2].map(|()| builder().build().unwrap());
    let next = |client: &leasehold::Client, held: leasehold::MutexGuard| {
        let mutex = client.mutex("k");
        let next = Task::start_blocked(move || mutex.lock().unwrap());
        drop(held);
        next.within(SOON, "a grant")
    };
    let second = next(&old, lock(&old, "k"));
    let adopted = adopt(&new, &second.into_ticket().unwrap());
    let token = adopted.fencing_token();
    assert_eq!(token % 1024, 0);
    let fourth = next(&new, next(&new, adopted));
    assert_eq!(fourth.fencing_token(), token + 2);
    let lease = lease_of(&server, "k");
    let fifth = next(&new, fourth);
    assert_ne!(lease_of(&server, "k"), lease, "a grant by Redis");
    assert!(fifth.fencing_token() > token + 1023);
}

/// The thread is queued in Redis when its client adopts the lock. When it gets the lock by a hand-off, its queue entry
/// is removed.
#[test]
fn a_queued_thread_granted_locally_leaves_the_queue() {
    let server = server();
    let [old, new] = [(); 2].map(|()| client(&server));
    let guard = lock(&old, "k");
    let mutex = new.mutex("k");
    let waiter = Task::start(move || mutex.lock().unwrap());
    wait_for_queue(&server, "k", 1);
    let guard = adopt(&new, &guard.into_ticket().unwrap());
    assert_eq!(queued(&server, "k"), 1);
    let token = guard.fencing_token();
    drop(guard);
    let guard = waiter.within(SOON, "a hand-off");
    assert_eq!(guard.fencing_token(), token + 1, "without Redis");
    wait_for_queue(&server, "k", 0);
    guard.extend(2 * LONG_TTL).unwrap();
    guard.unlock().unwrap();
    assert!(!is_held(&server, "k"), "{:?}", value_of(&server, "k"));
}

/// The watchdog renews the lock at any time. No renewal in flight shortens the ttl.
#[test]
fn a_transfer_keeps_an_extended_ttl() {
    let server = server();
    let [old, new] = [(); 2].map(|()| client(&server));
    let mut guard = old.mutex("k").ttl(millis(900)).lock().unwrap();
    for n in 0..40 {
        guard.extend(secs(20)).unwrap();
        std::thread::sleep(millis(n % 20));
        let left = expires_in(&server, "k").unwrap();
        let ticket = guard.into_ticket().unwrap();
        guard = adopt(if n % 2 == 0 { &new } else { &old }, &ticket);
        let now = expires_in(&server, "k").unwrap();
        assert!(now + secs(10) > left, "{now:?} after {left:?}");
        guard.check().unwrap();
    }
    guard.unlock().unwrap();
    assert!(!is_held(&server, "k"));
}

#[test]
fn earlier_renewals_leave_the_adopter_alone() {
    let server = server();
    let recorder = Recorder::new();
    let builder = || steady(&server.url()).ttl(secs(3));
    let old = builder()
        .event_handler(Arc::clone(&recorder))
        .build()
        .unwrap();
    let new = builder().build().unwrap();
    // Enough locks to have renewals in flight all the time.
    let guards: Vec<_> = (0..300).map(|n| lock(&old, &format!("k{n}"))).collect();
    recorder.wait_for(1, What::Renewed, "k0");
    let adopted: Vec<_> = guards
        .into_iter()
        .map(|guard| adopt(&new, &guard.into_ticket().unwrap()))
        .collect();
    let renewed = recorder.count(What::Renewed, "k0");
    std::thread::sleep(secs(4));
    for guard in &adopted {
        guard.check().unwrap();
        assert_eq!(recorder.count(What::Lost, guard.key()), 0);
        assert_eq!(recorder.count(What::RenewalFailed, guard.key()), 0);
    }
    assert!(recorder.count(What::Renewed, "k0") <= renewed + 1);
    for guard in adopted {
        guard.unlock().unwrap();
    }
}

/// The check stays in its process. Without it, nothing could stop the renewal.
#[test]
fn a_lock_with_a_check_is_not_renewed_by_its_adopter() {
    let memory = MemoryStore::new();
    let [old, new] = [(); 2].map(|()| memory.client().unwrap());
    let guard = old.mutex("k").ttl(secs(30)).renew_while(|| true);
    let guard = guard.lock().unwrap();
    memory.advance(secs(15));
    let guard = adopt(&new, &guard.into_ticket().unwrap());
    assert!(guard.remaining() > secs(25), "reset at the transfer");
    memory.advance(secs(15));
    guard.check().unwrap();
    memory.advance(secs(15));
    assert_eq!(
        guard.lost_signal().recv_timeout(SOON),
        Ok(LossReason::Expired)
    );
    assert!(!new.mutex("k").is_locked().unwrap());
}

#[test]
fn refused_locks_are_transferred_with_their_remaining_ttl() {
    let memory = MemoryStore::new();
    let [old, new] = [(); 2].map(|()| memory.client().unwrap());
    let guard = old.mutex("k").ttl(secs(30)).renew_while(|| false);
    let guard = guard.lock().unwrap();
    memory.advance(secs(15));
    let guard = adopt(&new, &guard.into_ticket().unwrap());
    assert!(guard.remaining() <= secs(15), "{guard:?}");
    memory.advance(secs(15));
    assert!(guard.is_lost() && !new.mutex("k").is_locked().unwrap());
}

#[test]
fn a_lost_lock_is_released_and_not_transferred() {
    let memory = MemoryStore::new();
    let [old, new] = [(); 2].map(|()| memory.client().unwrap());
    let guard = old.mutex("k").fixed_ttl(secs(1000)).lock().unwrap();
    // The lock's validity has ended, but not its ttl, which is longer by the allowance for drift.
    memory.advance(secs(995));
    assert!(new.mutex("k").is_locked().unwrap());
    let error = guard.into_ticket().unwrap_err();
    assert_eq!(error.loss_reason(), Some(&LossReason::Expired));
    assert_eq!(error.key(), Some("k"));
    assert!(!new.mutex("k").is_locked().unwrap());
    assert!(old.mutex("k").try_lock().unwrap().is_some());
}

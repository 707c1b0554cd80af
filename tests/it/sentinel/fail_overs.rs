//! The primary is stopped, killed, restarted, or demoted, while locks are held, awaited, acquired and released.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use leasehold::{ErrorKind, LossReason};
use leasehold_testbed::eventually;

use crate::conformance::election::Watched;
use crate::faults_hold::assert_closed_connections_end_no_hold_or_wait;
use crate::replicas::assert_too_few;
use crate::support::{
    SOON, Task, ask, held_keys, is_held, lock, lost_within, millis, notified_clients, queued, secs,
    wait_for_queue,
};

use super::{Group, OUTAGE};

/// `fail` ends the primary. A lock that the replicas have stays held, its waiter continues to wait, and the new primary
/// serves both.
fn assert_locks_survive(group: &mut Group, fail: impl FnOnce(&mut Group, usize)) -> usize {
    let (holder, other) = (group.client(), group.client());
    let before = group.primary().unwrap();
    let guard = lock(&holder, "k");
    guard.transaction(|_, _| Ok(())).unwrap();
    let token = guard.fencing_token();
    let mutex = other.mutex("k");
    let waiter = Task::start(move || {
        let guard = mutex.lock().unwrap();
        let token = guard.fencing_token();
        guard.unlock().unwrap();
        token
    });
    wait_for_queue(&group.servers()[before], "k", 1);
    group.wait_for_copies("k");
    fail(group, before);
    let after = group.wait_for_switch(before).unwrap();
    let new = &group.servers()[after];
    // The connections for notifications and transactions lead to the new primary.
    assert!(eventually(4 * SOON, || notified_clients(new) == 2));
    assert!(!waiter.is_done() && !guard.is_lost());
    assert!(eventually(4 * SOON, || guard
        .transaction(|_, _| Ok(()))
        .is_ok()));
    guard.unlock().unwrap();
    assert!(waiter.within(OUTAGE, "the lock") > token);
    assert!(eventually(SOON, || held_keys(new).is_empty()));
    after
}

#[test]
fn locks_survive_the_death_of_the_primary() {
    let mut group = Group::start();
    let after = assert_locks_survive(&mut group, |group, primary| {
        group.server_mut(primary).kill();
    });
    // The old primary comes back, empty and with the role of a primary. No client writes there.
    let client = group.client();
    group.server_mut(0).restart().unwrap();
    for n in 0..20 {
        let key = format!("after-{n}");
        let guard = lock(&client, &key);
        assert!(is_held(&group.servers()[after], &key));
        guard.unlock().unwrap();
    }
    let old = &group.servers()[0];
    assert_eq!(old.calls("evalsha").unwrap(), 0);
}

#[test]
fn locks_survive_a_stop_of_the_primary() {
    let mut group = Group::start();
    let after = assert_locks_survive(&mut group, |group, primary| {
        group.servers()[primary].stop();
    });
    let client = group.client();
    // The old primary regards itself as the primary until the sentinels demote it.
    group.servers()[0].resume();
    for n in 0..20 {
        let key = format!("after-{n}");
        let guard = lock(&client, &key);
        assert!(is_held(&group.servers()[after], &key));
        guard.unlock().unwrap();
    }
}

#[test]
fn locks_survive_a_planned_fail_over() {
    let mut group = Group::start();
    let after = assert_locks_survive(&mut group, |group, _| {
        group.fail_over().unwrap();
    });
    // One fail-over after another.
    group.wait_until_whole().unwrap();
    assert_ne!(after, 0);
    assert_locks_survive(&mut group, |group, _| {
        group.fail_over().unwrap();
    });
}

/// The term of the leader outlives the fail-over. Its observers may not know in between, and see no earlier state.
#[test]
fn observers_follow_a_fail_over() {
    let mut group = Group::start();
    let (leader, next) = (group.client(), group.client());
    // Observers report an outage after this ttl.
    let mut states = Watched::of(next.election("k").ttl(secs(5)).observe().unwrap());
    let term = leader.election("k").campaign("first").unwrap();
    states.wait_for("first");
    group.wait_for_copies("k");
    group.wait_for_copies("~value:k");
    let before = group.primary().unwrap();
    group.server_mut(before).kill();
    let after = group.wait_for_switch(before).unwrap();
    assert!(eventually(4 * SOON, || term.proclaim("second").is_ok()));
    states.wait_for("second");
    let token = term.fencing_token();
    term.resign().unwrap();
    states.wait_until_vacant();
    let term = next.election("k").campaign("third").unwrap();
    assert!(term.fencing_token() > token);
    states.wait_for("third");
    assert!(is_held(&group.servers()[after], "k"));
    drop(term);
}

/// The replicas have no copy of the lock. Its holder learns of the loss from the new primary, long before the ttl ends.
#[test]
fn an_unreplicated_lease_is_reported_as_lost() {
    let mut group = Group::start();
    let (holder, other) = (group.client(), group.client());
    let servers = group.servers();
    lock(&holder, "warm").unlock().unwrap();
    servers[1..].iter().for_each(|replica| replica.stop());
    // Otherwise the lock would reach the replicas' sockets.
    ask(&servers[0], &["CLIENT", "KILL", "TYPE", "replica"]);
    let guard = lock(&holder, "k");
    let lost = guard.lost_signal();
    // The client has been notified of changes of its lock since this connection is open.
    assert!(eventually(SOON, || notified_clients(&servers[0]) == 1));
    group.server_mut(0).kill();
    let servers = group.servers();
    servers[1..].iter().for_each(|replica| replica.resume());
    let mutex = other.mutex("k");
    let next = Task::start(move || mutex.lock().unwrap());
    group.wait_for_switch(0).unwrap();
    let reason = lost_within(4 * SOON, &lost);
    assert!(
        matches!(reason, LossReason::Deleted | LossReason::TakenOver { .. }),
        "{reason:?}"
    );
    let error = guard.unlock().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::LeaseLost);
    let guard = next.within(OUTAGE, "the lock");
    guard.unlock().unwrap();
}

/// The replicas have no link when the locks are released. The client sends no further request.
#[test]
fn releases_that_the_new_primary_lacks_are_repeated() {
    let mut group = Group::start();
    let (client, other) = (group.client(), group.client());
    let guards: Vec<_> = (0..100).map(|n| lock(&client, &format!("k{n}"))).collect();
    (0..100).for_each(|n| group.wait_for_copies(&format!("k{n}")));
    let servers = group.servers();
    servers[1..].iter().for_each(|replica| replica.stop());
    // Otherwise the releases would reach the replicas' sockets.
    ask(&servers[0], &["CLIENT", "KILL", "TYPE", "replica"]);
    for guard in guards {
        assert!(guard.unlock().unwrap().is_confirmed());
    }
    // The replicas have an earlier lease of this lock than the last one.
    for _ in 0..100 {
        lock(&client, "k0").unlock().unwrap();
    }
    group.server_mut(0).kill();
    let servers = group.servers();
    servers[1..].iter().for_each(|replica| replica.resume());
    let after = group.wait_for_switch(0).unwrap();
    let new = &group.servers()[after];
    let are_free = eventually(2 * SOON, || held_keys(new).is_empty());
    assert!(are_free, "taken: {:?}", held_keys(new));
    lock(&other, "k0").unlock().unwrap();
}

/// No replica has a link when the lock is requested. A grant without their acknowledgements would be lost with the
/// primary.
#[test]
fn acknowledged_locks_survive_the_death_of_the_primary() {
    let mut group = Group::start();
    let (client, other) = (
        group.builder().replicas(2, millis(500)).build().unwrap(),
        group.client(),
    );
    let servers = group.servers();
    servers[1..].iter().for_each(|replica| replica.stop());
    // Otherwise the grant would reach the replicas' sockets.
    ask(&servers[0], &["CLIENT", "KILL", "TYPE", "replica"]);
    let error = client.mutex("k").try_lock().unwrap_err();
    assert_too_few(&error, "0 of 2 replicas acknowledged");
    let mutex = client.mutex("k");
    let granted = Task::start(move || mutex.lock().unwrap());
    servers[1..].iter().for_each(|replica| replica.resume());
    let guard = granted.within(OUTAGE, "an acknowledged grant");
    group.server_mut(0).kill();
    let after = group.wait_for_switch(0).unwrap();
    // The attempts fail until the client has found the new primary.
    let mut tried = None;
    let has_reply = eventually(4 * SOON, || {
        tried = other.mutex("k").try_lock().ok();
        tried.is_some()
    });
    assert!(has_reply && tried.flatten().is_none(), "granted twice");
    guard.check().unwrap();
    guard.unlock().unwrap();
    let new = &group.servers()[after];
    assert!(eventually(SOON, || held_keys(new).is_empty()));
}

/// Threads acquire and release all the time. The only error is that of a lost lease, and all threads still get grants
/// after the fail-overs.
#[test]
fn acquires_and_releases_continue_through_fail_overs() {
    let group = Group::start();
    let done = Arc::new(AtomicBool::new(false));
    let clients = [group.client(), group.client()];
    let workers: Vec<Task<u64>> = (0..4)
        .map(|n| {
            let mutex = clients[n % 2].mutex("k");
            let done = Arc::clone(&done);
            Task::start(move || {
                let mut last = 0;
                while !done.load(Ordering::Relaxed) {
                    let guard = mutex.lock().unwrap();
                    assert!(guard.fencing_token() > last);
                    last = guard.fencing_token();
                    if let Err(error) = guard.unlock() {
                        assert_eq!(error.kind(), ErrorKind::LeaseLost, "{error}");
                    }
                }
                last
            })
        })
        .collect();
    let mut primary = 0;
    for _ in 0..2 {
        primary = group.fail_over().unwrap();
        group.wait_until_whole().unwrap();
    }
    let now = ask(&group.servers()[primary], &["TIME"]);
    let leasehold_testbed::Reply::Array(parts) = now else {
        panic!("TIME answers with an array");
    };
    let seconds = u64::try_from(parts[0].as_int().unwrap()).unwrap();
    done.store(true, Ordering::Relaxed);
    for worker in workers {
        // The last grant came after the last fail-over.
        let last = worker.within(OUTAGE, "the last turn");
        assert!(
            last / 1024 / 1_000_000 + 10 >= seconds,
            "{last} at {seconds}"
        );
    }
    let new = &group.servers()[primary];
    assert!(eventually(SOON, || held_keys(new).is_empty()));
    drop(clients);
    let client = group.client();
    lock(&client, "k").unlock().unwrap();
}

/// The connections of callers, of renewals and for notifications are closed, again and again.
#[test]
fn closed_connections_end_no_hold_or_wait() {
    let group = Group::start();
    let server = &group.servers()[0];
    let is_queued = || queued(server, "k") == 1;
    assert_closed_connections_end_no_hold_or_wait(server, &|| group.builder(), &is_queued);
}

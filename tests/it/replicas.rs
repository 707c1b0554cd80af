//! Locks that replicas have to acknowledge, and what a fail-over leaves of them.

use std::sync::Arc;
use std::time::Duration;

use leasehold::{Builder, Client, Error, ErrorKind, LossReason, MemoryStore};
use leasehold_testbed::{Proxy, Server, eventually};

use crate::steady::steady;
use crate::support::{
    LONG_TTL, Recorder, SOON, Task, What, ask, assert_all_become_free, expires_in, in_redis,
    is_held, lock, lock_requests, lost_within, millis, secs, server, value_of, wait_for_queue,
    warm_up,
};

/// A primary and its replicas, each behind a proxy that can cut it off.
struct Replicated {
    primary: Server,
    replicas: Vec<(Server, Proxy)>,
    /// The address of the present primary.
    proxy: Proxy,
}

impl Replicated {
    fn start(count: usize) -> Self {
        let builder = Server::builder().arg("repl-diskless-sync-delay", "0");
        let primary = builder.start().unwrap();
        let replica = |_| {
            let link = Proxy::start(primary.port()).unwrap();
            let replica = server();
            let port = link.port().to_string();
            ask(&replica, &["REPLICAOF", "127.0.0.1", &port]);
            (replica, link)
        };
        let replicas: Vec<_> = (0..count).map(replica).collect();
        let all = count.to_string();
        let are_linked = || ask(&primary, &["WAIT", &all, "100"]).as_int() == Some(count as i64);
        assert!(eventually(2 * SOON, are_linked));
        let proxy = Proxy::start(primary.port()).unwrap();
        Self {
            primary,
            replicas,
            proxy,
        }
    }

    /// A client whose locks `count` replicas have to acknowledge. The time-out for acknowledgements is longer than a
    /// linked replica needs.
    fn client(&self, count: u32) -> Client {
        self.builder(count, secs(4)).build().unwrap()
    }

    fn builder(&self, count: u32, timeout: Duration) -> Builder {
        let builder = steady(&self.proxy.url()).ttl(LONG_TTL);
        builder.replicas(count, timeout)
    }

    fn cut_off(&self, replica: usize) {
        self.replicas[replica].1.hold_replies(true);
    }

    fn link(&self, replica: usize) {
        self.replicas[replica].1.hold_replies(false);
    }

    /// Kills the primary, makes the replica the primary, and leads all clients to it.
    fn fail_over_to(&mut self, replica: usize) {
        self.promote(replica);
        self.lead_clients_to(replica);
    }

    /// Kills the primary, and makes the replica the primary. The clients still look for the dead one.
    fn promote(&mut self, replica: usize) {
        self.primary.kill();
        ask(&self.replicas[replica].0, &["REPLICAOF", "NO", "ONE"]);
    }

    fn lead_clients_to(&self, replica: usize) {
        self.proxy.redirect(self.replicas[replica].0.port());
        self.proxy.cut_all();
    }

    fn waits(&self) -> u64 {
        self.primary.calls("wait").unwrap()
    }
}

pub fn assert_too_few(error: &Error, acknowledged: &str) {
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(error.to_string().contains(acknowledged), "{error}");
}

#[test]
fn an_acknowledged_lock_survives_a_fail_over() {
    let mut servers = Replicated::start(2);
    let client = servers.client(2);
    let guard = lock(&client, "k");
    let value = value_of(&servers.primary, "k");
    servers.fail_over_to(1);
    assert_eq!(value_of(&servers.replicas[1].0, "k"), value);
    let other = steady(&servers.proxy.url()).build().unwrap();
    assert!(other.mutex("k").try_lock().unwrap().is_none());
    guard.check().unwrap();
    drop(guard);
    assert!(eventually(SOON, || !is_held(&servers.replicas[1].0, "k")));
}

/// This is what `replicas` does not guarantee: one of two replicas has acknowledged, and the other one is promoted.
#[test]
fn a_lagging_promoted_replica_allows_two_holders() {
    let mut servers = Replicated::start(2);
    servers.cut_off(1);
    let both = servers.builder(2, secs(2)).build().unwrap();
    let error = both.mutex("k").try_lock().unwrap_err();
    assert_too_few(&error, "1 of 2 replicas acknowledged within 2s");
    assert_all_become_free(&servers.primary);

    let one = servers.client(1);
    let held = lock(&one, "k");
    assert!(is_held(&servers.replicas[0].0, "k"));
    servers.promote(1);
    let promoted = &servers.replicas[1].0;
    let other = steady(&promoted.url()).ttl(LONG_TTL).build().unwrap();
    let second = other.mutex("k").try_lock().unwrap().unwrap();
    assert!(
        !held.is_lost(),
        "two holders, until the first one learns of it"
    );
    assert!(second.fencing_token() > held.fencing_token());
    servers.lead_clients_to(1);
    let lost = lost_within(2 * SOON, &held.lost_signal());
    assert!(matches!(lost, LossReason::TakenOver { .. }), "{lost:?}");
}

#[test]
fn lock_retries_through_a_shortage_of_replicas() {
    let servers = Replicated::start(1);
    servers.cut_off(0);
    let recorder = Recorder::new();
    let builder = servers.builder(1, millis(100)).outage_timeout(millis(400));
    let client = builder
        .event_handler(Arc::clone(&recorder))
        .build()
        .unwrap();
    let error = client.mutex("k").lock().unwrap_err();
    assert_too_few(&error, "0 of 1 replicas acknowledged within 100ms");
    assert!(recorder.count(What::Unavailable, "k") > 0);
    assert_all_become_free(&servers.primary);
    let client = servers.builder(1, secs(1)).build().unwrap();
    let waiting = Task::start(move || client.mutex("k").lock().map(drop));
    assert!(eventually(SOON, || is_held(&servers.primary, "k")));
    servers.link(0);
    waiting.within(SOON, "locking").unwrap();
}

/// Locks of the same client that need no replica wait for one `WAIT` at most, and do not fail.
#[test]
fn other_locks_work_during_a_shortage() {
    let servers = Replicated::start(1);
    servers.cut_off(0);
    let client = servers.builder(0, secs(1)).pipelines(1).build().unwrap();
    let mutex = client.mutex("short").replicas(1, secs(4));
    let short = Task::start(move || mutex.try_lock().map(drop));
    assert!(eventually(SOON, || is_held(&servers.primary, "short")));
    let other = client.mutex("other").try_lock().unwrap().unwrap();
    let error = short.within(SOON, "trying to lock").unwrap_err();
    assert_too_few(&error, "0 of 1");
    other.unlock().unwrap();
    assert_all_become_free(&servers.primary);
}

/// Another client's release grants the lock to a waiter by a message. The waiter may use the grant only after the
/// replicas have acknowledged it.
#[test]
fn a_queued_grant_has_to_be_acknowledged() {
    let servers = Replicated::start(1);
    let plain = servers.client(0);
    let builder = servers.builder(1, secs(2)).outage_timeout(millis(1));
    let client = builder.build().unwrap();
    for is_linked in [true, false] {
        let held = lock(&plain, "k");
        let waiter = client.mutex("k");
        let waiting = Task::start(move || waiter.lock());
        wait_for_queue(&servers.primary, "k", 1);
        if !is_linked {
            servers.cut_off(0);
        }
        let before = servers.waits();
        held.unlock().unwrap();
        let outcome = waiting.within(SOON, "locking");
        assert!(servers.waits() > before);
        if is_linked {
            assert!(is_held(&servers.replicas[0].0, "k"));
            outcome.unwrap().unlock().unwrap();
        } else {
            assert_too_few(&outcome.unwrap_err(), "0 of 1");
            assert_all_become_free(&servers.primary);
        }
    }
}

#[test]
fn an_unacknowledged_extension_keeps_the_old_deadline() {
    let servers = Replicated::start(1);
    let client = servers.builder(1, millis(300)).build().unwrap();
    let guard = client.mutex("k").fixed_ttl(LONG_TTL).lock().unwrap();
    servers.cut_off(0);
    let error = guard.extend(3 * LONG_TTL).unwrap_err();
    assert_too_few(&error, "0 of 1");
    assert!(guard.remaining() <= LONG_TTL, "{:?}", guard.remaining());
    guard.check().unwrap();
    servers.link(0);
    let extended = || guard.extend(3 * LONG_TTL).is_ok();
    assert!(eventually(SOON, extended));
    assert!(guard.remaining() > 2 * LONG_TTL);
    assert!(expires_in(&servers.replicas[0].0, "k").unwrap() > 2 * LONG_TTL);
}

#[test]
fn a_lock_without_replicas_ends_at_its_deadline() {
    let servers = Replicated::start(1);
    let recorder = Recorder::new();
    let builder = servers.builder(1, millis(300)).ttl(secs(3));
    let client = builder
        .event_handler(Arc::clone(&recorder))
        .build()
        .unwrap();
    let guard = lock(&client, "k");
    recorder.wait_for(1, What::Renewed, "k");
    assert!(servers.waits() >= 2, "renewals are acknowledged");
    servers.cut_off(0);
    let lost = lost_within(2 * SOON, &guard.lost_signal());
    assert!(matches!(lost, LossReason::Expired), "{lost:?}");
    assert!(recorder.count(What::RenewalFailed, "k") > 0);
}

#[test]
fn an_adopted_lock_has_to_be_acknowledged() {
    let servers = Replicated::start(1);
    let client = servers.builder(1, secs(2)).outage_timeout(millis(1));
    let client = client.build().unwrap();
    let ticket = lock(&client, "k").into_ticket().unwrap();
    let before = servers.waits();
    let guard = client.adopt(&ticket).unwrap();
    assert!(servers.waits() > before);
    let ticket = guard.into_ticket().unwrap();
    servers.cut_off(0);
    assert_too_few(&client.adopt(&ticket).unwrap_err(), "0 of 1");
    assert_all_become_free(&servers.primary);
}

#[test]
fn a_converted_lock_has_to_be_acknowledged() {
    let servers = Replicated::start(1);
    let client = servers.builder(1, secs(2)).outage_timeout(millis(1));
    let client = client.build().unwrap();
    let reader = client.rw_lock("k").read().unwrap();
    let before = servers.waits();
    let writer = reader.try_upgrade().unwrap().unwrap();
    let reader = writer.downgrade().unwrap();
    assert_eq!(servers.waits(), before + 2);
    servers.cut_off(0);
    let error = reader.try_upgrade().map(drop).unwrap_err();
    assert_too_few(&error, "0 of 1");
    assert_all_become_free(&servers.primary);
}

#[test]
fn each_grant_costs_one_wait_only() {
    const LOCKS: u64 = 200;
    let servers = Replicated::start(2);
    let (plain, replicated) = (servers.client(0), servers.client(2));
    for (client, waits_each) in [(&plain, 0), (&replicated, 1)] {
        warm_up(client);
        let (requests, waits) = (lock_requests(&servers.primary), servers.waits());
        for _ in 0..LOCKS {
            lock(client, "k").unlock().unwrap();
        }
        let requests = lock_requests(&servers.primary) - requests;
        assert_eq!(servers.waits() - waits, LOCKS * waits_each);
        assert_eq!(requests, 2 * LOCKS, "an acquire and a release");
    }
}

/// The `WAIT` behind the first call comes before the call that Redis carries out.
#[test]
fn a_call_that_is_sent_twice_is_acknowledged() {
    let servers = Replicated::start(1);
    let client = servers.client(1);
    let lock = || client.mutex("k").try_lock().unwrap().unwrap();
    let guard = lock();
    ask(&servers.primary, &["SCRIPT", "FLUSH"]);
    guard.extend(2 * LONG_TTL).unwrap();
    guard.unlock().unwrap();
    for _ in 0..4 {
        lock().unlock().unwrap();
    }
    // Plain commands do not find the counter, so the script grants the lock.
    ask(&servers.primary, &["DEL", &in_redis("~fence")]);
    let before = servers.waits();
    let guard = lock();
    assert_eq!(servers.waits(), before + 2);
    assert!(is_held(&servers.replicas[0].0, "k"));
    guard.unlock().unwrap();
}

/// A hand-off leaves the key as it is, so the replicas have it already.
#[test]
fn a_hand_off_needs_no_acknowledgement() {
    let servers = Replicated::start(1);
    let builder = servers.builder(1, secs(4)).max_hand_offs(1023);
    let client = builder.hand_off_time(10 * SOON).build().unwrap();
    let guard = lock(&client, "k");
    let before = servers.waits();
    let mutex = client.mutex("k");
    let token = guard.fencing_token();
    let next = Task::start_blocked(move || mutex.lock().unwrap().fencing_token());
    drop(guard);
    assert_eq!(next.within(SOON, "locking"), token + 1);
    assert_eq!(servers.waits(), before);
}

#[test]
fn a_missing_right_to_wait_is_named() {
    let servers = Replicated::start(1);
    let user = ["ACL", "SETUSER", "default", "-wait"];
    let client = servers.client(1);
    ask(&servers.primary, &user);
    let error = client.mutex("k").lock().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    assert!(error.to_string().contains("WAIT"), "{error}");
    assert_all_become_free(&servers.primary);
}

#[test]
fn the_timeout_fits_into_the_command_timeout() {
    let server = server();
    let build = |timeout| {
        let builder = Client::builder(server.url()).command_timeout(secs(3));
        builder.replicas(1, timeout).build_lazy()
    };
    build(millis(1500)).unwrap();
    let error = build(millis(1501)).unwrap_err();
    assert_eq!(
        error.to_string(),
        "invalid configuration: the timeout of `replicas` must be 1ms to 1.5s, half of the \
         `command_timeout` of 3s, not 1.501s"
    );
    let client = Client::open(server.url()).unwrap();
    let mutex = client.mutex("k").replicas(1, secs(1));
    let error = mutex.try_lock().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidConfig, "{error}");
}

#[test]
fn a_memory_store_needs_no_replicas() {
    let client = MemoryStore::new().client().unwrap();
    let mutex = client.mutex("k").replicas(3, millis(100));
    mutex.lock().unwrap().extend(LONG_TTL).unwrap();
}

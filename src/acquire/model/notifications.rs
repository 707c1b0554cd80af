//! Models of notifications that arrive while threads of the client wait for the lock or hold it.

use std::sync::atomic::AtomicUsize;

use super::*;
use crate::util::id::HolderId;
use crate::util::sync::model::quiet;

/// A little longer than the time after which a waiter's key is tracked.
const TRACKED_AFTER: Duration = Duration::from_millis(25);

fn by() -> HolderId {
    HolderId::of_text("operator/1/0")
}

/// Waits until all threads sleep. Then moves the clock ahead, so that the keys of the waiters are tracked.
fn let_watch(waiting: &AtomicUsize) {
    // Each waiting client also has a thread that delivers its notifications.
    quiet(|| 2 * waiting.load(Ordering::SeqCst));
    pass(TRACKED_AFTER);
}

#[test]
fn model_deleted_key_wakes_its_waiter() {
    check(2 * RUNS, || {
        let server = Server::new();
        let clients = [Client::new(&server, QueueMode::Notified)];
        let (client, key, work) = (&clients[0], request().key, Work::new());
        server.give(
            &key,
            LeaseId::random(),
            MonotonicTime::now().after(OPTIONS.ttl),
        );
        let waiting = AtomicUsize::new(1);
        let waits = || {
            assert!(work.run(client, Until::Forever));
            waiting.store(0, Ordering::SeqCst);
        };
        let before = chance(2);
        let deletes = || server.delete(&key);
        let clock = || {
            let_watch(&waiting);
            if !before {
                deletes();
            }
        };
        let meanwhile = || {
            if before {
                deletes();
            }
        };
        run(&server, &clients, &[&waits, &clock, &meanwhile]);
        assert_nothing_is_left(&server, &clients);
    });
}

#[test]
fn model_lost_connection_costs_no_grant() {
    check(RUNS, || {
        let server = Server::new();
        let clients = [(); 2].map(|()| Client::new(&server, QueueMode::Notified));
        let work = Work::new();
        let (key, first) = (request().key, LeaseId::random());
        server.give(&key, first, MonotonicTime::now().after(OPTIONS.ttl));
        let waits = || assert!(work.run(&clients[0], Until::Forever));
        let other = || assert!(work.run(&clients[1], Until::Forever));
        let loses = || {
            server.take_back(&key, first);
            clients.iter().for_each(|client| client.store.reconnect());
        };
        run(&server, &clients, &[&waits, &waits, &other, &loses]);
        assert_nothing_is_left(&server, &clients);
    });
}

#[test]
fn model_lease_of_a_deleted_key_is_lost() {
    check(RUNS, || {
        let server = Server::new();
        let clients = [Client::new(&server, QueueMode::Notified)];
        let client = &clients[0];
        let lease = client.acquirer.acquire(&request(), Until::Forever);
        let lease = lease.unwrap().unwrap();
        let work = Work::new();
        let is_tracked = || client.watchdog.track_keys(std::slice::from_ref(&lease));
        let deletes = || server.delete(&request().key);
        // A new notification connection reads the key, so it reports the loss, too.
        let loses = || client.store.reconnect();
        let waits = || assert!(work.run(client, Until::Forever));
        run(&server, &clients, &[&is_tracked, &deletes, &loses, &waits]);
        assert_eq!(lease.loss(MonotonicTime::now()), Some(LossReason::Deleted));
        client.release(&lease, false);
        assert_nothing_is_left(&server, &clients);
    });
}

#[test]
fn model_forced_lease_is_not_believed() {
    check(2 * RUNS, || {
        let server = Server::new();
        let clients = [Client::new(&server, QueueMode::Notified)];
        let (client, key) = (&clients[0], request().key);
        let first = LeaseId::random();
        server.give(&key, first, MonotonicTime::now().after(OPTIONS.ttl));
        let (forced, held) = (Mutex::new(Vec::new()), Mutex::new(None));
        let waits = || {
            let lease = client.acquirer.acquire(&request(), Until::Forever);
            *held.lock() = lease.unwrap();
        };
        let forces = || {
            if let Some(lease) = server.holder(&key).filter(|lease| *lease != first) {
                server.force(&key, lease, &by());
                forced.lock().push(lease);
            }
        };
        let frees = || {
            server.take_back(&key, first);
            forces();
        };
        run(&server, &clients, &[&waits, &frees, &forces]);
        let lease = held.lock().take().expect("it was granted");
        let is_forced = forced.lock().contains(&lease.grant().id);
        let reason = is_forced.then(|| LossReason::ForceUnlocked { by: by() });
        assert_eq!(lease.loss(MonotonicTime::now()), reason);
        let holder = (!is_forced).then(|| lease.grant().id);
        assert_eq!(server.holder(&key), holder);
        client.release(&lease, !is_forced);
        assert_nothing_is_left(&server, &clients);
    });
}

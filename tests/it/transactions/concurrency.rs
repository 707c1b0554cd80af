//! Transactions have connections of their own. They block no other request, and the number of concurrent transactions
//! is limited.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};

use leasehold::crossbeam_channel::{Receiver, bounded, unbounded};
use leasehold::{Client, ErrorKind, LossReason, MutexGuard};
use leasehold_testbed::{Server, eventually};

use super::{DATA, assert_writes, client, watch, write};
use crate::steady::steady;
use crate::support::{
    LONG_TTL, Recorder, SOON, Task, What, ask, connections, connections_accepted, in_redis, millis,
    notified_clients, secs, server,
};

/// A transaction whose closure hangs until `go_on` ends; returns once it hangs.
fn hang(client: &Client, key: &str, go_on: &Receiver<()>) -> Task<MutexGuard> {
    let (guard, go_on) = (client.mutex(key).lock().unwrap(), go_on.clone());
    let (hangs, hanging) = bounded(1);
    let task = Task::start(move || {
        // A renewal in between may run the closure twice.
        let (_, result) = write(&guard, |_| {
            let _ = hangs.try_send(());
            let _ = go_on.recv();
        });
        result.unwrap();
        guard
    });
    hanging.recv_timeout(SOON).unwrap();
    task
}

#[test]
fn hanging_closures_block_no_renewal_or_lock() {
    let (server, recorder) = (server(), Recorder::new());
    let client = steady(&server.url())
        .ttl(secs(10))
        .renew_ratio(0.05)
        .pipelines(1)
        .max_transactions(2)
        .connect_timeout(millis(1500))
        .event_handler(recorder.clone())
        .build()
        .unwrap();
    let (end, go_on) = bounded(0);
    let hanging = ["a", "b"].map(|key| hang(&client, key, &go_on));
    let held = client.mutex("held").lock().unwrap();
    for key in ["held", "a", "b"] {
        recorder.wait_for_more(2, What::Renewed, key);
    }
    for n in 0..20 {
        client.with_lock(format!("other-{n}"), || ()).unwrap();
    }
    let (runs, result) = write(&held, |_| ());
    let error = result.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(error.to_string().contains("all 2 transactions"), "{error}");
    assert_eq!(runs, 0);
    drop(end);
    for task in hanging {
        let guard = task.within(SOON, "the transactions that hung");
        guard.unlock().unwrap();
    }
    write(&held, |_| ()).1.unwrap();
    held.unlock().unwrap();
}

#[test]
fn max_transactions_limits_concurrent_transactions() {
    let server = server();
    let builder = steady(&server.url()).ttl(LONG_TTL).max_transactions(2);
    let client = builder.build().unwrap();
    let (inside, most) = (AtomicUsize::new(0), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        for n in 0..12 {
            let guard = client.mutex(format!("lock-{n}")).lock().unwrap();
            let (inside, most) = (&inside, &most);
            scope.spawn(move || {
                for _ in 0..10 {
                    let done = guard.transaction(|_, pipe| {
                        let others = inside.fetch_add(1, Ordering::SeqCst);
                        most.fetch_max(others + 1, Ordering::SeqCst);
                        pipe.incr("done", 1);
                        std::thread::sleep(millis(1));
                        inside.fetch_sub(1, Ordering::SeqCst);
                        Ok(())
                    });
                    done.unwrap();
                }
            });
        }
    });
    let done = ask(&server, &["GET", "done"]);
    let done: usize = done.as_text().unwrap().parse().unwrap();
    assert!(most.load(Ordering::SeqCst) <= 2, "{most:?} at a time");
    assert_eq!(done, 12 * 10);
    // Two pipelines, two for renewals, one for notifications, and two transactions.
    assert!(connections(&server) <= 7);
}

/// A transaction waits for the end of another transaction, and `end_it` makes it lose its lock. Returns the reason of
/// the loss in its error.
fn end_of_a_wait(end_it: impl FnOnce(&Server, &Client)) -> LossReason {
    let server = server();
    let builder = steady(&server.url()).ttl(LONG_TTL).max_transactions(1);
    let client = builder.connect_timeout(secs(60)).build().unwrap();
    let (end, go_on) = unbounded();
    let guard = client.mutex("a").lock().unwrap();
    let (hangs, hanging) = bounded(1);
    let hung = Task::start(move || {
        guard.transaction(|_, _| {
            hangs.send(()).unwrap();
            let _ = go_on.recv();
            Ok(())
        })
    });
    hanging.recv_timeout(SOON).unwrap();
    let waiting = client.mutex("k").lock().unwrap();
    let waiting = Task::start_blocked(move || write(&waiting, |_| ()).1);
    end_it(&server, &client);
    let error = waiting.within(SOON, "a transaction that waits");
    drop::<leasehold::crossbeam_channel::Sender<()>>(end);
    let _ = hung.within(SOON, "the other transaction");
    error.unwrap_err().loss_reason().unwrap().clone()
}

#[test]
fn a_queued_transaction_ends_with_lock_or_client() {
    let lost = end_of_a_wait(|server, _| drop(ask(server, &["DEL", &in_redis("k")])));
    assert_eq!(lost, LossReason::Deleted);
    let ended = end_of_a_wait(|_, client| {
        // The other closure continues; nothing waits for it.
        client.shutdown(SOON).unwrap();
    });
    assert_eq!(ended, LossReason::Shutdown);
}

#[test]
fn a_connection_is_reused_after_each_transaction() {
    let server = server();
    let client = client(&server);
    let guard = client.mutex("k").lock().unwrap();
    let mut foreign = {
        let redis = redis::Client::open(server.url()).unwrap();
        redis.get_connection_with_timeout(SOON).unwrap()
    };
    assert_writes(&server, &guard);
    // One connection is made to watch the lock.
    assert!(eventually(SOON, || notified_clients(&server) == 1));
    let before = connections_accepted(&server);
    for n in 0..20 {
        let done = guard.transaction(|_, pipe| {
            pipe.set(DATA, n);
            Ok(())
        });
        done.unwrap();
        let failed = guard.transaction(|conn, _| {
            watch(conn, DATA)?;
            let message = (redis::ErrorKind::Extension, "the closure's own");
            Err::<(), _>(message.into())
        });
        failed.unwrap_err();
        let mut runs = 0;
        let again = guard.transaction(|conn, pipe| {
            watch(conn, DATA)?;
            runs += 1;
            if runs == 1 {
                redis::cmd("INCR").arg(DATA).exec(&mut foreign)?;
            }
            pipe.incr(DATA, 1);
            Ok(())
        });
        again.unwrap();
        assert_eq!(runs, 2);
    }
    // Only the connection of this request was accepted.
    assert_eq!(connections_accepted(&server) - before, 1);
}

#[test]
fn a_panic_in_a_closure_drops_its_connection() {
    let server = server();
    let client = client(&server);
    let guard = client.mutex("k").lock().unwrap();
    assert_writes(&server, &guard);
    assert!(eventually(SOON, || notified_clients(&server) == 1));
    let before = connections_accepted(&server);
    for _ in 0..3 {
        let panics = || guard.transaction::<()>(|_, _| panic!("a closure's own"));
        catch_unwind(AssertUnwindSafe(panics)).unwrap_err();
    }
    // The connection of this request was accepted, and two that replace the former ones.
    assert_eq!(connections_accepted(&server) - before, 3);
}

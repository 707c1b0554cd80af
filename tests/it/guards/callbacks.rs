//! `on_lost` callbacks: they run after all flags and signals, one after another, and may use the client.

use std::sync::Arc;
use std::sync::mpsc::channel;

use leasehold::{LossReason, MutexGuard};
use leasehold_testbed::eventually;

use crate::steady::steady;
use crate::support::{SOON, ask, in_redis, is_held, millis, secs, server};

#[test]
fn callbacks_run_after_flags_and_signals() {
    let server = server();
    let client = steady(&server.url())
        .ttl(secs(3))
        .renew_ratio(0.05)
        .build()
        .unwrap();
    for _ in 0..20 {
        let guard: Arc<MutexGuard> = Arc::new(client.mutex("k").lock().unwrap());
        let (sender, receiver) = channel();
        let (signal, seen_by) = (guard.lost_signal(), Arc::downgrade(&guard));
        guard.on_lost(move |reason| {
            let guard = seen_by.upgrade().expect("the test keeps it");
            let all = guard.is_lost() && guard.check().is_err() && guard.remaining().is_zero();
            let signalled = signal.try_recv() == Ok(reason.clone());
            let new_one = guard.lost_signal().try_recv() == Ok(reason.clone());
            sender.send((reason, all, signalled, new_one)).unwrap();
        });
        ask(&server, &["DEL", &in_redis("k")]);
        let wanted = (LossReason::Deleted, true, true, true);
        assert_eq!(receiver.recv_timeout(SOON), Ok(wanted));
    }
}

#[test]
fn callbacks_on_a_lost_lock_run_at_once() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    let guard = client.mutex("k").fixed_ttl(millis(80)).lock().unwrap();
    guard.lost_signal().recv_timeout(SOON).unwrap();
    for _ in 0..3 {
        let (sender, receiver) = channel();
        guard.on_lost(move |reason| sender.send(reason).unwrap());
        assert_eq!(receiver.recv_timeout(SOON), Ok(LossReason::Expired));
    }
}

#[test]
fn a_release_drops_its_callbacks_unrun() {
    let server = server();
    let client = steady(&server.url()).ttl(secs(3)).build().unwrap();
    let mut receivers = Vec::new();
    for round in 0..4 {
        let guard = client.mutex("k").lock().unwrap();
        let (sender, receiver) = channel::<LossReason>();
        guard.on_lost(move |reason| sender.send(reason).unwrap());
        receivers.push(receiver);
        if round % 2 == 0 {
            guard.unlock().unwrap();
        } else {
            drop(guard);
        }
    }
    ask(&server, &["DEL", &in_redis("k")]);
    client.shutdown(secs(5)).unwrap();
    for receiver in receivers {
        // The callback dropped the sender without a message.
        let outcome = receiver.recv_timeout(SOON);
        assert_eq!(
            outcome,
            Err(std::sync::mpsc::RecvTimeoutError::Disconnected)
        );
    }
}

#[test]
fn a_panicking_callback_stops_no_other() {
    let server = server();
    let client = steady(&server.url())
        .ttl(secs(3))
        .renew_ratio(0.05)
        .build()
        .unwrap();
    for _ in 0..3 {
        let guard = client.mutex("k").lock().unwrap();
        let (sender, receiver) = channel();
        for n in 0..6 {
            let sender = sender.clone();
            guard.on_lost(move |_| {
                assert!(n % 2 == 1, "a test's own panic");
                sender.send(n).unwrap();
            });
        }
        ask(&server, &["DEL", &in_redis("k")]);
        let order = [1, 3, 5].map(|_| receiver.recv_timeout(SOON).unwrap());
        assert_eq!(order, [1, 3, 5], "in the order they were given");
    }
}

#[test]
fn a_callback_may_lock_wait_and_release() {
    let server = server();
    let client = steady(&server.url())
        .ttl(secs(3))
        .renew_ratio(0.05)
        .build()
        .unwrap();
    let guard = client.mutex("k").lock().unwrap();
    let other = client.mutex("other").fixed_ttl(millis(300)).lock().unwrap();
    let (sender, receiver) = channel();
    let theirs = client.clone();
    guard.on_lost(move |_| {
        // The lock is contended at first, so the callback thread waits.
        let token = theirs.with_lock("other", || 7).unwrap();
        // The very lock that was lost.
        let again = theirs.mutex("k").lock().unwrap();
        again.extend(secs(20)).unwrap();
        sender.send((token, again)).unwrap();
    });
    ask(&server, &["DEL", &in_redis("k")]);
    let (seven, again) = receiver.recv_timeout(SOON).unwrap();
    assert_eq!(seven, 7);
    assert!(again.fencing_token() > guard.fencing_token());
    drop((guard, other));
    assert!(
        is_held(&server, "k"),
        "dropping the lost guard leaves the new one alone"
    );
    again.unlock().unwrap();
}

#[test]
fn a_callback_may_add_callbacks() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    let guard = Arc::new(client.mutex("k").fixed_ttl(millis(80)).lock().unwrap());
    let (sender, receiver) = channel();
    let inner = Arc::clone(&guard);
    guard.on_lost(move |_| {
        inner.on_lost(move |reason| sender.send(reason).unwrap());
    });
    assert_eq!(receiver.recv_timeout(SOON), Ok(LossReason::Expired));
}

#[test]
fn a_slow_callback_delays_no_renewal_or_signal() {
    let server = server();
    let client = steady(&server.url())
        .ttl(secs(3))
        .renew_ratio(0.1)
        .build()
        .unwrap();
    let (first, kept) = (
        client.mutex("first").lock().unwrap(),
        client.mutex("kept").lock().unwrap(),
    );
    let short = client.mutex("short").fixed_ttl(millis(700)).lock().unwrap();
    let (begun, began) = channel();
    let (go_on, wait) = channel::<()>();
    first.on_lost(move |_| {
        begun.send(()).unwrap();
        let _ = wait.recv();
    });
    ask(&server, &["DEL", &in_redis("first")]);
    began.recv_timeout(SOON).unwrap();
    assert_eq!(
        short.lost_signal().recv_timeout(SOON),
        Ok(LossReason::Expired)
    );
    let lost = kept.lost_signal().recv_timeout(secs(4));
    assert!(
        lost.is_err(),
        "{lost:?} though its ttl has passed more than once"
    );
    drop(go_on);
    kept.unlock().unwrap();
}

#[test]
fn values_owned_by_callbacks_are_dropped_safely() {
    struct PanicsWhenDropped;
    impl Drop for PanicsWhenDropped {
        fn drop(&mut self) {
            assert!(std::thread::panicking(), "a test's own panic");
        }
    }
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    let guard = client.mutex("k").lock().unwrap();
    let owned = PanicsWhenDropped;
    guard.on_lost(move |_| drop(owned));
    drop(guard);
    assert!(eventually(SOON, || !is_held(&server, "k")));
    client.with_lock("k", || ()).unwrap();
}

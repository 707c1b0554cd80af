//! How a client ends, and what remains of it.

use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use leasehold::{Client, ErrorKind, EventHandler, EventLock, LossReason};
use leasehold_testbed::{Proxy, Server, eventually};

use crate::steady::steady;
use crate::support::{
    LONG_TTL, Recorder, SOON, Task, What, assert_all_become_free, builder, expires_in, held_keys,
    is_held, kill_connections, lost_within, millis, secs, server, within,
};

fn client(server: &Server) -> Client {
    steady(&server.url()).ttl(LONG_TTL).build().unwrap()
}

/// Fails unless the client's threads end, with everything they hold.
#[track_caller]
fn assert_ended(recorder: &Arc<Recorder>) {
    let ended = eventually(SOON, || Arc::strong_count(recorder) == 1);
    assert!(ended, "some part of the client is still alive");
}

#[test]
fn shutdown_ends_waits_and_keeps_held_locks() {
    let server = server();
    let recorder = Recorder::new();
    let client = builder(&server.url())
        .ttl(LONG_TTL)
        .event_handler(Arc::clone(&recorder))
        .build()
        .unwrap();
    let guard = client.mutex("a").lock().unwrap();
    let signal = guard.lost_signal();
    let (sender, callback) = channel();
    guard.on_lost(move |reason| sender.send(reason).unwrap());
    let waiters: Vec<_> = (0..20)
        .map(|n| {
            let mutex = client.mutex("a");
            Task::start(move || match n % 2 {
                0 => mutex.lock().map(Some),
                _ => mutex.try_lock_for(LONG_TTL),
            })
        })
        .collect();
    recorder.wait_for(1, What::Contended, "a");

    client.shutdown(secs(5)).unwrap();
    for waiter in waiters {
        let outcome = waiter.within(SOON, "the end of the wait");
        let error = outcome.expect_err("the lock is held");
        assert_eq!(error.kind(), ErrorKind::Shutdown, "{error}");
        assert_eq!(error.key(), Some("a"));
    }
    assert_eq!(lost_within(SOON, &signal), LossReason::Shutdown);
    assert_eq!(callback.recv_timeout(SOON), Ok(LossReason::Shutdown));
    let error = guard.check().unwrap_err();
    assert_eq!(error.loss_reason(), Some(&LossReason::Shutdown));
    let left = expires_in(&server, "a").expect("the shutdown does not release it");
    assert!(left > LONG_TTL / 2, "{left:?}");

    client
        .shutdown(secs(5))
        .expect("a second shutdown is no error");
    for error in [
        client.mutex("b").lock().unwrap_err(),
        client.mutex("b").try_lock().unwrap_err(),
        client.with_lock("b", || ()).unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::Shutdown, "{error}");
    }
    assert!(!is_held(&server, "b"));
    drop(guard);
    drop(client);
    assert_all_become_free(&server);
    assert_ended(&recorder);
}

#[test]
fn a_guard_dropped_after_shutdown_releases() {
    let server = server();
    let client = client(&server);
    let guards: Vec<_> = (0..200)
        .map(|n| client.mutex(format!("lock-{n}")).lock().unwrap())
        .collect();
    client.shutdown(secs(5)).unwrap();
    assert_eq!(held_keys(&server).len(), 200);
    drop(guards);
    drop(client);
    // The test does not wait: dropping the last handle has confirmed the release.
    assert_eq!(held_keys(&server), [""; 0]);
}

#[test]
fn shutdown_confirms_the_releases_under_way() {
    let server = server();
    for kill in [false, true] {
        let client = client(&server);
        let guards: Vec<_> = (0..200)
            .map(|n| client.mutex(format!("lock-{n}")).lock().unwrap())
            .collect();
        if kill {
            kill_connections(&server);
        }
        drop(guards);
        client.shutdown(secs(5)).unwrap();
        assert_eq!(held_keys(&server), [""; 0], "connections killed: {kill}");
    }
}

#[test]
fn shutdown_is_bounded_while_redis_is_stopped() {
    let server = server();
    let client = client(&server);
    let (dropped, held) = (client.mutex("a").lock().unwrap(), client.mutex("b"));
    let held = held.lock().unwrap();
    let signal = held.lost_signal();
    server.stop();
    drop(dropped);
    let started = Instant::now();
    let error = within(SOON, "the shutdown", {
        let client = client.clone();
        move || client.shutdown(millis(300)).unwrap_err()
    });
    let took = started.elapsed();
    assert!(error.is_unavailable(), "{error}");
    assert!(took < millis(300) + secs(3), "took {took:?}");
    assert_eq!(lost_within(SOON, &signal), LossReason::Shutdown);
    let started = Instant::now();
    within(SOON, "dropping everything", move || drop((held, client)));
    assert!(started.elapsed() < secs(4));
    server.resume();
    // Earlier writes have arrived by now, and nothing came after them.
    assert!(eventually(SOON, || !is_held(&server, "a")));
}

#[test]
fn shutdown_is_bounded_while_the_socket_is_full() {
    let server = Server::builder().unix_socket().start().unwrap();
    // A shutdown that waited for the server would wait for longer than this test.
    let client = |url: &str| {
        builder(url)
            .ttl(LONG_TTL)
            .max_key_bytes(1 << 16)
            .command_timeout(secs(60))
    };
    let recorder = Recorder::new();
    let holder = client(&server.url()).build().unwrap();
    let waiting = client(&server.unix_url().unwrap());
    let waiting = waiting
        .event_handler(Arc::clone(&recorder))
        .build()
        .unwrap();
    let keys: Vec<String> = (0..40)
        .map(|n| format!("{n}{}", "x".repeat(60_000)))
        .collect();
    let guards: Vec<_> = keys
        .iter()
        .map(|key| holder.mutex(key).lock().unwrap())
        .collect();
    let waiters: Vec<_> = keys
        .iter()
        .map(|key| {
            let mutex = waiting.mutex(key);
            Task::start(move || mutex.lock().unwrap_err())
        })
        .collect();
    for key in &keys {
        recorder.wait_for(1, What::Contended, key);
    }
    server.stop();
    let waiting = within(SOON, "the shutdown", move || {
        waiting.shutdown(millis(100)).unwrap_err();
        waiting
    });
    server.resume();
    for waiter in waiters {
        let error = waiter.within(SOON, "the end of the wait");
        assert_eq!(error.kind(), ErrorKind::Shutdown, "{error}");
    }
    drop((guards, waiting));
    assert_all_become_free(&server);
}

#[test]
fn shutdown_among_busy_threads_leaves_nothing_held() {
    let server = server();
    for _ in 0..5 {
        let recorder = Recorder::new();
        let client = builder(&server.url())
            .ttl(LONG_TTL)
            .event_handler(Arc::clone(&recorder))
            .build()
            .unwrap();
        let threads: Vec<_> = (0..8)
            .map(|n| {
                let mutex = client.mutex(format!("lock-{}", n / 2));
                Task::start(move || {
                    loop {
                        match mutex.lock() {
                            Ok(guard) if n % 3 == 0 => drop(guard.unlock()),
                            Ok(guard) => drop(guard),
                            Err(error) => return error.kind(),
                        }
                    }
                })
            })
            .collect();
        recorder.wait_for(100, What::Acquired, "lock-0");
        client.shutdown(secs(5)).unwrap();
        drop(client);
        for thread in threads {
            let kind = thread.within(SOON, "the end of the thread");
            assert_eq!(kind, ErrorKind::Shutdown);
        }
        // The last thread ends its client after the drop.
        assert_ended(&recorder);
        assert_eq!(held_keys(&server), [""; 0]);
    }
}

#[test]
fn the_last_client_dropped_leaves_no_release_unsent() {
    let server = server();
    for (n, kill) in [
        (1, false),
        (50, false),
        (300, false),
        (1, true),
        (300, true),
    ] {
        let client = client(&server);
        let guards: Vec<_> = (0..n)
            .map(|n| client.mutex(format!("lock-{n}")).lock().unwrap())
            .collect();
        if kill {
            kill_connections(&server);
        }
        drop(guards);
        drop(client);
        // The test does not wait: the release was confirmed when the drop returned.
        assert_eq!(
            held_keys(&server),
            [""; 0],
            "{n}, connections killed: {kill}"
        );
    }
}

#[test]
fn the_last_client_dropped_waits_for_releases_on_a_slow_network() {
    let server = server();
    let proxy = Proxy::start(server.port()).unwrap();
    let client = steady(&proxy.url()).ttl(LONG_TTL).build().unwrap();
    let guard = client.mutex("a").lock().unwrap();
    proxy.delay(millis(100));
    drop(client);
    assert!(is_held(&server, "a"));
    // The guard is the last value that keeps the client alive.
    drop(guard);
    assert!(!is_held(&server, "a"));
}

#[test]
fn last_client_dropped_in_on_lost_never_deadlocks() {
    let server = server();
    let recorder = Recorder::new();
    let client = builder(&server.url())
        .event_handler(Arc::clone(&recorder))
        .build()
        .unwrap();
    let guard = client.mutex("a").fixed_ttl(millis(200)).lock().unwrap();
    let everything = Arc::new(Mutex::new(None));
    let (done, ended) = channel();
    guard.on_lost({
        let everything = Arc::clone(&everything);
        move |reason| {
            let last = eventually(SOON, || everything.lock().unwrap().take().is_some());
            done.send((reason, last)).unwrap();
        }
    });
    *everything.lock().unwrap() = Some((guard, client));
    drop(everything);
    assert_eq!(ended.recv_timeout(SOON), Ok((LossReason::Expired, true)));
    assert_ended(&recorder);
    assert_all_become_free(&server);
}

#[test]
fn shutdown_in_on_lost_never_deadlocks() {
    let server = server();
    let client = client(&server);
    let short = client.mutex("a").fixed_ttl(millis(200)).lock().unwrap();
    let other = client.mutex("b").lock().unwrap();
    let signal = other.lost_signal();
    let (done, ended) = channel();
    short.on_lost({
        let client = client.clone();
        move |_| done.send(client.shutdown(secs(2)).is_ok()).unwrap()
    });
    assert_eq!(ended.recv_timeout(SOON), Ok(true));
    assert_eq!(lost_within(SOON, &signal), LossReason::Shutdown);
    let error = client.mutex("b").lock().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Shutdown);
}

/// An event handler that drops the client at the first loss.
struct Undertaker {
    client: Mutex<Option<Client>>,
    done: Mutex<std::sync::mpsc::Sender<()>>,
}

impl EventHandler for Undertaker {
    fn lost(&self, _: EventLock<'_>, _: &LossReason) {
        let last = self.client.lock().unwrap().take();
        drop(last);
        self.done.lock().unwrap().send(()).unwrap();
    }
}

#[test]
fn last_client_dropped_in_an_event_never_deadlocks() {
    let server = server();
    let (done, ended) = channel();
    let undertaker = Arc::new(Undertaker {
        client: Mutex::new(None),
        done: Mutex::new(done),
    });
    let client = builder(&server.url())
        .event_handler(Arc::clone(&undertaker))
        .build()
        .unwrap();
    let guard = client.mutex("a").fixed_ttl(millis(300)).lock().unwrap();
    *undertaker.client.lock().unwrap() = Some(client);
    // A guard that is only forgotten would keep the client alive.
    let signal = guard.lost_signal();
    drop(Task::start(move || {
        let guard = guard;
        let _ = signal.recv_timeout(SOON);
        drop(guard);
    }));
    ended.recv_timeout(SOON).unwrap();
    let alone = eventually(SOON, || Arc::strong_count(&undertaker) == 1);
    assert!(alone, "some part of the client is still alive");
}

#[test]
fn a_panic_in_on_lost_stops_nothing_else() {
    let server = server();
    let client = client(&server);
    let guard = client.mutex("a").fixed_ttl(millis(200)).lock().unwrap();
    let (sender, callback) = channel();
    guard.on_lost(|_| panic!("a test's own panic"));
    guard.on_lost(move |reason| sender.send(reason).unwrap());
    assert_eq!(callback.recv_timeout(SOON), Ok(LossReason::Expired));
    client.with_lock("b", || ()).unwrap();
    client.shutdown(secs(5)).unwrap();
}

#[test]
fn shutdown_reports_a_running_callback() {
    let server = server();
    let client = client(&server);
    let guard = client.mutex("a").fixed_ttl(millis(200)).lock().unwrap();
    let (running, is_running) = channel();
    let (go_on, may_go_on) = channel::<()>();
    guard.on_lost(move |_| {
        running.send(()).unwrap();
        let _ = may_go_on.recv();
    });
    is_running.recv_timeout(SOON).unwrap();
    let error = within(SOON, "the shutdown", {
        let client = client.clone();
        move || client.shutdown(millis(200)).unwrap_err()
    });
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    drop(go_on);
    client.shutdown(SOON).expect("the callback has ended");
}

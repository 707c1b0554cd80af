//! Deadlines of waits: never early, never much too late, of any length.

use std::time::{Duration, Instant};

use leasehold::{Client, Error, ErrorKind};
use leasehold_testbed::{Proxy, eventually};

use crate::steady::steady;
use crate::support::{SOON, TIMEOUT, Task, builder, in_time, millis, secs, server};

/// The delay to allow for on a busy machine.
const SLACK: Duration = Duration::from_secs(2);

#[test]
fn try_lock_reports_contention_at_once() {
    let server = server();
    let clients = [(); 2].map(|()| steady(&server.url()).build().unwrap());
    let _held = clients[0].mutex("k").lock().unwrap();
    let start = Instant::now();
    for _ in 0..100 {
        for client in &clients {
            assert!(client.mutex("k").try_lock().unwrap().is_none());
            assert!(
                client
                    .mutex("k")
                    .try_lock_for(Duration::ZERO)
                    .unwrap()
                    .is_none()
            );
        }
    }
    // If one of the calls waited for an hour, this would show it.
    assert!(start.elapsed() < secs(30), "{:?}", start.elapsed());
}

#[test]
fn a_deadline_is_neither_early_nor_late() {
    let server = server();
    let (holder, client) = (
        builder(&server.url()).build().unwrap(),
        builder(&server.url()).build().unwrap(),
    );
    let _held = holder.mutex("k").lock().unwrap();
    let mutex = client.mutex("k");
    for wait in [0, 1, 3, 20, 100, 333].map(millis) {
        for until in [false, true] {
            let has_reply = || {
                let start = Instant::now();
                let found = if until {
                    mutex.try_lock_until(start + wait)
                } else {
                    mutex.try_lock_for(wait)
                };
                let waited = start.elapsed();
                assert!(waited >= wait, "{waited:?} instead of {wait:?}");
                assert!(
                    waited < wait + TIMEOUT + SLACK,
                    "{waited:?} instead of {wait:?}"
                );
                in_time(found).map(|found| assert!(found.is_none()))
            };
            assert!(eventually(SOON, || has_reply().is_some()));
        }
    }
    let past = Instant::now();
    assert!(eventually(SOON, || in_time(mutex.try_lock_until(past))
        .is_some_and(|found| found.is_none())));
}

#[test]
fn deadlines_hold_behind_longer_waits() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    let held = client.mutex("k").lock().unwrap();
    let long_waiters: Vec<_> = (0..5)
        .map(|_| {
            let mutex = client.mutex("k");
            Task::start(move || mutex.lock().map(drop))
        })
        .collect();
    let hasty: Vec<_> = [30, 60, 150, 300]
        .map(|wait| {
            let mutex = client.mutex("k");
            Task::start(move || {
                let start = Instant::now();
                let found = mutex.try_lock_for(millis(wait)).unwrap();
                (millis(wait), start.elapsed(), found.is_none())
            })
        })
        .into();
    for task in hasty {
        let (wait, waited, contended) = task.within(SOON, "a deadline");
        assert!(
            contended && waited >= wait,
            "{waited:?} instead of {wait:?}"
        );
        assert!(waited < wait + SLACK, "{waited:?} instead of {wait:?}");
    }
    held.unlock().unwrap();
    for task in long_waiters {
        task.within(SOON, "the wait with the later deadline")
            .unwrap();
    }
}

#[test]
fn a_free_lock_is_granted_even_after_the_deadline() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    let mutex = client.mutex("k");
    let year = secs(365 * 24 * 60 * 60);
    for wait in [Duration::ZERO, millis(1), year, Duration::MAX] {
        let mut guard = None;
        let is_taken = || {
            let taken = in_time(mutex.try_lock_for(wait));
            guard = taken.map(|guard| guard.unwrap_or_else(|| panic!("free, with {wait:?}")));
            guard.is_some()
        };
        assert!(eventually(SOON, is_taken));
        guard.unwrap().unlock().unwrap();
    }
    let now = Instant::now();
    for deadline in [now.checked_sub(millis(1)).unwrap_or(now), now, now + year] {
        let guard = mutex.try_lock_until(deadline).unwrap();
        guard.expect("the lock is free").unlock().unwrap();
    }
}

#[test]
fn short_waits_leave_a_healthy_server_time_to_reply() {
    let server = server();
    let proxy = Proxy::start(server.port()).unwrap();
    let client = steady(&proxy.url()).build().unwrap();
    client.with_lock("k", || ()).unwrap();
    for (wait, delay) in [(millis(1), millis(5)), (Duration::ZERO, millis(150))] {
        proxy.delay(delay);
        let guard = client.mutex("k").try_lock_for(wait).unwrap();
        guard.expect("the lock is free").unlock().unwrap();
    }
}

#[test]
fn endless_durations_overflow_nothing() {
    let server = server();
    let client = builder(&server.url())
        .outage_timeout(Duration::MAX)
        .max_hold(Duration::MAX);
    let client = client.ttl(secs(3)).build().unwrap();
    let held = client.mutex("k").lock().unwrap();
    let waiters: Vec<_> = (0..3)
        .map(|n| {
            let mutex = client.mutex("k");
            Task::start(move || {
                let guard = match n {
                    0 => mutex.lock().map(Some),
                    1 => mutex.try_lock_for(Duration::MAX),
                    _ => mutex.fixed_ttl(secs(9)).try_lock_for(secs(u64::MAX)),
                };
                guard
                    .unwrap()
                    .expect("the wait without a deadline")
                    .unlock()
            })
        })
        .collect();
    assert!(
        held.lost_signal().recv_timeout(secs(4)).is_err(),
        "renewed as usual"
    );
    held.unlock().unwrap();
    for waiter in waiters {
        waiter.within(SOON, "a grant").unwrap();
    }
    client.shutdown(Duration::MAX).unwrap();
}

#[test]
fn contention_uses_up_no_outage_timeout() {
    let server = server();
    let client = steady(&server.url())
        .outage_timeout(millis(200))
        .build()
        .unwrap();
    let holder = builder(&server.url()).build().unwrap();
    let held = holder.mutex("k").lock().unwrap();
    let tasks: Vec<_> = (0..2)
        .map(|_| {
            let mutex = client.mutex("k");
            Task::start(move || mutex.lock().map(drop))
        })
        .collect();
    std::thread::sleep(secs(1));
    assert!(
        tasks.iter().all(|task| !task.is_done()),
        "five times its outage_timeout"
    );
    held.unlock().unwrap();
    for task in tasks {
        task.within(SOON, "a grant").unwrap();
    }
}

#[test]
fn shutdown_ends_all_waits() {
    let server = server();
    let (holder, client) = (
        builder(&server.url()).build().unwrap(),
        builder(&server.url()).build().unwrap(),
    );
    let _held = holder.mutex("k").lock().unwrap();
    let waiting = |client: &Client, wait: Option<Duration>| {
        let mutex = client.mutex("k");
        Task::start(move || match wait {
            None => mutex.lock().map(Some),
            Some(wait) => mutex.try_lock_for(wait),
        })
    };
    let tasks: Vec<_> = [None, None, Some(secs(3600)), Some(Duration::MAX)]
        .map(|wait| waiting(&client, wait))
        .into();
    std::thread::sleep(millis(100));
    client.shutdown(secs(5)).unwrap();
    for task in tasks {
        let error = task.within(SOON, "the end of the wait").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Shutdown);
        assert_eq!(error.key(), Some("k"));
    }
    let error = client.mutex("k").try_lock().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Shutdown);
}

/// The failed attempt of the first caller to connect ends those of the others early, since they share a connection. The
/// others try again, in the rest of their own time.
#[test]
fn calls_behind_a_failed_attempt_keep_their_time() {
    type Call = fn(&Client, String) -> Result<bool, Error>;
    let calls: [(&str, Call); 6] = [
        ("try_lock", |client, key| {
            client.mutex(key).try_lock().map(|guard| guard.is_some())
        }),
        ("try_with_lock", |client, key| {
            client.try_with_lock(key, || ()).map(|done| done.is_some())
        }),
        ("try_lock_for zero", |client, key| {
            let guard = client.mutex(key).try_lock_for(Duration::ZERO);
            guard.map(|guard| guard.is_some())
        }),
        ("reentrant try_lock", |client, key| {
            let guard = client.reentrant_mutex(key).try_lock();
            guard.map(|guard| guard.is_some())
        }),
        ("inspect", |client, key| client.mutex(key).is_locked()),
        ("fenced read", |client, key| {
            client.fenced_value(key).read().map(|value| value.is_some())
        }),
    ];
    let server = server();
    let timeout = secs(2);
    let longest = timeout.mul_f64(1.6);
    let callers: Vec<_> = calls
        .iter()
        .map(|(name, call)| {
            let client = steady(&server.url())
                .connect_timeout(timeout)
                .command_timeout(timeout)
                .build()
                .unwrap();
            (*name, *call, client)
        })
        .collect();
    for (name, call, client) in &callers {
        call(client, "warm".to_owned()).unwrap_or_else(|error| panic!("{name}: {error}"));
    }
    server
        .command(&["CLIENT", "KILL", "TYPE", "normal"])
        .unwrap();
    server.stop();
    let mut tasks = Vec::new();
    for n in 0..4 {
        for (name, call, client) in &callers {
            let (name, call, client) = (*name, *call, client.clone());
            tasks.push(Task::start(move || {
                let start = Instant::now();
                let outcome = call(&client, format!("{name} {n}"));
                (name, start.elapsed(), outcome)
            }));
        }
        std::thread::sleep(millis(100));
    }
    for task in tasks {
        let (name, took, outcome) = task.within(SOON, "the end of a call");
        let error = outcome.expect_err(name);
        assert!(error.is_unavailable(), "{name}: {error}");
        assert!(took < longest, "{name} took {took:?}: {error}");
    }
    server.resume();
}

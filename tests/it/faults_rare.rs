//! Faults that need a coincidence: late renewals, a panic during a release, a bad key in the same batch, a connection
//! that died unnoticed.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use leasehold::ErrorKind;
use leasehold_testbed::{Proxy, eventually};

use crate::steady::steady;
use crate::support::{
    LONG_TTL, Recorder, SOON, Task, What, ask, assert_all_become_free, builder, expires_in,
    is_held, kill_connections, secs, server, within,
};

#[test]
fn a_late_extension_ends_with_its_release() {
    let server = server();
    let client = builder(&server.url()).build().unwrap();
    let mutex = client.mutex("k").fixed_ttl(secs(4));
    let guard = mutex.lock().unwrap();
    server.stop();
    let error = guard.extend(secs(3600)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    server.resume();
    let late = || expires_in(&server, "k").is_some_and(|left| left > secs(60));
    // If the machine was so busy that the key had gone by then, no renewal came late.
    if !eventually(secs(3), late) {
        return;
    }
    assert!(
        eventually(SOON, || guard.is_lost()),
        "no unlock was confirmed"
    );
    drop(guard);
    assert_all_become_free(&server);
}

#[test]
fn a_panic_releases_over_the_open_connection() {
    let server = server();
    let client = steady(&server.url()).ttl(LONG_TTL).build().unwrap();
    client.with_lock("k", || ()).unwrap();
    let connections = || {
        let list = ask(&server, &["CLIENT", "LIST", "TYPE", "normal"]);
        let ids = list.as_text().unwrap().lines();
        let ids = ids.filter(|line| line.contains(" name=leasehold:"));
        ids.map(|line| line.split(' ').next().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    let before = connections();
    assert!(!before.is_empty());
    for _ in 0..20 {
        let work = || client.with_lock("k", || panic!("the closure's own"));
        catch_unwind(AssertUnwindSafe(work)).unwrap_err();
        // The panicking thread wrote the release. So the release is done once a later request on its pipeline is done.
        client.with_lock("k", || ()).unwrap();
    }
    assert_eq!(connections(), before, "a healthy connection was closed");
}

#[test]
fn a_forbidden_key_affects_no_other() {
    let server = server();
    ask(
        &server,
        &[
            "ACL",
            "SETUSER",
            "narrow",
            "on",
            ">word",
            "+@all",
            "~leasehold:ok*",
            "~leasehold:~queue:ok*",
            "~leasehold:~fence",
        ],
    );
    let url = server.url().replace("redis://", "redis://narrow:word@");
    let client = steady(&url).pipelines(1).ttl(LONG_TTL).build().unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let forbidden: Vec<_> = (0..2)
        .map(|n| {
            let (mutex, stop) = (client.mutex(format!("bad{n}")), Arc::clone(&stop));
            Task::start(move || {
                while !stop.load(Ordering::Relaxed) {
                    let error = mutex.try_lock().unwrap_err();
                    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
                }
            })
        })
        .collect();
    let allowed: Vec<_> = (0..2)
        .map(|n| {
            let mutex = client.mutex(format!("ok{n}"));
            Task::start(move || {
                for _ in 0..500 {
                    mutex.lock().unwrap().unlock().unwrap();
                }
            })
        })
        .collect();
    for task in allowed {
        task.within(6 * SOON, "five hundred locks beside a forbidden one");
    }
    stop.store(true, Ordering::Relaxed);
    for task in forbidden {
        task.within(SOON, "the refusal");
    }
}

#[test]
fn dead_idle_connections_fail_no_request() {
    let server = server();
    let proxy = Proxy::start(server.port()).unwrap();
    let client = builder(&proxy.url())
        .pipelines(1)
        .ttl(LONG_TTL)
        .build()
        .unwrap();
    let guard = client.mutex("k").lock().unwrap();
    // For each failed attempt the pool makes a connection, and all of them become idle there.
    proxy.refuse(true);
    proxy.cut_all();
    for _ in 0..3 {
        client.mutex("other").try_lock().unwrap_err();
    }
    proxy.refuse(false);
    client.with_lock("other", || ()).unwrap();
    assert!(eventually(SOON, || proxy.connections() >= 2));
    kill_connections(&server);
    guard.unlock().unwrap();
}

#[test]
fn a_shutdown_during_renewals_ends_every_guard() {
    let server = server();
    for _ in 0..20 {
        let recorder = Recorder::new();
        let builder = steady(&server.url()).ttl(secs(3)).renew_ratio(0.05);
        let client = builder.event_handler(recorder.clone()).build().unwrap();
        let guards: Vec<_> = (0..100)
            .filter_map(|n| client.mutex(format!("k{n}")).try_lock().unwrap())
            .collect();
        let signals: Vec<_> = guards.iter().map(|guard| guard.lost_signal()).collect();
        // The renewals of the other locks follow at once.
        recorder.wait_for(1, What::Renewed, "k0");
        client.shutdown(SOON).unwrap();
        for signal in &signals {
            assert!(
                signal.recv_timeout(SOON).is_ok(),
                "a guard was never notified"
            );
        }
        drop(guards);
    }
}

#[test]
fn an_outage_is_never_reported_as_contention() {
    let mut server = server();
    let recorder = Recorder::new();
    let client = builder(&server.url())
        .outage_timeout(secs(20))
        .event_handler(Arc::clone(&recorder))
        .build()
        .unwrap();
    client.with_lock("k", || ()).unwrap();
    server.kill();
    let mutex = client.mutex("k");
    let long_waiter = Task::start(move || mutex.lock().map(drop));
    recorder.wait_for(1, What::Unavailable, "k");
    // This thread waits behind a thread that waits for Redis, so the state of the lock is unknown.
    let is_outage = |kind: ErrorKind| matches!(kind, ErrorKind::Unavailable | ErrorKind::Timeout);
    let mutex = client.mutex("k");
    within(6 * SOON, "looking", move || {
        for _ in 0..5 {
            match mutex.try_lock() {
                Err(error) => assert!(is_outage(error.kind()), "{error}"),
                Ok(None) => panic!("an outage was reported as contention"),
                Ok(Some(_)) => panic!("there is no server"),
            }
        }
    });
    server.restart().unwrap();
    long_waiter
        .within(6 * SOON, "waiting through the outage")
        .unwrap();
    assert!(eventually(SOON, || !is_held(&server, "k")));
}

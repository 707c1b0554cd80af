//! Redis fails while clients acquire locks or wait for them.

use std::sync::Arc;
use std::time::Instant;

use leasehold::{Error, ErrorKind};
use leasehold_testbed::{Proxy, eventually};

use crate::steady::steady;
use crate::support::{
    LONG_TTL, Recorder, SOON, TIMEOUT, Task, What, Witness, ask, assert_all_become_free, builder,
    is_held, kill_connections, millis, secs, server, within,
};

#[test]
fn try_lock_fails_and_lock_survives_outages() {
    let mut server = server();
    let recorder = Recorder::new();
    let client = builder(&server.url())
        .event_handler(Arc::clone(&recorder))
        .build()
        .unwrap();
    client.with_lock("a", || ()).unwrap();
    server.kill();

    let (mutex, asked_at) = (client.mutex("a"), Instant::now());
    let error = within(SOON, "looking", move || mutex.try_lock().unwrap_err());
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert_eq!(error.key(), Some("a"));
    assert!(asked_at.elapsed() < 2 * TIMEOUT + secs(2));

    let mutex = client.mutex("a").fixed_ttl(LONG_TTL);
    let long_waiter = Task::start(move || mutex.lock().unwrap());
    recorder.wait_for_more(2, What::Unavailable, "a");
    assert!(!long_waiter.is_done());
    server.restart().unwrap();
    drop(long_waiter.within(SOON, "locking after the restart"));
    assert_all_become_free(&server);
}

#[test]
fn outage_timeout_ends_a_wait() {
    let mut server = server();
    let client = builder(&server.url())
        .outage_timeout(millis(700))
        .build()
        .unwrap();
    server.kill();
    let (mutex, asked_at) = (client.mutex("a"), Instant::now());
    let error = within(SOON, "locking", move || mutex.lock().unwrap_err());
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    let took = asked_at.elapsed();
    assert!(took >= millis(700), "gave up after {took:?}");
    assert!(took < millis(700) + 2 * TIMEOUT + secs(2), "took {took:?}");

    let (mutex, asked_at) = (client.mutex("a"), Instant::now());
    let error = within(SOON, "trying", move || {
        mutex.try_lock_for(millis(900)).unwrap_err()
    });
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(asked_at.elapsed() >= millis(900), "gave up early");
}

#[test]
fn an_unanswered_acquire_leaves_nothing_behind() {
    let server = server();
    let client = builder(&server.url()).build().unwrap();
    client.with_lock("a", || ()).unwrap();
    server.stop();
    let (mutex, asked_at) = (client.mutex("a").fixed_ttl(LONG_TTL), Instant::now());
    let error = within(SOON, "looking", move || mutex.try_lock().unwrap_err());
    assert!(error.is_unavailable(), "{error}");
    assert!(asked_at.elapsed() < 2 * TIMEOUT + secs(2));
    server.resume();
    // Redis executes what its buffers hold before it executes the command of a new connection.
    assert_all_become_free(&server);
    client.with_lock("a", || ()).unwrap();
}

#[test]
fn an_acquire_survives_a_server_stopped_meanwhile() {
    let server = server();
    let recorder = Recorder::new();
    let client = builder(&server.url())
        .event_handler(Arc::clone(&recorder))
        .build()
        .unwrap();
    client.with_lock("a", || ()).unwrap();
    server.stop();
    let mutex = client.mutex("a").fixed_ttl(LONG_TTL);
    let long_waiter = Task::start(move || mutex.lock().unwrap());
    recorder.wait_for(2, What::Unavailable, "a");
    server.resume();
    let guard = long_waiter.within(SOON, "locking after the server resumed");
    guard.check().unwrap();
    // Redis may have executed the client's abandoned attempts before. None of them may end this lock.
    guard.extend(2 * LONG_TTL).unwrap();
    guard.unlock().unwrap();
    assert_all_become_free(&server);
}

#[test]
fn an_acquire_survives_a_server_restart() {
    let mut server = server();
    let client = builder(&server.url()).build().unwrap();
    client.with_lock("a", || ()).unwrap();
    server.stop();
    let mutex = client.mutex("a").fixed_ttl(LONG_TTL);
    let long_waiter = Task::start(move || mutex.lock().unwrap());
    server.kill();
    server.restart().unwrap();
    let guard = long_waiter.within(SOON, "locking after the restart");
    guard.unlock().unwrap();
    assert_all_become_free(&server);
}

/// Some threads wait for Redis, some for each other, and some in the queue in Redis.
#[test]
fn fifty_waiters_enter_or_fail_at_a_restart() {
    const KEYS: usize = 5;
    let mut server = server();
    let recorder = Recorder::new();
    let clients = [(); 2].map(|()| {
        builder(&server.url())
            .event_handler(Arc::clone(&recorder))
            .build()
            .unwrap()
    });
    let key = |n: usize| format!("lock-{}", n % KEYS);
    let guards: Vec<_> = (0..KEYS)
        .map(|n| clients[0].mutex(key(n)).lock().unwrap())
        .collect();
    let witnesses: [Arc<Witness>; KEYS] = Default::default();
    let tasks: Vec<Task<Result<(), Error>>> = (0..50)
        .map(|n| {
            let mutex = clients[n % 2].mutex(key(n));
            let witness = Arc::clone(&witnesses[n % KEYS]);
            Task::start(move || {
                let guard = mutex.lock()?;
                let inside = witness.enter(&guard);
                std::thread::yield_now();
                drop(inside);
                Ok(())
            })
        })
        .collect();
    for n in 0..KEYS {
        // The first waiter of each process has asked.
        recorder.wait_for(2, What::Contended, &key(n));
    }
    server.kill();
    for n in 0..KEYS {
        recorder.wait_for(1, What::Unavailable, &key(n));
    }
    server.restart().unwrap();
    let mut entered = 0;
    for task in tasks {
        match task.within(2 * SOON, "waiting through a restart") {
            Ok(()) => entered += 1,
            Err(error) => assert!(error.is_unavailable(), "{error}"),
        }
    }
    assert_eq!(
        entered, 50,
        "the outage was shorter than their outage_timeout"
    );
    drop(guards);
    assert_all_become_free(&server);
}

#[test]
fn fifty_waiters_reach_their_outage_timeout_together() {
    let mut server = server();
    let recorder = Recorder::new();
    let client = builder(&server.url())
        .outage_timeout(secs(1))
        .event_handler(Arc::clone(&recorder))
        .build()
        .unwrap();
    let guard = client.mutex("a").lock().unwrap();
    let tasks: Vec<Task<Error>> = (0..50)
        .map(|_| {
            let mutex = client.mutex("a");
            Task::start(move || mutex.lock().unwrap_err())
        })
        .collect();
    recorder.wait_for(1, What::Contended, "a");
    server.kill();
    // If the waits ended one after another, they would take 50 s.
    for task in tasks {
        let error = task.within(SOON, "reaching outage_timeout");
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    }
    drop(guard);
}

#[test]
fn scripts_flushed_between_acquires_go_unnoticed() {
    let server = server();
    let recorder = Recorder::new();
    let client = steady(&server.url())
        .event_handler(Arc::clone(&recorder))
        .build()
        .unwrap();
    for _ in 0..20 {
        let guard = client.mutex("a").try_lock().unwrap();
        drop(guard.expect("nobody else wants the lock"));
        ask(&server, &["SCRIPT", "FLUSH"]);
    }
    assert_eq!(recorder.count(What::Unavailable, "a"), 0);
    assert_eq!(recorder.count(What::Contended, "a"), 0);
    assert_all_become_free(&server);
}

#[test]
fn idle_connections_killed_between_acquires_are_replaced_at_once() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    for _ in 0..20 {
        let guard = client.mutex("a").fixed_ttl(LONG_TTL).try_lock().unwrap();
        guard.expect("nobody else wants the lock").unlock().unwrap();
        kill_connections(&server);
    }
    assert_all_become_free(&server);
}

#[test]
fn waiters_enter_after_their_connections_are_killed() {
    let server = server();
    let recorder = Recorder::new();
    let [holder, waiter] = [(); 2].map(|()| {
        builder(&server.url())
            .event_handler(Arc::clone(&recorder))
            .build()
            .unwrap()
    });
    let guard = holder.mutex("a").lock().unwrap();
    let mutex = waiter.mutex("a").fixed_ttl(LONG_TTL);
    let task = Task::start(move || mutex.lock().unwrap());
    recorder.wait_for(1, What::Contended, "a");
    for n in 1..=5 {
        // Repeated, since the waiter may be between two connections.
        let noticed = eventually(SOON, || {
            kill_connections(&server);
            recorder.count(What::Unavailable, "a") >= n
        });
        assert!(noticed, "the waiter does not ask any more after {n} kills");
    }
    assert!(!task.is_done() && !guard.is_lost());
    guard.unlock().unwrap();
    let next = task.within(SOON, "the grant");
    next.extend(2 * LONG_TTL).unwrap();
    drop(next);
    assert_all_become_free(&server);
}

#[test]
fn an_acquire_survives_refused_connections() {
    let server = server();
    let proxy = Proxy::start(server.port()).unwrap();
    let recorder = Recorder::new();
    let client = builder(&proxy.url())
        .event_handler(Arc::clone(&recorder))
        .build()
        .unwrap();
    client.with_lock("a", || ()).unwrap();
    proxy.refuse(true);
    proxy.cut_all();
    let error = client.mutex("a").try_lock().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    let mutex = client.mutex("a");
    let long_waiter = Task::start(move || mutex.lock().unwrap());
    recorder.wait_for_more(2, What::Unavailable, "a");
    proxy.refuse(false);
    let guard = long_waiter.within(SOON, "locking once connections are accepted");
    guard.unlock().unwrap();
    assert!(!is_held(&server, "a"));
}

#[test]
fn a_leader_timeout_fails_no_later_deadline() {
    let server = server();
    let proxy = Proxy::start(server.port()).unwrap();
    let recorder = Recorder::new();
    // One pipeline, so that all threads share it.
    let client = builder(&proxy.url())
        .pipelines(1)
        .command_timeout(secs(6))
        .event_handler(Arc::clone(&recorder))
        .build()
        .unwrap();
    client.with_lock("warm", || ()).unwrap();
    proxy.hold_replies(true);
    let mutex = client.mutex("leader").fixed_ttl(LONG_TTL);
    let leader = Task::start(move || mutex.try_lock().unwrap_err());
    assert!(eventually(SOON, || is_held(&server, "leader")));
    // The deadlines of the followers are later than the leader's by this time.
    std::thread::sleep(secs(3));
    let followers: Vec<_> = (0..10)
        .map(|n| {
            let mutex = client.mutex(format!("follower-{n}")).fixed_ttl(LONG_TTL);
            Task::start(move || mutex.try_lock().unwrap())
        })
        .collect();
    let error = leader.within(SOON, "leading");
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    proxy.hold_replies(false);
    let guards: Vec<_> = followers
        .into_iter()
        .map(|follower| {
            follower
                .within(SOON, "following")
                .expect("the lock was free")
        })
        .collect();
    for n in 0..10 {
        // No thread had to ask twice.
        assert_eq!(
            recorder.count(What::Unavailable, &format!("follower-{n}")),
            0
        );
    }
    drop(guards);
    assert_all_become_free(&server);
}

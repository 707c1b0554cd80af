//! Redis is down, or does not reply. Callers get an error, not the result for a taken lock. A taken lock is no error.

use std::sync::Arc;
use std::time::{Duration, Instant};

use leasehold::{Builder, Client, ErrorKind};
use leasehold_testbed::{Server, eventually};

use crate::support::{Recorder, SOON, Task, What, builder, millis, secs, server};

const SLACK: Duration = Duration::from_secs(3);

fn short_timeout(server: &Server) -> Builder {
    builder(&server.url()).outage_timeout(millis(800))
}

#[test]
fn lock_survives_an_outage_below_its_timeout() {
    let mut server = server();
    let client = builder(&server.url())
        .outage_timeout(secs(60))
        .build()
        .unwrap();
    server.kill();
    let tasks: Vec<_> = (0..3)
        .map(|n| {
            let mutex = client.mutex(format!("k{n}"));
            Task::start(move || mutex.lock().map(drop))
        })
        .collect();
    std::thread::sleep(millis(700));
    assert!(tasks.iter().all(|task| !task.is_done()), "the threads wait");
    server.restart().unwrap();
    for task in tasks {
        task.within(SOON, "the lock after the outage").unwrap();
    }
}

#[test]
fn lock_gives_up_exactly_at_outage_timeout() {
    let mut server = server();
    let client = short_timeout(&server).build().unwrap();
    server.kill();
    let mutex = client.mutex("k");
    let start = Instant::now();
    let outcome =
        Task::start(move || mutex.lock().map(drop)).within(secs(15), "the end of the wait");
    let waited = start.elapsed();
    let error = outcome.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(error.is_unavailable());
    assert_eq!(error.key(), Some("k"));
    assert!(waited >= millis(800), "{waited:?}");
    assert!(waited < millis(800 + 500) + SLACK, "{waited:?}");
}

#[test]
fn a_hundred_waiters_reach_outage_timeout_together() {
    let mut server = server();
    let client = short_timeout(&server).build().unwrap();
    server.kill();
    let start = Instant::now();
    let tasks: Vec<_> = (0..100)
        .map(|_| {
            let mutex = client.mutex("k");
            Task::start(move || mutex.lock().map(drop))
        })
        .collect();
    for task in tasks {
        let error = task
            .within(secs(15), "the end of outage_timeout")
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    }
    assert!(start.elapsed() < secs(15), "not one after another");
}

#[test]
fn the_try_forms_say_unavailable_and_never_none() {
    let mut server = server();
    let client = short_timeout(&server).build().unwrap();
    server.kill();
    let start = Instant::now();
    let error = client.mutex("k").try_lock().unwrap_err();
    assert!(error.is_unavailable(), "{error}");
    let error = client.mutex("k").try_lock_for(Duration::ZERO).unwrap_err();
    assert!(error.is_unavailable(), "{error}");
    assert!(
        start.elapsed() < 2 * millis(1000) + SLACK,
        "{:?}",
        start.elapsed()
    );
    let start = Instant::now();
    let error = client.mutex("k").try_lock_for(millis(1200)).unwrap_err();
    let waited = start.elapsed();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(
        waited >= millis(1200),
        "the deadline is its outage_timeout: {waited:?}"
    );
    assert!(waited < millis(1200 + 500) + SLACK, "{waited:?}");
}

#[test]
fn a_wait_ends_when_the_server_replies_again() {
    let mut server = server();
    let client = short_timeout(&server).build().unwrap();
    server.kill();
    let mutex = client.mutex("k");
    // The deadline is later than the end of `outage_timeout`, and only the deadline counts.
    let waiter = Task::start(move || mutex.try_lock_for(secs(60)));
    std::thread::sleep(millis(1500));
    assert!(!waiter.is_done());
    server.restart().unwrap();
    let guard = waiter.within(SOON, "the lock after the outage").unwrap();
    assert!(guard.is_some());
}

#[test]
fn an_outage_during_a_wait_is_reported() {
    let server = server();
    let holder = builder(&server.url()).ttl(secs(60)).build().unwrap();
    let client = short_timeout(&server).build().unwrap();
    let held = holder.mutex("k").lock().unwrap();
    assert!(eventually(SOON, || matches!(
        client.mutex("k").try_lock(),
        Ok(None)
    )));
    let bounded = Task::start({
        let mutex = client.mutex("k");
        move || mutex.try_lock_for(secs(3)).map(|guard| guard.is_some())
    });
    let endless = Task::start({
        let mutex = short_timeout(&server).build().unwrap().mutex("k");
        move || mutex.lock().map(drop)
    });
    std::thread::sleep(millis(300));
    server.stop();
    let error = bounded.within(secs(15), "the deadline");
    let error = error.expect_err("the state of the lock is unknown");
    assert!(error.is_unavailable(), "{error}");
    let error = endless
        .within(secs(15), "the end of outage_timeout")
        .unwrap_err();
    assert!(error.is_unavailable(), "{error}");
    server.resume();
    held.unlock().unwrap();
}

#[test]
fn an_outage_is_reported_to_all_waiters() {
    let server = server();
    let holder = builder(&server.url()).ttl(secs(60)).build().unwrap();
    let client = short_timeout(&server).pipelines(1).build().unwrap();
    let held: Vec<_> = (0..6)
        .map(|n| holder.mutex(format!("k{n}")).lock().unwrap())
        .collect();
    let tasks: Vec<_> = (0..6)
        .map(|n| {
            let mutex = client.mutex(format!("k{n}"));
            // These deadlines are no multiples of the time-outs, so they fall into attempts.
            let wait = millis(5_000 + 170 * n);
            Task::start(move || mutex.try_lock_for(wait).map(|guard| guard.is_some()))
        })
        .collect();
    std::thread::sleep(millis(300));
    server.stop();
    for task in tasks {
        let outcome = task.within(secs(15), "the deadline");
        let error = outcome.expect_err("the state of the lock is unknown");
        assert!(error.is_unavailable(), "{error}");
    }
    server.resume();
    drop(held);
}

#[test]
fn contention_after_an_outage_is_contention_again() {
    let server = server();
    let holder = builder(&server.url()).ttl(secs(60)).build().unwrap();
    let client = short_timeout(&server).command_timeout(secs(2));
    let client = client.build().unwrap();
    let _held = holder.mutex("k").lock().unwrap();
    server.stop();
    assert!(client.mutex("k").try_lock().is_err());
    let mutex = client.mutex("k");
    let waiter = Task::start(move || mutex.try_lock_for(secs(6)).map(|guard| guard.is_some()));
    std::thread::sleep(millis(700));
    server.resume();
    let outcome = waiter.within(secs(15), "the deadline");
    assert!(
        !outcome.expect("Redis answered in the end"),
        "another client has it"
    );
    assert!(client.mutex("k").try_lock().unwrap().is_none());
}

#[test]
fn a_silent_server_overruns_no_deadline() {
    let server = server();
    let client = short_timeout(&server).build().unwrap();
    client.with_lock("k", || ()).unwrap();
    server.stop();
    let tasks: Vec<_> = [0, 100, 400, 1500]
        .map(|wait| {
            let mutex = client.mutex(format!("k{wait}"));
            Task::start(move || {
                let start = Instant::now();
                let error = mutex.try_lock_for(millis(wait)).unwrap_err();
                (millis(wait), start.elapsed(), error)
            })
        })
        .into();
    for task in tasks {
        let (wait, waited, error) = task.within(secs(15), "the deadline");
        assert!(error.is_unavailable(), "{error}");
        // Without time to wait, there is one attempt, which takes one command time-out.
        assert!(
            waited < wait + millis(500 + 500) + SLACK,
            "{waited:?} instead of {wait:?}"
        );
    }
    server.resume();
    assert!(client.mutex("k").try_lock_for(SOON).unwrap().is_some());
}

/// A client that would wait for its time-outs for longer than this test may take.
fn patient(url: &str) -> Client {
    let builder = builder(url).connect_timeout(secs(60));
    let builder = builder.command_timeout(secs(60));
    builder.outage_timeout(Duration::ZERO).build_lazy().unwrap()
}

#[test]
fn calls_to_a_closed_port_fail_at_once() {
    let mut server = Server::builder().unix_socket().start().unwrap();
    let urls = [server.url(), server.unix_url().unwrap()];
    server.kill();
    std::fs::remove_file(urls[1].trim_start_matches("unix://")).unwrap();
    for url in urls {
        let task = Task::start(move || {
            let mutex = patient(&url).mutex("k");
            let value = patient(&url).fenced_value("v");
            [
                mutex.try_lock().map(drop),
                patient(&url).mutex("k").lock().map(drop),
                mutex.inspect().map(drop),
                mutex.force_unlock().map(drop),
                value.read().map(drop),
                patient(&url).ping().map(drop),
            ]
        });
        for outcome in task.within(secs(30), "the errors, before any time-out") {
            let error = outcome.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        }
    }
}

#[test]
fn a_refused_login_fails_at_once() {
    let server = Server::builder().password("secret").start().unwrap();
    let url = format!("redis://:wrong@127.0.0.1:{}", server.port());
    let task = Task::start(move || patient(&url).mutex("k").lock().unwrap_err());
    let error = task.within(secs(30), "the error, before any time-out");
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
}

#[test]
fn lock_waits_for_a_server_that_starts_later() {
    let mut server = server();
    server.kill();
    let recorder = Recorder::new();
    let client = builder(&server.url())
        .outage_timeout(secs(60))
        .event_handler(Arc::clone(&recorder))
        .build_lazy()
        .unwrap();
    let mutex = client.mutex("k");
    let waiter = Task::start(move || mutex.lock().map(drop));
    recorder.wait_for_more(2, What::Unavailable, "k");
    server.restart().unwrap();
    waiter.within(SOON, "the lock").unwrap();
}

/// A client whose time-outs end no request, and its events.
fn recorded(server: &Server) -> (Client, Arc<Recorder>) {
    let recorder = Recorder::new();
    let builder = builder(&server.url()).command_timeout(secs(60));
    let builder = builder.event_handler(Arc::clone(&recorder));
    (builder.build().unwrap(), recorder)
}

#[test]
fn a_deadline_ends_the_first_request() {
    let server = server();
    let (client, recorder) = recorded(&server);
    client.with_lock("k", || ()).unwrap();
    server.stop();
    let mutex = client.mutex("k");
    let task = Task::start(move || {
        let outcomes = [1, 50, 300].map(|wait| mutex.try_lock_for(millis(wait)).map(drop));
        outcomes.map(Result::unwrap_err)
    });
    for error in task.within(secs(30), "the errors, before any time-out") {
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    }
    // The replies may have come a moment later.
    assert_eq!(recorder.count(What::Unavailable, "k"), 0);
    server.resume();
    assert!(client.mutex("k").try_lock_for(SOON).unwrap().is_some());
}

#[test]
fn a_deadline_in_a_silence_after_contention_is_contention() {
    let server = server();
    let holder = builder(&server.url()).ttl(secs(60)).build().unwrap();
    let _held = holder.mutex("k").lock().unwrap();
    let (client, recorder) = recorded(&server);
    let mutex = client.mutex("k");
    // The waiter asks again within about a second. Its deadline ends that attempt.
    let waiter = Task::start(move || mutex.try_lock_for(secs(3)).map(|guard| guard.is_some()));
    recorder.wait_for_more(1, What::Contended, "k");
    server.stop();
    let outcome = waiter.within(secs(30), "the deadline");
    server.resume();
    assert!(!outcome.unwrap(), "another client has the lock");
}

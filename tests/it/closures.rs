//! `with_lock` and its forms with a limit or without waiting: on a server and in memory.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use leasehold::{Client, ErrorKind, MemoryStore};
use leasehold_testbed::eventually;

use crate::steady::steady;
use crate::support::{LONG_TTL, SOON, Task, in_time, millis, secs, server};

/// Runs `test` with two clients of a server, and with two clients of a memory store.
fn with_clients(test: impl Fn(&Client, &Client)) {
    let server = server();
    let [one, two] = [(); 2].map(|()| steady(&server.url()).ttl(LONG_TTL).build().unwrap());
    test(&one, &two);
    let memory = MemoryStore::new();
    test(&memory.client().unwrap(), &memory.client().unwrap());
}

#[test]
fn work_runs_under_a_free_lock_and_releases_it() {
    with_clients(|one, two| {
        let (mutex, other) = (one.mutex("k"), two.mutex("k"));
        let is_held = || other.try_lock().unwrap().is_none();
        let free = || other.lock().unwrap().unlock().unwrap();
        assert_eq!(mutex.try_with(|_| is_held()).unwrap(), Some(true));
        free();
        let timed = mutex.try_with_for(SOON, |_| is_held()).unwrap();
        assert_eq!(timed, Some(true));
        free();
        let until = mutex.try_with_until(Instant::now() + SOON, |_| is_held());
        assert_eq!(until.unwrap(), Some(true));
        free();
        let name = String::from("k");
        let named = one.try_with_lock(&name, is_held).unwrap();
        assert_eq!(named, Some(true));
        free();
        let named = one.try_with_lock_for(name, SOON, is_held).unwrap();
        assert_eq!(named, Some(true));
        assert!(!is_held());
    });
}

#[test]
fn work_does_not_run_while_others_hold_the_lock() {
    with_clients(|one, two| {
        let (mutex, again) = (one.mutex("k"), one.reentrant_mutex("k"));
        let _held = two.mutex("k").lock().unwrap();
        let ran = Cell::new(0);
        let work = || ran.set(ran.get() + 1);
        let short = millis(50);
        let deadline = || Instant::now() + short;
        for outcome in [
            mutex.try_with(|_| work()),
            again.try_with(|_| work()),
            one.try_with_lock("k", work),
        ] {
            assert_eq!(outcome.unwrap(), None);
        }
        let waits = [
            mutex.try_with_for(short, |_| work()),
            mutex.try_with_until(deadline(), |_| work()),
            again.try_with_for(short, |_| work()),
            again.try_with_until(deadline(), |_| work()),
            one.try_with_lock_for("k", short, work),
        ];
        let replies: Vec<_> = waits.into_iter().filter_map(in_time).collect();
        assert!(!replies.is_empty());
        assert!(replies.iter().all(Option::is_none), "{replies:?}");
        assert_eq!(ran.get(), 0);
    });
}

#[test]
fn a_limited_wait_gets_a_freed_lock() {
    with_clients(|one, two| {
        let held = two.mutex("k").lock().unwrap();
        let mutex = one.mutex("k");
        let waiter = Task::start(move || mutex.try_with_for(SOON, |guard| guard.fencing_token()));
        let queued = || two.mutex("k").inspect().unwrap().unwrap().clients_waiting() == 1;
        assert!(eventually(SOON, queued));
        let before = held.fencing_token();
        held.unlock().unwrap();
        let token = waiter.within(SOON, "the grant").unwrap();
        assert!(token > Some(before), "{token:?}");
    });
}

#[test]
fn work_that_outlives_its_lock_is_an_error() {
    let memory = MemoryStore::new();
    let client = memory.client().unwrap();
    let pass = || memory.advance(secs(60));
    let lost = [
        client.mutex("k").try_with(|_| pass()),
        client.mutex("k").try_with_for(SOON, |_| pass()),
        client.reentrant_mutex("k").try_with(|_| pass()),
        client.reentrant_mutex("k").try_with_for(SOON, |_| pass()),
        client.try_with_lock("k", pass),
        client.try_with_lock_for("k", SOON, pass),
    ];
    for outcome in lost {
        assert_eq!(outcome.unwrap_err().kind(), ErrorKind::LeaseLost);
    }
}

#[test]
fn a_panic_of_the_work_releases_the_lock() {
    with_clients(|one, two| {
        let mutex = one.mutex("k");
        let panics = AssertUnwindSafe(|| mutex.try_with(|_| panic!("as it should")));
        assert!(catch_unwind(panics).is_err());
        assert!(eventually(SOON, || !two.mutex("k").is_locked().unwrap()));
    });
}

#[test]
fn a_reentrant_lock_is_taken_again_with_a_limit() {
    with_clients(|one, two| {
        let mutex = one.reentrant_mutex("k");
        let depth = mutex.with(|_| {
            mutex.try_with(|_| {
                mutex.try_with_for(millis(1), |_| {
                    mutex.try_with_until(Instant::now(), |guard| guard.depth())
                })
            })
        });
        let depth = depth.unwrap().unwrap().unwrap().unwrap().unwrap();
        assert_eq!(depth.unwrap(), Some(4));
        assert!(two.mutex("k").try_lock().unwrap().is_some());
    });
}

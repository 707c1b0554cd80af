//! Many locks and many waiters: none needs a thread, none is forgotten.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use leasehold::{EventHandler, EventLock, MutexGuard};
use leasehold_testbed::{Reply, Server, eventually};

use crate::child::{self, Child, Parent};
use crate::steady::steady;
use crate::support::{Task, ask, info_number, secs, server};

const MANY: usize = 10_000;
/// Long enough for a busy machine to renew all locks in time, even if it stands still for some seconds.
const TTL: Duration = Duration::from_secs(30);
/// The part of the ttl after which a lock is renewed: three seconds.
const RENEW_RATIO: f64 = 0.1;

/// The number of keys, without the fence counter.
fn keys(server: &Server) -> i64 {
    let Reply::Int(keys) = ask(server, &["DBSIZE"]) else {
        panic!("DBSIZE answers with a number");
    };
    keys - 1
}

#[derive(Default)]
struct Renewed(Mutex<HashSet<u64>>);

impl EventHandler for Renewed {
    fn renewed(&self, lock: EventLock<'_>) {
        self.0.lock().unwrap().insert(lock.fencing_token);
    }
}

/// The most threads that connect at a time.
const CONNECTING: usize = 3;
/// A second renewal worker starts once renewals have come due while the first one was busy.
const SECOND_WORKER: usize = 1;

fn hold_many(client: &leasehold::Client) -> Vec<MutexGuard> {
    let threads: Vec<_> = (0..8)
        .map(|part| {
            let client = client.clone();
            Task::start(move || {
                let mine = (part..MANY).step_by(8);
                let take = |n| client.mutex(format!("k{n}")).try_lock().unwrap();
                let taken = mine.map(|n| take(n).expect("its first holder"));
                taken.collect::<Vec<_>>()
            })
        })
        .collect();
    threads
        .into_iter()
        .flat_map(|thread| thread.within(secs(60), "taking a part of the locks"))
        .collect()
}

#[test]
fn ten_thousand_held_locks_are_renewed_without_threads() {
    let server = server();
    let child = Child::start(hold_ten_thousand, &server.url());
    assert_eq!(child.receive::<String>(secs(100)), "held");
    assert_eq!(keys(&server), MANY as i64);
    assert_eq!(child.receive::<String>(secs(100)), "released");
    assert_eq!(keys(&server), 0, "every release was confirmed");
    child.finish(secs(30));
}

pub fn hold_ten_thousand(parent: &Parent) {
    let renewed = Arc::new(Renewed::default());
    let client = steady(&parent.url)
        .ttl(TTL)
        .renew_ratio(RENEW_RATIO)
        .event_handler(Arc::clone(&renewed));
    let client = client.build().unwrap();
    let one = client.mutex("k0").lock().unwrap();
    let with_one = child::threads();
    one.unlock().unwrap();

    let guards = hold_many(&client);
    parent.tell("held");
    // The threads that took the locks may not have ended yet.
    let has_at_most = |more: usize| child::threads() <= with_one.map(|one| one + more);
    assert!(
        eventually(secs(5), || has_at_most(SECOND_WORKER)),
        "{:?}",
        child::threads()
    );
    let start = Instant::now();
    let all_renewed = eventually(TTL, || {
        assert!(
            has_at_most(CONNECTING + SECOND_WORKER),
            "{:?} threads, {with_one:?} with one lock",
            child::threads()
        );
        renewed.0.lock().unwrap().len() == MANY
    });
    let count = renewed.0.lock().unwrap().len();
    assert!(all_renewed, "{count} renewed after {:?}", start.elapsed());
    assert!(
        eventually(secs(5), || has_at_most(SECOND_WORKER)),
        "{:?}",
        child::threads()
    );
    for guard in &guards {
        guard.check().unwrap();
    }
    for (n, guard) in guards.into_iter().enumerate() {
        // The test asks Redis about some locks, and releases the others without waiting.
        if n % 20 == 0 {
            guard.unlock().unwrap();
        }
    }
    client.shutdown(secs(20)).unwrap();
    parent.tell("released");
}

#[test]
fn ten_thousand_dropped_guards_are_released() {
    let server = server();
    let client = steady(&server.url()).ttl(secs(120)).build().unwrap();
    let guards = hold_many(&client);
    assert_eq!(keys(&server), MANY as i64);
    drop(guards);
    let free = eventually(secs(30), || keys(&server) == 0);
    assert!(free, "{} keys are left", keys(&server));
}

#[test]
fn waiters_need_no_extra_threads() {
    if child::threads().is_none() {
        return;
    }
    let server = server();
    let child = Child::start(wait_by_the_hundred, &server.url());
    child.finish(secs(120));
}

pub fn wait_by_the_hundred(parent: &Parent) {
    const WAITERS: usize = 200;
    let client = steady(&parent.url).build().unwrap();
    // Half of the waiters wait for one key, half for keys of their own.
    let key = |n: usize| format!("k{}", if n < WAITERS / 2 { 0 } else { n });
    let holder = steady(&parent.url).build().unwrap();
    let mut names: Vec<String> = (0..WAITERS).map(key).collect();
    names.dedup();
    let held: Vec<_> = names
        .iter()
        .map(|name| holder.mutex(name).lock().unwrap())
        .collect();
    assert!(client.mutex("k0").try_lock().unwrap().is_none());
    // On a busy machine, both clients start their second worker meanwhile.
    let before = child::threads().unwrap() + 2 * SECOND_WORKER;
    let waiters: Vec<_> = (0..WAITERS)
        .map(|n| {
            let mutex = client.mutex(key(n));
            Task::start(move || mutex.lock().map(drop))
        })
        .collect();
    let watched = Instant::now();
    while watched.elapsed() < secs(2) {
        let threads = child::threads().unwrap();
        assert!(
            threads <= before + WAITERS + CONNECTING,
            "{threads} threads, {before} before"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(held);
    for waiter in waiters {
        waiter.within(secs(60), "a waiter's grant").unwrap();
    }
    assert!(eventually(secs(10), || child::threads().unwrap() <= before));
}

/// The number of keys of which Redis will report the next change.
fn tracked(server: &Server) -> u64 {
    info_number(server, "stats", "tracking_total_keys")
}

#[test]
fn tracked_leases_are_bounded() {
    const WATCHED: u64 = 10_000;
    let server = server();
    let client = steady(&server.url()).ttl(TTL).renew_ratio(RENEW_RATIO);
    let client = client.build().unwrap();
    let _guards = hold_many(&client);
    let _late: Vec<_> = (0..500)
        .map(|n| client.mutex(format!("late{n}")).lock().unwrap())
        .collect();
    // The client reads the fence counter once.
    let all = || tracked(&server) >= WATCHED;
    assert!(
        eventually(secs(60), all),
        "{} are tracked",
        tracked(&server)
    );
    assert!(tracked(&server) <= WATCHED + 1);
}

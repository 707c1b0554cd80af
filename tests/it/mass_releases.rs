//! Thousands of guards dropped at once: awaited requests go first, and a shutdown waits for all releases.

use std::thread;

use leasehold::{Client, MutexGuard};
use leasehold_testbed::{Proxy, Server};

use crate::steady::steady;
use crate::support::{
    LONG_TTL, TIMEOUT, Task, ask, builder, held_keys, is_held, millis, secs, server,
};

const MANY: usize = 4000;
/// With this delay, in ms, [`MANY`] releases take about ten seconds, one batch at a time.
const SLOW: u64 = 300;

fn hold_many(client: &Client) -> Vec<MutexGuard> {
    let lock = |n: &usize| client.mutex(format!("k{n}")).lock().unwrap();
    let numbers: Vec<usize> = (0..MANY).collect();
    // The requests of several threads share round trips.
    thread::scope(|scope| {
        let lock_all = |part: &[usize]| part.iter().map(lock).collect::<Vec<_>>();
        let parts = numbers.chunks(MANY / 16);
        let tasks: Vec<_> = parts
            .map(|part| scope.spawn(move || lock_all(part)))
            .collect();
        let held = tasks.into_iter().map(|task| task.join().unwrap());
        held.flatten().collect()
    })
}

fn keys(server: &Server) -> usize {
    let size = ask(server, &["DBSIZE"]).as_int().unwrap();
    usize::try_from(size).unwrap()
}

#[test]
fn a_lock_waits_behind_one_batch_of_releases() {
    let server = server();
    let proxy = Proxy::start(server.port()).unwrap();
    let client = steady(&proxy.url())
        .ttl(LONG_TTL)
        .pipelines(1)
        .build()
        .unwrap();
    let guards = hold_many(&client);
    proxy.delay(millis(SLOW));
    drop(guards);
    let guard = client.mutex("unrelated").lock().unwrap();
    let left = keys(&server);
    proxy.delay(millis(0));
    // Redis has carried out only the releases written before the request, those in its batch, and some later batches.
    assert!(left > MANY - 8 * 128, "only {left} were still held");
    guard.unlock().unwrap();
}

#[test]
fn acquires_carry_pending_releases_of_their_key() {
    let server = server();
    let proxy = Proxy::start(server.port()).unwrap();
    let client = steady(&proxy.url())
        .ttl(LONG_TTL)
        .pipelines(1)
        .build()
        .unwrap();
    let guards = hold_many(&client);
    proxy.delay(millis(SLOW));
    drop(guards);
    let last = client.mutex(format!("k{}", MANY - 1));
    let guard = last.try_lock().unwrap().expect("its release went first");
    let left = keys(&server);
    proxy.delay(millis(0));
    assert!(left > MANY - 8 * 128, "only {left} were still held");
    client.shutdown(secs(20)).unwrap();
    assert!(
        is_held(&server, guard.key()),
        "the release was written twice"
    );
    assert_eq!(held_keys(&server).len(), 1);
}

#[test]
fn shutdown_waits_for_releases_until_redis_returns() {
    let server = server();
    let client = builder(&server.url()).ttl(LONG_TTL).build().unwrap();
    let guards = hold_many(&client);
    server.stop();
    drop(guards);
    let shutdown = {
        let client = client.clone();
        Task::start(move || client.shutdown(secs(30)))
    };
    // This is long enough for each time-out of the client to pass.
    std::thread::sleep(6 * TIMEOUT);
    assert!(!shutdown.is_done(), "shutdown returned before its time-out");
    server.resume();
    shutdown.within(secs(30), "the shutdown").unwrap();
    assert_eq!(held_keys(&server), [""; 0]);
}

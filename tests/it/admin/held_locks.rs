//! `Client::held_locks`: the locks that a client holds, without a request to Redis.

use std::time::Duration;

use leasehold::Client;

use super::{client, lock};
use crate::support::{
    LONG_TTL, SOON, Task, ask, in_redis, lost_within, millis, script_calls, secs, server,
};

fn keys(client: &Client) -> Vec<String> {
    let held = client.held_locks();
    held.iter().map(|held| held.key().to_owned()).collect()
}

#[test]
fn held_locks_are_listed_oldest_first() {
    let server = server();
    let [client, other] = [(); 2].map(|()| client(&server));
    assert!(client.held_locks().is_empty());
    let names = ["b", "c", "a", "d"];
    let mut guards: Vec<_> = names.iter().map(|key| lock(&client, key)).collect();
    let theirs = lock(&other, "theirs");
    let calls = script_calls(&server);
    assert_eq!(keys(&client), names);
    for (held, guard) in client.held_locks().iter().zip(&guards) {
        assert_eq!(held.fencing_token(), guard.fencing_token());
        assert!(held.remaining() <= LONG_TTL && held.remaining() > LONG_TTL / 2);
    }
    let ages: Vec<Duration> = client.held_locks().iter().map(|one| one.age()).collect();
    assert!(ages.is_sorted_by(|older, younger| older >= younger));
    assert_eq!(script_calls(&server), calls, "Redis was not asked");
    drop(guards.remove(1));
    assert_eq!(keys(&client), ["b", "a", "d"]);
    guards.remove(0).unlock().unwrap();
    assert_eq!(keys(&client), ["a", "d"]);
    let ticket = guards.remove(0).into_ticket().unwrap();
    assert_eq!(keys(&client), ["d"]);
    let adopted = other.adopt(&ticket).unwrap();
    assert_eq!(keys(&other), ["theirs", "a"]);
    drop((adopted, theirs));
    assert!(keys(&other).is_empty());
    std::mem::forget(guards.pop());
    assert_eq!(keys(&client), ["d"], "a forgotten guard is listed");
    client.shutdown(secs(5)).unwrap();
    assert!(keys(&client).is_empty());
}

#[test]
fn lost_locks_are_not_listed() {
    let server = server();
    let client = client(&server);
    let deleted = lock(&client, "deleted");
    let short = client.mutex("short").fixed_ttl(millis(60)).lock().unwrap();
    let bounded = client.mutex("bounded").max_hold(millis(60)).lock().unwrap();
    let kept = lock(&client, "kept");
    ask(&server, &["DEL", &in_redis("deleted")]);
    for guard in [&deleted, &short, &bounded] {
        lost_within(SOON, &guard.lost_signal());
    }
    assert_eq!(keys(&client), ["kept"]);
    drop((deleted, short, bounded));
    assert_eq!(keys(&client), ["kept"]);
    drop(kept);
}

#[test]
fn hand_offs_keep_the_age_of_locks() {
    let server = server();
    let client = client(&server);
    let first = lock(&client, "k");
    let second = lock(&client, "younger");
    let mutex = client.mutex("k");
    let next = Task::start_blocked(move || mutex.lock().unwrap());
    let age = client.held_locks()[0].age();
    drop(first);
    let guard = next.within(SOON, "a hand-off");
    let held = client.held_locks();
    assert_eq!(keys(&client), ["k", "younger"]);
    assert_eq!(held[0].fencing_token(), guard.fencing_token());
    assert!(held[0].age() >= age);
    drop((guard, second));
    assert!(client.held_locks().is_empty());
}

#[test]
fn thousands_of_locks_are_listed_during_changes() {
    let server = server();
    let client = client(&server);
    let guards: Vec<_> = (0..3_000).map(|n| lock_n(&client, n)).collect();
    let comes_and_goes = client.clone();
    let task = Task::start(move || {
        for n in 0..500 {
            drop(lock_n(&comes_and_goes, 10_000 + n % 7));
        }
    });
    while !task.is_done() {
        let held = client.held_locks();
        assert!(held.len() >= 3_000 && held.len() <= 3_001, "{}", held.len());
    }
    task.within(SOON, "coming and going");
    let tokens: Vec<u64> = guards.iter().map(|guard| guard.fencing_token()).collect();
    let held = client.held_locks();
    let listed: Vec<u64> = held.iter().map(|held| held.fencing_token()).collect();
    assert_eq!(listed, tokens, "oldest first");
}

fn lock_n(client: &Client, n: usize) -> leasehold::MutexGuard {
    client.mutex(format!("k{n}")).lock().unwrap()
}

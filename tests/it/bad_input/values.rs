//! Values that a lock's key already has: foreign values, and values of this library without a ttl or with a huge one.

use leasehold::ErrorKind;
use leasehold_testbed::Reply;

use crate::steady::steady;
use crate::support::{Task, ask, expires_in, in_redis, secs, server, value_of};

use super::{BOUND, all_texts};

#[test]
fn a_foreign_value_is_reported_and_left_unchanged() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    for (name, write) in [
        ("text", &["SET", "leasehold:text", "other-data"][..]),
        ("empty", &["SET", "leasehold:empty", ""]),
        ("number", &["SET", "leasehold:number", "1"]),
        ("near", &["SET", "leasehold:near", "lh2 0 0 x"]),
        ("short", &["SET", "leasehold:short", "lh1"]),
        ("cut", &["SET", "leasehold:cut", "lh1 0123"]),
        (
            "mine",
            &[
                "SET",
                "leasehold:mine",
                "lh1 0123456789abcdef 1795263780943818 host/1/0",
            ],
        ),
        ("list", &["RPUSH", "leasehold:list", "a", "b"]),
        ("hash", &["HSET", "leasehold:hash", "field", "value"]),
        ("set", &["SADD", "leasehold:set", "a"]),
        ("zset", &["ZADD", "leasehold:zset", "1", "a"]),
        ("stream", &["XADD", "leasehold:stream", "1-1", "a", "b"]),
    ] {
        ask(&server, write);
        let before = ask(&server, &["DUMP", &in_redis(name)]);
        let mutex = client.mutex(name);
        let (waiting, bounded) = (mutex.clone(), mutex.clone());
        let errors = [
            Task::start(move || waiting.lock().map(drop))
                .within(BOUND, "lock")
                .unwrap_err(),
            mutex.try_lock().unwrap_err(),
            // The error comes at once, although the limit is an hour.
            Task::start(move || bounded.try_lock_for(secs(3600)).map(drop))
                .within(BOUND, "try_lock_for")
                .unwrap_err(),
        ];
        for error in errors {
            assert_eq!(error.kind(), ErrorKind::Protocol, "{name}: {error}");
            assert_eq!(error.key(), Some(name));
            let text = all_texts(&error);
            let kind = match name {
                "list" | "hash" | "set" | "zset" | "stream" => name,
                _ => "string",
            };
            assert!(
                error.to_string().contains(&format!(
                    ", but a {kind}; if it is a mutex of another library"
                )),
                "{text}"
            );
            assert!(!text.contains("other-data"), "{text}");
        }
        assert_eq!(ask(&server, &["DUMP", &in_redis(name)]), before, "{name}");
        assert_eq!(expires_in(&server, name), None, "{name} has a ttl");
    }
    client.with_lock("another", || ()).unwrap();
}

#[test]
fn a_foreign_value_keeps_its_ttl() {
    let server = server();
    let client = steady(&server.url()).ttl(secs(3)).build().unwrap();
    ask(&server, &["SET", &in_redis("k"), "theirs", "EX", "1000"]);
    let error = client.mutex("k").try_lock().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Protocol);
    assert!(expires_in(&server, "k").unwrap() > secs(900));
}

#[test]
fn a_long_foreign_value_makes_a_short_error() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    ask(&server, &["SET", &in_redis("k"), &"x".repeat(1 << 20)]);
    let error = client.mutex("k").lock().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Protocol);
    assert!(format!("{error} {error:?}").len() < 2000);
}

#[test]
fn a_foreign_value_fails_only_its_own_request() {
    let server = server();
    // Many threads share one pipeline, so their requests share batches.
    let client = steady(&server.url()).pipelines(1).build().unwrap();
    ask(&server, &["RPUSH", &in_redis("list"), "theirs"]);
    let tasks: Vec<_> = (0..8)
        .map(|n| {
            let client = client.clone();
            Task::start(move || {
                let own = client.mutex(format!("own-{n}"));
                for _ in 0..50 {
                    let error = client.mutex("list").lock().unwrap_err();
                    assert_eq!(error.kind(), ErrorKind::Protocol);
                    own.lock().unwrap().unlock().unwrap();
                }
            })
        })
        .collect();
    for task in tasks {
        task.within(secs(60), "locks beside a foreign value");
    }
    assert_eq!(ask(&server, &["LLEN", &in_redis("list")]), Reply::Int(1));
}

#[test]
fn an_attempt_gives_an_immortal_lock_a_ttl() {
    let server = server();
    let client = steady(&server.url()).ttl(secs(3)).build().unwrap();
    let value = "lh1 0123456789abcdef0123456789abcdef 1795263780943818 host/1/0";
    ask(&server, &["SET", &in_redis("k"), value]);
    let mutex = client.mutex("k");
    assert!(mutex.try_lock().unwrap().is_none(), "the lock was acquired");
    let ttl = expires_in(&server, "k").expect("the key has a ttl");
    assert!(ttl <= secs(3), "{ttl:?}");
    assert_eq!(value_of(&server, "k").as_deref(), Some(value));
    let guard = Task::start(move || mutex.lock())
        .within(BOUND, "lock")
        .unwrap();
    guard.unlock().unwrap();
}

#[test]
fn a_failed_attempt_keeps_an_existing_ttl() {
    let server = server();
    let client = steady(&server.url()).ttl(secs(20)).build().unwrap();
    let value = "lh1 0123456789abcdef0123456789abcdef 1795263780943818 host/1/0";
    ask(&server, &["SET", &in_redis("long"), value, "EX", "1000"]);
    ask(&server, &["SET", &in_redis("short"), value, "PX", "10000"]);
    assert!(client.mutex("long").try_lock().unwrap().is_none());
    assert!(client.mutex("short").try_lock().unwrap().is_none());
    assert!(expires_in(&server, "long").unwrap() > secs(900));
    assert!(expires_in(&server, "short").is_none_or(|ttl| ttl <= secs(10)));
}

/// Redis accepts ttls of up to 2^63 ms. Numbers in scripts are doubles, which hold integers of up to 2^53 exactly.
#[test]
fn a_huge_ttl_is_shown_and_waited_for() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    let value = "lh1 0123456789abcdef0123456789abcdef 1795263780943818 host/1/0";
    for ttl in ["100000000000000", "9000000000000000000"] {
        ask(&server, &["SET", &in_redis("k"), value, "PX", ttl]);
        let mutex = client.mutex("k");
        let found = mutex.inspect().unwrap().expect("the lock is held");
        assert!(found.expires_in() > Some(secs(90_000_000_000)), "{ttl}");
        assert!(mutex.try_lock_for(secs(1)).unwrap().is_none(), "{ttl}");
        let waiter = Task::start(move || mutex.lock().map(drop));
        ask(&server, &["DEL", &in_redis("k")]);
        waiter.within(BOUND, "lock").unwrap();
    }
}

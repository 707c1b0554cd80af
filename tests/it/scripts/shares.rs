//! Keys that leases share: the bounds of one request, and keys of other users.

use leasehold_testbed::{Reply, Server};
use redis::{Connection, Value};

use super::{ACQUIRE, FENCE, INSPECT, RELEASE, RENEW, TTL, connect, eval, holder, lease, value};
use crate::support::{ask, server};

/// The member of a reader.
fn reader(n: usize) -> String {
    format!("lh1 {} r 1 1 0 {}", lease(n), holder(n))
}

/// Adds readers to the key `k` that end so many ms from now; negative numbers are in the past.
fn add_readers(redis: &mut Connection, numbers: std::ops::Range<usize>, ends_in: i64) {
    let (secs, micros): (i64, i64) = redis::cmd("TIME").query(redis).unwrap();
    let end = secs * 1000 + micros / 1000 + ends_in;
    let members: Vec<(i64, String)> = numbers.map(|n| (end, reader(n))).collect();
    let mut batch = redis::pipe();
    for part in members.chunks(1000) {
        batch.zadd_multiple("k", part).ignore();
    }
    let newest: Vec<(String, i64)> = {
        let () = batch.query(redis).unwrap();
        redis::cmd("ZRANGE")
            .arg(&["k", "-1", "-1", "WITHSCORES"])
            .query(redis)
            .unwrap()
    };
    let expires_at = newest[0].1 + 1000;
    let () = redis::cmd("PEXPIREAT")
        .arg("k")
        .arg(expires_at)
        .query(redis)
        .unwrap();
}

/// An acquire of the key `k` by a reader.
fn read(redis: &mut Connection, n: usize, queue_mode: &str) -> Value {
    let args = [&*holder(n), &lease(n), TTL, &format!("{queue_mode}r")];
    eval(&ACQUIRE, &[FENCE, "k"], &args).query(redis).unwrap()
}

fn members(server: &Server) -> i64 {
    ask(server, &["ZCARD", "k"]).as_int().unwrap()
}

#[test]
fn readers_beyond_ten_thousand_wait() {
    let server = server();
    let mut redis = connect(&server);
    add_readers(&mut redis, 100..10_099, 60_000);
    assert!(matches!(read(&mut redis, 1, ""), Value::BulkString(_)));
    let Value::Array(refused) = read(&mut redis, 2, "") else {
        panic!("granted");
    };
    assert!(matches!(
        refused[..],
        [Value::Int(1..=60_001), Value::Int(0)]
    ));
    assert_eq!(members(&server), 10_000);
}

#[test]
fn one_request_grants_readers_up_to_a_bound() {
    let server = server();
    let mut redis = connect(&server);
    ask(&server, &["SET", "k", &value(&lease(0)), "PX", TTL]);
    for n in 1..=130 {
        let Value::Array(queued) = read(&mut redis, n, "0") else {
            panic!("granted");
        };
        assert_eq!(queued[1], Value::Int(n as i64 - 1));
    }
    let released: i64 = eval(&RELEASE, &[FENCE, "k"], &[&lease(0)])
        .query(&mut redis)
        .unwrap();
    assert_eq!((released, members(&server)), (1, 128));
    let queued = ask(&server, &["ZCARD", &super::queue_name("k")]);
    assert_eq!(queued, Reply::Int(2));
    // The next request of a waiter grants the others.
    assert!(matches!(read(&mut redis, 129, "-"), Value::BulkString(_)));
    assert_eq!(members(&server), 130);
}

#[test]
fn ended_shares_are_removed_in_parts() {
    let server = server();
    let mut redis = connect(&server);
    add_readers(&mut redis, 1..2, 60_000);
    add_readers(&mut redis, 100..10_400, -5_000);
    assert!(matches!(read(&mut redis, 2, ""), Value::BulkString(_)));
    // 80 parts of 128, and the two readers that have not ended.
    assert_eq!(members(&server), 10_300 - 80 * 128 + 2);
    assert!(matches!(read(&mut redis, 3, ""), Value::BulkString(_)));
    assert_eq!(members(&server), 3);
}

#[test]
fn a_sorted_set_of_another_user_stays_as_it_is() {
    let server = server();
    let mut redis = connect(&server);
    for foreign in [
        "theirs",
        "lh2 1 r 1 1 0 host/1/a",
        "lh1 11111111111111111111111111111111 q 1 1 0 host/1/a",
        "lh1 11111111111111111111111111111111 p 1 3 2 host/1/a",
    ] {
        for is_newest in [true, false] {
            ask(&server, &["DEL", "k"]);
            add_readers(&mut redis, 1..3, if is_newest { -5_000 } else { 60_000 });
            let score = if is_newest { "9000000000000" } else { "5" };
            ask(&server, &["ZADD", "k", score, foreign]);
            let before = ask(&server, &["ZRANGE", "k", "0", "-1", "WITHSCORES"]);
            for (script, keys, args) in [
                (
                    &ACQUIRE,
                    &[FENCE, "k"][..],
                    vec![holder(1), lease(9), TTL.to_owned(), "r".to_owned()],
                ),
                (
                    &ACQUIRE,
                    &[FENCE, "k"],
                    vec![holder(1), lease(9), TTL.to_owned(), "+".to_owned()],
                ),
                (
                    &RELEASE,
                    &[FENCE, "k"],
                    vec![format!("keep 0 0 {}", reader(1))],
                ),
                (&RENEW, &["k"], vec![reader(1), TTL.to_owned()]),
            ] {
                let args: Vec<&str> = args.iter().map(String::as_str).collect();
                let error = eval(script, keys, &args).query::<Value>(&mut redis);
                let error = error.unwrap_err().to_string();
                assert!(error.contains("FOREIGN"), "{foreign:?}: {error}");
            }
            let after = ask(&server, &["ZRANGE", "k", "0", "-1", "WITHSCORES"]);
            assert_eq!(after, before, "{foreign:?}");
        }
    }
}

#[test]
fn an_inspection_lists_a_hundred_shares() {
    let server = server();
    let mut redis = connect(&server);
    add_readers(&mut redis, 1..151, 60_000);
    add_readers(&mut redis, 200..210, -5_000);
    let found: Vec<Value> = eval(&INSPECT, &["k"], &[]).query(&mut redis).unwrap();
    assert_eq!(found[..2], [Value::Int(150), Value::Int(0)]);
    assert_eq!(found.len(), 202);
    assert_eq!(members(&server), 160, "it changes nothing");
}

/// One request for several keys counts on from the last of the waiters that it served: a later writer of their key has a
/// greater token, also if the clock of Redis was set back.
#[test]
fn keys_behind_served_waiters_get_greater_tokens() {
    let server = server();
    let mut redis = connect(&server);
    let (secs, _): (i64, i64) = redis::cmd("TIME").query(&mut redis).unwrap();
    let ahead = (secs + 10) * 1_000_000;
    ask(&server, &["ZADD", FENCE, &ahead.to_string(), "t"]);
    ask(&server, &["SET", "k", &value(&lease(0)), "PX", TTL]);
    for n in 1..=20 {
        assert!(matches!(read(&mut redis, n, "0"), Value::Array(_)));
    }
    ask(&server, &["DEL", "k"]);
    let holder = holder(30);
    let leases = [lease(30), lease(31), lease(32)];
    let args = [
        &*holder, &leases[0], TTL, "r", &leases[1], TTL, "0r", &leases[2], TTL, "r",
    ];
    let keys = [FENCE, "a", "k", "b"];
    let granted: Vec<i64> = eval(&ACQUIRE, &keys, &args).query(&mut redis).unwrap();
    assert_eq!(members(&server), 21);
    assert_eq!(granted, [1, 22, 23].map(|more| ahead + more));
    let last: i64 = redis::cmd("ZSCORE")
        .arg(&[FENCE, "t"])
        .query(&mut redis)
        .unwrap();
    assert_eq!(last, granted[2]);
}

//! Fencing tokens, and the counter that makes them rise, for each script that grants.

use leasehold_testbed::Reply;

use super::grants::pass;
use super::{
    ALL_KEYS, FENCE, NO_COUNTER, READS_IT_NO_MORE, READS_THE_COUNTER, TTL, acquire, acquire_as,
    connect, counter_of, granted, has_selectors, holder, kinds, listen, queue_up, received,
    release_as, say, text_of,
};
use crate::steady::steady;
use crate::support::{ask, in_redis, server, value_of};

/// The time in µs in the token of a value's holder.
fn micros_of(value: &str) -> u64 {
    value.split(' ').nth(2).unwrap().parse().unwrap()
}

#[test]
fn tokens_rise_and_survive_a_deleted_counter() {
    let server = server();
    let mut redis = connect(&server);
    let mut last = 0;
    for round in 0..50 {
        let out = acquire(&mut redis, &["a", "b", "c"]);
        for outcome in &out {
            let token = granted(outcome);
            assert!(token > last, "{token} after {last} in round {round}");
            last = token;
        }
        ask(&server, &["DEL", "a", "b", "c"]);
        if round % 5 == 0 {
            ask(&server, &["DEL", FENCE]);
        }
    }
    // The script counts on from a counter that is ahead of the clock.
    let ahead = last + 3_600_000_000;
    ask(&server, &["ZADD", FENCE, &ahead.to_string(), "t"]);
    let tokens: Vec<u64> = acquire(&mut redis, &["a", "b"])
        .iter()
        .map(granted)
        .collect();
    assert_eq!(tokens, [ahead + 1, ahead + 2]);
    let next = acquire(&mut redis, &["c"]);
    assert_eq!(granted(&next[0]), ahead + 3);
}

#[test]
fn tokens_of_one_call_are_counted_past_a_million() {
    let server = server();
    let mut redis = connect(&server);
    for last_digits in [999_996, 999_997, 999_998, 999_999] {
        ask(&server, &["FLUSHALL"]);
        let last = 4_000_000_000_000_000 + last_digits;
        ask(&server, &["ZADD", FENCE, &last.to_string(), "t"]);
        let tokens: Vec<u64> = acquire(&mut redis, &["a", "b", "c", "d"])
            .iter()
            .map(granted)
            .collect();
        assert_eq!(tokens, [1, 2, 3, 4].map(|n| last + n));
        for (key, token) in ["a", "b", "c", "d"].iter().zip(tokens) {
            let value = text_of(&server, key).unwrap();
            assert_eq!(value.split(' ').nth(2), Some(&*token.to_string()), "{key}");
        }
    }
}

#[test]
fn tokens_rise_across_grants_by_acquire_and_by_release() {
    let server = server();
    let (mut redis, mut clients) = (connect(&server), connect(&server));
    let _ear = listen(&mut clients, &[1, 2, 3].map(holder));
    let mut last = 0;
    let mut rises = |token: u64, whose: &str| {
        assert!(token > last, "{token} after {last} for {whose}");
        last = token;
        last
    };
    for round in 0..20 {
        let value = queue_up(&mut redis, "a", &[TTL, TTL, TTL]);
        rises(micros_of(&value), "the first caller");
        for n in 0..3 {
            let turn = pass(&mut redis, "a", n);
            let token = rises(micros_of(&turn.value.unwrap()), "the first waiter");
            assert_eq!(granted(&acquire_as(&mut redis, "a", n + 1, "-")), token);
            rises(
                granted(&acquire_as(&mut redis, "b", n, "")),
                "another key's",
            );
            release_as(&mut redis, "b", n);
        }
        release_as(&mut redis, "a", 3);
        if round % 5 == 0 {
            ask(&server, &["DEL", FENCE]);
        }
    }
    // Both scripts count on from a counter that is ahead of the clock.
    let ahead = last + 3_600_000_000;
    ask(&server, &["ZADD", FENCE, &ahead.to_string(), "t"]);
    let value = queue_up(&mut redis, "a", &[TTL]);
    let turn = pass(&mut redis, "a", 0).value.unwrap();
    let other = granted(&acquire_as(&mut redis, "b", 0, ""));
    let tokens = [micros_of(&value), micros_of(&turn), other];
    assert_eq!(tokens, [1, 2, 3].map(|n| ahead + n));
}

#[test]
fn a_release_without_a_token_frees_the_key() {
    let server = server();
    let (mut redis, mut clients) = (connect(&server), connect(&server));
    let mut subscriber = listen(&mut clients, &[1, 2].map(holder));
    let mut freed = |what: &str, spoil: &[&str]| {
        ask(&server, &["DEL", FENCE]);
        queue_up(&mut redis, "a", &[TTL, "0"]);
        ask(&server, &["DEL", FENCE]);
        ask(&server, spoil);
        let turn = pass(&mut redis, "a", 0);
        assert_eq!(turn.value, None, "{what:?}");
        assert_eq!(received(&server, &mut subscriber), [], "{what:?}");
    };
    for broken in BROKEN {
        freed(broken, &["ZADD", FENCE, broken, "t"]);
        assert_eq!(counter_of(&server).as_deref(), Some(broken));
    }
    freed("a list", &["RPUSH", FENCE, "1795263780943818"]);
    assert_eq!(ask(&server, &["LLEN", FENCE]), Reply::Int(1));
}

/// Scores that are no time in µs: a script must neither count on from them nor overwrite them.
const BROKEN: [&str; 8] = [
    "0",
    "179526378094381",
    "17952637809438180",
    "-179526378094381",
    "1795263780943.5",
    "inf",
    // From 2^53 on, a double cannot tell one number from the next.
    "9007199254740992",
    "9999999999999998",
];

#[test]
fn a_broken_fence_counter_grants_nothing_and_leaves_no_key() {
    let server = server();
    let mut redis = connect(&server);
    let mut refused = |what: &str| {
        for keys in [&["a"][..], &["a", "b", "c"]] {
            let out = acquire(&mut redis, keys);
            assert!(
                kinds(&out).iter().all(|kind| *kind == "refused"),
                "{what:?}: {out:?}"
            );
            assert_eq!(
                ask(&server, &["DBSIZE"]),
                Reply::Int(1),
                "{what:?}: {out:?}"
            );
        }
    };
    for broken in BROKEN {
        ask(&server, &["ZADD", FENCE, broken, "t"]);
        refused(broken);
        assert_eq!(
            ask(&server, &["ZSCORE", FENCE, "t"]).as_text(),
            Some(broken)
        );
    }
    ask(&server, &["SET", FENCE, "1795263780943818"]);
    refused("a string");
    ask(&server, &["DEL", FENCE]);
    ask(&server, &["RPUSH", FENCE, "1795263780943818"]);
    refused("a list");
}

#[test]
fn an_unwritable_counter_grants_nothing() {
    let server = server();
    let mut redis = connect(&server);
    acquire(&mut redis, &["k", "k2"]);
    ask(&server, &["DEL", "k", "k2"]);
    let counter = ask(&server, &["ZSCORE", FENCE, "t"]);
    let (spoil, mend) = match has_selectors(&server) {
        true => (READS_THE_COUNTER, READS_IT_NO_MORE),
        false => (NO_COUNTER, ALL_KEYS),
    };
    say(&server, spoil);
    for keys in [&["k"][..], &["k", "k2"]] {
        let out = acquire(&mut redis, keys);
        assert_eq!(kinds(&out), vec!["refused"; keys.len()], "{out:?}");
        assert_eq!(ask(&server, &["EXISTS", "k", "k2"]), Reply::Int(0));
    }
    say(&server, mend);
    assert_eq!(ask(&server, &["ZSCORE", FENCE, "t"]), counter);
}

#[test]
fn a_broken_fence_counter_is_a_client_error() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    let fence = in_redis("~fence");
    ask(&server, &["SET", &fence, "text"]);
    for _ in 0..2 {
        let error = client.mutex("k").lock().unwrap_err();
        assert_eq!(error.kind(), leasehold::ErrorKind::Protocol, "{error}");
        assert!(error.to_string().contains("fence"), "{error}");
        assert_eq!(value_of(&server, "k"), None);
        ask(&server, &["DEL", &fence]);
        ask(&server, &["HSET", &fence, "a", "b"]);
    }
    ask(&server, &["DEL", &fence]);
    client.with_lock("k", || ()).unwrap();
}

#[test]
fn a_token_is_the_time_of_redis() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    let guard = client.mutex("k").lock().unwrap();
    let value = value_of(&server, "k").expect("the lock is held");
    let micros: u64 = value.split(' ').nth(2).unwrap().parse().unwrap();
    assert_eq!(guard.fencing_token() >> 10, micros);
    let counter = ask(&server, &["ZSCORE", &in_redis("~fence"), "t"]);
    assert_eq!(counter.to_string(), micros.to_string());
    let Reply::Array(time) = ask(&server, &["TIME"]) else {
        panic!("TIME answers with an array");
    };
    let now = time[0].as_int().unwrap() as u64 * 1_000_000;
    assert!(micros.abs_diff(now) < 60_000_000, "{micros} at {now}");
}

//! Values that other users wrote under the keys of locks, queues and counters: the bytes that a script reads,
//! the entries that it visits, and the ttls that it accepts.

use std::ops::Range;

use leasehold_testbed::{Reply, Server};
use redis::Connection;

use super::{
    ADOPT, FENCE, INSPECT, ONE, READ, RELEASE, RENEW, Said, TTL, TWO, WRITE, acquire_as, call,
    connect, ends, entry, foreign_type, granted, holder, kinds, lease, listen, queue_name,
    queue_of, queue_up, received, release, release_as, text_of, ttl_of,
};
use crate::support::{ask, info_number, server};

/// The largest number of entries that a call takes out of a queue.
const VISITED: i64 = 10_000;
/// The most memory, in bytes, that Redis may need for a request, whatever the values.
const LITTLE: i64 = 1 << 20;
/// The size in bytes of a value that another user wrote.
const HUGE: usize = 20 << 20;

/// Puts entries before all others into the queue of `k`: `made` is the Lua expression for entry number `i`.
fn forge(server: &Server, numbers: Range<usize>, made: &str) {
    let script =
        format!("for i = ARGV[1] + 0, ARGV[2] - 1 do redis.call('ZADD', KEYS[1], i, {made}) end");
    let [first, end] = [numbers.start, numbers.end].map(|n| n.to_string());
    let queue = queue_name("k");
    let said = ask(server, &["EVAL", &script, "1", &queue, &first, &end]);
    assert_eq!(said, Reply::Nil);
}

/// Waiters of dead clients.
const DEAD: &str = "string.format('%032x,60000,gone/1/0', i)";
/// An entry that no client writes.
const JUNK: &str = "'junk ' .. i";

fn queued(server: &Server) -> i64 {
    let length = ask(server, &["ZCARD", &queue_name("k")]);
    length.as_int().unwrap()
}

/// The lease that is granted when caller 0 releases `k`. The queue has the entry `first` and caller 1 behind
/// it.
fn served(server: &Server, redis: &mut Connection, first: &str) -> String {
    ask(server, &["FLUSHALL"]);
    queue_up(redis, "k", &[TTL]);
    ask(server, &["ZADD", &queue_name("k"), "7", first]);
    assert_eq!(release_as(redis, "k", 0), Said::Number(1));
    let value = text_of(server, "k").expect("one of the callers has it");
    value.split(' ').nth(1).unwrap().to_owned()
}

#[test]
fn a_request_takes_ten_thousand_entries_at_most() {
    let server = server();
    let mut redis = connect(&server);
    queue_up(&mut redis, "k", &[TTL]);
    forge(&server, 1..115_000, JUNK);
    forge(&server, 115_000..230_000, DEAD);
    let forged = queued(&server);
    assert_eq!(release_as(&mut redis, "k", 0), Said::Number(1));
    assert_eq!(queued(&server), forged - VISITED);
    assert_eq!(text_of(&server, "k"), None, "the key is free");
    // Later requests skip the rest of the forged entries. Until they are gone, each request that finds the key free
    // gets it, since the queue is too long to join.
    let mut clients = connect(&server);
    let _ear = listen(&mut clients, &[holder(1)]);
    for n in 2.. {
        let before = queued(&server);
        let said = acquire_as(&mut redis, "k", n, "+");
        let taken = before - queued(&server);
        assert!(taken <= VISITED, "{taken}");
        let value = text_of(&server, "k").unwrap();
        if value.contains(&lease(1)) {
            assert_eq!(kinds(&[said]), ["queued"]);
            assert_eq!(n as i64 - 1, forged / VISITED - 1);
            break;
        }
        granted(&said);
        assert_eq!(release_as(&mut redis, "k", n), Said::Number(1));
    }
}

#[test]
fn a_full_queue_of_dead_waiters_ends_in_one_call() {
    let server = server();
    let (mut redis, mut clients) = (connect(&server), connect(&server));
    let _ear = listen(&mut clients, &[1].map(holder));
    for (dead, is_served) in [(VISITED - 1, true), (VISITED, false)] {
        let waiters = if is_served { &[TTL][..] } else { &[] };
        let value = queue_up(&mut redis, "k", waiters);
        ask(&server, &["SET", "k", &(value.replace(" +", "") + " +")]);
        forge(&server, 1..dead as usize + 1, DEAD);
        assert_eq!(queued(&server), VISITED);
        assert_eq!(release_as(&mut redis, "k", 0), Said::Number(1));
        assert_eq!(queued(&server), 0);
        assert_eq!(text_of(&server, "k").is_some(), is_served);
        ask(&server, &["FLUSHALL"]);
    }
}

#[test]
fn a_waiter_behind_a_forged_queue_is_notified() {
    let server = server();
    let (mut redis, mut clients) = (connect(&server), connect(&server));
    let mut subscriber = listen(&mut clients, &[1].map(holder));
    queue_up(&mut redis, "k", &[TTL]);
    forge(&server, 1..VISITED as usize + 1, JUNK);
    release_as(&mut redis, "k", 0);
    let messages = received(&server, &mut subscriber);
    assert_eq!(messages.len(), 1, "{messages:?}");
    assert_eq!(messages[0].1, format!("{} ~ k", &lease(1)[..16]));
    granted(&acquire_as(&mut redis, "k", 1, "-"));
}

#[test]
fn an_entry_longer_than_any_is_skipped() {
    let server = server();
    let (mut redis, mut clients) = (connect(&server), connect(&server));
    let mut subscriber = listen(&mut clients, &[1].map(holder));
    // 32 digits, a comma, `0` and a comma come before the holder.
    for (holder, is_served) in [(256 - 35, true), (257 - 35, false), (1 << 20, false)] {
        let first = format!("{},0,{}", lease(9), "h".repeat(holder));
        let wanted = if is_served { lease(9) } else { lease(1) };
        assert_eq!(served(&server, &mut redis, &first), wanted, "{holder}");
    }
    received(&server, &mut subscriber);
    // The client of a longer entry is not notified either when the entry comes near the front.
    for (length, published) in [(128, 1), (1 << 20, 0)] {
        ask(&server, &["FLUSHALL"]);
        queue_up(&mut redis, "k", &["0"; 8]);
        let ninth = format!("{},{TTL},{}", lease(9), "h".repeat(length));
        ask(
            &server,
            &["ZADD", &queue_name("k"), "9000000000000000", &ninth],
        );
        let before = server.calls("publish").unwrap();
        release_as(&mut redis, "k", 0);
        let after = server.calls("publish").unwrap();
        assert_eq!(after - before, published, "{length}");
    }
}

#[test]
fn an_entry_with_an_impossible_ttl_is_skipped() {
    let server = server();
    let (mut redis, mut clients) = (connect(&server), connect(&server));
    let _ear = listen(&mut clients, &[1, 9].map(holder));
    for (ttl, is_served) in [
        ("86400000", true),
        ("86400001", false),
        ("1000000000000000", false),
        (&*"9".repeat(200), false),
        ("060000", false),
        ("00", false),
        ("0", true),
    ] {
        let wanted = if is_served { lease(9) } else { lease(1) };
        let seen = served(&server, &mut redis, &entry(9, ttl));
        assert_eq!(seen, wanted, "{ttl}");
        assert!(ttl_of(&server, "k") <= 86_400_000, "{ttl}");
    }
}

#[test]
fn a_foreign_newest_entry_hinders_no_waiter() {
    let server = server();
    let mut redis = connect(&server);
    let huge = "x".repeat(1 << 20);
    let queue = queue_name("k");
    for (place, forged) in [
        ("3888888888888888", &*huge),
        // Behind the places of waiters that join.
        ("8888888888888888", &*huge),
        ("9007199254000001", "x"),
        ("inf", "x"),
    ] {
        ask(&server, &["FLUSHALL"]);
        let first = granted(&acquire_as(&mut redis, "k", 0, ""));
        ask(&server, &["ZADD", &queue, place, forged]);
        let said = acquire_as(&mut redis, "k", 1, "+");
        let Said::Queued { since, .. } = said else {
            panic!("not queued: {said:?}");
        };
        assert!((first..3_888_888_888_888_888).contains(&since), "{since}");
        assert_eq!(queue_of(&server, "k")[0], entry(1, TTL), "{place}");
        let is_near = place.starts_with('3');
        assert_eq!(queue_of(&server, "k").len() == 1, is_near, "{place}");
    }
}

#[test]
fn an_impossible_queue_position_is_ignored() {
    let server = server();
    let mut redis = connect(&server);
    let queue = queue_name("k");
    queue_up(&mut redis, "k", &[TTL]);
    for place in ["inf", "-inf", "-5", "1.5", "1e300", "90071992540000000"] {
        ask(&server, &["ZADD", &queue, place, &entry(1, TTL)]);
        let said = acquire_as(&mut redis, "k", 1, "-");
        assert_eq!(kinds(&[said]), ["contended"], "{place}");
    }
}

/// Values that begin like those of locks, but are none.
fn forged_values() -> [String; 3] {
    let held = format!("lh1 {ONE} 1795263780943818 ");
    [
        format!("lh1 {}", "x".repeat(252)),
        held.clone() + &"h".repeat(256 - held.len()),
        held + &"h".repeat(1 << 20),
    ]
}

#[test]
fn a_value_longer_than_a_lock_is_foreign_and_stays() {
    let server = server();
    let mut redis = connect(&server);
    for value in forged_values() {
        ask(&server, &["SET", "k", &value]);
        for mode in ["", "+", "0", "-", "-+"] {
            let said = acquire_as(&mut redis, "k", 1, mode);
            assert_eq!(foreign_type(&said.text()), "string", "{mode:?}");
        }
        let said = call(&mut redis, &INSPECT, &["k"], &[]);
        assert_eq!(foreign_type(&said[0].text()), "string");
        assert_eq!(text_of(&server, "k").as_deref(), Some(&*value));
        assert_eq!(ttl_of(&server, "k"), -1);
        assert_eq!(ask(&server, &["EXISTS", &queue_name("k")]), Reply::Int(0));
        for script in [&*RENEW, &ADOPT] {
            let args = match script == &*RENEW {
                true => &[TWO, TTL][..],
                false => &["host/1/0", TWO, "17", ONE, TTL],
            };
            let said = call(&mut redis, script, &["k"], args);
            assert_eq!(said[0].text(), value[..256]);
        }
        let said = release(&mut redis, &["k"], &[TWO]);
        assert_eq!(said[0].text(), value[..256]);
    }
    let longest = format!("lh1 {ONE} 1795263780943818 {} +", "h".repeat(128));
    ask(&server, &["SET", "k", &longest, "PX", TTL]);
    let said = acquire_as(&mut redis, "k", 1, "");
    assert_eq!(kinds(&[said]), ["contended"]);
}

#[test]
fn an_empty_string_is_foreign_and_not_free() {
    let server = server();
    let mut redis = connect(&server);
    ask(&server, &["SET", "k", ""]);
    for mode in ["", "+", "0", "-", "-+", "+7"] {
        let said = acquire_as(&mut redis, "k", 1, mode);
        assert_eq!(foreign_type(&said.text()), "string", "{mode:?}");
    }
    let said = call(&mut redis, &INSPECT, &["k"], &[]);
    assert_eq!(foreign_type(&said[0].text()), "string");
    let adopt = ["host/1/0", TWO, "17", ONE, TTL];
    for said in [
        release(&mut redis, &["k"], &[ONE]),
        call(&mut redis, &RENEW, &["k"], &[ONE, TTL]),
        call(&mut redis, &ADOPT, &["k"], &adopt),
    ] {
        assert_eq!(said, [Said::Text(String::new())]);
    }
    assert_eq!(text_of(&server, "k").as_deref(), Some(""));
    // A user without the right to EXISTS gets this error.
    ask(&server, &["DEL", "k"]);
    ask(&server, &["ACL", "SETUSER", "default", "-exists"]);
    let said = release(&mut redis, &["k"], &[ONE]);
    assert_eq!(ends(&said), ["refused"]);
}

/// The bytes that INFO reports as `of`.
fn memory(server: &Server, of: &str) -> i64 {
    info_number(server, "memory", of) as i64
}

/// The additional memory that Redis needs for a request.
fn needed(server: &Server, request: impl FnOnce() -> Said) -> (i64, Said) {
    let peak = || memory(server, "used_memory_peak");
    // Fills the memory up to the highest peak so far, so that a higher peak shows.
    let gap = peak() - memory(server, "used_memory");
    let filled = ask(server, &["STRLEN", "filler"]).as_int().unwrap();
    let end = (filled + gap).to_string();
    ask(server, &["SETRANGE", "filler", &end, "x"]);
    let before = peak();
    let said = request();
    (peak() - before, said)
}

#[test]
fn scripts_read_the_beginning_of_a_value_only() {
    let server = server();
    let mut redis = connect(&server);
    let end = HUGE.to_string();
    ask(&server, &["SETRANGE", "k", &end, "x"]);
    ask(&server, &["SETRANGE", "k", "0", &format!("lh1 {TWO} 1 ")]);
    let token = "00000000000000000017";
    for (key, short, text, long) in [("v", "value", "", "token"), ("w", "token", token, "value")] {
        let grow =
            "redis.call('HSET', KEYS[1], ARGV[1], ARGV[2], ARGV[3], string.rep('7', ARGV[4]))";
        ask(&server, &["EVAL", grow, "1", key, short, text, long, &end]);
    }
    let adopt = ["host/1/0", ONE, "17", ONE, TTL];
    let join = ["host/1/0", ONE, TTL, "+"];
    type Request<'a> = (&'a str, &'a str, &'a [&'a str], &'a [&'a str]);
    let requests: &[Request] = &[
        ("renew", &RENEW, &["k"], &[ONE, TTL]),
        ("release", &RELEASE, &[FENCE, "k"], &[ONE]),
        ("adopt", &ADOPT, &["k"], &adopt),
        ("inspect", &INSPECT, &["k"], &[]),
        ("join", &super::ACQUIRE, &["p:~other", "k"], &join),
        ("write", &WRITE, &["v"], &[token, "5000", "x"]),
        ("delete", &WRITE, &["v"], &[token, "-5000", ""]),
        ("read", &READ, &["v"], &["1000000"]),
        ("read a value", &READ, &["w"], &["1000000"]),
    ];
    for (name, script, keys, args) in requests {
        let (bytes, _) = needed(&server, || call(&mut redis, script, keys, args).remove(0));
        assert!(bytes < LITTLE, "{name}: {bytes} bytes");
    }
}

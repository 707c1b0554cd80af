//! The lifetime of a queue, and which waiter gets a key whose lock has expired.

use std::ops::RangeInclusive;

use leasehold_testbed::{Reply, Server, eventually};

use super::{counter_of, expire, queued, value_of};
use crate::scripts::{
    ACQUIRE, FENCE, Said, TTL, acquire_as, call, channel, connect, entry, granted, holder, join,
    lease, leave, listen, queue_name, queue_of, queue_up, received, release_as, ttl_of,
};
use crate::support::{SOON, ask, server};

fn queue_ttl(server: &Server) -> i64 {
    ttl_of(server, &queue_name("k"))
}

#[test]
fn a_queue_outlives_its_lock_by_ten_seconds_or_more() {
    let server = server();
    let (mut redis, mut clients) = (connect(&server), connect(&server));
    let _ear = listen(&mut clients, &[holder(1)]);
    let lives = |range: RangeInclusive<i64>| {
        let lives = queue_ttl(&server);
        assert!(range.contains(&lives), "{lives} in {range:?}");
    };
    queue_up(&mut redis, "k", &[]);
    acquire_as(&mut redis, "k", 1, "+");
    // The queue's life does not depend on the ttl of a waiter's lease.
    lives(70_000..=80_000);
    for (left, n, ttl, range) in [
        ("5000", 2, "900000", 70_000..=80_000),
        ("90000", 3, "5000", 100_000..=110_000),
        ("20000", 4, "0", 100_000..=110_000),
    ] {
        ask(&server, &["PEXPIRE", "k", left]);
        queued(&join(&mut redis, "k", n, ttl));
        lives(range);
    }
    // A waiter that asks again prolongs the queue; a caller without a queue mode does not.
    ask(&server, &["PEXPIRE", "k", "900000"]);
    acquire_as(&mut redis, "k", 20, "");
    acquire_as(&mut redis, "k", 20, "-");
    lives(100_000..=110_000);
    queued(&acquire_as(&mut redis, "k", 1, "-"));
    lives(910_000..=920_000);
    // A shorter ttl does not shorten the queue's life.
    ask(&server, &["PEXPIRE", "k", "20000"]);
    queued(&acquire_as(&mut redis, "k", 1, "-"));
    lives(910_000..=920_000);
    ask(&server, &["PEXPIRE", "k", "900000"]);
    // If the queue's ttl exceeds the lock's by ten seconds, a waiter that joins leaves it as it is.
    for (before, n, range) in [
        (915_000, 12, 905_000..=915_000),
        (905_000, 13, 910_000..=920_000),
    ] {
        ask(&server, &["PEXPIRE", &queue_name("k"), &before.to_string()]);
        queued(&acquire_as(&mut redis, "k", n, "+"));
        lives(range);
    }
    // The waiters behind the waiter that got the grant have as much time as before.
    release_as(&mut redis, "k", 0);
    lives(910_000..=920_000);
}

#[test]
fn a_queue_without_its_lock_expires() {
    let server = server();
    let mut redis = connect(&server);
    queue_up(&mut redis, "k", &[]);
    ask(&server, &["PEXPIRE", "k", "5000"]);
    queued(&acquire_as(&mut redis, "k", 1, "+"));
    let lives = queue_ttl(&server);
    assert!((23_000..=25_000).contains(&lives), "{lives}");
    expire(&server);
    assert!(queue_ttl(&server) > 0);
    ask(&server, &["PEXPIRE", &queue_name("k"), "1"]);
    let gone = || ask(&server, &["DBSIZE"]) == Reply::Int(1);
    assert!(eventually(SOON, gone), "only the counter is left");
    assert_eq!(leave(&mut redis, "k", 1, TTL), Said::Number(0));
    // The lease may be queued. Its request acquires no free key, since the caller may be gone.
    assert_eq!(acquire_as(&mut redis, "k", 1, "-"), Said::Number(0));
    assert_eq!(
        ask(&server, &["EXISTS", "k", &queue_name("k")]),
        Reply::Int(0)
    );
}

#[test]
fn the_first_waiter_is_granted_on_request() {
    let server = server();
    let (mut redis, mut clients) = (connect(&server), connect(&server));
    let mut subscriber = listen(&mut clients, &[1, 2].map(holder));
    for ttl in ["5000", "0"] {
        let before = queue_up(&mut redis, "k", &[ttl, TTL]);
        expire(&server);
        let asked_ttl = if ttl == "0" { TTL } else { ttl };
        let args = [&*holder(1), &lease(1), asked_ttl, "-"];
        let said = call(&mut redis, &ACQUIRE, &[FENCE, "k"], &args);
        let micros = granted(&said[0]);
        assert!(*before < *format!("lh1 {} {micros}", lease(1)));
        let wanted = format!("lh1 {} {micros} {} +", lease(1), holder(1));
        assert_eq!(value_of(&server), wanted);
        assert_eq!(counter_of(&server), Some(micros.to_string()));
        assert_eq!(queue_of(&server, "k"), [entry(2, TTL)]);
        let left = ttl_of(&server, "k");
        let asked_ttl: i64 = asked_ttl.parse().unwrap();
        assert!((1_000..=asked_ttl).contains(&left), "{left}");
        assert_eq!(
            received(&server, &mut subscriber),
            [],
            "the caller has the reply"
        );
        ask(&server, &["FLUSHALL"]);
    }
}

#[test]
fn a_later_request_grants_the_first_waiter() {
    let server = server();
    let (mut redis, mut clients) = (connect(&server), connect(&server));
    let mut subscriber = listen(&mut clients, &[1, 2].map(holder));
    // Caller 3 joins anew, or at a position behind the first waiter.
    let late = "+3888888888888888";
    for (n, mode, ahead) in [(2, "-", 0), (3, "+", 1), (3, "0", 1), (3, late, 1)] {
        queue_up(&mut redis, "k", &["5000", TTL]);
        expire(&server);
        let said = acquire_as(&mut redis, "k", n, mode);
        let (left, seen, _) = queued(&said);
        assert!((1..=5_000).contains(&left), "{said:?}");
        assert_eq!(seen, ahead, "{n} as {mode:?}");
        let value = value_of(&server);
        let micros = value.split(' ').nth(2).unwrap();
        let wanted = format!("lh1 {} {micros} {} +", lease(1), holder(1));
        assert_eq!(value, wanted);
        let message = format!("{} {micros} k", lease(1));
        let channel = channel(&holder(1));
        assert_eq!(received(&server, &mut subscriber), [(channel, message)]);
        assert_eq!(queue_of(&server, "k").len() as i64, ahead + 1);
        ask(&server, &["FLUSHALL"]);
    }
    // A caller whose former position is before the first waiter's is granted the lock itself.
    queue_up(&mut redis, "k", &["5000", TTL]);
    expire(&server);
    granted(&acquire_as(&mut redis, "k", 3, "+1000000000000000"));
    assert_eq!(received(&server, &mut subscriber), []);
}

#[test]
fn a_caller_without_a_queue_mode_takes_a_free_key() {
    let server = server();
    let (mut redis, mut clients) = (connect(&server), connect(&server));
    let mut subscriber = listen(&mut clients, &[1].map(holder));
    queue_up(&mut redis, "k", &[TTL]);
    expire(&server);
    let micros = granted(&acquire_as(&mut redis, "k", 3, ""));
    let wanted = format!("lh1 {} {micros} {}", lease(3), holder(3));
    assert_eq!(value_of(&server), wanted);
    assert_eq!(queue_of(&server, "k"), [entry(1, TTL)]);
    // The waiter asks again. This makes the new holder's release grant from the queue.
    assert_eq!(queued(&acquire_as(&mut redis, "k", 1, "-")).1, 0);
    assert_eq!(value_of(&server), wanted + " +");
    assert_eq!(release_as(&mut redis, "k", 3), Said::Number(1));
    assert!(value_of(&server).starts_with(&format!("lh1 {}", lease(1))));
    assert_eq!(received(&server, &mut subscriber).len(), 1);
}

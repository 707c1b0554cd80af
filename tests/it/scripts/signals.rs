//! The release that wakes waiters of python-redis-lock.

use std::sync::LazyLock;

use leasehold_testbed::Server;
use redis::{Connection, Value};

use super::parts::whole;
use super::{FENCE, ONE, Said, TTL, TWO, connect, entry, holder, queue_name, result_of, value};
use crate::support::{ask, server};

pub(super) static RELEASE: LazyLock<String> =
    LazyLock::new(|| whole(include_str!("../../../lua/release_with_signal.lua")));

fn signal_name(key: &str) -> String {
    format!("{key}~signal")
}

/// Releases the keys with one call. Returns its one result, or that of each key.
fn release(redis: &mut Connection, keys: &[&str], leases: &[&str]) -> Vec<Said> {
    let mut eval = redis::cmd("EVAL");
    eval.arg(&*RELEASE).arg(1 + 3 * keys.len()).arg(FENCE);
    for name in [str::to_owned, queue_name, signal_name] {
        eval.arg(keys.iter().map(|key| name(key)).collect::<Vec<_>>());
    }
    let packed = eval.arg(leases).get_packed_command();
    redis.send_packed_command(&packed).unwrap();
    match redis.recv_response().unwrap() {
        Value::Array(values) => values.into_iter().map(result_of).collect(),
        one => vec![result_of(one)],
    }
}

/// The number of elements in the signal of each key. Each signal has a ttl of a second at most.
fn signals(server: &Server, keys: &[&str]) -> Vec<i64> {
    let count = |key: &&str| {
        let count = ask(server, &["LLEN", &signal_name(key)]).as_int().unwrap();
        let ttl = ask(server, &["PTTL", &signal_name(key)]).as_int().unwrap();
        let expected = if count == 0 { -2..=-2 } else { 1..=1000 };
        // The second may have passed.
        assert!(expected.contains(&ttl) || ttl == -2, "{key}: {ttl}");
        count
    };
    keys.iter().map(count).collect()
}

#[test]
fn each_key_that_is_free_is_signalled_once() {
    let server = server();
    let mut redis = connect(&server);
    let keys = ["a", "b"];
    let lock = |key: &str, value: &str| ask(&server, &["SET", key, value, "PX", TTL]);
    lock("a", &value(ONE));
    lock("b", &value(TWO));
    let said = release(&mut redis, &keys, &[ONE, ONE]);
    assert_eq!(said, [Said::Number(1), Said::Text(value(TWO))]);
    assert_eq!(signals(&server, &keys), [1, 0]);
    // The ttl of the first key has ended, and an earlier release has signalled the second one.
    let _ = release(&mut redis, &["b"], &[TWO]);
    let said = release(&mut redis, &keys, &[ONE, TWO]);
    assert_eq!(said, [0, 0].map(Said::Number));
    assert_eq!(signals(&server, &keys), [1, 1]);
    // One result stands for both keys.
    ask(&server, &["FLUSHALL"]);
    lock("a", &value(ONE));
    lock("b", &value(TWO));
    assert_eq!(release(&mut redis, &keys, &[ONE, TWO]), [Said::Number(1)]);
    assert_eq!(signals(&server, &keys), [1, 1]);
}

/// A release that passes a key on, which does not happen beside that library, wakes none of its waiters.
#[test]
fn a_key_that_stays_taken_is_not_signalled() {
    let server = server();
    let mut redis = connect(&server);
    let keys = ["a", "b", "c"];
    for key in keys {
        let value = value(ONE) + if key == "b" { " +" } else { "" };
        ask(&server, &["SET", key, &value, "PX", TTL]);
    }
    ask(
        &server,
        &["ZADD", &queue_name("b"), "1795263780943818", &entry(2, "0")],
    );
    ask(&server, &["RPUSH", &signal_name("c"), "1", "1"]);
    let said = release(&mut redis, &keys, &[ONE; 3]);
    assert_eq!(said, [Said::Number(1)]);
    let held = ask(&server, &["GET", "b"]).to_string();
    assert!(held.contains(&holder(2)), "{held}");
    assert_eq!(signals(&server, &keys), [1, 0, 1]);
}

/// The caller learns that the waiters of one of its keys sleep on.
#[test]
fn a_refused_signal_is_the_result_of_all_keys() {
    let server = server();
    let mut redis = connect(&server);
    for key in ["a", "b"] {
        ask(&server, &["SET", key, &value(ONE), "PX", TTL]);
    }
    ask(&server, &["ACL", "SETUSER", "default", "-lpush"]);
    let said = release(&mut redis, &["a", "b"], &[ONE; 2]);
    assert!(matches!(&said[..], [Said::Error(_)]), "{said:?}");
    for key in ["a", "b", "a~signal", "b~signal"] {
        assert_eq!(ask(&server, &["EXISTS", key]).as_int(), Some(0), "{key}");
    }
}

//! The release that wakes waiters of python-redis-lock.

use std::sync::LazyLock;

use redis::{Connection, ConnectionLike as _, Value};

use super::parts::whole;
use super::{FENCE, ONE, Said, TTL, TWO, connect, entry, holder, queue_name, result_of, value};
use crate::support::{ask, server};

pub(super) static RELEASE: LazyLock<String> =
    LazyLock::new(|| whole(include_str!("../../../lua/release_with_signal.lua")));

fn signal_name(key: &str) -> String {
    format!("{key}~signal")
}

/// Releases the keys with one call. Returns its one result, or that of each key, and the number of elements in the
/// signal of each key. The release and the counts are one transaction, since a signal lives for a second only.
fn release(redis: &mut Connection, keys: &[&str], leases: &[&str]) -> (Vec<Said>, Vec<i64>) {
    let mut pipe = redis::pipe();
    let eval = pipe.atomic().cmd("EVAL");
    eval.arg(&*RELEASE).arg(1 + 3 * keys.len()).arg(FENCE);
    for name in [str::to_owned, queue_name, signal_name] {
        eval.arg(keys.iter().map(|key| name(key)).collect::<Vec<_>>());
    }
    eval.arg(leases);
    for key in keys {
        let signal = signal_name(key);
        pipe.cmd("LLEN").arg(&signal).cmd("PTTL").arg(&signal);
    }
    let packed = pipe.get_packed_pipeline();
    // The replies to MULTI, and to each command in the queue, come before that to EXEC.
    let replies = redis.req_packed_commands(&packed, 2 + 2 * keys.len(), 1);
    let Ok([Value::Array(results)]) = replies.as_deref() else {
        panic!("{replies:?}");
    };
    let (said, signals) = results.split_first().unwrap();
    let said = match said.clone() {
        Value::Array(values) => values.into_iter().map(result_of).collect(),
        one => vec![result_of(one)],
    };
    let count = |signal: &[Value]| match *signal {
        [Value::Int(0), Value::Int(-2)] => 0,
        [Value::Int(count), Value::Int(1..=1000)] => count,
        ref other => panic!("a signal lives for a second at most: {other:?}"),
    };
    (said, signals.chunks(2).map(count).collect())
}

#[test]
fn each_key_that_is_free_is_signalled_once() {
    let server = server();
    let mut redis = connect(&server);
    let keys = ["a", "b"];
    let lock = |key: &str, value: &str| ask(&server, &["SET", key, value, "PX", TTL]);
    lock("a", &value(ONE));
    lock("b", &value(TWO));
    let (said, signals) = release(&mut redis, &keys, &[ONE, ONE]);
    assert_eq!(said, [Said::Number(1), Said::Text(value(TWO))]);
    assert_eq!(signals, [1, 0]);
    // The ttl of the first key has ended, and an earlier release has signalled the second one.
    let _ = release(&mut redis, &["b"], &[TWO]);
    let (said, signals) = release(&mut redis, &keys, &[ONE, TWO]);
    assert_eq!(said, [0, 0].map(Said::Number));
    assert_eq!(signals, [1, 1]);
    // One result stands for both keys.
    ask(&server, &["FLUSHALL"]);
    lock("a", &value(ONE));
    lock("b", &value(TWO));
    let (said, signals) = release(&mut redis, &keys, &[ONE, TWO]);
    assert_eq!(
        (&said[..], &signals[..]),
        (&[Said::Number(1)][..], &[1, 1][..])
    );
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
    let (said, signals) = release(&mut redis, &keys, &[ONE; 3]);
    assert_eq!(said, [Said::Number(1)]);
    let held = ask(&server, &["GET", "b"]).to_string();
    assert!(held.contains(&holder(2)), "{held}");
    assert_eq!(signals, [1, 0, 1]);
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
    let (said, _) = release(&mut redis, &["a", "b"], &[ONE; 2]);
    assert!(matches!(&said[..], [Said::Error(_)]), "{said:?}");
    for key in ["a", "b", "a~signal", "b~signal"] {
        assert_eq!(ask(&server, &["EXISTS", key]).as_int(), Some(0), "{key}");
    }
}

//! Claims of locks with a fenced value.

use super::{CLAIM, FENCE, ONE, TTL, TWO, connect, value};
use crate::support::{ask, server};
use redis::{Connection, Value};

const TOKEN: &str = "00000000000000000017";

/// The results for these lock keys, each with the queue `<key>q` and the value `<key>v`.
fn claim(redis: &mut Connection, keys: &[&str]) -> Vec<Value> {
    call(redis, keys, TTL, "")
}

/// Calls the script with this ttl and this value of a candidate.
fn call(redis: &mut Connection, keys: &[&str], ttl: &str, term: &str) -> Vec<Value> {
    let mut call = redis::cmd("EVAL");
    call.arg(CLAIM.as_str()).arg(1 + 3 * keys.len()).arg(FENCE);
    for suffix in ["", "q", "v"] {
        for key in keys {
            call.arg(format!("{key}{suffix}"));
        }
    }
    call.arg("host/1/a").arg("5");
    for n in 0..keys.len() {
        call.arg([ONE, TWO][n]).arg(ttl).arg(term);
    }
    match call.query(redis) {
        Ok(Value::Array(results)) if keys.len() > 1 => results,
        Ok(one) => vec![one],
        Err(error) => vec![Value::SimpleString(error.to_string())],
    }
}

fn bytes(text: &str) -> Value {
    Value::BulkString(text.as_bytes().to_vec())
}

#[test]
fn a_claim_grants_free_keys_without_a_value() {
    let server = server();
    let mut redis = connect(&server);
    ask(&server, &["HSET", "cv", "token", TOKEN, "value", "done"]);
    ask(&server, &["HSET", "dv", "token", TOKEN]);
    ask(&server, &["ZADD", "eq", "5", "someone"]);
    let granted = claim(&mut redis, &["a", "d"]);
    let [Value::BulkString(first), Value::BulkString(second)] = &granted[..] else {
        panic!("{granted:?}");
    };
    assert!(
        first.len() == 16 && first < second,
        "tokens rise: {granted:?}"
    );
    let counter = ask(&server, &["ZSCORE", FENCE, "t"]);
    assert_eq!(counter.as_text().unwrap().as_bytes(), second);
    for (key, token, value) in [("c", TOKEN, bytes("done")), ("e", "", Value::Nil)] {
        let free = Value::Array(vec![Value::Int(-2), bytes(""), bytes(token), value]);
        assert_eq!(claim(&mut redis, &[key]), [free]);
        assert_eq!(ask(&server, &["EXISTS", key]).as_int(), Some(0));
    }
}

/// The value is written under the token of the grant, which has twenty digits.
#[test]
fn a_candidates_claim_writes_its_value() {
    let server = server();
    let mut redis = connect(&server);
    ask(
        &server,
        &[
            "HSET",
            "bv",
            "token",
            TOKEN,
            "value",
            "longer than accepted",
        ],
    );
    let granted = call(&mut redis, &["a", "b"], TTL, "+me");
    let [Value::BulkString(first), Value::BulkString(second)] = &granted[..] else {
        panic!("{granted:?}");
    };
    for (key, micros) in [("av", first), ("bv", second)] {
        let micros: u64 = std::str::from_utf8(micros).unwrap().parse().unwrap();
        let token = ask(&server, &["HGET", key, "token"]);
        assert_eq!(token.as_text(), Some(&*format!("{:020}", micros << 10)));
        assert_eq!(ask(&server, &["HGET", key, "value"]).as_text(), Some("me"));
    }
    // A later token refuses the candidate, and a foreign value stays.
    let later = "18446744073709551615";
    ask(&server, &["HSET", "cv", "token", later]);
    ask(&server, &["SET", "dv", "theirs"]);
    let free = Value::Array(vec![Value::Int(-2), bytes(""), bytes(later), Value::Nil]);
    assert_eq!(call(&mut redis, &["c"], TTL, "+me"), [free]);
    let refused = format!("{:?}", call(&mut redis, &["d"], TTL, "+me"));
    assert!(refused.contains("FOREIGNVALUE"), "{refused}");
    for key in ["c", "d"] {
        assert_eq!(ask(&server, &["EXISTS", key]).as_int(), Some(0));
    }
}

#[test]
fn a_read_grants_and_changes_nothing() {
    let server = server();
    let mut redis = connect(&server);
    let held = value(TWO);
    ask(&server, &["SET", "a", &held]);
    ask(&server, &["HSET", "av", "token", TOKEN, "value", "done"]);
    let found = Value::Array(vec![
        Value::Int(-1),
        bytes(&held),
        bytes(TOKEN),
        bytes("done"),
    ]);
    assert_eq!(call(&mut redis, &["a"], "0", ""), [found]);
    let free = Value::Array(vec![Value::Int(-2), bytes(""), bytes(""), Value::Nil]);
    assert_eq!(call(&mut redis, &["b"], "0", ""), [free]);
    assert_eq!(ask(&server, &["PTTL", "a"]).as_int(), Some(-1));
    assert_eq!(ask(&server, &["DBSIZE"]).as_int(), Some(2));
}

#[test]
fn a_claim_of_a_taken_key_only_reads() {
    let server = server();
    let mut redis = connect(&server);
    let held = value(TWO);
    ask(&server, &["SET", "a", &held, "PX", TTL]);
    let Value::Array(found) = &claim(&mut redis, &["a"])[0] else {
        panic!("it was granted");
    };
    assert_eq!(found[1..], [bytes(&held), bytes(""), Value::Nil]);
    assert_eq!(ask(&server, &["DBSIZE"]).as_int(), Some(1));
}

#[test]
fn a_claim_leaves_foreign_and_long_values_alone() {
    let server = server();
    let mut redis = connect(&server);
    ask(&server, &["SET", "a", "theirs"]);
    ask(&server, &["SET", "bv", "theirs"]);
    ask(&server, &["HSET", "cv", "token", TOKEN, "value", "longer"]);
    for (key, wanted) in [("a", "FOREIGN"), ("b", "FOREIGNVALUE"), ("c", "TOOLARGE")] {
        let refused = format!("{:?}", claim(&mut redis, &[key]));
        assert!(refused.contains(wanted), "{refused}");
    }
    assert_eq!(ask(&server, &["GET", "a"]).as_text(), Some("theirs"));
    assert_eq!(ask(&server, &["DBSIZE"]).as_int(), Some(3));
}

#[test]
fn a_claim_gives_a_lock_without_a_ttl_its_own() {
    let server = server();
    let mut redis = connect(&server);
    ask(&server, &["SET", "a", &value(TWO)]);
    claim(&mut redis, &["a"]);
    assert!(ask(&server, &["PTTL", "a"]).as_int() > Some(0));
}

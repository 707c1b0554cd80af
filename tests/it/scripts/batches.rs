//! Calls with many keys: what a script does for all keys at once, and the one result it returns for all.

use leasehold_testbed::Reply;
use redis::Connection;

use super::{
    ACQUIRE, ALL_KEYS, FENCE, MICROS, ONE, Outcomes, READS_IT_NO_MORE, RELEASE, RENEW, Said, TTL,
    TWO, acquire, answer, call, connect, ends, entry, granted, has_selectors, holder, kinds,
    listen, queue_name, received, release, say, text_of, ttl_of, value,
};
use crate::support::{ask, server};

/// All rights on keys that begin with `k`, and only reads of other keys.
const READS_THE_REST: &str = "ACL SETUSER default resetkeys ~k* %R~* (+eval ~*)";
/// No rights on `hidden`.
const SEES_NOT_ALL: &str =
    "ACL SETUSER default resetkeys ~k* ~waited* ~theirs ~none ~foreign ~list ~p:* (+eval ~*)";

#[test]
fn keys_of_one_call_are_independent() {
    let server = server();
    let (mut redis, mut clients) = (connect(&server), connect(&server));
    let _ear = listen(&mut clients, &[holder(2)]);
    let others = ["waited", "theirs", "none", "foreign", "list", "hidden"];
    let held = ["k1", "k2", "k3", "k4", "k5"];
    let keys = [&held[..2], &others, &held[2..]].concat();
    let renews = [ONE, TTL].repeat(keys.len());
    let each = |redis: &mut Connection, script: &str, args: &[&str], fence: &[&str]| -> Outcomes {
        let of_each = keys
            .iter()
            .flat_map(|key| call(redis, script, &[fence, &[key]].concat(), args));
        of_each.collect()
    };
    let (all, rules) = if has_selectors(&server) {
        let all = "ACL SETUSER default allkeys clearselectors +@all";
        let some = [READS_THE_REST, SEES_NOT_ALL, READS_IT_NO_MORE];
        (all, some.to_vec())
    } else {
        ("ACL SETUSER default allkeys +@all", vec![ALL_KEYS])
    };
    for permissions in [&["ACL SETUSER default -mget"], &rules[..]].concat() {
        let prepare = || {
            say(&server, all);
            ask(&server, &["FLUSHALL"]);
            for key in held.iter().chain(&["hidden"]) {
                ask(&server, &["SET", key, &value(ONE), "PX", "5000"]);
            }
            let queue = queue_name("waited");
            ask(&server, &["ZADD", &queue, "1", &entry(2, TTL)]);
            let marked = value(ONE) + " +";
            ask(&server, &["SET", "waited", &marked, "PX", "5000"]);
            ask(&server, &["SET", "theirs", &value(TWO), "PX", "5000"]);
            ask(&server, &["SET", "foreign", &format!("xlh1 {ONE} 1 x")]);
            ask(&server, &["RPUSH", "list", "theirs"]);
            say(&server, permissions);
        };
        let left = || {
            say(&server, all);
            let left = keys.iter().map(|key| {
                (
                    ask(&server, &["EXISTS", key]),
                    ttl_of(&server, key) > 10_000,
                )
            });
            left.collect::<Vec<_>>()
        };
        prepare();
        let renewed = call(&mut redis, &RENEW, &keys, &renews);
        let after = left();
        prepare();
        assert_eq!(
            each(&mut redis, &RENEW, &[ONE, TTL], &[]),
            renewed,
            "{permissions}"
        );
        assert_eq!(left(), after, "{permissions}");

        prepare();
        let released = release(&mut redis, &keys, &vec![ONE; keys.len()]);
        let after = left();
        prepare();
        assert_eq!(
            each(&mut redis, &RELEASE, &[ONE], &[FENCE]),
            released,
            "{permissions}"
        );
        assert_eq!(left(), after, "{permissions}");
        for (said, key) in released
            .iter()
            .zip(&keys)
            .filter(|(_, key)| held.contains(key))
        {
            assert_eq!(*said, Said::Number(1), "{key} with {permissions}");
        }
    }
}

#[test]
fn a_forbidden_key_fails_the_whole_call() {
    let server = server();
    let mut redis = connect(&server);
    let keys = ["k1", "hidden", "k2"];
    acquire(&mut redis, &keys);
    say(&server, "ACL SETUSER default resetkeys ~k* ~p:*");
    let renewed = call(&mut redis, &RENEW, &keys, &[ONE, TTL].repeat(3));
    for said in [renewed, release(&mut redis, &keys, &[ONE; 3])].concat() {
        assert!(said.text().starts_with("NOPERM"), "{said:?}");
    }
    say(&server, ALL_KEYS);
    let exists = [&["EXISTS"], &keys[..]].concat();
    assert_eq!(ask(&server, &exists), Reply::Int(3));
}

#[test]
fn one_call_releases_only_own_locks() {
    let server = server();
    let mut redis = connect(&server);
    let keys = ["a", "b", "c", "d", "e", "f", "g", "h"];
    acquire(&mut redis, &keys);
    let others = value(TWO);
    for not_it in [TWO, &ONE[1..], "", &others, &others[..40]] {
        let said = release(&mut redis, &keys, &[not_it; 8]);
        assert_eq!(ends(&said), ["taken"; 8], "{not_it:?}");
        let said = release(&mut redis, &keys[..1], &[not_it]);
        assert_eq!(ends(&said), ["taken"], "{not_it:?}");
    }
    let calls = || ["getrange", "mget", "del"].map(|name| server.calls(name).unwrap());
    let before = calls();
    call(&mut redis, &RENEW, &keys, &[ONE, TTL].repeat(8));
    let twice = [&keys[..], &keys].concat();
    let values = twice.iter().map(|key| text_of(&server, key).unwrap());
    let values: Vec<String> = values.collect();
    let values: Vec<&str> = values.iter().map(String::as_str).collect();
    let said = release(&mut redis, &twice, &values);
    assert_eq!(ends(&said), ["done"; 16], "also a key that is named twice");
    let after = calls();
    assert_eq!([0, 1, 2].map(|n| after[n] - before[n]), [0, 2, 1]);
    assert_eq!(ask(&server, &["EXISTS", "a", "h"]), Reply::Int(0));
}

/// The whole value is only a short cut: a quorum may have raised the time in the value of a node.
#[test]
fn a_release_by_value_finds_its_lease() {
    let server = server();
    let mut redis = connect(&server);
    let keys = ["same", "later", "other", "missing"];
    let later = value(ONE).replace(MICROS, "1795263780943999");
    for n in [1, keys.len()] {
        for (key, value) in keys.iter().zip([&value(ONE), &later, &value(TWO)]) {
            ask(&server, &["SET", key, value, "PX", TTL]);
        }
        let said = keys.chunks(n);
        let said = said.flat_map(|keys| release(&mut redis, keys, &vec![&*value(ONE); keys.len()]));
        let said: Vec<Said> = said.collect();
        assert_eq!(ends(&said), ["done", "done", "taken", "missing"], "{n}");
        let exist = keys.map(|key| ask(&server, &["EXISTS", key]));
        assert_eq!(exist, [0, 0, 1, 0].map(Reply::Int), "{n}");
    }
}

#[test]
fn force_notifies_each_owner_of_many_keys() {
    let server = server();
    let (mut redis, mut clients) = (connect(&server), connect(&server));
    let mut subscriber = listen(&mut clients, &["host/1/0".to_owned()]);
    let keys = ["a", "b", "c", "d", "e", "f", "g", "h"];
    for key in keys {
        ask(&server, &["SET", key, &value(ONE), "PX", TTL]);
    }
    let by_force = format!("{ONE}!host/2/0");
    let said = release(&mut redis, &keys, &[&*by_force; 8]);
    assert_eq!(ends(&said), ["done"; 8]);
    assert_eq!(received(&server, &mut subscriber).len(), 8);
}

#[test]
fn a_repeated_request_keeps_its_token() {
    let server = server();
    let mut redis = connect(&server);
    let came = granted(&acquire(&mut redis, &["k"])[0]);
    let mut last = came;
    for keys in [["k", "a"], ["b", "k"], ["c", "c"]] {
        let said = acquire(&mut redis, &keys);
        for (said, key) in said.iter().zip(keys) {
            let token = granted(said);
            let value = text_of(&server, key).unwrap();
            assert_eq!(value.split(' ').nth(2), Some(&*token.to_string()), "{key}");
            if key == "k" {
                assert_eq!(token, came);
            } else {
                assert!(token >= last, "{token} after {last}");
                last = token;
            }
        }
    }
}

#[test]
fn uniform_results_are_returned_once() {
    let server = server();
    let mut redis = connect(&server);
    let keys = ["a", "b", "c"];
    let fenced = [&[FENCE][..], &keys].concat();
    let (wants, renews) = ([TWO, TTL, ""].repeat(3), [ONE, TTL].repeat(3));
    let wants = [&["host/1/0"][..], &wants].concat();
    for missing in [None, Some("a"), Some("b"), Some("c")] {
        let all = missing.is_none();
        acquire(&mut redis, &keys);
        ask(&server, &["DEL", missing.unwrap_or("")]);
        let renewed = answer(&mut redis, &RENEW, &keys, &renews);
        let released = answer(&mut redis, &RELEASE, &fenced, &[ONE; 3]);
        for said in [renewed, released] {
            let one = if all { 1 } else { 3 };
            assert_eq!((said.len(), ends(&said).contains(&"missing")), (one, !all));
        }
        ask(&server, &["SET", missing.unwrap_or(""), "not ours"]);
        let asked = answer(&mut redis, &ACQUIRE, &fenced, &wants);
        let kinds = kinds(&asked);
        assert_eq!(
            (kinds.len(), kinds.contains(&"foreign")),
            if all { (1, false) } else { (3, true) }
        );
        ask(&server, &["FLUSHALL"]);
    }
}

//! lua/inspect.lua: what it shows of a lock's key, and that it changes nothing.

use super::{
    INSPECT, ONE, Said, TTL, call, connect, foreign_type, queue_up, text_of, ttl_of, value,
};
use crate::support::{ask, changes, server};

#[test]
fn inspect_returns_value_and_ttl_of_each_key() {
    let server = server();
    let mut redis = connect(&server);
    let contended = queue_up(&mut redis, "queued", &[TTL, "0"]);
    ask(&server, &["SET", "endless", &value(ONE)]);
    ask(&server, &["SET", "text", "a\nb\u{e9}"]);
    ask(&server, &["SET", "empty", ""]);
    ask(&server, &["SET", "long", &"x".repeat(500)]);
    ask(&server, &["RPUSH", "list", "theirs"]);
    let keys = ["queued", "none", "endless", "text", "empty", "long", "list"];
    let together = call(&mut redis, &INSPECT, &keys, &[]);

    let text = together[0].text();
    let [left, queued, found] = *text.splitn(3, ' ').collect::<Vec<_>>() else {
        panic!("{together:?}");
    };
    assert!((1..=60_000).contains(&left.parse().unwrap()), "{left}");
    assert_eq!((queued, found), ("2", &*contended));
    let wanted = [Said::Number(0), Said::Text(format!("-1 0 {}", value(ONE)))];
    for (said, wanted) in together[1..].iter().zip(&wanted) {
        assert_eq!(said.text().trim_end(), wanted.text().trim_end());
    }
    let foreign = together[3..].iter().map(|said| foreign_type(&said.text()));
    assert_eq!(
        foreign.collect::<Vec<_>>(),
        ["string", "string", "string", "list"]
    );

    let alone = keys[1..]
        .iter()
        .flat_map(|key| call(&mut redis, &INSPECT, &[key], &[]));
    assert_eq!(alone.collect::<Vec<_>>(), together[1..]);
}

#[test]
fn inspect_changes_nothing_and_needs_no_memory() {
    let server = server();
    let mut redis = connect(&server);
    let value = queue_up(&mut redis, "k", &[TTL]);
    ask(&server, &["SET", "none~queue", "no queue"]);
    ask(&server, &["SET", "endless", &value]);
    ask(&server, &["CONFIG", "SET", "maxmemory", "1"]);
    let (before, left) = (changes(&server), ttl_of(&server, "k"));
    for _ in 0..100 {
        let said = call(&mut redis, &INSPECT, &["k", "endless", "none"], &[]);
        assert!(!matches!(said[0], Said::Error(_)), "{said:?}");
    }
    assert_eq!(changes(&server), before);
    assert!(ttl_of(&server, "k") <= left);
    assert_eq!(ttl_of(&server, "endless"), -1, "no ttl is set");
    assert_eq!(text_of(&server, "k"), Some(value));
}

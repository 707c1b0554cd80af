//! Fenced values: which writes the script accepts, and what it reads afterwards.

use leasehold_testbed::Reply;
use redis::Connection;

use super::{READ, Said, WRITE, call, connect, say};
use crate::support::{ask, server};

/// The longest value, in bytes, that the readers of these tests accept.
const LONGEST: &str = "2000000";

fn write(connection: &mut Connection, key: &str, token: u64, text: &str) -> Said {
    change(connection, key, token, "", text)
}

fn delete(connection: &mut Connection, key: &str, token: u64) -> Said {
    change(connection, key, token, "-", "")
}

fn change(connection: &mut Connection, key: &str, token: u64, mode: &str, text: &str) -> Said {
    let token = format!("{token:020}");
    call(connection, &WRITE, &[key], &[&token, mode, text]).remove(0)
}

fn read(connection: &mut Connection, key: &str) -> Said {
    call(connection, &READ, &[key], &[LONGEST]).remove(0)
}

#[test]
fn a_write_is_accepted_unless_its_token_is_smaller() {
    let server = server();
    let mut redis = connect(&server);
    let edges = [0, 1, 9, 10, 1 << 53, 1 << 63, u64::MAX - 1, u64::MAX];
    let near = |edge: u64| (edge.saturating_sub(2)..=edge.saturating_add(2)).collect::<Vec<_>>();
    let mut tokens: Vec<u64> = edges.into_iter().flat_map(near).collect();
    tokens.sort_unstable();
    tokens.dedup();
    for (n, seen) in tokens.iter().enumerate() {
        for (m, token) in tokens.iter().enumerate() {
            ask(&server, &["DEL", "v"]);
            assert_eq!(write(&mut redis, "v", *seen, "before"), Said::Number(1));
            let said = write(&mut redis, "v", *token, "after");
            if m < n {
                assert_eq!(said, Said::Text(format!("{seen:020}")), "{token}");
            } else {
                assert_eq!(said, Said::Number(1), "{token} after {seen}");
            }
            let text = if m < n { "before" } else { "after" };
            assert_eq!(read(&mut redis, "v"), Said::Text(text.to_owned()));
            let kept = ask(&server, &["HGET", "v", "token"]);
            assert_eq!(kept.to_string(), format!("{:020}", seen.max(token)));
        }
    }
}

#[test]
fn a_value_comes_back_byte_for_byte() {
    let server = server();
    let mut redis = connect(&server);
    let every_byte: Vec<u8> = (0..=255).collect();
    for value in [
        &b""[..],
        b"0",
        b"\r\n$3\r\nabc\r\n",
        &every_byte,
        &vec![0xff; 1 << 20],
    ] {
        let mut eval = redis::cmd("EVAL");
        eval.arg(WRITE.as_str())
            .arg(1)
            .arg("v")
            .arg(format!("{:020}", 7))
            .arg("");
        let said: i64 = eval.arg(value).query(&mut redis).unwrap();
        assert_eq!(said, 1);
        let mut eval = redis::cmd("EVAL");
        let back: redis::Value = eval
            .arg(READ.as_str())
            .arg(1)
            .arg("v")
            .arg(LONGEST)
            .query(&mut redis)
            .unwrap();
        assert_eq!(back, redis::Value::BulkString(value.to_vec()));
    }
}

#[test]
fn foreign_values_are_neither_written_nor_read() {
    let server = server();
    let mut redis = connect(&server);
    let digits = "1".repeat(20);
    for foreign in [
        "SET v theirs",
        "RPUSH v theirs",
        "HSET v name theirs",
        "HSET v value theirs",
        "HSET v token 17 value theirs",
        "HSET v token 000000000000000000001 value theirs",
        "HSET v token 0000000000000000000a value theirs",
        "HSET v token 0000000000000000000\u{e9} value theirs",
        "HSET v token -0000000000000000001 value theirs",
        "HSET v token 18446744073709551616 value theirs",
        "HSET v token 99999999999999999999 value theirs",
    ] {
        ask(&server, &["DEL", "v"]);
        say(&server, foreign);
        let before = ask(&server, &["DUMP", "v"]).to_string();
        for said in [
            write(&mut redis, "v", u64::MAX, "ours"),
            delete(&mut redis, "v", u64::MAX),
            change(&mut redis, "v", u64::MAX, "5000", "ours"),
            read(&mut redis, "v"),
        ] {
            let Said::Error(text) = &said else {
                panic!("{foreign}: {said:?}");
            };
            let kind = match &foreign[..4] {
                "SET " => "string",
                "RPUS" => "list",
                _ => "hash",
            };
            assert_eq!(*text, format!("FOREIGN {kind}"), "{foreign}");
        }
        assert_eq!(ask(&server, &["DUMP", "v"]).to_string(), before);
    }
    // Together with other keys, too.
    ask(&server, &["SET", "x", "theirs"]);
    let args = [&*digits, "", "a", &digits, "", "b", &digits, "", "c"];
    let said = call(&mut redis, &WRITE, &["a", "x", "c"], &args);
    assert!(matches!(said[1], Said::Error(_)), "{said:?}");
    assert_eq!([&said[0], &said[2]], [&Said::Number(1); 2]);
    let said = call(&mut redis, &READ, &["a", "x", "none", "c"], &[LONGEST]);
    assert!(matches!(said[1], Said::Error(_)), "{said:?}");
    assert_eq!(
        [&said[0], &said[2], &said[3]],
        [
            &Said::Text("a".to_owned()),
            &Said::Number(0),
            &Said::Text("c".to_owned())
        ]
    );
}

#[test]
fn a_value_longer_than_accepted_is_an_error_of_its_key() {
    let server = server();
    let mut redis = connect(&server);
    for (key, text) in [("a", "12345"), ("b", "123456"), ("c", "")] {
        write(&mut redis, key, 1, text);
    }
    let said = call(&mut redis, &READ, &["a", "b", "c", "none"], &["5"]);
    assert_eq!(
        [&said[0], &said[2], &said[3]],
        [
            &Said::Text("12345".to_owned()),
            &Said::Text(String::new()),
            &Said::Number(0)
        ]
    );
    assert_eq!(
        said[1].text(),
        "TOOLARGE a string of 6 bytes: longest reply 5 bytes (`max_reply_bytes`)"
    );
}

#[test]
fn refusals_are_not_mistaken_for_foreign_values() {
    let server = server();
    let mut redis = connect(&server);
    for denied in ["hstrlen", "exists"] {
        ask(
            &server,
            &["ACL", "SETUSER", "default", &format!("-{denied}")],
        );
        for said in [write(&mut redis, "v", 1, "a"), read(&mut redis, "v")] {
            assert!(matches!(said, Said::Error(_)), "{denied}: {said:?}");
            assert!(!said.text().contains("FOREIGN"), "{denied}: {said:?}");
        }
        ask(
            &server,
            &["ACL", "SETUSER", "default", &format!("+{denied}")],
        );
    }
    assert_eq!(ask(&server, &["EXISTS", "v"]), Reply::Int(0));
    write(&mut redis, "v", 1, "a");
    ask(&server, &["ACL", "SETUSER", "default", "-hget"]);
    for said in [write(&mut redis, "v", 2, "b"), read(&mut redis, "v")] {
        assert!(matches!(said, Said::Error(_)), "{said:?}");
        assert!(!said.text().contains("FOREIGN"), "{said:?}");
    }
    ask(&server, &["ACL", "SETUSER", "default", "+hget"]);
    ask(&server, &["CONFIG", "SET", "maxmemory", "1"]);
    let said = write(&mut redis, "v", 2, "b");
    assert!(said.text().starts_with("OOM"), "{said:?}");
    assert_eq!(read(&mut redis, "v"), Said::Text("a".to_owned()));
}

#[test]
fn a_value_keeps_its_ttl_until_a_write_sets_another() {
    let server = server();
    let mut redis = connect(&server);
    let ttl = || ask(&server, &["PTTL", "v"]).as_int().unwrap();
    write(&mut redis, "v", 1, "a");
    assert_eq!(ttl(), -1);
    for mode in ["60000", "-60000"] {
        ask(&server, &["DEL", "v"]);
        assert_eq!(change(&mut redis, "v", 1, mode, "a"), Said::Number(1));
        assert!((50_000..=60_000).contains(&ttl()), "{mode}: {}", ttl());
        for set in [write(&mut redis, "v", 2, "b"), delete(&mut redis, "v", 2)] {
            assert_eq!(set, Said::Number(1));
            assert!((50_000..=60_000).contains(&ttl()), "{mode}: {}", ttl());
        }
        change(&mut redis, "v", 2, "600000", "c");
        assert!(ttl() > 60_000, "{mode}: {}", ttl());
        // A refused write does not change the ttl.
        change(&mut redis, "v", 1, "50", "late");
        assert!(ttl() > 60_000, "{mode}: {}", ttl());
    }
}

#[test]
fn a_deleted_value_keeps_its_token() {
    let server = server();
    let mut redis = connect(&server);
    let stale = |token: u64| Said::Text(format!("{token:020}"));
    // The value was written before, or never.
    for written in [false, true] {
        ask(&server, &["DEL", "v"]);
        if written {
            write(&mut redis, "v", 5, "a");
            assert_eq!(delete(&mut redis, "v", 4), stale(5));
            assert_eq!(read(&mut redis, "v"), Said::Text("a".to_owned()));
        }
        assert_eq!(delete(&mut redis, "v", 7), Said::Number(1));
        assert_eq!(read(&mut redis, "v"), Said::Number(0));
        assert_eq!(write(&mut redis, "v", 6, "late"), stale(7));
        assert_eq!(delete(&mut redis, "v", 6), stale(7));
        assert_eq!(read(&mut redis, "v"), Said::Number(0));
        // The holder of token 7 may delete the value a second time, and may write it again.
        assert_eq!(delete(&mut redis, "v", 7), Said::Number(1));
        assert_eq!(write(&mut redis, "v", 7, ""), Said::Number(1));
        assert_eq!(read(&mut redis, "v"), Said::Text(String::new()));
    }
}

#[test]
fn a_half_refused_deletion_still_refuses_older_tokens() {
    let server = server();
    let mut redis = connect(&server);
    write(&mut redis, "v", 5, "a");
    ask(&server, &["ACL", "SETUSER", "default", "-hdel"]);
    let said = delete(&mut redis, "v", 7);
    assert!(matches!(said, Said::Error(_)), "{said:?}");
    let late = write(&mut redis, "v", 6, "late");
    assert_eq!(late, Said::Text(format!("{:020}", 7)));
    assert_eq!(read(&mut redis, "v"), Said::Text("a".to_owned()));
}

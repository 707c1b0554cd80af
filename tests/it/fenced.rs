//! Fenced values: they refuse writes under an older fencing token.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use leasehold::{Client, ErrorKind};
use leasehold_testbed::{Proxy, Server, eventually};

use crate::child::{Child, Parent};
use crate::steady::steady;
use crate::support::{
    SOON, Task, ask, bytes_sent, connections_made, in_redis, is_held, kill_connections, millis,
    script_calls, secs, server, within,
};

/// The limit for all work of a test, on a busy machine.
const WORK: Duration = Duration::from_secs(120);
const ROUNDS: usize = 40;

fn client(server: &Server) -> Client {
    steady(&server.url()).build().unwrap()
}

/// The number in a value; 0 if it was never written.
fn number(client: &Client, name: &str) -> u64 {
    let value = client.fenced_value(name).read().unwrap();
    value.map_or(0, |value| {
        String::from_utf8(value).unwrap().parse().unwrap()
    })
}

/// Writes the token under the lock, over and over, and sometimes the token before.
fn write_tokens(client: &Client) {
    let (mutex, value) = (client.mutex("k"), client.fenced_value("k"));
    let mut before = None;
    for _ in 0..ROUNDS {
        let guard = mutex.lock().unwrap();
        let token = guard.fencing_token();
        value.write(token, token.to_string()).unwrap();
        assert_eq!(number(client, "k"), token);
        if let Some(before) = before.replace(token) {
            let refused = value.write(before, "stale").unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::StaleToken, "{refused}");
        }
    }
}

pub fn write_tokens_in_a_process_of_its_own(parent: &Parent) {
    let client = steady(&parent.url).build().unwrap();
    write_tokens(&client);
    parent.tell(number(&client, "k"));
    parent.wait_for_end();
}

#[test]
fn the_last_token_wins_and_reads_never_go_back() {
    let server = server();
    let client = client(&server);
    let children =
        [(); 2].map(|()| Child::start(write_tokens_in_a_process_of_its_own, &server.url()));
    let done = Arc::new(AtomicBool::new(false));
    let reader = {
        let (client, done) = (client.clone(), Arc::clone(&done));
        Task::start(move || {
            let mut last = 0;
            while !done.load(Ordering::Relaxed) {
                let now = number(&client, "k");
                assert!(last <= now, "{now} after {last}");
                last = now;
            }
        })
    };
    let writers: Vec<_> = (0..4)
        .map(|_| {
            let client = client.clone();
            Task::start(move || write_tokens(&client))
        })
        .collect();
    for writer in writers {
        writer.within(WORK, "writing");
    }
    for child in children {
        child.receive::<u64>(WORK);
        child.finish(SOON);
    }
    done.store(true, Ordering::Relaxed);
    reader.within(SOON, "reading");
    let next = client.mutex("k").lock().unwrap().fencing_token();
    assert!(number(&client, "k") < next);
}

/// No lock orders these writes. Only the comparison in Redis does.
#[test]
fn the_write_with_the_greatest_token_stays() {
    let server = server();
    let clients = [(); 3].map(|()| client(&server));
    let base = u64::MAX - 200;
    thread::scope(|scope| {
        for n in 0..12 {
            let value = clients[n % 3].fenced_value("v");
            scope.spawn(move || {
                for step in 0..16 {
                    // The tokens of each thread go up and down.
                    let token = base + (step * 7 % 16) * 12 + n as u64;
                    match value.write(token, token.to_string()) {
                        Ok(()) => {}
                        Err(error) => assert_eq!(error.kind(), ErrorKind::StaleToken, "{error}"),
                    }
                }
            });
        }
    });
    assert_eq!(number(&clients[0], "v"), base + 15 * 12 + 11);
}

#[test]
fn stale_writes_fail_with_both_tokens() {
    let server = server();
    let client = client(&server);
    let value = client.fenced_value("v");
    assert_eq!(value.read().unwrap(), None);
    value.write(1 << 53, "a").unwrap();
    value.write(1 << 53, "b").unwrap();
    let error = value.write((1 << 53) - 1, "c").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::StaleToken);
    assert_eq!(error.key(), Some("v"));
    let text = error.to_string();
    assert!(
        text.contains("9007199254740992") && text.contains("9007199254740991"),
        "{text}"
    );
    assert!(!error.is_unavailable() && !error.is_lease_lost());
    assert_eq!(value.read().unwrap().as_deref(), Some(&b"b"[..]));
    value.write((1 << 53) + 1, "d").unwrap();
    assert!(
        value.write(1 << 53, "e").is_err(),
        "doubles cannot tell them apart"
    );
    value.write(u64::MAX, "f").unwrap();
    assert!(value.write(u64::MAX - 1, "g").is_err());
    assert_eq!(value.read().unwrap().as_deref(), Some(&b"f"[..]));
}

#[test]
fn values_are_returned_byte_for_byte() {
    let server = server();
    let client = client(&server);
    let every_byte: Vec<u8> = (0..=255).collect();
    let values = [Vec::new(), b"\r\n".to_vec(), every_byte, vec![0; 1 << 20]];
    thread::scope(|scope| {
        for n in 0..8 {
            let (client, values) = (&client, &values);
            scope.spawn(move || {
                let fenced = client.fenced_value(format!("v{n}"));
                for (token, bytes) in (1..).zip(values) {
                    fenced.write(token, bytes).unwrap();
                    assert_eq!(fenced.read().unwrap().as_ref(), Some(bytes));
                }
            });
        }
    });
}

#[test]
fn values_and_locks_may_share_a_name() {
    let server = server();
    let client = client(&server);
    let value = client.fenced_value("k");
    let guard = client.mutex("k").lock().unwrap();
    value.write(guard.fencing_token(), "a").unwrap();
    guard.unlock().unwrap();
    assert!(!is_held(&server, "k") && !client.mutex("k").is_locked().unwrap());
    assert_eq!(value.read().unwrap().as_deref(), Some(&b"a"[..]));
    let key = in_redis("~value:k");
    assert_eq!(ask(&server, &["HGET", &key, "value"]).as_text(), Some("a"));
    assert_eq!(ask(&server, &["PTTL", &key]).as_int(), Some(-1));
    let other = steady(&server.url()).prefix("other:").build().unwrap();
    assert_eq!(other.fenced_value("k").read().unwrap(), None);
}

#[test]
fn names_follow_the_rules_of_keys() {
    let server = server();
    let client = client(&server);
    for name in ["", "~fence", "a\nb", &"x".repeat(1_025)] {
        let value = client.fenced_value(name);
        for error in [value.write(1, "a").unwrap_err(), value.read().unwrap_err()] {
            assert_eq!(error.kind(), ErrorKind::InvalidKey, "{name:?}: {error}");
        }
    }
    assert_eq!(ask(&server, &["DBSIZE"]).as_int(), Some(0));
    client
        .fenced_value("x".repeat(1_024))
        .write(1, "a")
        .unwrap();
}

#[test]
fn foreign_values_are_left_alone() {
    let server = server();
    let client = client(&server);
    let value = client.fenced_value("v");
    let key = in_redis("~value:v");
    for command in [
        &["SET", &key, "theirs"][..],
        &["HSET", &key, "value", "theirs"],
        &["HSET", &key, "token", "17", "value", "theirs"],
    ] {
        ask(&server, &["DEL", &key]);
        ask(&server, command);
        for error in [value.write(1, "a").unwrap_err(), value.read().unwrap_err()] {
            assert_eq!(error.kind(), ErrorKind::Protocol, "{command:?}: {error}");
            assert_eq!(error.key(), Some("v"));
        }
    }
    assert_eq!(
        ask(&server, &["HGET", &key, "value"]).as_text(),
        Some("theirs")
    );
}

/// Any user with the right to write can write such a value.
#[test]
fn a_token_too_great_for_u64_costs_no_connection() {
    const TOO_GREAT: [&str; 2] = ["18446744073709551616", "99999999999999999999"];
    let server = server();
    let client = client(&server);
    let value = client.fenced_value("v");
    value.write(u64::MAX, "ours").unwrap();
    for token in TOO_GREAT {
        ask(&server, &["HSET", &in_redis("~value:v"), "token", token]);
        let made = connections_made(&server, || {
            for _ in 0..100 {
                for error in [
                    value.write(u64::MAX, "a").unwrap_err(),
                    value.read().unwrap_err(),
                ] {
                    assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
                    assert_eq!(error.key(), Some("v"));
                    assert!(error.to_string().ends_with(", but a hash"), "{error}");
                }
            }
        });
        assert_eq!(made, 0);
    }
}

#[test]
fn a_write_may_be_repeated_after_an_outage() {
    let mut server = server();
    let builder = steady(&server.url()).command_timeout(secs(2));
    let client = builder.connect_timeout(secs(3)).build().unwrap();
    let value = client.fenced_value("v");
    value.write(1, "a").unwrap();
    server.stop();
    let stopped = value.clone();
    let errors = within(2 * SOON, "the end of the wait", move || {
        [
            stopped.write(2, "b").unwrap_err(),
            stopped.read().unwrap_err(),
        ]
    });
    for error in errors {
        assert!(error.is_unavailable(), "{error}");
        assert_eq!(error.key(), Some("v"));
    }
    server.resume();
    let again = value.clone();
    within(SOON, "writing again", move || {
        while let Err(error) = again.write(2, "b") {
            assert!(error.is_unavailable(), "{error}");
        }
    });
    assert_eq!(value.read().unwrap().as_deref(), Some(&b"b"[..]));
    server.kill();
    assert!(value.read().unwrap_err().is_unavailable());
    client.shutdown(secs(5)).unwrap();
    assert_eq!(value.write(3, "c").unwrap_err().kind(), ErrorKind::Shutdown);
}

#[test]
fn a_missing_permission_is_an_error() {
    let server = server();
    let client = client(&server);
    let value = client.fenced_value("v");
    value.write(1, "a").unwrap();
    for denied in ["hstrlen", "hget", "hset"] {
        ask(
            &server,
            &["ACL", "SETUSER", "default", &format!("-{denied}")],
        );
        let error = value.write(2, "b").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Denied, "{denied}: {error}");
        ask(
            &server,
            &["ACL", "SETUSER", "default", &format!("+{denied}")],
        );
    }
    value.write(2, "b").unwrap();
}

#[test]
fn a_deletion_follows_the_rule_of_tokens() {
    let server = server();
    let client = client(&server);
    let value = client.fenced_value("v");
    value.write(5, "a").unwrap();
    let error = value.delete(4).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::StaleToken, "{error}");
    assert_eq!(error.key(), Some("v"));
    value.delete(7).unwrap();
    assert_eq!(value.read().unwrap(), None);
    assert_eq!(
        value.write(6, "late").unwrap_err().kind(),
        ErrorKind::StaleToken
    );
    assert_eq!(value.read().unwrap(), None);
    ask(&server, &["ACL", "SETUSER", "default", "-hdel"]);
    value.write(8, "b").unwrap();
    assert_eq!(value.delete(8).unwrap_err().kind(), ErrorKind::Denied);
    assert_eq!(value.read().unwrap().as_deref(), Some(&b"b"[..]));
}

#[test]
fn a_value_expires_together_with_its_token() {
    let server = server();
    let client = client(&server);
    let plain = client.fenced_value("v");
    let expiring = plain.clone().ttl(millis(50));
    for ttl in [millis(9), secs(400 * 24 * 60 * 60 * 10)] {
        let error = plain.clone().ttl(ttl).write(1, "x").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidConfig, "{error}");
        assert_eq!(error.key(), Some("v"));
    }
    for deletes in [false, true] {
        plain.write(7, "a").unwrap();
        match deletes {
            false => expiring.write(7, "b").unwrap(),
            true => expiring.delete(7).unwrap(),
        }
        let gone = || ask(&server, &["EXISTS", &in_redis("~value:v")]).as_int() == Some(0);
        assert!(eventually(SOON, gone));
        assert_eq!(plain.read().unwrap(), None);
        plain.write(1, "any token").unwrap();
        ask(&server, &["DEL", &in_redis("~value:v")]);
    }
}

/// Another thread may write later under the same token. A late repetition would undo its write.
#[test]
fn a_write_without_reply_is_not_repeated() {
    let server = server();
    let proxy = Proxy::start(server.port()).unwrap();
    let client = steady(&proxy.url()).pipelines(1).build().unwrap();
    let value = client.fenced_value("v");
    value.write(1, "a").unwrap();
    let before = script_calls(&server);
    proxy.hold_replies(true);
    let lost = value.clone();
    let task = Task::start(move || lost.write(2, "b"));
    assert!(eventually(SOON, || script_calls(&server) > before));
    proxy.cut_all();
    proxy.hold_replies(false);
    let error = task.within(SOON, "writing").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert_eq!(error.key(), Some("v"));
    assert_eq!(script_calls(&server), before + 1);
    assert_eq!(value.read().unwrap().as_deref(), Some(&b"b"[..]));
    value.write(2, "c").unwrap();
    assert_eq!(value.read().unwrap().as_deref(), Some(&b"c"[..]));
}

#[test]
fn a_write_cut_anywhere_happens_once_at_most() {
    let server = server();
    for n in (0..260).step_by(13) {
        let proxy = Proxy::start(server.port()).unwrap();
        let client = steady(&proxy.url()).pipelines(1).build().unwrap();
        let value = client.fenced_value(format!("v{n}"));
        assert_eq!(value.read().unwrap(), None);
        let before = script_calls(&server);
        proxy.cut_after(Some(n));
        let first = value.write(1, "a");
        proxy.cut_after(None);
        assert!(script_calls(&server) <= before + 1, "cut at {n}");
        if let Err(error) = first {
            assert_eq!(error.kind(), ErrorKind::Unavailable, "{n}: {error}");
            value.write(1, "a").unwrap();
        }
        assert_eq!(value.read().unwrap().as_deref(), Some(&b"a"[..]), "{n}");
    }
}

/// The client has not noticed that the connection is dead, so it sends the write, and the outcome is unknown.
#[test]
fn a_write_on_a_dead_connection_is_retried() {
    let server = server();
    let client = client(&server);
    let value = client.fenced_value("v");
    for token in 1..=5 {
        value.write(token, "a").unwrap();
        kill_connections(&server);
        let error = value.write(token, "b").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        assert_eq!(value.read().unwrap().as_deref(), Some(&b"a"[..]));
        value.write(token, "b").unwrap();
        assert_eq!(value.read().unwrap().as_deref(), Some(&b"b"[..]));
    }
}

#[test]
fn a_long_value_is_not_copied_by_redis() {
    let server = server();
    let key = in_redis("~value:k");
    let grow = "redis.call('HSET', KEYS[1], 'token', ARGV[1], 'value', string.rep('x', ARGV[2]))";
    let token = format!("{:020}", 1);
    ask(&server, &["EVAL", grow, "1", &key, &token, "20000000"]);
    let client = client(&server);
    client.fenced_value("other").write(1, "theirs").unwrap();
    let before = bytes_sent(&server);
    let error = client.fenced_value("k").read().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TooLarge, "{error}");
    assert!(error.to_string().contains("max_reply_bytes"), "{error}");
    let other = client.fenced_value("other").read().unwrap();
    assert_eq!(other.as_deref(), Some(&b"theirs"[..]));
    assert!(bytes_sent(&server) - before < 1_000_000);
}

#[test]
fn a_value_beyond_the_limit_names_it() {
    const LIMIT: usize = 256 * 1024;
    let server = server();
    let limited = steady(&server.url())
        .max_reply_bytes(LIMIT)
        .build()
        .unwrap();
    let value = limited.fenced_value("k");
    value.write(1, vec![b'x'; LIMIT]).unwrap();
    let made = connections_made(&server, || {
        let error = value.read().unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TooLarge, "{error}");
        assert!(error.to_string().contains("max_reply_bytes"), "{error}");
        assert!(error.to_string().contains(&LIMIT.to_string()), "{error}");
        value.write(2, "short").unwrap();
        assert_eq!(value.read().unwrap().as_deref(), Some(&b"short"[..]));
        value.write(3, vec![b'x'; LIMIT]).unwrap();
    });
    assert_eq!(made, 0);
    let read = client(&server).fenced_value("k").read().unwrap();
    assert_eq!(read.map(|value| value.len()), Some(LIMIT));
}

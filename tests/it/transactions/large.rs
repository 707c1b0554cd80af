//! Replies beyond `max_reply_bytes`.

use leasehold::redis::{self, Commands, RedisError};
use leasehold::{Client, Error, ErrorKind};
use leasehold_testbed::{Server, eventually};

use super::{DATA, assert_writes, data, silent_server};
use crate::steady::steady;
use crate::support::{LONG_TTL, SOON, ask, connections_made, notified_clients, server};

const LIMIT: usize = 256 * 1024;
const LARGE: &str = "large";

fn limited(server: &Server) -> Client {
    let builder = steady(&server.url()).ttl(LONG_TTL);
    builder.max_reply_bytes(LIMIT).build().unwrap()
}

/// Writes a string of `len` bytes.
fn put(server: &Server, key: &str, len: usize) {
    ask(server, &["SETRANGE", key, &(len - 1).to_string(), "x"]);
}

#[track_caller]
fn assert_names_the_limit(error: &Error) {
    assert_eq!(error.kind(), ErrorKind::TooLarge, "{error}");
    let text = error.to_string();
    assert!(text.contains("max_reply_bytes"), "{text}");
    assert!(text.contains(&LIMIT.to_string()), "{text}");
}

#[test]
fn a_string_beyond_the_limit_is_an_error_of_its_command() {
    let server = server();
    put(&server, LARGE, 8 * LIMIT);
    let client = limited(&server);
    let guard = client.mutex("k").lock().unwrap();
    let read = guard.transaction(|conn, _| conn.get::<_, Vec<u8>>(LARGE));
    assert_names_the_limit(&read.unwrap_err());
    // The connection for notifications is made meanwhile.
    assert!(eventually(SOON, || notified_clients(&server) == 1));
    let seen = || {
        guard.transaction(|conn, _| {
            let error: RedisError = conn.get::<_, Vec<u8>>(LARGE).unwrap_err();
            // The next command is answered on the same connection.
            conn.get::<_, Option<String>>(DATA)?;
            Ok(error)
        })
    };
    let mut seen_error = None;
    let made = connections_made(&server, || seen_error = Some(seen().unwrap().value));
    assert_eq!(made, 0);
    let error = seen_error.unwrap();
    assert_eq!(error.code(), Some("TOOLARGE"), "{error}");
    assert!(error.to_string().contains("max_reply_bytes"), "{error}");
    assert_writes(&server, &guard);
}

#[test]
fn an_array_beyond_the_limit_names_it() {
    let server = server();
    let script = "for i = 1, 100 do redis.call('RPUSH', 'list', unpack(redis.call('TIME'))) end \
         for i = 1, 8 do for _, x in ipairs(redis.call('LRANGE', 'list', 0, 799)) do \
         redis.call('RPUSH', 'list', x) end end";
    ask(&server, &["EVAL", script, "0"]);
    let client = limited(&server);
    let guard = client.mutex("k").lock().unwrap();
    let read = guard.transaction(|conn, _| conn.lrange::<_, Vec<String>>("list", 0, -1));
    assert_names_the_limit(&read.unwrap_err());
    assert_writes(&server, &guard);
}

#[test]
fn the_replies_to_a_pipeline_share_the_limit() {
    let server = server();
    put(&server, LARGE, LIMIT / 2);
    let client = limited(&server);
    let guard = client.mutex("k").lock().unwrap();
    for (times, fits) in [(1, true), (2, false)] {
        let read = guard.transaction(|conn, _| {
            let mut reads = redis::pipe();
            (0..times).for_each(|_| {
                reads.get(LARGE);
            });
            reads.query::<Vec<Vec<u8>>>(conn)
        });
        assert_eq!(read.is_ok(), fits, "{times}");
        if let Err(error) = read {
            assert_names_the_limit(&error);
        }
    }
    assert_writes(&server, &guard);
}

#[test]
fn a_write_whose_answer_is_too_large_is_done() {
    let server = server();
    put(&server, LARGE, 2 * LIMIT);
    let client = limited(&server);
    let guard = client.mutex("k").lock().unwrap();
    let written = guard.transaction(|_, pipe| {
        pipe.cmd("GETDEL").arg(LARGE).set(DATA, "written");
        Ok(())
    });
    written.unwrap();
    assert_eq!(data(&server).as_deref(), Some("written"));
    assert_eq!(ask(&server, &["EXISTS", LARGE]).as_int(), Some(0));
}

#[test]
fn a_long_value_in_place_of_the_lock_is_a_loss() {
    let server = silent_server();
    let client = limited(&server);
    let guard = client.mutex("k").lock().unwrap();
    ask(&server, &["DEL", "leasehold:k"]);
    put(&server, "leasehold:k", 2 * LIMIT);
    let error = guard.transaction(|_, _| Ok(())).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::LeaseLost, "{error}");
}

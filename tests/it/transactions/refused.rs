//! Refusals by Redis or the library, and closures that fail: nothing is written except what the error says.

use std::error::Error as _;
use std::panic::{AssertUnwindSafe, catch_unwind};

use leasehold::redis::{self, Commands, Pipeline, RedisError, RedisResult};
use leasehold::{Error, ErrorKind, TransactionConnection};
use leasehold_testbed::Server;

use super::{DATA, assert_writes, client, data, set, write};
use crate::steady::steady;
use crate::support::{LONG_TTL, ask, server};

/// The error of Redis or redis-rs.
#[track_caller]
fn source(error: &Error) -> &RedisError {
    let source = error.source().expect("another error came first");
    source.downcast_ref().expect("the error came from redis-rs")
}

#[test]
fn a_failed_write_is_named_and_others_stay() {
    let server = server();
    let client = client(&server);
    let guard = client.mutex("k").lock().unwrap();
    ask(&server, &["LPUSH", "list", "x"]);
    let result = guard.transaction(|_, pipe| {
        pipe.set(DATA, "first")
            .incr("list", 1)
            .append(DATA, " and last");
        Ok(())
    });
    let error = result.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
    assert!(error.to_string().contains("command 2 of 3"), "{error}");
    assert_eq!(source(&error).code(), Some("WRONGTYPE"));
    assert_eq!(data(&server).as_deref(), Some("first and last"));
    assert_writes(&server, &guard);
    guard.unlock().unwrap();
}

#[test]
fn an_unknown_command_prevents_all_writes() {
    let server = server();
    let client = client(&server);
    let guard = client.mutex("k").lock().unwrap();
    let result = guard.transaction(|_, pipe| {
        pipe.set(DATA, "x").cmd("NOSUCH").arg(DATA);
        Ok(())
    });
    let error = result.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
    assert!(error.to_string().contains("NOSUCH"), "{error}");
    assert_eq!(data(&server), None);
    assert_writes(&server, &guard);
}

#[test]
fn without_memory_writes_fail_and_the_lock_stays() {
    let server = server();
    let client = client(&server);
    let guard = client.mutex("k").lock().unwrap();
    ask(&server, &["CONFIG", "SET", "maxmemory", "1"]);
    let error = write(&guard, |_| ()).1.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert_eq!(data(&server), None);
    ask(&server, &["CONFIG", "SET", "maxmemory", "0"]);
    assert_writes(&server, &guard);
}

#[test]
fn an_error_of_the_closure_writes_nothing() {
    let server = server();
    let client = client(&server);
    let guard = client.mutex("k").lock().unwrap();
    ask(&server, &["LPUSH", "list", "x"]);
    let result = guard.transaction(|conn, pipe| {
        pipe.set(DATA, "x");
        conn.get::<_, String>("list")
    });
    let error = result.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
    assert_eq!(error.key(), Some("k"));
    assert_eq!(source(&error).code(), Some("WRONGTYPE"));
    assert_eq!(data(&server), None);
    assert_writes(&server, &guard);
}

#[test]
fn a_panic_in_the_closure_writes_nothing() {
    let server = server();
    let builder = steady(&server.url()).ttl(LONG_TTL).max_transactions(1);
    let client = builder.build().unwrap();
    let guard = client.mutex("k").lock().unwrap();
    for round in 0..3 {
        let panicked = catch_unwind(AssertUnwindSafe(|| {
            guard.transaction::<()>(|conn, pipe| {
                pipe.set(DATA, "x");
                // The closure does not read this reply. No other command may get it.
                conn.set::<_, _, ()>("seen", round)?;
                panic!("a closure's own")
            })
        }));
        assert_eq!(
            *panicked.unwrap_err().downcast::<&str>().unwrap(),
            "a closure's own"
        );
        assert_eq!(data(&server), None);
        guard.check().unwrap();
    }
    assert_writes(&server, &guard);
    guard.unlock().unwrap();
}

type Body = fn(&mut TransactionConnection, &mut Pipeline) -> RedisResult<()>;

#[test]
fn commands_that_end_a_transaction_are_refused() {
    let on_the_connection: [Body; 6] = [
        |conn, _| redis::cmd("UNWATCH").exec(conn),
        |conn, _| redis::cmd("exec").exec(conn),
        |conn, _| redis::cmd("SELECT").arg(1).exec(conn),
        |conn, _| redis::pipe().atomic().set(DATA, "x").exec(conn),
        |conn, _| redis::pipe().set(DATA, "x").cmd("MULTI").exec(conn),
        |conn, _| redis::transaction(conn, &[DATA], |_, _| Ok(Some(()))),
    ];
    let in_the_pipeline: [Body; 4] = [
        |_, pipe| {
            pipe.set(DATA, "x").cmd("EXEC").set(DATA, "y");
            Ok(())
        },
        |_, pipe| {
            pipe.atomic().set(DATA, "x").cmd("Discard");
            Ok(())
        },
        |_, pipe| {
            pipe.cmd("SELECT").arg(1).set(DATA, "x");
            Ok(())
        },
        |_, pipe| {
            pipe.set(DATA, "x").add_command(redis::Cmd::new());
            Ok(())
        },
    ];
    let server = server();
    let client = client(&server);
    let guard = client.mutex("k").lock().unwrap();
    for (n, body) in on_the_connection
        .into_iter()
        .chain(in_the_pipeline)
        .enumerate()
    {
        let error = guard.transaction(body).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{n}: {error}");
        assert_eq!(data(&server), None, "{n}");
    }
    assert_writes(&server, &guard);
    set(&server, "0");
    // An atomic pipeline that writes, and pipelines that read, are accepted, too.
    let read = guard.transaction(|conn, pipe| {
        pipe.atomic().set(DATA, "1");
        let read: (String, String) = redis::pipe().get(DATA).get(DATA).query(conn)?;
        Ok(read)
    });
    assert_eq!(read.unwrap().value, ("0".to_owned(), "0".to_owned()));
    assert_eq!(data(&server).as_deref(), Some("1"));
}

/// The URL of a user who may run every command but `missing`.
fn user(server: &Server, missing: &[&str]) -> String {
    let command = ["ACL", "SETUSER", "limited", "reset", "on", ">secret", "&*"];
    ask(server, &[&command, missing].concat());
    format!("redis://limited:secret@127.0.0.1:{}", server.port())
}

#[test]
fn a_missing_permission_writes_nothing() {
    let server = server();
    for (missing, expected_runs) in [
        (&["~*", "+@all", "-watch"][..], 0),
        (&["~*", "+@all", "-multi"], 0),
        (&["~*", "+@all", "-exec"], 0),
        (&["~*", "+@all", "-lpush"], 1),
        (&["~leasehold:*", "+@all"], 1),
    ] {
        let url = user(&server, missing);
        let client = steady(&url).ttl(LONG_TTL).build().unwrap();
        let guard = client.mutex("k").lock().unwrap();
        let mut runs = 0;
        let result = guard.transaction(|_, pipe| {
            runs += 1;
            pipe.set(DATA, "x").lpush("list", "x");
            Ok(())
        });
        let error = result.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Denied, "{missing:?}: {error}");
        assert_eq!(runs, expected_runs, "{missing:?}");
        assert_eq!(data(&server), None, "{missing:?}");
        guard.unlock().unwrap();
    }
}

#[test]
fn a_permission_revoked_meanwhile_leaves_the_outcome_unknown() {
    let server = server();
    let url = user(&server, &["~*", "+@all"]);
    let client = steady(&url).ttl(LONG_TTL).build().unwrap();
    let guard = client.mutex("k").lock().unwrap();
    let (_, result) = write(&guard, |_| {
        ask(&server, &["ACL", "SETUSER", "limited", "-multi"]);
    });
    let error = result.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
    assert!(error.to_string().contains("NOPERM"), "{error}");
    ask(&server, &["ACL", "SETUSER", "limited", "+multi"]);
    assert_writes(&server, &guard);
}

//! The results of a transaction: the value of its closure, the replies to its pipeline, errors of the
//! caller's own.

use std::error::Error as _;

use leasehold::redis::{self, Commands, RedisError};
use leasehold::{Error, ErrorKind};

use super::{DATA, assert_writes, client, data};
use crate::support::{ask, in_redis, server};

#[derive(Debug)]
enum Own {
    Lacking(u32),
    Lock(Error),
    Redis(RedisError),
}

impl From<Error> for Own {
    fn from(error: Error) -> Self {
        Self::Lock(error)
    }
}

impl From<RedisError> for Own {
    fn from(error: RedisError) -> Self {
        Self::Redis(error)
    }
}

#[test]
fn replies_are_typed_and_leave_out_ignored_commands() {
    let server = server();
    let client = client(&server);
    let guard = client.mutex("k").lock().unwrap();
    let done = guard.transaction(|_, pipe| {
        pipe.set(DATA, 40).ignore().incr(DATA, 2).get(DATA);
        Ok("value")
    });
    let done = done.unwrap();
    assert_eq!(done.value, "value");
    assert_eq!(done.replies::<(i64, String)>().unwrap(), (42, "42".into()));
    // Replies can be read more than once, as each type that fits.
    assert_eq!(done.replies::<Vec<i64>>().unwrap(), [42, 42]);
    let empty = guard.transaction(|_, _| Ok(())).unwrap();
    assert_eq!(empty.replies::<Vec<i64>>().unwrap(), [0; 0]);
    assert_writes(&server, &guard);
}

#[test]
fn replies_of_another_type_are_an_error_after_the_writes() {
    let server = server();
    let client = client(&server);
    let guard = client.mutex("k").lock().unwrap();
    let done = guard.transaction(|_, pipe| {
        pipe.set(DATA, "text").get(DATA);
        Ok(())
    });
    let done = done.expect("everything was written");
    let error = done.replies::<(String, i64)>().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
    assert_eq!(error.key(), Some("k"));
    assert!(error.to_string().contains("was written"), "{error}");
    assert!(error.source().unwrap().is::<RedisError>());
    assert_eq!(data(&server).as_deref(), Some("text"));
    assert!(!format!("{done:?}").contains("text"), "{done:?}");
    assert_writes(&server, &guard);
}

#[test]
fn an_own_error_is_returned_and_nothing_written() {
    let server = server();
    let client = client(&server);
    let guard = client.mutex("k").lock().unwrap();
    ask(&server, &["LPUSH", "list", "x"]);
    let refused = guard.try_transaction(|_, pipe| {
        pipe.set(DATA, "x");
        Err::<(), _>(Own::Lacking(7))
    });
    assert!(matches!(refused, Err(Own::Lacking(7))), "{refused:?}");
    let unread = guard.try_transaction::<_, Own>(|conn, pipe| {
        pipe.set(DATA, "x");
        Ok(conn.get::<_, String>("list")?)
    });
    let Err(Own::Redis(error)) = unread else {
        panic!("{unread:?}");
    };
    assert_eq!(error.code(), Some("WRONGTYPE"));
    assert_eq!(data(&server), None);
    let done = guard.try_transaction::<_, Own>(|_, pipe| {
        pipe.incr("n", 5);
        Ok(())
    });
    assert_eq!(done.unwrap().replies::<(u32,)>().unwrap(), (5,));
    assert_writes(&server, &guard);
}

#[test]
fn errors_of_the_library_become_own_errors() {
    let server = server();
    let client = client(&server);
    let guard = client.mutex("k").lock().unwrap();
    let written = guard.try_transaction::<(), Own>(|_, pipe| {
        pipe.cmd("SELECT").arg(1);
        Ok(())
    });
    let Err(Own::Lock(error)) = written else {
        panic!("{written:?}");
    };
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert_eq!(error.key(), Some("k"));
    ask(&server, &["DEL", &in_redis("k")]);
    let lost = guard.try_transaction::<(), Own>(|_, _| panic!("the lock is lost"));
    let Err(Own::Lock(error)) = lost else {
        panic!("{lost:?}");
    };
    assert!(error.is_lease_lost(), "{error}");
    // If the client knows of a loss, the loss comes before the error of a closure.
    let guard = client.mutex("k").lock().unwrap();
    let lost = guard.try_transaction(|_, _| {
        client.shutdown(crate::support::SOON).unwrap();
        Err::<(), _>(Own::Lacking(1))
    });
    assert!(matches!(lost, Err(Own::Lock(error)) if error.is_lease_lost()));
}

#[test]
fn an_oversized_reply_fails_after_the_writes() {
    let server = server();
    let limit = 256 * 1024;
    let builder = leasehold::Client::builder(server.url()).max_reply_bytes(limit);
    let client = builder.build().unwrap();
    let guard = client.mutex("k").lock().unwrap();
    let done = guard.transaction(|_, pipe| {
        pipe.set(DATA, vec![b'x'; 2 * limit]).get(DATA);
        Ok(())
    });
    let error = done.unwrap().replies::<(String, String)>().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TooLarge, "{error}");
    assert_eq!(
        ask(&server, &["STRLEN", DATA]).as_int(),
        Some(2 * limit as i64)
    );
}

#[test]
fn replies_belong_to_the_committed_run() {
    let server = server();
    let client = client(&server);
    let guard = client.mutex("k").lock().unwrap();
    let mut runs = 0;
    let done = guard.transaction(|conn, pipe| {
        runs += 1;
        redis::cmd("WATCH").arg(DATA).exec(conn)?;
        if runs == 1 {
            ask(&server, &["SET", DATA, "1"]);
        }
        pipe.incr(DATA, runs);
        Ok(())
    });
    assert_eq!(done.unwrap().replies::<(i64,)>().unwrap(), (3,));
}

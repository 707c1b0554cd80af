//! A replica may be behind its primary. So a script that runs on a replica does not say whether a lock is held.

use redis::Connection;

use super::{
    ADOPT, FENCE, MICROS, ONE, RELEASE, RENEW, Said, TTL, TWO, acquire, acquire_as, call, connect,
    queue_up, ttl_of, value,
};
use crate::support::{ask, changes, server};

/// Calls the scripts that release, renew and adopt for `key`, under the lease [`TWO`], which does not hold it.
fn said(connection: &mut Connection, key: &str) -> [Said; 3] {
    let one = |mut said: Vec<Said>| said.remove(0);
    [
        one(call(connection, &RELEASE, &[FENCE, key], &[TWO])),
        one(call(connection, &RENEW, &[key], &[TWO, TTL])),
        one(call(
            connection,
            &ADOPT,
            &[key],
            &["h", TWO, MICROS, ONE, TTL],
        )),
    ]
}

#[test]
fn a_replica_never_reports_a_deleted_lock() {
    let server = server();
    let mut connection = connect(&server);
    acquire(&mut connection, &["taken"]);
    let value = ask(&server, &["GET", "taken"]);
    for key in ["missing", "taken"] {
        for said in said(&mut connection, key) {
            assert!(!matches!(said, Said::Error(_)), "{key}: {said:?}");
        }
    }
    assert_eq!(ask(&server, &["GET", "taken"]), value);
    assert!((50_000..=60_000).contains(&ttl_of(&server, "taken")));
    assert_eq!(ask(&server, &["EXISTS", "missing"]).as_int(), Some(0));
    ask(&server, &["REPLICAOF", "127.0.0.1", "1"]);
    for key in ["missing", "taken"] {
        for said in said(&mut connection, key) {
            assert!(said.text().starts_with("READONLY"), "{key}: {said:?}");
        }
    }
    let many: Vec<String> = (0..10).map(|n| format!("missing{n}")).collect();
    let many: Vec<&str> = many.iter().map(String::as_str).collect();
    let args = [TWO, TTL].repeat(many.len());
    for said in call(&mut connection, &RENEW, &many, &args) {
        assert!(said.text().starts_with("READONLY"), "{said:?}");
    }
}

/// On the replica, the ttl looks as long as requested. That must not confirm the renewal.
#[test]
fn a_replica_never_confirms_a_renewal() {
    let server = server();
    let mut connection = connect(&server);
    acquire(&mut connection, &["k"]);
    ask(&server, &["REPLICAOF", "127.0.0.1", "1"]);
    let said = call(&mut connection, &RENEW, &["k"], &[ONE, "1"]);
    assert!(said[0].text().starts_with("READONLY"), "{said:?}");
}

#[test]
fn a_replica_never_reports_a_held_lock() {
    let server = server();
    let mut connection = connect(&server);
    queue_up(&mut connection, "k", &[TTL]);
    acquire(&mut connection, &["taken"]);
    // A `try_lock` acquired the lock past its queue, so its value has no marker.
    queue_up(&mut connection, "past", &[TTL]);
    ask(&server, &["SET", "past", &value(ONE), "PX", TTL]);
    ask(&server, &["REPLICAOF", "127.0.0.1", "1"]);
    for (key, n, mode) in [
        ("past", 2, "+"),
        ("past", 1, "-"),
        ("taken", 2, "+"),
        ("taken", 2, ""),
        ("k", 2, "+"),
        ("k", 1, "-"),
    ] {
        let said = acquire_as(&mut connection, key, n, mode);
        assert!(
            said.text().starts_with("READONLY"),
            "{key} {mode:?}: {said:?}"
        );
    }
}

/// `WAIT` counts the replicas that have the last write of its own connection. So a renewal has to write, even if the
/// ttl in Redis is long enough.
#[test]
fn each_renewal_is_a_write() {
    let server = server();
    let mut connection = connect(&server);
    acquire(&mut connection, &["k"]);
    let left = ttl_of(&server, "k");
    for ttl in ["1", "90000", "1"] {
        let before = changes(&server);
        let said = call(&mut connection, &RENEW, &["k"], &[ONE, ttl]);
        assert_eq!(said, [Said::Number(1)]);
        assert_eq!(changes(&server), before + 1, "{ttl}");
    }
    assert!(ttl_of(&server, "k") > left, "the ttl was not shortened");
}

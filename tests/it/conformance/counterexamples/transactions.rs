//! Mistakes of transactions that do not watch the lock, or watch it on another connection.

use crate::conformance::counterexamples::raw::Raw;
use crate::steady::steady;
use crate::support::{LONG_TTL, ask, in_redis, server};

const DATA: &str = "data";

/// Runs MULTI, a write of the data, EXEC; returns whether EXEC succeeded.
fn write(by: &mut Raw, what: &str) -> bool {
    by.say::<()>("MULTI", &[]);
    by.say::<()>("SET", &[DATA, what]);
    let done: redis::Value = by.say("EXEC", &[]);
    done != redis::Value::Nil
}

#[test]
fn watch_on_another_connection_stops_nothing() {
    let server = server();
    let mut holder = Raw::open(&server, "k", "holder");
    let mut other_connection = Raw::open(&server, "k", "holder");
    let mut other = Raw::open(&server, "k", "other");
    assert!(holder.take(LONG_TTL));

    other_connection.ask::<()>("WATCH", &[]);
    other.ask::<()>("SET", &["other"]);
    assert!(write(&mut holder, "of a lock that was lost"));

    // The correct way: WATCH, compare, MULTI and EXEC on one connection.
    holder.ask::<()>("SET", &["holder"]);
    holder.ask::<()>("WATCH", &[]);
    let found: String = holder.ask("GET", &[]);
    assert_eq!(found, holder.token);
    other.ask::<()>("SET", &["other"]);
    assert!(!write(&mut holder, "refused"));
    let data = ask(&server, &["GET", DATA]);
    assert_eq!(data.as_text(), Some("of a lock that was lost"));

    // The way of leasehold.
    let client = steady(&server.url()).build().unwrap();
    ask(&server, &["DEL", &in_redis("k")]);
    let guard = client.mutex("k").lock().unwrap();
    let refused = guard.transaction(|_, pipe| {
        pipe.set(DATA, "ours");
        ask(&server, &["SET", &in_redis("k"), "other"]);
        Ok(())
    });
    assert!(refused.unwrap_err().is_lease_lost());
    assert_eq!(ask(&server, &["GET", DATA]), data);
}

#[test]
fn watch_after_the_loss_needs_a_token_check() {
    let server = server();
    let mut holder = Raw::open(&server, "k", "holder");
    let mut other = Raw::open(&server, "k", "other");
    assert!(holder.take(LONG_TTL));
    other.ask::<()>("SET", &["other"]);
    holder.ask::<()>("WATCH", &[]);
    assert!(write(&mut holder, "late"));
    let found: String = holder.ask("GET", &[]);
    assert_ne!(found, holder.token, "comparing would have shown it");
}

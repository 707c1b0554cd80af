//! What goes wrong when a transaction on the data does not watch the lock, or not where it runs.

use crate::conformance::broken::raw::Raw;
use crate::steady::steady;
use crate::support::{LONG_TTL, ask, in_redis, server};

const DATA: &str = "data";

/// MULTI, a write to the data, EXEC; whether it went through.
fn write(by: &mut Raw, what: &str) -> bool {
    by.say::<()>("MULTI", &[]);
    by.say::<()>("SET", &[DATA, what]);
    let done: redis::Value = by.say("EXEC", &[]);
    done != redis::Value::Nil
}

#[test]
fn watch_on_another_connection_than_the_transactions_stops_nothing() {
    let server = server();
    let mut holder = Raw::open(&server, "k", "holder");
    let mut other_connection = Raw::open(&server, "k", "holder");
    let mut thief = Raw::open(&server, "k", "thief");
    assert!(holder.take(LONG_TTL));

    other_connection.ask::<()>("WATCH", &[]);
    thief.ask::<()>("SET", &["thief"]);
    assert!(write(&mut holder, "of a lock that was lost"));

    // As it has to be: WATCH, compare, MULTI and EXEC on one connection.
    holder.ask::<()>("SET", &["holder"]);
    holder.ask::<()>("WATCH", &[]);
    let found: String = holder.ask("GET", &[]);
    assert_eq!(found, holder.token);
    thief.ask::<()>("SET", &["thief"]);
    assert!(!write(&mut holder, "refused"));
    let data = ask(&server, &["GET", DATA]);
    assert_eq!(data.as_text(), Some("of a lock that was lost"));

    // As ours does it.
    let client = steady(&server.url()).build().unwrap();
    ask(&server, &["DEL", &in_redis("k")]);
    let guard = client.mutex("k").lock().unwrap();
    let refused = guard.transaction(|_, pipe| {
        pipe.set(DATA, "ours");
        ask(&server, &["SET", &in_redis("k"), "thief"]);
        Ok(())
    });
    assert!(refused.unwrap_err().is_lease_lost());
    assert_eq!(ask(&server, &["GET", DATA]), data);
}

#[test]
fn a_watch_that_begins_after_the_loss_stops_nothing_unless_the_token_is_compared() {
    let server = server();
    let mut holder = Raw::open(&server, "k", "holder");
    let mut thief = Raw::open(&server, "k", "thief");
    assert!(holder.take(LONG_TTL));
    thief.ask::<()>("SET", &["thief"]);
    holder.ask::<()>("WATCH", &[]);
    assert!(write(&mut holder, "late"));
    let found: String = holder.ask("GET", &[]);
    assert_ne!(found, holder.token, "comparing would have told");
}

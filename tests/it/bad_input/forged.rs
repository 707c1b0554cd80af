//! Text that other users or the server chose. The library shows it escaped, in one line of a log, and shortened.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use leasehold::{ErrorKind, EventHandler, EventLock, LossReason};
use leasehold_testbed::Server;

use crate::fakes::{FORGED, Fake, Manner};
use crate::steady::steady;
use crate::support::{SOON, ask, in_redis, lock, lost_within, secs, server, texts_of};

#[track_caller]
fn assert_is_one_line(text: &str) {
    assert!(text.len() < 3000, "{} bytes: {text:.200}", text.len());
    let raw: Vec<char> = text
        .chars()
        .filter(|c| c.is_control() || FORGED.contains(*c) && !c.is_ascii())
        .collect();
    assert!(raw.is_empty(), "{raw:?} in {text:?}");
}

/// The value of a lock with a forged holder id. A holder id has no space.
fn forged_value() -> String {
    let holder = format!("{}{}", FORGED.replace(' ', ""), "x".repeat(5000));
    format!("lh1 0123456789abcdef0123456789abcdef 1795263780943818 {holder}")
}

fn forge(server: &Server, key: &str) {
    ask(server, &["SET", &in_redis(key), &forged_value()]);
}

#[test]
fn a_forged_holder_makes_a_foreign_value() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    forge(&server, "k");
    let error = client.mutex("k").inspect().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Protocol);
    texts_of(&error)
        .iter()
        .for_each(|text| assert_is_one_line(text));
}

#[test]
fn losses_to_forged_holders_name_no_holder() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    let guard = lock(&client, "k");
    forge(&server, "k");
    let reason = lost_within(SOON, &guard.lost_signal());
    assert!(matches!(&reason, LossReason::TakenOver { by: None }));
    for text in texts_of(&guard.unlock().unwrap_err()) {
        assert_is_one_line(&text);
    }
}

#[test]
fn adopt_errors_of_forged_holders_are_one_line() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    let ticket = lock(&client, "k").into_ticket().unwrap();
    forge(&server, "k");
    let error = client.adopt(&ticket).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotHeld);
    texts_of(&error)
        .iter()
        .for_each(|text| assert_is_one_line(text));
}

#[test]
fn a_server_error_is_shown_escaped_and_short() {
    let fake = Fake::start(Manner::Forging);
    let error = steady(&fake.url()).build().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(error.to_string().contains("\\n\\u{1b}"), "{error}");
    texts_of(&error)
        .iter()
        .for_each(|text| assert_is_one_line(text));
}

#[test]
fn an_error_inside_a_transaction_is_shown_escaped() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    let guard = lock(&client, "k");
    let script = format!("return redis.error_reply({:?})", "MY text");
    let script = script.replace("text", &FORGED.replace('\n', "\\n"));
    let mut eval = redis::cmd("EVAL");
    eval.arg(script).arg(0);
    let read = guard.transaction(|connection, _| eval.query::<()>(connection));
    let written = guard.transaction(|_, pipe| {
        pipe.add_command(eval.clone());
        Ok(())
    });
    // Redis repeats the name of an unknown command in its error.
    let unknown = guard.transaction(|_, pipe| {
        pipe.cmd(&FORGED.replace('\n', ""));
        Ok(())
    });
    for error in [read, written, unknown].map(|result| result.unwrap_err()) {
        let texts = texts_of(&error);
        assert!(texts.iter().any(|text| text.contains("u{1b}")), "{error}");
        texts.iter().for_each(|text| assert_is_one_line(text));
    }
}

#[test]
fn names_and_tickets_are_shown_on_one_line() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    let name = FORGED.replace(|c: char| c.is_control(), "");
    ask(&server, &["SET", &in_redis(&name), "theirs"]);
    let ticket = lock(&client, "k").into_ticket().unwrap();
    let mut fields: Vec<&str> = ticket.split(' ').collect();
    let number = format!("{FORGED}{}", "9".repeat(100_000));
    fields[3] = &number;
    let endless = format!("leasehold:{}", "9".repeat(100_000));
    for error in [
        client.mutex(&name).lock().unwrap_err(),
        client.mutex(FORGED).lock().unwrap_err(),
        client.adopt(&fields.join(" ")).unwrap_err(),
        client
            .adopt(&ticket.replace("leasehold:k", &number))
            .unwrap_err(),
        client
            .adopt(&ticket.replace("leasehold:k", &endless[1..]))
            .unwrap_err(),
    ] {
        texts_of(&error)
            .iter()
            .for_each(|text| assert_is_one_line(text));
    }
}

#[derive(Default)]
struct Seen(Mutex<Vec<String>>);

impl EventHandler for Seen {
    fn acquired(&self, lock: EventLock<'_>, _: Duration) {
        self.0.lock().unwrap().push(format!("{lock:?}"));
    }

    fn lost(&self, lock: EventLock<'_>, reason: &LossReason) {
        let text = format!("{lock:?} {reason:?} {reason}");
        self.0.lock().unwrap().push(text);
    }
}

#[test]
fn every_debug_text_is_one_line_without_secrets() {
    const PASSWORD: &str = "correct horse";
    let server = Server::builder().password(PASSWORD).start().unwrap();
    let name = FORGED.replace(|c: char| c.is_control(), "");
    let prefix = format!("p{name}:");
    let seen = Arc::new(Seen::default());
    let builder = steady(&server.url())
        .prefix(&prefix)
        .event_handler(Arc::clone(&seen));
    let mut texts = vec![format!("{builder:?}")];
    let client = builder.build().unwrap();
    let mutex = client.mutex(&name);
    let guard = mutex.lock().unwrap();
    let found = mutex.inspect().unwrap().unwrap();
    let reentrant = client.reentrant_mutex("r");
    let inner = reentrant.lock().unwrap();
    let signal = guard.lost_signal();
    guard
        .transaction(|connection, pipe| {
            texts.push(format!("{connection:?}"));
            pipe.set("k", "v");
            Ok(())
        })
        .unwrap();
    texts.extend([
        format!("{client:?} {mutex:?} {guard:?} {signal:?}"),
        format!("{reentrant:?} {inner:?} {:?}", client.fenced_value(&name)),
        format!("{found:?} {:?}", found.holder()),
        format!("{:?}", client.held_locks()),
        format!("{:?}", client.mutex(FORGED)),
    ]);
    mutex.force_unlock().unwrap();
    texts.push(format!("{:?}", lost_within(SOON, &signal)));
    texts.extend(texts_of(&guard.unlock().unwrap_err()));
    drop(inner);
    client.shutdown(secs(5)).unwrap();
    let of_events = std::mem::take(&mut *seen.0.lock().unwrap());
    assert!(of_events.len() > 2, "{of_events:?}");
    let lease = found.lease_id();
    for text in texts.iter().chain(&of_events) {
        assert_is_one_line(text);
        assert!(!text.contains(PASSWORD), "{text}");
        assert!(!text.contains(&lease[..16]), "{text}");
        assert!(!text.contains(&lease[16..]), "{text}");
    }
}

//! Mistakes of designs that do not check the owner of a lock, or that check and change it in two steps.

use std::time::Duration;

use leasehold::{Client, MutexGuard};
use leasehold_testbed::{Server, eventually};

use crate::conformance::counterexamples::raw::Raw;
use crate::steady::steady;
use crate::support::{
    LONG_TTL, Recorder, SOON, What, expires_in, held_keys, in_time, lost_within, millis, secs,
    server,
};

/// A short ttl, since the tests wait for its end.
const TTL: Duration = Duration::from_millis(400);

/// A lock that expired without its holder's knowledge, and that the next holder has now.
struct Expired {
    server: Server,
    late: Raw,
    next: MutexGuard,
    _client: Client,
}

impl Expired {
    fn start() -> Self {
        let server = server();
        let mut late = Raw::open(&server, "k", "late");
        late.take_and_let_expire(TTL);
        let client = steady(&server.url()).build().unwrap();
        let next = client.mutex("k").fixed_ttl(LONG_TTL).lock().unwrap();
        Self {
            server,
            late,
            next,
            _client: client,
        }
    }

    fn next_lost_its_lock(&self) -> bool {
        held_keys(&self.server).is_empty()
    }
}

/// The same lock, with a guard of leasehold in the place of [`Expired::late`].
fn ours_and_next(server: &Server) -> (MutexGuard, MutexGuard) {
    let (one, two) = (
        steady(&server.url()).build().unwrap(),
        steady(&server.url()).build().unwrap(),
    );
    let late = one.mutex("k").fixed_ttl(TTL).lock().unwrap();
    let next = two.mutex("k").fixed_ttl(LONG_TTL).lock().unwrap();
    (late, next)
}

#[test]
fn an_unchecked_release_frees_the_next_holders_lock() {
    let mut broken = Expired::start();
    broken.late.ask::<()>("DEL", &[]);
    assert!(broken.next_lost_its_lock());
    let loss = lost_within(SOON, &broken.next.lost_signal());
    assert_eq!(loss, leasehold::LossReason::Deleted);
}

#[test]
fn get_then_del_frees_the_next_holders_lock() {
    let server = server();
    let mut broken = Raw::open(&server, "k", "broken");
    assert!(broken.take(LONG_TTL));
    let found: String = broken.ask("GET", &[]);
    assert_eq!(found, broken.token, "the lock is its own");
    broken.ask::<bool>("PEXPIRE", &["1"]);
    let expired = eventually(SOON, || held_keys(&server).is_empty());
    assert!(expired);
    let client = steady(&server.url()).build().unwrap();
    let next = client.mutex("k").lock().unwrap();
    broken.ask::<()>("DEL", &[]);
    assert!(held_keys(&server).is_empty(), "and is no longer its own");
    assert!(next.unlock().unwrap_err().is_lease_lost());

    let (late, next) = ours_and_next(&server);
    assert!(late.unlock().unwrap_err().is_lease_lost());
    assert_eq!(held_keys(&server), ["k"]);
    next.unlock().unwrap();
}

#[test]
fn an_unchecked_renewal_prolongs_the_next_holders_lock() {
    let server = server();
    let mut broken = Raw::open(&server, "k", "broken");
    broken.take_and_let_expire(TTL);
    let client = steady(&server.url()).build().unwrap();
    let next_ttl = secs(5);
    let next = client.mutex("k").fixed_ttl(next_ttl).lock().unwrap();
    let ttl = LONG_TTL.as_millis().to_string();
    broken.ask::<bool>("PEXPIRE", &[&ttl]);
    assert!(expires_in(&server, "k") > Some(next_ttl));
    next.unlock().unwrap();

    let recorder = Recorder::new();
    let builder = steady(&server.url()).event_handler(recorder.clone());
    let one = builder.ttl(LONG_TTL).renew_ratio(0.05).build().unwrap();
    let mine = one.mutex("k").ttl(secs(4)).lock().unwrap();
    let lost = mine.lost_signal();
    assert!(client.mutex("k").force_unlock().unwrap().is_some());
    let next = client.mutex("k").fixed_ttl(next_ttl).lock().unwrap();
    lost_within(SOON, &lost);
    recorder.wait_for(1, What::Lost, "k");
    assert!(expires_in(&server, "k") <= Some(next_ttl));
    next.unlock().unwrap();
}

#[test]
fn an_unreported_failed_renewal_leaves_two_holders() {
    let mut broken = Expired::start();
    let late_believes = true;
    let found: String = broken.late.ask("GET", &[]);
    if found == broken.late.token {
        broken.late.ask::<bool>("PEXPIRE", &["1000"]);
    } else {
        // The design only logs the failure, at debug level.
    }
    assert_eq!((late_believes, broken.next.is_lost()), (true, false));

    let server = server();
    let (late, next) = ours_and_next(&server);
    lost_within(SOON, &late.lost_signal());
    assert_eq!((late.check().is_ok(), next.is_lost()), (false, false));
}

#[test]
fn check_then_set_grants_an_expired_lock_twice() {
    let server = server();
    // The value contains the time at which the lock ends. After that time, a contender overwrites the value.
    let mut brokens = ["one", "two"].map(|token| Raw::open(&server, "k", token));
    brokens[0].ask::<()>("SET", &["0"]);
    let found_expired = brokens.each_mut().map(|broken| {
        let ends: String = broken.ask("GET", &[]);
        ends == "0"
    });
    let took = brokens.each_mut().map(|broken| {
        let token = broken.token.clone();
        broken.ask::<()>("SET", &[&token]);
        true
    });
    assert_eq!((found_expired, took), ([true; 2], [true; 2]));
    brokens[0].ask::<()>("DEL", &[]);

    let expired = steady(&server.url()).build().unwrap();
    let _late = expired.mutex("k").fixed_ttl(TTL).lock().unwrap();
    let clients = [(); 2].map(|()| steady(&server.url()).build().unwrap());
    let mut held = Vec::new();
    let one_has_it = eventually(SOON, || {
        held.extend(clients.iter().filter_map(|client| {
            let mutex = client.mutex("k");
            in_time(mutex.try_lock_for(millis(1))).flatten()
        }));
        !held.is_empty()
    });
    assert!(one_has_it);
    assert_eq!(held.len(), 1);
}

#[test]
fn nameless_values_hide_a_crashed_holder() {
    let server = server();
    let named = |value: String, client: &Client| value.contains(client.holder_id().as_str());
    let client = steady(&server.url()).build().unwrap();
    let mut broken = Raw::open(&server, "k", "1");
    assert!(broken.take(LONG_TTL));
    assert!(!named(broken.ask("GET", &[]), &client));
    broken.ask::<()>("DEL", &[]);

    std::mem::forget(client.mutex("k").lock().unwrap());
    client.shutdown(SOON).unwrap();
    assert!(named(broken.ask("GET", &[]), &client), "read by redis-cli");
    let operator = steady(&server.url()).build().unwrap();
    let found = operator.mutex("k").inspect().unwrap().unwrap();
    assert_eq!(found.holder(), client.holder_id());
}

//! A `MemoryStore` that fails, hangs or loses keys at a test's request: its clients behave as with a Redis
//! that is down.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use leasehold::{
    Builder, Client, Error, ErrorKind, EventHandler, EventLock, LossReason, MemoryStore,
};

use crate::support::{SOON, Task, lost_within, millis, secs};

/// The default ttl.
const TTL: Duration = Duration::from_secs(30);

#[derive(Debug, PartialEq)]
enum Event {
    RenewalFailed(ErrorKind),
    Unavailable(ErrorKind),
    ReleaseDelayed(ErrorKind),
}

struct Listener(Sender<Event>);

impl EventHandler for Listener {
    fn renewal_failed(&self, _: EventLock<'_>, error: &Error) {
        let _ = self.0.send(Event::RenewalFailed(error.kind()));
    }

    fn unavailable(&self, _: EventLock<'_>, error: &Error) {
        let _ = self.0.send(Event::Unavailable(error.kind()));
    }

    fn release_delayed(&self, _: EventLock<'_>, error: &Error) {
        let _ = self.0.send(Event::ReleaseDelayed(error.kind()));
    }
}

fn with_events(memory: &MemoryStore) -> (Builder, Receiver<Event>) {
    let (events, received) = channel();
    (
        memory.builder().event_handler(Arc::new(Listener(events))),
        received,
    )
}

fn client_with_events(memory: &MemoryStore) -> (Client, Receiver<Event>) {
    let (builder, received) = with_events(memory);
    (builder.build().unwrap(), received)
}

#[track_caller]
fn next(events: &Receiver<Event>) -> Event {
    events.recv_timeout(SOON).unwrap()
}

#[test]
fn requests_fail_with_the_chosen_kind() {
    let memory = MemoryStore::new();
    let client = memory.builder().outage_timeout(millis(1)).build().unwrap();
    let guard = client.mutex("held").lock().unwrap();
    let value = client.fenced_value("v");
    use ErrorKind::{Denied, Protocol, Timeout, Unavailable};
    for kind in [Unavailable, Timeout, Denied, Protocol] {
        memory.fail(kind);
        let mutex = client.mutex("k");
        for error in [
            mutex.try_lock().map(drop).unwrap_err(),
            mutex.inspect().map(drop).unwrap_err(),
            mutex.force_unlock().map(drop).unwrap_err(),
            guard.extend(2 * TTL).unwrap_err(),
            value.write(1, "x").unwrap_err(),
            value.delete(1).unwrap_err(),
            value.read().map(drop).unwrap_err(),
        ] {
            assert_eq!(error.kind(), kind, "{error}");
        }
        let error = mutex.lock().map(drop).unwrap_err();
        let lasting = if kind == Timeout { Unavailable } else { kind };
        assert!([kind, lasting].contains(&error.kind()), "{error}");
        guard.check().unwrap();
    }
    memory.recover();
    guard.extend(2 * TTL).unwrap();
    assert_eq!(value.read().unwrap(), None);
    assert!(client.mutex("k").try_lock().unwrap().is_some());
}

#[test]
#[should_panic(expected = "no request to Redis fails with LeaseLost")]
fn an_impossible_error_kind_is_refused() {
    MemoryStore::new().fail(ErrorKind::LeaseLost);
}

#[test]
fn lock_survives_an_outage() {
    let memory = MemoryStore::new();
    let (builder, events) = with_events(&memory);
    let client = builder.outage_timeout(secs(3600)).build().unwrap();
    memory.fail(ErrorKind::Unavailable);
    let mutex = client.mutex("k");
    let waiter = Task::start(move || mutex.lock().unwrap());
    assert_eq!(next(&events), Event::Unavailable(ErrorKind::Unavailable));
    assert!(!waiter.is_done());
    memory.recover();
    let guard = waiter.within(SOON, "the lock after the outage");
    guard.check().unwrap();
}

#[test]
fn a_held_lock_survives_a_short_outage() {
    let memory = MemoryStore::new();
    let (client, events) = client_with_events(&memory);
    let guard = client.mutex("k").lock().unwrap();
    memory.fail(ErrorKind::Unavailable);
    memory.advance(TTL / 2);
    assert_eq!(next(&events), Event::RenewalFailed(ErrorKind::Unavailable));
    memory.recover();
    // The next attempt to renew comes a second later at the latest.
    memory.advance(secs(2));
    assert!(guard.remaining() > TTL * 9 / 10, "{:?}", guard.remaining());
    memory.advance(TTL / 2);
    guard.check().unwrap();
}

#[test]
fn an_outage_beyond_the_ttl_loses_the_lock() {
    let memory = MemoryStore::new();
    let [one, two] = [(); 2].map(|()| memory.client().unwrap());
    let guard = one.mutex("k").lock().unwrap();
    let lost = guard.lost_signal();
    memory.fail(ErrorKind::Unavailable);
    (0..10).for_each(|_| memory.advance(TTL / 5));
    assert_eq!(lost_within(SOON, &lost), LossReason::Expired);
    memory.recover();
    let next = two.mutex("k").try_lock().unwrap().unwrap();
    assert!(next.fencing_token() > guard.fencing_token());
}

#[test]
fn a_release_is_repeated_until_the_outage_ends() {
    let memory = MemoryStore::new();
    let (client, events) = client_with_events(&memory);
    let other = memory.client().unwrap();
    for hangs in [false, true] {
        let guard = client.mutex("k").lock().unwrap();
        match hangs {
            false => memory.fail(ErrorKind::Denied),
            true => memory.hang(),
        }
        drop(guard);
        let kind = if hangs {
            ErrorKind::Timeout
        } else {
            ErrorKind::Denied
        };
        assert_eq!(next(&events), Event::ReleaseDelayed(kind));
        assert_eq!(events.try_recv().ok(), None);
        memory.recover();
        assert!(other.mutex("k").try_lock().unwrap().is_some());
    }
    client.shutdown(SOON).unwrap();
    assert_eq!(events.try_recv().ok(), None);
}

#[test]
fn a_release_is_given_up_when_the_ttl_ends() {
    let memory = MemoryStore::new();
    let (client, events) = client_with_events(&memory);
    let guard = client.mutex("k").lock().unwrap();
    memory.fail(ErrorKind::Unavailable);
    drop(guard);
    assert_eq!(next(&events), Event::ReleaseDelayed(ErrorKind::Unavailable));
    memory.advance(TTL - secs(3));
    memory.advance(secs(4));
    assert_eq!(events.try_recv().ok(), None);
    memory.recover();
    assert!(client.mutex("k").try_lock().unwrap().is_some());
}

#[test]
fn a_shutdown_says_that_releases_are_pending() {
    let memory = MemoryStore::new();
    let (client, events) = client_with_events(&memory);
    let other = memory.client().unwrap();
    let guard = client.mutex("k").lock().unwrap();
    memory.fail(ErrorKind::Unavailable);
    drop(guard);
    let error = client.shutdown(millis(50)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert_eq!(next(&events), Event::ReleaseDelayed(ErrorKind::Unavailable));
    drop(client);
    memory.recover();
    assert!(other.mutex("k").is_locked().unwrap(), "its client is gone");
}

#[test]
fn waiters_are_granted_after_an_outage() {
    let memory = MemoryStore::new();
    let builder = || memory.builder().outage_timeout(secs(3600));
    let [one, two] = [(); 2].map(|()| builder().build().unwrap());
    let guard = one.mutex("k").lock().unwrap();
    let mutex = two.mutex("k");
    let waiter = Task::start_blocked(move || mutex.lock().unwrap());
    memory.fail(ErrorKind::Unavailable);
    drop(guard);
    // The key expires while no client can learn of it.
    memory.advance(2 * TTL);
    assert!(!waiter.is_done());
    memory.recover();
    waiter.within(SOON, "the grant").check().unwrap();
}

#[test]
fn a_deletion_in_an_outage_is_reported_afterwards() {
    let memory = MemoryStore::new();
    let client = memory.client().unwrap();
    for by_flush in [false, true] {
        let guard = client.mutex("k").lock().unwrap();
        // The lock is held for so long that the client would be notified of a change.
        memory.advance(secs(1));
        memory.fail(ErrorKind::Unavailable);
        match by_flush {
            true => memory.flush(),
            false => assert!(memory.delete("leasehold:k")),
        }
        guard.check().unwrap();
        memory.recover();
        let error = guard.check().unwrap_err();
        assert_eq!(error.loss_reason(), Some(&LossReason::Deleted));
    }
}

#[test]
fn a_hanging_request_succeeds_if_the_store_recovers() {
    let memory = MemoryStore::new();
    let client = memory.builder().command_timeout(secs(60)).build().unwrap();
    memory.hang();
    let mutex = client.mutex("k");
    let asks = Task::start_blocked(move || mutex.try_lock().unwrap().is_some());
    memory.recover();
    assert!(asks.within(SOON, "its reply"));
}

#[test]
fn a_hanging_request_ends_at_its_deadline() {
    let memory = MemoryStore::new();
    let client = memory.builder().command_timeout(secs(60)).build().unwrap();
    memory.hang();
    let mutex = client.mutex("k");
    let asks = Task::start_blocked(move || mutex.try_lock().map(drop));
    memory.advance(secs(61));
    let error = asks.within(SOON, "the deadline").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Timeout, "{error}");
    memory.recover();
    assert!(
        !client.mutex("k").is_locked().unwrap(),
        "it has acquired nothing"
    );
}

#[test]
fn a_client_cannot_connect_during_an_outage() {
    let memory = MemoryStore::new();
    memory.fail(ErrorKind::Denied);
    assert_eq!(memory.client().unwrap_err().kind(), ErrorKind::Denied);
    memory.hang();
    assert_eq!(memory.client().unwrap_err().kind(), ErrorKind::Unavailable);
    let client = memory.builder().build_lazy().unwrap();
    memory.recover();
    assert!(client.mutex("k").try_lock().unwrap().is_some());
}

#[test]
fn a_deleted_key_is_a_loss_and_wakes_the_next_waiter() {
    let memory = MemoryStore::new();
    let [one, two] = [(); 2].map(|()| memory.builder().prefix("p:").build().unwrap());
    let guard = one.mutex("k").lock().unwrap();
    one.fenced_value("v").write(7, "x").unwrap();
    let mutex = two.mutex("k");
    let waiter = Task::start_blocked(move || mutex.lock().unwrap());
    assert!(!memory.delete("k") && !memory.delete("leasehold:k"));
    assert!(memory.delete("p:k"));
    let error = guard.check().unwrap_err();
    let reason = error.loss_reason();
    assert!(
        matches!(
            reason,
            Some(LossReason::Deleted | LossReason::TakenOver { .. })
        ),
        "{reason:?}"
    );
    waiter.within(SOON, "the grant").check().unwrap();
    assert!(memory.delete("p:~value:v"));
    one.fenced_value("v").write(1, "y").unwrap();
}

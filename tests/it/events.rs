//! Each event of `EventHandler` comes at the right time and on the right thread, and cannot do harm.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use leasehold::{Client, Error, ErrorKind, EventHandler, EventLock, LossReason};

use crate::fakes::closed_port;
use crate::steady::steady;
use crate::support::{SOON, Task, ask, builder, in_redis, is_held, millis, secs, server};

/// One event with its arguments.
#[derive(Debug)]
enum EventKind {
    Acquired(Duration),
    Contended(Duration),
    Released(Duration, bool),
    Renewed,
    RenewalFailed(ErrorKind),
    Lost(LossReason),
    MaxHoldNear(Duration),
    Unavailable(ErrorKind),
}

#[derive(Debug)]
struct Received {
    kind: EventKind,
    key: String,
    token: u64,
    thread: ThreadId,
}

/// Sends each event to the test, and then runs the test's action.
struct Listener<F>(Mutex<Sender<Received>>, F);

impl<F: Fn(&str)> Listener<F> {
    fn send(&self, lock: EventLock<'_>, kind: EventKind) {
        let received = Received {
            kind,
            key: lock.key.to_owned(),
            token: lock.fencing_token,
            thread: thread::current().id(),
        };
        // The test may have ended.
        let _ = self.0.lock().unwrap().send(received);
        self.1(lock.key);
    }
}

impl<F: Fn(&str) + Send + Sync + 'static> EventHandler for Listener<F> {
    fn acquired(&self, lock: EventLock<'_>, waited: Duration) {
        self.send(lock, EventKind::Acquired(waited));
    }

    fn contended(&self, lock: EventLock<'_>, expires_in: Duration) {
        self.send(lock, EventKind::Contended(expires_in));
    }

    fn released(&self, lock: EventLock<'_>, held: Duration, confirmed: bool) {
        self.send(lock, EventKind::Released(held, confirmed));
    }

    fn renewed(&self, lock: EventLock<'_>) {
        self.send(lock, EventKind::Renewed);
    }

    fn renewal_failed(&self, lock: EventLock<'_>, error: &Error) {
        self.send(lock, EventKind::RenewalFailed(error.kind()));
    }

    fn lost(&self, lock: EventLock<'_>, reason: &LossReason) {
        self.send(lock, EventKind::Lost(reason.clone()));
    }

    fn max_hold_ending(&self, lock: EventLock<'_>, left: Duration) {
        self.send(lock, EventKind::MaxHoldNear(left));
    }

    fn unavailable(&self, lock: EventLock<'_>, error: &Error) {
        self.send(lock, EventKind::Unavailable(error.kind()));
    }
}

fn listener<F: Fn(&str)>(then: F) -> (Arc<Listener<F>>, Receiver<Received>) {
    let (sender, received) = channel();
    (Arc::new(Listener(Mutex::new(sender), then)), received)
}

/// The next event, which must come soon.
#[track_caller]
fn next(received: &Receiver<Received>) -> Received {
    received.recv_timeout(SOON).expect("an event")
}

/// The next event except successful renewals.
#[track_caller]
fn next_but_renewed(received: &Receiver<Received>) -> Received {
    loop {
        let received = next(received);
        if !matches!(received.kind, EventKind::Renewed) {
            return received;
        }
    }
}

#[test]
fn acquire_and_release_events_run_synchronously() {
    let server = server();
    let (events, received) = listener(|_| ());
    let client = steady(&server.url()).event_handler(events).build().unwrap();
    let here = thread::current().id();
    for confirmed in [true, false] {
        let start = Instant::now();
        let guard = client.mutex("k").lock().unwrap();
        let token = guard.fencing_token();
        let event = received.try_recv().expect("sent before lock() returns");
        assert_eq!(
            (event.key.as_str(), event.token, event.thread),
            ("k", token, here)
        );
        let EventKind::Acquired(waited) = event.kind else {
            panic!("{event:?}")
        };
        assert!(waited <= start.elapsed());
        thread::sleep(millis(20));
        if confirmed {
            guard.unlock().unwrap();
        } else {
            drop(guard);
        }
        let event = received.try_recv().expect("sent before unlock returns");
        assert_eq!(
            (event.key.as_str(), event.token, event.thread),
            ("k", token, here)
        );
        let EventKind::Released(held, said) = event.kind else {
            panic!("{event:?}")
        };
        assert!(held >= millis(20) && held <= start.elapsed(), "{held:?}");
        assert_eq!(said, confirmed);
    }
    assert!(received.try_recv().is_err(), "nothing else");
}

#[test]
fn contention_is_reported_once_per_call() {
    let server = server();
    let (events, received) = listener(|_| ());
    let client = steady(&server.url()).event_handler(events).build().unwrap();
    let holder = steady(&server.url()).build().unwrap();
    let held = holder.mutex("k").lock().unwrap();
    let here = thread::current().id();
    for wait in [secs(0), secs(2)] {
        assert!(client.mutex("k").try_lock_for(wait).unwrap().is_none());
        let event = received.try_recv().expect("sent on this thread");
        assert_eq!(
            (event.key.as_str(), event.token, event.thread),
            ("k", 0, here)
        );
        let EventKind::Contended(expires_in) = event.kind else {
            panic!("{event:?}")
        };
        assert!(expires_in <= secs(6), "{expires_in:?}");
        assert!(
            received.try_recv().is_err(),
            "once, however often the client looked"
        );
    }
    let waiting = client.mutex("k");
    let waiter = Task::start(move || waiting.lock().unwrap());
    assert!(matches!(next(&received).kind, EventKind::Contended(_)));
    let waited_at_least = Instant::now();
    thread::sleep(millis(50));
    let waited_at_least = waited_at_least.elapsed();
    held.unlock().unwrap();
    let event = next(&received);
    let EventKind::Acquired(waited) = event.kind else {
        panic!("{event:?}")
    };
    assert!(waited >= waited_at_least, "{waited:?}");
    drop(waiter.within(SOON, "the waiter's grant"));
}

#[test]
fn contention_after_an_outage_is_reported() {
    let server = server();
    let (events, received) = listener(|_| ());
    let client = builder(&server.url())
        .event_handler(events)
        .build()
        .unwrap();
    let holder = builder(&server.url()).ttl(secs(60)).build().unwrap();
    let held = holder.mutex("k").lock().unwrap();
    server.stop();
    let waiting = client.mutex("k");
    let waiter = Task::start(move || waiting.lock().map(drop));
    assert!(matches!(next(&received).kind, EventKind::Unavailable(_)));
    server.resume();
    loop {
        let event = next(&received);
        match event.kind {
            EventKind::Unavailable(_) => {}
            EventKind::Contended(_) => break,
            _ => panic!("{event:?}"),
        }
    }
    drop(held);
    waiter.within(SOON, "the grant").unwrap();
}

#[test]
fn renewals_and_losses_run_on_the_callback_thread() {
    let server = server();
    let (events, received) = listener(|_| ());
    let client = builder(&server.url()).ttl(secs(9)).renew_ratio(0.05);
    let client = client.command_timeout(secs(2));
    let client = client.event_handler(events).build().unwrap();
    let guard = client.mutex("k").lock().unwrap();
    let token = guard.fencing_token();
    assert!(matches!(next(&received).kind, EventKind::Acquired(_)));
    let renewed = next(&received);
    assert!(matches!(renewed.kind, EventKind::Renewed), "{renewed:?}");
    assert_eq!((renewed.key.as_str(), renewed.token), ("k", token));
    assert_ne!(renewed.thread, thread::current().id());

    server.stop();
    let failed = next_but_renewed(&received);
    let EventKind::RenewalFailed(kind) = failed.kind else {
        panic!("{failed:?}")
    };
    assert!(
        matches!(kind, ErrorKind::Timeout | ErrorKind::Unavailable),
        "{kind:?}"
    );
    assert_eq!((failed.token, failed.thread), (token, renewed.thread));
    server.resume();
    loop {
        // More renewals may have failed before they succeed.
        let event = next(&received);
        match event.kind {
            EventKind::RenewalFailed(_) => {}
            EventKind::Renewed => break,
            _ => panic!("{event:?}"),
        }
    }

    ask(&server, &["DEL", &in_redis("k")]);
    let lost = next_but_renewed(&received);
    let EventKind::Lost(LossReason::Deleted) = lost.kind else {
        panic!("{lost:?}")
    };
    assert_eq!((lost.token, lost.thread), (token, renewed.thread));
    drop(guard);
    let released = next(&received);
    assert!(
        matches!(released.kind, EventKind::Released(_, false)),
        "{released:?}"
    );
}

#[test]
fn max_hold_ending_runs_once_as_a_callback() {
    let server = server();
    let (events, received) = listener(|_| ());
    let client = steady(&server.url()).renew_ratio(0.1).event_handler(events);
    let client = client.max_hold(secs(15)).build().unwrap();
    let guard = client.mutex("k").lock().unwrap();
    let token = guard.fencing_token();
    assert!(matches!(next(&received).kind, EventKind::Acquired(_)));
    let near = next_but_renewed(&received);
    let EventKind::MaxHoldNear(left) = near.kind else {
        panic!("{near:?}")
    };
    assert_eq!((near.key.as_str(), near.token), ("k", token));
    assert_ne!(near.thread, thread::current().id());
    assert!(left > secs(0) && left <= millis(1_500), "{left:?}");
    let lost = next_but_renewed(&received);
    let EventKind::Lost(LossReason::MaxHold) = lost.kind else {
        panic!("{lost:?}")
    };
    assert_eq!((lost.token, lost.thread), (token, near.thread));
}

#[test]
fn max_hold_ending_skips_released_locks() {
    let server = server();
    let (begun, began) = channel();
    let (go_on, wait) = channel::<()>();
    let (begun, wait) = (Mutex::new(begun), Mutex::new(wait));
    let (events, received) = listener(move |key| {
        // The first event delays those behind it.
        if key == "first" && thread::current().name() == Some("leasehold-callbacks") {
            let _ = begun.lock().unwrap().send(());
            let _ = wait.lock().unwrap().recv();
        }
    });
    let client = builder(&server.url())
        .event_handler(events)
        .build()
        .unwrap();
    let limited = |key: &str| client.mutex(key).fixed_ttl(secs(9)).max_hold(secs(2));
    let first = limited("first").lock().unwrap();
    let second = limited("second").lock().unwrap();
    began.recv_timeout(SOON).expect("the first event");
    // As a rule, both events are due after this pause. If the event of `second` is not, it never comes, and the test
    // passes without proving anything.
    thread::sleep(millis(50));
    drop((first, second));
    drop(go_on);
    client.shutdown(SOON).unwrap();
    let near = |received: &Received| matches!(received.kind, EventKind::MaxHoldNear(_));
    let of_second = |received: Received| received.key == "second" && near(&received);
    assert!(!received.try_iter().any(of_second));
}

#[test]
fn failed_attempts_are_reported_on_the_calling_thread() {
    let (events, received) = listener(|_| ());
    let client = builder(&format!("redis://127.0.0.1:{}", closed_port()));
    let client = client
        .outage_timeout(millis(300))
        .event_handler(events)
        .build_lazy()
        .unwrap();
    assert!(client.mutex("k").lock().unwrap_err().is_unavailable());
    let first = next(&received);
    assert_eq!((first.key.as_str(), first.token), ("k", 0));
    assert_eq!(first.thread, thread::current().id());
    assert!(
        matches!(first.kind, EventKind::Unavailable(ErrorKind::Unavailable)),
        "{first:?}"
    );
}

/// Causes every event there is, and fails if one of them did harm.
fn live_through_everything(server: &leasehold_testbed::Server, client: &Client) {
    let guard = client.mutex("k").lock().unwrap();
    assert!(client.mutex("k").try_lock().unwrap().is_none(), "contended");
    let lost = guard.lost_signal();
    // Renewed for longer than the ttl.
    let signal = lost.recv_timeout(secs(4));
    assert!(signal.is_err(), "{signal:?}");
    server.stop();
    let attempt = client.mutex("other").try_lock();
    assert!(attempt.unwrap_err().is_unavailable());
    server.resume();
    assert!(
        lost.recv_timeout(millis(500)).is_err(),
        "renewals failed, and then did not"
    );
    let (sender, reasons) = channel();
    guard.on_lost(move |reason| sender.send(reason).unwrap());
    ask(server, &["DEL", &in_redis("k")]);
    assert_eq!(reasons.recv_timeout(SOON), Ok(LossReason::Deleted));
    assert_eq!(lost.recv_timeout(SOON), Ok(LossReason::Deleted));
    drop(guard);
    client.with_lock("k", || ()).unwrap();
    assert!(!is_held(server, "k"));
}

#[test]
fn events_that_panic_break_nothing() {
    let server = server();
    let (events, received) = listener(|_| panic!("a test's own panic"));
    let client = builder(&server.url()).ttl(secs(3)).renew_ratio(0.1);
    let client = client.event_handler(events).build().unwrap();
    live_through_everything(&server, &client);
    client.shutdown(secs(5)).unwrap();
    let all: Vec<Received> = received.try_iter().collect();
    let kinds = |wanted: fn(&EventKind) -> bool| all.iter().filter(|one| wanted(&one.kind)).count();
    assert!(kinds(|kind| matches!(kind, EventKind::Acquired(_))) >= 2);
    assert!(kinds(|kind| matches!(kind, EventKind::Contended(_))) >= 1);
    assert!(kinds(|kind| matches!(kind, EventKind::Released(..))) >= 2);
    assert!(kinds(|kind| matches!(kind, EventKind::Renewed)) >= 2);
    assert!(kinds(|kind| matches!(kind, EventKind::Unavailable(_))) >= 1);
    assert_eq!(kinds(|kind| matches!(kind, EventKind::Lost(_))), 1);
}

#[test]
fn events_may_use_the_client() {
    thread_local!(static INSIDE: std::cell::Cell<bool> = const { std::cell::Cell::new(false) });
    let server = server();
    let client: Arc<Mutex<Option<Client>>> = Arc::default();
    let theirs = Arc::clone(&client);
    let (events, _heard) = listener(move |_| {
        // The handler's own use of the client causes events, too.
        if INSIDE.replace(true) {
            return;
        }
        let client = theirs.lock().unwrap().clone();
        if let Some(client) = client {
            // The request fails while the server is stopped, as it should.
            let key = format!("{:?}", thread::current().id());
            let _ = client.mutex(&key).try_lock().map(drop);
            let _ = client.mutex("k").try_lock().map(drop);
        }
        INSIDE.set(false);
    });
    let built = builder(&server.url()).ttl(secs(3)).renew_ratio(0.3);
    let built = built
        .command_timeout(millis(150))
        .event_handler(events)
        .build()
        .unwrap();
    *client.lock().unwrap() = Some(built.clone());
    Task::start(move || {
        for _ in 0..50 {
            built.with_lock("k", || ()).unwrap();
        }
        let guard = built.mutex("k").lock().unwrap();
        let lost = guard.lost_signal();
        assert!(lost.recv_timeout(secs(2)).is_err());
        ask(&server, &["DEL", &in_redis("k")]);
        drop(guard);
        *client.lock().unwrap() = None;
    })
    .within(secs(60), "work with events that lock");
}

#[test]
fn a_slow_event_delays_no_renewal() {
    let server = server();
    let (begun, began) = channel();
    let (go_on, wait) = channel::<()>();
    let (begun, wait) = (Mutex::new(begun), Mutex::new(wait));
    let (events, _heard) = listener(move |_| {
        // This also runs on the calling threads, which must not wait here.
        if thread::current().name() == Some("leasehold-callbacks") {
            let _ = begun.lock().unwrap().send(());
            let _ = wait.lock().unwrap().recv();
        }
    });
    let client = builder(&server.url()).ttl(secs(3)).renew_ratio(0.1);
    let client = client.event_handler(events).build().unwrap();
    let guard = client.mutex("k").lock().unwrap();
    began.recv_timeout(SOON).expect("the first renewal");
    let lost = guard.lost_signal().recv_timeout(secs(4));
    assert!(lost.is_err(), "{lost:?}");
    guard.check().unwrap();
    drop(go_on);
    guard.unlock().unwrap();
}

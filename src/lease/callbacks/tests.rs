use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use super::*;
use crate::lease::Grant;
use crate::util::clock::MonotonicTime;

const LONG: Duration = Duration::from_secs(20);

#[derive(Debug, PartialEq)]
enum Call {
    Renewed,
    Missed(u64),
    Lost,
}

struct Handler(Mutex<Sender<Call>>);

impl Handler {
    fn send(&self, call: Call) {
        self.0.lock().unwrap().send(call).unwrap();
    }
}

impl EventHandler for Handler {
    fn renewed(&self, _: EventLock<'_>) {
        self.send(Call::Renewed);
    }

    fn lost(&self, _: EventLock<'_>, _: &LossReason) {
        self.send(Call::Lost);
    }

    fn events_missed(&self, count: u64) {
        self.send(Call::Missed(count));
    }
}

/// An executor whose thread is busy until the returned sender sends or is dropped.
fn busy() -> (Arc<CallbackExecutor>, Sender<()>, Receiver<Call>) {
    let (calls, received) = channel();
    let handler = Arc::new(Handler(Mutex::new(calls)));
    let callbacks = CallbackExecutor::start(&ThreadGroup::new(), Some(handler)).unwrap();
    let (go_on, may_go_on) = channel::<()>();
    let (running, runs) = channel();
    callbacks.queue_callback(move || {
        running.send(()).unwrap();
        let _ = may_go_on.recv();
    });
    runs.recv_timeout(LONG).unwrap();
    (callbacks, go_on, received)
}

fn renewed(callbacks: &CallbackExecutor, key: &Key) {
    callbacks.queue_lock_event(key, 7, |events, lock| events.renewed(lock));
}

#[test]
fn events_beyond_the_bound_are_counted_and_reported() {
    let (callbacks, go_on, received) = busy();
    let key = Key::new("", "k", 16).unwrap();
    for _ in 0..MAX_QUEUED_EVENTS + 5 {
        renewed(&callbacks, &key);
    }
    drop(go_on);
    let next = || received.recv_timeout(LONG).unwrap();
    assert_eq!(next(), Call::Missed(5));
    assert!((0..MAX_QUEUED_EVENTS).all(|_| next() == Call::Renewed));
    renewed(&callbacks, &key);
    assert_eq!(next(), Call::Renewed, "there is room again");
    callbacks.stop();
    drop(callbacks);
    assert!(received.recv_timeout(LONG).is_err(), "no other call");
}

#[test]
fn losses_and_callbacks_are_never_dropped() {
    let (callbacks, go_on, received) = busy();
    let key = Key::new("", "k", 16).unwrap();
    for _ in 0..MAX_QUEUED_EVENTS + 1 {
        renewed(&callbacks, &key);
    }
    let (ran, runs) = channel();
    callbacks.queue_callback(move || ran.send(()).unwrap());
    let grant = Grant::usual(key, MonotonicTime::now());
    let lease = Lease::new(grant, Arc::clone(&callbacks), None);
    callbacks.report_loss(&lease, LossReason::Expired);
    drop(lease);
    drop(go_on);
    runs.recv_timeout(LONG).unwrap();
    callbacks.stop();
    drop(callbacks);
    let mut calls = Vec::new();
    while let Ok(call) = received.recv_timeout(LONG) {
        calls.push(call);
    }
    assert_eq!(calls.last(), Some(&Call::Lost));
    assert_eq!(calls.len(), MAX_QUEUED_EVENTS + 2);
}

#[test]
fn callbacks_after_the_stop_are_dropped() {
    let (callbacks, go_on, _received) = busy();
    let (calls, called) = channel();
    let queue = |name: &'static str| {
        let calls = calls.clone();
        callbacks.queue_callback(move || calls.send(name).unwrap());
    };
    queue("before");
    callbacks.stop();
    queue("behind");
    drop(go_on);
    assert_eq!(called.recv_timeout(LONG), Ok("before"));
    drop(calls);
    // The thread has dropped the callback, and with it the last sender.
    assert_eq!(
        called.recv_timeout(LONG),
        Err(std::sync::mpsc::RecvTimeoutError::Disconnected)
    );
}

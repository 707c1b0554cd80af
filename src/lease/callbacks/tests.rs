use std::sync::Mutex;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;

use super::*;

const LONG: Duration = Duration::from_secs(20);

#[derive(Debug, PartialEq)]
enum Told {
    Renewed,
    Missed(u64),
    Lost,
}

struct Listener(Mutex<Sender<Told>>);

impl Listener {
    fn told(&self, what: Told) {
        self.0.lock().unwrap().send(what).unwrap();
    }
}

impl EventHandler for Listener {
    fn renewed(&self, _: EventLock<'_>) {
        self.told(Told::Renewed);
    }

    fn lost(&self, _: EventLock<'_>, _: &crate::LossReason) {
        self.told(Told::Lost);
    }

    fn events_missed(&self, count: u64) {
        self.told(Told::Missed(count));
    }
}

/// A callbacks whose thread is busy until something comes in on the channel, or that is dropped.
fn busy() -> (Arc<CallbackExecutor>, Sender<()>, Receiver<Told>) {
    let (told, hears) = channel();
    let listener = Arc::new(Listener(Mutex::new(told)));
    let callbacks = CallbackExecutor::start(&ThreadGroup::new(), Some(listener)).unwrap();
    let (go_on, may_go_on) = channel::<()>();
    let (running, runs) = channel();
    callbacks.run(move || {
        running.send(()).unwrap();
        let _ = may_go_on.recv();
    });
    runs.recv_timeout(LONG).unwrap();
    (callbacks, go_on, hears)
}

fn renewed(callbacks: &CallbackExecutor, key: &Key) {
    callbacks.queue_lock_event(key, 7, |events, lock| events.renewed(lock));
}

#[test]
fn events_beyond_the_bound_are_counted_and_told() {
    let (callbacks, go_on, hears) = busy();
    let key = Key::new("", "k", 16).unwrap();
    for _ in 0..MOST_EVENTS + 5 {
        renewed(&callbacks, &key);
    }
    drop(go_on);
    let next = || hears.recv_timeout(LONG).unwrap();
    assert_eq!(next(), Told::Missed(5));
    assert!((0..MOST_EVENTS).all(|_| next() == Told::Renewed));
    renewed(&callbacks, &key);
    assert_eq!(next(), Told::Renewed, "there is room again");
    callbacks.stop();
    drop(callbacks);
    assert!(hears.recv_timeout(LONG).is_err(), "nothing else was told");
}

#[test]
fn losses_and_callbacks_are_never_missed() {
    let (callbacks, go_on, hears) = busy();
    let key = Key::new("", "k", 16).unwrap();
    for _ in 0..MOST_EVENTS + 1 {
        renewed(&callbacks, &key);
    }
    let (ran, runs) = channel();
    callbacks.run(move || ran.send(()).unwrap());
    let reason = crate::LossReason::Expired;
    callbacks.queue_loss_event(&key, 7, move |events, lock| events.lost(lock, &reason));
    drop(go_on);
    runs.recv_timeout(LONG).unwrap();
    callbacks.stop();
    drop(callbacks);
    let mut told = Vec::new();
    while let Ok(one) = hears.recv_timeout(LONG) {
        told.push(one);
    }
    assert_eq!(told.last(), Some(&Told::Lost));
    assert_eq!(told.len(), MOST_EVENTS + 2);
}

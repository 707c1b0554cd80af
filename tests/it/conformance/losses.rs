//! How a holder hears that its lock is lost: in every way there is, once, and for good.

use std::sync::Arc;
use std::sync::mpsc::channel;

use leasehold::{Client, LossReason};

use crate::conformance::ground::Ground;
use crate::support::{Recorder, SOON, What, told_within};

/// Ways to lose a lock that was taken with half of [`Ground::ttl`] as its ttl, or more.
const WAYS: [Way; 5] = [
    Way::Expiry,
    Way::MaxHold,
    Way::Forgotten,
    Way::Forced,
    Way::Shutdown,
];

#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    Expiry,
    MaxHold,
    Forgotten,
    Forced,
    Shutdown,
}

impl Way {
    fn lock(self, ground: &dyn Ground, client: &Client) -> leasehold::MutexGuard {
        let mutex = client.mutex("k");
        let mutex = match self {
            Self::Expiry => mutex.ttl(ground.ttl()),
            Self::MaxHold => mutex.max_hold(ground.ttl()),
            _ => mutex,
        };
        mutex.lock().unwrap()
    }

    /// Loses it; who does so, where that is somebody.
    fn lose(self, ground: &dyn Ground, client: &Client) -> LossReason {
        match self {
            Self::Expiry => {
                ground.pass(ground.ttl());
                LossReason::Expired
            }
            Self::MaxHold => {
                ground.pass(ground.ttl());
                LossReason::MaxHold
            }
            Self::Forgotten => {
                ground.forget();
                LossReason::Deleted
            }
            Self::Forced => {
                let operator = ground.client();
                operator.mutex("k").force_unlock().unwrap().unwrap();
                let by = operator.holder_id().clone();
                LossReason::ForceUnlocked { by }
            }
            Self::Shutdown => {
                client.shutdown(SOON).unwrap();
                LossReason::Shutdown
            }
        }
    }
}

pub fn a_loss_is_told_in_every_way(ground: &dyn Ground) {
    for way in WAYS {
        let recorder = Recorder::new();
        let builder = ground.builder().events(Arc::clone(&recorder));
        let client = builder.build().unwrap();
        let guard = way.lock(ground, &client);
        let (signal, other) = (guard.lost_signal(), guard.lost_signal());
        let (called, calls) = channel();
        guard.on_lost(move |reason| called.send(reason).unwrap());
        hear(ground, &guard);
        let reason = way.lose(ground, &client);
        assert_eq!(told_within(SOON, &signal), reason);
        assert_eq!(told_within(SOON, &other), reason);
        assert!(guard.is_lost() && guard.remaining().is_zero());
        let checked = guard.check().unwrap_err();
        assert_eq!(checked.loss_reason(), Some(&reason));
        if way != Way::Shutdown {
            assert_eq!(calls.recv_timeout(SOON), Ok(reason.clone()));
            recorder.wait_for(1, What::Lost, "k");
        }
        let refused = guard.unlock().unwrap_err();
        assert_eq!(refused.loss_reason(), Some(&reason));
        ground.forget();
    }
}

/// Returns once a loss of the lock is told at once: after a moment it is watched.
fn hear(ground: &dyn Ground, guard: &leasehold::MutexGuard) {
    ground.pass(std::time::Duration::from_millis(100));
    guard.check().unwrap();
}

pub fn a_loss_is_told_once_and_for_good(ground: &dyn Ground) {
    let recorder = Recorder::new();
    let builder = ground.builder().events(Arc::clone(&recorder));
    let client = builder.build().unwrap();
    let guard = client.mutex("k").ttl(ground.ttl()).lock().unwrap();
    let signal = guard.lost_signal();
    ground.pass(ground.ttl());
    let reason = told_within(SOON, &signal);
    ground.forget();
    let next = client.mutex("k").lock().unwrap();
    assert_eq!(guard.check().unwrap_err().loss_reason(), Some(&reason));
    assert!(signal.try_recv().is_err());
    recorder.wait_for(1, What::Lost, "k");
    drop(guard);
    next.check().unwrap();
    next.unlock().unwrap();
    recorder.wait_for(2, What::Released, "k");
    assert_eq!(recorder.count(What::Lost, "k"), 1);
}

pub fn a_release_is_no_loss(ground: &dyn Ground) {
    let recorder = Recorder::new();
    let builder = ground.builder().events(Arc::clone(&recorder));
    let client = builder.build().unwrap();
    let guard = client.mutex("k").lock().unwrap();
    let signal = guard.lost_signal();
    guard.on_lost(|_| unreachable!("it was let go"));
    guard.unlock().unwrap();
    ground.forget();
    client.mutex("other").lock().unwrap().unlock().unwrap();
    assert!(signal.try_recv().is_err());
    assert_eq!(recorder.count(What::Lost, "k"), 0);
}

pub fn a_callback_may_take_the_lock_again(ground: &dyn Ground) {
    let client = ground.client();
    let guard = client.mutex("k").ttl(ground.ttl()).lock().unwrap();
    let (done, again) = channel();
    let mutex = client.mutex("k");
    guard.on_lost(move |_| done.send(mutex.try_lock_for(SOON)).unwrap());
    ground.pass(ground.ttl());
    let taken = again.recv_timeout(2 * SOON).expect("it is called");
    assert!(taken.unwrap().is_some());
}

//! How a holder learns of a loss: in every way that the API has, once, and for good.

use std::sync::Arc;
use std::sync::mpsc::channel;

use leasehold::{Client, LossReason};

use crate::conformance::backend::Backend;
use crate::support::{Recorder, SOON, What, lost_within};

/// Ways to lose a lock that was taken with half of [`Backend::ttl`] as its ttl, or more.
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
    fn lock(self, backend: &dyn Backend, client: &Client) -> leasehold::MutexGuard {
        let mutex = client.mutex("k");
        let mutex = match self {
            Self::Expiry => mutex.fixed_ttl(backend.ttl()),
            Self::MaxHold => mutex.max_hold(backend.ttl()),
            _ => mutex,
        };
        mutex.lock().unwrap()
    }

    /// Loses the lock. Returns the holder that took it, if there is one.
    fn lose(self, backend: &dyn Backend, client: &Client) -> LossReason {
        match self {
            Self::Expiry => {
                backend.pass(backend.ttl());
                LossReason::Expired
            }
            Self::MaxHold => {
                backend.pass(backend.ttl());
                LossReason::MaxHold
            }
            Self::Forgotten => {
                backend.forget();
                LossReason::Deleted
            }
            Self::Forced => {
                let operator = backend.client();
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

pub fn a_loss_is_reported_in_every_way(backend: &dyn Backend) {
    for way in WAYS {
        let recorder = Recorder::new();
        let builder = backend.builder().event_handler(Arc::clone(&recorder));
        let client = builder.build().unwrap();
        let guard = way.lock(backend, &client);
        let (signal, other) = (guard.lost_signal(), guard.lost_signal());
        let (called, calls) = channel();
        guard.on_lost(move |reason| called.send(reason).unwrap());
        wait_until_tracked(backend, &guard);
        let reason = way.lose(backend, &client);
        assert_eq!(lost_within(SOON, &signal), reason);
        assert_eq!(lost_within(SOON, &other), reason);
        assert!(guard.is_lost() && guard.remaining().is_zero());
        let checked = guard.check().unwrap_err();
        assert_eq!(checked.loss_reason(), Some(&reason));
        if way != Way::Shutdown {
            assert_eq!(calls.recv_timeout(SOON), Ok(reason.clone()));
            recorder.wait_for(1, What::Lost, "k");
        }
        let refused = guard.unlock().unwrap_err();
        assert_eq!(refused.loss_reason(), Some(&reason));
        backend.forget();
    }
}

/// Waits until the client tracks the key, so that it would be notified of a loss.
fn wait_until_tracked(backend: &dyn Backend, guard: &leasehold::MutexGuard) {
    backend.pass(std::time::Duration::from_millis(100));
    guard.check().unwrap();
}

pub fn a_loss_is_reported_once_and_final(backend: &dyn Backend) {
    let recorder = Recorder::new();
    let builder = backend.builder().event_handler(Arc::clone(&recorder));
    let client = builder.build().unwrap();
    let guard = client.mutex("k").fixed_ttl(backend.ttl()).lock().unwrap();
    let signal = guard.lost_signal();
    backend.pass(backend.ttl());
    let reason = lost_within(SOON, &signal);
    backend.forget();
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

pub fn a_release_is_no_loss(backend: &dyn Backend) {
    let recorder = Recorder::new();
    let builder = backend.builder().event_handler(Arc::clone(&recorder));
    let client = builder.build().unwrap();
    let guard = client.mutex("k").lock().unwrap();
    let signal = guard.lost_signal();
    guard.on_lost(|_| unreachable!("the lock was released"));
    guard.unlock().unwrap();
    backend.forget();
    client.mutex("other").lock().unwrap().unlock().unwrap();
    assert!(signal.try_recv().is_err());
    assert_eq!(recorder.count(What::Lost, "k"), 0);
}

pub fn a_callback_may_take_the_lock_again(backend: &dyn Backend) {
    let client = backend.client();
    let guard = client.mutex("k").fixed_ttl(backend.ttl()).lock().unwrap();
    let (done, again) = channel();
    let mutex = client.mutex("k");
    guard.on_lost(move |_| done.send(mutex.try_lock_for(SOON)).unwrap());
    backend.pass(backend.ttl());
    let taken = again.recv_timeout(2 * SOON).expect("the callback runs");
    assert!(taken.unwrap().is_some());
}

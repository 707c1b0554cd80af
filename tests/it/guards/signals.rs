//! `MutexGuard::lost_signal`: ready after a loss, and never otherwise.

use leasehold::crossbeam_channel::{TryRecvError, after, never, select};
use leasehold::{LossReason, LostSignal};

use crate::child::{self, Child, Parent};
use crate::steady::steady;
use crate::support::{SOON, Task, ask, in_redis, lost_within, millis, secs, server};

use super::overwrite;

/// Fails if the signal is ready, by any way to check it.
#[track_caller]
fn assert_silent(lost: &LostSignal) {
    assert_eq!(lost.try_recv(), Err(TryRecvError::Empty));
    select! {
        recv(lost) -> loss => panic!("ready, with {loss:?}"),
        recv(after(millis(50))) -> _ => {}
    }
}

#[test]
fn every_signal_receives_the_reason_once() {
    let server = server();
    let client = steady(&server.url())
        .ttl(secs(3))
        .renew_ratio(0.05)
        .build()
        .unwrap();
    let guard = client.mutex("k").lock().unwrap();
    let signals = [(); 5].map(|()| guard.lost_signal());
    let waiting = guard.lost_signal();
    let waiter = Task::start(move || waiting.recv().unwrap());
    signals
        .iter()
        .for_each(|lost| assert_eq!(lost.try_recv(), Err(TryRecvError::Empty)));
    overwrite(&server, "k", "60000");
    let loss = waiter.within(SOON, "the signal of a loss");
    let LossReason::TakenOver { by: Some(by) } = &loss else {
        panic!("{loss:?}");
    };
    assert_eq!(by.as_str(), "other/1/0");
    for lost in signals {
        assert_eq!(lost_within(SOON, &lost), loss);
        // The channel gets one message and stays connected: a second message just never comes.
        assert_silent(&lost);
    }
}

#[test]
fn a_signal_of_a_lost_lock_is_ready() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    let guard = client.mutex("k").fixed_ttl(millis(80)).lock().unwrap();
    assert_eq!(lost_within(SOON, &guard.lost_signal()), LossReason::Expired);
    for _ in 0..3 {
        assert_eq!(guard.lost_signal().try_recv(), Ok(LossReason::Expired));
    }
}

#[test]
fn a_signal_can_be_selected_among_others() {
    let server = server();
    let client = steady(&server.url())
        .ttl(secs(3))
        .renew_ratio(0.05)
        .build()
        .unwrap();
    let guard = client.mutex("k").lock().unwrap();
    let lost = guard.lost_signal();
    let other = never::<()>();
    ask(&server, &["DEL", &in_redis("k")]);
    select! {
        recv(lost) -> reason => assert_eq!(reason, Ok(LossReason::Deleted)),
        recv(other) -> _ => unreachable!("it never is ready"),
        recv(after(SOON)) -> _ => panic!("no loss was reported"),
    }
}

#[test]
fn a_signal_is_never_ready_after_release() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    let mutex = client.mutex("k").fixed_ttl(secs(3));
    let mut signals = Vec::new();
    for round in 0..4 {
        let guard = mutex.lock().unwrap();
        signals.push(guard.lost_signal());
        if round % 2 == 0 {
            guard.unlock().unwrap();
        } else {
            drop(guard);
        }
    }
    signals.iter().for_each(assert_silent);
    // The signals stay silent when another client overwrites or deletes the lock.
    overwrite(&server, "k", "60000");
    ask(&server, &["DEL", &in_redis("k")]);
    // They stay silent when the client is shut down and dropped.
    client.shutdown(secs(5)).unwrap();
    drop((mutex, client));
    // They stay silent after the ttl has passed.
    std::thread::sleep(millis(3_100));
    signals.iter().for_each(assert_silent);
}

#[test]
fn a_signal_outlives_its_guard_and_client() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    let guard = client.mutex("k").fixed_ttl(millis(80)).lock().unwrap();
    let (early, late) = (guard.lost_signal(), guard.lost_signal());
    assert_eq!(lost_within(SOON, &early), LossReason::Expired);
    drop((guard, client));
    assert_eq!(
        late.try_recv(),
        Ok(LossReason::Expired),
        "kept until it is read"
    );
}

#[test]
fn a_dropped_signal_affects_no_other() {
    let server = server();
    let client = steady(&server.url())
        .ttl(secs(3))
        .renew_ratio(0.05)
        .build()
        .unwrap();
    let guard = client.mutex("k").lock().unwrap();
    // As in a program's loop that requests a new signal in each round.
    for _ in 0..10_000 {
        drop(guard.lost_signal());
    }
    let kept = guard.lost_signal();
    ask(&server, &["DEL", &in_redis("k")]);
    assert_eq!(lost_within(SOON, &kept), LossReason::Deleted);
}

#[test]
fn dropped_signals_free_their_memory() {
    if child::memory().is_none() {
        return;
    }
    let server = server();
    let child = Child::start(ask_for_many_signals, &server.url());
    child.finish(secs(100));
}

pub fn ask_for_many_signals(parent: &Parent) {
    let client = steady(&parent.url).ttl(secs(60)).build().unwrap();
    let guard = client.mutex("k").lock().unwrap();
    let ask = |times: usize| (0..times).for_each(|_| drop(guard.lost_signal()));
    ask(1_000);
    let before = child::memory().unwrap();
    ask(200_000);
    let grown = child::memory().unwrap().saturating_sub(before);
    assert!(grown < 10 << 20, "{grown} bytes more");
    guard.unlock().unwrap();
}

#[test]
fn shutdown_notifies_holders() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    let guard = client.mutex("k").lock().unwrap();
    let lost = guard.lost_signal();
    client.shutdown(secs(5)).unwrap();
    assert_eq!(lost_within(SOON, &lost), LossReason::Shutdown);
    assert!(guard.is_lost());
}

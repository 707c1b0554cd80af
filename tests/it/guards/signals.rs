//! The signal of a loss: ready when it is lost, and never otherwise.

use leasehold::crossbeam_channel::{TryRecvError, after, never, select};
use leasehold::{LossReason, LostSignal};

use crate::child::{self, Child, Parent};
use crate::steady::steady;
use crate::support::{SOON, Task, ask, in_redis, millis, secs, server, told_within};

use super::steal;

/// Never became ready, in none of the ways to look.
#[track_caller]
fn assert_silent(lost: &LostSignal) {
    assert_eq!(lost.try_recv(), Err(TryRecvError::Empty));
    select! {
        recv(lost) -> told => panic!("ready, with {told:?}"),
        recv(after(millis(50))) -> _ => {}
    }
}

#[test]
fn every_signal_is_told_the_reason_once() {
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
    steal(&server, "k", "60000");
    let told = waiter.within(SOON, "the signal of a loss");
    let LossReason::TakenOver { by: Some(by) } = &told else {
        panic!("{told:?}");
    };
    assert_eq!(by.as_str(), "thief/1/0");
    for lost in signals {
        assert_eq!(told_within(SOON, &lost), told);
        // One message, and the end of nothing: it just does not come again.
        assert_silent(&lost);
    }
}

#[test]
fn a_signal_is_ready_at_once_when_the_lock_is_lost_already() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    let guard = client.mutex("k").fixed_ttl(millis(80)).lock().unwrap();
    assert_eq!(told_within(SOON, &guard.lost_signal()), LossReason::Expired);
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
        recv(after(SOON)) -> _ => panic!("no loss was told"),
    }
}

#[test]
fn a_signal_is_never_ready_once_the_lock_was_let_go() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    let mutex = client.mutex("k").fixed_ttl(millis(400));
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
    // Not when somebody else takes it or deletes it,
    steal(&server, "k", "60000");
    ask(&server, &["DEL", &in_redis("k")]);
    // not when the client ends, nor when it is gone,
    client.shutdown(secs(5)).unwrap();
    drop((mutex, client));
    // and not when the ttl has passed.
    std::thread::sleep(millis(500));
    signals.iter().for_each(assert_silent);
}

#[test]
fn a_signal_outlives_its_guard_and_client() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    let guard = client.mutex("k").fixed_ttl(millis(80)).lock().unwrap();
    let (early, late) = (guard.lost_signal(), guard.lost_signal());
    assert_eq!(told_within(SOON, &early), LossReason::Expired);
    drop((guard, client));
    assert_eq!(
        late.try_recv(),
        Ok(LossReason::Expired),
        "kept until it is looked at"
    );
}

#[test]
fn a_signal_that_nobody_keeps_costs_the_others_nothing() {
    let server = server();
    let client = steady(&server.url())
        .ttl(secs(3))
        .renew_ratio(0.05)
        .build()
        .unwrap();
    let guard = client.mutex("k").lock().unwrap();
    // As a loop that asks for a new one in each round would.
    for _ in 0..10_000 {
        drop(guard.lost_signal());
    }
    let kept = guard.lost_signal();
    ask(&server, &["DEL", &in_redis("k")]);
    assert_eq!(told_within(SOON, &kept), LossReason::Deleted);
}

#[test]
fn signals_that_nobody_keeps_cost_no_memory() {
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
fn shutting_down_is_told_to_whoever_still_holds() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    let guard = client.mutex("k").lock().unwrap();
    let lost = guard.lost_signal();
    client.shutdown(secs(5)).unwrap();
    assert_eq!(told_within(SOON, &lost), LossReason::Shutdown);
    assert!(guard.is_lost());
}

//! Renewal: a lock is kept during long work, and only held locks are renewed.

use std::time::{Duration, Instant};

use leasehold::LossReason;
use leasehold_testbed::{Reply, eventually};

use crate::steady::steady;
use crate::support::{
    Recorder, SOON, What, ask, expires_in, in_redis, lost_within, millis, script_calls, secs,
    server,
};

#[test]
fn long_work_keeps_its_lock_from_others() {
    let server = server();
    let (holder, other) = (
        steady(&server.url()).ttl(secs(3)).build().unwrap(),
        steady(&server.url()).build().unwrap(),
    );
    let guard = holder.mutex("k").lock().unwrap();
    let (start, lost) = (Instant::now(), guard.lost_signal());
    while start.elapsed() < secs(7) {
        assert!(other.mutex("k").try_lock().unwrap().is_none());
        let loss = lost.recv_timeout(millis(20));
        assert!(loss.is_err(), "lost after {:?}: {loss:?}", start.elapsed());
    }
    guard.unlock().unwrap();
    assert!(other.mutex("k").try_lock().unwrap().is_some());
}

#[test]
fn renewal_restores_the_ttl_and_never_adds() {
    let server = server();
    let recorder = Recorder::new();
    let client = steady(&server.url()).ttl(secs(4)).renew_ratio(0.05);
    let client = client.event_handler(recorder.clone()).build().unwrap();
    let guard = client.mutex("k").lock().unwrap();
    for _ in 0..8 {
        recorder.wait_for_more(1, What::Renewed, "k");
        let left = expires_in(&server, "k").expect("the lock is held");
        assert!(left <= secs(4), "{left:?}");
        assert!(guard.remaining() <= secs(4));
        assert!(left > secs(2), "{left:?} shortly after a renewal");
    }
    guard.unlock().unwrap();
}

#[test]
fn locks_are_renewed_as_often_as_the_ratio_says() {
    const TTL: Duration = Duration::from_secs(3);
    let server = server();
    let renewals = |ratio: f64, given: bool| {
        let recorder = Recorder::new();
        let client = steady(&server.url())
            .ttl(TTL)
            .event_handler(recorder.clone());
        let client = if given {
            client.renew_ratio(ratio)
        } else {
            client
        };
        let client = client.build().unwrap();
        let key = format!("{ratio}");
        let asked = Instant::now();
        let guard = client.mutex(&key).lock().unwrap();
        let loss = guard.lost_signal().recv_timeout(millis(3300));
        assert!(loss.is_err(), "{loss:?}");
        drop(guard);
        let count = recorder.count(What::Renewed, &key);
        // Renewals may come a little early, and late on a busy machine.
        let most = asked.elapsed().as_secs_f64() / (TTL.as_secs_f64() * ratio * 0.95);
        let least = 1.1 / ratio / 4.0;
        assert!(
            count as f64 <= most,
            "{count} renewals at {ratio}, not {most}"
        );
        assert!(
            count as f64 >= least,
            "{count} renewals at {ratio}, not {least}"
        );
    };
    std::thread::scope(|scope| {
        for ratio in [0.05, 0.1, 0.6] {
            scope.spawn(move || renewals(ratio, true));
        }
        // The default ttl.
        scope.spawn(move || renewals(1.0 / 3.0, false));
    });
}

#[test]
fn renewal_stops_at_the_unlock() {
    const ROUNDS: u64 = 10;
    let server = server();
    let recorder = Recorder::new();
    let client = steady(&server.url()).ttl(secs(3)).renew_ratio(0.05);
    let client = client.event_handler(recorder.clone()).build().unwrap();
    let mut calls_for_nobody = 0;
    for round in 0..ROUNDS {
        let guard = client.mutex("k").lock().unwrap();
        recorder.wait_for_more(1, What::Renewed, "k");
        if round % 2 == 0 {
            drop(guard);
        } else {
            guard.unlock().unwrap();
        }
        assert!(eventually(SOON, || expires_in(&server, "k").is_none()));
        let calls = script_calls(&server);
        // In this time the next renewal would come, and one more.
        std::thread::sleep(millis(310));
        calls_for_nobody += script_calls(&server) - calls;
    }
    // On a busy machine, one renewal may still be in flight in some rounds.
    assert!(
        calls_for_nobody < ROUNDS / 2,
        "{calls_for_nobody} in {ROUNDS} rounds"
    );
}

#[test]
fn a_lock_of_another_holder_is_never_renewed() {
    let server = server();
    let recorder = Recorder::new();
    let client = steady(&server.url()).ttl(secs(3)).renew_ratio(0.05);
    let client = client.event_handler(recorder.clone()).build().unwrap();
    let guard = client.mutex("k").lock().unwrap();
    recorder.wait_for(1, What::Renewed, "k");
    ask(
        &server,
        &["SET", &in_redis("k"), "another user's", "PX", "2500"],
    );
    let reason = lost_within(SOON, &guard.lost_signal());
    assert_eq!(reason, LossReason::TakenOver { by: None });
    let mut last = expires_in(&server, "k").expect("it is the other user's");
    assert!(last <= millis(2500), "{last:?}");
    while let Some(left) = expires_in(&server, "k") {
        assert!(left <= last, "renewed from {last:?} to {left:?}");
        last = left;
        std::thread::sleep(millis(10));
    }
    drop(guard);
}

#[test]
fn a_key_of_another_type_is_left_alone() {
    let server = server();
    let client = steady(&server.url())
        .ttl(secs(3))
        .renew_ratio(0.05)
        .build()
        .unwrap();
    let guard = client.mutex("k").lock().unwrap();
    ask(&server, &["DEL", &in_redis("k")]);
    // Between the two commands the holder may read the key and find it gone, which is correct, too.
    ask(&server, &["RPUSH", &in_redis("k"), "theirs"]);
    let reason = lost_within(SOON, &guard.lost_signal());
    let expected = [LossReason::TakenOver { by: None }, LossReason::Deleted];
    assert!(expected.contains(&reason), "{reason:?}");
    assert!(guard.unlock().unwrap_err().is_lease_lost());
    assert_eq!(ask(&server, &["LLEN", &in_redis("k")]), Reply::Int(1));
    assert_eq!(expires_in(&server, "k"), None);
}

#[test]
fn a_persisted_lock_gets_its_ttl_back() {
    let server = server();
    let client = steady(&server.url())
        .ttl(secs(4))
        .renew_ratio(0.05)
        .build()
        .unwrap();
    let guard = client.mutex("k").lock().unwrap();
    assert_eq!(ask(&server, &["PERSIST", &in_redis("k")]), Reply::Int(1));
    assert!(eventually(SOON, || expires_in(&server, "k").is_some()));
    assert!(expires_in(&server, "k").unwrap() <= secs(4));
    guard.unlock().unwrap();
}

#[test]
fn a_lock_whose_ttl_was_cut_short_is_kept() {
    let server = server();
    let recorder = Recorder::new();
    let client = steady(&server.url()).ttl(secs(4)).renew_ratio(0.05);
    let client = client.event_handler(recorder.clone()).build().unwrap();
    let guard = client.mutex("k").lock().unwrap();
    ask(&server, &["PEXPIRE", &in_redis("k"), "2500"]);
    assert!(eventually(SOON, || expires_in(&server, "k").unwrap() > millis(2500)));
    guard.unlock().unwrap();
}

#[test]
fn many_locks_of_different_ages_are_renewed() {
    let server = server();
    let client = steady(&server.url()).ttl(secs(3)).build().unwrap();
    let start = Instant::now();
    let mut guards = Vec::new();
    while start.elapsed() < secs(2) {
        for _ in 0..20 {
            let mutex = client.mutex(format!("k{}", guards.len()));
            guards.push(mutex.try_lock().unwrap().expect("its first holder"));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let last = guards.last().unwrap().lost_signal();
    assert!(last.recv_timeout(secs(5)).is_err());
    for guard in guards {
        guard.check().unwrap();
        guard.unlock().unwrap();
    }
}

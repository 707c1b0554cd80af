//! `MutexGuard::extend`: never shortens a lock, never touches another holder's, never exceeds `max_hold`.

use std::time::Instant;

use leasehold::{ErrorKind, LossReason};
use leasehold_testbed::Proxy;

use crate::steady::steady;
use crate::support::{
    SOON, Task, ask, builder, expires_in, in_redis, is_held, lost_within, millis, secs, server,
};

use super::overwrite;

#[test]
fn an_extended_lock_lasts_for_its_extension() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    for renewed in [true, false] {
        let mutex = client.mutex("k");
        let mutex = match renewed {
            true => mutex.ttl(secs(5)),
            false => mutex.fixed_ttl(secs(5)),
        };
        let guard = mutex.lock().unwrap();
        let asked = Instant::now();
        guard.extend(secs(60)).unwrap();
        let left = guard.remaining() + asked.elapsed();
        assert!(left > secs(58), "{left:?}");
        let ttl = expires_in(&server, "k").unwrap();
        assert!(
            ttl <= secs(60) && ttl + asked.elapsed() > secs(59),
            "{ttl:?}"
        );
        guard.unlock().unwrap();
        assert!(!is_held(&server, "k"));
    }
}

#[test]
fn extending_by_less_never_shortens() {
    let server = server();
    let client = steady(&server.url()).ttl(secs(20)).build().unwrap();
    let guard = client.mutex("k").lock().unwrap();
    guard.extend(secs(60)).unwrap();
    for shorter in [millis(10), millis(500), secs(5), secs(59)] {
        guard.extend(shorter).unwrap();
        assert!(guard.remaining() > secs(50), "after {shorter:?}");
        assert!(
            expires_in(&server, "k").unwrap() > secs(50),
            "after {shorter:?}"
        );
    }
}

#[test]
fn concurrent_renewals_and_extensions_never_shorten() {
    let server = server();
    let proxy = Proxy::start(server.port()).unwrap();
    let client = steady(&proxy.url())
        .ttl(secs(3))
        .renew_ratio(0.05)
        .build()
        .unwrap();
    let guard = client.mutex("k").lock().unwrap();
    // With this delay, renewals are in flight most of the time.
    proxy.delay(millis(20));
    let start = Instant::now();
    let (mut promised, mut last) = (start, start);
    let mut n: u64 = 0;
    while start.elapsed() < secs(3) {
        n += 1;
        let duration = millis(3_000 + n * 97 % 9_000);
        let asked = Instant::now();
        guard.extend(duration).unwrap();
        // The validity is a little shorter, by the allowance for clock drift.
        promised = promised.max(asked + duration * 98 / 100 - millis(5));
        let ends = Instant::now() + guard.remaining();
        assert!(ends >= promised, "{:?} too short", promised - ends);
        let left = expires_in(&server, "k").expect("the lock is held");
        // `left` was read before the reply came, so this time is not too early.
        let in_redis = Instant::now() + left;
        assert!(
            in_redis >= promised,
            "{:?} too short in Redis",
            promised - in_redis
        );
        // The two clocks are read one after the other.
        assert!(ends + millis(50) >= last, "shortened by {:?}", last - ends);
        last = ends;
    }
    proxy.delay(millis(0));
    guard.unlock().unwrap();
}

#[test]
fn threads_may_extend_the_same_guard_together() {
    let server = server();
    let client = steady(&server.url())
        .ttl(secs(3))
        .renew_ratio(0.05)
        .build()
        .unwrap();
    let guard = client.mutex("k").lock().unwrap();
    std::thread::scope(|scope| {
        for n in 0..8 {
            let guard = &guard;
            scope.spawn(move || {
                for round in 0..20 {
                    guard.extend(secs(5 + (n * 7 + round) % 20)).unwrap();
                }
            });
        }
    });
    assert!(guard.remaining() > secs(15));
    guard.unlock().unwrap();
}

#[test]
fn an_extended_lock_is_renewed() {
    let server = server();
    let client = steady(&server.url()).ttl(secs(3)).build().unwrap();
    let guard = client.mutex("k").lock().unwrap();
    guard.extend(millis(3_500)).unwrap();
    let lost = guard.lost_signal().recv_timeout(secs(6));
    assert!(lost.is_err(), "{lost:?}");
    guard.unlock().unwrap();
}

#[test]
fn an_extended_fixed_ttl_ends_with_its_extension() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    let guard = client.mutex("k").fixed_ttl(secs(3)).lock().unwrap();
    let asked = Instant::now();
    guard.extend(secs(5)).unwrap();
    assert_eq!(lost_within(SOON, &guard.lost_signal()), LossReason::Expired);
    let lasted = asked.elapsed();
    assert!(lasted > millis(4_900), "{lasted:?}");
}

#[test]
fn extending_a_lost_lock_fails_and_changes_nothing() {
    let server = server();
    let client = steady(&server.url()).ttl(secs(20)).build().unwrap();
    let guard = client.mutex("gone").lock().unwrap();
    ask(&server, &["DEL", &in_redis("gone")]);
    let error = guard.extend(secs(30)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::LeaseLost);
    assert_eq!(error.loss_reason(), Some(&LossReason::Deleted));
    assert!(!is_held(&server, "gone"), "not created again");
    // The thread that finds the loss notifies all others.
    assert_eq!(lost_within(SOON, &guard.lost_signal()), LossReason::Deleted);

    let guard = client.mutex("overwritten").lock().unwrap();
    overwrite(&server, "overwritten", "5000");
    let error = guard.extend(secs(30)).unwrap_err();
    assert!(
        matches!(error.loss_reason(), Some(LossReason::TakenOver { .. })),
        "{error}"
    );
    assert!(expires_in(&server, "overwritten").is_none_or(|left| left <= secs(5)));
}

#[test]
fn extending_beyond_max_hold_changes_nothing() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    let guard = client
        .mutex("k")
        .fixed_ttl(secs(5))
        .max_hold(secs(20))
        .lock()
        .unwrap();
    let error = guard.extend(secs(21)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidConfig);
    assert!(error.to_string().contains("max_hold"), "{error}");
    assert!(error.to_string().contains("21s"), "{error}");
    assert!(expires_in(&server, "k").unwrap() <= secs(5));
    guard.extend(secs(10)).unwrap();
    assert!(guard.remaining() > secs(8));
    guard.unlock().unwrap();
}

#[test]
fn extending_without_reply_is_no_loss() {
    let server = server();
    let client = builder(&server.url())
        .command_timeout(secs(2))
        .build()
        .unwrap();
    let guard = client.mutex("k").fixed_ttl(secs(60)).lock().unwrap();
    let before = guard.remaining();
    server.stop();
    let (error, guard) = Task::start(move || (guard.extend(secs(90)).unwrap_err(), guard))
        .within(SOON, "an extension without a reply");
    assert!(error.is_unavailable(), "{error}");
    assert_eq!(error.key(), Some("k"));
    assert!(!guard.is_lost(), "held for as long as it was before");
    assert!(guard.remaining() <= before);
    server.resume();
    guard.extend(secs(90)).unwrap();
    assert!(guard.remaining() > secs(80));
    guard.unlock().unwrap();
}

//! Ttls: which locks end by themselves, when they end, and what their holders learn.

use std::time::{Duration, Instant};

use leasehold::{ErrorKind, LossReason};

use crate::child::{Child, Parent};
use crate::steady::steady;
use crate::support::{
    Recorder, SOON, Task, What, ask, expires_in, in_redis, is_held, lost_within, millis, secs,
    server,
};

/// The delay to allow for on a busy machine.
const SLACK: Duration = Duration::from_secs(3);

#[test]
fn a_fixed_ttl_is_not_renewed() {
    let server = server();
    let recorder = Recorder::new();
    let client = steady(&server.url())
        .event_handler(recorder.clone())
        .build()
        .unwrap();
    let asked = Instant::now();
    let guard = client.mutex("k").fixed_ttl(millis(900)).lock().unwrap();
    assert!(guard.remaining() < millis(900));
    assert_eq!(lost_within(SOON, &guard.lost_signal()), LossReason::Expired);
    let lasted = asked.elapsed();
    assert!(lasted > millis(800), "lost after {lasted:?} already");
    assert!(lasted < millis(900) + SLACK, "lost after {lasted:?} only");
    assert_eq!(recorder.count(What::Renewed, "k"), 0);
    let next = client.mutex("k").try_lock_for(SLACK).unwrap();
    assert!(next.is_some(), "Redis has deleted it, too");
}

#[test]
fn a_ttl_set_with_renewal_is_renewed() {
    let server = server();
    let recorder = Recorder::new();
    let client = steady(&server.url())
        .event_handler(recorder.clone())
        .build()
        .unwrap();
    let guard = client.mutex("k").ttl(secs(3)).lock().unwrap();
    recorder.wait_for(4, What::Renewed, "k");
    guard.unlock().unwrap();
}

#[test]
fn the_last_of_ttl_and_fixed_ttl_counts() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    let mutex = client.mutex("k").ttl(secs(60)).fixed_ttl(millis(400));
    let guard = mutex.clone().lock().unwrap();
    assert_eq!(lost_within(SOON, &guard.lost_signal()), LossReason::Expired);
    drop(guard);
    let guard = mutex.ttl(secs(3)).lock().unwrap();
    // The wait is three ttls long.
    let lost = guard.lost_signal().recv_timeout(secs(9));
    assert!(lost.is_err(), "{lost:?}");
}

#[test]
fn validity_ends_before_the_key_does() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    for ttl in [10, 25, 100, 1000].map(millis) {
        for _ in 0..20 {
            // On a busy machine the shortest ttl may be over before the test looks.
            let Ok(Some(guard)) = client.mutex("k").fixed_ttl(ttl).try_lock() else {
                continue;
            };
            let left = guard.remaining();
            let in_redis = expires_in(&server, "k").unwrap_or_default();
            assert!(left <= ttl, "{left:?} of {ttl:?}");
            // The ttl in Redis and the validity both count down. The ttl was read first, so it must not be shorter than
            // the validity.
            let later = guard.remaining();
            assert!(later <= in_redis + millis(1), "{later:?} of {in_redis:?}");
            drop(guard);
        }
    }
}

#[test]
fn an_expired_lock_is_lost_in_every_method() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    let guard = client.mutex("k").fixed_ttl(millis(100)).lock().unwrap();
    assert_eq!(lost_within(SOON, &guard.lost_signal()), LossReason::Expired);
    assert!(guard.is_lost());
    assert_eq!(guard.remaining(), Duration::ZERO);
    let said = [
        guard.check().unwrap_err(),
        guard.extend(secs(1)).unwrap_err(),
        guard.unlock().unwrap_err(),
    ];
    for error in said {
        assert_eq!(error.kind(), ErrorKind::LeaseLost);
        assert_eq!(error.loss_reason(), Some(&LossReason::Expired));
        assert_eq!(error.key(), Some("k"));
    }
}

#[test]
fn max_hold_ends_a_renewed_lock() {
    let server = server();
    let client = steady(&server.url()).ttl(secs(3)).build().unwrap();
    let asked = Instant::now();
    let guard = client.mutex("k").max_hold(secs(5)).lock().unwrap();
    let granted = Instant::now();
    let reason = lost_within(SOON, &guard.lost_signal());
    let (since_asked, since_granted) = (asked.elapsed(), granted.elapsed());
    assert_eq!(reason, LossReason::MaxHold);
    assert!(
        since_asked > millis(4_900),
        "lost after {since_asked:?} already"
    );
    assert!(
        since_granted < secs(5) + SLACK,
        "lost after {since_granted:?} only"
    );
    let error = guard.unlock().unwrap_err();
    assert_eq!(error.loss_reason(), Some(&LossReason::MaxHold));
}

#[test]
fn max_hold_below_the_ttl_ends_the_lock() {
    let server = server();
    let client = steady(&server.url()).ttl(secs(20)).build().unwrap();
    let guard = client.mutex("k").max_hold(secs(3)).lock().unwrap();
    assert!(guard.remaining() <= secs(3));
    let in_redis = expires_in(&server, "k").unwrap();
    assert!(in_redis <= secs(3), "{in_redis:?}");
    assert_eq!(lost_within(SOON, &guard.lost_signal()), LossReason::MaxHold);
}

#[test]
fn max_hold_frees_a_forgotten_guard() {
    let server = server();
    let client = steady(&server.url()).ttl(secs(3)).max_hold(secs(5));
    let client = client.build().unwrap();
    std::mem::forget(client.mutex("k").lock().unwrap());
    let granted = Instant::now();
    let next = client.mutex("k").try_lock_for(secs(20)).unwrap();
    let waited = granted.elapsed();
    assert!(next.is_some());
    assert!(waited > secs(4), "free after {waited:?} already");
    assert!(waited < secs(5) + SLACK, "free after {waited:?} only");
}

#[test]
fn max_hold_caps_a_longer_fixed_ttl() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    let mutex = client.mutex("k").fixed_ttl(secs(30)).max_hold(secs(5));
    let guard = mutex.lock().unwrap();
    assert!(guard.remaining() <= secs(5));
    assert!(expires_in(&server, "k").unwrap() <= secs(5));
    guard.unlock().unwrap();
}

#[test]
fn drop_after_expiry_keeps_the_next_holder() {
    let server = server();
    let (one, two) = (
        steady(&server.url()).build().unwrap(),
        steady(&server.url()).build().unwrap(),
    );
    let late = one.mutex("k").fixed_ttl(millis(200)).lock().unwrap();
    let next = two
        .mutex("k")
        .try_lock_for(SOON)
        .unwrap()
        .expect("it expired");
    assert!(late.is_lost(), "before another client has it");
    assert!(next.fencing_token() > late.fencing_token());
    drop(late);
    // This request is behind the late release on the same connection.
    assert!(
        one.mutex("k").try_lock().unwrap().is_none(),
        "still the next holder's"
    );
    next.check().unwrap();
    next.unlock().unwrap();
}

#[test]
fn the_crash_of_a_holder_frees_its_lock_within_the_ttl() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    let mut child = Child::start(hold_until_killed, &server.url());
    let token: u64 = child.receive(secs(30));
    assert!(is_held(&server, "crash"));
    assert!(client.mutex("crash").try_lock().unwrap().is_none());
    let waiting = client.mutex("crash");
    let waiter = Task::start(move || {
        let guard = waiting.lock().unwrap();
        (Instant::now(), guard.fencing_token())
    });
    child.kill();
    let killed = Instant::now();
    let (entered, next) = waiter.within(secs(30), "the grant after the crash");
    let waited = entered.saturating_duration_since(killed);
    assert!(waited < CRASH_TTL + SLACK, "{waited:?} after the crash");
    assert!(next > token);
}

const CRASH_TTL: Duration = Duration::from_secs(2);

pub fn hold_until_killed(parent: &Parent) {
    let client = steady(&parent.url).ttl(CRASH_TTL).build().unwrap();
    let guard = client.mutex("crash").lock().unwrap();
    parent.tell(guard.fencing_token());
    parent.wait_for_end();
}

#[test]
fn a_waiter_enters_after_a_ttl_without_notifications() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    // No client has this lock, so no client releases it, and no notification comes.
    let value = "lh1 0123456789abcdef0123456789abcdef 1795263780943818 host/1/0";
    ask(&server, &["SET", &in_redis("k"), value, "PX", "700"]);
    let start = Instant::now();
    let guard = client.mutex("k").try_lock_for(secs(20)).unwrap();
    let waited = start.elapsed();
    assert!(guard.is_some());
    assert!(waited < millis(700) + SLACK, "{waited:?}");
}

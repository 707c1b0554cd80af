//! Releases: confirmed by `unlock`, and of the guard's own lock only.

use leasehold::{ErrorKind, LossReason};
use leasehold_testbed::eventually;

use crate::steady::steady;
use crate::support::{
    Recorder, SOON, Task, What, ask, in_redis, is_held, lost_within, millis, secs, server, value_of,
};

use super::{OTHER_HOLDER, overwrite};

#[test]
fn unlock_returns_after_redis_confirms() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    for _ in 0..100 {
        let guard = client.mutex("k").lock().unwrap();
        guard.unlock().unwrap();
        assert!(!is_held(&server, "k"));
    }
}

#[test]
fn a_dropped_guard_releases_soon() {
    let server = server();
    let client = steady(&server.url()).ttl(secs(60)).build().unwrap();
    for _ in 0..100 {
        drop(client.mutex("k").lock().unwrap());
        assert!(eventually(SOON, || !is_held(&server, "k")));
    }
}

#[test]
fn unlock_of_lost_locks_keeps_the_new_holder() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    for noticed in [true, false] {
        for unlocked in [true, false] {
            let key = format!("{noticed}-{unlocked}");
            let guard = client.mutex(&key).lock().unwrap();
            overwrite(&server, &key, "60000");
            if noticed {
                assert!(guard.extend(secs(7)).unwrap_err().is_lease_lost());
            }
            if unlocked {
                let error = guard.unlock().unwrap_err();
                assert_eq!(error.kind(), ErrorKind::LeaseLost);
                let reason = error.loss_reason();
                assert!(
                    matches!(reason, Some(LossReason::TakenOver { by: Some(_) })),
                    "{error}"
                );
            } else {
                drop(guard);
            }
            // This request is behind any release on the same connection. Its reply shows that the release was carried
            // out.
            assert!(client.mutex(&key).try_lock().unwrap().is_none());
            assert_eq!(value_of(&server, &key).as_deref(), Some(OTHER_HOLDER));
        }
    }
}

#[test]
fn unlock_of_a_deleted_lock_is_an_error() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    let guard = client.mutex("k").lock().unwrap();
    ask(&server, &["DEL", &in_redis("k")]);
    let error = guard.unlock().unwrap_err();
    assert_eq!(error.loss_reason(), Some(&LossReason::Deleted));
    assert_eq!(error.key(), Some("k"));
}

#[test]
fn unlock_past_validity_fails_even_with_the_key() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    let guard = client.mutex("k").fixed_ttl(millis(150)).lock().unwrap();
    // After its validity the lock is lost, even if Redis still has the key.
    ask(&server, &["PERSIST", &in_redis("k")]);
    assert_eq!(lost_within(SOON, &guard.lost_signal()), LossReason::Expired);
    let error = guard.unlock().unwrap_err();
    assert_eq!(error.loss_reason(), Some(&LossReason::Expired));
}

#[test]
fn a_lost_lock_is_released_if_still_ours() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    // In this process, the lock is lost at the end of its ttl. In Redis, the key has no ttl any more.
    let guard = client.mutex("k").fixed_ttl(secs(1)).lock().unwrap();
    ask(&server, &["PERSIST", &in_redis("k")]);
    let lost = guard.lost_signal();
    assert_eq!(lost_within(SOON, &lost), LossReason::Expired);
    drop(guard);
    assert!(eventually(SOON, || !is_held(&server, "k")), "leaked");
}

#[test]
fn a_forgotten_guard_without_max_hold_stays_held() {
    let server = server();
    let recorder = Recorder::new();
    let client = steady(&server.url()).ttl(secs(3)).renew_ratio(0.1);
    let client = client.event_handler(recorder.clone()).build().unwrap();
    std::mem::forget(client.mutex("k").lock().unwrap());
    recorder.wait_for(12, What::Renewed, "k");
    assert!(is_held(&server, "k"));
    client.shutdown(secs(5)).unwrap();
    let free = eventually(SOON, || !is_held(&server, "k"));
    assert!(free, "after its ttl: no renewal any more");
}

#[test]
fn a_panicking_thread_releases_its_locks() {
    let server = server();
    let client = steady(&server.url()).ttl(secs(60)).build().unwrap();
    let theirs = client.clone();
    let thread = std::thread::spawn(move || {
        let _one = theirs.mutex("one").lock().unwrap();
        let _two = theirs.mutex("two").lock().unwrap();
        panic!("a test's own panic");
    });
    assert!(thread.join().is_err());
    assert!(client.mutex("one").try_lock().unwrap().is_some());
    assert!(client.mutex("two").try_lock().unwrap().is_some());
}

#[test]
fn a_release_waits_for_no_answer() {
    let server = server();
    let client = steady(&server.url()).command_timeout(secs(9)).ttl(secs(60));
    let client = client.build().unwrap();
    let guards: Vec<_> = (0..20)
        .map(|n| client.mutex(format!("k{n}")).lock().unwrap())
        .collect();
    server.stop();
    // Waiting for one reply would take longer than this limit.
    Task::start(move || drop(guards)).within(secs(5), "dropping twenty guards");
    server.resume();
    let free = eventually(SOON, || {
        (0..20).all(|n| !is_held(&server, &format!("k{n}")))
    });
    assert!(free, "every release arrives");
}

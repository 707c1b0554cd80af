//! The getters of a guard.

use std::time::Duration;

use leasehold::{ErrorKind, LossReason};

use crate::steady::steady;
use crate::support::{
    Recorder, SOON, What, ask, expires_in, in_redis, lost_within, millis, secs, server, value_of,
};

#[test]
fn a_guard_shows_key_token_and_validity() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    let guard = client.mutex("k").lock().unwrap();
    assert_eq!(guard.key(), "k");
    assert!(!guard.is_lost());
    guard.check().unwrap();
    let text = format!("{guard:?}");
    assert!(text.contains("\"k\"") && text.contains(&guard.fencing_token().to_string()));
    // Other users can read this client's name in Redis.
    let value = value_of(&server, "k").expect("the lock is held");
    assert!(
        value.ends_with(&format!(" {}", client.holder_id())),
        "{value}"
    );
    guard.unlock().unwrap();
}

#[test]
fn remaining_counts_down_from_less_than_the_ttl() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    let guard = client.mutex("k").fixed_ttl(secs(2)).lock().unwrap();
    let mut last = secs(2);
    while !guard.is_lost() {
        let left = guard.remaining();
        assert!(left < last, "{left:?} after {last:?}");
        if left.is_zero() {
            break;
        }
        let in_redis = expires_in(&server, "k").unwrap_or_default();
        let later = guard.remaining();
        assert!(later <= in_redis + millis(1), "{later:?} of {in_redis:?}");
        last = left;
    }
    assert!(guard.is_lost());
    assert_eq!(guard.remaining(), Duration::ZERO);
}

#[test]
fn renewal_raises_the_remaining_time() {
    let server = server();
    let recorder = Recorder::new();
    let client = steady(&server.url()).ttl(secs(3)).renew_ratio(0.2);
    let client = client.event_handler(recorder.clone()).build().unwrap();
    let guard = client.mutex("k").lock().unwrap();
    let at_first = guard.remaining();
    recorder.wait_for(6, What::Renewed, "k");
    // More than 3 s after the grant, and less than one ttl after a renewal.
    let now = guard.remaining();
    assert!(
        !now.is_zero() && now < secs(3),
        "{now:?}, {at_first:?} at first"
    );
}

#[test]
fn fencing_tokens_rise_with_every_grant_of_every_kind() {
    let server = server();
    let clients = [(); 3].map(|()| steady(&server.url()).build().unwrap());
    let mut last = 0;
    for round in 0..60 {
        let client = &clients[round % 3];
        let guard = client.mutex("k").try_lock_for(SOON).unwrap().unwrap();
        let token = guard.fencing_token();
        assert!(token > last, "{token} after {last} in round {round}");
        last = token;
        match round % 4 {
            0 => drop(guard),
            1 => drop(guard.unlock().unwrap()),
            2 => {
                ask(&server, &["DEL", &in_redis("k")]);
                assert!(guard.unlock().is_err());
            }
            _ => {
                guard.unlock().unwrap();
                // Tokens rise even if the counter is deleted.
                ask(&server, &["DEL", &in_redis("~fence")]);
            }
        }
    }
}

#[test]
fn a_deleted_lock_is_lost_in_every_method() {
    let server = server();
    let client = steady(&server.url())
        .ttl(secs(3))
        .renew_ratio(0.05)
        .build()
        .unwrap();
    let guard = client.mutex("k").lock().unwrap();
    let lost = guard.lost_signal();
    ask(&server, &["DEL", &in_redis("k")]);
    assert_eq!(lost_within(SOON, &lost), LossReason::Deleted);
    assert!(guard.is_lost());
    assert_eq!(guard.remaining(), Duration::ZERO);
    let errors = [
        guard.check().unwrap_err(),
        guard.extend(secs(3)).unwrap_err(),
        guard.unlock().unwrap_err(),
    ];
    for error in errors {
        assert_eq!(error.kind(), ErrorKind::LeaseLost);
        assert!(error.is_lease_lost() && !error.is_unavailable());
        assert_eq!(error.loss_reason(), Some(&LossReason::Deleted));
        assert_eq!(error.key(), Some("k"));
    }
}

#[test]
fn a_loss_is_final_if_the_value_returns() {
    let server = server();
    let client = steady(&server.url())
        .ttl(secs(3))
        .renew_ratio(0.05)
        .build()
        .unwrap();
    let guard = client.mutex("k").lock().unwrap();
    let value = value_of(&server, "k").expect("the lock is held");
    ask(&server, &["DEL", &in_redis("k")]);
    assert_eq!(lost_within(SOON, &guard.lost_signal()), LossReason::Deleted);
    ask(&server, &["SET", &in_redis("k"), &value, "PX", "60000"]);
    assert!(guard.is_lost());
    assert!(guard.extend(secs(10)).unwrap_err().is_lease_lost());
    assert!(guard.unlock().unwrap_err().is_lease_lost());
}

/// Scripts refuse grants at 2^53 µs, some 200 years from now.
#[test]
fn the_greatest_token_fits_an_i64() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    ask(
        &server,
        &["ZADD", &in_redis("~fence"), "9007199254000000", "t"],
    );
    let guard = client.mutex("k").lock().unwrap();
    assert_eq!(guard.fencing_token(), 9_007_199_254_000_001 << 10);
    let token = guard.fencing_token_i64();
    assert_eq!(u64::try_from(token), Ok(guard.fencing_token()));
    drop(guard);
    let error = client.mutex("other").try_lock().unwrap_err();
    assert!(!error.is_unavailable(), "{error}");
}

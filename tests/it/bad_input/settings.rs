//! Settings out of their bounds are refused when a client is built, or when a lock is acquired.

use std::time::Duration;

use leasehold::{Builder, Client, Error, ErrorKind, Mutex};

use crate::fakes::closed_port;
use crate::support::{millis, secs};

use super::hasty;

const DAY: Duration = Duration::from_secs(24 * 60 * 60);

fn nowhere() -> String {
    format!("redis://127.0.0.1:{}", closed_port())
}

#[track_caller]
fn assert_names(error: &Error, field: &str, value: &str) {
    assert_eq!(error.kind(), ErrorKind::InvalidConfig, "{error}");
    let text = error.to_string();
    assert!(text.contains(&format!("{field} must be")), "{text}");
    assert!(text.contains(&format!("not {value}")), "{text}");
}

#[test]
fn a_client_with_an_invalid_setting_is_refused() {
    type Change = fn(Builder) -> Builder;
    let cases: &[(&str, &str, Change)] = &[
        ("ttl", "0ns", |b| b.ttl(Duration::ZERO)),
        ("ttl", "999µs", |b| b.ttl(Duration::from_micros(999))),
        ("ttl", "9.999ms", |b| b.ttl(Duration::from_micros(9_999))),
        ("ttl", "86400.001s", |b| b.ttl(DAY + millis(1))),
        ("ttl", "18446744073709551615", |b| b.ttl(Duration::MAX)),
        ("ttl", "3s", |b| b.max_ttl(secs(2))),
        ("max_ttl", "9ms", |b| b.max_ttl(millis(9))),
        ("max_ttl", "86401s", |b| b.max_ttl(DAY + secs(1))),
        ("max_hold", "0ns", |b| b.max_hold(Duration::ZERO)),
        ("max_hold", "9ms", |b| b.max_hold(millis(9))),
        ("renew_ratio", "0", |b| b.renew_ratio(0.0)),
        ("renew_ratio", "0.91", |b| b.renew_ratio(0.91)),
        ("renew_ratio", "-1", |b| b.renew_ratio(-1.0)),
        ("renew_ratio", "NaN", |b| b.renew_ratio(f64::NAN)),
        ("renew_ratio", "inf", |b| b.renew_ratio(f64::INFINITY)),
        ("connect_timeout", "0ns", |b| {
            b.connect_timeout(Duration::ZERO)
        }),
        ("connect_timeout", "61s", |b| b.connect_timeout(secs(61))),
        ("command_timeout", "0ns", |b| {
            b.command_timeout(Duration::ZERO)
        }),
        ("command_timeout", "61s", |b| b.command_timeout(secs(61))),
        ("max_connection_idle", "99ms", |b| {
            b.max_connection_idle(millis(99))
        }),
        ("max_connection_age", "999ms", |b| {
            b.max_connection_age(millis(999))
        }),
        ("pipelines", "0", |b| b.pipelines(0)),
        ("pipelines", "5", |b| b.pipelines(5)),
        ("transactions", "0", |b| b.max_transactions(0)),
        ("transactions", "65", |b| b.max_transactions(65)),
        ("max_hand_offs", "1024", |b| b.max_hand_offs(1024)),
        ("max_hand_offs", "4294967295", |b| b.max_hand_offs(u32::MAX)),
        ("max_key_bytes", "0", |b| b.max_key_bytes(0)),
        ("max_key_bytes", "65537", |b| b.max_key_bytes(65_537)),
        ("prefix", "\"a\\nb\"", |b| b.prefix("a\nb")),
        ("prefix", "\"a\\0\"", |b| b.prefix("a\0")),
        ("prefix", "\"a:~\"", |b| b.prefix("a:~")),
        ("prefix", "\"a:~queue:\"", |b| b.prefix("a:~queue:")),
    ];
    for (field, value, change) in cases {
        // No server listens there: the settings are checked before the client connects.
        assert_names(
            &change(hasty(&nowhere())).build().unwrap_err(),
            field,
            value,
        );
        assert_names(
            &change(hasty(&nowhere())).build_lazy().unwrap_err(),
            field,
            value,
        );
    }
    let error = hasty(&nowhere())
        .max_hand_offs(1024)
        .build_lazy()
        .unwrap_err();
    assert!(
        error
            .to_string()
            .ends_with("max_hand_offs must be 0 to 1023, not 1024")
    );
    let error = hasty(&nowhere())
        .prefix(&"x".repeat(1 << 20))
        .build_lazy()
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidConfig);
    assert!(error.to_string().len() < 500);
}

#[test]
fn settings_at_their_bounds_are_accepted() {
    let build = |builder: Builder| drop(builder.build_lazy().unwrap());
    build(hasty(&nowhere()).ttl(millis(10)));
    build(
        hasty(&nowhere())
            .ttl(DAY)
            .max_ttl(DAY)
            .max_hold(Duration::MAX),
    );
    build(hasty(&nowhere()).renew_ratio(0.05).pipelines(4).prefix(""));
    build(
        hasty(&nowhere())
            .renew_ratio(0.9)
            .pipelines(1)
            .prefix(&"x".repeat(256)),
    );
    build(
        hasty(&nowhere())
            .max_hand_offs(0)
            .hand_off_time(Duration::ZERO),
    );
    build(
        hasty(&nowhere())
            .max_hand_offs(1023)
            .hand_off_time(Duration::MAX),
    );
    build(
        hasty(&nowhere())
            .max_connection_idle(millis(100))
            .max_connection_age(secs(1)),
    );
    build(
        hasty(&nowhere())
            .max_connection_idle(Duration::MAX)
            .max_connection_age(Duration::MAX),
    );
    build(hasty(&nowhere()).outage_timeout(Duration::ZERO));
    build(hasty(&nowhere()).outage_timeout(Duration::MAX));
}

#[test]
fn a_lock_with_an_invalid_setting_is_refused() {
    let client = hasty(&nowhere()).max_ttl(secs(10)).build_lazy().unwrap();
    type Change = fn(Mutex) -> Mutex;
    let cases: &[(&str, &str, Change)] = &[
        ("ttl", "0ns", |m| m.ttl(Duration::ZERO)),
        ("ttl", "10.001s", |m| m.ttl(millis(10_001))),
        ("fixed_ttl", "0ns", |m| m.fixed_ttl(Duration::ZERO)),
        ("fixed_ttl", "999µs", |m| {
            m.fixed_ttl(Duration::from_micros(999))
        }),
        ("fixed_ttl", "10.001s", |m| m.fixed_ttl(millis(10_001))),
        ("ttl", "18446744073709551615", |m| m.ttl(Duration::MAX)),
        ("max_hold", "0ns", |m| m.max_hold(Duration::ZERO)),
        ("max_hold", "9ms", |m| m.max_hold(millis(9))),
    ];
    for (field, value, change) in cases {
        let mutex = change(client.mutex("k"));
        let errors = [
            mutex.lock().unwrap_err(),
            mutex.try_lock().unwrap_err(),
            mutex.try_lock_for(millis(1)).unwrap_err(),
            mutex.with(|_| ()).unwrap_err(),
            mutex.try_with(|_| ()).unwrap_err(),
        ];
        for error in errors {
            assert_names(&error, field, value);
            assert_eq!(error.key(), Some("k"));
        }
    }
}

#[test]
fn extending_out_of_bounds_changes_nothing() {
    let server = crate::support::server();
    let client = Client::builder(server.url())
        .ttl(secs(20))
        .max_ttl(secs(40));
    let client = client.build().unwrap();
    let guard = client.mutex("k").lock().unwrap();
    for (duration, value) in [
        (Duration::ZERO, "0ns"),
        (millis(9), "9ms"),
        (secs(41), "41s"),
        (Duration::MAX, "18446744073709551615"),
    ] {
        let error = guard.extend(duration).unwrap_err();
        assert_names(&error, "extend", value);
        assert_eq!(error.key(), Some("k"));
    }
    assert!(guard.remaining() <= secs(20));
    let ttl = crate::support::expires_in(&server, "k").unwrap();
    assert!(ttl <= secs(20), "{ttl:?}");
}

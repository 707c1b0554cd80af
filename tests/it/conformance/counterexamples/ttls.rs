//! Mistakes with ttls.

use std::thread;
use std::time::{Duration, Instant};

use leasehold_testbed::{Proxy, Server};

use crate::conformance::counterexamples::raw::Raw;
use crate::steady::steady;
use crate::support::{
    LONG_TTL, Recorder, What, ask, expires_in, in_redis, is_held, millis, secs, server,
};

/// Whether a crashed holder would block others for longer than the ttl.
fn outlives_a_crash_by_more_than(server: &Server, ttl: Duration) -> bool {
    expires_in(server, "k").is_some_and(|left| left > ttl)
}

#[test]
fn renewal_that_adds_makes_the_ttl_grow() {
    let (server, ttl, recorder) = (server(), secs(3), Recorder::new());
    let mut broken = Raw::open(&server, "k", "broken");
    assert!(broken.take(ttl));
    for _ in 0..3 {
        let left: u64 = broken.ask("PTTL", &[]);
        let more = left + ttl.as_millis() as u64;
        broken.ask::<bool>("PEXPIRE", &[&more.to_string()]);
    }
    assert!(outlives_a_crash_by_more_than(&server, ttl));
    broken.ask::<()>("DEL", &[]);

    let builder = steady(&server.url())
        .ttl(ttl)
        .event_handler(recorder.clone());
    let client = builder.renew_ratio(0.05).build().unwrap();
    let guard = client.mutex("k").lock().unwrap();
    for renewals in 1..4 {
        recorder.wait_for(renewals, What::Renewed, "k");
        assert!(!outlives_a_crash_by_more_than(&server, ttl));
    }
    guard.unlock().unwrap();
}

/// Whether the lock has no ttl.
fn is_immortal(server: &Server) -> bool {
    is_held(server, "k") && expires_in(server, "k").is_none()
}

#[test]
fn a_crash_between_setnx_and_expire_blocks_forever() {
    let server = server();
    let mut broken = Raw::open(&server, "k", "broken");
    let token = broken.token.clone();
    assert!(broken.ask::<bool>("SETNX", &[&token]));
    // The client crashes here, before its EXPIRE.
    drop(broken);
    assert!(is_immortal(&server));
    ask(&server, &["DEL", &in_redis("k")]);

    // leasehold sets value and ttl together: each read of the key shows a ttl.
    let client = steady(&server.url()).build().unwrap();
    let busy = client.clone();
    let taking = crate::support::Task::start(move || {
        for _ in 0..300 {
            busy.with_lock("k", || ()).unwrap();
        }
    });
    let mut watch = Raw::open(&server, "k", "");
    while !taking.is_done() {
        let ttl: i64 = watch.ask("PTTL", &[]);
        assert_ne!(ttl, -1, "the key has no ttl");
    }
    taking.within(crate::support::SOON, "all of them");
}

#[test]
fn immortal_locks_block_until_a_contender_heals_them() {
    let server = server();
    let client = steady(&server.url()).build().unwrap();
    let guard = client.mutex("k").lock().unwrap();
    ask(&server, &["PERSIST", &in_redis("k")]);
    assert!(is_immortal(&server));

    let mut broken = Raw::open(&server, "k", "broken");
    assert!(!broken.take(millis(10)));
    assert!(
        is_immortal(&server),
        "the attempt fails, and changes nothing"
    );

    let other = steady(&server.url()).build().unwrap();
    assert!(other.mutex("k").try_lock().unwrap().is_none());
    assert!(!is_immortal(&server));
    guard.unlock().unwrap();
}

#[test]
fn expire_by_contenders_prolongs_a_dead_holders_lock() {
    let server = server();
    let ttl = secs(4);
    let left_after = |fail_to_take: &mut dyn FnMut()| {
        for _ in 0..4 {
            thread::sleep(ttl / 16);
            fail_to_take();
        }
        let left = expires_in(&server, "k").expect("it has not ended yet");
        ask(&server, &["DEL", &in_redis("k")]);
        left
    };

    let mut dead = Raw::open(&server, "k", "dead");
    assert!(dead.take(ttl));
    let mut broken = Raw::open(&server, "k", "broken");
    let left = left_after(&mut || {
        assert!(!broken.take(ttl));
        broken.ask::<bool>("PEXPIRE", &[&ttl.as_millis().to_string()]);
    });
    assert!(left > ttl * 7 / 8, "it would never end: {left:?}");

    let client = steady(&server.url()).build().unwrap();
    let guard = client.mutex("k").fixed_ttl(ttl).lock().unwrap();
    let left = left_after(&mut || {
        assert!(
            client
                .mutex("k")
                .fixed_ttl(ttl)
                .try_lock()
                .unwrap()
                .is_none()
        );
    });
    assert!(left <= ttl * 3 / 4, "{left:?}");
    drop(guard);
}

#[test]
fn validity_counted_from_the_answer_outlasts_the_key() {
    let (server, late) = (server(), millis(300));
    let proxy = Proxy::start(server.port()).unwrap();
    let outlasts_the_key = |believed: Duration, at: Instant| {
        // The ttl in Redis is read after the estimate. It was longer when the holder made the estimate.
        let left = expires_in(&server, "k").expect("it is held");
        believed.saturating_sub(at.elapsed()) > left
    };

    let url = redis::Client::open(proxy.url()).unwrap();
    let mut connection = url.get_connection().unwrap();
    proxy.delay(late);
    let ttl = LONG_TTL.as_millis().to_string();
    let mut set = redis::cmd("SET");
    set.arg(in_redis("k")).arg(&["broken", "NX", "PX", &ttl]);
    set.exec(&mut connection).unwrap();
    assert!(outlasts_the_key(LONG_TTL, Instant::now()));
    ask(&server, &["DEL", &in_redis("k")]);
    proxy.delay(Duration::ZERO);

    let client = steady(&proxy.url()).build().unwrap();
    client.with_lock("other", || ()).unwrap();
    proxy.delay(late);
    let guard = client.mutex("k").lock().unwrap();
    let (believed, at) = (guard.remaining(), Instant::now());
    assert!(!outlasts_the_key(believed, at));
    assert!(believed < LONG_TTL - late);
}

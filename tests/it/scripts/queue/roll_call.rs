//! Grants that a waiter does not confirm, and the roll call that follows.

use leasehold_testbed::Server;
use redis::{Connection, PubSub};

use super::{queued, since_of, value_of};
use crate::scripts::{
    ADOPT, RENEW, Said, TTL, acquire_as, acquire_for, call, connect, entry, granted, holder, kinds,
    lease, listen, queue_name, queue_of, received, release_as, text_of, ttl_of,
};
use crate::support::{ask, server};

/// A silent waiter's place is greater than its own by this.
const SILENT: u64 = 4_000_000_000_000_000;
/// A key outlives the time for a confirmation by these ms.
const KEPT: &str = "3000";

/// Caller 0 holds the key, callers 1 to `waiters` are queued, and each has waited for an hour. Then caller 0 releases
/// the key: caller 1 has to confirm its grant. Returns the places.
fn grant_unconfirmed(server: &Server, redis: &mut Connection, waiters: usize) -> Vec<u64> {
    ask(server, &["FLUSHALL"]);
    granted(&acquire_as(redis, "k", 0, "+"));
    let (now, _): (u64, u64) = redis::cmd("TIME").query(redis).unwrap();
    let first = (now - 3600) * 1_000_000;
    let join = |n: usize| {
        let mode = format!("+{}", first + n as u64);
        queued(&acquire_as(redis, "k", n, &mode)).2
    };
    let places = (1..=waiters).map(join).collect();
    assert_eq!(release_as(redis, "k", 0), Said::Number(1));
    let value = value_of(server);
    let mark = if waiters > 1 { " ? +" } else { " ?" };
    assert!(
        value.contains(&lease(1)) && value.ends_with(mark),
        "{value}"
    );
    let left = ttl_of(server, "k");
    assert!((3_001..=5_000).contains(&left), "{left}");
    places
}

/// Lets the time for the confirmation, or for replies to a roll call, end.
fn let_time_pass(server: &Server) {
    ask(server, &["PEXPIRE", "k", KEPT]);
}

fn messages(server: &Server, subscriber: &mut PubSub) -> Vec<String> {
    let messages = received(server, subscriber);
    messages.into_iter().map(|(_, text)| text).collect()
}

#[test]
fn a_late_confirmation_counts_until_others_are_served() {
    let server = server();
    let (mut redis, mut clients) = (connect(&server), connect(&server));
    let mut subscriber = listen(&mut clients, &[1, 2].map(holder));
    for is_called in [false, true] {
        grant_unconfirmed(&server, &mut redis, 2);
        let_time_pass(&server);
        assert_eq!(kinds(&[acquire_as(&mut redis, "k", 3, "")]), ["contended"]);
        if is_called {
            let said = acquire_as(&mut redis, "k", 3, "+");
            assert!((1..=500).contains(&queued(&said).0), "{said:?}");
            assert!(value_of(&server).ends_with(" ! +"));
            let_time_pass(&server);
        }
        let micros = granted(&acquire_as(&mut redis, "k", 1, "-"));
        let wanted = format!("lh1 {} {micros} {} +", lease(1), holder(1));
        assert_eq!(value_of(&server), wanted);
        assert!((50_000..=60_000).contains(&ttl_of(&server, "k")));
        received(&server, &mut subscriber);
    }
}

/// A new primary, or a restarted server, may lack the confirmation of a holder.
#[test]
fn a_holder_confirms_its_grant_again() {
    let server = server();
    let (mut redis, mut clients) = (connect(&server), connect(&server));
    let _ear = listen(&mut clients, &[1].map(holder));
    for is_adopted in [false, true] {
        grant_unconfirmed(&server, &mut redis, 2);
        if is_adopted {
            let micros = value_of(&server)[37..53].to_owned();
            let args = [&holder(9), &lease(1), &micros, &lease(9), TTL];
            call(&mut redis, &ADOPT, &["k"], &args);
        } else {
            call(&mut redis, &RENEW, &["k"], &[&lease(1), TTL]);
        }
        let value = value_of(&server);
        assert!(value.ends_with(" +") && !value.contains('?'), "{value}");
        let_time_pass(&server);
        queued(&acquire_as(&mut redis, "k", 2, "-"));
        assert_eq!(value_of(&server), value);
    }
}

#[test]
fn a_roll_call_skips_all_silent_waiters() {
    let server = server();
    let (mut redis, mut clients) = (connect(&server), connect(&server));
    let callers: Vec<String> = (1..=100).map(holder).collect();
    let mut subscriber = listen(&mut clients, &callers);
    let places = grant_unconfirmed(&server, &mut redis, 100);
    let of = |n: usize| since_of(&server, &entry(n, TTL));
    // Before the time is over, requests change nothing.
    assert_eq!(queued(&acquire_as(&mut redis, "k", 50, "-")).1, 48);
    let first = messages(&server, &mut subscriber);
    assert_eq!(
        first.len(),
        2,
        "a grant, and a waiter near the front: {first:?}"
    );
    let_time_pass(&server);
    // Caller 50 calls the roll. Callers 30 and 20 reply, in the wrong order.
    let (left, ahead, since) = queued(&acquire_as(&mut redis, "k", 50, "-"));
    assert!((1..=500).contains(&left), "{left}");
    assert_eq!((ahead, since), (0, places[49]));
    assert_eq!(of(2), places[1] + SILENT);
    let called: Vec<String> = messages(&server, &mut subscriber);
    let others = (2..=100).filter(|n| *n != 50);
    let wanted: Vec<String> = others.map(|n| format!("{} = k", &lease(n)[..16])).collect();
    assert_eq!(called, wanted);
    for (n, ahead) in [(30, 0), (20, 0), (30, 1), (50, 2)] {
        let said = queued(&acquire_as(&mut redis, "k", n, "-"));
        assert_eq!((said.1, said.2), (ahead, places[n - 1]), "caller {n}");
        assert_eq!(of(n), places[n - 1]);
    }
    // A new waiter comes behind the waiters that live, and before the silent ones.
    assert_eq!(queued(&acquire_as(&mut redis, "k", 170, "+")).1, 3);
    let_time_pass(&server);
    assert_eq!(queued(&acquire_as(&mut redis, "k", 50, "-")).1, 1);
    for n in [20, 30, 50] {
        assert!(
            value_of(&server).contains(&lease(n)),
            "{n}: {}",
            value_of(&server)
        );
        granted(&acquire_as(&mut redis, "k", n, "-"));
        assert_eq!(release_as(&mut redis, "k", n), Said::Number(1));
    }
    // Caller 170 does not listen, so it is skipped. The silent waiters are called once more, and then the key is free.
    assert_eq!(text_of(&server, "k"), None);
    assert_eq!(queue_of(&server, "k"), [""; 0]);
    let granted_to: Vec<String> = messages(&server, &mut subscriber);
    let hints = granted_to.iter().filter(|text| text.ends_with(" = k"));
    assert_eq!(hints.count(), 96);
    assert!(
        !granted_to.iter().any(|text| text.contains(&lease(2))),
        "only by its start"
    );
    // The place of a waiter that continues later is not lost.
    let again = format!("+{}", places[4]);
    granted(&acquire_as(&mut redis, "k", 180, "+"));
    acquire_as(&mut redis, "k", 181, "+");
    assert_eq!(queued(&acquire_as(&mut redis, "k", 190, &again)).1, 0);
}

#[test]
fn a_waiter_alone_needs_no_roll_call() {
    let server = server();
    let (mut redis, mut clients) = (connect(&server), connect(&server));
    let mut subscriber = listen(&mut clients, &[1, 2].map(holder));
    grant_unconfirmed(&server, &mut redis, 2);
    let_time_pass(&server);
    granted(&acquire_as(&mut redis, "k", 2, "-"));
    assert_eq!(
        messages(&server, &mut subscriber).len(),
        1,
        "the first grant"
    );
}

#[test]
fn a_roll_call_is_bounded_in_a_full_queue() {
    let server = server();
    let (mut redis, mut clients) = (connect(&server), connect(&server));
    let _subscriber = listen(&mut clients, &[1].map(holder));
    grant_unconfirmed(&server, &mut redis, 2);
    let fill = "for n = 1, 9990 do redis.call('ZADD', KEYS[1], 1700000000000000 + n, \
        string.format('%032x,60000,host/%d/0', n + 100, n + 100)) end";
    ask(&server, &["EVAL", fill, "1", &queue_name("k")]);
    let silent = || {
        let least = SILENT.to_string();
        ask(&server, &["ZCOUNT", &queue_name("k"), &least, "inf"]).as_int()
    };
    for (n, forged) in [(3, 0), (4, 5000)] {
        // Waiters that are silent since an earlier roll call.
        let fill = "for n = 1, ARGV[1] do redis.call('ZADD', KEYS[1], 5700000000000000 + n, 'old ' .. n) end";
        ask(
            &server,
            &["EVAL", fill, "1", &queue_name("k"), &forged.to_string()],
        );
        let before = silent();
        let value = value_of(&server).replace('!', "?");
        ask(&server, &["SET", "k", &value, "PX", KEPT]);
        let published = server.calls("publish").unwrap();
        queued(&acquire_as(&mut redis, "k", n, "+"));
        assert_eq!(server.calls("publish").unwrap() - published, 1000);
        let removed = before.unwrap().min(1000);
        assert_eq!(silent(), Some(before.unwrap() - removed + 1000));
    }
}

/// Without the right to change places or keys, the roll call is left out, and the queue is served.
#[test]
fn a_refused_roll_call_serves_the_queue() {
    let server = server();
    let (mut redis, mut clients) = (connect(&server), connect(&server));
    let _subscriber = listen(&mut clients, &[1, 2, 3].map(holder));
    grant_unconfirmed(&server, &mut redis, 3);
    let_time_pass(&server);
    ask(&server, &["SET", "filler", &"x".repeat(1 << 20)]);
    ask(&server, &["CONFIG", "SET", "maxmemory", "1"]);
    let said = acquire_as(&mut redis, "k", 3, "-");
    ask(&server, &["CONFIG", "SET", "maxmemory", "0"]);
    assert_ne!(kinds(&[said]), ["granted"]);
    assert_eq!(kinds(&[acquire_as(&mut redis, "k", 2, "-")]), ["granted"]);
}

/// Waiters with a short ttl, and waiters that replied too late before, are called, too.
#[test]
fn every_notified_waiter_has_to_confirm_in_time() {
    let server = server();
    let (mut redis, mut clients) = (connect(&server), connect(&server));
    let _subscriber = listen(&mut clients, &[1].map(holder));
    for (ttl, place, time) in [
        (300, 1_600_000_000_000_000_u64, 300),
        (60_000, 600_000_000_000_000, 3_000),
        (700, 600_000_000_000_000, 700),
    ] {
        ask(&server, &["FLUSHALL"]);
        granted(&acquire_as(&mut redis, "k", 0, "+"));
        acquire_for(&ttl.to_string(), &mut redis, "k", 1, &format!("+{place}"));
        release_as(&mut redis, "k", 0);
        assert!(value_of(&server).ends_with(" ?"));
        let left = ttl_of(&server, "k") - 3_000;
        assert!((time / 2..=time).contains(&left), "{left} of {time}");
        granted(&acquire_for(&ttl.to_string(), &mut redis, "k", 1, "-"));
        assert!((ttl / 2..=ttl).contains(&ttl_of(&server, "k")));
    }
}

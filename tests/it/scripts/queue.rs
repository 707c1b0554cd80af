//! The queue of a lock: how a waiter joins it, stays in it, and leaves it. `grants` tests which waiter a
//! release grants the lock to.

mod expiry;
mod roll_call;
mod unusable;

use leasehold_testbed::{Reply, Server, eventually};
use redis::Connection;

use super::{
    ACQUIRE, FENCE, ONE, RENEW, Said, TTL, TWO, acquire_as, call, channel, connect, counter_of,
    entries, entry, granted, holder, join, kinds, lease, leave, listen, queue_name, queue_of,
    queue_up, received, release, release_as, text_of, ttl_of, value,
};
use crate::support::{SOON, ask, server};

/// The value under the key that these tests wait for.
fn value_of(server: &Server) -> String {
    text_of(server, "k").expect("the lock is held")
}

/// The ms for which the key is taken, the number of waiters before this one, and its position in µs.
#[track_caller]
fn queued(said: &Said) -> (i64, i64, u64) {
    match said {
        Said::Queued { left, ahead, since } => (*left, *ahead, *since),
        other => panic!("not queued: {other:?}"),
    }
}

fn since_of(server: &Server, entry: &str) -> u64 {
    let score = ask(server, &["ZSCORE", &queue_name("k"), entry]);
    score.to_string().parse().unwrap()
}

/// Lets the lock of `k` expire; the queue stays.
fn expire(server: &Server) {
    ask(server, &["PEXPIRE", "k", "1"]);
    let gone = eventually(SOON, || ask(server, &["EXISTS", "k"]) == Reply::Int(0));
    assert!(gone, "its queue keeps no lock alive");
}

#[test]
fn waiters_queue_in_arrival_order() {
    let server = server();
    let mut redis = connect(&server);
    let micros = granted(&join(&mut redis, "k", 0, TTL));
    let alone = format!("lh1 {} {micros} {}", lease(0), holder(0));
    assert_eq!(value_of(&server), alone, "whose holder is not queued");
    assert_eq!(queue_of(&server, "k"), [""; 0]);
    let ttls = ["5000", "0", "90000"];
    let mut last = micros;
    for (n, ttl) in (1..).zip(ttls) {
        let (left, ahead, since) = queued(&join(&mut redis, "k", n, ttl));
        assert!((1..=60_000).contains(&left), "{left}");
        assert_eq!(ahead, n as i64 - 1);
        assert!(since > last, "{since} after {last}");
        last = since;
        assert_eq!(since_of(&server, &entry(n, ttl)), since);
        assert_eq!(queue_of(&server, "k"), entries(1, &ttls[..n]));
        assert_eq!(value_of(&server), format!("{alone} +"), "one marker");
        assert!((1..=60_000).contains(&ttl_of(&server, "k")));
    }
    assert_eq!(counter_of(&server), Some(micros.to_string()));
    // After an endless key got a ttl, the reply has that ttl to the millisecond.
    ask(&server, &["PERSIST", "k"]);
    assert_eq!(queued(&acquire_as(&mut redis, "k", 4, "0")).0, 60_000);
}

#[test]
fn queue_positions_rise_whatever_the_clock_says() {
    let server = server();
    let mut redis = connect(&server);
    let micros = granted(&acquire_as(&mut redis, "k", 0, ""));
    let hour = 3_600_000_000;
    let mut next = 1;
    let mut join_next = |redis: &mut Connection| {
        next += 1;
        queued(&acquire_as(redis, "k", next, "+")).2
    };
    let by_clock = join_next(&mut redis);
    assert!(
        (micros + 1..micros + hour).contains(&by_clock),
        "{by_clock}"
    );
    // The fence counter does not affect the positions in the queue.
    ask(&server, &["ZADD", FENCE, &(micros + hour).to_string(), "t"]);
    let next_by_clock = join_next(&mut redis);
    assert!((by_clock + 1..by_clock + hour).contains(&next_by_clock));
    // The place of the newest waiter is ahead of the clock, as after the clock was set back: by an hour; by so much
    // that Lua would print the place with an exponent; and near the places of silent waiters.
    for newest in [micros + hour, 2_888_888_888_888_887, 3_999_000_000_000_000] {
        let newest_of_all = newest.to_string();
        ask(
            &server,
            &["ZADD", &queue_name("k"), &newest_of_all, "newest"],
        );
        assert_eq!(join_next(&mut redis), newest + 1);
        assert_eq!(join_next(&mut redis), newest + 2);
    }
    let order: Vec<String> = queue_of(&server, "k");
    assert_eq!(order[..2], entries(2, &[TTL; 2]));
    assert_eq!(order.len(), 9, "all but `newest` are where they joined");
}

#[test]
fn a_waiter_joins_once_and_on_request() {
    let server = server();
    let mut redis = connect(&server);
    let value = queue_up(&mut redis, "k", &[TTL, "0"]);
    for (n, mode, kind, ahead) in [
        (2, "0", "queued", 1),
        (1, "-", "queued", 0),
        (2, "-", "queued", 1),
        (1, "", "contended", 0),
        (2, "", "contended", 0),
        (3, "-", "contended", 0),
        (3, "", "contended", 0),
    ] {
        let said = acquire_as(&mut redis, "k", n, mode);
        assert_eq!(
            kinds(std::slice::from_ref(&said)),
            [kind],
            "{n} as {mode:?}"
        );
        if kind == "queued" {
            assert_eq!(queued(&said).1, ahead, "{n} as {mode:?}");
        }
        assert_eq!(value_of(&server), value);
        assert_eq!(
            queue_of(&server, "k"),
            entries(1, &[TTL, "0"]),
            "{n} as {mode:?}"
        );
    }
    // A waiter that joins anew is the last.
    assert_eq!(queued(&acquire_as(&mut redis, "k", 1, "+")).1, 1);
    assert_eq!(queue_of(&server, "k"), [entry(2, "0"), entry(1, TTL)]);
    assert_eq!(value_of(&server), value);
}

#[test]
fn a_repeated_request_keeps_its_queue_position() {
    let server = server();
    let mut redis = connect(&server);
    queue_up(&mut redis, "k", &[]);
    let places = ["0", "+", "+"].map(|mode| {
        let n = queue_of(&server, "k").len() + 1;
        queued(&acquire_as(&mut redis, "k", n, mode))
    });
    for (n, place) in (1..).zip(places) {
        let (_, ahead, since) = queued(&acquire_as(&mut redis, "k", n, "-"));
        assert_eq!((ahead, since), (place.1, place.2));
    }
    leave(&mut redis, "k", 1, "0");
    let ahead = [2, 3].map(|n| queued(&acquire_as(&mut redis, "k", n, "-")).1);
    assert_eq!(ahead, [0, 1]);
}

#[test]
fn a_waiter_returns_to_its_former_position() {
    let server = server();
    let mut redis = connect(&server);
    let value = queue_up(&mut redis, "k", &[TTL; 3]);
    let former = since_of(&server, &entry(2, TTL));
    assert_eq!(leave(&mut redis, "k", 2, TTL), Said::Number(1));
    let again = format!("+{former}");
    // The waiter asks under another lease, since a client uses a lease id for one entry only.
    let (_, ahead, since) = queued(&acquire_as(&mut redis, "k", 9, &again));
    assert_eq!((ahead, since), (1, former));
    let waiters = [1, 9, 3].map(|n| entry(n, TTL));
    assert_eq!(queue_of(&server, "k"), waiters);
    assert_eq!(value_of(&server), value);
    let places: Vec<u64> = waiters
        .iter()
        .map(|waiter| since_of(&server, waiter))
        .collect();
    assert!(places.is_sorted_by(|a, b| a < b), "{places:?}");
    // The former place also counts if the queue is gone and the key is free.
    expire(&server);
    ask(&server, &["DEL", &queue_name("k")]);
    granted(&acquire_as(&mut redis, "k", 4, &again));
    assert_eq!(queued(&acquire_as(&mut redis, "k", 5, &again)).2, former);
    // Modes of another form are refused.
    for mode in [
        "+x",
        "+ ",
        "+1 2",
        "+p0/2",
        "+p3/2",
        "+p1001/2000",
        "+p1/10001",
    ] {
        let said = acquire_as(&mut redis, "k", 6, mode);
        assert_eq!(kinds(&[said]), ["refused"], "{mode:?}");
    }
    assert_eq!(queue_of(&server, "k"), [entry(5, TTL)]);
}

#[test]
fn each_key_of_one_call_has_its_own_queue() {
    let server = server();
    let mut redis = connect(&server);
    let keys = ["notified", "free", "foreign", "polls", "unasked", "behind"];
    for key in ["notified", "polls", "unasked", "behind"] {
        ask(&server, &["SET", key, &value(TWO), "PX", "50000"]);
    }
    ask(&server, &["SET", "foreign", "theirs"]);
    join(&mut redis, "behind", 8, TTL);
    let mut args = vec![holder(7)];
    let modes = ["+", "+", "+", "0", "", "+"];
    for (n, mode) in modes.into_iter().enumerate() {
        args.extend([lease(n), format!("{}", 70_000 + n), mode.to_owned()]);
    }
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let out = call(&mut redis, &ACQUIRE, &[&[FENCE], &keys[..]].concat(), &args);
    let wanted = [
        "queued",
        "granted",
        "foreign",
        "queued",
        "contended",
        "queued",
    ];
    assert_eq!(kinds(&out), wanted);
    let [notified, polls, behind] = [0, 3, 5].map(|n| queued(&out[n]));
    assert!(notified.0 <= 50_000 && polls.0 <= 50_000, "{out:?}");
    assert_eq!([notified.1, polls.1, behind.1], [0, 0, 1]);
    let marked = value(TWO) + " +";
    let values =
        ["notified", "polls", "unasked", "foreign"].map(|key| text_of(&server, key).unwrap());
    assert_eq!(values, [&*marked, &marked, &value(TWO), "theirs"]);
    let queue = |key| queue_of(&server, key);
    assert_eq!(queue("notified"), [format!("{},70000,host/7/0", lease(0))]);
    assert_eq!(queue("polls"), [format!("{},0,host/7/0", lease(3))]);
    let last = format!("{},70005,host/7/0", lease(5));
    assert_eq!(queue("behind"), [entry(8, TTL), last]);
    for key in ["free", "foreign", "unasked"] {
        assert_eq!(queue(key), [""; 0], "{key}");
    }
}

#[test]
fn keys_of_one_call_are_served_under_rising_tokens() {
    let server = server();
    let (mut redis, mut clients) = (connect(&server), connect(&server));
    let mut subscriber = listen(&mut clients, &[1, 2].map(holder));
    let keys = ["k1", "k2", "free", "own"];
    queue_up(&mut redis, "k1", &[TTL]);
    queue_up(&mut redis, "k2", &["0"]);
    granted(&acquire_as(&mut redis, "own", 0, ""));
    join(&mut redis, "own", 7, TTL);
    ask(&server, &["DEL", "k1", "k2", "own"]);
    let mut args = vec![holder(7)];
    for (n, mode) in [(8, "+"), (9, "+"), (6, "+"), (7, "-")] {
        args.extend([lease(n), TTL.to_owned(), mode.to_owned()]);
    }
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let out = call(&mut redis, &ACQUIRE, &[&[FENCE], &keys[..]].concat(), &args);
    assert_eq!(kinds(&out), ["queued", "queued", "granted", "granted"]);
    assert!((50_000..=60_000).contains(&queued(&out[0]).0), "{out:?}");
    assert!((1..=100).contains(&queued(&out[1]).0), "{out:?}");
    let tokens = keys.map(|key| {
        let value = text_of(&server, key).unwrap();
        value.split(' ').nth(2).unwrap().parse::<u64>().unwrap()
    });
    assert!(tokens.is_sorted_by(|a, b| a < b), "{tokens:?}");
    assert_eq!([granted(&out[2]), granted(&out[3])], tokens[2..]);
    assert_eq!(counter_of(&server), Some(tokens[3].to_string()));
    let message = format!("{} {} k1", lease(1), tokens[0]);
    let channel = channel(&holder(1));
    assert_eq!(received(&server, &mut subscriber), [(channel, message)]);
}

#[test]
fn a_full_queue_takes_no_more_until_a_waiter_leaves() {
    let server = server();
    let mut redis = connect(&server);
    queue_up(&mut redis, "k", &[TTL, "0"]);
    let fill = "for n = 1, 9997 do \
        redis.call('ZADD', KEYS[1], n, string.format('%032x,60000,host/%d/0', n + 100, n + 100)) end";
    ask(&server, &["EVAL", fill, "1", &queue_name("k")]);
    let waiters = || ask(&server, &["ZCARD", &queue_name("k")]).as_int();
    assert_eq!(queued(&acquire_as(&mut redis, "k", 3, "+")).1, 9_999);
    assert_eq!(waiters(), Some(10_000));
    for mode in ["+", "0"] {
        let said = acquire_as(&mut redis, "k", 4, mode);
        assert_eq!(kinds(&[said]), ["contended"], "{mode}");
        assert_eq!(waiters(), Some(10_000), "{mode}");
    }
    assert_eq!(kinds(&[acquire_as(&mut redis, "k", 4, "-")]), ["contended"]);
    // The other keys are queued as before.
    assert_eq!(queued(&acquire_as(&mut redis, "k", 3, "-")).1, 9_999);
    assert_eq!(leave(&mut redis, "k", 2, "0"), Said::Number(1));
    assert_eq!(queued(&acquire_as(&mut redis, "k", 4, "+")).1, 9_999);
    assert_eq!(kinds(&[acquire_as(&mut redis, "k", 5, "+")]), ["contended"]);
}

#[test]
fn a_waiter_leaves_from_any_position() {
    let server = server();
    let mut redis = connect(&server);
    for ttls in [&["0"][..], &["5000", "0", TTL]] {
        for n in 1..=ttls.len() {
            let value = queue_up(&mut redis, "k", ttls);
            let mut rest = entries(1, ttls);
            rest.remove(n - 1);
            let ttl = ttls[n - 1];
            assert_eq!(
                leave(&mut redis, "k", n, ttl),
                Said::Number(1),
                "{n} of {ttls:?}"
            );
            assert_eq!(queue_of(&server, "k"), rest);
            let exists = ask(&server, &["EXISTS", &queue_name("k")]);
            assert_eq!(exists, Reply::Int(i64::from(!rest.is_empty())));
            assert_eq!(value_of(&server), value, "the lock is unchanged");
            let left = ttl_of(&server, "k");
            assert!((1..=60_000).contains(&left), "{left}: the ttl stays");

            let again = leave(&mut redis, "k", n, ttl);
            assert_eq!(again, Said::Text(value.clone()), "again");
            let said = acquire_as(&mut redis, "k", n, "-");
            assert_eq!(
                kinds(&[said]),
                ["contended"],
                "the waiter is no longer queued"
            );
            let ahead = queued(&acquire_as(&mut redis, "k", n, "0")).1;
            assert_eq!(ahead, rest.len() as i64);
            rest.push(entry(n, "0"));
            assert_eq!(queue_of(&server, "k"), rest, "the waiter comes last");
            ask(&server, &["FLUSHALL"]);
        }
    }
}

#[test]
fn a_waiter_removes_only_its_own_entry() {
    let server = server();
    let mut redis = connect(&server);
    let value = queue_up(&mut redis, "k", &[TTL, "0"]);
    let waiters = entries(1, &[TTL, "0"]);
    for other in [
        lease(1),
        format!("{},{TTL}", lease(1)),
        format!("{},{TTL},", lease(1)),
        format!("{},5000,{}", lease(1), holder(1)),
        format!("{},{TTL},{}", lease(1), holder(2)),
        format!("{}!{}", lease(1), holder(1)),
        format!("{}, {TTL},{}", lease(2), holder(2)),
        lease(2),
    ] {
        let said = release(&mut redis, &["k"], &[&other]);
        assert_eq!(said, [Said::Text(value.clone())], "{other}");
        assert_eq!(queue_of(&server, "k"), waiters, "{other}");
    }
    // The caller joined to poll, and then to be notified. It leaves both entries.
    queued(&acquire_as(&mut redis, "k", 1, "0"));
    assert_eq!(queue_of(&server, "k").len(), 3);
    assert_eq!(leave(&mut redis, "k", 1, TTL), Said::Number(1));
    assert_eq!(queue_of(&server, "k"), waiters[1..]);
}

#[test]
fn a_lease_that_may_be_queued_is_released_if_granted() {
    let server = server();
    let (mut redis, mut clients) = (connect(&server), connect(&server));
    let mut subscriber = listen(&mut clients, &[2].map(holder));
    queue_up(&mut redis, "k", &[TTL, TTL]);
    assert_eq!(leave(&mut redis, "k", 0, TTL), Said::Number(1));
    // The key went to caller 2, since caller 1 is not subscribed.
    assert!(value_of(&server).starts_with(&format!("lh1 {}", lease(2))));
    assert_eq!(received(&server, &mut subscriber).len(), 1);
    assert_eq!(leave(&mut redis, "k", 2, TTL), Said::Number(1));
    assert_eq!(leave(&mut redis, "k", 2, TTL), Said::Number(0));
    assert_eq!(ask(&server, &["EXISTS", "k"]), Reply::Int(0));
    // A waiter leaves the queue of a key that is free, or that holds a foreign value.
    for spoil in [
        &["DEL", "k"][..],
        &["SET", "k", "theirs"],
        &["RPUSH", "k", "1"],
    ] {
        queue_up(&mut redis, "k", &[TTL]);
        ask(&server, &["DEL", "k"]);
        ask(&server, spoil);
        assert_eq!(leave(&mut redis, "k", 1, TTL), Said::Number(1), "{spoil:?}");
        assert_eq!(queue_of(&server, "k"), [""; 0], "{spoil:?}");
        ask(&server, &["DEL", "k"]);
    }
}

#[test]
fn a_waiter_may_neither_release_nor_renew() {
    let server = server();
    let mut redis = connect(&server);
    let value = queue_up(&mut redis, "k", &[TTL]);
    let shown = Said::Text(value.clone());
    assert_eq!(release_as(&mut redis, "k", 10), shown);
    assert_eq!(release_as(&mut redis, "k", 1), shown);
    let waiting = call(&mut redis, &RENEW, &["k"], &[&lease(1), "90000"]);
    assert_eq!(waiting, [shown]);
    assert_eq!(value_of(&server), value);
    assert_eq!(queue_of(&server, "k"), entries(1, &[TTL]));
    assert!(ttl_of(&server, "k") <= 60_000);
    // Only 256 bytes of a long value are shown.
    let long = value + &"x".repeat(500);
    ask(&server, &["SET", "k", &long]);
    assert_eq!(
        release_as(&mut redis, "k", 1),
        Said::Text(long[..256].to_owned())
    );
}

#[test]
fn the_values_of_others_are_never_joined() {
    let server = server();
    let mut redis = connect(&server);
    // These values are as long as a lock's value.
    let beginnings = ["lh2 ", "LH1 ", "lh1-", "    "];
    for value in beginnings.map(|begin| value(ONE).replace("lh1 ", begin)) {
        ask(&server, &["SET", "k", &value, "PX", "50000"]);
        assert_eq!(leave(&mut redis, "k", 1, TTL), Said::Text(value.clone()));
        for mode in ["-", "0", "+", "+1795263780943818"] {
            let said = acquire_as(&mut redis, "k", 1, mode);
            assert_eq!(kinds(&[said]), ["foreign"], "{value:?}");
        }
        assert_eq!(value_of(&server), value);
        assert!((1..=50_000).contains(&ttl_of(&server, "k")));
        assert_eq!(queue_of(&server, "k"), [""; 0]);
    }
    ask(&server, &["DEL", "k"]);
    ask(&server, &["RPUSH", "k", "theirs"]);
    assert_eq!(kinds(&[acquire_as(&mut redis, "k", 1, "+")]), ["foreign"]);
    assert_eq!(queue_of(&server, "k"), [""; 0]);
}

#[test]
fn commas_in_a_holder_name_are_harmless() {
    let server = server();
    let (mut redis, mut clients) = (connect(&server), connect(&server));
    let hosts = [",", "a,b", "0,a,", ",,5000,"].map(|host| format!("{host}/1/0"));
    let mut subscriber = listen(&mut clients, &hosts);
    let ask_for = |redis: &mut Connection, holder: &str, n: usize, mode: &str| {
        let args = [holder, &lease(n), "50000", mode];
        call(redis, &ACQUIRE, &[FENCE, "k"], &args).remove(0)
    };
    for host in &hosts {
        granted(&ask_for(&mut redis, host, 0, ""));
        let own = format!("{},50000,{host}", lease(1));
        queued(&ask_for(&mut redis, host, 1, "+"));
        assert_eq!(queued(&join(&mut redis, "k", 2, TTL)).1, 1);
        assert_eq!(queue_of(&server, "k"), [own.clone(), entry(2, TTL)]);
        assert_eq!(queued(&ask_for(&mut redis, host, 1, "-")).1, 0);
        let left = release(&mut redis, &["k"], &[&own]);
        assert_eq!(left, [Said::Number(1)]);
        assert_eq!(queue_of(&server, "k"), [entry(2, TTL)]);
        queued(&ask_for(&mut redis, host, 1, "+1000000000000000"));
        assert_eq!(release_as(&mut redis, "k", 0), Said::Number(1));
        let value = value_of(&server);
        let micros = value.split(' ').nth(2).unwrap();
        // The waiter joined long ago.
        assert_eq!(value, format!("lh1 {} {micros} {host} ? +", lease(1)));
        let message = format!("{} ?{micros} k", lease(1));
        let channel = channel(host);
        assert_eq!(received(&server, &mut subscriber), [(channel, message)]);
        ask(&server, &["FLUSHALL"]);
    }
}

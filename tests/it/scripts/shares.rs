//! Keys that leases share: the bounds of one request, and keys of other users.

use leasehold_testbed::{Reply, Server};
use redis::{Commands, Connection, Value};

use super::{
    ACQUIRE, CONVERT, FENCE, INSPECT, RELEASE, RENEW, TTL, connect, eval, holder, lease, listen,
    queue_name, received, value,
};
use crate::support::{ask, micros_now, server};

/// The member of a reader.
fn reader(n: usize) -> String {
    format!("lh1 {} r 1 1 0 {}", lease(n), holder(n))
}

/// Adds readers to the key `k` that end so many ms from now; negative numbers are in the past.
fn add_readers(redis: &mut Connection, numbers: std::ops::Range<usize>, ends_in: i64) {
    let (secs, micros): (i64, i64) = redis::cmd("TIME").query(redis).unwrap();
    let end = secs * 1000 + micros / 1000 + ends_in;
    let members: Vec<(i64, String)> = numbers.map(|n| (end, reader(n))).collect();
    let mut batch = redis::pipe();
    for part in members.chunks(1000) {
        batch.zadd_multiple("k", part).ignore();
    }
    let newest: Vec<(String, i64)> = {
        let () = batch.query(redis).unwrap();
        redis::cmd("ZRANGE")
            .arg(&["k", "-1", "-1", "WITHSCORES"])
            .query(redis)
            .unwrap()
    };
    let expires_at = newest[0].1 + 1000;
    let () = redis::cmd("PEXPIREAT")
        .arg("k")
        .arg(expires_at)
        .query(redis)
        .unwrap();
}

/// Adds readers that have not confirmed their grants, and whose time to do so is over.
fn add_late(server: &Server, redis: &mut Connection, numbers: std::ops::Range<usize>) {
    let ended = (micros_now(server) / 1000 - 100) as f64 + 0.5;
    let members: Vec<(f64, String)> = numbers.map(|n| (ended, reader(n))).collect();
    let () = redis.zadd_multiple("k", &members).unwrap();
}

/// An acquire of the key `k`.
fn acquire(redis: &mut Connection, n: usize, mode: &str) -> Value {
    let args = [&*holder(n), &lease(n), TTL, mode];
    eval(&ACQUIRE, &[FENCE, "k"], &args).query(redis).unwrap()
}

/// An acquire of the key `k` by a reader.
fn read(redis: &mut Connection, n: usize, queue_mode: &str) -> Value {
    acquire(redis, n, &format!("{queue_mode}r"))
}

fn members(server: &Server) -> i64 {
    ask(server, &["ZCARD", "k"]).as_int().unwrap()
}

#[test]
fn readers_beyond_ten_thousand_wait() {
    let server = server();
    let mut redis = connect(&server);
    add_readers(&mut redis, 100..10_099, 60_000);
    assert!(matches!(read(&mut redis, 1, ""), Value::BulkString(_)));
    let Value::Array(refused) = read(&mut redis, 2, "") else {
        panic!("granted");
    };
    assert!(matches!(
        refused[..],
        [Value::Int(1..=60_001), Value::Int(0)]
    ));
    assert_eq!(members(&server), 10_000);
}

#[test]
fn one_request_grants_readers_up_to_a_bound() {
    let server = server();
    let mut redis = connect(&server);
    ask(&server, &["SET", "k", &value(&lease(0)), "PX", TTL]);
    for n in 1..=130 {
        let Value::Array(queued) = read(&mut redis, n, "0") else {
            panic!("granted");
        };
        assert_eq!(queued[1], Value::Int(n as i64 - 1));
    }
    let released: i64 = eval(&RELEASE, &[FENCE, "k"], &[&lease(0)])
        .query(&mut redis)
        .unwrap();
    assert_eq!((released, members(&server)), (1, 128));
    let queued = ask(&server, &["ZCARD", &super::queue_name("k")]);
    assert_eq!(queued, Reply::Int(2));
    // The next request of a waiter grants the others.
    assert!(matches!(read(&mut redis, 129, "-"), Value::BulkString(_)));
    assert_eq!(members(&server), 130);
}

#[test]
fn ended_shares_are_removed_in_parts() {
    let server = server();
    let mut redis = connect(&server);
    add_readers(&mut redis, 1..2, 60_000);
    add_readers(&mut redis, 100..10_400, -5_000);
    assert!(matches!(read(&mut redis, 2, ""), Value::BulkString(_)));
    // 80 parts of 128, and the two readers that have not ended.
    assert_eq!(members(&server), 10_300 - 80 * 128 + 2);
    assert!(matches!(read(&mut redis, 3, ""), Value::BulkString(_)));
    assert_eq!(members(&server), 3);
}

#[test]
fn a_sorted_set_of_another_user_stays_as_it_is() {
    let server = server();
    let mut redis = connect(&server);
    for foreign in [
        "theirs",
        "lh2 1 r 1 1 0 host/1/a",
        "lh1 11111111111111111111111111111111 q 1 1 0 host/1/a",
        "lh1 11111111111111111111111111111111 p 1 3 2 host/1/a",
    ] {
        for is_newest in [true, false] {
            ask(&server, &["DEL", "k"]);
            add_readers(&mut redis, 1..3, if is_newest { -5_000 } else { 60_000 });
            let score = if is_newest { "9000000000000" } else { "5" };
            ask(&server, &["ZADD", "k", score, foreign]);
            let before = ask(&server, &["ZRANGE", "k", "0", "-1", "WITHSCORES"]);
            for (script, keys, args) in [
                (
                    &ACQUIRE,
                    &[FENCE, "k"][..],
                    vec![holder(1), lease(9), TTL.to_owned(), "r".to_owned()],
                ),
                (
                    &ACQUIRE,
                    &[FENCE, "k"],
                    vec![holder(1), lease(9), TTL.to_owned(), "+".to_owned()],
                ),
                (
                    &RELEASE,
                    &[FENCE, "k"],
                    vec![format!("keep 0 0 {}", reader(1))],
                ),
                (&RENEW, &["k"], vec![reader(1), TTL.to_owned()]),
                (
                    &CONVERT,
                    &[FENCE, "k"],
                    vec![holder(1), lease(1), lease(9), TTL.to_owned(), String::new()],
                ),
            ] {
                let args: Vec<&str> = args.iter().map(String::as_str).collect();
                let error = eval(script, keys, &args).query::<Value>(&mut redis);
                let error = error.unwrap_err().to_string();
                assert!(error.contains("FOREIGN"), "{foreign:?}: {error}");
            }
            let after = ask(&server, &["ZRANGE", "k", "0", "-1", "WITHSCORES"]);
            assert_eq!(after, before, "{foreign:?}");
        }
    }
}

#[test]
fn an_inspection_lists_a_hundred_shares() {
    let server = server();
    let mut redis = connect(&server);
    add_readers(&mut redis, 1..151, 60_000);
    add_readers(&mut redis, 200..210, -5_000);
    let found: Vec<Value> = eval(&INSPECT, &["k"], &[]).query(&mut redis).unwrap();
    assert_eq!(found[..2], [Value::Int(150), Value::Int(0)]);
    assert_eq!(found.len(), 202);
    assert_eq!(members(&server), 160, "it changes nothing");
}

/// One request for several keys counts on from the last of the waiters that it served: a later writer of their key has a
/// greater token, also if the clock of Redis was set back.
#[test]
fn keys_behind_served_waiters_get_greater_tokens() {
    let server = server();
    let mut redis = connect(&server);
    let (secs, _): (i64, i64) = redis::cmd("TIME").query(&mut redis).unwrap();
    let ahead = (secs + 10) * 1_000_000;
    ask(&server, &["ZADD", FENCE, &ahead.to_string(), "t"]);
    ask(&server, &["SET", "k", &value(&lease(0)), "PX", TTL]);
    for n in 1..=20 {
        assert!(matches!(read(&mut redis, n, "0"), Value::Array(_)));
    }
    ask(&server, &["DEL", "k"]);
    let holder = holder(30);
    let leases = [lease(30), lease(31), lease(32)];
    let args = [
        &*holder, &leases[0], TTL, "r", &leases[1], TTL, "0r", &leases[2], TTL, "r",
    ];
    let keys = [FENCE, "a", "k", "b"];
    let granted: Vec<i64> = eval(&ACQUIRE, &keys, &args).query(&mut redis).unwrap();
    assert_eq!(members(&server), 21);
    assert_eq!(granted, [1, 22, 23].map(|more| ahead + more));
    let last: i64 = redis::cmd("ZSCORE")
        .arg(&[FENCE, "t"])
        .query(&mut redis)
        .unwrap();
    assert_eq!(last, granted[2]);
}

/// When a reader becomes the writer, waiters stay out. When a writer becomes a reader, the readers at the head of the
/// queue are granted the key, too, up to a bound.
#[test]
fn a_conversion_keeps_the_queue_in_order() {
    let server = server();
    let mut redis = connect(&server);
    let convert = |redis: &mut Connection, to: usize, mode: &str| {
        let args = [&*holder(0), &lease(to ^ 1), &lease(to), TTL, mode];
        let value: Value = eval(&CONVERT, &[FENCE, "k"], &args).query(redis).unwrap();
        value
    };
    assert!(matches!(read(&mut redis, 0, ""), Value::BulkString(_)));
    let args = [&*holder(200), &lease(200), TTL, "0"];
    let queued: Value = eval(&ACQUIRE, &[FENCE, "k"], &args)
        .query(&mut redis)
        .unwrap();
    assert!(matches!(queued, Value::Array(_)));
    for n in 2..132 {
        assert!(matches!(read(&mut redis, n, "0"), Value::Array(_)));
    }
    let Value::BulkString(token) = convert(&mut redis, 1, "") else {
        panic!("not converted");
    };
    let counter = super::counter_of(&server).unwrap();
    assert_eq!(counter.as_bytes(), token);
    assert!(super::text_of(&server, "k").unwrap().ends_with(" +"));
    let queue = || super::queue_of(&server, "k").len();
    assert_eq!(queue(), 131);
    // The waiting writer is first.
    assert!(matches!(convert(&mut redis, 0, "r"), Value::BulkString(_)));
    assert_eq!((members(&server), queue()), (1, 131));
    assert!(matches!(convert(&mut redis, 1, ""), Value::BulkString(_)));
    ask(&server, &["ZPOPMIN", &super::queue_name("k")]);
    let Value::BulkString(own) = convert(&mut redis, 0, "r") else {
        panic!("not converted");
    };
    assert_eq!((members(&server), queue()), (129, 2));
    let own: u64 = String::from_utf8(own).unwrap().parse().unwrap();
    let last: u64 = super::counter_of(&server).unwrap().parse().unwrap();
    assert_eq!(last, own + 128, "each grant has a token of its own");
    let Value::Int(left) = convert(&mut redis, 1, "") else {
        panic!("upgraded beside other readers");
    };
    assert!((1..=60_001).contains(&left), "{left}");
}

/// One request for several keys counts on from the last waiter that entered with the first key's new reader.
#[test]
fn conversions_behind_served_readers_get_greater_tokens() {
    let server = server();
    let mut redis = connect(&server);
    for (key, n) in [("k", 0), ("b", 1)] {
        ask(&server, &["SET", key, &value(&lease(n)), "PX", TTL]);
    }
    for n in 2..22 {
        assert!(matches!(read(&mut redis, n, "0"), Value::Array(_)));
    }
    let holder = holder(0);
    let leases = [0, 30, 1, 31].map(lease);
    let args = [
        &*holder, &leases[0], &leases[1], TTL, "r", &leases[2], &leases[3], TTL, "r",
    ];
    let keys = [FENCE, "k", "b"];
    let [first, second]: [u64; 2] = eval(&CONVERT, &keys, &args).query(&mut redis).unwrap();
    assert_eq!((members(&server), second), (21, first + 21));
}

/// An ended share is not shown during the second for which its key outlives it. A key without a ttl is judged by the
/// clock of Redis.
#[test]
fn an_inspection_shows_no_ended_share() {
    let server = server();
    let mut redis = connect(&server);
    let shown = |redis: &mut Connection| match eval(&INSPECT, &["k"], &[]).query(redis).unwrap() {
        Value::Array(found) => match found[0] {
            Value::Int(shown) if found.len() as i64 == 2 + 2 * shown => shown,
            _ => panic!("{found:?}"),
        },
        // The key has expired.
        Value::Int(0) => 0,
        found => panic!("{found:?}"),
    };
    add_readers(&mut redis, 1..2, -100);
    assert_eq!(shown(&mut redis), 0);
    ask(&server, &["DEL", "k"]);
    ask(&server, &["ZADD", "k", "5", &reader(1)]);
    assert_eq!(shown(&mut redis), 0);
    add_readers(&mut redis, 2..3, 60_000);
    assert_eq!(shown(&mut redis), 1);
    ask(&server, &["PERSIST", "k"]);
    assert_eq!(shown(&mut redis), 1);
}

/// A request changes a share only if it names the share's lease, its kind and its holder.
#[test]
fn requests_of_others_change_no_share() {
    let server = server();
    let mut redis = connect(&server);
    add_readers(&mut redis, 1..2, 60_000);
    let before = ask(&server, &["ZRANGE", "k", "0", "-1", "WITHSCORES"]);
    let wrong = [
        format!("lh1 {} r 1 1 0 {}", lease(1), holder(2)),
        format!("lh1 {} r 1 1 0 {}", lease(2), holder(1)),
        format!("lh1 {} p 1 1 2 {}", lease(1), holder(1)),
    ];
    for member in &wrong {
        for (script, keys, args) in [
            (
                &RELEASE,
                &[FENCE, "k"][..],
                vec![format!("keep 0 0 {member}")],
            ),
            (
                &RELEASE,
                &[FENCE, "k"],
                vec![format!("{}!{} {member}", &member[4..36], holder(3))],
            ),
            (&RENEW, &["k"], vec![member.clone(), "90000".to_owned()]),
        ] {
            let args: Vec<&str> = args.iter().map(String::as_str).collect();
            let said: i64 = eval(script, keys, &args).query(&mut redis).unwrap();
            assert_eq!(said, 0, "{args:?}");
        }
    }
    for (by, from) in [(2, 1), (1, 2)] {
        let args = [&*holder(by), &lease(from), &lease(9), TTL, ""];
        let said: i64 = eval(&CONVERT, &[FENCE, "k"], &args)
            .query(&mut redis)
            .unwrap();
        assert_eq!(said, 0);
    }
    // Releases of an exclusive lease with this id.
    for id in [lease(1), value(&lease(1))] {
        let said = super::release(&mut redis, &["k"], &[&id]).remove(0);
        assert!(
            matches!(said, super::Said::Error(_) | super::Said::Number(0)),
            "{said:?}"
        );
    }
    let after = ask(&server, &["ZRANGE", "k", "0", "-1", "WITHSCORES"]);
    assert_eq!(after, before);
}

/// A silent waiter's place is greater than its own by this.
const SILENT: u64 = 4_000_000_000_000_000;

/// Three permits of one key, and callers that want one each. Callers 1 to `waiters` have waited for an hour.
struct Permits {
    server: Server,
    redis: Connection,
    first_place: u64,
}

impl Permits {
    /// Callers 100, 101 and 102 hold the permits. The waiters have to listen: a join removes those that do not.
    fn held(server: Server, waiters: usize) -> Self {
        let mut redis = connect(&server);
        for n in 100..103 {
            let granted = acquire(&mut redis, n, "p1/3");
            assert!(matches!(granted, Value::BulkString(_)));
        }
        let (now, _): (u64, u64) = redis::cmd("TIME").query(&mut redis).unwrap();
        let first_place = (now - 3600) * 1_000_000;
        for n in 1..=waiters {
            let place = first_place + n as u64;
            acquire(&mut redis, n, &format!("+{place}p1/3"));
        }
        Self {
            server,
            redis,
            first_place,
        }
    }

    fn member(n: usize) -> String {
        format!("lh1 {} p 1 1 3 {}", lease(n), holder(n))
    }

    fn release(&mut self, n: usize) {
        let argument = format!("keep 0 0 {}", Self::member(n));
        let released: i64 = eval(&RELEASE, &[FENCE, "k"], &[&argument])
            .query(&mut self.redis)
            .unwrap();
        assert_eq!(released, 1);
    }

    /// The number of waiters before this one; `None` if it has the permit.
    #[track_caller]
    fn ask(&mut self, n: usize) -> Option<i64> {
        match acquire(&mut self.redis, n, "-p1/3") {
            Value::BulkString(_) => None,
            Value::Array(parts) => match parts[..] {
                [Value::Int(1..), Value::Int(ahead), _, Value::Int(3)] => Some(ahead),
                _ => panic!("not queued: {parts:?}"),
            },
            other => panic!("{other:?}"),
        }
    }

    fn has(&self, n: usize) -> bool {
        ask(&self.server, &["ZSCORE", "k", &Self::member(n)]) != Reply::Nil
    }

    fn queued(&self) -> i64 {
        ask(&self.server, &["ZCARD", &queue_name("k")])
            .as_int()
            .unwrap()
    }

    fn place(&self, n: usize) -> String {
        let entry = format!("{},{TTL}p1/3,{}", lease(n), holder(n));
        ask(&self.server, &["ZSCORE", &queue_name("k"), &entry]).to_string()
    }

    /// Lets these permits not end before the test lets them. Returns their number.
    fn stop_time(&self, mark: &str) -> i64 {
        move_ends(&self.server, mark, "30000")
    }

    fn end_marked(&self, mark: &str) -> i64 {
        move_ends(&self.server, mark, "-40000")
    }
}

/// Moves the ends of the shares of the key `k` with this mark. Returns their number.
fn move_ends(server: &Server, mark: &str, by: &str) -> i64 {
    let all_moved = "local all, moved = redis.call('ZRANGE', KEYS[1], 0, -1, 'WITHSCORES'), 0
        for i = 1, #all, 2 do
            if all[i + 1] % 1 == tonumber(ARGV[1]) then
                redis.call('ZADD', KEYS[1], all[i + 1] + ARGV[2], all[i])
                moved = moved + 1
            end
        end
        return moved";
    let moved = ask(server, &["EVAL", all_moved, "1", "k", mark, by]);
    moved.as_int().unwrap()
}

#[test]
fn a_roll_call_skips_all_silent_waiters_for_permits() {
    let server = server();
    let mut clients = connect(&server);
    let callers: Vec<String> = (1..=100).map(holder).collect();
    let mut subscriber = listen(&mut clients, &callers);
    let mut permits = Permits::held(server, 100);
    permits.release(101);
    permits.release(102);
    assert_eq!(permits.stop_time("0.5"), 2);
    assert!(permits.has(1) && permits.has(2));
    // Before their time is over, requests change nothing.
    assert_eq!(permits.ask(50), Some(47));
    received(&permits.server, &mut subscriber);
    assert_eq!(permits.end_marked("0.5"), 2);
    // Caller 50 calls the roll. Callers 30 and 20 reply, in the wrong order.
    assert_eq!(permits.ask(50), Some(0));
    assert_eq!(permits.stop_time("0.75"), 2);
    let called = received(&permits.server, &mut subscriber);
    let called = called
        .into_iter()
        .filter(|(_, text)| text.ends_with(" = k"));
    assert_eq!(called.count(), 97);
    assert_eq!(
        permits.place(3),
        (permits.first_place + 3 + SILENT).to_string()
    );
    for (n, ahead) in [(30, 0), (20, 0), (30, 1), (50, 2)] {
        assert_eq!(permits.ask(n), Some(ahead), "caller {n}");
        assert_eq!(
            permits.place(n),
            (permits.first_place + n as u64).to_string()
        );
    }
    assert!(
        permits.has(1) && permits.has(2),
        "until all can have replied"
    );
    assert_eq!(permits.end_marked("0.75"), 2);
    assert_eq!(permits.ask(50), Some(0));
    assert_eq!(permits.stop_time("0.5"), 2);
    assert!(permits.has(20) && permits.has(30) && !permits.has(1));
    // The silent waiters are called once more, and lose their places.
    received(&permits.server, &mut subscriber);
    permits.release(100);
    assert!(permits.has(50));
    assert_eq!(permits.queued(), 0);
    let called = received(&permits.server, &mut subscriber);
    let called = called
        .into_iter()
        .filter(|(_, text)| text.ends_with(" = k"));
    assert_eq!(called.count(), 95);
}

/// A release may come before any request of a waiter. The permits that become free pass to the waiters in their order.
#[test]
fn a_release_calls_the_roll_for_permits() {
    let server = server();
    let mut clients = connect(&server);
    let callers: Vec<String> = (1..=10).map(holder).collect();
    let mut subscriber = listen(&mut clients, &callers);
    let mut permits = Permits::held(server, 10);
    permits.release(101);
    assert_eq!(permits.end_marked("0.5"), 1);
    received(&permits.server, &mut subscriber);
    permits.release(102);
    assert_eq!(permits.stop_time("0.75"), 1);
    assert_eq!(received(&permits.server, &mut subscriber).len(), 9);
    permits.release(100);
    assert_eq!(permits.queued(), 9, "they still have time to reply");
    assert!(permits.has(1));
    for (n, ahead) in [(7, Some(0)), (2, None), (4, Some(0)), (3, None)] {
        assert_eq!(permits.ask(n), ahead, "caller {n}");
    }
    // A late confirmation counts until another waiter has the permit.
    assert_eq!(permits.ask(1), None);
    assert_eq!(permits.end_marked("0.75"), 0);
}

/// A renewal does not call the roll, so it does not hide a late share from the next request.
#[test]
fn a_renewal_keeps_late_shares() {
    let server = server();
    let mut clients = connect(&server);
    let callers: Vec<String> = (1..=3).map(holder).collect();
    let mut subscriber = listen(&mut clients, &callers);
    let mut permits = Permits::held(server, 3);
    permits.release(101);
    assert_eq!(permits.end_marked("0.5"), 1);
    received(&permits.server, &mut subscriber);
    let renewed: i64 = eval(&RENEW, &["k"], &[&Permits::member(100), TTL])
        .query(&mut permits.redis)
        .unwrap();
    assert_eq!(renewed, 1);
    assert_eq!(permits.ask(3), Some(0));
    assert_eq!(received(&permits.server, &mut subscriber).len(), 1);
}

/// A reader in front of which only waiters stand.
#[track_caller]
fn assert_stands_behind(reply: Value, waiters: i64, at_most_ms: i64) {
    let Value::Array(parts) = reply else {
        panic!("{reply:?}");
    };
    let [Value::Int(left), Value::Int(ahead), _, Value::Int(0)] = parts[..] else {
        panic!("{parts:?}");
    };
    assert!(
        ahead == waiters && (1..=at_most_ms).contains(&left),
        "{parts:?}"
    );
}

/// The first reply to a roll call comes from a reader. It does not pass the writer in front of it while the writer may
/// still reply, and neither does a reader that comes during the roll call.
#[test]
fn readers_that_reply_first_do_not_pass_a_silent_writer() {
    let server = server();
    let (mut redis, mut clients) = (connect(&server), connect(&server));
    let mut subscriber = listen(&mut clients, &[1, 2, 3, 4].map(holder));
    for writer_replies in [true, false] {
        ask(&server, &["DEL", "k", &queue_name("k")]);
        add_readers(&mut redis, 11..12, 60_000);
        assert!(matches!(acquire(&mut redis, 1, "+"), Value::Array(_)));
        for n in [2, 3] {
            assert!(matches!(read(&mut redis, n, "+"), Value::Array(_)));
        }
        add_late(&server, &mut redis, 10..11);
        received(&server, &mut subscriber);
        assert_stands_behind(read(&mut redis, 3, "-"), 0, 501);
        assert_eq!(
            received(&server, &mut subscriber).len(),
            2,
            "both others are called"
        );
        assert_eq!(move_ends(&server, "0.75", "30000"), 1);
        assert_stands_behind(read(&mut redis, 4, "+"), 1, 30_501);
        if writer_replies {
            assert!(matches!(acquire(&mut redis, 1, "-"), Value::Array(_)));
            assert_stands_behind(read(&mut redis, 3, "-"), 1, 60_001);
        }
        assert_eq!(move_ends(&server, "0.75", "-40000"), 1);
        let reply = read(&mut redis, 3, "-");
        if !writer_replies {
            // The silent waiters have lost their places.
            assert!(matches!(reply, Value::BulkString(_)), "{reply:?}");
            continue;
        }
        assert_stands_behind(reply, 1, 60_001);
        let argument = format!("keep 0 0 {}", reader(11));
        let () = eval(&RELEASE, &[FENCE, "k"], &[&argument])
            .query(&mut redis)
            .unwrap();
        assert!(super::text_of(&server, "k").unwrap().contains(&lease(1)));
    }
}

/// All late shares end together: those of a roll call, and those that are late during it.
#[test]
fn late_shares_end_with_the_roll_call() {
    // More than a command reads or writes.
    const LATE: usize = 1_300;
    let server = server();
    let (mut redis, mut clients) = (connect(&server), connect(&server));
    let _subscriber = listen(&mut clients, &[1, 2].map(holder));
    add_readers(&mut redis, 10..11, 60_000);
    assert!(matches!(acquire(&mut redis, 1, "+"), Value::Array(_)));
    assert!(matches!(read(&mut redis, 2, "+"), Value::Array(_)));
    add_readers(&mut redis, 100..110, -5_000);
    add_late(&server, &mut redis, 1_000..1_000 + LATE);
    assert_stands_behind(read(&mut redis, 2, "-"), 0, 501);
    assert_eq!(
        members(&server),
        1 + LATE as i64,
        "ended shares are removed"
    );
    assert_eq!(move_ends(&server, "0.75", "30000"), LATE as i64);
    add_late(&server, &mut redis, 20..21);
    assert_stands_behind(read(&mut redis, 2, "-"), 0, 30_501);
    let end_of = |n: usize| ask(&server, &["ZSCORE", "k", &reader(n)]).to_string();
    assert_eq!(end_of(20), end_of(1_000));
    assert_eq!(move_ends(&server, "0.75", "-40000"), 1 + LATE as i64);
    assert!(matches!(read(&mut redis, 2, "-"), Value::BulkString(_)));
    assert_eq!(members(&server), 2);
    // Without other waiters, they end at once.
    ask(&server, &["DEL", "k", &queue_name("k")]);
    add_readers(&mut redis, 10..11, 60_000);
    assert!(matches!(acquire(&mut redis, 1, "+"), Value::Array(_)));
    add_late(&server, &mut redis, 1_000..1_000 + LATE);
    assert!(matches!(acquire(&mut redis, 1, "-"), Value::Array(_)));
    assert_eq!(members(&server), 1);
}

/// Without other waiters, a late share ends at once.
#[test]
fn a_waiter_alone_needs_no_roll_call_for_permits() {
    let server = server();
    let mut clients = connect(&server);
    let _subscriber = listen(&mut clients, &[1, 2].map(holder));
    let mut permits = Permits::held(server, 2);
    permits.release(101);
    assert_eq!(permits.end_marked("0.5"), 1);
    assert_eq!(permits.ask(2), None);
    assert!(!permits.has(1));
}

#[test]
fn a_roll_call_is_seen_among_the_first_shares() {
    for (before, is_seen) in [(100, true), (128, false)] {
        let server = server();
        let mut redis = connect(&server);
        add_readers(&mut redis, 100..100 + before, 30_000);
        add_readers(&mut redis, 1..3, 60_000);
        let end = ask(&server, &["ZSCORE", "k", &reader(2)]).to_string();
        let called = format!("{}.75", end.parse::<u64>().unwrap() - 1);
        ask(&server, &["ZADD", "k", &called, &reader(2)]);
        let silent = format!("{},{TTL},{}", lease(3), holder(3));
        ask(
            &server,
            &["ZADD", &queue_name("k"), "5700000000000000", &silent],
        );
        let argument = format!("keep 0 0 {}", reader(1));
        let () = eval(&RELEASE, &[FENCE, "k"], &[&argument])
            .query(&mut redis)
            .unwrap();
        let queued = ask(&server, &["EXISTS", &queue_name("k")]);
        assert_eq!(queued, Reply::Int(i64::from(is_seen)), "{before}");
    }
}

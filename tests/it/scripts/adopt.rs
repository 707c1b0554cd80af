//! lua/adopt.lua: a grant passes to the holder of a ticket, under a new lease id and a greater token, with its
//! queue, and with a ttl that is not shorter.

use leasehold_testbed::Server;
use redis::Connection;

use super::{
    ADOPT, INSPECT, MICROS, RENEW, Said, TTL, TWO, acquire_as, call, connect, counter_of, ends,
    entries, granted, holder, kinds, lease, listen, queue_of, queue_up, received, release,
    release_as, text_of, ttl_of, value,
};
use crate::support::{ask, server};

/// The number of the adopter, which no other caller has.
const ADOPTER: usize = 9;

/// [`ADOPTER`] adopts with the ticket of caller `from`.
fn adopt(connection: &mut Connection, key: &str, from: &str, ttl: &str) -> Said {
    let micros = micros_of(connection, key);
    adopt_under(connection, key, (from, &micros), ttl)
}

fn adopt_under(
    connection: &mut Connection,
    key: &str,
    (from, micros): (&str, &str),
    ttl: &str,
) -> Said {
    let args = [&holder(ADOPTER), from, micros, &lease(ADOPTER), ttl];
    call(connection, &ADOPT, &[key], &args).remove(0)
}

/// The µs part of the token under which the key was granted.
fn micros_of(connection: &mut Connection, key: &str) -> String {
    let value: String = redis::cmd("GET").arg(key).query(connection).unwrap();
    value.split(' ').nth(2).unwrap().to_owned()
}

/// The remaining ttl of the adopted key.
#[track_caller]
fn adopted(said: &Said) -> i64 {
    match said {
        Said::Adopted { left, .. } if *left > 0 => *left,
        other => panic!("not adopted: {other:?}"),
    }
}

/// The value of a lock after the adoption: with the lease and the holder of [`ADOPTER`] in place of those of caller 0.
fn renamed(value: &str, micros: u64) -> String {
    let whose = |n: usize| format!("lh1 {} ", lease(n));
    let value = value.replacen(&whose(0), &whose(ADOPTER), 1);
    let granted = value.split(' ').nth(2).unwrap().to_owned();
    let value = value.replacen(&granted, &micros.to_string(), 1);
    value.replacen(&holder(0), &holder(ADOPTER), 1)
}

#[test]
fn an_adopted_lock_keeps_its_queue_and_gets_a_token() {
    let server = server();
    let mut redis = connect(&server);
    for ttls in [&[][..], &[TTL], &["5000", "0", "90000"]] {
        for ttl in ["", TTL] {
            let before = queue_up(&mut redis, "k", ttls);
            let granted: u64 = micros_of(&mut redis, "k").parse().unwrap();
            let said = adopt(&mut redis, "k", &lease(0), ttl);
            let Said::Adopted { micros, .. } = said else {
                panic!("not adopted: {said:?}");
            };
            assert!(micros > granted);
            assert_eq!(text_of(&server, "k"), Some(renamed(&before, micros)));
            assert_eq!(counter_of(&server), Some(micros.to_string()));
            assert_eq!(queue_of(&server, "k"), entries(1, ttls));
            ask(&server, &["FLUSHALL"]);
        }
    }
}

#[test]
fn earlier_waiters_are_granted_after_the_adopter() {
    let server = server();
    let (mut redis, mut clients) = (connect(&server), connect(&server));
    let mut subscriber = listen(&mut clients, &[0, 1, 2, ADOPTER].map(holder));
    queue_up(&mut redis, "k", &[TTL, TTL]);
    adopted(&adopt(&mut redis, "k", &lease(0), TTL));
    assert_eq!(kinds(&[acquire_as(&mut redis, "k", 3, "+")]), ["queued"]);
    assert_eq!(
        received(&server, &mut subscriber),
        [],
        "nobody has been granted"
    );
    assert_eq!(ends(&[release_as(&mut redis, "k", 0)]), ["taken"]);
    assert_eq!(ends(&[release_as(&mut redis, "k", ADOPTER)]), ["done"]);
    let value = text_of(&server, "k").unwrap();
    assert!(value.starts_with(&format!("lh1 {} ", lease(1))), "{value}");
    assert!(value.ends_with(" +"), "{value}");
    assert_eq!(queue_of(&server, "k"), entries(2, &[TTL, TTL]));
    assert_eq!(received(&server, &mut subscriber).len(), 1);
}

#[test]
fn adopting_restores_and_never_shortens_a_ttl() {
    let server = server();
    let mut redis = connect(&server);
    for (left, asked, wanted) in [
        (5_000, "60000", 50_000..=60_000),
        (60_000, "5000", 50_000..=60_000),
        (60_000, "", 50_000..=60_000),
        (5_000, "", 1..=5_000),
        (5_000, "0", 1..=5_000),
    ] {
        let left: i64 = left;
        ask(&server, &["SET", "k", &value(TWO), "PX", &left.to_string()]);
        let said = adopted(&adopt(&mut redis, "k", TWO, asked));
        assert!(wanted.contains(&said), "{left} and {asked:?}: {said}");
        let ttl = ttl_of(&server, "k");
        assert!(wanted.contains(&ttl) && ttl <= said, "{said}: {ttl}");
    }
}

/// The lock was granted for a limited time: no holder may have it for ever.
#[test]
fn a_key_without_a_ttl_gets_one() {
    let server = server();
    let mut redis = connect(&server);
    ask(&server, &["SET", "k", &value(TWO)]);
    assert_eq!(adopted(&adopt(&mut redis, "k", TWO, TTL)), 60_000);
    assert!((1..=60_000).contains(&ttl_of(&server, "k")));
    ask(&server, &["SET", "k", &value(TWO)]);
    assert_eq!(adopted(&adopt(&mut redis, "k", TWO, "")), 1);
    assert_ne!(ttl_of(&server, "k"), -1);
}

#[test]
fn a_ticket_is_valid_once() {
    let server = server();
    let mut redis = connect(&server);
    queue_up(&mut redis, "k", &[TTL]);
    adopted(&adopt(&mut redis, "k", &lease(0), TTL));
    let value = text_of(&server, "k").unwrap();
    assert_eq!(
        adopt(&mut redis, "k", &lease(0), TTL),
        Said::Text(value.clone())
    );
    let micros = micros_of(&mut redis, "k");
    let args = [holder(0), lease(0), micros, lease(0), TTL.to_owned()];
    let args = args.each_ref().map(String::as_str);
    assert_eq!(
        call(&mut redis, &ADOPT, &["k"], &args),
        [Said::Text(value.clone())],
        "nor for the holder that made the ticket"
    );
    assert_eq!(text_of(&server, "k"), Some(value));
}

fn prepare(server: &Server) {
    ask(server, &["FLUSHALL"]);
    ask(server, &["SET", "own", &value(TWO), "PX", "5000"]);
    ask(server, &["SET", "own2", &value(TWO), "PX", "5000"]);
    ask(server, &["SET", "theirs", &value(&lease(7)), "PX", "5000"]);
    ask(server, &["SET", "cut", &format!("lh1 {TWO}"), "PX", "5000"]);
    ask(server, &["SET", "text", TWO, "PX", "5000"]);
    ask(server, &["SET", "long", &"x".repeat(5_000), "PX", "5000"]);
    ask(server, &["RPUSH", "list", "theirs"]);
}

#[test]
fn a_failed_adoption_affects_no_other_key() {
    let server = server();
    let mut redis = connect(&server);
    let keys = [
        "own", "none", "theirs", "cut", "text", "long", "list", "own2",
    ];
    let mut args = vec![holder(ADOPTER)];
    for n in 0..keys.len() {
        args.extend([TWO, MICROS, &lease(20 + n), TTL].map(str::to_owned));
    }
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    prepare(&server);
    let together = call(&mut redis, &ADOPT, &keys, &args);
    adopted(&together[0]);
    let wanted = [
        Said::Number(0),
        Said::Text(value(&lease(7))),
        Said::Text(format!("lh1 {TWO}")),
        Said::Text(TWO.to_owned()),
        Said::Text("x".repeat(256)),
    ];
    assert_eq!(together[1..6], wanted);
    assert!(together[6].text().starts_with("WRONGTYPE"), "{together:?}");
    assert_eq!(adopted(&together[7]), 60_000);
    for key in ["theirs", "cut", "text", "long"] {
        assert!(ttl_of(&server, key) <= 5_000, "{key}");
    }
    prepare(&server);
    let alone = keys.iter().enumerate().map(|(n, key)| {
        let args = [args[0], TWO, MICROS, &lease(20 + n), TTL];
        call(&mut redis, &ADOPT, &[key], &args).remove(0)
    });
    for (alone, together) in alone.zip(together) {
        match together {
            Said::Adopted { .. } => assert_eq!(adopted(&alone), 60_000),
            other => assert_eq!(alone, other),
        }
    }
}

#[test]
fn a_lease_id_is_not_read_as_a_pattern() {
    let server = server();
    let mut redis = connect(&server);
    let before = queue_up(&mut redis, "k", &[TTL]);
    for from in [".*", "%x+", &"%x".repeat(32), &".".repeat(32), "", "%"] {
        let said = adopt(&mut redis, "k", from, TTL);
        assert_eq!(said, Said::Text(before.clone()), "{from}");
        assert_eq!(text_of(&server, "k"), Some(before.clone()), "{from}");
    }
}

#[test]
fn a_ticket_with_a_token_not_granted_yet_is_refused() {
    let server = server();
    let mut redis = connect(&server);
    let before = queue_up(&mut redis, "k", &[TTL]);
    let micros = micros_of(&mut redis, "k");
    let later = (micros.parse::<u64>().unwrap() + 3_600_000_000).to_string();
    for other in [&*later, "9007199254740992"] {
        let said = adopt_under(&mut redis, "k", (&lease(0), other), TTL);
        assert_eq!(said, Said::Text(before.clone()), "{other}");
        assert_eq!(text_of(&server, "k"), Some(before.clone()), "{other}");
    }
    // The counter is ahead of the clock, and has reached the token.
    ask(&server, &["ZADD", super::FENCE, &later, "t"]);
    adopted(&adopt_under(&mut redis, "k", (&lease(0), &later), TTL));
}

#[test]
fn without_memory_a_ticket_stays_valid() {
    let server = server();
    let mut redis = connect(&server);
    let before = queue_up(&mut redis, "k", &[TTL]);
    ask(&server, &["CONFIG", "SET", "maxmemory", "1"]);
    let said = adopt(&mut redis, "k", &lease(0), TTL);
    assert!(said.text().starts_with("OOM"), "{said:?}");
    assert_eq!(text_of(&server, "k"), Some(before));
    assert_eq!(
        call(&mut redis, &INSPECT, &["k"], &[]).len(),
        1,
        "an inspection uses no memory"
    );
    let renewed = call(&mut redis, &RENEW, &["k"], &[&lease(0), TTL]);
    assert_eq!(ends(&renewed), ["done"]);
    ask(&server, &["CONFIG", "SET", "maxmemory", "0"]);
    adopted(&adopt(&mut redis, "k", &lease(0), TTL));
    assert_eq!(
        ends(&release(&mut redis, &["k"], &[&lease(ADOPTER)])),
        ["done"]
    );
}

#[test]
fn a_later_grant_exceeds_the_adopted_token() {
    let server = server();
    let mut redis = connect(&server);
    let before = granted(&acquire_as(&mut redis, "k", 0, ""));
    adopted(&adopt(&mut redis, "k", &lease(0), TTL));
    release_as(&mut redis, "k", ADOPTER);
    assert!(granted(&acquire_as(&mut redis, "k", 1, "")) > before);
}

//! The line at the end of a lock's value: how one comes into it, stays in it, and leaves it. Who is
//! served from it is the subject of `turns`.

use leasehold_testbed::{Reply, Server, eventually};
use redis::Connection;

use super::{
    ACQUIRE, FENCE, ONE, RENEW, Said, TTL, TWO, call, come, connect, ends, go, granted, heard,
    holder, kinds, lease, line_up, listen, place, say, text_of, ttl_of, value,
};
use crate::support::{SOON, ask, server};

/// What stands under the key that these tests wait for.
fn value_of(server: &Server) -> String {
    text_of(server, "k").expect("it is held")
}

/// For how long the key is taken, as who stands in line is told it.
#[track_caller]
fn waits(said: &Said) -> i64 {
    match said {
        Said::Number(left) if *left < 0 => -1 - left,
        other => panic!("does not stand in line: {other:?}"),
    }
}

#[test]
fn who_finds_a_lock_taken_stands_at_the_end_of_its_value_and_is_told_so() {
    let server = server();
    let mut redis = connect(&server);
    let micros = granted(&come(&mut redis, "k", 0, TTL));
    let mut wanted = format!("lh1 {} {micros} {}", lease(0), holder(0));
    assert_eq!(
        value_of(&server),
        wanted,
        "who is granted stands in no line"
    );
    for (n, stands) in [(1, "5000"), (2, "0"), (3, "90000")] {
        let said = come(&mut redis, "k", n, stands);
        assert!((1..=60_000).contains(&waits(&said)), "{said:?}");
        wanted += &place(n, stands);
        assert_eq!(value_of(&server), wanted);
        assert!((1..=60_000).contains(&ttl_of(&server, "k")));
    }
    // The ttl that an endless key is given is known to the millisecond.
    ask(&server, &["PERSIST", "k"]);
    let said = come(&mut redis, "k", 4, "0");
    assert_eq!(said, Said::Number(-60_001), "-1, less the ms");
    assert_eq!(value_of(&server), wanted + &place(4, "0"));
}

#[test]
fn only_who_asks_to_stand_comes_into_line_and_only_once() {
    let server = server();
    let mut redis = connect(&server);
    let value = line_up(&mut redis, "k", &["5000", "0"]);
    for (n, stands, told) in [
        (1, "5000", "waiting"),
        (1, TTL, "waiting"),
        (1, "0", "waiting"),
        (1, "-", "waiting"),
        (1, "", "contended"),
        (2, "0", "waiting"),
        (2, TTL, "waiting"),
        (2, "-", "waiting"),
        (3, "-", "contended"),
        (3, "", "contended"),
    ] {
        let said = come(&mut redis, "k", n, stands);
        assert_eq!(kinds(&[said]), [told], "caller {n} with {stands:?}");
        assert_eq!(value_of(&server), value, "caller {n} with {stands:?}");
    }
}

#[test]
fn each_key_of_one_call_has_a_line_of_its_own() {
    let server = server();
    let mut redis = connect(&server);
    let keys = ["told", "free", "foreign", "polls", "unasked"];
    for key in ["told", "polls", "unasked"] {
        ask(&server, &["SET", key, &value(TWO), "PX", "50000"]);
    }
    ask(&server, &["SET", "foreign", "theirs"]);
    let mut args = vec![holder(7)];
    for (n, stands) in ["90000", "1000", "1000", "0", ""].into_iter().enumerate() {
        args.extend([lease(n), TTL.to_owned(), stands.to_owned()]);
    }
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let out = call(&mut redis, ACQUIRE, &[&[FENCE], &keys[..]].concat(), &args);
    let wanted = ["waiting", "granted", "foreign", "waiting", "contended"];
    assert_eq!(kinds(&out), wanted);
    assert!(
        waits(&out[0]) <= 50_000 && waits(&out[3]) <= 50_000,
        "{out:?}"
    );
    let lines = ["told", "polls", "unasked", "foreign"].map(|key| text_of(&server, key).unwrap());
    let (told, polls) = (lease(0), lease(3));
    let wanted = [
        format!("{} {told},90000,host/7/0", value(TWO)),
        format!("{} {polls},0,host/7/0", value(TWO)),
        value(TWO),
        "theirs".to_owned(),
    ];
    assert_eq!(lines, wanted);
}

#[test]
fn a_full_line_takes_no_more_until_somebody_leaves() {
    let server = server();
    let mut redis = connect(&server);
    line_up(&mut redis, "k", &[TTL, "0"]);
    let mut next = 3;
    let refused = loop {
        let said = come(&mut redis, "k", next, TTL);
        if kinds(std::slice::from_ref(&said)) != ["waiting"] {
            break said;
        }
        next += 1;
        assert!(next < 1000, "a line without an end");
    };
    assert_eq!(kinds(&[refused]), ["contended"]);
    let value = value_of(&server);
    let last = place(next - 1, TTL);
    assert!(value.ends_with(&last));
    assert!(
        (8193..=8192 + last.len()).contains(&value.len()),
        "{}",
        value.len()
    );
    for n in [1, 2, next - 1] {
        let said = come(&mut redis, "k", n, TTL);
        assert_eq!(kinds(&[said]), ["waiting"], "{n} stands there already");
    }
    for n in [1, 2] {
        assert_eq!(go(&mut redis, "k", n), Said::Number(1));
    }
    waits(&come(&mut redis, "k", next, TTL));
    assert!(value_of(&server).ends_with(&place(next, TTL)));
}

#[test]
fn who_leaves_is_taken_out_wherever_it_stands() {
    let server = server();
    let mut redis = connect(&server);
    for line in [&["0"][..], &["5000", "0", TTL]] {
        for n in 1..=line.len() {
            let value = line_up(&mut redis, "k", line);
            assert_eq!(go(&mut redis, "k", n), Said::Number(1), "{n} of {line:?}");
            let mut rest = value.replace(&place(n, line[n - 1]), "");
            assert_ne!(rest, value);
            assert_eq!(value_of(&server), rest);
            let ttl = ttl_of(&server, "k");
            assert!((1..=60_000).contains(&ttl), "{ttl}: the ttl stays");

            assert_eq!(go(&mut redis, "k", n), Said::Text(rest.clone()), "again");
            let said = come(&mut redis, "k", n, "-");
            assert_eq!(kinds(&[said]), ["contended"], "it stands there no more");
            assert_eq!(value_of(&server), rest);
            waits(&come(&mut redis, "k", n, "0"));
            rest += &place(n, "0");
            assert_eq!(value_of(&server), rest, "whoever comes again comes last");
            ask(&server, &["DEL", "k"]);
        }
    }
}

#[test]
fn who_neither_holds_nor_waits_is_told_what_stands_there() {
    let server = server();
    let mut redis = connect(&server);
    for line in [&[TTL][..], &[TTL; 9]] {
        let value = line_up(&mut redis, "k", line);
        let shown = Said::Text(value[..value.len().min(256)].to_owned());
        assert_eq!(go(&mut redis, "k", 10), shown);
        // To wait for a lock is not to have it.
        let waiting = call(&mut redis, RENEW, &["k"], &[&lease(1), "90000"]);
        assert_eq!(waiting, [shown]);
        assert_eq!(value_of(&server), value);
        assert!(ttl_of(&server, "k") <= 60_000);
        ask(&server, &["DEL", "k"]);
    }
}

#[test]
fn values_of_others_are_joined_and_left_by_nobody() {
    let server = server();
    let mut redis = connect(&server);
    // As long as a value of ours, with what looks like a place in a line.
    let beginnings = ["lh2 ", "LH1 ", "lh1-", "    "];
    for value in beginnings.map(|begin| value(ONE).replace("lh1 ", begin) + &place(1, "0")) {
        ask(&server, &["SET", "k", &value, "PX", "50000"]);
        assert_eq!(go(&mut redis, "k", 1), Said::Text(value.clone()));
        assert_eq!(go(&mut redis, "k", 2), Said::Text(value.clone()));
        for (n, stands) in [(1, "-"), (1, "0"), (2, TTL)] {
            let said = come(&mut redis, "k", n, stands);
            assert_eq!(kinds(&[said]), ["foreign"], "{value:?}");
        }
        assert_eq!(value_of(&server), value);
        assert!((1..=50_000).contains(&ttl_of(&server, "k")));
    }
}

#[test]
fn the_line_goes_with_its_key() {
    let server = server();
    let mut redis = connect(&server);
    line_up(&mut redis, "k", &[TTL, "0"]);
    ask(&server, &["PEXPIRE", "k", "1"]);
    let gone = eventually(SOON, || ask(&server, &["EXISTS", "k"]) == Reply::Int(0));
    assert!(gone, "the line keeps no key alive");
    assert_eq!(go(&mut redis, "k", 2), Said::Number(0), "no line to leave");
    // Who asks again takes no free key: it may have given up since.
    assert_eq!(come(&mut redis, "k", 1, "-"), Said::Number(0));
    assert_eq!(ask(&server, &["EXISTS", "k"]), Reply::Int(0));
}

#[test]
fn commas_in_a_holders_name_mislead_nobody() {
    let server = server();
    let (mut redis, mut clients) = (connect(&server), connect(&server));
    let hosts = [",", "a,b", "0,a,", ",,5000,"].map(|host| format!("{host}/1/0"));
    let mut ear = listen(&mut clients, &hosts);
    let ask_for = |redis: &mut Connection, holder: &str, id: &str, stands: &str| {
        call(redis, ACQUIRE, &[FENCE, "k"], &[holder, id, TTL, stands]).remove(0)
    };
    let place_2 = place(2, TTL);
    for host in &hosts {
        granted(&ask_for(&mut redis, host, &lease(0), ""));
        let alone = value_of(&server);
        let both = format!("{alone} {},50000,{host}{place_2}", lease(1));
        let stand = |redis: &mut Connection| {
            waits(&ask_for(redis, host, &lease(1), "50000"));
            waits(&come(redis, "k", 2, TTL));
            assert_eq!(value_of(&server), both);
        };
        stand(&mut redis);
        assert_eq!(go(&mut redis, "k", 1), Said::Number(1));
        assert_eq!(value_of(&server), format!("{alone}{place_2}"));
        assert_eq!(go(&mut redis, "k", 2), Said::Number(1));
        stand(&mut redis);
        assert_eq!(go(&mut redis, "k", 0), Said::Number(1));
        let value = value_of(&server);
        let micros = value.split(' ').nth(2).unwrap();
        assert_eq!(value, format!("lh1 {} {micros} {host}{place_2}", lease(1)));
        let message = format!("{} {micros} k", lease(1));
        let channel = format!("leasehold/{host}");
        assert_eq!(heard(&server, &mut ear), [(channel, message)]);
        ask(&server, &["DEL", "k"]);
    }
}

#[test]
fn where_the_value_or_its_ttl_cannot_be_written_nobody_joins_or_leaves() {
    let server = server();
    let mut redis = connect(&server);
    let value = line_up(&mut redis, "k", &[TTL, "0"]);
    let coming = [(3, TTL), (3, "0"), (1, TTL), (2, "-")];
    let come_all = |redis: &mut Connection| {
        let said = coming.map(|(n, stands)| come(redis, "k", n, stands));
        assert_eq!(value_of(&server), value);
        kinds(&said)
    };
    say(&server, "ACL SETUSER default -append");
    let wanted = ["contended", "contended", "waiting", "waiting"];
    assert_eq!(come_all(&mut redis), wanted);
    // Nor where the key cannot be given a ttl: the line would not end with it.
    say(&server, "ACL SETUSER default +append -pexpire");
    ask(&server, &["PERSIST", "k"]);
    assert_eq!(come_all(&mut redis), ["refused"; 4]);
    assert_eq!(kinds(&[come(&mut redis, "k", 0, TTL)]), ["refused"]);
    ask(&server, &["CONFIG", "SET", "maxmemory", "1"]);
    assert_eq!(come_all(&mut redis), ["refused"; 4]);
    let leaves = go(&mut redis, "k", 1);
    assert!(leaves.text().starts_with("OOM"), "{leaves:?}");
    assert_eq!(ends(&[leaves]), ["refused"]);
    assert_eq!(value_of(&server), value);
}

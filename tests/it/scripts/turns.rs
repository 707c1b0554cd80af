//! Whose turn it is when a lock with a line is let go of: who is granted it, for how long, and how
//! it hears of that.

use leasehold_testbed::Reply;
use redis::Connection;

use super::{
    ACQUIRE, ALL_KEYS, FENCE, NO_COUNTER, ONE, READS_IT_NO_MORE, READS_THE_COUNTER, RELEASE, Said,
    TTL, connect, ends, go, has_selectors, heard, holder, lease, line_up, listen, place, release,
    say, text_of, ttl_of, value,
};
use crate::support::{ask, server};

/// What a release has made of a key, seen in the moment of the release.
#[derive(Debug)]
pub(super) struct Turn {
    /// The value then; `None` if the key was free.
    pub value: Option<String>,
    /// Its ttl in ms.
    pub left: i64,
}

/// Caller `n` lets go of the key that it holds.
#[track_caller]
pub(super) fn pass(connection: &mut Connection, key: &str, n: usize) -> Turn {
    let mut together = redis::pipe();
    together.atomic();
    together.cmd("EVAL").arg(RELEASE).arg(2).arg(FENCE).arg(key);
    together.arg(lease(n));
    together.cmd("GET").arg(key).cmd("PTTL").arg(key);
    let (said, value, left): (i64, _, _) = together.query(connection).unwrap();
    assert_eq!(said, 1, "it was let go of");
    Turn { value, left }
}

/// The value of a lock that `n` was granted by a release, with the line behind it. Answers with the
/// µs of its token as well.
#[track_caller]
fn granted_to(n: usize, turn: &Turn, line: &str) -> u64 {
    let value = turn.value.as_ref().expect("it was granted");
    let micros = value.split(' ').nth(2).unwrap();
    let wanted = format!("lh1 {} {micros} {}{line}", lease(n), holder(n));
    assert_eq!(*value, wanted);
    micros.parse().unwrap()
}

#[test]
fn release_grants_to_the_first_in_line_and_tells_it() {
    let server = server();
    let (mut redis, mut clients) = (connect(&server), connect(&server));
    let mut ear = listen(&mut clients, &[0, 1, 2, 3].map(holder));
    for key in ["k", "a b: ü"] {
        line_up(&mut redis, key, &["90000", "50000", "900000"]);
        let mut last = ask(&server, &["GET", FENCE]).as_int().unwrap() as u64;
        let (second, third) = (place(2, "50000"), place(3, "900000"));
        for (n, line, ttl) in [
            (1, format!("{second}{third}"), 60_001..=90_000),
            (2, third.clone(), 1..=50_000),
            (3, String::new(), 90_001..=900_000),
        ] {
            let turn = pass(&mut redis, key, n - 1);
            let micros = granted_to(n, &turn, &line);
            assert!(micros > last, "{micros} after {last}");
            last = micros;
            assert!(ttl.contains(&turn.left), "{turn:?}");
            assert_eq!(ask(&server, &["GET", FENCE]).to_string(), last.to_string());
            let message = format!("{} {micros} {key}", lease(n));
            let channel = format!("leasehold/{}", holder(n));
            assert_eq!(heard(&server, &mut ear), [(channel, message)]);
        }
        assert_eq!(pass(&mut redis, key, 3).value, None);
        assert_eq!(heard(&server, &mut ear), [], "nobody waits");
    }
}

#[test]
fn those_whose_client_has_gone_are_passed_over() {
    let server = server();
    let (mut redis, mut clients) = (connect(&server), connect(&server));
    // One letter for each in line: its client listens, has gone, or polls (and does not listen).
    for (line, next) in [
        ("g", None),
        ("ggg", None),
        ("gl", Some(2)),
        ("gggl", Some(4)),
        ("lg", Some(1)),
        ("gglggl", Some(3)),
        ("gp", Some(2)),
        ("gpl", Some(2)),
        ("pl", Some(1)),
        ("gglp", Some(3)),
    ] {
        let letters = || (1..).zip(line.chars());
        let ears = letters().filter(|(_, letter)| *letter == 'l');
        let ears: Vec<String> = ears.map(|(n, _)| holder(n)).collect();
        let mut ear = listen(&mut clients, &ears);
        let stands = letters().map(|(_, letter)| if letter == 'p' { "0" } else { TTL });
        let stands: Vec<&str> = stands.collect();
        line_up(&mut redis, "k", &stands);
        let turn = pass(&mut redis, "k", 0);
        let messages = heard(&server, &mut ear);
        let told = next.filter(|next| stands[next - 1] != "0");
        assert_eq!(messages.len(), usize::from(told.is_some()), "{line}");
        if let Some(next) = next {
            let behind = letters().skip(next);
            let behind: String = behind.map(|(n, _)| place(n, stands[n - 1])).collect();
            granted_to(next, &turn, &behind);
        } else {
            assert_eq!(turn.value, None, "{line}: nobody is left");
        }
        ask(&server, &["DEL", "k"]);
    }
}

/// Caller 0 lets go, and in the same moment caller 1 asks for the key: the key before that, the µs
/// that caller 1 is answered, the key after that.
#[track_caller]
fn pass_and_come(connection: &mut Connection, stands: &str) -> (Turn, String, Turn) {
    let mut together = redis::pipe();
    together.atomic();
    together.cmd("EVAL").arg(RELEASE).arg(2).arg(&[FENCE, "k"]);
    together.arg(lease(0));
    together.cmd("GET").arg("k").cmd("PTTL").arg("k");
    together.cmd("EVAL").arg(ACQUIRE).arg(2).arg(&[FENCE, "k"]);
    together.arg(&[&holder(1), &lease(1), TTL, stands]);
    together.cmd("GET").arg("k").cmd("PTTL").arg("k");
    let (said, value, left, micros, then, left_then): (i64, _, _, _, _, _) =
        together.query(connection).unwrap();
    assert_eq!(said, 1, "it was let go of");
    let (before, after) = (
        Turn { value, left },
        Turn {
            value: then,
            left: left_then,
        },
    );
    (before, micros, after)
}

#[test]
fn who_was_granted_meanwhile_is_given_its_token_and_its_full_ttl_when_it_comes() {
    let server = server();
    let (mut redis, mut clients) = (connect(&server), connect(&server));
    let mut ear = listen(&mut clients, &[holder(1)]);
    for (stood, granted_for, told) in [("0", 1..=100, 0), ("5000", 101..=5000, 1)] {
        for stands in ["", "-", "0", TTL] {
            line_up(&mut redis, "k", &[stood, TTL]);
            let (before, micros, after) = pass_and_come(&mut redis, stands);
            let token = granted_to(1, &before, &place(2, TTL));
            assert!(granted_for.contains(&before.left), "{before:?}");
            assert_eq!(
                heard(&server, &mut ear).len(),
                told,
                "who polls is not told"
            );
            assert_eq!(micros, token.to_string());
            assert_eq!(after.value, before.value);
            assert!((5001..=60_000).contains(&after.left), "{after:?}");
            ask(&server, &["DEL", "k"]);
        }
    }
}

#[test]
fn where_it_may_not_be_told_the_first_in_line_polls_in_the_end() {
    let server = server();
    let mut clients = connect(&server);
    let mut ear = listen(&mut clients, &[1, 2].map(holder));
    for (user, forbidden) in [("mute", "-publish"), ("deaf", "resetchannels")] {
        let acl = ["ACL", "SETUSER", user, "on", ">secret", "~*", "&*", "+@all"];
        ask(&server, &[&acl[..], &[forbidden]].concat());
        let mut redis = connect(&server);
        let mut login = redis::cmd("AUTH");
        login.arg(user).arg("secret").exec(&mut redis).unwrap();
        line_up(&mut redis, "k", &[TTL, TTL]);
        let (before, micros, after) = pass_and_come(&mut redis, "-");
        let token = granted_to(1, &before, &place(2, TTL));
        assert!((1..=100).contains(&before.left), "{user}: {before:?}");
        assert_eq!(micros, token.to_string());
        assert!((50_000..=60_000).contains(&after.left), "{after:?}");
        assert_eq!(heard(&server, &mut ear), [], "{user}");
        ask(&server, &["DEL", "k"]);
    }
}

#[test]
fn without_memory_or_leave_to_write_a_key_with_a_line_is_freed() {
    let server = server();
    let (mut redis, mut clients) = (connect(&server), connect(&server));
    let mut ear = listen(&mut clients, &[1, 2].map(holder));
    let line = [TTL, "0"];
    let mut spoils = vec![
        ("CONFIG SET maxmemory 1", "CONFIG SET maxmemory 0"),
        ("ACL SETUSER default -set", "ACL SETUSER default +set"),
    ];
    if has_selectors(&server) {
        spoils.push((READS_THE_COUNTER, READS_IT_NO_MORE));
    } else {
        let value = line_up(&mut redis, "k", &line);
        say(&server, NO_COUNTER);
        let said = go(&mut redis, "k", 0);
        assert!(said.text().starts_with("NOPERM"), "{said:?}");
        say(&server, ALL_KEYS);
        assert_eq!(text_of(&server, "k"), Some(value));
        ask(&server, &["DEL", "k"]);
    }
    for (spoil, mend) in spoils {
        line_up(&mut redis, "k", &line);
        line_up(&mut redis, "k2", &line);
        let counter = ask(&server, &["GET", FENCE]);
        say(&server, spoil);
        for key in ["k", "k2"] {
            assert_eq!(go(&mut redis, key, 0), Said::Number(1), "{spoil:?}");
        }
        assert_eq!(ask(&server, &["EXISTS", "k", "k2"]), Reply::Int(0));
        assert_eq!(ask(&server, &["GET", FENCE]), counter, "no token was made");
        assert_eq!(heard(&server, &mut ear), [], "{spoil:?}");
        say(&server, mend);
    }
}

#[test]
fn a_line_that_nobody_can_read_is_nobodys() {
    let server = server();
    let (mut redis, mut clients) = (connect(&server), connect(&server));
    let mut ear = listen(&mut clients, &[1, 2].map(holder));
    let (id, gone) = (lease(1), place(3, TTL));
    for line in [
        " ".to_owned(),
        format!("  {}", &place(1, TTL)),
        format!(" {id}"),
        format!(" {id},{TTL}"),
        format!(" {id},{TTL},"),
        format!(" {id},,{}", holder(1)),
        format!(" {id},-1,{}", holder(1)),
        format!(" {id},00,{}", holder(1)),
        format!(" {id},{},{}", "9".repeat(30), holder(1)),
        format!(" not-an-id,{TTL},{}", holder(1)),
        format!("{gone} {id},-1,{}", holder(1)),
        format!("{gone} {id},00,{}", holder(1)),
    ] {
        ask(
            &server,
            &["SET", "k", &(value(&lease(0)) + &line), "PX", TTL],
        );
        assert_eq!(pass(&mut redis, "k", 0).value, None, "{line:?}");
        assert_eq!(heard(&server, &mut ear), [], "{line:?}");
    }
}

#[test]
fn each_key_of_one_release_goes_its_own_way() {
    let server = server();
    let (mut redis, mut clients) = (connect(&server), connect(&server));
    let mut ear = listen(&mut clients, &[1, 2].map(holder));
    let keys = ["line", "plain", "foreign", "list", "none", "left", "line2"];
    let foreign = "not ours ".repeat(9) + &place(0, TTL);
    let ids = [0, 0, 0, 0, 0, 4, 0].map(lease);
    let mut outcomes = Vec::new();
    for together in [true, false] {
        ask(&server, &["FLUSHALL"]);
        line_up(&mut redis, "line", &[TTL]);
        line_up(&mut redis, "plain", &[]);
        ask(&server, &["SET", "foreign", &foreign]);
        ask(&server, &["RPUSH", "list", "theirs"]);
        let left = value(ONE);
        ask(
            &server,
            &["SET", "left", &(left.clone() + &place(4, "0")), "PX", TTL],
        );
        line_up(&mut redis, "line2", &[TTL, "0"]);
        let ids = ids.each_ref().map(String::as_str);
        let out = if together {
            release(&mut redis, &keys, &ids)
        } else {
            let each = keys.into_iter().zip(ids);
            each.flat_map(|(key, id)| release(&mut redis, &[key], &[id]))
                .collect()
        };
        let wanted = [
            "done", "done", "taken", "refused", "missing", "done", "done",
        ];
        assert_eq!(ends(&out), wanted);
        outcomes.push(out);

        let turn = |key: &str| Turn {
            value: text_of(&server, key),
            left: ttl_of(&server, key),
        };
        let first = granted_to(1, &turn("line"), "");
        let second = granted_to(1, &turn("line2"), &place(2, "0"));
        assert!(first < second, "{first}, then {second}");
        let messages = heard(&server, &mut ear);
        let texts: Vec<&str> = messages.iter().map(|(_, text)| text.as_str()).collect();
        let wanted = [(first, "line"), (second, "line2")]
            .map(|(micros, key)| format!("{} {micros} {key}", lease(1)));
        assert_eq!(texts, wanted);
        assert_eq!(text_of(&server, "foreign"), Some(foreign.clone()));
        assert_eq!(ask(&server, &["LLEN", "list"]), Reply::Int(1));
        assert_eq!(turn("left").value, Some(left));
        assert!((1..=60_000).contains(&turn("left").left));
        assert_eq!(ask(&server, &["EXISTS", "plain", "none"]), Reply::Int(0));
    }
    assert_eq!(outcomes[0], outcomes[1], "one by one as all at once");
}

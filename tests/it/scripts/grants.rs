//! Grants by a release: which waiter is granted the lock, for how long, and which message it gets.

use leasehold_testbed::Reply;
use redis::Connection;

use super::{
    ACQUIRE, ALL_KEYS, FENCE, NO_COUNTER, ONE, READS_IT_NO_MORE, READS_THE_COUNTER, RELEASE, Said,
    TTL, acquire_as, acquire_for, channel, connect, counter_of, ends, entries, entry, eval,
    granted, has_selectors, holder, kinds, lease, listen, queue_name, queue_of, queue_up, received,
    release, release_as, say, text_of, ttl_of, value,
};
use crate::support::{ask, server};

/// The state of a key right after a release, read in the same transaction.
#[derive(Debug)]
pub(super) struct Turn {
    /// The value at that time; `None` if the key was free.
    pub value: Option<String>,
    /// The key's ttl in ms.
    pub left: i64,
}

/// Caller `n` releases the key that it holds.
#[track_caller]
pub(super) fn pass(connection: &mut Connection, key: &str, n: usize) -> Turn {
    let mut together = redis::pipe();
    together.atomic();
    together.add_command(eval(&RELEASE, &[FENCE, key], &[&lease(n)]));
    together.cmd("GET").arg(key).cmd("PTTL").arg(key);
    let (said, value, left): (i64, _, _) = together.query(connection).unwrap();
    assert_eq!(said, 1, "it was released");
    Turn { value, left }
}

/// Returns the µs of the token under which a release granted the lock to `n`, with more waiters behind `n` or
/// without.
#[track_caller]
fn granted_to(n: usize, turn: &Turn, has_more: bool) -> u64 {
    let value = turn.value.as_ref().expect("it was granted");
    let micros = value.split(' ').nth(2).unwrap();
    let mark = if has_more { " +" } else { "" };
    let wanted = format!("lh1 {} {micros} {}{mark}", lease(n), holder(n));
    assert_eq!(*value, wanted);
    micros.parse().unwrap()
}

/// The state of a key whose grant is not confirmed, without the mark of such a grant, and without the time for which the
/// key outlives it.
#[track_caller]
fn without_doubt(mut turn: Turn) -> Turn {
    let value = turn.value.expect("it was granted");
    assert!(value.contains(" ?"), "{value}");
    turn.value = Some(value.replacen(" ?", "", 1));
    turn.left -= 3_000;
    turn
}

#[test]
fn release_grants_and_notifies_the_first_waiter() {
    let server = server();
    let (mut redis, mut clients) = (connect(&server), connect(&server));
    let mut subscriber = listen(&mut clients, &[0, 1, 2, 3].map(holder));
    for key in ["k", "a b: ü"] {
        let ttls = ["90000", "50000", "900000"];
        queue_up(&mut redis, key, &ttls);
        let mut last = ask(&server, &["ZSCORE", FENCE, "t"]).as_int().unwrap() as u64;
        for (n, ttl) in [(1, 60_001..=90_000), (2, 1..=50_000), (3, 90_001..=900_000)] {
            let turn = pass(&mut redis, key, n - 1);
            let micros = granted_to(n, &turn, n < 3);
            assert_eq!(queue_of(&server, key), entries(n + 1, &ttls[n..]));
            assert!(micros > last, "{micros} after {last}");
            last = micros;
            assert!(ttl.contains(&turn.left), "{turn:?}");
            assert_eq!(
                ask(&server, &["ZSCORE", FENCE, "t"]).to_string(),
                last.to_string()
            );
            let message = format!("{} {micros} {key}", lease(n));
            let channel = channel(&holder(n));
            assert_eq!(received(&server, &mut subscriber), [(channel, message)]);
        }
        let counter = counter_of(&server);
        assert_eq!(pass(&mut redis, key, 3).value, None);
        assert_eq!(received(&server, &mut subscriber), [], "no waiter is left");
        assert_eq!(counter_of(&server), counter, "no token was made");
    }
}

#[test]
fn waiters_of_dead_clients_are_skipped() {
    let server = server();
    let (mut redis, mut clients) = (connect(&server), connect(&server));
    // Each letter is a waiter: its client has gone (`g`), listens (`l`), or polls and does not listen (`p`).
    for (letters, next) in [
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
        let numbered = || (1..).zip(letters.chars());
        let listening = numbered().filter(|(_, letter)| *letter == 'l');
        let listening: Vec<String> = listening.map(|(n, _)| holder(n)).collect();
        let mut subscriber = listen(&mut clients, &listening);
        let ttls = numbered().map(|(_, letter)| if letter == 'p' { "0" } else { TTL });
        let ttls: Vec<&str> = ttls.collect();
        queue_up(&mut redis, "k", &ttls);
        let turn = pass(&mut redis, "k", 0);
        let messages = received(&server, &mut subscriber);
        let notified = next.filter(|next| ttls[next - 1] != "0");
        assert_eq!(messages.len(), usize::from(notified.is_some()), "{letters}");
        if let Some(next) = next {
            granted_to(next, &turn, next < ttls.len());
            assert_eq!(queue_of(&server, "k"), entries(next + 1, &ttls[next..]));
            let left = if ttls[next - 1] == "0" {
                1..=100
            } else {
                101..=60_000
            };
            assert!(left.contains(&turn.left), "{letters}: {turn:?}");
        } else {
            assert_eq!(turn.value, None, "{letters}: no waiter is left");
            assert_eq!(queue_of(&server, "k"), [""; 0]);
        }
        ask(&server, &["FLUSHALL"]);
    }
}

/// Caller 0 releases, and in the same moment caller 1 requests the key. Returns the key before the request,
/// the µs in the reply to caller 1, and the key afterwards.
#[track_caller]
fn pass_and_come(connection: &mut Connection, mode: &str) -> (Turn, String, Turn) {
    let mut together = redis::pipe();
    together.atomic();
    together.add_command(eval(&RELEASE, &[FENCE, "k"], &[&lease(0)]));
    together.cmd("GET").arg("k").cmd("PTTL").arg("k");
    let args = [&*holder(1), &lease(1), TTL, mode];
    together.add_command(eval(&ACQUIRE, &[FENCE, "k"], &args));
    together.cmd("GET").arg("k").cmd("PTTL").arg("k");
    let (said, value, left, micros, then, left_then): (i64, _, _, _, _, _) =
        together.query(connection).unwrap();
    assert_eq!(said, 1, "it was released");
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
fn a_granted_waiter_confirms_its_full_ttl() {
    let server = server();
    let (mut redis, mut clients) = (connect(&server), connect(&server));
    let mut subscriber = listen(&mut clients, &[holder(1)]);
    for (ttl, granted_for, count) in [("0", 1..=100, 0), ("5000", 101..=5000, 1)] {
        for mode in ["", "-", "0", "+", "+1795263780943818"] {
            queue_up(&mut redis, "k", &[ttl, TTL]);
            let (before, micros, after) = pass_and_come(&mut redis, mode);
            let token = granted_to(1, &before, true);
            assert!(granted_for.contains(&before.left), "{before:?}");
            let messages = received(&server, &mut subscriber);
            assert_eq!(messages.len(), count, "a polling client gets no message");
            assert_eq!(micros, token.to_string());
            assert_eq!(after.value, before.value);
            assert!((5001..=60_000).contains(&after.left), "{after:?}");
            assert_eq!(queue_of(&server, "k"), [entry(2, TTL)], "{mode:?}");
            ask(&server, &["FLUSHALL"]);
        }
    }
}

#[test]
fn a_waiter_without_notifications_polls() {
    let server = server();
    let mut clients = connect(&server);
    let mut subscriber = listen(&mut clients, &[1, 2].map(holder));
    for (user, forbidden) in [("mute", "-publish"), ("deaf", "resetchannels")] {
        let acl = ["ACL", "SETUSER", user, "on", ">secret", "~*", "&*", "+@all"];
        ask(&server, &[&acl[..], &[forbidden]].concat());
        let mut redis = connect(&server);
        let mut login = redis::cmd("AUTH");
        login.arg(user).arg("secret").exec(&mut redis).unwrap();
        queue_up(&mut redis, "k", &[TTL, TTL]);
        let (before, micros, after) = pass_and_come(&mut redis, "-");
        let token = granted_to(1, &before, true);
        assert!((1..=100).contains(&before.left), "{user}: {before:?}");
        assert_eq!(micros, token.to_string());
        assert!((50_000..=60_000).contains(&after.left), "{after:?}");
        assert_eq!(received(&server, &mut subscriber), [], "{user}");
        ask(&server, &["FLUSHALL"]);
    }
}

#[test]
fn an_unservable_queue_frees_the_key() {
    let server = server();
    let (mut redis, mut clients) = (connect(&server), connect(&server));
    let mut subscriber = listen(&mut clients, &[1, 2].map(holder));
    let ttls = [TTL, "0"];
    // In the case without the right to pop, the script has already written the fence counter.
    let mut spoils = vec![
        ("CONFIG SET maxmemory 1", "CONFIG SET maxmemory 0", false),
        (
            "ACL SETUSER default -zadd",
            "ACL SETUSER default +zadd",
            false,
        ),
        (
            "ACL SETUSER default -zpopmin",
            "ACL SETUSER default +zpopmin",
            true,
        ),
    ];
    if has_selectors(&server) {
        spoils.push((READS_THE_COUNTER, READS_IT_NO_MORE, false));
    } else {
        let value = queue_up(&mut redis, "k", &ttls);
        say(&server, NO_COUNTER);
        let said = release_as(&mut redis, "k", 0);
        assert!(said.text().starts_with("NOPERM"), "{said:?}");
        say(&server, ALL_KEYS);
        assert_eq!(text_of(&server, "k"), Some(value));
    }
    for (spoil, mend, counts) in spoils {
        ask(&server, &["FLUSHALL"]);
        queue_up(&mut redis, "k", &ttls);
        queue_up(&mut redis, "k2", &ttls);
        let counter = ask(&server, &["ZSCORE", FENCE, "t"]);
        say(&server, spoil);
        for key in ["k", "k2"] {
            assert_eq!(release_as(&mut redis, key, 0), Said::Number(1), "{spoil:?}");
        }
        assert_eq!(ask(&server, &["EXISTS", "k", "k2"]), Reply::Int(0));
        let is_same = ask(&server, &["ZSCORE", FENCE, "t"]) == counter;
        assert_ne!(is_same, counts, "{spoil:?}");
        assert_eq!(received(&server, &mut subscriber), [], "{spoil:?}");
        say(&server, mend);
        // The waiters are granted the lock once that is possible.
        let said = acquire_as(&mut redis, "k", 1, "-");
        assert_eq!(kinds(&[said]), ["granted"], "{spoil:?}");
    }
}

/// Puts these entries into the queue of the key, one after the other.
fn enqueue(server: &leasehold_testbed::Server, key: &str, entries: &[String]) {
    for (score, entry) in entries.iter().enumerate() {
        let score = score.to_string();
        ask(server, &["ZADD", &queue_name(key), &score, entry]);
    }
}

#[test]
fn unreadable_entries_of_a_queue_are_skipped() {
    let server = server();
    let (mut redis, mut clients) = (connect(&server), connect(&server));
    let mut subscriber = listen(&mut clients, &[1, 2].map(holder));
    let id = lease(1);
    let unreadable = [
        String::new(),
        " ".to_owned(),
        id.clone(),
        format!("{id},{TTL}"),
        format!("{id},{TTL},"),
        format!("{id},,{}", holder(1)),
        format!("{id},-1,{}", holder(1)),
        format!("{id},1e3,{}", holder(1)),
        format!("{id},{TTL},a {}", holder(1)),
        format!(" {}", entry(1, TTL)),
        format!("0{}", entry(1, TTL)),
        format!("not-an-id,{TTL},{}", holder(1)),
        format!("{},{TTL},{}", &id[1..], holder(1)),
        format!("{},{TTL},{}", "x".repeat(32), holder(1)),
    ];
    let marked = value(&lease(0)) + " +";
    for junk in unreadable
        .iter()
        .map(std::slice::from_ref)
        .chain([&unreadable[..]])
    {
        for behind in [None, Some(entry(2, TTL))] {
            ask(&server, &["SET", "k", &marked, "PX", TTL]);
            let behind: Vec<String> = behind.into_iter().collect();
            enqueue(&server, "k", &[junk, &behind].concat());
            let turn = pass(&mut redis, "k", 0);
            assert_eq!(
                received(&server, &mut subscriber).len(),
                behind.len(),
                "{junk:?}"
            );
            if behind.is_empty() {
                assert_eq!(turn.value, None, "{junk:?}");
            } else {
                granted_to(2, &without_doubt(turn), false);
            }
            assert_eq!(queue_of(&server, "k"), [""; 0], "{junk:?}");
            ask(&server, &["FLUSHALL"]);
        }
    }
}

/// A paused process (SIGSTOP) stays subscribed, so a delivered message does not prove that the waiter runs. A waiter
/// that was queued for long has to confirm its grant to get the whole ttl.
#[test]
fn long_queued_waiters_confirm_their_grants() {
    let server = server();
    let (mut redis, mut clients) = (connect(&server), connect(&server));
    let mut subscriber = listen(&mut clients, &[holder(1)]);
    let second = 1_000_000;
    let since_1970 = 1_700_000_000 * second;
    // The ttl, the µs since the waiter joined, and the longest time for which it has the key before it
    // confirms.
    for (ttl, waited, unconfirmed) in [
        (60_000, 2 * second, Some(2_000)),
        (60_000, -second, None),
        (4_000, 2 * second, Some(1_000)),
        (900, second / 2, Some(500)),
        (900, -second, None),
        (501, 2 * second, Some(500)),
        (300, 2 * second, Some(300)),
        (300, second / 10, None),
        // The waiter was late at an earlier turn.
        (60_000, since_1970, Some(3_000)),
        (900, since_1970, Some(900)),
    ] {
        let case = format!("ttl {ttl} after {waited} µs");
        let asked = ttl.to_string();
        granted(&acquire_as(&mut redis, "k", 0, "+"));
        let (now, micros): (i64, i64) = redis::cmd("TIME").query(&mut redis).unwrap();
        let mode = format!("+{}", now * second + micros - waited);
        acquire_for(&asked, &mut redis, "k", 1, &mode);
        let turn = pass(&mut redis, "k", 0);
        let turn = match unconfirmed {
            Some(_) => without_doubt(turn),
            None => turn,
        };
        let micros = granted_to(1, &turn, false);
        assert!(turn.left <= unconfirmed.unwrap_or(ttl), "{case}: {turn:?}");
        assert!(
            turn.left > unconfirmed.unwrap_or(ttl) / 2,
            "{case}: {turn:?}"
        );
        let mark = if unconfirmed.is_some() { "?" } else { "" };
        let [(_, message)] = &received(&server, &mut subscriber)[..] else {
            panic!("{case}: one message");
        };
        assert_eq!(*message, format!("{} {mark}{micros} k", lease(1)), "{case}");
        // A confirmed grant has its whole ttl.
        let said = acquire_for(&asked, &mut redis, "k", 1, "-");
        assert_eq!(granted(&said), micros, "{case}");
        assert!(ttl_of(&server, "k") > ttl / 2, "{case}");
        ask(&server, &["FLUSHALL"]);
    }
}

/// Puts `waiters` entries of dead clients before all others.
fn enqueue_gone(server: &leasehold_testbed::Server, key: &str, waiters: usize) {
    let fill = "for n = 1, ARGV[1] do \
        redis.call('ZADD', KEYS[1], n, string.format('%032x,60000,gone/%d/0', n + 10000, n)) end";
    ask(
        server,
        &["EVAL", fill, "1", &queue_name(key), &waiters.to_string()],
    );
}

#[test]
fn all_waiters_of_dead_clients_are_skipped() {
    let server = server();
    let (mut redis, mut clients) = (connect(&server), connect(&server));
    let mut subscriber = listen(&mut clients, &[1, 2].map(holder));
    queue_up(&mut redis, "k", &[TTL]);
    enqueue_gone(&server, "k", 9_999);
    assert!(pass(&mut redis, "k", 0).value.is_some());
    assert_eq!(received(&server, &mut subscriber).len(), 1);
    assert_eq!(queue_of(&server, "k"), [""; 0]);
    ask(&server, &["FLUSHALL"]);
    enqueue_gone(&server, "k", 2500);
    assert_eq!(kinds(&[acquire_as(&mut redis, "k", 2, "+")]), ["granted"]);
    assert_eq!(queue_of(&server, "k"), [""; 0]);
}

/// The first eight waiters ask each second. A waiter that moves up into them does not know it.
#[test]
fn waiters_near_the_front_are_notified() {
    let server = server();
    let (mut redis, mut clients) = (connect(&server), connect(&server));
    let holders: Vec<String> = (1..=20).map(holder).collect();
    let mut subscriber = listen(&mut clients, &holders);
    let mut near = || {
        let received = received(&server, &mut subscriber).into_iter();
        let texts = received.filter(|(_, text)| text.contains(" ~ "));
        texts.collect::<Vec<_>>()
    };
    let near_message = |n: usize| {
        let channel = channel(&holder(n));
        (channel, format!("{} ~ k", &lease(n)[..16]))
    };
    queue_up(&mut redis, "k", &[TTL; 12]);
    assert_eq!(near(), [], "waiters that join learn their positions");
    pass(&mut redis, "k", 0);
    assert_eq!(near(), [near_message(9)]);
    // Another waiter leaves.
    let left = release(&mut redis, &["k"], &[&entry(3, TTL)]);
    assert_eq!(ends(&left), ["done"]);
    assert_eq!(near(), [near_message(10)]);
    // Three waiters at once, two of them dead.
    enqueue_gone(&server, "k", 2);
    pass(&mut redis, "k", 1);
    assert_eq!(near(), [9, 10, 11].map(near_message));
    for n in [2, 4, 5] {
        pass(&mut redis, "k", n);
    }
    assert_eq!(near(), [near_message(12)], "no waiter is behind");
}

#[test]
fn keys_of_one_release_are_independent() {
    let server = server();
    let (mut redis, mut clients) = (connect(&server), connect(&server));
    let mut subscriber = listen(&mut clients, &[1, 2].map(holder));
    let keys = [
        "queued", "plain", "foreign", "list", "none", "left", "queued2",
    ];
    let foreign = "not ours ".repeat(9) + &entry(0, TTL);
    let mut ids = [0; 7].map(lease);
    ids[5] = entry(4, TTL);
    let mut outcomes = Vec::new();
    for together in [true, false] {
        ask(&server, &["FLUSHALL"]);
        queue_up(&mut redis, "queued", &[TTL]);
        queue_up(&mut redis, "plain", &[]);
        ask(&server, &["SET", "foreign", &foreign]);
        ask(&server, &["RPUSH", "list", "theirs"]);
        let left = value(ONE);
        ask(&server, &["SET", "left", &left, "PX", TTL]);
        enqueue(&server, "left", &[entry(4, "0")]);
        queue_up(&mut redis, "queued2", &[TTL, "0"]);
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
        let first = granted_to(1, &turn("queued"), false);
        let second = granted_to(1, &turn("queued2"), true);
        assert!(first < second, "{first}, then {second}");
        let messages = received(&server, &mut subscriber);
        let texts: Vec<&str> = messages.iter().map(|(_, text)| text.as_str()).collect();
        let wanted = [(first, "queued"), (second, "queued2")]
            .map(|(micros, key)| format!("{} {micros} {key}", lease(1)));
        assert_eq!(texts, wanted);
        assert_eq!(text_of(&server, "foreign"), Some(foreign.clone()));
        assert_eq!(ask(&server, &["LLEN", "list"]), Reply::Int(1));
        assert_eq!(turn("left").value, Some(left));
        assert_eq!(queue_of(&server, "left"), [""; 0]);
        assert!((1..=60_000).contains(&turn("left").left));
        assert_eq!(ask(&server, &["EXISTS", "plain", "none"]), Reply::Int(0));
    }
    assert_eq!(outcomes[0], outcomes[1], "one by one as all at once");
}

#[test]
fn a_counter_ahead_of_the_clock_costs_no_confirmation() {
    let server = server();
    let (mut redis, mut clients) = (connect(&server), connect(&server));
    let mut subscriber = listen(&mut clients, &[1].map(holder));
    queue_up(&mut redis, "k", &[TTL]);
    let last: u64 = counter_of(&server).unwrap().parse().unwrap();
    let ahead = (last + 3_600_000_000).to_string();
    ask(&server, &["ZADD", FENCE, &ahead, "t"]);
    release_as(&mut redis, "k", 0);
    let messages = received(&server, &mut subscriber);
    let micros = last + 3_600_000_001;
    assert_eq!(
        messages,
        [(channel(&holder(1)), format!("{} {micros} k", lease(1)))]
    );
    assert!(ttl_of(&server, "k") > 50_000);
}

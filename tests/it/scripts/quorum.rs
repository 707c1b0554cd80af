//! The scripts of a quorum's node, called directly: proposals, holds, and the quarantine.

use leasehold_testbed::{Reply, Server, eventually};

use super::{
    DATA, FENCE, HOLD, INSPECT, MICROS, ONE, PROPOSE, READS_IT_NO_MORE, READS_THE_COUNTER, RELEASE,
    TTL, TWO, counter_of, has_selectors, release, say, text_of, ttl_of, value,
};
use crate::support::{SOON, ask, changes, micros_now, server};

const MARK: &str = "p:~data";
/// A time in µs that is ahead of the clock of Redis.
const AHEAD: &str = "5000000000000000";
/// A little before that. A node whose fence counter stands here accepts tokens that are ahead.
const ALMOST: &str = "4999999999999999";
/// A time in µs that is behind the clock of Redis.
const BEHIND: &str = "1500000000000000";
const QUARANTINE: &str = "60000";
/// A time in µs that no clock shows.
const NEVER: &str = "9007199254000000";

/// The result for each lock key.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Vote {
    Stored(String),
    Contended(i64),
    Taken(String),
    Missing,
    /// The node's clock in µs.
    TooLate(u64),
    Refused(String),
}

fn vote(reply: &Reply) -> Vote {
    match reply {
        Reply::Int(left) => Vote::Contended(*left),
        Reply::Error(error) => {
            let error = error.trim_start_matches('-');
            let late = error.strip_prefix("LATE ").map(|micros| micros.parse());
            late.map_or_else(
                || Vote::Refused(error.to_owned()),
                |micros| Vote::TooLate(micros.unwrap()),
            )
        }
        Reply::Array(stored) => match stored.first() {
            Some(stored) => Vote::Taken(stored.as_text().unwrap().to_owned()),
            None => Vote::Missing,
        },
        text => Vote::Stored(text.as_text().unwrap().to_owned()),
    }
}

/// Calls a script for these locks: key, lease id, µs.
fn call(server: &Server, script: &str, locks: &[[&str; 3]]) -> Vec<Vote> {
    call_with(server, script, [QUARANTINE, TTL, NEVER], locks)
}

/// As [`call`], with the length of a quarantine, the ttl, and the time of the last argument.
fn call_with(
    server: &Server,
    script: &str,
    [quarantine, ttl, until]: [&str; 3],
    locks: &[[&str; 3]],
) -> Vec<Vote> {
    let count = (locks.len() + 2).to_string();
    let mut words = vec!["EVAL", script, &count, FENCE, MARK];
    words.extend(locks.iter().map(|[key, _, _]| *key));
    words.extend(["host/1/0", quarantine]);
    for [_, lease, micros] in locks {
        words.extend([*lease, ttl, *micros, until]);
    }
    match server.command(&words).unwrap() {
        Reply::Array(replies) if locks.len() > 1 => replies.iter().map(vote).collect(),
        one => vec![vote(&one); locks.len()],
    }
}

/// A node that has had its data for long, so it is in no quarantine.
fn node() -> Server {
    let server = server();
    ask(&server, &["SET", MARK, &mark(&server, BEHIND)]);
    server
}

/// As [`node`], with a fence counter at [`ALMOST`].
fn node_ahead() -> Server {
    let node = node();
    ask(&node, &["ZADD", FENCE, ALMOST, "t"]);
    node
}

fn mark(server: &Server, since: &str) -> String {
    format!("{} {since}", run_id(server))
}

fn run_id(server: &Server) -> String {
    let info = ask(server, &["INFO", "server"]);
    let mut lines = info.as_text().unwrap().lines();
    let id = lines.find_map(|line| line.strip_prefix("run_id:"));
    id.unwrap().trim().to_owned()
}

fn stored(micros: &str) -> Vote {
    Vote::Stored(micros.to_owned())
}

fn next(micros: &str) -> String {
    (micros.parse::<u64>().unwrap() + 1).to_string()
}

#[test]
fn a_proposal_ahead_of_time_and_counter_is_the_token() {
    let node = node_ahead();
    let lock = [["k", ONE, AHEAD]];
    assert_eq!(call(&node, &PROPOSE, &lock), [stored(AHEAD)]);
    let wanted = value(ONE).replace(MICROS, AHEAD);
    assert_eq!(text_of(&node, "k"), Some(wanted));
    assert_eq!(counter_of(&node).as_deref(), Some(AHEAD));
    assert!((50_000..=60_000).contains(&ttl_of(&node, "k")));
    // The same lease gets the same reply, and another lease learns when the key expires.
    ask(&node, &["PEXPIRE", "k", "30000"]);
    assert_eq!(
        call(&node, &PROPOSE, &[["k", ONE, &next(AHEAD)]]),
        [stored(AHEAD)]
    );
    let [Vote::Contended(left)] = call(&node, &PROPOSE, &[["k", TWO, AHEAD]])[..] else {
        panic!("another lease has the key");
    };
    assert!((20_000..=30_000).contains(&left), "{left}");
    assert_eq!(counter_of(&node).as_deref(), Some(AHEAD));
}

#[test]
fn a_token_exceeds_time_and_counter() {
    let node = node();
    let before = micros_now(&node);
    let [Vote::Stored(token)] = &call(&node, &PROPOSE, &[["a", ONE, BEHIND]])[..] else {
        panic!("the key is free");
    };
    assert!((before..=micros_now(&node)).contains(&token.parse().unwrap()));
    ask(&node, &["ZADD", FENCE, AHEAD, "t"]);
    let locks = [["b", ONE, AHEAD], ["c", ONE, BEHIND], ["d", ONE, AHEAD]];
    let [one, two] = [next(AHEAD), next(&next(AHEAD))];
    let wanted = [stored(&one), stored(&two), stored(&next(&two))];
    assert_eq!(call(&node, &PROPOSE, &locks), wanted);
}

#[test]
fn a_hold_sets_key_and_counter_but_takes_no_key() {
    let node = node_ahead();
    assert_eq!(call(&node, &HOLD, &[["k", ONE, AHEAD]]), [stored(AHEAD)]);
    let held = value(ONE).replace(MICROS, AHEAD);
    assert_eq!(text_of(&node, "k").as_deref(), Some(&*held));
    assert_eq!(counter_of(&node).as_deref(), Some(AHEAD));
    // Two keys, of which another lease has one.
    let locks = [["k", TWO, &next(AHEAD)], ["other", TWO, BEHIND]];
    assert_eq!(
        call(&node, &HOLD, &locks),
        [Vote::Taken(held.clone()), stored(BEHIND)]
    );
    assert_eq!(text_of(&node, "k"), Some(held));
    // A refused hold and a lower token leave the counter as it is.
    assert_eq!(counter_of(&node).as_deref(), Some(AHEAD));
}

#[test]
fn a_renewal_leaves_a_missing_key_missing() {
    let node = node_ahead();
    let hold = |key: &str| {
        let lock = [[key, ONE, AHEAD]];
        let vote = match call_with(&node, &HOLD, [QUARANTINE, TTL, ""], &lock).remove(0) {
            Vote::Contended(0) => Vote::Missing,
            other => other,
        };
        (vote, text_of(&node, key).is_some())
    };
    assert_eq!(hold("k"), (Vote::Missing, false));
    assert_eq!(counter_of(&node).as_deref(), Some(ALMOST));
    ask(&node, &["SET", "k", &value(ONE), "PX", "1000"]);
    assert_eq!(hold("k"), (stored(AHEAD), true));
    assert!(ttl_of(&node, "k") > 50_000);
    ask(&node, &["SET", "k", &value(TWO), "PX", TTL]);
    assert_eq!(hold("k"), (Vote::Taken(value(TWO)), true));
}

#[test]
fn a_hold_never_shortens_a_ttl() {
    let node = node_ahead();
    let hold = |ttl| call_with(&node, &HOLD, [QUARANTINE, ttl, NEVER], &[["k", ONE, AHEAD]]);
    hold("30000");
    hold("1");
    assert!(ttl_of(&node, "k") > 20_000);
    hold("50000");
    assert!(ttl_of(&node, "k") > 40_000);
    ask(&node, &["PERSIST", "k"]);
    hold("50000");
    assert!(ttl_of(&node, "k") > 40_000);
}

/// Another node, whose clock is far ahead, must not spoil the counter of this one.
#[test]
fn a_token_far_ahead_of_clock_and_counter_is_refused() {
    let refused = || Vote::Refused("AHEAD of the clock".to_owned());
    let quarantine = 60_000_000;
    for script in [&**PROPOSE, &HOLD] {
        let node = node();
        ask(&node, &["SET", "own", &value(ONE), "PX", "1000"]);
        let ahead_by = |secs: u64| (micros_now(&node) + secs * 1_000_000).to_string();
        let (late, soon) = (ahead_by(90), ahead_by(50));
        assert_eq!(call(&node, script, &[["k", ONE, &late]]), [refused()]);
        assert_eq!(text_of(&node, "k"), None);
        assert_eq!(counter_of(&node), None);
        if script == *HOLD {
            assert_eq!(call(&node, script, &[["own", ONE, &late]]), [refused()]);
            assert_eq!(text_of(&node, "own"), Some(value(ONE)));
            assert!(ttl_of(&node, "own") <= 1_000);
        }
        assert_eq!(call(&node, script, &[["k", ONE, &soon]]), [stored(&soon)]);
        // The clock was set back, and the counter stays.
        ask(&node, &["ZADD", FENCE, AHEAD, "t"]);
        let limit: u64 = AHEAD.parse::<u64>().unwrap() + quarantine;
        let [limit, beyond] = [limit, limit + 1].map(|micros| micros.to_string());
        assert_eq!(call(&node, script, &[["a", ONE, &beyond]]), [refused()]);
        assert_eq!(call(&node, script, &[["a", ONE, &limit]]), [stored(&limit)]);
    }
    // A node whose clock was set back grants further tokens of its own.
    let node = node_ahead();
    assert_eq!(
        call(&node, &PROPOSE, &[["k", ONE, BEHIND]]),
        [stored(AHEAD)]
    );
}

/// A node that was stopped finds old requests in its buffers when it continues.
#[test]
fn a_request_that_was_given_up_takes_no_free_key() {
    let node = node_ahead();
    ask(&node, &["SET", "own", &value(ONE), "PX", "1000"]);
    ask(&node, &["SET", "theirs", &value(TWO), "PX", TTL]);
    let locks = [
        ["k", ONE, AHEAD],
        ["own", ONE, AHEAD],
        ["theirs", ONE, AHEAD],
    ];
    let before = micros_now(&node);
    let votes = |script, until: &str| {
        let votes = call_with(&node, script, [QUARANTINE, TTL, until], &locks);
        let is_late = |vote: &Vote| match vote {
            Vote::TooLate(micros) => (before..=micros_now(&node)).contains(micros),
            _ => false,
        };
        let are_late: Vec<bool> = votes.iter().map(is_late).collect();
        (votes, are_late)
    };
    let (_, are_late) = votes(&**PROPOSE, &before.to_string());
    assert_eq!(are_late, [true; 3]);
    assert_eq!(text_of(&node, "k"), None);
    assert_eq!(counter_of(&node).as_deref(), Some(ALMOST));
    // A late renewal of a key that its lease still holds counts.
    let (votes_of_holds, are_late) = votes(&**HOLD, &before.to_string());
    assert_eq!(are_late, [true, false, false]);
    let taken = Vote::Taken(value(TWO));
    assert_eq!(votes_of_holds[1..], [stored(AHEAD), taken.clone()]);
    assert_eq!(text_of(&node, "k"), None);
    // A second later, the client still waits.
    let (votes, _) = votes(&**HOLD, &(micros_now(&node) + 1_000_000).to_string());
    assert_eq!(votes, [stored(AHEAD), stored(AHEAD), taken]);
}

#[test]
fn a_hold_that_only_asks_gives_no_ttl() {
    let node = node_ahead();
    ask(&node, &["SET", "k", &value(ONE)]);
    let hold = |micros| {
        call_with(
            &node,
            &HOLD,
            [QUARANTINE, "1", NEVER],
            &[["k", ONE, micros]],
        )
    };
    for micros in [AHEAD, MICROS] {
        assert_eq!(hold(micros), [stored(micros)]);
        assert_eq!(ttl_of(&node, "k"), -1);
    }
    assert_eq!(text_of(&node, "k"), Some(value(ONE)));
    ask(&node, &["REPLICAOF", "127.0.0.1", "1"]);
    let said = hold(MICROS);
    assert!(
        matches!(&said[..], [Vote::Refused(error)] if error.starts_with("READONLY")),
        "{said:?}"
    );
}

/// A change of the key would wake the waiters of all clients. Each of their attempts can make the holder ask again.
#[test]
fn a_hold_that_only_asks_changes_nothing() {
    let node = node_ahead();
    ask(&node, &["SET", "k", &value(ONE), "PX", "60000"]);
    for (ttl, does_change) in [("1", false), ("90000", true)] {
        let before = changes(&node);
        let held = call_with(
            &node,
            &HOLD,
            [QUARANTINE, ttl, NEVER],
            &[["k", ONE, MICROS]],
        );
        assert_eq!(held, [stored(MICROS)]);
        assert_eq!(changes(&node) > before, does_change, "ttl {ttl}");
    }
}

/// After a write-back, all nodes of the majority have the same token in their values.
#[test]
fn a_hold_raises_the_token_of_a_value() {
    let node = node_ahead();
    ask(&node, &["SET", "k", &value(ONE), "PX", TTL]);
    assert_eq!(call(&node, &HOLD, &[["k", ONE, AHEAD]]), [stored(AHEAD)]);
    let raised = value(ONE).replace(MICROS, AHEAD);
    assert_eq!(text_of(&node, "k"), Some(raised));
    assert!(ttl_of(&node, "k") > 50_000);
    let mut redis = super::connect(&node);
    assert_eq!(super::ends(&release(&mut redis, &["k"], &[ONE])), ["done"]);
}

#[test]
fn foreign_values_stay_and_spoil_no_other_key() {
    let node = node_ahead();
    ask(&node, &["SET", "text", "theirs"]);
    ask(&node, &["LPUSH", "list", "theirs"]);
    for script in [&**PROPOSE, &HOLD] {
        let locks = [
            ["text", ONE, AHEAD],
            ["k", ONE, AHEAD],
            ["list", ONE, AHEAD],
        ];
        let found = call(&node, script, &locks);
        assert_eq!(found[1], stored(AHEAD));
        for (vote, wanted) in [(&found[0], "string"), (&found[2], "list")] {
            let Vote::Refused(text) = vote else {
                panic!("{vote:?}");
            };
            assert_eq!(super::foreign_type(text), wanted);
        }
    }
    assert_eq!(text_of(&node, "text").as_deref(), Some("theirs"));
    assert_eq!(ask(&node, &["LLEN", "list"]).as_int(), Some(1));
}

#[test]
fn nothing_is_granted_without_a_usable_counter() {
    let node = node();
    let refused = |script: &str| {
        let votes = call(&node, script, &[["k", ONE, AHEAD]]);
        assert!(matches!(votes[..], [Vote::Refused(_)]), "{votes:?}");
        assert_eq!(text_of(&node, "k"), None);
    };
    for bad in [
        "17",
        "5000000000000.5",
        "-500000000000000",
        "9007199254000001",
    ] {
        ask(&node, &["ZADD", FENCE, bad, "t"]);
        [&**PROPOSE, &HOLD].into_iter().for_each(refused);
        assert_eq!(counter_of(&node).as_deref(), Some(bad));
    }
    ask(&node, &["DEL", FENCE]);
    ask(&node, &["SADD", FENCE, "theirs"]);
    [&**PROPOSE, &HOLD].into_iter().for_each(refused);
    if has_selectors(&node) {
        ask(&node, &["DEL", FENCE]);
        ask(&node, &["ZADD", FENCE, BEHIND, "t"]);
        let rule = READS_THE_COUNTER.replace("(", "%RW~p:~data +@all (");
        say(&node, &rule.replace(" (+eval ~*)", ""));
        [&**PROPOSE, &HOLD].into_iter().for_each(|script| {
            let votes = call(&node, script, &[["k", ONE, &next(BEHIND)]]);
            assert!(matches!(votes[..], [Vote::Refused(_)]), "{votes:?}");
        });
        say(&node, READS_IT_NO_MORE);
        assert_eq!(text_of(&node, "k"), None);
    }
}

/// The ms that a node in quarantine names.
#[track_caller]
fn left(votes: &[Vote]) -> u64 {
    let [Vote::Refused(why)] = votes else {
        panic!("{votes:?}");
    };
    let left = why.strip_prefix("QUARANTINE ").expect(why);
    left.parse().unwrap()
}

fn check_data(server: &Server) -> (u64, i64) {
    let reply = ask(server, &["EVAL", &DATA, "1", MARK, QUARANTINE]);
    let Reply::Array(parts) = reply else {
        panic!("{reply:?}");
    };
    let micros = parts[0].as_text().unwrap().parse().unwrap();
    (micros, parts[1].as_int().unwrap())
}

#[test]
fn a_node_without_a_mark_is_in_quarantine() {
    let server = server();
    for script in [&**PROPOSE, &HOLD] {
        ask(&server, &["DEL", MARK]);
        let before = micros_now(&server);
        let votes = call(&server, script, &[["k", ONE, AHEAD]]);
        assert_eq!(left(&votes), 60_000);
        assert_eq!(text_of(&server, "k"), None);
        let text = text_of(&server, MARK).unwrap();
        let (run, since) = text.split_once(' ').unwrap();
        assert_eq!(run, run_id(&server));
        assert!((before..=micros_now(&server)).contains(&since.parse().unwrap()));
        // The quarantine continues, also for other clients and new connections.
        let again = left(&call(&server, script, &[["k", ONE, AHEAD]]));
        assert!((50_000..=60_000).contains(&again));
        assert_eq!(text_of(&server, MARK), Some(text.clone()));
        assert!((50_000..=60_000).contains(&check_data(&server).1));
        assert_eq!(text_of(&server, MARK), Some(text));
    }
}

#[test]
fn a_quarantine_ends_when_it_has_passed() {
    let server = server();
    ask(&server, &["ZADD", FENCE, ALMOST, "t"]);
    let propose =
        || call_with(&server, &PROPOSE, ["300", TTL, NEVER], &[["k", ONE, AHEAD]]).remove(0);
    assert!(matches!(propose(), Vote::Refused(_)));
    let since = || {
        text_of(&server, MARK).unwrap()[41..]
            .parse::<u64>()
            .unwrap()
    };
    assert!(eventually(SOON, || propose() == stored(AHEAD)));
    assert!(micros_now(&server) >= since() + 300_000);
}

/// The replies of lua/release.lua, called for a node of a quorum.
fn release_on(server: &Server, keys: &[&str], leases: &[&str]) -> Vec<Reply> {
    let count = (2 * keys.len() + 2).to_string();
    let mut words = vec!["EVAL", &RELEASE, &count, FENCE];
    words.extend(keys);
    let queues: Vec<String> = keys.iter().map(|key| format!("{key}~queue")).collect();
    words.extend(queues.iter().map(String::as_str));
    words.push(MARK);
    words.extend(leases);
    words.push(QUARANTINE);
    match server.command(&words).unwrap() {
        Reply::Array(replies) if keys.len() > 1 => replies,
        one => vec![one; keys.len()],
    }
}

/// The replies of lua/inspect.lua, called for a node of a quorum.
fn inspect_on(server: &Server, keys: &[&str]) -> Vec<Reply> {
    let count = (2 * keys.len() + 1).to_string();
    let mut words = vec!["EVAL", &INSPECT, &count];
    words.extend(keys);
    let queues: Vec<String> = keys.iter().map(|key| format!("{key}~queue")).collect();
    words.extend(queues.iter().map(String::as_str));
    words.extend([MARK, QUARANTINE]);
    match server.command(&words).unwrap() {
        Reply::Array(replies) if keys.len() > 1 => replies,
        one => vec![one; keys.len()],
    }
}

fn is_quarantine(reply: &Reply) -> bool {
    matches!(reply, Reply::Error(error) if error.contains("QUARANTINE "))
}

#[test]
fn a_release_in_quarantine_deletes_its_key_or_abstains() {
    let server = server();
    let keys = ["own", "theirs", "none", "list"];
    for kind in [ONE.to_owned(), value(ONE), format!("{ONE}!host/2/0")] {
        ask(&server, &["FLUSHALL"]);
        ask(&server, &["SET", "own", &value(ONE), "PX", TTL]);
        ask(&server, &["SET", "theirs", &value(TWO), "PX", TTL]);
        ask(&server, &["RPUSH", "list", "theirs"]);
        let replies = release_on(&server, &keys, &[&*kind; 4]);
        let abstains: Vec<bool> = replies.iter().map(is_quarantine).collect();
        assert_eq!(abstains, [false, true, true, false], "{kind}: {replies:?}");
        assert_eq!(replies[0].as_int(), Some(1));
        assert_eq!(text_of(&server, "own"), None);
        assert_eq!(text_of(&server, "theirs"), Some(value(TWO)));
        ask(&server, &["SET", "own", &value(ONE), "PX", TTL]);
        let alone = |key| release_on(&server, &[key], &[&*kind]).remove(0);
        assert_eq!(alone("own").as_int(), Some(1));
        assert!(is_quarantine(&alone("own")) && is_quarantine(&alone("theirs")));
        // The node votes again.
        ask(&server, &["SET", MARK, &mark(&server, BEHIND)]);
        assert_eq!(alone("own").as_int(), Some(0));
        assert_eq!(alone("theirs").as_text(), Some(&*value(TWO)));
    }
}

#[test]
fn an_inspection_in_quarantine_abstains() {
    let server = server();
    ask(&server, &["SET", "theirs", &value(TWO), "PX", TTL]);
    for keys in [&["theirs"][..], &["none"], &["theirs", "none"]] {
        let replies = inspect_on(&server, keys);
        assert!(replies.iter().all(is_quarantine), "{replies:?}");
    }
    ask(&server, &["SET", MARK, &mark(&server, BEHIND)]);
    let replies = inspect_on(&server, &["theirs", "none"]);
    assert!(replies[0].as_text().unwrap().ends_with(&value(TWO)));
    assert_eq!(replies[1].as_int(), Some(0));
}

#[test]
fn a_new_process_or_a_clock_set_back_begins_a_quarantine() {
    let node = node_ahead();
    let (micros, wait) = check_data(&node);
    assert_eq!(wait, 0, "the mark is old");
    assert!(micros <= micros_now(&node));
    let mine = mark(&node, BEHIND);
    assert_eq!(text_of(&node, MARK), Some(mine.clone()));
    // The data of an earlier process, as after a restart with an old snapshot.
    let theirs = mine.replace(&run_id(&node), &"f".repeat(40));
    ask(&node, &["SET", MARK, &theirs]);
    // Only the check at the login compares the run id, so this hold succeeds.
    assert_eq!(call(&node, &HOLD, &[["a", ONE, AHEAD]]), [stored(AHEAD)]);
    assert!(check_data(&node).1 > 50_000);
    left(&call(&node, &PROPOSE, &[["b", ONE, AHEAD]]));
    assert!(text_of(&node, MARK).unwrap().starts_with(&run_id(&node)));
    // Marks that no script has written, or from the future.
    let future = mark(&node, AHEAD);
    for bad in [
        &*future,
        "",
        "x",
        &mine[..56],
        &format!("{mine}0"),
        &"x".repeat(1 << 20),
    ] {
        let begins = |what: &str, wait: u64| {
            assert!((59_000..=60_000).contains(&wait), "{what}: {bad:.80}");
            assert!(text_of(&node, MARK).unwrap().starts_with(&run_id(&node)));
        };
        ask(&node, &["SET", MARK, bad]);
        begins("vote", left(&call(&node, &PROPOSE, &[["b", ONE, AHEAD]])));
        ask(&node, &["SET", MARK, bad]);
        begins("check", check_data(&node).1.try_into().unwrap());
    }
    // Another user's key under the name of the mark.
    ask(&node, &["DEL", MARK]);
    ask(&node, &["LPUSH", MARK, "theirs"]);
    for script in [&**PROPOSE, &HOLD] {
        let votes = call(&node, script, &[["b", ONE, AHEAD]]);
        let [Vote::Refused(why)] = &votes[..] else {
            panic!("{votes:?}");
        };
        assert!(why.contains("WRONGTYPE"), "{why}");
    }
    let refused = node.command(&["EVAL", &DATA, "1", MARK, QUARANTINE]);
    assert!(matches!(refused.unwrap(), Reply::Error(_)));
}

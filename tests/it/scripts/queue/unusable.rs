//! Queues that cannot be used: foreign values under their keys, no permission, no memory. Such a queue blocks no
//! caller, and no caller waits for a grant that cannot come.

use leasehold_testbed::{Reply, Server};
use redis::Connection;

use super::{counter_of, expire, queued, value_of};
use crate::scripts::{
    READS_IT_NO_MORE, READS_THE_COUNTER, Said, TTL, acquire, acquire_as, connect, ends, entries,
    entry, granted, has_selectors, join, kinds, leave, queue_name, queue_of, queue_up, release_as,
    say, text_of, ttl_of,
};
use crate::support::{ask, server};

/// Uses a lock with an unusable queue: no caller is queued, and each gets the lock.
fn goes_round(server: &Server, redis: &mut Connection, spoilt: &str) {
    for mode in ["", "+", "0", "+1795263780943818"] {
        let case = format!("{spoilt} as {mode:?}");
        granted(&acquire_as(redis, "k", 4, mode));
        let queue = ask(server, &["TYPE", &queue_name("k")]);
        for other in ["+", "0", "-", ""] {
            let said = acquire_as(redis, "k", 5, other);
            assert_eq!(kinds(&[said]), ["contended"], "{case}, then {other:?}");
        }
        granted(&acquire_as(redis, "k", 4, "-"));
        assert_eq!(release_as(redis, "k", 4), Said::Number(1), "{case}");
        assert_eq!(text_of(server, "k"), None, "{case}");
        assert_eq!(ask(server, &["TYPE", &queue_name("k")]), queue, "{case}");
        assert_eq!(acquire_as(redis, "k", 5, "-"), Said::Number(0), "{case}");
    }
}

#[test]
fn a_foreign_queue_value_blocks_no_lock() {
    let server = server();
    let mut redis = connect(&server);
    for junk in [
        &["SET", "k~queue", "junk"][..],
        &["RPUSH", "k~queue", "junk"],
        &["HSET", "k~queue", "junk", "junk"],
    ] {
        ask(&server, junk);
        goes_round(&server, &mut redis, junk[0]);
        assert_eq!(ask(&server, &["EXISTS", "k~queue"]), Reply::Int(1));
        assert_eq!(ttl_of(&server, "k~queue"), -1, "the value is unchanged");
        ask(&server, &["DEL", "k~queue"]);
    }
}

#[test]
fn locks_work_without_permission_for_the_queue() {
    let server = server();
    let mut redis = connect(&server);
    // The last rules forbid all commands that the scripts use only for queues, except ZREM, by which a waiter leaves
    // the queue, and ZRANGE, which the test uses as well.
    let all = "-zcard -zcount -zrank -zpopmin";
    for rules in ["-zcard", all] {
        say(&server, &format!("ACL SETUSER default {rules}"));
        goes_round(&server, &mut redis, rules);
        assert_eq!(queue_of(&server, "k"), [""; 0], "{rules}");
        say(&server, "ACL SETUSER default +@all");
    }
}

#[test]
fn callers_get_a_reply_if_the_queue_is_unusable() {
    let server = server();
    let mut redis = connect(&server);
    for command in [
        "zrank", "zpopmin", "zrem", "zrange", "zcard", "zcount", "append", "pexpire", "pttl",
        "set", "publish", "pubsub",
    ] {
        queue_up(&mut redis, "k", &[TTL, "0"]);
        say(&server, &format!("ACL SETUSER default -{command}"));
        // Each caller gets a result that a header documents.
        for (n, mode) in [(1, "-"), (2, "-"), (3, "+"), (4, "0"), (5, ""), (6, "+7")] {
            let said = acquire_as(&mut redis, "k", n, mode);
            assert_ne!(kinds(&[said]), ["granted"], "{command}: {mode:?}");
        }
        assert_eq!(release_as(&mut redis, "k", 0), Said::Number(1), "{command}");
        ask(&server, &["DEL", "k"]);
        // The queue is unchanged: a new caller gets the key, or the first waiter does.
        let said = acquire_as(&mut redis, "k", 7, "+");
        // The key of a waiter that does not confirm its grant lives for a short time only.
        let is_taken = matches!(said, Said::Queued { left: 1.., .. });
        let has_it = is_taken || text_of(&server, "k").is_some();
        // A script that cannot write a value grants nothing.
        let wanted = command != "set";
        assert_eq!(has_it, wanted, "{command}: {said:?}");
        say(&server, "ACL SETUSER default +@all");
        ask(&server, &["FLUSHALL"]);
    }
}

#[test]
fn free_keys_are_granted_past_an_unusable_queue() {
    let server = server();
    let mut redis = connect(&server);
    queue_up(&mut redis, "k", &[TTL]);
    expire(&server);
    say(&server, "ACL SETUSER default -zpopmin");
    assert_eq!(
        acquire_as(&mut redis, "k", 1, "-"),
        Said::Number(0),
        "the caller asks anew"
    );
    assert_eq!(queue_of(&server, "k"), [""; 0]);
    join(&mut redis, "k", 1, TTL);
    assert_eq!(release_as(&mut redis, "k", 1), Said::Number(1));
    say(&server, "ACL SETUSER default +zpopmin");
    queue_up(&mut redis, "k", &[TTL]);
    expire(&server);
    say(&server, "ACL SETUSER default -zpopmin");
    granted(&acquire_as(&mut redis, "k", 2, "+"));
    assert_eq!(
        queue_of(&server, "k"),
        [entry(1, TTL)],
        "caller 2 is not queued"
    );
}

#[test]
fn callers_join_no_queue_whose_ttl_cannot_be_set() {
    let server = server();
    let mut redis = connect(&server);
    for command in ["pttl", "pexpire"] {
        queue_up(&mut redis, "k", &["0", TTL]);
        // The queue has no ttl, and the script cannot set one.
        ask(&server, &["PERSIST", &queue_name("k")]);
        say(&server, &format!("ACL SETUSER default -{command}"));
        let said = acquire_as(&mut redis, "k", 3, "+");
        assert_ne!(kinds(&[said]), ["queued"], "{command}");
        assert_eq!(queue_of(&server, "k"), entries(1, &["0", TTL]), "{command}");
        // The polling waiter is granted the lock; the one that asks leaves the queue.
        ask(&server, &["DEL", "k"]);
        let said = acquire_as(&mut redis, "k", 2, "-");
        assert_ne!(kinds(&[said]), ["queued"], "{command}");
        assert_eq!(queue_of(&server, "k"), [""; 0], "{command}");
        let said = acquire_as(&mut redis, "k", 3, "+");
        assert_ne!(kinds(&[said]), ["queued"], "{command}");
        assert_eq!(queue_of(&server, "k"), [""; 0], "{command}");
        say(&server, "ACL SETUSER default +@all");
        ask(&server, &["FLUSHALL"]);
    }
}

#[test]
fn callers_join_no_queue_if_the_mark_cannot_be_set() {
    let server = server();
    let mut redis = connect(&server);
    let value = queue_up(&mut redis, "k", &[]);
    // This waiter joined earlier, and its lock was acquired past the queue.
    let waiters = [entry(1, TTL)];
    ask(&server, &["ZADD", &queue_name("k"), "7", &waiters[0]]);
    for (spoil, mend) in [
        ("ACL SETUSER default -append", "ACL SETUSER default +append"),
        ("CONFIG SET maxmemory 1", "CONFIG SET maxmemory 0"),
    ] {
        say(&server, spoil);
        for mode in ["+", "0", "+7"] {
            let said = acquire_as(&mut redis, "k", 2, mode);
            assert_eq!(kinds(&[said]), ["contended"], "{spoil}: {mode}");
        }
        // The waiter stays queued, and asks again once the lock has expired.
        assert_eq!(queued(&acquire_as(&mut redis, "k", 1, "-")).1, 0, "{spoil}");
        assert_eq!(value_of(&server), value, "{spoil}");
        assert_eq!(queue_of(&server, "k"), waiters, "{spoil}");
        say(&server, mend);
    }
}

#[test]
fn without_memory_waiters_leave_but_never_join() {
    let server = server();
    let mut redis = connect(&server);
    let value = queue_up(&mut redis, "k", &[TTL, "0"]);
    ask(&server, &["CONFIG", "SET", "maxmemory", "1"]);
    for mode in ["+", "0", "+7"] {
        let said = acquire_as(&mut redis, "k", 3, mode);
        assert_eq!(kinds(&[said]), ["contended"], "{mode}");
    }
    assert_eq!(queue_of(&server, "k"), entries(1, &[TTL, "0"]));
    assert_eq!(value_of(&server), value);
    let stay = [1, 2].map(|n| queued(&acquire_as(&mut redis, "k", n, "-")).1);
    assert_eq!(stay, [0, 1], "a waiter stays queued");
    for (n, ttl) in [(1, TTL), (2, "0")] {
        assert_eq!(leave(&mut redis, "k", n, ttl), Said::Number(1));
    }
    assert_eq!(ask(&server, &["EXISTS", &queue_name("k")]), Reply::Int(0));
    assert_eq!(release_as(&mut redis, "k", 0), Said::Number(1));
    // No caller acquires a free key either, whether others are queued for it or not.
    for waiters in [&[][..], &[TTL]] {
        ask(&server, &["CONFIG", "SET", "maxmemory", "0"]);
        queue_up(&mut redis, "k", waiters);
        ask(&server, &["DEL", "k"]);
        ask(&server, &["CONFIG", "SET", "maxmemory", "1"]);
        for mode in ["+", "0", "+7", ""] {
            let said = acquire_as(&mut redis, "k", 3, mode);
            assert!(said.text().starts_with("OOM"), "{mode:?}: {said:?}");
        }
        assert_eq!(queue_of(&server, "k"), entries(1, waiters));
        let said = acquire(&mut redis, &["k", "k2"]);
        assert_eq!(kinds(&said), ["refused", "refused"]);
    }
}

#[test]
fn an_unwritable_counter_grants_no_waiter() {
    let server = server();
    let mut redis = connect(&server);
    // Redis 6.2 cannot forbid writes of the counter alone.
    let mut rules = vec![("ACL SETUSER default -zadd", "ACL SETUSER default +zadd")];
    if has_selectors(&server) {
        rules.push((READS_THE_COUNTER, READS_IT_NO_MORE));
    }
    for (spoil, mend) in rules {
        queue_up(&mut redis, "k", &[TTL]);
        ask(&server, &["DEL", "k"]);
        let counter = counter_of(&server);
        say(&server, spoil);
        for mode in ["+", "0", "+7", ""] {
            let said = acquire_as(&mut redis, "k", 3, mode);
            assert_eq!(
                ends(std::slice::from_ref(&said)),
                ["refused"],
                "{spoil}, {mode:?}: {said:?}"
            );
            let exists = ask(&server, &["EXISTS", "k"]);
            assert_eq!(exists, Reply::Int(0), "{spoil}, {mode:?}");
            let queue = queue_of(&server, "k");
            assert_eq!(queue, [entry(1, TTL)], "{spoil}, {mode:?}");
        }
        let said = acquire_as(&mut redis, "k", 1, "-");
        assert_eq!(kinds(&[said]), ["contended"], "{spoil}");
        say(&server, mend);
        assert_eq!(counter_of(&server), counter, "{spoil}");
        ask(&server, &["FLUSHALL"]);
    }
}

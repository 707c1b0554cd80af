//! lua/release.lua when a client takes a lock away. The script notifies the holder first, and then grants the key to
//! the first waiter as any release does. With `?` in place of `!`, the script does not take a new grant away while its
//! holder does not listen yet.

use redis::Connection;

use super::{
    FENCE, MICROS, ONE, Said, TTL, TWO, acquire_as, channel, connect, ends, entries, holder, kinds,
    lease, listen, queue_of, queue_up, received, release, release_as, text_of, ttl_of, value,
};
use crate::support::{ask, server};

const BY: &str = "!host/8/0";

/// The message of [`BY`] which says that the lease was released by force.
fn by_force(lease: &str) -> String {
    format!("{lease}{BY}")
}

fn force(connection: &mut Connection, key: &str, n: usize) -> Said {
    release(connection, &[key], &[&by_force(&lease(n))]).remove(0)
}

#[test]
fn the_owner_is_notified_before_the_lock_changes() {
    let server = server();
    let (mut redis, mut clients) = (connect(&server), connect(&server));
    ask(&server, &["CONFIG", "SET", "notify-keyspace-events", "KA"]);
    let mut subscriber = listen(&mut clients, &[0, 1].map(holder));
    for (ttls, change) in [(&[][..], "del"), (&[TTL], "set")] {
        for key in ["k", "a b: ü"] {
            queue_up(&mut redis, key, ttls);
            let changes = format!("__keyspace@0__:{key}");
            subscriber.subscribe(&changes).unwrap();
            assert_eq!(ends(&[force(&mut redis, key, 0)]), ["done"]);
            let messages = received(&server, &mut subscriber);
            let first = (
                channel(&holder(0)),
                format!("{} {BY} {key}", &lease(0)[..16]),
            );
            assert_eq!(messages[0], first);
            assert_eq!(messages[1], (changes.clone(), change.to_owned()));
            subscriber.unsubscribe(&changes).unwrap();
            ask(&server, &["FLUSHALL"]);
        }
    }
}

#[test]
fn the_first_waiter_is_granted_and_the_others_stay() {
    let server = server();
    let (mut redis, mut clients) = (connect(&server), connect(&server));
    let mut subscriber = listen(&mut clients, &[1, 2, 3].map(holder));
    let before = queue_up(&mut redis, "k", &[TTL, "5000", "90000"]);
    assert_eq!(ends(&[force(&mut redis, "k", 0)]), ["done"]);
    let value = text_of(&server, "k").unwrap();
    let micros: Vec<&str> = [&before, &value]
        .map(|value| value.split(' ').nth(2).unwrap())
        .to_vec();
    assert!(micros[0] < micros[1], "{micros:?}");
    let wanted = format!("lh1 {} {} {} +", lease(1), micros[1], holder(1));
    assert_eq!(value, wanted);
    assert_eq!(queue_of(&server, "k"), entries(2, &["5000", "90000"]));
    let message = (channel(&holder(1)), format!("{} {} k", lease(1), micros[1]));
    assert_eq!(received(&server, &mut subscriber), [message]);
    assert_eq!(
        ends(&[release_as(&mut redis, "k", 0)]),
        ["taken"],
        "the lock has ended"
    );
    for n in 1..=3 {
        assert_eq!(ends(&[release_as(&mut redis, "k", n)]), ["done"]);
    }
    assert_eq!(text_of(&server, "k"), None);
}

#[test]
fn an_unreachable_owner_loses_the_lock() {
    let server = server();
    let mut redis = connect(&server);
    queue_up(&mut redis, "k", &[]);
    assert_eq!(
        ends(&[force(&mut redis, "k", 0)]),
        ["done"],
        "the lock is gone"
    );
    queue_up(&mut redis, "k", &[]);
    ask(&server, &["ACL", "SETUSER", "default", "resetchannels"]);
    assert_eq!(ends(&[force(&mut redis, "k", 0)]), ["done"]);
    assert_eq!(text_of(&server, "k"), None);
    assert_eq!(kinds(&[acquire_as(&mut redis, "k", 1, "")]), ["granted"]);
}

#[test]
fn a_new_grant_stays_until_its_holder_listens() {
    let server = server();
    let (mut redis, mut clients) = (connect(&server), connect(&server));
    let if_notified = |n: usize| format!("{}?{}", lease(n), &BY[1..]);
    let mut force = |key: &str| release(&mut redis, &[key], &[&if_notified(0)]).remove(0);
    let value = queue_up(&mut connect(&server), "k", &[TTL]);
    let left = ttl_of(&server, "k");
    assert_eq!(force("k"), Said::Number(2));
    assert_eq!(text_of(&server, "k"), Some(value));
    assert_eq!(queue_of(&server, "k"), entries(1, &[TTL]));
    assert!(ttl_of(&server, "k") <= left);
    // This lease does not hold the key, so the result is that of any release.
    let other = release(&mut connect(&server), &["k"], &[&if_notified(1)]).remove(0);
    assert_eq!(ends(&[other]), ["taken"]);
    {
        let mut subscriber = listen(&mut clients, &[holder(0)]);
        assert_eq!(ends(&[force("k")]), ["done"]);
        let message = format!("{} {BY} k", &lease(0)[..16]);
        assert_eq!(
            received(&server, &mut subscriber),
            [(channel(&holder(0)), message)]
        );
    }
    // A grant that is a second old is released although its holder does not listen. So is a grant whose value has no
    // valid time.
    for micros in [MICROS, "1x95263780943818"] {
        let value = format!("lh1 {} {micros} {}", lease(0), holder(0));
        ask(&server, &["SET", "old", &value, "PX", TTL]);
        assert_eq!(ends(&[force("old")]), ["done"], "{micros}");
        assert_eq!(text_of(&server, "old"), None);
    }
}

#[test]
fn a_failed_force_affects_no_other_key() {
    let server = server();
    let (mut redis, mut clients) = (connect(&server), connect(&server));
    let mut subscriber = listen(&mut clients, &["host/1/0".to_owned()]);
    let keys = ["own", "none", "theirs", "cut", "text", "list", "own2"];
    let leases = [ONE, ONE, ONE, ONE, ONE, ONE, TWO].map(by_force);
    let leases = leases.each_ref().map(String::as_str);
    let prepare = || {
        ask(&server, &["FLUSHALL"]);
        ask(&server, &["SET", "own", &value(ONE), "PX", TTL]);
        ask(&server, &["SET", "own2", &value(TWO), "PX", TTL]);
        ask(&server, &["SET", "theirs", &value(TWO), "PX", TTL]);
        // The value has a lease id, but no holder.
        ask(&server, &["SET", "cut", &format!("lh1 {ONE}"), "PX", TTL]);
        ask(&server, &["SET", "text", ONE]);
        ask(&server, &["RPUSH", "list", "theirs"]);
    };
    let wanted = [
        "done", "missing", "taken", "done", "taken", "refused", "done",
    ];
    prepare();
    let together = release(&mut redis, &[&[FENCE][..], &keys].concat()[1..], &leases);
    assert_eq!(ends(&together), wanted);
    assert_eq!(
        received(&server, &mut subscriber).len(),
        2,
        "of the two complete ones"
    );
    assert_eq!(text_of(&server, "theirs"), Some(value(TWO)));
    prepare();
    let each = keys.into_iter().zip(leases);
    let alone = each.flat_map(|(key, id)| release(&mut redis, &[key], &[id]));
    assert_eq!(alone.collect::<Vec<_>>(), together);
}

/// A caller of the script has read the owner of the key before. By now the key may have another owner, whom the script
/// leaves alone.
#[test]
fn only_the_named_owner_is_forced_and_notified() {
    let server = server();
    let (mut redis, mut clients) = (connect(&server), connect(&server));
    let mut subscriber = listen(&mut clients, &[0, 1, 2].map(holder));
    let before = queue_up(&mut redis, "k", &[TTL]);
    let owner = lease(0);
    let left = ttl_of(&server, "k");
    for lease in [
        by_force(&lease(2)),
        // No holder follows the id.
        format!("{owner}0"),
        format!("{owner}0{BY}"),
        format!("{owner} {BY}"),
        format!("{}{BY}", &owner[1..]),
        format!("{BY}{owner}"),
    ] {
        let said = release(&mut redis, &["k"], &[&lease]).remove(0);
        assert_eq!(said, Said::Text(before.clone()), "{lease}");
        assert_eq!(text_of(&server, "k"), Some(before.clone()), "{lease}");
    }
    assert!(ttl_of(&server, "k") <= left);
    assert_eq!(received(&server, &mut subscriber), []);
}

#[test]
fn force_works_without_memory() {
    let server = server();
    let mut redis = connect(&server);
    queue_up(&mut redis, "k", &["0"]);
    ask(&server, &["CONFIG", "SET", "maxmemory", "1"]);
    assert_eq!(ends(&[force(&mut redis, "k", 0)]), ["done"]);
    assert_eq!(text_of(&server, "k"), None, "as for any release");
}

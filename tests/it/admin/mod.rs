//! Administration: who holds a lock in Redis, which locks a client has, and how to take a lock away.

mod force_unlock;
mod held_locks;
mod manual_unlock;

use std::collections::BTreeSet;
use std::thread;

use leasehold::{Client, ErrorKind};
use leasehold_testbed::eventually;

use crate::steady::{handing_off as client, steady};
use crate::support::{
    LONG_TTL, SOON, Task, ask, changes, expires_in, in_redis, lease_of, lock, millis, secs, server,
    value_of, wait_for_queue, within,
};

/// The list is read in several pages, and leaves out keys that are not locks.
#[test]
fn locks_are_listed_part_by_part() {
    let server = server();
    let prefix = r"a*?[b]-^\:";
    let client = Client::builder(server.url())
        .prefix(prefix)
        .build()
        .unwrap();
    let guards: Vec<_> = (0..1_200)
        .map(|n| lock(&client, &format!("k{n}")))
        .collect();
    for other in ["foreign", "k?", "~odd"] {
        ask(&server, &["SET", &format!("{prefix}{other}"), "no lock"]);
    }
    ask(&server, &["SET", "abc:k1", "another prefix"]);
    let before = server.calls("scan").unwrap();
    let mut first = client.locks("");
    assert!(first.next().is_some());
    assert_eq!(
        server.calls("scan").unwrap() - before,
        1,
        "one part has a lock"
    );
    let found: BTreeSet<String> = client
        .locks("")
        .map(|found| found.unwrap().key().to_owned())
        .collect();
    let expected: BTreeSet<String> = guards.iter().map(|guard| guard.key().to_owned()).collect();
    assert_eq!(found, expected);
    assert!(server.calls("scan").unwrap() - before > 2);
}

#[test]
fn a_list_ends_with_its_error() {
    let mut server = server();
    let client = client(&server);
    let _guard = lock(&client, "k");
    server.kill();
    let mut locks = client.locks("");
    let error = locks.next().unwrap().unwrap_err();
    assert!(error.is_unavailable(), "{error}");
    assert!(locks.next().is_none());
    let quorum = leasehold::MemoryQuorum::new(3).client().unwrap();
    let error = quorum.locks("").next().unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
}

#[test]
fn inspect_shows_holder_token_and_ttl() {
    let server = server();
    let [owner, looker, waiter] = [(); 3].map(|()| client(&server));
    let mutex = looker.mutex("k");
    assert!(mutex.inspect().unwrap().is_none() && !mutex.is_locked().unwrap());
    let guard = lock(&owner, "k");
    for waiting in 0..=2 {
        let found = mutex.inspect().unwrap().expect("it is held");
        assert_eq!(found.holder(), owner.holder_id());
        assert_eq!(Some(found.lease_id()), lease_of(&server, "k"));
        let token = guard.fencing_token();
        assert!(found.fencing_token().is_none_or(|stored| stored == token));
        let left = found.expires_in().expect("it has a ttl");
        assert!(left > LONG_TTL / 2 && left <= LONG_TTL, "{left:?}");
        assert_eq!(found.clients_waiting(), waiting);
        assert!(mutex.is_locked().unwrap());
        if waiting < 2 {
            // Two threads of one client have one entry in the queue.
            for _ in 0..2 {
                let mutex = [&looker, &waiter][waiting].mutex("k");
                drop(Task::start(move || mutex.lock().map(drop)));
            }
            wait_for_queue(&server, "k", waiting + 1);
        }
    }
    guard.unlock().unwrap();
    assert!(eventually(SOON, || !mutex.is_locked().unwrap()));
}

#[test]
fn inspect_after_hand_off_shows_the_grants_token() {
    let server = server();
    let client = client(&server);
    let guard = lock(&client, "k");
    let token = guard.fencing_token();
    let mutex = client.mutex("k");
    let next = Task::start_blocked(move || mutex.lock().unwrap());
    drop(guard);
    let guard = next.within(SOON, "a hand-off");
    assert_eq!(guard.fencing_token(), token + 1);
    let found = client.mutex("k").inspect().unwrap().unwrap();
    assert!(found.fencing_token().is_none_or(|stored| stored == token));
}

#[test]
fn inspect_handles_expired_and_endless_locks() {
    let server = server();
    let client = client(&server);
    let mutex = client.mutex("k");
    let guard = mutex.clone().fixed_ttl(millis(50)).lock().unwrap();
    assert!(eventually(SOON, || mutex.inspect().unwrap().is_none()));
    drop(guard);
    let guard = lock(&client, "k");
    ask(&server, &["PERSIST", &in_redis("k")]);
    let found = mutex.inspect().unwrap().unwrap();
    assert_eq!(found.expires_in(), None);
    assert_eq!(found.holder(), client.holder_id());
    assert_eq!(expires_in(&server, "k"), None, "inspect does not set a ttl");
    guard.unlock().unwrap();
}

#[test]
fn inspect_of_a_foreign_value_names_its_type() {
    let server = server();
    let client = client(&server);
    let mutex = client.mutex("k");
    let key = in_redis("k");
    for (command, shown) in [
        (vec!["SET", &key, "theirs"], "a string"),
        (vec!["SET", &key, ""], "a string"),
        (vec!["SET", &key, "lh1 cut off"], "a string"),
        (vec!["SET", &key, "lh2 a b c"], "a string"),
        (vec!["RPUSH", &key, "theirs"], "a list"),
        (vec!["HSET", &key, "token", "1"], "a hash"),
    ] {
        ask(&server, &["DEL", &key]);
        ask(&server, &command);
        let before = ask(&server, &["DUMP", &key]).to_string();
        for error in [
            mutex.inspect().map(|_| ()).unwrap_err(),
            mutex.is_locked().map(|_| ()).unwrap_err(),
            mutex.force_unlock().map(|_| ()).unwrap_err(),
        ] {
            assert_eq!(error.kind(), ErrorKind::Protocol, "{command:?}: {error}");
            assert_eq!(error.key(), Some("k"));
            let shown = format!(", but {shown}");
            assert!(error.to_string().contains(&shown), "{command:?}: {error}");
        }
        assert_eq!(ask(&server, &["DUMP", &key]).to_string(), before);
    }
    let error = client.mutex("").inspect().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidKey, "{error}");
}

#[test]
fn inspect_changes_nothing() {
    let server = server();
    let [owner, looker] = [(); 2].map(|()| client(&server));
    let guard = lock(&owner, "k");
    // The queue entry of a client that is gone. A live waiter would ask again, and change the data.
    let waiter = format!("{:032x},60000,gone/1/0", 1);
    ask(&server, &["ZADD", &in_redis("~queue:k"), "1", &waiter]);
    let (before, value) = (changes(&server), value_of(&server, "k"));
    let left = expires_in(&server, "k").unwrap();
    thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for _ in 0..50 {
                    assert!(looker.mutex("k").is_locked().unwrap());
                }
            });
        }
    });
    assert_eq!((changes(&server), value_of(&server, "k")), (before, value));
    assert!(expires_in(&server, "k").unwrap() <= left);
    let found = looker.mutex("k").inspect().unwrap().expect("it is held");
    assert_eq!(found.clients_waiting(), 1);
    guard.unlock().unwrap();
}

#[test]
fn inspect_fails_after_shutdown_or_disconnect() {
    let server = server();
    let client = client(&server);
    let short_timeout = steady(&server.url()).command_timeout(millis(200));
    let short_timeout = short_timeout.build().unwrap();
    server.stop();
    let error = within(SOON, "the end of the wait", move || {
        short_timeout.mutex("k").inspect().unwrap_err()
    });
    assert!(error.is_unavailable(), "{error}");
    assert_eq!(error.key(), Some("k"));
    server.resume();
    client.shutdown(secs(5)).unwrap();
    for error in [
        client.mutex("k").inspect().map(|_| ()).unwrap_err(),
        client.mutex("k").force_unlock().map(|_| ()).unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::Shutdown, "{error}");
    }
}

#[test]
fn debug_output_hides_the_lease_id() {
    let server = server();
    let client = client(&server);
    let guard = lock(&client, "k");
    let found = client.mutex("k").inspect().unwrap().unwrap();
    let lease = lease_of(&server, "k").unwrap();
    let seen = format!("{found:?} {found:#?} {guard:?} {:?}", client.held_locks());
    assert!(!seen.contains(&lease[8..]), "{seen}");
    assert!(!seen.contains(&lease[..16]), "{seen}");
    assert!(seen.contains(client.holder_id().as_str()), "{seen}");
    // An error about a value that begins like a lock hides the lease id, too.
    let value = value_of(&server, "k").unwrap().replacen(' ', "  ", 2);
    ask(&server, &["SET", &in_redis("k"), &value]);
    let error = client.mutex("k").inspect().unwrap_err();
    let seen = format!("{error} {error:?}");
    assert!(!seen.contains(&lease[..16]), "{seen}");
}

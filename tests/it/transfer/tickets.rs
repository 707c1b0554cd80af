//! When a ticket is valid, and when it is refused.

use std::sync::Arc;

use leasehold::{Client, ErrorKind};
use leasehold_testbed::{Server, eventually};

use super::{adopt, client, lock, refused};
use crate::steady::steady;
use crate::support::{
    LONG_TTL, Recorder, SOON, Task, What, ask, expires_in, in_redis, is_held, secs, server,
    value_of, wait_for_queue,
};

#[test]
fn transfers_raise_tokens_and_report_a_release() {
    let server = server();
    let recorders = [(); 2].map(|()| Recorder::new());
    let [old, new] = recorders.each_ref().map(|recorder| {
        let builder = steady(&server.url()).event_handler(Arc::clone(recorder));
        builder.build().unwrap()
    });
    let guard = lock(&old, "k");
    let (token, lost) = (guard.fencing_token(), guard.lost_signal());
    let ticket = guard.into_ticket().unwrap();
    assert!(is_held(&server, "k"));
    recorders[0].wait_for(1, What::Released, "k");
    let guard = adopt(&new, &ticket);
    recorders[1].wait_for(1, What::Acquired, "k");
    assert!(guard.fencing_token() > token);
    assert_eq!(guard.key(), "k");
    assert!(
        value_of(&server, "k")
            .unwrap()
            .contains(new.holder_id().as_str())
    );
    guard.unlock().unwrap();
    assert!(!is_held(&server, "k"));
    assert!(lost.try_recv().is_err(), "transferred, not lost");
    assert_eq!(recorders[0].count(What::Lost, "k"), 0);
    assert!(lock(&old, "k").fencing_token() > token);
}

#[test]
fn repeated_transfers_keep_other_clients_out() {
    let server = server();
    let [one, two, third] = [(); 3].map(|()| client(&server));
    let mut guard = lock(&one, "k");
    let mutex = third.mutex("k");
    let tries = Task::start(move || {
        for _ in 0..400 {
            assert!(
                mutex.try_lock().unwrap().is_none(),
                "another client entered in between"
            );
        }
    });
    let mut transfer = 0;
    while !tries.is_done() || transfer < 100 {
        let other = if transfer % 2 == 0 { &two } else { &one };
        guard = adopt(other, &guard.into_ticket().unwrap());
        transfer += 1;
    }
    tries.within(SOON, "trying");
    guard.unlock().unwrap();
    assert!(third.mutex("k").try_lock().unwrap().is_some());
}

#[test]
fn one_of_many_concurrent_adopters_wins() {
    let server = server();
    let clients: Vec<Client> = (0..4).map(|_| client(&server)).collect();
    for _ in 0..25 {
        let ticket = lock(&clients[0], "k").into_ticket().unwrap();
        let tasks: Vec<_> = (0..8)
            .map(|n| {
                let (client, ticket) = (clients[n % 4].clone(), ticket.clone());
                Task::start(move || client.adopt(&ticket))
            })
            .collect();
        let outcomes = tasks.into_iter().map(|task| task.within(SOON, "adopting"));
        let (won, refused): (Vec<_>, Vec<_>) = outcomes.partition(Result::is_ok);
        assert_eq!(won.len(), 1, "{won:?}");
        for error in refused.into_iter().map(Result::unwrap_err) {
            assert_eq!(error.kind(), ErrorKind::NotHeld, "{error}");
            assert_eq!(error.key(), Some("k"));
        }
        let guard = won.into_iter().next().unwrap().unwrap();
        guard.check().unwrap();
        guard.unlock().unwrap();
    }
}

type End = fn(&Server, &Client);

/// The ways in which a lock can end before its ticket is used.
fn ends() -> [(&'static str, End); 5] {
    [
        ("deleted", |server, _| {
            ask(server, &["DEL", &in_redis("k")]);
        }),
        ("expired", |server, _| {
            ask(server, &["PEXPIRE", &in_redis("k"), "1"]);
            assert!(eventually(SOON, || !is_held(server, "k")));
        }),
        ("forced", |_, client| {
            assert!(client.mutex("k").force_unlock().unwrap().is_some());
        }),
        ("overwritten", |server, _| {
            ask(server, &["SET", &in_redis("k"), "theirs", "PX", "60000"]);
        }),
        ("no string", |server, _| {
            ask(server, &["DEL", &in_redis("k")]);
            ask(server, &["RPUSH", &in_redis("k"), "theirs"]);
        }),
    ]
}

#[test]
fn a_ticket_of_an_ended_lock_is_refused() {
    let server = server();
    let [old, new] = [(); 2].map(|()| client(&server));
    for (what, end) in ends() {
        let ticket = lock(&old, "k").into_ticket().unwrap();
        end(&server, &new);
        let before = ask(&server, &["EXISTS", &in_redis("k")]);
        let error = refused(&new, &ticket);
        assert_eq!(error.kind(), ErrorKind::NotHeld, "{what}: {error}");
        assert_eq!(error.key(), Some("k"));
        assert_eq!(ask(&server, &["EXISTS", &in_redis("k")]), before, "{what}");
        ask(&server, &["DEL", &in_redis("k")]);
    }
    // Another holder has the lock now: the error names it, and nothing changes.
    let ticket = lock(&old, "k").into_ticket().unwrap();
    new.mutex("k").force_unlock().unwrap().unwrap();
    let held = lock(&new, "k");
    let value = value_of(&server, "k");
    let error = refused(&old, &ticket);
    assert_eq!(error.kind(), ErrorKind::NotHeld);
    assert!(
        error.to_string().contains(new.holder_id().as_str()),
        "{error}"
    );
    assert_eq!(value_of(&server, "k"), value);
    held.unlock().unwrap();
}

#[test]
fn forged_tickets_are_refused() {
    let server = server();
    let [old, new] = [(); 2].map(|()| client(&server));
    let held = lock(&old, "held");
    let ticket = lock(&old, "k").into_ticket().unwrap();
    let [one, other] = ["k", "held"].map(|key| (value_of(&server, key), key));
    let words: Vec<&str> = ticket.splitn(9, ' ').collect();
    let with = |n: usize, word: &str| {
        let mut words = words.clone();
        words[n] = word;
        words.join(" ")
    };
    let max = u64::MAX.to_string();
    // No grant has had this token yet.
    let later = (words[2].parse::<u64>().unwrap() + (3_600_000_000 << 10)).to_string();
    let mut forged = vec![
        with(1, &"0".repeat(32)),
        with(1, &words[1].chars().rev().collect::<String>()),
        with(8, &in_redis("held")),
        with(8, &in_redis("none")),
        with(8, "other:k"),
        with(8, &in_redis("~fence")),
        with(8, &in_redis("~value:k")),
        with(8, &in_redis("")),
        with(8, ""),
        with(3, &max),
        with(3, "0"),
        with(4, "60000"),
        with(4, &max),
        with(4, "0"),
        with(5, "0"),
        with(6, "-"),
        with(7, "0"),
        with(7, "11"),
        with(7, &max),
        with(2, "-1"),
        with(2, &later),
        with(2, &max),
        with(2, "18446744073709551616"),
        format!("{ticket} "),
        format!(" {ticket}"),
        format!("{ticket}\n{ticket}"),
        ticket.to_uppercase(),
        String::new(),
        "lht1".repeat(1_000_000),
    ];
    forged.extend((0..ticket.len()).map(|end| ticket[..end].to_owned()));
    for n in 0..32 {
        let digit = if words[1].as_bytes()[n] == b'0' {
            "1"
        } else {
            "0"
        };
        let mut id = words[1].to_owned();
        id.replace_range(n..=n, digit);
        forged.push(with(1, &id));
    }
    for text in &forged {
        let start: String = text.chars().take(200).collect();
        let error = match new.adopt(text) {
            Ok(guard) => panic!("adopted: {guard:?} ({start})"),
            Err(error) => error,
        };
        let kinds = [
            ErrorKind::InvalidTicket,
            ErrorKind::InvalidConfig,
            ErrorKind::InvalidKey,
            ErrorKind::NotHeld,
        ];
        assert!(kinds.contains(&error.kind()), "{start}: {error}");
        assert!(error.to_string().len() < 1_000, "{start}: {error}");
    }
    for (value, key) in [one, other] {
        assert_eq!(value_of(&server, key), value, "{key}");
    }
    held.check().unwrap();
    adopt(&new, &format!("{ticket}\n")).unlock().unwrap();
    held.unlock().unwrap();
}

/// The keys are equal in Redis, but the locks have other names.
#[test]
fn a_ticket_of_a_nested_prefix_is_refused() {
    let server = server();
    let [outer, inner] = ["a:", "a:b:"].map(|prefix| {
        let builder = steady(&server.url()).ttl(LONG_TTL).prefix(prefix);
        builder.build().unwrap()
    });
    for (own, other, name) in [(&outer, &inner, "b:k"), (&inner, &outer, "k")] {
        let ticket = lock(own, name).into_ticket().unwrap();
        let error = refused(other, &ticket);
        assert_eq!(error.kind(), ErrorKind::InvalidTicket, "{error}");
        assert!(error.to_string().contains("a:b:k"), "{error}");
        adopt(own, &ticket).unlock().unwrap();
    }
}

#[test]
fn a_lost_guard_makes_no_ticket() {
    let server = server();
    let client = client(&server);
    let guard = lock(&client, "k");
    ask(&server, &["SET", &in_redis("k"), "theirs", "PX", "60000"]);
    guard.lost_signal().recv_timeout(SOON).unwrap();
    let error = guard.into_ticket().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::LeaseLost, "{error}");
    assert_eq!(error.key(), Some("k"));
    assert_eq!(value_of(&server, "k").as_deref(), Some("theirs"));
    ask(&server, &["DEL", &in_redis("k")]);
    // The client does not know of the loss yet.
    let guard = lock(&client, "k");
    ask(&server, &["DEL", &in_redis("k")]);
    let error = guard.into_ticket().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::LeaseLost, "{error}");
    client.with_lock("k", || ()).unwrap();
}

/// Unlocking, extending or dropping a guard changes nothing if another holder has the lock.
#[test]
fn lost_guards_change_nothing() {
    let server = server();
    let [old, new] = [(); 2].map(|()| client(&server));
    for round in 0..4 {
        let guard = lock(&old, "k");
        new.mutex("k").force_unlock().unwrap().unwrap();
        let held = lock(&new, "k");
        let (value, left) = (value_of(&server, "k"), expires_in(&server, "k").unwrap());
        let outcome = match round {
            0 => guard.extend(2 * LONG_TTL),
            1 => guard.unlock().map(drop),
            2 => guard.into_ticket().map(drop),
            _ => {
                let lost = guard.check();
                drop(guard);
                lost
            }
        };
        // A drop has no result. Once this request is done, Redis has executed what the drop wrote.
        old.mutex("k").inspect().unwrap();
        assert!(
            round == 3 || outcome.unwrap_err().is_lease_lost(),
            "{round}"
        );
        assert_eq!(value_of(&server, "k"), value, "{round}");
        assert!(expires_in(&server, "k").unwrap() <= left, "{round}");
        held.unlock().unwrap();
    }
}

#[test]
fn a_shut_down_client_leaves_the_ticket_valid() {
    let server = server();
    let [old, ended, new] = [(); 3].map(|()| client(&server));
    let guard = lock(&old, "k");
    let stays = lock(&old, "stays");
    let ticket = guard.into_ticket().unwrap();
    ended.shutdown(secs(5)).unwrap();
    assert_eq!(refused(&ended, &ticket).kind(), ErrorKind::Shutdown);
    // A transferred lock no longer concerns its old client.
    old.shutdown(secs(5)).unwrap();
    assert!(stays.into_ticket().unwrap_err().is_lease_lost());
    let guard = adopt(&new, &ticket);
    guard.extend(LONG_TTL).unwrap();
    guard.unlock().unwrap();
    assert!(!is_held(&server, "k"));
}

/// Threads of the old client, of the new client and of other clients get the lock after the adopter, in turn.
#[test]
fn waiters_are_granted_after_the_adopter() {
    let server = server();
    let clients: Vec<Client> = (0..3).map(|_| client(&server)).collect();
    for let_go in [drop, |guard: leasehold::MutexGuard| {
        assert!(guard.unlock().unwrap().is_confirmed());
    }] {
        for adopter in [1, 0] {
            let guard = lock(&clients[0], "k");
            let token = guard.fencing_token();
            let waiters: Vec<_> = (0..6)
                .map(|n| {
                    let mutex = clients[n % 3].mutex("k");
                    Task::start_blocked(move || {
                        let guard = mutex.lock().unwrap();
                        guard
                            .extend(2 * LONG_TTL)
                            .expect("it is ours in Redis, too");
                        let token = guard.fencing_token();
                        guard.unlock().unwrap();
                        token
                    })
                })
                .collect();
            wait_for_queue(&server, "k", 2);
            let ticket = guard.into_ticket().unwrap();
            // The threads of the old client are queued in Redis from now on.
            wait_for_queue(&server, "k", 3);
            let guard = adopt(&clients[adopter], &ticket);
            guard.extend(LONG_TTL).unwrap();
            assert!(waiters.iter().all(|waiter| !waiter.is_done()));
            let_go(guard);
            let turns = waiters.into_iter().map(|task| task.within(SOON, "a grant"));
            let mut tokens: Vec<u64> = turns.collect();
            tokens.sort_unstable();
            assert!(token < tokens[0] && tokens.is_sorted_by(|a, b| a < b));
            let free = eventually(SOON, || !is_held(&server, "k"));
            assert!(free, "leaked: {:?}", value_of(&server, "k"));
        }
    }
}

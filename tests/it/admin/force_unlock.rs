//! `Mutex::force_unlock`: the holder is notified, with the name of the caller, and the next waiter gets the
//! lock.

use std::sync::mpsc::channel;
use std::thread;

use leasehold::LossReason;
use leasehold_testbed::{Proxy, Server, eventually};

use super::{client, lock};
use crate::scripts::RELEASE;
use crate::steady::steady;
use crate::support::{
    LONG_TTL, Recorder, SOON, Task, What, ask, builder, channel_of, in_redis, is_held, lease_of,
    lost_within, millis, notified_client, queue, secs, server, value_of, wait_for_messages,
    wait_for_queue,
};

/// The URL of a user who may run every command but `denied`.
fn without(server: &Server, denied: &str) -> String {
    let user = ["ACL", "SETUSER", "limited", "reset", "on", ">secret"];
    let rights = ["~*", "&*", "+@all", denied];
    ask(server, &[&user[..], &rights].concat());
    format!("redis://limited:secret@127.0.0.1:{}", server.port())
}

#[test]
fn force_unlock_notifies_the_holder_in_every_way() {
    let server = server();
    let recorder = Recorder::new();
    let (owner, operator) = (notified_client(&server, &recorder), client(&server));
    for held_for in [0, 100] {
        let guard = lock(&owner, "k");
        let signal = guard.lost_signal();
        let (sender, called) = channel();
        guard.on_lost(move |reason| sender.send(reason).unwrap());
        thread::sleep(millis(held_for));
        let losses = recorder.count(What::Lost, "k");
        let token = guard.fencing_token();
        let taken = operator.mutex("k").force_unlock().unwrap().unwrap();
        assert_eq!(taken.holder(), owner.holder_id());
        assert!(taken.fencing_token().is_none_or(|stored| stored == token));
        let by = operator.holder_id().clone();
        let forced = LossReason::ForceUnlocked { by };
        assert_eq!(lost_within(SOON, &signal), forced, "after {held_for} ms");
        assert_eq!(called.recv_timeout(SOON).unwrap(), forced);
        recorder.wait_for(losses + 1, What::Lost, "k");
        let error = guard.check().unwrap_err();
        assert_eq!(error.loss_reason(), Some(&forced));
        assert!(error.to_string().contains(operator.holder_id().as_str()));
        assert!(!is_held(&server, "k"));
        assert_eq!(guard.unlock().unwrap_err().loss_reason(), Some(&forced));
        let next = lock(&operator, "k");
        assert!(next.fencing_token() > token);
        next.unlock().unwrap();
    }
}

/// The holder's client connects for notifications only when it has held a lock for 30 ms.
#[test]
fn a_holder_that_does_not_listen_yet_is_notified() {
    let server = server();
    let operator = client(&server);
    for _ in 0..4 {
        let owner = client(&server);
        let guard = lock(&owner, "k");
        operator.mutex("k").force_unlock().unwrap().unwrap();
        let reason = lost_within(SOON, &guard.lost_signal());
        let by = operator.holder_id().clone();
        assert_eq!(reason, LossReason::ForceUnlocked { by });
    }
}

/// The holder's process may have died, so `force_unlock` waits for its client for a second at most.
#[test]
fn a_lock_whose_holder_never_listens_is_unlocked() {
    let server = server();
    let operator = client(&server);
    // This grant is old, so `force_unlock` does not wait.
    ask(
        &server,
        &[
            "SET",
            &in_redis("k"),
            &value_of_a_dead_client(),
            "PX",
            "60000",
        ],
    );
    let before = server.calls("evalsha").unwrap();
    operator.mutex("k").force_unlock().unwrap().unwrap();
    assert_eq!(
        server.calls("evalsha").unwrap() - before,
        2,
        "inspect and release"
    );
    // This grant is new, so `force_unlock` waits.
    let owner = steady(&without(&server, "-subscribe")).build().unwrap();
    let guard = lock(&owner, "k");
    operator.mutex("k").force_unlock().unwrap().unwrap();
    assert!(!is_held(&server, "k"));
    assert!(guard.unlock().is_err());
}

fn value_of_a_dead_client() -> String {
    format!("lh1 {} 1795263780943818 gone/1/0", "1".repeat(32))
}

#[test]
fn an_unreachable_holder_learns_at_its_renewal() {
    let server = server();
    let operator = client(&server);
    let url = without(&server, "-subscribe");
    let owner = steady(&url).ttl(secs(9)).build().unwrap();
    let guard = lock(&owner, "k");
    thread::sleep(millis(100));
    operator.mutex("k").force_unlock().unwrap().unwrap();
    let held = lock(&operator, "k");
    let reason = lost_within(SOON, &guard.lost_signal());
    let by = Some(operator.holder_id().clone());
    assert_eq!(reason, LossReason::TakenOver { by });
    let value = value_of(&server, "k");
    drop(guard);
    owner.shutdown(secs(5)).unwrap();
    assert_eq!(value_of(&server, "k"), value);
    held.unlock().unwrap();
}

#[test]
fn force_unlock_gives_waiters_a_greater_token() {
    let server = server();
    let recorder = Recorder::new();
    let (owner, operator) = (notified_client(&server, &recorder), client(&server));
    let others = [(); 2].map(|()| client(&server));
    let mut guard = lock(&owner, "k");
    let mut waiters = Vec::new();
    for (n, other) in (1..).zip(&others) {
        let mutex = other.mutex("k");
        waiters.push(Task::start(move || mutex.lock().unwrap()));
        wait_for_queue(&server, "k", n);
    }
    for waiter in waiters {
        let token = guard.fencing_token();
        operator.mutex("k").force_unlock().unwrap().unwrap();
        let next = waiter.within(SOON, "the next waiter");
        assert!(next.fencing_token() > token);
        lost_within(SOON, &guard.lost_signal());
        next.extend(2 * LONG_TTL).expect("it has it");
        guard = next;
    }
    guard.unlock().unwrap();
    assert!(!is_held(&server, "k"));
}

#[test]
fn force_unlock_of_a_free_lock_returns_nothing() {
    let server = server();
    let client = client(&server);
    assert!(client.mutex("k").force_unlock().unwrap().is_none());
    lock(&client, "k").unlock().unwrap();
    assert!(client.mutex("k").force_unlock().unwrap().is_none());
    client.with_lock("k", || ()).unwrap();
}

#[test]
fn force_unlock_spares_a_holder_that_came_meanwhile() {
    let server = server();
    let [one, two] = [(); 2].map(|()| client(&server));
    let proxy = Proxy::start(server.port()).unwrap();
    let operator = steady(&proxy.url()).pipelines(1).build().unwrap();
    operator.mutex("warm").inspect().unwrap();
    let guard = lock(&one, "k");
    proxy.hold_replies(true);
    let inspects = || server.calls("evalsha").unwrap();
    let before = inspects();
    let mutex = operator.mutex("k");
    let task = Task::start(move || mutex.force_unlock());
    assert!(eventually(SOON, || inspects() > before));
    guard.unlock().unwrap();
    let guard = lock(&two, "k");
    let value = value_of(&server, "k");
    proxy.hold_replies(false);
    assert!(task.within(SOON, "forcing").unwrap().is_none());
    assert_eq!(value_of(&server, "k"), value);
    guard.extend(2 * LONG_TTL).unwrap();
    guard.unlock().unwrap();
}

#[test]
fn one_of_many_concurrent_force_unlocks_succeeds() {
    let server = server();
    let [owner, one, two] = [(); 3].map(|()| client(&server));
    for _ in 0..30 {
        let guard = lock(&owner, "k");
        let tasks: Vec<_> = (0..8)
            .map(|n| {
                let mutex = [&one, &two][n % 2].mutex("k");
                Task::start(move || mutex.force_unlock().unwrap())
            })
            .collect();
        let taken = tasks.into_iter().map(|task| task.within(SOON, "forcing"));
        assert_eq!(taken.flatten().count(), 1);
        assert!(guard.unlock().unwrap_err().is_lease_lost());
    }
}

/// If the reply is lost, the client repeats the request. The result must still say that the lock was taken away.
#[test]
fn force_unlock_succeeds_after_any_cut() {
    let server = server();
    let owner = client(&server);
    thread::scope(|scope| {
        for part in 0..8 {
            let (server, owner) = (&server, &owner);
            scope.spawn(move || {
                for n in (part..420).step_by(8) {
                    let proxy = Proxy::start(server.port()).unwrap();
                    let builder = builder(&proxy.url()).pipelines(1).command_timeout(SOON);
                    let operator = builder.build().unwrap();
                    operator.mutex("warm").inspect().unwrap();
                    let key = format!("key-{n}");
                    let guard = lock(owner, &key);
                    proxy.cut_after(Some(n));
                    match operator.mutex(&key).force_unlock() {
                        Ok(taken) => {
                            assert!(taken.is_some(), "cut at {n}");
                            assert!(!is_held(server, &key));
                        }
                        Err(error) => assert!(error.is_unavailable(), "{n}: {error}"),
                    }
                    drop(guard);
                    assert!(eventually(SOON, || !is_held(server, &key)));
                }
            });
        }
    });
}

/// The script publishes the message before Redis refuses the deletion of the key.
#[test]
fn a_failed_force_unlock_leaves_the_lock_held() {
    let server = server();
    let recorder = Recorder::new();
    let owner = notified_client(&server, &recorder);
    let url = without(&server, "-del");
    let operator = steady(&url).build().unwrap();
    let guard = lock(&owner, "k");
    let error = operator.mutex("k").force_unlock().unwrap_err();
    assert_eq!(error.kind(), leasehold::ErrorKind::Denied, "{error}");
    wait_for_messages(&server, &owner);
    let may = client(&server);
    guard.extend(2 * LONG_TTL).expect("it has it");
    may.mutex("k").force_unlock().unwrap().unwrap();
    let by = may.holder_id().clone();
    let reason = lost_within(SOON, &guard.lost_signal());
    assert_eq!(reason, LossReason::ForceUnlocked { by });
}

/// Other users may publish on the channel, too. The client ignores text that is no message of the library.
#[test]
fn messages_about_other_leases_end_no_lock() {
    let server = server();
    let recorder = Recorder::new();
    let owner = notified_client(&server, &recorder);
    let guard = lock(&owner, "k");
    let channel = channel_of(&owner);
    let other = "0".repeat(16);
    let whole = lease_of(&server, "k").unwrap();
    let own = &whole[..16];
    for text in [
        format!("{whole} !host/1/0 leasehold:k"),
        format!("{} !host/1/0 leasehold:k", &own[..15]),
        format!("{other} !host/1/0 leasehold:k"),
        format!("{own} !host/1/0 leasehold:other"),
        format!("{own} !host/1/0 k"),
        format!("{own} !host/1/0"),
        format!("{own} host leasehold:k"),
        "!".to_owned(),
        String::new(),
    ] {
        ask(&server, &["PUBLISH", &channel, &text]);
    }
    wait_for_messages(&server, &owner);
    guard.check().unwrap();
    assert_eq!(recorder.count(What::Lost, "k"), 0);
    guard.unlock().unwrap();
}

/// The holder's client receives the grant and the force together, possibly while it accepts the grant.
#[test]
fn a_grant_forced_away_at_once_is_rejected() {
    let server = server();
    let [owner, waits, operator] = [(); 3].map(|()| client(&server));
    let mut redis = redis::Client::open(server.url())
        .unwrap()
        .get_connection()
        .unwrap();
    for round in 0..5 {
        let key = format!("k{round}");
        let held = lock(&owner, &key);
        let mutex = waits.mutex(&key);
        let waiter = Task::start(move || mutex.lock().unwrap());
        wait_for_queue(&server, &key, 1);
        let owners = lease_of(&server, &key).unwrap();
        let waiters = queue(&server, &key).remove(0);
        let forced = format!("{}!{}", &waiters[..32], operator.holder_id());
        // An unlock and a force, sent as one request.
        let mut both = redis::pipe();
        both.atomic();
        for release in [owners, forced] {
            let keys = ["~fence", &key, &format!("~queue:{key}")].map(in_redis);
            let eval = both.cmd("EVAL").arg(&**RELEASE);
            eval.arg(3).arg(&keys).arg(release);
        }
        let done: [i64; 2] = both.query(&mut redis).unwrap();
        assert_eq!(done, [1, 1]);
        let next = waiter.within(SOON, "a grant");
        // Either the client was granted the lock again, or it was notified which client took the lock.
        if !is_held(&server, &key) {
            let reason = lost_within(SOON, &next.lost_signal());
            let by = operator.holder_id().clone();
            assert_eq!(reason, LossReason::ForceUnlocked { by });
            continue;
        }
        next.extend(2 * LONG_TTL).unwrap();
        drop(held);
        next.unlock().unwrap();
    }
}

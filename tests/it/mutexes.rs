//! Sets of keys on a server: their requests, failures of single keys, killed processes, and transactions.
//! `conformance::sets` tests the behaviour on every kind of store.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use leasehold::crossbeam_channel::bounded;
use leasehold::redis::Commands;
use leasehold::{Client, ErrorKind, LossReason, MutexesGuard};
use leasehold_testbed::{Server, eventually};

use crate::child::{Child, Parent};
use crate::steady::steady;
use crate::support::{
    LONG_TTL, Recorder, SOON, Task, ask, assert_all_become_free, held_keys, in_redis, is_held,
    millis, notified_client, notified_clients, queued, script_calls, secs, server, wait_for_queue,
    warm_up,
};

fn client(url: &str) -> Client {
    steady(url).ttl(LONG_TTL).build().unwrap()
}

fn names(n: usize) -> Vec<String> {
    (0..n).map(|n| format!("key-{n:03}")).collect()
}

/// The keys `a`, `b` and `c` in the order in which a set acquires them.
fn in_order(client: &Client) -> [String; 3] {
    let set = client.mutexes(["a", "b", "c"]);
    let keys: Vec<String> = set.keys().map(str::to_owned).collect();
    keys.try_into().unwrap()
}

#[test]
fn a_free_set_takes_two_requests() {
    let server = server();
    let client = client(&server.url());
    warm_up(&client);
    for n in [2, 8, 32, 128] {
        let set = client.mutexes(names(n));
        let before = script_calls(&server);
        set.lock().unwrap().unlock().unwrap();
        set.with(|_| ()).unwrap();
        assert!(script_calls(&server) - before <= 4, "{n} keys");
        let before = script_calls(&server);
        assert!(
            set.try_lock()
                .unwrap()
                .unwrap()
                .unlock()
                .unwrap()
                .is_confirmed()
        );
        assert!(script_calls(&server) - before <= 2, "{n} keys");
    }
    assert!(held_keys(&server).is_empty());
}

/// The script gives back the free keys itself.
#[test]
fn a_refused_try_takes_one_request() {
    let server = server();
    let client = client(&server.url());
    warm_up(&client);
    let keys = names(8);
    for taken in [0, 7] {
        let held = client.mutex(&keys[taken]).lock().unwrap();
        let before = script_calls(&server);
        assert!(client.mutexes(&keys).try_lock().unwrap().is_none());
        assert_eq!(held_keys(&server), [keys[taken].clone()]);
        assert_eq!(script_calls(&server) - before, 1);
        held.unlock().unwrap();
    }
}

/// The releases of a dropped guard and the next request use two connections. The server reads them in any order.
#[test]
fn a_dropped_set_can_be_locked_again_at_once() {
    let server = server();
    let builder = steady(&server.url()).ttl(LONG_TTL).pipelines(2);
    let client = builder.build().unwrap();
    for turn in 0..20 {
        // In each turn, other keys belong to the first connection.
        let keys: Vec<String> = (0..4).map(|n| format!("key-{turn}-{n}")).collect();
        let set = client.mutexes(&keys);
        let held = set.try_lock().unwrap().expect("its keys are new");
        server.stop();
        drop(held);
        let again = Task::start_blocked(move || set.try_lock().unwrap());
        server.resume();
        let again = again.within(SOON, "the reply");
        drop(again.expect("the set was dropped before"));
        let single = client.mutex(&keys[turn % 4]).try_lock().unwrap();
        drop(single.expect("the set was dropped before"));
    }
    assert_all_become_free(&server);
}

/// Another client comes for the last key while the set waits for its first one.
#[test]
fn a_set_takes_the_place_of_its_first_wait() {
    let server = server();
    let clients = [(); 3].map(|()| client(&server.url()));
    let [first, _, last] = in_order(&clients[0]);
    let first_held = clients[1].mutex(&first).lock().unwrap();
    let last_held = clients[1].mutex(&last).lock().unwrap();
    let set = clients[0].mutexes([&first, &last]);
    let waiting = Task::start(move || set.lock().unwrap());
    wait_for_queue(&server, &first, 1);
    let later = clients[2].mutex(&last);
    let later = Task::start(move || later.lock().unwrap());
    wait_for_queue(&server, &last, 1);
    first_held.unlock().unwrap();
    wait_for_queue(&server, &last, 2);
    last_held.unlock().unwrap();
    let both = waiting.within(SOON, "the set");
    assert!(!later.is_done());
    drop(both);
    drop(later.within(SOON, "the key behind the set"));
    assert_all_become_free(&server);
}

#[test]
fn a_taken_key_costs_one_request_more() {
    let server = server();
    let (one, two) = (client(&server.url()), client(&server.url()));
    for client in [&one, &two] {
        warm_up(client);
    }
    let [first, taken, last] = in_order(&one);
    let set = one.mutexes([&first, &taken, &last]);
    let turn = || {
        let held = two.mutex(&taken).lock().unwrap();
        let (before, waiting) = (script_calls(&server), set.clone());
        let waiting = Task::start(move || waiting.lock().unwrap());
        wait_for_queue(&server, &taken, 1);
        assert!(is_held(&server, &first) && !is_held(&server, &last));
        assert!(eventually(SOON, || notified_clients(&server) == 2));
        held.unlock().unwrap();
        let all = waiting.within(SOON, "the keys");
        let requests = script_calls(&server) - before;
        drop(all);
        requests
    };
    // The waiter polls until its client is connected for notifications, and it asks again after about a second without
    // a notification. A turn without these requests has the first request, the holder's release, and the request for
    // the last key.
    let requests: Vec<u64> = (0..5).map(|_| turn()).collect();
    assert!(requests.iter().min() <= Some(&3), "{requests:?}");
    assert_all_become_free(&server);
}

#[test]
fn a_set_that_gives_up_sends_one_release() {
    let server = server();
    // Until it is notified, a waiter polls.
    let one = notified_client(&server, &Recorder::new());
    let two = client(&server.url());
    let mut keys = names(8);
    let _held = two.mutex(&keys[7]).lock().unwrap();
    warm_up(&one);
    let before = script_calls(&server);
    let set = one.mutexes(&keys);
    assert!(set.try_lock_for(secs(2)).unwrap().is_none());
    // The call has released everything.
    assert_eq!(held_keys(&server), [keys.pop().unwrap()]);
    assert_eq!(queued(&server, "key-007"), 0);
    // The waiter asks again after about a second. A release of each key would be seven requests.
    let requests = script_calls(&server) - before;
    assert!(requests <= 6, "{requests}");
}

#[test]
fn a_failing_key_undoes_the_others() {
    let server = server();
    let client = client(&server.url());
    let [first, foreign, last] = in_order(&client);
    ask(&server, &["RPUSH", &in_redis(&foreign), "x"]);
    let set = client.mutexes([&first, &foreign, &last]);
    for result in [set.lock().map(Some), set.try_lock(), set.try_lock_for(SOON)] {
        let error = result.map(drop).unwrap_err();
        let key = error.key().map(str::to_owned);
        assert_eq!(
            (error.kind(), key),
            (ErrorKind::Protocol, Some(foreign.clone()))
        );
        assert!(!is_held(&server, &first) && !is_held(&server, &last));
    }
}

/// The server has no replica, so the client undoes each grant.
#[test]
fn an_unacknowledged_set_is_free_when_the_call_returns() {
    let server = server();
    let client = client(&server.url());
    for keys in [&["a"][..], &["a", "b", "c"]] {
        let set = client.mutexes(keys).replicas(1, millis(200));
        // The second limit ends while a request waits for the replicas.
        for limit in [millis(0), millis(250)] {
            let result = set.try_lock_for(limit);
            assert_eq!(held_keys(&server), [""; 0], "{keys:?} {limit:?}");
            assert_eq!(result.unwrap_err().kind(), ErrorKind::Unavailable);
        }
    }
}

/// The keys are lost one after another.
#[test]
fn all_reports_name_the_first_lost_key() {
    let server = server();
    let client = client(&server.url());
    let [first, second, last] = in_order(&client);
    for order in [[&last, &first], [&second, &last]] {
        let all = client.mutexes(["a", "b", "c"]).lock().unwrap();
        assert!(eventually(SOON, || notified_clients(&server) == 1));
        let (early, (say, said)) = (all.lost_signal(), bounded(2));
        for key in order {
            ask(&server, &["DEL", &in_redis(key)]);
            let lost = |held: &leasehold::HeldLock| held.key() == key;
            assert!(eventually(SOON, || !client.held_locks().iter().any(lost)));
        }
        ask(&server, &["FLUSHALL"]);
        assert!(eventually(SOON, || client.held_locks().is_empty()));
        all.on_lost(move |lost| say.send(lost.key).unwrap());
        let key_of = |lost: leasehold::LostKey| lost.key;
        let reports = [
            key_of(early.recv_timeout(SOON).unwrap()),
            key_of(all.lost_signal().recv_timeout(SOON).unwrap()),
            said.recv_timeout(SOON).unwrap(),
            all.check().unwrap_err().key().unwrap().to_owned(),
            all.unlock().unwrap_err().key().unwrap().to_owned(),
        ];
        assert!(reports.iter().all(|key| key == order[0]), "{reports:?}");
    }
}

#[test]
fn an_unconfirmed_release_hides_no_loss() {
    let mut server = server();
    let client = client(&server.url());
    let [first, _, last] = in_order(&client);
    let both = client.mutexes([&first, &last]).lock().unwrap();
    client.mutex(&last).force_unlock().unwrap().unwrap();
    both.lost_signal().recv_timeout(SOON).unwrap();
    server.kill();
    let error = both.unlock().unwrap_err();
    let key = error.key().map(str::to_owned);
    assert_eq!((error.kind(), key), (ErrorKind::LeaseLost, Some(last)));
}

/// Another program has overwritten a key that the set holds, so this release finds another value.
#[test]
fn a_failing_release_keeps_no_other_key() {
    let server = server();
    let (one, two) = (client(&server.url()), client(&server.url()));
    let [first, second, taken] = in_order(&one);
    let held = two.mutex(&taken).lock().unwrap();
    let (cancel, cancelled) = bounded(1);
    let set = one
        .mutexes([&first, &second, &taken])
        .cancelled_by(cancelled);
    let waiting = Task::start(move || set.lock().map(drop));
    wait_for_queue(&server, &taken, 1);
    ask(&server, &["SET", &in_redis(&first), "foreign"]);
    cancel.send(()).unwrap();
    let error = waiting.within(SOON, "the cancellation").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Cancelled);
    assert!(!is_held(&server, &second));
    assert_eq!(
        ask(&server, &["GET", &in_redis(&first)]).as_text(),
        Some("foreign")
    );
    held.unlock().unwrap();
}

/// A key that is lost during the wait is acquired again, in the order of the set.
#[test]
fn a_key_lost_during_the_wait_is_acquired_again() {
    let server = server();
    let (one, two) = (client(&server.url()), client(&server.url()));
    let [first, second, taken] = in_order(&one);
    let held = two.mutex(&taken).lock().unwrap();
    let set = one.mutexes([&first, &second, &taken]);
    let waiting = Task::start(move || set.lock().unwrap());
    wait_for_queue(&server, &taken, 1);
    two.mutex(&first).force_unlock().unwrap().unwrap();
    let thief = two.mutex(&first).lock().unwrap();
    assert!(eventually(SOON, || one.held_locks().len() == 1));
    held.unlock().unwrap();
    assert!(!waiting.is_done());
    thief.unlock().unwrap();
    waiting.within(SOON, "all keys").unlock().unwrap();
    assert!(held_keys(&server).is_empty());
}

#[test]
fn a_deleted_key_is_named() {
    let server = server();
    let client = client(&server.url());
    let all = client.mutexes(["a", "b", "c"]).lock().unwrap();
    assert!(eventually(SOON, || notified_clients(&server) == 1));
    let lost = all.lost_signal();
    ask(&server, &["DEL", &in_redis("b")]);
    let first = lost.recv_timeout(SOON).unwrap();
    assert_eq!(
        (first.key.as_str(), first.reason),
        ("b", LossReason::Deleted)
    );
    assert!(is_held(&server, "a") && is_held(&server, "c"));
    drop(all);
    assert_all_become_free(&server);
}

/// The fence counter is an hour ahead of the clock of Redis. The token of each key is still greater than earlier ones.
#[test]
fn tokens_rise_for_each_key_while_the_clock_is_behind() {
    let server = server();
    let client = client(&server.url());
    let ahead = crate::support::micros_now(&server) + 3_600_000_000;
    ask(
        &server,
        &["ZADD", &in_redis("~fence"), &ahead.to_string(), "t"],
    );
    let keys = names(8);
    let tokens = |all: &MutexesGuard| -> Vec<u64> {
        keys.iter().map(|key| all.token(key).unwrap()).collect()
    };
    let all = client.mutexes(&keys).lock().unwrap();
    let first = tokens(&all);
    let mut different = first.clone();
    different.sort_unstable();
    different.dedup();
    assert_eq!(different.len(), keys.len());
    assert!(first.iter().all(|token| token / 1024 > ahead));
    all.unlock().unwrap();
    let single = client.mutex(&keys[3]).lock().unwrap();
    assert!(single.fencing_token() > first[3]);
    drop(single);
    let all = client.mutexes(&keys).lock().unwrap();
    assert!(
        tokens(&all)
            .iter()
            .zip(&first)
            .all(|(next, before)| next > before)
    );
}

/// Waits for a set of which the parent holds the last key.
pub fn wait_for_a_set(parent: &Parent) {
    let client = steady(&parent.url).ttl(secs(2)).build().unwrap();
    parent.tell(client.holder_id().as_str());
    let _all = client.mutexes(["a", "b", "c"]).lock().unwrap();
    parent.wait_for_end();
}

#[test]
fn a_killed_waiter_of_a_set_frees_its_keys() {
    let server = server();
    let (one, two) = (client(&server.url()), client(&server.url()));
    let [first, second, taken] = in_order(&one);
    let held = one.mutex(&taken).lock().unwrap();
    let mut child = Child::start(wait_for_a_set, &server.url());
    let _: String = child.receive(6 * SOON);
    wait_for_queue(&server, &taken, 1);
    let mutex = two.mutex(&taken);
    let behind = Task::start(move || mutex.lock().unwrap());
    wait_for_queue(&server, &taken, 2);
    child.kill();
    // The keys that the process held are free after their ttl.
    for key in [&first, &second] {
        let guard = two.mutex(key).try_lock_for(2 * SOON).unwrap();
        drop(guard.expect("the ttl has ended"));
    }
    // The queue of the taken key is intact.
    held.unlock().unwrap();
    drop(behind.within(SOON, "the grant behind the killed process"));
    assert_all_become_free(&server);
}

#[test]
fn a_large_set_makes_progress_beside_single_locks() {
    let server = server();
    let keys = names(8);
    let is_over = Arc::new(AtomicBool::new(false));
    let lockers: Vec<_> = keys
        .iter()
        .map(|key| {
            let (mutex, is_over) = (client(&server.url()).mutex(key), Arc::clone(&is_over));
            Task::start(move || {
                let mut turns = 0;
                while !is_over.load(Ordering::SeqCst) {
                    mutex.with(|_| ()).unwrap();
                    turns += 1;
                }
                turns
            })
        })
        .collect();
    let set = client(&server.url()).mutexes(&keys);
    let turns = Task::start(move || (0..20).for_each(|_| set.with(|_| ()).unwrap()));
    turns.within(12 * SOON, "twenty turns of the set");
    is_over.store(true, Ordering::SeqCst);
    for locker in lockers {
        assert!(locker.within(SOON, "a single lock") > 0);
    }
}

/// Each client gets all of its turns. `cargo xtask bench` measures the waits in longer runs.
#[test]
fn random_sets_of_many_clients_starve_none() {
    const CLIENTS: usize = 30;
    const TURNS: usize = 20;
    let server = server();
    let keys = names(10);
    let tasks: Vec<_> = (0..CLIENTS)
        .map(|n| {
            let (client, keys) = (client(&server.url()), keys.clone());
            Task::start(move || {
                for turn in 0..TURNS {
                    let random = (n * TURNS + turn) * 7919;
                    let chosen = [random % 10, random / 10 % 9 + 1, random / 90 % 8 + 1];
                    let mut chosen = chosen.to_vec();
                    chosen[1] = (chosen[0] + chosen[1]) % 10;
                    while chosen[2] == chosen[0] || chosen[2] == chosen[1] {
                        chosen[2] = (chosen[2] + 1) % 10;
                    }
                    let set = client.mutexes(chosen.iter().map(|place| &keys[*place]));
                    set.with(|_| ()).unwrap();
                }
            })
        })
        .collect();
    for task in tasks {
        task.within(24 * SOON, "its turns");
    }
    assert_all_become_free(&server);
}

fn balances(server: &Server) -> (i64, i64) {
    let number = |key: &str| {
        let text = ask(server, &["GET", key]);
        text.as_text().map_or(0, |text| text.parse().unwrap())
    };
    (number("balance:1"), number("balance:2"))
}

fn transfer(both: &MutexesGuard, amount: i64) -> Result<bool, leasehold::Error> {
    let moved = both.transaction(|conn, pipe| {
        let balance = conn.get::<_, Option<i64>>("balance:1")?.unwrap_or(0);
        if balance >= amount {
            pipe.decr("balance:1", amount).incr("balance:2", amount);
        }
        Ok(balance >= amount)
    })?;
    Ok(moved.value)
}

#[test]
fn a_transaction_refuses_if_either_key_is_lost() {
    // The server does not notify clients, so only the transaction can detect the loss.
    let server = crate::transactions::silent_server();
    let client = client(&server.url());
    ask(&server, &["SET", "balance:1", "100"]);
    let set = client.mutexes(["account:1", "account:2"]);
    for lost in ["account:1", "account:2"] {
        let both = set.lock().unwrap();
        let before = balances(&server);
        assert!(transfer(&both, 10).unwrap());
        assert_eq!(balances(&server), (before.0 - 10, before.1 + 10));
        ask(&server, &["DEL", &in_redis(lost)]);
        let error = transfer(&both, 10).unwrap_err();
        assert_eq!(
            (error.kind(), error.key()),
            (ErrorKind::LeaseLost, Some(lost))
        );
        assert_eq!(balances(&server), (before.0 - 10, before.1 + 10));
        let _ = both.unlock();
    }
    // A key is lost while the closure runs.
    let both = set.lock().unwrap();
    let before = balances(&server);
    let result = both.transaction(|_, pipe| {
        pipe.decr("balance:1", 10).incr("balance:2", 10);
        ask(&server, &["DEL", &in_redis("account:2")]);
        Ok(())
    });
    assert!(result.unwrap_err().is_lease_lost());
    assert_eq!(balances(&server), before);
}

/// Many clients move money between many accounts, in both directions, while keys are deleted. The sum stays the same.
#[test]
fn transfers_in_all_directions_keep_the_sum() {
    const ACCOUNTS: usize = 4;
    const START: i64 = 1_000;
    let server = server();
    let names: Vec<String> = (0..ACCOUNTS).map(|n| format!("account:{n}")).collect();
    for name in &names {
        ask(&server, &["SET", name, &START.to_string()]);
    }
    let tasks: Vec<_> = (0..6)
        .map(|n| {
            let (client, names) = (client(&server.url()), names.clone());
            Task::start(move || {
                for turn in 0..30 {
                    let (from, to) = ((n + turn) % ACCOUNTS, (n + turn + 1 + turn % 3) % ACCOUNTS);
                    let both = client.mutexes([&names[from], &names[to]]).lock().unwrap();
                    let moved = both.transaction(|conn, pipe| {
                        let balance: i64 = conn.get(&names[from])?;
                        pipe.set(&names[from], balance - 7);
                        let other: i64 = conn.get(&names[to])?;
                        pipe.set(&names[to], other + 7);
                        Ok(())
                    });
                    match moved {
                        Ok(_) => {}
                        Err(error) => assert!(error.is_lease_lost(), "{error}"),
                    }
                }
            })
        })
        .collect();
    while !tasks.iter().all(Task::is_done) {
        for name in &names {
            ask(&server, &["DEL", &in_redis(name)]);
        }
        std::thread::yield_now();
    }
    for task in tasks {
        task.within(SOON, "the transfers");
    }
    let balances = names.iter().map(|name| ask(&server, &["GET", name]));
    let sum: i64 = balances
        .map(|text| text.as_text().unwrap().parse::<i64>().unwrap())
        .sum();
    assert_eq!(sum, START * ACCOUNTS as i64);
}

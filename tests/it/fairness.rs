//! Fairness between clients: first come, first served, no starvation, rising tokens; and the validity of a
//! lock after a wait.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use leasehold::{Client, LossReason};
use leasehold_testbed::{Server, eventually};

use crate::steady::steady;
use crate::support::{
    LONG_TTL, SOON, Task, Witness, ask, assert_all_become_free, expires_in, in_redis, lost_within,
    millis, queue, secs, server, value_of, wait_for_queue,
};

/// The limit for all work of a test, on a busy machine.
const WORK: Duration = Duration::from_secs(120);

fn client(server: &Server) -> Client {
    steady(&server.url()).ttl(LONG_TTL).build().unwrap()
}

#[test]
fn clients_enter_in_the_order_they_came() {
    let server = server();
    let held = client(&server).mutex("k").lock().unwrap();
    let order = Arc::new(Mutex::new(Vec::new()));
    let tasks: Vec<_> = (0..10)
        .map(|n| {
            let (mutex, order) = (client(&server).mutex("k"), Arc::clone(&order));
            let task = Task::start(move || {
                let guard = match n % 2 {
                    0 => mutex.lock().unwrap(),
                    _ => mutex.try_lock_for(WORK).unwrap().expect("its grant"),
                };
                order.lock().unwrap().push(n);
                if n % 3 == 0 {
                    guard.unlock().unwrap();
                }
            });
            wait_for_queue(&server, "k", n + 1);
            task
        })
        .collect();
    held.unlock().unwrap();
    for task in tasks {
        task.within(WORK, "a grant");
    }
    assert_eq!(*order.lock().unwrap(), (0..10).collect::<Vec<_>>());
    assert_all_become_free(&server);
}

#[test]
fn clients_with_different_options_keep_the_order() {
    let server = server();
    let held = client(&server).mutex("k").lock().unwrap();
    let order = Arc::new(Mutex::new(Vec::new()));
    let tasks: Vec<_> = (0..6)
        .map(|n| {
            let mutex = client(&server).mutex("k");
            let mutex = match n % 3 {
                0 => mutex.fixed_ttl(secs(40)),
                1 => mutex.max_hold(secs(50)),
                _ => mutex,
            };
            let order = Arc::clone(&order);
            let task = Task::start(move || {
                let guard = mutex.lock().unwrap();
                order.lock().unwrap().push(n);
                drop(guard);
            });
            wait_for_queue(&server, "k", n + 1);
            task
        })
        .collect();
    drop(held);
    for task in tasks {
        task.within(WORK, "a grant");
    }
    assert_eq!(*order.lock().unwrap(), (0..6).collect::<Vec<_>>());
}

#[test]
fn clients_that_relock_at_once_have_equal_shares() {
    const CLIENTS: usize = 3;
    const TOTAL: usize = 90;
    let server = Arc::new(server());
    let turns = Arc::new(AtomicUsize::new(0));
    let clients: [Client; CLIENTS] = [(); CLIENTS].map(|()| client(&server));
    // All threads wait when the count begins.
    let held = client(&server).mutex("k").lock().unwrap();
    let tasks: Vec<_> = clients
        .iter()
        .enumerate()
        .map(|(n, client)| {
            let (mutex, turns) = (client.mutex("k"), Arc::clone(&turns));
            let at = Arc::clone(&server);
            let task = Task::start(move || {
                let mut own = 0;
                loop {
                    let guard = mutex.lock().unwrap();
                    if turns.fetch_add(1, Ordering::SeqCst) >= TOTAL {
                        return own;
                    }
                    own += 1;
                    // Waits, since the other clients may ask late on a slow machine.
                    wait_for_queue(&at, "k", CLIENTS - 1);
                    drop(guard);
                }
            });
            wait_for_queue(&server, "k", n + 1);
            task
        })
        .collect();
    drop(held);
    let shares: Vec<usize> = tasks
        .into_iter()
        .map(|task| task.within(WORK, "all grants"))
        .collect();
    assert_eq!(shares, [TOTAL / CLIENTS; CLIENTS]);
}

/// Waits until another client than the holder's is queued.
fn wait_for_another(server: &Server) {
    let value = value_of(server, "k").expect("the lock is held");
    let holder = value.split(' ').nth(3).expect("it names its holder");
    let is_anothers = |waiter: &String| !waiter.ends_with(&format!(",{holder}"));
    let there = eventually(SOON, || queue(server, "k").iter().any(is_anothers));
    assert!(there, "{value}: {:?}", queue(server, "k"));
}

#[test]
fn a_client_with_many_threads_starves_no_other() {
    const THREADS: usize = 4;
    const TOTAL: usize = 200;
    const HAND_OFFS: u32 = 4;
    let server = Arc::new(server());
    let turns = Arc::new(Mutex::new(Vec::new()));
    // All threads wait when the count begins.
    let held = client(&server).mutex("k").lock().unwrap();
    let tasks = [1, 2].map(|queued| {
        let builder = steady(&server.url()).ttl(LONG_TTL);
        let builder = builder.max_hand_offs(HAND_OFFS).hand_off_time(WORK);
        let client = builder.build().unwrap();
        let tasks = [(); THREADS].map(|()| {
            let mutex = client.mutex("k");
            let (turns, server) = (Arc::clone(&turns), Arc::clone(&server));
            Task::start(move || {
                loop {
                    let guard = mutex.lock().unwrap();
                    if turns.lock().unwrap().len() >= TOTAL {
                        return;
                    }
                    turns.lock().unwrap().push(queued);
                    // Waits, since the other client may ask late on a slow machine.
                    wait_for_another(&server);
                    drop(guard);
                }
            })
        });
        wait_for_queue(&server, "k", queued);
        tasks
    });
    drop(held);
    for task in tasks.into_iter().flatten() {
        task.within(WORK, "all grants");
    }
    let turns = turns.lock().unwrap();
    let in_a_row = turns.chunk_by(|one, next| one == next).map(<[_]>::len);
    assert_eq!(in_a_row.max(), Some(HAND_OFFS as usize + 1), "{turns:?}");
}

#[test]
fn threads_with_different_options_get_their_own_grants() {
    let server = server();
    let (holder, waiting) = (client(&server), client(&server));
    let held = holder.mutex("k").lock().unwrap();
    let terms = [
        (20, false),
        (40, true),
        (20, false),
        (30, false),
        (40, true),
    ];
    let tasks = terms.map(|(ttl, renewed)| {
        let mutex = waiting.mutex("k");
        let mutex = match renewed {
            true => mutex.ttl(secs(ttl)),
            false => mutex.fixed_ttl(secs(ttl)),
        };
        Task::start_blocked(move || {
            let guard = mutex.lock().unwrap();
            let remaining = guard.remaining();
            drop(guard);
            (secs(ttl), remaining)
        })
    });
    wait_for_queue(&server, "k", 1);
    held.unlock().unwrap();
    for task in tasks {
        let (ttl, remaining) = task.within(WORK, "a grant");
        assert!(
            remaining <= ttl && remaining > ttl - secs(10),
            "{remaining:?} of {ttl:?}"
        );
    }
    assert_all_become_free(&server);
}

/// Puts waiters of dead clients before all others in the queue.
fn leave_behind(server: &Server, key: &str, entries: usize) {
    let queue = in_redis(&format!("~queue:{key}"));
    for n in 0..entries {
        let entry = format!("{n:032x},60000,somebody/7/0badcafe");
        ask(server, &["ZADD", &queue, &n.to_string(), &entry]);
    }
}

#[test]
fn dead_clients_are_skipped() {
    let server = server();
    let (holder, waiting) = (client(&server), client(&server));
    for entries in [1, 40, 300] {
        let held = holder.mutex("k").lock().unwrap();
        leave_behind(&server, "k", entries);
        let mutex = waiting.mutex("k");
        let waiter = Task::start(move || mutex.lock().unwrap());
        wait_for_queue(&server, "k", entries + 1);
        held.check().unwrap();
        held.unlock().unwrap();
        let guard = waiter.within(SOON, "the grant");
        guard.unlock().unwrap();
        assert_all_become_free(&server);
    }
}

#[test]
fn try_lock_never_overtakes_a_waiting_client() {
    let server = server();
    let (holder, waiting) = (client(&server), client(&server));
    let triers = [client(&server), client(&server)];
    for round in 0..10 {
        let held = holder.mutex("k").lock().unwrap();
        let mutex = waiting.mutex("k");
        // The holder keeps the lock until all have tried.
        let waiter = Task::start(move || mutex.lock().unwrap());
        wait_for_queue(&server, "k", 1);
        let stop = Arc::new(AtomicBool::new(false));
        let tasks = triers.each_ref().map(|client| {
            let (mutex, stop) = (client.mutex("k"), Arc::clone(&stop));
            Task::start(move || {
                let mut tries = 0;
                while !stop.load(Ordering::SeqCst) || tries < 10 {
                    let got = mutex.try_lock().unwrap();
                    assert!(got.is_none(), "try {tries} in round {round}");
                    tries += 1;
                }
            })
        });
        if round % 2 == 0 {
            held.unlock().unwrap();
        } else {
            drop(held);
        }
        let guard = waiter.within(SOON, "the grant");
        stop.store(true, Ordering::SeqCst);
        for task in tasks {
            task.within(SOON, "trying");
        }
        guard.unlock().unwrap();
    }
}

#[test]
fn tokens_rise_over_all_clients_and_hand_offs() {
    const CLIENTS: usize = 4;
    const THREADS: usize = 4;
    const TIMES: usize = 40;
    let server = server();
    let witness = Arc::new(Witness::default());
    let tasks: Vec<_> = (0..CLIENTS)
        .map(|n| {
            // The limits go from no hand-off to the most that are allowed.
            let hand_offs = [0, 3, 256, 1023][n];
            let builder = steady(&server.url()).max_hand_offs(hand_offs);
            builder.ttl(LONG_TTL).build().unwrap()
        })
        .flat_map(|client| vec![client; THREADS])
        .enumerate()
        .map(|(n, client)| {
            let (mutex, witness) = (client.mutex("k"), Arc::clone(&witness));
            Task::start(move || {
                for round in 0..TIMES {
                    let guard = mutex.lock().unwrap();
                    drop(witness.enter(&guard));
                    if (n + round) % 5 == 0 {
                        guard.unlock().unwrap();
                    }
                }
            })
        })
        .collect();
    for task in tasks {
        task.within(WORK, "all its grants");
    }
    assert_eq!(witness.entries(), CLIENTS * THREADS * TIMES);
    assert_all_become_free(&server);
}

#[test]
fn all_waiters_enter_after_the_queue_is_deleted() {
    let server = server();
    let (holder, waiting) = (client(&server), [(); 5].map(|()| client(&server)));
    let key = in_redis("k");
    // The last command shortens the ttl, so the lock expires.
    for command in [&["DEL", &key][..], &["FLUSHALL"], &["PEXPIRE", &key, "150"]] {
        let witness = Arc::new(Witness::default());
        let held = holder.mutex("k").lock().unwrap();
        let tasks: Vec<_> = waiting
            .iter()
            .enumerate()
            .map(|(n, client)| {
                let task = witness.start_turns(client.mutex("k"), 1);
                wait_for_queue(&server, "k", n + 1);
                task
            })
            .collect();
        ask(&server, command);
        for task in tasks {
            task.within(SOON, "a grant");
        }
        assert_eq!(witness.entries(), 5, "{command:?}");
        drop(held);
        assert_all_become_free(&server);
    }
}

/// Lets a client wait for the lock for `wait`. Returns the time of the release, and the result of `look` under the
/// lock.
fn after_waiting<T: Send + 'static>(
    server: &Server,
    wait: Duration,
    lock: impl FnOnce(&Client) -> leasehold::Mutex,
    look: impl FnOnce(&leasehold::MutexGuard) -> T + Send + 'static,
) -> (Instant, T) {
    let held = client(server).mutex("k").lock().unwrap();
    let mutex = lock(&client(server));
    let waiter = Task::start(move || {
        let guard = mutex.lock().unwrap();
        look(&guard)
    });
    wait_for_queue(server, "k", 1);
    std::thread::sleep(wait);
    let let_go = Instant::now();
    held.unlock().unwrap();
    (let_go, waiter.within(WORK, "the grant"))
}

#[test]
fn a_fixed_ttl_counts_from_the_grant() {
    let server = Arc::new(server());
    let ttl = secs(4);
    let (_, (remaining, in_redis)) = after_waiting(
        &server,
        secs(2),
        |client| client.mutex("k").fixed_ttl(ttl),
        {
            let server = Arc::clone(&server);
            move |guard| (guard.remaining(), expires_in(&server, "k").unwrap())
        },
    );
    assert!(remaining > secs(3) && remaining < ttl, "{remaining:?}");
    assert!(in_redis > secs(3) && in_redis <= ttl, "{in_redis:?}");
}

#[test]
fn max_hold_counts_from_the_grant() {
    let server = server();
    let hold = millis(1500);
    let (let_go, (reason, lost)) = after_waiting(
        &server,
        millis(1200),
        |client| client.mutex("k").max_hold(hold),
        |guard| (lost_within(WORK, &guard.lost_signal()), Instant::now()),
    );
    assert_eq!(reason, LossReason::MaxHold);
    let held = lost.saturating_duration_since(let_go);
    assert!(held > hold * 9 / 10, "held for {held:?} only");
}

#[test]
fn waits_beyond_the_ttl_get_valid_locks() {
    let server = server();
    let ttl = millis(800);
    let (_, valid) = after_waiting(
        &server,
        3 * ttl / 2,
        |client| client.mutex("k").fixed_ttl(ttl),
        |guard| !guard.is_lost(),
    );
    assert!(valid);
}

#[test]
fn waits_beyond_the_ttl_get_renewed_locks() {
    let server = server();
    let ttl = secs(4);
    let (_, lost) = after_waiting(
        &server,
        5 * ttl / 4,
        |client| client.mutex("k").ttl(ttl),
        move |guard| guard.lost_signal().recv_timeout(5 * ttl / 4),
    );
    assert!(lost.is_err(), "{lost:?}");
}

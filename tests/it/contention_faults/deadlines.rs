//! Many waits that time out, while the lock is held and while it changes hands.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use leasehold::Client;

use crate::contention_faults::{KEY, unhurried};
use crate::support::{
    SOON, Task, Witness, assert_all_become_free, in_time, millis, server, value_of, wait_for_queue,
};

const THREADS: usize = 16;
const CLIENTS: usize = 4;

/// Sixteen threads of four clients wait for 1 to 5 ms, a thousand times in all, and then until `enough` is true.
/// Returns the number of grants.
fn wait_shortly(
    clients: &[Client],
    witness: &Arc<Witness>,
    enough: impl Fn() -> bool + Clone + Send + 'static,
) -> usize {
    let tasks: Vec<Task<usize>> = (0..THREADS)
        .map(|n| {
            let (mutex, witness) = (clients[n % CLIENTS].mutex(KEY), Arc::clone(witness));
            let enough = enough.clone();
            Task::start(move || {
                let (mut turn, mut entered, mut unanswered) = (0, 0, 0);
                while turn < 64 || !enough() {
                    let wait = millis(1 + (turn + n as u64) % 5);
                    match mutex.try_lock_for(wait) {
                        Ok(Some(guard)) => {
                            drop(witness.enter(&guard));
                            entered += 1;
                        }
                        Ok(None) => {}
                        // On a busy machine, the thread that reads the reply may stand still for too long.
                        Err(error) => {
                            assert!(error.is_unavailable(), "{error}");
                            unanswered += 1;
                        }
                    }
                    turn += 1;
                }
                assert!(unanswered <= turn / 4, "{unanswered} of {turn}");
                entered
            })
        })
        .collect();
    let entered = tasks
        .into_iter()
        .map(|task| task.within(6 * SOON, "short waits"));
    entered.sum()
}

fn clients(url: &str) -> Vec<Client> {
    (0..CLIENTS).map(|_| unhurried(url)).collect()
}

#[test]
fn a_thousand_timed_out_waits_leave_the_queue() {
    let server = server();
    let (holder, clients) = (unhurried(&server.url()), clients(&server.url()));
    let held = holder.mutex(KEY).lock().unwrap();
    let witness = Arc::new(Witness::default());
    assert_eq!(
        wait_shortly(&clients, &witness, || true),
        0,
        "the lock is held"
    );
    wait_for_queue(&server, KEY, 0);
    held.check().unwrap();
    held.unlock().unwrap();
    assert_eq!(
        value_of(&server, KEY),
        None,
        "no waiter was there to be granted the lock"
    );
    for client in clients {
        client
            .mutex(KEY)
            .try_lock()
            .unwrap()
            .unwrap()
            .unlock()
            .unwrap();
    }
}

#[test]
fn a_thousand_timeouts_during_grants_hold_nothing() {
    let server = server();
    let clients = clients(&server.url());
    let witness = Arc::new(Witness::default());
    let busy = Arc::new(AtomicBool::new(true));
    let turns = Arc::new(AtomicUsize::new(0));
    let long_waiters: Vec<Task<()>> = (0..2)
        .map(|_| {
            let mutex = unhurried(&server.url()).mutex(KEY);
            let (witness, busy) = (Arc::clone(&witness), Arc::clone(&busy));
            let turns = Arc::clone(&turns);
            Task::start(move || {
                while busy.load(Ordering::Relaxed) {
                    let guard = mutex.lock().unwrap();
                    let inside = witness.enter(&guard);
                    // Some deadlines end now, and some queue entries are granted later.
                    thread::sleep(millis(turns.fetch_add(1, Ordering::Relaxed) as u64 % 4));
                    drop(inside);
                    guard.unlock().unwrap();
                }
            })
        })
        .collect();
    let changes = Arc::clone(&turns);
    wait_shortly(&clients, &witness, move || {
        changes.load(Ordering::Relaxed) > 60
    });
    busy.store(false, Ordering::Relaxed);
    for task in long_waiters {
        task.within(SOON, "the last grant");
    }
    assert_all_become_free(&server);
    let last = clients[0].mutex(KEY).lock().unwrap();
    wait_for_queue(&server, KEY, 0);
    last.unlock().unwrap();
    assert_eq!(value_of(&server, KEY), None);
}

/// Threads that time out have threads of the same client behind them, which take over their queue entry.
#[test]
fn a_patient_waiter_gets_the_lock_behind_timeouts() {
    let server = server();
    let holder = unhurried(&server.url());
    let clients = clients(&server.url());
    let witness = Arc::new(Witness::default());
    let held = holder.mutex(KEY).lock().unwrap();
    let long_waiters: Vec<Task<()>> = clients
        .iter()
        .map(|client| witness.start_turns(client.mutex(KEY), 1))
        .collect();
    wait_shortly(&clients, &witness, || true);
    held.unlock().unwrap();
    for task in long_waiters {
        task.within(SOON, "the grant");
    }
    assert_all_become_free(&server);
}

#[test]
fn clients_dropped_after_timed_out_waits_leave_nothing() {
    let server = server();
    let holder = unhurried(&server.url());
    let held = holder.mutex(KEY).lock().unwrap();
    let mutex = holder.mutex("other");
    let mut replies = Vec::new();
    for round in 0..20 {
        let passing = unhurried(&server.url());
        let waits = [0, 1, 2].map(|n| {
            let mutex = passing.mutex(KEY);
            Task::start(move || {
                let wait = millis(1 + (round + n) % 30);
                in_time(mutex.try_lock_for(wait)).map(|guard| guard.is_some())
            })
        });
        drop(passing);
        for wait in waits {
            replies.extend(wait.within(SOON, "the deadline"));
        }
    }
    assert!(!replies.is_empty());
    assert!(replies.iter().all(|entered| !entered), "the lock is held");
    wait_for_queue(&server, KEY, 0);
    drop(mutex.try_lock().unwrap().expect("nobody waits"));
    held.unlock().unwrap();
    assert_all_become_free(&server);
}

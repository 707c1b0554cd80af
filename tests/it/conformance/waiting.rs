//! How one waits for a lock: in line, for as long as one chose, and never past a wake-up.

use std::sync::{Arc, Mutex};
use std::time::Instant;

use leasehold::crossbeam_channel::bounded;
use leasehold::{Client, ErrorKind};
use leasehold_testbed::eventually;

use crate::conformance::backend::Backend;
use crate::support::{SOON, Task, Witness, millis};

/// Waits until so many clients stand in line for the lock.
#[track_caller]
fn wait_for_line(client: &Client, of: usize) {
    let waiting = || client.mutex("k").inspect().unwrap();
    let there = eventually(SOON, || {
        waiting().is_some_and(|found| found.clients_waiting() == of)
    });
    assert!(there, "not {of} in line: {:?}", waiting());
}

pub fn who_waits_is_let_in_by_a_release(backend: &dyn Backend) {
    let (one, two) = (backend.client(), backend.client());
    for let_go in [
        |guard| drop(guard),
        |guard: leasehold::MutexGuard| {
            guard.unlock().unwrap();
        },
    ] {
        let held = one.mutex("k").lock().unwrap();
        let mutex = two.mutex("k");
        let waiter = Task::start(move || mutex.lock().unwrap());
        wait_for_line(&one, 1);
        let_go(held);
        waiter.within(SOON, "its turn").unlock().unwrap();
    }
}

pub fn who_waits_is_let_in_when_the_store_forgets(backend: &dyn Backend) {
    let (one, two) = (backend.client(), backend.client());
    let _held = one.mutex("k").lock().unwrap();
    let mutex = two.mutex("k");
    let waiter = Task::start(move || mutex.lock().unwrap());
    wait_for_line(&one, 1);
    backend.forget();
    waiter.within(SOON, "its turn").unlock().unwrap();
}

pub fn a_wait_is_bounded_by_how_long_a_holder_may_hold(backend: &dyn Backend) {
    let ttl = backend.ttl();
    let (one, two) = (
        backend.builder().ttl(ttl).build().unwrap(),
        backend.client(),
    );
    let guard = one.mutex("k").max_hold(ttl).lock().unwrap();
    let mutex = two.mutex("k");
    let waiter = Task::start(move || mutex.lock().unwrap());
    wait_for_line(&two, 1);
    backend.pass(ttl + ttl / 10);
    let next = waiter.within(SOON, "its turn");
    assert!(guard.is_lost());
    next.unlock().unwrap();
}

pub fn one_of_many_is_let_in_when_a_lock_expires(backend: &dyn Backend) {
    let ttl = backend.ttl();
    let clients: Vec<_> = (0..4).map(|_| backend.client()).collect();
    let _expired = clients[0].mutex("k").fixed_ttl(ttl).lock().unwrap();
    let witness = Arc::new(Witness::default());
    let waiters: Vec<_> = clients[1..]
        .iter()
        .cycle()
        .take(9)
        .map(|client| {
            let (mutex, witness) = (client.mutex("k"), Arc::clone(&witness));
            Task::start(move || {
                let guard = mutex.lock().unwrap();
                let inside = witness.enter(&guard);
                std::thread::yield_now();
                drop(inside);
            })
        })
        .collect();
    wait_for_line(&clients[0], 3);
    backend.pass(ttl + ttl / 10);
    for waiter in waiters {
        waiter.within(2 * SOON, "its turn");
    }
    assert_eq!(witness.entries(), 9);
}

pub fn who_waits_for_a_while_gives_up_then(backend: &dyn Backend) {
    let ttl = backend.ttl();
    let (one, two) = (backend.client(), backend.client());
    let held = one.mutex("k").lock().unwrap();
    let mutex = two.mutex("k");
    let waiter = Task::start(move || mutex.try_lock_for(ttl / 2).unwrap().is_none());
    wait_for_line(&one, 1);
    backend.pass(ttl / 2);
    assert!(waiter.within(SOON, "its deadline"));
    wait_for_line(&one, 0);
    held.unlock().unwrap();
    assert!(!two.mutex("k").is_locked().unwrap(), "it left the line");
}

pub fn a_deadline_in_the_past_is_one_try(backend: &dyn Backend) {
    let (one, two) = (backend.client(), backend.client());
    let now = Instant::now();
    let free = one.mutex("k").try_lock_until(now).unwrap();
    assert!(free.is_some());
    assert!(two.mutex("k").try_lock_until(now).unwrap().is_none());
}

pub fn a_wait_that_is_cancelled_ends(backend: &dyn Backend) {
    let (one, two) = (backend.client(), backend.client());
    let held = one.mutex("k").lock().unwrap();
    let (stop, stopped) = bounded(0);
    let mutex = two.mutex("k").cancelled_by(stopped);
    let waiter = Task::start(move || mutex.lock().map(drop).unwrap_err());
    wait_for_line(&one, 1);
    drop(stop);
    let error = waiter.within(SOON, "the end of its wait");
    assert_eq!(error.kind(), ErrorKind::Cancelled);
    wait_for_line(&one, 0);
    held.unlock().unwrap();
}

pub fn clients_have_their_turns_in_the_order_they_came(backend: &dyn Backend) {
    let clients: Vec<_> = (0..5).map(|_| backend.client()).collect();
    let held = clients[0].mutex("k").lock().unwrap();
    let order = Arc::new(Mutex::new(Vec::new()));
    let mut waiters = Vec::new();
    for (n, client) in clients.iter().enumerate().skip(1) {
        let (mutex, order) = (client.mutex("k"), Arc::clone(&order));
        waiters.push(Task::start(move || {
            let guard = mutex.lock().unwrap();
            order.lock().unwrap().push(n);
            guard.unlock().unwrap();
        }));
        wait_for_line(client, n);
    }
    held.unlock().unwrap();
    for waiter in waiters {
        waiter.within(SOON, "its turn");
    }
    assert_eq!(*order.lock().unwrap(), [1, 2, 3, 4]);
}

pub fn who_has_gone_is_passed_over(backend: &dyn Backend) {
    let clients: Vec<_> = (0..3).map(|_| backend.client()).collect();
    let held = clients[0].mutex("k").lock().unwrap();
    let mut waiters = Vec::new();
    for (n, client) in clients.iter().enumerate().skip(1) {
        let mutex = client.mutex("k");
        waiters.push(Task::start(move || mutex.lock()));
        wait_for_line(client, n);
    }
    clients[1].shutdown(SOON).unwrap();
    held.unlock().unwrap();
    let mut outcomes = waiters.into_iter().map(|one| one.within(SOON, "its turn"));
    let gone = outcomes.next().expect("two waited").map(drop).unwrap_err();
    assert_eq!(gone.kind(), ErrorKind::Shutdown);
    outcomes
        .next()
        .expect("two waited")
        .unwrap()
        .unlock()
        .unwrap();
}

pub fn threads_of_one_client_have_their_turns_in_the_order_they_came(backend: &dyn Backend) {
    let client = backend.builder().hand_offs(1023).build().unwrap();
    let held = client.mutex("k").lock().unwrap();
    let order = Arc::new(Mutex::new(Vec::new()));
    let waiters: Vec<_> = (0..6)
        .map(|n| {
            let (mutex, order) = (client.mutex("k"), Arc::clone(&order));
            Task::start_and_see_asleep(move || {
                let guard = mutex.lock().unwrap();
                order.lock().unwrap().push((n, guard.fencing_token()));
            })
        })
        .collect();
    drop(held);
    for waiter in waiters {
        waiter.within(SOON, "its turn");
    }
    let order = order.lock().unwrap();
    assert!(order.is_sorted_by(|one, next| one.0 < next.0 && one.1 < next.1));
    assert_eq!(order.len(), 6);
}

pub fn a_busy_client_leaves_others_their_turn(backend: &dyn Backend) {
    let busy = backend.builder().hand_offs(8).build().unwrap();
    let other = backend.client();
    let held = busy.mutex("k").lock().unwrap();
    let mutex = other.mutex("k");
    let waiter = Task::start(move || mutex.lock().unwrap().unlock());
    wait_for_line(&other, 1);
    let (stop, stopped) = bounded::<()>(0);
    let busy_threads: Vec<_> = (0..3)
        .map(|_| {
            let (mutex, stopped) = (busy.mutex("k"), stopped.clone());
            Task::start(move || {
                while stopped
                    .recv_timeout(millis(0))
                    .is_err_and(|e| e.is_timeout())
                {
                    drop(mutex.lock().unwrap());
                }
            })
        })
        .collect();
    drop(held);
    waiter.within(SOON, "a turn among many").unwrap();
    drop(stop);
    for thread in busy_threads {
        thread.within(SOON, "its end");
    }
}

pub fn a_shutdown_ends_waits_and_holds_and_keeps_what_is_held(backend: &dyn Backend) {
    let (one, two) = (backend.client(), backend.client());
    let held = one.mutex("held").lock().unwrap();
    let wanted = two.mutex("k").lock().unwrap();
    let mutex = one.mutex("k");
    let waiter = Task::start(move || mutex.lock().map(drop).unwrap_err());
    wait_for_line(&two, 1);
    one.shutdown(SOON).unwrap();
    let error = waiter.within(SOON, "the end of its wait");
    assert_eq!(error.kind(), ErrorKind::Shutdown);
    assert!(held.is_lost());
    assert!(two.mutex("held").is_locked().unwrap(), "not let go of");
    wait_for_line(&two, 0);
    wanted.unlock().unwrap();
    drop(held);
    let free = eventually(SOON, || !two.mutex("held").is_locked().unwrap());
    assert!(free, "let go of by its guard");
}

//! Reentrant locks: which guards share a count, when the lock becomes free, and what happens if a thread ends while it
//! holds the lock.

use std::cell::RefCell;
use std::mem::forget;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex as Shared};
use std::thread;
use std::time::{Duration, Instant};

use leasehold::{
    Client, ErrorKind, EventHandler, EventLock, LossReason, LostSignal, ReentrantGuard,
    ReentrantMutex,
};
use leasehold_testbed::Server;

use crate::steady::steady;
use crate::support::{
    LONG_TTL, Recorder, SOON, Task, What, Witness, ask, assert_all_become_free, builder,
    expires_in, in_redis, is_held, lost_within, millis, secs, server, within,
};

fn client(server: &Server) -> Client {
    steady(&server.url()).ttl(LONG_TTL).build().unwrap()
}

#[test]
fn a_repeated_acquire_sends_no_request() {
    let server = server();
    let client = builder(&server.url()).ttl(LONG_TTL).build().unwrap();
    let mutex = client.reentrant_mutex("k");
    let outer = mutex.lock().unwrap();
    server.stop();
    let again = [
        mutex.lock().unwrap(),
        mutex.try_lock().unwrap().unwrap(),
        mutex.try_lock_for(millis(0)).unwrap().unwrap(),
        mutex.try_lock_until(Instant::now()).unwrap().unwrap(),
    ];
    let depth = mutex.with(|guard| guard.depth()).unwrap();
    assert_eq!(depth, 6);
    for guard in &again {
        assert_eq!(guard.fencing_token(), outer.fencing_token());
        assert_eq!(guard.depth(), 5);
    }
    for guard in again {
        guard.unlock().unwrap();
    }
    assert_eq!(outer.depth(), 1);
    server.resume();
    outer.unlock().unwrap();
    assert!(!is_held(&server, "k"));
}

/// All orders that begin with `begun` and continue with the elements of `left`.
fn orders(begun: Vec<usize>, left: &[usize]) -> Vec<Vec<usize>> {
    if left.is_empty() {
        return vec![begun];
    }
    let mut all = Vec::new();
    for next in left {
        let begun = begun.iter().chain([next]).copied().collect();
        let left: Vec<usize> = left.iter().filter(|one| *one != next).copied().collect();
        all.extend(orders(begun, &left));
    }
    all
}

#[test]
fn the_last_guard_dropped_frees_the_lock() {
    let server = server();
    let client = client(&server);
    let other = steady(&server.url()).build().unwrap().mutex("k");
    let mutex = client.reentrant_mutex("k");
    for order in orders(Vec::new(), &[0, 1, 2]) {
        for unlocked in [true, false] {
            let mut guards = [(); 3].map(|()| Some(mutex.lock().unwrap()));
            for (gone, which) in order.iter().enumerate() {
                assert!(is_held(&server, "k"), "{order:?}: free after {gone}");
                assert!(other.try_lock().unwrap().is_none());
                let guard = guards[*which].take().unwrap();
                assert_eq!(guard.depth(), 3 - gone);
                if unlocked {
                    guard.unlock().unwrap();
                } else {
                    drop(guard);
                }
            }
            let free = other.try_lock_for(SOON).unwrap();
            free.expect("free after three").unlock().unwrap();
        }
    }
}

#[test]
fn threads_of_one_client_keep_each_other_out() {
    let server = server();
    let mutex = client(&server).reentrant_mutex("k");
    let outer = mutex.lock().unwrap();
    let inner = mutex.lock().unwrap();
    // A clone is the same mutex. The thread decides whether it may lock again, not the value.
    let theirs = mutex.clone();
    let (tried, waits) = channel();
    let waiter = Task::start(move || {
        tried.send(theirs.try_lock().unwrap().is_none()).unwrap();
        let guard = theirs.lock().unwrap();
        (guard.depth(), guard.fencing_token())
    });
    assert!(
        waits.recv_timeout(SOON).unwrap(),
        "the other thread entered"
    );
    drop(outer);
    thread::sleep(millis(50));
    assert!(!waiter.is_done(), "still held by the inner guard");
    let token = inner.fencing_token();
    drop(inner);
    let (depth, next) = waiter.within(SOON, "the grant");
    assert_eq!(depth, 1, "a count of its own");
    assert!(next > token);
}

#[test]
fn nested_locks_exclude_other_threads() {
    const THREADS: usize = 8;
    const ROUNDS: usize = 30;
    let server = server();
    let clients = [client(&server), client(&server)];
    let witness = Arc::new(Witness::default());
    let tasks: Vec<_> = (0..THREADS)
        .map(|n| {
            let mutex = clients[n % 2].reentrant_mutex("k");
            let witness = Arc::clone(&witness);
            Task::start(move || {
                for _ in 0..ROUNDS {
                    let outer = mutex.lock().unwrap();
                    let inside = witness.enter(&outer);
                    let inner = mutex.lock().unwrap();
                    drop(outer);
                    assert_eq!(mutex.with(|guard| guard.depth()).unwrap(), 2);
                    drop(inside);
                    drop(inner);
                }
            })
        })
        .collect();
    for task in tasks {
        task.within(secs(60), "nesting");
    }
    assert_eq!(witness.entries(), THREADS * ROUNDS);
    assert_all_become_free(&server);
}

#[test]
fn counts_belong_to_a_client_and_key() {
    let server = server();
    let (one, two) = (client(&server), client(&server));
    let outer = one.reentrant_mutex("k").lock().unwrap();
    assert!(two.reentrant_mutex("k").try_lock().unwrap().is_none());
    assert!(
        one.mutex("k").try_lock().unwrap().is_none(),
        "a plain mutex"
    );
    let inner = one.clone().mutex("k").reentrant().lock().unwrap();
    assert_eq!(inner.depth(), 2);
    let elsewhere = one.reentrant_mutex("other").lock().unwrap();
    assert_eq!(elsewhere.depth(), 1, "another key");
    drop((outer, inner, elsewhere));

    // A new client may get the memory address of a dropped one. Its locks must not count as held by the dropped client.
    for _ in 0..3 {
        let client = client(&server);
        let guard = client.reentrant_mutex("k").lock().unwrap();
        assert_eq!(guard.depth(), 1);
    }
}

#[test]
fn options_of_the_first_acquire_apply() {
    let server = server();
    let client = client(&server);
    let short = client.mutex("k").fixed_ttl(secs(20)).reentrant();
    let outer = short.lock().unwrap();
    let inner = client
        .mutex("k")
        .fixed_ttl(secs(50))
        .reentrant()
        .lock()
        .unwrap();
    assert!(inner.remaining() <= secs(20));
    assert!(expires_in(&server, "k").unwrap() <= secs(20));
    outer.extend(secs(40)).unwrap();
    assert!(inner.remaining() > secs(30), "one lease for both");
}

#[test]
fn a_lost_lock_is_not_reentered() {
    let server = server();
    let client = client(&server);
    let mutex = client.reentrant_mutex("k");
    let outer = mutex.lock().unwrap();
    let inner = mutex.lock().unwrap();
    ask(&server, &["DEL", &in_redis("k")]);
    assert_eq!(lost_within(SOON, &outer.lost_signal()), LossReason::Deleted);
    let errors = [
        mutex.lock().unwrap_err(),
        mutex.try_lock().unwrap_err(),
        mutex.try_lock_for(millis(1)).unwrap_err(),
        mutex.with(|_| ()).unwrap_err(),
        inner.unlock().unwrap_err(),
    ];
    for error in errors {
        assert_eq!(error.loss_reason(), Some(&LossReason::Deleted));
        assert_eq!(error.key(), Some("k"));
    }
    assert!(!is_held(&server, "k"), "it was not granted anew");
    assert!(outer.unlock().unwrap_err().is_lease_lost());
    let anew = mutex.lock().unwrap();
    assert_eq!(anew.depth(), 1);
    anew.unlock().unwrap();
}

#[test]
fn only_the_last_unlock_says_how_the_release_ended() {
    let mut server = server();
    let client = builder(&server.url())
        .command_timeout(secs(2))
        .ttl(LONG_TTL)
        .build()
        .unwrap();
    let mutex = client.reentrant_mutex("k");
    for is_there in [true, false] {
        let (outer, inner) = (mutex.lock().unwrap(), mutex.lock().unwrap());
        if !is_there {
            server.kill();
        }
        assert!(
            outer.unlock().unwrap().is_none(),
            "the other guard holds it"
        );
        let released = inner.unlock().unwrap().unwrap();
        assert_eq!(released.is_confirmed(), is_there, "{released:?}");
    }
}

#[test]
fn a_nested_panic_releases_every_level() {
    let server = server();
    let mutex = client(&server).reentrant_mutex("k");
    let outer = mutex.lock().unwrap();
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        mutex.with(|_| mutex.with(|_| panic!("a test's own panic")))
    }));
    assert!(panicked.is_err());
    assert_eq!(outer.depth(), 1);
    outer.unlock().unwrap();
    assert!(!is_held(&server, "k"));
}

/// Acquires the lock anew, once, when it gets the event of the release.
struct TakesAnew(Shared<Option<ReentrantMutex>>);

thread_local!(static TAKEN: RefCell<Option<ReentrantGuard>> = const { RefCell::new(None) });

impl EventHandler for TakesAnew {
    fn released(&self, _: EventLock<'_>, _: Duration, _: bool) {
        if let Some(mutex) = self.0.lock().unwrap().take() {
            TAKEN.set(Some(mutex.lock().unwrap()));
        }
    }
}

#[test]
fn a_lock_retaken_during_release_is_reentrant() {
    let server = server();
    for unlocked in [true, false] {
        let events = Arc::new(TakesAnew(Shared::default()));
        let client = steady(&server.url()).event_handler(Arc::clone(&events));
        let mutex = client.build().unwrap().reentrant_mutex("k");
        *events.0.lock().unwrap() = Some(mutex.clone());
        let guard = mutex.lock().unwrap();
        if unlocked {
            guard.unlock().unwrap();
        } else {
            drop(guard);
        }
        let again = mutex.try_lock().unwrap().expect("this thread has it");
        assert_eq!(again.depth(), 2);
        drop(again);
        TAKEN.take().unwrap().unlock().unwrap();
        assert!(!is_held(&server, "k"));
    }
}

#[test]
fn every_acquire_method_rejects_an_invalid_key() {
    let server = server();
    let mutex = client(&server).reentrant_mutex("");
    let errors = [
        mutex.lock().unwrap_err(),
        mutex.try_lock().unwrap_err(),
        mutex.with(|_| ()).unwrap_err(),
    ];
    for error in errors {
        assert_eq!(error.kind(), ErrorKind::InvalidKey);
    }
}

/// A thread locks twice, gives the guards to `leave`, and ends.
fn ended(
    mutex: &ReentrantMutex,
    leave: impl FnOnce(ReentrantGuard) + Send + 'static,
) -> LostSignal {
    let mutex = mutex.clone();
    let thread = thread::spawn(move || {
        let (outer, inner) = (mutex.lock().unwrap(), mutex.lock().unwrap());
        let lost = outer.lost_signal();
        leave(outer);
        drop(inner);
        lost
    });
    thread.join().unwrap()
}

#[test]
fn locks_of_ended_threads_last_their_validity() {
    let server = server();
    let recorder = Recorder::new();
    let client = steady(&server.url()).ttl(secs(3)).renew_ratio(0.1);
    let client = client.event_handler(Arc::clone(&recorder)).build().unwrap();
    let mutex = client.reentrant_mutex("k");
    let lost = ended(&mutex, forget);
    assert!(is_held(&server, "k"), "the state of the work is unknown");
    assert!(lost.try_recv().is_err());
    assert!(mutex.try_lock().unwrap().is_none(), "not this thread's");
    let (here, elsewhere) = (mutex.clone(), steady(&server.url()).build().unwrap());
    let waiters = [
        Task::start(move || here.with(|_| ())),
        Task::start(move || elsewhere.mutex("k").with(|_| ())),
    ];
    assert_eq!(lost_within(SOON, &lost), LossReason::ThreadEnded);
    recorder.wait_for(1, What::Lost, "k");
    for waiter in waiters {
        waiter.within(SOON, "the grant after the ttl").unwrap();
    }
}

#[test]
fn ended_threads_with_fixed_ttls_report_thread_ended() {
    let server = server();
    let mutex = client(&server).mutex("k").fixed_ttl(secs(1)).reentrant();
    let lost = ended(&mutex, |guard| {
        Box::leak(Box::new(guard));
    });
    assert_eq!(lost_within(SOON, &lost), LossReason::ThreadEnded);
    let client = client(&server);
    within(SOON, "the next", move || client.mutex("k").with(|_| ())).unwrap();
}

#[test]
fn a_guard_dropped_with_its_thread_releases() {
    thread_local!(static KEPT: RefCell<Vec<ReentrantGuard>> = const { RefCell::new(Vec::new()) });
    let server = server();
    // The guard is in a thread-local value that is registered before the thread's list of holds, or after it. So either
    // destructor may run first. The thread drops the client, too.
    for before in [true, false] {
        let mutex = client(&server).reentrant_mutex("k");
        let thread = thread::spawn(move || {
            if before {
                KEPT.with_borrow(|_| ());
            }
            let guard = mutex.lock().unwrap();
            let lost = guard.lost_signal();
            KEPT.with_borrow_mut(|kept| kept.push(guard));
            lost
        });
        let lost = thread.join().unwrap();
        assert_all_become_free(&server);
        assert!(lost.try_recv().is_err(), "released, not lost");
    }
}

#[test]
fn an_ended_thread_without_the_lock_is_harmless() {
    let server = server();
    let client = steady(&server.url()).ttl(secs(3)).renew_ratio(0.1);
    let mutex = client.build().unwrap().reentrant_mutex("k");
    let (handed_over, waits) = channel::<()>();
    let theirs = mutex.clone();
    let (begun, began) = channel();
    let thread = thread::spawn(move || {
        let guard = theirs.lock().unwrap();
        begun.send(()).unwrap();
        waits.recv_timeout(SOON).unwrap();
        drop(guard);
    });
    began.recv_timeout(SOON).unwrap();
    let waiting = mutex.clone();
    let holder = Task::start(move || {
        let guard = waiting.lock().unwrap();
        // The lock is renewed for longer than the ttl.
        guard.lost_signal().recv_timeout(secs(4))
    });
    handed_over.send(()).unwrap();
    thread.join().unwrap();
    let lost = holder.within(SOON, "a hold of some seconds");
    assert!(lost.is_err(), "{lost:?}");
}

//! Features of [`MemoryStore`] for unit tests: a clock to move, data to lose, names, and nothing left behind.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use leasehold::{Client, LossReason, MemoryStore};
use leasehold_testbed::eventually;

use crate::child::{self, Child, Parent};
use crate::conformance::rw_lock::upgrade_in_pairs;
use crate::support::{Recorder, SOON, Task, What, Witness, millis, secs};

/// The default ttl, which users of memory stores have.
const TTL: Duration = Duration::from_secs(30);

#[test]
fn steps_of_half_a_ttl_keep_every_lock() {
    // Repeated, since the clock should move while the timer of a new lock fires.
    for _ in 0..20 {
        let memory = MemoryStore::new();
        let clients = [(); 3].map(|()| memory.client().unwrap());
        let guards = clients.each_ref().map(|client| {
            let key = client.holder_id().to_string();
            client.mutex(&key).lock().unwrap()
        });
        for _ in 0..10 {
            memory.advance(TTL / 2);
            for guard in &guards {
                guard.check().unwrap();
                assert!(
                    guard.remaining() > TTL * 9 / 10,
                    "the lock has been renewed"
                );
            }
        }
    }
}

#[test]
fn two_upgraders_never_both_write_in_ten_thousand_rounds() {
    let memory = MemoryStore::new();
    let pair = [(); 2].map(|()| memory.client().unwrap().rw_lock("k"));
    upgrade_in_pairs(pair, 10_000);
}

#[test]
fn a_step_longer_than_a_ttl_loses_every_lock_at_once() {
    let memory = MemoryStore::new();
    let client = memory.client().unwrap();
    let guard = client.mutex("k").lock().unwrap();
    let (lost, waiting) = (guard.lost_signal(), client.mutex("k"));
    let waiter = Task::start_blocked(move || waiting.lock().unwrap());
    memory.advance(TTL);
    assert_eq!(lost.recv_timeout(SOON), Ok(LossReason::Expired));
    let next = waiter.within(SOON, "the grant");
    assert!(next.fencing_token() > guard.fencing_token());
}

/// The key of readers outlives them by a second.
#[test]
fn an_ended_reader_is_not_shown() {
    let memory = MemoryStore::new();
    let client = memory.client().unwrap();
    let lock = client.rw_lock("k").fixed_ttl(TTL);
    let reader = lock.read().unwrap();
    memory.advance(TTL + Duration::from_millis(500));
    assert!(reader.is_lost());
    assert_eq!(lock.inspect().unwrap().readers_in_total(), 0);
    assert!(!client.mutex("k").is_locked().unwrap());
}

#[test]
fn waits_end_when_the_clock_passes_their_deadline() {
    let memory = MemoryStore::new();
    let clients = [(); 2].map(|()| memory.client().unwrap());
    let _held = clients[0].mutex("k").lock().unwrap();
    // One waiter of the holder's client, and one of another client.
    let waiters = clients.each_ref().map(|client| {
        let mutex = client.mutex("k");
        Task::start_blocked(move || mutex.try_lock_for(secs(12)).unwrap().is_none())
    });
    memory.advance(secs(15));
    for waiter in waiters {
        assert!(waiter.within(SOON, "the deadline"));
    }
}

#[test]
fn max_hold_ends_when_the_clock_passes_it() {
    let memory = MemoryStore::new();
    let client = memory.client().unwrap();
    let guard = client.mutex("k").max_hold(secs(100)).lock().unwrap();
    for _ in 0..6 {
        memory.advance(secs(15));
        guard.check().unwrap();
    }
    memory.advance(secs(15));
    let error = guard.check().unwrap_err();
    assert_eq!(error.loss_reason(), Some(&LossReason::MaxHold));
    assert!(!client.mutex("k").is_locked().unwrap());
}

#[test]
fn the_clock_can_be_moved_to_its_end() {
    let memory = MemoryStore::new();
    let client = memory.client().unwrap();
    let mut last = 0;
    for by in [Duration::MAX, Duration::MAX, secs(31), secs(31)] {
        let guard = client.mutex("k").lock().unwrap();
        assert!(guard.fencing_token() > last);
        last = guard.fencing_token();
        memory.advance(by);
        assert!(guard.is_lost());
    }
    assert!(client.mutex("k").try_lock().unwrap().is_some());
}

#[test]
fn many_threads_can_move_the_clock_during_acquires() {
    let memory = MemoryStore::new();
    let stop = Arc::new(AtomicBool::new(false));
    let movers = [(); 2].map(|()| {
        let (memory, stop) = (memory.clone(), Arc::clone(&stop));
        Task::start(move || {
            while !stop.load(Ordering::Relaxed) {
                memory.advance(secs(5));
                std::thread::yield_now();
            }
        })
    });
    let takers: Vec<_> = (0..4)
        .map(|_| {
            // The clock may move by several ttls during one request or hold.
            let builder = memory.builder().outage_timeout(secs(1_000_000_000));
            let client = builder.build().unwrap();
            Task::start(move || {
                for _ in 0..50 {
                    drop(client.mutex("k").lock().unwrap());
                }
            })
        })
        .collect();
    for taker in takers {
        taker.within(4 * SOON, "all grants");
    }
    stop.store(true, Ordering::Relaxed);
    for mover in movers {
        mover.within(SOON, "its end");
    }
}

#[test]
fn a_flush_loses_held_locks_at_once() {
    let memory = MemoryStore::new();
    let clients = [(); 2].map(|()| memory.client().unwrap());
    let guards = ["a", "b"].map(|key| clients[0].mutex(key).lock().unwrap());
    clients[1].fenced_value("v").write(1, "x").unwrap();
    memory.flush();
    for guard in &guards {
        let error = guard.check().unwrap_err();
        assert_eq!(error.loss_reason(), Some(&LossReason::Deleted));
    }
    assert_eq!(clients[1].fenced_value("v").read().unwrap(), None);
    let next = clients[1].mutex("a").try_lock().unwrap();
    assert!(next.is_some());
}

#[test]
fn clients_of_a_memory_store_end_independently() {
    let memory = MemoryStore::new();
    let stays = memory.client().unwrap();
    let held = stays.mutex("k").lock().unwrap();
    for _ in 0..5 {
        let (holds, waits) = (memory.client().unwrap(), memory.client().unwrap());
        let dropped = holds.mutex("dropped").lock().unwrap();
        assert!(waits.mutex("k").try_lock_for(millis(1)).unwrap().is_none());
        drop((holds, waits));
        drop(dropped);
        assert!(!stays.mutex("dropped").is_locked().unwrap());
    }
    memory.advance(TTL / 2);
    held.unlock().unwrap();
    assert!(!stays.mutex("k").is_locked().unwrap());
}

#[test]
fn a_callback_may_move_the_clock_and_forget_everything() {
    let memory = MemoryStore::new();
    let clients = [(); 2].map(|()| memory.client().unwrap());
    let first = clients[0].mutex("first").lock().unwrap();
    let second = clients[1].mutex("second").lock().unwrap();
    let lost = second.lost_signal();
    let mine = memory.clone();
    first.on_lost(move |_| {
        mine.advance(secs(1));
        mine.flush();
    });
    clients[1].mutex("first").force_unlock().unwrap();
    assert_eq!(lost.recv_timeout(SOON), Ok(LossReason::Deleted));
}

#[test]
fn memory_urls_with_one_name_share_a_store() {
    let open = || Client::open("memory://conformance-names").unwrap();
    let (one, two) = (open(), open());
    let unnamed = Client::open("memory://").unwrap();
    let guard = one.mutex("k").lock().unwrap();
    assert!(two.mutex("k").try_lock().unwrap().is_none());
    assert!(unnamed.mutex("k").try_lock().unwrap().is_some());
    drop((one, two));
    assert!(
        open().mutex("k").is_locked().unwrap(),
        "its guard uses the store"
    );
    let _ticket = guard.into_ticket().unwrap();
    assert!(!open().mutex("k").is_locked().unwrap(), "a new store");
    for bad in ["memory://a b", "memory://a/b", "memory://ä"] {
        let error = Client::open(bad).unwrap_err();
        assert_eq!(error.kind(), leasehold::ErrorKind::InvalidConfig);
    }
}

#[test]
fn dropped_clients_leave_no_thread_or_memory() {
    if child::threads().is_none() {
        return;
    }
    Child::start(use_and_count_what_is_left, "memory://").finish(secs(120));
}

pub fn use_and_count_what_is_left(_: &Parent) {
    let before = child::threads().unwrap();
    for _ in 0..5 {
        let alive = use_everything();
        let gone = eventually(SOON, || child::threads().unwrap() == before);
        assert!(gone, "{} threads, not {before}", child::threads().unwrap());
        let freed = eventually(SOON, || alive.upgrade().is_none());
        assert!(freed, "something keeps the clients");
    }
}

/// Returns a weak reference to the recorder, which is dropped when the client and the store have ended.
fn use_everything() -> std::sync::Weak<Recorder> {
    let (memory, recorder) = (MemoryStore::new(), Recorder::new());
    let client = || {
        let builder = memory.builder().event_handler(Arc::clone(&recorder));
        builder.build().unwrap()
    };
    let (one, two) = (client(), client());
    let held = one.mutex("k").lock().unwrap();
    held.on_lost(|_| {});
    let signal = held.lost_signal();
    let waiting = two.mutex("k");
    let waiter = Task::start_blocked(move || waiting.lock().unwrap());
    memory.advance(secs(15));
    recorder.wait_for(1, What::Renewed, "k");
    drop(held);
    let next = waiter.within(SOON, "the grant");
    memory.flush();
    memory.advance(secs(31));
    drop((next, signal));
    let _ticket = two.mutex("ticket").lock().unwrap().into_ticket().unwrap();
    two.shutdown(SOON).unwrap();
    Arc::downgrade(&recorder)
}

#[test]
fn many_threads_contend_on_one_memory_store() {
    let memory = MemoryStore::new();
    let witness = Arc::new(Witness::default());
    let clients = [(); 4].map(|()| memory.client().unwrap());
    let threads: Vec<_> = clients
        .iter()
        .cycle()
        .take(64)
        .map(|client| witness.start_turns(client.mutex("k"), 5))
        .collect();
    for thread in threads {
        thread.within(4 * SOON, "all grants");
    }
    assert_eq!(witness.entries(), 64 * 5);
}

#[test]
fn memory_store_refuses_transactions() {
    let client = Client::memory().unwrap();
    let guard = client.mutex("k").lock().unwrap();
    let refused = guard.transaction(|_, _| Ok(())).unwrap_err();
    assert_eq!(refused.kind(), leasehold::ErrorKind::Unsupported);
    guard.unlock().unwrap();
}

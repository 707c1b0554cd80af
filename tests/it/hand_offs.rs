//! Hand-offs: the lease of a dropped guard passes to the next waiting thread of the same client, without
//! Redis, as often and for as long as the client's settings allow.

use std::sync::{Arc, Mutex as Shared};
use std::time::{Duration, Instant};

use leasehold::crossbeam_channel::TryRecvError;
use leasehold::{Builder, Client, LossReason, Mutex, MutexGuard};
use leasehold_testbed::{Server, eventually};

use crate::steady::steady;
use crate::support::{
    LONG_TTL, Recorder, SOON, Task, What, Witness, ask, in_redis, lease_of, lost_within, millis,
    reads, script_calls, secs, server, tracked, wait_for_queue,
};

/// The limit for all work of a test, on a busy machine.
const WORK: Duration = Duration::from_secs(120);

/// The builder of a client whose hand-offs end by their number only.
fn builder(server: &Server) -> Builder {
    let builder = steady(&server.url()).ttl(LONG_TTL);
    builder.max_hand_offs(1023).hand_off_time(WORK)
}

/// One grant, as its holder saw it.
#[derive(Clone, Debug)]
struct Grant {
    lease: String,
    token: u64,
}

impl Grant {
    fn of(server: &Server, guard: &MutexGuard) -> Self {
        let lease = lease_of(server, guard.key());
        Self {
            lease: lease.expect("the lock is held"),
            token: guard.fencing_token(),
        }
    }
}

/// Locks the first mutex, starts threads that wait for the others in their order, and releases, as each thread does in
/// its turn. Returns what each holder saw.
fn pass_through(server: &Arc<Server>, mutexes: Vec<Mutex>, let_go: fn(MutexGuard)) -> Vec<Grant> {
    let mut mutexes = mutexes.into_iter();
    let first = mutexes.next().expect("the first holder").lock().unwrap();
    let grants = Arc::new(Shared::new(vec![Grant::of(server, &first)]));
    let tasks: Vec<_> = mutexes
        .map(|mutex| {
            let (server, grants) = (Arc::clone(server), Arc::clone(&grants));
            Task::start_blocked(move || {
                let guard = mutex.lock().unwrap();
                let grant = Grant::of(&server, &guard);
                grants.lock().unwrap().push(grant);
                let_go(guard);
            })
        })
        .collect();
    let_go(first);
    for task in tasks {
        task.within(WORK, "a grant");
    }
    let grants = grants.lock().unwrap().clone();
    assert!(grants.is_sorted_by(|one, next| one.token < next.token));
    grants
}

fn unlock(guard: MutexGuard) {
    guard.unlock().unwrap();
}

/// The numbers of consecutive grants with the same lease.
fn runs(grants: &[Grant]) -> Vec<usize> {
    grants
        .chunk_by(|one, next| one.lease == next.lease)
        .map(<[Grant]>::len)
        .collect()
}

#[test]
fn a_dropped_guard_hands_its_lock_off() {
    let server = Arc::new(server());
    let client = builder(&server).build().unwrap();
    let grants = pass_through(&server, vec![client.mutex("k"); 8], drop);
    assert_eq!(runs(&grants), [8], "{grants:?}");
    let first = grants[0].token;
    let tokens: Vec<u64> = grants.iter().map(|grant| grant.token - first).collect();
    assert_eq!(tokens, (0..8).collect::<Vec<_>>());
}

#[test]
fn unlock_hands_no_lock_off() {
    let server = Arc::new(server());
    let client = builder(&server).build().unwrap();
    let grants = pass_through(&server, vec![client.mutex("k"); 8], unlock);
    assert_eq!(runs(&grants), [1; 8], "{grants:?}");
}

#[test]
fn a_closure_hands_its_lock_off() {
    let server = Arc::new(server());
    let client = builder(&server).build().unwrap();
    let held = client.mutex("k").lock().unwrap();
    let tasks: Vec<_> = (0..4)
        .map(|n| {
            let (server, mutex) = (Arc::clone(&server), client.mutex("k"));
            Task::start_blocked(move || match n % 2 {
                0 => mutex.with(|guard| Grant::of(&server, guard)).unwrap(),
                _ => {
                    let mutex = mutex.reentrant();
                    mutex.with(|guard| Grant::of(&server, guard)).unwrap()
                }
            })
        })
        .collect();
    unlock(held);
    let grants: Vec<Grant> = tasks
        .into_iter()
        .map(|task| task.within(WORK, "a grant"))
        .collect();
    assert_eq!(runs(&grants), [4], "{grants:?}");
    // Nobody waits any more, so the last closure has released the lock in Redis.
    assert_eq!(lease_of(&server, "k"), None);
}

#[test]
fn a_closure_that_lost_its_lock_hands_nothing_off() {
    let server = Arc::new(server());
    let client = builder(&server).build().unwrap();
    let (waiting, next) = (client.mutex("k"), client.mutex("k"));
    let lost = waiting.with(|guard| {
        let next = Task::start_blocked(move || next.with(MutexGuard::fencing_token));
        ask(&server, &["DEL", &in_redis("k")]);
        guard.lost_signal().recv_timeout(SOON).unwrap();
        (next, guard.fencing_token())
    });
    assert!(
        lost.as_ref().is_err_and(leasehold::Error::is_lease_lost),
        "{:?}",
        lost.err()
    );
}

#[test]
fn disabled_hand_offs_release_in_redis() {
    let server = Arc::new(server());
    let by_count = builder(&server).max_hand_offs(0).build().unwrap();
    let by_time = builder(&server).hand_off_time(Duration::ZERO);
    for client in [by_count, by_time.build().unwrap()] {
        let grants = pass_through(&server, vec![client.mutex("k"); 6], drop);
        assert_eq!(runs(&grants), [1; 6], "{grants:?}");
    }
}

#[test]
fn hand_offs_of_a_lease_are_limited() {
    let server = Arc::new(server());
    let client = builder(&server).max_hand_offs(3).build().unwrap();
    let grants = pass_through(&server, vec![client.mutex("k"); 13], drop);
    // Each lease is granted once and passed on three times.
    assert_eq!(runs(&grants), [4, 4, 4, 1], "{grants:?}");
}

#[test]
fn a_lock_is_handed_off_to_equal_options_only() {
    let server = Arc::new(server());
    let client = builder(&server).build().unwrap();
    let plain = || client.mutex("k");
    let others = [
        plain().ttl(secs(50)),
        plain().fixed_ttl(secs(50)),
        plain().fixed_ttl(LONG_TTL),
        plain().max_hold(secs(100)),
    ];
    for other in others {
        let mutexes = vec![plain(), other.clone(), plain(), plain()];
        let grants = pass_through(&server, mutexes, drop);
        assert_eq!(runs(&grants), [1, 1, 2], "{other:?}: {grants:?}");
    }
    let equal = plain().ttl(LONG_TTL);
    let grants = pass_through(&server, vec![plain(), equal.clone(), plain()], drop);
    assert_eq!(runs(&grants), [3], "the client's own options, written out");
    let held = plain().max_hold(secs(100));
    let grants = pass_through(&server, vec![held.clone(), held], drop);
    assert_eq!(runs(&grants), [2], "equal options of the lock's own");
}

#[test]
fn a_lock_without_renewal_is_never_handed_off() {
    let server = Arc::new(server());
    let client = builder(&server).build().unwrap();
    for mutex in [
        client.mutex("k").fixed_ttl(secs(50)),
        client.mutex("k").fixed_ttl(LONG_TTL),
    ] {
        let grants = pass_through(&server, vec![mutex.clone(); 4], drop);
        assert_eq!(runs(&grants), [1; 4], "{mutex:?}: {grants:?}");
    }
}

/// `client` holds a lock. Another client waits for the lock, and then threads of `client` wait behind the other client.
/// Returns the order of the grants, with `None` for the other client.
fn turns_of(server: &Arc<Server>, client: &Client, threads: usize) -> Vec<Option<usize>> {
    let other = steady(&server.url()).build().unwrap();
    let order = Arc::new(Shared::new(Vec::new()));
    let enter = |mutex: Mutex, who: Option<usize>| {
        let order = Arc::clone(&order);
        move || {
            let guard = mutex.lock().unwrap();
            order.lock().unwrap().push(who);
            drop(guard);
        }
    };
    let held = client.mutex("k").lock().unwrap();
    let mut tasks = vec![Task::start(enter(other.mutex("k"), None))];
    wait_for_queue(server, "k", 1);
    for n in 0..threads {
        let work = enter(client.mutex("k"), Some(n));
        tasks.push(Task::start_blocked(work));
    }
    drop(held);
    for task in tasks {
        task.within(WORK, "a grant");
    }
    let order = order.lock().unwrap();
    let own: Vec<usize> = order.iter().copied().flatten().collect();
    assert_eq!(own, (0..threads).collect::<Vec<_>>(), "in their order");
    order.clone()
}

#[test]
fn another_client_follows_after_enough_hand_offs() {
    let server = Arc::new(server());
    for hand_offs in [0, 1, 8] {
        let client = builder(&server).max_hand_offs(hand_offs).build().unwrap();
        let turns = turns_of(&server, &client, 12);
        let others = turns.iter().position(Option::is_none);
        assert_eq!(others, Some(hand_offs as usize), "{turns:?}");
    }
}

#[test]
fn another_client_follows_after_enough_hand_off_time() {
    let server = Arc::new(server());
    // The first release comes after more than 1 ms: before it, `turns_of` waits until the other client is queued.
    let client = builder(&server).hand_off_time(millis(1)).build().unwrap();
    let turns = turns_of(&server, &client, 12);
    assert_eq!(turns[0], None, "{turns:?}");
}

#[test]
fn losses_after_a_hand_off_reach_new_holders() {
    let server = server();
    let client = builder(&server).build().unwrap();
    // The key is tracked before the hand-off, or it is not tracked yet.
    for held_for_long in [true, false] {
        let before = client.mutex("k").lock().unwrap();
        let silent = before.lost_signal();
        let mutex = client.mutex("k");
        let waiter = Task::start_blocked(move || mutex.lock().unwrap());
        if held_for_long {
            assert!(eventually(SOON, || tracked(&server) > 0));
        }
        let token = before.fencing_token();
        drop(before);
        let guard = waiter.within(SOON, "the grant");
        assert_eq!(guard.fencing_token(), token + 1, "passed on");
        ask(&server, &["DEL", &in_redis("k")]);
        let loss = lost_within(SOON, &guard.lost_signal());
        assert_eq!(loss, LossReason::Deleted);
        assert_eq!(silent.try_recv(), Err(TryRecvError::Empty));
        guard.unlock().unwrap_err();
    }
}

#[test]
fn a_lost_lock_is_not_handed_off() {
    let server = server();
    let client = builder(&server).build().unwrap();
    let held = client.mutex("k").lock().unwrap();
    let mutex = client.mutex("k");
    let waiter = Task::start_blocked(move || mutex.lock().unwrap());
    ask(&server, &["DEL", &in_redis("k")]);
    assert_eq!(lost_within(SOON, &held.lost_signal()), LossReason::Deleted);
    let token = held.fencing_token();
    drop(held);
    let guard = waiter.within(SOON, "the grant");
    assert!(guard.fencing_token() > token + 1024, "a new grant");
    guard.unlock().unwrap();
}

#[test]
fn a_lease_is_renewed_after_any_hand_offs() {
    let (server, recorder) = (server(), Recorder::new());
    let ttl = secs(3);
    let builder = builder(&server)
        .ttl(ttl)
        .event_handler(Arc::clone(&recorder));
    let client = builder.build().unwrap();
    let witness = Arc::new(Witness::default());
    let start = Instant::now();
    let tasks: Vec<_> = (0..3)
        .map(|_| {
            let (mutex, witness) = (client.mutex("k"), Arc::clone(&witness));
            Task::start(move || {
                let mut handed = 0;
                while start.elapsed() < 2 * ttl {
                    let guard = mutex.lock().unwrap();
                    let inside = witness.enter(&guard);
                    handed += usize::from(guard.fencing_token() % 1024 > 0);
                    std::thread::sleep(millis(2));
                    guard.check().unwrap();
                    drop(inside);
                }
                handed
            })
        })
        .collect();
    let handed: usize = tasks
        .into_iter()
        .map(|task| task.within(WORK, "all grants"))
        .sum();
    assert!(handed > 50, "passed on {handed} times");
    let guard = client.mutex("k").lock().unwrap();
    let lost = guard.lost_signal().recv_timeout(3 * ttl / 2);
    assert!(lost.is_err(), "{lost:?}");
    assert!(recorder.count(What::Renewed, "k") > 0);
    assert_eq!(recorder.count(What::Lost, "k"), 0);
    guard.unlock().unwrap();
}

#[test]
fn locks_handed_off_late_are_renewed_in_time() {
    let (server, recorder) = (server(), Recorder::new());
    let ttl = secs(3);
    let builder = builder(&server)
        .ttl(ttl)
        .event_handler(Arc::clone(&recorder));
    let client = builder.build().unwrap();
    let mut held = client.mutex("k").lock().unwrap();
    for _ in 0..4 {
        let mutex = client.mutex("k");
        let waiter = Task::start_blocked(move || mutex.lock().unwrap());
        // The hand-off comes close to the renewal, before or after it.
        std::thread::sleep(ttl * 30 / 100);
        drop(held);
        held = waiter.within(SOON, "the grant");
        held.check().unwrap();
    }
    let lost = held.lost_signal().recv_timeout(3 * ttl / 2);
    assert!(lost.is_err(), "{lost:?}");
    assert_eq!(recorder.count(What::Lost, "k"), 0);
    held.unlock().unwrap();
}

#[test]
fn max_hold_counts_from_the_hand_off() {
    let server = server();
    let client = builder(&server).ttl(secs(3)).build().unwrap();
    let hold = secs(4);
    let mutex = client.mutex("k").max_hold(hold);
    let before = mutex.lock().unwrap();
    let waiter = Task::start_blocked(move || mutex.lock().unwrap());
    std::thread::sleep(hold / 2);
    let let_go = Instant::now();
    drop(before);
    let guard = waiter.within(SOON, "the grant");
    let reason = lost_within(SOON, &guard.lost_signal());
    assert_eq!(reason, LossReason::MaxHold);
    let held = let_go.elapsed();
    assert!(held > hold * 9 / 10, "held for {held:?} only");
}

#[test]
fn local_waiting_sends_no_request() {
    let server = server();
    let client = builder(&server).build().unwrap();
    let held = client.mutex("k").lock().unwrap();
    assert!(
        eventually(SOON, || tracked(&server) == 1),
        "the lock is tracked"
    );
    let asked = || (script_calls(&server), reads(&server));
    let before = asked();
    let mutex = client.mutex("k");
    let waiter = Task::start_blocked(move || mutex.lock().unwrap());
    let mutex = client.mutex("k");
    let hasty = Task::start(move || mutex.try_lock_for(millis(300)).unwrap().is_none());
    assert!(hasty.within(SOON, "the deadline"));
    assert_eq!(asked(), before);
    drop(held);
    let guard = waiter.within(SOON, "the grant");
    assert_eq!(script_calls(&server), before.0, "passed on");
    guard.unlock().unwrap();
    assert_eq!(script_calls(&server), before.0 + 1);
}

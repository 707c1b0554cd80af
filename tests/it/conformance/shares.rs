//! Permits of a semaphore, the locks that share their key, and locks with a shortest hold.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use leasehold::crossbeam_channel::bounded;
use leasehold::{Client, ErrorKind, HolderInfo, HolderKind, LossReason, Semaphore};
use leasehold_testbed::eventually;

use crate::conformance::backend::Backend;
use crate::support::{Recorder, SOON, Task, What, lost_within, secs};

/// Waits until the queue of the semaphore has `of` clients.
#[track_caller]
fn wait_for_queue(semaphore: &Semaphore, of: usize) {
    let waiting = || semaphore.inspect().unwrap().clients_waiting();
    assert!(eventually(SOON, || waiting() == of), "{} queued", waiting());
}

/// Acquires a permit on another thread.
fn wait_for(semaphore: &Semaphore) -> Task<leasehold::SemaphorePermit> {
    let semaphore = semaphore.clone();
    Task::start(move || semaphore.acquire().unwrap())
}

fn with_ttl(backend: &dyn Backend) -> Client {
    backend.builder().ttl(backend.ttl()).build().unwrap()
}

pub fn a_semaphore_admits_its_number_and_no_more(backend: &dyn Backend) {
    const LIMIT: usize = 3;
    let inside = Arc::new(AtomicUsize::new(0));
    let most = Arc::new(AtomicUsize::new(0));
    let clients: Vec<_> = (0..3).map(|_| backend.client()).collect();
    let tasks: Vec<_> = clients
        .iter()
        .cycle()
        .take(9)
        .map(|client| {
            let semaphore = client.semaphore("k", LIMIT as u32);
            let (inside, most) = (Arc::clone(&inside), Arc::clone(&most));
            Task::start(move || {
                for _ in 0..10 {
                    let permit = semaphore.acquire().unwrap();
                    let now = inside.fetch_add(1, Ordering::SeqCst) + 1;
                    most.fetch_max(now, Ordering::SeqCst);
                    std::thread::yield_now();
                    inside.fetch_sub(1, Ordering::SeqCst);
                    permit.unlock().unwrap();
                }
            })
        })
        .collect();
    for task in tasks {
        task.within(4 * SOON, "its turns");
    }
    assert!(most.load(Ordering::SeqCst) <= LIMIT);
    // One client holds all permits at the same time.
    let semaphore = clients[0].semaphore("k", LIMIT as u32);
    let permits: Vec<_> = (0..LIMIT).map(|_| semaphore.acquire().unwrap()).collect();
    assert!(
        clients[1]
            .semaphore("k", LIMIT as u32)
            .try_acquire()
            .unwrap()
            .is_none()
    );
    assert_eq!(semaphore.inspect().unwrap().taken(), LIMIT as u32);
    // They come back one by one.
    for (free, permit) in (1..).zip(permits) {
        permit.unlock().unwrap();
        assert_eq!(semaphore.inspect().unwrap().available(), free);
    }
}

pub fn permits_are_granted_together_or_not_at_all(backend: &dyn Backend) {
    let (one, two) = (backend.client(), backend.client());
    let (three, two) = (
        one.semaphore("k", 4).weight(3),
        two.semaphore("k", 4).weight(2),
    );
    let held = three.acquire().unwrap();
    assert!(two.try_acquire().unwrap().is_none());
    assert_eq!(two.inspect().unwrap().available(), 1);
    let waiter = wait_for(&two);
    wait_for_queue(&two, 1);
    held.unlock().unwrap();
    let granted = waiter.within(SOON, "the grant");
    assert_eq!(granted.weight(), 2);
    let found = two.inspect().unwrap();
    assert_eq!((found.taken(), found.available()), (2, 2));
}

pub fn small_requests_wait_behind_a_big_one(backend: &dyn Backend) {
    let clients = [(); 3].map(|()| backend.client());
    let [small, big, last] = [(0, 1), (1, 4), (2, 1)]
        .map(|(client, weight): (usize, u32)| clients[client].semaphore("k", 4).weight(weight));
    let held = small.acquire().unwrap();
    let big_waits = wait_for(&big);
    wait_for_queue(&small, 1);
    // Three permits are free, but a waiter wants four.
    assert!(last.try_acquire().unwrap().is_none());
    assert!(small.try_acquire().unwrap().is_none());
    let last_waits = wait_for(&last);
    wait_for_queue(&small, 2);
    held.unlock().unwrap();
    let all = big_waits.within(SOON, "the grant of four");
    assert!(!last_waits.is_done());
    all.unlock().unwrap();
    drop(last_waits.within(SOON, "the last grant"));
}

pub fn the_limit_belongs_to_the_caller(backend: &dyn Backend) {
    let recorder = Recorder::new();
    let events = backend.builder().event_handler(Arc::clone(&recorder));
    let (one, two) = (backend.client(), events.build().unwrap());
    let _held = [(); 2].map(|()| one.semaphore("k", 2).acquire().unwrap());
    // A raised limit has an effect at once; a lowered one takes nothing away.
    let more = two.semaphore("k", 3).try_acquire().unwrap();
    assert!(more.is_some());
    // The event compares the limit with that of one share, the newest or one of the same millisecond.
    assert!(two.semaphore("k", 1).try_acquire().unwrap().is_none());
    assert_eq!(recorder.count(What::LimitsDiffer, "k"), 1);
    let info = two.semaphore("k", 1).inspect().unwrap();
    assert_eq!((info.taken(), info.available()), (3, 0));
    let limit_of = |holder: &HolderInfo| match holder.kind() {
        HolderKind::Permits { limit, .. } => limit,
        other => panic!("{other:?}"),
    };
    let mut limits: Vec<u32> = info.holders().iter().map(limit_of).collect();
    limits.sort_unstable();
    assert_eq!(limits, [2, 2, 3]);
}

pub fn impossible_permits_are_refused(backend: &dyn Backend) {
    let client = backend.client();
    let out_of_bounds = [
        (0, 1),
        (1, 0),
        (1, 2),
        (10_000, 1_001),
        (10_001, 1),
        (1 << 31, 1),
    ];
    for (limit, weight) in out_of_bounds {
        let semaphore = client.semaphore("k", limit).weight(weight);
        let error = semaphore.try_acquire().map(drop).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidConfig, "{limit} {weight}");
    }
    let long = client.semaphore("k".repeat(1_000), 1);
    assert!(long.try_acquire().unwrap().is_some());
    let most = client.semaphore("k", 10_000).weight(1_000);
    let permits = [(); 10].map(|()| most.try_acquire().unwrap().unwrap());
    assert!(
        client
            .semaphore("k", 10_000)
            .try_acquire()
            .unwrap()
            .is_none()
    );
    drop(permits);
}

pub fn permits_are_renewed_each_for_itself(backend: &dyn Backend) {
    let (one, two) = (with_ttl(backend), backend.client());
    let renewed = one.semaphore("k", 2).acquire().unwrap();
    let fixed = one
        .semaphore("k", 2)
        .fixed_ttl(backend.ttl())
        .acquire()
        .unwrap();
    let lost = fixed.lost_signal();
    backend.pass(backend.ttl() + backend.ttl() / 10);
    renewed.check().unwrap();
    assert_eq!(lost_within(SOON, &lost), LossReason::Expired);
    // The expired permit is free, and its release frees no other.
    let next = two.semaphore("k", 2).try_acquire_for(SOON).unwrap();
    assert!(fixed.unlock().unwrap_err().is_lease_lost());
    assert!(two.semaphore("k", 2).try_acquire().unwrap().is_none());
    renewed.unlock().unwrap();
    next.unwrap().unlock().unwrap();
}

pub fn a_crashed_holders_permit_passes_to_a_waiter(backend: &dyn Backend) {
    let (crashes, lives, waits) = (with_ttl(backend), with_ttl(backend), backend.client());
    // For the store this is a crash: no renewal and no release.
    std::mem::forget(crashes.semaphore("k", 2).acquire().unwrap());
    let held = lives.semaphore("k", 2).acquire().unwrap();
    crashes.shutdown(SOON).unwrap();
    let waiter = wait_for(&waits.semaphore("k", 2));
    wait_for_queue(&lives.semaphore("k", 2), 1);
    backend.pass(backend.ttl() + backend.ttl() / 10);
    let next = waiter.within(SOON, "the permit of the crashed client");
    held.unlock().unwrap();
    next.unlock().unwrap();
}

pub fn lost_permits_are_reported(backend: &dyn Backend) {
    let recorder = Recorder::new();
    let events = backend.builder().event_handler(Arc::clone(&recorder));
    let one = events.ttl(backend.ttl()).build().unwrap();
    let permits = [(); 2].map(|()| one.semaphore("k", 2).acquire().unwrap());
    let signals = permits.each_ref().map(|permit| permit.lost_signal());
    backend.forget();
    backend.pass(backend.ttl() / 2);
    for (permit, signal) in permits.iter().zip(&signals) {
        assert_eq!(lost_within(SOON, signal), LossReason::Deleted);
        assert!(permit.check().unwrap_err().is_lease_lost());
    }
    assert!(eventually(SOON, || recorder.count(What::Lost, "k") == 2));
}

pub fn a_cancelled_wait_for_permits_leaves_nothing(backend: &dyn Backend) {
    let (one, two) = (backend.client(), backend.client());
    let held = one.semaphore("k", 1).acquire().unwrap();
    let (stop, stopped) = bounded(0);
    let semaphore = two.semaphore("k", 1).cancelled_by(stopped);
    let waiter = Task::start(move || semaphore.acquire().map(drop).unwrap_err());
    wait_for_queue(&one.semaphore("k", 1), 1);
    drop(stop);
    let error = waiter.within(SOON, "the end of its wait");
    assert_eq!(error.kind(), ErrorKind::Cancelled);
    wait_for_queue(&one.semaphore("k", 1), 0);
    held.unlock().unwrap();
    assert!(two.semaphore("k", 1).try_acquire().unwrap().is_some());
}

pub fn a_waiter_that_leaves_lets_others_in(backend: &dyn Backend) {
    let clients = [(); 3].map(|()| backend.client());
    let [small, big, last] = [(0, 1), (1, 2), (2, 1)]
        .map(|(client, weight): (usize, u32)| clients[client].semaphore("k", 2).weight(weight));
    let _held = small.acquire().unwrap();
    let (stop, stopped) = bounded(0);
    let leaves = big.clone().cancelled_by(stopped);
    let waiter = Task::start(move || leaves.acquire().map(drop).unwrap_err());
    wait_for_queue(&small, 1);
    let next = wait_for(&last);
    wait_for_queue(&small, 2);
    drop(stop);
    drop(waiter.within(SOON, "the end of its wait"));
    drop(next.within(SOON, "the permit behind it"));
}

pub fn a_mutex_excludes_permits(backend: &dyn Backend) {
    let (one, two) = (backend.client(), backend.client());
    let semaphore = one.semaphore("k", 2);
    let permits = [(); 2].map(|()| semaphore.acquire().unwrap());
    assert!(two.mutex("k").try_lock().unwrap().is_none());
    // Each inspection lists the holders, whatever their kind.
    let found = two.mutex("k").inspect().unwrap().unwrap();
    let mut shown: Vec<String> = found.holders().iter().map(HolderInfo::id).collect();
    let mut held = permits.each_ref().map(|permit| permit.id()).to_vec();
    shown.sort_unstable();
    held.sort_unstable();
    assert_eq!(shown, held);
    let error = two.mutex("k").force_unlock().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Protocol);
    let found = two.rw_lock("k").inspect().unwrap();
    assert_eq!((found.holders().len(), found.readers().len()), (2, 0));
    assert!(found.writer().is_none());
    let mutex = two.mutex("k");
    let waiter = Task::start(move || mutex.lock().unwrap());
    wait_for_queue(&semaphore, 1);
    for permit in permits {
        assert!(!waiter.is_done());
        permit.unlock().unwrap();
    }
    let guard = waiter.within(SOON, "the lock");
    assert!(semaphore.try_acquire().unwrap().is_none());
    let found = semaphore.inspect().unwrap();
    assert_eq!(found.holders()[0].kind(), HolderKind::Exclusive);
    assert_eq!((found.taken(), found.available()), (2, 0));
    let waiter = wait_for(&semaphore);
    let found = || two.mutex("k").inspect().unwrap();
    assert!(eventually(SOON, || found()
        .is_some_and(|found| found.clients_waiting() == 1)));
    guard.unlock().unwrap();
    drop(waiter.within(SOON, "the permit"));
}

pub fn force_unlock_takes_the_permits_of_one_holder(backend: &dyn Backend) {
    let (one, two, operator) = (backend.client(), backend.client(), backend.client());
    let stuck = one.semaphore("k", 3).weight(2).acquire().unwrap();
    let kept = two.semaphore("k", 3).acquire().unwrap();
    let semaphore = operator.semaphore("k", 3);
    let signal = stuck.lost_signal();
    let found = semaphore.inspect().unwrap();
    let holder = found
        .holders()
        .iter()
        .find(|holder| holder.id() == stuck.id());
    let holder = holder.unwrap();
    let kind = HolderKind::Permits {
        weight: 2,
        limit: 3,
    };
    assert_eq!((holder.holder(), holder.kind()), (one.holder_id(), kind));
    assert!(semaphore.force_unlock(holder).unwrap());
    assert!(!semaphore.force_unlock(holder).unwrap());
    let by = operator.holder_id().clone();
    let reason = lost_within(SOON, &signal);
    // A client that has just connected for notifications asks for its shares, and may find the loss before the message.
    let expected = [LossReason::ForceUnlocked { by }, LossReason::Deleted];
    assert!(expected.contains(&reason), "{reason}");
    assert_eq!(semaphore.inspect().unwrap().available(), 2);
    kept.unlock().unwrap();
}

pub fn min_hold_limits_how_often_work_starts(backend: &dyn Backend) {
    let (one, two) = (backend.client(), backend.client());
    let rest = backend.ttl();
    let limit = |client: &Client| client.semaphore("calls", 2).min_hold(rest);
    let once = |client: &Client| client.mutex("once").min_hold(rest);
    for _ in 0..2 {
        limit(&one).acquire().unwrap().unlock().unwrap();
    }
    once(&one).with(|_| ()).unwrap();
    assert!(limit(&two).try_acquire().unwrap().is_none());
    assert!(once(&two).try_lock().unwrap().is_none());
    // Other threads of the client wait, too: such a lock is not handed off.
    assert!(once(&one).try_lock().unwrap().is_none());
    let (mutex, waiter) = (once(&two), wait_for(&limit(&two).weight(2)));
    let lock = Task::start(move || mutex.lock().map(drop).unwrap());
    wait_for_queue(&limit(&one), 1);
    // A waiter behind starts in the window after the next one.
    let last = wait_for(&limit(&one));
    wait_for_queue(&limit(&one), 2);
    assert!(!waiter.is_done() && !lock.is_done());
    backend.pass(rest + rest / 10);
    drop(waiter.within(SOON, "the permits of the next window"));
    lock.within(SOON, "the lock after its rest");
    assert!(!last.is_done());
    backend.pass(rest + rest / 10);
    drop(last.within(SOON, "a permit of the last window"));
}

pub fn min_hold_outlasts_a_crash(backend: &dyn Backend) {
    let (one, two) = (with_ttl(backend), backend.client());
    let rest = 2 * backend.ttl();
    std::mem::forget(one.mutex("once").min_hold(rest).lock().unwrap());
    std::mem::forget(one.semaphore("k", 1).min_hold(rest).acquire().unwrap());
    one.shutdown(SOON).unwrap();
    backend.pass(rest - backend.ttl() / 2);
    assert!(two.mutex("once").try_lock().unwrap().is_none());
    assert!(two.semaphore("k", 1).try_acquire().unwrap().is_none());
    backend.pass(backend.ttl() / 2 + backend.ttl() / 10);
    assert!(two.mutex("once").try_lock_for(SOON).unwrap().is_some());
    assert!(
        two.semaphore("k", 1)
            .try_acquire_for(SOON)
            .unwrap()
            .is_some()
    );
}

pub fn a_quorum_has_no_shares(backend: &dyn Backend) {
    let client = backend.client();
    let semaphore = client.semaphore("k", 2);
    for error in [
        semaphore.try_acquire().map(drop).unwrap_err(),
        semaphore.inspect().map(drop).unwrap_err(),
        client
            .mutex("k")
            .min_hold(secs(1))
            .lock()
            .map(drop)
            .unwrap_err(),
        client.rw_lock("k").try_read().map(drop).unwrap_err(),
        client.rw_lock("k").write().map(drop).unwrap_err(),
        client.rw_lock("k").inspect().map(drop).unwrap_err(),
    ] {
        assert_eq!(error.kind(), ErrorKind::Unsupported);
    }
    let text = semaphore.acquire().map(drop).unwrap_err().to_string();
    assert!(text.contains("one mutex for each permit"), "{text}");
    assert!(client.mutex("k").try_lock().unwrap().is_some());
}

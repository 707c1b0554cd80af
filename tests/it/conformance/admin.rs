//! Administration of a lock: who holds it, who waits, how to take it away and how to pass it to another
//! process.

use leasehold::{ErrorKind, FoundLock, HolderKind, LossReason};
use leasehold_testbed::eventually;

use crate::conformance::backend::Backend;
use crate::conformance::renewals::{assert_renewed, long_ttl};
use crate::support::{LONG_TTL, SOON, Task, lost_within};

pub fn inspect_names_the_holder(backend: &dyn Backend) {
    let (one, two) = (backend.client(), backend.client());
    let mutex = two.mutex("k");
    assert_eq!(mutex.inspect().unwrap(), None);
    assert!(!mutex.is_locked().unwrap());
    let guard = one.mutex("k").lock().unwrap();
    let found = mutex.inspect().unwrap().unwrap();
    assert_eq!(found.holder(), one.holder_id());
    let token = guard.fencing_token();
    assert!(found.fencing_token().is_none_or(|stored| stored == token));
    assert!(found.expires_in().is_some_and(|left| left <= LONG_TTL));
    assert_eq!(found.clients_waiting(), 0);
    guard.unlock().unwrap();
    assert_eq!(mutex.inspect().unwrap(), None);
}

pub fn inspect_names_a_crashed_holder(backend: &dyn Backend) {
    let (one, two) = (backend.client(), backend.client());
    let name = one.holder_id().clone();
    std::mem::forget(one.mutex("k").lock().unwrap());
    one.shutdown(SOON).unwrap();
    drop(one);
    let found = two.mutex("k").inspect().unwrap().unwrap();
    assert_eq!(*found.holder(), name);
    let process = format!("/{}/", std::process::id());
    assert!(name.as_str().contains(&process), "{name}");
}

pub fn held_locks_lists_the_clients_locks(backend: &dyn Backend) {
    let (one, two) = (backend.client(), backend.client());
    let first = one.mutex("first").lock().unwrap();
    let second = one.mutex("second").fixed_ttl(backend.ttl()).lock().unwrap();
    let keys = || -> Vec<String> {
        let held = one.held_locks();
        held.iter().map(|held| held.key().to_owned()).collect()
    };
    assert_eq!(keys(), ["first", "second"]);
    assert_eq!(one.held_locks()[0].fencing_token(), first.fencing_token());
    assert!(two.held_locks().is_empty());
    backend.pass(backend.ttl());
    assert_eq!(keys(), ["first"], "the other is lost");
    drop(second);
    first.unlock().unwrap();
    assert!(keys().is_empty());
}

pub fn locks_lists_the_locks_of_all_clients(backend: &dyn Backend) {
    let (one, two) = (backend.client(), backend.client());
    let _guards = ["a:1", "a:2", "b:1"].map(|key| one.mutex(key).lock().unwrap());
    let _reader = two.rw_lock("a:3").read().unwrap();
    let _permits = two.semaphore("a:4", 7).weight(3).acquire().unwrap();
    let value = two.fenced_value("a:5");
    value.write(1, "no lock").unwrap();
    let listed = |start: &str| -> Vec<FoundLock> {
        let mut found: Vec<_> = two.locks(start).map(|found| found.unwrap()).collect();
        found.sort_by(|one, other| one.key().cmp(other.key()));
        found
    };
    let found = listed("a:");
    let keys: Vec<&str> = found.iter().map(FoundLock::key).collect();
    assert_eq!(keys, ["a:1", "a:2", "a:3", "a:4"]);
    let kinds: Vec<_> = found
        .iter()
        .map(|lock| {
            let holder = &lock.info().holders()[0];
            (holder.kind(), holder.holder().clone(), lock.info().taken())
        })
        .collect();
    let (first, second) = (one.holder_id().clone(), two.holder_id().clone());
    let permits = HolderKind::Permits {
        weight: 3,
        limit: 7,
    };
    assert_eq!(
        kinds,
        [
            (HolderKind::Exclusive, first.clone(), 1),
            (HolderKind::Exclusive, first, 1),
            (HolderKind::Reader, second.clone(), 1),
            (permits, second, 3),
        ]
    );
    assert_eq!(listed("").len(), 5);
    assert!(listed("c").is_empty());
}

pub fn force_unlock_grants_the_next_waiter(backend: &dyn Backend) {
    let clients: Vec<_> = (0..3).map(|_| backend.client()).collect();
    let stuck = clients[0].mutex("k").lock().unwrap();
    let lost = stuck.lost_signal();
    let mutex = clients[1].mutex("k");
    let waiter = Task::start(move || mutex.lock().unwrap());
    let operator = clients[2].mutex("k");
    let queued = || operator.inspect().unwrap().unwrap().clients_waiting();
    assert!(eventually(SOON, || queued() == 1));
    backend.pass(std::time::Duration::from_millis(100));
    let taken_from = operator.force_unlock().unwrap().unwrap();
    assert_eq!(taken_from.holder(), clients[0].holder_id());
    let next = waiter.within(SOON, "the grant");
    assert!(next.fencing_token() > stuck.fencing_token());
    let by = clients[2].holder_id().clone();
    assert_eq!(lost_within(SOON, &lost), LossReason::ForceUnlocked { by });
    assert!(stuck.unlock().unwrap_err().is_lease_lost());
    next.unlock().unwrap();
    assert!(operator.force_unlock().unwrap().is_none(), "it is free");
}

pub fn a_transferred_lock_stays_held_until_adopted(backend: &dyn Backend) {
    let (one, two) = (backend.client(), backend.client());
    let guard = one.mutex("k").lock().unwrap();
    let token = guard.fencing_token();
    let silent = guard.lost_signal();
    let ticket = guard.into_ticket().unwrap();
    assert!(two.mutex("k").try_lock().unwrap().is_none());
    let guard = two.adopt(&ticket).unwrap();
    assert!(guard.fencing_token() >= token);
    let found = one.mutex("k").inspect().unwrap().unwrap();
    assert_eq!(found.holder(), two.holder_id());
    assert_eq!(one.adopt(&ticket).unwrap_err().kind(), ErrorKind::NotHeld);
    assert!(silent.try_recv().is_err(), "transferred, not lost");
    guard.unlock().unwrap();
    assert_eq!(two.adopt(&ticket).unwrap_err().kind(), ErrorKind::NotHeld);
}

pub fn an_adopted_lock_has_a_greater_token(backend: &dyn Backend) {
    let (one, two) = (backend.client(), backend.client());
    let guard = one.mutex("k").lock().unwrap();
    let token = guard.fencing_token();
    let adopted = two.adopt(&guard.into_ticket().unwrap()).unwrap();
    assert!(adopted.fencing_token() > token);
}

pub fn an_unused_ticket_ends_with_its_ttl(backend: &dyn Backend) {
    let ttl = backend.ttl();
    let (one, two) = (
        backend.builder().ttl(ttl).build().unwrap(),
        backend.client(),
    );
    let ticket = one.mutex("k").lock().unwrap().into_ticket().unwrap();
    backend.pass(ttl + ttl / 10);
    assert!(!two.mutex("k").is_locked().unwrap());
    assert_eq!(two.adopt(&ticket).unwrap_err().kind(), ErrorKind::NotHeld);
    let forged = two.adopt("lock:k").unwrap_err();
    assert_eq!(forged.kind(), ErrorKind::InvalidTicket);
}

pub fn an_adopted_lock_is_renewed_by_its_adopter(backend: &dyn Backend) {
    let (one, two) = (
        backend.builder().ttl(long_ttl(backend)).build().unwrap(),
        backend.client(),
    );
    let ticket = one.mutex("k").lock().unwrap().into_ticket().unwrap();
    drop(one);
    let guards = [two.adopt(&ticket).unwrap()];
    assert_renewed(backend, &guards);
    for guard in guards {
        guard.unlock().unwrap();
    }
}

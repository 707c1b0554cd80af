//! Readers and writers of a read-write lock.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Barrier};

use leasehold::crossbeam_channel::bounded;
use leasehold::{
    ErrorKind, HolderKind, LossReason, Released, RwLock, RwLockReadGuard, RwLockWriteGuard,
};
use leasehold_testbed::eventually;

use crate::conformance::backend::Backend;
use crate::support::{SOON, Task, lost_within, millis};

/// The locks of `N` clients with the same key.
fn locks<const N: usize>(backend: &dyn Backend) -> [RwLock; N] {
    [(); N].map(|()| backend.client().rw_lock("k"))
}

#[track_caller]
fn wait_for_queue(lock: &RwLock, of: usize) {
    let waiting = || lock.inspect().unwrap().clients_waiting();
    assert!(eventually(SOON, || waiting() == of), "{} queued", waiting());
}

fn start_read(lock: &RwLock) -> Task<RwLockReadGuard> {
    let lock = lock.clone();
    Task::start_blocked(move || lock.read().unwrap())
}

fn start_write(lock: &RwLock) -> Task<RwLockWriteGuard> {
    let lock = lock.clone();
    Task::start(move || lock.write().unwrap())
}

pub fn readers_share_and_writers_exclude(backend: &dyn Backend) {
    let [one, two, three] = locks(backend);
    let readers = [&one, &two].map(|lock| lock.read().unwrap());
    let mutex = backend.client().mutex("k");
    assert!(three.try_write().unwrap().is_none());
    assert!(mutex.try_lock().unwrap().is_none());
    let found = three.inspect().unwrap();
    assert_eq!((found.readers_in_total(), found.readers().len()), (2, 2));
    let mut shown: Vec<String> = found.readers().iter().map(|reader| reader.id()).collect();
    let mut held = readers.each_ref().map(|reader| reader.id()).to_vec();
    shown.sort_unstable();
    held.sort_unstable();
    assert_eq!(shown, held);
    let tokens = readers.each_ref().map(|reader| reader.fencing_token());
    for reader in readers {
        reader.unlock().unwrap();
    }
    let writer = three.try_write().unwrap().unwrap();
    assert!(tokens.iter().all(|token| *token < writer.fencing_token()));
    assert!(one.try_read().unwrap().is_none());
    assert!(two.try_write().unwrap().is_none());
    let found = one.inspect().unwrap();
    assert!(found.writer().is_some() && found.readers().is_empty());
    writer.unlock().unwrap();
    let guard = mutex.try_lock().unwrap().unwrap();
    assert!(one.try_read().unwrap().is_none());
    assert!(two.try_write().unwrap().is_none());
    guard.unlock().unwrap();
    one.with_read(|_| ()).unwrap();
}

pub fn a_waiting_writer_keeps_new_readers_out(backend: &dyn Backend) {
    let [one, two, three, four] = locks(backend);
    let readers = [&one, &two].map(|lock| lock.read().unwrap());
    let writer = start_write(&three);
    wait_for_queue(&four, 1);
    assert!(four.try_read().unwrap().is_none());
    let late = start_read(&four);
    wait_for_queue(&four, 2);
    // The writer enters after the last reader.
    for reader in readers {
        assert!(!writer.is_done());
        reader.unlock().unwrap();
    }
    let writer = writer.within(SOON, "the grant to the writer");
    assert!(!late.is_done());
    writer.unlock().unwrap();
    drop(late.within(SOON, "the grant to the late reader"));
}

/// Readers with different ttls end in both orders, without a release.
pub fn a_writer_enters_when_the_last_reader_ends(backend: &dyn Backend) {
    let clients = [(); 3].map(|()| backend.client());
    let ttl = backend.ttl();
    let waiting = [("a", [ttl, 2 * ttl]), ("b", [2 * ttl, ttl])].map(|(key, ttls)| {
        let [one, two, three] = clients.each_ref().map(|client| client.rw_lock(key));
        let readers = [one.fixed_ttl(ttls[0]), two.fixed_ttl(ttls[1])];
        let mut readers = readers.map(|lock| lock.read().unwrap());
        let writer = start_write(&three);
        wait_for_queue(&three, 1);
        if ttls[0] > ttl {
            readers.reverse();
        }
        (readers, writer)
    });
    backend.pass(ttl + ttl / 10);
    for ([ended, lasting], writer) in &waiting {
        lost_within(SOON, &ended.lost_signal());
        assert!(!lasting.is_lost() && !writer.is_done());
    }
    backend.pass(ttl);
    for (readers, writer) in waiting {
        let writer = writer.within(SOON, "the grant to the writer");
        assert!(readers.iter().all(|reader| reader.is_lost()));
        writer.unlock().unwrap();
    }
}

pub fn readers_behind_a_writer_enter_together(backend: &dyn Backend) {
    let [one, two, three] = locks(backend);
    let writer = one.write().unwrap();
    let waiting = [start_read(&two), start_read(&three), start_read(&two)];
    wait_for_queue(&one, 2);
    writer.unlock().unwrap();
    let readers = waiting.map(|reader| reader.within(SOON, "the grant to a reader"));
    assert_eq!(one.inspect().unwrap().readers_in_total(), 2);
    drop(readers);
    one.write().unwrap().unlock().unwrap();
}

pub fn a_writer_that_leaves_lets_readers_in(backend: &dyn Backend) {
    let [one, two, three] = locks(backend);
    let _reader = one.read().unwrap();
    let (stop, stopped) = bounded(0);
    let leaves = two.clone().cancelled_by(stopped);
    let writer = Task::start(move || leaves.write().map(drop).unwrap_err());
    wait_for_queue(&one, 1);
    let late = start_read(&three);
    wait_for_queue(&one, 2);
    drop(stop);
    let error = writer.within(SOON, "the end of the wait");
    assert_eq!(error.kind(), ErrorKind::Cancelled);
    drop(late.within(SOON, "the grant to the reader behind"));
}

pub fn readers_are_renewed_each_for_itself(backend: &dyn Backend) {
    const READERS: u32 = 50;
    let ttl = backend.ttl();
    let short = || backend.builder().ttl(ttl).build().unwrap();
    let (renewed, crashes, fixed) = (short(), short(), backend.client());
    // Readers of one client with different ttls share no lease.
    let reader = |n: u32| renewed.rw_lock("k").ttl(ttl + millis(n.into()));
    let readers = (0..READERS).map(|n| reader(n).read().unwrap());
    let readers: Vec<_> = readers.collect();
    // For the store this is a crash: no renewal and no release.
    std::mem::forget(crashes.rw_lock("k").read().unwrap());
    crashes.shutdown(SOON).unwrap();
    let ending = fixed.rw_lock("k").fixed_ttl(ttl).read().unwrap();
    let writer = fixed.rw_lock("w").fixed_ttl(ttl).write().unwrap();
    let lost = [ending.lost_signal(), writer.lost_signal()];
    assert_eq!(
        renewed.rw_lock("k").inspect().unwrap().readers_in_total(),
        READERS + 2
    );
    backend.pass(ttl + ttl / 10);
    for lost in lost {
        assert_eq!(lost_within(SOON, &lost), LossReason::Expired);
    }
    let other = backend.client();
    assert!(other.rw_lock("w").try_read_for(SOON).unwrap().is_some());
    let other = other.rw_lock("k");
    assert!(other.try_write().unwrap().is_none());
    assert_eq!(other.inspect().unwrap().readers_in_total(), READERS);
    for reader in readers {
        reader.check().unwrap();
        reader.unlock().unwrap();
    }
    assert!(other.try_write_for(SOON).unwrap().is_some());
}

pub fn guards_of_readers_share_a_lease(backend: &dyn Backend) {
    let [one, two] = locks(backend);
    let first = one.read().unwrap();
    let writer = start_write(&two);
    wait_for_queue(&one, 1);
    // A clone needs no turn behind the writer.
    let second = first.clone();
    assert_eq!(first.id(), second.id());
    assert!(matches!(first.unlock().unwrap(), Released::Shared));
    assert!(!writer.is_done());
    second.check().unwrap();
    assert!(second.unlock().unwrap().is_confirmed());
    writer
        .within(SOON, "the grant to the writer")
        .unlock()
        .unwrap();
    // Each guard learns of a loss.
    let first = one.read().unwrap();
    let guards = [first.clone(), first];
    let signals = guards.each_ref().map(|guard| guard.lost_signal());
    for reader in two.inspect().unwrap().readers() {
        assert!(two.force_unlock(reader).unwrap());
    }
    for (guard, signal) in guards.iter().zip(&signals) {
        lost_within(SOON, signal);
        assert!(guard.is_lost());
    }
}

pub fn force_unlock_takes_one_reader(backend: &dyn Backend) {
    let [one, two, operator] = locks(backend);
    let (stuck, kept) = (one.read().unwrap(), two.read().unwrap());
    let signal = stuck.lost_signal();
    let found = operator.inspect().unwrap();
    let reader = found
        .readers()
        .iter()
        .find(|reader| reader.id() == stuck.id());
    assert!(operator.force_unlock(reader.unwrap()).unwrap());
    lost_within(SOON, &signal);
    kept.check().unwrap();
    assert_eq!(operator.inspect().unwrap().readers_in_total(), 1);
    kept.unlock().unwrap();
    // The release of a kind that has ended spares the other kind.
    let writer = one.write().unwrap();
    let former = operator.inspect().unwrap();
    assert!(!operator.force_unlock(reader.unwrap()).unwrap());
    writer.check().unwrap();
    writer.unlock().unwrap();
    let kept = two.read().unwrap();
    assert!(!operator.force_unlock(former.writer().unwrap()).unwrap());
    kept.check().unwrap();
    assert_eq!(operator.inspect().unwrap().readers_in_total(), 1);
    kept.unlock().unwrap();
}

pub fn a_downgrade_lets_readers_in_and_keeps_writers_out(backend: &dyn Backend) {
    let [one, two, three, four] = locks(backend);
    let writer = one.write().unwrap();
    let first = start_read(&two);
    wait_for_queue(&four, 1);
    let next = start_write(&three);
    wait_for_queue(&four, 2);
    let late = start_read(&four);
    wait_for_queue(&four, 3);
    let token = writer.fencing_token();
    let reader = writer.downgrade().unwrap();
    assert!(reader.fencing_token() > token);
    // The reader before the waiting writer enters at once; the one behind it waits.
    let first = first.within(SOON, "the grant beside the former writer");
    assert!(!next.is_done() && !late.is_done());
    assert_eq!(one.inspect().unwrap().readers_in_total(), 2);
    let tokens = [&first, &reader].map(|reader| reader.fencing_token());
    first.unlock().unwrap();
    assert!(!next.is_done());
    reader.unlock().unwrap();
    let next = next.within(SOON, "the grant to the waiting writer");
    assert!(tokens.iter().all(|token| *token < next.fencing_token()));
    next.unlock().unwrap();
    drop(late.within(SOON, "the grant to the late reader"));
}

pub fn a_converted_lock_is_renewed(backend: &dyn Backend) {
    let client = || backend.builder().ttl(backend.ttl()).build().unwrap();
    let (one, two) = (client().rw_lock("k"), client().rw_lock("k"));
    let reader = one.write().unwrap().downgrade().unwrap();
    backend.pass(backend.ttl() + backend.ttl() / 10);
    reader.check().unwrap();
    assert!(two.try_write().unwrap().is_none());
    let writer = reader.try_upgrade().unwrap().unwrap();
    backend.pass(backend.ttl() + backend.ttl() / 10);
    writer.check().unwrap();
    assert!(two.try_read().unwrap().is_none());
    writer.unlock().unwrap();
    assert!(two.try_write().unwrap().is_some());
}

pub fn an_upgrade_is_refused_beside_another_reader(backend: &dyn Backend) {
    let [one, two, three] = locks(backend);
    let (reader, other) = (one.read().unwrap(), two.read().unwrap());
    let reader = reader.try_upgrade().unwrap().unwrap_err();
    let other = other.try_upgrade().unwrap().unwrap_err();
    for reader in [&reader, &other] {
        reader.check().unwrap();
    }
    other.unlock().unwrap();
    // A clone counts, too.
    let clone = reader.clone();
    let reader = reader.try_upgrade().unwrap().unwrap_err();
    drop(clone);
    // A waiting writer keeps its place.
    let waiting = start_write(&two);
    wait_for_queue(&three, 1);
    let token = reader.fencing_token();
    let writer = reader.try_upgrade().unwrap().unwrap();
    assert!(writer.fencing_token() > token);
    assert!(three.try_read().unwrap().is_none());
    let found = three.inspect().unwrap();
    assert_eq!(found.clients_waiting(), 1);
    assert_eq!(
        found.writer().map(|writer| writer.fencing_token()),
        Some(Some(writer.fencing_token()))
    );
    assert!(!waiting.is_done());
    let token = writer.fencing_token();
    writer.unlock().unwrap();
    let next = waiting.within(SOON, "the grant to the waiting writer");
    assert!(next.fencing_token() > token);
}

/// At most one of two readers that upgrade at the same time becomes the writer.
pub fn two_upgraders_never_both_write(backend: &dyn Backend) {
    upgrade_in_pairs(locks(backend), 300);
}

/// Lets two readers upgrade at the same time, `rounds` times. Returns how many of them became the writer.
pub fn upgrade_in_pairs(pair: [RwLock; 2], rounds: usize) -> usize {
    let writers = Arc::new(AtomicUsize::new(0));
    let both = Arc::new(Barrier::new(2));
    let upgraders = pair.map(|lock| {
        let (writers, both) = (Arc::clone(&writers), Arc::clone(&both));
        Task::start(move || {
            let mut upgrades = 0;
            for round in 0..rounds {
                let reader = lock.read().unwrap();
                both.wait();
                if let Ok(writer) = reader.try_upgrade().unwrap() {
                    assert_eq!(writers.fetch_add(1, Ordering::SeqCst), 0, "{round}");
                    upgrades += 1;
                    writers.fetch_sub(1, Ordering::SeqCst);
                    writer.unlock().unwrap();
                }
                both.wait();
            }
            upgrades
        })
    });
    let upgrades = upgraders.map(|task| task.within(12 * SOON, "its upgrades"));
    upgrades.iter().sum()
}

/// Names with braces, blanks and other signs, also those that Redis Cluster reads as hash tags.
pub fn odd_names_are_locks_of_their_own(backend: &dyn Backend) {
    let (one, two) = (backend.client(), backend.client());
    let names = [
        "{}",
        "}{",
        "{a}b",
        "a{b",
        "a{}b",
        "{{a}}",
        " ",
        "a b",
        "%s",
        "*",
        "[a]",
        "\\",
        "\"",
        "'",
        "\u{fffd}",
        "schl\u{fc}ssel",
        "\u{1f511}",
    ];
    let readers = names.map(|name| (name, one.rw_lock(name).read().unwrap()));
    for (name, reader) in readers {
        let lock = two.rw_lock(name);
        assert!(lock.try_write().unwrap().is_none(), "{name:?}");
        // The message of the grant contains the name.
        let writer = start_write(&lock);
        wait_for_queue(&lock, 1);
        reader.unlock().unwrap();
        let writer = writer.within(SOON, "the grant to the writer");
        let reader = writer.downgrade().unwrap();
        assert_eq!(
            (reader.key(), lock.inspect().unwrap().readers_in_total()),
            (name, 1)
        );
        reader.try_upgrade().unwrap().unwrap().unlock().unwrap();
    }
}

pub fn readers_and_permits_do_not_mix(backend: &dyn Backend) {
    let (one, two) = (backend.client(), backend.client());
    let (lock, semaphore) = (one.rw_lock("k"), two.semaphore("k", 2));
    let reader = lock.read().unwrap();
    let refused = semaphore.acquire().map(drop).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Protocol);
    let found = semaphore.inspect().unwrap();
    assert_eq!(found.holders()[0].id(), reader.id());
    assert_eq!(found.holders()[0].kind(), HolderKind::Reader);
    assert_eq!(found.available(), 0);
    reader.unlock().unwrap();
    let permit = semaphore.acquire().unwrap();
    let refused = lock.read().map(drop).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Protocol);
    let found = lock.inspect().unwrap();
    assert_eq!(found.holders()[0].id(), permit.id());
    assert!(found.readers().is_empty() && found.writer().is_none());
    permit.unlock().unwrap();
}

//! The operations on keys that leases share: readers and writers, permits, and permits with `min_hold`.

use std::fmt;
use std::thread;
use std::time::Duration;

use crossbeam_channel::{Receiver, bounded};
use leasehold::{
    Client, Error, LossReason, LostKey, LostSignal, MutexGuard, MutexesGuard, Released, RwLock,
    RwLockReadGuard, RwLockWriteGuard, Semaphore, SemaphorePermit,
};
use leasehold_testbed::terms::Share;

use super::{Doing, Operation, Terms, Thread, What};
use crate::messages::{MIN_HOLD, PACED, PERMITS, key_name, paced_key, permits_key, rw_key};
use crate::records::{Grant, now};
use crate::value::GrantId;

/// The methods of a guard that the soak uses.
pub trait Held: fmt::Debug + Sized {
    /// A message of the guard's signal.
    type Loss;

    fn remaining(&self) -> Duration;
    fn is_lost(&self) -> bool;
    fn check(&self) -> Result<(), Error>;
    fn lost_signal(&self) -> LostSignal<Self::Loss>;
    fn unlock(self) -> Result<Released, Error>;
}

macro_rules! held {
    ($($Guard:ty: $Loss:ty),*) => {$(
        impl Held for $Guard {
            type Loss = $Loss;

            fn remaining(&self) -> Duration {
                self.remaining()
            }
            fn is_lost(&self) -> bool {
                self.is_lost()
            }
            fn check(&self) -> Result<(), Error> {
                self.check()
            }
            fn lost_signal(&self) -> LostSignal<$Loss> {
                self.lost_signal()
            }
            fn unlock(self) -> Result<Released, Error> {
                self.unlock()
            }
        }
    )*};
}
held!(
    MutexGuard: LossReason,
    MutexesGuard: LostKey,
    RwLockReadGuard: LossReason,
    SemaphorePermit: LossReason
);

/// A lock whose guards share the key.
trait Shared: Clone {
    type Guard: Held;

    fn wait(&self) -> Result<Self::Guard, Error>;
    fn attempt(&self) -> Result<Option<Self::Guard>, Error>;
    fn wait_for(&self, time: Duration) -> Result<Option<Self::Guard>, Error>;
    fn ending(self, ttl: Duration) -> Self;
    fn cancelled(self, cancel: Receiver<()>) -> Self;
}

macro_rules! shared {
    ($Lock:ty, $Guard:ty, $wait:ident, $attempt:ident, $wait_for:ident) => {
        impl Shared for $Lock {
            type Guard = $Guard;

            fn wait(&self) -> Result<$Guard, Error> {
                self.$wait()
            }
            fn attempt(&self) -> Result<Option<$Guard>, Error> {
                self.$attempt()
            }
            fn wait_for(&self, time: Duration) -> Result<Option<$Guard>, Error> {
                self.$wait_for(time)
            }
            fn ending(self, ttl: Duration) -> Self {
                self.fixed_ttl(ttl)
            }
            fn cancelled(self, cancel: Receiver<()>) -> Self {
                self.cancelled_by(cancel)
            }
        }
    };
}
shared!(RwLock, RwLockReadGuard, read, try_read, try_read_for);
shared!(
    Semaphore,
    SemaphorePermit,
    acquire,
    try_acquire,
    try_acquire_for
);

impl Thread<'_> {
    pub fn operate_on_shares(&mut self, operation: Operation, client: &Client) {
        match operation {
            Operation::Reader => self.read(&client.rw_lock(key_name(rw_key()))),
            Operation::Writer => self.write_alone(&client.rw_lock(key_name(rw_key()))),
            Operation::Permits => self.permits(client, permits_key(), PERMITS, None),
            Operation::Paced => self.permits(client, paced_key(), PACED, Some(MIN_HOLD)),
            _ => self.force_some_share(client),
        }
    }

    fn read(&mut self, lock: &RwLock) {
        let key = rw_key();
        let (guard, terms) = self.take_share(lock, key);
        let Some(guard) = guard else { return };
        self.held_reader(&guard, key, terms);
        if self.random.one_in(3) {
            // The clone keeps the lease, and does not wait.
            let clone = guard.clone();
            self.stay(&guard);
            drop(guard);
            return self.leave(clone, key, terms);
        }
        if terms.at_most.is_none() && self.random.one_in(4) {
            return self.upgrade(guard, key);
        }
        self.leave(guard, key, terms);
    }

    /// Upgrades a reader. If it is not the only one, it stays a reader.
    fn upgrade(&mut self, guard: RwLockReadGuard, key: usize) {
        self.records.write(What::Releasing);
        let allowed = Some(Duration::ZERO);
        let upgraded = self.call(Doing::Upgrade, Some(key), allowed, || guard.try_upgrade());
        match upgraded {
            Ok(Ok(writer)) => {
                let guard = Some(writer.into_mutex_guard());
                self.hold(guard, key, Terms::default(), Self::unlock);
            }
            Ok(Err(reader)) => {
                self.held_reader(&reader, key, Terms::default());
                self.leave(reader, key, Terms::default());
            }
            Err(_) => {}
        }
    }

    /// Downgrades a writer.
    fn downgrade(&mut self, writer: RwLockWriteGuard, key: usize) {
        self.records.write(What::Releasing);
        let allowed = Some(Duration::ZERO);
        let reader = self.call(Doing::Upgrade, Some(key), allowed, || writer.downgrade());
        if let Ok(reader) = reader {
            self.held_reader(&reader, key, Terms::default());
            self.leave(reader, key, Terms::default());
        }
    }

    fn held_reader(&mut self, guard: &RwLockReadGuard, key: usize, terms: Terms) {
        let (id, token) = (guard.id(), guard.fencing_token());
        self.held_share(guard, (&id, token), Share::Reader, key, terms);
    }

    fn write_alone(&mut self, lock: &RwLock) {
        let key = rw_key();
        let guard = match self.random.one_in(4) {
            true => self.take(Doing::TryLock, key, Some(Duration::ZERO), || {
                lock.try_write()
            }),
            false => self.take(Doing::Lock, key, None, || lock.write().map(Some)),
        };
        if self.random.one_in(4)
            && let Some(writer) = guard
        {
            self.held(&writer, key, Terms::default());
            return self.downgrade(writer, key);
        }
        let guard = guard.map(RwLockWriteGuard::into_mutex_guard);
        self.hold(guard, key, Terms::default(), Self::unlock);
    }

    fn permits(&mut self, client: &Client, key: usize, limit: u32, min_hold: Option<Duration>) {
        if min_hold.is_none() && self.random.one_in(16) {
            return self.lock(&client.mutex(key_name(key)), key, Self::drop_guard);
        }
        let weight = match self.random.one_in(4) {
            true => 1 + self.random.below(limit as usize) as u32,
            false => 1,
        };
        let semaphore = client.semaphore(key_name(key), limit).weight(weight);
        let semaphore = match min_hold {
            Some(min_hold) => semaphore.min_hold(min_hold),
            None => semaphore,
        };
        let (permit, terms) = self.take_share(&semaphore, key);
        if let Some(permit) = permit {
            let share = Share::Permits { weight, limit };
            self.held_share(&permit, (&permit.id(), 0), share, key, terms);
            self.leave(permit, key, terms);
        }
    }

    /// Acquires a share in one of several ways.
    fn take_share<L: Shared>(&mut self, lock: &L, key: usize) -> (Option<L::Guard>, Terms) {
        let mut terms = Terms::default();
        let guard = match self.random.below(8) {
            0 => self.take(Doing::TryLock, key, Some(Duration::ZERO), || lock.attempt()),
            1 => {
                let time = self.random.millis(0, 400);
                self.take(Doing::TryLockFor, key, Some(time), || lock.wait_for(time))
            }
            2 => {
                let after = self.random.millis(0, 60);
                let (sender, cancel) = bounded(0);
                let lock = lock.clone().cancelled(cancel);
                let canceller = thread::spawn(move || {
                    thread::sleep(after);
                    drop(sender);
                });
                let guard = self.take(Doing::CancelledLock, key, Some(after), || {
                    lock.wait().map(Some)
                });
                if canceller.join().is_err() {
                    self.wrong("the thread that cancels panicked".to_owned());
                }
                guard
            }
            3 => {
                let ttl = self.random.millis(50, 600);
                (terms.ttl, terms.at_most) = (Some(ttl), Some(ttl));
                let lock = lock.clone().ending(ttl);
                self.take(Doing::Lock, key, None, || lock.wait().map(Some))
            }
            _ => self.take(Doing::Lock, key, None, || lock.wait().map(Some)),
        };
        (guard, terms)
    }

    fn held_share(
        &mut self,
        guard: &impl Held,
        (id, token): (&str, u64),
        share: Share,
        key: usize,
        terms: Terms,
    ) {
        let at = now();
        let grant = Grant {
            key,
            token,
            share,
            ttl: terms.ttl.unwrap_or(self.shared.ttl).as_millis() as u64,
            at_most: terms.at_most.map(|time| time.as_millis() as u64),
        };
        self.records.write_at(at, What::Held(grant));
        let lease = id.to_owned();
        self.records.write_at(at, What::Identified { lease });
        self.look(guard);
    }

    /// Holds a share for a while, and ends it in one of several ways.
    fn leave<G: Held>(&mut self, guard: G, key: usize, terms: Terms) {
        if terms.at_most.is_some() && self.random.one_in(3) {
            self.stay_until_lost(&guard);
            return self.release(guard, key);
        }
        match self.random.below(8) {
            // The hold is longer than the ttl, so the client has to renew the lease.
            0 => {
                let ttl = self.shared.ttl.as_millis() as u64;
                let end = now() + self.random.millis(ttl, 2 * ttl).as_nanos() as u64;
                while now() < end && self.look(&guard) {
                    thread::sleep(self.random.millis(10, 100));
                }
                self.unlock_now(guard, key);
            }
            1..4 => self.unlock(guard, key),
            _ => self.drop_guard(guard, key),
        }
    }

    /// Takes the share away from one of the holders.
    fn force_some_share(&mut self, client: &Client) {
        let allowed = Some(Duration::ZERO);
        let since = now();
        let (key, lease, forced) = if self.random.one_in(2) {
            let key = rw_key();
            let lock = client.rw_lock(key_name(key));
            let found = self.call(Doing::Inspect, Some(key), allowed, || lock.inspect());
            let Some(reader) = found
                .ok()
                .and_then(|found| found.readers().first().cloned())
            else {
                return;
            };
            let forced = self.call(Doing::ForceUnlock, Some(key), allowed, || {
                lock.force_unlock(&reader)
            });
            (key, reader.id(), forced)
        } else {
            let key = permits_key();
            let semaphore = client.semaphore(key_name(key), PERMITS);
            let found = self.call(Doing::Inspect, Some(key), allowed, || semaphore.inspect());
            let Some(holder) = found
                .ok()
                .and_then(|found| found.holders().first().cloned())
            else {
                return;
            };
            let forced = self.call(Doing::ForceUnlock, Some(key), allowed, || {
                semaphore.force_unlock(&holder)
            });
            (key, holder.id(), forced)
        };
        if !matches!(forced, Ok(false)) {
            let grant = forced.is_ok().then_some(GrantId {
                lease,
                micros: None,
            });
            self.records.write(What::Forced { key, since, grant });
        }
    }
}

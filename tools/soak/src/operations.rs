//! One thread of the soak: its operations on locks, and its records of them. `records` defines what a thread records
//! before a call, and what after it.

mod contention;
pub mod elections;
pub mod race;
pub mod runs;
pub mod sets;
mod shares;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use crossbeam_channel::bounded;
use leasehold::{Client, Error, ErrorKind, HolderId, LossReason, Mutex, MutexGuard, Released};
use leasehold_testbed::terms::Share;

use crate::messages::{DRAWN_KEYS, LONG_OUTAGE, election_key, hot_keys, key_name, key_of};
use crate::random::Random;
use crate::records::{Doing, Grant, Operation, Outcome, What, Writer, now};
use crate::tickets;
use crate::value::{GrantId, lease_of};
use crate::worker::{END, Shared};
use shares::Held;

/// How long after the guard itself a signal may report the loss. The thread waits for this time twice: a process that
/// was stopped finds its time-out passed when it is resumed.
const SIGNAL: Duration = Duration::from_secs(10);

/// How often each operation is drawn.
const OPERATIONS: [(usize, Operation); 27] = [
    (24, Operation::WithLock),
    (24, Operation::LockDrop),
    (16, Operation::LockUnlock),
    (16, Operation::TryLock),
    (12, Operation::TryLockFor),
    (8, Operation::Cancelled),
    (6, Operation::OwnTtl),
    (3, Operation::RenewWhile),
    (3, Operation::MaxHold),
    (6, Operation::Extend),
    (6, Operation::Reentrant),
    (4, Operation::HandOver),
    (6, Operation::Adopt),
    (1, Operation::ForceUnlock),
    (1, Operation::Forget),
    (6, Operation::Stay),
    (16, Operation::Write),
    (1, Operation::Reopen),
    (32, Operation::Reader),
    (8, Operation::Writer),
    (32, Operation::Permits),
    (8, Operation::Paced),
    (1, Operation::ForceShare),
    (16, Operation::Set),
    (32, Operation::Once),
    (24, Operation::Campaign),
    (24, Operation::Transfer),
];

/// The options of a lock.
#[derive(Clone, Copy, Default)]
struct Terms {
    /// `None` for the ttl of the client.
    ttl: Option<Duration>,
    at_most: Option<Duration>,
}

pub struct Thread<'a> {
    shared: &'a Shared,
    records: Writer,
    random: Random,
    /// The client of the current operation, if Redis is asked for the lease ids of its locks.
    holder: Option<HolderId>,
}

impl<'a> Thread<'a> {
    pub fn new(shared: &'a Shared, records: Writer, random: Random) -> Self {
        Self {
            shared,
            records,
            random,
            holder: None,
        }
    }

    pub fn run(mut self) {
        while !self.shared.is_ending() {
            let operation = self.random.weighted(&OPERATIONS);
            self.records.write(What::Began(operation));
            let client = self.shared.client();
            let key = if self.random.one_in(2) {
                self.random.below(hot_keys())
            } else {
                self.random.below(DRAWN_KEYS)
            };
            self.operate(operation, &client, key);
            let pause = self.random.millis(0, 20);
            thread::sleep(pause);
        }
    }

    fn operate(&mut self, operation: Operation, client: &Client, key: usize) {
        let mutex = client.mutex(key_name(key));
        self.holder = Some(client.holder_id().clone());
        match operation {
            Operation::WithLock => self.with_lock(&mutex, key),
            Operation::LockDrop => self.lock(&mutex, key, Self::drop_guard),
            Operation::LockUnlock => self.lock(&mutex, key, Self::unlock),
            Operation::TryLock => {
                let guard = self.take(Doing::TryLock, key, Some(Duration::ZERO), || {
                    mutex.try_lock()
                });
                self.hold(guard, key, Terms::default(), Self::unlock);
            }
            Operation::TryLockFor => {
                let time = self.random.millis(0, 400);
                let try_lock = || mutex.try_lock_for(time);
                let guard = self.take(Doing::TryLockFor, key, Some(time), try_lock);
                self.hold(guard, key, Terms::default(), Self::drop_guard);
            }
            Operation::Cancelled => self.cancelled(mutex, key),
            Operation::OwnTtl => self.own_ttl(mutex, key),
            Operation::RenewWhile => self.renew_while(mutex, key),
            Operation::MaxHold => self.max_hold(mutex, key),
            Operation::Extend => self.lock(&mutex, key, Self::extend),
            Operation::Reentrant => self.reentrant(&mutex, key),
            Operation::HandOver => self.lock(&mutex, key, Self::hand_over),
            Operation::Adopt => self.adopt(client),
            Operation::ForceUnlock => self.force_unlock(&mutex, key),
            Operation::Forget => self.forget(key),
            Operation::Stay => self.lock(&mutex, key, Self::stay_long),
            Operation::Write => self.lock(&mutex, key, Self::write),
            Operation::Reopen => self.reopen(),
            Operation::Reader
            | Operation::Writer
            | Operation::Permits
            | Operation::Paced
            | Operation::ForceShare => self.operate_on_shares(operation, client),
            Operation::Campaign => self.campaign(client),
            Operation::Once => self.run_once(client),
            Operation::Set | Operation::Transfer => self.operate_on_sets(operation, client),
            Operation::Contend | Operation::Race => unreachable!("it is never drawn"),
        }
    }

    /// Makes a call, with a record before and one after it.
    fn call<T>(
        &mut self,
        doing: Doing,
        key: Option<usize>,
        allowed: Option<Duration>,
        work: impl FnOnce() -> Result<T, Error>,
    ) -> Result<T, Error> {
        let allowed = allowed.map(|allowed| allowed.as_millis() as u64);
        self.records.write(What::Called {
            doing,
            key,
            allowed,
        });
        let since = now();
        let result = work();
        self.returned(since, result.as_ref().err());
        result
    }

    fn returned(&mut self, since: u64, error: Option<&Error>) {
        let at = now();
        let outcome = error.map_or(Outcome::Done, |error| {
            Outcome::Failed(format!("{:?}", error.kind()))
        });
        self.records.write_at(at, What::Returned { since, outcome });
        if let Some(lost) = error.and_then(lost) {
            self.records.write_at(at, lost);
        }
    }

    fn take<G>(
        &mut self,
        doing: Doing,
        key: usize,
        allowed: Option<Duration>,
        work: impl FnOnce() -> Result<Option<G>, Error>,
    ) -> Option<G> {
        let taken = self.call(doing, Some(key), allowed, work);
        if allowed.is_none()
            && self.shared.assignment.outage >= LONG_OUTAGE
            && let Err(error) = &taken
            && error.is_unavailable()
        {
            self.wrong(format!("lock() does not wait through an outage: {error}"));
        }
        taken.ok().flatten()
    }

    /// Waits for the lock for as long as it takes.
    fn lock(&mut self, mutex: &Mutex, key: usize, then: fn(&mut Self, MutexGuard, usize)) {
        self.lock_on(mutex, key, Terms::default(), then);
    }

    fn lock_on(
        &mut self,
        mutex: &Mutex,
        key: usize,
        terms: Terms,
        then: fn(&mut Self, MutexGuard, usize),
    ) {
        let guard = self.take(Doing::Lock, key, None, || mutex.lock().map(Some));
        self.hold(guard, key, terms, then);
    }

    fn hold(
        &mut self,
        guard: Option<MutexGuard>,
        key: usize,
        terms: Terms,
        then: fn(&mut Self, MutexGuard, usize),
    ) {
        if let Some(guard) = guard {
            self.held(&guard, key, terms);
            then(self, guard, key);
        }
    }

    fn held(&mut self, guard: &MutexGuard, key: usize, terms: Terms) {
        let at = now();
        let millis = |time: Duration| time.as_millis() as u64;
        let ttl = terms.ttl.unwrap_or(self.shared.ttl);
        let grant = Grant {
            key,
            token: guard.fencing_token(),
            share: Share::Alone,
            ttl: millis(ttl),
            at_most: terms.at_most.map(millis),
        };
        self.records.write_at(at, What::Held(grant));
        // Half of the holds are identified. The others are released without a request in between.
        if self.look(guard) && self.holder.is_some() && self.random.one_in(2) {
            self.identify(guard, key);
        }
    }

    /// Records the lease id of a held lock. Returns false if Redis does not reply, or has lost the lock.
    fn identify(&mut self, guard: &MutexGuard, key: usize) -> bool {
        let client = self.shared.client();
        let allowed = Some(Duration::ZERO);
        let inspect = || client.mutex(key_name(key)).inspect();
        let found = self.call(Doing::Inspect, Some(key), allowed, inspect);
        let (Ok(Some(found)), Some(holder)) = (found, &self.holder) else {
            return false;
        };
        let lease = lease_of(guard, holder, &found);
        let is_found = lease.is_some();
        if let Some(lease) = lease {
            self.records.write(What::Identified { lease });
        }
        is_found
    }

    /// Records the state of the guard; returns whether it is still held.
    fn look(&mut self, guard: &impl Held) -> bool {
        let at = now();
        let left = guard.remaining();
        if !left.is_zero() {
            let left = left.as_nanos() as u64;
            self.records.write_at(at, What::Seen { left });
            return true;
        }
        let checked = guard.check();
        let at = now();
        match checked.as_ref().err().and_then(lost) {
            Some(lost) => {
                self.records.write_at(at, lost);
                if !guard.is_lost() || !guard.remaining().is_zero() {
                    self.wrong(format!("a lost lock is held again: {guard:?}"));
                }
            }
            None => self.wrong(format!(
                "no time was left, but the lock is not lost: {guard:?}"
            )),
        }
        false
    }

    /// Checks the guard a few times, as a worker would.
    fn stay(&mut self, guard: &impl Held) {
        let looks = self.random.below(3);
        for _ in 0..looks {
            let pause = if self.random.one_in(40) {
                self.random.millis(100, 1500)
            } else {
                self.random.millis(0, 6)
            };
            thread::sleep(pause);
            if !self.look(guard) {
                return;
            }
        }
    }

    /// Holds the lock for one to three ttls, so that it has to be renewed.
    fn stay_long(&mut self, guard: MutexGuard, key: usize) {
        let ttl = self.shared.ttl.as_millis() as u64;
        let end = now() + self.random.millis(ttl, 3 * ttl).as_nanos() as u64;
        let mut is_identified = false;
        while now() < end && self.look(&guard) {
            is_identified = is_identified || self.identify(&guard, key);
            thread::sleep(self.random.millis(10, 100));
        }
        self.unlock_now(guard, key);
    }

    /// Waits until the guard's signal comes, as it must.
    fn stay_until_lost(&mut self, guard: &impl Held) {
        let signal = guard.lost_signal();
        let mut is_signalled = false;
        while self.look(guard) {
            is_signalled = is_signalled || signal.recv_timeout(guard.remaining()).is_ok();
        }
        if !is_signalled
            && signal.recv_timeout(SIGNAL).is_err()
            && signal.recv_timeout(SIGNAL).is_err()
        {
            self.wrong(format!(
                "a lock is lost, but its signal does not come: {guard:?}"
            ));
        }
    }

    fn wrong(&mut self, what: String) {
        self.records.write(What::Wrong(what));
    }

    fn drop_guard<G: Held>(&mut self, guard: G, key: usize) {
        self.stay(&guard);
        self.release(guard, key);
    }

    fn release(&mut self, guard: impl Sized, key: usize) {
        self.records.write(What::Releasing);
        let allowed = Some(Duration::ZERO);
        let _ = self.call(Doing::Drop, Some(key), allowed, || {
            drop(guard);
            Ok(())
        });
    }

    fn unlock<G: Held>(&mut self, guard: G, key: usize) {
        self.stay(&guard);
        self.unlock_now(guard, key);
    }

    fn unlock_now<G: Held>(&mut self, guard: G, key: usize) {
        self.records.write(What::Releasing);
        let (allowed, mut wrong) = (Some(Duration::ZERO), None);
        let _ = self.call(Doing::Unlock, Some(key), allowed, || match guard.unlock() {
            Ok(Released::Confirmed | Released::Shared) => Ok(()),
            Ok(Released::Unconfirmed(error)) => Err(error),
            Err(error) => {
                wrong = (!error.is_lease_lost()).then(|| error.to_string());
                Err(error)
            }
        });
        if let Some(error) = wrong {
            self.wrong(format!(
                "unlock() fails although its lock is not lost: {error}"
            ));
        }
    }

    fn with_lock(&mut self, mutex: &Mutex, key: usize) {
        let (doing, allowed) = (Doing::Lock, None);
        let key_of = Some(key);
        self.records.write(What::Called {
            doing,
            key: key_of,
            allowed,
        });
        let (mut since, mut entered) = (now(), false);
        let result = mutex.with(|guard| {
            entered = true;
            self.returned(since, None);
            self.held(guard, key, Terms::default());
            self.stay(guard);
            self.records.write(What::Releasing);
            self.records.write(What::Called {
                doing: Doing::Unlock,
                key: key_of,
                allowed: Some(0),
            });
            since = now();
        });
        if entered && result.as_ref().is_err_and(Error::is_unavailable) {
            self.wrong("with() returns an outage instead of a value".to_owned());
        }
        self.returned(since, result.as_ref().err());
    }

    fn cancelled(&mut self, mutex: Mutex, key: usize) {
        let after = self.random.millis(0, 60);
        let (sender, cancel) = bounded(0);
        let mutex = mutex.cancelled_by(cancel);
        let canceller = thread::spawn(move || {
            thread::sleep(after);
            drop(sender);
        });
        let lock = || mutex.lock().map(Some);
        let guard = self.take(Doing::CancelledLock, key, Some(after), lock);
        self.hold(guard, key, Terms::default(), Self::drop_guard);
        if canceller.join().is_err() {
            self.wrong("the thread that cancels panicked".to_owned());
        }
    }

    /// A fixed ttl: the lock is not renewed.
    fn own_ttl(&mut self, mutex: Mutex, key: usize) {
        let ttl = self.random.millis(50, 600);
        let terms = Terms {
            ttl: Some(ttl),
            at_most: Some(ttl),
        };
        let then: fn(&mut Self, MutexGuard, usize) = match self.random.below(3) {
            0 => Self::drop_guard,
            1 => Self::unlock,
            _ => Self::drop_lost,
        };
        self.lock_on(&mutex.fixed_ttl(ttl), key, terms, then);
    }

    fn drop_lost(&mut self, guard: MutexGuard, key: usize) {
        self.stay_until_lost(&guard);
        self.release(guard, key);
    }

    fn renew_while(&mut self, mutex: Mutex, key: usize) {
        let ttl = self.random.millis(200, 500);
        let goes_on = Arc::new(AtomicBool::new(true));
        let asked = Arc::clone(&goes_on);
        let mutex = mutex
            .ttl(ttl)
            .renew_while(move || asked.load(Ordering::Relaxed));
        let terms = Terms {
            ttl: Some(ttl),
            ..Terms::default()
        };
        let guard = self.take(Doing::Lock, key, None, || mutex.lock().map(Some));
        if let Some(guard) = guard {
            self.held(&guard, key, terms);
            self.stay(&guard);
            goes_on.store(false, Ordering::Relaxed);
            match self.random.one_in(2) {
                true => self.drop_lost(guard, key),
                false => self.unlock(guard, key),
            }
        }
    }

    fn max_hold(&mut self, mutex: Mutex, key: usize) {
        let max_hold = self.random.millis(50, 500);
        let terms = Terms {
            at_most: Some(max_hold),
            ..Terms::default()
        };
        self.lock_on(&mutex.max_hold(max_hold), key, terms, Self::drop_lost);
    }

    fn extend(&mut self, guard: MutexGuard, key: usize) {
        self.stay(&guard);
        let time = self.random.millis(100, 3000);
        let ttl = time.as_millis() as u64;
        self.records.write(What::Extended { ttl });
        let allowed = Some(Duration::ZERO);
        let _ = self.call(Doing::Extend, Some(key), allowed, || guard.extend(time));
        self.look(&guard);
        self.drop_guard(guard, key);
    }

    fn reentrant(&mut self, mutex: &Mutex, key: usize) {
        let mutex = mutex.clone().reentrant();
        let outer = self.take(Doing::Lock, key, None, || mutex.lock().map(Some));
        let Some(outer) = outer else { return };
        self.held(&outer, key, Terms::default());
        match mutex.try_lock() {
            Ok(Some(inner)) if inner.fencing_token() == outer.fencing_token() => {
                self.stay(&*inner);
            }
            Err(error) if error.is_lease_lost() => {}
            other => self.wrong(format!(
                "a repeated lock() returned {other:?}, not {outer:?}"
            )),
        }
        self.look(&*outer);
        self.release(outer, key);
    }

    fn hand_over(&mut self, guard: MutexGuard, key: usize) {
        self.stay(&guard);
        let token = guard.fencing_token();
        self.records.write(What::Releasing);
        let allowed = Some(Duration::ZERO);
        let ticket = self.call(Doing::HandOver, Some(key), allowed, || guard.into_ticket());
        if let Ok(ticket) = ticket {
            self.leave_ticket(key, token, ticket);
        }
    }

    fn leave_ticket(&self, key: usize, token: u64, text: String) {
        let ticket = tickets::Ticket {
            key,
            token,
            ttl: self.shared.ttl,
            text,
        };
        let left = tickets::leave(&self.shared.assignment.folder, &ticket);
        left.expect("tickets can be written to the temporary folder");
    }

    fn adopt(&mut self, client: &Client) {
        let found = tickets::take(&self.shared.assignment.folder);
        let Some(ticket) = found.expect("tickets can be read again") else {
            return;
        };
        let key = ticket.key;
        if key == election_key() {
            return self.adopt_term(client, &ticket);
        }
        let adopt = || client.adopt(&ticket.text).map(Some);
        let outage = Some(self.shared.assignment.outage);
        let Some(guard) = self.take(Doing::Adopt, key, outage, adopt) else {
            return;
        };
        let terms = Terms {
            ttl: Some(ticket.ttl),
            at_most: None,
        };
        if guard.fencing_token() <= ticket.token {
            self.wrong(format!("adopted under {}: {guard:?}", ticket.token));
        }
        self.hold(Some(guard), key, terms, Self::unlock);
    }

    fn force_unlock(&mut self, mutex: &Mutex, key: usize) {
        let since = now();
        let allowed = Some(Duration::ZERO);
        let forced = self.call(Doing::ForceUnlock, Some(key), allowed, || {
            mutex.force_unlock()
        });
        let grant = match forced {
            Ok(None) => return,
            Ok(Some(found)) => Some(GrantId::of(&found)),
            Err(error) if error.kind() == ErrorKind::Shutdown => return,
            Err(_) => None,
        };
        self.records.write(What::Forced { key, since, grant });
    }

    /// Forgets a guard, as a program with a bug might. The lock must end by itself.
    fn forget(&mut self, key: usize) {
        let client = self.shared.leaky_client();
        self.holder = Some(client.holder_id().clone());
        let mutex = client.mutex(key_name(key));
        let time = self.random.millis(50, 1000);
        let (mutex, ttl) = match self.random.one_in(2) {
            true => (mutex.fixed_ttl(time), Some(time)),
            false => (mutex.max_hold(time), None),
        };
        let terms = Terms {
            ttl,
            at_most: Some(time),
        };
        self.lock_on(&mutex, key, terms, |thread, guard, _| {
            thread.stay(&guard);
            std::mem::forget(guard);
        });
    }

    /// Writes the fenced value of the key, under the lock. One holder in four also writes late: its program does not
    /// look at the guard, and releases the lock too early.
    fn write(&mut self, guard: MutexGuard, key: usize) {
        let (client, token) = (self.shared.client(), guard.fencing_token());
        self.write_value(&client, key, token);
        self.drop_guard(guard, key);
        if self.random.one_in(4) {
            thread::sleep(self.random.millis(0, 300));
            self.write_value(&client, key, token);
        }
    }

    fn write_value(&mut self, client: &Client, key: usize, token: u64) {
        let since = now();
        let value = client.fenced_value(key_name(key));
        let write = || value.write(token, token.to_string());
        let written = self.call(Doing::Write, Some(key), Some(Duration::ZERO), write);
        if written.is_ok() {
            self.records.write(What::Written { key, token, since });
        }
    }

    fn reopen(&mut self) {
        let old = self.shared.reopen();
        let old = old.expect("a client that does not connect can always be made");
        if let Some(old) = old {
            let _ = self.call(Doing::Shutdown, None, Some(END), || old.shutdown(END));
        }
    }
}

/// The record of the loss that the error reports.
fn lost(error: &Error) -> Option<What> {
    let reason = name(error.loss_reason()?);
    let key = error.key().and_then(key_of);
    Some(What::Lost { reason, key })
}

/// The variant's name, without its fields.
fn name(reason: &LossReason) -> String {
    let text = format!("{reason:?}");
    let end = text.find([' ', '{']).unwrap_or(text.len());
    text[..end].to_owned()
}

//! The operations on sets of keys, and transfers between two accounts under a set of their keys.

use std::collections::BTreeSet;
use std::thread;
use std::time::Duration;

use crossbeam_channel::bounded;
use leasehold::redis::Commands as _;
use leasehold::{Client, Committed, Error, Mutexes, MutexesGuard};
use leasehold_testbed::terms::Share;

use super::{Doing, Operation, Terms, Thread, What};
use crate::messages::{DRAWN_KEYS, account_keys, balance_name, hot_keys, key_name};
use crate::records::{Grant, now};

impl Thread<'_> {
    pub fn operate_on_sets(&mut self, operation: Operation, client: &Client) {
        match operation {
            Operation::Set => self.some_set(client),
            _ => self.transfer_some(client),
        }
    }

    /// Locks two to four of the keys that other threads want one by one.
    fn some_set(&mut self, client: &Client) {
        let count = 2 + self.random.below(3);
        let mut keys = BTreeSet::new();
        while keys.len() < count {
            keys.insert(match self.random.one_in(3) {
                true => self.random.below(hot_keys()),
                false => self.random.below(DRAWN_KEYS),
            });
        }
        let keys: Vec<usize> = keys.into_iter().collect();
        let (guard, terms) = self.take_set(&set(client, &keys), &keys);
        if let Some(guard) = guard {
            self.held_set(&guard, &keys, terms);
            self.leave_set(guard, keys[0], terms);
        }
    }

    fn transfer_some(&mut self, client: &Client) {
        let accounts = account_keys();
        if self.random.one_in(8) {
            let key = accounts[self.random.below(2)];
            return self.lock(&client.mutex(key_name(key)), key, Self::drop_guard);
        }
        let (guard, terms) = self.take_set(&set(client, &accounts), &accounts);
        let Some(guard) = guard else { return };
        self.held_set(&guard, &accounts, terms);
        for _ in 0..=self.random.below(2) {
            self.transfer(&guard);
        }
        self.leave_set(guard, accounts[0], terms);
    }

    /// Moves 1 from the first account to the second one. The second balance counts the transfers.
    fn transfer(&mut self, guard: &MutexesGuard) {
        let since = now();
        let moved = self.call(
            Doing::Transfer,
            Some(account_keys()[0]),
            Some(Duration::ZERO),
            || move_between_accounts(guard, 1),
        );
        if let Ok(Committed { value: before, .. }) = moved {
            self.records.write(What::Transferred { before, since });
        }
    }

    /// Locks a set in one of several ways.
    fn take_set(&mut self, set: &Mutexes, keys: &[usize]) -> (Option<MutexesGuard>, Terms) {
        let mut terms = Terms::default();
        self.records.write(What::Wants {
            keys: keys.to_vec(),
        });
        let first = keys[0];
        let guard = match self.random.below(8) {
            0 => self.take(Doing::TryLockSet, first, Some(Duration::ZERO), || {
                set.try_lock()
            }),
            1 => {
                let time = self.random.millis(0, 400);
                self.take(Doing::TryLockSet, first, Some(time), || {
                    set.try_lock_for(time)
                })
            }
            2 => {
                let after = self.random.millis(0, 60);
                let (sender, cancel) = bounded(0);
                let set = set.clone().cancelled_by(cancel);
                let canceller = thread::spawn(move || {
                    thread::sleep(after);
                    drop(sender);
                });
                let lock = || set.lock().map(Some);
                let guard = self.take(Doing::CancelledSet, first, Some(after), lock);
                if canceller.join().is_err() {
                    self.wrong("the thread that cancels panicked".to_owned());
                }
                guard
            }
            3 => {
                let ttl = self.random.millis(50, 600);
                (terms.ttl, terms.at_most) = (Some(ttl), Some(ttl));
                let set = set.clone().fixed_ttl(ttl);
                self.take(Doing::LockSet, first, None, || set.lock().map(Some))
            }
            _ => self.take(Doing::LockSet, first, None, || set.lock().map(Some)),
        };
        (guard, terms)
    }

    fn held_set(&mut self, guard: &MutexesGuard, keys: &[usize], terms: Terms) {
        let at = now();
        let millis = |time: Duration| time.as_millis() as u64;
        for (index, key) in keys.iter().enumerate() {
            let token = guard.token(&key_name(*key));
            let grant = Grant {
                key: *key,
                token: token.expect("the set has this key"),
                share: Share::Alone,
                ttl: millis(terms.ttl.unwrap_or(self.shared.ttl)),
                at_most: terms.at_most.map(millis),
            };
            let what = match index {
                0 => What::Held(grant),
                _ => What::HeldToo(grant),
            };
            self.records.write_at(at, what);
        }
        self.look(guard);
    }

    /// Holds a set for a while, and ends it in one of several ways.
    fn leave_set(&mut self, guard: MutexesGuard, first: usize, terms: Terms) {
        if terms.at_most.is_some() && self.random.one_in(3) {
            self.stay_until_lost(&guard);
            return self.release(guard, first);
        }
        match self.random.below(12) {
            // The client has to renew the lease.
            0 => {
                let ttl = self.shared.ttl.as_millis() as u64;
                let end = now() + self.random.millis(ttl, 2 * ttl).as_nanos() as u64;
                while now() < end && self.look(&guard) {
                    thread::sleep(self.random.millis(10, 100));
                }
                self.unlock_now(guard, first);
            }
            // An extension would move the end of a fixed ttl.
            1 if terms.at_most.is_none() => {
                let time = self.random.millis(100, 3000);
                let ttl = time.as_millis() as u64;
                self.records.write(What::Extended { ttl });
                let allowed = Some(Duration::ZERO);
                let extend = || guard.extend(time);
                let _ = self.call(Doing::Extend, Some(first), allowed, extend);
                self.look(&guard);
                self.drop_guard(guard, first);
            }
            1..6 => self.unlock(guard, first),
            _ => self.drop_guard(guard, first),
        }
    }
}

fn set(client: &Client, keys: &[usize]) -> Mutexes {
    client.mutexes(keys.iter().map(|key| key_name(*key)))
}

/// The set of both accounts.
pub fn accounts(client: &Client) -> Mutexes {
    set(client, &account_keys())
}

/// Moves `amount` from the first account to the second one, and returns both balances from before.
pub fn move_between_accounts(
    guard: &MutexesGuard,
    amount: i64,
) -> Result<Committed<[i64; 2]>, Error> {
    let [one, other] = account_keys().map(balance_name);
    guard.transaction(|conn, pipe| {
        let balance: Option<i64> = conn.get(&one)?;
        let other_balance: Option<i64> = conn.get(&other)?;
        let before = [balance.unwrap_or(0), other_balance.unwrap_or(0)];
        pipe.set(&one, before[0] - amount)
            .set(&other, before[1] + amount);
        Ok(before)
    })
}

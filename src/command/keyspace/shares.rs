//! The shares of a key in the model: the leases of its readers, or of the permits of a semaphore.

use std::time::Duration;

use crate::command::Mode;
use crate::command::keyspace::queue::{ROLL_CALL, Waiter};
use crate::command::keyspace::{Entry, Keyspace, Step};
use crate::command::value::Doubt;
use crate::config::key::Key;
use crate::report::error::{Error, ErrorKind};
use crate::util::clock::MonotonicTime;
use crate::util::id::{HolderId, LeaseId};

/// A key expires this time after its latest share has ended.
pub const KEPT: Duration = Duration::from_secs(1);
/// A greater difference between the ttl of a key and the end of its latest share shows that the key has moved to a
/// server with another clock.
const NO_SHIFT: Duration = Duration::from_millis(5);

/// The shares of a key. Never empty.
#[derive(Clone)]
pub struct Shares {
    pub all: Vec<Share>,
    pub expires_at: MonotonicTime,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Share {
    pub lease: LeaseId,
    pub mode: Mode,
    pub holder: HolderId,
    pub ends_at: MonotonicTime,
    /// Set while the waiter that was granted the share has not confirmed the grant.
    pub doubt: Option<Doubt>,
}

impl Share {
    /// The number of its members in Redis.
    pub fn weight(&self) -> u32 {
        self.mode.weight()
    }

    /// Sets the end, unless the share ends later. A new end confirms the grant.
    pub fn extend(&mut self, ends_at: MonotonicTime) {
        if ends_at >= self.ends_at {
            self.ends_at = ends_at;
            self.doubt = None;
        }
    }

    /// Whether the share has ended before its waiter confirmed the grant.
    fn is_late(&self, now: MonotonicTime) -> bool {
        self.ends_at < now && self.doubt == Some(Doubt::Unconfirmed)
    }
}

impl Shares {
    /// The share that ends last.
    pub fn newest(&self) -> &Share {
        let newest = self.all.iter().max_by_key(|share| {
            // The marks of doubt are fractions of a ms in Redis, and members with equal scores are sorted by their ids.
            let confirmed = match share.doubt {
                Some(Doubt::Unconfirmed) => 0,
                Some(Doubt::RollCalled) => 1,
                None => 2,
            };
            (share.ends_at, confirmed, share.lease)
        });
        newest.expect("a key with shares has one")
    }

    pub fn used(&self) -> u32 {
        self.all.iter().map(Share::weight).sum()
    }

    pub fn find(&mut self, lease: LeaseId, mode: Mode, holder: &HolderId) -> Option<&mut Share> {
        let is_wanted =
            |share: &&mut Share| (share.lease, share.mode, &share.holder) == (lease, mode, holder);
        self.all.iter_mut().find(is_wanted)
    }

    /// Whether leases of `mode` can share the key with these.
    pub fn mixes_with(&self, mode: Mode) -> bool {
        self.newest().mode.is_read() == mode.is_read()
    }

    /// For how long the shares exclude a lease of `mode`; `None` if they do not.
    pub fn wait_for(&self, mode: Mode, now: MonotonicTime) -> Option<Duration> {
        let mut ends_at = self.newest().ends_at;
        if !mode.is_exclusive() && self.mixes_with(mode) {
            let wanted = self.used() + mode.weight();
            let over = wanted.saturating_sub(mode.limit());
            if over == 0 {
                return None;
            }
            let mut ends: Vec<_> = self.all.iter().collect();
            ends.sort_by_key(|share| share.ends_at);
            let mut freed = 0;
            let last = ends.iter().find(|share| {
                freed += share.weight();
                freed >= over
            });
            ends_at = last.map_or(ends_at, |share| share.ends_at);
        }
        Some(ends_at.since(now))
    }

    /// Sets the ttl of the key after a change.
    pub fn keep(&mut self) {
        self.expires_at = self.newest().ends_at.after(KEPT);
    }
}

impl Keyspace {
    /// Moves the ends of a key's shares if the key was moved to a server with another clock. Then removes the shares
    /// that have ended. With `keeps_late`, keeps those that their waiters have not confirmed in time.
    pub fn look(&mut self, key: &Key, keeps_late: bool, step: &mut Step<'_>) {
        let Some(Entry::Shares(shares)) = self.entries.get_mut(key) else {
            return;
        };
        let expected = shares.newest().ends_at.after(KEPT);
        let (later, sooner) = (
            shares.expires_at.since(expected),
            expected.since(shares.expires_at),
        );
        if later.max(sooner) > NO_SHIFT {
            for share in &mut shares.all {
                share.ends_at = share.ends_at.after(later).before(sooner);
            }
        }
        let stays = |share: &Share| keeps_late && share.is_late(step.now);
        shares
            .all
            .retain(|share| share.ends_at >= step.now || stays(share));
        if shares.all.is_empty() {
            self.entries.remove(key);
            step.changed(key);
        }
    }

    /// Ends the late shares that [`look`](Self::look) has kept. If waiters other than `own` are queued, first calls the
    /// roll: the shares then stay until the waiters have replied. During an earlier roll call, the shares end with it.
    pub fn end_late_shares(&mut self, key: &Key, own: Option<&Waiter>, step: &mut Step<'_>) {
        let now = step.now;
        let has_late = match self.entries.get(key) {
            Some(Entry::Shares(shares)) => shares.all.iter().any(|share| share.is_late(now)),
            _ => false,
        };
        if !has_late {
            return;
        }
        // An earlier roll call that has not ended counts for all late shares.
        let ends_at = match self.roll_call_end(key, now) {
            None if self.call_roll(key, own, step) => Some(now.after(ROLL_CALL)),
            ends_at => ends_at,
        };
        if let Some(Entry::Shares(shares)) = self.entries.get_mut(key) {
            if let Some(ends_at) = ends_at {
                for share in shares.all.iter_mut().filter(|share| share.is_late(now)) {
                    share.ends_at = ends_at;
                    share.doubt = Some(Doubt::RollCalled);
                }
            } else {
                shares.all.retain(|share| !share.is_late(now));
            }
        }
        self.keep_shares(key, step);
    }

    /// The end of the roll call of a shared key to which waiters may still reply.
    pub fn roll_call_end(&self, key: &Key, now: MonotonicTime) -> Option<MonotonicTime> {
        let Some(Entry::Shares(shares)) = self.entries.get(key) else {
            return None;
        };
        let called = shares
            .all
            .iter()
            .filter(|share| share.doubt == Some(Doubt::RollCalled) && share.ends_at >= now);
        called.map(|share| share.ends_at).min()
    }

    /// Gives the lease of `to` its share of the key. The end of a share never moves back. `doubt` is set if the waiter
    /// has to confirm the grant. Returns the µs of its token.
    pub fn give(
        &mut self,
        key: &Key,
        to: &Waiter,
        ttl: Duration,
        doubt: Option<Doubt>,
        step: &mut Step<'_>,
    ) -> u64 {
        self.last_micros = self.next_micros(step);
        let ends_at = step.now.after(ttl);
        if !matches!(self.entries.get(key), Some(Entry::Shares(_))) {
            let none = Shares {
                all: Vec::new(),
                expires_at: ends_at,
            };
            self.entries.insert(key.clone(), Entry::Shares(none));
        }
        if let Some(Entry::Shares(shares)) = self.entries.get_mut(key) {
            match shares.find(to.lease, to.mode, &to.holder) {
                Some(share) => share.extend(ends_at),
                None => shares.all.push(Share {
                    lease: to.lease,
                    mode: to.mode,
                    holder: to.holder.clone(),
                    ends_at,
                    doubt,
                }),
            }
            shares.keep();
        }
        step.changed(key);
        self.last_micros
    }

    /// Sets the ttl of a key after some of its shares have changed; deletes the key if it has none.
    pub fn keep_shares(&mut self, key: &Key, step: &mut Step<'_>) {
        step.changed(key);
        if let Some(Entry::Shares(shares)) = self.entries.get_mut(key) {
            if shares.all.is_empty() {
                self.entries.remove(key);
            } else {
                shares.keep();
            }
        }
    }
}

#[cfg(test)]
impl Share {
    /// The first member in Redis, and the mark of doubt.
    fn marked_member(&self) -> String {
        let member = self.mode.member(self.lease, &self.holder);
        member.unwrap_or_default() + self.doubt.map_or("", Doubt::mark)
    }
}

#[cfg(test)]
impl Keyspace {
    /// The members of a key that leases share, as in Redis, with a mark of doubt at their end, and with the ends of the
    /// shares. Sorted.
    pub fn shares(&self, key: &Key) -> Vec<(String, MonotonicTime)> {
        let Some(Entry::Shares(shares)) = self.entries.get(key) else {
            return Vec::new();
        };
        let members = shares.all.iter().flat_map(|share| {
            let first = share.marked_member();
            (1..=share.weight()).map(move |index| {
                let member = first.replacen(" p 1 ", &format!(" p {index} "), 1);
                (member, share.ends_at)
            })
        });
        let mut members: Vec<_> = members.collect();
        members.sort();
        members
    }

    /// Sets the ends of the shares of a key to those of Redis.
    pub fn end_shares_at(&mut self, key: &Key, ends: &[(String, MonotonicTime)]) {
        let Some(Entry::Shares(shares)) = self.entries.get_mut(key) else {
            return;
        };
        let newest = shares.newest().ends_at;
        let (later, sooner) = (
            shares.expires_at.since(newest),
            newest.since(shares.expires_at),
        );
        for share in &mut shares.all {
            let first = share.marked_member();
            let found = ends.iter().find(|(member, _)| *member == first);
            share.ends_at = found.map_or(share.ends_at, |(_, end)| *end);
        }
        shares.expires_at = shares.newest().ends_at.after(later).before(sooner);
    }

    /// Acts as if a key with shares had moved to a server whose clock is ahead by `ahead` ms.
    pub fn shift(&mut self, key: &Key, ahead: i64) {
        if let Some(Entry::Shares(shares)) = self.entries.get_mut(key) {
            let by = Duration::from_millis(ahead.unsigned_abs());
            shares.expires_at = match ahead > 0 {
                true => shares.expires_at.after(by),
                false => shares.expires_at.before(by),
            };
        }
    }
}

/// The error of a request for a permit of a key that has readers, or the other way round.
pub fn mixed() -> Error {
    let message = "readers of a read-write lock and permits of a semaphore cannot share a key";
    Error::new(ErrorKind::Protocol, message)
}

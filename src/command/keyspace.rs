//! A model of a Redis server: its locks, fenced values and queues. The file of each command has that command's part of
//! the model. The model does no I/O: its caller passes the time and delivers the notifications. A test runs random
//! histories on the model and on Redis, and compares replies and keys.

pub mod queue;
pub mod shares;

use std::sync::Arc;
use std::time::Duration;

use crate::command::keyspace::queue::{Queue, Waiter};
use crate::command::keyspace::shares::Shares;
use crate::command::value::{Doubt, LockValue};
use crate::command::{Command, Foreign, GrantMessage, Outcome, Reply, value};
use crate::config::key::{Key, KeyMap};
use crate::report::error::{Error, ErrorKind};
use crate::util::clock::MonotonicTime;
use crate::util::id::{HolderId, LeaseId, LeaseStart};

/// If a waiter has to confirm its grant, the key expires this long after the time for the confirmation.
pub const KEPT_UNCONFIRMED: Duration = Duration::from_secs(3);
/// The time at the start of the clock, in µs. It has sixteen digits, like all times of grants.
const FIRST_MICROS: u64 = 1_700_000_000_000_000;

/// The locks, fenced values and queues of a server.
#[derive(Clone, Default)]
pub struct Keyspace {
    pub entries: KeyMap<Entry>,
    pub queues: KeyMap<Queue>,
    /// The fence counter; 0 if it is missing.
    pub last_micros: u64,
    /// The mark of a quorum's node; `None` if it is missing.
    pub mark: Option<Mark>,
}

/// The mark of a quorum's node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// Whether an earlier process of the server wrote the mark.
    pub is_old: bool,
    /// When the node's data begins, in µs. The quarantine is counted from this time.
    pub since: u64,
}

#[derive(Clone)]
pub enum Entry {
    Lock(Lock),
    Shares(Shares),
    Fenced {
        token: u64,
        /// `None` if the value was deleted. The token stays.
        value: Option<Arc<[u8]>>,
        expires_at: Option<MonotonicTime>,
    },
}

#[derive(Clone)]
pub struct Lock {
    pub lease: LeaseId,
    pub micros: u64,
    pub holder: HolderId,
    /// Whether the release of the lock has to grant it to the first waiter in the queue.
    pub marked: bool,
    /// Set while the waiter that was granted the lock has not confirmed the grant.
    pub doubt: Option<Doubt>,
    pub expires_at: MonotonicTime,
}

/// A notification to a client, or to the clients that track a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notification {
    /// A release has granted the key to `lease`, which was queued.
    Granted {
        to: HolderId,
        key: Key,
        lease: LeaseId,
        grant: GrantMessage,
    },
    /// `lease` is now among the first eight in its queue.
    Near {
        to: HolderId,
        key: Key,
        lease: LeaseStart,
    },
    /// The client has to send a request for `lease` at once. Otherwise `lease` loses its place in the queue.
    Called {
        to: HolderId,
        key: Key,
        lease: LeaseStart,
    },
    /// Another client unlocked `lease` by force.
    Forced {
        to: HolderId,
        key: Key,
        lease: LeaseStart,
        by: HolderId,
    },
    /// The key was written or deleted, or has expired.
    Changed(Key),
}

/// The client and the time of one command, and the notifications that the command causes.
pub struct Step<'a> {
    pub now: MonotonicTime,
    /// The client that sent the command.
    pub by: &'a HolderId,
    /// How long a node of a quorum abstains after it may have lost its data (its quarantine). Zero on a single server.
    pub quarantine: Duration,
    /// How far the server's clock is ahead of the true time, in µs. Zero except on nodes of a quorum.
    pub ahead: u64,
    /// Whether this client listens for notifications.
    pub listens: &'a dyn Fn(&HolderId) -> bool,
    pub notifications: &'a mut Vec<Notification>,
}

impl Step<'_> {
    /// The time of the server's clock in µs.
    pub fn micros(&self) -> u64 {
        clock_micros(self.now) + self.ahead
    }

    /// Adds the notification that `key` has changed.
    pub fn changed(&mut self, key: &Key) {
        self.notifications.push(Notification::Changed(key.clone()));
    }
}

impl Keyspace {
    /// Carries out a command, and adds its notifications to `step`.
    pub fn execute(&mut self, command: &Command, step: &mut Step<'_>) -> Outcome {
        if let Some(key) = command.key() {
            self.expire_key(key, step);
        }
        command.model(self, step)
    }

    /// Grants the key to a waiter. Returns the µs part of the waiter's token.
    pub fn grant(
        &mut self,
        key: &Key,
        to: &Waiter,
        ttl: Duration,
        marked: bool,
        step: &mut Step<'_>,
    ) -> u64 {
        self.last_micros = self.next_micros(step);
        let lock = Lock {
            lease: to.lease,
            micros: self.last_micros,
            holder: to.holder.clone(),
            marked,
            doubt: None,
            expires_at: step.now.after(ttl),
        };
        self.entries.insert(key.clone(), Entry::Lock(lock));
        step.changed(key);
        self.last_micros
    }

    /// The number of waiters in the key's queue.
    pub fn queued(&self, key: &Key) -> usize {
        let queue = self.queues.get(key);
        queue.map_or(0, |queue| queue.waiters.len())
    }

    /// Whether `micros` is later than both the node's clock and its fence counter by more than a quarantine.
    pub fn is_too_far_ahead(&self, micros: u64, step: &Step<'_>) -> bool {
        let quarantine = step.quarantine.as_micros() as u64;
        micros > step.micros().max(self.last_micros) + quarantine
    }

    /// Sets the key for `lease` on a node of a quorum.
    pub fn set(
        &mut self,
        key: &Key,
        lease: LeaseId,
        micros: u64,
        ttl: Duration,
        step: &mut Step<'_>,
    ) {
        let lock = Lock {
            lease,
            micros,
            holder: step.by.clone(),
            marked: false,
            doubt: None,
            expires_at: step.now.after(ttl),
        };
        self.entries.insert(key.clone(), Entry::Lock(lock));
        step.changed(key);
    }

    /// The reply of a quorum's node in quarantine; `None` if the node votes. A mark that is missing or in the future
    /// begins a quarantine.
    pub fn abstained(&mut self, step: &Step<'_>) -> Option<Reply> {
        let for_another = self.quarantine_left(false, step);
        (!for_another.is_zero()).then_some(Reply::Abstained { for_another })
    }

    /// The reply `Abstained`, if this node of a quorum may have lost the key of a request. `None` on a single server.
    pub fn lost(&mut self, step: &Step<'_>) -> Option<Reply> {
        let is_in_quorum = !step.quarantine.is_zero();
        is_in_quorum.then(|| self.abstained(step)).flatten()
    }

    /// Returns `reply`, the reply to a release. If it reports a loss, but the node may have lost the key, returns
    /// `Abstained` instead: such a node does not know whether the lease was lost.
    pub fn unless_lost(&mut self, reply: Reply, step: &Step<'_>) -> Reply {
        match reply {
            Reply::Missing | Reply::Taken { .. } => self.lost(step).unwrap_or(reply),
            reply => reply,
        }
    }

    /// Does what lua/data.lua does when a client connects to a node of a quorum: begins a quarantine if the server's
    /// process is new. Returns the time until the node votes.
    pub fn check_data(&mut self, step: &Step<'_>) -> Duration {
        self.quarantine_left(true, step)
    }

    fn quarantine_left(&mut self, is_new_connection: bool, step: &Step<'_>) -> Duration {
        let now = step.micros();
        let is_usable = |mark: &Mark| mark.since <= now && !(is_new_connection && mark.is_old);
        let mark = self.mark.filter(is_usable).unwrap_or(Mark {
            is_old: false,
            since: now,
        });
        self.mark = Some(mark);
        step.quarantine
            .saturating_sub(Duration::from_micros(now - mark.since))
    }

    /// Ends any quarantine of a quorum's node: it appears to have had its data since the start of its clock.
    pub fn mark_as_old_node(&mut self) {
        self.mark = Some(Mark {
            is_old: false,
            since: 0,
        });
    }

    /// Simulates a restart of the server with its data, after which a client connects at once.
    pub fn restart(&mut self, step: &Step<'_>) {
        if let Some(mark) = &mut self.mark {
            mark.is_old = true;
            self.check_data(step);
        }
    }

    /// The value of a lock's key as GET returns it.
    pub fn text(&mut self, key: &Key, step: &mut Step<'_>) -> Option<String> {
        self.expire_key(key, step);
        match self.entries.get(key) {
            Some(Entry::Lock(lock)) => Some(lock.text()),
            _ => None,
        }
    }

    /// Removes all expired keys and queues.
    pub fn expire(&mut self, step: &mut Step<'_>) {
        let expired = |_: &Key, entry: &mut Entry| entry.has_expired(step.now);
        let gone = self.entries.extract_if(expired);
        step.notifications
            .extend(gone.map(|(key, _)| Notification::Changed(key)));
        self.queues.retain(|_, queue| queue.expires_at >= step.now);
    }

    /// Deletes the key with this name in Redis. Returns true if the key existed.
    pub fn delete(&mut self, name: &str, step: &mut Step<'_>) -> bool {
        self.expire(step);
        let key = self.entries.keys().find(|key| key.in_redis() == name);
        let Some(key) = key.cloned() else {
            return false;
        };
        self.entries.remove(&key);
        step.notifications.push(Notification::Changed(key));
        true
    }

    /// Sets a key as another program does. In the model, all foreign values are hashes.
    pub fn set_foreign(&mut self, key: &Key, expires_in: Option<Duration>, step: &mut Step<'_>) {
        let foreign = Entry::Fenced {
            token: 0,
            value: None,
            expires_at: expires_in.map(|left| step.now.after(left)),
        };
        self.entries.insert(key.clone(), foreign);
        step.changed(key);
    }

    /// The value of another program that the key of a lock holds.
    pub fn foreign(&self, key: &Key, now: MonotonicTime) -> Option<Foreign> {
        let Some(Entry::Fenced { expires_at, .. }) = self.entries.get(key) else {
            return None;
        };
        Some(Foreign {
            redis_type: "hash",
            expires_in: expires_at.map(|at| at.since(now)),
            mark: 0,
        })
    }

    /// Deletes all keys, including the fence counter. On a node of a quorum, a quarantine begins.
    pub fn flush(&mut self, step: &Step<'_>) {
        let had_mark = self.mark.is_some();
        *self = Self::default();
        if had_mark {
            self.check_data(step);
        }
    }

    /// Simulates a clock that was set back by `by`: moves the fence counter ahead.
    #[cfg(test)]
    pub fn put_back(&mut self, by: Duration) {
        let ahead = u64::try_from(by.as_micros()).unwrap_or(0);
        self.last_micros = self.last_micros.max(FIRST_MICROS) + ahead;
    }

    /// The entries of a key's queue, as Redis stores them.
    #[cfg(test)]
    pub fn queue(&self, key: &Key) -> Vec<String> {
        let queue = self.queues.get(key);
        queue.map_or_else(Vec::new, |queue| {
            queue.waiters.iter().map(Waiter::entry).collect()
        })
    }

    #[cfg(test)]
    pub fn expires_at(&self, key: &Key) -> Option<MonotonicTime> {
        match self.entries.get(key)? {
            Entry::Lock(lock) => Some(lock.expires_at),
            Entry::Shares(shares) => Some(shares.expires_at),
            Entry::Fenced { expires_at, .. } => *expires_at,
        }
    }

    #[cfg(test)]
    pub fn expire_at(&mut self, key: &Key, at: MonotonicTime) {
        match self.entries.get_mut(key) {
            Some(Entry::Lock(lock)) => lock.expires_at = at,
            Some(Entry::Shares(shares)) => shares.expires_at = at,
            Some(Entry::Fenced { expires_at, .. }) => {
                *expires_at = Some(at);
            }
            None => {}
        }
    }

    /// Whether the key holds a lock or a fenced value.
    #[cfg(test)]
    pub fn contains(&mut self, key: &Key, step: &mut Step<'_>) -> bool {
        self.expire_key(key, step);
        self.entries.contains_key(key)
    }

    pub fn expire_key(&mut self, key: &Key, step: &mut Step<'_>) {
        let entry = self.entries.get(key);
        if entry.is_some_and(|entry| entry.has_expired(step.now)) {
            self.entries.remove(key);
            step.changed(key);
        }
        let queue = self.queues.get(key);
        if queue.is_some_and(|queue| queue.expires_at < step.now) {
            self.queues.remove(key);
        }
    }

    /// The time of the next grant in µs: the server's time, or one more than the last grant's time if that is later.
    pub fn next_micros(&self, step: &Step<'_>) -> u64 {
        step.micros().max(self.last_micros + 1)
    }
}

/// The time of the server's clock in µs.
pub fn clock_micros(now: MonotonicTime) -> u64 {
    let since_boot = now.since(MonotonicTime::at_tick(0)).as_micros();
    FIRST_MICROS + u64::try_from(since_boot).unwrap_or(0)
}

impl Entry {
    fn has_expired(&self, now: MonotonicTime) -> bool {
        match self {
            // A lock expires at the end of its last millisecond, as in Redis.
            Self::Lock(lock) => lock.expires_at < now,
            Self::Shares(shares) => shares.expires_at < now,
            Self::Fenced { expires_at, .. } => expires_at.is_some_and(|at| at < now),
        }
    }

    /// The reply to a request of a lease that does not hold the key.
    pub fn taken(&self) -> Reply {
        let by = match self {
            Self::Lock(lock) => Some(lock.holder.clone()),
            Self::Shares(_) | Self::Fenced { .. } => None,
        };
        Reply::Taken { by }
    }
}

impl Lock {
    /// The parts of the lock's value.
    pub fn value(&self, queued: usize) -> LockValue {
        LockValue {
            lease: self.lease,
            token: Some(token(self.micros)),
            holder: self.holder.clone(),
            queued,
        }
    }

    pub fn text(&self) -> String {
        value::format(
            self.lease,
            self.micros,
            &self.holder,
            self.doubt,
            self.marked,
        )
    }

    /// The time until the lock expires. For a grant that has to be confirmed, the time that is left for the
    /// confirmation.
    pub fn left(&self, now: MonotonicTime) -> Duration {
        self.expires_at.since(now).saturating_sub(self.kept())
    }

    /// How much longer the key exists than the grant counts.
    pub fn kept(&self) -> Duration {
        self.doubt.map_or(Duration::ZERO, |_| KEPT_UNCONFIRMED)
    }
}

pub fn token(micros: u64) -> u64 {
    value::token(&micros.to_string()).expect("sixteen digits leave room for the lower bits")
}

pub fn no_lock() -> Error {
    Error::new(ErrorKind::Protocol, value::NO_LOCK)
}

pub fn no_value() -> Error {
    Error::new(ErrorKind::Protocol, value::NO_FENCED_VALUE)
}

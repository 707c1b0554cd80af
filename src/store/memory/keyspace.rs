//! The state of locks without a server: what each script does, as plain code, and so what the scripts
//! have to do (a test compares them on generated histories). Pure: it is told what time it is, does no
//! I/O, and returns what there is to tell.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use crate::clock::Moment;
use crate::error::{Error, ErrorKind};
use crate::id::{HolderId, LeaseId};
use crate::key::{Key, KeyMap};
use crate::store::command::{Command, Reply, Standing};
use crate::store::value::{self, LockValue};

/// Longest value whose line somebody can still join, in bytes.
const MAX_LINE: usize = 8192;
/// For how long a key is kept for somebody who polls.
const KEPT_FOR_POLLING: Duration = Duration::from_millis(100);
/// The time of a grant has sixteen digits on the wire.
const FIRST_MICROS: u64 = 1_700_000_000_000_000;

#[derive(Clone, Default)]
pub(crate) struct Keyspace {
    entries: KeyMap<Entry>,
    /// The fence counter.
    last_micros: u64,
}

#[derive(Clone)]
enum Entry {
    Lock(Lock),
    Fenced { token: u64, value: Arc<[u8]> },
}

#[derive(Clone)]
struct Lock {
    lease: LeaseId,
    micros: u64,
    holder: HolderId,
    line: VecDeque<InLine>,
    expires_at: Moment,
}

#[derive(Clone)]
struct InLine {
    lease: LeaseId,
    /// Nothing for one that polls.
    ttl: Option<Duration>,
    holder: HolderId,
}

/// What is to be told to whom, in this order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum News {
    /// `lease`, which stood in line, has the key.
    Granted {
        to: HolderId,
        key: Key,
        lease: LeaseId,
        token: u64,
    },
    /// `lease` was ended by another client's will.
    Forced {
        to: HolderId,
        key: Key,
        lease: LeaseId,
        by: HolderId,
    },
    /// The key was written to, deleted, or has expired.
    Changed(Key),
}

/// One command being carried out.
pub(crate) struct Step<'a> {
    pub(crate) now: Moment,
    /// Who asks.
    pub(crate) by: &'a HolderId,
    /// Whether a client can be told.
    pub(crate) listens: &'a dyn Fn(&HolderId) -> bool,
    pub(crate) news: &'a mut Vec<News>,
}

impl Keyspace {
    pub(crate) fn carry_out(
        &mut self,
        command: &Command,
        step: &mut Step<'_>,
    ) -> Result<Reply, Error> {
        if let Some(key) = command.key() {
            self.expire_key(key, step);
        }
        match command {
            Command::Acquire {
                key,
                lease,
                ttl,
                standing,
            } => self.acquire(key, *lease, *ttl, *standing, step),
            Command::Release { key, lease, .. } => Ok(self.release(key, *lease, false, step)),
            Command::ForceUnlock { key, lease } => Ok(self.release(key, *lease, true, step)),
            Command::Renew { key, lease, ttl } => Ok(self.renew(key, *lease, *ttl, step)),
            Command::Adopt { key, lease, grant } => {
                let ticket = (grant.from, value::micros_of(grant.token));
                let ttl = grant.renew.then_some(grant.ttl);
                Ok(self.adopt(key, *lease, ticket, ttl, step))
            }
            Command::Inspect { key } => self.inspect(key, step),
            Command::Write { key, token, value } => self.write(key, *token, value, step),
            Command::Read { key } => self.read(key),
            Command::Flush { .. } => Ok(Reply::Done),
        }
    }

    fn acquire(
        &mut self,
        key: &Key,
        lease: LeaseId,
        ttl: Duration,
        standing: Standing,
        step: &mut Step<'_>,
    ) -> Result<Reply, Error> {
        let stays_free = Reply::Contended {
            expires_in: Duration::ZERO,
            in_line: false,
        };
        let lock = match self.entries.get_mut(key) {
            Some(Entry::Lock(lock)) => lock,
            Some(Entry::Fenced { .. }) => return Err(no_lock()),
            // Who asks again takes no free key: should it have given up meanwhile, nobody would let
            // go of it.
            None if standing == Standing::Kept => return Ok(stays_free),
            None => {
                let micros = self.next_micros(step.now);
                let lock = Lock {
                    lease,
                    micros,
                    holder: step.by.clone(),
                    line: VecDeque::new(),
                    expires_at: step.now.after(ttl),
                };
                self.entries.insert(key.clone(), Entry::Lock(lock));
                step.news.push(News::Changed(key.clone()));
                let token = token(micros);
                return Ok(Reply::Granted { token });
            }
        };
        if lock.lease == lease {
            // Its turn came while it stood in line.
            lock.expires_at = step.now.after(ttl);
            step.news.push(News::Changed(key.clone()));
            let token = token(lock.micros);
            return Ok(Reply::Granted { token });
        }
        let stood = lock.line.iter().any(|waiting| waiting.lease == lease);
        let joins = match standing {
            Standing::None | Standing::Kept => None,
            Standing::Polling => Some(None),
            Standing::Told => Some(Some(ttl)),
        };
        let mut in_line = stood && standing != Standing::None;
        if let Some(ttl) = joins.filter(|_| !stood && lock.text().len() <= MAX_LINE) {
            lock.line.push_back(InLine {
                lease,
                ttl,
                holder: step.by.clone(),
            });
            in_line = true;
            step.news.push(News::Changed(key.clone()));
        }
        Ok(Reply::Contended {
            expires_in: lock.expires_at.since(step.now),
            in_line,
        })
    }

    fn release(&mut self, key: &Key, lease: LeaseId, forced: bool, step: &mut Step<'_>) -> Reply {
        let lock = match self.entries.get_mut(key) {
            Some(Entry::Lock(lock)) => lock,
            Some(Entry::Fenced { .. }) => return Reply::Taken { by: None },
            None => return Reply::Missing,
        };
        if lock.lease == lease {
            if forced {
                step.news.push(News::Forced {
                    to: lock.holder.clone(),
                    key: key.clone(),
                    lease,
                    by: step.by.clone(),
                });
            }
            self.pass_on(key, step);
            return Reply::Done;
        }
        let Some(place) = lock.line.iter().position(|waiting| waiting.lease == lease) else {
            let by = Some(lock.holder.clone());
            return Reply::Taken { by };
        };
        lock.line.remove(place);
        step.news.push(News::Changed(key.clone()));
        Reply::Done
    }

    /// Grants the key to the first in line who can be told or polls, or deletes it.
    fn pass_on(&mut self, key: &Key, step: &mut Step<'_>) {
        let Some(Entry::Lock(mut lock)) = self.entries.remove(key) else {
            return;
        };
        step.news.push(News::Changed(key.clone()));
        if lock.line.is_empty() {
            return;
        }
        let micros = self.next_micros(step.now);
        while let Some(InLine { lease, ttl, holder }) = lock.line.pop_front() {
            if ttl.is_some() && !(step.listens)(&holder) {
                // That client has gone.
                continue;
            }
            if ttl.is_some() {
                step.news.push(News::Granted {
                    to: holder.clone(),
                    key: key.clone(),
                    lease,
                    token: token(micros),
                });
            }
            let granted = Lock {
                lease,
                micros,
                holder,
                line: lock.line,
                expires_at: step.now.after(ttl.unwrap_or(KEPT_FOR_POLLING)),
            };
            self.entries.insert(key.clone(), Entry::Lock(granted));
            return;
        }
    }

    fn renew(&mut self, key: &Key, lease: LeaseId, ttl: Duration, step: &mut Step<'_>) -> Reply {
        let lock = match self.entries.get_mut(key) {
            Some(Entry::Lock(lock)) => lock,
            Some(Entry::Fenced { .. }) => return Reply::Taken { by: None },
            None => return Reply::Missing,
        };
        if lock.lease != lease {
            let by = Some(lock.holder.clone());
            return Reply::Taken { by };
        }
        let expires_at = step.now.after(ttl);
        if lock.expires_at < expires_at {
            lock.expires_at = expires_at;
            step.news.push(News::Changed(key.clone()));
        }
        Reply::Done
    }

    fn adopt(
        &mut self,
        key: &Key,
        lease: LeaseId,
        ticket: (LeaseId, u64),
        ttl: Option<Duration>,
        step: &mut Step<'_>,
    ) -> Reply {
        let lock = match self.entries.get_mut(key) {
            Some(Entry::Lock(lock)) => lock,
            Some(Entry::Fenced { .. }) => return Reply::Taken { by: None },
            None => return Reply::Missing,
        };
        if (lock.lease, lock.micros) != ticket {
            let by = Some(lock.holder.clone());
            return Reply::Taken { by };
        }
        lock.lease = lease;
        lock.holder = step.by.clone();
        let asked = ttl.map_or(step.now, |ttl| step.now.after(ttl));
        lock.expires_at = lock.expires_at.max(asked);
        step.news.push(News::Changed(key.clone()));
        Reply::Adopted {
            expires_in: lock.expires_at.since(step.now),
        }
    }

    fn inspect(&self, key: &Key, step: &Step<'_>) -> Result<Reply, Error> {
        match self.entries.get(key) {
            None => Ok(Reply::Missing),
            Some(Entry::Fenced { .. }) => Err(no_lock()),
            Some(Entry::Lock(lock)) => Ok(Reply::Found {
                value: Box::new(LockValue {
                    lease: lock.lease,
                    token: token(lock.micros),
                    holder: lock.holder.clone(),
                    in_line: lock.line.len(),
                }),
                expires_in: Some(lock.expires_at.since(step.now)),
            }),
        }
    }

    fn write(
        &mut self,
        key: &Key,
        token: u64,
        value: &Arc<[u8]>,
        step: &mut Step<'_>,
    ) -> Result<Reply, Error> {
        match self.entries.get(key) {
            Some(Entry::Lock(_)) => return Err(no_value()),
            Some(Entry::Fenced { token: seen, .. }) if *seen > token => {
                return Ok(Reply::Stale { token: *seen });
            }
            _ => {}
        }
        let value = Arc::clone(value);
        self.entries
            .insert(key.clone(), Entry::Fenced { token, value });
        step.news.push(News::Changed(key.clone()));
        Ok(Reply::Done)
    }

    fn read(&self, key: &Key) -> Result<Reply, Error> {
        match self.entries.get(key) {
            None => Ok(Reply::Missing),
            Some(Entry::Lock(_)) => Err(no_value()),
            Some(Entry::Fenced { value, .. }) => Ok(Reply::Value(value.to_vec())),
        }
    }

    /// What stands under the key of a lock, as GET says it.
    pub(crate) fn text(&mut self, key: &Key, step: &mut Step<'_>) -> Option<String> {
        self.expire_key(key, step);
        match self.entries.get(key) {
            Some(Entry::Lock(lock)) => Some(lock.text()),
            _ => None,
        }
    }

    /// Removes what has expired, whoever asks for it.
    pub(crate) fn expire(&mut self, step: &mut Step<'_>) {
        let expired = |_: &Key, entry: &mut Entry| entry.has_expired(step.now);
        let gone = self.entries.extract_if(expired);
        step.news.extend(gone.map(|(key, _)| News::Changed(key)));
    }

    /// Forgets everything, the fence counter included.
    pub(crate) fn flush(&mut self) {
        *self = Self::default();
    }

    /// As if it had been deleted by hand.
    #[cfg(test)]
    pub(crate) fn remove(&mut self, key: &Key) {
        self.entries.remove(key);
    }

    /// As if the clock had been put back by so much.
    #[cfg(test)]
    pub(crate) fn put_back(&mut self, by: Duration) {
        let ahead = u64::try_from(by.as_micros()).unwrap_or(0);
        self.last_micros = self.last_micros.max(FIRST_MICROS) + ahead;
    }

    #[cfg(test)]
    pub(crate) fn expires_at(&self, key: &Key) -> Option<Moment> {
        match self.entries.get(key)? {
            Entry::Lock(lock) => Some(lock.expires_at),
            Entry::Fenced { .. } => None,
        }
    }

    #[cfg(test)]
    pub(crate) fn expire_at(&mut self, key: &Key, at: Moment) {
        if let Some(Entry::Lock(lock)) = self.entries.get_mut(key) {
            lock.expires_at = at;
        }
    }

    fn expire_key(&mut self, key: &Key, step: &mut Step<'_>) {
        let entry = self.entries.get(key);
        if entry.is_some_and(|entry| entry.has_expired(step.now)) {
            self.entries.remove(key);
            step.news.push(News::Changed(key.clone()));
        }
    }

    /// The time, made strictly increasing.
    fn next_micros(&mut self, now: Moment) -> u64 {
        let since_boot = now.since(Moment::at_tick(0)).as_micros();
        let micros = FIRST_MICROS + u64::try_from(since_boot).unwrap_or(0);
        self.last_micros = micros.max(self.last_micros + 1);
        self.last_micros
    }
}

impl Entry {
    fn has_expired(&self, now: Moment) -> bool {
        match self {
            // As Redis does: at the end of its last millisecond.
            Self::Lock(lock) => lock.expires_at < now,
            Self::Fenced { .. } => false,
        }
    }
}

impl Lock {
    fn text(&self) -> String {
        let Self {
            lease,
            micros,
            holder,
            line,
            ..
        } = self;
        let mut text = format!("lh1 {lease:?} {micros} {holder}");
        for InLine { lease, ttl, holder } in line {
            let millis = ttl.map_or(0, |ttl| ttl.as_millis());
            text += &format!(" {lease:?},{millis},{holder}");
        }
        text
    }
}

fn token(micros: u64) -> u64 {
    value::token(&micros.to_string()).expect("sixteen digits leave room for the lower bits")
}

fn no_lock() -> Error {
    Error::new(ErrorKind::Protocol, value::NO_LOCK)
}

fn no_value() -> Error {
    Error::new(ErrorKind::Protocol, value::NO_FENCED_VALUE)
}

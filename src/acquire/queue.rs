//! The queues of one client's own threads, one for each key that is request or held, first in first
//! out. Only the first in queue talks to Redis, and only while no thread of this client has the lock.
//! Does no I/O; knows who waits, who holds, and what was asked for on behalf of the queue.

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests;
mod waiter;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, bounded};

use crate::acquire::abandoned::Abandoned;
use crate::lease::{Lease, LeasesByKey, Options};
use crate::loss::LossReason;
use crate::store::{FIRST_USUAL_PLACE, GrantMessage, QueueMode, in_front, micros_of};
use crate::util::clock::{Clock, MonotonicTime};
use crate::util::id::{HolderId, LeaseId, LeaseStart};
use crate::util::key::{Key, KeyMap};
use crate::util::sync::{Mutex, MutexGuard};

use waiter::Waiter;
pub(crate) use waiter::WakeReason;

const SHARDS: usize = 64;
/// Longer ones are given back to the heap.
const LONGEST_SPARE: usize = 16;
/// By how much the clock of Redis may run ahead of this machine's during a wait: a grant that seems to be later has to
/// be confirmed.
const CLOCK_DRIFT: Duration = Duration::from_secs(60);

pub(crate) struct LocalQueues {
    clock: Clock,
    shards: Box<[Mutex<Shard>]>,
}

/// Who holds, and who waits, by key. Apart: of locks that are held there may be a million, and hardly any
/// of them has a queue.
#[derive(Default)]
struct Shard {
    holders: LeasesByKey,
    queues: KeyMap<KeyQueue>,
    /// An emptied queue, for the next key.
    spare: VecDeque<Arc<Waiter>>,
    abandoned: Abandoned,
}

/// There while somebody waits, or while it says something of a lock that is held.
#[derive(Default)]
struct KeyQueue {
    waiters: VecDeque<Arc<Waiter>>,
    entry: Option<QueueEntry>,
    /// The place in µs of the last entry that left the queue of Redis ungranted. The next entry joins there.
    since: Option<u64>,
    /// The lease that another client took away, as a message said before a caller had entered on it.
    forced: Option<(LeaseStart, HolderId)>,
}

/// The lease that was asked for on behalf of the queue, and may be queued in Redis. It outlasts the waiter
/// that asked: the first waiter goes on with it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueueEntry {
    pub(crate) lease: LeaseId,
    pub(crate) options: Options,
    /// When it was first asked for: it was granted after that, if it was.
    pub(crate) asked_at: MonotonicTime,
    pub(crate) granted: Option<GrantMessage>,
    /// It was notified of a grant, now or before its last request, and has not been found in the queue since.
    was_granted: bool,
    /// A message has named it, so other users know its id or published that message: its next grant is confirmed.
    is_known: bool,
    /// A request under it is unanswered: only its caller may give it back.
    asked: bool,
    /// When it joined the queue of Redis, by the clock of Redis in µs.
    since: Option<u64>,
    /// It joined to be notified of its grant; otherwise it has to poll.
    notified: bool,
    /// `Store::notification_epoch` at the last request that found it in the queue.
    notification_epoch: u64,
    /// It is one of the first in that queue, and its key is tracked.
    is_tracked: bool,
}

impl QueueEntry {
    /// Whether Redis can have made the token of this grant, by its clock: after the entry joined the queue, and
    /// before `now`.
    pub(crate) fn is_plausible(&self, grant: GrantMessage, now: MonotonicTime) -> bool {
        let Some(since) = self.since else {
            return false;
        };
        let joined = if since < FIRST_USUAL_PLACE {
            since + FIRST_USUAL_PLACE
        } else {
            since
        };
        let waited = (now.since(self.asked_at) + CLOCK_DRIFT).as_micros();
        let latest = joined.saturating_add(u64::try_from(waited).unwrap_or(u64::MAX));
        (joined..=latest).contains(&micros_of(grant.token))
    }
}

/// The lease to which a grant belongs that a message reports.
#[must_use]
#[derive(Debug, PartialEq)]
pub(crate) enum GrantOf {
    /// That of a waiter.
    Waiter,
    /// A lease that this client gave up while it waited: the caller has to release the grant.
    AbandonedLease,
    /// A lease that does not wait: its grant is known already, or the message is forged.
    OtherLease,
}

/// How a waiter asks Redis for the lock.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum EntryKind {
    /// The lease that may be queued already.
    Existing,
    /// A new lease, at the place of a entry that joined at `since`.
    Rejoin {
        since: u64,
    },
    New,
}

/// Somebody's place in queue; left when dropped.
pub(crate) struct WaiterGuard<'a> {
    queues: &'a LocalQueues,
    key: &'a Key,
    waiter: Arc<Waiter>,
    /// What cancels its waiting, and what wakes it besides.
    cancel: Option<(&'a Receiver<()>, Receiver<()>)>,
    left: bool,
}

/// What somebody in queue can do now.
#[derive(Debug)]
pub(crate) enum QueuePosition {
    /// Wait: others are before it.
    Behind,
    /// Wait: a thread of this client has the lock, for so long at least.
    Held(Duration),
    /// Ask Redis.
    First,
    /// Take what Redis has granted.
    Granted(QueueEntry, GrantMessage),
}

impl LocalQueues {
    pub(crate) fn new(clock: Clock) -> Self {
        let shards = (0..SHARDS).map(|_| Mutex::default()).collect();
        Self { clock, shards }
    }

    /// Takes the last place in queue. `cancel` ends sleeps there when it is ready.
    pub(crate) fn join<'a>(
        &'a self,
        key: &'a Key,
        options: Options,
        cancel: Option<&'a Receiver<()>>,
    ) -> WaiterGuard<'a> {
        self.join_in(self.shard(key), key, options, cancel)
    }

    /// As [`join`](Self::join), but only where nobody waits.
    pub(crate) fn join_if_empty<'a>(
        &'a self,
        key: &'a Key,
        options: Options,
    ) -> Option<WaiterGuard<'a>> {
        let shard = self.shard(key);
        (!shard.waits_for(key)).then(|| self.join_in(shard, key, options, None))
    }

    fn join_in<'a>(
        &'a self,
        mut shard: MutexGuard<'_, Shard>,
        key: &'a Key,
        options: Options,
        cancel: Option<&'a Receiver<()>>,
    ) -> WaiterGuard<'a> {
        let (bell, rung) = cancel.map(|_| bounded(1)).unzip();
        let waiter = Arc::new(Waiter::new(options, bell));
        let Shard { queues, spare, .. } = &mut *shard;
        let queue = queues.entry(key.clone()).or_insert_with(|| KeyQueue {
            waiters: std::mem::take(spare),
            ..KeyQueue::default()
        });
        queue.waiters.push_back(Arc::clone(&waiter));
        WaiterGuard {
            queues: self,
            key,
            waiter,
            cancel: cancel.zip(rung),
            left: false,
        }
    }

    /// `lease` is not held any more: the first waiter asks Redis now.
    pub(crate) fn remove_holder(&self, lease: &Lease) {
        let holder = self.shard(&lease.grant().key).remove_holder(lease);
        // After the mutex is released.
        drop(holder);
    }

    /// Passes the lock on to the first in queue, if there is one and `pass_on` gives a lease for its
    /// options. `pass_on` is called under the queue's lock.
    pub(crate) fn hand_off(
        &self,
        lease: &Lease,
        pass_on: impl FnOnce(Options) -> Option<Arc<Lease>>,
    ) -> bool {
        let key = &lease.grant().key;
        let mut shard = self.shard(key);
        let holder = shard.holders.get(key);
        let is_holder = holder.is_some_and(|holder| std::ptr::eq(&**holder, lease));
        let queue = shard.queues.get(key).filter(|_| is_holder);
        let Some(first) = queue.and_then(|queue| queue.waiters.front().cloned()) else {
            return false;
        };
        let Some(next) = pass_on(first.options) else {
            return false;
        };
        if let Some(queue) = shard.queues.get_mut(key) {
            queue.waiters.pop_front();
        }
        shard.tidy(key);
        let before = shard.holders.insert(Arc::clone(&next));
        // Under the queue's lock: a leaving waiter finds itself in queue or finds the lease.
        first.hand(next);
        drop(shard);
        first.ring();
        drop(before);
        true
    }

    /// Wakes the first in queue for `key`.
    pub(crate) fn wake(&self, key: &Key) {
        if let Some(queue) = self.shard(key).queues.get(key) {
            queue.wake();
        }
    }

    /// Wakes the first in queue for each key: each of them asks Redis once.
    pub(crate) fn wake_first(&self) {
        for shard in &self.shards {
            shard.lock().queues.values().for_each(KeyQueue::wake);
        }
    }

    /// Wakes everybody.
    pub(crate) fn wake_all(&self) {
        for shard in &self.shards {
            for queue in shard.lock().queues.values() {
                queue.waiters.iter().for_each(|waiter| waiter.wake());
            }
        }
    }

    /// A message says that Redis has granted `key` to `lease`. Wakes the waiter whose entry this is.
    pub(crate) fn granted(&self, key: &Key, lease: LeaseId, grant: GrantMessage) -> GrantOf {
        let mut shard = self.shard(key);
        if let Some(queue) = shard.queues.get_mut(key)
            && let Some(entry) = queue.entry.as_mut().filter(|entry| entry.lease == lease)
        {
            let to_confirm = grant.to_confirm || entry.is_known;
            entry.granted = Some(GrantMessage {
                to_confirm,
                ..grant
            });
            (entry.was_granted, entry.is_known) = (true, true);
            queue.wake();
            return GrantOf::Waiter;
        }
        if shard.abandoned.take(lease) {
            return GrantOf::AbandonedLease;
        }
        GrantOf::OtherLease
    }

    /// `lease` is among the first in the queue of Redis: its waiter asks again before long.
    pub(crate) fn near(&self, key: &Key, lease: LeaseStart) {
        let shard = self.shard(key);
        if let Some(queue) = shard.queues.get(key)
            && queue
                .entry
                .is_some_and(|entry| entry.lease.start() == lease)
            && let Some(first) = queue.waiters.front()
        {
            first.nudge();
        }
    }

    /// `lease` came to this client without a wait. Two cannot be held: the older one is lost.
    pub(crate) fn hold(&self, lease: &Arc<Lease>) {
        let key = &lease.grant().key;
        let mut shard = self.shard(key);
        let is_newer = |holder: &Arc<Lease>| holder.grant().token > lease.grant().token;
        // It ended before this was told of, and a thread of ours has come to have the lock.
        let lost = if shard.holders.get(key).is_some_and(is_newer) {
            Some(Arc::clone(lease))
        } else {
            shard.holders.insert(Arc::clone(lease))
        };
        drop(shard);
        if let Some(lost) = lost {
            lost.lose(self.clock.now(), LossReason::Deleted);
        }
    }

    /// A message says that `by` took the lock from `lease`: returns the holder of this client that has the lease. Marks
    /// a grant that no caller has entered on yet as one to confirm.
    pub(crate) fn forced(&self, key: &Key, lease: LeaseStart, by: &HolderId) -> Option<Arc<Lease>> {
        let mut shard = self.shard(key);
        let holder = shard.holders.get(key);
        if let Some(holder) = holder.filter(|holder| holder.grant().id.start() == lease) {
            return Some(Arc::clone(holder));
        }
        if holder.is_none() && !shard.queues.contains_key(key) {
            return None;
        }
        let queue = shard.queues.entry(key.clone()).or_default();
        queue.forced = Some((lease, by.clone()));
        if let Some(entry) = &mut queue.entry
            && entry.lease.start() == lease
        {
            entry.is_known = true;
            if let Some(grant) = &mut entry.granted {
                grant.to_confirm = true;
            }
        }
        None
    }

    pub(crate) fn holders(&self) -> Vec<Arc<Lease>> {
        let shards = self.shards.iter();
        let held = |shard: &Mutex<Shard>| -> Vec<Arc<Lease>> {
            shard.lock().holders.iter().cloned().collect()
        };
        shards.flat_map(held).collect()
    }

    /// The entry on `key`, if that is tracked for it.
    pub(crate) fn tracked_entry_of(&self, key: &Key) -> Option<LeaseId> {
        let entry = self
            .shard(key)
            .queues
            .get(key)
            .and_then(|queue| queue.entry);
        entry
            .filter(|entry| entry.is_tracked)
            .map(|entry| entry.lease)
    }

    /// Forgets the entry of `lease`, which is not queued in Redis or about to be released. The next entry joins at
    /// its place.
    pub(crate) fn forget_entry(&self, key: &Key, lease: LeaseId) {
        let mut shard = self.shard(key);
        shard.abandoned.insert(lease);
        if let Some(queue) = shard.queues.get_mut(key)
            && let Some(entry) = queue.entry.take_if(|entry| entry.lease == lease)
        {
            queue.since = entry.since.or(queue.since);
        }
    }

    /// Takes back what was asked for and not granted yet, of all queues.
    pub(crate) fn abandon_all(&self) -> Vec<(Key, QueueEntry)> {
        let mut entries = Vec::new();
        for shard in &self.shards {
            for (key, queue) in shard.lock().queues.iter_mut() {
                entries.extend(queue.abandon().map(|entry| (key.clone(), entry)));
            }
        }
        entries
    }

    fn shard(&self, key: &Key) -> MutexGuard<'_, Shard> {
        self.shards[key.shard(SHARDS)].lock()
    }

    #[cfg(test)]
    pub(crate) fn queues(&self) -> usize {
        let keys = |shard: &Mutex<Shard>| {
            let Shard {
                holders, queues, ..
            } = &*shard.lock();
            let held_only = |lease: &&Arc<Lease>| !queues.contains_key(&lease.grant().key);
            queues.len() + holders.iter().filter(held_only).count()
        };
        self.shards.iter().map(keys).sum()
    }
}

impl Shard {
    fn waits_for(&self, key: &Key) -> bool {
        let queue = self.queues.get(key);
        queue.is_some_and(|queue| !queue.waiters.is_empty())
    }

    /// Removes the holder and wakes the first waiter. Returns the holder, to be dropped after the mutex is released.
    #[must_use]
    fn remove_holder(&mut self, lease: &Lease) -> Option<Arc<Lease>> {
        let holder = self.holders.remove(lease);
        let key = &lease.grant().key;
        if let Some(queue) = self.queues.get(key) {
            queue.wake();
            self.tidy(key);
        }
        holder
    }

    /// Forgets the queue for `key` if it says nothing any more.
    fn tidy(&mut self, key: &Key) {
        let is_held = self.holders.get(key).is_some();
        let says_something = |queue: &KeyQueue| {
            let knows = queue.entry.is_some() || queue.forced.is_some();
            !queue.waiters.is_empty() || (is_held && knows)
        };
        if !self.queues.get(key).is_some_and(says_something)
            && let Some(queue) = self.queues.remove(key)
            && queue.waiters.capacity() <= LONGEST_SPARE
        {
            self.spare = queue.waiters;
        }
    }
}

impl KeyQueue {
    /// Removes the entry. Returns it, unless its caller is to give it back.
    fn abandon(&mut self) -> Option<QueueEntry> {
        self.entry.take().filter(|entry| !entry.asked)
    }

    fn wake(&self) {
        if let Some(first) = self.waiters.front() {
            first.wake();
        }
    }

    fn is_first(&self, waiter: &Arc<Waiter>) -> bool {
        let first = self.waiters.front();
        first.is_some_and(|first| Arc::ptr_eq(first, waiter))
    }
}

impl WaiterGuard<'_> {
    pub(crate) fn position(&self, now: MonotonicTime) -> QueuePosition {
        let shard = self.queues.shard(self.key);
        let Some(queue) = shard
            .queues
            .get(self.key)
            .filter(|queue| queue.is_first(&self.waiter))
        else {
            return QueuePosition::Behind;
        };
        if let Some(entry) = queue.entry
            && let Some(grant) = entry.granted
        {
            return QueuePosition::Granted(entry, grant);
        }
        let holder = shard.holders.get(self.key);
        let live = holder.and_then(|lease| lease.valid_for(now));
        live.map_or(QueuePosition::First, QueuePosition::Held)
    }

    /// The lease that was handed off to it, if one was: it has left the queue with that.
    pub(crate) fn handed(&self) -> Option<Arc<Lease>> {
        self.waiter.handed()
    }

    /// The lease to ask Redis for: the entry, if its options are equal, or else `fresh`. And a entry with other
    /// options, to be given back.
    pub(crate) fn entry(
        &self,
        fresh: LeaseId,
        now: MonotonicTime,
    ) -> (LeaseId, EntryKind, Option<QueueEntry>) {
        let mut shard = self.queues.shard(self.key);
        let Some(queue) = shard.queues.get_mut(self.key) else {
            return (fresh, EntryKind::New, None);
        };
        let options = self.waiter.options;
        if queue.entry.is_some_and(|entry| entry.asked) {
            // The thread that sent its request was handed the lock before the answer came.
            return (fresh, EntryKind::New, None);
        }
        if let Some(entry) = queue
            .entry
            .as_mut()
            .filter(|entry| entry.options == options)
        {
            (entry.granted, entry.is_tracked, entry.asked) = (None, false, true);
            return (entry.lease, EntryKind::Existing, None);
        }
        let fresh_claim = QueueEntry {
            lease: fresh,
            options,
            asked_at: now,
            granted: None,
            was_granted: false,
            is_known: false,
            asked: true,
            since: None,
            notified: false,
            notification_epoch: 0,
            is_tracked: false,
        };
        let entry_kind = queue
            .since
            .map_or(EntryKind::New, |since| EntryKind::Rejoin { since });
        (fresh, entry_kind, queue.entry.replace(fresh_claim))
    }

    /// Notes that `lease` is in the queue of Redis, after the answer to a request with this queue_mode. Returns
    /// whether it will be notified of its grant; nothing if it is not the queue's entry any more.
    #[must_use]
    pub(crate) fn note_queued(
        &self,
        lease: LeaseId,
        since: u64,
        queue_mode: QueueMode,
        notification_epoch: u64,
    ) -> Option<bool> {
        let mut shard = self.queues.shard(self.key);
        let queue = shard.queues.get_mut(self.key);
        let entry = queue.and_then(|queue| queue.entry.as_mut());
        let entry = entry.filter(|entry| entry.lease == lease)?;
        (entry.since, entry.asked, entry.notification_epoch) =
            (Some(since), false, notification_epoch);
        // The request found it in the queue, so a grant that was heard of before was forged. A later one may be true.
        entry.was_granted = entry.granted.is_some();
        entry.notified = match queue_mode {
            QueueMode::Existing { notified } => entry.notified || notified,
            joined => !joined.polls(),
        };
        Some(entry.notified)
    }

    /// Forgets the queue's entry of `lease`, which is missing from the queue of Redis. If its position may have come, and
    /// its answer too late, the next entry joins in front. Returns the connection that should have notified it of
    /// its position, if one should: see `Store::notification_epoch`.
    pub(crate) fn remove_missing_entry(&self, lease: LeaseId) -> Option<u64> {
        let mut shard = self.queues.shard(self.key);
        let queue = shard.queues.get_mut(self.key)?;
        let entry = queue.entry.take_if(|entry| entry.lease == lease)?;
        shard.abandoned.insert(lease);
        let queue = shard.queues.get_mut(self.key)?;
        let relied_on = entry.notified && !entry.was_granted;
        let since = entry.since.or(queue.since);
        queue.since = if relied_on {
            since
        } else {
            since.map(in_front)
        };
        relied_on.then_some(entry.notification_epoch)
    }

    /// Notes that the key of the queue's entry is tracked.
    pub(crate) fn note_tracked(&self) {
        let mut shard = self.queues.shard(self.key);
        let queue = shard.queues.get_mut(self.key);
        if let Some(entry) = queue.and_then(|queue| queue.entry.as_mut()) {
            entry.is_tracked = true;
        }
    }

    /// Sleeps until woken or cancelled, but not past `until`.
    pub(crate) fn wait(&self, until: MonotonicTime) -> WakeReason {
        let cancel = self.cancel.as_ref().map(|(cancel, rung)| (*cancel, rung));
        self.waiter.sleep(until, &self.queues.clock, cancel)
    }

    /// Leaves the queue with the lock, which Redis has granted. Returns what has to be given back: a
    /// lease that was handed off meanwhile, because its holder did not know yet that it was lost; and which client
    /// has ended this lease by force, if a message said so.
    #[must_use]
    pub(crate) fn leave_with(
        mut self,
        lease: &Arc<Lease>,
    ) -> (Option<Arc<Lease>>, Option<HolderId>) {
        self.left = true;
        let mut shard = self.queues.shard(self.key);
        let mut forced = None;
        if let Some(queue) = shard.queues.get_mut(self.key) {
            queue.waiters.retain(|one| !Arc::ptr_eq(one, &self.waiter));
            queue.entry.take_if(|entry| entry.lease == lease.grant().id);
            queue.since = None;
            forced = queue.forced.take();
        }
        let before = shard.holders.insert(Arc::clone(lease));
        shard.tidy(self.key);
        let handed = self.handed();
        drop(shard);
        let now = self.queues.clock.now();
        if let Some(before) = before {
            // Redis has granted the lock anew, so this client's older holder has lost it.
            before.lose(now, LossReason::Deleted);
        }
        let forced = forced.filter(|(start, _)| *start == lease.grant().id.start());
        (handed, forced.map(|(_, by)| by))
    }

    /// Leaves the queue without the lock. Returns what has to be given back: a lease that was handed
    /// to it meanwhile, or what was asked for on behalf of a queue that has nobody left.
    pub(crate) fn leave(mut self) -> (Option<Arc<Lease>>, Option<QueueEntry>) {
        self.left = true;
        self.quit(false)
    }

    fn quit(&self, panics: bool) -> (Option<Arc<Lease>>, Option<QueueEntry>) {
        let mut shard = self.queues.shard(self.key);
        let handed = self.handed();
        let Some(queue) = shard.queues.get_mut(self.key) else {
            return (handed, None);
        };
        let was_first = queue.is_first(&self.waiter);
        queue.waiters.retain(|one| !Arc::ptr_eq(one, &self.waiter));
        if was_first {
            if panics && let Some(entry) = &mut queue.entry {
                // There will be no answer.
                entry.asked = false;
            }
            // A wake-up that came for the leaving waiter is for the next one.
            queue.wake();
        }
        let abandoned = if queue.waiters.is_empty() {
            queue.abandon()
        } else {
            None
        };
        if let Some(entry) = &abandoned {
            shard.abandoned.insert(entry.lease);
        }
        shard.tidy(self.key);
        (handed, abandoned)
    }
}

impl Drop for WaiterGuard<'_> {
    fn drop(&mut self) {
        if !self.left {
            self.quit(true);
        }
    }
}

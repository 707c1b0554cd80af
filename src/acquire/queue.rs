//! The queues of one client's own threads: one for each key that threads want, first come, first served. Only the first
//! waiter of a queue asks Redis, and only while no thread of this client has the lock. Also knows the holders. Does no
//! I/O.

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded};

use crate::lease::{Lease, LeasesByKey, Options};
use crate::loss::LossReason;
use crate::store::{FIRST_USUAL_PLACE, GrantMessage, QueueMode, front_place, micros_of};
use crate::util::clock::{Clock, MonotonicTime};
use crate::util::id::{HolderId, LeaseId, LeaseStart};
use crate::util::key::{Key, KeyMap};
use crate::util::sync::{Condvar, Either, Mutex, MutexGuard, either, try_send};

const SHARDS: usize = 64;
/// How many abandoned leases of a shard are known. The oldest is forgotten first.
const MAX_ABANDONED: usize = 64;
/// A longer emptied queue is freed.
const LONGEST_SPARE: usize = 16;
/// By how much the clock of Redis may run ahead of this machine's clock during a wait. A grant that seems to be later has
/// to be confirmed.
const CLOCK_DRIFT: Duration = Duration::from_secs(60);

/// The holders and the waiting threads of one client, by key.
pub(crate) struct LocalQueues {
    clock: Clock,
    shards: Box<[Mutex<Shard>]>,
}

/// One shard of [`LocalQueues`]. Holders have a map of their own: a million locks may be held, and hardly any of them has
/// a queue.
#[derive(Default)]
struct Shard {
    holders: LeasesByKey,
    queues: KeyMap<KeyQueue>,
    /// The memory of an emptied queue, for the next key.
    spare: VecDeque<Arc<Waiter>>,
    abandoned: Abandoned,
}

/// The queue of one key. It exists while threads wait, or while it knows something about a lock that is held.
#[derive(Default)]
struct KeyQueue {
    waiters: VecDeque<Arc<Waiter>>,
    entry: Option<QueueEntry>,
    /// The place of the last entry that left the queue of Redis without a grant. The next entry joins there.
    since: Option<u64>,
    /// A message said that another client took this lease away, before a caller had accepted its grant.
    forced: Option<(LeaseStart, HolderId)>,
}

/// The lease that the queue's first waiter asks Redis for, and that may be queued there. It outlasts that waiter: the next
/// first waiter goes on with it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct QueueEntry {
    pub(crate) lease: LeaseId,
    pub(crate) options: Options,
    /// When it was first asked for. A grant comes later.
    pub(crate) asked_at: MonotonicTime,
    /// The grant that a message reported.
    pub(crate) granted: Option<GrantMessage>,
    /// A message reported a grant, and no reply since then has found the entry in the queue of Redis.
    was_granted: bool,
    /// A message has named the lease: other users may know its id, so its next grant has to be confirmed.
    is_known: bool,
    /// A request for it is unanswered. Until the reply comes, only that request's caller may release it.
    is_in_flight: bool,
    /// Its place in the queue of Redis: the time in µs at which it joined, by the clock of Redis.
    since: Option<u64>,
    /// It will be notified of its grant. Otherwise it polls.
    notified: bool,
    /// `Store::notification_epoch` at the last request that found it in the queue.
    notification_epoch: u64,
    /// Redis reports changes of its key to this client.
    is_tracked: bool,
}

impl QueueEntry {
    /// Whether the token of this grant can be one of Redis: a time after the entry joined the queue, and before `now`.
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

/// The lease to which a reported grant belongs.
#[must_use]
#[derive(Debug, PartialEq)]
pub(crate) enum GrantOf {
    /// The entry of a queue: its waiter was woken.
    Waiter,
    /// A lease that this client gave up while it waited: the caller has to release the grant.
    AbandonedLease,
    /// Any other lease: the client has accepted the grant already, or the message is forged.
    OtherLease,
}

/// The lease that a waiter asks Redis for.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum EntryKind {
    /// The lease of the queue's entry, which may be queued in Redis already.
    Existing,
    /// A new lease, which joins the queue of Redis at the place `since`.
    Rejoin { since: u64 },
    /// A new lease, which joins last.
    New,
}

/// A thread's place in a queue. Dropping it leaves the queue, as a panic does; `leave` and `leave_with` return what the
/// caller has to release then.
pub(crate) struct WaiterGuard<'a> {
    queues: &'a LocalQueues,
    key: &'a Key,
    waiter: Arc<Waiter>,
    /// The caller's channel that cancels the wait, and the channel that wakes the thread while it selects on both.
    cancel: Option<(&'a Receiver<()>, Receiver<()>)>,
    left: bool,
}

/// The place of a waiter, and what it can do there.
#[derive(Debug)]
pub(crate) enum QueuePosition {
    /// Other waiters come first.
    Behind,
    /// It is the first waiter, and a thread of this client holds the lock, with this much validity left.
    Held(Duration),
    /// It is the first waiter: it asks Redis.
    First,
    /// It is the first waiter, and a message reported a grant to its entry.
    Granted(QueueEntry, GrantMessage),
}

impl LocalQueues {
    pub(crate) fn new(clock: Clock) -> Self {
        let shards = (0..SHARDS).map(|_| Mutex::default()).collect();
        Self { clock, shards }
    }

    /// Joins the queue of `key` behind all other waiters. `cancel` ends sleeps when it is ready.
    pub(crate) fn join<'a>(
        &'a self,
        key: &'a Key,
        options: Options,
        cancel: Option<&'a Receiver<()>>,
    ) -> WaiterGuard<'a> {
        self.join_in(self.shard(key), key, options, cancel)
    }

    /// As [`join`](Self::join), but only if no thread waits.
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
        let (wake_channel, woken) = cancel.map(|_| bounded(1)).unzip();
        let waiter = Arc::new(Waiter::new(options, wake_channel));
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
            cancel: cancel.zip(woken),
            left: false,
        }
    }

    /// Removes `lease`, which is not held any more, and wakes the first waiter, which then asks Redis.
    pub(crate) fn remove_holder(&self, lease: &Lease) {
        let holder = self.shard(&lease.grant().key).remove_holder(lease);
        // Dropped after the mutex is released: it may be the last reference.
        drop(holder);
    }

    /// Hands the lock off to the first waiter, if there is one and `pass_on` makes a lease for its options. Calls `pass_on`
    /// under the shard's mutex.
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
        // Under the mutex: a waiter that leaves now finds either its place in the queue or this lease.
        first.hand_off(next);
        drop(shard);
        first.ring();
        drop(before);
        true
    }

    /// Wakes the first waiter for `key`.
    pub(crate) fn wake(&self, key: &Key) {
        if let Some(queue) = self.shard(key).queues.get(key) {
            queue.wake();
        }
    }

    /// Wakes the first waiter of each key: each of them asks Redis once.
    pub(crate) fn wake_first(&self) {
        for shard in &self.shards {
            shard.lock().queues.values().for_each(KeyQueue::wake);
        }
    }

    /// Wakes all waiters.
    pub(crate) fn wake_all(&self) {
        for shard in &self.shards {
            for queue in shard.lock().queues.values() {
                queue.waiters.iter().for_each(|waiter| waiter.wake());
            }
        }
    }

    /// Handles a message that Redis has granted `key` to `lease`: wakes the waiter that asked for it.
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

    /// Handles a message that `lease` is among the first in the queue of Redis: its waiter asks again before long.
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

    /// Adds a holder that did not wait in a queue. If there are two holders then, the older one is lost.
    pub(crate) fn hold(&self, lease: &Arc<Lease>) {
        let key = &lease.grant().key;
        let mut shard = self.shard(key);
        let is_newer = |holder: &Arc<Lease>| holder.grant().token > lease.grant().token;
        // `lease` has ended meanwhile, and another thread of this client has got the lock.
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

    /// Handles a message that `by` took the lock from `lease`: returns the holder, if this client holds the lease. If no
    /// caller has accepted the grant of the lease yet, the grant has to be confirmed.
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

    /// The leases that threads of this client hold.
    pub(crate) fn holders(&self) -> Vec<Arc<Lease>> {
        let shards = self.shards.iter();
        let held = |shard: &Mutex<Shard>| -> Vec<Arc<Lease>> {
            shard.lock().holders.iter().cloned().collect()
        };
        shards.flat_map(held).collect()
    }

    /// The lease of the entry for `key`, if the key is tracked for it.
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

    /// Forgets the entry of `lease`, which is not queued in Redis, or is about to be released. The next entry joins at its
    /// place. A grant of the lease that is reported later has to be released.
    pub(crate) fn forget_entry(&self, key: &Key, lease: LeaseId) {
        let mut shard = self.shard(key);
        shard.abandoned.insert(lease);
        if let Some(queue) = shard.queues.get_mut(key)
            && let Some(entry) = queue.entry.take_if(|entry| entry.lease == lease)
        {
            queue.since = entry.since.or(queue.since);
        }
    }

    /// Removes the entries of all queues, and returns those that the caller has to release.
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

    /// Removes the queue of `key` if it is empty and knows nothing any more.
    fn tidy(&mut self, key: &Key) {
        let is_held = self.holders.get(key).is_some();
        let is_needed = |queue: &KeyQueue| {
            let knows = queue.entry.is_some() || queue.forced.is_some();
            !queue.waiters.is_empty() || (is_held && knows)
        };
        if !self.queues.get(key).is_some_and(is_needed)
            && let Some(queue) = self.queues.remove(key)
            && queue.waiters.capacity() <= LONGEST_SPARE
        {
            self.spare = queue.waiters;
        }
    }
}

impl KeyQueue {
    /// Removes the entry. Returns it, unless a request for it is in flight: then the caller of that request releases it.
    fn abandon(&mut self) -> Option<QueueEntry> {
        self.entry.take().filter(|entry| !entry.is_in_flight)
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
    /// The place of this waiter at `now`.
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

    /// Takes the lease that another thread handed off to this waiter, if one did. The waiter is not in the queue any more then.
    pub(crate) fn handed_off(&self) -> Option<Arc<Lease>> {
        self.waiter.take_handed_off()
    }

    /// Chooses the lease to ask Redis for, and marks it as in flight: that of the entry, if its options are equal, otherwise
    /// `fresh`. Also returns an entry with other options, which the caller has to release.
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
        if queue.entry.is_some_and(|entry| entry.is_in_flight) {
            // The thread that sent that request was handed the lock before the reply came.
            return (fresh, EntryKind::New, None);
        }
        if let Some(entry) = queue
            .entry
            .as_mut()
            .filter(|entry| entry.options == options)
        {
            (entry.granted, entry.is_tracked, entry.is_in_flight) = (None, false, true);
            return (entry.lease, EntryKind::Existing, None);
        }
        let fresh_claim = QueueEntry {
            lease: fresh,
            options,
            asked_at: now,
            granted: None,
            was_granted: false,
            is_known: false,
            is_in_flight: true,
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

    /// Notes that `lease` is in the queue of Redis, by the reply to a request with this `queue_mode`. Returns whether it will
    /// be notified of its grant; nothing if it is not the entry any more.
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
        (entry.since, entry.is_in_flight, entry.notification_epoch) =
            (Some(since), false, notification_epoch);
        // Redis found it in the queue, so a grant that was reported before the request was forged. A later one may be true.
        entry.was_granted = entry.granted.is_some();
        entry.notified = match queue_mode {
            QueueMode::Existing { notified } => entry.notified || notified,
            joined => !joined.polls(),
        };
        Some(entry.notified)
    }

    /// Forgets the entry of `lease`, which is missing from the queue of Redis. If it may have been granted and have confirmed
    /// too late, the next entry joins in front. Returns the notification epoch in which a message should have reported the
    /// grant, if one should have: see `Store::notification_epoch`.
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
            since.map(front_place)
        };
        relied_on.then_some(entry.notification_epoch)
    }

    /// Notes that Redis reports changes of the entry's key to this client.
    pub(crate) fn note_tracked(&self) {
        let mut shard = self.queues.shard(self.key);
        let queue = shard.queues.get_mut(self.key);
        if let Some(entry) = queue.and_then(|queue| queue.entry.as_mut()) {
            entry.is_tracked = true;
        }
    }

    /// Sleeps until this waiter is woken or cancelled, at most until `until`.
    pub(crate) fn sleep(&self, until: MonotonicTime) -> WakeReason {
        let cancel = self.cancel.as_ref().map(|(cancel, woken)| (*cancel, woken));
        self.waiter.sleep(until, &self.queues.clock, cancel)
    }

    /// Leaves the queue with `lease`, which Redis has granted: it is the holder now. Returns a lease that was handed off
    /// meanwhile, by a holder that did not know yet that it was lost; the caller has to release it. Also returns the client
    /// that took `lease` away, if a message said so.
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
        let handed_off = self.handed_off();
        drop(shard);
        let now = self.queues.clock.now();
        if let Some(before) = before {
            // Redis has granted the lock to another lease, so this client's older holder has lost it.
            before.lose(now, LossReason::Deleted);
        }
        let forced = forced.filter(|(start, _)| *start == lease.grant().id.start());
        (handed_off, forced.map(|(_, by)| by))
    }

    /// Leaves the queue without a grant of Redis. The caller has to release what is returned: a lease that was handed off to
    /// this waiter meanwhile, and the entry of a queue that has no waiter left.
    pub(crate) fn leave(mut self) -> (Option<Arc<Lease>>, Option<QueueEntry>) {
        self.left = true;
        self.quit(false)
    }

    fn quit(&self, panics: bool) -> (Option<Arc<Lease>>, Option<QueueEntry>) {
        let mut shard = self.queues.shard(self.key);
        let handed_off = self.handed_off();
        let Some(queue) = shard.queues.get_mut(self.key) else {
            return (handed_off, None);
        };
        let was_first = queue.is_first(&self.waiter);
        queue.waiters.retain(|one| !Arc::ptr_eq(one, &self.waiter));
        if was_first {
            if panics && let Some(entry) = &mut queue.entry {
                // Nobody reads the reply.
                entry.is_in_flight = false;
            }
            // A wake-up of the leaving waiter is meant for the next one.
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
        (handed_off, abandoned)
    }
}

impl Drop for WaiterGuard<'_> {
    fn drop(&mut self) {
        if !self.left {
            self.quit(true);
        }
    }
}

/// A thread that waits in a queue.
struct Waiter {
    options: Options,
    state: Mutex<WaiterState>,
    changed: Condvar,
    /// Wakes a thread that selects on this channel and on one that cancels.
    wake_channel: Option<Sender<()>>,
}

#[derive(Default)]
struct WaiterState {
    /// Stays set until the next sleep: a wake-up that comes before it is not lost.
    woken: bool,
    /// The thread has to find out anew how long to sleep.
    nudged: bool,
    handed_off: Option<Arc<Lease>>,
}

/// The reason why a sleep ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WakeReason {
    Woken,
    Cancelled,
    /// The thread has to sleep for a shorter time.
    Nudged,
    /// The time is up.
    TimedOut,
}

impl Waiter {
    fn new(options: Options, wake_channel: Option<Sender<()>>) -> Self {
        Self {
            options,
            state: Mutex::new(WaiterState::default()),
            changed: Condvar::new(),
            wake_channel,
        }
    }

    fn wake(&self) {
        self.state.lock().woken = true;
        self.ring();
    }

    fn nudge(&self) {
        self.state.lock().nudged = true;
        self.ring();
    }

    /// Hands a lease off to it. The caller rings it afterwards.
    fn hand_off(&self, lease: Arc<Lease>) {
        self.state.lock().handed_off = Some(lease);
    }

    /// Takes the lease that was handed off to it.
    fn take_handed_off(&self) -> Option<Arc<Lease>> {
        self.state.lock().handed_off.take()
    }

    /// Has the sleeping thread look at its state.
    fn ring(&self) {
        self.changed.notify_one();
        if let Some(wake_channel) = &self.wake_channel {
            // If the channel is full, the thread looks anyway.
            try_send(wake_channel);
        }
    }

    /// Sleeps until woken or cancelled, at most until `until`. `cancel` is the channel that cancels, and the other end of the
    /// wake channel.
    fn sleep(
        &self,
        until: MonotonicTime,
        clock: &Clock,
        cancel: Option<(&Receiver<()>, &Receiver<()>)>,
    ) -> WakeReason {
        loop {
            let mut state = self.state.lock();
            loop {
                if std::mem::take(&mut state.woken) || state.handed_off.is_some() {
                    return WakeReason::Woken;
                }
                if std::mem::take(&mut state.nudged) {
                    return WakeReason::Nudged;
                }
                let left = until.since(clock.now());
                if left.is_zero() {
                    return WakeReason::TimedOut;
                }
                if cancel.is_some() {
                    break;
                }
                self.changed.wait_for(&mut state, left);
            }
            drop(state);
            let Some((cancel, wake_channel)) = cancel else {
                continue;
            };
            let woken = either(wake_channel, cancel, until.since(clock.now()));
            if woken == Some(Either::Second) {
                return WakeReason::Cancelled;
            }
        }
    }
}

/// The leases that this client asked for and gave up before it held them. A grant of one of them may still be reported;
/// the client releases it then. Any user may publish a message of a grant, so grants of other leases are not released.
#[derive(Default)]
struct Abandoned(VecDeque<LeaseId>);

impl Abandoned {
    fn insert(&mut self, lease: LeaseId) {
        if self.0.contains(&lease) {
            return;
        }
        if self.0.len() == MAX_ABANDONED {
            self.0.pop_front();
        }
        self.0.push_back(lease);
    }

    /// Forgets `lease`: one release is enough. False if it is not known.
    fn take(&mut self, lease: LeaseId) -> bool {
        let place = self.0.iter().position(|known| *known == lease);
        place.and_then(|place| self.0.remove(place)).is_some()
    }
}

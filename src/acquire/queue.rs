//! The local queues: the threads of this client that wait for a key, first come, first served. Only the first waiter of
//! a queue asks Redis, and only while no thread of this client holds the lock. Also has the holders. Does no I/O.

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded};

use crate::command::value::micros_of;
use crate::command::{FIRST_USUAL_PLACE, GrantMessage, QueueMode, front_place};
use crate::config::key::{Key, KeyMap};
use crate::lease::{Lease, LeasesByKey, Options};
use crate::report::loss::LossReason;
use crate::store::{ServerId, Turn};
use crate::util::clock::{Clock, MonotonicTime};
use crate::util::id::{HolderId, LeaseId, LeaseStart};
use crate::util::sync::{Condvar, Either, Mutex, MutexGuard, Yields, either, try_send, yield_now};

const SHARDS: usize = 64;
/// How many abandoned leases each shard remembers. It forgets the oldest first.
const MAX_ABANDONED: usize = 64;
/// The memory of an emptied queue is kept for the next queue if it has room for no more waiters than this.
const LONGEST_SPARE: usize = 16;
/// How far the clock of Redis may gain on this machine's clock during a wait. A grant with a later time has to be
/// confirmed.
const CLOCK_DRIFT: Duration = Duration::from_secs(60);

/// The holders and the waiting threads of one client, by key.
pub struct LocalQueues {
    clock: Clock,
    shards: Box<[Mutex<Shard>]>,
}

/// One shard of [`LocalQueues`]. Holders have a map of their own: a client may hold a million locks, and hardly any of
/// them has a queue.
#[derive(Default)]
struct Shard {
    holders: LeasesByKey,
    queues: KeyMap<KeyQueue>,
    /// The memory of an emptied queue, for the next key.
    spare: VecDeque<Arc<Waiter>>,
    abandoned: Abandoned,
}

/// The queue of one key. It exists while threads wait, or while the lock is held and `entry` or `forced` is set.
#[derive(Default)]
struct KeyQueue {
    waiters: VecDeque<Arc<Waiter>>,
    entry: Option<QueueEntry>,
    /// The place of the last entry that lost its place in the queue in Redis without a grant. The next entry joins
    /// there.
    since: Option<u64>,
    /// A lease that was unlocked by force, and the client that did so. Set if this message came before a caller had
    /// accepted the lease's grant.
    forced: Option<(LeaseStart, HolderId)>,
    /// The reports of servers about the key since a waiter last began to watch it. A grant removes them.
    watch: Option<Watch>,
}

/// The reports about a key that a waiter watches. A server is in one of the two sets at most.
#[derive(Default)]
struct Watch {
    present_on: ServerSet,
    missing_on: ServerSet,
    /// The turn that a server has reported last.
    turn: Option<Turn>,
    /// Another client has the key, or had it since the watch began.
    was_taken: bool,
    /// A majority of the servers has reported the release of the key that another client had. A renewal looks the same.
    was_released: bool,
}

/// A set of servers, one bit for each.
type ServerSet = u16;

fn set_of(server: ServerId) -> ServerSet {
    1 << server.0
}

fn is_majority(servers: ServerSet, majority: usize) -> bool {
    servers.count_ones() as usize >= majority
}

/// The lease that the queue's first waiter asks Redis for, and that may be queued there. When that waiter leaves, the
/// next waiter takes over the entry.
#[derive(Clone, Copy, Debug)]
pub struct QueueEntry {
    pub lease: LeaseId,
    pub options: Options,
    /// The time just before the first request for the lease, so before any grant of it.
    pub asked_at: MonotonicTime,
    /// The grant that a message reported.
    pub granted: Option<GrantMessage>,
    /// A message has reported a grant, and no later reply has found the entry in the queue in Redis.
    was_granted: bool,
    /// A message has contained the lease id, so other users may know the id. The next grant of the lease has to be
    /// confirmed.
    is_known: bool,
    /// A request for the lease is unanswered. Until the reply comes, only that request's caller may release the lease.
    is_in_flight: bool,
    /// The entry's place in the queue of Redis: the time in µs at which it joined, by the clock of Redis.
    since: Option<u64>,
    /// Whether the waiter will be notified of a grant. If not, it polls.
    notified: bool,
    /// `Notifications::epoch` at the last request that found the entry in the queue. `None` after a roll call
    /// of the queue, which may remove the entry without a grant.
    notification_epoch: Option<u64>,
    /// Redis reports changes of the entry's key to this client.
    is_tracked: bool,
}

impl QueueEntry {
    /// Whether Redis can have made the token of this grant. The token's time must lie between the entry's place and
    /// `now`, with an allowance of `CLOCK_DRIFT`.
    pub fn is_plausible(&self, grant: GrantMessage, now: MonotonicTime) -> bool {
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
pub enum GrantOf {
    /// The entry of a queue: its waiter was woken.
    Waiter,
    /// An abandoned lease of this client: the caller has to release the grant.
    AbandonedLease,
    /// Any other lease: the client has accepted the grant already, or the message is forged.
    OtherLease,
}

/// The lease that a waiter asks Redis for.
#[derive(Debug, PartialEq, Eq)]
pub enum EntryKind {
    /// The lease of the queue's entry, which may be queued in Redis already.
    Existing,
    /// A new lease, which joins the queue of Redis at the place `since`.
    Rejoin { since: u64 },
    /// A new lease, which joins at the end of the queue of Redis.
    New,
}

/// A thread's membership in a local queue. `leave` and `leave_with` leave the queue, and return what the caller has to
/// release. A drop without them, as in a panic, also leaves the queue.
pub struct WaiterGuard<'a> {
    queues: &'a LocalQueues,
    key: &'a Key,
    waiter: Arc<Waiter>,
    /// The caller's channel that cancels the wait, and the receiving end of the wake channel. The thread selects on
    /// both.
    cancel: Option<(&'a Receiver<()>, Receiver<()>)>,
    left: bool,
}

/// The position of a waiter in its local queue, and what the waiter can do there.
#[derive(Debug)]
pub enum QueuePosition {
    /// Other waiters of this client come first.
    Behind,
    /// This waiter is the first, and a thread of this client holds the lock, with this much validity left.
    Held(Duration),
    /// This waiter is the first: it asks Redis.
    First,
    /// This waiter is the first, and a message reported a grant to its entry.
    Granted(QueueEntry, GrantMessage),
}

impl LocalQueues {
    pub fn new(clock: Clock) -> Self {
        let shards = (0..SHARDS).map(|_| Mutex::default()).collect();
        Self { clock, shards }
    }

    /// Joins the queue of `key` behind all other waiters. Once `cancel` is ready, it ends the waiter's sleeps.
    pub fn join<'a>(
        &'a self,
        key: &'a Key,
        options: Options,
        cancel: Option<&'a Receiver<()>>,
    ) -> WaiterGuard<'a> {
        self.join_in(self.shard(key), key, options, cancel)
    }

    /// As [`join`](Self::join), but only if no thread waits.
    pub fn join_if_empty<'a>(&'a self, key: &'a Key, options: Options) -> Option<WaiterGuard<'a>> {
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

    /// Removes `lease`, which is not held any more, and wakes the first waiter. That waiter asks Redis.
    pub fn remove_holder(&self, lease: &Lease) {
        let holder = self.shard(&lease.grant().key).remove_holder(lease);
        // Drop the lease after the mutex is unlocked, since this may be the last reference to it.
        drop(holder);
    }

    /// Hands the lock off to the first waiter, if a thread waits and `pass_on` makes a lease for that waiter's options.
    /// Calls `pass_on` under the shard's mutex.
    pub fn hand_off(
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
        // The mutex is still locked, so a waiter that leaves now finds either itself in the queue or this lease.
        first.hand_off(next);
        drop(shard);
        first.ring();
        drop(before);
        true
    }

    pub fn wake(&self, key: &Key) {
        if let Some(queue) = self.shard(key).queues.get(key) {
            queue.wake();
        }
    }

    /// Wakes the first waiter of each of these keys: each of them asks Redis once.
    pub fn wake_first(&self, keys: &dyn Fn(&Key) -> bool) {
        for shard in &self.shards {
            for (key, queue) in &shard.lock().queues {
                if keys(key) {
                    queue.wake();
                }
            }
        }
    }

    pub fn wake_all(&self) {
        for shard in &self.shards {
            for queue in shard.lock().queues.values() {
                queue.waiters.iter().for_each(|waiter| waiter.wake());
            }
        }
    }

    /// Handles a message that Redis has granted `key` to `lease`: wakes the waiter that asked for it.
    pub fn granted(&self, key: &Key, lease: LeaseId, grant: GrantMessage) -> GrantOf {
        let mut shard = self.shard(key);
        if let Some(queue) = shard.queues.get_mut(key)
            && let Some(entry) = queue.entry.as_mut().filter(|entry| entry.lease == lease)
        {
            // On a Cluster, the nodes forward messages to each other, so the same message may come several times.
            let repeated = entry.granted.filter(|known| known.token == grant.token);
            let is_doubtful = repeated.map_or(entry.is_known, |known| known.to_confirm);
            let to_confirm = grant.to_confirm || is_doubtful;
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

    /// Handles a message that `lease` is among the first in the queue of Redis: makes its waiter ask again soon.
    pub fn near(&self, key: &Key, lease: LeaseStart) {
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

    /// Handles the message of a roll call: wakes the waiter of `lease`, which has to send a request at once, or it loses
    /// its place in the queue of Redis.
    pub fn called(&self, key: &Key, lease: LeaseStart) {
        if let Some(queue) = self.shard(key).queues.get_mut(key)
            && let Some(entry) = &mut queue.entry
            && entry.lease.start() == lease
        {
            entry.notification_epoch = None;
            queue.wake();
        }
    }

    /// Adds a holder that did not wait in a queue. If the key has another holder already, the older of the two leases
    /// is lost.
    pub fn hold(&self, lease: &Arc<Lease>) {
        let key = &lease.grant().key;
        let mut shard = self.shard(key);
        let is_newer = |holder: &Arc<Lease>| holder.grant().token > lease.grant().token;
        // If the known holder is newer, `lease` has already ended.
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

    /// Handles a message that `by` unlocked `lease` by force. If a thread of this client holds the lease, returns it.
    /// If no caller has accepted the lease's grant yet, notes that the grant has to be confirmed.
    pub fn forced(&self, key: &Key, lease: LeaseStart, by: &HolderId) -> Option<Arc<Lease>> {
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
    pub fn holders(&self) -> Vec<Arc<Lease>> {
        let shards = self.shards.iter();
        let held = |shard: &Mutex<Shard>| -> Vec<Arc<Lease>> {
            shard.lock().holders.iter().cloned().collect()
        };
        shards.flat_map(held).collect()
    }

    /// The lease of the entry for `key`, if the key is tracked for it.
    pub fn tracked_entry_of(&self, key: &Key) -> Option<LeaseId> {
        let entry = self
            .shard(key)
            .queues
            .get(key)
            .and_then(|queue| queue.entry);
        entry
            .filter(|entry| entry.is_tracked)
            .map(|entry| entry.lease)
    }

    /// Notes whether `server` has the key that a waiter watches. Wakes the first waiter once the key is missing on a
    /// majority of the servers.
    pub fn note_read(&self, key: &Key, server: ServerId, exists: bool, majority: usize) {
        if let Some(queue) = self.shard(key).queues.get_mut(key) {
            queue.note_presence(server, exists, majority);
        }
    }

    /// Notes whose turn it is, for a key that a waiter watches.
    pub fn note_turn(&self, key: &Key, turn: Turn) {
        let mut shard = self.shard(key);
        let queue = shard.queues.get_mut(key);
        if let Some(watch) = queue.and_then(|queue| queue.watch.as_mut()) {
            watch.turn = Some(turn);
        }
    }

    /// Notes a change of the key on `server`. If the key was present there, the change counts as its release: another
    /// client may have the key again before it is read. A renewal looks the same, so the waiter may ask in vain. Returns
    /// true if the key should be read: a waiter watches it, and no majority lacks it.
    pub fn note_change(&self, key: &Key, server: ServerId, majority: usize) -> bool {
        let mut shard = self.shard(key);
        let Some(queue) = shard.queues.get_mut(key) else {
            return false;
        };
        let was_present = |watch: &Watch| watch.present_on & set_of(server) != 0;
        if queue.watch.as_ref().is_some_and(was_present) {
            queue.note_presence(server, false, majority);
        }
        let watch = queue.watch.as_ref();
        watch.is_some_and(|watch| !is_majority(watch.missing_on, majority))
    }

    /// On how many servers a watched key is present, and whether it was released since the watch began.
    #[cfg(all(test, not(shuttle)))]
    pub fn watched(&self, key: &Key) -> Option<(u32, bool)> {
        let shard = self.shard(key);
        let watch = shard.queues.get(key)?.watch.as_ref()?;
        Some((watch.present_on.count_ones(), watch.was_released))
    }

    /// Forgets the entry of `lease`, which is not queued in Redis or will now be released. The next entry joins at the
    /// same place. If a grant of `lease` is reported later, the client releases the grant.
    pub fn forget_entry(&self, key: &Key, lease: LeaseId) {
        let mut shard = self.shard(key);
        shard.abandoned.insert(lease);
        if let Some(queue) = shard.queues.get_mut(key)
            && let Some(entry) = queue.entry.take_if(|entry| entry.lease == lease)
        {
            queue.since = entry.since.or(queue.since);
        }
    }

    /// Removes the entries of all queues, and returns those that the caller has to release.
    pub fn abandon_all(&self) -> Vec<(Key, QueueEntry)> {
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
    pub fn queues(&self) -> usize {
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

    /// Removes the queue of `key`, unless threads wait in it, or the lock is held and `entry` or `forced` is set.
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
    /// Removes the entry. Returns the entry, unless a request for it is in flight: the caller of that request releases
    /// it.
    fn abandon(&mut self) -> Option<QueueEntry> {
        self.entry.take().filter(|entry| !entry.is_in_flight)
    }

    fn wake(&self) {
        if let Some(first) = self.waiters.front() {
            first.wake();
        }
    }

    fn note_presence(&mut self, server: ServerId, exists: bool, majority: usize) {
        let Some(watch) = &mut self.watch else {
            return;
        };
        let was_missing = is_majority(watch.missing_on, majority);
        watch.present_on &= !set_of(server);
        watch.missing_on &= !set_of(server);
        match exists {
            true => watch.present_on |= set_of(server),
            false => watch.missing_on |= set_of(server),
        }
        watch.was_taken |= is_majority(watch.present_on, majority);
        if !was_missing && is_majority(watch.missing_on, majority) {
            watch.was_released = watch.was_taken;
            self.wake();
        }
    }

    fn is_first(&self, waiter: &Arc<Waiter>) -> bool {
        let first = self.waiters.front();
        first.is_some_and(|first| Arc::ptr_eq(first, waiter))
    }
}

impl WaiterGuard<'_> {
    /// The position of this waiter at `now`.
    pub fn position(&self, now: MonotonicTime) -> QueuePosition {
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

    /// Takes the lease that another thread handed off to this waiter, if there is one. In this case the waiter has left
    /// the queue.
    pub fn handed_off(&self) -> Option<Arc<Lease>> {
        self.waiter.take_handed_off()
    }

    /// Chooses the lease to ask Redis for, and marks the entry as in flight. Chooses the entry's lease if the entry has
    /// this waiter's options and is not in flight, otherwise `fresh`. If `fresh` replaces an entry with other options,
    /// also returns that entry, which the caller has to release.
    pub fn entry(
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
            // The request in flight belongs to a thread that was handed the lock before the reply came.
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
        let fresh_entry = QueueEntry {
            lease: fresh,
            options,
            asked_at: now,
            granted: None,
            was_granted: false,
            is_known: false,
            is_in_flight: true,
            since: None,
            notified: false,
            notification_epoch: None,
            is_tracked: false,
        };
        let entry_kind = queue
            .since
            .map_or(EntryKind::New, |since| EntryKind::Rejoin { since });
        (fresh, entry_kind, queue.entry.replace(fresh_entry))
    }

    /// Records that `lease` is in the queue of Redis, by the reply to a request with this `queue_mode`. Returns whether
    /// the waiter will be notified of a grant. Returns `None` if `lease` is not the queue's entry any more.
    #[must_use]
    pub fn note_queued(
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
            (Some(since), false, Some(notification_epoch));
        // Redis found the entry in the queue. So a grant that was reported before this request was forged. A grant that
        // was reported after the request was sent may be true.
        entry.was_granted = entry.granted.is_some();
        entry.notified = match queue_mode {
            QueueMode::Existing { notified } => entry.notified || notified,
            joined => !joined.polls(),
        };
        Some(entry.notified)
    }

    /// Forgets the entry of `lease`, which is missing from the queue in Redis.
    ///
    /// If the waiter was to be notified and got no message of a grant, the next entry joins at the same place. In this
    /// case returns the notification epoch of the entry. Otherwise a grant may have ended before the waiter asked, so
    /// the next entry joins in front of all others.
    pub fn remove_missing_entry(&self, lease: LeaseId) -> Option<u64> {
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
        entry.notification_epoch.filter(|_| relied_on)
    }

    /// Records that Redis reports changes of the entry's key to this client.
    pub fn note_tracked(&self) {
        let mut shard = self.queues.shard(self.key);
        let queue = shard.queues.get_mut(self.key);
        if let Some(entry) = queue.and_then(|queue| queue.entry.as_mut()) {
            entry.is_tracked = true;
        }
    }

    /// Records that this waiter watches the key, of which no server has reported anything yet. `is_taken`: another
    /// client has the key.
    pub fn watch(&self, is_taken: bool) {
        if let Some(queue) = self.queues.shard(self.key).queues.get_mut(self.key) {
            queue.watch = Some(Watch {
                was_taken: is_taken,
                ..Watch::default()
            });
        }
    }

    /// Takes the last turn that a server has reported since the watch began.
    pub fn take_turn(&self) -> Option<Turn> {
        let mut shard = self.queues.shard(self.key);
        let watch = shard.queues.get_mut(self.key)?.watch.as_mut()?;
        watch.turn.take()
    }

    /// Whether a majority of the servers has reported a release of the key since the watch began. A renewal looks the
    /// same.
    pub fn was_released(&self) -> bool {
        let shard = self.queues.shard(self.key);
        let queue = shard.queues.get(self.key);
        let watch = queue.and_then(|queue| queue.watch.as_ref());
        watch.is_some_and(|watch| watch.was_released)
    }

    /// Sleeps until this waiter is woken or cancelled, at most until `until`.
    pub fn sleep(&self, until: MonotonicTime) -> WakeReason {
        let cancel = self.cancel.as_ref().map(|(cancel, woken)| (*cancel, woken));
        self.waiter.sleep(until, &self.queues.clock, cancel)
    }

    /// Leaves the queue and adds `lease`, which Redis has granted, as the holder. If a message said that a client
    /// unlocked `lease` by force, returns that client.
    ///
    /// Also returns a lease that was handed off to this waiter meanwhile, by a holder whose loss was not known yet. The
    /// caller has to release it.
    #[must_use]
    pub fn leave_with(mut self, lease: &Arc<Lease>) -> (Option<Arc<Lease>>, Option<HolderId>) {
        self.left = true;
        let mut shard = self.queues.shard(self.key);
        let mut forced = None;
        if let Some(queue) = shard.queues.get_mut(self.key) {
            queue.waiters.retain(|one| !Arc::ptr_eq(one, &self.waiter));
            queue.entry.take_if(|entry| entry.lease == lease.grant().id);
            (queue.since, queue.watch) = (None, None);
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

    /// Leaves the queue without a grant of Redis. Returns what the caller has to release: a lease that was handed off
    /// to this waiter meanwhile, and the entry of a queue that has no waiter left.
    pub fn leave(mut self) -> (Option<Arc<Lease>>, Option<QueueEntry>) {
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
                // The panicking thread does not read the reply.
                entry.is_in_flight = false;
            }
            // The leaving waiter may have used up a wake-up, so the next waiter is woken.
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
    /// The sending end of the wake channel; only a wait that can be cancelled has one. Its thread selects on this
    /// channel and on the caller's cancel channel, instead of waiting for `changed`.
    wake_channel: Option<Sender<()>>,
}

#[derive(Default)]
struct WaiterState {
    /// Stays set until the next sleep, so that a wake-up before that sleep is not lost.
    woken: bool,
    /// The thread has to compute its sleep again, since it may have become shorter.
    nudged: bool,
    handed_off: Option<Arc<Lease>>,
}

/// The reason why a sleep ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WakeReason {
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

    /// Hands a lease off to this waiter. The caller calls `ring` afterwards.
    fn hand_off(&self, lease: Arc<Lease>) {
        self.state.lock().handed_off = Some(lease);
    }

    /// Takes the lease that was handed off to this waiter.
    fn take_handed_off(&self) -> Option<Arc<Lease>> {
        self.state.lock().handed_off.take()
    }

    /// Wakes the thread, which then reads its state.
    fn ring(&self) {
        self.changed.notify_one();
        if let Some(wake_channel) = &self.wake_channel {
            // If the channel is full, the thread will wake up anyway.
            try_send(wake_channel);
        }
    }

    /// Sleeps until woken or cancelled, at most until `until`. `cancel` is a pair: the caller's channel that cancels
    /// the wait, and the receiving end of the wake channel.
    fn sleep(
        &self,
        until: MonotonicTime,
        clock: &Clock,
        cancel: Option<(&Receiver<()>, &Receiver<()>)>,
    ) -> WakeReason {
        let mut yields = Yields::new();
        loop {
            let mut state = self.state.lock();
            loop {
                if std::mem::take(&mut state.woken) || state.handed_off.is_some() {
                    return WakeReason::Woken;
                }
                if std::mem::take(&mut state.nudged) {
                    return WakeReason::Nudged;
                }
                let now = clock.now();
                let left = until.since(now);
                if left.is_zero() {
                    return WakeReason::TimedOut;
                }
                if yields.should_yield(now) {
                    drop(state);
                    yield_now();
                    state = self.state.lock();
                    continue;
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

/// Abandoned leases: this client asked for them, and gave them up before it held them. When a grant of such a lease is
/// reported later, the client releases the grant. Any user may publish a message of a grant, so grants of unknown
/// leases are not released.
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

    /// Forgets `lease`, which is released only once. Returns false if `lease` was not known.
    fn take(&mut self, lease: LeaseId) -> bool {
        let place = self.0.iter().position(|known| *known == lease);
        place.and_then(|place| self.0.remove(place)).is_some()
    }
}

//! The local queues: the threads of this client that wait for each key, first come, first served. Only the first waiter
//! of a queue asks Redis, and only while no thread of this client holds the lock alone. The queues also keep the held
//! leases. They do no I/O.
//!
//! A client may hold several shares of a key ([`Shares`]). While it does, its waiters still ask Redis: only Redis knows
//! whether another share fits, and a writer has to be queued in Redis, so that new readers wait behind it.

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded};

use crate::acquire::shares::Shares;
use crate::acquire::watch::Watches;
use crate::command::value::micros_of;
use crate::command::{GrantMessage, Mode, QueueMode, front_place, joined_at};
use crate::config::HandOffs;
use crate::config::key::{Key, KeyMap};
use crate::lease::{Lease, LeasesByKey, Options};
use crate::report::loss::LossReason;
use crate::store::{ServerId, Turn};
use crate::util::clock::{Clock, MonotonicTime};
use crate::util::id::{HolderId, LeaseId, LeaseStart};
use crate::util::sync::{Condvar, Either, Mutex, MutexGuard, Yields, either, try_send, yield_now};

const SHARDS: usize = 64;
/// Each shard remembers this many abandoned leases, and forgets the oldest first.
const MAX_ABANDONED: usize = 64;
/// An empty queue's memory is kept for the next queue if it has room for at most this many waiters.
const LONGEST_SPARE: usize = 16;
/// The clock of Redis may gain at most this much on this machine's clock during a wait. A waiter confirms a grant with
/// a later time.
const CLOCK_DRIFT: Duration = Duration::from_secs(60);

/// The holders and the waiting threads of one client, by key.
pub struct LocalQueues {
    clock: Clock,
    shards: Box<[Mutex<Shard>]>,
    /// The keys that threads watch without waiting in a queue.
    pub watches: Watches,
}

/// One shard of [`LocalQueues`]. The held leases have their own map: a client may hold a million locks, most of them
/// without a queue.
#[derive(Default)]
struct Shard {
    /// The leases that hold their keys alone.
    holders: LeasesByKey,
    shares: KeyMap<Shares>,
    queues: KeyMap<KeyQueue>,
    /// The memory of an empty queue. The next new queue uses it.
    spare: VecDeque<Arc<Waiter>>,
    abandoned: Abandoned,
}

/// The queue of one key. It exists while threads wait. While this client holds the lock or a share of it, the queue
/// also exists as long as `entry` or `forced` is set.
#[derive(Default)]
struct KeyQueue {
    waiters: VecDeque<Arc<Waiter>>,
    entry: Option<QueueEntry>,
    /// The place in the queue in Redis that the last entry lost without a grant. The next entry joins at this place.
    since: Option<u64>,
    /// Set if a message reports a forced release of a lease whose grant the caller has not accepted yet: the lease, and
    /// the client that released it.
    forced: Option<(LeaseStart, HolderId)>,
    /// The reports of servers about the key since a waiter last began to watch it. A grant clears them.
    watch: Option<Watch>,
}

/// The reports of servers about a watched key. Each server is in at most one of the two sets.
#[derive(Default)]
struct Watch {
    present_on: ServerSet,
    missing_on: ServerSet,
    /// The last turn that a server has reported.
    turn: Option<Turn>,
    /// Whether another client has had the key at any time since the watch began.
    was_taken: bool,
    /// Whether a majority of the servers has reported that another client released the key. On a quorum, a renewal
    /// looks the same.
    was_released: bool,
    /// Recorded only if one server stores the key.
    renewal: Renewal,
}

/// Whether a watched key has changed and the lock has stayed the same, as after a renewal.
#[derive(Clone, Copy, Default, PartialEq)]
enum Renewal {
    #[default]
    None,
    /// The key has changed, and has not been read since then.
    Unread,
    /// After a change, a read has found the same lock.
    Read,
}

/// A set of servers, one bit for each node of a quorum. On a Cluster, one server stores the key, and any bit counts it.
type ServerSet = u16;

fn set_of(server: ServerId) -> ServerSet {
    1 << (u32::from(server.0) % ServerSet::BITS)
}

fn is_majority(servers: ServerSet, majority: usize) -> bool {
    servers.count_ones() as usize >= majority
}

/// The lease that a queue's first waiter asks Redis for. The lease may be in the queue in Redis. When the waiter
/// leaves, the next waiter continues with this entry.
#[derive(Clone, Copy, Debug)]
pub struct QueueEntry {
    pub lease: LeaseId,
    pub options: Options,
    /// A time before the first request for the lease, and so before any grant of it.
    pub asked_at: MonotonicTime,
    /// The grant in a message that this client has received.
    pub granted: Option<GrantMessage>,
    /// Whether a message has reported a grant, and no later reply has shown that the lease is still queued.
    was_granted: bool,
    /// Whether a message has contained the lease id. Other users may then know the id, so the waiter confirms the next
    /// grant.
    is_known: bool,
    /// Whether a request for the lease has no reply yet. Until the reply comes, only that request's caller releases the
    /// lease.
    is_in_flight: bool,
    /// The lease's place in the queue in Redis: the time at which it joined, in µs of the clock of Redis.
    since: Option<u64>,
    /// Whether Redis notifies the waiter of a grant. Otherwise the waiter polls.
    notified: bool,
    /// `Notifications::epoch` before the last request whose reply reports that the lease is queued. `None` after a roll
    /// call, which may remove the lease from the queue without a grant.
    notification_epoch: Option<u64>,
    /// Whether Redis reports changes of the key to this client.
    is_tracked: bool,
}

impl QueueEntry {
    /// Whether Redis can have made the token of this grant: the token's time is between the lease's place and `now`,
    /// plus or minus `CLOCK_DRIFT`.
    pub fn is_plausible(&self, grant: GrantMessage, now: MonotonicTime) -> bool {
        let Some(since) = self.since else {
            return false;
        };
        let joined = joined_at(since);
        let waited = (now.since(self.asked_at) + CLOCK_DRIFT).as_micros();
        let latest = joined.saturating_add(u64::try_from(waited).unwrap_or(u64::MAX));
        (joined..=latest).contains(&micros_of(grant.token))
    }
}

/// The kind of lease that a message grants.
#[must_use]
#[derive(Debug, PartialEq)]
pub enum GrantOf {
    /// A waiter of this client asks for the lease. The message has woken it.
    Waiter,
    /// This client has abandoned the lease, which has this mode. The caller has to release it.
    AbandonedLease(Mode),
    /// Any other lease: the client holds it already, or the message is forged.
    OtherLease,
}

/// Whether the lease that a waiter asks Redis for is new.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EntryKind {
    /// The entry's lease, which an earlier request may have queued in Redis.
    Existing,
    /// A new lease. It joins the queue in Redis at the place `since`.
    Rejoin { since: u64 },
    /// A new lease. It joins the end of the queue in Redis.
    New,
}

/// A thread's membership in a local queue. `leave` and `leave_with` return the leases that the caller has to release. A
/// drop, as in a panic, leaves the queue, too.
pub struct WaiterGuard<'a> {
    queues: &'a LocalQueues,
    key: &'a Key,
    waiter: Arc<Waiter>,
    /// The user's channel that cancels the wait, and the channel that wakes this thread. The thread waits for both.
    cancel: Option<(&'a Receiver<()>, Receiver<()>)>,
    left: bool,
}

/// The position of a waiter in its local queue.
#[derive(Debug)]
pub enum QueuePosition {
    /// Other waiters of this client are in front.
    Behind,
    /// This waiter is the first. A thread of this client holds the lock alone, and its lease is valid for this time.
    Held(Duration),
    /// This waiter is the first, and may ask Redis.
    First,
    /// This waiter is the first, and a message has granted the entry's lease.
    Granted(QueueEntry, GrantMessage),
}

impl LocalQueues {
    pub fn new(clock: Clock) -> Self {
        let shards = (0..SHARDS).map(|_| Mutex::default()).collect();
        Self {
            clock,
            shards,
            watches: Watches::default(),
        }
    }

    /// Adds the calling thread to the end of the queue of `key`. The waiter's sleeps end when `cancel` receives a
    /// message.
    pub fn join<'a>(
        &'a self,
        key: &'a Key,
        options: Options,
        cancel: Option<&'a Receiver<()>>,
    ) -> WaiterGuard<'a> {
        self.join_in(self.shard(key), key, options, cancel)
    }

    /// Whether a thread waits for `key`.
    pub fn has_waiters(&self, key: &Key) -> bool {
        self.shard(key).waits_for(key)
    }

    /// Joins the queue of `key`, but only if no other thread waits for it.
    pub fn join_if_empty<'a>(&'a self, key: &'a Key, options: Options) -> Option<WaiterGuard<'a>> {
        let shard = self.shard(key);
        (!shard.waits_for(key)).then(|| self.join_in(shard, key, options, None))
    }

    /// Joins the queue of `key`, but only if no other thread waits for the key, holds it or has a share of it.
    pub fn join_if_free<'a>(
        &'a self,
        key: &'a Key,
        options: Options,
        cancel: Option<&'a Receiver<()>>,
    ) -> Option<WaiterGuard<'a>> {
        let shard = self.shard(key);
        let is_free = !shard.waits_for(key) && !shard.is_held(key);
        is_free.then(|| self.join_in(shard, key, options, cancel))
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

    /// Removes `lease`, which has ended, and wakes the key's first waiter, which then asks Redis.
    pub fn remove_holder(&self, lease: &Lease) {
        let holder = self.shard(&lease.grant().key).remove_holder(lease);
        // The lease is dropped while the mutex is unlocked, since this may be the last reference to it.
        drop(holder);
    }

    /// Adds a guard to a reader lease of this client, if no thread waits and a reader with these options may join the
    /// lease at `now`. Sends no request.
    pub fn join_reader(
        &self,
        key: &Key,
        options: &Options,
        limits: HandOffs,
        now: MonotonicTime,
    ) -> Option<Arc<Lease>> {
        let mut shard = self.shard(key);
        if shard.waits_for(key) {
            return None;
        }
        shard.join_reader(key, options, limits, now)
    }

    /// Adds another guard to a reader lease.
    pub fn add_guard(&self, lease: &Lease) {
        let key = &lease.grant().key;
        if let Some(shares) = self.shard(key).shares.get_mut(key) {
            shares.add_guard(lease);
        }
    }

    /// Removes a guard of a reader lease. Returns true if it was the last one: the caller then releases the lease,
    /// which readers do not join any more.
    pub fn remove_guard(&self, lease: &Lease) -> bool {
        let key = &lease.grant().key;
        let mut shard = self.shard(key);
        let shares = shard.shares.get_mut(key);
        shares.is_none_or(|shares| shares.remove_guard(lease))
    }

    /// Whether a reader lease has exactly one guard.
    pub fn has_one_guard(&self, lease: &Lease) -> bool {
        let key = &lease.grant().key;
        let shard = self.shard(key);
        let shares = shard.shares.get(key);
        shares.is_some_and(|shares| shares.has_one_guard(lease))
    }

    /// Replaces `before` by `next`, the result of its conversion. If `next` is a reader's lease, the readers at the
    /// head of the queue join it, within the limits of hand-offs, and the first waiter behind them asks Redis.
    pub fn replace_converted(&self, before: &Lease, next: &Arc<Lease>, limits: HandOffs) {
        let (key, now) = (&next.grant().key, self.clock.now());
        let mut shard = self.shard(key);
        let removed = shard.remove_holder(before);
        add_granted(shard, next, limits, now);
        drop(removed);
    }

    /// Hands the lock off to the first waiter, if there is one and `pass_on` returns a lease for that waiter's options.
    /// Calls `pass_on` under the shard's mutex.
    pub fn hand_off(
        &self,
        lease: &Lease,
        pass_on: impl FnOnce(Options) -> Option<Arc<Lease>>,
    ) -> bool {
        let key = &lease.grant().key;
        let mut shard = self.shard(key);
        let is_holder = shard.holds(lease);
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
        let before = shard.insert(&next, next.grant().since);
        // The mutex is still locked. A waiter that leaves the queue afterwards finds this lease.
        first.hand_off(next);
        shard.wake_after_share(lease);
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

    /// Wakes the first waiter of each of these keys. Each of them then asks Redis once.
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

    /// Handles a message that Redis has granted `key` to `lease`. Wakes the waiter that has asked for the lease.
    pub fn granted(&self, key: &Key, lease: LeaseId, grant: GrantMessage) -> GrantOf {
        let mut shard = self.shard(key);
        if let Some(queue) = shard.queues.get_mut(key)
            && let Some(entry) = queue.entry.as_mut().filter(|entry| entry.lease == lease)
        {
            // On a Cluster, several nodes may forward the same message.
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
        match shard.abandoned.take(lease) {
            Some(mode) => GrantOf::AbandonedLease(mode),
            None => GrantOf::OtherLease,
        }
    }

    /// Handles a message that `lease` is now one of the first in the queue in Redis. Its waiter asks again soon.
    pub fn near(&self, key: &Key, lease: LeaseStart) {
        let shard = self.shard(key);
        if let Some(queue) = shard.queues.get(key)
            && queue
                .entry
                .is_some_and(|entry| entry.lease.start() == lease)
        {
            queue.nudge();
        }
    }

    /// Handles a message of a roll call. Wakes the waiter of `lease`, which asks at once: otherwise Redis removes it
    /// from the queue.
    pub fn called(&self, key: &Key, lease: LeaseStart) {
        if let Some(queue) = self.shard(key).queues.get_mut(key)
            && let Some(entry) = &mut queue.entry
            && entry.lease.start() == lease
        {
            entry.notification_epoch = None;
            queue.wake();
        }
    }

    /// Adds a held lease of a caller that did not wait in a queue. If the key has another holder already, the older of
    /// the two leases is lost.
    pub fn hold(&self, lease: &Arc<Lease>) {
        let key = &lease.grant().key;
        let mut shard = self.shard(key);
        let is_newer = |holder: &Arc<Lease>| holder.grant().token > lease.grant().token;
        // If the known holder is newer, `lease` itself has ended.
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

    /// Handles a message that the client `by` has released `lease` by force. Returns the lease if a thread of this
    /// client holds it. If the waiter has not accepted the grant yet, records that the waiter has to confirm it.
    pub fn forced(&self, key: &Key, lease: LeaseStart, by: &HolderId) -> Option<Arc<Lease>> {
        let mut shard = self.shard(key);
        let holder = shard.holders.get(key);
        let holder = holder.filter(|holder| holder.grant().id.start() == lease);
        let share = || shard.shares.get(key)?.find(lease);
        if let Some(holder) = holder.or_else(share) {
            return Some(Arc::clone(holder));
        }
        if !shard.is_held(key) && !shard.queues.contains_key(key) {
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
            let Shard {
                holders, shares, ..
            } = &*shard.lock();
            let shares = shares.values().flat_map(Shares::leases);
            holders.iter().chain(shares).cloned().collect()
        };
        shards.flat_map(held).collect()
    }

    /// The lease that a waiter asks for, if Redis reports changes of the key to this client.
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

    /// Records whether `server` has a watched key. Wakes the first waiter once a majority of the servers lacks the key.
    pub fn record_read(&self, key: &Key, server: ServerId, exists: bool, majority: usize) {
        if let Some(queue) = self.shard(key).queues.get_mut(key) {
            queue.record_presence(server, exists, majority);
        }
    }

    /// Records which client holds a watched key.
    pub fn record_turn(&self, key: &Key, turn: Turn) {
        let mut shard = self.shard(key);
        let queue = shard.queues.get_mut(key);
        if let Some(watch) = queue.and_then(|queue| queue.watch.as_mut()) {
            let before = watch.turn.replace(turn);
            let is_same = |now: &Turn| before.is_some_and(|before| before.lease == now.lease);
            if !watch.turn.as_ref().is_some_and(is_same) {
                watch.renewal = Renewal::None;
            }
        }
    }

    /// Records a change of a watched key on `server`. Returns true if the key should be read: a waiter watches it, and
    /// it is not known to be missing on a majority.
    ///
    /// On a quorum, a change of a key that was there before counts as its release, although it may be a renewal:
    /// another client may have acquired the key again before this client reads it.
    ///
    /// If one server stores the key (`majority` is 1), only a read that finds the key missing counts. If a read after a
    /// change has found the same lock, and the key changes again, it is not read at once: the waiter is nudged, and
    /// reads the key after a pause. Such changes may recur quickly: reads of other keys push this key out of the
    /// server's tracking table, or a program often writes data to this key.
    pub fn record_change(&self, key: &Key, server: ServerId, majority: usize) -> bool {
        let mut shard = self.shard(key);
        let Some(queue) = shard.queues.get_mut(key) else {
            return false;
        };
        let Some(watch) = &mut queue.watch else {
            return false;
        };
        if watch.present_on & set_of(server) != 0 {
            match (majority, watch.renewal) {
                (1, Renewal::Read) => {
                    queue.nudge();
                    return false;
                }
                (1, _) => watch.renewal = Renewal::Unread,
                _ => queue.record_presence(server, false, majority),
            }
        }
        let watch = queue.watch.as_ref();
        watch.is_some_and(|watch| !is_majority(watch.missing_on, majority))
    }

    /// On how many servers a watched key exists, and whether it was released since the watch began.
    #[cfg(all(test, not(shuttle)))]
    pub fn watched(&self, key: &Key) -> Option<(u32, bool)> {
        let shard = self.shard(key);
        let watch = shard.queues.get(key)?.watch.as_ref()?;
        Some((watch.present_on.count_ones(), watch.was_released))
    }

    /// Removes `lease` from its queue, because Redis has not queued it, or the caller is about to release it. The next
    /// lease joins at the same place. If a message grants `lease` later, the client releases it.
    pub fn forget_entry(&self, key: &Key, lease: LeaseId, mode: Mode) {
        let mut shard = self.shard(key);
        shard.abandoned.insert(lease, mode);
        if let Some(queue) = shard.queues.get_mut(key)
            && let Some(entry) = queue.entry.take_if(|entry| entry.lease == lease)
        {
            queue.since = entry.since.or(queue.since);
        }
    }

    /// Removes the leases that waiters ask for from all queues. Returns those that the caller has to release.
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
                holders,
                shares,
                queues,
                ..
            } = &*shard.lock();
            let held = holders.iter().map(|lease| &lease.grant().key);
            let held_only = held.chain(shares.keys());
            queues.len() + held_only.filter(|key| !queues.contains_key(key)).count()
        };
        self.shards.iter().map(keys).sum()
    }
}

impl Shard {
    fn waits_for(&self, key: &Key) -> bool {
        let queue = self.queues.get(key);
        queue.is_some_and(|queue| !queue.waiters.is_empty())
    }

    /// Whether this client holds the key alone, or shares of it.
    fn is_held(&self, key: &Key) -> bool {
        self.holders.get(key).is_some() || self.shares.contains_key(key)
    }

    /// Whether this lease is among the holders.
    fn holds(&self, lease: &Lease) -> bool {
        let grant = lease.grant();
        match grant.options.mode {
            Mode::Exclusive => {
                let holder = self.holders.get(&grant.key);
                holder.is_some_and(|holder| std::ptr::eq(&**holder, lease))
            }
            _ => {
                let shares = self.shares.get(&grant.key);
                shares.is_some_and(|shares| shares.contains(lease))
            }
        }
    }

    /// Adds a holder that has held the key in its present mode since this time. Returns the lease that it replaces.
    fn insert(&mut self, lease: &Arc<Lease>, since: MonotonicTime) -> Option<Arc<Lease>> {
        let (grant, lease) = (lease.grant(), Arc::clone(lease));
        match grant.options.mode {
            Mode::Exclusive => self.holders.insert(lease),
            _ => {
                let shares = self.shares.entry(grant.key.clone()).or_default();
                shares.insert(lease, since)
            }
        }
    }

    /// The leases of this client that have lost the key because Redis has granted it to `lease`: the holder, or all
    /// shares of the key. They stay among the holders until their guards are dropped.
    fn lost_to(&self, lease: &Lease) -> Vec<Arc<Lease>> {
        let grant = lease.grant();
        match grant.options.mode {
            Mode::Exclusive => {
                let shares = self.shares.get(&grant.key);
                shares.map_or_else(Vec::new, |shares| shares.leases().cloned().collect())
            }
            _ => self.holders.get(&grant.key).cloned().into_iter().collect(),
        }
    }

    /// Removes the holder and wakes the first waiter. Returns the holder, to be dropped after the mutex is released.
    #[must_use]
    fn remove_holder(&mut self, lease: &Lease) -> Option<Arc<Lease>> {
        let key = &lease.grant().key;
        let holder = match lease.grant().options.mode {
            Mode::Exclusive => self.holders.remove(lease),
            _ => self.remove_share(lease),
        };
        if let Some(queue) = self.queues.get(key) {
            queue.wake();
            self.tidy(key);
        }
        holder
    }

    fn remove_share(&mut self, lease: &Lease) -> Option<Arc<Lease>> {
        let key = &lease.grant().key;
        let shares = self.shares.get_mut(key)?;
        let removed = shares.remove(lease);
        if shares.is_empty() {
            self.shares.remove(key);
        }
        removed
    }

    /// Adds readers at the head of the queue to this client's reader lease, as long as the limits allow it. Returns the
    /// waiters of these readers. The caller has to wake their threads after it has unlocked the mutex.
    fn let_readers_join(
        &mut self,
        key: &Key,
        limits: HandOffs,
        now: MonotonicTime,
    ) -> Vec<Arc<Waiter>> {
        let mut joined = Vec::new();
        while let Some(queue) = self.queues.get(key)
            && let Some(first) = queue.waiters.front()
            && first.options.mode == Mode::Read
            && let Some(lease) = self.join_reader(key, &first.options.clone(), limits, now)
            && let Some(queue) = self.queues.get_mut(key)
            && let Some(first) = queue.waiters.pop_front()
        {
            first.hand_off(lease);
            joined.push(first);
        }
        joined
    }

    /// Adds a guard to the reader lease of `key`, unless a grant to a writer of this client has ended the lease.
    fn join_reader(
        &mut self,
        key: &Key,
        options: &Options,
        limits: HandOffs,
        now: MonotonicTime,
    ) -> Option<Arc<Lease>> {
        if self.holders.get(key).is_some() {
            return None;
        }
        self.shares.get_mut(key)?.join(options, limits, now)
    }

    /// Wakes the first waiter if `lease`, which was granted or handed off, is a share: beside a share, the waiter may
    /// ask Redis.
    fn wake_after_share(&self, lease: &Lease) {
        let grant = lease.grant();
        if grant.options.mode != Mode::Exclusive
            && let Some(queue) = self.queues.get(&grant.key)
        {
            queue.wake();
        }
    }

    /// Removes the queue of `key` if no thread waits in it, unless this client holds the key and `entry` or `forced` is
    /// set.
    fn tidy(&mut self, key: &Key) {
        let is_held = self.is_held(key);
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

/// Adds a lease that Redis has granted, and unlocks the shard. The readers at the head of the queue join a reader's
/// lease, within the limits of hand-offs. This client's other leases of the key that exclude `lease` are lost.
fn add_granted(
    mut shard: MutexGuard<'_, Shard>,
    lease: &Arc<Lease>,
    limits: HandOffs,
    now: MonotonicTime,
) {
    let key = &lease.grant().key;
    let mut lost = shard.lost_to(lease);
    lost.extend(shard.insert(lease, now));
    let joined = shard.let_readers_join(key, limits, now);
    shard.wake_after_share(lease);
    shard.tidy(key);
    drop(shard);
    joined.iter().for_each(|reader| reader.ring());
    for other in lost {
        other.lose(now, LossReason::Deleted);
    }
}

impl KeyQueue {
    /// Removes the entry. Returns it if the caller has to release its lease. If a request for the lease has no reply
    /// yet, that request's caller releases the lease.
    fn abandon(&mut self) -> Option<QueueEntry> {
        self.entry.take().filter(|entry| !entry.is_in_flight)
    }

    fn wake(&self) {
        if let Some(first) = self.waiters.front() {
            first.wake();
        }
    }

    fn nudge(&self) {
        if let Some(first) = self.waiters.front() {
            first.nudge();
        }
    }

    fn record_presence(&mut self, server: ServerId, exists: bool, majority: usize) {
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
        if exists && watch.renewal == Renewal::Unread {
            watch.renewal = Renewal::Read;
        }
        if !was_missing && is_majority(watch.missing_on, majority) {
            watch.was_released = watch.was_taken;
            self.wake();
        }
    }

    fn remove(&mut self, waiter: &Arc<Waiter>) {
        self.waiters.retain(|other| !Arc::ptr_eq(other, waiter));
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

    /// Takes the lease that another thread has handed off to this waiter, if there is one. The waiter is then no longer
    /// in the queue.
    pub fn take_handed_off(&self) -> Option<Arc<Lease>> {
        self.waiter.state.lock().handed_off.take()
    }

    /// Chooses the lease to ask Redis for, and marks its entry as in flight:
    ///
    /// - If the queue's entry has this waiter's options, the lease is that of the entry.
    /// - Otherwise the lease is `fresh`, which gets a new entry. Returns the old entry, if there is one: the caller has
    ///   to release its lease.
    /// - If the entry is in flight already, the lease is `fresh`, and the entry stays as it is.
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
            // The request in flight belongs to a thread that was handed the lock before the reply.
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

    /// Records that a reply reports `lease` in the queue in Redis. `queue_mode` is that of the request. Returns whether
    /// Redis will notify the waiter of a grant; `None` if the local queue now asks for another lease.
    #[must_use]
    pub fn record_queued(
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
        // The lease is still queued, so a grant that a message reported before this request was forged. A grant that
        // was reported after the request may be true.
        entry.was_granted = entry.granted.is_some();
        entry.notified = match queue_mode {
            QueueMode::Existing { notified } => entry.notified || notified,
            joined => !joined.polls(),
        };
        Some(entry.notified)
    }

    /// Removes `lease`, whose acquire the script has skipped.
    pub fn remove_unasked_entry(&self, lease: LeaseId) {
        let mut shard = self.queues.shard(self.key);
        if let Some(queue) = shard.queues.get_mut(self.key) {
            queue.entry.take_if(|entry| entry.lease == lease);
        }
    }

    /// Removes `lease`, which is missing from the queue in Redis, and chooses the place of the next lease.
    ///
    /// The next lease joins at the same place if Redis was to notify the waiter and no message of a grant came. In this
    /// case, returns the notification epoch of the entry. Otherwise Redis may have granted the lock and the grant may
    /// have expired, so the next lease joins in front of all others.
    pub fn remove_missing_entry(&self, lease: LeaseId) -> Option<u64> {
        let mut shard = self.queues.shard(self.key);
        let Shard {
            queues, abandoned, ..
        } = &mut *shard;
        let queue = queues.get_mut(self.key)?;
        let entry = queue.entry.take_if(|entry| entry.lease == lease)?;
        abandoned.insert(lease, entry.options.mode);
        let relied_on = entry.notified && !entry.was_granted;
        let since = entry.since.or(queue.since);
        queue.since = if relied_on {
            since
        } else {
            since.map(front_place)
        };
        entry.notification_epoch.filter(|_| relied_on)
    }

    /// Records that Redis reports changes of the key to this client.
    pub fn set_tracked(&self) {
        let mut shard = self.queues.shard(self.key);
        let queue = shard.queues.get_mut(self.key);
        if let Some(entry) = queue.and_then(|queue| queue.entry.as_mut()) {
            entry.is_tracked = true;
        }
    }

    /// Begins to watch the key, and forgets what servers have reported about it. `is_taken`: another client has the
    /// key.
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

    /// Whether a majority of the servers has reported a release of the key since the watch began. On a quorum, a
    /// renewal looks the same.
    pub fn was_released(&self) -> bool {
        let shard = self.queues.shard(self.key);
        let queue = shard.queues.get(self.key);
        let watch = queue.and_then(|queue| queue.watch.as_ref());
        watch.is_some_and(|watch| watch.was_released)
    }

    /// Sleeps until this waiter is woken or cancelled, until `until` at the latest.
    pub fn sleep(&self, until: MonotonicTime) -> WakeReason {
        let cancel = self.cancel.as_ref().map(|(cancel, woken)| (*cancel, woken));
        self.waiter.sleep(until, &self.queues.clock, cancel)
    }

    /// Leaves the queue with `lease`, which Redis has granted, and adds it to the held leases.
    ///
    /// If `lease` is a reader's, the readers directly behind this one join it, within the limits of hand-offs.
    ///
    /// Another thread that has lost the lock, and does not know it yet, may have handed its lease off to this waiter.
    /// Returns that lease, which the caller has to release. Also returns the client that has released `lease` by force,
    /// if a message has reported this.
    #[must_use]
    pub fn leave_with(
        mut self,
        lease: &Arc<Lease>,
        limits: HandOffs,
    ) -> (Option<Arc<Lease>>, Option<HolderId>) {
        self.left = true;
        let now = self.queues.clock.now();
        let mut shard = self.queues.shard(self.key);
        let mut forced = None;
        if let Some(queue) = shard.queues.get_mut(self.key) {
            queue.remove(&self.waiter);
            queue.entry.take_if(|entry| entry.lease == lease.grant().id);
            (queue.since, queue.watch) = (None, None);
            forced = queue.forced.take();
        }
        let handed_off = self.take_handed_off();
        add_granted(shard, lease, limits, now);
        let forced = forced.filter(|(start, _)| *start == lease.grant().id.start());
        (handed_off, forced.map(|(_, by)| by))
    }

    /// Leaves the queue without a grant from Redis. Returns what the caller has to release: a lease that another thread
    /// has handed off to this waiter, and the entry if no other thread waits.
    pub fn leave(mut self) -> (Option<Arc<Lease>>, Option<QueueEntry>) {
        self.left = true;
        self.quit(false)
    }

    fn quit(&self, panics: bool) -> (Option<Arc<Lease>>, Option<QueueEntry>) {
        let mut shard = self.queues.shard(self.key);
        let handed_off = self.take_handed_off();
        let Some(queue) = shard.queues.get_mut(self.key) else {
            return (handed_off, None);
        };
        let was_first = queue.is_first(&self.waiter);
        queue.remove(&self.waiter);
        if was_first {
            if panics && let Some(entry) = &mut queue.entry {
                // This thread panics, so it does not read the reply.
                entry.is_in_flight = false;
            }
            // The leaving waiter may have ignored a wake-up, so the next waiter is woken.
            queue.wake();
        }
        let is_empty = queue.waiters.is_empty();
        let abandoned = is_empty.then(|| queue.abandon()).flatten();
        if let Some(entry) = &abandoned {
            shard.abandoned.insert(entry.lease, entry.options.mode);
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
    /// Wakes the thread of a wait that can be cancelled. This thread waits for this channel and for the user's cancel
    /// channel, instead of `changed`.
    wake_channel: Option<Sender<()>>,
}

#[derive(Default)]
struct WaiterState {
    /// Remains set until the next sleep, so a wake-up before that sleep is not lost.
    woken: bool,
    /// Whether the thread has to compute its sleep again, which may be shorter now.
    nudged: bool,
    handed_off: Option<Arc<Lease>>,
}

/// The reason why a sleep ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WakeReason {
    Woken,
    Cancelled,
    /// The thread has to compute its sleep again, which may be shorter now.
    Nudged,
    /// The time has passed.
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

    /// Stores a lease that is handed off to this waiter. The caller then calls `ring`.
    fn hand_off(&self, lease: Arc<Lease>) {
        self.state.lock().handed_off = Some(lease);
    }

    /// Wakes the thread, which then reads its state.
    fn ring(&self) {
        self.changed.notify_one();
        if let Some(wake_channel) = &self.wake_channel {
            // A full channel already has a wake-up.
            try_send(wake_channel);
        }
    }

    /// Sleeps until woken or cancelled, until `until` at the latest. `cancel` has the user's channel that cancels the
    /// wait, and the channel that wakes the thread.
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

/// The leases that this client has asked for and stopped waiting for. If a message grants one of them, the client
/// releases it. The client ignores grants of leases that are not listed here: any user may publish such a message.
#[derive(Default)]
struct Abandoned(VecDeque<(LeaseId, Mode)>);

impl Abandoned {
    fn insert(&mut self, lease: LeaseId, mode: Mode) {
        if self.place(lease).is_some() {
            return;
        }
        if self.0.len() == MAX_ABANDONED {
            self.0.pop_front();
        }
        self.0.push_back((lease, mode));
    }

    /// Removes `lease`, so that it is released only once. Returns its mode, or `None` if `lease` is not listed.
    fn take(&mut self, lease: LeaseId) -> Option<Mode> {
        let place = self.place(lease)?;
        self.0.remove(place).map(|(_, mode)| mode)
    }

    fn place(&self, lease: LeaseId) -> Option<usize> {
        self.0.iter().position(|(known, _)| *known == lease)
    }
}

//! The lines of one client's own threads, one for each key that is wanted or held, first in first
//! out. Only the first in line talks to Redis, and only while no thread of this client has the lock.
//! Does no I/O; knows who waits, who holds, and what was asked for on behalf of the line.

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests;
mod waiter;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, bounded};

use crate::clock::{Clock, Moment};
use crate::id::{HolderId, LeaseId, LeaseStart};
use crate::key::{Key, KeyMap};
use crate::lease::{Lease, LeasesByKey, Options};
use crate::loss::LossReason;
use crate::store::{FIRST_USUAL_PLACE, Grant, Standing, in_front, micros_of};
use crate::sync::{Mutex, MutexGuard};
use crate::wait::abandoned::Abandoned;

use waiter::Waiter;
pub(crate) use waiter::Woken;

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
/// of them has a line.
#[derive(Default)]
struct Shard {
    holders: LeasesByKey,
    lines: KeyMap<Line>,
    /// An emptied line, for the next key.
    spare: VecDeque<Arc<Waiter>>,
    abandoned: Abandoned,
}

/// There while somebody waits, or while it says something of a lock that is held.
#[derive(Default)]
struct Line {
    waiters: VecDeque<Arc<Waiter>>,
    claim: Option<Claim>,
    /// The place in µs of the last claim that left the queue of Redis ungranted. The next claim joins there.
    since: Option<u64>,
    /// The lease that another client took away, as a message said before a caller had entered on it.
    forced: Option<(LeaseStart, HolderId)>,
}

/// The lease that was asked for on behalf of the line, and may be queued in Redis. It outlasts the waiter
/// that asked: the first waiter goes on with it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Claim {
    pub(crate) lease: LeaseId,
    pub(crate) options: Options,
    /// When it was first asked for: it was granted after that, if it was.
    pub(crate) asked_at: Moment,
    pub(crate) granted: Option<Grant>,
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
    /// `Store::hearing` at the last request that found it in the queue.
    heard_by: u64,
    /// It is one of the first in that queue, and its key is watched.
    watches: bool,
}

impl Claim {
    /// Whether Redis can have made the token of this grant, by its clock: after the claim joined the queue, and
    /// before `now`.
    pub(crate) fn is_plausible(&self, grant: Grant, now: Moment) -> bool {
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
pub(crate) enum Claimed {
    /// The lease that may be queued already.
    Kept,
    /// A new lease, at the place of a claim that joined at `since`.
    Again {
        since: u64,
    },
    Fresh,
}

/// Somebody's place in line; left when dropped.
pub(crate) struct Place<'a> {
    queues: &'a LocalQueues,
    key: &'a Key,
    waiter: Arc<Waiter>,
    /// What cancels its waiting, and what wakes it besides.
    cancel: Option<(&'a Receiver<()>, Receiver<()>)>,
    left: bool,
}

/// What somebody in line can do now.
#[derive(Debug)]
pub(crate) enum Turn {
    /// Wait: others are before it.
    Behind,
    /// Wait: a thread of this client has the lock, for so long at least.
    Held(Duration),
    /// Ask Redis.
    First,
    /// Take what Redis has granted.
    Granted(Claim, Grant),
}

impl LocalQueues {
    pub(crate) fn new(clock: Clock) -> Self {
        let shards = (0..SHARDS).map(|_| Mutex::default()).collect();
        Self { clock, shards }
    }

    /// Takes the last place in line. `cancel` ends sleeps there when it is ready.
    pub(crate) fn join<'a>(
        &'a self,
        key: &'a Key,
        options: Options,
        cancel: Option<&'a Receiver<()>>,
    ) -> Place<'a> {
        self.join_in(self.shard(key), key, options, cancel)
    }

    /// As [`join`](Self::join), but only where nobody waits.
    pub(crate) fn join_if_empty<'a>(&'a self, key: &'a Key, options: Options) -> Option<Place<'a>> {
        let shard = self.shard(key);
        (!shard.waits_for(key)).then(|| self.join_in(shard, key, options, None))
    }

    fn join_in<'a>(
        &'a self,
        mut shard: MutexGuard<'_, Shard>,
        key: &'a Key,
        options: Options,
        cancel: Option<&'a Receiver<()>>,
    ) -> Place<'a> {
        let (bell, rung) = cancel.map(|_| bounded(1)).unzip();
        let waiter = Arc::new(Waiter::new(options, bell));
        let Shard { lines, spare, .. } = &mut *shard;
        let line = lines.entry(key.clone()).or_insert_with(|| Line {
            waiters: std::mem::take(spare),
            ..Line::default()
        });
        line.waiters.push_back(Arc::clone(&waiter));
        Place {
            queues: self,
            key,
            waiter,
            cancel: cancel.zip(rung),
            left: false,
        }
    }

    /// `lease` is not held any more: the first waiter asks Redis now.
    pub(crate) fn let_go(&self, lease: &Lease) {
        let holder = self.shard(&lease.terms().key).let_go(lease);
        // After the mutex is released.
        drop(holder);
    }

    /// Passes the lock on to the first in line, if there is one and `pass_on` gives a lease for its
    /// options. `pass_on` is called under the line's lock.
    pub(crate) fn hand_off(
        &self,
        lease: &Lease,
        pass_on: impl FnOnce(Options) -> Option<Arc<Lease>>,
    ) -> bool {
        let key = &lease.terms().key;
        let mut shard = self.shard(key);
        let holder = shard.holders.get(key);
        let is_holder = holder.is_some_and(|holder| std::ptr::eq(&**holder, lease));
        let line = shard.lines.get(key).filter(|_| is_holder);
        let Some(first) = line.and_then(|line| line.waiters.front().cloned()) else {
            return false;
        };
        let Some(next) = pass_on(first.options) else {
            return false;
        };
        if let Some(line) = shard.lines.get_mut(key) {
            line.waiters.pop_front();
        }
        shard.tidy(key);
        let before = shard.holders.insert(Arc::clone(&next));
        // Under the line's lock: a leaving waiter finds itself in line or finds the lease.
        first.hand(next);
        drop(shard);
        first.ring();
        drop(before);
        true
    }

    /// Wakes the first in line for `key`.
    pub(crate) fn wake(&self, key: &Key) {
        if let Some(line) = self.shard(key).lines.get(key) {
            line.wake();
        }
    }

    /// Wakes the first in line for each key: each of them asks Redis once.
    pub(crate) fn wake_first(&self) {
        for shard in &self.shards {
            shard.lock().lines.values().for_each(Line::wake);
        }
    }

    /// Wakes everybody.
    pub(crate) fn wake_all(&self) {
        for shard in &self.shards {
            for line in shard.lock().lines.values() {
                line.waiters.iter().for_each(|waiter| waiter.wake());
            }
        }
    }

    /// A message says that Redis has granted `key` to `lease`. Wakes the waiter whose claim this is.
    pub(crate) fn granted(&self, key: &Key, lease: LeaseId, grant: Grant) -> GrantOf {
        let mut shard = self.shard(key);
        if let Some(line) = shard.lines.get_mut(key)
            && let Some(claim) = line.claim.as_mut().filter(|claim| claim.lease == lease)
        {
            let to_confirm = grant.to_confirm || claim.is_known;
            claim.granted = Some(Grant {
                to_confirm,
                ..grant
            });
            (claim.was_granted, claim.is_known) = (true, true);
            line.wake();
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
        if let Some(line) = shard.lines.get(key)
            && line.claim.is_some_and(|claim| claim.lease.start() == lease)
            && let Some(first) = line.waiters.front()
        {
            first.nudge();
        }
    }

    /// `lease` came to this client without a wait. Two cannot be held: the older one is lost.
    pub(crate) fn hold(&self, lease: &Arc<Lease>) {
        let key = &lease.terms().key;
        let mut shard = self.shard(key);
        let is_newer = |holder: &Arc<Lease>| holder.terms().token > lease.terms().token;
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
        if let Some(holder) = holder.filter(|holder| holder.terms().id.start() == lease) {
            return Some(Arc::clone(holder));
        }
        if holder.is_none() && !shard.lines.contains_key(key) {
            return None;
        }
        let line = shard.lines.entry(key.clone()).or_default();
        line.forced = Some((lease, by.clone()));
        if let Some(claim) = &mut line.claim
            && claim.lease.start() == lease
        {
            claim.is_known = true;
            if let Some(grant) = &mut claim.granted {
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

    /// The claim on `key`, if that is watched for it.
    pub(crate) fn watched_claim_of(&self, key: &Key) -> Option<LeaseId> {
        let claim = self.shard(key).lines.get(key).and_then(|line| line.claim);
        claim.filter(|claim| claim.watches).map(|claim| claim.lease)
    }

    /// Forgets the claim of `lease`, which is not queued in Redis or about to be released. The next claim joins at
    /// its place.
    pub(crate) fn disclaim(&self, key: &Key, lease: LeaseId) {
        let mut shard = self.shard(key);
        shard.abandoned.insert(lease);
        if let Some(line) = shard.lines.get_mut(key)
            && let Some(claim) = line.claim.take_if(|claim| claim.lease == lease)
        {
            line.since = claim.since.or(line.since);
        }
    }

    /// Takes back what was asked for and not granted yet, of all lines.
    pub(crate) fn abandon_all(&self) -> Vec<(Key, Claim)> {
        let mut claims = Vec::new();
        for shard in &self.shards {
            for (key, line) in shard.lock().lines.iter_mut() {
                claims.extend(line.abandon().map(|claim| (key.clone(), claim)));
            }
        }
        claims
    }

    fn shard(&self, key: &Key) -> MutexGuard<'_, Shard> {
        self.shards[key.part(SHARDS)].lock()
    }

    #[cfg(test)]
    pub(crate) fn lines(&self) -> usize {
        let keys = |shard: &Mutex<Shard>| {
            let Shard { holders, lines, .. } = &*shard.lock();
            let held_only = |lease: &&Arc<Lease>| !lines.contains_key(&lease.terms().key);
            lines.len() + holders.iter().filter(held_only).count()
        };
        self.shards.iter().map(keys).sum()
    }
}

impl Shard {
    fn waits_for(&self, key: &Key) -> bool {
        let line = self.lines.get(key);
        line.is_some_and(|line| !line.waiters.is_empty())
    }

    /// Removes the holder and wakes the first waiter. Returns the holder, to be dropped after the mutex is released.
    #[must_use]
    fn let_go(&mut self, lease: &Lease) -> Option<Arc<Lease>> {
        let holder = self.holders.remove(lease);
        let key = &lease.terms().key;
        if let Some(line) = self.lines.get(key) {
            line.wake();
            self.tidy(key);
        }
        holder
    }

    /// Forgets the line for `key` if it says nothing any more.
    fn tidy(&mut self, key: &Key) {
        let is_held = self.holders.get(key).is_some();
        let says_something = |line: &Line| {
            let knows = line.claim.is_some() || line.forced.is_some();
            !line.waiters.is_empty() || (is_held && knows)
        };
        if !self.lines.get(key).is_some_and(says_something)
            && let Some(line) = self.lines.remove(key)
            && line.waiters.capacity() <= LONGEST_SPARE
        {
            self.spare = line.waiters;
        }
    }
}

impl Line {
    /// Removes the claim. Returns it, unless its caller is to give it back.
    fn abandon(&mut self) -> Option<Claim> {
        self.claim.take().filter(|claim| !claim.asked)
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

impl Place<'_> {
    pub(crate) fn turn(&self, now: Moment) -> Turn {
        let shard = self.queues.shard(self.key);
        let Some(line) = shard
            .lines
            .get(self.key)
            .filter(|line| line.is_first(&self.waiter))
        else {
            return Turn::Behind;
        };
        if let Some(claim) = line.claim
            && let Some(grant) = claim.granted
        {
            return Turn::Granted(claim, grant);
        }
        let holder = shard.holders.get(self.key);
        let live = holder.and_then(|lease| lease.live_for(now));
        live.map_or(Turn::First, Turn::Held)
    }

    /// The lease that was handed off to it, if one was: it has left the line with that.
    pub(crate) fn handed(&self) -> Option<Arc<Lease>> {
        self.waiter.handed()
    }

    /// The lease to ask Redis for: the claim, if its options are equal, or else `fresh`. And a claim with other
    /// options, to be given back.
    pub(crate) fn claim(&self, fresh: LeaseId, now: Moment) -> (LeaseId, Claimed, Option<Claim>) {
        let mut shard = self.queues.shard(self.key);
        let Some(line) = shard.lines.get_mut(self.key) else {
            return (fresh, Claimed::Fresh, None);
        };
        let options = self.waiter.options;
        if line.claim.is_some_and(|claim| claim.asked) {
            // The thread that sent its request was handed the lock before the answer came.
            return (fresh, Claimed::Fresh, None);
        }
        if let Some(claim) = line.claim.as_mut().filter(|claim| claim.options == options) {
            (claim.granted, claim.watches, claim.asked) = (None, false, true);
            return (claim.lease, Claimed::Kept, None);
        }
        let fresh_claim = Claim {
            lease: fresh,
            options,
            asked_at: now,
            granted: None,
            was_granted: false,
            is_known: false,
            asked: true,
            since: None,
            notified: false,
            heard_by: 0,
            watches: false,
        };
        let claimed = line
            .since
            .map_or(Claimed::Fresh, |since| Claimed::Again { since });
        (fresh, claimed, line.claim.replace(fresh_claim))
    }

    /// Notes that `lease` is in the queue of Redis, after the answer to a request with this standing. Returns
    /// whether it will be notified of its grant; nothing if it is not the line's claim any more.
    #[must_use]
    pub(crate) fn note_queued(
        &self,
        lease: LeaseId,
        since: u64,
        standing: Standing,
        hearing: u64,
    ) -> Option<bool> {
        let mut shard = self.queues.shard(self.key);
        let line = shard.lines.get_mut(self.key);
        let claim = line.and_then(|line| line.claim.as_mut());
        let claim = claim.filter(|claim| claim.lease == lease)?;
        (claim.since, claim.asked, claim.heard_by) = (Some(since), false, hearing);
        // The request found it in the queue, so a grant that was heard of before was forged. A later one may be true.
        claim.was_granted = claim.granted.is_some();
        claim.notified = match standing {
            Standing::Kept { notified } => claim.notified || notified,
            joined => !joined.polls(),
        };
        Some(claim.notified)
    }

    /// Forgets the line's claim of `lease`, which is missing from the queue of Redis. If its turn may have come, and
    /// its answer too late, the next claim joins in front. Returns the connection that should have notified it of
    /// its turn, if one should: see `Store::hearing`.
    pub(crate) fn fell_out(&self, lease: LeaseId) -> Option<u64> {
        let mut shard = self.queues.shard(self.key);
        let line = shard.lines.get_mut(self.key)?;
        let claim = line.claim.take_if(|claim| claim.lease == lease)?;
        shard.abandoned.insert(lease);
        let line = shard.lines.get_mut(self.key)?;
        let relied_on = claim.notified && !claim.was_granted;
        let since = claim.since.or(line.since);
        line.since = if relied_on {
            since
        } else {
            since.map(in_front)
        };
        relied_on.then_some(claim.heard_by)
    }

    /// Notes that the key of the line's claim is watched.
    pub(crate) fn note_watched(&self) {
        let mut shard = self.queues.shard(self.key);
        let line = shard.lines.get_mut(self.key);
        if let Some(claim) = line.and_then(|line| line.claim.as_mut()) {
            claim.watches = true;
        }
    }

    /// Sleeps until woken or cancelled, but not past `until`.
    pub(crate) fn wait(&self, until: Moment) -> Woken {
        let cancel = self.cancel.as_ref().map(|(cancel, rung)| (*cancel, rung));
        self.waiter.sleep(until, &self.queues.clock, cancel)
    }

    /// Leaves the line with the lock, which Redis has granted. Returns what has to be given back: a
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
        if let Some(line) = shard.lines.get_mut(self.key) {
            line.waiters.retain(|one| !Arc::ptr_eq(one, &self.waiter));
            line.claim.take_if(|claim| claim.lease == lease.terms().id);
            line.since = None;
            forced = line.forced.take();
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
        let forced = forced.filter(|(start, _)| *start == lease.terms().id.start());
        (handed, forced.map(|(_, by)| by))
    }

    /// Leaves the line without the lock. Returns what has to be given back: a lease that was handed
    /// to it meanwhile, or what was asked for on behalf of a line that has nobody left.
    pub(crate) fn leave(mut self) -> (Option<Arc<Lease>>, Option<Claim>) {
        self.left = true;
        self.quit(false)
    }

    fn quit(&self, panics: bool) -> (Option<Arc<Lease>>, Option<Claim>) {
        let mut shard = self.queues.shard(self.key);
        let handed = self.handed();
        let Some(line) = shard.lines.get_mut(self.key) else {
            return (handed, None);
        };
        let was_first = line.is_first(&self.waiter);
        line.waiters.retain(|one| !Arc::ptr_eq(one, &self.waiter));
        if was_first {
            if panics && let Some(claim) = &mut line.claim {
                // There will be no answer.
                claim.asked = false;
            }
            // A wake-up that came for the leaving waiter is for the next one.
            line.wake();
        }
        let abandoned = if line.waiters.is_empty() {
            line.abandon()
        } else {
            None
        };
        if let Some(claim) = &abandoned {
            shard.abandoned.insert(claim.lease);
        }
        shard.tidy(self.key);
        (handed, abandoned)
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        if !self.left {
            self.quit(true);
        }
    }
}

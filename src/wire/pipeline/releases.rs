//! A first-in, first-out queue of releases that no caller waits for. An index by key finds the releases that have to be
//! written before a request of the same key.
//!
//! An outage can leave a million releases. So a release takes only 72 bytes beside its key, and 2 to 4 bytes in the
//! index. When the queue grows, only the index is copied.

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests;

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::mem;
use std::time::Duration;

use crate::command::{Held, Mode, Release};
use crate::config::key::Key;
use crate::util::clock::MonotonicTime;
use crate::util::id::LeaseId;

/// The greatest length of a release on the wire, without its key and the name of the key's queue, in bytes.
const BESIDE_KEYS: usize = 192;

/// The number of slots that are allocated together.
const CHUNK: usize = if cfg!(all(test, shuttle)) { 2 } else { 128 };
const FEWEST_BUCKETS: usize = 63;

/// How redirects have brought a request to this node of a Cluster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Route {
    /// Whether the request was redirected with `ASK`, so that `ASKING` goes before its call.
    pub is_asking: bool,
    /// How many nodes have redirected the release since its last pause.
    pub hops: u8,
    /// Whether a copy of this undo is queued at the node that serves the slot now.
    pub is_copied: bool,
}

impl Route {
    /// The route of a request that was redirected with `ASK`.
    pub const ASKING: Self = Self {
        is_asking: true,
        hops: 0,
        is_copied: false,
    };

    /// The route in one byte.
    pub fn pack(self) -> u8 {
        let hops = self.hops.min(0x3f);
        u8::from(self.is_asking) << 7 | u8::from(self.is_copied) << 6 | hops
    }

    pub fn unpack(packed: u8) -> Self {
        Self {
            is_asking: packed & 0x80 != 0,
            is_copied: packed & 0x40 != 0,
            hops: packed & 0x3f,
        }
    }
}

/// A queued release that callers do not wait for, with the state of its attempts.
#[derive(Clone)]
pub struct QueuedRelease {
    pub release: Release,
    /// When a repeat is due.
    pub due: MonotonicTime,
    pub attempts: u32,
    pub is_undo: bool,
    /// Whether the release was reported as late.
    pub reported_late: bool,
    pub route: Route,
}

/// The greatest length of a release of `key` on the wire, in bytes.
fn release_bytes(key: &Key) -> usize {
    2 * key.in_redis().len() + BESIDE_KEYS
}

impl QueuedRelease {
    /// A release that was not tried yet.
    pub fn new(release: Release) -> Self {
        Self {
            due: release.until,
            release,
            attempts: 0,
            is_undo: false,
            reported_late: false,
            route: Route::default(),
        }
    }

    /// Whether to write the release. The first attempt is always written; later attempts only until the ttl has ended.
    pub fn is_wanted(&self, now: MonotonicTime) -> bool {
        self.attempts == 0 || now < self.release.until
    }

    /// The greatest length of the release on the wire, in bytes. The release contains the key and the lease id. If the
    /// lease may be queued, the release also contains the queue's name, the ttl of the queue entry and the holder id.
    pub fn bytes(&self) -> usize {
        release_bytes(&self.release.key)
    }
}

/// A slot of the queue: a packed release, and its link in the index. A slot without a key is empty, because its release
/// was taken.
struct PackedRelease {
    key: Option<Key>,
    lease: LeaseId,
    until: MonotonicTime,
    /// The end of the lease's validity, if a guard held the lease and no attempt was made yet: such a release is due at
    /// once. Otherwise the time at which the release is due.
    time: MonotonicTime,
    /// The fencing token, if a guard held the lease. Otherwise one more than the ttl of the lease's queue entry in ms,
    /// or zero if the lease has no entry.
    detail: u64,
    /// The distance in slots to the previous slot of its bucket; zero if there is none.
    back: u32,
    origin: Origin,
    reported_late: bool,
    attempts: u8,
    /// A packed [`Route`].
    route: u8,
}

/// The kind of lease that a release ends.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Origin {
    /// A guard held the lease.
    Held,
    /// A guard held the lease, and the key's value does not contain its token.
    HeldWithoutToken,
    /// A guard held the lease, and other clients may be queued for its key.
    HeldBeforeOthers,
    /// A guard did not hold the lease.
    Unheld,
    /// A late request may still set the key of the lease.
    Undo,
}

impl PackedRelease {
    fn pack(queued: QueuedRelease, back: u32) -> Self {
        let release = queued.release;
        Self {
            key: Some(release.key),
            lease: release.lease,
            until: release.until,
            time: match release.held {
                Some(held) if queued.attempts == 0 => held.valid_until,
                _ => queued.due,
            },
            detail: match (release.held, release.queued) {
                (Some(held), _) => held.token,
                (None, Some(ttl)) => u64::try_from(ttl.as_millis()).map_or(0, |ms| ms + 1),
                (None, None) => 0,
            },
            back,
            origin: match release.held {
                Some(held) if held.others_queued => Origin::HeldBeforeOthers,
                Some(held) if !held.is_token_in_value => Origin::HeldWithoutToken,
                Some(_) => Origin::Held,
                None if queued.is_undo => Origin::Undo,
                None => Origin::Unheld,
            },
            reported_late: queued.reported_late,
            attempts: u8::try_from(queued.attempts).unwrap_or(u8::MAX),
            route: queued.route.pack(),
        }
    }

    fn is_held(&self) -> bool {
        matches!(
            self.origin,
            Origin::Held | Origin::HeldWithoutToken | Origin::HeldBeforeOthers
        )
    }

    /// When a repeat is due. First attempts are not in queues of repeats.
    fn due(&self) -> MonotonicTime {
        if self.is_held() && self.attempts == 0 {
            self.until
        } else {
            self.time
        }
    }

    fn take(&mut self) -> Option<QueuedRelease> {
        let is_queued = !self.is_held() && self.detail > 0;
        let due = self.due();
        let release = Release {
            key: self.key.take()?,
            lease: self.lease,
            // `complete` sets the mode and the `min_hold` of the few releases that have others.
            mode: Mode::Exclusive,
            min_hold: Duration::ZERO,
            until: self.until,
            held: self.is_held().then_some(Held {
                token: self.detail,
                // If waiters are queued, the key's value ends with a mark, so a comparison with the whole value fails
                // in any case.
                is_token_in_value: self.origin == Origin::Held,
                others_queued: self.origin == Origin::HeldBeforeOthers,
                // The reply to a repeat shows no loss: an earlier attempt may have been carried out.
                valid_until: self.time,
            }),
            queued: is_queued.then(|| Duration::from_millis(self.detail - 1)),
        };
        Some(QueuedRelease {
            release,
            due,
            attempts: u32::from(self.attempts),
            is_undo: self.origin == Origin::Undo,
            reported_late: self.reported_late,
            route: Route::unpack(self.route),
        })
    }
}

/// The queue, with its index.
#[derive(Default)]
pub struct Releases {
    /// The slots. All chunks but the last are full.
    chunks: VecDeque<Vec<PackedRelease>>,
    /// How many slots at the front of the first chunk are no longer in use.
    gone: usize,
    /// How many slots are in use, including empty ones.
    len: usize,
    /// How many slots hold a release.
    count: usize,
    /// How many of these releases have failed before.
    failed: usize,
    /// The number of the next slot. Numbers wrap around. A bucket whose number is not in use has no slot.
    next: u32,
    /// The newest slot in each bucket. A key's hash chooses its bucket.
    buckets: Vec<u32>,
    /// An empty chunk for later use.
    spare: Option<Vec<PackedRelease>>,
    /// The parts of a few releases that do not fit into a slot.
    special: HashMap<LeaseId, Special>,
}

/// The mode of a lease that is not exclusive, or a `min_hold`.
struct Special {
    mode: Mode,
    min_hold: Duration,
    /// How many slots have a release of the lease.
    slots: u32,
}

/// Gives a release from a slot its mode and its `min_hold`.
fn complete(special: &mut HashMap<LeaseId, Special>, release: &mut Release) {
    if special.is_empty() {
        return;
    }
    if let Entry::Occupied(mut found) = special.entry(release.lease) {
        let one = found.get_mut();
        (release.mode, release.min_hold) = (one.mode, one.min_hold);
        one.slots -= 1;
        if one.slots == 0 {
            found.remove();
        }
    }
}

impl Releases {
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// How many releases are queued.
    pub fn count(&self) -> usize {
        self.count
    }

    /// How many releases have failed before.
    pub fn failed(&self) -> usize {
        self.failed
    }

    pub fn push(&mut self, release: QueuedRelease) {
        if self.len >= 2 * self.buckets.len() {
            self.grow_index();
        }
        let bucket = release.release.key.shard(self.buckets.len());
        let back = self.distance(self.buckets[bucket]).unwrap_or(0);
        self.buckets[bucket] = self.next;
        self.count += 1;
        self.failed += usize::from(release.attempts > 0);
        let is_full = |chunk: &Vec<PackedRelease>| chunk.len() == CHUNK;
        if self.chunks.back().is_none_or(is_full) {
            let spare = self.spare.take();
            let chunk = spare.unwrap_or_else(|| Vec::with_capacity(CHUNK));
            self.chunks.push_back(chunk);
        }
        if !release.release.is_usual() {
            let release = &release.release;
            let special = self.special.entry(release.lease);
            let special = special.or_insert(Special {
                mode: release.mode,
                min_hold: release.min_hold,
                slots: 0,
            });
            special.slots += 1;
        }
        let chunk = self.chunks.back_mut().expect("it was just made");
        chunk.push(PackedRelease::pack(release, back));
        self.len += 1;
        self.next = self.next.wrapping_add(1);
    }

    pub fn pop(&mut self) -> Option<QueuedRelease> {
        self.pop_if(|_| true)
    }

    /// Takes the first release, if it is due.
    pub fn pop_due(&mut self, now: MonotonicTime) -> Option<QueuedRelease> {
        self.pop_if(|first| first.due() <= now)
    }

    /// Takes the first release, if it takes at most this many bytes on the wire.
    pub fn pop_within(&mut self, bytes: usize) -> Option<QueuedRelease> {
        self.pop_if(|first| {
            let key = first.key.as_ref();
            key.is_some_and(|key| release_bytes(key) <= bytes)
        })
    }

    /// When the first release is due.
    pub fn first_due(&self) -> Option<MonotonicTime> {
        let mut slots = self.slots();
        slots
            .find(|slot| slot.key.is_some())
            .map(PackedRelease::due)
    }

    fn pop_if(&mut self, wanted: impl Fn(&PackedRelease) -> bool) -> Option<QueuedRelease> {
        while self.count > 0 {
            let slot = &mut self.chunks[0][self.gone];
            if slot.key.is_some() && !wanted(slot) {
                return None;
            }
            let release = slot.take();
            self.gone += 1;
            self.len -= 1;
            if self.gone == CHUNK {
                self.gone = 0;
                let used = self.chunks.pop_front();
                self.keep(used);
            }
            if let Some(release) = release {
                return Some(self.taken(release));
            }
        }
        None
    }

    /// Takes the newest release of `key`.
    pub fn take_of(&mut self, key: &Key) -> Option<QueuedRelease> {
        if self.count == 0 {
            return None;
        }
        let newest = self.buckets[key.shard(self.buckets.len())];
        let mut next = self.distance(newest);
        while let Some(distance) = next {
            let slot = self.slot(distance);
            if slot.key.as_ref() == Some(key) {
                let release = slot.take()?;
                return Some(self.taken(release));
            }
            let before = distance.saturating_add(slot.back);
            let is_used = slot.back > 0 && before as usize <= self.len;
            next = is_used.then_some(before);
        }
        None
    }

    /// Calls `change` for each release. If `change` returns true, takes the release out and passes it to `take`.
    pub fn sweep(
        &mut self,
        mut change: impl FnMut(&mut Swept<'_>) -> bool,
        mut take: impl FnMut(QueuedRelease),
    ) {
        let mut gone = self.gone;
        for chunk in &mut self.chunks {
            for slot in &mut chunk[mem::take(&mut gone)..] {
                let held = slot.is_held().then_some(slot.detail);
                let Some(key) = &slot.key else { continue };
                let before = slot.attempts;
                let is_over = change(&mut Swept {
                    key,
                    is_copied: Route::unpack(slot.route).is_copied,
                    until: slot.until,
                    held,
                    attempts: &mut slot.attempts,
                    reported_late: &mut slot.reported_late,
                });
                self.failed += usize::from(before == 0 && slot.attempts > 0);
                if is_over && let Some(mut release) = slot.take() {
                    complete(&mut self.special, &mut release.release);
                    self.count -= 1;
                    self.failed -= usize::from(release.attempts > 0);
                    take(release);
                }
            }
        }
        self.free_if_empty();
    }

    fn taken(&mut self, mut release: QueuedRelease) -> QueuedRelease {
        complete(&mut self.special, &mut release.release);
        self.count -= 1;
        self.failed -= usize::from(release.attempts > 0);
        self.free_if_empty();
        release
    }

    /// Frees the memory of a long queue once the queue is empty.
    fn free_if_empty(&mut self) {
        if self.count > 0 {
            return;
        }
        self.len = 0;
        self.gone = 0;
        let last = self.chunks.pop_back();
        self.keep(last);
        self.chunks.clear();
        if self.buckets.len() > FEWEST_BUCKETS {
            self.chunks = VecDeque::new();
            self.buckets = Vec::new();
        }
    }

    fn keep(&mut self, used: Option<Vec<PackedRelease>>) {
        if let Some(mut used) = used {
            used.clear();
            self.spare = Some(used);
        }
    }

    /// The distance from the next slot back to the slot `number`, if that slot is in use.
    fn distance(&self, number: u32) -> Option<u32> {
        let distance = self.next.wrapping_sub(number);
        (1..=self.len)
            .contains(&(distance as usize))
            .then_some(distance)
    }

    fn slot(&mut self, distance: u32) -> &mut PackedRelease {
        let place = self.gone + self.len - distance as usize;
        &mut self.chunks[place / CHUNK][place % CHUNK]
    }

    fn slots(&self) -> impl Iterator<Item = &PackedRelease> {
        self.chunks.iter().flatten().skip(self.gone)
    }

    /// Doubles the index.
    fn grow_index(&mut self) {
        let buckets = (2 * self.buckets.len() + 1).max(FEWEST_BUCKETS);
        let mut number = self.next.wrapping_sub(self.len as u32);
        // The number before that of the first slot is not in use, so it makes all buckets empty.
        self.buckets = vec![number.wrapping_sub(1); buckets];
        let (next, len) = (self.next, self.len as u32);
        let mut gone = self.gone;
        for chunk in &mut self.chunks {
            for slot in &mut chunk[mem::take(&mut gone)..] {
                slot.back = 0;
                if let Some(key) = &slot.key {
                    let newest = &mut self.buckets[key.shard(buckets)];
                    let is_used = (1..=len).contains(&next.wrapping_sub(*newest));
                    if is_used {
                        slot.back = number.wrapping_sub(*newest);
                    }
                    *newest = number;
                }
                number = number.wrapping_add(1);
            }
        }
    }
}

/// The parts of a release that a sweep reads and changes.
pub struct Swept<'a> {
    pub key: &'a Key,
    pub is_copied: bool,
    pub until: MonotonicTime,
    /// The fencing token, if a guard held the lease.
    pub held: Option<u64>,
    pub attempts: &'a mut u8,
    pub reported_late: &'a mut bool,
}

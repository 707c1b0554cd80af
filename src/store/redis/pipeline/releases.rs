//! Releases that nobody waits for, first in, first out, with an index by key: an awaited request takes the
//! earlier releases of its key along, and overtakes all others.
//!
//! An outage can leave a million of them. So each takes 72 bytes, and 2 to 4 bytes in the index, beyond its key;
//! and a growing queue copies only the index.

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests;

use std::collections::VecDeque;
use std::mem;
use std::time::Duration;

use crate::store::command::Held;
use crate::store::redis::pipeline::request::{Release, release_bytes};
use crate::util::clock::MonotonicTime;
use crate::util::id::LeaseId;
use crate::util::key::Key;

/// Slots that are allocated together.
const CHUNK: usize = if cfg!(all(test, shuttle)) { 2 } else { 128 };
const FEWEST_BUCKETS: usize = 63;

/// A release with its place in the index, packed. Without a key it is empty: its release was taken.
struct Slot {
    key: Option<Key>,
    lease: LeaseId,
    until: MonotonicTime,
    due: MonotonicTime,
    /// Of a lease that a guard held: its fencing token. Of any other: one more than the ttl in ms with which it may
    /// be queued; zero if it is not queued.
    detail: u64,
    /// The distance in slots to the previous slot of its bucket; zero if there is none.
    back: u32,
    origin: Origin,
    began: bool,
    attempts: u8,
}

/// The origin of the lease that a release ends.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Origin {
    /// A guard held it.
    Held,
    /// A guard held it, and others may be queued for its key.
    HeldBeforeOthers,
    /// No guard ever held it.
    Unheld,
    /// An acquire that may still arrive may be granted it.
    Ghost,
}

impl Slot {
    fn pack(release: Release, back: u32) -> Self {
        Self {
            key: Some(release.key),
            lease: release.lease,
            until: release.until,
            due: release.due,
            detail: match (release.held, release.queued) {
                (Some(held), _) => held.token,
                (None, Some(ttl)) => u64::try_from(ttl.as_millis()).map_or(0, |ms| ms + 1),
                (None, None) => 0,
            },
            back,
            origin: match release.held {
                Some(held) if held.others_queued => Origin::HeldBeforeOthers,
                Some(_) => Origin::Held,
                None if release.is_undo => Origin::Ghost,
                None => Origin::Unheld,
            },
            began: release.began,
            attempts: u8::try_from(release.attempts).unwrap_or(u8::MAX),
        }
    }

    fn is_held(&self) -> bool {
        matches!(self.origin, Origin::Held | Origin::HeldBeforeOthers)
    }

    fn take(&mut self) -> Option<Release> {
        let is_queued = !self.is_held() && self.detail > 0;
        Some(Release {
            key: self.key.take()?,
            lease: self.lease,
            until: self.until,
            due: self.due,
            held: self.is_held().then_some(Held {
                token: self.detail,
                others_queued: self.origin == Origin::HeldBeforeOthers,
            }),
            queued: is_queued.then(|| Duration::from_millis(self.detail - 1)),
            attempts: u32::from(self.attempts),
            is_undo: self.origin == Origin::Ghost,
            began: self.began,
        })
    }
}

#[derive(Default)]
pub(super) struct Releases {
    /// All but the last are full.
    chunks: VecDeque<Vec<Slot>>,
    /// Slots at the front of the first chunk that are not in use any more.
    gone: usize,
    /// Slots in use, empty ones among them.
    len: usize,
    /// Slots that hold a release.
    count: usize,
    /// Of these, those that have failed before.
    failed: usize,
    /// The number of the next slot. Numbers wrap around; a number that is not in use stands for no slot.
    next: u32,
    /// By the key's hash: the newest slot of each bucket.
    buckets: Vec<u32>,
    /// An emptied chunk, for the next ones.
    spare: Option<Vec<Slot>>,
}

impl Releases {
    pub(super) fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// How many have failed before.
    pub(super) fn failed(&self) -> usize {
        self.failed
    }

    pub(super) fn push(&mut self, release: Release) {
        if self.len >= 2 * self.buckets.len() {
            self.grow_index();
        }
        let bucket = release.key.shard(self.buckets.len());
        let back = self.distance(self.buckets[bucket]).unwrap_or(0);
        self.buckets[bucket] = self.next;
        self.count += 1;
        self.failed += usize::from(release.attempts > 0);
        let is_full = |chunk: &Vec<Slot>| chunk.len() == CHUNK;
        if self.chunks.back().is_none_or(is_full) {
            let spare = self.spare.take();
            let chunk = spare.unwrap_or_else(|| Vec::with_capacity(CHUNK));
            self.chunks.push_back(chunk);
        }
        let chunk = self.chunks.back_mut().expect("it was just made");
        chunk.push(Slot::pack(release, back));
        self.len += 1;
        self.next = self.next.wrapping_add(1);
    }

    pub(super) fn pop(&mut self) -> Option<Release> {
        self.pop_if(|_| true)
    }

    /// The first one, if it is due.
    pub(super) fn pop_due(&mut self, now: MonotonicTime) -> Option<Release> {
        self.pop_if(|first| first.due <= now)
    }

    /// The first one, if it takes no more than so many bytes on the wire.
    pub(super) fn pop_within(&mut self, bytes: usize) -> Option<Release> {
        self.pop_if(|first| {
            let key = first.key.as_ref();
            key.is_some_and(|key| release_bytes(key) <= bytes)
        })
    }

    /// When the first one is due.
    pub(super) fn first_due(&self) -> Option<MonotonicTime> {
        let mut slots = self.slots();
        slots.find(|slot| slot.key.is_some()).map(|slot| slot.due)
    }

    fn pop_if(&mut self, wanted: impl Fn(&Slot) -> bool) -> Option<Release> {
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
                self.taken(&release);
                return Some(release);
            }
        }
        None
    }

    /// Takes the newest one of `key`.
    pub(super) fn take_of(&mut self, key: &Key) -> Option<Release> {
        if self.count == 0 {
            return None;
        }
        let newest = self.buckets[key.shard(self.buckets.len())];
        let mut next = self.distance(newest);
        while let Some(distance) = next {
            let slot = self.slot(distance);
            if slot.key.as_ref() == Some(key) {
                let release = slot.take()?;
                self.taken(&release);
                return Some(release);
            }
            let before = distance.saturating_add(slot.back);
            let is_used = slot.back > 0 && before as usize <= self.len;
            next = is_used.then_some(before);
        }
        None
    }

    /// Calls `change` for each release, and passes those for which it returns true to `take`.
    pub(super) fn sweep(
        &mut self,
        mut change: impl FnMut(&mut Swept<'_>) -> bool,
        mut take: impl FnMut(Release),
    ) {
        let mut gone = self.gone;
        for chunk in &mut self.chunks {
            for slot in &mut chunk[mem::take(&mut gone)..] {
                let mut held = slot.is_held().then_some(slot.detail);
                let Some(key) = &slot.key else { continue };
                let before = slot.attempts;
                let is_over = change(&mut Swept {
                    key,
                    until: slot.until,
                    held: &mut held,
                    attempts: &mut slot.attempts,
                    began: &mut slot.began,
                });
                if held.is_none() && slot.is_held() {
                    (slot.origin, slot.detail) = (Origin::Unheld, 0);
                }
                self.failed += usize::from(before == 0 && slot.attempts > 0);
                if is_over && let Some(release) = slot.take() {
                    self.count -= 1;
                    self.failed -= usize::from(release.attempts > 0);
                    take(release);
                }
            }
        }
        self.free_if_empty();
    }

    fn taken(&mut self, release: &Release) {
        self.count -= 1;
        self.failed -= usize::from(release.attempts > 0);
        self.free_if_empty();
    }

    /// Once the queue is empty, frees what a long one took from the heap.
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

    fn keep(&mut self, used: Option<Vec<Slot>>) {
        if let Some(mut used) = used {
            used.clear();
            self.spare = Some(used);
        }
    }

    /// The distance from the next slot back to the slot `number`, if that is in use.
    fn distance(&self, number: u32) -> Option<u32> {
        let distance = self.next.wrapping_sub(number);
        (1..=self.len)
            .contains(&(distance as usize))
            .then_some(distance)
    }

    fn slot(&mut self, distance: u32) -> &mut Slot {
        let place = self.gone + self.len - distance as usize;
        &mut self.chunks[place / CHUNK][place % CHUNK]
    }

    fn slots(&self) -> impl Iterator<Item = &Slot> {
        self.chunks.iter().flatten().skip(self.gone)
    }

    /// Doubles the index.
    fn grow_index(&mut self) {
        let buckets = (2 * self.buckets.len() + 1).max(FEWEST_BUCKETS);
        let mut number = self.next.wrapping_sub(self.len as u32);
        // A number that is not in use.
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

/// The parts of a release that a sweep may see and change.
pub(super) struct Swept<'a> {
    pub(super) key: &'a Key,
    pub(super) until: MonotonicTime,
    /// The fencing token of a lease that a guard held. Once this is taken, no event reports the release.
    pub(super) held: &'a mut Option<u64>,
    pub(super) attempts: &'a mut u8,
    pub(super) began: &'a mut bool,
}

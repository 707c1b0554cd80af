//! A hierarchical timer wheel: which values are due at a given tick.
//!
//! Pure: it never reads a clock, never does I/O, never runs code of its values.

use std::num::NonZeroU64;

// A deadline is read as eleven digits of six bits. An entry acquirer at the level of the highest digit
// in which its deadline differs from `now`, in the slot of its deadline's digit there:
//
//     level   slot width   acquirer here when the deadline is
//     0       1 tick       within the same 64 ticks as `now` (aligned, not "64 ticks away")
//     1       64 ticks     within the same 4,096 ticks
//     ..
//     10      2^60 ticks   anywhere: eleven levels span u64, so no level ever wraps around
//
// From this follows everything else:
// - All of a level is due before any of the next level, and its slots are due in ascending order.
//   The next slot is the lowest bit of the lowest level in use; nothing is searched.
// - A slot of level 0 holds one deadline. A higher slot is dealt out to lower levels when `now`
//   reaches its first tick, so an entry moves down at most ten times, however far `now` jumps.
// - Nobody can enter a lower slot for a deadline before its higher slot was dealt out: entries with
//   equal deadlines stay in insertion order.
// - An entry's slot follows from its deadline and `now` at any time: nodes need not remember it.

const BITS: u32 = 6;
const SLOTS: usize = 1 << BITS;
const LEVELS: usize = u64::BITS.div_ceil(BITS) as usize;
/// The list of entries that were too late when they came; the only one with mixed deadlines.
const OVERDUE: usize = LEVELS * SLOTS;
/// No node.
const NIL: u32 = u32::MAX;
/// In the place of the node before: this one is free.
const FREE: u32 = u32::MAX - 1;

/// Names one insertion, for ever: an id that has fired or was cancelled matches nothing again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TimerId {
    pub(crate) index: u32,
    pub(crate) generation: NonZeroU64,
}

/// 32 bytes for a pointer-sized `T`.
struct Node<T> {
    deadline: u64,
    /// Counts insertions of the whole wheel. As 64 bits cost no more than 32 here (alignment), it
    /// never comes round, and it orders entries by age.
    generation: NonZeroU64,
    previous: u32,
    /// The next in the slot, or the next free node.
    next: u32,
    /// Meaningless while the node is free.
    value: T,
}

#[derive(Clone, Copy)]
struct Slot {
    head: u32,
    tail: u32,
}

const EMPTY: Slot = Slot {
    head: NIL,
    tail: NIL,
};

/// Values, each due at a tick of the caller's time.
///
/// The wheel itself takes less than 6 KiB. Its nodes are reused and not given back: memory follows
/// the greatest number of entries that were ever in it at once.
pub(crate) struct Wheel<T> {
    now: u64,
    inserted: NonZeroU64,
    /// Not later than the earliest deadline in `OVERDUE`; meaningless while that is empty.
    overdue_since: u64,
    /// A bit for each slot that is in use, one word per level and one for `OVERDUE`.
    occupied: [u64; LEVELS + 1],
    slots: [Slot; OVERDUE + 1],
    nodes: Vec<Node<T>>,
    free: u32,
}

impl<T: Default> Wheel<T> {
    /// An empty wheel whose time is `now`.
    pub(crate) fn new(now: u64) -> Self {
        Self {
            now,
            inserted: NonZeroU64::MIN,
            overdue_since: 0,
            occupied: [0; LEVELS + 1],
            slots: [EMPTY; OVERDUE + 1],
            nodes: Vec::new(),
            free: NIL,
        }
    }

    /// Keeps `value` until `deadline`. One that is not after the wheel's time fires at the next
    /// advance.
    ///
    /// Constant time; allocates only when every node is in use.
    pub(crate) fn insert(&mut self, deadline: u64, value: T) -> TimerId {
        let generation = self.inserted;
        self.inserted = self.inserted.saturating_add(1);
        if deadline < self.now {
            let first = self.slots[OVERDUE].head == NIL;
            self.overdue_since = if first {
                deadline
            } else {
                deadline.min(self.overdue_since)
            };
        }
        let node = Node {
            deadline,
            generation,
            previous: NIL,
            next: NIL,
            value,
        };
        let index = self.free;
        let index = if index == NIL {
            self.grow(node)
        } else {
            let place = &mut self.nodes[index as usize];
            self.free = place.next;
            *place = node;
            index
        };
        self.link(index);
        TimerId { index, generation }
    }

    /// Takes the value back, or `None` when it has fired or was cancelled already.
    ///
    /// Constant time; never allocates.
    pub(crate) fn cancel(&mut self, id: TimerId) -> Option<T> {
        let node = self.nodes.get(id.index as usize)?;
        if node.generation != id.generation || node.is_free() {
            return None;
        }
        self.unlink(id.index);
        Some(self.release(id.index))
    }

    /// Moves every value whose deadline is not after `now` to the end of `due`, by deadline; those
    /// with equal deadlines in the order of their insertion.
    ///
    /// Time never goes back: with an earlier `now` the wheel keeps its own, and what is due by that
    /// fires. The cost follows the number of entries, never the length of the jump.
    pub(crate) fn advance(&mut self, now: u64, due: &mut Vec<T>) {
        let until = now.max(self.now);
        self.fire_overdue(due);
        while let Some((slot, start)) = self.next_slot()
            && start <= until
        {
            self.now = start;
            let mut index = self.detach(slot);
            while index != NIL {
                let next = self.nodes[index as usize].next;
                if slot < SLOTS {
                    due.push(self.release(index));
                } else {
                    self.link(index);
                }
                index = next;
            }
        }
        self.now = until;
    }

    /// When to call `advance` next: `None` when there is nothing to wait for, else a tick that is
    /// never later than the earliest deadline, and after the wheel's time unless something is
    /// already due.
    ///
    /// It may be earlier than the earliest deadline, namely where a slot begins. Advancing to each
    /// tick that is named here in turn fires that deadline within one step per level.
    pub(crate) fn next_wake(&self) -> Option<u64> {
        if self.slots[OVERDUE].head != NIL {
            return Some(self.overdue_since);
        }
        self.next_slot().map(|(_, start)| start)
    }

    /// How many values wait. Counts them one by one: for tests.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.nodes.iter().filter(|node| !node.is_free()).count()
    }

    /// Whether no value acquirer.
    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The slot that is due first, and its first tick; late entries aside.
    fn next_slot(&self) -> Option<(usize, u64)> {
        let level = self.occupied[..LEVELS].iter().position(|&bits| bits != 0)?;
        let digit = self.occupied[level].trailing_zeros();
        let shift = level as u32 * BITS;
        // Two shifts, as one by 66 at the top level would overflow.
        let above = self.now & (u64::MAX << shift << BITS);
        Some((
            level * SLOTS + digit as usize,
            above | u64::from(digit) << shift,
        ))
    }

    fn slot_of(&self, deadline: u64) -> usize {
        if deadline < self.now {
            return OVERDUE;
        }
        // The lowest bit changes no level, and makes "due now" a matter of level 0.
        let level = ((deadline ^ self.now) | 1).ilog2() / BITS;
        let digit = (deadline >> (level * BITS)) as usize % SLOTS;
        level as usize * SLOTS + digit
    }

    /// Appends a node to the slot of its deadline.
    fn link(&mut self, index: u32) {
        let slot = self.slot_of(self.nodes[index as usize].deadline);
        let tail = self.slots[slot].tail;
        let node = &mut self.nodes[index as usize];
        node.previous = tail;
        node.next = NIL;
        self.slots[slot].tail = index;
        if tail == NIL {
            self.slots[slot].head = index;
            self.occupied[slot / SLOTS] |= 1 << (slot % SLOTS);
        } else {
            self.nodes[tail as usize].next = index;
        }
    }

    /// Takes a node out of its slot.
    fn unlink(&mut self, index: u32) {
        let Node {
            deadline,
            previous,
            next,
            ..
        } = self.nodes[index as usize];
        let slot = self.slot_of(deadline);
        if previous == NIL {
            self.slots[slot].head = next;
        } else {
            self.nodes[previous as usize].next = next;
        }
        if next == NIL {
            self.slots[slot].tail = previous;
        } else {
            self.nodes[next as usize].previous = previous;
        }
        if self.slots[slot].head == NIL {
            self.occupied[slot / SLOTS] &= !(1 << (slot % SLOTS));
        }
    }

    /// Empties a slot; its nodes are still chained from the one that is returned.
    fn detach(&mut self, slot: usize) -> u32 {
        self.occupied[slot / SLOTS] &= !(1 << (slot % SLOTS));
        std::mem::replace(&mut self.slots[slot], EMPTY).head
    }

    /// Late entries come in any order, and before all others: none of those has a deadline before
    /// the wheel's time.
    fn fire_overdue(&mut self, due: &mut Vec<T>) {
        let mut late = Vec::new();
        let mut index = self.detach(OVERDUE);
        while index != NIL {
            let node = &self.nodes[index as usize];
            late.push((node.deadline, node.generation, index));
            index = node.next;
        }
        late.sort_unstable();
        for (_, _, index) in late {
            due.push(self.release(index));
        }
    }

    /// Frees a node that is in no slot.
    fn release(&mut self, index: u32) -> T {
        let node = &mut self.nodes[index as usize];
        node.previous = FREE;
        node.next = self.free;
        self.free = index;
        std::mem::take(&mut node.value)
    }

    #[cold]
    fn grow(&mut self, node: Node<T>) -> u32 {
        let index = u32::try_from(self.nodes.len()).unwrap_or(NIL);
        assert!(
            index < FREE,
            "a wheel holds fewer than {FREE} entries at once"
        );
        self.nodes.push(node);
        index
    }
}

impl<T> Node<T> {
    fn is_free(&self) -> bool {
        self.previous == FREE
    }
}

#[cfg(test)]
mod tests;

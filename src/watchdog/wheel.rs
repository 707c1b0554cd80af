//! A hierarchical timer wheel: holds values with deadlines, and returns the values that are due at a given tick.
//!
//! The wheel is pure: it reads no clock, does no I/O and runs no code of its values.

use std::num::NonZeroU64;

// A deadline has eleven digits of six bits each. The highest digit in which an entry's deadline differs from `now`
// gives its level. The value of that digit gives its slot:
//
//     level   slot width   holds entries whose deadline is
//     0       1 tick       within the same 64 ticks as `now` (aligned, not "64 ticks away")
//     1       64 ticks     within the same 4,096 ticks
//     ..
//     10      2^60 ticks   anywhere: eleven levels span u64, so no level ever wraps around
//
// This has four consequences:
// - All entries of a level are due before those of the next level, and the slots of one level are due in ascending
//   order. So the lowest bit of the lowest level in use gives the next slot, without a search.
// - A slot of level 0 holds one deadline. Entries of a higher slot move to lower levels when `now` reaches the slot's
//   first tick, so an entry moves at most ten times, however far `now` jumps.
// - An entry gets into a lower slot only after all entries of the higher slot have moved there, so entries with equal
//   deadlines stay in insertion order.
// - An entry's slot follows from its deadline and `now`, so cells do not store it.

const BITS: u32 = 6;
const SLOTS: usize = 1 << BITS;
const LEVELS: usize = u64::BITS.div_ceil(BITS) as usize;
/// The slot of entries whose deadline had passed when they were inserted. In any other slot, entries that fire together
/// have the same deadline.
const OVERDUE: usize = LEVELS * SLOTS;
/// Stands for a missing index.
const NIL: u32 = u32::MAX;
/// The value of `Cell::previous` in a free cell.
const FREE: u32 = u32::MAX - 1;

/// The id of one insertion. It is never used again, so the id of a timer that fired or was cancelled stays invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimerId {
    pub index: u32,
    pub generation: NonZeroU64,
}

/// An entry, or a free place for an entry. Takes 32 bytes for a pointer-sized `T`.
struct Cell<T> {
    deadline: u64,
    /// The number of the insertion, which orders entries by age. It has 64 bits, so it never overflows. (32 bits would
    /// save no memory, because of the alignment.)
    generation: NonZeroU64,
    previous: u32,
    /// The next cell in the slot, or the next free cell.
    next: u32,
    /// Has no meaning while the cell is free.
    value: T,
}

#[derive(Clone, Copy)]
struct Bucket {
    head: u32,
    tail: u32,
}

const EMPTY: Bucket = Bucket {
    head: NIL,
    tail: NIL,
};

/// Values, each due at a tick of the caller's time.
///
/// The wheel takes less than 6 KiB, and each cell 32 bytes. Cells are reused but never freed, so the memory follows the
/// greatest number of entries at one time.
pub struct Wheel<T> {
    now: u64,
    inserted: NonZeroU64,
    /// The earliest deadline in `OVERDUE`, or an earlier tick. Has no meaning while that slot is empty.
    overdue_since: u64,
    /// The slots that are in use, as a bit for each slot. The array has a word for each level, and a last word for
    /// `OVERDUE`.
    occupied: [u64; LEVELS + 1],
    slots: [Bucket; OVERDUE + 1],
    cells: Vec<Cell<T>>,
    free: u32,
}

impl<T: Default> Wheel<T> {
    /// An empty wheel whose time is `now`.
    pub fn new(now: u64) -> Self {
        Self {
            now,
            inserted: NonZeroU64::MIN,
            overdue_since: 0,
            occupied: [0; LEVELS + 1],
            slots: [EMPTY; OVERDUE + 1],
            cells: Vec::new(),
            free: NIL,
        }
    }

    /// Adds `value`, which fires at `deadline`, or at the next `advance` if `deadline` is not after the wheel's time.
    ///
    /// Takes constant time, and allocates only if every cell is in use.
    pub fn insert(&mut self, deadline: u64, value: T) -> TimerId {
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
        let cell = Cell {
            deadline,
            generation,
            previous: NIL,
            next: NIL,
            value,
        };
        let index = self.free;
        let index = if index == NIL {
            self.grow(cell)
        } else {
            let free = &mut self.cells[index as usize];
            self.free = free.next;
            *free = cell;
            index
        };
        self.link(index);
        TimerId { index, generation }
    }

    /// Removes and returns the value; `None` if the value has fired or was cancelled before.
    ///
    /// Takes constant time, and never allocates.
    pub fn cancel(&mut self, id: TimerId) -> Option<T> {
        let cell = self.cells.get(id.index as usize)?;
        if cell.generation != id.generation || cell.is_free() {
            return None;
        }
        self.unlink(id.index);
        Some(self.free_node(id.index))
    }

    /// Appends every value whose deadline is not after `now` to `due`, ordered by deadline, then by insertion.
    ///
    /// The wheel's time never goes back: an earlier `now` counts as the wheel's time. The cost depends on the number of
    /// entries, not on the length of the jump.
    pub fn advance(&mut self, now: u64, due: &mut Vec<T>) {
        let until = now.max(self.now);
        self.fire_overdue(due);
        while let Some((slot, start)) = self.next_slot()
            && start <= until
        {
            self.now = start;
            let mut index = self.detach(slot);
            while index != NIL {
                let next = self.cells[index as usize].next;
                if slot < SLOTS {
                    due.push(self.free_node(index));
                } else {
                    self.link(index);
                }
                index = next;
            }
        }
        self.now = until;
    }

    /// The tick at which to call `advance` next; `None` if the wheel is empty. The tick is never later than the
    /// earliest deadline. It is later than the wheel's time, unless an entry is due.
    ///
    /// If the tick is before the earliest deadline, a slot begins at the tick. A caller that advances from tick to tick
    /// reaches the earliest deadline in at most one step per level.
    pub fn next_wake(&self) -> Option<u64> {
        if self.slots[OVERDUE].head != NIL {
            return Some(self.overdue_since);
        }
        self.next_slot().map(|(_, start)| start)
    }

    /// The number of values, counted one by one.
    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.cells.iter().filter(|cell| !cell.is_free()).count()
    }

    /// Whether the wheel has no values.
    #[cfg(test)]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The slot that is due first, and its first tick. Ignores `OVERDUE`.
    fn next_slot(&self) -> Option<(usize, u64)> {
        let level = self.occupied[..LEVELS].iter().position(|&bits| bits != 0)?;
        let digit = self.occupied[level].trailing_zeros();
        let shift = level as u32 * BITS;
        // Shifts twice, because at the top level one shift would be by 66 bits and overflow.
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
        // `| 1` gives level 0 for a deadline of now, and changes no other level.
        let level = ((deadline ^ self.now) | 1).ilog2() / BITS;
        let digit = (deadline >> (level * BITS)) as usize % SLOTS;
        level as usize * SLOTS + digit
    }

    /// Appends a cell to the slot of its deadline.
    fn link(&mut self, index: u32) {
        let slot = self.slot_of(self.cells[index as usize].deadline);
        let tail = self.slots[slot].tail;
        let cell = &mut self.cells[index as usize];
        cell.previous = tail;
        cell.next = NIL;
        self.slots[slot].tail = index;
        if tail == NIL {
            self.slots[slot].head = index;
            self.occupied[slot / SLOTS] |= 1 << (slot % SLOTS);
        } else {
            self.cells[tail as usize].next = index;
        }
    }

    /// Removes a cell from its slot.
    fn unlink(&mut self, index: u32) {
        let Cell {
            deadline,
            previous,
            next,
            ..
        } = self.cells[index as usize];
        let slot = self.slot_of(deadline);
        if previous == NIL {
            self.slots[slot].head = next;
        } else {
            self.cells[previous as usize].next = next;
        }
        if next == NIL {
            self.slots[slot].tail = previous;
        } else {
            self.cells[next as usize].previous = previous;
        }
        if self.slots[slot].head == NIL {
            self.occupied[slot / SLOTS] &= !(1 << (slot % SLOTS));
        }
    }

    /// Empties a slot, and returns the first cell of its chain.
    fn detach(&mut self, slot: usize) -> u32 {
        self.occupied[slot / SLOTS] &= !(1 << (slot % SLOTS));
        std::mem::replace(&mut self.slots[slot], EMPTY).head
    }

    /// Appends the overdue values to `due`, ordered by deadline. All other entries have later deadlines.
    fn fire_overdue(&mut self, due: &mut Vec<T>) {
        let mut overdue = Vec::new();
        let mut index = self.detach(OVERDUE);
        while index != NIL {
            let cell = &self.cells[index as usize];
            overdue.push((cell.deadline, cell.generation, index));
            index = cell.next;
        }
        overdue.sort_unstable();
        for (_, _, index) in overdue {
            due.push(self.free_node(index));
        }
    }

    /// Frees a cell that is in no slot, and returns its value.
    fn free_node(&mut self, index: u32) -> T {
        let cell = &mut self.cells[index as usize];
        cell.previous = FREE;
        cell.next = self.free;
        self.free = index;
        std::mem::take(&mut cell.value)
    }

    #[cold]
    fn grow(&mut self, cell: Cell<T>) -> u32 {
        let index = u32::try_from(self.cells.len()).unwrap_or(NIL);
        assert!(
            index < FREE,
            "a wheel holds fewer than {FREE} entries at once"
        );
        self.cells.push(cell);
        index
    }
}

impl<T> Cell<T> {
    fn is_free(&self) -> bool {
        self.previous == FREE
    }
}

#[cfg(test)]
mod tests;

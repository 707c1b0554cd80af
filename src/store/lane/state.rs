//! What a lane has to do: what waits to be written, in which order, and what becomes of what was not done.
//! Does none of it.

use crate::clock::Moment;
use crate::store::lane::queue::Queue;
use crate::store::link::Link;
use crate::store::pending::{Next, Pending};

#[derive(Default)]
pub(super) struct State {
    /// Somebody leads: the link is with them, and the queue is theirs to empty.
    pub(super) led: bool,
    pub(super) link: Option<Link>,
    pub(super) queue: Queue,
    pub(super) debts: Vec<Debt>,
}

/// A release to be written again at `due`, or as soon as there is a new connection.
pub(super) struct Debt {
    due: Moment,
    pending: Pending,
}

impl State {
    /// Moves debts that are due to the front of the queue: they are older than all that waits.
    pub(super) fn call_in_debts(&mut self, now: Moment) {
        for debt in self.debts.extract_if(.., |debt| debt.due <= now) {
            self.queue.push_front(debt.pending);
        }
    }

    /// Takes what is next to be written. Releases that failed before go along, whenever they are due,
    /// so that no later acquire overtakes them; with a flush, all that is owed.
    pub(super) fn next_batch(&mut self, at_a_time: usize, batch: &mut Vec<Pending>) {
        if self.queue.is_empty() {
            return;
        }
        let flushes = !self.debts.is_empty() && self.queue.has_flush();
        let along = |debt: &mut Debt| flushes || debt.pending.goes_along();
        let debts = self.debts.extract_if(.., along);
        batch.extend(debts.map(|debt| debt.pending));
        // Always some of the queue, however much is owed: what is refused again comes back.
        self.queue.take_first(at_a_time, batch);
    }

    pub(super) fn owes_releases(&self) -> bool {
        self.debts.iter().any(|debt| debt.pending.is_promised())
    }

    pub(super) fn settle(&mut self, next: Next) {
        match next {
            Next::Finished => {}
            Next::Again(pending) => self.queue.push_back(pending),
            Next::Owed(pending) => {
                let due = pending.due(Moment::now());
                self.debts.push(Debt { due, pending });
            }
        }
    }
}

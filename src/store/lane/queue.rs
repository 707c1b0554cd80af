//! What waits to be written on a lane, oldest first. Counts what callers wait for: that there is nobody
//! among a million releases is to be known without a look at each of them.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::key::Key;
use crate::store::call::{Call, Ticket};
use crate::store::command::Command;
use crate::store::pending::Pending;

#[derive(Default)]
pub(super) struct Queue {
    pendings: VecDeque<Pending>,
    tickets: usize,
}

impl Queue {
    pub(super) fn push_back(&mut self, pending: Pending) {
        self.tickets += usize::from(pending.ticket.is_some());
        self.pendings.push_back(pending);
    }

    pub(super) fn push_front(&mut self, pending: Pending) {
        self.tickets += usize::from(pending.ticket.is_some());
        self.pendings.push_front(pending);
    }

    /// Moves the first of them to `batch`, `most` at most.
    pub(super) fn take_first(&mut self, most: usize, batch: &mut Vec<Pending>) {
        for pending in self.pendings.drain(..most.min(self.pendings.len())) {
            self.tickets -= usize::from(pending.ticket.is_some());
            batch.push(pending);
        }
    }

    pub(super) fn take_all(&mut self) -> VecDeque<Pending> {
        std::mem::take(self).pendings
    }

    pub(super) fn is_empty(&self) -> bool {
        self.pendings.is_empty()
    }

    /// Whether somebody waits for a flush.
    pub(super) fn has_flush(&self) -> bool {
        self.tickets > 0 && self.pendings.iter().any(Pending::is_flush)
    }

    /// Whether one of the first `among` asks for `key`.
    pub(super) fn asks_for(&self, key: &Key, among: usize) -> bool {
        self.tickets > 0
            && self.pendings.iter().take(among).any(|pending| {
                matches!(&pending.command, Command::Acquire { key: asked, .. } if asked == key)
            })
    }

    /// The first caller that waits for something here.
    pub(super) fn first_caller(&self) -> Option<&Arc<Call>> {
        if self.tickets == 0 {
            return None;
        }
        let mut tickets = self.pendings.iter().filter_map(|p| p.ticket.as_ref());
        let first = tickets.find(|ticket| ticket.is_waited_for());
        first.map(Ticket::call)
    }

    #[cfg(test)]
    pub(super) fn iter(&self) -> impl ExactSizeIterator<Item = &Pending> {
        self.pendings.iter()
    }
}

impl Extend<Pending> for Queue {
    fn extend<I: IntoIterator<Item = Pending>>(&mut self, pendings: I) {
        pendings
            .into_iter()
            .for_each(|pending| self.push_back(pending));
    }
}

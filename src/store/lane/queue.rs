//! Requests that callers wait for, oldest first, until they are written.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::key::Key;
use crate::store::call::{Call, Ticket};
use crate::store::command::Command;
use crate::store::pending::Pending;

/// Bounded by the callers: each waits for those of one call.
#[derive(Default)]
pub(super) struct Queue {
    pendings: VecDeque<Pending>,
    /// Flushes, which are answered once nothing else is left to be written.
    flushes: VecDeque<Pending>,
}

impl Queue {
    pub(super) fn push_back(&mut self, pending: Pending) {
        if pending.is_flush() {
            self.flushes.push_back(pending);
        } else {
            self.pendings.push_back(pending);
        }
    }

    /// Takes the first `most` requests, without flushes.
    pub(super) fn take_first(&mut self, most: usize) -> impl Iterator<Item = Pending> {
        self.pendings.drain(..most.min(self.pendings.len()))
    }

    pub(super) fn take_flushes(&mut self) -> impl Iterator<Item = Pending> {
        self.flushes.drain(..)
    }

    pub(super) fn take_all(&mut self) -> impl Iterator<Item = Pending> + use<> {
        let Self { pendings, flushes } = std::mem::take(self);
        pendings.into_iter().chain(flushes)
    }

    /// Takes out the requests of `call`, except releases.
    pub(super) fn withdraw(&mut self, call: &Arc<Call>) -> Vec<Pending> {
        let is_its_own = |pending: &Pending| {
            let ticket = pending.ticket.as_ref();
            let is_release = matches!(pending.command, Command::Release { .. });
            !is_release && ticket.is_some_and(|ticket| Arc::ptr_eq(ticket.call(), call))
        };
        let (own, others): (Vec<_>, _) = std::mem::take(&mut self.pendings)
            .into_iter()
            .partition(is_its_own);
        self.pendings = VecDeque::from(others);
        own
    }

    pub(super) fn is_empty(&self) -> bool {
        self.pendings.is_empty() && self.flushes.is_empty()
    }

    /// Whether flushes are all that is left.
    pub(super) fn has_flushes_only(&self) -> bool {
        self.pendings.is_empty() && !self.flushes.is_empty()
    }

    /// Whether one of the first `among` asks for `key`.
    pub(super) fn asks_for(&self, key: &Key, among: usize) -> bool {
        self.pendings.iter().take(among).any(|pending| {
            matches!(&pending.command, Command::Acquire { key: asked, .. } if asked == key)
        })
    }

    /// The first caller that waits for something here.
    pub(super) fn first_caller(&self) -> Option<&Arc<Call>> {
        let all = self.pendings.iter().chain(&self.flushes);
        let mut tickets = all.filter_map(|pending| pending.ticket.as_ref());
        let first = tickets.find(|ticket| ticket.is_waited_for());
        first.map(Ticket::call)
    }

    #[cfg(test)]
    pub(super) fn iter(&self) -> impl Iterator<Item = &Pending> {
        self.pendings.iter().chain(&self.flushes)
    }
}

impl Extend<Pending> for Queue {
    fn extend<I: IntoIterator<Item = Pending>>(&mut self, pendings: I) {
        pendings
            .into_iter()
            .for_each(|pending| self.push_back(pending));
    }
}

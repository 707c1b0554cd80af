//! Requests that callers wait for, oldest first, until they are written.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::store::command::Command;
use crate::store::redis::pipeline::caller::{Call, Completion};
use crate::store::redis::pipeline::request::PendingRequest;
use crate::util::key::Key;

/// Bounded by the callers: each waits for those of one call.
#[derive(Default)]
pub(super) struct Queue {
    requests: VecDeque<PendingRequest>,
    /// Flushes, which are answered once nothing else is left to be written.
    flushes: VecDeque<PendingRequest>,
}

impl Queue {
    pub(super) fn push_back(&mut self, request: PendingRequest) {
        if request.is_flush() {
            self.flushes.push_back(request);
        } else {
            self.requests.push_back(request);
        }
    }

    /// Takes the first `most` requests, without flushes.
    pub(super) fn take_first(&mut self, most: usize) -> impl Iterator<Item = PendingRequest> {
        self.requests.drain(..most.min(self.requests.len()))
    }

    pub(super) fn take_flushes(&mut self) -> impl Iterator<Item = PendingRequest> {
        self.flushes.drain(..)
    }

    pub(super) fn take_all(&mut self) -> impl Iterator<Item = PendingRequest> + use<> {
        let Self { requests, flushes } = std::mem::take(self);
        requests.into_iter().chain(flushes)
    }

    /// Takes out the requests of `call`, except releases.
    pub(super) fn withdraw(&mut self, call: &Arc<Call>) -> Vec<PendingRequest> {
        let is_its_own = |request: &PendingRequest| {
            let completion = request.completion.as_ref();
            let is_release = matches!(request.command, Command::Release { .. });
            !is_release && completion.is_some_and(|completion| Arc::ptr_eq(completion.call(), call))
        };
        let (own, others): (Vec<_>, _) = std::mem::take(&mut self.requests)
            .into_iter()
            .partition(is_its_own);
        self.requests = VecDeque::from(others);
        own
    }

    pub(super) fn is_empty(&self) -> bool {
        self.requests.is_empty() && self.flushes.is_empty()
    }

    /// Whether flushes are all that is left.
    pub(super) fn has_flushes_only(&self) -> bool {
        self.requests.is_empty() && !self.flushes.is_empty()
    }

    /// Whether one of the first `among` asks for `key`.
    pub(super) fn asks_for(&self, key: &Key, among: usize) -> bool {
        self.requests.iter().take(among).any(|request| {
            matches!(&request.command, Command::Acquire { key: asked, .. } if asked == key)
        })
    }

    /// The first caller that waits for something here.
    pub(super) fn first_caller(&self) -> Option<&Arc<Call>> {
        let all = self.requests.iter().chain(&self.flushes);
        let mut completion = all.filter_map(|request| request.completion.as_ref());
        let first = completion.find(|completion| completion.is_waited_for());
        first.map(Completion::call)
    }

    #[cfg(test)]
    pub(super) fn iter(&self) -> impl Iterator<Item = &PendingRequest> {
        self.requests.iter().chain(&self.flushes)
    }
}

impl Extend<PendingRequest> for Queue {
    fn extend<I: IntoIterator<Item = PendingRequest>>(&mut self, requests: I) {
        requests
            .into_iter()
            .for_each(|request| self.push_back(request));
    }
}

//! The work of a pipeline: which requests wait to be written, in which order, and which are written again. Does no
//! I/O.

use std::sync::Arc;
use std::time::Duration;

use crate::error::Error;
use crate::store::late_release::{LateRelease, LateReleaseHook};
use crate::store::redis::pipeline::caller::Call;
use crate::store::redis::pipeline::connection::PipelinedConnection;
use crate::store::redis::pipeline::queue::Queue;
use crate::store::redis::pipeline::releases::{Releases, Swept};
use crate::store::redis::pipeline::request::{MOST_DOUBLINGS, Next, PendingRequest, Release};
use crate::util::clock::MonotonicTime;

/// Pause before the background tries to connect again; doubles with each attempt that fails.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// Least time between two sweeps of all releases: without it, each caller that finds no connection would cause one.
const BETWEEN_SWEEPS: Duration = Duration::from_millis(100);

pub(super) struct State {
    /// A thread leads: it has the connection, and takes the batches from the queues.
    pub(super) led: bool,
    pub(super) connection: Option<PipelinedConnection>,
    pub(super) awaited: Queue,
    /// The leader's batch, while it makes a connection.
    pub(super) unsent: Queue,
    /// Releases that nobody waits for, to be written as soon as there is a connection.
    posted: Releases,
    /// Releases that Redis has refused.
    refused: RetryQueues,
    /// Releases that are repeated in case their acquire arrives late.
    undo_repeats: RetryQueues,
    /// Told when a release is late, and how it ended.
    hook: Option<LateReleaseHook>,
    /// Failed attempts to connect since the last successful one.
    failures: u32,
    /// The background does not try to connect before this.
    connect_at: Option<MonotonicTime>,
    swept_at: Option<MonotonicTime>,
}

/// Releases that are written again after a pause. One queue for each length of pause, so that each queue is
/// sorted by the time at which its releases are due.
#[derive(Default)]
struct RetryQueues([Releases; MOST_DOUBLINGS as usize + 1]);

impl RetryQueues {
    fn push(&mut self, release: Release) {
        let doublings = release.attempts.min(MOST_DOUBLINGS);
        self.0[doublings as usize].push(release);
    }

    fn pop_due(&mut self, now: MonotonicTime) -> Option<Release> {
        self.0.iter_mut().find_map(|queue| queue.pop_due(now))
    }

    fn is_empty(&self) -> bool {
        self.0.iter().all(Releases::is_empty)
    }

    fn is_due(&self, now: MonotonicTime) -> bool {
        let mut first = self.0.iter().filter_map(Releases::first_due);
        first.any(|due| due <= now)
    }
}

impl State {
    pub(super) fn new(hook: Option<LateReleaseHook>) -> Self {
        Self {
            led: false,
            connection: None,
            awaited: Queue::default(),
            unsent: Queue::default(),
            posted: Releases::default(),
            refused: RetryQueues::default(),
            undo_repeats: RetryQueues::default(),
            hook,
            failures: 0,
            connect_at: None,
            swept_at: None,
        }
    }

    /// Queues requests that callers wait for. A flush makes all releases due at once.
    pub(super) fn ask(&mut self, requests: impl IntoIterator<Item = PendingRequest>) {
        for request in requests {
            if request.is_flush() {
                let repeats = self.refused.0.iter_mut().chain(&mut self.undo_repeats.0);
                for queue in repeats {
                    while let Some(release) = queue.pop() {
                        self.posted.push(release);
                    }
                }
            }
            self.awaited.push_back(request);
        }
    }

    /// Takes out what `call` asked for and nobody has written, but for releases.
    pub(super) fn withdraw(
        &mut self,
        call: &Arc<Call>,
    ) -> impl Iterator<Item = PendingRequest> + use<> {
        let unsent = self.unsent.withdraw(call);
        unsent.into_iter().chain(self.awaited.withdraw(call))
    }

    /// Queues a release that nobody waits for.
    pub(super) fn post(&mut self, release: Release) {
        self.posted.push(release);
    }

    pub(super) fn has_posted(&self) -> bool {
        !self.posted.is_empty()
    }

    /// Whether something can be written at once, or as soon as there is a connection.
    pub(super) fn is_ready(&self) -> bool {
        !self.awaited.is_empty() || self.has_posted()
    }

    /// Whether something waits to be written, due or not.
    pub(super) fn has_work(&self) -> bool {
        self.is_ready() || !self.refused.is_empty() || !self.undo_repeats.is_empty()
    }

    /// Whether the background has something to write at `now`.
    pub(super) fn is_due(&self, now: MonotonicTime) -> bool {
        let is_ready = self.is_ready() || self.refused.is_due(now) || self.undo_repeats.is_due(now);
        is_ready && self.may_connect(now)
    }

    /// Whether there is a connection, or the background may try to make one.
    pub(super) fn may_connect(&self, now: MonotonicTime) -> bool {
        self.connection.is_some() || self.connect_at.is_none_or(|at| at <= now)
    }

    /// Notes that there is a connection.
    pub(super) fn connected(&mut self) {
        self.failures = 0;
        self.connect_at = None;
    }

    /// Notes that a connection could not be made, or broke. After the first failure the next attempt may come at once.
    pub(super) fn back_off(&mut self, now: MonotonicTime) {
        let doublings = self.failures.checked_sub(1);
        self.failures = self.failures.saturating_add(1);
        self.connect_at = doublings.map(|doublings| {
            let pause = FIRST_PAUSE * (1 << doublings.min(8));
            now.after(pause.min(LONGEST_PAUSE))
        });
    }

    /// How many releases have failed and wait to be written again.
    pub(super) fn failed(&self) -> usize {
        let repeats = self.refused.0.iter().chain(&self.undo_repeats.0);
        self.posted.failed() + repeats.map(Releases::failed).sum::<usize>()
    }

    /// Whether Redis has refused releases, other than those repeated in case.
    pub(super) fn has_refused_releases(&self) -> bool {
        !self.refused.is_empty()
    }

    /// Takes the next batch: at most `at_a_time` awaited requests and as many releases. Releases of the requests'
    /// keys go before them, so that no acquire overtakes one; then come other releases, oldest first.
    pub(super) fn next_batch(&mut self, at_a_time: usize, batch: &mut Vec<PendingRequest>) {
        if !self.has_work() {
            return;
        }
        let now = MonotonicTime::now();
        let Self {
            awaited,
            posted,
            refused,
            undo_repeats,
            hook,
            ..
        } = self;
        let mut room = at_a_time;
        // A release whose ttl has ended is dropped, which reports it as given up.
        let take = |batch: &mut Vec<PendingRequest>, release: Release| {
            let is_wanted = release.is_wanted(now);
            let request = release.into_request(hook.as_ref());
            if is_wanted {
                batch.push(request);
            }
            is_wanted
        };
        for request in awaited.take_first(at_a_time) {
            if let Some(key) = request.command.key() {
                for queue in std::iter::once(&mut *posted).chain(&mut refused.0) {
                    while room > 0
                        && let Some(release) = queue.take_of(key)
                    {
                        room -= usize::from(take(batch, release));
                    }
                }
            }
            batch.push(request);
        }
        // At most half of the room is for repeats, so that they cannot keep posted releases from being written.
        let mut repeats = room.div_ceil(2);
        while repeats > 0
            && let Some(release) = refused.pop_due(now).or_else(|| undo_repeats.pop_due(now))
        {
            let taken = usize::from(take(batch, release));
            repeats -= taken;
            room -= taken;
        }
        while room > 0
            && let Some(release) = posted.pop()
        {
            room -= usize::from(take(batch, release));
        }
        if posted.is_empty() && awaited.has_flushes_only() {
            batch.extend(awaited.take_flushes());
        }
    }

    pub(super) fn apply(&mut self, next: Next) {
        match next {
            Next::Finished => {}
            Next::Again(request) if request.completion.is_some() => self.awaited.push_back(request),
            Next::Again(request) => {
                if let Some(release) = request.into_release(None) {
                    self.posted.push(release);
                }
            }
            Next::Later(request) => {
                let due = MonotonicTime::now().after(request.pause());
                let Some(release) = request.into_release(Some(due)) else {
                    return;
                };
                if release.is_undo {
                    self.undo_repeats.push(release);
                } else {
                    self.refused.push(release);
                }
            }
        }
    }

    /// No release can be written for now: tells the hook that each is late, once, and gives up those whose ttl
    /// has ended. Does nothing within [`BETWEEN_SWEEPS`] of the last call.
    pub(super) fn delay_all(&mut self, error: &Error, now: MonotonicTime) {
        let next = self.swept_at.map(|at| at.after(BETWEEN_SWEEPS));
        if next.is_some_and(|next| now < next) {
            return;
        }
        self.swept_at = Some(now);
        self.sweep(|release, hook| {
            // It counts as tried: such a release is given up at the end of its ttl (`Release::is_wanted`).
            *release.attempts = (*release.attempts).max(1);
            if let Some((hook, token)) = hook.zip(*release.held).filter(|_| !*release.began) {
                *release.began = true;
                hook(release.key, token, LateRelease::Delayed(error.clone()));
                hook(release.key, token, LateRelease::Queued);
            }
            now >= release.until
        });
    }

    /// The client ends: tells the hook that each late release was given up, and nothing more of it.
    pub(super) fn report_given_up_releases(&mut self) {
        self.sweep(|release, hook| {
            let told = release.held.take_if(|_| *release.began);
            if let Some((hook, token)) = hook.zip(told) {
                hook(release.key, token, LateRelease::Ended { confirmed: false });
            }
            false
        });
    }

    /// Calls `change` for each release, and gives up those for which it returns true.
    fn sweep(&mut self, mut change: impl FnMut(&mut Swept<'_>, Option<&LateReleaseHook>) -> bool) {
        let hook = self.hook.as_ref();
        let repeats = self.refused.0.iter_mut().chain(&mut self.undo_repeats.0);
        for queue in std::iter::once(&mut self.posted).chain(repeats) {
            queue.sweep(
                |release| change(release, hook),
                |given_up| drop(given_up.into_request(hook)),
            );
        }
    }
}

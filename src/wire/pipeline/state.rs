//! The state of a pipeline: its queues of requests and releases, their order, and the pauses before retries. Does no
//! I/O.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use crate::command::{Acquire, Command};
use crate::config::key::Key;
use crate::report::error::{Error, ErrorKind};
use crate::store::completion::Caller;
use crate::store::{LateRelease, Report, ReportedReleases, Reports};
use crate::util::clock::MonotonicTime;
use crate::wire::pipeline::connection::PipelinedConnection;
use crate::wire::pipeline::releases::{QueuedRelease, Releases, Swept};
use crate::wire::pipeline::request;
use crate::wire::pipeline::request::{MOST_DOUBLINGS, Next, PendingRequest};

/// The pause before the background tries to connect again. It doubles with each failed attempt.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);

/// A queue of awaited requests with fewer requests than this is not checked for callers that have left.
const FEWEST_TO_CHECK: usize = if cfg!(all(test, shuttle)) { 4 } else { 256 };

/// The least time between two sweeps of all releases. Otherwise each caller that fails to connect would cause a sweep.
const BETWEEN_SWEEPS: Duration = Duration::from_millis(100);

pub struct PipelineState {
    /// Whether a thread leads. The leader has the connection, and takes the batches from the queues.
    pub is_led: bool,
    pub connection: Option<PipelinedConnection>,
    pub awaited: AwaitedQueue,
    /// Until this time, the background leaves missing replies to a sender.
    pub sender_reads_until: Option<MonotonicTime>,
    /// The batch of a leader that is connecting.
    pub unsent: AwaitedQueue,
    /// Whether the leader has a connection.
    pub leader_is_connected: bool,
    /// Whether the client and its background have ended.
    pub has_ended: bool,
    /// Releases that callers do not wait for, to be written as soon as there is a connection.
    unawaited: Releases,
    /// Releases that Redis has refused, and confirmed releases that are repeated on a new connection (those without an
    /// attempt).
    refused: RetryQueues,
    /// Undos to be repeated, because late requests may still set their keys.
    undo_repeats: RetryQueues,
    /// The greatest number of releases in these three queues together.
    most_releases: usize,
    reports: Reports,
    /// The number of failed attempts to connect since the last successful attempt.
    failures: u32,
    /// The background does not connect before this time.
    connect_at: Option<MonotonicTime>,
    swept_at: Option<MonotonicTime>,
}

/// Releases that are repeated after a pause. Each length of pause has its own queue, so each queue is sorted by the
/// time at which its releases are due.
#[derive(Default)]
struct RetryQueues([Releases; MOST_DOUBLINGS as usize + 1]);

impl RetryQueues {
    fn push(&mut self, release: QueuedRelease) {
        let doublings = release.attempts.min(MOST_DOUBLINGS);
        self.0[doublings as usize].push(release);
    }

    fn pop_due(&mut self, now: MonotonicTime) -> Option<QueuedRelease> {
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

impl PipelineState {
    pub fn new(reports: Reports) -> Self {
        Self {
            is_led: false,
            connection: None,
            awaited: AwaitedQueue::default(),
            sender_reads_until: None,
            unsent: AwaitedQueue::default(),
            leader_is_connected: false,
            has_ended: false,
            unawaited: Releases::default(),
            refused: RetryQueues::default(),
            undo_repeats: RetryQueues::default(),
            most_releases: usize::MAX,
            reports,
            failures: 0,
            connect_at: None,
            swept_at: None,
        }
    }

    /// Sets the greatest number of releases without a caller that the pipeline keeps.
    pub fn with_most_releases(mut self, most: usize) -> Self {
        self.most_releases = most;
        self
    }

    /// Queues requests that callers wait for. A flush makes all releases due at once.
    pub fn enqueue(&mut self, requests: impl IntoIterator<Item = PendingRequest>) {
        for request in requests {
            if request.is_flush() {
                let repeats = self.refused.0.iter_mut().chain(&mut self.undo_repeats.0);
                for queue in repeats {
                    while let Some(release) = queue.pop() {
                        self.unawaited.push(release);
                    }
                }
            }
            self.awaited.push_back(request);
        }
    }

    /// Whether neither the pipeline nor its leader has a connection.
    pub fn is_unconnected(&self) -> bool {
        self.connection.is_none() && !self.leader_is_connected
    }

    /// Gives the connection, if there is one, to the leader.
    pub fn take_connection(&mut self) -> Option<PipelinedConnection> {
        let connection = self.connection.take();
        self.leader_is_connected = connection.is_some();
        connection
    }

    /// Takes the connection back from the leader, if it has one.
    pub fn put_connection(&mut self, connection: Option<PipelinedConnection>) {
        self.connection = connection;
        self.leader_is_connected = false;
    }

    /// Takes out the requests of `caller` that were not written, except releases.
    pub fn withdraw(
        &mut self,
        caller: &Arc<Caller>,
    ) -> impl Iterator<Item = PendingRequest> + use<> {
        let unsent = self.unsent.withdraw(caller);
        unsent.into_iter().chain(self.awaited.withdraw(caller))
    }

    /// Completes the caller's unwritten releases with the error, and reports them as late. The releases stay queued.
    pub fn give_up_unsent_releases(&mut self, caller: &Arc<Caller>, error: &Error) {
        let unsent = &mut self.unsent.requests;
        for request in unsent.iter_mut().chain(&mut self.awaited.requests) {
            let is_release = matches!(request.command, Command::Release(_));
            if is_release
                && request.attempts == 0
                && let Some(completion) = request.completion.take_if(|it| it.is_of(caller))
            {
                completion.give_up(error.clone());
                request.report_late(error);
            }
        }
    }

    /// Whether the background leaves missing replies to a sender.
    pub fn is_left_to_sender(&self) -> bool {
        let until = self.sender_reads_until;
        until.is_some_and(|until| MonotonicTime::now() < until)
    }

    /// Queues a release that no caller waits for.
    pub fn enqueue_release(&mut self, release: QueuedRelease) {
        self.unawaited.push(release);
        self.drop_release_beyond_bound();
    }

    /// Drops a release if there are more than the bound: the first one in `unawaited`, otherwise the first repeat. Its
    /// key expires on this node.
    fn drop_release_beyond_bound(&mut self) {
        if self.is_bounded() && self.releases() > self.most_releases {
            let repeats = self.refused.0.iter_mut().chain(&mut self.undo_repeats.0);
            let mut queues = std::iter::once(&mut self.unawaited).chain(repeats);
            let oldest = queues.find_map(Releases::pop);
            drop(oldest.map(|oldest| PendingRequest::from_release(oldest, &self.reports)));
        }
    }

    /// All queues of releases that callers do not wait for.
    fn release_queues(&self) -> impl Iterator<Item = &Releases> {
        let repeats = self.refused.0.iter().chain(&self.undo_repeats.0);
        std::iter::once(&self.unawaited).chain(repeats)
    }

    fn is_bounded(&self) -> bool {
        self.most_releases < usize::MAX
    }

    /// The number of queued releases that callers do not wait for.
    pub fn releases(&self) -> usize {
        self.release_queues().map(Releases::count).sum()
    }

    /// If many awaited requests are queued, drops those whose callers have left. The releases among them stay queued,
    /// and count towards the bound.
    pub fn drop_unwanted_if_long(&mut self) {
        let error = request::caller_left();
        let is_kept = match self.is_bounded() {
            true => PendingRequest::is_waited_for,
            false => PendingRequest::is_wanted,
        };
        for request in self.awaited.take_unwanted_if_long(is_kept) {
            let next = request.on_not_sent(&error);
            self.apply(next);
        }
    }

    pub fn has_unawaited(&self) -> bool {
        !self.unawaited.is_empty()
    }

    /// Whether there is a request or a release to write as soon as there is a connection.
    pub fn is_ready(&self) -> bool {
        !self.awaited.is_empty() || self.has_unawaited()
    }

    /// Whether a request or a release is queued, even if it is not due.
    pub fn has_work(&self) -> bool {
        self.is_ready() || !self.refused.is_empty() || !self.undo_repeats.is_empty()
    }

    /// Whether the background can write a request or a release at `now`.
    pub fn is_due(&self, now: MonotonicTime) -> bool {
        let is_ready = self.is_ready() || self.refused.is_due(now) || self.undo_repeats.is_due(now);
        is_ready && self.may_connect(now)
    }

    /// Whether there is a connection, or the background may connect.
    pub fn may_connect(&self, now: MonotonicTime) -> bool {
        self.connection.is_some() || self.connect_at.is_none_or(|at| at <= now)
    }

    /// Resets the pauses between attempts to connect.
    pub fn reset_connect_pauses(&mut self) {
        self.failures = 0;
        self.connect_at = None;
    }

    /// Delays the next attempt to connect, after a failed attempt or a broken connection. After the first failure,
    /// there is no delay.
    pub fn back_off(&mut self, now: MonotonicTime) {
        let doublings = self.failures.checked_sub(1);
        self.failures = self.failures.saturating_add(1);
        self.connect_at = doublings.map(|doublings| {
            let pause = FIRST_PAUSE * (1 << doublings.min(8));
            now.after(pause.min(LONGEST_PAUSE))
        });
    }

    /// How many releases have failed and wait to be retried.
    pub fn failed(&self) -> usize {
        self.release_queues().map(Releases::failed).sum()
    }

    /// Whether Redis has refused releases that wait to be retried. Undos do not count.
    pub fn has_refused_releases(&self) -> bool {
        let [_, refused @ ..] = &self.refused.0;
        refused.iter().any(|queue| !queue.is_empty())
    }

    /// Queues confirmed releases to be repeated on a new connection, whose server may lack them.
    pub fn repeat_confirmed(&mut self, confirmed: impl Iterator<Item = QueuedRelease>) {
        for release in confirmed {
            self.refused.push(release);
        }
    }

    /// Whether confirmed releases are still to be repeated.
    pub fn has_confirmed_to_repeat(&self) -> bool {
        let [confirmed, ..] = &self.refused.0;
        !confirmed.is_empty()
    }

    /// Takes the batch that a leader left here while it connected. Adds at most `at_a_time` releases of the batch's
    /// keys in front, so that acquires do not find keys taken that these releases free.
    pub fn take_unsent(&mut self, at_a_time: usize) -> Vec<PendingRequest> {
        let now = MonotonicTime::now();
        let (mut batch, mut room) = (Vec::new(), at_a_time);
        for request in self.unsent.take_all() {
            if let Some(key) = request.command.key() {
                let [confirmed, ..] = &mut self.refused.0;
                while room > 0
                    && let Some(release) = confirmed.take_of(key)
                {
                    room -= 1;
                    if release.is_wanted(now) {
                        batch.push(PendingRequest::from_release(release, &self.reports));
                    }
                }
            }
            batch.push(request);
        }
        batch
    }

    /// Takes the next batch: at most `at_a_time` awaited requests and as many releases. Releases go before requests of
    /// the same key, so that acquires do not overtake them. Other releases follow, oldest first.
    pub fn next_batch(&mut self, at_a_time: usize, batch: &mut Vec<PendingRequest>) {
        if !self.has_work() {
            return;
        }
        let now = MonotonicTime::now();
        let Self {
            awaited,
            unawaited,
            refused,
            undo_repeats,
            reports,
            ..
        } = self;
        let mut room = at_a_time;
        // If the ttl has ended, the drop of the request reports that the release is no longer repeated.
        let take = |batch: &mut Vec<PendingRequest>, release: QueuedRelease| {
            let is_wanted = release.is_wanted(now);
            let request = PendingRequest::from_release(release, reports);
            if is_wanted {
                batch.push(request);
            }
            is_wanted
        };
        let first = at_a_time.min(awaited.requests.len());
        for request in awaited.requests.drain(..first) {
            if let Some(key) = request.command.key() {
                for queue in std::iter::once(&mut *unawaited).chain(&mut refused.0) {
                    while room > 0
                        && let Some(release) = queue.take_of(key)
                    {
                        room -= usize::from(take(batch, release));
                    }
                }
            }
            batch.push(request);
        }
        // Repeats get at most half of the room, so that unawaited releases are written, too.
        let mut repeats = room.div_ceil(2);
        while repeats > 0
            && let Some(release) = refused.pop_due(now).or_else(|| undo_repeats.pop_due(now))
        {
            let taken = usize::from(take(batch, release));
            repeats -= taken;
            room -= taken;
        }
        while room > 0
            && let Some(release) = unawaited.pop()
        {
            room -= usize::from(take(batch, release));
        }
        if unawaited.is_empty() && awaited.has_flushes_only() {
            batch.extend(awaited.take_flushes());
        }
    }

    /// Takes at most `most` unawaited releases, which together have at most `bytes`.
    ///
    /// Called when no waiting caller can lead. So this call first drops the queued requests of callers that have left,
    /// and queues their releases as unawaited. Submitted requests stay in their queue.
    pub fn next_releases(
        &mut self,
        most: usize,
        mut bytes: usize,
        batch: &mut Vec<PendingRequest>,
    ) {
        if !self.awaited.is_empty() {
            let error = request::caller_left();
            for request in self.awaited.take_all() {
                if request.is_waited_for() {
                    self.awaited.push_back(request);
                    continue;
                }
                let next = request.on_not_sent(&error);
                self.apply(next);
            }
        }
        let now = MonotonicTime::now();
        while batch.len() < most
            && let Some(release) = self.unawaited.pop_within(bytes)
        {
            bytes -= release.bytes();
            let is_wanted = release.is_wanted(now);
            // If the ttl has ended, the drop of the request reports that the release is no longer repeated.
            let request = PendingRequest::from_release(release, &self.reports);
            if is_wanted {
                batch.push(request);
            }
        }
    }

    /// Completes the submitted requests in the queue with `Shutdown`. Called when the client has ended and no waiting
    /// caller can lead, so the requests would never be written.
    pub fn refuse_submitted(&mut self) {
        let ended = Error::new(ErrorKind::Shutdown, "");
        for request in self.awaited.take_all() {
            if request.is_waited_for() {
                let next = request.on_not_sent(&ended);
                self.apply(next);
            } else {
                self.awaited.push_back(request);
            }
        }
    }

    /// Queues the request again if `next` is a retry.
    pub fn apply(&mut self, next: Next) {
        match next {
            Next::Done | Next::Released(_) => {}
            // The store did not take the release.
            Next::Elsewhere(request, _) => self.apply(Next::RetryLater(request)),
            Next::RetryNow(request) if request.completion.is_some() => {
                self.awaited.push_back(request)
            }
            Next::RetryNow(request) => {
                if let Some(release) = request.into_release(None) {
                    self.enqueue_release(release);
                }
            }
            Next::RetryLater(request) => {
                let due = MonotonicTime::now().after(request.pause());
                let Some(release) = request.into_release(Some(due)) else {
                    return;
                };
                if release.is_undo {
                    self.undo_repeats.push(release);
                } else {
                    self.refused.push(release);
                }
                self.drop_release_beyond_bound();
            }
        }
    }

    /// Takes out the unwritten releases of these keys that callers do not wait for. An undo stays, since its acquire
    /// may still arrive here, and the first call returns a copy of it.
    pub fn take_releases(&mut self, keys: impl Fn(&Key) -> bool) -> Vec<QueuedRelease> {
        for request in self.unsent.take_unawaited(&keys) {
            if let Some(release) = request.into_release(None) {
                self.unawaited.push(release);
            }
        }
        let mut taken = Vec::new();
        let repeats = self.refused.0.iter_mut().chain(&mut self.undo_repeats.0);
        for queue in std::iter::once(&mut self.unawaited).chain(repeats) {
            let first = taken.len();
            queue.sweep(
                |release| keys(release.key) && !release.is_copied,
                |release| taken.push(release),
            );
            for undo in taken[first..].iter().filter(|release| release.is_undo) {
                let mut stays = undo.clone();
                stays.route.is_copied = true;
                queue.push(stays);
            }
        }
        taken
    }

    /// Reports each queued release as late, once, and drops the releases whose ttl has ended. Called when there is no
    /// connection. Does nothing within [`BETWEEN_SWEEPS`] of the last call.
    pub fn report_all_late(&mut self, error: &Error, now: MonotonicTime) {
        let next = self.swept_at.map(|at| at.after(BETWEEN_SWEEPS));
        if next.is_some_and(|next| now < next) {
            return;
        }
        self.swept_at = Some(now);
        let reports = &self.reports;
        let is_followed = reports.releases != ReportedReleases::None;
        let change = |release: &mut Swept<'_>| {
            // The failed connection counts as an attempt, so that the release is dropped at the end of its ttl
            // (`QueuedRelease::is_wanted`).
            *release.attempts = (*release.attempts).max(1);
            if let Some(token) = release.held
                && is_followed
                && !std::mem::replace(release.reported_late, true)
            {
                let late = LateRelease::Delayed(error.clone());
                reports.send(Report::Release(release.key, token, late));
            }
            now >= release.until
        };
        let repeats = self.refused.0.iter_mut().chain(&mut self.undo_repeats.0);
        for queue in std::iter::once(&mut self.unawaited).chain(repeats) {
            queue.sweep(change, |given_up| {
                drop(PendingRequest::from_release(given_up, reports));
            });
        }
    }
}

/// Requests that callers wait for, oldest first. The number of callers' threads bounds these requests; on a quorum, the
/// number of held locks does. The queue has at most twice as many requests as callers wait for, or at most
/// [`FEWEST_TO_CHECK`] if that is more.
#[derive(Default)]
pub struct AwaitedQueue {
    requests: VecDeque<PendingRequest>,
    /// When the queue has this many requests, those of callers that have left are dropped.
    longest: usize,
    /// Flushes. They are taken once no other request is queued.
    flushes: VecDeque<PendingRequest>,
}

impl AwaitedQueue {
    pub fn push_back(&mut self, request: PendingRequest) {
        if request.is_flush() {
            self.flushes.push_back(request);
        } else if matches!(request.command, Command::Probe(_)) {
            // A probe goes first: a node with many requests in its queue must not appear to fail.
            self.requests.push_front(request);
        } else {
            self.requests.push_back(request);
        }
    }

    pub fn take_flushes(&mut self) -> impl Iterator<Item = PendingRequest> {
        self.flushes.drain(..)
    }

    pub fn take_all(&mut self) -> impl Iterator<Item = PendingRequest> + use<> {
        let Self {
            requests, flushes, ..
        } = std::mem::take(self);
        requests.into_iter().chain(flushes)
    }

    /// Takes out the requests of `caller`, except releases.
    pub fn withdraw(&mut self, caller: &Arc<Caller>) -> Vec<PendingRequest> {
        let is_own = |request: &PendingRequest| {
            let completion = request.completion.as_ref();
            let is_release = matches!(request.command, Command::Release(_));
            !is_release && completion.is_some_and(|completion| completion.is_of(caller))
        };
        self.take_if(is_own)
    }

    /// Takes out the unawaited releases of these keys.
    fn take_unawaited(&mut self, keys: impl Fn(&Key) -> bool) -> Vec<PendingRequest> {
        self.take_if(|request| {
            let is_release = matches!(request.command, Command::Release(_));
            is_release && request.completion.is_none() && request.command.key().is_some_and(&keys)
        })
    }

    fn take_if(&mut self, is_wanted: impl Fn(&PendingRequest) -> bool) -> Vec<PendingRequest> {
        let requests = std::mem::take(&mut self.requests).into_iter();
        let (taken, others): (Vec<_>, _) = requests.partition(is_wanted);
        self.requests = VecDeque::from(others);
        taken
    }

    pub fn is_empty(&self) -> bool {
        self.requests.is_empty() && self.flushes.is_empty()
    }

    /// Whether only flushes are queued.
    pub fn has_flushes_only(&self) -> bool {
        self.requests.is_empty() && !self.flushes.is_empty()
    }

    /// Whether one of the first `among` requests acquires `key`.
    pub fn has_acquire_of(&self, key: &Key, among: usize) -> bool {
        self.requests.iter().take(among).any(|request| {
            matches!(&request.command, Command::Acquire(Acquire { key: asked, .. }) if asked == key)
        })
    }

    /// The first caller that waits for a request here and can lead.
    pub fn next_leader(&self) -> Option<&Arc<Caller>> {
        request::next_leader(self.requests.iter().chain(&self.flushes))
    }

    /// If the queue has become long, takes out the requests that are no longer wanted: a caller may leave long before
    /// the pipeline can write its submitted request.
    fn take_unwanted_if_long(
        &mut self,
        is_wanted: impl Fn(&PendingRequest) -> bool,
    ) -> Vec<PendingRequest> {
        if self.requests.len() < self.longest.max(FEWEST_TO_CHECK) {
            return Vec::new();
        }
        let unwanted = self.take_if(|request| !is_wanted(request));
        self.longest = 2 * self.requests.len();
        unwanted
    }

    #[cfg(test)]
    pub fn iter(&self) -> impl Iterator<Item = &PendingRequest> {
        self.requests.iter().chain(&self.flushes)
    }
}

impl Extend<PendingRequest> for AwaitedQueue {
    fn extend<I: IntoIterator<Item = PendingRequest>>(&mut self, requests: I) {
        requests
            .into_iter()
            .for_each(|request| self.push_back(request));
    }
}

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests {
    use std::sync::Arc;

    use parking_lot::Mutex;

    use super::*;
    use crate::command::{Held, Inspect, Probe, Release};
    use crate::util::id::LeaseId;
    use crate::wire::pipeline::releases::Route;

    fn release(name: &str, is_undo: bool) -> QueuedRelease {
        let far = MonotonicTime::now().after(Duration::from_secs(60));
        QueuedRelease {
            release: Release::unheld(Key::new("p:", name, 16).unwrap(), LeaseId::random(), far),
            due: far,
            attempts: 0,
            is_undo,
            reported_late: false,
            route: Route::default(),
        }
    }

    #[test]
    fn releases_beyond_the_bound_are_dropped() {
        let mut state = PipelineState::new(Reports::default()).with_most_releases(3);
        state.undo_repeats.push(release("undo", true));
        for name in ["a", "b", "c", "d"] {
            state.enqueue_release(release(name, false));
        }
        let names = |state: &mut PipelineState| {
            let taken = state.take_releases(|_| true).into_iter();
            taken
                .map(|release| release.release.key.name().to_owned())
                .collect::<Vec<_>>()
        };
        assert_eq!(state.releases(), 3);
        assert_eq!(names(&mut state), ["c", "d", "undo"]);
        // The undo stays. Repeats count, too: if there are only repeats, the oldest is dropped.
        for name in ["e", "f", "g"] {
            let release = PendingRequest::from_release(release(name, false), &Reports::default());
            state.apply(Next::RetryLater(release));
        }
        assert_eq!(names(&mut state), ["f", "g"]);
        assert_eq!(state.releases(), 1);
        let mut unbounded = PipelineState::new(Reports::default());
        for _ in 0..100 {
            unbounded.enqueue_release(release("a", false));
        }
        assert_eq!(unbounded.releases(), 100);
    }

    /// The quorum then forgets the release, so the bound of the nodes' queues also bounds the quorum's records.
    #[test]
    fn a_release_dropped_at_the_bound_is_reported() {
        let texts: Arc<Mutex<Vec<String>>> = Arc::default();
        let reported = Arc::clone(&texts);
        let reports = Reports::new(ReportedReleases::All, move |report| {
            if let Report::Release(key, token, report) = report {
                let text = format!("{} {token} {report:?}", key.name());
                reported.lock().push(text);
            }
        });
        let mut state = PipelineState::new(reports).with_most_releases(2);
        for (name, token) in [("a", 1), ("b", 2), ("c", 3)] {
            let mut release = release(name, false);
            release.release.held = Some(Held {
                token,
                is_token_in_value: true,
                others_queued: false,
                valid_until: MonotonicTime::at_tick(0),
            });
            state.enqueue_release(release);
        }
        let texts = texts.lock();
        assert!(texts[0].starts_with("a 1 Delayed"), "{texts:?}");
        assert_eq!(texts[1..], ["a 1 Ended { confirmed: false }"]);
    }

    /// A node of a quorum may have thousands of renewals in its queue.
    #[test]
    fn a_probe_is_the_first_request_in_its_queue() {
        let key = Key::new("p:", "k", 16).unwrap();
        let mut state = PipelineState::new(Reports::default());
        let request = |command| PendingRequest::new(command, None);
        state.enqueue([
            request(Command::Inspect(Inspect { key: key.clone() })),
            request(Command::Probe(Probe { mark: key })),
        ]);
        let first = state.awaited.iter().next().unwrap();
        assert!(matches!(first.command, Command::Probe(_)));
    }

    #[test]
    fn moved_releases_are_taken_and_undos_copied_once() {
        let mut state = PipelineState::new(Reports::default());
        for name in ["a", "b", "a"] {
            state.enqueue_release(release(name, false));
        }
        state.undo_repeats.push(release("a", true));
        state.undo_repeats.push(release("b", true));
        let moved = |key: &Key| key.name() == "a";
        let taken = state.take_releases(moved);
        assert!(
            taken
                .iter()
                .all(|release| moved(&release.release.key) && !release.route.is_copied)
        );
        let undos = taken.iter().filter(|release| release.is_undo).count();
        assert_eq!((taken.len(), undos), (3, 1));
        // The undo is still queued, and is not copied again.
        assert!(state.take_releases(moved).is_empty());
        assert_eq!(state.take_releases(|_| true).len(), 2);
        assert!(state.unawaited.is_empty() && !state.undo_repeats.is_empty());
    }
}

//! A pipeline: one connection, and the queue of requests that share the connection (group commit). All requests of one
//! key, except its renewals, use one pipeline, so Redis executes them in the order in which they were queued.
//!
//! # The leader
//!
//! 1. The first caller at an idle pipeline becomes its leader. The leader writes a batch of the queued requests,
//!    awaited requests first, reads the replies, and passes them to their callers. It does all I/O, and never under the
//!    mutex of the state.
//! 2. Every other caller waits for the outcome of its own request, and leaves at its own deadline.
//! 3. When the leader has its outcome, it appoints the next waiting caller.
//! 4. A leader also leaves at its own deadline, even with a batch in flight. Without a waiting caller, the background
//!    continues. The next leader first reads the missing replies. A leader always writes a whole batch: if the server
//!    stops reading, the write lasts up to one `command_timeout`, even past the leader's deadline.
//!
//! One batch with awaited requests is in flight at a time. Only releases that no caller awaits are written behind it.
//! The replies to a batch are due one `command_timeout` after its leader began to write it. When replies are overdue,
//! the pipeline closes the connection.
//!
//! # What is written first
//!
//! - Awaited requests are written with the next batch, however many guards were dropped before.
//! - Earlier releases of a request's key are written with the request. So an acquire does not overtake a release of its
//!   key, except repeated undos and releases beyond the batch. It may overtake releases of other keys.
//! - A thread that drops a guard writes the release only if that cannot block: fewer than [`MAX_UNANSWERED`] releases
//!   and [`MAX_UNANSWERED_BYTES`] are without a reply. Otherwise the background writes the release.
//!
//! # Submitted requests
//!
//! A request to several nodes is submitted to the pipeline of each node, so its caller can wait for all of them
//! together. Such a caller is never appointed as a leader. If the connection is free, it may be the *sender*: it writes
//! the request ([`Pipeline::send`]), and leads again each time the socket has bytes ([`SentRequest`]). In between, the
//! pipeline has no leader, and the background reads nothing. A sender that stops, or does not lead for 20 ms, leaves
//! the rest to the background. When the caller leaves, its unwritten requests are dropped, and its late grants are
//! undone.
//!
//! # What failures leave behind
//!
//! | request | what the pipeline does |
//! |---|---|
//! | release without a reply | the next leader or the background reads the reply. If the connection breaks, the release is written again on the next connection |
//! | release that failed | it stays in [`releases`] until its ttl has ended. After a broken connection, it is in the first batches of the next connection. After a refusal, it is written with the next request of its key, or after a pause that doubles |
//! | release that was confirmed | the next connection may lead to a server without it, so the pipeline repeats it there: [`confirmed`] |
//! | acquire, adoption or conversion without a reply | the caller gets an error. The *undo*, a release of the lease, is written behind it on the same connection before this connection is closed. The request may still arrive late, so the undo is repeated on other connections until it finds the lease or the ttl has passed |
//! | grant whose caller has left | the lease is released |
//! | request that was not written | the caller gets `Unavailable`. There is nothing to undo |
//! | fenced write without a reply | it is never repeated. The caller gets an error, and can write the same again |
//!
//! A release that is late is reported once. A flush returns when the pipeline has no release left to try.
//!
//! # Acknowledgements of replicas
//!
//! If requests of a batch need acknowledgements, one `WAIT` follows the script calls, with the greatest count and the
//! longest time-out among them. The outcomes of these requests wait for its reply. A request with too few
//! acknowledgements has an unknown outcome: an acquire is undone, and a renewal fails.
//!
//! - `WAIT` counts the replicas that have the last write of its connection, and all earlier writes of the server. So
//!   each such request writes, even a renewal that finds the ttl long enough.
//! - `WAIT` also delays the other keys of the batch. A request waits for the batch in flight and for its own batch, so
//!   two time-outs must fit into one `command_timeout` (`Config::check_replicas`).
//! - A hand-off changes no key, so the last acknowledgement also counts for the next holder.

pub mod confirmed;
#[cfg_attr(all(test, shuttle), path = "connection/model.rs")]
pub mod connection;
#[cfg(test)]
#[cfg(shuttle)]
mod model;
pub mod releases;
pub mod request;
pub mod state;
#[cfg(test)]
#[cfg(feature = "__server_tests")]
#[cfg(not(shuttle))]
mod tests;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::command::{Command, Outcome, Release, Reply, Request};
use crate::config::key::Key;
use crate::report::error::{Error, ErrorKind};
use crate::store::completion::{Caller, Completion, Few, WaitEnd};
use crate::store::late_release::ReleaseTracker;
use crate::store::{RenewalLimits, Reports, ServerId, Urgency};
use crate::util::clock::MonotonicTime;
use crate::util::slot::Redirect;
use crate::util::sync;
use crate::util::sync::{Mutex, MutexGuard};
use crate::wire::connect::errors;
use crate::wire::endpoint::{Endpoint, REPLACE_WAIT};
use crate::wire::pipeline::confirmed::ConfirmedReleases;
use crate::wire::pipeline::connection::{PipelinedConnection, SharedConnector, SharedSocket};
use crate::wire::pipeline::releases::{QueuedRelease, Route};
use crate::wire::pipeline::request::{Next, PendingRequest};
use crate::wire::pipeline::state::PipelineState;
use crate::wire::scripts::ScriptContext;

/// How many awaited requests, and how many unawaited releases, a pipeline for callers writes at a time. Redis may run
/// all that a connection has sent before it reads from other connections. (A pipeline to a node of a quorum writes as
/// many as one for renewals.)
pub const MAX_BATCH: usize = if cfg!(all(test, shuttle)) { 2 } else { 128 };
/// With this many unread replies to releases, threads leave further releases to the background. An awaited request has
/// to wait for all releases that are written before it.
const MAX_UNANSWERED: usize = if cfg!(all(test, shuttle)) { 2 } else { 64 };
/// A pipeline to a node of a quorum queues at most this many releases without a caller. Otherwise a node that stays
/// slower than the majority would collect releases as fast as the client makes them.
pub const MOST_RELEASES_ON_QUORUM: usize = 65_536;
/// Threads write at most this many bytes without waiting for a reply. They fit into the buffers of a socket, so the
/// drop of a guard never blocks, even if the server does not read.
const MAX_UNANSWERED_BYTES: usize = 32 * 1024;

/// The background leaves missing replies to a sender for this time after the sender has last led. A sender stops much
/// earlier (see `quorum`), unless the system does not run its thread. (In tests, longer than any pause of a busy
/// machine.)
const SENDER_TIMEOUT: Duration = if cfg!(all(test, not(shuttle))) {
    Duration::from_secs(2)
} else {
    Duration::from_millis(20)
};
/// With a shorter command time-out, a pipeline has no senders: a sender must not wait for one node, and a reader waits
/// up to 10 ms longer for replies that are due.
const SHORTEST_TIMEOUT_OF_SENDERS: Duration = Duration::from_millis(20);

/// The parts that the pipelines of one node share.
pub struct Shared {
    pub connector: SharedConnector,
    pub endpoint: Arc<Endpoint>,
    pub context: ScriptContext,
    pub connect_timeout: Duration,
    pub command_timeout: Duration,
    pub reports: Reports,
    pub server: ServerId,
    /// `None` if the store has one server.
    pub router: Option<Weak<dyn ReleaseRouter>>,
}

/// Moves releases to the node that serves their slot.
pub trait ReleaseRouter: Send + Sync {
    /// Takes a release that the node `from` has redirected. Returns the release if `from` has to try it again later.
    /// Neither blocks nor connects. The caller must not hold a mutex.
    fn reroute(
        &self,
        from: ServerId,
        release: QueuedRelease,
        redirect: &Redirect,
    ) -> Option<QueuedRelease>;
}

/// How soon a pipeline can write a new request. The best case comes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Readiness {
    Idle,
    Unconnected,
    Busy,
}

pub struct Pipeline {
    shared: Arc<Shared>,
    /// How many awaited requests, and how many releases, are written at a time.
    at_a_time: usize,
    state: Mutex<PipelineState>,
    /// The newest releases that the server has confirmed, to be repeated on the next connection. Empty on a quorum: a
    /// node that may have lost data grants nothing while its old keys last. A thread that locks both mutexes locks
    /// `state` first.
    confirmed: Mutex<ConfirmedReleases>,
    /// The next leader that writes a request for this key panics.
    #[cfg(test)]
    panic_at: Mutex<Option<Key>>,
}

impl Pipeline {
    pub fn for_callers(shared: Arc<Shared>) -> Self {
        Self::new(shared, MAX_BATCH)
    }

    pub fn for_renewals(shared: Arc<Shared>) -> Self {
        Self::new(shared, RenewalLimits::USUAL.at_a_time)
    }

    fn new(shared: Arc<Shared>, at_a_time: usize) -> Self {
        let mut state = PipelineState::new(shared.reports.clone());
        if shared.endpoint.data_check.is_some() {
            state = state.with_most_releases(MOST_RELEASES_ON_QUORUM);
        }
        Self {
            at_a_time,
            state: Mutex::new(state),
            confirmed: Mutex::default(),
            shared,
            #[cfg(test)]
            panic_at: Mutex::new(None),
        }
    }

    /// Queues the confirmed releases again for a new connection, whose server may lack them.
    fn repeat_confirmed(&self, state: &mut PipelineState) {
        let mut confirmed = self.confirmed.lock();
        state.repeat_confirmed(confirmed.take(MonotonicTime::now(), |_| true));
    }

    /// Carries out `requests` and sets their outcomes: see [`run`](Self::run).
    pub fn execute(&self, requests: &mut [&mut Request], route: Route) {
        let Some(deadline) = requests.iter().map(|request| request.deadline).max() else {
            return;
        };
        let commands = requests.iter().map(|request| request.command.clone());
        let outcomes = self.run(commands, deadline, route);
        for (request, outcome) in requests.iter_mut().zip(outcomes) {
            request.outcome = Some(outcome);
        }
    }

    /// Waits until all sent releases are done. At `deadline`, the pipeline closes its connection.
    pub fn flush(&self, deadline: MonotonicTime) -> Outcome {
        self.run_one(Command::Flush, deadline, Route::default())
    }

    /// Carries out one command: see [`run`](Self::run).
    pub fn run_one(&self, command: Command, deadline: MonotonicTime, route: Route) -> Outcome {
        let mut outcomes = self.run([command].into_iter(), deadline, route);
        outcomes
            .pop()
            .expect("the run has an outcome for each command")
    }

    /// Adds the server's address to the error of `outcome`, if the caller's deadline came before a reply.
    pub fn naming_the_server(&self, outcome: Outcome) -> Outcome {
        outcome.map_err(|error| errors::at_server(&self.shared.endpoint.address_of_server(), error))
    }

    /// Carries out `commands`, and returns their outcomes, at `deadline` at the latest. Leads the pipeline, or parks
    /// the thread while another thread leads. At the deadline of a flush, the pipeline also closes its connection, even
    /// if other callers wait for replies.
    fn run(
        &self,
        commands: impl ExactSizeIterator<Item = Command>,
        deadline: MonotonicTime,
        route: Route,
    ) -> Few<Outcome> {
        let caller = Caller::new(commands.len());
        let requests = commands.enumerate().map(|(index, command)| {
            let completion = Completion::new(&caller, index);
            let mut request = PendingRequest::new(command, Some(completion));
            request.route = route;
            request.with_tracker(&self.shared.reports)
        });
        // Collected before the mutex is locked, so that the commands are not cloned under the mutex.
        let requests: Few<PendingRequest> = requests.collect();
        let is_flush = requests.iter().any(PendingRequest::is_flush);
        let shutdown_deadline = is_flush.then_some(deadline);
        let leadership = {
            let mut state = self.state.lock();
            state.enqueue(requests);
            self.try_lead(&mut state)
        };
        match leadership {
            Some(leadership) => leadership
                .with_shutdown_deadline(shutdown_deadline)
                .lead(&caller, deadline),
            None => self.wait_or_lead(&caller, deadline, shutdown_deadline),
        }
        self.withdraw_unsent(&caller);
        let outcomes = caller.take_outcomes();
        outcomes
            .map(|outcome| self.naming_the_server(outcome))
            .collect()
    }

    fn wait_or_lead(
        &self,
        caller: &Arc<Caller>,
        deadline: MonotonicTime,
        shutdown_deadline: Option<MonotonicTime>,
    ) {
        while caller.wait(deadline) == WaitEnd::Appointed {
            let connection = self.state.lock().take_connection();
            let leadership = Leadership::new(self, connection);
            leadership
                .with_shutdown_deadline(shutdown_deadline)
                .lead(caller, deadline);
        }
    }

    /// Sets the outcomes of the caller's requests that were not written because the pipeline could not connect: they
    /// were not sent, so their outcomes are known. Releases stay in the queue. If the leader is connected, does
    /// nothing, and the outcomes are time-outs: the last failed attempt to connect may belong to a ping or to another
    /// pipeline.
    fn withdraw_unsent(&self, caller: &Arc<Caller>) {
        if caller.is_complete() {
            return;
        }
        let endpoint = &self.shared.endpoint;
        let error = endpoint.no_connection();
        let unsent = {
            let mut state = self.state.lock();
            if !state.is_unconnected() {
                return;
            }
            state.give_up_unsent_releases(caller, &error);
            state.withdraw(caller)
        };
        for request in unsent {
            let error = match request.attempts {
                0 => Some(error.clone()),
                // An earlier connection broke before the reply.
                _ => endpoint.last_error(),
            };
            if let Some((completion, error)) = request.completion.zip(error) {
                completion.give_up(error);
            }
        }
    }

    /// Queues requests for the leader of the pipeline, and returns at once. If no thread leads, the background does.
    /// After [`end`](Self::end), the outcomes are `Shutdown`.
    pub fn submit(&self, requests: Vec<(Command, Completion)>) {
        self.queue_submitted(requests, false);
    }

    /// Writes a request if the connection is free, and returns it: the caller then reads the reply. Otherwise queues
    /// the request, as [`submit`](Self::submit) does, and returns `None`.
    pub fn send(&self, command: Command, completion: Completion) -> Option<SentRequest<'_>> {
        let mut leadership = self.queue_submitted(vec![(command, completion)], true)?;
        let socket = leadership.write_without_reading()?;
        leadership.sender_reads_on = true;
        Some(SentRequest {
            pipeline: self,
            socket,
            is_done: false,
        })
    }

    /// Queues requests. If `may_send` and the connection is free, makes this thread the leader. Otherwise the leader or
    /// the background writes the requests.
    fn queue_submitted(
        &self,
        requests: Vec<(Command, Completion)>,
        may_send: bool,
    ) -> Option<Leadership<'_>> {
        let requests = requests
            .into_iter()
            .map(|(command, completion)| PendingRequest::new(command, Some(completion)))
            .map(|request| request.with_tracker(&self.shared.reports));
        let requests: Vec<PendingRequest> = requests.collect();
        let urgency = {
            let mut state = self.state.lock();
            if state.has_ended {
                drop(state);
                let ended = Error::new(ErrorKind::Shutdown, "");
                requests
                    .into_iter()
                    .for_each(|request| drop(request.on_not_sent(&ended)));
                return None;
            }
            state.drop_unwanted_if_long();
            state.enqueue(requests);
            if state.is_led {
                // When the leader ends, it requests maintenance itself.
                return None;
            }
            if may_send && self.can_send(&state) {
                return self.try_lead(&mut state);
            }
            urgency_of(&state)
        };
        self.shared.reports.need_maintenance(urgency);
        None
    }

    /// Whether a caller can write a request now, and then read the reply itself.
    fn can_send(&self, state: &PipelineState) -> bool {
        cfg!(unix)
            && self.shared.command_timeout >= SHORTEST_TIMEOUT_OF_SENDERS
            && is_free(state.connection.as_ref())
    }

    /// Ends the time in which the background leaves replies to the sender on this socket. If replies are missing and no
    /// thread leads, this thread becomes the leader. If another thread leads, that thread requests the maintenance that
    /// reads them.
    fn end_sender_time_and_lead(&self, socket: &SharedSocket) -> Option<Leadership<'_>> {
        let mut state = self.state.lock();
        let connection = state.connection.as_ref();
        // If the pipeline has another connection by now, the new connection may have a sender of its own.
        if connection.is_some_and(|connection| !connection.has_socket(socket)) {
            return None;
        }
        let is_half_read = connection.is_some_and(PipelinedConnection::is_half_read);
        state.sender_reads_until = None;
        is_half_read.then(|| self.try_lead(&mut state)).flatten()
    }

    /// Writes a release to the socket, if the pipeline is idle and connected. Otherwise queues it for the leader or the
    /// background. Does not wait for the reply.
    pub fn send_release(&self, release: Release) {
        let release = QueuedRelease::new(release);
        let leadership = {
            let mut state = self.state.lock();
            // Queued requests go first. The background writes them, and this release behind them.
            let is_first = !state.is_ready();
            state.enqueue_release(release);
            if state.is_led {
                return;
            }
            let has_room = room_of(state.connection.as_ref()) > 0;
            if is_first && has_room {
                self.try_lead(&mut state).ok_or(Urgency::Now)
            } else {
                Err(urgency_of(&state))
            }
        };
        match leadership {
            // The drop of `Leadership` writes the batch.
            Ok(leadership) => drop(leadership),
            Err(urgency) => self.shared.reports.need_maintenance(urgency),
        }
    }

    /// Queues several releases, and writes them together: see [`send_release`](Self::send_release).
    pub fn send_releases(&self, releases: impl IntoIterator<Item = Release>) {
        let mut releases = releases.into_iter();
        let Some(last) = releases.next() else {
            return;
        };
        {
            let mut state = self.state.lock();
            for release in releases {
                state.enqueue_release(QueuedRelease::new(release));
            }
        }
        self.send_release(last);
    }

    /// Waits for the replies to the releases of these keys that this pipeline has written or queued, until `deadline`
    /// at the latest. The barriers that this call queues are never sent.
    pub fn settle(&self, keys: &[&Key], deadline: MonotonicTime) {
        if self.is_idle() {
            return;
        }
        let barrier = |key: &&Key| Command::Settle((*key).clone());
        let barriers: Vec<Command> = keys.iter().map(barrier).collect();
        self.run(barriers.into_iter(), deadline, Route::default());
    }

    /// Queues a release that another node has refused or has not carried out. The leader or the background writes it.
    pub fn adopt_release(&self, release: QueuedRelease) {
        let urgency = {
            let mut state = self.state.lock();
            state.enqueue_release(release);
            (!state.is_led).then(|| urgency_of(&state))
        };
        if let Some(urgency) = urgency {
            self.shared.reports.need_maintenance(urgency);
        }
    }

    /// Queues a release that is repeated until it finds the lease, or until the lease's ttl has ended.
    pub fn queue_undo(&self, release: Release) {
        self.adopt_release(QueuedRelease {
            is_undo: true,
            ..QueuedRelease::new(release)
        });
    }

    /// Reports as late, because of `error`, a release that no node has carried out, and queues it.
    pub fn queue_late_release(&self, release: Release, error: &Error) {
        let tracker = ReleaseTracker::new(&self.shared.reports, &release, false);
        let reported_late = tracker.is_some_and(|mut tracker| {
            tracker.report_late(error);
            tracker.suspend()
        });
        self.adopt_release(QueuedRelease {
            attempts: 1,
            reported_late,
            ..QueuedRelease::new(release)
        });
    }

    /// Takes out the queued releases of these keys, and the confirmed ones: the server that serves the keys now may
    /// lack them.
    pub fn take_releases(&self, keys: impl Fn(&Key) -> bool) -> Vec<QueuedRelease> {
        let mut state = self.state.lock();
        let mut taken = state.take_releases(&keys);
        let now = MonotonicTime::now();
        taken.extend(self.confirmed.lock().take(now, keys));
        taken
    }

    /// Asks the background to connect soon if confirmed releases have to be repeated. Called when connections have
    /// become stale: a pipeline without requests would not connect by itself.
    pub fn request_repeats(&self) {
        if self.confirmed.lock().has_live(MonotonicTime::now()) {
            self.shared.reports.need_maintenance(Urgency::Soon);
        }
    }

    /// Whether the background has to connect to repeat confirmed releases.
    fn must_connect(&self, state: &PipelineState) -> bool {
        let connection = state.connection.as_ref();
        let has_connection = connection.is_some_and(|it| !it.is_stale_and_idle());
        !has_connection
            && !state.is_led
            && !state.has_ended
            && self.confirmed.lock().has_live(MonotonicTime::now())
    }

    /// Whether no request is queued or in flight.
    pub fn is_idle(&self) -> bool {
        let state = self.state.lock();
        !state.is_led && !state.has_work() && !has_unanswered(state.connection.as_ref())
    }

    /// Passes a redirected release to the store. Returns the step that is left for this pipeline.
    fn reroute(&self, next: Next) -> Next {
        let Next::Elsewhere(request, redirect) = next else {
            return next;
        };
        let shared = &*self.shared;
        let router = shared.router.as_ref().and_then(Weak::upgrade);
        let Some(release) = request.into_release(None) else {
            return Next::Done;
        };
        let left = match router {
            Some(router) => router.reroute(shared.server, release, &redirect),
            None => Some(release),
        };
        left.map_or(Next::Done, |release| {
            let mut request = PendingRequest::from_release(release, &shared.reports);
            request.attempts += 1;
            Next::RetryLater(request)
        })
    }

    /// Writes what is due to the socket, and leaves the replies to [`run_maintenance`](Self::run_maintenance). Does
    /// nothing without a free connection, or while another thread leads.
    pub fn write_due(&self) {
        let leadership = {
            let mut state = self.state.lock();
            let is_due = state.is_due(MonotonicTime::now());
            // Flushes are left to `run_maintenance`, which reads all replies.
            let has_flushes_only = state.awaited.has_flushes_only() && !state.has_unawaited();
            if !is_due || has_flushes_only || !is_free(state.connection.as_ref()) {
                return;
            }
            self.try_lead(&mut state)
        };
        if let Some(mut leadership) = leadership {
            leadership.write_without_reading();
        }
    }

    /// Reads missing replies, and writes what is due. Does nothing while another thread leads or a sender reads.
    /// Returns true if work is left.
    pub fn run_maintenance(&self) -> bool {
        let leadership = {
            let mut state = self.state.lock();
            let unanswered = has_unanswered(state.connection.as_ref());
            let is_busy = state.is_led || state.is_left_to_sender();
            let now = MonotonicTime::now();
            let must_connect = self.must_connect(&state);
            let is_due = state.is_due(now) || must_connect && state.may_connect(now);
            if is_busy || !(unanswered || is_due) {
                return is_busy || state.has_work() || must_connect;
            }
            self.try_lead(&mut state)
        };
        if let Some(mut leadership) = leadership {
            leadership.run_maintenance();
        }
        let state = self.state.lock();
        state.is_led || state.has_work() || self.must_connect(&state)
    }

    /// Makes the pipeline refuse submitted requests, because the background has ended.
    pub fn end(&self) {
        let mut state = self.state.lock();
        state.has_ended = true;
        // The drop of the leadership refuses the submitted requests in the queue and in flight: the background will
        // neither write them nor read their replies. A sender still reads its replies.
        let leadership = self.try_lead(&mut state);
        drop(state);
        drop(leadership);
    }

    /// Drops a stale connection, on which the next request might wait for a time-out. Then returns how ready the
    /// pipeline is.
    pub fn readiness_after_dropping_stale(&self) -> Readiness {
        let mut state = self.state.lock();
        let stale = state
            .connection
            .take_if(|connection| connection.is_stale_and_idle());
        let readiness = match (state.is_led, &state.connection) {
            (true, _) => Readiness::Busy,
            (_, Some(connection)) if connection.is_half_read() => Readiness::Busy,
            (false, None) => Readiness::Unconnected,
            (false, Some(_)) => Readiness::Idle,
        };
        drop(state);
        drop(stale);
        readiness
    }

    /// The number of awaited requests in the queue.
    #[cfg(test)]
    #[cfg(feature = "__server_tests")]
    #[cfg(not(shuttle))]
    pub fn awaited(&self) -> usize {
        self.state.lock().awaited.iter().count()
    }

    /// The number of queued releases that callers do not wait for.
    pub fn releases(&self) -> usize {
        self.state.lock().releases()
    }

    /// The number of failed releases that wait to be repeated.
    pub fn failed_releases(&self) -> usize {
        self.state.lock().failed()
    }

    /// Makes this thread the leader, and takes the connection. Returns `None` if another thread leads.
    fn try_lead(&self, state: &mut PipelineState) -> Option<Leadership<'_>> {
        if state.is_led {
            return None;
        }
        state.is_led = true;
        let connection = state.take_connection();
        Some(Leadership::new(self, connection))
    }
}

/// A request that this thread has written, and whose reply this thread reads. Until the reply is read, the background
/// does not read, at most for [`SENDER_TIMEOUT`] after this thread has last read. A drop before the reply leaves the
/// reply to the background. Such a drop locks the pipeline, and may write queued releases.
pub struct SentRequest<'a> {
    pipeline: &'a Pipeline,
    socket: SharedSocket,
    /// Whether nothing is left for this thread to read.
    is_done: bool,
}

impl SentRequest<'_> {
    /// Waits until some of these requests have bytes to receive, until `until` at the latest. Returns their positions.
    /// May also return none before `until`.
    pub fn wait_for_any(requests: &[Self], until: MonotonicTime) -> Vec<usize> {
        let sockets = requests.iter().map(|request| &request.socket);
        connection::wait_for_any(sockets, until)
    }

    /// Reads what has come. Returns true if no awaited reply is missing, or if another thread reads it.
    pub fn receive(&mut self) -> bool {
        let leadership = self.pipeline.end_sender_time_and_lead(&self.socket);
        self.is_done = leadership.is_none_or(|mut leadership| {
            leadership.read_before_write(Some(MonotonicTime::now()));
            if let Some(connection) = &mut leadership.connection {
                connection.leave_unawaited();
            }
            leadership.sender_reads_on = leadership.is_half_read();
            !leadership.sender_reads_on
        });
        self.is_done
    }
}

impl Drop for SentRequest<'_> {
    fn drop(&mut self) {
        if !self.is_done {
            // The end of the leadership requests maintenance, or closes the connection after the end of the client.
            drop(self.pipeline.end_sender_time_and_lead(&self.socket));
        }
    }
}

/// The right and the duty to do the pipeline's I/O. The drop, even by a panic, appoints the next caller, or writes a
/// batch of unawaited releases to the socket.
struct Leadership<'a> {
    pipeline: &'a Pipeline,
    connection: Option<PipelinedConnection>,
    /// The deadline of a shutdown. The leader does not wait for later replies, even within the command time-out.
    shutdown_deadline: Option<MonotonicTime>,
    /// Whether the thread was panicking before it led: a guard that is dropped during a panic can make its thread the
    /// leader.
    was_panicking: bool,
    /// Whether the thread is a sender, which will lead again to read missing replies.
    sender_reads_on: bool,
}

impl<'a> Leadership<'a> {
    fn new(pipeline: &'a Pipeline, connection: Option<PipelinedConnection>) -> Self {
        Self {
            pipeline,
            connection,
            shutdown_deadline: None,
            was_panicking: sync::panicking(),
            sender_reads_on: false,
        }
    }

    fn with_shutdown_deadline(mut self, shutdown_deadline: Option<MonotonicTime>) -> Self {
        self.shutdown_deadline = shutdown_deadline;
        self
    }

    /// The deadline of requests that are written now, and of their replies.
    fn reply_deadline(&self) -> MonotonicTime {
        let deadline = MonotonicTime::now().after(self.pipeline.shared.command_timeout);
        self.shutdown_deadline
            .map_or(deadline, |shutdown| shutdown.min(deadline))
    }

    /// Writes and reads batches until `caller` has its outcomes or its deadline has passed.
    fn lead(&mut self, caller: &Arc<Caller>, deadline: MonotonicTime) {
        // If this thread panics, other leaders must not appoint its caller.
        let _leave_on_drop = LeaveOnDrop(caller);
        while !caller.is_over(deadline) {
            if self.read_before_write(Some(deadline)) || self.replace_if_old(Some(deadline)) {
                // The last replies may have taken a command time-out, so the loop checks the deadline again.
                continue;
            }
            let batch = self.next_batch();
            self.write_and_read(batch, deadline, Some(deadline));
        }
        // This caller has left, and the next leader would drop its requests.
        self.pipeline.withdraw_unsent(caller);
    }

    /// Writes and reads batches, until all requests have their replies, the connection fails, or callers wait for
    /// queued requests. In the last case, one of these callers becomes the leader, or [`Pipeline::write_due`] writes
    /// the requests: a slow reply must not delay the other pipelines of the node.
    fn run_maintenance(&mut self) {
        loop {
            if (self.read_before_write(None) || self.replace_if_old(None)) && self.is_awaited() {
                return;
            }
            let batch = self.next_batch();
            let unanswered = has_unanswered(self.connection.as_ref());
            let now = MonotonicTime::now();
            let deadline = now.after(self.pipeline.shared.connect_timeout);
            if batch.is_empty() && self.connection.is_none() {
                let must_repeat = self.pipeline.confirmed.lock().has_live(now);
                if !must_repeat || self.connect(batch, deadline).is_err() {
                    return;
                }
                continue;
            }
            if (batch.is_empty() && !unanswered) || !self.write_and_read(batch, deadline, None) {
                return;
            }
            if self.is_awaited() {
                return;
            }
        }
    }

    /// Writes one batch, and returns the socket. Returns `None` if there was nothing to write or the write failed: the
    /// requests then get the error.
    fn write_without_reading(&mut self) -> Option<SharedSocket> {
        let mut batch = self.next_batch();
        // A barrier ends only after all replies, so it is left in the queue for the background.
        let barriers = batch.extract_if(.., |request| request.is_barrier());
        let barriers: Vec<PendingRequest> = barriers.collect();
        if !barriers.is_empty() {
            self.pipeline.state.lock().awaited.extend(barriers);
        }
        if batch.is_empty() {
            return None;
        }
        let due = self.reply_deadline();
        let connection = self.connection.as_mut()?;
        if let Err(error) = connection.write(&self.pipeline.shared.context, batch, due) {
            self.lose_connection(&error);
            return None;
        }
        connection.leave_unread(due);
        Some(connection.socket())
    }

    fn is_half_read(&self) -> bool {
        let connection = self.connection.as_ref();
        connection.is_some_and(PipelinedConnection::is_half_read)
    }

    /// Whether a caller waits for a request that is not written.
    fn is_awaited(&self) -> bool {
        !self.pipeline.state.lock().awaited.is_empty()
    }

    /// Reads the missing replies of a leader that has left, until `until` at the latest. Then drops the connection if
    /// it is stale or suspect. Returns true if there was something to read or to drop.
    ///
    /// Called before a batch is taken: a reply may queue a release again, and this release has to go before an acquire
    /// of its key.
    fn read_before_write(&mut self, until: Option<MonotonicTime>) -> bool {
        let Some(connection) = &self.connection else {
            return false;
        };
        let is_stale = connection.is_stale();
        if !is_stale && !connection.is_half_read() {
            return false;
        }
        match self.read(until, self.reply_deadline()) {
            Ok(true) if is_stale => self.connection = None,
            Ok(_) => {}
            Err(error) => self.lose_connection(&error),
        }
        true
    }

    /// Replaces a connection that is older than `max_connection_age`. First reads its missing replies, until `until` at
    /// the latest. Keeps the connection if no other one can be opened soon. Returns false if the connection is not so
    /// old.
    fn replace_if_old(&mut self, until: Option<MonotonicTime>) -> bool {
        let connection = self.connection.as_ref();
        if !connection.is_some_and(PipelinedConnection::is_old) {
            return false;
        }
        match (
            self.read(until, self.reply_deadline()),
            &mut self.connection,
        ) {
            (Ok(true), Some(old)) => match self.pipeline.shared.connector.connect(REPLACE_WAIT) {
                Ok(new) => {
                    self.connection = Some(PipelinedConnection::new(new));
                    // The name of the server may lead to another server now.
                    self.pipeline
                        .repeat_confirmed(&mut self.pipeline.state.lock());
                }
                Err(_) => old.postpone_replacement(),
            },
            (Ok(_), _) => {}
            (Err(error), _) => self.lose_connection(&error),
        }
        true
    }

    /// Takes the next batch from the queues. Takes nothing if the batch would acquire a key whose release has no reply
    /// yet and may grant the key to another client: Redis would read the release and the acquire together, and notify
    /// the other client only after the acquire.
    fn next_batch(&mut self) -> Vec<PendingRequest> {
        let mut batch = self.empty_batch();
        let mut state = self.pipeline.state.lock();
        if self.connection.is_some() {
            state.reset_connect_pauses();
        }
        let mut keys_for_next_waiters = self
            .connection
            .iter()
            .flat_map(PipelinedConnection::keys_for_next_waiters);
        let at_a_time = self.pipeline.at_a_time;
        if !keys_for_next_waiters.any(|key| state.awaited.has_acquire_of(key, at_a_time)) {
            state.next_batch(at_a_time, &mut batch);
        }
        drop(state);
        // Without a connection, callers that leave withdraw their requests and learn that they were not sent.
        if self.connection.is_some() {
            batch.retain(PendingRequest::is_wanted);
        }
        batch
    }

    fn empty_batch(&mut self) -> Vec<PendingRequest> {
        let connection = self.connection.as_mut();
        connection.map_or_else(Vec::new, PipelinedConnection::empty_batch)
    }

    /// Appoints the first caller that waits for a request in flight or in the queue and can lead. If there is none,
    /// returns the locked state, and this thread still leads.
    fn appoint_next(&mut self) -> Option<MutexGuard<'a, PipelineState>> {
        loop {
            let mut state = self.pipeline.state.lock();
            let connection = self.connection.as_ref();
            let in_flight = connection.and_then(PipelinedConnection::next_leader);
            let next = in_flight.or_else(|| state.awaited.next_leader());
            let Some(next) = next.map(Arc::clone) else {
                return Some(state);
            };
            state.put_connection(self.connection.take());
            // The mutex is unlocked first, because the next leader locks it when it wakes.
            drop(state);
            if next.appoint() {
                return None;
            }
            // The appointed caller has left, so this thread still leads and takes the connection back.
            self.connection = self.pipeline.state.lock().take_connection();
        }
    }

    /// Writes one batch and reads its replies, until `until` at the latest. Connects by `deadline` if there is no
    /// connection. Returns false if the connection failed.
    fn write_and_read(
        &mut self,
        mut batch: Vec<PendingRequest>,
        deadline: MonotonicTime,
        until: Option<MonotonicTime>,
    ) -> bool {
        let barriers = batch.extract_if(.., |request| request.is_barrier());
        let barriers: Vec<PendingRequest> = barriers.collect();
        let result = self
            .exchange(batch, deadline, until)
            .inspect_err(|error| self.lose_connection(error));
        if !barriers.is_empty() {
            let mut state = self.pipeline.state.lock();
            for barrier in barriers {
                let next = match &result {
                    // Replies are missing, and a barrier ends only after the replies to all earlier requests.
                    Ok(false) => Next::RetryNow(barrier),
                    Ok(true) if barrier.is_flush() && state.has_refused_releases() => {
                        let message = format!(
                            "{} refuses releases; the event `release_delayed` has the reasons",
                            self.pipeline.shared.endpoint.address_of_server()
                        );
                        barrier.on_reply(Err(Error::new(ErrorKind::Unavailable, message)))
                    }
                    Ok(true) => barrier.on_reply(Ok(Reply::Done)),
                    Err(error) => {
                        barrier.on_connection_lost(error, error.kind() == ErrorKind::Unavailable)
                    }
                };
                state.apply(next);
            }
        }
        result.is_ok()
    }

    /// Writes a batch without barriers and reads its replies: see [`write_and_read`](Self::write_and_read). Returns
    /// false at `until` if replies are missing.
    fn exchange(
        &mut self,
        batch: Vec<PendingRequest>,
        deadline: MonotonicTime,
        until: Option<MonotonicTime>,
    ) -> Result<bool, Error> {
        let batch = match &self.connection {
            Some(_) => batch,
            None if batch.is_empty() => return Ok(true),
            None => self.connect(batch, deadline)?,
        };
        let due = self.reply_deadline();
        #[cfg(test)]
        let panics = {
            let mut keys = batch.iter().filter_map(|request| request.command.key());
            let mut panic_at = self.pipeline.panic_at.lock();
            panic_at.take_if(|key| keys.any(|it| it == key)).is_some()
        };
        if let Some(connection) = &mut self.connection {
            connection.write(&self.pipeline.shared.context, batch, due)?;
        }
        #[cfg(test)]
        assert!(!panics, "a test asked for this panic");
        self.read(until, due)
    }

    /// Connects. If that fails, all waiting callers get the error. But if only the leader had too little time to
    /// connect, only the leader gets the error, and the requests of the others stay queued.
    fn connect(
        &mut self,
        batch: Vec<PendingRequest>,
        deadline: MonotonicTime,
    ) -> Result<Vec<PendingRequest>, Error> {
        let shared = &*self.pipeline.shared;
        // Callers that leave while this thread connects withdraw their requests from `unsent`.
        {
            let mut state = self.pipeline.state.lock();
            state.leader_is_connected = false;
            state.unsent.extend(batch);
        }
        while self.connection.is_none() {
            if let Err(closed) = shared.endpoint.check_open() {
                self.refuse(&closed, false);
                return Err(closed);
            }
            let left = deadline.since(MonotonicTime::now());
            let timeout = left.min(shared.connect_timeout);
            match shared.connector.connect(timeout) {
                Ok(connection) => self.connection = Some(PipelinedConnection::new(connection)),
                Err(error) => {
                    let is_short_of_time = shared.endpoint.last_error().is_none()
                        && left < shared.connect_timeout / 2
                        && error.redirect().is_none();
                    self.refuse(&error, is_short_of_time);
                    return Err(error);
                }
            }
        }
        let mut batch = {
            let mut state = self.pipeline.state.lock();
            state.leader_is_connected = true;
            self.pipeline.repeat_confirmed(&mut state);
            state.take_unsent(self.pipeline.at_a_time)
        };
        // Callers may have left while this thread connected.
        batch.retain(PendingRequest::is_wanted);
        Ok(batch)
    }

    /// Completes all unwritten requests with the error, and reports queued releases as late. If the server is retired,
    /// each caller then sends its request to another server.
    fn refuse(&self, error: &Error, is_short_of_time: bool) {
        let mut state = self.pipeline.state.lock();
        let unsent = state.unsent.take_all();
        let waiting = state.awaited.take_all();
        for request in unsent.chain(waiting) {
            let next = if is_short_of_time {
                Next::RetryNow(request)
            } else if error.redirect().is_some() && request.completion.is_some() {
                request.on_reply(Err(error.clone()))
            } else {
                request.on_not_sent(error)
            };
            state.apply(next);
        }
        if !is_short_of_time {
            let now = MonotonicTime::now();
            state.report_all_late(error, now);
            state.back_off(now);
        }
    }

    /// Reads the replies to all requests in flight, and passes them to their callers. The replies are due at `due`, or
    /// earlier if a leader has left. Returns false at `until` if replies are missing; the next leader then reads on.
    fn read(&mut self, until: Option<MonotonicTime>, due: MonotonicTime) -> Result<bool, Error> {
        let connection = self
            .connection
            .as_mut()
            .expect("only a connected leader reads");
        let context = &self.pipeline.shared.context;
        let is_in_quorum = self.pipeline.shared.endpoint.data_check.is_some();
        let all = connection.read(context, until, due, &mut |next| match self
            .pipeline
            .reroute(next)
        {
            Next::Done => {}
            Next::Released(release) if is_in_quorum => drop(release),
            Next::Released(release) => self.pipeline.confirmed.lock().push(release),
            next => self.pipeline.state.lock().apply(next),
        })?;
        if all && !connection.is_usable() {
            self.connection = None;
        }
        Ok(all)
    }

    /// Closes the connection after an error. The callers of requests in flight get the error, releases are queued
    /// again, and acquires are undone.
    fn lose_connection(&mut self, error: &Error) {
        let Some(connection) = self.connection.take() else {
            return;
        };
        let in_flight = connection.abandon(&self.pipeline.shared.context, error);
        // After a time-out the server is slow, and a repeat would only wait longer.
        let may_retry = error.kind() == ErrorKind::Unavailable;
        let mut state = self.pipeline.state.lock();
        state.leader_is_connected = false;
        let waiting = state.awaited.take_all();
        for request in in_flight {
            let next = request.on_connection_lost(error, may_retry);
            state.apply(next);
        }
        state.awaited.extend(waiting);
        state.back_off(MonotonicTime::now());
    }
}

/// Calls [`Caller::leave`] when it is dropped.
struct LeaveOnDrop<'a>(&'a Caller);

impl Drop for LeaveOnDrop<'_> {
    fn drop(&mut self) {
        self.0.leave();
    }
}

/// Whether requests can be written now and their replies be read later.
fn is_free(connection: Option<&PipelinedConnection>) -> bool {
    connection.is_some_and(|it| it.is_fit() && !it.is_half_read()) && room_of(connection) > 0
}

/// Whether replies are missing on the connection.
fn has_unanswered(connection: Option<&PipelinedConnection>) -> bool {
    connection.is_some_and(|connection| connection.unanswered() > 0)
}

/// How many more bytes of releases a thread may write without waiting for replies.
fn room_of(connection: Option<&PipelinedConnection>) -> usize {
    connection
        .filter(|connection| connection.unanswered() < MAX_UNANSWERED)
        .map_or(0, |connection| {
            MAX_UNANSWERED_BYTES.saturating_sub(connection.unanswered_bytes())
        })
}

/// How soon the background has to work: at once, or after the pause between attempts to connect. Returns `Soon` while a
/// sender reads, because the sender requests maintenance when it stops.
fn urgency_of(state: &PipelineState) -> Urgency {
    if state.may_connect(MonotonicTime::now()) && !state.is_left_to_sender() {
        Urgency::Now
    } else {
        Urgency::Soon
    }
}

fn batch_given_up() -> Error {
    let message = "a panic has ended the connection of the request";
    Error::new(ErrorKind::Timeout, message)
}

impl Drop for Leadership<'_> {
    /// Appoints a caller that waits in the queue. If there is none, writes one batch of unawaited releases to the
    /// socket, and leaves the rest and the submitted requests to the background. After [`Pipeline::end`], closes the
    /// connection if submitted requests are in flight that no sender reads.
    fn drop(&mut self) {
        if sync::panicking() && !self.was_panicking {
            self.lose_connection(&batch_given_up());
        }
        let mut may_write = true;
        while let Some(mut state) = self.appoint_next() {
            let unanswered = self
                .connection
                .as_ref()
                .map_or(0, PipelinedConnection::unanswered);
            may_write &= self
                .connection
                .as_ref()
                .is_some_and(|connection| !connection.is_stale());
            let room = room_of(self.connection.as_ref());
            may_write &= room > 0;
            if may_write && state.has_unawaited() {
                may_write = false;
                // `appoint_next` has left the mutex locked, so callers cannot have queued requests since.
                let mut batch = self.empty_batch();
                state.next_releases(self.pipeline.at_a_time, room, &mut batch);
                drop(state);
                batch.retain(PendingRequest::is_wanted);
                let (context, due) = (&self.pipeline.shared.context, self.reply_deadline());
                let connection = self.connection.as_mut();
                let write = || connection.map_or(Ok(()), |it| it.write(context, batch, due));
                // If the write panics, the loop continues and passes the leadership on.
                match catch_unwind(AssertUnwindSafe(write)) {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => self.lose_connection(&error),
                    Err(_) => self.lose_connection(&batch_given_up()),
                }
                continue;
            }
            let is_waited_for = self
                .connection
                .as_ref()
                .is_some_and(PipelinedConnection::is_waited_for);
            if !self.is_half_read() {
                state.sender_reads_until = None;
            } else if self.sender_reads_on {
                state.sender_reads_until = Some(MonotonicTime::now().after(SENDER_TIMEOUT));
            }
            if state.has_ended && is_waited_for && !state.is_left_to_sender() {
                // The background has ended, so these replies would not be read.
                drop(state);
                self.lose_connection(&Error::new(ErrorKind::Shutdown, ""));
                continue;
            }
            state.put_connection(self.connection.take());
            state.is_led = false;
            if state.has_ended {
                state.refuse_submitted();
            }
            let is_urgent = state.is_ready() || is_waited_for || state.has_confirmed_to_repeat();
            let urgency = if is_urgent {
                Some(urgency_of(&state))
            } else {
                (state.has_work() || unanswered > 0).then_some(Urgency::Soon)
            };
            drop(state);
            if let Some(urgency) = urgency {
                self.pipeline.shared.reports.need_maintenance(urgency);
            }
            return;
        }
    }
}

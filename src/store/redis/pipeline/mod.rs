//! A pipeline: one connection and the queue of requests that share it (group commit).
//!
//! The first caller at an idle pipeline leads it: it writes a batch of what waits there, awaited requests first, reads the
//! answers, hands them out, and passes leadership on to the next waiting caller. One batch is in flight at a time,
//! and behind it only releases whose answers nobody waits for. A leader leaves at its own deadline, also with a batch in
//! flight: the next one reads the rest before it writes awaited requests. All about one key but its renewals goes
//! through one pipeline, so it is executed in the order it was written.
//!
//! Nothing is done under the state's mutex but moving values: all I/O is the leader's.

pub(crate) mod caller;
#[cfg_attr(all(test, shuttle), path = "connection/model.rs")]
pub(crate) mod connection;
#[cfg(test)]
#[cfg(shuttle)]
mod model;
mod queue;
mod releases;
pub(crate) mod request;
mod state;
#[cfg(all(test, feature = "__server_tests"))]
#[cfg(not(shuttle))]
mod tests;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use crate::error::{Error, ErrorKind};
use crate::store::command::{Command, Reply, Request};
use crate::store::redis::connection::Endpoint;
use crate::store::redis::pipeline::caller::{Call, Completion, Outcome, WaitEnd};
use crate::store::redis::pipeline::connection::{Answer, PipelinedConnection, Pool};
use crate::store::redis::pipeline::request::{Next, PendingRequest};
use crate::store::redis::pipeline::state::State;
use crate::store::redis::scripts::ScriptContext;
use crate::store::{DelayHook, MaintenanceHook, Urgency};
use crate::util::clock::MonotonicTime;
use crate::util::sync::{self, Mutex, MutexGuard};

/// How many awaited requests, and how many releases that nobody awaits, a pipeline of callers writes at a time: Redis
/// may run all that a connection has sent before it reads from the others.
pub(super) const MAX_BATCH: usize = if cfg!(all(test, shuttle)) { 2 } else { 128 };
/// The same of a pipeline for renewals. The watchdog asks for few at a time, unless they are late: a lock that is
/// lost is worse than a reply that comes some ms later.
pub(crate) const MAX_RENEWALS: usize = 4 * MAX_BATCH;
/// With this many unread answers to releases, threads leave further releases to the background: an awaited request
/// cannot overtake what is written.
const MAX_UNANSWERED: usize = if cfg!(all(test, shuttle)) { 2 } else { 64 };
/// As many bytes as threads write without waiting for an answer. They fit into the buffers of a socket, so that no drop
/// of a guard blocks while the server does not read.
const MAX_UNANSWERED_BYTES: usize = 32 * 1024;

/// What the pipelines of one client share.
pub(crate) struct Shared {
    pub(crate) pool: Pool,
    pub(crate) endpoint: Arc<Endpoint>,
    pub(crate) names: ScriptContext,
    pub(crate) connect_timeout: Duration,
    pub(crate) command_timeout: Duration,
    pub(crate) request_maintenance: MaintenanceHook,
    pub(crate) delays: Option<DelayHook>,
}

/// What a request has to wait for, the least first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Readiness {
    Idle,
    Unconnected,
    Busy,
}

pub(crate) struct Pipeline {
    shared: Arc<Shared>,
    /// Awaited requests written at a time, and as many releases.
    at_a_time: usize,
    state: Mutex<State>,
    #[cfg(test)]
    panic_next: std::sync::atomic::AtomicBool,
}

impl Pipeline {
    pub(crate) fn for_callers(shared: Arc<Shared>) -> Self {
        Self::new(shared, MAX_BATCH)
    }

    pub(crate) fn for_renewals(shared: Arc<Shared>) -> Self {
        Self::new(shared, MAX_RENEWALS)
    }

    fn new(shared: Arc<Shared>, at_a_time: usize) -> Self {
        Self {
            at_a_time,
            state: Mutex::new(State::new(shared.delays.clone())),
            shared,
            #[cfg(test)]
            panic_next: std::sync::atomic::AtomicBool::new(false),
        }
    }

    /// Carries out `requests` and fills in their outcomes.
    pub(crate) fn execute(&self, requests: &mut [&mut Request]) {
        let Some(deadline) = requests.iter().map(|request| request.deadline).max() else {
            return;
        };
        let is_last = |request: &&mut Request| matches!(request.command, Command::Flush { .. });
        let end = requests.iter().any(is_last).then_some(deadline);
        let call = Call::new(requests.len());
        let pending = requests.iter().enumerate().map(|(index, request)| {
            let completion = Completion::new(&call, index);
            self.request(request.command.clone(), Some(completion))
        });
        // Before the lock is taken.
        let pending: Vec<PendingRequest> = pending.collect();
        self.run_call(pending, &call, deadline, end);
        for (request, outcome) in requests.iter_mut().zip(call.take_outcomes()) {
            request.outcome = Some(outcome);
        }
    }

    /// Carries out one command.
    pub(crate) fn ask(&self, command: Command, deadline: MonotonicTime) -> Outcome {
        let call = Call::new(1);
        let request = self.request(command, Some(Completion::new(&call, 0)));
        self.run_call([request], &call, deadline, None);
        call.take_outcomes().next().expect("there is one for each")
    }

    fn request(&self, command: Command, completion: Option<Completion>) -> PendingRequest {
        PendingRequest::new(command, completion).tracked(self.shared.delays.as_ref())
    }

    /// Returns when `call` has its outcomes, or has left. A shutdown sets `end`: then the pipeline gives up its connection,
    /// too, even if other calls wait for answers on it.
    fn run_call(
        &self,
        requests: impl IntoIterator<Item = PendingRequest>,
        call: &Arc<Call>,
        deadline: MonotonicTime,
        end: Option<MonotonicTime>,
    ) {
        let leadership = {
            let mut state = self.state.lock();
            state.ask(requests);
            self.take_lead(&mut state)
        };
        match leadership {
            Some(leadership) => leadership.until(end).lead(call, deadline),
            None => self.wait_or_lead(call, deadline, end),
        }
        self.withdraw_unsent(call);
    }

    fn wait_or_lead(&self, call: &Arc<Call>, deadline: MonotonicTime, end: Option<MonotonicTime>) {
        while call.wait(deadline) == WaitEnd::Appointed {
            let connection = self.state.lock().connection.take();
            let leadership = Leadership::new(self, connection);
            leadership.until(end).lead(call, deadline);
        }
    }

    /// If no connection can be made, answers the requests of `call` that were not written: their outcome is known.
    /// Releases stay in the queue.
    fn withdraw_unsent(&self, call: &Arc<Call>) {
        if call.is_complete() {
            return;
        }
        let Some(error) = self.shared.endpoint.last_error() else {
            return;
        };
        let unsent = self.state.lock().withdraw(call);
        for completion in unsent.filter_map(|request| request.completion) {
            completion.give_up(error.clone());
        }
    }

    /// Writes a release without waiting for its answer, if the pipeline is idle and connected;
    /// otherwise leaves it to the leader, or to the background.
    pub(crate) fn post(&self, release: Command) {
        let Some(release) = PendingRequest::new(release, None).into_release(None) else {
            return;
        };
        let leadership = {
            let mut state = self.state.lock();
            // The background writes what the last leader left behind, and this release after it.
            let is_first = !state.is_ready();
            state.post(release);
            if state.led {
                return;
            }
            let has_room = room_of(state.connection.as_ref()) > 0;
            if is_first && has_room {
                self.take_lead(&mut state).ok_or(Urgency::Now)
            } else {
                Err(urgency_of(&state))
            }
        };
        match leadership {
            // Dropping it writes the batch.
            Ok(leadership) => drop(leadership),
            Err(urgency) => (self.shared.request_maintenance)(urgency),
        }
    }

    /// Sees to answers that are unanswered and to releases that are due. True if something is left.
    pub(crate) fn run_maintenance(&self) -> bool {
        let leadership = {
            let mut state = self.state.lock();
            let unanswered = state
                .connection
                .as_ref()
                .is_some_and(|connection| connection.unanswered() > 0);
            if state.led || !(unanswered || state.is_due(MonotonicTime::now())) {
                return state.led || state.has_work();
            }
            self.take_lead(&mut state)
        };
        if let Some(mut leadership) = leadership {
            leadership.run_maintenance();
        }
        let state = self.state.lock();
        state.led || state.has_work()
    }

    /// Reports late releases that still wait to be written as given up.
    pub(crate) fn end_delays(&self) {
        self.state.lock().end_delays();
    }

    /// Says how ready it is, having given up a connection that may have died with another one: to find that out
    /// would cost whoever asks next a time-out.
    pub(crate) fn readiness_without_stale(&self) -> Readiness {
        let mut state = self.state.lock();
        let suspect = state
            .connection
            .take_if(|connection| connection.is_suspect());
        let readiness = match (state.led, &state.connection) {
            (true, _) => Readiness::Busy,
            (_, Some(connection)) if connection.is_half_read() => Readiness::Busy,
            (false, None) => Readiness::Unconnected,
            (false, Some(_)) => Readiness::Idle,
        };
        drop(state);
        drop(suspect);
        readiness
    }

    /// How many releases are to be written again.
    pub(crate) fn retries(&self) -> usize {
        self.state.lock().failed()
    }

    fn take_lead(&self, state: &mut State) -> Option<Leadership<'_>> {
        if state.led {
            return None;
        }
        state.led = true;
        let connection = state.connection.take();
        Some(Leadership::new(self, connection))
    }
}

/// The right, and the duty, to do the pipeline's I/O. Dropped, also by a panic, it passes on.
struct Leadership<'a> {
    pipeline: &'a Pipeline,
    connection: Option<PipelinedConnection>,
    /// The deadline of a shutdown: answers that come later are given up, even within the command time-out.
    end: Option<MonotonicTime>,
    /// A guard dropped by a panic leads, too: that panic is not the pipeline's.
    was_panicking: bool,
}

impl<'a> Leadership<'a> {
    fn new(pipeline: &'a Pipeline, connection: Option<PipelinedConnection>) -> Self {
        Self {
            pipeline,
            connection,
            end: None,
            was_panicking: sync::panicking(),
        }
    }

    fn until(mut self, end: Option<MonotonicTime>) -> Self {
        self.end = end;
        self
    }

    /// The deadline of a request that is written now, and of its answers.
    fn answers_by(&self) -> MonotonicTime {
        let deadline = MonotonicTime::now().after(self.pipeline.shared.command_timeout);
        self.end.map_or(deadline, |end| end.min(deadline))
    }

    /// Leads until `call` has its outcomes or its deadline has passed.
    fn lead(&mut self, call: &Arc<Call>, deadline: MonotonicTime) {
        // By a panic, too: appointed then, it would neither lead nor pass it on.
        let _leaving = Leaving(call);
        while !call.is_over(deadline) {
            if self.read_before_write(Some(deadline)) {
                // That may have taken a command time-out: check the deadline again.
                continue;
            }
            let batch = self.next_batch();
            self.write_and_read(batch, deadline, Some(deadline));
        }
    }

    /// Writes and reads until nothing is queued or unanswered, the connection fails, or a caller comes
    /// who can lead in its stead.
    fn run_maintenance(&mut self) {
        loop {
            if self.read_before_write(None) && self.is_awaited() {
                return;
            }
            let batch = self.next_batch();
            let unanswered = self
                .connection
                .as_ref()
                .is_some_and(|connection| connection.unanswered() > 0);
            let deadline = MonotonicTime::now().after(self.pipeline.shared.connect_timeout);
            if (batch.is_empty() && !unanswered) || !self.write_and_read(batch, deadline, None) {
                return;
            }
            if self.is_awaited() {
                return;
            }
        }
    }

    /// Whether a caller waits for a request that is not written.
    fn is_awaited(&self) -> bool {
        self.pipeline.state.lock().awaited.first_caller().is_some()
    }

    /// Reads the rest of a batch whose leader has left, until `until` at most: one batch is in flight at a time. Drops a
    /// connection that may lead to the wrong server, or be dead, after reading the answers unanswered on it.
    /// Called before a batch is taken, so that a release without an answer goes before an acquire of its key.
    /// True if there was something to read or to drop.
    fn read_before_write(&mut self, until: Option<MonotonicTime>) -> bool {
        let Some(connection) = &self.connection else {
            return false;
        };
        let is_stale = connection.is_stale();
        if !is_stale && !connection.is_half_read() {
            return false;
        }
        match self.read(until, self.answers_by()) {
            Ok(true) if is_stale => self.connection = None,
            Ok(_) => {}
            Err(error) => self.lose_connection(&error),
        }
        true
    }

    /// Nothing, if it would ask for a key whose release is unanswered and for which others wait: Redis would
    /// read both together, and tell the next owner only after both.
    fn next_batch(&mut self) -> Vec<PendingRequest> {
        let mut batch = self.empty_batch();
        let mut state = self.pipeline.state.lock();
        if self.connection.is_some() {
            state.connected();
        }
        let mut passing_on = self
            .connection
            .iter()
            .flat_map(PipelinedConnection::passing_on);
        let at_a_time = self.pipeline.at_a_time;
        if !passing_on.any(|key| state.awaited.asks_for(key, at_a_time)) {
            state.next_batch(at_a_time, &mut batch);
        }
        drop(state);
        batch.retain(PendingRequest::is_wanted);
        batch
    }

    fn empty_batch(&mut self) -> Vec<PendingRequest> {
        let connection = self.connection.as_mut();
        connection.map_or_else(Vec::new, PipelinedConnection::empty_batch)
    }

    /// Appoints the first that waits, for what is in flight or to be written. Where nobody does, this leads on: returns
    /// the state, locked.
    fn hand_leadership_on(&mut self) -> Option<MutexGuard<'a, State>> {
        loop {
            let mut state = self.pipeline.state.lock();
            let connection = self.connection.as_ref();
            let in_flight = connection.and_then(PipelinedConnection::first_caller);
            let next = in_flight.or_else(|| state.awaited.first_caller());
            let Some(next) = next.map(Arc::clone) else {
                return Some(state);
            };
            state.connection = self.connection.take();
            // WaitEnd under the lock, which it takes first, it would go to sleep again for that.
            drop(state);
            if next.appoint() {
                return None;
            }
            // It has left just now. The pipeline is led, so nobody else has touched the connection.
            self.connection = self.pipeline.state.lock().connection.take();
        }
    }

    /// Writes one batch and reads its answers, until `until` at most; false if that failed and the rest should not be
    /// tried now. A connection has to be there by `deadline`.
    fn write_and_read(
        &mut self,
        mut batch: Vec<PendingRequest>,
        deadline: MonotonicTime,
        until: Option<MonotonicTime>,
    ) -> bool {
        let flushes: Vec<PendingRequest> =
            batch.extract_if(.., |request| request.is_flush()).collect();
        let result = if batch.is_empty() && self.connection.is_none() {
            Ok(true)
        } else {
            self.connect(batch, deadline)
                .and_then(|batch| {
                    let due = self.answers_by();
                    self.write(batch, due)?;
                    self.read(until, due)
                })
                .inspect_err(|error| self.lose_connection(error))
        };
        if !flushes.is_empty() {
            let mut state = self.pipeline.state.lock();
            for flush in flushes {
                let next = match &result {
                    // Answered once all that was written before it is.
                    Ok(false) => Next::Again(flush),
                    Ok(true) if state.has_refused_releases() => {
                        let message = "Redis refuses releases for now";
                        flush.answered(Err(Error::new(ErrorKind::Unavailable, message)))
                    }
                    Ok(true) => flush.answered(Ok(Reply::Done)),
                    Err(error) => flush.unanswered(error, error.kind() == ErrorKind::Unavailable),
                };
                state.apply(next);
            }
        }
        result.is_ok()
    }

    /// Makes sure of a connection. Without one everybody who waits is told, unless it was only the
    /// leader who could not wait for it.
    fn connect(
        &mut self,
        batch: Vec<PendingRequest>,
        deadline: MonotonicTime,
    ) -> Result<Vec<PendingRequest>, Error> {
        if self.connection.is_some() {
            return Ok(batch);
        }
        let shared = &*self.pipeline.shared;
        // Callers that leave meanwhile find their requests there.
        self.pipeline.state.lock().unsent.extend(batch);
        while self.connection.is_none() {
            if let Err(closed) = shared.endpoint.check_open() {
                self.refuse(&closed, false);
                return Err(closed);
            }
            let left = deadline.since(MonotonicTime::now());
            match shared.pool.get_timeout(left.min(shared.connect_timeout)) {
                Ok(mut connection) if connection.is_stale() => connection.discard(),
                Ok(connection) => self.connection = Some(PipelinedConnection::new(connection)),
                Err(timeout) => {
                    let known = shared.endpoint.last_error();
                    let in_a_hurry = known.is_none() && left < shared.connect_timeout / 2;
                    let error = known.unwrap_or_else(|| {
                        let message = "no connection in time";
                        Error::new(ErrorKind::Unavailable, message).with_source(timeout)
                    });
                    self.refuse(&error, in_a_hurry);
                    return Err(error);
                }
            }
        }
        let batch = self.pipeline.state.lock().unsent.take_all();
        Ok(batch.collect())
    }

    fn refuse(&self, error: &Error, in_a_hurry: bool) {
        let mut state = self.pipeline.state.lock();
        let unsent = state.unsent.take_all();
        let waiting = state.awaited.take_all();
        for request in unsent.chain(waiting) {
            let next = if in_a_hurry {
                Next::Again(request)
            } else {
                request.unsent(error)
            };
            state.apply(next);
        }
        if !in_a_hurry {
            let now = MonotonicTime::now();
            state.delay_all(error, now);
            state.back_off(now);
        }
    }

    fn write(&mut self, batch: Vec<PendingRequest>, deadline: MonotonicTime) -> Result<(), Error> {
        #[cfg(test)]
        let panic_now = self
            .pipeline
            .panic_next
            .swap(false, std::sync::atomic::Ordering::Relaxed);
        let connection = self
            .connection
            .as_mut()
            .expect("only a connected leader writes");
        if batch.is_empty() {
            connection.keep(batch);
            return Ok(());
        }
        let written = connection.write(&self.pipeline.shared.names, batch, deadline);
        #[cfg(test)]
        assert!(!panic_now, "a test asked for this panic");
        written
    }

    /// Reads the answers to what is in flight, and hands them out. They are due by `due`, or earlier if a leader has left.
    /// False if they are not all there by `until`: then the next leader goes on.
    fn read(&mut self, until: Option<MonotonicTime>, due: MonotonicTime) -> Result<bool, Error> {
        let connection = self
            .connection
            .as_mut()
            .expect("only a connected leader reads");
        let names = &self.pipeline.shared.names;
        let all = connection.read(names, until, due, &mut |request, answer| {
            let next = match answer {
                Answer::Outcome(outcome) => request.answered(outcome),
                Answer::OutcomeUnknown(error) => request.unanswered(&error, false),
            };
            if !matches!(next, Next::Finished) {
                self.pipeline.state.lock().apply(next);
            }
        })?;
        if all && !connection.is_usable() {
            self.connection = None;
        }
        Ok(all)
    }

    /// Gives the connection up: callers learn of it, releases are kept, acquires are undone.
    fn lose_connection(&mut self, error: &Error) {
        let Some(connection) = self.connection.take() else {
            return;
        };
        let in_flight = connection.abandon(&self.pipeline.shared.names);
        // A connection that was cut tells nothing about the server; one that timed out does.
        let again = error.kind() == ErrorKind::Unavailable;
        let mut state = self.pipeline.state.lock();
        let waiting = state.awaited.take_all();
        for request in in_flight {
            let next = request.unanswered(error, again);
            state.apply(next);
        }
        state.awaited.extend(waiting);
        state.back_off(MonotonicTime::now());
    }
}

/// The caller leaves when this is dropped.
struct Leaving<'a>(&'a Call);

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        self.0.leave();
    }
}

/// How many bytes of releases a thread may write that does not wait for the answers.
fn room_of(connection: Option<&PipelinedConnection>) -> usize {
    connection
        .filter(|connection| connection.unanswered() < MAX_UNANSWERED)
        .map_or(0, |connection| {
            MAX_UNANSWERED_BYTES.saturating_sub(connection.unanswered_bytes())
        })
}

/// How soon the background can write what is left: at once, or after a pause between attempts to connect.
fn urgency_of(state: &State) -> Urgency {
    if state.may_connect(MonotonicTime::now()) {
        Urgency::Now
    } else {
        Urgency::Soon
    }
}

fn given_up() -> Error {
    Error::new(ErrorKind::Timeout, "its batch was given up")
}

impl Drop for Leadership<'_> {
    /// Steps down: appoints a caller that waits in the queue. If there is none, it writes a batch of
    /// the releases that nobody waits for, and leaves the rest to the background.
    fn drop(&mut self) {
        if sync::panicking() && !self.was_panicking {
            self.lose_connection(&given_up());
        }
        let mut may_write = true;
        while let Some(mut state) = self.hand_leadership_on() {
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
            if may_write && state.has_posted() {
                may_write = false;
                // Under the same lock: nobody who waits has come in between.
                let mut batch = self.empty_batch();
                state.next_releases(self.pipeline.at_a_time, room, &mut batch);
                drop(state);
                let deadline = self.answers_by();
                batch.retain(PendingRequest::is_wanted);
                // Not even a panic in here may keep the leadership from passing on.
                match catch_unwind(AssertUnwindSafe(|| self.write(batch, deadline))) {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => self.lose_connection(&error),
                    Err(_) => self.lose_connection(&given_up()),
                }
                continue;
            }
            state.connection = self.connection.take();
            state.led = false;
            let urgency = if state.is_ready() {
                Some(urgency_of(&state))
            } else {
                (state.has_work() || unanswered > 0).then_some(Urgency::Soon)
            };
            drop(state);
            if let Some(urgency) = urgency {
                (self.pipeline.shared.request_maintenance)(urgency);
            }
            return;
        }
    }
}

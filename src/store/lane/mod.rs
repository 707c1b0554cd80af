//! A lane: one connection and the queue of requests that share it (group commit).
//!
//! The first caller at an idle lane leads it: it writes a batch of what waits there, awaited requests first, reads the
//! answers, hands them out, and passes leadership on to the next waiting caller. One batch is in flight at a time,
//! and behind it only releases whose answers nobody waits for. All about one key but its renewals goes
//! through one lane, so it is executed in the order it was written.
//!
//! Nothing is done under the state's mutex but moving values: all I/O is the leader's.

#[cfg(test)]
#[cfg(shuttle)]
mod model;
mod queue;
mod releases;
mod state;
#[cfg(test)]
#[cfg(not(shuttle))]
mod tests;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use crate::clock::Moment;
use crate::error::{Error, ErrorKind};
use crate::store::call::{Call, Outcome, Ticket, Woken};
use crate::store::command::{Command, Reply, Request};
use crate::store::connect::Endpoint;
use crate::store::lane::state::State;
use crate::store::link::{Answer, Link, Pool};
use crate::store::pending::{Next, Pending};
use crate::store::script::Names;
use crate::store::{Bell, Chore, DelayHook};
use crate::sync::{self, Mutex, MutexGuard};

/// How many awaited requests, and how many releases that nobody awaits, a lane of callers writes at a time: Redis
/// may run all that a connection has sent before it reads from the others.
pub(super) const MAX_BATCH: usize = if cfg!(all(test, shuttle)) { 2 } else { 128 };
/// The same of a lane for renewals. The watchdog asks for few at a time, unless they are late: a lock that is
/// lost is worse than a reply that comes some ms later.
pub(crate) const MAX_RENEWALS: usize = 4 * MAX_BATCH;
/// With this many unread answers to releases, threads leave further releases to the background: an awaited request
/// cannot overtake what is written.
const MAX_OWED: usize = if cfg!(all(test, shuttle)) { 2 } else { 64 };

/// What the lanes of one client share.
pub(crate) struct Common {
    pub(crate) pool: Pool,
    pub(crate) endpoint: Arc<Endpoint>,
    pub(crate) names: Names,
    pub(crate) connect_timeout: Duration,
    pub(crate) command_timeout: Duration,
    pub(crate) bell: Bell,
    pub(crate) delays: Option<DelayHook>,
}

/// What a request has to wait for, the least first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Readiness {
    Idle,
    Unconnected,
    Busy,
}

pub(crate) struct Lane {
    common: Arc<Common>,
    /// Awaited requests written at a time, and as many releases.
    at_a_time: usize,
    state: Mutex<State>,
    #[cfg(test)]
    panic_next: std::sync::atomic::AtomicBool,
}

impl Lane {
    pub(crate) fn for_callers(common: Arc<Common>) -> Self {
        Self::new(common, MAX_BATCH)
    }

    pub(crate) fn for_renewals(common: Arc<Common>) -> Self {
        Self::new(common, MAX_RENEWALS)
    }

    fn new(common: Arc<Common>, at_a_time: usize) -> Self {
        Self {
            at_a_time,
            state: Mutex::new(State::new(common.delays.clone())),
            common,
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
        let pendings = requests.iter().enumerate().map(|(index, request)| {
            let ticket = Ticket::new(&call, index);
            self.pending(request.command.clone(), Some(ticket))
        });
        // Before the lock is taken.
        let pendings: Vec<Pending> = pendings.collect();
        self.see_through(pendings, &call, deadline, end);
        for (request, outcome) in requests.iter_mut().zip(call.take_outcomes()) {
            request.outcome = Some(outcome);
        }
    }

    /// Carries out one command.
    pub(crate) fn ask(&self, command: Command, deadline: Moment) -> Outcome {
        let call = Call::new(1);
        let pending = self.pending(command, Some(Ticket::new(&call, 0)));
        self.see_through([pending], &call, deadline, None);
        call.take_outcomes().next().expect("there is one for each")
    }

    fn pending(&self, command: Command, ticket: Option<Ticket>) -> Pending {
        Pending::new(command, ticket).followed(self.common.delays.as_ref())
    }

    /// Returns when `call` has its outcomes, or has left. A shutdown sets `end`: then the lane gives up its connection,
    /// too, even if other calls wait for answers on it.
    fn see_through(
        &self,
        pendings: impl IntoIterator<Item = Pending>,
        call: &Arc<Call>,
        deadline: Moment,
        end: Option<Moment>,
    ) {
        let leadership = {
            let mut state = self.state.lock();
            state.ask(pendings);
            self.claim(&mut state)
        };
        match leadership {
            Some(leadership) => leadership.until(end).lead(call, deadline),
            None => self.follow(call, deadline, end),
        }
        self.withdraw_unsent(call);
    }

    fn follow(&self, call: &Arc<Call>, deadline: Moment, end: Option<Moment>) {
        while call.wait(deadline) == Woken::Appointed {
            let link = self.state.lock().link.take();
            let leadership = Leadership::new(self, link);
            leadership.until(end).lead(call, deadline);
        }
    }

    /// If no connection can be made, answers the requests of `call` that were not written: their outcome is known.
    /// Releases stay in the queue.
    fn withdraw_unsent(&self, call: &Arc<Call>) {
        if call.is_complete() {
            return;
        }
        let Some(error) = self.common.endpoint.last_error() else {
            return;
        };
        let unsent = self.state.lock().withdraw(call);
        for ticket in unsent.filter_map(|pending| pending.ticket) {
            ticket.give_up(error.clone());
        }
    }

    /// Writes a release without waiting for its answer, if the lane is idle and connected;
    /// otherwise leaves it to the leader, or to the background.
    pub(crate) fn post(&self, release: Command) {
        let Some(release) = Pending::new(release, None).into_release(None) else {
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
            let has_room = state
                .link
                .as_ref()
                .is_some_and(|link| link.owed() < MAX_OWED);
            if is_first && has_room {
                self.claim(&mut state).ok_or(Chore::Now)
            } else {
                Err(chore_of(&state))
            }
        };
        match leadership {
            // Dropping it writes the batch.
            Ok(leadership) => drop(leadership),
            Err(chore) => (self.common.bell)(chore),
        }
    }

    /// Sees to answers that are owed and to releases that are due. True if something is left.
    pub(crate) fn settle(&self) -> bool {
        let leadership = {
            let mut state = self.state.lock();
            let owed = state.link.as_ref().is_some_and(|link| link.owed() > 0);
            if state.led || !(owed || state.is_due(Moment::now())) {
                return state.led || state.has_work();
            }
            self.claim(&mut state)
        };
        if let Some(mut leadership) = leadership {
            leadership.settle();
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
    pub(crate) fn get_ready(&self) -> Readiness {
        let mut state = self.state.lock();
        let suspect = state.link.take_if(|link| link.is_suspect());
        let readiness = match (state.led, &state.link) {
            (true, _) => Readiness::Busy,
            (false, None) => Readiness::Unconnected,
            (false, Some(_)) => Readiness::Idle,
        };
        drop(state);
        drop(suspect);
        readiness
    }

    /// How many releases are to be written again.
    pub(crate) fn debts(&self) -> usize {
        self.state.lock().failed()
    }

    fn claim(&self, state: &mut State) -> Option<Leadership<'_>> {
        if state.led {
            return None;
        }
        state.led = true;
        let link = state.link.take();
        Some(Leadership::new(self, link))
    }
}

/// The right, and the duty, to do the lane's I/O. Dropped, also by a panic, it passes on.
struct Leadership<'a> {
    lane: &'a Lane,
    link: Option<Link>,
    /// The deadline of a shutdown: answers that come later are given up, even within the command time-out.
    end: Option<Moment>,
    /// A guard dropped by a panic leads, too: that panic is not the lane's.
    was_panicking: bool,
}

impl<'a> Leadership<'a> {
    fn new(lane: &'a Lane, link: Option<Link>) -> Self {
        Self {
            lane,
            link,
            end: None,
            was_panicking: sync::panicking(),
        }
    }

    fn until(mut self, end: Option<Moment>) -> Self {
        self.end = end;
        self
    }

    /// The deadline of a request that is written now, and of its answers.
    fn answers_by(&self) -> Moment {
        let deadline = Moment::now().after(self.lane.common.command_timeout);
        self.end.map_or(deadline, |end| end.min(deadline))
    }

    /// Leads until `call` has its outcomes or its deadline has passed.
    fn lead(&mut self, call: &Arc<Call>, deadline: Moment) {
        // By a panic, too: appointed then, it would neither lead nor pass it on.
        let _leaving = Leaving(call);
        while !call.is_over(deadline) {
            if self.drop_stale_link() {
                // That may have taken a command time-out: check the deadline again.
                continue;
            }
            let batch = self.next_batch();
            self.exchange(batch, deadline);
        }
    }

    /// Writes and reads until nothing is queued or owed, the connection fails, or a caller comes
    /// who can lead in its stead.
    fn settle(&mut self) {
        loop {
            self.drop_stale_link();
            let batch = self.next_batch();
            let owed = self.link.as_ref().is_some_and(|link| link.owed() > 0);
            let deadline = Moment::now().after(self.lane.common.connect_timeout);
            if (batch.is_empty() && !owed) || !self.exchange(batch, deadline) {
                return;
            }
            if self.lane.state.lock().awaited.first_caller().is_some() {
                return;
            }
        }
    }

    /// Drops a connection that may lead to the wrong server, or be dead, after reading the answers owed on it.
    /// Called before a batch is taken, so that a release without an answer goes before an acquire of its key.
    /// True if there was one.
    fn drop_stale_link(&mut self) -> bool {
        let is_stale = self.link.as_ref().is_some_and(Link::is_stale);
        if is_stale {
            let deadline = self.answers_by();
            if let Err(error) = self.read(deadline) {
                self.lose_link(&error);
            }
            self.link = None;
        }
        is_stale
    }

    /// Nothing, if it would ask for a key whose release is unanswered and for which others wait: Redis would
    /// read both together, and tell the next owner only after both.
    fn next_batch(&mut self) -> Vec<Pending> {
        let mut batch = self.empty_batch();
        let mut state = self.lane.state.lock();
        if self.link.is_some() {
            state.connected();
        }
        let mut passing_on = self.link.iter().flat_map(Link::passing_on);
        let at_a_time = self.lane.at_a_time;
        if !passing_on.any(|key| state.awaited.asks_for(key, at_a_time)) {
            state.next_batch(at_a_time, &mut batch);
        }
        drop(state);
        batch.retain(Pending::is_wanted);
        batch
    }

    fn empty_batch(&mut self) -> Vec<Pending> {
        let link = self.link.as_mut();
        link.map_or_else(Vec::new, Link::empty_batch)
    }

    /// Appoints the first that waits. Where nobody does, this leads on: returns the state, locked.
    fn pass_on(&mut self) -> Option<MutexGuard<'a, State>> {
        loop {
            let mut state = self.lane.state.lock();
            let Some(next) = state.awaited.first_caller().map(Arc::clone) else {
                return Some(state);
            };
            state.link = self.link.take();
            // Woken under the lock, which it takes first, it would go to sleep again for that.
            drop(state);
            if next.appoint() {
                return None;
            }
            // It has left just now. The lane is led, so nobody else has touched the link.
            self.link = self.lane.state.lock().link.take();
        }
    }

    /// Carries out one batch; false if that failed and the rest should not be tried now.
    fn exchange(&mut self, mut batch: Vec<Pending>, deadline: Moment) -> bool {
        let flushes: Vec<Pending> = batch.extract_if(.., |pending| pending.is_flush()).collect();
        let result = if batch.is_empty() && self.link.is_none() {
            Ok(())
        } else {
            self.connect(batch, deadline)
                .and_then(|batch| {
                    let deadline = self.answers_by();
                    self.write(batch, deadline)?;
                    self.read(deadline)
                })
                .inspect_err(|error| self.lose_link(error))
        };
        if !flushes.is_empty() {
            let mut state = self.lane.state.lock();
            for flush in flushes {
                let next = match &result {
                    Ok(()) if state.owes_releases() => {
                        let message = "Redis refuses releases for now";
                        flush.answered(Err(Error::new(ErrorKind::Unavailable, message)))
                    }
                    Ok(()) => flush.answered(Ok(Reply::Done)),
                    Err(error) => flush.unanswered(error, error.kind() == ErrorKind::Unavailable),
                };
                state.settle(next);
            }
        }
        result.is_ok()
    }

    /// Makes sure of a connection. Without one everybody who waits is told, unless it was only the
    /// leader who could not wait for it.
    fn connect(&mut self, batch: Vec<Pending>, deadline: Moment) -> Result<Vec<Pending>, Error> {
        if self.link.is_some() {
            return Ok(batch);
        }
        let common = &*self.lane.common;
        // Callers that leave meanwhile find their requests there.
        self.lane.state.lock().unsent.extend(batch);
        while self.link.is_none() {
            let left = deadline.since(Moment::now());
            match common.pool.get_timeout(left.min(common.connect_timeout)) {
                Ok(mut wire) if wire.is_stale() => wire.discard(),
                Ok(wire) => self.link = Some(Link::new(wire)),
                Err(timeout) => {
                    let known = common.endpoint.last_error();
                    let in_a_hurry = known.is_none() && left < common.connect_timeout / 2;
                    let error = known.unwrap_or_else(|| {
                        let message = "no connection in time";
                        Error::new(ErrorKind::Unavailable, message).with_source(timeout)
                    });
                    self.refuse(&error, in_a_hurry);
                    return Err(error);
                }
            }
        }
        let batch = self.lane.state.lock().unsent.take_all();
        Ok(batch.collect())
    }

    fn refuse(&self, error: &Error, in_a_hurry: bool) {
        let mut state = self.lane.state.lock();
        let unsent = state.unsent.take_all();
        let waiting = state.awaited.take_all();
        for pending in unsent.chain(waiting) {
            let next = if in_a_hurry {
                Next::Again(pending)
            } else {
                pending.unsent(error)
            };
            state.settle(next);
        }
        if !in_a_hurry {
            let now = Moment::now();
            state.delay_all(error, now);
            state.back_off(now);
        }
    }

    fn write(&mut self, batch: Vec<Pending>, deadline: Moment) -> Result<(), Error> {
        #[cfg(test)]
        let panic_now = self
            .lane
            .panic_next
            .swap(false, std::sync::atomic::Ordering::Relaxed);
        let link = self.link.as_mut().expect("only a connected leader writes");
        if batch.is_empty() {
            link.keep(batch);
            return Ok(());
        }
        let written = link.write(&self.lane.common.names, batch, deadline);
        #[cfg(test)]
        assert!(!panic_now, "a test asked for this panic");
        written
    }

    fn read(&mut self, deadline: Moment) -> Result<(), Error> {
        let link = self.link.as_mut().expect("only a connected leader reads");
        let names = &self.lane.common.names;
        link.read(names, deadline, &mut |pending, answer| {
            let next = match answer {
                Answer::Outcome(outcome) => pending.answered(outcome),
                Answer::Doubtful(error) => pending.unanswered(&error, false),
            };
            if !matches!(next, Next::Finished) {
                self.lane.state.lock().settle(next);
            }
        })?;
        if !link.is_usable() {
            self.link = None;
        }
        Ok(())
    }

    /// Gives the connection up: callers learn of it, releases are kept, acquires are undone.
    fn lose_link(&mut self, error: &Error) {
        let Some(link) = self.link.take() else { return };
        let in_flight = link.abandon(&self.lane.common.names);
        // A connection that was cut tells nothing about the server; one that timed out does.
        let again = error.kind() == ErrorKind::Unavailable;
        let mut state = self.lane.state.lock();
        let waiting = state.awaited.take_all();
        for pending in in_flight {
            let next = pending.unanswered(error, again);
            state.settle(next);
        }
        state.awaited.extend(waiting);
        state.back_off(Moment::now());
    }
}

/// The caller leaves when this is dropped.
struct Leaving<'a>(&'a Call);

impl Drop for Leaving<'_> {
    fn drop(&mut self) {
        self.0.leave();
    }
}

/// How soon the background can write what is left: at once, or after a pause between attempts to connect.
fn chore_of(state: &State) -> Chore {
    if state.may_connect(Moment::now()) {
        Chore::Now
    } else {
        Chore::Soon
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
            self.lose_link(&given_up());
        }
        let mut may_write = true;
        while let Some(mut state) = self.pass_on() {
            let owed = self.link.as_ref().map_or(0, Link::owed);
            may_write &= self.link.as_ref().is_some_and(|link| !link.is_stale()) && owed < MAX_OWED;
            if may_write && state.has_posted() {
                may_write = false;
                // Under the same lock: nobody who waits has come in between.
                let mut batch = self.empty_batch();
                state.next_batch(self.lane.at_a_time, &mut batch);
                drop(state);
                let deadline = self.answers_by();
                batch.retain(Pending::is_wanted);
                // Not even a panic in here may keep the leadership from passing on.
                match catch_unwind(AssertUnwindSafe(|| self.write(batch, deadline))) {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => self.lose_link(&error),
                    Err(_) => self.lose_link(&given_up()),
                }
                continue;
            }
            state.link = self.link.take();
            state.led = false;
            let chore = if state.is_ready() {
                Some(chore_of(&state))
            } else {
                (state.has_work() || owed > 0).then_some(Chore::Soon)
            };
            drop(state);
            if let Some(chore) = chore {
                (self.lane.common.bell)(chore);
            }
            return;
        }
    }
}

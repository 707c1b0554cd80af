//! The outcomes of requests, for the caller that waits for them.
//!
//! A store has a [`Completion`] for each request, and sets the request's outcome there. There are two kinds of callers:
//!
//! - A caller of `Store::execute` waits for all of its requests. While it waits, another caller may make it the leader
//!   of the pipeline with these requests.
//! - A caller of `Store::submit` ([`Submitted`]) may have requests on several servers. It never leads a pipeline, and
//!   continues as soon as it has enough outcomes.

use std::sync::Arc;

use smallvec::{SmallVec, smallvec};

use crate::command::Outcome;
use crate::report::error::{Error, ErrorKind};
use crate::util::clock::MonotonicTime;
use crate::util::sync::{Mutex, MutexGuard, Thread, Yields, park_timeout, this_thread, yield_now};

/// A vector that holds one element without an allocation: most callers have one request, and most batches one command.
pub type Few<T> = SmallVec<[T; 1]>;

/// A thread that waits for the outcomes of its requests.
pub struct Caller {
    thread: Thread,
    /// Whether the thread can lead a pipeline while it waits.
    can_lead: bool,
    state: Mutex<CallerState>,
}

struct CallerState {
    outcomes: Few<Option<Outcome>>,
    missing: usize,
    /// Whether the caller has stopped waiting. It gets no more outcomes, and the store undoes acquires that are granted
    /// later.
    has_left: bool,
    appointed: bool,
    /// Whether the thread is parked or about to park, and another thread has to unpark it.
    asleep: bool,
}

impl CallerState {
    fn is_waiting(&self) -> bool {
        !self.has_left && self.missing > 0
    }
}

/// The reason why a wait ended.
#[derive(Debug, PartialEq, Eq)]
pub enum WaitEnd {
    /// All outcomes have come.
    Complete,
    /// The caller leads the pipeline now.
    Appointed,
    /// The deadline passed and the caller has left: it gets no more outcomes.
    Left,
}

impl Caller {
    /// A caller that may be appointed to lead the pipeline with its requests.
    pub fn new(requests: usize) -> Arc<Self> {
        Self::of(requests, true)
    }

    fn of(requests: usize, can_lead: bool) -> Arc<Self> {
        Arc::new(Self {
            thread: this_thread(),
            can_lead,
            state: Mutex::new(CallerState {
                outcomes: smallvec![None; requests],
                missing: requests,
                has_left: false,
                appointed: false,
                asleep: false,
            }),
        })
    }

    /// Parks the thread until all outcomes have come, until this caller is appointed to lead the pipeline, or until
    /// `deadline`.
    pub fn wait(&self, deadline: MonotonicTime) -> WaitEnd {
        let mut yields = Yields::new();
        loop {
            let mut state = self.state.lock();
            // This check comes first: an appointed caller has to lead, or to appoint another caller.
            if std::mem::take(&mut state.appointed) {
                return WaitEnd::Appointed;
            }
            if state.missing == 0 {
                return WaitEnd::Complete;
            }
            let now = MonotonicTime::now();
            let left = deadline.since(now);
            if left.is_zero() {
                state.has_left = true;
                return WaitEnd::Left;
            }
            if yields.should_yield(now) {
                drop(state);
                yield_now();
                continue;
            }
            state.asleep = true;
            drop(state);
            // Returns at once if the thread was unparked before. May also wake spuriously.
            park_timeout(left);
        }
    }

    /// Parks the thread until `is_enough` returns true for the outcomes, and then returns true. Returns false at
    /// `deadline`, or if all outcomes have come and are not enough.
    fn wait_until(
        &self,
        deadline: MonotonicTime,
        is_enough: impl Fn(&[Option<Outcome>]) -> bool,
    ) -> bool {
        loop {
            let mut state = self.state.lock();
            state.asleep = false;
            if is_enough(&state.outcomes) {
                return true;
            }
            let left = deadline.since(MonotonicTime::now());
            if state.missing == 0 || left.is_zero() {
                return false;
            }
            state.asleep = true;
            drop(state);
            park_timeout(left);
        }
    }

    /// Whether a caller that leads can stop, because all outcomes have come or the deadline has passed. After the
    /// deadline, the caller gets no more outcomes.
    pub fn is_over(&self, deadline: MonotonicTime) -> bool {
        let mut state = self.state.lock();
        if state.missing > 0 && MonotonicTime::now() >= deadline {
            state.has_left = true;
        }
        state.missing == 0 || state.has_left
    }

    pub fn is_complete(&self) -> bool {
        self.state.lock().missing == 0
    }

    /// Ends the wait: the caller gets no more outcomes and cannot be appointed.
    pub fn leave(&self) {
        self.state.lock().has_left = true;
    }

    /// Makes the caller lead the pipeline, and unparks it. Returns false if the caller does not wait any more.
    pub fn appoint(&self) -> bool {
        let mut state = self.state.lock();
        if !state.is_waiting() {
            return false;
        }
        state.appointed = true;
        self.wake(state);
        true
    }

    /// Unparks the thread, but only if it is parked. Otherwise the thread's next park would return early, even in the
    /// user's code. Unlocks the mutex first, since the woken thread locks it next.
    fn wake(&self, mut state: MutexGuard<'_, CallerState>) {
        let was_asleep = std::mem::take(&mut state.asleep);
        drop(state);
        if was_asleep {
            self.thread.unpark();
        }
    }

    /// Takes the outcomes. The outcome of a request that has none is a time-out.
    pub fn take_outcomes(&self) -> impl Iterator<Item = Outcome> + use<> {
        let outcomes = std::mem::take(&mut self.state.lock().outcomes);
        let timed_out = || Err(Error::new(ErrorKind::Timeout, ""));
        outcomes
            .into_iter()
            .map(move |outcome| outcome.unwrap_or_else(timed_out))
    }

    fn complete(&self, index: usize, outcome: Outcome) -> Result<(), Outcome> {
        let mut state = self.state.lock();
        if state.has_left {
            return Err(outcome);
        }
        state.outcomes[index] = Some(outcome);
        state.missing -= 1;
        // A caller that does not lead may continue before it has all outcomes.
        if state.missing == 0 || !self.can_lead {
            self.wake(state);
        }
        Ok(())
    }
}

/// The caller's side of submitted requests, which may go to several stores. After the drop of this value, the stores
/// undo acquires that they grant later.
pub struct Submitted(Arc<Caller>);

impl Submitted {
    /// Makes a completion for each of `requests` requests. Only the thread that calls this may wait for them.
    pub fn new(requests: usize) -> (Self, Vec<Completion>) {
        let caller = Caller::of(requests, false);
        let completions = (0..requests).map(|index| Completion::new(&caller, index));
        let completions = completions.collect();
        (Self(caller), completions)
    }

    /// Waits until `is_enough` returns true for the outcomes so far, and then returns true. Returns false at
    /// `deadline`, or if all outcomes have come and are not enough. `is_enough` gets the outcomes in the order of the
    /// completions, and must lock no mutex.
    pub fn wait(
        &self,
        deadline: MonotonicTime,
        is_enough: impl Fn(&[Option<Outcome>]) -> bool,
    ) -> bool {
        self.0.wait_until(deadline, is_enough)
    }

    /// Whether all outcomes have come.
    pub fn is_complete(&self) -> bool {
        self.0.is_complete()
    }

    /// The outcomes so far.
    #[cfg(test)]
    #[cfg(feature = "__server_tests")]
    #[cfg(not(shuttle))]
    pub fn outcomes(&self) -> Vec<Option<Outcome>> {
        self.0.state.lock().outcomes.to_vec()
    }

    /// Ends the wait, and returns the outcomes until now. The caller has to release the grants among them. The store
    /// undoes acquires that it grants later.
    pub fn leave(self) -> Vec<Option<Outcome>> {
        let mut state = self.0.state.lock();
        state.has_left = true;
        std::mem::take(&mut state.outcomes).into_vec()
    }
}

impl Drop for Submitted {
    fn drop(&mut self) {
        self.0.leave();
    }
}

/// The right to set the outcome of one request. A drop without an outcome, as in a panic, sets a time-out, so the
/// caller does not wait in vain.
pub struct Completion {
    caller: Arc<Caller>,
    index: usize,
    used: bool,
}

impl Completion {
    pub fn new(caller: &Arc<Caller>, index: usize) -> Self {
        Self {
            caller: Arc::clone(caller),
            index,
            used: false,
        }
    }

    /// Sets the outcome. Returns the outcome as an error if the caller has left.
    pub fn complete(mut self, outcome: Outcome) -> Result<(), Outcome> {
        self.used = true;
        self.caller.complete(self.index, outcome)
    }

    /// Sets the error as the outcome, even after the caller has left: the caller may take its outcomes later.
    pub fn give_up(mut self, error: Error) {
        self.used = true;
        self.caller.state.lock().outcomes[self.index] = Some(Err(error));
    }

    pub fn is_waited_for(&self) -> bool {
        self.caller.state.lock().is_waiting()
    }

    /// The caller, if it waits and can be appointed to lead the pipeline.
    pub fn next_leader(&self) -> Option<&Arc<Caller>> {
        (self.caller.can_lead && self.is_waited_for()).then_some(&self.caller)
    }

    pub fn is_of(&self, caller: &Arc<Caller>) -> bool {
        Arc::ptr_eq(&self.caller, caller)
    }
}

impl Drop for Completion {
    fn drop(&mut self) {
        if !self.used {
            let error = Error::new(ErrorKind::Timeout, "the request was abandoned");
            let _ = self.caller.complete(self.index, Err(error));
        }
    }
}

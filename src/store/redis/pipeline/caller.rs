//! Where one caller waits for the outcomes of its requests, and may be asked to lead the pipeline.

use std::sync::Arc;

use smallvec::{SmallVec, smallvec};

use crate::error::{Error, ErrorKind};
use crate::store::command::Reply;
use crate::util::clock::MonotonicTime;
use crate::util::sync::{Mutex, MutexGuard, Thread, park_timeout, this_thread};

pub(crate) type Outcome = Result<Reply, Error>;

/// The requests of one `execute` on one pipeline, of the thread that made it.
pub(crate) struct Call {
    thread: Thread,
    state: Mutex<State>,
}

/// Room for one, which is the rule: a call has one request, a batch of an idle pipeline one command.
pub(crate) type Few<T> = SmallVec<[T; 1]>;

struct State {
    outcomes: Few<Option<Outcome>>,
    missing: usize,
    appointed: bool,
    left: bool,
    /// To be woken, and nobody has set about that yet.
    asleep: bool,
}

impl State {
    fn is_waiting(&self) -> bool {
        !self.left && self.missing > 0
    }
}

/// Why a wait ended.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum WaitEnd {
    /// All outcomes are there.
    Complete,
    /// Leadership of the pipeline is this caller's now.
    Appointed,
    /// The deadline passed; the caller has left, what comes in now is not its own any more.
    Left,
}

impl Call {
    pub(crate) fn new(requests: usize) -> Arc<Self> {
        Arc::new(Self {
            thread: this_thread(),
            state: Mutex::new(State {
                outcomes: smallvec![None; requests],
                missing: requests,
                appointed: false,
                left: false,
                asleep: false,
            }),
        })
    }

    pub(crate) fn wait(&self, deadline: MonotonicTime) -> WaitEnd {
        loop {
            let mut state = self.state.lock();
            // Before anything else: whoever is appointed has to lead or to pass it on.
            if std::mem::take(&mut state.appointed) {
                return WaitEnd::Appointed;
            }
            if state.missing == 0 {
                return WaitEnd::Complete;
            }
            let left = deadline.since(MonotonicTime::now());
            if left.is_zero() {
                state.left = true;
                return WaitEnd::Left;
            }
            state.asleep = true;
            drop(state);
            // A wake-up that comes before it is kept. May end for any reason or none.
            park_timeout(left);
        }
    }

    /// Ends the wait of a caller that leads: true when it is over, because all outcomes are there
    /// or because the deadline passed and the caller has left.
    pub(crate) fn is_over(&self, deadline: MonotonicTime) -> bool {
        let mut state = self.state.lock();
        if state.missing > 0 && MonotonicTime::now() >= deadline {
            state.left = true;
        }
        state.missing == 0 || state.left
    }

    pub(crate) fn is_complete(&self) -> bool {
        self.state.lock().missing == 0
    }

    /// What comes in from now on is not the caller's own any more, and it cannot be appointed.
    pub(crate) fn leave(&self) {
        self.state.lock().left = true;
    }

    /// Asks the caller to lead the pipeline; false if it has left.
    pub(crate) fn appoint(&self) -> bool {
        let mut state = self.state.lock();
        if !state.is_waiting() {
            return false;
        }
        state.appointed = true;
        self.wake(state);
        true
    }

    /// Wakes the caller if it sleeps: a wake-up for one that does not would be kept for whatever it sleeps
    /// for next, and that may be its own affair. Not under the lock: it would go to sleep again for that.
    fn wake(&self, mut state: MutexGuard<'_, State>) {
        let was_asleep = std::mem::take(&mut state.asleep);
        drop(state);
        if was_asleep {
            self.thread.unpark();
        }
    }

    /// The outcomes, those that never came as time-outs.
    pub(crate) fn take_outcomes(&self) -> impl Iterator<Item = Outcome> + use<> {
        let outcomes = std::mem::take(&mut self.state.lock().outcomes);
        let never_came = || Err(Error::new(ErrorKind::Timeout, ""));
        outcomes
            .into_iter()
            .map(move |outcome| outcome.unwrap_or_else(never_came))
    }

    fn complete(&self, index: usize, outcome: Outcome) -> Result<(), Outcome> {
        let mut state = self.state.lock();
        if state.left {
            return Err(outcome);
        }
        state.outcomes[index] = Some(outcome);
        state.missing -= 1;
        if state.missing == 0 {
            self.wake(state);
        }
        Ok(())
    }
}

/// The right to complete one request of a call. Dropped without an outcome it tells the caller that
/// none will come, so that nobody waits for what a panic has swept away.
pub(crate) struct Completion {
    call: Arc<Call>,
    index: usize,
    used: bool,
}

impl Completion {
    pub(crate) fn new(call: &Arc<Call>, index: usize) -> Self {
        Self {
            call: Arc::clone(call),
            index,
            used: false,
        }
    }

    /// Hands the outcome to the caller, or back if the caller has left.
    pub(crate) fn complete(mut self, outcome: Outcome) -> Result<(), Outcome> {
        self.used = true;
        self.call.complete(self.index, outcome)
    }

    /// Sets the error as the outcome, also for a caller that no longer waits but still reads its outcomes.
    pub(crate) fn give_up(mut self, error: Error) {
        self.used = true;
        self.call.state.lock().outcomes[self.index] = Some(Err(error));
    }

    pub(crate) fn is_waited_for(&self) -> bool {
        self.call.state.lock().is_waiting()
    }

    pub(crate) fn call(&self) -> &Arc<Call> {
        &self.call
    }
}

impl Drop for Completion {
    fn drop(&mut self) {
        if !self.used {
            let error = Error::new(ErrorKind::Timeout, "the request was given up");
            let _ = self.call.complete(self.index, Err(error));
        }
    }
}

//! Outages of the store in memory, for tests: requests fail or hang, notifications are lost, and releases wait until
//! the outage ends.

use parking_lot::{Condvar, Mutex};

use crate::command::{Command, Release};
use crate::report::error::{Error, ErrorKind};
use crate::store::Reports;
use crate::store::completion::Completion;
use crate::store::late_release::ReleaseTracker;
use crate::util::clock::{Clock, MonotonicTime};
use crate::util::id::HolderId;

#[derive(Clone, Copy)]
pub enum Mode {
    /// Each request fails at once with an error of this kind.
    Fails(ErrorKind),
    /// Requests get no reply.
    Hangs,
}

/// A release that waits for the end of an outage.
pub struct PendingRelease {
    holder: HolderId,
    release: Release,
    /// Reports to a quorum how the release ends. Set if a guard held the lease.
    tracker: Option<ReleaseTracker>,
}

impl PendingRelease {
    /// Makes a pending release, and reports it as late because of `error`.
    pub fn new(holder: &HolderId, release: Release, error: &Error, reports: &Reports) -> Self {
        let mut tracker = ReleaseTracker::new(reports, &release, false);
        if let Some(tracker) = &mut tracker {
            tracker.report_late(error);
        }
        Self {
            holder: holder.clone(),
            release,
            tracker,
        }
    }

    /// Carries the release out, and reports to a quorum that it is done. Reports no loss, as after a repeated release.
    pub fn carry_out(self, release: impl FnOnce(&HolderId, &Command)) {
        release(&self.holder, &Command::Release(self.release));
        if let Some(tracker) = self.tracker {
            tracker.confirm(None, false);
        }
    }
}

#[derive(Default)]
pub struct Outage {
    state: Mutex<State>,
    /// Wakes waiting threads when the mode changes, the clock is moved, or a pending release ends.
    changed: Condvar,
}

#[derive(Default)]
struct State {
    mode: Option<Mode>,
    pending: Vec<PendingRelease>,
    /// The completions of submitted requests that have no reply yet.
    hanging: Vec<Completion>,
}

impl Outage {
    pub fn begin(&self, mode: Mode) {
        self.state.lock().mode = Some(mode);
        self.changed.notify_all();
    }

    /// Ends the outage. Returns the releases to carry out, oldest first. Drops the releases whose ttl has ended.
    pub fn end(&self, now: MonotonicTime) -> Vec<PendingRelease> {
        self.drop_expired(now);
        let mut state = self.state.lock();
        state.mode = None;
        let pending = std::mem::take(&mut state.pending);
        let hanging = std::mem::take(&mut state.hanging);
        drop(state);
        self.changed.notify_all();
        // Each dropped completion reports a time-out. Its request is not carried out.
        drop(hanging);
        pending
    }

    /// Keeps the completion of a submitted request until the outage ends.
    pub fn hold(&self, completion: Completion) {
        let mut state = self.state.lock();
        if state.mode.is_some() {
            state.hanging.retain(Completion::is_waited_for);
            state.hanging.push(completion);
        }
    }

    pub fn is_on(&self) -> bool {
        self.state.lock().mode.is_some()
    }

    /// Waits until a request may be carried out, until `deadline` at the latest. Does not wait without a deadline.
    pub fn wait(&self, clock: &Clock, deadline: Option<MonotonicTime>) -> Result<(), Error> {
        let mut state = self.state.lock();
        loop {
            match state.mode {
                None => return Ok(()),
                Some(Mode::Fails(kind)) => {
                    return Err(Error::new(kind, "MemoryStore::fail was called"));
                }
                Some(Mode::Hangs) => {}
            }
            let left = deadline.map(|deadline| deadline.since(clock.now()));
            let Some(left) = left.filter(|left| !left.is_zero()) else {
                let message = "no reply in time, since MemoryStore::hang was called";
                return Err(Error::new(ErrorKind::Timeout, message));
            };
            self.changed.wait_for(&mut state, left);
        }
    }

    pub fn clock_moved(&self, now: MonotonicTime) {
        self.drop_expired(now);
        self.changed.notify_all();
    }

    /// Keeps a release until the outage ends. Returns the release if the outage has just ended.
    pub fn keep(&self, release: PendingRelease) -> Option<PendingRelease> {
        let mut state = self.state.lock();
        if state.mode.is_none() {
            return Some(release);
        }
        state.pending.push(release);
        None
    }

    /// Drops the pending releases whose ttl has ended.
    pub fn drop_expired(&self, now: MonotonicTime) {
        self.drop_pending(|pending| pending.release.until <= now);
    }

    /// Drops the pending releases of a client.
    pub fn drop_client(&self, holder: &HolderId) {
        self.drop_pending(|release| release.holder == *holder);
    }

    fn drop_pending(&self, is_over: impl Fn(&PendingRelease) -> bool) {
        let mut state = self.state.lock();
        let over: Vec<_> = state
            .pending
            .extract_if(.., |release| is_over(release))
            .collect();
        drop(state);
        if !over.is_empty() {
            self.changed.notify_all();
        }
        // A dropped release reports that it has ended, which locks other mutexes. So the mutex of this outage is
        // unlocked first.
        drop(over);
    }

    /// How many releases of a client are pending.
    pub fn pending(&self, holder: &HolderId) -> usize {
        self.state.lock().pending_of(holder)
    }

    /// Waits until no release of a client is pending. Returns false after `deadline` according to the clock of this
    /// machine, since a test may have stopped the server's clock.
    pub fn wait_for_releases(&self, holder: &HolderId, deadline: MonotonicTime) -> bool {
        let mut state = self.state.lock();
        while state.pending_of(holder) > 0 {
            let left = deadline.since(MonotonicTime::now());
            if left.is_zero() {
                return false;
            }
            self.changed.wait_for(&mut state, left);
        }
        true
    }
}

impl State {
    fn pending_of(&self, holder: &HolderId) -> usize {
        let own = |release: &&PendingRelease| release.holder == *holder;
        self.pending.iter().filter(own).count()
    }
}

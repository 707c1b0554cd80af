//! Reports each late release of a guard twice: when it becomes late, and how it ended. Neither writes nor retries
//! releases.

use std::sync::Arc;

use crate::error::{Error, ErrorKind};
use crate::store::command::Command;
use crate::util::key::Key;

/// A report about a release that was not done at the first attempt.
#[derive(Debug)]
pub(crate) enum LateRelease {
    /// The release failed; the background retries it.
    Delayed(Error),
    /// Redis confirmed the release, or the release was given up.
    Ended { confirmed: bool },
    /// The release went to a pipeline's queue. If the client ends before `Dequeued`, the pipeline reports the end.
    Queued,
    /// The release left the pipeline's queue to be written.
    Dequeued,
}

/// A function that gets each report with the lock's key and fencing token. It has to be quick and must not block. A
/// pipeline's mutex may be locked during the call, so the function must not call the store.
pub(crate) type LateReleaseHook = Arc<dyn Fn(&Key, u64, LateRelease) + Send + Sync>;

/// Tracks a release that is being written or waits for its reply, and reports to the hook. A drop reports the release
/// as given up, except after [`confirm`](Self::confirm) or [`suspend`](Self::suspend) (the release went to a pipeline's
/// queue).
pub(crate) struct ReleaseTracker {
    hook: LateReleaseHook,
    key: Key,
    token: u64,
    reported_late: bool,
    confirmed: bool,
    suspended: bool,
}

impl ReleaseTracker {
    fn new(hook: &LateReleaseHook, key: &Key, token: u64) -> Self {
        Self {
            hook: Arc::clone(hook),
            key: key.clone(),
            token,
            reported_late: false,
            confirmed: false,
            suspended: false,
        }
    }

    /// Tracks `command` if it is a guard's release.
    pub(crate) fn of_guard_release(hook: &LateReleaseHook, command: &Command) -> Option<Self> {
        match command {
            Command::Release {
                key,
                held: Some(held),
                ..
            } => Some(Self::new(hook, key, held.token)),
            _ => None,
        }
    }

    /// Tracks a release that left a pipeline's queue. `reported_late`: the hook knows that the release is late.
    pub(crate) fn resume(
        hook: &LateReleaseHook,
        key: &Key,
        token: u64,
        reported_late: bool,
    ) -> Self {
        if reported_late {
            hook(key, token, LateRelease::Dequeued);
        }
        let mut tracker = Self::new(hook, key, token);
        tracker.reported_late = reported_late;
        tracker
    }

    /// Ends the tracking, since the release goes to a pipeline's queue. Returns true if the hook knows that the
    /// release is late.
    pub(crate) fn suspend(mut self) -> bool {
        if self.reported_late {
            (self.hook)(&self.key, self.token, LateRelease::Queued);
        }
        self.suspended = true;
        self.reported_late
    }

    /// Reports the release as late, unless it was reported before.
    pub(crate) fn report_late(&mut self, error: &Error) {
        if !std::mem::replace(&mut self.reported_late, true) {
            (self.hook)(&self.key, self.token, LateRelease::Delayed(error.clone()));
        }
    }

    /// Notes that Redis confirmed the release.
    pub(crate) fn confirm(mut self) {
        self.confirmed = true;
    }
}

impl Drop for ReleaseTracker {
    /// Reports the end of the release, if it was late or is given up.
    fn drop(&mut self) {
        if self.suspended {
            return;
        }
        let confirmed = self.confirmed;
        if !confirmed {
            self.report_late(&Error::new(ErrorKind::Timeout, "the release was given up"));
        }
        if self.reported_late {
            (self.hook)(&self.key, self.token, LateRelease::Ended { confirmed });
        }
    }
}

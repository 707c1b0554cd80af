//! Reports of releases to the client: each release of a guard that is late, and each loss that a release finds, unless
//! a caller gets the reply. The nodes of a quorum also report how each release ended. Neither writes nor repeats
//! releases.

use std::sync::Arc;

use crate::command::Command;
use crate::config::key::Key;
use crate::report::error::{Error, ErrorKind};
use crate::report::loss::LossReason;

/// A report about a release that failed at the first attempt, or that found its lock lost.
#[derive(Debug)]
pub enum LateRelease {
    /// The first attempt failed. The background repeats the release.
    Delayed(Error),
    /// Redis confirmed the release, or the store stopped repeating it. Only nodes of a quorum report this.
    Ended { confirmed: bool },
    /// The reply to the first attempt came before the end of the lease's validity, and reports that the lease does not
    /// hold the key. A caller does not get this reply, except on a node of a quorum. `Ended` may follow.
    Lost(LossReason),
}

type Report = dyn Fn(&Key, u64, LateRelease) + Send + Sync;

/// Gets each report with the lock's key and fencing token.
#[derive(Clone)]
pub struct LateReleaseHook {
    report: Arc<Report>,
    /// Whether the hook also gets the ends of releases, and losses of which a caller learns.
    is_of_quorum: bool,
}

impl LateReleaseHook {
    /// `report` has to be quick and must not block. A pipeline's mutex may be locked during the call, so it must not
    /// call the store.
    pub fn new(report: impl Fn(&Key, u64, LateRelease) + Send + Sync + 'static) -> Self {
        Self {
            report: Arc::new(report),
            is_of_quorum: false,
        }
    }

    /// The hook of a quorum's node. `report` also gets the end of each release, and losses of which a caller learns,
    /// since the quorum has to count its nodes.
    pub fn of_quorum(report: impl Fn(&Key, u64, LateRelease) + Send + Sync + 'static) -> Self {
        Self {
            is_of_quorum: true,
            ..Self::new(report)
        }
    }

    pub fn report(&self, key: &Key, token: u64, report: LateRelease) {
        (self.report)(key, token, report);
    }
}

/// Tracks a release that is being written or waits for its reply, and reports to the hook. The drop reports the release
/// as late and ended. [`confirm`](Self::confirm) and [`suspend`](Self::suspend) end the tracking without this report.
pub struct ReleaseTracker {
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
            hook: hook.clone(),
            key: key.clone(),
            token,
            reported_late: false,
            confirmed: false,
            suspended: false,
        }
    }

    /// Tracks `command` if it is a guard's release.
    pub fn of_guard_release(hook: &LateReleaseHook, command: &Command) -> Option<Self> {
        let (key, token) = command.as_release()?.of_guard()?;
        Some(Self::new(hook, key, token))
    }

    /// Tracks a release that left a pipeline's queue. `reported_late`: the hook knows that the release is late.
    pub fn resume(hook: &LateReleaseHook, key: &Key, token: u64, reported_late: bool) -> Self {
        let mut tracker = Self::new(hook, key, token);
        tracker.reported_late = reported_late;
        tracker
    }

    /// Ends the tracking, because the release goes to a pipeline's queue. Returns whether the release was reported as
    /// late.
    pub fn suspend(mut self) -> bool {
        self.suspended = true;
        self.reported_late
    }

    /// Reports the release as late, unless it was reported before.
    pub fn report_late(&mut self, error: &Error) {
        if !std::mem::replace(&mut self.reported_late, true) {
            let report = LateRelease::Delayed(error.clone());
            self.hook.report(&self.key, self.token, report);
        }
    }

    /// Records that Redis has confirmed the release. Reports the `loss` in the reply, unless a caller got the reply and
    /// the hook is not of a quorum.
    pub fn confirm(mut self, loss: Option<LossReason>, is_delivered: bool) {
        if let Some(reason) = loss
            && (!is_delivered || self.hook.is_of_quorum)
        {
            let report = LateRelease::Lost(reason);
            self.hook.report(&self.key, self.token, report);
        }
        self.confirmed = true;
    }
}

impl Drop for ReleaseTracker {
    /// Reports the release as late. To a quorum, also reports its end.
    fn drop(&mut self) {
        if self.suspended {
            return;
        }
        let confirmed = self.confirmed;
        if !confirmed {
            self.report_late(&Error::new(ErrorKind::Timeout, "the release was given up"));
        }
        if self.hook.is_of_quorum {
            let report = LateRelease::Ended { confirmed };
            self.hook.report(&self.key, self.token, report);
        }
    }
}

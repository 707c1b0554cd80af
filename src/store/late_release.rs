//! Reports late releases of guards to the client. Also reports losses that a release finds, unless a caller gets the
//! reply. The nodes of a quorum also report how each release ended. This module neither writes nor repeats releases.

use crate::command::Release;
use crate::config::key::Key;
use crate::report::error::{Error, ErrorKind};
use crate::report::loss::LossReason;
use crate::store::reports::{LateRelease, Report, ReportedReleases, Reports};

/// Tracks a release that is being written or waits for its reply, and reports it. The drop reports the release as late
/// and ended. [`confirm`](Self::confirm) and [`suspend`](Self::suspend) end the tracking without this report.
pub struct ReleaseTracker {
    reports: Reports,
    key: Key,
    token: u64,
    reported_late: bool,
    confirmed: bool,
    suspended: bool,
}

impl ReleaseTracker {
    /// Tracks the release of a guard's lease. Returns `None` for other releases, and if the client wants no reports of
    /// releases. `reported_late`: the release comes from a pipeline's queue, and was reported as late before.
    pub fn new(reports: &Reports, release: &Release, reported_late: bool) -> Option<Self> {
        if reports.releases == ReportedReleases::None {
            return None;
        }
        let (key, token) = release.of_guard()?;
        Some(Self {
            reports: reports.clone(),
            key: key.clone(),
            token,
            reported_late,
            confirmed: false,
            suspended: false,
        })
    }

    fn report(&self, report: LateRelease) {
        self.reports
            .send(Report::Release(&self.key, self.token, report));
    }

    fn is_of_quorum(&self) -> bool {
        self.reports.releases == ReportedReleases::All
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
            self.report(LateRelease::Delayed(error.clone()));
        }
    }

    /// Records that Redis has confirmed the release. Reports the `loss` that the reply contains. If a caller got the
    /// reply, only a node of a quorum reports the loss.
    pub fn confirm(mut self, loss: Option<LossReason>, is_delivered: bool) {
        if let Some(reason) = loss
            && (!is_delivered || self.is_of_quorum())
        {
            self.report(LateRelease::Lost(reason));
        }
        self.confirmed = true;
    }
}

impl Drop for ReleaseTracker {
    /// Reports the release as late. On a node of a quorum, also reports the end of the release.
    fn drop(&mut self) {
        if self.suspended {
            return;
        }
        let confirmed = self.confirmed;
        if !confirmed {
            self.report_late(&Error::new(ErrorKind::Timeout, "the release was abandoned"));
        }
        if self.is_of_quorum() {
            self.report(LateRelease::Ended { confirmed });
        }
    }
}

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use parking_lot::Mutex;

    use super::*;
    use crate::command::{Held, Mode};
    use crate::util::clock::MonotonicTime;
    use crate::util::id::LeaseId;

    /// The reports of a release whose reply contains a loss. `is_delivered`: a caller got the reply.
    fn reports_of_a_loss(releases: ReportedReleases, is_delivered: bool) -> Vec<&'static str> {
        let sent: Arc<Mutex<Vec<&str>>> = Arc::default();
        let received = Arc::clone(&sent);
        let reports = Reports::new(releases, move |report| {
            received.lock().push(match report {
                Report::Release(_, 7, LateRelease::Delayed(_)) => "delayed",
                Report::Release(_, 7, LateRelease::Lost(LossReason::Deleted)) => "lost",
                Report::Release(_, 7, LateRelease::Ended { confirmed: true }) => "confirmed",
                _ => "another",
            });
        });
        let until = MonotonicTime::now().after(Duration::from_secs(1));
        let release = Release {
            key: Key::new("", "k", 16).unwrap(),
            lease: LeaseId::random(),
            mode: Mode::Exclusive,
            min_hold: Duration::ZERO,
            until,
            held: Some(Held {
                token: 7,
                is_token_in_value: true,
                others_queued: false,
                valid_until: until,
            }),
            queued: None,
        };
        if let Some(tracker) = ReleaseTracker::new(&reports, &release, false) {
            tracker.confirm(Some(LossReason::Deleted), is_delivered);
        }
        std::mem::take(&mut *sent.lock())
    }

    #[test]
    fn a_loss_is_reported_unless_a_caller_gets_it() {
        use ReportedReleases::{All, Late, None};
        for is_delivered in [false, true] {
            assert!(reports_of_a_loss(None, is_delivered).is_empty());
            // A quorum counts the losses that its nodes report.
            assert_eq!(reports_of_a_loss(All, is_delivered), ["lost", "confirmed"]);
        }
        assert_eq!(reports_of_a_loss(Late, false), ["lost"]);
        assert!(reports_of_a_loss(Late, true).is_empty());
    }
}

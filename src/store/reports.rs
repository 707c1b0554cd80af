//! The reports that a store sends to its client without being asked.

use std::sync::Arc;

use crate::config::key::Key;
use crate::report::error::Error;
use crate::report::loss::LossReason;
use crate::report::node_state::NodeState;
use crate::store::Urgency;

/// A report of a store.
pub enum Report<'a> {
    /// The store needs [`Store::run_maintenance`](crate::store::Store::run_maintenance).
    NeedsMaintenance(Urgency),
    /// A connection was opened. Notifications and checks do not report their connections.
    Connected,
    /// The client connects to the last known primary, since no sentinel names one. Reported once, and again only after
    /// a sentinel has named the primary.
    SentinelsUnavailable(Error),
    /// The server does not allow acquires by plain commands, so the client uses the script.
    PlainAcquiresRefused(Error),
    /// The server refuses notifications to this client.
    NotificationsRefused(Error),
    /// The release of a guard's lease, by its key and fencing token.
    Release(&'a Key, u64, LateRelease),
    /// The health of a quorum's node has changed, or its clock has left the bound or come back within it.
    NodeChanged(NodeState),
    /// The clock of a quorum's node was read and compared.
    NodeClockRead(NodeState),
}

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

/// Which releases of guards a store reports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ReportedReleases {
    #[default]
    None,
    /// Late releases, and losses that no call returns.
    Late,
    /// Late releases, the ends of all releases, and all losses. A quorum needs them to count its nodes.
    All,
}

type Receiver = dyn Fn(Report<'_>) + Send + Sync;

/// The receiver of a store's reports. The default receiver ignores them.
#[derive(Clone, Default)]
pub struct Reports {
    receiver: Option<Arc<Receiver>>,
    pub releases: ReportedReleases,
}

impl Reports {
    /// Makes a receiver. `receiver` has to be quick, and must neither block nor call the store: a pipeline's mutex may
    /// be locked during the call.
    pub fn new(
        releases: ReportedReleases,
        receiver: impl Fn(Report<'_>) + Send + Sync + 'static,
    ) -> Self {
        Self {
            receiver: Some(Arc::new(receiver)),
            releases,
        }
    }

    pub fn send(&self, report: Report<'_>) {
        if let Some(receiver) = &self.receiver {
            receiver(report);
        }
    }

    pub fn need_maintenance(&self, urgency: Urgency) {
        self.send(Report::NeedsMaintenance(urgency));
    }
}

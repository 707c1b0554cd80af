//! For how long a caller waits: when it is told that this was long enough, and what.

use std::time::Duration;

use crate::acquire::outage::CurrentOutage;
use crate::acquire::{Acquirer, LONGEST_TRUST, Wait};
use crate::error::{Error, ErrorKind};
use crate::util::clock::MonotonicTime;

/// For how long to wait while somebody else has it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Until {
    /// Not at all.
    Now,
    At(MonotonicTime),
    Forever,
}

impl Acquirer {
    /// What to tell a caller that has waited long enough; nothing if it has not.
    pub(super) fn verdict(
        &self,
        wait: &Wait<'_>,
        now: MonotonicTime,
        outage: Option<&CurrentOutage>,
    ) -> Option<Result<(), Error>> {
        let (started, until) = (wait.started, wait.until);
        let give_up_at = match (until, outage) {
            (Until::Now, None) => return Some(Ok(())),
            (Until::Forever, None) => return None,
            (Until::Now, Some(_)) => started.after(self.command_timeout),
            (Until::At(deadline), _) => deadline,
            (Until::Forever, Some(outage)) => outage.since.max(started).after(self.outage_timeout),
        };
        if now < give_up_at {
            return None;
        }
        let Some(outage) = outage else {
            return Some(Ok(()));
        };
        if let Until::Now = until {
            return Some(Err(outage.error.clone()));
        }
        let lasted = now.since(outage.since.max(started));
        let message = format!("for {:.1} s: {}", lasted.as_secs_f64(), outage.error);
        let error = Error::new(ErrorKind::Unavailable, message);
        Some(Err(error.with_source(outage.error.clone())))
    }

    /// Until when to sleep at most, before asking for a verdict again.
    pub(super) fn longest_wait(
        &self,
        now: MonotonicTime,
        until: Until,
        outage: Option<&CurrentOutage>,
    ) -> MonotonicTime {
        let outage_timeout = self.outage_timeout.max(Duration::from_millis(10));
        let look_again = match outage {
            Some(outage) => outage
                .since
                .after(outage_timeout)
                .max(now.after(outage_timeout / 10)),
            None => now.after(outage_timeout.max(LONGEST_TRUST)),
        };
        match until {
            Until::Now => now.after(self.command_timeout),
            Until::At(deadline) => deadline.min(look_again),
            Until::Forever => look_again,
        }
    }
}

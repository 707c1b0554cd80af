//! The attempts of a request after redirects: their pauses and their end.

use std::time::Duration;

use crate::report::error::{Error, ErrorKind};
use crate::util::backoff::Backoff;
use crate::util::clock::MonotonicTime;
use crate::util::slot::Redirect;
use crate::util::sync::park_timeout;
use crate::wire::connect::url::HostPort;

/// A request follows this many redirects without a pause. After more of them, the nodes probably disagree.
const WITHOUT_PAUSE: u32 = 3;
/// The first pause while a slot moves, has no master, or nodes disagree. The pause doubles each time.
const FIRST_PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_millis(200);

/// The attempts of a request until its deadline.
pub struct Attempts {
    deadline: MonotonicTime,
    redirects: u32,
    backoff: Backoff,
}

impl Attempts {
    pub fn until(deadline: MonotonicTime) -> Self {
        Self {
            deadline,
            redirects: 0,
            backoff: Backoff::new(FIRST_PAUSE, LONGEST_PAUSE),
        }
    }

    /// Moves the deadline of the attempts to `deadline`.
    pub fn end_by(&mut self, deadline: MonotonicTime) {
        self.deadline = deadline;
    }

    /// Pauses before the next attempt if `redirect`, which the node at `by` has sent, calls for a pause. Returns the
    /// error for the caller if the deadline comes first.
    pub fn wait(&mut self, redirect: &Redirect, by: &HostPort) -> Result<(), Error> {
        if !matches!(redirect, Redirect::TryAgain | Redirect::ClusterDown) {
            self.redirects += 1;
            if self.redirects <= WITHOUT_PAUSE && MonotonicTime::now() < self.deadline {
                return Ok(());
            }
        }
        let pause = self.backoff.next();
        let left = self.deadline.since(MonotonicTime::now());
        if left <= pause {
            park_timeout(left);
            return Err(last_refusal(redirect, by));
        }
        park_timeout(pause);
        Ok(())
    }
}

/// The error of a request that nodes refused until its deadline. The node at `by` was the last one.
fn last_refusal(redirect: &Redirect, by: &HostPort) -> Error {
    let what = match redirect {
        Redirect::Moved(target) | Redirect::Ask(target) => {
            let code = match redirect {
                Redirect::Ask(_) => "ASK",
                _ => "MOVED",
            };
            let slot = target.slot.number();
            &format!(
                "the nodes of the Cluster do not agree on which node serves slot {slot} ({code}); nothing was \
                 done; check the slots with `redis-cli --cluster check {by}`"
            )
        }
        Redirect::Retired => {
            "this node served the slot of the key, and has no slots any more; nothing was done; try again, or check \
             the nodes with CLUSTER NODES"
        }
        Redirect::TryAgain => {
            "the slot of the key is moving to another node of the Cluster (TRYAGAIN); nothing was done; try again \
             when the slot has moved"
        }
        Redirect::ClusterDown => {
            "the Cluster is down, or has no master for the slot of the key (CLUSTERDOWN); nothing was done; check \
             the nodes with CLUSTER INFO"
        }
    };
    Error::new(ErrorKind::Unavailable, format!("{by}: {what}"))
}

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests {
    use super::*;

    fn moved() -> Redirect {
        Redirect::parse("MOVED", "7 h:1").unwrap()
    }

    fn by() -> HostPort {
        HostPort::new(b"::1", b"7001").unwrap()
    }

    #[test]
    fn a_circle_of_redirects_ends_at_the_deadline() {
        let redirects = || {
            let started = MonotonicTime::now();
            let timeout = Duration::from_millis(100);
            let mut attempts = Attempts::until(started.after(timeout));
            let error = (0..)
                .find_map(|_| attempts.wait(&moved(), &by()).err())
                .unwrap();
            assert_eq!(error.kind(), ErrorKind::Unavailable);
            assert!(MonotonicTime::now().since(started) >= timeout);
            attempts.redirects
        };
        // 5, 10, 20 and 40 ms of pauses: the next would end after the deadline. On a busy machine, they take longer.
        let most = WITHOUT_PAUSE + 5;
        let is_most = |redirects| {
            assert!(redirects <= most);
            redirects == most
        };
        assert!((0..50).any(|_| is_most(redirects())));
    }

    #[test]
    fn a_slot_without_a_master_pauses_attempts() {
        let mut attempts = Attempts::until(MonotonicTime::now().after(Duration::from_secs(60)));
        for redirect in [Redirect::TryAgain, Redirect::ClusterDown] {
            attempts.wait(&redirect, &by()).unwrap();
        }
        assert_eq!(
            (attempts.redirects, attempts.backoff.next()),
            (0, 4 * FIRST_PAUSE)
        );
    }

    #[test]
    fn errors_name_the_node_and_the_next_step() {
        for (redirect, message) in [
            (
                moved(),
                "the nodes of the Cluster do not agree on which node serves slot 7 (MOVED); nothing was done; check \
                 the slots with `redis-cli --cluster check [::1]:7001`",
            ),
            (
                Redirect::parse("ASK", "7 h:1").unwrap(),
                "the nodes of the Cluster do not agree on which node serves slot 7 (ASK); nothing was done; check the \
                 slots with `redis-cli --cluster check [::1]:7001`",
            ),
            (
                Redirect::Retired,
                "this node served the slot of the key, and has no slots any more; nothing was done; try again, or \
                 check the nodes with CLUSTER NODES",
            ),
            (
                Redirect::TryAgain,
                "the slot of the key is moving to another node of the Cluster (TRYAGAIN); nothing was done; try \
                 again when the slot has moved",
            ),
            (
                Redirect::ClusterDown,
                "the Cluster is down, or has no master for the slot of the key (CLUSTERDOWN); nothing was done; \
                 check the nodes with CLUSTER INFO",
            ),
        ] {
            let expected = format!("Redis is unavailable: [::1]:7001: {message}");
            assert_eq!(last_refusal(&redirect, &by()).to_string(), expected);
        }
    }
}

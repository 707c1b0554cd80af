//! A process with a guard forks. Only the parent observes the end of the hold. The test process itself never forks: it
//! starts the process that forks.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::exit;

use fork::{Fork, waitpid_nohang};
use leasehold::Client;
use leasehold_testbed::eventually;

use crate::SOON;
use crate::child::{Child, Parent};
use crate::receivers::{Receivers, receivers};

/// The exit code of a successful fork.
const WELL: i32 = 42;

fn holds(receivers: &Receivers) -> usize {
    // The series are registered with zero when the client is built.
    let counted = receivers.numbers();
    let counted = counted
        .iter()
        .filter(|(name, number)| name.starts_with("leasehold_hold") && **number > 0.0);
    receivers.recorded("leasehold.hold").len() + counted.count()
}

pub fn a_parent(_: &Parent) {
    let receivers = receivers();
    let client = Client::memory().unwrap();
    let guard = client.mutex("k").lock().unwrap();
    let pid = match fork::fork().unwrap() {
        Fork::Parent(pid) => pid,
        Fork::Child => {
            let work = || {
                drop((guard, client));
                assert_eq!(holds(&receivers), 0);
            };
            let ended = catch_unwind(AssertUnwindSafe(work));
            exit(if ended.is_ok() { WELL } else { 1 });
        }
    };
    let mut status = None;
    assert!(eventually(SOON, || {
        status = waitpid_nohang(pid).unwrap();
        status.is_some()
    }));
    // The exit code is in the second byte, see wait(2).
    assert_eq!(status, Some(WELL << 8), "the fork failed");
    drop(guard);
    assert_eq!(holds(&receivers), 3, "a span, a counter, a histogram");
}

#[test]
fn a_guard_dropped_in_a_forked_child_is_not_observed_there() {
    Child::start(a_parent, "memory://").finish(2 * SOON);
}

//! Model: no worker sleeps while leases wait.

use shuttle::thread;

use super::*;
use crate::lease::{CallbackExecutor, Grant};
use crate::util::key::Key;
use crate::util::sync::model::check;

/// One takes a batch and is busy with it; the other has to come for the rest.
#[test]
fn model_what_comes_together_is_seen_to_by_all_workers() {
    check(2000, || {
        let (callbacks, _deliver) = CallbackExecutor::for_model();
        let lease = |_| {
            let grant = Grant::usual(Key::new("", "k", 16).unwrap(), MonotonicTime::now());
            Arc::new(Lease::new(grant, Arc::clone(&callbacks), None))
        };
        let renewals = Renewals::default();
        let work = || match renewals.next().expect("it goes on") {
            Work::Renew(leases) => assert!(!leases.is_empty()),
            Work::Confirm(_) | Work::ConfirmForce(_) => panic!("nothing is in doubt"),
        };
        thread::scope(|scope| {
            scope.spawn(work);
            scope.spawn(work);
            renewals.add((0..=AT_A_TIME).map(lease).collect());
        });
    });
}

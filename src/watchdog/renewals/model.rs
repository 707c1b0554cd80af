//! A model of the queue: the workers do not sleep while leases are queued.

use shuttle::thread;

use super::*;
use crate::config::key::Key;
use crate::lease::{CallbackExecutor, Grant};
use crate::util::sync::model::check;

/// One worker takes a batch; the other worker has to wake up for the rest.
#[test]
fn model_leases_queued_together_wake_all_workers() {
    check(2000, || {
        let (callbacks, _deliver) = CallbackExecutor::for_model();
        let lease = |_| {
            let grant = Grant::usual(Key::new("", "k", 16).unwrap(), MonotonicTime::now());
            Arc::new(Lease::new(grant, Arc::clone(&callbacks), None))
        };
        let renewals = RenewalQueue::default();
        let work = || match renewals.wait_for_batch(8).expect("the queue has not ended") {
            RenewalBatch::Renew(leases) => assert!(!leases.is_empty()),
            RenewalBatch::Confirm(..) => panic!("no lease was reported lost"),
        };
        thread::scope(|scope| {
            scope.spawn(work);
            scope.spawn(work);
            renewals.add((0..=MIN_BATCH).map(lease).collect());
        });
    });
}

//! Model: no worker sleeps while leases wait.

use shuttle::thread;

use super::*;
use crate::key::Key;
use crate::lease::{Courier, Terms};
use crate::sync::model::check;

/// One takes a batch and is busy with it; the other has to come for the rest.
#[test]
fn model_what_comes_together_is_seen_to_by_all_workers() {
    check(2000, || {
        let (courier, _deliver) = Courier::of_a_model();
        let lease = |_| {
            let terms = Terms::usual(Key::new("", "k", 16).unwrap(), Moment::now());
            Arc::new(Lease::new(terms, Arc::clone(&courier), None))
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

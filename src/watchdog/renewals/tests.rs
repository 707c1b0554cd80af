use std::time::Duration;

use super::*;
use crate::key::Key;
use crate::lease::{Courier, Options, Terms};
use crate::thread::Crew;

/// Leases with these ttls, taken now.
fn leases(ttls: &[u64], courier: &Arc<Courier>) -> Vec<Arc<Lease>> {
    let lease = |ttl: &u64| {
        let options = Options {
            ttl: Duration::from_secs(*ttl),
            ..Options::USUAL
        };
        let terms = Terms {
            options: Arc::new(options),
            ..Terms::usual(Key::new("", "k", 16).unwrap(), Moment::now())
        };
        Arc::new(Lease::new(terms, Arc::clone(courier), None))
    };
    ttls.iter().map(lease).collect()
}

#[test]
fn what_ends_first_goes_first_with_what_came_along() {
    let courier = Courier::start(&Crew::new(), None).unwrap();
    courier.stop();
    let renewals = Renewals::default();
    renewals.add(Vec::new());
    for ttls in [&[30, 40][..], &[20], &[50, 10, 60]] {
        renewals.add(leases(ttls, &courier));
    }
    let ttls = |leases: Vec<Arc<Lease>>| -> Vec<u64> {
        let ttls = leases.iter().map(|lease| lease.terms().ttl().as_secs());
        ttls.collect()
    };
    assert_eq!(renewals.next().map(ttls), Some(vec![50, 10, 60]));
    assert_eq!(renewals.try_next().map(ttls), Some(vec![20]));
    assert_eq!(renewals.next().map(ttls), Some(vec![30, 40]));
    assert!(renewals.try_next().is_none());
}

#[test]
fn those_that_end_together_go_as_they_came() {
    let courier = Courier::start(&Crew::new(), None).unwrap();
    courier.stop();
    let (renewals, lease) = (Renewals::default(), leases(&[30], &courier).remove(0));
    for count in 1..=3 {
        renewals.add(vec![Arc::clone(&lease); count]);
    }
    let counts = [(); 3].map(|()| renewals.try_next().map_or(0, |leases| leases.len()));
    assert_eq!(counts, [1, 2, 3]);
}

#[test]
fn once_ended_there_is_nothing_to_renew() {
    let courier = Courier::start(&Crew::new(), None).unwrap();
    courier.stop();
    let (renewals, lease) = (Renewals::default(), leases(&[30], &courier).remove(0));
    renewals.add(vec![Arc::clone(&lease)]);
    renewals.end();
    renewals.add(vec![Arc::clone(&lease)]);
    assert!(renewals.next().is_none());
    assert_eq!(Arc::strong_count(&lease), 1, "none is kept");
}

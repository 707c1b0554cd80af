mod renewing;

use crossbeam_channel::unbounded;

use super::*;
use crate::lease::{Options, Terms};

fn leases(count: usize, courier: &Arc<Courier>) -> Vec<Arc<Lease>> {
    let options = Options {
        renew_every: None,
        ..Options::USUAL
    };
    let now = Moment::now();
    let lease = |_| {
        let key = Key::new("", "k", 16).unwrap();
        let terms = Terms {
            options: Arc::new(options),
            ..Terms::usual(key, now)
        };
        Arc::new(Lease::new(terms, Arc::clone(courier), None))
    };
    (0..count).map(lease).collect()
}

#[test]
fn renewals_that_wait_are_gathered_into_batches_and_none_is_forgotten() {
    let courier = Courier::start(&Crew::new(), None).unwrap();
    let (jobs, inbox) = unbounded();
    for count in [1, 1, MAX_BATCH - 3, 1, MAX_BATCH, 1] {
        jobs.send(Job::Renew(leases(count, &courier))).unwrap();
    }
    jobs.send(Job::Stop).unwrap();
    let mut batch = leases(1, &courier);
    let next = gather(&mut batch, MAX_BATCH, &inbox);
    assert_eq!(batch.len(), MAX_BATCH);
    assert!(next.is_none(), "it is full: what waits is another worker's");
    let mut more = leases(1, &courier);
    assert!(gather(&mut more, MAX_BATCH, &inbox).is_none());
    assert_eq!(more.len(), MAX_BATCH + 2, "what was taken is kept");
    let mut rest = leases(1, &courier);
    let next = gather(&mut rest, MAX_BATCH, &inbox);
    assert!(matches!(next, Some(Job::Stop)));
    assert_eq!(rest.len(), 2);
    assert!(
        gather(&mut rest, MAX_BATCH, &inbox).is_none(),
        "nothing waits"
    );
    courier.stop();
}

use super::*;
use crate::lease::{CallbackExecutor, Grant, Options};
use crate::util::key::Key;
use crate::util::threads::ThreadGroup;

/// Leases with these ttls in seconds, taken now.
fn leases(ttls: impl IntoIterator<Item = u64>) -> Vec<Arc<Lease>> {
    let callbacks = CallbackExecutor::start(&ThreadGroup::new(), None).unwrap();
    callbacks.stop();
    let now = MonotonicTime::now();
    let lease = |ttl| {
        let options = Options {
            ttl: Duration::from_secs(ttl),
            ..Options::USUAL
        };
        let grant = Grant {
            options: Arc::new(options),
            ..Grant::usual(Key::new("", "k", 16).unwrap(), now)
        };
        Arc::new(Lease::new(grant, Arc::clone(&callbacks), None))
    };
    ttls.into_iter().map(lease).collect()
}

fn ttls(leases: &[Arc<Lease>]) -> Vec<u64> {
    let ttl = |lease: &Arc<Lease>| lease.grant().ttl().as_secs();
    leases.iter().map(ttl).collect()
}

#[test]
fn what_ends_first_goes_first_whatever_came_along() {
    let renewals = Renewals::default();
    renewals.add(leases([30, 40]));
    renewals.add(leases([50, 10, 60, 20]));
    let Some(Work::Renew(next)) = renewals.next() else {
        panic!("nothing to renew");
    };
    assert_eq!(ttls(&next), [10, 20, 30, 40, 50, 60]);
}

#[test]
fn those_that_end_together_go_as_they_came_and_none_is_forgotten() {
    let (mut waiting, now) = (Waiting::default(), MonotonicTime::now());
    let all = leases((0..AT_A_TIME as u64 + 2).map(|_| 30));
    waiting.add(with_ends(all.clone()));
    let taken = [waiting.take(now), waiting.take(now)];
    assert_eq!(taken[0].len(), AT_A_TIME);
    let taken = taken.concat();
    assert_eq!(taken.len(), all.len());
    assert!(
        taken
            .iter()
            .zip(&all)
            .all(|(one, other)| Arc::ptr_eq(one, other))
    );
    assert!(waiting.take(now).is_empty());
}

#[test]
fn more_go_at_a_time_the_longer_some_have_waited() {
    let (mut waiting, start) = (Waiting::default(), MonotonicTime::now());
    let many = 2 * MAX_RENEWALS + 3 * AT_A_TIME;
    waiting.add(with_ends(leases((0..many).map(|_| 30))));
    let mut taken_after = |pause| {
        waiting.add(with_ends(leases((0..2 * AT_A_TIME).map(|_| 40))));
        waiting.take(start.after(pause)).len()
    };
    assert_eq!(taken_after(Duration::ZERO), AT_A_TIME);
    let half = AT_A_TIME + (MAX_RENEWALS - AT_A_TIME) / 2;
    assert_eq!(taken_after(LATE / 2), half);
    assert_eq!(taken_after(LATE), MAX_RENEWALS);
    assert_eq!(taken_after(2 * LATE), MAX_RENEWALS, "and no more");
    // All that waited at the start are gone; some came later, and the queue was never empty.
    assert_eq!(taken_after(3 * LATE), AT_A_TIME);
}

#[test]
fn what_comes_later_and_goes_first_does_not_hide_how_long_others_wait() {
    let (mut waiting, start) = (Waiting::default(), MonotonicTime::now());
    waiting.add(with_ends(leases((0..MAX_RENEWALS).map(|_| 30))));
    let mut taken_after = |pause| {
        waiting.add(with_ends(leases((0..AT_A_TIME).map(|_| 10))));
        waiting.take(start.after(pause))
    };
    assert_eq!(ttls(&taken_after(Duration::ZERO)), [10; AT_A_TIME]);
    assert_eq!(taken_after(LATE).len(), MAX_RENEWALS);
}

#[test]
fn once_ended_there_is_nothing_to_renew() {
    let (renewals, lease) = (Renewals::default(), leases([30]));
    renewals.add(lease.clone());
    renewals.end();
    renewals.add(lease.clone());
    assert!(renewals.next().is_none());
    assert_eq!(Arc::strong_count(&lease[0]), 1, "none is kept");
}

#[test]
fn what_seems_to_be_lost_goes_first_and_once() {
    let renewals = Renewals::default();
    renewals.add(leases([30, 40]));
    let doubted = leases([50]).remove(0);
    renewals.queue_confirmation(Arc::clone(&doubted));
    renewals.queue_confirmation(doubted);
    let Some(Work::Confirm(first)) = renewals.next() else {
        panic!("nothing to confirm");
    };
    assert_eq!(first.len(), 1);
    let Some(Work::Renew(next)) = renewals.next() else {
        panic!("nothing to renew");
    };
    assert_eq!(ttls(&next), [30, 40]);
}

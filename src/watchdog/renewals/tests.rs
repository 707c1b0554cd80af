use super::*;
use crate::key::Key;
use crate::lease::{Courier, Options, Terms};
use crate::thread::Crew;

/// Leases with these ttls in seconds, taken now.
fn leases(ttls: impl IntoIterator<Item = u64>) -> Vec<Arc<Lease>> {
    let courier = Courier::start(&Crew::new(), None).unwrap();
    courier.stop();
    let now = Moment::now();
    let lease = |ttl| {
        let options = Options {
            ttl: Duration::from_secs(ttl),
            ..Options::USUAL
        };
        let terms = Terms {
            options: Arc::new(options),
            ..Terms::usual(Key::new("", "k", 16).unwrap(), now)
        };
        Arc::new(Lease::new(terms, Arc::clone(&courier), None))
    };
    ttls.into_iter().map(lease).collect()
}

fn ttls(leases: &[Arc<Lease>]) -> Vec<u64> {
    let ttl = |lease: &Arc<Lease>| lease.terms().ttl().as_secs();
    leases.iter().map(ttl).collect()
}

#[test]
fn what_ends_first_goes_first_whatever_came_along() {
    let renewals = Renewals::default();
    renewals.add(leases([30, 40]));
    renewals.add(leases([50, 10, 60, 20]));
    let next = renewals.next().unwrap();
    assert_eq!(ttls(&next), [10, 20, 30, 40, 50, 60]);
}

#[test]
fn those_that_end_together_go_as_they_came_and_none_is_forgotten() {
    let (mut waiting, now) = (Waiting::default(), Moment::now());
    let all = leases((0..AT_A_TIME as u64 + 2).map(|_| 30));
    waiting.add(with_ends(all.clone()), now);
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
fn more_go_at_a_time_once_the_first_has_waited_for_long() {
    let (mut waiting, start) = (Waiting::default(), Moment::now());
    let (batch, most, long) = (AT_A_TIME as u64, MAX_RENEWALS as u64, |_| 30);
    let mut taken_at = |now, more| {
        waiting.add(with_ends(leases((0..more).map(long))), now);
        waiting.take(now).len()
    };
    assert_eq!(taken_at(start, 2 * batch), AT_A_TIME);
    assert_eq!(taken_at(start.after(LATE), most), AT_A_TIME);
    assert_eq!(taken_at(start.after(3 * LATE), 2 * batch), MAX_RENEWALS);
    // Some have been waiting all the time, but none of them for long.
    assert_eq!(taken_at(start.after(4 * LATE), 0), AT_A_TIME);
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

use super::*;
use crate::config::key::Key;
use crate::lease::{CallbackExecutor, Grant, Options};
use crate::process::threads::ThreadGroup;

/// How many renewals the store accepts at a time.
const AT_A_TIME: usize = 512;

/// Leases with these ttls in seconds, granted now.
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
fn the_lease_that_ends_first_goes_first() {
    let renewals = RenewalQueue::default();
    renewals.add(leases([30, 40]));
    renewals.add(leases([50, 10, 60, 20]));
    let Some(RenewalBatch::Renew(next)) = renewals.wait_for_batch(AT_A_TIME) else {
        panic!("nothing to renew");
    };
    assert_eq!(ttls(&next), [10, 20, 30, 40, 50, 60]);
}

#[test]
fn leases_that_end_together_keep_their_order() {
    let (mut waiting, now) = (QueueState::default(), MonotonicTime::now());
    let all = leases((0..MIN_BATCH as u64 + 2).map(|_| 30));
    waiting.add_renewals(with_ends(all.clone()));
    let taken = [
        waiting.take_renewals(now, AT_A_TIME),
        waiting.take_renewals(now, AT_A_TIME),
    ];
    assert_eq!(taken[0].len(), MIN_BATCH);
    let taken = taken.concat();
    assert_eq!(taken.len(), all.len());
    assert!(
        taken
            .iter()
            .zip(&all)
            .all(|(one, other)| Arc::ptr_eq(one, other))
    );
    assert!(waiting.take_renewals(now, AT_A_TIME).is_empty());
}

#[test]
fn batches_grow_with_the_lateness() {
    let (mut waiting, start) = (QueueState::default(), MonotonicTime::now());
    let many = 2 * AT_A_TIME + 3 * MIN_BATCH;
    waiting.add_renewals(with_ends(leases((0..many).map(|_| 30))));
    let mut taken_after = |pause| {
        waiting.add_renewals(with_ends(leases((0..2 * MIN_BATCH).map(|_| 40))));
        waiting.take_renewals(start.after(pause), AT_A_TIME).len()
    };
    assert_eq!(taken_after(Duration::ZERO), MIN_BATCH);
    let half = MIN_BATCH + (AT_A_TIME - MIN_BATCH) / 2;
    assert_eq!(taken_after(FULL_BATCH_AFTER / 2), half);
    assert_eq!(taken_after(FULL_BATCH_AFTER), AT_A_TIME);
    assert_eq!(
        taken_after(2 * FULL_BATCH_AFTER),
        AT_A_TIME,
        "the largest batch"
    );
    // This is a new round, although the queue was never empty: it already contained the leases of this round.
    assert_eq!(taken_after(3 * FULL_BATCH_AFTER), MIN_BATCH);
}

#[test]
fn later_and_shorter_leases_do_not_hide_lateness() {
    let (mut waiting, start) = (QueueState::default(), MonotonicTime::now());
    waiting.add_renewals(with_ends(leases((0..AT_A_TIME).map(|_| 30))));
    let mut taken_after = |pause| {
        waiting.add_renewals(with_ends(leases((0..MIN_BATCH).map(|_| 10))));
        waiting.take_renewals(start.after(pause), AT_A_TIME)
    };
    assert_eq!(ttls(&taken_after(Duration::ZERO)), [10; MIN_BATCH]);
    assert_eq!(taken_after(FULL_BATCH_AFTER).len(), AT_A_TIME);
}

#[test]
fn an_ended_queue_keeps_no_lease() {
    let (renewals, lease) = (RenewalQueue::default(), leases([30]));
    renewals.add(lease.clone());
    renewals.end();
    renewals.add(lease.clone());
    assert!(renewals.wait_for_batch(AT_A_TIME).is_none());
    assert_eq!(Arc::strong_count(&lease[0]), 1, "the queue keeps none");
}

#[test]
fn confirmations_go_first_and_once() {
    let renewals = RenewalQueue::default();
    renewals.add(leases([30, 40]));
    let reported = leases([50]).remove(0);
    for report in [LossReport::ForceMessage, LossReport::KeyRead] {
        renewals.queue_confirmation(Arc::clone(&reported), report);
        renewals.queue_confirmation(Arc::clone(&reported), report);
    }
    for expected in [LossReport::KeyRead, LossReport::ForceMessage] {
        let Some(RenewalBatch::Confirm(report, leases)) = renewals.wait_for_batch(AT_A_TIME) else {
            panic!("nothing to confirm");
        };
        assert_eq!((report, leases.len()), (expected, 1));
    }
    let Some(RenewalBatch::Renew(next)) = renewals.wait_for_batch(AT_A_TIME) else {
        panic!("nothing to renew");
    };
    assert_eq!(ttls(&next), [30, 40]);
}

/// A client may have thousands of shares, and each new notification connection reports all of them.
#[test]
fn confirmations_after_missed_messages_wait_for_renewals() {
    let renewals = RenewalQueue::default();
    for lease in leases((0..AT_A_TIME + 3).map(|_| 50)) {
        renewals.queue_confirmation(lease, LossReport::Missed);
    }
    renewals.add(leases([30]));
    let next = || match renewals.wait_for_batch(AT_A_TIME) {
        Some(RenewalBatch::Renew(leases)) => (None, leases.len()),
        Some(RenewalBatch::Confirm(report, leases)) => (Some(report), leases.len()),
        None => panic!("the queue has not ended"),
    };
    assert_eq!(next(), (None, 1));
    assert_eq!(next(), (Some(LossReport::Missed), AT_A_TIME));
    renewals.queue_confirmation(leases([50]).remove(0), LossReport::ForceMessage);
    renewals.add(leases([30]));
    assert_eq!(next(), (Some(LossReport::ForceMessage), 1));
    assert_eq!(next(), (None, 1));
    assert_eq!(next(), (Some(LossReport::Missed), 3));
    assert!(renewals.waiting.lock().is_empty());
}

#[test]
fn each_server_has_a_queue_of_its_own() {
    let queues = RenewalQueues::default();
    let started = || |_: &Arc<RenewalQueue>| true;
    let first = queues.of(ServerId::ONLY, |_| panic!("it has workers"));
    let second = queues.of(ServerId(1), started());
    assert!(!Arc::ptr_eq(&first, &second));
    let again = queues.of(ServerId(1), |_| panic!("it has workers"));
    assert!(Arc::ptr_eq(&second, &again));
    second.add(leases([30]));
    assert!(second.wait_for_batch(AT_A_TIME).is_some());
    queues.end();
    for queue in [first, second] {
        assert!(queue.wait_for_batch(AT_A_TIME).is_none());
    }
}

#[test]
fn a_server_without_workers_shares_the_first_queue() {
    let queues = RenewalQueues::default();
    let shared = queues.of(ServerId(1), |_| false);
    assert!(Arc::ptr_eq(&shared, &queues.of(ServerId::ONLY, |_| true)));
}

/// Leases of locks with these names and ttls in seconds.
fn leases_of(names: impl IntoIterator<Item = (&'static str, u64)>) -> Vec<Arc<Lease>> {
    let callbacks = CallbackExecutor::start(&ThreadGroup::new(), None).unwrap();
    callbacks.stop();
    let now = MonotonicTime::now();
    let lease = |(name, ttl)| {
        let options = Options {
            ttl: Duration::from_secs(ttl),
            ..Options::USUAL
        };
        let grant = Grant {
            options: Arc::new(options),
            ..Grant::usual(Key::new("", name, 16).unwrap(), now)
        };
        Arc::new(Lease::new(grant, Arc::clone(&callbacks), None))
    };
    names.into_iter().map(lease).collect()
}

#[test]
fn renewals_of_one_slot_are_taken_together() {
    let all = leases_of([
        ("{a}1", 10),
        ("{b}1", 20),
        ("{a}2", 30),
        ("c", 40),
        ("{b}2", 50),
    ]);
    for (is_grouped, expected) in [(true, [10, 30, 20, 50, 40]), (false, [10, 20, 30, 40, 50])] {
        let renewals = RenewalQueue::default();
        if is_grouped {
            renewals.group_by_slot();
        }
        renewals.add(all.clone());
        let Some(RenewalBatch::Renew(next)) = renewals.wait_for_batch(AT_A_TIME) else {
            panic!("nothing to renew");
        };
        assert_eq!(ttls(&next), expected);
        let waiting = renewals.waiting.lock();
        let is_forgotten = waiting.by_slot.as_ref().is_none_or(BTreeSet::is_empty);
        assert!(waiting.is_empty() && is_forgotten);
    }
}

#[test]
fn a_slot_with_many_leases_delays_others_by_one_group() {
    let renewals = RenewalQueue::default();
    renewals.group_by_slot();
    renewals.add(leases_of((0..3 * SLOT_GROUP).map(|_| ("{a}", 10))));
    renewals.add(leases_of([("b", 9), ("c", 20)]));
    let take = |at_a_time| match renewals.wait_for_batch(at_a_time) {
        Some(RenewalBatch::Renew(next)) => ttls(&next),
        _ => panic!("nothing to renew"),
    };
    let first = take(AT_A_TIME);
    assert_eq!(
        (first[0], first.len()),
        (9, MIN_BATCH),
        "no more than a batch"
    );
    let second = take(AT_A_TIME);
    assert_eq!(second.last(), Some(&20));
    assert_eq!(second.len() + first.len(), 3 * SLOT_GROUP + 2);
    // A lease that ends early goes before the rest of a slot.
    renewals.add(leases_of((0..2 * SLOT_GROUP).map(|_| ("{a}", 30))));
    renewals.add(leases_of([("{a}", 10), ("b", 20)]));
    let next = take(AT_A_TIME);
    assert_eq!((next[0], next[SLOT_GROUP]), (10, 20));
}

#[test]
fn a_round_ends_with_the_last_renewal_of_its_slots() {
    let (mut waiting, start) = (QueueState::default(), MonotonicTime::now());
    waiting.by_slot = Some(BTreeSet::new());
    let of_slot = |count| with_ends(leases_of((0..count).map(|_| ("{a}", 30))));
    waiting.add_renewals(of_slot(2 * MIN_BATCH));
    let mut taken_after = |pause| {
        waiting.add_renewals(of_slot(2 * MIN_BATCH));
        waiting.take_renewals(start.after(pause), AT_A_TIME).len()
    };
    assert_eq!(taken_after(Duration::ZERO), MIN_BATCH);
    assert_eq!(taken_after(FULL_BATCH_AFTER), 5 * MIN_BATCH);
    // All renewals of the first round are taken, so this is a new round.
    assert_eq!(taken_after(2 * FULL_BATCH_AFTER), MIN_BATCH);
}

#[test]
fn renewals_that_were_sent_together_spread_together() {
    let names = [("{a}", 30); SLOT_GROUP + 2];
    let all = leases_of(names.into_iter().chain([("b", 30), ("b", 30)]));
    let own: Vec<f64> = all.iter().map(|lease| lease.grant().id.jitter()).collect();
    let jitters = |by_slot| super::jitters(&all, by_slot).collect::<Vec<f64>>();
    assert_eq!(jitters(false), own);
    let of_group = |first: usize, count: usize| vec![own[first]; count];
    let next = SLOT_GROUP;
    let expected = [
        of_group(0, SLOT_GROUP),
        of_group(next, 2),
        of_group(next + 2, 2),
    ];
    assert_eq!(jitters(true), expected.concat());
}

#[test]
fn a_worker_is_missing_while_all_are_busy() {
    let queue = Arc::new(RenewalQueue::default());
    queue.add_worker();
    assert!(!queue.add_worker_if_missing(3), "no lease waits");
    queue.add(leases([30]));
    assert!(queue.add_worker_if_missing(3));
    assert!(queue.add_worker_if_missing(3));
    assert!(!queue.add_worker_if_missing(3), "there are three");
    queue.remove_worker();
    assert!(queue.add_worker_if_missing(3));
    queue.wait_for_batch(AT_A_TIME);
    let idle = std::thread::spawn({
        let queue = Arc::clone(&queue);
        move || queue.wait_for_batch(AT_A_TIME).is_some()
    });
    while queue.waiting.lock().idle == 0 {
        std::thread::yield_now();
    }
    // Without a notification, the worker stays idle.
    queue.waiting.lock().add_renewals(with_ends(leases([30])));
    assert!(!queue.add_worker_if_missing(4), "a worker is idle");
    queue.changed.notify_one();
    assert!(idle.join().unwrap());
    queue.add(leases([30]));
    assert!(queue.add_worker_if_missing(4));
}

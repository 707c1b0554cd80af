//! Tests of renewal batches, of replies to renewals, and of confirmations.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering};

use crossbeam_channel::{bounded, unbounded};

use super::*;
use crate::lease::{Grant, Options};
use crate::report::event::EventLock;
use crate::store::{RenewalLimits, Scripted, ServerId};
use crate::util::clock::Clock;

#[derive(Default)]
struct Events {
    lost: AtomicUsize,
    failed: AtomicUsize,
}

impl EventHandler for Events {
    fn lost(&self, _: EventLock<'_>, _: &LossReason) {
        self.lost.fetch_add(1, Ordering::SeqCst);
    }

    fn renewal_failed(&self, _: EventLock<'_>, _: &Error) {
        self.failed.fetch_add(1, Ordering::SeqCst);
    }
}

struct Fixture {
    clock: Clock,
    store: Arc<Scripted>,
    reported: Arc<Events>,
    callbacks: Arc<CallbackExecutor>,
    threads: ThreadGroup,
    watchdog: Arc<Watchdog>,
}

const EVERY: Duration = Duration::from_secs(2);

/// A watchdog without its threads, and a lease whose renewal is due in [`EVERY`].
fn fixture() -> Fixture {
    let (clock, threads) = (Clock::movable(), ThreadGroup::new());
    let (store, reported) = (Arc::new(Scripted::default()), Arc::new(Events::default()));
    let events: Arc<dyn EventHandler> = reported.clone();
    let callbacks = CallbackExecutor::start(&threads, Some(events)).unwrap();
    let scheduler = Scheduler::new(clock.clone());
    let watchdog = Watchdog::new(
        scheduler,
        &Backend::new(store.clone()),
        callbacks.clone(),
        EVERY,
    );
    let options = Options {
        renew_every: Some(EVERY),
        ..Options::USUAL
    };
    let (key, now) = (Key::new("", "k", 16).unwrap(), clock.now());
    let grant = Grant {
        options: Arc::new(options),
        ..Grant::usual(key, now)
    };
    let lease = Lease::new(grant, callbacks.clone(), None);
    assert!(watchdog.schedule(&Arc::new(lease)));
    Fixture {
        clock,
        store,
        reported,
        callbacks,
        threads,
        watchdog,
    }
}

impl Fixture {
    /// Advances the clock by `pause`, and replies with `answer` to the renewal that is due then. Returns false if no
    /// renewal was sent.
    fn renews_after(&self, pause: Duration, answer: Result<Reply, Error>) -> bool {
        self.store.answer(move |_| answer);
        self.clock.advance(pause);
        self.watchdog.catch_up(&[]);
        !self.store.unasked()
    }
}

#[test]
fn a_failed_renewal_is_retried() {
    let f = fixture();
    let failed = Err(Error::new(ErrorKind::Unavailable, ""));
    assert!(f.renews_after(EVERY, failed));
    // A timer fires at most a millisecond late.
    let retry = EVERY / 4 + Duration::from_millis(1);
    assert!(f.renews_after(retry, Ok(Reply::Done)));
    f.callbacks.stop();
}

#[test]
fn a_renewal_that_finds_a_loss_reports_one() {
    let f = fixture();
    assert!(f.renews_after(EVERY, Ok(Reply::Missing)));
    f.callbacks.stop();
    assert!(
        f.threads
            .wait_until_ended(MonotonicTime::now().after(60 * EVERY))
    );
    assert_eq!(f.reported.lost.load(Ordering::SeqCst), 1);
    assert_eq!(f.reported.failed.load(Ordering::SeqCst), 0);
}

/// The renewal may have set the key after the release, or prolonged a key that stays for its `min_hold`.
#[test]
fn a_lease_released_during_its_renewal_is_released_again() {
    let second = Duration::from_secs(1);
    let cases = [
        // Whether renewals set keys, the `min_hold`, whether the lease passes to a ticket, and the releases.
        (true, Duration::ZERO, false, 1),
        (false, Duration::ZERO, false, 0),
        (false, second, false, 1),
        (false, second, true, 0),
    ];
    for (sets_keys, min_hold, is_transferred, releases) in cases {
        let f = fixture();
        f.store.renewals_set_keys.store(sets_keys, Ordering::SeqCst);
        let lease = scheduled_lease_with(
            &f,
            Options {
                min_hold,
                ..Options::USUAL
            },
        );
        let renewed = |outcome: Result<Reply, Error>| {
            let now = f.clock.now();
            assert!(lease.begin_ttl_change(now, || now));
            let _ = f.watchdog.end_ttl_change(&lease, now, now, EVERY, outcome);
            f.store.released.lock().clone()
        };
        assert_eq!(renewed(Ok(Reply::Done)), []);
        let now = f.clock.now();
        assert!(lease.begin_ttl_change(now, || now));
        match is_transferred {
            true => f.watchdog.end_transferred(&lease, now).unwrap(),
            false => drop(f.watchdog.end_lease(&lease, now).unwrap()),
        }
        let error = Error::new(ErrorKind::Timeout, "");
        let _ = f
            .watchdog
            .end_ttl_change(&lease, now, now, EVERY, Err(error));
        assert_eq!(
            *f.store.released.lock(),
            vec![lease.grant().id; releases],
            "{sets_keys} {min_hold:?} {is_transferred}"
        );
        let release = release_after_renewal(&lease, EVERY, now);
        assert_eq!(release.min_hold, min_hold);
        assert_eq!(release.held.is_some(), !min_hold.is_zero());
        f.callbacks.stop();
    }
}

/// A scheduled lease whose renewal is not due in these tests.
fn scheduled_lease(f: &Fixture) -> Arc<Lease> {
    scheduled_lease_with(f, Options::USUAL)
}

fn scheduled_lease_with(f: &Fixture, options: Options) -> Arc<Lease> {
    let usual = Grant::usual(Key::new("", "reported", 16).unwrap(), f.clock.now());
    let grant = Grant {
        options: Arc::new(options),
        ..usual
    };
    let lease = Arc::new(Lease::new(grant, Arc::clone(&f.callbacks), None));
    assert!(f.watchdog.schedule(&lease));
    lease
}

#[test]
fn a_denied_loss_makes_all_connections_suspect() {
    let f = fixture();
    let lease = scheduled_lease(&f);
    f.store.answer(|_| Ok(Reply::Done));
    f.watchdog.confirm_all(vec![&lease], LossReport::KeyRead);
    assert!(lease.loss(f.clock.now()).is_none());
    assert_eq!(f.store.suspected.load(Ordering::SeqCst), 1);
    f.store.answer(|_| Ok(Reply::Missing));
    f.watchdog.confirm_all(vec![&lease], LossReport::KeyRead);
    assert_eq!(lease.loss(f.clock.now()), Some(LossReason::Deleted));
    assert_eq!(f.store.suspected.load(Ordering::SeqCst), 1);
    // A lease that is already lost is not confirmed.
    f.watchdog.confirm_all(vec![&lease], LossReport::KeyRead);
    f.callbacks.stop();
}

/// Any user may publish a message of a forced release, so a false message is no sign of a bad connection.
#[test]
fn a_denied_force_makes_no_connection_suspect() {
    let f = fixture();
    let lease = scheduled_lease(&f);
    let by = || HolderId::of_text("host/1/0");
    assert!(lease.record_force_message(by(), f.clock.now()));
    assert!(
        !lease.record_force_message(by(), f.clock.now()),
        "one at a time"
    );
    f.store.answer(|_| Ok(Reply::Done));
    f.watchdog
        .confirm_all(vec![&lease], LossReport::ForceMessage);
    assert!(lease.loss(f.clock.now()).is_none());
    assert_eq!(f.store.suspected.load(Ordering::SeqCst), 0);
    assert!(
        !lease.record_force_message(by(), f.clock.now()),
        "within a second of the denial"
    );
    // Tracking the key also reads it.
    let tracked = f.store.tracked.load(Ordering::SeqCst);
    f.clock.advance(LONGEST_RETRY + Duration::from_millis(2));
    f.watchdog.catch_up(&[]);
    assert_eq!(f.store.tracked.load(Ordering::SeqCst), tracked + 1);
    assert!(lease.record_force_message(by(), f.clock.now()));
    f.store
        .answer(|_| Err(Error::new(ErrorKind::Unavailable, "")));
    f.watchdog
        .confirm_all(vec![&lease], LossReport::ForceMessage);
    assert!(
        lease.record_force_message(by(), f.clock.now()),
        "the request got no answer"
    );
    f.store.answer(|_| Ok(Reply::Taken { by: None }));
    f.watchdog
        .confirm_all(vec![&lease], LossReport::ForceMessage);
    let reason = LossReason::ForceUnlocked { by: by() };
    assert_eq!(lease.loss(f.clock.now()), Some(reason));
    f.callbacks.stop();
}

/// If a force message were queued as a read, forged messages would make connections suspect, and the next message would
/// not be confirmed.
#[test]
fn a_force_message_is_not_queued_as_a_read() {
    let f = fixture();
    let lease = scheduled_lease(&f);
    let by = HolderId::of_text("host/1/0");
    f.store.must_confirm_losses.store(true, Ordering::SeqCst);
    f.watchdog.handle_force_message(Arc::clone(&lease), by);
    let queued = f.watchdog.renewals_of(ServerId::ONLY).wait_for_batch(1);
    let Some(RenewalBatch::Confirm(report, leases)) = queued else {
        panic!("no confirmation is queued");
    };
    assert_eq!(report, LossReport::ForceMessage);
    assert!(leases.values().all(|queued| Arc::ptr_eq(queued, &lease)));
    f.callbacks.stop();
}

#[test]
fn a_denied_force_is_no_later_loss_reason() {
    let f = fixture();
    let lease = scheduled_lease(&f);
    assert!(lease.record_force_message(HolderId::of_text("host/1/0"), f.clock.now()));
    f.store.answer(|_| Ok(Reply::Done));
    f.watchdog
        .confirm_all(vec![&lease], LossReport::ForceMessage);
    f.store.answer(|_| Ok(Reply::Missing));
    f.watchdog.confirm_all(vec![&lease], LossReport::KeyRead);
    assert_eq!(lease.loss(f.clock.now()), Some(LossReason::Deleted));
    f.callbacks.stop();
}

/// After the message of the first node, the other nodes of a quorum may still hold the lease, so a pipeline denies the
/// loss. Then the messages of the other nodes follow.
#[test]
fn a_force_message_during_a_denial_is_the_loss_reason() {
    let f = fixture();
    let lease = scheduled_lease(&f);
    let by = || HolderId::of_text("host/1/0");
    assert!(lease.record_force_message(by(), f.clock.now()));
    assert!(!lease.record_force_message(by(), f.clock.now()));
    f.store.answer(|_| Ok(Reply::Done));
    f.watchdog
        .confirm_all(vec![&lease], LossReport::ForceMessage);
    f.store.answer(|_| Ok(Reply::Missing));
    f.watchdog.confirm_all(vec![&lease], LossReport::KeyRead);
    let reason = LossReason::ForceUnlocked { by: by() };
    assert_eq!(lease.loss(f.clock.now()), Some(reason));
    f.callbacks.stop();
}

#[test]
fn an_unconfirmed_loss_is_read_again() {
    let f = fixture();
    let lease = scheduled_lease(&f);
    // Moves the clock past the time at which tracking is due.
    f.clock.advance(Duration::from_millis(50));
    f.watchdog.catch_up(&[]);
    let tracked = f.store.tracked.load(Ordering::SeqCst);
    f.store
        .answer(|_| Err(Error::new(ErrorKind::Unavailable, "")));
    f.watchdog.confirm_all(vec![&lease], LossReport::KeyRead);
    assert!(lease.loss(f.clock.now()).is_none());
    f.clock.advance(LONGEST_RETRY / 2);
    f.watchdog.catch_up(&[]);
    assert_eq!(f.store.tracked.load(Ordering::SeqCst), tracked);
    f.clock
        .advance(LONGEST_RETRY / 2 + Duration::from_millis(2));
    f.watchdog.catch_up(&[]);
    assert_eq!(f.store.tracked.load(Ordering::SeqCst), tracked + 1);
    f.callbacks.stop();
}

/// Leases whose renewal is due. Their next timers are set.
fn due(count: usize, watchdog: &Watchdog, callbacks: &Arc<CallbackExecutor>) -> Vec<Arc<Lease>> {
    let now = watchdog.now();
    let due_at = now.after(Options::USUAL.renew_every.unwrap());
    let lease = |_| {
        let grant = Grant::usual(Key::new("", "k", 16).unwrap(), now);
        let lease = Arc::new(Lease::new(grant, Arc::clone(callbacks), None));
        lease.take_due(due_at, |old, next| {
            watchdog.replace_timer(&lease, old, next)
        });
        lease
    };
    (0..count).map(lease).collect()
}

#[test]
fn due_leases_are_renewed_in_batches() {
    let (f, count) = (fixture(), RenewalLimits::USUAL.at_a_time + 1);
    f.watchdog
        .queue_renewals(due(count, &f.watchdog, &f.callbacks));
    for _ in 1..count {
        f.store.answer(|_| Ok(Reply::Done));
    }
    let watchdog = Arc::clone(&f.watchdog);
    f.store.answer(move |_| {
        watchdog.stop();
        Ok(Reply::Done)
    });
    f.watchdog
        .run_renewals(&f.watchdog.renewals_of(ServerId::ONLY));
    let at_a_time = f.store.at_a_time.lock().clone();
    assert_eq!(at_a_time.iter().sum::<usize>(), count);
    assert_eq!(at_a_time[0], MIN_BATCH);
    f.callbacks.stop();
}

#[test]
fn a_second_worker_starts_while_the_first_one_is_busy() {
    let f = fixture();
    *f.watchdog.threads.lock() = Some(f.threads.clone());
    let (begun, has_begun) = unbounded();
    let ends: Vec<_> = (0..2)
        .map(|n| {
            let (end, may_end) = unbounded::<()>();
            let begun = begun.clone();
            f.store.answer(move |_| {
                begun.send(n).unwrap();
                let _ = may_end.recv();
                Ok(Reply::Done)
            });
            f.watchdog.queue_renewals(due(1, &f.watchdog, &f.callbacks));
            let seen = has_begun.recv_timeout(10 * EVERY);
            assert_eq!(seen, Ok(n), "the workers renew at the same time");
            end
        })
        .collect();
    let queue = f.watchdog.renewals_of(ServerId::ONLY);
    f.watchdog.queue_renewals(due(1, &f.watchdog, &f.callbacks));
    assert!(!queue.add_worker_if_missing(2), "there are two workers");
    f.store.answer(|_| Ok(Reply::Done));
    drop(ends);
    while !f.store.answers_taken() {
        std::thread::yield_now();
    }
    f.watchdog.stop();
    f.callbacks.stop();
    let end = MonotonicTime::now().after(60 * EVERY);
    assert!(f.threads.wait_until_ended(end));
}

#[test]
fn only_large_batches_are_spread() {
    for (count, is_spread) in [(MIN_BATCH - 1, false), (MIN_BATCH, true)] {
        let f = fixture();
        let leases = due(count, &f.watchdog, &f.callbacks);
        for _ in 0..count {
            f.store.answer(|_| Ok(Reply::Done));
        }
        f.watchdog.renew_all(&leases);
        // This is after the time at which tracking is due.
        let later = f.watchdog.now().after(Duration::from_secs(1));
        let next = |lease: &Arc<Lease>| match lease.take_due(later, |_, _| None) {
            DueActions::Held { next, .. } => next,
            DueActions::Ended => panic!("the lease was renewed"),
        };
        let renewed_at: BTreeSet<MonotonicTime> = leases.iter().map(next).collect();
        assert_eq!(renewed_at.len() > 1, is_spread);
        f.callbacks.stop();
    }
}

#[test]
fn a_hanging_renewal_delays_no_other() {
    let (threads, store) = (ThreadGroup::new(), Arc::new(Scripted::default()));
    let callbacks = CallbackExecutor::start(&threads, None).unwrap();
    let scheduler = Scheduler::new(Clock::default());
    let watchdog = Watchdog::new(
        scheduler,
        &Backend::new(store.clone()),
        callbacks.clone(),
        EVERY,
    );
    watchdog.start(&threads).unwrap();
    let (hangs, hung) = bounded(1);
    let (end, ended) = bounded::<()>(0);
    store.answer(move |_| {
        hangs.send(()).unwrap();
        let _ = ended.recv();
        Ok(Reply::Done)
    });
    let (renews, renewed) = bounded(1);
    store.answer(move |_| {
        renews.send(()).unwrap();
        Ok(Reply::Done)
    });
    for _ in 1..RenewalLimits::USUAL.at_a_time {
        store.answer(|_| Ok(Reply::Done));
    }
    watchdog.queue_renewals(due(
        RenewalLimits::USUAL.at_a_time + 1,
        &watchdog,
        &callbacks,
    ));
    let long = Duration::from_secs(60);
    let seen = [hung.recv_timeout(long), renewed.recv_timeout(long)];
    drop(end);
    watchdog.stop();
    callbacks.stop();
    assert!(threads.wait_until_ended(MonotonicTime::now().after(long)));
    assert_eq!(seen, [Ok(()); 2]);
}

#[test]
fn leases_queued_for_tracking_are_bounded() {
    let f = fixture();
    let room = f.watchdog.tracked.room();
    let queue = |round: usize| {
        for n in 0..room {
            let key = Key::new("", &format!("{round}/{n}"), 16).unwrap();
            let lease = Lease::new(Grant::usual(key, f.clock.now()), f.callbacks.clone(), None);
            assert!(f.watchdog.schedule(&Arc::new(lease)));
        }
        f.clock.advance(Duration::from_millis(100));
        let (_, to_track) = f
            .watchdog
            .process_due(f.watchdog.scheduler.take_due_timers());
        f.watchdog.scheduler.queue_tracking(to_track, room);
    };
    queue(0);
    queue(1);
    let work = f.watchdog.scheduler.wait_for_background_work();
    assert_eq!(work.unwrap().0.len(), room);
    f.watchdog.stop();
    f.callbacks.stop();
}

#[test]
fn an_extension_behind_a_renewal_has_one_time_out() {
    let f = fixture();
    let lease = scheduled_lease(&f);
    assert!(lease.begin_ttl_change(f.clock.now(), || f.clock.now()));
    let (asked, deadline) = bounded(1);
    f.store.answer(move |request| {
        let _ = asked.send(request.deadline);
        Ok(Reply::Done)
    });
    std::thread::scope(|scope| {
        let extension = scope.spawn(|| f.watchdog.extend(&lease, Duration::from_secs(60)));
        while !lease.is_ttl_change_awaited() {
            std::thread::yield_now();
        }
        let latest = f.clock.now().after(EVERY);
        f.clock.advance(EVERY / 2);
        lease.fail_ttl_change(f.clock.now(), EVERY, None);
        extension.join().unwrap().unwrap();
        assert!(deadline.recv().unwrap() <= latest);
    });
    f.callbacks.stop();
}

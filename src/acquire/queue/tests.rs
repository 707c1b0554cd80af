pub mod shares;

use crossbeam_channel::unbounded;

use super::*;
use crate::acquire::tests::turn;
use crate::lease::{CallbackExecutor, Grant};
use crate::process::threads::ThreadGroup;

const FAR: Duration = Duration::from_secs(600);
const OPTIONS: Options = Options::USUAL;
const GRANT: GrantMessage = GrantMessage::USUAL;
const LIMITS: HandOffs = HandOffs {
    count: 2,
    time: FAR,
};

fn key(name: &str) -> Key {
    Key::new("", name, 16).unwrap()
}

fn far() -> MonotonicTime {
    MonotonicTime::now().after(FAR)
}

fn soon() -> MonotonicTime {
    MonotonicTime::now().after(Duration::from_millis(1))
}

fn lease(key: &Key) -> Arc<Lease> {
    lease_of(key, LeaseId::random())
}

fn lease_of(key: &Key, id: LeaseId) -> Arc<Lease> {
    lease_under(7, key, id)
}

fn lease_under(token: u64, key: &Key, id: LeaseId) -> Arc<Lease> {
    let callbacks = CallbackExecutor::start(&ThreadGroup::new(), None).unwrap();
    callbacks.stop();
    let now = MonotonicTime::now();
    let grant = Grant {
        id,
        token,
        ..Grant::usual(key.clone(), now)
    };
    Arc::new(Lease::new(grant, callbacks, None))
}

fn operator() -> HolderId {
    HolderId::of_text("host/1/0")
}

fn join<'a>(queues: &'a LocalQueues, key: &'a Key) -> WaiterGuard<'a> {
    queues.join(key, OPTIONS, None)
}

fn is_first(place: &WaiterGuard<'_>) -> bool {
    matches!(place.position(MonotonicTime::now()), QueuePosition::First)
}

#[test]
fn queue_is_first_in_first_out() {
    let (queues, key) = (LocalQueues::new(Clock::default()), key("a"));
    let [one, two, three] = [(); 3].map(|()| join(&queues, &key));
    assert!(is_first(&one) && !is_first(&two) && !is_first(&three));
    one.leave();
    assert!(is_first(&two) && !is_first(&three));
    three.leave();
    two.leave();
    assert_eq!(queues.queues(), 0);
}

#[test]
fn join_if_empty_does_not_join_behind_others() {
    let (queues, key) = (LocalQueues::new(Clock::default()), key("a"));
    let one = join(&queues, &key);
    assert!(queues.join_if_empty(&key, OPTIONS).is_none());
    drop(one);
    assert!(queues.join_if_empty(&key, OPTIONS).is_some());
}

#[test]
fn wake_up_before_the_sleep_is_kept() {
    let (queues, key) = (LocalQueues::new(Clock::default()), key("a"));
    let one = join(&queues, &key);
    queues.wake(&key);
    assert_eq!(one.sleep(far()), WakeReason::Woken);
    assert_eq!(one.sleep(soon()), WakeReason::TimedOut, "used up");
}

#[test]
fn a_leaving_waiter_wakes_the_next_one() {
    let (queues, key) = (LocalQueues::new(Clock::default()), key("a"));
    let (one, two) = (join(&queues, &key), join(&queues, &key));
    queues.wake(&key);
    one.leave();
    assert_eq!(two.sleep(far()), WakeReason::Woken);
}

#[test]
fn first_waiter_waits_for_a_local_holder() {
    let (queues, key) = (LocalQueues::new(Clock::default()), key("a"));
    let (one, two) = (join(&queues, &key), join(&queues, &key));
    let held = lease(&key);
    assert!(one.leave_with(&held, LIMITS).0.is_none());
    assert!(matches!(
        two.position(MonotonicTime::now()),
        QueuePosition::Held(_)
    ));
    assert_eq!(
        two.sleep(soon()),
        WakeReason::TimedOut,
        "no need to ask yet"
    );
    queues.remove_holder(&held);
    assert_eq!(two.sleep(far()), WakeReason::Woken);
    assert!(is_first(&two));
}

#[test]
fn lost_lease_blocks_no_waiter() {
    let (queues, key) = (LocalQueues::new(Clock::default()), key("a"));
    let (one, two) = (join(&queues, &key), join(&queues, &key));
    let held = lease(&key);
    assert!(one.leave_with(&held, LIMITS).0.is_none());
    held.lose(MonotonicTime::now(), LossReason::Deleted);
    assert!(is_first(&two));
}

#[test]
fn queue_without_waiters_or_holder_is_removed() {
    let (queues, key) = (LocalQueues::new(Clock::default()), key("a"));
    let held = lease(&key);
    assert!(join(&queues, &key).leave_with(&held, LIMITS).0.is_none());
    assert_eq!(queues.queues(), 1);
    queues.remove_holder(&held);
    assert_eq!(queues.queues(), 0);
}

#[test]
fn late_release_leaves_the_new_holder() {
    let (queues, key) = (LocalQueues::new(Clock::default()), key("a"));
    let (old, new) = (lease(&key), lease(&key));
    assert!(join(&queues, &key).leave_with(&old, LIMITS).0.is_none());
    assert!(join(&queues, &key).leave_with(&new, LIMITS).0.is_none());
    queues.remove_holder(&old);
    let waiter = join(&queues, &key);
    assert!(matches!(
        waiter.position(MonotonicTime::now()),
        QueuePosition::Held(_)
    ));
}

#[test]
fn only_the_first_waiter_gets_a_hand_off() {
    let (queues, key) = (LocalQueues::new(Clock::default()), key("a"));
    let held = lease(&key);
    assert!(!queues.hand_off(&held, |_| unreachable!("nobody waits")));
    assert!(join(&queues, &key).leave_with(&held, LIMITS).0.is_none());
    assert!(!queues.hand_off(&held, |_| unreachable!("nobody waits")));
    let (one, two) = (join(&queues, &key), join(&queues, &key));
    assert!(queues.hand_off(&held, |options| {
        held.hand_off(MonotonicTime::now(), options)
            .map(|(next, _)| next)
    }));
    assert_eq!(one.sleep(far()), WakeReason::Woken);
    let next = one.take_handed_off().unwrap();
    assert_eq!(next.grant().token, held.grant().token + 1);
    assert!(two.take_handed_off().is_none());
    assert!(matches!(
        two.position(MonotonicTime::now()),
        QueuePosition::Held(_)
    ));
    assert!(!queues.hand_off(&held, |_| unreachable!("it is not the holder any more")));
}

#[test]
fn leaving_waiter_returns_a_hand_off() {
    let (queues, key) = (LocalQueues::new(Clock::default()), key("a"));
    let held = lease(&key);
    assert!(join(&queues, &key).leave_with(&held, LIMITS).0.is_none());
    let one = join(&queues, &key);
    assert!(queues.hand_off(&held, |options| {
        held.hand_off(MonotonicTime::now(), options)
            .map(|(next, _)| next)
    }));
    let (handed, entry) = one.leave();
    assert!(handed.is_some() && entry.is_none());
}

#[test]
fn entry_outlasts_its_waiter_until_the_last_leaves() {
    let (queues, key) = (LocalQueues::new(Clock::default()), key("a"));
    let (one, two) = (join(&queues, &key), join(&queues, &key));
    let asked = LeaseId::random();
    let (lease, was_queued, other) = one.entry(asked, MonotonicTime::now());
    assert!(lease == asked && was_queued == EntryKind::New && other.is_none());
    assert!(
        one.record_queued(asked, 1, QueueMode::Notified, 0)
            .is_some()
    );
    assert!(one.leave().1.is_none());
    let (lease, was_queued, other) = two.entry(LeaseId::random(), MonotonicTime::now());
    assert!(lease == asked && was_queued == EntryKind::Existing && other.is_none());
    assert!(
        two.record_queued(asked, 1, QueueMode::Notified, 0)
            .is_some()
    );
    assert_eq!(two.leave().1.unwrap().lease, asked);
    assert_eq!(queues.queues(), 0);
}

#[test]
fn in_flight_entry_is_left_to_its_caller() {
    let (queues, key) = (LocalQueues::new(Clock::default()), key("a"));
    let held = lease(&key);
    let [one, two] = [(); 2].map(|()| join(&queues, &key));
    let [asked, fresh] = [(); 2].map(|()| LeaseId::random());
    one.entry(asked, MonotonicTime::now());
    // Another thread adopts the lock, and hands it off to a waiter whose request has no reply yet.
    queues.hold(&held);
    assert!(queues.hand_off(&held, |options| {
        held.hand_off(MonotonicTime::now(), options)
            .map(|(next, _)| next)
    }));
    let (lease, was_queued, other) = two.entry(fresh, MonotonicTime::now());
    assert!(lease == fresh && was_queued == EntryKind::New && other.is_none());
    assert!(
        two.record_queued(fresh, 1, QueueMode::Notified, 0)
            .is_none(),
        "its caller releases it"
    );
    assert!(two.leave().1.is_none());
    assert!(
        one.record_queued(asked, 1, QueueMode::Notified, 0)
            .is_none(),
        "its caller releases it now"
    );
    assert!(one.leave().0.is_some());
}

#[test]
fn shutdown_leaves_in_flight_entries_to_their_callers() {
    for again in [false, true] {
        let (queues, key) = (LocalQueues::new(Clock::default()), key("a"));
        let one = join(&queues, &key);
        let asked = LeaseId::random();
        one.entry(asked, MonotonicTime::now());
        if again {
            assert!(
                one.record_queued(asked, 1, QueueMode::Notified, 0)
                    .is_some()
            );
            one.entry(LeaseId::random(), MonotonicTime::now());
        }
        assert!(queues.abandon_all().is_empty());
        assert!(
            one.record_queued(asked, 1, QueueMode::Notified, 0)
                .is_none(),
            "the caller of its request releases it"
        );
    }
}

#[test]
fn panic_leaves_the_entry_to_the_next_waiter() {
    let (queues, key) = (LocalQueues::new(Clock::default()), key("a"));
    let [one, two] = [(); 2].map(|()| join(&queues, &key));
    let asked = LeaseId::random();
    one.entry(asked, MonotonicTime::now());
    drop(one);
    let (lease, was_queued, _) = two.entry(LeaseId::random(), MonotonicTime::now());
    assert!(lease == asked && was_queued == EntryKind::Existing);
}

#[test]
fn entry_with_other_options_is_released() {
    let (queues, key) = (LocalQueues::new(Clock::default()), key("a"));
    let one = join(&queues, &key);
    let asked = LeaseId::random();
    one.entry(asked, MonotonicTime::now());
    assert!(
        one.record_queued(asked, 1, QueueMode::Notified, 0)
            .is_some()
    );
    let others = Options {
        ttl: Duration::from_secs(5),
        ..OPTIONS
    };
    let two = queues.join(&key, others, None);
    one.leave();
    let (lease, was_queued, other) = two.entry(LeaseId::random(), MonotonicTime::now());
    assert!(lease != asked && was_queued == EntryKind::New);
    assert_eq!(other.unwrap().lease, asked);
}

#[test]
fn grant_message_before_the_reply_is_kept() {
    let (queues, key) = (LocalQueues::new(Clock::default()), key("a"));
    let one = join(&queues, &key);
    let asked = LeaseId::random();
    one.entry(asked, MonotonicTime::now());
    assert_eq!(queues.granted(&key, asked, GRANT), GrantOf::Waiter);
    assert_eq!(one.sleep(far()), WakeReason::Woken);
    assert!(matches!(
        one.position(MonotonicTime::now()),
        QueuePosition::Granted(_, GRANT)
    ));
}

#[test]
fn grant_with_a_force_message_needs_confirmation() {
    let to_confirm = GrantMessage {
        to_confirm: true,
        ..GRANT
    };
    for is_force_first in [true, false] {
        let (queues, key) = (LocalQueues::new(Clock::default()), key("a"));
        let one = join(&queues, &key);
        let asked = LeaseId::random();
        one.entry(asked, MonotonicTime::now());
        let force = || assert!(queues.forced(&key, asked.start(), &operator()).is_none());
        if is_force_first {
            force();
        }
        assert_eq!(queues.granted(&key, asked, GRANT), GrantOf::Waiter);
        assert_eq!(one.sleep(soon()), WakeReason::Woken);
        if !is_force_first {
            force();
        }
        assert_eq!(
            one.sleep(soon()),
            WakeReason::TimedOut,
            "woken by the grant only"
        );
        let QueuePosition::Granted(entry, grant) = one.position(MonotonicTime::now()) else {
            panic!("its entry stays");
        };
        assert_eq!((entry.lease, grant), (asked, to_confirm));
    }
}

#[test]
fn force_message_before_acceptance_is_returned() {
    let (queues, key) = (LocalQueues::new(Clock::default()), key("a"));
    let (one, two) = (join(&queues, &key), join(&queues, &key));
    let [forced, other] = [(); 2].map(|()| lease(&key));
    one.entry(forced.grant().id, MonotonicTime::now());
    queues.forced(&key, forced.grant().id.start(), &operator());
    assert_eq!(one.leave_with(&forced, LIMITS).1, Some(operator()));
    assert_eq!(
        two.leave_with(&other, LIMITS).1,
        None,
        "the message named another lease"
    );
}

#[test]
fn second_grant_of_a_lease_needs_confirmation() {
    let (queues, key) = (LocalQueues::new(Clock::default()), key("a"));
    let one = join(&queues, &key);
    let (asked, fresh) = (LeaseId::random(), LeaseId::random());
    one.entry(asked, MonotonicTime::now());
    assert!(
        one.record_queued(asked, 5, QueueMode::Notified, 3)
            .is_some()
    );
    let grants_by = |message| {
        assert_eq!(queues.granted(&key, asked, message), GrantOf::Waiter);
        match one.position(MonotonicTime::now()) {
            QueuePosition::Granted(_, grant) => grant.to_confirm,
            other => panic!("{other:?}"),
        }
    };
    assert!(!grants_by(GRANT));
    assert!(!grants_by(GRANT), "the same message came on two ways");
    let other = GrantMessage {
        token: GRANT.token + 1,
        ..GRANT
    };
    assert!(grants_by(other));
    let grants = || grants_by(GRANT);
    assert!(grants());
    // The reply shows that the lease is still queued, so the grant was forged.
    assert_eq!(
        one.entry(fresh, MonotonicTime::now()).1,
        EntryKind::Existing
    );
    let kept = QueueMode::Existing { notified: true };
    assert!(one.record_queued(asked, 5, kept, 3).is_some());
    assert!(grants());
    one.entry(fresh, MonotonicTime::now());
    assert!(one.record_queued(asked, 5, kept, 3).is_some());
    // The entry keeps its place, as if no grant had been reported.
    one.entry(fresh, MonotonicTime::now());
    assert_eq!(one.remove_missing_entry(asked), Some(3));
    let again = EntryKind::Rejoin { since: 5 };
    assert_eq!(one.entry(fresh, MonotonicTime::now()).1, again);
}

#[test]
fn token_is_plausible_from_joining_to_now() {
    const MINUTE: u64 = 60_000_000;
    const JOINED: u64 = 1_800_000_000_000_000;
    let (queues, key, now) = (
        LocalQueues::new(Clock::default()),
        key("a"),
        MonotonicTime::now(),
    );
    let later = now.after(Duration::from_secs(5));
    for since in [JOINED, front_place(JOINED)] {
        let one = join(&queues, &key);
        let asked = LeaseId::random();
        one.entry(asked, now);
        let is_plausible = |micros: u64| {
            let token = micros << 10;
            let grant = GrantMessage { token, ..GRANT };
            assert_eq!(queues.granted(&key, asked, grant), GrantOf::Waiter);
            match one.position(now) {
                QueuePosition::Granted(entry, grant) => entry.is_plausible(grant, later),
                other => panic!("{other:?}"),
            }
        };
        assert!(!is_plausible(JOINED), "its place is not known");
        assert!(
            one.record_queued(asked, since, QueueMode::Notified, 0)
                .is_some()
        );
        assert!(is_plausible(JOINED) && is_plausible(JOINED + MINUTE + 5_000_000));
        assert!(!is_plausible(JOINED - 1) && !is_plausible(JOINED + MINUTE + 5_000_001));
        assert!(!is_plausible(u64::MAX >> 10));
        one.leave();
    }
}

#[test]
fn holder_of_a_forced_lease_is_found() {
    let (queues, key) = (LocalQueues::new(Clock::default()), key("a"));
    let held = lease(&key);
    assert!(join(&queues, &key).leave_with(&held, LIMITS).0.is_none());
    assert!(
        queues
            .forced(&key, LeaseId::random().start(), &operator())
            .is_none()
    );
    let found = queues
        .forced(&key, held.grant().id.start(), &operator())
        .unwrap();
    assert!(Arc::ptr_eq(&found, &held));
}

#[test]
fn only_grants_of_abandoned_leases_are_released() {
    use GrantOf::OtherLease;

    let (queues, key) = (LocalQueues::new(Clock::default()), key("a"));
    let [held, left, forgotten, missing, panicked] = [(); 5].map(|()| LeaseId::random());
    assert_eq!(
        queues.granted(&key, held, GRANT),
        OtherLease,
        "the key has no queue"
    );
    let one = join(&queues, &key);
    assert_eq!(
        queues.granted(&key, held, GRANT),
        OtherLease,
        "nobody asked for it"
    );
    one.entry(held, MonotonicTime::now());
    let lease = lease_of(&key, held);
    assert!(one.leave_with(&lease, LIMITS).0.is_none());
    assert_eq!(queues.granted(&key, held, GRANT), OtherLease, "it is held");
    queues.remove_holder(&lease);
    assert_eq!(queues.granted(&key, held, GRANT), OtherLease, "it was held");
    let one = join(&queues, &key);
    one.entry(missing, MonotonicTime::now());
    one.remove_missing_entry(missing);
    one.entry(forgotten, MonotonicTime::now());
    queues.forget_entry(&key, forgotten, Mode::Exclusive);
    one.entry(left, MonotonicTime::now());
    assert!(one.record_queued(left, 1, QueueMode::Notified, 0).is_some());
    assert_eq!(queues.granted(&key, left, GRANT), GrantOf::Waiter);
    one.leave();
    let one = join(&queues, &key);
    one.entry(panicked, MonotonicTime::now());
    drop(one);
    for lease in [left, forgotten, missing, panicked] {
        assert_eq!(
            queues.granted(&key, lease, GRANT),
            GrantOf::AbandonedLease(Mode::Exclusive)
        );
        assert_eq!(queues.granted(&key, lease, GRANT), OtherLease, "only once");
    }
    assert_eq!(queues.granted(&key, LeaseId::random(), GRANT), OtherLease);
}

#[test]
fn sleep_ends_when_cancelled_or_woken() {
    let (queues, key) = (LocalQueues::new(Clock::default()), key("a"));
    let (stop, stopped) = unbounded();
    let one = queues.join(&key, OPTIONS, Some(&stopped));
    queues.wake(&key);
    assert_eq!(one.sleep(far()), WakeReason::Woken);
    assert_eq!(one.sleep(soon()), WakeReason::TimedOut);
    drop(stop);
    assert_eq!(one.sleep(far()), WakeReason::Cancelled);
}

#[test]
fn later_grant_replaces_an_adopted_one() {
    let (queues, key) = (LocalQueues::new(Clock::default()), key("a"));
    let now = MonotonicTime::now();
    let [older, newer] = [1, 2].map(|token| lease_under(token, &key, LeaseId::random()));
    for [first, second] in [[&older, &newer], [&newer, &older]] {
        let [first, second] = [first, second].map(|lease| {
            let lease = lease_under(lease.grant().token, &key, lease.grant().id);
            queues.hold(&lease);
            lease
        });
        let (lost, held) = if first.grant().token == 1 {
            (first, second)
        } else {
            (second, first)
        };
        assert_eq!(lost.loss(now), Some(LossReason::Deleted));
        assert_eq!(held.loss(now), None);
        assert!(Arc::ptr_eq(&queues.holders()[0], &held));
        queues.remove_holder(&held);
        queues.remove_holder(&lost);
        assert_eq!(queues.queues(), 0);
    }
}

#[test]
fn replaced_lease_past_its_validity_is_expired() {
    let key = key("a");
    let hold: fn(&LocalQueues, &Arc<Lease>) = |queues, next| queues.hold(next);
    let enter: fn(&LocalQueues, &Arc<Lease>) = |queues, next| {
        let (handed, _) = join(queues, &next.grant().key).leave_with(next, LIMITS);
        assert!(handed.is_none());
    };
    for replace in [hold, enter] {
        for (passed, reason) in [(29, LossReason::Deleted), (30, LossReason::Expired)] {
            let clock = Clock::movable();
            let queues = LocalQueues::new(clock.clone());
            let [before, next] = [1, 2].map(|token| lease_under(token, &key, LeaseId::random()));
            enter(&queues, &before);
            clock.advance(Duration::from_secs(passed));
            replace(&queues, &next);
            assert_eq!(before.loss(MonotonicTime::now()), Some(reason));
        }
    }
}

#[test]
fn wake_first_wakes_first_waiters_only() {
    let queues = LocalQueues::new(Clock::default());
    let keys = ["a", "b"].map(key);
    let firsts = keys.each_ref().map(|key| join(&queues, key));
    let second = join(&queues, &keys[0]);
    queues.wake_first(&|_| true);
    for first in &firsts {
        assert_eq!(first.sleep(soon()), WakeReason::Woken);
    }
    assert_eq!(second.sleep(soon()), WakeReason::TimedOut);
}

#[test]
fn held_key_without_waiters_can_be_joined_if_empty() {
    let (queues, key) = (LocalQueues::new(Clock::default()), key("a"));
    let one = join(&queues, &key);
    assert!(queues.join_if_empty(&key, OPTIONS).is_none());
    assert!(one.leave_with(&lease(&key), LIMITS).0.is_none());
    assert!(queues.join_if_empty(&key, OPTIONS).is_some());
}

#[test]
fn abandoned_lease_is_taken_once() {
    let mut abandoned = Abandoned::default();
    let [first, second] = [(); 2].map(|()| LeaseId::random());
    for lease in [first, second, first] {
        abandoned.insert(lease, Mode::Exclusive);
    }
    assert_eq!(abandoned.take(first), Some(Mode::Exclusive));
    assert_eq!(abandoned.take(first), None);
    assert!(abandoned.take(second).is_some());
}

#[test]
fn newest_abandoned_leases_are_known() {
    let mut abandoned = Abandoned::default();
    let leases: Vec<LeaseId> = (0..=MAX_ABANDONED).map(|_| LeaseId::random()).collect();
    for lease in &leases {
        abandoned.insert(*lease, Mode::Read);
    }
    assert_eq!(abandoned.0.len(), MAX_ABANDONED);
    assert_eq!(abandoned.take(leases[0]), None);
    for lease in &leases[1..] {
        assert_eq!(abandoned.take(*lease), Some(Mode::Read));
    }
}

const NODES: [ServerId; 3] = [ServerId(0), ServerId(1), ServerId(2)];
const MAJORITY: usize = 2;

#[test]
fn missing_majority_wakes_the_waiter_once() {
    let (queues, key) = (LocalQueues::new(Clock::default()), key("a"));
    let one = join(&queues, &key);
    one.watch(false);
    queues.record_read(&key, NODES[0], false, MAJORITY);
    queues.record_read(&key, NODES[1], true, MAJORITY);
    queues.record_read(&key, NODES[0], false, MAJORITY);
    assert_eq!(one.sleep(soon()), WakeReason::TimedOut);
    queues.record_read(&key, NODES[2], false, MAJORITY);
    assert_eq!(one.sleep(soon()), WakeReason::Woken);
    assert!(!one.was_released(), "no majority had the key");
    queues.record_read(&key, NODES[1], false, MAJORITY);
    assert_eq!(one.sleep(soon()), WakeReason::TimedOut, "once");
}

#[test]
fn change_of_a_present_key_counts_as_its_release() {
    let (queues, key) = (LocalQueues::new(Clock::default()), key("a"));
    assert!(!queues.record_change(&key, NODES[0], MAJORITY), "no waiter");
    let one = join(&queues, &key);
    assert!(!queues.record_change(&key, NODES[0], MAJORITY), "no watch");
    one.watch(false);
    let read = |node, exists| queues.record_read(&key, node, exists, MAJORITY);
    let change = |node| queues.record_change(&key, node, MAJORITY);
    read(NODES[0], true);
    // The change may be a grant, since the key has not been read on this node yet.
    assert!(change(NODES[1]));
    read(NODES[1], true);
    assert!(change(NODES[0]), "a read may find the key there");
    assert!(change(NODES[0]), "the key is missing there");
    assert_eq!(one.sleep(soon()), WakeReason::TimedOut);
    assert!(!one.was_released());
    assert!(!change(NODES[1]), "the waiter is woken");
    assert_eq!(one.sleep(soon()), WakeReason::Woken);
    assert!(one.was_released());
    one.watch(true);
    assert!(!one.was_released(), "another watch");
    assert!(change(NODES[0]) && change(NODES[1]), "nothing is known");
    assert_eq!(one.sleep(soon()), WakeReason::TimedOut);
    read(NODES[0], false);
    read(NODES[1], false);
    assert!(one.was_released(), "it was taken when the watch began");
}

/// Beside another library, one server stores the key.
#[test]
fn on_one_server_only_a_read_finds_a_release() {
    let (queues, key) = (LocalQueues::new(Clock::default()), key("a"));
    let one = join(&queues, &key);
    // A Cluster may have more servers than a set has bits.
    for server in [0, 15, 16, 100].map(ServerId) {
        one.watch(true);
        queues.record_read(&key, server, true, 1);
        assert!(queues.record_change(&key, server, 1));
        assert_eq!(one.sleep(soon()), WakeReason::TimedOut, "a change");
        assert!(!one.was_released());
        queues.record_read(&key, server, false, 1);
        assert_eq!(one.sleep(soon()), WakeReason::Woken);
        assert!(one.was_released());
    }
}

#[test]
fn a_key_that_changes_often_and_stays_taken_is_not_read_at_once() {
    let (queues, key) = (LocalQueues::new(Clock::default()), key("a"));
    let one = join(&queues, &key);
    let read = || queues.record_read(&key, ServerId::ONLY, true, 1);
    let change = || queues.record_change(&key, ServerId::ONLY, 1);
    let read_turn = |turn: &Turn| {
        queues.record_turn(&key, turn.clone());
        read();
    };
    one.watch(true);
    read();
    assert!(change(), "the first change");
    read();
    assert_eq!(one.sleep(soon()), WakeReason::TimedOut);
    assert!(!change());
    assert_eq!(one.sleep(soon()), WakeReason::Nudged);
    one.watch(false);
    for n in 0..3 {
        read_turn(&turn(n));
        assert!(change(), "each turn is another lock");
    }
    let long = turn(3);
    read_turn(&long);
    assert!(change());
    assert_eq!(one.sleep(soon()), WakeReason::TimedOut);
    read_turn(&long);
    assert!(!change());
    assert_eq!(one.sleep(soon()), WakeReason::Nudged);
}

/// If the watch continued, the reports about another client's lock would wake the next waiter at once.
#[test]
fn a_grant_ends_the_watch_of_the_key() {
    let (queues, key) = (LocalQueues::new(Clock::default()), key("a"));
    let [one, two] = [(); 2].map(|()| join(&queues, &key));
    one.watch(true);
    for node in NODES {
        queues.record_read(&key, node, true, MAJORITY);
    }
    let held = lease(&key);
    assert!(one.leave_with(&held, LIMITS).0.is_none());
    assert_eq!(queues.watched(&key), None);
    assert!(!queues.record_change(&key, NODES[0], MAJORITY));
    drop(two);
}

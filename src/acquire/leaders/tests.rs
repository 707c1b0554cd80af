//! Tests of the observers' states, with times that the tests choose.

use super::election::{AFTER_EXPIRY, Outbox, Tracking};
use super::*;
use crate::command::LockAndValue;
use crate::command::value::{LockValue, token_of};
use crate::lease::callbacks::CallbackExecutor;
use crate::store::Scripted;
use crate::util::clock::{Clock, validity};
use crate::util::id::{HolderId, LeaseId};
use crate::watchdog::Scheduler;

const TTL: Duration = Duration::from_secs(30);
const SECOND: Duration = Duration::from_secs(1);
const START: MonotonicTime = MonotonicTime::at_tick(1_000_000);

fn at(seconds: u32) -> MonotonicTime {
    START.after(SECOND * seconds)
}

fn keys() -> [Key; 2] {
    ["", "~value:"].map(|prefix| Key::new(prefix, "k", 16).unwrap())
}

/// An election whose first look is under way.
fn election() -> (Election, Receiver<LeaderState>) {
    let (outbox, states) = Outbox::new(0);
    let [lock, value] = keys();
    let mut election = Election::new(&lock, &value, TTL, Vec::new(), START);
    election.observers.insert(0, outbox);
    (election.looks, election.look_at) = (1, None);
    (election, states)
}

/// The lock of the grant `micros`, and a value that was written under `token`.
fn found(micros: u64, token: u64, value: &str) -> LockAndValue {
    let lock = LockValue {
        lease: LeaseId::random(),
        token: Some(token_of(micros)),
        holder: HolderId::of_text("host/1/a"),
        queued: 0,
    };
    LockAndValue {
        lock: Some((lock, Some(TTL))),
        token: Some(token),
        value: Some(value.as_bytes().to_vec()),
    }
}

fn vacant() -> LockAndValue {
    LockAndValue {
        lock: None,
        ..found(7, token_of(7), "a")
    }
}

/// Has the election under the number 1.
fn only(election: Election) -> Elections {
    let mut elections = Elections::default();
    elections.due.insert((election.due_at, 1));
    elections.by_id.insert(1, election);
    elections.change(1, |_| ());
    elections
}

fn leader(state: LeaderState) -> LeaderInfo {
    match state {
        LeaderState::Leader(leader) => leader,
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_value_counts_for_the_term_that_wrote_it() {
    let value = |found: LockAndValue| {
        let leader = LeaderInfo::new(found).unwrap();
        (leader.token, leader.value.map(|value| value.to_vec()))
    };
    let term = token_of(7);
    assert_eq!(value(found(7, term, "a")), (term, Some(b"a".to_vec())));
    // The lock was handed off within the client of the leader.
    assert_eq!(
        value(found(7, term + 2, "a")),
        (term + 2, Some(b"a".to_vec()))
    );
    for other in [0, term - 1, token_of(8)] {
        assert_eq!(value(found(7, other, "a")), (term, None));
    }
    let mut unelected = found(7, term, "a");
    if let Some((lock, _)) = &mut unelected.lock {
        lock.token = None;
    }
    assert_eq!(LeaderInfo::new(unelected), None);
    assert_eq!(LeaderInfo::new(vacant()), None);
}

#[test]
fn an_observer_gets_the_newest_state_and_no_state_twice() {
    let (mut outbox, states) = Outbox::new(0);
    let state = |micros| {
        let found = found(micros, token_of(micros), "a");
        LeaderState::Leader(LeaderInfo::new(found).unwrap())
    };
    outbox.send(&state(1));
    outbox.send(&state(2));
    assert_eq!(leader(states.try_recv().unwrap()).token, token_of(2));
    assert!(states.is_empty());
    // A new ttl alone is not reported.
    outbox.send(&match state(2) {
        LeaderState::Leader(leader) => LeaderState::Leader(LeaderInfo {
            expires_in: None,
            ..leader
        }),
        other => other,
    });
    assert!(states.is_empty());
    // The vacancy ended before the observer received it.
    outbox.send(&LeaderState::Vacant);
    outbox.send(&state(2));
    assert!(states.is_empty());
    outbox.send(&LeaderState::Vacant);
    assert_eq!(states.try_recv(), Ok(LeaderState::Vacant));
    outbox.send(&state(2));
    assert_eq!(leader(states.try_recv().unwrap()).token, token_of(2));
}

#[test]
fn an_older_state_counts_as_no_answer() {
    let (mut election, states) = election();
    election.answer(found(7, token_of(7), "a"), at(0), at(1), true);
    assert_eq!(leader(states.try_recv().unwrap()).token, token_of(7));
    election.answer(found(6, token_of(6), "b"), at(10), at(11), true);
    assert_eq!(election.unknown_at(), Some(at(0).after(validity(TTL))));
    assert_eq!(election.look_at, Some(at(21)));
    assert!(states.is_empty());
    election.answer(vacant(), at(20), at(21), true);
    assert_eq!(states.try_recv(), Ok(LeaderState::Vacant));
    assert_eq!(election.unknown_at(), Some(at(20).after(validity(TTL))));
    // The same after a vacancy.
    election.answer(found(6, token_of(6), "b"), at(22), at(23), true);
    assert!(states.is_empty());
}

/// The leader has proclaimed its value after two hand-offs. The lock in Redis contains the token of the first leader.
#[test]
fn a_lost_value_leaves_the_leader_known() {
    let term = token_of(7);
    for (lost_to, value) in [
        (0, "other"),
        (term + 1, "earlier"),
        (token_of(6), "last term"),
    ] {
        let (mut election, states) = election();
        election.answer(found(7, term + 2, "a"), at(0), at(0), true);
        assert_eq!(leader(states.try_recv().unwrap()).token, term + 2);
        election.answer(found(7, lost_to, value), at(10), at(10), true);
        let known = leader(states.try_recv().unwrap());
        assert_eq!((known.token, known.value), (term + 2, None));
        assert_eq!(election.unknown_at(), Some(at(10).after(validity(TTL))));
        election.answer(found(7, term + 2, "b"), at(20), at(20), true);
        let proclaimed = leader(states.try_recv().unwrap()).value;
        assert_eq!(proclaimed.as_deref(), Some(&b"b"[..]));
    }
}

#[test]
fn a_renewal_is_an_answer_and_other_changes_need_a_look() {
    let (mut election, _states) = election();
    let led = found(7, token_of(7), "a");
    let (lock, _) = led.lock.clone().unwrap();
    let text = |lease| format!("lh1 {lease} 1795263780943818 host/1/a");
    let (own, other) = (text(lock.lease), text(LeaseId::random()));
    election.answer(led, at(0), at(1), false);
    // The keys are not tracked yet.
    assert_eq!(election.look_at, Some(at(10)));
    for part in [Part::Lock, Part::Value] {
        election.untracked(part, at(2));
    }
    election.seen(Part::Lock, KeyState::Text(own.as_bytes()), at(3));
    assert_eq!(election.known_until, at(2).after(validity(TTL)));
    assert_eq!(election.look_at, Some(at(12)));
    election.seen(Part::Value, KeyState::Other, at(4));
    assert_eq!((election.look_at, election.must_look), (Some(at(4)), true));
    let again = |election: &mut Election, micros| {
        election.must_look = false;
        let mut led = found(micros, token_of(micros), "a");
        led.lock.as_mut().unwrap().0.lease = lock.lease;
        election.answer(led, at(5), at(5), true);
        assert_eq!(election.look_at, Some(at(20)), "half a ttl");
    };
    again(&mut election, 7);
    // A read that another part of the client has asked for is no answer, since its age is unknown.
    election.seen(Part::Lock, KeyState::Text(own.as_bytes()), at(9));
    assert_eq!(election.known_until, at(5).after(validity(TTL)));
    for other in [KeyState::Text(other.as_bytes()), KeyState::Missing] {
        election.untracked(Part::Lock, at(6));
        election.seen(Part::Lock, other, at(7));
        assert_eq!(election.look_at, Some(at(7)));
        again(&mut election, 7);
    }
    // A change during a look: the look is repeated.
    election.look_at = None;
    election.untracked(Part::Value, at(8));
    election.seen(Part::Value, KeyState::Other, at(8));
    assert_eq!(election.look_at, None);
    election.answer(vacant(), at(7), at(9), true);
    assert_eq!(election.look_at, Some(at(9)));
}

/// A read shows one of the two keys only.
#[test]
fn a_read_delays_no_look_while_the_state_is_unknown() {
    let (mut election, states) = election();
    election.fail(&Error::new(ErrorKind::Unavailable, ""), at(0));
    assert_eq!(states.try_recv(), Ok(LeaderState::Unknown));
    election.untracked(Part::Lock, at(0));
    election.seen(Part::Lock, KeyState::Missing, at(0));
    assert_eq!(election.look_at, Some(at(1)));
    assert!(states.is_empty());
}

#[test]
fn failures_are_unknown_after_a_validity_and_retried() {
    let away = Error::new(ErrorKind::Unavailable, "");
    let denied = Error::new(ErrorKind::Denied, "");
    let (mut first, states) = election();
    first.fail(&away, at(0));
    assert_eq!(states.try_recv(), Ok(LeaderState::Unknown));
    assert_eq!((first.look_at, first.unknown_at()), (Some(at(1)), None));
    let (mut election, states) = election();
    election.answer(vacant(), at(0), at(0), true);
    assert_eq!(states.try_recv(), Ok(LeaderState::Vacant));
    election.fail(&denied, at(15));
    assert_eq!(election.look_at, Some(at(25)));
    election.fail(&away, at(25));
    assert!(states.is_empty());
    let unknown_at = election.unknown_at().unwrap();
    let mut elections = only(election);
    let round = elections.next_round(unknown_at, SECOND).unwrap();
    assert_eq!(states.try_recv(), Ok(LeaderState::Unknown));
    assert_eq!(round.looks.len(), 1, "and it looks again");
    // While the look is under way, nothing is due.
    assert!(
        elections
            .next_round(unknown_at.after(TTL), SECOND)
            .is_none()
    );
    elections.change(1, |election| {
        election.answer(vacant(), at(31), at(31), true)
    });
    assert_eq!(states.try_recv(), Ok(LeaderState::Vacant));
}

#[test]
fn an_expiry_of_the_lock_before_the_next_look_brings_it_forward() {
    let (mut election, _states) = election();
    let mut led = found(7, token_of(7), "a");
    led.lock.as_mut().unwrap().1 = Some(5 * SECOND);
    election.answer(led, at(0), at(1), true);
    assert_eq!(election.look_at, Some(at(6).after(AFTER_EXPIRY)));
}

#[test]
fn a_shorter_ttl_of_a_later_observer_counts_from_its_arrival() {
    const SHORT: Duration = Duration::from_secs(3);
    let (mut election, states) = election();
    election.answer(vacant(), at(0), at(0), true);
    assert_eq!(states.try_recv(), Ok(LeaderState::Vacant));
    let mut elections = only(election);
    let later = elections.change(1, |election| election.join(1, SHORT, at(12)));
    let round = elections.next_round(at(12), TTL).unwrap();
    assert_eq!(round.looks.len(), 1);
    let known_until = at(12).after(validity(SHORT));
    assert_eq!(round.deadline, known_until, "a look delays no `Unknown`");
    // The last answer is older than the shorter validity.
    assert!(states.is_empty());
    elections.change(1, |election| {
        election.answer(vacant(), at(12), at(12), true);
        assert_eq!(election.unknown_at(), Some(known_until));
        assert_eq!(election.look_at, Some(at(13)), "a third of the shorter ttl");
    });
    assert_eq!(later.unwrap().try_recv(), Ok(LeaderState::Vacant));
    assert!(states.is_empty());
}

#[test]
fn observers_get_no_state_from_before_they_came_and_share_a_look() {
    let (election, first) = election();
    let mut elections = only(election);
    let join = |elections: &mut Elections, id| {
        let joined = elections.change(1, |election| election.join(id, TTL, at(2)));
        joined.unwrap()
    };
    // They come while a look is under way.
    let later = [1, 2, 3].map(|id| join(&mut elections, id));
    elections.change(1, |election| election.answer(vacant(), at(1), at(3), true));
    assert_eq!(first.try_recv(), Ok(LeaderState::Vacant));
    assert!(later.iter().all(Receiver::is_empty));
    let round = elections.next_round(at(3), SECOND).unwrap();
    assert_eq!(round.looks.len(), 1);
    elections.change(1, |election| election.answer(vacant(), at(3), at(4), true));
    for states in &later {
        assert_eq!(states.try_recv(), Ok(LeaderState::Vacant));
    }
    assert!(first.is_empty(), "no state twice");
    assert!(elections.next_round(at(4), SECOND).is_none());
    // This one comes before a look that fails.
    let last = join(&mut elections, 4);
    assert!(elections.next_round(at(4), SECOND).is_some());
    let away = Error::new(ErrorKind::Unavailable, "");
    elections.change(1, |election| election.fail(&away, at(5)));
    assert_eq!(last.try_recv(), Ok(LeaderState::Unknown));
    assert!(elections.next_round(at(6), SECOND).is_some());
    elections.change(1, |election| election.answer(vacant(), at(6), at(6), true));
    assert_eq!(last.try_recv(), Ok(LeaderState::Vacant));
    assert!(first.is_empty() && later.iter().all(Receiver::is_empty));
}

#[test]
fn keys_are_watched_until_the_last_observer_leaves() {
    let clock = Clock::movable();
    let backend = Backend::new(Arc::new(Scripted::default()));
    let threads = ThreadGroup::new();
    let callbacks = CallbackExecutor::start(&threads, None).unwrap();
    callbacks.stop();
    let scheduler = Scheduler::new(clock.clone());
    let watchdog = Watchdog::new(scheduler, &backend, callbacks, SECOND);
    let queues = Arc::new(LocalQueues::new(clock));
    let leaders = Leaders::new(&backend, watchdog, Arc::clone(&queues), SECOND);
    // The thread does not run.
    leaders.elections.change(|all| all.has_thread = true);
    let [lock, value] = keys();
    let join = || leaders.observe(&lock, &value, TTL, &threads).unwrap();
    let (first, second) = (join(), join());
    let are_tracked = || {
        let tracking = |all: &mut Elections| {
            let election = all.by_id.values().next().unwrap();
            election.tracking.map(|tracking| tracking == Tracking::Yes)
        };
        leaders.elections.change(tracking).unwrap()
    };
    for key in [&lock, &value] {
        queues.watches.seen(key, KeyState::Missing);
    }
    assert_eq!(are_tracked(), [true; 2]);
    // A new connection tracks no keys yet.
    assert_eq!(queues.watches.missed(&|_| true).len(), 2);
    assert_eq!(are_tracked(), [false; 2]);
    leaders.leave(first.0);
    assert!(!queues.watches.is_empty());
    leaders.leave(second.0);
    assert!(queues.watches.is_empty());
}

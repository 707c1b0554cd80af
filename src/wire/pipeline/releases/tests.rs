use std::collections::VecDeque;
use std::time::Duration;

use proptest::prelude::*;

use super::*;

fn release(key: u8, attempts: u32) -> QueuedRelease {
    QueuedRelease {
        release: Release::unheld(
            Key::new("p:", &key.to_string(), 100).unwrap(),
            LeaseId::random(),
            MonotonicTime::now().after(Duration::from_secs(60)),
        ),
        due: MonotonicTime::now(),
        attempts,
        is_undo: false,
        reported_late: false,
        route: Route::default(),
    }
}

#[test]
fn the_route_of_a_release_takes_one_byte() {
    for (is_asking, is_copied, hops) in [(false, false, 0), (true, false, 4), (false, true, 63)] {
        let route = Route {
            is_asking,
            is_copied,
            hops,
        };
        let mut releases = Releases::default();
        releases.push(QueuedRelease {
            route,
            ..release(1, 0)
        });
        assert_eq!(releases.pop().unwrap().route, route);
    }
}

#[test]
fn a_slot_takes_72_bytes() {
    assert_eq!(size_of::<PackedRelease>(), 72);
    let mut releases = Releases::default();
    for n in 0..10_000 {
        releases.push(release(n as u8, 0));
        let most = FEWEST_BUCKETS.max(releases.len + 1);
        assert!(releases.buckets.len() <= most);
    }
}

#[test]
fn a_release_is_unpacked_as_packed() {
    let held = Held {
        token: 7,
        is_token_in_value: true,
        others_queued: true,
        valid_until: MonotonicTime::at_tick(0),
    };
    let ttl = Duration::from_millis(5000);
    for (held, queued) in [(None, None), (None, Some(ttl)), (Some(held), None)] {
        for is_undo in [false, true] {
            let mut releases = Releases::default();
            let mut given = release(1, 3);
            given.is_undo = is_undo && held.is_none();
            (given.release.held, given.release.queued) = (held, queued);
            let (lease, is_undo) = (given.release.lease, given.is_undo);
            releases.push(given);
            let taken = releases.pop().unwrap();
            assert_eq!(
                (taken.release.lease, taken.release.queued, taken.is_undo),
                (lease, queued, is_undo)
            );
            let details = |held: Held| (held.token, held.others_queued);
            assert_eq!(taken.release.held.map(details), held.map(details));
        }
    }
}

/// A confirmed release that is repeated on a new connection has had no attempt there.
#[test]
fn a_repeat_is_due_at_its_own_time() {
    for attempts in [0, 1] {
        let given = release(1, attempts);
        let (due, mut releases) = (given.due, Releases::default());
        releases.push(given);
        assert_eq!(releases.first_due(), Some(due), "{attempts} attempts");
        assert!(releases.pop_due(due).is_some_and(|taken| taken.due == due));
    }
}

#[test]
fn an_emptied_queue_keeps_one_chunk() {
    let mut releases = Releases::default();
    for _ in 0..2 {
        for n in 0..10 * CHUNK {
            releases.push(release(n as u8, 0));
        }
        while releases.pop().is_some() {}
        assert!(releases.chunks.is_empty() && releases.buckets.is_empty());
        assert!(releases.spare.is_some());
    }
}

#[derive(Clone, Debug)]
enum Step {
    Push(u8, u32),
    Pop,
    TakeOf(u8),
    GiveUp(u8),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        5 => (0..40_u8, 0..2_u32).prop_map(|(key, attempts)| Step::Push(key, attempts)),
        3 => Just(Step::Pop),
        2 => (0..40_u8).prop_map(Step::TakeOf),
        1 => (0..40_u8).prop_map(Step::GiveUp),
    ]
}

proptest! {
    #[test]
    fn releases_are_queued_as_a_plain_list_does(
        first in 0..u32::MAX,
        grow in 0..400_usize,
        steps in prop::collection::vec(step(), 0..600),
    ) {
        let mut releases = Releases { next: first, ..Releases::default() };
        let mut list: VecDeque<(u8, LeaseId, u32)> = VecDeque::new();
        let growing = (0..grow).map(|n| Step::Push(n as u8 % 40, 0));
        for step in growing.chain(steps) {
            match step {
                Step::Push(key, attempts) => {
                    let release = release(key, attempts);
                    list.push_back((key, release.release.lease, attempts));
                    releases.push(release);
                }
                Step::Pop => {
                    let popped = releases.pop().map(|release| release.release.lease);
                    prop_assert_eq!(popped, list.pop_front().map(|(_, lease, _)| lease));
                }
                Step::TakeOf(key) => {
                    let newest = list.iter().rposition(|(of, ..)| *of == key);
                    let taken = releases.take_of(&release(key, 0).release.key);
                    let expected = newest.and_then(|at| list.remove(at));
                    prop_assert_eq!(
                        taken.map(|release| release.release.lease),
                        expected.map(|(_, lease, _)| lease)
                    );
                }
                Step::GiveUp(key) => {
                    let key_of = release(key, 0).release.key;
                    let mut taken = Vec::new();
                    releases.sweep(
                        |swept| {
                            *swept.attempts += u8::from(*swept.key == key_of);
                            *swept.key == key_of && *swept.attempts > 1
                        },
                        |release| taken.push(release.release.lease),
                    );
                    let mut expected = Vec::new();
                    list.retain_mut(|(of, lease, attempts)| {
                        *attempts += u32::from(*of == key);
                        let is_over = *of == key && *attempts > 1;
                        expected.extend(is_over.then_some(*lease));
                        !is_over
                    });
                    prop_assert_eq!(taken, expected);
                }
            }
            prop_assert_eq!(releases.is_empty(), list.is_empty());
            let failed = list.iter().filter(|(.., attempts)| *attempts > 0).count();
            prop_assert_eq!(releases.failed(), failed);
        }
    }
}

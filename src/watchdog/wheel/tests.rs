//! Tests of the wheel: single cases, and random steps compared with a sorted list.

use std::collections::BTreeMap;
use std::sync::Arc;

use proptest::prelude::*;

use super::{Cell, LEVELS, SLOTS, TimerId, Wheel};

const WEEK: u64 = 7 * 24 * 60 * 60 * 1000;

fn fired<T: Default>(wheel: &mut Wheel<T>, now: u64) -> Vec<T> {
    let mut due = Vec::new();
    wheel.advance(now, &mut due);
    due
}

#[test]
fn an_empty_wheel_has_no_next_wake() {
    let mut wheel = Wheel::<u8>::new(5);
    assert_eq!(wheel.next_wake(), None);
    assert!(wheel.is_empty());
    assert!(fired(&mut wheel, u64::MAX).is_empty());
    assert_eq!(wheel.next_wake(), None);
}

#[test]
fn a_value_fires_exactly_at_its_deadline() {
    for deadline in [
        1001,
        1023,
        1024,
        1063,
        1064,
        4096,
        30_000 + 1000,
        WEEK,
        1 << 60,
        u64::MAX,
    ] {
        let mut wheel = Wheel::new(1000);
        wheel.insert(deadline, 'a');
        assert!(fired(&mut wheel, deadline - 1).is_empty(), "{deadline}");
        assert_eq!(wheel.next_wake(), Some(deadline));
        assert_eq!(fired(&mut wheel, deadline), ['a'], "{deadline}");
        assert!(wheel.is_empty());
    }
}

#[test]
fn a_past_deadline_fires_at_the_next_advance() {
    let mut wheel = Wheel::new(1000);
    for (deadline, value) in [(1000, 'd'), (999, 'c'), (0, 'a'), (7, 'b'), (1000, 'e')] {
        wheel.insert(deadline, value);
        assert!(wheel.next_wake() <= Some(deadline));
    }
    assert_eq!(fired(&mut wheel, 1000), ['a', 'b', 'c', 'd', 'e']);
    assert_eq!(wheel.next_wake(), None);
}

#[test]
fn an_earlier_now_does_not_move_time_back() {
    let mut wheel = Wheel::new(1000);
    wheel.insert(500, "late");
    wheel.insert(1000, "now");
    wheel.insert(1001, "later");
    assert_eq!(fired(&mut wheel, 10), ["late", "now"]);
    assert_eq!(wheel.next_wake(), Some(1001));
    wheel.insert(900, "late as well");
    assert_eq!(fired(&mut wheel, 0), ["late as well"]);
    assert_eq!(fired(&mut wheel, 1001), ["later"]);
}

#[test]
fn next_wake_is_never_after_an_overdue_entry() {
    let mut wheel = Wheel::new(1000);
    let id = wheel.insert(3, 'a');
    assert_eq!(wheel.cancel(id), Some('a'));
    assert_eq!(wheel.next_wake(), None);
    wheel.insert(700, 'b');
    assert_eq!(wheel.next_wake(), Some(700));
    wheel.insert(800, 'c');
    assert_eq!(wheel.next_wake(), Some(700));
    wheel.insert(600, 'd');
    assert_eq!(wheel.next_wake(), Some(600));
}

#[test]
fn values_fire_by_deadline_then_by_insertion() {
    let mut wheel = Wheel::new(0);
    wheel.insert(5000, 'e');
    wheel.insert(5000, 'f');
    wheel.insert(70, 'b');
    wheel.insert(4999, 'd');
    wheel.insert(3, 'a');
    assert_eq!(fired(&mut wheel, 60), ['a']);
    wheel.insert(70, 'c');
    assert_eq!(fired(&mut wheel, 4990), ['b', 'c']);
    wheel.insert(5000, 'g');
    assert_eq!(fired(&mut wheel, 5000), ['d', 'e', 'f', 'g']);
}

#[test]
fn due_values_are_appended() {
    let mut wheel = Wheel::new(0);
    wheel.insert(1, 'b');
    let mut due = vec!['a'];
    wheel.advance(1, &mut due);
    assert_eq!(due, ['a', 'b']);
}

#[test]
fn cancel_returns_a_value_once() {
    let mut wheel = Wheel::new(0);
    let ids = [40, 40, 40, 5000, 1 << 50].map(|deadline| wheel.insert(deadline, deadline));
    // The middle, the head and the tail of one slot, then the only entries of two other slots.
    for at in [1, 0, 2, 4, 3] {
        assert!(wheel.cancel(ids[at]).is_some());
        assert_eq!(wheel.cancel(ids[at]), None);
    }
    assert_eq!(wheel.next_wake(), None);
    assert!(fired(&mut wheel, u64::MAX).is_empty());
}

#[test]
fn a_stale_id_cancels_no_reused_node() {
    let mut wheel = Wheel::new(0);
    let cancelled = wheel.insert(10, 'a');
    wheel.cancel(cancelled);
    let spent = wheel.insert(10, 'b');
    assert_eq!(fired(&mut wheel, 10), ['b']);
    let current = wheel.insert(20, 'c');
    assert_eq!(
        (cancelled.index, spent.index),
        (current.index, current.index)
    );
    assert_eq!(wheel.cancel(cancelled), None);
    assert_eq!(wheel.cancel(spent), None);
    assert_eq!(wheel.cancel(current), Some('c'));
}

#[test]
fn cancel_finds_entries_that_moved_down() {
    let mut wheel = Wheel::new(0);
    let first = wheel.insert(5000, 'a');
    let second = wheel.insert(5001, 'b');
    for now in [4095, 4096, 4990, 4999] {
        assert!(fired(&mut wheel, now).is_empty());
    }
    assert_eq!(wheel.cancel(first), Some('a'));
    assert!(fired(&mut wheel, 5000).is_empty());
    assert_eq!(wheel.cancel(second), Some('b'));
    assert!(wheel.is_empty());
}

#[test]
fn advance_jumps_over_any_time() {
    let mut wheel = Wheel::new(0);
    for n in 0..10_000_u64 {
        wheel.insert(n * 60_000, n);
    }
    let due = fired(&mut wheel, WEEK);
    assert!(due.iter().copied().eq(0..10_000));
    wheel.insert(u64::MAX, 0);
    assert_eq!(fired(&mut wheel, u64::MAX), [0]);
    wheel.insert(u64::MAX, 1);
    assert_eq!(wheel.next_wake(), Some(u64::MAX));
    assert_eq!(fired(&mut wheel, u64::MAX), [1]);
}

#[test]
fn the_farthest_deadline_takes_one_step_per_level() {
    let mut wheel = Wheel::new(0);
    wheel.insert(u64::MAX, ());
    for _ in 0..LEVELS {
        let wake = wheel.next_wake().expect("the wheel has an entry");
        fired(&mut wheel, wake);
    }
    assert!(wheel.is_empty());
}

#[test]
fn nodes_are_reused_before_the_wheel_grows() {
    let mut wheel = Wheel::new(0);
    let ids: Vec<_> = (0..64).map(|n| wheel.insert(n, n)).collect();
    assert_eq!(wheel.cells.len(), 64);
    for id in ids.into_iter().skip(32) {
        wheel.cancel(id);
    }
    assert_eq!(fired(&mut wheel, 100).len(), 32);
    for n in 0..64 {
        wheel.insert(200 + n, n);
    }
    assert_eq!(wheel.cells.len(), 64);
}

#[test]
fn a_free_node_keeps_no_value() {
    let value = Arc::new(());
    let mut wheel = Wheel::new(0);
    let id = wheel.insert(10, Arc::clone(&value));
    wheel.insert(20, Arc::clone(&value));
    drop(wheel.cancel(id));
    assert_eq!(Arc::strong_count(&value), 2);
    drop(fired(&mut wheel, 20));
    assert_eq!(Arc::strong_count(&value), 1);
}

#[test]
#[cfg(target_pointer_width = "64")]
fn an_entry_takes_32_bytes() {
    assert_eq!(size_of::<Cell<Arc<()>>>(), 32);
    assert_eq!(size_of::<Cell<usize>>(), 32);
    assert!(size_of::<Wheel<Arc<()>>>() < 6 * 1024);
}

/// The specification: entries sorted by deadline, then by age.
struct Model {
    now: u64,
    entries: BTreeMap<(u64, u64), u64>,
}

impl Model {
    fn earliest(&self) -> Option<u64> {
        self.entries
            .first_key_value()
            .map(|((deadline, _), _)| *deadline)
    }

    fn advance(&mut self, now: u64) -> Vec<u64> {
        self.now = self.now.max(now);
        let rest = match self.now.checked_add(1) {
            Some(after) => self.entries.split_off(&(after, 0)),
            None => BTreeMap::new(),
        };
        std::mem::replace(&mut self.entries, rest)
            .into_values()
            .collect()
    }
}

/// A tick, mostly relative to the wheel's time.
#[derive(Clone, Copy, Debug)]
enum Tick {
    After(u64),
    Before(u64),
    /// `offset` ticks from the next multiple of `1 << bit`, where slots begin.
    Near {
        bit: u32,
        offset: i64,
    },
    Exactly(u64),
}

impl Tick {
    fn from(self, now: u64) -> u64 {
        match self {
            Tick::After(ticks) => now.saturating_add(ticks),
            Tick::Before(ticks) => now.saturating_sub(ticks),
            Tick::Near { bit, offset } => {
                let boundary = (now >> bit).saturating_add(1).saturating_mul(1 << bit);
                boundary.saturating_add_signed(offset)
            }
            Tick::Exactly(tick) => tick,
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Insert(Tick),
    /// Any id that was ever returned: live, fired or cancelled.
    Cancel(usize),
    /// An id whose entry is still in the wheel.
    CancelLive(usize),
    Advance(Tick),
    /// Advances to `next_wake` until the earliest deadline fires.
    FollowWakes,
}

fn tick() -> impl Strategy<Value = Tick> {
    prop_oneof![
        6 => (0..200_u64).prop_map(Tick::After),
        4 => (0..64_u32, any::<u64>()).prop_map(|(bits, n)| Tick::After(n >> bits)),
        3 => (0..64_u32, -2..=2_i64).prop_map(|(bit, offset)| Tick::Near { bit, offset }),
        2 => (0..100_u64).prop_map(Tick::Before),
        1 => any::<u64>().prop_map(Tick::Before),
        1 => Just(Tick::Exactly(u64::MAX)),
    ]
}

/// Ticks for jumps that leave time for further steps.
fn jump() -> impl Strategy<Value = Tick> {
    prop_oneof![
        6 => (0..100_u64).prop_map(Tick::After),
        3 => (20..64_u32, any::<u64>()).prop_map(|(bits, n)| Tick::After(n >> bits)),
        3 => (0..40_u32, -2..=2_i64).prop_map(|(bit, offset)| Tick::Near { bit, offset }),
        1 => any::<u64>().prop_map(Tick::Before),
        1 => (0..8_u32, any::<u64>()).prop_map(|(bits, n)| Tick::After(n >> bits)),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        10 => tick().prop_map(Step::Insert),
        2 => any::<usize>().prop_map(Step::Cancel),
        3 => any::<usize>().prop_map(Step::CancelLive),
        4 => jump().prop_map(Step::Advance),
        2 => Just(Step::FollowWakes),
    ]
}

struct Run {
    wheel: Wheel<u64>,
    model: Model,
    ids: Vec<(TimerId, u64)>,
    most: usize,
}

impl Run {
    fn new(now: u64) -> Self {
        let model = Model {
            now,
            entries: BTreeMap::new(),
        };
        Self {
            wheel: Wheel::new(now),
            model,
            ids: Vec::new(),
            most: 0,
        }
    }

    fn take(&mut self, step: Step) {
        match step {
            Step::Insert(tick) => {
                let (deadline, value) = (tick.from(self.model.now), self.ids.len() as u64);
                self.ids
                    .push((self.wheel.insert(deadline, value), deadline));
                self.model.entries.insert((deadline, value), value);
            }
            Step::Cancel(pick) if !self.ids.is_empty() => self.cancel(pick % self.ids.len()),
            Step::CancelLive(pick) if !self.model.entries.is_empty() => {
                let nth = pick % self.model.entries.len();
                let value = *self
                    .model
                    .entries
                    .values()
                    .nth(nth)
                    .expect("nth is below the length");
                self.cancel(value as usize);
            }
            Step::Cancel(_) | Step::CancelLive(_) => {}
            Step::Advance(tick) => self.advance(tick.from(self.model.now)),
            Step::FollowWakes => self.follow_wakes(),
        }
        self.check();
    }

    fn cancel(&mut self, at: usize) {
        let (id, deadline) = self.ids[at];
        let expected = self.model.entries.remove(&(deadline, at as u64));
        assert_eq!(self.wheel.cancel(id), expected);
    }

    fn advance(&mut self, now: u64) {
        assert_eq!(fired(&mut self.wheel, now), self.model.advance(now));
    }

    fn follow_wakes(&mut self) {
        let Some(earliest) = self.model.earliest() else {
            return;
        };
        let before = self.model.entries.len();
        for _ in 0..LEVELS {
            let wake = self.wheel.next_wake().expect("entries wait");
            assert!(wake <= earliest);
            self.advance(wake);
            self.check();
            if self.model.entries.len() < before {
                return;
            }
        }
        panic!("{earliest} not reached in {LEVELS} steps");
    }

    fn check(&mut self) {
        let (wheel, model) = (&self.wheel, &self.model);
        assert_eq!(wheel.len(), model.entries.len());
        assert_eq!(wheel.is_empty(), model.entries.is_empty());
        match (wheel.next_wake(), model.earliest()) {
            (None, None) => {}
            (Some(wake), Some(earliest)) => {
                assert!(wake <= earliest, "woken at {wake} for {earliest}");
                assert!(
                    wake > model.now || earliest <= model.now,
                    "woken at once for {earliest}"
                );
            }
            other => panic!("wake and earliest deadline: {other:?}"),
        }
        self.most = self.most.max(wheel.len());
        assert!(
            wheel.cells.len() <= self.most,
            "the wheel grew although a cell was free"
        );
        for (slot, list) in wheel.slots.iter().enumerate() {
            let marked = wheel.occupied[slot / SLOTS] >> (slot % SLOTS) & 1 == 1;
            assert_eq!(marked, list.head != super::NIL, "slot {slot}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_wheel_behaves_like_a_sorted_list(
        start in prop_oneof![0..5000_u64, any::<u64>(), Just(u64::MAX - 5000)],
        steps in prop::collection::vec(step(), 1..200),
    ) {
        let mut run = Run::new(start);
        for step in steps {
            run.take(step);
        }
        run.take(Step::Advance(Tick::Exactly(u64::MAX)));
        prop_assert!(run.wheel.is_empty());
    }
}

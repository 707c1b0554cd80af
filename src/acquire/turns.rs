//! Turns of the clients that want a key of a quorum, which has no queues. The client that has just released a key would
//! always be the first to ask for it again: the others have yet to be notified. So it leaves the next turn to them.

use std::time::Duration;

use parking_lot::Mutex;

use crate::acquire::backoff::{ROUND_TRIPS, jittered};
use crate::util::clock::MonotonicTime;
use crate::util::key::Key;

/// Keys share the records of so many shards.
const SHARDS: usize = 64;
/// How many round trips the other clients get. One of them needs one and a half: for the notification, and to ask.
const OTHERS_NEED: u32 = 4;
/// The others are believed to want the key for so long after this client has last seen one of them.
const WANTED_FOR: Duration = Duration::from_secs(1);
/// If no other client was seen, this client still leaves them a turn so often. It cannot see clients that it never lets
/// in.
const LOOK_EVERY: Duration = Duration::from_millis(100);

#[derive(Default)]
struct Turn {
    /// When this client has released the key, unless the others have got a turn since.
    released_at: Option<MonotonicTime>,
    /// When this client has last seen that another one wants the key.
    wanted_at: Option<MonotonicTime>,
    /// When this client has last left a turn to the others.
    left_at: Option<MonotonicTime>,
    /// The round trip of the last grant.
    round_trip: Duration,
}

pub(super) struct Turns(Box<[Mutex<Turn>]>);

impl Default for Turns {
    fn default() -> Self {
        Self((0..SHARDS).map(|_| Mutex::default()).collect())
    }
}

impl Turns {
    fn of(&self, key: &Key) -> &Mutex<Turn> {
        &self.0[key.shard(SHARDS)]
    }

    /// Notes that Redis has granted the key to this client.
    pub(super) fn note_grant(&self, key: &Key, round_trip: Duration) {
        self.of(key).lock().round_trip = round_trip;
    }

    /// Notes that another client has the key, or has asked for it at the same time.
    pub(super) fn note_wanted(&self, key: &Key, now: MonotonicTime) {
        self.of(key).lock().wanted_at = Some(now);
    }

    /// Notes that this client releases the key.
    pub(super) fn note_release(&self, key: &Key, now: MonotonicTime) {
        self.of(key).lock().released_at = Some(now);
    }

    /// If the next turn is that of other clients, returns until when this client should not ask. The next call returns
    /// `None`.
    pub(super) fn leave_turn(&self, key: &Key, now: MonotonicTime) -> Option<MonotonicTime> {
        let mut turn = self.of(key).lock();
        let released_at = turn.released_at.take()?;
        let [shortest, longest] = ROUND_TRIPS;
        let until = released_at.after(OTHERS_NEED * turn.round_trip.clamp(shortest, longest));
        let is_past = |at: Option<MonotonicTime>, time| at.is_none_or(|at| now.since(at) >= time);
        if until <= now
            || (is_past(turn.wanted_at, WANTED_FOR) && !is_past(turn.left_at, LOOK_EVERY))
        {
            return None;
        }
        turn.left_at = Some(now);
        Some(now.after(jittered(until.since(now))))
    }
}

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests {
    use super::*;

    const ROUND_TRIP: Duration = Duration::from_millis(1);

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// The turns of a key that was granted at once and has never been released.
    fn granted() -> (Turns, Key, MonotonicTime) {
        let (turns, key) = (Turns::default(), Key::new("", "k", 16).unwrap());
        turns.note_grant(&key, ROUND_TRIP);
        (turns, key, MonotonicTime::now())
    }

    /// How long the client that releases the key at `now` waits before it asks again.
    fn pause(turns: &Turns, key: &Key, now: MonotonicTime) -> Option<Duration> {
        turns.note_release(key, now);
        let left = turns.leave_turn(key, now);
        assert_eq!(
            turns.leave_turn(key, now),
            None,
            "one turn for each release"
        );
        left.map(|until| until.since(now))
    }

    #[test]
    fn a_client_leaves_each_turn_to_others_that_it_has_seen() {
        let (turns, key, now) = granted();
        turns.note_wanted(&key, now);
        for after in [0, 1, 999] {
            let pause = pause(&turns, &key, now.after(ms(after))).unwrap();
            assert!(pause >= ms(2) && pause <= ms(4), "{pause:?}");
        }
    }

    #[test]
    fn a_client_looks_for_others_from_time_to_time() {
        let (turns, key, now) = granted();
        turns.note_wanted(&key, now);
        let later = now.after(ms(1000));
        for (after, leaves) in [
            (0, true),
            (1, false),
            (99, false),
            (100, true),
            (101, false),
        ] {
            let pause = pause(&turns, &key, later.after(ms(after)));
            assert_eq!(pause.is_some(), leaves, "{after}");
        }
    }

    #[test]
    fn a_client_that_has_not_just_released_the_key_does_not_wait() {
        let (turns, key, now) = granted();
        turns.note_wanted(&key, now);
        assert_eq!(turns.leave_turn(&key, now), None);
        turns.note_release(&key, now);
        let later = now.after(ms(3));
        let until = turns.leave_turn(&key, later).unwrap();
        assert!(
            until <= now.after(ms(4)),
            "the pause counts from the release"
        );
        turns.note_release(&key, now);
        assert_eq!(turns.leave_turn(&key, now.after(ms(4))), None);
    }

    #[test]
    fn a_pause_has_bounds() {
        let (turns, key, now) = granted();
        for (round_trip, longest) in [(ms(0), ms(2)), (ms(900), ms(40))] {
            turns.note_wanted(&key, now);
            turns.note_grant(&key, round_trip);
            let pause = pause(&turns, &key, now).unwrap();
            assert!(pause >= longest / 2 && pause <= longest, "{pause:?}");
        }
    }
}

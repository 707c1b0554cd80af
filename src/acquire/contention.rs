//! When the callers of a client ask a quorum for a key. A quorum has no queues, so each client draws its conclusions
//! from the replies. It leaves turns to other clients: the client that has just released a key would always be the
//! first to ask for it again, since the others have yet to be notified. And the callers that have waited longest ask
//! first: each caller counts the turns that it has missed, and knows how many turns its client usually misses.

use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use crate::acquire::backoff::jittered;
use crate::util::clock::MonotonicTime;
use crate::util::id::LeaseId;
use crate::util::key::Key;

/// Keys share the records of so many shards.
const SHARDS: usize = 64;
/// The bounds of a round trip, for turns and pauses.
const ROUND_TRIPS: [Duration; 2] = [Duration::from_micros(500), Duration::from_millis(10)];

/// How many round trips the other clients get. One of them needs one and a half: for the notification, and to ask.
const OTHERS_NEED: u32 = 4;
/// The others are believed to want the key for so long after this client has last seen one of them.
const WANTED_FOR: Duration = Duration::from_secs(1);
/// If no other client was seen, this client still leaves them a turn so often. It cannot see clients that it never lets
/// in.
const LEAVE_TURN_EVERY: Duration = Duration::from_millis(100);

const LONGEST_PAUSE: Duration = Duration::from_millis(250);
/// The greatest random part of a pause, in round trips, if no votes were split.
const RANDOM_PART: f64 = 0.25;
/// After split votes, the random part is limited to one round trip for each client that usually contends. More clients
/// may contend now. So after this many split votes, the part has one round trip without the limit, and each further
/// split vote doubles it.
const SPLIT_VOTES_WITH_LIMIT: i32 = 3;
/// Further split votes do not double the random part.
const MAX_DOUBLINGS: u32 = 16;
/// The weight of the newest wait in the usual number of missed turns.
const NEWEST_WEIGHT: f64 = 1.0 / 16.0;
/// A wait counts as so many times the usual number at most. Otherwise one long wait would delay many later ones: each
/// renewal of its lock counts as a turn.
const LONGEST_SAMPLE: f64 = 8.0;
/// If at least so many turns of others probably come first, a caller reads the key before it asks. A read costs less
/// than an attempt, but a caller that finds the key free needs one more round trip.
const READ_FIRST_FROM: f64 = 2.0;

/// Each client's own record of the contention for the keys of a quorum.
pub(super) struct Contention(Box<[Mutex<Shard>]>);

#[derive(Default)]
pub(super) struct Shard {
    /// When this client has released the key, unless the others have got a turn since.
    released_at: Option<MonotonicTime>,
    /// When this client has last seen that another one wants the key.
    pub(super) wanted_at: Option<MonotonicTime>,
    /// When this client has last left a turn to the others.
    left_at: Option<MonotonicTime>,
    /// The round trip of the last grant.
    round_trip: Duration,
    /// How many turns this client's callers usually miss: the weighted mean of those waits in which they missed any. If
    /// all clients get the same share of turns, this is the number of the other clients.
    pub(super) usually_missed: f64,
}

/// A caller's wait so far.
#[derive(Clone, Copy)]
pub(super) struct WaitSoFar {
    /// How many turns other clients have got meanwhile.
    pub(super) missed_turns: u32,
    /// How many of its last attempts in a row have split the votes.
    pub(super) split_votes: u32,
    /// How long its last attempt took.
    pub(super) round_trip: Duration,
}

/// A caller's pause before it asks again.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Pause {
    pub(super) time: Duration,
    /// Whether the caller reads the key after the pause, and asks only if it is free: another client has probably taken
    /// it.
    pub(super) reads_first: bool,
}

impl Default for Contention {
    fn default() -> Self {
        Self((0..SHARDS).map(|_| Mutex::default()).collect())
    }
}

impl Contention {
    pub(super) fn of(&self, key: &Key) -> MutexGuard<'_, Shard> {
        self.0[key.shard(SHARDS)].lock()
    }

    /// Notes a grant to this client, whose attempt took `round_trip`. `missed_turns`: how many turns the caller has
    /// missed; `None` if it has met no other client.
    pub(super) fn note_grant(&self, key: &Key, round_trip: Duration, missed_turns: Option<u32>) {
        let mut shard = self.of(key);
        shard.round_trip = round_trip;
        if let Some(missed) = missed_turns {
            let usual = shard.usually_missed;
            let missed = f64::from(missed).min(LONGEST_SAMPLE * usual.max(1.0));
            shard.usually_missed += NEWEST_WEIGHT * (missed - usual);
        }
    }

    /// Notes that another client has the key, or has asked for it at the same time.
    pub(super) fn note_other_client(&self, key: &Key, now: MonotonicTime) {
        self.of(key).wanted_at = Some(now);
    }

    /// Notes that this client releases the key.
    pub(super) fn note_release(&self, key: &Key, now: MonotonicTime) {
        self.of(key).released_at = Some(now);
    }

    /// If the next turn is that of other clients, returns until when this client should not ask. The next call returns
    /// `None`.
    pub(super) fn leave_turn(&self, key: &Key, now: MonotonicTime) -> Option<MonotonicTime> {
        let mut shard = self.of(key);
        let released_at = shard.released_at.take()?;
        let [shortest, longest] = ROUND_TRIPS;
        let until = released_at.after(OTHERS_NEED * shard.round_trip.clamp(shortest, longest));
        let is_past = |at: Option<MonotonicTime>, time| at.is_none_or(|at| now.since(at) >= time);
        if until <= now
            || (is_past(shard.wanted_at, WANTED_FOR) && !is_past(shard.left_at, LEAVE_TURN_EVERY))
        {
            return None;
        }
        shard.left_at = Some(now);
        Some(now.after(jittered(until.since(now))))
    }

    /// How a caller asks again, so that clients ask at different times, and those that have waited longest ask first: a
    /// caller waits one round trip for each turn that it has missed less than usual, and a random part of another one.
    /// Split votes in a row double the random part.
    pub(super) fn pause(&self, key: &Key, wait: WaitSoFar) -> Pause {
        let usual = self.of(key).usually_missed;
        let [shortest, longest] = ROUND_TRIPS;
        let round_trip = wait.round_trip.clamp(shortest, longest);
        let missed = f64::from(wait.missed_turns);
        let others_first = (usual - missed).max(0.0);
        let random_part = match wait.split_votes.min(MAX_DOUBLINGS) as i32 {
            0 => RANDOM_PART,
            votes => {
                let clients = usual.max(1.0) + 1.0;
                let without_limit = 2f64.powi(votes - SPLIT_VOTES_WITH_LIMIT);
                2f64.powi(votes).min(clients).max(without_limit)
            }
        };
        let round_trips = others_first + random_part * LeaseId::random().jitter();
        Pause {
            time: round_trip.mul_f64(round_trips).min(LONGEST_PAUSE),
            reads_first: others_first >= READ_FIRST_FROM,
        }
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

    /// The contention for a key that was granted at once and has never been released.
    fn granted() -> (Contention, Key, MonotonicTime) {
        let (contention, key) = (Contention::default(), Key::new("", "k", 16).unwrap());
        contention.note_grant(&key, ROUND_TRIP, None);
        (contention, key, MonotonicTime::now())
    }

    /// How long the client that releases the key at `now` waits before it asks again.
    fn pause(contention: &Contention, key: &Key, now: MonotonicTime) -> Option<Duration> {
        contention.note_release(key, now);
        let left = contention.leave_turn(key, now);
        assert_eq!(
            contention.leave_turn(key, now),
            None,
            "one turn for each release"
        );
        left.map(|until| until.since(now))
    }

    #[test]
    fn a_client_leaves_each_turn_to_others_that_it_has_seen() {
        let (contention, key, now) = granted();
        contention.note_other_client(&key, now);
        for after in [0, 1, 999] {
            let pause = pause(&contention, &key, now.after(ms(after))).unwrap();
            assert!(pause >= ms(2) && pause <= ms(4), "{pause:?}");
        }
    }

    #[test]
    fn a_client_leaves_unseen_others_a_turn_sometimes() {
        let (contention, key, now) = granted();
        contention.note_other_client(&key, now);
        let later = now.after(ms(1000));
        for (after, leaves) in [
            (0, true),
            (1, false),
            (99, false),
            (100, true),
            (101, false),
        ] {
            let pause = pause(&contention, &key, later.after(ms(after)));
            assert_eq!(pause.is_some(), leaves, "{after}");
        }
    }

    #[test]
    fn a_client_that_has_not_just_released_the_key_does_not_wait() {
        let (contention, key, now) = granted();
        contention.note_other_client(&key, now);
        assert_eq!(contention.leave_turn(&key, now), None);
        contention.note_release(&key, now);
        let later = now.after(ms(3));
        let until = contention.leave_turn(&key, later).unwrap();
        assert!(
            until <= now.after(ms(4)),
            "the pause counts from the release"
        );
        contention.note_release(&key, now);
        assert_eq!(contention.leave_turn(&key, now.after(ms(4))), None);
    }

    #[test]
    fn a_pause_has_bounds() {
        let (contention, key, now) = granted();
        for (round_trip, longest) in [(ms(0), ms(2)), (ms(900), ms(40))] {
            contention.note_other_client(&key, now);
            contention.note_grant(&key, round_trip, None);
            let pause = pause(&contention, &key, now).unwrap();
            assert!(pause >= longest / 2 && pause <= longest, "{pause:?}");
        }
    }

    /// How long a caller pauses after it has missed so many turns, with the least and the greatest random part.
    fn pauses(contention: &Contention, key: &Key, wait: WaitSoFar) -> [Duration; 2] {
        let pauses: Vec<_> = (0..400).map(|_| contention.pause(key, wait).time).collect();
        [*pauses.iter().min().unwrap(), *pauses.iter().max().unwrap()]
    }

    fn missed(missed_turns: u32) -> WaitSoFar {
        WaitSoFar {
            missed_turns,
            split_votes: 0,
            round_trip: ROUND_TRIP,
        }
    }

    /// The contention of a client that usually misses so many turns.
    fn with_usual(turns: f64) -> (Contention, Key) {
        let (contention, key) = (Contention::default(), Key::new("", "k", 16).unwrap());
        contention.of(&key).usually_missed = turns;
        (contention, key)
    }

    /// Whether the pauses fill the range from `shortest` to `longest` round trips.
    fn fill([least, greatest]: [Duration; 2], shortest: f64, longest: f64) -> bool {
        let [shortest, longest] = [shortest, longest].map(|it| ROUND_TRIP.mul_f64(it));
        let tenth = (longest - shortest) / 10;
        (shortest..=shortest + tenth).contains(&least)
            && (longest - tenth..=longest).contains(&greatest)
    }

    #[test]
    fn a_caller_that_has_missed_more_turns_asks_sooner() {
        let (contention, key) = with_usual(4.0);
        for (turns, first, reads_first) in [
            (0, 4.0, true),
            (1, 3.0, true),
            (2, 2.0, true),
            (3, 1.0, false),
            (4, 0.0, false),
            (9, 0.0, false),
        ] {
            let pauses = pauses(&contention, &key, missed(turns));
            assert!(fill(pauses, first, first + 0.25), "{turns}: {pauses:?}");
            let pause = contention.pause(&key, missed(turns));
            assert_eq!(pause.reads_first, reads_first);
        }
    }

    #[test]
    fn split_votes_double_the_random_part() {
        let (contention, key) = with_usual(6.0);
        for (split_votes, longest) in [
            (1, 2.0),
            (2, 4.0),
            (3, 7.0),
            (5, 7.0),
            (6, 8.0),
            (7, 16.0),
            (10, 128.0),
        ] {
            let wait = WaitSoFar {
                split_votes,
                ..missed(6)
            };
            let pauses = pauses(&contention, &key, wait);
            assert!(fill(pauses, 0.0, longest), "{split_votes}: {pauses:?}");
        }
        // A new client knows of one other client.
        let (contention, key) = with_usual(0.0);
        let wait = WaitSoFar {
            split_votes: 2,
            ..missed(20)
        };
        assert!(fill(pauses(&contention, &key, wait), 0.0, 2.0));
    }

    #[test]
    fn pauses_have_a_bound() {
        let (contention, key) = with_usual(1e6);
        let slow = WaitSoFar {
            round_trip: Duration::from_secs(9),
            ..missed(0)
        };
        assert_eq!(contention.pause(&key, slow).time, LONGEST_PAUSE);
        let (contention, key) = with_usual(3.0);
        let split = WaitSoFar {
            split_votes: u32::MAX,
            ..missed(u32::MAX)
        };
        assert_eq!(pauses(&contention, &key, split)[1], LONGEST_PAUSE);
        let [least, _] = pauses(&contention, &key, slow);
        assert!(
            (ms(30)..=ms(33)).contains(&least),
            "{least:?}: 10 ms for each"
        );
    }

    #[test]
    fn the_usual_number_follows_waits_that_met_others() {
        let (contention, key) = with_usual(0.0);
        let after = |missed_turns| {
            contention.note_grant(&key, ROUND_TRIP, missed_turns);
            contention.of(&key).usually_missed
        };
        assert_eq!(after(None), 0.0);
        assert_eq!(after(Some(8)), 0.5);
        assert_eq!(after(None), 0.5);
        assert_eq!(after(Some(0)), 0.5 * 15.0 / 16.0);
        // A wait counts as eight times the usual number at most, or as eight.
        contention.of(&key).usually_missed = 0.0;
        assert_eq!(after(Some(9)), 0.5);
        contention.of(&key).usually_missed = 2.0;
        assert_eq!(after(Some(1_000_000)), 2.0 + 14.0 / 16.0);
    }
}

//! Decides when a client asks a quorum for a key. A quorum has no queue, so each client decides by itself, from replies
//! and notifications. A client that has just released the key leaves the next turn to others: it would always be the
//! first to ask, since the others have yet to be notified. The waiters that have missed the most turns ask first. A
//! waiter misses a turn if another client gets the key, or if votes are split.

use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use crate::acquire::backoff::jittered;
use crate::util::clock::MonotonicTime;
use crate::util::id::LeaseId;
use crate::util::key::Key;

/// The number of records. Keys share them.
const RECORDS: usize = 64;

/// How many round trips a client pauses after a release at most, and at least half of them. Another client needs one
/// and a half: for the notification, and to ask.
const OTHERS_NEED: u32 = 4;
/// For how long a client that was seen counts as one that wants the key.
const WANTED_FOR: Duration = Duration::from_secs(1);
/// How often a client that sees no others still leaves them a turn. It cannot see clients that it never lets in.
const LEAVE_TURN_EVERY: Duration = Duration::from_millis(100);

/// A pause never takes longer. With round trips of 10 ms, callers that have missed 25 turns less than usual, or even
/// less, ask at the same time.
const LONGEST_PAUSE: Duration = Duration::from_millis(250);
/// The greatest random part of a pause, in round trips, if no votes were split. Less than one, so that a caller that
/// has missed one turn more still asks first.
const RANDOM_PART: f64 = 0.25;
/// After split votes, the random part is at least this share of what doubling alone would give: more clients than usual
/// may contend.
const UNLIMITED_SHARE: f64 = 1.0 / 8.0;
/// Keeps the arithmetic finite. A pause reaches [`LONGEST_PAUSE`] before.
const MAX_DOUBLINGS: u32 = 16;
/// The weight of the newest wait in the usual number of missed turns. After many clients have gone, pauses are too long
/// until the number has fallen; a greater weight would make the order of the callers random.
const NEWEST_WEIGHT: f64 = 1.0 / 8.0;
/// A wait counts as so many times the usual number at most, or as so many turns if that number is below one. Otherwise
/// one lock that is held for long would delay many later waits, since its renewals count as turns.
const MAX_SAMPLE: f64 = 8.0;
/// If at least so many turns of others probably come first, a caller reads the key before it asks. A read costs less
/// than an attempt, but a caller that finds the key free needs one more round trip.
const READ_FIRST_FROM: f64 = 2.0;

/// What a client knows of the contention for the keys of a quorum.
pub(super) struct Contention(Box<[Mutex<Record>]>);

/// What a client knows of the contention for the keys of one record.
#[derive(Default)]
pub(super) struct Record {
    /// The key that this client last released, and when. `None` once `leave_turn` has used it.
    released: Option<(Key, MonotonicTime)>,
    /// When this client last noticed another one.
    pub(super) others_seen_at: Option<MonotonicTime>,
    /// When this client last left a turn to the others.
    left_at: Option<MonotonicTime>,
    /// The round trip of the last grant.
    round_trip: Duration,
    /// The weighted mean of missed turns, over the waits that missed any; 0 before the first. If all clients get the
    /// same share of turns, this is about the number of other clients.
    pub(super) usually_missed: f64,
}

/// A caller's wait so far.
#[derive(Clone, Copy, Default)]
pub(super) struct WaitSoFar {
    /// How many turns the caller has missed since it became the first waiter of its client, as far as the client has
    /// noticed. A renewal that wakes the caller counts as a turn, too.
    pub(super) missed_turns: u32,
    /// How many of its last attempts in a row have split the votes.
    pub(super) split_votes: u32,
    /// How long its last attempt took.
    pub(super) round_trip: Duration,
}

/// How a caller waits before it asks again.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Pause {
    pub(super) time: Duration,
    /// Others have probably taken the key by the end of the pause. So the caller then reads it first. If the key is
    /// free, the caller asks; otherwise it watches the key.
    pub(super) reads_first: bool,
}

impl Default for Contention {
    fn default() -> Self {
        Self((0..RECORDS).map(|_| Mutex::default()).collect())
    }
}

impl Contention {
    pub(super) fn lock_record(&self, key: &Key) -> MutexGuard<'_, Record> {
        self.0[key.shard(RECORDS)].lock()
    }

    /// Notes a grant to this client, whose attempt took `round_trip`. `missed_turns`: 0 if the caller does not wait.
    /// Such a grant does not change the usual number.
    pub(super) fn note_grant(&self, key: &Key, round_trip: Duration, missed_turns: u32) {
        let mut record = self.lock_record(key);
        record.round_trip = round_trip;
        if missed_turns > 0 {
            let usual = record.usually_missed;
            let missed = f64::from(missed_turns).min(MAX_SAMPLE * usual.max(1.0));
            record.usually_missed += NEWEST_WEIGHT * (missed - usual);
        }
    }

    /// Notes that another client has the key, or has asked for it at the same time.
    pub(super) fn note_other_client(&self, key: &Key, now: MonotonicTime) {
        self.lock_record(key).others_seen_at = Some(now);
    }

    /// Notes that this client releases the key.
    pub(super) fn note_release(&self, key: &Key, now: MonotonicTime) {
        self.lock_record(key).released = Some((key.clone(), now));
    }

    /// Until when this client pauses, so that another one gets the next turn. `None` if it need not pause. Each release
    /// counts once.
    pub(super) fn leave_turn(&self, key: &Key, now: MonotonicTime) -> Option<MonotonicTime> {
        let mut record = self.lock_record(key);
        let (_, released_at) = record.released.take_if(|(released, _)| released == key)?;
        let until = released_at.after(OTHERS_NEED * bounded(record.round_trip));
        let is_within = |at: Option<MonotonicTime>, time| at.is_some_and(|at| now.since(at) < time);
        let sees_others = is_within(record.others_seen_at, WANTED_FOR);
        let has_left_a_turn = is_within(record.left_at, LEAVE_TURN_EVERY);
        if until <= now || (!sees_others && has_left_a_turn) {
            return None;
        }
        record.left_at = Some(now);
        Some(now.after(jittered(until.since(now))))
    }

    /// Chooses the pause before a caller asks again. It has one round trip for each turn that others will probably get
    /// first: the usual number of missed turns, less those that the caller has missed. A random part is added, so that
    /// clients ask at different times.
    pub(super) fn choose_pause(&self, key: &Key, wait: WaitSoFar) -> Pause {
        let usual = self.lock_record(key).usually_missed;
        let others_first = (usual - f64::from(wait.missed_turns)).max(0.0);
        let time = bounded(wait.round_trip).mul_f64(others_first) + random_pause(usual, wait);
        Pause {
            time: time.min(LONGEST_PAUSE),
            reads_first: others_first >= READ_FIRST_FROM,
        }
    }

    /// Chooses the pause of a caller that does not wait for its turn: the random part only.
    pub(super) fn choose_random_pause(&self, key: &Key, wait: WaitSoFar) -> Duration {
        let usual = self.lock_record(key).usually_missed;
        random_pause(usual, wait).min(LONGEST_PAUSE)
    }
}

/// The random part of a pause, which grows with the split votes.
fn random_pause(usually_missed: f64, wait: WaitSoFar) -> Duration {
    let random_part = match wait.split_votes {
        0 => RANDOM_PART,
        votes => {
            let doubled = f64::from(1u32 << votes.min(MAX_DOUBLINGS));
            // This client, and at least one other.
            let clients = 1.0 + usually_missed.max(1.0);
            doubled.min(clients.max(UNLIMITED_SHARE * doubled))
        }
    };
    bounded(wait.round_trip).mul_f64(random_part * LeaseId::random().jitter())
}

/// The round trip that pauses count with, 0.5 to 10 ms. Timers of less than 0.5 ms are too inexact to put clients in order, and one
/// slow reply says nothing about the next one.
pub(super) fn bounded(round_trip: Duration) -> Duration {
    round_trip.clamp(Duration::from_micros(500), Duration::from_millis(10))
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
        contention.note_grant(&key, ROUND_TRIP, 0);
        (contention, key, MonotonicTime::now())
    }

    /// How long the client that releases the key at `now` leaves it to others.
    fn left_turn(contention: &Contention, key: &Key, now: MonotonicTime) -> Option<Duration> {
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
            let pause = left_turn(&contention, &key, now.after(ms(after))).unwrap();
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
            let pause = left_turn(&contention, &key, later.after(ms(after)));
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
    fn a_release_of_another_key_leaves_no_turn() {
        let (contention, key, now) = granted();
        let names = (0..).map(|n| format!("other {n}"));
        let mut others = names.map(|name| Key::new("", &name, 16).unwrap());
        let other = others.find(|other| other.shard(RECORDS) == key.shard(RECORDS));
        contention.note_other_client(&key, now);
        contention.note_release(&key, now);
        assert_eq!(contention.leave_turn(&other.unwrap(), now), None);
        assert!(contention.leave_turn(&key, now).is_some());
    }

    #[test]
    fn a_left_turn_has_bounds() {
        let (contention, key, now) = granted();
        for (round_trip, longest) in [(ms(0), ms(2)), (ms(900), ms(40))] {
            contention.note_other_client(&key, now);
            contention.note_grant(&key, round_trip, 0);
            let pause = left_turn(&contention, &key, now).unwrap();
            assert!(pause >= longest / 2 && pause <= longest, "{pause:?}");
        }
    }

    /// How long a caller pauses after it has missed so many turns, with the least and the greatest random part.
    fn pauses(contention: &Contention, key: &Key, wait: WaitSoFar) -> [Duration; 2] {
        let pauses: Vec<_> = (0..400)
            .map(|_| contention.choose_pause(key, wait).time)
            .collect();
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
        contention.lock_record(&key).usually_missed = turns;
        (contention, key)
    }

    /// Whether the pauses span the range from `shortest` to `longest` round trips.
    fn span([least, greatest]: [Duration; 2], shortest: f64, longest: f64) -> bool {
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
            assert!(span(pauses, first, first + 0.25), "{turns}: {pauses:?}");
            let pause = contention.choose_pause(&key, missed(turns));
            assert_eq!(pause.reads_first, reads_first);
        }
    }

    #[test]
    fn a_caller_that_does_not_wait_pauses_for_the_random_part() {
        let (contention, key) = with_usual(6.0);
        let wait = WaitSoFar {
            split_votes: 1,
            ..missed(0)
        };
        let pause = || contention.choose_random_pause(&key, wait);
        let pauses = (0..400).map(|_| pause());
        let [least, greatest] = [pauses.clone().min(), pauses.max()].map(Option::unwrap);
        assert!(span([least, greatest], 0.0, 2.0), "{least:?} {greatest:?}");
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
            assert!(span(pauses, 0.0, longest), "{split_votes}: {pauses:?}");
        }
        // A new client knows of one other client.
        let (contention, key) = with_usual(0.0);
        let wait = WaitSoFar {
            split_votes: 2,
            ..missed(20)
        };
        assert!(span(pauses(&contention, &key, wait), 0.0, 2.0));
    }

    #[test]
    fn a_pause_has_bounds() {
        let (contention, key) = with_usual(1e6);
        let slow = WaitSoFar {
            round_trip: Duration::from_secs(9),
            ..missed(0)
        };
        assert_eq!(contention.choose_pause(&key, slow).time, LONGEST_PAUSE);
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
            contention.lock_record(&key).usually_missed
        };
        assert_eq!(after(0), 0.0);
        assert_eq!(after(8), 1.0);
        assert_eq!(after(0), 1.0);
        assert_eq!(after(1), 1.0);
        // A wait counts as eight times the usual number at most, or as eight.
        assert_eq!(after(1_000_000), 1.0 + 7.0 / 8.0);
        contention.lock_record(&key).usually_missed = 0.5;
        assert_eq!(after(9), 0.5 + 7.5 / 8.0);
    }

    /// A client whose waits were long because of many others pauses for too long once they have gone.
    #[test]
    fn pauses_become_short_soon_after_others_have_gone() {
        let (contention, key) = with_usual(64.0);
        let mut in_vain = Duration::ZERO;
        for _ in 0..64 {
            in_vain += contention.choose_pause(&key, missed(1)).time;
            contention.note_grant(&key, ROUND_TRIP, 1);
        }
        // 63 round trips in the first pause, and an eighth less in each further one.
        assert!((ms(504)..ms(525)).contains(&in_vain), "{in_vain:?}");
    }
}

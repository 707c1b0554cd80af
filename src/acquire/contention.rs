//! When the callers of a client ask a quorum for a key. A quorum has no queues, so each client draws its conclusions
//! from the replies. It leaves turns to other clients: the client that has just released a key would always be the
//! first to ask for it again, since the others have yet to be notified. And it estimates how many clients contend, and
//! how long its callers usually wait.

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
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// The greatest estimate of contending clients.
const MOST_CONTENDERS: u32 = 64;
const LONGEST_PAUSE: Duration = Duration::from_millis(250);
/// The weight of the newest wait in the mean wait.
const NEWEST_WEIGHT: f64 = 1.0 / 16.0;
/// The longest pause, without split votes, of a caller that is not late: as a share of the mean wait.
const PAUSE_PER_MEAN: f64 = 1.0 / 4.0;
/// The mean wait before the first wait, in round trips.
const USUAL_WAIT: u32 = 20;
/// The greatest lateness (wait / mean wait) that still shortens pauses.
const MAX_LATENESS: f64 = 4.0;
/// Further split votes in a row do not double the pause.
const MAX_DOUBLINGS: u32 = 20;
/// A wait counts in the mean as this many means at most. Otherwise one stalled holder would end the lateness of many
/// later waits.
const LONGEST_SAMPLE: u32 = 8;
/// A late caller polls after its wait so far, divided by this.
const WAIT_PER_POLL: u32 = 16;
/// The holder has stalled if a caller has waited for more than this many means. Then polls are further apart.
const STALLED: u32 = 16;
/// The least time between two polls of a lock whose holder has stalled.
const STALLED_POLL: Duration = Duration::from_millis(20);

/// Each client's own record of the contention for the keys of a quorum.
pub(super) struct Contention(Box<[Mutex<Shard>]>);

#[derive(Default)]
struct Shard {
    /// When this client has released the key, unless the others have got a turn since.
    released_at: Option<MonotonicTime>,
    /// When this client has last seen that another one wants the key.
    wanted_at: Option<MonotonicTime>,
    /// When this client has last left a turn to the others.
    left_at: Option<MonotonicTime>,
    /// The round trip of the last grant.
    round_trip: Duration,
    /// An estimate of the contending clients. A split vote doubles it; a grant, also to another client, lowers it by a
    /// quarter.
    clients: u32,
    /// The mean wait of those callers that met another client, and at least the shortest of [`ROUND_TRIPS`]. `None`
    /// before the first one. A caller is late once it has waited for longer.
    mean_wait: Option<Duration>,
}

/// A caller's wait so far.
#[derive(Clone, Copy)]
pub(super) struct WaitSoFar {
    /// The time since the caller's first attempt. The time behind other callers of its client does not count.
    pub(super) waited: Duration,
    /// How many of its last attempts in a row have split the votes.
    pub(super) split_votes: u32,
    /// How long its last attempt took.
    pub(super) round_trip: Duration,
}

impl Default for Contention {
    fn default() -> Self {
        Self((0..SHARDS).map(|_| Mutex::default()).collect())
    }
}

impl Contention {
    #[cfg(all(test, not(shuttle)))]
    pub(super) fn contenders(&self, key: &Key) -> u32 {
        self.of(key).clients
    }

    fn of(&self, key: &Key) -> MutexGuard<'_, Shard> {
        self.0[key.shard(SHARDS)].lock()
    }

    /// Notes a grant to this client, whose attempt took `round_trip`. `waited`: how long the caller has waited; `None`
    /// if it has met no other client.
    pub(super) fn note_grant(&self, key: &Key, round_trip: Duration, waited: Option<Duration>) {
        let mut shard = self.of(key);
        shard.round_trip = round_trip;
        shard.lower_estimate();
        if let Some(waited) = waited {
            let [shortest, _] = ROUND_TRIPS;
            let waited = waited.max(shortest);
            let mean = shard.mean_wait.unwrap_or(waited);
            let waited = waited.min(LONGEST_SAMPLE * mean);
            let others = mean.mul_f64(1.0 - NEWEST_WEIGHT);
            shard.mean_wait = Some(others + waited.mul_f64(NEWEST_WEIGHT));
        }
    }

    /// Notes a reply that another client has the key. `is_new_grant`: the caller has not seen this grant before.
    pub(super) fn note_refusal(&self, key: &Key, is_new_grant: bool, now: MonotonicTime) {
        let mut shard = self.of(key);
        shard.wanted_at = Some(now);
        if is_new_grant {
            shard.lower_estimate();
        }
    }

    /// Notes that another client has asked for the key at the same time.
    pub(super) fn note_split_vote(&self, key: &Key, now: MonotonicTime) {
        let mut shard = self.of(key);
        shard.wanted_at = Some(now);
        shard.clients = (2 * shard.clients).clamp(2, MOST_CONTENDERS);
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
            || (is_past(shard.wanted_at, WANTED_FOR) && !is_past(shard.left_at, LOOK_EVERY))
        {
            return None;
        }
        shard.left_at = Some(now);
        Some(now.after(jittered(until.since(now))))
    }

    /// A random time before a caller asks again, so that clients ask at different times.
    pub(super) fn random_pause(&self, key: &Key, wait: WaitSoFar) -> Duration {
        let longest = self.of(key).longest_pause(wait);
        longest.mul_f64(LeaseId::random().jitter())
    }

    /// How long a caller relies on notifications before it polls. `None` before the first mean wait. A late caller
    /// polls, since another client may take the key before a notification arrives. Polls are two round trips apart at
    /// least: a poll that is on its way when the key is released splits the votes.
    pub(super) fn poll_after(&self, key: &Key, wait: WaitSoFar) -> Option<Duration> {
        let mean = self.of(key).mean_wait?;
        let until_late = mean.saturating_sub(wait.waited);
        let [shortest, _] = ROUND_TRIPS;
        let shortest = match wait.waited > STALLED * mean {
            true => STALLED_POLL,
            false => shortest,
        };
        let poll_after = until_late.max(wait.waited / WAIT_PER_POLL);
        Some(poll_after.max(2 * wait.round_trip).max(shortest))
    }
}

impl Shard {
    fn lower_estimate(&mut self) {
        self.clients -= self.clients.div_ceil(4);
    }

    /// The upper bound of the next random pause. At most one round trip for each contender, so that one of them
    /// probably asks a round trip before the others. Without split votes, also at most a part of the mean wait, divided
    /// by the cube of the lateness, so that no caller waits for many times the mean. Each split vote in a row doubles
    /// this part, since all callers may be late.
    fn longest_pause(&self, wait: WaitSoFar) -> Duration {
        let [shortest, longest] = ROUND_TRIPS;
        let round_trip = wait.round_trip.clamp(shortest, longest);
        let bound = (self.clients * round_trip).min(LONGEST_PAUSE);
        let mean = self.mean_wait.unwrap_or(USUAL_WAIT * round_trip);
        let lateness = wait.waited.div_duration_f64(mean).clamp(1.0, MAX_LATENESS);
        let pause = bound
            .min(mean.mul_f64(PAUSE_PER_MEAN))
            .div_f64(lateness.powi(3));
        let doublings = wait.split_votes.min(MAX_DOUBLINGS);
        pause.saturating_mul(1 << doublings).min(bound)
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
        contention.note_refusal(&key, true, now);
        for after in [0, 1, 999] {
            let pause = pause(&contention, &key, now.after(ms(after))).unwrap();
            assert!(pause >= ms(2) && pause <= ms(4), "{pause:?}");
        }
    }

    #[test]
    fn a_client_looks_for_others_from_time_to_time() {
        let (contention, key, now) = granted();
        contention.note_refusal(&key, true, now);
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
        contention.note_refusal(&key, true, now);
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
            contention.note_refusal(&key, true, now);
            contention.note_grant(&key, round_trip, None);
            let pause = pause(&contention, &key, now).unwrap();
            assert!(pause >= longest / 2 && pause <= longest, "{pause:?}");
        }
    }

    fn waited(ms: u64) -> WaitSoFar {
        WaitSoFar {
            waited: Duration::from_millis(ms),
            split_votes: 0,
            round_trip: ROUND_TRIP,
        }
    }

    /// The contention of a client that usually waits for long, and that has seen so many split votes in a row.
    fn with_split_votes(votes: usize) -> (Contention, Key) {
        let (contention, key) = (Contention::default(), Key::new("", "k", 16).unwrap());
        contention.of(&key).mean_wait = Some(ms(1_000_000));
        (0..votes).for_each(|_| contention.note_split_vote(&key, MonotonicTime::now()));
        (contention, key)
    }

    #[test]
    fn pauses_follow_the_split_votes() {
        let longest =
            |contention: &Contention, key: &Key, wait| contention.of(key).longest_pause(wait);
        for (votes, known) in [(0, 0), (1, 2), (2, 4), (5, 32), (6, 64), (7, 64)] {
            let (contention, key) = with_split_votes(votes);
            assert_eq!(longest(&contention, &key, waited(0)), known * ROUND_TRIP);
        }
        let (contention, key) = with_split_votes(6);
        let slow = WaitSoFar {
            round_trip: LONGEST_PAUSE,
            ..waited(0)
        };
        assert_eq!(longest(&contention, &key, slow), LONGEST_PAUSE);
        let pauses: Vec<_> = (0..200)
            .map(|_| contention.random_pause(&key, waited(0)))
            .collect();
        assert!(*pauses.iter().min().unwrap() < 16 * ROUND_TRIP);
        assert!((48 * ROUND_TRIP..=64 * ROUND_TRIP).contains(pauses.iter().max().unwrap()));
        // Grants to other clients count, too, once each.
        for (is_new_grant, known) in [(true, 48), (false, 48), (true, 36), (true, 27)] {
            contention.note_refusal(&key, is_new_grant, MonotonicTime::now());
            assert_eq!(longest(&contention, &key, waited(0)), known * ROUND_TRIP);
        }
        (0..30).for_each(|_| contention.note_grant(&key, ROUND_TRIP, None));
        assert_eq!(longest(&contention, &key, waited(0)), Duration::ZERO);
    }

    /// The contention of a client with this mean wait.
    fn with_mean(mean: Duration) -> (Contention, Key) {
        let (contention, key) = with_split_votes(6);
        contention.of(&key).mean_wait = Some(mean);
        (contention, key)
    }

    #[test]
    fn a_first_wait_has_an_assumed_mean() {
        let (contention, key) = with_split_votes(6);
        contention.of(&key).mean_wait = None;
        let longest = |ms| contention.of(&key).longest_pause(waited(ms));
        assert_eq!([0, 20].map(longest), [5 * ROUND_TRIP; 2]);
        assert_eq!(longest(40), 5 * ROUND_TRIP / 8);
        assert_eq!(contention.poll_after(&key, waited(40)), None);
    }

    #[test]
    fn a_late_caller_pauses_for_less() {
        let longest = |mean, wait, split_votes| {
            let (contention, key) = with_mean(mean);
            let wait = WaitSoFar {
                split_votes,
                ..wait
            };
            contention.of(&key).longest_pause(wait).as_micros()
        };
        let after = |ms_waited, split_votes| longest(ms(100), waited(ms_waited), split_votes);
        assert_eq!([0, 100].map(|ms| after(ms, 0)), [25_000; 2]);
        assert_eq!([200, 300].map(|ms| after(ms, 0)), [3125, 925]);
        assert_eq!([400, 90_000].map(|ms| after(ms, 0)), [390; 2]);
        // All callers may be late.
        assert_eq!([1, 2, 3].map(|votes| after(400, votes)), [781, 1562, 3125]);
        assert_eq!([10, 99].map(|votes| after(400, votes)), [64_000; 2]);
        // The network has become slow.
        let slow = WaitSoFar {
            round_trip: ms(10),
            ..waited(400)
        };
        assert_eq!(longest(ms(1), slow, 20), LONGEST_PAUSE.as_micros());
    }

    #[test]
    fn a_late_caller_polls_at_growing_intervals() {
        let (contention, key) = with_mean(ms(100));
        let micros = |wait| contention.poll_after(&key, wait).unwrap().as_micros();
        let expected = [
            (0, 100_000),
            (60, 40_000),
            (99, 6187),
            (160, 10_000),
            (320, 20_000),
            (1600, 100_000),
        ];
        for (ms, poll_after) in expected {
            assert_eq!(micros(waited(ms)), poll_after, "{ms}");
        }
        let far = WaitSoFar {
            round_trip: ms(10),
            ..waited(160)
        };
        assert_eq!(micros(far), 20_000, "two round trips");
        let (contention, key) = with_mean(ms(4));
        let micros = |ms| contention.poll_after(&key, waited(ms)).unwrap().as_micros();
        assert_eq!(
            [64, 65].map(micros),
            [4000, 20_000],
            "the holder has stalled"
        );
    }

    #[test]
    fn the_mean_follows_waits_that_met_others() {
        let (contention, key) = with_split_votes(0);
        contention.of(&key).mean_wait = None;
        let mean_after = |waited: Option<u64>| {
            contention.note_grant(&key, ROUND_TRIP, waited.map(ms));
            contention.of(&key).mean_wait.map(|mean| mean.as_millis())
        };
        assert_eq!(mean_after(None), None);
        assert_eq!(mean_after(Some(160)), Some(160));
        assert_eq!(mean_after(None), Some(160));
        assert_eq!(mean_after(Some(320)), Some(170));
        // At most eight means.
        assert_eq!(mean_after(Some(86_400_000)), Some(170 * 23 / 16));
        // A mean of zero could not divide a wait.
        contention.of(&key).mean_wait = None;
        contention.note_grant(&key, ROUND_TRIP, Some(Duration::ZERO));
        assert_eq!(contention.of(&key).mean_wait, Some(ROUND_TRIPS[0]));
    }
}

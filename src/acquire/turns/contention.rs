//! A client's records of the contention for keys without a queue in Redis, on a quorum or beside another library, and
//! the pauses that follow from them. Each client decides for itself when to ask, from replies and notifications.
//!
//! - *After its own release*, a client pauses for up to four round trips. Otherwise it would always ask first, because
//!   other clients have yet to be notified. After each release, it pauses if it has recently seen that other clients
//!   want the key. If it has seen none, it pauses only from time to time: it cannot see clients that never get a turn.
//! - *After a split vote*, a client pauses for a random time. This time doubles with each further split vote, up to one
//!   round trip for each client that contends.
//! - *Order.* A waiter misses a turn if another client gets the key, or if votes are split. With a fair share, a waiter
//!   misses one turn of each rival. So it pauses for one round trip for each rival, less the turns that it has missed:
//!   the waiters that have missed the most turns ask first. Clients that contend for a key see mostly the same holders,
//!   so they count about the same number of rivals.
//! - *Starvation.* Clients with longer round trips are notified later and ask later. A waiter that has read many turns
//!   of others starves: it asks again 5 to 10 ms after each refusal, and less often the older the current turn is. So
//!   it finds the key free by chance.
//!
//! A turn lasts from a grant to its release: a renewal begins no new turn. But a notification does not tell a renewal
//! from a release, so a renewal that wakes a waiter counts as a missed turn.

use std::collections::{HashSet, VecDeque};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use crate::config::key::Key;
use crate::store::Turn;
use crate::util::backoff::jittered;
use crate::util::clock::MonotonicTime;
use crate::util::id::LeaseId;

/// The number of records. Keys with the same hash share one.
const RECORDS: usize = 64;

/// The longest pause after a release, in round trips. The shortest is half of it. Another client needs one and a half
/// round trips: half a round trip for the notification, and one to ask.
const LEFT_ROUND_TRIPS: u32 = 4;
/// After another client was seen, it counts for this time as one that wants the key.
const WANTED_FOR: Duration = Duration::from_secs(1);
/// A client that sees no others leaves a turn to them once in this time, or once in ten of its longest pauses if that
/// is longer. It cannot see clients that never get a turn.
const LEAVE_TURN_EVERY: Duration = Duration::from_millis(100);

/// A pause has two parts, one for the turns of others and a random one. Neither is longer than this.
const LONGEST_PART: Duration = Duration::from_millis(250);
/// The greatest random part of a pause without split votes, in round trips. It is less than one, so that a caller that
/// has missed one more turn asks first.
const RANDOM_ROUND_TRIPS: f64 = 0.25;
/// Each split vote doubles the random part, up to one round trip for each client that contends. More clients may
/// contend than this client has seen, so the random part has at least this share of its doubled length.
const LEAST_SHARE_OF_DOUBLING: f64 = 1.0 / 8.0;
/// The maximum number of doublings. The random part reaches [`LONGEST_PART`] with fewer.
const MAX_DOUBLINGS: u32 = 16;
/// How many turns of other clients a record keeps, to count the rivals. With more turns, a record would find more
/// rivals, but would still count clients for longer after they have left.
const RECENT_TURNS: usize = 32;
/// A client counts as a rival for this time after its last turn.
const RIVAL_FOR: Duration = Duration::from_secs(5);
/// A waiter without rivals starves once it has read this many turns of others in one wait. Each rival adds two turns.
const STARVES_AFTER: f64 = 8.0;
/// How many attempts a record keeps. The shortest of them is the estimate of a round trip: on a busy machine, one
/// attempt may take ten times as long as another.
const RECENT_ATTEMPTS: usize = 4;
/// The shortest round trip that pauses use. Timers are not exact enough to keep clients in order with a shorter one.
const SHORTEST_ROUND_TRIP: Duration = Duration::from_micros(500);
/// The longest round trip that pauses use. It limits the pauses of a client whose last attempts were all slow.
const LONGEST_ROUND_TRIP: Duration = Duration::from_millis(100);
/// If at least this many turns of others probably come first, a caller reads the key before it asks. A read costs less
/// than an attempt. But if the caller finds the key free, the read costs one more round trip.
const READ_FIRST_FROM: f64 = 2.0;

/// One client's records of the contention for the keys of a quorum.
pub struct Contention(Box<[Mutex<Record>]>);

/// The record of the contention for the keys that share it. They also share the rivals and the round trip, so pauses
/// may be longer than a single key needs.
#[derive(Default)]
pub struct Record {
    /// The key that this client last released, and when. `leave_turn` clears it.
    released: Option<(Key, MonotonicTime)>,
    /// When this client last noticed that another client wants a key.
    others_seen_at: Option<MonotonicTime>,
    /// When this client last left a turn to others.
    left_at: Option<MonotonicTime>,
    /// The durations of this client's last attempts.
    recent_attempts: VecDeque<Duration>,
    /// The last turns of others that this client has read, each with the time of its last read.
    recent_turns: VecDeque<(Turn, MonotonicTime)>,
}

impl Record {
    /// The turns that were read in the last [`RIVAL_FOR`].
    fn recent(&self, now: MonotonicTime) -> impl Iterator<Item = &Turn> {
        let is_recent = move |read_at: &MonotonicTime| now.since(*read_at) < RIVAL_FOR;
        let turns = self.recent_turns.iter();
        turns.filter_map(move |(turn, read_at)| is_recent(read_at).then_some(turn))
    }

    /// The number of clients that have had recent turns.
    pub fn rivals(&self, now: MonotonicTime) -> usize {
        let holders = self.recent(now).map(|turn| &turn.holder);
        holders.collect::<HashSet<_>>().len()
    }

    /// The unit of pauses: the shortest of the recent attempts, within bounds.
    fn round_trip(&self) -> Duration {
        let shortest = self.recent_attempts.iter().min().copied();
        let shortest = shortest.unwrap_or_default();
        shortest.clamp(SHORTEST_ROUND_TRIP, LONGEST_ROUND_TRIP)
    }

    /// The random part of a pause. It gets longer with each split vote.
    fn random_part(&self, rivals: usize, split_votes: u32) -> Duration {
        let round_trips = match split_votes {
            0 => RANDOM_ROUND_TRIPS,
            votes => {
                let doubled = f64::from(1u32 << votes.min(MAX_DOUBLINGS));
                // This client, and at least one other.
                let clients = 1.0 + rivals.max(1) as f64;
                doubled.min(clients.max(LEAST_SHARE_OF_DOUBLING * doubled))
            }
        };
        let longest = self.round_trip().mul_f64(round_trips).min(LONGEST_PART);
        longest.mul_f64(LeaseId::random().jitter())
    }
}

/// The contention that a caller has met in its wait so far.
#[derive(Clone, Copy, Default)]
pub struct WaitSoFar {
    /// How many turns the caller has missed since it became the first waiter of its client. A renewal that wakes the
    /// caller counts, too.
    pub missed_turns: u32,
    /// How many of the caller's last attempts in a row were split votes.
    pub split_votes: u32,
}

/// The pause of a caller before it asks again.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pause {
    pub time: Duration,
    /// Whether the caller reads the key after the pause, because others have probably taken it by then. If the key is
    /// free, the caller asks; otherwise it watches the key.
    pub reads_first: bool,
}

impl Default for Contention {
    fn default() -> Self {
        Self((0..RECORDS).map(|_| Mutex::default()).collect())
    }
}

impl Contention {
    pub fn lock_record(&self, key: &Key) -> MutexGuard<'_, Record> {
        self.0[key.shard(RECORDS)].lock()
    }

    /// Records how long an attempt of this client took.
    pub fn record_attempt(&self, key: &Key, took: Duration) {
        push(
            &mut self.lock_record(key).recent_attempts,
            took,
            RECENT_ATTEMPTS,
        );
    }

    /// The unit of pauses.
    pub fn round_trip(&self, key: &Key) -> Duration {
        self.lock_record(key).round_trip()
    }

    /// Records a turn that a node has reported; for a known turn, only the time of this read. Returns whether the turn
    /// is new. The turn may belong to a client that has lost a split vote.
    pub fn record_turn(&self, key: &Key, turn: Turn, now: MonotonicTime) -> bool {
        let mut record = self.lock_record(key);
        let mut known = record.recent_turns.iter_mut();
        if let Some((_, read_at)) = known.find(|(known, _)| known.lease == turn.lease) {
            *read_at = now;
            return false;
        }
        push(&mut record.recent_turns, (turn, now), RECENT_TURNS);
        true
    }

    /// Whether a waiter that has read this many turns of others has to ask more often. Its requests may take longer
    /// than those of others, which would then always come first.
    pub fn starves(&self, key: &Key, turns_read: usize, now: MonotonicTime) -> bool {
        let record = self.lock_record(key);
        let (seen, turns) = (record.rivals(now), record.recent(now).count());
        // The estimate includes rivals that have no turn among the recent ones. In a crowd, all waits are long, so
        // fewer waiters starve.
        let rivals = seen as f64 / (1.0 - seen as f64 / (turns + 1) as f64);
        turns_read as f64 >= STARVES_AFTER + 2.0 * rivals
    }

    /// Records that another client has the key, or has asked for it at the same time.
    pub fn record_other_client(&self, key: &Key, now: MonotonicTime) {
        self.lock_record(key).others_seen_at = Some(now);
    }

    /// Records that this client releases the key.
    pub fn record_release(&self, key: &Key, now: MonotonicTime) {
        self.lock_record(key).released = Some((key.clone(), now));
    }

    /// Returns the time until which this client leaves the key to others after its release. Returns `None` if it need
    /// not pause. Each release leads to one pause at most.
    pub fn leave_turn(&self, key: &Key, now: MonotonicTime) -> Option<MonotonicTime> {
        let mut record = self.lock_record(key);
        let (_, released_at) = record.released.take_if(|(released, _)| released == key)?;
        let longest = LEFT_ROUND_TRIPS * record.round_trip();
        let until = released_at.after(longest);
        let is_within = |at: Option<MonotonicTime>, time| at.is_some_and(|at| now.since(at) < time);
        let sees_others = is_within(record.others_seen_at, WANTED_FOR);
        let has_left_a_turn = is_within(record.left_at, LEAVE_TURN_EVERY.max(10 * longest));
        if until <= now || (!sees_others && has_left_a_turn) {
            return None;
        }
        record.left_at = Some(now);
        Some(now.after(jittered(until.since(now))))
    }

    /// Chooses the pause before a caller asks again: one round trip for each turn that others will probably get first,
    /// plus a random part. Others will get one turn for each rival, less the turns that the caller has missed.
    pub fn choose_pause(&self, key: &Key, wait: WaitSoFar, now: MonotonicTime) -> Pause {
        let record = self.lock_record(key);
        let rivals = record.rivals(now);
        let others_first = (rivals as f64 - f64::from(wait.missed_turns)).max(0.0);
        let for_others = record.round_trip().mul_f64(others_first).min(LONGEST_PART);
        Pause {
            time: for_others + record.random_part(rivals, wait.split_votes),
            reads_first: others_first >= READ_FIRST_FROM,
        }
    }

    /// Chooses the pause of a caller that does not wait for its turn. It has only the random part.
    pub fn choose_random_pause(&self, key: &Key, split_votes: u32, now: MonotonicTime) -> Duration {
        let record = self.lock_record(key);
        record.random_part(record.rivals(now), split_votes)
    }
}

/// Appends a record, and drops the oldest one if there are `most` already.
fn push<T>(recent: &mut VecDeque<T>, record: T, most: usize) {
    if recent.len() == most {
        recent.pop_front();
    }
    recent.push_back(record);
}

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests {
    use super::*;
    use crate::acquire::tests::turn;

    const ROUND_TRIP: Duration = Duration::from_millis(1);

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// The contention for a key that this client was granted at once and has not released.
    fn granted() -> (Contention, Key, MonotonicTime) {
        let (contention, key) = (Contention::default(), Key::new("", "k", 16).unwrap());
        contention.record_attempt(&key, ROUND_TRIP);
        (contention, key, MonotonicTime::now())
    }

    /// How long a client pauses after it has released the key at `now`.
    fn left_turn(contention: &Contention, key: &Key, now: MonotonicTime) -> Option<Duration> {
        contention.record_release(key, now);
        let left = contention.leave_turn(key, now);
        assert_eq!(
            contention.leave_turn(key, now),
            None,
            "one turn for each release"
        );
        left.map(|until| until.since(now))
    }

    #[test]
    fn seen_clients_get_each_next_turn() {
        let (contention, key, now) = granted();
        contention.record_other_client(&key, now);
        for after in [0, 1, 999] {
            let pause = left_turn(&contention, &key, now.after(ms(after))).unwrap();
            assert!(pause >= ms(2) && pause <= ms(4), "{pause:?}");
        }
    }

    #[test]
    fn a_client_leaves_unseen_others_a_turn_sometimes() {
        let (contention, key, now) = granted();
        contention.record_other_client(&key, now);
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

    /// A lone client with long round trips must not pause after most of its releases.
    #[test]
    fn distant_clients_leave_unseen_others_fewer_turns() {
        let (contention, key, now) = granted();
        become_slow(&contention, &key);
        assert!(left_turn(&contention, &key, now).is_some());
        assert_eq!(left_turn(&contention, &key, now.after(ms(3_900))), None);
        assert!(left_turn(&contention, &key, now.after(ms(4_100))).is_some());
    }

    #[test]
    fn a_client_that_has_not_just_released_the_key_does_not_wait() {
        let (contention, key, now) = granted();
        contention.record_other_client(&key, now);
        assert_eq!(contention.leave_turn(&key, now), None);
        contention.record_release(&key, now);
        let later = now.after(ms(3));
        let until = contention.leave_turn(&key, later).unwrap();
        assert!(
            until <= now.after(ms(4)),
            "the pause counts from the release"
        );
        contention.record_release(&key, now);
        assert_eq!(contention.leave_turn(&key, now.after(ms(4))), None);
    }

    #[test]
    fn a_release_of_another_key_leaves_no_turn() {
        let (contention, key, now) = granted();
        let names = (0..).map(|n| format!("other {n}"));
        let mut others = names.map(|name| Key::new("", &name, 16).unwrap());
        let other = others.find(|other| other.shard(RECORDS) == key.shard(RECORDS));
        contention.record_other_client(&key, now);
        contention.record_release(&key, now);
        assert_eq!(contention.leave_turn(&other.unwrap(), now), None);
        assert!(contention.leave_turn(&key, now).is_some());
    }

    #[test]
    fn a_left_turn_has_bounds() {
        let (contention, key, now) = granted();
        for (round_trip, longest) in [(ms(0), ms(2)), (ms(900), ms(400))] {
            contention.record_other_client(&key, now);
            (0..RECENT_ATTEMPTS).for_each(|_| contention.record_attempt(&key, round_trip));
            let pause = left_turn(&contention, &key, now).unwrap();
            assert!(pause >= longest / 2 && pause <= longest, "{pause:?}");
        }
    }

    /// The shortest and the longest of 400 pauses.
    fn pauses(contention: &Contention, key: &Key, wait: WaitSoFar) -> [Duration; 2] {
        let pauses: Vec<_> = (0..400)
            .map(|_| {
                contention
                    .choose_pause(key, wait, MonotonicTime::now())
                    .time
            })
            .collect();
        [*pauses.iter().min().unwrap(), *pauses.iter().max().unwrap()]
    }

    fn missed(missed_turns: u32) -> WaitSoFar {
        WaitSoFar {
            missed_turns,
            split_votes: 0,
        }
    }

    /// The contention of a client that has seen this many rivals.
    fn with_rivals(rivals: usize) -> (Contention, Key) {
        let (contention, key) = (Contention::default(), Key::new("", "k", 16).unwrap());
        let now = MonotonicTime::now();
        for n in 0..rivals {
            assert!(contention.record_turn(&key, turn(n), now));
        }
        contention.record_attempt(&key, ROUND_TRIP);
        (contention, key)
    }

    /// Whether the pauses are between `shortest` and `longest` round trips and come close to both.
    fn span([least, greatest]: [Duration; 2], shortest: f64, longest: f64) -> bool {
        let [shortest, longest] = [shortest, longest].map(|trips| ROUND_TRIP.mul_f64(trips));
        let tenth = (longest - shortest) / 10;
        (shortest..=shortest + tenth).contains(&least)
            && (longest - tenth..=longest).contains(&greatest)
    }

    #[test]
    fn a_caller_that_has_missed_more_turns_asks_sooner() {
        let (contention, key) = with_rivals(4);
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
            let pause = contention.choose_pause(&key, missed(turns), MonotonicTime::now());
            assert_eq!(pause.reads_first, reads_first);
        }
    }

    #[test]
    fn try_lock_pauses_at_random() {
        let (contention, key) = with_rivals(6);
        let pause = || contention.choose_random_pause(&key, 1, MonotonicTime::now());
        let pauses = (0..400).map(|_| pause());
        let [least, greatest] = [pauses.clone().min(), pauses.max()].map(Option::unwrap);
        assert!(span([least, greatest], 0.0, 2.0), "{least:?} {greatest:?}");
    }

    #[test]
    fn split_votes_double_the_random_part() {
        let (contention, key) = with_rivals(6);
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
        // Without a recent turn, a client assumes one rival.
        let (contention, key) = with_rivals(0);
        let wait = WaitSoFar {
            split_votes: 2,
            ..missed(20)
        };
        assert!(span(pauses(&contention, &key, wait), 0.0, 2.0));
    }

    fn become_slow(contention: &Contention, key: &Key) {
        let slow = Duration::from_secs(9);
        (0..RECENT_ATTEMPTS).for_each(|_| contention.record_attempt(key, slow));
    }

    /// A busy machine makes some attempts slow. With pauses as long as these, a waiter would miss many turns.
    #[test]
    fn a_few_slow_attempts_do_not_lengthen_pauses() {
        let (contention, key) = with_rivals(4);
        for _ in 0..3 {
            contention.record_attempt(&key, 10 * ROUND_TRIP);
            assert!(span(pauses(&contention, &key, missed(0)), 4.0, 4.25));
        }
        contention.record_attempt(&key, 10 * ROUND_TRIP);
        assert!(pauses(&contention, &key, missed(0))[0] >= 40 * ROUND_TRIP);
    }

    #[test]
    fn a_pause_has_bounds() {
        let (contention, key) = with_rivals(RECENT_TURNS);
        become_slow(&contention, &key);
        let [least, greatest] = pauses(&contention, &key, missed(0));
        assert!(least >= LONGEST_PART && greatest > least, "32 turns");
        let random = LONGEST_ROUND_TRIP.mul_f64(RANDOM_ROUND_TRIPS);
        assert!(greatest <= LONGEST_PART + random, "{greatest:?}");
        let (contention, key) = with_rivals(2);
        let split = WaitSoFar {
            split_votes: u32::MAX,
            ..missed(u32::MAX)
        };
        let in_round_trips = LONGEST_PART.div_duration_f64(ROUND_TRIP);
        assert!(span(pauses(&contention, &key, split), 0.0, in_round_trips));
        become_slow(&contention, &key);
        let [least, _] = pauses(&contention, &key, missed(0));
        assert!((2 * LONGEST_ROUND_TRIP..=ms(225)).contains(&least));
    }

    #[test]
    fn rivals_are_the_holders_of_recent_turns() {
        let (contention, key) = with_rivals(3);
        let now = MonotonicTime::now();
        let record = |turn: Turn| {
            contention.record_turn(&key, turn, now);
        };
        let rivals = || contention.lock_record(&key).rivals(now);
        assert_eq!(rivals(), 3);
        record(turn(0));
        assert_eq!(rivals(), 3);
        // Many reads of one long turn do not change the rivals.
        let long = turn(1);
        (0..2 * RECENT_TURNS).for_each(|_| record(long.clone()));
        assert_eq!(rivals(), 3);
        // One rival with many turns is left.
        (0..RECENT_TURNS).for_each(|_| record(turn(1)));
        assert_eq!(rivals(), 1);
        (0..2 * RECENT_TURNS).for_each(|n| record(turn(n)));
        assert_eq!(rivals(), RECENT_TURNS);
    }

    #[test]
    fn rivals_that_have_gone_are_forgotten() {
        let (contention, key) = with_rivals(0);
        let (start, stays) = (MonotonicTime::now(), turn(1));
        contention.record_turn(&key, turn(0), start);
        contention.record_turn(&key, stays.clone(), start);
        let rivals = |now| contention.lock_record(&key).rivals(now);
        let later = start.after(RIVAL_FOR);
        assert_eq!(rivals(later.before(ms(1))), 2);
        assert!(!contention.record_turn(&key, stays, later));
        assert_eq!(rivals(later), 1, "its turn goes on");
        assert_eq!(rivals(later.after(RIVAL_FOR)), 0);
        let pause = contention.choose_pause(&key, missed(0), later.after(RIVAL_FOR));
        assert!(pause.time < ROUND_TRIP);
    }

    #[test]
    fn a_waiter_starves_after_many_turns() {
        let now = MonotonicTime::now();
        // Each rival has had one turn or ten.
        for (rivals, turns, limit) in [(0, 0, 8), (2, 20, 12), (3, 3, 32), (32, 32, 8 + 64 * 33)] {
            let (contention, key) = with_rivals(0);
            (0..turns).for_each(|n| assert!(contention.record_turn(&key, turn(n % rivals), now)));
            assert!(!contention.starves(&key, limit - 1, now), "{rivals}");
            assert!(contention.starves(&key, limit + 1, now), "{rivals}");
        }
    }
}

//! The health of a quorum's nodes, as a client knows it, and the thread that probes nodes and reads their clocks. No
//! lock depends on the health: requests go to all nodes.
//!
//! 1. If a node gives no vote to a request, the client records this. The thread probes the node 200 ms later, or at
//!    once after an error. A vote in between makes the probe unnecessary.
//! 2. A node is failing if this probe fails, too. So a reply that is a little late is no failure. Callers do not wait
//!    for probes.
//! 3. Only a probe that succeeds ends the failure, because a probe also writes (lua/probe.lua). A vote does not end it:
//!    a node that refuses writes still votes on keys that are taken.
//!
//! A node in quarantine abstains from probes.

use std::cell::Cell;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;

use crate::command::{Command, Outcome, Reply};
use crate::quorum::Member;
use crate::quorum::clocks;
use crate::quorum::clocks::Reading;
use crate::report::error::{Error, ErrorKind};
use crate::report::node_state::{NodeClock, NodeHealth};
use crate::store::completion::Submitted;
use crate::store::{Report, Reports};
use crate::util::backoff::Backoff;
use crate::util::clock::{Clock, MonotonicTime};
use crate::util::mailbox::{Mailbox, Step};

/// The least time for which a probe waits for its reply.
pub const PROBE_LIMIT: Duration = Duration::from_millis(500);
/// A probe of a distant node waits for this many round trips, between [`PROBE_LIMIT`] and [`LONGEST_PROBE`]: earlier
/// requests of several pipelines may delay its reply.
const PROBE_ROUND_TRIPS: u32 = 4;
const LONGEST_PROBE: Duration = Duration::from_secs(2);
/// A node that the client has never reached is not failing until more probes than this have had no reply.
const MOST_EXCUSES: u32 = 3;
/// A waiting probe checks this often whether the client ends.
const PROBE_STEP: Duration = Duration::from_millis(50);
/// The time from a request without a reply to the probe. A vote in between makes the probe unnecessary.
const SUSPECTED_FOR: Duration = Duration::from_millis(200);
/// The pauses between the probes of a failing node double, from the first to the longest.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_millis(400);
/// The longest time between a reply that the node is in quarantine and the next probe.
const QUARANTINE_PAUSE: Duration = Duration::from_secs(1);

/// While requests are sent, the time between two readings of a node's clock.
const READ_EVERY: Duration = Duration::from_secs(10);

/// The health of one node.
pub struct Health(Mutex<Known>);

struct Known {
    found: Found,
    /// See [`take_excuse`](Self::take_excuse).
    excuses: u32,
    /// How long the last probe with a reply took.
    round_trip: Duration,
    /// When the next probe is due, by the machine's clock.
    probe_at: Option<MonotonicTime>,
    /// The pause after the next failed probe.
    backoff: Backoff,
    /// The reading of the last probe.
    reading: Option<Reading>,
    /// The comparison of that reading with the other nodes' clocks.
    clock: Option<NodeClock>,
    /// Whether the last comparison found that the clock breaks the bound.
    breaks_bound: bool,
    /// The first vote after this time of the client's clock requests a reading.
    read_at: Option<MonotonicTime>,
    /// Whether the next probe has to read the clock.
    is_reading_due: bool,
}

enum Found {
    Unknown,
    Up,
    Failing {
        since: MonotonicTime,
        error: Error,
    },
    /// `until` is a time of the client's clock.
    Quarantined {
        until: MonotonicTime,
    },
}

/// The state of a node, as the outcomes of its requests show it.
enum Sign {
    Votes,
    Abstains(Duration),
    Fails(Error),
}

impl Sign {
    /// `None` if none of the requests has a reply.
    fn of(outcomes: &[Option<Outcome>]) -> Option<Self> {
        let mut failure = None;
        for outcome in outcomes.iter().flatten() {
            match outcome {
                Ok(Reply::Abstained { for_another }) => return Some(Self::Abstains(*for_another)),
                Ok(_) => return Some(Self::Votes),
                Err(error) => failure = Some(error),
            }
        }
        failure.cloned().map(Self::Fails)
    }
}

/// The task of a caller that has recorded an outcome. [`Prober::follow_up`] does it.
#[derive(Debug, PartialEq, Eq)]
pub enum FollowUp {
    Nothing,
    /// The node has to be probed.
    ToProbe,
    /// The node's health has changed, and has to be reported.
    Changed,
}

impl Default for Health {
    fn default() -> Self {
        Self(Mutex::new(Known {
            found: Found::Unknown,
            excuses: MOST_EXCUSES,
            round_trip: Duration::ZERO,
            probe_at: None,
            backoff: Backoff::new(FIRST_PAUSE, LONGEST_PAUSE),
            reading: None,
            clock: None,
            breaks_bound: false,
            read_at: None,
            is_reading_due: false,
        }))
    }
}

impl Health {
    /// Records the outcomes of requests; `None` stands for a request without a reply. `need_votes`: a node in
    /// quarantine refuses these requests. A vote does not end a failure, since a node that refuses writes still votes
    /// on keys that are taken. A reply that the node is in quarantine ends the failure.
    pub fn record(
        &self,
        outcomes: &[Option<Outcome>],
        need_votes: bool,
        clock: &Clock,
    ) -> FollowUp {
        let sign = Sign::of(outcomes);
        let mut known = self.0.lock();
        match sign {
            Some(Sign::Votes) if !need_votes || known.is_failing() => FollowUp::Nothing,
            Some(Sign::Votes) => {
                let noted = known.record_vote();
                let is_read =
                    noted == FollowUp::Nothing && known.request_reading_if_old(clock.now());
                if is_read { FollowUp::ToProbe } else { noted }
            }
            Some(Sign::Abstains(left)) => known.record_abstention(left, clock),
            failure => known.schedule_probe(match failure {
                Some(_) => Duration::ZERO,
                None => SUSPECTED_FOR,
            }),
        }
    }

    /// Records the outcome of a probe, and its reading of the clock.
    fn record_probe(
        &self,
        outcome: Option<Outcome>,
        reading: Option<Reading>,
        address: &str,
        clock: &Clock,
    ) -> FollowUp {
        let sign = Sign::of(std::slice::from_ref(&outcome));
        let mut known = self.0.lock();
        known.reading = reading;
        if let Some(reading) = reading {
            known.round_trip = reading.round_trip();
            known.read_at = Some(clock.now().after(READ_EVERY));
            // A request may have asked for another reading since the probe was sent.
            known.is_reading_due = false;
        }
        match sign {
            Some(Sign::Votes) => known.record_vote(),
            Some(Sign::Abstains(left)) => known.record_abstention(left, clock),
            Some(Sign::Fails(error)) => known.record_failure(error),
            None if known.take_excuse() => {
                known.probe_at = Some(MonotonicTime::now());
                FollowUp::ToProbe
            }
            None => {
                let message = format!("{address} did not reply to a probe");
                known.record_failure(Error::new(ErrorKind::Unavailable, message))
            }
        }
    }

    /// Records how the node's clock compares with the others.
    fn record_clock(&self, clock: Option<NodeClock>) -> FollowUp {
        let mut known = self.0.lock();
        known.clock = clock;
        // Without a comparison, the clock may still be wrong.
        let Some(clock) = clock else {
            return FollowUp::Nothing;
        };
        let breaks_bound = !clock.is_within_bound;
        match std::mem::replace(&mut known.breaks_bound, breaks_bound) == breaks_bound {
            true => FollowUp::Nothing,
            false => FollowUp::Changed,
        }
    }

    /// Requests a probe if the health of the node is unknown, or if the last reading of its clock is older than
    /// [`READ_EVERY`].
    pub fn probe_if_outdated(&self, clock: &Clock) -> FollowUp {
        let mut known = self.0.lock();
        if matches!(known.found, Found::Unknown) {
            return known.schedule_probe(Duration::ZERO);
        }
        match matches!(known.found, Found::Up) && known.request_reading_if_old(clock.now()) {
            true => FollowUp::ToProbe,
            false => FollowUp::Nothing,
        }
    }

    /// How long a probe waits for its reply.
    fn probe_limit(&self) -> Duration {
        let round_trips = PROBE_ROUND_TRIPS * self.0.lock().round_trip;
        round_trips.clamp(PROBE_LIMIT, LONGEST_PROBE)
    }

    pub fn probe_at(&self) -> Option<MonotonicTime> {
        self.0.lock().probe_at
    }

    /// Whether a probe of the node, or a reading of its clock, is due at `now`. Clears the request for a reading. A
    /// probe stays due until its outcome is recorded.
    fn take_due(&self, now: MonotonicTime) -> bool {
        let mut known = self.0.lock();
        let is_reading_due = std::mem::take(&mut known.is_reading_due);
        is_reading_due || known.probe_at.is_some_and(|at| at <= now)
    }

    pub fn clock(&self) -> Option<NodeClock> {
        self.0.lock().clock
    }

    pub fn is_failing(&self) -> bool {
        self.0.lock().is_failing()
    }

    pub fn state(&self, clock: &Clock) -> NodeHealth {
        match &self.0.lock().found {
            Found::Unknown => NodeHealth::Unknown,
            Found::Up => NodeHealth::Up,
            Found::Failing { since, error } => NodeHealth::Failing {
                since: MonotonicTime::now().since(*since),
                error: error.clone(),
            },
            Found::Quarantined { until } => NodeHealth::Quarantined {
                remaining: until.since(clock.now()),
            },
        }
    }
}

impl Known {
    fn is_failing(&self) -> bool {
        matches!(self.found, Found::Failing { .. })
    }

    /// Whether the client repeats a probe without a reply before the node counts as failing. If the client has not
    /// reached the node yet, the probe also waits for its connection and login.
    fn take_excuse(&mut self) -> bool {
        let is_excused = matches!(self.found, Found::Unknown) && self.excuses > 0;
        self.excuses = self.excuses.saturating_sub(1);
        is_excused
    }

    /// Requests a reading of the node's clock at the first vote, and then once in each [`READ_EVERY`]. Returns whether
    /// it did.
    fn request_reading_if_old(&mut self, now: MonotonicTime) -> bool {
        let is_due = self.read_at.is_none_or(|at| at <= now);
        if is_due {
            self.read_at = Some(now.after(READ_EVERY));
            self.is_reading_due = true;
        }
        is_due
    }

    fn record_vote(&mut self) -> FollowUp {
        self.probe_at = None;
        self.backoff.reset();
        let before = std::mem::replace(&mut self.found, Found::Up);
        match before {
            // The first vote of a node is not reported.
            Found::Unknown | Found::Up => FollowUp::Nothing,
            _ => FollowUp::Changed,
        }
    }

    fn record_abstention(&mut self, left: Duration, clock: &Clock) -> FollowUp {
        self.backoff.reset();
        let pause = left.min(QUARANTINE_PAUSE).max(FIRST_PAUSE);
        self.probe_at = Some(MonotonicTime::now().after(pause));
        let until = clock.now().after(left);
        let before = std::mem::replace(&mut self.found, Found::Quarantined { until });
        match before {
            Found::Quarantined { .. } => FollowUp::ToProbe,
            _ => FollowUp::Changed,
        }
    }

    fn record_failure(&mut self, error: Error) -> FollowUp {
        let now = MonotonicTime::now();
        self.probe_at = Some(now.after(self.backoff.next()));
        let since = match &self.found {
            Found::Failing { since, .. } => Some(*since),
            _ => None,
        };
        self.found = Found::Failing {
            since: since.unwrap_or(now),
            error,
        };
        match since {
            Some(_) => FollowUp::ToProbe,
            None => FollowUp::Changed,
        }
    }

    /// Schedules a probe of the node after `pause`, unless one is due already.
    fn schedule_probe(&mut self, pause: Duration) -> FollowUp {
        if self.probe_at.is_some() {
            return FollowUp::Nothing;
        }
        self.probe_at = Some(MonotonicTime::now().after(pause));
        FollowUp::ToProbe
    }
}

/// Probes the nodes of a quorum, on one thread.
pub struct Prober {
    /// How far a node's clock may differ from the median of all.
    allowed: Duration,
    /// Whether a node may have become due.
    requested: Mailbox<bool>,
    reports: Reports,
}

impl Prober {
    pub fn new(allowed: Duration, reports: Reports) -> Self {
        Self {
            allowed,
            requested: Mailbox::default(),
            reports,
        }
    }

    /// Reports a change of `member`, and wakes the prober.
    pub fn follow_up(&self, noted: FollowUp, member: &Member, clock: &Clock) {
        if noted == FollowUp::Nothing {
            return;
        }
        if noted == FollowUp::Changed {
            let state = member.state(clock);
            self.reports.send(Report::NodeChanged(state));
        }
        self.requested
            .post(|requested| !std::mem::replace(requested, true));
    }

    pub fn stop(&self) {
        self.requested.stop(|_| ());
    }

    /// Probes the nodes that are due, until `stop` is called or all nodes are dropped.
    pub fn run(&self, members: &[Weak<Member>], probe: &Command, clock: &Clock) {
        let due_at = |member: &Weak<Member>| member.upgrade()?.health.probe_at();
        while self.wait(members.iter().filter_map(due_at).min()).is_some() {
            let now = MonotonicTime::now();
            let is_due = |member: &Weak<Member>| {
                let member = member.upgrade()?;
                member.health.take_due(now).then_some(member)
            };
            let due: Vec<_> = members.iter().filter_map(is_due).collect();
            if due.is_empty() {
                continue;
            }
            let sent = clock.now();
            let (submitted, completions) = Submitted::new(due.len());
            for (member, completion) in due.iter().zip(completions) {
                member.node.submit(vec![(probe.clone(), completion)]);
            }
            let limits = due.iter().map(|member| member.health.probe_limit());
            let limit = limits.max().unwrap_or(PROBE_LIMIT);
            let deadline = MonotonicTime::now().after(limit);
            let seen: Vec<Cell<Option<MonotonicTime>>> = vec![Cell::default(); due.len()];
            let have_come = |outcomes: &[Option<Outcome>]| {
                for (seen, _) in seen.iter().zip(outcomes).filter(|(_, one)| one.is_some()) {
                    seen.set(seen.get().or_else(|| Some(clock.now())));
                }
                outcomes.iter().all(Option::is_some)
            };
            while !self.requested.is_stopped() && MonotonicTime::now() < deadline {
                let soon = MonotonicTime::now().after(PROBE_STEP).min(deadline);
                if submitted.wait(soon, have_come) {
                    break;
                }
            }
            let outcomes = submitted.leave();
            if self.requested.is_stopped() {
                return;
            }
            for ((member, outcome), seen) in due.iter().zip(outcomes).zip(seen) {
                let reading = match (&outcome, seen.get()) {
                    (Some(Ok(Reply::Clock { micros })), Some(seen)) => {
                        member.node.record_micros(*micros, sent, seen);
                        Some(Reading::new(*micros, sent, seen))
                    }
                    _ => None,
                };
                let outcome = outcome.map(|one| member.node.naming_the_server(one));
                let address = &member.address;
                let noted = member.health.record_probe(outcome, reading, address, clock);
                self.follow_up(noted, member, clock);
            }
            self.compare_clocks(members, clock);
        }
    }

    /// Compares the clocks of the nodes, and reports them.
    fn compare_clocks(&self, members: &[Weak<Member>], clock: &Clock) {
        let members: Vec<Arc<Member>> = members.iter().filter_map(Weak::upgrade).collect();
        let readings = members.iter().map(|member| member.health.0.lock().reading);
        let readings: Vec<Option<Reading>> = readings.collect();
        let compared = clocks::compare(&readings, self.allowed);
        for (member, compared) in members.iter().zip(compared) {
            let noted = member.health.record_clock(compared);
            self.follow_up(noted, member, clock);
            if compared.is_some() {
                let state = member.state(clock);
                self.reports.send(Report::NodeClockRead(state));
            }
        }
    }

    /// Waits until `due`, or until a node may have become due. Returns `None` after `stop`.
    fn wait(&self, due: Option<MonotonicTime>) -> Option<()> {
        self.requested.wait(|requested| {
            let is_requested = std::mem::take(requested);
            match is_requested || due.is_some_and(|due| due <= MonotonicTime::now()) {
                true => Step::Return(()),
                false => Step::Sleep(due),
            }
        })
    }
}

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests {
    use super::*;

    fn voted() -> Option<Outcome> {
        Some(Ok(Reply::Missing))
    }

    /// The health of a node whose clock was read lately.
    fn health() -> (Health, Clock) {
        let (health, clock) = (Health::default(), Clock::default());
        assert!(health.0.lock().request_reading_if_old(clock.now()));
        assert!(health.take_due(MonotonicTime::now()));
        (health, clock)
    }

    fn failed() -> Option<Outcome> {
        Some(Err(Error::new(ErrorKind::Unavailable, "closed")))
    }

    fn abstained(for_another: Duration) -> Option<Outcome> {
        Some(Ok(Reply::Abstained { for_another }))
    }

    fn pause(health: &Health) -> Duration {
        let at = health.probe_at().expect("a probe is due");
        at.since(MonotonicTime::now())
    }

    /// A node in quarantine carries out releases and reads, too.
    #[test]
    fn a_reply_that_is_no_vote_ends_nothing() {
        let (health, clock) = health();
        let abstained = Reply::Abstained {
            for_another: Duration::from_secs(60),
        };
        let noted = health.record(&[Some(Ok(abstained))], true, &clock);
        assert_eq!(noted, FollowUp::Changed);
        let is_quarantined = || matches!(health.state(&clock), NodeHealth::Quarantined { .. });
        assert_eq!(health.record(&[voted()], false, &clock), FollowUp::Nothing);
        assert!(is_quarantined() && health.probe_at().is_some());
        assert_eq!(health.record(&[voted()], true, &clock), FollowUp::Changed);
        assert!(!is_quarantined());
    }

    #[test]
    fn a_vote_ends_a_suspicion() {
        let (health, clock) = health();
        assert_eq!(health.record(&[None], true, &clock), FollowUp::ToProbe);
        assert!(pause(&health) > SUSPECTED_FOR / 2);
        // The probe is due already.
        assert_eq!(health.record(&[failed()], true, &clock), FollowUp::Nothing);
        assert!(!health.is_failing(), "no probe has failed");
        assert_eq!(
            health.record(&[None, voted()], true, &clock),
            FollowUp::Nothing
        );
        assert_eq!(health.probe_at(), None);
        assert!(matches!(health.state(&clock), NodeHealth::Up));
    }

    #[test]
    fn a_vote_ends_no_failure() {
        let (health, clock) = health();
        let probe = |outcome| health.record_probe(outcome, None, "a:1", &clock);
        assert_eq!(probe(failed()), FollowUp::Changed);
        assert_eq!(health.record(&[voted()], true, &clock), FollowUp::Nothing);
        assert!(health.is_failing() && health.probe_at().is_some());
        assert_eq!(probe(voted()), FollowUp::Changed);
        assert!(!health.is_failing());
    }

    #[test]
    fn the_first_probes_of_a_node_are_repeated() {
        let (health, clock) = health();
        let probe = |outcome| health.record_probe(outcome, None, "a:1", &clock);
        for _ in 0..MOST_EXCUSES {
            assert_eq!(probe(None), FollowUp::ToProbe);
            assert!(!health.is_failing());
            assert_eq!(pause(&health), Duration::ZERO);
        }
        assert_eq!(probe(None), FollowUp::Changed);
        assert!(health.is_failing());
        // The client has reached the node before, so a probe without a reply is a failure.
        assert_eq!(probe(voted()), FollowUp::Changed);
        assert_eq!(probe(None), FollowUp::Changed);
    }

    #[test]
    fn a_probe_of_a_distant_node_waits_longer() {
        let (health, clock) = health();
        let limit_after = |round_trip: u64| {
            let (sent, round_trip) = (clock.now(), Duration::from_millis(round_trip));
            let reading = Reading::new(5, sent, sent.after(round_trip));
            health.record_probe(voted(), Some(reading), "a:1", &clock);
            health.probe_limit().as_millis()
        };
        assert_eq!(health.probe_limit(), PROBE_LIMIT);
        assert_eq!([1, 200, 240, 900].map(limit_after), [500, 800, 960, 2_000]);
        // A probe without a reply does not measure the distance.
        health.record_probe(None, None, "a:1", &clock);
        assert_eq!(health.probe_limit(), LONGEST_PROBE);
    }

    #[test]
    fn a_node_with_an_error_is_probed_at_once() {
        let (health, clock) = health();
        assert_eq!(
            health.record(&[failed(), None], true, &clock),
            FollowUp::ToProbe
        );
        assert_eq!(pause(&health), Duration::ZERO);
    }

    #[test]
    fn pauses_between_failed_probes_grow_to_the_longest() {
        let (health, clock) = health();
        health.record_probe(voted(), None, "a:1", &clock);
        for expected in [100, 200, 400, 400] {
            health.record_probe(None, None, "a:1", &clock);
            let (pause, expected) = (pause(&health), Duration::from_millis(expected));
            assert!(pause <= expected && pause > expected / 2, "{pause:?}");
        }
        health.record_probe(voted(), None, "a:1", &clock);
        health.record_probe(None, None, "a:1", &clock);
        assert!(pause(&health) <= FIRST_PAUSE, "it begins again");
    }

    #[test]
    fn each_change_is_reported_once() {
        let (health, clock) = health();
        let probe = |outcome| health.record_probe(outcome, None, "a:1", &clock);
        assert_eq!(probe(voted()), FollowUp::Nothing, "it was not missed");
        assert_eq!(probe(failed()), FollowUp::Changed);
        assert!(health.is_failing());
        assert_eq!(probe(None), FollowUp::ToProbe);
        let left = Duration::from_secs(9);
        assert_eq!(probe(abstained(left)), FollowUp::Changed);
        assert_eq!(probe(abstained(left)), FollowUp::ToProbe);
        assert!(pause(&health) <= QUARANTINE_PAUSE);
        assert_eq!(health.record(&[voted()], true, &clock), FollowUp::Changed);
        assert_eq!(health.record(&[voted()], true, &clock), FollowUp::Nothing);
    }

    #[test]
    fn a_failure_counts_from_the_first_failed_probe() {
        let (health, clock) = health();
        let fails = |outcome| {
            health.record_probe(outcome, None, "a:1", &clock);
            match &health.0.lock().found {
                Found::Failing { since, error } => (*since, error.to_string()),
                _ => panic!("it is failing"),
            }
        };
        health.record_probe(voted(), None, "a:1", &clock);
        let ((first, _), (second, error)) = (fails(None), fails(failed()));
        assert_eq!(second, first);
        assert!(error.contains("closed"), "{error}");
    }

    #[test]
    fn a_clock_is_read_at_once_and_every_ten_seconds() {
        let (health, clock) = (Health::default(), Clock::movable());
        let noted = || health.record(&[voted()], true, &clock);
        let is_due = || health.take_due(MonotonicTime::now());
        assert_eq!((noted(), is_due()), (FollowUp::ToProbe, true));
        assert_eq!((noted(), is_due()), (FollowUp::Nothing, false));
        clock.advance(READ_EVERY);
        assert_eq!((noted(), is_due()), (FollowUp::ToProbe, true));
        assert_eq!(health.probe_if_outdated(&clock), FollowUp::Nothing);
        clock.advance(READ_EVERY);
        assert_eq!(health.probe_if_outdated(&clock), FollowUp::ToProbe);
        assert!(is_due());
    }

    #[test]
    fn each_probe_reads_the_clock() {
        let (health, clock) = (Health::default(), Clock::movable());
        // The health of the node is unknown, so a probe is requested.
        assert_eq!(health.probe_if_outdated(&clock), FollowUp::ToProbe);
        assert!(health.take_due(MonotonicTime::now()));
        assert_eq!(health.record(&[voted()], true, &clock), FollowUp::ToProbe);
        let reading = Some(Reading::new(5, clock.now(), clock.now()));
        health.record_probe(voted(), reading, "a:1", &clock);
        assert!(!health.take_due(MonotonicTime::now()));
        assert_eq!(health.record(&[voted()], true, &clock), FollowUp::Nothing);
        assert_eq!(health.probe_if_outdated(&clock), FollowUp::Nothing);
    }

    #[test]
    fn a_clock_beyond_the_bound_is_a_change() {
        let (health, _) = health();
        let clock = |is_within_bound| {
            let (offset, error) = (7, Duration::ZERO);
            Some(NodeClock {
                offset,
                error,
                is_within_bound,
            })
        };
        for (clock, noted) in [
            (clock(true), FollowUp::Nothing),
            (clock(false), FollowUp::Changed),
            (clock(false), FollowUp::Nothing),
            // A reading was lost.
            (None, FollowUp::Nothing),
            (clock(false), FollowUp::Nothing),
            (clock(true), FollowUp::Changed),
            (None, FollowUp::Nothing),
        ] {
            assert_eq!(health.record_clock(clock), noted);
            assert_eq!(health.clock(), clock);
        }
    }

    #[test]
    fn a_node_without_a_vote_has_no_reading() {
        let (health, clock) = health();
        let now = clock.now();
        let reading = || Some(Reading::new(5, now, now));
        let has_reading = || health.0.lock().reading.is_some();
        health.record_probe(
            Some(Ok(Reply::Clock { micros: 5 })),
            reading(),
            "a:1",
            &clock,
        );
        assert!(has_reading());
        health.record_probe(failed(), None, "a:1", &clock);
        assert!(!has_reading());
    }
}

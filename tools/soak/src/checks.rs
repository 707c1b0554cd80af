//! The checks of a round's records. Each finding names the records that contradict each other.
//!
//! A guard counts as held from its grant until the end of the validity that it last reported, or until it reported its
//! loss, or was released. All times are on one clock, so the checks hold on a slow machine, too:
//!
//! - No two holds of one key overlap. One exception (`Excuse`): Redis lost the first grant, after the request of the
//!   first hold and before the grant of the second.
//! - A lost grant is held no longer than its ttl after Redis lost it.
//! - No loss is reported before its time, unless Redis did lose the grant.
//! - A lock with a limit (a fixed ttl, `max_hold`) is not held beyond that.
//! - A request that comes after a valid hold gets a greater token, without exception. A hold that is seen later also
//!   has a greater token, unless a grant was lost meanwhile. The same holds for hand-offs and adoptions.
//! - A fenced value accepts no write under a smaller token than that of a write that had ended before, unless Redis
//!   lost the earlier write.
//! - On a Cluster and under sentinels, no key is seen for longer than its ttl after its holder has ended.
//! - These faults excuse nothing: a planned switch-over or fail-over (the replica catches up while writes are paused),
//!   a move of a slot, guards dropped in an outage, and contention on one key.
//! - All calls end. They end by their deadlines, plus the time that the library documents, `SLACK`, and the time for
//!   which their process was stopped.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::faults::Fault;
use crate::history::{Call, Excuse, History, Hold, Stops, Write};
use crate::messages::{COMMAND_TIMEOUT, CONNECT_TIMEOUT};
use crate::records::{Doing, Outcome};
use crate::value::GrantId;

/// The delay to allow for on a busy machine.
const SLACK: Duration = Duration::from_secs(10);
/// The longest wait, with the number of competitors and the faults of a round.
const STARVED: Duration = Duration::from_secs(60);
/// For how long a master's writes may be missing on its replica, on a busy machine.
const REPLICATION: Duration = Duration::from_secs(2);
/// How long after its ttl a key may still be seen, on a busy machine.
pub const GONE: Duration = Duration::from_secs(2);
/// The reasons of losses that only Redis can cause.
const CAUSED_BY_REDIS: [&str; 3] = ["Deleted", "TakenOver", "ForceUnlocked"];

/// A broken promise, and the time at which it shows.
#[derive(Debug)]
pub struct Violation {
    pub text: String,
    pub key: Option<usize>,
    pub from: u64,
    pub to: u64,
}

/// Contradictions that a lost grant or write explains.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Explained {
    /// Pairs of holders of one lock at the same time: because of `force_unlock`, and because Redis lost a grant.
    pub forced: u64,
    pub lost: u64,
    /// The longest time with two holders.
    pub longest: Duration,
    /// Writes of fenced values under smaller tokens than that of a lost write.
    pub writes: u64,
}

pub fn all(history: &History, faults: &[Fault]) -> (Vec<Violation>, Explained) {
    let (mut found, mut explained) = (Vec::new(), Explained::default());
    let mut keys: BTreeMap<usize, Vec<&Hold>> = BTreeMap::new();
    for hold in &history.holds {
        keys.entry(hold.key).or_default().push(hold);
    }
    for holds in keys.values() {
        exclusion(holds, &history.excuses, &mut found, &mut explained);
        order_of_asking(holds, &mut found);
        order_of_holding(holds, &history.excuses, &mut found);
    }
    for hold in &history.holds {
        limits(hold, &mut found);
        losses(hold, &history.excuses, &mut found);
    }
    for call in &history.calls {
        call_ends(call, &Stops(faults), &mut found);
    }
    writes(history, &mut found, &mut explained);
    for (at, who, text) in &history.wrong {
        found.push(Violation {
            text: format!("{who:?} saw that {text}"),
            key: None,
            from: *at,
            to: *at,
        });
    }
    (found, explained)
}

fn of_holds(text: &str, one: &Hold, other: &Hold) -> Violation {
    Violation {
        text: format!("{text}:\n  {one:?}\n  {other:?}"),
        key: Some(one.key),
        from: one.asked.min(other.asked),
        to: one.end().max(other.end()),
    }
}

fn of_hold(text: &str, hold: &Hold) -> Violation {
    Violation {
        text: format!("{text}:\n  {hold:?}"),
        key: Some(hold.key),
        from: hold.asked,
        to: hold.end(),
    }
}

/// Checks that no two of `holds` overlap. They are of one key, sorted by the time of their grants.
fn exclusion(
    holds: &[&Hold],
    excuses: &[Excuse],
    found: &mut Vec<Violation>,
    explained: &mut Explained,
) {
    let mut held: Vec<&Hold> = Vec::new();
    for &hold in holds.iter().filter(|hold| hold.seen.is_some()) {
        held.retain(|earlier| earlier.end() > hold.granted);
        for &other in &held {
            if hold.end() <= hold.granted {
                continue;
            }
            let (first, second) = if other.token <= hold.token {
                (other, hold)
            } else {
                (hold, other)
            };
            let is_excused = |excuse: &Excuse| {
                excuse.may_be_for(first)
                    && excuse.to >= first.asked
                    && excuse.from <= second.granted
                    && first.end() <= excuse.to + first.ttl
            };
            let excused = excuses.iter().filter(|excuse| is_excused(excuse));
            if let Some(is_forced) = excused.map(|excuse| excuse.is_forced).max() {
                let both = hold.end().min(other.end()) - hold.granted;
                match is_forced {
                    true => explained.forced += 1,
                    false => explained.lost += 1,
                }
                explained.longest = explained.longest.max(Duration::from_nanos(both));
            } else {
                found.push(of_holds("two holders at the same time", first, second));
            }
        }
        held.push(hold);
    }
}

fn order_of_asking(holds: &[&Hold], found: &mut Vec<Violation>) {
    let mut seen: Vec<(u64, &Hold)> = holds
        .iter()
        .filter_map(|hold| Some((hold.seen?, *hold)))
        .collect();
    seen.sort_by_key(|(at, _)| *at);
    let mut asked = holds.to_vec();
    asked.sort_by_key(|hold| hold.asked);
    let mut earlier = seen.into_iter().peekable();
    let mut greatest: Option<&Hold> = None;
    for hold in asked {
        while let Some((_, before)) = earlier.next_if(|(at, _)| *at < hold.asked) {
            if greatest.is_none_or(|greatest| greatest.token < before.token) {
                greatest = Some(before);
            }
        }
        if let Some(before) = greatest.filter(|before| before.token >= hold.token) {
            found.push(of_holds(
                "a later request got a smaller token",
                before,
                hold,
            ));
        }
    }
}

fn order_of_holding(holds: &[&Hold], excuses: &[Excuse], found: &mut Vec<Violation>) {
    let mut seen: Vec<(u64, &Hold)> = holds
        .iter()
        .filter_map(|hold| Some((hold.seen?, *hold)))
        .collect();
    seen.sort_by_key(|(at, _)| *at);
    for pair in seen.windows(2) {
        let [(_, before), (at, after)] = pair else {
            continue;
        };
        if before.token < after.token {
            continue;
        }
        // The holder with the smaller token had lost its grant, and did not know of the loss yet.
        let is_excused = |excuse: &Excuse| {
            excuse.may_be_for(after) && excuse.to >= after.asked && excuse.from <= *at
        };
        if !excuses.iter().any(is_excused) {
            found.push(of_holds("a later hold had a smaller token", before, after));
        }
    }
}

fn writes(history: &History, found: &mut Vec<Violation>, explained: &mut Explained) {
    let mut keys: BTreeMap<usize, Vec<&Write>> = BTreeMap::new();
    for write in &history.writes {
        keys.entry(write.key).or_default().push(write);
    }
    for (key, mut writes) in keys {
        let mut ended = writes.clone();
        ended.sort_by_key(|write| write.to);
        writes.sort_by_key(|write| write.from);
        let mut ended = ended.into_iter().peekable();
        let mut greatest: Option<&Write> = None;
        for write in writes {
            while let Some(before) = ended.next_if(|before| before.to < write.from) {
                if greatest.is_none_or(|greatest| greatest.token <= before.token) {
                    greatest = Some(before);
                }
            }
            let Some(before) = greatest.filter(|before| before.token > write.token) else {
                continue;
            };
            let is_excused = |excuse: &Excuse| {
                let loses_values = !excuse.is_forced && excuse.grant.is_none();
                loses_values && excuse.is_for_key(key) && loses(excuse, before, write)
            };
            if history.excuses.iter().any(is_excused) {
                explained.writes += 1;
                // From now on the value has the smaller token.
                greatest = Some(write);
                continue;
            }
            found.push(Violation {
                text: format!("a stale write was accepted:\n  {before:?}\n  {write:?}"),
                key: Some(key),
                from: before.from,
                to: write.to,
            });
        }
    }
}

/// Whether the excuse explains that `before` was lost when `after` was accepted. A server without its data has lost all
/// writes, a replica that takes over the last ones only.
fn loses(excuse: &Excuse, before: &Write, after: &Write) -> bool {
    let is_lost = excuse.key.is_none() || before.to + REPLICATION.as_nanos() as u64 >= excuse.from;
    is_lost && excuse.to >= before.from && excuse.from <= after.to
}

/// A grant in a lock's key, as it was seen in Redis.
#[derive(Clone, Debug)]
pub struct Sighting {
    /// The lock, and its key in Redis.
    pub key: usize,
    pub name: String,
    pub grant: GrantId,
    pub first: u64,
    pub last: u64,
}

/// Finds the keys that were seen for longer than their ttl after their holders had ended. No ttl is longer than
/// `longest`.
pub fn keys_without_holders(
    sightings: &[Sighting],
    longest: Duration,
    history: &History,
    faults: &[Fault],
) -> Vec<Violation> {
    let stops = Stops(faults);
    let mut by_key: BTreeMap<usize, Vec<&Hold>> = BTreeMap::new();
    for hold in &history.holds {
        by_key.entry(hold.key).or_default().push(hold);
    }
    let nanos = |time: Duration| time.as_nanos() as u64;
    let mut found = Vec::new();
    for sighting in sightings {
        let of_key = by_key.get(&sighting.key).map_or(&[][..], Vec::as_slice);
        let holds = holds_of(sighting, of_key, &stops);
        let (ended, ttl) = match holds[..] {
            // No caller has got this grant: nothing renews it.
            [] => (sighting.first, nanos(longest)),
            _ => {
                let ended = holds.iter().map(|hold| ends(hold, &stops));
                let ttl = holds.iter().map(|hold| hold.ttl).max();
                (ended.max().unwrap_or_default(), ttl.unwrap_or_default())
            }
        };
        // The network, or a stopped server, may have held back the last renewal.
        let delays = faults.iter().filter(|fault| fault.delays_requests());
        let delays = delays.map(|fault| {
            fault
                .to
                .min(sighting.last)
                .saturating_sub(fault.from.max(ended))
        });
        let until = ended.saturating_add(ttl + nanos(GONE) + delays.sum::<u64>());
        if sighting.last > until {
            let late = Duration::from_nanos(sighting.last - until);
            found.push(Violation {
                text: format!(
                    "{} stays for {late:?} without a holder: {sighting:?}:\n  {holds:?}",
                    sighting.name
                ),
                key: Some(sighting.key),
                from: ended,
                to: sighting.last,
            });
        }
    }
    found
}

/// The holds of the grant that was seen. If none is known to be of it, those that may be of it: their lease ids are not
/// known, and they were held while the grant was seen. (A key has one grant at a time, so hardly any other hold can
/// have been valid then.)
fn holds_of<'a>(sighting: &Sighting, of_key: &[&'a Hold], stops: &Stops<'_>) -> Vec<&'a Hold> {
    let with = |wanted| {
        let holds = of_key.iter().copied();
        holds.filter(move |hold| sighting.grant.is_of(hold) == wanted)
    };
    let known: Vec<&Hold> = with(Some(true)).collect();
    if !known.is_empty() {
        return known;
    }
    let was_held =
        |hold: &&Hold| hold.granted <= sighting.last && ends(hold, stops) >= sighting.first;
    with(None).filter(was_held).collect()
}

/// When the hold had certainly ended, and was renewed no more.
fn ends(hold: &Hold, stops: &Stops<'_>) -> u64 {
    let reported = hold.reported.as_ref().map(|(at, _)| *at);
    let limit = hold.at_most.map(|most| hold.granted + most);
    let killed = stops.killed_at(hold.who);
    let ends = [hold.released, reported, limit, killed];
    ends.into_iter().flatten().min().unwrap_or(u64::MAX)
}

fn limits(hold: &Hold, found: &mut Vec<Violation>) {
    let limit = hold.at_most.map(|most| hold.granted + most);
    if limit.is_some_and(|limit| hold.until > limit) {
        found.push(of_hold("held beyond its limit", hold));
    }
}

fn losses(hold: &Hold, excuses: &[Excuse], found: &mut Vec<Violation>) {
    for excuse in excuses {
        // Without its data, Redis has lost the grants from before the fault.
        let lost_all = excuse.key.is_none() && hold.granted < excuse.from;
        if (lost_all || excuse.names(hold)) && hold.end() > excuse.to + hold.ttl {
            found.push(of_hold("held beyond its ttl after Redis lost it", hold));
        }
    }
    let Some((at, reason)) = &hold.reported else {
        return;
    };
    if !CAUSED_BY_REDIS.contains(&reason.as_str()) || *at >= hold.until {
        return;
    }
    let is_excused =
        |excuse: &Excuse| excuse.may_be_for(hold) && excuse.to >= hold.asked && excuse.from <= *at;
    if !excuses.iter().any(is_excused) {
        found.push(of_hold("a loss was reported without a cause", hold));
    }
}

/// How much longer a call took than its limit, without the time for which its process was stopped.
pub fn overrun(call: &Call, stops: &Stops<'_>) -> Option<Duration> {
    let (to, _) = call.returned.as_ref()?;
    let stopped = stops.within(call.who.process, call.from, *to);
    let took = (to - call.from).saturating_sub(stopped);
    Some(Duration::from_nanos(took.saturating_sub(call.allowed?)))
}

fn call_ends(call: &Call, stops: &Stops<'_>, found: &mut Vec<Violation>) {
    let mut add = |text: String, to: u64| {
        found.push(Violation {
            text: format!("{text}:\n  {call:?}"),
            key: call.key,
            from: call.from,
            to,
        });
    };
    let Some((to, outcome)) = &call.returned else {
        if !stops.was_killed(call.who) {
            add("a call never ended".to_owned(), call.from);
        }
        return;
    };
    let answers = match call.doing {
        // These calls may need two requests. `force_unlock` reads the lock and releases it. An extension, also that of
        // a transfer, may first wait for a renewal in flight.
        Doing::ForceUnlock | Doing::Extend | Doing::HandOver => 2,
        _ => 1,
    };
    let bound = answers * (COMMAND_TIMEOUT + CONNECT_TIMEOUT) + SLACK;
    if let Some(overrun) = overrun(call, stops).filter(|overrun| *overrun > bound) {
        add(format!("the deadline was overrun by {overrun:?}"), *to);
    }
    let stopped = stops.within(call.who.process, call.from, *to);
    let took = Duration::from_nanos((to - call.from).saturating_sub(stopped));
    if call.allowed.is_none() && took > STARVED {
        add(format!("waited for {took:?}"), *to);
    }
    if let Outcome::Failed(kind) = outcome
        && !may_fail(call.doing, kind)
    {
        add(format!("an unexplained error: {kind}"), *to);
    }
}

/// The errors that faults, contention and the ends of clients explain.
fn may_fail(doing: Doing, kind: &str) -> bool {
    match kind {
        "Unavailable" | "Timeout" => doing != Doing::Drop,
        "Shutdown" => true,
        "LeaseLost" => matches!(doing, Doing::Unlock | Doing::Extend | Doing::HandOver),
        "Cancelled" => doing == Doing::CancelledLock,
        "StaleToken" => doing == Doing::Write,
        "NotHeld" => doing == Doing::Adopt,
        _ => false,
    }
}

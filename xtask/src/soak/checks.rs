//! What must hold of a round, whatever was done to it. Each finding names what contradicts what.
//!
//! What can be claimed: a guard is believed in from its grant until the end that its last look gave, or
//! until it told of its loss, or was let go. All that is on one clock, so no machine is too slow for it:
//!
//! - No two beliefs in one key overlap. Except where Redis forgot the first grant (`Excuse`) between the
//!   asking for the first and the grant of the second.
//! - A forgotten grant is believed in no longer than its ttl after it was forgotten.
//! - Nobody is told before its time that Redis forgot a grant, unless it did.
//! - A lock with a limit (its own ttl, `max_hold`) is not believed in beyond that.
//! - A request after a grant was seen to be valid gets a greater token, without exception; and so does
//!   a holder that is seen later, unless a grant was forgotten meanwhile. A lock that is adopted keeps
//!   its token.
//! - Neither a switch-over, for which the replica catches up while writes are held up, nor guards dropped in
//!   an outage, nor a crowd on one key excuses anything.
//! - Calls end by their deadlines, plus what the library says and `SLACK`, less the time that their
//!   process stood still; and all do end.

use std::collections::BTreeMap;
use std::time::Duration;

use super::faults::Fault;
use super::history::{Call, Excuse, History, Hold, Stops};
use super::messages::{COMMAND_TIMEOUT, CONNECT_TIMEOUT};
use super::records::{Doing, Outcome};

/// How late anything may be on a busy machine.
const SLACK: Duration = Duration::from_secs(10);
/// Nobody waits for longer, with so many others and such faults as there are.
const STARVED: Duration = Duration::from_secs(60);
/// Reasons that only Redis can give.
const TOLD_BY_REDIS: [&str; 3] = ["Deleted", "TakenOver", "ForceUnlocked"];

/// A promise that was not kept, and when it shows.
#[derive(Debug)]
pub struct Violation {
    pub text: String,
    pub key: Option<usize>,
    pub from: u64,
    pub to: u64,
}

pub fn all(history: &History, faults: &[Fault]) -> Vec<Violation> {
    let mut found = Vec::new();
    let mut keys: BTreeMap<usize, Vec<&Hold>> = BTreeMap::new();
    for hold in &history.holds {
        keys.entry(hold.key).or_default().push(hold);
    }
    for holds in keys.values() {
        exclusion(holds, &history.excuses, &mut found);
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
    for (at, who, text) in &history.wrong {
        found.push(Violation {
            text: format!("{who:?} saw that {text}"),
            key: None,
            from: *at,
            to: *at,
        });
    }
    found
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

/// `holds` are of one key, by the time of their grants.
fn exclusion(holds: &[&Hold], excuses: &[Excuse], found: &mut Vec<Violation>) {
    let mut believed: Vec<&Hold> = Vec::new();
    for &hold in holds.iter().filter(|hold| hold.seen.is_some()) {
        believed.retain(|earlier| earlier.end() > hold.granted);
        for &other in &believed {
            if hold.end() <= hold.granted {
                continue;
            }
            let (first, second) = if other.token <= hold.token {
                (other, hold)
            } else {
                (hold, other)
            };
            let is_excused = |excuse: &Excuse| {
                excuse.is_for(first)
                    && excuse.to >= first.asked
                    && excuse.from <= second.granted
                    && first.end() <= excuse.to + first.ttl
            };
            if !excuses.iter().any(is_excused) {
                found.push(of_holds("two believed in one lock", first, second));
            }
        }
        believed.push(hold);
    }
}

/// Whether `after` may have this token after `before` had its.
fn rises(before: &Hold, after: &Hold) -> bool {
    before.token < after.token || after.adopted && before.token == after.token
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
        if let Some(before) = greatest.filter(|before| !rises(before, hold)) {
            found.push(of_holds("a token fell for who asked later", before, hold));
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
        if rises(before, after) {
            continue;
        }
        // The one with the smaller token was forgotten, and did not know it yet.
        let is_excused = |excuse: &Excuse| {
            excuse.is_for(after) && excuse.to >= after.asked && excuse.from <= *at
        };
        if !excuses.iter().any(is_excused) {
            found.push(of_holds("a token fell", before, after));
        }
    }
}

fn limits(hold: &Hold, found: &mut Vec<Violation>) {
    let limit = hold.at_most.map(|most| hold.granted + most);
    if limit.is_some_and(|limit| hold.until > limit) {
        found.push(of_hold("believed in beyond its limit", hold));
    }
}

fn losses(hold: &Hold, excuses: &[Excuse], found: &mut Vec<Violation>) {
    for excuse in excuses.iter().filter(|excuse| excuse.is_for(hold)) {
        // One that was granted later on was not forgotten, unless it is known to be the one.
        let was_forgotten = hold.granted < excuse.from || excuse.lease.is_some();
        let was_certain = excuse.lease.is_some() || excuse.key.is_none();
        if was_certain && was_forgotten && hold.end() > excuse.to + hold.ttl {
            found.push(of_hold("forgotten, and believed in beyond its ttl", hold));
        }
    }
    let Some((at, reason)) = &hold.told else {
        return;
    };
    if !TOLD_BY_REDIS.contains(&reason.as_str()) || *at >= hold.until {
        return;
    }
    let is_excused =
        |excuse: &Excuse| excuse.is_for(hold) && excuse.to >= hold.asked && excuse.from <= *at;
    if !excuses.iter().any(is_excused) {
        found.push(of_hold("told of a loss that was none", hold));
    }
}

/// How much longer a call took than it was to wait, standing still not counted.
pub fn overrun(call: &Call, stops: &Stops<'_>) -> Option<Duration> {
    let (to, _) = call.returned.as_ref()?;
    let stood = stops.within(call.who.process, call.from, *to);
    let took = (to - call.from).saturating_sub(stood);
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
        // To look, and to end it; to end a renewal under way, and to extend (as who hands over does).
        Doing::ForceUnlock | Doing::Extend | Doing::HandOver => 2,
        _ => 1,
    };
    let bound = answers * (COMMAND_TIMEOUT + CONNECT_TIMEOUT) + SLACK;
    if let Some(overrun) = overrun(call, stops).filter(|overrun| *overrun > bound) {
        add(format!("its deadline was overrun by {overrun:?}"), *to);
    }
    let stood = stops.within(call.who.process, call.from, *to);
    let took = Duration::from_nanos((to - call.from).saturating_sub(stood));
    if call.allowed.is_none() && took > STARVED {
        add(format!("waited for {took:?}"), *to);
    }
    if let Outcome::Failed(kind) = outcome
        && !may_fail(call.doing, kind)
    {
        add(format!("an error that nothing explains: {kind}"), *to);
    }
}

/// What faults, contention and the ends of clients explain.
fn may_fail(doing: Doing, kind: &str) -> bool {
    match kind {
        "Unavailable" | "Timeout" => doing != Doing::Drop,
        "Shutdown" => true,
        "LeaseLost" => matches!(doing, Doing::Unlock | Doing::Extend | Doing::HandOver),
        "Cancelled" => doing == Doing::CancelledLock,
        "NotHeld" => doing == Doing::Adopt,
        _ => false,
    }
}

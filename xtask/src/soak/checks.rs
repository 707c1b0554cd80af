//! The checks of a round's records. Each finding names the records that contradict each other.
//!
//! A guard counts as held from its grant until the end of the validity that it last reported, or until it reported its
//! loss, or was released. All times are on one clock, so the checks hold on a slow machine, too:
//!
//! - No two holds of one key overlap. The exception (`Excuse`): Redis lost the first grant, between the request of the
//!   first and the grant of the second.
//! - A lost grant is held no longer than its ttl after Redis lost it.
//! - No loss is reported before its time, unless Redis did lose the grant.
//! - A lock with a limit (a fixed ttl, `max_hold`) is not held beyond that.
//! - A request that comes after a valid hold gets a greater token, without exception. A hold that is seen later also
//!   has a greater token, unless a grant was lost meanwhile. An adopted lock keeps its token.
//! - Three faults excuse nothing: a switch-over (the replica catches up while writes are paused), guards dropped in an
//!   outage, and contention on one key.
//! - All calls end. They end by their deadlines, plus the time that the library documents, `SLACK`, and the time for
//!   which their process was stopped.

use std::collections::BTreeMap;
use std::time::Duration;

use super::faults::Fault;
use super::history::{Call, Excuse, History, Hold, Stops};
use super::messages::{COMMAND_TIMEOUT, CONNECT_TIMEOUT};
use super::records::{Doing, Outcome};

/// The delay to allow for on a busy machine.
const SLACK: Duration = Duration::from_secs(10);
/// The longest wait, with the number of competitors and the faults of a round.
const STARVED: Duration = Duration::from_secs(60);
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

/// Checks that no two of `holds` overlap. They are of one key, sorted by the time of their grants.
fn exclusion(holds: &[&Hold], excuses: &[Excuse], found: &mut Vec<Violation>) {
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
                excuse.is_for(first)
                    && excuse.to >= first.asked
                    && excuse.from <= second.granted
                    && first.end() <= excuse.to + first.ttl
            };
            if !excuses.iter().any(is_excused) {
                found.push(of_holds("two holders at the same time", first, second));
            }
        }
        held.push(hold);
    }
}

/// Whether `after` may have this token after `before` had its own.
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
        if rises(before, after) {
            continue;
        }
        // The holder with the smaller token had lost its grant, and did not know of the loss yet.
        let is_excused = |excuse: &Excuse| {
            excuse.is_for(after) && excuse.to >= after.asked && excuse.from <= *at
        };
        if !excuses.iter().any(is_excused) {
            found.push(of_holds("a later hold had a smaller token", before, after));
        }
    }
}

fn limits(hold: &Hold, found: &mut Vec<Violation>) {
    let limit = hold.at_most.map(|most| hold.granted + most);
    if limit.is_some_and(|limit| hold.until > limit) {
        found.push(of_hold("held beyond its limit", hold));
    }
}

fn losses(hold: &Hold, excuses: &[Excuse], found: &mut Vec<Violation>) {
    for excuse in excuses.iter().filter(|excuse| excuse.is_for(hold)) {
        // Only grants from before the fault were lost, unless the fault names the lost grant.
        let was_forgotten = hold.granted < excuse.from || excuse.lease.is_some();
        let was_certain = excuse.lease.is_some() || excuse.key.is_none();
        if was_certain && was_forgotten && hold.end() > excuse.to + hold.ttl {
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
        |excuse: &Excuse| excuse.is_for(hold) && excuse.to >= hold.asked && excuse.from <= *at;
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
        "NotHeld" => doing == Doing::Adopt,
        _ => false,
    }
}

//! The checks of a round's records. Each finding names the records that contradict each other.
//!
//! A guard counts as held from its grant until the end of the validity that it last reported, or until it reported its
//! loss, or was released. All times are on one clock, so the checks hold on a slow machine, too:
//!
//! - The holds of one key that overlap fit together: one holder alone, or readers, or permits up to their limit. There
//!   is one exception (`Excuse`): Redis lost one of the earlier grants, after it was requested and before the last of
//!   them was granted.
//! - Under a shortest hold (`min_hold`), each window of its length contains at most as many grants as the limit allows,
//!   with the same exception.
//! - After Redis lost a grant, its holder relies on it for at most one more ttl.
//! - A guard reports no loss before the end of its validity, unless Redis did lose the grant.
//! - A lock with a limit (a fixed ttl, `max_hold`) is not held beyond that.
//! - A request that comes after a valid hold gets a greater token. The only exception is a reader that joins a lease of
//!   its client after Redis has lost the lease. A hold that is seen later also has a greater token, unless a grant was
//!   lost meanwhile. The same holds for hand-offs and adoptions.
//! - A fenced value accepts no write under a smaller token than that of a write that had ended before, unless Redis
//!   lost the earlier write.
//! - The sum of the accounts stays zero, without exception: a transaction changes both. No two transfers read the same
//!   balances, unless Redis lost the earlier one.
//! - Work that shall run at most once does not run again, unless it failed, or Redis lost its record. Other work does
//!   not run after a call has found its record, unless Redis lost the record. The tokens of the records of a run never
//!   fall, with the same exception. Each record is of a run that began.
//! - The tokens of the leaders that an observer sees never fall, without exception. (A term of a leader is a hold of
//!   one holder alone. Threads and the end of a round check that observers see the newest state.)
//! - On a Cluster and under sentinels, no key is seen for longer than its ttl after its holder has ended.
//! - These faults excuse nothing: a planned switch-over or fail-over (the replica catches up while writes are paused),
//!   a move of a slot, guards dropped in an outage, and contention on one key.
//! - All calls end. They end by their deadlines, plus the time that the library documents, `SLACK`, and the time for
//!   which their process was stopped.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::time::Duration;

use leasehold_testbed::terms::{Crowd, Share, Term, admits, bursts, crowds};

use crate::faults::Fault;
use crate::history::{
    Call, Excuse, History, Hold, Observation, Run, RunRecord, Stops, Transfer, Write, min_hold,
};
use crate::messages::{
    COMMAND_TIMEOUT, CONNECT_TIMEOUT, account_keys, election_key, is_at_most_once,
};
use crate::records::{Doing, Observed, Outcome, Who};
use crate::value::GrantId;

/// The delay to allow for on a busy machine.
const SLACK: Duration = Duration::from_secs(10);
/// The longest wait of a call without a limit, given the competitors and the faults of a round.
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
    /// Transfers that read the balances of a lost one.
    pub transfers: u64,
    /// Work that ran again, or has an older record, since its record was lost.
    pub runs: u64,
}

pub fn all(history: &History, faults: &[Fault]) -> (Vec<Violation>, Explained) {
    let (mut found, mut explained) = (Vec::new(), Explained::default());
    let mut keys: BTreeMap<usize, Vec<&Hold>> = BTreeMap::new();
    for hold in &history.holds {
        keys.entry(hold.key).or_default().push(hold);
    }
    for holds in keys.values() {
        exclusion(holds, &history.excuses, &mut found, &mut explained);
        windows(holds, &history.excuses, &mut found);
        order_of_asking(holds, &history.excuses, &mut found);
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
    transfers(history, &mut found, &mut explained);
    runs(history, &mut found, &mut explained);
    observations(history, &mut found);
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

/// Checks that overlapping holds of one key fit together.
fn exclusion(
    holds: &[&Hold],
    excuses: &[Excuse],
    found: &mut Vec<Violation>,
    explained: &mut Explained,
) {
    let seen = holds.iter().copied().filter(|hold| hold.seen.is_some());
    let seen: Vec<&Hold> = seen.collect();
    let terms: Vec<Term> = seen.iter().map(|hold| hold.term()).collect();
    for Crowd { newest, others } in crowds(&terms) {
        let newest = seen[newest];
        let mut crowd: Vec<&Hold> = others.into_iter().map(|other| seen[other]).collect();
        crowd.push(newest);
        crowd.sort_by_key(|hold| hold.token);
        // The grant with the greatest token is the last one. Its loss would not explain the overlap, so it has no
        // excuse. Permits have no token.
        let has_tokens = crowd.iter().all(|hold| hold.token > 0);
        let last = crowd.last().filter(|_| has_tokens).map(|last| last.token);
        let excused = |hold: &&Hold| {
            let is_excused = |excuse: &&Excuse| {
                excuse.may_be_for(hold)
                    && excuse.to >= hold.since
                    && excuse.from <= newest.granted
                    && hold.end() <= excuse.to + hold.ttl
            };
            let excuses = excuses.iter().filter(is_excused);
            let is_forced = excuses.map(|excuse| excuse.is_forced).max();
            is_forced.filter(|_| Some(hold.token) != last)
        };
        let rest: Vec<&Hold> = crowd
            .iter()
            .copied()
            .filter(|hold| excused(hold).is_none())
            .collect();
        if admits(rest.iter().map(|hold| hold.share)) {
            for hold in &crowd {
                match excused(hold) {
                    Some(true) => explained.forced += 1,
                    Some(false) => explained.lost += 1,
                    None => continue,
                }
                let both = newest.end().min(hold.end()).saturating_sub(newest.granted);
                explained.longest = explained.longest.max(Duration::from_nanos(both));
            }
        } else if let [first, second] = rest[..] {
            found.push(of_holds("two holders at the same time", first, second));
        } else {
            let from = rest.iter().map(|hold| hold.asked).min().unwrap_or_default();
            let text = format!("{} holders at the same time", rest.len());
            let holds: String = rest.iter().map(|hold| format!("\n  {hold:?}")).collect();
            found.push(Violation {
                text: format!("{text}:{holds}"),
                key: Some(newest.key),
                from,
                to: newest.end(),
            });
        }
    }
}

/// Checks that the permits of one key with a shortest hold are not granted too often.
fn windows(holds: &[&Hold], excuses: &[Excuse], found: &mut Vec<Violation>) {
    let Some(&&Hold {
        key,
        share: Share::Permits { limit, .. },
        ..
    }) = holds
        .iter()
        .find(|hold| min_hold(hold.key) > 0 && hold.share != Share::Alone)
    else {
        return;
    };
    let of_permits = holds
        .iter()
        .copied()
        .filter(|hold| hold.share != Share::Alone);
    let of_permits: Vec<&Hold> = of_permits.collect();
    let terms: Vec<Term> = of_permits.iter().map(|hold| hold.term()).collect();
    for burst in bursts(&terms, limit, min_hold(key)) {
        let burst: Vec<&Hold> = burst.into_iter().map(|index| of_permits[index]).collect();
        let from = burst
            .iter()
            .map(|hold| hold.asked)
            .min()
            .unwrap_or_default();
        let to = burst
            .iter()
            .map(|hold| hold.granted)
            .max()
            .unwrap_or_default();
        let is_excused =
            |excuse: &Excuse| excuse.is_for_key(key) && excuse.to >= from && excuse.from <= to;
        if !excuses.iter().any(is_excused) {
            let text = format!(
                "more than {limit} permits in {:?}",
                Duration::from_nanos(min_hold(key))
            );
            let holds: String = burst.iter().map(|hold| format!("\n  {hold:?}")).collect();
            found.push(Violation {
                text: format!("{text}:{holds}"),
                key: Some(key),
                from,
                to,
            });
        }
    }
}

/// Whether tokens order these holds: both have a token, and at least one of them holds the key alone.
fn is_ordered(one: &Hold, other: &Hold) -> bool {
    let has_token = |hold: &Hold| hold.token > 0;
    has_token(one) && has_token(other) && (one.share == Share::Alone || other.share == Share::Alone)
}

fn order_of_asking(holds: &[&Hold], excuses: &[Excuse], found: &mut Vec<Violation>) {
    let mut seen: Vec<(u64, &Hold)> = holds
        .iter()
        .filter_map(|hold| Some((hold.seen?, *hold)))
        .collect();
    seen.sort_by_key(|(at, _)| *at);
    let mut asked = holds.to_vec();
    asked.sort_by_key(|hold| hold.asked);
    let mut earlier = seen.into_iter().peekable();
    // The hold with the greatest token, of those that hold the key alone and of those of readers.
    let mut greatest: [Option<&Hold>; 2] = [None; 2];
    for hold in asked {
        while let Some((_, before)) = earlier.next_if(|(at, _)| *at < hold.asked) {
            let greatest = &mut greatest[usize::from(before.share != Share::Alone)];
            if greatest.is_none_or(|greatest| greatest.token < before.token) {
                *greatest = Some(before);
            }
        }
        // A reader may join the lease of its client after Redis has lost it.
        let is_excused = |excuse: &Excuse| {
            hold.share != Share::Alone
                && excuse.may_be_for(hold)
                && excuse.to >= hold.since
                && excuse.from <= hold.granted
        };
        let greatest = greatest
            .into_iter()
            .flatten()
            .filter(|before| is_ordered(before, hold));
        if let Some(before) = greatest.max_by_key(|before| before.token)
            && before.token >= hold.token
            && !excuses.iter().any(is_excused)
        {
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
        if before.token < after.token || !is_ordered(before, after) {
            continue;
        }
        // The holder with the smaller token had lost its grant, and did not know of the loss yet.
        let is_excused = |excuse: &Excuse| {
            excuse.may_be_for(after) && excuse.to >= after.since && excuse.from <= *at
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
                let (one, other) = ((before.from, before.to), (write.from, write.to));
                loses_values && excuse.is_for_key(key) && loses(excuse, one, other)
            };
            if history.excuses.iter().any(is_excused) {
                explained.writes += 1;
                // Afterwards, the value has the smaller token.
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

fn transfers(history: &History, found: &mut Vec<Violation>, explained: &mut Explained) {
    let mut add = |text: &str, all: &[&Transfer]| {
        let lines: String = all.iter().map(|one| format!("\n  {one:?}")).collect();
        found.push(Violation {
            text: format!("{text}:{lines}"),
            key: Some(account_keys()[0]),
            from: all.first().map_or(0, |transfer| transfer.from),
            to: all.last().map_or(0, |transfer| transfer.to),
        });
    };
    let mut by_balance: Vec<&Transfer> = history.transfers.iter().collect();
    by_balance.sort_by_key(|transfer| (transfer.before, transfer.from));
    for transfer in &by_balance {
        if transfer.before.iter().sum::<i64>() != 0 {
            add("the sum of the accounts has changed", &[transfer]);
        }
    }
    for pair in by_balance.windows(2) {
        let [before, after] = *pair else { continue };
        if before.before != after.before {
            continue;
        }
        let is_excused = |excuse: &Excuse| {
            let loses_values = !excuse.is_forced && excuse.grant.is_none();
            let (one, other) = ((before.from, before.to), (after.from, after.to));
            loses_values && excuse.is_for_key(account_keys()[0]) && loses(excuse, one, other)
        };
        match history.excuses.iter().any(is_excused) {
            true => explained.transfers += 1,
            false => add("two transfers read the same balances", pair),
        }
    }
}

fn observations(history: &History, found: &mut Vec<Violation>) {
    let mut newest: BTreeMap<(Who, u64), (u64, &Observation)> = BTreeMap::new();
    for after in &history.observations {
        let Observed::Leader { token } = after.state else {
            continue;
        };
        let before = newest.insert((after.who, after.observer), (token, after));
        if let Some((_, before)) = before.filter(|(newest, _)| token < *newest) {
            found.push(Violation {
                text: format!(
                    "the token of a leader fell for an observer:\n  {before:?}\n  {after:?}"
                ),
                key: Some(election_key()),
                from: before.at,
                to: after.at,
            });
        }
    }
}

fn runs(history: &History, found: &mut Vec<Violation>, explained: &mut Explained) {
    let mut keys: BTreeMap<usize, (Vec<&Run>, Vec<&RunRecord>)> = BTreeMap::new();
    for run in &history.runs {
        keys.entry(run.key).or_default().0.push(run);
    }
    for record in &history.run_records {
        keys.entry(record.key).or_default().1.push(record);
    }
    for (key, (runs, records)) in keys {
        // `before` are the times before and after the first write. Only a fault that began by `to` is an excuse.
        type Times = (u64, u64);
        let mut add = |text: &str, one: &dyn Debug, other: &dyn Debug, before: Times, to: u64| {
            let is_excused = |excuse: &Excuse| {
                let loses_values = !excuse.is_forced && excuse.grant.is_none();
                let after = (to, to);
                loses_values && excuse.is_for_key(key) && loses(excuse, before, after)
            };
            if history.excuses.iter().any(is_excused) {
                explained.runs += 1;
                return;
            }
            found.push(Violation {
                text: format!("{text}:\n  {one:?}\n  {other:?}"),
                key: Some(key),
                from: before.0,
                to,
            });
        };
        let mut runs = runs;
        runs.sort_by_key(|run| run.began);
        if is_at_most_once(key) {
            for pair in runs.windows(2) {
                if !pair[0].has_failed {
                    let text = "work ran more than once";
                    add(
                        text,
                        pair[0],
                        pair[1],
                        (pair[0].asked, pair[0].began),
                        pair[1].began,
                    );
                }
            }
        }
        for record in records.iter().filter(|record| record.is_done) {
            if !runs.iter().any(|run| run.token == record.token) {
                let text = "a record is of no run";
                add(text, record, record, (record.from, record.to), record.to);
            }
        }
        let done = || records.iter().filter(|record| record.is_done);
        for before in done() {
            // Report only the first of each kind, since all others follow from it.
            let again = runs.iter().find(|run| run.asked > before.to);
            if let Some(run) = again {
                let text = "work ran again after its end was recorded";
                add(text, before, run, (before.from, before.to), run.began);
            }
            let is_older =
                |after: &&&RunRecord| after.from > before.to && after.token < before.token;
            let older = done().filter(is_older).min_by_key(|after| after.from);
            if let Some(after) = older {
                let text = "an older record of a run came back";
                add(text, before, after, (before.from, before.to), after.to);
            }
        }
    }
}

/// Whether the excuse explains that Redis had lost the write from the times `before` when it accepted the write from
/// the times `after`. A server without its data has lost all writes. A replica that takes over has lost only the last
/// ones.
fn loses(excuse: &Excuse, before: (u64, u64), after: (u64, u64)) -> bool {
    let is_lost = excuse.key.is_none() || before.1 + REPLICATION.as_nanos() as u64 >= excuse.from;
    is_lost && excuse.to >= before.0 && excuse.from <= after.1
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

/// Finds the keys that were seen for longer than their ttl after their holders had ended. `longest` is the longest
/// possible ttl.
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
            // No caller has got this grant. Only a call that waits for the other keys of its set renews it.
            [] => (
                waited_until(sighting, &history.calls, &stops),
                nanos(longest),
            ),
            _ => {
                let ended = holds.iter().map(|hold| ends(hold, &stops));
                let ttl = holds.iter().map(|hold| hold.ttl).max();
                (ended.max().unwrap_or_default(), ttl.unwrap_or_default())
            }
        };
        // If a fail-over loses the write that ended a wait, Redis grants the key to the same lease once more. The value
        // of a share does not distinguish the two grants.
        let is_share = holds.iter().any(|hold| hold.share != Share::Alone);
        let lost = history.excuses.iter().filter(|excuse| {
            let overlaps = excuse.to >= sighting.first && excuse.from <= sighting.last;
            is_share && !excuse.is_forced && excuse.is_for_key(sighting.key) && overlaps
        });
        let again = lost.map(|excuse| excuse.to).max();
        let (ended, ttl) = match again {
            Some(again) => (ended.max(again), nanos(longest)),
            None => (ended, ttl),
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

/// The time by which all calls had certainly ended that lock a set with the seen key and may have got the seen grant.
fn waited_until(sighting: &Sighting, calls: &[Call], stops: &Stops<'_>) -> u64 {
    let ends = |call: &Call| match &call.returned {
        Some((at, _)) => *at,
        None => stops.killed_at(call.who).unwrap_or(u64::MAX),
    };
    let waits = |call: &&Call| {
        let overlaps = call.from <= sighting.first && ends(call) >= sighting.first;
        call.set.contains(&sighting.key) && overlaps
    };
    let ended = calls.iter().filter(waits).map(ends).max();
    ended.unwrap_or(sighting.first)
}

/// The holds that are known to be of the seen grant. If there are none, the holds that may be of it: their lease ids
/// are not known, and they were held while the grant was seen. (A key has one grant at a time, so hardly any other hold
/// can have been valid then.)
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

/// The time by which the hold had certainly ended, so that its client no longer renewed it.
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
        |excuse: &Excuse| excuse.may_be_for(hold) && excuse.to >= hold.since && excuse.from <= *at;
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
        Doing::ForceUnlock | Doing::Extend | Doing::HandOver | Doing::Upgrade => 2,
        // One request for each slot, one that sets all ttls once more, and the releases of a call that fails.
        Doing::LockSet | Doing::TryLockSet | Doing::CancelledSet => 2 + call.set.len() as u32,
        // A leader writes its value after the grant.
        Doing::Campaign | Doing::Adopt => 2,
        // A run may write the record of its start. The end writes a record, and releases the lock.
        Doing::Run | Doing::EndRun => 3,
        // `WATCH`, two reads, and the commands.
        Doing::Transfer => 4,
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
        "LeaseLost" => matches!(
            doing,
            Doing::Unlock
                | Doing::Extend
                | Doing::HandOver
                | Doing::Upgrade
                | Doing::Transfer
                | Doing::Adopt
                | Doing::Campaign
                | Doing::Proclaim
                | Doing::Run
                | Doing::EndRun
        ),
        "Cancelled" => matches!(doing, Doing::CancelledLock | Doing::CancelledSet),
        "StaleToken" => doing == Doing::Write,
        "NotHeld" => doing == Doing::Adopt,
        // Readers or permits share the key of a mutex.
        "Protocol" => doing == Doing::Inspect,
        _ => false,
    }
}

//! The history of a round, from the records of all threads: which thread held which lock, from when to when (according
//! to its own guard), and which calls it made.

use std::collections::BTreeMap;

use leasehold_testbed::terms::{Share, Term};

use crate::faults::{Effect, Fault};
use crate::messages::{MIN_HOLD, key_of_slot, paced_key};
use crate::records::{Doing, Grant, Observed, Operation, Outcome, Record, What, Who};
use crate::value::{GrantId, micros_of};

/// A lock held by a thread. Times are in ns on the clock of all processes.
#[derive(Clone, Debug)]
pub struct Hold {
    pub who: Who,
    pub key: usize,
    pub share: Share,
    /// 0 for permits, which have none.
    pub token: u64,
    /// The lease id, if a thread with a hold of this grant has seen it in Redis.
    pub lease: Option<String>,
    /// The times before and after the call that acquired the lock.
    pub asked: u64,
    pub granted: u64,
    /// The time before the first call that acquired this share: readers of a client join its lease, and permits are
    /// handed off. For other holds, the same as `asked`.
    pub since: u64,
    /// A moment at which the guard was known to be valid; `None` if it never was.
    pub seen: Option<u64>,
    /// The end of its validity, unless it changes later.
    pub until: u64,
    /// The time before the release.
    pub released: Option<u64>,
    /// The time after the guard reported its loss, and the reason.
    pub reported: Option<(u64, String)>,
    /// The longest requested ttl, in ns. With a shortest hold, at least that.
    pub ttl: u64,
    /// The longest time for which it may be held, in ns.
    pub at_most: Option<u64>,
}

impl Hold {
    /// The time until which the lock was certainly held.
    pub fn end(&self) -> u64 {
        let reported = self.reported.as_ref().map_or(u64::MAX, |(at, _)| *at);
        self.until
            .min(reported)
            .min(self.released.unwrap_or(u64::MAX))
    }

    /// The time for which the lock was certainly held.
    pub fn term(&self) -> Term {
        Term {
            share: self.share,
            asked: self.asked,
            queued: None,
            from: self.granted,
            to: self.end(),
        }
    }

    /// The µs of the grant, which all its hand-offs share.
    pub fn micros(&self) -> u64 {
        micros_of(self.token)
    }
}

#[derive(Clone, Debug)]
pub struct Call {
    pub who: Who,
    pub doing: Doing,
    pub key: Option<usize>,
    /// The keys of the set that the call locks.
    pub set: Vec<usize>,
    pub from: u64,
    /// The longest time that the call may wait, in ns. `None` for no limit.
    pub allowed: Option<u64>,
    pub returned: Option<(u64, Outcome)>,
}

/// A write of a fenced value that was accepted, between two moments.
#[derive(Clone, Debug)]
pub struct Write {
    pub key: usize,
    pub token: u64,
    pub from: u64,
    pub to: u64,
}

/// A transfer between the accounts that was committed, between two moments.
#[derive(Clone, Debug)]
pub struct Transfer {
    /// The balances before it.
    pub before: [i64; 2],
    pub from: u64,
    pub to: u64,
}

/// Work that shall run once for its name.
#[derive(Clone, Debug)]
pub struct Run {
    pub key: usize,
    pub token: u64,
    /// The times before the call, and at the beginning of the work.
    pub asked: u64,
    pub began: u64,
    /// Whether the work has failed, so that it may run again.
    pub has_failed: bool,
}

/// The record of a run, which was there at a moment between two times.
#[derive(Clone, Debug)]
pub struct RunRecord {
    pub key: usize,
    pub token: u64,
    /// Whether this is the record of the run's end. Otherwise it is the record of its start.
    pub is_done: bool,
    pub from: u64,
    pub to: u64,
}

/// A state of the election that an observer saw. The observer began at the time `observer`.
#[derive(Clone, Debug)]
pub struct Observation {
    pub who: Who,
    pub observer: u64,
    pub at: u64,
    pub state: Observed,
}

/// A loss of one grant or of all grants in Redis, at a moment between `from` and `to`, because of a fault or of
/// `force_unlock`.
#[derive(Clone, Debug)]
pub struct Excuse {
    pub from: u64,
    pub to: u64,
    pub key: Option<usize>,
    /// The lost grant, if it is known.
    pub grant: Option<GrantId>,
    /// A program took the lock away with `force_unlock`. Otherwise Redis lost data.
    pub is_forced: bool,
}

impl Excuse {
    pub fn is_for_key(&self, wanted: usize) -> bool {
        let lost_values = !self.is_forced && self.grant.is_none();
        self.key
            .is_none_or(|key| key == wanted || lost_values && key == key_of_slot(wanted))
    }

    /// Whether the grant of `hold` may be the one that Redis lost.
    pub fn may_be_for(&self, hold: &Hold) -> bool {
        let is_other = |grant: &GrantId| grant.is_of(hold) == Some(false);
        self.is_for_key(hold.key) && !self.grant.as_ref().is_some_and(is_other)
    }

    /// Whether Redis lost the grant of `hold`, and no other.
    pub fn names(&self, hold: &Hold) -> bool {
        let is_it = |grant: &GrantId| grant.is_of(hold) == Some(true);
        self.is_for_key(hold.key) && self.grant.as_ref().is_some_and(is_it)
    }
}

#[derive(Default)]
pub struct History {
    pub holds: Vec<Hold>,
    pub calls: Vec<Call>,
    pub writes: Vec<Write>,
    pub transfers: Vec<Transfer>,
    pub runs: Vec<Run>,
    pub run_records: Vec<RunRecord>,
    /// The observations of each observer are in their order.
    pub observations: Vec<Observation>,
    pub excuses: Vec<Excuse>,
    pub wrong: Vec<(u64, Who, String)>,
    pub began: BTreeMap<Operation, u64>,
    pub losses: BTreeMap<String, u64>,
}

/// How long a `force_unlock` without a reply can still be in flight: longer than any fault.
const LATE: u64 = 10 * 1_000_000_000;
const NANOS_PER_MILLI: u64 = 1_000_000;

/// The current state of a thread.
#[derive(Default)]
struct State {
    call: Option<Call>,
    asked: u64,
    /// The keys of the set that the next call locks.
    set: Vec<usize>,
    /// The current hold: several of a set.
    holds: Vec<Hold>,
}

impl History {
    pub fn new(records: &[Record], faults: &[Fault]) -> Self {
        let mut history = Self::default();
        let mut states: BTreeMap<Who, State> = BTreeMap::new();
        for record in records {
            let state = states.entry(record.who).or_default();
            history.add(record, state);
        }
        for state in states.into_values() {
            history.holds.extend(state.holds);
            history.calls.extend(state.call);
        }
        for fault in faults {
            let lost: Vec<(Option<usize>, Option<GrantId>)> = match &fault.effect {
                Effect::Loses { key, grant } => vec![(*key, grant.clone())],
                Effect::MayLose { keys } => keys.iter().map(|key| (Some(*key), None)).collect(),
                _ => Vec::new(),
            };
            let excuse = |(key, grant)| Excuse {
                from: fault.from,
                to: fault.to,
                key,
                grant,
                is_forced: false,
            };
            history.excuses.extend(lost.into_iter().map(excuse));
        }
        history.holds.sort_by_key(|hold| hold.granted);
        history.share_grants();
        history
    }

    /// Gives all holds of one grant the longest of their ttls, and the lease id that one of their threads has seen: a
    /// lock may be handed off, and then these holds share a key in Redis. Gives all holds of one shared lease the
    /// longest of their ttls and the earliest of their requests.
    pub fn share_grants(&mut self) {
        let mut leases: BTreeMap<(usize, &str), (u64, u64)> = BTreeMap::new();
        let shares = self.holds.iter().filter(|hold| hold.share != Share::Alone);
        for hold in shares {
            let lease = hold.lease.as_deref().unwrap_or_default();
            let (ttl, since) = leases.entry((hold.key, lease)).or_insert((0, u64::MAX));
            (*ttl, *since) = (hold.ttl.max(*ttl), hold.asked.min(*since));
        }
        let of_shares = |hold: &Hold| {
            let lease = hold.lease.as_deref().unwrap_or_default();
            leases.get(&(hold.key, lease)).copied()
        };
        let of_shares: Vec<Option<(u64, u64)>> = self.holds.iter().map(of_shares).collect();
        for (hold, found) in self.holds.iter_mut().zip(of_shares) {
            if let (true, Some((ttl, since))) = (hold.share != Share::Alone, found) {
                (hold.ttl, hold.since) = (ttl, since);
            }
        }
        let mut grants: BTreeMap<(usize, u64), (u64, Option<String>)> = BTreeMap::new();
        let is_alone = |hold: &&Hold| hold.share == Share::Alone;
        for hold in self.holds.iter().filter(is_alone) {
            let (ttl, lease) = grants.entry((hold.key, hold.micros())).or_default();
            *ttl = hold.ttl.max(*ttl);
            if lease.is_none() {
                lease.clone_from(&hold.lease);
            }
        }
        for hold in &mut self.holds {
            if hold.share == Share::Alone {
                (hold.ttl, hold.lease) = grants[&(hold.key, hold.micros())].clone();
            }
        }
    }

    fn add(&mut self, record: &Record, state: &mut State) {
        let Record { at, who, ref what } = *record;
        match what {
            What::Began(operation) => *self.began.entry(*operation).or_default() += 1,
            What::Called {
                doing,
                key,
                allowed,
            } => {
                self.calls.extend(state.call.take());
                state.asked = at;
                state.call = Some(Call {
                    who,
                    doing: *doing,
                    key: *key,
                    set: std::mem::take(&mut state.set),
                    from: at,
                    allowed: allowed.map(|millis| millis * NANOS_PER_MILLI),
                    returned: None,
                });
            }
            What::Wants { keys } => state.set.clone_from(keys),
            What::Returned { since, outcome } => {
                if let Some(call) = &mut state.call {
                    call.from = *since;
                    call.returned = Some((at, outcome.clone()));
                }
                self.calls.extend(state.call.take());
            }
            What::Held(grant) => {
                let hold = held(at, who, state.asked, grant);
                self.holds.append(&mut state.holds);
                state.holds.push(hold);
            }
            What::HeldToo(grant) => state.holds.push(held(at, who, state.asked, grant)),
            What::Lost { reason, key } => {
                *self.losses.entry(reason.clone()).or_default() += 1;
                let is_lost = |hold: &&mut Hold| key.is_none_or(|key| key == hold.key);
                for hold in state.holds.iter_mut().filter(is_lost) {
                    hold.reported.get_or_insert_with(|| (at, reason.clone()));
                }
            }
            What::Identified { lease } => {
                for hold in &mut state.holds {
                    hold.lease = Some(lease.clone());
                }
            }
            What::Forced { key, since, grant } => self.excuses.push(Excuse {
                from: *since,
                to: if grant.is_some() { at } else { at + LATE },
                key: Some(*key),
                grant: grant.clone(),
                is_forced: true,
            }),
            What::Written { key, token, since } => self.writes.push(Write {
                key: *key,
                token: *token,
                from: *since,
                to: at,
            }),
            What::Transferred { before, since } => self.transfers.push(Transfer {
                before: *before,
                from: *since,
                to: at,
            }),
            What::RunBegan { key, token, since } => self.runs.push(Run {
                key: *key,
                token: *token,
                asked: *since,
                began: at,
                has_failed: false,
            }),
            What::RunFailed { key } => {
                let token = state.holds.last().map(|hold| hold.token);
                let mut runs = self.runs.iter_mut();
                let failed = runs.rfind(|run| run.key == *key && Some(run.token) == token);
                if let Some(run) = failed {
                    run.has_failed = true;
                }
            }
            What::RunEnded {
                key,
                token,
                is_done,
                since,
            } => self.run_records.push(RunRecord {
                key: *key,
                token: *token,
                is_done: *is_done,
                from: *since,
                to: at,
            }),
            What::Observed { observer, state } => self.observations.push(Observation {
                who,
                observer: *observer,
                at,
                state: *state,
            }),
            What::Wrong(text) => self.wrong.push((at, who, text.clone())),
            What::Seen { .. } | What::Extended { .. } | What::Releasing => {
                for hold in &mut state.holds {
                    look(hold, at, what);
                }
            }
        }
    }
}

/// How long a grant of the key stays taken at least, in ns.
pub fn min_hold(key: usize) -> u64 {
    match key == paced_key() {
        true => MIN_HOLD.as_nanos() as u64,
        false => 0,
    }
}

fn held(at: u64, who: Who, asked: u64, grant: &Grant) -> Hold {
    Hold {
        who,
        key: grant.key,
        share: grant.share,
        token: grant.token,
        lease: None,
        asked,
        granted: at,
        since: asked,
        seen: None,
        until: at,
        released: None,
        reported: None,
        ttl: (grant.ttl * NANOS_PER_MILLI).max(min_hold(grant.key)),
        at_most: grant.at_most.map(|millis| millis * NANOS_PER_MILLI),
    }
}

fn look(hold: &mut Hold, at: u64, what: &What) {
    match what {
        What::Seen { left } => {
            hold.seen.get_or_insert(at);
            hold.until = hold.until.max(at + left);
        }
        What::Extended { ttl } => hold.ttl = hold.ttl.max(ttl * NANOS_PER_MILLI),
        _ => hold.released = Some(at),
    }
}

/// The times at which processes were stopped and killed.
pub struct Stops<'a>(pub &'a [Fault]);

impl Stops<'_> {
    /// For how long the process was stopped between two moments, in ns.
    pub fn within(&self, process: usize, from: u64, to: u64) -> u64 {
        let stops = self
            .0
            .iter()
            .filter(|fault| fault.effect == Effect::Stops { process });
        stops
            .map(|stop| stop.to.min(to).saturating_sub(stop.from.max(from)))
            .sum()
    }

    pub fn was_killed(&self, who: Who) -> bool {
        self.killed_at(who).is_some()
    }

    /// The time by which the process had certainly been killed.
    pub fn killed_at(&self, who: Who) -> Option<u64> {
        let (process, life) = (who.process, who.life);
        let killed = Effect::Kills { process, life };
        let fault = self.0.iter().find(|fault| fault.effect == killed)?;
        Some(fault.to)
    }
}

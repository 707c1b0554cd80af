//! The history of a round, from the records of all threads: which thread held which lock, from when to when (according
//! to its own guard), and which calls it made.

use std::collections::BTreeMap;

use crate::faults::{Effect, Fault};
use crate::records::{Doing, Grant, Operation, Outcome, Record, What, Who};
use crate::value::{GrantId, micros_of};

/// A lock held by a thread. Times are in ns on the clock of all processes.
#[derive(Clone, Debug)]
pub struct Hold {
    pub who: Who,
    pub key: usize,
    pub token: u64,
    /// The lease id, if a thread with a hold of this grant has seen it in Redis.
    pub lease: Option<String>,
    /// The times before and after the call that acquired the lock.
    pub asked: u64,
    pub granted: u64,
    /// A moment at which the guard was known to be valid; `None` if it never was.
    pub seen: Option<u64>,
    /// The end of its validity, unless it changes later.
    pub until: u64,
    /// The time before the release.
    pub released: Option<u64>,
    /// The time after the guard reported its loss, and the reason.
    pub reported: Option<(u64, String)>,
    /// The longest requested ttl, in ns.
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

/// A moment, within bounds, at which Redis lost one grant or all of them because of a fault or of `force_unlock`.
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
        self.key.is_none_or(|key| key == wanted)
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
    hold: Option<Hold>,
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
            history.holds.extend(state.hold);
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

    /// Gives all holds of one grant the longest of their ttls, and the lease id that one of their threads has seen. A
    /// lock may be handed off, and these holds share a key in Redis.
    pub fn share_grants(&mut self) {
        let mut grants: BTreeMap<(usize, u64), (u64, Option<String>)> = BTreeMap::new();
        for hold in &self.holds {
            let (ttl, lease) = grants.entry((hold.key, hold.micros())).or_default();
            *ttl = hold.ttl.max(*ttl);
            if lease.is_none() {
                lease.clone_from(&hold.lease);
            }
        }
        for hold in &mut self.holds {
            (hold.ttl, hold.lease) = grants[&(hold.key, hold.micros())].clone();
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
                    from: at,
                    allowed: allowed.map(|millis| millis * NANOS_PER_MILLI),
                    returned: None,
                });
            }
            What::Returned { since, outcome } => {
                if let Some(call) = &mut state.call {
                    call.from = *since;
                    call.returned = Some((at, outcome.clone()));
                }
                self.calls.extend(state.call.take());
            }
            What::Held(grant) => {
                let hold = held(at, who, state.asked, grant);
                self.holds.extend(state.hold.replace(hold));
            }
            What::Lost { reason } => {
                *self.losses.entry(reason.clone()).or_default() += 1;
                if let Some(hold) = &mut state.hold {
                    hold.reported.get_or_insert_with(|| (at, reason.clone()));
                }
            }
            What::Identified { lease } => {
                if let Some(hold) = &mut state.hold {
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
            What::Wrong(text) => self.wrong.push((at, who, text.clone())),
            What::Seen { .. } | What::Extended { .. } | What::Releasing => {
                if let Some(hold) = &mut state.hold {
                    look(hold, at, what);
                }
            }
        }
    }
}

fn held(at: u64, who: Who, asked: u64, grant: &Grant) -> Hold {
    Hold {
        who,
        key: grant.key,
        token: grant.token,
        lease: None,
        asked,
        granted: at,
        seen: None,
        until: at,
        released: None,
        reported: None,
        ttl: grant.ttl * NANOS_PER_MILLI,
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

/// Which processes were stopped when, and which were killed.
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

    /// When the process had certainly been killed.
    pub fn killed_at(&self, who: Who) -> Option<u64> {
        let (process, life) = (who.process, who.life);
        let killed = Effect::Kills { process, life };
        let fault = self.0.iter().find(|fault| fault.effect == killed)?;
        Some(fault.to)
    }
}

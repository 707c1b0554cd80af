//! Campaigns and terms of one election, and the observers of its leaders.

use std::time::{Duration, Instant};

use crossbeam_channel::RecvTimeoutError;
use leasehold::{
    Client, Election, Error, ErrorKind, Leader, LeaderState, LossReason, LostSignal, Released,
};

use super::shares::Held;
use super::{Doing, Terms, Thread, What};
use crate::messages::{election_key, key_name};
use crate::records::{Observed, now};
use crate::tickets;
use crate::value::micros_of;

/// The value of a leader that has not proclaimed its token.
const CANDIDATE: &[u8] = b"candidate";
/// How long an observer may take to learn of the last vacancy, on a busy machine: all waiting candidates lead before.
const LAST_STATE: Duration = Duration::from_secs(60);
/// How often an observer looks whether the round ends.
const LOOK: Duration = Duration::from_millis(50);

impl Held for Leader {
    type Loss = LossReason;

    fn remaining(&self) -> Duration {
        (**self).remaining()
    }
    fn is_lost(&self) -> bool {
        (**self).is_lost()
    }
    fn check(&self) -> Result<(), Error> {
        (**self).check()
    }
    fn lost_signal(&self) -> LostSignal {
        (**self).lost_signal()
    }
    fn unlock(self) -> Result<Released, Error> {
        self.resign()
    }
}

impl Thread<'_> {
    pub fn campaign(&mut self, client: &Client) {
        let (key, election) = (election_key(), election(client));
        let leader = match self.random.below(6) {
            0 => self.take(Doing::Campaign, key, Some(Duration::ZERO), || {
                election.try_campaign(CANDIDATE)
            }),
            1 => {
                let time = self.random.millis(0, 400);
                self.take(Doing::Campaign, key, Some(time), || {
                    election.try_campaign_for(time, CANDIDATE)
                })
            }
            _ => self.take(Doing::Campaign, key, None, || {
                election.campaign(CANDIDATE).map(Some)
            }),
        };
        if let Some(leader) = leader {
            self.held(&leader, key, Terms::default());
            self.lead(leader);
        }
    }

    pub fn adopt_term(&mut self, client: &Client, ticket: &tickets::Ticket) {
        let election = election(client);
        let outage = Some(self.shared.assignment.outage);
        let adopt = || election.adopt(&ticket.text, CANDIDATE).map(Some);
        let leader = self.take(Doing::Adopt, election_key(), outage, adopt);
        let Some(leader) = leader else { return };
        let terms = Terms {
            ttl: Some(ticket.ttl),
            at_most: None,
        };
        if leader.fencing_token() <= ticket.token {
            self.wrong(format!("adopted under {}: {leader:?}", ticket.token));
        }
        self.held(&leader, election_key(), terms);
        self.lead(leader);
    }

    /// Leads for a while, and ends the term in one of several ways.
    fn lead(&mut self, leader: Leader) {
        let key = election_key();
        if self.random.one_in(2) {
            let value = leader.fencing_token().to_string();
            let allowed = Some(self.shared.assignment.outage);
            let _ = self.call(Doing::Proclaim, Some(key), allowed, || {
                leader.proclaim(value)
            });
        }
        match self.random.below(8) {
            0 => {
                let ttl = self.shared.ttl.as_millis() as u64;
                let end = now() + self.random.millis(ttl, 2 * ttl).as_nanos() as u64;
                while now() < end && self.look(&leader) {
                    std::thread::sleep(self.random.millis(10, 100));
                }
                self.unlock_now(leader, key);
            }
            1 => {
                self.stay(&leader);
                let token = leader.fencing_token();
                self.records.write(What::Releasing);
                let allowed = Some(Duration::ZERO);
                let ticket =
                    self.call(Doing::HandOver, Some(key), allowed, || leader.into_ticket());
                if let Ok(text) = ticket {
                    self.leave_ticket(key, token, text);
                }
            }
            2..5 => self.drop_guard(leader, key),
            _ => self.unlock(leader, key),
        }
    }

    /// Observes the election until the round ends, with one observer after another. The last one has to learn that
    /// there is no leader any more.
    pub fn observe(mut self) {
        let mut limit = None;
        loop {
            let (observer, until) = (now(), Instant::now() + self.random.millis(500, 5000));
            let states = match election(&self.shared.client()).observe() {
                Ok(states) => states,
                // Another thread has just shut this client down.
                Err(error) if error.kind() == ErrorKind::Shutdown => continue,
                Err(error) => return self.wrong(format!("an observer does not begin: {error}")),
            };
            let mut last = None;
            loop {
                match states.recv_timeout(LOOK) {
                    Ok(state) => {
                        self.observed(observer, &state);
                        last = Some(state);
                    }
                    Err(RecvTimeoutError::Disconnected) => break,
                    Err(RecvTimeoutError::Timeout) => {}
                }
                if !self.shared.is_ending() {
                    if Instant::now() >= until {
                        break;
                    }
                    continue;
                }
                if last == Some(LeaderState::Vacant) || !self.shared.is_finishing() {
                    return;
                }
                if Instant::now() >= *limit.get_or_insert(Instant::now() + LAST_STATE) {
                    return self.wrong(format!(
                        "an observer does not learn that there is no leader, after {last:?}"
                    ));
                }
            }
        }
    }

    fn observed(&mut self, observer: u64, state: &LeaderState) {
        let state = match state {
            LeaderState::Leader(leader) => {
                let token = leader.fencing_token();
                let value = leader.value().filter(|value| *value != CANDIDATE);
                let value = value.map(|value| String::from_utf8_lossy(value).into_owned());
                let of = value.as_ref().map(|value| value.parse().map(micros_of));
                if of.is_some_and(|of| of != Ok(micros_of(token))) {
                    self.wrong(format!("a leader has the value of another one: {leader:?}"));
                }
                Observed::Leader { token }
            }
            LeaderState::Vacant => Observed::Vacant,
            LeaderState::Unknown => Observed::Unknown,
        };
        self.records.write(What::Observed { observer, state });
    }
}

fn election(client: &Client) -> Election {
    client.election(key_name(election_key()))
}

/// Leads once, at the end of a round, while an observer looks on. Returns a text about what the observer did not see.
pub fn lead_once(client: &Client, limit: Duration) -> Result<Option<String>, Error> {
    let election = election(client);
    let states = election.observe()?;
    let sees = |wanted: &dyn Fn(&LeaderState) -> bool| {
        let end = Instant::now() + limit;
        while let Ok(state) = states.recv_deadline(end) {
            if wanted(&state) {
                return true;
            }
        }
        false
    };
    let Some(leader) = election.try_campaign_for(limit, CANDIDATE)? else {
        return Ok(Some("the election cannot be won".to_owned()));
    };
    let token = leader.fencing_token();
    let is_it = |state: &LeaderState| match state {
        LeaderState::Leader(found) => found.fencing_token() == token,
        _ => false,
    };
    if !sees(&is_it) {
        return Ok(Some(format!("an observer does not see the leader {token}")));
    }
    leader.resign()?;
    let is_over = sees(&|state| *state == LeaderState::Vacant);
    Ok((!is_over).then(|| format!("an observer does not see the end of {token}")))
}

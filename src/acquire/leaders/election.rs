//! The state machine of one observed election. Its inputs are the time, the answers of Redis, and the reports about the
//! two keys. Its outputs are the states for the observers and the time of the next look. The state machine does no I/O
//! and reads no clock.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded};

use crate::acquire::leaders::state::{LeaderInfo, LeaderState};
use crate::acquire::watch::Watcher;
use crate::command::{LockAndValue, Look};
use crate::config::key::Key;
use crate::report::error::Error;
use crate::store::{KeyState, TrackedKey};
use crate::util::clock::{MonotonicTime, validity};
use crate::util::id::LeaseId;

/// The maximum pause after a look without a reply.
const LONGEST_RETRY: Duration = Duration::from_secs(1);
/// The thread looks at an election this long after its lock should have expired.
pub const AFTER_EXPIRY: Duration = Duration::from_millis(3);

/// An election with observers.
pub struct Election {
    pub lock: Key,
    value: Key,
    /// The shortest ttl of its observers, including those that have left.
    ttl: Duration,
    pub observers: HashMap<u64, Outbox>,
    /// Empty if the keys are not tracked.
    pub watchers: Vec<(Key, Arc<dyn Watcher>)>,
    /// The state that was reported last.
    state: Option<LeaderState>,
    /// The greatest token that was reported.
    greatest: u64,
    /// The lease that holds the lock, according to the last answer.
    lease: Option<LeaseId>,
    /// The time at which the observers get `Unknown` unless an answer comes: one validity after the request of the last
    /// answer was sent. Before the first answer, one validity after the first observer was added.
    pub known_until: MonotonicTime,
    /// The number of looks that have begun.
    pub looks: u64,
    /// The time of the next look; `None` while a look is under way.
    pub look_at: Option<MonotonicTime>,
    /// Whether something has changed since the last look was sent.
    pub must_look: bool,
    /// For the lock and for the value, indexed by [`Part`].
    pub tracking: [Tracking; 2],
    /// The time under which `Elections::due` has this election.
    pub due_at: MonotonicTime,
}

/// Whether the server reports the next change of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tracking {
    No,
    /// A read of the key, which tracks it, was asked for at this time.
    Asked(MonotonicTime),
    Yes,
}

/// The two keys of an election.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    Lock,
    Value,
}

/// The channel of an observer, with room for one state.
pub struct Outbox {
    sender: Sender<LeaderState>,
    /// Takes back a state that the observer has not received.
    unread: Receiver<LeaderState>,
    /// The state that was sent last. The observer may not have received it yet.
    sent: Option<LeaderState>,
    /// The last state that the observer is known to have received.
    received: Option<LeaderState>,
    /// The number of looks that had begun when the observer was added: their answers may be older than the observer.
    /// `None` once a later look was answered.
    looks_before: Option<u64>,
}

impl Outbox {
    pub fn new(looks_before: u64) -> (Self, Receiver<LeaderState>) {
        let (sender, receiver) = bounded(1);
        let outbox = Self {
            sender,
            unread: receiver.clone(),
            sent: None,
            received: None,
            looks_before: Some(looks_before),
        };
        (outbox, receiver)
    }

    /// Sends a state in place of one that the observer has not received. Sends nothing if the observer has received the
    /// same state last.
    pub fn send(&mut self, state: &LeaderState) {
        let sent = self.sent.take();
        if self.unread.try_recv().is_err() && sent.is_some() {
            self.received = sent;
        }
        let is_news = self
            .received
            .as_ref()
            .is_none_or(|received| !received.is_same(state));
        if is_news && self.sender.try_send(state.clone()).is_ok() {
            self.sent = Some(state.clone());
        }
    }
}

impl Election {
    /// An election without observers. Its first look is due at `now`.
    pub fn new(
        lock: &Key,
        value: &Key,
        ttl: Duration,
        watchers: Vec<(Key, Arc<dyn Watcher>)>,
        now: MonotonicTime,
    ) -> Self {
        Self {
            lock: lock.clone(),
            value: value.clone(),
            ttl,
            observers: HashMap::new(),
            watchers,
            state: None,
            greatest: 0,
            lease: None,
            known_until: now.after(validity(ttl)),
            looks: 0,
            look_at: Some(now),
            must_look: false,
            tracking: [Tracking::No; 2],
            due_at: now,
        }
    }

    /// The time at which the observers get `Unknown` unless an answer comes; `None` if that is their state already.
    pub fn unknown_at(&self) -> Option<MonotonicTime> {
        let is_known = self.state != Some(LeaderState::Unknown);
        is_known.then_some(self.known_until)
    }

    /// Adds an observer, which gets its first state from the next look.
    pub fn join(
        &mut self,
        observer: u64,
        ttl: Duration,
        now: MonotonicTime,
    ) -> Receiver<LeaderState> {
        let (outbox, receiver) = Outbox::new(self.looks);
        self.observers.insert(observer, outbox);
        if ttl < self.ttl {
            self.ttl = ttl;
            // With the longer ttl, the looks were rarer, so the last answer may be older than the new validity.
            self.known_until = self.known_until.min(now.after(validity(ttl)));
        }
        self.look_again(now);
        receiver
    }

    /// Begins a look at once, or after the one that is under way.
    fn look_again(&mut self, now: MonotonicTime) {
        self.must_look = true;
        self.look_at = self.look_at.map(|_| now);
    }

    /// The time of the next [`begin_look`](Self::begin_look).
    pub fn next_due(&self) -> MonotonicTime {
        let both = self.look_at.into_iter().chain(self.unknown_at());
        // While a look is under way and the state is unknown, nothing is due.
        both.min().unwrap_or(self.known_until.after(Duration::MAX))
    }

    /// The pause after an answer until the next look. `listens` is true if the client is connected for notifications.
    fn pause(&self, listens: bool) -> Duration {
        match listens && self.tracking == [Tracking::Yes; 2] {
            true => self.ttl / 2,
            false => self.ttl / 3,
        }
    }

    /// Reports the state that the last look has found: to all observers if it differs from the last reported state,
    /// otherwise only to those that wait for their first answer.
    fn report(&mut self, state: LeaderState) {
        let is_news = self.state.as_ref().is_none_or(|last| !last.is_same(&state));
        for observer in self.observers.values_mut() {
            let is_first = observer
                .looks_before
                .take_if(|before| *before < self.looks)
                .is_some();
            if is_first || is_news && observer.looks_before.is_none() {
                observer.send(&state);
            }
        }
        self.state = Some(state);
    }

    /// Reports `Unknown` if the last answer is too old at `now`. Begins a look if one is due.
    pub fn begin_look(&mut self, now: MonotonicTime) -> Option<Look> {
        if self.unknown_at().is_some_and(|at| at <= now) {
            self.forget();
        }
        self.look_at.take_if(|at| *at <= now)?;
        self.must_look = false;
        self.looks += 1;
        Some(Look {
            key: self.lock.clone(),
            value: self.value.clone(),
        })
    }

    /// Reports `Unknown` to all observers.
    fn forget(&mut self) {
        for observer in self.observers.values_mut() {
            observer.send(&LeaderState::Unknown);
        }
        self.state = Some(LeaderState::Unknown);
    }

    /// Handles the reply to the last look, which was sent at `asked_at`.
    pub fn answer(
        &mut self,
        found: LockAndValue,
        asked_at: MonotonicTime,
        now: MonotonicTime,
        listens: bool,
    ) {
        let lease = found.lock.as_ref().map(|(lock, _)| lock.lease);
        let expires_in = found.lock.as_ref().and_then(|(_, expires_in)| *expires_in);
        let mut leader = LeaderInfo::new(found);
        if let Some(leader) = &mut leader {
            if leader.token < self.greatest {
                if !leader.is_of_same_grant(self.greatest) {
                    return self.retry(now, self.ttl / 3);
                }
                // After a hand-off within a client, only the value in Redis contains the token of the leader. The same
                // lock is held, but Redis has lost this value.
                leader.token = self.greatest;
                leader.value = None;
            }
            self.greatest = leader.token;
        }
        let state = leader.map_or(LeaderState::Vacant, LeaderState::Leader);
        self.lease = lease;
        self.answered(asked_at);
        let next = asked_at.after(self.pause(listens));
        let expiry = expires_in.map(|left| now.after(left + AFTER_EXPIRY));
        self.look_at = Some(match self.must_look {
            true => now,
            false => expiry.map_or(next, |expiry| next.min(expiry)),
        });
        self.report(state);
    }

    /// Counts the reply to a request that was sent at `asked_at` as an answer.
    fn answered(&mut self, asked_at: MonotonicTime) {
        let known_until = asked_at.after(validity(self.ttl));
        self.known_until = self.known_until.max(known_until);
    }

    /// Handles a look without a usable reply.
    pub fn fail(&mut self, error: &Error, now: MonotonicTime) {
        let longest = match error.is_unavailable() {
            true => LONGEST_RETRY,
            // The error is likely to last: the user lacks a right to the keys, or they hold other data.
            false => Duration::MAX,
        };
        self.retry(now, (self.ttl / 3).min(longest));
    }

    /// Looks again after `pause`. The observers that wait for their first answer get `Unknown` now.
    fn retry(&mut self, now: MonotonicTime, pause: Duration) {
        self.look_at = Some(now.after(pause));
        if self.state.is_none() {
            self.state = Some(LeaderState::Unknown);
        }
        for observer in self.observers.values_mut() {
            if observer.looks_before.is_some() {
                observer.send(&LeaderState::Unknown);
            }
        }
    }

    /// Handles a read of one of the two keys. The server now tracks the key.
    pub fn seen(&mut self, part: Part, state: KeyState<'_>, now: MonotonicTime) {
        let before = std::mem::replace(&mut self.tracking[part as usize], Tracking::Yes);
        let is_as_before = part == Part::Lock
            && match self.lease {
                Some(lease) => state.is_held_by(lease),
                None => !state.is_present(),
            };
        if !is_as_before {
            // If a look is under way, Redis may have carried it out before the change.
            self.look_again(now);
        } else if let Tracking::Asked(asked_at) = before
            && matches!(
                self.state,
                Some(LeaderState::Leader(_) | LeaderState::Vacant)
            )
        {
            self.answered(asked_at);
            let next = asked_at.after(self.pause(true));
            self.look_at = self
                .look_at
                .map(|_| if self.must_look { now } else { next });
        }
    }

    /// The keys that the notification thread should read, so that the server tracks them. An earlier read may have
    /// failed: on a Cluster, it may have found no node.
    pub fn ask_to_track(&mut self, now: MonotonicTime) -> Vec<TrackedKey> {
        let mut to_track = Vec::new();
        for ((key, _), tracking) in self.watchers.iter().zip(&mut self.tracking) {
            let is_due = match *tracking {
                Tracking::No => true,
                Tracking::Asked(at) => now.since(at) >= self.ttl / 4,
                Tracking::Yes => false,
            };
            if is_due {
                *tracking = Tracking::Asked(now);
                let (key, lease) = (key.clone(), None);
                to_track.push(TrackedKey { key, lease });
            }
        }
        to_track
    }

    /// Handles the report that the key has changed, or may have changed. The notification thread reads it again.
    pub fn untracked(&mut self, part: Part, now: MonotonicTime) {
        self.tracking[part as usize] = Tracking::Asked(now);
    }
}

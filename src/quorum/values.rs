//! Fenced values: each node has a copy, and the latest version on a majority is the value. "Fenced values of a quorum"
//! in ARCHITECTURE.md says why no caller sees an older version than another caller before.

use std::sync::Arc;
use std::time::Duration;

use crate::command::copy::{NodeCopy, ValueCopy, Version};
use crate::command::value::micros_of;
use crate::command::{Command, Reply};
use crate::quorum::QuorumStore;
use crate::quorum::count::Count;
use crate::report::error::{Error, ErrorKind};
use crate::store::completion::Outcome;
use crate::util::clock::MonotonicTime;
use crate::util::id;
use crate::util::key::Key;

/// How often a write is tried. A second try is rare: a node had a greater token, and does not reply any more.
const TRIES: usize = 3;
/// The shortest ttl that Redis accepts.
const SHORTEST_TTL: Duration = Duration::from_millis(1);
/// A call ends within this part of a quarantine, so two calls that overlap are shorter than a quarantine together.
/// "Fenced values of a quorum" in ARCHITECTURE.md says why they have to be.
const PART_OF_QUARANTINE: u32 = 3;

/// A change of a fenced value.
pub struct Change<'a> {
    pub key: &'a Key,
    pub token: u64,
    /// `None` deletes the value.
    pub value: Option<&'a Arc<[u8]>>,
    /// `None` leaves the ttl as it is.
    pub ttl: Option<Duration>,
}

impl QuorumStore {
    pub fn read_value(&self, key: &Key, deadline: MonotonicTime) -> Outcome {
        let copy = self.read_latest(key, self.value_deadline(deadline))?;
        let value = copy.and_then(|copy| copy.value.clone());
        Ok(value.map_or(Reply::Missing, |value| Reply::Value(value.to_vec())))
    }

    pub fn write_value(&self, change: &Change<'_>, deadline: MonotonicTime) -> Outcome {
        let deadline = self.value_deadline(deadline);
        // If the first try takes effect late, the second one is the same version.
        let writer = id::random_number();
        for _ in 0..TRIES {
            if let Some(reply) = self.try_write(change, writer, deadline)? {
                return Ok(reply);
            }
        }
        let message = "nodes with later versions of the value come and go";
        Err(Error::new(ErrorKind::NoQuorum, message))
    }

    pub fn value_deadline(&self, deadline: MonotonicTime) -> MonotonicTime {
        let longest = self.quarantine / PART_OF_QUARANTINE;
        deadline.min(self.clock.now().after(longest))
    }

    /// Fails if the deadline has passed, since replies came late, or this process was stopped.
    fn check_in_time(&self, deadline: MonotonicTime) -> Result<(), Error> {
        if self.clock.now() < deadline {
            return Ok(());
        }
        let message = "the replies of the nodes came too late";
        Err(Error::new(ErrorKind::Timeout, message))
    }

    /// Writes a new version. Returns `None` if a node had a greater token, which has not reached a majority and is
    /// gone.
    fn try_write(
        &self,
        change: &Change<'_>,
        writer: u64,
        deadline: MonotonicTime,
    ) -> Result<Option<Reply>, Error> {
        let token = change.token;
        let mut outcomes = self.read_copies(change.key, Some(token), deadline)?;
        let last = latest(&outcomes);
        let version = match last.and_then(NodeCopy::version) {
            Some(last) if last.token > token => return self.refuse(change, deadline),
            last => Version {
                token,
                sequence: last
                    .filter(|last| last.token == token)
                    .map_or(0, |last| last.sequence + 1),
                writer,
            },
        };
        let ttl = change.ttl.or(last.and_then(|last| last.expires_in));
        let value = change.value.cloned();
        let copy = Arc::new(ValueCopy { version, value });
        self.write_copies(change.key, &copy, ttl, &mut outcomes, deadline);
        let is_of_token = |copy: &&NodeCopy| copy.version().is_some_and(|own| own.token == token);
        if keeping(&outcomes, version).filter(is_of_token).count() >= self.count.majority() {
            self.check_in_time(deadline)?;
            return Ok(Some(Reply::Done));
        }
        let greatest = latest(&outcomes).and_then(NodeCopy::version);
        if greatest.is_some_and(|greatest| greatest.token > token) {
            return self.refuse(change, deadline);
        }
        Err(self.no_majority(&outcomes))
    }

    /// The reply to a write after a greater token. A majority keeps the greater token from then on, so later writes and
    /// reads find it. `None` if it is gone, since it was on a minority only.
    fn refuse(&self, change: &Change<'_>, deadline: MonotonicTime) -> Result<Option<Reply>, Error> {
        let latest = self.read_latest(change.key, deadline)?;
        let token = latest.map(|copy| copy.version.token);
        let greater = token.filter(|token| *token > change.token);
        Ok(greater.map(|token| Reply::Stale { token }))
    }

    /// Reads the latest version, and makes a majority of the nodes keep it.
    pub fn read_latest(
        &self,
        key: &Key,
        deadline: MonotonicTime,
    ) -> Result<Option<Arc<ValueCopy>>, Error> {
        let mut outcomes = self.read_copies(key, None, deadline)?;
        let Some(last) = latest(&outcomes) else {
            return Ok(None);
        };
        let copy = last.stored.as_ref().map(|stored| stored.copy.clone());
        let copy = Arc::new(copy.expect("the latest copy has a version"));
        let is_kept =
            |outcomes: &[_]| keeping(outcomes, copy.version).count() >= self.count.majority();
        // Nodes that have lost the value get it back, even if a majority has it.
        let mut copies = outcomes.iter().filter_map(node_copy);
        if !is_kept(&outcomes) || copies.any(|own| !own.keeps(copy.version)) {
            let ttl = last.expires_in;
            self.write_copies(key, &copy, ttl, &mut outcomes, deadline);
        }
        if !is_kept(&outcomes) {
            return Err(self.no_majority(&outcomes));
        }
        self.check_in_time(deadline)?;
        Ok(Some(copy))
    }

    /// Reads copies until they include each version that a majority keeps. With `token`, versions with smaller tokens
    /// may be missing, and the values are not read.
    fn read_copies(
        &self,
        key: &Key,
        token: Option<u64>,
        deadline: MonotonicTime,
    ) -> Result<Vec<Option<Outcome>>, Error> {
        let read = Command::ReadCopy {
            key: key.clone(),
            with_value: token.is_none(),
        };
        let is_complete =
            |outcomes: &[_]| is_complete(self.count, outcomes, token, self.quarantine);
        let command = |_| read.clone();
        let outcomes = self.ask(&self.all(), command, deadline, |outcomes| {
            is_complete(outcomes).is_some()
        });
        match is_complete(&outcomes) {
            Some(true) => self.check_in_time(deadline).map(|()| outcomes),
            _ => Err(self.no_majority(&outcomes)),
        }
    }

    /// Writes a version to the nodes that do not keep it, and replaces their outcomes. Ends when a majority keeps it,
    /// or cannot keep it any more.
    fn write_copies(
        &self,
        key: &Key,
        copy: &Arc<ValueCopy>,
        ttl: Option<Duration>,
        outcomes: &mut [Option<Outcome>],
        deadline: MonotonicTime,
    ) {
        // Redis refuses a ttl of 0, which a value has in its last millisecond.
        let ttl = ttl.map(|ttl| ttl.max(SHORTEST_TTL));
        let write = |node: usize| Command::WriteCopy {
            key: key.clone(),
            copy: Arc::clone(copy),
            ttl,
            mark: node_copy(&outcomes[node]).map(|copy| copy.since),
        };
        let keeps = |outcome: &Option<Outcome>| {
            node_copy(outcome).is_some_and(|own| own.keeps(copy.version))
        };
        let mut lacking = self.all();
        lacking.retain(|node| !keeps(&outcomes[*node]));
        let keeping = outcomes.len() - lacking.len();
        let needed = self.count.majority().saturating_sub(keeping);
        let written = self.ask(&lacking, write, deadline, |written| {
            let kept = written.iter().filter(|one| keeps(one)).count();
            let pending = written.iter().filter(|one| one.is_none()).count();
            kept >= needed || kept + pending < needed
        });
        for (node, outcome) in lacking.into_iter().zip(written) {
            outcomes[node] = outcome;
        }
    }
}

fn node_copy(outcome: &Option<Outcome>) -> Option<&NodeCopy> {
    match outcome {
        Some(Ok(Reply::Copy(copy))) => Some(copy),
        _ => None,
    }
}

/// The latest version among the copies: one with a ttl, if a node knows it. After a loss of data, a client may have
/// written a version without the ttl of the copies that it has not seen.
fn latest(outcomes: &[Option<Outcome>]) -> Option<&NodeCopy> {
    let copies = outcomes.iter().filter_map(node_copy);
    let with_version = copies.filter(|copy| copy.version().is_some());
    with_version.max_by_key(|copy| (copy.version(), copy.expires_in.is_some()))
}

/// The copies of nodes that keep this version or a later one.
fn keeping(outcomes: &[Option<Outcome>], version: Version) -> impl Iterator<Item = &NodeCopy> {
    let copies = outcomes.iter().filter_map(node_copy);
    copies.filter(move |copy| copy.keeps(version))
}

/// Whether the copies include each version that a majority keeps. `None` if further replies decide.
///
/// A node may have lost a copy that it does not keep, so the other nodes of its majority have to reply: a majority of
/// nodes that have lost nothing, or all nodes. With `token`, a node is also counted if it can have lost smaller tokens
/// only.
fn is_complete(
    count: Count,
    outcomes: &[Option<Outcome>],
    token: Option<u64>,
    quarantine: Duration,
) -> Option<bool> {
    let has_lost_nothing = |copy: &&NodeCopy| {
        // No node stores a token that is later than its clock by more than a quarantine (lua/write_copy.lua).
        let lost = copy.since.saturating_add(quarantine.as_micros() as u64);
        copy.is_kept() || token.is_some_and(|token| micros_of(token) > lost)
    };
    let copies = || outcomes.iter().filter_map(node_copy);
    let counted = copies().filter(has_lost_nothing).count();
    let pending = outcomes.iter().filter(|one| one.is_none()).count();
    if counted >= count.majority() || copies().count() == outcomes.len() {
        return Some(true);
    }
    let may_be_all = copies().count() + pending == outcomes.len();
    (!may_be_all && counted + pending < count.majority()).then_some(false)
}

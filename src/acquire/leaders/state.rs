//! The state of an election that its users see.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::command::{LockAndValue, value};
use crate::util::id::HolderId;

/// The leader of an election, according to Redis. From [`Election::leader`](crate::Election::leader) and
/// [`LeaderState::Leader`].
///
/// ```
/// # let client = leasehold::Client::memory()?;
/// let election = client.election("scheduler");
/// let term = election.campaign("10.0.0.7:80")?;
/// let leader = election.leader()?.unwrap();
/// assert_eq!(leader.value(), Some(&b"10.0.0.7:80"[..]));
/// assert_eq!(leader.holder(), client.holder_id());
/// assert_eq!(leader.fencing_token(), term.fencing_token());
/// assert!(leader.expires_in().unwrap() <= std::time::Duration::from_secs(30));
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct LeaderInfo {
    pub(super) value: Option<Arc<[u8]>>,
    pub(super) holder: HolderId,
    pub(super) token: u64,
    pub(super) expires_in: Option<Duration>,
}

/// The example of [`LeaderInfo`] uses every method.
impl LeaderInfo {
    /// The value that the leader has proclaimed in this term. `None` before its first proclamation: a leader that
    /// waited for its term proclaims right after the grant. Also `None` if Redis has lost the value (by a `DEL` or an
    /// eviction, for example), until the leader proclaims again. Never returns the value of an earlier leader.
    pub fn value(&self) -> Option<&[u8]> {
        self.value.as_deref()
    }

    /// The client of the leader: `host/pid/random`.
    pub fn holder(&self) -> &HolderId {
        &self.holder
    }

    /// The fencing token of the term, which is greater than that of every earlier term.
    pub fn fencing_token(&self) -> u64 {
        self.token
    }

    /// The time until the term ends unless the leader's client renews it, counted from the reply of Redis.
    /// `None` if another program has removed the ttl.
    pub fn expires_in(&self) -> Option<Duration> {
        self.expires_in
    }

    /// The leader that a look has found. `None` if the lock is free, or if its holder was not elected: plain commands
    /// have granted the lock, so its value contains no token.
    pub(crate) fn new(found: LockAndValue) -> Option<Self> {
        let (lock, expires_in) = found.lock?;
        let granted = lock.token?;
        // Hand-offs within a client raise the low bits of the token. Redis does not see them.
        let of_term = |token: &u64| {
            *token >= granted && value::micros_of(*token) == value::micros_of(granted)
        };
        let proclaimed = found.token.filter(of_term);
        Some(Self {
            value: proclaimed.and(found.value).map(Arc::from),
            holder: lock.holder,
            token: proclaimed.unwrap_or(granted),
            expires_in,
        })
    }

    /// Whether this leader and the leader with `token` follow from one grant of Redis: the client has handed the lock
    /// off in between.
    pub(super) fn is_of_same_grant(&self, token: u64) -> bool {
        value::micros_of(self.token) == value::micros_of(token)
    }
}

impl fmt::Debug for LeaderInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LeaderInfo")
            .field("value", &self.value().map(String::from_utf8_lossy))
            .field("holder", &self.holder.as_str())
            .field("fencing_token", &self.token)
            .field("expires_in", &self.expires_in)
            .finish()
    }
}

/// The state of an election, as an [`Observer`](crate::Observer) reports it.
///
/// ```
/// # let client = leasehold::Client::memory()?;
/// use leasehold::LeaderState;
///
/// let election = client.election("scheduler");
/// let mut states = election.observe()?;
/// match states.next() {
///     Some(LeaderState::Leader(leader)) => println!("{} leads", leader.holder()),
///     Some(LeaderState::Vacant) => println!("there is no leader"),
///     Some(LeaderState::Unknown) => println!("Redis does not answer"),
///     None => println!("the client was shut down"),
/// }
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LeaderState {
    /// This client or another one leads.
    Leader(LeaderInfo),
    /// There is no leader.
    Vacant,
    /// Redis has not answered for one validity of the lock, so the leader may have changed. (An answer with an older
    /// state than a reported one does not count.) As the first state: the first read for this observer has failed. To
    /// learn the error, call [`Election::leader`](crate::Election::leader).
    Unknown,
}

impl LeaderState {
    /// Whether the two states differ at most in their ttl. Observers get only one of two such states.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Leader(one), Self::Leader(other)) => {
                let of = |info: &LeaderInfo| (info.token, info.holder.clone(), info.value.clone());
                of(one) == of(other)
            }
            _ => self == other,
        }
    }
}

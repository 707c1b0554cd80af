//! The commands of a store and their replies. Each command has a file with its arguments, its script, and what happens if
//! its reply is missing.

pub mod acquire;
pub mod adopt;
pub mod encoder;
pub mod fenced;
pub mod inspect;
pub mod keyspace;
#[path = "../../lua/parts.rs"]
pub mod parts;
pub mod release;
pub mod renew;
mod results;
pub mod script;
pub mod value;
pub mod vote;

use std::time::Duration;

use crate::command::encoder::Encoder;
use crate::command::keyspace::{Keyspace, Step};
use crate::command::script::Script;
use crate::command::value::LockValue;
use crate::config::Replicas;
use crate::config::key::Key;
use crate::report::error::Error;
use crate::report::loss::LossReason;
use crate::util::clock::MonotonicTime;
use crate::util::id::HolderId;

pub use acquire::{Acquire, FIRST_USUAL_PLACE, QueueMode, Queued, front_place};
pub use adopt::{Adopt, Adoption};
pub use fenced::{Read, Write};
pub use inspect::Inspect;
pub use release::{ForceUnlock, Held, Release};
pub use renew::Renew;
pub use vote::{Hold, Probe, Propose};

/// An operation on one key.
#[derive(Clone, Debug)]
pub enum Command {
    Acquire(Acquire),
    Propose(Propose),
    Hold(Hold),
    Release(Release),
    Renew(Renew),
    ForceUnlock(ForceUnlock),
    Adopt(Adopt),
    Inspect(Inspect),
    Write(Write),
    Read(Read),
    Probe(Probe),
    /// Does nothing. Its outcome comes after the outcomes of all earlier requests of its pipeline. Code above the store
    /// calls `Store::flush`.
    Flush,
}

/// All scripts, in the order in which a batch is written. Releases come before acquires, so a key that one batch releases
/// and acquires is free. Holds come before releases, since a hold sets a missing key.
pub static SCRIPTS: [&Script; 10] = [
    &vote::HOLD,
    &release::SCRIPT,
    &acquire::SCRIPT,
    &vote::PROPOSE,
    &renew::SCRIPT,
    &adopt::SCRIPT,
    &inspect::SCRIPT,
    &fenced::WRITE,
    &fenced::READ,
    &vote::PROBE,
];

/// The place of `script` in [`SCRIPTS`].
pub fn place(script: &Script) -> usize {
    let place = SCRIPTS.iter().position(|one| *one == script);
    place.expect("the table has each script")
}

/// A command that a script carries out.
pub trait Call {
    fn script(&self) -> &'static Script;

    fn key(&self) -> &Key;

    /// Whether the call has the key of the lock's queue, too.
    fn has_queue_key(&self) -> bool {
        false
    }

    /// Writes the arguments of the command, as many as the layout of the script says.
    fn arguments(&self, out: &mut Encoder<'_>, context: CallContext<'_>);

    /// Does what the script does, in the model of a server. Adds its notifications to `step`.
    fn model(&self, keyspace: &mut Keyspace, step: &mut Step<'_>) -> Outcome;

    /// The treatment of a request whose connection breaks before the reply. Redis may have carried the command out.
    fn if_unanswered(&self, _now: MonotonicTime) -> IfUnanswered {
        IfUnanswered::Repeat
    }
}

/// The arguments that all commands of a script call share.
#[derive(Clone, Copy)]
pub struct CallContext<'a> {
    pub holder: &'a HolderId,
    /// The length of a quarantine of a quorum's nodes.
    pub quarantine: Duration,
}

/// The treatment of a command that was written and got no reply.
pub enum IfUnanswered {
    /// The command is repeated.
    Repeat,
    /// The outcome is an error, and this release follows.
    Undo(Release),
    /// The outcome is an error.
    Report,
}

/// Evaluates `$do` with the [`Call`] in a command, or `$flush`.
macro_rules! with_call {
    ($command:expr, $call:ident => $do:expr, $flush:expr) => {
        match $command {
            Command::Acquire($call) => $do,
            Command::Propose($call) => $do,
            Command::Hold($call) => $do,
            Command::Release($call) => $do,
            Command::Renew($call) => $do,
            Command::ForceUnlock($call) => $do,
            Command::Adopt($call) => $do,
            Command::Inspect($call) => $do,
            Command::Write($call) => $do,
            Command::Read($call) => $do,
            Command::Probe($call) => $do,
            Command::Flush => $flush,
        }
    };
}

impl Command {
    /// The script that carries the command out; `None` for a flush.
    pub fn script(&self) -> Option<&'static Script> {
        with_call!(self, call => Some(call.script()), None)
    }

    /// The key; `None` for a flush.
    pub fn key(&self) -> Option<&Key> {
        with_call!(self, call => Some(call.key()), None)
    }

    /// As for [`Call`].
    pub fn has_queue_key(&self) -> bool {
        with_call!(self, call => call.has_queue_key(), false)
    }

    /// As for [`Call`].
    pub fn arguments(&self, out: &mut Encoder<'_>, context: CallContext<'_>) {
        with_call!(self, call => call.arguments(out, context), ());
    }

    /// As for [`Call`].
    pub fn if_unanswered(&self, now: MonotonicTime) -> IfUnanswered {
        with_call!(self, call => call.if_unanswered(now), IfUnanswered::Repeat)
    }

    /// As for [`Call`].
    pub fn model(&self, keyspace: &mut Keyspace, step: &mut Step<'_>) -> Outcome {
        with_call!(self, call => call.model(keyspace, step), Ok(Reply::Done))
    }

    /// The release, if this is one of a guard or an undo.
    pub fn as_release(&self) -> Option<&Release> {
        match self {
            Self::Release(release) => Some(release),
            _ => None,
        }
    }

    /// The replicas that have to acknowledge this command.
    pub fn replicas(&self) -> Option<Replicas> {
        match self {
            Self::Acquire(acquire) => acquire.replicas,
            Self::Renew(renew) => renew.replicas,
            Self::Adopt(adopt) => adopt.grant.replicas,
            _ => None,
        }
    }

    /// Whether this acquire may queue its lease, or its lease may be queued already.
    pub fn may_queue(&self) -> bool {
        matches!(self, Self::Acquire(acquire) if acquire.may_queue())
    }

    /// The release that undoes this acquire or adoption. Redis may have carried the command out, or may do so later.
    pub fn undo(&self, now: MonotonicTime) -> Option<Self> {
        match self.if_unanswered(now) {
            IfUnanswered::Undo(release) => Some(Self::Release(release)),
            _ => None,
        }
    }
}

/// The outcome of a command.
pub type Outcome = Result<Reply, Error>;

/// The reply to one command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reply {
    /// The caller's lease holds the key.
    Granted {
        /// The fencing token.
        token: u64,
        /// Whether the lock's value has the token.
        is_token_in_value: bool,
    },
    /// Another lease holds the key. It expires after `expires_in` unless its holder renews it.
    Contended {
        expires_in: Duration,
        queued: Option<Queued>,
    },
    /// No majority of a quorum's nodes granted the key, since several leases have asked for it at the same time.
    SplitVote {
        /// As for `Contended`.
        expires_in: Duration,
        /// So many nodes have refused that another lease may hold the key.
        may_be_taken: bool,
    },
    /// Released, renewed, written, flushed.
    Done,
    /// The key does not exist.
    Missing,
    /// The key was not released by force, since its holder would not be notified.
    NotListening {
        /// Nodes of a quorum have released it, but no majority.
        by_some: bool,
    },
    /// A node of a quorum may have lost data, and does not vote for this time. After a release, the lease has no key on
    /// the node.
    Abstained { for_another: Duration },
    /// The clock of a node of a quorum that votes, in µs.
    Clock { micros: u64 },
    /// A node of a quorum has got the request after the client has given it up, by the node's clock, which shows
    /// `micros`. Nothing was done.
    TooLate { micros: u64 },
    /// A node of a quorum refuses the token, which is later than its clock and its fence counter by more than a
    /// quarantine. Nothing was done.
    TooFarAhead,
    /// Another lease holds the key.
    Taken { by: Option<HolderId> },
    /// The caller's lease has the grant now.
    Adopted {
        expires_in: Duration,
        /// The token, which is greater than the ticket's token.
        token: u64,
    },
    /// The lock's value and its ttl; `None` for a key without a ttl.
    Found {
        value: Box<LockValue>,
        expires_in: Option<Duration>,
    },
    /// Nothing was written, since the value was written under this greater token before.
    Stale { token: u64 },
    /// A fenced value.
    Value(Vec<u8>),
}

impl Reply {
    /// A grant whose token the lock's value has.
    pub fn granted(token: u64) -> Self {
        Self::Granted {
            token,
            is_token_in_value: true,
        }
    }

    /// Why the lease is lost, if the reply to its release or renewal reports that another lease or none holds the key.
    pub fn loss(&self) -> Option<LossReason> {
        match self {
            Self::Missing => Some(LossReason::Deleted),
            Self::Taken { by } => Some(LossReason::TakenOver { by: by.clone() }),
            _ => None,
        }
    }

    /// Whether the command has given the caller's lease the key, or a ttl.
    pub fn is_success(&self) -> bool {
        matches!(
            self,
            Self::Granted { .. } | Self::Adopted { .. } | Self::Done
        )
    }
}

/// The message that grants a key to a waiter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GrantMessage {
    pub token: u64,
    /// The key has a short ttl until the waiter confirms the grant with an acquire.
    pub to_confirm: bool,
}

#[cfg(test)]
impl GrantMessage {
    /// The grant that tests and models use by default.
    pub const USUAL: Self = Self {
        token: 7,
        to_confirm: false,
    };
}

/// A command with its deadline and, once executed, its outcome.
#[derive(Debug)]
pub struct Request {
    pub command: Command,
    pub deadline: MonotonicTime,
    pub outcome: Option<Result<Reply, Error>>,
}

impl Request {
    pub fn new(command: Command, deadline: MonotonicTime) -> Self {
        Self {
            command,
            deadline,
            outcome: None,
        }
    }

    /// The outcome; every executed request has one.
    pub fn into_outcome(self) -> Result<Reply, Error> {
        self.outcome.expect("the store sets every outcome")
    }
}

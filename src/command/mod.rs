//! The commands of a store and their replies. The file of a command has its arguments, its script, and the treatment of
//! a request without a reply.

pub mod acquire;
pub mod adopt;
pub mod claim;
pub mod convert;
pub mod encoder;
pub mod fenced;
pub mod foreign;
pub mod inspect;
pub mod keyspace;
mod mode;
#[path = "../../lua/parts.rs"]
pub mod parts;
pub mod redisson;
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
use crate::config::other_library::OtherLibrary;
use crate::report::error::Error;
use crate::report::loss::LossReason;
use crate::util::clock::MonotonicTime;
use crate::util::id::{HolderId, LeaseId};

pub use acquire::{
    Acquire, FIRST_USUAL_PLACE, Link, QueueMode, QueuePlace, SetProgress, front_place, joined_at,
};
pub use adopt::{Adopt, Adoption};
pub use claim::{Claim, LockAndValue, Look};
pub use convert::Convert;
pub use fenced::{Read, Write};
pub use foreign::Foreign;
pub use inspect::{FoundShare, FoundShares, Inspect};
pub use mode::Mode;
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
    Convert(Convert),
    Inspect(Inspect),
    Write(Write),
    Read(Read),
    Claim(Claim),
    Look(Look),
    Probe(Probe),
    /// Does nothing. Its outcome comes after the outcomes of all earlier requests of its pipeline. `Store::flush` sends
    /// it.
    Flush,
    /// Does nothing. Its outcome comes after the replies to the releases of this key that its pipeline has written or
    /// queued before. An acquire of the key in another pipeline waits for it.
    Settle(Key),
}

/// All scripts, in the order in which a pipeline writes a batch. Releases come before acquires: if a batch releases a
/// key and acquires it, the acquire finds the key free. Holds come before releases: otherwise a hold could set a key
/// again that the same batch has released.
pub static SCRIPTS: [&Script; 12] = [
    &vote::HOLD,
    &release::SCRIPT,
    &acquire::SCRIPT,
    &vote::PROPOSE,
    &renew::SCRIPT,
    &adopt::SCRIPT,
    &convert::SCRIPT,
    &inspect::SCRIPT,
    &fenced::WRITE,
    &fenced::READ,
    &claim::SCRIPT,
    &vote::PROBE,
];

/// The script that carries out the commands of `usual` for a client beside another library.
pub fn script_beside(other: Option<OtherLibrary>, usual: &'static Script) -> &'static Script {
    match other {
        Some(OtherLibrary::PythonRedisLock) if usual == &release::SCRIPT => &release::WITH_SIGNAL,
        Some(OtherLibrary::Redisson { .. }) => redisson::script(usual),
        _ => usual,
    }
}

/// The index of `script` in [`SCRIPTS`].
pub fn place(script: &Script) -> usize {
    let place = SCRIPTS.iter().position(|one| *one == script);
    place.expect("the table has each script")
}

/// A command that a script carries out.
pub trait Call {
    fn script(&self) -> &'static Script;

    fn key(&self) -> &Key;

    /// Whether a call of the script also passes the key of the lock's queue.
    fn has_queue_key(&self) -> bool {
        false
    }

    /// The key of a fenced value, if the call also passes one.
    fn value_key(&self) -> Option<&Key> {
        None
    }

    /// Writes the arguments of the command. Their number is [`Layout::arguments`](script::Layout::arguments).
    fn arguments(&self, out: &mut Encoder<'_>, context: CallContext<'_>);

    /// Carries the command out in the model of a server, as the script does in Redis. Adds its notifications to `step`.
    fn model(&self, keyspace: &mut Keyspace, step: &mut Step<'_>) -> Outcome;

    /// Returns how the pipeline treats the command if the connection breaks before the reply. Redis may have carried
    /// the command out.
    fn if_unanswered(&self, _now: MonotonicTime) -> IfUnanswered {
        IfUnanswered::Repeat
    }
}

/// The arguments that a script call passes once for all of its commands.
#[derive(Clone, Copy)]
pub struct CallContext<'a> {
    pub holder: &'a HolderId,
    /// The library whose locks the client also excludes and waits for.
    pub other_library: Option<OtherLibrary>,
    /// How long a node of a quorum abstains if it may have lost its data (its quarantine). Only scripts of a quorum use
    /// it.
    pub quarantine: Duration,
}

impl CallContext<'_> {
    /// Whether the script is for Redisson's locks.
    fn is_for_redisson(&self) -> bool {
        self.other_library.is_some_and(OtherLibrary::is_redisson)
    }

    /// Writes a lease as the argument of a script: its id, or its field in a lock of Redisson.
    fn write_lease(&self, out: &mut Encoder<'_>, lease: LeaseId) {
        match self.is_for_redisson() {
            true => {
                let digits = &mut [0; LeaseId::DIGITS];
                out.parts(&redisson::field(lease.encode(digits), self.holder));
            }
            false => out.lease(lease),
        }
    }
}

/// How the pipeline treats a command that it has written and that got no reply.
pub enum IfUnanswered {
    /// Sends the command again.
    Repeat,
    /// Returns an error to the caller, and sends this release.
    Undo(Release),
    /// Returns an error to the caller.
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
            Command::Convert($call) => $do,
            Command::Inspect($call) => $do,
            Command::Write($call) => $do,
            Command::Read($call) => $do,
            Command::Claim($call) => $do,
            Command::Look($call) => $do,
            Command::Probe($call) => $do,
            Command::Flush | Command::Settle(_) => $flush,
        }
    };
}

impl Command {
    /// The script that carries the command out; `None` for a flush or a settle.
    pub fn script(&self) -> Option<&'static Script> {
        with_call!(self, call => Some(call.script()), None)
    }

    /// The key; `None` for a flush.
    pub fn key(&self) -> Option<&Key> {
        match self {
            Self::Settle(key) => Some(key),
            other => with_call!(other, call => Some(call.key()), None),
        }
    }

    /// See [`Call::has_queue_key`].
    pub fn has_queue_key(&self) -> bool {
        with_call!(self, call => call.has_queue_key(), false)
    }

    /// See [`Call::value_key`].
    pub fn value_key(&self) -> Option<&Key> {
        with_call!(self, call => call.value_key(), None)
    }

    /// See [`Call::arguments`].
    pub fn arguments(&self, out: &mut Encoder<'_>, context: CallContext<'_>) {
        with_call!(self, call => call.arguments(out, context), ());
    }

    /// See [`Call::if_unanswered`].
    pub fn if_unanswered(&self, now: MonotonicTime) -> IfUnanswered {
        with_call!(self, call => call.if_unanswered(now), IfUnanswered::Repeat)
    }

    /// See [`Call::model`].
    pub fn model(&self, keyspace: &mut Keyspace, step: &mut Step<'_>) -> Outcome {
        with_call!(self, call => call.model(keyspace, step), Ok(Reply::Done))
    }

    /// The release in this command. `None` for all other commands, also for a `ForceUnlock`.
    pub fn as_release(&self) -> Option<&Release> {
        match self {
            Self::Release(release) => Some(release),
            _ => None,
        }
    }

    /// Whether this command ends a lease.
    pub fn ends_lease(&self) -> bool {
        matches!(self, Self::Release(_) | Self::ForceUnlock(_))
    }

    /// Converts the reply to a repeat of this command. The earlier attempt got no reply, and may have ended the lease.
    /// In any case, a missing lease no longer holds the key.
    pub fn reply_to_repeat(&self, reply: Reply) -> Reply {
        match reply {
            Reply::Missing | Reply::Taken { .. } if self.ends_lease() => Reply::Done,
            reply => reply,
        }
    }

    /// Makes a release report no loss: an earlier attempt got no reply, and may have ended the lease.
    pub fn report_no_loss(&mut self) {
        if let Self::Release(Release {
            held: Some(held), ..
        }) = self
        {
            held.valid_until = MonotonicTime::now();
        }
    }

    /// The replicas that have to acknowledge this command.
    pub fn replicas(&self) -> Option<Replicas> {
        match self {
            Self::Acquire(acquire) => acquire.replicas,
            Self::Renew(renew) => renew.replicas,
            Self::Adopt(adopt) => adopt.grant.replicas,
            Self::Convert(convert) => convert.replicas,
            Self::Claim(claim) => claim.replicas,
            _ => None,
        }
    }

    /// Whether this is an acquire that may leave its lease in the queue in Redis.
    pub fn may_queue(&self) -> bool {
        matches!(self, Self::Acquire(acquire) if acquire.may_queue())
    }

    /// Whether this is an acquire that gives the keys of its set back if its own key is taken.
    pub fn gives_set_back(&self) -> bool {
        matches!(self, Self::Acquire(acquire) if acquire.link == Link::NextOrNone)
    }

    /// The release that undoes this command, if it is an acquire, an adoption or a conversion.
    pub fn undo(&self, now: MonotonicTime) -> Option<Release> {
        match self.if_unanswered(now) {
            IfUnanswered::Undo(release) => Some(release),
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
        /// Whether the lock's value contains the token. Plain commands write the value before they know the token.
        is_token_in_value: bool,
    },
    /// Another lease holds the key. The key expires after `expires_in` unless its holder renews it.
    Contended {
        expires_in: Duration,
        queued: Option<QueuePlace>,
        /// Set if leases share the key: the limit of the newest permit, or 0 for readers.
        shared: Option<u32>,
    },
    /// The script has skipped the acquire, or has undone it: the same call has not granted another key of its set. The
    /// key is as before.
    Skipped,
    /// No lease got the votes of a majority of a quorum's nodes, because several leases asked for the key at the same
    /// time.
    SplitVote {
        /// After this time, a majority of the nodes is free again, unless a holder renews the key.
        expires_in: Duration,
        /// Whether a majority of the nodes has refused the key, so that another lease may hold it.
        may_be_taken: bool,
    },
    /// The release, renewal, write or flush was carried out.
    Done,
    /// The key does not exist.
    Missing,
    /// The holder of the key does not listen for notifications, so the key was not released by force.
    NotListening {
        /// Some nodes of a quorum have released the key, but no majority has.
        by_some: bool,
    },
    /// A node of a quorum may have lost data, and does not vote for this time. As the reply to a release: the node does
    /// not have the lease's key.
    Abstained { for_another: Duration },
    /// The clock of a quorum's node that votes, in µs.
    Clock { micros: u64 },
    /// The request reached a node of a quorum after the client had stopped waiting for it. The node did nothing. Its
    /// clock shows `micros`.
    TooLate { micros: u64 },
    /// The token in the request is too far ahead: more than a quarantine later than both the clock and the fence
    /// counter of the quorum's node. The node did nothing.
    TooFarAhead,
    /// Another lease holds the key.
    Taken { by: Option<HolderId> },
    /// Another library holds the key. Only for a client with [`Builder::compatible_with`](crate::Builder).
    Foreign(Foreign),
    /// The adoption has moved the grant to the caller's lease.
    Adopted {
        expires_in: Duration,
        /// The new token. It is greater than the ticket's token.
        token: u64,
    },
    /// The lock's value and its ttl. The ttl is `None` if the key has none.
    Found {
        value: Box<LockValue>,
        expires_in: Option<Duration>,
    },
    /// Leases share the key.
    Shared(Box<FoundShares>),
    /// Nothing was written, since the value was written under this greater token before.
    Stale { token: u64 },
    /// A fenced value.
    Value(Vec<u8>),
    /// The state of a lock and its fenced value: the reply to a look, and to a claim without a grant.
    LockAndValue(Box<LockAndValue>),
}

impl Reply {
    /// A grant whose token is in the lock's value.
    pub fn granted(token: u64) -> Self {
        Self::Granted {
            token,
            is_token_in_value: true,
        }
    }

    /// Another lease holds the key alone, for `expires_in`. The caller's lease is not queued.
    pub fn contended(expires_in: Duration) -> Self {
        Self::Contended {
            expires_in,
            queued: None,
            shared: None,
        }
    }

    /// The reason of a loss, if this reply to a release or renewal reports that the caller's lease does not hold the
    /// key.
    pub fn loss(&self) -> Option<LossReason> {
        match self {
            Self::Missing => Some(LossReason::Deleted),
            Self::Taken { by } => Some(LossReason::TakenOver { by: by.clone() }),
            _ => None,
        }
    }

    /// Whether the caller's lease holds the key after this reply to an acquire, adoption, conversion or renewal.
    pub fn is_success(&self) -> bool {
        matches!(
            self,
            Self::Granted { .. } | Self::Adopted { .. } | Self::Done
        )
    }
}

/// The content of a message by which Redis grants a key to a waiter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GrantMessage {
    pub token: u64,
    /// Whether the waiter has to confirm the grant with an acquire. Until then, the key has a short ttl.
    pub to_confirm: bool,
}

#[cfg(test)]
impl GrantMessage {
    /// A grant for tests and models.
    pub const USUAL: Self = Self {
        token: 7,
        to_confirm: false,
    };
}

/// A command with its deadline. After the command was executed, also has its outcome.
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

    /// The outcome of a request that was executed.
    pub fn into_outcome(self) -> Result<Reply, Error> {
        self.outcome.expect("the store sets every outcome")
    }
}

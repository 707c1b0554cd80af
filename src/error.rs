//! What can go wrong, as callers see it: one opaque type with a kind. Never holds a password.

use std::fmt;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::sync::Arc;

use crate::loss::LossReason;
use crate::util::text::printable;

/// Longer messages are cut. In bytes.
const LONGEST_MESSAGE: usize = 500;

/// What went wrong. Match on [`Error::kind`]; more kinds may come.
///
/// ```
/// # use leasehold::{Client, ErrorKind};
/// let refused = Client::open("http://127.0.0.1:6379").unwrap_err();
/// assert_eq!(refused.kind(), ErrorKind::InvalidConfig);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
#[non_exhaustive]
pub enum ErrorKind {
    /// Redis could not be reached, or says that it cannot serve now (loading, read-only replica,
    /// out of memory). Never means that the lock is taken.
    Unavailable,
    /// Redis was asked and gave no answer in time: the outcome is unknown. What the request may
    /// have taken is given back in the background. Never means that the lock is taken.
    Timeout,
    /// Redis refuses this client: wrong password, missing permission.
    Denied,
    /// The lock that was to be adopted is not held under that ticket: it was adopted before, has
    /// expired, or was let go by force. Also where the answer to a first try was lost, and what that had
    /// adopted has been given back.
    NotHeld,
    /// What was to be adopted is no ticket, or is one for other settings; the message says why.
    InvalidTicket,
    /// A fenced value was written under a greater token before. Nothing was changed.
    StaleToken,
    /// The lock was lost before it was let go: somebody else may have had it meanwhile.
    LeaseLost,
    /// The wait for the lock was given up, as [`Mutex::cancelled_by`](crate::Mutex::cancelled_by)
    /// asked for.
    Cancelled,
    /// A transaction was tried again and again, and each time somebody had changed what it is_tracked.
    /// Nothing was written, and the lock is still held.
    Conflict,
    /// The client was shut down.
    Shutdown,
    /// The client was made before a fork, and this is the child: its threads are not here, and its
    /// connections are the parent's, which still holds what it held. Or a client was to be made in a
    /// child whose parent had clients when it forked: fork before the first client is made or after the
    /// last one was dropped, or call `exec`. (A fork copies what the parent's sleeping threads left in
    /// parking_lot's table of them; a new client's threads would trip over that.)
    Forked,
    /// What cannot be done here: a transaction without a Redis to do it, or with a command in it that
    /// would end it. Nothing was written.
    Unsupported,
    /// A setting is out of its bounds; the message names the field and the value given.
    InvalidConfig,
    /// The key of a lock is empty, too long, begins with `~`, contains `~fence`, `~queue:`, `~value:` or `~to:`, or
    /// holds control characters.
    InvalidKey,
    /// A reply holds more of the caller's values than [`Builder::max_reply_bytes`](crate::Builder::max_reply_bytes)
    /// allows; the message says how much that is.
    TooLarge,
    /// Something that is not ours: a foreign value under the key of a lock, or a server that does
    /// not speak Redis' protocol. It is left untouched. Also a command of a transaction that Redis
    /// refuses for what it found.
    Protocol,
}

impl ErrorKind {
    fn describe(self) -> &'static str {
        match self {
            Self::Unavailable => "Redis is unavailable",
            Self::Timeout => "no answer from Redis in time, the outcome is unknown",
            Self::Denied => "Redis denies access",
            Self::NotHeld => "the lock is not held",
            Self::InvalidTicket => "invalid ticket",
            Self::StaleToken => "the fencing token is too old",
            Self::LeaseLost => "the lock was lost",
            Self::Cancelled => "the wait was cancelled",
            Self::Conflict => "others keep changing what is tracked",
            Self::Shutdown => "the client is shut down",
            Self::Forked => "the client is another process's",
            Self::Unsupported => "not supported",
            Self::InvalidConfig => "invalid configuration",
            Self::InvalidKey => "invalid key",
            Self::TooLarge => "the reply is too large",
            Self::Protocol => "unexpected data",
        }
    }
}

/// The error of every fallible call of this crate.
///
/// Opaque, so that it can grow: ask [`kind`](Error::kind), [`key`](Error::key), or the predicates.
/// `Display` is one line for a log; `source()` leads to what the network or Redis said. Control characters in text
/// of others are escaped, and long text is cut.
///
/// ```
/// # use leasehold::Client;
/// let error = Client::builder("redis://127.0.0.1:6379")
///     .ttl(std::time::Duration::ZERO)
///     .build()
///     .unwrap_err();
/// assert_eq!(error.to_string(), "invalid configuration: ttl must be 10ms to 86400s, not 0ns");
/// ```
///
/// ```
/// # let server = leasehold_testbed::Server::start().unwrap();
/// # let client = leasehold::Client::open(&server.url())?;
/// use leasehold::{ErrorKind, LossReason};
///
/// let guard = client.mutex("invoice:42").lock()?;
/// client.shutdown(std::time::Duration::from_secs(2))?;
/// let error = guard.unlock().unwrap_err();
/// assert_eq!(error.kind(), ErrorKind::LeaseLost);
/// assert_eq!(error.key(), Some("invoice:42"));
/// assert_eq!(error.loss_reason(), Some(&LossReason::Shutdown));
/// assert!(error.is_lease_lost() && !error.is_unavailable());
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone)]
pub struct Error(Box<Repr>);

#[derive(Clone)]
struct Repr {
    kind: ErrorKind,
    message: String,
    key: Option<Box<str>>,
    reason: Option<LossReason>,
    source: Option<Arc<dyn std::error::Error + Send + Sync>>,
}

/// Every method can be seen in use in the examples of [`Error`].
impl Error {
    /// The kind of this error.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The key of the lock that was asked for, where there was one. For [`ErrorKind::InvalidKey`], its control
    /// characters are escaped, and it is cut after 32 bytes.
    pub fn key(&self) -> Option<&str> {
        self.0.key.as_deref()
    }

    /// Why the lock was lost, for [`ErrorKind::LeaseLost`].
    pub fn loss_reason(&self) -> Option<&LossReason> {
        self.0.reason.as_ref()
    }

    /// The lock was lost before it was let go.
    pub fn is_lease_lost(&self) -> bool {
        self.0.kind == ErrorKind::LeaseLost
    }

    /// Redis could not be asked, or did not answer: trying again later may help.
    pub fn is_unavailable(&self) -> bool {
        matches!(self.0.kind, ErrorKind::Unavailable | ErrorKind::Timeout)
    }

    /// Makes the message [`printable`], since it may hold text of others.
    pub(crate) fn new(kind: ErrorKind, message: impl AsRef<str>) -> Self {
        Self(Box::new(Repr {
            kind,
            message: printable(message.as_ref(), LONGEST_MESSAGE).into_owned(),
            key: None,
            reason: None,
            source: None,
        }))
    }

    pub(crate) fn invalid(field: &str, wanted: &str, given: impl fmt::Display) -> Self {
        Self::new(
            ErrorKind::InvalidConfig,
            format!("{field} must be {wanted}, not {given}"),
        )
    }

    pub(crate) fn lost(reason: LossReason) -> Self {
        let mut error = Self::new(ErrorKind::LeaseLost, reason.to_string());
        error.0.reason = Some(reason);
        error
    }

    pub(crate) fn with_key(mut self, key: &str) -> Self {
        self.0.key = Some(key.into());
        self
    }

    pub(crate) fn with_source(
        mut self,
        source: impl std::error::Error + Send + Sync + 'static,
    ) -> Self {
        self.0.source = Some(Arc::new(source));
        self
    }
}

// The source is only shown, never changed.
impl UnwindSafe for Error {}
impl RefUnwindSafe for Error {}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.kind.describe())?;
        match &self.0.key {
            // Escaped already.
            Some(key) if self.0.kind == ErrorKind::InvalidKey => write!(f, " (\"{key}\")")?,
            Some(key) => write!(f, " ({key:?})")?,
            None => {}
        }
        if self.0.message.is_empty() {
            return Ok(());
        }
        write!(f, ": {}", self.0.message)
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = f.debug_struct("Error");
        out.field("kind", &self.0.kind)
            .field("message", &self.0.message);
        if let Some(key) = &self.0.key {
            out.field("key", key);
        }
        if let Some(source) = &self.0.source {
            out.field("source", source);
        }
        out.finish()
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match &self.0.source {
            Some(source) => Some(&**source),
            None => None,
        }
    }
}

//! The error type of the crate: opaque, with a kind. An error never contains a password.

use std::fmt;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::sync::Arc;

use crate::report::loss::LossReason;
use crate::util::slot::Redirect;
use crate::util::text::printable;

/// The longest message, in bytes. Longer messages are cut.
const LONGEST_MESSAGE: usize = 500;
/// The longest message of [`ErrorKind::NoQuorum`]: it has the answers of up to nine nodes.
const LONGEST_NO_QUORUM: usize = 2_000;

/// The kind of an [`Error`], from [`Error::kind`]. More kinds may be added.
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
    /// Redis could not be reached, or cannot serve requests now (loading, read-only replica, out of memory), or too few
    /// [replicas](crate::Builder::replicas) acknowledged. This kind does not mean that the lock has another holder.
    Unavailable,
    /// Redis did not reply in time, so the outcome of the request is unknown. If the request acquired the lock, the
    /// client releases it later. This kind does not mean that the lock has another holder.
    Timeout,
    /// Fewer than a majority of the nodes of a [quorum](crate::Client::quorum) agreed in time. The message contains the
    /// answer of each node: an error, no reply, that the lock is held, or that the node may have lost its data and does
    /// not vote yet. If the request was to acquire the lock, the client releases it on each node that may have it. This
    /// kind does not mean that a majority reports another holder.
    NoQuorum,
    /// Redis refuses this client: a wrong password, or a missing permission.
    Denied,
    /// The TLS handshake failed: the server's certificate is not accepted (expired, of an unknown issuer, for another
    /// name), the server refuses the client's certificate, or one side does not use TLS. The message names the case.
    Tls,
    /// The lock of a ticket is not held under that ticket: it was adopted before, has expired, or was unlocked by
    /// force. Also returned after an adoption whose reply was lost, since the client has released that lock.
    NotHeld,
    /// The text is not a ticket, or the ticket does not fit the client's settings. The message has the reason.
    InvalidTicket,
    /// A fenced value was written with a greater token before. The value stays as it is.
    StaleToken,
    /// The lock was lost before it was released. Another holder may have had the lock since.
    LeaseLost,
    /// The wait for the lock was cancelled through [`Mutex::cancelled_by`](crate::Mutex::cancelled_by).
    Cancelled,
    /// In each of 100 tries of a transaction, a watched key had changed. The transaction was not written, and the lock
    /// is still held.
    Conflict,
    /// The client was shut down.
    Shutdown,
    /// This process is a fork, and its parent made the client. The child has none of the client's threads, and the
    /// connections belong to the parent, which still holds its locks.
    ///
    /// Also returned if this process tries to make a client, and its parent had clients at the fork: the fork has
    /// copied parking_lot's table of the parent's sleeping threads, which would break a new client. So fork before the
    /// first client is made, fork after the last client was dropped, or call `exec`.
    Forked,
    /// On a Cluster, a key of a transaction has another slot than the lock's key. The transaction was not written. Give
    /// both keys the same hash tag: `{user1}:cart` and `{user1}:orders`.
    CrossSlot,
    /// The operation is not supported. The call had no effect, or its effect is undone. The operation is one of these:
    ///
    /// - a transaction on a memory store, or a transaction with a command that would end it;
    /// - anything but a plain lock on a [quorum](crate::Client::quorum), such as a transaction, a fenced value, a
    ///   ticket or a semaphore;
    /// - with [`Builder::compatible_with`](crate::Builder::compatible_with), a call that the page on
    ///   [other libraries](crate::guide::other_libraries) lists as unsupported;
    /// - a call that needs a command that the server, or a proxy, does not know, such as `WAIT` for
    ///   [`Builder::replicas`](crate::Builder::replicas).
    Unsupported,
    /// A setting is out of bounds. The message names the field and the value.
    InvalidConfig,
    /// The key of a lock is empty or too long, begins with `~`, or contains control characters or one of `~fence`,
    /// `~data`, `~queue:`, `~queue{`, `~value:`, `~value{` and `~to:`. Or, for a client on a Cluster that is compatible
    /// with Redisson's fenced locks, the braces in the key give the lock's counter another slot.
    InvalidKey,
    /// A reply with the caller's values is longer than [`Builder::max_reply_bytes`](crate::Builder::max_reply_bytes)
    /// allows. The message names that limit.
    TooLarge,
    /// Unexpected data, in one of three cases:
    ///
    /// - The key of a lock has a value that this library did not write. The library leaves the value as it is. If the
    ///   value is the lock of another library, see [`Builder::compatible_with`](crate::Builder::compatible_with).
    /// - The server does not speak Redis' protocol.
    /// - A command of a transaction fails on the data in Redis.
    Protocol,
}

impl ErrorKind {
    fn describe(self) -> &'static str {
        match self {
            Self::Unavailable => "Redis is unavailable",
            Self::Timeout => "no reply from Redis in time, the outcome is unknown",
            Self::NoQuorum => "no majority of the nodes agrees",
            Self::Denied => "Redis denies access",
            Self::Tls => "no TLS connection",
            Self::NotHeld => "the lock is not held",
            Self::InvalidTicket => "invalid ticket",
            Self::StaleToken => "the fencing token is too old",
            Self::LeaseLost => "the lock was lost",
            Self::Cancelled => "the wait was cancelled",
            Self::Conflict => "other clients keep changing the watched keys",
            Self::Shutdown => "the client is shut down",
            Self::Forked => "the client belongs to another process",
            Self::CrossSlot => "keys of several slots",
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
/// The type is opaque: use [`kind`](Error::kind), [`key`](Error::key) and the predicates. `Display` is one line for a
/// log. `source()` returns the error of the network, of TLS or of Redis, unless its text is in `Display` already.
/// Control characters in text of other users are escaped, and long text is cut.
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
    /// Why a node of a Cluster refused the request. Boxed, since few errors have one.
    redirect: Option<Box<Redirect>>,
    /// See [`Error::is_lasting`].
    is_lasting: bool,
    /// See [`Error::is_of_repeat`].
    is_of_repeat: bool,
}

/// The examples of [`Error`] use every method.
impl Error {
    /// The kind of this error.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The key of the lock or value that the call asked for, if the call had a key. For [`ErrorKind::InvalidKey`], the
    /// key's control characters are escaped, and the key is cut after 32 bytes.
    pub fn key(&self) -> Option<&str> {
        self.0.key.as_deref()
    }

    /// Why the lock was lost, for [`ErrorKind::LeaseLost`].
    pub fn loss_reason(&self) -> Option<&LossReason> {
        self.0.reason.as_ref()
    }

    /// Whether the lock was lost before it was released.
    pub fn is_lease_lost(&self) -> bool {
        self.0.kind == ErrorKind::LeaseLost
    }

    /// Whether Redis, or a majority of the nodes of a quorum, could not be reached or did not reply. A later retry may
    /// succeed.
    pub fn is_unavailable(&self) -> bool {
        use ErrorKind::{NoQuorum, Timeout, Unavailable};
        matches!(self.0.kind, Unavailable | Timeout | NoQuorum)
    }

    /// An error whose message is made [`printable`], since it may contain text of other users.
    pub(crate) fn new(kind: ErrorKind, message: impl AsRef<str>) -> Self {
        let longest = match kind {
            ErrorKind::NoQuorum => LONGEST_NO_QUORUM,
            _ => LONGEST_MESSAGE,
        };
        Self(Box::new(Repr {
            kind,
            message: printable(message.as_ref(), longest).into_owned(),
            key: None,
            reason: None,
            source: None,
            redirect: None,
            is_lasting: false,
            is_of_repeat: false,
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

    /// The error of a request that begins after the end of its client.
    pub(crate) fn client_ended() -> Self {
        Self::new(ErrorKind::Unavailable, "the client has ended")
    }

    /// The message after the text of the kind, without the key.
    pub(crate) fn message(&self) -> &str {
        &self.0.message
    }

    /// Whether the message names the server at this address.
    pub(crate) fn names(&self, address: &str) -> bool {
        self.0.message.contains(address)
    }

    /// Puts `place`, an address or the number of a node, before the message.
    pub(crate) fn at(mut self, place: &str) -> Self {
        self.0.message = format!("{place}: {}", self.0.message);
        self
    }

    /// Puts `more` behind the message.
    pub(crate) fn followed_by(mut self, more: &str) -> Self {
        self.0.message = format!("{}; {more}", self.0.message);
        self
    }

    pub(crate) fn with_key(mut self, key: &str) -> Self {
        self.0.key = Some(key.into());
        self
    }

    /// Adds `key`, unless the error has a key.
    pub(crate) fn or_with_key(self, key: &str) -> Self {
        match self.key() {
            Some(_) => self,
            None => self.with_key(key),
        }
    }

    /// Takes over the source of `other`.
    pub(crate) fn with_source_of(mut self, other: &Self) -> Self {
        self.0.source.clone_from(&other.0.source);
        self
    }

    /// Adds the reason for which a node of a Cluster refused the request.
    pub(crate) fn with_redirect(mut self, redirect: Option<Redirect>) -> Self {
        self.0.redirect = redirect.map(Box::new);
        self
    }

    /// The reason for which a node of a Cluster refused the request. The node did not carry out the request.
    pub(crate) fn redirect(&self) -> Option<&Redirect> {
        self.0.redirect.as_deref()
    }

    /// Marks the error as that of a repeat: see [`is_of_repeat`](Self::is_of_repeat).
    pub(crate) fn of_repeat(mut self) -> Self {
        self.0.is_of_repeat = true;
        self
    }

    /// Whether this is the error of a release whose earlier attempt got no reply. Redis may have carried out that
    /// attempt.
    pub(crate) fn is_of_repeat(&self) -> bool {
        self.0.is_of_repeat
    }

    /// Marks the error as lasting: see [`is_lasting`](Self::is_lasting).
    pub(crate) fn lasting(mut self) -> Self {
        self.0.is_lasting = true;
        self
    }

    /// Whether another attempt to connect within the connect time-out would fail with the same error.
    pub(crate) fn is_lasting(&self) -> bool {
        self.0.is_lasting
    }

    pub(crate) fn with_source(
        mut self,
        source: impl std::error::Error + Send + Sync + 'static,
    ) -> Self {
        self.0.source = Some(Arc::new(source));
        self
    }
}

// An error only shows its source, and never changes it.
impl UnwindSafe for Error {}
impl RefUnwindSafe for Error {}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0.kind.describe())?;
        match &self.0.key {
            // This key is escaped already.
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

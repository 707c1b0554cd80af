//! A value in Redis that refuses writes under an old fencing token. Sends requests through the client only.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::client::Client;
use crate::command::{Command, Read, Reply, Write};
use crate::config::key::Key;
use crate::locks::mutex::MutexGuard;
use crate::report::error::{Error, ErrorKind};
use crate::report::event::EventLock;
use crate::report::loss::LossReason;
use crate::util::backoff::{Backoff, jittered};

/// A value in Redis that accepts a write only if its fencing token is not smaller than the token of the last write.
/// From [`Client::fenced_value`].
///
/// A holder that lost its lock, and has not noticed yet, cannot overwrite the data of the next holder, since the next
/// holder's token is greater. For data in a database, compare the tokens in the statement that writes:
///
/// ```sql
/// UPDATE invoice SET total = :total, token = :token WHERE id = 42 AND token <= :token
/// ```
///
/// If one row changed, the write was accepted. If no row changed, a holder with a greater token wrote before.
///
/// Redis stores the value as the hash `<prefix>~value:<key>` with the fields `token` and `value`. The value stays until
/// you delete it, unless you give it a [`ttl`](Self::ttl).
///
/// On a [quorum](Client::quorum), every call fails with [`Unsupported`](ErrorKind::Unsupported), without a request.
/// Take the token from the lock on the quorum, and write the value where one server compares it: in the database that
/// has the data, or as the fenced value of a client of one server.
///
/// ```
/// # let server = leasehold_testbed::Server::start().unwrap();
/// # let client = leasehold::Client::open(&server.url())?;
/// use leasehold::ErrorKind;
///
/// let total = client.fenced_value("invoice:42");
/// let before = client.mutex("invoice:42").with(|guard| guard.fencing_token())?;
/// let guard = client.mutex("invoice:42").lock()?;
/// total.write(guard.fencing_token(), "17")?;
///
/// // A write of the earlier holder comes late:
/// let refused = total.write(before, "0").unwrap_err();
/// assert_eq!(refused.kind(), ErrorKind::StaleToken);
/// assert_eq!(total.read()?.as_deref(), Some(b"17".as_slice()));
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone)]
#[must_use = "a fenced value does nothing until it is read or written"]
pub struct FencedValue {
    pub(crate) client: Client,
    pub(crate) key: Result<Key, Error>,
    ttl: Option<Duration>,
}

/// The pauses between attempts to write a value while Redis is away.
const FIRST_PAUSE: Duration = Duration::from_millis(5);
const LONGEST_PAUSE: Duration = Duration::from_millis(250);

/// The bounds of a value's ttl.
pub const MIN_TTL: Duration = Duration::from_millis(10);
pub const MAX_TTL: Duration = Duration::from_secs(10 * 365 * 24 * 60 * 60);

/// The example of [`FencedValue`] uses every method that has no example of its own.
impl FencedValue {
    pub(crate) fn new(client: Client, key: &str) -> Self {
        let config = &client.config();
        let key = Key::for_value(config.layout, &config.prefix, key, config.max_key_bytes);
        Self {
            client,
            key,
            ttl: None,
        }
    }

    /// Sets a ttl: after each [`write`](Self::write) and [`delete`](Self::delete), Redis keeps the value for `ttl`.
    /// 10 ms to ten years; with another ttl, writes fail with `InvalidConfig`. Without this setting, a write leaves the
    /// ttl as it is, and a new value has no ttl. This call does no I/O. Writes with a ttl need the right to `pexpire`.
    ///
    /// **The last token expires with the value.** After that, Redis accepts a write under any token, even from a holder
    /// that lost its lock long ago. So choose a ttl that is longer than a holder can be late: hours or days, if its
    /// locks last for seconds.
    ///
    /// ```
    /// # let memory = leasehold::MemoryStore::new();
    /// # let client = memory.client()?;
    /// use std::time::Duration;
    ///
    /// let day = Duration::from_secs(24 * 60 * 60);
    /// let session = client.fenced_value("session:42").ttl(day);
    /// session.write(7, "open")?;
    /// memory.advance(day + Duration::from_secs(1));
    /// assert_eq!(session.read()?, None);
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn ttl(mut self, ttl: Duration) -> Self {
        self.ttl = Some(ttl);
        self
    }

    /// Writes `value` if `fencing_token` is not smaller than the last token. Redis compares and writes in one atomic
    /// step.
    ///
    /// # Errors
    /// - `StaleToken` if the value was written or deleted under a greater token before. The value stays as it is. Each
    ///   such error is also an event ([`EventHandler::write_refused`](crate::EventHandler::write_refused)), since it
    ///   proves that another holder has run.
    /// - `Timeout` and `Unavailable`: it is unknown whether the value was written, or will be. The client never repeats
    ///   a write, even if an idle connection turns out to be closed. You may write the same value again under the same
    ///   token, which does no harm.
    /// - `Protocol` if the key in Redis has a value that is not a fenced value.
    /// - `Unsupported` on a [quorum](Client::quorum).
    /// - `Denied`, `Shutdown`, `Forked`, `InvalidKey`, `InvalidConfig`: the value stays as it is.
    pub fn write(&self, fencing_token: u64, value: impl AsRef<[u8]>) -> Result<(), Error> {
        self.change(fencing_token, Some(value.as_ref().into()))
    }

    /// Deletes the value if `fencing_token` is not smaller than the last token. Redis compares and deletes in one
    /// atomic step. Also stores the token if there is no value.
    ///
    /// The token stays in Redis, in about a hundred bytes: writes and deletions under smaller tokens are then
    /// refused, as after a write. `DEL` in Redis itself, or a [`ttl`](Self::ttl), removes the token as well.
    ///
    /// # Errors
    /// The errors of [`write`](Self::write). Repeating this call under the same token does no harm. If a user has the
    /// right to write but not the right to `hdel`, this call fails with `Denied`: the value stays, with the new token.
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// use leasehold::ErrorKind;
    ///
    /// let total = client.fenced_value("invoice:42");
    /// let before = client.mutex("invoice:42").with(|guard| guard.fencing_token())?;
    /// let guard = client.mutex("invoice:42").lock()?;
    /// total.write(guard.fencing_token(), "17")?;
    /// total.delete(guard.fencing_token())?;
    /// assert_eq!(total.read()?, None);
    ///
    /// // A write of the earlier holder comes late:
    /// let refused = total.write(before, "0").unwrap_err();
    /// assert_eq!(refused.kind(), ErrorKind::StaleToken);
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn delete(&self, fencing_token: u64) -> Result<(), Error> {
        self.change(fencing_token, None)
    }

    fn change(&self, fencing_token: u64, value: Option<Arc<[u8]>>) -> Result<(), Error> {
        let key = self.key.clone()?;
        if let Some(ttl) = self.ttl
            && !(MIN_TTL..=MAX_TTL).contains(&ttl)
        {
            let wanted = "10 ms to ten years";
            let error = Error::invalid("ttl", wanted, format_args!("{ttl:?}"));
            return Err(error.with_key(key.name()));
        }
        let command = Command::Write(Write {
            key: key.clone(),
            token: fencing_token,
            value,
            ttl: self.ttl,
        });
        match self.client.ask(command)? {
            Reply::Stale { token } => {
                let refused = EventLock {
                    key: key.name(),
                    fencing_token,
                };
                let callbacks = self.client.callbacks();
                callbacks.call_all(|events| events.write_refused(refused, token));
                let message =
                    format!("{fencing_token} is smaller than {token}, the token of a later holder");
                Err(Error::new(ErrorKind::StaleToken, message).with_key(key.name()))
            }
            Reply::Done => Ok(()),
            _ => unreachable!("a write has no other reply"),
        }
    }

    /// Writes the value, or deletes it if `bytes` is `None`, while `guard` holds the lock of this name. While Redis is
    /// away, repeats the request for at most `outage_timeout`. A repetition does no harm, since it has the same token.
    pub(crate) fn change_under(
        &self,
        guard: &MutexGuard,
        fencing_token: u64,
        bytes: Option<&[u8]>,
    ) -> Result<(), Error> {
        let give_up_at = self.client.now().after(self.client.config().outage_timeout);
        let mut pauses = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
        let lost = guard.lost_signal();
        let bytes: Option<Arc<[u8]>> = bytes.map(Into::into);
        loop {
            guard.check()?;
            match self.change(fencing_token, bytes.clone()) {
                Err(error) if error.is_unavailable() && self.client.now() < give_up_at => {
                    let _ = lost.recv_timeout(jittered(pauses.next()));
                }
                Err(error) if error.kind() == ErrorKind::StaleToken => {
                    let lost = Error::lost(LossReason::TakenOver { by: None });
                    return Err(lost.with_source(error).with_key(guard.key()));
                }
                changed => return changed,
            }
        }
    }

    /// Reads the value; `None` if it was never written, was deleted, or has expired.
    ///
    /// # Errors
    /// `Timeout`, `Unavailable`, `Denied`, `Shutdown`, `Forked`, `InvalidKey`; `TooLarge` if the value is longer than
    /// [`max_reply_bytes`](crate::Builder::max_reply_bytes); `Protocol` if the key in Redis has a value that is not a
    /// fenced value; `Unsupported` on a [quorum](Client::quorum).
    pub fn read(&self) -> Result<Option<Vec<u8>>, Error> {
        let key = self.key.clone()?;
        match self.client.ask(Command::Read(Read { key }))? {
            Reply::Value(value) => Ok(Some(value)),
            Reply::Missing => Ok(None),
            _ => unreachable!("a read has no other reply"),
        }
    }
}

impl fmt::Debug for FencedValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let key = self.key.as_ref().map_or("", Key::name);
        f.debug_struct("FencedValue").field("key", &key).finish()
    }
}

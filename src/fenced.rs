//! A value in Redis that refuses writes under an old fencing token. Thin: no I/O of its own.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::client::Client;
use crate::error::{Error, ErrorKind};
use crate::store::{Command, Reply};
use crate::util::key::Key;

/// A value that only ever goes forward: a write is accepted if its fencing token is not smaller than
/// that of the last one. From [`Client::fenced_value`].
///
/// This is what fencing tokens are for, shown on the smallest storage there is: a holder that has lost its
/// lock and does not know it yet can do no harm, because the token of the next holder is greater. For
/// data in a database, make the same comparison where it is written:
///
/// ```sql
/// UPDATE invoice SET total = :total, token = :token WHERE id = 42 AND token <= :token
/// ```
///
/// One row changed: written. None: somebody with a greater token was there before.
///
/// Redis has it as the hash `<prefix>~value:<key>` with the fields `token` and `value`. It is your data and stays,
/// unless you give it a [`ttl`](Self::ttl).
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
/// // A holder of before wakes up late:
/// let refused = total.write(before, "0").unwrap_err();
/// assert_eq!(refused.kind(), ErrorKind::StaleToken);
/// assert_eq!(total.read()?.as_deref(), Some(b"17".as_slice()));
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone)]
#[must_use = "a fenced value does nothing until it is read or written"]
pub struct FencedValue {
    client: Client,
    key: Result<Key, Error>,
    ttl: Option<Duration>,
}

/// The bounds of a value's ttl.
const MIN_TTL: Duration = Duration::from_millis(10);
const MAX_TTL: Duration = Duration::from_secs(10 * 365 * 24 * 60 * 60);

/// Every method can be seen in use in the example of [`FencedValue`].
impl FencedValue {
    pub(crate) fn new(client: Client, key: &str) -> Self {
        let config = &client.handle().config;
        let key = Key::of_value(&config.prefix, key, config.max_key_bytes);
        Self {
            client,
            key,
            ttl: None,
        }
    }

    /// The same value; every [`write`](Self::write) and [`delete`](Self::delete) with this one has Redis keep it for
    /// `ttl` from then on. Does no I/O. 10 ms to ten years; other ttls are `InvalidConfig` when they are used. Without
    /// this, a write leaves the ttl as it is, and a new value has none. It takes the right to `pexpire`, as locks do.
    ///
    /// **The last token expires with the value.** After that, Redis accepts a write under any token, also one of a
    /// holder that lost its lock long ago. So choose a ttl longer than the latest moment at which a late holder may still
    /// write: hours or days, where its locks last for seconds.
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

    /// Writes `value`, in one atomic step with the comparison of the tokens.
    ///
    /// # Errors
    /// `StaleToken` if it was last written or deleted under a greater token: nothing is changed. `Timeout` and
    /// `Unavailable` leave open whether it was written, or will be yet: a write is not repeated by itself,
    /// not even where a connection that was idle turns out to be closed. Write the same again under the
    /// same token: that does no harm. `Protocol` if something else stands under the key in Redis. `Denied`,
    /// `Shutdown`, `Forked`, `InvalidKey`: nothing is changed.
    pub fn write(&self, fencing_token: u64, value: impl AsRef<[u8]>) -> Result<(), Error> {
        self.change(fencing_token, Some(value.as_ref().into()))
    }

    /// Deletes the value, in one atomic step with the comparison of the tokens. Also if there is none.
    ///
    /// The token stays in Redis, some hundred bytes: writes and deletions under smaller tokens are refused from now
    /// on, as after a write. `DEL` in Redis itself, or a [`ttl`](Self::ttl), removes the token as well.
    ///
    /// # Errors
    /// Those of [`write`](Self::write). If this is repeated under the same token, it does no harm. If a user has the right
    /// to write but not to `hdel`, it is `Denied`, the value stays, and its token is the new one.
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
    /// // A holder of before wakes up late:
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
        let command = Command::Write {
            key: key.clone(),
            token: fencing_token,
            value,
            ttl: self.ttl,
        };
        match self.ask(&key, command)? {
            Reply::Stale { token } => {
                let message = format!("{fencing_token} is smaller than {token}, the last one seen");
                Err(Error::new(ErrorKind::StaleToken, message).with_key(key.name()))
            }
            Reply::Done => Ok(()),
            _ => unreachable!("another command's answer to a write"),
        }
    }

    /// The value; nothing if it was never written, was deleted, or has expired.
    ///
    /// # Errors
    /// `Timeout`, `Unavailable`, `Denied`, `Shutdown`, `Forked`, `InvalidKey`; `TooLarge` if it is longer than
    /// [`max_reply_bytes`](crate::Builder::max_reply_bytes) allows; `Protocol` if something else stands under the key
    /// in Redis.
    pub fn read(&self) -> Result<Option<Vec<u8>>, Error> {
        let key = self.key.clone()?;
        match self.ask(&key, Command::Read { key: key.clone() })? {
            Reply::Value(value) => Ok(Some(value)),
            Reply::Missing => Ok(None),
            _ => unreachable!("another command's answer to a read"),
        }
    }

    fn ask(&self, key: &Key, command: Command) -> Result<Reply, Error> {
        let outcome = self.client.ask(command);
        outcome.map_err(|error| error.with_key(key.name()))
    }
}

impl fmt::Debug for FencedValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let key = self.key.as_ref().map_or("", Key::name);
        f.debug_struct("FencedValue").field("key", &key).finish()
    }
}

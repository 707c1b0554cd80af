//! A value in Redis that refuses writes under an old fencing token. Thin: no I/O of its own.

use std::fmt;

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
/// It stands in Redis as the hash `<prefix>~value:<key>` with the fields `token` and `value`, without a
/// ttl: it is your data, and stays.
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
}

/// Every method can be seen in use in the example of [`FencedValue`].
impl FencedValue {
    pub(crate) fn new(client: Client, key: &str) -> Self {
        let config = &client.handle().config;
        let key = Key::of_value(&config.prefix, key, config.max_key_bytes);
        Self { client, key }
    }

    /// Writes `value`, in one atomic step with the comparison of the tokens.
    ///
    /// # Errors
    /// `StaleToken` if it was last written under a greater token: nothing is changed. `Timeout` and
    /// `Unavailable` leave open whether it was written, or will be yet: a write is not repeated by itself,
    /// not even where a connection that was idle turns out to be closed. Write the same again under the
    /// same token: that does no harm. `Protocol` if something else stands under the key in Redis. `Denied`,
    /// `Shutdown`, `Forked`, `InvalidKey`: nothing is changed.
    pub fn write(&self, fencing_token: u64, value: impl AsRef<[u8]>) -> Result<(), Error> {
        let key = self.key.clone()?;
        let command = Command::Write {
            key: key.clone(),
            token: fencing_token,
            value: value.as_ref().into(),
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

    /// The value; nothing if it was never written.
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

//! The cost of a lock without a library: `SET NX PX`, and a script that deletes the caller's own value. All commands
//! and ids are built before the measurement, so any real use is slower than this.

use std::time::Duration;

use anyhow::ensure;
use redis::{ConnectionLike, IntoConnectionInfo, Value, io::tcp::TcpSettings};

use crate::drive::{Locker, hold};

const SCRIPT: &str = "if redis.call('GET', KEYS[1]) == ARGV[1] then \
                      return redis.call('DEL', KEYS[1]) end return 0";
const TTL_MS: usize = 30_000;

/// A lock of raw commands, on a connection of its own.
pub struct Raw {
    connection: redis::Connection,
    take: Vec<u8>,
    give: Vec<u8>,
}

impl Raw {
    /// The pause before the next attempt at a key that is taken.
    pub const PAUSE: Duration = Duration::from_millis(1);

    /// Connects. `owner` distinguishes the locks of one key.
    ///
    /// # Errors
    /// Redis does not reply.
    pub fn new(url: &str, key: &str, owner: &str) -> anyhow::Result<Self> {
        let tcp = TcpSettings::default().set_nodelay(true);
        let info = url.into_connection_info()?.set_tcp_settings(tcp);
        let mut connection = redis::Client::open(info)?.get_connection()?;
        let hash: String = redis::cmd("SCRIPT")
            .arg("LOAD")
            .arg(SCRIPT)
            .query(&mut connection)?;
        // The value is as long as a random id would be.
        let value = format!("{owner:0>32}");
        let mut take = redis::cmd("SET");
        take.arg(key).arg(&value).arg("NX").arg("PX").arg(TTL_MS);
        let mut give = redis::cmd("EVALSHA");
        give.arg(hash).arg(1).arg(key).arg(&value);
        Ok(Self {
            connection,
            take: take.get_packed_command(),
            give: give.get_packed_command(),
        })
    }

    /// Returns whether the key was free.
    ///
    /// # Errors
    /// The errors of Redis.
    pub fn try_lock(&mut self) -> anyhow::Result<bool> {
        let answer = self.connection.req_packed_command(&self.take)?;
        Ok(answer == Value::Okay)
    }

    /// Releases the lock.
    ///
    /// # Errors
    /// The key had another owner.
    pub fn unlock(&mut self) -> anyhow::Result<()> {
        check_release(&self.connection.req_packed_command(&self.give)?)
    }
}

impl Locker for Raw {
    async fn pair(&mut self, time: Duration) -> anyhow::Result<u64> {
        while !self.try_lock()? {
            std::thread::sleep(Self::PAUSE);
        }
        let acquired = hold(time);
        self.unlock()?;
        Ok(acquired)
    }
}

/// A lock of raw commands whose release is written at once and not awaited: the limit of one connection. The next
/// attempt reads the reply to the release.
pub struct PipedRaw {
    raw: Raw,
    /// Whether the reply to a release has not been read.
    is_release_unread: bool,
}

impl PipedRaw {
    /// Connects. `owner` distinguishes the locks of one key.
    ///
    /// # Errors
    /// Redis does not reply.
    pub fn new(url: &str, key: &str, owner: &str) -> anyhow::Result<Self> {
        Ok(Self {
            raw: Raw::new(url, key, owner)?,
            is_release_unread: false,
        })
    }

    /// Returns whether the key was free.
    ///
    /// # Errors
    /// The errors of Redis, and that the last release found another owner.
    pub fn try_lock(&mut self) -> anyhow::Result<bool> {
        self.raw.connection.send_packed_command(&self.raw.take)?;
        self.await_release()?;
        Ok(self.raw.connection.recv_response()? == Value::Okay)
    }

    /// Writes the release.
    ///
    /// # Errors
    /// The connection is closed.
    pub fn unlock(&mut self) -> anyhow::Result<()> {
        self.raw.connection.send_packed_command(&self.raw.give)?;
        self.is_release_unread = true;
        Ok(())
    }

    /// Reads the reply to the last release, unless it has been read.
    ///
    /// # Errors
    /// The key had another owner.
    pub fn await_release(&mut self) -> anyhow::Result<()> {
        if std::mem::take(&mut self.is_release_unread) {
            check_release(&self.raw.connection.recv_response()?)?;
        }
        Ok(())
    }
}

impl Locker for PipedRaw {
    async fn pair(&mut self, time: Duration) -> anyhow::Result<u64> {
        while !self.try_lock()? {
            std::thread::sleep(Raw::PAUSE);
        }
        let acquired = hold(time);
        self.unlock()?;
        Ok(acquired)
    }
}

fn check_release(reply: &Value) -> anyhow::Result<()> {
    ensure!(*reply == Value::Int(1), "a lock was lost: {reply:?}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use leasehold_testbed::Server;

    use super::*;

    #[test]
    fn raw_releases_are_checked_awaited_or_not() -> anyhow::Result<()> {
        let server = Server::start()?;
        let mut raw = Raw::new(&server.url(), "awaited", "1")?;
        let mut piped = PipedRaw::new(&server.url(), "piped", "1")?;
        for _ in 0..3 {
            assert!(raw.try_lock()? && piped.try_lock()?);
            raw.unlock()?;
            piped.unlock()?;
        }
        assert!(raw.try_lock()? && piped.try_lock()?);
        assert!(
            !raw.try_lock()? && !piped.try_lock()?,
            "both keys are taken"
        );
        server.command(&["FLUSHALL"])?;
        assert!(raw.unlock().is_err());
        piped.unlock()?;
        assert!(
            piped.try_lock().is_err(),
            "the next attempt reads the reply"
        );
        Ok(())
    }
}

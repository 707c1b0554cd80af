//! The cost of a lock without a library: `SET NX PX`, and a script that deletes the caller's own value. All commands
//! and ids are built before the measurement, so any real use is slower than this.

use std::time::Duration;

use anyhow::ensure;
use redis::{ConnectionLike, IntoConnectionInfo, Value, io::tcp::TcpSettings};

use crate::drive::Locker;

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
        let answer = self.connection.req_packed_command(&self.give)?;
        ensure!(answer == Value::Int(1), "a lock was lost: {answer:?}");
        Ok(())
    }
}

impl Locker for Raw {
    async fn take(&mut self) -> anyhow::Result<()> {
        while !self.try_lock()? {
            std::thread::sleep(Self::PAUSE);
        }
        Ok(())
    }

    async fn give(&mut self) -> anyhow::Result<()> {
        self.unlock()
    }

    async fn pause(&mut self, time: Duration) {
        std::thread::sleep(time);
    }
}

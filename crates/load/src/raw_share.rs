//! The cost of a share of a key without a library: one script that takes it and one that gives it back, on a connection
//! of its own. A thread whose request is refused asks again after a pause, so requests have no order, and writers may
//! starve.

use std::thread;

use anyhow::{bail, ensure};
use redis::Connection;
use serde::{Deserialize, Serialize};

use crate::raw::Raw;

/// The kind of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Share {
    /// To read, beside other readers.
    Read,
    /// To write, alone.
    Write,
    /// Permits of a semaphore.
    Permits {
        /// How many.
        weight: u32,
        /// How many exist.
        limit: u32,
    },
    /// Several keys at once, alone: a random choice of them for each request.
    Keys {
        /// How many a request asks for.
        count: u32,
        /// How many there are.
        of: u32,
    },
}

const TTL_MS: u32 = 30_000;

/// KEYS: the shares, the writer. ARGV: owner, ttl, weight, limit (0 for a writer, a million for a reader).
const TAKE: &str = "local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now)
local held, weight, limit = redis.call('ZCARD', KEYS[1]), tonumber(ARGV[3]), tonumber(ARGV[4])
if limit == 0 then
  if held > 0 then return 0 end
  return redis.call('SET', KEYS[2], ARGV[1], 'NX', 'PX', ARGV[2]) and 1 or 0
end
if held + weight > limit or redis.call('EXISTS', KEYS[2]) == 1 then return 0 end
for i = 1, weight do redis.call('ZADD', KEYS[1], now + ARGV[2], ARGV[1] .. i) end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1";

/// The same keys and arguments.
const GIVE: &str = "if ARGV[4] == '0' then
  return redis.call('GET', KEYS[2]) == ARGV[1] and redis.call('DEL', KEYS[2]) or 0
end
local gone = 0
for i = 1, ARGV[3] do gone = gone + redis.call('ZREM', KEYS[1], ARGV[1] .. i) end
return gone == tonumber(ARGV[3]) and 1 or 0";

/// Shares of one key, by raw commands.
pub struct RawShare {
    connection: Connection,
    /// The hashes of the two scripts.
    take: String,
    give: String,
    keys: [String; 2],
    owner: String,
}

impl RawShare {
    /// Connects. `owner` distinguishes the shares of one key.
    ///
    /// # Errors
    /// Redis does not reply.
    pub fn new(url: &str, key: &str, owner: &str) -> anyhow::Result<Self> {
        let mut connection = redis::Client::open(url)?.get_connection()?;
        let mut load = |script: &str| {
            let mut load = redis::cmd("SCRIPT");
            load.arg("LOAD").arg(script).query(&mut connection)
        };
        let (take, give) = (load(TAKE)?, load(GIVE)?);
        Ok(Self {
            connection,
            take,
            give,
            keys: [key.to_owned(), format!("{key}-writer")],
            owner: format!("{owner:0>32}"),
        })
    }

    /// Takes a share. Tries again, after pauses, until it succeeds.
    ///
    /// # Errors
    /// The errors of Redis.
    pub fn take(&mut self, share: Share) -> anyhow::Result<()> {
        while !self.call(true, share)? {
            thread::sleep(Raw::PAUSE);
        }
        Ok(())
    }

    /// Gives the share back.
    ///
    /// # Errors
    /// The share has ended.
    pub fn give(&mut self, share: Share) -> anyhow::Result<()> {
        ensure!(self.call(false, share)?, "the share has ended");
        Ok(())
    }

    fn call(&mut self, takes: bool, share: Share) -> anyhow::Result<bool> {
        let (weight, limit) = match share {
            Share::Read => (1, 1_000_000),
            Share::Write => (1, 0),
            Share::Permits { weight, limit } => (weight, limit),
            Share::Keys { .. } => bail!("these scripts share one key"),
        };
        let hash = if takes { &self.take } else { &self.give };
        let mut call = redis::cmd("EVALSHA");
        call.arg(hash).arg(self.keys.len()).arg(&self.keys);
        call.arg(&self.owner).arg(TTL_MS).arg(weight).arg(limit);
        Ok(call.query(&mut self.connection)?)
    }
}

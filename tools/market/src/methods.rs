//! The ways of excluding others from a deal: WATCH (optimized and plain), one lock, a lock per item, and a lock per
//! item with a transaction that writes only while the lock is held.

use std::time::{Duration, Instant};

use anyhow::ensure;
use crossbeam_channel::never;
use leasehold::Client;
use redis::Connection;
use serde::{Deserialize, Serialize};

use crate::deal::{Deal, Verdict};
use crate::world::Keys;

/// The lock on the whole market. No item has this name: item names contain a dot and the seller.
const MARKET: &str = "market";
/// The longest pause before a first retry; each retry doubles it.
const FIRST_PAUSE: Duration = Duration::from_micros(200);
const LONGEST_PAUSE: Duration = Duration::from_millis(5);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Way {
    Watch,
    MarketLock,
    ItemLock,
    Transaction,
    /// `Watch` without optimization: a round trip for each command, and retries without a pause.
    PlainWatch,
}

impl Way {
    pub const ALL: [Way; 5] = [
        Way::Watch,
        Way::MarketLock,
        Way::ItemLock,
        Way::Transaction,
        Way::PlainWatch,
    ];
    /// The ways that a user would choose.
    pub const CAREFUL: [Way; 4] = [Way::Watch, Way::MarketLock, Way::ItemLock, Way::Transaction];

    pub fn name(self) -> &'static str {
        match self {
            Way::Watch => "WATCH",
            Way::MarketLock => "lock",
            Way::ItemLock => "lock per item",
            Way::Transaction => "with transaction",
            Way::PlainWatch => "WATCH, plain",
        }
    }
}

/// The outcome of a deal.
pub struct Outcome {
    /// `None` if the time was over before the deal could be made.
    pub verdict: Option<Verdict>,
    /// How often the deal was begun again because something had changed.
    pub retries: u64,
}

/// The connections and settings of a trader.
pub struct Trader {
    pub keys: Keys,
    pub connection: Connection,
    pub locks: Client,
    pub way: Way,
    /// How long the trader works between reading and writing.
    pub length: Duration,
    /// The time after which the trader does not retry any more.
    pub end: Instant,
}

impl Trader {
    pub fn make(&mut self, deal: &Deal<'_>) -> anyhow::Result<Outcome> {
        match self.way {
            Way::Watch | Way::PlainWatch => self.watching(deal),
            Way::MarketLock => self.locking(deal, MARKET),
            Way::ItemLock => self.locking(deal, &deal.offer().member()),
            Way::Transaction => self.transacting(deal),
        }
    }

    fn watching(&mut self, deal: &Deal<'_>) -> anyhow::Result<Outcome> {
        let mut pauses = FIRST_PAUSE;
        let mut retries = 0;
        loop {
            let verdict = match self.way {
                Way::PlainWatch => self.watch_plainly(deal)?,
                _ => self.watch(deal)?,
            };
            if verdict == Verdict::Good {
                pause(self.length);
            }
            if verdict != Verdict::Good || self.write(deal)? {
                let verdict = Some(verdict);
                return Ok(Outcome { verdict, retries });
            }
            retries += 1;
            if Instant::now() >= self.end {
                let verdict = None;
                return Ok(Outcome { verdict, retries });
            }
            if self.way != Way::PlainWatch {
                // The pause grows with each attempt, so that traders that collided do not collide again at once.
                pause(pauses.mul_f64(fastrand::f64()));
                pauses = LONGEST_PAUSE.min(pauses * 2);
            }
        }
    }

    /// Sends WATCH and all reads in one round trip.
    fn watch(&mut self, deal: &Deal<'_>) -> anyhow::Result<Verdict> {
        let mut before = redis::pipe();
        // Ends the WATCH of an earlier deal that was not made. In this batch, that costs no round trip.
        before.cmd("UNWATCH").ignore();
        before.cmd("WATCH").arg(deal.watched(&self.keys)).ignore();
        Ok(deal.read(&self.keys, before, &mut self.connection)?)
    }

    /// Uses WATCH as most programs do, and as the article seems to do: with a round trip for each command.
    fn watch_plainly(&mut self, deal: &Deal<'_>) -> anyhow::Result<Verdict> {
        let mut watch = redis::cmd("WATCH");
        let () = watch
            .arg(deal.watched(&self.keys))
            .query(&mut self.connection)?;
        let verdict = deal.read_one_by_one(&self.keys, &mut self.connection)?;
        if verdict != Verdict::Good {
            let () = redis::cmd("UNWATCH").query(&mut self.connection)?;
        }
        Ok(verdict)
    }

    fn locking(&mut self, deal: &Deal<'_>, lock: &str) -> anyhow::Result<Outcome> {
        let guard = self.locks.mutex(lock).lock()?;
        let verdict = deal.read(&self.keys, redis::pipe(), &mut self.connection)?;
        if verdict == Verdict::Good {
            pause(self.length);
            guard.check()?;
            let written = self.write(deal)?;
            ensure!(written, "a transaction that watches nothing was refused");
        }
        // The guard is dropped here, without waiting for the confirmation of its release.
        Ok(Outcome {
            verdict: Some(verdict),
            retries: 0,
        })
    }

    /// Makes the deal in a transaction of the lock. It begins with two round trips: WATCH of the lock's key, then the
    /// reads. With the lock alone, one round trip is enough.
    fn transacting(&mut self, deal: &Deal<'_>) -> anyhow::Result<Outcome> {
        let guard = self.locks.mutex(deal.offer().member()).lock()?;
        let mut tries = 0;
        let verdict = guard.transaction(|connection, pipe| {
            tries += 1;
            let verdict = deal.read(&self.keys, redis::pipe(), connection)?;
            if verdict == Verdict::Good {
                pause(self.length);
                deal.write(&self.keys, pipe);
            }
            Ok(verdict)
        })?;
        Ok(Outcome {
            verdict: Some(verdict.value),
            retries: tries - 1,
        })
    }

    /// Returns false if a watched key has changed, so nothing was written.
    fn write(&mut self, deal: &Deal<'_>) -> anyhow::Result<bool> {
        let mut pipe = redis::pipe();
        pipe.atomic();
        deal.write(&self.keys, &mut pipe);
        let written: Option<()> = pipe.query(&mut self.connection)?;
        Ok(written.is_some())
    }
}

/// Pauses, as if the trader worked on the deal.
pub fn pause(time: Duration) {
    if !time.is_zero() {
        // No message ever comes, so the wait ends with its time-out.
        let _ = never::<()>().recv_timeout(time);
    }
}

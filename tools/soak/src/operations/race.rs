//! A client of a race: its threads want one key all the time. Every failure of a call is a violation here, since the
//! only fault is that single connections are killed.

use std::thread;
use std::time::Duration;

use anyhow::anyhow;
use leasehold::{Client, Mutex, MutexGuard};

use super::{Doing, Terms, Thread, What};
use crate::messages::{RACE_TTL, Raced, key_name, race_key};
use crate::records::{Operation, now};
use crate::single::race::{COUNTER, INSIDE, TOKENS, WITNESS};

/// One in this many grants leaves traces in Redis, which takes longer than a grant.
const LEAVES_TRACES: usize = 8;

/// A client and its threads, ready to race.
pub struct Racers<'a> {
    client: Client,
    threads: Vec<(Thread<'a>, redis::Connection)>,
    /// Records the end of the client.
    last: Thread<'a>,
}

impl<'a> Racers<'a> {
    /// Each thread has a connection of its own for its traces.
    pub fn new(url: &str, threads: Vec<Thread<'a>>, last: Thread<'a>) -> anyhow::Result<Self> {
        let witness = || -> anyhow::Result<redis::Connection> {
            let mut witness = redis::Client::open(url)?.get_connection()?;
            let mut name = redis::cmd("CLIENT");
            name.arg("SETNAME").arg(WITNESS).exec(&mut witness)?;
            Ok(witness)
        };
        let threads = threads
            .into_iter()
            .map(|thread| Ok((thread, witness()?)))
            .collect::<anyhow::Result<_>>()?;
        // Does not connect yet, since a fault may kill the first connection.
        let client = Client::builder(url).ttl(RACE_TTL).build_lazy()?;
        Ok(Self {
            client,
            threads,
            last,
        })
    }

    /// Races until the time `until`, and then drops the client.
    pub fn race(self, until: u64) -> anyhow::Result<Raced> {
        let Self {
            client,
            threads,
            mut last,
        } = self;
        let raised = thread::scope(|scope| {
            let racing: Vec<_> = threads
                .into_iter()
                .map(|(thread, witness)| {
                    let mutex = client.mutex(key_name(race_key()));
                    scope.spawn(move || thread.race(&mutex, witness, until))
                })
                .collect();
            let raised = racing
                .into_iter()
                .map(|racing| racing.join().map_err(|_| anyhow!("a racer panicked"))?);
            raised.sum::<anyhow::Result<u64>>()
        })?;
        let _ = last.call(Doing::Close, None, Some(Duration::ZERO), || {
            drop(client);
            Ok(())
        });
        Ok(Raced { raised })
    }
}

impl Thread<'_> {
    /// Returns how often the thread left traces.
    fn race(
        mut self,
        mutex: &Mutex,
        mut witness: redis::Connection,
        until: u64,
    ) -> anyhow::Result<u64> {
        let key = race_key();
        let mut raised = 0;
        loop {
            let left = Duration::from_nanos(until.saturating_sub(now()));
            if left.is_zero() {
                return Ok(raised);
            }
            self.records.write(What::Began(Operation::Race));
            let guard = self.call(Doing::Lock, Some(key), Some(left), || mutex.lock());
            let guard = match guard {
                Ok(guard) => guard,
                Err(error) => {
                    self.wrong(format!("lock() failed in a race: {error}"));
                    continue;
                }
            };
            let ttl = Some(RACE_TTL);
            self.held(
                &guard,
                key,
                Terms {
                    ttl,
                    ..Terms::default()
                },
            );
            if self.random.one_in(LEAVES_TRACES) {
                self.leave_traces(&guard, &mut witness)?;
                raised += 1;
            }
            match self.random.one_in(2) {
                true => self.release(guard, key),
                // If two connections in a row are killed, the release is confirmed in the background.
                false => self.unlock_now(guard, key),
            }
        }
    }

    fn leave_traces(
        &mut self,
        guard: &MutexGuard,
        witness: &mut redis::Connection,
    ) -> anyhow::Result<()> {
        let (inside, _, counted): (u64, u64, Option<u64>) = redis::pipe()
            .cmd("INCR")
            .arg(INSIDE)
            .cmd("RPUSH")
            .arg(TOKENS)
            .arg(guard.fencing_token())
            .cmd("GET")
            .arg(COUNTER)
            .query(witness)?;
        if inside != 1 {
            self.wrong(format!("{inside} holders are inside in a race: {guard:?}"));
        }
        if let Err(error) = guard.check() {
            self.wrong(format!("lost in a race: {error}"));
        }
        redis::pipe()
            .cmd("SET")
            .arg(COUNTER)
            .arg(counted.unwrap_or(0) + 1)
            .cmd("DECR")
            .arg(INSIDE)
            .exec(witness)?;
        Ok(())
    }
}

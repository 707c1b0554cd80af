//! A process of the demo, doing its job.

use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{anyhow, bail};
use crossbeam_channel::{Receiver, never, select};
use leasehold::{Client, LossReason, MutexGuard};
use leasehold_load::Waits;
use leasehold_testbed::child::{self, say};
use redis::Connection;

use super::messages::{Assignment, Job, Message, Order, Raise, Tally};
use crate::space;

/// A demo that is killed leaves its counter behind no longer than this.
const VALUE_TTL_SECONDS: u64 = 900;

pub fn main() -> ExitCode {
    child::run(work)
}

fn work(assignment: Assignment, orders: Receiver<Order>) -> anyhow::Result<()> {
    let Assignment { url, prefix, job } = assignment;
    let client = space::client(&url, &prefix)?;
    match job {
        Job::Raise(raise) => raise_counter(&url, &client, &raise, &orders),
        Job::Hold { key, ttl } => hold(&client, &key, ttl, &orders),
    }
}

fn raise_counter(
    url: &str,
    client: &Client,
    raise: &Raise,
    orders: &Receiver<Order>,
) -> anyhow::Result<()> {
    let redis = redis::Client::open(url)?;
    let connections: Vec<Connection> = (0..raise.threads)
        .map(|_| space::connect(&redis))
        .collect::<anyhow::Result<_>>()?;
    say(&Message::Ready)?;
    match orders.recv()? {
        Order::Go => {}
        other => bail!("{other:?} came before Go"),
    }
    let start = Instant::now();
    let end = start + raise.time;
    let mut tally = Tally::default();
    let mut waits = Waits::new()?;
    thread::scope(|scope| {
        let threads: Vec<_> = connections
            .into_iter()
            .map(|connection| {
                scope.spawn(move || Raiser::new(client, raise, connection)?.run_until(end))
            })
            .collect();
        for thread in threads {
            let raiser = thread.join().map_err(|_| anyhow!("a thread panicked"))??;
            tally.raises += raiser.raises;
            tally.out_of_order += raiser.out_of_order;
            waits.merge(&raiser.waits)?;
        }
        anyhow::Ok(())
    })?;
    tally.took = start.elapsed();
    tally.waits = waits.to_steps();
    say(&Message::Raised(tally))
}

/// One thread that raises the counter.
struct Raiser<'a> {
    client: &'a Client,
    raise: &'a Raise,
    connection: Connection,
    raises: u64,
    out_of_order: u64,
    waits: Waits,
}

impl<'a> Raiser<'a> {
    fn new(
        client: &'a Client,
        raise: &'a Raise,
        connection: Connection,
    ) -> anyhow::Result<Raiser<'a>> {
        let waits = Waits::new()?;
        Ok(Raiser {
            client,
            raise,
            connection,
            raises: 0,
            out_of_order: 0,
            waits,
        })
    }

    fn run_until(mut self, end: Instant) -> anyhow::Result<Self> {
        while Instant::now() < end {
            match &self.raise.lock {
                None => self.raise_once(0)?,
                Some(lock) => {
                    let asked = Instant::now();
                    let mutex = self.client.mutex(lock);
                    // As `client.with_lock(..)`, for closures that want the fencing token.
                    mutex.with(|guard| {
                        self.waits.record(asked.elapsed())?;
                        self.raise_once(guard.fencing_token())
                    })??;
                }
            }
        }
        Ok(self)
    }

    /// Reads the counter, then writes it: right only if nobody else writes in between.
    fn raise_once(&mut self, token: u64) -> anyhow::Result<()> {
        let Raise {
            counter,
            last_token,
            ..
        } = self.raise;
        let (count, last): (Option<u64>, Option<u64>) = redis::cmd("MGET")
            .arg(counter)
            .arg(last_token)
            .query(&mut self.connection)?;
        if self.raise.lock.is_some() && last.is_some_and(|last| token <= last) {
            self.out_of_order += 1;
        }
        let count = count.unwrap_or(0) + 1;
        let () = redis::pipe()
            .cmd("SET")
            .arg(counter)
            .arg(count)
            .arg("EX")
            .arg(VALUE_TTL_SECONDS)
            .cmd("SET")
            .arg(last_token)
            .arg(token)
            .arg("EX")
            .arg(VALUE_TTL_SECONDS)
            .query(&mut self.connection)?;
        self.raises += 1;
        Ok(())
    }
}

fn hold(client: &Client, key: &str, ttl: Duration, orders: &Receiver<Order>) -> anyhow::Result<()> {
    let mutex = client.mutex(key).ttl(ttl);
    let guard = match mutex.try_lock()? {
        Some(guard) => guard,
        None => {
            say(&Message::Waiting)?;
            mutex.lock()?
        }
    };
    say(&Message::Held {
        token: guard.fencing_token(),
    })?;
    obey(guard, orders)
}

fn obey(guard: MutexGuard, orders: &Receiver<Order>) -> anyhow::Result<()> {
    let (lost, silence) = (guard.lost_signal(), never());
    let mut signal: &Receiver<LossReason> = &lost;
    loop {
        select! {
            recv(signal) -> reason => {
                say(&Message::Lost { reason: reason?.to_string() })?;
                signal = &silence;
            }
            recv(orders) -> order => match order? {
                Order::Go => bail!("a holder is not told to go"),
                Order::Report => say(&Message::Condition {
                    lost: guard.is_lost(),
                    objection: guard.check().err().map(|error| error.to_string()),
                })?,
                Order::Release => {
                    let objection = guard.unlock().err().map(|error| error.to_string());
                    return say(&Message::Released { objection });
                }
            }
        }
    }
}

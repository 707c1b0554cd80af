//! A process of the demo, doing its job.

use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{anyhow, bail};
use crossbeam_channel::{Receiver, never, select};
use leasehold::{Client, LossReason, MutexGuard};
use leasehold_load::Waits;
use leasehold_testbed::child::{self, say};
use leasehold_tools::environment;
use redis::Connection;

use crate::messages::{Assignment, Increment, Job, Message, Order, Tally};

/// The longest time for which a killed demo leaves its counter behind.
const VALUE_TTL_SECONDS: u64 = 900;

pub fn main() -> ExitCode {
    child::run(work)
}

fn work(assignment: Assignment, orders: Receiver<Order>) -> anyhow::Result<()> {
    let Assignment { url, prefix, job } = assignment;
    let client = environment::client(&url, &prefix)?;
    match job {
        Job::Increment(increment) => increment_counter(&url, &client, &increment, &orders),
        Job::Hold { key, ttl } => hold(&client, &key, ttl, &orders),
    }
}

fn increment_counter(
    url: &str,
    client: &Client,
    increment: &Increment,
    orders: &Receiver<Order>,
) -> anyhow::Result<()> {
    let redis = redis::Client::open(url)?;
    let connections: Vec<Connection> = (0..increment.threads)
        .map(|_| environment::connect(&redis))
        .collect::<anyhow::Result<_>>()?;
    say(&Message::Ready)?;
    match orders.recv()? {
        Order::Go => {}
        other => bail!("{other:?} came before Go"),
    }
    let start = Instant::now();
    let end = start + increment.time;
    let mut tally = Tally::default();
    let mut waits = Waits::new()?;
    thread::scope(|scope| {
        let threads: Vec<_> = connections
            .into_iter()
            .map(|connection| {
                scope.spawn(move || Incrementer::new(client, increment, connection)?.run_until(end))
            })
            .collect();
        for thread in threads {
            let incrementer = thread.join().map_err(|_| anyhow!("a thread panicked"))??;
            tally.increments += incrementer.increments;
            tally.out_of_order += incrementer.out_of_order;
            waits.merge(&incrementer.waits)?;
        }
        anyhow::Ok(())
    })?;
    tally.took = start.elapsed();
    tally.waits = waits.to_steps();
    say(&Message::Incremented(tally))
}

/// One thread that increments the counter.
struct Incrementer<'a> {
    client: &'a Client,
    increment: &'a Increment,
    connection: Connection,
    increments: u64,
    out_of_order: u64,
    waits: Waits,
}

impl<'a> Incrementer<'a> {
    fn new(
        client: &'a Client,
        increment: &'a Increment,
        connection: Connection,
    ) -> anyhow::Result<Incrementer<'a>> {
        let waits = Waits::new()?;
        Ok(Incrementer {
            client,
            increment,
            connection,
            increments: 0,
            out_of_order: 0,
            waits,
        })
    }

    fn run_until(mut self, end: Instant) -> anyhow::Result<Self> {
        while Instant::now() < end {
            match &self.increment.lock {
                None => self.increment_once(0)?,
                Some(lock) => {
                    let asked = Instant::now();
                    let mutex = self.client.mutex(lock);
                    // Like `client.with_lock(..)`, but the closure gets the fencing token.
                    mutex.with(|guard| {
                        self.waits.record(asked.elapsed())?;
                        self.increment_once(guard.fencing_token())
                    })??;
                }
            }
        }
        Ok(self)
    }

    /// Reads the counter, then writes it: correct only if no other thread writes in between.
    fn increment_once(&mut self, token: u64) -> anyhow::Result<()> {
        let Increment {
            counter,
            last_token,
            ..
        } = self.increment;
        let (count, last): (Option<u64>, Option<u64>) = redis::cmd("MGET")
            .arg(counter)
            .arg(last_token)
            .query(&mut self.connection)?;
        if self.increment.lock.is_some() && last.is_some_and(|last| token <= last) {
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
        self.increments += 1;
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
                Order::Go => bail!("a holder got the order Go"),
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

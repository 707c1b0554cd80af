//! leasehold's worker: the locks of a client that is compatible with the other library.

use std::ops::ControlFlow;
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use crossbeam_channel::{Receiver, RecvTimeoutError};
use leasehold::{Client, MutexGuard, Released};
use leasehold_testbed::child;
use redis::{Commands as _, Connection};

use crate::library::Library;
use crate::messages::{Assignment, Grants, Order, Report, section_key};

/// Threads that take turns in the section.
const THREADS: usize = 2;
/// How long a request without a wait may take.
const TRY_LIMIT: Duration = Duration::from_millis(200);
/// The ttl where an order has none.
const TTL: Duration = Duration::from_secs(30);

pub fn main() -> ExitCode {
    child::run(work)
}

fn work(assignment: Assignment, orders: Receiver<Order>) -> anyhow::Result<()> {
    let library = Library::by_name(&assignment.library).map_err(anyhow::Error::msg)?;
    let client = Client::builder(&assignment.url)
        .prefix(library.our_prefix())
        .compatible_with(library.our_setting())
        .ttl(TTL)
        .build()?;
    let worker = Worker {
        names: library.our_names(&assignment.name),
        client,
        redis: redis::Client::open(assignment.url.as_str())?,
        name: assignment.name,
    };
    child::say(&Report::default())?;
    let mut held = Vec::new();
    while let Ok(order) = orders.recv() {
        let report = match order {
            Order::Grants(grants) => worker.grants(grants, &orders)?,
            Order::Lock { ttl_ms } => {
                held = worker.lock(ttl_ms.map_or(TTL, Duration::from_millis))?;
                done(true)
            }
            Order::TryLock { ttl_ms } => {
                let taken = worker.try_lock(Duration::from_millis(ttl_ms))?;
                let is_taken = taken.is_some();
                held.extend(taken.into_iter().flatten());
                done(is_taken)
            }
            Order::Unlock => done(release(std::mem::take(&mut held))?),
            Order::Contend { count, for_ms } => {
                worker.contend(count, Duration::from_millis(for_ms))?
            }
            Order::LockMany { .. } | Order::UnlockMany => bail!("no order for leasehold"),
        };
        child::say(&report)?;
    }
    Ok(())
}

fn done(done: bool) -> Report {
    Report {
        done,
        ..Report::default()
    }
}

struct Worker {
    client: Client,
    redis: redis::Client,
    /// The locks that are held together, outermost first.
    names: Vec<String>,
    name: String,
}

impl Worker {
    fn lock(&self, ttl: Duration) -> anyhow::Result<Vec<MutexGuard>> {
        let guards = self.names.iter().map(|name| {
            let mutex = self.client.mutex(name).ttl(ttl);
            Ok(mutex.lock()?)
        });
        guards.collect()
    }

    fn try_lock(&self, ttl: Duration) -> anyhow::Result<Option<Vec<MutexGuard>>> {
        let mut guards = Vec::new();
        for name in &self.names {
            match self.client.mutex(name).ttl(ttl).try_lock_for(TRY_LIMIT)? {
                Some(guard) => guards.push(guard),
                None => {
                    release(guards)?;
                    return Ok(None);
                }
            }
        }
        Ok(Some(guards))
    }

    fn contend(&self, count: u32, time: Duration) -> anyhow::Result<Report> {
        let mut report = Report::default();
        let start = Instant::now();
        while start.elapsed() < time {
            for number in 0..count {
                let mutex = self.client.mutex(format!("{}:{number}", self.name));
                if mutex.try_lock()?.is_some() {
                    report.grants += 1;
                }
            }
        }
        Ok(report)
    }

    /// Runs the section in all threads, until the next order comes.
    fn grants(&self, order: Grants, orders: &Receiver<Order>) -> anyhow::Result<Report> {
        let (stop, stopped) = crossbeam_channel::bounded::<()>(0);
        thread::scope(|scope| {
            let threads: Vec<_> = (0..THREADS)
                .map(|_| scope.spawn(|| self.turns(order, &stopped)))
                .collect();
            // The next order ends the turns, and only that: it has no other content.
            let next = orders.recv();
            drop(stop);
            let mut sum = Report::default();
            for thread in threads {
                let report = thread
                    .join()
                    .map_err(|_| anyhow::anyhow!("a thread panicked"))??;
                sum.grants += report.grants;
                sum.overlaps += report.overlaps;
                sum.stale_tokens += report.stale_tokens;
                sum.longest_wait_ms = sum.longest_wait_ms.max(report.longest_wait_ms);
            }
            next.context("the orders ended")?;
            Ok(sum)
        })
    }

    fn turns(&self, order: Grants, stopped: &Receiver<()>) -> anyhow::Result<Report> {
        let mut redis = self.redis.get_connection()?;
        let mut report = Report::default();
        let pause = |time: Duration| match stopped.recv_timeout(time) {
            Err(RecvTimeoutError::Timeout) => ControlFlow::Continue(()),
            _ => ControlFlow::Break(()),
        };
        loop {
            let asked = Instant::now();
            let guards = self.lock(TTL)?;
            let waited = asked.elapsed().as_secs_f64() * 1e3;
            report.longest_wait_ms = report.longest_wait_ms.max(waited);
            self.enter(&mut redis, &guards, order.hold_ms, &mut report)?;
            if !release(guards)? {
                bail!("the lock was lost");
            }
            let micros = fastrand::u64(0..=order.pause_ms * 1_000);
            if pause(Duration::from_micros(micros)).is_break() {
                return Ok(report);
            }
        }
    }

    /// Runs the section once.
    fn enter(
        &self,
        redis: &mut Connection,
        guards: &[MutexGuard],
        hold_ms: u64,
        report: &mut Report,
    ) -> anyhow::Result<()> {
        let key = |field| section_key(&self.name, field);
        let inside: u32 = redis.incr(key("inside"), 1)?;
        report.overlaps += u32::from(inside != 1);
        let token = guards.last().context("a lock is held")?.fencing_token();
        let last: Option<u64> = redis.get(key("token"))?;
        report.stale_tokens += u32::from(last.is_some_and(|last| last >= token));
        let () = redis.set(key("token"), token)?;
        let total: Option<u64> = redis.get(key("total"))?;
        thread::sleep(Duration::from_millis(hold_ms));
        let () = redis.set(key("total"), total.unwrap_or(0) + 1)?;
        let () = redis.decr(key("inside"), 1)?;
        report.grants += 1;
        Ok(())
    }
}

/// Releases the locks, innermost first. Returns whether all were still held.
fn release(mut guards: Vec<MutexGuard>) -> anyhow::Result<bool> {
    while let Some(guard) = guards.pop() {
        match guard.unlock() {
            Ok(Released::Unconfirmed(reason)) => return Err(reason.into()),
            Ok(_) => {}
            Err(error) if error.is_lease_lost() => return Ok(false),
            Err(error) => return Err(error.into()),
        }
    }
    Ok(true)
}

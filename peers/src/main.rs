//! A load process with the locks of other crates, used as their documentation shows. Reports the same figures
//! as `xtask bench-process` does for leasehold.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use leasehold_load::{Assignment, Locker, RunRound, Way, drive, serve, threads};
use redlock::RedLock;
use rslock::{LockGuard, LockManager};

const TTL: Duration = Duration::from_secs(30);
/// The number of attempts that both crates make by default.
const TRIES: u32 = 3;

fn main() -> ExitCode {
    serve(connect)
}

fn connect(assignment: &Assignment) -> anyhow::Result<RunRound> {
    let first_seat = assignment.process * assignment.threads;
    let (seats, hold) = (0..assignment.threads, assignment.hold);
    let url = assignment.url.as_str();
    match assignment.way {
        Way::Rslock { pause_ms } => {
            let mut manager = LockManager::new(vec![url]);
            manager.set_retry(TRIES, Duration::from_millis(pause_ms.into()));
            let lockers = seats.map(|thread| Rslock {
                manager: manager.clone(),
                key: assignment.key(thread),
                guard: None,
            });
            tasks(lockers.collect(), first_seat, hold)
        }
        Way::Redlock { pause_ms } => {
            let mut redlock = RedLock::new(vec![url]);
            redlock.set_retry(TRIES, pause_ms);
            let redlock = Arc::new(redlock);
            let lockers = seats.map(|thread| Redlock {
                redlock: Arc::clone(&redlock),
                key: assignment.key(thread).into_bytes(),
                value: None,
            });
            Ok(threads(lockers.collect(), first_seat, hold))
        }
        Way::Raw | Way::Limit | Way::Drop | Way::Unlock => bail!("no lock of a competitor"),
    }
}

/// Runs one task for each locker.
fn tasks(lockers: Vec<Rslock>, first_seat: usize, hold: Duration) -> anyhow::Result<RunRound> {
    let mut builder = tokio::runtime::Builder::new_multi_thread();
    let runtime = builder.enable_all().build()?;
    let mut lockers = Some(lockers);
    Ok(Box::new(move |round| {
        let tasks = lockers.take().context("a round has failed before")?;
        let running: Vec<_> = tasks
            .into_iter()
            .zip(first_seat..)
            .map(|(mut locker, seat)| {
                runtime.spawn(async move {
                    let tally = drive(&mut locker, hold, &round, seat).await?;
                    anyhow::Ok((locker, tally))
                })
            })
            .collect();
        let ended = runtime.block_on(async {
            let mut ended = Vec::new();
            for task in running {
                ended.push(task.await??);
            }
            anyhow::Ok(ended)
        })?;
        let (tasks, tallies) = ended.into_iter().unzip();
        lockers = Some(tasks);
        Ok(tallies)
    }))
}

struct Rslock {
    manager: LockManager,
    key: String,
    guard: Option<LockGuard>,
}

impl Locker for Rslock {
    async fn take(&mut self) -> anyhow::Result<()> {
        self.guard = Some(self.manager.acquire(self.key.as_str(), TTL).await?);
        Ok(())
    }

    async fn give(&mut self) -> anyhow::Result<()> {
        let guard = self.guard.take().expect("the lock was taken before");
        guard.release().await;
        Ok(())
    }

    async fn pause(&mut self, time: Duration) {
        futures_timer::Delay::new(time).await;
    }
}

struct Redlock {
    redlock: Arc<RedLock>,
    key: Vec<u8>,
    /// The crate's guard borrows the manager, so this keeps the fields that a release needs.
    value: Option<Vec<u8>>,
}

impl Locker for Redlock {
    async fn take(&mut self) -> anyhow::Result<()> {
        let ttl = TTL.as_millis() as usize;
        // This loop does what the crate's own `acquire` does.
        self.value = Some(loop {
            if let Some(lock) = self.redlock.lock(&self.key, ttl)? {
                break lock.val;
            }
        });
        Ok(())
    }

    async fn give(&mut self) -> anyhow::Result<()> {
        self.redlock.unlock(&redlock::Lock {
            resource: self.key.clone(),
            val: self.value.take().expect("the lock was taken before"),
            validity_time: 0,
            lock_manager: &self.redlock,
        });
        Ok(())
    }

    async fn pause(&mut self, time: Duration) {
        std::thread::sleep(time);
    }
}

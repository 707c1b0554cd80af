//! A load process with the locks of other crates, used as their documentation shows. Reports the same figures
//! as `leasehold-bench --process` does for leasehold. With the argument `quorum`, it has the locks of redlock on several
//! servers, for benches/quorum.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, bail};
use leasehold_load::{
    Assignment, Locker, RunRound, Way, drive, hold, nanoseconds, serve, serve_turns, threads,
};
use redlock::RedLock;
use rslock::LockManager;

const TTL: Duration = Duration::from_secs(30);
/// The number of attempts that both crates make by default.
const TRIES: u32 = 3;

fn main() -> ExitCode {
    match std::env::args().nth(1).as_deref() {
        Some("quorum") => serve_turns(|urls| {
            let mut redlock = RedLock::new(urls);
            redlock.set_retry(TRIES, 200);
            let key = b"redlock".to_vec();
            let mut locker = Redlock {
                redlock: Arc::new(redlock),
                key,
            };
            Ok(move || locker.lock_and_release(Duration::ZERO).map(|_| ()))
        }),
        _ => serve(connect),
    }
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
            });
            Ok(threads(lockers.collect(), first_seat, hold))
        }
        _ => bail!("no lock of a competitor"),
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
}

impl Locker for Rslock {
    async fn pair(&mut self, hold: Duration) -> anyhow::Result<u64> {
        let guard = self.manager.acquire(self.key.as_str(), TTL).await?;
        let acquired = nanoseconds();
        if hold > Duration::ZERO {
            self.pause(hold).await;
        }
        guard.release().await;
        Ok(acquired)
    }

    async fn pause(&mut self, time: Duration) {
        futures_timer::Delay::new(time).await;
    }
}

struct Redlock {
    redlock: Arc<RedLock>,
    key: Vec<u8>,
}

impl Redlock {
    fn lock_and_release(&mut self, time: Duration) -> anyhow::Result<u64> {
        let ttl = TTL.as_millis() as usize;
        // This loop does what the crate's own `acquire` does.
        let lock = loop {
            if let Some(lock) = self.redlock.lock(&self.key, ttl)? {
                break lock;
            }
        };
        let acquired = hold(time);
        self.redlock.unlock(&lock);
        Ok(acquired)
    }
}

impl Locker for Redlock {
    async fn pair(&mut self, time: Duration) -> anyhow::Result<u64> {
        self.lock_and_release(time)
    }
}

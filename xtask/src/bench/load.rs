//! A load process with leasehold's locks or with the raw commands. The competitors' locks are in the crate
//! peers/.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::bail;
use leasehold::{Client, Mutex, MutexGuard};
use leasehold_load::{Assignment, Locker, Raw, RunRound, Way, serve, threads};

use super::limit::{Limit, Limited};

pub fn main() -> ExitCode {
    serve(connect)
}

fn connect(assignment: &Assignment) -> anyhow::Result<RunRound> {
    let first_seat = assignment.process * assignment.threads;
    let (seats, hold) = (0..assignment.threads, assignment.hold);
    match assignment.way {
        Way::Raw => {
            let raw = seats
                .map(|thread| {
                    let owner = (first_seat + thread).to_string();
                    Raw::new(&assignment.url, &assignment.key(thread), &owner)
                })
                .collect::<anyhow::Result<Vec<_>>>()?;
            Ok(threads(raw, first_seat, hold))
        }
        Way::Limit => {
            let limit = Arc::new(Limit::connect(&assignment.url)?);
            let limited = seats
                .map(|thread| Limited::new(&limit, assignment.key(thread), first_seat + thread))
                .collect();
            Ok(threads(limited, first_seat, hold))
        }
        Way::Drop | Way::Unlock => {
            let client = Client::open(&assignment.url)?;
            let ours = seats
                .map(|thread| Ours {
                    mutex: client.mutex(assignment.key(thread)),
                    guard: None,
                    confirmed: assignment.way == Way::Unlock,
                })
                .collect();
            Ok(threads(ours, first_seat, hold))
        }
        Way::Rslock { .. } | Way::Redlock { .. } => bail!("no lock of leasehold"),
    }
}

struct Ours {
    mutex: Mutex,
    guard: Option<MutexGuard>,
    /// Whether to wait for the release.
    confirmed: bool,
}

impl Locker for Ours {
    async fn take(&mut self) -> anyhow::Result<()> {
        self.guard = Some(self.mutex.lock()?);
        Ok(())
    }

    async fn give(&mut self) -> anyhow::Result<()> {
        let guard = self.guard.take().expect("the lock was taken before");
        if self.confirmed {
            guard.unlock()?;
        }
        Ok(())
    }

    async fn pause(&mut self, time: Duration) {
        std::thread::sleep(time);
    }
}

//! A load process with leasehold's locks or with the raw commands. The competitors' locks are in `crates/peers/`.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::bail;
use leasehold::{Client, Mutex};
use leasehold_load::{
    Assignment, FairQueue, Locker, PipedRaw, Raw, RunRound, Way, hold, serve, threads,
};
use parking_lot::MutexGuard;

use crate::limit::{Limit, Limited};

pub fn main() -> ExitCode {
    serve(connect)
}

fn connect(assignment: &Assignment) -> anyhow::Result<RunRound> {
    let first_seat = assignment.process * assignment.threads;
    let (seats, time) = (0..assignment.threads, assignment.hold);
    match assignment.way {
        Way::Raw => {
            let raw = seats
                .map(|thread| {
                    let owner = (first_seat + thread).to_string();
                    Raw::new(&assignment.url, &assignment.key(thread), &owner)
                })
                .collect::<anyhow::Result<Vec<_>>>()?;
            Ok(threads(raw, first_seat, time))
        }
        Way::PipedRaw => {
            let raw = seats
                .map(|thread| {
                    let owner = (first_seat + thread).to_string();
                    PipedRaw::new(&assignment.url, &assignment.key(thread), &owner)
                })
                .collect::<anyhow::Result<Vec<_>>>()?;
            Ok(threads(raw, first_seat, time))
        }
        Way::FairMutex => {
            let last = Arc::new(parking_lot::Mutex::new(None));
            let bare = seats
                .map(|seat| FairMutex {
                    last: Arc::clone(&last),
                    seat,
                })
                .collect();
            Ok(threads(bare, first_seat, time))
        }
        Way::FairQueue => {
            let threads_of_queue = FairQueue::of_threads(assignment.threads);
            Ok(threads(threads_of_queue, first_seat, time))
        }
        Way::Limit => {
            let limit = Arc::new(Limit::connect(&assignment.url)?);
            let limited = seats
                .map(|thread| Limited::new(&limit, assignment.key(thread), first_seat + thread))
                .collect();
            Ok(threads(limited, first_seat, time))
        }
        Way::Drop | Way::Unlock => {
            let client = Client::open(&assignment.url)?;
            let ours = seats
                .map(|thread| Ours {
                    mutex: client.mutex(assignment.key(thread)),
                    confirmed: assignment.way == Way::Unlock,
                })
                .collect();
            Ok(threads(ours, first_seat, time))
        }
        Way::WithLock => {
            let client = Client::open(&assignment.url)?;
            let closures = seats
                .map(|thread| Closure {
                    client: client.clone(),
                    key: assignment.key(thread),
                })
                .collect();
            Ok(threads(closures, first_seat, time))
        }
        Way::Rslock { .. } | Way::Redlock { .. } => bail!("no lock of leasehold"),
    }
}

struct Ours {
    mutex: Mutex,
    /// Whether to wait for the release.
    confirmed: bool,
}

impl Locker for Ours {
    async fn pair(&mut self, time: Duration) -> anyhow::Result<u64> {
        let guard = self.mutex.lock()?;
        let acquired = hold(time);
        if self.confirmed {
            guard.unlock()?;
        }
        Ok(acquired)
    }
}

struct Closure {
    client: Client,
    key: String,
}

impl Locker for Closure {
    async fn pair(&mut self, time: Duration) -> anyhow::Result<u64> {
        Ok(self.client.with_lock(&self.key, || hold(time))?)
    }
}

/// A mutex with fair unlock: the limit for threads of one process that pass one lock on.
struct FairMutex {
    /// The thread that held the mutex last.
    last: Arc<parking_lot::Mutex<Option<usize>>>,
    seat: usize,
}

/// For how long a thread tries to get the mutex from another thread. At the end of a round, this thread may be the only
/// one left.
const PATIENCE: Duration = Duration::from_millis(50);

impl Locker for FairMutex {
    /// Counts only a hold that came from another thread, as almost all holds of a leasehold lock do: `unlock_fair`
    /// hands the mutex on only to a thread that is parked at that moment.
    async fn pair(&mut self, time: Duration) -> anyhow::Result<u64> {
        let give_up = Instant::now() + PATIENCE;
        while Instant::now() < give_up {
            let mut last = self.last.lock();
            if last.replace(self.seat) == Some(self.seat) {
                MutexGuard::unlock_fair(last);
                continue;
            }
            let acquired = hold(time);
            MutexGuard::unlock_fair(last);
            return Ok(acquired);
        }
        Ok(hold(time))
    }
}

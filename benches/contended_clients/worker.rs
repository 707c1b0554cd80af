//! One worker: a process with one client, whose one thread locks the key, holds it and releases it until the parent
//! ends it. Logs every event.

use std::fs::{File, TryLockError};
use std::io;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use leasehold::crossbeam_channel::{Receiver, bounded};
use leasehold::{Client, ErrorKind, Mutex};
use leasehold_testbed::child;
use serde::{Deserialize, Serialize};

use crate::events::Log;

pub const KEY: &str = "wanted";
/// A file in the folder of the logs. Each holder locks it with `flock`, which shows whether two workers hold the lock.
pub const GATE: &str = "gate";
/// Long enough for a machine that starts 1,000 processes on two cores.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const OUTAGE_TIMEOUT: Duration = Duration::from_secs(30);

#[derive(Serialize, Deserialize)]
pub struct Assignment {
    pub url: String,
    /// The folder of the logs and the gate.
    pub folder: PathBuf,
    pub number: usize,
    pub hold: Duration,
    pub ttl: Duration,
}

#[derive(Serialize, Deserialize)]
pub enum Order {
    Go,
    End,
}

/// The role of the worker: reports when it is connected, and begins and ends on request.
pub fn work(assignment: Assignment, orders: Receiver<Order>) -> anyhow::Result<()> {
    let folder = &assignment.folder;
    let log = Log::create(&folder.join(assignment.number.to_string()))?;
    let gate = File::open(folder.join(GATE))?;
    let client = Client::builder(&assignment.url)
        .ttl(assignment.ttl)
        .connect_timeout(CONNECT_TIMEOUT)
        .outage_timeout(OUTAGE_TIMEOUT)
        .build()?;
    child::say(&())?;
    let Order::Go = orders.recv()? else {
        return Ok(());
    };
    let (running, ended) = bounded(0);
    let mutex = client.mutex(KEY).cancelled_by(ended);
    let competing = thread::spawn(move || compete(&mutex, log, &gate, assignment.hold));
    while let Order::Go = orders.recv()? {}
    drop(running);
    Ok(competing.join().expect("it does not panic")?)
}

fn compete(mutex: &Mutex, mut log: Log, gate: &File, hold: Duration) -> io::Result<()> {
    loop {
        log.asked()?;
        let guard = match mutex.lock() {
            Ok(guard) => guard,
            Err(error) if error.kind() == ErrorKind::Cancelled => return log.cancelled(),
            Err(error) => {
                log.error(error)?;
                continue;
            }
        };
        log.entered(guard.fencing_token())?;
        let company = match gate.try_lock() {
            Ok(()) => false,
            Err(TryLockError::WouldBlock) => true,
            Err(TryLockError::Error(error)) => return Err(error),
        };
        thread::sleep(hold);
        if company {
            log.company()?;
        } else {
            gate.unlock()?;
        }
        if guard.is_lost() {
            log.lost()?;
        }
        log.left()?;
        drop(guard);
    }
}

//! One worker: a process with one client, whose one thread locks the key, holds it and releases it until the
//! standard input ends. Judges nothing; logs every event.

use std::error::Error;
use std::fs::{File, TryLockError};
use std::io::{self, BufRead as _};
use std::path::Path;
use std::thread;
use std::time::Duration;

use clap::Args;
use leasehold::crossbeam_channel::bounded;
use leasehold::{Client, ErrorKind, Mutex};

use crate::events::Log;

pub const KEY: &str = "wanted";
/// In the folder of the logs: locked by the holder with `flock`, which knows nothing of leasehold.
pub const GATE: &str = "gate";
/// A machine that starts 1,000 processes on two cores must not fail for its slowness.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const PATIENCE: Duration = Duration::from_secs(30);

#[derive(Args)]
pub struct Assignment {
    url: String,
    /// Where the logs and the gate are
    folder: String,
    number: usize,
    hold: u64,
    ttl: u64,
}

/// The role: prints `ready` when it is connected, and begins at the first line of its input.
pub fn work(assignment: &Assignment) -> Result<(), Box<dyn Error>> {
    let folder = Path::new(&assignment.folder);
    let log = Log::create(&folder.join(assignment.number.to_string()))?;
    let gate = File::open(folder.join(GATE))?;
    let client = Client::builder(&assignment.url)
        .ttl(Duration::from_millis(assignment.ttl))
        .connect_timeout(CONNECT_TIMEOUT)
        .outage_timeout(PATIENCE)
        .build()?;
    println!("ready");
    let mut lines = io::stdin().lock().lines();
    lines.next().transpose()?;
    let (running, ended) = bounded(0);
    let mutex = client.mutex(KEY).cancelled_by(ended);
    let hold = Duration::from_millis(assignment.hold);
    let competing = thread::spawn(move || compete(&mutex, log, &gate, hold));
    // Nothing more is sent: this waits for the end of the input.
    while lines.next().transpose()?.is_some() {}
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

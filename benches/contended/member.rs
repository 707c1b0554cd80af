//! One process of a crowd: its threads take one key and let it go as fast as they get it. Judges
//! nothing; reports every grant.
//!
//! The report is one line per thread, `token:entered ..`, and one of all waits, `µs:count ..`.

use std::error::Error;
use std::fmt::Write as _;
use std::thread;
use std::time::Duration;

use hdrhistogram::Histogram;
use leasehold::{Client, Mutex};

use crate::{process, support};

pub const KEY: &str = "wanted";

/// A lock that a thread got.
#[derive(Clone, Copy)]
pub struct Grant {
    pub token: u64,
    /// When its thread had it in hand, on the clock of all processes, in ns.
    pub entered: u64,
}

/// What one process has to tell.
pub struct Report {
    pub threads: Vec<Vec<Grant>>,
    pub waits: Histogram<u64>,
}

/// The role: from the moment that the parent names, in ns, for as long as `window`.
pub fn work(url: &str, threads: usize, window: Duration) -> Result<(), Box<dyn Error>> {
    let client = Client::open(url)?;
    let mutex = client.mutex(KEY);
    // Connections are made before the start.
    mutex.lock()?.unlock()?;
    process::ready();
    let line = process::next_line()?.ok_or("the parent has gone")?;
    let start: u64 = line.parse()?;
    let end = start + window.as_nanos() as u64;
    let mut waits = support::histogram();
    let mut lines = String::new();
    thread::scope(|scope| {
        let threads: Vec<_> = (0..threads)
            .map(|_| scope.spawn(|| compete(&mutex, start, end)))
            .collect();
        for thread in threads {
            let (grants, waited) = thread.join().expect("it does not panic")?;
            for Grant { token, entered } in grants {
                let _ = write!(lines, "{token}:{entered} ");
            }
            lines.push('\n');
            waits += waited;
        }
        Ok::<_, leasehold::Error>(())
    })?;
    for value in waits.iter_recorded() {
        let _ = write!(
            lines,
            "{}:{} ",
            value.value_iterated_to(),
            value.count_at_value()
        );
    }
    println!("{lines}");
    Ok(())
}

/// One thread: what it got, and how long it waited each time.
fn compete(
    mutex: &Mutex,
    start: u64,
    end: u64,
) -> Result<(Vec<Grant>, Histogram<u64>), leasehold::Error> {
    let mut grants = Vec::new();
    let mut waits = support::histogram();
    thread::sleep(Duration::from_nanos(
        start.saturating_sub(support::nanoseconds()),
    ));
    loop {
        let asked = support::nanoseconds();
        if asked >= end {
            return Ok((grants, waits));
        }
        let guard = mutex.lock()?;
        let entered = support::nanoseconds();
        let token = guard.fencing_token();
        drop(guard);
        grants.push(Grant { token, entered });
        support::record(&mut waits, Duration::from_nanos(entered - asked));
    }
}

impl Report {
    /// Reads `threads + 1` lines of a process.
    pub fn read(process: &process::Process, threads: usize) -> Result<Self, Box<dyn Error>> {
        let grant = |(token, entered)| Grant { token, entered };
        let threads = (0..threads)
            .map(|_| Ok(pairs(&process.told()?)?.into_iter().map(grant).collect()))
            .collect::<Result<_, Box<dyn Error>>>()?;
        let mut waits = support::histogram();
        for (micros, count) in pairs(&process.told()?)? {
            waits.saturating_record_n(micros, count);
        }
        Ok(Self { threads, waits })
    }
}

fn pairs(line: &str) -> Result<Vec<(u64, u64)>, Box<dyn Error>> {
    let pair = |word: &str| {
        let (left, right) = word.split_once(':').ok_or("a pair without a colon")?;
        Ok((left.parse()?, right.parse()?))
    };
    line.split_whitespace().map(pair).collect()
}

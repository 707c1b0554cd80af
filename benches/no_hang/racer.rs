//! One process of the race: in each round a new client whose threads take the key and let it go as
//! fast as they get it. Judges nothing; reports every grant, or who is stuck where.
//!
//! A report is three lines: `done <done, ns> <closed, ns> <raised>`, the grants as `token:entered ..`,
//! the waits as `µs:count ..`. Instead of it, `hung <who, where>`.

use std::error::Error;
use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use hdrhistogram::Histogram;
use leasehold::{Client, MutexGuard};

use crate::{process, support};

pub const KEY: &str = "wanted";
/// A counter in Redis, and the name of the connections that raise it.
pub const WITNESS: &str = "witness";
/// Every how many grants a thread raises it.
const RAISES: usize = 16;

/// A fencing token, and when its thread had the lock in hand, on the clock of all processes, in ns.
pub type Grant = (u64, u64);

/// What one process has to tell of a round.
pub struct Report {
    pub grants: Vec<Grant>,
    pub waits: Histogram<u64>,
    pub raised: u64,
    /// When its threads were done, and when its client had gone.
    pub done: u64,
    pub closed: u64,
}

pub enum Outcome {
    Done(Report),
    Hung(String),
}

/// From when to when a round lasts, in ns on the clock of all processes.
#[derive(Clone, Copy)]
struct Times {
    start: u64,
    end: u64,
}

/// What a thread is about.
#[derive(Clone, Copy, Debug)]
#[repr(u8)]
enum Doing {
    Nothing,
    Locking,
    Raising,
    Unlocking,
    Dropping,
}

impl Doing {
    const ALL: [Self; 5] = [
        Self::Nothing,
        Self::Locking,
        Self::Raising,
        Self::Unlocking,
        Self::Dropping,
    ];
}

/// What the threads of a round are about, each by itself.
type Board = Arc<Vec<AtomicU8>>;

/// The role: round after round, until the parent has gone.
pub fn work(url: &str, bound: Duration) -> Result<(), Box<dyn Error>> {
    process::ready();
    while let Some(line) = process::next_line()? {
        let threads: usize = line.parse()?;
        let client = Client::open(url)?;
        // They are left alone once they have their name.
        let witnesses = (0..threads)
            .map(|_| witness(url))
            .collect::<Result<_, _>>()?;
        process::ready();
        let line = process::next_line()?.ok_or("the parent has gone")?;
        let (start, end) = line.split_once(' ').ok_or("no start and end")?;
        let times = Times {
            start: start.parse()?,
            end: end.parse()?,
        };
        let board: Board = Arc::new((0..threads).map(|_| AtomicU8::new(0)).collect());
        let report = round(client, witnesses, &board, times);
        let left = times.end.saturating_sub(support::nanoseconds());
        let limit = Duration::from_nanos(left) + bound;
        match report.recv_timeout(limit) {
            Ok(Ok(lines)) => println!("{lines}"),
            Ok(Err(error)) => return Err(error.into()),
            Err(_) => println!("hung process {}: {}", std::process::id(), seen(&board)),
        }
    }
    Ok(())
}

fn seen(board: &Board) -> String {
    let threads = board.iter().enumerate().map(|(thread, doing)| {
        let doing = Doing::ALL[usize::from(doing.load(Ordering::Relaxed))];
        format!("thread {thread} {doing:?}")
    });
    let all: Vec<String> = threads.collect();
    all.join(", ")
}

fn witness(url: &str) -> redis::RedisResult<redis::Connection> {
    let mut witness = redis::Client::open(url)?.get_connection()?;
    let mut name = redis::cmd("CLIENT");
    name.arg("SETNAME").arg(WITNESS).exec(&mut witness)?;
    Ok(witness)
}

/// One round on threads of its own, so that it can be given up.
fn round(
    client: Client,
    witnesses: Vec<redis::Connection>,
    board: &Board,
    times: Times,
) -> Receiver<Result<String, String>> {
    let (sender, receiver) = channel();
    let board = Arc::clone(board);
    thread::spawn(move || {
        let threads: Vec<_> = witnesses
            .into_iter()
            .enumerate()
            .map(|(n, witness)| {
                let (client, board) = (client.clone(), Arc::clone(&board));
                thread::spawn(move || compete(&client, witness, &board[n], times))
            })
            .collect();
        let raced = threads.into_iter().map(|thread| match thread.join() {
            Ok(raced) => raced.map_err(|error| error.to_string()),
            Err(_) => Err("a thread has panicked".to_owned()),
        });
        let raced: Result<Vec<Raced>, String> = raced.collect();
        let done = support::nanoseconds();
        drop(client);
        let closed = support::nanoseconds();
        // Nobody is left to hear of it once the round was given up.
        let _ = sender.send(raced.map(|raced| lines(&raced, done, closed)));
    });
    receiver
}

/// What one thread has to tell.
struct Raced {
    grants: Vec<Grant>,
    waits: Histogram<u64>,
    raised: u64,
}

fn compete(
    client: &Client,
    mut witness: redis::Connection,
    doing: &AtomicU8,
    times: Times,
) -> Result<Raced, Box<dyn Error + Send + Sync>> {
    let mut raced = Raced {
        grants: Vec::new(),
        waits: support::histogram(),
        raised: 0,
    };
    let now_doing = |what: Doing| doing.store(what as u8, Ordering::Relaxed);
    let mutex = client.mutex(KEY);
    let early = times.start.saturating_sub(support::nanoseconds());
    thread::sleep(Duration::from_nanos(early));
    loop {
        let asked = support::nanoseconds();
        if asked >= times.end {
            now_doing(Doing::Nothing);
            return Ok(raced);
        }
        now_doing(Doing::Locking);
        let guard: MutexGuard = mutex.lock()?;
        let entered = support::nanoseconds();
        raced.grants.push((guard.fencing_token(), entered));
        let waited = Duration::from_nanos(entered - asked);
        support::record(&mut raced.waits, waited);
        let turn = raced.grants.len();
        if turn.is_multiple_of(RAISES) {
            now_doing(Doing::Raising);
            raise(&mut witness)?;
            raced.raised += 1;
        }
        if turn.is_multiple_of(2) {
            now_doing(Doing::Unlocking);
            // Killed twice in a row, it is confirmed in the background.
            guard.unlock()?;
        } else {
            now_doing(Doing::Dropping);
            drop(guard);
        }
    }
}

fn raise(witness: &mut redis::Connection) -> redis::RedisResult<()> {
    let value: Option<u64> = redis::cmd("GET").arg(WITNESS).query(witness)?;
    let next = value.unwrap_or(0) + 1;
    redis::cmd("SET").arg(WITNESS).arg(next).exec(witness)
}

fn lines(raced: &[Raced], done: u64, closed: u64) -> String {
    let raised: u64 = raced.iter().map(|one| one.raised).sum();
    let mut lines = format!("done {done} {closed} {raised}\n");
    for (token, entered) in raced.iter().flat_map(|one| &one.grants) {
        let _ = write!(lines, "{token}:{entered} ");
    }
    lines.push('\n');
    let waits = raced.iter().fold(support::histogram(), |mut all, one| {
        all += &one.waits;
        all
    });
    for value in waits.iter_recorded() {
        let (micros, count) = (value.value_iterated_to(), value.count_at_value());
        let _ = write!(lines, "{micros}:{count} ");
    }
    lines
}

/// In the parent: what a process tells of a round.
pub fn read(process: &process::Process) -> Result<Outcome, Box<dyn Error>> {
    let line = process.told()?;
    if let Some(what) = line.strip_prefix("hung ") {
        return Ok(Outcome::Hung(what.to_owned()));
    }
    let words: Vec<&str> = line.split(' ').collect();
    let ["done", done, closed, raised] = words.as_slice() else {
        return Err(format!("a process said {line:?} instead of reporting").into());
    };
    let grants = pairs(&process.told()?)?;
    let mut waits = support::histogram();
    for (micros, count) in pairs(&process.told()?)? {
        waits.saturating_record_n(micros, count);
    }
    Ok(Outcome::Done(Report {
        grants,
        waits,
        raised: raised.parse()?,
        done: done.parse()?,
        closed: closed.parse()?,
    }))
}

fn pairs(line: &str) -> Result<Vec<(u64, u64)>, Box<dyn Error>> {
    let pair = |word: &str| {
        let (left, right) = word.split_once(':').ok_or("a pair without a colon")?;
        Ok((left.parse()?, right.parse()?))
    };
    line.split_whitespace().map(pair).collect()
}

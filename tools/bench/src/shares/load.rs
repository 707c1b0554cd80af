//! A load process: its threads and their requests.

use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use anyhow::{anyhow, bail};
use leasehold::crossbeam_channel::Receiver;
use leasehold::{Client, Mutex, RwLock, Semaphore};
use leasehold_load::{RawShare, Round, Share, Tally, Waits, hold, nanoseconds, own_cpu, sum};
use leasehold_testbed::child::{self, say};
use serde::{Deserialize, Serialize};

use super::cases::{Mix, Way};

/// The work of a process. Redisson's process (crates/peers/redisson) reads it, too.
#[derive(Serialize, Deserialize)]
pub struct Assignment {
    pub url: String,
    pub way: Way,
    pub process: usize,
    pub threads: usize,
    pub own_clients: bool,
    pub mix: Mix,
    pub hold: Duration,
    /// The number of further readers that Redisson's process has to add.
    pub others: usize,
}

/// The name of the key that this way uses.
pub fn key(way: Way) -> String {
    format!("shared-{}", way.name())
}

/// The results of the threads of a process, for the first and for the second kind of request.
pub type Tallies = [Tally; 2];

/// Long enough for hundreds of clients that connect at the same time on two cores.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

pub fn main() -> ExitCode {
    child::run(|assignment: Assignment, rounds: Receiver<Round>| {
        let mut seats = connect(&assignment)?;
        say(&Tallies::default())?;
        for round in rounds {
            let before = own_cpu();
            let ended: Vec<_> = thread::scope(|scope| {
                let threads = seats
                    .iter_mut()
                    .map(|seat| scope.spawn(|| seat.run(&round)));
                let threads: Vec<_> = threads.collect();
                let ended = threads.into_iter().map(thread::ScopedJoinHandle::join);
                ended
                    .map(|outcome| outcome.map_err(|_| anyhow!("a thread panicked"))?)
                    .collect::<anyhow::Result<_>>()
            })?;
            let mut all = Tallies::default();
            for (kind, all) in all.iter_mut().enumerate() {
                let of_kind = ended.iter().map(|tallies: &Tallies| tallies[kind].clone());
                *all = sum(&of_kind.collect::<Vec<_>>())?;
            }
            all[0].cpu = own_cpu().saturating_sub(before);
            say(&all)?;
        }
        Ok(())
    })
}

fn connect(assignment: &Assignment) -> anyhow::Result<Vec<Seat>> {
    let open = || {
        let client = Client::builder(&assignment.url).connect_timeout(CONNECT_TIMEOUT);
        client.build()
    };
    let mut shared: Option<Client> = None;
    let (name, first) = (key(assignment.way), assignment.process * assignment.threads);
    let seat = |number: usize| {
        let client = match (&shared, assignment.way) {
            (_, Way::Raw) => None,
            (Some(client), _) if !assignment.own_clients => Some(client.clone()),
            _ => Some(open()?),
        };
        if shared.is_none() {
            shared.clone_from(&client);
        }
        let of_kind = |share| {
            Ok::<_, anyhow::Error>(match (&client, share) {
                (None, _) => Lock::Raw(
                    Box::new(RawShare::new(&assignment.url, &name, &number.to_string())?),
                    share,
                ),
                (Some(client), _) if assignment.way == Way::Mutex => {
                    Lock::Mutex(client.mutex(&name))
                }
                (Some(client), Share::Read) => Lock::Read(client.rw_lock(&name)),
                (Some(client), Share::Write) => Lock::Write(client.rw_lock(&name)),
                (Some(client), Share::Permits { weight, limit }) => {
                    Lock::Permits(client.semaphore(&name, limit).weight(weight))
                }
                (Some(client), Share::Keys { count, of }) => Lock::Keys {
                    client: client.clone(),
                    names: (0..of).map(|n| format!("{name}-{n}")).collect(),
                    count: count as usize,
                },
            })
        };
        let mix = assignment.mix;
        Ok(Seat {
            locks: [of_kind(mix.first)?, of_kind(mix.second)?],
            second_percent: mix.second_percent,
            hold: assignment.hold,
            random: (number as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15),
        })
    };
    if assignment.way == Way::Redisson {
        bail!("no lock of leasehold");
    }
    (first..first + assignment.threads).map(seat).collect()
}

/// A thread, and the locks of its two kinds of requests.
struct Seat {
    locks: [Lock; 2],
    second_percent: u32,
    hold: Duration,
    random: u64,
}

enum Lock {
    Raw(Box<RawShare>, Share),
    Mutex(Mutex),
    Read(RwLock),
    Write(RwLock),
    Permits(Semaphore),
    /// The first `count` of these names are the keys of the next request.
    Keys {
        client: Client,
        names: Vec<String>,
        count: usize,
    },
}

impl Lock {
    /// Chooses the keys of the next request.
    fn choose(&mut self, mut draw: impl FnMut() -> u64) {
        if let Self::Keys { names, count, .. } = self {
            for place in 0..*count {
                let left = (names.len() - place) as u64;
                names.swap(place, place + (draw() % left) as usize);
            }
        }
    }

    /// Acquires the lock, holds it and releases it. Returns the time of the grant, in ns.
    fn pair(&mut self, time: Duration) -> anyhow::Result<u64> {
        Ok(match self {
            Self::Raw(raw, share) => {
                raw.take(*share)?;
                let taken = hold(time);
                raw.give(*share)?;
                taken
            }
            Self::Mutex(mutex) => {
                let _guard = mutex.lock()?;
                hold(time)
            }
            Self::Read(lock) => {
                let _guard = lock.read()?;
                hold(time)
            }
            Self::Write(lock) => {
                let _guard = lock.write()?;
                hold(time)
            }
            Self::Permits(semaphore) => {
                let _permit = semaphore.acquire()?;
                hold(time)
            }
            Self::Keys {
                client,
                names,
                count,
            } => {
                let _guard = client.mutexes(&names[..*count]).lock()?;
                hold(time)
            }
        })
    }
}

impl Seat {
    fn run(&mut self, round: &Round) -> anyhow::Result<Tallies> {
        let end = round.start + round.window.as_nanos() as u64;
        let mut waits = [Waits::new()?, Waits::new()?];
        let mut tallies = Tallies::default();
        thread::sleep(Duration::from_nanos(
            round.start.saturating_sub(nanoseconds()),
        ));
        loop {
            let asked = nanoseconds();
            if asked >= end {
                break;
            }
            let kind = usize::from(draw(&mut self.random) % 100 < u64::from(self.second_percent));
            self.locks[kind].choose(|| draw(&mut self.random));
            let taken = self.locks[kind].pair(self.hold)?;
            waits[kind].record(Duration::from_nanos(taken - asked))?;
            tallies[kind].pairs += 1;
            tallies[kind].in_time += u64::from(taken < end);
        }
        for (tally, waits) in tallies.iter_mut().zip(waits) {
            tally.waits = waits.to_steps();
        }
        Ok(tallies)
    }
}

/// The next number of xorshift.
fn draw(random: &mut u64) -> u64 {
    *random ^= *random << 13;
    *random ^= *random >> 7;
    *random ^= *random << 17;
    *random
}

//! A process of the soak, doing its job: threads that use locks, and one client at a time that they
//! share. Judges nothing.

use std::fs;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::anyhow;
use crossbeam_channel::Receiver;
use leasehold::{Builder, Client};
use leasehold_testbed::child::{self, say};
use leasehold_testbed::eventually;

use super::chance::Chance;
use super::mass::Mass;
use super::messages::{
    Assignment, COMMAND_TIMEOUT, CONNECT_TIMEOUT, LONGEST_TTL, Message, Order, PATIENCE, Raced,
};
use super::operations::Thread;
use super::operations::race::Racers;
use super::records::{What, Who, Writer};

/// Draws of clients are told apart from those of threads.
const OF_CLIENTS: u64 = 1 << 32;
/// For how long a client may take to end, when nothing is wrong any more.
pub const END: Duration = Duration::from_secs(2);
/// Within which its threads are gone, on a busy machine.
const THREADS_GONE: Duration = Duration::from_secs(20);

pub fn main() -> ExitCode {
    child::run(work)
}

fn work(assignment: Assignment, orders: Receiver<Order>) -> anyhow::Result<()> {
    let place = Place::open(assignment)?;
    thread::scope(|scope| {
        let threads: Vec<_> = (0..place.assignment.threads)
            .map(|number| place.thread(number))
            .collect::<anyhow::Result<_>>()?;
        let running: Vec<_> = threads
            .into_iter()
            .map(|thread| scope.spawn(|| thread.run()))
            .collect();
        say(&Message::Ready)?;
        let mut race = Vec::new();
        loop {
            match orders.recv()? {
                Order::Finish => break,
                Order::Hold { count } => {
                    let count = place.hold_many(count)?;
                    say(&Message::Holding { count })?;
                }
                Order::Drop => {
                    place.drop_many()?;
                    say(&Message::Dropped)?;
                }
                Order::Crowd { clients, millis } => {
                    let until = Instant::now() + Duration::from_millis(millis);
                    for _ in 0..clients {
                        let (thread, client) = place.one_of_a_crowd()?;
                        // Not waited for one by one: the end of the scope waits for all.
                        scope.spawn(move || thread.stand_in_crowd(&client, until));
                    }
                }
                Order::Race { threads } => {
                    let racers = threads.into_iter().map(|threads| place.racers(threads));
                    race = racers.collect::<anyhow::Result<_>>()?;
                    say(&Message::AtStart)?;
                }
                Order::Go { until } => {
                    let racers = std::mem::take(&mut race);
                    scope.spawn(move || run_race(racers, until));
                }
            }
        }
        place.is_ending.store(true, Ordering::Relaxed);
        for thread in running {
            thread.join().map_err(|_| anyhow!("a thread panicked"))?;
        }
        anyhow::Ok(())
    })?;
    place.close();
    let is_kept = place.leaky.get().is_some();
    let mut threads = Vec::new();
    let _ = eventually(THREADS_GONE, || {
        threads = threads_of_leasehold(is_kept);
        threads.is_empty()
    });
    say(&Message::Finished { threads, is_kept })?;
    // Until the parent has looked at what is left elsewhere.
    orders.recv().map(|_| ()).or(Ok(()))
}

/// Says what all `racers` did, once they have gone. A failure ends the process.
fn run_race(racers: Vec<Racers<'_>>, until: u64) {
    let raced = thread::scope(|scope| {
        let racing: Vec<_> = racers
            .into_iter()
            .map(|racers| scope.spawn(move || racers.race(until)))
            .collect();
        let raced = racing.into_iter().map(|racing| {
            let raced = racing.join().map_err(|_| anyhow!("a client panicked"))??;
            Ok(raced.raised)
        });
        let raised = raced.sum::<anyhow::Result<u64>>()?;
        say(&Message::Raced(Raced { raised }))
    });
    raced.expect("a race fails only with its server or its parent");
}

/// Threads that clients of this process have left, by name; nothing where threads cannot be seen.
fn threads_of_leasehold(is_kept: bool) -> Vec<String> {
    let Ok(tasks) = fs::read_dir("/proc/self/task") else {
        return Vec::new();
    };
    let names = tasks.filter_map(|task| fs::read_to_string(task.ok()?.path().join("comm")).ok());
    // What a forgotten guard keeps of its client is idle after the shutdown, and there still.
    let is_left =
        |name: &String| name.starts_with("leasehold-") || !is_kept && name.starts_with("r2d2-");
    names
        .map(|name| name.trim_end().to_owned())
        .filter(is_left)
        .collect()
}

/// What the threads of a process share.
pub struct Place {
    pub assignment: Assignment,
    /// The same for all clients of this process.
    pub ttl: Duration,
    /// There until the end.
    client: Mutex<(Option<Client>, Chance)>,
    is_ending: AtomicBool,
    /// The number of the next thread.
    next_thread: AtomicUsize,
    /// The last that was ordered.
    mass: Mutex<Option<Mass>>,
    /// What forgotten guards keep: those of no other client are forgotten.
    leaky: OnceLock<Client>,
}

impl Place {
    fn open(assignment: Assignment) -> anyhow::Result<Self> {
        let (round, process) = (assignment.round, assignment.process as u64);
        let life = assignment.life as u64;
        let mut chance = Chance::new(assignment.seed, &[OF_CLIENTS, round, process, life]);
        let ttl = chance.weighted(&[(1, 600), (2, 1200), (1, 2500)]);
        let ttl = Duration::from_millis(ttl);
        let client = new_client(&assignment.url, ttl, &mut chance)?;
        Ok(Self {
            ttl,
            next_thread: AtomicUsize::new(assignment.threads),
            mass: Mutex::new(None),
            assignment,
            client: Mutex::new((Some(client), chance)),
            is_ending: AtomicBool::new(false),
            leaky: OnceLock::new(),
        })
    }

    fn thread(&self, thread: usize) -> anyhow::Result<Thread<'_>> {
        let Assignment { process, life, .. } = self.assignment;
        let place = [
            self.assignment.round,
            process as u64,
            life as u64,
            thread as u64,
        ];
        let who = Who {
            process,
            life,
            thread,
        };
        let writer = Writer::create(&self.assignment.folder, who)?;
        let chance = Chance::new(self.assignment.seed, &place);
        Ok(Thread::new(self, writer, chance))
    }

    /// A client of its own, and the thread that uses it.
    fn one_of_a_crowd(&self) -> anyhow::Result<(Thread<'_>, Client)> {
        let number = self.next_thread.fetch_add(1, Ordering::Relaxed);
        let settings = settings(&self.assignment.url, self.ttl);
        let client = settings.pipelines(1).max_transactions(1).build_lazy()?;
        Ok((self.thread(number)?, client))
    }

    /// A client for a race.
    fn racers(&self, threads: usize) -> anyhow::Result<Racers<'_>> {
        let next = || self.thread(self.next_thread.fetch_add(1, Ordering::Relaxed));
        let threads = (0..threads)
            .map(|_| next())
            .collect::<anyhow::Result<_>>()?;
        Racers::new(&self.assignment.url, threads, next()?)
    }

    /// How many there are.
    fn hold_many(&self, count: usize) -> anyhow::Result<usize> {
        let mut mass = self.mass.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(before) = mass.take() {
            let _ = before.client.shutdown(END);
        }
        let Assignment { url, process, .. } = &self.assignment;
        let mass = mass.insert(Mass::take(url, *process, count)?);
        Ok(mass.len())
    }

    fn drop_many(&self) -> anyhow::Result<()> {
        let mut mass = self.mass.lock().unwrap_or_else(PoisonError::into_inner);
        let wrong = mass.as_mut().map_or_else(Vec::new, Mass::drop_all);
        if !wrong.is_empty() {
            let Assignment { process, life, .. } = self.assignment;
            let thread = self.next_thread.fetch_add(1, Ordering::Relaxed);
            let who = Who {
                process,
                life,
                thread,
            };
            let mut records = Writer::create(&self.assignment.folder, who)?;
            for wrong in wrong {
                records.write(What::Wrong(wrong));
            }
        }
        Ok(())
    }

    pub fn is_ending(&self) -> bool {
        self.is_ending.load(Ordering::Relaxed)
    }

    pub fn client(&self) -> Client {
        let client = self.lock().0.clone();
        client.expect("threads end before the client does")
    }

    /// Puts a new client in the place of the old one, which is given back.
    pub fn reopen(&self) -> anyhow::Result<Option<Client>> {
        let (client, chance) = &mut *self.lock();
        let new = new_client(&self.assignment.url, self.ttl, chance)?;
        Ok(client.replace(new))
    }

    /// A client whose guards may be forgotten.
    pub fn leaky_client(&self) -> Client {
        let settings = settings(&self.assignment.url, self.ttl);
        let client = || settings.pipelines(1).max_transactions(1).build_lazy();
        let client = || client().expect("it need not connect");
        self.leaky.get_or_init(client).clone()
    }

    /// What cannot be confirmed in time says so, and is no matter here.
    fn close(&self) {
        if let Some(client) = self.lock().0.take() {
            let _ = client.shutdown(END);
        }
        let mut mass = self.mass.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(mass) = mass.take() {
            let _ = mass.client.shutdown(END);
        }
        if let Some(client) = self.leaky.get() {
            let _ = client.shutdown(END);
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, (Option<Client>, Chance)> {
        self.client.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The server may be away just now.
fn new_client(url: &str, ttl: Duration, chance: &mut Chance) -> anyhow::Result<Client> {
    let pipelines = 1 + chance.below(4);
    let hand_offs = chance.weighted(&[(1, 0), (1, 4), (2, 256)]);
    let client = settings(url, ttl).pipelines(pipelines).hand_offs(hand_offs);
    Ok(client.build_lazy()?)
}

pub fn settings(url: &str, ttl: Duration) -> Builder {
    Client::builder(url)
        .ttl(ttl)
        .max_ttl(LONGEST_TTL)
        .command_timeout(COMMAND_TIMEOUT)
        .connect_timeout(CONNECT_TIMEOUT)
        .outage_timeout(PATIENCE)
}

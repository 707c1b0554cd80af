//! A process of the soak: threads that use locks, and one client at a time that they share. Judges nothing.

use std::fs;
use std::process::{self, ExitCode};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::anyhow;
use crossbeam_channel::Receiver;
use leasehold::{Builder, Client};
use leasehold_testbed::child::{self, say};
use leasehold_testbed::eventually;

use crate::mass::Mass;
use crate::messages::{
    Assignment, COMMAND_TIMEOUT, CONNECT_TIMEOUT, LONGEST_TTL, Message, Order, Raced,
};
use crate::operations::Thread;
use crate::operations::race::Racers;
use crate::random::Random;
use crate::records::{What, Who, Writer};
use crate::watch::SetOnDrop;

/// Distinguishes the random numbers of clients from those of threads.
const OF_CLIENTS: u64 = 1 << 32;
/// How long a client may take to end when there is no fault any more.
pub const END: Duration = Duration::from_secs(2);
/// How long the threads of all clients may take to end, on a busy machine.
const THREADS_GONE: Duration = Duration::from_secs(20);

pub fn main() -> ExitCode {
    child::run(work)
}

fn work(assignment: Assignment, orders: Receiver<Order>) -> anyhow::Result<()> {
    let shared = Shared::open(assignment)?;
    thread::scope(|scope| {
        let threads: Vec<_> = (0..shared.assignment.threads)
            .map(|number| shared.thread(number))
            .collect::<anyhow::Result<_>>()?;
        let observer = shared.thread(shared.next_thread.fetch_add(1, Ordering::Relaxed))?;
        let mut running: Vec<_> = threads
            .into_iter()
            .map(|thread| scope.spawn(|| thread.run()))
            .collect();
        running.push(scope.spawn(|| observer.observe()));
        // Ends these threads also after an error, since the end of the scope waits for them.
        let ending = SetOnDrop(&shared.is_ending);
        say(&Message::Ready)?;
        let mut race = Vec::new();
        loop {
            match orders.recv()? {
                Order::Finish => {
                    shared.is_finishing.store(true, Ordering::Relaxed);
                    break;
                }
                Order::Hold { count } => {
                    let count = shared.hold_many(count)?;
                    say(&Message::Holding { count })?;
                }
                Order::Drop => {
                    shared.drop_many()?;
                    say(&Message::Dropped)?;
                }
                Order::Contend { clients, millis } => {
                    let until = Instant::now() + Duration::from_millis(millis);
                    for _ in 0..clients {
                        let (thread, client) = shared.contender()?;
                        // The end of the scope waits for these threads.
                        scope.spawn(move || thread.contend(&client, until));
                    }
                }
                Order::Race { threads } => {
                    let racers = threads.into_iter().map(|threads| shared.racers(threads));
                    race = racers.collect::<anyhow::Result<_>>()?;
                    say(&Message::AtStart)?;
                }
                Order::Go { until } => {
                    let racers = std::mem::take(&mut race);
                    scope.spawn(move || run_race(racers, until));
                }
            }
        }
        drop(ending);
        for thread in running {
            thread.join().map_err(|_| anyhow!("a thread panicked"))?;
        }
        anyhow::Ok(())
    })?;
    shared.close();
    let is_kept = shared.leaky.get().is_some();
    let mut threads = Vec::new();
    let _ = eventually(THREADS_GONE, || {
        threads = threads_of_leasehold();
        threads.is_empty()
    });
    say(&Message::Finished { threads, is_kept })?;
    // Waits until the parent has checked Redis for leftovers, and ends the input.
    orders.recv().map(|_| ()).or(Ok(()))
}

/// Reports what all `racers` did, once they have ended. A failure ends the process.
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
    if let Err(error) = raced {
        child::fail(&format!("a race failed: {error:#}"));
        process::exit(1);
    }
}

/// The names of threads that clients of this process have left. Empty on systems where threads cannot be listed.
fn threads_of_leasehold() -> Vec<String> {
    let Ok(tasks) = fs::read_dir("/proc/self/task") else {
        return Vec::new();
    };
    // The main thread and unnamed threads have the name of this program.
    let program = fs::read_to_string("/proc/self/comm").unwrap_or_default();
    let names = tasks.filter_map(|task| fs::read_to_string(task.ok()?.path().join("comm")).ok());
    names
        .filter(|name| name.starts_with("leasehold-") && *name != program)
        .map(|name| name.trim_end().to_owned())
        .collect()
}

/// The state that the threads of a process share.
pub struct Shared {
    pub assignment: Assignment,
    /// The ttl of all clients of this process.
    pub ttl: Duration,
    /// The current client, `Some` until the end.
    client: Mutex<(Option<Client>, Random)>,
    is_ending: AtomicBool,
    /// The parent has ordered the end: there are no faults any more.
    is_finishing: AtomicBool,
    /// The number of the next thread.
    next_thread: AtomicUsize,
    /// The last `Mass` that was ordered.
    mass: Mutex<Option<Mass>>,
    /// The only client whose guards are forgotten.
    leaky: OnceLock<Client>,
}

impl Shared {
    fn open(assignment: Assignment) -> anyhow::Result<Self> {
        let (round, process) = (assignment.round, assignment.process as u64);
        let life = assignment.life as u64;
        let mut random = Random::new(assignment.seed, &[OF_CLIENTS, round, process, life]);
        let ttl = random.weighted(&[(1, 600), (2, 1200), (1, 2500)]);
        let ttl = Duration::from_millis(ttl);
        let client = new_client(&assignment, ttl, &mut random)?;
        Ok(Self {
            ttl,
            next_thread: AtomicUsize::new(assignment.threads),
            mass: Mutex::new(None),
            assignment,
            client: Mutex::new((Some(client), random)),
            is_ending: AtomicBool::new(false),
            is_finishing: AtomicBool::new(false),
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
        let random = Random::new(self.assignment.seed, &place);
        Ok(Thread::new(self, writer, random))
    }

    /// A new client for contention, and the thread that uses it.
    fn contender(&self) -> anyhow::Result<(Thread<'_>, Client)> {
        let number = self.next_thread.fetch_add(1, Ordering::Relaxed);
        let settings = settings(&self.assignment, self.ttl);
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

    /// Acquires the locks, and returns their number.
    fn hold_many(&self, count: usize) -> anyhow::Result<usize> {
        let mut mass = self.mass.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(before) = mass.take() {
            let _ = before.client.shutdown(END);
        }
        let mass = mass.insert(Mass::take(&self.assignment, count)?);
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

    pub fn is_finishing(&self) -> bool {
        self.is_finishing.load(Ordering::Relaxed)
    }

    pub fn is_ending(&self) -> bool {
        self.is_ending.load(Ordering::Relaxed)
    }

    pub fn client(&self) -> Client {
        let client = self.lock().0.clone();
        client.expect("threads end before the client does")
    }

    /// Puts a new client in the place of the old one, which it returns.
    pub fn reopen(&self) -> anyhow::Result<Option<Client>> {
        let (client, random) = &mut *self.lock();
        let new = new_client(&self.assignment, self.ttl, random)?;
        Ok(client.replace(new))
    }

    /// A client whose guards may be forgotten.
    pub fn leaky_client(&self) -> Client {
        let settings = settings(&self.assignment, self.ttl);
        let client = || settings.pipelines(1).max_transactions(1).build_lazy();
        let client = || client().expect("it need not connect");
        self.leaky.get_or_init(client).clone()
    }

    /// Shuts all clients down. Ignores errors: a release that Redis does not confirm in time does not matter here.
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

    fn lock(&self) -> std::sync::MutexGuard<'_, (Option<Client>, Random)> {
        self.client.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Makes a client without connecting, since the server may be down now.
fn new_client(
    assignment: &Assignment,
    ttl: Duration,
    random: &mut Random,
) -> anyhow::Result<Client> {
    let pipelines = 1 + random.below(4);
    let hand_offs = random.weighted(&[(1, 0), (1, 4), (2, 256)]);
    let client = settings(assignment, ttl)
        .pipelines(pipelines)
        .max_hand_offs(hand_offs);
    Ok(client.build_lazy()?)
}

pub fn settings(assignment: &Assignment, ttl: Duration) -> Builder {
    Client::builder(&assignment.url)
        .ttl(ttl)
        .max_ttl(LONGEST_TTL)
        .command_timeout(COMMAND_TIMEOUT)
        .connect_timeout(CONNECT_TIMEOUT)
        .outage_timeout(assignment.outage)
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use crossbeam_channel::unbounded;

    use super::*;
    use crate::messages::SHORT_OUTAGE;

    /// No server listens at this address.
    const NOWHERE: &str = "redis://127.0.0.1:1";

    #[test]
    fn a_failed_order_ends_the_process() {
        let folder = tempfile::tempdir().unwrap();
        let assignment = Assignment {
            url: NOWHERE.to_owned(),
            folder: folder.path().to_owned(),
            seed: 1,
            round: 1,
            process: 0,
            life: 0,
            threads: 2,
            outage: SHORT_OUTAGE,
        };
        let (sender, orders) = unbounded();
        let race = Order::Race { threads: vec![1] };
        sender.send(race).unwrap();
        let (ended, end) = mpsc::channel();
        thread::spawn(move || ended.send(work(assignment, orders)));
        let outcome = end.recv_timeout(Duration::from_secs(60));
        let error = outcome.expect("the threads go on").unwrap_err();
        assert!(error.to_string().contains("refused"), "{error:#}");
    }
}

//! Processes or threads that want one key all the time: grants per second, fairness, longest wait, and requests for
//! each change of owner. The tokens of all grants show their order. The limits are ratios to what the machine can do
//! without the library, measured before and after each round, so that other load affects both alike.

use std::error::Error;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use leasehold_load::{Raw, ServerStats};
use leasehold_testbed::Server;

use crate::monitor::{Monitor, Requests};
use crate::report::Report;
use crate::role::Role;
use crate::worker::{Assignment, Grant, Way, WorkerReport};
use crate::{beside_a_sleeper, fair_queue, support};

/// Time enough for all processes to receive the start order.
const NOTICE: Duration = Duration::from_millis(50);
const SLEEP: Duration = Duration::from_millis(1);

/// The limits for several processes. One more limit is fixed: no process may get twice as many grants as another.
pub struct Limits {
    /// Grants of all processes together, divided by the pairs of raw commands on one connection in the same time.
    pub rate: f64,
    /// The longest wait, divided by the wait of a fair lock.
    pub longest_wait: Option<f64>,
    /// Requests for each change of the owning process.
    pub requests: Option<f64>,
}

/// The longest wait of a thread among threads of one process, divided by the wait of a fair lock.
const LONGEST_OF_THREADS: f64 = 60.0;

/// The results of one round.
struct Round {
    window: Duration,
    /// The grants of each thread, process by process.
    counts: Vec<Vec<usize>>,
    waits: Histogram<u64>,
    /// How often a grant went to another process than the one before.
    changes: usize,
    twice: usize,
    out_of_order: usize,
    stats: ServerStats,
    /// Empty unless requests were counted.
    requests: Requests,
}

impl Round {
    /// Lets `processes` with `threads` each compete for `window`.
    fn run(
        server: &Server,
        [processes, threads]: [usize; 2],
        way: Way,
        window: Duration,
        counts_requests: bool,
    ) -> Result<Self, Box<dyn Error>> {
        let assignment = Assignment {
            url: server.url(),
            threads,
            way,
            window,
        };
        let mut workers = (0..processes)
            .map(|_| Role::<WorkerReport>::start("worker", &assignment))
            .collect::<Result<Vec<_>, _>>()?;
        let before = ServerStats::until_now(server)?;
        let monitor = counts_requests.then(|| Monitor::start(server));
        let monitor = monitor.transpose()?;
        let start = support::nanoseconds() + NOTICE.as_nanos() as u64;
        for worker in &mut workers {
            worker.order(&start)?;
        }
        let reports = workers
            .iter()
            .map(Role::report)
            .collect::<Result<Vec<_>, _>>()?;
        let requests = monitor.map(|monitor| monitor.end(server)).transpose()?;
        let mut round = Self::of(window, start + window.as_nanos() as u64, &reports);
        round.stats = ServerStats::until_now(server)?.since(&before);
        round.requests = requests.unwrap_or_default();
        Ok(round)
    }

    /// Computes the results from the reports.
    fn of(window: Duration, end: u64, reports: &[WorkerReport]) -> Self {
        let mut waits = support::histogram();
        let mut all: Vec<(Grant, usize)> = Vec::new();
        let mut counts = Vec::new();
        for (process, report) in reports.iter().enumerate() {
            waits += report.waits();
            let in_time = |grants: &Vec<Grant>| grants.iter().filter(|g| g.entered < end).count();
            counts.push(report.threads.iter().map(in_time).collect());
            let grants = report.threads.iter().flatten();
            all.extend(grants.map(|grant| (*grant, process)));
        }
        all.sort_unstable_by_key(|(grant, _)| grant.token);
        let (mut changes, mut twice, mut out_of_order) = (0, 0, 0);
        for pair in all.windows(2) {
            let [(before, owner), (grant, next_owner)] = pair else {
                continue;
            };
            changes += usize::from(owner != next_owner);
            twice += usize::from(grant.token == before.token);
            // Each thread has read the clock while it held the key, so the times have to rise with the tokens.
            out_of_order += usize::from(grant.entered < before.entered);
        }
        Self {
            window,
            counts,
            waits,
            changes,
            twice,
            out_of_order,
            stats: ServerStats::default(),
            requests: Requests::new(),
        }
    }

    fn rate(&self) -> f64 {
        let grants: usize = self.counts.iter().flatten().sum();
        grants as f64 / self.window.as_secs_f64()
    }

    /// The longest wait, divided by the wait of a fair lock: one grant of each thread.
    fn longest_wait(&self) -> f64 {
        let threads = self.counts.iter().flatten().count();
        let longest = Duration::from_micros(self.waits.max());
        longest.as_secs_f64() * self.rate() / threads as f64
    }
}

/// Pairs of raw commands per second on one connection, for another key.
fn raw_rate(server: &Server, window: Duration) -> Result<f64, Box<dyn Error>> {
    let mut raw = Raw::new(&server.url(), "raw", "1")?;
    let start = Instant::now();
    let mut pairs = 0_u32;
    while start.elapsed() < window {
        if !raw.try_lock()? {
            return Err("no other program uses this key".into());
        }
        raw.unlock()?;
        pairs += 1;
    }
    Ok(f64::from(pairs) / start.elapsed().as_secs_f64())
}

/// Checks that no two threads held the key at the same time.
fn check(rounds: &[&Round], report: &mut Report) {
    let twice = rounds.iter().map(|round| round.twice).sum();
    report.never("tokens given twice", twice);
    let out_of_order = rounds.iter().map(|round| round.out_of_order).sum();
    let what = "grants during another hold, or with a token out of order";
    report.never(what, out_of_order);
}

/// The most grants of a process or thread, divided by the fewest of another.
fn unfairness(counts: impl Iterator<Item = usize> + Clone) -> f64 {
    let most = counts.clone().max().unwrap_or(0);
    most as f64 / counts.min().unwrap_or(0) as f64
}

/// The threads of one process.
pub fn threads(
    server: &Server,
    threads: usize,
    way: Way,
    window: Duration,
) -> Result<Report, Box<dyn Error>> {
    let before = fair_queue::rate(threads, window / 2);
    let run = || Round::run(server, [1, threads], way, window, false);
    let (round, late) = beside_a_sleeper(SLEEP, run);
    let round = round?;
    let bare = (before + fair_queue::rate(threads, window / 2)) / 2.0;

    let mut report = Report::new();
    report.spread("wait for the lock", &round.waits);
    report.sleep(&late);
    report.figure("grants/s", round.rate());
    report.figure("hand-offs/s of a fair queue without Redis", bare);
    report.at_least("ratio to the fair queue", round.rate() / bare, 0.6);
    let unfairness = unfairness(round.counts.iter().flatten().copied());
    report.at_most("grants per thread, most to least", unfairness, 1.5);
    let what = "longest wait to the wait of a fair lock";
    report.at_most(what, round.longest_wait(), LONGEST_OF_THREADS);
    check(&[&round], &mut report);
    Ok(report)
}

/// Processes with several threads each.
pub fn processes(
    server: &Server,
    shape: [usize; 2],
    window: Duration,
    counted: Duration,
    limits: Limits,
) -> Result<Report, Box<dyn Error>> {
    let before = raw_rate(server, window / 2)?;
    let (round, late) = beside_a_sleeper(SLEEP, || {
        Round::run(server, shape, Way::Guard, window, false)
    });
    let round = round?;
    let raw = (before + raw_rate(server, window / 2)?) / 2.0;
    let monitored = Round::run(server, shape, Way::Guard, counted, true)?;

    let mut report = Report::new();
    report.spread("wait for the lock", &round.waits);
    report.sleep(&late);
    report.figure("grants/s", round.rate());
    report.figure("raw pairs/s on one connection", raw);
    report.at_least("ratio to raw pairs", round.rate() / raw, limits.rate);
    let seconds = window.as_secs_f64();
    report.figure("changes of owner/s", round.changes as f64 / seconds);
    let by_process = round.counts.iter().map(|counts| counts.iter().sum());
    let unfairness = unfairness(by_process);
    report.at_most("grants per process, most to least", unfairness, 2.0);
    let what = "longest wait to the wait of a fair lock";
    match limits.longest_wait {
        Some(limit) => report.at_most(what, round.longest_wait(), limit),
        None => report.figure(what, round.longest_wait()),
    }
    let sent: u64 = monitored.requests.values().sum();
    let per_change = sent as f64 / monitored.changes as f64;
    match limits.requests {
        Some(limit) => report.at_most("requests per change of owner", per_change, limit),
        None => report.figure("requests per change of owner", per_change),
    }
    let changes = round.changes as f64;
    let stats = &round.stats;
    report.figure(
        "script calls per change, not slowed down by MONITOR",
        stats.scripts() as f64 / changes,
    );
    report.figure(
        "reads per change, not slowed down by MONITOR",
        stats.reads as f64 / changes,
    );
    check(&[&round, &monitored], &mut report);
    report.note(requests_by_command(&monitored));
    Ok(report)
}

fn requests_by_command(monitored: &Round) -> String {
    let rate = monitored.rate();
    let commands: Vec<String> = monitored
        .requests
        .iter()
        .map(|(name, sent)| format!("{sent} {name}"))
        .collect();
    let (commands, changes) = (commands.join(", "), monitored.changes);
    format!("requests, counted at {rate:.0} grants/s: {commands} for {changes} changes of owner")
}

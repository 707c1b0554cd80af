//! A held lock is overwritten: how soon is its holder notified? The ttl is long, so it plays no part.

use std::error::Error;
use std::thread;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use leasehold::{Client, Error as LockError, ErrorKind, LostSignal};
use leasehold_testbed::Server;

use crate::report::Report;
use crate::{beside_a_sleeper, support};

const TTL: Duration = Duration::from_secs(30);
/// How long a lock has been held when it is overwritten.
const HELD: [Duration; 2] = [Duration::from_millis(100), Duration::from_millis(150)];
/// How long to wait for the signal.
const SIGNAL_LIMIT: Duration = Duration::from_millis(250);
const LIMIT: f64 = 20.0;
const WAYS: [&str; 4] = [
    "DEL",
    "SET to another's value",
    "SET to garbage",
    "FLUSHALL",
];

/// Overwrites a lock in one of [`WAYS`].
fn overwrite(
    connection: &mut redis::Connection,
    way: usize,
    key: &str,
    anothers: &[u8],
) -> redis::RedisResult<()> {
    match way {
        0 => redis::cmd("DEL").arg(key).exec(connection),
        1 => redis::cmd("SET").arg(key).arg(anothers).exec(connection),
        2 => redis::cmd("SET").arg(key).arg("garbage").exec(connection),
        _ => redis::cmd("FLUSHALL").exec(connection),
    }
}

/// The time of the signal, if it came.
fn await_loss(lost: &LostSignal) -> Option<Instant> {
    let reason = lost.recv_timeout(HELD[1] + SIGNAL_LIMIT);
    reason.is_ok().then(Instant::now)
}

/// Waits for the lock, past the time at which it is overwritten. Releases the lock as soon as it is granted.
fn want(client: &Client, key: &str) -> Result<(), LockError> {
    let wanted = client.mutex(key).try_lock_for(TTL);
    match wanted {
        // A waiter gets an error for a foreign value.
        Err(error) if error.kind() != ErrorKind::Protocol => Err(error),
        _ => Ok(()),
    }
}

struct Overwrites {
    connection: redis::Connection,
    client: Client,
    others: Client,
    /// For each of [`WAYS`], two histograms: without a waiter, and with one.
    latencies: [[Histogram<u64>; 2]; 4],
    /// Signals that did not come in time, or came before there was a cause.
    missing: usize,
    too_soon: usize,
}

impl Overwrites {
    fn new(server: &Server) -> Result<Self, Box<dyn Error>> {
        let url = server.url();
        Ok(Self {
            connection: redis::Client::open(url.as_str())?.get_connection()?,
            client: Client::builder(&url).ttl(TTL).build()?,
            others: Client::builder(&url).ttl(TTL).build()?,
            latencies: std::array::from_fn(|_| std::array::from_fn(|_| support::histogram())),
            missing: 0,
            too_soon: 0,
        })
    }

    /// Holds a lock, overwrites it, and waits for the signal.
    fn once(&mut self, number: usize) -> Result<(), Box<dyn Error>> {
        let (way, contended) = (number % WAYS.len(), number / WAYS.len() % 2 == 1);
        let name = format!("overwritten-{number}");
        let key = format!("leasehold:{name}");
        // Its value is one that another client has written.
        let elsewhere = self.others.mutex("elsewhere").lock()?;
        let anothers: Vec<u8> = redis::cmd("GET")
            .arg("leasehold:elsewhere")
            .query(&mut self.connection)?;
        elsewhere.unlock()?;

        let guard = self.client.mutex(&name).lock()?;
        let lost = guard.lost_signal();
        let others = &self.others;
        thread::scope(|scope| {
            let wanting = contended.then(|| scope.spawn(|| want(others, &name)));
            let signal = scope.spawn(|| await_loss(&lost));
            thread::sleep(support::between(HELD[0], HELD[1]));
            let overwritten = Instant::now();
            overwrite(&mut self.connection, way, &key, &anothers)?;
            match signal.join().expect("it does nothing but wait") {
                Some(notified) if notified < overwritten => self.too_soon += 1,
                Some(notified) => {
                    let into = &mut self.latencies[way][usize::from(contended)];
                    support::record(into, notified - overwritten);
                }
                None => self.missing += 1,
            }
            // With the key deleted, the waiter gets the lock or an error, and ends.
            redis::cmd("DEL").arg(&key).exec(&mut self.connection)?;
            if let Some(wanting) = wanting {
                wanting.join().expect("it does not panic")?;
            }
            Ok(())
        })
    }
}

pub fn measure(server: &Server, count: usize) -> Result<Report, Box<dyn Error>> {
    let mut overwrites = Overwrites::new(server)?;
    let all_of_them = || (0..count).try_for_each(|number| overwrites.once(number));
    let (outcome, late) = beside_a_sleeper(Duration::from_millis(1), all_of_them);
    outcome?;

    let mut report = Report::new();
    let mut all = support::histogram();
    for (way, latencies) in WAYS.iter().zip(&overwrites.latencies) {
        for (latency, beside) in latencies.iter().zip(["", ", with a waiter"]) {
            report.spread(&format!("from {way} to the signal{beside}"), latency);
            all += latency;
        }
    }
    for _ in 0..overwrites.missing {
        // A missing signal counts as coming at the time-out.
        support::record(&mut all, SIGNAL_LIMIT);
    }
    report.spread("all", &all);
    report.sleep(&late);
    let p99 = all.value_at_quantile(0.99) as f64 / 1000.0;
    report.time_at_most("p99, ms", p99, LIMIT);
    let what = format!("no signal within {SIGNAL_LIMIT:?}");
    report.figure(&what, overwrites.missing as f64);
    report.never(
        "signals before anything was overwritten",
        overwrites.too_soon,
    );
    Ok(report)
}

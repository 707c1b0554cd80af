//! One process holds the lock, and another waits: how long after the release does the waiter have the lock? The unit is
//! a round trip on this machine.

use std::error::Error;
use std::thread;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use leasehold::Client;
use leasehold::crossbeam_channel::Receiver;
use leasehold_testbed::Server;
use redis::{ConnectionLike, IntoConnectionInfo, Value, io::tcp::TcpSettings};

use crate::report::Report;
use crate::role::{self, Role};
use crate::{beside_a_sleeper, support};

const KEY: &str = "passed";
/// The bounds of the time for which the lock is held, and of the pause before a spaced round trip.
const PAUSE: [Duration; 2] = [Duration::from_millis(15), Duration::from_millis(25)];
/// A waiter that asked less than this before the release may not have been queued yet.
const SETTLED: Duration = Duration::from_millis(5);
const LIMIT: f64 = 3.0;

/// When a waiter asked for the lock, and when it got it, in ns on the clock of all processes.
type Turn = (u64, u64);

/// The role of the waiter: requests the lock of the server at `url` at each order, and reports its times.
pub fn wait(url: String, orders: Receiver<()>) -> anyhow::Result<()> {
    let client = Client::open(&url)?;
    let mutex = client.mutex(KEY);
    mutex.lock()?.unlock()?;
    role::ready()?;
    for () in orders {
        let asked = support::nanoseconds();
        let guard = mutex.lock()?;
        let entered = support::nanoseconds();
        guard.unlock()?;
        role::report((asked, entered))?;
    }
    Ok(())
}

/// The time of a request and its reply, without any lock.
struct RoundTrip {
    connection: redis::Connection,
    ping: Vec<u8>,
}

impl RoundTrip {
    fn new(url: &str) -> Result<Self, Box<dyn Error>> {
        let tcp = TcpSettings::default().set_nodelay(true);
        let info = url.into_connection_info()?.set_tcp_settings(tcp);
        let mut round_trip = Self {
            connection: redis::Client::open(info)?.get_connection()?,
            ping: redis::cmd("PING").get_packed_command(),
        };
        round_trip.time()?;
        Ok(round_trip)
    }

    fn time(&mut self) -> Result<Duration, Box<dyn Error>> {
        let start = Instant::now();
        let answer = self.connection.req_packed_command(&self.ping)?;
        let lasted = start.elapsed();
        match answer {
            Value::SimpleString(pong) if pong == "PONG" => Ok(lasted),
            other => Err(format!("unexpected reply to PING: {other:?}").into()),
        }
    }
}

struct Times {
    after_unlock: Histogram<u64>,
    after_drop: Histogram<u64>,
    /// Round trips after a pause that is as long as a hold. All threads then have to wake up, as after a hold.
    spaced: Histogram<u64>,
    back_to_back: Histogram<u64>,
    /// Releases for which no waiter was queued yet.
    too_early: usize,
}

impl Times {
    fn take(server: &Server, count: usize) -> Result<Self, Box<dyn Error>> {
        let url = server.url();
        let mut times = Self {
            after_unlock: support::histogram(),
            after_drop: support::histogram(),
            spaced: support::histogram(),
            back_to_back: support::histogram(),
            too_early: 0,
        };
        let mut round_trip = RoundTrip::new(&url)?;
        let mut waiter = Role::<Turn>::start("waiter", &url)?;
        let client = Client::open(&url)?;
        let mutex = client.mutex(KEY);
        let pause = || thread::sleep(support::between(PAUSE[0], PAUSE[1]));
        for turn in 0..count {
            let guard = mutex.lock()?;
            waiter.order(&())?;
            pause();
            let let_go = support::nanoseconds();
            let into = if turn % 2 == 0 {
                guard.unlock()?;
                &mut times.after_unlock
            } else {
                drop(guard);
                &mut times.after_drop
            };
            let (asked, entered) = waiter.report()?;
            if asked + SETTLED.as_nanos() as u64 > let_go {
                times.too_early += 1;
            } else {
                let after = Duration::from_nanos(entered.saturating_sub(let_go));
                support::record(into, after);
            }
            pause();
            support::record(&mut times.spaced, round_trip.time()?);
            for _ in 0..5 {
                support::record(&mut times.back_to_back, round_trip.time()?);
            }
        }
        Ok(times)
    }
}

pub fn measure(server: &Server, count: usize) -> Result<Report, Box<dyn Error>> {
    let (times, late) = beside_a_sleeper(PAUSE[1], || Times::take(server, count));
    let times = times?;
    let mut both = times.after_unlock.clone();
    both += &times.after_drop;

    let mut report = Report::new();
    report.spread("from unlock() to the waiter's lock()", &times.after_unlock);
    report.spread("from drop to the waiter's lock()", &times.after_drop);
    report.spread("both", &both);
    report.spread("a round trip after a pause", &times.spaced);
    report.spread("a round trip after another", &times.back_to_back);
    report.sleep(&late);
    let ratio = |quantile: f64, to: &Histogram<u64>| {
        both.value_at_quantile(quantile) as f64 / to.value_at_quantile(0.5) as f64
    };
    report.at_most(
        "p50, in round trips after a pause",
        ratio(0.5, &times.spaced),
        LIMIT,
    );
    report.figure(
        "p50, in round trips after another",
        ratio(0.5, &times.back_to_back),
    );
    report.figure(
        "p99, in round trips after a pause",
        ratio(0.99, &times.spaced),
    );
    report.figure("left out: no waiter yet", times.too_early as f64);
    Ok(report)
}

//! A held lock is taken away behind its holder's back: how soon is the holder told? The ttl is far
//! too long to help.

use std::error::Error;
use std::thread;
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use leasehold::{Client, Error as LockError, ErrorKind, LostSignal};
use leasehold_testbed::Server;

use crate::sheet::Sheet;
use crate::{beside_a_sleeper, support};

const TTL: Duration = Duration::from_secs(30);
/// For how long a lock has been held when it is taken away.
const HELD: [Duration; 2] = [Duration::from_millis(100), Duration::from_millis(150)];
/// For how long to listen for the signal.
const PATIENCE: Duration = Duration::from_millis(250);
const LIMIT: f64 = 20.0;
const WAYS: [&str; 4] = ["DEL", "SET to another's", "SET to garbage", "FLUSHALL"];

/// Takes a lock away, by the way of this number.
fn steal(
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

/// When the signal came, if it did.
fn await_loss(lost: &LostSignal) -> Option<Instant> {
    let reason = lost.recv_timeout(HELD[1] + PATIENCE);
    reason.is_ok().then(Instant::now)
}

/// Wants the lock for long enough to be there when it is stolen, and gives it back at once.
fn want(client: &Client, key: &str) -> Result<(), LockError> {
    let wanted = client.mutex(key).try_lock_for(TTL);
    match wanted {
        // Garbage is told to whoever asks.
        Err(error) if error.kind() != ErrorKind::Protocol => Err(error),
        _ => Ok(()),
    }
}

struct Thefts {
    connection: redis::Connection,
    client: Client,
    others: Client,
    /// For each way, first without and then with somebody who waits for the lock.
    told: [[Histogram<u64>; 2]; 4],
    /// Signals that did not come in time, or came before there was a cause.
    untold: usize,
    too_soon: usize,
}

impl Thefts {
    fn new(server: &Server) -> Result<Self, Box<dyn Error>> {
        let url = server.url();
        Ok(Self {
            connection: redis::Client::open(url.as_str())?.get_connection()?,
            client: Client::builder(&url).ttl(TTL).build()?,
            others: Client::builder(&url).ttl(TTL).build()?,
            told: std::array::from_fn(|_| std::array::from_fn(|_| support::histogram())),
            untold: 0,
            too_soon: 0,
        })
    }

    /// Holds a lock, has it stolen, and hears of it.
    fn once(&mut self, number: usize) -> Result<(), Box<dyn Error>> {
        let (way, contended) = (number % WAYS.len(), number / WAYS.len() % 2 == 1);
        let name = format!("stolen-{number}");
        let key = format!("leasehold:{name}");
        // As another client writes it, whatever the format is.
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
            let stolen = Instant::now();
            steal(&mut self.connection, way, &key, &anothers)?;
            match signal.join().expect("it does nothing but wait") {
                Some(told) if told < stolen => self.too_soon += 1,
                Some(told) => {
                    let into = &mut self.told[way][usize::from(contended)];
                    support::record(into, told - stolen);
                }
                None => self.untold += 1,
            }
            // Whatever stands there now: who wants the lock gets it, and is done.
            redis::cmd("DEL").arg(&key).exec(&mut self.connection)?;
            if let Some(wanting) = wanting {
                wanting.join().expect("it does not panic")?;
            }
            Ok(())
        })
    }
}

pub fn measure(server: &Server, count: usize) -> Result<Sheet, Box<dyn Error>> {
    let mut thefts = Thefts::new(server)?;
    let all_of_them = || (0..count).try_for_each(|number| thefts.once(number));
    let (outcome, late) = beside_a_sleeper(Duration::from_millis(1), all_of_them);
    outcome?;

    let mut sheet = Sheet::new();
    let mut all = support::histogram();
    for (way, told) in WAYS.iter().zip(&thefts.told) {
        for (told, beside) in told.iter().zip(["", ", somebody waits"]) {
            sheet.spread(&format!("from {way} to the signal{beside}"), told);
            all += told;
        }
    }
    for _ in 0..thefts.untold {
        // Counts as coming when it was given up.
        support::record(&mut all, PATIENCE);
    }
    sheet.spread("all", &all);
    sheet.sleep(&late);
    let p99 = all.value_at_quantile(0.99) as f64 / 1000.0;
    sheet.at_most("p99, ms", p99, LIMIT);
    let what = format!("not told within {PATIENCE:?}");
    sheet.figure(&what, thefts.untold as f64);
    sheet.never("told before anything was stolen", thefts.too_soon);
    Ok(sheet)
}

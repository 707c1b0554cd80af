//! A holder is killed: how long after the end of its ttl does a waiter have the lock?

use std::error::Error;
use std::time::{Duration, SystemTime};

use hdrhistogram::Histogram;
use leasehold::Client;
use leasehold::crossbeam_channel::Receiver;
use leasehold_testbed::Server;
use serde::{Deserialize, Serialize};

use crate::report::Report;
use crate::role::{self, Role};
use crate::{beside_a_sleeper, support};

const TTL: Duration = Duration::from_millis(300);
/// A sleep about as long as the time between two events of this case.
const SLEEP: Duration = Duration::from_millis(20);
const LIMIT: f64 = 5.0;

#[derive(Serialize, Deserialize)]
pub struct Assignment {
    url: String,
    key: String,
}

/// The role of the holder: takes the lock without renewal, and does nothing more.
pub fn hold(Assignment { url, key }: Assignment, orders: Receiver<()>) -> anyhow::Result<()> {
    let client = Client::open(&url)?;
    let _guard = client.mutex(&key).fixed_ttl(TTL).lock()?;
    role::ready()?;
    let _ = orders.recv();
    Ok(())
}

struct Entries {
    late: Histogram<u64>,
    early: usize,
    /// Locks whose ttl had almost ended before the bench waited for them.
    left_out: usize,
}

impl Entries {
    fn see(server: &Server, count: usize) -> Result<Self, Box<dyn Error>> {
        let url = server.url();
        let client = Client::open(&url)?;
        let mut entries = Self {
            late: support::histogram(),
            early: 0,
            left_out: 0,
        };
        for number in 0..count {
            let key = format!("orphan-{number}");
            let assignment = Assignment {
                url: url.clone(),
                key: key.clone(),
            };
            let mut holder = Role::<()>::start("holder", &assignment)?;
            let ends = server.command(&["PEXPIRETIME", &format!("leasehold:{key}")])?;
            let ends = ends.as_int().ok_or("PEXPIRETIME replies with no number")?;
            holder.kill()?;
            // Negative if the key is gone.
            let ends = SystemTime::UNIX_EPOCH + Duration::from_millis(ends.try_into().unwrap_or(0));
            if ends < SystemTime::now() + TTL / 3 {
                entries.left_out += 1;
                continue;
            }
            let guard = client.mutex(&key).lock()?;
            match SystemTime::now().duration_since(ends) {
                Ok(late) => support::record(&mut entries.late, late),
                Err(_) => entries.early += 1,
            }
            guard.unlock()?;
        }
        Ok(entries)
    }
}

pub fn measure(server: &Server, count: usize) -> Result<Report, Box<dyn Error>> {
    let (entries, late) = beside_a_sleeper(SLEEP, || Entries::see(server, count));
    let entries = entries?;

    let mut report = Report::new();
    report.spread("from the end of the ttl to the grant", &entries.late);
    report.sleep(&late);
    let p50 = entries.late.value_at_quantile(0.5) as f64 / 1000.0;
    report.time_at_most("p50, ms", p50, LIMIT);
    report.never("grants before the end of the ttl", entries.early);
    report.figure("left out: no waiter yet", entries.left_out as f64);
    report
        .note("Redis ends a ttl on the millisecond after it, so up to 1 ms is its own".to_owned());
    Ok(report)
}

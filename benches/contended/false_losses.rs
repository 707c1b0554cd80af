//! Holds locks that nobody takes away, and renews them many times a second while other clients want them. Does any
//! holder get a loss?

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use leasehold::{Client, EventHandler, EventLock, LossReason, MutexGuard};
use leasehold_testbed::{Server, eventually};
use parking_lot::Mutex;

use crate::report::Report;

const TTL: Duration = Duration::from_millis(300);
const LOCKS: usize = 300;
/// Threads that want the locks, one lock after another.
const WANTING: usize = 20;
/// How long a thread wants one lock.
const WANTED: Duration = Duration::from_millis(50);
/// The limit for all renewals, which usually take ten seconds.
const RENEWALS_LIMIT: Duration = Duration::from_secs(120);

#[derive(Default)]
struct Events {
    renewed: AtomicU64,
    failed: AtomicU64,
    lost: Mutex<Vec<String>>,
}

impl EventHandler for Events {
    fn renewed(&self, _: EventLock<'_>) {
        self.renewed.fetch_add(1, Ordering::Relaxed);
    }

    fn renewal_failed(&self, _: EventLock<'_>, _: &leasehold::Error) {
        self.failed.fetch_add(1, Ordering::Relaxed);
    }

    fn lost(&self, lock: EventLock<'_>, reason: &LossReason) {
        let mut lost = self.lost.lock();
        lost.push(format!("{} was lost: {reason}", lock.key));
    }
}

fn key(number: usize) -> String {
    format!("kept-{number}")
}

/// Waits for each lock of a share, for a moment each, until `over` is set. Returns the number of grants.
fn want(client: &Client, share: usize, over: &AtomicBool) -> Result<usize, leasehold::Error> {
    let mut got = 0;
    let every_other = (0..LOCKS).step_by(2);
    for number in every_other.skip(share).step_by(WANTING).cycle() {
        if over.load(Ordering::Relaxed) {
            break;
        }
        let guard = client.mutex(key(number)).try_lock_for(WANTED)?;
        got += usize::from(guard.is_some());
    }
    Ok(got)
}

pub fn measure(server: &Server, renewals: u64, report: &mut Report) -> Result<(), Box<dyn Error>> {
    let handler = Arc::new(Events::default());
    let builder = Client::builder(server.url()).ttl(TTL);
    let client = builder.event_handler(Arc::clone(&handler)).build()?;
    let others = Client::open(server.url())?;
    let guards = (0..LOCKS)
        .map(|number| client.mutex(key(number)).lock())
        .collect::<Result<Vec<MutexGuard>, _>>()?;
    let over = AtomicBool::new(false);
    let got = thread::scope(|scope| {
        let wanting: Vec<_> = (0..WANTING)
            .map(|share| {
                let (others, over) = (&others, &over);
                scope.spawn(move || want(others, share, over))
            })
            .collect();
        let _ = eventually(RENEWALS_LIMIT, || {
            handler.renewed.load(Ordering::Relaxed) >= renewals
        });
        over.store(true, Ordering::Relaxed);
        let mut got = 0;
        for wanting in wanting {
            got += wanting.join().expect("it does not panic")?;
        }
        Ok::<_, leasehold::Error>(got)
    })?;
    drop(guards);

    let renewed = handler.renewed.load(Ordering::Relaxed);
    report.at_least(
        "renewals without an overwritten key",
        renewed as f64,
        renewals as f64,
    );
    let failed = handler.failed.load(Ordering::Relaxed);
    report.figure("renewals that failed", failed as f64);
    let lost = handler.lost.lock();
    report.never("false losses", lost.len());
    report.never("locks granted to other clients", got);
    for line in lost.iter().take(5) {
        report.note(line.clone());
    }
    Ok(())
}

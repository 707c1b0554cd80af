//! Scene two: work that takes longer than the ttl keeps its lock.

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use leasehold_tools::environment::Namespace;
use leasehold_tools::stop::Stop;

use crate::actor::Actor;
use crate::messages::Job;
use crate::{STEP_LIMIT, TTL};

const LOCK: &str = "long-work";
const WORK: Duration = Duration::from_secs(5);
/// How often the other client tries to lock.
const TRY: Duration = Duration::from_millis(50);

pub fn show(namespace: &Namespace, stop: &Stop) -> anyhow::Result<()> {
    println!(
        "\n2. A holder with a ttl of {TTL:?} works for {WORK:?}. Another client tries to lock meanwhile."
    );
    let client = namespace.client()?;
    let mutex = client.mutex(LOCK);
    let job = Job::Hold {
        key: LOCK.to_owned(),
        ttl: TTL,
    };
    let mut holder = Actor::start("the holder", namespace, job)?;
    let token = holder.grant(stop, STEP_LIMIT)?;

    let start = Instant::now();
    let mut tries = 0_u32;
    while start.elapsed() < WORK {
        let entered = mutex
            .try_lock()
            .context("the other client's attempt failed")?;
        ensure!(
            entered.is_none(),
            "another client got the lock after {:.1?}, while the holder still worked",
            start.elapsed()
        );
        tries += 1;
        stop.pause(TRY)?;
    }
    let (lost, objection) = holder.condition(stop)?;
    ensure!(
        !lost,
        "the holder's lock was reported as lost, though no other client took it"
    );
    ensure!(
        objection.is_none(),
        "the holder's check() failed: {}",
        objection.unwrap_or_default()
    );
    let objection = holder.release(stop)?;
    ensure!(
        objection.is_none(),
        "the holder's unlock() failed: {}",
        objection.unwrap_or_default()
    );

    let guard = mutex
        .try_lock()?
        .context("the lock was released, but another client cannot get it")?;
    let next = guard.fencing_token();
    ensure!(
        next > token,
        "the next fencing token {next} is not above {token}"
    );
    guard
        .unlock()
        .context("the other client's unlock() failed")?;
    println!(
        "   Held for {WORK:?}: {tries} attempts by the other client, all refused until the release."
    );
    Ok(())
}

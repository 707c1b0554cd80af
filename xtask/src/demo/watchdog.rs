//! Scene two: work that takes longer than the ttl keeps its lock.

use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};

use super::actor::Actor;
use super::messages::Job;
use super::{PATIENCE, TTL};
use crate::space::Space;
use crate::stop::Stop;

const LOCK: &str = "long-work";
const WORK: Duration = Duration::from_secs(5);
/// How often the other client tries to get in.
const TRY: Duration = Duration::from_millis(50);

pub fn show(space: &Space, stop: &Stop) -> anyhow::Result<()> {
    println!(
        "\n2. A holder with a ttl of {TTL:?} works for {WORK:?}. Another client tries to get in."
    );
    let client = space.client()?;
    let mutex = client.mutex(LOCK);
    let job = Job::Hold {
        key: LOCK.to_owned(),
        ttl: TTL,
    };
    let mut holder = Actor::start("the holder", space, job)?;
    let token = holder.grant(stop, PATIENCE)?;

    let start = Instant::now();
    let mut tries = 0_u32;
    while start.elapsed() < WORK {
        let entered = mutex.try_lock().context("the other client's try failed")?;
        ensure!(
            entered.is_none(),
            "another client got in after {:.1?}, while the holder still worked",
            start.elapsed()
        );
        tries += 1;
        stop.pause(TRY)?;
    }
    let (lost, objection) = holder.condition(stop)?;
    ensure!(
        !lost,
        "the holder was told that its lock is lost, though nobody took it"
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
        .context("the lock was released, and yet nobody gets in")?;
    let next = guard.fencing_token();
    ensure!(
        next > token,
        "the next fencing token {next} is not above {token}"
    );
    guard
        .unlock()
        .context("the other client's unlock() failed")?;
    println!(
        "   Kept for {WORK:?}: {tries} tries by the other client, none got in until the release."
    );
    Ok(())
}

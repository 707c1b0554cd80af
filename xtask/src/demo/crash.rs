//! Scene three: a holder that dies without a word. The next waiter gets in when the ttl has passed,
//! and not before.

use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};

use super::actor::Actor;
use super::messages::{Job, Message};
use super::{PATIENCE, TTL};
use crate::space::Space;
use crate::stop::Stop;

const LOCK: &str = "crash";
/// It dies about half-way between two renewals: right after one, the whole ttl would still be left,
/// and to be within it the waiter would have to come in the same instant.
const LEFT_AT_DEATH: RangeInclusive<Duration> =
    Duration::from_millis(2_300)..=Duration::from_millis(2_600);
/// How often the ttl is looked at.
const LOOK: Duration = Duration::from_millis(10);
/// How far the two clocks' readings of one moment may lie apart.
const READING: Duration = Duration::from_millis(20);

pub fn show(space: &Space, stop: &Stop) -> anyhow::Result<()> {
    println!(
        "\n3. A holder with a ttl of {TTL:?} is killed (SIGKILL) while another process waits."
    );
    let job = || Job::Hold {
        key: LOCK.to_owned(),
        ttl: TTL,
    };
    let mut holder = Actor::start("the holder", space, job())?;
    let token = holder.grant(stop, PATIENCE)?;
    let mut waiter = Actor::start("the waiter", space, job())?;
    match stop.message(&waiter.0, PATIENCE)? {
        Message::Waiting => {}
        other => bail!(waiter.0.unexpected("Waiting", &other)),
    }
    let start = Instant::now();
    while !LEFT_AT_DEATH.contains(&ttl_left(space)?) {
        ensure!(
            start.elapsed() < PATIENCE,
            "the holder's ttl never was between {LEFT_AT_DEATH:.1?}: it is not renewed as it should"
        );
        stop.pause(LOOK)?;
    }

    holder.0.kill()?;
    let killed = Instant::now();
    let left = ttl_left(space)?;
    let next = waiter.grant(stop, TTL + PATIENCE);
    let next = next.context("the waiter did not get the killed holder's lock")?;
    let waited = killed.elapsed();

    ensure!(
        waited + READING >= left,
        "the waiter got in {waited:.2?} after the kill, while the lock was still kept for {left:.2?}"
    );
    ensure!(
        waited <= TTL,
        "the waiter got in only {waited:.2?} after the kill, not within {TTL:?}"
    );
    ensure!(
        next > token,
        "the next fencing token {next} is not above {token}"
    );
    waiter.release(stop)?;
    println!("   The waiter got in {waited:.2?} after the kill; {left:.2?} of the ttl were left.");
    Ok(())
}

fn ttl_left(space: &Space) -> anyhow::Result<Duration> {
    let left: i64 = space.ask(redis::cmd("PTTL").arg(space.lock_key(LOCK)))?;
    let left = u64::try_from(left).ok().map(Duration::from_millis);
    left.context("the lock is not kept in Redis with a ttl")
}

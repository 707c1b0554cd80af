//! Scene three: a holder is killed. The next waiter gets the lock when the ttl has passed, and not before.

use std::ops::RangeInclusive;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail, ensure};
use leasehold_tools::environment::Namespace;
use leasehold_tools::stop::Stop;

use crate::actor::Actor;
use crate::messages::{Job, Message};
use crate::{STEP_LIMIT, TTL};

const LOCK: &str = "crash";
/// The rest of the ttl at which the holder is killed, about half-way between two renewals. Right after a renewal, the
/// whole ttl would be left, and the wait could not be shorter than the ttl.
const LEFT_AT_DEATH: RangeInclusive<Duration> =
    Duration::from_millis(2_300)..=Duration::from_millis(2_600);
/// How often to read the ttl.
const LOOK: Duration = Duration::from_millis(10);
/// How far the readings of two clocks may differ at the same moment.
const READING: Duration = Duration::from_millis(20);

pub fn show(namespace: &Namespace, stop: &Stop) -> anyhow::Result<()> {
    println!(
        "\n3. A holder with a ttl of {TTL:?} is killed (SIGKILL) while another process waits."
    );
    let job = || Job::Hold {
        key: LOCK.to_owned(),
        ttl: TTL,
    };
    let mut holder = Actor::start("the holder", namespace, job())?;
    let token = holder.grant(stop, STEP_LIMIT)?;
    let mut waiter = Actor::start("the waiter", namespace, job())?;
    match stop.message(&waiter.0, STEP_LIMIT)? {
        Message::Waiting => {}
        other => bail!(waiter.0.unexpected("Waiting", &other)),
    }
    let start = Instant::now();
    while !LEFT_AT_DEATH.contains(&ttl_left(namespace)?) {
        ensure!(
            start.elapsed() < STEP_LIMIT,
            "the holder's ttl never was between {LEFT_AT_DEATH:.1?}: renewal does not work as it should"
        );
        stop.pause(LOOK)?;
    }

    holder.0.kill()?;
    let killed = Instant::now();
    let left = ttl_left(namespace)?;
    let next = waiter.grant(stop, TTL + STEP_LIMIT);
    let next = next.context("the waiter did not get the killed holder's lock")?;
    let waited = killed.elapsed();

    ensure!(
        waited + READING >= left,
        "the waiter got the lock {waited:.2?} after the kill, while {left:.2?} of the ttl were left"
    );
    ensure!(
        waited <= TTL,
        "the waiter got the lock only {waited:.2?} after the kill, not within {TTL:?}"
    );
    ensure!(
        next > token,
        "the next fencing token {next} is not above {token}"
    );
    waiter.release(stop)?;
    println!(
        "   The waiter got the lock {waited:.2?} after the kill; {left:.2?} of the ttl were left then."
    );
    Ok(())
}

fn ttl_left(namespace: &Namespace) -> anyhow::Result<Duration> {
    let left: i64 = namespace.ask(redis::cmd("PTTL").arg(namespace.lock_key(LOCK)))?;
    let left = u64::try_from(left).ok().map(Duration::from_millis);
    left.context("the lock's key has no ttl in Redis")
}

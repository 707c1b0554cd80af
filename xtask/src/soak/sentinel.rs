//! The soak of a group under sentinels: threads of several clients use locks while the primary is killed, stopped or
//! demoted. Two holders at a time are excused only around a fail-over, and for one ttl at most.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use leasehold::{Client, ErrorKind};
use leasehold_testbed::{Reply, SentinelGroup, eventually};

use super::Broken;
use super::random::Random;
use crate::stop::{Stop, Stopped};

const TTL: Duration = Duration::from_secs(3);
/// How long a thread on a busy machine may take to record the end of a hold.
const MARGIN: Duration = Duration::from_secs(1);
/// How long `lock` waits for a primary: longer than any fail-over.
const OUTAGE: Duration = Duration::from_secs(120);
const KEYS: usize = 4;

/// One hold, as its thread saw it.
#[derive(Clone, Debug)]
struct Hold {
    key: usize,
    token: u64,
    granted: Instant,
    /// When the thread knew of the loss, or began to release.
    ended: Instant,
    is_lost: bool,
    /// When the fenced value accepted the write of this hold.
    written: Option<(Instant, Instant)>,
}

/// The beginning of a fault, and the time at which the group is whole again.
type Fault = (Instant, Instant);

#[derive(Default)]
struct Records {
    holds: Mutex<Vec<Hold>>,
    errors: Mutex<Vec<String>>,
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Findings {
    violations: Vec<String>,
    /// The number of pairs of holds that overlapped and were excused.
    overlaps: usize,
    longest: Duration,
}

/// Runs the soak for `time`.
pub fn run(
    time: Duration,
    clients: u64,
    threads: u64,
    seed: u64,
    stop: &Stop,
) -> anyhow::Result<()> {
    let group = &mut SentinelGroup::start()?;
    let (start, records, done) = (Instant::now(), Records::default(), AtomicBool::new(false));
    let clients: Vec<Client> = (0..clients)
        .map(|_| {
            let builder = Client::builder(group.url()).ttl(TTL);
            builder.outage_timeout(OUTAGE).build()
        })
        .collect::<Result<_, _>>()?;
    let mut random = Random::new(seed, &[]);
    let faults = thread::scope(|scope| {
        for (client, number) in clients.iter().zip(0..) {
            for thread in 0..threads {
                let random = Random::new(seed, &[1, number, thread]);
                let (records, done) = (&records, &done);
                scope.spawn(move || work(client, random, records, done));
            }
        }
        let mut faults = Vec::new();
        let failed = loop {
            if start.elapsed() >= time || stop.requested() {
                break Ok(());
            }
            match fault(group, &mut random) {
                Ok(fault) => faults.push(fault),
                Err(error) => break Err(error),
            }
            thread::sleep(random.millis(500, 2_000));
        };
        done.store(true, Ordering::Relaxed);
        failed.map(|()| faults)
    })?;
    drop(clients);
    let lock = |texts: &Mutex<Vec<String>>| {
        let texts = texts.lock().unwrap_or_else(PoisonError::into_inner);
        texts.clone()
    };
    let holds = records
        .holds
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .clone();
    let mut findings = check(&holds, &faults);
    findings.violations.extend(lock(&records.errors));
    if let Some(leak) = leaked_locks(group)? {
        findings.violations.push(leak);
    }
    let losses = holds.iter().filter(|hold| hold.is_lost).count();
    println!(
        "{} fail-overs, {} holds, {losses} losses, {} overlaps of two holders around fail-overs, the longest {:?}; \
         seed {seed}",
        faults.len(),
        holds.len(),
        findings.overlaps,
        findings.longest
    );
    ensure!(!holds.is_empty(), "no lock was granted");
    for violation in &findings.violations {
        println!("violation: {violation}");
    }
    if stop.requested() {
        return Err(Stopped.into());
    }
    match findings.violations.len() {
        0 => {
            println!("All of it holds.");
            Ok(())
        }
        violations => {
            let again = format!("cargo xtask soak --topology sentinel --seed {seed}");
            Err(Broken { violations, again }.into())
        }
    }
}

/// Takes the primary away in one of three ways, and waits until the group is whole again.
fn fault(group: &mut SentinelGroup, random: &mut Random) -> anyhow::Result<Fault> {
    let primary = group.primary().context("the sentinels do not agree")?;
    let begun = Instant::now();
    match random.below(3) {
        0 => {
            group.server_mut(primary).kill();
            group.wait_for_switch(primary)?;
            group.server_mut(primary).restart()?;
        }
        1 => {
            group.servers()[primary].stop();
            let switched = group.wait_for_switch(primary);
            group.servers()[primary].resume();
            switched?;
        }
        _ => {
            group.fail_over()?;
            group.wait_for_switch(primary)?;
        }
    }
    group.wait_until_whole()?;
    Ok((begun, Instant::now()))
}

fn work(client: &Client, mut random: Random, records: &Records, done: &AtomicBool) {
    while !done.load(Ordering::Relaxed) {
        if let Err(error) = hold_once(client, &mut random, records) {
            let text = format!("a call fails: {error}");
            let errors = records.errors.lock();
            errors.unwrap_or_else(PoisonError::into_inner).push(text);
            return;
        }
    }
}

fn hold_once(
    client: &Client,
    random: &mut Random,
    records: &Records,
) -> Result<(), leasehold::Error> {
    let key = random.below(KEYS);
    let guard = client.mutex(format!("k{key}")).lock()?;
    let (granted, token) = (Instant::now(), guard.fencing_token());
    let mut written = None;
    if random.one_in(2) {
        let begun = Instant::now();
        match client
            .fenced_value(format!("v{key}"))
            .write(token, token.to_string())
        {
            Ok(()) => written = Some((begun, Instant::now())),
            // The outcome of a write is unknown if its connection broke.
            Err(error) if error.is_unavailable() => {}
            Err(error) if error.kind() == ErrorKind::StaleToken => {}
            Err(error) => return Err(error),
        }
    }
    let time = match random.one_in(20) {
        true => random.millis(500, 4_000),
        false => random.millis(1, 50),
    };
    let is_lost = guard.lost_signal().recv_timeout(time).is_ok();
    let ended = Instant::now();
    let hold = Hold {
        key,
        token,
        granted,
        ended,
        is_lost,
        written,
    };
    let holds = records.holds.lock();
    holds.unwrap_or_else(PoisonError::into_inner).push(hold);
    match guard.unlock() {
        Err(error) if !error.is_lease_lost() => Err(error),
        _ => Ok(()),
    }
}

/// Compares the holds with the guarantees: one holder at a time, rising tokens, no stale write.
fn check(holds: &[Hold], faults: &[Fault]) -> Findings {
    let mut findings = Findings::default();
    // A fault may lose an earlier grant, or a grant that the old primary gave during the fault.
    let is_excused = |from: Instant, to: Instant| {
        let overlaps = |(begun, ended): &Fault| *begun <= to && from <= *ended;
        faults.iter().any(overlaps)
    };
    for key in 0..KEYS {
        let mut of_key: Vec<&Hold> = holds.iter().filter(|hold| hold.key == key).collect();
        of_key.sort_by_key(|hold| hold.granted);
        let mut earlier: Vec<&Hold> = Vec::new();
        let mut before: Option<&Hold> = None;
        let mut last_write: Option<(u64, Instant, Instant)> = None;
        for hold in of_key {
            earlier.retain(|other| other.ended > hold.granted);
            for other in &earlier {
                let both = other.ended.min(hold.ended) - hold.granted;
                if !is_excused(other.granted, hold.granted) || both > TTL + MARGIN {
                    let text = format!("k{key} has two holders for {both:?}: {other:?}, {hold:?}");
                    findings.violations.push(text);
                } else {
                    findings.overlaps += 1;
                    findings.longest = findings.longest.max(both);
                }
            }
            if let Some(before) = before
                && before.ended <= hold.granted
                && before.token >= hold.token
            {
                let text = format!("the tokens of k{key} do not rise: {before:?}, {hold:?}");
                findings.violations.push(text);
            }
            if let Some((begun, ended)) = hold.written {
                if let Some((token, since, until)) = last_write
                    && until <= begun
                    && token > hold.token
                    && !is_excused(since, ended)
                {
                    let text = format!("v{key} accepts a write behind the token {token}: {hold:?}");
                    findings.violations.push(text);
                }
                if last_write.is_none_or(|(token, ..)| token < hold.token) {
                    last_write = Some((hold.token, begun, ended));
                }
            }
            if before.is_none_or(|before| before.ended <= hold.ended) {
                before = Some(hold);
            }
            earlier.push(hold);
        }
    }
    findings
}

/// The locks that are still held more than a ttl after all clients have ended.
fn leaked_locks(group: &SentinelGroup) -> anyhow::Result<Option<String>> {
    let primary = group.primary().context("the sentinels do not agree")?;
    let mut left = Vec::new();
    let is_free = eventually(2 * TTL + MARGIN, || {
        let keys = group.servers()[primary].command(&["KEYS", "leasehold:*"]);
        left = match keys {
            Ok(Reply::Array(keys)) => keys,
            _ => return false,
        };
        left.retain(|key| key.as_text().is_some_and(|key| !key.contains('~')));
        left.is_empty()
    });
    Ok((!is_free).then(|| format!("keys without a holder stay: {left:?}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A hold of the key 0 between these times, in seconds.
    fn hold(start: Instant, token: u64, granted: u64, ended: u64) -> Hold {
        Hold {
            key: 0,
            token,
            granted: start + Duration::from_secs(granted),
            ended: start + Duration::from_secs(ended),
            is_lost: false,
            written: None,
        }
    }

    #[test]
    fn two_holders_are_excused_around_a_fail_over_only() {
        let start = Instant::now();
        let holds = [hold(start, 1, 10, 14), hold(start, 2, 12, 16)];
        assert_eq!(check(&holds, &[]).violations.len(), 1);
        let at = |from, to| {
            let seconds = Duration::from_secs;
            [(start + seconds(from), start + seconds(to))]
        };
        for (fault, violations) in [(at(11, 12), 0), (at(13, 20), 1), (at(1, 9), 1)] {
            let found = check(&holds, &fault);
            assert_eq!(found.violations.len(), violations, "{fault:?}");
            assert_eq!(found.overlaps, 1 - violations);
        }
        // These holds overlap for longer than a ttl.
        let holds = [hold(start, 1, 10, 18), hold(start, 2, 12, 20)];
        assert_eq!(check(&holds, &at(11, 12)).violations.len(), 1);
    }

    #[test]
    fn tokens_have_to_rise() {
        let start = Instant::now();
        let holds = [hold(start, 2, 10, 11), hold(start, 1, 12, 13)];
        assert_eq!(check(&holds, &[]).violations.len(), 1);
        let holds = [hold(start, 1, 10, 11), hold(start, 2, 12, 13)];
        assert_eq!(check(&holds, &[]), Findings::default());
    }

    #[test]
    fn a_stale_write_is_found() {
        let start = Instant::now();
        let written = |token, granted: u64, ended, at: u64| {
            let at = start + Duration::from_secs(at);
            Hold {
                written: Some((at, at)),
                ..hold(start, token, granted, ended)
            }
        };
        // Here the second holder writes first.
        let holds = [written(3, 10, 12, 11), written(2, 13, 15, 14)];
        let found = check(&holds, &[]).violations;
        assert!(
            found.iter().any(|text| text.contains("accepts")),
            "{found:?}"
        );
    }
}

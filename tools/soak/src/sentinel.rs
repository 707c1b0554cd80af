//! The soak of a group under sentinels: threads of several clients use locks while the primary is killed, stopped or
//! demoted. Two holders at a time are excused only around a fail-over, and for one ttl at most. All servers are watched
//! for keys that stay without a holder.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, anyhow, ensure};
use leasehold::{Client, ErrorKind};
use leasehold_testbed::{Reply, SentinelGroup, eventually};

use crate::checks::{GONE, keys_without_holders};
use crate::driver::{Findings, Round, Soak, Topology};
use crate::faults::{self, Effect, Kind, refuse_others};
use crate::history::{self, History};
use crate::inject::{Defect, NOBODYS, NOBODYS_TTL_MS};
use crate::messages::UNCONFIRMED;
use crate::random::Random;
use crate::records::{Who, now};
use crate::value::lease_of;
use crate::watch::{SetOnDrop, watch_during};

const TTL: Duration = Duration::from_secs(3);
/// How long a thread on a busy machine may take to record the end of a hold.
const MARGIN: Duration = Duration::from_secs(1);
/// How long `lock` waits for a primary: longer than any fail-over.
const OUTAGE: Duration = Duration::from_secs(120);
/// How long the replicas may take to get a key, on a busy machine.
const REPLICATION: Duration = Duration::from_secs(20);
/// The number of locks that the threads use.
const KEYS: usize = 4;

/// One hold, as its thread saw it. All times are those of [`now`], in ns.
#[derive(Clone, Debug)]
struct Hold {
    key: usize,
    token: u64,
    /// The lease id, if the thread has seen it in Redis.
    lease: Option<String>,
    granted: u64,
    /// When the thread knew of the loss, or began to release.
    ended: u64,
    is_lost: bool,
    /// When the fenced value accepted the write of this hold.
    written: Option<(u64, u64)>,
}

#[derive(Clone, Copy, Debug)]
struct Fault {
    from: u64,
    /// When the primary went on, if it was stopped. Until then, it held back requests.
    resumed: Option<u64>,
    /// When the group was whole again.
    to: u64,
}

#[derive(Default)]
struct Records {
    holds: Mutex<Vec<Hold>>,
    errors: Mutex<Vec<String>>,
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Checked {
    violations: Vec<String>,
    /// The number of pairs of holds that overlapped and were excused.
    overlaps: usize,
    longest: Duration,
}

/// The topology, and what one long round has shown.
#[derive(Default)]
pub struct Sentinel {
    fail_overs: usize,
    holds: usize,
    losses: usize,
    overlaps: usize,
    longest: Duration,
}

impl Sentinel {
    pub fn new(soak: &Soak<'_>) -> anyhow::Result<Self> {
        refuse_others(soak.only, &[], "sentinel")?;
        ensure!(
            soak.inject.is_none_or(|defect| defect == Defect::Nobody),
            "--topology sentinel has no such defect"
        );
        Ok(Self::default())
    }
}

impl Topology for Sentinel {
    fn play(&mut self, round: &Round<'_>) -> anyhow::Result<Findings> {
        let Soak {
            seed,
            processes,
            threads,
            inject,
            stop,
            ..
        } = *round.soak;
        let group = &mut SentinelGroup::start()?;
        let (records, done) = (Records::default(), AtomicBool::new(false));
        let client = |_| {
            let builder = Client::builder(group.url()).ttl(TTL);
            builder.outage_timeout(OUTAGE).build_lazy()
        };
        let clients: Vec<Client> = (0..processes).map(client).collect::<Result<_, _>>()?;
        if inject.is_some() {
            set_nobodys(group)?;
        }
        let mut random = Random::new(seed, &[]);
        let ports: Vec<u16> = group.servers().iter().map(|server| server.port()).collect();
        let names: Vec<String> = (0..KEYS + NOBODYS.len()).map(in_redis).collect();
        let end = Instant::now() + round.time;
        let (faults, seen) = watch_during(&ports, &names, TTL, || {
            thread::scope(|scope| {
                // Also if a fault panics.
                let ending = SetOnDrop(&done);
                let mut workers = Vec::new();
                for (client, number) in clients.iter().zip(0..) {
                    for thread in 0..threads as u64 {
                        let random = Random::new(seed, &[1, number, thread]);
                        let (records, done) = (&records, &done);
                        workers.push(scope.spawn(move || work(client, random, records, done)));
                    }
                }
                let mut faults = Vec::new();
                let failed = loop {
                    if Instant::now() >= end || stop.requested() {
                        break Ok(());
                    }
                    match fault(group, &mut random) {
                        Ok(fault) => faults.push(fault),
                        Err(error) => break Err(error),
                    }
                    (round.tick)(format!("{} fail-overs", faults.len()));
                    thread::sleep(random.millis(500, 2_000));
                };
                drop(ending);
                for worker in workers {
                    worker.join().map_err(|_| anyhow!("a thread panicked"))?;
                }
                failed.map(|()| faults)
            })
        });
        let faults = faults?;
        drop(clients);
        let inner = PoisonError::into_inner;
        let holds = records.holds.into_inner().unwrap_or_else(inner);
        let errors = records
            .errors
            .into_inner()
            .unwrap_or_else(PoisonError::into_inner);
        let Checked {
            mut violations,
            overlaps,
            longest,
        } = check(&holds, &faults);
        violations.extend(errors);
        let (history, delays) = (history(&holds), delays(&faults));
        let orphans = keys_without_holders(&seen.sightings, TTL, &history, &delays);
        let odd = seen.found.into_iter().chain(orphans);
        violations.extend(odd.map(|odd| odd.text));
        violations.extend(leaked_locks(group)?);
        *self = Self {
            fail_overs: faults.len(),
            holds: holds.len(),
            losses: holds.iter().filter(|hold| hold.is_lost).count(),
            overlaps,
            longest,
        };
        Ok(violations.into_iter().collect())
    }

    /// One round takes the whole time.
    fn round_times(&self) -> (Duration, Duration) {
        (Duration::ZERO, Duration::MAX)
    }

    fn text(&self) -> String {
        let Self {
            fail_overs,
            holds,
            losses,
            overlaps,
            longest,
        } = self;
        format!(
            "{fail_overs} fail-overs, {holds} holds, {losses} losses, {overlaps} overlaps of two holders around \
             fail-overs, the longest {longest:?}; "
        )
    }

    fn check_use(&self) -> anyhow::Result<()> {
        ensure!(self.holds > 0, "no lock was granted");
        Ok(())
    }
}

/// Takes the primary away in one of three ways, and waits until the group is whole again.
fn fault(group: &mut SentinelGroup, random: &mut Random) -> anyhow::Result<Fault> {
    let primary = group.primary().context("the sentinels do not agree")?;
    let (from, mut resumed) = (now(), None);
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
            resumed = Some(now());
            switched?;
        }
        _ => {
            group.fail_over()?;
            group.wait_for_switch(primary)?;
        }
    }
    group.wait_until_whole()?;
    let to = now();
    Ok(Fault { from, resumed, to })
}

fn in_redis(key: usize) -> String {
    format!("leasehold:k{key}")
}

/// Writes locks that nobody holds, under keys that no thread uses.
fn set_nobodys(group: &SentinelGroup) -> anyhow::Result<()> {
    let primary = group.primary().context("the sentinels do not agree")?;
    for (key, value) in (KEYS..).zip(NOBODYS) {
        let key = in_redis(key);
        group.servers()[primary].command(&["SET", &key, value, "PX", NOBODYS_TTL_MS])?;
        // A fail-over must not lose it.
        let is_everywhere = eventually(REPLICATION, || {
            let mut servers = group.servers().iter();
            servers.all(|server| server.command(&["EXISTS", &key]).ok() == Some(Reply::Int(1)))
        });
        ensure!(is_everywhere, "the replicas do not get the key {key}");
    }
    Ok(())
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
    let mutex = client.mutex(format!("k{key}"));
    let guard = mutex.lock()?;
    let (granted, token) = (now(), guard.fencing_token());
    let mut lease = None;
    if random.one_in(2) {
        match mutex.inspect() {
            Ok(found) => lease = found.and_then(|it| lease_of(&guard, client.holder_id(), &it)),
            Err(error) if error.is_unavailable() => {}
            Err(error) => return Err(error),
        }
    }
    let mut written = None;
    if random.one_in(2) {
        let begun = now();
        match client
            .fenced_value(format!("v{key}"))
            .write(token, token.to_string())
        {
            Ok(()) => written = Some((begun, now())),
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
    let ended = now();
    let hold = Hold {
        key,
        token,
        lease,
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

/// The holds, as the check of keys needs them.
fn history(holds: &[Hold]) -> History {
    let holds = holds.iter().map(|hold| history::Hold {
        who: Who {
            process: 0,
            life: 0,
            thread: 0,
        },
        key: hold.key,
        token: hold.token,
        lease: hold.lease.clone(),
        asked: hold.granted,
        granted: hold.granted,
        seen: Some(hold.granted),
        until: hold.ended,
        released: Some(hold.ended),
        reported: None,
        ttl: TTL.as_nanos() as u64,
        at_most: None,
    });
    let mut history = History {
        holds: holds.collect(),
        ..History::default()
    };
    history.share_grants();
    history
}

/// The times in which a stopped primary held back requests.
fn delays(faults: &[Fault]) -> Vec<faults::Fault> {
    let delay = |fault: &Fault| {
        fault.resumed.map(|to| faults::Fault {
            kind: Kind::MasterStopped,
            from: fault.from,
            to,
            effect: Effect::None,
        })
    };
    faults.iter().filter_map(delay).collect()
}

/// Compares the holds with the guarantees: one holder at a time, rising tokens, no stale write.
fn check(holds: &[Hold], faults: &[Fault]) -> Checked {
    let mut findings = Checked::default();
    // A fault may lose an earlier grant, or a grant that the old primary gave during the fault.
    let is_excused = |from: u64, to: u64| {
        let overlaps = |fault: &Fault| fault.from <= to && from <= fault.to;
        faults.iter().any(overlaps)
    };
    for key in 0..KEYS {
        let mut of_key: Vec<&Hold> = holds.iter().filter(|hold| hold.key == key).collect();
        of_key.sort_by_key(|hold| hold.granted);
        let mut earlier: Vec<&Hold> = Vec::new();
        let mut before: Option<&Hold> = None;
        let mut last_write: Option<(u64, u64, u64)> = None;
        for hold in of_key {
            earlier.retain(|other| other.ended > hold.granted);
            for other in &earlier {
                let both = other.ended.min(hold.ended) - hold.granted;
                let both = Duration::from_nanos(both);
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

/// The locks whose keys stay for longer than their ttl, or than an unconfirmed grant, after all clients have ended.
fn leaked_locks(group: &SentinelGroup) -> anyhow::Result<Option<String>> {
    let primary = group.primary().context("the sentinels do not agree")?;
    let mut left = Vec::new();
    let is_free = eventually(TTL + UNCONFIRMED + GONE, || {
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
    use crate::checks::Sighting;
    use crate::value::GrantId;

    const SECOND: u64 = 1_000_000_000;

    /// A hold of the key 0 between these times, in seconds.
    fn hold(token: u64, granted: u64, ended: u64) -> Hold {
        Hold {
            key: 0,
            token,
            lease: None,
            granted: granted * SECOND,
            ended: ended * SECOND,
            is_lost: false,
            written: None,
        }
    }

    #[test]
    fn two_holders_are_excused_around_a_fail_over_only() {
        let holds = [hold(1, 10, 14), hold(2, 12, 16)];
        assert_eq!(check(&holds, &[]).violations.len(), 1);
        let at = |from, to| {
            [Fault {
                from: from * SECOND,
                resumed: None,
                to: to * SECOND,
            }]
        };
        for (fault, violations) in [(at(11, 12), 0), (at(13, 20), 1), (at(1, 9), 1)] {
            let found = check(&holds, &fault);
            assert_eq!(found.violations.len(), violations, "{fault:?}");
            assert_eq!(found.overlaps, 1 - violations);
        }
        // These holds overlap for longer than a ttl.
        let holds = [hold(1, 10, 18), hold(2, 12, 20)];
        assert_eq!(check(&holds, &at(11, 12)).violations.len(), 1);
    }

    #[test]
    fn tokens_have_to_rise() {
        let holds = [hold(2, 10, 11), hold(1, 12, 13)];
        assert_eq!(check(&holds, &[]).violations.len(), 1);
        let holds = [hold(1, 10, 11), hold(2, 12, 13)];
        assert_eq!(check(&holds, &[]), Checked::default());
    }

    #[test]
    fn a_key_without_a_holder_is_found() {
        let finds = |last: u64, faults: &[Fault]| {
            let sighting = Sighting {
                key: 0,
                name: in_redis(0),
                grant: GrantId {
                    lease: "a".to_owned(),
                    micros: None,
                },
                first: 0,
                last: last * SECOND,
            };
            let holds = [Hold {
                lease: Some("a".to_owned()),
                ..hold(1, 0, 5)
            }];
            let (history, delays) = (history(&holds), delays(faults));
            keys_without_holders(&[sighting], TTL, &history, &delays).len()
        };
        // One ttl after the release, and 2 s for a busy machine.
        assert_eq!((finds(10, &[]), finds(11, &[])), (0, 1));
        let fault = |resumed: Option<u64>| Fault {
            from: 4 * SECOND,
            resumed: resumed.map(|at| at * SECOND),
            to: 60 * SECOND,
        };
        // Only a stopped primary delays requests.
        assert_eq!(finds(11, &[fault(None)]), 1);
        assert_eq!(finds(11, &[fault(Some(6))]), 0);
        assert_eq!(finds(12, &[fault(Some(6))]), 1);
    }

    #[test]
    fn a_stale_write_is_found() {
        let written = |token, granted, ended, at| Hold {
            written: Some((at * SECOND, at * SECOND)),
            ..hold(token, granted, ended)
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

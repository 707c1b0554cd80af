//! A group under sentinels: a primary and two replicas. The primary is killed, stopped or demoted, and the next fault
//! comes when the group is whole again. A replica that takes over may lack the last grants and writes. All servers are
//! watched for keys that stay without a holder.

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use leasehold_testbed::{Reply, SentinelGroup, eventually};

use crate::driver::{Round, Soak};
use crate::faults::{Effect, Fault, Kind, refuse_others};
use crate::inject::{Defect, NOBODYS, NOBODYS_TTL_MS};
use crate::leaks::{self, Remaining};
use crate::messages::{KEYS, LONG_OUTAGE, LONGEST_TTL, contended_key, key_in_redis, race_key};
use crate::random::Random;
use crate::recorded::{Events, Recorded, SHORTEST_ROUND};
use crate::records::now;
use crate::watch::watch_during;

/// A fail-over takes some seconds, and one group should have many of them.
const LONGEST_ROUND: Duration = Duration::from_secs(100);
/// How long the replicas may take to get a key, on a busy machine.
const REPLICATION: Duration = Duration::from_secs(20);

pub fn topology(soak: &Soak<'_>) -> anyhow::Result<Recorded> {
    refuse_others(soak.only, &[], "sentinel")?;
    Ok(Recorded::new((SHORTEST_ROUND, LONGEST_ROUND), work))
}

fn work(round: &Round<'_>, folder: &Path) -> anyhow::Result<Events> {
    let mut group = SentinelGroup::start()?;
    let urls = (0..round.soak.processes).map(|_| group.url());
    let mut processes = round.start_processes(urls, LONG_OUTAGE, folder)?;
    if round.soak.inject == Some(Defect::Nobody) {
        set_nobodys(&group)?;
    }
    let ports: Vec<u16> = group.servers().iter().map(|server| server.port()).collect();
    let names: Vec<String> = (0..KEYS).map(key_in_redis).collect();
    let (mut random, mut faults) = (round.random(), Vec::new());
    let end = Instant::now() + round.time;
    let (ended, seen) = watch_during(&ports, &names, LONGEST_TTL, || {
        while Instant::now() < end && !round.soak.stop.requested() {
            for process in &processes {
                process.check()?;
            }
            faults.extend(fault(&mut group, &mut random)?);
            (round.tick)(format!("{} faults", faults.len()));
            thread::sleep(random.millis(500, 2_000));
        }
        anyhow::Ok(())
    });
    ended?;
    (round.tick)("finishing".to_owned());
    let primary = group.primary().context("the sentinels do not agree")?;
    let remaining = Remaining {
        servers: group.servers().iter().collect(),
        masters: vec![&group.servers()[primary]],
        url: group.url(),
    };
    let left = leaks::finish(&mut processes, &remaining, folder)?;
    Ok(Events {
        faults,
        sightings: seen.sightings,
        found: seen.found,
        left,
    })
}

/// Takes the primary away in one of three ways, and waits until the group is whole again. Until then, the old primary
/// may grant locks, too.
fn fault(group: &mut SentinelGroup, random: &mut Random) -> anyhow::Result<Vec<Fault>> {
    let primary = group.primary().context("the sentinels do not agree")?;
    let from = now();
    let (kind, mut stopped) = match random.below(3) {
        0 => {
            group.server_mut(primary).kill();
            group.wait_for_switch(primary)?;
            group.server_mut(primary).restart()?;
            (Kind::MasterKilled, None)
        }
        1 => {
            group.servers()[primary].stop();
            let switched = group.wait_for_switch(primary);
            group.servers()[primary].resume();
            let to = now();
            switched?;
            // The server held back requests only while it was stopped.
            (
                Kind::FailedOver,
                Some((Kind::MasterStopped, Effect::None, to)),
            )
        }
        _ => {
            group.fail_over()?;
            (Kind::FailedOver, None)
        }
    };
    group.wait_until_whole()?;
    let keys = (0..KEYS).collect();
    let lost = (kind, Effect::MayLose { keys }, now());
    let all = [stopped.take(), Some(lost)].into_iter().flatten();
    let fault = |(kind, effect, to)| Fault {
        kind,
        from,
        to,
        effect,
    };
    Ok(all.map(fault).collect())
}

/// Writes locks without holders, under keys that the processes do not use under sentinels.
fn set_nobodys(group: &SentinelGroup) -> anyhow::Result<()> {
    let primary = group.primary().context("the sentinels do not agree")?;
    for (key, value) in [contended_key(), race_key()].into_iter().zip(NOBODYS) {
        let key = key_in_redis(key);
        group.servers()[primary].command(&["SET", &key, value, "PX", NOBODYS_TTL_MS])?;
        // A fail-over must not lose the key.
        let is_everywhere = eventually(REPLICATION, || {
            let mut servers = group.servers().iter();
            servers.all(|server| server.command(&["EXISTS", &key]).ok() == Some(Reply::Int(1)))
        });
        ensure!(is_everywhere, "the replicas do not get the key {key}");
    }
    Ok(())
}

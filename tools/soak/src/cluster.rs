//! A round on a Cluster: its faults, and the grants that are seen on its nodes. One fault comes after another, so that
//! each loss has one explanation. The first process reaches each node through a proxy; the others do not.

use std::collections::BTreeMap;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use leasehold_testbed::{Cluster as Servers, Proxy};
use leasehold_tools::stop::Stop;
use rustix::process::Signal;

use crate::checks::Violation;
use crate::driver::{Round, Soak};
use crate::faults::{
    Effect, Fault, Kind, Lasts, begin_on_proxy, drawn, kill_connections, mend, refuse_others, time,
};
use crate::inject::{Defect, NOBODYS, NOBODYS_TTL_MS};
use crate::leaks::{self, Remaining};
use crate::messages::{
    KEYS, LONGEST_TTL, SHORT_OUTAGE, busy_key, contended_key, key_in_redis, race_key,
};
use crate::process::Process;
use crate::random::Random;
use crate::recorded::{Events, LONGEST_ROUND, Recorded, SHORTEST_ROUND, unless_stopped};
use crate::records::now;
use crate::watch::watch_during;

/// The weight of each kind when a fault is drawn. A round begins with one fault of each of the first four kinds, and
/// then draws faults.
const KINDS: [(usize, Kind); 12] = [
    (4, Kind::SlotMoved),
    (3, Kind::MasterKilled),
    (3, Kind::MasterStopped),
    (3, Kind::FailedOver),
    (3, Kind::ConnectionsKilled),
    (1, Kind::ScriptsFlushed),
    (3, Kind::ProcessStopped),
    (2, Kind::ProcessKilled),
    (2, Kind::ProxyCut),
    (1, Kind::ProxyDelays),
    (3, Kind::ProxyHolds),
    (1, Kind::ProxyRefuses),
];
const FIRST: usize = 4;
/// The proxies listen on 127.0.0.2.
const PROXIES: u8 = 2;
/// `cluster-node-timeout`, short so that a round has time for fail-overs.
const NODE_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a replica counts the votes of its last election: two node time-outs. In this time, a planned fail-over
/// would make it a master by these votes, until the other nodes refuse their old epoch.
const OLD_VOTES: Duration = NODE_TIMEOUT.saturating_mul(2);
pub fn topology(soak: &Soak<'_>) -> anyhow::Result<Recorded> {
    refuse_others(soak.only, &KINDS, "cluster")?;
    Ok(Recorded::new((SHORTEST_ROUND, LONGEST_ROUND), work))
}

fn work(round: &Round<'_>, folder: &Path) -> anyhow::Result<Events> {
    let cluster = Servers::builder().without_hosts();
    let cluster = cluster.node_timeout(NODE_TIMEOUT).start()?;
    let (proxies, proxied) = cluster.proxies(PROXIES)?;
    let urls = (0..round.soak.processes).map(|process| match process {
        0 => proxied.clone(),
        _ => cluster.url(),
    });
    let processes = round.start_processes(urls, SHORT_OUTAGE, folder)?;
    let names: Vec<String> = (0..KEYS).map(key_in_redis).collect();
    let slots = names.iter().map(|name| cluster.slot_of(name));
    let slots: Vec<u16> = slots.collect();
    let masters = slots.iter().map(|slot| cluster.master_of(*slot)).collect();
    let ports: Vec<u16> = cluster.nodes().iter().map(|node| node.port()).collect();
    let mut subjects = Subjects {
        random: round.random(),
        cluster,
        slots,
        masters,
        elected: BTreeMap::new(),
        proxies,
        processes,
        done: Vec::new(),
    };
    if round.soak.inject == Some(Defect::Nobody) {
        subjects.set_nobodys()?;
    }
    let (ended, seen) = watch_during(&ports, &names, LONGEST_TTL, || {
        let kinds = drawn(&KINDS, round.soak.only);
        let end = Instant::now() + round.time;
        subjects.run(&kinds, end, round.soak.stop, |faults| {
            (round.tick)(format!("{faults} faults"));
        })
    });
    unless_stopped(ended)?;
    (round.tick)("finishing".to_owned());
    let left = subjects.end(folder)?;
    Ok(Events {
        faults: subjects.done,
        sightings: seen.sightings,
        found: seen.found,
        left,
    })
}

/// Everything that faults are applied to.
struct Subjects {
    random: Random,
    cluster: Servers,
    /// The slot of each key, and the node that serves it.
    slots: Vec<u16>,
    masters: Vec<usize>,
    /// The time at which each node was last known to have become a master.
    elected: BTreeMap<usize, Instant>,
    proxies: Vec<Proxy>,
    processes: Vec<Process>,
    done: Vec<Fault>,
}

impl Subjects {
    /// Applies one fault after another until `end`; calls `tick` in between.
    fn run(
        &mut self,
        kinds: &[(usize, Kind)],
        end: Instant,
        stop: &Stop,
        tick: impl Fn(usize),
    ) -> anyhow::Result<()> {
        let first: Vec<Kind> = kinds.iter().take(FIRST).map(|(_, kind)| *kind).collect();
        let mut first = first.into_iter();
        while Instant::now() < end {
            stop.pause(self.random.millis(100, 900))?;
            for process in &self.processes {
                process.check()?;
            }
            let kind = first.next();
            let kind = kind.unwrap_or_else(|| self.random.weighted(kinds));
            self.apply(kind, stop)
                .with_context(|| format!("the fault {kind:?}"))?;
            tick(self.done.len());
        }
        Ok(())
    }

    fn apply(&mut self, kind: Kind, stop: &Stop) -> anyhow::Result<()> {
        let (from, key) = (now(), busy_key(&mut self.random));
        let master = self.masters[key];
        let effect = match kind {
            Kind::MasterKilled => return self.kill(master, stop),
            Kind::MasterStopped => {
                let keys = self.keys_of(master);
                let replica = self.cluster.replica_of(master);
                self.cluster.nodes()[master].stop();
                let changed = self.cluster.wait_until_master(replica);
                self.cluster.nodes()[master].resume();
                changed?;
                self.succeed(master, replica)?;
                Effect::MayLose { keys }
            }
            Kind::FailedOver => {
                let replica = self.cluster.replica_of(master);
                if let Some(elected) = self.elected.get(&replica) {
                    stop.pause(OLD_VOTES.saturating_sub(elected.elapsed()))?;
                }
                self.cluster.fail_over(master)?;
                self.succeed(master, replica)?;
                Effect::None
            }
            Kind::SlotMoved => {
                self.move_slot(key)?;
                Effect::None
            }
            Kind::ConnectionsKilled => {
                kill_connections(&self.cluster.nodes()[master], &mut self.random)?;
                Effect::None
            }
            Kind::ScriptsFlushed => {
                self.cluster.nodes()[master].command(&["SCRIPT", "FLUSH"])?;
                Effect::None
            }
            Kind::ProcessStopped => {
                let process = self.random.below(self.processes.len());
                self.processes[process].signal(Signal::STOP)?;
                let paused = stop.pause(time(&mut self.random));
                self.processes[process].signal(Signal::CONT)?;
                paused?;
                Effect::Stops { process }
            }
            Kind::ProcessKilled => {
                let process = self.random.below(self.processes.len());
                let victim = &mut self.processes[process];
                let life = victim.life();
                victim.kill_and_start_anew()?;
                Effect::Kills { process, life }
            }
            _ => {
                let proxy = &self.proxies[master];
                if let Lasts::For(time) = begin_on_proxy(kind, proxy, &mut self.random) {
                    let paused = stop.pause(time);
                    mend(proxy);
                    paused?;
                }
                Effect::None
            }
        };
        self.note(kind, from, effect);
        Ok(())
    }

    /// Kills a master. In one case of two, its replica lacks the grants of the last moment. A killed master grants
    /// nothing any more, so the fault ends when the replica serves.
    fn kill(&mut self, master: usize, stop: &Stop) -> anyhow::Result<()> {
        let keys = self.keys_of(master);
        let replica = self.cluster.replica_of(master);
        let from = now();
        if self.random.one_in(2) {
            // The replica connects again after a second at most.
            self.cluster.nodes()[master].command(&["CLIENT", "KILL", "TYPE", "replica"])?;
            thread::sleep(self.random.millis(0, 500));
        }
        self.cluster.node(master).kill();
        self.cluster.wait_until_master(replica)?;
        self.note(Kind::MasterKilled, from, Effect::MayLose { keys });
        let paused = stop.pause(self.random.millis(0, 1000));
        self.cluster.node(master).restart()?;
        self.succeed(master, replica)?;
        Ok(paused?)
    }

    /// Moves the slot of a key, with pauses in between, so that requests meet each state of the move.
    fn move_slot(&mut self, key: usize) -> anyhow::Result<()> {
        let (slot, from) = (self.slots[key], self.masters[key]);
        let others = self.masters.iter().copied().filter(|node| *node != from);
        let others: Vec<usize> = others.collect();
        let to = others[self.random.below(others.len())];
        self.cluster.begin_move(slot, to)?;
        let pauses = [self.random.millis(0, 300), self.random.millis(0, 100)];
        thread::sleep(pauses[0]);
        self.cluster.move_keys(slot, to, |_| true)?;
        thread::sleep(pauses[1]);
        self.cluster.end_move(slot, to)?;
        for (number, master) in self.slots.iter().zip(&mut self.masters) {
            if *number == slot {
                *master = to;
            }
        }
        Ok(())
    }

    /// Waits until all nodes agree that the node `replica` has the slots of the node `master`.
    fn succeed(&mut self, master: usize, replica: usize) -> anyhow::Result<()> {
        self.cluster.wait_until_ok()?;
        self.elected.insert(replica, Instant::now());
        for node in self.masters.iter_mut().filter(|node| **node == master) {
            *node = replica;
        }
        Ok(())
    }

    fn keys_of(&self, master: usize) -> Vec<usize> {
        let masters = self.masters.iter().enumerate();
        let keys = masters.filter(|(_, node)| **node == master);
        keys.map(|(key, _)| key).collect()
    }

    fn note(&mut self, kind: Kind, from: u64, effect: Effect) {
        self.done.push(Fault {
            kind,
            from,
            to: now(),
            effect,
        });
    }

    /// Writes locks without holders.
    fn set_nobodys(&self) -> anyhow::Result<()> {
        // No process uses these keys on a Cluster.
        for (key, value) in [contended_key(), race_key()].into_iter().zip(NOBODYS) {
            let server = &self.cluster.nodes()[self.masters[key]];
            server.command(&["SET", &key_in_redis(key), value, "PX", NOBODYS_TTL_MS])?;
        }
        Ok(())
    }

    /// Ends the processes' work, and returns what was left.
    fn end(&mut self, folder: &Path) -> anyhow::Result<Vec<Violation>> {
        self.proxies.iter().for_each(mend);
        self.cluster.wait_until_ok()?;
        let nodes = self.cluster.nodes();
        let mut masters = self.masters.clone();
        masters.sort_unstable();
        masters.dedup();
        let remaining = Remaining {
            servers: nodes.iter().collect(),
            masters: masters.into_iter().map(|node| &nodes[node]).collect(),
            url: self.cluster.url(),
        };
        leaks::finish(&mut self.processes, &remaining, folder)
    }
}

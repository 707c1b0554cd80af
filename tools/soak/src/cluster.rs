//! A round on a Cluster: its faults, and the grants that are seen on its nodes. One fault comes after another, so that
//! each loss has one explanation. The first process reaches each node through a proxy; the others do not.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use leasehold_testbed::{Cluster, Proxy};
use leasehold_tools::stop::{Stop, Stopped};
use rustix::process::Signal;

use crate::checks::{Sighting, Violation};
use crate::faults::{Effect, Fault, Kind, Lasts, begin_on_proxy, kill_connections, mend, time};
use crate::inject::{Defect, NOBODYS, NOBODYS_TTL_MS};
use crate::leaks::{self, Remaining};
use crate::messages::{
    KEYS, LONGEST_TTL, UNCONFIRMED, contended_key, hot_keys, key_name, race_key,
};
use crate::process::Process;
use crate::random::Random;
use crate::records::now;
use crate::round::{Events, OF_FAULTS, Round};
use crate::value::GrantId;

/// The weight of each kind when a fault is drawn. Each of the first four comes once before any is drawn.
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
/// The pause between two looks at the keys.
const LOOKS: Duration = Duration::from_millis(100);
/// How long a node may take to reply to a look; a stopped one does not.
const LOOK_LIMIT: Duration = Duration::from_millis(200);
/// The lock's keys of a master, with their values and ttls. A key of a slot that the node does not serve is left out.
const LOOK: &str = "
    local found = {}
    for _, key in ipairs(redis.call('KEYS', 'leasehold:*')) do
        if not string.find(key, '~', 1, true) then
            local value, ttl = redis.pcall('GET', key), redis.pcall('PTTL', key)
            if type(value) == 'string' and type(ttl) == 'number' then
                found[#found + 1] = {key, value, ttl}
            end
        end
    end
    return found";

/// The kinds that are drawn.
pub fn kinds() -> Vec<Kind> {
    KINDS.iter().map(|(_, kind)| *kind).collect()
}

/// Runs everything.
pub fn work(
    round: &Round<'_>,
    folder: &Path,
    stop: &Stop,
    tick: impl Fn(String),
) -> anyhow::Result<Events> {
    let cluster = Cluster::builder().without_hosts();
    let cluster = cluster.node_timeout(NODE_TIMEOUT).start()?;
    let (proxies, proxied) = cluster.proxies(PROXIES)?;
    let urls = (0..round.processes).map(|process| match process {
        0 => proxied.clone(),
        _ => cluster.url(),
    });
    let processes = urls.enumerate();
    let processes = processes.map(|(process, url)| round.start_process(process, url, folder));
    let processes: Vec<Process> = processes.collect::<anyhow::Result<_>>()?;
    for process in &processes {
        process.wait_until_ready()?;
    }
    let names: Vec<String> = (0..KEYS).map(in_redis).collect();
    let slots = names.iter().map(|name| cluster.slot_of(name));
    let slots: Vec<u16> = slots.collect();
    let masters = slots.iter().map(|slot| cluster.master_of(*slot)).collect();
    let ports: Vec<u16> = cluster.nodes().iter().map(|node| node.port()).collect();
    let only = |(_, kind): &(usize, Kind)| round.only.is_empty() || round.only.contains(kind);
    let mut subjects = Subjects {
        random: Random::new(round.seed, &[OF_FAULTS, round.number]),
        cluster,
        slots,
        masters,
        elected: BTreeMap::new(),
        proxies,
        processes,
        done: Vec::new(),
    };
    if round.inject == Some(Defect::Nobody) {
        subjects.set_nobodys()?;
    }
    let is_over = AtomicBool::new(false);
    let (ended, seen) = thread::scope(|scope| {
        let watcher = scope.spawn(|| watch(&ports, &names, LONGEST_TTL, &is_over));
        // Also if a fault panics.
        let ending = SetOnDrop(&is_over);
        let kinds: Vec<(usize, Kind)> = KINDS.into_iter().filter(only).collect();
        let ended = subjects.run(&kinds, Instant::now() + round.time, stop, |faults| {
            tick(format!("round {}: {faults} faults", round.number));
        });
        drop(ending);
        (ended, watcher.join())
    });
    match ended {
        Err(error) if error.is::<Stopped>() => {}
        other => other?,
    }
    tick(format!("round {}: finishing", round.number));
    let (sightings, found) = seen.expect("looking at keys does not panic");
    subjects.end(folder).map(|left| Events {
        faults: subjects.done,
        sightings,
        found,
        left,
    })
}

/// Sets a flag that ends threads.
pub struct SetOnDrop<'a>(pub &'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn in_redis(key: usize) -> String {
    format!("leasehold:{}", key_name(key))
}

/// Everything that faults are applied to.
struct Subjects {
    random: Random,
    cluster: Cluster,
    /// The slot of each key, and the node that serves it.
    slots: Vec<u16>,
    masters: Vec<usize>,
    /// When the nodes were last known to have become masters.
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
        let (from, key) = (now(), self.random.below(hot_keys()));
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

    /// Writes locks that nobody holds.
    fn set_nobodys(&self) -> anyhow::Result<()> {
        // No process uses these keys on a Cluster.
        for (key, value) in [contended_key(), race_key()].into_iter().zip(NOBODYS) {
            let server = &self.cluster.nodes()[self.masters[key]];
            server.command(&["SET", &in_redis(key), value, "PX", NOBODYS_TTL_MS])?;
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

/// Looks at the locks with these keys on all servers until `is_over`. Returns the grants, and the keys whose ttl is
/// impossible, since none is longer than `longest`.
pub fn watch(
    ports: &[u16],
    names: &[String],
    longest: Duration,
    is_over: &AtomicBool,
) -> (Vec<Sighting>, Vec<Violation>) {
    let mut connections: Vec<Option<redis::Connection>> = ports.iter().map(|_| None).collect();
    let mut seen = Seen::default();
    let numbers: BTreeMap<&String, usize> = names.iter().zip(0..).collect();
    while !is_over.load(Ordering::Relaxed) {
        for (port, connection) in ports.iter().zip(&mut connections) {
            // From before the look: the key may go at once.
            let at = now();
            let Some(locks) = look(*port, connection) else {
                *connection = None;
                continue;
            };
            for lock in locks {
                if let Some(&key) = numbers.get(&lock.0) {
                    seen.add(at, key, &lock, longest);
                }
            }
        }
        thread::sleep(LOOKS);
    }
    (seen.sightings.into_values().collect(), seen.found)
}

/// All looks so far.
#[derive(Default)]
struct Seen {
    sightings: BTreeMap<(usize, GrantId), Sighting>,
    found: Vec<Violation>,
    /// The grants whose ttl was reported.
    reported: BTreeSet<GrantId>,
}

impl Seen {
    /// Adds a look at the lock `key`. No confirmed grant has a ttl longer than `longest`.
    fn add(&mut self, at: u64, key: usize, (name, value, ttl): &Lock, longest: Duration) {
        let Some(grant) = GrantId::parse(value) else {
            return;
        };
        let sighting = self.sightings.entry((key, grant.clone()));
        let sighting = sighting.or_insert_with(|| Sighting {
            key,
            name: name.clone(),
            grant: grant.clone(),
            first: at,
            last: at,
        });
        sighting.last = at;
        let is_confirmed = !value.contains(" ?") && !value.contains(" !");
        let longest = match is_confirmed {
            true => longest,
            false => longest + UNCONFIRMED,
        };
        let is_possible = (0..=longest.as_millis() as i64).contains(ttl);
        if !is_possible && self.reported.insert(grant) {
            self.found.push(Violation {
                text: format!("{name:?} has a ttl of {ttl} ms: {value}"),
                key: Some(key),
                from: at,
                to: at,
            });
        }
    }
}

/// The key of a lock, its value, and its ttl in ms.
type Lock = (String, String, i64);

/// The keys of a node, with their values and ttls; `None` if it does not reply.
fn look(port: u16, connection: &mut Option<redis::Connection>) -> Option<Vec<Lock>> {
    if connection.is_none() {
        let client = redis::Client::open(format!("redis://127.0.0.1:{port}")).ok()?;
        let new = client.get_connection_with_timeout(LOOK_LIMIT).ok()?;
        new.set_read_timeout(Some(LOOK_LIMIT)).ok()?;
        *connection = Some(new);
    }
    let mut request = redis::cmd("EVAL");
    request.arg(LOOK).arg(0);
    request.query(connection.as_mut()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONGEST: Duration = Duration::from_secs(4);

    fn lock(lease: char, micros: &str, ttl: i64) -> Lock {
        let lease = lease.to_string().repeat(32);
        let value = format!("lh1 {lease} {micros} host/1/a");
        ("k".to_owned(), value, ttl)
    }

    #[test]
    fn grants_without_tokens_are_seen_one_by_one() {
        let mut seen = Seen::default();
        let zeros = "0000000000000000";
        for (at, lease) in [(1, 'a'), (2, 'a'), (5, 'b'), (9, 'b')] {
            seen.add(at, 0, &lock(lease, zeros, 1), LONGEST);
        }
        // A second grant of the lease.
        seen.add(10, 0, &lock('b', "1795263780943818", 1), LONGEST);
        let times = seen.sightings.values().map(|one| (one.first, one.last));
        assert_eq!(times.collect::<Vec<_>>(), [(1, 2), (5, 9), (10, 10)]);
    }

    #[test]
    fn an_impossible_ttl_is_found_once() {
        let mut seen = Seen::default();
        for (ttl, count) in [(0, 0), (4_000, 0), (4_001, 1), (4_001, 1)] {
            seen.add(1, 0, &lock('a', "1", ttl), LONGEST);
            assert_eq!(seen.found.len(), count, "{ttl}");
        }
        seen.add(1, 0, &lock('b', "1", -1), LONGEST);
        assert_eq!(seen.found.len(), 2);
        for (ttl, count) in [(7_000, 2), (7_001, 3)] {
            let (name, value, ttl) = lock('c', "1", ttl);
            seen.add(1, 0, &(name, value + " ? +", ttl), LONGEST);
            assert_eq!(seen.found.len(), count, "{ttl}");
        }
    }
}

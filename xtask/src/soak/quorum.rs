//! The soak of a quorum: processes with a client each use locks on five nodes, while nodes are stopped and killed, and
//! while the network between one client and the nodes fails. At most two nodes are faulty at a time, including the
//! quarantine of nodes that lost their data. In some rounds, one client reaches no more than a majority, and one node
//! of that majority is faulty: there, each vote counts. The clients live as long as the soak.
//!
//! The resource that the locks protect is a fenced value on a server of its own.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, bail, ensure};
use comfy_table::Table;
use crossbeam_channel::{Receiver, TryRecvError};
use leasehold::{Client, Error, ErrorKind, Mutex};
use leasehold_testbed::child::{self, say};
use leasehold_testbed::{Process, Proxy, Reply, Server, eventually};
use serde::{Deserialize, Serialize};

use super::Broken;
use super::random::Random;
use super::records::now;
use crate::progress;
use crate::stop::{Stop, Stopped};
use crate::table::plain;

const NODES: usize = 5;
/// The nodes that keep their data when they are killed. The others lose it.
const DURABLE: usize = 3;
/// The ttl of all leases, and the length of a quarantine.
const TTL: Duration = Duration::from_millis(500);
const KEYS: usize = 6;
/// The fence counter of each node.
const COUNTER: &str = "leasehold:~fence";
const COMMAND_TIMEOUT: Duration = Duration::from_millis(150);
/// How long `lock` waits for a majority: longer than any fault, also on a busy machine.
const OUTAGE: Duration = Duration::from_secs(30);
/// How often a holder looks at its lease.
const LOOK: Duration = Duration::from_millis(2);
/// How long a process on a busy machine may take to start, or to end its last call.
const PROCESS: Duration = Duration::from_secs(90);
/// How long after the ttl a key may still exist. A node deletes expired keys in its own time.
const LATE: Duration = Duration::from_secs(2);
/// The least grants of a round. A round goes on without faults until it has them.
const ENOUGH: usize = 20;
/// How long a round may go on for them, also on a busy machine.
const EXTENSION: Duration = Duration::from_secs(60);
/// How far a fence counter gets ahead of the time. With the lead of a proposal, it is less than a quarantine.
const AHEAD: Duration = Duration::from_millis(300);
/// A fault begins within this time after the round has begun, in ms.
const BEGIN: u64 = 200;
/// A fault lasts for less than this, in ms.
const LONGEST: u64 = 700;
/// The shortest round.
const ROUND: Duration = Duration::from_millis(1000);
/// The time after a quarantine that a node has to vote again.
const MARGIN: Duration = Duration::from_millis(100);

/// How far the soak goes.
#[derive(Clone, Copy)]
pub enum Length {
    Time(Duration),
    Rounds(u64),
}

#[derive(Clone, Serialize, Deserialize)]
struct Assignment {
    /// The nodes, as this process reaches them.
    nodes: Vec<String>,
    /// The server of the fenced values.
    resource: String,
    seed: u64,
    process: u64,
}

#[derive(Serialize, Deserialize)]
enum Order {
    /// Make the next hold a long one.
    HoldLong,
    /// Take each lock once more, and end.
    Finish,
}

#[derive(Serialize, Deserialize)]
enum Message {
    Ready,
    Held(Hold),
    /// A call returned this error, which no fault explains.
    Failed(String),
    Finished,
}

/// One hold, as its process saw it. The times are those of [`now`], in ns.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Hold {
    process: u64,
    key: usize,
    token: u64,
    /// When the lease was seen to be valid for the first and the last time.
    from: u64,
    to: u64,
    is_lost: bool,
    /// When the fenced value accepted a write of this hold: before the request, and after the reply.
    writes: Vec<(u64, u64)>,
    /// The writes that the fenced value refused.
    refused: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Kind {
    NodeStopped,
    NodeKilled,
    /// The node goes on without its data.
    NodeFlushed,
    /// The node's fence counter is ahead, as if its clock had been.
    CounterAhead,
    /// One client does not reach one node.
    LinkCut,
    /// One client's requests and replies are slow, and then reach no node.
    ClientCutOff,
}

/// A fault of a round. The times count from the beginning of the round.
#[derive(Clone, Copy, Debug)]
struct Fault {
    kind: Kind,
    node: usize,
    process: usize,
    /// The delay of a client that is cut off later, each way.
    delay: Duration,
    begin: Duration,
    end: Duration,
}

impl Fault {
    /// The faults of a round: of one or two nodes, or of one client.
    fn draw(random: &mut Random, processes: usize) -> Vec<Self> {
        if random.one_in(4) {
            return Self::draw_bare_majority(random, processes);
        }
        let first = random.below(NODES);
        let second = (first + 1 + random.below(NODES - 1)) % NODES;
        let count = 1 + random.below(2);
        let mut fault = |node, kind| {
            let begin = random.millis(0, BEGIN);
            Self {
                kind,
                node,
                process: random.below(processes),
                delay: random.millis(30, 65),
                begin,
                end: begin + random.millis(50, LONGEST),
            }
        };
        let mut faults: Vec<Self> = [first, second]
            .into_iter()
            .take(count)
            .map(|node| fault(node, Kind::NodeStopped))
            .collect();
        for fault in &mut faults {
            fault.kind = random.weighted(&[
                (2, Kind::NodeStopped),
                (2, Kind::NodeKilled),
                (1, Kind::NodeFlushed),
                (1, Kind::CounterAhead),
                (2, Kind::LinkCut),
                (3, Kind::ClientCutOff),
            ]);
            if fault.kind == Kind::ClientCutOff {
                // Long enough for a lease to end meanwhile.
                fault.end += TTL;
            }
        }
        faults
    }

    /// One client reaches three of the five nodes, and one of these three loses its data or has its counter ahead.
    fn draw_bare_majority(random: &mut Random, processes: usize) -> Vec<Self> {
        let first = random.below(NODES);
        let begin = random.millis(0, BEGIN);
        let link = Self {
            kind: Kind::LinkCut,
            node: first,
            process: random.below(processes),
            delay: Duration::ZERO,
            begin,
            end: begin + random.millis(LONGEST / 2, LONGEST),
        };
        let other_link = Self {
            node: (first + 1) % NODES,
            ..link
        };
        let begin = begin + random.millis(50, LONGEST / 2);
        let node = Self {
            kind: random.weighted(&[(1, Kind::NodeFlushed), (1, Kind::CounterAhead)]),
            node: (first + 2 + random.below(NODES - 2)) % NODES,
            begin,
            end: begin,
            ..link
        };
        vec![link, other_link, node]
    }

    /// When the node votes again.
    fn over(&self) -> Duration {
        match self.kind {
            Kind::NodeKilled | Kind::NodeFlushed => self.end + TTL + MARGIN,
            _ => self.end,
        }
    }
}

/// The nodes, and the clients' ways to them.
struct Servers {
    nodes: Vec<Server>,
    resource: Server,
    /// By process and node.
    links: Vec<Vec<Proxy>>,
}

impl Servers {
    fn start(processes: u64) -> anyhow::Result<Self> {
        let start = |node: usize| match node < DURABLE {
            true => Server::builder()
                .arg("appendonly", "yes")
                .arg("appendfsync", "always")
                .start(),
            false => Server::start(),
        };
        let nodes: Vec<Server> = (0..NODES).map(start).collect::<Result<_, _>>()?;
        let links = (0..processes).map(|_| nodes.iter().map(|node| Proxy::start(node.port())));
        let links = links.map(Iterator::collect).collect::<Result<_, _>>()?;
        Ok(Self {
            resource: Server::start()?,
            nodes,
            links,
        })
    }

    fn begin(&mut self, fault: &Fault) -> anyhow::Result<()> {
        match fault.kind {
            Kind::NodeStopped => self.nodes[fault.node].stop(),
            Kind::NodeKilled => self.nodes[fault.node].kill(),
            Kind::NodeFlushed => {
                self.nodes[fault.node].command(&["FLUSHALL"])?;
            }
            Kind::CounterAhead => {
                let ahead = (SystemTime::now().duration_since(UNIX_EPOCH)? + AHEAD).as_micros();
                self.nodes[fault.node].command(&["ZADD", COUNTER, &ahead.to_string(), "t"])?;
            }
            Kind::LinkCut => self.links[fault.process][fault.node].black_hole(true),
            Kind::ClientCutOff => {
                for link in &self.links[fault.process] {
                    link.delay(fault.delay);
                }
            }
        }
        Ok(())
    }

    /// The middle of the fault.
    fn worsen(&self, fault: &Fault) {
        if fault.kind == Kind::ClientCutOff {
            for link in &self.links[fault.process] {
                link.hold_requests(true);
                link.hold_replies(true);
            }
        }
    }

    fn end(&mut self, fault: &Fault) -> anyhow::Result<()> {
        match fault.kind {
            Kind::NodeStopped => self.nodes[fault.node].resume(),
            Kind::NodeKilled => self.nodes[fault.node].restart()?,
            Kind::NodeFlushed | Kind::CounterAhead => {}
            Kind::LinkCut => self.links[fault.process][fault.node].black_hole(false),
            Kind::ClientCutOff => {
                for link in &self.links[fault.process] {
                    link.hold_requests(false);
                    link.hold_replies(false);
                    link.delay(Duration::ZERO);
                }
            }
        }
        Ok(())
    }

    /// Plays the faults of a round. Returns once all nodes vote again.
    fn play(&mut self, faults: &[Fault], stop: &Stop) -> anyhow::Result<()> {
        let mut steps: Vec<(Duration, usize, usize)> = Vec::new();
        for (index, fault) in faults.iter().enumerate() {
            let middle = fault.begin + (fault.end - fault.begin) / 3;
            steps.extend([
                (fault.begin, index, 0),
                (middle, index, 1),
                (fault.end, index, 2),
            ]);
        }
        steps.sort_unstable();
        let start = Instant::now();
        // A restart may take long, and the quarantine begins after it.
        let mut over = start + ROUND;
        for (at, index, step) in steps {
            // After Ctrl-C, the faults still end, but at once.
            let _ = stop.pause((start + at).saturating_duration_since(Instant::now()));
            let fault = &faults[index];
            match step {
                0 => self.begin(fault)?,
                1 => self.worsen(fault),
                _ => {
                    self.end(fault)?;
                    over = over.max(Instant::now() + (fault.over() - fault.end));
                }
            }
        }
        let _ = stop.pause(over.saturating_duration_since(Instant::now()));
        Ok(())
    }

    /// The locks that exist on a node, and the rest of their ttl in ms, which is negative without a ttl.
    fn locks(&self) -> anyhow::Result<Vec<(String, i64)>> {
        let mut locks = Vec::new();
        for (index, node) in self.nodes.iter().enumerate() {
            // A node that has restarted may still load its data.
            let mut reply = Reply::Nil;
            let _ = eventually(PROCESS, || {
                let listed = node.command(&["KEYS", "leasehold:*"]);
                reply = listed.unwrap_or(Reply::Nil);
                matches!(reply, Reply::Array(_))
            });
            let Reply::Array(keys) = reply else {
                bail!("node {index} does not list its keys: {reply:?}");
            };
            for key in keys.iter().filter_map(Reply::as_text) {
                // Names with a tilde are the library's own.
                if key.contains('~') {
                    continue;
                }
                match node.command(&["PTTL", key])? {
                    // It has expired meanwhile.
                    Reply::Int(-2) => {}
                    Reply::Int(left) => locks.push((format!("{key} on node {index}"), left)),
                    other => bail!("PTTL returned {other:?}"),
                }
            }
        }
        Ok(locks)
    }
}

/// Runs the soak. `first` is the number of the first round.
pub fn run(
    length: Length,
    processes: u64,
    seed: u64,
    first: u64,
    stop: &Stop,
) -> anyhow::Result<()> {
    let mut servers = Servers::start(processes)?;
    let mut children = Vec::new();
    for (process, links) in (0..).zip(&servers.links) {
        let assignment = Assignment {
            nodes: links.iter().map(Proxy::url).collect(),
            resource: servers.resource.url(),
            seed,
            process,
        };
        let name = format!("process {process}");
        let arguments = ["soak-quorum-process"];
        children.push(Process::<Message>::again(name, &arguments, &assignment)?);
    }
    for child in &children {
        let message = stop.message(child, PROCESS)?;
        ensure!(
            matches!(message, Message::Ready),
            "{} is not ready",
            child.name()
        );
    }
    let start = Instant::now();
    let bar = match length {
        Length::Time(time) => progress::bar_of_time(time, "{msg}")?,
        Length::Rounds(rounds) => progress::bar(rounds, "{pos}/{len} {msg}")?,
    };
    let mut soak = Soak::default();
    for number in first.. {
        let is_done = match length {
            Length::Time(time) => start.elapsed() >= time,
            Length::Rounds(rounds) => number - first >= rounds,
        };
        if is_done || stop.requested() || !soak.violations.is_empty() {
            break;
        }
        let mut random = Random::new(seed, &[number]);
        let faults = Fault::draw(&mut random, children.len());
        for fault in &faults {
            if matches!(fault.kind, Kind::LinkCut | Kind::ClientCutOff) {
                // Only a hold that goes on during the fault can be a second one.
                children[fault.process].order(&Order::HoldLong)?;
            }
        }
        servers.play(&faults, stop)?;
        soak.end_round(number, &faults, &children, &servers, stop)?;
        bar.set_position(match length {
            Length::Time(_) => start.elapsed().as_millis() as u64,
            Length::Rounds(_) => number - first + 1,
        });
        bar.set_message(format!(
            "round {number}: {} grants, seed {seed}",
            soak.grants
        ));
    }
    for child in &mut children {
        child.order(&Order::Finish)?;
    }
    for child in &children {
        soak.finish(child)?;
    }
    soak.violations.extend(check(&soak.holds));
    drop(children);
    let mut left = Vec::new();
    let is_free = eventually(TTL + LATE, || {
        servers.locks().is_ok_and(|locks| {
            left = locks;
            left.is_empty()
        })
    });
    if !is_free {
        soak.violations.push(format!("keys stay: {left:?}"));
    }
    bar.finish_and_clear();
    println!("{}seed {seed}", soak.text());
    soak.outcome(seed, first, stop)
}

/// The findings so far.
#[derive(Default)]
struct Soak {
    rounds: u64,
    grants: usize,
    lost: usize,
    writes: usize,
    refused: u64,
    faults: BTreeMap<Kind, usize>,
    /// The rounds that went on for more grants after their faults.
    extended: u64,
    fewest: Option<usize>,
    /// The holds that later holds are compared with.
    holds: Vec<Hold>,
    violations: Vec<String>,
}

impl Soak {
    /// Reads the records of a round.
    fn end_round(
        &mut self,
        number: u64,
        faults: &[Fault],
        children: &[Process<Message>],
        servers: &Servers,
        stop: &Stop,
    ) -> anyhow::Result<()> {
        let before = self.grants;
        self.read(children)?;
        let is_poor = |soak: &Self| soak.grants - before < ENOUGH && soak.violations.is_empty();
        if is_poor(self) {
            self.extended += 1;
        }
        let until = Instant::now() + EXTENSION;
        while is_poor(self) && !stop.requested() {
            if Instant::now() > until {
                let grants = self.grants - before;
                let text = format!("round {number} has only {grants} grants: {faults:?}");
                self.violations.push(text);
                break;
            }
            let _ = stop.pause(MARGIN);
            self.read(children)?;
        }
        self.rounds += 1;
        for fault in faults {
            *self.faults.entry(fault.kind).or_default() += 1;
        }
        let grants = self.grants - before;
        self.fewest = Some(self.fewest.map_or(grants, |fewest| fewest.min(grants)));
        for (key, left) in servers.locks()? {
            if left < 0 || left > TTL.as_millis() as i64 {
                let text = format!("{key} has a ttl of {left} ms");
                self.violations.push(text);
            }
        }
        self.violations.extend(check(&self.holds));
        // No hold is reported later than this.
        let newest = self.holds.iter().map(|hold| hold.to).max().unwrap_or(0);
        let since = newest.saturating_sub(PROCESS.as_nanos() as u64 / 3);
        self.holds.retain(|hold| hold.to >= since);
        Ok(())
    }

    fn read(&mut self, children: &[Process<Message>]) -> anyhow::Result<()> {
        for child in children {
            while let Some(message) = child.try_message(Duration::ZERO)? {
                self.note(message);
            }
        }
        Ok(())
    }

    fn note(&mut self, message: Message) {
        match message {
            Message::Held(hold) => {
                self.grants += 1;
                self.lost += usize::from(hold.is_lost);
                self.writes += hold.writes.len();
                self.refused += hold.refused;
                self.holds.push(hold);
            }
            Message::Failed(error) => self.violations.push(error),
            Message::Ready | Message::Finished => {}
        }
    }

    fn finish(&mut self, child: &Process<Message>) -> anyhow::Result<()> {
        loop {
            match child.try_message(PROCESS)? {
                Some(Message::Finished) => return Ok(()),
                Some(message) => self.note(message),
                None => {
                    let text = format!("{} gets no lock after all faults", child.name());
                    self.violations.push(text);
                    return Ok(());
                }
            }
        }
    }

    fn text(&self) -> String {
        let mut table = Table::new();
        table.set_header(["what", "times"]);
        let faults = self.faults.iter();
        let faults = faults.map(|(kind, count)| (format!("{kind:?}"), *count as u64));
        let rows = [
            ("rounds", self.rounds),
            ("grants", self.grants as u64),
            ("fewest grants of a round", self.fewest.unwrap_or(0) as u64),
            ("rounds extended for grants", self.extended),
            ("losses", self.lost as u64),
            ("fenced writes", self.writes as u64),
            ("refused writes", self.refused),
        ];
        let rows = rows.map(|(name, count)| (name.to_owned(), count));
        for (name, count) in rows.into_iter().chain(faults) {
            table.add_row([name, count.to_string()]);
        }
        format!("{}\n", plain(table, 1))
    }

    fn outcome(&self, seed: u64, first: u64, stop: &Stop) -> anyhow::Result<()> {
        for violation in &self.violations {
            println!("violation: {violation}");
        }
        match self.violations.len() {
            0 if stop.requested() => Err(Stopped.into()),
            0 => {
                ensure!(self.grants > 0, "no lock was granted");
                println!("All of it holds.");
                Ok(())
            }
            violations => {
                let last = first + self.rounds.saturating_sub(1);
                let again =
                    format!("cargo xtask soak --topology quorum --seed {seed} --round {last}");
                Err(Broken { violations, again }.into())
            }
        }
    }
}

/// Compares the holds with the guarantees: one valid lease at a time, rising tokens, no stale write.
fn check(holds: &[Hold]) -> Vec<String> {
    let mut found = Vec::new();
    for key in 0..KEYS {
        let mut of_key: Vec<&Hold> = holds.iter().filter(|hold| hold.key == key).collect();
        of_key.sort_by_key(|hold| hold.from);
        let mut longest: Option<&Hold> = None;
        let mut greatest: Option<&Hold> = None;
        for hold in &of_key {
            if let Some(other) = longest.filter(|other| other.to > hold.from) {
                let micros = (other.to.min(hold.to) - hold.from) / 1000;
                found.push(format!("two holders for {micros} µs: {other:?}, {hold:?}"));
            }
            if let Some(other) = greatest.filter(|other| other.token >= hold.token) {
                found.push(format!("the tokens do not rise: {other:?}, {hold:?}"));
            }
            longest = longest.filter(|other| other.to > hold.to).or(Some(hold));
            greatest = greatest
                .filter(|other| other.token > hold.token)
                .or(Some(hold));
        }
        let writes = |hold: &&Hold| {
            let token = hold.token;
            let writes = hold.writes.clone().into_iter();
            writes.map(move |(begun, ended)| (begun, ended, token))
        };
        let by_end = &mut of_key.iter().flat_map(writes).collect::<Vec<_>>();
        let mut by_begin = by_end.clone();
        by_end.sort_by_key(|(_, ended, _)| *ended);
        by_begin.sort_unstable();
        let (mut ended, mut latest) = (by_end.iter().peekable(), 0);
        for (begun, _, token) in by_begin {
            while let Some((.., earlier)) = ended.next_if(|(_, ended, _)| *ended <= begun) {
                latest = latest.max(*earlier);
            }
            if token < latest {
                let text = format!("the value of key {key} accepts {token} after {latest}");
                found.push(text);
            }
        }
    }
    found
}

/// A process of the soak.
pub fn process() -> ExitCode {
    child::run(work)
}

fn work(assignment: Assignment, orders: Receiver<Order>) -> anyhow::Result<()> {
    let client = Client::quorum_builder(assignment.nodes.clone())
        .ttl(TTL)
        .max_ttl(TTL)
        .command_timeout(COMMAND_TIMEOUT)
        .connect_timeout(COMMAND_TIMEOUT)
        .outage_timeout(OUTAGE)
        .build_lazy()?;
    // The resource has no faults. It may only be slow, since all processes connect to it at once.
    let resource = Client::builder(&assignment.resource)
        .command_timeout(OUTAGE)
        .connect_timeout(OUTAGE)
        .build()?;
    let mutexes: Vec<Mutex> = (0..KEYS)
        .map(|key| client.mutex(format!("k{key}")))
        .collect();
    let process = assignment.process;
    let mut random = Random::new(assignment.seed, &[1 << 32, process]);
    say(&Message::Ready)?;
    let hold = |key: usize, time: Duration| match hold(&mutexes[key], &resource, key, time) {
        Ok(Some(held)) => say(&Message::Held(Hold { process, ..held })),
        Ok(None) => Ok(()),
        Err(error) => say(&Message::Failed(format!("process {process}: {error}"))),
    };
    loop {
        // Some holds need renewals, and last until a fault ends them.
        let time = match orders.try_recv() {
            Ok(Order::HoldLong) => random.millis(800, 1500),
            Err(TryRecvError::Empty) if random.one_in(100) => random.millis(200, 1500),
            Err(TryRecvError::Empty) => random.millis(0, 10),
            Ok(Order::Finish) | Err(TryRecvError::Disconnected) => break,
        };
        hold(random.below(KEYS), time)?;
        thread::sleep(random.millis(0, 5));
    }
    for key in 0..KEYS {
        hold(key, Duration::ZERO)?;
    }
    client
        .shutdown(PROCESS)
        .context("the client does not end")?;
    say(&Message::Finished)?;
    // The parent ends this process.
    while orders.recv().is_ok() {}
    Ok(())
}

/// Holds a lock for `time`, unless the lease is lost before. `None` if the lease was not seen to be valid.
fn hold(
    mutex: &Mutex,
    resource: &Client,
    key: usize,
    time: Duration,
) -> Result<Option<Hold>, Error> {
    let guard = mutex.lock()?;
    let token = guard.fencing_token();
    // The last time at which the lease was valid.
    let valid = || {
        let at = now();
        (!guard.is_lost() && guard.remaining() > Duration::ZERO).then_some(at)
    };
    let from = valid();
    let mut to = from;
    let value = resource.fenced_value(format!("v{key}"));
    let (mut writes, mut refused) = (Vec::new(), 0);
    let mut write = || {
        let begun = now();
        match value.write(token, token.to_string()) {
            Ok(()) => writes.push((begun, now())),
            Err(error) if error.kind() == ErrorKind::StaleToken => refused += 1,
            Err(error) => return Err(error),
        }
        Ok(())
    };
    write()?;
    let until = Instant::now() + time;
    let mut is_lost = false;
    loop {
        match valid() {
            Some(at) => to = Some(at),
            None => {
                is_lost = true;
                break;
            }
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            break;
        }
        thread::sleep(left.min(LOOK));
    }
    match guard.unlock() {
        Err(error) if !error.is_lease_lost() && !error.is_unavailable() => return Err(error),
        _ => {}
    }
    if is_lost {
        // A late write, as after a long pause.
        thread::sleep(5 * LOOK);
        write()?;
    }
    Ok(from.zip(to).map(|(from, to)| Hold {
        process: 0,
        key,
        token,
        from,
        to,
        is_lost,
        writes,
        refused,
    }))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn hold(token: u64, from: u64, to: u64, writes: &[(u64, u64)]) -> Hold {
        Hold {
            process: 0,
            key: 0,
            token,
            from,
            to,
            is_lost: false,
            writes: writes.to_vec(),
            refused: 0,
        }
    }

    #[track_caller]
    fn assert_finds(holds: &[Hold], what: &str) {
        let found = check(holds);
        assert!(
            found.len() == 1 && found[0].contains(what),
            "{what:?} is not what it finds: {found:?}"
        );
    }

    #[test]
    fn holds_in_turn_are_correct() {
        let holds = [
            hold(2, 20, 30, &[(21, 22)]),
            hold(1, 10, 20, &[(11, 12), (19, 21)]),
        ];
        assert_eq!(check(&holds), [""; 0]);
    }

    #[test]
    fn two_valid_leases_are_found() {
        assert_finds(&[hold(1, 10, 21, &[]), hold(2, 20, 30, &[])], "two holders");
        // The hold between them does not hide the first one.
        let holds = [
            hold(1, 0, 40, &[]),
            hold(2, 40, 41, &[]),
            hold(3, 40, 50, &[]),
        ];
        assert_finds(&holds, "two holders");
    }

    #[test]
    fn tokens_that_do_not_rise_are_found() {
        assert_finds(&[hold(2, 10, 20, &[]), hold(2, 20, 30, &[])], "tokens");
        assert_finds(&[hold(2, 10, 20, &[]), hold(1, 20, 30, &[])], "tokens");
    }

    #[test]
    fn a_stale_write_is_found() {
        let holds = [hold(1, 10, 20, &[(26, 27)]), hold(2, 20, 30, &[(21, 25)])];
        assert_finds(&holds, "accepts 1 after 2");
    }

    #[test]
    fn at_most_two_nodes_are_faulty() {
        for number in 0..200 {
            let faults = Fault::draw(&mut Random::new(7, &[number]), 8);
            let is_link = |fault: &&Fault| fault.kind == Kind::LinkCut;
            let links = faults.iter().filter(is_link).count();
            assert!((1..=2).contains(&faults.len()) || (faults.len(), links) == (3, 2));
            let nodes: BTreeSet<usize> = faults.iter().map(|fault| fault.node).collect();
            assert_eq!(nodes.len(), faults.len(), "{faults:?}");
        }
    }
}

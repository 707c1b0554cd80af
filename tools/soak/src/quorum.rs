//! The soak of a quorum: processes with a client each use locks on five nodes, while nodes are stopped and killed, and
//! while the network between one client and the nodes fails. At most two nodes are faulty at a time, including the
//! quarantine of nodes that lost their data. In some rounds, one client reaches no more than a majority, and one node
//! of that majority is faulty: there, each vote counts. The clocks of the nodes step within the bounds.
//!
//! One hold in four is that of a set of two locks.
//!
//! The resource that a lock protects is a fenced value on a server of its own, which has no faults. Holders read and
//! write it, and other processes read it.
//!
//! The clients live as long as the soak. Only a client that got no replies for a while is shut down: then it must have
//! released its leases.

mod checks;
mod clocks;

use std::collections::BTreeMap;
use std::fmt::Display;
use std::process::ExitCode;
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, bail, ensure};
use comfy_table::Table;
use crossbeam_channel::{Receiver, Sender, TryRecvError, bounded, unbounded};
use leasehold::{Client, Error, ErrorKind, FencedValue, Mutex, MutexGuard, MutexesGuard, Released};
use leasehold_testbed::child::{self, say};
use leasehold_testbed::{OwnClock, Process, Proxy, Reply, Server, eventually};
use leasehold_tools::stop::Stop;
use leasehold_tools::table::plain;
use serde::{Deserialize, Serialize};

use self::checks::{Access, Hold, NodeKey, Outcome, Version};
use self::clocks::{Clocks, Step};
use crate::driver::{Findings, Round, Soak, Topology};
use crate::faults::refuse_others;
use crate::random::Random;
use crate::records::now;

const NODES: usize = 5;
/// This many nodes may be away or lose their data at a time.
const MINORITY: usize = NODES - NODES / 2 - 1;
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
/// How long a round may go on until it has [`ENOUGH`] grants, also on a busy machine.
const EXTENSION: Duration = Duration::from_secs(60);
/// How far a fault sets a fence counter ahead of the time. Together with the lead of a proposal, that is less than a
/// quarantine.
const AHEAD: Duration = Duration::from_millis(300);
/// A fault begins within this time after the round has begun, in ms.
const BEGIN: u64 = 200;
/// A fault lasts for less than this, in ms.
const LONGEST: u64 = 700;
/// The shortest round.
const ROUND: Duration = Duration::from_millis(1000);
/// The time within which a node has to vote again after a quarantine.
const MARGIN: Duration = Duration::from_millis(100);

#[derive(Clone, Serialize, Deserialize)]
struct Assignment {
    /// The nodes, as this process reaches them.
    nodes: Vec<String>,
    /// The server of the fenced values.
    values: String,
    seed: u64,
    process: u64,
}

#[derive(Serialize, Deserialize)]
enum Order {
    /// Make the next hold a long one.
    HoldLong,
    /// Acquire and release a lock that no other process uses, again and again, until the next order.
    TakeOwn,
    /// Shut the client down, and make another one.
    Reopen,
    /// Take each lock once more, and end.
    Finish,
}

#[derive(Serialize, Deserialize)]
enum Message {
    Ready,
    Held(Hold),
    Accessed(Access),
    /// A call returned this error, which no fault explains.
    Failed(String),
    /// The client has released all leases, and has shut down.
    Closed {
        holder: String,
    },
    Finished,
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
    /// One client's requests and replies are slow at first, and are held back later.
    ClientCutOff,
    /// One client's requests reach the nodes, but no replies reach the client.
    RepliesCut,
}

/// A fault of a round. The times count from the beginning of the round.
#[derive(Clone, Copy, Debug)]
struct Fault {
    kind: Kind,
    node: usize,
    process: usize,
    /// The delay in each direction, before a client is cut off.
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
        if random.one_in(6) {
            return vec![Self::draw_replies_cut(random, processes)];
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
                // The client is cut off for long enough that a lease ends.
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

    /// One client gets no replies for longer than its requests last, but not for long enough that its keys expire.
    /// Proposals that the round before has delayed arrive first, and their keys expire. The process takes its own lock
    /// meanwhile, so the nodes grant a proposal whose replies are lost.
    fn draw_replies_cut(random: &mut Random, processes: usize) -> Self {
        let begin = TTL + random.millis(0, BEGIN);
        Self {
            kind: Kind::RepliesCut,
            node: random.below(NODES),
            process: random.below(processes),
            delay: Duration::ZERO,
            begin,
            end: begin + COMMAND_TIMEOUT + random.millis(20, 200),
        }
    }

    /// Whether the fault is one of a node.
    fn is_of_node(&self) -> bool {
        let kinds = [Kind::LinkCut, Kind::ClientCutOff, Kind::RepliesCut];
        !kinds.contains(&self.kind)
    }

    /// The end of all effects of the fault. A node that was killed or flushed votes again then.
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
    /// The server of the fenced values.
    values: Server,
    /// The proxies, by process and node.
    links: Vec<Vec<Proxy>>,
}

impl Servers {
    fn start(processes: usize, clock: Option<&OwnClock>) -> anyhow::Result<Self> {
        let start = |node: usize| {
            let mut builder = Server::builder();
            if let Some(clock) = clock {
                builder = builder.own_clock(clock);
            }
            if node < DURABLE {
                builder = builder
                    .arg("appendonly", "yes")
                    .arg("appendfsync", "always");
            }
            builder.start()
        };
        let nodes: Vec<Server> = (0..NODES).map(start).collect::<Result<_, _>>()?;
        let links = (0..processes).map(|_| nodes.iter().map(|node| Proxy::start(node.port())));
        let links = links.map(Iterator::collect).collect::<Result<_, _>>()?;
        let values = Server::start()?;
        Ok(Self {
            nodes,
            values,
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
            Kind::RepliesCut => self.hold_replies(fault.process, true),
        }
        Ok(())
    }

    fn hold_replies(&self, process: usize, on: bool) {
        for link in &self.links[process] {
            link.hold_replies(on);
        }
    }

    /// Makes a fault worse, after a third of its time.
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
            Kind::RepliesCut => self.hold_replies(fault.process, false),
        }
        Ok(())
    }

    /// Plays the faults and the steps of a round. Calls `ended` after the end of each fault. Returns once all nodes
    /// vote again.
    fn play(
        &mut self,
        faults: &[Fault],
        steps: &[Step],
        clocks: &mut Option<Clocks>,
        stop: &Stop,
        mut ended: impl FnMut(&Fault, &Self) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let mut events: Vec<(Duration, Event)> = Vec::new();
        for (index, fault) in faults.iter().enumerate() {
            let middle = fault.begin + (fault.end - fault.begin) / 3;
            events.extend([
                (fault.begin, Event::Begin(index)),
                (middle, Event::Worsen(index)),
                (fault.end, Event::End(index)),
            ]);
        }
        events.extend(steps.iter().map(|step| (step.at, Event::Step(*step))));
        events.sort_by_key(|(at, _)| *at);
        let start = Instant::now();
        // A restart may take long, and the quarantine begins after it.
        let mut over = start + ROUND;
        for (at, event) in events {
            // After Ctrl-C, the faults still end, but at once.
            let _ = stop.pause((start + at).saturating_duration_since(Instant::now()));
            match event {
                Event::Begin(index) => self.begin(&faults[index])?,
                Event::Worsen(index) => self.worsen(&faults[index]),
                Event::End(index) => {
                    let fault = &faults[index];
                    self.end(fault)?;
                    over = over.max(Instant::now() + (fault.over() - fault.end));
                    ended(fault, self)?;
                }
                Event::Step(step) => {
                    if let Some(clocks) = clocks {
                        clocks.step(step, &self.nodes[step.node])?;
                    }
                }
            }
        }
        let _ = stop.pause(over.saturating_duration_since(Instant::now()));
        Ok(())
    }

    /// The keys of locks on all nodes.
    fn keys(&self) -> anyhow::Result<Vec<NodeKey>> {
        let mut found = Vec::new();
        for (index, node) in self.nodes.iter().enumerate() {
            // A node that has restarted may still load its data.
            let mut reply = Reply::Nil;
            let _ = eventually(PROCESS, || {
                let listed = node.command(&["KEYS", "leasehold:k*"]);
                reply = listed.unwrap_or(Reply::Nil);
                matches!(reply, Reply::Array(_))
            });
            let Reply::Array(names) = reply else {
                bail!("node {index} does not list its keys: {reply:?}");
            };
            for name in names.iter().filter_map(Reply::as_text) {
                let (value, left) = (
                    node.command(&["GET", name])?,
                    node.command(&["PTTL", name])?,
                );
                let (Some(value), Some(left)) = (value.as_text(), left.as_int()) else {
                    // The key has expired since it was listed.
                    continue;
                };
                // The value is `lh1`, the lease, the time, and the holder.
                let mut words = value.split(' ').skip(1);
                if left != -2 {
                    found.push(NodeKey {
                        name: name.to_owned(),
                        node: index,
                        lease: words.next().unwrap_or_default().to_owned(),
                        holder: words.nth(1).unwrap_or_default().to_owned(),
                        left,
                    });
                }
            }
        }
        Ok(found)
    }
}

/// An event of a round. The number is the index of a fault.
enum Event {
    Begin(usize),
    Worsen(usize),
    End(usize),
    Step(Step),
}

/// The topology, whose clients live as long as the soak.
pub struct Quorum {
    /// Dropped before the servers that they use.
    children: Vec<Process<Message>>,
    servers: Servers,
    clocks: Option<Clocks>,
    totals: Totals,
}

impl Quorum {
    pub fn start(soak: &Soak<'_>, clock: Option<&OwnClock>) -> anyhow::Result<Self> {
        refuse_others(soak.only, &[], "quorum")?;
        if clock.is_none() {
            println!(
                "The clocks of the nodes do not step: libfaketime is missing, or does not work with this redis-server."
            );
        }
        let servers = Servers::start(soak.processes, clock)?;
        let mut children = Vec::new();
        for (process, links) in (0..).zip(&servers.links) {
            let assignment = Assignment {
                nodes: links.iter().map(Proxy::url).collect(),
                values: servers.values.url(),
                seed: soak.seed,
                process,
            };
            let name = format!("process {process}");
            let arguments = ["--process", "--topology", "quorum"];
            children.push(Process::<Message>::again(name, &arguments, &assignment)?);
        }
        for child in &children {
            let message = soak.stop.message(child, PROCESS)?;
            ensure!(
                matches!(message, Message::Ready),
                "{} is not ready",
                child.name()
            );
        }
        Ok(Self {
            children,
            servers,
            clocks: clock.map(|_| Clocks::new()),
            totals: Totals::default(),
        })
    }

    /// Tells the processes what the faults need.
    fn prepare(&mut self, faults: &[Fault]) -> anyhow::Result<()> {
        for (process, child) in self.children.iter_mut().enumerate() {
            let is_cut_off = |fault: &Fault| {
                matches!(fault.kind, Kind::LinkCut | Kind::ClientCutOff) && fault.process == process
            };
            if faults.iter().any(is_cut_off) {
                // Only a hold that goes on during the fault can be a second one.
                child.order(&Order::HoldLong)?;
            }
            let is_without_replies =
                |fault: &Fault| fault.kind == Kind::RepliesCut && fault.process == process;
            if faults.iter().any(is_without_replies) {
                child.order(&Order::TakeOwn)?;
            }
        }
        Ok(())
    }
}

impl Topology for Quorum {
    fn play(&mut self, round: &Round<'_>) -> anyhow::Result<Findings> {
        let stop = round.soak.stop;
        let mut random = Random::new(round.soak.seed, &[round.number]);
        let faults = Fault::draw(&mut random, self.children.len());
        let has_fault = |node| {
            let mut faults = faults.iter();
            faults.any(|fault| fault.is_of_node() && fault.node == node)
        };
        let clocks = self.clocks.as_ref();
        let steps = clocks.map(|clocks| clocks.draw(&mut random, has_fault));
        self.prepare(&faults)?;
        let Self {
            children,
            servers,
            clocks,
            totals,
        } = self;
        servers.play(
            &faults,
            &steps.unwrap_or_default(),
            clocks,
            stop,
            |fault, servers| match fault.kind {
                Kind::RepliesCut => totals.reopen(&mut children[fault.process], servers),
                _ => Ok(()),
            },
        )?;
        // A key of a node whose clock was set back has more time left.
        let longest = match clocks {
            Some(_) => TTL + clocks::BEHIND,
            None => TTL,
        };
        totals.end_round(round.number, &faults, children, servers, longest, stop)?;
        (round.tick)(format!("{} grants", totals.grants));
        Ok(totals.violations.drain(..).collect())
    }

    /// Each round draws its own length.
    fn round_times(&self) -> (Duration, Duration) {
        (Duration::ZERO, Duration::MAX)
    }

    fn finish(&mut self) -> anyhow::Result<Findings> {
        for child in &mut self.children {
            child.order(&Order::Finish)?;
        }
        for child in &self.children {
            self.totals.finish(child)?;
        }
        let Totals {
            holds, accesses, ..
        } = &self.totals;
        let found = checks::history(holds, accesses);
        self.totals.violations.extend(found);
        self.children.clear();
        let mut left = Vec::new();
        let is_free = eventually(TTL + LATE, || {
            self.servers.keys().is_ok_and(|keys| {
                left = keys;
                left.is_empty()
            })
        });
        if !is_free {
            self.totals.violations.push(format!("keys stay: {left:?}"));
        }
        Ok(self.totals.violations.drain(..).collect())
    }

    fn text(&self) -> String {
        let steps = self.clocks.as_ref().map_or(0, |clocks| clocks.steps);
        self.totals.text(steps)
    }

    fn check_use(&self) -> anyhow::Result<()> {
        self.totals.check_use()
    }
}

/// The findings so far.
#[derive(Default)]
struct Totals {
    rounds: u64,
    grants: usize,
    lost: usize,
    calls: BTreeMap<Outcome, u64>,
    closed: u64,
    faults: BTreeMap<Kind, usize>,
    /// The rounds that went on for more grants after their faults.
    extended: u64,
    fewest: Option<usize>,
    /// The holds and the accesses that later ones are compared with.
    holds: Vec<Hold>,
    accesses: Vec<Access>,
    violations: Vec<String>,
}

impl Totals {
    /// Reads and checks the records of a round. The rest of a key's ttl must be at most `longest`.
    fn end_round(
        &mut self,
        number: u64,
        faults: &[Fault],
        children: &[Process<Message>],
        servers: &Servers,
        longest: Duration,
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
        for key in servers.keys()? {
            if key.left < 0 || key.left > longest.as_millis() as i64 {
                self.violations.push(format!("a wrong ttl: {key:?}"));
            }
        }
        self.violations
            .extend(checks::history(&self.holds, &self.accesses));
        // Later reports need no comparison with holds and accesses that ended before this time.
        let since = now().saturating_sub(PROCESS.as_nanos() as u64 / 3);
        self.holds.retain(|hold| hold.to >= since);
        self.accesses.retain(|access| access.ended >= since);
        Ok(())
    }

    /// Makes a process shut its client down, and checks that the client has released its leases.
    fn reopen(&mut self, child: &mut Process<Message>, servers: &Servers) -> anyhow::Result<()> {
        child.order(&Order::Reopen)?;
        let holder = loop {
            match child.message(PROCESS)? {
                Message::Closed { holder } => break holder,
                other => self.note(other),
            }
        };
        self.closed += 1;
        let found = checks::unreleased(&servers.keys()?, &holder, MINORITY);
        self.violations.extend(found);
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
                self.holds.push(hold);
            }
            Message::Accessed(access) => {
                *self.calls.entry(access.outcome).or_default() += 1;
                self.accesses.push(access);
            }
            Message::Failed(error) => self.violations.push(error),
            Message::Ready | Message::Closed { .. } | Message::Finished => {}
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

    /// How many reads and writes of values had this outcome.
    fn calls(&self, outcome: Outcome) -> u64 {
        self.calls.get(&outcome).copied().unwrap_or(0)
    }

    fn text(&self, steps: u64) -> String {
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
            ("reads of values", self.calls(Outcome::Read)),
            ("writes of values", self.calls(Outcome::Written)),
            ("refused writes", self.calls(Outcome::Refused)),
            (
                "reads and writes without a reply",
                self.calls(Outcome::Failed),
            ),
            ("clients shut down", self.closed),
            ("steps of clocks", steps),
        ];
        let rows = rows.map(|(name, count)| (name.to_owned(), count));
        for (name, count) in rows.into_iter().chain(faults) {
            table.add_row([name, count.to_string()]);
        }
        format!("{}\n", plain(table, 1))
    }

    /// Fails if a soak without violations shows nothing, since its locks or its values were not used.
    fn check_use(&self) -> anyhow::Result<()> {
        ensure!(self.grants > 0, "no lock was granted");
        ensure!(self.calls(Outcome::Written) > 0, "no value was written");
        ensure!(self.calls(Outcome::Read) > 0, "no value was read");
        Ok(())
    }
}

/// A process of the soak.
pub fn process() -> ExitCode {
    child::run(work)
}

fn work(assignment: Assignment, orders: Receiver<Order>) -> anyhow::Result<()> {
    let (orders, cancelled) = pass_on(orders);
    let mut random = Random::new(assignment.seed, &[1 << 32, assignment.process]);
    let mut worker = Worker::open(&assignment, &cancelled)?;
    say(&Message::Ready)?;
    loop {
        // Some holds need renewals, and last until a fault ends them.
        let time = match orders.try_recv() {
            Ok(Order::HoldLong) => random.millis(800, 1500),
            Ok(Order::TakeOwn) => {
                worker.take_own(&orders)?;
                continue;
            }
            Ok(Order::Reopen) => {
                let holder = worker.client.holder_id().to_string();
                worker.shut_down()?;
                say(&Message::Closed { holder })?;
                worker = Worker::open(&assignment, &cancelled)?;
                continue;
            }
            Err(TryRecvError::Empty) if random.one_in(100) => random.millis(200, 1500),
            Err(TryRecvError::Empty) => random.millis(0, 10),
            Ok(Order::Finish) | Err(TryRecvError::Disconnected) => break,
        };
        if random.one_in(4) {
            worker.read(random.below(KEYS))?;
        }
        let key = random.below(KEYS);
        match random.one_in(4) {
            true => worker.hold_set(
                [key, (key + 1 + random.below(KEYS - 1)) % KEYS],
                time,
                &orders,
            )?,
            false => worker.hold_one(key, time, &orders)?,
        }
        thread::sleep(random.millis(0, 5));
    }
    for key in 0..KEYS {
        worker.hold_one(key, Duration::ZERO, &orders)?;
    }
    worker.hold_set([0, KEYS - 1], Duration::ZERO, &orders)?;
    worker.shut_down()?;
    say(&Message::Finished)?;
    // Wait until the parent ends this process.
    while orders.recv().is_ok() {}
    Ok(())
}

/// Passes orders on. `TakeOwn` and `Reopen` must not wait for another process's hold, so they also send a message to
/// the second channel, which cancels the wait for a lock.
fn pass_on(orders: Receiver<Order>) -> (Receiver<Order>, Receiver<()>) {
    let (sender, passed) = unbounded();
    let (cancel, cancelled): (Sender<()>, _) = bounded(1);
    thread::spawn(move || {
        for order in orders {
            let is_urgent = matches!(order, Order::TakeOwn | Order::Reopen);
            if sender.send(order).is_err() {
                break;
            }
            if is_urgent {
                // If there is a message already, it does the same.
                let _ = cancel.try_send(());
            }
        }
    });
    (passed, cancelled)
}

fn client(nodes: Vec<String>) -> Result<Client, Error> {
    Client::quorum_builder(nodes)
        .ttl(TTL)
        .max_ttl(TTL)
        .command_timeout(COMMAND_TIMEOUT)
        .connect_timeout(COMMAND_TIMEOUT)
        .outage_timeout(OUTAGE)
        .build_lazy()
}

/// A client of a process, with its locks, and the values that they protect.
struct Worker {
    process: u64,
    client: Client,
    mutexes: Vec<Mutex>,
    /// A lock that no other process uses.
    own: Mutex,
    values: Vec<FencedValue>,
    cancelled: Receiver<()>,
}

/// A held lock, or a set of held locks.
enum Guard {
    One(MutexGuard),
    Set(MutexesGuard),
}

impl Guard {
    fn token(&self, key: usize) -> u64 {
        match self {
            Self::One(guard) => guard.fencing_token(),
            Self::Set(set) => set.token(&name(key)).expect("the set has this key"),
        }
    }

    fn is_valid(&self) -> bool {
        match self {
            Self::One(guard) => !guard.is_lost() && guard.remaining() > Duration::ZERO,
            Self::Set(set) => !set.is_lost() && set.remaining() > Duration::ZERO,
        }
    }

    fn unlock(self) -> Result<Released, Error> {
        match self {
            Self::One(guard) => guard.unlock(),
            Self::Set(set) => set.unlock(),
        }
    }
}

/// The name of a lock.
fn name(key: usize) -> String {
    format!("k{key}")
}

impl Worker {
    fn open(assignment: &Assignment, cancelled: &Receiver<()>) -> Result<Self, Error> {
        let client = client(assignment.nodes.clone())?;
        let of_values = Client::builder(&*assignment.values).build_lazy()?;
        let value = |key| of_values.fenced_value(format!("v{key}"));
        let mutex = |key| {
            let mutex = client.mutex(name(key));
            mutex.cancelled_by(cancelled.clone())
        };
        Ok(Self {
            process: assignment.process,
            mutexes: (0..KEYS).map(mutex).collect(),
            own: mutex(KEYS + assignment.process as usize),
            values: (0..KEYS).map(value).collect(),
            cancelled: cancelled.clone(),
            client,
        })
    }

    fn shut_down(&self) -> anyhow::Result<()> {
        let ended = self.client.shutdown(PROCESS);
        ended.context("the client does not end")
    }

    fn failed(&self, error: &dyn Display) -> anyhow::Result<()> {
        say(&Message::Failed(format!(
            "process {}: {error}",
            self.process
        )))
    }

    fn read(&self, key: usize) -> anyhow::Result<()> {
        self.access(key, None)
    }

    /// Writes a version, or reads the value.
    fn access(&self, key: usize, version: Option<Version>) -> anyhow::Result<()> {
        match access(&self.values[key], self.process, key, version) {
            Ok(access) => say(&Message::Accessed(access)),
            Err(error) => self.failed(&error),
        }
    }

    /// Acquires and releases the process's own lock again and again, until an order comes.
    fn take_own(&self, orders: &Receiver<Order>) -> anyhow::Result<()> {
        while orders.is_empty() {
            match self.own.lock() {
                Ok(guard) => drop(guard),
                Err(error) if error.kind() == ErrorKind::Cancelled => {}
                Err(error) => return self.failed(&error),
            }
            thread::sleep(LOOK);
        }
        Ok(())
    }

    fn hold_one(&self, key: usize, time: Duration, orders: &Receiver<Order>) -> anyhow::Result<()> {
        self.hold(
            self.mutexes[key].lock().map(Guard::One),
            &[key],
            time,
            orders,
        )
    }

    fn hold_set(
        &self,
        keys: [usize; 2],
        time: Duration,
        orders: &Receiver<Order>,
    ) -> anyhow::Result<()> {
        let set = self.client.mutexes(keys.map(name));
        let set = set.cancelled_by(self.cancelled.clone());
        self.hold(set.lock().map(Guard::Set), &keys, time, orders)
    }

    /// Holds the locks of `keys` for `time`, unless a lease is lost before, or an order comes.
    fn hold(
        &self,
        locked: Result<Guard, Error>,
        keys: &[usize],
        time: Duration,
        orders: &Receiver<Order>,
    ) -> anyhow::Result<()> {
        let guard = match locked {
            Ok(guard) => guard,
            Err(error) if error.kind() == ErrorKind::Cancelled => return Ok(()),
            Err(error) => return self.failed(&error),
        };
        let tokens: Vec<u64> = keys.iter().map(|key| guard.token(*key)).collect();
        let write = |number| -> anyhow::Result<()> {
            let mut versions = keys.iter().zip(&tokens);
            versions.try_for_each(|(key, token)| {
                let version = Version {
                    token: *token,
                    number,
                };
                self.access(*key, Some(version))
            })
        };
        // The last time at which all leases were valid.
        let valid = || {
            let at = now();
            guard.is_valid().then_some(at)
        };
        let from = valid();
        let mut to = from;
        keys.iter().try_for_each(|key| self.read(*key))?;
        write(1)?;
        let until = Instant::now() + time;
        let is_lost = loop {
            match valid() {
                Some(at) => to = Some(at),
                None => break true,
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() || !orders.is_empty() {
                break false;
            }
            thread::sleep(left.min(LOOK));
        };
        write(2)?;
        to = valid().or(to);
        match guard.unlock() {
            Err(error) if !error.is_lease_lost() && !error.is_unavailable() => {
                self.failed(&error)?
            }
            _ => {}
        }
        if is_lost {
            // A late write, as after a long pause.
            thread::sleep(5 * LOOK);
            write(3)?;
        }
        let Some((from, to)) = from.zip(to) else {
            // The leases were not seen to be valid.
            return Ok(());
        };
        let mut holds = keys.iter().zip(tokens);
        holds.try_for_each(|(key, token)| {
            say(&Message::Held(Hold {
                process: self.process,
                key: *key,
                token,
                from,
                to,
                is_lost,
            }))
        })
    }
}

/// Writes a version of the value, or reads the value. Fails with errors that no fault explains.
fn access(
    value: &FencedValue,
    process: u64,
    key: usize,
    version: Option<Version>,
) -> anyhow::Result<Access> {
    let begun = now();
    let done = match version {
        Some(version) => value
            .write(version.token, version.to_string())
            .map(|()| None),
        None => value.read(),
    };
    let ended = now();
    let outcome = match &done {
        Ok(_) if version.is_some() => Outcome::Written,
        Ok(_) => Outcome::Read,
        Err(error) if error.kind() == ErrorKind::StaleToken => Outcome::Refused,
        Err(error) if error.is_unavailable() => Outcome::Failed,
        Err(error) => bail!("{error}"),
    };
    let read = match done {
        Ok(Some(text)) => Version::parse(&text).context("nobody has written this value")?,
        _ => Version::default(),
    };
    Ok(Access {
        process,
        key,
        begun,
        ended,
        outcome,
        version: version.unwrap_or(read),
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn a_soak_that_used_no_locks_or_values_fails() {
        let mut soak = Totals::default();
        let failure = |soak: &Totals| soak.check_use().unwrap_err().to_string();
        assert_eq!(failure(&soak), "no lock was granted");
        soak.grants = 1;
        assert_eq!(failure(&soak), "no value was written");
        soak.calls.insert(Outcome::Written, 1);
        assert_eq!(failure(&soak), "no value was read");
        soak.calls.insert(Outcome::Read, 1);
        soak.check_use().unwrap();
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

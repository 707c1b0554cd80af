//! The faults of the server, the connections and the processes during the work, drawn from the seed. Each
//! fault is recorded with its time and what it excuses; judges nothing.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use clap::ValueEnum;
use leasehold_testbed::{Proxy, Reply, Server};
use leasehold_tools::stop::Stop;
use rustix::process::Signal;

use crate::checks::Violation;
use crate::inject::Defect;
use crate::messages::{KEYS, hot_keys, key_name};
use crate::process::Process;
use crate::race;
use crate::random::Random;
use crate::records::now;
use crate::servers::Servers;
use crate::value::GrantId;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
pub enum Kind {
    ServerStopped,
    ServerKilled,
    ServerPaused,
    ConnectionsKilled,
    ScriptsFlushed,
    AllFlushed,
    KeyDeleted,
    ProcessStopped,
    ProcessKilled,
    ProxyCut,
    ProxyDelays,
    ProxyHolds,
    ProxyRefuses,
    /// Primary and replica change places, and connections stay open.
    SwitchedOver,
    /// The master of a Cluster's slots is killed; its replica takes over.
    MasterKilled,
    /// The master of a Cluster's slots is stopped; its replica takes over.
    MasterStopped,
    /// A replica of a Cluster takes over as planned.
    FailedOver,
    /// A Cluster's slot with a lock moves to another master.
    SlotMoved,
    /// Many guards of one client are dropped while the server is stopped.
    DroppedInOutage,
    /// Hundreds of clients want one key.
    Contention,
    /// New clients want one key, with a long ttl, while single connections are killed.
    Raced,
    /// A single connection for requests is killed. Only in a race.
    #[value(skip)]
    PipelineKilled,
    /// A single notification connection is killed. Only in a race.
    #[value(skip)]
    NotificationsKilled,
}

/// Guards that are dropped in one outage.
const MASS: usize = 20_000;
/// Clients of all processes that want one key.
const CONTENDERS: usize = 200;
/// For how long they compete.
const CONTENTION_TIME: Duration = Duration::from_secs(3);

/// The weight of each kind when a fault is drawn.
const KINDS: [(usize, Kind); 17] = [
    (4, Kind::ServerStopped),
    (3, Kind::ServerKilled),
    (2, Kind::ServerPaused),
    (8, Kind::ConnectionsKilled),
    (3, Kind::ScriptsFlushed),
    (1, Kind::AllFlushed),
    (8, Kind::KeyDeleted),
    (8, Kind::ProcessStopped),
    (4, Kind::ProcessKilled),
    (5, Kind::ProxyCut),
    (3, Kind::ProxyDelays),
    (4, Kind::ProxyHolds),
    (2, Kind::ProxyRefuses),
    (6, Kind::SwitchedOver),
    (2, Kind::DroppedInOutage),
    (3, Kind::Contention),
    (4, Kind::Raced),
];

/// The kinds that are drawn.
pub fn kinds() -> Vec<Kind> {
    KINDS.iter().map(|(_, kind)| *kind).collect()
}

/// The effect of a fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// This fault excuses no violation.
    None,
    /// A process was stopped.
    Stops { process: usize },
    /// A process was killed, so its calls have no end.
    Kills { process: usize, life: usize },
    /// Redis may have lost grants of these keys, and writes of their values.
    MayLose { keys: Vec<usize> },
    /// Redis lost all grants, or one grant, if it is known.
    Loses {
        key: Option<usize>,
        grant: Option<GrantId>,
    },
}

/// A fault with its time: from a moment before its beginning to a moment after its end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    pub kind: Kind,
    pub from: u64,
    pub to: u64,
    pub effect: Effect,
}

impl Fault {
    /// Whether a request may have been carried out long after it was sent, because of this fault.
    pub fn delays_requests(&self) -> bool {
        matches!(
            self.kind,
            Kind::ServerStopped
                | Kind::ServerPaused
                | Kind::MasterStopped
                | Kind::ProxyDelays
                | Kind::ProxyHolds
                | Kind::ProcessStopped
        )
    }
}

/// Everything that faults are applied to.
pub struct Subjects {
    pub servers: Servers,
    /// Whether the server keeps its data over a restart.
    pub remembers: bool,
    pub processes: Vec<Process>,
    /// Each of the first processes reaches the server through one of these proxies, which never fail.
    pub addresses: Vec<Proxy>,
    /// The other processes reach the server through these proxies, which fail.
    pub proxies: Vec<Proxy>,
}

/// The target of a fault. Each target has one fault at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Subject {
    Server,
    Process(usize),
    Proxy(usize),
    Contend,
}

/// A fault that lasts.
struct Ongoing {
    subject: Subject,
    kind: Kind,
    from: u64,
    until: Instant,
}

/// The action at the end of a fault.
#[derive(PartialEq, Eq)]
enum Then {
    GoOn,
    End,
}

pub struct Faults {
    random: Random,
    ongoing: Vec<Ongoing>,
    /// The next fault, if it must wait until all other faults have ended.
    wants_quiet: Option<Kind>,
    kinds: Vec<(usize, Kind)>,
    inject: Option<Defect>,
    pub done: Vec<Fault>,
    /// Violations that faults found themselves.
    pub found: Vec<Violation>,
}

impl Faults {
    /// Draws from all kinds, unless `only` names some.
    pub fn new(random: Random, only: &[Kind], inject: Option<Defect>) -> Self {
        let kinds = KINDS.into_iter();
        let kinds = kinds.filter(|(_, kind)| only.is_empty() || only.contains(kind));
        Self {
            random,
            ongoing: Vec::new(),
            wants_quiet: None,
            kinds: kinds.collect(),
            inject,
            done: Vec::new(),
            found: Vec::new(),
        }
    }

    /// Applies one fault after another until `end`, or until a fault finds a client that hangs; calls `tick`
    /// in between. At least one fault is drawn, and one that waits for the end of the others still happens after `end`:
    /// on a busy machine, a short round would have no fault.
    pub fn run(
        &mut self,
        subjects: &mut Subjects,
        end: Instant,
        stop: &Stop,
        mut tick: impl FnMut(usize),
    ) -> anyhow::Result<()> {
        let mut next = Instant::now() + self.random.millis(200, 1000);
        let mut is_drawn = false;
        while Instant::now() < end || !is_drawn || self.wants_quiet.is_some() {
            let soon = Instant::now() + Duration::from_millis(200);
            let due = self.ongoing.iter().map(|ongoing| ongoing.until).min();
            let wake = soon.min(next).min(due.unwrap_or(soon));
            stop.pause(wake.saturating_duration_since(Instant::now()))?;
            for process in &subjects.processes {
                process.check()?;
            }
            self.end_those_due(subjects, Instant::now())?;
            if Instant::now() >= next {
                is_drawn = true;
                if self.begin_one(subjects, stop)? == Then::End {
                    return Ok(());
                }
                next = Instant::now() + self.random.millis(50, 900);
            }
            tick(self.done.len() + self.ongoing.len());
        }
        Ok(())
    }

    pub fn end_all(&mut self, subjects: &mut Subjects) -> anyhow::Result<()> {
        while let Some(last) = self.ongoing.pop() {
            self.end(subjects, last)?;
        }
        Ok(())
    }

    fn end_those_due(&mut self, subjects: &mut Subjects, at: Instant) -> anyhow::Result<()> {
        let is_due = |ongoing: &Ongoing| ongoing.until <= at;
        while let Some(index) = self.ongoing.iter().position(is_due) {
            let ongoing = self.ongoing.swap_remove(index);
            self.end(subjects, ongoing)?;
        }
        Ok(())
    }

    fn begin_one(&mut self, subjects: &mut Subjects, stop: &Stop) -> anyhow::Result<Then> {
        if let Some(kind) = self.wants_quiet {
            if !self.ongoing.is_empty() {
                return Ok(Then::GoOn);
            }
            self.wants_quiet = None;
            // A proxy may still have to cut a connection after some more bytes.
            subjects.proxies.iter().for_each(mend);
            return match kind {
                Kind::Raced => self.race(subjects, stop),
                _ => self.drop_many(subjects),
            };
        }
        let kind = self.random.weighted(&self.kinds);
        if matches!(kind, Kind::DroppedInOutage | Kind::Raced) {
            self.wants_quiet = Some(kind);
            return Ok(Then::GoOn);
        }
        if kind == Kind::AllFlushed && subjects.remembers {
            return Ok(Then::GoOn);
        }
        let subject = self.subject_of(kind, subjects);
        if self
            .ongoing
            .iter()
            .any(|ongoing| ongoing.subject == subject)
        {
            return Ok(Then::GoOn);
        }
        let from = now();
        let lasts = match subject {
            Subject::Server => self.begin_on_server(kind, subjects)?,
            Subject::Process(process) => self.begin_on_process(kind, process, subjects)?,
            Subject::Proxy(proxy) => {
                begin_on_proxy(kind, &subjects.proxies[proxy], &mut self.random)
            }
            Subject::Contend => begin_contention(subjects)?,
        };
        match lasts {
            Lasts::For(time) => self.ongoing.push(Ongoing {
                subject,
                kind,
                from,
                until: Instant::now() + time,
            }),
            Lasts::NoTime(effect) => self.note(kind, from, effect),
        }
        Ok(Then::GoOn)
    }

    fn race(&mut self, subjects: &mut Subjects, stop: &Stop) -> anyhow::Result<Then> {
        let from = now();
        let outcome = race::run(subjects, &mut self.random, self.inject, stop)?;
        self.done.extend(outcome.faults);
        self.found.extend(race::violations(outcome.found, from));
        Ok(match outcome.is_hung {
            true => Then::End,
            false => Then::GoOn,
        })
    }

    /// Drops many guards while the server is stopped. No other fault happens meanwhile, so only the end of the ttl
    /// explains the loss of a lock.
    fn drop_many(&mut self, subjects: &mut Subjects) -> anyhow::Result<Then> {
        let process = self.random.below(subjects.processes.len());
        let process = &mut subjects.processes[process];
        process.hold(MASS)?;
        let from = now();
        subjects.servers.primary.stop();
        // This resumes the server after `time`, even if the drop fails.
        let time = time(&mut self.random);
        self.ongoing.push(Ongoing {
            subject: Subject::Server,
            kind: Kind::DroppedInOutage,
            from,
            until: Instant::now() + time,
        });
        process.drop_held()?;
        Ok(Then::GoOn)
    }

    fn subject_of(&mut self, kind: Kind, subjects: &Subjects) -> Subject {
        match kind {
            Kind::ProcessStopped | Kind::ProcessKilled => {
                Subject::Process(self.random.below(subjects.processes.len()))
            }
            Kind::ProxyCut | Kind::ProxyDelays | Kind::ProxyHolds | Kind::ProxyRefuses => {
                Subject::Proxy(self.random.below(subjects.proxies.len()))
            }
            Kind::Contention => Subject::Contend,
            _ => Subject::Server,
        }
    }

    fn note(&mut self, kind: Kind, from: u64, effect: Effect) {
        let to = now();
        self.done.push(Fault {
            kind,
            from,
            to,
            effect,
        });
    }

    fn begin_on_server(&mut self, kind: Kind, subjects: &mut Subjects) -> anyhow::Result<Lasts> {
        let server = &mut subjects.servers.primary;
        let effect = match kind {
            Kind::ServerStopped => {
                server.stop();
                return Ok(Lasts::For(time(&mut self.random)));
            }
            Kind::ServerKilled => {
                server.kill();
                return Ok(Lasts::For(time(&mut self.random)));
            }
            Kind::ServerPaused => {
                let time = time(&mut self.random);
                let mode = self.random.weighted(&[(1, "ALL"), (1, "WRITE")]);
                let millis = time.as_millis().to_string();
                server.command(&["CLIENT", "PAUSE", &millis, mode])?;
                return Ok(Lasts::For(time));
            }
            Kind::ConnectionsKilled => {
                kill_connections(server, &mut self.random)?;
                Effect::None
            }
            Kind::SwitchedOver => {
                let Subjects {
                    servers,
                    addresses,
                    proxies,
                    ..
                } = subjects;
                servers.switch_over(addresses.iter().chain(proxies.iter()))?;
                Effect::None
            }
            Kind::ScriptsFlushed => {
                server.command(&["SCRIPT", "FLUSH"])?;
                Effect::None
            }
            Kind::AllFlushed => {
                server.command(&["FLUSHALL"])?;
                Effect::Loses {
                    key: None,
                    grant: None,
                }
            }
            _ => self.delete_some_key(server)?,
        };
        Ok(Lasts::NoTime(effect))
    }

    /// Deletes a key, mostly a hot one, since hot keys are locked most of the time. GETDEL also returns whose lock it
    /// was.
    fn delete_some_key(&mut self, server: &Server) -> anyhow::Result<Effect> {
        let key = if self.random.one_in(4) {
            self.random.below(KEYS)
        } else {
            self.random.below(hot_keys())
        };
        let in_redis = format!("leasehold:{}", key_name(key));
        let found = server.command(&["GETDEL", &in_redis])?;
        let Reply::Text(value) = found else {
            return Ok(Effect::None);
        };
        let grant = GrantId::parse(&value);
        let grant = Some(grant.with_context(|| format!("{value:?} is not the value of a lock"))?);
        let key = Some(key);
        Ok(Effect::Loses { key, grant })
    }

    fn begin_on_process(
        &mut self,
        kind: Kind,
        process: usize,
        subjects: &mut Subjects,
    ) -> anyhow::Result<Lasts> {
        let victim = &mut subjects.processes[process];
        if kind == Kind::ProcessStopped {
            victim.signal(Signal::STOP)?;
            return Ok(Lasts::For(time(&mut self.random)));
        }
        let life = victim.life();
        victim.kill_and_start_anew()?;
        Ok(Lasts::NoTime(Effect::Kills { process, life }))
    }

    fn end(&mut self, subjects: &mut Subjects, ended: Ongoing) -> anyhow::Result<()> {
        let mut effect = Effect::None;
        match ended.subject {
            Subject::Process(process) => {
                subjects.processes[process].signal(Signal::CONT)?;
                effect = Effect::Stops { process };
            }
            Subject::Proxy(proxy) => mend(&subjects.proxies[proxy]),
            // This fault ends by itself.
            Subject::Contend => {}
            Subject::Server => match ended.kind {
                Kind::ServerStopped | Kind::DroppedInOutage => subjects.servers.primary.resume(),
                Kind::ServerKilled => {
                    subjects.servers.primary.restart()?;
                    if !subjects.remembers {
                        effect = Effect::Loses {
                            key: None,
                            grant: None,
                        };
                    }
                }
                // CLIENT PAUSE ends by itself. UNPAUSE ends it earlier if the soak is stopped.
                _ => drop(subjects.servers.primary.command(&["CLIENT", "UNPAUSE"])?),
            },
        }
        self.note(ended.kind, ended.from, effect);
        Ok(())
    }
}

fn begin_contention(subjects: &mut Subjects) -> anyhow::Result<Lasts> {
    let each = CONTENDERS.div_ceil(subjects.processes.len());
    for process in &mut subjects.processes {
        process.contend(each, CONTENTION_TIME)?;
    }
    Ok(Lasts::For(CONTENTION_TIME))
}

pub enum Lasts {
    For(Duration),
    NoTime(Effect),
}

/// A random duration of a fault, shorter or longer than most ttls.
pub fn time(random: &mut Random) -> Duration {
    if random.one_in(3) {
        random.millis(1000, 3000)
    } else {
        random.millis(10, 500)
    }
}

/// Kills the connections of callers, those of notifications, or any one.
pub fn kill_connections(server: &Server, random: &mut Random) -> anyhow::Result<()> {
    match random.below(4) {
        0 => server.command(&["CLIENT", "KILL", "TYPE", "normal"])?,
        1 => server.command(&["CLIENT", "KILL", "TYPE", "pubsub"])?,
        _ => {
            let list = server.command(&["CLIENT", "LIST"])?;
            let list = list.as_text().unwrap_or_default();
            let id = |line: &str| Some(line.strip_prefix("id=")?.split(' ').next()?.to_owned());
            let ids: Vec<String> = list.lines().filter_map(id).collect();
            // The last connection may be that of this request.
            let some = ids.get(random.below(ids.len().max(1)));
            let some = some.context("CLIENT LIST names at least the connection of the request")?;
            server.command(&["CLIENT", "KILL", "ID", some])?
        }
    };
    Ok(())
}

pub fn begin_on_proxy(kind: Kind, proxy: &Proxy, random: &mut Random) -> Lasts {
    let time = time(random);
    match kind {
        Kind::ProxyDelays => proxy.delay(random.millis(1, 250)),
        Kind::ProxyHolds => match random.below(3) {
            0 => proxy.black_hole(true),
            1 => proxy.hold_requests(true),
            _ => proxy.hold_replies(true),
        },
        Kind::ProxyRefuses => {
            proxy.refuse(true);
            proxy.cut_all();
        }
        _ => {
            match random.one_in(2) {
                true => proxy.cut_all(),
                false => proxy.cut_after(Some(random.below(600))),
            }
            return Lasts::NoTime(Effect::None);
        }
    }
    Lasts::For(time)
}

/// Ends all faults of the proxy.
pub fn mend(proxy: &Proxy) {
    proxy.cut_after(None);
    proxy.refuse(false);
    proxy.hold_requests(false);
    proxy.hold_replies(false);
    proxy.black_hole(false);
    proxy.delay(Duration::ZERO);
}

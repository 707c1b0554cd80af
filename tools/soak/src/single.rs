//! A primary and its replica at a fixed address: several faults at a time, of the server, the connections and the
//! processes, drawn from the seed. In every other round, a killed server loses its data.

pub mod race;
mod servers;

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context as _;
use leasehold_testbed::{Proxy, Reply, Server};
use leasehold_tools::stop::Stop;
use rustix::process::Signal;

use crate::checks::Violation;
use crate::driver::{Round, Soak};
use crate::faults::{
    Effect, Fault, Kind, Lasts, begin_on_proxy, drawn, kill_connections, mend, refuse_others, time,
};
use crate::inject::Defect;
use crate::leaks::{self, Remaining};
use crate::messages::{
    KEYS, SHORT_OUTAGE, busy_key, is_shared, key_in_redis, present_run, runs_key,
};
use crate::process::Process;
use crate::random::Random;
use crate::recorded::{Events, LONGEST_ROUND, Recorded, SHORTEST_ROUND, save, unless_stopped};
use crate::records::now;
use crate::value::GrantId;
use servers::Servers;

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

pub fn topology(soak: &Soak<'_>) -> anyhow::Result<Recorded> {
    refuse_others(soak.only, &KINDS, "single")?;
    Ok(Recorded::new((SHORTEST_ROUND, LONGEST_ROUND), work))
}

fn work(round: &Round<'_>, folder: &Path) -> anyhow::Result<Events> {
    let mut faults = Faults::new(round.random(), round.soak);
    let mut subjects = Subjects::start(round, folder)?;
    let end = Instant::now() + round.time;
    let stop = round.soak.stop;
    let ended = faults.run(&mut subjects, end, stop, |faults| {
        (round.tick)(format!("{faults} faults"));
    });
    if let Err(error) = unless_stopped(ended) {
        save(&faults.done, folder)?;
        return Err(error);
    }
    (round.tick)("finishing".to_owned());
    faults.end_all(&mut subjects)?;
    subjects.proxies.iter().for_each(mend);
    let Servers { primary, replica } = &subjects.servers;
    let remaining = Remaining {
        servers: vec![primary, replica],
        masters: vec![primary],
        url: primary.url(),
    };
    let left = leaks::finish(&mut subjects.processes, &remaining, folder)?;
    Ok(Events {
        faults: faults.done,
        found: faults.found,
        left,
        ..Events::default()
    })
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

impl Subjects {
    fn start(round: &Round<'_>, folder: &Path) -> anyhow::Result<Self> {
        let remembers = !round.number.is_multiple_of(2);
        let servers = Servers::start(remembers)?;
        let address = |_| Proxy::start(servers.primary.port());
        let (direct, all) = (round.soak.processes / 2, round.soak.processes);
        let addresses: Vec<Proxy> = (0..direct).map(address).collect::<Result<_, _>>()?;
        let proxies: Vec<Proxy> = (direct..all).map(address).collect::<Result<_, _>>()?;
        let urls = addresses.iter().chain(&proxies).map(Proxy::url);
        let processes = round.start_processes(urls, SHORT_OUTAGE, folder)?;
        Ok(Self {
            servers,
            remembers,
            processes,
            addresses,
            proxies,
        })
    }
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

/// The faults of a round.
struct Faults {
    random: Random,
    ongoing: Vec<Ongoing>,
    /// The next fault, if it must wait until all other faults have ended.
    wants_quiet: Option<Kind>,
    kinds: Vec<(usize, Kind)>,
    inject: Option<Defect>,
    done: Vec<Fault>,
    /// Violations that faults found themselves.
    found: Vec<Violation>,
}

impl Faults {
    fn new(random: Random, soak: &Soak<'_>) -> Self {
        Self {
            random,
            ongoing: Vec::new(),
            wants_quiet: None,
            kinds: drawn(&KINDS, soak.only),
            inject: soak.inject,
            done: Vec::new(),
            found: Vec::new(),
        }
    }

    /// Applies one fault after another until `end`, or until a fault finds a client that hangs; calls `tick` in
    /// between. At least one fault is drawn, and a fault that waits for the end of the others still happens after
    /// `end`. Otherwise, a short round on a busy machine would have no fault.
    fn run(
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

    fn end_all(&mut self, subjects: &mut Subjects) -> anyhow::Result<()> {
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

    /// Drops many guards while the server is stopped. Other faults do not happen during this time, so only the end of
    /// the ttl explains the loss of a lock.
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

    /// Deletes a key, mostly a busy one, which is locked most of the time. GETDEL also returns the value, which names
    /// the lost grant.
    fn delete_some_key(&mut self, server: &Server) -> anyhow::Result<Effect> {
        let key = if self.random.one_in(4) {
            self.random.below(KEYS)
        } else {
            busy_key(&mut self.random)
        };
        // For the runs, the key of the run that may be running now.
        let key = match key == runs_key() {
            true => present_run(),
            false => key,
        };
        if is_shared(key) {
            // All shares of the key are lost.
            server.command(&["DEL", &key_in_redis(key)])?;
            let (key, grant) = (Some(key), None);
            return Ok(Effect::Loses { key, grant });
        }
        let found = server.command(&["GETDEL", &key_in_redis(key)])?;
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

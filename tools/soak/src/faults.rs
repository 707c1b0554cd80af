//! The kinds of faults, and the faults that more than one topology has. Each fault is recorded with its time and its
//! effect, which excuses some violations. Judges nothing.

use std::time::Duration;

use anyhow::{Context as _, ensure};
use clap::ValueEnum;
use leasehold_testbed::{Proxy, Server};

use crate::random::Random;
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

/// Fails if `only` names a fault that is not one of `kinds`, the faults of `topology`.
pub fn refuse_others(only: &[Kind], kinds: &[(usize, Kind)], topology: &str) -> anyhow::Result<()> {
    for wanted in only {
        ensure!(
            kinds.iter().any(|(_, kind)| kind == wanted),
            "--topology {topology} has no fault {wanted:?}"
        );
    }
    Ok(())
}

/// The kinds that `only` names, or all of them, each with its weight.
pub fn drawn(kinds: &[(usize, Kind)], only: &[Kind]) -> Vec<(usize, Kind)> {
    let kinds = kinds.iter().copied();
    kinds
        .filter(|(_, kind)| only.is_empty() || only.contains(kind))
        .collect()
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

/// Kills all connections of callers, all notification connections, or one random connection.
pub fn kill_connections(server: &Server, random: &mut Random) -> anyhow::Result<()> {
    match random.below(4) {
        0 => server.command(&["CLIENT", "KILL", "TYPE", "normal"])?,
        1 => server.command(&["CLIENT", "KILL", "TYPE", "pubsub"])?,
        _ => {
            let list = server.command(&["CLIENT", "LIST"])?;
            let list = list.as_text().unwrap_or_default();
            let id = |line: &str| Some(line.strip_prefix("id=")?.split(' ').next()?.to_owned());
            let ids: Vec<String> = list.lines().filter_map(id).collect();
            // One of these connections may be that of this request.
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

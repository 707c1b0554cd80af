//! The checks at the end of a round, when all faults have ended: every client ends, every lock can be acquired, and
//! nothing is left.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, bail};
use leasehold::Client;
use leasehold_testbed::terms::Share;
use leasehold_testbed::{Reply, Server, eventually};
use rustix::process::Signal;

use crate::checks::Violation;
use crate::messages::{BALANCES, KEPT_CONNECTIONS, KEYS, LONGEST_TTL, UNCONFIRMED, key_name};
use crate::operations::elections::lead_once;
use crate::operations::runs::ask_again;
use crate::operations::sets::{accounts, move_between_accounts};
use crate::process::Process;
use crate::records::{Doing, Grant, Outcome, What, Who, Writer, now, read};
use crate::worker::END;

/// The limit for all waiters to be granted the lock, and for all clients to end.
const DRAIN: Duration = Duration::from_secs(90);
/// The limit for what should take no time.
const SOON: Duration = Duration::from_secs(20);
const FENCE: &str = "leasehold:~fence";
const QUEUES: &str = "leasehold:~queue";
const VALUES: &str = "leasehold:~value";
/// How long a queue outlives its lock at most: `lua/join.lua`.
const QUEUE_OUTLIVES: Duration = Duration::from_secs(20);

/// The servers of a round when all faults have ended.
pub struct Remaining<'a> {
    /// All servers: a client may have connections to each.
    pub servers: Vec<&'a Server>,
    /// The servers that have the keys.
    pub masters: Vec<&'a Server>,
    /// The URL for another client.
    pub url: String,
}

/// Ends the processes' work, and reports what did not end.
pub fn finish(
    processes: &mut [Process],
    remaining: &Remaining<'_>,
    folder: &Path,
) -> anyhow::Result<Vec<Violation>> {
    let mut found = Vec::new();
    let mut add = |text: String| {
        let at = now();
        found.push(Violation {
            text,
            key: None,
            from: at,
            to: at,
        });
    };
    for process in &mut *processes {
        process.finish()?;
    }
    let mut kept = 0;
    for process in &*processes {
        match process.remaining(DRAIN)? {
            Some((threads, is_kept)) => {
                kept += usize::from(is_kept) * KEPT_CONNECTIONS * remaining.masters.len();
                if !threads.is_empty() {
                    add(format!("{} has threads left: {threads:?}", process.name()));
                }
            }
            None => {
                add(format!(
                    "{} does not end its work: see the calls that never ended",
                    process.name()
                ));
                // A process that hangs is killed, so that the other checks can go on.
                process.signal(Signal::KILL)?;
            }
        }
    }
    // The connections to all servers count, since another server may have been the primary before.
    let all = || {
        let all = remaining.servers.iter().map(|server| connections(server));
        let all: Vec<Vec<String>> = all.collect::<anyhow::Result<_>>()?;
        anyhow::Ok(all.concat())
    };
    let ttls = || {
        let all = remaining.masters.iter().map(|server| ttls(server));
        let all: Vec<Vec<(String, i64)>> = all.collect::<anyhow::Result<_>>()?;
        anyhow::Ok(all.concat())
    };
    if !eventually(SOON, || all().is_ok_and(|left| left.len() <= kept)) {
        add(format!(
            "more than {kept} connections are left: {:#?}",
            all()?
        ));
    }
    for (key, ttl) in ttls()? {
        let is_queue = key.starts_with(QUEUES);
        let longest = LONGEST_TTL
            + if is_queue {
                QUEUE_OUTLIVES
            } else {
                UNCONFIRMED
            };
        if ttl < 0 || ttl > longest.as_millis() as i64 {
            add(format!("{key:?} stays for {ttl} ms"));
        }
    }
    if !eventually(LONGEST_TTL + QUEUE_OUTLIVES + SOON, || {
        ttls().is_ok_and(|left| left.is_empty())
    }) {
        add(format!("keys are left: {:?}", ttls()?));
    }
    for key in take_all(&remaining.url, folder, processes.len())? {
        add(format!("{} cannot be acquired", key_name(key)));
    }
    for key in ask_for_runs(&remaining.url, folder, processes.len() + 2)? {
        add(format!("{} has no end", key_name(key)));
    }
    let client = Client::builder(&remaining.url)
        .connect_timeout(SOON)
        .build()?;
    lead_once(&client, SOON)?.into_iter().for_each(&mut add);
    client.shutdown(END)?;
    if !check_accounts(&remaining.url, folder, processes.len() + 1)? {
        add("the accounts cannot be acquired together".to_owned());
    }
    if !eventually(SOON, || ttls().is_ok_and(|left| left.is_empty())) {
        add(format!("keys are left at the end: {:?}", ttls()?));
    }
    Ok(found)
}

/// The connections of clients: all except that of this request, and those of other servers and of sentinels.
fn connections(server: &Server) -> anyhow::Result<Vec<String>> {
    let list = server.command(&["CLIENT", "LIST"])?;
    let list = list.as_text().context("CLIENT LIST is text")?;
    let of_clients = list
        .lines()
        .filter(|line| !line.contains("cmd=client|list"))
        .filter(|line| !line.contains(" flags=S ") && !line.contains(" flags=M "))
        .filter(|line| !line.contains(" name=sentinel-"));
    Ok(of_clients.map(str::to_owned).collect())
}

/// All keys except fence counters, fenced values and balances, with their ttls.
fn ttls(server: &Server) -> anyhow::Result<Vec<(String, i64)>> {
    let reply = server.command(&["KEYS", "*"])?;
    let Reply::Array(keys) = reply else {
        bail!("KEYS replies {reply}");
    };
    let keys = keys.iter().filter_map(Reply::as_text);
    let keys = keys.filter(|key| {
        let kept = [FENCE, VALUES, BALANCES];
        !kept.iter().any(|kept| key.starts_with(kept))
    });
    let mut ttls = Vec::new();
    for key in keys {
        let reply = server.command(&["PTTL", key])?;
        let ttl = reply.as_int();
        let ttl = ttl.with_context(|| format!("PTTL {key:?} replies {reply}"))?;
        // The ttl is -2 if the key is gone.
        if ttl != -2 {
            ttls.push((key.to_owned(), ttl));
        }
    }
    Ok(ttls)
}

/// Acquires both accounts with a new client, and records their balances. Returns false if they cannot be acquired.
fn check_accounts(url: &str, folder: &Path, process: usize) -> anyhow::Result<bool> {
    let (life, thread) = (0, 0);
    let who = Who {
        process,
        life,
        thread,
    };
    let client = Client::builder(url).connect_timeout(SOON).build()?;
    let Some(guard) = accounts(&client).try_lock_for(SOON)? else {
        return Ok(false);
    };
    let since = now();
    let before = move_between_accounts(&guard, 1)?.value;
    Writer::create(folder, who)?.write(What::Transferred { before, since });
    drop(guard);
    client.shutdown(END)?;
    Ok(true)
}

/// Asks once more for all runs that began, with a new client, and records the outcomes. Returns those that failed.
fn ask_for_runs(url: &str, folder: &Path, process: usize) -> anyhow::Result<Vec<usize>> {
    let (life, thread) = (0, 0);
    let who = Who {
        process,
        life,
        thread,
    };
    let began = read(folder)?.into_iter().filter_map(|record| {
        let What::RunBegan { key, .. } = record.what else {
            return None;
        };
        Some(key)
    });
    let began: BTreeSet<usize> = began.collect();
    let client = Client::builder(url).connect_timeout(SOON).build()?;
    let (mut records, mut failed) = (Writer::create(folder, who)?, Vec::new());
    for key in began {
        match ask_again(&client, key) {
            Ok(found) => found.into_iter().for_each(|what| records.write(what)),
            Err(_) => failed.push(key),
        }
    }
    client.shutdown(END)?;
    Ok(failed)
}

/// Acquires each lock once, with a new client; returns the locks for which that failed.
fn take_all(url: &str, folder: &Path, process: usize) -> anyhow::Result<Vec<usize>> {
    let (life, thread) = (0, 0);
    let who = Who {
        process,
        life,
        thread,
    };
    let mut records = Writer::create(folder, who)?;
    let client = Client::builder(url).connect_timeout(SOON).build()?;
    let mut refused = Vec::new();
    for key in 0..KEYS {
        records.write(What::Called {
            doing: Doing::TryLockFor,
            key: Some(key),
            allowed: Some(SOON.as_millis() as u64),
        });
        let since = now();
        let Some(guard) = client.mutex(key_name(key)).try_lock_for(SOON)? else {
            refused.push(key);
            continue;
        };
        let outcome = Outcome::Done;
        records.write(What::Returned { since, outcome });
        records.write(What::Held(Grant {
            key,
            token: guard.fencing_token(),
            share: Share::Alone,
            ttl: 30_000,
            at_most: None,
        }));
        let at = now();
        let left = guard.remaining().as_nanos() as u64;
        records.write_at(at, What::Seen { left });
        records.write(What::Releasing);
        drop(guard);
    }
    client.shutdown(END)?;
    Ok(refused)
}

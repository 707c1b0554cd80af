//! `leasehold inspect`, `list` and `unlock`: show and free the locks in Redis.

use std::process::ExitCode;
use std::time::{Duration, SystemTime};

use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, Table};
use leasehold::{Client, HolderInfo, HolderKind, LockInfo};
use serde::Serialize;

use crate::args::{Connection, Inspect, List, Unlock};
use crate::connection::Settings;
use crate::exit::{CONFLICT, Failure};
use crate::output::{Output, json, line, message, millis, short, unix_millis};

/// A lock in JSON. docs/cli.md documents the fields.
#[derive(Serialize)]
pub struct Lock {
    key: String,
    kind: &'static str,
    clients_waiting: usize,
    holders: Vec<Holder>,
    /// The number of readers or of permits. May exceed what `holders` contains, which has at most 100 entries.
    taken: u32,
}

/// A holder in JSON.
#[derive(Serialize)]
struct Holder {
    holder: String,
    /// A string, since JSON parsers round numbers of this size. Missing if Redis does not store the token.
    #[serde(skip_serializing_if = "Option::is_none")]
    fencing_token: Option<String>,
    /// Ms since 1970. Missing if Redis does not store the time.
    #[serde(skip_serializing_if = "Option::is_none")]
    granted_at_ms: Option<u64>,
    /// Missing if the lock has no ttl.
    #[serde(skip_serializing_if = "Option::is_none")]
    expires_in_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    permits: Option<u32>,
    #[serde(skip)]
    age: Option<Duration>,
    /// The lease id. Empty for another library.
    #[serde(skip)]
    lease: String,
    /// How long this program has seen the grant.
    #[serde(skip)]
    seen_for: Duration,
}

/// The key and the lease of a grant. All grants of another library on one key have the same lease, which is empty.
pub type Grant = (String, String);

impl Lock {
    fn new(key: &str, info: &LockInfo) -> Self {
        let holders = info.holders();
        Self {
            key: key.to_owned(),
            kind: match holders[0].kind() {
                HolderKind::Exclusive => "exclusive",
                HolderKind::Reader => "readers",
                HolderKind::OtherLibrary { .. } => "other_library",
                _ => "permits",
            },
            clients_waiting: info.clients_waiting(),
            holders: holders.iter().map(Holder::new).collect(),
            taken: info.taken(),
        }
    }

    /// A lock with one holder.
    #[cfg(test)]
    pub fn example(key: &str, age: Option<Duration>, clients_waiting: usize) -> Self {
        Self {
            key: key.to_owned(),
            kind: "exclusive",
            clients_waiting,
            holders: vec![Holder {
                holder: "host/1/0".to_owned(),
                fencing_token: None,
                granted_at_ms: None,
                expires_in_ms: Some(30_000),
                permits: None,
                age,
                lease: key.to_owned(),
                seen_for: Duration::ZERO,
            }],
            taken: 1,
        }
    }

    /// The number of holders and their kind, as text.
    fn counted_kind(&self) -> String {
        format!("{} {}", self.taken, self.kind.replace('_', " "))
    }

    pub fn key(&self) -> &str {
        &self.key
    }

    pub fn clients_waiting(&self) -> usize {
        self.clients_waiting
    }

    /// The holder, if there is exactly one.
    pub fn only_holder(&self) -> Option<&str> {
        match &self.holders[..] {
            [one] => Some(&one.holder),
            _ => None,
        }
    }

    /// Whether both descriptions have the same holders.
    pub fn has_same_holders(&self, other: &Self) -> bool {
        let holders = |lock: &Self| -> Vec<(String, Option<String>)> {
            let parts = |holder: &Holder| (holder.holder.clone(), holder.fencing_token.clone());
            let mut holders: Vec<_> = lock.holders.iter().map(parts).collect();
            holders.sort_unstable();
            holders
        };
        self.kind == other.kind && self.taken == other.taken && holders(self) == holders(other)
    }

    fn age(&self) -> Option<Duration> {
        self.holders.iter().filter_map(|holder| holder.age).max()
    }

    /// The time for which Redis or this program knows that the lock has been held.
    pub fn least_age(&self) -> Duration {
        let seen = self.holders.iter().map(|holder| holder.seen_for).max();
        self.age().into_iter().chain(seen).max().unwrap_or_default()
    }

    /// Sets for how long this program has seen each grant.
    pub fn set_seen(&mut self, mut seen: impl FnMut(Grant) -> Duration) {
        for holder in &mut self.holders {
            holder.seen_for = seen((self.key.clone(), holder.lease.clone()));
        }
    }

    /// Whether the name of the lock or of a holder contains the text.
    pub fn matches(&self, text: &str) -> bool {
        let mut holders = self.holders.iter();
        self.key.contains(text) || holders.any(|holder| holder.holder.contains(text))
    }

    /// The cells of a table's row: see [`HEADER`].
    pub fn cells(&self) -> [String; 6] {
        let none = || "-".to_owned();
        let least_age = self.least_age();
        let age = match self.age() {
            Some(_) => short(least_age),
            None if least_age.is_zero() => none(),
            None => format!("> {}", short(least_age)),
        };
        let holder = match &self.holders[..] {
            [] => none(),
            [one] => one.holder.clone(),
            [first, rest @ ..] => format!("{} and {} more", first.holder, rest.len()),
        };
        let soonest = self
            .holders
            .iter()
            .filter_map(|holder| holder.expires_in_ms)
            .min();
        let kind = match self.kind {
            "exclusive" => self.kind.to_owned(),
            _ => self.counted_kind(),
        };
        [
            self.key.clone(),
            kind,
            holder,
            age,
            soonest.map_or_else(none, |ms| short(Duration::from_millis(ms))),
            self.clients_waiting.to_string(),
        ]
    }
}

impl Holder {
    fn new(info: &HolderInfo) -> Self {
        let granted_at = info.granted_at();
        Self {
            holder: info.holder().to_string(),
            fencing_token: info.fencing_token().map(|token| token.to_string()),
            granted_at_ms: granted_at.map(unix_millis),
            expires_in_ms: info.expires_in().map(millis),
            permits: match info.kind() {
                HolderKind::Permits { weight, .. } => Some(weight),
                _ => None,
            },
            // The clocks of Redis and of this machine may differ.
            age: granted_at
                .map(|since| SystemTime::now().duration_since(since).unwrap_or_default()),
            lease: info.id(),
            seen_for: Duration::ZERO,
        }
    }
}

/// The header of a table of locks.
pub const HEADER: [&str; 6] = ["KEY", "KIND", "HOLDER", "HELD FOR", "EXPIRES IN", "WAITING"];
/// The columns of figures.
pub const FIGURES: [usize; 3] = [3, 4, 5];

/// A table of locks.
fn table(locks: &[Lock]) -> Table {
    let mut table = Table::new();
    table.load_style(NOTHING);
    table.set_header(HEADER);
    table.add_rows(locks.iter().map(Lock::cells));
    for column in FIGURES {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    if let Some(column) = table.column_mut(0) {
        column.set_padding((0, 1));
    }
    table
}

/// Lists the locks whose names begin with the given text.
pub fn list(connection: &Connection, options: &List, output: Output) -> Result<ExitCode, Failure> {
    let client = Settings::read(connection, None)?.builder()?.build()?;
    let (locks, is_complete) = read_list(&client, options)?;
    match output {
        Output::Json => locks.iter().for_each(json),
        Output::Text if locks.is_empty() => {}
        Output::Text => line(table(&locks).trim_fmt()),
    }
    if !is_complete {
        message(more_locks(options.max));
    }
    Ok(ExitCode::SUCCESS)
}

/// The message about a list that is not complete.
pub fn more_locks(max: usize) -> String {
    format!("there are more than {max} locks; --max shows more")
}

/// The locks, sorted, and whether the list is complete.
pub fn read_list(client: &Client, options: &List) -> Result<(Vec<Lock>, bool), Failure> {
    let mut locks = Vec::new();
    let mut is_complete = true;
    for found in client.locks(&options.start) {
        let found = found?;
        let lock = Lock::new(found.key(), found.info());
        if options
            .held_longer
            .is_some_and(|least| lock.age().is_none_or(|age| age < least))
        {
            continue;
        }
        if locks.len() == options.max {
            is_complete = false;
            break;
        }
        locks.push(lock);
    }
    locks.sort_by(|one, other| one.key.cmp(&other.key));
    // A scan may find a key twice.
    locks.dedup_by(|one, other| one.key == other.key);
    Ok((locks, is_complete))
}

/// Shows one lock.
pub fn inspect(
    connection: &Connection,
    options: &Inspect,
    output: Output,
) -> Result<ExitCode, Failure> {
    let client = Settings::read(connection, None)?.builder()?.build_lazy()?;
    let found = client.mutex(&options.key).inspect()?;
    let Some(lock) = found.map(|info| Lock::new(&options.key, &info)) else {
        match output {
            Output::Json => line("null"),
            Output::Text => line(format_args!("{} is free", options.key)),
        }
        return Ok(ExitCode::from(CONFLICT));
    };
    match output {
        Output::Json => json(&lock),
        Output::Text => {
            line(format_args!(
                "{}: {}, {} clients wait",
                lock.key,
                match lock.kind {
                    "exclusive" => "one holder".to_owned(),
                    _ => lock.counted_kind(),
                },
                lock.clients_waiting
            ));
            for holder in &lock.holders {
                let part = |name: &str, value: Option<String>| {
                    value
                        .map(|value| format!(", {name} {value}"))
                        .unwrap_or_default()
                };
                line(format_args!(
                    "  {}{}{}{}{}",
                    holder.holder,
                    part("permits", holder.permits.map(|permits| permits.to_string())),
                    part("held for", holder.age.map(short)),
                    part(
                        "expires in",
                        holder
                            .expires_in_ms
                            .map(|ms| short(Duration::from_millis(ms)))
                    ),
                    part("fencing token", holder.fencing_token.clone()),
                ));
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// The result of `unlock`, in JSON.
#[derive(Serialize)]
struct Unlocked {
    key: String,
    taken_from: Vec<String>,
}

/// The permits of a holder. A reader and an exclusive holder count as one.
fn weight(holder: &HolderInfo) -> u32 {
    match holder.kind() {
        HolderKind::Permits { weight, .. } => weight,
        _ => 1,
    }
}

/// Takes a lock away from its holders.
pub fn unlock(
    connection: &Connection,
    options: &Unlock,
    output: Output,
) -> Result<ExitCode, Failure> {
    if !options.force {
        return Err(Failure::usage(
            "a lock belongs to its holder, which may still be working: --force takes it away",
        ));
    }
    let client = Settings::read(connection, None)?.builder()?.build_lazy()?;
    let key = &options.key;
    let is_chosen = |holder: &leasehold::HolderId| {
        options
            .holder
            .as_ref()
            .is_none_or(|chosen| *chosen == holder.as_str())
    };
    let mut taken_from = Vec::new();
    // `RwLock::force_unlock` accepts a holder of any kind.
    let lock = client.rw_lock(key);
    // The number of readers or permits that are still to be taken away. Holders that enter later do not count.
    let mut rest = None;
    while let Some(info) = client.mutex(key).inspect()? {
        let shown: u32 = info.holders().iter().map(weight).sum();
        let mut taken = 0;
        for holder in info.holders() {
            if is_chosen(holder.holder()) && lock.force_unlock(holder)? {
                taken_from.push(holder.holder().to_string());
                taken += weight(holder);
            }
        }
        let rest = rest.get_or_insert(info.taken());
        *rest = rest.saturating_sub(taken);
        // An inspection shows at most 100 holders: those whose leases end first.
        if shown >= info.taken() || *rest == 0 {
            break;
        }
        if taken == 0 {
            let shown = info.holders().len();
            message(format_args!(
                "{key} has more holders than the {shown} that can be seen"
            ));
            break;
        }
    }
    let code = if taken_from.is_empty() { CONFLICT } else { 0 };
    match output {
        Output::Json => json(&Unlocked {
            key: key.clone(),
            taken_from,
        }),
        Output::Text if taken_from.is_empty() => line(format_args!("{key}: no such holder")),
        Output::Text => taken_from
            .iter()
            .for_each(|holder| line(format_args!("{key}: taken from {holder}"))),
    }
    Ok(ExitCode::from(code))
}

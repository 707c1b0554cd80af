//! The scripts: their texts, the encoding of calls, and the decoding of replies.

pub mod decode;
pub mod encode;
#[path = "../../../lua/parts.rs"]
pub mod parts;
pub mod plain;
pub mod refusals;
#[cfg(test)]
#[cfg(not(shuttle))]
mod tests;

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use crate::command::Command;
use crate::config::MAX_TTL;
use crate::report::error::Error;
use crate::store::RefusalHook;
use crate::util::clock::MonotonicTime;
use crate::util::id::HolderId;
use crate::util::key;
use crate::util::key::KeyLayout;
use crate::util::slot::Slot;

#[cfg_attr(all(test, shuttle), allow(unused_imports))]
pub use decode::{Decoded, decode, is_refused_by_non_primary};
#[cfg_attr(all(test, shuttle), allow(unused_imports))]
pub use encode::{encode, encode_words};
use parts::whole;
use refusals::Refusals;

/// The text of a script, and the hash by which Redis knows it.
struct Script {
    text: String,
    /// SHA-1 of the text, in hexadecimal digits.
    hash: String,
}

/// The scripts, in the order of [`ScriptKind::ALL`].
static SCRIPTS: LazyLock<[Script; ScriptKind::ALL.len()]> = LazyLock::new(|| {
    [
        include_str!("../../../lua/hold.lua"),
        include_str!("../../../lua/release.lua"),
        include_str!("../../../lua/acquire.lua"),
        include_str!("../../../lua/propose.lua"),
        include_str!("../../../lua/renew.lua"),
        include_str!("../../../lua/adopt.lua"),
        include_str!("../../../lua/inspect.lua"),
        include_str!("../../../lua/write.lua"),
        include_str!("../../../lua/read.lua"),
        include_str!("../../../lua/probe.lua"),
    ]
    .map(|script| {
        let text = strip_comments(&whole(script));
        let hash = redis::Script::new(&text).get_hash().to_owned();
        Script { text, hash }
    })
});

/// The text of the script that each connection to a node of a quorum calls first.
pub fn data_check() -> &'static str {
    static TEXT: LazyLock<String> =
        LazyLock::new(|| strip_comments(&whole(include_str!("../../../lua/data.lua"))));
    &TEXT
}

/// Removes comments and indentation from a script, since Redis hashes the text of each EVAL.
pub fn strip_comments(script: &str) -> String {
    let lines = script.lines().map(str::trim_start);
    let code = lines.filter(|line| !line.is_empty() && !line.starts_with("--"));
    code.collect::<Vec<_>>().join("\n")
}

/// The script that carries out a command. All commands of one call have the same script.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScriptKind {
    Hold,
    Release,
    Acquire,
    Propose,
    Renew,
    Adopt,
    Inspect,
    Write,
    Read,
    Probe,
}

impl ScriptKind {
    /// All kinds, in the order in which a batch is written. Releases come before acquires, so a key that one batch
    /// releases and acquires is free. Holds come before releases, since a hold sets a missing key.
    pub const ALL: [Self; 10] = [
        Self::Hold,
        Self::Release,
        Self::Acquire,
        Self::Propose,
        Self::Renew,
        Self::Adopt,
        Self::Inspect,
        Self::Write,
        Self::Read,
        Self::Probe,
    ];

    pub fn of(command: &Command) -> Option<Self> {
        match command {
            Command::Acquire(_) => Some(Self::Acquire),
            Command::Propose(_) => Some(Self::Propose),
            Command::Hold(_) => Some(Self::Hold),
            Command::Release(_) | Command::ForceUnlock(_) => Some(Self::Release),
            Command::Renew(_) => Some(Self::Renew),
            Command::Adopt(_) => Some(Self::Adopt),
            Command::Inspect(_) => Some(Self::Inspect),
            Command::Write(_) => Some(Self::Write),
            Command::Read(_) => Some(Self::Read),
            Command::Probe(_) => Some(Self::Probe),
            Command::Flush => None,
        }
    }

    /// Whether only nodes of a quorum need the script.
    pub fn is_of_quorum(self) -> bool {
        matches!(self, Self::Propose | Self::Hold | Self::Probe)
    }

    pub fn text(self) -> &'static str {
        &SCRIPTS[self as usize].text
    }

    /// The hash of the script's text.
    pub fn hash(self) -> &'static str {
        &SCRIPTS[self as usize].hash
    }

    /// Whether the script's first key is the fence counter.
    pub fn uses_counter(self) -> bool {
        matches!(
            self,
            Self::Acquire | Self::Release | Self::Adopt | Self::Propose | Self::Hold
        )
    }

    /// Whether the call names the mark of a node of a quorum, behind the fence counter, and the length of a quarantine,
    /// behind the holder.
    pub fn uses_mark(self) -> bool {
        matches!(self, Self::Propose | Self::Hold)
    }

    /// Whether the call has the key of the lock's queue, too.
    pub fn uses_queue(self, command: &Command) -> bool {
        command.may_queue() || matches!(self, Self::Release | Self::Inspect)
    }

    /// Whether a call has one key for each command, and no other key.
    pub fn has_one_key_each(self) -> bool {
        matches!(self, Self::Renew | Self::Write | Self::Read | Self::Probe)
    }

    /// Whether the script may notify other clients than the caller's.
    pub fn publishes(self, command: &Command) -> bool {
        command.may_queue() || self == Self::Release
    }

    /// Whether the call names the length of the longest value.
    pub fn sends_limit(self) -> bool {
        self == Self::Read
    }

    /// Whether the script's first argument is the holder.
    pub fn sends_holder(self) -> bool {
        matches!(
            self,
            Self::Acquire | Self::Adopt | Self::Propose | Self::Hold
        )
    }
}

/// A script in a request: by its hash (EVALSHA) or its text (EVAL).
#[derive(Clone, Copy, Debug)]
pub enum ScriptRef<'a> {
    Hash(&'a str),
    Text(&'a str),
}

/// The arguments and keys that all script calls of a client to one server share, and which plain commands the server
/// refuses.
pub struct ScriptContext {
    pub holder: HolderId,
    prefix: String,
    layout: KeyLayout,
    /// The name of the fence counter, up to the tag.
    fence_counter: String,
    /// The key of the mark of a node of a quorum, and the length of a quarantine there.
    data_mark: String,
    /// `None` if the server is no node of a quorum.
    quarantine: Option<Duration>,
    /// The longest value that a read returns, in bytes.
    max_value: usize,
    shard_slot: ShardSlot,
    /// Of acquires by plain commands.
    pub plain_acquires: Refusals,
    /// Of releases by [`plain::CompareAndDelete`].
    pub plain_releases: Refusals,
    /// Of script calls by hash (`EVALSHA`).
    pub calls_by_hash: Refusals,
    /// Called with the first reason why plain commands cannot acquire.
    refusal_hook: Mutex<Option<RefusalHook>>,
}

impl ScriptContext {
    pub fn new(holder: HolderId, prefix: &str, layout: KeyLayout, max_value: usize) -> Self {
        Self {
            holder,
            fence_counter: key::fence_counter(prefix),
            data_mark: key::data_mark(prefix),
            quarantine: None,
            prefix: prefix.to_owned(),
            layout,
            max_value,
            shard_slot: ShardSlot::default(),
            plain_acquires: Refusals::default(),
            plain_releases: Refusals::default(),
            calls_by_hash: Refusals::default(),
            refusal_hook: Mutex::default(),
        }
    }

    /// Makes this the context of a node of a quorum, with the length of a quarantine.
    pub fn with_quarantine(mut self, quarantine: Duration) -> Self {
        self.quarantine = Some(quarantine);
        self
    }

    /// The length of a quarantine.
    fn quarantine(&self) -> Duration {
        self.quarantine.unwrap_or(MAX_TTL)
    }

    /// Whether a call of the script `kind` on this server has the mark as its last key, and the length of a quarantine
    /// as its last argument.
    fn ends_with_mark(&self, kind: ScriptKind) -> bool {
        self.quarantine.is_some() && matches!(kind, ScriptKind::Release | ScriptKind::Inspect)
    }

    /// The prefix of the client's keys.
    pub fn prefix(&self) -> &str {
        &self.prefix
    }

    pub fn layout(&self) -> KeyLayout {
        self.layout
    }

    /// Sets the hook that is called once, if the server does not allow acquires by plain commands.
    pub fn on_plain_acquires_refused(&self, hook: RefusalHook) {
        *self.refusal_hook.lock() = Some(hook);
    }

    /// Stops acquires by plain commands for ten minutes, for this reason.
    pub fn refuse_plain_acquires(&self, reason: Error) {
        self.plain_acquires.refuse(MonotonicTime::now());
        let hook = self.refusal_hook.lock().take();
        if let Some(hook) = hook {
            hook(reason);
        }
    }

    /// Whether each script call must have the keys of one slot only.
    pub fn has_slots(&self) -> bool {
        self.layout == KeyLayout::Slots
    }

    /// Sets the slot whose shard channels the server's clients listen to. Later calls pass the channels' name to the
    /// scripts.
    pub fn set_shard_slot(&self, slot: Option<Slot>) {
        self.shard_slot.set(slot);
    }

    /// The server's shard channel for this client.
    pub fn shard_channel(&self) -> Option<String> {
        let start = self.shard_channel_start()?;
        Some(start + self.holder.as_str())
    }

    /// The beginning of the names of the server's shard channels, which a holder id completes. `None` if the scripts
    /// are to use plain channels.
    fn shard_channel_start(&self) -> Option<String> {
        let slot = self.shard_slot.get()?;
        Some(key::shard_channel_start(self.layout, &self.prefix, slot))
    }
}

/// The slot that names the shard channels of a server: the lowest slot that the server serves, so all clients choose
/// the same slot. It changes when slots move.
#[derive(Debug)]
struct ShardSlot(AtomicU16);

impl ShardSlot {
    const NONE: u16 = u16::MAX;

    fn set(&self, slot: Option<Slot>) {
        let number = slot.map_or(Self::NONE, Slot::number);
        self.0.store(number, Ordering::Relaxed);
    }

    fn get(&self) -> Option<Slot> {
        Slot::new(self.0.load(Ordering::Relaxed))
    }
}

impl Default for ShardSlot {
    fn default() -> Self {
        Self(AtomicU16::new(Self::NONE))
    }
}

//! The scripts: their texts, the encoding of calls, and the decoding of replies.

pub mod decode;
pub mod encode;
pub mod plain;
pub mod refusals;
#[cfg(test)]
#[cfg(not(shuttle))]
mod tests;

use std::sync::LazyLock;
use std::sync::atomic::{AtomicU16, Ordering};
use std::time::Duration;

use crate::command::parts::whole;
use crate::command::script::{Script, strip_comments};
use crate::command::script_beside;
use crate::config::MAX_TTL;
use crate::config::key;
use crate::config::key::KeyLayout;
use crate::config::other_library::OtherLibrary;
use crate::report::error::Error;
use crate::store::{Report, Reports};
use crate::util::clock::MonotonicTime;
use crate::util::id::HolderId;
use crate::util::slot::Slot;

#[cfg_attr(all(test, shuttle), allow(unused_imports))]
pub use decode::{Decoded, decode, is_refused_by_non_primary};
#[cfg_attr(all(test, shuttle), allow(unused_imports))]
pub use encode::{encode, encode_words};
use refusals::Refusals;

/// The text of the script that each connection to a node of a quorum calls first.
pub fn data_check() -> &'static str {
    static TEXT: LazyLock<String> =
        LazyLock::new(|| strip_comments(&whole(include_str!("../../../lua/data.lua"))));
    &TEXT
}

/// How a request names a script: by its hash (EVALSHA) or by its text (EVAL).
#[derive(Clone, Copy, Debug)]
pub enum ScriptRef<'a> {
    Hash(&'a str),
    Text(&'a str),
}

/// The keys and arguments that all script calls of a client to one server share, and the commands that the server has
/// refused.
pub struct ScriptContext {
    pub holder: HolderId,
    /// The prefix of the client's keys.
    pub prefix: String,
    pub layout: KeyLayout,
    /// The name of the fence counter, up to the tag.
    fence_counter: String,
    /// The key of the mark of a quorum's node.
    data_mark: String,
    /// The length of a quarantine. `None` if the server is no node of a quorum.
    pub quarantine: Option<Duration>,
    /// The library whose locks the client also excludes and waits for.
    pub other_library: Option<OtherLibrary>,
    /// The longest value that a read returns, in bytes.
    max_value: usize,
    shard_slot: ShardSlot,
    /// Refusals of acquires by plain commands.
    pub plain_acquires: Refusals,
    /// Refusals of releases by [`plain::CompareAndDelete`].
    pub plain_releases: Refusals,
    /// Refusals of script calls by hash (`EVALSHA`).
    pub calls_by_hash: Refusals,
    /// Receives reports about refusals.
    pub reports: Reports,
}

impl ScriptContext {
    pub fn new(holder: HolderId, prefix: &str, layout: KeyLayout, max_value: usize) -> Self {
        Self {
            holder,
            fence_counter: key::fence_counter(prefix),
            data_mark: key::data_mark(prefix),
            quarantine: None,
            other_library: None,
            prefix: prefix.to_owned(),
            layout,
            max_value,
            shard_slot: ShardSlot::default(),
            plain_acquires: Refusals::default(),
            plain_releases: Refusals::default(),
            calls_by_hash: Refusals::default(),
            reports: Reports::default(),
        }
    }

    /// The script that carries out the commands of `usual` for this client. Beside another library, it may be another
    /// script.
    pub fn script(&self, usual: &'static Script) -> &'static Script {
        script_beside(self.other_library, usual)
    }

    /// Whether plain commands may acquire and release locks in place of the scripts.
    pub fn has_plain_commands(&self) -> bool {
        matches!(self.other_library, None | Some(OtherLibrary::PlainKeys))
    }

    /// The length of a quarantine.
    fn quarantine(&self) -> Duration {
        self.quarantine.unwrap_or(MAX_TTL)
    }

    /// Stops acquires by plain commands for ten minutes, and reports the reason.
    pub fn refuse_plain_acquires(&self, reason: Error) {
        self.plain_acquires.refuse(MonotonicTime::now());
        self.reports.send(Report::PlainAcquiresRefused(reason));
    }

    /// Whether the keys of each script call have to be in one slot.
    pub fn has_slots(&self) -> bool {
        self.layout == KeyLayout::Slots
    }

    /// Sets the slot that names the server's shard channels. Later script calls pass the name of these channels.
    pub fn set_shard_slot(&self, slot: Option<Slot>) {
        self.shard_slot.set(slot);
    }

    /// The server's shard channel for this client.
    pub fn shard_channel(&self) -> Option<String> {
        let start = self.shard_channel_start()?;
        Some(start + self.holder.as_str())
    }

    /// The start of the names of the server's shard channels, to which a script appends the holder id. `None` if
    /// scripts have to use plain channels.
    fn shard_channel_start(&self) -> Option<String> {
        let slot = self.shard_slot.get()?;
        Some(key::shard_channel_start(self.layout, &self.prefix, slot))
    }
}

/// The slot that names the shard channels of a server: the lowest slot that the server serves, so that all clients
/// choose the same one. It changes when slots move.
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

//! The scripts: their texts, how batches of commands are put on the wire, and how answers are read.

mod decode;
mod encode;
#[path = "../../../../lua/parts.rs"]
mod parts;
#[cfg(test)]
#[cfg(not(shuttle))]
mod tests;

use std::sync::LazyLock;

use crate::store::command::{Command, QueueMode};
use crate::util::id::HolderId;

#[cfg_attr(all(test, shuttle), allow(unused_imports))]
pub(crate) use decode::{Decoded, decode, is_out_of_place};
#[cfg_attr(all(test, shuttle), allow(unused_imports))]
pub(crate) use encode::{encode, encode_words};
use parts::whole;

/// A script, as a server is sent it and as it is called.
struct Script {
    text: String,
    /// SHA-1 of the text, in hexadecimal digits.
    hash: String,
}

/// In the order of [`Kind::ALL`].
static SCRIPTS: LazyLock<[Script; Kind::ALL.len()]> = LazyLock::new(|| {
    [
        include_str!("../../../../lua/release.lua"),
        include_str!("../../../../lua/acquire.lua"),
        include_str!("../../../../lua/renew.lua"),
        include_str!("../../../../lua/adopt.lua"),
        include_str!("../../../../lua/inspect.lua"),
        include_str!("../../../../lua/write.lua"),
        include_str!("../../../../lua/read.lua"),
    ]
    .map(|script| {
        let text = strip_comments(&whole(script));
        let hash = redis::Script::new(&text).get_hash().to_owned();
        Script { text, hash }
    })
});

/// A script without its comments and indentation: Redis hashes the text each time it comes.
pub(in crate::store) fn strip_comments(script: &str) -> String {
    let lines = script.lines().map(str::trim_start);
    let code = lines.filter(|line| !line.is_empty() && !line.starts_with("--"));
    code.collect::<Vec<_>>().join("\n")
}

/// Which script a batch is for; a batch is of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Release,
    Acquire,
    Renew,
    Adopt,
    Inspect,
    Write,
    Read,
}

impl Kind {
    /// In the order in which a batch is written: a key let go and asked for in one batch is free
    /// when its acquire runs.
    pub(crate) const ALL: [Self; 7] = [
        Self::Release,
        Self::Acquire,
        Self::Renew,
        Self::Adopt,
        Self::Inspect,
        Self::Write,
        Self::Read,
    ];

    pub(crate) fn of(command: &Command) -> Option<Self> {
        match command {
            Command::Acquire { .. } => Some(Self::Acquire),
            Command::Release { .. } | Command::ForceUnlock { .. } => Some(Self::Release),
            Command::Renew { .. } => Some(Self::Renew),
            Command::Adopt { .. } => Some(Self::Adopt),
            Command::Inspect { .. } => Some(Self::Inspect),
            Command::Write { .. } => Some(Self::Write),
            Command::Read { .. } => Some(Self::Read),
            Command::Flush { .. } => None,
        }
    }

    pub(crate) fn text(self) -> &'static str {
        &SCRIPTS[self as usize].text
    }

    /// The hash under which Redis knows the script once it was sent its text.
    pub(crate) fn hash(self) -> &'static str {
        &SCRIPTS[self as usize].hash
    }

    /// Whether its first key is the fence counter.
    pub(super) fn counts(self) -> bool {
        matches!(self, Self::Acquire | Self::Release)
    }

    /// Whether the call also names the key of this lock's queue.
    pub(super) fn uses_queue(self, command: &Command) -> bool {
        match command {
            Command::Acquire { queue_mode, .. } => *queue_mode != QueueMode::None,
            _ => matches!(self, Self::Release | Self::Inspect),
        }
    }

    /// Whether its first argument is the length of the longest value.
    pub(super) fn names_limit(self) -> bool {
        self == Self::Read
    }

    /// Whether its first argument is the holder.
    pub(super) fn names_holder(self) -> bool {
        matches!(self, Self::Acquire | Self::Adopt)
    }
}

/// How a script is named in a request.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ScriptRef<'a> {
    Hash(&'a str),
    Text(&'a str),
}

/// What every request of a client has in shared.
#[derive(Clone, Debug)]
pub(crate) struct ScriptContext {
    pub(crate) holder: HolderId,
    pub(crate) fence_counter: String,
    /// The longest value that a read returns, in bytes.
    pub(crate) max_value: usize,
}

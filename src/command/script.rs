//! A script: its text, the layout of its keys and arguments, and the readers of its results.

use std::fmt;
use std::sync::OnceLock;

use redis::Value;

use crate::command::Outcome;
use crate::command::parts::whole;

/// A Lua script that carries out one or several commands of the same kind.
pub struct Script {
    pub name: &'static str,
    source: &'static str,
    pub layout: Layout,
    pub results: Results,
    /// Whether only a quorum uses the script.
    pub only_on_quorum: bool,
    text: OnceLock<Text>,
}

/// The keys and arguments of a script call. The header of the script lists them in order.
#[derive(Clone, Copy)]
pub struct Layout {
    /// Whether the first key is the fence counter.
    pub counter: bool,
    /// Whether the second key is the mark of a quorum's node, and the second argument the length of a quarantine.
    pub mark: bool,
    /// Whether the last key is the mark and the last argument the length of a quarantine, on a node of a quorum.
    pub mark_at_end: bool,
    /// The last keys, one for each lock key.
    pub further: Option<FurtherKeys>,
    /// Whether the script is for Redisson's locks, which have no queues of this library.
    pub redisson: bool,
    /// Whether the first argument is the holder.
    pub holder: bool,
    /// Whether the next argument is the length of the longest value that the client accepts.
    pub limit: bool,
    /// How many arguments follow for each command.
    pub arguments: usize,
    /// Whether the script publishes on shard channels. Its last argument on a Cluster is then the start of their names,
    /// or `shard` for those of Redisson.
    pub shard_channel: bool,
}

/// The keys of another library for its locks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FurtherKeys {
    /// The signals of python-redis-lock.
    Signals,
    /// Redisson's counters of tokens for fenced locks; for its other locks, the fence counter. The next argument says
    /// which: `fenced`, or nothing.
    TokenCounters,
    /// The queues of Redisson's fair locks.
    FairQueues,
}

impl Layout {
    /// A call with one key for each command, and no arguments.
    pub const KEYS_ONLY: Self = Self {
        counter: false,
        mark: false,
        mark_at_end: false,
        further: None,
        redisson: false,
        holder: false,
        limit: false,
        arguments: 0,
        shard_channel: false,
    };

    /// Whether a call has one key for each command, and no other key.
    pub fn has_one_key_each(&self) -> bool {
        !(self.counter || self.mark || self.mark_at_end || self.further.is_some())
    }
}

/// The readers of a script's results.
#[derive(Clone, Copy)]
pub struct Results {
    /// Reads the result of one command. Returns `None` if the script never returns this result. If the result contains
    /// a value that this library did not write, the outcome is an error.
    pub read: fn(&mut Value) -> Option<Outcome>,
    /// Reads an error that is the result of one command, from its code and its detail. Returns `None` for other errors.
    pub read_error: fn(&str, &str) -> Option<Outcome>,
    /// Whether the script may return one result for all commands of a call: all have this outcome, or all were granted,
    /// with consecutive tokens from this one on.
    pub one_for_all: bool,
}

/// The text of a script, and the hash that names the script in EVALSHA.
struct Text {
    text: String,
    /// SHA-1 of the text, in hexadecimal digits.
    hash: String,
}

impl Script {
    pub const fn new(
        name: &'static str,
        source: &'static str,
        layout: Layout,
        results: Results,
    ) -> Self {
        Self {
            name,
            source,
            layout,
            results,
            only_on_quorum: false,
            text: OnceLock::new(),
        }
    }

    pub const fn only_on_quorum(mut self) -> Self {
        self.only_on_quorum = true;
        self
    }

    fn made(&self) -> &Text {
        self.text.get_or_init(|| {
            let text = strip_comments(&whole(self.source));
            let hash = redis::Script::new(&text).get_hash().to_owned();
            Text { text, hash }
        })
    }

    pub fn text(&self) -> &str {
        &self.made().text
    }

    /// The SHA-1 of the script's text.
    pub fn hash(&self) -> &str {
        &self.made().hash
    }
}

impl PartialEq for Script {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self, other)
    }
}

impl fmt::Debug for Script {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

/// Removes comments and indentation from a script: they would make it longer to send and to hash.
pub fn strip_comments(script: &str) -> String {
    let lines = script.lines().map(str::trim_start);
    let code = lines.filter(|line| !line.is_empty() && !line.starts_with("--"));
    code.collect::<Vec<_>>().join("\n")
}

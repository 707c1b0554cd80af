//! A script: its text, the layout of its keys and arguments, and how its results are read.

use std::fmt;
use std::sync::OnceLock;

use redis::Value;

use crate::command::Outcome;
use crate::command::parts::whole;

/// The script that carries out a command. All commands of one call have the same script.
pub struct Script {
    pub name: &'static str,
    source: &'static str,
    pub layout: Layout,
    pub results: Results,
    /// Only nodes of a quorum need the script.
    pub only_on_quorum: bool,
    text: OnceLock<Text>,
}

/// The keys and arguments of a call, in the order in which the header of the script lists them.
#[derive(Clone, Copy)]
pub struct Layout {
    /// Before the keys of the commands: the fence counter.
    pub counter: bool,
    /// Behind the fence counter: the mark of a node of a quorum. Behind the holder: the length of a quarantine.
    pub mark: bool,
    /// On a node of a quorum, the mark is the last key, and the length of a quarantine the last argument.
    pub mark_at_end: bool,
    /// The first argument: the holder.
    pub holder: bool,
    /// Behind the holder: the length of the longest value.
    pub limit: bool,
    /// The number of arguments of each command.
    pub arguments: usize,
    /// The call ends with the name of the shard channels, since the script may notify other clients.
    pub shard_channel: bool,
}

impl Layout {
    /// A call with one key for each command, and without arguments.
    pub const KEYS_ONLY: Self = Self {
        counter: false,
        mark: false,
        mark_at_end: false,
        holder: false,
        limit: false,
        arguments: 0,
        shard_channel: false,
    };

    /// Whether a call has one key for each command, and no other key.
    pub fn has_one_key_each(&self) -> bool {
        !(self.counter || self.mark || self.mark_at_end)
    }
}

/// How the results of a script are read.
#[derive(Clone, Copy)]
pub struct Results {
    /// Reads the result of one command. `None` if the script cannot return it. If the result has unreadable text that
    /// another user wrote under the key, the outcome is an error of this key.
    pub read: fn(&mut Value) -> Option<Outcome>,
    /// Reads the code and the detail of an error that is a result of one command. `None` for other errors.
    pub read_error: fn(&str, &str) -> Option<Outcome>,
    /// One result can stand for all commands of a call: all were granted with consecutive tokens, or all have the same
    /// outcome.
    pub one_for_all: bool,
}

/// The text of a script, and the hash by which Redis knows it.
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

    /// The hash of the script's text.
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

/// Removes comments and indentation from a script, since Redis hashes the text of each EVAL.
pub fn strip_comments(script: &str) -> String {
    let lines = script.lines().map(str::trim_start);
    let code = lines.filter(|line| !line.is_empty() && !line.starts_with("--"));
    code.collect::<Vec<_>>().join("\n")
}

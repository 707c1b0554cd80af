//! Parts of the library that the bench `micro` measures, with one operation each. Not part of the API: compiled only
//! with `--cfg leasehold_internals`.

use std::time::Duration;

use crate::acquire::LocalQueues;
use crate::command::{Acquire, Command, Mode, QueueMode, acquire};
use crate::config::key::{Key, KeyLayout};
use crate::lease::Options;
use crate::util::clock::Clock;
use crate::util::id::{HolderId, LeaseId};
use crate::wire::net::replies::{Limit, Replies};
use crate::wire::scripts::{ScriptContext, ScriptRef, encode};

const TTL: Duration = Duration::from_secs(30);

/// The watchdog's timers.
pub struct Wheel {
    wheel: crate::watchdog::Wheel<usize>,
    deadline: u64,
}

impl Wheel {
    /// A wheel with `count` timers, which are never cancelled.
    pub fn with_timers(count: usize) -> Self {
        let mut wheel = crate::watchdog::Wheel::new(0);
        for timer in 0..count {
            wheel.insert(1 + timer as u64 * 7, timer);
        }
        Self { wheel, deadline: 0 }
    }

    /// Inserts a timer, each time with another deadline, and cancels it.
    pub fn insert_and_cancel(&mut self) -> Option<usize> {
        self.deadline = (self.deadline + 997) % 1_000_000;
        let id = self.wheel.insert(self.deadline, 0);
        self.wheel.cancel(id)
    }
}

/// The local queue of one key.
pub struct LocalQueue {
    queues: LocalQueues,
    key: Key,
    options: Options,
}

impl LocalQueue {
    /// A queue without waiters.
    #[expect(clippy::new_without_default, reason = "the bench needs no default")]
    pub fn new() -> Self {
        Self {
            queues: LocalQueues::new(Clock::default()),
            key: key(0),
            options: Options {
                ttl: TTL,
                renew_every: None,
                max_hold: None,
                checked: false,
                replicas: None,
                mode: Mode::Exclusive,
                min_hold: Duration::ZERO,
            },
        }
    }

    /// Joins the queue as a waiter, and leaves it. Returns true if a lease or an entry was left behind.
    pub fn join_and_leave(&self) -> bool {
        let waiter = self.queues.join(&self.key, self.options, None);
        let (lease, entry) = waiter.leave();
        lease.is_some() || entry.is_some()
    }
}

/// A script call for several acquires.
pub struct Batch {
    names: ScriptContext,
    hash: String,
    commands: Vec<Command>,
    buffer: Vec<u8>,
}

impl Batch {
    /// A call for `count` keys.
    pub fn of_acquires(count: usize) -> Self {
        let acquire = |number| {
            Command::Acquire(Acquire {
                key: key(number),
                lease: LeaseId::random(),
                ttl: TTL,
                queue_mode: QueueMode::None,
                link: crate::command::Link::Alone,
                replicas: None,
                mode: Mode::Exclusive,
            })
        };
        Self {
            names: ScriptContext::new(
                HolderId::of_this_process(),
                "leasehold:",
                KeyLayout::Single,
                1 << 20,
            ),
            hash: "0".repeat(40),
            commands: (0..count).map(acquire).collect(),
            buffer: Vec::new(),
        }
    }

    /// Encodes the call, and returns its length in bytes.
    pub fn encode(&mut self) -> usize {
        self.buffer.clear();
        let call = ScriptRef::Hash(&self.hash);
        let commands = self.commands.iter();
        encode(
            &mut self.buffer,
            call,
            &acquire::SCRIPT,
            &self.names,
            commands,
        );
        self.buffer.len()
    }
}

/// The parser of replies.
pub struct Reader(Replies);

impl Reader {
    /// A parser without input.
    #[expect(clippy::new_without_default, reason = "the bench needs no default")]
    pub fn new() -> Self {
        Self(Replies::new())
    }

    /// Parses `bytes`, which are one reply.
    pub fn read(&mut self, mut bytes: &[u8]) -> redis::Value {
        let limit = Limit::Fixed(1 << 20);
        loop {
            if let Some(value) = self.0.next(limit).expect("the reply is well-formed") {
                return value;
            }
            self.0.fill(limit, &mut bytes).expect("all bytes are there");
        }
    }
}

fn key(number: usize) -> Key {
    Key::new("leasehold:", &format!("invoice:{number}"), 1024).expect("the name is valid")
}

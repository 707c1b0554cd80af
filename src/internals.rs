//! Parts of the library as benches/micro.rs drives them, one operation each. No part of the API: compiled only
//! with `--cfg leasehold_internals`.

use std::time::Duration;

use crate::acquire::LocalQueues;
use crate::lease::Options;
use crate::store::{
    Command, Limit, QueueMode, Replies, ScriptContext, ScriptKind, ScriptRef, encode,
};
use crate::util::clock::Clock;
use crate::util::id::{HolderId, LeaseId};
use crate::util::key::Key;

const TTL: Duration = Duration::from_secs(30);

/// The watchdog's timers.
pub struct Wheel {
    wheel: crate::watchdog::Wheel<usize>,
    deadline: u64,
}

impl Wheel {
    /// With so many timers in it that nobody cancels.
    pub fn with_timers(count: usize) -> Self {
        let mut wheel = crate::watchdog::Wheel::new(0);
        for timer in 0..count {
            wheel.insert(1 + timer as u64 * 7, timer);
        }
        Self { wheel, deadline: 0 }
    }

    /// A timer for some other time than the last one, and not.
    pub fn insert_and_cancel(&mut self) -> Option<usize> {
        self.deadline = (self.deadline + 997) % 1_000_000;
        let id = self.wheel.insert(self.deadline, 0);
        self.wheel.cancel(id)
    }
}

/// The line of a client's threads for one key.
pub struct Line {
    queues: LocalQueues,
    key: Key,
    options: Options,
}

impl Line {
    /// With nobody in it.
    #[expect(clippy::new_without_default, reason = "nobody wants it")]
    pub fn new() -> Self {
        Self {
            queues: LocalQueues::new(Clock::default()),
            key: key(0),
            options: Options {
                ttl: TTL,
                renew_every: None,
                max_hold: None,
                checked: false,
            },
        }
    }

    /// As a thread that wants the lock, and then does not. Whether it left anything behind.
    pub fn join_and_leave(&self) -> bool {
        let place = self.queues.join(&self.key, self.options, None);
        let (handed, claim) = place.leave();
        handed.is_some() || claim.is_some()
    }
}

/// One script call for some acquires.
pub struct Batch {
    names: ScriptContext,
    hash: String,
    commands: Vec<Command>,
    buffer: Vec<u8>,
}

impl Batch {
    /// For so many keys.
    pub fn of_acquires(count: usize) -> Self {
        let acquire = |number| Command::Acquire {
            key: key(number),
            lease: LeaseId::random(),
            ttl: TTL,
            queue_mode: QueueMode::None,
        };
        Self {
            names: ScriptContext {
                holder: HolderId::of_this_process(),
                fence_counter: "leasehold:~fence".to_owned(),
                max_value: 1 << 20,
            },
            hash: "0".repeat(40),
            commands: (0..count).map(acquire).collect(),
            buffer: Vec::new(),
        }
    }

    /// How many bytes it takes on the wire.
    pub fn encode(&mut self) -> usize {
        self.buffer.clear();
        let call = ScriptRef::Hash(&self.hash);
        let commands = self.commands.iter();
        encode(
            &mut self.buffer,
            call,
            ScriptKind::Acquire,
            &self.names,
            commands,
        );
        self.buffer.len()
    }
}

/// The reader of replies.
pub struct Reader(Replies);

impl Reader {
    /// A reader without bytes.
    #[expect(clippy::new_without_default, reason = "nobody wants it")]
    pub fn new() -> Self {
        Self(Replies::new())
    }

    /// Reads `bytes`, which are one reply.
    pub fn read(&mut self, mut bytes: &[u8]) -> redis::Value {
        let limit = Limit::Fixed(1 << 20);
        loop {
            if let Some(value) = self.0.next(limit).expect("it is well-formed") {
                return value;
            }
            self.0.fill(limit, &mut bytes).expect("all of it is there");
        }
    }
}

fn key(number: usize) -> Key {
    Key::new("leasehold:", &format!("invoice:{number}"), 1024).expect("it is a good name")
}

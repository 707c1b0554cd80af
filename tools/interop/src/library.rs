//! The libraries, with what users of both must know: the keys of a lock, and the settings of our client.

use std::fmt;

use leasehold::OtherLibrary;

/// A program that runs workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Runtime {
    Python,
    Node,
    Go,
    Java,
}

impl Runtime {
    pub const ALL: [Self; 4] = [Self::Python, Self::Node, Self::Go, Self::Java];
    /// The runtimes of the short form, which installs in seconds.
    pub const QUICK: [Self; 2] = [Self::Python, Self::Node];

    pub fn name(self) -> &'static str {
        match self {
            Self::Python => "Python",
            Self::Node => "Node",
            Self::Go => "Go",
            Self::Java => "Java",
        }
    }

    /// Whether the command fails without the runtime.
    pub fn is_required(self) -> bool {
        matches!(self, Self::Python | Self::Node)
    }
}

/// The form of a library's lock in Redis, which decides the settings of our client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// One string under the name itself.
    PlainKeys,
    PythonRedisLock,
    /// Three strings. Two guards of our client take the first two of them.
    Rueidislock,
    Redisson {
        fenced: bool,
    },
}

#[derive(Clone, Copy, Debug)]
pub struct Library {
    /// The name on the command line and in assignments.
    pub name: &'static str,
    pub runtime: Runtime,
    pub family: Family,
    /// Whether a release wakes the waiters of the library. If not, they poll.
    pub is_woken: bool,
    /// Whether it can lock without a ttl that ends the lock after a crash.
    pub locks_without_ttl: bool,
}

const fn polling(name: &'static str, runtime: Runtime) -> Library {
    Library {
        name,
        runtime,
        family: Family::PlainKeys,
        is_woken: false,
        locks_without_ttl: false,
    }
}

const fn woken(name: &'static str, runtime: Runtime, family: Family) -> Library {
    Library {
        family,
        is_woken: true,
        ..polling(name, runtime)
    }
}

const RLOCK: Family = Family::Redisson { fenced: false };
const RFENCED_LOCK: Family = Family::Redisson { fenced: true };

pub const LIBRARIES: [Library; 10] = [
    Library {
        locks_without_ttl: true,
        ..polling("redis-py", Runtime::Python)
    },
    Library {
        locks_without_ttl: true,
        ..woken(
            "python-redis-lock",
            Runtime::Python,
            Family::PythonRedisLock,
        )
    },
    polling("redlock-4", Runtime::Node),
    polling("redlock-5", Runtime::Node),
    polling("redsync", Runtime::Go),
    polling("redislock", Runtime::Go),
    woken("rueidislock", Runtime::Go, Family::Rueidislock),
    woken("redisson-3.17", Runtime::Java, RLOCK),
    woken("redisson", Runtime::Java, RLOCK),
    woken("redisson-fenced", Runtime::Java, RFENCED_LOCK),
];

impl Library {
    pub fn by_name(name: &str) -> Result<Self, String> {
        let found = LIBRARIES.iter().find(|library| library.name == name);
        found.copied().ok_or_else(|| {
            let names = LIBRARIES.map(|library| library.name);
            format!("no such library; there are {}", names.join(", "))
        })
    }

    /// The names that our client must lock, in this order. With our client's prefix, they are keys of the library.
    pub fn our_names(&self, name: &str) -> Vec<String> {
        match self.family {
            Family::Rueidislock => vec![format!("0:{name}"), format!("1:{name}")],
            _ => vec![name.to_owned()],
        }
    }

    /// The prefix that our client has.
    pub fn our_prefix(&self) -> &'static str {
        match self.family {
            Family::PlainKeys | Family::Redisson { .. } => "",
            Family::PythonRedisLock => "lock:",
            Family::Rueidislock => "rueidislock:",
        }
    }

    /// The first key in Redis of the lock `name`.
    pub fn key(&self, name: &str) -> String {
        format!("{}{}", self.our_prefix(), self.our_names(name)[0])
    }

    pub fn our_setting(&self) -> OtherLibrary {
        match self.family {
            Family::PlainKeys | Family::Rueidislock => OtherLibrary::PlainKeys,
            Family::PythonRedisLock => OtherLibrary::PythonRedisLock,
            Family::Redisson { fenced } => OtherLibrary::Redisson { fenced },
        }
    }

    /// Whether the library renews a lock until it is released, whatever ttl it was asked for.
    pub fn always_renews(&self) -> bool {
        self.family == Family::Rueidislock
    }
}

impl fmt::Display for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name)
    }
}

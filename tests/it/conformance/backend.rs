//! What a backend is: a store that locks are kept in, as the behaviours see it. One more store is one
//! more of these. Never looks inside the library, and asserts nothing.

use std::thread;
use std::time::Duration;

use leasehold::{Builder, Client};
use leasehold_testbed::Server;

use crate::steady::steady;
use crate::support::{LONG_TTL, secs, server};

/// A store of a test's own, empty at first.
pub trait Backend {
    /// A client with a [`LONG_TTL`], and with time-outs that no stall of a busy machine uses up.
    fn builder(&self) -> Builder;

    /// A ttl that can be let pass, and that a busy machine renews in time.
    fn ttl(&self) -> Duration;

    /// Lets so much time pass, for the store and for its clients, which are at work meanwhile.
    fn pass(&self, time: Duration);

    /// The store comes back without its memory.
    fn forget(&self);

    fn client(&self) -> Client {
        self.builder().build().unwrap()
    }
}

/// Locks without a server. Time passes when it is told to.
pub struct Memory(leasehold::MemoryStore);

impl Memory {
    pub fn start() -> Self {
        Self(leasehold::MemoryStore::new())
    }
}

impl Backend for Memory {
    fn builder(&self) -> Builder {
        self.0.builder().ttl(LONG_TTL)
    }

    fn ttl(&self) -> Duration {
        secs(30)
    }

    fn pass(&self, time: Duration) {
        let step = self.ttl() / 5;
        let mut left = time;
        while !left.is_zero() {
            let next = left.min(step);
            self.0.advance(next);
            left -= next;
        }
    }

    fn forget(&self) {
        self.0.flush();
    }
}

/// One Redis. Time passes as it does.
pub struct Redis(Server);

impl Redis {
    pub fn start() -> Self {
        Self(server())
    }
}

impl Backend for Redis {
    fn builder(&self) -> Builder {
        steady(&self.0.url()).ttl(LONG_TTL)
    }

    fn ttl(&self) -> Duration {
        secs(4)
    }

    fn pass(&self, time: Duration) {
        thread::sleep(time);
    }

    fn forget(&self) {
        crate::support::ask(&self.0, &["FLUSHALL"]);
    }
}

/// What only a store with a server of its own has: other programs that change its keys, data beside
/// the locks, connections that break, an end. That is all that [`MemoryStore`] does not have.
pub trait Serving: Backend {
    fn server(&mut self) -> &mut Server;
}

impl Serving for Redis {
    fn server(&mut self) -> &mut Server {
        &mut self.0
    }
}

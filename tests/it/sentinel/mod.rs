//! Groups of servers under sentinels (`redis+sentinel://`). The conformance suite runs there as well:
//! `conformance::redis_under_a_sentinel`.

mod fail_overs;
pub mod rights;
pub mod sentinels;
#[cfg(feature = "tls")]
mod tls;

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard as Turn, PoisonError};
use std::time::Duration;

use leasehold::{Builder, Client};
use leasehold_testbed::{SentinelGroup, eventually};

use crate::encryption::Encryption;
use crate::least_privilege::as_limited;
use crate::steady::steady;
use crate::support::{LONG_TTL, SOON, in_redis, secs};

/// How long a client of these tests waits for a primary: longer than any fail-over on a busy machine takes.
const OUTAGE: Duration = Duration::from_secs(120);

/// A sentinel that does not run for two seconds stops fail-overs for half a minute. So at most two tests at a time use
/// a group that fails over.
static TURNS: [Mutex<()>; 2] = [const { Mutex::new(()) }; 2];

fn turn() -> Turn<'static, ()> {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let turn = &TURNS[NEXT.fetch_add(1, Ordering::Relaxed) % TURNS.len()];
    turn.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A primary, two replicas and three sentinels. The clients' user has exactly the rights that `leasehold acl` prints,
/// at the servers and at the sentinels, and clients use TLS if leasehold has it.
struct Group {
    group: SentinelGroup,
    encryption: Encryption,
    _turn: Turn<'static, ()>,
}

impl Group {
    fn start() -> Self {
        let turn = turn();
        let encryption = Encryption::new();
        let group = encryption.sentinel_group(SentinelGroup::builder());
        let group = group.start().unwrap();
        group
            .servers()
            .iter()
            .for_each(rights::create_user_at_server);
        for sentinel in group.sentinels() {
            rights::create_user_at_sentinel(sentinel, None);
        }
        Self {
            group,
            encryption,
            _turn: turn,
        }
    }

    fn builder(&self) -> Builder {
        let builder = patient(&as_limited(&self.group.url()));
        let builder = builder.sentinel_credentials(rights::limited_login());
        self.encryption.client(builder)
    }

    fn client(&self) -> Client {
        self.builder().build().unwrap()
    }

    /// Waits until all replicas have the lock's key of the primary.
    #[track_caller]
    fn wait_for_copies(&self, key: &str) {
        let key = in_redis(key);
        let has_it = |server: &leasehold_testbed::Server| {
            server.command(&["EXISTS", &key]).unwrap().as_int() == Some(1)
        };
        let copied = eventually(SOON, || self.servers().iter().all(has_it));
        assert!(copied, "{key} is not on all servers");
    }
}

impl Deref for Group {
    type Target = SentinelGroup;

    fn deref(&self) -> &SentinelGroup {
        &self.group
    }
}

impl DerefMut for Group {
    fn deref_mut(&mut self) -> &mut SentinelGroup {
        &mut self.group
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            rights::assert_suffice(&self.group);
        }
    }
}

/// Settings of a client that waits for a primary during a whole fail-over. Its locks outlive any fail-over.
fn patient(url: &str) -> Builder {
    steady(url)
        .ttl(LONG_TTL)
        .connect_timeout(secs(2))
        .command_timeout(secs(2))
        .outage_timeout(OUTAGE)
}

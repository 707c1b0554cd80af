//! Groups of servers under sentinels (`redis+sentinel://`). The conformance suite runs there as well:
//! `conformance::redis_under_a_sentinel`, with least privilege and with TLS, too.

mod fail_overs;
pub mod rights;
pub mod sentinels;
#[cfg(feature = "tls")]
mod tls;

use std::ops::{Deref, DerefMut};
use std::sync::{Mutex, MutexGuard as Turn, PoisonError};
use std::time::Duration;

#[cfg(feature = "tls")]
use leasehold::TlsConfig;
use leasehold::{Builder, Client};
use leasehold_testbed::{SentinelGroup, SentinelGroupBuilder, eventually};

#[cfg(feature = "tls")]
use crate::least_privilege::as_limited;
use crate::steady::steady;
use crate::support::{LONG_TTL, SOON, in_redis, secs};

/// How long a client of these tests waits for a primary: longer than any fail-over on a busy machine takes.
const OUTAGE: Duration = Duration::from_secs(120);

/// A sentinel that does not run for two seconds stops fail-overs for half a minute. So one test at a time uses a
/// group that fails over.
static TURN: Mutex<()> = Mutex::new(());

/// A primary, two replicas and three sentinels.
struct Group {
    group: SentinelGroup,
    /// Makes the settings of a client from the URL of the group.
    settings: Box<dyn Fn(&str) -> Builder>,
    /// The client's user has exactly the rights that `cargo xtask acl` prints, at the servers and at the sentinels.
    is_limited: bool,
    _turn: Turn<'static, ()>,
}

impl Group {
    fn start() -> Self {
        Self::start_with(SentinelGroup::builder(), patient)
    }

    #[cfg(feature = "tls")]
    fn start_with_least_privilege_and_tls() -> Self {
        let (files, authority) = crate::tls::certificates_for("127.0.0.1");
        let settings = move |url: &str| {
            patient(&as_limited(url))
                .sentinel_credentials(rights::limited_login())
                .tls(TlsConfig::new().ca_pem(authority.as_str()))
        };
        let mut group = Self::start_with(SentinelGroup::builder().tls(files), settings);
        let servers = group.servers().iter();
        servers.for_each(rights::create_user_at_server);
        for sentinel in group.sentinels() {
            rights::create_user_at_sentinel(sentinel, None);
        }
        group.is_limited = true;
        group
    }

    fn start_with(
        group: SentinelGroupBuilder,
        settings: impl Fn(&str) -> Builder + 'static,
    ) -> Self {
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        Self {
            group: group.start().unwrap(),
            settings: Box::new(settings),
            is_limited: false,
            _turn: turn,
        }
    }

    fn builder(&self) -> Builder {
        (self.settings)(&self.group.url())
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
        if self.is_limited && !std::thread::panicking() {
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

//! The findings of the environment check: settings of a server or of a client under which locks can be lost.

use std::fmt;
use std::time::Duration;

use crate::util::clock::validity;

/// A finding of [`Client::check_environment`](crate::Client::check_environment): a warning, and the server that it is
/// about. `Display` is one line with the server's address, the measured value, and the next step.
///
/// ```
/// # let server = leasehold_testbed::Server::start().unwrap();
/// # let client = leasehold::Client::open(&server.url())?;
/// use leasehold::EnvironmentWarning;
///
/// for finding in client.check_environment()? {
///     println!("{finding}");
///     if let EnvironmentWarning::Eviction { policy, .. } = finding.warning() {
///         println!("change {policy} at {}", finding.server());
///     }
/// }
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EnvironmentFinding {
    server: String,
    warning: EnvironmentWarning,
}

impl EnvironmentFinding {
    pub(crate) fn new(server: &str, warning: EnvironmentWarning) -> Self {
        Self {
            server: server.to_owned(),
            warning,
        }
    }

    /// The address of the server, without user and password.
    pub fn server(&self) -> &str {
        &self.server
    }

    /// The warning.
    pub fn warning(&self) -> &EnvironmentWarning {
        &self.warning
    }
}

impl fmt::Display for EnvironmentFinding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.server, self.warning)
    }
}

/// A warning of the environment check, with the measured values. `Display` adds the next step. Later versions may add
/// warnings. [`EnvironmentFinding`] has an example.
///
/// ```
/// use leasehold::EnvironmentWarning;
///
/// let warning = EnvironmentWarning::Persistence { has_snapshots: Some(false) };
/// assert!(warning.to_string().ends_with("set `appendonly yes`, or fence writes"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum EnvironmentWarning {
    /// Redis may evict locks once it uses all of `maxmemory`. An evicted lock can have two holders.
    Eviction {
        /// The `maxmemory-policy`: any but `noeviction`.
        policy: String,
        /// `maxmemory` in bytes. 0 means no limit: Redis evicts keys only after a limit is set.
        max_memory: u64,
    },
    /// The append-only file is off: after a restart, locks are gone while their holders still run.
    Persistence {
        /// Whether Redis saves snapshots, which lack the latest locks. `None` if the check was refused.
        has_snapshots: Option<bool>,
    },
    /// The server is a replica, which accepts no locks.
    Replica {
        /// The address of its primary, if the server reports it.
        primary: Option<String>,
    },
    /// The server is a Sentinel, which stores no locks.
    Sentinel,
    /// The server is a node of a Cluster, but the client was made for a single server.
    ClusterNode,
    /// The server, or a proxy in front of it, refuses scripts.
    NoScripts {
        /// The reply to `EVAL`.
        reply: String,
    },
    /// The server is older than the oldest supported version.
    TooOld {
        /// Its name and version: `Redis 6.0.16`.
        version: String,
    },
    /// The version is not among those that the integration tests run on.
    Untested {
        /// Its name and version: `Redis 7.4.1`.
        version: String,
    },
    /// The table of tracked keys is small. Once it is full, Redis drops keys from it: holders and waiters get false
    /// notifications, or learn of a change late.
    TrackingTable {
        /// `tracking-table-max-keys`.
        max_keys: u64,
        /// The keys that the server tracks now, for all its clients.
        tracked_keys: u64,
    },
    /// The `command_timeout` is long for the `ttl`: after a renewal without a reply, too little time is left for
    /// another renewal.
    CommandTimeout {
        /// The client's `command_timeout`.
        command_timeout: Duration,
        /// The client's `ttl`. Locks with a ttl of their own are not checked.
        ttl: Duration,
        /// The longest `command_timeout` for this ttl.
        longest: Duration,
    },
    /// New connections to the address reach several servers in turn, as behind a load balancer or a host name with
    /// several addresses. A lock on one server is free on the others, so it can have several holders.
    SeveralServers {
        /// The `run_id` of each server that the check has reached, as `INFO server` shows it.
        run_ids: Vec<String>,
    },
    /// A command of the check was refused, mostly by an ACL.
    CommandRefused {
        /// The command that was refused: `INFO`, `CONFIG GET`, `CONFIG GET appendfsync`, `HELLO`, `SCRIPT LOAD` or
        /// `EVAL`.
        command: &'static str,
        /// The server's reply.
        reply: String,
    },
    /// `Builder::assume_durable_nodes` is set, but this node of a quorum loses data when it restarts. It may then grant
    /// a lock that is held.
    LosesData {
        /// The setting of Redis: `appendonly` or `appendfsync`.
        setting: &'static str,
        /// Its value.
        value: String,
    },
    /// This master of a Cluster, or this node of a quorum, could not be checked, but others could: at least one master,
    /// or a majority of the nodes.
    ServerNotChecked {
        /// The error of the check.
        reason: String,
    },
}

/// The oldest supported version of Redis.
const OLDEST: (u32, u32) = (6, 2);

/// The versions on which the integration tests run, as README.md and docs/redis.md list them.
const TESTED: &str =
    "Redis 6.2, Redis 7.0, Redis 8.0, Redis 8.6, Valkey 8.0, Valkey 8.1, Valkey 9.x";

impl EnvironmentWarning {
    /// The warning about a server with this name (`redis`, `valkey`) and version. `None` for a tested version.
    pub(crate) fn from_version(name: &str, version: &str) -> Option<Self> {
        let name = match name {
            "redis" => "Redis",
            "valkey" => "Valkey",
            other => other,
        };
        let shown = format!("{name} {version}");
        let mut numbers = version.split('.').map(|number| number.parse().ok());
        let numbers = numbers.next().flatten().zip(numbers.next().flatten());
        let is_redis = name == "Redis";
        if is_redis && numbers.is_some_and(|numbers: (u32, u32)| numbers < OLDEST) {
            return Some(Self::TooOld { version: shown });
        }
        let is_tested = numbers.is_some_and(|(major, minor)| {
            let exact = format!("{name} {major}.{minor}");
            let any_minor = format!("{name} {major}.x");
            TESTED
                .split(", ")
                .any(|tested| tested == exact || tested == any_minor)
        });
        (!is_tested).then_some(Self::Untested { version: shown })
    }

    /// The warning about a `command_timeout` that is too long for a second renewal. `None` if it is short enough.
    pub(crate) fn from_timeout(
        command_timeout: Duration,
        ttl: Duration,
        renew_ratio: f64,
    ) -> Option<Self> {
        let longest = validity(ttl).saturating_sub(ttl.mul_f64(renew_ratio)) / 2;
        (command_timeout > longest).then_some(Self::CommandTimeout {
            command_timeout,
            ttl,
            longest: Duration::from_millis(longest.as_millis().try_into().unwrap_or(u64::MAX)),
        })
    }

    /// The warning about a table for `max_keys` tracked keys (0 means unlimited) that has `tracked_keys` now. `None` if
    /// it is large enough.
    pub(crate) fn from_tracking(max_keys: u64, tracked_keys: u64) -> Option<Self> {
        let is_small = max_keys != 0 && max_keys < least_tracking_keys(tracked_keys);
        is_small.then_some(Self::TrackingTable {
            max_keys,
            tracked_keys,
        })
    }
}

/// The smallest `tracking-table-max-keys` without a warning: twice the keys that are tracked now, and 10,000 at least.
fn least_tracking_keys(tracked_keys: u64) -> u64 {
    tracked_keys.saturating_mul(2).max(10_000)
}

impl fmt::Display for EnvironmentWarning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Eviction {
                policy,
                max_memory: 0,
            } => write!(
                f,
                "`maxmemory-policy` is {policy}: Redis evicts locks as soon as `maxmemory` is set and used; set the \
                 policy to noeviction"
            ),
            Self::Eviction { policy, max_memory } => write!(
                f,
                "`maxmemory-policy` is {policy}: Redis evicts locks once it uses `maxmemory` ({max_memory} bytes), and \
                 a lock can have two holders then; set the policy to noeviction"
            ),
            Self::Persistence { has_snapshots } => {
                let what = missing_after_restart(*has_snapshots);
                write!(f, "{what} while their holders still run; set `appendonly yes`, or fence writes")
            }
            Self::Replica { primary } => {
                f.write_str("is a replica, which accepts no locks; use the URL of its primary")?;
                primary.iter().try_for_each(|primary| write!(f, ", {primary}"))
            }
            Self::Sentinel => f.write_str(
                "is a Sentinel, which stores no locks; use redis+sentinel://host:port/name, with the name of the group \
                 that it watches",
            ),
            Self::ClusterNode => f.write_str(
                "is a node of a Redis Cluster, which stores only a part of the keys; use redis+cluster://host:port",
            ),
            Self::NoScripts { reply } => write!(
                f,
                "refuses SCRIPT LOAD and EVAL ({reply}), and leasehold needs scripts; allow the user what docs/redis.md lists, \
                 or, if this is a proxy, use the URL of the server behind it"
            ),
            Self::TooOld { version } => {
                let (major, minor) = OLDEST;
                write!(f, "{version} is too old; use Redis {major}.{minor} or later, or Valkey")
            }
            Self::Untested { version } => write!(
                f,
                "{version} is not among the tested versions ({TESTED}); use one of them, or run the tests on it"
            ),
            Self::TrackingTable {
                max_keys,
                tracked_keys,
            } => write!(
                f,
                "`tracking-table-max-keys` is {max_keys}, and {tracked_keys} keys are tracked: once the table is full, \
                 losses are found late, and clients are notified although nothing changed; set it to {} at least",
                least_tracking_keys(*tracked_keys)
            ),
            Self::CommandTimeout {
                command_timeout,
                ttl,
                longest,
            } => write!(
                f,
                "`command_timeout` is {command_timeout:?}, and `ttl` is {ttl:?}: if a renewal gets no reply, the lock \
                 can be lost before the next one; use {longest:?} at most, or a longer ttl"
            ),
            Self::SeveralServers { run_ids } => write!(
                f,
                "leads to several servers in turn (`run_id` {}), and a lock on one of them is free on the others, so it \
                 can have several holders; use the address of one primary, or redis+sentinel:// or redis+cluster:// to \
                 have it found",
                run_ids.join(" and ")
            ),
            Self::CommandRefused { command, reply } => write_refused(f, command, reply),
            Self::LosesData { setting, value } => write!(
                f,
                "`{setting}` is {value}, and `assume_durable_nodes` is set: after a restart, this node may have lost locks, \
                 and grants them again; set `appendonly yes` and `appendfsync always`, or do not use `assume_durable_nodes`"
            ),
            // The text of the error contains the next step.
            Self::ServerNotChecked { reason } => write!(f, "was not checked: {reason}"),
        }
    }
}

/// The locks that are missing after a restart of a server without an append-only file.
fn missing_after_restart(has_snapshots: Option<bool>) -> &'static str {
    match has_snapshots {
        Some(true) => "only snapshots are saved: after a restart, all later locks are gone",
        Some(false) => "nothing is saved: after a restart, all locks are gone",
        None => "the append-only file is off: after a restart, locks are gone",
    }
}

/// Writes which check or which call fails, because `command` is refused with `reply`.
fn write_refused(f: &mut fmt::Formatter<'_>, command: &str, reply: &str) -> fmt::Result {
    let what = match command {
        "SCRIPT LOAD" => {
            return write!(
                f,
                "SCRIPT LOAD is refused ({reply}): the first call of each script sends its text; allow `script-cache` \
                 of `leasehold acl`"
            );
        }
        "EVAL" => {
            return write!(
                f,
                "EVAL is refused ({reply}): locks fail after SCRIPT FLUSH and after a fail-over; allow `locks` of \
                 `leasehold acl`"
            );
        }
        "INFO" => "eviction, persistence and the number of servers were not checked",
        "CONFIG GET" => "snapshots and the tracking table were not checked",
        "CONFIG GET appendfsync" => "`appendfsync` was not checked",
        _ => "the version and the role were not checked",
    };
    write!(
        f,
        "{what}: {command} is refused ({reply}); allow `environment-check` of `leasehold acl`"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_too_old_tested_or_untested() {
        let old = |version: &str| {
            Some(EnvironmentWarning::TooOld {
                version: version.to_owned(),
            })
        };
        let untested = |version: &str| {
            Some(EnvironmentWarning::Untested {
                version: version.to_owned(),
            })
        };
        for (name, version, expected) in [
            ("redis", "6.2.14", None),
            ("redis", "7.0.15", None),
            ("redis", "8.0.6", None),
            ("redis", "8.6.3", None),
            ("valkey", "8.1.1", None),
            ("valkey", "9.4.0", None),
            ("redis", "6.0.16", old("Redis 6.0.16")),
            ("redis", "5.0.0", old("Redis 5.0.0")),
            ("redis", "7.4.1", untested("Redis 7.4.1")),
            ("redis", "10.0.0", untested("Redis 10.0.0")),
            ("redis", "60.2.0", untested("Redis 60.2.0")),
            ("valkey", "7.2.5", untested("Valkey 7.2.5")),
            ("dragonfly", "1.2", untested("dragonfly 1.2")),
            ("redis", "unstable", untested("Redis unstable")),
        ] {
            let found = EnvironmentWarning::from_version(name, version);
            assert_eq!(found, expected, "{name} {version}");
        }
    }

    #[test]
    fn the_docs_list_the_tested_versions() {
        let words = include_str!("../../docs/redis.md").split_whitespace();
        let text = words.collect::<Vec<_>>().join(" ");
        assert!(text.contains(TESTED), "docs/redis.md");
    }

    #[test]
    fn a_timeout_leaves_time_for_a_second_renewal() {
        let secs = Duration::from_secs;
        let of = |timeout, ttl, ratio| EnvironmentWarning::from_timeout(timeout, ttl, ratio);
        assert_eq!(of(secs(1), secs(30), 1.0 / 3.0), None);
        assert_eq!(of(secs(1), secs(10), 0.75), None);
        assert!(of(secs(1), secs(10), 0.8).is_some());
        let Some(EnvironmentWarning::CommandTimeout { longest, .. }) = of(secs(4), secs(10), 0.5)
        else {
            panic!("no warning");
        };
        assert_eq!(longest, Duration::from_millis(2449));
        assert_eq!(of(longest, secs(10), 0.5), None);
    }

    #[test]
    fn a_tracking_table_needs_twice_its_keys() {
        let of = EnvironmentWarning::from_tracking;
        assert_eq!(of(0, 5_000_000), None);
        assert_eq!(of(1_000_000, 500_000), None);
        assert!(of(1_000_000, 500_001).is_some());
        assert_eq!(of(10_000, 0), None);
        assert!(of(9_999, 0).is_some());
    }
}

//! The settings of a client, with defaults and bounds.

pub mod credentials;
pub mod key;
pub mod other_library;
#[cfg(feature = "tls")]
pub mod tls;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use crate::config::key::{KeyLayout, RESERVED};
use crate::config::other_library::OtherLibrary;
use crate::report::error::Error;
use crate::report::event::EventHandler;
use crate::util::clock::MonotonicTime;
use crate::util::id::random_number;

/// The default prefix of the keys.
pub const DEFAULT_PREFIX: &str = "leasehold:";
/// The shortest ttl. A shorter ttl could end before the reply to the request arrives.
pub const MIN_TTL: Duration = Duration::from_millis(10);
/// The greatest value of `max_ttl`.
pub const MAX_TTL: Duration = Duration::from_secs(24 * 60 * 60);
/// The default of `max_ttl` on a quorum: the default ttl. A node that may have lost its data abstains for `max_ttl`.
pub const QUORUM_MAX_TTL: Duration = Duration::from_secs(30);
/// The greatest value of `max_key_bytes`.
const MAX_KEY_BYTES: usize = 64 * 1024;
const MAX_PREFIX_BYTES: usize = 256;
const MAX_PIPELINES: usize = 4;
const MAX_TRANSACTIONS: usize = 64;
/// The greatest value of `max_hand_offs`: a fencing token counts hand-offs with ten bits.
const MAX_HAND_OFFS: u32 = 1023;
/// The default limit for a reply with a caller's values, in bytes.
pub const DEFAULT_MAX_REPLY: usize = 4 * 1024 * 1024;
/// The bounds of `max_reply_bytes`. Redis' longest string has 512 MiB.
const REPLY_BYTES: std::ops::RangeInclusive<usize> = 256 * 1024..=512 * 1024 * 1024;
const MAX_TIMEOUT: Duration = Duration::from_secs(60);
/// The shortest `max_connection_idle`. A thread of a busy machine may stand still for that long between two requests.
const MIN_IDLE: Duration = Duration::from_millis(100);
/// The shortest `max_connection_age`.
const MIN_AGE: Duration = Duration::from_secs(1);

/// How often, and for how long, a lock is handed off within the client before other clients get it.
#[derive(Clone, Copy, Debug)]
pub struct HandOffs {
    pub count: u32,
    pub time: Duration,
}

/// How many replicas have to acknowledge a lock, and within which time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Replicas {
    /// At least one.
    pub count: u32,
    pub timeout: Duration,
}

impl Replicas {
    /// `None` for a count of zero.
    pub fn new(count: u32, timeout: Duration) -> Option<Self> {
        (count > 0).then_some(Self { count, timeout })
    }

    /// The acknowledgements that two requests need from one shared `WAIT`: the greater count and the longer time.
    pub fn and(self, other: Self) -> Self {
        Self {
            count: self.count.max(other.count),
            timeout: self.timeout.max(other.timeout),
        }
    }
}

/// How long a connection may be idle before its next use, and for how long it is used in all.
#[derive(Clone, Copy, Debug)]
pub struct ConnectionLimits {
    pub max_idle: Duration,
    pub max_age: Duration,
}

impl Default for ConnectionLimits {
    fn default() -> Self {
        Self {
            // Azure forgets connections after four minutes of silence; most other networks take longer.
            max_idle: Duration::from_secs(120),
            max_age: Duration::from_secs(30 * 60),
        }
    }
}

impl ConnectionLimits {
    /// When a connection that is made at `now` has to be replaced: at a random time in the last quarter of `max_age`,
    /// so that the connections of many clients are not replaced at the same time.
    pub fn replace_at(&self, now: MonotonicTime) -> MonotonicTime {
        let part = u32::try_from(random_number() % 256).unwrap_or_default();
        now.after(self.max_age - self.max_age / 1024 * part)
    }
}

/// The settings of a client. [`Builder`](crate::Builder) sets them, and `validate` checks them.
#[derive(Clone)]
pub struct Config {
    pub prefix: String,
    /// Follows from the topology of the servers.
    pub layout: KeyLayout,
    pub ttl: Duration,
    pub max_ttl: Duration,
    pub renew_ratio: f64,
    pub max_hold: Option<Duration>,
    pub max_key_bytes: usize,
    pub max_reply_bytes: usize,
    pub connect_timeout: Duration,
    pub command_timeout: Duration,
    pub outage_timeout: Duration,
    pub connection_limits: ConnectionLimits,
    pub pipelines: usize,
    pub max_transactions: usize,
    pub hand_offs: HandOffs,
    pub replicas: Option<Replicas>,
    /// The library whose locks the client also excludes and waits for.
    pub other_library: Option<OtherLibrary>,
    pub environment_check: bool,
    pub assume_durable_nodes: bool,
    pub event_handler: Option<Arc<dyn EventHandler>>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            prefix: DEFAULT_PREFIX.to_owned(),
            layout: KeyLayout::Single,
            ttl: Duration::from_secs(30),
            max_ttl: MAX_TTL,
            renew_ratio: 1.0 / 3.0,
            max_hold: None,
            max_key_bytes: 1024,
            max_reply_bytes: DEFAULT_MAX_REPLY,
            connect_timeout: Duration::from_secs(1),
            command_timeout: Duration::from_secs(1),
            outage_timeout: Duration::from_secs(5),
            connection_limits: ConnectionLimits::default(),
            pipelines: 2,
            max_transactions: 4,
            hand_offs: HandOffs {
                count: 256,
                time: Duration::from_millis(5),
            },
            replicas: None,
            other_library: None,
            environment_check: true,
            assume_durable_nodes: false,
            event_handler: None,
        }
    }
}

impl Config {
    /// Checks that all settings are within their bounds.
    pub fn validate(&self) -> Result<(), Error> {
        // Prefixes do not contain `~`, so the prefix of a key of the library is the part before the first `~`.
        let is_bad = |c: char| c.is_control() || c == RESERVED;
        if self.prefix.len() > MAX_PREFIX_BYTES || self.prefix.contains(is_bad) {
            let wanted = format!(
                "at most {MAX_PREFIX_BYTES} bytes without control characters and {RESERVED:?}"
            );
            let start: String = self.prefix.chars().take(32).collect();
            let given = format!("{start:?} ({} bytes)", self.prefix.len());
            return Err(Error::invalid("prefix", &wanted, given));
        }
        duration("max_ttl", self.max_ttl, MIN_TTL, MAX_TTL)?;
        self.check_ttl("ttl", self.ttl)?;
        self.max_hold.map_or(Ok(()), check_max_hold)?;
        if !(0.05..=0.9).contains(&self.renew_ratio) {
            return Err(Error::invalid(
                "renew_ratio",
                "0.05 to 0.9",
                self.renew_ratio,
            ));
        }
        let shortest = Duration::from_millis(1);
        let [connect, command] = [self.connect_timeout, self.command_timeout];
        duration("connect_timeout", connect, shortest, MAX_TIMEOUT)?;
        duration("command_timeout", command, shortest, MAX_TIMEOUT)?;
        let ConnectionLimits { max_idle, max_age } = self.connection_limits;
        duration("max_connection_idle", max_idle, MIN_IDLE, Duration::MAX)?;
        duration("max_connection_age", max_age, MIN_AGE, Duration::MAX)?;
        let hand_offs = self.hand_offs.count as usize;
        for (field, count, bounds) in [
            ("max_key_bytes", self.max_key_bytes, 1..=MAX_KEY_BYTES),
            ("max_reply_bytes", self.max_reply_bytes, REPLY_BYTES),
            ("pipelines", self.pipelines, 1..=MAX_PIPELINES),
            (
                "max_transactions",
                self.max_transactions,
                1..=MAX_TRANSACTIONS,
            ),
            ("max_hand_offs", hand_offs, 0..=MAX_HAND_OFFS as usize),
        ] {
            if !bounds.contains(&count) {
                let wanted = format!("{} to {}", bounds.start(), bounds.end());
                return Err(Error::invalid(field, &wanted, count));
            }
        }
        self.check_replicas(self.replicas)
    }

    /// Checks the time-out for acknowledgements: at most half of the command time-out, because a request may first wait
    /// for the acknowledgements of an earlier batch. Refuses zero, with which `WAIT` waits without a limit.
    pub fn check_replicas(&self, replicas: Option<Replicas>) -> Result<(), Error> {
        let Some(Replicas { timeout, .. }) = replicas else {
            return Ok(());
        };
        let (shortest, longest) = (Duration::from_millis(1), self.command_timeout / 2);
        if (shortest..=longest).contains(&timeout) {
            return Ok(());
        }
        let command_timeout = self.command_timeout;
        let wanted = format!(
            "{shortest:?} to {longest:?}, half of the `command_timeout` of {command_timeout:?}"
        );
        let given = format_args!("{timeout:?}");
        Err(Error::invalid("the timeout of `replicas`", &wanted, given))
    }

    pub fn check_ttl(&self, field: &str, ttl: Duration) -> Result<(), Error> {
        let longest = self.max_ttl;
        if longest < MAX_TTL && ttl > longest {
            let wanted = format!("{MIN_TTL:?} to {longest:?} (`max_ttl`)");
            return Err(Error::invalid(field, &wanted, format_args!("{ttl:?}")));
        }
        duration(field, ttl, MIN_TTL, longest)
    }
}

pub fn check_max_hold(max_hold: Duration) -> Result<(), Error> {
    duration("max_hold", max_hold, MIN_TTL, Duration::MAX)
}

fn duration(field: &str, given: Duration, min: Duration, max: Duration) -> Result<(), Error> {
    if (min..=max).contains(&given) {
        return Ok(());
    }
    let wanted = if max == Duration::MAX {
        format!("at least {min:?}")
    } else {
        format!("{min:?} to {max:?}")
    };
    Err(Error::invalid(field, &wanted, format_args!("{given:?}")))
}

impl fmt::Debug for Config {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Config")
            .field("prefix", &self.prefix)
            .field("ttl", &self.ttl)
            .field("max_hold", &self.max_hold)
            .field("pipelines", &self.pipelines)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(change: impl FnOnce(&mut Config)) -> String {
        let mut config = Config::default();
        change(&mut config);
        config.validate().unwrap_err().to_string()
    }

    #[test]
    fn the_defaults_are_valid() {
        Config::default().validate().unwrap();
    }

    #[test]
    fn connections_of_the_same_age_are_replaced_at_different_times() {
        let now = MonotonicTime::now();
        let ends_of = |max_age| {
            let limits = ConnectionLimits {
                max_age,
                ..ConnectionLimits::default()
            };
            let mut ends = [(); 100].map(|()| limits.replace_at(now));
            ends.sort();
            ends
        };
        let hour = Duration::from_secs(3600);
        let ends = ends_of(hour);
        assert!(ends[0] >= now.after(hour * 3 / 4) && ends[99] <= now.after(hour));
        assert!(ends[99].since(ends[0]) > hour / 8);
        assert!(ends_of(Duration::MAX)[0] > now.after(1000 * 24 * hour));
    }

    #[test]
    fn merged_needs_have_the_greater_count_and_time() {
        let needs = |count, ms| Replicas::new(count, Duration::from_millis(ms)).unwrap();
        assert_eq!(needs(1, 20).and(needs(2, 10)), needs(2, 20));
        assert_eq!(needs(2, 10).and(needs(1, 20)), needs(2, 20));
    }

    #[test]
    fn errors_name_the_field_and_its_value() {
        let second = Duration::from_secs(1);
        let cases = [
            (refused(|c| c.ttl = Duration::ZERO), "ttl must be 10ms"),
            (refused(|c| c.ttl = Duration::from_micros(900)), "not 900µs"),
            (refused(|c| c.ttl = 86_401 * second), "not 86401s"),
            (refused(|c| c.max_ttl = second), "ttl must be 10ms to 1s"),
            (refused(|c| c.renew_ratio = f64::NAN), "renew_ratio"),
            (refused(|c| c.renew_ratio = 0.95), "not 0.95"),
            (refused(|c| c.max_hold = Some(Duration::ZERO)), "max_hold"),
            (refused(|c| c.max_key_bytes = 0), "max_key_bytes"),
            (
                refused(|c| c.max_reply_bytes = 256 * 1024 - 1),
                "max_reply_bytes",
            ),
            (
                refused(|c| c.connect_timeout = Duration::ZERO),
                "connect_timeout",
            ),
            (
                refused(|c| c.command_timeout = 61 * second),
                "command_timeout",
            ),
            (
                refused(|c| c.connection_limits.max_idle = Duration::ZERO),
                "max_connection_idle must be at least 100ms, not 0ns",
            ),
            (
                refused(|c| c.connection_limits.max_age = Duration::from_millis(999)),
                "max_connection_age must be at least 1s, not 999ms",
            ),
            (
                refused(|c| c.pipelines = 0),
                "pipelines must be 1 to 4, not 0",
            ),
            (
                refused(|c| c.max_transactions = 0),
                "max_transactions must be 1 to",
            ),
            (refused(|c| c.max_transactions = 65), "1 to 64, not 65"),
            (
                refused(|c| c.replicas = Replicas::new(1, second)),
                "the timeout of `replicas` must be 1ms to 500ms, half of the `command_timeout` of 1s, not 1s",
            ),
            (
                refused(|c| c.replicas = Replicas::new(1, Duration::from_micros(999))),
                "not 999µs",
            ),
            (refused(|c| c.prefix = "a\n".to_owned()), "prefix"),
            (refused(|c| c.prefix = "a~".to_owned()), "prefix"),
        ];
        for (message, part) in cases {
            assert!(message.contains(part), "{message:?} lacks {part:?}");
        }
    }
}

//! The data of a grant, and the times that follow from it: how long the lease is valid, and when it is renewed. Reads
//! no clock.

use std::sync::Arc;
use std::time::Duration;

use crate::command::Mode;
use crate::command::value::hand_offs_of;
use crate::config::Replicas;
use crate::config::key::Key;
use crate::util::clock::MonotonicTime;
use crate::util::id::LeaseId;
use crate::util::sync::Mutex;

/// The options of a request for a lock. A lease is handed off only to a waiter with equal options.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    pub ttl: Duration,
    /// Time between renewals; `None` for a lease that is not renewed.
    pub renew_every: Option<Duration>,
    pub max_hold: Option<Duration>,
    /// Whether the lock has a check (`renew_while`), which runs before each renewal. Such a lease is never handed off.
    pub checked: bool,
    /// The replicas that have to acknowledge each grant and each renewal.
    pub replicas: Option<Replicas>,
    /// How the lease holds its key.
    pub mode: Mode,
    /// How long the key stays taken after its grant, even if the lease is released earlier. Zero if a release frees the
    /// key at once.
    pub min_hold: Duration,
}

impl Options {
    /// The ttl of a held lease: `ttl`, but at most `max_hold`.
    pub fn held_ttl(&self) -> Duration {
        self.max_hold.map_or(self.ttl, |hold| hold.min(self.ttl))
    }

    /// The ttl of a grant in Redis: at least `min_hold`, since a crash of the holder must not free the key earlier.
    pub fn first_ttl(&self) -> Duration {
        self.held_ttl().max(self.min_hold)
    }

    /// Whether a hold with these options may end by itself.
    pub fn has_limits(&self) -> bool {
        self.renew_every.is_none() || self.max_hold.is_some() || self.checked
    }

    /// Options with the same first ttl, with which a lease is renewed for as long as it is held.
    pub fn without_limits(self) -> Self {
        if !self.has_limits() {
            return self;
        }
        let ttl = self.first_ttl();
        let renew_every = self.renew_every.unwrap_or(ttl).min(ttl / 3);
        Self {
            ttl,
            renew_every: Some(renew_every),
            max_hold: None,
            checked: false,
            ..self
        }
    }

    /// When the last tenth of `max_hold` begins, for a hold that began at `since`.
    pub fn hold_warning_at(&self, since: MonotonicTime) -> Option<MonotonicTime> {
        self.max_hold.map(|hold| since.after(hold - hold / 10))
    }
}

#[cfg(test)]
impl Options {
    /// The options of tests and models that need no special options.
    pub const USUAL: Self = Self {
        ttl: Duration::from_secs(30),
        renew_every: Some(Duration::from_secs(10)),
        max_hold: None,
        checked: false,
        replicas: None,
        mode: Mode::Exclusive,
        min_hold: Duration::ZERO,
    };
}

/// The options of the latest request. Leases that are requested one after another with equal options share one copy.
#[derive(Default)]
pub struct SharedOptions(Mutex<Option<Arc<Options>>>);

impl SharedOptions {
    /// Returns a copy of `options`. If they are equal to those of the previous call, returns the same copy.
    pub fn share(&self, options: Options) -> Arc<Options> {
        let mut last = self.0.lock();
        match &*last {
            Some(same) if **same == options => Arc::clone(same),
            _ => Arc::clone(last.insert(Arc::new(options))),
        }
    }
}

/// A lock as Redis granted it.
#[derive(Clone, Debug)]
pub struct Grant {
    pub key: Key,
    pub id: LeaseId,
    pub token: u64,
    /// Whether the lock's value in Redis contains the token.
    pub is_token_in_value: bool,
    pub options: Arc<Options>,
    /// When this client asked for the lock, before it sent the first byte. After a hand-off: when the lock was handed
    /// off.
    pub asked_at: MonotonicTime,
    /// When this client got the lock. A hand-off does not change this time.
    pub since: MonotonicTime,
}

/// The time between two renewals is divided into this many steps, and each renewal is moved to the start of its step.
/// So renewals of several leases fall together: they share a round trip, and wake the watchdog once.
const RENEWAL_STEPS: u32 = 128;
/// The longest step. With longer steps, a client with many leases would renew too many of them at one moment.
const LONGEST_RENEWAL_STEP: Duration = Duration::from_millis(10);
/// If many leases were renewed together, each of their next renewals moves earlier by a random time: at most this part
/// (one sixteenth) of the time between renewals. This spreads the renewals, and causes 3 % more of them. A larger part
/// would spread them sooner, but cause more requests.
const SPREAD: u32 = 16;

fn renewal_step(every: Duration) -> Duration {
    (every / RENEWAL_STEPS).min(LONGEST_RENEWAL_STEP)
}

#[cfg(test)]
impl Grant {
    /// A grant for tests and models, requested and granted at `now`.
    pub fn usual(key: Key, now: MonotonicTime) -> Self {
        Self {
            key,
            id: LeaseId::random(),
            token: 7,
            is_token_in_value: true,
            options: Arc::new(Options::USUAL),
            asked_at: now,
            since: now,
        }
    }
}

impl Grant {
    /// The ttl on which the holder relies.
    pub fn ttl(&self) -> Duration {
        self.options.held_ttl()
    }

    /// When `max_hold` ends the hold, however often the lease is renewed.
    pub fn hold_until(&self) -> Option<MonotonicTime> {
        let max_hold = self.options.max_hold;
        max_hold.map(|hold| self.asked_at.after(hold))
    }

    /// How often the lock was handed off within the client since Redis granted it.
    pub fn hand_offs(&self) -> u32 {
        hand_offs_of(self.token)
    }

    /// The earlier of `time` and the end of `max_hold`.
    pub fn at_most_hold_until(&self, time: MonotonicTime) -> MonotonicTime {
        self.hold_until().map_or(time, |until| time.min(until))
    }

    /// Whether a ttl that was asked for at `asked_at` reaches the end of `max_hold`.
    pub fn is_capped(&self, asked_at: MonotonicTime, ttl: Duration) -> bool {
        self.hold_until()
            .is_some_and(|until| asked_at.after(ttl) >= until)
    }

    /// The time of the next renewal, after a grant or renewal that was requested at `asked_at`. `None` if leases with
    /// these options are not renewed, or if the lease is `capped`: its ttl reaches the end of `max_hold`.
    pub fn next_renewal(&self, asked_at: MonotonicTime, capped: bool) -> Option<MonotonicTime> {
        if capped {
            return None;
        }
        let every = self.options.renew_every?;
        Some(asked_at.after(every).rounded_down(renewal_step(every)))
    }

    /// The time of a renewal that is due at `at` together with many others, moved earlier. `jitter`, from 0.0 to 1.0,
    /// differs from lease to lease, so the renewals spread.
    pub fn spread_earlier(&self, at: MonotonicTime, jitter: f64) -> MonotonicTime {
        let every = self.options.renew_every.unwrap_or_default();
        let earlier = (every / SPREAD).mul_f64(jitter);
        at.before(earlier).rounded_down(renewal_step(every))
    }
}

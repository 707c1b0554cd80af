//! The grant of a grant, and what follows from them: how long it may be believed, when it is renewed.
//! Plain data; knows no clock.

use std::sync::Arc;
use std::time::Duration;

use crate::store::hand_offs_of;
use crate::util::clock::MonotonicTime;
use crate::util::id::LeaseId;
use crate::util::key::Key;
use crate::util::sync::Mutex;

/// What a lock is asked for. Only between equal options does a lease change hands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Options {
    pub(crate) ttl: Duration,
    /// Pause between renewals; none for a lease that is not renewed.
    pub(crate) renew_every: Option<Duration>,
    pub(crate) max_hold: Option<Duration>,
    /// Its caller's check is asked before each renewal: such a lease never changes hands.
    pub(crate) checked: bool,
}

impl Options {
    /// The ttl to ask for: never beyond `max_hold`.
    pub(crate) fn first_ttl(&self) -> Duration {
        self.max_hold.map_or(self.ttl, |hold| hold.min(self.ttl))
    }

    /// When the last tenth begins of a hold that began at `since`.
    pub(super) fn hold_warning_at(&self, since: MonotonicTime) -> Option<MonotonicTime> {
        self.max_hold.map(|hold| since.after(hold - hold / 10))
    }
}

#[cfg(test)]
impl Options {
    /// What tests and models ask for, where they do not say otherwise.
    pub(crate) const USUAL: Self = Self {
        ttl: Duration::from_secs(30),
        renew_every: Some(Duration::from_secs(10)),
        max_hold: None,
        checked: false,
    };
}

/// What leases are asked for, kept once for all that are asked for the same in a row.
#[derive(Default)]
pub(crate) struct SharedOptions(Mutex<Option<Arc<Options>>>);

impl SharedOptions {
    pub(crate) fn share(&self, options: Options) -> Arc<Options> {
        let mut last = self.0.lock();
        match &*last {
            Some(same) if **same == options => Arc::clone(same),
            _ => Arc::clone(last.insert(Arc::new(options))),
        }
    }
}

/// What was granted, and on which grant.
#[derive(Clone, Debug)]
pub(crate) struct Grant {
    pub(crate) key: Key,
    pub(crate) id: LeaseId,
    pub(crate) token: u64,
    pub(crate) options: Arc<Options>,
    /// When it was asked for: before the first byte was sent; or handed off within the client.
    pub(crate) asked_at: MonotonicTime,
    /// Since when it is the client's.
    pub(crate) since: MonotonicTime,
}

/// Renewals come a little early, at the beginning of one of so many parts of their pause, or of a part as short
/// as this: those of many leases then share round trips instead of waking the watchdog one by one. (Of very
/// many, a longer part would be a heap.)
const GRAINS: u32 = 128;
const LONGEST_GRAIN: Duration = Duration::from_millis(10);
/// The part of their pause over which renewals are spread that come in crowds. More would take the crowd apart
/// sooner and renew more often; this costs 3 %.
const SPREAD: u32 = 16;

fn grain(every: Duration) -> Duration {
    (every / GRAINS).min(LONGEST_GRAIN)
}

/// How long a holder may believe in a ttl of Redis: less what two clocks may drift apart meanwhile
/// and what Redis may round (the allowance is Redlock's: one percent and 2 ms).
pub(super) fn validity(ttl: Duration) -> Duration {
    let drift = ttl / 100 + Duration::from_millis(2);
    ttl.saturating_sub(drift)
}

#[cfg(test)]
impl Grant {
    /// Those of a lock that was asked for and granted at `now`, where tests and models do not say otherwise.
    pub(crate) fn usual(key: Key, now: MonotonicTime) -> Self {
        Self {
            key,
            id: LeaseId::random(),
            token: 7,
            options: Arc::new(Options::USUAL),
            asked_at: now,
            since: now,
        }
    }
}

impl Grant {
    /// The full ttl.
    pub(crate) fn ttl(&self) -> Duration {
        self.options.first_ttl()
    }

    /// From which moment it may not be held any more, whatever is renewed.
    pub(crate) fn hold_until(&self) -> Option<MonotonicTime> {
        let max_hold = self.options.max_hold;
        max_hold.map(|hold| self.asked_at.after(hold))
    }

    /// How often it was handed off within the client.
    pub(crate) fn hand_offs(&self) -> u32 {
        hand_offs_of(self.token)
    }

    pub(super) fn bounded(&self, moment: MonotonicTime) -> MonotonicTime {
        self.hold_until().map_or(moment, |until| moment.min(until))
    }

    pub(super) fn is_capped(&self, asked_at: MonotonicTime, ttl: Duration) -> bool {
        self.hold_until()
            .is_some_and(|until| asked_at.after(ttl) >= until)
    }

    /// When to renew after a grant or renewal asked for at `asked_at`; never once capped, since
    /// nothing could be gained.
    pub(super) fn renewal_after(
        &self,
        asked_at: MonotonicTime,
        capped: bool,
    ) -> Option<MonotonicTime> {
        if capped {
            return None;
        }
        let every = self.options.renew_every?;
        Some(asked_at.after(every).rounded_down(grain(every)))
    }

    /// When to renew instead of `at`, if crowds are renewed then: earlier, by a part of the pause that is this
    /// lease's own. So each has a pause of its own, and those of a crowd drift apart.
    pub(super) fn spread(&self, at: MonotonicTime) -> MonotonicTime {
        let every = self.options.renew_every.unwrap_or_default();
        let earlier = (every / SPREAD).mul_f64(self.id.jitter());
        at.before(earlier).rounded_down(grain(every))
    }
}

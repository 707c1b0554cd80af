//! The conversion of a lease: an upgrade replaces a reader's lease by a writer's lease, and a downgrade does the
//! opposite. The new lease has an id and a token of its own.
//!
//! A conversion counts as a change of the ttl: while it is under way, the client does not renew the old lease or hand
//! it off, and readers do not join it. Until the reply comes, reports that the key does not contain the old lease have
//! no effect. If the validity ends before the reply, the old lease is lost, and the new lease is not used.

use std::sync::Arc;
use std::time::Duration;

use crate::lease::{Extras, Grant, Lease, LeaseRemains, Phase, State, TRACK_AFTER};
use crate::util::clock::MonotonicTime;

impl Lease {
    /// Begins a conversion. If another change of the ttl is under way, waits for its end. Returns false if that change
    /// has not ended at `deadline`, or if the lease has ended.
    pub fn begin_conversion(
        &self,
        deadline: MonotonicTime,
        clock: impl Fn() -> MonotonicTime,
    ) -> bool {
        let state = self.lock_for_ttl_change(deadline, clock);
        state.map(|mut state| state.is_converting = true).is_some()
    }

    /// The ttl to ask for: the full ttl, or the rest of the validity if that is longer or the lease is not renewed.
    pub fn conversion_ttl(&self, now: MonotonicTime) -> Duration {
        let is_renewed = self.grant.options.renew_every.is_some() && !self.is_renewal_stopped();
        let ttl = match is_renewed {
            true => self.renewal_ttl(now),
            false => Duration::ZERO,
        };
        self.at_least_validity(ttl, now)
    }

    /// Ends a conversion that Redis has refused: the lease stays held. Returns true if the key was reported not to
    /// contain the lease during the conversion. The caller then has to ask Redis.
    #[must_use]
    pub fn end_conversion(&self) -> bool {
        let mut state = self.state.lock();
        (state.ttl_changing, state.is_converting) = (false, false);
        // If a renewal became due during the conversion, its time has passed, so its new timer fires at once.
        state.renewal_due = false;
        state.notify_ttl_change_ended();
        let extras = state.extras.as_mut();
        extras.is_some_and(|extras| std::mem::take(&mut extras.was_reported_missing))
    }

    /// Ends this lease after Redis has confirmed its conversion, and returns the new lease with the id, the token and
    /// the mode in `grant`. The check, the end of `max_hold` and a stop of the renewal pass to the new lease; listeners
    /// do not. Returns `None` if this lease had ended before.
    pub fn convert(
        &self,
        grant: Grant,
        now: MonotonicTime,
        asked_at: MonotonicTime,
        ttl: Duration,
    ) -> Option<(Arc<Self>, LeaseRemains)> {
        let mut state = self.lock_and_expire(now);
        (state.ttl_changing, state.is_converting) = (false, false);
        state.notify_ttl_change_ended();
        if state.phase != Phase::Held {
            return None;
        }
        self.record_ttl(&mut state, now, asked_at, ttl);
        state.phase = Phase::Released;
        let mut detached = state.detach();
        let old = state.extras.as_mut();
        let (warn_at, stopped, checking) = old.map_or((None, None, false), |extras| {
            let stopped = extras.renewal_stopped.take();
            (extras.warn_at.take(), stopped, extras.checking)
        });
        let mut next = State {
            capped: state.capped,
            renew_at: state.renew_at,
            track_at: Some(now.after(TRACK_AFTER)),
            others_queued: true,
            extras: Extras::new_if_needed(detached.check.take(), warn_at),
            ..State::held(state.valid_until, state.key_until)
        };
        if checking || stopped.is_some() {
            let extras = next.extras();
            (extras.checking, extras.renewal_stopped) = (checking, stopped);
        }
        let next = Arc::new(Self::with_state(grant, Arc::clone(&self.callbacks), next));
        if checking {
            state.extras().converted_to = Some(Arc::downgrade(&next));
        }
        Some((next, detached))
    }
}

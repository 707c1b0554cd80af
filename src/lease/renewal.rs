//! How a lease is kept: when it is to be looked at, and the changes of its ttl, one at a time. Ends no
//! lease and knows no timer.

use std::sync::Arc;
use std::time::Duration;

use crate::lease::grant::validity;
use crate::lease::{Check, Lease, Phase, State, TimerNote};
use crate::loss::LossReason;
use crate::util::clock::MonotonicTime;
use crate::util::sync::Condvar;

/// What is to be done about a lease at a moment.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Due {
    /// Nothing, ever: it is over.
    Over,
    /// Renewal, watching, a warning, or nothing; and another look at `next`, whatever becomes of that.
    Held {
        renew: bool,
        watch: bool,
        warn: bool,
        next: MonotonicTime,
    },
}

impl Lease {
    /// What is due now. `reschedule` is called under the lease's lock, with the timer there may be and the
    /// moment of the next look, so that a release either finds the timer or keeps it from being set.
    /// It returns nothing when there are no timers any more.
    pub(crate) fn due(
        &self,
        now: MonotonicTime,
        reschedule: impl FnOnce(Option<TimerNote>, MonotonicTime) -> Option<TimerNote>,
    ) -> Due {
        let mut state = self.at(now);
        if state.phase != Phase::Held {
            return Due::Over;
        }
        let mut renew = !state.renewal_due && state.renew_at.is_some_and(|at| at <= now);
        state.renewal_due |= renew;
        if let Some(extras) = state
            .extras
            .as_mut()
            .filter(|extras| renew && extras.check.is_some())
        {
            // One whose check has not answered yet is not asked again.
            renew = !std::mem::replace(&mut extras.checking, true);
        }
        // One for which there was no room is offered again with each renewal.
        let again = renew && state.track_at.is_none() && !state.tracked;
        let watch = state.track_at.take_if(|at| *at <= now).is_some() || again;
        let extras = state.extras.as_mut();
        let warn = extras.is_some_and(|extras| extras.warn_at.take_if(|at| *at <= now).is_some());
        let next = state.next_timer();
        state.timer = reschedule(state.timer, next);
        Due::Held {
            renew,
            watch,
            warn,
            next,
        }
    }

    /// What `max_hold` leaves of the hold; nothing without one, or when it is over. Notices no loss.
    pub(crate) fn hold_left(&self, now: MonotonicTime) -> Option<Duration> {
        let until = self.grant.hold_until()?;
        let state = self.state.lock();
        // The last of its ttls ends a little before, by the allowance for drift.
        let until = if state.capped {
            state.valid_until
        } else {
            until
        };
        let is_live = state.phase == Phase::Held && now < state.valid_until;
        is_live.then(|| until.since(now))
    }

    /// Notes that the key is tracked, if `enlist` says so; it is not asked once the lease is over.
    pub(crate) fn watch(&self, enlist: impl FnOnce() -> bool) {
        let mut state = self.state.lock();
        if state.phase == Phase::Held {
            state.tracked = enlist();
            // TrackedKey early, where a notification connection is new: its timer asks for no second look.
            if state.tracked {
                state.track_at = None;
            }
        }
    }

    /// Notes that its key is to be read again at `at`, if the lease is still held then. Sets no timer.
    pub(crate) fn track_again(&self, at: MonotonicTime) {
        self.state.lock().track_at = Some(at);
    }

    /// Replaces the timer by one for the next look, if the lease is still held. False if it is and
    /// there are no timers any more.
    pub(crate) fn reschedule(
        &self,
        reschedule: impl FnOnce(Option<TimerNote>, MonotonicTime) -> Option<TimerNote>,
    ) -> bool {
        let mut state = self.state.lock();
        if state.phase != Phase::Held {
            return true;
        }
        let next = state.next_timer();
        state.timer = reschedule(state.timer, next);
        state.timer.is_some()
    }

    /// Lets the validity end: it is not renewed from now on, only extended by its owner, and lost for
    /// `reason` then. The first reason counts.
    pub(crate) fn let_expire(&self, reason: LossReason) {
        let mut state = self.state.lock();
        state.renew_at = None;
        state.extras().ending.get_or_insert(reason);
    }

    /// Whether its validity is to end: it is not renewed any more.
    pub(crate) fn is_let_expire(&self) -> bool {
        self.state.lock().ending().is_some()
    }

    /// Redis was found to have its key until then.
    pub(crate) fn key_lives(&self, until: MonotonicTime) {
        let mut state = self.state.lock();
        state.key_until = state.key_until.max(until);
    }

    /// Asks its check, on this thread, whether it is to be renewed now; once that says no, never
    /// again.
    pub(crate) fn may_be_renewed(&self) -> bool {
        // Nothing once the lease is over, and nothing comes of a renewal then.
        let check = self.state.lock().extras().check.clone();
        let may = check.is_none_or(Check::into_answer);
        if !may {
            self.let_expire(LossReason::NotRenewed);
        }
        self.state.lock().extras().checking = false;
        may
    }

    /// Begins the renewal that is due. Says since when it was, by its first try; nothing if the ttl is being
    /// changed or was meanwhile, or if there is to be no renewal any more.
    pub(crate) fn begin_renewal(&self, now: MonotonicTime) -> Option<Duration> {
        let mut state = self.at(now);
        let may = state.phase == Phase::Held && state.renewal_due && !state.ttl_changing;
        if !may || state.ending().is_some() {
            return None;
        }
        state.ttl_changing = true;
        let first_due = self
            .grant
            .renewal_after(self.full_ttl_at(&state, now), false);
        let due = [first_due, state.renew_at].into_iter().flatten().min();
        Some(now.since(due.unwrap_or(now)))
    }

    /// Waits until what was to be renewed by now has been, or was tried; at most for `outage_timeout`;
    /// false if it has not. One whose validity has ended is lost then.
    pub(crate) fn wait_for_renewal(&self, now: MonotonicTime, outage_timeout: Duration) -> bool {
        let mut state = self.at(now);
        loop {
            let is_due = state.renew_at.is_some_and(|at| at <= now);
            if state.phase != Phase::Held || !is_due {
                return true;
            }
            let ttl_change_ended = state.ttl_change_ended();
            if ttl_change_ended
                .wait_for(&mut state, outage_timeout)
                .timed_out()
            {
                return false;
            }
        }
    }

    /// Begins a change of the ttl. Waits until `deadline` for another one to end; false if it did
    /// not, or if the lease is over.
    pub(crate) fn begin_ttl_change(
        &self,
        deadline: MonotonicTime,
        clock: impl Fn() -> MonotonicTime,
    ) -> bool {
        let mut state = self.at(clock());
        while state.ttl_changing && state.phase == Phase::Held {
            let left = deadline.since(clock());
            let ttl_change_ended = state.ttl_change_ended();
            if left.is_zero() || ttl_change_ended.wait_for(&mut state, left).timed_out() {
                return false;
            }
        }
        if state.phase != Phase::Held {
            return false;
        }
        state.ttl_changing = true;
        true
    }

    /// Ends a change of the ttl that Redis has confirmed: the key lives for `ttl` from `asked_at`
    /// at least. Never shortens the validity, never revives a lost lease.
    pub(crate) fn ttl_changed(&self, now: MonotonicTime, asked_at: MonotonicTime, ttl: Duration) {
        let mut state = self.at(now);
        state.ttl_changing = false;
        if state.phase == Phase::Held {
            let valid_until = self.grant.bounded(asked_at.after(validity(ttl)));
            state.valid_until = state.valid_until.max(valid_until);
            state.capped |= self.grant.is_capped(asked_at, ttl);
            state.key_until = state.key_until.max(now.after(ttl + ttl / 50));
            state.renewal_due = false;
            // Who extends it by little does not put its renewal off; that only waits for a gap between
            // extensions.
            let full_ttl_at = self.full_ttl_at(&state, asked_at);
            state.renew_at = match state.ending() {
                Some(_) => None,
                None => self.grant.renewal_after(full_ttl_at, state.capped),
            };
        }
        state.notify_ttl_change_ended();
    }

    /// The last moment, `latest` at most, at which its whole ttl lay before it.
    fn full_ttl_at(&self, state: &State, latest: MonotonicTime) -> MonotonicTime {
        let whole = validity(self.grant.ttl());
        latest.min(state.valid_until.before(whole))
    }

    /// It was renewed in a crowd: the next time comes a little earlier, to take that apart.
    pub(crate) fn spread_renewal(&self) {
        let mut state = self.state.lock();
        state.renew_at = state.renew_at.map(|at| self.grant.spread(at));
    }

    /// Ends a change of the ttl to `asked` that was not confirmed, and may arrive as long as the key
    /// lives; a renewal is tried again at `retry_at`.
    pub(crate) fn ttl_unchanged(
        &self,
        now: MonotonicTime,
        asked: Duration,
        retry_at: Option<MonotonicTime>,
    ) {
        let mut state = self.state.lock();
        state.ttl_changing = false;
        // However often that fails, the last one that arrives counts.
        let latest = now.after(2 * asked);
        let arrived = state.key_until.after(asked).min(latest);
        state.key_until = state.key_until.max(arrived);
        let is_renewed = self.grant.options.renew_every.is_some() && state.ending().is_none();
        if state.phase == Phase::Held && is_renewed {
            state.renewal_due &= retry_at.is_none();
            state.renew_at = retry_at.or(state.renew_at);
        }
        state.notify_ttl_change_ended();
    }

    /// The ttl to renew with: the full one, or what `max_hold` leaves of it.
    pub(crate) fn ttl_to_ask(&self, now: MonotonicTime) -> Duration {
        match self.grant.hold_until() {
            Some(until) => self.grant.ttl().min(until.since(now)),
            None => self.grant.ttl(),
        }
    }
}

impl State {
    /// What to wait on for the end of a change of the ttl.
    fn ttl_change_ended(&mut self) -> Arc<Condvar> {
        Arc::clone(self.extras().ttl_change_ended.get_or_insert_default())
    }

    fn notify_ttl_change_ended(&self) {
        let extras = self.extras.as_ref();
        if let Some(waited_for) = extras.and_then(|extras| extras.ttl_change_ended.as_ref()) {
            waited_for.notify_all();
        }
    }

    fn next_timer(&self) -> MonotonicTime {
        let renew_at = self.renew_at.filter(|_| !self.renewal_due);
        let warn_at = self.extras.as_ref().and_then(|extras| extras.warn_at);
        let sooner = [renew_at, self.track_at, warn_at];
        let sooner = sooner.into_iter().flatten().min();
        sooner.map_or(self.valid_until, |at| at.min(self.valid_until))
    }
}

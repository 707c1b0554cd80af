//! The renewal of a lease: which actions are due and when, the user's check, and the changes of the ttl, one at a time.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::lease::{Lease, Phase, State, TimerHandle};
use crate::report::loss::LossReason;
use crate::util::clock::{MonotonicTime, validity};
use crate::util::sync::{Condvar, MutexGuard};

/// The actions that are due for a lease at one time.
#[derive(Debug, PartialEq, Eq)]
pub enum DueActions {
    /// The lease has ended, so it has no actions.
    Ended,
    /// The lease is held, and its timer is set to `next`. Each flag is an action that is due: to renew the lease, to
    /// track its key, and to warn that `max_hold` ends soon.
    Held {
        renew: bool,
        track: bool,
        warn: bool,
        next: MonotonicTime,
    },
}

/// The user's check (`renew_while`), which decides before each renewal whether to renew. The watchdog chooses when and
/// on which thread it runs.
#[derive(Clone)]
pub struct Check(Arc<dyn Fn() -> bool + Send + Sync>);

impl Check {
    pub fn new(check: impl Fn() -> bool + Send + Sync + 'static) -> Self {
        Self(Arc::new(check))
    }

    /// Runs the closure, and drops it if this is its last clone. A panic of the closure or of its drop counts as
    /// `false`.
    fn run(self) -> bool {
        catch_unwind(AssertUnwindSafe(move || (self.0)())).unwrap_or(false)
    }
}

impl fmt::Debug for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Check")
    }
}

impl Lease {
    /// Returns the actions that are due, marks them as begun, and sets the next timer. Marks the lease as lost if its
    /// validity has ended.
    ///
    /// Calls `replace_timer` with the old timer (if any) and the time of the next timer. `replace_timer` returns the
    /// new timer, or `None` if the watchdog has stopped. The lease is locked during the call, so a concurrent release
    /// either comes first and prevents the timer, or finds the new timer.
    pub fn take_due(
        &self,
        now: MonotonicTime,
        replace_timer: impl FnOnce(Option<TimerHandle>, MonotonicTime) -> Option<TimerHandle>,
    ) -> DueActions {
        let mut state = self.lock_and_expire(now);
        if state.phase != Phase::Held {
            return DueActions::Ended;
        }
        let mut renew = !state.renewal_due && state.renew_at.is_some_and(|at| at <= now);
        state.renewal_due |= renew;
        if renew
            && let Some(extras) = &mut state.extras
            && extras.check.is_some()
        {
            // A check that is queued or running is not queued again.
            renew = !std::mem::replace(&mut extras.checking, true);
        }
        // A key stays untracked if too many keys are tracked when its tracking is due. Each renewal tries again.
        let again = renew && state.track_at.is_none() && !state.tracked;
        let track = state.track_at.take_if(|at| *at <= now).is_some() || again;
        let extras = state.extras.as_mut();
        let warn = extras.is_some_and(|extras| extras.warn_at.take_if(|at| *at <= now).is_some());
        let next = state.next_timer();
        state.timer = replace_timer(state.timer, next);
        DueActions::Held {
            renew,
            track,
            warn,
            next,
        }
    }

    /// The time until `max_hold` ends the hold; `None` without `max_hold`, or if the lease has ended. Never ends the
    /// lease.
    pub fn hold_left(&self, now: MonotonicTime) -> Option<Duration> {
        let until = self.grant.hold_until()?;
        let state = self.state.lock();
        // With a capped ttl, the validity ends earlier than `max_hold`, by the allowance for drift.
        let until = if state.capped {
            state.valid_until
        } else {
            until
        };
        let is_live = state.phase == Phase::Held && now < state.valid_until;
        is_live.then(|| until.since(now))
    }

    /// Marks the key as tracked if the lease is held and `has_room` returns true. Returns whether the key is marked.
    pub fn track_if(&self, has_room: impl FnOnce() -> bool) -> bool {
        let mut state = self.state.lock();
        if state.phase != Phase::Held {
            return false;
        }
        state.tracked = has_room();
        // A new notification connection may have tracked this key before the timer of the lease fired.
        if state.tracked {
            state.track_at = None;
        }
        state.tracked
    }

    /// Sets the time at which the key is tracked again, which also reads the key. Sets no timer.
    pub fn track_again_at(&self, at: MonotonicTime) {
        self.state.lock().track_at = Some(at);
    }

    /// Sets the timer to the next action, if the lease is held. [`take_due`](Self::take_due) describes `replace_timer`.
    /// Returns false if the lease is held and the watchdog has stopped.
    pub fn reschedule(
        &self,
        replace_timer: impl FnOnce(Option<TimerHandle>, MonotonicTime) -> Option<TimerHandle>,
    ) -> bool {
        let mut state = self.state.lock();
        if state.phase != Phase::Held {
            return true;
        }
        let next = state.next_timer();
        state.timer = replace_timer(state.timer, next);
        state.timer.is_some()
    }

    /// Stops renewal: the lease is lost for `reason` when its validity ends. Its holder can still extend it. The first
    /// reason counts.
    pub fn stop_renewing(&self, reason: LossReason) {
        self.state.lock().stop_renewing(reason);
    }

    /// Whether [`stop_renewing`](Self::stop_renewing) was called.
    pub fn is_renewal_stopped(&self) -> bool {
        self.state.lock().renewal_stopped().is_some()
    }

    /// Records that Redis may have the key until `until`.
    pub fn extend_key_until(&self, until: MonotonicTime) {
        let mut state = self.state.lock();
        state.key_until = state.key_until.max(until);
    }

    /// Runs the user's check on this thread. Returns the lease to renew now: this one, or the one that conversions have
    /// made of it. If the check returns false, stops renewal for good.
    pub fn run_check(self: &Arc<Self>) -> Option<Arc<Self>> {
        // The check of a lease is dropped when the lease ends. The renewal of such a lease has no effect.
        let (_, check) = self.change_checked(|state| state.extras().check.clone());
        let may = check.is_none_or(Check::run);
        let (lease, ()) = self.change_checked(|state| {
            state.extras().checking = false;
            if !may {
                state.stop_renewing(LossReason::NotRenewed);
            }
        });
        may.then_some(lease)
    }

    /// Calls `change` with the state of this lease, or of the one that conversions have made of it since its check was
    /// queued. Returns that lease, too.
    fn change_checked<T>(self: &Arc<Self>, change: impl FnOnce(&mut State) -> T) -> (Arc<Self>, T) {
        let mut lease = Arc::clone(self);
        loop {
            let mut state = lease.state.lock();
            let converted = state.extras().converted_to.as_ref();
            let Some(next) = converted.and_then(Weak::upgrade) else {
                let changed = change(&mut state);
                drop(state);
                return (lease, changed);
            };
            drop(state);
            lease = next;
        }
    }

    /// Begins the renewal that is due. Returns how long ago it became due. Returns `None` if renewal was stopped, if
    /// the lease has ended, or if its ttl is being changed or was changed after the renewal became due. If the validity
    /// has ended at `now`, first ends the lease as lost.
    pub fn begin_renewal(&self, now: MonotonicTime) -> Option<Duration> {
        let mut state = self.lock_and_expire(now);
        let may = state.phase == Phase::Held && state.renewal_due && !state.ttl_changing;
        if !may || state.renewal_stopped().is_some() {
            return None;
        }
        state.ttl_changing = true;
        let first_due = self
            .grant
            .next_renewal(self.full_ttl_at(&state, now), false);
        let due = [first_due, state.renew_at].into_iter().flatten().min();
        Some(now.since(due.unwrap_or(now)))
    }

    /// If a renewal is due at `now`, waits until it has succeeded or failed. Returns false after `timeout`. If the
    /// validity has ended at `now`, first ends the lease as lost.
    pub fn wait_for_renewal(&self, now: MonotonicTime, timeout: Duration) -> bool {
        let mut state = self.lock_and_expire(now);
        loop {
            let is_due = state.renew_at.is_some_and(|at| at <= now);
            if state.phase != Phase::Held || !is_due {
                return true;
            }
            let ttl_change_ended = state.ttl_change_ended();
            if ttl_change_ended.wait_for(&mut state, timeout).timed_out() {
                return false;
            }
        }
    }

    /// Begins a change of the ttl. If another change is under way, waits for its end. Returns false if that change has
    /// not ended at `deadline`, or if the lease has ended.
    pub fn begin_ttl_change(
        &self,
        deadline: MonotonicTime,
        clock: impl Fn() -> MonotonicTime,
    ) -> bool {
        self.lock_for_ttl_change(deadline, clock).is_some()
    }

    /// Does the same as [`begin_ttl_change`](Self::begin_ttl_change), but returns the locked state, or `None`.
    pub(super) fn lock_for_ttl_change(
        &self,
        deadline: MonotonicTime,
        clock: impl Fn() -> MonotonicTime,
    ) -> Option<MutexGuard<'_, State>> {
        let mut state = self.lock_and_expire(clock());
        while state.ttl_changing && state.phase == Phase::Held {
            let left = deadline.since(clock());
            let ttl_change_ended = state.ttl_change_ended();
            if left.is_zero() || ttl_change_ended.wait_for(&mut state, left).timed_out() {
                return None;
            }
        }
        if state.phase != Phase::Held {
            return None;
        }
        state.ttl_changing = true;
        Some(state)
    }

    /// Whether a thread waits for the end of a change of the ttl, or has waited for one.
    #[cfg(test)]
    pub fn is_ttl_change_awaited(&self) -> bool {
        let state = self.state.lock();
        let extras = state.extras.as_ref();
        extras.is_some_and(|extras| extras.ttl_change_ended.is_some())
    }

    /// Records that Redis has confirmed a change of the ttl: the key exists until `ttl` after `asked_at`, or longer.
    /// Never shortens the validity, and never revives a lost lease.
    pub fn finish_ttl_change(&self, now: MonotonicTime, asked_at: MonotonicTime, ttl: Duration) {
        let mut state = self.lock_and_expire(now);
        state.ttl_changing = false;
        if state.phase == Phase::Held {
            self.record_ttl(&mut state, now, asked_at, ttl);
        }
        state.notify_ttl_change_ended();
    }

    pub(super) fn record_ttl(
        &self,
        state: &mut State,
        now: MonotonicTime,
        asked_at: MonotonicTime,
        ttl: Duration,
    ) {
        let valid_until = self.grant.at_most_hold_until(asked_at.after(validity(ttl)));
        state.valid_until = state.valid_until.max(valid_until);
        state.capped |= self.grant.is_capped(asked_at, ttl);
        state.key_until = state.key_until.max(now.after(ttl + ttl / 50));
        state.renewal_due = false;
        // An extension for less than the full ttl does not postpone the renewal.
        let full_ttl_at = self.full_ttl_at(state, asked_at);
        state.renew_at = match state.renewal_stopped() {
            Some(_) => None,
            None => self.grant.next_renewal(full_ttl_at, state.capped),
        };
    }

    /// The time at which a renewal with the full ttl would have given the lease its present validity; at most `latest`.
    fn full_ttl_at(&self, state: &State, latest: MonotonicTime) -> MonotonicTime {
        let whole = validity(self.grant.ttl());
        latest.min(state.valid_until.before(whole))
    }

    /// Moves the next renewal earlier, because many leases were renewed together. `jitter` is from 0.0 to 1.0.
    pub fn spread_renewal(&self, jitter: f64) {
        let mut state = self.state.lock();
        state.renew_at = state
            .renew_at
            .map(|at| self.grant.spread_earlier(at, jitter));
    }

    /// Records that Redis has not confirmed a change of the ttl to `asked`. Redis may still get the request while the
    /// key exists. `retry_at` is the time of the next try, if the change was a renewal.
    pub fn fail_ttl_change(
        &self,
        now: MonotonicTime,
        asked: Duration,
        retry_at: Option<MonotonicTime>,
    ) {
        let mut state = self.state.lock();
        state.ttl_changing = false;
        // The request may still reach Redis while the key exists, which is for at most `asked` after `now`. It then
        // sets the ttl to `asked` once more. Several such requests do not add up.
        let latest = now.after(2 * asked);
        let arrived = state.key_until.after(asked).min(latest);
        state.key_until = state.key_until.max(arrived);
        let is_renewed =
            self.grant.options.renew_every.is_some() && state.renewal_stopped().is_none();
        if state.phase == Phase::Held && is_renewed {
            state.renewal_due &= retry_at.is_none();
            state.renew_at = retry_at.or(state.renew_at);
        }
        state.notify_ttl_change_ended();
    }

    /// The longer of `ttl` and the rest of the validity, rounded up to whole milliseconds. A request with this ttl
    /// never ends the key before the validity, even if another program has removed the key's ttl.
    pub fn at_least_validity(&self, ttl: Duration, now: MonotonicTime) -> Duration {
        let rest = self.state.lock().valid_until.since(now);
        let millis = rest.as_nanos().div_ceil(1_000_000).max(1);
        ttl.max(Duration::from_millis(
            u64::try_from(millis).unwrap_or(u64::MAX),
        ))
    }

    /// The ttl for a renewal: the full ttl, or the time until `max_hold` ends.
    pub fn renewal_ttl(&self, now: MonotonicTime) -> Duration {
        match self.grant.hold_until() {
            Some(until) => self.grant.ttl().min(until.since(now)),
            None => self.grant.ttl(),
        }
    }
}

impl State {
    fn stop_renewing(&mut self, reason: LossReason) {
        self.renew_at = None;
        self.extras().renewal_stopped.get_or_insert(reason);
    }

    /// The condition variable for threads that wait until a change of the ttl ends.
    fn ttl_change_ended(&mut self) -> Arc<Condvar> {
        Arc::clone(self.extras().ttl_change_ended.get_or_insert_default())
    }

    pub(super) fn notify_ttl_change_ended(&self) {
        let extras = self.extras.as_ref();
        if let Some(ended) = extras.and_then(|extras| extras.ttl_change_ended.as_ref()) {
            ended.notify_all();
        }
    }

    /// When the next action is due.
    fn next_timer(&self) -> MonotonicTime {
        let renew_at = self.renew_at.filter(|_| !self.renewal_due);
        let warn_at = self.extras.as_ref().and_then(|extras| extras.warn_at);
        let sooner = [renew_at, self.track_at, warn_at];
        let sooner = sooner.into_iter().flatten().min();
        sooner.map_or(self.valid_until, |at| at.min(self.valid_until))
    }
}

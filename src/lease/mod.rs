//! What a grant is: held, then either released or lost, once and for all.
//!
//! ```text
//!            released by its owner
//!          ┌───────────────────────► Released
//!   Held ──┤
//!          └───────────────────────► Lost(reason)
//!            validity ended, or found gone
//! ```
//!
//! Knows no timer and no Redis: it is told what happened, and when. Past the end of its validity it
//! says lost by itself, whatever it was told.

mod by_key;
mod callbacks;
mod check;
mod grant;
#[cfg(test)]
#[cfg(shuttle)]
mod model;
mod renewal;
#[cfg(test)]
mod tests;
mod ticket;

use std::num::NonZeroU64;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded};

use crate::event::{EventHandler, EventLock};
use crate::loss::LossReason;
use crate::util::clock::MonotonicTime;
use crate::util::id::HolderId;
use crate::util::sync::{Condvar, Mutex, MutexGuard};

pub(crate) use by_key::LeasesByKey;
pub(crate) use callbacks::CallbackExecutor;
pub(crate) use check::Check;
use grant::validity;
pub(crate) use grant::{Grant, Options, SharedOptions};
pub(crate) use renewal::Due;
pub(crate) use ticket::Ticket;

pub(crate) struct Lease {
    grant: Grant,
    callbacks: Arc<CallbackExecutor>,
    state: Mutex<State>,
}

/// Small, as a client may have a million of it.
struct State {
    phase: Phase,
    valid_until: MonotonicTime,
    /// Until when Redis may have the key, counting renewals that were never answered.
    key_until: MonotonicTime,
    /// The ttl reaches the end of the hold: it is not renewed any more.
    capped: bool,
    /// When to renew it, or when that became due, if nothing has come of that yet.
    renew_at: Option<MonotonicTime>,
    renewal_due: bool,
    /// When it has been held for long enough to be tracked.
    track_at: Option<MonotonicTime>,
    /// What happens to its key is told by Redis.
    tracked: bool,
    /// A request that changes the ttl is under way: there is one at a time.
    ttl_changing: bool,
    /// It is not to be handed off within the client.
    no_hand_off: bool,
    /// Others may be in the queue of its key in Redis.
    others_queued: bool,
    /// The watchdog's own note: which of its timers is this lease's.
    timer: Option<TimerNote>,
    extras: Option<Box<Extras>>,
}

/// What few leases have, or have for a moment.
#[derive(Default)]
struct Extras {
    /// Why it was lost; there if it was, and only then.
    loss: Option<LossReason>,
    /// It is not renewed any more, and lost for this reason when its validity ends.
    ending: Option<LossReason>,
    /// What says whether it is to be renewed, and whether it is being asked.
    check: Option<Check>,
    checking: bool,
    /// When to warn of the end of its hold.
    warn_at: Option<MonotonicTime>,
    listeners: Listeners,
    force: ForceHint,
    /// Signalled when a change of the ttl has ended, for those who wait for that.
    ttl_change_ended: Option<Arc<Condvar>>,
}

/// The claims of messages that a `force_unlock` took the lock. Any user may publish them, so a pipeline confirms it before the lease ends.
#[derive(Default)]
struct ForceHint {
    /// The client that took the lock away, by the latest message that no pipeline has denied.
    by: Option<HolderId>,
    /// A pipeline is being asked.
    asking: bool,
    /// When a pipeline last said that the lease is held.
    denied_at: Option<MonotonicTime>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Held,
    Released,
    Lost,
}

type LossCallback = Box<dyn FnOnce(LossReason) + Send>;

#[derive(Default)]
struct Listeners {
    signals: Vec<Signal>,
    loss_callbacks: Vec<LossCallback>,
}

/// The sending half of a receiver that lives as long as what it keeps hold of.
struct Signal {
    sender: Sender<LossReason>,
    receiver: Weak<Sender<LossReason>>,
}

impl Listeners {
    /// Adds a signal. Before it would have to grow, those that nobody has any more are swept out.
    fn add(&mut self, signal: Signal) {
        if self.signals.len() == self.signals.capacity() {
            self.signals.retain(|one| one.receiver.strong_count() > 0);
        }
        self.signals.push(signal);
    }
}

/// Kept for the watchdog, which alone knows what it means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct TimerNote(pub(crate) u32, pub(crate) NonZeroU64);

#[cfg(test)]
impl TimerNote {
    /// One of a test, without a wheel.
    pub(crate) fn nth(n: u32) -> Self {
        Self(n, NonZeroU64::MIN)
    }
}

/// What a lease leaves behind when it ends by its owner's will. To be dropped where nothing is
/// locked: loss_callbacks own what their authors put there.
#[must_use]
pub(crate) struct Detached {
    pub(crate) timer: Option<TimerNote>,
    pub(crate) tracked: bool,
    listeners: Listeners,
    check: Option<Check>,
}

impl Drop for Detached {
    fn drop(&mut self) {
        let (listeners, check) = (std::mem::take(&mut self.listeners), self.check.take());
        // A panic in the drop of what a callback or a check owns stays here.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(listeners)));
        let _ = catch_unwind(AssertUnwindSafe(|| drop(check)));
    }
}

/// Keys held for less than this are not tracked: short holds pay nothing for it.
const TRACKED_AFTER: Duration = Duration::from_millis(30);
/// After a pipeline has denied a `force_unlock`, further messages are not confirmed for this long.
const DENIED_FOR: Duration = Duration::from_secs(1);

impl Lease {
    /// A grant on these grant, renewed only while `check` says so, if there is one.
    pub(crate) fn new(
        grant: Grant,
        callbacks: Arc<CallbackExecutor>,
        check: Option<Check>,
    ) -> Self {
        let valid_until = grant.bounded(grant.asked_at.after(validity(grant.ttl())));
        let capped = grant.is_capped(grant.asked_at, grant.ttl());
        let renew_at = grant.renewal_after(grant.asked_at, capped);
        let warn_at = grant.options.hold_warning_at(grant.asked_at);
        let extras = Extras::of(check, warn_at);
        Self {
            callbacks,
            state: Mutex::new(State {
                phase: Phase::Held,
                valid_until,
                // The grant came before this; drift either way is a small part of the ttl.
                key_until: grant.since.after(grant.ttl() + grant.ttl() / 50),
                capped,
                renew_at,
                renewal_due: false,
                track_at: Some(grant.since.after(TRACKED_AFTER)),
                tracked: false,
                ttl_changing: false,
                no_hand_off: false,
                others_queued: false,
                timer: None,
                extras,
            }),
            grant,
        }
    }

    pub(crate) fn grant(&self) -> &Grant {
        &self.grant
    }

    pub(crate) fn event(&self) -> EventLock<'_> {
        EventLock {
            key: self.grant.key.name(),
            fencing_token: self.grant.token,
        }
    }

    /// What is left of the validity; nothing once lost or released.
    pub(crate) fn remaining(&self, now: MonotonicTime) -> Duration {
        let state = self.at(now);
        match state.phase {
            Phase::Held => state.valid_until.since(now),
            _ => Duration::ZERO,
        }
    }

    /// When its validity ends, as far as that is known.
    pub(crate) fn valid_until(&self) -> MonotonicTime {
        self.state.lock().valid_until
    }

    /// Why it was lost, if it was.
    pub(crate) fn loss(&self, now: MonotonicTime) -> Option<LossReason> {
        self.at(now).loss().cloned()
    }

    /// Ends the lease by its owner's will. The reason, if it was lost before.
    pub(crate) fn release(&self, now: MonotonicTime) -> (Detached, Result<(), LossReason>) {
        let mut state = self.at(now);
        let ended = state.end();
        if state.ttl_changing {
            // A renewal is under way, and may arrive yet.
            state.key_until = state.key_until.after(self.grant.ttl());
        }
        if let Some(reason) = state.loss() {
            return (ended, Err(reason.clone()));
        }
        state.phase = Phase::Released;
        (ended, Ok(()))
    }

    /// For how long it is valid if it is held at `now`. Notices no loss: to be asked under any lock.
    pub(crate) fn valid_for(&self, now: MonotonicTime) -> Option<Duration> {
        let state = self.state.lock();
        let is_live = state.phase == Phase::Held && now < state.valid_until;
        is_live.then(|| state.valid_until.since(now))
    }

    /// Ends the lease in favour of the next of this client, which goes on with it under a token of
    /// its own; Redis is not asked. Nothing if it is over, not renewed or not unasked, about to
    /// change its ttl, short of validity, or extended beyond its ttl. Notices no loss: to be called
    /// under any lock.
    pub(crate) fn hand_off(
        &self,
        now: MonotonicTime,
        options: Options,
    ) -> Option<(Arc<Self>, Detached)> {
        let mut state = self.state.lock();
        let whole = validity(self.grant.ttl());
        let left = state.valid_until.since(now);
        let may = state.phase == Phase::Held
            && *self.grant.options == options
            && self.grant.options.renew_every.is_some()
            && !self.grant.options.checked
            && state.ending().is_none()
            && !state.ttl_changing
            && !state.capped
            && !state.no_hand_off
            && !state.is_force_asked()
            && (2 * whole / 3..=whole).contains(&left);
        if !may {
            return None;
        }
        let grant = Grant {
            token: self.grant.token + 1,
            asked_at: now,
            ..self.grant.clone()
        };
        let next = State {
            phase: Phase::Held,
            valid_until: grant.bounded(state.valid_until),
            key_until: state.key_until,
            capped: false,
            // In the past, if a renewal is due and has not begun.
            renew_at: state.renew_at,
            renewal_due: false,
            track_at: (!state.tracked).then(|| now.after(TRACKED_AFTER)),
            tracked: false,
            ttl_changing: false,
            no_hand_off: false,
            others_queued: state.others_queued,
            timer: None,
            extras: Extras::of(None, options.hold_warning_at(now)),
        };
        state.phase = Phase::Released;
        let ended = state.end();
        drop(state);
        let next = Self {
            grant,
            callbacks: Arc::clone(&self.callbacks),
            state: Mutex::new(next),
        };
        Some((Arc::new(next), ended))
    }

    /// It is not handed off within the client any more: something that was sent counts on its key to
    /// change before anybody else has the lock.
    pub(crate) fn forbid_hand_off(&self) {
        self.state.lock().no_hand_off = true;
    }

    /// Whether others may be in the queue of its key in Redis.
    pub(crate) fn with_others_queued(mut self, others: bool) -> Self {
        self.state.get_mut().others_queued = others;
        self
    }

    pub(crate) fn has_others_queued(&self) -> bool {
        self.state.lock().others_queued
    }

    /// Ends the lease against its owner's will, for what was heard at `now`, and tells. An end of
    /// validity that came before that and was not noticed yet is the reason then. Nothing if it is over
    /// already.
    pub(crate) fn lose(&self, now: MonotonicTime, reason: LossReason) {
        self.lose_locked(self.at(now), reason);
    }

    /// Notes that a message says that `by` took the lock away: the reason of the loss, if the key is found gone or
    /// another's. True if the caller has to ask a pipeline now: one request is sent at a time, and none for a second
    /// after a denial.
    pub(crate) fn note_force(&self, by: HolderId, now: MonotonicTime) -> bool {
        let mut state = self.state.lock();
        if state.phase != Phase::Held {
            return false;
        }
        let hint = &mut state.extras().force;
        hint.by = Some(by);
        let was_denied = hint.denied_at.is_some_and(|at| now.since(at) < DENIED_FOR);
        let asks = !hint.asking && !was_denied;
        hint.asking |= asks;
        asks
    }

    /// Ends the request that [`note_force`](Self::note_force) asked for. With `denied_at`, a pipeline said then that the
    /// lease is held.
    pub(crate) fn note_force_answer(&self, denied_at: Option<MonotonicTime>) {
        let mut state = self.state.lock();
        let hint = &mut state.extras().force;
        hint.asking = false;
        if denied_at.is_some() {
            (hint.by, hint.denied_at) = (None, denied_at);
        }
    }

    /// Until when Redis may have the key at the latest, if it is not released.
    pub(crate) fn key_until(&self) -> MonotonicTime {
        self.state.lock().key_until
    }

    /// A receiver of its own that becomes ready when the lease is lost, and never otherwise.
    /// Ready also once nothing keeps the sender: keep it as long as the receiver.
    pub(crate) fn signal(
        &self,
        now: MonotonicTime,
    ) -> (Arc<Sender<LossReason>>, Receiver<LossReason>) {
        let (sender, receiver) = bounded(1);
        let keep = Arc::new(sender.clone());
        let mut state = self.at(now);
        if let Some(reason) = state.loss() {
            let _ = sender.try_send(reason.clone());
        } else if state.phase == Phase::Held {
            let receiver = Arc::downgrade(&keep);
            state.extras().listeners.add(Signal { sender, receiver });
        }
        (keep, receiver)
    }

    /// Runs `callback` on the callbacks's thread when the lease is lost; at once if it is.
    pub(crate) fn on_lost(&self, now: MonotonicTime, callback: LossCallback) {
        let mut state = self.at(now);
        if state.phase == Phase::Held {
            state.extras().listeners.loss_callbacks.push(callback);
            return;
        }
        let loss = state.loss().cloned();
        // The callback may own anything: it is also dropped without the lock.
        drop(state);
        if let Some(reason) = loss {
            self.callbacks.run(move || callback(reason));
        }
    }

    /// The state as it is at `now`: with an end of validity that nobody has noticed yet.
    fn at(&self, now: MonotonicTime) -> MutexGuard<'_, State> {
        let state = self.state.lock();
        if state.phase != Phase::Held || now < state.valid_until {
            return state;
        }
        let reason = if state.capped {
            LossReason::MaxHold
        } else {
            state.ending().cloned().unwrap_or(LossReason::Expired)
        };
        self.lose_locked(state, reason);
        self.state.lock()
    }

    fn lose_locked(&self, mut state: MutexGuard<'_, State>, mut reason: LossReason) {
        if state.phase != Phase::Held {
            return;
        }
        if matches!(reason, LossReason::Deleted | LossReason::TakenOver { .. })
            && let Some(by) = state.forced_by()
        {
            reason = LossReason::ForceUnlocked { by };
        }
        state.phase = Phase::Lost;
        state.renew_at = None;
        let extras = state.extras();
        extras.loss = Some(reason.clone());
        let (listeners, check) = (std::mem::take(&mut extras.listeners), extras.check.take());
        drop(state);
        let Listeners {
            signals,
            loss_callbacks,
        } = listeners;
        for signal in signals {
            // A receiver that has gone is no concern; the channel has room for its one message.
            let _ = signal.sender.try_send(reason.clone());
        }
        for callback in loss_callbacks {
            let reason = reason.clone();
            self.callbacks.run(move || callback(reason));
        }
        if let Some(check) = check {
            // What it owns goes where user code may run.
            self.callbacks.run(move || drop(check));
        }
        self.callbacks.lost(self);
        let (key, token) = (&self.grant.key, self.grant.token);
        let lost = move |events: &dyn EventHandler, lock: EventLock<'_>| events.lost(lock, &reason);
        self.callbacks.queue_loss_event(key, token, lost);
    }
}

impl State {
    fn extras(&mut self) -> &mut Extras {
        self.extras.get_or_insert_default()
    }

    fn loss(&self) -> Option<&LossReason> {
        self.extras.as_ref()?.loss.as_ref()
    }

    fn forced_by(&self) -> Option<HolderId> {
        self.extras.as_ref()?.force.by.clone()
    }

    fn is_force_asked(&self) -> bool {
        self.extras
            .as_ref()
            .is_some_and(|extras| extras.force.asking)
    }

    fn ending(&self) -> Option<&LossReason> {
        self.extras.as_ref()?.ending.as_ref()
    }

    fn end(&mut self) -> Detached {
        let extras = self.extras.as_mut();
        let (listeners, check) = extras.map_or_else(Default::default, |extras| {
            (std::mem::take(&mut extras.listeners), extras.check.take())
        });
        Detached {
            timer: self.timer.take(),
            tracked: std::mem::take(&mut self.tracked),
            // Senders end with it; receivers keep one of their own, so none becomes ready.
            listeners,
            check,
        }
    }
}

impl Extras {
    fn of(check: Option<Check>, warn_at: Option<MonotonicTime>) -> Option<Box<Self>> {
        let is_there = check.is_some() || warn_at.is_some();
        is_there.then(|| {
            Box::new(Self {
                check,
                warn_at,
                ..Self::default()
            })
        })
    }
}

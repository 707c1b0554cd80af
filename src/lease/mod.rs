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
mod check;
mod courier;
#[cfg(test)]
#[cfg(shuttle)]
mod model;
mod renewal;
mod terms;
#[cfg(test)]
mod tests;
mod ticket;

use std::num::NonZeroU64;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded};

use crate::clock::Moment;
use crate::event::{EventLock, Events};
use crate::id::HolderId;
use crate::loss::LossReason;
use crate::sync::{Condvar, Mutex, MutexGuard};

pub(crate) use by_key::LeasesByKey;
pub(crate) use check::Check;
pub(crate) use courier::Courier;
pub(crate) use renewal::Due;
use terms::validity;
pub(crate) use terms::{Options, SharedOptions, Terms};
pub(crate) use ticket::Ticket;

pub(crate) struct Lease {
    terms: Terms,
    courier: Arc<Courier>,
    state: Mutex<State>,
}

/// Small, as a client may have a million of it.
struct State {
    phase: Phase,
    valid_until: Moment,
    /// Until when Redis may have the key, counting renewals that were never answered.
    key_until: Moment,
    /// The ttl reaches the end of the hold: it is not renewed any more.
    capped: bool,
    /// When to renew it, or when that became due, if nothing has come of that yet.
    renew_at: Option<Moment>,
    renewal_due: bool,
    /// When it has been held for long enough to be watched.
    watch_at: Option<Moment>,
    /// What happens to its key is told by Redis.
    watched: bool,
    /// A request that changes the ttl is under way: there is one at a time.
    ttl_changing: bool,
    /// It is not to be handed off within the client.
    bound: bool,
    /// Others may be in the queue of its key in Redis.
    others_queued: bool,
    /// The watchdog's own note: which of its timers is this lease's.
    timer: Option<TimerNote>,
    rare: Option<Box<Rare>>,
}

/// What few leases have, or have for a moment.
#[derive(Default)]
struct Rare {
    /// Why it was lost; there if it was, and only then.
    loss: Option<LossReason>,
    /// It is not renewed any more, and lost for this reason when its validity ends.
    ending: Option<LossReason>,
    /// What says whether it is to be renewed, and whether it is being asked.
    check: Option<Check>,
    checking: bool,
    /// When to warn of the end of its hold.
    warn_at: Option<Moment>,
    listeners: Listeners,
    force: ForceHint,
    /// Signalled when a change of the ttl has ended, for those who wait for that.
    ttl_settled: Option<Arc<Condvar>>,
}

/// The claims of messages that a `force_unlock` took the lock. Any user may publish them, so a lane confirms it before the lease ends.
#[derive(Default)]
struct ForceHint {
    /// The client that took the lock away, by the latest message that no lane has denied.
    by: Option<HolderId>,
    /// A lane is being asked.
    asking: bool,
    /// When a lane last said that the lease is held.
    denied_at: Option<Moment>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Held,
    Released,
    Lost,
}

type Callback = Box<dyn FnOnce(LossReason) + Send>;

#[derive(Default)]
struct Listeners {
    signals: Vec<Signal>,
    callbacks: Vec<Callback>,
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
/// locked: callbacks own what their authors put there.
#[must_use]
pub(crate) struct Ended {
    pub(crate) timer: Option<TimerNote>,
    pub(crate) watched: bool,
    listeners: Listeners,
    check: Option<Check>,
}

impl Drop for Ended {
    fn drop(&mut self) {
        let (listeners, check) = (std::mem::take(&mut self.listeners), self.check.take());
        // A panic in the drop of what a callback or a check owns stays here.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(listeners)));
        let _ = catch_unwind(AssertUnwindSafe(|| drop(check)));
    }
}

/// Keys held for less than this are not watched: short holds pay nothing for it.
const WATCHED_AFTER: Duration = Duration::from_millis(30);
/// After a lane has denied a `force_unlock`, further messages are not confirmed for this long.
const DENIED_FOR: Duration = Duration::from_secs(1);

impl Lease {
    /// A grant on these terms, renewed only while `check` says so, if there is one.
    pub(crate) fn new(terms: Terms, courier: Arc<Courier>, check: Option<Check>) -> Self {
        let valid_until = terms.bounded(terms.asked_at.after(validity(terms.ttl())));
        let capped = terms.is_capped(terms.asked_at, terms.ttl());
        let renew_at = terms.renewal_after(terms.asked_at, capped);
        let warn_at = terms.options.hold_near_its_end(terms.asked_at);
        let rare = Rare::of(check, warn_at);
        Self {
            courier,
            state: Mutex::new(State {
                phase: Phase::Held,
                valid_until,
                // The grant came before this; drift either way is a small part of the ttl.
                key_until: terms.since.after(terms.ttl() + terms.ttl() / 50),
                capped,
                renew_at,
                renewal_due: false,
                watch_at: Some(terms.since.after(WATCHED_AFTER)),
                watched: false,
                ttl_changing: false,
                bound: false,
                others_queued: false,
                timer: None,
                rare,
            }),
            terms,
        }
    }

    pub(crate) fn terms(&self) -> &Terms {
        &self.terms
    }

    pub(crate) fn event(&self) -> EventLock<'_> {
        EventLock {
            key: self.terms.key.name(),
            fencing_token: self.terms.token,
        }
    }

    /// What is left of the validity; nothing once lost or released.
    pub(crate) fn remaining(&self, now: Moment) -> Duration {
        let state = self.at(now);
        match state.phase {
            Phase::Held => state.valid_until.since(now),
            _ => Duration::ZERO,
        }
    }

    /// When its validity ends, as far as that is known.
    pub(crate) fn valid_until(&self) -> Moment {
        self.state.lock().valid_until
    }

    /// Why it was lost, if it was.
    pub(crate) fn loss(&self, now: Moment) -> Option<LossReason> {
        self.at(now).loss().cloned()
    }

    /// Ends the lease by its owner's will. The reason, if it was lost before.
    pub(crate) fn release(&self, now: Moment) -> (Ended, Result<(), LossReason>) {
        let mut state = self.at(now);
        let ended = state.end();
        if state.ttl_changing {
            // A renewal is under way, and may arrive yet.
            state.key_until = state.key_until.after(self.terms.ttl());
        }
        if let Some(reason) = state.loss() {
            return (ended, Err(reason.clone()));
        }
        state.phase = Phase::Released;
        (ended, Ok(()))
    }

    /// For how long it is valid if it is held at `now`. Notices no loss: to be asked under any lock.
    pub(crate) fn live_for(&self, now: Moment) -> Option<Duration> {
        let state = self.state.lock();
        let is_live = state.phase == Phase::Held && now < state.valid_until;
        is_live.then(|| state.valid_until.since(now))
    }

    /// Ends the lease in favour of the next of this client, which goes on with it under a token of
    /// its own; Redis is not asked. Nothing if it is over, not renewed or not unasked, about to
    /// change its ttl, short of validity, or extended beyond its ttl. Notices no loss: to be called
    /// under any lock.
    pub(crate) fn hand_off(&self, now: Moment, options: Options) -> Option<(Arc<Self>, Ended)> {
        let mut state = self.state.lock();
        let whole = validity(self.terms.ttl());
        let left = state.valid_until.since(now);
        let may = state.phase == Phase::Held
            && *self.terms.options == options
            && self.terms.options.renew_every.is_some()
            && !self.terms.options.checked
            && state.ending().is_none()
            && !state.ttl_changing
            && !state.capped
            && !state.bound
            && !state.is_force_asked()
            && (2 * whole / 3..=whole).contains(&left);
        if !may {
            return None;
        }
        let terms = Terms {
            token: self.terms.token + 1,
            asked_at: now,
            ..self.terms.clone()
        };
        let next = State {
            phase: Phase::Held,
            valid_until: terms.bounded(state.valid_until),
            key_until: state.key_until,
            capped: false,
            // In the past, if a renewal is due and has not begun.
            renew_at: state.renew_at,
            renewal_due: false,
            watch_at: (!state.watched).then(|| now.after(WATCHED_AFTER)),
            watched: false,
            ttl_changing: false,
            bound: false,
            others_queued: state.others_queued,
            timer: None,
            rare: Rare::of(None, options.hold_near_its_end(now)),
        };
        state.phase = Phase::Released;
        let ended = state.end();
        drop(state);
        let next = Self {
            terms,
            courier: Arc::clone(&self.courier),
            state: Mutex::new(next),
        };
        Some((Arc::new(next), ended))
    }

    /// It is not handed off within the client any more: something that was sent counts on its key to
    /// change before anybody else has the lock.
    pub(crate) fn bind_to_holder(&self) {
        self.state.lock().bound = true;
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
    pub(crate) fn lose(&self, now: Moment, reason: LossReason) {
        self.lose_locked(self.at(now), reason);
    }

    /// Notes that a message says that `by` took the lock away: the reason of the loss, if the key is found gone or
    /// another's. True if the caller has to ask a lane now: one request is sent at a time, and none for a second
    /// after a denial.
    pub(crate) fn hear_force(&self, by: HolderId, now: Moment) -> bool {
        let mut state = self.state.lock();
        if state.phase != Phase::Held {
            return false;
        }
        let hint = &mut state.rare().force;
        hint.by = Some(by);
        let was_denied = hint.denied_at.is_some_and(|at| now.since(at) < DENIED_FOR);
        let asks = !hint.asking && !was_denied;
        hint.asking |= asks;
        asks
    }

    /// Ends the request that [`hear_force`](Self::hear_force) asked for. With `denied_at`, a lane said then that the
    /// lease is held.
    pub(crate) fn force_answered(&self, denied_at: Option<Moment>) {
        let mut state = self.state.lock();
        let hint = &mut state.rare().force;
        hint.asking = false;
        if denied_at.is_some() {
            (hint.by, hint.denied_at) = (None, denied_at);
        }
    }

    /// Until when Redis may have the key at the latest, if it is not released.
    pub(crate) fn key_until(&self) -> Moment {
        self.state.lock().key_until
    }

    /// A receiver of its own that becomes ready when the lease is lost, and never otherwise.
    /// Ready also once nothing keeps the sender: keep it as long as the receiver.
    pub(crate) fn signal(&self, now: Moment) -> (Arc<Sender<LossReason>>, Receiver<LossReason>) {
        let (sender, receiver) = bounded(1);
        let keep = Arc::new(sender.clone());
        let mut state = self.at(now);
        if let Some(reason) = state.loss() {
            let _ = sender.try_send(reason.clone());
        } else if state.phase == Phase::Held {
            let receiver = Arc::downgrade(&keep);
            state.rare().listeners.add(Signal { sender, receiver });
        }
        (keep, receiver)
    }

    /// Runs `callback` on the courier's thread when the lease is lost; at once if it is.
    pub(crate) fn on_lost(&self, now: Moment, callback: Callback) {
        let mut state = self.at(now);
        if state.phase == Phase::Held {
            state.rare().listeners.callbacks.push(callback);
            return;
        }
        let loss = state.loss().cloned();
        // The callback may own anything: it is also dropped without the lock.
        drop(state);
        if let Some(reason) = loss {
            self.courier.run(move || callback(reason));
        }
    }

    /// The state as it is at `now`: with an end of validity that nobody has noticed yet.
    fn at(&self, now: Moment) -> MutexGuard<'_, State> {
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
        let rare = state.rare();
        rare.loss = Some(reason.clone());
        let (listeners, check) = (std::mem::take(&mut rare.listeners), rare.check.take());
        drop(state);
        let Listeners { signals, callbacks } = listeners;
        for signal in signals {
            // A receiver that has gone is no concern; the channel has room for its one message.
            let _ = signal.sender.try_send(reason.clone());
        }
        for callback in callbacks {
            let reason = reason.clone();
            self.courier.run(move || callback(reason));
        }
        if let Some(check) = check {
            // What it owns goes where user code may run.
            self.courier.run(move || drop(check));
        }
        self.courier.lost(self);
        let (key, token) = (&self.terms.key, self.terms.token);
        let lost = move |events: &dyn Events, lock: EventLock<'_>| events.lost(lock, &reason);
        self.courier.report_loss(key, token, lost);
    }
}

impl State {
    fn rare(&mut self) -> &mut Rare {
        self.rare.get_or_insert_default()
    }

    fn loss(&self) -> Option<&LossReason> {
        self.rare.as_ref()?.loss.as_ref()
    }

    fn forced_by(&self) -> Option<HolderId> {
        self.rare.as_ref()?.force.by.clone()
    }

    fn is_force_asked(&self) -> bool {
        self.rare.as_ref().is_some_and(|rare| rare.force.asking)
    }

    fn ending(&self) -> Option<&LossReason> {
        self.rare.as_ref()?.ending.as_ref()
    }

    fn end(&mut self) -> Ended {
        let rare = self.rare.as_mut();
        let (listeners, check) = rare.map_or_else(Default::default, |rare| {
            (std::mem::take(&mut rare.listeners), rare.check.take())
        });
        Ended {
            timer: self.timer.take(),
            watched: std::mem::take(&mut self.watched),
            // Senders end with it; receivers keep one of their own, so none becomes ready.
            listeners,
            check,
        }
    }
}

impl Rare {
    fn of(check: Option<Check>, warn_at: Option<Moment>) -> Option<Box<Self>> {
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

//! The state of a held lock: held first, then either released or lost. (A lease that passes to the holder of a ticket
//! ends as released, but its key is not released.)
//!
//! ```text
//!            released by its holder
//!          ┌───────────────────────► Released ──┐
//!   Held ──┤                                    │ the release did not find the lease
//!          └───────────────────────► Lost ◄─────┘
//!            validity ended, or the key is gone
//! ```
//!
//! A lease sets no timer and sends no request: its callers report events, each with its time. After the end of the
//! validity, every call finds the lease lost, whatever was reported before.
//!
//! A lease becomes lost at most once, in one of these cases: a pipeline confirms that the key is gone or has another
//! value; the release does not find the lease in Redis, before the validity ends; the validity or `max_hold` ends; or
//! the client ends.
//! The state changes first. Then the loss signals, which are channels in the process, get the reason. The callbacks and
//! the one event `lost` are queued for the callback thread last.
//!
//! While `unlock` waits for the reply, it keeps the listeners of the lease. After the drop of a guard, the lease has no
//! listeners, so the pipeline reports a loss that the reply to the release shows. The reply to a repeated release shows
//! no loss, because Redis may have carried out an earlier attempt.
//!
//! A held lock takes 176 bytes for its lease, and also an entry in the local queue and a timer. State that few leases
//! need (callbacks, signals, a check, `max_hold`) is in a separate box, and locks share their options.

pub mod by_key;
pub mod callbacks;
pub mod conversion;
pub mod grant;
#[cfg(test)]
#[cfg(shuttle)]
mod model;
pub mod renewal;
#[cfg(test)]
mod tests;
pub mod ticket;

use std::num::NonZeroU64;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, bounded};

use crate::command::Mode;
use crate::report::event::EventLock;
use crate::report::loss::{LossReason, LostKey};
use crate::util::clock::{MonotonicTime, validity};
use crate::util::id::HolderId;
use crate::util::sync::{Condvar, Mutex, MutexGuard};

pub use by_key::LeasesByKey;
pub use callbacks::CallbackExecutor;
pub use grant::{Grant, Options, SharedOptions};
pub use renewal::{Check, DueActions};
pub use ticket::Ticket;

/// A lock that this client was granted, until it is released or lost.
pub struct Lease {
    grant: Grant,
    callbacks: Arc<CallbackExecutor>,
    state: Mutex<State>,
}

/// The changing part of a lease. Small, since a client may hold a million leases.
struct State {
    phase: Phase,
    valid_until: MonotonicTime,
    /// The latest time at which Redis may still have the key, even if a renewal without a reply was carried out.
    key_until: MonotonicTime,
    /// Whether the ttl reaches the end of `max_hold`. Such a lease is not renewed.
    capped: bool,
    /// When the next renewal is due. During a renewal: when that renewal became due.
    renew_at: Option<MonotonicTime>,
    /// Whether a renewal is queued or under way.
    renewal_due: bool,
    /// When to track the key. `None` once that time has come.
    track_at: Option<MonotonicTime>,
    /// Whether Redis notifies this client of changes of the key.
    tracked: bool,
    /// Whether a request that changes the ttl is under way. There is one such request at a time.
    ttl_changing: bool,
    /// Whether the request under way is a conversion, which changes the mode of the lease and its id in Redis.
    is_converting: bool,
    /// Whether hand-offs of the lease within the client are forbidden.
    no_hand_off: bool,
    /// Whether other clients may be in the key's queue in Redis.
    others_queued: bool,
    /// The lease's timer. Only the watchdog reads it.
    timer: Option<TimerHandle>,
    extras: Option<Box<Extras>>,
}

/// The number of the next loss of a lease.
static NEXT_LOSS: AtomicU64 = AtomicU64::new(1);

/// State that few leases have, or that a lease has only for a moment.
#[derive(Default)]
struct Extras {
    /// Why the lease was lost. `None` unless it was lost.
    loss: Option<LossReason>,
    /// The place of the loss in the order of all losses.
    loss_number: u64,
    /// Set if renewal was stopped. Becomes the loss reason when the validity ends.
    renewal_stopped: Option<LossReason>,
    /// The user's check (`renew_while`), which decides whether the lease is renewed.
    check: Option<Check>,
    /// Whether the check is queued or running.
    checking: bool,
    /// The lease that a conversion made of this one while the check was queued or running. The check then decides about
    /// that lease.
    converted_to: Option<Weak<Lease>>,
    /// When to warn that `max_hold` ends soon.
    warn_at: Option<MonotonicTime>,
    listeners: LossListeners,
    force: ForceReport,
    /// Notified when a change of the ttl has ended.
    ttl_change_ended: Option<Arc<Condvar>>,
    /// Whether a report came during a conversion that the key does not contain the lease.
    was_reported_missing: bool,
}

/// The reports of messages about a `force_unlock` of this lease. Any user may publish such a message, so the lease
/// ends only after a pipeline has confirmed the message.
#[derive(Default)]
struct ForceReport {
    /// The client that unlocked by force, according to the latest message. `None` after a pipeline has refuted the
    /// message.
    by: Option<HolderId>,
    /// Whether a request that confirms the message is queued or under way.
    confirming: bool,
    /// Whether another message came during this request. Then a reply that the lease is held does not refute the
    /// message: each node of a quorum sends its own message, perhaps before the next node releases the key.
    is_repeated: bool,
    /// When a pipeline last reported that the lease is held.
    denied_at: Option<MonotonicTime>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Held,
    Released,
    /// The lease has passed to the holder of a ticket.
    Transferred,
    Lost,
}

type LossCallback = Box<dyn FnOnce(LossReason) + Send>;

/// A number that distinguishes the guards of the client's reader leases. A lease of another kind has one guard, with
/// the number 0.
pub type GuardNumber = u64;

/// The number of a guard that is the only one of its lease.
pub const ONLY_GUARD: GuardNumber = 0;

/// The channels and callbacks that are notified when the lease is lost.
#[derive(Default)]
struct LossListeners {
    channels: Vec<LossChannel>,
    callbacks: Vec<(GuardNumber, LossCallback)>,
}

/// The sender of one loss channel.
struct LossChannel {
    /// The guard whose holder listens.
    guard: GuardNumber,
    sender: LossSender,
    /// Counts the owners of the receiver, each of which keeps a clone of the `Arc`.
    receiver: Weak<LossSender>,
}

/// The sender of a channel that has room for one loss.
#[derive(Clone, Debug)]
pub enum LossSender {
    OfLock(Sender<LossReason>),
    /// The leases of several keys share the channel, which receives the first loss among them.
    OfSet(Sender<LostKey>),
}

impl LossSender {
    /// Sends the loss, unless the channel is full. The receiver may be gone.
    pub fn send(&self, key: &str, reason: LossReason) {
        let _ = match self {
            Self::OfLock(sender) => sender.try_send(reason).is_ok(),
            Self::OfSet(sender) => {
                let key = key.to_owned();
                sender.try_send(LostKey { key, reason }).is_ok()
            }
        };
    }
}

impl LossListeners {
    /// Adds a channel. Removes channels without a receiver first, if the list would have to grow.
    fn add(&mut self, channel: LossChannel) {
        if self.channels.len() == self.channels.capacity() {
            self.channels
                .retain(|channel| channel.receiver.strong_count() > 0);
        }
        self.channels.push(channel);
    }

    /// Takes out the listeners of one guard.
    fn take_of(&mut self, guard: GuardNumber) -> Self {
        let channels = self.channels.extract_if(.., |one| one.guard == guard);
        let callbacks = self.callbacks.extract_if(.., |(of, _)| *of == guard);
        Self {
            channels: channels.collect(),
            callbacks: callbacks.collect(),
        }
    }
}

/// The id of a timer of the watchdog. The lease only stores it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimerHandle(pub u32, pub NonZeroU64);

#[cfg(test)]
impl TimerHandle {
    /// A handle for tests that have no wheel.
    pub fn nth(n: u32) -> Self {
        Self(n, NonZeroU64::MIN)
    }
}

/// The timer, listeners and check of a lease that its holder ended. Dropping this value runs destructors of user code,
/// so hold no lock of the library then. A caller that waits for the release keeps this value until the reply, which may
/// report a loss ([`Lease::lose_released`]).
#[must_use]
pub struct LeaseRemains {
    pub timer: Option<TimerHandle>,
    pub tracked: bool,
    listeners: LossListeners,
    check: Option<Check>,
}

impl Drop for LeaseRemains {
    fn drop(&mut self) {
        let (listeners, check) = (std::mem::take(&mut self.listeners), self.check.take());
        // Users' closures own users' values, and the drop of such a value may panic.
        let _ = catch_unwind(AssertUnwindSafe(|| drop(listeners)));
        let _ = catch_unwind(AssertUnwindSafe(|| drop(check)));
    }
}

/// How long a lock is held before its key is tracked, so short holds send no request to track it.
const TRACK_AFTER: Duration = Duration::from_millis(30);
/// After a reply that the lease is held, this client does not confirm further messages of a `force_unlock` for this
/// time.
const PAUSE_AFTER_DENIAL: Duration = Duration::from_secs(1);

impl Lease {
    /// A held lease for `grant`. If there is a `check`, it decides before each renewal whether the lease is renewed.
    pub fn new(grant: Grant, callbacks: Arc<CallbackExecutor>, check: Option<Check>) -> Self {
        let valid_until = grant.at_most_hold_until(grant.asked_at.after(validity(grant.ttl())));
        let capped = grant.is_capped(grant.asked_at, grant.ttl());
        let renew_at = grant.next_renewal(grant.asked_at, capped);
        let warn_at = grant.options.hold_warning_at(grant.asked_at);
        let first_ttl = grant.options.first_ttl();
        // Redis granted the lock before `since`. The added 2 % allow for clocks that run at different speeds.
        let key_until = grant.since.after(first_ttl + first_ttl / 50);
        let state = State {
            capped,
            renew_at,
            track_at: Some(grant.since.after(TRACK_AFTER)),
            extras: Extras::new_if_needed(check, warn_at),
            ..State::held(valid_until, key_until)
        };
        Self::with_state(grant, callbacks, state)
    }

    fn with_state(grant: Grant, callbacks: Arc<CallbackExecutor>, state: State) -> Self {
        Self {
            grant,
            callbacks,
            state: Mutex::new(state),
        }
    }

    pub fn grant(&self) -> &Grant {
        &self.grant
    }

    /// This lock in the form that events have.
    pub fn event_lock(&self) -> EventLock<'_> {
        EventLock {
            key: self.grant.key.name(),
            fencing_token: self.grant.token,
        }
    }

    /// The rest of the validity; zero if the lease has ended. If the validity has ended at `now`, first ends the lease
    /// as lost.
    pub fn remaining(&self, now: MonotonicTime) -> Duration {
        let state = self.lock_and_expire(now);
        match state.phase {
            Phase::Held => state.valid_until.since(now),
            _ => Duration::ZERO,
        }
    }

    /// When the validity ends, unless the ttl is changed before.
    pub fn valid_until(&self) -> MonotonicTime {
        self.state.lock().valid_until
    }

    /// The reason if the lease is lost. If the validity has ended at `now`, first ends the lease as lost.
    pub fn loss(&self, now: MonotonicTime) -> Option<LossReason> {
        self.lock_and_expire(now).loss().cloned()
    }

    /// The place of this lease's loss in the order of all losses of this process. Zero if the lease was not lost.
    pub fn loss_number(&self) -> u64 {
        let state = self.state.lock();
        state.extras.as_ref().map_or(0, |extras| extras.loss_number)
    }

    /// Ends the lease as released, without a request to Redis. Also returns the reason as an error if the lease was
    /// lost before.
    pub fn mark_released(&self, now: MonotonicTime) -> (LeaseRemains, Result<(), LossReason>) {
        self.end_as(Phase::Released, now)
    }

    /// Ends the lease as passed to the holder of a ticket: its key is not released. Otherwise does the same as
    /// [`mark_released`](Self::mark_released).
    pub fn mark_transferred(&self, now: MonotonicTime) -> (LeaseRemains, Result<(), LossReason>) {
        self.end_as(Phase::Transferred, now)
    }

    /// Whether the holder has released the lease.
    pub fn is_released(&self) -> bool {
        self.state.lock().phase == Phase::Released
    }

    fn end_as(&self, phase: Phase, now: MonotonicTime) -> (LeaseRemains, Result<(), LossReason>) {
        let mut state = self.lock_and_expire(now);
        let detached = state.detach();
        if state.ttl_changing {
            // A renewal under way may still reach Redis.
            state.key_until = state.key_until.after(self.grant.ttl());
        }
        if let Some(reason) = state.loss() {
            return (detached, Err(reason.clone()));
        }
        state.phase = phase;
        (detached, Ok(()))
    }

    /// How much longer the lease is valid, if it is held at `now`. Never ends the lease, so callers may hold mutexes.
    pub fn valid_for(&self, now: MonotonicTime) -> Option<Duration> {
        let state = self.state.lock();
        let is_live = state.phase == Phase::Held && now < state.valid_until;
        is_live.then(|| state.valid_until.since(now))
    }

    /// Ends this lease and returns a lease for the next holder of this client, with the same id, the next token and
    /// the `options` that the next holder asked for. Sends nothing to Redis.
    ///
    /// Returns `None` and leaves the lease as it is in these cases:
    ///
    /// - The lease has ended, is a reader's, has other options, a check or a `min_hold`, or hand-offs are forbidden.
    /// - The lease is not renewed, its ttl is being changed or reaches the end of `max_hold`, or the lease was extended
    ///   beyond its ttl.
    /// - A third of the validity has passed, or a message of a `force_unlock` is being confirmed.
    ///
    /// Calls no listener, so callers may hold mutexes.
    pub fn hand_off(
        &self,
        now: MonotonicTime,
        options: Options,
    ) -> Option<(Arc<Self>, LeaseRemains)> {
        let mut state = self.state.lock();
        if self.grant.options.mode == Mode::Read || !self.may_pass(&state, now, &options) {
            return None;
        }
        let grant = Grant {
            token: self.grant.token + 1,
            asked_at: now,
            ..self.grant.clone()
        };
        let valid_until = grant.at_most_hold_until(state.valid_until);
        let next = State {
            // If a renewal is due and has not begun, this time is in the past.
            renew_at: state.renew_at,
            track_at: (!state.tracked).then(|| now.after(TRACK_AFTER)),
            others_queued: state.others_queued,
            extras: Extras::new_if_needed(None, options.hold_warning_at(now)),
            ..State::held(valid_until, state.key_until)
        };
        state.phase = Phase::Released;
        let detached = state.detach();
        drop(state);
        let next = Self::with_state(grant, Arc::clone(&self.callbacks), next);
        Some((Arc::new(next), detached))
    }

    /// Whether another thread of this client that asked for `options` may have the lease, too. For a reader's lease.
    pub fn may_be_joined(&self, now: MonotonicTime, options: &Options) -> bool {
        self.may_pass(&self.state.lock(), now, options)
    }

    /// Whether the lease may pass to another thread of this client, or be shared with it.
    fn may_pass(&self, state: &State, now: MonotonicTime, options: &Options) -> bool {
        let whole = validity(self.grant.ttl());
        let left = state.valid_until.since(now);
        state.phase == Phase::Held
            && *self.grant.options == *options
            && options.renew_every.is_some()
            && !options.checked
            && options.min_hold.is_zero()
            && state.renewal_stopped().is_none()
            && !state.ttl_changing
            && !state.capped
            && !state.no_hand_off
            && !state.is_force_being_confirmed()
            && (2 * whole / 3..=whole).contains(&left)
    }

    /// Forbids hand-offs of the lease after a transaction without a reply. Redis may still execute the transaction
    /// while the key has the same value, and a hand-off does not change the value.
    pub fn forbid_hand_off(&self) {
        self.state.lock().no_hand_off = true;
    }

    /// Sets whether other clients may be in the queue of the key in Redis.
    pub fn with_others_queued(mut self, others: bool) -> Self {
        self.state.get_mut().others_queued = others;
        self
    }

    pub fn has_others_queued(&self) -> bool {
        self.state.lock().others_queued
    }

    /// Ends the lease as lost and notifies its listeners, unless the lease has ended before. The reason is `reason`,
    /// unless the validity had ended at `now`.
    ///
    /// Ignores a report that the key does not contain the lease during a conversion: the key may contain the lease that
    /// this one becomes. The reply to the conversion decides.
    pub fn lose(&self, now: MonotonicTime, reason: LossReason) {
        let mut state = self.lock_and_expire(now);
        let is_missing = matches!(reason, LossReason::Deleted | LossReason::TakenOver { .. });
        if state.is_converting && is_missing {
            state.extras().was_reported_missing = true;
        } else {
            self.lose_and_unlock(state, reason);
        }
    }

    /// Ends a released lease as lost, because its release did not find it in Redis, and notifies the `detached`
    /// listeners. Returns `reason`, or `ForceUnlocked` if the client that unlocked the lease by force is known.
    pub fn lose_released(&self, mut detached: LeaseRemains, reason: LossReason) -> LossReason {
        let mut state = self.state.lock();
        debug_assert_eq!(state.phase, Phase::Released);
        let reason = state.end_as_lost(reason);
        drop(state);
        self.notify_lost(std::mem::take(&mut detached.listeners), &reason);
        reason
    }

    /// Records a message that `by` unlocked this lease by force. Returns true if the caller has to confirm the message
    /// by a request: only one such request runs at a time, and none within a second after a reply that the lease is
    /// held.
    pub fn record_force_message(&self, by: HolderId, now: MonotonicTime) -> bool {
        let mut state = self.state.lock();
        if state.phase != Phase::Held {
            return false;
        }
        let report = &mut state.extras().force;
        report.by = Some(by);
        let was_denied = report
            .denied_at
            .is_some_and(|at| now.since(at) < PAUSE_AFTER_DENIAL);
        let confirms = !report.confirming && !was_denied;
        report.is_repeated = report.confirming;
        report.confirming |= confirms;
        confirms
    }

    /// Records the end of the request that confirms a message. `denied_at` is set if a pipeline has reported that the
    /// lease is held.
    pub fn record_force_answer(&self, denied_at: Option<MonotonicTime>) {
        let mut state = self.state.lock();
        let report = &mut state.extras().force;
        report.confirming = false;
        if denied_at.is_some() {
            report.denied_at = denied_at;
            if !report.is_repeated {
                report.by = None;
            }
        }
    }

    /// The latest time at which Redis may still have the key, if the lock is not released.
    pub fn key_until(&self) -> MonotonicTime {
        self.state.lock().key_until
    }

    /// A new channel whose only message is the reason when the lease is lost. Keep the sender as long as the receiver:
    /// without the sender, the channel is disconnected when the lease ends.
    pub fn loss_channel(
        &self,
        now: MonotonicTime,
        guard: GuardNumber,
    ) -> (Arc<LossSender>, Receiver<LossReason>) {
        let (sender, receiver) = bounded(1);
        let keep = Arc::new(LossSender::OfLock(sender));
        self.report_loss_to(&keep, now, guard);
        (keep, receiver)
    }

    /// Sends the loss of this lease to a channel: when it is lost, or at once if it is lost already.
    pub fn report_loss_to(
        &self,
        channel: &Arc<LossSender>,
        now: MonotonicTime,
        guard: GuardNumber,
    ) {
        let mut state = self.lock_and_expire(now);
        if let Some(reason) = state.loss() {
            channel.send(self.grant.key.name(), reason.clone());
        } else if state.phase == Phase::Held {
            state.extras().listeners.add(LossChannel {
                guard,
                sender: LossSender::clone(channel),
                receiver: Arc::downgrade(channel),
            });
        }
    }

    /// Adds a callback that runs on the callback thread when the lease is lost. Queues the callback now if the lease is
    /// lost already.
    pub fn on_lost(&self, now: MonotonicTime, guard: GuardNumber, callback: LossCallback) {
        let mut state = self.lock_and_expire(now);
        if state.phase == Phase::Held {
            state.extras().listeners.callbacks.push((guard, callback));
            drop(state);
            self.callbacks.try_start_thread();
            return;
        }
        let loss = state.loss().cloned();
        // Unlock first: if the callback is dropped here, destructors of user code run.
        drop(state);
        if let Some(reason) = loss {
            self.callbacks.queue_callback(move || callback(reason));
        }
    }

    /// Removes the listeners of a guard that has ended while the lease still has other guards. Drops callbacks of
    /// users, so callers must hold no mutex. If the lease was lost before, its listeners were notified.
    pub fn remove_listeners(&self, now: MonotonicTime, guard: GuardNumber) {
        let mut state = self.lock_and_expire(now);
        let extras = state.extras.as_mut();
        let listeners = extras.map(|extras| extras.listeners.take_of(guard));
        drop(state);
        drop(LeaseRemains {
            timer: None,
            tracked: false,
            listeners: listeners.unwrap_or_default(),
            check: None,
        });
    }

    /// Locks the state. If the validity has ended at `now`, first marks the lease as lost, and notifies its listeners.
    fn lock_and_expire(&self, now: MonotonicTime) -> MutexGuard<'_, State> {
        let state = self.state.lock();
        if state.phase != Phase::Held || now < state.valid_until {
            return state;
        }
        let reason = if state.capped {
            LossReason::MaxHold
        } else {
            state
                .renewal_stopped()
                .cloned()
                .unwrap_or(LossReason::Expired)
        };
        self.lose_and_unlock(state, reason);
        self.state.lock()
    }

    /// Ends the lease as lost, if it is held. Sends to the loss channels, and queues the callbacks and the event.
    /// Unlocks the state.
    fn lose_and_unlock(&self, mut state: MutexGuard<'_, State>, reason: LossReason) {
        if state.phase != Phase::Held {
            return;
        }
        let reason = state.end_as_lost(reason);
        let extras = state.extras();
        let (listeners, check) = (std::mem::take(&mut extras.listeners), extras.check.take());
        drop(state);
        self.notify_lost(listeners, &reason);
        if let Some(check) = check {
            // Destructors of user code may run on the callback thread only.
            self.callbacks.queue_callback(move || drop(check));
        }
    }

    /// Sends the reason to the loss channels, and queues the callbacks and the event. Called once for each lost lease.
    fn notify_lost(&self, listeners: LossListeners, reason: &LossReason) {
        for channel in listeners.channels {
            channel.sender.send(self.grant.key.name(), reason.clone());
        }
        for (_, callback) in listeners.callbacks {
            let reason = reason.clone();
            self.callbacks.queue_callback(move || callback(reason));
        }
        self.callbacks.report_loss(self, reason.clone());
    }
}

impl State {
    /// The state of a held lease that has no timer and is not renewed.
    fn held(valid_until: MonotonicTime, key_until: MonotonicTime) -> Self {
        Self {
            phase: Phase::Held,
            valid_until,
            key_until,
            capped: false,
            renew_at: None,
            renewal_due: false,
            track_at: None,
            tracked: false,
            ttl_changing: false,
            is_converting: false,
            no_hand_off: false,
            others_queued: false,
            timer: None,
            extras: None,
        }
    }

    fn extras(&mut self) -> &mut Extras {
        self.extras.get_or_insert_default()
    }

    /// Marks the lease as lost. Returns `reason`, or `ForceUnlocked` if the client that unlocked the lease by force is
    /// known.
    fn end_as_lost(&mut self, mut reason: LossReason) -> LossReason {
        if matches!(reason, LossReason::Deleted | LossReason::TakenOver { .. })
            && let Some(by) = self.forced_by()
        {
            reason = LossReason::ForceUnlocked { by };
        }
        self.phase = Phase::Lost;
        self.renew_at = None;
        let extras = self.extras();
        extras.loss = Some(reason.clone());
        extras.loss_number = NEXT_LOSS.fetch_add(1, Ordering::Relaxed);
        reason
    }

    fn loss(&self) -> Option<&LossReason> {
        self.extras.as_ref()?.loss.as_ref()
    }

    fn forced_by(&self) -> Option<HolderId> {
        self.extras.as_ref()?.force.by.clone()
    }

    fn is_force_being_confirmed(&self) -> bool {
        self.extras
            .as_ref()
            .is_some_and(|extras| extras.force.confirming)
    }

    fn renewal_stopped(&self) -> Option<&LossReason> {
        self.extras.as_ref()?.renewal_stopped.as_ref()
    }

    /// Takes out the parts that have to be ended or dropped when the lease ends.
    fn detach(&mut self) -> LeaseRemains {
        let extras = self.extras.as_mut();
        let (listeners, check) = extras.map_or_else(Default::default, |extras| {
            (std::mem::take(&mut extras.listeners), extras.check.take())
        });
        LeaseRemains {
            timer: self.timer.take(),
            tracked: std::mem::take(&mut self.tracked),
            // The owner of each receiver keeps a sender of its own, so dropping these senders disconnects no channel.
            listeners,
            check,
        }
    }
}

impl Extras {
    fn new_if_needed(check: Option<Check>, warn_at: Option<MonotonicTime>) -> Option<Box<Self>> {
        let is_needed = check.is_some() || warn_at.is_some();
        is_needed.then(|| {
            Box::new(Self {
                check,
                warn_at,
                ..Self::default()
            })
        })
    }
}

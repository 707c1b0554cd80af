//! The common part of the guards of all locks: a held lease, which the drop of a guard releases.

use std::ops::Deref;
use std::panic::{RefUnwindSafe, UnwindSafe};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crossbeam_channel::{Receiver, bounded};

use crate::client::{Client, Handle};
use crate::command::Mode;
use crate::lease::{GuardNumber, Lease, LossSender, ONLY_GUARD};
use crate::process::fork::Process;
use crate::report::error::Error;
use crate::report::loss::{LossReason, LostKey};
use crate::report::observe;
use crate::report::released::Released;
use crate::store::Feature;
use crate::util::clock::MonotonicTime;
use crate::util::text::Shown;

/// A held lease. Its drop hands the lease off to a waiting thread of the client, or writes its release to Redis.
/// Several guards of readers may share a lease: the drop of the last one releases it.
///
/// Each public guard is a struct around a `Guard`. The macro [`guard!`] gives it the methods that all guards have.
pub struct Guard {
    pub lease: Arc<Lease>,
    pub client: Client,
    /// `None` if no listener receives the duration of the hold.
    granted_at: Option<MonotonicTime>,
    observed: observe::HoldSpan,
    /// Identifies the signals and callbacks of this guard.
    number: GuardNumber,
    /// Set once a call ends the hold, so the drop does not release the lock again.
    has_ended: bool,
}

/// The number of the next guard of a reader.
static NEXT_NUMBER: AtomicU64 = AtomicU64::new(ONLY_GUARD + 1);

impl Guard {
    pub fn new(lease: Arc<Lease>, client: Client) -> Self {
        let granted_at = client.callbacks().has_listeners().then(|| client.now());
        Self {
            granted_at,
            observed: observe::HoldSpan::begin(lease.event_lock()),
            number: match lease.grant().options.mode {
                Mode::Read => NEXT_NUMBER.fetch_add(1, Ordering::Relaxed),
                _ => ONLY_GUARD,
            },
            lease,
            client,
            has_ended: false,
        }
    }

    /// Makes another guard of a reader's lease, without a request.
    pub fn share(&self) -> Self {
        if let Ok(client) = self.client.live() {
            client.acquirer.add_guard(&self.lease);
        }
        Self::new(Arc::clone(&self.lease), self.client.clone())
    }

    pub fn key(&self) -> &str {
        self.lease.grant().key.name()
    }

    /// The parts of the client. Fails with `Forked` in a child of the process that holds the lock.
    pub fn live(&self) -> Result<&Handle, Error> {
        self.client
            .live()
            .map_err(|error| error.with_key(self.key()))
    }

    /// Releases the lock, and waits for the reply.
    pub fn unlock(mut self) -> Result<Released, Error> {
        self.has_ended = true;
        let acquirer = &self.live()?.acquirer;
        let result = acquirer.release_confirmed(&self.lease, self.number);
        self.end_unlocked(result)
    }

    /// Ends the hold after a release with this result. Adds the key to the result.
    fn end_unlocked(&mut self, result: Result<Released, Error>) -> Result<Released, Error> {
        let outcome = match &result {
            Ok(Released::Confirmed) => "released",
            Ok(Released::Shared) => "shared",
            Ok(Released::Unconfirmed(_)) => "unconfirmed",
            Err(_) => "lost",
        };
        self.end(outcome, outcome == "released");
        match result {
            Ok(Released::Unconfirmed(error)) => {
                Ok(Released::Unconfirmed(error.with_key(self.key())))
            }
            Ok(released) => Ok(released),
            Err(error) => Err(error.with_key(self.key())),
        }
    }

    /// Releases the locks of several guards, and waits for the replies. Returns the error of the first loss, if there
    /// is one, or the first release that was not confirmed.
    pub fn unlock_all(mut guards: Vec<Self>) -> Result<Released, Error> {
        let Some(first) = guards.first() else {
            return Ok(Released::Confirmed);
        };
        let live = first.client.live().map(|client| &client.acquirer);
        let acquirer = live.map_err(|error| error.with_key(first.key()))?;
        let results = acquirer.release_all_confirmed(&Self::leases(&guards));
        let mut released = Released::Confirmed;
        let mut losses = Vec::new();
        for (guard, result) in guards.iter_mut().zip(results) {
            match guard.end_unlocked(result) {
                Ok(result) if released.is_confirmed() => released = result,
                Ok(_) => {}
                Err(lost) => losses.push((guard.lease.loss_number(), lost)),
            }
        }
        let first = losses.into_iter().min_by_key(|(number, _)| *number);
        first.map_or(Ok(released), |(_, lost)| Err(lost))
    }

    fn leases(guards: &[Self]) -> Vec<Arc<Lease>> {
        guards
            .iter()
            .map(|guard| Arc::clone(&guard.lease))
            .collect()
    }

    /// Ends several guards after a closure, as [`finish`](Self::finish) ends one.
    pub fn finish_all(mut guards: Vec<Self>) -> Result<(), Error> {
        for guard in &mut guards {
            if guard.live()?.acquirer.hand_off(&guard.lease) {
                guard.end("handed_off", false);
            }
        }
        guards.retain(|guard| !guard.has_ended);
        Self::unlock_all(guards).map(drop)
    }

    /// Drops several guards, and sends their releases together.
    pub fn drop_all(mut guards: Vec<Self>) {
        let Some(client) = guards.first().map(|first| first.client.clone()) else {
            return;
        };
        let Ok(live) = client.live() else {
            // In a forked child, each guard's own drop sends nothing.
            return;
        };
        guards.retain(|guard| !guard.has_ended);
        let outcomes = live.acquirer.release_all(&Self::leases(&guards));
        for (guard, outcome) in guards.iter_mut().zip(outcomes) {
            guard.end(outcome.name(), false);
        }
    }

    /// Extends the locks of several guards with one request for each slot. Returns the first error.
    pub fn extend_all(guards: &[Self], duration: Duration) -> Result<(), Error> {
        let Some(first) = guards.first() else {
            return Ok(());
        };
        let client = first.live()?;
        for guard in guards {
            let checked = guard.check_extension(client, duration);
            checked.map_err(|error| error.with_key(guard.key()))?;
        }
        let results = client.watchdog.extend_all(&Self::leases(guards), duration);
        for (guard, result) in guards.iter().zip(results) {
            result.map_err(|error| error.with_key(guard.key()))?;
        }
        Ok(())
    }

    /// Ends the hold of a closure: hands the lock off to a waiting thread of this client, as a drop does, or releases
    /// it as [`unlock`](Self::unlock) does. Never hands off a lock that the client knows to be lost.
    pub fn finish(mut self) -> Result<(), Error> {
        if self.live()?.acquirer.hand_off(&self.lease) {
            self.end("handed_off", false);
            return Ok(());
        }
        self.unlock().map(drop)
    }

    /// Converts the lease to this mode, and returns the guard of the new lease. If other readers hold the key, returns
    /// this guard as an error in the result. After an outer error, the hold has ended.
    pub fn convert(mut self, mode: Mode) -> Result<Result<Self, Self>, Error> {
        let client = self.client.clone();
        let acquirer = &self.live().and_then(|_| client.live())?.acquirer;
        let (lease, number) = (Arc::clone(&self.lease), self.number);
        let converted = acquirer.convert(&lease, number, mode, |converted| match converted {
            Ok(None) => {}
            Ok(Some(_)) => self.end("converted", true),
            Err(error) if error.is_lease_lost() => self.end("lost", false),
            Err(_) => self.end("unconfirmed", false),
        });
        Ok(match converted? {
            Some(lease) => Ok(Self::new(lease, client)),
            None => Err(self),
        })
    }

    /// Ends the hold without a release, and returns a ticket. If the store has no tickets, the drop releases the lock.
    pub fn into_ticket(mut self) -> Result<String, Error> {
        let checked = self.live()?.check(Feature::Tickets);
        checked.map_err(|error| error.with_key(self.key()))?;
        self.has_ended = true;
        let result = self.live()?.acquirer.transfer_out(&self.lease);
        let outcome = if result.is_ok() {
            "transferred"
        } else {
            "lost"
        };
        self.report_end(outcome, result.is_ok());
        match result {
            Ok(ticket) => Ok(ticket.to_string()),
            Err(error) => Err(error.with_key(self.key())),
        }
    }

    pub fn remaining(&self) -> Duration {
        let client = self.client.live();
        client.map_or(Duration::ZERO, |client| self.lease.remaining(client.now()))
    }

    pub fn is_lost(&self) -> bool {
        let client = self.client.live();
        client.map_or(true, |client| self.lease.loss(client.now()).is_some())
    }

    pub fn check(&self) -> Result<(), Error> {
        match self.lease.loss(self.live()?.now()) {
            Some(reason) => Err(Error::lost(reason).with_key(self.key())),
            None => Ok(()),
        }
    }

    pub fn lost_signal(&self) -> LostSignal {
        let (keep, receiver) = match self.client.live() {
            Ok(client) => self.lease.loss_channel(client.now(), self.number),
            Err(_) => {
                let (sender, receiver) = bounded(1);
                let keep = LossSender::OfLock(sender);
                keep.send(self.key(), LossReason::Forked);
                (Arc::new(keep), receiver)
            }
        };
        LostSignal {
            receiver,
            keep,
            process: Process::current(),
        }
    }

    /// The guard whose lock was lost first, if one was lost.
    pub fn first_lost(guards: &[Self]) -> Option<&Self> {
        let lost = guards.iter().filter(|guard| guard.is_lost());
        lost.min_by_key(|guard| guard.lease.loss_number())
    }

    /// A signal of the first loss among several guards.
    pub fn lost_signal_of_all(guards: &[Self]) -> LostSignal<LostKey> {
        let (sender, receiver) = bounded(1);
        let keep = Arc::new(LossSender::OfSet(sender));
        // The channel takes only the first message.
        for guard in Self::first_lost(guards).into_iter().chain(guards) {
            match guard.client.live() {
                Ok(client) => guard
                    .lease
                    .report_loss_to(&keep, client.now(), guard.number),
                Err(_) => keep.send(guard.key(), LossReason::Forked),
            }
        }
        LostSignal {
            receiver,
            keep,
            process: Process::current(),
        }
    }

    pub fn on_lost(&self, callback: impl FnOnce(LossReason) + Send + 'static) {
        if let Ok(client) = self.client.live() {
            let callback = Box::new(callback);
            self.lease.on_lost(client.now(), self.number, callback);
        }
    }

    pub fn extend(&self, duration: Duration) -> Result<(), Error> {
        let client = self.live()?;
        let extended = self
            .check_extension(client, duration)
            .and_then(|()| client.watchdog.extend(&self.lease, duration));
        extended.map_err(|error| error.with_key(self.key()))
    }

    fn check_extension(&self, client: &Handle, duration: Duration) -> Result<(), Error> {
        client.config.check_ttl("extend", duration)?;
        let Some(hold_until) = self.lease.grant().hold_until() else {
            return Ok(());
        };
        let left = hold_until.since(client.now());
        if duration <= left {
            return Ok(());
        }
        let wanted = format!("at most {}, which is left of max_hold", Shown(left));
        Err(Error::invalid(
            "extend",
            &wanted,
            format_args!("{duration:?}"),
        ))
    }

    /// Stops renewal: the lock is lost for `reason` when its validity ends.
    pub fn stop_renewing(&self, reason: LossReason) {
        if self.client.live().is_ok() {
            self.lease.stop_renewing(reason);
        }
    }

    /// Runs `work` in the span of this hold.
    pub fn run<T>(&self, work: impl FnOnce() -> T) -> T {
        self.observed.run(work)
    }

    /// Records that the hold has ended, and reports it.
    fn end(&mut self, outcome: &'static str, confirmed: bool) {
        self.has_ended = true;
        self.report_end(outcome, confirmed);
    }

    /// Reports the end of the hold to the span, the metrics and the event handler.
    fn report_end(&mut self, outcome: &'static str, confirmed: bool) {
        let Some(granted_at) = self.granted_at else {
            return;
        };
        let held = self.client.now().since(granted_at);
        self.observed.ended(outcome, held);
        let lock = self.lease.event_lock();
        let callbacks = self.client.callbacks();
        callbacks.call_handler(|events| events.released(lock, held, confirmed));
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        // In a forked child, the lock belongs to the parent. The child leaks the client and everything that the client
        // owns.
        let Ok(client) = self.client.live() else {
            self.observed.forget();
            return;
        };
        if self.has_ended {
            return;
        }
        let outcome = client.acquirer.release(&self.lease, self.number);
        self.report_end(outcome.name(), false);
    }
}

// The comment at `impl UnwindSafe for Client` says why this is sound. A panic of the work does not poison the lock, as
// with `parking_lot`: the library cannot know whether the work was half done.
impl UnwindSafe for Guard {}
impl RefUnwindSafe for Guard {}

/// Implements the methods and traits that all guards have, for a public struct around a [`Guard`].
///
/// `guard!(MutexGuard, client.mutex("k").lock())` names the type, and an expression that acquires such a guard, for the
/// examples.
macro_rules! guard {
    ($Guard:ident, $example:expr) => {
        /// # After a fork
        ///
        /// In a child of the process that holds the lock, calls that return a `Result` fail with
        /// [`Forked`](crate::ErrorKind::Forked), and the drop of the guard has no effect.
        impl $Guard {
            /// Releases the lock and waits for Redis to confirm it, for at most one
            /// [`command_timeout`](crate::Builder::command_timeout).
            ///
            /// Fails only if the lock was lost. If Redis does not confirm the release, this call returns
            /// [`Released::Unconfirmed`](crate::Released::Unconfirmed), since the lock was held until then, and a
            /// thread of the client repeats the release. If Redis lost the key just before it became unreachable, that
            /// loss is not detected.
            ///
            /// # Errors
            /// `LeaseLost` if the lock was lost before: another holder may have run at the same time. If this call is
            /// the first to detect the loss, the loss is reported as usual: the callbacks of [`on_lost`](Self::on_lost)
            /// run, and the signals become ready.
            ///
            /// ```
            /// # let client = leasehold::Client::memory()?;
            #[doc = concat!("let guard = ", stringify!($example), "?;")]
            /// assert!(guard.unlock()?.is_confirmed());
            /// # Ok::<(), leasehold::Error>(())
            /// ```
            pub fn unlock(self) -> Result<$crate::Released, $crate::Error> {
                self.guard.unlock()
            }

            /// The name of the lock.
            ///
            /// ```
            /// # let client = leasehold::Client::memory()?;
            #[doc = concat!("let guard = ", stringify!($example), "?;")]
            /// assert_eq!(guard.key(), "k");
            /// # Ok::<(), leasehold::Error>(())
            /// ```
            pub fn key(&self) -> &str {
                self.guard.key()
            }

            /// The rest of the validity: for how long the lock is held if all further renewals fail. Zero once the lock
            /// is lost. The validity is the ttl in Redis less 1 % and 2 ms, which allow for the drift of two clocks.
            /// Sends no request.
            ///
            /// ```
            /// # use std::time::Duration;
            /// let memory = leasehold::MemoryStore::new(); // its clock can be moved
            /// let client = memory.client()?;
            #[doc = concat!("let guard = ", stringify!($example), "?;")]
            /// assert!(guard.remaining() > Duration::from_secs(29));
            /// memory.advance(Duration::from_secs(31)); // the renewals were late
            /// assert_eq!(guard.remaining(), Duration::ZERO);
            /// # Ok::<(), leasehold::Error>(())
            /// ```
            pub fn remaining(&self) -> std::time::Duration {
                self.guard.remaining()
            }

            /// Whether the lock was lost. Sends no request. At the end of its validity, the lock is lost even if Redis
            /// still has the key.
            ///
            /// ```
            /// # let client = leasehold::Client::memory()?;
            #[doc = concat!("let guard = ", stringify!($example), "?;")]
            /// assert!(!guard.is_lost());
            /// # Ok::<(), leasehold::Error>(())
            /// ```
            pub fn is_lost(&self) -> bool {
                self.guard.is_lost()
            }

            /// Returns an error if the lock was lost, for use with `?`. Sends no request.
            ///
            /// # Errors
            /// `LeaseLost`, with the reason.
            ///
            /// ```
            /// # let client = leasehold::Client::memory()?;
            #[doc = concat!("let guard = ", stringify!($example), "?;")]
            /// for line in ["a", "b"] {
            ///     guard.check()?;
            ///     println!("{line}");
            /// }
            /// # Ok::<(), leasehold::Error>(())
            /// ```
            pub fn check(&self) -> Result<(), $crate::Error> {
                self.guard.check()
            }

            /// A channel that receives the reason when the lock is lost. A release never makes the channel ready. Each
            /// call makes a new channel. In a forked child, a new channel has
            /// [`LossReason::Forked`](crate::LossReason::Forked) at once; a channel made before the fork never becomes
            /// ready there.
            ///
            /// ```
            /// # let client = leasehold::Client::memory()?;
            /// use leasehold::crossbeam_channel::{after, select};
            /// use std::time::Duration;
            ///
            #[doc = concat!("let guard = ", stringify!($example), "?;")]
            /// let lost = guard.lost_signal();
            /// select! {
            ///     recv(lost) -> reason => println!("lost: {reason:?}"),
            ///     recv(after(Duration::from_millis(20))) -> _ => println!("next piece of work"),
            /// }
            /// # Ok::<(), leasehold::Error>(())
            /// ```
            pub fn lost_signal(&self) -> $crate::LostSignal {
                self.guard.lost_signal()
            }

            /// Runs `callback` when the lock is lost, after [`is_lost`](Self::is_lost) returns true and all channels
            /// are ready. If the lock is lost already, `callback` runs as soon as possible. It never runs after the
            /// lock was released, after the client was shut down, or in a forked child.
            ///
            /// Callbacks run one after another on the client's callback thread, and may use the client. Their panics
            /// are caught.
            ///
            /// ```
            /// # let client = leasehold::Client::memory()?;
            #[doc = concat!("let guard = ", stringify!($example), "?;")]
            /// guard.on_lost(|reason| eprintln!("lost the lock: {reason}"));
            /// # Ok::<(), leasehold::Error>(())
            /// ```
            pub fn on_lost(&self, callback: impl FnOnce($crate::LossReason) + Send + 'static) {
                self.guard.on_lost(callback);
            }

            /// Extends the lock, so it lasts for at least `duration` from this call. Never shortens it. Takes one
            /// [`command_timeout`](crate::Builder::command_timeout) at most, also while a renewal is under way.
            ///
            /// # Errors
            /// `LeaseLost` if the lock was lost; `InvalidConfig` if `duration` is out of the bounds of a ttl or goes
            /// beyond `max_hold`. `Timeout` or `Unavailable` if Redis did not reply: the lock is held for as long as
            /// before, and Redis may keep the key for longer. `Denied` or `Protocol` if Redis refuses the request, or
            /// the key holds a foreign value.
            ///
            /// ```
            /// # let client = leasehold::Client::memory()?;
            /// # use std::time::Duration;
            #[doc = concat!("let guard = ", stringify!($example), "?;")]
            /// guard.extend(Duration::from_secs(60))?;
            /// assert!(guard.remaining() > Duration::from_secs(55));
            /// # Ok::<(), leasehold::Error>(())
            /// ```
            pub fn extend(&self, duration: std::time::Duration) -> Result<(), $crate::Error> {
                self.guard.extend(duration)
            }
        }

        impl $crate::locks::lock::ClosureGuard for $Guard {
            fn run<T>(&self, work: impl FnOnce() -> T) -> T {
                self.guard.run(work)
            }

            fn finish(self) -> Result<(), $crate::Error> {
                self.guard.finish()
            }
        }

        /// Shows the key of the lock, printable on one line of a log.
        impl std::fmt::Display for $Guard {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(&$crate::util::text::printable(self.key(), usize::MAX))
            }
        }
    };
}
pub(crate) use guard;

/// A channel that receives the reason when a lock is lost, from
/// [`MutexGuard::lost_signal`](crate::MutexGuard::lost_signal). The signal of several keys
/// ([`MutexesGuard::lost_signal`](crate::MutexesGuard::lost_signal)) receives a [`LostKey`](crate::LostKey).
///
/// A `LostSignal` dereferences to a [`Receiver`]: use it in `select!`, or with `recv_timeout`. Keep this value itself,
/// not a clone of the receiver: once this value is dropped, a release disconnects the channel, which makes it ready.
///
/// ```
/// # let server = leasehold_testbed::Server::start().unwrap();
/// # let client = leasehold::Client::open(&server.url())?;
/// let guard = client.mutex("k").lock()?;
/// let lost = guard.lost_signal();
/// guard.unlock()?;
/// assert!(lost.try_recv().is_err(), "released, not lost");
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Debug)]
pub struct LostSignal<T = LossReason> {
    receiver: Receiver<T>,
    keep: Arc<LossSender>,
    process: Process,
}

impl<T> Drop for LostSignal<T> {
    fn drop(&mut self) {
        if !self.process.is_current() {
            // The channel has mutexes. A thread of the parent may have held one of them at the fork.
            std::mem::forget((self.receiver.clone(), Arc::clone(&self.keep)));
        }
    }
}

impl<T> Deref for LostSignal<T> {
    type Target = Receiver<T>;

    fn deref(&self) -> &Self::Target {
        &self.receiver
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signal_of_another_process_is_leaked() {
        for (process, is_left) in [(Process::another(), true), (Process::current(), false)] {
            let (sender, receiver) = bounded(1);
            let keep = Arc::new(LossSender::OfLock(sender));
            let left = Arc::downgrade(&keep);
            drop(LostSignal {
                receiver,
                keep,
                process,
            });
            assert_eq!(left.strong_count() > 0, is_left);
        }
    }
}

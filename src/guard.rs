//! A lock in hand: what its holder can ask and do. Dropped, it lets go.

use std::fmt;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender};

use crate::client::Client;
use crate::clock::Moment;
use crate::error::Error;
use crate::lease::Lease;
use crate::loss::LossReason;
use crate::store::{Reply, Request};
use crate::wait::release_of;

/// A held lock; it is let go when this is dropped, on whichever thread.
///
/// Keep it in objects as you like: it owns all it needs. Dropping passes the lock on to a thread of
/// the same client that waits for it, or writes the release, and does not wait for the answer;
/// [`unlock`](Self::unlock) does, and tells.
///
/// A lock in Redis is a lease: however well it is renewed, it can be lost (a pause of the whole
/// process, a fail-over). The holder is told in three ways: [`is_lost`](Self::is_lost) and
/// [`check`](Self::check) when asked, [`lost_signal`](Self::lost_signal) while waiting, and
/// [`on_lost`](Self::on_lost) by callback. What must be right even so carries the
/// [`fencing_token`](Self::fencing_token) along.
///
/// ```
/// # let server = leasehold_testbed::Server::start().unwrap();
/// # let client = leasehold::Client::open(&server.url())?;
/// let guard = client.mutex("invoice:42").lock()?;
/// for line in ["a", "b"] {
///     guard.check()?;
///     println!("{line}");
/// }
/// guard.unlock()?;
/// # Ok::<(), leasehold::Error>(())
/// ```
#[must_use = "the lock is let go as soon as its guard is dropped"]
pub struct MutexGuard {
    lease: Arc<Lease>,
    client: Client,
    granted_at: Moment,
    let_go: bool,
}

/// Every method can be seen in use in the examples of [`MutexGuard`] or in its own.
impl MutexGuard {
    pub(crate) fn new(lease: Arc<Lease>, client: Client) -> Self {
        Self {
            granted_at: client.now(),
            lease,
            client,
            let_go: false,
        }
    }

    /// Lets go and waits for Redis to confirm it.
    ///
    /// # Errors
    /// `LeaseLost` if the lock was lost before: the work may have had company. Any other if Redis gave no
    /// answer (`Timeout`, `Unavailable`) or refused (`Denied`): the work was alone, and the release
    /// is repeated in the background until it is done or the ttl has ended.
    pub fn unlock(mut self) -> Result<(), Error> {
        self.let_go = true;
        let now = self.now();
        let client = self.client.handle();
        let released = client.watchdog.release(&self.lease, now);
        let result = match released {
            Err(reason) => {
                self.give_back_after(&reason);
                Err(Error::lost(reason))
            }
            Ok(()) => {
                let deadline = now.after(client.config.command_timeout);
                let mut request = [Request::new(release_of(&self.lease), deadline)];
                client.store.execute(&mut request);
                let [request] = request;
                match request.into_outcome() {
                    Ok(Reply::Missing) => Err(Error::lost(LossReason::Deleted)),
                    Ok(Reply::Taken { by }) => Err(Error::lost(LossReason::TakenOver { by })),
                    Ok(_) => Ok(()),
                    Err(error) => Err(error),
                }
            }
        };
        client.waits.released(&self.lease);
        self.tell_released(result.is_ok());
        result.map_err(|error| error.with_key(self.key()))
    }

    /// Hands the lock over to another process: this guard is over, the lock stays held, and whoever
    /// is given the returned ticket can [adopt](Client::adopt) it, once. Token, ttl, renewal and what is left of
    /// `max_hold` go along. The ttl is put back first (unless it is a promise); nobody renews until it is
    /// adopted, and without that the lock is free when its ttl ends. What passes until then is not counted
    /// by `max_hold`.
    ///
    /// The ticket is text without line breaks. Who knows it can take the lock: keep it as secret as
    /// the lock is worth.
    ///
    /// # Errors
    /// `LeaseLost` if the lock was lost before.
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// let ticket = client.mutex("k").lock()?.hand_over()?;
    /// assert!(client.mutex("k").is_locked()?, "nobody can come in between");
    /// let guard = client.adopt(&ticket)?;
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn hand_over(mut self) -> Result<String, Error> {
        self.let_go = true;
        let client = self.client.handle();
        let result = client.waits.hand_out(&self.lease).map_err(|reason| {
            self.give_back_after(&reason);
            client.waits.released(&self.lease);
            Error::lost(reason).with_key(self.key())
        });
        self.tell_released(result.is_ok());
        result.map(|ticket| ticket.to_string())
    }

    /// A lease that is lost may still have its key.
    fn give_back_after(&self, reason: &LossReason) {
        if reason.may_leave_its_key() {
            self.client.handle().store.post(release_of(&self.lease));
        }
    }

    /// The name of the lock.
    pub fn key(&self) -> &str {
        self.lease.terms().key.name()
    }

    /// A number greater than that of every earlier grant of this lock. Send it along with what you
    /// write, and let the storage refuse a smaller one than it has seen: then even a holder that
    /// does not know yet that it lost the lock can do no harm.
    pub fn fencing_token(&self) -> u64 {
        self.lease.terms().token
    }

    /// For how long the lock is still sure to be held if it were not renewed; zero once lost.
    /// Somewhat less than the ttl in Redis, to allow for the drift of two clocks.
    pub fn remaining(&self) -> Duration {
        self.lease.remaining(self.now())
    }

    /// Whether the lock was lost. Asks no server: past its validity it is lost, whatever Redis
    /// would say.
    pub fn is_lost(&self) -> bool {
        self.lease.loss(self.now()).is_some()
    }

    /// As [`is_lost`](Self::is_lost), for use with `?`.
    ///
    /// # Errors
    /// `LeaseLost`, with the reason.
    pub fn check(&self) -> Result<(), Error> {
        match self.lease.loss(self.now()) {
            Some(reason) => Err(Error::lost(reason).with_key(self.key())),
            None => Ok(()),
        }
    }

    /// A channel that becomes ready, with the reason, when the lock is lost, and never after it was
    /// let go. Each call gives one of its own.
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// use leasehold::crossbeam_channel::{after, select};
    /// use std::time::Duration;
    ///
    /// let guard = client.mutex("leader").lock()?;
    /// let lost = guard.lost_signal();
    /// select! {
    ///     recv(lost) -> reason => println!("not the leader any more: {reason:?}"),
    ///     recv(after(Duration::from_millis(20))) -> _ => println!("time for work"),
    /// }
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn lost_signal(&self) -> LostSignal {
        let (keep, receiver) = self.lease.signal(self.now());
        LostSignal {
            receiver,
            _keep: keep,
        }
    }

    /// Runs `callback` when the lock is lost, after [`is_lost`](Self::is_lost) and all signals say
    /// so; at once if it is lost already; never after it was let go, nor once the client has been
    /// shut down.
    ///
    /// Callbacks run one after another on a thread of the client's own; they may use the client. A
    /// panic in one is caught.
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// let guard = client.mutex("k").lock()?;
    /// guard.on_lost(|reason| eprintln!("lost the lock: {reason}"));
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn on_lost(&self, callback: impl FnOnce(LossReason) + Send + 'static) {
        self.lease.on_lost(self.now(), Box::new(callback));
    }

    /// Makes the lock last for `duration` from now at least. Never shortens it.
    ///
    /// # Errors
    /// `LeaseLost` if it is not ours any more; `InvalidConfig` if `duration` is out of the bounds of
    /// a ttl or goes beyond `max_hold`; `Timeout` or `Unavailable` if Redis gave no answer: the
    /// lock is held as long as it was before.
    ///
    /// ```
    /// # let server = leasehold_testbed::Server::start().unwrap();
    /// # let client = leasehold::Client::open(&server.url())?;
    /// # use std::time::Duration;
    /// let guard = client.mutex("k").lock()?;
    /// guard.extend(Duration::from_secs(60))?;
    /// assert!(guard.remaining() > Duration::from_secs(55));
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    pub fn extend(&self, duration: Duration) -> Result<(), Error> {
        let client = self.client.handle();
        let attach = |error: Error| error.with_key(self.key());
        client
            .config
            .check_ttl("extend", duration)
            .map_err(attach)?;
        if let Some(hold_until) = self.lease.terms().hold_until {
            let left = hold_until.since(self.now());
            if duration > left {
                let wanted = format!("at most {left:?}, which is left of max_hold");
                let given = format_args!("{duration:?}");
                return Err(attach(Error::invalid("extend", &wanted, given)));
            }
        }
        client
            .watchdog
            .extend(&self.lease, duration)
            .map_err(attach)
    }

    fn now(&self) -> Moment {
        self.client.now()
    }

    fn tell_released(&self, confirmed: bool) {
        self.client.handle().courier.tell(|events| {
            let held = self.now().since(self.granted_at);
            events.released(self.lease.event(), held, confirmed);
        });
    }
}

impl Drop for MutexGuard {
    fn drop(&mut self) {
        if !self.let_go {
            self.client.handle().waits.let_go(&self.lease);
            self.tell_released(false);
        }
    }
}

impl fmt::Debug for MutexGuard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MutexGuard")
            .field("key", &self.key())
            .field("fencing_token", &self.fencing_token())
            .field("remaining", &self.remaining())
            .finish()
    }
}

/// Becomes ready when a lock is lost: see [`MutexGuard::lost_signal`].
///
/// A [`Receiver`] in all but name (it dereferences to one): use it in `select!`, or with
/// `recv_timeout`. Keep this value itself, not a clone of the receiver inside: it is what keeps the
/// channel from becoming ready when the lock is let go.
///
/// ```
/// # let server = leasehold_testbed::Server::start().unwrap();
/// # let client = leasehold::Client::open(&server.url())?;
/// let guard = client.mutex("k").lock()?;
/// let lost = guard.lost_signal();
/// guard.unlock()?;
/// assert!(lost.try_recv().is_err(), "let go, not lost");
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Debug)]
pub struct LostSignal {
    receiver: Receiver<LossReason>,
    _keep: Arc<Sender<LossReason>>,
}

impl Deref for LostSignal {
    type Target = Receiver<LossReason>;

    fn deref(&self) -> &Self::Target {
        &self.receiver
    }
}

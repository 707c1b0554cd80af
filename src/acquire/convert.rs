//! Converts a held lease: the only reader becomes the writer, or the writer becomes a reader.
//!
//! The new lease has an id of its own, so late requests of the old lease change nothing. If a conversion gets no reply,
//! its outcome is unknown, and the caller gets an error. The store then releases the new lease, and this module the old
//! one. So the key is free after these releases, or when its ttl has ended. Neither release reports a loss.

use std::sync::Arc;

use crate::acquire::{Acquirer, Until};
use crate::command::{Command, Convert, Mode, Reply};
use crate::lease::{Grant, GuardNumber, Lease};
use crate::report::error::{Error, ErrorKind};

/// The result of a conversion: the new lease. `None` if other readers refuse an upgrade: the old lease then stays held.
pub type Converted = Result<Option<Arc<Lease>>, Error>;

impl Acquirer {
    /// Converts the lease of `guard` to one with this mode. After an error, the guard has ended, as after its drop.
    /// Calls `ended` with the result, and then the event handler.
    pub fn convert(
        &self,
        lease: &Arc<Lease>,
        guard: GuardNumber,
        mode: Mode,
        ended: impl FnOnce(&Converted),
    ) -> Converted {
        let key = &lease.grant().key;
        let observed = self.observe(key, Until::Now);
        let converted = self.try_convert(lease, mode);
        if let Err(error) = &converted {
            self.end_unconverted(lease, guard);
            if error.is_lease_lost() {
                self.forget_lost_entry(lease);
            }
        }
        ended(&converted);
        self.report(observed, key, converted, Option::as_deref)
    }

    fn try_convert(&self, lease: &Arc<Lease>, mode: Mode) -> Converted {
        let deadline = self.watchdog.now().after(self.command_timeout);
        let is_shared = || mode == Mode::Exclusive && !self.queues.has_one_guard(lease);
        if is_shared() {
            let loss = lease.loss(self.watchdog.now());
            return loss.map_or(Ok(None), |reason| Err(Error::lost(reason)));
        }
        if !lease.begin_conversion(deadline, || self.watchdog.now()) {
            return Err(match lease.loss(self.watchdog.now()) {
                Some(reason) => Error::lost(reason),
                None => Error::new(ErrorKind::Timeout, "a renewal is under way"),
            });
        }
        // A converting lease admits no more readers, but a reader may have joined just before.
        if is_shared() {
            self.end_refused(lease);
            return Ok(None);
        }
        let Grant { key, options, .. } = lease.grant();
        let pool = self.lease_pool(key);
        let (id, asked_at) = (pool.ids.next(), self.watchdog.now());
        let ttl = lease.conversion_ttl(asked_at);
        let command = Command::Convert(Convert {
            key: key.clone(),
            from: lease.grant().id,
            lease: id,
            mode,
            ttl,
            longest: ttl.max(lease.key_until().since(asked_at)),
            replicas: options.replicas,
        });
        let token = match self.store.execute_one(command, deadline)? {
            Reply::Granted { token, .. } => token,
            Reply::Contended { .. } if mode == Mode::Exclusive => {
                self.end_refused(lease);
                return Ok(None);
            }
            // The writer holds the key alone, so a downgrade is never contended.
            Reply::Contended { .. } => {
                let message = "the server has refused to make the writer a reader; check that it is Redis itself";
                return Err(Error::new(ErrorKind::Protocol, message));
            }
            reply => {
                let reason = reply.loss();
                let reason =
                    reason.unwrap_or_else(|| unreachable!("{reply:?} in reply to a conversion"));
                let _ = lease.end_conversion();
                let now = self.watchdog.now();
                lease.lose(now, reason.clone());
                return Err(Error::lost(lease.loss(now).unwrap_or(reason)));
            }
        };
        let mut options = **options;
        options.mode = mode;
        let options = pool.options.share(options);
        let grant = Grant {
            id,
            token,
            is_token_in_value: true,
            options: Arc::clone(&options),
            ..lease.grant().clone()
        };
        let now = self.watchdog.now();
        let Some((next, detached)) = lease.convert(grant, now, asked_at, ttl) else {
            // The old lease was lost before the reply came, and a loss is final.
            self.release_unheld(key.clone(), id, &options);
            let reason = lease.loss(now);
            return Err(reason.map_or_else(|| Error::new(ErrorKind::Shutdown, ""), Error::lost));
        };
        self.queues.replace_converted(lease, &next, self.hand_offs);
        self.watchdog.replace_lease(lease, &detached, &next);
        Ok(Some(next))
    }

    /// Ends a refused conversion: the lease stays held.
    fn end_refused(&self, lease: &Arc<Lease>) {
        if lease.end_conversion() {
            self.watchdog.confirm_share(Arc::clone(lease));
        }
        self.watchdog.schedule_or_lose(lease);
    }

    /// Ends a guard whose conversion failed. Redis may have replaced the old lease, so a release that does not find it
    /// is no loss.
    fn end_unconverted(&self, lease: &Lease, guard: GuardNumber) {
        if self.leave_share(lease, guard).is_some() {
            return;
        }
        let now = self.watchdog.now();
        drop(self.watchdog.end_lease(lease, now));
        self.send_late_release(lease, now);
        self.queues.remove_holder(lease);
    }
}

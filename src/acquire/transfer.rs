//! Transfers a held lock to another client: the old holder turns its lease into a ticket and leaves the key in Redis.
//! The new holder adopts the ticket under a lease id of its own.
//!
//! An adoption is a grant: it has a new, greater token. The key's queue stays. The new lease id replaces the old one,
//! so a ticket can be adopted only once. Redis refuses a ticket whose token is later than both its clock and its fence
//! counter. If an adoption gets no reply, the store releases the new lease.

use std::sync::Arc;

use crate::acquire::wait::{FIRST_POLL, LONGEST_OUTAGE_POLL};
use crate::acquire::{Acquirer, Until};
use crate::command::{Adopt, Adoption, Command, Reply};
use crate::lease::{Check, Lease, Ticket};
use crate::report::error::{Error, ErrorKind};
use crate::util::backoff::{Backoff, jittered};
use crate::util::clock::MonotonicTime;

impl Acquirer {
    /// Ends `lease`, leaves its key in Redis, and returns a ticket for it. Renews the lease first, unless its ttl is
    /// fixed, so that more time is left for the adoption. If Redis does not reply, the ticket has the rest of the ttl.
    pub fn transfer_out(&self, lease: &Arc<Lease>) -> Result<Ticket, Error> {
        let grant = lease.grant();
        let mut options = *grant.options;
        if lease.is_renewal_stopped() {
            options.renew_every = None;
        }
        if options.renew_every.is_some() {
            let ttl = lease.renewal_ttl(self.watchdog.now());
            // An error is ignored: the lease has recorded whether it was renewed.
            let _ = self.watchdog.extend(lease, ttl);
        }
        if options.checked {
            // A ticket does not contain the lease's check (`renew_while`), and a lease must not be renewed without its
            // check. So the adopted lease is not renewed.
            options.renew_every = None;
        }
        let now = self.watchdog.now();
        if let Err(reason) = self.watchdog.end_transferred(lease, now) {
            let lost = self.release_lost(lease, reason, now);
            self.queues.remove_holder(lease);
            return Err(lost);
        }
        self.queues.remove_holder(lease);
        options.max_hold = grant.hold_until().map(|until| until.since(now));
        Ok(Ticket {
            key: grant.key.clone(),
            lease: grant.id,
            token: grant.token,
            options,
            key_left: lease.key_until().since(now),
        })
    }

    /// Adopts a ticket. Repeats a request that did not reach Redis, for at most `outage_timeout`. Does not repeat a
    /// request without a reply: Redis may have carried it out, so the store releases the key.
    pub fn adopt(&self, ticket: &Ticket) -> Result<Arc<Lease>, Error> {
        let observed = self.observe(&ticket.key, Until::Forever);
        let adopted = self.adopt_through_outage(ticket, None, observed.call.started);
        self.report(observed, &ticket.key, adopted, |lease| Some(&**lease))
    }

    /// Adopts a ticket, and reports nothing. `check` is the user's check before each renewal: a ticket contains none.
    pub fn adopt_through_outage(
        &self,
        ticket: &Ticket,
        check: Option<&Check>,
        started: MonotonicTime,
    ) -> Result<Arc<Lease>, Error> {
        let mut backoff = Backoff::new(FIRST_POLL, LONGEST_OUTAGE_POLL);
        self.check_open()?;
        loop {
            let error = match self.try_adopt(ticket, check) {
                Err(error) if error.is_unavailable() => error,
                tried => return tried,
            };
            self.report_unavailable(&ticket.key, &error);
            let pause = jittered(backoff.next());
            let is_over = self.watchdog.now().since(started) + pause >= self.outage_timeout;
            if is_over || error.kind() == ErrorKind::Timeout {
                return Err(error);
            }
            self.shutdown.rest(pause)?;
        }
    }

    fn try_adopt(&self, ticket: &Ticket, check: Option<&Check>) -> Result<Arc<Lease>, Error> {
        let key = &ticket.key;
        let lease = self.lease_pool(key).ids.next();
        let asked_at = self.watchdog.now();
        let mut options = ticket.options;
        let command = Command::Adopt(Adopt {
            key: key.clone(),
            lease,
            grant: Box::new(Adoption {
                from: ticket.lease,
                token: ticket.token,
                ttl: options.first_ttl(),
                longest: options.first_ttl().max(ticket.key_left),
                renew: options.renew_every.is_some(),
                replicas: options.replicas,
            }),
        });
        let deadline = asked_at.after(self.command_timeout);
        let (expires_in, token) = match self.store.execute_one(command, deadline)? {
            Reply::Adopted { expires_in, token } => (expires_in, token),
            Reply::Taken { by: Some(holder) } => {
                let message = format!("{holder} has the lock now");
                return Err(Error::new(ErrorKind::NotHeld, message));
            }
            _ => return Err(Error::new(ErrorKind::NotHeld, "")),
        };
        if options.renew_every.is_none() {
            options.ttl = expires_in;
        }
        let grant = self.new_grant(key, lease, token, options, asked_at);
        let now = grant.since;
        let adopted = self.lease_of(grant, check.cloned(), true)?;
        // The old holder may have extended the ttl beyond the ticket's ttl.
        adopted.extend_key_until(now.after(expires_in));
        self.queues.hold(&adopted);
        Ok(adopted)
    }
}

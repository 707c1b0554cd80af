//! The shares of one key that this client holds: the leases of readers and of permits. Does no I/O.
//!
//! Each permit is a lease of its own. Reading threads share a lease: the first of them asks Redis, and others *join*
//! the lease without a request. A lease counts its guards, and the last guard releases it.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::command::Mode;
use crate::config::HandOffs;
use crate::lease::{Lease, Options};
use crate::util::clock::MonotonicTime;
use crate::util::id::{LeaseId, LeaseStart};

/// The shares of one key that threads of this client hold.
#[derive(Default)]
pub struct Shares {
    leases: BTreeMap<LeaseId, Share>,
    /// The reader lease that Redis granted last. Readers join only this lease.
    latest_reader: Option<LeaseId>,
}

struct Share {
    lease: Arc<Lease>,
    /// The guards of the lease. Zero once the last guard has begun the release.
    guards: usize,
    /// How many readers have joined.
    joins: u32,
    /// When this client got the share. A reader may have been a writer before.
    since: MonotonicTime,
}

impl Shares {
    pub fn is_empty(&self) -> bool {
        self.leases.is_empty()
    }

    pub fn leases(&self) -> impl Iterator<Item = &Arc<Lease>> {
        self.leases.values().map(|share| &share.lease)
    }

    pub fn find(&self, start: LeaseStart) -> Option<&Arc<Lease>> {
        let mut found = self.leases.range(start.ids());
        found.next().map(|(_, share)| &share.lease)
    }

    pub fn contains(&self, lease: &Lease) -> bool {
        let share = self.leases.get(&lease.grant().id);
        share.is_some_and(|share| std::ptr::eq(&*share.lease, lease))
    }

    /// Adds a lease with one guard. Returns the lease with the same id that this one replaces after a hand-off.
    pub fn insert(&mut self, lease: Arc<Lease>, since: MonotonicTime) -> Option<Arc<Lease>> {
        let (id, mode) = (lease.grant().id, lease.grant().options.mode);
        if mode == Mode::Read {
            self.latest_reader = Some(id);
        }
        let share = Share {
            lease,
            guards: 1,
            joins: 0,
            since,
        };
        self.leases.insert(id, share).map(|before| before.lease)
    }

    /// Removes this lease.
    pub fn remove(&mut self, lease: &Lease) -> Option<Arc<Lease>> {
        let id = lease.grant().id;
        if !self.contains(lease) {
            return None;
        }
        self.latest_reader.take_if(|latest| *latest == id);
        self.leases.remove(&id).map(|share| share.lease)
    }

    /// Adds a guard to the latest reader lease, if a reader with these options may join it at `now`. Hand-offs and
    /// joins have the same bounds, since both let threads of this client pass the waiters of other clients.
    pub fn join(
        &mut self,
        options: &Options,
        limits: HandOffs,
        now: MonotonicTime,
    ) -> Option<Arc<Lease>> {
        let share = self.leases.get_mut(&self.latest_reader?)?;
        let may_join = share.guards > 0
            && share.joins < limits.count
            && now.since(share.since) < limits.time
            && share.lease.may_be_joined(now, options);
        may_join.then(|| {
            share.guards += 1;
            share.joins += 1;
            Arc::clone(&share.lease)
        })
    }

    /// Adds another guard to a lease.
    pub fn add_guard(&mut self, lease: &Lease) {
        if let Some(share) = self.leases.get_mut(&lease.grant().id) {
            share.guards += 1;
        }
    }

    /// Whether the lease has exactly one guard.
    pub fn has_one_guard(&self, lease: &Lease) -> bool {
        let share = self.leases.get(&lease.grant().id);
        share.is_some_and(|share| share.guards == 1)
    }

    /// Removes a guard of the lease. Returns true if it was the last one: the caller then releases the lease.
    pub fn remove_guard(&mut self, lease: &Lease) -> bool {
        let Some(share) = self.leases.get_mut(&lease.grant().id) else {
            return true;
        };
        share.guards -= 1;
        share.guards == 0
    }
}

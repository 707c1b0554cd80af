//! The masters of a Cluster that a client uses: which of them serves which slot, and the `Node` of each.

use std::collections::HashSet;
use std::sync::Arc;

use parking_lot::{Mutex, RwLock};

use crate::cluster::master::Master;
use crate::cluster::slot_map::{AnnouncedId, MAX_KNOWN, MAX_MASTERS, NodeId, SlotMap, SlotRange};
use crate::report::error::{Error, ErrorKind};
use crate::store::ServerId;
use crate::util::slot::Slot;
use crate::wire::connect::url::HostPort;

/// The masters and the slot map.
#[derive(Default)]
pub struct Masters {
    table: RwLock<Table>,
    /// The replicas in the last slot map. The client may ask them for the next map.
    replicas: Mutex<Vec<HostPort>>,
    /// The ids of the nodes in the last slot map, at most [`MAX_MASTERS`] plus [`MAX_KNOWN`].
    ids: Mutex<HashSet<NodeId>>,
}

#[derive(Default)]
struct Table {
    slots: SlotMap,
    /// The masters by `ServerId`. A master without slots is kept until its releases are done.
    masters: Vec<Option<Arc<Master>>>,
}

impl Table {
    fn master(&self, id: ServerId) -> Option<&Arc<Master>> {
        self.masters.get(usize::from(id.0))?.as_ref()
    }

    /// Returns the master at `address`, and adds it if it is new. Returns `None` if the table is full.
    fn get_or_add(&mut self, address: &HostPort) -> Option<ServerId> {
        let mut masters = self.masters.iter().flatten();
        if let Some(master) = masters.find(|master| master.address() == address) {
            return Some(master.id());
        }
        let free = self.masters.iter().position(Option::is_none);
        let index = free.unwrap_or(self.masters.len());
        if index >= MAX_MASTERS {
            return None;
        }
        let id = ServerId(u8::try_from(index).ok()?);
        if index == self.masters.len() {
            self.masters.push(None);
        }
        self.masters[index] = Some(Arc::new(Master::new(id, address.clone())));
        Some(id)
    }

    /// Sets for each master whether it serves a slot.
    fn update_retired(&self) {
        for master in self.masters.iter().flatten() {
            master.set_serves_slots(self.slots.serves(master.id()));
        }
    }
}

impl Masters {
    /// The master that serves `slot`.
    pub fn owner(&self, slot: Slot) -> Option<Arc<Master>> {
        let table = self.table.read();
        let owner = table.slots.owner(slot)?;
        table.master(owner).map(Arc::clone)
    }

    /// Whether `server` serves `slot`.
    pub fn is_owner(&self, server: ServerId, slot: Slot) -> bool {
        self.table.read().slots.owner(slot) == Some(server)
    }

    /// All masters, including those without slots.
    pub fn all(&self) -> Vec<Arc<Master>> {
        self.table
            .read()
            .masters
            .iter()
            .flatten()
            .map(Arc::clone)
            .collect()
    }

    /// The master with this number.
    pub fn get(&self, server: ServerId) -> Option<Arc<Master>> {
        self.table.read().master(server).map(Arc::clone)
    }

    /// Returns the master at `address`, which a redirect has named. Adds it if it is new, and ends its retirement.
    pub fn get_or_add_named(&self, address: &HostPort) -> Result<Arc<Master>, Error> {
        let mut table = self.table.write();
        let master = table.get_or_add(address);
        let master = master.and_then(|id| table.master(id).map(Arc::clone));
        master
            .inspect(|master| master.reinstate())
            .ok_or_else(|| too_many(address))
    }

    /// Makes the master at `to` the owner of `slot`. Returns true if this changes the map.
    pub fn set_owner(&self, slot: Slot, to: &HostPort) -> Result<bool, Error> {
        let mut table = self.table.write();
        let owner = table.get_or_add(to).ok_or_else(|| too_many(to))?;
        let is_new = table.slots.set(slot, owner);
        if is_new {
            table.update_retired();
        }
        Ok(is_new)
    }

    /// Whether `ranges` can be the next slot map of the same Cluster: they contain a node of the last map, other than
    /// the node that sent `ranges`. (After `CLUSTER RESET SOFT`, the sender keeps its id in another Cluster.) The
    /// sender counts only if `ranges` contain no other node. Also returns true if one of the two maps has no ids.
    pub fn can_be_next(&self, ranges: &[SlotRange]) -> bool {
        let known = self.ids.lock();
        let is_known = |node: &&AnnouncedId| known.contains(&node.id);
        let nodes = || ranges.iter().flat_map(|range| &range.ids);
        let mut others = nodes().filter(|node| !node.is_sender).peekable();
        if known.is_empty() || nodes().next().is_none() {
            return true;
        }
        match others.peek() {
            Some(_) => others.any(|node| is_known(&node)),
            None => nodes().any(|node| is_known(&node)),
        }
    }

    /// Replaces the slot map by `ranges`. A slot that `ranges` leave out keeps its master. Returns the slots whose
    /// master has changed.
    pub fn replace(&self, ranges: &[SlotRange]) -> Vec<Slot> {
        let replicas = ranges.iter().flat_map(|range| &range.replicas);
        let mut known: Vec<HostPort> = Vec::new();
        for replica in replicas {
            if known.len() < MAX_KNOWN && !known.contains(replica) {
                known.push(replica.clone());
            }
        }
        *self.replicas.lock() = known;
        let mut ids = HashSet::new();
        for node in ranges.iter().flat_map(|range| &range.ids) {
            if ids.len() < MAX_MASTERS + MAX_KNOWN && !ids.contains(&node.id) {
                ids.insert(node.id.clone());
            }
        }
        *self.ids.lock() = ids;
        let mut moved = Vec::new();
        let mut table = self.table.write();
        for range in ranges {
            // A master beyond the bound is not added: its slots keep their last master, which replies `MOVED`.
            if let Some(owner) = table.get_or_add(&range.master) {
                moved.extend(range.slots().filter(|slot| table.slots.set(*slot, owner)));
            }
        }
        if !moved.is_empty() {
            table.update_retired();
        }
        moved
    }

    /// Sets the node at `by` as the announcer of each master without an announcer.
    pub fn set_announcer(&self, by: &HostPort) {
        let table = self.table.read();
        let masters = table.masters.iter().flatten();
        masters.for_each(|master| master.set_announcer(by));
    }

    /// The addresses of all known nodes, masters first.
    pub fn addresses(&self) -> Vec<HostPort> {
        let masters = self
            .all()
            .into_iter()
            .map(|master| master.address().clone());
        let replicas = self.replicas.lock().clone();
        masters.chain(replicas).collect()
    }

    /// The lowest slot that `server` serves; `None` if it serves none.
    pub fn lowest_slot_of(&self, server: ServerId) -> Option<Slot> {
        self.table.read().slots.lowest_of(server)
    }

    /// Removes and returns the master with this number if `is_idle` returns true, unless it serves a slot or another
    /// thread uses it. Calls `is_idle` only when this table has the last reference to the `Master`: until then, another
    /// thread may leave work there.
    pub fn remove_if(
        &self,
        server: ServerId,
        is_idle: impl FnOnce(&Master) -> bool,
    ) -> Option<Master> {
        let mut table = self.table.write();
        let entry = table.masters.get_mut(usize::from(server.0))?;
        let is_unused = |master: &mut Arc<Master>| {
            !master.serves_slots() && Arc::strong_count(master) == 1 && is_idle(master)
        };
        Arc::into_inner(entry.take_if(is_unused)?)
    }
}

/// The error for a further master at `address` when the table is full.
fn too_many(address: &HostPort) -> Error {
    let message = format!(
        "{address} is not used: the Cluster has more than {MAX_MASTERS} masters, which leasehold does not support; use \
         a Cluster with fewer masters for locks"
    );
    Error::new(ErrorKind::Unavailable, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(port: usize) -> HostPort {
        HostPort {
            host: "h".to_owned(),
            port: u16::try_from(port).unwrap(),
        }
    }

    fn slot(number: usize) -> Slot {
        Slot::new(u16::try_from(number).unwrap()).unwrap()
    }

    fn range(first: usize, last: usize, master: usize, replicas: &[usize]) -> SlotRange {
        SlotRange {
            first: slot(first),
            last: slot(last),
            master: address(master),
            replicas: replicas.iter().map(|port| address(*port)).collect(),
            ids: [&[master], replicas].concat().into_iter().map(id).collect(),
        }
    }

    /// The id of the node at this port. The node at port 9 is the sender of the map.
    fn id(port: usize) -> AnnouncedId {
        AnnouncedId {
            id: port.to_string().into_bytes().into(),
            is_sender: port == 9,
        }
    }

    fn port_of(masters: &Masters, number: usize) -> Option<u16> {
        masters
            .owner(slot(number))
            .map(|owner| owner.address().port)
    }

    #[test]
    fn the_next_slot_map_shares_a_node_with_the_last() {
        let masters = Masters::default();
        assert!(masters.can_be_next(&[range(0, 9, 1, &[])]));
        masters.replace(&[range(0, 9, 1, &[3]), range(10, 19, 2, &[])]);
        // After a fail-over, only the replica is left.
        assert!(masters.can_be_next(&[range(0, 19, 3, &[7])]));
        assert!(masters.can_be_next(&[range(0, 9, 7, &[]), range(10, 19, 8, &[2])]));
        assert!(!masters.can_be_next(&[range(0, 9, 7, &[8])]));
        let mut without_ids = range(0, 9, 7, &[]);
        without_ids.ids.clear();
        assert!(masters.can_be_next(&[without_ids]));
        // The sender may have moved to another Cluster, unless it is alone.
        masters.replace(&[range(0, 9, 1, &[9]), range(10, 19, 2, &[])]);
        assert!(!masters.can_be_next(&[range(0, 9, 7, &[9])]));
        assert!(masters.can_be_next(&[range(0, 9, 2, &[9])]));
        assert!(masters.can_be_next(&[range(0, 19, 9, &[])]));
        // Nodes of earlier maps do not count.
        masters.replace(&[range(0, 19, 3, &[7])]);
        assert!(!masters.can_be_next(&[range(0, 19, 1, &[2])]));
    }

    #[test]
    fn known_ids_have_a_bound() {
        let masters = Masters::default();
        let replicas: Vec<usize> = (2..1000).collect();
        masters.replace(&[range(0, 9, 1, &replicas)]);
        assert_eq!(masters.ids.lock().len(), MAX_MASTERS + MAX_KNOWN);
        assert!(masters.can_be_next(&[range(0, 9, 384, &[])]));
        assert!(!masters.can_be_next(&[range(0, 9, 386, &[])]));
    }

    #[test]
    fn a_new_map_tells_which_slots_have_moved() {
        let masters = Masters::default();
        assert_eq!(
            masters
                .replace(&[range(0, 9, 1, &[3]), range(10, 19, 2, &[4])])
                .len(),
            20
        );
        assert_eq!(
            [0, 9, 10, 20].map(|slot| port_of(&masters, slot)),
            [Some(1), Some(1), Some(2), None]
        );
        assert_eq!(masters.addresses(), [1, 2, 3, 4].map(address));
        let first = masters.owner(slot(0)).unwrap();
        // A slot that the answer leaves out keeps its master.
        assert_eq!(
            masters.replace(&[range(0, 4, 1, &[]), range(9, 19, 2, &[])]),
            [slot(9)]
        );
        assert_eq!(
            [4, 5, 9].map(|slot| port_of(&masters, slot)),
            [Some(1), Some(1), Some(2)]
        );
        assert!(
            Arc::ptr_eq(&first, &masters.owner(slot(0)).unwrap()),
            "a master keeps its node"
        );
        assert_eq!(
            masters.lowest_slot_of(masters.owner(slot(9)).unwrap().id()),
            Some(slot(9))
        );
    }

    #[test]
    fn a_redirect_moves_one_slot() {
        let masters = Masters::default();
        masters.replace(&[range(0, 9, 1, &[])]);
        assert!(masters.set_owner(slot(5), &address(2)).unwrap());
        assert!(!masters.set_owner(slot(5), &address(2)).unwrap());
        assert_eq!(
            [4, 5, 6].map(|slot| port_of(&masters, slot)),
            [Some(1), Some(2), Some(1)]
        );
    }

    #[test]
    fn redirects_retire_a_master_and_name_it_again() {
        let masters = Masters::default();
        masters.replace(&[range(5, 5, 1, &[])]);
        let old = masters.owner(slot(5)).unwrap();
        let flag = old.retired_flag();
        let is_retired = || flag.load(std::sync::atomic::Ordering::Relaxed);
        assert!(!is_retired());
        masters.set_owner(slot(5), &address(2)).unwrap();
        assert!(is_retired() && !old.serves_slots());
        masters.get_or_add_named(&address(1)).unwrap();
        assert!(!is_retired());
    }

    #[test]
    fn only_an_unused_master_is_removed() {
        let masters = Masters::default();
        masters.replace(&[range(0, 9, 1, &[])]);
        let old = masters.owner(slot(0)).unwrap();
        let id = old.id();
        drop(old);
        assert!(masters.remove_if(id, |_| true).is_none(), "it serves slots");
        let used = masters.owner(slot(0)).unwrap();
        masters.replace(&[range(0, 9, 2, &[])]);
        assert!(
            masters.remove_if(id, |_| true).is_none(),
            "another thread uses it"
        );
        drop(used);
        assert!(masters.remove_if(id, |_| false).is_none(), "it has work");
        let old = masters.remove_if(id, |_| true).unwrap();
        assert_eq!(masters.addresses(), [address(2)]);
        // The number of the removed master is free again.
        let next = masters.get_or_add_named(&address(3)).unwrap();
        assert_eq!(next.id(), old.id());
        assert_ne!(next.notification_epoch(0), old.notification_epoch(0));
    }

    #[test]
    fn masters_beyond_the_bound_are_not_used() {
        let masters = Masters::default();
        let ranges: Vec<SlotRange> = (0..MAX_MASTERS + 1)
            .map(|master| range(master, master, master + 1, &[]))
            .collect();
        masters.replace(&ranges);
        assert_eq!(masters.all().len(), MAX_MASTERS);
        assert_eq!(port_of(&masters, MAX_MASTERS), None);
        let error = masters
            .get_or_add_named(&address(9_999))
            .map(drop)
            .unwrap_err();
        assert_eq!(
            error.to_string(),
            "Redis is unavailable: h:9999 is not used: the Cluster has more than 128 masters, which leasehold does not \
             support; use a Cluster with fewer masters for locks"
        );
        assert!(masters.set_owner(slot(0), &address(9_999)).is_err());
        assert_eq!(port_of(&masters, 0), Some(1));
    }

    #[test]
    fn addresses_of_replicas_are_bounded() {
        let masters = Masters::default();
        let replicas: Vec<usize> = (1_000..2_000).collect();
        masters.replace(&[range(0, 9, 1, &replicas)]);
        assert_eq!(masters.addresses().len(), 1 + MAX_KNOWN);
    }
}

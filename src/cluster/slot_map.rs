//! The slot map of a Cluster as plain data: the master of each slot, and the other nodes that are known. Addresses are
//! those that the nodes announce. An empty host, `?` or nil stands for the host of the node that replied.

use redis::Value;

use crate::store::ServerId;
use crate::util::slot;
use crate::util::slot::Slot;
use crate::util::text::printable;
use crate::wire::connect::url::{HostPort, LONGEST_HOST};

/// The most masters that a client uses at a time.
pub const MAX_MASTERS: usize = 128;
/// The greatest number of replicas whose addresses are kept: the client also asks replicas for the slot map.
pub const MAX_KNOWN: usize = 256;

/// The length of the longest node id that the client keeps, in bytes. The ids of Redis have 40 bytes.
const LONGEST_ID: usize = 64;

/// Marks a slot without a known master.
const NONE: u8 = u8::MAX;

/// The master of each slot, by its index among the servers of the store.
pub struct SlotMap {
    owners: Box<[u8]>,
    /// How many slots each master serves.
    counts: [u16; MAX_MASTERS],
}

impl Default for SlotMap {
    fn default() -> Self {
        Self {
            owners: vec![NONE; usize::from(slot::COUNT)].into_boxed_slice(),
            counts: [0; MAX_MASTERS],
        }
    }
}

impl SlotMap {
    pub fn owner(&self, slot: Slot) -> Option<ServerId> {
        let owner = self.owners[usize::from(slot.number())];
        (owner != NONE).then_some(ServerId(owner))
    }

    /// Makes `owner` the master of `slot`. Returns whether `slot` had another master before.
    pub fn set(&mut self, slot: Slot, owner: ServerId) -> bool {
        let before = std::mem::replace(&mut self.owners[usize::from(slot.number())], owner.0);
        if before != owner.0 {
            if before != NONE {
                self.counts[usize::from(before)] -= 1;
            }
            self.counts[usize::from(owner.0)] += 1;
        }
        before != owner.0
    }

    /// Whether `server` serves a slot.
    pub fn serves(&self, server: ServerId) -> bool {
        self.counts[usize::from(server.0)] > 0
    }

    /// The lowest slot that `server` serves.
    pub fn lowest_of(&self, server: ServerId) -> Option<Slot> {
        let lowest = self.owners.iter().position(|owner| *owner == server.0)?;
        Slot::new(u16::try_from(lowest).ok()?)
    }
}

/// Slots in a row that one master serves.
#[derive(Debug, PartialEq, Eq)]
pub struct SlotRange {
    pub first: Slot,
    pub last: Slot,
    pub master: HostPort,
    pub replicas: Vec<HostPort>,
    /// The ids of these nodes.
    pub ids: Vec<AnnouncedId>,
}

/// The id of a node, which is unique among all nodes of all Clusters. A node keeps it when its address changes.
pub type NodeId = Box<[u8]>;

/// The id of a node in a slot map.
#[derive(Debug, PartialEq, Eq)]
pub struct AnnouncedId {
    pub id: NodeId,
    /// Whether this node has sent the map.
    pub is_sender: bool,
}

impl SlotRange {
    pub fn slots(&self) -> impl Iterator<Item = Slot> + use<> {
        (self.first.number()..=self.last.number()).filter_map(Slot::new)
    }
}

/// Reads the reply of the node at `asked` to `CLUSTER SLOTS`. `None` for any other value.
pub fn read_ranges(reply: Value, asked: &HostPort) -> Option<Vec<SlotRange>> {
    let Value::Array(ranges) = reply else {
        return None;
    };
    ranges
        .iter()
        .map(|range| read_range(range, asked))
        .collect()
}

fn read_range(range: &Value, asked: &HostPort) -> Option<SlotRange> {
    let Value::Array(parts) = range else {
        return None;
    };
    let [first, last, master, replicas @ ..] = parts.as_slice() else {
        return None;
    };
    let (first, last) = (slot(first)?, slot(last)?);
    Some(SlotRange {
        first,
        last,
        ids: [master]
            .into_iter()
            .chain(replicas)
            .filter_map(|node| read_id(node, asked))
            .collect(),
        master: read_node(master, asked)?,
        // A replica whose address is not known yet is left out.
        replicas: replicas
            .iter()
            .filter_map(|node| read_node(node, asked))
            .collect(),
    })
}

fn slot(value: &Value) -> Option<Slot> {
    let Value::Int(number) = value else {
        return None;
    };
    Slot::new(u16::try_from(*number).ok()?)
}

/// Reads `[host, port, ..]`. A missing host (`nil`, `""` or `?`) is that of the node that was asked.
fn read_node(node: &Value, asked: &HostPort) -> Option<HostPort> {
    let Value::Array(parts) = node else {
        return None;
    };
    let [host, Value::Int(port), ..] = parts.as_slice() else {
        return None;
    };
    let host = match host {
        Value::BulkString(host) => std::str::from_utf8(host).ok()?,
        Value::SimpleString(host) => host,
        Value::Nil => "",
        _ => return None,
    };
    let port = u16::try_from(*port).ok().filter(|port| *port > 0)?;
    Some(resolved(host, port, asked))
}

/// Reads the id in `[host, port, id, ..]`.
fn read_id(node: &Value, asked: &HostPort) -> Option<AnnouncedId> {
    let Value::Array(parts) = node else {
        return None;
    };
    match parts.get(2) {
        Some(Value::BulkString(id)) if (1..=LONGEST_ID).contains(&id.len()) => Some(AnnouncedId {
            id: id.as_slice().into(),
            is_sender: read_node(node, asked).is_some_and(|address| address == *asked),
        }),
        _ => None,
    }
}

/// The address of a node that another node announced. Errors show it, so an invalid host is escaped and cut.
pub fn resolved(host: &str, port: u16, asked: &HostPort) -> HostPort {
    let host = match host {
        "" | "?" => &asked.host,
        host => host,
    };
    HostPort {
        host: printable(host, LONGEST_HOST).into_owned(),
        port,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(host: &str, port: u16) -> HostPort {
        let host = host.to_owned();
        HostPort { host, port }
    }

    fn node(host: Value, port: i64) -> Value {
        let id = Value::BulkString(vec![b'a'; 40]);
        Value::Array(vec![host, Value::Int(port), id, Value::Array(Vec::new())])
    }

    fn text(text: &str) -> Value {
        Value::BulkString(text.as_bytes().to_vec())
    }

    fn slot(number: u16) -> Slot {
        Slot::new(number).unwrap()
    }

    fn range(first: i64, last: i64, nodes: Vec<Value>) -> Value {
        Value::Array([vec![Value::Int(first), Value::Int(last)], nodes].concat())
    }

    #[test]
    fn ranges_name_their_master_and_replicas() {
        let asked = address("asked", 1);
        let reply = Value::Array(vec![
            range(
                0,
                99,
                vec![node(text("10.0.0.1"), 7000), node(text("::1"), 7001)],
            ),
            range(
                100,
                16_383,
                vec![node(text("two.example"), 7002), node(text("x"), 0)],
            ),
        ]);
        let ranges = read_ranges(reply, &asked).unwrap();
        assert_eq!(ranges[0].master, address("10.0.0.1", 7000));
        assert_eq!(ranges[0].replicas, [address("::1", 7001)]);
        assert_eq!(ranges[0].slots().count(), 100);
        assert_eq!(ranges[1].last, slot(16_383));
        assert!(ranges[1].replicas.is_empty());
    }

    #[test]
    fn an_announced_host_is_escaped_and_cut() {
        let asked = address("asked", 1);
        let host = "h\nFORGED\u{202e}";
        assert_eq!(resolved(host, 7, &asked).host, "h\\nFORGED\\u{202e}");
        let long = "x".repeat(3000);
        assert!(resolved(&long, 7, &asked).host.len() <= LONGEST_HOST + 2);
        let nodes = vec![node(text(host), 7000), node(text(host), 7001)];
        let ranges = read_ranges(Value::Array(vec![range(0, 1, nodes)]), &asked).unwrap();
        let [one] = &ranges[..] else {
            panic!("one range");
        };
        assert_eq!(one.master.host, one.replicas[0].host);
        assert!(one.master.host.starts_with("h\\n"));
    }

    #[test]
    fn ranges_have_the_ids_of_their_nodes() {
        let asked = address("asked", 1);
        let named = |id: &[u8]| {
            let id = Value::BulkString(id.to_vec());
            Value::Array(vec![text("h"), Value::Int(7000), id])
        };
        let without_id = Value::Array(vec![text("h"), Value::Int(7000)]);
        let own = Value::BulkString(b"own".to_vec());
        let sender = Value::Array(vec![text("asked"), Value::Int(1), own]);
        let long = named(&[b'x'; 65]);
        let nodes = vec![named(b"one"), named(b"two"), without_id, long, sender];
        let ranges = read_ranges(Value::Array(vec![range(0, 1, nodes)]), &asked).unwrap();
        let ids: Vec<_> = ranges[0]
            .ids
            .iter()
            .map(|node| (&*node.id, node.is_sender))
            .collect();
        assert_eq!(ids, [(&b"one"[..], false), (b"two", false), (b"own", true)]);
    }

    #[test]
    fn a_missing_host_is_that_of_the_replier() {
        let asked = address("asked", 1);
        for host in [text(""), text("?"), Value::Nil] {
            let reply = Value::Array(vec![range(0, 1, vec![node(host, 7000)])]);
            let ranges = read_ranges(reply, &asked).unwrap();
            assert_eq!(ranges[0].master, address("asked", 7000));
        }
    }

    #[test]
    fn other_replies_are_refused() {
        let asked = address("asked", 1);
        for bad in [
            Value::Nil,
            Value::Array(vec![Value::Nil]),
            Value::Array(vec![range(0, 16_384, vec![node(text("a"), 1)])]),
            Value::Array(vec![range(0, 1, Vec::new())]),
            Value::Array(vec![range(0, 1, vec![node(text("a"), 65_536)])]),
            Value::Array(vec![range(0, 1, vec![node(Value::Int(1), 1)])]),
        ] {
            assert_eq!(read_ranges(bad.clone(), &asked), None, "{bad:?}");
        }
    }

    #[test]
    fn a_slot_keeps_its_last_master() {
        let mut map = SlotMap::default();
        assert!(map.owner(slot(7)).is_none());
        assert!(map.set(slot(7), ServerId(3)));
        assert!(!map.set(slot(7), ServerId(3)));
        assert!(map.set(slot(5), ServerId(3)) && map.set(slot(9), ServerId(0)));
        assert_eq!(map.owner(slot(7)), Some(ServerId(3)));
        assert_eq!(map.lowest_of(ServerId(3)), Some(slot(5)));
        assert_eq!(map.lowest_of(ServerId(1)), None);
        assert!(map.serves(ServerId(3)) && !map.serves(ServerId(1)));
        assert!(map.set(slot(9), ServerId(3)));
        assert!(!map.serves(ServerId(0)), "its only slot has moved");
    }
}

//! The slots of a Redis Cluster: the slot of a key, a hash tag for each slot, and the redirects of nodes.

use std::sync::LazyLock;

/// The number of slots of every Cluster.
pub const COUNT: u16 = 16_384;

/// A slot of a Redis Cluster. Each slot is served by one primary, so all keys of one command must have the same slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot(u16);

impl Slot {
    /// The slot with this number. `None` for 16,384 and more.
    pub fn new(number: u16) -> Option<Self> {
        (number < COUNT).then_some(Self(number))
    }

    /// The slot of a key or of a shard channel.
    pub fn of(key: &str) -> Self {
        let hashed = hash_tag(key).unwrap_or(key);
        Self(crc16(hashed.as_bytes()) % COUNT)
    }

    pub fn number(self) -> u16 {
        self.0
    }

    /// The hash tag of this slot, without its braces. A key with this tag is in this slot if no brace comes before the
    /// tag. The tag of a slot must never change, since the names of fence counters contain it.
    pub fn tag(self) -> &'static str {
        let tag = &TAGS[usize::from(self.0)];
        std::str::from_utf8(tag).expect("a tag is ASCII")
    }
}

/// The part of a key that decides its slot: the text between the first `{` and the first `}` after it. `None` if there
/// is no such text, or if it is empty: then the whole key decides.
pub fn hash_tag(key: &str) -> Option<&str> {
    let (_, behind) = key.split_once('{')?;
    let (tag, _) = behind.split_once('}')?;
    (!tag.is_empty()).then_some(tag)
}

/// The characters of tags, in the order in which tags are tried.
const DIGITS: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";

/// The tag of each slot: the first text of three [`DIGITS`] that has the slot. The table has 80 KiB, and is made when
/// the first key of a Cluster is named. The 69,127 texts up to the last missing slot take 0.2 ms, since each text costs
/// one step of the CRC.
static TAGS: LazyLock<Box<[[u8; 5]]>> = LazyLock::new(|| {
    let mut tags = vec![[0; 5]; usize::from(COUNT)].into_boxed_slice();
    let mut missing = COUNT;
    for one in DIGITS {
        let first = step(0, *one);
        for two in DIGITS {
            let second = step(first, *two);
            for three in DIGITS {
                let slot = step(second, *three) % COUNT;
                let tag = &mut tags[usize::from(slot)];
                if tag[0] == 0 {
                    *tag = [b'{', *one, *two, *three, b'}'];
                    missing -= 1;
                }
                if missing == 0 {
                    return tags;
                }
            }
        }
    }
    unreachable!("texts of three digits have all slots")
});

/// CRC-16/XMODEM.
fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |crc, byte| step(crc, *byte))
}

fn step(crc: u16, byte: u8) -> u16 {
    crc << 8 ^ STEPS[usize::from(crc >> 8) ^ usize::from(byte)]
}

/// The CRC of each single byte.
const STEPS: [u16; 256] = {
    let mut steps = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = (byte as u16) << 8;
        let mut bit = 0;
        while bit < 8 {
            let overflow = crc & 0x8000 != 0;
            crc <<= 1;
            if overflow {
                crc ^= 0x1021;
            }
            bit += 1;
        }
        steps[byte] = crc;
        byte += 1;
    }
    steps
};

/// The reason why a node of a Cluster did not carry out a request. The client may send the request again. All but
/// `Retired` are error replies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Redirect {
    /// Another node serves the slot now.
    Moved(RedirectTarget),
    /// The slot is moving, and this request's keys have moved: the other node accepts this request after `ASKING`.
    Ask(RedirectTarget),
    /// The slot is moving, and some keys of this request have moved. Both nodes refuse this request until all keys have
    /// moved.
    TryAgain,
    /// The Cluster does not serve the slot now.
    ClusterDown,
    /// The request was not sent: the connection to this node failed, and other nodes have all of its slots.
    Retired,
}

/// A slot and the node that serves it, according to another node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RedirectTarget {
    pub slot: Slot,
    /// A name or an address. Empty if it is the host of the node that replied.
    pub host: Box<str>,
    pub port: u16,
}

impl Redirect {
    /// Reads the code and the detail of an error reply. `None` for any other error.
    pub fn parse(code: &str, detail: &str) -> Option<Self> {
        match code {
            "MOVED" => RedirectTarget::parse(detail).map(Self::Moved),
            "ASK" => RedirectTarget::parse(detail).map(Self::Ask),
            "TRYAGAIN" => Some(Self::TryAgain),
            "CLUSTERDOWN" => Some(Self::ClusterDown),
            _ => None,
        }
    }
}

impl RedirectTarget {
    /// Reads `<slot> <host>:<port>`. A host that the node does not know is `?` or empty.
    fn parse(text: &str) -> Option<Self> {
        let (slot, address) = text.split_once(' ')?;
        // An address of IPv6 contains colons.
        let (host, port) = address.trim_end().rsplit_once(':')?;
        let host = if host == "?" { "" } else { host };
        Some(Self {
            slot: Slot::new(slot.parse().ok()?)?,
            host: host.into(),
            port: port.parse().ok().filter(|port| *port != 0)?,
        })
    }
}

#[cfg(test)]
#[cfg(not(shuttle))]
pub mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Names of keys with many braces.
    pub fn name() -> impl Strategy<Value = String> {
        "([{}]|[a-c:]|\u{e9}|[{}]{2}){1,12}"
    }

    /// The rule in the words of the specification of Redis Cluster, to check [`hash_tag`].
    fn hashed(key: &[u8]) -> &[u8] {
        let Some(open) = key.iter().position(|byte| *byte == b'{') else {
            return key;
        };
        let close = key[open + 1..].iter().position(|byte| *byte == b'}');
        match close {
            None | Some(0) => key,
            Some(length) => &key[open + 1..open + 1 + length],
        }
    }

    #[test]
    fn slots_of_the_specification() {
        assert_eq!(crc16(b"123456789"), 0x31C3);
        for (key, slot) in [("", 0), ("foo", 12_182), ("123456789", 12_739)] {
            assert_eq!(Slot::of(key).number(), slot, "{key}");
        }
        assert_eq!(Slot::new(COUNT - 1).map(Slot::number), Some(COUNT - 1));
        assert_eq!(Slot::new(COUNT), None);
    }

    #[test]
    fn the_first_complete_tag_decides() {
        for (key, tag) in [
            ("{user1}:x", Some("user1")),
            ("a{b}c{d}", Some("b")),
            ("{{b}}", Some("{b")),
            ("a}b{c}", Some("c")),
            ("{}{b}", None),
            ("a}b", None),
            ("{}x", None),
            ("{", None),
            ("}{", None),
            ("{x", None),
        ] {
            assert_eq!(hash_tag(key), tag, "{key}");
        }
    }

    #[test]
    fn each_slot_has_a_tag_of_its_own() {
        for slot in (0..COUNT).map(Slot) {
            let tag = slot.tag();
            assert_eq!(Slot::of(tag), slot, "{tag}");
            let digits = tag.strip_prefix('{').and_then(|tag| tag.strip_suffix('}'));
            let digits = digits.expect("a tag has braces");
            assert_eq!(digits.len(), 3, "{tag}");
            assert!(
                digits.bytes().all(|byte| byte.is_ascii_alphanumeric()),
                "{tag}"
            );
        }
    }

    /// With other tags, clients of two versions would use different fence counters for one lock.
    #[test]
    fn tags_never_change() {
        let tags = |numbers: [u16; 6]| numbers.map(|number| Slot(number).tag());
        let wanted = ["{06S}", "{2Gx}", "{5L5}", "{6xN}", "{9Le}", "{6ZJ}"];
        assert_eq!(tags([0, 1, 2, 8_191, 12_182, 16_383]), wanted);
        assert_eq!(crc16(&TAGS.concat()), 64310, "the sum of all tags");
    }

    #[test]
    fn redirections_are_read() {
        let place = |slot, host: &str, port| RedirectTarget {
            slot: Slot(slot),
            host: host.into(),
            port,
        };
        for (text, wanted) in [
            ("3999 127.0.0.1:6381", Some(place(3999, "127.0.0.1", 6381))),
            (
                "0 redis-1.example:6381",
                Some(place(0, "redis-1.example", 6381)),
            ),
            ("16383 ::1:6381", Some(place(16_383, "::1", 6381))),
            ("1 :6381", Some(place(1, "", 6381))),
            ("1 ?:6381", Some(place(1, "", 6381))),
            ("16384 a:6381", None),
            ("1 a:0", None),
            ("1 a:65536", None),
            ("1 a", None),
            ("a:1", None),
            ("", None),
        ] {
            assert_eq!(RedirectTarget::parse(text), wanted, "{text:?}");
            let (moved, ask) = (
                wanted.clone().map(Redirect::Moved),
                wanted.map(Redirect::Ask),
            );
            assert_eq!(Redirect::parse("MOVED", text), moved, "{text:?}");
            assert_eq!(Redirect::parse("ASK", text), ask, "{text:?}");
        }
        let again = Redirect::parse("TRYAGAIN", "Multiple keys request during rehashing of slot");
        assert_eq!(again, Some(Redirect::TryAgain));
        let down = Redirect::parse("CLUSTERDOWN", "The cluster is down");
        assert_eq!(down, Some(Redirect::ClusterDown));
        for code in ["CROSSSLOT", "ERR", "READONLY", "moved"] {
            assert_eq!(Redirect::parse(code, "1 a:1"), None, "{code}");
        }
    }

    proptest! {
        #[test]
        fn the_slot_is_that_of_the_rule(key in name()) {
            prop_assert_eq!(Slot::of(&key).number(), crc16(hashed(key.as_bytes())) % COUNT);
        }

        #[test]
        fn a_tag_decides_for_every_name_behind_it(number in 0..COUNT, start in "[a-c}:]{0,6}", end in name()) {
            let slot = Slot(number);
            prop_assert_eq!(Slot::of(&format!("{start}{}{end}", slot.tag())), slot);
        }
    }
}

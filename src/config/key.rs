//! The names of locks, which callers choose, and the keys of these locks in Redis.
//!
//! On a Cluster, all keys of one script call must share a slot. So the library's own keys for a lock are named after
//! the lock's slot: [`KeyLayout`].

use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasher, BuildHasherDefault, Hash, Hasher};
use std::sync::{Arc, LazyLock};

use crate::report::error::{Error, ErrorKind};
use crate::util::id::HolderId;
use crate::util::slot::{Slot, hash_tag};
use crate::util::text::printable;

/// The first character of the library's own keys after the prefix. A prefix must not contain it, and a name must not
/// begin with it.
pub const RESERVED: char = '~';

/// Follows the prefix in the key of the fence counter.
const FENCE: &str = "~fence";
/// Follows the prefix in the key of the mark of a quorum's node.
const DATA: &str = "~data";
/// The text between the prefix and the name in the key of a lock's queue, followed by `:`.
const QUEUE: &str = "~queue";
/// The text between the prefix and the name in the key of a fenced value, followed by `:`.
const VALUE: &str = "~value";

/// The text between the prefix and the holder in the name of a client's channel.
const CHANNEL: &str = "~to:";

/// [`Key::new`] refuses names that contain one of these words. Prefixes may be nested: under the prefix `app:`, a lock
/// named `billing:~fence` would have the key of the fence counter of the prefix `app:billing:`. Redis compares bytes,
/// so these words in capitals or in similar characters are harmless.
const RESERVED_WORDS: [&str; 7] = [
    FENCE, DATA, "~queue:", "~queue{", "~value:", "~value{", CHANNEL,
];

/// Errors show at most this number of bytes of an invalid key.
const LONGEST_INVALID: usize = 32;

/// How the library names its own keys, so that the keys of one script call share a slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KeyLayout {
    /// For one server, which has no slots.
    #[default]
    Single,
    /// For a Cluster. The names of fence counters, queues and fenced values contain the tag of their slot.
    Slots,
    /// For a Cluster with a prefix that has a hash tag. All keys share the tag's slot, so they have the same names as
    /// on one server.
    OneSlot,
}

impl KeyLayout {
    /// The layout for a Cluster. Refuses a prefix with an open `{`, since the name of a lock could then complete a hash
    /// tag.
    pub fn for_cluster(prefix: &str) -> Result<Self, Error> {
        match hash_tag(prefix) {
            Some(_) => Ok(Self::OneSlot),
            None if !prefix.contains('{') => Ok(Self::Slots),
            None => {
                let wanted = "without `{`, or with a whole hash tag such as `{app}:`, on a Cluster";
                Err(Error::invalid("prefix", wanted, format_args!("{prefix:?}")))
            }
        }
    }

    /// The tag in the names of the keys that belong to `slot`; empty if their names need none.
    fn tag(self, slot: impl FnOnce() -> Slot) -> &'static str {
        match self {
            Self::Single | Self::OneSlot => "",
            Self::Slots => slot().tag(),
        }
    }
}

/// A valid key of a lock: prefix and name in one string, as in Redis.
#[derive(Clone)]
pub struct Key {
    full: Arc<str>,
    prefix: u32,
    hash: u32,
}

impl Key {
    /// Checks `name`, and makes the key of the lock with this name.
    pub fn new(prefix: &str, name: &str, max_bytes: usize) -> Result<Self, Error> {
        let refuse = |why: String| {
            let error = Error::new(ErrorKind::InvalidKey, why);
            Err(error.with_key(&printable(name, LONGEST_INVALID)))
        };
        if name.is_empty() {
            return refuse("it is empty".to_owned());
        }
        if name.len() > max_bytes {
            let len = name.len();
            return refuse(format!(
                "it has {len} bytes, at most {max_bytes} are allowed"
            ));
        }
        if let Some(found) = name.chars().find(|c| c.is_control()) {
            return refuse(format!("it holds the control character {found:?}"));
        }
        if name.starts_with(RESERVED) {
            return refuse(format!("it begins with {RESERVED:?}, which is reserved"));
        }
        if let Some(word) = reserved_word(name) {
            return refuse(format!(
                "it contains {word:?}, which is reserved: under a longer prefix it is a key of the library"
            ));
        }
        Ok(Self::under(prefix, name))
    }

    /// The key of the fenced value with this name. It shares the slot of the lock with this name.
    pub fn for_value(
        layout: KeyLayout,
        prefix: &str,
        name: &str,
        max_bytes: usize,
    ) -> Result<Self, Error> {
        Self::new("", name, max_bytes)?;
        let tag = layout.tag(|| Slot::of(&[prefix, name].concat()));
        Ok(Self::under(&[prefix, VALUE, tag, ":"].concat(), name))
    }

    fn under(prefix: &str, name: &str) -> Self {
        let full: Arc<str> = [prefix, name].concat().into();
        Self {
            hash: hash(full.as_bytes()),
            prefix: prefix.len() as u32,
            full,
        }
    }

    /// The key for the string `full` from Redis; `None` if `full` does not begin with `prefix`.
    pub fn from_full(prefix: &str, full: &str) -> Option<Self> {
        full.strip_prefix(prefix)
            .map(|name| Self::under(prefix, name))
    }

    pub fn prefix_length(&self) -> usize {
        self.prefix as usize
    }

    /// The name that the caller gave.
    pub fn name(&self) -> &str {
        &self.full[self.prefix as usize..]
    }

    /// The full key, as Redis stores it.
    pub fn in_redis(&self) -> &str {
        &self.full
    }

    /// The slot of this key in a Cluster. The lock's queue and fence counter are in the same slot.
    pub fn slot(&self) -> Slot {
        Slot::of(&self.full)
    }

    /// The parts of the key of the lock's queue: prefix, `~queue`, the tag of the slot, `:`, name.
    pub fn queue_parts(&self, layout: KeyLayout) -> [&str; 5] {
        let (prefix, name) = self.full.split_at(self.prefix as usize);
        [prefix, QUEUE, layout.tag(|| self.slot()), ":", name]
    }

    /// The tag that follows [`fence_counter`] in the name of this lock's fence counter; empty if the name needs none.
    pub fn fence_tag(&self, layout: KeyLayout) -> &'static str {
        layout.tag(|| self.slot())
    }

    /// The shard of this key among `of` shards: it chooses the pipeline, or the mutex of a map.
    pub fn shard(&self, of: usize) -> usize {
        self.hash as usize % of
    }
}

/// The key of the fence counter, from which the fencing tokens of all locks under `prefix` follow. On a Cluster, each
/// slot has a counter of its own, whose key also has [`Key::fence_tag`] at its end.
pub fn fence_counter(prefix: &str) -> String {
    [prefix, FENCE].concat()
}

/// The key of the mark of a quorum's node: the run id of its process, and the time at which its data begins.
pub fn data_mark(prefix: &str) -> String {
    [prefix, DATA].concat()
}

/// The plain channel on which scripts publish messages to the client `holder`. A node of a Cluster forwards such a
/// message to all other nodes.
pub fn channel(prefix: &str, holder: &HolderId) -> String {
    [prefix, CHANNEL, holder.as_str()].concat()
}

/// The name of a shard channel up to the holder. A node that serves `slot` sends a message on such a channel only to
/// its own connections and its replicas.
pub fn shard_channel_start(layout: KeyLayout, prefix: &str, slot: Slot) -> String {
    [prefix, CHANNEL, layout.tag(|| slot)].concat()
}

fn reserved_word(name: &str) -> Option<&'static str> {
    RESERVED_WORDS.into_iter().find(|word| name.contains(word))
}

/// SipHash with a random seed for each process, so that users cannot choose many names with the same hash.
#[cfg(not(all(test, shuttle)))]
type Seed = std::collections::hash_map::RandomState;
/// Without a seed, since a replay of a model needs the same hashes.
#[cfg(all(test, shuttle))]
type Seed = BuildHasherDefault<std::collections::hash_map::DefaultHasher>;

static SEED: LazyLock<Seed> = LazyLock::new(Seed::default);

fn hash(bytes: &[u8]) -> u32 {
    let mut hasher = SEED.build_hasher();
    hasher.write(bytes);
    hasher.finish() as u32
}

impl PartialEq for Key {
    fn eq(&self, other: &Self) -> bool {
        self.full == other.full
    }
}

impl Eq for Key {}

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u32(self.hash);
    }
}

/// The hasher for maps of keys. A key stores its hash, and this hasher only spreads the bits of that hash.
#[derive(Default)]
pub struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn write(&mut self, _: &[u8]) {
        unreachable!("a key writes its u32");
    }

    fn write_u32(&mut self, hash: u32) {
        // A map chooses its buckets by the low bits of a hash. But the low bits also choose a key's shard, so they are
        // equal for all keys in the map of a shard. The multiplication (Fibonacci hashing) makes the upper half of the
        // product depend on all bits, and the swap of the halves moves that half down.
        self.0 = u64::from(hash)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .rotate_left(32);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

/// A map whose keys are keys of locks.
pub type KeyMap<T> = HashMap<Key, T, BuildHasherDefault<KeyHasher>>;

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&*self.full, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(name: &str) -> String {
        Key::new("p:", name, 1024).unwrap_err().to_string()
    }

    #[test]
    fn a_key_is_prefix_and_name() {
        let key = Key::new("billing:", "invoice:42", 1024).unwrap();
        assert_eq!(key.in_redis(), "billing:invoice:42");
        assert_eq!(key.name(), "invoice:42");
    }

    #[test]
    fn errors_of_invalid_keys_name_the_key() {
        assert_eq!(message(""), "invalid key (\"\"): it is empty");
        let control = r#"invalid key ("a\u{0}b"): it holds the control character '\0'"#;
        assert_eq!(message("a\0b"), control);
        assert!(message("a\nb").contains(r"'\n'"));
        assert!(message("~fence").contains("reserved"));
        assert!(message("a~b~fence").contains("reserved"));
        assert!(message("a~queue:b").contains("\"~queue:\", which is reserved"));
        assert!(message(&"x".repeat(1 << 20)).contains("has 1048576 bytes, at most 1024"));
        assert!(Key::new("p:", &"x".repeat(1024), 1024).is_ok());
        let key = |name: &str| {
            let error = Key::new("p:", name, 1024).unwrap_err();
            error.key().map(str::to_owned)
        };
        assert_eq!(key("~a").as_deref(), Some("~a"));
        assert_eq!(key("").as_deref(), Some(""));
        assert_eq!(key("\u{1b}[2J").as_deref(), Some(r"\u{1b}[2J"));
        let cut = format!("{}..", "x".repeat(32));
        assert_eq!(key(&"x".repeat(1 << 20)), Some(cut));
    }

    #[test]
    fn reserved_words_in_names_are_refused() {
        let (outer, inner) = ("app:", "app:billing:");
        let lock = Key::new(inner, "k", 1024).unwrap();
        let value = |layout, prefix, name| Key::for_value(layout, prefix, name, 1024).unwrap();
        let own = [
            fence_counter(inner),
            data_mark(inner),
            channel(inner, &HolderId::of_text("host/1/a")),
            lock.queue_parts(KeyLayout::Single).concat(),
            lock.queue_parts(KeyLayout::Slots).concat(),
            value(KeyLayout::Single, inner, "k").full.to_string(),
            value(KeyLayout::Slots, inner, "k").full.to_string(),
        ];
        for key in own {
            let name = key.strip_prefix(outer).unwrap();
            let error = Key::new(outer, name, 1024).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidKey, "{name}");
            assert!(
                Key::for_value(KeyLayout::Single, outer, name, 1024).is_err(),
                "{name}"
            );
            // These names are refused even under the empty prefix.
            assert!(Key::new("", &key, 1024).is_err(), "{key}");
        }
        assert_eq!(
            message("billing:~fence"),
            "invalid key (\"billing:~fence\"): it contains \"~fence\", which is reserved: under a longer prefix it is \
             a key of the library"
        );
    }

    #[test]
    fn layouts_name_keys() {
        let lock = |prefix| Key::new(prefix, "k", 1024).unwrap();
        let value = |layout, prefix| Key::for_value(layout, prefix, "k", 1024).unwrap().full;
        for (layout, prefix, tag) in [
            (KeyLayout::Single, "p:", ""),
            (KeyLayout::OneSlot, "{p}:", ""),
            // The slot of `p:k`.
            (KeyLayout::Slots, "p:", "{6Va}"),
        ] {
            let key = lock(prefix);
            let counter = fence_counter(prefix) + key.fence_tag(layout);
            assert_eq!(counter, format!("{prefix}~fence{tag}"));
            let queue = key.queue_parts(layout).concat();
            assert_eq!(queue, format!("{prefix}~queue{tag}:k"));
            let value = value(layout, prefix);
            assert_eq!(&*value, format!("{prefix}~value{tag}:k"));
            let shard = shard_channel_start(layout, prefix, key.slot());
            assert_eq!(shard, format!("{prefix}~to:{tag}"));
        }
    }

    #[test]
    fn a_broken_tag_in_a_prefix_is_refused_on_a_cluster() {
        for (prefix, layout) in [
            ("", KeyLayout::Slots),
            ("leasehold:", KeyLayout::Slots),
            ("a}b", KeyLayout::Slots),
            ("{app}:", KeyLayout::OneSlot),
            ("x{app}{", KeyLayout::OneSlot),
            ("{{}", KeyLayout::OneSlot),
        ] {
            assert_eq!(KeyLayout::for_cluster(prefix).unwrap(), layout, "{prefix}");
        }
        for prefix in ["{", "{app", "{}:", "{}{app}:", "a}{"] {
            let error = KeyLayout::for_cluster(prefix).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidConfig);
            let wanted = format!(
                "invalid configuration: prefix must be without `{{`, or with a whole hash tag such \
                 as `{{app}}:`, on a Cluster, not {prefix:?}"
            );
            assert_eq!(error.to_string(), wanted);
        }
    }

    #[cfg(not(shuttle))]
    proptest::proptest! {
        #[test]
        fn keys_of_a_lock_share_its_slot(
            prefix in "[{}a-c:]{0,4}",
            name in crate::util::slot::tests::name(),
        ) {
            let Ok(layout) = KeyLayout::for_cluster(&prefix) else {
                return Ok(());
            };
            let lock = Key::new(&prefix, &name, 1024).unwrap();
            let slot = Slot::of(&[&*prefix, &name].concat());
            let own = [
                lock.in_redis().to_owned(),
                fence_counter(&prefix) + lock.fence_tag(layout),
                lock.queue_parts(layout).concat(),
                Key::for_value(layout, &prefix, &name, 1024).unwrap().in_redis().to_owned(),
                shard_channel_start(layout, &prefix, slot) + "host/1/a",
            ];
            for key in own {
                proptest::prop_assert_eq!(Slot::of(&key), slot, "{}", &key);
                // The text before the first `~` is the prefix, so an ACL for the prefix allows all keys.
                let start = key.split('~').next();
                proptest::prop_assert!(key == lock.in_redis() || start == Some(&*prefix));
            }
        }
    }

    #[test]
    fn equal_keys_have_the_same_shard() {
        let one = Key::new("p:", "a", 1024).unwrap();
        let two = Key::new("p:", "a", 1024).unwrap();
        assert_eq!(one.shard(4), two.shard(4));
        let shards: std::collections::HashSet<_> = (0..64)
            .map(|n| Key::new("p:", &n.to_string(), 1024).unwrap().shard(4))
            .collect();
        assert_eq!(shards.len(), 4, "all shards are used");
    }

    #[test]
    fn keys_of_one_shard_use_all_buckets() {
        let keys = (0..16_384).map(|n| Key::new("p:", &n.to_string(), 1024).unwrap());
        let first_shard: Vec<Key> = keys.filter(|key| key.shard(64) == 0).collect();
        let hasher = BuildHasherDefault::<KeyHasher>::default();
        let bucket = |key: &Key| hasher.hash_one(key) % 256;
        let used: std::collections::HashSet<_> = first_shard.iter().map(bucket).collect();
        // The shard has some 256 keys. With a good hash, they use 162 buckets.
        let (used, keys) = (used.len(), first_shard.len());
        assert!(used > 100, "{keys} keys use {used} of 256 buckets");
    }

    /// A hash without a seed, FNV-1a with 32 bits, for which names with equal hashes are easy to find.
    fn fnv1a(start: u32, bytes: &[u8]) -> u32 {
        let step = |hash: u32, byte: &u8| (hash ^ u32::from(*byte)).wrapping_mul(0x0100_0193);
        bytes.iter().fold(start, step)
    }

    /// An attack: makes 2^`steps` names with the same FNV hash. Each step finds two blocks that lead to the same state.
    fn names_with_one_fnv_hash(prefix: &str, steps: usize) -> Vec<String> {
        let mut state = fnv1a(0x811c_9dc5, prefix.as_bytes());
        let mut names = vec![String::new()];
        for _ in 0..steps {
            let mut blocks = std::collections::HashMap::new();
            let block = |n: u32| format!("{n:05x}");
            let end = |n| fnv1a(state, block(n).as_bytes());
            let same = |n| blocks.insert(end(n), n).map(|before| [before, n]);
            let two = (0..1 << 20).find_map(same).unwrap();
            let extend = |name: &String| two.map(|n| format!("{name}{}", block(n)));
            names = names.iter().flat_map(extend).collect();
            state = end(two[0]);
        }
        names
    }

    #[test]
    fn names_with_equal_fnv_hashes_are_spread() {
        let names = names_with_one_fnv_hash("p:", 14);
        let keys: Vec<Key> = names
            .iter()
            .map(|n| Key::new("p:", n, 1024).unwrap())
            .collect();
        let distinct: std::collections::HashSet<_> = keys.iter().map(Key::in_redis).collect();
        assert_eq!(distinct.len(), 16_384);
        let largest = |group_of: &dyn Fn(&Key) -> usize| {
            let mut sizes = std::collections::HashMap::new();
            keys.iter()
                .for_each(|key| *sizes.entry(group_of(key)).or_insert(0) += 1);
            sizes.into_values().max().unwrap()
        };
        // With a random hash, each of these limits is exceeded less than once in a million runs.
        let same_hash: usize = largest(&|key| key.hash as usize);
        assert!(same_hash <= 3, "{same_hash} of 16,384 have one hash");
        let bucket = largest(&|key| key.shard(keys.len()));
        assert!(bucket <= 16, "{bucket} of 16,384 in one bucket");
        let pipeline = largest(&|key| key.shard(2));
        assert!(
            pipeline <= 8_192 + 512,
            "{pipeline} of 16,384 in one of two pipelines"
        );
    }

    #[cfg(not(shuttle))]
    #[test]
    fn the_hash_of_a_key_has_a_seed() {
        let unseeded = |key: &Key| {
            let mut hasher = std::collections::hash_map::DefaultHasher::new();
            hasher.write(key.in_redis().as_bytes());
            hasher.finish() as u32
        };
        let keys = ["a", "b", "c", "d"].map(|name| Key::new("p:", name, 1024).unwrap());
        assert!(keys.iter().all(|key| key.hash != unseeded(key)));
    }
}

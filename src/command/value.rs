//! The value of a lock's key: `lh1 <lease> <granted at, µs> <holder>`, followed by these marks:
//!
//! - ` ?` or ` !` if a waiter has not confirmed its grant;
//! - ` +` if the lock's release has to grant the lock to the first waiter in the queue.
//!
//! In Redis, scripts and plain commands write the value; the store in memory formats it here.

use std::iter;

use crate::util::id;
use crate::util::id::{HolderId, LeaseId};

/// The first word of every value: the version of the format.
const VERSION: &str = "lh1 ";
/// The mark at the end of a value, if the lock's release has to grant the key to a waiter.
const QUEUE_MARK: &str = " +";

/// The mark of a grant that its waiter has not confirmed: see lua/serve.lua.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Doubt {
    /// No roll call has taken place since the grant.
    Unconfirmed,
    /// Another waiter has found that the confirmation is late, and has called the roll.
    RollCalled,
}

impl Doubt {
    pub fn mark(self) -> &'static str {
        match self {
            Self::Unconfirmed => " ?",
            Self::RollCalled => " !",
        }
    }

    /// Splits the mark from the end of a value.
    fn strip(value: &str) -> (Option<Self>, &str) {
        let all = [Self::Unconfirmed, Self::RollCalled];
        let stripped = |doubt: Self| Some((Some(doubt), value.strip_suffix(doubt.mark())?));
        all.into_iter().find_map(stripped).unwrap_or((None, value))
    }
}

/// The number of low bits in a fencing token that count the hand-offs of one grant. The bits above are the µs of the
/// grant.
const TOKEN_SHIFT: u32 = 10;
/// The greatest fencing token. The scripts refuse to grant once the fence counter has passed 9,007,199,254,000,000 µs
/// (lua/count.lua), which is less than 2^53. So every token is less than 2^63, and fits into an `i64`.
pub const MAX_TOKEN: u64 = i64::MAX as u64;

/// The greatest time of a grant in µs. The scripts refuse later ones.
pub const MAX_MICROS: u64 = 9_007_199_254_000_000;

/// The start of the error for a lock's key that holds another program's value.
pub const NO_LOCK: &str = "the key holds no lock of this library";
/// The start of the error for a fenced value's key that holds another program's value.
pub const NO_FENCED_VALUE: &str = "the key holds no fenced value of this library";

/// The placeholder for the µs in the value of a lock that plain commands have granted: they write the value before they
/// know the token. The placeholder has as many digits as a time.
pub const NO_TOKEN: &str = "0000000000000000";

/// The parts of a lock's value, and the length of its queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LockValue {
    pub lease: LeaseId,
    /// The fencing token that the grant began with, before any hand-off. `None` if plain commands granted the lock.
    pub token: Option<u64>,
    pub holder: HolderId,
    /// How many waiters are in the lock's queue.
    pub queued: usize,
}

impl LockValue {
    /// Reads a value. Returns `None` if the value differs from what clients and scripts write: another program may have
    /// written it.
    pub fn parse(value: &[u8], queued: usize) -> Option<Self> {
        let text = std::str::from_utf8(value).ok()?.strip_prefix(VERSION)?;
        let text = text.strip_suffix(QUEUE_MARK).unwrap_or(text);
        let (_, text) = Doubt::strip(text);
        let mut words = text.splitn(3, ' ');
        Some(Self {
            lease: LeaseId::decode(words.next()?)?,
            token: match words.next()? {
                NO_TOKEN => None,
                micros => Some(token(micros)?),
            },
            holder: HolderId::decode(words.next()?)?,
            queued,
        })
    }
}

/// Formats a lock's value as the scripts do.
pub fn format(
    lease: LeaseId,
    micros: u64,
    holder: &HolderId,
    doubt: Option<Doubt>,
    has_queue: bool,
) -> String {
    let mark = if has_queue { QUEUE_MARK } else { "" };
    let doubt = doubt.map_or("", Doubt::mark);
    let digits = &mut [0; LeaseId::DIGITS];
    let parts = parts(lease.encode(digits), &micros.to_string(), holder).concat();
    parts + doubt + mark
}

/// The strings that together are the value of a lock without marks.
pub fn parts<'a>(lease: &'a str, micros: &'a str, holder: &'a HolderId) -> [&'a str; 6] {
    [VERSION, lease, " ", micros, " ", holder.as_str()]
}

pub fn holder_of(value: &[u8]) -> Option<HolderId> {
    LockValue::parse(value, 0).map(|value| value.holder)
}

/// The first fencing token of a grant, from its µs part as text; `None` if the token is greater than [`MAX_TOKEN`].
pub fn token(micros: &str) -> Option<u64> {
    let micros = id::number(micros)?;
    (micros <= micros_of(MAX_TOKEN)).then_some(micros << TOKEN_SHIFT)
}

/// The first fencing token of a grant at `micros`. `micros` must not exceed [`MAX_MICROS`].
pub fn token_of(micros: u64) -> u64 {
    micros << TOKEN_SHIFT
}

/// The token `first` and the tokens of later grants, each 1 µs after the one before, up to the greatest token.
pub fn consecutive_tokens(first: u64) -> impl Iterator<Item = u64> {
    let next = |token: &u64| Some(token + (1 << TOKEN_SHIFT)).filter(|next| *next <= MAX_TOKEN);
    iter::successors(Some(first), next)
}

/// The µs part of a fencing token. All holders within one grant share it.
pub fn micros_of(token: u64) -> u64 {
    token >> TOKEN_SHIFT
}

/// How many hand-offs within the client came between the grant and this token.
pub fn hand_offs_of(token: u64) -> u32 {
    (token % (1 << TOKEN_SHIFT)) as u32
}

/// Whether a lock's value names `lease` as its holder.
pub fn is_held_by(value: &[u8], lease: LeaseId) -> bool {
    let id = value.strip_prefix(VERSION.as_bytes());
    id.is_some_and(|id| id.starts_with(lease.encode(&mut [0; LeaseId::DIGITS]).as_bytes()))
}

/// The mark of an unconfirmed grant in a lock's value.
#[cfg(all(test, not(shuttle)))]
pub fn doubt_of(value: &[u8]) -> Option<Doubt> {
    let text = std::str::from_utf8(value).ok()?;
    Doubt::strip(text.strip_suffix(QUEUE_MARK).unwrap_or(text)).0
}

/// Whether a lock's value has the mark ` +`: the lock's release has to grant the key to a waiter.
pub fn has_queue(value: &[u8]) -> bool {
    value.starts_with(VERSION.as_bytes()) && value.ends_with(QUEUE_MARK.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_names_its_holder_and_its_queue() {
        let [holder, other] = [(); 2].map(|()| LeaseId::random());
        let alone = format!("lh1 {holder} 1795263780943818 host/1/a");
        let value = format!("{alone} +");
        let value = value.as_bytes();
        assert!(
            is_held_by(value, holder)
                && !is_held_by(value, other)
                && !is_held_by(b"lh1 short", holder)
        );
        assert!(has_queue(value) && !has_queue(alone.as_bytes()) && !has_queue(b"theirs +"));
        let read = LockValue::parse(value, 2).unwrap();
        assert_eq!((read.lease, read.queued), (holder, 2));
        assert_eq!(read.token, Some(1_795_263_780_943_818 << TOKEN_SHIFT));
        assert_eq!(read.holder.as_str(), "host/1/a");
    }

    #[test]
    fn other_values_are_not_read_as_locks() {
        for value in ["", "lh1 ", "lh1 short", "something else", "lh2 a b c"] {
            assert_eq!(LockValue::parse(value.as_bytes(), 0), None, "{value}");
        }
        assert_eq!(LockValue::parse(b"\xff", 0), None);
        let id = "0".repeat(LeaseId::DIGITS);
        for rest in [
            "+1 h",
            "01 h",
            "1 ",
            "1 h x",
            "1 h + +",
            "1 h + ?",
            "1 h ? !",
            "1  h",
            "1 h\u{1b}",
        ] {
            let value = format!("lh1 {id} {rest}");
            assert_eq!(LockValue::parse(value.as_bytes(), 0), None, "{value}");
        }
    }

    #[cfg(not(shuttle))]
    mod fuzz {
        use proptest::prelude::*;

        use super::*;
        use crate::util::fuzz;
        use crate::util::fuzz::Bytes;

        fn value() -> impl Strategy<Value = String> {
            let rest = "179526378094[0-9]{4} [a-z.-]{0,64}/[0-9]{1,7}/[0-9a-f]{8}( [?!])?( \\+)?";
            (fuzz::lease(), rest)
                .prop_map(|(lease, rest)| format!("lh1 {} {rest}", fuzz::lease_text(lease)))
        }

        fn formatted(value: &LockValue, text: &[u8]) -> String {
            let LockValue { lease, holder, .. } = value;
            let micros = value.token.map_or(0, micros_of);
            let written = format(*lease, micros, holder, doubt_of(text), has_queue(text));
            match value.token {
                None => written.replacen(" 0 ", &format!(" {NO_TOKEN} "), 1),
                Some(_) => written,
            }
        }

        proptest! {
            #[test]
            fn fuzz_a_value_is_read_as_written(text in value()) {
                let read = LockValue::parse(text.as_bytes(), 3).unwrap();
                prop_assert!(is_held_by(text.as_bytes(), read.lease));
                prop_assert_eq!(formatted(&read, text.as_bytes()), text);
            }

            #[test]
            fn fuzz_only_values_of_scripts_are_read(Bytes(bytes) in fuzz::bytes_like(value())) {
                if let Some(read) = LockValue::parse(&bytes, 0) {
                    let formatted = formatted(&read, &bytes);
                    prop_assert_eq!(formatted, String::from_utf8_lossy(&bytes));
                    prop_assert!(is_held_by(&bytes, read.lease));
                    let holder = read.holder.as_str();
                    prop_assert!((1..=HolderId::MAX_BYTES).contains(&holder.len()));
                    prop_assert!(holder.bytes().all(|byte| byte.is_ascii_graphic()));
                }
            }
        }
    }

    #[test]
    fn a_token_counts_the_hand_offs_in_its_lower_bits() {
        let granted = token("1795263780943818").unwrap();
        assert_eq!((hand_offs_of(granted), hand_offs_of(granted + 7)), (0, 7));
    }

    #[test]
    fn no_token_exceeds_an_i64() {
        let last = token("9007199254740991").unwrap();
        // The token after the most hand-offs that a grant can have.
        assert_eq!(last + 1023, MAX_TOKEN);
        for micros in [
            "9007199254740992",
            "18014398509481983",
            "18446744073709551615",
        ] {
            assert_eq!(token(micros), None, "{micros}");
        }
        let next: Vec<u64> = consecutive_tokens(last - 1024).collect();
        assert_eq!(next, [last - 1024, last]);
    }
}

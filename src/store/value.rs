//! The value of a lock's key, as far as it can be read from its text. Only the scripts write it:
//! `lh1 <lease> <granted at, µs> <holder>`, and ` +` behind that if its release has to serve a queue.

use std::iter;

use crate::loss::LossReason;
use crate::util::id::{self, HolderId, LeaseId};

/// A fencing token is the µs part that Redis makes, shifted by this to leave room for the number of
/// a hand-off within one grant.
const TOKEN_SHIFT: u32 = 10;
/// The greatest fencing token. Scripts grant nothing once the fence counter has passed 9,007,199,254,000,000 µs,
/// somewhat less than 2^53 (lua/count.lua), so every token is smaller than 2^63 and is the same number as an `i64`.
pub(crate) const MAX_TOKEN: u64 = i64::MAX as u64;

/// What to say of a key where something else stands than a lock.
pub(crate) const NO_LOCK: &str = "no lock of this library stands under the key";
/// As [`NO_LOCK`], of a fenced value.
pub(crate) const NO_FENCED_VALUE: &str = "no fenced value of this library stands under the key";

/// The value of a lock, taken apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LockValue {
    pub(crate) lease: LeaseId,
    /// The fencing token of its first holder within the client.
    pub(crate) token: u64,
    pub(crate) holder: HolderId,
    /// How many clients are in its queue.
    pub(crate) queued: usize,
}

impl LockValue {
    /// Nothing if it is not exactly as the scripts write it: another user may have written it.
    pub(crate) fn of(value: &[u8], queued: usize) -> Option<Self> {
        let text = std::str::from_utf8(value).ok()?.strip_prefix("lh1 ")?;
        let mut words = text.strip_suffix(" +").unwrap_or(text).splitn(3, ' ');
        Some(Self {
            lease: LeaseId::decode(words.next()?)?,
            token: token(words.next()?)?,
            holder: HolderId::decode(words.next()?)?,
            queued,
        })
    }
}

/// The holder in the value of a lock.
pub(crate) fn holder_of(value: &[u8]) -> Option<HolderId> {
    LockValue::of(value, 0).map(|value| value.holder)
}

/// Why a lease is lost if `value`, or nothing, was found under its key.
pub(crate) fn loss_of(value: Option<&[u8]>) -> LossReason {
    value.map_or(LossReason::Deleted, |value| LossReason::TakenOver {
        by: holder_of(value),
    })
}

/// The fencing token of a grant, from the µs part that Redis made of it; nothing if it is beyond [`MAX_TOKEN`].
pub(crate) fn token(micros: &str) -> Option<u64> {
    let micros = id::number(micros)?;
    (micros <= micros_of(MAX_TOKEN)).then_some(micros << TOKEN_SHIFT)
}

/// That one, and those of grants that follow it directly; up to the greatest one.
pub(crate) fn tokens(first: u64) -> impl Iterator<Item = u64> {
    let next = |token: &u64| Some(token + (1 << TOKEN_SHIFT)).filter(|next| *next <= MAX_TOKEN);
    iter::successors(Some(first), next)
}

/// The µs part of a fencing token, the same for all who had the grant within its client.
pub(crate) fn micros_of(token: u64) -> u64 {
    token >> TOKEN_SHIFT
}

/// How often the lease with this token was handed off within its client.
pub(crate) fn hand_offs_of(token: u64) -> u32 {
    (token % (1 << TOKEN_SHIFT)) as u32
}

/// Whether the value of a lock says that `lease` has it.
pub(crate) fn holds(value: &[u8], lease: LeaseId) -> bool {
    let id = value.strip_prefix(b"lh1 ");
    id.is_some_and(|id| id.starts_with(lease.encode(&mut [0; LeaseId::DIGITS]).as_bytes()))
}

/// Whether the value of a lock says that its release will serve a queue.
pub(crate) fn has_queue(value: &[u8]) -> bool {
    value.starts_with(b"lh1 ") && value.ends_with(b" +")
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
        assert!(holds(value, holder) && !holds(value, other) && !holds(b"lh1 short", holder));
        assert!(has_queue(value) && !has_queue(alone.as_bytes()) && !has_queue(b"theirs +"));
        let read = LockValue::of(value, 2).unwrap();
        assert_eq!((read.lease, read.queued), (holder, 2));
        assert_eq!(read.token, 1_795_263_780_943_818 << TOKEN_SHIFT);
        assert_eq!(read.holder.as_str(), "host/1/a");
    }

    #[test]
    fn what_is_no_value_of_a_lock_is_not_read_as_one() {
        for value in ["", "lh1 ", "lh1 short", "something else", "lh2 a b c"] {
            assert_eq!(LockValue::of(value.as_bytes(), 0), None, "{value}");
        }
        assert_eq!(LockValue::of(b"\xff", 0), None);
        let id = "0".repeat(LeaseId::DIGITS);
        for rest in [
            "+1 h",
            "01 h",
            "1 ",
            "1 h x",
            "1 h + +",
            "1  h",
            "1 h\u{1b}",
        ] {
            let value = format!("lh1 {id} {rest}");
            assert_eq!(LockValue::of(value.as_bytes(), 0), None, "{value}");
        }
    }

    #[cfg(not(shuttle))]
    mod fuzz {
        use proptest::prelude::*;

        use super::*;
        use crate::util::fuzz::{self, Bytes};

        fn value() -> impl Strategy<Value = String> {
            let rest = "179526378094[0-9]{4} [a-z.-]{0,64}/[0-9]{1,7}/[0-9a-f]{8}( \\+)?";
            (fuzz::lease(), rest)
                .prop_map(|(lease, rest)| format!("lh1 {} {rest}", fuzz::lease_text(lease)))
        }

        fn written(value: &LockValue, mark: &str) -> String {
            let LockValue { lease, holder, .. } = value;
            let micros = micros_of(value.token);
            format!("lh1 {} {micros} {holder}{mark}", fuzz::lease_text(*lease))
        }

        proptest! {
            #[test]
            fn fuzz_a_value_is_read_as_written(text in value()) {
                let read = LockValue::of(text.as_bytes(), 3).unwrap();
                prop_assert!(holds(text.as_bytes(), read.lease));
                let mark = if has_queue(text.as_bytes()) { " +" } else { "" };
                prop_assert_eq!(written(&read, mark), text);
            }

            #[test]
            fn fuzz_only_what_scripts_write_is_a_value(Bytes(bytes) in fuzz::bytes_like(value())) {
                let mark = if has_queue(&bytes) { " +" } else { "" };
                if let Some(read) = LockValue::of(&bytes, 0) {
                    prop_assert_eq!(written(&read, mark), String::from_utf8_lossy(&bytes));
                    prop_assert!(holds(&bytes, read.lease));
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
        // With the most hand-offs that a grant can have.
        assert_eq!(last + 1023, MAX_TOKEN);
        for micros in [
            "9007199254740992",
            "18014398509481983",
            "18446744073709551615",
        ] {
            assert_eq!(token(micros), None, "{micros}");
        }
        let next: Vec<u64> = tokens(last - 1024).collect();
        assert_eq!(next, [last - 1024, last]);
    }
}

//! The value of a lock's key, as far as it can be read from its text. Only the scripts write it:
//! `lh1 <lease> <granted at, µs> <holder>`, and ` +` behind that if its release has to serve a queue.

use std::iter;

use crate::id::{HolderId, LeaseId};

/// A fencing token is the µs part that Redis makes, shifted by this to leave room for the number of
/// a hand-off within one grant.
const TOKEN_SHIFT: u32 = 10;

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
    pub(crate) fn of(value: &[u8], queued: usize) -> Option<Self> {
        let text = std::str::from_utf8(value).ok()?.strip_prefix("lh1 ")?;
        let mut words = text.split(' ');
        Some(Self {
            lease: LeaseId::decode(words.next()?)?,
            token: token(words.next()?)?,
            holder: HolderId::of_text(words.next()?),
            queued,
        })
    }
}

/// The fencing token of a grant, from the µs part that Redis made of it.
pub(crate) fn token(micros: &str) -> Option<u64> {
    micros.parse::<u64>().ok()?.checked_mul(1 << TOKEN_SHIFT)
}

/// That one, and those of grants that follow it directly; up to the greatest one.
pub(crate) fn tokens(first: u64) -> impl Iterator<Item = u64> {
    iter::successors(Some(first), |token| token.checked_add(1 << TOKEN_SHIFT))
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
    }

    #[test]
    fn a_token_counts_the_hand_offs_in_its_lower_bits() {
        let granted = token("1795263780943818").unwrap();
        assert_eq!((hand_offs_of(granted), hand_offs_of(granted + 7)), (0, 7));
    }
}

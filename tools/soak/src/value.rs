//! The value of a lock's key, as far as it identifies the grant. Reads values without a client.

use leasehold::{HolderId, LockInfo, MutexGuard};
use serde::{Deserialize, Serialize};

use crate::history::Hold;

/// The bits of a fencing token below the µs of its grant. They count hand-offs.
const TOKEN_SHIFT: u32 = 10;

/// The grant that a lock's value names.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct GrantId {
    /// The lease id, which all hand-offs of the grant share. An adoption has its own. If a fail-over loses the write
    /// that ended a wait, Redis may grant the lock to the same lease once more, and no caller gets that grant.
    pub lease: String,
    /// The µs of the grant. `None` if plain commands have granted the lock: the value has zeros then. `None` also of a
    /// share, whose lease id is always known.
    pub micros: Option<u64>,
}

impl GrantId {
    /// Reads a value, or a member of a shared key; returns `None` unless a lock has it.
    pub fn parse(value: &str) -> Option<Self> {
        let mut words = value.strip_prefix("lh1 ")?.split(' ');
        let lease = words.next()?.to_owned();
        let micros = match words.next()? {
            "r" | "p" => None,
            micros => Some(micros.parse::<u64>().ok()?).filter(|micros| *micros > 0),
        };
        Some(Self { lease, micros })
    }

    pub fn of(found: &LockInfo) -> Self {
        Self {
            lease: found.lease_id(),
            micros: found.fencing_token().map(micros_of),
        }
    }

    /// Whether `hold`, of the same key, is of this grant. `None` if that is not known: the value has no µs, and the
    /// thread of the hold did not see its lease id.
    pub fn is_of(&self, hold: &Hold) -> Option<bool> {
        let has_lease = hold.lease.as_ref().map(|lease| *lease == self.lease);
        let has_micros = self.micros.map(|micros| micros == hold.micros());
        match (has_lease, has_micros) {
            (Some(false), _) | (_, Some(false)) => Some(false),
            (has_lease, has_micros) => has_lease.or(has_micros),
        }
    }
}

/// The lease id of a guard of the client `holder`, from what Redis has shown since. `None` if Redis has another grant:
/// it has lost that of the guard.
pub fn lease_of(guard: &MutexGuard, holder: &HolderId, found: &LockInfo) -> Option<String> {
    let GrantId { lease, micros } = GrantId::of(found);
    let is_its_time = micros.is_none_or(|micros| micros == micros_of(guard.fencing_token()));
    // A later grant of the same client would have ended the guard.
    (found.holder() == holder && is_its_time && !guard.is_lost()).then_some(lease)
}

/// The µs of the grant with this token.
pub fn micros_of(token: u64) -> u64 {
    token >> TOKEN_SHIFT
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_names_its_lease_and_its_time() {
        let read = |micros| {
            let value = format!("lh1 0123456789abcdef0123456789abcdef {micros} host/1/a +");
            let grant = GrantId::parse(&value).unwrap();
            assert_eq!(grant.lease, "0123456789abcdef0123456789abcdef");
            grant.micros
        };
        assert_eq!(read("1795263780943818"), Some(1_795_263_780_943_818));
        assert_eq!(read("0000000000000000"), None);
        assert_eq!(read("p 1 3 5"), None);
        for foreign in ["", "lh1 ", "lh1 a", "lh1 a b c", "another 1 2"] {
            assert_eq!(GrantId::parse(foreign), None, "{foreign:?}");
        }
    }
}

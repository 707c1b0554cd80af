//! Implementations for the feature `serde` that cannot be derived.

use std::time::{Duration, UNIX_EPOCH};

use serde::de::{Deserialize, Deserializer, Error, Unexpected};
use serde::ser::{Serialize, SerializeStruct, Serializer};

use crate::locks::held::{HolderInfo, HolderKind, LockInfo};
use crate::locks::rwlock::RwLockInfo;
use crate::locks::semaphore::SemaphoreInfo;
use crate::util::id::HolderId;

/// Writes the holder as its text.
impl Serialize for HolderId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.as_str())
    }
}

/// Accepts 1 to 128 printable ASCII characters without spaces, as in the value of a lock.
impl<'de> Deserialize<'de> for HolderId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let expected = &"1 to 128 printable characters without spaces";
        Self::decode(&text)
            .ok_or_else(|| D::Error::invalid_value(Unexpected::Other("text"), expected))
    }
}

/// Writes `kind` (`exclusive`, `reader`, `permits` or `other_library`), `holder`, `id`, `weight`, `limit`,
/// `fencing_token` (a string: JSON parsers round a number of that size), `expires_in_ms` and `granted_at_ms` (since
/// 1970). A field that the holder does not have is null, and so is the `id` of an exclusive holder, which is enough to
/// make a ticket.
impl Serialize for HolderInfo {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (kind, weight, limit) = match self.kind() {
            HolderKind::Exclusive => ("exclusive", None, None),
            HolderKind::Reader => ("reader", None, None),
            HolderKind::Permits { weight, limit } => ("permits", Some(weight), Some(limit)),
            HolderKind::OtherLibrary { .. } => ("other_library", None, None),
        };
        let is_share = matches!(kind, "reader" | "permits");
        let id = is_share.then(|| self.id());
        let granted_at = self.granted_at();
        let since_1970 = granted_at.and_then(|at| at.duration_since(UNIX_EPOCH).ok());
        let mut fields = serializer.serialize_struct("HolderInfo", 8)?;
        fields.serialize_field("kind", kind)?;
        fields.serialize_field("holder", self.holder())?;
        fields.serialize_field("id", &id)?;
        fields.serialize_field("weight", &weight)?;
        fields.serialize_field("limit", &limit)?;
        fields.serialize_field("fencing_token", &token_text(self.fencing_token()))?;
        fields.serialize_field("expires_in_ms", &self.expires_in().map(millis))?;
        fields.serialize_field("granted_at_ms", &since_1970.map(millis))?;
        fields.end()
    }
}

/// Writes `holder`, `fencing_token` (a string: JSON parsers round a number of that size; null if Redis does not know
/// it), `expires_in_ms`, `holders` and `clients_waiting`. Leaves out the lease id, which is enough to make a ticket.
impl Serialize for LockInfo {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fields = serializer.serialize_struct("LockInfo", 5)?;
        fields.serialize_field("holder", self.holder())?;
        fields.serialize_field("fencing_token", &token_text(self.fencing_token()))?;
        fields.serialize_field("expires_in_ms", &self.expires_in().map(millis))?;
        fields.serialize_field("holders", self.holders())?;
        fields.serialize_field("clients_waiting", &self.clients_waiting())?;
        fields.end()
    }
}

/// Writes `holders`, `readers` (their number) and `clients_waiting`.
impl Serialize for RwLockInfo {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fields = serializer.serialize_struct("RwLockInfo", 3)?;
        fields.serialize_field("holders", self.holders())?;
        fields.serialize_field("readers", &self.readers_in_total())?;
        fields.serialize_field("clients_waiting", &self.clients_waiting())?;
        fields.end()
    }
}

/// Writes `holders`, `taken`, `available` and `clients_waiting`.
impl Serialize for SemaphoreInfo {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fields = serializer.serialize_struct("SemaphoreInfo", 4)?;
        fields.serialize_field("holders", self.holders())?;
        fields.serialize_field("taken", &self.taken())?;
        fields.serialize_field("available", &self.available())?;
        fields.serialize_field("clients_waiting", &self.clients_waiting())?;
        fields.end()
    }
}

fn token_text(token: Option<u64>) -> Option<String> {
    token.map(|token| token.to_string())
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

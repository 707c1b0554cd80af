//! Implementations for the feature `serde` that cannot be derived.

use serde::de::{Deserialize, Deserializer, Error, Unexpected};
use serde::ser::{Serialize, SerializeStruct, Serializer};

use crate::locks::held::LockInfo;
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

/// Writes `holder`, `fencing_token` (a string: JSON parsers round a number of that size; null if Redis does not know
/// it), `expires_in_ms` and `clients_waiting`. Leaves out the lease id, which is enough to make a ticket.
impl Serialize for LockInfo {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let millis =
            |left: std::time::Duration| u64::try_from(left.as_millis()).unwrap_or(u64::MAX);
        let mut fields = serializer.serialize_struct("LockInfo", 4)?;
        fields.serialize_field("holder", self.holder())?;
        let token = self.fencing_token().map(|token| token.to_string());
        fields.serialize_field("fencing_token", &token)?;
        fields.serialize_field("expires_in_ms", &self.expires_in().map(millis))?;
        fields.serialize_field("clients_waiting", &self.clients_waiting())?;
        fields.end()
    }
}

//! A key that another program has written: the lock of another library, or other data.

use std::time::Duration;

use crate::command::results::foreign_value;
use crate::command::value::NO_LOCK;
use crate::report::error::Error;

/// The value of a key that holds no lock of this library. Does not contain the value, which may be secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Foreign {
    /// The type as `TYPE` names it.
    pub redis_type: &'static str,
    /// `None` if the key has no ttl, or an unknown one.
    pub expires_in: Option<Duration>,
    /// A digest that tells one holder from the next: of a string's first bytes, or of the field of a lock of Redisson.
    /// Zero for other types.
    pub mark: u32,
}

/// Stands for the types that modules add to Redis, and for a type that Redis does not tell.
const OTHER_TYPE: &str = "other";

impl Foreign {
    /// Reads the detail of an error FOREIGN: a type and, from lua/foreign.lua, the ttl in ms and the mark.
    pub fn parse(detail: &str) -> Self {
        let mut words = detail.split(' ');
        let found = words.next();
        let ms = words.next().and_then(|digits| digits.parse().ok());
        let mark = words.next().map(|digits| u32::from_str_radix(digits, 16));
        let known = ["string", "hash", "zset", "list", "set", "stream"];
        let known = known.into_iter().find(|known| Some(*known) == found);
        Self {
            redis_type: known.unwrap_or(OTHER_TYPE),
            expires_in: ms.map(Duration::from_millis),
            mark: mark.and_then(Result::ok).unwrap_or(0),
        }
    }

    /// The error of a client that excludes no other library.
    pub fn error(&self) -> Error {
        let found = match self.redis_type {
            OTHER_TYPE => "value of another type",
            known => known,
        };
        let error = foreign_value(NO_LOCK, found);
        error.followed_by("if it is a mutex of another library, a client with Builder::compatible_with waits for it")
    }
}

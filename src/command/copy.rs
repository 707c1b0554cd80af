//! The copy of a fenced value on a node of a quorum, and its text in Redis:
//! `lhv1 <since> <token> <sequence> <writer> +<value>`, with `-` in place of `+<value>` if the value was deleted. All
//! numbers have a fixed number of digits, so the scripts compare them as text.

use std::sync::Arc;
use std::time::Duration;

/// The first word of a copy: the version of the format.
const FORMAT: &str = "lhv1 ";

/// The version of a fenced value. The greater version is the later one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// The fencing token of the write.
    pub token: u64,
    /// Counts the writes under one token.
    pub sequence: u64,
    /// A random number. It separates writes of several clients at the same time.
    pub writer: u64,
}

/// A version of a fenced value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ValueCopy {
    pub version: Version,
    /// `None` if this version is a deletion. Empty if only the version was read.
    pub value: Option<Arc<[u8]>>,
}

/// A node's reply about its copy of a fenced value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeCopy {
    /// Since when the node has its data: the time of its mark, in µs.
    pub since: u64,
    pub stored: Option<StoredCopy>,
    /// When the copy expires. Only reads return it.
    pub expires_in: Option<Duration>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredCopy {
    /// The time of the node's mark when the node stored the copy.
    pub since: u64,
    pub copy: ValueCopy,
}

impl ValueCopy {
    /// The text of the copy behind the time of the mark.
    pub fn text(&self) -> Vec<u8> {
        let Version {
            token,
            sequence,
            writer,
        } = self.version;
        let flag = if self.value.is_some() { '+' } else { '-' };
        let mut text = format!("{token:020} {sequence:016} {writer:020} {flag}").into_bytes();
        text.extend_from_slice(self.value.as_deref().unwrap_or_default());
        text
    }
}

impl StoredCopy {
    /// Reads a copy. Returns `None` unless it is exactly as the scripts write it.
    pub fn parse(text: &[u8]) -> Option<Self> {
        let (since, text) = number(text.strip_prefix(FORMAT.as_bytes())?, 16)?;
        let (token, text) = number(text, 20)?;
        let (sequence, text) = number(text, 16)?;
        let (writer, text) = number(text, 20)?;
        let value = match text.split_first()? {
            (b'+', value) => Some(value.into()),
            (b'-', []) => None,
            _ => return None,
        };
        let version = Version {
            token,
            sequence,
            writer,
        };
        Some(Self {
            since,
            copy: ValueCopy { version, value },
        })
    }
}

/// A number of so many digits with a space behind it, and the rest of the text.
fn number(text: &[u8], digits: usize) -> Option<(u64, &[u8])> {
    let (number, rest) = text.split_at_checked(digits)?;
    let number = std::str::from_utf8(number).ok()?;
    let is_number = number.bytes().all(|byte| byte.is_ascii_digit());
    let number = is_number.then(|| number.parse().ok()).flatten()?;
    Some((number, rest.strip_prefix(b" ")?))
}

impl NodeCopy {
    pub fn version(&self) -> Option<Version> {
        self.stored.as_ref().map(|stored| stored.copy.version)
    }

    /// Whether the node has kept all its data since it stored the copy.
    pub fn is_kept(&self) -> bool {
        let stored = self.stored.as_ref();
        stored.is_some_and(|stored| stored.since == self.since)
    }

    /// Whether the node keeps this version or a later one.
    pub fn keeps(&self, version: Version) -> bool {
        self.is_kept() && self.version() >= Some(version)
    }
}

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests {
    use super::*;

    fn copy(value: Option<&[u8]>) -> ValueCopy {
        let version = Version {
            token: u64::MAX,
            sequence: 7,
            writer: 18,
        };
        let value = value.map(Arc::from);
        ValueCopy { version, value }
    }

    #[test]
    fn a_copy_is_read_as_it_was_written() {
        for value in [None, Some(&b""[..]), Some(b"a b\r\n\0")] {
            let copy = copy(value);
            let text = [b"lhv1 0000000000000017 ", &copy.text()[..]].concat();
            let stored = StoredCopy { since: 17, copy };
            assert_eq!(StoredCopy::parse(&text), Some(stored));
        }
    }

    #[test]
    fn text_of_other_users_is_no_copy() {
        let text = [b"lhv1 0000000000000017 ", &copy(None).text()[..]].concat();
        let text = String::from_utf8(text).unwrap();
        for other in [
            String::new(),
            "lhv1 ".to_owned(),
            text.replace("lhv1", "lhv2"),
            text.replace("17 ", "17+"),
            text.replace("17 ", "+7 "),
            text.replace("18446744073709551615", "18446744073709551616"),
            text.replace('-', ""),
            text.replace('-', "-value"),
            text.replace('-', "?"),
        ] {
            assert_eq!(StoredCopy::parse(other.as_bytes()), None, "{other}");
        }
    }

    #[test]
    fn a_copy_of_before_a_loss_of_data_is_not_kept() {
        let mut node = NodeCopy {
            since: 17,
            stored: None,
            expires_in: None,
        };
        let (copy, version) = (copy(None), copy(None).version);
        assert!(!node.is_kept());
        node.stored = Some(StoredCopy { since: 17, copy });
        assert!(node.keeps(version));
        let sequence = version.sequence + 1;
        assert!(!node.keeps(Version {
            sequence,
            ..version
        }));
        node.since = 18;
        assert!(!node.keeps(version));
    }
}

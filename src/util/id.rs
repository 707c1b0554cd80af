//! The id of a holder (a client), and the id of a lease (one grant).

use std::fmt;
use std::ops::RangeInclusive;
use std::sync::Arc;

use uuid::Uuid;

use crate::util::sync::Mutex;
use crate::util::text::has_id;

/// The id of one grant of one lock: 128 bits, of which 122 are random. Each request for a lock has a new id.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct LeaseId(Uuid);

impl LeaseId {
    /// Number of hexadecimal digits of an id in Redis.
    pub(crate) const DIGITS: usize = 32;

    pub(crate) fn random() -> Self {
        let [id] = Self::several();
        id
    }

    /// `N` random ids, made with one system call.
    fn several<const N: usize>() -> [Self; N] {
        random::<N>().map(|bytes| Self(uuid::Builder::from_random_bytes(bytes).into_uuid()))
    }

    /// Parses an id as [`encode`](Self::encode) writes it: with lower-case digits only, since Redis compares bytes.
    pub(crate) fn decode(text: &str) -> Option<Self> {
        let is_id = text.len() == Self::DIGITS && text.bytes().all(is_digit);
        is_id
            .then(|| Uuid::try_parse(text).ok().map(Self))
            .flatten()
    }

    pub(crate) fn encode(self, into: &mut [u8; Self::DIGITS]) -> &str {
        self.0.as_simple().encode_lower(into)
    }

    /// The first half of the id.
    pub(crate) fn start(self) -> LeaseStart {
        LeaseStart((self.0.as_u128() >> 64) as u64)
    }

    /// A number in 0.0 .. 1.0 that depends on the id only, to spread retries and renewals.
    pub(crate) fn jitter(self) -> f64 {
        (self.0.as_u128() as u32) as f64 / (f64::from(u32::MAX) + 1.0)
    }
}

/// The first half of a lease id, which distinguishes leases. This half alone gives no rights to the lease, since the
/// other 64 bits stay secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LeaseStart(u64);

impl LeaseStart {
    /// Number of hexadecimal digits in Redis.
    pub(crate) const DIGITS: usize = LeaseId::DIGITS / 2;

    /// All ids that begin with this half.
    pub(crate) fn ids(self) -> RangeInclusive<LeaseId> {
        let first = u128::from(self.0) << 64;
        let [first, last] = [first, first | u128::from(u64::MAX)];
        LeaseId(Uuid::from_u128(first))..=LeaseId(Uuid::from_u128(last))
    }

    /// Parses the start of an id, as [`LeaseId::decode`] does.
    pub(crate) fn decode(text: &str) -> Option<Self> {
        let is_start = text.len() == Self::DIGITS && text.bytes().all(is_digit);
        is_start
            .then(|| u64::from_str_radix(text, 16).ok().map(Self))
            .flatten()
    }
}

impl fmt::Display for LeaseStart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:0digits$x}", self.0, digits = Self::DIGITS)
    }
}

fn is_digit(byte: u8) -> bool {
    matches!(byte, b'0'..=b'9' | b'a'..=b'f')
}

/// A source of lease ids. A lease id is secret until its lock is granted: a waiter accepts the message of a grant
/// because it contains the id.
///
/// All random bytes come from the system, since a random generator of the process would repeat its numbers in each
/// fork. Each read is a system call, so one read makes 64 ids. (A fork also copies the unused ids, but a forked process
/// cannot use its parent's clients.)
#[derive(Default)]
pub(crate) struct LeaseIds(Mutex<Vec<LeaseId>>);

impl LeaseIds {
    /// Ids for each read: one KiB of random bytes, which takes a few microseconds.
    const AT_ONCE: usize = 64;

    pub(crate) fn next(&self) -> LeaseId {
        let mut ids = self.0.lock();
        if ids.is_empty() {
            ids.extend(LeaseId::several::<{ Self::AT_ONCE }>());
        }
        ids.pop().expect("ids were just added")
    }
}

/// A random number.
pub(crate) fn random_number() -> u64 {
    let [bytes] = random::<1>().map(u128::from_be_bytes);
    bytes as u64
}

#[cfg(all(test, shuttle))]
fn random<const N: usize>() -> [[u8; 16]; N] {
    [(); N].map(|()| crate::util::sync::model::random().to_be_bytes())
}

/// Random bytes of the system.
#[cfg(not(all(test, shuttle)))]
fn random<const N: usize>() -> [[u8; 16]; N] {
    let mut bytes = [[0; 16]; N];
    getrandom::fill(bytes.as_flattened_mut()).expect("the system has random bytes");
    bytes
}

/// Shows all digits, for Redis and for tickets. Keep them out of errors and logs, since a lease id and its token are
/// enough to make a ticket.
impl fmt::Display for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.encode(&mut [0; Self::DIGITS]))
    }
}

/// Shows the first eight digits, which distinguish leases in logs.
impl fmt::Debug for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..", &self.encode(&mut [0; Self::DIGITS])[..8])
    }
}

/// Parses a number of a value, message or ticket: decimal digits without a sign or leading zeros.
pub(crate) fn number(text: &str) -> Option<u64> {
    let is_canonical = text == "0" || text.starts_with(|first| matches!(first, '1'..='9'));
    is_canonical.then(|| text.parse().ok()).flatten()
}

/// The id of a lock's holder: one per [`Client`](crate::Client), readable as `host/pid/random`.
///
/// ```
/// # let server = leasehold_testbed::Server::start().unwrap();
/// # let client = leasehold::Client::open(&server.url()).unwrap();
/// let holder = client.holder_id();
/// assert_eq!(holder.as_str().split('/').count(), 3);
/// println!("I am {holder}");
/// ```
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct HolderId(Arc<str>);

impl HolderId {
    /// The length of the longest holder id: a host name of 64 bytes, a process id, eight digits, and a reserve.
    pub(crate) const MAX_BYTES: usize = 128;

    pub(crate) fn of_this_process() -> Self {
        let mut host: String = host_name()
            .chars()
            .map(|c| {
                if c.is_ascii_graphic() && c != '/' {
                    c
                } else {
                    '-'
                }
            })
            .take(64)
            .collect();
        if has_id(&host) {
            // `decode` would refuse this host name.
            host.truncate(LeaseId::DIGITS - 1);
        }
        let [[a, b, c, d, ..]] = random::<1>();
        let random = u32::from_be_bytes([a, b, c, d]);
        Self(format!("{host}/{}/{random:08x}", std::process::id()).into())
    }

    pub(crate) fn of_text(text: &str) -> Self {
        Self(text.into())
    }

    /// Parses the holder in a value or message, which any user of Redis may have written. Refuses text that may contain
    /// a lease id, since errors and events show holders.
    pub(crate) fn decode(text: &str) -> Option<Self> {
        let is_holder = (1..=Self::MAX_BYTES).contains(&text.len())
            && text.bytes().all(|byte| byte.is_ascii_graphic())
            && !has_id(text);
        is_holder.then(|| Self::of_text(text))
    }

    /// The holder as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for HolderId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(unix)]
fn host_name() -> String {
    rustix::system::uname()
        .nodename()
        .to_string_lossy()
        .into_owned()
}

#[cfg(not(unix))]
fn host_name() -> String {
    std::env::var("COMPUTERNAME").unwrap_or_else(|_| "host".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lease_ids_have_32_digits_and_differ() {
        let (one, two) = (LeaseId::random(), LeaseId::random());
        assert_ne!(one, two);
        assert_eq!(one.to_string().len(), LeaseId::DIGITS);
        assert_eq!(format!("{one:?}"), format!("{}..", &one.to_string()[..8]));
        assert!((0.0..1.0).contains(&one.jitter()));
    }

    #[test]
    fn lease_ids_are_distinct_and_unpredictable() {
        let clients = [LeaseIds::default(), LeaseIds::default()];
        let drawn: Vec<LeaseId> = clients
            .iter()
            .flat_map(|ids| std::iter::repeat_with(|| ids.next()).take(1000))
            .collect();
        let distinct: std::collections::HashSet<_> = drawn.iter().collect();
        assert_eq!(distinct.len(), drawn.len());
        let steps = drawn.windows(2).map(|pair| {
            let [one, next] = [pair[0], pair[1]].map(|id| id.0.as_u128());
            next.wrapping_sub(one)
        });
        let distinct: std::collections::HashSet<_> = steps.collect();
        assert_eq!(distinct.len(), drawn.len() - 1);
    }

    #[test]
    fn only_canonical_ids_and_numbers_are_parsed() {
        let digits = "0123456789abcdef0123456789abcdef";
        assert!(LeaseId::decode(digits).is_some());
        assert!(LeaseId::decode(&digits.to_uppercase()).is_none());
        let start = LeaseId::decode(digits).map(LeaseId::start);
        assert_eq!(start, LeaseStart::decode(&digits[..16]));
        assert_eq!(start.unwrap().to_string(), digits[..16]);
        for text in [
            "",
            &digits[..15],
            &digits[..17],
            "0123456789ABCDEF",
            "+123456789abcdef",
        ] {
            assert_eq!(LeaseStart::decode(text), None, "{text:?}");
        }
        let named_after_a_lease = format!("host/1/{digits}");
        for text in [
            "",
            "a b",
            "a\nb",
            "\u{e9}",
            &"x".repeat(129),
            &named_after_a_lease,
        ] {
            assert_eq!(HolderId::decode(text), None, "{text:?}");
        }
        let own = HolderId::of_this_process();
        assert_eq!(HolderId::decode(own.as_str()), Some(own));
        for text in [
            "",
            "+1",
            "-1",
            "01",
            "00",
            " 1",
            "1 ",
            "1e3",
            "18446744073709551616",
        ] {
            assert_eq!(number(text), None, "{text:?}");
        }
        for text in ["0", "1", "10", "18446744073709551615"] {
            assert_eq!(number(text).unwrap().to_string(), text);
        }
    }
}

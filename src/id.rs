//! Who holds (a client) and what is held (one grant).

use std::fmt;
use std::sync::Arc;

use uuid::Uuid;

use crate::sync::Mutex;
use crate::text::printable;

/// One grant of one lock: 128 bits, random but for six, new with each attempt to be granted.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct LeaseId(Uuid);

impl LeaseId {
    /// Hexadecimal digits of an id on the wire.
    pub(crate) const DIGITS: usize = 32;

    pub(crate) fn random() -> Self {
        let [id] = Self::several();
        id
    }

    fn several<const N: usize>() -> [Self; N] {
        random::<N>().map(|bytes| Self(uuid::Builder::from_random_bytes(bytes).into_uuid()))
    }

    pub(crate) fn decode(text: &str) -> Option<Self> {
        let given = text.len() == Self::DIGITS;
        given
            .then(|| Uuid::try_parse(text).ok().map(Self))
            .flatten()
    }

    pub(crate) fn encode(self, into: &mut [u8; Self::DIGITS]) -> &str {
        self.0.as_simple().encode_lower(into)
    }

    /// A number in 0.0 .. 1.0 drawn from the id, to spread retries.
    pub(crate) fn jitter(self) -> f64 {
        (self.0.as_u128() as u32) as f64 / (f64::from(u32::MAX) + 1.0)
    }
}

/// Lease ids. Each is a secret: who knows it can take the lock. They are drawn from the
/// system many at a time, since that is a system call; and from nowhere else, since generators of a process
/// go on alike in those that it forks. (As these would: but a forked process has no use of its parent's clients.)
#[derive(Default)]
pub(crate) struct LeaseIds(Mutex<Vec<LeaseId>>);

impl LeaseIds {
    /// A KiB of randomness, a few µs.
    const AT_ONCE: usize = 64;

    pub(crate) fn draw(&self) -> LeaseId {
        let mut drawn = self.0.lock();
        if drawn.is_empty() {
            drawn.extend(LeaseId::several::<{ Self::AT_ONCE }>());
        }
        drawn.pop().expect("some were just drawn")
    }
}

#[cfg(all(test, shuttle))]
fn random<const N: usize>() -> [[u8; 16]; N] {
    [(); N].map(|()| crate::sync::model::random().to_be_bytes())
}

/// Random bytes of the system.
#[cfg(not(all(test, shuttle)))]
fn random<const N: usize>() -> [[u8; 16]; N] {
    let mut bytes = [[0; 16]; N];
    getrandom::fill(bytes.as_flattened_mut()).expect("the system has random bytes");
    bytes
}

/// All digits, for Redis and for tickets. Not for messages: with its token, a lease id makes a ticket.
impl fmt::Display for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.encode(&mut [0; Self::DIGITS]))
    }
}

/// The first eight digits: enough to tell leases apart, not to use one.
impl fmt::Debug for LeaseId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}..", &self.encode(&mut [0; Self::DIGITS])[..8])
    }
}

/// Who holds a lock: one per [`Client`](crate::Client), readable as `host/pid/random`.
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
    /// More bytes than any name that this library makes.
    const LONGEST: usize = 128;

    pub(crate) fn of_this_process() -> Self {
        let host: String = host_name()
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
        let [[a, b, c, d, ..]] = random::<1>();
        let random = u32::from_be_bytes([a, b, c, d]);
        Self(format!("{host}/{}/{random:08x}", std::process::id()).into())
    }

    /// The holder in the value of a lock, `lh1 <lease> <granted at, µs> <holder>` and perhaps ` +`.
    pub(crate) fn of_value(value: &[u8]) -> Option<Self> {
        let text = std::str::from_utf8(value).ok()?.strip_prefix("lh1 ")?;
        text.split(' ').nth(2).map(Self::of_text)
    }

    /// The name of a holder as it stands in Redis, where others may have written it.
    pub(crate) fn of_text(text: &str) -> Self {
        Self(printable(text, Self::LONGEST).into())
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
    fn lease_ids_are_32_digits_and_differ() {
        let (one, two) = (LeaseId::random(), LeaseId::random());
        assert_ne!(one, two);
        assert_eq!(one.to_string().len(), LeaseId::DIGITS);
        assert_eq!(format!("{one:?}"), format!("{}..", &one.to_string()[..8]));
        assert!((0.0..1.0).contains(&one.jitter()));
    }

    #[test]
    fn the_ids_of_a_client_are_its_own_and_none_tells_of_another() {
        let clients = [LeaseIds::default(), LeaseIds::default()];
        let drawn: Vec<LeaseId> = clients
            .iter()
            .flat_map(|ids| std::iter::repeat_with(|| ids.draw()).take(1000))
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
    fn the_holder_of_a_value_is_its_fourth_field() {
        let value = b"lh1 0123456789abcdef0123456789abcdef 1795263780943818 host/7/ab";
        assert_eq!(HolderId::of_value(value).unwrap().as_str(), "host/7/ab");
        let with_queue = [value, b" +".as_slice()].concat();
        let holder = HolderId::of_value(&with_queue).unwrap();
        assert_eq!(holder.as_str(), "host/7/ab");
        assert_eq!(HolderId::of_value(b"something else"), None);
        assert_eq!(HolderId::of_value(b"lh1 short"), None);
    }
}

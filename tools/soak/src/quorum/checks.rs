//! The checks of the soak of a quorum: they compare the records of the processes with the guarantees. Each finding has
//! the records that contradict each other. All times are those of `records::now`, in ns.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use serde::{Deserialize, Serialize};

/// One hold of a lock, as its process saw it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hold {
    pub process: u64,
    pub key: usize,
    pub token: u64,
    /// When the lease was seen to be valid for the first and the last time.
    pub from: u64,
    pub to: u64,
    pub is_lost: bool,
}

/// A version of a fenced value, which is also its text: the token, and the number of the write under this token.
/// A missing value has two zeros.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Version {
    pub token: u64,
    pub number: u64,
}

impl Version {
    pub fn parse(text: &[u8]) -> Option<Self> {
        let (token, number) = std::str::from_utf8(text).ok()?.split_once('.')?;
        let (token, number) = (token.parse().ok()?, number.parse().ok()?);
        Some(Self { token, number })
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.token, self.number)
    }
}

/// The outcome of a call for a fenced value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Outcome {
    Read,
    Written,
    /// The write was refused, since a greater token had been written.
    Refused,
    /// No reply came in time. A write may have taken effect, or may do so later.
    Failed,
}

/// A call for the fenced value of a key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Access {
    pub process: u64,
    pub key: usize,
    /// Before the request, and after the reply.
    pub begun: u64,
    pub ended: u64,
    pub outcome: Outcome,
    /// The version that was read, or was to be written.
    pub version: Version,
}

/// Compares holds and accesses with the guarantees: one valid lease at a time, rising tokens, no stale write, no older
/// value.
pub fn history(holds: &[Hold], accesses: &[Access]) -> Vec<String> {
    let mut found = Vec::new();
    let keys: BTreeSet<usize> = holds
        .iter()
        .map(|hold| hold.key)
        .chain(accesses.iter().map(|access| access.key))
        .collect();
    for key in keys {
        let mut holds: Vec<&Hold> = holds.iter().filter(|hold| hold.key == key).collect();
        holds.sort_by_key(|hold| hold.from);
        let accesses: Vec<&Access> = accesses.iter().filter(|access| access.key == key).collect();
        leases(&holds, &mut found);
        versions(&accesses, &mut found);
        refusals(&holds, &accesses, &mut found);
    }
    found
}

/// Checks that at most one lease is valid at a time, and that tokens rise. `holds` are in the order of their
/// beginnings.
fn leases(holds: &[&Hold], found: &mut Vec<String>) {
    let mut longest: Option<&Hold> = None;
    let mut greatest: Option<&Hold> = None;
    for &hold in holds {
        if let Some(other) = longest.filter(|other| other.to > hold.from) {
            let micros = (other.to.min(hold.to) - hold.from) / 1000;
            found.push(format!("two holders for {micros} µs: {other:?}, {hold:?}"));
        }
        if let Some(other) = greatest.filter(|other| other.token >= hold.token) {
            found.push(format!("the tokens do not rise: {other:?}, {hold:?}"));
        }
        longest = longest.filter(|other| other.to > hold.to).or(Some(hold));
        greatest = greatest
            .filter(|other| other.token > hold.token)
            .or(Some(hold));
    }
}

/// Once a version was written or read, no later call writes or reads an older one.
fn versions(accesses: &[&Access], found: &mut Vec<String>) {
    let is_success = |access: &&&Access| matches!(access.outcome, Outcome::Read | Outcome::Written);
    let mut by_begin: Vec<&Access> = accesses.iter().filter(is_success).copied().collect();
    let mut by_end = by_begin.clone();
    by_begin.sort_by_key(|access| access.begun);
    by_end.sort_by_key(|access| access.ended);
    let written = by_end
        .iter()
        .filter(|access| access.outcome == Outcome::Written);
    let written: BTreeSet<Version> = written.map(|access| access.version).collect();
    let mut ended = by_end.iter().peekable();
    // The latest version of the calls that had ended before, and one of these calls.
    let mut latest: Option<(Version, &Access)> = None;
    for access in by_begin {
        while let Some(earlier) = ended.next_if(|earlier| earlier.ended <= access.begun) {
            // A failed write may take effect later than the next write of its token, so only its token counts.
            let is_written = written.contains(&earlier.version);
            let number = if is_written {
                earlier.version.number
            } else {
                0
            };
            let version = Version {
                number,
                ..earlier.version
            };
            latest = latest
                .filter(|(latest, _)| *latest >= version)
                .or(Some((version, earlier)));
        }
        let Some((latest, earlier)) = latest else {
            continue;
        };
        let has_order = written.contains(&access.version) || access.version.token != latest.token;
        if has_order && access.version < latest {
            found.push(format!(
                "an older version of a value: {access:?} after {earlier:?}"
            ));
        }
    }
}

/// A valid lease has the greatest token of its key, so no write of its holder is refused.
fn refusals(holds: &[&Hold], accesses: &[&Access], found: &mut Vec<String>) {
    let by_token: BTreeMap<u64, &&Hold> = holds.iter().map(|hold| (hold.token, hold)).collect();
    for access in accesses
        .iter()
        .filter(|access| access.outcome == Outcome::Refused)
    {
        let hold = by_token.get(&access.version.token);
        if let Some(hold) = hold.filter(|hold| hold.from <= access.begun && access.ended <= hold.to)
        {
            found.push(format!(
                "a write of a valid lease is refused: {access:?}, {hold:?}"
            ));
        }
    }
}

/// The key of a lock on a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeKey {
    pub name: String,
    pub node: usize,
    /// The lease and the client of the key's value.
    pub lease: String,
    pub holder: String,
    /// The rest of its ttl in ms, which is negative without a ttl.
    pub left: i64,
}

/// A client that has shut down with success has released all leases on a majority of the nodes. Finds the leases of the
/// client `holder` that are still on more than `rest` nodes, the largest minority.
pub fn unreleased(keys: &[NodeKey], holder: &str, rest: usize) -> Vec<String> {
    let mut by_lease: BTreeMap<&str, Vec<&NodeKey>> = BTreeMap::new();
    for key in keys.iter().filter(|key| key.holder == holder) {
        by_lease.entry(&key.lease).or_default().push(key);
    }
    let stays = by_lease.into_values().filter(|keys| keys.len() > rest);
    stays
        .map(|keys| format!("a client has ended, but not its lease: {keys:?}"))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hold(token: u64, from: u64, to: u64) -> Hold {
        Hold {
            process: 0,
            key: 0,
            token,
            from,
            to,
            is_lost: false,
        }
    }

    fn access(outcome: Outcome, version: (u64, u64), begun: u64, ended: u64) -> Access {
        let (token, number) = version;
        Access {
            process: 0,
            key: 0,
            begun,
            ended,
            outcome,
            version: Version { token, number },
        }
    }

    fn write(version: (u64, u64), begun: u64, ended: u64) -> Access {
        access(Outcome::Written, version, begun, ended)
    }

    fn read(version: (u64, u64), begun: u64, ended: u64) -> Access {
        access(Outcome::Read, version, begun, ended)
    }

    #[track_caller]
    fn assert_finds(holds: &[Hold], accesses: &[Access], what: &str) {
        let found = history(holds, accesses);
        assert!(
            found.len() == 1 && found[0].contains(what),
            "{what:?} is not what it finds: {found:?}"
        );
    }

    #[test]
    fn holds_in_turn_are_correct() {
        let holds = [hold(2, 20, 30), hold(1, 10, 20)];
        let accesses = [
            read((0, 0), 8, 9),
            write((1, 1), 11, 12),
            write((1, 2), 19, 21),
            // They overlap with the write.
            read((1, 1), 20, 23),
            read((1, 2), 20, 21),
            write((2, 1), 21, 22),
            access(Outcome::Refused, (1, 3), 23, 24),
            read((2, 1), 24, 25),
        ];
        assert_eq!(history(&holds, &accesses), [""; 0]);
    }

    #[test]
    fn two_valid_leases_are_found() {
        assert_finds(&[hold(1, 10, 21), hold(2, 20, 30)], &[], "two holders");
        // The hold between them does not hide the first one.
        let holds = [hold(1, 0, 40), hold(2, 40, 41), hold(3, 40, 50)];
        assert_finds(&holds, &[], "two holders");
        let other_key = Hold {
            key: 1,
            ..hold(2, 20, 30)
        };
        assert_eq!(history(&[hold(1, 10, 21), other_key], &[]), [""; 0]);
    }

    #[test]
    fn tokens_that_do_not_rise_are_found() {
        assert_finds(&[hold(2, 10, 20), hold(2, 20, 30)], &[], "tokens");
        assert_finds(&[hold(2, 10, 20), hold(1, 20, 30)], &[], "tokens");
    }

    #[test]
    fn a_stale_write_is_found() {
        assert_finds(
            &[],
            &[write((1, 1), 26, 27), write((2, 1), 21, 25)],
            "older",
        );
        // The write between them does not hide the first one.
        let accesses = [
            write((3, 1), 1, 2),
            write((2, 1), 1, 3),
            write((2, 2), 4, 5),
        ];
        assert_finds(&[], &accesses, "older");
        assert_eq!(
            history(&[], &[write((1, 1), 24, 27), write((2, 1), 21, 25)]),
            [""; 0]
        );
    }

    #[test]
    fn a_read_of_an_older_value_is_found() {
        assert_finds(
            &[],
            &[write((1, 2), 1, 2), read((1, 1), 3, 4), write((1, 1), 0, 1)],
            "older",
        );
        assert_finds(&[], &[write((2, 1), 1, 2), read((1, 1), 3, 4)], "older");
        assert_finds(&[], &[read((2, 1), 1, 2), read((1, 1), 3, 4)], "older");
        assert_finds(&[], &[write((1, 1), 1, 2), read((0, 0), 3, 4)], "older");
        // A stale write after a read.
        assert_finds(&[], &[read((2, 1), 1, 2), write((1, 1), 3, 4)], "older");
    }

    #[test]
    fn a_failed_write_has_no_place_among_those_of_its_token() {
        let failed = access(Outcome::Failed, (2, 1), 1, 2);
        let late = [
            failed.clone(),
            write((2, 2), 3, 4),
            read((2, 1), 5, 6),
            read((2, 2), 7, 8),
        ];
        assert_eq!(history(&[], &late), [""; 0]);
        // Its token has a place.
        assert_finds(
            &[],
            &[failed.clone(), read((2, 1), 5, 6), read((1, 1), 7, 8)],
            "older",
        );
        assert_finds(
            &[],
            &[failed, write((3, 1), 3, 4), read((2, 1), 5, 6)],
            "older",
        );
    }

    #[test]
    fn a_refused_write_of_a_valid_lease_is_found() {
        let refused = access(Outcome::Refused, (1, 1), 12, 18);
        assert_finds(
            &[hold(1, 10, 20)],
            std::slice::from_ref(&refused),
            "refused",
        );
        for ended in [hold(1, 10, 17), hold(1, 13, 20), hold(2, 10, 20)] {
            assert_eq!(history(&[ended], std::slice::from_ref(&refused)), [""; 0]);
        }
    }

    #[test]
    fn a_version_is_its_text() {
        let version = Version {
            token: 71,
            number: 2,
        };
        assert_eq!(
            Version::parse(version.to_string().as_bytes()),
            Some(version)
        );
        for foreign in ["", "71", "71.", "a.2"] {
            assert_eq!(Version::parse(foreign.as_bytes()), None, "{foreign:?}");
        }
    }

    #[test]
    fn an_unreleased_lease_is_found_on_more_than_the_rest() {
        let key = |node: usize, lease: &str, holder: &str| NodeKey {
            name: "k".to_owned(),
            node,
            lease: lease.to_owned(),
            holder: holder.to_owned(),
            left: 100,
        };
        let mut keys = vec![key(0, "a", "ended"), key(1, "a", "ended")];
        keys.extend([key(2, "b", "ended"), key(3, "a", "other")]);
        assert_eq!(unreleased(&keys, "ended", 2), [""; 0]);
        keys.push(key(4, "a", "ended"));
        let found = unreleased(&keys, "ended", 2);
        assert!(
            found.len() == 1 && found[0].contains("node: 4"),
            "{found:?}"
        );
    }
}

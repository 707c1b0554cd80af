//! Looks at the locks on all servers while a round is played, and records which grants exist from when to when. A key
//! whose ttl is impossible is a violation at once.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use crate::checks::{Sighting, Violation};
use crate::messages::UNCONFIRMED;
use crate::records::now;
use crate::value::GrantId;

/// The pause between two looks at the keys.
const PAUSE: Duration = Duration::from_millis(100);
/// How long a node may take to reply to a look. A stopped node does not reply.
const LOOK_LIMIT: Duration = Duration::from_millis(200);
/// Returns the keys of locks on a master, with their values and ttls. A key of a slot that the node does not serve is
/// left out. The values of a shared key are its members that have not ended; the key outlives them by a second.
const LOOK: &str = "
    local found, time = {}, redis.call('TIME')
    local now = time[1] .. string.format('%03d', math.floor(time[2] / 1000))
    for _, key in ipairs(redis.call('KEYS', 'leasehold:*')) do
        if not string.find(key, '~', 1, true) then
            local value, ttl = redis.pcall('GET', key), redis.pcall('PTTL', key)
            if type(value) == 'string' and type(ttl) == 'number' then
                found[#found + 1] = {key, value, ttl}
            elseif type(value) == 'table' and string.find(value.err or '', 'WRONGTYPE', 1, true) then
                -- Time passes for PTTL while the script runs, so a share may have ended meanwhile.
                if ttl >= 0 then ttl = math.max(ttl - 1000, 0) end
                for _, member in ipairs(redis.call('ZRANGE', key, now, 'inf', 'BYSCORE')) do
                    found[#found + 1] = {key, member, ttl}
                end
            end
        end
    end
    return found";

/// Sets a flag that ends threads.
pub struct SetOnDrop<'a>(pub &'a AtomicBool);

impl Drop for SetOnDrop<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Does `work` while a thread looks at the locks with these keys on all servers. Returns what that thread has seen,
/// too. A ttl longer than `longest` is a violation.
pub fn watch_during<T>(
    ports: &[u16],
    names: &[String],
    longest: Duration,
    work: impl FnOnce() -> T,
) -> (T, Seen) {
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let watcher = scope.spawn(|| watch(ports, names, longest, &is_over));
        // Ends the thread also if the work panics.
        let ending = SetOnDrop(&is_over);
        let done = work();
        drop(ending);
        let seen = watcher.join().expect("looking at keys does not panic");
        (done, seen)
    })
}

/// The grants that were seen, and the keys whose ttl is impossible.
pub struct Seen {
    pub sightings: Vec<Sighting>,
    pub found: Vec<Violation>,
}

fn watch(ports: &[u16], names: &[String], longest: Duration, is_over: &AtomicBool) -> Seen {
    let mut connections: Vec<Option<redis::Connection>> = ports.iter().map(|_| None).collect();
    let mut seen = Looks::default();
    let numbers: BTreeMap<&String, usize> = names.iter().zip(0..).collect();
    while !is_over.load(Ordering::Relaxed) {
        for (port, connection) in ports.iter().zip(&mut connections) {
            // The time is from before the look, since the key may disappear right after the look.
            let at = now();
            let Some(locks) = look(*port, connection) else {
                *connection = None;
                continue;
            };
            for lock in locks {
                if let Some(&key) = numbers.get(&lock.0) {
                    seen.add(at, key, &lock, longest);
                }
            }
        }
        thread::sleep(PAUSE);
    }
    Seen {
        sightings: seen.sightings.into_values().collect(),
        found: seen.found,
    }
}

/// All looks so far.
#[derive(Default)]
struct Looks {
    sightings: BTreeMap<(usize, GrantId), Sighting>,
    found: Vec<Violation>,
    /// The grants whose ttl was reported.
    reported: BTreeSet<GrantId>,
}

impl Looks {
    /// Adds a look at the lock `key`. A confirmed grant must not have a ttl longer than `longest`.
    fn add(&mut self, at: u64, key: usize, (name, value, ttl): &Lock, longest: Duration) {
        let Some(grant) = GrantId::parse(value) else {
            return;
        };
        let sighting = self.sightings.entry((key, grant.clone()));
        let sighting = sighting.or_insert_with(|| Sighting {
            key,
            name: name.clone(),
            grant: grant.clone(),
            first: at,
            last: at,
        });
        sighting.last = at;
        let is_confirmed = !value.contains(" ?") && !value.contains(" !");
        let longest = match is_confirmed {
            true => longest,
            false => longest + UNCONFIRMED,
        };
        let is_possible = (0..=longest.as_millis() as i64).contains(ttl);
        if !is_possible && self.reported.insert(grant) {
            self.found.push(Violation {
                text: format!("{name:?} has a ttl of {ttl} ms: {value}"),
                key: Some(key),
                from: at,
                to: at,
            });
        }
    }
}

/// The key of a lock, its value, and its ttl in ms.
type Lock = (String, String, i64);

/// The keys of a node, with their values and ttls; `None` if it does not reply.
fn look(port: u16, connection: &mut Option<redis::Connection>) -> Option<Vec<Lock>> {
    if connection.is_none() {
        let client = redis::Client::open(format!("redis://127.0.0.1:{port}")).ok()?;
        let new = client.get_connection_with_timeout(LOOK_LIMIT).ok()?;
        new.set_read_timeout(Some(LOOK_LIMIT)).ok()?;
        *connection = Some(new);
    }
    let mut request = redis::cmd("EVAL");
    request.arg(LOOK).arg(0);
    request.query(connection.as_mut()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONGEST: Duration = Duration::from_secs(4);

    fn lock(lease: char, micros: &str, ttl: i64) -> Lock {
        let lease = lease.to_string().repeat(32);
        let value = format!("lh1 {lease} {micros} host/1/a");
        ("k".to_owned(), value, ttl)
    }

    #[test]
    fn grants_without_tokens_are_seen_one_by_one() {
        let mut seen = Looks::default();
        let zeros = "0000000000000000";
        for (at, lease) in [(1, 'a'), (2, 'a'), (5, 'b'), (9, 'b')] {
            seen.add(at, 0, &lock(lease, zeros, 1), LONGEST);
        }
        // A second grant of the lease.
        seen.add(10, 0, &lock('b', "1795263780943818", 1), LONGEST);
        let times = seen.sightings.values().map(|one| (one.first, one.last));
        assert_eq!(times.collect::<Vec<_>>(), [(1, 2), (5, 9), (10, 10)]);
    }

    #[test]
    fn an_impossible_ttl_is_found_once() {
        let mut seen = Looks::default();
        for (ttl, count) in [(0, 0), (4_000, 0), (4_001, 1), (4_001, 1)] {
            seen.add(1, 0, &lock('a', "1", ttl), LONGEST);
            assert_eq!(seen.found.len(), count, "{ttl}");
        }
        seen.add(1, 0, &lock('b', "1", -1), LONGEST);
        assert_eq!(seen.found.len(), 2);
        for (ttl, count) in [(7_000, 2), (7_001, 3)] {
            let (name, value, ttl) = lock('c', "1", ttl);
            seen.add(1, 0, &(name, value + " ? +", ttl), LONGEST);
            assert_eq!(seen.found.len(), count, "{ttl}");
        }
    }
}

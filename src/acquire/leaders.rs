//! Reads elections for the observers of this client. The observers of one election share its reads. All elections share
//! one thread, which starts with the first observer.
//!
//! 1. The server tracks two keys for each election: the lock and the fenced value of the same name. When one of them
//!    changes, the notification thread reads it, so the server tracks it again.
//! 2. If this read shows another lease than before, or if the value has changed, the observers' thread sends a
//!    [`Look`], which reads both keys in one step. A renewal changes only the ttl of the lock, so the read after it
//!    shows the same lease. This read counts as an answer, and the thread sends no `Look`.
//! 3. If the last answer is half a ttl old, the thread sends a `Look`, too: the leader may have crashed, and a vacant
//!    election has no renewals. Without notifications, it sends a `Look` every third of the ttl.
//! 4. If the last answer is older than the validity of a ttl, the observers get [`LeaderState::Unknown`]. The age of an
//!    answer counts from the time at which its request was sent.
//! 5. A new observer gets its first state from a look that begins after it was added. Observers that are added while a
//!    look is under way share the next one.
//!
//! If an answer has a smaller token than a reported one, the server lacks later data. Such an answer does not count,
//! unless it has the lock of the same grant: then Redis lacks only the value of the leader, and the observers get the
//! leader without a value.
//!
//! Each observer has a channel with room for one state. A newer state replaces one that the observer has not received.

mod election;
mod state;
#[cfg(test)]
#[cfg(not(shuttle))]
mod tests;

use std::collections::{BTreeSet, HashMap};
use std::sync::{Arc, Weak};
use std::time::Duration;

use crossbeam_channel::Receiver;

use crate::acquire::LocalQueues;
use crate::acquire::watch::Watcher;
use crate::command::{Command, Look, QueueMode, Reply, Request};
use crate::config::key::{Key, KeyMap};
use crate::process::threads::ThreadGroup;
use crate::report::error::{Error, ErrorKind};
use crate::store::{Backend, KeyState, Notifications, Store, TrackedKey};
use crate::util::clock::MonotonicTime;
use crate::util::mailbox::{Mailbox, Step};
use crate::watchdog::{MAX_TRACKED, Watchdog};

use election::{Election, Part};
pub use state::{LeaderInfo, LeaderState};

/// The maximum number of looks in one round. The next round follows at once.
const MOST_LOOKS: usize = 512;
/// A round of looks lasts at most the shortest ttl divided by this number. So a server that does not reply hardly
/// delays [`LeaderState::Unknown`] for other elections.
const LONGEST_ROUND: u32 = 5;

/// The elections that this client observes.
pub struct Leaders {
    store: Arc<dyn Store>,
    notifications: Arc<dyn Notifications>,
    watchdog: Arc<Watchdog>,
    queues: Arc<LocalQueues>,
    command_timeout: Duration,
    elections: Mailbox<Elections>,
}

/// Names an observer of an election.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObserverId {
    election: u64,
    observer: u64,
}

#[derive(Default)]
struct Elections {
    by_id: HashMap<u64, Election>,
    ids: KeyMap<u64>,
    /// The elections in the order of the times at which they are due.
    due: BTreeSet<(MonotonicTime, u64)>,
    last_id: u64,
    /// The shortest ttl of an observer since this client last observed no election.
    shortest_ttl: Option<Duration>,
    has_thread: bool,
}

/// The work of the thread for one round.
struct Round {
    to_track: Vec<TrackedKey>,
    looks: Vec<(u64, Look)>,
    deadline: MonotonicTime,
}

impl Elections {
    /// Applies `change` to an election, and updates the time at which it is due.
    fn change<R>(&mut self, id: u64, change: impl FnOnce(&mut Election) -> R) -> Option<R> {
        let election = self.by_id.get_mut(&id)?;
        let changed = change(election);
        let next = election.next_due();
        if next != election.due_at {
            self.due.remove(&(election.due_at, id));
            election.due_at = next;
            self.due.insert((next, id));
        }
        Some(changed)
    }

    /// Reports `Unknown` for the elections whose last answer is too old at `now`, and collects the looks that are due.
    fn next_round(&mut self, now: MonotonicTime, command_timeout: Duration) -> Option<Round> {
        let longest = self
            .shortest_ttl
            .map_or(command_timeout, |ttl| ttl / LONGEST_ROUND);
        let mut round = Round {
            to_track: Vec::new(),
            looks: Vec::new(),
            deadline: now.after(command_timeout.min(longest)),
        };
        while round.looks.len() < MOST_LOOKS {
            let Some((_, id)) = self.due.first().filter(|(at, _)| *at <= now).copied() else {
                break;
            };
            self.change(id, |election| {
                let Some(look) = election.begin_look(now) else {
                    return;
                };
                if let Some(unknown_at) = election.unknown_at() {
                    round.deadline = round.deadline.min(unknown_at);
                }
                round.to_track.append(&mut election.ask_to_track(now));
                round.looks.push((id, look));
            });
        }
        (!round.looks.is_empty()).then_some(round)
    }
}

impl Leaders {
    pub fn new(
        backend: &Backend,
        watchdog: Arc<Watchdog>,
        queues: Arc<LocalQueues>,
        command_timeout: Duration,
    ) -> Arc<Self> {
        Arc::new(Self {
            store: Arc::clone(&backend.store),
            notifications: Arc::clone(&backend.notifications),
            watchdog,
            queues,
            command_timeout,
            elections: Mailbox::default(),
        })
    }

    /// Adds an observer of the election with this lock and this value. Returns the channel of its states.
    pub fn observe(
        self: &Arc<Self>,
        lock: &Key,
        value: &Key,
        ttl: Duration,
        threads: &ThreadGroup,
    ) -> Result<(ObserverId, Receiver<LeaderState>), Error> {
        let now = self.watchdog.now();
        let mut added = None;
        self.elections.post(|elections| {
            added = Some(self.add(elections, lock, value, ttl, threads, now));
            true
        });
        added.unwrap_or_else(|| Err(Error::new(ErrorKind::Shutdown, "")))
    }

    fn add(
        self: &Arc<Self>,
        elections: &mut Elections,
        lock: &Key,
        value: &Key,
        ttl: Duration,
        threads: &ThreadGroup,
        now: MonotonicTime,
    ) -> Result<(ObserverId, Receiver<LeaderState>), Error> {
        if !elections.has_thread {
            let leaders = Arc::clone(self);
            threads.spawn("leasehold-observers", move || leaders.run())?;
            elections.has_thread = true;
        }
        elections.last_id += 2;
        let observer = elections.last_id + 1;
        let known = elections.ids.get(lock).copied();
        let election = known.unwrap_or_else(|| {
            let id = elections.last_id;
            self.begin(elections, id, lock, value, ttl, now);
            id
        });
        elections.shortest_ttl = Some(
            elections
                .shortest_ttl
                .map_or(ttl, |shortest| shortest.min(ttl)),
        );
        let receiver = elections
            .change(election, |election| election.join(observer, ttl, now))
            .expect("an election with an id exists");
        Ok((ObserverId { election, observer }, receiver))
    }

    /// Adds an election under the number `id`, and watches its keys. Beyond [`MAX_TRACKED`] elections, watches no keys:
    /// the thread looks at such an election every third of the ttl.
    fn begin(
        self: &Arc<Self>,
        elections: &mut Elections,
        id: u64,
        lock: &Key,
        value: &Key,
        ttl: Duration,
        now: MonotonicTime,
    ) {
        let watcher = |key: &Key, part| {
            let leaders = Arc::downgrade(self);
            let watcher: Arc<dyn Watcher> = Arc::new(PartWatcher { leaders, id, part });
            self.queues.watches.add(key, Arc::clone(&watcher));
            (key.clone(), watcher)
        };
        let watchers = match elections.by_id.len() < MAX_TRACKED {
            true => vec![watcher(lock, Part::Lock), watcher(value, Part::Value)],
            false => Vec::new(),
        };
        let election = Election::new(lock, value, ttl, watchers, now);
        elections.ids.insert(lock.clone(), id);
        elections.by_id.insert(id, election);
        elections.due.insert((now, id));
    }

    /// Removes an observer. The thread does not read an election without observers.
    pub fn leave(&self, id: ObserverId) {
        // The removed observer is dropped after the mutex is unlocked.
        let _removed = self.elections.change(|elections| {
            let election = elections.by_id.get_mut(&id.election)?;
            let outbox = election.observers.remove(&id.observer);
            if !election.observers.is_empty() {
                return Some((outbox, None));
            }
            let election = elections.by_id.remove(&id.election)?;
            elections.due.remove(&(election.due_at, id.election));
            elections.ids.remove(&election.lock);
            for (key, watcher) in &election.watchers {
                self.queues.watches.remove(key, watcher);
            }
            if elections.by_id.is_empty() {
                elections.shortest_ttl = None;
            }
            Some((outbox, Some(election)))
        });
    }

    /// Disconnects all observers, and ends the thread.
    pub fn stop(&self) {
        let elections = self.elections.stop(std::mem::take);
        for (key, watcher) in elections
            .by_id
            .values()
            .flat_map(|election| &election.watchers)
        {
            self.queues.watches.remove(key, watcher);
        }
    }

    fn run(&self) {
        while let Some(round) = self.elections.wait(|elections| self.next_step(elections)) {
            if !round.to_track.is_empty() {
                self.notifications.track(round.to_track);
            }
            self.look(round.looks, round.deadline);
        }
    }

    fn next_step(&self, elections: &mut Elections) -> Step<Round> {
        let now = self.watchdog.now();
        match elections.next_round(now, self.command_timeout) {
            Some(round) => Step::Return(round),
            None => {
                // The clock of a test may be ahead of the clock by which threads sleep.
                let next = elections.due.first().map(|(at, _)| at.since(now));
                Step::Sleep(next.map(|pause| MonotonicTime::now().after(pause)))
            }
        }
    }

    fn look(&self, looks: Vec<(u64, Look)>, deadline: MonotonicTime) {
        let asked_at = self.watchdog.now();
        let (ids, mut requests): (Vec<(u64, bool)>, Vec<Request>) = looks
            .into_iter()
            .map(|(id, look)| {
                let listens = self.notifications.queue_mode(&look.key) == QueueMode::Notified;
                ((id, listens), Request::new(Command::Look(look), deadline))
            })
            .unzip();
        self.store.execute(&mut requests);
        let now = self.watchdog.now();
        self.elections.change(|elections| {
            for ((id, listens), request) in ids.into_iter().zip(requests) {
                let outcome = request.into_outcome();
                elections.change(id, |election| match outcome {
                    Ok(Reply::LockAndValue(found)) => {
                        election.answer(*found, asked_at, now, listens)
                    }
                    Ok(other) => unreachable!("{other:?} in reply to a look"),
                    Err(error) => election.fail(&error, now),
                });
            }
        });
    }
}

/// Watches one of the two keys of an election.
struct PartWatcher {
    leaders: Weak<Leaders>,
    id: u64,
    part: Part,
}

impl PartWatcher {
    /// Changes the election, if it still has observers. Wakes the thread if its next look is now due earlier.
    fn change(&self, change: impl FnOnce(&mut Election, MonotonicTime)) {
        let Some(leaders) = self.leaders.upgrade() else {
            return;
        };
        let now = leaders.watchdog.now();
        leaders.elections.post(|elections| {
            let before = elections.due.first().copied();
            elections.change(self.id, |election| change(election, now));
            let after = elections.due.first().copied();
            after
                .zip(before)
                .is_some_and(|(after, before)| after < before)
        });
    }
}

impl Watcher for PartWatcher {
    fn changed(&self) -> bool {
        self.change(|election, now| election.untracked(self.part, now));
        true
    }

    fn seen(&self, state: KeyState<'_>) {
        self.change(|election, now| election.seen(self.part, state, now));
    }

    fn missed(&self) -> bool {
        self.change(|election, now| election.untracked(self.part, now));
        true
    }

    fn wake(&self) {
        if let Some(leaders) = self.leaders.upgrade() {
            leaders.elections.post(|_| true);
        }
    }
}

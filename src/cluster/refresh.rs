//! Keeps the slot map up to date. The thread `leasehold-cluster` asks the nodes in turn for the map (`CLUSTER SLOTS`,
//! which each version has) until one answers. It also closes nodes that are not used any more.
//!
//! - *Reasons to ask*: `MOVED`, `CLUSTERDOWN`, a slot without a master, and a connection that breaks or cannot be made,
//!   even without a waiting caller.
//! - *Order*: each round begins with another node. Masters whose last request had no reply in time, and nodes that did
//!   not answer the last query, come last. Each node has a part of the time to connect. If no node answers, some are
//!   asked again with the whole time.
//! - *Repeats*: a round is repeated, at most [`MAX_REPEATS`] times, if it has failed or its map contradicts a redirect:
//!   the asked node may learn of a fail-over later than the client.
//! - *Pauses*: rounds are at least [`FIRST_PAUSE`] apart, and up to [`LONGEST_PAUSE`] while the map stays the same. All
//!   callers share one round.
//! - *Another Cluster*: the client ignores a map that contains no node of the last map apart from its sender, unless
//!   all nodes of the URL give such maps.
//! - A slot that the answer leaves out keeps its last master.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::time::Duration;

use crate::cluster::ClusterStore;
use crate::cluster::address::ClusterAddress;
use crate::cluster::masters::Masters;
use crate::cluster::query::{ask, ask_in_turn};
use crate::cluster::slot_map::SlotRange;
use crate::report::error::{Error, ErrorKind};
use crate::store::ServerId;
use crate::util::backoff::Backoff;
use crate::util::clock::{Clock, MonotonicTime};
use crate::util::mailbox::{Mailbox, Step};
use crate::util::slot;
use crate::util::slot::Slot;
use crate::wire::connect::url::HostPort;
use crate::wire::endpoint::Endpoint;

/// The shortest pause between two queries for the slot map. The pause doubles while the map stays the same.
const FIRST_PAUSE: Duration = Duration::from_millis(50);
const LONGEST_PAUSE: Duration = Duration::from_millis(500);
/// After this time without a query, the pauses begin at [`FIRST_PAUSE`] again.
const QUIET: Duration = Duration::from_secs(2);
/// The thread repeats a round at most this many times without a new reason. A node that has not learned of a fail-over
/// during these rounds (some 15 s) is cut off from the others.
const MAX_REPEATS: u32 = 32;
/// How often the thread checks whether nodes without slots have finished their work.
const CHECK_UNUSED: Duration = Duration::from_millis(500);

/// Wakes the thread that asks for the slot map, and the callers that wait for the answer.
#[derive(Default)]
pub struct Refresher(Mailbox<RefreshState>);

#[derive(Default)]
struct RefreshState {
    is_wanted: bool,
    /// The number of rounds so far. In a round, the thread asks one node after another until one answers or all have
    /// failed.
    rounds: u64,
    /// The error of the last round.
    error: Option<Error>,
    /// The slots that redirects have moved since the thread last took this list.
    moved: Vec<Slot>,
    /// The node that is being asked.
    asked: Option<Arc<Endpoint>>,
}

/// The work that the thread has to do.
struct Work {
    moved: Vec<Slot>,
    refreshes: bool,
}

impl Refresher {
    /// Asks for a new slot map soon.
    pub fn request(&self) {
        self.0
            .post(|state| !std::mem::replace(&mut state.is_wanted, true));
    }

    /// Queues `slot`, which a redirect has moved in the map.
    pub fn queue_moved(&self, slot: Slot) {
        self.0.post(|state| {
            let has_room = state.moved.len() < usize::from(slot::COUNT);
            if has_room {
                state.moved.push(slot);
            }
            has_room
        });
    }

    /// Asks for a new slot map of the Cluster at `cluster`, and waits for it until `deadline`. Returns an error if no
    /// node has answered.
    pub fn refresh_by(&self, deadline: MonotonicTime, cluster: &ClusterAddress) -> Option<Error> {
        let mut before = 0;
        self.0.post(|state| {
            before = state.rounds;
            !std::mem::replace(&mut state.is_wanted, true)
        });
        let refreshed = self.0.wait(|state| {
            if state.rounds > before {
                return Step::Return(state.error.clone());
            }
            if MonotonicTime::now() < deadline {
                return Step::Sleep(Some(deadline));
            }
            if state.rounds > 0 {
                // If the last round has no error, its map has no master for the slot.
                return Step::Return(state.error.clone());
            }
            let asked = state.asked.as_ref();
            let unfinished = asked.and_then(|endpoint| endpoint.unfinished_step());
            Step::Return(unfinished.or_else(|| Some(no_slot_map(cluster))))
        });
        refreshed.unwrap_or_else(|| Some(Error::client_ended()))
    }

    /// Ends the thread, and closes the connection to the node that is being asked.
    pub fn stop(&self) {
        if let Some(asked) = self.0.stop(|state| state.asked.take()) {
            asked.close();
        }
    }

    /// Waits for work, but sends no query before `not_before`. Returns without work at `until`.
    fn wait(&self, not_before: MonotonicTime, until: Option<MonotonicTime>) -> Option<Work> {
        self.0.wait(|state| {
            let now = MonotonicTime::now();
            let refreshes = state.is_wanted && not_before <= now;
            if refreshes || !state.moved.is_empty() || until.is_some_and(|until| until <= now) {
                state.is_wanted &= !refreshes;
                let moved = std::mem::take(&mut state.moved);
                return Step::Return(Work { moved, refreshes });
            }
            let next = state.is_wanted.then_some(not_before);
            Step::Sleep(next.into_iter().chain(until).min())
        })
    }

    /// Sets the node that is asked next, so that `stop` can close its connection. Fails after `stop`.
    fn begin(&self, endpoint: &Arc<Endpoint>) -> Result<(), Error> {
        let asked = Some(Arc::clone(endpoint));
        let begun = self.0.change(|state| state.asked = asked);
        begun.ok_or_else(Error::client_ended)
    }

    pub fn end_round(&self, error: Option<Error>) {
        self.0.post(|state| {
            state.asked = None;
            state.rounds += 1;
            state.error = error;
            true
        });
    }
}

/// Runs until the refresher is stopped.
pub fn run(store: &ClusterStore) {
    let mut asked = HashMap::new();
    let mut backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
    let (mut pause, mut turn) = (Duration::ZERO, 0);
    let mut asked_at = MonotonicTime::now();
    let mut check_at = None;
    let mut redirects = Redirects::default();
    while let Some(work) = store.refresher.wait(asked_at.after(pause), check_at) {
        store.on_moved(&work.moved);
        redirects.add(&work.moved, &store.masters);
        if work.refreshes {
            let now = MonotonicTime::now();
            let was_quiet = now.since(asked_at) > QUIET;
            let ranges = ask_nodes(store, &mut asked, turn);
            turn += 1;
            asked_at = MonotonicTime::now();
            let (moved, error) = match ranges {
                Ok((sender, ranges)) => {
                    let moved = store.masters.replace(&ranges);
                    store.masters.set_announcer(&sender);
                    (moved, None)
                }
                Err(error) => (Vec::new(), Some(error)),
            };
            // The pauses begin anew if the answer has changed the map, or after a quiet time.
            if was_quiet || !moved.is_empty() {
                backoff.reset();
            }
            pause = backoff.next();
            if redirects.need_another_round(error.is_some(), &store.masters) {
                store.refresher.request();
            }
            store.refresher.end_round(error);
            store.on_moved(&moved);
        }
        let has_unused = store.close_unused();
        check_at = has_unused.then(|| MonotonicTime::now().after(CHECK_UNUSED));
    }
}

/// The slots that redirects have moved, with their masters, since the last map that agrees with these redirects.
#[derive(Default)]
struct Redirects {
    masters: HashMap<Slot, ServerId>,
    repeats: u32,
}

impl Redirects {
    fn add(&mut self, moved: &[Slot], masters: &Masters) {
        let owned = |slot: &Slot| Some((*slot, masters.owner(*slot)?.id()));
        self.masters.extend(moved.iter().filter_map(owned));
    }

    /// Whether to repeat the round that has just ended.
    fn need_another_round(&mut self, has_failed: bool, masters: &Masters) -> bool {
        let contradicts = |(slot, master): (&Slot, &ServerId)| !masters.is_owner(*master, *slot);
        let needed = has_failed || self.masters.iter().any(contradicts);
        if needed && self.repeats < MAX_REPEATS {
            self.repeats += 1;
            return true;
        }
        *self = Self::default();
        false
    }
}

/// A node that was asked for the slot map.
struct AskedNode {
    endpoint: Arc<Endpoint>,
    /// Whether the last query had no answer, or an error that may be temporary.
    is_silent: bool,
}

/// The slot maps that a round has ignored, because they contain no node of the last map.
#[derive(Default)]
struct ForeignMaps {
    senders: Vec<HostPort>,
    first: Option<Vec<SlotRange>>,
}

impl ForeignMaps {
    fn add(&mut self, sender: &HostPort, map: Vec<SlotRange>) {
        self.senders.push(sender.clone());
        self.first.get_or_insert(map);
    }

    /// The outcome of a round without a map of the same Cluster. `error` is its first error.
    fn outcome(
        mut self,
        seeds: &[HostPort],
        error: Error,
    ) -> Result<(HostPort, Vec<SlotRange>), Error> {
        match self.first {
            Some(map) if seeds.iter().all(|seed| self.senders.contains(seed)) => {
                Ok((self.senders.swap_remove(0), map))
            }
            Some(_) => Err(other_cluster_error(&self.senders[0])),
            None => Err(error),
        }
    }
}

/// Asks one node after another for the slot map, until one answers. Returns the node and the map. Each round begins
/// with another node. Silent nodes come last.
///
/// A node may belong to another Cluster now: its address was given away, or it was reset. So a map without any node of
/// the last map counts only if all nodes of the URL give such maps, as after the Cluster was made anew.
fn ask_nodes(
    store: &ClusterStore,
    asked: &mut HashMap<HostPort, AskedNode>,
    turn: usize,
) -> Result<(HostPort, Vec<SlotRange>), Error> {
    let mut addresses = store.masters.addresses();
    for seed in store.address.seeds() {
        if !addresses.contains(seed) {
            addresses.push(seed.clone());
        }
    }
    let count = addresses.len().max(1);
    addresses.rotate_left(turn % count);
    let masters = store.masters.all();
    let is_silent = |address: &HostPort| {
        let mut masters = masters.iter();
        asked.get(address).is_some_and(|node| node.is_silent)
            || masters.any(|master| master.address() == address && master.is_silent())
    };
    addresses.sort_by_key(is_silent);
    asked.retain(|address, _| addresses.contains(address));
    let mut foreign = ForeignMaps::default();
    let clock = Clock::default();
    let found = ask_in_turn(
        &addresses,
        store.address.timeouts(),
        &clock,
        |address, time| {
            let node = match asked.entry(address.clone()) {
                Entry::Occupied(node) => node.into_mut(),
                Entry::Vacant(vacant) => {
                    let mut masters = masters.iter();
                    let master = masters.find(|master| master.address() == address);
                    let announced_by = master.map(|master| master.announced_by());
                    let announced_by = announced_by.unwrap_or_default();
                    let endpoint = store.address.announced_endpoint(address, announced_by)?;
                    endpoint.dialer.name_connections(&store.holder);
                    vacant.insert(AskedNode {
                        endpoint: Arc::new(endpoint),
                        is_silent: false,
                    })
                }
            };
            store.refresher.begin(&node.endpoint)?;
            let answer = ask(&node.endpoint, address, time, store.config.command_timeout);
            node.is_silent = answer.as_ref().is_err_and(Error::is_unavailable);
            let ranges = answer?;
            if store.masters.can_be_next(&ranges) {
                return Ok((address.clone(), ranges));
            }
            foreign.add(address, ranges);
            Err(other_cluster_error(address))
        },
    );
    found.or_else(|error| foreign.outcome(store.address.seeds(), error))
}

/// The error about a node whose slot map contains no node of the last map.
fn other_cluster_error(address: &HostPort) -> Error {
    let message = format!(
        "{address}: the slot map of this node has no node of the last slot map, so it was not used. If the node \
         belongs to another Cluster now, remove it from the URL; if the Cluster was made anew, restart the client"
    );
    Error::new(ErrorKind::Unavailable, message)
}

/// The error of a caller whose deadline comes before the first answer.
fn no_slot_map(cluster: &ClusterAddress) -> Error {
    let message = format!(
        "{}: no node of the Cluster has sent the slot map in time; check the load of the nodes and the network",
        cluster.text()
    );
    Error::new(ErrorKind::Unavailable, message)
}

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests {
    use std::net::TcpListener;
    use std::thread;

    use parking_lot::Mutex;

    use super::*;
    use crate::config::{Config, DEFAULT_MAX_REPLY};
    use crate::store::Reports;
    use crate::util::id::HolderId;
    use crate::util::slot::Redirect;

    /// The address of a Cluster. The tests do not connect to it.
    fn cluster() -> ClusterAddress {
        let timeout = Duration::from_secs(1);
        let url = "redis+cluster://a:1,[::1]:2";
        let address = ClusterAddress::from_url(url, (timeout, timeout), DEFAULT_MAX_REPLY);
        address.unwrap().unwrap()
    }

    #[test]
    fn callers_share_one_query() {
        let refresher = Refresher::default();
        let far = MonotonicTime::now().after(Duration::from_secs(60));
        thread::scope(|scope| {
            let callers = [(); 3].map(|()| scope.spawn(|| refresher.refresh_by(far, &cluster())));
            while refresher.0.change(|state| state.is_wanted) == Some(false) {
                thread::yield_now();
            }
            let work = refresher.wait(MonotonicTime::now(), None).unwrap();
            assert!(work.refreshes && work.moved.is_empty());
            // A caller that starts late asks again, so answer until all callers have returned.
            while callers.iter().any(|caller| !caller.is_finished()) {
                refresher.end_round(None);
                thread::yield_now();
            }
        });
    }

    #[test]
    fn a_query_waits_for_its_time() {
        let refresher = Refresher::default();
        let begun = MonotonicTime::now();
        let not_before = begun.after(Duration::from_millis(50));
        refresher.request();
        assert!(refresher.wait(not_before, None).unwrap().refreshes);
        assert!(MonotonicTime::now() >= not_before);
        // Moved slots do not wait.
        refresher.request();
        refresher.queue_moved(Slot::new(7).unwrap());
        let far = begun.after(Duration::from_secs(60));
        let work = refresher.wait(far, None).unwrap();
        assert!(!work.refreshes && work.moved == [Slot::new(7).unwrap()]);
        refresher.stop();
        assert!(refresher.wait(far, None).is_none());
    }

    /// A node that closes each connection, and adds its own number to `asked` then.
    fn closing_node(number: usize, asked: &Arc<Mutex<Vec<usize>>>) -> HostPort {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let asked = Arc::clone(asked);
        thread::spawn(move || {
            for connection in listener.incoming().map_while(Result::ok) {
                asked.lock().push(number);
                drop(connection);
            }
        });
        let host = "127.0.0.1".to_owned();
        HostPort { host, port }
    }

    /// A store of the Cluster with these nodes, which it has not asked yet.
    fn store_of(nodes: &[HostPort]) -> Arc<ClusterStore> {
        let urls: Vec<String> = nodes.iter().map(HostPort::to_string).collect();
        let url = format!("redis+cluster://{}", urls.join(","));
        let timeout = Duration::from_secs(20);
        let address = ClusterAddress::from_url(&url, (timeout, timeout), DEFAULT_MAX_REPLY);
        let holder = HolderId::of_this_process();
        ClusterStore::new(
            address.unwrap().unwrap(),
            &Config::default(),
            holder,
            Reports::default(),
        )
    }

    #[test]
    fn some_redirects_ask_for_the_slot_map() {
        let node = HostPort::new(b"h", b"1").unwrap();
        let store = store_of(std::slice::from_ref(&node));
        let master = store.masters.get_or_add_named(&node).unwrap();
        for (code, is_wanted, moved) in [
            ("MOVED", true, &[Slot::new(7).unwrap()][..]),
            // The map has the slot already.
            ("MOVED", true, &[]),
            ("CLUSTERDOWN", true, &[]),
            ("TRYAGAIN", false, &[]),
            ("ASK", false, &[]),
        ] {
            let redirect = Redirect::parse(code, "7 h:2").unwrap();
            store.apply_redirect(&master, &redirect);
            let now = MonotonicTime::now();
            let work = store.refresher.wait(now, Some(now)).unwrap();
            assert_eq!((work.refreshes, &*work.moved), (is_wanted, moved), "{code}");
        }
    }

    #[test]
    fn rounds_rotate_nodes_and_ask_silent_ones_last() {
        let asked = Arc::default();
        let nodes = [0, 1, 2].map(|number| closing_node(number, &asked));
        let store = store_of(&nodes);
        let order = |turn| {
            assert!(ask_nodes(&store, &mut HashMap::new(), turn).is_err());
            std::mem::take(&mut *asked.lock())
        };
        assert_eq!(order(0), [0, 1, 2]);
        assert_eq!(order(1), [1, 2, 0]);
        store
            .masters
            .get_or_add_named(&nodes[0])
            .unwrap()
            .record_reply(false);
        assert_eq!(order(0), [1, 2, 0]);
        store
            .masters
            .get_or_add_named(&nodes[0])
            .unwrap()
            .record_reply(true);
        assert_eq!(order(0), [0, 1, 2]);
    }

    #[test]
    fn addresses_without_an_answer_come_last() {
        let asked = Arc::default();
        let nodes = [0, 1, 2].map(|number| closing_node(number, &asked));
        let store = store_of(&nodes);
        let mut known = HashMap::new();
        let order = |known: &mut _| {
            assert!(ask_nodes(&store, known, 0).is_err());
            std::mem::take(&mut *asked.lock())
        };
        assert_eq!(order(&mut known), [0, 1, 2]);
        assert!(known.values().all(|node| node.is_silent));
        known.get_mut(&nodes[2]).unwrap().is_silent = false;
        assert_eq!(order(&mut known), [2, 0, 1]);
    }

    #[test]
    fn a_new_cluster_counts_for_all_seeds_only() {
        let [one, two] = [1, 2].map(|port| HostPort {
            host: "h".to_owned(),
            port,
        });
        let map = |master: &HostPort| {
            vec![SlotRange {
                first: Slot::new(0).unwrap(),
                last: Slot::new(16_383).unwrap(),
                master: master.clone(),
                replicas: Vec::new(),
                ids: Vec::new(),
            }]
        };
        let seeds = [one.clone(), two.clone()];
        let outcome = |senders: &[&HostPort]| {
            let mut foreign = ForeignMaps::default();
            senders
                .iter()
                .for_each(|sender| foreign.add(sender, map(sender)));
            foreign.outcome(&seeds, Error::new(ErrorKind::Unavailable, "away"))
        };
        assert_eq!(outcome(&[&two, &one]).unwrap(), (two.clone(), map(&two)));
        let refused = outcome(&[&two]).unwrap_err();
        assert_eq!(refused.message(), other_cluster_error(&two).message());
        assert_eq!(outcome(&[]).unwrap_err().message(), "away");
    }

    #[test]
    fn a_round_is_repeated_until_its_map_agrees_with_the_redirects() {
        let [old, new] = [1, 2].map(|port| HostPort {
            host: "h".to_owned(),
            port,
        });
        let map = |master: &HostPort| SlotRange {
            first: Slot::new(0).unwrap(),
            last: Slot::new(16_383).unwrap(),
            master: master.clone(),
            replicas: Vec::new(),
            ids: Vec::new(),
        };
        let (masters, mut redirects) = (Masters::default(), Redirects::default());
        let slot = Slot::new(7).unwrap();
        masters.replace(&[map(&old)]);
        assert!(!redirects.need_another_round(false, &masters));
        masters.set_owner(slot, &new).unwrap();
        redirects.add(&[slot], &masters);
        assert!(
            redirects.need_another_round(true, &masters),
            "it has failed"
        );
        for _ in 1..MAX_REPEATS {
            masters.replace(&[map(&old)]);
            assert!(redirects.need_another_round(false, &masters), "a late map");
        }
        assert!(!redirects.need_another_round(false, &masters), "the bound");
        redirects.add(&[slot], &masters);
        masters.replace(&[map(&new)]);
        assert!(redirects.need_another_round(false, &masters), "moved again");
        masters.replace(&[map(&old)]);
        assert!(!redirects.need_another_round(false, &masters));
    }

    #[test]
    fn a_bad_announced_host_is_named() {
        let store = store_of(&[HostPort::new(b"h", b"1").unwrap()]);
        let host = "u:p@h".to_owned();
        let node = HostPort { host, port: 2 };
        let error = store.address.announced_endpoint(&node, Arc::default());
        let error = error.err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        let text = error.to_string();
        assert!(
            text.contains("u:p@h") && text.contains("cluster-announce-ip"),
            "{text}"
        );
    }

    #[test]
    fn a_caller_gets_the_error_of_its_round() {
        let refresher = Refresher::default();
        let soon = MonotonicTime::now().after(Duration::from_millis(20));
        let error = refresher.refresh_by(soon, &cluster()).unwrap();
        assert_eq!(
            error.to_string(),
            "Redis is unavailable: a:1,[::1]:2: no node of the Cluster has sent the slot map in time; check the load \
             of the nodes and the network"
        );
        let far = MonotonicTime::now().after(Duration::from_secs(60));
        thread::scope(|scope| {
            let caller = scope.spawn(|| refresher.refresh_by(far, &cluster()));
            while !caller.is_finished() {
                refresher.end_round(Some(Error::new(ErrorKind::Denied, "no")));
                thread::yield_now();
            }
            assert_eq!(caller.join().unwrap().unwrap().kind(), ErrorKind::Denied);
        });
    }
}

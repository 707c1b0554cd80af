//! A private Redis Cluster: servers of its own on 127.0.0.1, joined by commands. Moves slots and makes nodes fail over.

use std::net::Ipv4Addr;
use std::thread;
use std::time::{Duration, Instant};

use crate::connection::Connection;
use crate::{Error, Proxy, Reply, Server, ServerBuilder, TlsFiles, eventually};

/// The number of slots of every Cluster.
const SLOTS: usize = 16_384;
/// How long the nodes may take to agree, on a busy machine.
const AGREE_LIMIT: Duration = Duration::from_secs(60);
/// The time after which the testbed requests a planned fail-over again. A node abandons a fail-over after 5 s.
const ASK_AGAIN: Duration = Duration::from_secs(6);
/// How many keys are listed and moved by one command.
const KEYS_TO_LIST: &str = "1000000";
const KEYS_AT_A_TIME: usize = 100;

/// Settings of a [`Cluster`]; made by [`Cluster::builder`].
#[must_use = "nothing starts before start()"]
pub struct ClusterBuilder {
    server: ServerBuilder,
    masters: usize,
    has_replicas: bool,
    slots_alternate: bool,
    node_timeout: Duration,
}

impl ClusterBuilder {
    /// The number of masters, among which the slots are divided. Defaults to 3.
    pub fn masters(mut self, masters: usize) -> Self {
        self.masters = masters;
        self
    }

    /// Starts no replica. Otherwise each master has one.
    pub fn without_replicas(mut self) -> Self {
        self.has_replicas = false;
        self
    }

    /// Slot 0 belongs to the first master, slot 1 to the second, and so on in turn. Otherwise each master has slots in
    /// a row.
    pub fn alternating_slots(mut self) -> Self {
        self.slots_alternate = true;
        self
    }

    /// `cluster-node-timeout`: after this time without a reply, the other nodes suspect a node. Defaults to 2 s.
    pub fn node_timeout(mut self, timeout: Duration) -> Self {
        self.node_timeout = timeout;
        self
    }

    /// Nodes announce their ports without a host, so a client stays at the host of its URL: see [`Cluster::proxies`].
    /// Needs Redis 7.
    pub fn without_hosts(self) -> Self {
        self.arg("cluster-preferred-endpoint-type", "unknown-endpoint")
    }

    /// Adds a line to the redis.conf of each node: see [`ServerBuilder::arg`].
    pub fn arg(mut self, directive: impl Into<String>, value: impl Into<String>) -> Self {
        self.server = self.server.arg(directive, value);
        self
    }

    /// Requires this password from all clients and nodes.
    pub fn password(mut self, password: &str) -> Self {
        self.server = self.server.password(password).arg("masterauth", password);
        self
    }

    /// Makes nodes connect to each other with TLS only, and announce their TLS ports to clients that use TLS.
    pub fn tls(mut self, files: TlsFiles) -> Self {
        let server = self.server.tls(files);
        self.server = server
            .arg("tls-cluster", "yes")
            .arg("tls-replication", "yes");
        self
    }

    /// Starts the nodes, and waits until all of them agree on the slots and each replica follows its master.
    ///
    /// # Errors
    /// The errors of [`Server::start`]. In addition: the nodes do not agree within a minute.
    pub fn start(self) -> Result<Cluster, Error> {
        let count = self.masters * (1 + usize::from(self.has_replicas));
        let node_timeout = self.node_timeout.as_millis().to_string();
        let server = self
            .server
            .in_cluster()
            .arg("cluster-node-timeout", node_timeout)
            // Replicas stay with their masters. Each replica may take over, however long it was disconnected.
            .arg("cluster-migration-barrier", "100")
            .arg("cluster-replica-validity-factor", "0")
            .arg("repl-diskless-sync", "yes")
            .arg("repl-diskless-sync-delay", "0");
        let started: Vec<Result<Server, Error>> = thread::scope(|scope| {
            let starting: Vec<_> = (0..count)
                .map(|_| scope.spawn(|| server.clone().start()))
                .collect();
            let joined = starting.into_iter().map(|one| one.join());
            joined
                .map(|one| one.expect("starting a server does not panic"))
                .collect()
        });
        let cluster = Cluster {
            nodes: started.into_iter().collect::<Result<_, _>>()?,
            masters: self.masters,
        };
        cluster.join(self.slots_alternate)?;
        Ok(cluster)
    }
}

/// A Redis Cluster of its own: by default 3 masters (nodes 0 to 2) and a replica of each (nodes 3 to 5). A node is
/// named by its index, which it keeps when it changes its role.
pub struct Cluster {
    nodes: Vec<Server>,
    masters: usize,
}

/// Ranges of slots, each with its first and its last slot.
type Ranges = Vec<(u16, u16)>;

/// A line of `CLUSTER NODES`.
struct NodeLine {
    id: String,
    /// Whether the line describes the node that was asked.
    is_own: bool,
    is_master: bool,
    /// The id of the node's master. `-` for a master.
    master: String,
    epoch: u64,
    ranges: Ranges,
}

impl NodeLine {
    fn parse(line: &str) -> Option<Self> {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [
            id,
            _address,
            flags,
            master,
            _ping,
            _pong,
            epoch,
            _link,
            ranges @ ..,
        ] = words.as_slice()
        else {
            return None;
        };
        let has = |wanted| flags.split(',').any(|flag| flag == wanted);
        // A slot that is moving is `[slot->-id]`.
        let ranges = ranges.iter().filter(|range| !range.starts_with('['));
        let ranges = ranges.filter_map(|range| {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            Some((first.parse().ok()?, last.parse().ok()?))
        });
        Some(Self {
            id: (*id).to_owned(),
            is_own: has("myself"),
            is_master: has("master"),
            master: (*master).to_owned(),
            epoch: epoch.parse().ok()?,
            ranges: ranges.collect(),
        })
    }

    fn serves(&self, slot: u16) -> bool {
        let holds = |(first, last): &(u16, u16)| (*first..=*last).contains(&slot);
        self.is_master && self.ranges.iter().any(holds)
    }
}

impl Cluster {
    /// Starts 3 masters and 3 replicas, and waits until they work.
    ///
    /// # Errors
    /// The errors of [`ClusterBuilder::start`].
    pub fn start() -> Result<Self, Error> {
        Self::builder().start()
    }

    /// A Cluster with settings of its own.
    pub fn builder() -> ClusterBuilder {
        ClusterBuilder {
            server: Server::builder(),
            masters: 3,
            has_replicas: true,
            slots_alternate: false,
            node_timeout: Duration::from_secs(2),
        }
    }

    /// `redis+cluster://` with the first masters' addresses, and with `:password@` when one is set. With TLS
    /// `rediss+cluster://`.
    pub fn url(&self) -> String {
        let mut cluster = String::new();
        for node in &self.nodes[..self.masters] {
            let url = node.tls_url().unwrap_or_else(|| node.url());
            let (scheme, authority) = url.split_once("://").expect("a URL has a scheme");
            match authority.rsplit_once('@') {
                _ if cluster.is_empty() => cluster = format!("{scheme}+cluster://{authority}"),
                Some((_, host)) => cluster.extend([",", host]),
                None => cluster.extend([",", authority]),
            }
        }
        cluster
    }

    /// The nodes: first those that were started as masters, then the replicas in the same order.
    pub fn nodes(&self) -> &[Server] {
        &self.nodes
    }

    /// A node, to stop, kill or restart it. A node that restarts comes back in the role that the others gave it.
    pub fn node(&mut self, node: usize) -> &mut Server {
        &mut self.nodes[node]
    }

    /// A proxy in front of each node, in their order, and the URL of a client that uses the proxies for all its
    /// connections, also after a redirect. The proxies have the ports of the nodes, on `127.0.0.<host>`. So each of
    /// several clients can have proxies of its own. Needs [`ClusterBuilder::without_hosts`]; works without TLS only.
    ///
    /// # Errors
    /// The system does not give these addresses.
    pub fn proxies(&self, host: u8) -> Result<(Vec<Proxy>, String), Error> {
        let address = Ipv4Addr::new(127, 0, 0, host);
        let proxies = self.nodes.iter();
        let proxies = proxies.map(|node| Proxy::start_at(address, node.port()));
        let url = self.url().replace("127.0.0.1", &address.to_string());
        Ok((proxies.collect::<Result<_, _>>()?, url))
    }

    /// The slot of a key.
    ///
    /// # Panics
    /// No node replies.
    pub fn slot_of(&self, key: &str) -> u16 {
        let reply = self.any().command(&["CLUSTER", "KEYSLOT", key]);
        let slot = reply.ok().and_then(|slot| slot.as_int());
        let slot = slot.and_then(|slot| u16::try_from(slot).ok());
        slot.expect("CLUSTER KEYSLOT returns a slot")
    }

    /// The node that serves `slot` now, among those that run. Waits until there is one.
    ///
    /// # Panics
    /// No running node serves the slot within a minute.
    pub fn master_of(&self, slot: u16) -> usize {
        let mut found = None;
        let _ = eventually(AGREE_LIMIT, || {
            let claims = self.running().filter_map(|(index, node)| {
                let own = own_line(node)?;
                own.serves(slot).then_some((own.epoch, index))
            });
            found = claims.max().map(|(_, index)| index);
            found.is_some()
        });
        found.unwrap_or_else(|| panic!("no running node serves slot {slot}"))
    }

    /// The node that serves the slot of `key` now.
    ///
    /// # Panics
    /// The panics of [`master_of`](Self::master_of).
    pub fn master_of_key(&self, key: &str) -> usize {
        self.master_of(self.slot_of(key))
    }

    /// A running replica of the node `master`, even if that node does not run. Waits until there is one: after a
    /// fail-over, the old master becomes a replica a moment later.
    ///
    /// # Panics
    /// The node has no running replica within a minute.
    pub fn replica_of(&self, master: usize) -> usize {
        let port = format!("master_port:{}", self.nodes[master].port_for_nodes());
        let follows = |node: &Server| {
            let info = node.command(&["INFO", "replication"]);
            let info = info.ok().and_then(|info| info.as_text().map(str::to_owned));
            info.is_some_and(|info| info.lines().any(|line| line.trim_end() == port))
        };
        let mut replica = None;
        let _ = eventually(AGREE_LIMIT, || {
            replica = self.running().find(|(_, node)| follows(node));
            replica.is_some()
        });
        replica.expect("the node has a replica").0
    }

    /// Marks `slot` as moving to the node `to`. Afterwards, the present node of the slot replies `ASK` to a command
    /// whose keys it does not have, and `TRYAGAIN` to a command of which it has only some keys.
    ///
    /// # Errors
    /// A node does not run, or refuses the command.
    pub fn begin_move(&self, slot: u16, to: usize) -> Result<(), Error> {
        let from = self.master_of(slot);
        let slot = slot.to_string();
        let (from_id, to_id) = (self.id(from)?, self.id(to)?);
        run_command(
            &self.nodes[to],
            &["CLUSTER", "SETSLOT", &slot, "IMPORTING", &from_id],
        )?;
        run_command(
            &self.nodes[from],
            &["CLUSTER", "SETSLOT", &slot, "MIGRATING", &to_id],
        )
    }

    /// Moves the keys of `slot`, or some of them, to the node `to`, after [`begin_move`](Self::begin_move).
    ///
    /// # Errors
    /// The errors of `begin_move`.
    pub fn move_keys(
        &self,
        slot: u16,
        to: usize,
        wanted: impl Fn(&str) -> bool,
    ) -> Result<(), Error> {
        let from = &self.nodes[self.master_of(slot)];
        let port = self.nodes[to].port_for_nodes().to_string();
        let slot = slot.to_string();
        loop {
            let listed = from.command(&["CLUSTER", "GETKEYSINSLOT", &slot, KEYS_TO_LIST])?;
            let Reply::Array(keys) = listed else {
                return Err(Error::new(format!("CLUSTER GETKEYSINSLOT: {listed}")));
            };
            let keys = keys.iter().filter_map(Reply::as_text);
            let keys: Vec<&str> = keys.filter(|key| wanted(key)).collect();
            if keys.is_empty() {
                return Ok(());
            }
            for keys in keys.chunks(KEYS_AT_A_TIME) {
                let mut command = vec!["MIGRATE", "127.0.0.1", &port, "", "0", "10000"];
                if let Some(password) = from.password() {
                    command.extend(["AUTH", password]);
                }
                command.push("KEYS");
                command.extend(keys);
                match from.command(&command)? {
                    // The status is `OK`, or `NOKEY` if all of these keys have expired since they were listed.
                    Reply::Status(_) => {}
                    other => return Err(Error::new(format!("MIGRATE: {other}"))),
                }
            }
        }
    }

    /// Ends the move of `slot`. Afterwards, the node `to` serves the slot.
    ///
    /// # Errors
    /// The errors of `begin_move`.
    pub fn end_move(&self, slot: u16, to: usize) -> Result<(), Error> {
        let from = self.master_of(slot);
        let (slot, id) = (slot.to_string(), self.id(to)?);
        let command = ["CLUSTER", "SETSLOT", &slot, "NODE", &id];
        run_command(&self.nodes[to], &command)?;
        if from != to {
            run_command(&self.nodes[from], &command)?;
        }
        // All masters get the command, since otherwise they would learn of the move later. Replicas refuse it.
        for (_, node) in self.running() {
            let _ = node.command(&command)?;
        }
        Ok(())
    }

    /// Moves `slot` with its keys to the node `to`.
    ///
    /// # Errors
    /// The errors of `begin_move`.
    pub fn move_slot(&self, slot: u16, to: usize) -> Result<(), Error> {
        self.begin_move(slot, to)?;
        self.move_keys(slot, to, |_| true)?;
        self.end_move(slot, to)
    }

    /// Makes a replica of the node `master` the new master, without loss of data (`CLUSTER FAILOVER`). Returns the new
    /// master once it serves slots.
    ///
    /// First waits until all running nodes agree, since a replica that takes over claims the slots that its master had
    /// as far as the replica knows. Just after a slot has moved, the replica may not know of the move. If its master
    /// has received the slot, the replica does not claim it, and the slot has no master. If its master has given the
    /// slot away, the replica claims the slot back without the slot's keys.
    ///
    /// # Errors
    /// The nodes do not agree within a minute. The replica refuses for a minute, or does not take over within another
    /// minute.
    pub fn fail_over(&self, master: usize) -> Result<usize, Error> {
        self.wait_until_ok()?;
        let replica = self.replica_of(master);
        // The replica refuses while its link to the master is down.
        wait_for_command(&self.nodes[replica], &["CLUSTER", "FAILOVER"])?;
        let mut asked = Instant::now();
        let serves = || {
            // The other masters refuse to vote if the last election was a moment before.
            if asked.elapsed() > ASK_AGAIN {
                let _ = self.nodes[replica].command(&["CLUSTER", "FAILOVER"]);
                asked = Instant::now();
            }
            serves(&self.nodes[replica])
        };
        wait_for_agreement(serves, "the replica did not take over")?;
        Ok(replica)
    }

    /// Waits until the node `node` is a master.
    ///
    /// # Errors
    /// The node is no master within a minute.
    pub fn wait_until_master(&self, node: usize) -> Result<(), Error> {
        wait_for_agreement(
            || serves(&self.nodes[node]),
            "the replica did not take over",
        )
    }

    /// Waits until all running nodes have the same view of the roles and the slots, know a master for each slot, and
    /// each running replica follows its master.
    ///
    /// # Errors
    /// The nodes do not agree within a minute.
    pub fn wait_until_ok(&self) -> Result<(), Error> {
        let is_ok = || {
            let mut views = self.running().map(|(_, node)| view(node));
            let first = views.next().expect("a node runs");
            first.is_some()
                && views.all(|view| view == first)
                && self.running().all(|(_, node)| is_ok(node))
        };
        wait_for_agreement(is_ok, "the nodes do not agree")
    }

    /// Joins the nodes to a Cluster.
    fn join(&self, slots_alternate: bool) -> Result<(), Error> {
        let mut connections = Vec::new();
        for node in &self.nodes {
            connections.push(node.connect()?);
        }
        for (index, connection) in connections.iter_mut().enumerate() {
            let epoch = (index + 1).to_string();
            send(connection, &["CLUSTER", "SET-CONFIG-EPOCH", &epoch])?;
            if index < self.masters {
                let own = |slot: &usize| match slots_alternate {
                    true => slot % self.masters == index,
                    false => slot * self.masters / SLOTS == index,
                };
                let slots = (0..SLOTS).filter(own).map(|slot| slot.to_string());
                let slots: Vec<String> = slots.collect();
                let mut command = vec!["CLUSTER", "ADDSLOTS"];
                command.extend(slots.iter().map(String::as_str));
                send(connection, &command)?;
            }
            // Every node meets every other node. Learning of each other by gossip would take longer.
            for other in &self.nodes[..index] {
                let port = other.port_for_nodes().to_string();
                send(connection, &["CLUSTER", "MEET", "127.0.0.1", &port])?;
            }
        }
        let ids: Vec<String> = (0..self.masters)
            .map(|master| self.id(master))
            .collect::<Result<_, _>>()?;
        for (index, node) in self.nodes.iter().enumerate().skip(self.masters) {
            let id = &ids[index % self.masters];
            // The replica has to know its master first.
            wait_for_command(node, &["CLUSTER", "REPLICATE", id])?;
        }
        let known = format!("cluster_known_nodes:{}", self.nodes.len());
        let all_known = || {
            self.nodes.iter().all(|node| {
                info(node).is_some_and(|info| info.lines().any(|line| line.trim_end() == known))
            })
        };
        wait_for_agreement(all_known, "the nodes do not know each other")?;
        self.wait_until_ok()
    }

    fn id(&self, node: usize) -> Result<String, Error> {
        let reply = self.nodes[node].command(&["CLUSTER", "MYID"])?;
        let id = reply.as_text().map(str::to_owned);
        id.ok_or_else(|| Error::new(format!("CLUSTER MYID: {reply}")))
    }

    fn running(&self) -> impl Iterator<Item = (usize, &Server)> {
        let nodes = self.nodes.iter().enumerate();
        nodes.filter(|(_, node)| node.is_running())
    }

    fn any(&self) -> &Server {
        self.running().next().expect("a node runs").1
    }
}

fn send(connection: &mut Connection, command: &[&str]) -> Result<(), Error> {
    match connection.command(command) {
        Ok(Reply::Error(error)) => Err(Error::new(format!("{}: {error}", command[1]))),
        Ok(_) => Ok(()),
        Err(error) => Err(Error::io(command[1].to_owned(), error)),
    }
}

fn run_command(node: &Server, command: &[&str]) -> Result<(), Error> {
    match node.command(command)? {
        Reply::Error(error) => Err(Error::new(format!("{command:?}: {error}"))),
        _ => Ok(()),
    }
}

/// Repeats a command until the node carries it out, for a minute at most. Then returns the last error.
fn wait_for_command(node: &Server, command: &[&str]) -> Result<(), Error> {
    let mut outcome = Ok(());
    let _ = eventually(AGREE_LIMIT, || {
        outcome = run_command(node, command);
        outcome.is_ok()
    });
    outcome
}

fn wait_for_agreement(condition: impl FnMut() -> bool, otherwise: &str) -> Result<(), Error> {
    match eventually(AGREE_LIMIT, condition) {
        true => Ok(()),
        false => Err(Error::new(format!("{otherwise} within {AGREE_LIMIT:?}"))),
    }
}

fn info(node: &Server) -> Option<String> {
    let info = node.command(&["CLUSTER", "INFO"]).ok()?;
    info.as_text().map(str::to_owned)
}

/// Whether the node knows a master for each slot and, as a replica, follows its master.
fn is_ok(node: &Server) -> bool {
    let is_up = info(node).is_some_and(|info| {
        let mut lines = info.lines().map(str::trim_end);
        lines.any(|line| line == "cluster_state:ok")
    });
    let replication = node.command(&["INFO", "replication"]).ok();
    let replication = replication.and_then(|info| info.as_text().map(str::to_owned));
    let follows = replication.is_some_and(|info| {
        let has = |wanted: &str| info.lines().any(|line| line.trim_end() == wanted);
        has("role:master") || has("master_link_status:up")
    });
    is_up && follows
}

/// Whether the node is a master with slots.
fn serves(node: &Server) -> bool {
    own_line(node).is_some_and(|own| own.is_master && !own.ranges.is_empty())
}

fn own_line(node: &Server) -> Option<NodeLine> {
    lines(node)?.into_iter().find(|line| line.is_own)
}

/// The roles and slots of all nodes in the view of `node`, sorted by node.
fn view(node: &Server) -> Option<Vec<(String, String, Ranges)>> {
    let lines = lines(node)?.into_iter();
    let mut view: Vec<_> = lines
        .map(|line| (line.id, line.master, line.ranges))
        .collect();
    view.sort();
    Some(view)
}

fn lines(node: &Server) -> Option<Vec<NodeLine>> {
    let nodes = node.command(&["CLUSTER", "NODES"]).ok()?;
    nodes.as_text()?.lines().map(NodeLine::parse).collect()
}

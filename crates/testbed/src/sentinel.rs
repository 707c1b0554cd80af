//! A private group of servers that sentinels watch: a primary, its replicas, and the sentinels, all on 127.0.0.1.

use std::thread;
use std::time::{Duration, Instant};

use crate::{Error, Reply, Server, ServerBuilder, TlsFiles, eventually};

/// The name of the group at its sentinels.
const NAME: &str = "mymaster";
/// How long the sentinels may take to agree, on a busy machine.
const AGREE_LIMIT: Duration = Duration::from_secs(90);
/// The time after which the sentinels have abandoned a slow fail-over. Two of its steps may take one `failover-timeout`
/// each, and the other sentinels learn of its end within some seconds.
const LONGEST_FAIL_OVER: Duration = Duration::from_secs(15);
const POLL: Duration = Duration::from_millis(10);

/// Settings of a [`SentinelGroup`]; made by [`SentinelGroup::builder`].
#[must_use = "nothing starts before start()"]
pub struct SentinelGroupBuilder {
    server: ServerBuilder,
    sentinel: ServerBuilder,
    password: Option<String>,
    has_tls: bool,
    replicas: usize,
    sentinels: usize,
    down_after: Duration,
}

impl SentinelGroupBuilder {
    /// The number of replicas. Defaults to 2.
    pub fn replicas(mut self, replicas: usize) -> Self {
        self.replicas = replicas;
        self
    }

    /// The number of sentinels. Defaults to 3. The quorum is a majority.
    pub fn sentinels(mut self, sentinels: usize) -> Self {
        self.sentinels = sentinels;
        self
    }

    /// After this time without a reply, a sentinel regards a server as down. Defaults to 1 s.
    pub fn down_after(mut self, down_after: Duration) -> Self {
        self.down_after = down_after;
        self
    }

    /// Adds a line to the redis.conf of each server: see [`ServerBuilder::arg`].
    pub fn arg(mut self, directive: impl Into<String>, value: impl Into<String>) -> Self {
        self.server = self.server.arg(directive, value);
        self
    }

    /// Requires this password from all clients of the servers.
    pub fn password(mut self, password: &str) -> Self {
        self.server = self.server.password(password).arg("masterauth", password);
        self.password = Some(password.to_owned());
        self
    }

    /// Requires this password from all clients of the sentinels.
    pub fn sentinel_password(mut self, password: &str) -> Self {
        let sentinel = self.sentinel.password(password);
        self.sentinel = sentinel.arg("sentinel sentinel-pass", password);
        self
    }

    /// All servers and sentinels listen with TLS, too, and use it among themselves.
    pub fn tls(mut self, files: TlsFiles) -> Self {
        let with_tls = |server: ServerBuilder| {
            let server = server.tls(files.clone());
            server.arg("tls-replication", "yes")
        };
        self.server = with_tls(self.server);
        self.sentinel = with_tls(self.sentinel);
        self.has_tls = true;
        self
    }

    /// Starts all processes, and waits until the sentinels know one another and the replicas.
    ///
    /// # Errors
    /// The errors of [`Server::start`]. In addition: the sentinels do not agree within 90 s.
    pub fn start(self) -> Result<SentinelGroup, Error> {
        // Without this setting, the primary would pause before each full copy to a replica.
        let server = self
            .server
            .arg("repl-diskless-sync", "yes")
            .arg("repl-diskless-sync-delay", "0");
        let primary = server.clone().start()?;
        let port_of = |server: &Server| match self.has_tls {
            true => server.tls_port(),
            false => server.port(),
        };
        let follow = format!("127.0.0.1 {}", port_of(&primary));
        let started: Vec<Result<Server, Error>> = thread::scope(|scope| {
            let replicas = (0..self.replicas).map(|_| server.clone().arg("replicaof", &follow));
            let sentinels = (0..self.sentinels).map(|_| self.sentinel.clone().for_sentinel());
            let starting: Vec<_> = replicas
                .chain(sentinels)
                .map(|one| scope.spawn(|| one.start()))
                .collect();
            let joined = starting.into_iter().map(|one| one.join());
            joined
                .map(|one| one.expect("starting a server does not panic"))
                .collect()
        });
        let mut servers = vec![primary];
        for server in started {
            servers.push(server?);
        }
        let sentinels = servers.split_off(1 + self.replicas);
        let group = SentinelGroup {
            servers,
            sentinels,
            has_tls: self.has_tls,
            password: self.password,
            down_after: self.down_after,
        };
        let port = port_of(&group.servers[0]);
        for sentinel in &group.sentinels {
            group.watch(sentinel, NAME, port)?;
        }
        group.wait_until_whole()?;
        Ok(group)
    }
}

/// A primary (at first server 0), its replicas, and their sentinels. A server is named by its index, which it keeps
/// when it changes its role. Dropping the group ends all of them.
pub struct SentinelGroup {
    servers: Vec<Server>,
    sentinels: Vec<Server>,
    has_tls: bool,
    password: Option<String>,
    down_after: Duration,
}

impl SentinelGroup {
    /// Starts a primary, two replicas and three sentinels, and waits until they work.
    ///
    /// # Errors
    /// The errors of [`SentinelGroupBuilder::start`].
    pub fn start() -> Result<Self, Error> {
        Self::builder().start()
    }

    /// A group with settings of its own.
    pub fn builder() -> SentinelGroupBuilder {
        SentinelGroupBuilder {
            server: Server::builder(),
            sentinel: Server::builder(),
            password: None,
            has_tls: false,
            replicas: 2,
            sentinels: 3,
            down_after: Duration::from_secs(1),
        }
    }

    /// `redis+sentinel://` with the addresses of all sentinels, and with the servers' `:password@` when one is set.
    pub fn url(&self) -> String {
        let all: Vec<usize> = (0..self.sentinels.len()).collect();
        self.url_of(&all)
    }

    /// The same as [`url`](Self::url), with the addresses of these sentinels. With TLS, `rediss+sentinel://`.
    pub fn url_of(&self, sentinels: &[usize]) -> String {
        let scheme = if self.has_tls { "rediss" } else { "redis" };
        let host = |index: &usize| format!("127.0.0.1:{}", self.port_of(&self.sentinels[*index]));
        let hosts: Vec<String> = sentinels.iter().map(host).collect();
        let url = self.servers[0].url();
        let authority = url.trim_start_matches("redis://");
        let login = authority
            .rsplit_once('@')
            .map_or(String::new(), |(it, _)| format!("{it}@"));
        format!("{scheme}+sentinel://{login}{}/{NAME}", hosts.join(","))
    }

    /// The servers, in the order in which they were started.
    pub fn servers(&self) -> &[Server] {
        &self.servers
    }

    /// The server with this index.
    pub fn server_mut(&mut self, index: usize) -> &mut Server {
        &mut self.servers[index]
    }

    /// The sentinels.
    pub fn sentinels(&self) -> &[Server] {
        &self.sentinels
    }

    /// The sentinel with this index.
    pub fn sentinel_mut(&mut self, index: usize) -> &mut Server {
        &mut self.sentinels[index]
    }

    /// The primary according to a majority of the sentinels. `None` while there is no majority.
    pub fn primary(&self) -> Option<usize> {
        let named: Vec<usize> = self
            .sentinels
            .iter()
            .filter_map(|it| self.named_by(it))
            .collect();
        (0..self.servers.len()).find(|server| {
            let votes = named.iter().filter(|it| *it == server).count();
            2 * votes > self.sentinels.len()
        })
    }

    /// Makes the sentinels promote a replica, although the primary works. Returns the index of the new primary. If the
    /// machine is too busy, the sentinels abandon the fail-over, and this function begins another one.
    ///
    /// # Errors
    /// The sentinels name no primary for 90 s, or no fail-over ends within 90 s.
    pub fn fail_over(&self) -> Result<usize, Error> {
        let Some(before) = self.other_primary(None, AGREE_LIMIT) else {
            return Err(Error::new("the sentinels name no primary"));
        };
        let end = Instant::now() + AGREE_LIMIT;
        loop {
            let begin = |it: &Server| it.command(&["SENTINEL", "FAILOVER", NAME]);
            let mut replies = self.sentinels.iter().map(begin);
            let has_begun = replies.any(|reply| matches!(reply, Ok(Reply::Status(_))));
            let limit = if has_begun { LONGEST_FAIL_OVER } else { POLL };
            if let Some(primary) = self.other_primary(Some(before), limit) {
                return Ok(primary);
            }
            if Instant::now() >= end {
                return Err(Error::new("no fail-over ends"));
            }
        }
    }

    /// Waits until a majority of the sentinels names another primary than `before`, and this server reports that it is
    /// a primary. Returns the index of the server.
    ///
    /// # Errors
    /// The same server is the primary for 90 s.
    pub fn wait_for_switch(&self, before: usize) -> Result<usize, Error> {
        self.other_primary(Some(before), AGREE_LIMIT)
            .ok_or_else(|| Error::new("the sentinels name no other primary"))
    }

    /// Waits for a primary other than `before`.
    fn other_primary(&self, before: Option<usize>, limit: Duration) -> Option<usize> {
        let mut primary = None;
        let switched = eventually(limit, || {
            primary = self.primary().filter(|it| Some(*it) != before);
            primary.is_some_and(|it| role_of(&self.servers[it]) == Some("master"))
        });
        primary.filter(|_| switched)
    }

    /// Waits until all servers but the primary are its replicas and have its data, and all sentinels know all of them.
    ///
    /// # Errors
    /// It takes longer than 90 s, or a process is not running.
    pub fn wait_until_whole(&self) -> Result<(), Error> {
        let mut state = String::new();
        let is_whole = eventually(AGREE_LIMIT, || {
            state = self.what_is_missing();
            state.is_empty()
        });
        match is_whole {
            true => Ok(()),
            false => Err(Error::new(format!("the group is not whole: {state}"))),
        }
    }

    /// Makes all sentinels watch `port` on 127.0.0.1 as another group. The port may be that of a proxy. Returns the URL
    /// of that group.
    ///
    /// # Errors
    /// A sentinel is not running, or knows the group.
    pub fn watch_also(&self, name: &str, port: u16) -> Result<String, Error> {
        for sentinel in &self.sentinels {
            self.watch(sentinel, name, port)?;
        }
        let url = self.url();
        let (start, _) = url.rsplit_once('/').unwrap_or((&url, ""));
        Ok(format!("{start}/{name}"))
    }

    fn watch(&self, sentinel: &Server, name: &str, port: u16) -> Result<(), Error> {
        let quorum = (self.sentinels.len() / 2 + 1).to_string();
        let down_after = self.down_after.as_millis().to_string();
        let port = port.to_string();
        let set = |option, value| ["SENTINEL", "SET", name, option, value].to_vec();
        let mut commands = vec![
            ["SENTINEL", "MONITOR", name, "127.0.0.1", &port, &quorum].to_vec(),
            set("down-after-milliseconds", &down_after),
            set("failover-timeout", "5000"),
            set("parallel-syncs", "5"),
        ];
        if let Some(password) = &self.password {
            commands.push(set("auth-pass", password));
        }
        for command in commands {
            if let Reply::Error(why) = sentinel.command(&command)? {
                return Err(Error::new(format!("{}: {why}", command.join(" "))));
            }
        }
        Ok(())
    }

    /// The port by which clients connect to this server or sentinel.
    pub fn port_of(&self, server: &Server) -> u16 {
        match self.has_tls {
            true => server.tls_port(),
            false => server.port(),
        }
    }

    fn named_by(&self, sentinel: &Server) -> Option<usize> {
        let reply = sentinel.command(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", NAME]);
        let Ok(Reply::Array(address)) = reply else {
            return None;
        };
        let port: u16 = address.get(1)?.as_text()?.parse().ok()?;
        self.servers.iter().position(|it| self.port_of(it) == port)
    }

    /// The reason why the group is not whole. Empty if it is whole.
    fn what_is_missing(&self) -> String {
        let Some(primary) = self.primary() else {
            return "the sentinels do not agree on the primary".to_owned();
        };
        for (index, server) in self.servers.iter().enumerate() {
            let role = role_of(server);
            let is_linked = || {
                let info = server.command(&["INFO", "replication"]).ok();
                let info = info.as_ref().and_then(Reply::as_text).unwrap_or_default();
                let of_primary = format!("master_port:{}\r", self.port_of(&self.servers[primary]));
                info.contains("master_link_status:up") && info.contains(&of_primary)
            };
            let is_right = match index == primary {
                true => role == Some("master"),
                false => role == Some("slave") && is_linked(),
            };
            if !is_right {
                return format!("server {index} is {role:?}, and {primary} is the primary");
            }
        }
        let numbers = [
            ("num-slaves", self.servers.len() - 1),
            ("num-other-sentinels", self.sentinels.len() - 1),
        ];
        for (index, sentinel) in self.sentinels.iter().enumerate() {
            let Ok(Reply::Array(fields)) = sentinel.command(&["SENTINEL", "MASTER", NAME]) else {
                return format!("sentinel {index} does not reply");
            };
            let texts: Vec<&str> = fields.iter().filter_map(Reply::as_text).collect();
            for (name, wanted) in numbers {
                let found = texts
                    .chunks(2)
                    .find(|pair| pair[0] == name)
                    .map(|pair| pair[1]);
                if found != Some(wanted.to_string().as_str()) {
                    return format!("sentinel {index} has the {name} {found:?}");
                }
            }
            if texts
                .chunks(2)
                .any(|pair| pair[0] == "flags" && pair[1] != "master")
            {
                return format!("sentinel {index} is not done with a fail-over");
            }
        }
        String::new()
    }
}

/// The role that a server itself reports.
fn role_of(server: &Server) -> Option<&'static str> {
    let Ok(Reply::Array(role)) = server.command(&["ROLE"]) else {
        return None;
    };
    match role.first()?.as_text()? {
        "master" => Some("master"),
        "slave" => Some("slave"),
        _ => None,
    }
}

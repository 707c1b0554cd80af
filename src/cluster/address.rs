//! The address of a Cluster: some of its nodes, and the settings that all connections share.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use redis::{ConnectionAddr, ConnectionInfo};

use crate::cluster::query;
use crate::cluster::slot_map::{MAX_MASTERS, SlotRange};
use crate::config::credentials::CredentialsCallback;
#[cfg(feature = "tls")]
use crate::config::tls::TlsConfig;
use crate::config::{ConnectionLimits, DEFAULT_PREFIX};
use crate::process::threads::call_each;
use crate::report::error::{Error, ErrorKind};
use crate::util::clock::{Clock, MonotonicTime};
use crate::wire::connect::url;
use crate::wire::connect::url::HostPort;
use crate::wire::endpoint::Endpoint;

/// A new client tries to connect to at most this many masters of a slot map.
const MOST_CHECKED: usize = 16;

/// Some nodes of a Cluster, and the settings of connections to all of its nodes.
pub struct ClusterAddress {
    seeds: Vec<HostPort>,
    /// The first node's address. All nodes share its login and protocol.
    info: ConnectionInfo,
    credentials: Option<CredentialsCallback>,
    /// The prefix of the client's keys.
    prefix: String,
    #[cfg(feature = "tls")]
    tls: Option<TlsConfig>,
    connect_timeout: Duration,
    command_timeout: Duration,
    max_reply_bytes: usize,
    limits: ConnectionLimits,
}

impl ClusterAddress {
    /// Parses a `redis+cluster://` URL. Returns `None` if `url` has another scheme.
    pub fn from_url(
        url: &str,
        (connect_timeout, command_timeout): (Duration, Duration),
        max_reply_bytes: usize,
    ) -> Option<Result<Self, Error>> {
        let infos = url::parse_cluster(url)?;
        let invalid = |why| Error::new(ErrorKind::InvalidConfig, format!("url: {why}"));
        let seed = |info: &ConnectionInfo| HostPort::of(info.addr());
        Some(infos.map_err(invalid).map(|infos| Self {
            seeds: infos.iter().filter_map(seed).collect(),
            info: infos[0].clone(),
            credentials: None,
            prefix: DEFAULT_PREFIX.to_owned(),
            #[cfg(feature = "tls")]
            tls: None,
            connect_timeout,
            command_timeout,
            max_reply_bytes,
            limits: ConnectionLimits::default(),
        }))
    }

    /// Sets the prefix of the client's keys.
    pub fn set_prefix(&mut self, prefix: &str) {
        prefix.clone_into(&mut self.prefix);
    }

    pub fn set_credentials(&mut self, callback: CredentialsCallback) {
        self.credentials = Some(callback);
    }

    pub fn set_limits(&mut self, limits: ConnectionLimits) {
        self.limits = limits;
    }

    #[cfg(feature = "tls")]
    pub fn set_tls(&mut self, settings: Option<TlsConfig>) {
        self.tls = settings;
    }

    /// Returns an error if the address contradicts the settings, for example if both have a login.
    pub fn check(&self) -> Result<(), Error> {
        self.seeds
            .iter()
            .try_for_each(|seed| self.endpoint(seed).map(drop))
    }

    /// Returns an error unless a node of the URL replies as a node of a Cluster, and the client can connect to one of
    /// the masters in its slot map. The first check may take as long as [`ask_in_turn`](query::ask_in_turn), the second
    /// `connect_timeout`.
    pub fn check_reachable(&self) -> Result<(), Error> {
        let (sender, ranges) = query::ask_in_turn(
            &self.seeds,
            self.timeouts(),
            &Clock::default(),
            |seed, time| {
                let ranges = query::ask(&self.endpoint(seed)?, seed, time, self.command_timeout)?;
                Ok((seed.clone(), ranges))
            },
        )?;
        self.check_masters(&sender, &ranges)
    }

    /// Returns an error unless the client can connect to one of the first [`MOST_CHECKED`] masters in the slot map of
    /// `sender`, within `connect_timeout`. Does not connect if `sender`, which has replied, is a master itself.
    fn check_masters(&self, sender: &HostPort, ranges: &[SlotRange]) -> Result<(), Error> {
        let mut masters: Vec<&HostPort> = Vec::new();
        for SlotRange { master, .. } in ranges {
            if !masters.contains(&master) && masters.len() < MAX_MASTERS {
                masters.push(master);
            }
        }
        let [first, others @ ..] = &masters[..] else {
            return Ok(());
        };
        if masters.contains(&sender) {
            return Ok(());
        }
        let connect = |master: &HostPort, time: Duration| {
            let announced_by = Arc::new(OnceLock::from(sender.clone()));
            let endpoint = self.announced_endpoint(master, announced_by)?;
            endpoint.open_within(time).map(drop)
        };
        // Usually the first master replies soon. If it does not, the others have half of the time.
        let deadline = MonotonicTime::now().after(self.connect_timeout);
        let time = match others {
            [] => self.connect_timeout,
            _ => self.connect_timeout / 2,
        };
        let Err(error) = connect(first, time) else {
            return Ok(());
        };
        let left = deadline.since(MonotonicTime::now());
        let others = &others[..others.len().min(MOST_CHECKED - 1)];
        let mut is_reached = false;
        call_each(
            others,
            |master| connect(master, left).is_ok(),
            |results| {
                is_reached = results.iter().any(|(_, is_reached)| is_reached);
            },
        );
        if is_reached {
            return Ok(());
        }
        let message = format!(
            "no master of the Cluster ({} in all) can be connected to: {}",
            masters.len(),
            error.message()
        );
        Err(Error::new(error.kind(), message).with_source_of(&error))
    }

    /// `connect_timeout` and `command_timeout`.
    pub fn timeouts(&self) -> (Duration, Duration) {
        (self.connect_timeout, self.command_timeout)
    }

    pub fn seeds(&self) -> &[HostPort] {
        &self.seeds
    }

    /// The endpoint of one node.
    pub fn endpoint(&self, node: &HostPort) -> Result<Endpoint, Error> {
        let has_tls = matches!(self.info.addr(), ConnectionAddr::TcpTls { .. });
        let info = self.info.clone().set_addr(node.to_addr(has_tls));
        let (timeout, max_reply) = (self.connect_timeout, self.max_reply_bytes);
        let mut endpoint = Endpoint::from_info(info, timeout, max_reply)?;
        endpoint.is_in_cluster = true;
        endpoint.limits = self.limits;
        endpoint.dialer.set_prefix(&self.prefix);
        if let Some(callback) = &self.credentials {
            endpoint.set_credentials(callback.clone())?;
        }
        #[cfg(feature = "tls")]
        endpoint.set_up_tls(self.tls.as_ref())?;
        Ok(endpoint)
    }

    /// The endpoint of a node that other nodes have announced. `announced_by` holds the node that announced it first.
    /// The announced host may be invalid.
    pub fn announced_endpoint(
        &self,
        node: &HostPort,
        announced_by: Arc<OnceLock<HostPort>>,
    ) -> Result<Endpoint, Error> {
        let mut endpoint = self.endpoint(node).map_err(|error| match error.kind() {
            ErrorKind::InvalidConfig => {
                let message = format!(
                    "{node}: the Cluster announces a node with this host, which is invalid; check \
                     `cluster-announce-ip` and `cluster-announce-hostname` of that node"
                );
                Error::new(ErrorKind::Unavailable, message)
            }
            _ => error,
        })?;
        if !self.seeds.contains(node) {
            endpoint.announced_by = announced_by;
        }
        Ok(endpoint)
    }

    /// The addresses of the URL's nodes for messages.
    pub fn text(&self) -> String {
        let seeds: Vec<String> = self.seeds.iter().map(HostPort::to_string).collect();
        seeds.join(",")
    }
}

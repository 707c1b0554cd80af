//! The addresses of servers: of one server, of one node of a quorum, and of a memory store.

use std::sync::Arc;
use std::time::Duration;

use redis::ConnectionInfo;

use crate::config::credentials::{Credentials, CredentialsCallback};
#[cfg(feature = "tls")]
use crate::config::tls::TlsConfig;
use crate::memory::MemoryServer;
use crate::report::error::Error;
use crate::wire::connect::url::{redacted, redacted_info};
use crate::wire::endpoint::Endpoint;

/// The address of a Redis server, for [`Client::open`](crate::Client::open) and
/// [`Client::builder`](crate::Client::builder). Made from a URL, from a [`redis::ConnectionInfo`], or from a
/// [`redis::Client`], whose address and login this client uses.
///
/// URLs are checked more strictly than in redis-rs: unknown options are refused. A host with a `%`, `@` or `/` is
/// refused with `InvalidConfig`: such a host is a part of a password that was not percent-encoded. The client uses the
/// address, user, password, database and protocol of a `ConnectionInfo`, and ignores its TCP settings and library name.
/// TLS needs the feature `tls`, and certificates come from `Builder::tls` only. `Debug` shows neither user nor
/// password.
///
/// ```
/// # let server = leasehold_testbed::Server::start().unwrap();
/// # let url = server.url();
/// use leasehold::Client;
/// use leasehold::redis::{self, IntoConnectionInfo};
///
/// let redis = redis::Client::open(url.as_str())?;
/// let client = Client::open(&redis)?;
/// assert_eq!(client.with_lock("k", || 1)?, 1);
///
/// // The parts of a login in a `ConnectionInfo` need no percent-encoding:
/// let info = url.as_str().into_connection_info()?;
/// let settings = info.redis_settings().clone().set_db(1);
/// let client = Client::builder(info.set_redis_settings(settings)).prefix("billing:").build()?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone)]
pub struct ServerAddress(pub(crate) Address);

#[derive(Clone)]
pub enum Address {
    Url(String),
    Info(Box<ConnectionInfo>),
    Memory(Arc<MemoryServer>),
    Quorum(Vec<QuorumNode>),
    MemoryQuorum(Vec<Arc<MemoryServer>>),
}

impl From<&str> for ServerAddress {
    fn from(url: &str) -> Self {
        Self(Address::Url(url.to_owned()))
    }
}

impl From<&String> for ServerAddress {
    fn from(url: &String) -> Self {
        Self(Address::Url(url.clone()))
    }
}

impl From<String> for ServerAddress {
    fn from(url: String) -> Self {
        Self(Address::Url(url))
    }
}

impl From<ConnectionInfo> for ServerAddress {
    fn from(info: ConnectionInfo) -> Self {
        Self(Address::Info(Box::new(info)))
    }
}

impl From<&redis::Client> for ServerAddress {
    fn from(client: &redis::Client) -> Self {
        client.get_connection_info().clone().into()
    }
}

impl From<redis::Client> for ServerAddress {
    fn from(client: redis::Client) -> Self {
        Self::from(&client)
    }
}

impl std::fmt::Debug for ServerAddress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("ServerAddress")
            .field(&self.0.redacted())
            .finish()
    }
}

impl Address {
    /// The address without user, password and options.
    pub fn redacted(&self) -> String {
        match self {
            Self::Url(url) => redacted(url),
            Self::Info(info) => redacted_info(info),
            Self::Memory(_) | Self::MemoryQuorum(_) => "memory://".to_owned(),
            Self::Quorum(nodes) => {
                let addresses = nodes.iter().map(|node| node.address.0.redacted());
                addresses.collect::<Vec<String>>().join(", ")
            }
        }
    }

    /// The endpoint of one node of a quorum.
    pub fn endpoint_of_node(
        self,
        connect_timeout: Duration,
        max_reply_bytes: usize,
    ) -> Result<Endpoint, Error> {
        let scheme = match &self {
            Self::Url(url) => url.split("://").next().unwrap_or_default(),
            Self::Info(_) => "",
            Self::Memory(_) | Self::MemoryQuorum(_) | Self::Quorum(_) => "memory",
        };
        let is_group = scheme.ends_with("+sentinel") || scheme.ends_with("+cluster");
        let is_server = !is_group && !scheme.eq_ignore_ascii_case("memory");
        let given = match self.redacted() {
            address if address.contains("://") => address,
            address => format!("{scheme}://{address}"),
        };
        match self {
            Self::Url(url) if is_server => Endpoint::new(&url, connect_timeout, max_reply_bytes),
            Self::Info(info) => Endpoint::from_info(*info, connect_timeout, max_reply_bytes),
            _ => {
                let wanted = "addresses of single servers (redis:// or rediss://)";
                Err(Error::invalid("the nodes", wanted, given))
            }
        }
    }
}

/// One server of a [quorum](crate::Client::quorum): its address, and the login and TLS that only this server uses. Made
/// from anything that a [`ServerAddress`] is made from. `Debug` shows neither user nor password.
///
/// ```
/// use leasehold::{Client, Credentials, QuorumNode};
///
/// # fn token() -> std::io::Result<String> { Ok("t0ken".to_owned()) }
/// let client = Client::quorum_builder([
///     QuorumNode::new("redis://10.0.0.7").credentials(|| Ok(Credentials::password(token()?))),
///     QuorumNode::new("redis://billing:s3cret@10.0.1.7"),
///     QuorumNode::from("redis://10.0.2.7:6380"),
/// ])
/// .build_lazy()?;
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Clone)]
#[must_use = "a node does nothing until a client is made of it"]
pub struct QuorumNode {
    pub(crate) address: ServerAddress,
    pub(crate) credentials: Option<CredentialsCallback>,
    #[cfg(feature = "tls")]
    pub(crate) tls: Option<TlsConfig>,
}

/// The example of [`QuorumNode`] uses every function but `tls`.
impl QuorumNode {
    /// The server at this address.
    pub fn new(address: impl Into<ServerAddress>) -> Self {
        Self {
            address: address.into(),
            credentials: None,
            #[cfg(feature = "tls")]
            tls: None,
        }
    }

    /// Calls `callback` for the login of each new connection to this server, in place of
    /// [`Builder::credentials`](crate::Builder::credentials), which has the details.
    pub fn credentials<F>(mut self, callback: F) -> Self
    where
        F: Fn() -> Result<Credentials, Box<dyn std::error::Error + Send + Sync>>
            + Send
            + Sync
            + 'static,
    {
        self.credentials = Some(CredentialsCallback::new(callback));
        self
    }

    /// Sets how connections to this server, at a `rediss://` address, use TLS, in place of
    /// [`Builder::tls`](crate::Builder::tls).
    ///
    /// ```no_run
    /// use leasehold::{QuorumNode, TlsConfig};
    ///
    /// # fn node() -> std::io::Result<QuorumNode> {
    /// let tls = TlsConfig::new().ca_pem(std::fs::read("ca.pem")?);
    /// # Ok(
    /// QuorumNode::new("rediss://10.0.0.7").tls(tls)
    /// # )
    /// # }
    /// ```
    #[cfg(feature = "tls")]
    pub fn tls(mut self, tls: TlsConfig) -> Self {
        self.tls = Some(tls);
        self
    }
}

impl<A: Into<ServerAddress>> From<A> for QuorumNode {
    fn from(address: A) -> Self {
        Self::new(address)
    }
}

impl std::fmt::Debug for QuorumNode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("QuorumNode").field(&self.address).finish()
    }
}

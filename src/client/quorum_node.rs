//! `QuorumNode`: one server of a quorum, with its own login and TLS.

use crate::client::builder::ServerAddress;
use crate::config::credentials::{Credentials, CredentialsCallback};
#[cfg(feature = "tls")]
use crate::config::tls::TlsConfig;

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

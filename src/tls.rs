//! The settings of TLS: which authorities are trusted, the client's own certificate, the server's name.

use std::fmt;

/// The settings of TLS connections, for [`Builder::tls`](crate::Builder::tls). Without them, a `rediss://` URL trusts the
/// authorities that the system trusts, and the server's certificate must be for the host of the URL.
///
/// TLS 1.2 and 1.3, by rustls. Certificates are always checked: no setting switches that off. `Debug` shows neither
/// certificates nor the key.
///
/// ```
/// use leasehold::{Client, TlsConfig};
///
/// # fn open(ca: Vec<u8>, certificate: Vec<u8>, key: Vec<u8>) -> Result<Client, leasehold::Error> {
/// // Each is the content of a PEM file, from `std::fs::read`.
/// let tls = TlsConfig::new()
///     .ca_pem(ca)
///     .client_certificate_pem(certificate, key)
///     .server_name("redis.internal"); // the certificate's name, where the URL has an address
/// Client::builder("rediss://10.0.0.7:6380").tls(tls).build()
/// # }
/// # let error = open(Vec::new(), Vec::new(), Vec::new()).unwrap_err();
/// # assert_eq!(error.kind(), leasehold::ErrorKind::InvalidConfig);
/// ```
#[derive(Clone, Default)]
#[must_use = "it does nothing until it is given to `Builder::tls`"]
pub struct TlsConfig {
    pub(crate) ca: Option<Vec<u8>>,
    pub(crate) client: Option<ClientCertificate>,
    pub(crate) server_name: Option<String>,
}

/// A certificate with those of its issuers, and its private key, both as PEM.
#[derive(Clone)]
pub(crate) struct ClientCertificate {
    pub(crate) chain: Vec<u8>,
    pub(crate) key: Vec<u8>,
}

/// Every method can be seen in use in the example of [`TlsConfig`].
impl TlsConfig {
    /// The settings of a client without any: the system's authorities, no client certificate, the host of the URL.
    pub fn new() -> Self {
        Self::default()
    }

    /// Trusts these authorities, and no longer those of the system: one or more certificates as PEM.
    pub fn ca_pem(mut self, certificates: impl Into<Vec<u8>>) -> Self {
        self.ca = Some(certificates.into());
        self
    }

    /// The client's certificate, for a server that asks for one (`tls-auth-clients`): its chain, the client's own
    /// certificate first, and its private key, both as PEM. The key may be PKCS#8, PKCS#1 or SEC1.
    pub fn client_certificate_pem(
        mut self,
        chain: impl Into<Vec<u8>>,
        key: impl Into<Vec<u8>>,
    ) -> Self {
        let (chain, key) = (chain.into(), key.into());
        self.client = Some(ClientCertificate { chain, key });
        self
    }

    /// The name that the server's certificate must be for, which is also sent to the server (SNI): a DNS name or an IP
    /// address. Defaults to the host of the URL. For servers behind an address or a proxy.
    pub fn server_name(mut self, name: impl Into<String>) -> Self {
        self.server_name = Some(name.into());
        self
    }
}

impl fmt::Debug for TlsConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TlsConfig")
            .field("ca_pem", &self.ca.is_some())
            .field("client_certificate_pem", &self.client.is_some())
            .field("server_name", &self.server_name)
            .finish()
    }
}

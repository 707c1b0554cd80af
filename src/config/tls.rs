//! `TlsConfig`: the trusted authorities, the client's certificate, and the server's name.

use std::fmt;

/// The settings of TLS connections, for [`Builder::tls`](crate::Builder::tls). Without them, a `rediss://` URL trusts
/// the authorities that the system trusts, and the server's certificate must be for the host of the URL.
///
/// Connections use TLS 1.2 or 1.3, by rustls. The server's certificate is always checked: a setting cannot switch the
/// check off. `Debug` shows neither certificates nor the key.
///
/// ```
/// use leasehold::{Client, TlsConfig};
///
/// # fn open(ca: Vec<u8>, certificate: Vec<u8>, key: Vec<u8>) -> Result<Client, leasehold::Error> {
/// // `ca`, `certificate` and `key` are contents of PEM files, from `std::fs::read`.
/// let tls = TlsConfig::new()
///     .ca_pem(ca)
///     .client_certificate_pem(certificate, key)
///     .server_name("redis.internal"); // the name in the certificate, since the URL has an IP address
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

/// The client's certificate, followed by the certificates of its issuers, and its private key. Both are PEM.
#[derive(Clone)]
pub(crate) struct ClientCertificate {
    pub(crate) chain: Vec<u8>,
    pub(crate) key: Vec<u8>,
}

/// The example of [`TlsConfig`] uses every method.
impl TlsConfig {
    /// The default settings: the authorities of the system, no client certificate, and the host of the URL as the
    /// server's name.
    pub fn new() -> Self {
        Self::default()
    }

    /// Trusts these authorities instead of those of the system: one or more certificates as PEM.
    pub fn ca_pem(mut self, certificates: impl Into<Vec<u8>>) -> Self {
        self.ca = Some(certificates.into());
        self
    }

    /// The client's certificate, for a server that requests one (`tls-auth-clients`). `chain` begins with the client's
    /// own certificate, followed by those of its issuers. `key` is its private key (PKCS#8, PKCS#1 or SEC1). Both are
    /// PEM.
    pub fn client_certificate_pem(
        mut self,
        chain: impl Into<Vec<u8>>,
        key: impl Into<Vec<u8>>,
    ) -> Self {
        let (chain, key) = (chain.into(), key.into());
        self.client = Some(ClientCertificate { chain, key });
        self
    }

    /// The name in the server's certificate, a DNS name or an IP address. Defaults to the host of the URL. Set it if
    /// the URL has an IP address or the host of a proxy. A DNS name is also sent to the server (SNI).
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

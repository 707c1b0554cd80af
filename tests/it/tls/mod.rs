//! Connections with TLS (feature `tls`). With it, the conformance suite of a Cluster and that of a server under a
//! sentinel run over TLS, too.

mod certificates;
mod faults;
mod sni;
mod traffic;
pub mod trust;

use leasehold::{Builder, Client, TlsConfig};
use leasehold_testbed::{Cluster, Proxy, Server, TlsFiles};

use crate::steady::steady;
use crate::support::builder;

use certificates::{Authority, Validity};

/// The files of servers for `name`, and the authority that clients must trust.
pub fn certificates_for(name: &str) -> (TlsFiles, String) {
    let authority = Authority::new();
    let certificate = authority.of_server(name, Validity::Now);
    (authority.files(certificate, false), authority.pem)
}

/// A server with TLS, and the authority that has issued its certificate for 127.0.0.1.
pub struct TlsServer {
    pub server: Server,
    authority: Authority,
}

impl TlsServer {
    pub fn start() -> Self {
        Self::start_with("127.0.0.1", Validity::Now, false)
    }

    /// A server with a certificate for `name`.
    fn start_with(name: &str, validity: Validity, requires_client_certificates: bool) -> Self {
        let authority = Authority::new();
        let certificate = authority.of_server(name, validity);
        let files = authority.files(certificate, requires_client_certificates);
        let server = Server::builder().tls(files).start().unwrap();
        Self { server, authority }
    }

    pub fn url(&self) -> String {
        self.server.tls_url().expect("the server has TLS")
    }

    /// The certificate of the server's authority.
    pub fn authority(&self) -> &str {
        &self.authority.pem
    }

    /// Settings that trust the server's authority.
    pub fn trusted(&self) -> TlsConfig {
        TlsConfig::new().ca_pem(self.authority.pem.as_str())
    }

    /// As `support::builder`, for this server.
    fn builder(&self) -> Builder {
        builder(&self.url()).tls(self.trusted())
    }

    /// As `steady::steady`, for this server.
    pub fn steady(&self) -> Builder {
        steady(&self.url()).tls(self.trusted())
    }

    fn client(&self) -> Client {
        self.steady().build().unwrap()
    }

    /// A proxy in front of the server's TLS port, and the URL of the proxy.
    pub fn proxy(&self) -> (Proxy, String) {
        let proxy = Proxy::start(self.server.tls_port()).unwrap();
        let url = format!("rediss://127.0.0.1:{}", proxy.port());
        (proxy, url)
    }
}

/// A Cluster of three masters with TLS, and the authority that has issued their certificate.
pub struct TlsCluster {
    pub cluster: Cluster,
    authority: Authority,
}

impl TlsCluster {
    pub fn start() -> Self {
        Self::start_with(false)
    }

    /// A Cluster whose nodes share a certificate of a new authority.
    pub fn start_with(requires_client_certificates: bool) -> Self {
        let authority = Authority::new();
        let certificate = authority.of_server("127.0.0.1", Validity::Now);
        let files = authority.files(certificate, requires_client_certificates);
        let cluster = Cluster::builder().without_replicas().tls(files);
        let cluster = cluster.start().unwrap();
        Self { cluster, authority }
    }

    /// As `steady::steady`, for this Cluster.
    pub fn steady(&self) -> Builder {
        steady(&self.cluster.url()).tls(self.trusted())
    }

    /// As `steady`, with a certificate of the client.
    pub fn steady_with_certificate(&self) -> Builder {
        let own = self.authority.of_client();
        let tls = self
            .trusted()
            .client_certificate_pem(own.chain.as_str(), own.key.as_str());
        steady(&self.cluster.url()).tls(tls)
    }

    fn trusted(&self) -> TlsConfig {
        TlsConfig::new().ca_pem(self.authority.pem.as_str())
    }
}

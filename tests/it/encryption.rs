//! TLS in tests that are not about TLS. They run with it if leasehold has the feature, and without it otherwise.

use leasehold::Builder;
use leasehold_testbed::{ClusterBuilder, SentinelGroupBuilder, TlsFiles};

/// The files of servers, and the authority that their clients trust. Empty without the feature.
#[derive(Clone)]
pub struct Encryption(Option<(TlsFiles, String)>);

impl Encryption {
    #[cfg(feature = "tls")]
    pub fn new() -> Self {
        Self(Some(crate::tls::certificates_for("127.0.0.1")))
    }

    #[cfg(not(feature = "tls"))]
    pub fn new() -> Self {
        Self(None)
    }

    pub fn cluster(&self, cluster: ClusterBuilder) -> ClusterBuilder {
        match &self.0 {
            Some((files, _)) => cluster.tls(files.clone()),
            None => cluster,
        }
    }

    pub fn sentinel_group(&self, group: SentinelGroupBuilder) -> SentinelGroupBuilder {
        match &self.0 {
            Some((files, _)) => group.tls(files.clone()),
            None => group,
        }
    }

    pub fn client(&self, client: Builder) -> Builder {
        #[cfg(feature = "tls")]
        if let Some((_, authority)) = &self.0 {
            return client.tls(leasehold::TlsConfig::new().ca_pem(authority.as_str()));
        }
        client
    }
}

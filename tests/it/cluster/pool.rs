//! Clusters that tests use one after another, since a Cluster takes seconds to start.

#[cfg(feature = "tls")]
use std::sync::OnceLock;
use std::sync::{Mutex, PoisonError};

#[cfg(feature = "tls")]
use leasehold_testbed::TlsFiles;
use leasehold_testbed::{Cluster, ClusterBuilder};

use crate::support::{SOON, ask};

/// The Clusters that no test uses.
type Idle = Mutex<Vec<Cluster>>;

static PLAIN: Idle = Mutex::new(Vec::new());
#[cfg(feature = "tls")]
static WITH_TLS: Idle = Mutex::new(Vec::new());

/// No node is stopped, so none has to be replaced while the machine stands still for less than this time-out.
fn builder() -> ClusterBuilder {
    Cluster::builder().node_timeout(SOON)
}

/// A Cluster that is empty. The test may neither stop nodes nor move slots.
pub struct PooledCluster {
    cluster: Option<Cluster>,
    pool: &'static Idle,
}

impl PooledCluster {
    pub fn take() -> Self {
        Self::take_from(&PLAIN, || builder().start())
    }

    /// A Cluster with TLS, and the authority that has issued the certificate of its nodes.
    #[cfg(feature = "tls")]
    pub fn take_with_tls() -> (Self, String) {
        static CERTIFICATES: OnceLock<(TlsFiles, String)> = OnceLock::new();
        let (files, authority) =
            CERTIFICATES.get_or_init(|| crate::tls::certificates_for("127.0.0.1"));
        let start = || builder().tls(files.clone()).start();
        (Self::take_from(&WITH_TLS, start), authority.clone())
    }

    fn take_from(
        pool: &'static Idle,
        start: impl FnOnce() -> Result<Cluster, leasehold_testbed::Error>,
    ) -> Self {
        let idle = pool.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let cluster = Self {
            cluster: Some(idle.unwrap_or_else(|| start().unwrap())),
            pool,
        };
        cluster.flush();
        cluster
    }

    pub fn get(&self) -> &Cluster {
        self.cluster
            .as_ref()
            .expect("it is taken out by the drop only")
    }

    /// Deletes all keys.
    pub fn flush(&self) {
        for master in &self.get().nodes()[..3] {
            ask(master, &["FLUSHALL"]);
        }
    }
}

impl Drop for PooledCluster {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            self.pool
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .extend(self.cluster.take());
        }
    }
}

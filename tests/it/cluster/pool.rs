//! Clusters that tests use one after another, since a Cluster takes seconds to start.

use std::sync::{Mutex, OnceLock, PoisonError};

use leasehold_testbed::{Cluster, ClusterBuilder};

use super::Login;

use crate::support::{SOON, ask};

/// The Clusters that no test uses.
type Idle = Mutex<Vec<Cluster>>;

static PLAIN: Idle = Mutex::new(Vec::new());
static WITH_LOGIN: Idle = Mutex::new(Vec::new());

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

    /// A Cluster, and the login of its clients. [`Login::prepare`] has yet to make the user.
    pub fn take_with_login() -> (Self, Login) {
        static LOGIN: OnceLock<Login> = OnceLock::new();
        let login = LOGIN.get_or_init(Login::new);
        let cluster = Self::take_from(&WITH_LOGIN, || login.cluster(builder()).start());
        (cluster, login.clone())
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

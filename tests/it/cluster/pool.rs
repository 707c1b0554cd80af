//! Clusters that tests use one after another, since a Cluster takes seconds to start.

use std::sync::{Mutex, PoisonError};

use leasehold_testbed::Cluster;

use crate::support::ask;

static IDLE: Mutex<Vec<Cluster>> = Mutex::new(Vec::new());

/// A Cluster that is empty. The test may neither stop nodes nor move slots.
pub struct PooledCluster(Option<Cluster>);

impl PooledCluster {
    pub fn take() -> Self {
        let idle = IDLE.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let cluster = Self(Some(idle.unwrap_or_else(|| Cluster::start().unwrap())));
        cluster.flush();
        cluster
    }

    pub fn get(&self) -> &Cluster {
        self.0.as_ref().expect("it is taken out by the drop only")
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
            IDLE.lock()
                .unwrap_or_else(PoisonError::into_inner)
                .extend(self.0.take());
        }
    }
}

//! The thread that runs the maintenance of one node, for stores of several servers.

use std::sync::Weak;
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::store::{MAINTENANCE_DELAY, Store, Urgency};
use crate::util::clock::MonotonicTime;

/// Requests for the maintenance of one node. They wake the thread that runs it.
#[derive(Default)]
pub struct MaintenanceRequests {
    state: Mutex<RequestState>,
    changed: Condvar,
}

#[derive(Default)]
struct RequestState {
    requested: Option<Urgency>,
    is_stopped: bool,
}

impl MaintenanceRequests {
    /// Requests the maintenance of the node. Does not block.
    pub fn request(&self, urgency: Urgency) {
        let mut state = self.state.lock();
        // Nearly every dropped guard calls this method, so only the first request wakes the thread.
        let is_sooner = match state.requested {
            None => true,
            Some(before) => before == Urgency::Soon && urgency == Urgency::Now,
        };
        if is_sooner {
            state.requested = Some(urgency);
            self.changed.notify_one();
        }
    }

    pub fn stop(&self) {
        self.state.lock().is_stopped = true;
        self.changed.notify_one();
    }

    /// Runs the maintenance of `node` at each request, until `stop` is called or the node is dropped.
    pub fn run<N: Store + ?Sized>(&self, node: &Weak<N>) {
        while self.wait() {
            let Some(node) = node.upgrade() else {
                return;
            };
            if node.run_maintenance() {
                self.request(Urgency::Soon);
            }
        }
    }

    /// Waits until maintenance is due. Returns false after `stop`.
    fn wait(&self) -> bool {
        let mut state = self.state.lock();
        let mut due = None;
        loop {
            if state.is_stopped {
                return false;
            }
            let left = match state.requested {
                None => {
                    self.changed.wait(&mut state);
                    continue;
                }
                Some(Urgency::Now) => Duration::ZERO,
                Some(Urgency::Soon) => {
                    let now = MonotonicTime::now();
                    due.get_or_insert(now.after(MAINTENANCE_DELAY)).since(now)
                }
            };
            if left.is_zero() {
                state.requested = None;
                return true;
            }
            self.changed.wait_for(&mut state, left);
        }
    }
}

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests {
    use super::*;

    #[test]
    fn an_urgent_request_ends_the_delay() {
        let requests = MaintenanceRequests::default();
        requests.request(Urgency::Now);
        requests.request(Urgency::Soon);
        let begun = MonotonicTime::now();
        assert!(requests.wait());
        // One maintenance serves both requests.
        assert_eq!(requests.state.lock().requested, None);
        requests.request(Urgency::Soon);
        assert!(requests.wait());
        assert!(MonotonicTime::now().since(begun) >= MAINTENANCE_DELAY);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| requests.wait());
            requests.request(Urgency::Soon);
            requests.request(Urgency::Now);
            assert!(waiting.join().unwrap());
        });
        requests.stop();
        assert!(!requests.wait());
    }
}

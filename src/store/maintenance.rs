//! The thread that runs the maintenance of one node, for stores of several servers.

use std::sync::Weak;

use crate::store::{MAINTENANCE_DELAY, Store, Urgency};
use crate::util::clock::MonotonicTime;
use crate::util::mailbox::{Mailbox, Step};

/// When a store's maintenance is due, if it was requested.
#[derive(Default)]
pub struct MaintenanceDue(Option<MonotonicTime>);

impl MaintenanceDue {
    /// Requests maintenance. Returns true if it is now due earlier than before. Nearly every drop of a guard calls
    /// this, so only the first call reads the clock.
    pub fn request(&mut self, urgency: Urgency) -> bool {
        const NOW: MonotonicTime = MonotonicTime::at_tick(0);
        let due = match (urgency, self.0) {
            (Urgency::Soon, Some(_)) => return false,
            (Urgency::Soon, None) => MonotonicTime::now().after(MAINTENANCE_DELAY),
            (Urgency::Now, _) => NOW,
        };
        self.0.replace(due).is_none_or(|before| due < before)
    }

    /// Ends the request if the maintenance is due now.
    pub fn take(&mut self) -> bool {
        self.0.take_if(|due| *due <= MonotonicTime::now()).is_some()
    }

    pub fn at(&self) -> Option<MonotonicTime> {
        self.0
    }
}

/// Requests for the maintenance of one node. They wake the thread that runs it.
#[derive(Default)]
pub struct MaintenanceRequests(Mailbox<MaintenanceDue>);

impl MaintenanceRequests {
    /// Requests the maintenance of the node. Does not block.
    pub fn request(&self, urgency: Urgency) {
        self.0.post(|due| due.request(urgency));
    }

    pub fn stop(&self) {
        self.0.stop(|_| ());
    }

    /// Runs the maintenance of `node` at each request, until `stop` is called or the node is dropped.
    pub fn run<N: Store + ?Sized>(&self, node: &Weak<N>) {
        while self.wait().is_some() {
            let Some(node) = node.upgrade() else {
                return;
            };
            if node.run_maintenance() {
                self.request(Urgency::Soon);
            }
        }
    }

    /// Waits until maintenance is due. Returns `None` after `stop`.
    fn wait(&self) -> Option<()> {
        self.0.wait(|due| match due.take() {
            true => Step::Return(()),
            false => Step::Sleep(due.at()),
        })
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
        assert!(requests.wait().is_some());
        // One maintenance serves both requests.
        assert_eq!(requests.0.change(|due| due.at()), Some(None));
        requests.request(Urgency::Soon);
        assert!(requests.wait().is_some());
        assert!(MonotonicTime::now().since(begun) >= MAINTENANCE_DELAY);
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| requests.wait());
            requests.request(Urgency::Soon);
            requests.request(Urgency::Now);
            assert!(waiting.join().unwrap().is_some());
        });
        requests.stop();
        assert!(requests.wait().is_none());
    }
}

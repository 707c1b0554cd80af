//! A store for tests of the modules above the store. It gives the replies that a test sets, and records the requests.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use crate::command::{Acquire, Command, QueueMode, Release, Reply, Request};
use crate::config::key::Key;
use crate::process::threads::ThreadGroup;
use crate::report::error::Error;
use crate::store::{
    Completion, Listener, Notifications, RenewalLimits, ServerId, Store, TrackedKey,
};
use crate::util::id::LeaseId;
use crate::util::sync::Mutex;

type Answer = Box<dyn FnOnce(&Request) -> Result<Reply, Error> + Send>;

/// Gives its replies one after another. A request without a reply panics.
#[derive(Default)]
pub struct Scripted {
    answers: Mutex<VecDeque<Answer>>,
    /// The number of requests of each `execute`.
    pub at_a_time: Mutex<Vec<usize>>,
    /// The queue mode of each acquire.
    pub asked: Mutex<Vec<QueueMode>>,
    pub released: Mutex<Vec<LeaseId>>,
    /// The number of releases that may grant their key to another client's waiter.
    pub passed_on: AtomicUsize,
    pub tracked: AtomicUsize,
    pub notification_epoch: AtomicU64,
    /// The result of `Notifications::queue_mode`; `Notified` if this is `None`.
    pub queue_mode: Mutex<Option<QueueMode>>,
    /// The result of `Notifications::must_confirm_losses`.
    pub must_confirm_losses: AtomicBool,
    /// The result of `Store::renewals_set_keys`.
    pub renewals_set_keys: AtomicBool,
    /// The result of `Notifications::free_servers`.
    pub free_servers: Option<usize>,
    /// The only server that stores keys, for `Notifications::is_at`; all servers do if this is `None`.
    pub stored_by: Option<ServerId>,
    /// Called by `Notifications::track`, with the result.
    pub on_track: Mutex<Option<Box<dyn FnMut() -> bool + Send>>>,
    /// How often `Store::suspect_connections` was called.
    pub suspected: AtomicUsize,
    /// Whether a request has keys of one slot only: see `Store::renewal_limits`.
    pub by_slot: AtomicBool,
    /// Called by `Notifications::request`.
    pub on_request: Mutex<Option<Box<dyn Fn() + Send>>>,
}

impl Scripted {
    /// Adds the reply to the next request.
    pub fn answer(&self, answer: impl FnOnce(&Request) -> Result<Reply, Error> + Send + 'static) {
        self.answers.lock().push_back(Box::new(answer));
    }

    /// Whether requests have taken all replies.
    pub fn answers_taken(&self) -> bool {
        self.answers.lock().is_empty()
    }

    /// Removes the next reply that was set and not used. Returns false if there is none.
    pub fn unasked(&self) -> bool {
        self.answers.lock().pop_front().is_some()
    }
}

impl Store for Scripted {
    fn ping(&self) -> Result<Duration, Error> {
        Ok(Duration::ZERO)
    }

    fn execute(&self, requests: &mut [Request]) {
        self.at_a_time.lock().push(requests.len());
        for request in requests {
            if let Command::Acquire(Acquire {
                lease, queue_mode, ..
            }) = &request.command
            {
                let is_released = self.released.lock().contains(lease);
                assert!(
                    !is_released,
                    "an acquire with a released lease id: the release may come after the grant"
                );
                self.asked.lock().push(*queue_mode);
            }
            let answer = self.answers.lock().pop_front();
            let answer = answer.expect("the test gave a reply for each request");
            request.outcome = Some(answer(request));
        }
    }

    fn submit(&self, _: Vec<(Command, Completion)>) {
        unreachable!("no test of the modules above submits");
    }

    fn send_release(&self, release: Release) {
        let is_passed_on = release.key_for_next_waiter().is_some();
        self.released.lock().push(release.lease);
        self.passed_on
            .fetch_add(usize::from(is_passed_on), Ordering::SeqCst);
    }

    fn renewal_limits(&self) -> RenewalLimits {
        RenewalLimits {
            by_slot: self.by_slot.load(Ordering::SeqCst),
            ..RenewalLimits::USUAL
        }
    }

    fn renewals_set_keys(&self) -> bool {
        self.renewals_set_keys.load(Ordering::SeqCst)
    }

    fn suspect_connections(&self, _: &Key) {
        self.suspected.fetch_add(1, Ordering::SeqCst);
        // Waiters now poll, as with the real store until its next notification connection is open.
        *self.queue_mode.lock() = Some(QueueMode::Polling);
    }
}

impl Notifications for Scripted {
    fn start(&self, _: &ThreadGroup, _: Arc<dyn Listener>) -> Result<(), Error> {
        Ok(())
    }

    fn queue_mode(&self, _: &Key) -> QueueMode {
        self.queue_mode.lock().unwrap_or(QueueMode::Notified)
    }

    fn request(&self, _: &Key) {
        if let Some(on_request) = &*self.on_request.lock() {
            on_request();
        }
    }

    fn track(&self, _: Vec<TrackedKey>) -> bool {
        self.tracked.fetch_add(1, Ordering::SeqCst);
        self.on_track
            .lock()
            .as_mut()
            .is_some_and(|on_track| on_track())
    }

    fn free_servers(&self) -> Option<usize> {
        self.free_servers
    }

    fn epoch(&self, _: &Key) -> u64 {
        self.notification_epoch.load(Ordering::SeqCst)
    }

    fn is_at(&self, server: ServerId, _: &Key) -> bool {
        self.stored_by.is_none_or(|only| only == server)
    }

    fn must_confirm_losses(&self) -> bool {
        self.must_confirm_losses.load(Ordering::SeqCst)
    }

    fn stop(&self) {}
}

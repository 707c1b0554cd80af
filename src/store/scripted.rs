//! A store for tests of what stands above it: says what it is told to say, and notes what it is asked.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crate::error::Error;
use crate::store::{Command, Listener, QueueMode, Reply, Request, Store, TrackedKey};
use crate::util::id::LeaseId;
use crate::util::sync::Mutex;
use crate::util::threads::ThreadGroup;

type Answer = Box<dyn FnOnce(&Request) -> Result<Reply, Error> + Send>;

/// Gives its answers one after another; to be asked once more is a panic.
#[derive(Default)]
pub(crate) struct Scripted {
    answers: Mutex<VecDeque<Answer>>,
    /// How many came together.
    pub(crate) at_a_time: Mutex<Vec<usize>>,
    /// How each acquire was to join the queue.
    pub(crate) asked: Mutex<Vec<QueueMode>>,
    pub(crate) released: Mutex<Vec<LeaseId>>,
    /// Releases of what others may wait for in Redis.
    pub(crate) passed_on: AtomicUsize,
    pub(crate) tracked: AtomicUsize,
    pub(crate) notification_epoch: AtomicU64,
    /// How waiters are to join; `Told` if this is `None`.
    pub(crate) queue_mode: Mutex<Option<QueueMode>>,
    /// How often its connections were suspected.
    pub(crate) suspected: AtomicUsize,
    /// Called when notifications are wanted.
    pub(crate) when_wanted: Mutex<Option<Box<dyn Fn() + Send>>>,
}

impl Scripted {
    /// The answer to the next question.
    pub(crate) fn answer(
        &self,
        answer: impl FnOnce(&Request) -> Result<Reply, Error> + Send + 'static,
    ) {
        self.answers.lock().push_back(Box::new(answer));
    }

    /// Takes back an answer that nobody has asked for. False if there is none.
    pub(crate) fn unasked(&self) -> bool {
        self.answers.lock().pop_front().is_some()
    }
}

impl Store for Scripted {
    fn execute(&self, requests: &mut [Request]) {
        self.at_a_time.lock().push(requests.len());
        for request in requests {
            if let Command::Acquire {
                lease, queue_mode, ..
            } = &request.command
            {
                let is_released = self.released.lock().contains(lease);
                assert!(!is_released, "its release may come after its grant");
                self.asked.lock().push(*queue_mode);
            }
            let answer = self.answers.lock().pop_front();
            let answer = answer.expect("nothing more was to be asked");
            request.outcome = Some(answer(request));
        }
    }

    fn post(&self, release: Command) {
        let passes_on = release.passes_on().is_some();
        if let Command::Release { lease, .. } = release {
            self.released.lock().push(lease);
            self.passed_on
                .fetch_add(usize::from(passes_on), Ordering::SeqCst);
        }
    }

    fn listen(&self, _: &ThreadGroup, _: Arc<dyn Listener>) -> Result<(), Error> {
        Ok(())
    }

    fn queue_mode(&self) -> QueueMode {
        self.queue_mode.lock().unwrap_or(QueueMode::Notified)
    }

    fn want_notifications(&self) {
        if let Some(when_wanted) = &*self.when_wanted.lock() {
            when_wanted();
        }
    }

    fn track(&self, _: Vec<TrackedKey>) -> bool {
        self.tracked.fetch_add(1, Ordering::SeqCst);
        false
    }

    fn notification_epoch(&self) -> u64 {
        self.notification_epoch.load(Ordering::SeqCst)
    }

    fn suspect_connections(&self) {
        self.suspected.fetch_add(1, Ordering::SeqCst);
        // As it is until there is another notification connection.
        *self.queue_mode.lock() = Some(QueueMode::Polling);
    }

    fn stop_listening(&self) {}
}

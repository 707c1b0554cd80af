//! The thread that runs user code nobody waits for: `on_lost` callbacks, events and what is observed.
//! Nothing of the library waits for it, and a panic in user code does not end it.
//!
//! Callbacks and losses wait here without a bound of their own: there is one callback for each `on_lost`, and one
//! loss for each held lock. Other events recur, so at most `MOST_EVENTS` of them wait.

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

use crossbeam_channel::{Receiver, Sender, unbounded};

use crate::error::Error;
use crate::event::{EventHandler, EventLock};
use crate::lease::Lease;
use crate::observe::{self, Observer};
use crate::util::key::Key;
use crate::util::threads::ThreadGroup;

type Callback = Box<dyn FnOnce() + Send>;

/// How many events may wait for the thread, each with some 200 bytes. [`EventHandler::events_missed`] documents the
/// number, too.
const MOST_EVENTS: usize = 65_536;

/// Hands queue to the callbacks's thread. Sending never blocks: what user code cannot keep up with
/// waits here.
pub(crate) struct CallbackExecutor {
    queue: Sender<Message>,
    backlog: Arc<Backlog>,
    events: Option<Arc<dyn EventHandler>>,
    set_loss_hook: OnceLock<LossHook>,
}

/// Called for each lease that is lost, once its signals are set. Quick; never user code.
type LossHook = Box<dyn Fn(&Lease) + Send + Sync>;

enum Message {
    Run(Callback),
    Event(Callback),
    Stop,
}

#[derive(Default)]
struct Backlog {
    /// Events that wait.
    waiting: AtomicUsize,
    /// Dropped events that have not been reported yet.
    missed: AtomicU64,
}

impl Backlog {
    /// Takes room for one event. If there is none, counts the event as missed and returns false.
    fn enter(&self) -> bool {
        let has_room = self.waiting.fetch_add(1, Ordering::AcqRel) < MOST_EVENTS;
        if !has_room {
            self.leave();
            self.missed.fetch_add(1, Ordering::AcqRel);
        }
        has_room
    }

    fn leave(&self) {
        self.waiting.fetch_sub(1, Ordering::AcqRel);
    }
}

impl CallbackExecutor {
    /// Starts the thread.
    pub(crate) fn start(
        threads: &ThreadGroup,
        events: Option<Arc<dyn EventHandler>>,
    ) -> Result<Arc<Self>, Error> {
        let (queue, inbox) = unbounded();
        let backlog = Arc::<Backlog>::default();
        let (waiting, listener) = (Arc::clone(&backlog), events.clone());
        threads.spawn("leasehold-callbacks", move || {
            deliver(&inbox, &waiting, listener.as_deref());
        })?;
        Ok(Arc::new(Self {
            queue,
            backlog,
            events,
            set_loss_hook: OnceLock::new(),
        }))
    }

    /// One without its thread: a model has its queue run by what this returns.
    #[cfg(all(test, shuttle))]
    pub(crate) fn of_a_model() -> (Arc<Self>, impl Fn()) {
        let (queue, inbox) = unbounded();
        let callbacks = Self {
            queue,
            backlog: Arc::default(),
            events: None,
            set_loss_hook: OnceLock::new(),
        };
        let deliver = move || {
            while let Ok(Message::Run(callback) | Message::Event(callback)) = inbox.try_recv() {
                callback();
            }
        };
        (Arc::new(callbacks), deliver)
    }

    pub(crate) fn run(&self, callback: impl FnOnce() + Send + 'static) {
        // Fails only after the client has ended, and its callbacks with it.
        let _ = self.queue.send(Message::Run(Box::new(callback)));
    }

    /// Who of this client is to know when a lease was lost; set once.
    pub(crate) fn set_loss_hook(&self, hook: impl Fn(&Lease) + Send + Sync + 'static) {
        let _ = self.set_loss_hook.set(Box::new(hook));
    }

    pub(super) fn lost(&self, lease: &Lease) {
        if let Some(hook) = self.set_loss_hook.get() {
            hook(lease);
        }
    }

    /// As [`run`](Self::run), for events, which recur: with [`MOST_EVENTS`] waiting it drops the event and counts it.
    fn queue_bounded(&self, event: impl FnOnce() + Send + 'static) {
        if self.backlog.enter() {
            let _ = self.queue.send(Message::Event(Box::new(event)));
        }
    }

    /// Tells of an event on the callbacks's thread; costs nothing when nobody listens.
    pub(crate) fn queue_event(&self, event: impl FnOnce(&dyn EventHandler) + Send + 'static) {
        if let Some(events) = &self.events {
            let events = Arc::clone(events);
            self.queue_bounded(move || event(&*events));
        }
    }

    /// Tells of what befell a lock, on the callbacks's thread: to who observes, and to who listens. Costs
    /// nothing when nobody does.
    pub(crate) fn queue_lock_event(
        &self,
        key: &Key,
        fencing_token: u64,
        event: impl Fn(&dyn EventHandler, EventLock<'_>) + Send + 'static,
    ) {
        if let Some(report) = self.report(key, fencing_token, event) {
            self.queue_bounded(report);
        }
    }

    /// As [`queue_lock_event`](Self::queue_lock_event), for the loss of a lock: never dropped.
    pub(super) fn queue_loss_event(
        &self,
        key: &Key,
        fencing_token: u64,
        event: impl Fn(&dyn EventHandler, EventLock<'_>) + Send + 'static,
    ) {
        if let Some(report) = self.report(key, fencing_token, event) {
            self.run(report);
        }
    }

    fn report(
        &self,
        key: &Key,
        fencing_token: u64,
        event: impl Fn(&dyn EventHandler, EventLock<'_>) + Send + 'static,
    ) -> Option<impl FnOnce() + Send + 'static> {
        if !self.has_listeners() {
            return None;
        }
        let (key, events) = (key.clone(), self.events.clone());
        Some(move || {
            let key = key.name();
            let lock = EventLock { key, fencing_token };
            if observe::IS_ON {
                event(&Observer, lock);
            }
            if let Some(events) = events {
                event(&*events, lock);
            }
        })
    }

    /// Tells what is observed, on the callbacks's thread; costs nothing when nothing is.
    pub(crate) fn queue_observation(&self, tell: impl FnOnce() + Send + 'static) {
        if observe::IS_ON {
            self.queue_bounded(tell);
        }
    }

    /// Whether anybody is told of anything: if not, nobody need know how long it took.
    pub(crate) fn has_listeners(&self) -> bool {
        observe::IS_ON || self.events.is_some()
    }

    /// Tells of an event on this thread.
    pub(crate) fn tell(&self, event: impl FnOnce(&dyn EventHandler)) {
        if let Some(events) = &self.events {
            let _ = catch_unwind(AssertUnwindSafe(|| event(&**events)));
        }
    }

    /// Ends the thread after what has been handed to it so far.
    pub(crate) fn stop(&self) {
        let _ = self.queue.send(Message::Stop);
    }
}

fn deliver(inbox: &Receiver<Message>, backlog: &Backlog, events: Option<&dyn EventHandler>) {
    while let Ok(message) = inbox.recv() {
        let callback = match message {
            Message::Run(callback) => callback,
            Message::Event(callback) => {
                backlog.leave();
                callback
            }
            Message::Stop => return,
        };
        let _ = catch_unwind(AssertUnwindSafe(callback));
        let missed = backlog.missed.swap(0, Ordering::AcqRel);
        if missed > 0 {
            let told: [&dyn EventHandler; 1] = [&Observer];
            for events in told.into_iter().chain(events) {
                let _ = catch_unwind(AssertUnwindSafe(|| events.events_missed(missed)));
            }
        }
    }
}

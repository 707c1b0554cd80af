//! The callback thread of a client. It runs user code: `on_lost` callbacks, event handlers, tracing and metrics. Other
//! threads of the library never wait for this thread, and a panic in user code does not end it. Without an event
//! handler, tracing and metrics, the thread starts with the first callback.
//!
//! Events that a call causes (`acquired`, `contended`, `limits_differ`, `foreign_holder`, `unavailable`, `released`,
//! `write_refused`) run on the caller's thread. All other events are queued for the callback thread. The caller's
//! thread records the metrics of waits and holds, the callback thread those of renewals and retries.
//!
//! The queue has no bound for callbacks and losses: each call of `on_lost` adds one callback, and each held lock at
//! most one loss. Other events recur without end, so at most `MAX_QUEUED_EVENTS` of them are queued.

#[cfg(test)]
#[cfg(not(shuttle))]
mod tests;

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use crate::config::key::Key;
use crate::lease::Lease;
use crate::process::threads::ThreadGroup;
use crate::report::error::Error;
use crate::report::event::{EventHandler, EventLock};
use crate::report::loss::LossReason;
use crate::report::observe;
use crate::report::observe::Observer;
use crate::util::mailbox::{Mailbox, Step};

type Callback = Box<dyn FnOnce() + Send>;

/// The largest number of queued events, at some 200 bytes each. The docs of [`EventHandler::events_missed`] name this
/// number.
const MAX_QUEUED_EVENTS: usize = 65_536;

/// An empty queue keeps room for this many callbacks.
const ROOM_TO_KEEP: usize = 1024;

/// Queues callbacks and events for the callback thread, and never blocks.
pub struct CallbackExecutor {
    queue: Arc<Mailbox<CallbackQueue>>,
    events: Option<Arc<dyn EventHandler>>,
    loss_hook: OnceLock<LossHook>,
    /// Starts the thread. `None` once the thread runs, and after `stop`.
    starter: Mutex<Option<ThreadGroup>>,
}

/// Called for each lost lease, after the lease's channels got the reason. Has to be quick, and must not run user code.
type LossHook = Box<dyn Fn(&Lease) + Send + Sync>;

/// The callbacks and events that wait for the thread.
#[derive(Default)]
struct CallbackQueue {
    waiting: VecDeque<Message>,
    /// How many messages are events.
    events: usize,
    /// Dropped events that have not been reported yet.
    missed: u64,
}

enum Message {
    Callback(Callback),
    Event(Callback),
    /// The thread ends here.
    Stop,
}

impl CallbackQueue {
    /// The next callback, and how many events were dropped. `None` at the end.
    fn next(&mut self) -> Step<Option<(Callback, u64)>> {
        let callback = match self.waiting.pop_front() {
            Some(Message::Callback(callback)) => callback,
            Some(Message::Event(callback)) => {
                self.events -= 1;
                callback
            }
            Some(Message::Stop) => return Step::Return(None),
            None => {
                self.waiting.shrink_to(ROOM_TO_KEEP);
                return Step::Sleep(None);
            }
        };
        Step::Return(Some((callback, std::mem::take(&mut self.missed))))
    }
}

impl CallbackExecutor {
    pub fn start(
        threads: &ThreadGroup,
        events: Option<Arc<dyn EventHandler>>,
    ) -> Result<Arc<Self>, Error> {
        let callbacks = Self {
            queue: Arc::default(),
            events,
            loss_hook: OnceLock::new(),
            starter: Mutex::new(Some(threads.clone())),
        };
        if callbacks.has_listeners() {
            callbacks.start_thread()?;
        }
        Ok(Arc::new(callbacks))
    }

    /// Starts the callback thread, unless it runs already or the client has ended.
    fn start_thread(&self) -> Result<(), Error> {
        let mut starter = self.starter.lock();
        let Some(threads) = &*starter else {
            return Ok(());
        };
        let (queue, handler) = (Arc::clone(&self.queue), self.events.clone());
        threads.spawn("leasehold-callbacks", move || {
            run_queue(&queue, handler.as_deref());
        })?;
        *starter = None;
        Ok(())
    }

    /// Starts the thread for a callback that may be queued later. If no thread can be started now, each later callback
    /// tries again.
    pub fn try_start_thread(&self) {
        let _ = self.start_thread();
    }

    /// An executor without a thread, and a function by which a model runs the queue.
    #[cfg(all(test, shuttle))]
    pub fn for_model() -> (Arc<Self>, impl Fn()) {
        let callbacks = Arc::new(Self {
            queue: Arc::default(),
            events: None,
            loss_hook: OnceLock::new(),
            starter: Mutex::new(None),
        });
        let queue = Arc::clone(&callbacks.queue);
        let deliver = move || {
            while let Some(Step::Return(Some((callback, _)))) = queue.change(CallbackQueue::next) {
                callback();
            }
        };
        (callbacks, deliver)
    }

    /// Queues a callback. The callback runs unless the client ends before.
    pub fn queue_callback(&self, callback: impl FnOnce() + Send + 'static) {
        let callback = Box::new(callback);
        self.queue.post(|queue| {
            queue.waiting.push_back(Message::Callback(callback));
            true
        });
        self.try_start_thread();
    }

    /// Sets the hook for lost leases. Only the first call has an effect.
    pub fn set_loss_hook(&self, hook: impl Fn(&Lease) + Send + Sync + 'static) {
        let _ = self.loss_hook.set(Box::new(hook));
    }

    /// Calls the loss hook for a lost lease, and queues the `lost` event, which is never dropped.
    pub fn report_loss(&self, lease: &Lease, reason: LossReason) {
        if let Some(hook) = self.loss_hook.get() {
            hook(lease);
        }
        let grant = lease.grant();
        self.queue_loss(&grant.key, grant.token, reason);
    }

    /// Queues the `lost` event of a lock, which is never dropped.
    pub fn queue_loss(&self, key: &Key, fencing_token: u64, reason: LossReason) {
        if let Some(event) = self.lock_event(key, fencing_token, move |events, lock| {
            events.lost(lock, &reason);
        }) {
            self.queue_callback(event);
        }
    }

    /// Queues an event. With [`MAX_QUEUED_EVENTS`] in the queue, drops the event and counts it as missed.
    fn queue_bounded(&self, event: impl FnOnce() + Send + 'static) {
        let mut event: Option<Callback> = Some(Box::new(event));
        self.queue.post(|queue| {
            let has_room = queue.events < MAX_QUEUED_EVENTS;
            match event.take_if(|_| has_room) {
                Some(event) => queue.waiting.push_back(Message::Event(event)),
                None => queue.missed += 1,
            }
            queue.events += usize::from(has_room);
            has_room
        });
    }

    /// Queues an event for the client's event handler, if there is one.
    pub fn queue_event(&self, event: impl FnOnce(&dyn EventHandler) + Send + 'static) {
        if let Some(events) = &self.events {
            let events = Arc::clone(events);
            self.queue_bounded(move || event(&*events));
        }
    }

    /// Queues a warning for tracing, metrics and the client's event handler.
    pub fn queue_warning(&self, event: impl Fn(&dyn EventHandler) + Send + 'static) {
        if self.has_listeners() {
            let events = self.events.clone();
            self.queue_bounded(move || {
                if observe::IS_ON {
                    event(&Observer);
                }
                if let Some(events) = events {
                    event(&*events);
                }
            });
        }
    }

    /// Queues an event of a lock for tracing, metrics and the client's event handler. Does nothing if all three are
    /// absent.
    pub fn queue_lock_event(
        &self,
        key: &Key,
        fencing_token: u64,
        event: impl Fn(&dyn EventHandler, EventLock<'_>) + Send + 'static,
    ) {
        if let Some(event) = self.lock_event(key, fencing_token, event) {
            self.queue_bounded(event);
        }
    }

    /// The call that passes an event of a lock to all its receivers; `None` if there are none.
    fn lock_event(
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

    /// Queues a call that records metrics. Does nothing without the features `tracing` and `metrics`.
    pub fn queue_observation(&self, record: impl FnOnce() + Send + 'static) {
        if observe::IS_ON {
            self.queue_bounded(record);
        }
    }

    /// Whether tracing, metrics or an event handler receive events. If not, callers measure no durations for events.
    pub fn has_listeners(&self) -> bool {
        observe::IS_ON || self.events.is_some()
    }

    /// Passes an event to tracing, metrics and the client's event handler on this thread.
    pub fn call_all(&self, event: impl Fn(&dyn EventHandler)) {
        if observe::IS_ON {
            event(&Observer);
        }
        self.call_handler(event);
    }

    /// Calls the client's event handler, if it has one, on this thread, and drops a panic of the handler.
    pub fn call_handler(&self, event: impl FnOnce(&dyn EventHandler)) {
        if let Some(events) = &self.events {
            let _ = catch_unwind(AssertUnwindSafe(|| event(&**events)));
        }
    }

    /// Ends the callback thread after everything that is queued so far.
    pub fn stop(&self) {
        let not_started = self.starter.lock().take();
        match not_started {
            // Callbacks are user code, so they are dropped after the unlock.
            Some(_) => drop(self.queue.stop(std::mem::take)),
            None => self.queue.post(|queue| {
                queue.waiting.push_back(Message::Stop);
                true
            }),
        }
    }
}

fn run_queue(queue: &Mailbox<CallbackQueue>, handler: Option<&dyn EventHandler>) {
    while let Some(Some((callback, missed))) = queue.wait(CallbackQueue::next) {
        if missed > 0 {
            let observer: [&dyn EventHandler; 1] = [&Observer];
            for events in observer.into_iter().chain(handler) {
                let _ = catch_unwind(AssertUnwindSafe(|| events.events_missed(missed)));
            }
        }
        let _ = catch_unwind(AssertUnwindSafe(callback));
    }
    // Later callbacks are dropped at once.
    drop(queue.stop(std::mem::take));
}

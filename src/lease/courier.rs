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
use crate::event::{EventLock, Events};
use crate::key::Key;
use crate::lease::Lease;
use crate::observe::{self, Observer};
use crate::thread::Crew;

type Errand = Box<dyn FnOnce() + Send>;

/// How many events may wait for the thread, each with some 200 bytes. [`Events::events_missed`] documents the
/// number, too.
const MOST_EVENTS: usize = 65_536;

/// Hands errands to the courier's thread. Sending never blocks: what user code cannot keep up with
/// waits here.
pub(crate) struct Courier {
    errands: Sender<Message>,
    backlog: Arc<Backlog>,
    events: Option<Arc<dyn Events>>,
    when_lost: OnceLock<WhenLost>,
}

/// Called for each lease that is lost, once its signals are set. Quick; never user code.
type WhenLost = Box<dyn Fn(&Lease) + Send + Sync>;

enum Message {
    Run(Errand),
    Event(Errand),
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

impl Courier {
    /// Starts the thread.
    pub(crate) fn start(crew: &Crew, events: Option<Arc<dyn Events>>) -> Result<Arc<Self>, Error> {
        let (errands, inbox) = unbounded();
        let backlog = Arc::<Backlog>::default();
        let (waiting, listener) = (Arc::clone(&backlog), events.clone());
        crew.spawn("leasehold-callbacks", move || {
            deliver(&inbox, &waiting, listener.as_deref());
        })?;
        Ok(Arc::new(Self {
            errands,
            backlog,
            events,
            when_lost: OnceLock::new(),
        }))
    }

    /// One without its thread: a model has its errands run by what this returns.
    #[cfg(all(test, shuttle))]
    pub(crate) fn of_a_model() -> (Arc<Self>, impl Fn()) {
        let (errands, inbox) = unbounded();
        let courier = Self {
            errands,
            backlog: Arc::default(),
            events: None,
            when_lost: OnceLock::new(),
        };
        let deliver = move || {
            while let Ok(Message::Run(errand) | Message::Event(errand)) = inbox.try_recv() {
                errand();
            }
        };
        (Arc::new(courier), deliver)
    }

    pub(crate) fn run(&self, errand: impl FnOnce() + Send + 'static) {
        // Fails only after the client has ended, and its callbacks with it.
        let _ = self.errands.send(Message::Run(Box::new(errand)));
    }

    /// Who of this client is to know when a lease was lost; set once.
    pub(crate) fn when_lost(&self, hook: impl Fn(&Lease) + Send + Sync + 'static) {
        let _ = self.when_lost.set(Box::new(hook));
    }

    pub(super) fn lost(&self, lease: &Lease) {
        if let Some(hook) = self.when_lost.get() {
            hook(lease);
        }
    }

    /// As [`run`](Self::run), for events, which recur: with [`MOST_EVENTS`] waiting it drops the event and counts it.
    fn run_event(&self, event: impl FnOnce() + Send + 'static) {
        if self.backlog.enter() {
            let _ = self.errands.send(Message::Event(Box::new(event)));
        }
    }

    /// Tells of an event on the courier's thread; costs nothing when nobody listens.
    pub(crate) fn tell_later(&self, event: impl FnOnce(&dyn Events) + Send + 'static) {
        if let Some(events) = &self.events {
            let events = Arc::clone(events);
            self.run_event(move || event(&*events));
        }
    }

    /// Tells of what befell a lock, on the courier's thread: to who observes, and to who listens. Costs
    /// nothing when nobody does.
    pub(crate) fn report_later(
        &self,
        key: &Key,
        fencing_token: u64,
        event: impl Fn(&dyn Events, EventLock<'_>) + Send + 'static,
    ) {
        if let Some(report) = self.report(key, fencing_token, event) {
            self.run_event(report);
        }
    }

    /// As [`report_later`](Self::report_later), for the loss of a lock: never dropped.
    pub(super) fn report_loss(
        &self,
        key: &Key,
        fencing_token: u64,
        event: impl Fn(&dyn Events, EventLock<'_>) + Send + 'static,
    ) {
        if let Some(report) = self.report(key, fencing_token, event) {
            self.run(report);
        }
    }

    fn report(
        &self,
        key: &Key,
        fencing_token: u64,
        event: impl Fn(&dyn Events, EventLock<'_>) + Send + 'static,
    ) -> Option<impl FnOnce() + Send + 'static> {
        if !self.is_heard() {
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

    /// Tells what is observed, on the courier's thread; costs nothing when nothing is.
    pub(crate) fn observe_later(&self, tell: impl FnOnce() + Send + 'static) {
        if observe::IS_ON {
            self.run_event(tell);
        }
    }

    /// Whether anybody is told of anything: if not, nobody need know how long it took.
    pub(crate) fn is_heard(&self) -> bool {
        observe::IS_ON || self.events.is_some()
    }

    /// Tells of an event on this thread.
    pub(crate) fn tell(&self, event: impl FnOnce(&dyn Events)) {
        if let Some(events) = &self.events {
            let _ = catch_unwind(AssertUnwindSafe(|| event(&**events)));
        }
    }

    /// Ends the thread after what has been handed to it so far.
    pub(crate) fn stop(&self) {
        let _ = self.errands.send(Message::Stop);
    }
}

fn deliver(inbox: &Receiver<Message>, backlog: &Backlog, events: Option<&dyn Events>) {
    while let Ok(message) = inbox.recv() {
        let errand = match message {
            Message::Run(errand) => errand,
            Message::Event(errand) => {
                backlog.leave();
                errand
            }
            Message::Stop => return,
        };
        let _ = catch_unwind(AssertUnwindSafe(errand));
        let missed = backlog.missed.swap(0, Ordering::AcqRel);
        if missed > 0 {
            let told: [&dyn Events; 1] = [&Observer];
            for events in told.into_iter().chain(events) {
                let _ = catch_unwind(AssertUnwindSafe(|| events.events_missed(missed)));
            }
        }
    }
}
